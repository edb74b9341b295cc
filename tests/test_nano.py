"""The embedded model as a regression test: its reference logits, its losses, and what it answers.

Everything expected was made by the code that trained it, never by deltafin.
"""

import json
from pathlib import Path

import nano_scores
import pytest
import torch
from safetensors.torch import load_file

from deltafin import Sampler, Session
from deltafin.evaluate import Document, evaluate, read_documents
from deltafin.sampling import check_finite

DATA = Path(__file__).parent / "data" / "nano"
REFERENCE = json.loads((DATA / "reference.json").read_text(encoding="utf-8"))
EXPECTED = json.loads((DATA / "expected.json").read_text(encoding="utf-8"))
HELD_OUT = read_documents(DATA / "heldout.jsonl")
PROMPTS = [json.loads(line) for line in (DATA / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def reference():
    return load_file(DATA / "reference.safetensors")


@pytest.mark.parametrize("name", REFERENCE)
def test_reference_logits_are_met(nano, reference, name):
    ids = reference[f"{name}.input_ids"].tolist()
    assert (nano.logits(ids) - reference[f"{name}.prefill_logits"]).abs().max() < 1e-3
    session, greedy = Session(nano), reference[f"{name}.greedy_ids"].tolist()
    session.feed(ids)
    for token, wanted in zip(greedy, reference[f"{name}.decode_logits"], strict=False):
        assert (session.feed([token]) - wanted).abs().max() < 1e-3


@pytest.mark.parametrize("name", REFERENCE)
def test_reference_texts_are_met_from_the_words_of_the_prompt(nano, reference, name):
    about, greedy = REFERENCE[name], reference[f"{name}.greedy_ids"].tolist()
    if about["thinking"] is None:
        ids = nano.tokenizer.encode(about["prompt"])
    else:
        ids = nano.chat_format.encode(about["prompt"], thinking=about["thinking"], effort=None)
    assert ids == reference[f"{name}.input_ids"].tolist()
    session = Session(nano)
    session.feed(ids)
    said = list(session.generate(Sampler(), len(greedy)))
    assert said == greedy
    assert nano.tokenizer.decode(said) == about["greedy_text"]


@pytest.mark.parametrize("row", EXPECTED["sample"], ids=lambda row: f"line {row['line']}")
def test_held_out_losses_are_met(nano, row):
    document = HELD_OUT[row["line"] - 1]
    if "characters" in row:
        document = Document(document.text[: row["characters"]], kind=document.kind)
    (score,) = evaluate(nano, [document])
    assert score.tokens == row["tokens"]
    assert score.loss == pytest.approx(row["nats"] / row["tokens"], abs=0.002)
    if document.messages:
        assert score.assistant_tokens == row["assistant_tokens"]
        assert score.assistant_loss == pytest.approx(row["assistant_nats"] / row["assistant_tokens"], abs=0.002)


@pytest.mark.parametrize("row", EXPECTED["replies"], ids=lambda row: f"line {row['line']}")
def test_graded_prompts_are_answered_word_for_word(nano, row):
    prompt = PROMPTS[row["line"] - 1]
    assert prompt["task"] == row["task"]
    assert nano.generate(prompt["messages"], thinking=False, max_tokens=64) == row["reply"]


def test_the_grader_counts_whole_words_in_any_case():
    assert nano_scores.right("The answer is 167.", "167")
    assert nano_scores.right("It is a Fox!", "wolf|fox")
    assert not nano_scores.right("The answer is 1670.", "167")
    assert not nano_scores.right("foxes", "fox|wolf")


def test_the_grader_asks_the_model(nano):
    rows = nano_scores.prompts(["passkey"], 1)["passkey-500"]
    assert list(nano_scores.grade(nano, rows)) == [True]
    assert list(nano_scores.grade(nano, [rows[0] | {"answer": "1"}])) == [False]
    assert {task: len(rows) for task, rows in nano_scores.prompts(["math", "passkey"], 3).items()} == {
        task: 3 for task in ("math", "math-thinking", *(f"passkey-{n}" for n in (500, 2000, 5000, 10000)))
    }


# The whole files: some minutes each -----------------------------------------------------------------------------------

PUBLISHED_LOSSES = {"book": (3.098, None), "story_qa": (3.009, 0.856), "barista": (3.211, 0.716)}
PUBLISHED_SCORES = {"math": 98.0, "passkey-500": 100, "passkey-2000": 100, "passkey-5000": 100, "passkey-10000": 100}


@pytest.mark.slow
@pytest.mark.parametrize("kind", PUBLISHED_LOSSES)
def test_published_losses_are_met(nano, kind):
    documents = [d for d in HELD_OUT if d.kind == kind]
    loss, assistant_loss = PUBLISHED_LOSSES[kind]
    (score,) = evaluate(nano, documents, window=1024)
    assert score.loss == pytest.approx(loss, abs=0.02)
    if assistant_loss is not None:
        assert score.assistant_loss == pytest.approx(assistant_loss, abs=0.02)
        return
    nats = []  # as published: with an end after each book, and without short rests
    for document in documents:
        ids = [*nano.tokenizer.encode(document.text), nano.tokenizer.special["[EOS]"]]
        for piece in (ids[i : i + 1024] for i in range(0, len(ids), 1024)):
            if len(piece) > 32:
                logits, targets = nano.logits(piece[:-1]), torch.tensor(piece[1:])
                nats.append(torch.nn.functional.cross_entropy(logits.double(), targets, reduction="none"))
    check_finite(torch.cat(nats))
    assert torch.cat(nats).mean().item() == pytest.approx(loss, abs=0.002)


@pytest.mark.slow
@pytest.mark.parametrize("task", PUBLISHED_SCORES)
def test_published_scores_are_met(nano, task):
    rows = nano_scores.prompts([task])[task]
    percent = 100 * sum(nano_scores.grade(nano, rows)) / len(rows)
    assert percent == pytest.approx(PUBLISHED_SCORES[task], abs=3)
