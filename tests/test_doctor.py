"""What is found out about a machine: limits of memory from numbers that are made up, a disk past the cache, doctor."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from click.testing import CliRunner
from conftest import DATA

from deltafin import bench, demand, direct, doctor, machine, measure, placement
from deltafin.cli import main
from deltafin.cli.plan import line
from deltafin.direct import DirectFiles
from deltafin.doctor import Check, checks
from deltafin.errors import UsageError
from deltafin.snapshot import Snapshot

GB = 10**9

# Memory


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A machine with 64 GB, of which 40 are free, and files of limits by path below the root."""

    def build(files, free=40 * GB):
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * GB, available=free))
        for name, content in files.items():
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(str(content), encoding="utf-8")
        return machine.memory(tmp_path)

    return build


def group(folder, limit, current, stat):
    """Files of a second version's group."""
    return {f"{folder}/memory.max": limit, f"{folder}/memory.current": current, f"{folder}/memory.stat": stat}


STAT = f"anon 1\ninactive_file {2 * GB}\nactive_file {GB}\nslab 3"


def test_without_limits_the_memory_is_the_machines(fake):
    assert fake({}) == machine.Memory(64 * GB, 40 * GB, "the machine")
    files = {"proc/self/cgroup": "0::/user/me\n", **group("sys/fs/cgroup/user/me", "max\n", 5, "")}
    assert fake(files) == machine.Memory(64 * GB, 40 * GB, "the machine")


def test_cached_files_in_a_container_are_free(fake):
    files = {"proc/self/cgroup": "0::/\n", **group("sys/fs/cgroup", 16 * GB, 9 * GB, STAT)}
    assert fake(files) == machine.Memory(16 * GB, 10 * GB, "cgroup /")


def test_the_limit_of_a_parent_holds(fake):
    files = {
        "proc/self/cgroup": "0::/a/b\n",
        **group("sys/fs/cgroup/a/b", 32 * GB, 2 * GB, ""),
        **group("sys/fs/cgroup/a", 8 * GB, 7 * GB, ""),
    }
    assert fake(files) == machine.Memory(8 * GB, GB, "cgroup /a")


def test_a_container_sees_its_own_group_as_the_root(fake):
    files = {"proc/self/cgroup": "0::/not/here\n", **group("sys/fs/cgroup", 4 * GB, GB, "")}
    assert fake(files) == machine.Memory(4 * GB, 3 * GB, "cgroup /")


def test_the_first_version_of_groups(fake):
    folder = "sys/fs/cgroup/memory/docker/x"
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/docker/x\n4:hugetlb,memory:/docker/x\n0::/\n",
        f"{folder}/memory.limit_in_bytes": 6 * GB,
        f"{folder}/memory.usage_in_bytes": 5 * GB,
        f"{folder}/memory.stat": f"cache 9\ninactive_file 1\ntotal_inactive_file {2 * GB}\ntotal_active_file {GB}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": 9223372036854771712,
        "sys/fs/cgroup/memory/memory.usage_in_bytes": 7 * GB,
        "sys/fs/cgroup/memory/memory.stat": "",
    }
    assert fake(files) == machine.Memory(6 * GB, 4 * GB, "cgroup /docker/x")


def test_a_full_container_has_nothing_left(fake):
    files = {"proc/self/cgroup": "0::/\n", **group("sys/fs/cgroup", GB, 2 * GB, "")}
    assert fake(files).available == 0


def test_what_others_use_is_not_planned_with(fake, known, monkeypatch, tmp_path):
    """A limit of 3 GB with 2 GB in use: what is planned stays below it, and tests that would not fit are smaller."""
    files = {"proc/self/cgroup": "0::/\n", **group("sys/fs/cgroup", 3 * GB, 2 * GB, "")}
    memory = fake(files)
    monkeypatch.setattr(machine, "memory", lambda: memory)
    have = measure.measured(tmp_path, 1).machine
    assert have.ram <= GB
    need = demand.of_files(Snapshot(DATA / "kimi-k3-tiny"))
    assert placement.plan(need, have, 1000).total(placement.RAM) <= GB
    with pytest.raises(UsageError, match="more memory"):
        placement.plan(need, have, 10_000_000)
    assert bench.room() <= GB // 4


def test_memory_is_measured_over_more_than_a_cache_holds(tmp_path):
    assert machine.cache_bytes(tmp_path) == 0
    for i, size in enumerate(("48K", "2048K", "307200K", "unknown")):
        folder = tmp_path / f"sys/devices/system/cpu/cpu0/cache/index{i}"
        folder.mkdir(parents=True)
        (folder / "size").write_text(f"{size}\n", encoding="utf-8")
    assert machine.cache_bytes(tmp_path) == 300 << 20
    assert max(256 << 20, 4 * machine.cache_bytes()) == measure.ARENA


# The disk


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(measure, "FILE", 1 << 21)
    monkeypatch.setattr(measure, "DISK_SECONDS", 0.0)


@pytest.fixture
def opened(monkeypatch):
    """Every file that is opened, with its flags."""
    seen, real = [], os.open

    def spy(path, flags, *more, **named):
        seen.append((Path(path).name, flags))
        return real(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", spy)
    return seen


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system has no direct reads")
def test_a_disk_is_read_past_the_page_cache(small, opened, tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(3 << 20))
    (tmp_path / "other.safetensors").write_bytes(bytes(1 << 20))
    found = measure.disk(tmp_path, 1 << 20, 0.0)
    assert found.gbs > 0
    assert found.piece == 1 << 20
    reads = [flags for name, flags in opened if name == file.name]
    assert found.direct == DirectFiles([file]).direct
    if found.direct:
        assert len(reads) > measure.READERS
        assert all(flags & os.O_DIRECT for flags in reads)


def test_where_direct_reads_are_refused_that_is_said(small, opened, tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").write_bytes(bytes(3 << 20))
    monkeypatch.setattr(direct, "DIRECT", 0)
    monkeypatch.setattr(sys, "platform", "linux")
    dropped = []
    if hasattr(os, "posix_fadvise"):
        monkeypatch.setattr(os, "posix_fadvise", lambda f, at, count, advice: dropped.append((at, count, advice)))
    assert not measure.disk(tmp_path, 1 << 18, 0.0).direct
    if hasattr(os, "posix_fadvise"):
        assert len(dropped) >= measure.READERS
        assert {(count, advice) for _, count, advice in dropped} == {(1 << 18, os.POSIX_FADV_DONTNEED)}
        assert all(0 <= at <= (3 << 20) - (1 << 18) for at, _, _ in dropped)


def test_without_a_large_file_one_is_written_and_removed(small, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    assert measure.disk(tmp_path, 1 << 18, 0.0).piece == 1 << 18
    assert [f.name for f in tmp_path.iterdir()] == ["model.safetensors"]


def test_where_none_can_be_written_a_small_file_is_read(small, tmp_path, monkeypatch):
    def refused(*arguments, **options):
        raise OSError("read-only")

    monkeypatch.setattr(measure.tempfile, "NamedTemporaryFile", refused)
    with pytest.raises(UsageError, match=r"cannot be measured \(read-only\)"):
        measure.disk(tmp_path, 1 << 18, 0.0)
    (tmp_path / "model.safetensors").write_bytes(bytes(100_000))
    assert 0 < measure.disk(tmp_path, 1 << 18, 0.0).piece < 100_000


# What is kept


@pytest.fixture
def known(tmp_path, monkeypatch):
    """Measurements that take no time, in a cache of its own; how often each was made."""
    made = []
    monkeypatch.setattr(machine, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(measure, "bandwidth", lambda threads: made.append("memory") or (20.0, 30.0))
    monkeypatch.setattr(measure, "products", lambda *arguments: 100.0)
    monkeypatch.setattr(measure, "gpu", lambda: None)

    def disk(path, piece):
        made.append(piece)
        return measure.Disk(2.0, piece, True, "2025-01-31")

    monkeypatch.setattr(measure, "disk", disk)
    return made


def test_measurements_are_kept(known, tmp_path):
    told = []
    first = measure.measured(tmp_path, 1 << 20, progress=told.append)
    assert (first.machine.ram_gbs, first.machine.disk_gbs, first.machine.cpu_gflops) == (20.0, 2.0, 100.0)
    assert any("2025-01-31" in note for note in first.notes)
    assert len(told) == 2
    measure.measured(tmp_path, (1 << 20) - 5)
    assert known == ["memory", 1 << 20]
    measure.measured(tmp_path, 1)  # smaller pieces are another speed
    assert known == ["memory", 1 << 20, measure.PIECES[0]]
    measure.measured(tmp_path, 1, again=True)
    assert known[3:] == ["memory", measure.PIECES[0]]
    assert measure.disk_of(tmp_path / "not" / "there", 1 << 40).piece == measure.PIECES[1]


def test_another_number_of_threads_is_measured_anew(known, tmp_path, monkeypatch):
    measure.measured(tmp_path, 1)
    monkeypatch.setattr(machine, "threads", lambda: 77)
    measure.measured(tmp_path, 1)
    assert known.count("memory") == 2


@pytest.mark.parametrize("content", ["", "[]", "{", '{"format": 2}', "null"])
def test_a_file_that_is_not_ours_is_measured_over(known, tmp_path, content):
    measure.kept().write_text(content, encoding="utf-8")
    measure.measured(tmp_path, 1)
    measure.measured(tmp_path, 1)
    assert known == ["memory", measure.PIECES[0]]


def test_without_a_cache_everything_is_measured_each_time(known, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "cache_folder", lambda: None)
    for _ in range(2):
        measure.measured(tmp_path, 1)
    assert known == ["memory", measure.PIECES[0]] * 2


def test_a_gpu_is_part_of_the_machine(known, tmp_path, monkeypatch):
    device = {"gpu": 9 * GB, "gpu_gbs": 900.0, "gpu_gflops": 1e5, "link_gbs": 25.0, "integrated": False, "name": "Toy"}
    monkeypatch.setattr(measure, "gpu", lambda: device)
    for _ in range(2):
        found = measure.measured(tmp_path, 1)
        assert (found.machine.gpu, found.machine.link_gbs) == (9 * GB, 25.0)
        assert any(note.startswith("Toy: 9.0 GB free") for note in found.notes)


# Doctor


@pytest.fixture
def measured(monkeypatch):
    """A fast disk that need not be measured."""
    monkeypatch.setattr(measure, "disk_of", lambda *arguments: measure.Disk(2.0, 1 << 20, True, "2025-01-31"))


def invoke(*arguments, **options):
    return CliRunner(**options).invoke(main, ["doctor", *map(str, arguments)])


def statuses(**options):
    return {check.name: check for check in checks(**options)}


def test_a_sound_machine_has_no_error(measured):
    result = invoke("nano")
    assert result.exit_code == 0, result.output
    rows = [text.split()[:2] for text in result.stdout.splitlines()]
    assert {status for status, _ in rows} <= {"ok", "warning"}
    names = ["python", "deltafin", "torch", "numba", "triton", "cpu", "threads", "memory", "gpu", "caches", "kernels"]
    assert [name for name in dict.fromkeys(name for _, name in rows)] == [*names, "disk", "hub", "model"]
    assert "nano: kimi_k3" in result.stdout


def test_json_has_the_same(measured):
    result = invoke("--json")
    found = json.loads(result.stdout)
    assert all(list(check) == ["name", "status", "text", "hint"] for check in found)
    assert "model" not in {check["name"] for check in found}


def test_a_damaged_model_is_an_error(measured, tmp_path):
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    result = invoke(tmp_path)
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1].startswith("error    model")
    assert invoke(tmp_path / "missing").exit_code == 1


def test_a_token_is_never_shown(measured, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example")
    text = invoke("--json").stdout
    assert "hf_secret" not in text
    hub = statuses()["hub"].text
    assert "a token is set" in hub
    assert "offline" in hub
    assert "https://mirror.example" in hub


def test_little_memory_and_a_slow_disk_are_warned_of(monkeypatch):
    monkeypatch.setattr(machine, "memory", lambda: machine.Memory(8 * GB, GB, "cgroup /x"))
    monkeypatch.setattr(measure, "disk_of", lambda *a: measure.Disk(0.1, 1 << 20, True, "2025-01-31"))
    found = statuses()
    assert found["memory"].status == found["disk"].status == "warning"
    assert found["memory"].hint
    assert "cgroup /x" in found["memory"].text
    monkeypatch.setattr(measure, "disk_of", lambda *a: measure.Disk(9.0, 1 << 20, False, "2025-01-31"))
    assert "page cache" in statuses()["disk"].hint


def test_a_model_larger_than_memory_is_warned_of(measured, monkeypatch):
    monkeypatch.setattr(machine, "memory", lambda: machine.Memory(8 * GB, 10**8, "the machine"))
    assert statuses(model=DATA / "kimi-linear")["model"].status == "warning"


def test_threads_say_why(measured, monkeypatch):
    monkeypatch.setattr(machine, "cores", lambda: [0, 2, 4])
    monkeypatch.setattr(machine, "quota", lambda: 1.5)
    text = statuses()["threads"].text
    assert text.startswith("1 (3 cores of ")
    assert "0, 2, 4" in text
    assert "1.5 CPUs" in text


def test_kernels_that_are_not_compiled_and_those_of_other_versions(measured, monkeypatch, tmp_path):
    from deltafin.cpu_kernels import compiling

    folder = tmp_path / "kernels-new"
    for name in ("kernels-new", "kernels-old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_bytes(bytes(3_000_000))
    monkeypatch.setattr(compiling, "FOLDER", folder)
    ours = [check for check in checks() if check.name == "kernels"]
    assert [check.status for check in ours] == ["warning", "ok"]
    assert "3.0 MB" in ours[0].text
    assert "kernels-old" in ours[1].text
    compiling.marker().touch()
    assert statuses()["kernels"].status == "ok"
    monkeypatch.setattr(compiling, "FOLDER", None)
    assert statuses()["kernels"].status == "warning"


def test_form_of_the_kernels_is_held_against_what_this_cpu_could_do(measured, monkeypatch):
    from deltafin import ops
    from deltafin.cpu_kernels import vector

    assert vector.FORM in doctor.FEATURES
    monkeypatch.setattr(ops, "load", lambda name: SimpleNamespace(form="SSSE3"))
    assert statuses()["cpu"].text.endswith("lacks what AVX-512 VNNI (needs avx512bw and avx512vnni), AVX2 (needs avx2)")
    monkeypatch.setattr(ops, "load", lambda name: SimpleNamespace(form="portable"))
    assert statuses()["cpu"].status == "warning"


def test_a_cache_that_cannot_be_written_to(measured, monkeypatch, tmp_path):
    blocked, spare = tmp_path / "file", tmp_path / "spare"
    blocked.write_text("", encoding="utf-8")
    monkeypatch.setattr(machine, "cache_homes", lambda: iter([blocked / "deltafin", spare]))
    assert machine.cache_folder() == spare
    assert statuses()["caches"].status == "warning"
    monkeypatch.setattr(machine, "cache_homes", lambda: iter([blocked / "deltafin"]))
    assert machine.cache_folder() is None
    assert statuses()["caches"].status == "error"
    assert statuses()["disk"].status == "ok"


def test_the_cache_is_where_the_kernels_are():
    from deltafin.cpu_kernels import compiling

    if not os.environ.get("NUMBA_CACHE_DIR"):
        assert compiling.FOLDER.parent == machine.cache_folder()


BROKEN = """
import sys
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            raise {error}
sys.meta_path.insert(0, Broken())
from deltafin import measure
measure.disk_of = lambda *a: measure.Disk(2.0, 1 << 20, True, "2025-01-31")
from deltafin.cli import main
main(["doctor", "--json"])
"""


@pytest.mark.parametrize("name", ["torch", "numba"])
@pytest.mark.parametrize("error", ["ImportError('not there')", "OSError('libcudart.so.12: cannot open')"])
def test_what_is_broken_is_said_and_the_rest_goes_on(name, error):
    done = subprocess.run(
        [sys.executable, "-c", BROKEN.format(name=name, error=error)], capture_output=True, text=True, encoding="utf-8"
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    found = {check["name"]: check for check in json.loads(done.stdout)}
    assert found[name]["status"] == "error"
    assert "pip install" in found[name]["hint"]
    for other in ("python", "threads", "memory", "caches", "disk", "hub"):
        assert found[other]["status"] in ("ok", "warning"), found[other]


@pytest.mark.parametrize("width", [20, 60, 200])
def test_lines_fit_a_terminal(width):
    check = Check("memory", "warning", "1.0 GB free of 8.0 GB, limited by the machine", "end other programs " * 4)
    lines = line(check, width).splitlines()
    assert max(map(len, lines)) <= max(width, 40)
    assert lines[0].startswith("warning  memory")
    assert "\n" not in line(check, 0)


def test_a_text_cannot_steer_the_terminal():
    assert "\x1b" not in line(Check("gpu", "ok", "\x1b[31mred\nnew", "\x07"), 80)


@pytest.mark.gpu
def test_a_gpu_is_measured():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device = measure.gpu()
    assert device["name"]
    assert 0 < device["gpu"] <= torch.cuda.get_device_properties(0).total_memory
    assert all(device[name] > 0 for name in ("gpu_gbs", "gpu_gflops", "link_gbs"))
    assert any(device["name"] in check.text for check in doctor._gpu())
