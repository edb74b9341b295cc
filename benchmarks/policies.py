"""Hit rates of replacement policies, on routes of Nano and on made-up ones, as the table of docs/tiers-policy.md.

``python benchmarks/policies.py`` takes about a minute.
"""

import math
import random
from collections.abc import Iterator
from itertools import accumulate

import deltafin
from deltafin.policy import AgedFrequency, Key, LeastRecent, Optimal, replay
from deltafin.simulate import Layers, Use, uses
from deltafin.trace import Step

TALK = (
    "Tell me a story about a fox and a lantern.",
    "What is 347 + 285?",
    "What pet does Owen have?",
    "Tell me a long story about the sea and a bell.",
    "Who lives in Saltmere?",
    "Tell me about a bird that could not sing.",
    "What is 12 * 12?",
    "Write about winter in the village.",
)
LAYERS, EXPERTS, CHOSEN, TOKENS = 8, 64, 6, 400
SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4)
SETTLED = 1 / 4
"""Of a trace, what passes before hits are counted."""


def nano() -> list[Use]:
    """Routes of a conversation with Nano of eight messages."""
    model, steps = deltafin.load("nano"), list[Step]()
    model.watch(lambda step: steps.append(step))
    talk = model.session()
    for message in TALK:
        talk.say(message, max_tokens=150)
    kinds = {i: layer.ffn for i, layer in enumerate(model.config.layers) if hasattr(layer.ffn, "experts")}
    counts = {i: ffn.experts for i, ffn in kinds.items()}
    chosen = {i: ffn.chosen for i, ffn in kinds.items()}
    for step in steps:
        step.routes = [route._replace(ids=route.ids.tolist()) for route in step.routes]
    return list(uses(steps, Layers(counts, chosen, dict.fromkeys(counts, 1), 0)))


def made_up(slope: float, drift: float, stays: float, prompts: bool) -> Iterator[Use]:
    """Routes in which the expert of rank r is chosen with a weight of r^-slope.

    ``drift`` pairs of ranks are exchanged in each layer with every token; an expert of the last token is chosen again
    with probability ``stays``; with ``prompts``, every hundredth token comes after one that uses every expert.
    """
    generator = random.Random(1)
    ranked = [generator.sample(range(EXPERTS), EXPERTS) for _ in range(LAYERS)]
    weights = list(accumulate((r + 1) ** -slope for r in range(EXPERTS)))
    before: list[list[int]] = [[] for _ in range(LAYERS)]
    for token in range(TOKENS):
        for layer in range(LAYERS) if prompts and token % 100 == 99 else ():
            for at in range(0, EXPERTS, CHOSEN):
                yield [(layer, x) for x in range(at, min(at + CHOSEN, EXPERTS))], True
        for layer, order in enumerate(ranked):
            for _ in range(math.floor(drift + generator.random())):
                a, b = generator.randrange(EXPERTS), generator.randrange(EXPERTS)
                order[a], order[b] = order[b], order[a]
            chosen = {x for x in before[layer] if generator.random() < stays}
            while len(chosen) < CHOSEN:
                chosen.add(order[generator.choices(range(EXPERTS), cum_weights=weights)[0]])
            before[layer] = sorted(chosen)
            yield [(layer, x) for x in before[layer]], False


def rates(routes: list[Use], slots: int) -> list[float]:
    """Return which share of what decoding uses each policy finds in memory, once it has settled."""
    future: list[Key] = [key for keys, _ in routes for key in keys]
    made = LeastRecent(), AgedFrequency(half_life=math.inf), AgedFrequency(), Optimal(future)
    found = []
    for policy in made:
        counted = list(zip(replay(policy, slots, routes), routes, strict=True))[int(SETTLED * len(routes)) :]
        decoded = [(hits, len(keys)) for hits, (keys, prefill) in counted if not prefill]
        found.append(sum(hits for hits, _ in decoded) / sum(asked for _, asked in decoded))
    return found


def main() -> None:
    """Print the table."""
    traces = {
        "Nano": (nano(), 256),
        "popularity alone": (list(made_up(0.8, 0.0, 0.0, False)), LAYERS * EXPERTS),
        "drifting": (list(made_up(0.8, 0.5, 0.1, False)), LAYERS * EXPERTS),
        "drifting, with prompts": (list(made_up(0.8, 0.5, 0.1, True)), LAYERS * EXPERTS),
        "flat, repeating": (list(made_up(0.4, 0.1, 0.3, False)), LAYERS * EXPERTS),
    }
    print("| routes | in memory | recency | frequency | aged frequency | optimal |\n|---|---:|---:|---:|---:|---:|")
    for name, (routes, total) in traces.items():
        for share in SHARES:
            cells = " | ".join(f"{rate:.1%}" for rate in rates(routes, int(share * total)))
            print(f"| {name} | {share:.0%} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
