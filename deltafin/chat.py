"""Chat formats: messages to token ids.

A prompt is a list of segments, each encoded on its own. Only a format's own markers become control
ids, so nothing that people, tools or documents say can open or close a turn. Replies are read as ids
for the same reason: a marker spelled out in ordinary tokens is text.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from deltafin.errors import ChatError
from deltafin.reply import JSON, ReplyParser
from deltafin.tokenizer import Tokenizer

_ROLES = ("system", "user", "assistant", "tool")
Message: TypeAlias = Mapping[str, Any]
UNSET = "default"  # the effort a format uses when nobody asked for one; None means no effort message


@dataclass(frozen=True)
class Special:
    """A segment that is one control token, by name."""

    name: str


Segment: TypeAlias = str | Special


@dataclass(frozen=True)
class ChatFormat(ABC):
    """How one family of models writes a conversation."""

    tokenizer: Tokenizer
    name: ClassVar[str]
    default_thinking: ClassVar[bool]

    @abstractmethod
    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool | None = None,
        effort: str | None = UNSET,
        tool_choice: str | None = None,
        response_format: Mapping[str, Any] | None = None,
        generate: bool = True,
    ) -> list[Segment]:
        """Return OpenAI-style messages as segments, up to where the reply starts if ``generate``.

        ``thinking`` None means the format's default. Raises ChatError for what the format cannot express.
        """

    def encode(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """Return the token ids of ``render`` with the same arguments."""
        ids: list[int] = []
        for segment in self.render(messages, **options):
            if isinstance(segment, Special):
                ids.append(self.tokenizer.special[segment.name])
            else:
                ids += self.tokenizer.encode(segment)
        return ids

    @abstractmethod
    def parser(self, *, thinking: bool | None = None) -> ReplyParser:
        """Return a parser for the reply to a prompt that was rendered with the same ``thinking``."""


def chat_format(tokenizer: Tokenizer) -> ChatFormat:
    """Return the format whose control tokens a vocabulary has. Raises ChatError if it has neither's."""
    for kind, names in ((KimiK3, _K3_MARKERS), (KimiLinear, _LINEAR_MARKERS)):
        if all(name in tokenizer.special for name in names):
            return kind(tokenizer)
    raise ChatError(
        "the vocabulary has the control tokens of no chat format known here"
        f" ({' '.join(_K3_MARKERS)}, or {' '.join(_LINEAR_MARKERS)})",
        "the model can still continue plain text",
    )


# ---------------------------------------------------------------------------------- Kimi K3

_K3_MARKERS = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
_OPEN, _CLOSE, _SEP, _END = map(Special, _K3_MARKERS)
_EFFORTS = ("low", "high", "max")
# The texts below are protocol: the model was trained on exactly these bytes.
_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n"
_MORE_TOOLS = (
    "## New Tools Available\n"
    "The system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n\n"
)
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response"
    " channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
_CHOICE = "The system is invoked with `tool_choice={}`."
_CHOICES = {
    "required": "\nYou MUST call tools in the next message.",
    "none": "\nYou MUST NOT call any tools in the next message.",
}
_FORMAT = (
    "The system is invoked with `response_format={}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
)
_SCHEMA = "\nThe JSON data must match the following schema:\n"


@dataclass(frozen=True)
class KimiK3(ChatFormat):
    """Kimi K3's tagged messages with thinking, tools and response formats (spec: Kimi K3 chat format)."""

    name: ClassVar[str] = "kimi-k3"
    default_thinking: ClassVar[bool] = True

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool | None = None,
        effort: str | None = UNSET,
        tool_choice: str | None = None,
        response_format: Mapping[str, Any] | None = None,
        generate: bool = True,
    ) -> list[Segment]:
        """See ChatFormat. Effort is "max" unless set, and is only spoken of when thinking is on."""
        thinking = self.default_thinking if thinking is None else thinking
        effort = "max" if effort == UNSET else effort
        if effort is not None and effort not in _EFFORTS:
            raise ChatError(f"thinking effort {effort!r} is not supported", f"use {', '.join(_EFFORTS)}")
        segments: list[Segment] = []
        if tools:
            segments += _system("tool-declare", _TOOLS + _fence(_tool_list(tools, "tools")))
        if thinking and effort is not None:
            segments += _system("thinking-effort", _EFFORT.format(effort))
        segments += _conversation(messages, thinking)
        if tool_choice not in (None, "auto"):
            if not isinstance(tool_choice, str) or tool_choice not in _CHOICES:
                raise ChatError(f"tool_choice {tool_choice!r} is not supported", "use auto, required or none")
            segments += _system("tool-choice", _CHOICE.format(tool_choice) + _CHOICES[tool_choice])
        if text := _response_format(response_format):
            segments += _system("response-format", text)
        if generate:
            segments += _tag("message", role="assistant") + _tag("think" if thinking else "response")
        return [segment for segment in segments if segment]

    def parser(self, *, thinking: bool | None = None) -> ReplyParser:
        """See ChatFormat."""
        return ReplyParser(
            self.tokenizer,
            thinking=self.default_thinking if thinking is None else thinking,
            markers=(_OPEN.name, _CLOSE.name, _SEP.name),
        )


def _tag(element: str, /, **attributes: object) -> list[Segment]:
    """Open an element; names, values and the signs between them are separate segments."""
    segments: list[Segment] = [_OPEN, element]
    for key, value in attributes.items():
        segments += [f" {key}", '="', str(value).replace("&", "&amp;").replace('"', "&quot;"), '"']
    return [*segments, _SEP]


def _element(tag: list[Segment], *body: Segment) -> list[Segment]:
    """Put a body between an opening tag and its closing tag."""
    return [*tag, *body, _CLOSE, tag[1], _SEP]


def _message(tag: list[Segment], *body: Segment) -> list[Segment]:
    return [*_element(tag, *body), _END]


def _system(type: str, text: str) -> list[Segment]:
    return _message(_tag("message", role="system", type=type), text)


def _tool_list(tools: object, where: str) -> object:
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ChatError(f"{where} must be a list of tools", 'like [{"type": "function", "function": {...}}]')
    return tools


def _fence(value: object) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ChatError(f"a tool declaration or schema cannot be written as JSON: {error}") from None
    return f"```json\n{text}\n```"


def _response_format(wanted: Mapping[str, Any] | None) -> str:
    kind = wanted.get("type") if isinstance(wanted, Mapping) else wanted
    if wanted is None or kind == "text":
        return ""
    if kind == "json_object":
        return _FORMAT.format(kind)
    schema = wanted.get("json_schema") if isinstance(wanted, Mapping) and kind == "json_schema" else None
    if isinstance(schema, Mapping) and isinstance(schema.get("schema"), Mapping):
        return _FORMAT.format(kind) + _SCHEMA + _fence(schema["schema"])
    raise ChatError(
        f"response_format {wanted!r} is not supported",
        'use {"type": "json_object"} or {"type": "json_schema", "json_schema": {"schema": {...}}}',
    )


_Placed: TypeAlias = tuple[str, Message]  # where a message stands, for errors, and the message
_Function: TypeAlias = tuple[str, list[Segment]]  # a called function's name, its arguments as elements


def _conversation(messages: Sequence[Message], thinking: bool) -> list[Segment]:
    """Render the messages themselves; tool results are named and numbered by the calls before them."""
    segments: list[Segment] = []
    calls: list[tuple[object, str]] = []  # id and name of each call of the last assistant message
    results = 0  # since that message
    waiting: list[_Placed] = []  # a run of tool results
    for where, message in _checked(messages):
        if message["role"] == "tool":
            waiting.append((where, message))
            continue
        segments += _tool_results(waiting, calls, results)
        results += len(waiting)
        waiting = []
        named = {"name": _word(message["name"], where, "name")} if message.get("name") else {}
        tag = _tag("message", role=message["role"], **named)
        if message["role"] == "assistant":
            wanted = message.get("tool_calls") or []
            if not isinstance(wanted, Sequence) or isinstance(wanted, str):
                raise ChatError(f"{where} has tool_calls that are not a list")
            functions = [_function(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(wanted)]
            calls = [(call.get("id"), name) for call, (name, _) in zip(wanted, functions, strict=True)]
            results = 0
            segments += _message(tag, *_assistant(message, where, functions, thinking))
        elif message["role"] == "system" and message.get("tools"):
            tools = _tool_list(message["tools"], f"{where}.tools")
            segments += _system("tool-declare", _MORE_TOOLS + _fence(tools))
        else:
            segments += _message(tag, _text(message, where))
    return segments + _tool_results(waiting, calls, results)


def _assistant(message: Message, where: str, functions: list[_Function], thinking: bool) -> list[Segment]:
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    if not isinstance(reasoning, str):
        raise ChatError(f"{where} has reasoning that is not text")
    text = _text(message, where, optional=bool(functions or reasoning))
    body = _element(_tag("think"), reasoning) if thinking else []
    body += _element(_tag("response"), text)
    if functions:
        calls: list[Segment] = []
        for number, (name, arguments) in enumerate(functions, 1):
            calls += _element(_tag("call", tool=name, index=number), *arguments)
        body += _element(_tag("tools"), *calls)
    return body


def _function(call: Any, where: str) -> _Function:
    """Return a tool call's name and its arguments as elements."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise ChatError(f"{where} is not a tool call", 'use {"function": {"name": ..., "arguments": ...}}')
    name, arguments = _word(function.get("name"), where, "name"), function.get("arguments")
    if isinstance(arguments, str):
        literals = _members(arguments) if arguments.strip() else {}
        if literals is None:
            return name, _element(_tag("json", type="object"), arguments)
    elif arguments is None or isinstance(arguments, Mapping):
        try:
            literals = {
                _word(key, where, "argument name"): json.dumps(value, ensure_ascii=False, allow_nan=False)
                for key, value in (arguments or {}).items()
            }
        except (TypeError, ValueError, RecursionError) as error:
            raise ChatError(f"{where} has arguments that cannot be written as JSON: {error}") from None
    else:
        raise ChatError(f"{where} has arguments that are neither a dict nor JSON text")
    segments: list[Segment] = []
    for key, literal in literals.items():
        value = JSON.decode(literal)
        text = value if isinstance(value, str) else literal
        segments += _element(_tag("argument", key=key, type=_type(value)), text)
    return name, segments


def _type(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    return {str: "string", float: "number", dict: "object", list: "array"}[type(value)]  # from JSON


def _tool_results(run: list[_Placed], calls: list[tuple[object, str]], before: int) -> list[Segment]:
    """Render results that follow one another: in the order of the calls if every id is one of theirs."""
    ids = [id for id, _ in calls]
    matched = all(m.get("tool_call_id") is not None and m["tool_call_id"] in ids for _, m in run)
    if matched:
        run = sorted(run, key=lambda item: ids.index(item[1]["tool_call_id"]))
    segments: list[Segment] = []
    for number, (where, message) in enumerate(run, before + 1):
        if matched:
            name = calls[ids.index(message["tool_call_id"])][1]
        else:
            at_position = calls[number - 1][1] if number <= len(calls) else None
            name = message.get("tool") or message.get("name") or at_position
        if name is None:
            raise ChatError(
                f"{where} is a tool result that belongs to no call and names no tool",
                "give it the tool_call_id of a call in the assistant message before it, or a name",
            )
        tag = _tag("message", role="tool", tool=_word(name, where, "tool name"), index=number)
        segments += _message(tag, _text(message, where))
    return segments


# ---------------------------------------------------------------------------------- Kimi Linear

_LINEAR_MARKERS = ("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>")


@dataclass(frozen=True)
class KimiLinear(ChatFormat):
    """Kimi Linear's plain turns: no thinking, no tools (spec: Kimi Linear chat)."""

    name: ClassVar[str] = "kimi-linear"
    default_thinking: ClassVar[bool] = False

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool | None = None,
        effort: str | None = UNSET,
        tool_choice: str | None = None,
        response_format: Mapping[str, Any] | None = None,
        generate: bool = True,
    ) -> list[Segment]:
        """See ChatFormat. Reasoning of earlier turns is left out."""
        _no_thinking(thinking or effort not in (UNSET, None))
        if tools or tool_choice not in (None, "auto", "none"):
            raise ChatError("the Kimi Linear format here has no tools", "leave tools and tool_choice out")
        if response_format is not None and response_format != {"type": "text"}:
            raise ChatError("the Kimi Linear format here has no response formats", "leave it out")
        segments: list[Segment] = []
        for where, message in _checked(messages):
            if message["role"] == "tool" or message.get("tool_calls") or message.get("tools"):
                raise ChatError(f"{where} is about tools: the Kimi Linear format here has no tools")
            name = _word(message.get("name") or message["role"], where, "name")
            text = _text(message, where)
            segments += [Special(f"<|im_{message['role']}|>"), name, Special("<|im_middle|>"), text]
            segments.append(Special("<|im_end|>"))
        if generate:
            segments += [Special("<|im_assistant|>"), "assistant", Special("<|im_middle|>")]
        return [segment for segment in segments if segment]

    def parser(self, *, thinking: bool | None = None) -> ReplyParser:
        """See ChatFormat. Everything up to a control token of the format is text."""
        _no_thinking(thinking)
        return ReplyParser(self.tokenizer, thinking=False, ends=_LINEAR_MARKERS)


def _no_thinking(thinking: bool | None) -> None:
    if thinking:
        raise ChatError("the Kimi Linear format has no thinking", "leave thinking and effort out")


# ---------------------------------------------------------------------------------- messages


def _checked(messages: Sequence[Message]) -> Iterable[_Placed]:
    if isinstance(messages, str | Mapping):
        raise ChatError("messages must be a list of messages", 'like [{"role": "user", "content": "Hi"}]')
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ChatError(f"messages[{i}] is {message!r:.60}, not a message with a role and a content")
        if message.get("role") not in _ROLES:
            role = message.get("role")
            raise ChatError(f"messages[{i}] has the unknown role {role!r}", f"use {', '.join(_ROLES)}")
        yield f"messages[{i}]", message


def _text(message: Message, where: str, *, optional: bool = False) -> str:
    """Return a message's content: a string, or text parts joined; None counts as empty if ``optional``."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and optional:
        return ""
    if not isinstance(content, list):
        raise ChatError(f"{where} ({message['role']}) has the content {content!r:.60}, where text is needed")
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else "text"
        text = part.get("text") if isinstance(part, Mapping) else part
        if kind != "text" or not isinstance(text, str):
            raise ChatError(f"{where} has a content part of type {kind!r}; only text is supported here")
        texts.append(text)
    return "".join(texts)


def _word(value: object, where: str, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise ChatError(f"{where} needs a {what} that is a text, not {value!r:.60}")
    return value


_SPACE = re.compile(r"[ \t\r\n]*")


def _members(text: str) -> dict[str, str] | None:
    """Return the members of a JSON object, each value as it is written; None if it is no object.

    What follows the object is ignored, as in the reference encoder.
    """

    def skip(at: int) -> int:
        return _SPACE.match(text, at).end()  # pyright: ignore[reportOptionalMemberAccess]

    start = skip(0)
    try:
        whole, _ = JSON.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    if not isinstance(whole, dict):
        return None
    members: dict[str, str] = {}
    at = skip(start + 1)
    while text[at] != "}":
        key, at = JSON.raw_decode(text, at)
        at = skip(skip(at) + 1)  # past the colon
        _, end = JSON.raw_decode(text, at)
        members[key] = text[at:end]
        at = skip(end)
        if text[at] == ",":
            at = skip(at + 1)
    return members
