"""Slots of memory for experts: how many fit in a budget, who is in which, and which of them is given to another."""

import mmap
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress

import torch

from deltafin.direct import anonymous
from deltafin.errors import UsageError
from deltafin.ops import Expert
from deltafin.placement import Demand, divided, fewest
from deltafin.policy import AgedFrequency, Key

Read = tuple[Expert, int]
"""What reading an expert gives: the expert, as views of its slot, and how many bytes that took."""


def slots_within(ram: int, demand: Demand, sizes: Mapping[int, int], context: int) -> dict[int, int]:
    """Return how many slots of each size fit in ``ram`` bytes beside all else, for a context of so many tokens.

    ``sizes`` has the bytes of a slot for each layer with experts. Every size gets what one token needs in a layer, and
    of what is left a share by the bytes of its experts. Raises ``UsageError`` with a table where that does not fit.
    """
    chosen, counts = ({i: getattr(demand.layers[i], what) for i in sizes} for what in ("chosen", "experts"))
    least = fewest(sizes, chosen, counts)
    experts = {"experts that a token chooses in one layer": sum(size * count for size, count in least.items())}
    need = demand.needs(context) | experts
    room = ram - sum(need.values())
    if room < 0:
        rows = "\n".join(f"  {what:<42}{size / 1e9:10.3f} GB" for what, size in need.items())
        raise UsageError(
            f"{ram / 1e9:.3f} GB of memory are too few for this model:\n{rows}",
            f"the smallest that works is {-(-sum(need.values()) // 1_000_000)}MB",
        )
    return divided(room, sizes, counts, least)


class Pool:
    """Slots of one size for the experts of some layers, in memory that takes nothing before it is filled.

    ``read``, called with a key and the first byte of its slot in ``bytes``, fills a slot, in a thread of ``readers``.
    Everything else is done by the thread that computes. A slot belongs to its key from before it is filled until
    after, whether somebody still waits for that or not; ``leased`` are keys whose slots nobody else may have.
    """

    def __init__(
        self, size: int, count: int, policy: AgedFrequency, readers: Executor, read: Callable[["Pool", Key, int], Read]
    ) -> None:
        self.size, self.count, self.policy = size, count, policy
        self.least = 0
        """Slots that a token needs in one layer."""
        self.total = 0
        """Experts that may come to lie here."""
        self.memory = anonymous(size * count)
        self.room = memoryview(self.memory)
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.held: dict[Key, tuple[int, Expert]] = {}
        self.reading: dict[Key, tuple[int, Future[Read]]] = {}
        self.pinned: set[Key] = set()
        self.bytes_read = Counter[int]()
        self._submit = lambda key, slot: readers.submit(read, self, key, slot * size)
        self._slots = set(range(count))
        self._free = sorted(self._slots, reverse=True)
        self._fresh = set(self._slots)
        self.experts: dict[int, dict[int, Expert]] = {}
        """What is held, by layer; every layer that reads into these slots has an entry."""

    @property
    def spare(self) -> int:
        """Slots that no pinned expert lies in."""
        return self.count - len(self.pinned)

    @property
    def whole(self) -> bool:
        """Whether there is a slot for every expert, so that none ever leaves."""
        return self.count >= self.total

    @property
    def fresh(self) -> int:
        """Slots that no memory has been taken for yet."""
        return len(self._fresh)

    def has(self, key: Key) -> bool:
        """Whether ``get`` would not wait."""
        return key in self.held or self.reading[key][1].done()

    def want(self, key: Key, leased: Collection[Key], patient: bool = True) -> bool:
        """Have an expert read, unless it is here or on its way; false where there is no slot for it.

        ``patient``: rather wait for the end of a read that nobody wants any more.
        """
        if key in self.held or key in self.reading:
            return True
        slot = self._slot(leased, patient)
        if slot is None:
            return False
        self._fresh.discard(slot)
        self.reading[key] = slot, self._submit(key, slot)
        return True

    def get(self, key: Key) -> Expert:
        """Return an expert that is here or on its way, waiting for it; raises what reading it raised."""
        if key not in self.held:
            slot, future = self.reading[key]
            try:
                expert, size = future.result()
            except Exception:
                del self.reading[key]
                self._free.append(slot)
                raise
            # In this order no interruption between two lines loses anything: see ``recover``.
            self.policy.admit(key)
            self.held[key] = slot, expert
            self.experts[key[0]][key[1]] = expert
            del self.reading[key]
            self.bytes_read[key[0]] += size
        return self.held[key][1]

    def settle(self, wanted: Collection[Key]) -> None:
        """Take in what has arrived, and give up reads that have not begun, except of what is ``wanted``."""
        for key, (slot, future) in list(self.reading.items()):
            if key not in wanted and future.cancel():
                del self.reading[key]
                self._free.append(slot)
            elif future.done():
                with suppress(Exception):  # is raised again when it is asked for
                    self.get(key)

    def pin(self, keys: Sequence[Key]) -> None:
        """Hold these from now on, whatever comes; they are read now."""
        self.policy.pin(keys)
        self.pinned.update(keys)
        for key in keys:
            self.want(key, self.pinned)
        for key in keys:
            self.get(key)

    def evict(self, keys: Sequence[Key]) -> bool:
        """Free the slot of the last of ``keys`` that is here and not pinned; false where there is none."""
        for key in reversed(keys):
            if key not in self.pinned and (slot := self._drop(key)) is not None:
                self._free.append(slot)
                return True
        return False

    def give_back(self, size: int, leased: Collection[Key]) -> int:
        """Return at least ``size`` bytes of slots to the system, if so many can be spared; say how many it were."""
        given = 0
        while given < size and self.spare > self.least and (slot := self._slot(leased, patient=False)) is not None:
            if hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
                self.memory.madvise(mmap.MADV_DONTNEED, slot * self.size, self.size)
            self._slots.discard(slot)
            self._fresh.discard(slot)
            self.count -= 1
            given += self.size
        return given

    def recover(self) -> None:
        """Find out again which slots are free, after an exception at any moment."""
        for key in [key for key in self.reading if key in self.held]:
            del self.reading[key]
        for experts in self.experts.values():
            experts.clear()
        for (layer, x), (_, expert) in self.held.items():
            self.experts[layer][x] = expert
        taken = {slot for slot, _ in (*self.held.values(), *self.reading.values())}
        self._free = sorted(self._slots - taken, reverse=True)

    def _slot(self, leased: Collection[Key], patient: bool) -> int | None:
        """Return a slot that is nobody's now: a free one, the policy's victim's, that of a read that is not wanted."""
        if self._free:
            return self._free.pop()
        while (key := self.policy.victim(leased)) is not None:
            if (slot := self._drop(key)) is not None:
                return slot
        for key, (slot, future) in list(self.reading.items()) if patient else ():
            if key not in leased:
                if not future.cancel():
                    future.exception()  # its bytes are still on their way into the slot
                del self.reading[key]
                return slot
        return None

    def _drop(self, key: Key) -> int | None:
        slot, _ = self.held.pop(key, (None, None))
        self.experts[key[0]].pop(key[1], None)
        self.policy.drop(key)
        return slot
