"""``deltafin plan`` and ``deltafin doctor``: what a model would do here, and what this machine is like."""

import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deltafin.cli.options import NANO, PACKING, shared
from deltafin.cli.text import columns, plain
from deltafin.errors import UsageError

if TYPE_CHECKING:
    from deltafin.doctor import Check
    from deltafin.placement import Demand, Placement

PROMPTS = (1024, 8192)
"""Lengths of prompts that the first token is predicted for."""

NAMES = {"gpu": "GPU", "ram": "RAM", "disk": "disk"}


def size(count: float) -> str:
    """Write bytes for people."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count:.0f} B"


def duration(seconds: float) -> str:
    """Write a time for people."""
    if seconds >= 7200:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.1f} min" if seconds >= 120 else f"{seconds:.3g} s"


@click.command()
@click.argument("model")
@click.option(
    "--ram", metavar="SIZE", help="Memory to plan with, such as 48GB; by default nine tenths of what is free."
)
@click.option(
    "--gpu",
    metavar="SIZE",
    help="GPU memory to plan with, or a size for each: 20GB,20GB; by default nine tenths of what is free.",
)
@click.option(
    "--place",
    type=click.Choice(["auto", "cpu", "gpu", "hybrid"]),
    default="auto",
    show_default=True,
    help="Where to run: on the processor, on the GPU as far as it holds, or divided; auto takes the fastest.",
)
@click.option(
    "--context",
    metavar="N",
    type=click.IntRange(min=1),
    help="Tokens that a conversation shall hold.  [default: 8192, or what MODEL promises if that is less]",
)
@click.option(
    "--machine",
    "file",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Plan for the machine that a JSON file describes instead of this one.",
)
@click.option("--measure", "again", is_flag=True, help="Measure this machine again.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@shared(PACKING)
def plan(
    model: str,
    ram: str | None,
    gpu: str | None,
    place: str,
    context: int | None,
    file: Path | None,
    again: bool,
    as_json: bool,
    resident: str,
    experts: str,
) -> None:
    """Say where every byte of MODEL would live, and how fast it would be.

    MODEL is a folder, "nano", or a repository on the hub (org/name, or org/name@revision), of which only the
    configuration and the headers are read. Speeds are what memory, disk and processor allow at best.
    """
    from deltafin import placement
    from deltafin.cli.commands import waiting

    if file and again:
        raise click.UsageError("--measure measures this machine: leave --machine out")
    budgets = {} if ram is None else {"ram": placement.bytes_of(ram)}
    gpus = [] if gpu is None else placement.sizes_of(gpu)
    with waiting() as tell:
        where, read = found(model, tell)
        demand = read(resident, experts)
        notes = [] if file is None else [f"as {file} describes it"]
        if file is not None:
            machine = placement.Machine.read(file)
        else:
            from deltafin.measure import measured

            here = measured(where, max(layer.expert for layer in demand.layers), again, tell)
            machine, notes = here.machine, here.notes
            machine = replace(machine, gpu=int(machine.gpu * placement.SHARE))
            if budgets.get("ram", 0) > machine.ram:
                notes.append(f"--ram is more than is free here now ({size(machine.ram)})")
    gpus = gpus or [machine.gpu]
    if (any(gpus) and not machine.gpu_gbs) or (place in ("gpu", "hybrid") and not any(gpus)):
        raise UsageError("there is no GPU to plan with", "--machine takes a file that describes one")
    context = context or demand.context
    placed, devices = placement.plan_over(demand, replace(machine, **budgets), context, place, gpus)
    each = placement.on_each(placed, devices)
    if not placed.gpu_units and max(gpus) < (needed := placement.least(demand, context, place)) and any(gpus):
        notes.append(f"the GPU holds no layer: the first takes {size(needed)}, driver and buffers included")
    changes = list(alternatives(placed, read, resident, experts, place))
    if as_json:
        content = {"model": model, "notes": notes, **placement.as_json(placed, PROMPTS)}
        content |= {"gpus": each} if each else {}
        content["alternatives"] = [{"what": what, **speeds(p)} for what, p in changes]
        click.echo(json.dumps(content, indent=2, ensure_ascii=False))
    else:
        click.echo(described(model, placed, each, notes, changes))


def found(model: str, tell: Callable[[str], None]) -> tuple[Path, Callable[[str, str], "Demand"]]:
    """Return where a model is, or would be, and what gives its demand for a choice of packing."""
    from deltafin import demand, library, machine
    from deltafin.store import open_model

    if path := here(model):
        files = open_model(path)
        return path, lambda resident, experts: demand.of_files(files, resident, experts)
    from deltafin.hub import remote_headers

    tell(f"reading the headers of {model}")
    layout = remote_headers(*library.parse(model)).layout()
    return machine.hub_folder(), lambda resident, experts: demand.of_layout(layout, resident, experts)


def here(model: str) -> Path | None:
    """Return the folder of a model, or that of one that was pulled; None for the name of one that was not."""
    from deltafin import library

    path = library.EMBEDDED if model == NANO else Path(model).expanduser()
    if path.is_dir():
        return path
    if library.split(model) is None:
        hint = "give the folder of a model, nano, or a repository on the hub such as org/name"
        raise UsageError(f"there is no model folder {model!r}", hint)
    with suppress(UsageError):
        return library.find(model)
    return None


def alternatives(
    p: "Placement", read: Callable[[str, str], "Demand"], resident: str, experts: str, place: str
) -> Iterator[tuple[str, "Placement"]]:
    """Yield what could be changed, with what would follow."""
    from deltafin import placement

    for what, machine in placement.faster(p.machine):
        yield what, placement.plan(p.demand, machine, p.context, place)
    for what, choice in (("--resident int8", ("int8", experts)), ("--experts mxfp4", (resident, "mxfp4"))):
        demand = read(*choice)
        if demand.weights < p.demand.weights:
            yield what, placement.plan(demand, p.machine, p.context, place)


def speeds(p: "Placement") -> dict[str, Any]:
    """Return the figures that people ask for."""
    return {
        "tokens_per_second": p.tokens_per_second,
        "first_token_seconds": {str(n): sum(p.first_token(n).values()) for n in PROMPTS},
        "experts_resident": p.resident,
    }


def described(
    model: str, p: "Placement", each: dict[str, str], notes: list[str], changes: list[tuple[str, "Placement"]]
) -> str:
    """Write a plan for people, no wider than a narrow terminal."""
    from deltafin.placement import DISK, RAM, TIERS, context_that_fits

    used = [tier for tier in TIERS if p.total(tier) or tier == RAM]
    held = [("", *(NAMES[tier] for tier in used))]
    token = [("a token moves", *(NAMES[tier] for tier in used))]
    for share in p.shares:
        held.append((share.what, *(shown(share.held.get(tier, 0)) for tier in used)))
        if share.token:
            token.append((share.what, *(shown(share.token.get(tier, 0)) for tier in used)))
    held.append(("together", *(shown(p.total(tier)) for tier in used)))
    token.append(("time", *(duration(p.token_seconds.get(tier, 0)) for tier in used)))
    right, where = range(1, len(used) + 1), "" if p.place == "cpu" else f", --place {p.place}"
    taken, fits = p.token_seconds, context_that_fits(p.demand, p.machine, p.place)
    whole = sum(taken.values())
    facts = [
        *each.items(),
        ("decoding", f"{p.tokens_per_second:.3g} tokens/s after {p.context:,} tokens"),
        *((f"{n:,} tokens", f"{duration(sum(p.first_token(n).values()))} until the first answer") for n in PROMPTS),
        ("loading", f"{duration(p.load_seconds)} at least, from the disk"),
        ("context", f"{fits:,} tokens fit" if fits else "what every token reads does not fit into memory"),
    ]
    if p.demand.experts:
        facts.append(("experts", f"{p.resident:.0%} in memory, so that many are expected to be found there"))
    worst = p.bottleneck
    reason = {RAM: "the memory's bandwidth", DISK: "the disk"}.get(worst, "the GPU's memory bandwidth")
    facts.append(("bottleneck", f"{reason}: {taken[worst] / whole:.0%} of a token's time"))
    table = [("what if", "tokens/s", *(f"{n:,} tokens" for n in PROMPTS))]
    for what, other in [("as it is", p), *changes]:
        waits = (duration(sum(other.first_token(n).values())) for n in PROMPTS)
        table.append((what, f"{other.tokens_per_second:.3g}", *waits))
    return "\n\n".join(
        [
            f"{plain(model)}, {size(p.demand.weights)} of weights, for {p.context:,} tokens of context{where}",
            columns(held, right),
            columns(token, right),
            columns(facts),
            columns(table, range(1, 4)),
            "\n".join(notes),
        ]
    )


def shown(count: float) -> str:
    """Write bytes in a table, in which nothing is a dash."""
    return size(count) if count else "-"


@click.command()
@click.argument("model", required=False)
@click.option("--measure", "again", is_flag=True, help="Measure the disk again.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def doctor(context: click.Context, model: str | None, again: bool, as_json: bool) -> None:
    """Look at what deltafin needs of this machine, and at the files of MODEL if given.

    Each line is ok, a warning or an error, with what to do. Exit code 1 says that there is an error.
    """
    from deltafin.cli.commands import waiting
    from deltafin.doctor import checks

    path = None
    if model is not None and (path := here(model)) is None:
        raise UsageError(f"{model} is not on this machine", f"`deltafin pull {model}` fetches it")
    found = []
    with waiting() as tell:
        for check in checks(path, again, tell):
            found.append(check)
            if not as_json:
                click.echo(line(check, shutil.get_terminal_size().columns if sys.stdout.isatty() else 0))
    if as_json:
        click.echo(json.dumps([asdict(check) for check in found], indent=2, ensure_ascii=False))
    if any(check.status == "error" for check in found):
        context.exit(1)


def line(check: "Check", width: int) -> str:
    """Write one check; ``width`` 0 means that it is not wrapped."""
    text = plain(check.text.replace("\n", " "))
    if check.hint:
        text += f" - {plain(check.hint)}"
    first = f"{check.status:<8} {check.name:<9} "
    return (
        textwrap.fill(text, max(width, 40), initial_indent=first, subsequent_indent=" " * 9) if width else first + text
    )
