"""Families of checkpoints: whose files they are, what their config means, which tensors make ours."""

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from deltafin.errors import ConfigError
from deltafin.families import kimi

FAMILIES: tuple[ModuleType, ...] = (kimi,)


def family(raw: Mapping[str, Any]) -> ModuleType:
    """Return the family that reads a ``config.json``; raise ``ConfigError`` naming a ``model_type`` nobody reads."""
    for candidate in FAMILIES:
        if candidate.matches(raw):
            return candidate
    known = ", ".join(name for f in FAMILIES for name in f.MODEL_TYPES)
    raise ConfigError(f"model_type {raw.get('model_type')!r} is not supported", f"deltafin runs {known}")
