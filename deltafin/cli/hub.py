"""Commands about models on the hub and on this machine: ``pull``, ``list`` and ``remove``."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from deltafin.cli.convert import error_table
from deltafin.cli.options import encodings, shared
from deltafin.cli.text import columns, plain
from deltafin.errors import UsageError


@click.command()
@click.argument("repo")
@click.argument("dest", required=False, type=click.Path(path_type=Path))
@click.option("--revision", metavar="R", help="Branch, tag or commit; by default the main branch.")
@click.option("--convert", is_flag=True, help="Make a store, shard by shard, and keep no shard.")
@shared(encodings("With --convert, as there.", "With --convert, as there."))
def pull(repo: str, dest: Path | None, revision: str | None, convert: bool, experts: str, resident: str) -> None:
    """Fetch the model REPO (org/name) from the Hugging Face hub.

    Only what a text model needs is fetched, into the hub's cache or the folder DEST, and checked against the published
    hashes; then REPO is the name of a MODEL for every other command. Run again, it goes on where it was stopped,
    checks what is there, and fetches what has changed. The folder is printed on stdout.

    With --convert each shard becomes part of a store when it arrives, and is dropped: the disk never holds more than
    the finished store and two shards.
    """
    from deltafin.pull import pull, pull_converted

    if not convert and (experts, resident) != ("keep", "keep"):
        raise click.UsageError("--experts and --resident belong to --convert")
    errors = dict[str, float]()
    with transfers() as progress:
        if convert:
            chosen = {"experts": experts, "resident": resident}
            path, errors = pull_converted(repo, dest, revision=revision, **chosen, progress=progress)
        else:
            path = pull(repo, dest, revision=revision, progress=progress)
    if errors:
        click.echo(error_table(errors), err=True)
    click.echo(path)


@contextlib.contextmanager
def transfers() -> Iterator[Callable[[str, int, int], None]]:
    """Show on stderr, on a terminal, a bar for each file under way and one for all; else a line for each that is done.

    Yields what is told a file's name, bytes that are here and all of it; without a name, the same of all files.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True, soft_wrap=True, markup=False, highlight=False, emoji=False)
    name = TextColumn("{task.description}", markup=False)
    shape = name, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with Progress(*shape, console=console, transient=True, disable=not console.is_terminal) as bars:
        rows = {"": bars.add_task("in all", total=None)}
        files, in_all = 0, 0

        def tell(name: str, done: int, size: int) -> None:
            nonlocal files, in_all
            if name not in rows:
                rows[name] = bars.add_task(plain(name), total=size)
            bars.update(rows[name], completed=done, total=size, visible=not name or done < size)
            if not name:
                in_all = size
            elif done == size:
                files += 1
                console.print(plain(f"{name}  {amount(size)}"))

        yield tell
    if files:
        console.print(f"in all  {files} files, {amount(in_all)}")


def amount(size: int) -> str:
    """Write bytes for people, in powers of ten as disks are sold."""
    number, units = float(size), iter(("bytes", "kB", "MB", "GB", "TB"))
    unit = next(units)
    while number >= 999.95 and unit != "TB":
        number, unit = number / 1000, next(units)
    return f"{size} bytes" if unit == "bytes" else f"{number:.1f} {unit}"


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; sizes are bytes.")
def list_models(as_json: bool) -> None:
    """List the models that were pulled, where they are and what space they take.

    A snapshot is what the hub published, in its cache; a store is what pull --convert made of it; a part is one that
    was not finished.
    """
    from deltafin import library

    models = library.stored()
    if as_json:
        rows = [
            {"name": m.name, "revision": m.revision, "bytes": m.size, "kind": m.kind, "path": str(m.path)}
            for m in models
        ]
        click.echo(json.dumps(rows, indent=2, ensure_ascii=False))
    elif models:
        header = ("name", "revision", "size", "kind", "path")
        cells = [(m.name, (m.revision or "-")[:12], amount(m.size), m.kind, m.path) for m in models]
        click.echo(columns([header, *cells], right=[2]))
    else:
        click.echo("no model was pulled yet: `deltafin pull org/name` fetches one", err=True)


@click.command()
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
def remove(name: str, yes: bool) -> None:
    """Remove the model NAME from this machine: org/name, org/name@revision, or a path that `deltafin list` shows.

    What is to be removed is shown, and removed after a yes.
    """
    from deltafin import library

    models = [model for model in library.stored() if model.answers(name)]
    if not models:
        raise UsageError(f"{name} is not among the models that were pulled", "`deltafin list` shows them")
    click.echo(columns([(m.name, (m.revision or "-")[:12], amount(m.size), m.kind, m.path) for m in models]), err=True)
    if not yes:
        click.confirm("Remove?" if len(models) == 1 else f"Remove these {len(models)}?", abort=True, err=True)
    library.remove(models)
