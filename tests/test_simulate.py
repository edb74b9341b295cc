"""Replays of traces: a trace worked out by hand, budgets, what more memory and the optimal policy can do."""

import json

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from deltafin.cli import main
from deltafin.errors import UsageError
from deltafin.simulate import POLICIES, Layers, simulate, uses
from deltafin.trace import Route, Step, TraceFile

ABOUT = {"experts": {"2": {"count": 4, "chosen": 1, "bytes": 10_000_000}}, "other_bytes": 100_000_000}
"""A model of one layer with four experts of 10 MB, and 100 MB of all else."""


def tokens(*experts, layer=2):
    return [Step(1, 0.0, 1.0, [], [Route(layer, [[x]], [[1.0]])]) for x in experts]


def prompt(*experts, layer=2):
    return Step(len(experts) * 10, 0.0, 1.0, [], [Route(layer, [[x] for x in experts] * 10, [[1.0]])])


def test_a_trace_worked_out_by_hand():
    steps = [prompt(0, 3), *tokens(1, 2, 3, 1, 2, 3)]
    layers = Layers.of(ABOUT)
    outcomes = {o.policy: o for o in simulate(layers, steps, [125_000_000])}  # two slots, and a half
    assert set(outcomes) == set(POLICIES)
    assert {(o.ram, o.slots, o.expert_ram) for o in outcomes.values()} == {(125_000_000, 2, 20_000_000)}
    assert {o.prompt_bytes for o in outcomes.values()} == {20_000_000}  # each expert of a prompt once
    recency, optimal = outcomes["recency"], outcomes["optimal"]
    assert (recency.hit_rate, recency.bytes_per_token) == (0.0, 10_000_000)
    # 1 takes the place of 0, 2 that of 1; 3 is there; 1 takes its place; 2 is there; 3 is read again.
    assert (optimal.hit_rate, optimal.bytes_per_token) == (pytest.approx(2 / 6), pytest.approx(10e6 * 4 / 6))


def test_with_room_for_all_each_expert_is_read_once():
    (*_, last) = simulate(Layers.of(ABOUT), [prompt(1), *tokens(1, 2, 2, 1)])
    assert (last.slots, last.hit_rate, last.bytes_per_token, last.prompt_bytes) == (4, 0.75, 2_500_000, 10_000_000)


def test_budgets_go_from_the_smallest_to_everything():
    layers = Layers.of(ABOUT)
    assert layers.budgets() == [110_000_000, 120_000_000, 130_000_000, 140_000_000]
    with pytest.raises(UsageError, match=r"0\.109 GB of memory are too few") as error:
        layers.slots(109_000_000)
    assert "110MB" in str(error.value)
    assert layers.slots(10**12) == {10_000_000: 4}


def test_experts_of_two_sizes_have_slots_of_their_own():
    experts = {"0": {"count": 4, "chosen": 1, "bytes": 10}, "1": {"count": 4, "chosen": 2, "bytes": 1000}}
    layers = Layers.of({"experts": experts, "other_bytes": 0})
    assert layers.slots(2010) == {10: 1, 1000: 2}
    assert layers.slots(2010 + 1030) == {10: 1 + 1, 1000: 3}
    assert layers.slots(4040) == {10: 4, 1000: 4}
    steps = [Step(1, 0, 1, [], [Route(0, [[1]], []), Route(1, [[2, 3]], [])])] * 3
    assert [o.hit_rate for o in simulate(layers, steps, [2010])] == [pytest.approx(2 / 3)] * len(POLICIES)


def test_a_prompt_asks_for_each_expert_once_a_token_for_all_of_its_own():
    layers = Layers.of(ABOUT)
    assert list(uses([prompt(3, 1, 3)], layers)) == [([(2, 1)], True), ([(2, 3)], True)]
    few = Step(2, 0.0, 1.0, [], [Route(2, [[3], [1]], [])])
    assert list(uses([few], layers)) == [([(2, 3)], False), ([(2, 1)], False)]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=20), st.lists(st.integers(110, 150), min_size=1, max_size=3))
def test_the_optimal_policy_reads_least_and_more_memory_never_makes_it_read_more(experts, budgets):
    outcomes = simulate(Layers.of(ABOUT), tokens(*experts), [1_000_000 * b for b in budgets])
    best = [o for o in outcomes if o.policy == "optimal"]
    for o in outcomes:
        assert o.bytes_per_token >= next(b for b in best if b.ram == o.ram).bytes_per_token
        assert o.bytes_per_token == pytest.approx((1 - o.hit_rate) * 10_000_000)
    assert [o.ram for o in best] == sorted(o.ram for o in best)
    assert [o.hit_rate for o in best] == sorted(o.hit_rate for o in best)


@pytest.mark.parametrize(
    ("about", "steps", "message"),
    [
        ({}, tokens(1), "does not describe"),
        (ABOUT | {"experts": {}}, tokens(1), "without experts"),
        (ABOUT, [], "no token that was decoded"),
        (ABOUT, [prompt(1, 2)], "no token that was decoded"),
        (ABOUT, tokens(4), "layer 2 that its model has not"),
        (ABOUT, tokens(1, layer=3), "layer 3 that its model has not"),
    ],
)
def test_what_cannot_be_replayed_is_refused(about, steps, message):
    with pytest.raises(UsageError, match=message):
        simulate(Layers.of(about), steps)


# The command


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "routes"
    with TraceFile(path, ABOUT | {"model": "toy"}) as file:
        for step in [prompt(0, 3), *tokens(1, 2, 3, 1, 2, 3)]:
            file.write(step)
    return path


def invoke(*arguments):
    return CliRunner().invoke(main, ["simulate", *map(str, arguments)])


def test_a_table_and_a_plot(written):
    done = invoke(written, "--ram", "110MB,120MB", "--ram", "140MB")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    header = "memory  experts  recency  frequency  aged frequency  optimal"
    assert " ".join(header.split()) in " ".join(lines[0].split())
    assert [line.split()[:3] for line in lines[1:4]] == [
        *(["110.00", "MB", "1"], ["120.00", "MB", "2"], ["140.00", "MB", "4"])
    ]
    assert "33.3%" in lines[2]
    bars = [line for line in lines if "█" in line or "·" in line]
    assert [bar.count("█") + bar.count("▒") + bar.count("·") for bar in bars[:3]] == [40] * 3
    assert "found in memory, aged frequency" in lines[-1]


def test_json(written):
    done = invoke(written, "--json", "--ram", "120MB")
    assert [(o["policy"], o["slots"]) for o in json.loads(done.stdout)] == [(name, 2) for name in POLICIES]


def test_mistakes_are_messages(written, tmp_path):
    assert "the smallest that works is 110MB" in invoke(written, "--ram", "1MB").stderr
    assert "is not a size" in invoke(written, "--ram", "much").stderr
    assert invoke(tmp_path / "nothing").exit_code == 2
    other = tmp_path / "other"
    other.write_text("hello\n", encoding="utf-8")
    done = invoke(other)
    assert (done.exit_code, "line 1" in done.stderr) == (1, True)
