"""Where every byte of a store goes, and what it is made from: known from headers alone."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deltafin.errors import CheckpointError, UsageError
from deltafin.executor import EXACT
from deltafin.headers import DTYPES, Shape
from deltafin.layout import Layout
from deltafin.model.decoder import parts
from deltafin.ops import Expert
from deltafin.quant import GROUP
from deltafin.store import CHECKSUMS, EXPERTS, PAGE, RESIDENT, Unit, experts_file
from deltafin.weights import matrices, specs

ENCODINGS = {"keep": None, "mxfp4": "MXFP4", "int8": "INT8", "bf16": "BF16"}
"""What an option asks for, and the format that this is."""

LINE = 64
"""What a slab's tensors begin on a multiple of."""

NAMES = {dtype: name for name, dtype in reversed(DTYPES.items())}


@dataclass(frozen=True, slots=True)
class Stored:
    """A matrix or vector by its format: MXFP4, INT8, or the type that a plain one has."""

    format: str
    shape: Shape

    def tensors(self) -> list[tuple[str, str, Shape]]:
        """Return end of name, type and shape of the tensors that hold it."""
        rows, columns = self.shape if len(self.shape) == 2 else (0, 0)
        match self.format:
            case "MXFP4":
                return [(".codes", "U8", (rows, columns // 2)), (".scales", "U8", (rows, columns // GROUP))]
            case "INT8":
                return [(".codes", "I8", self.shape), (".scales", "F32", (rows,))]
        return [("", self.format, self.shape)]


@dataclass(frozen=True, slots=True)
class Job:
    """One of our tensors, or a part of it that can be moved alone.

    ``inputs`` are the stored tensors that it is made from: by ``make``, by packing or unpacking to ``target``, or by
    moving its bytes. ``outputs`` are the places in ``file`` of the tensors that hold it. ``kind`` is our name without
    the layer.
    """

    kind: str
    inputs: tuple[str, ...]
    source: Stored
    target: Stored
    make: Callable[..., Tensor] | None
    file: int
    outputs: tuple[int, ...]

    @property
    def encodes(self) -> bool:
        """Whether it is stored in another format than it came in."""
        return self.source.format != self.target.format

    def units(self) -> list[Unit]:
        """Return the places that it writes to."""
        tensors = zip(self.outputs, self.target.tensors(), strict=True)
        return [Unit(self.file, place, _size(dtype, shape), self.kind) for place, (_, dtype, shape) in tensors]


@dataclass(frozen=True, slots=True)
class Task:
    """What is done as a whole: one of our tensors, or an expert. ``layer`` is -1 for the former."""

    name: str
    layer: int
    x: int
    units: tuple[Unit, ...]


@dataclass(frozen=True, slots=True)
class File:
    """A file of the store: ``header`` comes first, the table of ``units`` checksums from ``table`` to the end."""

    name: str
    header: bytes
    table: int
    units: int

    @property
    def size(self) -> int:
        """Bytes in all."""
        return self.table + 16 * self.units


class Plan:
    """Files and tasks of the store that ``layout`` becomes; raises an error of ours when it cannot become one.

    ``experts`` is what model.json says of a layer's experts: the tensors of each kind of slab, and where there are
    several, each one's kind.
    """

    def __init__(self, layout: Layout, experts: str, resident: str) -> None:
        for what, how in ("experts", experts), ("resident", resident):
            known = [name for name in ENCODINGS if (what, name) != ("resident", "mxfp4")]
            if how not in known:
                raise UsageError(f"{what} {how!r} is not supported", f"use {', '.join(known)}")
        self.layout = layout
        self.files: list[File] = []
        self.tasks: list[Task] = []
        self.experts: dict[int, dict[str, Any]] = {}
        self._wanted = ENCODINGS[experts]
        self._resident: dict[str, tuple[Stored, Stored]] = {}
        self._plan_resident(ENCODINGS[resident])
        for layer in layout.experts:
            self._plan_experts(layer)
        self.size = sum(file.size for file in self.files)
        found: dict[int, list[tuple[int, int]]] = {}
        self.spread = set[int]()
        """The tasks that need more than one source file."""
        for number, task in enumerate(self.tasks):
            first: dict[int, int] = {}
            for e in (layout.entries[name] for job in self.jobs(task) for name in job.inputs):
                first[e.file] = min(e.start, first.get(e.file, e.start))
            if len(first) > 1:
                self.spread.add(number)
            for file, start in first.items():
                found.setdefault(file, []).append((start, number))
        self.by_shard = {file: [number for _, number in sorted(tasks)] for file, tasks in found.items()}
        """The tasks that need a source file, in the order in which they are found in it."""

    def jobs(self, task: Task) -> Iterator[Job]:
        """Return what a task consists of, in the order of the places it is written to."""
        if task.layer < 0:
            rule = self.layout.rules[task.name]
            names = tuple(name for source in rule.sources for name in self.layout.names(source))
            kind = task.name.split(".", 2)[2] if task.name.startswith("layers.") else task.name
            places = tuple(unit.start for unit in task.units)
            yield from _split(Job(kind, names, *self._resident[task.name], rule.make, 0, places))
            return
        kept, unit = self.experts[task.layer], task.units[0]
        slab = kept["kinds"][kept["kind"][task.x] if "kind" in kept else 0]
        for matrix, source in zip(Expert._fields, self.layout.experts[task.layer][1](task.x), strict=True):
            stored = self._stored(source)
            target = _target(stored, self._wanted, source)
            places = tuple(unit.start + slab[matrix + end]["data_offsets"][0] for end, _, _ in target.tensors())
            kind = f"experts.{matrix}"
            yield from _split(Job(kind, self.layout.names(source), stored, target, None, unit.file, places))

    def _plan_resident(self, wanted: str | None) -> None:
        rules, blocks = self.layout.rules, list[tuple[str, str, Shape]]()
        for part in parts(self.layout.config):
            packs = matrices(part.weights) - EXACT
            for field, spec in specs(part.weights, part.config):
                name = f"{part.prefix}.{field}"
                stored = self._made(name)
                if stored.shape != spec.shape(part.sizes):
                    raise CheckpointError(
                        f"{' and '.join(rules[name].sources)} is {stored.shape}, but config.json makes it "
                        f"{spec.shape(part.sizes)}",
                        "the files of two different models may be mixed in this folder",
                    )
                if stored.format == "MXFP4" and field not in matrices(part.weights):
                    raise CheckpointError(f"{rules[name].sources[0]} is packed, which is not supported for it")
                target = _target(stored, wanted if field in packs else None, name)
                tied = name == "edges.head" and rules[name] == rules["edges.embed"]
                if not (tied and target == stored):  # a tied head is the embedding, and not stored again
                    self._resident[name] = stored, target
                    blocks += [(name + end, dtype, shape) for end, dtype, shape in target.tensors()]
        # No tensor may leave a hole: those whose sizes divide by more come first, so that every start divides as well.
        blocks.sort(key=lambda block: -math.gcd(_size(*block[1:]), LINE))
        header, table, starts = _header(blocks)
        units = {
            name: Unit(0, start, _size(dtype, shape), name)
            for (name, dtype, shape), start in zip(blocks, starts, strict=True)
        }
        self.files.append(File(RESIDENT, header, table, len(units)))
        for name, (_, target) in self._resident.items():
            self.tasks.append(Task(name, -1, 0, tuple(units[name + end] for end, _, _ in target.tensors())))

    def _plan_experts(self, layer: int) -> None:
        moe, names = self.layout.experts[layer]
        kinds, kind = dict[tuple[Stored, ...], int](), list[int]()
        for x in range(moe.experts):
            targets = tuple(_target(self._stored(source), self._wanted, source) for source in names(x))
            kind.append(kinds.setdefault(targets, len(kinds)))
        slabs, longest = list[dict[str, Any]](), 0
        for targets in kinds:
            slab, at = dict[str, Any](), 0
            for matrix, target in zip(Expert._fields, targets, strict=True):
                for end, dtype, shape in target.tensors():
                    stop = at + _size(dtype, shape)
                    slab[matrix + end] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, stop]}
                    at = _round_up(stop, LINE)
            slabs.append(slab)
            longest = max(longest, _round_up(at, PAGE))
        self.experts[layer] = {"kinds": slabs} | ({"kind": kind} if len(slabs) > 1 else {})
        header, table, (start,) = _header([(EXPERTS, "U8", (moe.experts, longest))], moe.experts)
        file = len(self.files)
        self.files.append(File(experts_file(layer), header, table, moe.experts))
        for x in range(moe.experts):
            name = f"expert {x} of layer {layer}"
            self.tasks.append(Task(name, layer, x, (Unit(file, start + x * longest, longest, name),)))

    def _stored(self, source: str) -> Stored:
        """Return what a source is stored as."""
        first, *scales = (self.layout.entries[name] for name in self.layout.names(source))
        if not scales:
            return Stored(first.dtype, first.shape)
        shape = *first.shape[:-1], first.shape[-1] * 2
        if len(shape) != 2 or shape[1] % GROUP or scales[0].shape != (shape[0], shape[1] // GROUP):
            raise CheckpointError(f"{source}_scale is {scales[0].shape}, which does not fit {source}_packed")
        return Stored("MXFP4", shape)

    def _made(self, name: str) -> Stored:
        """Return what one of our tensors is as its rule makes it: tried on zeros that take no memory."""
        rule = self.layout.rules[name]
        found = [self._stored(source) for source in rule.sources]
        if rule.make is None:
            return found[0]
        if any(stored.format == "MXFP4" for stored in found):
            raise CheckpointError(f"{' and '.join(rule.sources)}: this tensor must not be packed")
        zeros = (torch.zeros((), dtype=DTYPES[stored.format]).expand(stored.shape) for stored in found)
        made = rule.make(*zeros)
        return Stored(NAMES[made.dtype], tuple(made.shape))


def _target(stored: Stored, wanted: str | None, name: str) -> Stored:
    if wanted == "MXFP4" and stored.shape[1] % GROUP:
        raise UsageError(
            f"{name} has {stored.shape[1]} columns, and MXFP4 takes groups of {GROUP}", "int8 takes any number"
        )
    return Stored(wanted or stored.format, stored.shape)


def _split(job: Job) -> Iterator[Job]:
    """Codes and scales that only move are moved one by one: they may come from two files."""
    if job.encodes or job.make is not None or len(job.inputs) == 1:
        yield job
        return
    for name, place, (_, dtype, shape) in zip(job.inputs, job.outputs, job.target.tensors(), strict=True):
        stored = Stored(dtype, shape)
        yield Job(job.kind, (name,), stored, stored, None, job.file, (place,))


def _size(dtype: str, shape: Shape) -> int:
    return math.prod(shape) * DTYPES[dtype].itemsize


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _header(blocks: Sequence[tuple[str, str, Shape]], units: int | None = None) -> tuple[bytes, int, list[int]]:
    """Return the start of a file: length and header, where its table begins, and where each tensor does."""
    entries, at = dict[str, Any](__metadata__={"format": "deltafin"}), 0
    units = len(blocks) if units is None else units
    offsets = list[int]()
    for name, dtype, shape in (*blocks, (CHECKSUMS, "U8", (units, 16))):
        offsets.append(at)
        at += _size(dtype, shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offsets[-1], at]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    length = _round_up(8 + len(text), PAGE)
    *starts, table = (length + offset for offset in offsets)
    return (length - 8).to_bytes(8, "little") + text.ljust(length - 8), table, starts
