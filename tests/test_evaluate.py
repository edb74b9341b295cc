"""Evaluation against a few lines over ``model.logits``."""

import copy
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import checkpoints
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import deltafin
from deltafin import evaluate as module
from deltafin.errors import ChatError, NumericsError, TokenizerError, UsageError
from deltafin.evaluate import Document, Score, evaluate, read_documents

TEXT = "Grüße aus Zürich! The fox 🦊 carried a lantern over the hill, and nobody saw it.\n"
CHAT = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Good day."},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "Good night."},
]


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    """A small random model with Nano's vocabulary."""
    c = checkpoints.config(vocab_size=4096)
    folder = checkpoints.write(tmp_path_factory.mktemp("talker") / "model", c, checkpoints.tensors(c))
    for name in ("tiktoken.model", "tokenizer_config.json"):
        shutil.copy(Path(deltafin.__file__).parent / "nano" / name, folder)
    return deltafin.load(folder)


def nats(model, ids) -> list[float]:
    """The definition: -log of the probability of each token but the first, from all before it."""
    p = model.logits(ids).double().softmax(-1)
    return [-math.log(p[i, token]) for i, token in enumerate(ids[1:])]


@pytest.mark.parametrize("piece", [512, 7])
def test_losses_are_those_of_the_logits(talker, monkeypatch, piece):
    monkeypatch.setattr(module, "SLICE", piece)
    ids = talker.tokenizer.encode(TEXT)
    (score,) = evaluate(talker, [Document(TEXT)])
    assert (score.kind, score.documents, score.tokens) == ("text", 1, len(ids) - 1)
    assert score.nats == pytest.approx(sum(nats(talker, ids)), rel=1e-5)
    assert score.loss == pytest.approx(score.nats / (len(ids) - 1))
    assert score.perplexity == pytest.approx(math.exp(score.loss))
    assert score.bytes == len(TEXT.encode()) - len(talker.tokenizer.token_bytes(ids[0]))
    assert score.bits_per_byte == pytest.approx(score.nats / math.log(2) / score.bytes)
    assert score.assistant_tokens == 0
    assert math.isnan(score.assistant_loss)


@given(st.integers(2, 60))
@settings(max_examples=settings.default.max_examples // 3)
def test_a_window_cuts_a_document_into_pieces_read_afresh(talker, window):
    ids = talker.tokenizer.encode(TEXT)
    pieces = [ids[i : i + window] for i in range(0, len(ids), window)]
    (score,) = evaluate(talker, [Document(TEXT)], window)
    assert score.tokens == sum(len(piece) - 1 for piece in pieces)
    assert score.nats == pytest.approx(sum(sum(nats(talker, piece)) for piece in pieces), rel=1e-5)
    assert score.bytes == sum(len(talker.tokenizer.token_bytes(i)) for piece in pieces for i in piece[1:])


END = "<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("window", [None, 11])
def test_what_the_assistant_says_counts_apart(talker, thinking, window):
    chat = [dict(m) for m in CHAT]
    said = [f"Good day.{END}", f"Good night.{END}"]
    if thinking:
        chat[2]["reasoning_content"] = "Morning?"
        marks = "<|close|>think<|sep|><|open|>response<|sep|>"
        said = [f"Morning?{marks}{said[0]}", f"{marks}{said[1]}"]
    ids = talker.chat_format.encode(chat, thinking=thinking, effort=None, generate=False)
    text, spoken, at = talker.tokenizer.decode(ids), set(), 0
    for words in said:
        start = text.index(words, at)
        at = start + len(words)
        spoken |= set(range(start, at))
    starts = [len(talker.tokenizer.decode(ids[:i])) for i in range(len(ids))]
    size = window or len(ids)
    losses = {i + k: x for i in range(0, len(ids), size) for k, x in enumerate(nats(talker, ids[i : i + size]), 1)}
    (score,) = evaluate(talker, [Document(messages=chat, kind="chat")], window)
    assert score.tokens == len(losses)
    assert score.nats == pytest.approx(sum(losses.values()), rel=1e-5)
    chosen = [x for i, x in losses.items() if starts[i] in spoken]
    assert score.assistant_tokens == len(chosen)
    assert score.assistant_nats == pytest.approx(sum(chosen), rel=1e-5)
    assert score.assistant_loss == pytest.approx(sum(chosen) / len(chosen), rel=1e-5)


def test_a_model_that_knows_nothing_has_the_vocabulary_as_its_perplexity(talker):
    blank = copy.copy(talker)
    edges = replace(talker.decoder.edges, head=torch.zeros_like(talker.decoder.edges.head))
    blank.decoder = replace(talker.decoder, edges=edges)
    (score,) = evaluate(blank, [Document(TEXT)])
    assert score.perplexity == pytest.approx(4096)


def test_kinds_are_counted_apart_and_together(talker):
    documents = [Document("One two three", kind="a"), Document("Four five", kind="b"), Document("Six seven", kind="a")]
    a, b, everything = evaluate(talker, documents)
    assert [(s.kind, s.documents) for s in (a, b, everything)] == [("a", 2), ("b", 1), ("all", 3)]
    assert everything.tokens == a.tokens + b.tokens
    assert everything.nats == pytest.approx(a.nats + b.nats)
    assert everything.bytes == a.bytes + b.bytes
    alone = [evaluate(talker, [d])[0] for d in documents]
    assert a.nats == pytest.approx(alone[0].nats + alone[2].nats)


def test_progress_only_grows_and_stays_within_the_total(talker, monkeypatch):
    monkeypatch.setattr(module, "SLICE", 5)
    seen = []
    evaluate(talker, [Document(TEXT), Document(TEXT)], 12, lambda done, total: seen.append((done, total)))
    done = [d for d, _ in seen]
    assert done == sorted(set(done))
    total = 2 * len(talker.tokenizer.encode(TEXT))
    assert {t for _, t in seen} == {total}
    assert total / 2 < done[-1] <= total


def test_nothing_to_predict_is_nothing_but_not_an_error(talker):
    (score,) = evaluate(talker, [Document(""), Document("a")])
    assert (score.documents, score.tokens, score.nats) == (2, 0, 0)
    assert all(math.isnan(x) for x in (score.loss, score.perplexity, score.bits_per_byte, score.assistant_loss))
    assert evaluate(talker, []) == []
    assert Score("hopeless", tokens=1, nats=1e6).perplexity == math.inf


def test_numbers_that_are_none_are_never_added_up(talker):
    broken = copy.copy(talker)
    edges = replace(talker.decoder.edges, norm=torch.full_like(talker.decoder.edges.norm, torch.nan))
    broken.decoder = replace(talker.decoder, edges=edges)
    with pytest.raises(NumericsError):
        evaluate(broken, [Document(TEXT)])


@pytest.mark.parametrize("window", [1, 0, -4])
def test_a_window_that_predicts_nothing_is_refused(talker, window):
    with pytest.raises(UsageError, match=f"window of {window} "):
        evaluate(talker, [Document(TEXT)], window)


def test_text_needs_a_vocabulary_and_messages_a_format(tiny, talker):
    with pytest.raises(TokenizerError, match=r"tiktoken\.model"):
        evaluate(tiny, [Document(TEXT)])
    with pytest.raises(ChatError, match="wizard"):
        evaluate(talker, [Document(messages=[{"role": "wizard", "content": "x"}])])


# Files --------------------------------------------------------------------------------------------------------------


def test_a_text_file_is_one_document(tmp_path):
    (tmp_path / "Märchen.txt").write_bytes(TEXT.encode() + b"second\r\nthird")
    (document,) = read_documents(tmp_path / "Märchen.txt")
    assert document == Document(TEXT + "second\nthird")


def test_a_jsonl_file_is_a_document_a_line(tmp_path):
    rows = [{"text": "one\u2028still one\x85"}, {"messages": CHAT, "kind": "story"}, {"text": "", "kind": "empty"}]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    (tmp_path / "file.jsonl").write_text("\n".join([lines[0], "", "  ", *lines[1:], ""]), encoding="utf-8")
    expected = [Document("one\u2028still one\x85"), Document(messages=CHAT, kind="story"), Document("", kind="empty")]
    assert read_documents(str(tmp_path / "file.jsonl")) == expected
    assert expected[0].kind == "text"


BAD_LINES = {
    "{": "is not JSON",
    "[1]": 'neither "text" nor "messages"',
    '"text"': 'neither "text" nor "messages"',
    '{"text": 5}': 'neither "text" nor "messages"',
    '{"messages": "hello"}': 'neither "text" nor "messages"',
}


@pytest.mark.parametrize(("line", "message"), BAD_LINES.items())
def test_a_bad_line_is_named(tmp_path, line, message):
    (tmp_path / "file.jsonl").write_text(f'{{"text": "fine"}}\n\n{line}\n', encoding="utf-8")
    with pytest.raises(UsageError, match=rf"file\.jsonl, line 3 .*{message}"):
        read_documents(tmp_path / "file.jsonl")


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "latin.txt").write_bytes("Grüße".encode("latin-1"))
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match=r"no file .*nowhere\.txt"):
        read_documents(tmp_path / "nowhere.txt")
    for name in ("latin.txt", "folder"):
        with pytest.raises(UsageError, match=f"{name} cannot be read"):
            read_documents(tmp_path / name)


def test_tools_are_part_of_a_document_and_progress_ends_at_the_end(nano, tmp_path):
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    rows = [{"messages": messages}, {"messages": messages, "tools": tools}]
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    seen = []
    plain, offered = (evaluate(nano, [d], progress=lambda *at: seen.append(at))[0] for d in read_documents(path))
    assert offered.tokens > plain.tokens
    assert offered.assistant_tokens == plain.assistant_tokens
    assert [done for done, total in seen if done == total]
