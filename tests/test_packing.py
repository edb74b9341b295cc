"""Weights that are packed when a model is opened: which, how well, and that it is never silent."""

import os
from pathlib import Path

import checkpoints
import pytest
import torch

import deltafin
from deltafin import executor
from deltafin.errors import CheckpointError, SessionError, UsageError
from deltafin.evaluate import read_documents
from deltafin.model.decoder import forward
from deltafin.ops import reference
from deltafin.quant import MXFP4, Int8, pack_int8, pack_mxfp4
from deltafin.session import Session
from deltafin.snapshot import Snapshot
from deltafin.verify import compare
from deltafin.weights import matrices

DATA = Path(__file__).parent / "data"
IDS = [(7 * i * i + i) % 50 for i in range(40)]
CHOSEN = "(chosen; not exactly the published weights)"
PACK = {"int8": pack_int8, "mxfp4": lambda w: pack_mxfp4(w, closest=True)}
FORMAT = {"int8": Int8, "mxfp4": MXFP4}

VARIANTS = {
    "k3": checkpoints.config(),
    "full rank query, low rank gate": checkpoints.config(q_lora_rank=None, linear_use_full_rank_gate=False),
    "no latent experts": checkpoints.config(routed_expert_hidden_size=None, latent_moe_use_norm=None),
    "tied": checkpoints.config(tie_word_embeddings=True),
}


def is_expert(name):
    return ".experts." in name


def is_resident(name, tensor):
    """By the hub's names: every matrix that is multiplied with, except the router; no embedding, no convolution."""
    single = ("norm", "_res_proj", "conv1d", "block_sparse_moe.gate.", "embed_tokens", "A_log", "dt_bias")
    return tensor.dim() == 2 and not is_expert(name) and not any(part in name for part in single)


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request, tmp_path_factory):
    """Config, plain tensors and folder of a model whose weights are all bfloat16."""
    c = VARIANTS[request.param]
    t = checkpoints.tensors(c, packed=False)
    return c, t, checkpoints.write(tmp_path_factory.mktemp("plain") / "model", c, t)


@pytest.fixture
def plain(tmp_path):
    def write(**changes):
        c = VARIANTS["k3"]
        return checkpoints.write(tmp_path / "model", c, checkpoints.tensors(c, packed=False) | changes)

    return write


# What is packed -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("resident", "experts"), [("int8", "keep"), ("keep", "mxfp4"), ("keep", "int8"), ("int8",) * 2]
)
def test_a_packed_model_is_the_model_of_the_rounded_weights(variant, tmp_path, resident, experts, dtype):
    c, t, folder = variant
    rounded, wide = {}, getattr(torch, dtype)
    for name, tensor in t.items():
        how = experts if is_expert(name) else resident if is_resident(name, tensor) else "keep"
        rounded[name] = tensor if how == "keep" else PACK[how](tensor).unpack(wide)
    if c.get("tie_word_embeddings") and resident == "int8":  # the embedding stays, and the head is packed
        embedding = t["model.embed_tokens.weight"]
        rounded["lm_head.weight"] = pack_int8(embedding).unpack(wide)
    model = deltafin.load(folder, dtype=dtype, resident=resident, experts=experts)
    by_hand = deltafin.load(checkpoints.write(tmp_path / "rounded", c, rounded), dtype=dtype)
    # The weights are the same to the bit; sums are not, as their order depends on where a matrix begins in memory.
    bound = {"float32": 1e-4, "float64": 1e-12}[dtype]
    state, other = model.decoder.empty_state(), by_hand.decoder.empty_state()
    for ids in (IDS, IDS[:1], IDS[1:2]):  # prefill, decode
        got, want = (
            forward(m.decoder, s, torch.tensor([ids]), last=len(ids)) for m, s in ((model, state), (by_hand, other))
        )
        assert compare((got,), (want,))[1] < bound


def test_every_matrix_but_the_router_is_packed_and_nothing_else(variant):
    model = deltafin.load(variant[2], resident="int8")
    for weights in (w for b in model.decoder.blocks for w in (b.norms, b.mixer, b.ffn)):
        for name in weights.__dataclass_fields__:
            value = getattr(weights, name)
            if name in matrices(type(weights)) and name != "router" and value is not None:
                assert isinstance(value, Int8), name
            elif name != "experts":
                assert value is None or isinstance(value, torch.Tensor), name
    assert isinstance(model.decoder.edges.head, Int8)
    assert isinstance(model.decoder.edges.embed, torch.Tensor)


@pytest.mark.parametrize("options", [{}, {"resident": "keep", "experts": "keep"}])
def test_unless_asked_weights_are_views_of_the_files(variant, options):
    model = deltafin.load(variant[2], **options)
    store = model._store
    for i, block in enumerate(model.decoder.blocks):
        assert block.mixer.out.data_ptr() == store.read(f"layers.{i}.mixer.out").data_ptr()
    assert model.decoder.blocks[1].ffn.experts.read(0).up.data_ptr() == store.expert(1, 0).up.data_ptr()
    assert model.fingerprint == f"{store.fingerprint}-float32"
    assert model.info()["bytes"] == store.totals["bytes"]


@pytest.mark.parametrize("experts", ["mxfp4", "int8"])
def test_what_is_stored_packed_stays_as_it_is(tiny, experts):
    model = deltafin.load(tiny.path, experts=experts)
    assert torch.equal(model.logits(IDS), tiny.logits(IDS))
    assert model.fingerprint == tiny.fingerprint
    assert model.info() == tiny.info()
    assert model.info()["expert weights"] == "MXFP4, as stored"


def test_experts_of_which_some_are_stored_packed_keep_those(tmp_path):
    c = VARIANTS["k3"]
    half, packed = checkpoints.tensors(c, packed=False), checkpoints.tensors(c)
    chosen = [name for name in half if ".experts.1." in name or ".experts.2.w1" in name]
    for name in chosen:
        del half[name]
        half |= {f"{name}{end}": packed[f"{name}{end}"] for end in ("_packed", "_scale")}
    model = deltafin.load(checkpoints.write(tmp_path / "half", c, half), experts="int8")
    kinds = [[type(w) for w in model.decoder.blocks[2].ffn.experts.held[x]] for x in range(3)]
    assert kinds == [[Int8] * 3, [MXFP4] * 3, [MXFP4, Int8, Int8]]
    assert model.info()["expert weights"] == f"int8 {CHOSEN}, some MXFP4 as stored"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_other_plain_types_are_packed_as_well(plain, dtype):
    c = VARIANTS["k3"]
    t = {name: w.to(dtype) if w.dtype == torch.bfloat16 else w for name, w in checkpoints.tensors(c, False).items()}
    model = deltafin.load(plain(**t), resident="int8", experts="mxfp4")
    assert isinstance(model.decoder.blocks[0].mixer.q, Int8)
    assert isinstance(model.decoder.blocks[1].ffn.experts.held[4].down, MXFP4)


# How well -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "least", "most"),
    [({"resident": "int8"}, 0.005, 0.3), ({"experts": "int8"}, 0.001, 0.06), ({"experts": "mxfp4"}, 0.05, 0.7)],
)
def test_errors_of_a_random_model_are_as_the_bits_allow(linear, options, least, most):
    got, want = deltafin.load(linear.path, **options).logits(IDS), linear.logits(IDS)
    # Of a typical token: where rounding makes the router choose another expert, all of them differ.
    assert least < ((got - want).norm(dim=-1) / want.norm(dim=-1)).median() < most


def test_a_trained_model_hardly_changes_what_it_predicts(nano):
    (text,) = (d.text for d in read_documents(DATA / "nano" / "heldout.jsonl")[:1])
    ids = nano.tokenizer.encode(text)[:400]
    got, want = (m.logits(ids).double().log_softmax(-1) for m in (deltafin.load(resident="int8"), nano))
    divergence = (want.exp() * (want - got)).sum(-1)
    assert 0 < divergence.mean() < 0.01
    assert (got.argmax(-1) == want.argmax(-1)).float().mean() > 0.9


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_operations_take_int8(rows, dtype, monkeypatch):
    random = torch.Generator().manual_seed(5)
    x, w = torch.randn(rows, 24, generator=random).to(dtype), pack_int8(torch.randn(33, 24, generator=random))
    assert torch.equal(reference.linear(x, w), reference.linear(x, w.unpack(dtype)))
    whole = reference.linear(x.double(), w)
    monkeypatch.setattr(reference, "LARGEST_COPY", 24 * 5)
    assert compare((reference.linear(x.double(), w),), (whole,))[1] < 1e-12


# Never silent ---------------------------------------------------------------------------------------------------------


def test_info_says_what_was_packed_and_counts_the_bytes_in_memory(variant):
    c, t, folder = variant
    exact = deltafin.load(folder).info()
    assert (exact["resident weights"], exact["expert weights"]) == ("as stored", "BF16, as stored")
    assert exact["bytes"] == sum(w.nbytes for w in t.values())
    resident = {name: pack_int8(w).nbytes for name, w in t.items() if is_resident(name, w)}
    for how, name in (("int8", "int8"), ("mxfp4", "MXFP4")):
        about = deltafin.load(folder, resident="int8", experts=how).info()
        assert about["resident weights"] == f"int8 {CHOSEN}"
        assert about["expert weights"] == f"{name} {CHOSEN}"
        experts = {name: PACK[how](w).nbytes for name, w in t.items() if is_expert(name)}
        assert about["expert bytes"] == sum(experts.values())
        head = pack_int8(t["model.embed_tokens.weight"]).nbytes if c.get("tie_word_embeddings") else 0
        assert about["bytes"] == head + sum((resident | experts).get(name, w.nbytes) for name, w in t.items())
        changed = {"bytes", "expert bytes", "resident weights", "expert weights"}
        assert {k: v for k, v in about.items() if k not in changed} == {
            k: v for k, v in exact.items() if k not in changed
        }


def test_sessions_go_on_with_the_same_packing_only(tmp_path, linear):
    ways = [
        {},
        {"resident": "int8"},
        {"experts": "int8"},
        {"experts": "mxfp4"},
        {"resident": "int8", "experts": "int8"},
    ]
    models = [deltafin.load(linear.path, **options) for options in ways]
    assert len({model.fingerprint for model in models}) == len(ways)
    for i, model in enumerate(models):
        session = Session(model)
        session.feed(IDS[:5])
        session.save(tmp_path / f"{i}")
        twin = Session.load(deltafin.load(linear.path, **ways[i]), tmp_path / f"{i}")
        assert torch.equal(twin.feed(IDS[5:6]), session.feed(IDS[5:6]))
        for j, other in enumerate(models):
            if i != j:
                with pytest.raises(SessionError, match="another model"):
                    Session.load(other, tmp_path / f"{i}")


def test_progress_names_layers_when_there_is_something_to_do(linear):
    said = []
    deltafin.load(linear.path, progress=said.append)
    assert said == []
    deltafin.load(linear.path, resident="int8", progress=said.append)
    assert said[0] == "packing the head"
    assert list(dict.fromkeys(said[1:])) == [f"packing layer {i} of 6" for i in range(1, 7)]


# What cannot be packed ------------------------------------------------------------------------------------------------


def test_widths_that_mxfp4_does_not_take_are_refused(tmp_path):
    c = checkpoints.config(routed_expert_hidden_size=40)
    folder = checkpoints.write(tmp_path / "odd", c, checkpoints.tensors(c, packed=False))
    with pytest.raises(UsageError, match=r"expert 0 of layer 1 .* 40 columns"):
        deltafin.load(folder, experts="mxfp4")
    deltafin.load(folder, experts="int8")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("model.layers.2.self_attn.o_proj.weight", {"resident": "int8"}),
        ("model.layers.2.block_sparse_moe.experts.3.w2.weight", {"experts": "int8"}),
        ("model.layers.2.block_sparse_moe.experts.3.w2.weight", {"experts": "mxfp4"}),
    ],
)
def test_infinite_weights_are_refused_by_name(plain, name, options):
    w = checkpoints.tensors(VARIANTS["k3"], packed=False)[name]
    w[1, 2] = torch.inf
    folder = plain(**{name: w})
    deltafin.load(folder)
    where = "expert 3 of layer 2" if is_expert(name) else "o_proj"
    with pytest.raises(CheckpointError, match=f"{where}.*finite"):
        deltafin.load(folder, **options)


def test_shapes_are_checked_before_anything_is_packed(plain, monkeypatch):
    monkeypatch.setattr(executor, "PACK", {})
    folder = plain(**{"model.layers.3.self_attn.o_proj.weight": torch.zeros(3, 3, dtype=torch.bfloat16)})
    with pytest.raises(CheckpointError, match=r"o_proj.*\(3, 3\)"):
        deltafin.load(folder, resident="int8", experts="int8")


# Memory ---------------------------------------------------------------------------------------------------------------


def mapped(file):
    """Bytes of a mapped file that are in this process's memory."""
    here, total = False, 0
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if " " in line and "-" in line.split()[0] and not line.split()[0].endswith(":"):
            here = line.endswith(str(file))
        elif here and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="asks Linux what is in memory")
@pytest.mark.parametrize("how", ["int8", "mxfp4"])
def test_pages_of_what_has_been_packed_are_given_back(tmp_path, monkeypatch, how):
    c = checkpoints.config(
        num_hidden_layers=2,
        hidden_size=512,
        moe_intermediate_size=512,
        routed_expert_hidden_size=None,
        latent_moe_use_norm=None,
        num_shared_experts=0,
        first_k_dense_replace=0,
        linear_kda_layers=[1],
        linear_full_attn_layers=[2],
    )
    folder = checkpoints.write(tmp_path / "model", c, checkpoints.tensors(c, packed=False))
    file, matrix = folder / "model.safetensors", 512 * 512 * 2
    experts = 2 * c["num_experts"] * 3 * matrix
    seen = []

    def spy(w, pack=executor.PACK[how]):
        packed = pack(w)
        seen.append(mapped(file))
        return packed

    monkeypatch.setitem(executor.PACK, how, spy)
    model = deltafin.load(folder, experts=how)
    assert len(seen) == 2 * c["num_experts"] * 3
    # One expert at a time; the system reads some pages around those that are asked for, into what is not yet packed.
    assert matrix <= max(seen) < 3 * matrix + experts // 4
    assert mapped(file) < experts // 4
    for name in ("layers.0.mixer.q", "edges.embed"):  # what was not packed is still there, as it was
        assert torch.equal(Snapshot(folder).read(name), model._store.read(name))
    deltafin.load(folder).logits(IDS)
    whole = [model._store.expert(i, x) for i in range(2) for x in range(c["num_experts"])]
    assert all(w.float().isfinite().all() for expert in whole for w in expert)  # pages that went can be read again
    assert mapped(file) > experts
