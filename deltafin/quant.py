"""Packed number formats: MXFP4, exact to unpack, and the rule that packs it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from deltafin.errors import CheckpointError

GROUP = 32
"""Columns that share one MXFP4 scale."""

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the low three bits of a code mean (E2M1); bit 3 is the sign."""

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

    def unpack(self, dtype: torch.dtype) -> Tensor:
        """Every value, exactly: in float32 and float64 always, in bfloat16 for scales 1 to 252."""
        pairs, scales = _TABLES[torch.float64 if dtype == torch.float64 else torch.float32]
        values = pairs.index_select(0, self.codes.flatten().int()).view(-1, GROUP)
        return (values * scales.index_select(0, self.scales.flatten().int())[:, None]).view(self.shape).to(dtype)


def check_scales(weight: MXFP4, name: str) -> None:
    """Raise ``CheckpointError`` when a scale byte is 255, which stands for not-a-number."""
    if bool((weight.scales == 255).any()):
        raise CheckpointError(
            f"{name} has a scale byte of 255, which means not-a-number", "the file is damaged; fetch it again"
        )


def pack_mxfp4(values: Tensor) -> MXFP4:
    """Round ``values`` [.., C], C a multiple of 32, to MXFP4; values that MXFP4 can hold come back unchanged.

    A group's scale is the power of two that puts its largest magnitude between 3.5 and 7 (beyond 6 is rounded to 6);
    groups of zeros get scale 2^0, so that nothing is divided by zero.
    """
    if not bool(torch.isfinite(values).all()):
        raise ValueError("only finite values can be packed")
    groups = values.to(torch.float64).unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1)
    exponent = torch.frexp(largest)[1] - 3  # largest in [4, 8) units of 2^exponent
    exponent = exponent + (torch.ldexp(largest, -exponent) > 7.0)
    exponent = torch.where(largest == 0, 0, exponent).clamp(-127, 127)
    units = torch.ldexp(groups, -exponent.unsqueeze(-1))
    magnitudes = torch.tensor(MAGNITUDES, dtype=torch.float64)
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    code = torch.bucketize(units.abs(), middles)  # a tie goes to the lower magnitude ...
    tie = torch.isin(units.abs(), middles) & (code % 2 == 1)
    code = code + tie  # ... unless its code is odd: round half to even
    code = (code + 8 * torch.signbit(units)).to(torch.uint8).flatten(-2)
    return MXFP4(code[..., 0::2] | code[..., 1::2] << 4, (exponent + 127).to(torch.uint8))


@dataclass(frozen=True)
class Int8:
    """A matrix of whole numbers with one float32 scale a row: value = code * scale.

    ``codes`` int8 [.., O, I], -127 to 127; ``scales`` float32 [.., O].
    """

    codes: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        """The shape of the matrix that is packed."""
        return self.codes.shape

    def unpack(self, dtype: torch.dtype) -> Tensor:
        """Every value, in ``dtype``."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return (self.codes.to(wide) * self.scales.to(wide).unsqueeze(-1)).to(dtype)
