"""Models that are divided between a GPU and the processor: what goes where, and that it says the same.

A table of operations whose tensors lie where all others do stands in for a GPU: everything but the copies is the same.
The kernels for real ones have tests of their own (test_gpu_*.py).
"""

from dataclasses import replace
from pathlib import Path

import checkpoints
import pytest
import torch
from click.testing import CliRunner
from hypothesis import assume, given
from hypothesis import strategies as st

import deltafin
from deltafin import Sampler, Session, gpu, machine, measure
from deltafin.api import SMALL
from deltafin.cli import main
from deltafin.config import KDA, SiLU
from deltafin.convert import convert
from deltafin.demand import of_files
from deltafin.errors import CheckpointError, UsageError
from deltafin.experts import MappedExperts, PackedExperts, SplitExperts, StackedExperts, stacked
from deltafin.ops import HELD, REFERENCE, Expert
from deltafin.placement import DRIVER, GPU, Demand, LayerDemand, Machine, least, plan, spread
from deltafin.policy import AgedFrequency
from deltafin.quant import pack_int8, pack_mxfp4
from deltafin.store import open_model

CPU = torch.device("cpu")
PROMPT = [(7 * i * i + i) % 50 for i in range(40)]
CLOSE = 1e-4
"""Relative to the largest logit: two tables of operations, and sums over experts in another order, in float32."""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A machine with one GPU that has a lot of memory, and a cache of its own."""
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setattr(machine, "cache_folder", lambda: folder)
    monkeypatch.setattr(gpu, "tables", lambda: [replace(REFERENCE, name="gpu")])
    monkeypatch.setattr(gpu, "free", lambda table: 10**10)
    monkeypatch.setattr(gpu, "limit", lambda table, budget: None)
    speeds = Machine(10**10, 10, 1, 100, 10**10, 1000, 10_000, 20)
    monkeypatch.setattr(measure, "measured", lambda *_, **__: measure.Measured(speeds, []))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A snapshot of a small Kimi K3 and its store."""
    folder, c = tmp_path_factory.mktemp("gpu"), checkpoints.config(num_experts=12, num_experts_per_token=3)
    snapshot = checkpoints.write(folder / "snapshot", c, checkpoints.tensors(c), shards=3)
    convert(snapshot, folder / "store")
    return {"snapshot": snapshot, "store": folder / "store"}


def budget(folder, experts):
    """GPU memory for all of a model but its experts, and so many of each layer."""
    needs = of_files(open_model(Path(folder)))
    state = sum(needs.held(layer, needs.context) for layer in needs.layers)
    held = sum(experts * layer.expert for layer in needs.layers if layer.experts)
    return DRIVER + needs.buffers + state + needs.read + held


def logits(model):
    """After every token of a prompt, and of some more that are fed one by one."""
    session = Session(model)
    session.feed(PROMPT)
    return torch.stack([session.logits(), *(session.feed([token]) for token in PROMPT[:6])])


def close(got, wanted):
    return (got - wanted).abs().max() <= CLOSE * wanted.abs().max()


# Where everything goes ------------------------------------------------------------------------------------------------


def test_everything_goes_to_a_gpu_that_holds_it(folders):
    model = deltafin.load(folders["store"], place="gpu")
    assert {ops.name for ops in model.decoder.tables} == {"gpu"}
    moes = [b.ffn.experts for b in model.decoder.blocks if hasattr(b.ffn, "experts")]
    assert all(isinstance(experts, StackedExperts) for experts in moes)
    assert close(logits(model), logits(deltafin.load(folders["store"])))
    assert model.info()["place"] == f"gpu, {len(model.config.layers)} of {len(model.config.layers)} layers on the GPU"


def test_a_hybrid_keeps_recurrent_layers_on_the_processor(folders):
    model = deltafin.load(folders["store"], place="hybrid")
    for block in model.decoder.blocks:
        recurrent = isinstance(block.layer.mixer, KDA)
        assert [ops.name for ops in block.tables] == ["numba" if recurrent else "gpu", "gpu"]
    assert close(logits(model), logits(deltafin.load(folders["store"])))


@pytest.mark.parametrize("kind", ["store", "snapshot"])
@pytest.mark.parametrize("place", ["gpu", "hybrid"])
@pytest.mark.parametrize("options", [{}, {"ram": "2GB"}, {"resident": "int8"}])
def test_experts_that_do_not_fit_stay_where_they_are(folders, kind, place, options):
    whole = deltafin.load(folders[kind], place="cpu", **options)
    model = deltafin.load(folders[kind], place=place, gpu=budget(folders[kind], 5), **options)
    split = [b.ffn.experts for b in model.decoder.blocks if hasattr(b.ffn, "experts")]
    assert all(isinstance(experts, SplitExperts) for experts in split)
    assert all(5 <= (experts.slot >= 0).sum() < 12 for experts in split)
    assert close(logits(model), logits(whole))


def test_layers_that_do_not_fit_stay_with_the_processor(folders):
    model = deltafin.load(folders["store"], place="gpu", gpu=budget(folders["store"], 0) - 200_000)
    names = [block.ops.name for block in model.decoder.blocks]
    assert names[0] == "gpu"
    assert model.decoder.ops.name == "numba"
    assert close(logits(model), logits(deltafin.load(folders["store"])))


def test_the_hottest_experts_go_to_the_gpu(folders):
    size = budget(folders["store"], 5)
    first = deltafin.load(folders["store"], place="gpu", gpu=size)
    logits(first)
    heat = dict(first.placed.policy.heat)
    hottest = sorted(heat, key=lambda key: (-heat[key], key))
    del first  # which keeps what it knows
    second = deltafin.load(folders["store"], place="gpu", gpu=size)
    assert set(heat) <= set(second.placed.policy.heat)  # what it keeps in turn is not this run's alone
    for i, block in enumerate(second.decoder.blocks[1:], 1):
        ranked = [x for layer, x in hottest if layer == i]
        there = (block.ffn.experts.slot >= 0).nonzero().flatten().tolist()
        assert set(ranked[:5]) <= set(there)


def test_a_session_goes_from_one_placement_to_another(folders, tmp_path):
    one, other = (deltafin.load(folders["store"], place=place) for place in ("cpu", "hybrid"))
    session = Session(one)
    session.feed(PROMPT)
    session.save(tmp_path / "session")
    resumed = Session.load(other, tmp_path / "session")
    assert close(resumed.feed([3]), session.feed([3]))


def test_memory_that_other_programs_hold_makes_a_smaller_placement(folders, monkeypatch):
    size = budget(folders["store"], 5)
    monkeypatch.setattr(gpu, "free", lambda table: size)
    model = deltafin.load(folders["store"], place="gpu", gpu=2 * size)
    assert model.placed.placement.total(GPU) <= size
    (note,) = model.stats()["notes"]
    assert note.startswith("other programs use GPU 0: ")


def test_a_gpu_that_is_too_small_is_said(folders):
    result = CliRunner().invoke(main, ["info", str(folders["store"]), "--gpu", "0.5GB"])
    assert result.exit_code == 0, result.output
    needed = least(needs := of_files(open_model(folders["store"])), needs.context, "auto")
    assert "0.50 GB of GPU memory do not hold the first layer of this model" in result.stderr
    assert f"({needed / 1e9:.2f} GB would" in result.stderr
    model = deltafin.load(folders["store"], gpu="0.5GB")
    assert model.info()["place"].startswith("cpu, 0 of ")
    assert torch.equal(logits(model), logits(deltafin.load(folders["store"])))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"place": "moon"}, "place 'moon' is not supported"),
        ({"place": "cpu", "gpu": "2GB"}, "gpu means nothing here"),
        ({"place": "gpu", "dtype": "float64"}, "float64 is not computed on a GPU"),
        ({"gpu": "2GB,2GB"}, "sizes for 2 GPUs, and 1 here"),
        ({"gpu": "2 apples"}, "not a size"),
        ({"place": "gpu", "gpu": "0.5GB"}, "do not hold the first layer"),
    ],
)
def test_what_cannot_be_is_refused(folders, options, message):
    with pytest.raises(UsageError, match=message):
        deltafin.load(folders["store"], **options)


def test_without_a_gpu_one_is_refused_and_auto_is_the_processor(folders, monkeypatch):
    monkeypatch.setattr(gpu, "tables", list)
    assert deltafin.load(folders["store"]).placed is None
    for arguments in (("--place", "gpu"), ("--gpu", "2GB"), ("--place", "hybrid")):
        result = CliRunner().invoke(main, ["run", str(folders["store"]), "hello", *arguments])
        assert result.exit_code == 1
        assert "there is no GPU here that deltafin can use" in result.stderr


def test_auto_takes_a_gpu_for_what_is_not_small(folders, monkeypatch):
    assert open_model(folders["store"]).totals["bytes"] < SMALL
    assert deltafin.load(folders["store"]).placed is None
    monkeypatch.setattr("deltafin.api.SMALL", 0)
    assert deltafin.load(folders["store"]).placed.placement.place == "gpu"
    assert deltafin.load(folders["store"], backend="reference").placed is None
    assert deltafin.load(folders["store"], dtype="float64").placed is None


# Experts --------------------------------------------------------------------------------------------------------------

PACK = {"bfloat16": torch.Tensor.bfloat16, "int8": pack_int8, "mxfp4": pack_mxfp4}


@given(
    st.sampled_from(sorted(PACK)),
    st.sampled_from([1, 3, HELD, HELD + 1, 40]),
    st.sets(st.integers(0, 10), min_size=1),
    st.booleans(),
    st.booleans(),
    st.integers(0, 9),
)
def test_experts_that_are_divided_give_what_they_give_together(form, rows, held, packed, sends, seed):
    random = torch.Generator().manual_seed(seed)

    def matrix(*shape):
        return PACK[form](torch.randn(*shape, generator=random) / 6)

    every = [Expert(matrix(32, 64), matrix(32, 64), matrix(64, 32)) for _ in range(11)]
    rest = PackedExperts(every) if packed else MappedExperts(every.__getitem__)
    held = sorted(held)
    stack = stacked((every[x] for x in held), len(held), CPU, "here")
    split = SplitExperts(stack, held, 11, rest, REFERENCE, AgedFrequency(), 0)
    split.sends = sends
    ids = torch.stack([torch.randperm(11, generator=random)[:4].sort().values for _ in range(rows)])
    x, weights = torch.randn(rows, 64, generator=random), torch.rand(rows, 4, generator=random)
    got = split(x, ids, weights, SiLU(), REFERENCE)
    want = REFERENCE.experts(x, ids, weights, every.__getitem__, SiLU())
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()
    if rows <= HELD:
        alone = [split(x[n : n + 1], ids[n : n + 1], weights[n : n + 1], SiLU(), REFERENCE) for n in range(rows)]
        assert (torch.cat(alone) - got).abs().max() <= 1e-6 * want.abs().max()  # torch's products depend on the rows


@pytest.mark.parametrize(("there", "sent"), [(0.001, 0.002), (0.002, 0.001)])
def test_experts_elsewhere_are_sent_where_that_was_measured_to_be_faster(folders, monkeypatch, there, sent):
    asked = []

    def seconds(self, x_NM, ids_NE, activation, ops):
        asked.append(self.slot[ids_NE] < 0)
        return there, sent

    monkeypatch.setattr(SplitExperts, "seconds", seconds)
    model = deltafin.load(folders["store"], place="gpu", gpu=budget(folders["store"], 5))
    split = [b.ffn.experts for b in model.decoder.blocks if hasattr(b.ffn, "experts")]
    assert [experts.sends for experts in split] == [sent < there] * len(split)
    assert len(asked) == 1  # for all layers at once
    assert asked[0].sum() == 2  # of 3 that are chosen, as 7 of 12 are elsewhere
    assert model.elsewhere in model.info()["other experts"]
    assert model.elsewhere.startswith("sent to the GPU: 1.00 ms" if sent < there else "where they are: 1.00 ms")
    assert close(logits(model), logits(deltafin.load(folders["store"])))


def test_what_experts_take_is_measured_both_ways(folders):
    model = deltafin.load(folders["store"], place="gpu", gpu=budget(folders["store"], 5))
    assert " ms a layer, " in model.elsewhere
    assert not deltafin.load(folders["store"], place="gpu").elsewhere
    assert not deltafin.load(folders["store"], place="gpu", gpu=budget(folders["store"], 5), ram="2GB").elsewhere
    assert not model.placed.policy.heat  # it is no use of them


def test_experts_of_one_layer_must_be_alike():
    plain = Expert(torch.ones(32, 64), torch.ones(32, 64), torch.ones(64, 32))
    packed = Expert(*(pack_mxfp4(matrix) for matrix in plain))
    other = Expert(*(matrix.bfloat16() for matrix in plain))
    for odd in (packed, other):
        with pytest.raises(CheckpointError, match="layer 3 are stored in different ways"):
            stacked([plain, odd], 2, CPU, "layer 3")


# Several GPUs ---------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(1, 100), min_size=1, max_size=6),
    st.integers(0, 50),
    st.lists(st.integers(0, 300), min_size=1, max_size=4),
)
def test_layers_are_spread_in_order_and_no_gpu_has_too_many(sizes, head, budgets):
    d = Demand(tuple(LayerDemand(size) for size in sizes), head=head, embed=1, row=1)
    p = plan(d, Machine(10**12, 1, 1, 1, DRIVER + sum(budgets), 1, 1, 1), 1, "gpu")
    devices = spread(p, budgets)
    assume(devices is not None)
    assert devices == sorted(devices)
    for i, most in enumerate(budgets):
        assert sum(p.on_gpu(unit) for unit, device in enumerate(devices) if device == i) <= most


def test_two_gpus_share_the_layers(folders, monkeypatch):
    tables = [replace(REFERENCE, name=name) for name in ("first", "second")]
    monkeypatch.setattr(gpu, "tables", lambda: tables)
    both = DRIVER + of_files(open_model(folders["store"])).buffers
    half = (budget(folders["store"], 12) - both) * 9 // 10 + both  # its one layer of latent attention is most of it
    model = deltafin.load(folders["store"], place="gpu", gpu=f"{half},{half}")
    names = [block.ops.name for block in model.decoder.blocks]
    assert names == sorted(names)
    assert set(names) == {"first", "second"}
    first = names.count("first")
    about = model.info()
    assert (about["GPU 0"], about["GPU 1"]) == (f"layers 1 to {first}", f"layers {first + 1} to {len(names)}, the head")
    assert close(logits(model), logits(deltafin.load(folders["store"])))


def test_what_is_said_does_not_depend_on_the_placement(folders):
    def said(model):
        session = Session(model)
        session.feed(PROMPT[:5])
        return list(session.generate(Sampler(), 12))

    wanted = said(deltafin.load(folders["store"]))
    for place in ("gpu", "hybrid"):
        assert said(deltafin.load(folders["store"], place=place)) == wanted
        assert said(deltafin.load(folders["store"], place=place, gpu=budget(folders["store"], 5))) == wanted
