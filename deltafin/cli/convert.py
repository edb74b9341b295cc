"""The command that converts, and how it shows what it does."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import click

from deltafin.cli.options import encodings, shared
from deltafin.cli.text import columns


@click.command()
@click.argument("source")
@click.argument("dest", required=False)
@shared(
    encodings(
        "Store routed experts as they are, or in this format.",
        "Store what every token uses as it is, or in this format; never the router.",
    )
)
@click.option("--verify", "check", is_flag=True, help="Read the finished store again; SOURCE alone may be a store.")
def convert(source: str, dest: str | None, experts: str, resident: str, check: bool) -> None:
    """Convert SOURCE, a folder, "nano" or org/name of a snapshot, to a store at DEST.

    A store has every expert in one piece, and a checksum for all of it; nothing is rounded unless an option asks
    for it. An interrupted conversion goes on where it stopped when the same command is given again. Where DEST is
    finished already, it is compared with what SOURCE makes.
    """
    from deltafin.convert import convert as run
    from deltafin.store import Store

    if not dest and not (check and experts == resident == "keep"):
        raise click.UsageError("DEST is missing" if not check else "--verify of a store takes no other option")
    if dest:
        with transfer("converting") as update:
            errors = run(source, dest, experts=experts, resident=resident, progress=update)
        if errors:
            click.echo(error_table(errors))
    store = Path(dest or source).expanduser()
    if check:
        with transfer("verifying") as update:
            Store(store, full=True, progress=update)
    click.echo(f"{store} is {'whole' if check else 'ready'}", err=True)


def error_table(errors: Mapping[str, float]) -> str:
    """Write what re-encoding has cost, by kind of tensor."""
    rows = [("re-encoded", "relative error"), *((kind, f"{error:.2e}") for kind, error in errors.items())]
    return columns(rows, right=[1])


@contextlib.contextmanager
def transfer(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show bytes, rate and time left on stderr: a bar on a terminal, else a line for each tenth.

    Yields what is called with bytes done and in all.
    """
    from rich.console import Console
    from rich.filesize import decimal
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    if not sys.stderr.isatty():
        shown = -1

        def line(done: int, total: int) -> None:
            nonlocal shown
            if (tenth := 10 * done // max(1, total)) > shown:
                shown = tenth
                click.echo(f"{what}: {decimal(done)} of {decimal(total)}", err=True)

        yield line
        return
    shape = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*shape, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
