"""Opening a model's files: a Hugging Face snapshot, read in place through its family.

Nothing is copied: tensors are views of memory-mapped files, packed experts stay packed. What headers can tell is
checked when the files are opened: missing, unknown, wrongly typed or shaped tensors, and cut files.
"""

import hashlib
import json
import math
import mmap
import re
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deltafin import families
from deltafin.config import ModelConfig, MoE
from deltafin.errors import CheckpointError
from deltafin.model.decoder import parts
from deltafin.ops import Expert
from deltafin.quant import GROUP, MXFP4, check_scales
from deltafin.weights import Weight

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U8": torch.uint8,
    "F8_E8M0": torch.uint8,  # scales: the byte is the exponent
}
FLOATS = (("BF16", "F32", "F16", "F64"),)
PACKED = (("U8",), ("U8", "F8_E8M0"))
"""Types that a dense tensor, and that the codes and the scales of a packed one, may be stored in."""

LARGEST_HEADER = 100_000_000  # the format's own limit
CHECKED_AT_ONCE = 64 << 20
"""Bytes of expert scales up to which all are checked when a model is opened; beyond, each expert on first use."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one tensor lies: bytes ``start`` to ``stop`` of its file."""

    file: int
    dtype: str
    shape: Shape
    start: int
    stop: int


def read_json(path: Path) -> Any:
    """Read a JSON file; ``CheckpointError`` names it when it is missing or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.parent} has no {path.name}", "is this the folder of a model?") from error
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read ({error})", "fetch the file again") from error


def read_header(path: Path, file: int = 0) -> dict[str, Entry]:
    """Read and check the header of one safetensors file; ``CheckpointError`` names the file and both sizes."""
    again = "the file is cut or damaged; fetch it again"
    size = path.stat().st_size
    with path.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if size < 8 or length > LARGEST_HEADER:
            raise CheckpointError(f"{path} is not a safetensors file ({size} bytes)", again)
        if size < 8 + length:
            raise CheckpointError(f"{path} has {size} bytes, but its header alone ends at byte {8 + length}", again)
        text = f.read(length)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        entries = {
            name: Entry(file, e["dtype"], tuple(e["shape"]), *(8 + length + at for at in e["data_offsets"]))
            for name, e in header.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} has a header that cannot be read ({error})", again) from error
    end = max((e.stop for e in entries.values()), default=8 + length)
    if size != end:
        raise CheckpointError(f"{path} has {size} bytes, but its header describes {end}", again)
    for name, e in entries.items():
        if e.dtype not in DTYPES:
            continue  # only an error for a tensor that is used
        if e.stop - e.start != math.prod(e.shape) * DTYPES[e.dtype].itemsize or e.start < 8 + length:
            raise CheckpointError(f"{path}: {name} is {e.dtype} {e.shape} in {e.stop - e.start} bytes", again)
    return entries


class Snapshot:
    """A folder as the hub publishes it, seen through its family: read our tensors by our names.

    ``totals`` counts parameters, bytes, and of these the bytes of routed experts and of scales; ``skipped`` counts the
    tensors of parts that a text model does not run; ``expert_formats`` has what a layer's experts are stored as.
    Raises ``CheckpointError`` or ``ConfigError`` when the folder is not a complete, consistent model.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.raw = read_json(path / "config.json")
        self.family = families.family(self.raw)
        self.files = self._shards()
        self.entries: dict[str, Entry] = {}
        for i, file in enumerate(self.files):
            for name, entry in read_header(file, i).items():
                if name in self.entries:
                    raise CheckpointError(f"{name} is in {self.files[self.entries[name].file]} and again in {file}")
                self.entries[name] = entry
        shapes: Mapping[str, Shape] = {name: e.shape for name, e in self.entries.items()}
        self.config: ModelConfig = self.family.config(self.raw, shapes)
        self.rules = self.family.tensors(self.config, shapes)
        self._experts = {
            i: (layer.ffn, self.family.expert(self.config, shapes, i))
            for i, layer in enumerate(self.config.layers)
            if isinstance(layer.ffn, MoE)
        }
        self.skipped = Counter[str]()
        self.totals = Counter[str]()
        self.expert_formats: dict[int, set[str]] = {layer: set() for layer in self._experts}
        self._account()
        self._maps: dict[int, tuple[mmap.mmap, Tensor]] = {}
        if self.totals["scale bytes"] <= CHECKED_AT_ONCE:
            for layer, (moe, _) in self._experts.items():
                for x in range(moe.experts):
                    self.expert(layer, x)

    def read(self, name: str) -> Weight:
        """Return one of our tensors by our name (``layers.3.mixer.q``): a view where its rule changes nothing."""
        rule = self.rules[name]
        found = [self._stored(source) for source in rule.sources]
        if rule.make is None:
            return found[0]
        try:
            return rule.make(*(_dense(tensor) for tensor in found))
        except ValueError as error:
            raise CheckpointError(f"{self.describe(name)}: {error}", "fetch the file again") from error

    def describe(self, name: str) -> str:
        """Say where one of our tensors comes from, for an error message."""
        return f"{' and '.join(self.rules[name].sources)} in {self.path}"

    def expert(self, layer: int, x: int) -> Expert:
        """Return one routed expert: views of what is stored."""
        _, names = self._experts[layer]
        return Expert(*(self._stored(name) for name in names(x)))

    def release(self, name: str) -> int:
        """Let the system drop one of our tensors' pages; return how many bytes nothing else of ours is made from.

        Only where the pages lie changes: a view that is still there reads them anew.
        """
        sources = self.rules[name].sources
        others = {source for other, rule in self.rules.items() if other != name for source in rule.sources}
        return sum(self._release(source) * (source not in others) for source in sources)

    def release_expert(self, layer: int, x: int) -> None:
        """Let the system drop the pages of one routed expert."""
        for source in self._experts[layer][1](x):
            self._release(source)

    def _release(self, source: str) -> int:
        size = 0
        for e in (self.entries[name] for name in self._names(source)):
            size += e.stop - e.start
            if e.file in self._maps and hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
                start = e.start - e.start % mmap.PAGESIZE
                self._maps[e.file][0].madvise(mmap.MADV_DONTNEED, start, e.stop - start)
        return size

    @cached_property
    def fingerprint(self) -> str:
        """Identify the model: its config, headers, and a sample of each file's bytes."""
        digest = hashlib.sha256(repr(self.config).encode())
        for file in self.files:
            with file.open("rb") as f:
                size = f.seek(0, 2)
                for at in sorted({0, size // 2, max(0, size - (1 << 16))}):
                    f.seek(at)
                    digest.update(f.read(1 << 16))
        return digest.hexdigest()

    def _shards(self) -> list[Path]:
        """Return the files that hold the model: what an index lists, or ``model.safetensors``, or all there are.

        All that are missing are named at once; without an index, numbered names tell how many there should be.
        """
        index, single = self.path / "model.safetensors.index.json", self.path / "model.safetensors"
        if index.exists():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
                raise CheckpointError(f"{index} has no weight_map", "fetch the file again")
            present = {f for f in set(weight_map.values()) if (self.path / f).exists()}
            absent = ((name, f) for name, f in weight_map.items() if f not in present)
            listed = sorted(present | {f for name, f in absent if self.family.skipped(name, self.raw) is None})
        elif single.exists():
            listed = [single.name]
        else:
            present = sorted(self.path.glob("*.safetensors"))
            numbered = (re.fullmatch(r"(.*-)(\d+)(-of-0*(\d+)\.safetensors)", p.name) for p in present)
            expected = {f"{m[1]}{i:0{len(m[2])}}{m[3]}" for m in numbered if m for i in range(1, int(m[4]) + 1)}
            listed = sorted(expected | {p.name for p in present})
        missing = [name for name in listed if not (self.path / name).exists()]
        if missing:
            raise CheckpointError(
                f"{self.path} lacks {len(missing)} of {len(listed)} files: {', '.join(missing)}", "fetch them again"
            )
        if not listed:
            raise CheckpointError(f"{self.path} has no *.safetensors file", "deltafin reads safetensors checkpoints")
        return [self.path / name for name in listed]

    def _account(self) -> None:
        """Check that every tensor of ours has its sources and every stored tensor a use; count what is found."""
        used, missing = set[str](), list[str]()
        for part in parts(self.config):
            for source in (source for name in part.names() for source in self.rules[name].sources):
                names = self._names(source)
                used.update(names)
                if not names:
                    missing.append(source)
        for layer, (moe, name_of) in self._experts.items():
            inner = self.config.width if moe.latent is None else moe.latent
            shapes = (moe.width, inner), (moe.width, inner), (inner, moe.width)
            for x in range(moe.experts):
                for source, shape in zip(name_of(x), shapes, strict=True):
                    names = self._names(source)
                    used.update(names)
                    if not names:
                        missing.append(source)
                    else:
                        self._check_expert(names, shape, layer, x)
                        packed = len(names) > 1
                        self.expert_formats[layer].add("MXFP4" if packed else self.entries[names[0]].dtype)
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise CheckpointError(
                f"{self.path} lacks {', '.join(missing[:3])}{more}", "the files do not belong to this config.json"
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

    def _names(self, source: str) -> tuple[str, ...]:
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

    def _stored(self, source: str) -> Tensor | MXFP4:
        names = self._names(source)
        if len(names) == 1:
            return self._view(names[0])
        packed = MXFP4(self._view(names[0]), self._view(names[1]))
        rows, columns = packed.shape
        if tuple(packed.scales.shape) != (rows, columns // GROUP) or columns % GROUP:
            raise CheckpointError(f"{names[1]} is {tuple(packed.scales.shape)}, which does not fit {names[0]}")
        check_scales(packed, names[1])
        return packed

    def _view(self, name: str) -> Tensor:
        e = self.entries[name]
        if e.file not in self._maps:
            with self.files[e.file].open("rb") as f:  # read-only: a private map would count as memory promised
                mapped = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The given buffer is not writable")  # nothing writes to weights
                self._maps[e.file] = mapped, torch.frombuffer(mapped, dtype=torch.uint8)
        part, dtype = self._maps[e.file][1][e.start : e.stop], DTYPES[e.dtype]
        return (part.clone() if e.start % dtype.itemsize else part).view(dtype).view(e.shape)


def _dense(weight: Weight) -> Tensor:
    if not isinstance(weight, Tensor):
        raise ValueError("this tensor must not be packed")
    return weight
