"""A model's reply, id by id: thinking, text and tool calls told apart.

Replies are read as ids, not as text: a marker that is spelled out in ordinary tokens is text.
"""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from deltafin.tokenizer import Tokenizer

Kind: TypeAlias = Literal["thinking", "text", "call"]


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


# Whole numbers as floats: only their kind matters, and Python refuses to read very long ones.
JSON = json.JSONDecoder(parse_int=float, parse_constant=_refuse_constant)


class Piece(str):
    """A part of a reply as it streams: some text of one kind, or a whole tool call and no text."""

    kind: Kind
    call: dict[str, Any] | None

    def __new__(cls, text: str, kind: Kind, call: dict[str, Any] | None = None) -> "Piece":
        """Make a piece; ``call`` is an OpenAI-style tool call and belongs to the kind "call"."""
        piece = super().__new__(cls, text)
        piece.kind, piece.call = kind, call
        return piece


# What the ids since an opening or closing marker can be while they may still become a tag.
_TAG_SO_FAR = re.compile(r'\s*[\w-]*(?:\s+[\w-]+="[^"]*")*(?:\s+(?:[\w-]+(?:=(?:"[^"]*)?)?)?)?', re.ASCII)
_ATTRIBUTE = re.compile(r'\s([\w-]+)="([^"]*)"', re.ASCII)


class ReplyParser:
    """Reads a reply id by id and tells thinking, text and tool calls apart.

    Made by ``ChatFormat.parser``. It accepts whatever a model may write: an element that is missing its
    closing tag ends where the next one starts, unknown elements are looked through, other control tokens
    are dropped, text outside every element counts as text. A call is delivered once it has ended, so one
    that is cut off is not; its id is "call_N", counted from 1 in each reply. ``done`` turns true when the
    message has ended; what comes later is not part of it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        thinking: bool,
        markers: Sequence[str] = (),
        ends: Sequence[str] = (),
    ) -> None:
        """Start inside the thinking or the response. ``markers`` names open, close and separator, if any."""
        self.done = False
        self._tokenizer = tokenizer
        self._decoder = tokenizer.decoder()
        self._ends = tokenizer.stop_ids | {tokenizer.special[name] for name in ends}
        self._control = self._ends | set(tokenizer.special.values())
        self._markers = [tokenizer.special[name] for name in markers]
        self._where = "think" if thinking else "response"  # or "call", "value", or "between" elements
        self._tag: list[int] | None = None  # ids of the tag being read
        self._closing = self._quoted = False
        self._call: _Call | None = None
        self._new: list[Piece] = []
        self._said: dict[str, list[str]] = {"thinking": [], "text": []}
        self._calls: list[dict[str, Any]] = []

    def push(self, id: int) -> list[Piece]:
        """Take the next id and return what has become certain with it."""
        if not self.done:
            if id in self._control:
                self._control_id(id)
            elif self._tag is None:
                self._hear(self._decoder.push(id))
            else:
                self._tag.append(id)
                self._check_tag(self._tag)
        return self._take()

    def finish(self) -> list[Piece]:
        """End the reply where it stands: an unfinished tag or call is dropped."""
        if not self.done:
            self._hear(self._decoder.flush())
            self.done = True
        return self._take()

    def message(self) -> dict[str, Any]:
        """Return the assistant message so far; reasoning_content and tool_calls only if there are any."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._said["text"])}
        if self._said["thinking"]:
            message["reasoning_content"] = "".join(self._said["thinking"])
        if self._calls:
            message["tool_calls"] = list(self._calls)
        return message

    def _take(self) -> list[Piece]:
        new, self._new = self._new, []
        return new

    def _control_id(self, id: int) -> None:
        if id not in self._ends and id not in self._markers:
            return
        self._hear(self._decoder.flush())
        if self._tag is not None:  # a tag also ends where the next marker comes too early
            tag, self._tag = self._tokenizer.decode(self._tag), None
            name = "".join(tag.split(maxsplit=1)[:1])
            if self._closing:
                self._close(name)
            else:
                self._open(name, dict(_ATTRIBUTE.findall(tag)))
        if id in self._ends:
            self.done = True
        elif id in self._markers[:2]:
            self._tag, self._closing, self._quoted = [], id == self._markers[1], False

    def _check_tag(self, ids: list[int]) -> None:
        """Give up on a tag that cannot become one: then it was text."""
        token = self._tokenizer.token_bytes(ids[-1])
        self._quoted ^= token.count(b'"') % 2 == 1
        if self._quoted and b'"' not in token:
            return  # anything may stand between quotes, and long names need no second look
        # An unfinished character at the end must not decide.
        if not _TAG_SO_FAR.fullmatch(self._tokenizer.decode(ids).rstrip("\ufffd")):
            self._tag = None
            for id in ids:
                self._hear(self._decoder.push(id))

    def _hear(self, text: str) -> None:
        if self._where == "value" and self._call is not None:
            self._call.value.append(text)
        elif self._where in ("think", "response", "between"):
            if self._where == "between":
                text = text.lstrip()
                self._where = "response" if text else "between"
            kind = "thinking" if self._where == "think" else "text"
            if text:
                self._said[kind].append(text)
                self._new.append(Piece(text, kind))

    def _open(self, name: str, attributes: dict[str, str]) -> None:
        values = {key: value.replace("&quot;", '"').replace("&amp;", "&") for key, value in attributes.items()}
        if name in ("argument", "json") and self._call is not None:
            self._call.end_value()
            self._call.start_value(name, values)
            self._where = "value"
        elif name in ("think", "response", "tools", "call", "message"):
            self._end_call()
            self._where = name if name in ("think", "response", "call") else "between"
            self._call = _Call(values.get("tool", "")) if name == "call" else None
            self.done = name == "message"

    def _close(self, name: str) -> None:
        if name in ("argument", "json") and self._call is not None:
            self._call.end_value()
            self._where = "call"
        elif name in ("call", "tools", "message"):
            self._end_call()
            self._where = "between"
        elif name == self._where:
            self._where = "between"

    def _end_call(self) -> None:
        call, self._call = self._call, None
        if call is not None and call.tool:
            call.end_value()
            function = {"name": call.tool, "arguments": call.arguments()}
            self._calls.append({"id": f"call_{len(self._calls) + 1}", "type": "function", "function": function})
            self._new.append(Piece("", "call", self._calls[-1]))


@dataclass
class _Call:
    """A tool call while it is being read."""

    tool: str
    literals: dict[str, str] = field(default_factory=dict)  # argument name to its value as JSON
    raw: str | None = None  # the text of a json element, which wins over arguments
    element: tuple[str, dict[str, str]] | None = None  # the open argument or json element
    value: list[str] = field(default_factory=list)  # its text so far

    def start_value(self, name: str, attributes: dict[str, str]) -> None:
        self.element, self.value = (name, attributes), []

    def end_value(self) -> None:
        if self.element is None:
            return
        (name, attributes), text, self.element = self.element, "".join(self.value), None
        if name == "json":
            self.raw = text
        elif "key" in attributes:
            self.literals[attributes["key"]] = _literal(text, attributes.get("type", "string"))

    def arguments(self) -> str:
        if self.raw is not None:
            return self.raw if self.raw.strip() else "{}"
        members = (f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in self.literals.items())
        return f"{{{', '.join(members)}}}"


def _literal(text: str, type: str) -> str:
    """Return an argument's text as JSON: as it stands if it is some, unless its type says string."""
    if type != "string":
        with suppress(ValueError, RecursionError):
            JSON.decode(text)
            return text.strip()
    return json.dumps(text, ensure_ascii=False)
