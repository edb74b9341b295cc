"""The Triton row ``delta_net`` against the reference, on a GPU or in Triton's interpreter."""

from collections.abc import Callable, Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from interpreted import DEVICE
from torch import Tensor

from deltafin import verify
from deltafin.gpu_kernels import delta, prompt
from deltafin.ops import FEW, DeltaState, DeltaWeights, reference

# The interpreter's numpy warns where a GPU makes an infinity or a NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

run: Callable[..., Tensor] = delta.delta_net

BOUNDS = {
    # Largest error relative to the largest value of the result, and why it may be that large.
    torch.float32: verify.BOUNDS["float32"],
    torch.bfloat16: 3e-2,  # products of numbers of 8 bits, at 2^-9 each, and what a state of some chunks makes of them
}


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what the row allocates with NaN: a number that is not written, or not meant to be read, shows."""

    new_empty = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda *args, **kwargs: new_empty(*args, **kwargs).fill_(torch.nan))


def moved(arguments: Sequence[Any], convert: Callable[[Tensor], Tensor]) -> list[Any]:
    return [verify._each(convert, a) for a in arguments]


def in_type(arguments: Sequence[Any], dtype: torch.dtype) -> list[Any]:
    """Projections in ``dtype``; weights and state stay in float32."""
    return [a.to(dtype) if isinstance(a, Tensor) else a for a in arguments]


def error(arguments: Sequence[Any]) -> float:
    """The largest error of everything the row answers and leaves behind, relative to the largest value."""
    got = verify.result(delta.delta_net, moved(arguments, lambda x: x.to(DEVICE)), verify.STATE["delta_net"])
    want = verify.result(reference.delta_net, moved(arguments, Tensor.double), verify.STATE["delta_net"])
    return verify.compare(tuple(x.cpu() for x in got), want)[1]


CASES = dict(verify.cases("delta_net"))
LONG = ("200 tokens", "70 tokens, gate", "70 tokens, inputs")  # minutes in the interpreter, and no other code
SHORT = [name for name in CASES if DEVICE == "cuda" or not name.startswith(LONG)]


@pytest.mark.parametrize("case", SHORT)
def test_every_case_in_float32(case):
    assert error(list(CASES[case])) <= BOUNDS[torch.float32]


@pytest.mark.parametrize("case", [name for name in SHORT if DEVICE == "cuda" or name[:2] in ("1 ", "9 ")])
def test_every_case_in_bfloat16(case):
    assert error(in_type(CASES[case], torch.bfloat16)) <= BOUNDS[torch.bfloat16]


def layer(
    tokens: int,
    batch: int = 1,
    key_heads: int = 2,
    groups: int = 1,
    key: int = 16,
    value: int = 16,
    width: int = 4,
    per_channel: bool = True,
    floor: float | None = -5.0,
    seed: int = 0,
) -> list[Any]:
    """Random arguments; the projections are slices of one wide row."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    heads = key_heads * groups
    keys, values, decays = key_heads * key, heads * value, heads * key if per_channel else heads
    w = DeltaWeights(
        normal(keys, width) / 2,
        normal(keys, width) / 2,
        normal(values, width) / 2,
        normal(heads) / 2,
        normal(decays),
        1 + normal(value) / 4,
    )
    q, k, v = (normal(batch, width - 1, channels) for channels in (keys, keys, values))
    s = DeltaState(q, k, v, normal(batch, heads, value, key))
    sizes = [keys, keys, values, decays, heads, values]
    return [*normal(batch, tokens, sum(sizes)).split(sizes, -1), w, s, floor, 1e-5]


@settings(max_examples=5)
@given(
    tokens=st.integers(1, 40),
    batch=st.integers(1, 2),
    key_heads=st.integers(1, 2),
    groups=st.integers(1, 2),
    key=st.integers(3, 40),
    value=st.integers(3, 40),
    width=st.integers(1, 5),
    per_channel=st.booleans(),
    floor=st.sampled_from([None, -1.0, -30.0]),
    seed=st.integers(0, 99),
)
def test_any_shape(**shape):
    assert error(layer(**shape)) <= BOUNDS[torch.float32]


@pytest.mark.parametrize("dtype", BOUNDS)
def test_a_few_tokens_at_once_give_the_bits_of_one_by_one(dtype):
    arguments = moved(in_type(layer(FEW, key_heads=1, groups=2), dtype), lambda x: x.to(DEVICE))
    inputs, rest = arguments[:6], arguments[6:]

    def in_pieces(size: int) -> list[Tensor]:
        w, s, floor, eps = moved(rest, torch.clone)
        pieces = zip(*(x.split(size, 1) for x in inputs), strict=True)
        outputs = [run(*piece, w, s, floor, eps) for piece in pieces]
        return [torch.cat(outputs, 1), *s]

    want = in_pieces(1)
    for size in (2, 5, FEW):
        assert all(torch.equal(a, b) for a, b in zip(in_pieces(size), want, strict=True))


@pytest.mark.skipif(DEVICE == "cpu", reason="another form than in the interpreter, which takes no time for it")
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("channels", [64, 128])
def test_wide_heads(channels, dtype):
    for floor in (None, -5.0):
        arguments = in_type(layer(200, batch=2, key=channels, value=channels, floor=floor), dtype)
        assert error(arguments) <= BOUNDS[dtype]


@pytest.mark.parametrize("tokens", [9, 64, 150])
def test_prompts_of_wide_heads_in_two_kernels(tokens, monkeypatch):
    monkeypatch.setattr(prompt, "SLICE", 128)
    if DEVICE == "cpu":
        monkeypatch.setattr(prompt, "serves", lambda *_: True)
    arguments = in_type(layer(tokens, key_heads=1, key=128, value=128), torch.bfloat16)
    assert error(arguments) <= BOUNDS[torch.bfloat16]


@pytest.mark.parametrize("lasting", [64, 4, 1])
def test_decays_at_their_floor_in_two_kernels(lasting, monkeypatch):
    """All tokens but every so many-th forget as much as they may: no factor may be lost that the next one makes up."""
    if DEVICE == "cpu":
        monkeypatch.setattr(prompt, "serves", lambda *_: True)
    arguments = in_type(layer(70, key_heads=1, key=128, value=128), torch.bfloat16)
    forgetful = torch.arange(70)[:, None] % lasting > 0
    arguments[3] = torch.where(forgetful, 99.0, -99.0).expand_as(arguments[3]).bfloat16()
    assert error(arguments) <= BOUNDS[torch.bfloat16]


@pytest.mark.parametrize("which", range(6))
def test_what_is_not_a_number_shows_in_two_kernels(which, monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(prompt, "serves", lambda *_: True)
    arguments = in_type(layer(9, key_heads=1, key=128, value=128), torch.bfloat16)
    arguments[which][0, 1, 0] = torch.nan
    y = delta.delta_net(*moved(arguments, lambda x: x.to(DEVICE)))[0]
    assert y[1].isnan().all() if which < 5 else y[1, 0].isnan()
    assert y[-1].isnan().all() or which in (0, 5)


def test_decays_out_of_reach_take_other_kernels():
    inputs = (torch.zeros(1, 9, 128, dtype=torch.bfloat16, device=DEVICE),)
    *_, w, s, _, _ = layer(9, key_heads=1, key=128, value=128)
    assert not any(prompt.serves(inputs, w, s, floor) for floor in (None, -5.1, -30.0))


def test_a_prompt_of_several_slices(monkeypatch):
    monkeypatch.setattr(delta, "SLICE", 64)
    assert error(layer(100, key_heads=1)) <= BOUNDS[torch.float32]


@pytest.mark.parametrize("tokens", [3, 20])
@pytest.mark.parametrize("which", range(6))
def test_what_is_not_a_number_shows(tokens, which):
    arguments = layer(tokens, key_heads=1)
    arguments[which][0, 1, 0] = torch.nan
    y = delta.delta_net(*moved(arguments, lambda x: x.to(DEVICE)))[0, :, :16]
    assert y[1].isnan().all() if which < 5 else y[1, 0].isnan()
    assert y[-1].isnan().all() or which in (0, 5)
    assert tokens > FEW or not y[0].isnan().any()


def test_other_types_take_the_reference():
    arguments = moved(layer(3), Tensor.double)
    got, want = (verify.result(f, arguments, verify.STATE["delta_net"]) for f in (delta.delta_net, reference.delta_net))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
