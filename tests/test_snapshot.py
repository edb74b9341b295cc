"""Opening snapshots: what is wrong is found at once, and named."""

import json
import os
import shutil
from pathlib import Path

import checkpoints
import pytest
import torch
from safetensors.torch import load_file, save_file

import deltafin
from deltafin.errors import CheckpointError, DeltafinError
from deltafin.headers import read_header
from deltafin.snapshot import Snapshot

IDS = list(range(20))


@pytest.fixture(scope="module")
def parts():
    c = checkpoints.config()
    return c, checkpoints.tensors(c)


@pytest.fixture
def make(tmp_path, parts):
    """Write the base model with tensors changed: name to a new tensor, or None to leave it out."""

    def write(shards=1, root="model.", index=True, **changed):
        c, t = parts
        t = {name.replace("model.", root, 1) if name.startswith("model.") else name: x for name, x in t.items()}
        for name, tensor in changed.items():
            t.pop(name, None)
            if tensor is not None:
                t[name] = tensor
        return checkpoints.write(tmp_path / "model", c, t, shards, index)

    return write


K3 = "model.layers.1.block_sparse_moe.experts.3.w2.weight"


def test_tensors_are_views_of_the_files(make):
    store = Snapshot(make())
    a, b = store.read("layers.0.mixer.q"), store.read("layers.0.mixer.q")
    assert a.data_ptr() == b.data_ptr()
    assert a.dtype == torch.bfloat16
    assert store.expert(1, 0).gate.codes.data_ptr() == store.expert(1, 0).gate.codes.data_ptr()
    assert store.expert(1, 0).gate.codes.dtype == torch.uint8


@pytest.mark.parametrize("shards", [1, 2, 5])
@pytest.mark.parametrize("index", [True, False])
def test_shards_in_any_number_are_one_model(make, shards, index):
    base = deltafin.load(make()).logits(IDS)
    shutil.rmtree(make())
    assert torch.equal(deltafin.load(make(shards, index=index)).logits(IDS), base)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.2.self_attn.kv_b_proj.weight", f"{K3}_packed"])
def test_a_missing_tensor_is_named(make, name):
    with pytest.raises(CheckpointError, match=name.removesuffix("_packed").replace(".", r"\.")):
        deltafin.load(make(**{name: None}))


def test_an_unknown_tensor_is_named_with_its_file(make):
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.surprise\.weight in .*model\.safetensors"):
        deltafin.load(make(**{"model.layers.1.surprise.weight": torch.zeros(3)}))


def test_known_parts_are_skipped_and_counted(make):
    extra = ["mtp.fc.weight", "vision_tower.a.weight", "mm_projector.b", "model.layers.4.enorm.weight", "model.mtp.x"]
    assert Snapshot(make(**{name: torch.zeros(2) for name in extra})).skipped == {
        "layers.4.*": 1,
        "mm_projector.*": 1,
        "mtp.*": 2,
        "vision_tower.*": 1,
    }


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (12, 31)),
        ("model.layers.0.input_layernorm.weight", (33,)),
        (f"{K3}_packed", (64, 15)),
        (f"{K3}_scale", (63, 1)),
        ("lm_head.weight", (49, 32)),
    ],
)
def test_a_wrong_shape_is_named_with_both_shapes(make, name, shape):
    dtype = torch.uint8 if name.startswith(K3) else torch.bfloat16
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")) as error:
        deltafin.load(make(**{name: torch.ones(shape, dtype=dtype)}))
    assert str(shape) in str(error.value)


def test_all_missing_shards_are_listed_at_once(make):
    folder = make(shards=5)
    for i in (2, 4):
        (folder / f"model-{i:05}-of-000005.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks 2 of 5 files: model-00002.*, model-00004"):
        deltafin.load(folder)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"lacks 2 of 5 files: model-00002.*, model-00004"):
        deltafin.load(folder)


def test_shards_that_hold_only_skipped_parts_may_be_absent(make, parts):
    folder = make(shards=2)
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    index["weight_map"] |= {"vision_tower.a.weight": "model-00003-of-000003.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    deltafin.load(folder)


@pytest.mark.parametrize("cut", [1, 1000])
def test_a_file_that_is_cut_is_named_with_both_sizes(make, cut):
    folder = make()
    file = folder / "model.safetensors"
    size = file.stat().st_size
    os.truncate(file, size - cut)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors has {size - cut} bytes, .* {size}") as error:
        deltafin.load(folder)
    assert "fetch it again" in str(error.value)


@pytest.mark.parametrize("size", [0, 3, 8, 50, 2000])
def test_a_file_cut_inside_its_header_is_named(make, size):
    folder = make()
    os.truncate(folder / "model.safetensors", size)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors .*{size} bytes"):
        deltafin.load(folder)


@pytest.mark.parametrize(
    "content", [b"\x05\0\0\0\0\0\0\0hello", b"\x02\0\0\0\0\0\0\0[]", b"<html>not found</html>" * 9]
)
def test_a_file_of_something_else_is_named(make, content):
    folder = make()
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        deltafin.load(folder)


@pytest.mark.parametrize("length", [*range(99_990, 100_010, 3), 4096, 8192, 65536])
def test_headers_of_any_length_are_read(tmp_path, length):
    file = tmp_path / "x.safetensors"
    body = json.dumps({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}})
    file.write_bytes(length.to_bytes(8, "little") + body.ljust(length).encode() + b"ab")
    entry = read_header(file)["a"]
    assert (entry.start, entry.stop) == (8 + length, 10 + length)


def test_a_tensor_that_overlaps_the_header_or_lies_about_its_size_is_refused(tmp_path):
    file = tmp_path / "x.safetensors"
    for offsets in ([-4, 2], [0, 3]):
        body = json.dumps({"a": {"dtype": "U8", "shape": [2], "data_offsets": offsets}}).encode()
        file.write_bytes(len(body).to_bytes(8, "little") + body + b"abcd"[: max(offsets[1], 0)])
        with pytest.raises(CheckpointError, match=r"x\.safetensors"):
            read_header(file)


@pytest.mark.parametrize("form", ["plain", "four dimensions", "padded"])
def test_a_log_may_be_padded_with_zeros(make, parts, form):
    base = deltafin.load(make()).logits(IDS)
    shutil.rmtree(make())
    name = "model.layers.0.self_attn.A_log"
    a = parts[1][name]
    forms = {"plain": a, "four dimensions": a.view(1, 1, -1, 1), "padded": torch.cat([a, torch.zeros(126)])}
    assert torch.equal(deltafin.load(make(**{name: forms[form]})).logits(IDS), base)


@pytest.mark.parametrize("tail", [torch.ones(3), torch.zeros(0)])
def test_padding_that_is_not_zero_and_a_short_a_log_are_refused(make, parts, tail):
    name = "model.layers.0.self_attn.A_log"
    a = torch.cat([parts[1][name], tail]) if len(tail) else parts[1][name][:1]
    with pytest.raises(CheckpointError, match="A_log"):
        deltafin.load(make(**{name: a}))


def test_scales_as_bytes_and_as_exponents_are_the_same(make):
    folder = make()
    base = deltafin.load(folder).logits(IDS)
    file = folder / "model.safetensors"
    stored = load_file(file)
    save_file({n: t.view(torch.float8_e8m0fnu) if n.endswith("_scale") else t for n, t in stored.items()}, file)
    assert "F8_E8M0" in {e.dtype for e in read_header(file).values()}
    assert torch.equal(deltafin.load(folder).logits(IDS), base)


def test_a_scale_of_255_is_refused_by_name_and_254_is_not(make, parts):
    scale = parts[1][f"{K3}_scale"].clone()
    scale[5] = 255
    with pytest.raises(CheckpointError, match=rf"{K3}_scale has a scale byte of 255".replace(".", r"\.")):
        deltafin.load(make(**{f"{K3}_scale": scale}))
    scale[5] = 134
    assert deltafin.load(make(**{f"{K3}_scale": scale})).logits(IDS).isfinite().all()


def test_any_linear_may_be_packed(make, parts):
    from deltafin.quant import pack_mxfp4

    name = "model.layers.1.block_sparse_moe.shared_experts.gate_proj.weight"
    packed = pack_mxfp4(parts[1][name].float())
    got = deltafin.load(make(**{name: None, f"{name}_packed": packed.codes, f"{name}_scale": packed.scales})).logits(
        IDS
    )
    shutil.rmtree(make())
    want = deltafin.load(make(**{name: packed.unpack(torch.bfloat16)})).logits(IDS)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("root", ["model.", "language_model.model."])
def test_the_dense_layer_may_bear_the_mixtures_name(make, parts, root):
    base = deltafin.load(make()).logits(IDS)
    shutil.rmtree(make())
    moved = {}
    for m in ("gate", "up", "down"):
        moved[f"{root}layers.0.mlp.{m}_proj.weight"] = None
        moved[f"{root}layers.0.block_sparse_moe.{m}_proj.weight"] = parts[1][f"model.layers.0.mlp.{m}_proj.weight"]
    if root != "model.":
        moved |= {"lm_head.weight": None, "language_model.lm_head.weight": parts[1]["lm_head.weight"]}
    assert torch.equal(deltafin.load(make(root=root, **moved)).logits(IDS), base)


def test_a_type_that_is_not_supported_is_named(make, parts):
    name = "model.layers.1.self_attn.v_proj.weight"
    with pytest.raises(CheckpointError, match=r"v_proj\.weight is stored as F8_E4M3"):
        deltafin.load(make(**{name: parts[1][name].to(torch.float8_e4m3fn)}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wider_weights_are_taken_as_they_are(make, parts, dtype):
    changed = {n: t.to(dtype) for n, t in parts[1].items() if t.dtype == torch.bfloat16}
    base = deltafin.load(make()).logits(IDS)
    shutil.rmtree(make())
    torch.testing.assert_close(deltafin.load(make(**changed)).logits(IDS), base, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_folder_that_lacks_a_file_says_which(make, missing):
    folder = make()
    (folder / missing).unlink()
    with pytest.raises(CheckpointError, match=r"config\.json|\*\.safetensors"):
        deltafin.load(folder)


@pytest.mark.parametrize("content", ["", "[1]", "{", '"x"', "{}"])
def test_a_damaged_config_is_an_error_of_ours(make, content):
    folder = make()
    (folder / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(DeltafinError, match="config"):
        deltafin.load(folder)


@pytest.mark.parametrize("name", ["with space", "naïve", "模型", "🦊", "it's", "x" * 200])
def test_any_folder_name_works(make, name):
    folder = make().rename(Path(make()).parent / name)
    assert deltafin.load(folder).logits([1]).shape == (1, 50)
    assert deltafin.load(f"{folder}/").name == name


def test_links_to_files_elsewhere_work(make, tmp_path):
    folder = make(shards=2)
    blobs, links = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    shutil.move(folder, blobs)
    links.mkdir(parents=True)
    for file in blobs.iterdir():
        (links / file.name).symlink_to(file)
    deltafin.load(links)


def test_a_model_that_changed_has_another_fingerprint(make, parts):
    first = Snapshot(make()).fingerprint
    assert Snapshot(make()).fingerprint == first
    changed = parts[1]["model.norm.weight"] * 2
    assert Snapshot(make(**{"model.norm.weight": changed})).fingerprint != first
