"""A layer's routed experts, wherever they live: in the mapped files of the model, or packed in memory."""

from collections.abc import Callable, Sequence
from functools import lru_cache

from torch import Tensor

from deltafin.config import Activation
from deltafin.ops import Expert, Ops

REMEMBERED = 256
"""Experts of a layer whose views are kept at hand; a view is some hundred bytes, the weights stay in the file."""


class MappedExperts:
    """Experts that the operating system pages in from the model's files when they are used."""

    def __init__(self, read: Callable[[int], Expert]) -> None:
        self.read = lru_cache(REMEMBERED)(read)

    def __call__(self, x_NM: Tensor, ids_NE: Tensor, weight_NE: Tensor, activation: Activation, ops: Ops) -> Tensor:
        """Return the weighted sum over each row's experts, NM."""
        return ops.experts(x_NM, ids_NE, weight_NE, self.read, activation)


class PackedExperts:
    """Experts that were packed when the model was opened, and are held in memory."""

    def __init__(self, experts: Sequence[Expert]) -> None:
        self.held = tuple(experts)

    def __call__(self, x_NM: Tensor, ids_NE: Tensor, weight_NE: Tensor, activation: Activation, ops: Ops) -> Tensor:
        """Return the weighted sum over each row's experts, NM."""
        return ops.experts(x_NM, ids_NE, weight_NE, self.held.__getitem__, activation)
