"""The options that commands share: each means the same everywhere."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

NANO = "nano"

PACKING = [
    click.option(
        "--resident",
        type=click.Choice(["keep", "int8"]),
        default="keep",
        show_default=True,
        help="Hold what every token uses as it is stored, or rounded to int8 in memory.",
    ),
    click.option(
        "--experts",
        type=click.Choice(["keep", "mxfp4", "int8"]),
        default="keep",
        show_default=True,
        help="Hold experts as they are stored, or rounded to fewer bits in memory.",
    ),
]

LOADING = [
    click.option(
        "--dtype",
        type=click.Choice(["float32", "bfloat16", "float64"]),
        default="float32",
        show_default=True,
        help="Type to compute in.",
    ),
    click.option(
        "--threads",
        metavar="N",
        type=click.IntRange(min=1),
        help="Processor threads; by default one for a small model, else all cores.",
    ),
    click.option(
        "--backend",
        type=click.Choice(["auto", "numba", "reference"]),
        default="auto",
        show_default=True,
        help="Kernels to run on: numba, also what auto means so far, or plain torch.",
    ),
    click.option("--ram", metavar="SIZE", help="Memory to stay below, such as 16GB; experts that do not fit are read."),
    click.option(
        "--pin",
        metavar="N",
        type=click.IntRange(min=0),
        default=0,
        help="Never give up the N experts that were the hottest in earlier runs; with --ram.",
    ),
    click.option(
        "--lookahead/--no-lookahead",
        default=None,
        help="Read experts before it is certain that they are needed; by default where it is a gain; with --ram.",
    ),
    click.option(
        "--place",
        type=click.Choice(["auto", "cpu", "gpu", "hybrid"]),
        default="auto",
        show_default=True,
        help="Where to run: on the processor, on the GPU as far as it holds, or divided; auto takes the fastest.",
    ),
    click.option(
        "--gpu",
        metavar="SIZE",
        help="GPU memory to stay below, such as 20GB, or a size for each: 20GB,20GB; by default 9/10 of what is free.",
    ),
    *PACKING,
]


def encodings(experts: str, resident: str) -> list[Any]:
    """Return the options that say what a store's weights are written as, with their help."""
    formats = ["keep", "mxfp4", "int8", "bf16"]
    return [
        click.option("--experts", type=click.Choice(formats), default="keep", show_default=True, help=experts),
        click.option(
            "--resident",
            type=click.Choice([name for name in formats if name != "mxfp4"]),
            default="keep",
            show_default=True,
            help=resident,
        ),
    ]


SAMPLING = [
    click.option(
        "--temperature",
        metavar="T",
        type=click.FloatRange(min=0),
        default=0.0,
        show_default=True,
        help="0 takes the likeliest token each time; higher is more varied.",
    ),
    click.option(
        "--top-k",
        metavar="K",
        type=click.IntRange(min=0),
        default=0,
        help="Sample from the K likeliest tokens; 0: from all.",
    ),
    click.option(
        "--top-p",
        metavar="P",
        type=click.FloatRange(0, 1, min_open=True),
        default=1.0,
        help="Sample from the likeliest tokens that together have probability P.",
    ),
    click.option(
        "--min-p",
        metavar="P",
        type=click.FloatRange(0, 1),
        default=0.0,
        help="Drop tokens less likely than P times the likeliest one.",
    ),
    click.option(
        "--repetition-penalty",
        metavar="R",
        type=click.FloatRange(min=0, min_open=True),
        default=1.0,
        help="Above 1 makes tokens that were used already less likely.",
    ),
    click.option("--seed", metavar="N", type=int, help="Sample the same way each time."),
]

TALKING = [
    click.option(
        "--max-tokens",
        metavar="N",
        type=click.IntRange(min=1),
        default=512,
        show_default=True,
        help="End an answer after N tokens, thinking included.",
    ),
    click.option("--system", metavar="TEXT", help="System prompt."),
    click.option("--think/--no-think", default=None, help="Let the model think before it answers."),
    click.option("--effort", type=click.Choice(["low", "high", "max"]), help="How much to think."),
    click.option("--stats", is_flag=True, help="Report tokens, speed and where time went on stderr after an answer."),
    click.option(
        "--trace",
        metavar="FILE",
        type=click.Path(dir_okay=False, path_type=Path),
        help="Write the experts and seconds of every token to FILE, and to FILE.viewer.json for a trace viewer.",
    ),
]


def shared(*groups: list[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    """Decorate a command with groups of options, listed in its help in this order."""

    def decorate(command: Any) -> Any:
        for option in reversed([option for group in groups for option in group]):
            command = option(command)
        return command

    return decorate


def sampling(options: dict[str, Any]) -> dict[str, Any]:
    """Pick the sampling options out of a command's options."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
    return {name: options[name] for name in names}
