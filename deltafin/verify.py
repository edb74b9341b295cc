"""The proof that users can run: every implementation of every operation, and a model, against float64.

The truth of an operation is the plain torch form in float64 (for the delta rule: token by token). Cases are random
and adversarial; every result is compared as a whole, with the state it leaves behind.
"""

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from deltafin import ops
from deltafin.config import Activation, SiLU, SiTU
from deltafin.model.decoder import Decoder, forward
from deltafin.ops import FEW, DeltaState, DeltaWeights, Expert, reference
from deltafin.quant import MXFP4, Int8, pack_int8, pack_mxfp4
from deltafin.session import Runnable, Session
from deltafin.transfer import on

Result = tuple[Tensor, ...]

BOUNDS = {
    # Largest error relative to the largest value of the result, and why it may be that large.
    "float64": 1e-12,  # rounding of some hundred float64 operations
    "float32": 1e-5,  # the same in float32, at 1e-7 each
    "attention float32": 1e-4,  # a score of hundreds is off by 1e-7 of itself, its exponential by 1e-5 and more
    "bfloat16": 1e-2,  # results have 8 bits, which is 4e-3, and so may have what a sublayer holds inside
    "scores of hundreds bfloat16": 1.0,  # queries of 8 bits: a score is off by more than one, whatever comes of that
    "route bfloat16": 1e-5,  # rows have 8 bits, but what is computed of them, and so a choice, is not rounded
    "model float64": 1e-9,  # through every layer of a model
    "model float32": 1e-3,  # float32 through every layer; near ties of the router may amplify it
    "model bfloat16": 1e-1,  # of the median token: 4e-3 in each sublayer, and other experts where two nearly tie
    "exact": 0.0,  # promised bit for bit
}


@dataclass(frozen=True)
class Row:
    """One line of the table: the worst case of one implementation of one operation."""

    op: str
    implementation: str
    case: str
    absolute: float
    relative: float
    bound: float

    @property
    def ok(self) -> bool:
        """Whether the bound holds; an error that is not a number breaks it."""
        return self.relative <= self.bound


class Verifiable(Runnable, Protocol):
    """What is needed of a model."""

    def in_dtype(self, dtype: torch.dtype) -> Decoder:
        """Return the same weights with another type of activations."""
        ...


def run(model: Verifiable | None = None, progress: Callable[[str], None] | None = None) -> list[Row]:
    """Check every operation, then ``model`` if there is one. ``progress`` is called with what comes next."""
    rows = []
    for op, name, implementation in implementations():
        if progress:
            progress(f"{op} {name}")
        rows.append(check(op, name, implementation))
    if model is not None:
        for name, check_model in MODEL_CHECKS.items():
            if progress:
                progress(name)
            rows.append(check_model(model))
    return rows


def implementations() -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """List operation, name and function of every implementation there is, new backends included."""
    forms = {
        "delta_rule": {
            "by token": reference.delta_rule_recurrent,
            "by chunk": reference.delta_rule_chunkwise,
        },
        "attention": {
            "absorbed": reference.attention_absorbed,
            "expanded": reference.attention_expanded,
        },
    }
    tables = [ops.load("numba"), *ops.gpus()[:1]]
    for op in (*ops.ROWS, *PARTS):
        for name, form in forms.get(op, {"torch": getattr(reference, op)}).items():
            yield op, f"{name}, float64", form
            yield op, f"{name}, float32", form
        for table in tables:
            if op in ops.overrides(table):
                row = On(table.device, getattr(table, op))
                yield op, f"{table.name}, float32", row
                yield op, f"{table.name}, bfloat16", row


@dataclass(frozen=True)
class On:
    """An operation that runs on a device."""

    device: torch.device
    function: Callable[..., Any]

    def __call__(self, *arguments: Any) -> Any:
        """Run it; tensors lie on the device already."""
        with on(self.device):
            return self.function(*arguments)


def check(op: str, name: str, implementation: Callable[..., Any]) -> Row:
    """Run one implementation on every case of its operation and return the worst."""
    dtype = name.rpartition(", ")[2]
    worst: Row | None = None
    for case, arguments in cases(op):
        given = _given(op, arguments, dtype)
        exact = _given(op, given, "float64")
        state = STATE.get(op, ())
        errors = compare(result(implementation, given, state), result(TRUTH[op], exact, state))
        named = (BOUNDS.get(f"{what} {dtype}") for what in (case, op))
        row = Row(op, name, case, *errors, next(filter(None, named), BOUNDS[dtype]))
        if worst is None or _worse(row, worst):
            worst = row
    assert worst is not None, f"{op} has no cases"
    return worst


def _given(op: str, arguments: Sequence[Any], dtype: str) -> list[Any]:
    """Cast the arguments of an operation as a model of a type would give them.

    In bfloat16 these are its activations; state, and weights that are stored in float32, stay so.
    """
    first = ACTIVATIONS.get(op, 1)
    activations = [_cast(a, getattr(torch, dtype), (*WIDE, torch.bfloat16)) for a in arguments[:first]]
    return activations + [a if dtype == "bfloat16" else _cast(a, getattr(torch, dtype)) for a in arguments[first:]]


def _worse(row: Row, than: Row) -> bool:
    """Whether ``row`` uses more of its bound; nothing is worse than an error that is not a number."""
    return not math.isnan(than.relative) and not row.relative * than.bound <= than.relative * row.bound


PARTS = ("short_conv", "delta_rule")
"""Parts of an operation that have forms, or faults, of their own."""

TRUTH: dict[str, Callable[..., Any]] = {
    **{op: getattr(reference, op) for op in (*ops.ROWS, *PARTS)},
    "delta_rule": reference.delta_rule_recurrent,
    "attention": reference.attention_expanded,
}
"""What an operation is compared with, in float64."""

ACTIVATIONS = {"delta_net": 6, "attention": 3}
"""How many of an operation's arguments, from the first on, are activations, if not one."""

STATE = {"short_conv": (2,), "delta_rule": (5,), "delta_net": (7,)}
"""Which arguments of an operation are state, and so part of its result."""


def result(function: Callable[..., Any], arguments: list[Any], state: Sequence[int]) -> Result:
    """Return everything a call answers, and the arguments that are ``state``; the ones given stay as they were."""
    device = function.device if isinstance(function, On) else torch.device("cpu")
    arguments = [_there(_each(torch.clone, a), device) for a in arguments]
    out = function(*arguments)
    answers = (out, *(arguments[i] for i in state))
    return tuple(t.cpu() for a in answers for t in (a if isinstance(a, tuple) else (a,)))


def compare(got: Result, want: Result) -> tuple[float, float]:
    """Return the largest difference, absolute and relative to the largest value wanted, over all tensors."""
    absolute = relative = 0.0
    for g, w in zip(got, want, strict=True):
        if g.shape != w.shape:
            raise ValueError(f"shape {tuple(g.shape)}, wanted {tuple(w.shape)}")
        if not w.numel():
            continue
        difference = (g.double() - w.double()).abs().max().item()
        scale = w.double().abs().max().item()
        if math.isnan(difference):
            return math.nan, math.nan
        absolute = max(absolute, difference)
        relative = max(relative, difference / scale if scale else difference)
    return absolute, relative


def cases(op: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield name and float32 arguments of every case of an operation, the same each time."""
    random = torch.Generator().manual_seed(len(op))
    yield from CASES[op](random)


def _normal(random: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=random)


def _linear_cases(random: torch.Generator) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for rows in (1, 3, 8, 9, 33):
        x = _normal(random, 2, rows, 96)
        yield f"{2 * rows} rows, float32", (x, _normal(random, 40, 96))
        yield f"{2 * rows} rows, bfloat16", (x, _normal(random, 41, 96).bfloat16())
        yield f"{2 * rows} rows, MXFP4", (x, pack_mxfp4(_normal(random, 43, 96)))
        yield f"{2 * rows} rows, int8", (x[..., :77], pack_int8(_normal(random, 39, 77)))
    scales = torch.arange(0, 255, dtype=torch.uint8).view(85, 3)
    small = MXFP4(torch.full((85, 48), 0x71, dtype=torch.uint8), scales.clamp(max=140))
    yield "MXFP4, every scale from 2^-127", (_normal(random, 1, 96), small)
    yield "cancelling sums", (torch.tensor([[1e6, 1.0, -1e6] * 32]), torch.ones(5, 96))


def _rms_norm_cases(random: torch.Generator) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for name, scale in (("ordinary", 1.0), ("large", 1e15), ("below epsilon", 1e-6)):
        yield name, (scale * _normal(random, 2, 5, 64), _normal(random, 64), 1e-5)
    yield "zeros", (torch.zeros(1, 1, 64), _normal(random, 64), 1e-5)


def _short_conv_cases(random: torch.Generator) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for tokens in (1, 2, 3, 7, 70):
        tail = _normal(random, 2, 3, 24)
        yield f"{tokens} tokens, state carried in", (_normal(random, 2, tokens, 24), _normal(random, 24, 4), tail)
    yield "fresh", (_normal(random, 1, 5, 24), _normal(random, 24, 4), torch.zeros(1, 3, 24))


def _delta_rule_cases(random: torch.Generator) -> Iterator[tuple[str, tuple[Any, ...]]]:
    def case(tokens: int, slow: float = 1e-3, fast: float = 1.0, groups: int = 1, per_channel: bool = True) -> Any:
        batch, heads, key, value = 2, 2, 24, 16
        gates = torch.rand(batch, tokens, heads * groups, key if per_channel else 1, generator=random)
        g = -torch.exp(torch.log(torch.tensor(slow)) + gates * torch.log(torch.tensor(fast / slow)))
        return [
            _normal(random, batch, tokens, heads, key),
            _normal(random, batch, tokens, heads, key),
            _normal(random, batch, tokens, heads * groups, value),
            g,
            torch.rand(batch, tokens, heads * groups, generator=random),
            _normal(random, batch, heads * groups, value, key),
        ]

    for tokens in (1, 2, 15, 16, 17, 63, 64, 65, 130):
        yield f"{tokens} tokens, state carried in", tuple(case(tokens))
    yield "decays down to -30 a step", tuple(case(137, 1e-4, 30.0))
    yield "decays of exactly -30", tuple(case(70, 30.0, 30.0))
    yield "no decay", tuple([*(a := case(137))[:3], torch.zeros_like(a[3]), *a[4:]])
    for strength in (0.0, 1.0):
        q, k, v, g, beta, S = case(100)
        yield f"beta {strength:g}", (q, k, v, g, torch.full_like(beta, strength), S)
    q, k, v, g, beta, S = case(100, 1e-4, 1e-3)
    yield "one key repeated, beta 1", (q, k[:, :1].expand_as(k), v, g, torch.ones_like(beta), S)
    sign = torch.ones(100).where(torch.arange(100) % 2 == 0, -1.0).view(1, 100, 1, 1)
    yield "opposite keys, beta 1", (q, k[:, :1] * sign, v, g, torch.ones_like(beta), S)
    yield "queries and keys below epsilon", (q * 1e-4, k * 1e-4, v, g, beta, S)
    yield "zero keys", (q, torch.zeros_like(k), v, g, beta, S)
    q, k, v, g, beta, S = case(90, 1e-4, 5.0)
    g[:, ::2] = -30.0
    g[:, 1::2] = -1e-4
    yield "fast and slow in turn", (q, k, v, g, beta, S)
    yield "gate per head, grouped value heads", tuple(case(70, groups=3, per_channel=False))
    yield "gate per head, fast", tuple(case(137, 1e-4, 30.0, groups=2, per_channel=False))


def _linears_cases(random: torch.Generator) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for rows in (1, 5, 40):
        plain, small, four, eight = (_normal(random, outputs, 96) for outputs in (40, 7, 24, 19))
        weights = [plain, small.bfloat16(), pack_mxfp4(four), pack_int8(eight)]
        yield f"{rows} rows, every format", (_normal(random, 1, rows, 96), weights)


def _gated_cases(random: torch.Generator) -> Iterator[tuple[str, tuple[Any, ...]]]:
    gate, up, down = _normal(random, 64, 96) / 8, _normal(random, 64, 96) / 8, _normal(random, 96, 64) / 8
    for rows in (1, 5, 40):
        x = _normal(random, 1, rows, 96)
        yield f"{rows} rows, SiLU", (x, gate, up, down, SiLU())
        yield f"{rows} rows, SiTU, bfloat16", (x, gate.bfloat16(), up.bfloat16(), down.bfloat16(), SiTU())
        yield f"{rows} rows, MXFP4", (x, pack_mxfp4(gate), pack_mxfp4(up), pack_mxfp4(down), SiTU())
        yield f"{rows} rows, int8", (x, pack_int8(gate), pack_int8(up), pack_int8(down), SiLU())
    yield "saturated", (1000 * _normal(random, 1, 3, 96), gate, up, down, SiTU())


def _delta_net_cases(random: torch.Generator) -> Iterator[tuple[str, tuple[Any, ...]]]:
    def case(tokens: int, floor: float | None, scale: float = 1.0, groups: int = 1, per_channel: bool = True) -> Any:
        batch, heads, key, value, width = 2, 2, 24, 16, 4
        keys, all_heads = heads * key, heads * groups
        values, decays = all_heads * value, all_heads * key if per_channel else all_heads
        weights = DeltaWeights(
            _normal(random, keys, width) / 2,
            _normal(random, keys, width) / 2,
            _normal(random, values, width) / 2,
            torch.rand(all_heads, generator=random),
            _normal(random, decays),
            1 + _normal(random, value) / 4,
        )
        state = DeltaState(
            _normal(random, batch, width - 1, keys),
            _normal(random, batch, width - 1, keys),
            _normal(random, batch, width - 1, values),
            _normal(random, batch, all_heads, value, key),
        )
        inputs = (_normal(random, batch, tokens, c) for c in (keys, keys, values, decays, all_heads, values))
        return (*(scale * x for x in inputs), weights, state, floor, 1e-5)

    for tokens in (1, 2, 5, 8, 9, 70):
        yield f"{tokens} tokens, floor", case(tokens, -5.0)
        yield f"{tokens} tokens, softplus", case(tokens, None)
    for tokens in (1, 3, 70):
        yield f"{tokens} tokens, gate per head, grouped value heads", case(tokens, None, 1.0, 3, False)
        yield f"{tokens} tokens, inputs of tens", case(tokens, -5.0, 30.0)
        yield f"{tokens} tokens, inputs below epsilon", case(tokens, None, 1e-5)
    yield "200 tokens, floor", case(200, -5.0)
    yield "200 tokens, softplus", case(200, None)
    yield "200 tokens, gate per head, grouped value heads", case(200, None, 1.0, 2, False)
    yield "137 tokens, decays of -30", case(137, -30.0, 30.0)
    fast, slow = 30.0, -12.0
    for name, floor in (("floor", -30.0), ("softplus", None)):
        a = case(137, floor)
        a[3][:, ::2], a[3][:, 1::2] = fast, slow
        yield f"fast and slow in turn, {name}", a


def _attention_cases(random: torch.Generator) -> Iterator[tuple[str, tuple[Any, ...]]]:
    heads, plain, common, value, rank = 3, 12, 6, 10, 20
    for tokens, before in ((1, 0), (1, 1), (1, 200), (3, 5), (8, 64), (9, 0), (33, 31), (70, 0)):
        yield (
            f"{tokens} tokens after {before}",
            (
                _normal(random, 1, tokens, heads, plain + common),
                _normal(random, 1, before + tokens, rank),
                _normal(random, 1, before + tokens, common),
                _normal(random, heads * (plain + value), rank),
                value,
            ),
        )
    q, latent, shared = _normal(random, 2, 5, heads, 18), _normal(random, 2, 9, rank), _normal(random, 2, 9, common)
    up = _normal(random, heads * (plain + value), rank)
    for tokens in (1, 5, 9):
        q_few = _normal(random, 2, tokens, heads, 18)
        yield f"{tokens} tokens, bfloat16 cache", (q_few, latent.bfloat16(), shared.bfloat16(), up.bfloat16(), value)
        yield f"{tokens} tokens, int8", (q_few, latent, shared, pack_int8(up), value)
    yield "scores of hundreds", (q * 100, latent, shared, up, value)
    yield "equal scores", (q * 0, latent, shared, up.bfloat16(), value)


def _route_cases(random: torch.Generator) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for rows in (1, 8, 40):
        x, gate = _normal(random, rows, 48), _normal(random, 32, 48) / 7
        yield f"{rows} rows", (x, gate, _normal(random, 32) / 10, 4, True, 2.5)
    yield "ties go to the lower index", (torch.zeros(3, 48), _normal(random, 32, 48), torch.zeros(32), 4, True, 1.0)
    yield (
        "all experts, not renormalised",
        (_normal(random, 5, 48), _normal(random, 8, 48), torch.zeros(8), 8, False, 1.0),
    )
    yield "scores near zero", (torch.ones(2, 48), torch.full((16, 48), -0.8), torch.arange(16.0), 4, True, 1.0)


def _experts_cases(random: torch.Generator) -> Iterator[tuple[str, tuple[Any, ...]]]:
    dense = [[_normal(random, *s) / 6 for s in ((32, 64), (32, 64), (64, 32))] for _ in range(6)]
    kinds: dict[str, tuple[Callable[[Tensor], Any], Activation]] = {
        "bfloat16, SiLU": (Tensor.bfloat16, SiLU()),
        "MXFP4, SiTU": (pack_mxfp4, SiTU()),
        "int8, SiLU": (pack_int8, SiLU()),
    }
    for name, (store, activation) in kinds.items():
        stored = [Expert(*(store(matrix) for matrix in matrices)) for matrices in dense]
        for rows in (1, 5, 8, 30):
            ids = torch.stack([torch.randperm(6, generator=random)[:3].sort().values for _ in range(rows)])
            weights = torch.rand(rows, 3, generator=random)
            yield f"{rows} rows, {name}", (_normal(random, rows, 64), ids, weights, stored.__getitem__, activation)
    x, ids = 100 * _normal(random, 4, 64), torch.tensor([[0, 5]] * 4)
    yield "saturated", (x, ids, torch.ones(4, 2), lambda i: Expert(*dense[i]), SiTU())


def _mix_depth_cases(random: torch.Generator) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for sources in (1, 2, 9):
        yield f"{sources} sources", (_normal(random, sources, 2, 3, 32), _normal(random, 32), 1e-5)
    unequal = torch.stack([10.0**e * _normal(random, 1, 4, 32) for e in (-6, 0, 2)])
    yield "sizes from 1e-6 to 1e2", (unequal, 3 * _normal(random, 32), 1e-5)


CASES = {
    "linear": _linear_cases,
    "linears": _linears_cases,
    "gated": _gated_cases,
    "delta_net": _delta_net_cases,
    "rms_norm": _rms_norm_cases,
    "short_conv": _short_conv_cases,
    "delta_rule": _delta_rule_cases,
    "attention": _attention_cases,
    "route": _route_cases,
    "experts": _experts_cases,
    "mix_depth": _mix_depth_cases,
}


def _each(function: Callable[[Tensor], Tensor], argument: Any) -> Any:
    """Apply ``function`` to a tensor, or to all in a list or named tuple; leave anything else."""
    if isinstance(argument, list):
        return [_each(function, a) for a in argument]
    if isinstance(argument, DeltaWeights | DeltaState):
        return type(argument)(*(function(a) for a in argument))
    return function(argument) if isinstance(argument, Tensor) else argument


def _there(argument: Any, device: torch.device) -> Any:
    """Bring an argument to a device: tensors, packed weights, all in a list, and what a function gives."""
    if device.type == "cpu":
        return argument
    if isinstance(argument, MXFP4 | Int8):
        return argument.to(device)
    if isinstance(argument, list):
        return [_there(a, device) for a in argument]
    if callable(argument):
        expert: Any = argument
        return lambda x: Expert(*(_there(weight, device) for weight in expert(x)))
    return _each(lambda tensor: tensor.to(device), argument)


WIDE = (torch.float32, torch.float64)


def _cast(argument: Any, dtype: torch.dtype, types: Sequence[torch.dtype] = WIDE) -> Any:
    """Cast what is of one of ``types``; weights stored in others stay as they are stored."""
    return _each(lambda t: t.to(dtype) if t.dtype in types else t, argument)


# A model -----------------------------------------------------------------------------------------------------------

TOKENS = 90
"""Length of the text that a model is checked on: more than a chunk, with a remainder."""


def _text(decoder: Decoder) -> Tensor:
    random = torch.Generator().manual_seed(1)
    return torch.randint(0, decoder.config.vocab, (1, TOKENS), generator=random)


def _in_pieces(decoder: Decoder, tokens: Tensor, pieces: list[int]) -> Result:
    """Return the logits of every token and the final state, reading ``tokens`` in pieces of the given lengths."""
    state = decoder.empty_state()
    logits = [forward(decoder, state, piece, last=piece.shape[1]) for piece in tokens.split(pieces, 1)]
    return (torch.cat(logits, 1), *(t for s in state for t in s.tensors().values()))


def _check_decode(model: Verifiable) -> Row:
    decoder = model.in_dtype(torch.float64)
    tokens = _text(decoder)
    errors = compare(_in_pieces(decoder, tokens, [1] * TOKENS), _in_pieces(decoder, tokens, [TOKENS]))
    return Row("model", "float64", "token by token against at once", *errors, BOUNDS["model float64"])


def _check_splits(model: Verifiable) -> Row:
    decoder = model.in_dtype(torch.float64)
    tokens = _text(decoder)
    worst = Row("model", "float64", "", -1.0, -1.0, BOUNDS["model float64"])
    whole = _in_pieces(decoder, tokens, [TOKENS])
    for first in (1, 7, 15, 16, 63, 64, 65, 89):
        errors = compare(_in_pieces(decoder, tokens, [first, TOKENS - first]), whole)
        row = replace(worst, case=f"split after {first}", absolute=errors[0], relative=errors[1])
        worst = row if _worse(row, worst) else worst
    return worst


def _check_precision(dtype: str, length: int, model: Verifiable) -> Row:
    """In bfloat16 the error is that of the median token: where experts nearly tie, others are chosen."""
    tokens, case = _text(model.decoder), "decoded, against float64" if length == 1 else "logits against float64"
    got = _in_pieces(model.in_dtype(getattr(torch, dtype)), tokens, [length] * (TOKENS // length))[0]
    want = _in_pieces(model.in_dtype(torch.float64), tokens, [TOKENS])[0]
    absolute, relative = compare((got,), (want,))
    if dtype == "bfloat16":
        each = [compare((g,), (w,)) for g, w in zip(got[0], want[0], strict=True)]
        (absolute, relative), case = torch.tensor(each).median(0).values.tolist(), f"median of {case}"
    return Row("model", dtype, case, absolute, relative, BOUNDS[f"model {dtype}"])


def _check_rows(model: Verifiable) -> Row:
    tokens, few = _text(model.decoder), FEW
    by_one = _in_pieces(model.decoder, tokens, [TOKENS - few, *[1] * few])
    at_once = _in_pieces(model.decoder, tokens, [TOKENS - few, few])
    case = f"{few} tokens at once, bit for bit"
    return Row("model", _type(model), case, *compare(at_once, by_one), BOUNDS["exact"])


def _check_saving(model: Verifiable) -> Row:
    tokens = _text(model.decoder)[0].tolist()
    session = Session(model)
    session.feed(tokens[:70])
    with tempfile.TemporaryDirectory() as folder:
        session.save(Path(folder) / "session")
        restored = Session.load(model, Path(folder) / "session")
    errors = compare((restored.feed(tokens[70:]),), (session.feed(tokens[70:]),))
    return Row("model", _type(model), "saved and loaded, bit for bit", *errors, BOUNDS["exact"])


def _type(model: Verifiable) -> str:
    return str(model.decoder.dtype).removeprefix("torch.")


MODEL_CHECKS: dict[str, Callable[[Verifiable], Row]] = {
    "model: decode against prefill": _check_decode,
    "model: any split": _check_splits,
    "model: float32 against float64": partial(_check_precision, "float32", TOKENS),
    "model: float32 decode against float64": partial(_check_precision, "float32", 1),
    "model: bfloat16 against float64": partial(_check_precision, "bfloat16", TOKENS),
    "model: bfloat16 decode against float64": partial(_check_precision, "bfloat16", 1),
    "model: several rows against one": _check_rows,
    "model: save and load": _check_saving,
}
