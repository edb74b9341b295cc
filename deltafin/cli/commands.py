"""The commands; each imports what it needs when it runs, so that ``--help`` is immediate."""

import contextlib
import functools
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deltafin.cli.options import LOADING, NANO, SAMPLING, TALKING, sampling, shared
from deltafin.cli.stats import account
from deltafin.cli.text import columns, narrow, plain
from deltafin.errors import UsageError

if TYPE_CHECKING:
    from deltafin.api import Model


def load(model: str, options: dict[str, Any]) -> "Model":
    """Load a model as the loading options ask; what takes long is shown, and what is not as asked for said."""
    import deltafin

    chosen = {
        name: options[name]
        for name in ("dtype", "threads", "backend", "resident", "experts", "ram", "pin", "lookahead", "place", "gpu")
    }
    with waiting() as tell:
        loaded = deltafin.load(model, **chosen, progress=tell)
    for note in loaded.placed.notes if loaded.placed else ():
        click.echo(note, err=True)
    return loaded


@click.command()
@click.argument("model", default=NANO)
@shared(TALKING, SAMPLING, LOADING)
@click.pass_context
def chat(context: click.Context, model: str, **options: Any) -> None:
    """Talk with MODEL; /help inside lists the commands.

    In a pipe each line is a message, answers go to stdout and nothing else does.
    """
    from deltafin import Sampler
    from deltafin.chat import UNSET
    from deltafin.cli.chat import WORDS, Talk
    from deltafin.cli.reading import keyboard, pipe

    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if terminal:
        click.echo(f"Loading {model} ...", err=True)
    loaded = load(model, options)
    talk = Talk(
        loaded,
        Sampler(**sampling(options)),
        system=options["system"],
        max_tokens=options["max_tokens"],
        thinking=options["think"],
        effort=options["effort"] or UNSET,
        stats=options["stats"],
        terminal=terminal,
    )
    history = Path(click.get_app_dir("deltafin"), "history")
    with traced(loaded, options["trace"]):
        talk.loop(keyboard(WORDS, talk.status, history) if terminal else pipe(sys.stdin))
    if talk.failed and not terminal:
        context.exit(1)


@click.command()
@click.argument("arguments", nargs=-1, metavar="[MODEL] [PROMPT or -]")
@click.option("--raw", is_flag=True, help="Continue PROMPT as plain text, without the chat format.")
@shared(TALKING, SAMPLING, LOADING)
def run(arguments: tuple[str, ...], raw: bool, **options: Any) -> None:
    """Answer PROMPT once; only the answer goes to stdout.

    Without PROMPT, or with "-", the prompt is read from stdin, less one newline at its end. A single
    argument is MODEL if it is "nano", an existing folder, or starts like a path (/, ./, ../ or ~); any other
    is PROMPT, and nano answers it.
    """
    from deltafin import Sampler
    from deltafin.chat import UNSET

    name, prompt = model_and_prompt(arguments)
    if raw and (unused := [word for word in ("system", "think", "effort", "stats") if options[word]]):
        raise click.UsageError(f"--raw only continues a text: --{unused[0]} means nothing with it")
    model, sampler = load(name, options), Sampler(**sampling(options))
    terminal = sys.stdout.isatty()

    def write(text: str) -> None:
        click.echo(plain(text) if terminal else text, nl=False, color=True)

    if raw:
        with traced(model, options["trace"]):
            for piece in model.stream(prompt, max_tokens=options["max_tokens"], **sampling(options)):
                write(piece)
        write("\n")
        return
    if options["stats"]:
        model.watch()
    effort = options["effort"] or UNSET
    conversation = model.session(options["system"], thinking=options["think"], effort=effort)
    with traced(model, options["trace"]):
        for piece in conversation.chat(prompt, sampler=sampler, max_tokens=options["max_tokens"]):
            if piece.kind == "text":
                write(piece)
    write("\n")
    if conversation.stats.finish_reason == "length":
        click.echo(f"stopped at {options['max_tokens']} tokens; --max-tokens allows more", err=True)
    if options["stats"]:
        click.echo(account(conversation.stats, model), err=True)


def traced(model: "Model", file: Path | None) -> contextlib.AbstractContextManager[object]:
    """Write a trace of what ``model`` does in a context to ``file``, if there is one."""
    return model.trace(file) if file else contextlib.nullcontext()


def model_and_prompt(arguments: tuple[str, ...]) -> tuple[str, str]:
    """Tell MODEL from PROMPT, and read the prompt from stdin where it is not given."""
    if len(arguments) > 2:
        raise click.UsageError("too many arguments; quote a prompt of several words")
    first = arguments[0] if arguments else ""
    if len(arguments) == 2:
        model, prompt = arguments
    elif first == NANO or first.startswith(("/", "./", "../", "~")) or os.path.isdir(first):
        model, prompt = first, "-"
    else:
        model, prompt = NANO, first or "-"
    if prompt == "-":
        if sys.stdin.isatty() and len(arguments) < 2:
            raise click.UsageError("there is no PROMPT: give it as an argument or pipe it in")
        try:
            prompt = sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
        except UnicodeDecodeError as error:
            raise click.UsageError(f"the prompt on stdin is not UTF-8: {error}") from error
    if not prompt:
        raise click.UsageError("PROMPT is empty")
    return model, prompt


@click.command()
@click.argument("model")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@shared(LOADING)
def info(model: str, as_json: bool, **options: Any) -> None:
    """Say what MODEL is and how it would run here."""
    facts = load(model, options).info()
    if as_json:
        click.echo(json.dumps(facts, indent=2, ensure_ascii=False, default=str))
    else:
        click.echo(columns((name, readable(value)) for name, value in facts.items()))


def readable(value: object) -> str:
    """Write a value of ``info`` for people: thousands apart, lists by commas."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {readable(item)}" for key, item in value.items()) or "-"
    if isinstance(value, list | tuple | set | frozenset):
        return ", ".join(str(item) for item in value) or "-"
    return str(value)


@click.command()
@click.argument("model", required=False)
@shared(LOADING)
@click.pass_context
def verify(context: click.Context, model: str | None, **options: Any) -> None:
    """Hold every implementation of every operation against the float64 reference.

    Given MODEL, also its decoding against its prefill, splits of a prompt, and saved states. Exit code 1 says
    that a bound is broken. Of a store every byte is compared with its checksum first.
    """
    from deltafin import machine, ops
    from deltafin.cli.convert import transfer
    from deltafin.store import Store, is_store
    from deltafin.verify import run as verify_all

    if model and is_store(Path(model).expanduser()):
        with transfer("reading the store") as update:
            Store(Path(model).expanduser(), full=True, progress=update)
    loaded = load(model, options) if model else None
    if loaded is None:
        with waiting() as tell:
            ops.ready("numba", options["threads"] or 1, machine.cores(), tell)
    with progress("verifying") as update:
        rows = verify_all(loaded, progress=lambda what: update(description=what))
    header = ("operation", "implementation", "worst case", "absolute", "relative", "bound", "")
    cells = [
        (
            *(row.op, row.implementation, row.case),
            *(f"{number:.1e}" for number in (row.absolute, row.relative, row.bound)),
            "ok" if row.ok else "BROKEN",
        )
        for row in rows
    ]
    table: Sequence[Sequence[str]] = [header, *cells]
    if sys.stdout.isatty():
        table = narrow(table, shutil.get_terminal_size().columns, drop=3, cut=2)
    click.echo(columns(table, right=range(3, len(table[0]) - 1)))
    if broken := sum(not row.ok for row in rows):
        click.echo(f"{broken} of {len(rows)} bounds are broken", err=True)
        context.exit(1)


@click.command("eval")
@click.argument("model")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--window",
    metavar="N",
    type=click.IntRange(min=2),
    help="Cut documents into pieces of N tokens, each read afresh; by default documents stay whole.",
)
@shared(LOADING)
def evaluate(model: str, file: Path, window: int | None, **options: Any) -> None:
    """Measure how well MODEL predicts FILE: loss (nats a token), perplexity, bits per byte.

    FILE is UTF-8 text, read as one document, or .jsonl with a document a line: {"text": ...} or
    {"messages": [...]}, and perhaps a "kind" to be counted by. Messages also give the loss over the
    assistant's tokens alone.
    """
    from deltafin.evaluate import evaluate, read_documents

    documents = read_documents(file)
    loaded = load(model, options)
    with progress("evaluating") as update:
        scores = evaluate(loaded, documents, window, lambda done, total: update(completed=done, total=total))
    if not any(score.tokens for score in scores):
        raise UsageError(f"{file} holds nothing to predict", "a document needs two tokens")
    header = ("kind", "documents", "tokens", "loss", "perplexity", "bits/byte", "assistant loss")
    cells = [
        (
            score.kind,
            score.documents,
            score.tokens,
            f"{score.loss:.4f}",
            f"{score.perplexity:.4g}",
            f"{score.bits_per_byte:.4f}",
            f"{score.assistant_loss:.4f}" if score.assistant_tokens else "-",
        )
        for score in scores
    ]
    click.echo(columns([header, *cells], right=range(1, 7)))


def contexts(context: click.Context, parameter: click.Parameter, value: str | None) -> list[int] | None:
    """Read a list of context lengths."""
    try:
        lengths = None if value is None else [int(part) for part in value.split(",")]
    except ValueError:
        lengths = [-1]
    if lengths is not None and min(lengths) < 0:
        raise click.BadParameter(f"{value!r} is not a list of lengths such as 1024,4096")
    return lengths


@click.command()
@click.argument("model", default=NANO)
@click.option(
    "--contexts",
    metavar="N,N",
    callback=contexts,
    help="Measure after that many tokens; by default after 128, 1024 and 4096, as far as MODEL gets in a minute.",
)
@click.option("--kernels", is_flag=True, help="Measure single operations at the shapes of real models instead.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--csv", "with_csv", is_flag=True, help="Print CSV.")
@shared(LOADING)
def bench(model: str, contexts: list[int] | None, kernels: bool, as_json: bool, with_csv: bool, **options: Any) -> None:
    """Measure the speed of MODEL beside what the memory of this machine allows.

    Decoding a token reads every weight it needs once: bytes a token over the memory's bandwidth is the speed that
    nothing can beat. --kernels does the same for every operation of the backend that MODEL runs on.
    """
    from deltafin import bench, machine
    from deltafin.cli.bench import as_csv, kernel_table, speed_table

    if as_json and with_csv:
        raise click.UsageError("--json and --csv exclude each other")
    if kernels and contexts:
        raise click.UsageError("--kernels measures no contexts: leave --contexts out")
    if kernels:  # on all cores, also where MODEL is a small one
        options["threads"] = options["threads"] or machine.threads()
    loaded = load(model, options)
    report: Any
    with progress("measuring", animated=False) as update:
        if kernels:
            table = loaded.decoder.blocks[0].ops
            report = rows = bench.kernels(table, options["threads"], lambda what: update(description=what))
        else:
            report = bench.measure(loaded, contexts, lambda what: update(description=what))
            rows = report.rows
    if as_json:
        content = [asdict(row) for row in rows] if kernels else asdict(report)
        click.echo(json.dumps(content, indent=2, ensure_ascii=False))
    elif with_csv:
        click.echo(as_csv(rows))
    else:
        click.echo(kernel_table(report) if kernels else speed_table(report))


@contextlib.contextmanager
def waiting() -> Iterator[Callable[[str], None]]:
    """Yield what says on stderr why it takes long: a bar on a terminal, else the first of its lines.

    Nothing is shown, or imported for it, before there is something to say.
    """
    with contextlib.ExitStack() as stack:
        update: Callable[..., None] | None = None

        def tell(what: str) -> None:
            nonlocal update
            if update is None:
                from rich.console import Console

                update = stack.enter_context(progress(what))
                if not Console(stderr=True).is_terminal:
                    click.echo(what, err=True)
            update(description=what)

        yield tell


@contextlib.contextmanager
def progress(what: str, animated: bool = True) -> Iterator[Callable[..., None]]:
    """Show a bar on stderr, if that is a terminal; yield what updates description, completed, total.

    One that is not animated is drawn by updates alone: no thread wakes in between, which would cost what is measured.
    """
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal, auto_refresh=animated) as bar:
        yield functools.partial(bar.update, bar.add_task(what, total=None), refresh=not animated)
