"""A session: one timeline of tokens, and the state after the last of them.

Recurrent state cannot be rewound. A session therefore keeps a few checkpoints of its state; going back means going to
the latest checkpoint that is still true and reading on from there.
"""

import copy
import json
import os
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from deltafin.captured import forward
from deltafin.errors import SessionError, UsageError
from deltafin.model.decoder import Decoder, State
from deltafin.sampling import Sampler, check_finite

PIECE = 2048
"""Tokens of a prompt that pass through the layers at a time: each pass reads every expert that it uses once."""

CHECKPOINTS = 5
"""Checkpoints that are kept: before and after each of the last two messages, and where the reply between them ends."""

FORMAT = 1


class Runnable(Protocol):
    """What a session needs of a model: something to run, and who it is."""

    @property
    def decoder(self) -> Decoder:
        """The model, ready to run."""
        ...

    @property
    def fingerprint(self) -> str:
        """What tells it from every other model."""
        ...


@dataclass
class Checkpoint:
    """The state after ``length`` tokens, with the logits that follow them."""

    length: int
    state: list[State]
    logits: Tensor | None


class Session:
    """One timeline: ``tokens`` so far, and the state after the last of them.

    The state may lag behind (the last sampled token is only read when something follows it) and catches up by itself,
    also after an exception in the middle of a token: the timeline never lies about what was said.
    """

    def __init__(self, model: Runnable) -> None:
        self.model = model
        self.tokens: list[int] = []
        self._read = 0  # the state stands after this many tokens
        self._state = model.decoder.empty_state()
        self._logits: Tensor | None = None
        self._checkpoints: list[Checkpoint] = []
        self.tokens_read = 0
        """Tokens the model has read in this session's life; what was reused is the rest."""

    def logits(self) -> Tensor:
        """Return the logits that follow the timeline, [Z] in float32 or wider; reads what is still unread.

        Raises ``NumericsError`` when they are not finite; ``UsageError`` for an empty timeline.
        """
        if not self.tokens:
            raise UsageError("an empty session has no logits", "feed it at least one token")
        while self._read < len(self.tokens) or self._logits is None:
            self._advance(self.tokens[self._read : self._read + PIECE])
        return self._logits

    def feed(self, tokens: Sequence[int]) -> Tensor:
        """Extend the timeline by ``tokens`` and return the logits that follow, [Z]."""
        vocab = self.model.decoder.config.vocab
        for token in tokens:
            if not 0 <= token < vocab:
                raise UsageError(f"token id {token} is not in the vocabulary of {vocab}")
        self.tokens.extend(int(t) for t in tokens)
        return self.logits()

    def sync(self, tokens: Sequence[int]) -> Tensor:
        """Make the timeline equal to ``tokens``, reusing what is already read; return the logits that follow, [Z].

        Where the timeline says something else, the session goes back to the latest checkpoint before that place, or
        starts again if there is none.
        """
        tokens = [int(t) for t in tokens]
        same = _common(self.tokens, tokens)
        if same < len(self.tokens):
            if self._read > same:
                self._return(same)
            self.tokens = tokens[:same]
        elif self.tokens:
            self.logits()
            self.checkpoint()
        return self.feed(tokens[same:])

    def reusable(self, tokens: Sequence[int]) -> int:
        """Return how many leading tokens of ``tokens`` would not be read again by ``sync``."""
        same = _common(self.tokens, tokens)
        if self._read <= same:
            return self._read
        return max((c.length for c in self._checkpoints if c.length <= same), default=0)

    def checkpoint(self) -> None:
        """Keep a copy of the state as it is, to come back to; a state that is not finite is refused."""
        if any(c.length == self._read for c in self._checkpoints):
            return
        check_state(self._state)
        self._checkpoints.append(Checkpoint(self._read, [s.keep() for s in self._state], self._logits))
        self._checkpoints = sorted(self._checkpoints, key=lambda c: c.length)[-CHECKPOINTS:]

    def generate(self, sampler: Sampler, limit: int, stop: Collection[int] = ()) -> Iterator[int]:
        """Yield up to ``limit`` sampled tokens, appending each to the timeline; end after one that is in ``stop``.

        The stop token is part of the timeline and is yielded. Closing the iterator early leaves a timeline of what was
        yielded.
        """
        if limit < 0:
            raise UsageError(f"a limit of {limit} tokens cannot be kept", "give 0 or more")
        chance = sampler.generator()
        logits = self.logits()
        self.checkpoint()
        for i in range(limit):
            token = sampler(logits, self.tokens, chance)
            self.tokens.append(token)
            yield token
            if token in stop or i + 1 == limit:
                return
            logits = self.logits()

    def fork(self) -> Self:
        """Return an independent session that goes on from here."""
        twin = copy.copy(self)
        twin.tokens = list(self.tokens)
        # Together: what state and checkpoints share, their copies share as well.
        twin._state, twin._checkpoints = copy.deepcopy((self._state, self._checkpoints))
        return twin

    def save(self, path: str | Path) -> None:
        """Write tokens, state and the model's fingerprint to one safetensors file, whole or not at all."""
        check_state(self._state)
        tensors = {f"layers.{i}.{name}": t for i, s in enumerate(self._state) for name, t in s.tensors().items()}
        if self._logits is not None:
            tensors["logits"] = self._logits
        about = {"format": FORMAT, "model": self.model.fingerprint, "read": self._read, **self._about()}
        tensors["tokens"] = torch.tensor(self.tokens, dtype=torch.int64)
        tensors = {name: t.contiguous() for name, t in tensors.items()}
        write_whole(Path(path), lambda temporary: save_file(tensors, temporary, {"deltafin": json.dumps(about)}))

    @classmethod
    def load(cls, model: Runnable, path: str | Path) -> Self:
        """Return a saved session; ``SessionError`` when it is damaged or belongs to another model."""
        session, path = cls(model), Path(path)
        try:
            with safe_open(path, "pt") as f:
                about = json.loads((f.metadata() or {}).get("deltafin", "null"))
                saved = {name: f.get_tensor(name).clone() for name in f.keys()}  # noqa: SIM118 - not a dict
        except FileNotFoundError as error:
            raise SessionError(f"there is no session at {path}") from error
        except (SafetensorError, ValueError, OSError) as error:
            raise SessionError(f"{path} is not a saved session, or it is cut ({error})") from error
        if not isinstance(about, dict) or "model" not in about:
            raise SessionError(f"{path} is a safetensors file, but not a saved session")
        if about.get("format") != FORMAT:
            raise SessionError(f"{path} has session format {about.get('format')}, this deltafin reads {FORMAT}")
        if about["model"] != model.fingerprint:
            raise SessionError(f"{path} was saved with another model", "only the model that made it can go on")
        try:
            session._restore(about, saved)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise SessionError(f"{path} is damaged ({error!r})") from error
        check_state(session._state, str(path))
        return session

    def _about(self) -> dict[str, Any]:
        """What a subclass saves besides; ``_restore`` gets it back."""
        return {}

    def _restore(self, about: dict[str, Any], saved: dict[str, Tensor]) -> None:
        self.tokens, self._read = saved["tokens"].tolist(), int(about["read"])
        if not 0 <= self._read <= len(self.tokens):
            raise ValueError(f"{self._read} tokens read of {len(self.tokens)}")
        if self._read:
            self._logits = logits = saved["logits"]
            if logits.shape != (self.model.decoder.config.vocab,) or not bool(torch.isfinite(logits).all()):
                raise ValueError("the logits are not a finite number for every token")
        for i, state in enumerate(self._state):
            state.restore({name: saved[f"layers.{i}.{name}"] for name in state.tensors()}, self._read)

    def _advance(self, tokens: list[int]) -> None:
        """Read some tokens of the timeline; on any exception fall back to a state that is whole."""
        try:
            logits = forward(self.model.decoder, self._state, torch.tensor([tokens]))[0, -1]
            check_finite(logits)
        except torch.OutOfMemoryError as error:
            self._return(self._read)
            raise UsageError(
                f"the GPU's memory ran out after {self._read} tokens: the conversation, or what other programs took, "
                "is more than was planned",
                "go on with less in the GPU's memory: a smaller --gpu",
            ) from error
        except BaseException:
            self._return(self._read)
            raise
        self._read += len(tokens)
        self.tokens_read += len(tokens)
        self._logits = logits

    def _return(self, length: int) -> None:
        """Go back to the latest checkpoint of at most ``length`` tokens, or to the start.

        A checkpoint that is not finite is refused and dropped; the session then stands at the start.
        """
        kept = [c for c in self._checkpoints if c.length <= length]
        self._checkpoints = kept[:-1]
        self._read, self._state, self._logits = 0, self.model.decoder.empty_state(), None
        if kept:
            last = kept[-1]
            check_state(last.state)
            self._read, self._state, self._logits = last.length, [s.keep() for s in last.state], last.logits
            self._checkpoints = kept


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many leading tokens are the same."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def check_state(state: Sequence[State], where: str = "the session's state") -> None:
    """Raise ``SessionError`` when a number in ``state`` is NaN or infinite: it would spoil every later token."""
    for i, s in enumerate(state):
        for name, tensor in s.tensors().items():
            if not bool(torch.isfinite(tensor).all()):
                raise SessionError(f"{where}: layer {i} {name} holds a value that is not a number", "start again")


def write_whole(path: Path, write: Any) -> None:
    """Call ``write`` with a temporary name beside ``path``, then rename: the file appears complete or not at all."""
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name[:40]}.", suffix=".part", dir=path.parent)
        os.close(handle)
    except OSError as error:
        raise SessionError(f"cannot write to {path.parent} ({error.strerror})") from error
    try:
        write(temporary)
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise SessionError(f"{path} could not be written ({error})") from error
    finally:
        Path(temporary).unlink(missing_ok=True)
