"""deltafin: a local runtime for hybrid linear-attention models."""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltafin.api import Conversation, Model, load
    from deltafin.errors import DeltafinError
    from deltafin.sampling import Sampler
    from deltafin.session import Session

# Threads that wait by spinning starve each other as soon as the machine has other work: ten times slower was measured.
# Read by the thread pool of torch when torch is imported; a choice of the user's stays.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

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
