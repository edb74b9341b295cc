"""Fetching a model: what is asked, what is proven, what is left when it ends early, and what comes of a rerun."""

import contextlib
import errno
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import textwrap
from collections import namedtuple
from pathlib import Path

import checkpoints
import pytest
from click.testing import CliRunner
from hub_server import NAME, NEEDED, SHARDS, HubServer

import deltafin
from deltafin import library, machine
from deltafin.cli import main
from deltafin.convert import Conversion, convert
from deltafin.errors import CheckpointError, DeltafinError, HubError, StorageError, UsageError
from deltafin.pull import pull, pull_converted

FIRST = SHARDS[0]


def tree(folder):
    """Content by name of all files below a folder, hidden ones aside."""
    found = {f.relative_to(folder).as_posix(): f for f in folder.rglob("*") if f.is_file()}
    return {name: file.read_bytes() for name, file in found.items() if not name.startswith(".")}


def needed(published):
    return {name: content for name, content in published.items() if name in NEEDED}


@pytest.fixture(params=["cache", "folder"])
def dest(request, tmp_path):
    """Where to pull to: nothing means the hub's cache."""
    return None if request.param == "cache" else tmp_path / "a folder" / "naïve 模型 🦊"


def cut_files(dest):
    return list((dest or library.cached(NAME)).rglob("*.incomplete"))


def place(dest, published, name):
    """Where the content of a file lies."""
    if dest:
        return dest / name
    (found,) = (f for f in (library.cached(NAME) / "blobs").iterdir() if f.read_bytes() == published[name])
    return found


# What arrives


def test_what_arrives_is_what_was_published_and_nothing_else(hub, published, dest):
    hub.publish(NAME, published)
    path = pull(NAME, dest)
    assert tree(path) == needed(published)
    assert {a.path.split("/")[-1].partition("?")[0] for a in hub.asked()} == NEEDED
    assert sum(a.sent for a in hub.asked()) == sum(map(len, needed(published).values()))
    assert deltafin.load(path, backend="reference").logits([1, 2]).isfinite().all()
    assert cut_files(dest) == []


def test_a_second_pull_asks_for_no_content(hub, published, dest):
    hub.publish(NAME, published)
    path = pull(NAME, dest)
    hub.log.clear()
    assert pull(NAME, dest) == path
    assert hub.asked() == []


def test_other_tools_find_what_was_pulled(hub, published, monkeypatch):
    from huggingface_hub import hf_hub_download, snapshot_download

    commit = hub.publish(NAME, published)
    path = pull(NAME)
    cache = machine.hub_folder()
    for name in NEEDED:
        found = hf_hub_download(NAME, name, cache_dir=cache, local_files_only=True)
        assert Path(found) == path / name
    assert Path(snapshot_download(NAME, revision=commit, cache_dir=cache, local_files_only=True)) == path


def test_what_other_tools_have_fetched_is_checked_and_used(hub, published, monkeypatch):
    from huggingface_hub import constants, hf_hub_download

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # read when it was imported, perhaps by another test
    hub.publish(NAME, published)
    for name in SHARDS[:2]:
        hf_hub_download(NAME, name, cache_dir=machine.hub_folder(), endpoint=hub.url)
    hub.log.clear()
    assert tree(pull(NAME)) == needed(published)
    assert {a.path.split("/")[-1].partition("?")[0] for a in hub.asked()} == NEEDED - set(SHARDS[:2])


def test_where_to_store_is_read_when_it_is_stored(hub, published, monkeypatch, tmp_path):
    hub.publish(NAME, published)
    for name, value, below in (
        ("HF_HOME", "one", "one/hub"),
        ("HUGGINGFACE_HUB_CACHE", "two", "two"),
        ("HF_HUB_CACHE", "three", "three"),
    ):
        monkeypatch.setenv(name, str(tmp_path / value))
        assert pull(NAME).is_relative_to(tmp_path / below)
    for name in ("HF_HOME", "HUGGINGFACE_HUB_CACHE", "HF_HUB_CACHE"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "four"))
    assert pull(NAME).is_relative_to(tmp_path / "four" / "huggingface" / "hub")


def test_a_commit_is_pinned_when_it_moves_meanwhile(hub, published):
    first = hub.publish(NAME, published)
    hub.faults["config.json"] = [lambda _: hub.publish(NAME, dict.fromkeys(published, b"other"))]
    path = pull(NAME)
    assert (path.name, tree(path)) == (first, needed(published))


def test_a_new_commit_costs_only_what_changed(hub, published, dest):
    hub.publish(NAME, published)
    pull(NAME, dest)
    hub.log.clear()
    changed = published | {"generation_config.json": b'{"eos_token_id": 3}', "LICENSE": b"another"}
    hub.publish(NAME, changed)
    assert tree(pull(NAME, dest)) == needed(changed)
    assert {a.path.split("/")[-1] for a in hub.asked()} == {"generation_config.json", "LICENSE"}


def test_a_revision_is_an_option_or_part_of_the_name(hub, published):
    first = hub.publish(NAME, published)
    second = hub.publish(NAME, published | {"LICENSE": b"another"}, branch="v2")
    assert pull(NAME).name == first
    assert pull(f"{NAME}@v2").name == pull(NAME, revision="v2").name == pull(NAME, revision=second).name == second
    assert deltafin.load(f"{NAME}@v2").path.name == second
    assert deltafin.load(f"{NAME}@{first[:9]}").path.name == first


def test_files_with_the_same_content_are_all_there(hub, published, dest):
    files = published | dict.fromkeys(["a.json", "b.json", "LICENSE", "NOTICE", "tiktoken.model"], b"the same" * 900)
    hub.publish(NAME, files)
    path = pull(NAME, dest)
    assert tree(path) == {n: c for n, c in files.items() if n in {*NEEDED, "a.json", "b.json", "NOTICE"}}


def test_an_empty_file_is_pulled(hub, published, dest):
    hub.publish(NAME, published | {"NOTICE": b""})
    assert tree(pull(NAME, dest)) == needed(published) | {"NOTICE": b""}


def test_a_single_file_without_an_index_is_pulled(hub, tmp_path):
    c = checkpoints.config()
    folder = checkpoints.write(tmp_path / "single", c, checkpoints.tensors(c))
    hub.publish(NAME, folder)
    assert tree(pull(NAME)) == tree(folder)


# What is proven


@pytest.mark.parametrize("change", ["cut", "longer", "other bytes"])
@pytest.mark.parametrize("name", [FIRST, "tokenizer_config.json"])
def test_a_file_that_is_damaged_here_is_mended(hub, published, dest, change, name):
    hub.publish(NAME, published)
    path = pull(NAME, dest)
    file = place(dest, published, name)
    content = published[name]
    file.write_bytes({"cut": content[:-1], "longer": content + b"x", "other bytes": b"x" * len(content)}[change])
    hub.log.clear()
    assert pull(NAME, dest) == path
    assert tree(path) == needed(published)
    assert {a.path.split("/")[-1].partition("?")[0] for a in hub.asked()} == {name}


def test_bytes_that_were_not_published_are_refused(hub, published, dest):
    hub.publish(NAME, published)
    hub.faults[FIRST] = [bytes(len(published[FIRST]))]
    wrong, right = (hashlib.sha256(b).hexdigest() for b in (bytes(len(published[FIRST])), published[FIRST]))
    with pytest.raises(HubError, match=f"{FIRST} of {NAME} has the hash {wrong}, published is {right}"):
        pull(NAME, dest)
    assert not any(FIRST in f.name for f in (dest or library.cached(NAME)).rglob("*"))
    assert tree(pull(NAME, dest)) == needed(published)


def test_a_file_that_changes_within_one_read_is_refused(hub, published, dest):
    hub.publish(NAME, published)
    hub.faults[FIRST] = [5000, bytes(len(published[FIRST]))]
    with pytest.raises(HubError, match=f"{FIRST} of {NAME} has the hash"):
        pull(NAME, dest)
    assert tree(pull(NAME, dest)) == needed(published)


def interrupted(hub, dest, after=5000):
    """Pull with a line that is lost for good after some bytes of the first shard."""
    hub.faults[FIRST] = [after, *[0] * 10]
    with pytest.raises(HubError, match="cannot be reached"):
        pull(NAME, dest)
    hub.faults.clear()
    hub.log.clear()


def test_a_rerun_asks_for_the_rest_alone(hub, published, dest):
    hub.publish(NAME, published)
    interrupted(hub, dest)
    assert [f.read_bytes() for f in cut_files(dest)][-1:] == [published[FIRST][:5000]] or len(cut_files(dest)) > 1
    assert tree(pull(NAME, dest)) == needed(published)
    size = len(published[FIRST])
    assert [(a.range, a.sent) for a in hub.asked(FIRST, "cdn")] == [(f"bytes=5000-{size - 1}", size - 5000)]


@pytest.mark.parametrize("left", [b"", b"x", b"x" * 5000, "all", "more"])
def test_what_an_earlier_run_left_is_never_trusted(hub, published, dest, left):
    hub.publish(NAME, published)
    interrupted(hub, dest)
    (cut,) = (f for f in cut_files(dest) if hashlib.sha256(published[FIRST]).hexdigest() in f.name)
    size = len(published[FIRST])
    cut.write_bytes({"all": bytes(size), "more": bytes(size + 1)}.get(left, left))
    assert tree(pull(NAME, dest)) == needed(published)
    assert cut_files(dest) == []


def test_an_unfinished_pull_is_no_model(hub, published, dest):
    hub.publish(NAME, published)
    interrupted(hub, dest)
    with pytest.raises(DeltafinError) as error:
        deltafin.load(dest or NAME)
    if dest is None:
        assert f"{NAME} is here only in part" in error.value.message
        assert error.value.hint == f"`deltafin pull {NAME}` fetches the rest"
    else:
        assert FIRST in error.value.message


@pytest.mark.parametrize("name", ["../escaped.safetensors", "/escaped.safetensors", "a\\b.safetensors"])
def test_no_file_lands_outside_of_its_folder(hub, published, dest, name):
    index = json.loads(published["model.safetensors.index.json"])
    index["weight_map"] = dict.fromkeys(index["weight_map"], name)
    hub.publish(NAME, published | {"model.safetensors.index.json": json.dumps(index).encode(), name: b"x" * 9000})
    with pytest.raises(CheckpointError, match="would lie outside"):
        pull(NAME, dest)
    assert not list((dest or machine.hub_folder()).parent.rglob("*escaped*"))


# Room and places


def test_space_is_looked_for_before_anything_is_fetched(hub, published, dest, monkeypatch):
    hub.publish(NAME, published)
    weights = sum(len(published[name]) for name in NEEDED)
    free = namedtuple("Usage", "free")(9)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with pytest.raises(StorageError, match=r"bytes are needed at .*, and 9 are free") as error:
        pull(NAME, dest)
    asked = int(error.value.message.split()[0].replace(",", ""))
    there = len(published["config.json"]) + len(published["model.safetensors.index.json"])
    assert asked == weights - there
    assert f"make room for {asked - 9:,} bytes" in (error.value.hint or "")
    assert not any(hub.asked(name) for name in SHARDS)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: namedtuple("Usage", "free")(asked))
    assert tree(pull(NAME, dest)) == needed(published)


@pytest.mark.parametrize(("code", "message"), [(errno.ENOSPC, "no space is left"), (errno.EIO, "cannot be written")])
def test_a_disk_that_fails_is_named_and_what_is_here_kept(hub, published, dest, monkeypatch, code, message):
    hub.publish(NAME, published)
    sync = os.fsync

    def fail(number):
        if os.fstat(number).st_size == len(published[FIRST]):
            raise OSError(code, os.strerror(code))
        sync(number)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StorageError, match=message):
        pull(NAME, dest)
    monkeypatch.setattr(os, "fsync", sync)
    hub.log.clear()
    assert tree(pull(NAME, dest)) == needed(published)
    assert hub.asked(FIRST) == []


def test_a_place_that_cannot_be_written_is_named(hub, published, monkeypatch, tmp_path):
    hub.publish(NAME, published)
    file = tmp_path / "file"
    file.write_bytes(b"")
    monkeypatch.setenv("HF_HUB_CACHE", str(file / "hub"))
    with pytest.raises(StorageError, match="cannot be written") as error:
        pull(NAME)
    assert "HF_HUB_CACHE" in (error.value.hint or "")
    with pytest.raises(UsageError, match="is a file"):
        pull(NAME, file)


def test_a_folder_of_something_else_is_left_alone(hub, published, tmp_path):
    hub.publish(NAME, published)
    hub.publish("org/other", published)
    folder = tmp_path / "mine"
    folder.mkdir()
    pull(NAME, folder)
    with pytest.raises(UsageError, match="holds something else than an earlier pull of org/other"):
        pull("org/other", folder)
    assert tree(folder) == needed(published)
    shutil.rmtree(folder / ".deltafin")
    with pytest.raises(UsageError, match="holds something else"):
        pull(NAME, folder)


def test_a_second_process_is_kept_out(hub, published, dest):
    hub.publish(NAME, published)
    failed = []

    def other(_):
        with pytest.raises(UsageError, match="is being pulled by another process"):
            pull(NAME, dest)
        failed.append(True)

    hub.faults["config.json"] = [other]
    pull(NAME, dest)
    assert failed


@pytest.mark.parametrize(
    "name", ["nano", "org", "a/b/c", "../x", "org/..", "org/na me", "org/name@", "/org/name", "a--b/c"]
)
def test_what_is_no_name_is_refused_before_anything_is_asked(hub, name):
    with pytest.raises(UsageError, match="is not the name of a repository"):
        pull(name)
    assert hub.log == []


# Progress


def test_progress_adds_up(hub, published, dest):
    hub.publish(NAME, published)
    interrupted(hub, dest)
    seen = []
    pull(NAME, dest, progress=lambda *row: seen.append(row))
    last = {name: (done, size) for name, done, size in seen}
    assert last == {name: (len(published[name]),) * 2 for name in NEEDED} | {
        "": (sum(map(len, needed(published).values())),) * 2
    }
    assert all(0 <= done <= size for _, done, size in seen)


# A store, shard by shard


@pytest.fixture(scope="session")
def converted(published, tmp_path_factory):
    """The store that ``convert`` makes of the same files."""
    folder = tmp_path_factory.mktemp("snapshot")
    for name, content in needed(published).items():
        (folder / name).write_bytes(content)
    convert(folder, folder.parent / "store")
    return tree(folder.parent / "store")


def bodies(hub, published):
    """The ranges of the requests for shards beyond their headers."""
    asked = [(a.range, len(published[name])) for name in SHARDS for a in hub.asked(name, "cdn")]
    return [range for range, size in asked if range is None or range.endswith(f"-{size - 1}")]


@pytest.fixture
def short_fronts(monkeypatch):
    """Headers are asked for in two pieces, and no more than headers."""
    monkeypatch.setattr("deltafin.hub.FRONT", 1000)


def without_source(files):
    """A store's files, with model.json less what tells where it came from."""
    about = json.loads(files["model.json"])
    return files | {"model.json": {key: about[key] for key in about.keys() - {"source", "checksum"}}}


def test_a_store_comes_of_it_as_of_the_snapshot(hub, published, converted, short_fronts):
    commit = hub.publish(NAME, published)
    path, errors = pull_converted(NAME)
    assert errors == {}
    assert bodies(hub, published) == [None] * 3
    assert without_source(tree(path)) == without_source(converted)
    assert json.loads((path / "model.json").read_bytes())["source"] == {"repository": NAME, "revision": commit}
    assert list(library.stores_folder().iterdir()) == [path]
    model = deltafin.load(NAME, backend="reference")
    assert (model.path, model.name) == (path, NAME)


def test_the_disk_never_holds_more_than_the_store_and_two_shards(hub, published, tmp_path, converted, monkeypatch):
    hub.publish(NAME, published)
    place, seen, shards, take = tmp_path / "place", [], set(), Conversion.take

    def look(*_):
        total = 0
        for file in place.rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # gone meanwhile
                total += file.stat().st_size * file.is_file()
                shards.update({file.name}.intersection(SHARDS))
        seen.append(total)

    def watched(*arguments):
        look()
        take(*arguments)
        look()

    monkeypatch.setattr(Conversion, "take", watched)
    for name in SHARDS:  # seen, too, when half of a shard is there, and more is to come
        hub.faults[name] = [None, len(published[name]) // 2, look]
    pull_converted(NAME, place / "store", progress=look)
    sizes = [len(published[name]) for name in SHARDS]
    beside = sum(len(published[name]) for name in NEEDED - {*SHARDS, "model.safetensors.index.json"})
    store = sum(map(len, converted.values()))
    assert shards == set(SHARDS)
    assert store + min(sizes) < max(seen) <= store + sum(sorted(sizes)[-2:]) + beside + 4096  # a journal, marks
    assert len(seen) > 20


def test_options_of_a_conversion_are_those_of_convert(hub, published):
    hub.publish(NAME, published)
    path, errors = pull_converted(NAME, experts="int8")
    assert {kind.partition(".")[0] for kind in errors} == {"experts"}
    assert json.loads((path / "model.json").read_bytes())["encodings"] == {"experts": "int8", "resident": "keep"}
    hub.log.clear()
    assert pull_converted(NAME, experts="int8") == (path, {})
    assert hub.asked() == []
    with pytest.raises(UsageError, match="is of another model or commit, or was made with other options"):
        pull_converted(NAME)


def test_a_rerun_converts_the_rest_alone(hub, published, converted, short_fronts):
    hub.publish(NAME, published)
    hub.faults[SHARDS[2]] = [None, None, 3000, *[0] * 10]  # after the header the line is lost
    with pytest.raises(HubError, match="cannot be reached"):
        pull_converted(NAME)
    with pytest.raises(UsageError, match="the store of org/name is not finished") as error:
        deltafin.load(NAME)
    assert error.value.hint == f"`deltafin pull --convert {NAME}` fetches the rest"
    hub.publish(NAME, dict.fromkeys(published, b"the branch has moved on"))
    hub.faults.clear()
    hub.log.clear()
    path, _ = pull_converted(NAME)
    assert without_source(tree(path)) == without_source(converted)
    assert bodies(hub, published) == [f"bytes=3000-{len(published[SHARDS[2]]) - 1}"]


def test_shards_in_the_cache_are_used_and_stay(hub, published, converted, short_fronts):
    hub.publish(NAME, published)
    snapshot = pull(NAME)
    hub.log.clear()
    path, _ = pull_converted(NAME)
    assert without_source(tree(path)) == without_source(converted)
    assert bodies(hub, published) == []
    assert tree(snapshot) == needed(published)
    assert deltafin.load(NAME, backend="reference").path == path


def test_space_for_a_store_is_looked_for_first(hub, published, monkeypatch, converted):
    hub.publish(NAME, published)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: namedtuple("Usage", "free")(9))
    with pytest.raises(StorageError, match=r"bytes are needed at .*, and 9 are free") as error:
        pull_converted(NAME)
    needed = int(error.value.message.split()[0].replace(",", ""))
    two = sum(sorted(len(published[name]) for name in SHARDS)[-2:])
    store = sum(len(c) for name, c in converted.items() if name.endswith(".safetensors"))
    assert store + two - 4096 <= needed <= store + two


# Killed


KILLED = """
    import itertools, json, os, shutil, signal, sys
    from pathlib import Path
    from deltafin import hub, pull

    hub.WAITS = (0, 0, 0)
    kind, root, moments = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    steps = itertools.count()

    def child(moment):
        def step(*_):
            if next(steps) == moment:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(lambda event, _: step() if event.startswith(("open", "os.", "socket.", "shutil.")) else None)
        if kind == "convert":
            pull.pull_converted("org/name", root / "dest", progress=step)
        else:
            pull.pull("org/name", root / "dest" if kind == "folder" else None, progress=step)
        (root / "steps").write_text(str(next(steps)))

    def run(moment):
        if not (pid := os.fork()):
            code = 1
            try:
                child(moment)
                code = 0
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    for moment in moments or [-1]:
        code = run(moment)
        print(json.dumps([moment, code, sorted(str(f) for f in root.rglob("*") if f.is_file())]), flush=True)
        sys.stdin.readline()
"""


def killed(kind, root, moments, look):
    """Run a pull in a process that is killed at each of some moments; ``look`` is called after each."""
    command = [sys.executable, "-c", textwrap.dedent(KILLED), kind, str(root), json.dumps(moments)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8", bufsize=1
    ) as process:
        assert process.stdin
        assert process.stdout
        for line in process.stdout:
            look(*json.loads(line))
            process.stdin.write("\n")
            process.stdin.flush()
    assert process.returncode == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a process is forked for each moment")
@pytest.mark.parametrize("kind", ["cache", "folder", "convert"])
@pytest.mark.parametrize("count", [6, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_at_any_moment_a_rerun_ends_in_the_same_bytes(
    hub, published, converted, tmp_path, monkeypatch, kind, count
):
    hub.publish(NAME, published)
    root = tmp_path / "root"
    root.mkdir()
    monkeypatch.setenv("HF_HUB_CACHE", str(root / "hub"))
    contents = {hashlib.sha256(content).hexdigest() for content in published.values()}
    right = without_source(converted) if kind == "convert" else needed(published)
    states, codes = set(), []

    def finished():
        if kind == "cache":
            return tree(next((library.cached(NAME) / "snapshots").iterdir()))
        return without_source(tree(root / "dest")) if kind == "convert" else tree(root / "dest")

    def first(moment, code, files):
        assert (moment, code, finished()) == (-1, 0, right)

    killed(kind, root, [], first)
    steps = int((root / "steps").read_text(encoding="utf-8"))
    shutil.rmtree(root)

    def look(moment, code, files):
        codes.append(code)
        names = [Path(file).name for file in files]
        states.add((tuple(sorted(names)), sum(os.path.getsize(f) for f in files if os.path.exists(f))))
        if kind != "convert":  # whatever bears its name is whole
            for file in (
                Path(f) for f in files if not f.endswith((".incomplete", ".new", "lock", ".json", "main", "steps"))
            ):
                assert hashlib.sha256(file.read_bytes()).hexdigest() in contents, file
        elif (root / "dest").exists():
            assert finished() == right
        hub.faults.clear()
        if kind == "convert":
            pull_converted(NAME, root / "dest")
            assert not [f for f in root.iterdir() if f.name not in ("dest", "steps", "hub")]
        else:
            pull(NAME, root / "dest" if kind == "folder" else None)
        assert finished() == right
        assert cut_files(root) == []
        for f in root.iterdir():
            shutil.rmtree(f) if f.is_dir() else f.unlink()

    root.mkdir()
    generator = random.Random(5)
    killed(kind, root, sorted(generator.choices(range(steps), k=count)), look)
    assert len(codes) == count
    assert codes.count(-9) > count * 0.8  # threads: a run has not always the same number of steps
    assert len(states) > count / 3


# The command


def test_the_command_prints_the_folder_and_a_line_for_each_file(hub, published):
    hub.publish(NAME, published)
    result = CliRunner().invoke(main, ["pull", NAME])
    assert result.exit_code == 0, result.output
    path = Path(result.stdout.strip())
    assert tree(path) == needed(published)
    lines = result.stderr.splitlines()
    assert {line.split("  ")[0] for line in lines[:-1]} == NEEDED
    assert lines[-1].startswith(f"in all  {len(NEEDED)} files, ")
    assert "config.json  " in result.stderr


def test_the_command_makes_a_store_and_says_what_rounding_costs(hub, published, tmp_path):
    hub.publish(NAME, published)
    result = CliRunner().invoke(main, ["pull", NAME, str(tmp_path / "s"), "--convert", "--resident", "int8"])
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{tmp_path / 's'}\n"
    assert "relative error" in result.stderr
    result = CliRunner().invoke(main, ["pull", NAME, "--experts", "int8"])
    assert (result.exit_code, "belong to --convert" in result.stderr) == (2, True)


def test_the_command_says_what_is_wrong(hub):
    result = CliRunner().invoke(main, ["pull", "org/gone"])
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: there is no repository org/gone on {hub.url}, or it is private\nhint: ")
    assert isinstance(hub, HubServer)


def test_the_command_works_where_the_system_speaks_ascii(hub, published, tmp_path):
    hub.publish(NAME, published)
    folder = tmp_path / "naïve 模型"
    code = "from deltafin.cli import main; main()"
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", code, "pull", NAME, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert tree(folder) == needed(published)
