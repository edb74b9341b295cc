"""Experts of a model that is larger than memory: some are held in slots, the others are read when they are needed.

Where an expert lies when it is asked for changes the time, never a bit of the answer: an expert in a slot begins at
the same place within a page as in its file, and a row's sum is over its experts by increasing id, whichever of them
came first. ``docs/tiers.md`` says how it works and what was measured.
"""

import os
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, fields
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from deltafin import machine
from deltafin.config import Activation, MoE
from deltafin.direct import DirectFiles, runs, up
from deltafin.errors import UsageError
from deltafin.foresight import Foresight, Guess
from deltafin.heat import merged
from deltafin.mapped import view
from deltafin.ops import FEW, HELD, Expert, Ops
from deltafin.policy import AgedFrequency, Key
from deltafin.pressure import Pressure
from deltafin.slots import Pool, Read
from deltafin.snapshot import Snapshot
from deltafin.store import Store

READERS = 8
"""Reads that are under way at once: what keeps a solid-state disk busy."""


@dataclass
class Counters:
    """What the experts of a layer took: how many were in memory and how many not; of those not, read ahead; seconds.

    ``wait`` are seconds in which nothing was computed because a read was not done, ``compute`` the others.
    """

    hits: int = 0
    misses: int = 0
    foreseen: int = 0
    wait: float = 0.0
    compute: float = 0.0


class Tiers:
    """The experts of all layers of a model: one pool of slots for each size of record, and the readers that fill them.

    ``slots`` says how many there are of each size. ``ram`` is what the process may take in all: when it takes more,
    slots are given back. ``heat`` is what an earlier run knew; ``lookahead`` None: where it is measured to be a gain.
    """

    def __init__(
        self,
        store: Snapshot | Store,
        slots: Mapping[int, int],
        *,
        ram: int | None = None,
        heat: Mapping[Key, float] | None = None,
        lookahead: bool | None = None,
        readers: int = READERS,
    ) -> None:
        self.store, self.ram = store, ram
        self.files = DirectFiles(store.files)
        self.lock = threading.RLock()
        self.window = 2 * readers
        """How many experts of a prompt are read ahead."""
        threads = ThreadPoolExecutor(readers, "deltafin-reader", _anywhere)
        self.pools = {s: Pool(s, n, AgedFrequency(heat), threads, self._read) for s, n in slots.items()}
        self.layers: dict[int, TieredExperts] = {}
        self.foresight = Foresight(lookahead)
        self.pressure = Pressure()
        self.notes: list[str] = []
        """What the user should know, oldest first."""
        self._given = 0
        self._began = 0.0
        if not self.files.direct:
            self.notes.append(f"{store.path} cannot be read past the page cache: reads go through it")

    def layer(self, layer: int, guess: Guess) -> "TieredExperts":
        """Return the experts of one layer; ``guess`` gives those that its router would choose now."""
        pool, moe = self.pools[self.store.slot_bytes(layer)], self.store.config.layers[layer].ffn
        assert isinstance(moe, MoE)
        pool.least = max(pool.least, min(moe.experts, moe.chosen))
        pool.total += moe.experts
        experts = TieredExperts(self, pool, layer, moe.experts, guess)
        if self.layers:
            next(reversed(self.layers.values())).following = experts
        self.layers[layer] = experts
        return experts

    def pin(self, count: int) -> None:
        """Hold the hottest ``count`` experts from now on; ``UsageError`` where there is no room for so many."""
        room = sum(pool.spare - pool.least for pool in self.pools.values())
        if count > room:
            raise UsageError(f"there is no room for {count} pinned experts", f"{room} fit, or give more memory")
        hottest = [key for key in self.heat if key[0] in self.layers][:count]
        for pool in self.pools.values():
            pool.pin([key for key in hottest if key[0] in pool.experts][: pool.spare - pool.least])
        if sum(len(pool.pinned) for pool in self.pools.values()) < count:
            self.notes.append("not all are pinned that could be: so many hot experts are not known yet")

    @property
    def heat(self) -> Mapping[Key, float]:
        """How hot the experts are, the hottest first."""
        return merged(pool.policy for pool in self.pools.values())

    def info(self) -> dict[str, Any]:
        """Return how experts are held, for people; sizes are bytes."""
        count, total = (sum(getattr(pool, what) for pool in self.pools.values()) for what in ("count", "total"))
        return {
            "experts in memory": f"{min(count, total):,} of {total:,}",
            "memory for experts": sum(pool.size * min(pool.count, pool.total) for pool in self.pools.values()),
            "expert reads": "direct" if self.files.direct else "through the page cache",
        }

    def stats(self) -> dict[str, Any]:
        """Return what was counted since the model was opened, in all and by layer: numbers, bytes and seconds."""
        layers = {
            i: {"bytes": layer.pool.bytes_read[i]} | {f.name: getattr(layer.counters, f.name) for f in fields(Counters)}
            for i, layer in self.layers.items()
        }
        total = {name: sum(c[name] for c in layers.values()) for name in ("bytes", *(f.name for f in fields(Counters)))}
        return total | {
            "pinned": sum(len(pool.pinned) for pool in self.pools.values()),
            "slots": {size: pool.count for size, pool in self.pools.items()},
            "lookahead": self.foresight.lookahead,
            "direct": self.files.direct,
            "notes": list(self.notes),
            "layers": layers,
        }

    def mind(self, pool: Pool, count: int, leased: Collection[Key]) -> None:
        """Give slots back where filling ``count`` more would take more memory than there is for this process."""
        if self.ram is None or (used := machine.resident()) is None:
            return
        over = used + pool.size * min(count, pool.fresh) - self.ram
        if over > 0 and (given := pool.give_back(over, leased)):
            self._note(given, f"to stay below {self.ram / 1e9:.3f} GB")

    def begin(self, now: float) -> None:
        """Note that a token begins."""
        self._began = now
        self.foresight.begin()

    def end(self, now: float) -> None:
        """Note that a token has ended, as far as experts are concerned."""
        self.foresight.end(now - self._began)
        if why := self.pressure.end(now - self._began):
            given = sum(pool.give_back(pool.count * pool.size // 8, ()) for pool in self.pools.values())
            if given:
                self._note(given, why)

    def _note(self, given: int, why: str) -> None:
        self._given += given
        self.notes = [note for note in self.notes if not note.endswith(why)]
        self.notes.append(f"experts have {self._given / 1e9:.3f} GB less memory than planned, {why}")

    def _read(self, pool: Pool, key: Key, at: int) -> Read:
        """Read an expert into a slot. Runs in any thread."""
        layer, x = key
        matrices = self.store.entries(layer, x)
        reads, places = runs(e for tensors in matrices for e in tensors)
        what = f"expert {x} of layer {layer}"
        for run in reads:
            self.files.read(run, pool.room[at + run.at : at + run.at + up(run.size)], what)
        expert = (
            self.store.weight([view(pool.bytes, at + places[e], e) for e in tensors], f"{what} in {self.store.path}")
            for tensors in matrices
        )
        return Expert(*expert), sum(up(run.size) for run in reads)


class TieredExperts:
    """A layer's experts in a pool of slots, and on the disk. The same interface as ``MappedExperts``."""

    def __init__(self, tiers: Tiers, pool: Pool, layer: int, experts: int, guess: Guess) -> None:
        self.tiers, self.pool, self.guess = tiers, pool, guess
        self.following: TieredExperts | None = None
        self.keys = [(layer, x) for x in range(experts)]
        self.held = pool.experts.setdefault(layer, {})
        self.counters = Counters()
        self.first = not tiers.layers
        self.previous: list[int] = []
        """What the token before chose."""
        self.early: set[int] = set()
        """What is being read, or was, because it was foreseen."""

    def __call__(self, x_NM: Tensor, ids_NE: Tensor, weight_NE: Tensor, activation: Activation, ops: Ops) -> Tensor:
        """Return the weighted sum over each row's experts, NM."""
        with self.tiers.lock:
            began, waited, one = perf_counter(), self.counters.wait, len(ids_NE) == 1
            if self.first and one:
                self.tiers.begin(began)
            try:
                y = self._at_hand(x_NM, ids_NE, weight_NE, activation, ops) if one and self.pool.whole else None
                if y is None:
                    y = self._run(x_NM, ids_NE, weight_NE, activation, ops)
            except BaseException:
                self.pool.recover()
                raise
            ended = perf_counter()
            self.counters.compute += ended - began - (self.counters.wait - waited)
            if one and self.following is None:
                self.tiers.end(ended)
            return y

    def _at_hand(
        self, x_NM: Tensor, ids_NE: Tensor, weight_NE: Tensor, activation: Activation, ops: Ops
    ) -> Tensor | None:
        """Compute a row where no expert ever leaves, without any ado; None where one is not here yet."""
        try:
            y = ops.experts(x_NM, ids_NE, weight_NE, self.held.__getitem__, activation)
        except KeyError:
            return None
        self.counters.hits += ids_NE.numel()
        return y

    def _run(self, x_NM: Tensor, ids_NE: Tensor, weight_NE: Tensor, activation: Activation, ops: Ops) -> Tensor:
        rows, pool, held = len(ids_NE), self.pool, self.held
        used: list[int] = ids_NE[0].tolist() if rows == 1 else ids_NE.unique().tolist()
        keys = [self.keys[x] for x in used]
        leased = set(keys)
        if pool.reading:
            pool.settle(leased)
        missing = [x for x in used if x not in held]
        if missing:
            self.tiers.mind(pool, len(missing), leased)
        apart = ops.together and x_NM.dtype != torch.float64
        if apart and 1 < rows <= HELD and len(used) > pool.spare:
            halves = (slice(rows // 2), slice(rows // 2, rows))
            return torch.cat([self._run(x_NM[h], ids_NE[h], weight_NE[h], activation, ops) for h in halves])
        self.counters.hits += len(used) - len(missing)
        self.counters.misses += len(missing)
        for key in keys:
            pool.policy.touch(key, rows > FEW)
        if missing and rows > 1 and not (apart and rows <= HELD):
            return ops.experts(x_NM, ids_NE, weight_NE, self._in_turn(used, leased), activation)
        for x in missing:
            if not pool.want(self.keys[x], leased):
                raise AssertionError(f"{pool.count} slots do not hold {len(used)} experts")
        if rows == 1:
            self._look_ahead(used, missing, leased)
            if missing and apart:
                return self._as_they_come(used, missing, x_NM, weight_NE, activation, ops)
        for x in missing:
            self._wait(x)
        return ops.experts(x_NM, ids_NE, weight_NE, held.__getitem__, activation)

    def _wait(self, x: int) -> Expert:
        began = perf_counter()
        try:
            return self.pool.get(self.keys[x])
        finally:
            self.counters.wait += perf_counter() - began

    def _look_ahead(self, used: list[int], missing: list[int], leased: set[Key]) -> None:
        """Note what a token chose here, and begin to read what it is likely to choose in the layer that follows."""
        foresight, layer = self.tiers.foresight, self.following
        self.counters.foreseen += len(self.early.intersection(used))
        self.early.clear()
        foresight.check(self.keys[0][0], missing)
        if layer is not None:
            for x in foresight.guess(layer.keys[0][0], layer.previous, layer.guess):
                if x not in layer.held and layer.pool.want(layer.keys[x], leased, patient=False):
                    layer.early.add(x)
        self.previous = used

    def _as_they_come(
        self, used: list[int], missing: list[int], x_NM: Tensor, weight_NE: Tensor, activation: Activation, ops: Ops
    ) -> Tensor:
        """Compute a row's experts while others are being read.

        Each is a row of its own until all are there; then they are added by increasing id, which are the additions
        that one call makes.
        """
        place = {x: i for i, x in enumerate(used)}
        parts = torch.empty(len(used), x_NM.shape[1])
        late = set(missing)
        ready, rest = [x for x in used if x not in late], missing
        while ready or rest:
            if not ready:
                self._wait(rest[0])
            while rest and self.pool.has(self.keys[rest[0]]):
                self._wait(rest[0])
                ready.append(rest[0])
                rest = rest[1:]
            now, ready = ready[:HELD], ready[HELD:]
            at, ids = torch.tensor([place[x] for x in now]), torch.tensor(now).unsqueeze(1)
            shares = weight_NE[0, at].unsqueeze(1)
            x, get = x_NM.expand(len(now), -1), self.held.__getitem__
            parts[at] = ops.experts(x, ids, shares, get, activation, torch.float32)
        y = torch.zeros(x_NM.shape)
        for part in parts:
            y += part
        return y.to(x_NM.dtype)

    def _in_turn(self, used: list[int], leased: set[Key]) -> Callable[[int], Expert]:
        """Return what gives one of ``used`` after the other, each read once; one is good until the next is asked for.

        ``leased`` are the keys of those whose turn is still to come.
        """
        keys, turn = [self.keys[x] for x in used], {x: i for i, x in enumerate(used)}
        asked = 0

        def expert(x: int) -> Expert:
            nonlocal asked
            at = turn[x]
            leased.difference_update(keys[max(0, at - 1) : at])
            self.tiers.mind(self.pool, self.tiers.window, leased)
            while not self.pool.want(keys[at], leased):
                if not self.pool.evict(keys[at + 1 :]):  # which will be read again
                    raise AssertionError(f"{self.pool.count} slots do not hold one expert")
            asked = max(asked, at + 1)
            while asked < len(keys) and asked <= at + self.tiers.window and self.pool.want(keys[asked], leased):
                asked += 1
            return self._wait(x)

        return expert


def _anywhere() -> None:
    """Let a reader run on any core: the thread that starts it may be bound to one, which it computes on."""
    with suppress(AttributeError, OSError):
        os.sched_setaffinity(0, machine.cores())
