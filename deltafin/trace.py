"""Traces: which experts the tokens chose and how long each part took, as JSON lines and for a trace viewer.

A watched decoder computes what the plain one does, with its clock read before and after every part; a decoder that is
not watched knows nothing of it, so watching costs nothing when it is off. ``docs/tracing.md`` describes the files.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from time import perf_counter
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from deltafin.config import Activation, MoE
from deltafin.errors import StorageError, UsageError
from deltafin.model.decoder import Block, Decoder, State
from deltafin.model.moe import Experts
from deltafin.model.residual import Stream
from deltafin.ops import FEW, Ops

FORMAT, VERSION = "deltafin trace", 1

PARTS = ("disk wait", "experts", "attention", "head", "other")
"""What a token's time is divided into; attention means every mixer of tokens, other what is left."""

AGAIN = "record it again with --trace"


class Span(NamedTuple):
    """One part of one layer: when it began and how long it took, seconds; ``wait`` of them were spent on the disk."""

    part: str
    layer: int | None
    start: float
    seconds: float
    wait: float = 0.0


class Route(NamedTuple):
    """The experts a layer's router chose for N rows and their weights, NE each."""

    layer: int
    ids: Any
    weights: Any


@dataclass
class Step:
    """One call of the model: a token, a few, or a piece of a prompt. Times are seconds of one clock.

    Spans come in the order in which they end; a layer's experts lie within its feed-forward.
    """

    tokens: int
    start: float
    seconds: float = 0.0
    spans: list[Span] = field(default_factory=list)
    routes: list[Route] = field(default_factory=list)

    def by_part(self) -> dict[str, float]:
        """Return the seconds of each of ``PARTS``."""
        parts: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        for span in self.spans:
            if span.part in parts:
                parts[span.part] += span.seconds - span.wait
                parts["disk wait"] += span.wait
        parts["other"] = self.seconds - sum(parts.values())
        return parts


class Watch:
    """Who is told: ``on_step`` after every step, ``on_route`` (layer, ids NE, weights NE) before experts compute."""

    def __init__(self) -> None:
        self.on_step: list[Callable[[Step], None]] = []
        self.on_route: list[Callable[[int, Tensor, Tensor], None]] = []
        self.step = Step(0, 0.0)

    def span(self, part: str, layer: int | None, start: float, wait: float = 0.0) -> None:
        """Note a part that has just ended; a GPU's work counts where it was asked for."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.step.spans.append(Span(part, layer, start, perf_counter() - start, wait))


def watched(m: Decoder, watch: Watch) -> Decoder:
    """Return a decoder that computes what ``m`` does and reports to ``watch``."""
    blocks: list[Block] = []
    for i, block in enumerate(m.blocks):
        inner = block
        if isinstance(block.layer.ffn, MoE):
            inner = replace(block, ffn=replace(block.ffn, experts=_Experts(block.ffn.experts, i, watch)))
        about = block.layer, block.norms, block.mixer, inner.ffn, block.ops
        blocks.append(_Block(*about, inner, i, watch, mixer_ops=block.mixer_ops))
    return replace(m, blocks=tuple(blocks), ops=_with_head(m.ops, watch), graphs=None)


@dataclass(frozen=True)
class _Block(Block):
    inner: Block
    index: int
    watch: Watch

    def mix(self, s: State, stream: Stream) -> None:
        began = perf_counter()
        if self.index == 0:  # what an interrupted step left is forgotten
            self.watch.step = Step(stream.prefix.shape[0] * stream.prefix.shape[1], began)
        self.inner.mix(s, stream)
        self.watch.span("attention", self.index, began)

    def feed(self, stream: Stream) -> None:
        began = perf_counter()
        self.inner.feed(stream)
        self.watch.span("feed-forward", self.index, began)


class _Experts:
    def __init__(self, inner: Experts, layer: int, watch: Watch) -> None:
        self.inner, self.layer, self.watch = inner, layer, watch

    def __call__(self, x_NM: Tensor, ids_NE: Tensor, weight_NE: Tensor, activation: Activation, ops: Ops) -> Tensor:
        for hook in self.watch.on_route:
            hook(self.layer, ids_NE, weight_NE)
        self.watch.step.routes.append(Route(self.layer, ids_NE, weight_NE))
        began, waited = perf_counter(), self._waited()
        y = self.inner(x_NM, ids_NE, weight_NE, activation, ops)
        self.watch.span("experts", self.layer, began, self._waited() - waited)
        return y

    def _waited(self) -> float:
        """Seconds that this layer has waited for reads, where its experts count that."""
        return getattr(getattr(self.inner, "counters", None), "wait", 0.0)


def _with_head(ops: Ops, watch: Watch) -> Ops:
    def linear(x: Tensor, weight: Any) -> Tensor:
        began = perf_counter()
        y = ops.linear(x, weight)
        watch.span("head", None, began)
        watch.step.seconds = perf_counter() - watch.step.start
        for hook in watch.on_step:
            hook(watch.step)
        return y

    return replace(ops, linear=linear)


def viewer_file(path: Path) -> Path:
    """Return where the trace viewer's file of a trace lies."""
    return path.with_name(f"{path.name}.viewer.json")


class TraceFile:
    """A trace that is being written, and beside it the same for a trace viewer: both appear whole, when it is closed.

    ``about`` is written first: see ``docs/tracing.md``. Raises ``StorageError`` when the files cannot be written.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self.path = path
        self.steps = 0
        self._start = 0.0
        self._files: list[Any] = []
        try:
            for _ in range(2):
                start = f".{path.name[:40]}."
                file = NamedTemporaryFile("w", encoding="utf-8", prefix=start, dir=path.parent, delete=False)  # noqa: SIM115
                self._files.append(file)
        except OSError as error:
            self._forget()
            raise StorageError(f"cannot write to {path.parent} ({error.strerror})", "give another FILE") from error
        lines, viewer = self._files
        self._put(lines, json.dumps({"format": FORMAT, "version": VERSION, **about}, ensure_ascii=False) + "\n")
        name = {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": f"deltafin {about.get('model', '')}"}}
        self._put(viewer, f'{{"displayTimeUnit": "ms", "traceEvents": [\n{json.dumps(name)}')

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, step: Step) -> None:
        """Add a step; nothing happens after the file was closed."""
        if not self._files:
            return
        self._start = self._start if self.steps else step.start
        lines, viewer = self._files
        self._put(lines, json.dumps(as_json(step, self.steps, self._start), separators=(",", ":")) + "\n")
        for event in events(step, self.steps, self._start):
            self._put(viewer, f",\n{json.dumps(event)}")
        self.steps += 1

    def close(self) -> None:
        """Give both files their names."""
        if not self._files:
            return
        lines, viewer = self._files
        self._put(viewer, "\n]}\n")
        try:
            for file, path in ((lines, self.path), (viewer, viewer_file(self.path))):
                file.flush()
                os.fsync(file.fileno())
                file.close()
                os.replace(file.name, path)
        except OSError as error:
            raise StorageError(f"{self.path} could not be written ({error.strerror})") from error
        finally:
            self._forget()

    def _put(self, file: Any, text: str) -> None:
        try:
            file.write(text)
        except OSError as error:
            self._forget()
            raise StorageError(f"the trace {self.path} could not be written ({error.strerror})") from error

    def _forget(self) -> None:
        for file in self._files:
            with suppress(OSError):
                file.close()
            with suppress(OSError):
                os.unlink(file.name)
        self._files = []


def as_json(step: Step, number: int = 0, start: float = 0.0) -> dict[str, Any]:
    """Return a step as it stands in a trace; its times count from ``start``."""
    return {
        "step": number,
        "tokens": step.tokens,
        "start": _short(step.start - start),
        "total": _short(step.seconds),
        "seconds": {part: _short(seconds) for part, seconds in step.by_part().items()},
        "routes": {str(r.layer): {"ids": _rows(r.ids), "weights": _rows(r.weights, 5)} for r in step.routes},
        "spans": [
            [s.part, s.layer, _short(s.start - start), _short(s.seconds), *([_short(s.wait)] if s.wait else [])]
            for s in step.spans
        ],
    }


def events(step: Step, number: int = 0, start: float = 0.0) -> Iterator[dict[str, Any]]:
    """Yield a step as complete events of the Trace Event Format (microseconds): the step, and its parts within it."""
    what = f"token {number}" if step.tokens == 1 else f"{step.tokens} tokens"
    routes = {r.layer: r for r in step.routes}
    yield _event(what, "step", step.start - start, step.seconds, {"tokens": step.tokens})
    for span in step.spans:
        about: dict[str, Any] = {} if span.layer is None else {"layer": span.layer}
        if span.part == "experts" and span.layer in routes:
            about |= {"disk wait ms": _short(1000 * span.wait)}
            if step.tokens <= FEW:
                about |= {"experts": _rows(routes[span.layer].ids)}
        name = span.part if span.layer is None else f"{span.part} {span.layer}"
        yield _event(name, span.part, span.start - start, span.seconds, about)


def _event(name: str, kind: str, start: float, seconds: float, about: Mapping[str, Any]) -> dict[str, Any]:
    times = {"ts": round(1e6 * start, 3), "dur": round(1e6 * seconds, 3)}
    return {"name": name, "cat": kind, "ph": "X", "pid": 1, "tid": 1, **times, "args": about}


def _short(seconds: float) -> float:
    return round(seconds, 7)


def _rows(values: Any, digits: int | None = None) -> list[list[Any]]:
    rows = values.tolist() if isinstance(values, Tensor) else values
    return rows if digits is None else [[round(value, digits) for value in row] for row in rows]


def read(path: Path) -> tuple[dict[str, Any], list[Step]]:
    """Return what a trace says of its model, and its steps; a line that was cut off at the end is left out.

    Raises ``UsageError`` naming the line of a file that is not a trace.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read ({error})", "give a file that --trace wrote") from error
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    number = 1
    try:
        about = json.loads(lines[0])
        if about["format"] != FORMAT or about["version"] != VERSION:
            raise UsageError(f"{path} is {about['format']!r} version {about['version']}", AGAIN)
        steps: list[Step] = []
        for number, line in enumerate(lines[1:], 2):  # noqa: B007 - for the message below
            steps.append(_step(json.loads(line)))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is not a trace: line {number} does not belong in one", AGAIN) from error
    return about, steps


def _step(raw: Mapping[str, Any]) -> Step:
    routes = [Route(int(layer), r["ids"], r["weights"]) for layer, r in raw["routes"].items()]
    for route in routes:
        if not all(isinstance(x, int) for row in route.ids for x in row):
            raise ValueError("experts are numbers")
    return Step(int(raw["tokens"]), float(raw["start"]), float(raw["total"]), [Span(*s) for s in raw["spans"]], routes)
