"""What is on this machine: found by name, listed, removed; nothing is asked online."""

import hashlib
import json
import os
import shutil
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner
from hub_server import NAME, NEEDED, SHARDS

import deltafin
from deltafin import library, machine
from deltafin.cli import main
from deltafin.convert import convert
from deltafin.errors import DeltafinError, UsageError

ONE, TWO = "1" * 40, "2" * 40


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    """Places of this test's own, and no network."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def refuse(*_):
        raise AssertionError("something was asked online")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def cached(files, name=NAME, commit=ONE, refs=("main",)):
    """Put files into the hub's cache as its own tools do; return the snapshot's folder."""
    root = library.cached(name)
    folder = root / "snapshots" / commit
    for part in ("blobs", "refs"):
        (root / part).mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        blob = root / "blobs" / hashlib.sha256(content).hexdigest()
        blob.write_bytes(content)
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).symlink_to(os.path.relpath(blob, (folder / file).parent))
    for ref in refs:
        (root / "refs" / ref).write_text(commit, encoding="utf-8")
    return folder


@pytest.fixture
def files(published):
    return {name: content for name, content in published.items() if name in NEEDED}


@pytest.fixture
def stored(files, tmp_path):
    """A store where pull --convert makes one."""
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for name, content in files.items():
        (snapshot / name).write_bytes(content)
    library.store(NAME).parent.mkdir(parents=True)
    convert(snapshot, library.store(NAME))
    return library.store(NAME)


def loaded(name):
    model = deltafin.load(name, backend="reference")
    return model.path, model.name


# Found by name


def test_a_snapshot_is_found_by_name(files):
    path = cached(files)
    assert loaded(NAME) == (path, NAME)
    assert deltafin.load(NAME, backend="reference").info()["name"] == NAME


def test_a_snapshot_without_refs_is_found(files):
    path = cached(files, refs=())
    assert loaded(NAME) == loaded(f"{NAME}@{ONE[:7]}") == (path, NAME)


def test_the_main_branch_comes_before_a_newer_snapshot(files):
    path = cached(files)
    other = cached(files | {"LICENSE": b"new"}, commit=TWO, refs=("v2",))
    os.utime(other, (2e9, 2e9))
    assert library.find(NAME) == path
    assert library.find(f"{NAME}@v2") == library.find(f"{NAME}@222") == other


def test_without_a_branch_the_newest_complete_snapshot_is_meant(files):
    paths = [cached(files | {"LICENSE": c.encode()}, commit=c * 40, refs=()) for c in "345"]
    for path, when in zip(paths, (2e9, 3e9, 4e9), strict=True):
        os.utime(path, (when, when))
    (paths[2] / SHARDS[0]).unlink()
    assert library.find(NAME) == paths[1]


def test_a_branch_that_names_a_missing_snapshot_does_not_hide_another(files):
    path = cached(files)
    (library.cached(NAME) / "refs" / "main").write_text(TWO, encoding="utf-8")
    assert library.find(NAME) == path


def test_a_store_comes_before_a_snapshot(files, stored):
    snapshot = cached(files)
    assert loaded(NAME) == (stored, NAME)
    assert library.find(f"{NAME}@{ONE}") == snapshot


def test_a_folder_of_that_name_comes_before_both(files, stored, monkeypatch, tmp_path):
    folder = tmp_path / "here" / NAME
    shutil.copytree(tmp_path / "snapshot", folder)
    monkeypatch.chdir(tmp_path / "here")
    assert deltafin.load(NAME, backend="reference").path == Path(NAME)


@pytest.mark.parametrize("name", [NAME, f"{NAME}@v2"])
def test_what_was_not_pulled_is_an_error_with_the_command(name):
    with pytest.raises(UsageError, match=f"{name} is not on this machine") as error:
        deltafin.load(name)
    assert error.value.hint == f"`deltafin pull {name}` fetches it"


def test_a_part_is_an_error_with_the_command(files):
    path = cached(files)
    (path / SHARDS[1]).resolve().unlink()  # a link that leads nowhere
    with pytest.raises(UsageError, match="is here only in part") as error:
        deltafin.load(NAME)
    assert error.value.hint == f"`deltafin pull {NAME}` fetches the rest"


def test_a_model_of_another_kind_is_named_as_such():
    cached({"config.json": b'{"model_type": "bert"}', "model.safetensors": b"x"})
    with pytest.raises(DeltafinError, match="model_type 'bert'"):
        deltafin.load(NAME)


@pytest.mark.parametrize("name", ["nothing", "a/b/c", "./org/name", "~/nothing", "org/../name", ""])
def test_what_is_no_name_is_looked_for_as_a_folder(name):
    with pytest.raises(DeltafinError, match=r"there is no model folder|has no config\.json"):
        deltafin.load(name)


def test_a_vocabulary_without_tokenizer_json_is_enough():
    cached({file.name: file.read_bytes() for file in library.EMBEDDED.iterdir() if file.is_file()}, "org/nano")
    model = deltafin.load("org/nano", backend="reference")
    assert not (model.path / "tokenizer.json").exists()
    assert model.tokenizer.decode(model.tokenizer.encode("hello")) == "hello"
    (model.path / "tiktoken.model").unlink()
    with pytest.raises(DeltafinError, match=r"no tiktoken\.model"):
        _ = deltafin.load("org/nano", backend="reference").tokenizer


# Listed


def run(*command, text=""):
    result = CliRunner().invoke(main, command, input=text)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_models_are_listed_with_what_they_take(files, stored):
    path = cached(files)
    cached({"config.json": b'{"model_type": "bert"}'}, "org/bert")
    cached(files, "org/part", TWO)
    (library.cached("org/part") / "snapshots" / TWO / SHARDS[0]).unlink()
    (library.cached("org/part") / "blobs" / "abc.incomplete").write_bytes(bytes(999))
    (machine.hub_folder() / "datasets--org--texts" / "snapshots" / ONE).mkdir(parents=True)
    (machine.hub_folder() / "something else").mkdir()
    rows = json.loads(run("list", "--json").stdout)
    size = sum(map(len, files.values()))
    store = sum(file.stat().st_size for file in stored.iterdir())
    part = library.cached("org/part") / "snapshots" / TWO
    want = [
        (NAME, ONE, size, "snapshot", path),
        (NAME, None, store, "store", stored),
        ("org/part", TWO, size - len(files[SHARDS[0]]) + 999, "part", part),
    ]
    assert rows == [{"name": n, "revision": r, "bytes": b, "kind": k, "path": str(p)} for n, r, b, k, p in want]
    text = run("list").stdout.splitlines()
    assert text[0].split() == ["name", "revision", "size", "kind", "path"]
    assert [line.split()[0] for line in text[1:]] == [NAME, NAME, "org/part"]
    assert str(stored) in text[2]


def test_nothing_is_listed_where_nothing_is():
    assert json.loads(run("list", "--json").stdout) == []
    result = run("list")
    assert (result.stdout, "deltafin pull org/name" in result.stderr) == ("", True)


def test_an_unfinished_store_is_listed_and_removed(stored):
    partial = stored.with_name(f"{stored.name}.partial")
    stored.rename(partial)
    with pytest.raises(UsageError, match="is not finished"):
        library.find(NAME)
    assert [row["kind"] for row in json.loads(run("list", "--json").stdout)] == ["part"]
    assert run("remove", NAME, "--yes").exit_code == 0
    assert not partial.exists()


# Removed


def test_a_model_is_removed_after_a_yes(files):
    path = cached(files)
    assert run("remove", NAME, text="n\n").exit_code == 1
    assert path.exists()
    result = run("remove", NAME, text="y\n")
    assert (result.exit_code, result.stdout) == (0, "")
    assert str(path) in result.stderr
    assert not library.cached(NAME).exists()
    assert json.loads(run("list", "--json").stdout) == []


def test_one_revision_is_removed_and_what_another_shares_stays(files):
    cached(files)
    other = cached(files | {"LICENSE": b"new"}, commit=TWO, refs=("v2",))
    assert run("remove", f"{NAME}@{ONE[:8]}", "--yes").exit_code == 0
    assert library.find(NAME) == other
    assert loaded(NAME) == (other, NAME)
    assert len(list((library.cached(NAME) / "blobs").iterdir())) == len(files)


def test_store_and_snapshot_are_removed_one_by_one_by_path(files, stored):
    path = cached(files)
    assert run("remove", str(stored), "--yes").exit_code == 0
    assert library.find(NAME) == path
    assert not stored.exists()
    assert run("remove", str(path), "--yes").exit_code == 0
    assert json.loads(run("list", "--json").stdout) == []


def test_removing_frees_what_an_interrupted_pull_left(files):
    cached(files)
    part = cached(files, commit=TWO, refs=())
    (part / SHARDS[0]).unlink()
    left = library.cached(NAME) / "blobs" / "abc.incomplete"
    left.write_bytes(bytes(99))
    assert run("remove", f"{NAME}@{TWO}", "--yes").exit_code == 0
    assert not left.exists()
    assert library.find(NAME).name == ONE


@pytest.mark.parametrize("name", ["org/bert", "org/none", "..", ".", "/", "~", "models--org--bert", ""])
def test_nothing_that_is_not_listed_is_ever_removed(files, stored, name):
    cached(files)
    bert = cached({"config.json": b'{"model_type": "bert"}'}, "org/bert")
    before = sorted(machine.hub_folder().rglob("*")) + sorted(stored.rglob("*"))
    result = run("remove", name, "--yes")
    assert result.exit_code == 1
    assert "is not among the models that were pulled" in result.stderr
    assert sorted(machine.hub_folder().rglob("*")) + sorted(stored.rglob("*")) == before
    assert bert.exists()


def test_what_changed_since_it_was_listed_is_not_removed(files, tmp_path):
    cached(files)
    (model,) = library.stored()
    moved = library.Stored(model.name, model.revision, model.size, model.kind, tmp_path)
    with pytest.raises(DeltafinError, match="is not a model that was pulled"):
        library.remove([moved])
    assert tmp_path.exists()


def test_a_store_that_is_a_link_is_removed_as_a_link(stored, tmp_path):
    elsewhere = tmp_path / "another disk"
    stored.rename(elsewhere)
    stored.symlink_to(elsewhere)
    assert deltafin.load(NAME, backend="reference").name == NAME
    assert run("remove", NAME, "--yes").exit_code == 0
    assert not stored.is_symlink()
    assert (elsewhere / "model.json").exists()


def test_what_cannot_be_removed_is_said(files, stored, monkeypatch):
    def refuse(path, *_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    result = run("remove", NAME, "--yes")
    assert (result.exit_code, "cannot be removed (Permission denied)" in result.stderr) == (1, True)
    shutil.copytree(stored, stored.with_name("kept"))
    monkeypatch.undo()
