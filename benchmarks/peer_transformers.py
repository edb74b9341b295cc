"""Measure transformers for ``peers.py``: FOLDER THREADS PREFILL DECODE; prints a line of JSON, tokens a second."""

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM

RUNS = 3


def main(folder: str, threads: int, prefill: int, decode: int) -> None:
    """Read ``prefill`` random tokens, and decode ``decode`` from an empty context, some times each."""
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    random = torch.Generator().manual_seed(0)
    speeds: dict[str, list[float]] = {"prefill": [], "decode": []}
    with torch.inference_mode():
        model(torch.tensor([list(range(8))]), use_cache=True)
        for _ in range(RUNS):
            tokens = torch.randint(0, model.config.vocab_size, (1, prefill), generator=random)
            began = time.perf_counter()
            model(tokens, use_cache=True, logits_to_keep=1)
            speeds["prefill"].append(prefill / (time.perf_counter() - began))
            answer = model(tokens[:, :1], use_cache=True)
            began = time.perf_counter()
            for _ in range(decode):
                token = answer.logits[:, -1:].argmax(-1)
                answer = model(token, past_key_values=answer.past_key_values, use_cache=True)
            speeds["decode"].append(decode / (time.perf_counter() - began))
    print(json.dumps(speeds))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
