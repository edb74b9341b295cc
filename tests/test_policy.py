"""Replacement policies: what each promises, on routes that hypothesis makes up."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafin.policy import LUKEWARM, AgedFrequency, LeastRecent, Optimal, replay

LAYERS, EXPERTS, CHOSEN = 3, 8, 2


@st.composite
def routes(draw, prompts=True):
    """Groups of keys as layers ask for them: tokens that go through all layers in turn, and pieces of prompts."""
    uses = []
    for _ in range(draw(st.integers(1, 12))):
        prefill = prompts and draw(st.integers(0, 4)) == 0
        for layer in range(LAYERS):
            count = st.integers(CHOSEN, EXPERTS) if prefill else st.just(CHOSEN)
            chosen = sorted(draw(st.permutations(range(EXPERTS)))[: draw(count)])
            keys = [(layer, x) for x in chosen]
            uses += [(keys[at : at + CHOSEN], prefill) for at in range(0, len(keys), CHOSEN)]
    return uses


def policies(uses):
    future = [key for keys, _ in uses for key in keys]
    return [LeastRecent(), AgedFrequency(), AgedFrequency(half_life=math.inf), Optimal(future)]


SLOTS = st.integers(CHOSEN, LAYERS * EXPERTS)


class Checked:
    """A policy between two others' hands: keeps its own list of what is in memory, and compares."""

    def __init__(self, policy, slots, pinned):
        self.policy, self.slots, self.pinned, self.held = policy, slots, pinned, set()
        self.touch = policy.touch

    def victim(self, leased=()):
        key = self.policy.victim(leased)
        assert key is None or (key in self.held and key not in leased and key not in self.pinned)
        assert key is not None or self.held <= set(leased) | self.pinned
        assert self.policy.victim(leased) == key  # asking changes nothing
        return key

    def admit(self, key):
        assert key not in self.held
        self.held.add(key)
        assert len(self.held) <= self.slots
        self.policy.admit(key)

    def drop(self, key):
        self.held.remove(key)
        self.policy.drop(key)


@given(routes(), SLOTS, st.sets(st.tuples(st.integers(0, LAYERS - 1), st.integers(0, EXPERTS - 1)), max_size=3))
def test_slots_suffice_and_neither_leased_nor_pinned_keys_leave(uses, slots, pinned):
    slots += len(pinned)
    for policy in policies(uses):
        policy.pin(pinned)
        found = list(replay(Checked(policy, slots, pinned), slots, uses))
        assert len(found) == len(uses)
        assert all(0 <= hits <= len(keys) for hits, (keys, _) in zip(found, uses, strict=True))


@given(routes(), SLOTS)
def test_nothing_is_better_than_the_optimal_policy(uses, slots):
    *others, best = (sum(replay(policy, slots, uses)) for policy in policies(uses))
    assert best >= max(others)


@given(routes(prompts=False))
def test_where_everything_fits_each_expert_is_read_once(uses):
    for policy in policies(uses):
        found = list(replay(policy, LAYERS * EXPERTS, uses))
        missed = sum(len(keys) for keys, _ in uses) - sum(found)
        assert missed == len({key for keys, _ in uses for key in keys})


def test_optimal_on_a_trace_worked_out_by_hand():
    uses = [([(0, x)], False) for x in (1, 2, 3, 1, 2, 4, 1, 2)]
    assert list(replay(Optimal([keys[0] for keys, _ in uses]), 2, uses)) == [0, 0, 0, 1, 0, 0, 1, 0]
    assert list(replay(LeastRecent(), 2, uses)) == [0] * 8  # the sweep that recency fails at


@given(routes(prompts=False), st.sampled_from([1, 3.0, 12, 1e9]))
def test_heat_is_what_it_says(uses, half_life):
    """Against its definition: a sum of powers over the uses of a key, by the number of the token."""
    policy, times = AgedFrequency(half_life=half_life), {}
    for at, (keys, _) in enumerate(uses):
        for key in keys:
            policy.touch(key)
            times.setdefault(key, []).append(at // LAYERS)
    now = (len(uses) - 1) // LAYERS
    expected = {key: sum(0.5 ** ((now - t) / half_life) for t in used) for key, used in times.items()}
    heat = policy.heat
    assert heat == pytest.approx({key: value for key, value in expected.items() if key in heat})
    assert all(expected[key] < 0.0011 for key in expected.keys() - heat.keys())
    assert list(heat.values()) == sorted(heat.values(), reverse=True)


def test_the_coldest_leaves():
    generator = random.Random(3)
    for _ in range(20):
        policy, now = AgedFrequency(half_life=4), {}
        for _ in range(30):
            for key in sorted(generator.sample([(0, x) for x in range(6)], 2)):
                policy.touch(key)
        for x in range(6):
            policy.admit((0, x))
        now = {(0, x): policy.heat.get((0, x), 0.0) for x in range(6)}
        leased = {(0, generator.randrange(6))}
        assert now[policy.victim(leased)] == pytest.approx(min(now[key] for key in now.keys() - leased))


@given(st.integers(CHOSEN, LAYERS * EXPERTS - 2), st.integers(1, 5), st.integers(0, 2**32))
def test_a_prompt_of_any_length_takes_no_more_than_it_holds_at_once(slots, pieces, seed):
    generator = random.Random(seed)
    everything = [(layer, x) for layer in range(LAYERS) for x in range(EXPERTS)]
    decoded = []
    for _ in range(40):
        for layer in range(LAYERS):
            chosen = sorted(generator.choices(range(EXPERTS), [2.0**-x for x in range(EXPERTS)], k=CHOSEN))
            decoded.append((sorted({(layer, x) for x in chosen}), False))
    prompt = [(everything[at : at + CHOSEN], True) for at in range(0, len(everything), CHOSEN)]
    policy = AgedFrequency()
    checked = Checked(policy, slots, set())
    held = checked.held
    run = replay(checked, slots, decoded + prompt * pieces)
    for _ in decoded:
        next(run)
    needed = {key for key in held if policy.heat.get(key, 0) > LUKEWARM}
    for _ in run:
        pass
    assert len(needed - held) <= CHOSEN


def test_recency_alone_would_lose_everything_to_a_prompt():
    decoded = [([(layer, 0), (layer, 1)], False) for _ in range(9) for layer in range(LAYERS)]
    prompt = [([(layer, x), (layer, x + 1)], True) for layer in range(LAYERS) for x in range(2, EXPERTS, 2)]
    after = {}
    for policy in (LeastRecent(), AgedFrequency()):
        found = list(replay(policy, 2 * LAYERS + CHOSEN, decoded + prompt * 3 + decoded))
        after[type(policy)] = sum(found[-len(decoded) :][:LAYERS])
    assert after == {LeastRecent: 0, AgedFrequency: 2 * LAYERS}


@given(routes(), routes(), SLOTS)
def test_heat_goes_on_where_it_was_left(first, second, slots):
    whole, half = AgedFrequency(), AgedFrequency()
    for keys, prefill in first:
        for key in keys:
            whole.touch(key, prefill)
            half.touch(key, prefill)
    rest = AgedFrequency(half.heat)
    for policy in (whole, rest):
        policy.touch((LAYERS, 0))
        policy.touch((0, 0))  # a token of their own, so that both are at the same place in time
        for keys, prefill in second:
            for key in keys:
                policy.touch(key, prefill)
    ours, theirs = rest.heat, whole.heat
    assert max((abs(ours.get(key, 0) - theirs.get(key, 0)) for key in ours | theirs), default=0) < 0.003


def test_heat_of_a_prompt_is_lukewarm_however_long_it_is():
    policy = AgedFrequency()
    for _ in range(1000):
        policy.touch((0, 1), prefill=True)
    assert policy.heat == {(0, 1): pytest.approx(LUKEWARM)}


def test_many_keys_that_come_and_go_leave_no_entries_behind():
    policy = AgedFrequency()
    for i in range(5000):
        policy.admit((0, i))
        policy.drop((0, i))
    assert len(policy._heap) < 200
    assert policy.victim() is None


def test_too_few_slots_are_a_mistake():
    with pytest.raises(ValueError, match="1 slots do not hold 2 keys"):
        list(replay(LeastRecent(), 1, [([(0, 0), (0, 1)], False)]))


def test_recency_on_a_trace_worked_out_by_hand():
    uses = [([(0, x)], False) for x in (1, 2, 1, 3, 1, 2)]
    assert list(replay(LeastRecent(), 2, uses)) == [0, 0, 1, 0, 1, 0]
