"""Reading a message from a keyboard, with editing, history and completion, or from a pipe; and Ctrl-C."""

import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

try:
    import termios
except ImportError:  # Windows has none, and needs none
    termios = None

QUOTES = '"""'


def unfinished(text: str) -> bool:
    """Say whether a message in triple quotes lacks the closing ones."""
    text = text.strip()
    return text.startswith(QUOTES) and (len(text) < 2 * len(QUOTES) or not text.endswith(QUOTES))


class History(FileHistory):
    """The typed lines of earlier talks; where the file cannot be read or written there is just no history."""

    def load_history_strings(self) -> Iterable[str]:
        """Return the lines of earlier talks, the newest first."""
        try:
            return super().load_history_strings()
        except OSError:
            return []

    def store_string(self, string: str) -> None:
        """Add a line to the file."""
        with suppress(OSError):
            Path(str(self.filename)).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            super().store_string(string)


def keyboard(words: list[str], status: Callable[[], str], history: Path) -> Callable[[], str]:
    """Return a function that reads a message from the keyboard.

    Lines that start like one of ``words`` are completed; ``status`` is the line below; ``history`` is a file.
    """
    keys = KeyBindings()

    @keys.add("escape", "enter")
    @keys.add("c-j")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("enter")
    def enter(event: KeyPressEvent) -> None:
        if unfinished(event.current_buffer.text):
            event.current_buffer.insert_text("\n")
        else:
            event.current_buffer.validate_and_handle()

    @keys.add("c-c")
    def clear(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt)

    session: PromptSession[str] = PromptSession(
        "> ",
        multiline=True,  # Enter is ours: it ends the message
        prompt_continuation="  ",
        enable_suspend=True,
        history=History(history),
        completer=WordCompleter(words, sentence=True),
        key_bindings=keys,
        bottom_toolbar=status,
    )
    return session.prompt


class Stop:
    """A context in which the first Ctrl-C only sets ``pressed``; the second one raises KeyboardInterrupt.

    The first lets the token that is being made end in peace; the second does not wait for a long prompt.
    """

    pressed = False

    def __enter__(self) -> "Stop":
        self.previous = signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self.previous)

    def _press(self, number: int, frame: FrameType | None) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True


@contextmanager
def keys_kept() -> Iterator[None]:
    """Keep what is typed meanwhile for the next message, and do not show it in the middle of the answer."""
    if termios is None or not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    quiet = termios.tcgetattr(sys.stdin)
    quiet[0] &= ~termios.ICRNL  # Enter stays Enter; translated it would be the Ctrl-J of the next message
    quiet[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def pipe(stream: TextIO) -> Callable[[], str]:
    """Return a function that reads a message from a pipe: a line, or a block in triple quotes."""

    def read() -> str:
        text = line = stream.readline()
        while line and unfinished(text):
            line = stream.readline()
            text += line
        if not text:
            raise EOFError
        return text

    return read
