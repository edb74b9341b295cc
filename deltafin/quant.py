"""Packed number formats, MXFP4 and int8: what they mean, and the rules that pack them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from deltafin.errors import CheckpointError

GROUP = 32
"""Columns that share one MXFP4 scale."""

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the low three bits of a code mean (E2M1); bit 3 is the sign."""

BLOCK = 1 << 17
"""Numbers that are packed at a time: what is copied for them stays in the processor's cache, and small."""

SHRINKS = tuple(1 - i / 100 for i in range(9))
"""How much of a row's largest magnitude int8 may span; beyond it is cut off, so that the rest lies on a finer grid."""

_CODES = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], dtype=torch.float64)
_PAIRS = torch.stack([_CODES.repeat(16), _CODES.repeat_interleave(16)], 1)  # byte -> its low, its high nibble
_SCALES = torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(256) - 127)
_SCALES[255] = torch.nan
_TABLES = {dtype: (_PAIRS.to(dtype), _SCALES.to(dtype)) for dtype in (torch.float64, torch.float32)}


@dataclass(frozen=True)
class MXFP4:
    """A matrix of 4-bit floats in groups of 32 columns with a power of two each (OCP microscaling, E2M1 with E8M0).

    ``codes`` uint8 [.., C / 2]: byte c holds column 2c in its low and 2c + 1 in its high nibble.
    ``scales`` uint8 [.., C / 32]: the group is multiplied by 2^(scale - 127); 255 is not a number and refused.
    """

    codes: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        """The shape of the matrix that is packed."""
        return torch.Size([*self.codes.shape[:-1], self.codes.shape[-1] * 2])

    @property
    def nbytes(self) -> int:
        """How many bytes it takes."""
        return self.codes.nbytes + self.scales.nbytes

    def to(self, device: torch.device) -> "MXFP4":
        """The same matrix in another device's memory."""
        return MXFP4(self.codes.to(device), self.scales.to(device))

    def unpack(self, dtype: torch.dtype) -> Tensor:
        """Every value, exactly: in float32 and float64 always, in bfloat16 for scales 1 to 252."""
        tables = _TABLES[torch.float64 if dtype == torch.float64 else torch.float32]
        pairs, scales = (table.to(self.codes.device) for table in tables)
        values = pairs.index_select(0, self.codes.flatten().int()).view(-1, GROUP)
        return (values * scales.index_select(0, self.scales.flatten().int())[:, None]).view(self.shape).to(dtype)


def check_scales(weight: MXFP4, name: str) -> None:
    """Raise ``CheckpointError`` when a scale byte is 255, which stands for not-a-number."""
    if bool((weight.scales == 255).any()):
        raise CheckpointError(
            f"{name} has a scale byte of 255, which means not-a-number", "the file is damaged; fetch it again"
        )


def pack_mxfp4(values: Tensor, *, closest: bool = False) -> MXFP4:
    """Round ``values`` [.., C], C a multiple of 32, to MXFP4; values that MXFP4 can hold come back unchanged.

    A group's scale is the power of two that puts its largest magnitude between 3.5 and 7 (beyond 6 is rounded to 6);
    groups of zeros get scale 2^0, so that nothing is divided by zero. ``closest`` takes half of that scale where the
    squared error is smaller so. Twice the scale never wins: all it adds are 8 and 12, and 6 is as near to 7 as 8 is.
    """
    if values.shape[-1] % GROUP:
        raise ValueError(f"{values.shape[-1]} columns are not groups of {GROUP}")
    groups = values.reshape(-1, GROUP)
    codes = torch.empty(len(groups), GROUP // 2, dtype=torch.uint8)
    scales = torch.empty(len(groups), dtype=torch.uint8)
    wide = torch.float64 if values.dtype == torch.float64 else torch.float32
    for start in range(0, len(groups), BLOCK // GROUP):
        part = slice(start, start + BLOCK // GROUP)
        x = groups[part].to(wide)
        magnitude = x.abs()
        largest = magnitude.amax(-1, keepdim=True)
        if not bool(torch.isfinite(largest).all()):
            raise ValueError("only finite values can be packed")
        exponent = torch.frexp(largest)[1] - 3  # largest in [4, 8) units of 2^exponent
        exponent = exponent + (torch.ldexp(largest, -exponent) > 7.0)
        exponent = torch.where(largest == 0, 0, exponent).clamp(-127, 127)
        units = magnitude * torch.ldexp(torch.ones_like(largest), -exponent)
        nearest = _nearest(units)
        if closest:
            finer = _nearest(units * 2) / 2
            better = (finer - units).square().sum(-1, keepdim=True) < (nearest - units).square().sum(-1, keepdim=True)
            better &= exponent > -127
            nearest = torch.where(better, finer * 2, nearest)
            exponent = exponent - better.int()
        code = torch.minimum(torch.minimum(nearest * 2, nearest + 2), nearest / 2 + 4)  # MAGNITUDES backwards
        code = code.to(torch.uint8) | torch.signbit(x).to(torch.uint8) << 3
        codes[part] = code[:, 0::2] | code[:, 1::2] << 4
        scales[part] = exponent.squeeze(-1) + 127
    return MXFP4(codes.view(*values.shape[:-1], -1), scales.view(*values.shape[:-1], -1))


def _nearest(units: Tensor) -> Tensor:
    """Return the nearest of ``MAGNITUDES``, the even code on a tie; its steps are 0.5, from 2 on 1, from 4 on 2."""
    step = 0.5 + 0.5 * (units >= 2) + (units >= 4)
    return (units / step).round_().mul_(step).clamp_(max=MAGNITUDES[-1])


@dataclass(frozen=True)
class Int8:
    """A matrix of whole numbers from -127 to 127, with a scale for each row.

    ``codes`` int8 [.., O, I]; ``scales`` float32 [.., O]. A value is its code times the scale of its row.
    """

    codes: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        """The shape of the matrix that is packed."""
        return self.codes.shape

    @property
    def nbytes(self) -> int:
        """How many bytes it takes."""
        return self.codes.nbytes + self.scales.nbytes

    def to(self, device: torch.device) -> "Int8":
        """The same matrix in another device's memory."""
        return Int8(self.codes.to(device), self.scales.to(device))

    def unpack(self, dtype: torch.dtype) -> Tensor:
        """Every value: exact in float64, and else the product in float32, rounded to ``dtype``."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return (self.codes.to(wide) * self.scales.to(wide).unsqueeze(-1)).to(dtype)


def pack_int8(values: Tensor) -> Int8:
    """Round ``values`` [.., O, I] to int8; rows of zeros get scale 1.

    A row's scale is the one of ``SHRINKS`` times largest / 127 that has the smallest squared error.
    """
    rows = values.reshape(-1, values.shape[-1])
    codes = torch.empty(rows.shape, dtype=torch.int8)
    scales = torch.empty(len(rows))
    limits = torch.finfo(torch.float32)
    step = max(1, BLOCK // rows.shape[1])
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        x = rows[part].float()
        largest = x.abs().amax(-1, keepdim=True)
        if not bool(torch.isfinite(largest).all()):
            raise ValueError("only finite values can be packed")
        scale = (largest / 127).clamp(limits.tiny, limits.max / 128)  # neither x / scale nor 127 * scale overflows
        scale = torch.where(largest == 0, 1.0, scale)
        units = x / scale  # errors are compared in these, so that no square overflows or vanishes
        best, shrink = torch.full_like(scale, torch.inf), torch.ones_like(scale)
        for candidate in SHRINKS:
            error = _whole(units / candidate).mul_(candidate).sub_(units).square_().sum(-1, keepdim=True)
            shrink[error < best] = candidate
            best = torch.minimum(error, best)
        codes[part] = _whole(units / shrink)
        scales[part] = (scale * shrink).squeeze(-1)
    return Int8(codes.view(values.shape), scales.view(values.shape[:-1]))


def _whole(units: Tensor) -> Tensor:
    return units.round_().clamp_(-127, 127)
