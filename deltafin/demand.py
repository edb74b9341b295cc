"""What a model asks of a machine, from its declared tensors and the bytes they are stored in."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from deltafin import machine
from deltafin.config import KDA, MLA, MLP, AttentionResidual, Layer, ModelConfig, MoE
from deltafin.executor import EXACT
from deltafin.layout import Layout
from deltafin.model.decoder import SLICE, Decoder, parts
from deltafin.placement import Demand, LayerDemand
from deltafin.quant import GROUP
from deltafin.session import CHECKPOINTS, PIECE
from deltafin.snapshot import Snapshot
from deltafin.store import Store
from deltafin.weights import Weight, matrices, specs

WIDENED = 1 << 19
"""Elements of a weight that a product of many rows widens at a time, for each of up to eight threads."""


def packed(shape: tuple[int, ...], how: str) -> int:
    """Return the bytes of a matrix [.., O, I] packed as ``"int8"`` or ``"mxfp4"``."""
    count = math.prod(shape)
    return count // 2 + count // GROUP if how == "mxfp4" else count + 4 * count // shape[-1]


def demand(
    config: ModelConfig,
    stored: Callable[[str], int],
    expert: Callable[[int], int],
    *,
    resident: str = "keep",
    experts: str = "keep",
    activation: int = 4,
    tied: bool = False,
) -> Demand:
    """Return what a model asks for.

    ``stored`` gives the bytes of one of our tensors by our name, ``expert`` those of one routed expert of a layer.
    ``resident`` and ``experts`` pack what is stored plain, as ``load`` does. A number of the residual stream has
    ``activation`` bytes. ``tied`` says that the embedding is the head.
    """
    size, flops = Counter[str](), Counter[str]()
    for part in parts(config):
        for field, spec in specs(part.weights, part.config):
            name, shape = f"{part.prefix}.{field}", spec.shape(part.sizes)
            held = 4 * math.prod(shape) if spec.float32 else stored(name)
            if field in matrices(part.weights):
                flops[part.prefix] += 2 * math.prod(shape)
                if resident != "keep" and field not in EXACT and held >= 2 * math.prod(shape):
                    held = packed(shape, resident)
            size[name] = held
            size[part.prefix] += held
    layers = tuple(
        replace(
            _mixer(layer, activation),
            weights=sum(size[f"layers.{i}.{part}"] for part in ("norms", "mixer", "ffn")),
            flops=sum(flops[f"layers.{i}.{part}"] for part in ("mixer", "ffn")) + _recurrence(layer),
            mixer=size[f"layers.{i}.mixer"],
            mixer_flops=flops[f"layers.{i}.mixer"] + _recurrence(layer),
            **_experts(config, layer, expert, i, experts),
        )
        for i, layer in enumerate(config.layers)
    )
    embed = size["edges.embed"]
    return Demand(
        layers,
        head=size["edges"] - embed,
        embed=0 if tied and resident == "keep" else embed,
        row=embed // config.vocab,
        head_flops=flops["edges"],
        piece=PIECE,
        buffers=_buffers(config, activation),
        copies=1 + CHECKPOINTS,
        longest=config.context,
    )


def of_layout(layout: Layout, resident: str = "keep", experts: str = "keep", activation: int = 4) -> Demand:
    """Return what a checkpoint asks for, from its headers."""

    def stored(source: str) -> int:
        return sum(layout.entries[name].stop - layout.entries[name].start for name in layout.names(source))

    def expert(layer: int) -> int:
        moe, names = layout.experts[layer]
        return max(sum(map(stored, names(x))) for x in range(moe.experts))

    rules = layout.rules
    return demand(
        layout.config,
        lambda name: sum(map(stored, rules[name].sources)),
        expert,
        resident=resident,
        experts=experts,
        activation=activation,
        tied=rules["edges.head"].sources == rules["edges.embed"].sources,
    )


def of_files(files: Snapshot | Store, resident: str = "keep", experts: str = "keep", activation: int = 4) -> Demand:
    """Return what a model asks for whose files are here; experts of one layer are taken to be alike."""
    embed, head = (files.read(f"edges.{name}") for name in ("embed", "head"))
    return demand(
        files.config,
        lambda name: files.read(name).nbytes,
        lambda layer: sum(e.stop - e.start for found in files.entries(layer, 0) for e in found),
        resident=resident,
        experts=experts,
        activation=activation,
        tied=_same(embed, head),
    )


def of_decoder(decoder: Decoder, size: Callable[[Any], int], chosen: Callable[[Any], int]) -> Demand:
    """Return what a model asks for that is ready to run.

    ``size`` gives the bytes of a weight, ``chosen`` of the experts that a token chooses in a block.
    """

    def stored(name: str) -> int:
        where, _, field = name.rpartition(".")
        owner: Any = decoder.edges
        if where != "edges":
            _, number, part = where.split(".")
            owner = getattr(decoder.blocks[int(number)], part)
        return size(getattr(owner, field))

    return demand(
        replace(decoder.config, layers=tuple(block.layer for block in decoder.blocks)),
        stored,
        lambda i: chosen(decoder.blocks[i]) // decoder.blocks[i].layer.ffn.chosen,  # type: ignore[union-attr]
        activation=decoder.dtype.itemsize,
        tied=_same(decoder.edges.embed, decoder.edges.head),
    )


def _same(embed: Weight, head: Weight) -> bool:
    return isinstance(embed, Tensor) and isinstance(head, Tensor) and embed.data_ptr() == head.data_ptr()


def _mixer(layer: Layer, activation: int) -> LayerDemand:
    """What a layer remembers, in a type of ``activation`` bytes (recurrent state in float32 at least)."""
    match layer.mixer:
        case KDA(heads=h, key_dim=k, value_dim=v, conv_width=w):
            return LayerDemand(0, state=max(4, activation) * h * k * v + activation * (w - 1) * h * (2 * k + v))
        case MLA(heads=h, plain_dim=p, shared_dim=j, value_dim=v, latent_rank=r):
            # Keys and values made for every position, or queries moved into the latent space: what takes less.
            expanded = 2 * h * ((p + j + v) + r * (p + v) / SLICE)
            return LayerDemand(0, position=activation * (r + j), attention=min(expanded, 2 * h * (2 * r + j)))


def _recurrence(layer: Layer) -> float:
    """Operations of the delta rule for a token: decay, read, correct, write, read."""
    kda = layer.mixer
    return 7.0 * kda.heads * kda.key_dim * kda.value_dim if isinstance(kda, KDA) else 0.0


def _experts(
    config: ModelConfig, layer: Layer, expert: Callable[[int], int], i: int, how: str
) -> dict[str, int | float]:
    moe = layer.ffn
    if not isinstance(moe, MoE):
        return {}
    inner = config.width if moe.latent is None else moe.latent
    count, size = 3 * moe.width * inner, expert(i)
    if how != "keep" and size >= 2 * count:
        size = 2 * packed((moe.width, inner), how) + packed((inner, moe.width), how)
    return {"experts": moe.experts, "chosen": moe.chosen, "expert": size, "expert_flops": 2.0 * count}


def _buffers(config: ModelConfig, activation: int) -> int:
    """Bytes of activations while a piece of a prompt is read: the stream, and the widest of the sublayers."""
    widest = 0
    for layer in set(config.layers):
        match layer.mixer:
            case KDA(heads=h, key_dim=k, value_dim=v):
                mixer = SLICE * 2 * h * (4 * k + 3 * v)
            case MLA(heads=h, plain_dim=p, shared_dim=j, value_dim=v, latent_rank=r):
                spans = 3 * SLICE * SLICE * h + h * (p + v) * 2 * (r + SLICE)
                mixer = SLICE * h * (3 * (p + j + v) + 4 * max(r, v)) + spans
        match layer.ffn:
            case MLP(width=f):
                feed = PIECE * 3 * f
            case MoE(shared_width=u, experts=x):
                feed = PIECE * (3 * u + 6 * config.width + 4 * x)
        widest = max(widest, mixer, feed)
    depth = 2
    if isinstance(config.residual, AttentionResidual):
        depth = 3 + len(config.layers) // config.residual.block
    return max(4, activation) * (widest + PIECE * config.width * (depth + 4) + 4 * WIDENED * min(machine.threads(), 8))
