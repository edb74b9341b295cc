"""deltafin: a local runtime for hybrid linear-attention models."""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltafin.api import Conversation, Model, load
    from deltafin.errors import DeltafinError
    from deltafin.sampling import Sampler
    from deltafin.session import Session

# How long a thread that waits for work spins before it sleeps, in turns of some hundredths of a microsecond: longer
# than the gap between two operations, shorter than would starve another program, or the other of the two thread pools
# in this process. Read when torch and Numba are imported; a choice of the user's stays.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "4000")

# Torch then asks Linux for large pages, for packed weights and other large tensors: with fewer pages to look up, int8
# weights are decoded with in 5 % less time. Only whole pages are large, so no memory is lost.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

__version__ = "0.1.0"
__all__ = ["Conversation", "DeltafinError", "Model", "Sampler", "Session", "__version__", "load"]

_HOMES = {
    "Conversation": "api",
    "DeltafinError": "errors",
    "Model": "api",
    "Sampler": "sampling",
    "Session": "session",
    "load": "api",
}


def __getattr__(name: str) -> Any:
    """Import on first use, so that ``import deltafin`` costs nothing and torch comes only with a model."""
    if name not in _HOMES:
        raise AttributeError(f"module 'deltafin' has no attribute {name!r}")
    return getattr(import_module(f"deltafin.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
