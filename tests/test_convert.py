"""Conversion: the same bytes however often it is stopped, nothing lost without a word, within bounded memory."""

import os
import random
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import checkpoints
import pytest
import torch
from safetensors.torch import load_file, save_file

import deltafin
from deltafin.convert import Conversion, convert, encode, pipeline
from deltafin.errors import CheckpointError, UsageError
from deltafin.quant import MXFP4, Int8, pack_int8, pack_mxfp4
from deltafin.snapshot import open_layout
from deltafin.store import Store, open_model

DATA = Path(__file__).parent / "data"
LINEAR = DATA / "kimi-linear"
C = checkpoints.config()
SMALL = checkpoints.config(num_hidden_layers=3, num_experts=3, linear_kda_layers=[1, 2], linear_full_attn_layers=[3])
EXPERT = "model.layers.1.block_sparse_moe.experts.3.w2.weight"


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def tensors():
    return checkpoints.tensors(C)


@pytest.fixture
def source(tmp_path, tensors):
    """A checkpoint whose tensors lie in turn in five files, so that nothing is in one."""
    folder = checkpoints.write(tmp_path / "source", C, tensors, shards=5)
    (folder / "tiktoken.model").write_bytes(b"YQ== 0\n")
    (folder / "LICENSE").write_text("free", encoding="utf-8")
    (folder / "modeling.py").write_text("raise SystemExit", encoding="utf-8")
    return folder


@pytest.fixture
def dest(tmp_path):
    return tmp_path / "dest"


# Encodings ------------------------------------------------------------------------------------------------------------

UNPACKED = {"int8": (pack_int8, Int8), "mxfp4": (lambda w: pack_mxfp4(w, closest=True), MXFP4)}


@pytest.mark.parametrize(("resident", "experts"), [("int8", "keep"), ("keep", "int8"), ("int8", "mxfp4")])
def test_the_store_has_what_load_would_have_packed(dest, resident, experts):
    """A matrix is cut into pieces, and each piece is packed as it would be in the whole."""
    convert(LINEAR, dest, resident=resident, experts=experts)
    store, packed = deltafin.load(dest), deltafin.load(LINEAR, resident=resident, experts=experts)
    for ours, theirs in zip(store.decoder.blocks, packed.decoder.blocks, strict=True):
        for part in ("mixer", "ffn"):
            for name in getattr(ours, part).__dataclass_fields__:
                a, b = (getattr(getattr(block, part), name) for block in (ours, theirs))
                if isinstance(b, Int8):
                    assert torch.equal(a.codes, b.codes)
                    assert torch.equal(a.scales, b.scales)
    for got, want in zip(
        store._store.expert(1, 2),
        packed.decoder.blocks[1].ffn.experts.held[2] if experts != "keep" else open_model(LINEAR).expert(1, 2),
        strict=True,
    ):
        assert torch.equal(got if experts == "keep" else got.codes, want if experts == "keep" else want.codes)


@pytest.mark.parametrize("how", ["mxfp4", "int8", "bf16"])
def test_matrices_of_many_pieces_are_packed_as_a_whole(tmp_path, dest, monkeypatch, how):
    monkeypatch.setattr(encode, "MOVED", 1000)
    monkeypatch.setattr(encode, "ENCODED", 512)
    monkeypatch.setattr(encode, "BLOCK", 256)
    t = checkpoints.tensors(C, packed=False)
    t = {name: x.float() if ".experts." in name else x for name, x in t.items()}
    source = checkpoints.write(tmp_path / "source", C, t)
    errors = convert(source, dest, experts=how)
    lost = total = 0.0
    for layer in (1, 2, 3):
        for x in range(5):
            stored = open_model(source).expert(layer, x)
            for got, want in zip(open_model(dest).expert(layer, x), stored, strict=True):
                if how == "bf16":
                    assert torch.equal(got, want.bfloat16())
                    continue
                packed = UNPACKED[how][0](want)
                assert torch.equal(got.codes, packed.codes)
                assert torch.equal(got.scales, packed.scales)
            down = open_model(dest).expert(layer, x).down
            unpacked = down if how == "bf16" else down.unpack(torch.float64)
            lost += (unpacked.double() - stored.down.double()).square().sum().item()
            total += stored.down.double().square().sum().item()
    assert errors.keys() == {"experts.gate", "experts.up", "experts.down"}
    assert errors["experts.down"] == pytest.approx((lost / total) ** 0.5, rel=1e-6)


def test_packed_experts_become_bfloat16_without_an_error_and_back(tmp_path, source, dest):
    assert set(convert(source, dest, experts="bf16").values()) == {0.0}
    got, want = open_model(dest).expert(1, 0).gate, open_model(source).expert(1, 0).gate
    assert torch.equal(got, want.unpack(torch.bfloat16))
    torch.testing.assert_close(deltafin.load(source).logits([1, 2]), deltafin.load(dest).logits([1, 2]))


@pytest.mark.parametrize("tied", [True, False])
def test_the_router_the_embedding_and_vectors_are_never_rounded(tmp_path, dest, tied):
    c = checkpoints.config(tie_word_embeddings=tied)
    source = checkpoints.write(tmp_path / "source", c, checkpoints.tensors(c))
    errors = convert(source, dest, resident="int8")
    store, snapshot = open_model(dest), open_model(source)
    for name in (
        "layers.1.ffn.router",
        "edges.embed",
        "edges.norm",
        "layers.0.mixer.q_conv",
        "layers.0.mixer.decay_log",
    ):
        assert torch.equal(store.read(name), snapshot.read(name))
    assert isinstance(store.read("edges.head"), Int8)
    assert {"edges.head", "mixer.q", "ffn.shared_up", "ffn.down", "mixer.out"} < errors.keys()
    assert not {"ffn.router", "edges.embed", "norms.mixer"} & errors.keys()
    assert all(0.001 < error < 0.02 for error in errors.values())


@pytest.mark.parametrize("value", [0.0, 1e-40, -0.0])
def test_zeros_and_the_smallest_numbers_can_be_packed(tmp_path, dest, tensors, value):
    t = checkpoints.tensors(C, packed=False) | {"model.layers.0.self_attn.q_proj.weight": torch.full((12, 32), value)}
    t[EXPERT] = torch.full((64, 32), value)
    t[EXPERT][3, 3] = 1e30  # one outlier
    source = checkpoints.write(tmp_path / "source", C, t)
    errors = convert(source, dest, resident="int8", experts="mxfp4")
    assert all(error == error for error in errors.values())
    read = Store(dest).read("layers.0.mixer.q")
    assert read.unpack(torch.float32).abs().max() <= 1e-38
    assert torch.isfinite(deltafin.load(dest).logits([1, 2, 3])).all() or value != 0.0


def test_experts_that_are_no_groups_of_32_cannot_become_mxfp4(tmp_path, dest):
    c = checkpoints.config(moe_intermediate_size=24)
    source = checkpoints.write(tmp_path / "source", c, checkpoints.tensors(c, packed=False))
    with pytest.raises(UsageError, match="24 columns"):
        convert(source, dest, experts="mxfp4")
    assert not dest.exists()
    convert(source, dest, experts="int8")


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("options", [{}, {"resident": "int8", "experts": "int8"}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_what_is_not_finite_is_refused_by_name(tmp_path, dest, dtype, value, options):
    for name in (
        "model.layers.2.self_attn.o_proj.weight",
        EXPERT,
        "model.norm.weight",
        "model.layers.0.self_attn.A_log",
    ):
        t = checkpoints.tensors(C, packed=False)
        t[name] = t[name].to(dtype)
        t[name].view(-1)[-1] = value
        source = checkpoints.write(tmp_path / "source", C, t)
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
            convert(source, dest, **options)
        assert not dest.exists()
        shutil.rmtree(tmp_path / "dest.partial")


def test_a_scale_of_255_is_refused_by_name(tmp_path, dest, tensors):
    scale = tensors[f"{EXPERT}_scale"].clone()
    scale[5] = 255
    source = checkpoints.write(tmp_path / "source", C, tensors | {f"{EXPERT}_scale": scale})
    for options in ({}, {"experts": "int8"}):
        with pytest.raises(CheckpointError, match=f"{EXPERT}_scale has a scale byte of 255"):
            convert(source, dest, **options)
        shutil.rmtree(tmp_path / "dest.partial")
    scale[5] = 254
    convert(checkpoints.write(tmp_path / "source", C, tensors | {f"{EXPERT}_scale": scale}), dest)


@pytest.mark.parametrize(
    ("name", "shape"), [("model.layers.0.self_attn.q_proj.weight", (12, 31)), (f"{EXPERT}_scale", (63, 1))]
)
def test_a_wrong_shape_an_unknown_and_a_missing_tensor_stop_it_before_it_begins(tmp_path, dest, tensors, name, shape):
    dtype = torch.uint8 if name.startswith(EXPERT) else torch.bfloat16
    for changed in (
        {name: torch.ones(shape, dtype=dtype)},
        {name: None},
        {"model.layers.1.surprise.weight": torch.zeros(3)},
    ):
        t = {key: value for key, value in (tensors | changed).items() if value is not None}
        with pytest.raises(CheckpointError, match=next(iter(changed)).removesuffix("_scale").replace(".", r"\.")):
            convert(checkpoints.write(tmp_path / "source", C, t), dest)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_parts_that_a_text_model_does_not_run_are_left_out_and_counted(tmp_path, dest, tensors):
    extra = {"mtp.fc.weight": torch.full((2,), torch.nan), "vision_tower.a.weight": torch.zeros(2)}
    convert(checkpoints.write(tmp_path / "source", C, tensors | extra), dest)
    assert Store(dest).skipped == {"mtp.*": 1, "vision_tower.*": 1}


@pytest.mark.parametrize("where", [".", "inside", "..", "link", "link/inside"])
def test_source_and_destination_may_not_lie_in_one_another(source, where):
    (source.parent / "link").symlink_to(source)
    place = source.parent / where if where.startswith("link") else source / where
    before = content(source)
    with pytest.raises(UsageError, match="lie in one another"):
        convert(source, place)
    assert content(source) == before


def test_something_else_at_the_destination_is_left_alone(source, dest):
    dest.write_text("mine", encoding="utf-8")
    with pytest.raises(UsageError, match="is there already"):
        convert(source, dest)
    dest.unlink()
    dest.mkdir()
    (dest / "notes").write_text("mine", encoding="utf-8")
    with pytest.raises(UsageError, match="is there already"):
        convert(source, dest)
    shutil.rmtree(dest)
    partial = dest.with_name("dest.partial")
    partial.mkdir()
    (partial / "notes").write_text("mine", encoding="utf-8")
    with pytest.raises(UsageError, match="is something else"):
        convert(source, dest)
    assert [path.name for path in partial.iterdir()] == ["notes"]


def test_an_empty_folder_is_a_destination(source, dest):
    dest.mkdir()
    convert(source, dest)
    open_model(dest)


def test_a_store_is_no_source(source, dest):
    convert(source, dest)
    with pytest.raises(UsageError, match="is a store already"):
        convert(dest, dest.with_name("other"))


@pytest.mark.parametrize("options", [{"experts": "fp8"}, {"resident": "mxfp4"}])
def test_an_encoding_that_is_not_known_is_refused(source, dest, options):
    with pytest.raises(UsageError, match="is not supported"):
        convert(source, dest, **options)


# A finished store -----------------------------------------------------------------------------------------------------


def test_files_for_text_are_copied_and_no_others(source, dest):
    convert(source, dest)
    assert {path.name for path in dest.iterdir()} == {
        *("model.json", "config.json", "tiktoken.model", "LICENSE", "resident.safetensors"),
        *(f"experts-00{layer}.safetensors" for layer in (1, 2, 3)),
    }
    assert sorted(path.name for path in dest.parent.iterdir()) == ["dest", "source"]


def test_a_second_run_compares_and_changes_nothing(source, dest):
    convert(source, dest, experts="int8")
    before = content(dest)
    assert convert(source, dest, experts="int8").keys() == {"experts.gate", "experts.up", "experts.down"}
    assert content(dest) == before


@pytest.mark.parametrize("options", [{}, {"experts": "int8", "resident": "int8"}])
def test_a_source_that_changed_since_is_told_from_its_store(source, dest, options):
    """Any one byte, wherever it lies and whatever the file's time says."""
    convert(source, dest, **options)
    file = source / "model-00002-of-000005.safetensors"
    stored = load_file(file)
    for name in list(stored)[::5]:
        changed = {n: t.clone() for n, t in stored.items()}
        changed[name].view(torch.uint8).view(-1)[0] ^= 1 if changed[name].dtype == torch.uint8 else 0xFF
        times = file.stat()
        save_file(changed, file)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        with pytest.raises(UsageError, match="is not what the source makes"):
            convert(source, dest, **options)
    save_file(stored, file)
    convert(source, dest, **options)
    (source / "tiktoken.model").write_bytes(b"Yg== 0\n")
    with pytest.raises(UsageError, match=r"tiktoken\.model .* is not what the source makes"):
        convert(source, dest, **options)


def test_other_options_or_another_model_are_refused(source, dest, tmp_path):
    convert(source, dest)
    for other, options in ((source, {"experts": "int8"}), (LINEAR, {})):
        with pytest.raises(UsageError, match="store of another model, or was made with other options"):
            convert(other, dest, **options)


def test_repository_and_revision_are_kept_of_a_hub_cache_with_links_that_cannot_be_written(source, dest, tmp_path):
    blobs, links = tmp_path / "models--org--name" / "blobs", tmp_path / "models--org--name" / "snapshots" / "abc123"
    shutil.move(source, blobs)
    links.mkdir(parents=True)
    for file in blobs.iterdir():
        (links / file.name).symlink_to(file)
        file.chmod(0o444)
    links.chmod(0o555)
    convert(links, dest)
    links.chmod(0o755)
    assert Store(dest).source == ("org/name", "abc123")


@pytest.mark.parametrize("name", ["with space", "naïve", "模型", "🦊", "it's", "x" * 200])
def test_any_name_works(source, tmp_path, name):
    moved = source.rename(tmp_path / f"{name}s")
    convert(moved, tmp_path / name)
    open_model(tmp_path / name)


# Stopped and gone on with ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"experts": "int8", "resident": "int8"}, {"experts": "bf16"}])
def test_shards_come_in_any_order_and_may_be_gone_after(source, dest, options):
    convert(source, dest.with_name("straight"), **options)
    layout = open_layout(source)
    stamps = [pipeline._stamp(file) for file in layout.files]
    for seed in range(4):
        order = random.Random(seed).sample(range(5), 5)
        for i in order:  # a new process for each, as it were, which sees the one shard
            extras = [source / name for name in ("config.json", "tiktoken.model", "LICENSE")]
            with (
                Conversion(layout, dest, stamps, extras=extras, experts="keep", resident="keep")
                if not options
                else Conversion(
                    layout, dest, stamps, extras=extras, **{"experts": "keep", "resident": "keep"} | options
                ) as conversion
            ):
                assert conversion.needs(i)
                conversion.take(i, Path(layout.files[i]))
                assert not conversion.needs(i)
                if i == order[-1]:
                    conversion.finish()
                else:
                    with pytest.raises(UsageError, match="not taken"):
                        conversion.finish()
        assert content(dest) == content(dest.with_name("straight"))
        shutil.rmtree(dest)


FAULTS = """
    import errno, io, os, random, signal, sys
    from pathlib import Path
    from types import SimpleNamespace
    import torch
    torch.set_num_threads(1)
    from deltafin.convert import convert, files

    def run(fault, at, seed):
        '''Convert in a process of its own; its n-th operation on a file goes wrong. Return how it ended.'''
        if child := os.fork():
            return os.waitpid(child, 0)[1]
        count, chance = 0, random.Random(seed)

        def next_operation(name):
            nonlocal count
            count += 1
            if count != at:
                return
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "full" and name in ("write", "reserve", "mkdir"):
                raise OSError(errno.ENOSPC, "No space left on device")
            if fault == "broken":
                raise OSError(errno.EIO, "Input/output error")

        class Raw(io.FileIO):
            def write(self, data):
                cut = chance.randrange(1, len(data) + 1) if len(data) else 0
                if fault == "kill" and count + 1 == at:
                    super().write(bytes(data[:cut]))  # a part is written, and then it is over
                next_operation("write")
                return super().write(data[:cut] if fault == "short" else data)

            def readinto(self, buffer):
                next_operation("read")
                view = memoryview(buffer)
                return super().readinto(view[: chance.randrange(1, len(view) + 1)] if fault == "short" else view)

        files.open_raw.__code__ = (lambda path, mode: Raw(path, mode)).__code__
        files.open_raw.__globals__["Raw"] = Raw
        for name in ("fsync", "replace", "rename", "posix_fallocate"):
            real = getattr(os, name)
            def wrapped(*a, real=real, name="reserve" if name == "posix_fallocate" else name):
                next_operation(name)
                return real(*a)
            setattr(os, name, wrapped)
        try:
            convert(sys.argv[1], sys.argv[2], **OPTIONS)
        except BaseException as error:
            print(type(error).__name__, str(error).replace(chr(10), " "), flush=True)
            os._exit(1)
        print("operations", count, flush=True)
        os._exit(0)
"""


def drive(script, *arguments):
    """Run a script that begins with FAULTS; return its lines."""
    code = textwrap.dedent(FAULTS) + textwrap.dedent(script)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def small(tmp_path):
    return checkpoints.write(tmp_path / "source", SMALL, checkpoints.tensors(SMALL), shards=2)


@pytest.mark.parametrize("fault", ["kill", "full", "broken", "short"])
def test_stopped_anywhere_it_ends_after_a_rerun_in_the_same_bytes(small, dest, fault):
    """Fifty moments: a first run goes wrong there, a second somewhere else, and a third finishes."""
    straight = dest.with_name("straight")
    convert(small, straight, experts="int8")
    count = drive('OPTIONS = dict(experts="int8")\nrun("none", 0, 0)', small, dest)[-1].split()[1]
    shutil.rmtree(dest)
    script = f"""
    import shutil
    OPTIONS, FAULT, TOTAL = dict(experts="int8"), {fault!r}, {count}
    dest, straight = map(Path, sys.argv[2:])
    expected = {{p.name: p.read_bytes() for p in straight.iterdir()}}
    chance = random.Random(5)
    for moment in range(50):
        ended = run(FAULT, chance.randrange(1, TOTAL), moment)
        assert not dest.exists() or ended == 0 or {{p.name: p.read_bytes() for p in dest.iterdir()}} == expected
        again = run(FAULT, chance.randrange(1, TOTAL), moment + 100)
        assert run("none", 0, 0) == 0, moment
        assert {{p.name: p.read_bytes() for p in dest.iterdir()}} == expected, moment
        assert not Path(f"{{dest}}.partial").exists()
        print("moment", ended, again, flush=True)
        shutil.rmtree(dest)
    """
    lines = drive(script, small, dest, straight)
    ended = [int(line.split()[1]) for line in lines if line.startswith("moment")]
    assert len(ended) == 50
    stopped = sum(code != 0 for code in ended)
    assert stopped == 0 if fault == "short" else stopped > 20
    assert set(ended) <= ({0, 9} if fault == "kill" else {0, 256})  # killed, or an exit code of 1
    errors = {line.split()[0] for line in lines if line.split()[0] not in ("moment", "operations")}
    assert errors <= {"StorageError", "CheckpointError"}
