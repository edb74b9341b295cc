"""Put a model together: read its weights, check them, pack what is to be packed, return a decoder that can run."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deltafin.captured import graphs_for
from deltafin.config import MoE
from deltafin.errors import CheckpointError, UsageError
from deltafin.experts import MappedExperts, PackedExperts, SplitExperts, StackedExperts, stacked
from deltafin.foresight import Guess
from deltafin.model.decoder import Block, Decoder, Part, parts
from deltafin.ops import Expert, Ops
from deltafin.placement import GPU, Placement
from deltafin.policy import AgedFrequency, Key
from deltafin.quant import GROUP, pack_int8, pack_mxfp4
from deltafin.snapshot import Snapshot
from deltafin.store import Store
from deltafin.tiers import Tiers
from deltafin.transfer import moved, on
from deltafin.weights import Weight, bind, matrices, specs

PACK = {"int8": pack_int8, "mxfp4": partial(pack_mxfp4, closest=True)}

EXACT = {"router"}
"""Matrices that are never packed. The router decides between experts that nearly tie: a small error there is not a
small one in the result, but another expert. Of the resident bytes it has about a hundredth."""


PACKED = {"MXFP4", "INT8"}
"""Formats of experts that are not packed again when a model is opened."""


@dataclass(frozen=True)
class Home:
    """Where a layer lives: the operations of its mixer and of the rest, and which of its experts are with the rest."""

    mixer: Ops
    rest: Ops
    held: Sequence[int] = ()


def assemble(
    store: Snapshot | Store,
    ops: Ops,
    dtype: torch.dtype,
    resident: str = "keep",
    experts: str = "keep",
    progress: Callable[[str], None] | None = None,
    tiers: Tiers | None = None,
    homes: Sequence[Home] = (),
    head: Ops | None = None,
    policy: AgedFrequency | None = None,
) -> tuple[Decoder, Counter[str]]:
    """Bind every weight of ``store``; ``dtype`` is the type of the residual stream.

    ``ops`` are the processor's, and run everything unless ``homes`` say otherwise, one a layer, and ``head``. What
    is used of experts that are divided between a GPU and memory is noted in ``policy``.

    Weights keep the type and the place they are stored in ("keep"), or matrices that are stored plain are packed into
    memory one by one: routed experts as ``experts`` says, all others as ``resident`` says. With the decoder comes how
    many bytes that saves, under "resident" and "experts" if any were packed at all. With ``tiers``, experts are read
    into its slots, and cannot be packed.

    Raises ``CheckpointError`` on a wrong shape, or for a matrix to be packed that holds infinities.
    """
    homes, bound = homes or [Home(ops, ops)] * len(store.config.layers), dict[str, Any]()
    for part in parts(store.config):
        there = homes[part.layer].rest if part.layer is not None else ops
        bound[part.prefix] = _bind(store, part, tiers, partial(_guess, part, bound, store.config.eps, there))
    saved = Counter[str]()
    for part in parts(store.config) if (resident, experts) != ("keep", "keep") else ():
        if progress:
            progress(f"packing {_where(part, store)}")
        bound[part.prefix] = _packed(store, part, bound[part.prefix], resident, experts, saved)
    for part in parts(store.config):
        home = Home(head or ops, head or ops) if part.layer is None else homes[part.layer]
        if any(table.device != ops.device for table in (home.mixer, home.rest)) or home.held:
            if progress:
                progress(f"bringing {_where(part, store)} to the GPU")
            bound[part.prefix] = _settled(store, part, bound[part.prefix], home, ops, policy)
    blocks = tuple(
        Block(
            *(layer, bound[f"layers.{i}.norms"], bound[f"layers.{i}.mixer"], bound[f"layers.{i}.ffn"], home.rest),
            mixer_ops=None if home.mixer is home.rest else home.mixer,
            ahead=tiers.foresight.see if tiers and isinstance(layer.ffn, MoE) else None,
        )
        for i, (layer, home) in enumerate(zip(store.config.layers, homes, strict=True))
    )
    head = head or ops
    graphs = graphs_for(blocks, head.device) if dtype != torch.float64 else None
    return Decoder(store.config, bound["edges"], blocks, head, dtype, graphs), saved


def homes(
    p: Placement, cpu: Ops, gpus: Sequence[Ops], devices: Sequence[int], heat: Iterable[Key]
) -> tuple[list[Home], Ops]:
    """Return where every layer lives, and the head's operations.

    ``devices`` says which of ``gpus`` a layer is on, if on any (see ``placement.spread``). Of experts that do not all
    fit, those come first that come first in ``heat``.
    """
    ranked: dict[int, list[int]] = {}
    for layer, x in heat:
        ranked.setdefault(layer, []).append(x)
    found = list[Home]()
    for i, layer in enumerate(p.demand.layers):
        if p.tier(i) != GPU:
            found.append(Home(cpu, cpu))
            continue
        gpu = gpus[devices[i]]
        order = dict.fromkeys([*ranked.get(i, []), *range(layer.experts)])
        held = tuple(sorted(list(order)[: p.slots(layer)[GPU]]))
        found.append(Home(cpu if p.apart(i) else gpu, gpu, held))
    return found, gpus[devices[-1]] if p.tier(len(found)) == GPU else cpu


def settle(decoder: Decoder) -> str:
    """Decide whether experts that are not on the GPU are sent there for a few rows; say so, or "" where there are none.

    What a token's experts of one layer take is measured both ways, and decides for all layers as long as the model is
    open: sums on the two sides differ in their last bits. Experts in slots, which count their use, are never sent.
    """
    layers = [(b, getattr(b.ffn, "experts", None)) for b in decoder.blocks if b.ahead is None]
    found = [(block, experts) for block, experts in layers if isinstance(experts, SplitExperts)]
    for block, experts in found[:1]:
        kind: Any = block.layer.ffn
        held, away = (((experts.slot >= 0) == there).nonzero().flatten() for there in (True, False))
        few = min(len(away), max(1, round(kind.chosen * len(away) / kind.experts), kind.chosen - len(held)))
        ids = torch.cat([away[:few], held[: kind.chosen - few]]).sort().values
        width = decoder.config.width if kind.latent is None else kind.latent
        with torch.inference_mode(), on(block.ops.device):
            x_NM = torch.ones(1, width, dtype=decoder.dtype, device=block.ops.device)
            here, sent = experts.seconds(x_NM, ids[None].to(x_NM.device), kind.activation, block.ops)
        for _, other in found:
            other.sends = sent < here
        side, other = ("sent to the GPU", "where they are") if sent < here else ("where they are", "if they were sent")
        least, most = sorted((here, sent))
        return f"{side}: {1000 * least:.2f} ms a layer, {1000 * most:.2f} ms {other}"
    return ""


def _where(part: Part, store: Snapshot | Store) -> str:
    return "the head" if part.layer is None else f"layer {part.layer + 1} of {len(store.config.layers)}"


def _settled(
    store: Snapshot | Store, part: Part, weights: Any, home: Home, ops: Ops, policy: AgedFrequency | None
) -> Any:
    """Return ``weights`` where they are to live; the pages of what was copied are given back."""
    there: dict[str, Any] = {}
    for field, _ in specs(part.weights, part.config):
        tensor = getattr(weights, field)
        mixer = part.prefix.endswith(".mixer") or (part.prefix.endswith(".norms") and field == "mixer")
        device = (home.mixer if mixer else home.rest).device
        if field != "embed" and tensor is not None and device != ops.device:
            there[field] = tensor.to(device)
            store.release(f"{part.prefix}.{field}")
    if isinstance(part.config, MoE) and home.held:
        there["experts"] = _divided(store, part, weights.experts, home, ops, policy)
    return replace(weights, **there)


def _divided(
    store: Snapshot | Store, part: Part, rest: Any, home: Home, ops: Ops, policy: AgedFrequency | None
) -> StackedExperts | SplitExperts:
    """Return a layer's experts with those that its home holds brought there; ``rest`` has all of them now."""
    layer, count = part.layer, part.config.experts
    assert layer is not None

    def read(x: int) -> Expert:
        expert = rest.held[x] if isinstance(rest, PackedExperts) else store.expert(layer, x)
        store.release_expert(layer, x)
        return expert

    stack = stacked(map(read, home.held), len(home.held), home.rest.device, f"layer {layer} in {store.path}")
    if len(home.held) == count:
        return StackedExperts(stack)
    if isinstance(rest, PackedExperts):
        there = set(home.held)
        rest.held = {x: expert for x, expert in rest.held.items() if x not in there}
    return SplitExperts(stack, home.held, count, rest, ops, policy or AgedFrequency(), layer)


def _bind(store: Snapshot | Store, part: Part, tiers: Tiers | None, guess: Guess) -> Any:
    name = f"{part.prefix}.{{}}".format
    others: dict[str, Any] = {}
    if isinstance(part.config, MoE):
        assert part.layer is not None
        mapped = MappedExperts(partial(store.expert, part.layer))
        others["experts"] = mapped if tiers is None else tiers.layer(part.layer, guess)
    return bind(
        part.weights,
        part.config,
        part.sizes,
        lambda field: store.read(name(field)),
        lambda field: store.describe(name(field)),
        **others,
    )


def _guess(part: Part, bound: dict[str, Any], eps: float, ops: Ops, x_BTD: Tensor) -> list[int]:
    """Return the experts that a layer's router would choose for one row of the stream."""
    weights, norm = bound[part.prefix], bound[part.prefix.replace("ffn", "norms")].ffn
    with on(ops.device):
        x_ND = ops.rms_norm(moved(x_BTD, ops.device), norm, eps).flatten(0, 1)
        ids_NE, _ = ops.route(
            *(x_ND, weights.router, weights.router_bias),
            *(part.config.chosen, part.config.renormalize, part.config.scale),
        )
    return ids_NE[0].tolist()


def _packed(store: Snapshot | Store, part: Part, weights: Any, resident: str, experts: str, saved: Counter[str]) -> Any:
    """Return ``weights`` with what is to be packed packed; each matrix's pages are given back as soon as it is."""
    packed: dict[str, Any] = {}
    for field in sorted(matrices(part.weights) - EXACT) if resident != "keep" else ():
        matrix, name = getattr(weights, field), f"{part.prefix}.{field}"
        if isinstance(matrix, Tensor):
            packed[field] = _pack(matrix, resident, store.describe(name))
            saved["resident"] += store.release(name) - packed[field].nbytes
    if isinstance(part.config, MoE) and experts != "keep":
        assert part.layer is not None
        if store.expert_formats[part.layer] - PACKED:
            held = [_expert(store, part.layer, x, experts, saved) for x in range(part.config.experts)]
            packed["experts"] = PackedExperts(held)
    return replace(weights, **packed)


def _expert(store: Snapshot | Store, layer: int, x: int, how: str, saved: Counter[str]) -> Expert:
    stored, where = store.expert(layer, x), f"expert {x} of layer {layer} in {store.path}"
    packed = [_pack(w, how, where) if isinstance(w, Tensor) else w for w in stored]
    saved["experts"] += sum(w.nbytes for w in stored) - sum(w.nbytes for w in packed)
    store.release_expert(layer, x)
    return Expert._make(packed)


def _pack(matrix: Tensor, how: str, where: str) -> Weight:
    if how == "mxfp4" and matrix.shape[1] % GROUP:
        raise UsageError(
            f"{where} has {matrix.shape[1]} columns, and MXFP4 takes groups of {GROUP}", "int8 takes any number"
        )
    try:
        return PACK[how](matrix)
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}", "the file is damaged; fetch it again") from error
