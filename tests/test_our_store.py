"""A store that was converted: the same model, opened as strictly as it was written."""

import json
import shutil
from pathlib import Path

import checkpoints
import pytest
import torch
from safetensors import safe_open

import deltafin
from deltafin import store as stores
from deltafin.config import from_json, to_json
from deltafin.convert import convert
from deltafin.errors import CheckpointError, ConfigError, SessionError
from deltafin.model.decoder import parts
from deltafin.quant import MXFP4, Int8, pack_int8, pack_mxfp4
from deltafin.store import PAGE, Store, model_json, open_model, read_model

DATA = Path(__file__).parent / "data"
FOLDERS = {"nano": deltafin.load("nano").path, "k3": DATA / "kimi-k3-tiny", "linear": DATA / "kimi-linear"}
IDS = [(7 * i * i + i) % 50 for i in range(40)]

VARIANTS = {
    "k3": checkpoints.config(),
    "low rank gate, full query": checkpoints.config(q_lora_rank=None, linear_use_full_rank_gate=False),
    "no latent experts": checkpoints.config(routed_expert_hidden_size=None, latent_moe_use_norm=None),
    "no experts": checkpoints.config(num_experts=None, num_experts_per_token=None, num_shared_experts=None),
    "plain stream": checkpoints.config(attn_res_block_size=None),
    "tied": checkpoints.config(tie_word_embeddings=True),
}


@pytest.fixture(scope="module", params=FOLDERS)
def pair(request, tmp_path_factory):
    """A snapshot and the store that it becomes."""
    store = tmp_path_factory.mktemp("store") / request.param
    assert convert(FOLDERS[request.param], store) == {}
    return FOLDERS[request.param], store


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    convert(
        checkpoints.write(folder / "snapshot", VARIANTS["k3"], checkpoints.tensors(VARIANTS["k3"])), folder / "store"
    )
    return folder / "store"


@pytest.fixture
def store(written, tmp_path):
    """A store that may be damaged."""
    return Path(shutil.copytree(written, tmp_path / "store"))


# The same model -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"dtype": "float64", "backend": "reference"}, {"dtype": "bfloat16"}])
def test_a_store_says_what_its_snapshot_says_bit_for_bit(pair, options):
    snapshot, store = (deltafin.load(folder, **options) for folder in pair)
    assert torch.equal(snapshot.logits(IDS), store.logits(IDS))
    assert torch.equal(snapshot.logits(IDS[:1]), store.logits(IDS[:1]))
    about, expected = store.info(), snapshot.info()
    for fact in ("parameters", "layers", "experts", "expert bytes", "expert weights", "skipped tensors", "context"):
        assert about.get(fact) == expected.get(fact)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_converts(variant, packed, tmp_path):
    c = VARIANTS[variant]
    snapshot = checkpoints.write(tmp_path / "snapshot", c, checkpoints.tensors(c, packed=packed), shards=3)
    convert(snapshot, tmp_path / "store")
    assert torch.equal(deltafin.load(snapshot).logits(IDS), deltafin.load(tmp_path / "store").logits(IDS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_other_types_are_moved_as_they_are(dtype, tmp_path):
    t = checkpoints.tensors(VARIANTS["k3"], packed=False)
    t = {n: x.to(dtype) if x.dtype == torch.bfloat16 else x for n, x in t.items()}
    snapshot = open_model(checkpoints.write(tmp_path / "snapshot", VARIANTS["k3"], t))
    convert(snapshot.path, tmp_path / "store")
    store = open_model(tmp_path / "store")
    for name in (name for part in parts(store.config) for name in part.names()):
        want, got = snapshot.read(name), store.read(name)
        assert got.dtype == want.dtype
        assert torch.equal(got, want)
    assert all(torch.equal(a, b) for a, b in zip(snapshot.expert(2, 3), store.expert(2, 3), strict=True))


def test_experts_of_several_formats_and_sizes_are_one_layer(tmp_path):
    c = VARIANTS["k3"]
    t, plain = checkpoints.tensors(c), checkpoints.tensors(c, packed=False)
    for name in [name for name in plain if ".experts.1." in name or ".experts.2.w1" in name]:
        for end in ("_packed", "_scale"):
            del t[name + end]
        t[name] = plain[name]
    snapshot = checkpoints.write(tmp_path / "snapshot", c, t)
    convert(snapshot, tmp_path / "store")
    store = open_model(tmp_path / "store")
    assert store.expert_formats == open_model(snapshot).expert_formats
    assert [type(store.expert(1, x).gate) for x in range(4)] == [MXFP4, torch.Tensor, torch.Tensor, MXFP4]
    assert torch.equal(deltafin.load(snapshot).logits(IDS), deltafin.load(tmp_path / "store").logits(IDS))


def test_a_packed_matrix_that_every_token_uses_stays_packed(tmp_path):
    c, name = VARIANTS["k3"], "model.layers.1.self_attn.o_proj.weight"
    c = checkpoints.config(linear_num_heads=16)  # 96 columns
    t = checkpoints.tensors(c)
    packed = pack_mxfp4(t.pop(name).float())
    t |= {f"{name}_packed": packed.codes, f"{name}_scale": packed.scales}
    snapshot = checkpoints.write(tmp_path / "snapshot", c, t)
    convert(snapshot, tmp_path / "store")
    got = open_model(tmp_path / "store").read("layers.1.mixer.out")
    assert isinstance(got, MXFP4)
    assert torch.equal(got.codes, packed.codes)
    assert torch.equal(got.scales, packed.scales)
    assert torch.equal(deltafin.load(snapshot).logits(IDS), deltafin.load(tmp_path / "store").logits(IDS))


def test_weights_are_views_of_the_files(written):
    store = Store(written)
    assert store.read("layers.0.mixer.q").data_ptr() == store.read("layers.0.mixer.q").data_ptr()
    gate = store.expert(1, 2).gate
    assert gate.codes.data_ptr() % PAGE == 0
    assert gate.codes.data_ptr() == store.expert(1, 2).gate.codes.data_ptr()


# As the page says -----------------------------------------------------------------------------------------------------


def test_files_are_as_any_reader_of_safetensors_finds_them(pair):
    """Read with the library for it, and the offsets of model.json, by hand."""
    about, store = json.loads((pair[1] / "model.json").read_text(encoding="utf-8")), Store(pair[1])
    for layer, kept in about["experts"].items():
        file = pair[1] / f"experts-{int(layer):03}.safetensors"
        with safe_open(file, "pt") as f:
            slabs, sums = f.get_tensor("experts"), f.get_tensor("checksums")
        assert slabs.shape[1] % PAGE == 0
        assert int.from_bytes(file.read_bytes()[:8], "little") % PAGE == PAGE - 8
        assert len(kept["kinds"]) == 1
        for x in range(len(slabs)):
            assert bytes(sums[x].tolist()) == stores.checksum(slabs[x].numpy())
            kind = kept["kinds"][0]
            start, stop = kind["down.codes" if "down.codes" in kind else "down"]["data_offsets"]
            down = store.expert(int(layer), x).down
            stored = down if isinstance(down, torch.Tensor) else down.codes
            assert torch.equal(slabs[x][start:stop], stored.flatten().view(torch.uint8))
    with safe_open(pair[1] / "resident.safetensors", "pt") as f:
        assert torch.equal(f.get_tensor("edges.embed"), store.read("edges.embed"))
        assert len(f.get_tensor("checksums")) == len(f.keys()) - 1


def test_a_config_goes_through_json_and_back(pair):
    config = deltafin.load(pair[0]).config
    assert from_json(json.loads(json.dumps(to_json(config)))) == config


@pytest.mark.parametrize("value", [{"kind": "KDA"}, {"kind": "Transformer"}, {}, {"kind": "MLP", "width": 1, "x": 2}])
def test_a_config_that_is_not_known_is_refused(value):
    with pytest.raises(ConfigError, match="not a part of a model that is known"):
        from_json(value)


# Damage ---------------------------------------------------------------------------------------------------------------


def test_any_changed_byte_of_a_small_store_is_found_when_it_is_opened(store):
    generator = torch.Generator().manual_seed(7)
    for file in sorted(store.iterdir()):
        content = file.read_bytes()
        for at in {0, 9, len(content) - 1, *torch.randint(len(content), (12,), generator=generator).tolist()}:
            changed = bytearray(content)
            changed[at] ^= 1
            file.write_bytes(changed)
            with pytest.raises(CheckpointError, match=file.name.replace(".", r"\.")):
                open_model(store)
        file.write_bytes(content)
    open_model(store)


@pytest.mark.parametrize("change", ["cut", "longer", "empty", "gone"])
def test_a_file_that_is_cut_longer_or_gone_is_named(store, change):
    for file in sorted(store.iterdir()):
        if file.name == "model.json" and change == "gone":
            continue
        content = file.read_bytes()
        match change:
            case "cut":
                file.write_bytes(content[:-1])
            case "longer":
                file.write_bytes(content + b"\0")
            case "empty":
                file.write_bytes(b"")
            case "gone":
                file.unlink()
        with pytest.raises(CheckpointError, match=file.name.replace(".", r"\.")):
            deltafin.load(store)
        file.write_bytes(content)
    deltafin.load(store)


def test_a_store_without_its_model_json_is_no_model(store):
    (store / "model.json").unlink()
    with pytest.raises(CheckpointError, match=r"lacks model\.json"):
        deltafin.load(store)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"format": "deltafin store"}', "\x00", '"x"', "null"])
def test_a_model_json_of_something_else_is_an_error_of_ours(store, content):
    (store / "model.json").write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"model\.json"):
        deltafin.load(store)


@pytest.mark.parametrize(("key", "value"), [("version", 2), ("version", 0), ("format", "another store")])
def test_another_version_is_refused_and_named(store, key, value):
    about = read_model(store)
    del about["checksum"]
    (store / "model.json").write_bytes(model_json(about | {key: value}))
    with pytest.raises(CheckpointError, match=f"has .*{value}.*this deltafin reads"):
        deltafin.load(store)


def test_of_a_large_store_a_sample_is_looked_at_and_all_when_asked(store, monkeypatch):
    size, looked = Store(store).totals["bytes"], []
    monkeypatch.setattr(stores, "SAMPLE", size // 4)
    real = stores.read_checksum
    monkeypatch.setattr(stores, "read_checksum", lambda path, unit: looked.append(unit) or real(path, unit))
    Store(store)
    few, seen = looked[:], []
    looked.clear()
    Store(store, full=True, progress=lambda done, total: seen.append((done, total)))
    assert 0.1 * size < sum(unit.size for unit in few) < 0.5 * sum(unit.size for unit in looked)
    assert set(few) < set(looked)
    assert seen[-1][0] == seen[-1][1]
    skipped = next(unit for unit in looked if unit not in few)
    file = Store(store).files[skipped.file]
    content = bytearray(file.read_bytes())
    content[skipped.start] ^= 1
    file.write_bytes(content)
    Store(store)
    with pytest.raises(CheckpointError, match=f"{skipped.name} in .* was changed"):
        Store(store, full=True)


def test_a_store_may_be_copied_and_moved(store, tmp_path):
    base = deltafin.load(store)
    for name in ("with space", "naïve", "模型", "🦊", "it's", "x" * 200):
        copy = tmp_path / name
        shutil.copytree(store, copy, copy_function=shutil.copyfile)  # times are not copied
        assert deltafin.load(copy).fingerprint == base.fingerprint
        shutil.rmtree(copy)


# Who it is ------------------------------------------------------------------------------------------------------------


def test_a_store_is_its_own_model_to_saved_sessions(pair, tmp_path):
    """Sums may depend on where a matrix begins in memory, so a snapshot's sessions are not taken over."""
    snapshot, store = map(deltafin.load, pair)
    session = store.session()
    session.feed([1, 2, 3])
    session.save(tmp_path / "session")
    assert deltafin.load(pair[1]).resume(tmp_path / "session").tokens == [1, 2, 3]
    with pytest.raises(SessionError, match="another model"):
        snapshot.resume(tmp_path / "session")


def test_stores_of_other_encodings_are_other_models(tmp_path):
    prints = set()
    for i, options in enumerate([{}, {"experts": "int8"}, {"resident": "int8"}]):
        convert(FOLDERS["linear"], tmp_path / str(i), **options)
        prints.add(deltafin.load(tmp_path / str(i)).fingerprint)
    assert len(prints) == 3


def test_options_of_load_pack_what_a_store_has_plain(tmp_path):
    convert(FOLDERS["linear"], tmp_path / "store")
    model, base = (deltafin.load(f, resident="int8", experts="int8") for f in (tmp_path / "store", FOLDERS["linear"]))
    assert torch.equal(model.logits(IDS), base.logits(IDS))
    assert model.info()["bytes"] == base.info()["bytes"]


def test_what_a_store_has_packed_is_not_packed_again(tmp_path):
    convert(FOLDERS["linear"], tmp_path / "store", resident="int8", experts="int8")
    model, base = deltafin.load(tmp_path / "store", resident="int8", experts="mxfp4"), deltafin.load(tmp_path / "store")
    assert torch.equal(model.logits(IDS), base.logits(IDS))
    assert model.fingerprint == base.fingerprint
    assert isinstance(model._store.expert(1, 0).up, Int8)
    matrix = open_model(FOLDERS["linear"]).read("layers.0.mixer.q")
    assert torch.equal(model._store.read("layers.0.mixer.q").codes, pack_int8(matrix).codes)
