"""Our own store: a folder that is written once by a conversion, checked when it is opened, and read in place.

``docs/store-format.md`` has every byte of it. A store's experts lie one after the other, each in one piece.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from deltafin.config import ModelConfig, MoE, from_json
from deltafin.errors import CheckpointError
from deltafin.headers import Entry, read_header
from deltafin.mapped import MappedFiles
from deltafin.model.decoder import parts
from deltafin.ops import Expert
from deltafin.quant import MXFP4, Int8
from deltafin.snapshot import Snapshot
from deltafin.weights import Weight

FORMAT, VERSION = "deltafin store", 1
MODEL, RESIDENT, EXPERTS, CHECKSUMS = "model.json", "resident.safetensors", "experts", "checksums"
PAGE = 4096
"""An expert's slab, and the first tensor of a file, begin on a multiple of this."""

SAMPLE = 256 << 20
"""Bytes of weights whose checksums are computed when a store is opened: all of a small one."""

AGAIN = "convert it again, or copy it again from where it is whole"


def experts_file(layer: int) -> str:
    """Return the name of the file with a layer's routed experts."""
    return f"experts-{layer:03}.safetensors"


def checksum(*parts: Any) -> bytes:
    """Return the checksum of bytes in a row: XXH3, 128 bits, most significant byte first."""
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return digest.digest()


class Unit(NamedTuple):
    """What has a checksum: ``size`` bytes from ``start`` of a file; ``name`` is for people."""

    file: int
    start: int
    size: int
    name: str


class Store:
    """A folder that ``convert`` wrote: read our tensors by our names. The same interface as ``Snapshot``.

    Opening it compares sizes, headers and the checksums of ``SAMPLE`` bytes of weights with what was written; with
    ``full`` those of every byte, and ``progress`` is called with bytes done and in all. Raises ``CheckpointError``
    naming the file that was changed, cut or removed since, or when another version of the format is needed.
    """

    def __init__(self, path: Path, full: bool = False, progress: Callable[[int, int], None] | None = None) -> None:
        self.path = path
        about = read_model(path)
        self.config: ModelConfig = from_json(about["config"])
        self.source: tuple[str | None, str | None] = about["source"]["repository"], about["source"]["revision"]
        self.encodings: Mapping[str, str] = about["encodings"]
        self.skipped = Counter[str](about["skipped"])
        self._recorded: Mapping[str, Mapping[str, Any]] = about["files"]
        self._check_sizes()
        self.files = [path / name for name in self._recorded if name.endswith(".safetensors")]
        headers = [read_header(file, i) for i, file in enumerate(self.files)]
        self._mapped = MappedFiles(self.files)
        self._resident = headers[0]
        self._experts = {
            int(layer): (headers[i][EXPERTS], kept["kinds"], kept.get("kind") or [0] * headers[i][EXPERTS].shape[0])
            for i, (layer, kept) in enumerate(about["experts"].items(), 1)
        }
        self._check_tensors()
        self.expert_formats = {
            layer: {_format(kind, matrix) for kind in kinds for matrix in Expert._fields}
            for layer, (_, kinds, _) in self._experts.items()
        }
        self._count(about["parameters"])
        self._check(headers, full, progress)

    @property
    def origin(self) -> dict[str, str]:
        """What ``info`` says of where the weights come from."""
        chosen = ", ".join(f"{what} {how}" for what, how in self.encodings.items() if how != "keep")
        repository, revision = self.source
        return {
            "stored as": "deltafin store" + (f", converted with {chosen}" if chosen else ", nothing re-encoded"),
            **({"source": f"{repository} at {revision}"} if repository else {}),
        }

    def read(self, name: str) -> Weight:
        """Return one of our tensors by our name (``layers.3.mixer.q``): a view of the file."""
        return self.weight([self._mapped.view(e) for e in _entries(self._resident, self._name(name))])

    def describe(self, name: str) -> str:
        """Say where one of our tensors comes from, for an error message."""
        return f"{self._name(name)} in {self.path / RESIDENT}"

    def expert(self, layer: int, x: int) -> Expert:
        """Return one routed expert: views of its slab."""
        return Expert(*(self.weight([self._mapped.view(e) for e in found]) for found in self.entries(layer, x)))

    def entries(self, layer: int, x: int) -> list[list[Entry]]:
        """Say where one routed expert lies: the tensors of its gate, up and down, one each or codes and scales."""
        slab = self._slab(layer, x)
        return [_entries(slab, matrix) for matrix in Expert._fields]

    def slot_bytes(self, layer: int) -> int:
        """Return how many bytes, in whole pages, any expert of a layer takes in memory."""
        return self._experts[layer][0].shape[1]

    @staticmethod
    def weight(found: Sequence[Tensor], where: str = "") -> Weight:
        """Make a matrix of its tensors: one, or codes and scales."""
        if len(found) == 1:
            return found[0]
        codes, scales = found
        return Int8(codes, scales) if codes.dtype == torch.int8 else MXFP4(codes, scales)

    def release(self, name: str) -> int:
        """Let the system drop one of our tensors' pages; return how many bytes nothing else of ours is made from.

        Only where the pages lie changes: a view that is still there reads them anew.
        """
        stored = self._name(name)
        entries = _entries(self._resident, stored)
        for e in entries:
            self._mapped.release(e)
        return 0 if self._name("edges.head") == "edges.embed" == stored else sum(e.stop - e.start for e in entries)

    def release_expert(self, layer: int, x: int) -> None:
        """Let the system drop the pages of one routed expert."""
        for e in self._slab(layer, x).values():
            self._mapped.release(e)

    @property
    def fingerprint(self) -> str:
        """Identify the model: its config and the checksums of all its files."""
        files = sorted((name, file["checksum"]) for name, file in self._recorded.items())
        return checksum(repr((self.config, files)).encode()).hex()

    def _name(self, name: str) -> str:
        """A tied head is not stored a second time."""
        tied = name == "edges.head" and not _entries(self._resident, name)
        return "edges.embed" if tied and self.config.tied else name

    def _slab(self, layer: int, x: int) -> dict[str, Entry]:
        e, kinds, kind = self._experts[layer]
        start = e.start + x * e.shape[1]
        return {
            name: Entry(e.file, t["dtype"], tuple(t["shape"]), *(start + at for at in t["data_offsets"]))
            for name, t in kinds[kind[x]].items()
        }

    def _count(self, parameters: int) -> None:
        self.totals = Counter[str](parameters=parameters)
        for name, e in self._resident.items():
            if name != CHECKSUMS:
                self.totals["bytes"] += e.stop - e.start
        for _, kinds, kind in self._experts.values():
            for k, times in Counter(kind).items():
                for name, tensor in kinds[k].items():
                    size = (tensor["data_offsets"][1] - tensor["data_offsets"][0]) * times
                    self.totals["bytes"] += size
                    self.totals["expert bytes"] += size
                    self.totals["scale bytes"] += size * name.endswith(".scales")

    def _check_sizes(self) -> None:
        for name, file in self._recorded.items():
            try:
                size = (self.path / name).stat().st_size
            except OSError as error:
                raise CheckpointError(f"{self.path} lacks {name}", AGAIN) from error
            if size != file["bytes"]:
                raise CheckpointError(f"{self.path / name} has {size} bytes, but {MODEL} says {file['bytes']}", AGAIN)

    def _check_tensors(self) -> None:
        """Every tensor of ours is there; shapes are compared with the config when they are bound."""
        for name in (name for part in parts(self.config) for name in part.names()):
            if not _entries(self._resident, self._name(name)):
                raise CheckpointError(f"{self.path / RESIDENT} lacks {name}", AGAIN)
        layers = {i: layer.ffn for i, layer in enumerate(self.config.layers) if isinstance(layer.ffn, MoE)}
        for i, moe in layers.items():
            e = self._experts[i][0] if i in self._experts else None
            if e is None or len(e.shape) != 2 or e.shape[0] != moe.experts or e.start % PAGE or e.shape[1] % PAGE:
                raise CheckpointError(f"{self.path / experts_file(i)} does not have {moe.experts} slabs", AGAIN)

    def _check(self, headers: list[dict[str, Entry]], full: bool, progress: Callable[[int, int], None] | None) -> None:
        """Compare what has a checksum: small files, headers, and of weights all or a sample spread evenly."""
        tables: list[bytes] = []
        for i, file in enumerate(self.files):
            table = headers[i][CHECKSUMS]
            with file.open("rb") as f:
                header = f.read(min(e.start for e in headers[i].values()))
                f.seek(table.start)
                tables.append(f.read())
            if checksum(header, tables[i]).hex() != self._recorded[file.name]["checksum"]:
                raise CheckpointError(f"{file} was changed since it was written", AGAIN)
        for name, file in self._recorded.items():
            if not name.endswith(".safetensors"):
                content = (self.path / name).read_bytes()
                if checksum(content).hex() != file["checksum"]:
                    raise CheckpointError(f"{self.path / name} was changed since it was written", AGAIN)
        units = [unit for i, header in enumerate(headers) for unit in _units(header, i)]
        total, credit, done, row = sum(unit.size for unit in units), 0.0, 0, Counter[int]()
        share = 1.0 if full else min(1.0, SAMPLE / max(1, total))
        for unit in units:
            wanted = tables[unit.file][16 * row[unit.file] :][:16]
            row[unit.file] += 1
            credit += unit.size * share
            done += unit.size
            if credit >= unit.size:
                credit -= unit.size
                if read_checksum(self.files[unit.file], unit) != wanted:
                    raise CheckpointError(
                        f"{unit.name} in {self.files[unit.file]} was changed since it was written", AGAIN
                    )
            if progress:
                progress(done, total)


def read_checksum(path: Path, unit: Unit) -> bytes:
    """Return the checksum of what stands in a file; ``CheckpointError`` when it cannot be read."""
    digest, left, buffer = xxhash.xxh3_128(), unit.size, bytearray(min(unit.size, 1 << 20))
    try:
        with path.open("rb", buffering=0) as f:
            f.seek(unit.start)
            while left and (count := f.readinto(memoryview(buffer)[:left])):
                digest.update(memoryview(buffer)[:count])
                left -= count
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})", AGAIN) from error
    return digest.digest()


def _units(header: Mapping[str, Entry], file: int) -> Iterator[Unit]:
    """What has a checksum in a file, in the order of its table: a tensor, or of experts each."""
    for name, e in sorted(header.items(), key=lambda item: item[1].start):
        if name == EXPERTS:
            for x in range(e.shape[0]):
                yield Unit(file, e.start + x * e.shape[1], e.shape[1], f"expert {x}")
        elif name != CHECKSUMS:
            yield Unit(file, e.start, e.stop - e.start, name)


def _entries(entries: Mapping[str, Entry], name: str) -> list[Entry]:
    """The tensors of a matrix: one, or codes and scales."""
    found = entries.get(name)
    if found is not None:
        return [found]
    return [entries[f"{name}.{part}"] for part in ("codes", "scales") if f"{name}.{part}" in entries]


def _format(kind: Mapping[str, Mapping[str, Any]], matrix: str) -> str:
    if matrix in kind:
        return kind[matrix]["dtype"]
    return "INT8" if kind[f"{matrix}.codes"]["dtype"] == "I8" else "MXFP4"


def is_store(path: Path) -> bool:
    """Whether a folder says that it is a store; it may be damaged."""
    return (path / MODEL).is_file()


def model_json(about: Mapping[str, Any]) -> bytes:
    """Return the content of a ``model.json``; its last 32 digits are the checksum of all before them."""
    text = json.dumps(about, indent=1, ensure_ascii=False).removesuffix("\n}") + ',\n "checksum": "'
    return text.encode() + checksum(text.encode()).hex().encode() + b'"\n}\n'


def read_model(path: Path) -> dict[str, Any]:
    """Read a store's ``model.json``; ``CheckpointError`` when it was changed or is of another version."""
    file = path / MODEL
    try:
        content = file.read_bytes()
        about = json.loads(content)
        known = about["format"], about["version"]
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror})", AGAIN) from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} is not the {MODEL} of a deltafin store, or it is damaged", AGAIN) from error
    if known != (FORMAT, VERSION):
        raise CheckpointError(
            f"{path} has {known[0]!r} version {known[1]}, this deltafin reads {FORMAT!r} version {VERSION}",
            "install the deltafin that wrote it, or convert the model again",
        )
    if about.get("checksum") != checksum(content[: -len('"\n}\n') - 32]).hex():
        raise CheckpointError(f"{file} was changed since it was written", AGAIN)
    return about


def open_model(path: Path) -> Snapshot | Store:
    """Open a folder, whichever it is: a store of ours, or a snapshot."""
    if is_store(path):
        return Store(path)
    if (path / "plan.json").is_file():
        raise CheckpointError(f"{path} is an unfinished conversion", "run the same convert again to finish it")
    if (path / RESIDENT).is_file() and any(path.glob("experts-*.safetensors")):
        raise CheckpointError(f"{path} lacks {MODEL}", AGAIN)
    return Snapshot(path)
