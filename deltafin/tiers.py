"""Experts of a model that is larger than memory: some are held in slots, the others are read when they are needed.

Where an expert lies when it is asked for changes the time, never a bit of the answer: an expert in a slot begins at
the same place within a page as in its file, and a row's sum is over its experts by increasing id, whichever of them
came first. ``docs/tiers.md`` says how it works and what was measured.
"""

import os
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from mmap import mmap
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from deltafin import machine
from deltafin.config import Activation, MoE
from deltafin.direct import DirectFiles, anonymous, runs, up
from deltafin.errors import UsageError
from deltafin.mapped import view
from deltafin.ops import FEW, HELD, Expert, Ops
from deltafin.placement import EMBEDDING, PROCESS, Demand
from deltafin.policy import AgedFrequency, Key
from deltafin.snapshot import Snapshot
from deltafin.store import Store

READERS = 8
"""Reads that are under way at once: what keeps a solid-state disk busy, and no more than a spinning one can bear."""


def slots_within(ram: int, demand: Demand, sizes: Mapping[int, int], context: int) -> dict[int, int]:
    """Return how many slots of each size fit in ``ram`` bytes beside all else, for a context of so many tokens.

    ``sizes`` has the bytes of a slot for each layer with experts. Every size gets what one token needs in a layer, and
    of what is left a share by the bytes of its experts. Raises ``UsageError`` with a table where that does not fit.
    """
    most, least = Counter[int](), dict.fromkeys(sizes.values(), 0)
    for layer, size in sizes.items():
        most[size] += demand.layers[layer].experts
        least[size] = max(least[size], min(demand.layers[layer].chosen, demand.layers[layer].experts))
    need = {
        "the program": PROCESS,
        "buffers": demand.buffers,
        f"state for {context:,} tokens": sum(demand.held(layer, context) for layer in demand.layers),
        "weights that every token reads": demand.read,
        "embedding, as far as it is read": min(demand.embed, EMBEDDING),
        "experts that a token chooses in one layer": sum(size * count for size, count in least.items()),
    }
    room = ram - sum(need.values())
    if room < 0:
        rows = "\n".join(f"  {what:<42}{size / 1e9:10.3f} GB" for what, size in need.items())
        raise UsageError(
            f"{ram / 1e9:.3f} GB of memory are too few for this model:\n{rows}",
            f"the smallest that works is {-(-sum(need.values()) // 1_000_000)}MB",
        )
    wanted = {size: size * (most[size] - least[size]) for size in most}
    share = min(1.0, room / max(1, sum(wanted.values())))
    return {size: least[size] + int(wanted[size] * share) // size for size in most}


@dataclass
class Counters:
    """What the experts of a layer took: found in memory, or not; of those not, read ahead; bytes, seconds.

    ``wait`` are seconds in which nothing was computed because a read was not done, ``compute`` the others.
    """

    hits: int = 0
    misses: int = 0
    foreseen: int = 0
    bytes: int = 0
    wait: float = 0.0
    compute: float = 0.0


class Pool:
    """Slots of one size for the experts of some layers, in memory that takes nothing before it is filled.

    Everything is done by the thread that computes, except that ``read`` (called with a key and the slot's first byte)
    fills a slot in a thread of ``readers``; a slot belongs to its key from before that begins until after it has
    ended, whether somebody still waits for it or not.
    """

    def __init__(self, size: int, count: int, least: int, policy: AgedFrequency) -> None:
        self.size, self.count, self.least, self.policy = size, count, least, policy
        self.memory: mmap = anonymous(size * count)
        self.room = memoryview(self.memory)
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.layers: dict[int, TieredExperts] = {}
        self.slots = set(range(count))
        self.free = sorted(self.slots, reverse=True)
        self.pinned: set[Key] = set()
        self.held: dict[Key, int] = {}
        self.reading: dict[Key, tuple[int, Future[tuple[Expert, int]]]] = {}

    @property
    def spare(self) -> int:
        """Slots that no pinned expert lies in."""
        return self.count - len(self.pinned)

    @property
    def whole(self) -> bool:
        """Whether there is a slot for every expert."""
        return self.count >= sum(layer.experts for layer in self.layers.values())

    def want(self, key: Key, leased: Collection[Key]) -> bool:
        """Have an expert read, unless it is here or on its way; false where every slot is ``leased``."""
        if key in self.held or key in self.reading:
            return True
        slot = self._slot(leased)
        if slot is None:
            return False
        layer = self.layers[key[0]]
        self.reading[key] = slot, layer.tiers.readers.submit(layer.tiers.read, self, key, slot)
        return True

    def get(self, key: Key) -> Expert:
        """Return an expert that is here or on its way, waiting for it; raises what reading it raised."""
        layer, x = key
        if key not in self.held:
            slot, future = self.reading[key]
            try:
                expert, size = future.result()
            except Exception:
                del self.reading[key]
                self.free.append(slot)
                raise
            # In an order in which no interruption between two lines loses a slot: see ``recover``.
            self.policy.admit(key)
            self.layers[layer].held[x] = expert
            self.held[key] = slot
            del self.reading[key]
            self.layers[layer].counters.bytes += size
        return self.layers[layer].held[x]

    def settle(self, wanted: Collection[Key] = ()) -> None:
        """Take in what has arrived, and give up reads that have not begun, except of what is ``wanted``."""
        for key, (slot, future) in list(self.reading.items()):
            if key in wanted:
                continue
            if future.cancel():
                del self.reading[key]
                self.free.append(slot)
            elif future.done():
                with suppress(Exception):  # of what nobody asked for
                    self.get(key)

    def _slot(self, leased: Collection[Key]) -> int | None:
        """Return a slot that is nobody's now: a free one, that of the policy's victim, that of a read not needed."""
        if self.free:
            return self.free.pop()
        while (key := self.policy.victim(leased)) is not None:
            if (slot := self._drop(key)) is not None:
                return slot
        for key, (slot, future) in list(self.reading.items()):
            if key not in leased:
                future.cancel() or future.exception()  # whose bytes may still be on their way into the slot
                del self.reading[key]
                return slot
        return None

    def _drop(self, key: Key) -> int | None:
        slot = self.held.pop(key, None)
        self.layers[key[0]].held.pop(key[1], None)
        self.policy.drop(key)
        return slot

    def evict(self, keys: Sequence[Key]) -> bool:
        """Free the slot of the last of ``keys`` that is here; false where none is."""
        for key in reversed(keys):
            if key in self.held and key not in self.pinned and (slot := self._drop(key)) is not None:
                self.free.append(slot)
                return True
        return False

    def give_back(self, size: int) -> int:
        """Return at least ``size`` bytes of slots to the system, if so many can be spared; say how many it were."""
        given = 0
        while given < size and self.spare > self.least:
            slot = self._slot(())
            if slot is None:
                break
            if hasattr(self.memory, "madvise"):
                self.memory.madvise(4, slot * self.size, self.size)  # MADV_DONTNEED
            self.slots.discard(slot)
            self.count -= 1
            given += self.size
        return given

    def recover(self) -> None:
        """Find out again which slots are free, after an exception at any moment."""
        for key in [key for key in self.reading if key in self.held]:
            del self.reading[key]
        for layer, experts in self.layers.items():
            for x in [x for x in experts.held if (layer, x) not in self.held]:
                del experts.held[x]
        taken = {*self.held.values(), *(slot for slot, _ in self.reading.values())}
        self.free = sorted(self.slots - taken, reverse=True)


class Tiers:
    """The experts of all layers of a model: one pool of slots for each size of record, and the readers.

    ``slots`` says how many slots there are of each size.
    """

    def __init__(
        self,
        store: Snapshot | Store,
        slots: Mapping[int, int],
        heat: Mapping[Key, float] | None = None,
        readers: int = READERS,
    ) -> None:
        self.store = store
        self.files = DirectFiles(store.files)
        self.lock = threading.RLock()
        self.readers = ThreadPoolExecutor(readers, "deltafin-reader", _anywhere)
        self.pools = {size: Pool(size, count, 0, AgedFrequency(count, heat)) for size, count in slots.items()}
        self.layers: dict[int, TieredExperts] = {}

    def layer(self, layer: int) -> "TieredExperts":
        """Return the experts of one layer."""
        pool, moe = self.pools[self.store.slot_bytes(layer)], self.store.config.layers[layer].ffn
        assert isinstance(moe, MoE)
        pool.least = max(pool.least, min(moe.experts, moe.chosen))
        self.layers[layer] = pool.layers[layer] = TieredExperts(self, pool, layer, moe.experts)
        return self.layers[layer]

    def read(self, pool: Pool, key: Key, slot: int) -> tuple[Expert, int]:
        """Read an expert into a slot; return it, as views, and how many bytes that took. Runs in any thread."""
        layer, x = key
        matrices = self.store.entries(layer, x)
        reads, places = runs(e for tensors in matrices for e in tensors)
        at, what = slot * pool.size, f"expert {x} of layer {layer}"
        for run in reads:
            self.files.read(run, pool.room[at + run.at : at + run.at + up(run.size)], what)
        expert = (
            self.store.weight([view(pool.bytes, at + places[e], e) for e in tensors], f"{what} in {self.store.path}")
            for tensors in matrices
        )
        return Expert(*expert), sum(up(run.size) for run in reads)

    def stats(self) -> dict[str, Any]:
        """Return what was counted since the model was opened, in all and by layer; bytes and seconds."""
        layers = {layer: asdict(experts.counters) for layer, experts in self.layers.items()}
        total = {name: sum(c[name] for c in layers.values()) for name in Counters.__dataclass_fields__}
        return total | {"direct": self.files.direct, "layers": layers}


class TieredExperts:
    """A layer's experts in a pool of slots, and on the disk. The same interface as ``MappedExperts``."""

    def __init__(self, tiers: Tiers, pool: Pool, layer: int, experts: int) -> None:
        self.tiers, self.pool, self.experts = tiers, pool, experts
        self.keys = [(layer, x) for x in range(experts)]
        self.held: dict[int, Expert] = {}
        self.counters = Counters()

    def __call__(self, x_NM: Tensor, ids_NE: Tensor, weight_NE: Tensor, activation: Activation, ops: Ops) -> Tensor:
        """Return the weighted sum over each row's experts, NM."""
        with self.tiers.lock:
            began, waited = perf_counter(), self.counters.wait
            try:
                return self._run(x_NM, ids_NE, weight_NE, activation, ops)
            except BaseException:
                self.pool.recover()
                raise
            finally:
                self.counters.compute += perf_counter() - began - (self.counters.wait - waited)

    def _run(self, x_NM: Tensor, ids_NE: Tensor, weight_NE: Tensor, activation: Activation, ops: Ops) -> Tensor:
        rows = len(ids_NE)
        used: list[int] = ids_NE[0].tolist() if rows == 1 else ids_NE.unique().tolist()
        at_once = rows <= HELD and ops.together and x_NM.dtype != torch.float64
        if at_once and len(used) > self.pool.spare:
            halves = zip(*(t.split((rows + 1) // 2) for t in (x_NM, ids_NE, weight_NE)), strict=True)
            return torch.cat([self._run(*half, activation, ops) for half in halves])
        missing = [x for x in used if x not in self.held]
        self.counters.hits += len(used) - len(missing)
        self.counters.misses += len(missing)
        if not self.pool.whole:
            for x in used:
                self.pool.policy.touch(self.keys[x], rows > FEW)
        if missing:
            if not at_once:
                return ops.experts(x_NM, ids_NE, weight_NE, self._in_turn(used), activation)
            leased = {self.keys[x] for x in used}
            self.pool.settle(leased)
            for x in missing:
                if not self.pool.want(self.keys[x], leased):
                    raise AssertionError(f"{self.pool.count} slots do not hold {len(used)} experts")
            if rows == 1:
                return self._as_they_come(used, missing, x_NM, weight_NE, activation, ops)
            for x in missing:
                self._wait(x)
        return ops.experts(x_NM, ids_NE, weight_NE, self.held.__getitem__, activation)

    def _wait(self, x: int) -> Expert:
        began = perf_counter()
        try:
            return self.pool.get(self.keys[x])
        finally:
            self.counters.wait += perf_counter() - began

    def _as_they_come(
        self, used: list[int], missing: list[int], x_NM: Tensor, weight_NE: Tensor, activation: Activation, ops: Ops
    ) -> Tensor:
        """Compute a row's experts while others are being read.

        Each is a row of its own until all are there; then they are added by increasing id, which are the additions
        that one call makes.
        """
        place = {x: i for i, x in enumerate(used)}
        x, parts = x_NM.float(), [torch.empty(0)] * len(used)
        late = set(missing)
        ready, rest = [x for x in used if x not in late], list(missing)
        while ready or rest:
            if not ready:
                self._wait(rest[0])
            ready, more = ready[:HELD], ready[HELD:]
            while (
                rest and len(ready) < HELD and (rest[0] in self.held or self.pool.reading[self.keys[rest[0]]][1].done())
            ):
                self._wait(rest[0])
                ready.append(rest.pop(0))
            places = [place[x] for x in ready]
            shares = weight_NE[0, places].unsqueeze(1)
            ids = torch.tensor(ready).unsqueeze(1)
            for i, y in zip(
                places,
                ops.experts(x.expand(len(ready), -1), ids, shares, self.held.__getitem__, activation),
                strict=True,
            ):
                parts[i] = y
            ready = more
        y = torch.zeros_like(x[0])
        for part in parts:
            y += part
        return y.to(x_NM.dtype).unsqueeze(0)

    def _in_turn(self, used: list[int]) -> Callable[[int], Expert]:
        """Return what gives one of ``used`` after the other; one is good until the next is asked for."""
        keys = [self.keys[x] for x in used]
        turn = {x: i for i, x in enumerate(used)}
        leased = set(keys)  # what is needed now or later
        ahead = 2 * self.tiers.readers._max_workers
        asked = 0

        def expert(x: int) -> Expert:
            nonlocal asked
            at = turn[x]
            leased.difference_update(keys[max(0, at - 1) : at])
            while not self.pool.want(keys[at], leased):
                if not self.pool.evict(keys[at + 1 :]):
                    raise AssertionError("no slot")
            asked = max(asked, at + 1)
            while asked < len(keys) and asked <= at + ahead and self.pool.want(keys[asked], leased):
                asked += 1
            return self._wait(x)

        self.pool.settle(leased)
        return expert


def _anywhere() -> None:
    """Let a reader run on any core: the thread that starts it may be bound to one, which it computes on."""
    with suppress(AttributeError, OSError):
        os.sched_setaffinity(0, machine.cores())
