"""Shows a reply while it streams: prose wrapped by words, headings and bold styled, code just as it came."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import click
from rich.cells import cell_len

from deltafin.cli.text import plain

# Chinese, Japanese and Korean text has no spaces: a line may end after each of its characters.
WIDE = "\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60\U00020000-\U0003fffd"
TOKEN = re.compile(rf"\n|[ \t]+|[{WIDE}]|[^ \t\n{WIDE}]+")
FENCE = re.compile(r"(`{3,}|~{3,})[^`]*")
BULLET = re.compile(r"[-*+>]|\d{1,3}[.)]")


@dataclass
class Painter:
    """Writes markdown word by word and never goes back over what is written.

    In prose a space that does not fit becomes a line end. Code, tables and lines indented by four columns are
    written as they came, so that they can be copied. A ``width`` of 0 writes everything as it comes.
    """

    write: Callable[[str], object]
    width: int = 0
    styled: bool = False
    dim: bool = False
    held: str = ""  # the last token, which may still grow
    space: str = ""  # what stands before the next word, unless the line ends there
    kind: str = "start"  # of the line: start, prose, heading, fence, verbatim
    fence: str = ""  # the marks that opened the code block we are in
    column: int = 0
    indent: int = 0
    bold: bool = False
    code: bool = False

    def push(self, text: str) -> None:
        """Write the words that are whole now; the last one waits for what follows."""
        text = plain(text)
        if not self.width:
            self._put(text)
            return
        tokens = TOKEN.findall(self.held + text)
        self.held = tokens.pop() if tokens and tokens[-1] != "\n" else ""
        for token in tokens:
            self._token(token)

    def finish(self) -> None:
        """Write what was held and end the line."""
        if self.held:
            self._token(self.held)
        if self.column:
            self._put("\n")
        self.held = self.fence = ""
        self._start_line()

    def _token(self, token: str) -> None:
        if token == "\n":
            self._put(self.space * bool(self.fence) + token)
            self._start_line()
        elif token[0] in " \t":
            self.space = token
        else:
            if self.kind == "start":
                self._first_word(token)
            self._word(token)

    def _start_line(self) -> None:
        self.kind, self.space, self.indent = "start", "", 0
        self.bold = self.code = False

    def _first_word(self, word: str) -> None:
        """Decide by its first word what kind of line this is."""
        self.indent = len(self.space.expandtabs(4))
        opening = FENCE.fullmatch(word)
        if self.fence:
            closing = len(word) >= len(self.fence) and not word.strip(self.fence[0])
            self.kind = "fence" if closing else "verbatim"
            self.fence = "" if closing else self.fence
        elif opening and self.indent < 4:
            self.kind, self.fence = "fence", opening[1]
        elif self.indent >= 4 or word.startswith("|"):
            self.kind = "verbatim"
        elif len(word) <= 6 and not word.strip("#"):
            self.kind = "heading"
        else:
            self.kind = "prose"
            if BULLET.fullmatch(word):
                self.indent += len(word) + 1

    def _word(self, word: str) -> None:
        fits = self.column + len(self.space) + cell_len(word) <= self.width
        if self.kind in ("prose", "heading") and self.column and not fits:
            self.space = "\n" + " " * min(self.indent, self.width // 3)
        self._put(self.space)
        self.space = ""
        if self.kind != "prose" or word == "**":
            self._put(word, dim=self.kind == "fence", bold=self.kind == "heading")
            return
        for part in re.split(r"(\*\*|`+)", word):
            mark = part == "**" and not self.code
            self._put(part, bold=self.bold or mark)
            self.bold ^= mark
            self.code ^= part.startswith("`")

    def _put(self, text: str, dim: bool = False, bold: bool = False) -> None:
        _, newline, line = text.rpartition("\n")
        self.column = cell_len(line) + (0 if newline else self.column)
        dim = dim or self.dim
        if self.styled and (dim or bold) and text.strip():
            text = click.style(text, dim=dim or None, bold=bold or None)
        if text:
            self.write(text)
