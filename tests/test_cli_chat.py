"""The talk: slash commands, Ctrl-C, the keyboard, the pipe, and how a reply is painted."""

import io
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prompt_toolkit.application import create_app_session
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.cells import cell_len
from safetensors.numpy import save_file

from deltafin.cli.chat import COMMANDS, WORDS, Talk, file_named, is_saved_talk
from deltafin.cli.markdown import Painter
from deltafin.cli.reading import Stop, keyboard, keys_kept, pipe
from deltafin.cli.text import columns, plain
from deltafin.errors import ChatError, SessionError
from deltafin.reply import Piece


class FakeConversation:
    """Replies with what it is told to, and remembers how it was asked."""

    def __init__(self, model, system):
        self.model, self.tokens = model, [1, 2, 3]
        self.messages = [{"role": "system", "content": system}] if system else []
        self.asked, self.closed = [], False
        self.stats = SimpleNamespace(
            prompt_tokens=12,
            reused_tokens=7,
            prompt_seconds=0.5,
            generated_tokens=31,
            generate_seconds=1.5,
            finish_reason="stop",
            counted=dict(self.model.counted),
        )

    def chat(self, text, *, sampler, max_tokens, thinking) -> Iterator[Piece]:
        self.asked.append((text, sampler, max_tokens, thinking))
        if text is not None:
            self.messages.append({"role": "user", "content": text})
        said = ""
        try:
            for part in self.model.reply:
                if isinstance(part, Exception):
                    raise part
                if callable(part):
                    part()
                    continue
                said += part
                yield part
        finally:
            self.closed = True
            self.messages.append({"role": "assistant", "content": said})

    def reset(self):
        self.messages = [message for message in self.messages if message["role"] == "system"]

    def save(self, path):
        save_file({"tokens": np.array(self.tokens)}, path, {"deltafin": "{}"})


class FakeModel:
    """A model whose replies are fixed."""

    name, chat_format = "toy", None

    def __init__(self, *reply):
        self.reply = [Piece(part, "text") if type(part) is str else part for part in reply]
        self.sessions, self.counted, self.watched = [], {}, 0

    def watch(self):
        self.watched += 1

    def info(self):
        return {"family": "kimi_k3", "parameters": 1234567}

    def session(self, system=None, *, thinking=None, effort="default"):
        self.sessions.append((system, thinking, effort))
        return FakeConversation(self, system)

    def resume(self, path):
        if not Path(path).exists():
            raise SessionError(f"there is no file {path}", "/save writes one")
        conversation = FakeConversation(self, None)
        conversation.messages = [{"role": "user", "content": "earlier"}]
        return conversation


GREEDY = SimpleNamespace(temperature=0.0)
WARM = SimpleNamespace(temperature=0.8)


def lines(*texts):
    """Return a reader of these messages; exceptions among them are raised."""
    rest = iter(texts)

    def read():
        for text in rest:
            if isinstance(text, BaseException):
                raise text
            return text
        raise EOFError

    return read


def talk(model, *texts, sampler=GREEDY, **options):
    """Talk to a model and return the Talk."""
    result = Talk(model, sampler, **options)
    result.loop(lines(*texts))
    return result


# ------------------------------------------------------------------ messages and commands


def test_answers_go_to_stdout_and_all_else_to_stderr(capsys):
    model = FakeModel(Piece("hm", "thinking"), "Hello ", "there.")
    talk(model, "hi", "", "  ", "again", terminal=True)
    out, err = capsys.readouterr()
    assert out == "Hello there.\nHello there.\n"
    assert err.startswith("toy: kimi_k3, 1,234,567 parameters.")
    assert "hm" in err
    assert err.endswith("Goodbye.\n")


def test_in_a_pipe_only_answers_are_written(capsys):
    talk(FakeModel(Piece("hm", "thinking"), "Hello"), "hi")
    assert capsys.readouterr() == ("Hello\n", "")


def test_options_reach_the_conversation():
    model = FakeModel("yes")
    result = talk(model, "hi", sampler=WARM, system="be kind", max_tokens=9, thinking=False, effort="low")
    assert model.sessions == [("be kind", False, "low")]
    assert result.conversation.asked == [("hi", WARM, 9, False)]


def test_two_slashes_send_one():
    result = talk(FakeModel("yes"), "//etc is a folder")
    assert result.conversation.messages[0]["content"] == "/etc is a folder"


def test_a_quoted_block_loses_its_quotes():
    result = talk(FakeModel("yes"), '"""\n/quit\nis a command\n"""')
    assert result.conversation.messages[0]["content"] == "/quit\nis a command"


def test_lone_surrogates_become_question_marks():
    result = talk(FakeModel("yes"), "a\udc80b")
    assert result.conversation.messages[0]["content"] == "a?b"


def test_an_unknown_command_is_an_error_and_the_talk_goes_on(capsys):
    result = talk(FakeModel("yes"), "/foo", "hi")
    out, err = capsys.readouterr()
    assert out == "yes\n"
    assert err.startswith("error: there is no command '/foo'\nhint: /help")
    assert result.failed


def test_an_error_in_a_turn_is_shown_and_the_talk_goes_on(capsys):
    model = FakeModel("So ", ChatError("the reply broke", "try again"))
    result = talk(model, "hi")
    assert capsys.readouterr() == ("So \n", "error: the reply broke\nhint: try again\n")
    assert result.failed
    model.reply = [Piece("fine", "text")]
    result.loop(lines("hi"))
    assert capsys.readouterr().out == "fine\n"


def test_our_own_mistakes_are_not_hidden():
    with pytest.raises(ZeroDivisionError):
        talk(FakeModel(ZeroDivisionError()), "hi")


def test_a_command_ends_at_any_blank():
    assert talk(FakeModel("yes"), "/system\tbe\nkind").conversation.messages[0]["content"] == "be\nkind"


def test_help_lists_every_command(capsys):
    talk(FakeModel(), "/help")
    shown = capsys.readouterr().err
    assert all(f"{name} " in shown for name in COMMANDS)
    assert set(COMMANDS) == {*("/help", "/reset", "/system", "/think", "/stats", "/save", "/load", "/retry", "/quit")}


def test_quit_leaves():
    assert talk(FakeModel("yes"), "/quit", "hi").conversation.asked == []


def test_reset_keeps_the_system_prompt():
    result = talk(FakeModel("yes"), "hi", "/reset", system="be kind")
    assert result.conversation.messages == [{"role": "system", "content": "be kind"}]


def test_system_begins_again(capsys):
    model = FakeModel("yes")
    result = talk(model, "hi", "/system", "/system be brief", "/system", thinking=True, effort="high")
    assert model.sessions == [(None, True, "high"), ("be brief", True, "high")]
    assert result.conversation.messages == [{"role": "system", "content": "be brief"}]
    err = capsys.readouterr().err
    assert "There is no system prompt." in err
    assert "System prompt: be brief" in err


def test_think_switches_thinking():
    result = talk(FakeModel("yes"), "a", "/think on", "b", "/think off", "c")
    assert [thinking for *_, thinking in result.conversation.asked] == [None, True, False]


def test_think_shows_and_hides(capsys):
    result = talk(FakeModel(Piece("hmmm", "thinking"), "yes"), "/think show", "hi")
    assert "hmmm" in capsys.readouterr().err
    result.loop(lines("/think hide", "hi"))
    out, err = capsys.readouterr()
    assert out == "yes\n"
    assert "hmmm" not in err


def test_think_alone_tells_and_nonsense_is_refused(capsys):
    assert not talk(FakeModel("yes"), "/think").failed
    assert "left to the model" in capsys.readouterr().err
    assert talk(FakeModel("yes"), "/think twice").failed
    assert "on, off, show, hide" in capsys.readouterr().err


def test_stats_are_counted_once_somebody_wants_them(capsys):
    model = FakeModel("yes")
    model.counted = {"seconds": {"experts": 0.5, "attention": 0.25, "head": 0.25, "other": 0.5}}
    talk(model, "hi", "/stats")
    assert model.watched == 0
    assert "▓ attention 8.33 ms" in capsys.readouterr().err
    talk(model, "/stats on", "hi")
    talk(model, stats=True)
    assert model.watched == 2


def test_stats(capsys):
    result = talk(FakeModel("yes"), "hi", "/stats")
    assert "31 tokens, 20.0 tokens/s, prompt 12 tokens (7 reused), 2.00 s" in capsys.readouterr().err
    result.loop(lines("/stats on", "hi"))
    assert "20.0 tokens/s" in capsys.readouterr().err
    result.loop(lines("/stats off", "hi"))
    assert "20.0 tokens/s" not in capsys.readouterr().err
    talk(FakeModel("yes"), "hi", stats=True)
    assert "20.0 tokens/s" in capsys.readouterr().err
    assert talk(FakeModel("yes"), "/stats sometimes").failed


def test_save_and_load(tmp_path, capsys):
    path = tmp_path / "my talk"
    result = talk(FakeModel("yes"), "hi", f"/save {path}", f"/save {path}", f"/load {path}")
    assert path.exists()
    assert result.conversation.messages == [{"role": "user", "content": "earlier"}]
    assert capsys.readouterr().err == (
        f"Saved 2 messages in {path}.\nSaved 2 messages again in {path}.\nLoaded 1 messages from {path}.\n"
    )
    assert not result.failed


def test_save_overwrites_only_saved_talks(tmp_path, capsys):
    letter, tensors = tmp_path / "letter", tmp_path / "tensors"
    letter.write_text("dear", encoding="utf-8")
    save_file({"a": np.ones(1)}, tensors)
    for path in (letter, tensors, tmp_path):
        assert talk(FakeModel("yes"), f"/save {path}").failed
        assert "is not a saved conversation" in capsys.readouterr().err
    assert letter.read_text(encoding="utf-8") == "dear"
    assert is_saved_talk(tmp_path / ("long" * 100)) is False
    assert file_named("~nobody-here/" + "long" * 100, "/save").parent.name == "~nobody-here"


@pytest.mark.parametrize("line", ["/save", "/load", "/load nowhere"])
def test_save_and_load_need_a_file(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert talk(FakeModel("yes"), line).failed
    assert capsys.readouterr().err.startswith("error: ")


def test_retry_answers_the_last_message_again(capsys):
    result = talk(FakeModel("yes"), "hi", "/retry", sampler=WARM)
    assert [message["role"] for message in result.conversation.messages] == ["user", "assistant"]
    assert [text for text, *_ in result.conversation.asked] == ["hi", None]
    assert capsys.readouterr() == ("yes\nyes\n", "")
    talk(FakeModel("yes"), "hi", "/retry")
    assert "--temperature" in capsys.readouterr().err


def test_retry_needs_a_message():
    assert talk(FakeModel("yes"), "/retry").failed
    assert talk(FakeModel("yes"), "/retry", system="be kind").failed


def test_a_reply_cut_by_its_limit_says_so(capsys):
    result = Talk(FakeModel("yes"), GREEDY, max_tokens=7)
    result.conversation.stats.finish_reason = "length"
    result.loop(lines("hi"))
    assert "7 tokens" in capsys.readouterr().err


def test_a_tool_call_is_shown(capsys):
    call = {"type": "function", "function": {"name": "add\x1b[2J", "arguments": '{"a": 1}'}}
    talk(FakeModel(Piece("", "call", call)), "hi")
    assert capsys.readouterr().err == 'calls add[2J({"a": 1})\n'


def test_a_reply_cannot_steer_the_terminal(capsys):
    talk(FakeModel(Piece("\x1b]0;a\x07", "thinking"), "a\x1b[2Jb\x9bc\r\n\td"), "hi", terminal=True)
    out, err = capsys.readouterr()
    assert out == "a[2Jbc\n\td\n"
    assert "\x1b" not in err


# ------------------------------------------------------------------ Ctrl-C


def press():
    signal.raise_signal(signal.SIGINT)


def test_the_first_ctrl_c_stops_the_answer_and_keeps_the_talk(capsys):
    before = signal.getsignal(signal.SIGINT)
    result = talk(FakeModel("one ", press, "two ", "three "), "hi", "again", terminal=True)
    assert capsys.readouterr().out == "one two\none two\n"
    assert result.conversation.closed
    assert len(result.conversation.messages) == 4
    assert signal.getsignal(signal.SIGINT) == before


def test_the_second_ctrl_c_does_not_wait(capsys):
    before = signal.getsignal(signal.SIGINT)
    model = FakeModel("one ", lambda: (press(), press()), lambda: pytest.fail("waited"))
    result = talk(model, "hi", terminal=True)
    out, err = capsys.readouterr()
    assert out == "one\n"
    assert "(stopped)" in err
    assert result.conversation.closed
    assert signal.getsignal(signal.SIGINT) == before


def test_stop_counts():
    with Stop() as stop:
        assert not stop.pressed
        press()
        assert stop.pressed


def test_ctrl_c_at_the_prompt_leaves_only_twice_in_a_row(capsys):
    interrupt = KeyboardInterrupt()
    result = talk(FakeModel("yes"), interrupt, "hi", interrupt, terminal=True)
    assert capsys.readouterr().err.count("Ctrl-C again") == 2
    assert len(result.conversation.asked) == 1
    assert talk(FakeModel("yes"), interrupt, interrupt, "hi", terminal=True).conversation.asked == []


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_in_a_pipe_ends_at_once():
    with pytest.raises(KeyboardInterrupt):
        talk(FakeModel("yes"), KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        talk(FakeModel("yes", press, "no"), "hi")


# ------------------------------------------------------------------ reading


@pytest.fixture
def typed(tmp_path):
    """Return a function that types keys and returns the messages read."""

    def typed(keys, count=1, history=tmp_path / "state" / "history"):
        with create_pipe_input() as source, create_app_session(input=source, output=DummyOutput()):
            read = keyboard(WORDS, lambda: "status", history)
            source.send_text(keys)
            return [read() for _ in range(count)]

    return typed


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("hello\r", "hello"),
        ("one\ntwo\r", "one\ntwo"),  # Ctrl-J
        ("one\x1b\rtwo\r", "one\ntwo"),  # Alt-Enter
        ('"""one\rtwo"""\r', '"""one\ntwo"""'),
        ("\x1b[200~one\rtwo\x1b[201~\r", "one\ntwo"),  # a bracketed paste
        ("wrong\x03right\r", "right"),  # Ctrl-C clears the line
        ("ac\x1b[Db\r", "abc"),
    ],
)
def test_keys(typed, keys, message):
    assert typed(keys) == [message]


def test_commands_are_completed(tmp_path):
    with create_pipe_input() as source, create_app_session(input=source, output=DummyOutput()):
        completer = keyboard(WORDS, str, tmp_path / "history").__self__.completer

    def complete(text):
        return [found.text for found in completer.get_completions(Document(text), CompleteEvent())]

    assert complete("/re") == ["/reset", "/retry"]
    assert complete("/think s") == ["/think show"]
    assert complete("please /re") == []


@pytest.mark.parametrize(("keys", "error"), [("\x03", KeyboardInterrupt), ("\x04", EOFError)])
def test_keys_that_leave(typed, keys, error):
    with pytest.raises(error):
        typed(keys)


def test_history_is_kept_between_talks(typed, tmp_path):
    assert typed("first\rsecond\r", 2) == ["first", "second"]
    assert typed("\x1b[A\x1b[A\r") == ["first"]
    assert (tmp_path / "state").stat().st_mode & 0o077 == 0


def test_history_that_cannot_be_kept_is_no_error(typed, tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert typed("a\rb\r", 2, tmp_path / "file" / "history") == ["a", "b"]
    (tmp_path / "folder").mkdir()
    assert typed("a\rb\r", 2, tmp_path / "folder") == ["a", "b"]


def test_keys_typed_during_an_answer_wait_unseen(monkeypatch):
    termios = pytest.importorskip("termios")
    ours, theirs = os.openpty()
    with open(theirs, "rb", buffering=0) as terminal, open(ours, "r+b", buffering=0) as person:
        monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True, fileno=lambda: theirs))
        before = termios.tcgetattr(terminal)
        with keys_kept():
            person.write(b"next\r")
            assert terminal.read(10) == b"next\r"
        assert termios.tcgetattr(terminal) == before
        person.write(b"seen")
        assert person.read(10) == b"seen"  # the echo of this alone


def test_pipe_reads_lines_and_blocks():
    read = pipe(io.StringIO('one\n\n"""two\nthree\n"""\n"""four"""\n"""five\nsix'))
    got = [read() for _ in range(5)]
    assert got == ["one\n", "\n", '"""two\nthree\n"""\n', '"""four"""\n', '"""five\nsix']
    with pytest.raises(EOFError):
        read()


# ------------------------------------------------------------------ painting

LINES = st.sampled_from(["| a | b |", "a" * 30, "\n```py\n", "\n```\n", "~~~", "\n# ", "\n12. ", "**bold** "])
MARKDOWN = st.lists(LINES | st.text("aé漢👍🏽\u00a0*`~#|>-. \t\n", max_size=8), max_size=20).map("".join)


def painted(*parts, width=20, **options):
    """Return what a painter writes for a text that comes in these parts."""
    out = []
    painter = Painter(out.append, width, **options)
    for part in parts:
        painter.push(part)
    painter.finish()
    return "".join(out)


def unstyled(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@given(MARKDOWN, st.data(), st.booleans())
def test_how_a_reply_is_cut_does_not_matter(text, data, styled):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert painted(*parts, styled=styled) == painted(text, styled=styled)


@given(MARKDOWN, st.sampled_from([0, 5, 20]))
def test_only_blanks_change(text, width):
    assert "".join(painted(text, width=width).split()) == "".join(text.split())
    assert unstyled(painted(text, width=width, styled=True)) == painted(text, width=width)


@given(st.text())
def test_no_control_character_passes(text):
    for styled in (False, True):
        shown = unstyled(painted(text, styled=styled))
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)


@given(st.lists(st.text("ab漢é", min_size=1, max_size=12), min_size=1))
def test_lines_of_prose_fit(words):
    for line in painted(" ".join(words)).splitlines():
        assert cell_len(line) <= 20 or " " not in line


@given(st.lists(st.text("ab #*`|\t-").filter(lambda line: "```" not in line)))
def test_code_is_written_as_it_came(code):
    text = "\n".join(["```", *code, "```", "x " * 20])
    assert painted(text).startswith("\n".join(["```", *code, "```\n"]))


def test_a_width_of_zero_writes_at_once():
    out = []
    Painter(out.append).push("so ")
    assert out == ["so "]


def test_words_wrap_and_lists_hang():
    text = "- the quick brown fox jumps\n\n12. over the lazy dog and"
    assert painted(text) == "- the quick brown\n  fox jumps\n\n12. over the lazy\n    dog and\n"


def test_tables_and_indented_code_do_not_wrap():
    text = "| one | two | three | four |\n    for x in range(10): print(x)\n"
    assert painted(text) == text


def test_styles():
    assert painted("# Title\nplain", styled=True) == "\x1b[1m#\x1b[0m \x1b[1mTitle\x1b[0m\nplain\n"
    assert painted("a **b** c", styled=True) == "a \x1b[1m**\x1b[0m\x1b[1mb\x1b[0m\x1b[1m**\x1b[0m c\n"
    assert "\x1b[1m" not in painted("2 ** 3 and `a**b**`", styled=True)
    assert painted("```py\nx = 1\n```", styled=True) == "\x1b[2m```py\x1b[0m\nx = 1\n\x1b[2m```\x1b[0m\n"
    assert painted("a b", styled=True, dim=True) == "\x1b[2ma\x1b[0m \x1b[2mb\x1b[0m\n"


def test_plain_and_columns():
    assert plain("a\x1b[31mb\r\n\tc") == "a[31mb\n\tc"
    assert columns([("a", 1), ("bcd", 22)], right=[1]) == "a     1\nbcd  22"


@pytest.mark.parametrize("name", ["nano", "toy"])
def test_the_first_screen_says_what_the_model_is_and_nano_suggests_three_things(name, capsys):
    model = FakeModel()
    model.name = name
    Talk(model, GREEDY, terminal=True).loop(lines())
    shown = capsys.readouterr().err
    assert "/help lists the commands." in shown
    assert ("1,234,567 parameters" in shown) == (name == "toy")
    suggestions = [line for line in shown.splitlines() if line.startswith("  ")]
    assert len(suggestions) == (3 if name == "nano" else 0)
