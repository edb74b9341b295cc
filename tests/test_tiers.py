"""A model larger than memory: the same tokens whatever lies where, and nothing is lost when a disk fails."""

from pathlib import Path

import checkpoints
import pytest
import torch

import deltafin
from deltafin import Sampler, Session
from deltafin.api import Model
from deltafin.convert import convert
from deltafin.store import open_model
from deltafin.tiers import Tiers

DATA = Path(__file__).parent / "data"
PROMPT = [(7 * i * i + i) % 50 for i in range(40)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A snapshot of a small Kimi K3 in three files, whose experts lie in several pieces, and its store."""
    folder, c = tmp_path_factory.mktemp("tiers"), checkpoints.config(num_experts=12, num_experts_per_token=3)
    snapshot = checkpoints.write(folder / "snapshot", c, checkpoints.tensors(c), shards=3)
    convert(snapshot, folder / "store")
    return {"snapshot": snapshot, "store": folder / "store"}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A store in which two layers' experts have different sizes."""
    folder, c = tmp_path_factory.mktemp("mixed"), checkpoints.config(num_experts=6)
    t = checkpoints.tensors(c)
    plain = checkpoints.tensors(c, packed=False)
    at = "model.layers.2.block_sparse_moe.experts."
    t = {n: w for n, w in t.items() if not n.startswith(at)} | {n: w for n, w in plain.items() if n.startswith(at)}
    convert(checkpoints.write(folder / "snapshot", c, t), folder / "store")
    return folder / "store"


def tiered(folder, slots=None, readers=8, **options):
    """A model with so many slots of each size (None: the fewest that work)."""
    whole = deltafin.load(folder, **options)
    store, block = open_model(Path(folder)), whole.decoder.blocks[0]
    moes = {i: layer.ffn for i, layer in enumerate(store.config.layers) if hasattr(layer.ffn, "chosen")}
    count = slots or max(moe.chosen for moe in moes.values())
    held = Tiers(store, {store.slot_bytes(i): count for i in moes}, readers=readers)
    return Model(store, block.ops, whole.decoder.dtype, tiers=held)


def said(model, prompt=PROMPT[:5], count=12):
    session = Session(model)
    session.feed(prompt)
    return list(session.generate(Sampler(), count)), session.logits()


# The same model -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"dtype": "bfloat16"}, {"dtype": "float64"}, {"backend": "reference"}], ids=str
)
@pytest.mark.parametrize("kind", ["store", "snapshot"])
@pytest.mark.parametrize(("slots", "readers"), [(3, 1), (3, 8), (4, 8), (11, 1), (48, 8)])
def test_any_budget_gives_the_same_bits(folders, kind, slots, readers, options):
    whole, model = deltafin.load(folders["snapshot"], **options), tiered(folders[kind], slots, readers, **options)
    for prompt in (PROMPT[:1], PROMPT[:5], PROMPT[:11], PROMPT):
        tokens, logits = said(model, prompt)
        expected, wanted = said(whole, prompt)
        assert tokens == expected
        assert torch.equal(logits, wanted)
    assert torch.equal(model.logits(PROMPT[:7]), whole.logits(PROMPT[:7]))  # few rows at once


@pytest.mark.parametrize("name", ["nano", "kimi-k3-tiny", "kimi-linear"])
def test_stored_models_give_the_same_bits(name):
    folder = deltafin.load("nano").path if name == "nano" else DATA / name
    whole = deltafin.load(folder)
    for slots in (None, 9):
        model = tiered(folder, slots)
        assert torch.equal(model.logits(PROMPT), whole.logits(PROMPT))
        tokens, logits = said(model)
        assert tokens == said(whole)[0]
        assert torch.equal(logits, said(whole)[1])


def test_a_prompt_reads_each_expert_once(folders):
    model = tiered(folders["store"], 5)
    model.logits(PROMPT)
    for layer, counted in model.stats()["layers"].items():
        assert counted["hits"] == 0
        assert counted["bytes"] == counted["misses"] * model._store.slot_bytes(layer)
        assert counted["misses"] <= 12


def test_what_was_read_is_not_read_again_where_there_is_room(folders):
    for kind in ("store", "snapshot"):
        model = tiered(folders[kind], 48)
        model.logits(PROMPT)
        before = model.stats()
        model.logits(PROMPT)
        after = model.stats()
        assert after["bytes"] == before["bytes"]
        assert after["misses"] == before["misses"]
        assert after["hits"] == before["hits"] + before["misses"]


def test_layers_of_two_sizes_have_slots_of_their_own(mixed):
    model, whole = tiered(mixed, 18), deltafin.load(mixed)
    assert len(model._tiers.pools) == 2
    for _ in range(2):
        assert torch.equal(model.logits(PROMPT), whole.logits(PROMPT))
    counted = model.stats()
    assert counted["hits"] == counted["misses"]  # all of the second time
    assert torch.equal(tiered(mixed).logits(PROMPT), whole.logits(PROMPT))
