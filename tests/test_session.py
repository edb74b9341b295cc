"""Sessions: timeline and state never disagree, whatever is done to them."""

import copy
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

import deltafin
import deltafin.session
from deltafin import Sampler, Session
from deltafin.errors import NumericsError, SessionError, UsageError
from deltafin.model import kda, mla
from deltafin.model.decoder import FEW, Decoder
from deltafin.session import CHECKPOINTS
from deltafin.verify import BOUNDS, compare

VOCAB = 50
IDS = np.random.default_rng(2).integers(0, VOCAB, 400).tolist()
ROOT = Path(__file__).parents[1]
NANO = ROOT / "deltafin" / "nano"
FEWER = settings(max_examples=settings.default.max_examples // 3)  # where an example takes a second


@dataclass(frozen=True)
class Variant:
    """A decoder that was changed for a test."""

    decoder: Decoder
    fingerprint: str = "variant"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Four small layers of both kinds: fast enough for properties."""
    c = checkpoints.config(vocab_size=VOCAB)
    return deltafin.load(checkpoints.write(tmp_path_factory.mktemp("small") / "model", c, checkpoints.tensors(c)))


@pytest.fixture(scope="module")
def double(small):
    """The same in float64, where different ways to the same answer agree closely."""
    return Variant(small.in_dtype(torch.float64))


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    """A small random model in float64 with Nano's vocabulary: it says nothing sensible, but quickly."""
    c = checkpoints.config(vocab_size=4096)
    folder = checkpoints.write(tmp_path_factory.mktemp("talker") / "model", c, checkpoints.tensors(c))
    for name in ("tiktoken.model", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(NANO / name, folder)
    return deltafin.load(folder, dtype="float64")


def fed(model, *pieces) -> Session:
    session = Session(model)
    for piece in pieces:
        session.feed(piece)
    return session


def numbers(session: Session) -> tuple[torch.Tensor, ...]:
    """The logits and every tensor of the state."""
    return (session.logits(), *(t for s in session._state for t in s.tensors().values()))


def identical(a: Session, b: Session) -> bool:
    return a.tokens == b.tokens and all(torch.equal(x, y) for x, y in zip(numbers(a), numbers(b), strict=True))


def close(a: Session, b: Session, bound: str = "model float64") -> bool:
    return a.tokens == b.tokens and compare(numbers(a), numbers(b))[1] <= BOUNDS[bound]


def cut(tokens: list[int], sizes: list[int]) -> list[list[int]]:
    ends = np.cumsum(sizes).tolist()
    return [tokens[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def armed(model, op: str, trouble: Callable[[Any, tuple], Any]) -> tuple[Variant, list]:
    """Let the last layer that uses an operation call ``trouble(result, arguments)`` once for each item of a list."""
    kind = {"delta_net": "KDA", "attention": "MLA"}.get(op)
    blocks, pending = list(model.decoder.blocks), []
    at = max(i for i, b in enumerate(blocks) if kind in (None, type(b.layer.mixer).__name__))
    original = getattr(blocks[at].ops, op)

    def troubled(*arguments):
        result = original(*arguments)
        return trouble(result, arguments) if pending and (pending.pop() or True) else result

    blocks[at] = replace(blocks[at], ops=replace(blocks[at].ops, whole={}, **{op: troubled}))
    return Variant(replace(model.decoder, blocks=tuple(blocks))), pending


def take(iterator, said: list, at: int, pending: list) -> None:
    """Append what comes to ``said``; make the next call fail once there are ``at``."""
    for item in iterator:
        said.append(item)
        if len(said) == at:
            pending.append("now")


# Feeding ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 90), min_size=1, max_size=5))
def test_any_split_is_the_whole(double, sizes):
    pieces = cut(IDS * 2, sizes)
    assert close(fed(double, *pieces), fed(double, [token for piece in pieces for token in piece]))


@pytest.mark.parametrize(
    ("name", "size"), [*(("small", n) for n in (1, 7, 64, 65, 199)), ("linear", 9), ("linear", 65)]
)
def test_a_prompt_in_chunks_is_the_whole(name, size, request):
    model = Variant(request.getfixturevalue(name).in_dtype(torch.float64))
    chunks = [IDS[i : min(i + size, 200)] for i in range(0, 200, size)]
    assert close(fed(model, *chunks), fed(model, IDS[:200]))


def test_a_split_in_float32_stays_within_its_bound(tiny):
    assert close(fed(tiny, IDS[:30], IDS[30:33], IDS[33:70]), fed(tiny, IDS[:70]), "model float32")


@given(st.integers(0, 20), st.lists(st.integers(1, FEW), min_size=1, max_size=4))
@FEWER
def test_a_few_tokens_at_once_are_the_same_bits_as_one_by_one(small, before, sizes):
    start, rest = IDS[:before], IDS[before : before + sum(sizes)]
    at_once = fed(small, *[start] * bool(start), *cut(rest, sizes))
    assert identical(at_once, fed(small, *[start] * bool(start), *([t] for t in rest)))


def test_caches_grow_without_forgetting(double):
    assert close(fed(double, IDS[:250], IDS[250:257], IDS[257:300], IDS[300:]), fed(double, IDS))


def test_a_long_prompt_is_read_in_pieces_that_do_not_show(double, monkeypatch):
    whole = fed(double, IDS[:150])
    monkeypatch.setattr(deltafin.session, "PIECE", 64)
    assert close(fed(double, IDS[:150]), whole)


def test_sessions_in_turn_equal_sessions_alone(small):
    lengths = (3, 17, 64)
    texts = [IDS[n : 2 * n] for n in lengths]
    chunks = [[text[i : i + 16] for i in range(0, len(text), 16)] for text in texts]
    together = [Session(small) for _ in texts]
    for turn in range(4):
        for session, pieces in zip(together, chunks, strict=True):
            if turn < len(pieces):
                session.feed(pieces[turn])
    assert all(identical(s, fed(small, *pieces)) for s, pieces in zip(together, chunks, strict=True))


def test_generations_in_turn_equal_generations_alone(small):
    alone = [list(fed(small, IDS[n : n + 9]).generate(Sampler(0.9, seed=n), 12)) for n in (0, 9)]
    a, b = (fed(small, IDS[n : n + 9]).generate(Sampler(0.9, seed=n), 12) for n in (0, 9))
    in_turn = list(zip(a, b, strict=True))
    assert [list(x) for x in zip(*in_turn, strict=True)] == alone


def test_every_layer_counts_the_same_tokens(tiny):
    session = Session(tiny)
    for piece in ([5], [1, 2, 3], IDS[:20]):
        session.feed(piece)
        assert {s.length for s in session._state} == {len(session.tokens)}
    for _ in session.generate(Sampler(), 3):
        assert {s.length for s in session._state} == {len(session.tokens) - 1}
    session.sync(IDS[:7])
    assert {s.length for s in session._state} == {7}
    assert {s.length for s in session.fork()._state} == {7}


def test_an_empty_session_has_no_logits(small):
    for ask in (
        Session(small).logits,
        lambda: Session(small).feed([]),
        lambda: list(Session(small).generate(Sampler(), 1)),
    ):
        with pytest.raises(UsageError, match="at least one token"):
            ask()


@pytest.mark.parametrize("token", [-1, VOCAB, 10**20])
def test_ids_outside_the_vocabulary_are_refused_before_anything_is_read(small, token):
    session = fed(small, IDS[:5])
    with pytest.raises(UsageError, match=f"{token} is not in the vocabulary of {VOCAB}"):
        session.feed([1, token])
    assert identical(session, fed(small, IDS[:5]))


# Going back ---------------------------------------------------------------------------------------------------------

EDITS = st.lists(
    st.tuples(
        st.sampled_from(["feed", "sync", "sync", "generate"]),
        st.integers(0, 60),
        st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12),
    ),
    max_size=6,
)
"""What can happen to a session; the number says how much is kept of it, or how much it says."""


def edit(session: Session, kind: str, number: int, new: list[int]) -> None:
    if kind == "feed":
        session.feed(new)
    elif kind == "sync":
        session.sync(session.tokens[:number] + new)
    elif session.tokens:
        list(session.generate(Sampler(0.7, seed=number), number % 7))


@given(EDITS)
def test_after_any_edits_a_session_is_what_a_fresh_one_would_be(double, edits):
    session = fed(double, IDS[:10])
    for kind, number, new in edits:
        before, read = list(session.tokens), session.tokens_read
        wanted = before[:number] + new
        reusable = session.reusable(wanted)
        edit(session, kind, number, new)
        if kind == "sync":
            same = next((i for i, (a, b) in enumerate(zip(before, wanted, strict=False)) if a != b), None)
            assert reusable <= (min(len(before), len(wanted)) if same is None else same)
            assert session.tokens == wanted
            assert session.tokens_read - read == len(wanted) - reusable
        assert len(session._checkpoints) <= CHECKPOINTS
    assert close(session, fed(double, session.tokens))


@given(EDITS, EDITS)
@FEWER
def test_forks_do_not_disturb_each_other(small, edits, others):
    def start():
        return fed(small, IDS[:10], IDS[10:12])

    origin = start()
    origin.checkpoint()
    twin = origin.fork()
    for mine, other in zip(edits + [None] * len(others), others + [None] * len(edits), strict=True):
        for session, change in ((origin, mine), (twin, other)):
            if change:
                edit(session, *change)
    for session, changes in ((origin, edits), (twin, others)):
        alone = start()
        alone.checkpoint()
        for change in changes:
            edit(alone, *change)
        assert identical(session, alone)


def test_a_checkpoint_belongs_to_one_fork_alone(small):
    origin = fed(small, IDS[:10])
    twin = origin.fork()
    twin.feed(IDS[20:25])
    twin.checkpoint()
    origin.feed(IDS[10:20])
    origin.sync([*IDS[:17], 1])  # the twin's checkpoint after 15 tokens is about other tokens
    assert close(origin, fed(small, [*IDS[:17], 1]), "model float32")


def test_extending_reads_only_what_is_new_and_asking_again_reads_nothing(small):
    session = Session(small)
    first = session.sync(IDS[:10]).clone()
    assert session.tokens_read == 10
    assert torch.equal(session.sync(IDS[:10]), first)
    assert session.tokens_read == 10
    session.sync(IDS[:13])
    assert session.tokens_read == 13
    assert torch.equal(session.sync(IDS[:10]), first)  # short as it is, it was worth a checkpoint
    assert session.tokens_read == 13
    session.sync(IDS[:14])
    assert session.tokens_read == 17


def test_going_back_ends_at_the_latest_checkpoint_that_is_still_true(small):
    session = fed(small, IDS[:20])
    session.checkpoint()
    session.feed(IDS[20:40])
    session.checkpoint()
    session.feed(IDS[40:60])
    read = session.tokens_read
    session.sync([*IDS[:30], 7])  # between the checkpoints
    assert session.tokens_read - read == 11
    session.sync([*IDS[:20], 8])  # exactly at the first
    assert session.tokens_read - read == 12
    session.sync([*IDS[:19], 9])  # before it
    assert session.tokens_read - read == 32
    assert identical(session, fed(small, [*IDS[:19], 9]))


def test_a_shorter_timeline_is_not_the_longer_one_renamed(double):
    session = fed(double, IDS[:40])
    session.sync(IDS[:25])
    assert session.tokens == IDS[:25]
    assert close(session, fed(double, IDS[:25]))
    assert compare(numbers(session)[:1], numbers(fed(double, IDS[:40]))[:1])[1] > 1e-3


def test_going_back_again_and_again_stays_exact(double):
    drafting, honest = fed(double, IDS[:10]), fed(double, IDS[:10])
    drafting.checkpoint()
    for i in range(10, 60):
        drafting.feed([IDS[i]] if i % 3 else [IDS[i], (IDS[i] + 1) % VOCAB])
        drafting.sync(IDS[: i + 1])
        honest.feed([IDS[i]])
    assert close(drafting, honest)


# Exceptions ---------------------------------------------------------------------------------------------------------


def interrupt(result, arguments):
    raise KeyboardInterrupt


@pytest.mark.parametrize("op", ["linears", "delta_net", "attention", "experts", "rms_norm"])
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("new", [1, 5, 30])
def test_an_interrupted_token_leaves_a_session_that_is_whole(small, op, kept, new):
    model, pending = armed(small, op, interrupt)
    session = fed(model, IDS[:20])
    if kept:
        session.checkpoint()
    session.feed(IDS[20:22])
    pending.append("now")
    with pytest.raises(KeyboardInterrupt):
        session.feed(IDS[22 : 22 + new])
    assert session.tokens == IDS[: 22 + new]
    read = session.tokens_read
    assert close(session, fed(small, IDS[: 22 + new]), "model float32")
    assert session.tokens_read - read == (2 if kept else 22) + new


def test_an_interrupted_generation_goes_on_where_it_was(small):
    uninterrupted = list(fed(small, IDS[:20]).generate(Sampler(), 8))
    model, pending = armed(small, "attention", interrupt)
    session, said = fed(model, IDS[:20]), []
    with pytest.raises(KeyboardInterrupt):
        take(session.generate(Sampler(), 8), said, 4, pending)
    assert session.tokens == IDS[:20] + said
    assert said + list(session.generate(Sampler(), 4)) == uninterrupted


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("layer", [0, 2], ids=["KDA", "MLA"])
def test_a_damaged_checkpoint_is_refused_and_dropped(small, bad, layer):
    session = fed(small, IDS[:10])
    session.checkpoint()
    session.feed(IDS[10:20])
    next(iter(reversed(session._checkpoints[0].state[layer].tensors().values()))).view(-1)[3] = bad
    with pytest.raises(SessionError, match=f"layer {layer} .* not a number"):
        session.sync([*IDS[:12], 1])
    session.sync([*IDS[:12], 1])
    assert identical(session, fed(small, [*IDS[:12], 1]))


def test_a_damaged_checkpoint_does_not_hide_behind_an_interruption(small):
    model, pending = armed(small, "attention", interrupt)
    session = fed(model, IDS[:10])
    session.checkpoint()
    session._checkpoints[0].state[0].S_BHVK.fill_(torch.nan)
    pending.append("now")
    with pytest.raises(SessionError):
        session.feed(IDS[10:20])
    assert identical(session, fed(small, IDS[:20]))


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_a_damaged_state_is_neither_kept_nor_saved(small, tmp_path, bad):
    session = fed(small, IDS[:10])
    session._state[1].S_BHVK[0, 1, 2, 3] = bad
    with pytest.raises(SessionError, match="layer 1 S_BHVK"):
        session.checkpoint()
    with pytest.raises(SessionError, match="layer 1 S_BHVK"):
        session.save(tmp_path / "session")
    assert session._checkpoints == []
    assert list(tmp_path.iterdir()) == []


def spoil_result(result, arguments):
    return torch.full_like(result, torch.nan)


def spoil_state(result, arguments):
    arguments[7].S_BHVK.view(-1)[0] = torch.nan
    return result.fill_(torch.nan)


@pytest.mark.parametrize(("op", "trouble"), [("attention", spoil_result), ("delta_net", spoil_state)])
def test_logits_that_are_not_numbers_are_never_sampled_and_leave_nothing_behind(small, op, trouble):
    expected = list(fed(small, IDS[:10]).generate(Sampler(), 6))
    model, pending = armed(small, op, trouble)
    session, said = fed(model, IDS[:10]), []
    with pytest.raises(NumericsError, match="not a number"):
        take(session.generate(Sampler(), 6), said, 3, pending)
    assert said == expected[:3]
    assert session.tokens == IDS[:10] + said
    assert [c.length for c in session._checkpoints] == [10]
    assert said + list(session.generate(Sampler(), 3)) == expected


def test_a_prompt_whose_logits_are_not_numbers_raises_each_time(small):
    model, pending = armed(small, "attention", spoil_result)
    pending += ["once", "twice", "three times"]
    session = Session(model)
    for ask in (lambda: session.feed(IDS[:10]), session.logits, lambda: list(session.generate(Sampler(1.0), 5))):
        with pytest.raises(NumericsError):
            ask()
        assert session.tokens == IDS[:10]
        assert session._checkpoints == []
    assert identical(session, fed(small, IDS[:10]))


# Generating ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0, 1, 5])
def test_a_limit_is_kept_and_the_state_is_that_of_the_reference_run(small, limit):
    session = fed(small, IDS[:10])
    said = list(session.generate(Sampler(), limit))
    assert len(said) == limit
    assert session.tokens == IDS[:10] + said
    assert session.tokens_read == 10 + max(0, limit - 1)  # what follows the last was not asked for
    reference = fed(small, IDS[:10], *([t] for t in said))
    assert identical(session, reference)
    session.feed(IDS[30:33])
    reference.feed(IDS[30:33])
    assert identical(session, reference)


def test_generation_in_parts_is_generation_in_one(small):
    whole = list(fed(small, IDS[:10]).generate(Sampler(), 9))
    session = fed(small, IDS[:10])
    assert [t for n in (5, 1, 3) for t in session.generate(Sampler(), n)] == whole


def test_a_stop_token_is_the_last_and_is_part_of_the_timeline(small):
    said = list(fed(small, IDS[:10]).generate(Sampler(0.9, seed=3), 30))
    stop = said[len(said) // 2]
    expected = said[: said.index(stop) + 1]
    session = fed(small, IDS[:10])
    assert list(session.generate(Sampler(0.9, seed=3), 30, stop={stop, -5})) == expected
    assert session.tokens == IDS[:10] + expected
    assert identical(session, fed(small, IDS[:10], *([t] for t in expected)))


@pytest.mark.parametrize("taken", [1, 3])
def test_closing_early_leaves_what_was_said(small, taken):
    session = fed(small, IDS[:10])
    generation = session.generate(Sampler(), 20)
    said = [next(generation) for _ in range(taken)]
    generation.close()
    assert session.tokens == IDS[:10] + said
    assert identical(session, fed(small, IDS[:10], *([t] for t in said)))


def test_a_seed_says_the_same_again_and_another_something_else(small):
    def say(seed):
        return list(fed(small, IDS[:5]).generate(Sampler(1.5, seed=seed), 20))

    assert say(1) == say(1)
    assert say(1) != say(2)
    assert say(None) != say(None)


def test_a_limit_below_zero_is_refused(small):
    with pytest.raises(UsageError, match="-1"):
        next(fed(small, IDS[:5]).generate(Sampler(), -1))


# Saving -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("saved") / "talk.session"


@given(st.integers(0, 40), st.integers(0, 3), st.integers(1, 12))
@FEWER
def test_saving_and_loading_is_going_on(small, file, before, said, after):
    session = Session(small)
    if before:
        session.feed(IDS[:before])
        list(session.generate(Sampler(), said))
    session.save(file)
    restored = Session.load(small, file)
    assert restored.tokens == session.tokens
    for going_on in (session, restored):
        going_on.feed(IDS[50 : 50 + after])
    assert identical(restored, session)
    assert list(restored.generate(Sampler(), 3)) == list(session.generate(Sampler(), 3))


@pytest.mark.parametrize("name", ["tiny", "linear"])
def test_a_file_holds_every_part_of_the_state(name, request, tmp_path):
    model = request.getfixturevalue(name)
    session = fed(model, IDS[:9])
    session.save(tmp_path / "session")
    expected = {"tokens", "logits"}
    for i, state in enumerate(session._state):
        names = {kda.State: ("q_tail", "k_tail", "v_tail", "S_BHVK"), mla.State: ("latent_BSR", "shared_BSJ")}
        expected |= {f"layers.{i}.{part}" for part in names[type(state)]}
    with safe_open(tmp_path / "session", "pt") as saved:
        assert set(saved.keys()) == expected
    restored = Session.load(model, tmp_path / "session")
    session.feed([1])
    restored.feed([1])
    assert identical(restored, session)


def test_saving_disturbs_nothing_and_a_restored_session_can_go_back(small, tmp_path):
    session = fed(small, IDS[:10])
    session.checkpoint()
    session.feed(IDS[10:20])
    session.save(tmp_path / "session")
    restored = Session.load(small, tmp_path / "session")
    for each in (session, restored):
        each.sync([*IDS[:15], 3])
        assert close(each, fed(small, [*IDS[:15], 3]), "model float32")


def test_another_model_is_refused(small, tiny, linear, tmp_path):
    other_dtype = deltafin.load(small.path, dtype="float64")
    fed(small, IDS[:5]).save(tmp_path / "session")
    fed(tiny, IDS[:5]).save(tmp_path / "tiny")
    for model, name in ((tiny, "session"), (other_dtype, "session"), (linear, "tiny"), (small, "tiny")):
        with pytest.raises(SessionError, match=f"{name} was saved with another model"):
            Session.load(model, tmp_path / name)
    again = deltafin.load(small.path)  # the same files are the same model
    assert Session.load(again, tmp_path / "session").tokens == IDS[:5]


@given(st.data())
@FEWER
def test_a_cut_file_is_refused(small, file, data):
    fed(small, IDS[:10]).save(file)
    content = file.read_bytes()
    file.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(SessionError, match=r"talk\.session"):
        Session.load(small, file)


def test_what_is_not_a_session_is_refused(small, tmp_path):
    save_file({"weights": torch.zeros(3)}, tmp_path / "weights")
    save_file({"weights": torch.zeros(3)}, tmp_path / "about", {"deltafin": "not json"})
    (tmp_path / "text").write_text("Dear diary", encoding="utf-8")
    (tmp_path / "folder").mkdir()
    for name in ("weights", "about", "text", "folder"):
        with pytest.raises(SessionError, match=f"{name} is .*not a saved session"):
            Session.load(small, tmp_path / name)
    with pytest.raises(SessionError, match=r"there is no session at .*nowhere"):
        Session.load(small, tmp_path / "nowhere")


def damage(path: Path, change: Callable[[dict, dict], object]) -> None:
    """Rewrite a session's file after ``change(tensors, about)``."""
    with safe_open(path, "pt") as saved:
        about = json.loads(saved.metadata()["deltafin"])
        tensors = {name: saved.get_tensor(name).clone() for name in saved.keys()}  # noqa: SIM118 - not a dict
    change(tensors, about)
    save_file(tensors, path, {"deltafin": json.dumps(about)})


@pytest.mark.parametrize("name", ["layers.0.S_BHVK", "layers.1.k_tail", "layers.2.latent_BSR", "logits"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_saved_value_that_is_not_a_number_is_refused(small, tmp_path, name, bad):
    fed(small, IDS[:10]).save(tmp_path / "session")
    damage(tmp_path / "session", lambda tensors, about: tensors[name].view(-1)[1:2].fill_(bad))
    with pytest.raises(SessionError, match="session"):
        Session.load(small, tmp_path / "session")


DAMAGES = {
    "a tensor is missing": lambda t, a: t.pop("layers.0.v_tail"),
    "tokens are missing": lambda t, a: t.pop("tokens"),
    "logits are missing": lambda t, a: t.pop("logits"),
    "logits of another vocabulary": lambda t, a: t.update(logits=torch.zeros(7)),
    "a state of another shape": lambda t, a: t.update({"layers.0.S_BHVK": torch.zeros(1, 2, 3, 4)}),
    "a cache of another length": lambda t, a: t.update({"layers.2.shared_BSJ": torch.zeros(1, 9, 6)}),
    "more read than there is": lambda t, a: a.update(read=11),
    "less than nothing read": lambda t, a: a.update(read=-1),
    "no count of what is read": lambda t, a: a.pop("read"),
    "a newer format": lambda t, a: a.update(format=2),
}


@pytest.mark.parametrize("change", DAMAGES.values(), ids=DAMAGES)
def test_a_file_that_contradicts_itself_is_refused(small, tmp_path, change):
    fed(small, IDS[:10]).save(tmp_path / "session")
    damage(tmp_path / "session", lambda tensors, about: None)
    assert Session.load(small, tmp_path / "session").tokens == IDS[:10]
    damage(tmp_path / "session", change)
    with pytest.raises(SessionError, match="session"):
        Session.load(small, tmp_path / "session")


def test_a_place_that_cannot_be_written_is_an_error_that_names_it(small, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    session = fed(small, IDS[:3])
    for place, named in (("nowhere/session", "nowhere"), ("file/session", "file"), ("folder", "folder")):
        with pytest.raises(SessionError, match=named):
            session.save(tmp_path / place)
    with pytest.raises(SessionError):
        session.save(tmp_path / ("x" * 300))
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["file", "folder"]


@pytest.mark.parametrize("trouble", [OSError("no space left"), KeyboardInterrupt()], ids=["full", "interrupted"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(small, tmp_path, monkeypatch, trouble):
    def fail(tensors, path, metadata):
        Path(path).write_bytes(b"half a fi")
        raise trouble

    session = fed(small, IDS[:5])
    session.save(tmp_path / "old")
    session.feed(IDS[5:9])
    monkeypatch.setattr(deltafin.session, "save_file", fail)
    for name in ("old", "new"):
        with pytest.raises(SessionError if isinstance(trouble, OSError) else KeyboardInterrupt):
            session.save(tmp_path / name)
    assert [p.name for p in tmp_path.iterdir()] == ["old"]
    assert Session.load(small, tmp_path / "old").tokens == IDS[:5]


ODD_NAMES = ["two words", "Grüße à l'été", "会話 記録", "🦊🏮", "q\"uo'te", "%s {} \\n", "n" * 200, "語" * 60, "-x"]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_any_name_will_do_for_a_file(small, tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    session = fed(small, IDS[:5])
    session.save(folder / name)
    session.save(str(folder / name))  # over the old one
    assert [p.name for p in folder.iterdir()] == [name]
    assert identical(Session.load(small, folder / name), session)


ELSEWHERE = """
import sys
import deltafin
model = deltafin.load(sys.argv[1], threads=1, backend="reference")
talk = model.session("Sei höflich, 小狐狸 🦊")
assert talk.say("Grüße aus Zürich", max_tokens=2) is not None
talk.save(sys.argv[2])
again = model.resume(sys.argv[2])
assert again.messages == talk.messages and again.messages[1]["content"] == "Gr\\u00fc\\u00dfe aus Z\\u00fcrich"
assert again.tokens == talk.tokens
print(ascii(model.tokenizer.decode(model.tokenizer.encode("\\u72d0 \\U0001f98a"))), sys.getfilesystemencoding())
"""


def test_text_and_names_survive_a_locale_that_knows_only_ascii(talker, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(ELSEWHERE, encoding="utf-8")
    environment = {"PATH": os.environ["PATH"], "LC_ALL": "C", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-X", "utf8=0", script, talker.path, tmp_path / "Gespräch"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [r"'\u72d0", r"\U0001f98a'", "ascii"]
    assert (tmp_path / "Gespräch").exists()


# Conversations ------------------------------------------------------------------------------------------------------

SYSTEM = {"role": "system", "content": "Be kind."}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def prompt_of(talk, messages, generate=True) -> list[int]:
    return talk.model.chat_format.encode(messages, thinking=False, generate=generate)


def test_each_turn_reads_only_what_is_new(nano):
    talk, length = nano.session("You are Nano.", thinking=False), 0
    for text in ("Hello!", "What is 2 + 3?", "Tell me a story."):
        read = talk.tokens_read
        talk.say(text, max_tokens=12)
        prompt = prompt_of(talk, talk.messages[:-1])
        assert talk.stats.prompt_tokens == len(prompt)
        assert talk.stats.reused_tokens >= length
        assert talk.tokens_read - read <= len(prompt) - length + talk.stats.generated_tokens
        length = len(prompt)
    assert close(talk, fed(nano, talk.tokens), "model float32")


def test_editing_the_last_message_goes_back_to_just_before_it(talker):
    talk = talker.session("Be kind.", thinking=False)
    for text in ("One.", "Two, and a good deal more than two."):
        talk.say(text, max_tokens=4)
    for back in (2, 4):  # the last message, then the one before: its checkpoint is kept as well
        del talk.messages[-back:]
        before = prompt_of(talk, talk.messages, generate=False)
        talk.say("Two, or perhaps three.", max_tokens=4)
        assert talk.stats.reused_tokens == len(before)
        fresh = talker.session(thinking=False)
        fresh.messages = talk.messages[:-1]
        list(fresh.chat(None, max_tokens=4))
        assert close(talk, fresh)


@pytest.mark.parametrize("system", [None, "Be kind."])
def test_asking_again_reads_nothing_again(talker, system):
    talk = talker.session(system, thinking=False)
    first = talk.say("Hi", max_tokens=5)
    for _ in range(2):
        talk.messages.pop()
        read = talk.tokens_read
        again = "".join(talk.chat(None, max_tokens=5))
        assert again == first
        assert talk.stats.reused_tokens == talk.stats.prompt_tokens
        assert talk.tokens_read - read <= 5
    assert [m["role"] for m in talk.messages[-2:]] == ["user", "assistant"]


TALKS = st.lists(st.tuples(st.integers(0, 6), st.sampled_from(["a", "b c", "Ärger", "42 <|close|>"])), max_size=4)


@given(TALKS)
@FEWER
def test_after_any_changes_to_the_messages_the_reply_is_that_of_a_fresh_conversation(talker, turns):
    talk = talker.session("Be kind.", thinking=False)
    for kept, text in [(9, "first"), *turns]:
        talk.messages = talk.messages[:kept]
        talk.say(text, max_tokens=3)
    fresh = talker.session(thinking=False)
    fresh.messages = [dict(m) for m in talk.messages[:-1]]
    list(fresh.chat(None, max_tokens=3))
    assert fresh.messages == talk.messages
    assert close(talk, fresh)


def test_a_reply_that_is_closed_early_is_kept_and_goes_on(talker):
    talk = talker.session("Be kind.", thinking=False)
    pieces = talk.chat("Hello", max_tokens=50)
    said = "".join(next(pieces) for _ in range(3))
    pieces.close()
    assert talk.messages == [SYSTEM, user("Hello"), {"role": "assistant", "content": said}]
    talk.say("Go on", max_tokens=3)
    assert close(talk, fed(talker, talk.tokens))


def test_an_interrupted_reply_is_kept_and_goes_on(talker):
    model, pending = armed(talker, "attention", interrupt)
    changed = copy.copy(talker)
    changed.decoder = model.decoder
    talk = changed.session("Be kind.", thinking=False)
    whole = talker.session("Be kind.", thinking=False).say("Hello", max_tokens=6)
    said = []
    with pytest.raises(KeyboardInterrupt):
        take(talk.chat("Hello", max_tokens=6), said, 1, pending)
    assert whole.startswith("".join(said))
    assert said
    assert talk.messages[-1] == {"role": "assistant", "content": "".join(said)}
    talk.messages.pop()
    assert "".join(talk.chat(None, max_tokens=6)) == whole


def test_forgetting_leaves_the_system_prompt_alone(talker, tmp_path):
    talk = talker.session("Be kind.", thinking=False)
    talk.say("My password is swordfish", max_tokens=3)
    talk.reset()
    assert talk.messages == [SYSTEM]
    talk.save(tmp_path / "talk")
    kept = Session.load(talker, tmp_path / "talk").tokens
    assert kept == prompt_of(talk, [SYSTEM], generate=False)
    read = talk.tokens_read
    talk.say("Hi", max_tokens=1)
    assert talk.tokens_read - read == talk.stats.prompt_tokens - len(kept)
    other = talker.session(thinking=False)
    other.say("Hi", max_tokens=1)
    other.reset()
    assert (other.messages, other.tokens) == ([], [])


def test_a_fork_of_a_conversation_is_another_conversation(talker):
    talk = talker.session("Be kind.", thinking=False)
    talk.say("One", max_tokens=3)
    twin, messages, tokens = talk.fork(), [dict(m) for m in talk.messages], list(talk.tokens)
    twin.say("Two", max_tokens=3)
    assert (talk.messages, talk.tokens) == (messages, tokens)
    talk.say("Two", max_tokens=3)
    assert talk.messages == twin.messages
    assert identical(talk, twin)


def test_a_conversation_is_saved_with_everything_it_needs(talker, tmp_path):
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    talk = talker.session("Be kind.", tools=tools, thinking=True, effort="low")
    talk.say("Grüße 🦊", max_tokens=4)
    talk.save(tmp_path / "talk")
    again = talker.resume(tmp_path / "talk")
    assert again.messages == talk.messages
    assert (again.options, again.thinking) == ({"tools": tools, "effort": "low"}, True)
    for each in (talk, again):
        each.say("And?", max_tokens=4)
    assert again.messages == talk.messages
    assert identical(again, talk)


def test_a_plain_session_can_be_resumed_as_a_conversation(talker, tmp_path):
    fed(talker, IDS[:5]).save(tmp_path / "session")
    talk = talker.resume(tmp_path / "session")
    assert (talk.messages, talk.tokens) == ([], IDS[:5])
    assert talk.say("Hi", max_tokens=2) is not None
