"""How well a model predicts given text: loss, perplexity, bits per byte."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from deltafin.api import Model
from deltafin.errors import UsageError
from deltafin.model.decoder import SLICE, forward
from deltafin.sampling import check_finite


@dataclass(frozen=True)
class Document:
    """Something to predict: a text, or a chat in the model's own format."""

    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    kind: str = "text"


@dataclass
class Score:
    """Sums over the predicted tokens of one kind of document. Nats are -log of what the model gave the token."""

    kind: str
    documents: int = 0
    tokens: int = 0
    nats: float = 0.0
    bytes: int = 0
    assistant_tokens: int = 0
    assistant_nats: float = 0.0

    @property
    def loss(self) -> float:
        """Nats a token."""
        return self.nats / self.tokens if self.tokens else math.nan

    @property
    def assistant_loss(self) -> float:
        """Nats a token, over what an assistant says (its markers included)."""
        return self.assistant_nats / self.assistant_tokens if self.assistant_tokens else math.nan

    @property
    def perplexity(self) -> float:
        """Exponential of the loss."""
        return math.inf if self.loss > 700 else math.exp(self.loss)

    @property
    def bits_per_byte(self) -> float:
        """Bits that the model needs for a byte of the predicted text: comparable between vocabularies."""
        return self.nats / math.log(2) / self.bytes if self.bytes else math.nan


def read_documents(path: str | Path) -> list[Document]:
    """Read a UTF-8 text file as one document, or a ``.jsonl`` file with a document a line.

    A line is ``{"text": ...}``, or ``{"messages": [...]}`` perhaps with ``"tools"``; either may name its ``"kind"``.
    """
    path = Path(path)
    try:
        content = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UsageError(f"there is no file {path}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read as UTF-8 text ({error})") from error
    if path.suffix != ".jsonl":
        return [Document(text=content)]
    return [_document(line, f"{path}, line {n}") for n, line in enumerate(content.split("\n"), 1) if line.strip()]


def _document(line: str, where: str) -> Document:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where} is not JSON ({error})") from error
    if isinstance(row, dict) and isinstance(row.get("text"), str):
        return Document(text=row["text"], kind=str(row.get("kind", "text")))
    if isinstance(row, dict) and isinstance(row.get("messages"), list):
        return Document(messages=row["messages"], tools=row.get("tools"), kind=str(row.get("kind", "chat")))
    raise UsageError(f'{where} has neither "text" nor "messages"')


def evaluate(
    model: Model,
    documents: Sequence[Document],
    window: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Score]:
    """Return a score per kind, then one of everything when there are several kinds.

    Every token but a document's first is predicted from all before it; with ``window`` a document is cut into pieces
    of that many tokens (2 or more), each predicted on its own. ``progress`` is called with tokens done and in all.
    """
    if window is not None and window < 2:
        raise UsageError(f"a window of {window} tokens predicts nothing", "use 2 or more")
    prepared = [(d, *_tokens(model, d)) for d in documents]
    total, done = sum(len(ids) for _, ids, _ in prepared), 0
    scores: dict[str, Score] = {}
    everything = Score("all")
    for document, ids, spoken in prepared:
        score = scores.setdefault(document.kind, Score(document.kind))
        for s in (score, everything):
            s.documents += 1
        size = window or len(ids)
        for start in range(0, len(ids), max(size, 1)):
            piece, learnt = ids[start : start + size], spoken[start : start + size]
            for nats, read in _losses(model, piece):
                first = read - len(nats)
                for s in (score, everything):
                    s.tokens += len(nats)
                    s.nats += math.fsum(nats)
                    s.bytes += sum(len(model.tokenizer.token_bytes(i)) for i in piece[first + 1 : read + 1])
                    chosen = [x for x, spoken_ in zip(nats, learnt[first + 1 : read + 1], strict=True) if spoken_]
                    s.assistant_tokens += len(chosen)
                    s.assistant_nats += math.fsum(chosen)
                if progress:
                    progress(done + start + read, total)
        done += len(ids)
        if progress:
            progress(done, total)
    return [*scores.values(), everything] if len(scores) > 1 else list(scores.values())


def _losses(model: Model, ids: list[int]) -> Iterator[tuple[list[float], int]]:
    """Yield the nats of tokens 1, 2, ... in pieces, with how many tokens have been read."""
    state = model.decoder.empty_state()
    for start in range(0, len(ids) - 1, SLICE):
        piece = ids[start : min(start + SLICE, len(ids) - 1)]
        logits = forward(model.decoder, state, torch.tensor([piece]), last=len(piece))[0]
        targets = torch.tensor(ids[start + 1 : start + 1 + len(piece)])
        nats = torch.nn.functional.cross_entropy(logits.double(), targets, reduction="none")
        check_finite(nats)
        yield nats.tolist(), start + len(piece)


def _tokens(model: Model, d: Document) -> tuple[list[int], list[bool]]:
    """Return a document's ids, and which of them an assistant says: all after the prompt for its message."""
    if d.messages is None:
        ids = model.tokenizer.encode(d.text or "")
        return ids, [False] * len(ids)
    thinking = any(m.get("reasoning_content") or m.get("reasoning") for m in d.messages)
    encode = partial(model.chat_format.encode, tools=d.tools, thinking=thinking, effort=None)
    ids = encode(d.messages, generate=False)
    spoken = [False] * len(ids)
    for i, message in enumerate(d.messages):
        if message["role"] == "assistant":
            start, stop = len(encode(d.messages[:i])), len(encode(d.messages[: i + 1], generate=False))
            spoken[start:stop] = [True] * (stop - start)
    return ids, spoken
