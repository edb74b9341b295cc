"""How fast a model and its operations are here, beside what the memory allows.

Decoding a token reads every weight that it needs once, so bytes over bandwidth is a time that nothing can beat. All
figures are medians of timed pieces; compilation, and the first seconds in which cores and memory speed up, are left
out. Speeds are tokens or 1e9 bytes a second.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from deltafin.captured import forward
from deltafin.config import KDA, MLA, MoE, SiLU, SiTU
from deltafin.demand import of_decoder
from deltafin.errors import UsageError
from deltafin.experts import SplitExperts
from deltafin.gpu import Placed
from deltafin.measure import ARENA, bandwidth, gpu, median, room
from deltafin.model.decoder import Decoder, State
from deltafin.model.decoder import forward as plain
from deltafin.ops import DeltaState, DeltaWeights, Expert, Ops, Stack
from deltafin.placement import RAM, Demand, roofline
from deltafin.quant import MXFP4, Int8
from deltafin.session import PIECE
from deltafin.trace import Step, Watch, watched

CONTEXTS = (128, 1024, 4096)
"""Context lengths that a model is measured at unless others are asked for."""

PATIENCE = 60.0
"""Seconds of reading beyond which a context is left out, unless it was asked for."""

SECONDS = 2.0
"""How long decoding, and reading, is measured at one context."""

CALLS = 0.35
"""Seconds that one operation is measured."""

CPU = torch.device("cpu")

GPU_ARENA = 1 << 30
"""Bytes of a GPU's memory that its operations are measured over: many times its cache."""

Progress = Callable[[str], None]


class Measurable(Protocol):
    """What is needed of a model."""

    name: str
    placed: Placed | None
    elsewhere: str

    @property
    def decoder(self) -> Decoder:
        """The model, ready to run."""
        ...


@dataclass(frozen=True)
class Speed:
    """A model at one context.

    ``predicted_tok_s`` is what the bandwidths of the memories allow at best, ``share`` the measured speed of decoding
    over it; a model that fits into a cache may exceed 1. ``prefill_tok_s`` is of up to ``PIECE`` tokens that end at
    the context; with context 0 there are none.
    """

    context: int
    prefill_tok_s: float | None
    decode_tok_s: float
    bytes_per_token: int
    gbs: float
    share: float
    predicted_tok_s: float


@dataclass(frozen=True)
class Family:
    """A part of a token after the longest context: one of ``trace.PARTS``, the bytes it moves, and how fast it was.

    Each part is waited for, so on a GPU they take longer together than a token that is captured as a whole.
    """

    part: str
    milliseconds: float
    bytes: int
    gbs: float


@dataclass(frozen=True)
class Report:
    """A model on this machine: which operations ran, on how many threads, how fast these can read memory.

    ``place`` is where it ran (see ``placement.PLACES``), ``gpu_gbs`` the GPU's bandwidth where it has a part, and
    ``elsewhere`` how experts that are not there are computed (``Model.elsewhere``).
    """

    model: str
    backend: str
    threads: int
    read_gbs: float
    rows: list[Speed]
    place: str = "cpu"
    gpu_gbs: float = 0.0
    parts: Sequence[Family] = ()
    elsewhere: str = ""


@dataclass(frozen=True)
class KernelSpeed:
    """One operation at one shape; the limit is of reading, or of changing in place where it changes a state."""

    kernel: str
    shape: str
    weights: str
    rows: int
    gbs: float
    limit_gbs: float
    share: float


def size(thing: Any) -> int:
    """Return the bytes of a tensor, of a packed matrix, or of all that a dataclass or tuple of them holds."""
    if isinstance(thing, Tensor):
        return thing.numel() * thing.element_size()
    if is_dataclass(thing):
        return sum(size(getattr(thing, f.name)) for f in fields(thing))
    return sum(map(size, thing)) if isinstance(thing, tuple) else 0


# A model -----------------------------------------------------------------------------------------------------------


def bytes_per_token(decoder: Decoder, context: int) -> int:
    """Return the bytes that decoding one token after ``context`` others must move: see ``Demand``."""

    return _demand(decoder).bytes_per_token(context)


def _demand(decoder: Decoder) -> Demand:
    def chosen(block: Any) -> int:
        ids_NE = torch.arange(block.layer.ffn.chosen)[None]
        experts: Any = block.ffn.experts
        experts = experts.rest if isinstance(experts, SplitExperts) else experts
        return experts(None, ids_NE, None, None, replace(block.ops, experts=_bytes_of_experts))

    return of_decoder(decoder, size, chosen)


def _bytes_of_experts(x_NM: Any, ids_NE: Tensor, weight_NE: Any, expert: Callable[[int], Expert], *_: Any) -> int:
    """Stand in for the operation ``experts``, and so find experts wherever they live: return the bytes chosen."""
    return sum(size(expert(x)) for x in ids_NE[0].tolist())


def measure(model: Measurable, contexts: Sequence[int] | None = None, progress: Progress | None = None) -> Report:
    """Measure reading and decoding of ``model`` at each of ``contexts``.

    Without ``contexts``: those of ``CONTEXTS`` within the model's own context that can be reached in ``PATIENCE``.
    ``progress`` is called with what comes next.
    """
    tell = progress or (lambda what: None)
    decoder, threads = model.decoder, model.decoder.ops.threads()
    tell("memory")
    read_gbs, _ = bandwidth(threads)
    tell("warming up")
    _read(decoder, decoder.empty_state(), 2 * 64 + 1)
    _decoding(decoder, decoder.empty_state(), 0.5)
    if contexts is None:
        asked, limit = False, decoder.config.context
        contexts = [c for c in CONTEXTS if limit is None or c <= limit] or [0]
    else:
        asked = True
    rows: list[Speed] = []
    for context in sorted(set(contexts)):
        reading = rows[-1].prefill_tok_s if rows else None
        if not asked and reading and context / reading > PATIENCE:
            break
        tell(f"context {context}")
        rows.append(_at(decoder, context, partial(_predicted, model, read_gbs)))
    tell("parts of a token")
    families = parts(decoder, rows[-1].context)
    backends = ", ".join(dict.fromkeys(ops.name for ops in decoder.tables))
    if model.placed is None:
        return Report(model.name, backends, threads, read_gbs, rows, parts=families)
    there = model.placed.placement
    about = there.place, there.machine.gpu_gbs, families, model.elsewhere
    return Report(model.name, backends, threads, read_gbs, rows, *about)


def _predicted(model: Measurable, read_gbs: float, context: int, moved: int) -> float:
    """Return tokens/s if nothing but memory took time: ``moved`` bytes a token, where they are."""
    if model.placed is None:
        return 1 / roofline({RAM: moved}, {RAM: read_gbs})[RAM]
    p = model.placed.placement
    return replace(p, machine=replace(p.machine, ram_gbs=read_gbs), context=context).tokens_per_second


def parts(decoder: Decoder, context: int) -> list[Family]:
    """Return what the parts of a token take after a context of so many tokens."""
    watch, state, steps = Watch(), decoder.empty_state(), list[Step]()
    _read(decoder, state, context)
    slow = watched(decoder, watch)
    for i, token in enumerate(_tokens(decoder, 12).split(1, 1)):
        if i == 2:  # two to warm up
            watch.on_step.append(steps.append)
        plain(slow, state, token)
    layers = _demand(decoder).layers
    sizes = {
        "experts": sum(layer.chosen * layer.expert for layer in layers),
        "attention": sum(layer.mixer + 2 * layer.state + layer.position * context for layer in layers),
        "head": _demand(decoder).head,
    }
    sizes["other"] = bytes_per_token(decoder, context) - sum(sizes.values())
    found = list[Family]()
    for part, amount in sizes.items():
        seconds = statistics.median(step.by_part()[part] for step in steps)
        found.append(Family(part, 1000 * seconds, amount, amount / max(seconds, 1e-9) / 1e9))
    return found


def _at(decoder: Decoder, context: int, prediction: Callable[[int, int], float]) -> Speed:
    state, piece = decoder.empty_state(), min(context, PIECE)
    _read(decoder, state, context - piece)
    prefill = _reading(decoder, state, piece, SECONDS) if piece else None
    _read(decoder, state, piece)
    decode = _decoding(decoder, state, SECONDS)
    moved = bytes_per_token(decoder, context)
    predicted = prediction(context, moved)
    return Speed(context, prefill, decode, moved, moved * decode / 1e9, decode / predicted, predicted)


def _tokens(decoder: Decoder, count: int) -> Tensor:
    """Return ``count`` ids [1, T], the same each time."""
    return torch.randint(0, decoder.config.vocab, (1, count), generator=torch.Generator().manual_seed(count))


def _read(decoder: Decoder, state: list[State], count: int) -> None:
    """Advance ``state`` by ``count`` random tokens."""
    for piece in _tokens(decoder, count).split(PIECE, 1) if count else ():
        forward(decoder, state, piece)


def _reading(decoder: Decoder, state: list[State], count: int, seconds: float) -> float:
    """Return tokens/s of reading ``count`` tokens at once after ``state``, which stays as it is."""
    tokens = _tokens(decoder, count)

    def once() -> float:
        after = [s.keep() for s in state]
        began = time.perf_counter()
        forward(decoder, after, tokens)
        return time.perf_counter() - began

    if any(table.device.type == "cuda" for table in decoder.tables):
        once()  # compiles what was never compiled
    return count / median(once, seconds)


def _decoding(decoder: Decoder, state: list[State], seconds: float) -> float:
    """Return tokens/s of decoding after ``state``, which stays as it is: pieces of up to 16 tokens, each from there."""
    tokens = _tokens(decoder, 17).split(1, 1)
    began = time.perf_counter()
    forward(decoder, [s.keep() for s in state], tokens[0])
    count = max(1, min(16, int(seconds / 8 / (time.perf_counter() - began))))

    def once() -> float:
        after = [s.keep() for s in state]
        forward(decoder, after, tokens[0])  # makes room in the caches
        began = time.perf_counter()
        for token in tokens[1 : count + 1]:
            forward(decoder, after, token)
        return (time.perf_counter() - began) / count

    return 1 / median(once, seconds)


# Operations --------------------------------------------------------------------------------------------------------


class Shapes(NamedTuple):
    """What the operations of a model are measured at."""

    name: str
    width: int
    kda: KDA
    mla: MLA
    moe: MoE


SILU, SITU = SiLU(), SiTU()
KIMI_LINEAR = Shapes(
    "Kimi Linear",
    2304,
    KDA(32, 128, 128, 4, decay_rank=128, gate_rank=128),
    MLA(32, 128, 64, 128, 512),
    MoE(256, 8, 1024, 1024, SILU),
)
KIMI_K3 = Shapes(
    "K3",
    7168,
    KDA(96, 128, 128, 4, decay_rank=128, decay_floor=-5.0),
    MLA(96, 128, 64, 128, 512, query_rank=1536, gate=True),
    MoE(896, 16, 3072, 6144, SITU, latent=3584),
)
NANO = Shapes(
    "Nano",
    256,
    KDA(4, 64, 64, 4, decay_rank=64, decay_floor=-5.0),
    MLA(4, 64, 32, 64, 96, query_rank=128, gate=True),
    MoE(32, 4, 96, 192, SITU, latent=128),
)
SMALL = MoE(64, 8, 512, 512, SILU, latent=1024)
"""Experts small enough that starting one costs as much as reading it."""


class Arena:
    """Memory that weights are cut from, round and round: larger than a cache, so that none is met there again."""

    def __init__(self, room: int, device: torch.device = CPU) -> None:
        random = torch.Generator().manual_seed(0)
        tile = (torch.randn(1 << 19, generator=random) / 50).bfloat16().view(torch.uint8).to(device)
        self.room, self.device = room, device
        self._noise = _Ring(tile.repeat(room // tile.numel()))
        self._scales = _Ring(torch.randint(118, 122, (room // 16,), dtype=torch.uint8, generator=random).to(device))

    def tensor(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the next part of the memory, of small random values as bfloat16 and float32."""
        return self._noise.take(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)

    def weight(self, form: str, *shape: int) -> Any:
        """Return a matrix [O, I], or several of them, in one of ``FORMS``."""
        *outer, inputs = shape
        if form == "bf16":
            return self.tensor(*shape, dtype=torch.bfloat16)
        if form == "int8":
            return Int8(self.tensor(*shape, dtype=torch.int8), torch.full(outer, 1e-3, device=self.device))
        codes = self.tensor(*outer, inputs // 2, dtype=torch.uint8)
        return MXFP4(codes, self._scales.take(math.prod(shape) // 32).view(*outer, -1))


FORMS = ("bf16", "int8", "MXFP4")
"""How a weight may be stored."""


class _Ring:
    def __init__(self, memory: Tensor) -> None:
        self.memory, self.at = memory, 0

    def take(self, count: int) -> Tensor:
        if self.at + count > len(self.memory):
            self.at = 0
        part = self.memory[self.at : self.at + count]
        self.at += -(-count // 64) * 64
        return part


class Call(NamedTuple):
    """Arguments of one call, and the bytes of weights and state that it must move."""

    arguments: tuple[Any, ...]
    moved: int


@dataclass(frozen=True)
class Case:
    """One operation at one shape: ``call`` cuts the arguments of a call from an arena."""

    kernel: str
    shape: str
    weights: str
    rows: int
    call: Callable[[Arena], Call]

    def calls(self, arena: Arena) -> list[Call]:
        """Return calls on different memory, together once round the arena."""
        calls, used = list[Call](), 0
        while used < arena.room:
            call = self.call(arena)
            calls.append(Call(tuple(_there(a, arena.device) for a in call.arguments), call.moved))
            used += call.moved
        return calls


def _there(argument: Any, device: torch.device) -> Any:
    """Return an argument with its tensors in the memory of ``device``."""
    if isinstance(argument, Tensor):
        return argument.to(device)
    if isinstance(argument, DeltaWeights | DeltaState):
        return type(argument)(*(tensor.to(device) for tensor in argument))
    return argument


def cases() -> Iterator[Case]:
    """List every operation that moves many bytes, at the shapes of real models."""
    for form in FORMS:
        for rows in (1, 2, 5):
            yield _linear(KIMI_K3, 7168, 12288, form, rows)
        yield _linear(KIMI_LINEAR, 4096, 2304, form, 1)
        if form != "bf16":
            for rows in (1, 5):
                yield _in_bfloat16(_linear(KIMI_K3, 7168, 12288, form, rows))
            yield _in_bfloat16(_linear(KIMI_LINEAR, 4096, 2304, form, 1))
    yield _linear(NANO, 4096, 256, "bf16", 1)
    yield _linears(KIMI_K3, (1536, 576, 12288), 1)
    for rows in (1, 5):
        yield _linears(KIMI_LINEAR, (4096, 4096, 4096, 32, 128, 128), rows)
    yield _linears(NANO, (256, 256, 256, 4, 64, 256), 1)
    for form in ("MXFP4", "bf16"):
        yield _experts(KIMI_K3.name, KIMI_K3.moe, 3584, form, 1)
        for rows in (1, 2, 5) if form == "MXFP4" else (1,):
            yield _experts(KIMI_LINEAR.name, KIMI_LINEAR.moe, 2304, form, rows)
        yield _experts("small", SMALL, 1024, form, 1)
    yield _in_bfloat16(_experts(KIMI_K3.name, KIMI_K3.moe, 3584, "MXFP4", 1))
    yield _in_bfloat16(_experts(KIMI_LINEAR.name, KIMI_LINEAR.moe, 2304, "MXFP4", 1))
    yield _experts(NANO.name, NANO.moe, 128, "MXFP4", 1)
    for shapes, tokens in ((KIMI_K3, (1, 2, 5)), (KIMI_LINEAR, (1, 5)), (NANO, (1,))):
        for rows in tokens:
            yield _delta_net(shapes, rows)
    for shapes in (KIMI_K3, KIMI_LINEAR, NANO):
        for positions in (1 << 10, 1 << 15):
            yield _attention(shapes, positions, torch.float32)
            yield _in_bfloat16(_attention(shapes, positions, torch.bfloat16))
    for form in (form for form in FORMS if form != "MXFP4"):
        yield _gated(KIMI_K3, form, 1)
        yield _gated(KIMI_LINEAR, form, 1)
    yield _in_bfloat16(_gated(KIMI_K3, "int8", 1))
    yield _in_bfloat16(_gated(KIMI_LINEAR, "int8", 1))
    yield _gated(KIMI_LINEAR, "bf16", 5)
    yield _gated(NANO, "bf16", 1)


def kernels(table: Ops, threads: int, progress: Progress | None = None) -> list[KernelSpeed]:
    """Measure every case on the operations of ``table``. ``progress`` is called with what comes next."""
    tell = progress or (lambda what: None)
    if room() < ARENA:
        needed = f"measuring operations needs {4 * ARENA >> 20} MiB of free memory"
        raise UsageError(needed, "end other programs, or measure a model instead")
    tell("memory")
    on_gpu = table.device.type == "cuda"
    before = (gpu()["gpu_gbs"],) * 2 if on_gpu else bandwidth(threads)  # type: ignore[index]
    arena, speeds = Arena(GPU_ARENA if on_gpu else ARENA, table.device), list[tuple[Case, float]]()
    for case in cases():
        tell(f"{case.kernel} {case.shape}")
        timed = captured_speed if on_gpu else speed
        speeds.append((case, timed(getattr(table, case.kernel), case.calls(arena), CALLS)))
    tell("memory again")
    read, change = before if on_gpu else map(max, before, bandwidth(threads, warm=0.2))
    rows = []
    for case, gbs in speeds:
        limit = change if case.kernel == "delta_net" else read
        rows.append(KernelSpeed(case.kernel, case.shape, case.weights, case.rows, gbs, limit, gbs / limit))
    return rows


def speed(kernel: Callable[..., Any], calls: list[Call], seconds: float) -> float:
    """Return the median GB/s of ``calls``, made one after the other and again for ``seconds``."""
    at = 0

    def once() -> float:
        nonlocal at
        call, at = calls[at % len(calls)], at + 1
        began = time.perf_counter()
        kernel(*call.arguments)
        return (time.perf_counter() - began) / call.moved

    once()
    return 1e-9 / median(once, seconds)


def captured_speed(kernel: Callable[..., Any], calls: list[Call], seconds: float) -> float:
    """Return the median GB/s of ``calls`` that are captured one after the other, as decoding is."""
    kernel(*calls[0].arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            kernel(*call.arguments)

    def once() -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / sum(call.moved for call in calls)

    once()
    return 1e-9 / median(once, seconds)


def _in_bfloat16(case: Case) -> Case:
    """The same with activations in bfloat16."""

    def call(arena: Arena) -> Call:
        arguments, moved = case.call(arena)
        return Call((arguments[0].bfloat16(), *arguments[1:]), moved)

    return replace(case, weights=f"{case.weights}, bf16 x", call=call)


def _linear(shapes: Shapes, outputs: int, inputs: int, form: str, rows: int) -> Case:
    def call(arena: Arena) -> Call:
        weight = arena.weight(form, outputs, inputs)
        return Call((torch.randn(1, rows, inputs), weight), size(weight))

    return Case("linear", f"{shapes.name} {outputs} x {inputs}", form, rows, call)


def _linears(shapes: Shapes, outputs: tuple[int, ...], rows: int) -> Case:
    def call(arena: Arena) -> Call:
        weights = tuple(arena.weight("bf16", o, shapes.width) for o in outputs)
        return Call((torch.randn(1, rows, shapes.width), weights), size(weights))

    return Case("linears", f"{shapes.name} {'+'.join(map(str, outputs))} x {shapes.width}", "bf16", rows, call)


def _gated(shapes: Shapes, form: str, rows: int) -> Case:
    width, inner = shapes.width, shapes.moe.shared_width

    def call(arena: Arena) -> Call:
        weights = *(arena.weight(form, inner, width) for _ in range(2)), arena.weight(form, width, inner)
        return Call((torch.randn(1, rows, width), *weights, shapes.moe.activation), size(weights))

    return Case("gated", f"{shapes.name} {inner} x {width}", form, rows, call)


def _experts(name: str, moe: MoE, width: int, form: str, rows: int) -> Case:
    """Every row chooses at random; the chosen ones lie in the arena in no order, or on a GPU in a stack."""

    def call(arena: Arena) -> Call:
        ids = torch.stack([torch.randperm(moe.experts)[: moe.chosen].sort().values for _ in range(rows)])
        found = ids.unique()
        shapes = (moe.width, width), (moe.width, width), (width, moe.width)
        if arena.device.type == "cuda":
            ids = torch.searchsorted(found, ids)
            stack = Stack(*(arena.weight(form, len(found), *shape) for shape in shapes))
            return Call(
                (torch.randn(rows, width), ids, torch.rand(rows, moe.chosen), stack, moe.activation), size(stack)
            )
        experts = {
            x: Expert(*(arena.weight(form, *shape) for shape in shapes))
            for x in found[torch.randperm(len(found))].tolist()
        }
        x_NM, weights = torch.randn(rows, width), torch.rand(rows, moe.chosen)
        return Call((x_NM, ids, weights, experts.__getitem__, moe.activation), size(tuple(experts.values())))

    return Case("experts", f"{name} {moe.chosen} of {moe.experts}, {moe.width} x {width}", form, rows, call)


def _delta_net(shapes: Shapes, rows: int) -> Case:
    c = shapes.kda
    keys, values = c.heads * c.key_dim, c.heads * c.value_dim

    def call(arena: Arena) -> Call:
        q, k, v = (arena.tensor(channels, c.conv_width) for channels in (keys, keys, values))
        weights = DeltaWeights(q, k, v, torch.rand(c.heads), torch.randn(keys), torch.ones(c.value_dim))
        q, k, v = (torch.randn(1, c.conv_width - 1, channels) for channels in (keys, keys, values))
        S_BHVK = arena.tensor(1, c.heads, c.value_dim, c.key_dim).clone()  # it changes, and others share the arena
        state = DeltaState(q, k, v, S_BHVK)
        inputs = (torch.randn(1, rows, channels) for channels in (keys, keys, values, keys, c.heads, values))
        return Call((*inputs, weights, state, c.decay_floor, 1e-5), size(weights) + 2 * size(state))

    return Case("delta_net", f"{shapes.name} {c.heads} heads, {c.value_dim} x {c.key_dim}", "float32", rows, call)


def _attention(shapes: Shapes, positions: int, dtype: torch.dtype) -> Case:
    """Over a cache in ``dtype``."""
    c = shapes.mla

    def call(arena: Arena) -> Call:
        cache = tuple(arena.tensor(1, positions, width, dtype=dtype) for width in (c.latent_rank, c.shared_dim))
        up = arena.weight("bf16", c.heads * (c.plain_dim + c.value_dim), c.latent_rank)
        q_BTHC = torch.randn(1, 1, c.heads, c.plain_dim + c.shared_dim)
        return Call((q_BTHC, *cache, up, c.value_dim), size(cache) + size(up))

    return Case("attention", f"{shapes.name} {c.heads} heads, {positions} positions", "bf16", 1, call)
