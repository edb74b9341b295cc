"""Models whose layers are divided over two GPUs say what they say on one."""

from itertools import zip_longest
from pathlib import Path

import pytest
import torch
from test_gpu_model import captured_as_plain

import deltafin
from deltafin import Sampler, Session, gpu, library, machine, measure, verify
from deltafin.demand import of_files
from deltafin.experts import SplitExperts
from deltafin.placement import DRIVER, Machine, plan
from deltafin.store import open_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="takes two CUDA devices"),
]

DATA = Path(__file__).parent / "data"
FOLDERS = {"kimi-k3-tiny": DATA / "kimi-k3-tiny", "kimi-linear": DATA / "kimi-linear", "nano": library.EMBEDDED}
LARGE = 10**10
PROMPT = [(7 * i * i + i) % 40 for i in range(40)]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A cache of its own, and no limit to torch's memory: it is given out in pieces larger than these models."""
    speeds = Machine(LARGE, 10, 1, 100, LARGE, 1000, 10_000, 20)
    monkeypatch.setattr(machine, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(measure, "measured", lambda *_, **__: measure.Measured(speeds, []))
    monkeypatch.setattr(gpu, "limit", lambda table, budget: None)


def halves(folder, place, experts=None):
    """Sizes of two GPUs, of which the first holds half of the layers; with so many ``experts`` of each, if not all."""
    needs = of_files(open_model(folder))
    p = plan(needs, Machine(LARGE, 1, 1, 1, LARGE, 1, 1, 1), needs.context, place)
    away = 0 if experts is None else max(layer.experts for layer in needs.layers) - experts
    units = [
        p.on_gpu(i) - away * getattr(layer, "expert", 0) * bool(getattr(layer, "experts", 0))
        for i, layer in enumerate([*needs.layers, None])
    ]
    half, beside = len(needs.layers) // 2, DRIVER + needs.buffers
    return f"{sum(units[:half]) + beside},{LARGE if experts is None else sum(units[half:]) + beside}"


@pytest.fixture(scope="module", params=sorted(FOLDERS))
def folder(request):
    return FOLDERS[request.param]


def logits(model):
    """After every token of a prompt, and of some more that are fed one by one."""
    session = Session(model)
    session.feed(PROMPT)
    return torch.stack([session.logits(), *(session.feed([token]) for token in PROMPT[:6])])


def close(got, wanted):
    return (got - wanted).abs().max() <= verify.BOUNDS["model float32"] * wanted.abs().max()


def devices(model):
    return [block.ops.device.index for block in model.decoder.blocks]


@pytest.mark.parametrize("place", ["gpu", "hybrid"])
def test_two_gpus_say_what_one_says(folder, place):
    one = deltafin.load(folder, place=place, gpu=LARGE)
    two = deltafin.load(folder, place=place, gpu=halves(folder, place))
    assert set(devices(one)) == {0}
    assert devices(two) == sorted(devices(two))
    assert two.decoder.ops.device.index == 1
    assert set(devices(two)) == {0, 1}
    assert close(logits(two), logits(one))


def test_experts_in_ram_beside_two_gpus(folder):
    one = deltafin.load(folder, place="cpu")
    two = deltafin.load(folder, place="gpu", gpu=halves(folder, "gpu", 2))
    assert set(devices(two)) == {0, 1}
    assert any(isinstance(getattr(block.ffn, "experts", None), SplitExperts) for block in two.decoder.blocks)
    assert close(logits(two), logits(one))


def test_captured_steps_over_two_gpus_are_the_same_bits(folder, monkeypatch):
    two = deltafin.load(folder, place="gpu", gpu=halves(folder, "gpu")).decoder
    assert two.graphs is not None
    captured_as_plain(two, monkeypatch)
    assert all(len(step.legs) == 2 for step in two.graphs.steps.values() if step.used and step.legs)


def test_sessions_in_turns_say_what_they_say_alone(folder):
    model = deltafin.load(folder, place="gpu", gpu=halves(folder, "gpu"))

    def begun(first):
        session = Session(model)
        session.feed([first, *PROMPT[:5]])
        return session.generate(Sampler(), 12)

    alone = [list(begun(first)) for first in (1, 2)]
    in_turns = zip(*zip_longest(begun(1), begun(2)), strict=True)
    assert [[token for token in said if token is not None] for said in in_turns] == alone
