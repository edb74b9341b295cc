"""Conversion: the same bytes however often it is stopped, nothing lost without a word, within bounded memory."""

import json
import math
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
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import deltafin
from deltafin.cli import main
from deltafin.convert import Conversion, convert, encode, pipeline
from deltafin.errors import CheckpointError, StorageError, UsageError
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

        files.io = SimpleNamespace(FileIO=Raw)
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
    """Many moments: a first run goes wrong there, a second somewhere else, and a third finishes."""
    straight, moments = dest.with_name("straight"), 50 if fault == "kill" else 20
    convert(small, straight, experts="int8")
    count = drive('OPTIONS = dict(experts="int8")\nrun("none", 0, 0)', small, dest)[-1].split()[1]
    shutil.rmtree(dest)
    script = f"""
    import shutil
    OPTIONS, FAULT, TOTAL = dict(experts="int8"), {fault!r}, {count}
    dest, straight = map(Path, sys.argv[2:])
    expected = {{p.name: p.read_bytes() for p in straight.iterdir()}}
    chance = random.Random(5)
    for moment in range({moments}):
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
    assert len(ended) == moments
    stopped = sum(code != 0 for code in ended)
    assert stopped == 0 if fault == "short" else stopped > moments / 2
    assert set(ended) <= ({0, 9} if fault == "kill" else {0, 256})  # killed, or an exit code of 1
    errors = {line.split()[0] for line in lines if line.split()[0] not in ("moment", "operations")}
    assert errors <= {"StorageError", "CheckpointError"}


def test_the_two_moments_of_publishing(source, dest, monkeypatch):
    """Killed just before the name is given, or just after: a rerun ends in the same bytes, and cleans up."""
    convert(source, dest.with_name("straight"))
    for name in ("rename", "rmtree"):
        module = os if name == "rename" else shutil

        def stop(*arguments, **options):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(module, name, stop)
            with pytest.raises(KeyboardInterrupt):
                convert(source, dest)
        assert dest.with_name("dest.partial").exists()
        assert dest.exists() == (name == "rmtree")
        convert(source, dest)
        assert content(dest) == content(dest.with_name("straight"))
        assert not dest.with_name("dest.partial").exists()
        shutil.rmtree(dest)


def interrupted(source, dest, monkeypatch, after=30, **options):
    """Convert, and be interrupted after some pieces."""
    real, count = encode.run, 0

    def run(*arguments):
        nonlocal count
        count += 1
        if count > after:
            raise KeyboardInterrupt
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(encode, "run", run)
        with pytest.raises(KeyboardInterrupt):
            convert(source, dest, **options)
    return dest.with_name("dest.partial")


def test_what_was_done_is_kept_and_not_read_again(small, dest, monkeypatch):
    partial = interrupted(small, dest, monkeypatch, 60)
    assert not dest.exists()
    done = len((partial / "journal").read_bytes().splitlines())
    assert done > 10
    real, ran = encode.run, []
    monkeypatch.setattr(encode, "run", lambda job, *rest: ran.append(job) or real(job, *rest))
    convert(small, dest)
    jobs = len(ran)
    ran.clear()
    convert(small, dest.with_name("straight"))
    assert jobs < len(ran) - done / 2
    assert content(dest) == content(dest.with_name("straight"))


@pytest.mark.parametrize("what", ["store/resident.safetensors", "waiting", "journal"])
def test_what_was_damaged_in_between_is_made_anew(source, dest, monkeypatch, what):
    convert(source, dest.with_name("straight"))
    partial = interrupted(source, dest, monkeypatch, 40)
    files = [*(partial / what).iterdir()] if what == "waiting" else [partial / what]
    assert files
    for file in files:
        damaged = bytearray(file.read_bytes())
        for at in range(0, len(damaged), 97):
            damaged[at] ^= 0xFF
        file.write_bytes(damaged)
    convert(source, dest)
    assert content(dest) == content(dest.with_name("straight"))


def test_a_shard_that_changed_in_between_is_read_again(small, dest, monkeypatch):
    interrupted(small, dest, monkeypatch, 60)
    file = small / "model-00001-of-000002.safetensors"
    stored = load_file(file)
    save_file({name: t * 2 if t.dtype == torch.bfloat16 else t for name, t in stored.items()}, file)
    os.utime(file, ns=(0, 0))
    convert(small, dest)
    convert(small, dest.with_name("straight"))
    assert content(dest) == content(dest.with_name("straight"))


def test_a_shard_that_changes_while_it_is_read_stops_it(small, dest, monkeypatch):
    real = encode.run
    monkeypatch.setattr(encode, "run", lambda *a: os.utime(small / "model-00001-of-000002.safetensors") or real(*a))
    with pytest.raises(CheckpointError, match="was changed while it was read"):
        convert(small, dest)
    assert not dest.exists()


def test_a_shard_that_is_cut_while_it_is_read_stops_it(small, dest, monkeypatch):
    real, file = encode.run, small / "model-00001-of-000002.safetensors"
    whole = file.read_bytes()
    monkeypatch.setattr(encode, "run", lambda *a: os.truncate(file, len(whole) // 2) or real(*a))
    with pytest.raises(CheckpointError, match=r"ended at byte \d+, inside"):
        convert(small, dest)
    monkeypatch.undo()
    file.write_bytes(whole)
    convert(small, dest)
    convert(small, dest)  # compares


def test_an_unfinished_conversion_is_no_model_and_goes_on_as_itself_alone(source, dest, monkeypatch):
    partial = interrupted(source, dest, monkeypatch)
    for folder in (partial, partial / "store"):
        with pytest.raises(CheckpointError, match=r"unfinished conversion|lacks model\.json"):
            deltafin.load(folder)
    with pytest.raises(UsageError, match="of other files, or with other options"):
        convert(source, dest, experts="int8")
    with pytest.raises(UsageError, match="of other files, or with other options"):
        convert(LINEAR, dest)
    convert(source, dest)


def test_two_at_once_are_kept_apart(source, dest):
    pytest.importorskip("fcntl")
    layout = open_layout(source)
    stamps = [pipeline._stamp(file) for file in layout.files]
    with Conversion(layout, dest, stamps), pytest.raises(UsageError, match="another process is writing"):
        convert(source, dest)
    shutil.rmtree(dest.with_name("dest.partial"))
    convert(source, dest)


def test_a_disk_that_is_too_small_is_said_before_anything_is_written(source, dest, monkeypatch):
    usage = shutil.disk_usage(source)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(StorageError, match=r"needs 0\.00 GB, and its disk has 0\.00 GB free"):
        convert(source, dest)
    monkeypatch.undo()
    convert(source, dest)


def test_a_place_that_cannot_be_written_is_an_error_of_ours(source, tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(StorageError, match="cannot be written"):
        convert(source, tmp_path / "file" / "dest")


# Memory ---------------------------------------------------------------------------------------------------------------

PEAK = """
import sys
from deltafin.convert import convert

def peak():
    with open("/proc/self/status", encoding="utf-8") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("VmHWM")) << 10

before = peak()
convert(sys.argv[1], sys.argv[2], experts=sys.argv[3], resident=sys.argv[4])
print(before, peak())
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize(("experts", "resident"), [("keep", "keep"), ("int8", "int8")])
def test_memory_does_not_grow_with_the_model(tmp_path, tensors, experts, resident):
    """Two of its matrices have 256 MB each, and no more than 150 MB are needed at any time."""
    vocab = 4_000_000
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(C | {"vocab_size": vocab}), encoding="utf-8")
    types, header, at = {torch.bfloat16: "BF16", torch.float32: "F32", torch.uint8: "U8"}, {}, 0
    for name, t in tensors.items():
        shape = [vocab, C["hidden_size"]] if name in ("model.embed_tokens.weight", "lm_head.weight") else list(t.shape)
        end = at + math.prod(shape) * t.itemsize
        header[name] = {"dtype": types[t.dtype], "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    with (source / "model.safetensors").open("wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        f.truncate(8 + len(text) + at)  # zeros that take no room
    command = [sys.executable, "-c", PEAK, source, tmp_path / "dest", experts, resident]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    before, peak = map(int, done.stdout.split())
    shutil.rmtree(tmp_path / "dest")
    assert at > 500e6
    assert peak - before < 150e6
    assert peak < at


# The command ----------------------------------------------------------------------------------------------------------


def command(*arguments):
    return CliRunner().invoke(main, ["convert", *map(str, arguments)])


def test_the_command_converts_says_how_far_it_is_and_what_was_lost(source, dest):
    result = command(source, dest, "--experts", "int8", "--verify")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[0].split() == ["re-encoded", "relative", "error"]
    assert result.stdout.splitlines()[1].split()[0] == "experts.gate"
    assert 0.001 < float(result.stdout.splitlines()[1].split()[1]) < 0.02
    assert "converting: " in result.stderr
    assert "verifying: " in result.stderr
    assert f"{dest} is whole" in result.stderr
    assert Store(dest).encodings == {"experts": "int8", "resident": "keep"}


def test_of_what_is_kept_the_command_has_nothing_to_report(source, dest):
    result = command(source, dest)
    assert (result.exit_code, result.stdout) == (0, "")
    assert f"{dest} is ready" in result.stderr
    assert command(dest, "--verify").exit_code == 0


def test_the_command_finds_a_damaged_store(source, dest):
    command(source, dest)
    file = dest / "experts-002.safetensors"
    damaged = bytearray(file.read_bytes())
    damaged[5000] ^= 1
    file.write_bytes(damaged)
    result = command(dest, "--verify")
    assert result.exit_code == 1
    assert "error: expert 0 in " in result.stderr
    assert "was changed since it was written\nhint: " in result.stderr
    assert command(source, dest).exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "Missing argument"),
        (("x",), "DEST is missing"),
        (("x", "--verify", "--experts", "int8"), "takes no other option"),
        (("x", "y", "--experts", "fp8"), "is not one of"),
    ],
)
def test_the_command_says_how_it_is_used(arguments, said):
    result = command(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr


def test_the_command_names_a_folder_that_is_not_there(tmp_path):
    for arguments in ((tmp_path / "x", tmp_path / "y"), (tmp_path / "x", "--verify")):
        result = command(*arguments)
        assert result.exit_code == 1
        assert result.stderr.startswith("error: ")
