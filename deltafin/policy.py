"""Which expert leaves memory when room is needed for another: replacement policies, pure and without torch.

``AgedFrequency`` is the one that runs. An expert's heat is how often decoding used it, each use counting half as much
after a half-life (LRFU, Lee et al. 2001); the coldest leaves. Recency alone does badly here: a token walks through
all layers in turn, so the expert that was used longest ago is often the one whose layer comes next, and any prompt
sweeps everything out. Frequency alone never forgets. What a prompt uses becomes lukewarm and no more, however long
the prompt is, so its experts displace each other and not those that decoding lives on. Measured in
``docs/tiers-policy.md``, beside the optimal policy, which must know the future and serves as the yardstick.

A key is ``(layer, expert)``. Whoever holds the slots calls ``touch`` for every use, hit or miss; on a miss, where no
slot is free, ``victim`` and ``drop``; then ``admit``. Each call costs at most O(log n) on average for n keys.
"""

import heapq
import math
from collections import OrderedDict, defaultdict, deque
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Protocol

Key = tuple[int, int]

LUKEWARM = 1 / 8
"""Heat that a prompt gives at most: that of one use by decoding three half-lives ago."""

HALF_LIFE = 12
"""Tokens after which a use counts half."""

COLD = 1e-3
"""Heat that is not worth remembering."""


class Policy(Protocol):
    """Knows the experts in memory, and says which of them is to leave next."""

    def touch(self, key: Key, prefill: bool = False) -> None:
        """Note a use, whether the key is in memory or not; ``prefill`` says that a prompt is read."""
        ...

    def admit(self, key: Key) -> None:
        """Note that the key is in memory now."""
        ...

    def drop(self, key: Key) -> None:
        """Note that the key is in memory no longer."""
        ...

    def victim(self, leased: Container[Key] = ()) -> Key | None:
        """Return the key that should leave, never one in ``leased`` or pinned; None where there is no other."""
        ...

    def pin(self, keys: Iterable[Key]) -> None:
        """Never choose these from now on."""
        ...


class LeastRecent:
    """The key whose last use is longest ago leaves (LRU)."""

    def __init__(self) -> None:
        self._order: OrderedDict[Key, None] = OrderedDict()
        self._pinned: set[Key] = set()

    def touch(self, key: Key, prefill: bool = False) -> None:
        """See ``Policy``."""
        if key in self._order:
            self._order.move_to_end(key)

    def admit(self, key: Key) -> None:
        """See ``Policy``."""
        if key not in self._pinned:
            self._order[key] = None

    def drop(self, key: Key) -> None:
        """See ``Policy``."""
        self._order.pop(key, None)

    def victim(self, leased: Container[Key] = ()) -> Key | None:
        """See ``Policy``."""
        return next((key for key in self._order if key not in leased), None)

    def pin(self, keys: Iterable[Key]) -> None:
        """See ``Policy``."""
        for key in keys:
            self._pinned.add(key)
            self._order.pop(key, None)


class _Ranked:
    """The key of lowest rank leaves; a heap whose entries may be out of date, but never rank a key too high."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, Key]] = []
        self._queued: dict[Key, float] = {}  # the rank of the one entry that counts, for each key in memory
        self._pinned: set[Key] = set()

    def rank(self, key: Key) -> float:
        raise NotImplementedError

    def _queue(self, key: Key) -> None:
        rank = self._queued[key] = self.rank(key)
        heapq.heappush(self._heap, (rank, key))
        if len(self._heap) > 2 * len(self._queued) + 64:
            self._heap = [(rank, key) for key, rank in self._queued.items()]
            heapq.heapify(self._heap)

    def admit(self, key: Key) -> None:
        """See ``Policy``."""
        if key not in self._pinned and key not in self._queued:
            self._queue(key)

    def drop(self, key: Key) -> None:
        """See ``Policy``."""
        self._queued.pop(key, None)

    def victim(self, leased: Container[Key] = ()) -> Key | None:
        """See ``Policy``."""
        aside: list[tuple[float, Key]] = []
        found = None
        while self._heap and found is None:
            rank, key = entry = heapq.heappop(self._heap)
            if self._queued.get(key) != rank:
                continue
            if self.rank(key) > rank:
                self._queue(key)
                continue
            aside.append(entry)
            found = key if key not in leased else None
        for entry in aside:
            heapq.heappush(self._heap, entry)
        return found

    def pin(self, keys: Iterable[Key]) -> None:
        """See ``Policy``."""
        for key in keys:
            self._pinned.add(key)
            self._queued.pop(key, None)


class AgedFrequency(_Ranked):
    """The coldest key leaves: the one that decoding used least, each use halved after ``half_life`` tokens.

    ``heat`` is what an earlier run left. Only decoding lets time pass. A token touches its keys in increasing order,
    so the next token begins where a key is not larger than the one before.
    """

    def __init__(self, heat: Mapping[Key, float] | None = None, half_life: float = HALF_LIFE) -> None:
        super().__init__()
        self._step = 1 / half_life
        self._now = 0.0
        self._last: Key = (-1, -1)
        # The logarithm of a heat, in half-lives, as if it were counted at time zero: the order of two keys, neither of
        # which is used, does not change with time, so nothing need be recomputed while it passes.
        self._level = {key: math.log2(value) for key, value in (heat or {}).items() if value > 0}

    def rank(self, key: Key) -> float:
        """Return the logarithm of the key's heat, counted at time zero."""
        return self._level.get(key, -math.inf)

    def touch(self, key: Key, prefill: bool = False) -> None:
        """See ``Policy``."""
        level = self.rank(key)
        if prefill:
            self._level[key] = max(level, self._now + math.log2(LUKEWARM))
            return
        if key <= self._last:
            self._now += self._step
        self._last = key
        low, high = sorted((level, self._now))
        self._level[key] = high + math.log2(1 + 2 ** (low - high))

    @property
    def heat(self) -> dict[Key, float]:
        """Heat of every key that is not cold, to be remembered; the hottest first."""
        now = {key: 2 ** (level - self._now) for key, level in self._level.items()}
        return dict(sorted(((k, h) for k, h in now.items() if h >= COLD), key=lambda item: (-item[1], item[0])))


class Optimal(_Ranked):
    """The key whose next use is furthest away leaves (Belady 1966); ``future`` are all touches in their order."""

    def __init__(self, future: Iterable[Key]) -> None:
        super().__init__()
        self._uses: dict[Key, deque[int]] = defaultdict(deque)
        for at, key in enumerate(future):
            self._uses[key].append(at)

    def rank(self, key: Key) -> float:
        """Return when the key is used next, negated."""
        return -self._uses[key][0] if self._uses[key] else -math.inf

    def touch(self, key: Key, prefill: bool = False) -> None:
        """See ``Policy``."""
        self._uses[key].popleft()
        if key in self._queued:
            self._queue(key)


def replay(policy: Policy, slots: int, uses: Iterable[tuple[list[Key], bool]]) -> Iterator[int]:
    """Run ``policy`` over groups of keys that are needed at the same time; yield how many of each group were there.

    A group is as a layer asks for it: its keys, and whether it belongs to a prompt. ``slots`` is how many fit.
    """
    held: set[Key] = set()
    for keys, prefill in uses:
        for key in keys:
            policy.touch(key, prefill)
        leased = set(keys)
        missing = [key for key in keys if key not in held]
        yield len(keys) - len(missing)
        for key in missing:
            if len(held) == slots:
                out = policy.victim(leased)
                if out is None:
                    raise ValueError(f"{slots} slots do not hold {len(leased)} keys at once")
                policy.drop(out)
                held.remove(out)
            policy.admit(key)
            held.add(key)
