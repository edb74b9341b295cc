"""The CPU kernels: the same bits for any number of rows and threads, and never a plausible number out of a NaN.

That they are right is the business of ``deltafin verify`` (test_verify.py), which meets every row of every table.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoints
import numba
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import deltafin
from deltafin import Session, machine, ops, verify
from deltafin.config import SiLU, SiTU
from deltafin.cpu_kernels import OPS, compiling, many, stored, threads, tiles, vector, warm
from deltafin.errors import NumericsError
from deltafin.model.decoder import forward
from deltafin.ops import REFERENCE, DeltaState, DeltaWeights, Expert
from deltafin.quant import GROUP, pack_int8, pack_mxfp4

ROOT = Path(__file__).parents[1]
ROWS = sorted(ops.overrides(OPS))
COUNTS = (1, 2, 5)
PACK: dict[str, Callable[[Tensor], Any]] = {
    "float32": lambda w: w,
    "bfloat16": Tensor.bfloat16,
    "int8": pack_int8,
    "MXFP4": pack_mxfp4,
}


# Calls of every row -------------------------------------------------------------------------------------------------


class Sizes:
    """Where a random call comes from: numbers of a seed, and choices from low to high, which may be drawn.

    ``scale`` makes matrices larger, so that there is work for several threads.
    """

    def __init__(self, seed: int, choose: Callable[[int, int], int], scale: int = 1) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.choose = choose
        self.scale = scale

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random)

    def form(self) -> str:
        return list(PACK)[self.choose(0, len(PACK) - 1)]

    def size(self, most: int) -> int:
        return self.scale * self.choose(1, most)

    def width(self, form: str) -> int:
        return GROUP * self.size(6) if form == "MXFP4" else self.size(150)


def linear(s: Sizes, rows: int) -> tuple[Any, ...]:
    form = s.form()
    columns = s.width(form)
    return s.normal(1, rows, columns), PACK[form](s.normal(s.size(60), columns))


def linears(s: Sizes, rows: int) -> tuple[Any, ...]:
    columns = GROUP * s.size(5)
    return s.normal(1, rows, columns), [pack(s.normal(s.size(30), columns)) for pack in PACK.values()]


def gated(s: Sizes, rows: int) -> tuple[Any, ...]:
    form = s.form()
    outer, inner = s.width(form), s.width(form)
    shapes = ((inner, outer), (inner, outer), (outer, inner))
    weights = (PACK[form](s.normal(*shape) / 6) for shape in shapes)
    return s.normal(1, rows, outer), *weights, (SiLU(), SiTU())[s.choose(0, 1)]


def experts(s: Sizes, rows: int) -> tuple[Any, ...]:
    form = s.form()
    outer, inner, count = s.width(form), s.width(form), s.choose(2, 6)
    shapes = ((inner, outer), (inner, outer), (outer, inner))
    stored = [Expert._make(PACK[form](s.normal(*shape) / 6) for shape in shapes) for _ in range(count)]
    chosen = s.choose(1, count)
    ids = torch.stack([torch.randperm(count, generator=s.random)[:chosen].sort().values for _ in range(rows)])
    weights = torch.rand(rows, chosen, generator=s.random)
    return s.normal(rows, outer), ids, weights, stored.__getitem__, (SiLU(), SiTU())[s.choose(0, 1)]


def rms_norm(s: Sizes, rows: int) -> tuple[Any, ...]:
    width = s.choose(1, 150)
    return s.normal(1, rows, width), s.normal(width), 1e-5


def mix_depth(s: Sizes, rows: int) -> tuple[Any, ...]:
    width = s.choose(1, 150)
    return s.normal(s.choose(1, 9), 1, rows, width), s.normal(width), 1e-5


def route(s: Sizes, rows: int) -> tuple[Any, ...]:
    width, count = s.choose(1, 100), s.choose(1, 40)
    chosen = s.choose(1, count)
    return s.normal(rows, width), s.normal(count, width) / 6, s.normal(count) / 9, chosen, bool(s.choose(0, 1)), 2.5


def delta_net(s: Sizes, rows: int) -> tuple[Any, ...]:
    heads, groups, key, value, taps = s.choose(1, 3), s.choose(1, 2), s.choose(1, 70), s.choose(1, 50), s.choose(1, 4)
    keys, values = heads * key, heads * groups * value
    decays = heads * groups * (key if s.choose(0, 1) else 1)
    weights = DeltaWeights(
        s.normal(keys, taps) / 2,
        s.normal(keys, taps) / 2,
        s.normal(values, taps) / 2,
        torch.rand(heads * groups, generator=s.random),
        s.normal(decays),
        1 + s.normal(value) / 4,
    )
    state = DeltaState(
        s.normal(1, taps - 1, keys),
        s.normal(1, taps - 1, keys),
        s.normal(1, taps - 1, values),
        s.normal(1, heads * groups, value, key),
    )
    inputs = (s.normal(1, rows, c) for c in (keys, keys, values, decays, heads * groups, values))
    return *inputs, weights, state, (None, -5.0)[s.choose(0, 1)], 1e-5


def latent(s: Sizes, rows: int) -> tuple[Any, ...]:
    heads, rank = s.choose(1, 5), s.choose(1, 70)
    plain, common, value = s.choose(1, 20), s.choose(1, 20), s.choose(1, 20)
    seen = rows + s.choose(0, 700)
    up = PACK[("float32", "bfloat16", "int8")[s.choose(0, 2)]](s.normal(heads * (plain + value), rank) / 4)
    cache = torch.bfloat16 if s.choose(0, 1) else torch.float32
    q = s.normal(1, rows, heads, plain + common)
    return q, s.normal(1, seen, rank).to(cache), s.normal(1, seen, common).to(cache), up, value


MAKE: dict[str, Callable[[Sizes, int], tuple[Any, ...]]] = {
    "linear": linear,
    "linears": linears,
    "gated": gated,
    "experts": experts,
    "rms_norm": rms_norm,
    "mix_depth": mix_depth,
    "route": route,
    "delta_net": delta_net,
    "attention": latent,
}


AXIS = {"mix_depth": 2, "route": 0, "experts": 0}
"""Which dimension of the first argument counts rows, where it is not the second."""


def pieces(op: str, arguments: tuple[Any, ...], count: int) -> Iterator[tuple[Any, ...]]:
    """The same call in calls of ``count`` rows; what is state goes from one to the next."""
    first = arguments[0]
    if op == "attention":
        q, latent, shared, *rest = arguments
        before = latent.shape[1] - q.shape[1]
        for at in range(0, q.shape[1], count):
            part = q[:, at : at + count]
            end = before + at + part.shape[1]
            yield part, latent[:, :end], shared[:, :end], *rest
        return
    axis = AXIS.get(op, 1)
    split = {"delta_net": 6, "experts": 3}.get(op, 1)
    parts = [a.split(count, axis) for a in arguments[:split]]
    for i in range(len(first.split(count, axis))):
        yield *(p[i] for p in parts), *arguments[split:]


def results(op: str, arguments: tuple[Any, ...], count: int, table: ops.Ops = OPS) -> verify.Result:
    """What a call in pieces of ``count`` rows answers, put together, and the state it leaves."""
    state = verify.STATE.get(op, ())
    arguments = tuple(verify._each(torch.clone, a) for a in arguments)
    answers = [getattr(table, op)(*piece) for piece in pieces(op, arguments, count)]
    axis = 0 if op in ("route", "experts") else 1
    each = [a if isinstance(a, tuple) else (a,) for a in answers]
    return *(torch.cat(parts, axis) for parts in zip(*each, strict=True)), *(t for i in state for t in arguments[i])


def same(a: verify.Result, b: verify.Result) -> bool:
    """Whether all bits are the same, those of NaN included."""
    pairs = [(x.contiguous(), y.contiguous()) for x, y in zip(a, b, strict=True)]
    return all(x.dtype == y.dtype and torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in pairs)


def fixed(op: str, seed: int, rows: int, scale: int = 1) -> tuple[Any, ...]:
    """A call whose sizes are decided by a seed."""
    chance = np.random.default_rng(seed)
    return MAKE[op](Sizes(seed, lambda low, high: int(chance.integers(low, high + 1)), scale), rows)


def drawn(op: str, data: st.DataObject, rows: int) -> tuple[Any, ...]:
    return MAKE[op](Sizes(data.draw(st.integers(0, 2**31)), lambda a, b: data.draw(st.integers(a, b))), rows)


def test_every_row_is_tested_here():
    assert sorted(MAKE) == ROWS


# One row or several, one thread or two ------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ROWS)
@given(data=st.data())
def test_rows_at_once_give_the_bits_of_one_by_one_and_the_numbers_of_the_reference(op, data):
    rows = data.draw(st.sampled_from((*COUNTS, ops.FEW)))
    arguments = drawn(op, data, rows)
    by_one = results(op, arguments, 1)
    for count in (2, 5, rows):
        assert same(results(op, arguments, count), by_one), count
    exact = tuple(verify._cast(a, torch.float64) for a in arguments)
    error = verify.compare(by_one, verify.result(getattr(REFERENCE, op), list(exact), verify.STATE.get(op, ())))[1]
    assert error <= verify.BOUNDS.get(f"{op} float32", verify.BOUNDS["float32"])


@pytest.mark.parametrize("op", ROWS)
def test_the_cases_of_verify_give_the_same_bits_row_by_row(op):
    tried = 0
    for case, arguments in verify.cases(op):
        axis = AXIS.get(op, 1)
        if arguments[0].ndim > axis and 1 < arguments[0].shape[axis] <= ops.FEW:
            tried += 1
            at_once = results(op, arguments, ops.FEW)
            assert same(results(op, arguments, 1), at_once), case
            assert same(results(op, arguments, 2), at_once), case
    assert tried


@contextmanager
def on(count: int) -> Iterator[None]:
    """Use so many threads, pinned nowhere, for a while."""
    before, torch_before = threads.threads(), torch.get_num_threads()
    threads.use(count, [])
    try:
        yield
    finally:
        threads.use(before, [])
        torch.set_num_threads(torch_before)


several = pytest.mark.skipif(
    numba.config.NUMBA_NUM_THREADS < 2,  # type: ignore[attr-defined]
    reason="this machine has one core, so Numba has one thread",
)


@several
@pytest.mark.parametrize("op", ROWS)
@pytest.mark.parametrize("seed", range(8))
def test_two_threads_give_the_bits_of_one(op, seed, monkeypatch):
    for name in ("delta", "attention"):
        monkeypatch.setattr(sys.modules[f"deltafin.cpu_kernels.{name}"], "PARALLEL", 0)
    for rows in COUNTS:
        arguments = fixed(op, seed, rows, scale=10)
        with on(1):
            want = results(op, arguments, rows)
        with on(2):
            assert threads.threads() == 2
            assert same(results(op, arguments, rows), want)
            assert same(results(op, arguments, 1), want)


# Activations in bfloat16 --------------------------------------------------------------------------------------------


def in_tiles(s: Sizes, rows: int) -> tuple[Any, ...]:
    """A call of ``attention`` of the widths and in the type that tiles take."""
    heads, rank, common = s.choose(1, 40), 64 * s.choose(1, 3), 32 * s.choose(1, 2)
    plain, value, seen = s.choose(1, 20), s.choose(1, 20), rows + s.choose(0, 1500)
    up = PACK[("float32", "bfloat16", "int8")[s.choose(0, 2)]](s.normal(heads * (plain + value), rank) / 4)
    latent, shared = (s.normal(1, seen, width).bfloat16() for width in (rank, common))
    return s.normal(1, rows, heads, plain + common).bfloat16(), latent, shared, up, value


HALVES = ("linear", "linears", "gated", "experts", "attention")
"""Operations that take shorter ways with activations in bfloat16."""


def halved(op: str, seed: int, rows: int, scale: int = 1) -> tuple[Any, ...]:
    """A call with activations in bfloat16."""
    if op == "attention":
        chance = np.random.default_rng(seed)
        return in_tiles(Sizes(seed, lambda low, high: int(chance.integers(low, high + 1))), rows)
    first, *rest = fixed(op, seed, rows, scale)
    return first.bfloat16(), *rest


def wide_result(op: str, arguments: tuple[Any, ...], dtype: torch.dtype) -> verify.Result:
    """What the reference says to the same activations in a wider type."""
    inputs = 3 if op == "attention" else 1
    widened = [a.to(dtype) for a in arguments[:inputs]]
    return verify.result(getattr(REFERENCE, op), widened + [verify._cast(a, dtype) for a in arguments[inputs:]], ())


@pytest.mark.parametrize("op", HALVES)
@pytest.mark.parametrize("seed", range(12))
def test_in_bfloat16_neither_rows_nor_threads_change_a_bit(op, seed, monkeypatch):
    monkeypatch.setattr(sys.modules["deltafin.cpu_kernels.attention"], "PARALLEL", 0)
    arguments = halved(op, seed, 5, scale=10)
    with on(1):
        want = results(op, arguments, 5)
        assert all(same(results(op, arguments, count), want) for count in (1, 2))
    if numba.config.NUMBA_NUM_THREADS > 1:  # type: ignore[attr-defined]
        with on(2):
            assert all(same(results(op, arguments, count), want) for count in (1, 5))


@pytest.mark.parametrize("op", HALVES)
@pytest.mark.parametrize("seed", range(12))
def test_in_bfloat16_operations_are_as_good_as_their_results_are_stored(op, seed):
    arguments = halved(op, seed, 5, scale=10)
    want = wide_result(op, arguments, torch.float64)
    bound = 2**-6 if op == "attention" else 2**-8  # its queries and weights are rounded too
    assert verify.compare(results(op, arguments, 5), want)[1] < bound


def coarse_errors(columns: int) -> list[float]:
    """How far products with coarse inputs are off: over the largest input and the sum of a row's magnitudes."""
    linear = sys.modules["deltafin.cpu_kernels.linear"]
    s, errors = Sizes(columns, lambda low, high: high), []
    x = torch.cat([s.normal(4, columns), s.normal(1, columns).sign()])
    for pack in (pack_int8, pack_mxfp4):
        weight = pack(torch.cat([s.normal(9, columns), s.normal(1, columns).sign(), torch.ones(1, columns)]))
        y = torch.empty(len(x), 11)
        xs = x.numpy()
        linear.few_rows(stored.described(weight).table, xs, True, stored.scratch(xs), y.numpy(), 2)
        exact = weight.unpack(torch.float64)
        most = x.abs().amax(1, keepdim=True) * exact.abs().sum(1)
        errors.append(float(((y - x.double() @ exact.T) / most).abs().max()))
    return errors


@pytest.mark.parametrize("columns", [32, 96, 128, 640, 1024, 2304, 8192, 12288, 32768])
def test_coarse_inputs_are_rounded_to_2_to_the_minus_14_of_the_largest(columns):
    assert max(coarse_errors(columns)) < 2**-14


@given(st.integers(0, 2**31), st.sampled_from((torch.nan, torch.inf, -torch.inf)), st.sampled_from(HALVES))
def test_in_bfloat16_what_is_not_finite_never_becomes_a_plausible_number(seed, value, op):
    arguments = list(halved(op, seed % 64, 3))
    which = seed % (3 if op == "attention" else 1)
    arguments[which] = arguments[which].clone()
    arguments[which].view(-1)[seed % arguments[which].numel()] = value
    got = results(op, tuple(arguments), 3)
    want = wide_result(op, tuple(arguments), torch.float32)
    for g, w in zip(got, want, strict=True):
        assert not torch.isfinite(g)[~torch.isfinite(w)].any()


@given(st.integers(0, 2**31), st.integers(1, 5))
def test_tiles_do_not_see_what_lies_behind_the_cache(seed, rows):
    q, latent, shared, up, value = halved("attention", seed, rows)
    views = [torch.cat([c, torch.full_like(c, torch.nan)], 1)[:, : c.shape[1]] for c in (latent, shared)]
    want = OPS.attention(q, latent, shared, up, value)
    assert same((OPS.attention(q, *views, up, value),), (want,))
    assert torch.isfinite(want).all()


@pytest.mark.skipif(not tiles.allowed(), reason="this processor, or this system, has no tiles")
def test_tiles_say_what_vectors_say(monkeypatch):
    for seed in range(6):
        arguments = halved("attention", seed, 5)
        by_tiles = OPS.attention(*arguments)
        with monkeypatch.context() as patch:
            patch.setattr(tiles, "allowed", lambda: False)
            by_vectors = OPS.attention(*arguments)
        assert 0 < verify.compare((by_tiles,), (by_vectors,))[1] < 2**-6


# Garbage ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("byte", [0xFF, 0x7F], ids=["NaN", "3e38"])
@pytest.mark.parametrize("op", ROWS)
def test_what_new_memory_holds_does_not_matter(op, byte, monkeypatch):
    def poisoned(make: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
        def empty(*arguments: Any, **options: Any) -> np.ndarray:
            made = make(*arguments, **options)
            made.reshape(-1).view(np.uint8).fill(byte)
            return made

        return empty

    for seed in range(6):
        arguments = fixed(op, seed, 3)
        want = results(op, arguments, 3)
        with monkeypatch.context() as patch:
            for name in ("empty", "empty_like"):
                patch.setattr(np, name, poisoned(getattr(np, name)))
            assert same(results(op, arguments, 3), want)


BAD = (torch.nan, torch.inf, -torch.inf)


@pytest.mark.parametrize("op", ROWS)
@given(data=st.data())
def test_what_is_not_finite_never_becomes_a_plausible_number(op, data):
    rows = 3
    arguments = drawn(op, data, rows)
    clean = results(op, arguments, rows)
    inputs = {"delta_net": 6, "attention": 3}.get(op, 1)
    which = data.draw(st.integers(0, inputs - 1))
    spoilt = arguments[which].clone()
    place = data.draw(st.integers(0, spoilt.numel() - 1))
    # An infinite decay is a decay to 0 and an infinite value spoils its own channel: NaN alone must spread everywhere.
    spoilt.view(-1)[place] = data.draw(st.sampled_from(BAD[:1] if op == "delta_net" else BAD))
    arguments = (*arguments[:which], spoilt, *arguments[which + 1 :])
    got, want = results(op, arguments, rows), results(op, arguments, rows, REFERENCE)
    axis = 0 if op in ("route", "experts") else 1
    for g, w, c in zip(got, want, clean, strict=True):
        if op == "delta_net":  # where exactly a NaN spreads may differ; that it shows may not
            assert torch.isfinite(w).all() or any(not torch.isfinite(x).all() for x in got)
        elif g.dtype.is_floating_point:
            assert not torch.isfinite(g)[~torch.isfinite(w)].any()
        if inputs == 1:  # one row is spoilt, and no other differs
            row = (~torch.isfinite(spoilt)).nonzero()[0, AXIS.get(op, 1)].item()
            others = [i for i in range(rows) if i != row]
            assert same((g.index_select(axis, torch.tensor(others)),), (c.index_select(axis, torch.tensor(others)),))


@given(st.integers(0, 2**31), st.integers(1, 5), st.integers(1, 300), st.sampled_from([torch.float32, torch.bfloat16]))
def test_what_lies_behind_the_cache_does_not_matter(seed, rows, room, dtype):
    q, latent, shared, up, value = fixed("attention", seed, rows)
    buffers = [torch.full((1, c.shape[1] + room, c.shape[2]), torch.nan, dtype=dtype) for c in (latent, shared)]
    for buffer, c in zip(buffers, (latent, shared), strict=True):
        buffer[:, : c.shape[1]] = c
    views = [buffer[:, : latent.shape[1]] for buffer in buffers]
    want = OPS.attention(q, *(v.clone() for v in views), up, value)
    assert same((OPS.attention(q, *views, up, value),), (want,))
    assert torch.isfinite(want).all()


# Whole models -------------------------------------------------------------------------------------------------------

MODELS = {
    "Kimi K3": {},
    "Kimi Linear": {
        "linear_gate_lower_bound": None,
        "linear_use_full_rank_gate": None,
        "routed_expert_hidden_size": None,
        "latent_moe_use_norm": None,
        "q_lora_rank": None,
        "mla_use_output_gate": None,
        "attn_res_block_size": None,
        "hidden_act": "silu",
        "num_shared_experts": 1,
    },
}
IDS = np.random.default_rng(8).integers(0, 50, 60).tolist()


@pytest.fixture(scope="module", params=MODELS)
def folder(request, tmp_path_factory):
    """A model whose widths are no multiples of anything, heads have keys and values of different widths."""
    c = checkpoints.config(**MODELS[request.param])
    return checkpoints.write(tmp_path_factory.mktemp("model") / "model", c, checkpoints.tensors(c))


def decoded(decoder, counts=(1,), ids=IDS):
    """Logits of all of ``ids`` and the state after them, in pieces of ``counts`` in turn."""
    state, at, turn, out = decoder.empty_state(), 0, 0, []
    while at < len(ids):
        part = ids[at : at + counts[turn % len(counts)]]
        out.append(forward(decoder, state, torch.tensor([part]), last=len(part)))
        at, turn = at + len(part), turn + 1
    return torch.cat(out, 1), *(t for s in state for t in s.tensors().values())


HOW = {
    "as stored": {},
    "int8": {"resident": "int8", "experts": "int8"},
    "in bfloat16": {"dtype": "bfloat16"},
    "int8 in bfloat16": {"dtype": "bfloat16", "resident": "int8", "experts": "int8"},
}


@pytest.mark.parametrize("packing", HOW.values(), ids=HOW)
def test_a_model_gives_the_same_bits_for_any_number_of_tokens_and_threads(folder, packing):
    decoder = deltafin.load(folder, **packing).decoder
    want = decoded(decoder)
    for counts in ((2,), (5,), (8,), (3, 1, 7)):
        assert same(decoded(decoder, counts), want), counts


@several
def test_a_model_gives_the_same_bits_on_two_threads(monkeypatch):
    for name in ("delta", "attention"):
        monkeypatch.setattr(sys.modules[f"deltafin.cpu_kernels.{name}"], "PARALLEL", 0)
    decoder = deltafin.load("nano").decoder  # large enough that work is shared out
    ids = [i * 37 % 4000 for i in range(40)]
    with on(1):
        want = decoded(decoder, ids=ids)
    with on(2):
        assert same(decoded(decoder, ids=ids), want)
        assert same(decoded(decoder, (5,), ids), want)


def test_whole_sublayers_give_what_their_operations_give(folder):
    decoder = deltafin.load(folder).decoder
    table = replace(OPS, whole={})
    apart = replace(decoder, blocks=tuple(replace(b, ops=table) for b in decoder.blocks))
    assert verify.compare(decoded(decoder, (1, 3)), decoded(apart, (1, 3)))[1] < verify.BOUNDS["model float32"]


def test_a_model_decodes_what_the_reference_says(folder):
    got = decoded(deltafin.load(folder).decoder)
    want = decoded(deltafin.load(folder, backend="reference").in_dtype(torch.float64))
    assert verify.compare(got, want)[1] < verify.BOUNDS["model float32"]


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("form", PACK)
def test_many_rows_of_bfloat16_are_rounded_nowhere_but_at_the_end(form, halves, monkeypatch):
    """A sum in bfloat16 of 4096 products would be off by far more than the rounding of the result."""
    monkeypatch.setattr(many, "HALVES", halves)
    s = Sizes(3, lambda low, high: high)
    x, weight = s.normal(40, 4096).bfloat16(), PACK[form](s.normal(300, 4096))
    want = x.double() @ (weight if isinstance(weight, Tensor) else weight.unpack(torch.float64)).double().T
    error = (OPS.linear(x, weight).double() - want).norm() / want.norm()
    assert error < 2**-8


@given(st.integers(1, 5000))
def test_rows_for_products_in_bfloat16_have_few_sizes(rows):
    """Code is made for each size, and stays."""
    more = many.filled(rows)
    assert rows <= more <= max(rows + 7, rows * 9 // 8)
    assert many.filled(more) == more
    assert len({many.filled(n) % many.ROWS for n in range(rows, rows + many.ROWS)}) == 32


def test_a_prompt_multiplies_in_few_sizes_and_means_the_same(monkeypatch):
    """However its rows are shared out over experts; what fills a size up is seen by nobody."""
    s, plain, seen = Sizes(5, lambda low, high: high), torch.mm, set[int]()
    stack = [Expert(*(s.normal(*shape).bfloat16() for shape in ((40, 64), (40, 64), (64, 40)))) for _ in range(24)]
    x, share = s.normal(700, 64).bfloat16(), torch.rand(700, 3)
    ids = torch.stack([torch.randperm(n % 22 + 3)[:3].sort().values for n in range(700)])

    def noted(a, b, **out):
        seen.add(len(a))
        return plain(a, b, **out)

    monkeypatch.setattr(torch, "mm", noted)
    monkeypatch.setattr(many, "HALVES", True)
    got = OPS.experts(x, ids, share, stack.__getitem__, SiLU())
    assert seen <= {many.filled(n) % many.ROWS or many.ROWS for n in range(1, many.ROWS + 1)}
    seen.clear()
    OPS.linear(s.normal(1100, 64).bfloat16(), stack[0].gate)
    assert seen == {many.ROWS, 80}
    want = REFERENCE.experts(x.double(), ids, share.double(), stack.__getitem__, SiLU())
    assert verify.compare((got,), (want,))[1] < verify.BOUNDS["bfloat16"]


@pytest.mark.parametrize("shape", [(3, 8), (17, 1)])
def test_more_rows_than_a_kernel_takes_are_the_references_numbers(folder, shape):
    ids = torch.arange(1, 1 + shape[0] * shape[1]).view(shape) % deltafin.load(folder).config.vocab
    got, want = (
        [forward(model.decoder, model.decoder.empty_state(len(ids)), ids, last=shape[1])]
        for model in (deltafin.load(folder), deltafin.load(folder, backend="reference"))
    )
    assert verify.compare(got, want)[1] < verify.BOUNDS["model float32"]


def test_a_saved_session_goes_on_with_the_same_bits(folder, tmp_path):
    model = deltafin.load(folder)
    session = Session(model)
    session.feed(IDS[:30])
    session.feed(IDS[30:35])
    session.save(tmp_path / "session")
    again = Session.load(deltafin.load(folder), tmp_path / "session")
    for token in IDS[35:]:
        assert same((again.feed([token]),), (session.feed([token]),))


def test_a_model_does_not_see_what_lies_behind_its_cache(folder):
    decoder = deltafin.load(folder).decoder

    def after(value):
        state = decoder.empty_state()
        for s in state:
            for name in ("latent_BSR", "shared_BSJ"):
                if hasattr(s, name):
                    getattr(s, name).fill_(value)
        return torch.cat([forward(decoder, state, torch.tensor([[t]])) for t in IDS[:9]], 1)

    assert same((after(torch.nan),), (after(0.0),))


@pytest.mark.parametrize("value", BAD)
def test_a_model_with_a_spoilt_token_says_nothing(folder, value):
    model = deltafin.load(folder)
    embed = model.decoder.edges.embed.clone()
    embed[3, 5] = value
    model.decoder = replace(model.decoder, edges=replace(model.decoder.edges, embed=embed))
    session = Session(model)
    session.feed([1, 2])
    with pytest.raises(NumericsError):
        session.feed([3])


# Processes ----------------------------------------------------------------------------------------------------------


def python(code: str, *arguments: str | Path, timeout: int = 600, **environment: str) -> str:
    """What a fresh process prints that runs ``code``."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


DECODE = """
import hashlib, sys, torch, deltafin
from deltafin.model.decoder import forward
decoder = deltafin.load(sys.argv[1]).decoder
for count in (1, 3):
    state, digest = decoder.empty_state(), hashlib.sha256()
    for at in range(0, 30, count):
        digest.update(forward(decoder, state, torch.arange(at, at + count)[None]).numpy().tobytes())
    print(digest.hexdigest())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc fills new memory on request")
def test_what_new_memory_holds_inside_the_kernels_does_not_matter(folder):
    seen = {python(DECODE, folder, MALLOC_PERTURB_=perturb) for perturb in ("0", "1", "128")}
    assert len(seen) == 1


COMPILED = """
import json, sys
from numba.core import event
import deltafin
names = []
class Listener(event.Listener):
    def on_start(self, what):
        names.append(what.data["dispatcher"].py_func.__qualname__)
    def on_end(self, what):
        pass
deltafin.load("nano")
event.register("numba:compile", Listener())
for path in sys.argv[1:]:
    for options in ({}, {"resident": "int8", "experts": "int8"}, {"dtype": "bfloat16"}):
        session = deltafin.Session(deltafin.load(path, **options))
        for tokens in ([1, 2, 3] * 20, [4], [5, 6]):
            session.feed(tokens)
print(json.dumps(names))
"""


def test_nothing_is_left_to_compile_when_a_model_runs(folder):
    assert json.loads(python(COMPILED, folder, "nano")) == []


FORM = """
import json, sys
from test_kernels import coarse_errors
from deltafin import ops, verify
from deltafin.cpu_kernels import OPS, vector
rows = [verify.check(op, "numba, float32", getattr(OPS, op)) for op in sys.argv[1:]]
wrong = [str(row) for row in rows if not row.ok]
wrong += [columns for columns in (96, 128, 896, 8192) if max(coarse_errors(columns)) >= 2**-14]
print(json.dumps([vector.FORM, wrong]))
"""
GENERIC = {"NUMBA_CPU_NAME": "generic"}
FORMS = {
    "portable": GENERIC | {"NUMBA_CPU_FEATURES": ""},
    "SSSE3": GENERIC | {"NUMBA_CPU_FEATURES": "+ssse3"},
    "AVX2": GENERIC | {"NUMBA_CPU_FEATURES": "+avx2,+fma"},
    "AVX-512 VNNI": GENERIC | {"NUMBA_CPU_FEATURES": "+avx2,+fma,+avx512f,+avx512bw,+avx512vl,+avx512vnni"},
}
NEEDS = {"SSSE3": {"ssse3"}, "AVX2": {"avx2", "fma"}, "AVX-512 VNNI": {"avx512bw", "avx512vl", "avx512vnni"}}


@pytest.mark.parametrize(
    ("form", "rows"),
    [
        *((form, ("linear",)) for form in ("portable", "SSSE3")),
        *(pytest.param(form, tuple(ROWS), marks=pytest.mark.slow) for form in FORMS),
    ],
    ids=lambda value: value if isinstance(value, str) else ", ".join(value) if len(value) == 1 else "every row",
)
def test_every_form_for_other_processors_stays_within_its_bounds(form, rows):
    if missing := NEEDS.get(form, set()) - compiling.FEATURES:
        pytest.skip(f"this processor lacks {', '.join(sorted(missing))}")
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    assert json.loads(python(FORM, *rows, PYTHONPATH=path, **FORMS[form])) == [form, []]


def test_this_processors_form_is_the_best_that_it_can_run():
    best = next(f for f in reversed(FORMS) if NEEDS.get(f, set()) - {"avx512vl", "fma"} <= compiling.FEATURES)
    form, *tile = OPS.form.split(", ")
    assert vector.FORM == form == best
    assert bool(tile) == tiles.allowed()


@pytest.mark.slow
def test_the_first_run_gives_the_bits_of_every_later_one(folder, tmp_path):
    first, later = (python(DECODE, folder, XDG_CACHE_HOME=str(tmp_path)) for _ in range(2))
    assert first == later == python(DECODE, folder)


# Where compiled kernels are kept ------------------------------------------------------------------------------------


@pytest.fixture
def homes(tmp_path, monkeypatch):
    """A home that cannot be written to (a file: that stops an administrator, too), and a temporary folder."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    (tmp_path / "home").write_text("", encoding="utf-8")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path


def test_a_home_that_cannot_be_written_to_is_replaced(homes, monkeypatch):
    folder = compiling._folder()
    assert folder is not None
    assert homes / "temporary" in folder.parents
    monkeypatch.setenv("XDG_CACHE_HOME", str(homes / "better"))
    folder = compiling._folder()
    assert folder is not None
    assert homes / "better" in folder.parents


def test_where_nothing_can_be_written_nothing_is_kept(homes, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(homes / "home"))
    assert compiling._folder() is None
    monkeypatch.setattr(compiling, "FOLDER", None)
    assert compiling.marker() is None
    assert not warm.missing()
    warm.compile_all()  # does nothing, and kernels are compiled when they are used


def test_another_processor_has_another_mark(monkeypatch):
    names = [compiling.marker()]
    monkeypatch.setattr(compiling, "CPU", "another")
    names.append(compiling.marker())
    monkeypatch.setattr(compiling, "FEATURES", compiling.FEATURES | {"more"})
    names.append(compiling.marker())
    assert None not in names
    assert len(set(names)) == 3


def test_progress_is_told_only_where_something_is_compiled(monkeypatch):
    from deltafin.cpu_kernels import prepare

    told, compiled = [], []
    monkeypatch.setattr(warm, "compile_all", lambda: compiled.append(True))
    for missing in (False, True):
        monkeypatch.setattr(warm, "missing", lambda missing=missing: missing)
        prepare(1, [], told.append)
    assert (len(told), len(compiled)) == (1, 1)
    assert told[0].startswith("compiling kernels")


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="threads are pinned on Linux")
@pytest.mark.skipif(len(machine.cores()) < 2, reason="takes two cores")
def test_threads_of_torch_are_not_bound_to_the_core_of_the_first():
    """They would inherit that, and a prompt be read by one core."""
    code = """
        import os, threading
        from deltafin import machine, ops
        import torch

        cores = machine.cores()
        ops.ready("numba", len(cores), cores)
        torch.set_num_threads(len(cores))
        torch.ones(1 << 22).add_(1)
        bound = [os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")]
        assert bound.count({cores[0]}) == 1, bound
    """
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, env=environment)


def test_cores_are_those_of_the_start_though_threads_are_pinned_since(monkeypatch):
    before = machine.cores()
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {before[0]}, raising=False)
    assert machine.cores() == before
