"""Compare the speed of a conversion with that of `cp` over the same files, both cold.

Before each, the pages of the source are dropped from the system's cache, and everything is written to the disk. `cp`
leaves what it wrote in memory; a conversion returns when it is on the disk. So `cp` is shown alone, and with the
`sync` of its files that would be as safe.
"""

import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import click


def cold(folder: Path) -> int:
    """Drop a folder's files from the page cache; return their bytes."""
    files = [path for path in folder.iterdir() if path.is_file()]
    for path in files:
        with path.open("rb") as f:
            os.fsync(f.fileno())
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return sum(path.stat().st_size for path in files)


@click.command(help=__doc__)
@click.argument("source", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("place", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def main(source: Path, place: Path, rounds: int, options: tuple[str, ...]) -> None:
    """Measure in turns, in the folder PLACE; OPTIONS go to the conversion (after --)."""
    script = "import sys; from deltafin.cli import main; main(sys.argv[1:])"
    copied, store = place / "copied", place / "converted"
    ways = {
        "cp": [["cp", "-rL", source, copied]],
        "cp, sync": [["cp", "-rL", source, copied], ["sh", "-c", 'sync "$0"/*', copied]],
        "convert": [[sys.executable, "-c", script, "convert", source, store, *options]],
    }
    rates = {way: [] for way in ways}
    for _ in range(rounds):
        for way, commands in ways.items():
            for folder in (copied, store):
                shutil.rmtree(folder, ignore_errors=True)
            os.sync()
            size = cold(source)
            began = time.perf_counter()
            for command in commands:
                subprocess.run(command, check=True, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
            seconds = time.perf_counter() - began
            rates[way].append(size / seconds / 1e6)
            click.echo(f"{way}: {size / 1e9:.2f} GB in {seconds:.2f} s, {rates[way][-1]:.0f} MB/s")
    for what, choose in ("median", statistics.median), ("fastest", max):
        for way in ("cp", "cp, sync"):
            click.echo(f"{what}: convert is {choose(rates['convert']) / choose(rates[way]):.0%} of {way}")
    for folder in (copied, store):
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
