"""Fetch a model: only the files that a text model needs, each proven to be what was published before it is used."""

import errno
import json
import os
import re
import shutil
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from deltafin import library
from deltafin.convert import Conversion
from deltafin.convert.pipeline import EXTRAS
from deltafin.convert.plan import Plan
from deltafin.errors import CheckpointError, HubError, StorageError, UsageError
from deltafin.headers import read_json
from deltafin.hub import File, Repository, read_headers
from deltafin.layout import INDEX, shards
from deltafin.store import is_store, read_model

BESIDE = re.compile(r"(?!.*\.index\.json)[^/]+\.(json|jinja|model|tiktoken|txt)|(LICENSE|NOTICE)[^/]*")
"""What is fetched besides the weights: configuration, vocabulary, chat template, licence; no code and no pictures."""

LICENCE = re.compile(r"LICEN[CS]E[^/]*")

PIECE = 1 << 20
"""Bytes that are read of a file at once."""

MARK = ".deltafin"
"""The folder in a destination that tells what is being fetched to it, and holds what is cut."""

SOURCE = "source.json"

Progress = Callable[[str, int, int], None]
"""Called, from any thread, with a file's name, its bytes that are here, and all it has; with no name for all files."""


def pull(
    name: str,
    dest: str | Path | None = None,
    *,
    revision: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Fetch ``org/name`` (or ``org/name@revision``) from the hub; return the folder of the snapshot.

    Without ``dest`` it goes to the hub's cache. A file that is here already is checked, one that was cut is gone on
    with, by this call and by the next. Raises ``HubError`` for what the hub refuses or cannot give, ``StorageError``
    where there is no room, before anything is fetched, or nothing can be written.
    """
    repository, pinned = library.parse(name)
    with Repository(repository, revision or pinned) as repo:
        place = _Cache(repo) if dest is None else _Folder(repo, Path(dest).expanduser())
        with _writing(place.root), place.opened():
            first = [repo.file("config.json"), *([repo.files[INDEX]] if INDEX in repo.files else [])]
            for file in first:
                _fetch(repo, file, place, lambda _: None)
            files = wanted(repo, *(read_json(place.path(file)) for file in first))
            _room(place.root, sum(_lacking(file, place) for file in files))
            tell = _Meter(files, progress)
            repo.together(lambda alike: [_fetch(repo, file, place, tell.of(file)) for file in alike], _alike(files))
            return place.finish()


def pull_converted(
    name: str,
    dest: str | Path | None = None,
    *,
    revision: str | None = None,
    experts: str = "keep",
    resident: str = "keep",
    progress: Progress | None = None,
) -> tuple[Path, dict[str, float]]:
    """Fetch a model and make a store of it, at ``dest`` or where ``load`` finds it by name.

    Each shard is converted when it has arrived, and dropped: the disk holds no more than the finished store and two
    shards. An unfinished one is gone on with, at the commit that it began with. Options and result are those of
    ``convert``; raises what ``pull`` and ``Conversion`` do.
    """
    repository, pinned = library.parse(name)
    store = (library.store(repository) if dest is None else Path(dest).expanduser()).resolve()
    folder = store.with_name(f"{store.name}.pull")
    encodings = {"experts": experts, "resident": resident}
    with Repository(repository, revision or pinned or source(folder).get("revision")) as repo:
        if is_store(store):
            about = read_model(store)
            if (
                about["source"] == {"repository": repo.name, "revision": repo.commit}
                and about["encodings"] == encodings
            ):
                shutil.rmtree(folder, ignore_errors=True)
                return store, {}
            raise UsageError(
                f"{store} is of another model or commit, or was made with other options",
                "choose another place, or remove it",
            )
        place, cache = _Folder(repo, folder), _Cache(repo)
        with _writing(folder), place.opened():
            remote = read_headers(repo)
            layout, files = remote.layout(), [repo.file(file) for file in remote.files]
            two = sum(sorted(file.size for file in files)[-2:])
            there = _taken(folder) + _taken(store.with_name(f"{store.name}.partial"))
            _room(folder, Plan(layout, experts, resident).size + two - there)
            beside = [f for name, f in sorted(repo.files.items()) if name in EXTRAS or LICENCE.fullmatch(name)]
            repo.together(lambda alike: [_fetch(repo, file, place, lambda _: None) for file in alike], _alike(beside))
            about: dict[str, Any] = encodings | {"source": (repo.name, repo.commit)}
            extras = [place.path(file) for file in beside]
            with Conversion(layout, store, [file.digest for file in files], **about, extras=extras) as conversion:
                todo = [i for i in range(len(files)) if conversion.needs(i)]
                meter = _Meter([files[i] for i in todo], progress)

                def bring(i: int) -> Path:
                    """Return where a shard is: in the hub's cache, or fetched."""
                    tell = meter.of(files[i])
                    if _proven(files[i], cache.path(files[i]), tell):
                        return cache.path(files[i])
                    _fetch(repo, files[i], place, tell)
                    return place.path(files[i])

                for i, path in repo.ahead(bring, todo):
                    conversion.take(i, path)
                    place.path(files[i]).unlink(missing_ok=True)
                errors = conversion.finish()
        shutil.rmtree(folder)
    return store, errors


def wanted(repo: Repository, raw: Any, index: Any = None) -> list[File]:
    """Return the files of a repository that a text model needs, by what its config and its index tell."""
    top = {name for name in repo.files if "/" not in name}
    names = shards(raw, () if index is not None else top, index, f"{repo.name}/{INDEX}")
    if not names:
        raise CheckpointError(f"{repo.name} has no *.safetensors file", "deltafin reads safetensors checkpoints")
    for name in names:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\\" in name or ":" in name:
            raise CheckpointError(f"{repo.name} has a file {name!r}, which would lie outside of its folder")
    beside = [name for name in top if BESIDE.fullmatch(name) or (name == INDEX and index is not None)]
    return [repo.file(name) for name in [*sorted(beside), *names]]


class _Cache:
    """The hub's cache, as its own tools lay it out: content by hash, and links to it by commit and name."""

    def __init__(self, repo: Repository) -> None:
        self.repo = repo
        self.root = library.cached(repo.name)
        self.folder = self.root / "snapshots" / repo.commit

    @contextmanager
    def opened(self) -> Iterator[None]:
        with _locked(self.root.parent / ".locks" / self.root.name / "deltafin.lock", self.repo.name):
            (self.root / "blobs").mkdir(parents=True, exist_ok=True)
            yield

    def path(self, file: File) -> Path:
        blob, named = self.root / "blobs" / file.digest, self.folder / file.name
        return named if named.is_file() and not named.is_symlink() and not blob.exists() else blob

    def cut(self, file: File) -> Path:
        return self.root / "blobs" / f"{file.digest}.incomplete"

    def keep(self, file: File) -> None:
        """Give a file that has arrived its name."""
        blob, named = self.path(file), self.folder / file.name
        if named == blob or (named.is_symlink() and named.resolve() == blob.resolve()):
            return
        named.parent.mkdir(parents=True, exist_ok=True)
        new = named.with_name(f"{named.name}.new")
        new.unlink(missing_ok=True)
        try:
            new.symlink_to(os.path.relpath(blob, named.parent))
        except OSError:  # a system without links
            blob.rename(new)
        new.replace(named)

    def finish(self) -> Path:
        """Let the branch or tag mean this commit; return the snapshot's folder."""
        if self.repo.revision != self.repo.commit:
            _write(self.root / "refs" / self.repo.revision, self.repo.commit)
        return self.folder


class _Folder:
    """A plain folder that holds the files of one repository, and nothing that came from elsewhere."""

    def __init__(self, repo: Repository, folder: Path) -> None:
        self.repo, self.root = repo, folder

    @contextmanager
    def opened(self) -> Iterator[None]:
        if self.root.exists() and not self.root.is_dir():
            raise UsageError(f"{self.root} is a file", "give a folder that is new, or of an earlier pull")
        known = source(self.root).get("repository") == self.repo.name
        if not known and self.root.is_dir() and any(file.name != MARK for file in self.root.iterdir()):
            raise UsageError(
                f"{self.root} holds something else than an earlier pull of {self.repo.name}", "give another folder"
            )
        with _locked(self.root / MARK / "lock", str(self.root)):
            told = {"repository": self.repo.name, "revision": self.repo.commit}
            _write(self.root / MARK / SOURCE, json.dumps(told))
            yield

    def path(self, file: File) -> Path:
        return self.root / file.name

    def cut(self, file: File) -> Path:
        return self.root / MARK / f"{file.digest}.incomplete"

    def keep(self, file: File) -> None:
        pass

    def finish(self) -> Path:
        for cut in (self.root / MARK).glob("*.incomplete"):
            cut.unlink()  # of a commit that is not wanted any more
        return self.root


def _alike(files: list[File]) -> list[list[File]]:
    """Put files with the same content together: what is cut of them is the same, and has room for one writer."""
    groups = defaultdict[str, list[File]](list)
    for file in files:
        groups[file.digest].append(file)
    return list(groups.values())


def source(folder: Path) -> dict[str, str]:
    """Return repository and revision (a commit) of a folder that was pulled to; of another one, nothing."""
    try:
        told = json.loads((folder / MARK / SOURCE).read_text(encoding="utf-8"))
        return {"repository": told["repository"], "revision": told["revision"]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _fetch(repo: Repository, file: File, place: _Cache | _Folder, tell: Callable[[int], None]) -> None:
    """Bring a file to its place, unless it is there; what an earlier run has of it is kept."""
    path, cut = place.path(file), place.cut(file)
    if not _proven(file, path, tell):
        while not _completed(repo, file, cut, tell):
            tell(-file.size)  # what an earlier run left was of no use
        path.parent.mkdir(parents=True, exist_ok=True)
        cut.replace(path)
    place.keep(file)


def _completed(repo: Repository, file: File, cut: Path, tell: Callable[[int], None]) -> bool:
    """Complete what is cut; remove it when its hash is wrong, and raise ``HubError`` when no byte of it was old."""
    digest = file.hash()
    with cut.open("ab+") as f:
        if f.tell() > file.size:
            f.truncate(0)
        f.seek(0)
        while chunk := f.read(PIECE):
            digest.update(chunk)
            tell(len(chunk))
        began = f.tell()
        for chunk in repo.read(file, began):
            f.write(chunk)
            digest.update(chunk)
            tell(len(chunk))
        f.flush()
        os.fsync(f.fileno())
    if digest.hexdigest() == file.digest:
        return True
    cut.unlink()
    if not began:
        raise HubError(
            f"{file.name} of {repo.name} has the hash {digest.hexdigest()}, published is {file.digest}",
            "run it again; if that does not help, the hub or something between it and here changes the file",
        )
    return False


def _proven(file: File, path: Path, tell: Callable[[int], None]) -> bool:
    """Whether a path holds a file's content; all of it is read."""
    if not path.is_file() or path.stat().st_size != file.size:
        return False
    digest, seen = file.hash(), 0
    with path.open("rb") as f:
        while chunk := f.read(PIECE):
            digest.update(chunk)
            seen += len(chunk)
            tell(len(chunk))
    if digest.hexdigest() != file.digest:
        tell(-seen)
        return False
    return True


class _Meter:
    """Adds up bytes from all threads, for ``progress``."""

    def __init__(self, files: list[File], progress: Progress | None) -> None:
        self.done = dict.fromkeys(files, 0)
        self.all, self.total = 0, sum(file.size for file in files)
        self.progress = progress
        self.lock = threading.Lock()

    def of(self, file: File) -> Callable[[int], None]:
        def tell(more: int) -> None:
            with self.lock:
                self.done[file] += more
                self.all += more
                if self.progress:
                    self.progress(file.name, self.done[file], file.size)
                    self.progress("", self.all, self.total)

        return tell


def _lacking(file: File, place: _Cache | _Folder) -> int:
    """Return how many bytes of a file are still to come, by sizes alone."""
    if _size(place.path(file)) == file.size:
        return 0
    return file.size - min(file.size, _size(place.cut(file)))


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _taken(folder: Path) -> int:
    """Return the bytes that a folder takes on its disk."""
    found = (file.stat() for file in folder.rglob("*") if file.is_file())
    return sum(min(s.st_size, getattr(s, "st_blocks", s.st_size) * 512) for s in found)


def _room(folder: Path, needed: int) -> None:
    """Raise ``StorageError`` when a folder's disk has less space than is needed."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise StorageError(
            f"{needed:,} bytes are needed at {folder}, and {free:,} are free",
            f"make room for {needed - free:,} bytes, or choose another place: DEST, or HF_HUB_CACHE",
        )


@contextmanager
def _writing(root: Path) -> Iterator[None]:
    """Say where writing failed, and what to do."""
    try:
        yield
    except OSError as error:
        where = error.filename or root
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageError(
                f"no space is left for {where}", "make room and run it again: what is here is kept"
            ) from error
        raise StorageError(
            f"{where} cannot be written ({error.strerror or error})", "choose another place: DEST, or HF_HUB_CACHE"
        ) from error


@contextmanager
def _locked(path: Path, what: str) -> Iterator[None]:
    """Keep a second pull to the same place out; the system lets go when a process ends, however it ends."""
    from filelock import FileLock, Timeout

    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(path, timeout=0):
            yield
    except Timeout as error:
        raise UsageError(f"{what} is being pulled by another process", "wait for it, or end it") from error


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)
