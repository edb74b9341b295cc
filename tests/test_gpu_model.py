"""Whole models on the operations for GPUs: as on the processor, and the same bits for a few tokens at once."""

from dataclasses import replace
from pathlib import Path

import interpreted
import pytest
import torch
from true_shapes import random_decoder

import deltafin
from deltafin import captured, verify
from deltafin.config import KDA, MLA, MLP, AttentionResidual, Layer, ModelConfig, MoE, SiLU, SiTU
from deltafin.executor import Home, assemble
from deltafin.gpu_kernels import OPS
from deltafin.model import mla
from deltafin.model.decoder import FEW, forward
from deltafin.store import open_model

DEVICE = torch.device(*("cuda", 0) if interpreted.DEVICE == "cuda" else ("cpu",))
TABLE = replace(OPS, device=DEVICE)
DATA = Path(__file__).parent / "data"

SMALL = ModelConfig(
    *("kimi-k3", 48, 64, 1e-5),
    (
        Layer(KDA(2, 16, 16, 4, decay_rank=16, decay_floor=-5.0), MLP(64, SiLU())),
        Layer(
            MLA(2, 16, 16, 16, 32, query_rank=32, gate=True),
            MoE(4, 2, 32, 32, SiTU(), latent=32, latent_norm=True),
        ),
    ),
    AttentionResidual(1),
)
"""Every kind of layer, small enough for an interpreter."""


def stored(name):
    """A stored model on the processor, and the same on a GPU, its experts side by side."""
    model, store = deltafin.load(DATA / name), open_model(DATA / name)
    homes = [Home(TABLE, TABLE, range(getattr(layer.ffn, "experts", 0))) for layer in store.config.layers]
    there, _ = assemble(store, model.decoder.ops, torch.float32, homes=homes, head=TABLE)
    return model.decoder, there


def small():
    """A small random model, the same."""
    torch.manual_seed(0)
    there, cpu = random_decoder(SMALL, "bf16", torch.float32, TABLE, TABLE), deltafin.load("nano").decoder.ops
    return replace(there, ops=cpu, blocks=tuple(replace(block, ops=cpu) for block in there.blocks)), there


@pytest.fixture(scope="module", params=["kimi-k3-tiny", "kimi-linear"] if DEVICE.type == "cuda" else ["small"])
def pair(request):
    """A model on the processor, and the same on the operations for GPUs."""
    return small() if request.param == "small" else stored(request.param)


def test_a_model_says_the_same(pair):
    tokens = torch.randint(0, pair[0].config.vocab, (1, 13), generator=torch.Generator().manual_seed(0))
    logits = []
    for decoder in pair:
        state = decoder.empty_state()
        pieces = tokens.split([10, 1, 2], 1)
        logits.append(torch.cat([forward(decoder, state, piece, last=piece.shape[1]) for piece in pieces], 1))
    want, got = logits
    assert (got - want).abs().max() <= verify.BOUNDS["model float32"] * want.abs().max()


def test_a_few_tokens_at_once_are_the_same_bits(pair):
    _, there = pair
    tokens = torch.randint(0, there.config.vocab, (1, 3), generator=torch.Generator().manual_seed(1))
    assert there.ops.together
    assert tokens.shape[1] <= FEW
    once, one = there.empty_state(), there.empty_state()
    together = forward(there, once, tokens, last=3)
    apart = torch.cat([forward(there, one, token) for token in tokens.split(1, 1)], 1)
    assert torch.equal(together, apart)
    for a, b in zip(once, one, strict=True):
        assert all(torch.equal(x, b.tensors()[name]) for name, x in a.tensors().items())


def captured_as_plain(there, monkeypatch):
    """Two sessions in turns, prompts between, and caches that grow over the end of their room: the same bits."""
    monkeypatch.setattr(mla, "GPU_ROOM", 16)
    tokens = torch.randint(0, there.config.vocab, (2, 60), generator=torch.Generator().manual_seed(2))
    pieces = [1] * 9 + [12] + [1] * 39
    plain, steps = ([there.empty_state() for _ in range(2)] for _ in range(2))
    for parts in zip(*(row[None].split(pieces, 1) for row in tokens), strict=True):
        for i, part in enumerate(parts):
            want = forward(there, plain[i], part)
            assert torch.equal(captured.forward(there, steps[i], part), want)
    kept = [s.keep() for s in steps[0]]
    first = captured.forward(there, steps[0], tokens[:1, :1])
    for _ in range(3):
        again = [s.keep() for s in kept]
        assert torch.equal(captured.forward(there, again, tokens[:1, :1]), first)
    assert len(there.graphs.steps) == captured.KEPT


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="graphs are captured on CUDA devices")
def test_captured_steps_are_the_same_bits(pair, monkeypatch):
    captured_as_plain(pair[1], monkeypatch)
