"""Measure mlx-lm for ``peers.py``: FOLDER THREADS PREFILL DECODE; prints a line of JSON, tokens a second.

MLX chooses its threads itself.
"""

import json
import sys
import time
from pathlib import Path

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

RUNS = 3


def main(folder: str, threads: int, prefill: int, decode: int) -> None:
    """Read ``prefill`` random tokens, and decode ``decode`` from an empty context, some times each."""
    model, config = load_model(Path(folder))
    mx.random.seed(0)
    speeds: dict[str, list[float]] = {"prefill": [], "decode": []}
    mx.eval(model(mx.array([[1, 2, 3]]), cache=make_prompt_cache(model)))
    for _ in range(RUNS):
        tokens = mx.random.randint(0, config["vocab_size"], (1, prefill))
        mx.eval(tokens)
        began = time.perf_counter()
        mx.eval(model(tokens, cache=make_prompt_cache(model))[:, -1])
        speeds["prefill"].append(prefill / (time.perf_counter() - began))
        cache = make_prompt_cache(model)
        token = mx.argmax(model(tokens[:, :1], cache=cache)[:, -1:], axis=-1)
        mx.eval(token)
        began = time.perf_counter()
        for _ in range(decode):
            token = mx.argmax(model(token, cache=cache)[:, -1:], axis=-1)
            mx.eval(token)
        speeds["decode"].append(decode / (time.perf_counter() - began))
    print(json.dumps(speeds))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
