"""Stored weights on a GPU: each row of the table equals the reference, and few rows have the bits of one."""

import importlib
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deltafin import verify
from deltafin.config import SiLU, SiTU
from deltafin.gpu_kernels.experts import experts, gated
from deltafin.gpu_kernels.linear import linear, linears
from deltafin.ops import Expert, Stack, reference
from deltafin.quant import MXFP4, Int8, pack_int8, pack_mxfp4
from deltafin.weights import Weight

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

STORE: dict[str, Callable[[Tensor], Weight]] = {
    "float32": lambda w: w,
    "bfloat16": Tensor.bfloat16,
    "int8": pack_int8,
    "MXFP4": pack_mxfp4,
}

WIDTHS = (32, 128) if DEVICE == "cuda" else (32,)
"""What the tensor cores take in digits comes in pieces of 128 columns; in the interpreter there is no such form."""

ROWS = {"linear": linear, "linears": linears, "experts": experts, "gated": gated}


def there(a: Any) -> Any:
    """An argument on the device."""
    if isinstance(a, Tensor):
        return a.to(DEVICE)
    if isinstance(a, MXFP4 | Int8):
        return type(a)(a.codes.to(DEVICE), a.scales.to(DEVICE))
    if isinstance(a, Expert):
        return Expert(*map(there, a))
    if isinstance(a, list):
        return [there(b) for b in a]
    if isinstance(a, Stack):
        return Stack(there(a.gate), there(a.up), there(a.down))
    if callable(a) and not isinstance(a, SiLU | SiTU):
        return lambda x: there(a(x))
    return a


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel leaves unwritten is not a number."""
    empty = torch.empty

    def poisoned(*size: int, **options: Any) -> Tensor:
        y = empty(*size, **options)
        return y.fill_(torch.nan) if y.is_floating_point() else y

    monkeypatch.setattr(torch, "empty", poisoned)


def back(y: Any) -> tuple[Tensor, ...]:
    return tuple(t.cpu() for t in (y if isinstance(y, tuple) else (y,)))


def error(op: str, *arguments: Any) -> float:
    got = back(ROWS[op](*(there(a) for a in arguments)))
    exact = [
        a.double() if isinstance(a, Tensor) and a.is_floating_point() and i == 0 else a for i, a in enumerate(arguments)
    ]
    want = getattr(reference, op)(*exact)
    return verify.compare(got, want if isinstance(want, tuple) else (want,))[1]


@pytest.mark.parametrize("op", ROWS)
def test_rows_equal_the_reference_on_every_case(op: str) -> None:
    worst = verify.check(op, "triton, float32", lambda *a: _unpacked(back(ROWS[op](*(there(b) for b in a)))))
    assert worst.ok, worst


def _unpacked(y: tuple[Tensor, ...]) -> Any:
    return y if len(y) > 1 else y[0]


BFLOAT16 = 2**-7
"""The result is rounded to 8 bits, and so are the inner channels of a gated feed-forward in the reference."""


@settings(max_examples=12)
@given(
    st.integers(1, 20),
    st.integers(1, 40),
    st.integers(1, 5),
    st.sampled_from([*STORE]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 1 << 30),
)
def test_any_shape_and_type(rows: int, outputs: int, groups: int, kind: str, dtype: torch.dtype, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    columns = 32 * groups if kind == "MXFP4" else 32 * groups - seed % 32
    x = torch.randn(rows, columns, generator=random).to(dtype)
    weight = STORE[kind](torch.randn(outputs, columns, generator=random))
    bound = BFLOAT16 if dtype == torch.bfloat16 else verify.BOUNDS["float32"]
    assert error("linear", x, weight) <= bound


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")
@pytest.mark.parametrize("kind", ["int8", "MXFP4"])
@pytest.mark.parametrize("columns", [128, 1152, 4224, 7168, 12288])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_digits_are_as_good_as_float32(kind: str, columns: int, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(columns)
    weight = STORE[kind](torch.randn(16 + columns // 29, columns, generator=random))
    bound, least = (BFLOAT16, 2**-134) if dtype == torch.bfloat16 else (verify.BOUNDS["float32"], 2**-148)
    for scale in (1.0, 1e-30, 1e30, 0.0, 1e-38, 1e-43, 1e37):
        for spread in (0.0, 2.0):
            x = torch.randn(7, columns, generator=random) * torch.exp(
                spread * torch.randn(7, columns, generator=random)
            )
            x = (scale * x / x.abs().max()).to(dtype)
            got, want = linear(there(x), there(weight)).cpu(), reference.linear(x.double(), weight)
            close = torch.maximum(bound * want.abs().amax(-1, keepdim=True), torch.tensor(least))
            right = (got.double() - want).abs() <= close
            assert (right if scale <= 1e30 else right | ~got.isfinite()).all()
            alone = linear(there(x[:1]), there(weight)).cpu()
            assert torch.allclose(alone, got[:1], rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")
@pytest.mark.parametrize("columns", [1152, 4224, 12288])
def test_several_int8_weights_are_shared_out(columns: int) -> None:
    random = torch.Generator().manual_seed(columns)
    x = there(torch.randn(16, columns, generator=random))
    sizes = 20_000_000 // columns, 300, 16
    weights = [there(pack_int8(torch.randn(n, columns, generator=random))) for n in sizes]
    alone = [linears(row, weights) for row in x.split(1)]
    for rows in (2, 3, 16):
        for i, got in enumerate(linears(x[:rows], weights)):
            assert torch.equal(got, torch.cat([y[i] for y in alone[:rows]]))
    want = tuple(reference.linear(x.double(), weight) for weight in weights)
    assert verify.compare(linears(x, weights), want)[1] <= verify.BOUNDS["float32"]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")
def test_digits_with_every_scale() -> None:
    scales = torch.arange(0, 255, dtype=torch.uint8).repeat_interleave(4).view(255, 4)
    weight = MXFP4(torch.full((255, 64), 0x71, dtype=torch.uint8), scales)
    for row in (0, 1, 100, 200, 250):
        x = torch.full((1, 128), 2.0 ** (120 - row)) * torch.rand(1, 128)
        want = reference.linear(x.double(), weight)
        got = linear(there(x), there(weight)).cpu().double()
        fits = (want.abs() < 1e35) & (want.abs() > 1e-37)
        right = (got - want).abs() <= 1e-6 * want.abs() + 2**-148
        assert right[fits].all()
        assert (right | ~got.isfinite())[want.abs() >= 1e35].all()


def stack(kind: str, count: int, width: int, columns: int, seed: int) -> Stack:
    random = torch.Generator().manual_seed(seed)
    shapes = ((count, width, columns), (count, width, columns), (count, columns, width))
    return Stack(*(STORE[kind](torch.randn(*s, generator=random) / 8) for s in shapes))


def choice(rows: int, count: int, chosen: int, seed: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(count, generator=random)[:chosen].sort().values for _ in range(rows)])
    return ids, torch.rand(rows, chosen, generator=random)


@pytest.mark.parametrize("kind", STORE)
@pytest.mark.parametrize("rows", [2, 18])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_stack_and_experts_that_are_elsewhere(kind: str, rows: int, width: int) -> None:
    held = stack(kind, 7, width, 2 * width, rows)
    ids, weights = choice(rows, 7, 3, rows)
    ids[::2, 0] = -1
    ids[-1] = -1
    x = torch.randn(rows, 2 * width, generator=torch.Generator().manual_seed(rows))
    for activation in (SiLU(), SiTU()):
        assert error("experts", x, ids, weights, held, activation) <= verify.BOUNDS["float32"]


@pytest.mark.parametrize("kind", STORE)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_few_rows_have_the_bits_of_one(kind: str, width: int) -> None:
    random = torch.Generator().manual_seed(5)
    x = torch.randn(8, 3 * width, generator=random).to(DEVICE)
    weights = [there(STORE[kind](torch.randn(n, 3 * width, generator=random))) for n in (3, 4, 19, 50)]
    held = there(stack(kind, 3, width, 3 * width, 3))
    ids, shares = map(there, choice(8, 3, 2, 1))

    def every(part: slice) -> tuple[Tensor, ...]:
        y = experts(x[part], ids[part], shares[part], held, SiTU())
        return *linears(x[part], weights), y, gated(x[part], *held(2), SiLU())

    alone = {i: every(slice(i, i + 1)) for i in (1, 4)}
    for count in (2, 5, 8):
        for few, *single in zip(every(slice(0, count)), *alone.values(), strict=True):
            for i, y in zip(alone, single, strict=True):
                assert i >= count or torch.equal(few[i : i + 1], y)


@pytest.mark.parametrize("kind", STORE)
def test_inputs_that_begin_inside_a_word(kind: str) -> None:
    random = torch.Generator().manual_seed(8)
    wide, weight = (
        torch.randn(1, 65, generator=random).bfloat16(),
        there(STORE[kind](torch.randn(9, 64, generator=random))),
    )
    x = there(wide)[:, 1:]
    assert torch.equal(linear(x, weight), linear(x.clone(), weight))


@pytest.mark.parametrize("kind", STORE)
def test_as_a_large_weight_is_shared_out(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("deltafin.gpu_kernels.linear")
    shape_of = module.shape_of
    monkeypatch.setattr(module, "shape_of", lambda per, columns, outputs, rows: shape_of(per, columns, 8192, rows))
    random = torch.Generator().manual_seed(6)
    x, weight = torch.randn(9, 160, generator=random), STORE[kind](torch.randn(21, 160, generator=random))
    assert error("linear", x, weight) <= verify.BOUNDS["float32"]
    x, weight = there(x), there(weight)
    y = linear(x, weight)
    assert torch.equal(y[8:], linear(x[8:], weight))
    assert torch.equal(y[3:6], linear(x[3:6], weight))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")
@pytest.mark.parametrize("kind", STORE)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_few_rows_can_be_captured(kind: str, width: int) -> None:
    held, (ids, shares) = there(stack(kind, 6, width, 3 * width, 3)), map(there, choice(2, 6, 3, 1))
    x = torch.randn(2, 3 * width, device=DEVICE)

    def every() -> tuple[Tensor, ...]:
        y = experts(x, ids, shares, held, SiTU())
        return *linears(x, [held(0).gate, held(1).up]), y, gated(x, *held(2), SiLU())

    every()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = every()
    for seed in range(3):
        other = choice(2, 6, 3, seed)
        ids.copy_(other[0])
        shares.copy_(other[1])
        x.normal_()
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, every(), strict=True))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes in NumPy, which warns
@pytest.mark.parametrize("kind", STORE)
@pytest.mark.parametrize("rows", [2, 18])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("width", WIDTHS)
def test_what_is_not_finite_is_so_in_the_reference(kind: str, rows: int, bad: float, width: int) -> None:
    x = torch.randn(rows, 2 * width, generator=torch.Generator().manual_seed(1))
    x[1, 37] = bad
    held = stack(kind, 3, width, 2 * width, 4)
    ids, shares = choice(rows, 3, 2, 1)
    for op, arguments in {
        "linear": (x, held(1).gate),
        "experts": (x, ids, shares, held, SiTU()),
        "gated": (x, *held(0), SiLU()),
    }.items():
        got = torch.isfinite(ROWS[op](*map(there, arguments)).cpu())
        assert not (got & ~torch.isfinite(getattr(reference, op)(*arguments))).any()
        assert got[0].all()
        assert got[2:].all()
