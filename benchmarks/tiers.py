"""Compare what a model larger than memory reads from the disk with what the disk gives, and tiers with mapped files.

STORE is a store whose layers' experts have one size; `make_synthetic.py --scale "deep disk"` and `deltafin convert`
make one. The disk is measured by a program of its own that reads experts at random past the page cache, as many at a
time, before and after the model does.
"""

import json
import mmap
import os
import random
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click


@click.group(help=__doc__)
def main() -> None:
    """Choose what to do."""


@main.command(hidden=True)
@click.argument("store", type=click.Path(exists=True, path_type=Path))
@click.argument("size", type=int)
@click.option("--readers", type=int, default=8)
@click.option("--seconds", type=float, default=8.0)
def raw(store: Path, size: int, readers: int, seconds: float) -> None:
    """Print how many bytes a second reads of SIZE bytes give; nothing of deltafin is used."""
    handles = [uncached(file) for file in sorted(store.glob("experts-*.safetensors"))]
    slabs = [(os.fstat(handle).st_size - 4096) // size for handle in handles]
    end = time.perf_counter() + seconds

    def read(reader: int) -> int:
        place, room, total = random.Random(reader), mmap.mmap(-1, size), 0
        while not total or time.perf_counter() < end:
            which = place.randrange(len(handles))
            total += os.preadv(handles[which], [room], 4096 + size * place.randrange(slabs[which]))
        return total

    began = time.perf_counter()
    with ThreadPoolExecutor(readers) as pool:
        total = sum(pool.map(read, range(readers)))
    print(total / (time.perf_counter() - began))


def uncached(file: Path) -> int:
    """Open a file for direct reads, or for others where its file system refuses them."""
    try:
        return os.open(file, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
    except OSError:
        return os.open(file, os.O_RDONLY)


@main.command()
@click.argument("store", type=click.Path(exists=True, path_type=Path))
@click.option("--share", type=float, default=0.3, show_default=True, help="Share of the experts that have a slot.")
@click.option("--tokens", type=int, default=32, show_default=True)
@click.option("--readers", type=int, default=8, show_default=True)
@click.option("--lookahead", type=click.Choice(["on", "off", "auto"]), default="auto", show_default=True)
@click.option("--rounds", type=int, default=3, show_default=True)
@click.option("--seconds", default=8.0, show_default=True, help="How long the raw disk is measured each time.")
def disk(store: Path, share: float, tokens: int, readers: int, lookahead: str, rounds: int, seconds: float) -> None:
    """Decode with room for a share of the experts, in turns with the raw disk; then read a prompt of 512 tokens."""
    from deltafin import Sampler, Session

    model, size = opened(store, share, readers, {"on": True, "off": False, "auto": None}[lookahead])
    command = [sys.executable, __file__, "raw", str(store), str(size)]
    command += ["--readers", str(readers), "--seconds", str(seconds)]

    def measured() -> float:
        result = subprocess.run(command, check=True, capture_output=True, text=True, encoding="utf-8")
        return float(result.stdout)

    session = Session(model)
    session.feed([7 * i % model.config.vocab for i in range(8)])
    chance = Sampler(temperature=1.0, seed=1)
    list(session.generate(chance, 48))  # what is to be found out about looking ahead is found out
    click.echo(
        f"experts of {size / 1e6:.1f} MB, slots {model.stats()['slots']}, lookahead {model.stats()['lookahead']}"
    )
    ratios, limits = [], [measured()]
    for _ in range(rounds):
        before, began = model.stats(), time.perf_counter()
        said = len(list(session.generate(chance, tokens)))
        took = time.perf_counter() - began
        counted = {k: v - before[k] for k, v in model.stats().items() if isinstance(v, int | float) and v is not None}
        limits.append(measured())
        limit, speed = (limits[-1] + limits[-2]) / 2, counted["bytes"] / took
        ratios.append(speed / limit)
        click.echo(
            f"decode {said / took:.2f} tokens/s, {speed / 1e9:.3f} GB/s of {limit / 1e9:.3f} ({ratios[-1]:.0%}), "
            f"needed {size * counted['misses'] / took / 1e9:.3f} GB/s, found {counted['hits']}, "
            f"read {counted['misses']}, of those ahead {counted['foreseen']}; "
            f"waited {counted['wait'] / took:.0%}, computed experts {counted['compute'] / took:.0%}"
        )
    click.echo(f"median {statistics.median(ratios):.0%} of the raw disk")
    used: set[tuple[int, int]] = set()
    model.watch(on_route=lambda layer, ids, weights: used.update((layer, x) for x in ids.unique().tolist()))
    fresh, before, began = Session(model), model.stats()["bytes"], time.perf_counter()
    fresh.feed([i * i % 4001 % model.config.vocab for i in range(512)])
    took, came = time.perf_counter() - began, model.stats()["bytes"] - before
    click.echo(
        f"512 tokens in {took:.1f} s: read {came / 1e9:.3f} GB, {came / (size * len(used)):.3f} of the experts' "
        f"{size * len(used) / 1e9:.3f} GB, {came / took / 1e9:.3f} GB/s"
    )


@main.command()
@click.argument("store")
@click.option("--tokens", type=int, default=400, show_default=True)
@click.option("--threads", type=int, default=2, show_default=True)
def memory(store: str, tokens: int, threads: int) -> None:
    """Decode with all experts in slots, token by token in turns with the same model from mapped files."""
    import deltafin
    from deltafin import Session

    mapped = deltafin.load(store, threads=threads)
    tiers, _ = opened(mapped.path, 1.0, 8, None)
    prompt = [7 * i % mapped.config.vocab for i in range(400)]
    for model in (mapped, tiers, mapped, tiers):
        model.logits(prompt)
    sessions = Session(mapped), Session(tiers)
    for session in sessions:
        session.feed(prompt[:16])
    times: tuple[list[float], list[float]] = [], []
    for i in range(tokens):
        for which in (0, 1) if i % 2 else (1, 0):
            began = time.perf_counter()
            sessions[which].feed([(37 * i + i * i) % mapped.config.vocab])
            times[which].append(time.perf_counter() - began)
    a, b = map(statistics.median, times)
    more = statistics.median(y - x for x, y in zip(*times, strict=True)) / a
    click.echo(json.dumps({"mapped_ms": round(1e3 * a, 3), "tiers_ms": round(1e3 * b, 3), "paired": round(more, 4)}))


def opened(store: Path, share: float, readers: int, lookahead: bool | None):
    """Open a store with slots for a share of its experts; return the model and the bytes of a slot."""
    import deltafin
    from deltafin.api import Model
    from deltafin.config import MoE
    from deltafin.store import open_model
    from deltafin.tiers import Tiers

    whole, files = deltafin.load(store), open_model(store)
    layers = {i: layer.ffn for i, layer in enumerate(files.config.layers) if isinstance(layer.ffn, MoE)}
    (size,) = {files.slot_bytes(i) for i in layers}
    least, total = max(moe.chosen for moe in layers.values()), sum(moe.experts for moe in layers.values())
    tiers = Tiers(files, {size: max(least, int(share * total))}, lookahead=lookahead, readers=readers)
    return Model(files, whole.decoder.blocks[0].ops, whole.decoder.dtype, tiers=tiers), size


if __name__ == "__main__":
    main()
