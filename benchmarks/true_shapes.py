"""Kimi's true shapes on a GPU: operations beside the memory's bandwidth, whole layers, and each way to place them.

Run it on a machine with a CUDA GPU: ``python benchmarks/true_shapes.py`` (about five minutes, 80 GB of GPU memory;
parts by name: ``kernels``, ``linear``, ``cycle``, or one of ``CYCLES``). Weights are random. Launches are captured
in graphs, each on memory of its own, together many times the cache; times are medians of many replays. The bandwidth
is that of a large copy in the same run, bytes read and written; attention stands beside a large product as well.
"""

import argparse
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from deltafin import bench, machine, ops
from deltafin.captured import graphs_for
from deltafin.config import KDA, MLA, MLP, AttentionResidual, Layer, ModelConfig, MoE, SiLU, SiTU
from deltafin.executor import settle
from deltafin.experts import MappedExperts, SplitExperts, StackedExperts
from deltafin.measure import bandwidth
from deltafin.model.decoder import Block, Decoder, Part, parts
from deltafin.ops import DeltaState, DeltaWeights, Expert, Ops, Stack
from deltafin.placement import moved
from deltafin.policy import AgedFrequency
from deltafin.quant import GROUP, MXFP4, Int8
from deltafin.weights import bind, matrices, specs

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")

K3_MOE = MoE(896, 16, 3072, 6144, SiTU(), latent=3584, latent_norm=True, scale=2.5)
K3_KDA = KDA(96, 128, 128, 4, decay_rank=128, decay_floor=-5.0)
K3_MLA = MLA(96, 128, 64, 128, 512, query_rank=1536, gate=True)
CYCLE = ModelConfig(
    *("kimi-k3", 163840, 7168, 1e-5),
    (*[Layer(K3_KDA, K3_MOE)] * 3, Layer(K3_MLA, K3_MOE)),
    AttentionResidual(12),
)
"""Three recurrent layers and one of latent attention: what Kimi K3 consists of 23 times."""

LINEAR_MOE = MoE(256, 8, 1024, 1024, SiLU(), scale=2.446)
LINEAR_KDA = KDA(32, 128, 128, 4, decay_rank=128, gate_rank=128)
LINEAR_MLA = MLA(32, 128, 64, 128, 512)
LINEAR = ModelConfig(
    *("kimi-linear", 163840, 2304, 1e-5),
    tuple(
        Layer(LINEAR_MLA if i % 4 == 3 or i == 26 else LINEAR_KDA, LINEAR_MOE if i else MLP(9216, SiLU()))
        for i in range(27)
    ),
)
"""Kimi Linear, whole."""

TILE = 4_000_037
"""Random numbers that matrices are made of: a prime, so that no two rows are alike."""

POOL = 48
"""Different experts in RAM, which stand in for all: larger than any cache."""


def random_matrix(form: str, device: torch.device, *shape: int) -> Any:
    """Return a random matrix, or several, whose products are about as large as their inputs."""
    *outer, inputs = shape
    if form == "bf16":
        tile = (torch.randn(TILE, device=device) / inputs**0.5).bfloat16()
        return repeated(tile, *shape)
    if form == "int8":
        codes = repeated(torch.randint(-127, 128, (TILE,), dtype=torch.int8, device=device), *shape)
        return Int8(codes, torch.full(outer, inputs**-0.5 / 73, device=device))
    tile = torch.randint(0, 256, (TILE,), dtype=torch.uint8, device=device)
    codes = repeated(tile, *outer, inputs // 2)
    scale = 127 - round(0.5 * torch.tensor(float(inputs)).log2().item()) - 1
    return MXFP4(codes, torch.full((*outer, inputs // GROUP), scale, dtype=torch.uint8, device=device))


def repeated(tile: Tensor, *shape: int) -> Tensor:
    """Return a tensor that is filled with a tile, over and over: random numbers for all would take minutes."""
    count = math.prod(shape)
    return tile.repeat(-(-count // len(tile)))[:count].view(shape)


def random_part(part: Part, form: str, homes: Callable[[str], torch.device]) -> Any:
    """Return random weights of a part; ``homes`` gives the device of one by its field."""
    declared = dict(specs(part.weights, part.config))

    def read(field: str) -> Any:
        spec, device = declared[field], homes(field)
        shape = spec.shape(part.sizes)
        if field in matrices(part.weights):
            return random_matrix("bf16" if field == "router" else form, device, *shape)
        if field == "embed":
            return random_matrix("bf16", device, *shape)
        values = {"decay_log": torch.rand, "decay_bias": torch.randn, "router_bias": torch.zeros}.get(field)
        if values is None:
            values = torch.ones if "norm" in field or field in ("mixer", "ffn") else torch.randn
        tensor = values(*shape, device=device)
        return tensor / 2 if "conv" in field else tensor if spec.float32 else tensor.bfloat16()

    others = {"experts": None} if isinstance(part.config, MoE) else {}
    return bind(part.weights, part.config, part.sizes, read, lambda field: f"{part.prefix}.{field}", **others)


def random_decoder(
    config: ModelConfig, form: str, dtype: torch.dtype, mixer: Ops, rest: Ops, held: float = 1.0
) -> Decoder:
    """Return a model with random weights: ``form`` for matrices, MXFP4 for experts, of which ``held`` are stacked.

    Recurrent mixers run on ``mixer``, all else on ``rest``; the experts that are not stacked on the processor.
    """
    bound: dict[str, Any] = {}
    for part in parts(config):
        recurrent = part.layer is not None and isinstance(config.layers[part.layer].mixer, KDA)

        def home(field: str, part: Part = part, recurrent: bool = recurrent) -> torch.device:
            if field == "embed":
                return CPU
            of_mixer = part.prefix.endswith("mixer") or (part.prefix.endswith("norms") and field == "mixer")
            return (mixer if recurrent and of_mixer else rest).device

        bound[part.prefix] = random_part(part, form, home)
        if isinstance(part.config, MoE):
            experts = random_experts(part.config, config.width, rest, mixer, held)
            bound[part.prefix] = replace(bound[part.prefix], experts=experts)
    blocks = tuple(
        Block(
            *(layer, bound[f"layers.{i}.norms"], bound[f"layers.{i}.mixer"], bound[f"layers.{i}.ffn"], rest),
            mixer_ops=mixer if isinstance(layer.mixer, KDA) and mixer is not rest else None,
        )
        for i, layer in enumerate(config.layers)
    )
    return Decoder(config, bound["edges"], blocks, rest, dtype, graphs_for(blocks, rest.device))


def random_experts(moe: MoE, width: int, there: Ops, here: Ops, held: float) -> Any:
    """Return experts of which the first ``held`` lie stacked on a GPU, the others in RAM."""
    inner = moe.latent or width
    shapes = (moe.width, inner), (moe.width, inner), (inner, moe.width)
    count = int(moe.experts * held)
    stack = Stack(*(random_matrix("mxfp4", there.device, count, *shape) for shape in shapes)) if count else None
    if stack and count == moe.experts:
        return StackedExperts(stack)
    mapped = MappedExperts(lambda x: pool(shapes)[x % POOL])
    return SplitExperts(stack, range(count), moe.experts, mapped, here, AgedFrequency(), 0) if stack else mapped


@cache
def pool(shapes: tuple[tuple[int, int], ...]) -> list[Expert]:
    """Return the experts in RAM, the same for all layers."""
    return [Expert(*(random_matrix("mxfp4", CPU, *shape) for shape in shapes)) for _ in range(POOL)]


# Operations ---------------------------------------------------------------------------------------------------------


def copy_bandwidth() -> float:
    """Bytes a second of a large copy, read and written."""
    x, y = (torch.empty(1 << 30, device=GPU) for _ in range(2))
    return 2 * x.nbytes / plainly(partial(y.copy_, x))  # captured, it would go through the slower copy engine


def product_speed() -> float:
    """Operations a second of a large product in bfloat16: what the tensor cores can do."""
    x, y, out = (torch.randn(8192, 8192, device=GPU).bfloat16() for _ in range(3))
    return 2 * 8192**3 / plainly(partial(torch.mm, x, y, out=out))


def replayed(calls: list[Callable[[], Any]], seconds: float = 0.5) -> float:
    """Return the seconds of one of ``calls``, captured one after the other: the median of replays."""
    for call in calls[:2]:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    times, ends = list[float](), time.perf_counter() + seconds
    while time.perf_counter() < ends or len(times) < 5:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1000 / len(calls))
    return statistics.median(times)


def plainly(call: Callable[[], Any], repeat: int = 5) -> float:
    """Return the seconds of a call that is not captured: the median."""
    call()
    times = list[float]()
    for _ in range(repeat):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def delta_call(table: Ops, tokens: int, dtype: torch.dtype) -> tuple[Callable[[], Any], int]:
    """Return a call of the delta rule at Kimi K3's shape, and the bytes of state that it moves."""
    c, channels = K3_KDA, K3_KDA.heads * K3_KDA.key_dim
    convolutions = (torch.randn(channels, 4, device=GPU) / 2 for _ in range(3))
    w = DeltaWeights(
        *convolutions,
        *(torch.rand(c.heads, device=GPU), torch.randn(channels, device=GPU), torch.ones(128, device=GPU)),
    )
    s = DeltaState(
        *(torch.randn(1, 3, channels, device=GPU) for _ in range(3)), torch.randn(1, c.heads, 128, 128, device=GPU)
    )
    q, k, v, decay, gate = (torch.randn(1, tokens, channels, device=GPU, dtype=dtype) for _ in range(5))
    beta = torch.randn(1, tokens, c.heads, device=GPU, dtype=dtype)
    arguments = q, k, v, decay, beta, gate, w, s, c.decay_floor, 1e-5
    return partial(table.delta_net, *arguments), 2 * s.S_BHVK.nbytes


def kernels(table: Ops, copy: float, product: float) -> Iterator[tuple[str, float, str]]:
    """Yield what was measured, its seconds, and how that compares with a large copy and a large product."""

    def share(moved: float, seconds: float) -> str:
        return f"{moved / seconds / 1e12:.2f} TB/s, {moved / seconds / copy:.0%} of the copy"

    calls, moved = zip(*(delta_call(table, 1, torch.bfloat16) for _ in range(40)), strict=True)
    seconds = replayed(list(calls))
    yield "delta rule, K3, 1 token", seconds, share(moved[0], seconds)
    for tokens in (8192, 32768):
        for dtype in (torch.bfloat16, torch.float32):
            call, _ = delta_call(table, tokens, dtype)
            seconds = plainly(call)
            name = f"delta rule, K3, {tokens} tokens, {str(dtype)[6:]}"
            yield name, seconds, f"{tokens / seconds / 1e6:.2f} M tokens/s"
    for outputs, inputs in ((12288, 7168), (7168, 12288), (3584, 7168), (163840, 7168)):
        for form in ("bf16", "int8", "mxfp4"):
            for rows in (1, 8) if outputs == 12288 else (1,):
                weights = [
                    random_matrix(form, GPU, outputs, inputs) for _ in range(1 + (1 << 28) // (outputs * inputs))
                ]
                x = torch.randn(1, rows, inputs, device=GPU)
                seconds = replayed([partial(table.linear, x, w) for w in weights])
                yield f"{outputs} x {inputs} {form}, {rows} rows", seconds, share(bench.size(weights[0]), seconds)
    for megabytes in (26, 51, 88):  # as many as the three int8 matrices that are not heads, or small ones in bfloat16
        pairs = [torch.empty(2, megabytes * 125_000, device=GPU).unbind() for _ in range(1 + 400 // megabytes)]
        seconds = replayed([partial(torch.neg, x, out=y) for x, y in pairs])  # a kernel: a copy would be no launch
        yield f"a kernel that copies {megabytes} MB", seconds, share(1e6 * megabytes, seconds)
    for name, moe, inner in (("K3", K3_MOE, 3584), ("Kimi Linear", LINEAR_MOE, 2304)):
        stack = random_experts(replace(moe, experts=128), inner, table, table, 1.0).stack
        for rows in (1, 8):
            calls = list[Callable[[], Any]]()
            for _ in range(16):
                ids = torch.stack([torch.randperm(128)[: moe.chosen].sort().values for _ in range(rows)])
                x, weights = torch.randn(rows, inner), torch.rand(rows, moe.chosen)
                arguments = (t.to(GPU) for t in (x, ids, weights))
                calls.append(partial(table.experts, *arguments, stack, moe.activation))
            seconds = replayed(calls)
            moved = bench.size(stack) / 128 * len(ids.unique())
            yield f"experts, {name}, {rows} rows", seconds, share(moved, seconds)
    for name, c in (("K3", K3_MLA), ("Kimi Linear", LINEAR_MLA)):
        for positions in (8192, 131072):
            q = torch.randn(1, 1, c.heads, 192, device=GPU, dtype=torch.bfloat16)
            up = random_matrix("bf16", GPU, c.heads * 256, 512)
            caches = [
                (
                    torch.randn(1, positions, 512, device=GPU, dtype=torch.bfloat16),
                    torch.randn(1, positions, 64, device=GPU, dtype=torch.bfloat16),
                )
                for _ in range(1 + (1 << 27) // positions // 576)
            ]
            seconds = replayed([partial(table.attention, q, *cache, up, 128) for cache in caches])
            flops = 2 * c.heads * positions * (576 + 512) / seconds
            how = f"{share(positions * 1152, seconds)}; {flops / 1e12:.0f} TFLOP/s, {flops / product:.0%} of a product"
            yield f"attention, {name}, {positions} positions", seconds, how


# Models -------------------------------------------------------------------------------------------------------------


def moved_by(decoder: Decoder, context: int) -> dict[str, float]:
    """Bytes that a token moves after a context, by the type of the device whose memory they are in."""
    demand, amounts = bench._demand(decoder), Counter[str]({decoder.ops.device.type: 0})
    amounts[decoder.ops.device.type] += demand.head + demand.row
    for block, layer in zip(decoder.blocks, demand.layers, strict=True):
        mixer, rest = (ops.device.type for ops in block.tables)
        weights, state, experts = moved(layer, context)
        there = 1.0
        if isinstance(block.layer.ffn, MoE) and isinstance(block.ffn.experts, SplitExperts):
            there = (block.ffn.experts.slot >= 0).float().mean().item()
        amounts.update({mixer: layer.mixer + state})
        amounts.update({rest: weights - layer.mixer + round(experts * there)})
        amounts.update({CPU.type: round(experts * (1 - there))})
    return amounts


def report(name: str, decoder: Decoder, speeds: dict[str, float], context: int = 1024, prompt: int = 2048) -> None:
    """Print how fast a model decodes and reads, and what the parts of a token take.

    ``speeds`` are bytes a second by type of device: together the parts of a token take at least what moving each
    part's bytes takes.
    """
    bench._read(decoder, state := decoder.empty_state(), context)
    bench._decoding(decoder, state, 0.5)
    taken = 1 / statistics.median(bench._decoding(decoder, state, 1.0) for _ in range(3))
    read = bench._reading(decoder, decoder.empty_state(), prompt, 1.0)
    print(f"{name:34} {1000 * taken:8.3f} ms a token, {1 / taken:8.1f} tokens/s; {prompt} tokens read at {read:.0f}/s")
    amounts = {kind: amount for kind, amount in moved_by(decoder, context).items() if amount}
    least = {kind: amount / speeds[kind] for kind, amount in amounts.items()}
    each = (f"{amounts[kind] / 1e9:.2f} GB ({kind}) take {1000 * seconds:.3f} ms" for kind, seconds in least.items())
    print(f"    {', '.join(each)}: {taken / sum(least.values()):.2f} times that")
    shown = (f"{p.part} {p.milliseconds:.2f} ms ({p.bytes / 1e6:.0f} MB)" for p in bench.parts(decoder, context))
    print("    waited for part by part: " + ", ".join(shown), flush=True)


CYCLES = {
    "gpu": (GPU, GPU, 1.0, 1024, 2048),
    "hybrid": (CPU, GPU, 1.0, 256, 512),
    "half": (CPU, GPU, 0.5, 256, 512),
    "cpu": (CPU, CPU, 0.0, 16, 32),
}
"""Kimi K3's cycle: where its recurrent mixers are, and all else; experts on the GPU; the context, and a prompt.

Slow ones read less: a processor that reads a prompt unpacks nearly every expert, however short the prompt is."""


def main() -> None:
    """Print everything that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", default=["kernels", "linear", *CYCLES], help="kernels, linear, or a cycle's")
    what, threads = parser.parse_args().what, machine.threads()
    known = ("kernels", "linear", "cycle", *CYCLES)
    if unknown := set(what).difference(known):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    what += CYCLES if "cycle" in what else []
    found, cpu = ops.gpus(), None
    if not found:
        parser.error("there is no GPU here that deltafin can use; it takes compute capability 7.5 and Triton")
    table = found[0]
    speeds = {GPU.type: copy_bandwidth()}
    print(f"{torch.cuda.get_device_name(0)}, copy {speeds[GPU.type] / 1e12:.2f} TB/s", flush=True)
    torch.cuda.empty_cache()
    if "kernels" in what:
        with torch.inference_mode():
            print(f"a large product in bfloat16: {(product := product_speed()) / 1e12:.0f} TFLOP/s")
            for name, seconds, how in kernels(table, speeds[GPU.type], product):
                print(f"{name:44} {1e6 * seconds:10.1f} us  {how}", flush=True)
                torch.cuda.empty_cache()
    if "linear" in what:
        for form in ("int8", "mxfp4"):
            decoder = random_decoder(LINEAR, form, torch.bfloat16, table, table)
            report(f"Kimi Linear, {form}, MXFP4, gpu", decoder, speeds)
            del decoder
            torch.cuda.empty_cache()
    for name, (mixer, rest, held, context, prompt) in CYCLES.items():
        if name not in what:
            continue
        if CPU in (mixer, rest) and cpu is None:
            cpu = ops.ready("numba", threads, machine.cores(), partial(print, flush=True))
            torch.set_num_threads(threads)
            speeds[CPU.type] = 1e9 * bandwidth(threads)[0]
            print(f"{threads} processor threads read {speeds[CPU.type] / 1e9:.0f} GB/s", flush=True)
        tables = {GPU: table, CPU: cpu}
        decoder = random_decoder(CYCLE, "bf16", torch.bfloat16, tables[mixer], tables[rest], held)
        if elsewhere := settle(decoder):
            print(f"experts that are not on the GPU: {elsewhere}")
        report(f"K3's cycle, bf16, MXFP4, {name}", decoder, speeds, context, prompt)
        del decoder
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
