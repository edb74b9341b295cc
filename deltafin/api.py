"""The public face: load a model, generate, talk, save and resume."""

import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from deltafin import demand, heat, library, machine, ops, placement
from deltafin.chat import ChatFormat, chat_format
from deltafin.config import KDA, ModelConfig, MoE
from deltafin.errors import ChatError, UsageError
from deltafin.executor import PACKED, assemble, settle
from deltafin.gpu import Placed
from deltafin.gpu import placed as gpu_of
from deltafin.model.decoder import SLICE, Decoder, forward
from deltafin.reply import Piece
from deltafin.sampling import Sampler
from deltafin.session import Session
from deltafin.slots import slots_within
from deltafin.snapshot import Snapshot
from deltafin.store import Store, open_model
from deltafin.tiers import READERS, Tiers
from deltafin.tokenizer import Tokenizer
from deltafin.trace import Step, TraceFile, Watch, watched
from deltafin.transfer import CARRIED

Message = Mapping[str, Any]
"""A message in the usual shape: role, content, and what belongs to it."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
RESIDENT = ("keep", "int8")
EXPERTS = ("keep", "mxfp4", "int8")
"""How plain matrices, and those of routed experts, can be held: as and where they are stored, or packed in memory."""

SMALL = 100 << 20
"""Bytes of weights below which a second thread is not worth waking: the products are over before it has begun."""

BACKENDS = ("auto", "numba", "reference")

TRIES = 3
"""How often a model is placed on a GPU whose memory other programs take meanwhile."""


def load(
    name_or_path: str | Path = "nano",
    *,
    dtype: str = "float32",
    threads: int | None = None,
    backend: str = "auto",
    resident: str = "keep",
    experts: str = "keep",
    ram: str | int | None = None,
    pin: int = 0,
    lookahead: bool | None = None,
    readers: int = READERS,
    place: str = "auto",
    gpu: str | int | None = None,
    progress: Callable[[str], None] | None = None,
) -> "Model":
    """Open a model: ``"nano"``, the folder of a Hugging Face snapshot or of a store, or the name of what was pulled.

    ``"nano"`` ships with deltafin. A name is ``org/name`` or ``org/name@revision`` of a model that ``deltafin pull``
    has fetched; nothing is asked online.

    Weights are read in place and keep the precision they are stored in. ``dtype`` is the type of the activations:
    ``"float32"`` (default; exact for bfloat16 and MXFP4 weights up to the rounding of sums), ``"bfloat16"`` as the
    model's makers run it, or ``"float64"`` for proofs. ``threads`` is how many CPU threads this process uses (default:
    one for a small model, else the physical cores). ``backend`` is ``"numba"`` (what ``"auto"`` means so far) or
    ``"reference"``, plain torch. ``progress`` is called with one line before anything that takes long.

    ``resident="int8"`` packs the matrices that every token uses into memory, at half the bytes of bfloat16;
    ``experts="mxfp4"`` or ``"int8"`` the routed experts, at a quarter or half. What is stored packed stays as it is,
    and so does the router. Both round: the model is then not exactly the published one, and ``info`` says so.

    ``ram`` (bytes, or a text such as ``"16GB"``) is a promise: this process stays below it, and experts that do not
    fit are read when they are needed, ``readers`` at a time. Without it that is done for a model that does not fit in
    what is free now, less a tenth. The ``pin`` experts that were the hottest in earlier runs are never given up.
    ``lookahead`` says whether experts are read before it is certain that they are needed (default: where that is
    measured to be a gain). None of it changes an answer. See ``Model.stats`` and ``docs/tiers.md``.

    ``place`` is where the model runs: ``"cpu"``; ``"gpu"``, as much of it as fits in the memory of CUDA GPUs;
    ``"hybrid"``, the same with recurrent layers kept on the processor; or ``"auto"``, the fastest of these by the
    machine's measured speeds (a small model, and another ``backend`` or ``dtype`` than GPUs have, stay on the CPU).
    ``gpu`` is how much GPU memory may be used, a promise as ``ram`` is, one size or as many as there are GPUs
    (``"20GB,20GB"``). See ``docs/gpu.md``.

    Raises ``CheckpointError`` or ``ConfigError`` naming what is wrong with the files, ``UsageError`` for an argument
    that cannot work.
    """
    if dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r} is not supported", f"use {', '.join(DTYPES)}")
    if backend not in BACKENDS:
        raise UsageError(f"backend {backend!r} is not supported", f"use {', '.join(BACKENDS)}")
    for name, value, supported in (("resident", resident, RESIDENT), ("experts", experts, EXPERTS)):
        if value not in supported:
            raise UsageError(f"{name} {value!r} is not supported", f"use {', '.join(supported)}")
    if threads is not None and threads < 1:
        raise UsageError(f"threads {threads} is not supported", "use 1 or more")
    store = open_model(library.locate(name_or_path))
    if threads is None:
        threads = 1 if store.totals["bytes"] < SMALL else machine.threads()
    table = ops.REFERENCE if backend == "reference" else ops.ready("numba", threads, machine.cores(), progress)
    torch.set_num_threads(threads)  # after the kernels' pool has started, which sets it to its own
    most = placement.bytes_of(ram) if ram is not None else int(machine.memory().available * placement.SHARE)
    needs = demand.of_files(store, resident, experts, DTYPES[dtype].itemsize)
    kept = heat.file_of(store.fingerprint)
    hot = heat.read(kept)
    place = _place(store, place, gpu, backend, dtype)
    tries = 0
    while True:
        there = gpu_of(*(store.path, needs, table), place=place, gpu=gpu, ram=most, heat=hot, progress=progress)
        slots = _slots(store, ram is not None, most, there.placement.left if there else needs, experts)
        if slots is None and (pin or lookahead is not None):
            what = "pin" if pin else "lookahead"
            raise UsageError(f"{what} means nothing here: no experts are read while the model runs", "give ram as well")
        tiers = None
        if slots is not None:
            tiers = Tiers(store, slots, ram=most, heat=hot, lookahead=lookahead, readers=readers)
        try:
            model = Model(store, table, DTYPES[dtype], resident, experts, progress, tiers, there)
            break
        except torch.OutOfMemoryError as error:  # somebody else was faster
            torch.cuda.empty_cache()
            tries += 1
            if tries == TRIES:
                raise UsageError("other programs take the GPU's memory", "use --place cpu, or end them") from error
    policies = [pool.policy for pool in tiers.pools.values()] if tiers else []
    if tiers and pin:
        if progress:
            progress(f"reading the {pin} hottest experts")
        tiers.pin(pin)
    if there:
        policies.append(there.policy)
    if kept and policies:
        weakref.finalize(model, heat.keep, kept, policies)
    return model


def _place(store: Snapshot | Store, place: str, gpu: str | int | None, backend: str, dtype: str) -> str:
    """Return ``place``, or "cpu" where it is left open and no GPU would help, or has what is asked for."""
    if dtype == "float64" and (place not in ("auto", "cpu") or gpu is not None):
        raise UsageError("float64 is not computed on a GPU", "leave place and gpu out")
    open_ = place == "auto" and gpu is None
    return "cpu" if open_ and (store.totals["bytes"] < SMALL or backend != "auto" or dtype == "float64") else place


def _slots(
    store: Snapshot | Store, promised: bool, most: int, needs: placement.Demand, experts: str
) -> dict[int, int] | None:
    """Return slots for experts in ``most`` bytes of memory: None where none are needed, or cannot help.

    ``needs`` is what is asked of this memory; ``promised`` says that no more than ``most`` may be used.
    """
    layers = (i for i, layer in enumerate(store.config.layers) if isinstance(layer.ffn, MoE))
    sizes = {i: store.slot_bytes(i) for i in layers if needs.layers[i].experts}
    if not promised and (not sizes or 2 * needs.weights < most):
        return None
    try:
        slots = slots_within(most, needs, sizes, needs.context)
    except UsageError:
        if promised:
            raise
        return None  # the system pages in what it can: slow, but nobody promised anything
    if not promised and sum(size * count for size, count in slots.items()) >= sum(
        size * needs.layers[i].experts for i, size in sizes.items()
    ):
        return None
    if experts != "keep" and any(store.expert_formats[i] - PACKED for i in sizes):
        raise UsageError(
            f"experts {experts!r} would be packed into memory, more of them than there is room for",
            "deltafin convert packs them on the disk",
        )
    return slots if sizes else None


class Model:
    """A model that is ready to run. Made by ``load``; frozen: what changes are the sessions it gives out."""

    def __init__(
        self,
        store: Snapshot | Store,
        table: ops.Ops,
        dtype: torch.dtype,
        resident: str = "keep",
        experts: str = "keep",
        progress: Callable[[str], None] | None = None,
        tiers: Tiers | None = None,
        there: Placed | None = None,
    ) -> None:
        self._store = store
        self._tiers = tiers
        self.placed = there
        """What of it is on GPUs, if anything is."""
        self.path = store.path
        self.name = "nano" if store.path == library.EMBEDDED else library.title(store.path)
        self.config: ModelConfig = store.config
        self.decoder: Decoder
        about = {} if there is None else {"homes": there.homes, "head": there.head, "policy": there.policy}
        self.decoder, self._saved = assemble(store, table, dtype, resident, experts, progress, tiers, **about)
        self.elsewhere = settle(self.decoder)
        """How a few rows meet experts that are not on the GPU, for people; "" where there are none."""
        chosen = {"resident": resident, "experts": experts}
        self._packed = {what: chosen[what] for what in self._saved}
        self._watch: Watch | None = None
        self._seconds = Counter[str]()

    @property
    def fingerprint(self) -> str:
        """Who this model is, for saved sessions: its files, the type of its activations, and what was packed."""
        packed = "".join(f"-{what}-{how}" for what, how in self._packed.items())
        return f"{self._store.fingerprint}-{str(self.decoder.dtype).removeprefix('torch.')}{packed}"

    def in_dtype(self, dtype: torch.dtype) -> Decoder:
        """Return the same weights with another type of activations."""
        return replace(self.decoder, dtype=dtype, graphs=None)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The vocabulary; ``TokenizerError`` names the file when the snapshot has none."""
        return Tokenizer.open(self.path, self.config.vocab)

    @cached_property
    def chat_format(self) -> ChatFormat:
        """How the model writes conversations; ``ChatError`` when it is not known."""
        return chat_format(self.tokenizer)

    def info(self) -> dict[str, Any]:
        """Return what the model is and how it runs here, in the order it is shown. Sizes are bytes."""
        layers = self.config.layers
        totals = self._store.totals
        moe = next((layer.ffn for layer in layers if isinstance(layer.ffn, MoE)), None)
        linear = sum(isinstance(layer.mixer, KDA) for layer in layers)
        about: dict[str, Any] = {
            "name": self.name,
            "path": str(self.path),
            "family": self.config.family,
            "parameters": totals["parameters"],
            "bytes": totals["bytes"] - sum(self._saved.values()),
            "layers": f"{len(layers)} ({linear} KDA, {len(layers) - linear} latent attention)",
            "width": self.config.width,
            "vocabulary": self.config.vocab,
            "context": self.config.context,
        }
        if moe:
            about["experts"] = (
                f"{moe.experts} a layer, {moe.chosen} chosen, {'a' if moe.shared_width else 'no'} shared one"
            )
            about["expert bytes"] = totals["expert bytes"] - self._saved["experts"]
            about["expert weights"] = self._held("experts", set[str]().union(*self._store.expert_formats.values()))
        if self.placed is not None:
            about |= self.placed.info() | ({"other experts": self.elsewhere} if self.elsewhere else {})
        if self._tiers is not None:
            about |= self._tiers.info()
        return about | {
            "resident weights": self._held("resident"),
            "activations": str(self.decoder.dtype).removeprefix("torch."),
            "threads": self.decoder.ops.threads(),
            "operations": "; ".join(dict.fromkeys(map(_described, self.decoder.tables))),
            **self._store.origin,
            "skipped tensors": ", ".join(f"{count} {part}" for part, count in self._store.skipped.items()) or "none",
            "fingerprint": self.fingerprint[:16],
        }

    def stats(self) -> dict[str, Any]:
        """Return what was counted since the model was opened: bytes and seconds, in all and by layer, of tiers.

        With a GPU, what was ``"carried"`` between memories, weights aside: ``"bytes"`` and ``"transfers"`` of all
        models of this process. Since it is watched, also the ``"seconds"`` by part.
        """
        counted = {} if self._tiers is None else self._tiers.stats()
        if self.placed is not None:
            counted |= {"carried": dict(CARRIED), "notes": [*self.placed.notes, *counted.get("notes", ())]}
        return counted if self._watch is None else counted | {"seconds": dict(self._seconds)}

    def watch(
        self,
        on_step: Callable[[Step], None] | None = None,
        on_route: Callable[[int, Tensor, Tensor], None] | None = None,
    ) -> None:
        """From now on time each part of a token, for ``stats``.

        ``on_step`` is called after each token or piece of a prompt (see ``trace.Step``), ``on_route`` with the number
        of a layer, the experts it has chosen and their weights, NE each, before these are computed.
        """
        if self._watch is None:
            self._watch = Watch()
            self._watch.on_step.append(lambda step: self._seconds.update(step.by_part()))
            self.decoder = watched(self.decoder, self._watch)
        if on_step:
            self._watch.on_step.append(on_step)
        if on_route:
            self._watch.on_route.append(on_route)

    def trace(self, path: str | Path) -> TraceFile:
        """Write routes and times to a file from now on, until what is returned is closed; see ``docs/tracing.md``.

        Raises ``StorageError`` when the file cannot be written.
        """
        chosen = (self._packed.get(what, "keep") for what in ("resident", "experts"))
        needs = demand.of_files(self._store, *chosen, activation=self.decoder.dtype.itemsize)
        experts = {
            i: {"count": layer.experts, "chosen": layer.chosen, "bytes": self._store.slot_bytes(i)}
            for i, layer in enumerate(needs.layers)
            if layer.experts
        }
        about = {"model": self.name, "experts": experts, "other_bytes": needs.others(needs.context)}
        file = TraceFile(Path(path), about)
        self.watch(on_step=file.write)
        return file

    def _held(self, what: str, formats: Collection[str] = ()) -> str:
        """Say how weights are held; ``formats`` are what they are stored as."""
        if what not in self._packed:
            return ", ".join([*sorted(formats), "as stored"])
        packed = f"{self._packed[what].replace('mxfp4', 'MXFP4')} (chosen; not exactly the published weights)"
        return f"{packed}, some MXFP4 as stored" if "MXFP4" in formats else packed

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """Return the logits after each of T tokens: float32 [T, Z]."""
        ids = [int(i) for i in token_ids]
        if not ids:
            return torch.empty(0, self.config.vocab)
        if not 0 <= min(ids) <= max(ids) < self.config.vocab:
            raise UsageError(f"token ids must be from 0 to {self.config.vocab - 1}")
        state = self.decoder.empty_state()
        pieces = (torch.tensor([ids[start : start + SLICE]]) for start in range(0, len(ids), SLICE))
        return torch.cat([forward(self.decoder, state, p, last=p.shape[1])[0] for p in pieces]).float()

    def generate(self, prompt: str | Sequence[Message], **options: Any) -> str:
        """Return the model's answer, without its thinking. Arguments: see ``stream``."""
        return "".join(self.stream(prompt, **options))

    def stream(
        self,
        prompt: str | Sequence[Message],
        *,
        max_tokens: int = 512,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int | None = None,
        stop: str | Collection[str] = (),
        thinking: bool | None = None,
        **options: Any,
    ) -> Iterator[str]:
        """Yield the model's answer as it comes, in pieces of whole characters.

        A string is continued as it is. A list of messages is answered in the model's chat format; ``thinking`` (None:
        the format's default) and ``options`` (``tools``, ``effort``, ``tool_choice``, ``response_format``: see
        ``ChatFormat.render``) belong to that. ``stop`` is a text, or several, that ends the answer and is not part of
        it; ``max_tokens`` counts thinking too. Sampling: see ``Sampler``.
        """
        sampler = Sampler(temperature, top_k, top_p, min_p, repetition_penalty, seed)
        if isinstance(prompt, str):
            if thinking or options:
                name = "thinking" if thinking else next(iter(options))
                raise ChatError(f"{name} needs messages", 'use [{"role": "user", "content": ...}]')
            pieces: Iterator[str] = self._continue(prompt, sampler, max_tokens)
        else:
            talk = Conversation(self, prompt, thinking=thinking, **options)
            pieces = (p for p in talk.chat(None, sampler=sampler, max_tokens=max_tokens) if p.kind == "text")
        yield from _until(pieces, [stop] if isinstance(stop, str) else stop)

    def chat(self, messages: Sequence[Message], **options: Any) -> dict[str, Any]:
        """Return the whole answer as a message: role, content, reasoning_content, tool_calls, finish_reason.

        ``finish_reason`` is ``"stop"``, ``"length"`` or ``"tool_calls"``. Arguments: as ``stream``, without ``stop``.
        """
        max_tokens = options.pop("max_tokens", 512)
        sampling = {f.name: options.pop(f.name) for f in fields(Sampler) if f.name in options}
        talk = Conversation(self, messages, **options)
        for _ in talk.chat(None, sampler=Sampler(**sampling), max_tokens=max_tokens):
            pass
        return {**talk.messages[-1], "finish_reason": talk.stats.finish_reason}

    def session(self, system: str | None = None, **options: Any) -> "Conversation":
        """Begin a conversation, optionally with a system prompt. Options: as ``Conversation``."""
        messages = [] if system is None else [{"role": "system", "content": system}]
        return Conversation(self, messages, **options)

    def resume(self, path: str | Path) -> "Conversation":
        """Go on with a conversation that was saved; ``SessionError`` when it belongs to another model."""
        return Conversation.load(self, path)

    def _continue(self, text: str, sampler: Sampler, limit: int) -> Iterator[str]:
        session, decoder = Session(self), self.tokenizer.decoder()
        ids = self.tokenizer.encode(text)
        if not ids:
            raise UsageError("there is nothing to continue", "give a text of at least one character")
        session.feed(ids)
        for token in session.generate(sampler, limit, self.tokenizer.stop_ids):
            if token not in self.tokenizer.stop_ids:
                yield decoder.push(token)
        yield decoder.flush()


@dataclass
class Stats:
    """What one reply took: tokens of the prompt, how many of them were already read, seconds, tokens said.

    ``finish_reason`` is ``"stop"``, ``"length"``, ``"tool_calls"``, or ``"interrupted"`` when it was closed early.
    ``counted`` is what ``Model.stats`` counted while the tokens were said, without the prompt.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    prompt_seconds: float = 0.0
    generated_tokens: int = 0
    generate_seconds: float = 0.0
    finish_reason: str = ""
    counted: dict[str, Any] = field(default_factory=dict)


class Conversation(Session):
    """A session that speaks the model's chat format: ``messages`` and the timeline that they are rendered to.

    Changing ``messages`` (editing, deleting, adding) is allowed at any time: the next reply reads only what differs.
    ``thinking`` None means the format's default; ``options`` (``tools``, ``effort``, ``tool_choice``,
    ``response_format``) go to ``ChatFormat.render``.
    """

    def __init__(
        self,
        model: Model,
        messages: Sequence[Message] = (),
        *,
        thinking: bool | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model)
        self.model: Model = model
        self.messages: list[dict[str, Any]] = [dict(m) if isinstance(m, Mapping) else m for m in messages]
        self.thinking = thinking
        self.options = options
        self.stats = Stats()

    def chat(
        self,
        message: str | Message | None,
        *,
        sampler: Sampler = Sampler(),  # noqa: B008 - frozen
        max_tokens: int = 512,
        thinking: bool | None = None,
    ) -> Generator[Piece, None, None]:
        """Add a message (text: the user's; None: answer the messages as they stand) and stream the reply.

        Pieces are strings with a ``kind``: ``"thinking"``, ``"text"``, or ``"call"`` with the tool call in ``.call``.
        The reply is appended to ``messages`` when it ends, also when the iterator is closed early.
        """
        new = [] if message is None else [{"role": "user", "content": message} if isinstance(message, str) else message]
        messages, think = [*self.messages, *map(dict, new)], self._thinks(thinking)
        prompt = self._prompt(think, messages)
        self.stats, began, read = Stats(len(prompt)), time.perf_counter(), self.tokens_read
        # Stopping here first leaves a checkpoint before the newest message, so that it can be edited.
        before = self._prompt(think, messages[:-1], generate=False)
        if self.reusable(prompt) < len(before) < len(prompt) and before == prompt[: len(before)]:
            self.sync(before)
        self.sync(prompt)
        self.stats.prompt_seconds = time.perf_counter() - began
        self.stats.reused_tokens = max(0, len(prompt) - (self.tokens_read - read))
        parser = self.model.chat_format.parser(thinking=think)
        self.messages = messages  # from here on the message was heard; before, an error leaves all as it was
        began, before, finish = time.perf_counter(), self.model.stats(), "interrupted"
        try:
            for token in self.generate(sampler, max_tokens, self.model.tokenizer.stop_ids):
                self.stats.generated_tokens += 1
                self.stats.generate_seconds = time.perf_counter() - began
                yield from parser.push(token)
                if parser.done or token in self.model.tokenizer.stop_ids:
                    finish = "stop"
                    break
            else:
                finish = "length"
            yield from parser.finish()
        finally:
            parser.finish()
            reply = parser.message()
            self.stats.counted = _since(before, self.model.stats())
            self.stats.finish_reason = "tool_calls" if finish == "stop" and reply.get("tool_calls") else finish
            self.messages.append(reply)

    def say(self, message: str | Message | None, **options: Any) -> str:
        """Return the whole reply to a message, without thinking. Arguments: as ``chat``."""
        return "".join(piece for piece in self.chat(message, **options) if piece.kind == "text")

    def reset(self) -> None:
        """Forget everything but the system prompt, which need not be read again."""
        self.messages = [m for m in self.messages[:1] if m["role"] == "system"]
        kept = self.reusable(self._prompt(self._thinks(), self.messages, generate=False))
        if self._read > kept:
            self._return(kept)
        self.tokens = self.tokens[:kept]

    def fork(self) -> Self:
        """Return an independent conversation that goes on from here."""
        twin = super().fork()
        twin.messages = [dict(m) for m in self.messages]
        return twin

    def _thinks(self, thinking: bool | None = None) -> bool:
        chosen = self.thinking if thinking is None else thinking
        return self.model.chat_format.default_thinking if chosen is None else chosen

    def _prompt(self, thinking: bool, messages: Sequence[Message], generate: bool = True) -> list[int]:
        form = self.model.chat_format
        return form.encode(messages, thinking=thinking, generate=generate, **self.options)

    def _about(self) -> dict[str, Any]:
        return {"messages": self.messages, "thinking": self.thinking, "options": self.options}

    def _restore(self, about: dict[str, Any], saved: dict[str, Tensor]) -> None:
        super()._restore(about, saved)
        self.messages, self.thinking = list(about.get("messages", [])), about.get("thinking")
        self.options = dict(about.get("options", {}))


def _described(table: ops.Ops) -> str:
    """Say which operations a table has of its own, and on which form of a processor they run."""
    replaced = ", ".join(ops.overrides(table))
    return f"{table.name}{f' ({table.form})' if table.form else ''}: {replaced}" if replaced else "torch reference"


def _since(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return by how much every number of ``now`` has grown; what is no number stays."""
    grown: dict[str, Any] = {}
    for name, value in now.items():
        if isinstance(value, Mapping):
            grown[name] = _since(before.get(name, {}), value)
        else:
            number = isinstance(value, int | float) and not isinstance(value, bool)
            grown[name] = value - before.get(name, 0) if number else value
    return grown


def _until(pieces: Iterator[str], stop: Collection[str]) -> Iterator[str]:
    """Pass text on until one of the ``stop`` texts appears, which is held back together with what follows."""
    stop = [s for s in stop if s]
    held = ""
    for piece in pieces:
        held += piece
        found = [(at + len(s), at) for s in stop if (at := held.find(s)) >= 0]
        if found:
            yield held[: min(found)[1]]  # of the text that is complete first, however the pieces were cut
            return
        keep = max((n for s in stop for n in range(1, len(s)) if held.endswith(s[:n])), default=0)
        if len(held) > keep:
            yield held[: len(held) - keep]
            held = held[len(held) - keep :]
    if held:
        yield held
