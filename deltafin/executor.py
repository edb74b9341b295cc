"""Put a model together: read its weights, check them, pack what is to be packed, return a decoder that can run."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deltafin.config import MoE
from deltafin.errors import CheckpointError, UsageError
from deltafin.experts import MappedExperts, PackedExperts
from deltafin.foresight import Guess
from deltafin.model.decoder import Block, Decoder, Part, parts
from deltafin.ops import Expert, Ops
from deltafin.quant import GROUP, pack_int8, pack_mxfp4
from deltafin.snapshot import Snapshot
from deltafin.store import Store
from deltafin.tiers import Tiers
from deltafin.weights import Weight, bind, matrices

PACK = {"int8": pack_int8, "mxfp4": partial(pack_mxfp4, closest=True)}

EXACT = {"router"}
"""Matrices that are never packed. The router decides between experts that nearly tie: a small error there is not a
small one in the result, but another expert. Of the resident bytes it has about a hundredth."""


PACKED = {"MXFP4", "INT8"}
"""Formats of experts that are not packed again when a model is opened."""


def assemble(
    store: Snapshot | Store,
    ops: Ops,
    dtype: torch.dtype,
    resident: str = "keep",
    experts: str = "keep",
    progress: Callable[[str], None] | None = None,
    tiers: Tiers | None = None,
) -> tuple[Decoder, Counter[str]]:
    """Bind every weight of ``store``; ``dtype`` is the type of the residual stream.

    Weights keep the type and the place they are stored in ("keep"), or matrices that are stored plain are packed into
    memory one by one: routed experts as ``experts`` says, all others as ``resident`` says. With the decoder comes how
    many bytes that saves, under "resident" and "experts" if any were packed at all. With ``tiers``, experts are read
    into its slots, and cannot be packed.

    Raises ``CheckpointError`` on a wrong shape, or for a matrix to be packed that holds infinities.
    """
    bound: dict[str, Any] = {}
    for part in parts(store.config):
        bound[part.prefix] = _bind(store, part, tiers, partial(_guess, part, bound, store.config.eps, ops))
    saved = Counter[str]()
    for part in parts(store.config) if (resident, experts) != ("keep", "keep") else ():
        if progress:
            layer = part.prefix.split(".")[1:2]
            where = f"layer {int(layer[0]) + 1} of {len(store.config.layers)}" if layer else "the head"
            progress(f"packing {where}")
        bound[part.prefix] = _packed(store, part, bound[part.prefix], resident, experts, saved)
    blocks = tuple(
        Block(
            *(layer, bound[f"layers.{i}.norms"], bound[f"layers.{i}.mixer"], bound[f"layers.{i}.ffn"], ops),
            ahead=tiers.foresight.see if tiers and isinstance(layer.ffn, MoE) else None,
        )
        for i, layer in enumerate(store.config.layers)
    )
    return Decoder(store.config, bound["edges"], blocks, dtype), saved


def _bind(store: Snapshot | Store, part: Part, tiers: Tiers | None, guess: Guess) -> Any:
    name = f"{part.prefix}.{{}}".format
    others: dict[str, Any] = {}
    if isinstance(part.config, MoE):
        layer = int(part.prefix.split(".")[1])
        others["experts"] = MappedExperts(partial(store.expert, layer)) if tiers is None else tiers.layer(layer, guess)
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
    x_ND = ops.rms_norm(x_BTD, norm, eps).flatten(0, 1)
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
        layer = int(part.prefix.split(".")[1])
        if store.expert_formats[layer] - PACKED:
            held = [_expert(store, layer, x, experts, saved) for x in range(part.config.experts)]
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
