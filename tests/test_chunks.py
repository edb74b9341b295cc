"""Prefill's delta rule in Numba: the numbers of the recurrence however a prompt is cut, the same bits on any threads.

The cases of ``deltafin verify`` meet it as well (test_verify.py); here sizes, cuts and decays are drawn.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deltafin import verify
from deltafin.cpu_kernels import OPS, chunks, delta
from deltafin.ops import FEW, DeltaState, DeltaWeights, reference

EPS = 1.0
"""Large, so that the norm does not blow up the rounding of an output that nearly cancels, as one channel may."""


@dataclass
class Layer:
    """A random layer between its projections."""

    inputs: list[Tensor]
    weights: DeltaWeights
    state: DeltaState
    floor: float | None

    @property
    def tokens(self) -> int:
        return self.inputs[0].shape[1]

    @property
    def heads(self) -> int:
        """How many heads have keys of their own."""
        return self.inputs[0].shape[2] // self.state.S_BHVK.shape[3]

    def fresh(self) -> DeltaState:
        return DeltaState(*(t.clone() for t in self.state))


def layer(
    seed: int, tokens: int, key: int, value: int, heads: int = 2, groups: int = 1, taps: int = 4, batch: int = 1,
    per_channel: bool = True, floor: float | None = None, steep: float = 1.0, shift: float = 0.0,
) -> Layer:  # fmt: skip
    """Decays are made of ``steep`` normal numbers moved by ``shift``."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    keys, all_heads, values = heads * key, heads * groups, heads * groups * value
    decays = all_heads * (key if per_channel else 1)
    weights = DeltaWeights(
        *(normal(channels, taps) / 2 for channels in (keys, keys, values)),
        torch.rand(all_heads, generator=random),
        normal(decays) + shift,
        1 + normal(value) / 4,
    )
    state = DeltaState(
        *(normal(batch, taps - 1, c) for c in (keys, keys, values)), normal(batch, all_heads, value, key)
    )
    inputs = [normal(batch, tokens, c) for c in (keys, keys, values, decays, all_heads, values)]
    inputs[3] *= steep
    return Layer(inputs, weights, state, floor)


def by_chunk(inputs: list[Tensor], layer: Layer, state: DeltaState, threads: int = 1) -> Tensor:
    """The kernel itself, for any number of tokens; nothing of what its output held before may stay."""
    S = state.S_BHVK.numpy()
    groups = S.shape[1] // layer.heads
    out, read = torch.full_like(inputs[2], torch.nan), delta.as_read(layer.weights).tensors
    chunks.many_tokens(
        groups, tuple(x.contiguous().numpy() for x in inputs), tuple(x.numpy() for x in read),
        tuple(t.numpy() for t in state[:3]), S, layer.floor or 0.0, EPS, out.numpy(), threads,
    )  # fmt: skip
    return out


def exactly(layer: Layer) -> verify.Result:
    """Token by token, in float64."""
    *inputs, weights, state = (verify._cast(x, torch.float64) for x in (*layer.inputs, layer.weights, layer.fresh()))
    each = zip(*(x.split(1, 1) for x in inputs), strict=True)
    outs = [reference.delta_net(*token, weights, state, layer.floor, EPS) for token in each]
    return torch.cat(outs, 1), *state


def in_pieces(layer: Layer, cuts: list[int], threads: int = 1) -> verify.Result:
    state = layer.fresh()
    ends = [*sorted({c % layer.tokens for c in cuts} - {0}), layer.tokens]
    starts = [0, *ends[:-1]]
    outs = [
        by_chunk([x[:, a:b] for x in layer.inputs], layer, state, threads) for a, b in zip(starts, ends, strict=True)
    ]
    return torch.cat(outs, 1), *state


def same(a: verify.Result, b: verify.Result) -> bool:
    return all(x.numpy().tobytes() == y.numpy().tobytes() for x, y in zip(a, b, strict=True))


@st.composite
def layers(draw: st.DrawFn, most: int = 150, least_key: int = 1) -> Layer:
    sizes: dict[str, Any] = {
        "tokens": draw(st.integers(1, most)),
        "key": draw(st.sampled_from([k for k in (1, 7, 16, 24, 32, 40, 64, 65) if k >= least_key])),
        "value": draw(st.sampled_from([1, 5, 16, 24, 33, 64])),
        "heads": draw(st.integers(1, 3)),
        "groups": draw(st.integers(1, 3)),
        "taps": draw(st.integers(1, 5)),
        "batch": draw(st.integers(1, 2)),
        "per_channel": draw(st.booleans()),
        "floor": draw(st.sampled_from([None, -5.0, -30.0])),
        "steep": draw(st.sampled_from([0.0, 1.0, 30.0])),
        "shift": draw(st.sampled_from([-12.0, 0.0, 10.0])),
    }
    return layer(draw(st.integers(0, 2**31)), **sizes)


# Numbers ------------------------------------------------------------------------------------------------------------


# A key of one channel may be a convolution that cancelled, brought to norm 1: no float32 gives that within the bound.
@given(layers(least_key=7), st.lists(st.integers(0, 1000), max_size=4))
def test_a_prompt_cut_anywhere_gives_the_numbers_of_the_recurrence(layer, cuts):
    assert verify.compare(in_pieces(layer, cuts), exactly(layer))[1] <= verify.BOUNDS["float32"]


@given(layers(), st.lists(st.integers(0, 1000), max_size=4))
def test_the_tails_are_the_last_inputs_themselves(layer, cuts):
    got = in_pieces(layer, cuts)
    for x, before, after in zip(layer.inputs, layer.state, got[1:4], strict=False):
        assert torch.equal(torch.cat([before, x], 1)[:, x.shape[1] :], after)


@pytest.mark.parametrize("floor", [None, -30.0])
def test_fast_and_slow_decays_in_turn(floor):
    it = layer(3, 300, 24, 16, floor=floor)
    it.inputs[3][:, ::2], it.inputs[3][:, 1::2] = 30.0, -12.0
    assert verify.compare(in_pieces(it, []), exactly(it))[1] <= verify.BOUNDS["float32"]


def test_errors_do_not_grow_with_the_prompt():
    # Hardly any decay: a rounding of each token's decay would add up over a thousand tokens.
    it = layer(5, 1500, 32, 32, steep=0.1, shift=-9.0)
    assert verify.compare(in_pieces(it, []), exactly(it))[1] <= 3e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [FEW + 1, 70])
def test_the_row_of_the_table_uses_it(dtype, tokens, monkeypatch):
    monkeypatch.setattr(reference, "delta_net", None)
    it = layer(7, tokens, 24, 16)
    it.inputs = [x.to(dtype) for x in it.inputs]
    state = it.fresh()
    got = OPS.delta_net(*it.inputs, it.weights, state, it.floor, EPS)
    want, *after = in_pieces(Layer([x.float() for x in it.inputs], it.weights, it.state, it.floor), [])
    assert same((got.float(), *(t.float() for t in state)), (want.to(dtype).float(), *after))


# Bits ---------------------------------------------------------------------------------------------------------------


@given(layers(), st.integers(2, 5))
def test_any_number_of_threads_gives_the_bits_of_one(layer, threads):
    assert same(in_pieces(layer, []), in_pieces(layer, [], threads))


@given(layers(most=90), st.data())
def test_what_is_not_a_number_never_becomes_a_plausible_number_and_stays_in_its_head(layer, data):
    clean = in_pieces(layer, [])
    spoilt = layer.inputs[data.draw(st.integers(0, 5))]
    place = data.draw(st.integers(0, spoilt.numel() - 1))
    spoilt.view(-1)[place] = torch.nan
    got, want = in_pieces(layer, []), exactly(layer)
    for g, w in zip(got, want, strict=True):
        assert not torch.isfinite(g)[~torch.isfinite(w)].any()
    b, t, channel = np.unravel_index(place, spoilt.shape)
    spoilt_head = channel // (spoilt.shape[2] // layer.heads)
    for g, c in zip((got[0], got[4].unsqueeze(1)), (clean[0], clean[4].unsqueeze(1)), strict=True):
        g, c = (x.reshape(*x.shape[:2], layer.heads, -1) for x in (g, c))
        for seq in range(len(g)):
            for head in range(layer.heads):
                if (seq, head) != (b, spoilt_head):
                    assert same((g[seq, :, head],), (c[seq, :, head],))
    before = t // 4 * 4  # four rows of a product are made at once
    assert same((got[0][b, :before],), (clean[0][b, :before],))


@pytest.mark.parametrize("byte", [0xFF, 0x7F], ids=["NaN", "3e38"])
def test_a_call_writes_all_of_its_output(byte, monkeypatch):
    it = layer(11, 70, 24, 16)
    want = OPS.delta_net(*it.inputs, it.weights, it.fresh(), it.floor, EPS)
    empty = np.empty

    def poisoned(*arguments: Any) -> np.ndarray:
        made = empty(*arguments)
        made.reshape(-1).view(np.uint8).fill(byte)
        return made

    monkeypatch.setattr(np, "empty", poisoned)
    assert same((OPS.delta_net(*it.inputs, it.weights, it.fresh(), it.floor, EPS),), (want,))
