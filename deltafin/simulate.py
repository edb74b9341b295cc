"""What if: recorded routes, replayed under each replacement policy and the optimal one, for any budget of memory."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deltafin.errors import UsageError
from deltafin.ops import FEW
from deltafin.placement import divided, fewest
from deltafin.policy import AgedFrequency, Key, LeastRecent, Optimal, Policy, replay
from deltafin.trace import Step

POLICIES: dict[str, Callable[[Sequence[Key]], Policy]] = {
    "recency": lambda future: LeastRecent(),
    "frequency": lambda future: AgedFrequency(half_life=math.inf),
    "aged frequency": lambda future: AgedFrequency(),
    "optimal": Optimal,
}
"""What is compared: of the last two, the first is what runs, the other knows the future."""

SHARES = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1)
"""Parts of the experts that memory holds, where no budget is asked for."""

Use = tuple[list[Key], bool]


@dataclass(frozen=True)
class Outcome:
    """What a policy makes of a trace within ``ram`` bytes, of which experts get ``expert_ram``.

    ``hit_rate`` and ``bytes_per_token`` are of decoding; ``prompt_bytes`` are read while prompts are.
    """

    ram: int
    expert_ram: int
    slots: int
    policy: str
    hit_rate: float
    bytes_per_token: float
    prompt_bytes: int


@dataclass(frozen=True)
class Layers:
    """The experts of a trace's model: how many, how many a token chooses, and bytes of one, for each layer with any.

    ``others`` are the bytes of memory that are taken by all else.
    """

    counts: Mapping[int, int]
    chosen: Mapping[int, int]
    sizes: Mapping[int, int]
    others: int

    @classmethod
    def of(cls, about: Mapping[str, Any]) -> "Layers":
        """Read them from the first line of a trace; ``UsageError`` where it does not have them."""
        try:
            layers = {int(layer): experts for layer, experts in about["experts"].items()}
            counts, chosen, sizes = (
                {i: int(e[name]) for i, e in layers.items()} for name in ("count", "chosen", "bytes")
            )
            made = cls(counts, chosen, sizes, int(about["other_bytes"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(
                f"the trace does not describe its model's experts ({error!r})", "record it again"
            ) from error
        if not layers:
            raise UsageError("the trace is of a model without experts", "there is nothing to replace in it")
        return made

    def slots(self, ram: int) -> dict[int, int]:
        """Return how many slots there are of each size, within ``ram`` bytes for everything.

        Each size gets what one token needs in a layer, and of what is left a share by the bytes of its experts.
        Raises ``UsageError`` when memory is too small for that.
        """
        least = self._least()
        room = ram - self.others - sum(size * count for size, count in least.items())
        if room < 0:
            raise UsageError(
                f"{ram / 1e9:.3f} GB of memory are too few for this model",
                f"the smallest that works is {-(-(ram - room) // 10**6)}MB",
            )
        return divided(room, self.sizes, self.counts, least)

    def budgets(self) -> list[int]:
        """Return budgets from the smallest to one that holds everything."""
        total = sum(self.sizes[layer] * count for layer, count in self.counts.items())
        smallest = sum(size * count for size, count in self._least().items())
        return [self.others + smallest, *(self.others + int(total * s) for s in SHARES if total * s > smallest)]

    def _least(self) -> dict[int, int]:
        return fewest(self.sizes, self.chosen, self.counts)


def uses(steps: Iterable[Step], layers: Layers) -> Iterator[Use]:
    """Yield the experts that are needed at the same time, step by step and layer by layer.

    A token needs all of a layer's at once; a piece of a prompt goes through them by increasing number, and a few at a
    time are enough for it.
    """
    for step in steps:
        for route in step.routes:
            keys = [(route.layer, x) for x in sorted({x for row in route.ids for x in row})]
            if step.tokens > FEW:
                few = layers.chosen[route.layer]
                yield from ((keys[at : at + few], True) for at in range(0, len(keys), few))
            else:
                rows = [sorted({(route.layer, x) for x in row}) for row in route.ids]
                yield from ((row, False) for row in rows)


def simulate(
    layers: Layers,
    steps: Sequence[Step],
    budgets: Sequence[int] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Outcome]:
    """Replay a trace under every policy within every budget, starting with nothing in memory.

    ``progress`` is called with replays done and in all. Raises ``UsageError`` for a budget that is too small, or for a
    trace in which nothing was decoded or that does not fit its own first line.
    """
    by_size: defaultdict[int, list[Use]] = defaultdict(list)
    for keys, prefill in uses(steps, layers):
        layer = keys[0][0]
        if layer not in layers.sizes or not all(0 <= x < layers.counts[layer] for _, x in keys):
            raise UsageError(f"the trace uses experts of layer {layer} that its model has not", "record it again")
        by_size[layers.sizes[layer]].append((keys, prefill))
    tokens = sum(step.tokens for step in steps if step.tokens <= FEW)
    if not tokens or not by_size:
        raise UsageError("the trace has no token that was decoded", "record an answer of some tokens")
    futures = {size: [key for keys, _ in used for key in keys] for size, used in by_size.items()}
    slots = {ram: layers.slots(ram) for ram in sorted(budgets or layers.budgets())}
    outcomes: list[Outcome] = []
    for ram, counts in slots.items():
        for name, policy in POLICIES.items():
            hits = asked = missed = prompt = 0
            for size, used in by_size.items():
                made = policy(futures[size])
                for found, (keys, prefill) in zip(replay(made, counts[size], used), used, strict=True):
                    if prefill:
                        prompt += size * (len(keys) - found)
                    else:
                        hits, asked = hits + found, asked + len(keys)
                        missed += size * (len(keys) - found)
            held = sum(size * count for size, count in counts.items())
            rate = hits / asked if asked else 1.0
            outcomes.append(Outcome(ram, held, sum(counts.values()), name, rate, missed / tokens, prompt))
            if progress:
                progress(len(outcomes), len(slots) * len(POLICIES))
    return outcomes
