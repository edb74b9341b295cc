"""Write a store, shard by shard, so that it can be stopped at any moment and gone on with."""

import contextlib
import json
import math
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import deltafin
from deltafin.config import to_json
from deltafin.convert import encode
from deltafin.convert.files import Source, Target, open_raw, put, reserve, sync, write_out, write_whole, writing
from deltafin.convert.plan import Plan, Task
from deltafin.errors import CheckpointError, StorageError, UsageError
from deltafin.layout import Layout
from deltafin.snapshot import open_layout
from deltafin.store import FORMAT, MODEL, VERSION, Unit, checksum, is_store, model_json, read_checksum, read_model

try:
    import fcntl
except ImportError:  # Windows: two conversions to one place are not kept apart
    fcntl = None

Progress = Callable[[int, int], None]

WORKERS = 2
"""Threads that convert: while one waits for the disk, the other copies."""

EXTRAS = ("config.json", "generation_config.json", "tokenizer_config.json", "tiktoken.model")
"""Files that vocabulary, chat format and stop ids are read from."""


class Conversion:
    """A store in the making, in ``DEST.partial``; what is there already is verified and kept.

    The place of every byte follows from ``layout`` alone, so that shards can be taken in any order, each once, and be
    dropped after. ``stamps``, one for each file of ``layout.files``, tell whether a file is still the one that an
    earlier run read: a hash of its content from the hub, or size and time of a local file; what was made of a file
    that has another stamp now is made anew. ``extras`` are files that are copied beside the weights (vocabulary,
    config). ``source`` is repository and revision. ``progress`` is called with bytes that are done, and in all.

    Use as a context manager: it holds files open, and a lock that keeps a second conversion out. It takes a few
    pieces of some megabytes of memory, whatever the model's size, beside what headers take.

    Raises ``UsageError`` where DEST, or DEST.partial, is something else, ``StorageError`` where it cannot be written;
    ``CheckpointError`` names a file that cannot be read, or a tensor that is not finite.
    """

    def __init__(
        self,
        layout: Layout,
        dest: Path,
        stamps: Sequence[str],
        *,
        experts: str = "keep",
        resident: str = "keep",
        source: tuple[str | None, str | None] = (None, None),
        extras: Sequence[Path] = (),
        progress: Progress | None = None,
    ) -> None:
        self.layout, self.plan = layout, Plan(layout, experts, resident)
        self.about = _about(self.plan, experts, resident, source)
        self.extras = extras
        self.dest = dest.resolve()
        self.folder = _partial(self.dest)
        self.size = self.plan.size
        """Bytes that the finished store's weights take: reserved on the disk before the first is written."""
        self.done = 0
        self._store, self._waiting = self.folder / "store", self.folder / "waiting"
        self._progress = progress or (lambda done, total: None)
        self._tasks: dict[int, dict[str, Any]] = {}
        self._jobs: dict[tuple[int, int], Sequence[float]] = {}
        self._kept: set[str] = set()
        with contextlib.ExitStack() as stack:
            with writing(self.folder):
                self._begin(list(stamps), stack)
            self._open = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def needs(self, shard: int) -> bool:
        """Whether anything of ``layout.files[shard]`` has still to be read."""
        return any(self._wants(number, shard) for number in self.plan.by_shard.get(shard, ()))

    def take(self, shard: int, path: Path) -> None:
        """Convert everything of ``layout.files[shard]``, which lies at ``path``; then the file may be dropped.

        What is made of two shards is made when the second comes; until then the first one's part is kept aside.
        """
        todo = [number for number in self.plan.by_shard.get(shard, ()) if number not in self._tasks]
        alone = [number for number in todo if number not in self.plan.spread]
        with writing(self.folder):
            with ThreadPoolExecutor(WORKERS) as pool:
                try:
                    for record in pool.map(lambda number: self._whole(number, shard, path), alone):
                        self._finished(record)
                finally:  # stopped, or broken: what has not begun need not
                    pool.shutdown(cancel_futures=True)
            for number in todo:
                if number not in self._tasks:
                    self._part(number, shard, path)
            for file in {unit.file for number in todo for unit in self.plan.tasks[number].units}:
                write_out(self._store / self.plan.files[file].name)

    def finish(self) -> dict[str, float]:
        """Publish the store as DEST; return the relative error of each kind of tensor that was re-encoded."""
        missing = [file for i, file in enumerate(self.layout.files) if self.needs(i)]
        if missing:
            raise UsageError(f"{', '.join(map(str, missing))} were not taken", "take every shard that is needed")
        with writing(self.folder):
            recorded = self._seal()
            for path in self.extras:
                try:
                    content = path.read_bytes()
                except OSError as error:
                    raise CheckpointError(f"{path} cannot be read ({error.strerror})") from error
                write_whole(self._store / path.name, content)
                recorded[path.name] = {"bytes": len(content), "checksum": checksum(content).hex()}
            write_whole(self._store / MODEL, model_json(self.about | {"files": recorded}))
            sync(self._store)
            if self.dest.is_dir():
                self.dest.rmdir()  # an empty one: else it was refused
            os.rename(self._store, self.dest)
            sync(self.dest.parent)
        shutil.rmtree(self.folder, ignore_errors=True)
        self._progress(self.size, self.size)
        done = ((self.plan.tasks[number], self._tasks[number]["errors"]) for number in sorted(self._tasks))
        return relative_errors(done, self.plan)

    # Beginning, and going on

    def _begin(self, stamps: list[str], stack: contextlib.ExitStack) -> None:
        if self.dest.exists() and not (self.dest.is_dir() and not any(self.dest.iterdir())):
            raise UsageError(f"{self.dest} is there already", "choose another place, or remove it")
        plan_file, identity = self.folder / "plan.json", self._identity()
        if plan_file.exists():
            known = json.loads(plan_file.read_bytes())
        elif self.folder.exists() and {p.name for p in self.folder.iterdir()} - {"lock", "plan.json.new"}:
            raise UsageError(f"{self.folder} is something else, and would be written to", "move it out of the way")
        else:
            known = {"identity": identity, "stamps": stamps}
        if known["identity"] != identity:
            raise UsageError(
                f"{self.folder} is an unfinished conversion of other files, or with other options",
                "finish that one, or remove the folder",
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = stack.enter_context(open_raw(self.folder / "lock", "wb"))
        if fcntl:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UsageError(f"another process is writing {self.folder}", "wait until it is done") from error
        if not plan_file.exists():
            write_whole(plan_file, json.dumps(known).encode())
        changed = {i for i, (old, new) in enumerate(zip(known["stamps"], stamps, strict=True)) if old != new}
        records = self._records()
        self._reserve()
        self._journal = stack.enter_context(open_raw(self.folder / "journal", "ab"))
        good = [record for record in records if self._holds(record, changed)]
        self._journal.truncate(0)
        write_whole(plan_file, json.dumps({"identity": identity, "stamps": stamps}).encode())
        for record in good:
            self._note(record)
        for number in {number for number, _ in self._jobs}:  # stopped between its last part and the whole
            if number not in self._tasks:
                self._join(number)

    def _identity(self) -> str:
        """What makes two conversions the same one: what goes where, made of what, by which version."""
        entries = sorted((name, e.file, e.dtype, e.shape, e.start, e.stop) for name, e in self.layout.entries.items())
        return checksum(repr((entries, self.about)).encode()).hex()

    def _records(self) -> list[dict[str, Any]]:
        """What an earlier run noted, up to a line that it did not finish."""
        journal, records = self.folder / "journal", list[dict[str, Any]]()
        for line in journal.read_bytes().split(b"\n")[:-1] if journal.exists() else ():
            try:
                records.append(json.loads(line))
            except ValueError:
                break
        return records

    def _reserve(self) -> None:
        self._store.mkdir(exist_ok=True)
        self._waiting.mkdir(exist_ok=True)
        paths = [self._store / file.name for file in self.plan.files]
        there = sum(getattr(path.stat(), "st_blocks", 0) * 512 for path in paths if path.exists())
        needed, free = self.size - there, shutil.disk_usage(self.folder).free
        if needed > free:
            raise StorageError(
                f"{self.folder} needs {needed / 1e9:.2f} GB, and its disk has {free / 1e9:.2f} GB free",
                "make room, or choose a place on another disk",
            )
        for path, file in zip(paths, self.plan.files, strict=True):
            reserve(path, file.size)

    def _holds(self, record: dict[str, Any], changed: set[int]) -> bool:
        """Whether what was noted is still there, and made of files that have not changed since; then remember it."""
        inputs, made = self._made(record)
        if any(self.layout.entries[name].file in changed for name in inputs):
            return False
        if not all(path.exists() for path, _ in made) or self._digests(made) != record["digests"]:
            return False
        self._remember(record)
        return True

    def _made(self, record: Mapping[str, Any]) -> tuple[list[str], list[tuple[Path, Unit]]]:
        """Return what a record is about: the stored tensors that were read, and the places that were written."""
        if "kept" in record:
            e = self.layout.entries[record["kept"]]
            return [record["kept"]], [(self._aside(record["kept"]), Unit(0, 0, e.stop - e.start, record["kept"]))]
        task = self.plan.tasks[record["task"]]
        jobs, units = list(self.plan.jobs(task)), list(task.units)
        if "job" in record:
            jobs = [jobs[record["job"]]]
            units = jobs[0].units()
        places = [(self._store / self.plan.files[unit.file].name, unit) for unit in units]
        return [name for job in jobs for name in job.inputs], places

    def _digests(self, made: list[tuple[Path, Unit]]) -> list[str]:
        return [read_checksum(path, unit).hex() for path, unit in made]

    def _remember(self, record: dict[str, Any]) -> None:
        if "kept" in record:
            self._kept.add(record["kept"])
        elif "job" in record:
            self._jobs[record["task"], record["job"]] = record["errors"]
        else:
            self._tasks[record["task"]] = record
            self.done += sum(unit.size for unit in self.plan.tasks[record["task"]].units)
            self._progress(self.done, self.size)

    def _note(self, record: dict[str, Any]) -> None:
        put(self._journal, json.dumps(record).encode() + b"\n")

    # One shard

    def _wants(self, number: int, shard: int) -> bool:
        """Whether a task lacks anything that is made of a tensor of this shard."""
        if number in self._tasks:
            return False
        return any(
            self.layout.entries[name].file == shard and name not in self._kept
            for j, job in enumerate(self.plan.jobs(self.plan.tasks[number]))
            if (number, j) not in self._jobs
            for name in job.inputs
        )

    def _whole(self, number: int, shard: int, path: Path) -> dict[str, Any]:
        """Do a task that needs one shard alone. Runs in several threads at once, so nothing of ours is changed."""
        task = self.plan.tasks[number]
        with Source(self.layout.entries, {shard: path}, {}) as source, self._target(task) as target:
            errors = [encode.run(job, self.layout.entries, source.read, target.write) for job in self.plan.jobs(task)]
            return {"task": number, "errors": errors, "digests": target.digests()}

    def _part(self, number: int, shard: int, path: Path) -> None:
        """Do of a task what this shard and what was kept of others allow; keep the rest."""
        task, kept = self.plan.tasks[number], {name: self._aside(name) for name in self._kept}
        jobs = list(self.plan.jobs(task))
        with Source(self.layout.entries, {shard: path}, kept) as source, self._target(task) as target:
            for j, job in enumerate(jobs):
                here = {name for name in job.inputs if self.layout.entries[name].file == shard}
                if (number, j) in self._jobs or not here:
                    continue
                if self._kept.issuperset(set(job.inputs) - here):
                    errors = encode.run(job, self.layout.entries, source.read, target.write)
                    self._finished({"task": number, "job": j, "errors": errors})
                else:
                    for name in here - self._kept:
                        self._keep(name, source)
        self._join(number)

    def _join(self, number: int) -> None:
        """Note a task of which every part is done, and drop what was kept for it."""
        jobs = list(self.plan.jobs(self.plan.tasks[number]))
        if all((number, j) in self._jobs for j in range(len(jobs))):
            self._finished({"task": number, "errors": [self._jobs.pop((number, j)) for j in range(len(jobs))]})
            for name in self._kept.intersection(name for job in jobs for name in job.inputs):
                self._aside(name).unlink(missing_ok=True)
                self._kept.remove(name)

    def _target(self, task: Task) -> Target:
        return Target(self._store / self.plan.files[task.units[0].file].name, task.units)

    def _finished(self, record: dict[str, Any]) -> None:
        """Note what is done with its checksums, those of what passed by or of what is read, for a later run to find."""
        if not record.get("digests"):
            record["digests"] = self._digests(self._made(record)[1])
        self._note(record)
        self._remember(record)

    def _keep(self, name: str, source: Source) -> None:
        """Keep a tensor aside until the shard comes that has the rest of what it becomes."""
        e = self.layout.entries[name]
        with open_raw(self._aside(name), "wb") as f:
            for start in range(0, e.stop - e.start, encode.MOVED):
                piece = bytearray(min(encode.MOVED, e.stop - e.start - start))
                source.read(name, start, memoryview(piece))
                put(f, piece)
        self._finished({"kept": name})

    def _aside(self, name: str) -> Path:
        return self._waiting / checksum(name.encode()).hex()

    # The end

    def _seal(self) -> dict[str, dict[str, Any]]:
        """Write headers and tables of checksums, make all of it last; return sizes and checksums by name."""
        tables: list[list[tuple[int, bytes]]] = [[] for _ in self.plan.files]
        for number, record in self._tasks.items():
            for unit, digest in zip(self.plan.tasks[number].units, record["digests"], strict=True):
                tables[unit.file].append((unit.start, bytes.fromhex(digest)))
        recorded = dict[str, dict[str, Any]]()
        for planned, sums in zip(self.plan.files, tables, strict=True):
            table = b"".join(digest for _, digest in sorted(sums))
            with Target(self._store / planned.name, ()) as target:
                target.write(planned.table, memoryview(table))
                target.write(0, memoryview(planned.header))
                target.sync()
            recorded[planned.name] = {"bytes": planned.size, "checksum": checksum(planned.header, table).hex()}
        return recorded


def convert(
    source: str | Path,
    dest: str | Path,
    *,
    experts: str = "keep",
    resident: str = "keep",
    progress: Progress | None = None,
) -> dict[str, float]:
    """Convert the snapshot in ``source`` to a store at ``dest``; return the relative error by kind of tensor.

    ``experts`` is ``"keep"``, ``"mxfp4"``, ``"int8"`` or ``"bf16"``, ``resident`` the same without ``"mxfp4"``: the
    format of routed experts, and of all other matrices but router and embedding. Kept tensors are moved as they are.
    Where ``dest`` is a finished store already, every byte of it is compared with what ``source`` makes.

    Raises what ``Conversion`` does, and ``UsageError`` where ``dest`` is, holds or lies in ``source``, or is the store
    of something else.
    """
    source, dest = Path(source).expanduser(), Path(dest).expanduser()
    if not source.is_dir():
        raise UsageError(f"there is no folder {str(source)!r}", "give the folder of a Hugging Face snapshot")
    if is_store(source):
        raise UsageError(f"{source} is a store already", "convert from the snapshot that it was made of")
    real, target = source.resolve(), dest.resolve()
    if real == target or real in target.parents or target in real.parents:
        raise UsageError(f"{dest} and {source} lie in one another", "choose another place for the store")
    layout = open_layout(source)
    extras = [path for name in EXTRAS if (path := source / name).is_file()]
    extras += sorted(path for path in source.glob("LICEN[CS]E*") if path.is_file())
    options: dict[str, Any] = {"experts": experts, "resident": resident, "source": _origin(source)}
    if is_store(target):
        errors = _compare(layout, target, extras, options, progress or (lambda done, total: None))
        left = _partial(target)
        if (left / "plan.json").exists() and not (left / "store").exists():  # stopped right after it was published
            shutil.rmtree(left, ignore_errors=True)
        return errors
    stamps = [_stamp(file) for file in layout.files]
    with Conversion(layout, target, stamps, **options, extras=extras, progress=progress) as conversion:
        for i, file in enumerate(layout.files):
            if conversion.needs(i):
                conversion.take(i, Path(file))
                if _stamp(file) != stamps[i]:
                    raise CheckpointError(f"{file} was changed while it was read", "run the same again")
        return conversion.finish()


def _compare(
    layout: Layout, dest: Path, extras: Sequence[Path], options: Mapping[str, Any], progress: Progress
) -> dict[str, float]:
    """Hold a finished store against what its source makes; ``UsageError`` names what differs."""
    plan, known = Plan(layout, options["experts"], options["resident"]), read_model(dest)
    about = _about(plan, **options)
    if any(known.get(key) != about[key] for key in about.keys() - {"converter", "source"}):
        raise UsageError(
            f"{dest} is the store of another model, or was made with other options",
            "choose another place, or remove it",
        )
    errors, done = list[list[tuple[float, float]]](), 0
    shards = {i: Path(file) for i, file in enumerate(layout.files)}
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(Source(layout.entries, shards, {}))
        name = ""

        def hold(place: int, data: memoryview) -> None:
            stored.seek(place)
            if stored.read(len(data)) != data:
                raise _differs(dest, name)

        for task in plan.tasks:
            name, path = task.name, dest / plan.files[task.units[0].file].name
            with open_raw(path, "rb") as stored:
                errors.append([encode.run(job, layout.entries, source.read, hold) for job in plan.jobs(task)])
            done += sum(unit.size for unit in task.units)
            progress(done, plan.size)
    for path in extras:
        copy = dest / path.name
        if not copy.is_file() or copy.read_bytes() != path.read_bytes():
            raise _differs(dest, path.name)
    progress(plan.size, plan.size)
    return relative_errors(zip(plan.tasks, errors, strict=True), plan)


def _differs(dest: Path, name: str) -> UsageError:
    return UsageError(
        f"{name} in {dest} is not what the source makes: one of them was changed since it was converted",
        "choose another place, or remove the store to convert anew",
    )


def relative_errors(done: Iterable[tuple[Task, Sequence[Sequence[float]]]], plan: Plan) -> dict[str, float]:
    """Return, by kind, the norm of the error over the norm of the values of all that was re-encoded."""
    lost, total = defaultdict[str, float](float), defaultdict[str, float](float)
    for task, sums in done:
        if not any(values for _, values in sums):
            continue
        for job, (error, values) in zip(plan.jobs(task), sums, strict=True):
            if values:
                lost[job.kind] += error
                total[job.kind] += values
    return {kind: math.sqrt(error / total[kind]) if error else 0.0 for kind, error in lost.items()}


def _about(plan: Plan, experts: str, resident: str, source: tuple[str | None, str | None]) -> dict[str, Any]:
    """What model.json says, apart from the files."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "converter": deltafin.__version__,
        "source": {"repository": source[0], "revision": source[1]},
        "encodings": {"experts": experts, "resident": resident},
        "parameters": plan.layout.totals["parameters"],
        "skipped": dict(sorted(plan.layout.skipped.items())),
        "config": to_json(plan.layout.config),
        "experts": {str(layer): kept for layer, kept in plan.experts.items()},
    }


def _origin(source: Path) -> tuple[str | None, str | None]:
    """Return repository and revision, where the folder is in a cache of the hub."""
    found = re.fullmatch(r".*/models--([^/]+)/snapshots/([^/]+)", source.absolute().as_posix())
    return (found[1].replace("--", "/"), found[2]) if found else (None, None)


def _partial(dest: Path) -> Path:
    return dest.with_name(f"{dest.name}.partial")


def _stamp(file: str) -> str:
    status = os.stat(file)
    return f"{status.st_size} bytes at {status.st_mtime_ns}"
