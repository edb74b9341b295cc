"""Families of checkpoints: whose files they are, what their config means, which tensors make ours."""

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from deltafin.errors import ConfigError
from deltafin.families import kimi

FAMILIES: tuple[ModuleType, ...] = (kimi,)


def family(raw: Mapping[str, Any]) -> ModuleType:
    """Return the family that reads a ``config.json``; raise ``ConfigError`` naming a ``model_type`` nobody reads."""
    if not isinstance(raw, Mapping) or "model_type" not in raw:
        raise ConfigError("config.json has no model_type", "is this the config.json of a model?")
    for candidate in FAMILIES:
        if candidate.matches(raw):
            return candidate
    known = ", ".join(name for f in FAMILIES for name in f.MODEL_TYPES)
    raise ConfigError(f"model_type {raw['model_type']!r} in config.json is not supported", f"deltafin runs {known}")
