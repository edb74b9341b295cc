"""The documents are true: snippets run, the command line's page is its help, nothing points to one machine.

``python tests/test_docs.py --write`` writes ``docs/cli.md`` anew.
"""

import ast
import inspect
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from deltafin.cli import main

ROOT = Path(__file__).parents[1]
CLI_PAGE = ROOT / "docs" / "cli.md"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# Snippets

FENCE = re.compile(
    r"(?P<skip>^[ ]*<!-- not run -->\s*)?^(?P<indent>[ ]*)```python\n(?P<code>.*?)^(?P=indent)```[ ]*$",
    re.MULTILINE | re.DOTALL,
)


def snippets(page: str) -> Iterator[tuple[int, str]]:
    """Line number and code of every ```python block that is not marked ``<!-- not run -->``."""
    for match in FENCE.finditer(page):
        if not match["skip"]:
            yield page.count("\n", 0, match.start("code")), textwrap.dedent(match["code"])


def run_snippets(page: str, file: str) -> None:
    """Run a page's snippets from top to bottom in one namespace."""
    namespace = {"__name__": "__main__"}
    for line, code in snippets(page):
        exec(compile("\n" * line + code, file, "exec"), namespace)


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_snippets_run(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_snippets(path.read_text(encoding="utf-8"), str(path))


def test_a_wrong_snippet_is_found_with_its_line():
    page = "Text\n\n```python\nx = 1\n```\n\n- item\n\n  ```python\n  x += 1\n  assert x == 3\n  ```\n"
    with pytest.raises(AssertionError) as caught:
        run_snippets(page, "page.md")
    assert caught.traceback[-1].lineno == page[: page.index("assert")].count("\n")


def test_only_marked_snippets_are_left_out():
    mark = "<!-- not run -->\n"
    page = f"{mark}```python\na\n```\n```python\nb\n```\n```\nc\n```\n{mark}\n```python\nd\n```\n"
    assert [code for _, code in snippets(page)] == ["b\n"]


# Links

LINK = re.compile(r"\]\((?![a-z]+:)(?P<target>[^)#\s]+)[^)]*\)")


@pytest.mark.parametrize("path", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=name)
def test_links_lead_somewhere(path):
    targets = [match["target"] for match in LINK.finditer(path.read_text(encoding="utf-8"))]
    assert [target for target in targets if not (path.parent / target).exists()] == []


# The command line's page


def help_of(*command: str) -> str:
    result = CliRunner().invoke(main, [*command, "--help"], prog_name="deltafin", terminal_width=100)
    assert result.exit_code == 0, result.output
    title = " ".join(["deltafin", *command])
    return f"## {title}\n\n```text\n{result.output.rstrip()}\n```\n"


def cli_page() -> str:
    """``docs/cli.md``: the help of the group and of each command."""
    note = "What `--help` prints; `python tests/test_docs.py --write` writes this page anew.\n"
    return "\n".join(["# The command line\n", note, help_of(), *map(help_of, main.commands)])


def test_cli_page_is_the_help():
    assert CLI_PAGE.read_text(encoding="utf-8") == cli_page()


# Source files


def tracked(pattern: str = "*") -> list[Path]:
    """Files of the project, those not yet committed included."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", pattern]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    return [path for path in map(ROOT.joinpath, filter(None, listed.split("\0"))) if path.is_file()]


ONE_MACHINE = re.compile(r"(?<![\w/.])/(?:root|home|Users)/")


def places(text: str) -> list[str]:
    """Paths that mean something on one machine alone."""
    return [match.group() for match in ONE_MACHINE.finditer(text)]


def test_nothing_points_to_one_machine():
    found = {}
    for path in tracked():
        content = path.read_bytes()
        if path != Path(__file__) and b"\0" not in content and (hits := places(content.decode("utf-8"))):
            found[name(path)] = hits
    assert found == {}


@pytest.mark.parametrize("text", ["cd /" + "root/x", "see /home/me/notes", "(/Users/me/x)"])
def test_a_path_of_one_machine_is_found(text):
    assert places(text)


def text_without_encoding(source: str) -> list[int]:
    """Lines that open, read or write a text file without ``encoding="utf-8"``."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        match node.func:
            case ast.Name(id="open"):
                files = True
            case ast.Attribute(attr="open"):  # of a path: no argument, or a mode; else a method of our own
                files = not node.args or any(mode(node))
            case ast.Attribute(attr="read_text" | "write_text"):
                files = True
            case _:
                files = False
        encodings = [k.value.value for k in node.keywords if k.arg == "encoding" and isinstance(k.value, ast.Constant)]
        if files and "b" not in "".join(mode(node)) and encodings != ["utf-8"]:
            lines.append(node.lineno)
    return lines


def mode(call: ast.Call) -> Iterator[str]:
    """The arguments of ``call`` that look like a file's mode."""
    for value in [*call.args, *(k.value for k in call.keywords if k.arg == "mode")]:
        if isinstance(value, ast.Constant) and re.fullmatch(r"[rwax][bt+]*", str(value.value)):
            yield str(value.value)


def test_text_files_name_their_encoding():
    found = {name(path): text_without_encoding(path.read_text(encoding="utf-8")) for path in tracked("*.py")}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("code", "bad"),
    [
        ("open(path)", True),
        ("open(path, 'w')", True),
        ("open(path, encoding='latin-1')", True),
        ("path.open()", True),
        ("path.open('a')", True),
        ("path.read_text()", True),
        ("path.write_text(text)", True),
        ("open(path, 'rb')", False),
        ("path.open(mode='wb')", False),
        ("open(path, 'w', encoding='utf-8')", False),
        ("path.open(encoding='utf-8')", False),
        ("path.write_text(text, encoding='utf-8')", False),
        ("Tokenizer.open(path)", False),
    ],
)
def test_a_missing_encoding_is_found(code, bad):
    assert bool(text_without_encoding(code)) == bad


@pytest.mark.parametrize("function", ["advance", "forward"])
def test_the_forward_page_is_quoted_as_it_is(function):
    from deltafin.model import decoder

    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert inspect.getsource(getattr(decoder, function)) in page


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    CLI_PAGE.write_text(cli_page(), encoding="utf-8")
