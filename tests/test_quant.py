"""MXFP4: what the bytes mean, and the rule that packs them."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltafin.errors import CheckpointError
from deltafin.quant import GROUP, MAGNITUDES, MXFP4, check_scales, pack_mxfp4


def group(code, scale):
    return MXFP4(torch.full((1, 16), code * 17, dtype=torch.uint8), torch.tensor([[scale]], dtype=torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_scale_byte_is_its_power_of_two(dtype):
    for scale in range(255):
        value = group(2, scale).unpack(dtype)  # code 2 is 1.0
        assert (value.double() == math.ldexp(1.0, scale - 127)).all(), scale


def test_scale_255_is_not_a_number_and_is_refused_by_name():
    assert group(2, 255).unpack(torch.float32).isnan().all()
    with pytest.raises(CheckpointError, match=r"some\.weight_scale .*255"):
        check_scales(group(2, 255), "some.weight_scale")
    check_scales(group(2, 254), "fine")


def test_every_code_is_its_value_and_the_low_nibble_comes_first():
    for code in range(16):
        sign = -1.0 if code & 8 else 1.0
        value = group(code, 127).unpack(torch.float32)
        assert (value == sign * MAGNITUDES[code & 7]).all()
        assert (torch.signbit(value) == bool(code & 8)).all()
    mixed = MXFP4(torch.full((1, 16), 0x72, dtype=torch.uint8), torch.tensor([[127]], dtype=torch.uint8))
    assert mixed.unpack(torch.float32)[0, :4].tolist() == [1.0, 6.0, 1.0, 6.0]


def test_bfloat16_holds_every_value_of_ordinary_scales():
    for code in range(16):
        for scale in range(1, 253):
            w = group(code, scale)
            assert torch.equal(w.unpack(torch.bfloat16).float(), w.unpack(torch.float32))


@given(
    st.lists(st.sampled_from([*MAGNITUDES, *(-m for m in MAGNITUDES)]), min_size=32, max_size=32),
    st.integers(-120, 120),
)
def test_values_that_fit_come_back_unchanged(values, exponent):
    w = torch.tensor([values], dtype=torch.float64) * 2.0**exponent
    assert torch.equal(pack_mxfp4(w).unpack(torch.float64), w)


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=64, max_size=64))
def test_rounding_stays_within_the_format(values):
    w = torch.tensor([values], dtype=torch.float64)
    got, largest = pack_mxfp4(w).unpack(torch.float64), w.view(-1, GROUP).abs().amax(-1)
    # The largest is 3.5 to 7 units and the grid's widest step 2: no error passes 1 unit, which is 2/7 of the largest.
    bound = (largest * (1 / 3.5) + 2.0**-127).repeat_interleave(GROUP).view_as(w)
    assert (got - w).abs().le(bound).all()
    assert torch.equal(torch.sign(got) * torch.sign(w), torch.sign(got).abs())  # nothing changes sign


@pytest.mark.parametrize("values", [torch.zeros(2, 32), torch.full((2, 32), 1e-40), torch.eye(32) * 1e30])
def test_zeros_tiny_values_and_outliers_give_no_nan(values):
    packed = pack_mxfp4(values)
    assert not (packed.scales == 255).any()
    unpacked = packed.unpack(torch.float32)
    assert unpacked.isfinite().all()
    assert (unpacked[values == 0] == 0).all()


def test_infinity_cannot_be_packed():
    with pytest.raises(ValueError, match="finite"):
        pack_mxfp4(torch.full((1, 32), torch.inf))
