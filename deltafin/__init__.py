"""deltafin: a local runtime for hybrid linear-attention models."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltafin.api import Conversation, Model, load
    from deltafin.errors import DeltafinError
    from deltafin.sampling import Sampler
    from deltafin.session import Session

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
