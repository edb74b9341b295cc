"""The talk at a terminal or in a pipe: reads messages and slash commands, shows each answer as it streams."""

import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from safetensors import SafetensorError, safe_open

from deltafin.chat import UNSET
from deltafin.cli import show
from deltafin.cli.markdown import Painter
from deltafin.cli.reading import QUOTES, Stop, keys_kept
from deltafin.cli.stats import account
from deltafin.cli.text import columns, speed
from deltafin.errors import DeltafinError, UsageError

if TYPE_CHECKING:
    from deltafin.api import Model
    from deltafin.sampling import Sampler

NANO = "Nano is a 17M-parameter demonstration model; it likes stories, sums and questions about Saltmere."
TRY = """Try:
  Tell me a story about a fox and a lantern.
  What is 347 + 285?
  What pet does Owen have?
"""


@dataclass
class Talk:
    """One conversation and how it is shown: answers go to stdout, all else to stderr.

    ``terminal`` says that a person reads along: then there is style, thinking and status, else only answers.
    """

    model: "Model"
    sampler: "Sampler"
    system: str | None = None
    max_tokens: int = 512
    thinking: bool | None = None
    effort: str = UNSET
    stats: bool = False
    terminal: bool = False
    failed: bool = False

    def __post_init__(self) -> None:
        console = Console()
        self.styled = self.terminal and console.color_system is not None and not console.no_color
        self.thinking_shown = self.terminal
        if self.stats:
            self.model.watch()
        self.begin(self.system)

    def begin(self, system: str | None) -> None:
        """Begin a conversation; raises now, not at the first message, if the model cannot talk."""
        _ = self.model.chat_format
        self.conversation = self.model.session(system, thinking=self.thinking, effort=self.effort)

    def loop(self, read: Callable[[], str]) -> None:
        """Answer what ``read`` returns until it raises EOFError, or KeyboardInterrupt twice."""
        self.greet()
        leaving = False
        while True:
            try:
                text = read().strip()
            except EOFError:
                break
            except KeyboardInterrupt:
                if not self.terminal:
                    raise
                if leaving:
                    break
                leaving = True
                self.note("Ctrl-C again leaves, and so does Ctrl-D.")
                continue
            leaving = False
            try:
                if self.turn(text):
                    break
            except DeltafinError as error:
                self.failed = True
                show(error)
            except KeyboardInterrupt:
                if not self.terminal:
                    raise
                self.note("(stopped)")
        if self.terminal:
            self.note("Goodbye.")

    def greet(self) -> None:
        """Say in one line what the model is, and how to get help."""
        if self.terminal:
            facts = self.model.info()
            other = f"{self.model.name}: {facts['family']}, {facts['parameters']:,} parameters."
            self.note((NANO if self.model.name == "nano" else other) + " /help lists the commands.")
            self.note(TRY if self.model.name == "nano" else "")

    def turn(self, text: str) -> bool:
        """Do a command or answer a message; true when the command was to leave."""
        text = text.encode("utf-8", "replace").decode("utf-8")
        if text.startswith(QUOTES):
            text = text.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")
        elif text.startswith("//"):
            text = text[1:]
        elif text.startswith("/"):
            name, *rest = text.split(maxsplit=1)
            if name not in COMMANDS:
                hint = "/help lists the commands; // at the start sends a slash"
                raise UsageError(f"there is no command {name!r}", hint)
            return bool(COMMANDS[name][2](self, "".join(rest)))
        if text:
            self.answer(text)
        return False

    def answer(self, text: str | None) -> None:
        """Show the reply to ``text`` (None: a reply to the messages as they stand) while it comes."""
        talk = self.conversation
        count = len(talk.messages)
        pieces = talk.chat(text, sampler=self.sampler, max_tokens=self.max_tokens, thinking=self.thinking)
        kind, painter = "", self.painter("text")
        with ExitStack() as stack:
            stop = Stop()
            if self.terminal:
                stack.enter_context(keys_kept())
                stack.enter_context(stop)
            stack.enter_context(closing(pieces))
            try:
                for piece in pieces:
                    if piece.kind != kind:
                        painter.finish()
                        kind, painter = piece.kind, self.start(piece.kind, kind)
                    if piece.call:
                        painter.push("calls {name}({arguments})\n".format(**piece.call["function"]))
                    elif kind != "thinking" or self.thinking_shown:
                        painter.push(piece)
                    if stop.pressed:
                        break
            except DeltafinError:
                del talk.messages[count:]  # or the next answer would fail as this one did
                raise
            finally:
                painter.finish()
        self.conclude(stop.pressed)

    def start(self, kind: str, before: str) -> Painter:
        """Begin a part of a reply, set apart from the part ``before``."""
        if kind == "thinking" and (self.terminal or self.thinking_shown):
            self.note("thinking" if self.thinking_shown else "thinking ...")
        elif before == "thinking" and self.thinking_shown:
            self.note("")
        return self.painter(kind)

    def conclude(self, stopped: bool) -> None:
        """Say how the reply ended, where that is not plain to see."""
        if stopped:
            self.note("(stopped)")
        elif self.conversation.stats.finish_reason == "length":
            self.note(f"(stopped at {self.max_tokens} tokens; --max-tokens allows more)")
        if self.stats:
            self.note(account(self.conversation.stats, self.model))
        if self.terminal:
            self.note("")

    def painter(self, kind: str) -> Painter:
        """Return a fresh painter: the answer's on stdout, or a dimmed one on stderr."""
        width = shutil.get_terminal_size().columns if self.terminal else 0
        aside = kind != "text"

        def write(text: str) -> None:
            click.echo(text, nl=False, err=aside, color=self.styled)

        return Painter(write, width, self.styled, dim=aside)

    def note(self, text: str) -> None:
        """Say something about the talk, on stderr."""
        painter = self.painter("note")
        painter.push(text + "\n")
        painter.finish()

    def status(self) -> str:
        """Return the line under the prompt: model, length of the context, speed of the last answer."""
        stats = self.conversation.stats
        parts = [self.model.name, f"{len(self.conversation.tokens)} tokens"]
        if stats.generated_tokens:
            parts.append(f"{speed(stats):.1f} tokens/s")
        return " " + " | ".join(parts)

    # The slash commands.

    def help(self, argument: str) -> None:
        """List the commands."""
        rows = [(f"{name} {argument}", text) for name, (argument, text, _) in COMMANDS.items()]
        keys = "Alt-Enter or Ctrl-J: new line. Ctrl-C: stop the answer. Ctrl-D: leave. //: send a slash."
        click.echo(f"{columns(rows)}\n{keys}\n{QUOTES} begins and ends a message of several lines.", err=True)

    def reset(self, argument: str) -> None:
        """Forget the conversation."""
        self.conversation.reset()
        self.note("The conversation is forgotten; the system prompt stays.")

    def change_system(self, argument: str) -> None:
        """Begin again with another system prompt, or show it."""
        if argument:
            self.begin(argument)
            self.note("New conversation with this system prompt.")
        else:
            first = next(iter(self.conversation.messages), {"role": ""})
            told = first["role"] == "system"
            self.note(f"System prompt: {first['content']}" if told else "There is no system prompt.")

    def think(self, argument: str) -> None:
        """Switch thinking, or whether it is shown."""
        if argument in ("on", "off"):
            self.thinking = argument == "on"
        elif argument in ("show", "hide"):
            self.thinking_shown = argument == "show"
        elif argument:
            raise UsageError(f"/think {argument} means nothing", "one of on, off, show, hide")
        state = {None: "left to the model", True: "on", False: "off"}[self.thinking]
        self.note(f"Thinking is {state} and {'shown' if self.thinking_shown else 'hidden'}.")

    def show_stats(self, argument: str) -> None:
        """Show tokens and speed of the last answer, or of every answer from now on."""
        if argument in ("on", "off"):
            self.stats = argument == "on"
            if self.stats:
                self.model.watch()
            self.note(f"Statistics after each answer: {argument}.")
        elif argument:
            raise UsageError(f"/stats {argument} means nothing", "nothing, on or off")
        else:
            talk = self.conversation
            self.note(f"Last answer: {account(talk.stats, self.model)}")
            self.note(f"Context: {len(talk.tokens)} tokens, {len(talk.messages)} messages.")

    def save(self, argument: str) -> None:
        """Write the conversation to a file."""
        path = file_named(argument, "/save")
        exists = os.path.lexists(path)
        if exists and not is_saved_talk(path):
            raise UsageError(f"{path} exists and is not a saved conversation", "give another name")
        self.conversation.save(path)
        self.note(f"Saved {len(self.conversation.messages)} messages {'again ' * exists}in {path}.")

    def load(self, argument: str) -> None:
        """Go on with a saved conversation."""
        path = file_named(argument, "/load")
        self.conversation = self.model.resume(path)
        self.note(f"Loaded {len(self.conversation.messages)} messages from {path}.")

    def retry(self, argument: str) -> None:
        """Answer the last message again."""
        messages = self.conversation.messages
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if not messages or messages[-1]["role"] == "system":
            raise UsageError("there is no message to answer again")
        if self.sampler.temperature == 0:
            self.note("(without --temperature the answer is the same)")
        self.answer(None)


def file_named(argument: str, command: str) -> Path:
    """Return the path a command was given."""
    if not argument:
        raise UsageError(f"{command} needs the name of a file", f"{command} FILE")
    return Path(os.path.expanduser(argument))


def is_saved_talk(path: Path) -> bool:
    """Say whether a file is one that /save wrote."""
    try:
        with safe_open(path, "np") as file:
            return "deltafin" in (file.metadata() or {})
    except (OSError, SafetensorError):
        return False


COMMANDS: dict[str, tuple[str, str, Callable[[Talk, str], object]]] = {
    "/help": ("", "this list", Talk.help),
    "/reset": ("", "forget the conversation, keep the system prompt", Talk.reset),
    "/system": ("TEXT", "begin again with this system prompt", Talk.change_system),
    "/think": ("on|off|show|hide", "switch thinking, or whether it is shown", Talk.think),
    "/stats": ("[on|off]", "tokens, speed and times of the last answer, or of every one", Talk.show_stats),
    "/save": ("FILE", "keep the conversation in a file", Talk.save),
    "/load": ("FILE", "go on with a saved conversation", Talk.load),
    "/retry": ("", "answer the last message again", Talk.retry),
    "/quit": ("", "leave", lambda talk, argument: True),
}
WORDS = [*COMMANDS, *(f"/think {word}" for word in ("on", "off", "show", "hide"))]
