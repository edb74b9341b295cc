"""What lies at the front of a model's files: JSON, and the headers of safetensors files."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deltafin.errors import CheckpointError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E8M0": torch.uint8,  # scales: the byte is the exponent
}

LARGEST_HEADER = 100_000_000  # the format's own limit

AGAIN = "the file is cut or damaged; fetch it again"

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
    with path.open("rb") as f:
        size = f.seek(0, 2)
        f.seek(0)
        length = header_length(f.read(8), size, str(path))
        return parse_header(f.read(length), size, str(path), file)


def header_length(start: bytes, size: int, where: str) -> int:
    """Return how many bytes of header follow the first eight of a safetensors file of ``size`` bytes."""
    length = int.from_bytes(start, "little")
    if size < 8 or length > LARGEST_HEADER:
        raise CheckpointError(f"{where} is not a safetensors file ({size} bytes)", AGAIN)
    if size < 8 + length:
        raise CheckpointError(f"{where} has {size} bytes, but its header alone ends at byte {8 + length}", AGAIN)
    return length


def parse_header(text: bytes, size: int, where: str, file: int = 0) -> dict[str, Entry]:
    """Check the header of a file of ``size`` bytes, called ``where`` in errors; return its tensors by name."""
    length = len(text)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        entries = {
            name: Entry(file, e["dtype"], tuple(e["shape"]), *(8 + length + at for at in e["data_offsets"]))
            for name, e in header.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{where} has a header that cannot be read ({error})", AGAIN) from error
    end = max((e.stop for e in entries.values()), default=8 + length)
    if size != end:
        raise CheckpointError(f"{where} has {size} bytes, but its header describes {end}", AGAIN)
    for name, e in entries.items():
        if e.dtype not in DTYPES:
            continue  # only an error for a tensor that is used
        if e.stop - e.start != math.prod(e.shape) * DTYPES[e.dtype].itemsize or e.start < 8 + length:
            raise CheckpointError(f"{where}: {name} is {e.dtype} {e.shape} in {e.stop - e.start} bytes", AGAIN)
    return entries
