"""Grade a model's greedy answers to the stored prompts of tests/data/nano, through the public API."""

import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path

import click

PROMPTS = Path(__file__).parents[1] / "tests" / "data" / "nano" / "prompts.jsonl"


def prompts(tasks: Collection[str] = (), limit: int | None = None) -> dict[str, list[dict]]:
    """The stored prompts by task, at most ``limit`` of each.

    ``tasks`` chooses some: ``passkey`` means every task whose name starts with ``passkey-`` as well.
    """
    chosen: dict[str, list[dict]] = {}
    with PROMPTS.open(encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            if not tasks or row["task"] in tasks or row["task"].partition("-")[0] in tasks:
                chosen.setdefault(row["task"], []).append(row)
    return {task: rows[:limit] for task, rows in chosen.items()}


def right(reply: str, answer: str) -> bool:
    """Whether one of the |-separated answers stands in ``reply`` as whole words, case ignored."""
    return any(re.search(rf"(?<!\w){re.escape(a)}(?!\w)", reply, re.IGNORECASE) for a in answer.split("|"))


def grade(model, rows: list[dict]) -> Iterator[bool]:
    """Whether ``model`` answers each of ``rows`` rightly, one after the other."""
    for row in rows:
        yield right(model.generate(row["messages"], thinking=False, max_tokens=64), row["answer"])


@click.command(help=__doc__)
@click.argument("model", default="nano")
@click.option("--tasks", default="", metavar="A,B", help="Only these tasks, such as math,passkey.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="At most N prompts a task.")
def main(model: str, tasks: str, limit: int | None) -> None:
    """Print a table of the scores."""
    import deltafin

    chosen = prompts([name for name in tasks.split(",") if name], limit)
    if not chosen:
        raise click.BadParameter(f"no such task; there are {', '.join(prompts())}", param_hint="--tasks")
    loaded = deltafin.load(model)
    click.echo(f"{'task':<16}{'right':>6}{'n':>6}{'percent':>9}")
    for task, rows in chosen.items():
        hits = sum(grade(loaded, rows))
        click.echo(f"{task:<16}{hits:>6}{len(rows):>6}{100 * hits / len(rows):>9.1f}")


if __name__ == "__main__":
    main()
