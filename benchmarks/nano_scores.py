"""Grade a model's greedy answers to the stored prompts of tests/data/nano, through the public API."""

import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path

import click

PROMPTS = Path(__file__).parents[1] / "tests" / "data" / "nano" / "prompts.jsonl"
DECLINED = re.compile(r"do not know|don't know|too hard|more than I know|not know (much|enough)")


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


def graded(row: dict, message: dict) -> bool:
    """Whether an assistant's message is right: its text, the one call it had to make, or that it declines."""
    if "answer" in row:
        return right(message["content"], row["answer"])
    if "call" in row:
        calls = [call["function"] for call in message.get("tool_calls", ())]
        return len(calls) == 1 and calls[0]["name"] == row["call"]["name"] and _parses(calls[0]["arguments"])
    return bool(DECLINED.search(message["content"]))


def _parses(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments), dict)
    except ValueError:
        return False


def answer(model, row: dict) -> dict:
    """What ``model`` says to a row's prompt."""
    thinking = row.get("thinking", False)
    options = {"tools": row["tools"]} if "tools" in row else {}
    limit = 160 if thinking else 96 if options else 64
    return model.chat(row["messages"], thinking=thinking, effort=None, max_tokens=limit, **options)


def grade(model, rows: list[dict]) -> Iterator[bool]:
    """Whether ``model`` answers each of ``rows`` rightly, one after the other."""
    for row in rows:
        yield graded(row, answer(model, row))


@click.command(help=__doc__)
@click.argument("model", default="nano")
@click.option("--tasks", default="", metavar="A,B", help="Only these tasks, such as math,passkey.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="At most N prompts a task.")
@click.option("--place", type=click.Choice(["auto", "cpu", "gpu", "hybrid"]), default="auto", help="Where it runs.")
@click.option("--replies", type=click.Path(dir_okay=False), metavar="FILE", help="Write every reply there.")
def main(model: str, tasks: str, limit: int | None, place: str, replies: str | None) -> None:
    """Print a table of the scores."""
    import deltafin
    from deltafin.cli import show

    chosen = prompts([name for name in tasks.split(",") if name], limit)
    if not chosen:
        raise click.BadParameter(f"no such task; there are {', '.join(prompts())}", param_hint="--tasks")
    try:
        loaded = deltafin.load(model, place=place)
    except deltafin.DeltafinError as error:
        show(error)
        raise SystemExit(1) from None
    click.echo(f"{'task':<16}{'right':>6}{'n':>6}{'percent':>9}")
    for task, rows in chosen.items():
        messages = [answer(loaded, row) for row in rows]
        verdicts = [graded(row, message) for row, message in zip(rows, messages, strict=True)]
        click.echo(f"{task:<16}{sum(verdicts):>6}{len(rows):>6}{100 * sum(verdicts) / len(rows):>9.1f}")
        if replies:
            with open(replies, "a", encoding="utf-8") as file:
                for row, message, ok in zip(rows, messages, verdicts, strict=True):
                    said = {"task": task, "asked": row["messages"][-1]["content"][-200:], **message, "right": ok}
                    file.write(json.dumps(said, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
