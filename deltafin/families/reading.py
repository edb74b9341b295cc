"""Reading other people's config files strictly: every field is understood, ignored by name, or refused."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from deltafin.errors import ConfigError

REQUIRED = object()


@dataclass
class Fields:
    """The fields of one JSON object; ``where`` names it in errors. Asking for a field marks it as understood."""

    raw: Mapping[str, Any]
    where: str

    def __post_init__(self) -> None:
        if not isinstance(self.raw, Mapping):
            raise ConfigError(f"{self.where} is not a JSON object")
        self.understood: set[str] = set()

    def get(self, name: str, default: Any = REQUIRED) -> Any:
        """Return a field as it stands, or ``default`` where it is absent or null."""
        self.understood.add(name)
        value = self.raw.get(name)
        if value is None:
            if default is REQUIRED:
                raise ConfigError(f"{self.where} lacks {name}", "the file may be cut or belong to another model")
            return default
        return value

    def integer(self, name: str, default: Any = REQUIRED, least: int = 1) -> Any:
        """Return an integer of at least ``least``, or ``default``."""
        return self._checked(name, default, lambda v: type(v) is int and v >= least, f"an integer from {least}")

    def number(self, name: str, default: Any = REQUIRED) -> Any:
        """Return a finite number, or ``default``."""
        ok = lambda v: type(v) in (int, float) and abs(v) < 1e300  # noqa: E731
        return self._checked(name, default, ok, "a number")

    def flag(self, name: str, default: Any = REQUIRED) -> Any:
        """Return true or false, or ``default``."""
        return self._checked(name, default, lambda v: type(v) is bool, "true or false")

    def integers(self, name: str) -> list[int]:
        """Return a list of integers."""
        ok = lambda v: isinstance(v, list) and all(type(i) is int for i in v)  # noqa: E731
        return self._checked(name, REQUIRED, ok, "a list of integers")

    def only(self, name: str, supported: Collection[Any], absent: Any) -> Any:
        """Return a field that must have one of the ``supported`` values; ``absent`` is what its absence means."""
        value = self.get(name, absent)
        if not any(value == s and type(value) is type(s) for s in supported):
            raise ConfigError(f"{name} {_shown(value)} is not supported", f"found in {self.where}")
        return value

    def finish(self, ignored: Collection[str]) -> None:
        """Refuse every field that nobody asked for and that is not ``ignored``."""
        for name in sorted(self.raw.keys() - self.understood - set(ignored)):
            raise ConfigError(
                f"{name} {_shown(self.raw[name])} is not supported",
                f"found in {self.where}; a field that is not understood could change what the model says",
            )

    def _checked(self, name: str, default: Any, ok: Any, expected: str) -> Any:
        value = self.get(name, default)
        if value is not default and not ok(value):
            raise ConfigError(f"{name} {_shown(value)} in {self.where} is not {expected}")
        return value


def _shown(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 80 else text[:77] + "..."
