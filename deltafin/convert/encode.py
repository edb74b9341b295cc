"""What is done with the bytes of one tensor: moved, made by a rule, packed or unpacked, a piece at a time."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from deltafin.convert.plan import Job
from deltafin.errors import CheckpointError
from deltafin.executor import PACK
from deltafin.headers import DTYPES, Entry
from deltafin.quant import BLOCK, GROUP, MXFP4, Int8

Read = Callable[[str, int, memoryview], None]
"""Fill a buffer with the bytes of a stored tensor, from one of them on."""
Write = Callable[[int, memoryview], None]
"""Put bytes at a place of the job's file."""

MOVED = 1 << 20
"""Bytes that are moved at a time: they stay in the processor's cache while they are looked at."""

ENCODED = 4 * BLOCK
"""Numbers that are packed at a time, about: a multiple of what the rules that pack take at once."""

INFINITE = {
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
    torch.float32: (torch.int32, 0x7F800000),
    torch.float64: (torch.int64, 0x7FF0000000000000),
}
"""Infinity as a whole number; without its sign, what is not finite is that or larger."""

AGAIN = "the file is damaged; fetch it again"


def run(job: Job, entries: Mapping[str, Entry], read: Read, write: Write) -> tuple[float, float]:
    """Do a job; return the sums of squares of its error and of its values, zeros where nothing was encoded.

    ``entries`` has the stored tensors. Raises ``CheckpointError`` with the name of one that holds infinities, or
    something that is not a number.
    """
    if job.make is None and not job.encodes:
        _move(job, read, write)
        return 0.0, 0.0
    whole = _made(job, entries, read).flatten() if job.make else None
    count, step = math.prod(job.target.shape), ENCODED
    if job.target.format == "INT8":  # whole rows, as many as the rule that packs takes at once
        columns = job.target.shape[1]
        step = max(1, BLOCK // columns) * columns
        step *= max(1, ENCODED // step)
    lost = total = 0.0
    for start in range(0, count, step):
        stop = min(count, start + step)
        part = _values(job, entries, read, start, stop) if whole is None else whole[start:stop]
        errors = _encode(job, part, start, write)
        lost, total = lost + errors[0], total + errors[1]
    return lost, total


def _move(job: Job, read: Read, write: Write) -> None:
    (name,), (place,), dtype = job.inputs, job.outputs, DTYPES[job.source.format]
    size = math.prod(job.source.shape) * dtype.itemsize
    buffer = _room(min(size, MOVED))
    for start in range(0, size, MOVED):
        piece = buffer[: min(MOVED, size - start)]
        read(name, start, piece.numpy().data)
        _check(name, piece.view(dtype))
        write(place + start, piece.numpy().data)


def _made(job: Job, entries: Mapping[str, Entry], read: Read) -> Tensor:
    found = (_plain(name, entries[name], read, 0, math.prod(entries[name].shape)) for name in job.inputs)
    shaped = [tensor.view(entries[name].shape) for tensor, name in zip(found, job.inputs, strict=True)]
    assert job.make is not None
    try:
        return job.make(*shaped).contiguous()
    except ValueError as error:
        raise CheckpointError(f"{' and '.join(job.inputs)}: {error}", AGAIN) from error


def _values(job: Job, entries: Mapping[str, Entry], read: Read, start: int, stop: int) -> Tensor:
    """Return some of the numbers of a matrix, in a row."""
    if job.source.format != "MXFP4":
        return _plain(job.inputs[0], entries[job.inputs[0]], read, start, stop)
    codes, scales = (
        _plain(name, entries[name], read, start // numbers, stop // numbers)
        for name, numbers in zip(job.inputs, (2, GROUP), strict=True)
    )
    return MXFP4(codes.view(-1, GROUP // 2), scales.view(-1, 1)).unpack(torch.float32).flatten()


def _plain(name: str, e: Entry, read: Read, start: int, stop: int) -> Tensor:
    dtype = DTYPES[e.dtype]
    piece = _room((stop - start) * dtype.itemsize)
    read(name, start * dtype.itemsize, piece.numpy().data)
    _check(name, piece.view(dtype))
    return piece.view(dtype)


def _encode(job: Job, part: Tensor, start: int, write: Write) -> tuple[float, float]:
    """Write numbers from ``start`` on in the format that is wanted; return squared sums of error and values."""
    if job.target.format == "INT8":
        columns = job.target.shape[1]
        packed = _packed(job, part.view(-1, columns))
        places = job.outputs[0] + start, job.outputs[1] + start // columns * 4
    elif job.target.format == "MXFP4":
        packed = _packed(job, part.view(-1, GROUP))
        places = job.outputs[0] + start // 2, job.outputs[1] + start // GROUP
    else:
        plain = part.to(DTYPES[job.target.format])
        write(job.outputs[0] + start * plain.element_size(), _bytes(plain))
        if job.encodes and not bool(torch.isfinite(plain).all()):
            raise CheckpointError(f"{job.inputs[0]} has values that bfloat16 cannot hold", "keep it as it is stored")
        return _squares(part, plain) if job.encodes else (0.0, 0.0)
    for place, tensor in zip(places, (packed.codes, packed.scales), strict=True):
        write(place, _bytes(tensor))
    return _squares(part, packed.unpack(torch.float32).flatten())


def _packed(job: Job, matrix: Tensor) -> MXFP4 | Int8:
    try:
        return PACK[job.target.format.lower()](matrix)
    except ValueError as error:
        raise CheckpointError(f"{job.inputs[0]}: {error}", AGAIN) from error


def _squares(values: Tensor, rounded: Tensor) -> tuple[float, float]:
    values = values.double()
    return (rounded.double() - values).square().sum().item(), values.square().sum().item()


def _check(name: str, values: Tensor) -> None:
    if values.dtype in INFINITE:
        whole, infinity = INFINITE[values.dtype]
        if int((values.view(whole) & torch.iinfo(whole).max).amax()) >= infinity:
            raise CheckpointError(f"{name} has values that are not finite", AGAIN)
    elif name.endswith("_scale") and int(values.amax()) == 255:
        raise CheckpointError(f"{name} has a scale byte of 255, which means not-a-number", AGAIN)


def _room(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data
