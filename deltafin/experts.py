"""A layer's routed experts, wherever they live: in mapped files, packed in memory, on a GPU, or in several places."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from deltafin.config import Activation
from deltafin.errors import CheckpointError
from deltafin.model.moe import Experts
from deltafin.ops import HELD, REFERENCE, Expert, Ops, Stack
from deltafin.policy import AgedFrequency
from deltafin.transfer import moved
from deltafin.weights import Weight

REMEMBERED = 256
"""Experts of a layer whose views are kept at hand; a view is some hundred bytes, the weights stay in the file."""

SENT = 4
"""Experts that are sent to a GPU at a time while it works on as many others."""


class MappedExperts:
    """Experts that the operating system pages in from the model's files when they are used."""

    def __init__(self, read: Callable[[int], Expert]) -> None:
        self.read = lru_cache(REMEMBERED)(read)

    @property
    def lasting(self) -> Callable[[int], Expert]:
        """Gives an expert whose bytes stay where they are."""
        return self.read

    def __call__(self, x_NM: Tensor, ids_NE: Tensor, weight_NE: Tensor, activation: Activation, ops: Ops) -> Tensor:
        """Return the weighted sum over each row's experts, NM."""
        return ops.experts(x_NM, ids_NE, weight_NE, self.read, activation)


class PackedExperts:
    """Experts that were packed when the model was opened, and are held in memory."""

    def __init__(self, experts: Sequence[Expert]) -> None:
        self.held: Mapping[int, Expert] = dict(enumerate(experts))

    @property
    def lasting(self) -> Callable[[int], Expert]:
        """Gives an expert whose bytes stay where they are."""
        return self.held.__getitem__

    def __call__(self, x_NM: Tensor, ids_NE: Tensor, weight_NE: Tensor, activation: Activation, ops: Ops) -> Tensor:
        """Return the weighted sum over each row's experts, NM."""
        return ops.experts(x_NM, ids_NE, weight_NE, self.held.__getitem__, activation)


class StackedExperts:
    """All experts of a layer, side by side in a GPU's memory."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack

    def __call__(self, x_NM: Tensor, ids_NE: Tensor, weight_NE: Tensor, activation: Activation, ops: Ops) -> Tensor:
        """Return the weighted sum over each row's experts, NM."""
        return ops.experts(x_NM, ids_NE, weight_NE, self.stack, activation)


class SplitExperts:
    """Some experts of a layer side by side on a GPU; the others where ``rest`` has them, for the processor.

    For a few rows each side computes its own, at the same time; or, where ``sends`` is set, the others' weights are
    sent over, row by row, so that a row keeps the bits that it has alone. For many rows they are sent over, each once.
    ``held`` are the experts that ``stack`` has, in its order, of ``count``; ``ops`` are the processor's. What is used
    is noted in ``policy``, under the number of the ``layer``.
    """

    def __init__(
        self,
        stack: Stack,
        held: Sequence[int],
        count: int,
        rest: Experts,
        ops: Ops,
        policy: AgedFrequency,
        layer: int,
    ) -> None:
        self.stack, self.rest, self.ops, self.policy, self.layer = stack, rest, ops, policy, layer
        self.sends = False
        self.slot = torch.full((count,), -1)
        self.slot[list(held)] = torch.arange(len(held))
        self._slot_there = self.slot.to(_device(stack))

    def __call__(self, x_NM: Tensor, ids_NE: Tensor, weight_NE: Tensor, activation: Activation, ops: Ops) -> Tensor:
        """Return the weighted sum over each row's experts, NM."""
        ids = moved(ids_NE, self.ops.device)
        for x in ids.unique().tolist():
            self.policy.touch((self.layer, x), len(ids) > HELD)
        return self._sum(x_NM, ids_NE, weight_NE, activation, ops, ids, self.sends).to(x_NM.dtype)

    def seconds(self, x_NM: Tensor, ids_NE: Tensor, activation: Activation, ops: Ops) -> tuple[float, float]:
        """Return how long a row takes where the others are, and if they are sent: medians, in turn."""
        ids, weight_NE, taken = moved(ids_NE, self.ops.device), torch.ones_like(ids_NE, dtype=torch.float32), []
        for sends in (False, True) * 4:
            began = perf_counter()
            moved(self._sum(x_NM, ids_NE, weight_NE, activation, ops, ids, sends), self.ops.device)
            taken.append(perf_counter() - began)
        return median(taken[2::2]), median(taken[3::2])  # the first of each reads what was never read

    def _sum(
        self,
        x_NM: Tensor,
        ids_NE: Tensor,
        weight_NE: Tensor,
        activation: Activation,
        ops: Ops,
        ids: Tensor,
        sends: bool,
    ) -> Tensor:
        """Return the sum in float32; ``ids`` are those of ``ids_NE``, here."""
        here, away, many = self.ops.device, self.slot[ids] < 0, len(ids) > HELD

        def held() -> Tensor:
            return ops.experts(x_NM, self._slot_there[ids_NE], weight_NE, self.stack, activation, torch.float32)

        if not (sends or many) and bool(away.any()):
            x, weights = moved(x_NM, here), moved(weight_NE, here)  # before the GPU has anything else to do
            y = held()
            return y + moved(self._elsewhere(x, ids, weights, away, activation), y.device)
        y = held()
        for part in [slice(None)] if many else [slice(n, n + 1) for n in range(len(ids))]:
            if missing := ids[part][away[part]].unique().tolist():
                y[part] = self._sent(y[part], missing, x_NM[part], ids_NE[part], weight_NE[part], activation, ops)
        return y

    def _elsewhere(self, x_NM: Tensor, ids_NE: Tensor, weight_NE: Tensor, away_NE: Tensor, how: Activation) -> Tensor:
        """Return what the processor's experts give, row by row."""
        sums = torch.zeros_like(x_NM, dtype=torch.float32)
        for n, mine in enumerate(away_NE):
            row = slice(n, n + 1)
            if bool(mine.any()):
                sums[row] = self.rest(x_NM[row], ids_NE[row, mine], weight_NE[row, mine].contiguous(), how, self.ops)
        return sums

    def _sent(
        self,
        y: Tensor,
        missing: list[int],
        x_NM: Tensor,
        ids_NE: Tensor,
        weight_NE: Tensor,
        activation: Activation,
        ops: Ops,
    ) -> Tensor:
        """Add what the ``missing`` experts give, sending some over while others are computed with."""
        there = y.device

        def send(_x: Any, _ids: Any, _weights: Any, expert: Callable[[int], Expert], *_: Any) -> Tensor:
            """Stand in for the operation ``experts``, and so find experts wherever they live."""
            nonlocal y
            buffers = [Buffer(expert(missing[0]), min(SENT, len(missing)), there) for _ in range(2)]
            for i in range(0, len(missing), SENT):
                some, buffer = missing[i : i + SENT], buffers[i // SENT % 2]
                place = torch.full((len(self.slot),), -1)
                place[some] = torch.arange(len(some))
                stack = buffer.fill(map(expert, some))
                y = y + ops.experts(x_NM, place.to(there)[ids_NE], weight_NE, stack, activation, torch.float32)
                buffer.used()
            return y

        column = torch.tensor(missing).unsqueeze(1)
        rows = torch.empty(len(missing), 0)
        self.rest(rows, column, rows, activation, replace(REFERENCE, experts=send))
        return y


class Buffer:
    """Room for some experts on a GPU, and as much memory that a GPU reads from, through which they are sent there."""

    def __init__(self, like: Expert, count: int, device: torch.device) -> None:
        self.there = empty(like, count, device)
        self.here = empty(like, count, torch.device("cpu"), pinned=device.type == "cuda")
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._used: Any = None

    def fill(self, experts: Iterable[Expert]) -> Stack:
        """Send experts over as soon as what was here before is used no more; whoever computes next waits for them."""
        if self.stream and self._used:
            self._used.synchronize()
        for i, expert in enumerate(experts):
            put(self.here, i, expert)
        with torch.cuda.stream(self.stream) if self.stream else nullcontext():
            for to, source in zip(_tensors(self.there), _tensors(self.here), strict=True):
                to.copy_(source, non_blocking=True)
        if self.stream:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
        return self.there

    def used(self) -> None:
        """Note that all that shall be computed with what is here has been asked for."""
        if self.stream:
            self._used = torch.cuda.current_stream(self.stream.device).record_event()


def stacked(experts: Iterable[Expert], count: int, device: torch.device, where: str) -> Stack:
    """Lay ``count`` experts side by side in a device's memory; ``CheckpointError`` where they are not alike."""
    stack = None
    for i, expert in enumerate(experts):
        stack = stack or empty(expert, count, device)
        try:
            put(stack, i, expert)
        except (TypeError, RuntimeError) as error:
            raise CheckpointError(f"the experts of {where} are stored in different ways", "use --place cpu") from error
    assert stack is not None
    return stack


def empty(like: Expert, count: int, device: torch.device, pinned: bool = False) -> Stack:
    """Return room for ``count`` experts like one."""

    def room(t: Tensor) -> Tensor:
        return torch.empty(count, *t.shape, dtype=t.dtype, device=device, pin_memory=pinned)

    return Stack(*(room(w) if isinstance(w, Tensor) else type(w)(room(w.codes), room(w.scales)) for w in like))


def put(stack: Stack, i: int, expert: Expert) -> None:
    """Write an expert into a stack; ``TypeError`` or ``RuntimeError`` where it is not like the others."""
    for place, weight in zip(stack(i), expert, strict=True):
        if type(place) is not type(weight):
            raise TypeError(f"{type(weight)} among {type(place)}")
        for to, source in zip(_parts(place), _parts(weight), strict=True):
            if to.dtype != source.dtype:
                raise TypeError(f"{source.dtype} among {to.dtype}")
            to.copy_(source)


def _parts(weight: Weight) -> tuple[Tensor, ...]:
    return (weight,) if isinstance(weight, Tensor) else (weight.codes, weight.scales)


def _tensors(stack: Stack) -> tuple[Tensor, ...]:
    return tuple(t for weight in (stack.gate, stack.up, stack.down) for t in _parts(weight))


def _device(stack: Stack) -> torch.device:
    return _tensors(stack)[0].device
