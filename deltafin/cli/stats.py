"""What is said about an answer: its tokens and speed, and where its time and its bytes went."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from deltafin.cli.plan import size
from deltafin.cli.text import report

if TYPE_CHECKING:
    from deltafin.api import Model, Stats

SHADES = {"disk wait": "░", "experts": "█", "attention": "▓", "head": "▒", "other": "·"}
"""How each part of a token's time is drawn."""

BAR = 50
"""Characters of a token's bar."""


def account(stats: "Stats", model: "Model") -> str:
    """Return the lines about an answer; what was not counted is left out."""
    lines = [report(stats)]
    counted = stats.counted
    if counted.get("misses") or counted.get("hits"):
        lines.append(experts(stats, measured(model, counted)))
    if (carried := counted.get("carried", {})).get("transfers") and stats.generated_tokens > 1:
        tokens = stats.generated_tokens - 1
        each = size(carried["bytes"] / tokens), round(carried["transfers"] / tokens)
        lines.append(f"{each[0]} a token between memory and GPU, in {each[1]} transfers")
    if stats.generated_tokens > 1 and (parts := by_part(counted, stats.generate_seconds)):
        lines += bar(parts, stats.generated_tokens - 1)
    return "\n".join([*lines, *counted.get("notes", ())])


def by_part(counted: Mapping[str, Any], total: float) -> dict[str, float]:
    """Return the seconds of each part of a token that is known, the rest as "other"; empty where nothing is."""
    parts = dict(counted.get("seconds", {}))
    if not parts and "wait" in counted:
        parts = {"disk wait": counted["wait"], "experts": counted["compute"]}
    unknown = {"other"} if "wait" in counted else {"other", "disk wait"}  # mapped experts do not know of waits
    known = {part: parts[part] for part in SHADES if part in parts and part not in unknown}
    return known | {"other": max(0.0, total - sum(known.values()))} if known else {}


def experts(stats: "Stats", disk_gbs: float | None) -> str:
    """Return one line about the experts of an answer: found in memory, read from the disk and how fast."""
    counted = stats.counted
    used = counted["hits"] + counted["misses"]
    line = f"experts {counted['hits'] / used:.1%} in memory"
    if counted.get("foreseen"):
        line += f", {counted['foreseen'] / used:.1%} read ahead"
    if counted.get("bytes"):
        gbs = counted["bytes"] / stats.generate_seconds / 1e9
        share = f" ({gbs / disk_gbs:.0%} of the {disk_gbs:.2f} GB/s it gives)" if disk_gbs else ""
        line += f", {size(counted['bytes'] / max(1, stats.generated_tokens - 1))} read a token, "
        line += f"disk {gbs:.2f} GB/s{share}"
    return line


def bar(parts: Mapping[str, float], tokens: int) -> list[str]:
    """Return a bar of an average token's time and what its shades mean; ``parts`` are seconds of ``tokens`` tokens."""
    total = sum(parts.values()) or 1.0
    drawn, done, ends = "", 0.0, 0
    for part, seconds in parts.items():
        done += seconds
        drawn += SHADES[part] * (round(BAR * done / total) - ends)
        ends = len(drawn)
    legend = (f"{SHADES[part]} {part} {1000 * seconds / tokens:.2f} ms" for part, seconds in parts.items())
    return [f"a token {1000 * total / tokens:.2f} ms  {drawn}", "  ".join(legend)]


def measured(model: "Model", counted: Mapping[str, Any]) -> float | None:
    """Return the speed of the model's disk, 1e9 bytes a second, where it was measured before."""
    if not counted.get("bytes"):
        return None
    from deltafin.measure import known_disk

    disk = known_disk(model.path, counted["bytes"] // max(1, counted["misses"]))
    return disk.gbs if disk else None
