"""Opening a model's files: a Hugging Face snapshot, read in place through its family.

Nothing is copied: tensors are views of memory-mapped files, packed experts stay packed. What headers can tell is
checked when the files are opened: missing, unknown, wrongly typed or shaped tensors, and cut files.
"""

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from deltafin.direct import PAGE, up
from deltafin.errors import CheckpointError
from deltafin.headers import Entry, read_header, read_json
from deltafin.layout import INDEX, Layout, shards
from deltafin.mapped import MappedFiles
from deltafin.ops import Expert
from deltafin.quant import GROUP, MXFP4, check_scales
from deltafin.weights import Weight

CHECKED_AT_ONCE = 64 << 20
"""Bytes of expert scales up to which all are checked when a model is opened; beyond, each expert on first use."""


class Snapshot:
    """A folder as the hub publishes it, seen through its family: read our tensors by our names.

    ``totals`` counts parameters, bytes, and of these the bytes of routed experts and of scales; ``skipped`` counts the
    tensors of parts that a text model does not run; ``expert_formats`` has what a layer's experts are stored as.
    Raises ``CheckpointError`` or ``ConfigError`` when the folder is not a complete, consistent model.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.layout = open_layout(path)
        self.files = [Path(file) for file in self.layout.files]
        self.config = self.layout.config
        self.totals, self.skipped = self.layout.totals, self.layout.skipped
        self.expert_formats = self.layout.expert_formats
        self._mapped = MappedFiles(self.files)
        if self.totals["scale bytes"] <= CHECKED_AT_ONCE:
            for layer, (moe, _) in self.layout.experts.items():
                for x in range(moe.experts):
                    self.expert(layer, x)
                    self.release_expert(layer, x)  # or what lies around the scales would count as memory in use

    @property
    def origin(self) -> dict[str, str]:
        """What ``info`` says of where the weights come from."""
        return {"stored as": "Hugging Face snapshot"}

    def read(self, name: str) -> Weight:
        """Return one of our tensors by our name (``layers.3.mixer.q``): a view where its rule changes nothing."""
        rule = self.layout.rules[name]
        found = [self._stored(source) for source in rule.sources]
        if rule.make is None:
            return found[0]
        try:
            return rule.make(*(_dense(tensor) for tensor in found))
        except ValueError as error:
            raise CheckpointError(f"{self.describe(name)}: {error}", "fetch the file again") from error

    def describe(self, name: str) -> str:
        """Say where one of our tensors comes from, for an error message."""
        return f"{' and '.join(self.layout.rules[name].sources)} in {self.path}"

    def expert(self, layer: int, x: int) -> Expert:
        """Return one routed expert: views of what is stored."""
        _, names = self.layout.experts[layer]
        return Expert(*(self._stored(name) for name in names(x)))

    def entries(self, layer: int, x: int) -> list[list[Entry]]:
        """Say where one routed expert lies: the tensors of its gate, up and down, one each or codes and scales."""
        names = (self.layout.names(source) for source in self.layout.experts[layer][1](x))
        return [[self.layout.entries[name] for name in found] for found in names]

    def slot_bytes(self, layer: int) -> int:
        """Return how many bytes, in whole pages, any expert of a layer takes in memory, wherever its tensors lie."""
        tensors = 2 * len(Expert._fields)
        return up(self.layout.expert_bytes[layer]) + 2 * PAGE * tensors  # each begins and ends within a page

    @staticmethod
    def weight(found: Sequence[Tensor], where: str) -> Tensor | MXFP4:
        """Make a matrix of its tensors: one, or codes and scales, which are checked; ``where`` names them in errors."""
        if len(found) == 1:
            return found[0]
        packed = MXFP4(*found)
        rows, columns = packed.shape
        if tuple(packed.scales.shape) != (rows, columns // GROUP) or columns % GROUP:
            raise CheckpointError(f"{where} is {tuple(packed.scales.shape)}, which does not fit {(rows, columns)}")
        check_scales(packed, where)
        return packed

    def release(self, name: str) -> int:
        """Let the system drop one of our tensors' pages; return how many bytes nothing else of ours is made from.

        Only where the pages lie changes: a view that is still there reads them anew.
        """
        sources = self.layout.rules[name].sources
        others = {source for other, rule in self.layout.rules.items() if other != name for source in rule.sources}
        return sum(self._release(source) * (source not in others) for source in sources)

    def release_expert(self, layer: int, x: int) -> None:
        """Let the system drop the pages of one routed expert."""
        for source in self.layout.experts[layer][1](x):
            self._release(source)

    def _release(self, source: str) -> int:
        size = 0
        for e in (self.layout.entries[name] for name in self.layout.names(source)):
            size += e.stop - e.start
            self._mapped.release(e)
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

    def _stored(self, source: str) -> Tensor | MXFP4:
        names = self.layout.names(source)
        return self.weight([self._mapped.view(self.layout.entries[name]) for name in names], names[-1])


def open_layout(path: Path) -> Layout:
    """Read config and headers of a snapshot; its ``files`` are paths."""
    raw = read_json(path / "config.json")
    files = [str(file) for file in _shards(path, raw)]
    return Layout(raw, files, [read_header(Path(file), i) for i, file in enumerate(files)], str(path))


def listed_files(path: Path, raw: Any) -> tuple[list[str], list[str]]:
    """Return the names of the files that hold a snapshot's model, and of those the ones that are not there."""
    index = path / INDEX
    files = {f.relative_to(path).as_posix() for f in path.rglob("*.safetensors") if f.exists()}  # no broken links
    listed = shards(raw, files, read_json(index) if index.exists() else None, str(index))
    return listed, [name for name in listed if name not in files]


def _shards(path: Path, raw: Any) -> list[Path]:
    """Return the files that hold the model; all that are missing are named at once."""
    listed, missing = listed_files(path, raw)
    if missing:
        raise CheckpointError(
            f"{path} lacks {len(missing)} of {len(listed)} files: {', '.join(missing)}", "fetch them again"
        )
    if not listed:
        raise CheckpointError(f"{path} has no *.safetensors file", "deltafin reads safetensors checkpoints")
    return [path / name for name in listed]


def _dense(weight: Weight) -> Tensor:
    if not isinstance(weight, Tensor):
        raise ValueError("this tensor must not be packed")
    return weight
