"""Packed numbers: what the bytes mean, and the rules that pack them."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltafin import quant
from deltafin.errors import CheckpointError
from deltafin.quant import GROUP, MAGNITUDES, MXFP4, Int8, check_scales, pack_int8, pack_mxfp4


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
    assert torch.equal(pack_mxfp4(w, closest=True).unpack(torch.float64), w)


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


FLOATS = st.floats(-(2.0**100), 2.0**100, width=32)


def squared_error(packed, values):
    """Sum over the last dimension, in units of the largest value so that nothing overflows."""
    unit = values.double().abs().amax(-1, keepdim=True).clamp(min=1e-300)
    return ((packed.unpack(torch.float64) - values.double()) / unit).square().sum(-1)


@given(st.lists(FLOATS | st.sampled_from([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0]), min_size=32, max_size=32))
def test_each_value_goes_to_the_nearest_code_the_even_one_on_a_tie(values):
    w = torch.tensor([values])
    for closest in (False, True):
        packed = pack_mxfp4(w, closest=closest)
        units = w.double().abs() / 2.0 ** (packed.scales.double() - 127)
        distance = (units.unsqueeze(-1) - torch.tensor(MAGNITUDES, dtype=torch.float64)).abs()
        codes = torch.stack([packed.codes & 7, packed.codes >> 4 & 7], -1).flatten(1)
        assert torch.equal(distance.gather(-1, codes.long().unsqueeze(-1))[..., 0], distance.amin(-1))
        ties = (distance == distance.amin(-1, keepdim=True)).sum(-1) > 1
        assert (codes[ties] % 2 == 0).all()


@given(st.lists(FLOATS, min_size=64, max_size=64))
def test_the_closest_scale_is_never_worse(values):
    w = torch.tensor(values).view(2, 32)
    usual, closest = squared_error(pack_mxfp4(w), w), squared_error(pack_mxfp4(w, closest=True), w)
    assert (closest <= usual).all()


def test_the_closest_scale_is_sometimes_better():
    w = torch.randn(500, 32, generator=torch.Generator().manual_seed(1))
    usual, closest = squared_error(pack_mxfp4(w), w), squared_error(pack_mxfp4(w, closest=True), w)
    assert (closest < 0.999 * usual).float().mean() > 0.01
    for shift in (-1, 1):  # no neighbour of a scale that was chosen has a smaller error
        other = pack_mxfp4(w, closest=True)
        unit = 2.0 ** (other.scales.double() - 127 + shift)
        table = torch.tensor(MAGNITUDES, dtype=torch.float64)
        error = ((w.double().abs() / unit).unsqueeze(-1) - table).abs().amin(-1).mul(unit).square().sum(-1)
        assert (squared_error(other, w) * w.double().abs().amax(-1) ** 2 <= error * (1 + 1e-5)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_numbers_are_packed_the_same_in_any_type(dtype):
    w = torch.randn(40, 96, generator=torch.Generator().manual_seed(2)).to(dtype)
    for closest in (False, True):
        a, b = pack_mxfp4(w, closest=closest), pack_mxfp4(w.double(), closest=closest)
        assert torch.equal(a.codes, b.codes)
        assert torch.equal(a.scales, b.scales)
    a, b = pack_int8(w), pack_int8(w.double())
    assert torch.equal(a.codes, b.codes)
    assert torch.equal(a.scales, b.scales)


@pytest.mark.parametrize("pack", [pack_int8, pack_mxfp4])
def test_matrices_of_any_size_are_packed_block_by_block(pack, monkeypatch):
    w = torch.randn(3, 7, 64, generator=torch.Generator().manual_seed(3))
    whole = pack(w)
    assert whole.shape == w.shape
    assert whole.nbytes == whole.codes.nbytes + whole.scales.nbytes
    for block in (1, 32, 200, 1000):
        monkeypatch.setattr(quant, "BLOCK", max(block, GROUP if pack is pack_mxfp4 else 1))
        parts = pack(w)
        assert torch.equal(parts.codes, whole.codes)
        assert torch.equal(parts.scales, whole.scales)
    for i in range(3):
        assert torch.equal(pack(w[i]).codes, whole.codes[i])


def test_columns_that_are_no_groups_cannot_be_packed():
    with pytest.raises(ValueError, match="48 columns"):
        pack_mxfp4(torch.zeros(2, 48))


# Int8 ---------------------------------------------------------------------------------------------------------------


def test_an_int8_value_is_its_code_times_the_scale_of_its_row():
    packed = Int8(torch.tensor([[1, -127], [0, 3]], dtype=torch.int8), torch.tensor([0.5, 0.1]))
    assert packed.shape == (2, 2)
    wanted = torch.tensor([[0.5, -63.5], [0.0, 3 * torch.tensor(0.1).double()]], dtype=torch.float64)
    assert torch.equal(packed.unpack(torch.float64), wanted)
    assert torch.equal(packed.unpack(torch.float32), wanted.float())
    assert torch.equal(packed.unpack(torch.bfloat16), wanted.float().bfloat16())


@given(st.lists(st.integers(-127, 127), min_size=20, max_size=20), st.integers(-100, 100))
def test_whole_numbers_times_a_power_of_two_come_back_unchanged(values, exponent):
    w = torch.tensor([[*values, 127]], dtype=torch.float64) * 2.0**exponent
    assert torch.equal(pack_int8(w).unpack(torch.float64), w)
    assert pack_int8(w).scales.item() == 2.0**exponent


@given(st.lists(FLOATS, min_size=30, max_size=30))
def test_int8_is_never_worse_than_the_scale_of_the_largest_value(values):
    w = torch.tensor(values).view(2, 15)
    packed, largest = pack_int8(w), w.abs().amax(-1, keepdim=True)
    scale = torch.where(largest == 0, 1.0, (largest / 127).clamp(min=torch.finfo(torch.float32).tiny))
    plain = Int8((w / scale).round().clamp(-127, 127).to(torch.int8), scale.squeeze(-1))
    assert (squared_error(packed, w) <= squared_error(plain, w) + 1e-12).all()
    got = packed.unpack(torch.float64)
    assert (torch.sign(got) * torch.sign(w) >= 0).all()  # nothing changes sign
    inside = w.double().abs() <= 127 * packed.scales.double().unsqueeze(-1)
    half = packed.scales.double().unsqueeze(-1).expand_as(got) * 0.5001
    assert ((got - w).abs() <= half)[inside].all()
    assert packed.codes.min() >= -127


def test_a_long_row_gains_from_cutting_its_largest_values_off():
    w = torch.randn(64, 8192, generator=torch.Generator().manual_seed(4))
    packed, scale = pack_int8(w), w.abs().amax(-1) / 127
    plain = Int8((w / scale.unsqueeze(-1)).round().to(torch.int8), scale)
    assert (packed.scales < 0.995 * scale).float().mean() > 0.5
    assert squared_error(packed, w).sum() < 0.99 * squared_error(plain, w).sum()


@given(st.lists(FLOATS, min_size=8, max_size=8), st.integers(-20, 20))
def test_a_power_of_two_goes_into_the_scale(values, exponent):
    w = torch.tensor([[*values, 2.0**100]])
    a, b = pack_int8(w), pack_int8(w * 2.0**exponent)
    assert torch.equal(a.codes, b.codes)
    assert torch.equal(a.scales * 2.0**exponent, b.scales)


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-40, 1e-37, 1e38, torch.finfo(torch.float32).max])
def test_zeros_tiny_and_huge_values_give_no_nan(value):
    w = torch.tensor([[value, -value, 0.0], [1.0, -2.0, 3.0]])
    packed = pack_int8(w)
    got = packed.unpack(torch.float32)
    assert got.isfinite().all()
    assert (packed.scales > 0).all()
    assert got[0, 2] == 0
    assert (got - w).abs().max() <= max(0.01 * value, 1.2e-2)
    assert (got[0, 0] - value).abs() <= max(0.01 * value, torch.finfo(torch.float32).tiny)


@pytest.mark.parametrize("pack", [pack_int8, pack_mxfp4])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_cannot_be_packed(pack, value):
    w = torch.ones(3, 32)
    w[1, 5] = value
    with pytest.raises(ValueError, match="finite"):
        pack(w)
