"""Compare deltafin with other programs on one checkpoint: tokens a second of decoding and of reading 512 tokens.

FOLDER is a checkpoint, for example of make_synthetic.py; llama.cpp runs each --gguf made from it. Programs take turns
for some rounds, every turn in a process of its own, because processes differ more than repetitions inside one. Shown
are medians over the processes, their ranges, and how many times faster deltafin is: the median of the rounds' ratios.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import click

HERE = Path(__file__).parent
PREFILL, DECODE = 512, 64


class Turn(NamedTuple):
    """What one process measured, in tokens a second."""

    prefill: float
    decode: float


class Program(NamedTuple):
    """A program with what it runs: how a process is started, and how its output is read."""

    name: str
    command: list[str]
    read: Callable[[str], Turn]


def read_deltafin(output: str) -> Turn:
    """Read the JSON of ``deltafin bench --contexts 0,512``: decoding from nothing, reading 512 tokens."""
    first, second = json.loads(output)["rows"]
    return Turn(second["prefill_tok_s"], first["decode_tok_s"])


def read_llama(output: str) -> Turn:
    """Read the JSON of ``llama-bench``: one entry for the prompt, one for generation."""
    entries = json.loads(output)
    prefill, decode = (next(e for e in entries if e[part]) for part in ("n_prompt", "n_gen"))
    return Turn(*(statistics.median(e["samples_ts"]) for e in (prefill, decode)))


def read_peer(output: str) -> Turn:
    """Read what ``peer_transformers.py`` and ``peer_mlx.py`` print last."""
    speeds = json.loads(output.splitlines()[-1])
    return Turn(statistics.median(speeds["prefill"]), statistics.median(speeds["decode"]))


def programs(
    folder: Path,
    gguf: Sequence[Path],
    threads: int,
    llama_bench: str | None,
    others: dict[str, str],
    packed: bool = False,
    bfloat16: bool = False,
) -> list[Program]:
    """List what can run here; ``others`` are the interpreters that have transformers or mlx.

    ``packed``: deltafin runs with rounded weights too, to be compared with files of as many bits. ``bfloat16``: it runs
    each with activations in bfloat16 too, to be compared with programs that round them.
    """
    deltafin = [sys.executable, "-c", "from deltafin.cli import main; main()", "bench", str(folder)]
    deltafin += ["--json", "--contexts", f"0,{PREFILL}", "--threads", str(threads)]
    found = [Program("deltafin", deltafin, read_deltafin)]
    for name, experts in (("int8", "int8"), ("int8 + MXFP4", "mxfp4")) if packed else ():
        options = ["--resident", "int8", "--experts", experts]
        found.append(Program(f"deltafin {name}", deltafin + options, read_deltafin))
    for program in found[:] if bfloat16 else ():
        command = [*program.command, "--dtype", "bfloat16"]
        found.append(Program(f"{program.name}, in bfloat16", command, read_deltafin))
    for file in gguf if llama_bench else ():
        command = [str(llama_bench), "-m", str(file), "-p", str(PREFILL), "-n", str(DECODE), "-t", str(threads)]
        found.append(Program(f"llama.cpp {file.stem}", [*command, "-r", "3", "-o", "json"], read_llama))
    for name, python in others.items():
        script = str(HERE / f"peer_{name}.py")
        found.append(Program(name, [python, script, str(folder), str(threads), str(PREFILL), str(DECODE)], read_peer))
    return found


def compete(entrants: Sequence[Program], rounds: int, tell: Callable[[str], None]) -> dict[str, list[Turn]]:
    """Let every program take a turn in every round; one that fails is told of and drops out."""
    turns: dict[str, list[Turn]] = {p.name: [] for p in entrants}
    # Two threads of OpenMP that wait by spinning must not share a core; deltafin's do not spin.
    environment = os.environ | {"OMP_PROC_BIND": "true", "HF_HUB_OFFLINE": "1"}
    for number in range(rounds):
        for program in [p for p in entrants if p.name in turns]:
            own = os.environ if program.read is read_deltafin else environment
            done = subprocess.run(program.command, env=own, capture_output=True, text=True, encoding="utf-8")
            if done.returncode:
                last = (done.stderr.strip().splitlines() or ["no message"])[-1]
                tell(f"{program.name} failed ({done.returncode}): {last}")
                del turns[program.name]
                continue
            turns[program.name].append(turn := program.read(done.stdout))
            tell(f"round {number + 1}, {program.name}: {turn.decode:.1f} decode, {turn.prefill:.1f} prefill")
    return turns


def table(turns: dict[str, list[Turn]]) -> list[str]:
    """Return a line for every program; ``deltafin`` comes first and is what others are compared with."""
    lines = [f"{'program':<40}{'decode tok/s':>24}{'ratio':>8}{'prefill tok/s':>24}{'ratio':>8}"]
    for name, measured in turns.items():
        line = f"{name:<40}"
        for part in ("decode", "prefill"):
            speeds = [getattr(turn, part) for turn in measured]
            ours = [getattr(turn, part) for turn in turns.get("deltafin", ())]
            ratios = [a / b for a, b in zip(ours, speeds, strict=False)]
            shown = f"{statistics.median(speeds):.1f} ({min(speeds):.1f}-{max(speeds):.1f})"
            line += f"{shown:>24}{f'{statistics.median(ratios):.2f}' if ratios else '-':>8}"
        lines.append(line)
    return lines


def has(python: str, module: str) -> bool:
    """Whether an interpreter has a module."""
    find = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    try:
        return subprocess.run([python, "-c", find], capture_output=True).returncode == 0
    except OSError:
        return False


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--gguf", multiple=True, type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE")
@click.option("--llama-bench", default=shutil.which("llama-bench"), metavar="FILE", help="Default: the one on PATH.")
@click.option("--transformers", default=sys.executable, metavar="PYTHON", help="Interpreter that has transformers.")
@click.option("--mlx", default=sys.executable, metavar="PYTHON", help="Interpreter that has mlx-lm.")
@click.option("--threads", type=click.IntRange(min=1), default=os.cpu_count(), metavar="N", help="Default: all.")
@click.option("--packed", is_flag=True, help="Run deltafin with int8 and with int8 and MXFP4 weights too.")
@click.option("--bfloat16", is_flag=True, help="Run deltafin with activations in bfloat16 too.")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True, metavar="N")
def main(
    folder: Path,
    gguf: tuple[Path, ...],
    llama_bench: str | None,
    transformers: str,
    mlx: str,
    threads: int,
    packed: bool,
    bfloat16: bool,
    rounds: int,
) -> None:
    """Print a table of speeds."""
    others = {"transformers": (transformers, "transformers"), "mlx": (mlx, "mlx_lm")}
    present = {name: python for name, (python, module) in others.items() if has(python, module)}
    for name in [n for n in others if n not in present] + ([] if llama_bench and gguf else ["llama.cpp"]):
        click.echo(f"{name} is left out: not installed, or nothing for it to run", err=True)
    entrants = programs(folder, gguf, threads, llama_bench, present, packed, bfloat16)
    turns = compete(entrants, rounds, lambda text: click.echo(text, err=True))
    click.echo("\n".join(table(turns)))


if __name__ == "__main__":
    main()
