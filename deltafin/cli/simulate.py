"""``deltafin simulate``: what another budget or policy would have made of recorded routes."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from deltafin.cli.plan import size
from deltafin.cli.text import columns

if TYPE_CHECKING:
    from deltafin.simulate import Outcome

BAR = 40
"""Characters of a bar for a hit rate of one."""


@click.command()
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--ram",
    "budgets",
    metavar="SIZE",
    multiple=True,
    help="Memory for everything, such as 16GB; may be repeated. By default eight, from the smallest to all experts.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def simulate(trace: Path, budgets: tuple[str, ...], as_json: bool) -> None:
    """Replay the routes in TRACE, which --trace wrote, under every policy and budget.

    Shows which share of the experts each policy would find in memory, and what a token would read. The optimal policy
    knows the future: nothing can do better. Memory is empty at the start.
    """
    from deltafin.cli.commands import progress
    from deltafin.placement import bytes_of
    from deltafin.simulate import Layers
    from deltafin.simulate import simulate as replay_all
    from deltafin.trace import read

    asked = [bytes_of(part) for budget in budgets for part in budget.split(",")]
    about, steps = read(trace)
    with progress("replaying") as update:
        outcomes = replay_all(Layers.of(about), steps, asked, lambda done, total: update(completed=done, total=total))
    if as_json:
        click.echo(json.dumps([asdict(outcome) for outcome in outcomes], indent=2))
    else:
        click.echo(f"{table(outcomes)}\n\n{plot(outcomes)}")


def rows(outcomes: Sequence["Outcome"]) -> list[dict[str, "Outcome"]]:
    """Return what each policy makes of a budget, one budget after the other."""
    by_budget: dict[int, dict[str, Outcome]] = {}
    for outcome in outcomes:
        by_budget.setdefault(outcome.ram, {})[outcome.policy] = outcome
    return list(by_budget.values())


def table(outcomes: Sequence["Outcome"]) -> str:
    """Return hit rates of all policies by budget, and bytes a token under the one that runs and the optimal one."""
    names = list(dict.fromkeys(outcome.policy for outcome in outcomes))
    last = names[-2:]
    header = ("memory", "experts", *names, *(f"read a token, {name}" for name in last), "prompts")
    cells = []
    for row in rows(outcomes):
        first = row[names[0]]
        rates = (f"{row[name].hit_rate:.1%}" for name in names)
        amounts = (size(row[name].bytes_per_token) for name in last)
        cells.append((size(first.ram), first.slots, *rates, *amounts, size(row[last[0]].prompt_bytes)))
    return columns([header, *cells], right=range(len(header)))


def plot(outcomes: Sequence["Outcome"]) -> str:
    """Return a bar for each budget: found in memory, what the optimal policy would find besides, and the rest."""
    name, best = list(dict.fromkeys(outcome.policy for outcome in outcomes))[-2:]
    lines = []
    for row in rows(outcomes):
        found, possible = (round(BAR * row[policy].hit_rate) for policy in (name, best))
        bar = "█" * found + "▒" * (possible - found) + "·" * (BAR - max(found, possible))
        lines.append((size(row[name].ram), bar, f"{row[name].hit_rate:.1%}", size(row[name].bytes_per_token)))
    legend = f"█ found in memory, {name}   ▒ besides, {best}"
    return f"{columns([('memory', 'experts in memory', '', 'read a token'), *lines], right=(0, 2, 3))}\n{legend}"
