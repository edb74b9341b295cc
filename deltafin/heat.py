"""How hot each expert of a model is, remembered between runs in the cache folder."""

import json
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from deltafin import machine
from deltafin.policy import AgedFrequency, Key


def file_of(fingerprint: str) -> Path | None:
    """Return where the heat of a model's experts is kept; None where nothing can be."""
    folder = machine.cache_folder()
    return folder and folder / f"heat-{fingerprint[:32]}.json"


def read(path: Path | None) -> dict[Key, float]:
    """Return what was kept; nothing where there is none, or a file that something else has written."""
    with suppress(OSError, ValueError, TypeError):
        if path is not None:
            kept = json.loads(path.read_text(encoding="utf-8"))
            return {(int(layer), int(x)): float(heat) for layer, x, heat in kept if math.isfinite(heat)}
    return {}


def keep(path: Path, policies: Iterable[AgedFrequency]) -> None:
    """Write the heat that some policies have come to know; that this cannot be done is no reason to complain."""
    heat = merged(policies)
    if not heat:
        return
    content = json.dumps([[layer, x, round(value, 6)] for (layer, x), value in heat.items()])
    machine.keep(path, content)


def merged(policies: Iterable[AgedFrequency]) -> Mapping[Key, float]:
    """Return the heat of all experts that policies know, the hottest first."""
    found: dict[Key, float] = {}
    for policy in policies:
        for key, value in policy.heat.items():
            found[key] = max(value, found.get(key, 0.0))
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))
