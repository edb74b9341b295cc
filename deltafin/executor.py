"""Put a model together: read its weights, check them, return a decoder that is ready to run."""

from functools import partial
from typing import Any

import torch

from deltafin.config import MoE
from deltafin.experts import MappedExperts
from deltafin.model.decoder import Block, Decoder, Part, parts
from deltafin.ops import Ops
from deltafin.store import Snapshot
from deltafin.weights import bind


def assemble(store: Snapshot, ops: Ops, dtype: torch.dtype) -> Decoder:
    """Bind every weight of ``store``; ``dtype`` is the type of the residual stream.

    Weights keep the type and the place they are stored in. Raises ``CheckpointError`` on a wrong shape.
    """
    bound: dict[str, Any] = {part.prefix: _bind(store, part) for part in parts(store.config)}
    blocks = tuple(
        Block(layer, bound[f"layers.{i}.norms"], bound[f"layers.{i}.mixer"], bound[f"layers.{i}.ffn"], ops)
        for i, layer in enumerate(store.config.layers)
    )
    return Decoder(store.config, bound["edges"], blocks, dtype)


def _bind(store: Snapshot, part: Part) -> Any:
    name = f"{part.prefix}.{{}}".format
    others = {}
    if isinstance(part.config, MoE):
        layer = int(part.prefix.split(".")[1])
        others["experts"] = MappedExperts(partial(store.expert, layer))
    return bind(
        part.weights,
        part.config,
        part.sizes,
        lambda field: store.read(name(field)),
        lambda field: store.describe(name(field)),
        **others,
    )
