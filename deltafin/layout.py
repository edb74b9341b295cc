"""What a checkpoint's config and headers tell, without a byte of its weights."""

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from deltafin import families
from deltafin.config import ModelConfig, MoE
from deltafin.errors import CheckpointError
from deltafin.headers import Entry, Shape
from deltafin.model.decoder import parts
from deltafin.quant import GROUP

FLOATS = (("BF16", "F32", "F16", "F64"),)
PACKED = (("U8",), ("U8", "F8_E8M0"))
"""Types that a dense tensor, and that the codes and the scales of a packed one, may be stored in."""

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
NUMBERED = re.compile(r"(.*-)(\d+)(-of-0*(\d+)\.safetensors)")


def shards(raw: Mapping[str, Any], present: Collection[str], index: Any, where: str) -> list[str]:
    """Return the names of the files that hold the model: what an index lists, or ``model.safetensors``, or all.

    ``present`` are the names of the files that there are, ``index`` is the parsed index called ``where`` in errors,
    ``None`` without one. A listed file that is not present is returned too, unless it holds only parts that are passed
    over; without an index, numbered names tell how many there should be.
    """
    family = families.family(raw)
    if index is not None:
        weight_map = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise CheckpointError(f"{where} has no weight_map", "fetch the file again")
        found = set(weight_map.values()) & set(present)
        absent = ((name, f) for name, f in weight_map.items() if f not in found)
        return sorted(found | {f for name, f in absent if family.skipped(name, raw) is None})
    if SINGLE in present:
        return [SINGLE]
    found = {name for name in present if name.endswith(".safetensors") and "/" not in name}
    numbered = [m for m in map(NUMBERED.fullmatch, found) if m]
    return sorted(found | {f"{m[1]}{i:0{len(m[2])}}{m[3]}" for m in numbered for i in range(1, int(m[4]) + 1)})


class Layout:
    """A checkpoint as the hub publishes it, seen through its family: which stored tensor is which of ours.

    ``raw`` is its ``config.json``, ``files`` the names of its files, ``headers`` their tensors; ``where`` names it in
    errors. ``totals`` counts parameters, bytes, and of these the bytes of routed experts and of scales; ``skipped``
    counts the tensors of parts that a text model does not run; ``expert_formats`` has what a layer's experts are
    stored as, ``expert_bytes`` the most that one of them takes. Raises ``CheckpointError`` or ``ConfigError`` when it
    is not a complete, consistent model.
    """

    def __init__(
        self, raw: Mapping[str, Any], files: Sequence[str], headers: Sequence[Mapping[str, Entry]], where: str
    ) -> None:
        self.where = where
        self.raw = raw
        self.family = families.family(raw)
        self.files = files
        self.entries: dict[str, Entry] = {}
        for file, header in zip(files, headers, strict=True):
            for name, entry in header.items():
                if name in self.entries:
                    raise CheckpointError(f"{name} is in {files[self.entries[name].file]} and again in {file}")
                self.entries[name] = entry
        shapes: Mapping[str, Shape] = {name: e.shape for name, e in self.entries.items()}
        self.config: ModelConfig = self.family.config(raw, shapes)
        self.rules = self.family.tensors(self.config, shapes)
        self.experts = {
            i: (layer.ffn, self.family.expert(self.config, shapes, i))
            for i, layer in enumerate(self.config.layers)
            if isinstance(layer.ffn, MoE)
        }
        self.skipped = Counter[str]()
        self.totals = Counter[str]()
        self.expert_formats: dict[int, set[str]] = {layer: set() for layer in self.experts}
        self.expert_bytes = dict.fromkeys(self.experts, 0)
        self._account()

    def _account(self) -> None:
        """Check that every tensor of ours has its sources and every stored tensor a use; count what is found."""
        used, missing = set[str](), list[str]()
        for part in parts(self.config):
            for source in (source for name in part.names() for source in self.rules[name].sources):
                names = self.names(source)
                used.update(names)
                if not names:
                    missing.append(source)
        for layer, (moe, name_of) in self.experts.items():
            inner = self.config.width if moe.latent is None else moe.latent
            shapes = (moe.width, inner), (moe.width, inner), (inner, moe.width)
            for x in range(moe.experts):
                size = 0
                for source, shape in zip(name_of(x), shapes, strict=True):
                    names = self.names(source)
                    used.update(names)
                    size += sum(self.entries[name].stop - self.entries[name].start for name in names)
                    if not names:
                        missing.append(source)
                    else:
                        self._check_expert(names, shape, layer, x)
                        packed = len(names) > 1
                        self.expert_formats[layer].add("MXFP4" if packed else self.entries[names[0]].dtype)
                self.expert_bytes[layer] = max(self.expert_bytes[layer], size)
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise CheckpointError(
                f"{self.where} lacks {', '.join(missing[:3])}{more}", "the files do not belong to this config.json"
            )
        for name, e in self.entries.items():
            if name in used:
                scale, packed = name.endswith(".weight_scale"), name.endswith(".weight_packed")
                self.totals["parameters"] += 0 if scale else math.prod(e.shape) * (1 + packed)
                self.totals["bytes"] += e.stop - e.start
                self.totals["expert bytes"] += (e.stop - e.start) * (".experts." in name)
                self.totals["scale bytes"] += (e.stop - e.start) * scale
                continue
            group = self.family.skipped(name, self.raw)
            if group is None:
                raise CheckpointError(
                    f"{name} in {self.files[e.file]} has no place in this model",
                    "a tensor that is not understood could change what the model says, so it is not passed over",
                )
            self.skipped[group] += 1

    def _check_expert(self, names: tuple[str, ...], shape: Shape, layer: int, x: int) -> None:
        rows, columns = shape
        expected = [shape] if len(names) == 1 else [(rows, columns // 2), (rows, columns // GROUP)]
        for name, want in zip(names, expected, strict=True):
            if self.entries[name].shape != want:
                raise CheckpointError(f"{name} is {self.entries[name].shape}, but config.json makes it {want}")

    def names(self, source: str) -> tuple[str, ...]:
        """Return the stored tensors that hold a source, packed with scales or as it is, and check their types."""
        for names, types in ((f"{source}_packed", f"{source}_scale"), PACKED), ((source,), FLOATS):
            if all(name in self.entries for name in names):
                for name, supported in zip(names, types, strict=True):
                    if self.entries[name].dtype not in supported:
                        raise CheckpointError(
                            f"{name} is stored as {self.entries[name].dtype}, which is not supported",
                            f"deltafin reads {', '.join(supported)} there",
                        )
                return names
        return ()
