"""Traces: a watched model says the same and tells what it did; files come back as they were written."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import deltafin
from deltafin import api, demand, placement, trace
from deltafin.config import MoE
from deltafin.errors import NumericsError, StorageError, UsageError
from deltafin.session import Session
from deltafin.simulate import Layers
from deltafin.slots import slots_within
from deltafin.trace import PARTS, Route, Span, Step, TraceFile, events, read, viewer_file

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


def opened(name, backend="reference"):
    return deltafin.load(f"tests/data/{name}", backend=backend)


def decoded(model):
    """Logits after a prompt of twelve tokens and after each of three more."""
    session = Session(model)
    return torch.stack([session.feed(TOKENS), *(session.feed([t]) for t in (7, 7, 2))])


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("name", ["kimi-k3-tiny", "kimi-linear"])
def test_a_watched_model_says_the_same_bits_and_tells_every_route(name, backend):
    plain, model = opened(name, backend), opened(name, backend)
    steps, routes = [], []
    model.watch(steps.append, lambda *route: routes.append(route))
    assert torch.equal(decoded(model), decoded(plain))
    layers = {i: layer.ffn for i, layer in enumerate(model.config.layers) if isinstance(layer.ffn, MoE)}
    assert [step.tokens for step in steps] == [12, 1, 1, 1]
    assert [layer for layer, _, _ in routes] == [*layers] * 4
    for step in steps:
        assert [route.layer for route in step.routes] == [*layers]
        for layer, ids, weights in step.routes:
            assert ids.shape == weights.shape == (step.tokens, layers[layer].chosen)
            assert 0 <= int(ids.min()) <= int(ids.max()) < layers[layer].experts
    assert all(torch.equal(r[1], s.ids) for r, s in zip(routes, [r for s in steps for r in s.routes], strict=True))


def test_every_part_of_a_step_is_timed_and_they_add_up(tmp_path):
    model, steps = opened("kimi-k3-tiny"), []
    model.watch(steps.append)
    decoded(model)
    moe = sum(isinstance(layer.ffn, MoE) for layer in model.config.layers)
    for step in steps:
        names = [span.part for span in step.spans]
        assert {part: names.count(part) for part in names} == {
            "attention": len(model.config.layers),
            "feed-forward": len(model.config.layers),
            "experts": moe,
            "head": 1,
        }
        parts = step.by_part()
        assert tuple(parts) == PARTS
        assert min(parts.values()) >= 0
        assert sum(parts.values()) == pytest.approx(step.seconds)
        assert all(step.start <= s.start <= s.start + s.seconds <= step.start + step.seconds + 1e-9 for s in step.spans)
    seconds = model.stats()["seconds"]
    assert seconds == pytest.approx({part: sum(step.by_part()[part] for step in steps) for part in PARTS})


def test_nothing_is_watched_before_it_is_asked_for():
    model = opened("kimi-k3-tiny")
    before = model.decoder
    decoded(model)
    assert model.stats() == {}
    assert model.decoder is before
    model.watch()
    once = model.decoder
    model.watch(lambda step: None)
    assert model.decoder is once  # two who ask do not make it slower


def test_seconds_of_waiting_are_not_those_of_experts():
    class Counters:
        wait = 0.0

    class Slow:
        counters = Counters()

        def __call__(self, x, *others):
            self.counters.wait += 2.0
            return x

    watch = trace.Watch()
    trace._Experts(Slow(), 4, watch)(torch.ones(1, 2), torch.ones(1, 1), torch.ones(1, 1), None, None)
    (span,) = watch.step.spans
    assert (span.part, span.layer, span.wait) == ("experts", 4, 2.0)
    step = Step(
        1, 0.0, 10.0, [Span("attention", 0, 0.0, 1.0), Span("experts", 0, 2.0, 5.0, 2.0), Span("head", None, 8.0, 1.0)]
    )
    assert step.by_part() == {"disk wait": 2.0, "experts": 3.0, "attention": 1.0, "head": 1.0, "other": 3.0}


def test_a_step_that_fails_is_not_told_and_does_not_spoil_the_next():
    model, steps = opened("kimi-k3-tiny"), []
    fails = [True]

    def hook(layer, ids, weights):
        if layer == 3 and fails:
            fails.pop()
            raise NumericsError("no")

    model.watch(steps.append, hook)
    session = Session(model)
    with pytest.raises(NumericsError):
        session.feed(TOKENS)
    assert steps == []
    after = session.logits()
    assert [step.tokens for step in steps] == [12]
    assert len({route.layer for route in steps[0].routes}) == len(steps[0].routes)
    assert torch.equal(after, Session(opened("kimi-k3-tiny")).feed(TOKENS))


# Files

finite = st.floats(0, 1000, allow_nan=False)


@st.composite
def made_up(draw):
    rows, chosen = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    layers = draw(st.lists(st.integers(0, 92), unique=True, max_size=3))

    def matrix(values):
        return draw(st.lists(st.lists(values, min_size=chosen, max_size=chosen), min_size=rows, max_size=rows))

    routes = [Route(layer, matrix(st.integers(0, 895)), matrix(st.floats(0, 1))) for layer in layers]
    spans = draw(
        st.lists(st.builds(Span, st.sampled_from(PARTS), st.none() | st.integers(0, 92), finite, finite, finite))
    )
    return Step(rows, draw(finite), draw(finite), spans, routes)


@given(st.lists(made_up(), max_size=3), st.dictionaries(st.text(max_size=5), st.integers(), max_size=2))
def test_a_trace_comes_back(tmp_path_factory, steps, about):
    path = tmp_path_factory.mktemp("trace") / "routes.jsonl"
    about = {f"x{name}": value for name, value in about.items()}
    with TraceFile(path, about) as file:
        for step in steps:
            file.write(step)
    told, back = read(path)
    assert about.items() <= told.items()
    assert [step.tokens for step in back] == [step.tokens for step in steps]
    for old, new in zip(steps, back, strict=True):
        assert new.start == pytest.approx(old.start - steps[0].start, abs=1e-6)
        assert new.seconds == pytest.approx(old.seconds, abs=1e-6)
        assert [(r.layer, r.ids) for r in new.routes] == [(r.layer, r.ids) for r in old.routes]
        for a, b in zip(old.routes, new.routes, strict=True):
            assert [*map(pytest.approx, a.weights)] == b.weights or torch.allclose(
                torch.tensor(a.weights), torch.tensor(b.weights), atol=1e-5
            )
        assert [(s.part, s.layer) for s in new.spans] == [(s.part, s.layer) for s in old.spans]
        assert all(abs(a.wait - b.wait) < 1e-6 for a, b in zip(old.spans, new.spans, strict=True))
    viewer = json.loads(viewer_file(path).read_text(encoding="utf-8"))["traceEvents"]
    assert len(viewer) == 1 + sum(1 + len(step.spans) for step in steps)


def test_the_files_of_a_model(tmp_path):
    model = opened("kimi-k3-tiny")
    expected = []
    with model.trace(tmp_path / "t") as file:
        model.watch(expected.append)
        decoded(model)
    assert file.steps == 4
    decoded(model)  # after it was closed: nothing more
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t", "t.viewer.json"]
    about, steps = read(tmp_path / "t")
    assert about["model"] == "kimi-k3-tiny"
    assert {int(layer) for layer in about["experts"]} == {r.layer for r in steps[0].routes}
    for layer, experts in about["experts"].items():
        moe = model.config.layers[int(layer)].ffn
        assert (experts["count"], experts["chosen"]) == (moe.experts, moe.chosen)
        assert experts["bytes"] == model._store.slot_bytes(int(layer))
    assert [[r.ids for r in s.routes] for s in steps] == [[r.ids.tolist() for r in s.routes] for s in expected[:4]]
    assert steps[0].start == 0


def test_a_replay_has_as_many_slots_as_the_model_would_have(tmp_path):
    model = opened("kimi-k3-tiny")
    model.trace(tmp_path / "t").close()
    layers = Layers.of(read(tmp_path / "t")[0])
    needs = demand.of_files(model._store, activation=4)
    context = min(placement.CONTEXT, needs.longest or placement.CONTEXT)
    budgets = layers.budgets()
    for ram in (budgets[0], budgets[0] + 12345, *budgets[1:]):
        assert layers.slots(ram) == slots_within(ram, needs, layers.sizes, context)
    for slots in (layers.slots, lambda ram: slots_within(ram, needs, layers.sizes, context)):
        with pytest.raises(UsageError):
            slots(budgets[0] - 1)


def test_a_viewer_finds_parts_within_their_step():
    spans = [Span("attention", 0, 5.0, 1.0), Span("experts", 1, 6.25, 2.0, 0.5), Span("feed-forward", 1, 6.0, 3.0)]
    whole, *parts = events(Step(1, 5.0, 5.0, spans, [Route(1, [[3, 9]], [[0.5, 0.5]])]), number=7, start=4.0)
    assert (whole["name"], whole["ts"], whole["dur"]) == ("token 7", 1e6, 5e6)
    assert [(e["name"], e["ts"], e["dur"]) for e in parts] == [
        *(("attention 0", 1e6, 1e6), ("experts 1", 2.25e6, 2e6), ("feed-forward 1", 2e6, 3e6))
    ]
    assert parts[1]["args"] == {"layer": 1, "disk wait ms": 500.0, "experts": [[3, 9]]}
    for event in (whole, *parts):
        assert (event["ph"], event["pid"], event["tid"]) == ("X", 1, 1)
        assert whole["ts"] <= event["ts"] <= event["ts"] + event["dur"] <= whole["ts"] + whole["dur"]
        assert all(math.isfinite(event[time]) for time in ("ts", "dur"))


def test_a_line_that_was_cut_off_is_left_out_and_damage_is_named(tmp_path):
    path = tmp_path / "t"
    with TraceFile(path, {}) as file:
        for _ in range(2):
            file.write(Step(1, 0.0, 1.0))
    text = path.read_text(encoding="utf-8")
    path.write_text(text[:-5], encoding="utf-8")
    assert len(read(path)[1]) == 1
    path.write_text(text.replace('"tokens"', '"token"'), encoding="utf-8")
    with pytest.raises(UsageError, match="line 2"):
        read(path)
    path.write_text(text.replace('"version": 1', '"version": 2'), encoding="utf-8")
    with pytest.raises(UsageError, match="version 2"):
        read(path)
    for content in ("", "[]\n", "{}\n", "no\n"):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(UsageError, match="line 1"):
            read(path)
    with pytest.raises(UsageError, match="cannot be read"):
        read(tmp_path / "nothing")


def test_where_it_cannot_be_written_it_says_so_and_leaves_nothing(tmp_path, monkeypatch):
    with pytest.raises(StorageError, match="cannot write to"):
        TraceFile(tmp_path / "nowhere" / "t", {})

    def full(*_):
        raise OSError(28, "No space left on device")

    file = TraceFile(tmp_path / "t", {})
    monkeypatch.setattr(trace.os, "fsync", full)
    with pytest.raises(StorageError, match="No space left"):
        file.close()
    assert list(tmp_path.iterdir()) == []
    file.close()  # a second time: nothing


def test_what_an_answer_took_is_counted_without_its_prompt():
    model = deltafin.load("nano")
    talk, steps = model.session(), []
    model.watch(steps.append)
    talk.say("What is 2 + 3?", max_tokens=8)
    said = [step for step in steps if step.tokens == 1]
    assert talk.stats.generated_tokens in (len(said), len(said) + 1)  # the last token is read when something follows
    expected = {part: sum(step.by_part()[part] for step in said) for part in PARTS}
    assert talk.stats.counted["seconds"] == pytest.approx(expected, abs=1e-6)


def test_what_has_grown_since():
    before = {"hits": 3, "wait": 0.5, "direct": True, "layers": {1: {"hits": 3}}}
    now = {"hits": 5, "wait": 2.0, "direct": True, "new": 1, "layers": {1: {"hits": 4}, 2: {"hits": 1}}}
    grown = {"hits": 2, "wait": 1.5, "direct": True, "new": 1, "layers": {1: {"hits": 1}, 2: {"hits": 1}}}
    assert api._since(before, now) == grown
