"""What re-encoding a model costs: size, loss, and how far its predictions are from the original's.

Converts SOURCE once for each pair of encodings and reads FILE (as `deltafin eval` does) with all of them. Loss is in
nats a token; KL is the mean over tokens of the divergence of a store's distribution from the original's, in nats.
"""

import shutil
import tempfile
from collections import defaultdict
from pathlib import Path

import click
import torch

import deltafin
from deltafin.convert import convert
from deltafin.evaluate import _tokens, read_documents

PAIRS = [(e, r) for r in ("keep", "int8", "bf16") for e in ("keep", "int8", "mxfp4", "bf16")]


def log_probabilities(model: deltafin.Model, ids: list[int]) -> torch.Tensor:
    """Return what a model gives every next token: [T - 1, Z] in float64."""
    return torch.log_softmax(model.logits(ids[:-1]).double(), -1)


@click.command(help=__doc__)
@click.argument("source", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--window", type=click.IntRange(min=2), default=1024, show_default=True)
@click.option(
    "--pair", "pairs", multiple=True, metavar="EXPERTS,RESIDENT", help="Measure these alone; may be repeated."
)
def main(source: Path, file: Path, window: int, pairs: tuple[str, ...]) -> None:
    """Print a row for the original, and one for each store."""
    chosen = [tuple(pair.split(",")) for pair in pairs] or PAIRS
    original = deltafin.load(source)
    stores, sizes = {}, {"original": original.info()["bytes"]}
    nats, divergence, count = defaultdict(float), defaultdict(float), 0
    folder = Path(tempfile.mkdtemp())
    try:
        for experts, resident in chosen:
            name = f"--experts {experts} --resident {resident}"
            convert(source, folder / name, experts=experts, resident=resident)
            stores[name] = deltafin.load(folder / name)
            sizes[name] = sum(path.stat().st_size for path in (folder / name).iterdir())
        for ids, _ in (_tokens(original, document) for document in read_documents(file)):
            for start in range(0, len(ids) - 1, window):
                piece = ids[start : start + window]
                if len(piece) < 2:
                    continue
                target, count = torch.tensor(piece[1:])[:, None], count + len(piece) - 1
                true = log_probabilities(original, piece)
                nats["original"] -= true.gather(1, target).sum().item()
                for name, model in stores.items():
                    got = log_probabilities(model, piece)
                    nats[name] -= got.gather(1, target).sum().item()
                    divergence[name] += (true.exp() * (true - got)).sum().item()
    finally:
        shutil.rmtree(folder)
    click.echo(f"{count:,} tokens")
    for name in ("original", *stores):
        kl = f"{divergence[name] / count:.2e}"
        click.echo(f"| {name} | {sizes[name] / 1e6:.2f} MB | {nats[name] / count:.4f} | {kl} |")


if __name__ == "__main__":
    main()
