"""The command line: the group of commands and the one place that turns errors into messages."""

import sys
from typing import Any

import click

from deltafin import __version__
from deltafin.cli import commands, hub, plan
from deltafin.cli.convert import convert
from deltafin.cli.simulate import simulate
from deltafin.cli.text import plain
from deltafin.errors import DeltafinError


class Group(click.Group):
    """A group whose commands need no ``try``: a user's mistake becomes a message, Ctrl-C an exit code.

    Exit codes: 0 done, 1 a ``DeltafinError`` or a failed check, 2 wrong usage, 130 interrupted. Anything else
    that is raised is our mistake and keeps its traceback.
    """

    def invoke(self, ctx: click.Context) -> Any:
        """Run the chosen command."""
        for stream in (sys.stdin, sys.stdout, sys.stderr):
            # Files and pipes are UTF-8 everywhere; a terminal that cannot show a character shows "?".
            if reconfigure := getattr(stream, "reconfigure", None):
                reconfigure(encoding=None if stream.isatty() else "utf-8", errors="replace")
        try:
            return super().invoke(ctx)
        except DeltafinError as error:
            show(error)
            ctx.exit(1)
        except KeyboardInterrupt:
            ctx.exit(130)


def show(error: DeltafinError) -> None:
    """Write a user's mistake to stderr: what happened, and what to do."""
    click.echo(f"error: {plain(error.message)}", err=True)
    if error.hint:
        click.echo(f"hint: {plain(error.hint)}", err=True)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, message="deltafin %(version)s")
def main() -> None:
    """Run Kimi K3 and other hybrid linear-attention models on this machine.

    MODEL is the folder of a Hugging Face snapshot or of a converted store, org/name of a model that was pulled, or
    "nano", the demonstration model that comes with it.
    """


for command in (
    *(commands.chat, commands.run, commands.info, convert),
    *(commands.verify, commands.evaluate, commands.bench),
    *(hub.pull, hub.list_models, hub.remove),
    *(plan.plan, plan.doctor, simulate),
):
    main.add_command(command)
