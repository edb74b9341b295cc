"""The commands: what they print where, their exit codes, and that every option does what it says."""

import contextlib
import io
import json
import subprocess
import sys
from functools import cache
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

import deltafin
from deltafin import api, evaluate, ops, trace, verify
from deltafin.cli import commands, main
from deltafin.cli.stats import account
from deltafin.cli.text import columns, narrow
from deltafin.errors import CheckpointError
from deltafin.reply import Piece


def invoke(*arguments, stdin=None):
    """Run ``deltafin`` with these arguments."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments], input=stdin)


class FakeModel:
    """A model that remembers how it was asked; its reply comes in pieces."""

    chat_format, placed, name, tokens, messages = None, None, "toy", [], []

    def __init__(self):
        self.asked = {}
        self.reply = [Piece("hm", "thinking"), Piece("An ", "text"), Piece("answer", "text")]
        self.stats = SimpleNamespace(
            prompt_tokens=12,
            reused_tokens=0,
            prompt_seconds=0.5,
            generated_tokens=3,
            generate_seconds=0.5,
            finish_reason="stop",
            counted={},
        )

    def session(self, system=None, **options):
        self.asked |= {"system": system, **options}
        return self

    def chat(self, text, *, sampler, max_tokens, **options):
        self.asked |= {"text": text, "sampler": sampler, "max_tokens": max_tokens}
        for piece in self.reply:
            if isinstance(piece, BaseException):
                raise piece
            yield piece

    def stream(self, text, **options):
        self.asked |= {"raw": text, **options}
        yield from ("and ", "so on")

    def watch(self):
        self.asked["watched"] = True

    def trace(self, path):
        self.asked["trace"] = path
        return contextlib.nullcontext()

    def info(self):
        return {"name": "toy", "parameters": 1234567, "stop ids": [1, 2], "tied": False, "experts": None}


@pytest.fixture
def model(monkeypatch):
    """Return the model that every name leads to."""
    result = FakeModel()

    def load(name, **options):
        result.asked |= {"model": name, **options}
        return result

    monkeypatch.setattr(deltafin, "load", load, raising=False)
    return result


@pytest.fixture
def nano(monkeypatch):
    """Load the embedded model once for all tests."""
    monkeypatch.setattr(deltafin, "load", lambda *given, **options: _load(), raising=False)


_load = cache(api.load)


# ------------------------------------------------------------------ the group


def test_help_names_every_command():
    result = invoke("--help")
    assert result.exit_code == 0
    opening = ["chat", "run", "info", "convert", "verify", "eval", "bench"]
    assert [*main.commands] == [*opening, "pull", "list", "remove", "plan", "doctor", "simulate"]
    assert all(f"  {name} " in result.output for name in main.commands)


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["--version"], ["walk"]])
def test_nothing_heavy_is_imported_before_it_is_needed(arguments):
    code = f"""
import sys
from deltafin.cli import commands, main
try:
    main({arguments})
except SystemExit:
    heavy = {{"torch", "numpy", "numba", "rich", "prompt_toolkit", "tiktoken", "safetensors"}}
    print("imported:", *heavy & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, encoding="utf-8")
    assert done.stdout.splitlines()[-1] == "imported:"


def test_version():
    assert invoke("--version").output == f"deltafin {deltafin.__version__}\n"


def test_usage_mistakes_exit_with_2():
    for arguments in (["walk"], ["run", "--top-p", "2", "x"], ["info"], ["eval", "nano", "/no/such/file"]):
        result = invoke(*arguments)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert "Error: " in result.stderr


def test_a_users_mistake_is_a_message_and_exits_with_1(model):
    model.reply = [CheckpointError("shard 2 is\x1b[31m cut", "fetch it again")]
    result = invoke("run", "hi")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "error: shard 2 is[31m cut\nhint: fetch it again\n"


def test_ctrl_c_exits_with_130(model):
    model.reply = [Piece("An", "text"), KeyboardInterrupt()]
    result = invoke("run", "hi")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "An", "")


def test_our_mistakes_keep_their_traceback(model):
    model.reply = [ZeroDivisionError()]
    assert isinstance(invoke("run", "hi").exception, ZeroDivisionError)


def test_a_closed_pipe_is_quiet(model, monkeypatch):
    model.reply = [BrokenPipeError(32, "Broken pipe")]
    result = invoke("run", "hi")
    assert (result.exit_code, result.output) == (1, "")


def test_pipes_are_utf8_in_every_locale():
    code = r"""
import click
from deltafin.cli import commands, main
main.command("say")(lambda: click.echo("\u6f22" + input()))
main(["say"])
"""
    done = subprocess.run(
        [sys.executable, "-X", "utf8=0", "-c", code],
        env={"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"},
        input="é\n".encode(),
        capture_output=True,
        check=True,
    )
    assert done.stdout.decode("utf-8").strip() == "漢é"


# ------------------------------------------------------------------ shared options


@pytest.mark.parametrize("command", [["run", "nano", "hi"], ["chat"], ["info", "nano"]])
def test_loading_options_reach_the_model(model, command):
    options = ("--dtype", "bfloat16", "--threads", "3", "--backend", "reference")
    assert invoke(*command, *options, stdin="").exit_code == 0
    asked = ("model", "dtype", "threads", "backend")
    assert [model.asked[name] for name in asked] == ["nano", "bfloat16", 3, "reference"]
    assert invoke(*command, stdin="").exit_code == 0
    assert [model.asked[name] for name in asked] == ["nano", "float32", None, "auto"]


@pytest.mark.parametrize("command", [["run", "nano", "hi"], ["chat"], ["info", "nano"]])
def test_packing_is_asked_for(model, command):
    assert invoke(*command, stdin="").exit_code == 0
    assert (model.asked["resident"], model.asked["experts"]) == ("keep", "keep")
    assert invoke(*command, "--resident", "int8", "--experts", "mxfp4", stdin="").exit_code == 0
    assert (model.asked["resident"], model.asked["experts"]) == ("int8", "mxfp4")


def test_every_command_that_opens_a_model_says_how():
    wanted = {"--dtype", "--threads", "--backend", "--resident", "--experts"}
    for name in ("chat", "run", "info", "verify", "eval", "bench"):
        command = main.commands[name]
        assert wanted <= {option for p in command.params for option in p.opts}, name


@pytest.mark.parametrize("lines", [[], ["compiling kernels"], ["compiling kernels", "packing layer 1 of 2"]])
def test_what_takes_long_is_one_plain_line_where_there_is_no_terminal(model, monkeypatch, lines):
    def load(name, progress, **options):
        for line in lines:
            progress(line)
        return model

    monkeypatch.setattr(deltafin, "load", load)
    result = invoke("run", "hi")
    assert (result.stdout, result.stderr) == ("An answer\n", "".join(f"{line}\n" for line in lines[:1]))


def test_what_takes_long_is_a_bar_on_a_terminal(monkeypatch, capsys):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with commands.waiting() as tell:
        assert capsys.readouterr() == ("", "")
        tell("compiling kernels")
        tell("packing layer 1 of 2")
    out, err = capsys.readouterr()
    assert out == ""
    assert "packing layer 1 of 2" in err
    assert "compiling kernels\n" not in err


def test_what_was_packed_is_said(linear):
    lines = invoke("info", linear.path, "--resident", "int8", "--experts", "mxfp4").stdout.splitlines()
    said = {line.split("  ")[0]: line for line in lines}
    assert said["resident weights"].endswith(" int8 (chosen; not exactly the published weights)")
    assert said["expert weights"].endswith(" MXFP4 (chosen; not exactly the published weights)")


SAMPLING = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2, "seed": 4}


@pytest.mark.parametrize("command", ["run", "chat"])
def test_talking_and_sampling_options_reach_the_conversation(model, command):
    options = [part for name, value in SAMPLING.items() for part in (f"--{name.replace('_', '-')}", value)]
    options += ["--max-tokens", 9, "--system", "be kind", "--no-think", "--effort", "low"]
    result = invoke(command, *options, stdin="hi\n")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "An answer\n", "")
    assert model.asked["sampler"] == deltafin.Sampler(**SAMPLING)
    expected = {"text": "hi", "max_tokens": 9, "system": "be kind", "thinking": False, "effort": "low"}
    assert expected.items() <= model.asked.items()
    invoke(command, "--think", stdin="hi\n")
    assert (model.asked["thinking"], model.asked["sampler"]) == (True, deltafin.Sampler())


@pytest.mark.parametrize("command", ["run", "chat"])
def test_stats_go_to_stderr(model, command):
    result = invoke(command, "--stats", stdin="hi\n")
    assert result.stdout == "An answer\n"
    assert result.stderr == "3 tokens, 4.0 tokens/s, prompt 12 tokens (0 reused), 1.00 s\n"
    assert model.asked["watched"]


@pytest.mark.parametrize("command", ["run", "chat"])
def test_nothing_is_watched_or_traced_unasked(model, command):
    invoke(command, stdin="hi\n")
    assert model.asked.keys() & {"watched", "trace"} == set()


@pytest.mark.parametrize("command", [["run"], ["run", "--raw"], ["chat"]])
def test_a_trace_goes_to_the_file(command, tmp_path):
    path = tmp_path / "routes"
    done = invoke(*command, "--trace", path, "--max-tokens", "3", stdin="hi\n")
    assert done.exit_code == 0, done.output
    about, steps = trace.read(path)
    assert about["model"] == "nano"
    assert steps[-1].tokens == 1
    assert trace.viewer_file(path).exists()
    done = invoke(*command, "--trace", tmp_path / "no" / "routes", stdin="hi\n")
    assert (done.exit_code, "cannot write to" in done.stderr) == (1, True)


def test_stats_say_where_time_and_bytes_went(monkeypatch):
    monkeypatch.setattr("deltafin.measure.known_disk", lambda path, expert: SimpleNamespace(gbs=3.0))
    model = SimpleNamespace(path=None)
    stats = api.Stats(12, 0, 0.5, 11, 2.0, "stop", {})
    assert account(stats, model).count("\n") == 0
    stats.counted = {"hits": 30, "misses": 10, "bytes": 3 * 10**9, "wait": 1.0, "compute": 0.5}
    first, experts, bar, legend = account(stats, model).splitlines()
    assert first.startswith("11 tokens, 5.0 tokens/s")
    assert experts == "experts 75.0% in memory, 300.00 MB read a token, disk 1.50 GB/s (50% of the 3.00 GB/s it gives)"
    assert bar == "a token 200.00 ms  " + 25 * "░" + 13 * "█" + 12 * "·"
    assert legend == "░ disk wait 100.00 ms  █ experts 50.00 ms  · other 50.00 ms"
    stats.counted["seconds"] = {"disk wait": 1.0, "experts": 0.2, "attention": 0.4, "head": 0.2, "other": 9.9}
    *_, bar, legend = account(stats, model).splitlines()
    assert bar == "a token 200.00 ms  " + 25 * "░" + 5 * "█" + 10 * "▓" + 5 * "▒" + 5 * "·"
    assert legend.endswith("▓ attention 40.00 ms  ▒ head 20.00 ms  · other 20.00 ms")
    stats.counted = {"seconds": stats.counted["seconds"]}  # of experts that the system pages in
    assert "disk" not in account(stats, model)
    stats.counted = {"hits": 4, "misses": 0, "bytes": 0}
    assert account(stats, model).splitlines()[1] == "experts 100.0% in memory"
    stats.counted["foreseen"] = 1
    assert account(stats, model).splitlines()[1] == "experts 100.0% in memory, 25.0% read ahead"
    monkeypatch.setattr("deltafin.measure.known_disk", lambda path, expert: None)
    stats.counted = {"hits": 1, "misses": 1, "bytes": 10**9}
    assert account(stats, model).splitlines()[1].endswith("disk 0.50 GB/s")


@pytest.mark.parametrize(
    "option",
    [
        ["--dtype", "int3"],
        ["--threads", "0"],
        ["--backend", "cuda"],
        ["--resident", "mxfp4"],
        ["--experts", "int4"],
        ["--temperature", "-1"],
        ["--temperature", "nan"],
        ["--top-k", "-1"],
        ["--top-p", "0"],
        ["--min-p", "1.1"],
        ["--repetition-penalty", "0"],
        ["--max-tokens", "0"],
        ["--effort", "some"],
        ["--seed", "x"],
    ],
)
def test_values_that_cannot_work_are_refused(model, option):
    assert invoke("run", "hi", *option).exit_code in (1, 2)
    assert "text" not in model.asked


# ------------------------------------------------------------------ run


@pytest.mark.parametrize(
    ("arguments", "stdin", "name", "prompt"),
    [
        (["hello"], None, "nano", "hello"),
        (["nano", "hello"], None, "nano", "hello"),
        (["."], "hello\n", ".", "hello"),
        (["./nowhere"], "hello", "./nowhere", "hello"),
        (["~/model", "-"], "one\ntwo\n\n", "~/model", "one\ntwo\n"),
        (["-"], "hello\n", "nano", "hello"),
        ([], "hello\n", "nano", "hello"),
        (["nano"], "é 漢", "nano", "é 漢"),
        (["long " * 2000], None, "nano", "long " * 2000),
        (["model", "nano"], None, "model", "nano"),
    ],
)
def test_model_and_prompt_are_told_apart(model, arguments, stdin, name, prompt):
    result = invoke("run", *arguments, stdin=stdin)
    assert (result.exit_code, result.stdout) == (0, "An answer\n")
    assert (model.asked["model"], model.asked["text"]) == (name, prompt)


@pytest.mark.parametrize("stdin", ["", "\n", b"\xff"])
def test_run_needs_a_prompt(model, stdin):
    result = invoke("run", stdin=stdin)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "model" not in model.asked
    assert invoke("run", "a", "b", "c").exit_code == 2


def test_run_does_not_wait_for_a_person_to_type(model, monkeypatch):
    monkeypatch.setattr("deltafin.cli.commands.sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True)))
    result = invoke("run", "nano")
    assert result.exit_code == 2
    assert "there is no PROMPT" in result.stderr


def test_run_says_when_an_answer_was_cut(model):
    model.stats.finish_reason = "length"
    assert "512 tokens" in invoke("run", "hi").stderr


def test_an_answer_keeps_its_bytes_in_a_pipe_and_cannot_steer_a_terminal(model, monkeypatch):
    model.reply = [Piece("a\x1b[2Jb", "text")]
    assert invoke("run", "hi").stdout == "a\x1b[2Jb\n"
    shown = io.StringIO()
    shown.isatty = lambda: True
    monkeypatch.setattr("sys.stdout", shown)
    main(["run", "hi"], standalone_mode=False)
    assert shown.getvalue() == "a[2Jb\n"


def test_raw_continues_the_text(model):
    result = invoke("run", "--raw", "Once ", "--max-tokens", "5", "--seed", "3")
    assert (result.exit_code, result.stdout) == (0, "and so on\n")
    assert (model.asked["raw"], model.asked["max_tokens"], model.asked["seed"]) == ("Once ", 5, 3)


@pytest.mark.parametrize("option", [["--system", "x"], ["--think"], ["--effort", "low"], ["--stats"]])
def test_raw_refuses_what_belongs_to_a_chat(model, option):
    assert invoke("run", "--raw", "hi", *option).exit_code == 2


# ------------------------------------------------------------------ info, chat


def test_info(model):
    assert invoke("info", "toy").stdout == (
        "name        toy\nparameters  1,234,567\nstop ids    1, 2\ntied        no\nexperts     -\n"
    )
    assert json.loads(invoke("info", "toy", "--json").stdout) == model.info()


def test_chat_in_a_pipe(model):
    result = invoke("chat", stdin="hi\n\n/nonsense\nagain\n")
    assert (result.exit_code, result.stdout) == (1, "An answer\nAn answer\n")
    assert result.stderr.startswith("error: ")
    assert invoke("chat", stdin="hi").exit_code == 0


# ------------------------------------------------------------------ eval, verify

MESSAGES = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]


def write_rows(path, *rows):
    """Write rows of JSON."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_eval_prints_a_row_a_kind(nano, tmp_path):
    story = {"text": "Once upon a time", "kind": "story"}
    path = write_rows(tmp_path / "rows.jsonl", story, {"messages": MESSAGES})
    result = invoke("eval", "nano", path)
    assert (result.exit_code, result.stderr) == (0, "")
    header, *rows = result.stdout.splitlines()
    assert header == "kind   documents  tokens    loss  perplexity  bits/byte  assistant loss"
    cells = {row.split()[0]: row.split()[1:] for row in rows}
    assert [*cells] == ["story", "chat", "all"]
    assert [cells[kind][0] for kind in cells] == ["1", "1", "2"]
    documents = evaluate.read_documents(path)
    score = evaluate.evaluate(_load(), documents)[1]
    expected = (score.loss, score.perplexity, score.bits_per_byte, score.assistant_loss)
    assert [float(cell) for cell in cells["chat"][2:]] == pytest.approx(expected, rel=1e-3)
    assert cells["story"][-1] == "-"


def test_eval_cuts_documents_into_windows(nano, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("Once upon a time there was a dog.", encoding="utf-8")
    whole, cut = (invoke("eval", "nano", path, *option).stdout for option in ([], ["--window", "3"]))
    assert int(whole.splitlines()[1].split()[2]) > int(cut.splitlines()[1].split()[2]) > 0
    assert invoke("eval", "nano", path, "--window", "1").exit_code == 2


@pytest.mark.parametrize("content", ["", "[1]\n", '{"text": "a"', '{"text": "a"}'])
def test_eval_refuses_what_it_cannot_predict(nano, tmp_path, content):
    path = tmp_path / "rows.jsonl"
    path.write_text(content, encoding="utf-8")
    result = invoke("eval", "nano", path)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: ")
    assert str(path) in result.stderr


@pytest.mark.parametrize("broken", [False, True])
def test_verify_prints_a_table_and_fails_when_a_bound_is_broken(model, monkeypatch, broken):
    given, prepared = [], []
    monkeypatch.setattr(ops, "ready", lambda *arguments: prepared.append(arguments[:2]))

    def run(loaded, progress):
        given.append(loaded)
        progress("linear torch")
        error = 0.5 if broken else 1e-7
        return [
            verify.Row("linear", "torch", "odd", 0.25, error, 1e-5),
            verify.Row("mix", "torch", "", 0, 0, 0),
        ]

    monkeypatch.setattr(verify, "run", run)
    result = invoke("verify")
    header, first, second = result.stdout.splitlines()
    assert header.split() == ["operation", "implementation", "worst", "case", "absolute", "relative", "bound"]
    verdict = ["5.0e-01", "1.0e-05", "BROKEN"] if broken else ["1.0e-07", "1.0e-05", "ok"]
    assert first.split() == ["linear", "torch", "odd", "2.5e-01", *verdict]
    assert second.split()[-1] == "ok"
    assert result.exit_code == broken
    assert ("1 of 2 bounds are broken" in result.stderr) == broken
    invoke("verify", "toy", "--dtype", "float64")
    assert given == [None, model]
    assert prepared == [("numba", 1)]
    assert model.asked["dtype"] == "float64"


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_the_table_of_verify_fits_its_terminal(width):
    names = {(op, name) for op, name, _ in verify.implementations()}
    cases = ["one", "a case with a name that is much longer than any terminal is wide, or nearly so"]
    header = ("operation", "implementation", "worst case", "absolute", "relative", "bound", "")
    rows = [header, *((*pair, case, "1.0e-07", "1.0e-07", "1.0e-05", "BROKEN") for pair in names for case in cases)]
    fitted = narrow(rows, width, drop=3, cut=2)
    lines = columns(fitted).splitlines()
    assert len(lines) == len(rows)
    assert all(len(line) <= width for line in lines)
    if width == 200:
        assert fitted == rows
    else:
        assert [row[-3:] for row in fitted] == [row[-3:] for row in rows]
        assert all(row[2] == "one" or row[2].endswith("…") for row in fitted[1:])
    if width == 80:
        assert max(len(row[2]) for row in fitted) > 20  # a case can still be told


def test_progress_is_a_bar_on_a_terminal_alone(monkeypatch, capsys):
    monkeypatch.delenv("NO_COLOR", raising=False)
    with commands.progress("evaluating") as update:
        update(completed=3, total=4)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")
    with commands.progress("evaluating") as update:
        update(completed=3, total=4)
    out, err = capsys.readouterr()
    assert out == ""
    assert "evaluating" in err


# ------------------------------------------------------------------ the embedded model


def test_run_and_chat_with_the_embedded_model(nano):
    answers = {
        invoke("run", "What is 2 + 3?", "--no-think", "--max-tokens", 6).stdout,
        invoke("chat", "--no-think", "--max-tokens", 6, stdin="What is 2 + 3?\n").stdout,
        _load().generate([{"role": "user", "content": "What is 2 + 3?"}], max_tokens=6, thinking=False) + "\n",
    }
    assert len(answers) == 1
    assert answers.pop().strip()


def test_raw_text_is_continued_by_the_embedded_model(nano):
    assert invoke("run", "--raw", "Once upon a", "--max-tokens", 3).stdout == (
        _load().generate("Once upon a", max_tokens=3) + "\n"
    )
