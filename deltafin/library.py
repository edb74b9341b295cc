"""What is stored on this machine and where: models that were pulled, into the hub's cache or as stores of our own."""

import json
import os
import re
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from deltafin import families, machine
from deltafin.errors import CheckpointError, DeltafinError, StorageError, UsageError
from deltafin.headers import read_json
from deltafin.snapshot import listed_files
from deltafin.store import MODEL, is_store

NAME = re.compile(r"(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[^@\s]+))?", re.ASCII)

EMBEDDED = Path(__file__).parent / "nano"

MARK = ".deltafin"
"""The folder in a destination that tells what is being fetched to it, and holds what is cut."""

SOURCE = "source.json"

UNFINISHED = (".partial", ".pull")
"""What the folder of a store that is being made ends in, and that of files which it is made from."""


def stores_folder() -> Path:
    """Return the folder of the stores that ``deltafin pull --convert`` makes where no other place is asked for."""
    home = os.getenv("XDG_DATA_HOME") or (os.getenv("LOCALAPPDATA") if os.name == "nt" else None) or "~/.local/share"
    return Path(home).expanduser() / "deltafin" / "models"


def split(name: str) -> tuple[str, str | None] | None:
    """Return repository and revision of ``org/name`` or ``org/name@revision``; ``None`` when it is neither."""
    match = NAME.fullmatch(name)
    if match is None or ".." in match["repository"] or "--" in match["repository"]:
        return None
    return match["repository"], match["revision"]


def parse(name: str) -> tuple[str, str | None]:
    """Return what ``split`` does; ``UsageError`` for what is no name of a repository."""
    found = split(name)
    if found is None:
        raise UsageError(f"{name!r} is not the name of a repository", "a name is org/name or org/name@revision")
    return found


def cached(repository: str) -> Path:
    """Return where the hub's cache keeps a repository."""
    return machine.hub_folder() / f"models--{repository.replace('/', '--')}"


def store(repository: str) -> Path:
    """Return where the store of a repository lies, if there is one."""
    return stores_folder() / repository.replace("/", "--")


def title(path: Path) -> str:
    """Return the name of a model by its folder: ``org/name`` where it was pulled, else the folder's own."""
    path = path.absolute()
    if path.parent.name == "snapshots" and path.parents[1].name.startswith("models--"):
        return path.parents[1].name.removeprefix("models--").replace("--", "/")
    return path.name.replace("--", "/") if path.parent == stores_folder().absolute() else path.resolve().name


def locate(name: str | Path) -> Path:
    """Return the folder of a model by what a user calls it: ``"nano"``, a folder, or the name of what was pulled."""
    path = EMBEDDED if str(name) == "nano" else Path(name).expanduser()
    if path.is_dir():
        return path
    if split(str(name)) is None:
        raise UsageError(
            f"there is no model folder {str(name)!r}",
            "give the folder of a Hugging Face snapshot or a store, org/name of one that was pulled, or nano",
        )
    return find(str(name))


def source(folder: Path) -> dict[str, str]:
    """Return repository and revision (a commit) of a folder that was pulled to; of another one, nothing."""
    try:
        told = json.loads((folder / MARK / SOURCE).read_text(encoding="utf-8"))
        return {"repository": told["repository"], "revision": told["revision"]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def find(name: str) -> Path:
    """Return the folder of a model that was pulled, by ``org/name`` or ``org/name@revision``; nothing is asked online.

    A store of our own comes before the hub's cache. There, without a revision, the commit that was pulled last as the
    main branch is meant, or the newest complete one. Raises ``UsageError`` with the command that fetches what is not
    here, or not complete.
    """
    repository, revision = parse(name)
    converted = store(repository)
    if is_store(converted) and (_revision(converted) or "").startswith(revision or ""):
        return converted
    found = [path for path in _snapshots(repository, revision) if (path / "config.json").is_file()]
    for path in found:
        if not missing(path):
            return path
    fetch = f"`deltafin pull {name}` fetches"
    if found:
        raise UsageError(f"{name} is here only in part ({found[0]})", f"{fetch} the rest")
    if converted.with_name(f"{converted.name}.partial").exists():
        raise UsageError(f"the store of {name} is not finished", f"{fetch.replace('pull', 'pull --convert')} the rest")
    raise UsageError(f"{name} is not on this machine", f"{fetch} it")


def _snapshots(repository: str, revision: str | None) -> Iterator[Path]:
    """Yield the snapshots of a revision in the hub's cache; without one, those of the main branch come first."""
    root = cached(repository)
    folders = [path for path in (root / "snapshots").glob("*") if path.is_dir()]
    ref = root / "refs" / (revision or "main")
    pinned = ref.read_text(encoding="utf-8").strip() if ref.is_file() else revision or ""
    yield from (path for path in folders if pinned and path.name.startswith(pinned))
    if revision is None:
        yield from sorted(folders, key=lambda path: path.stat().st_mtime, reverse=True)


def missing(folder: Path) -> list[str]:
    """Return the names of the shards that a snapshot lacks; of one that is wrong in another way, none."""
    try:
        listed, absent = listed_files(folder, read_json(folder / "config.json"))
    except DeltafinError:
        return []  # opening it says what
    return absent if listed else ["*.safetensors"]


@dataclass(frozen=True)
class Stored:
    """A model on this machine; ``kind`` is snapshot, store, or part (of either), ``size`` is in bytes."""

    name: str
    revision: str | None
    size: int
    kind: str
    path: Path

    def answers(self, name: str) -> bool:
        """Whether it is meant by ``org/name``, ``org/name@revision`` (a commit may be cut short), or its path."""
        repository, revision = split(name) or ("", None)
        named = self.name == repository and (self.revision or "").startswith(revision or "")
        return named or self.path == Path(name).expanduser().absolute()


def stored() -> list[Stored]:
    """Return the models in the hub's cache that deltafin reads, and the stores of our own, by name."""
    return sorted([*_stored_snapshots(), *_stored_stores()], key=lambda s: (s.name, s.kind, s.path))


def _stored_snapshots() -> Iterator[Stored]:
    from huggingface_hub import scan_cache_dir

    if not machine.hub_folder().is_dir():
        return
    cache = scan_cache_dir(machine.hub_folder())
    for repo in cache.repos:
        cut = sum(f.size_on_disk for f in cache.incomplete_files if f.file_path.is_relative_to(repo.repo_path))
        for revision in repo.revisions if repo.repo_type == "model" else ():
            path = Path(revision.snapshot_path)
            if _readable(path):
                part = bool(missing(path))
                size = revision.size_on_disk + cut * part
                yield Stored(repo.repo_id, revision.commit_hash, size, "part" if part else "snapshot", path)


def _readable(folder: Path) -> bool:
    try:
        families.family(read_json(folder / "config.json"))
    except DeltafinError:
        return False
    return True


def _stored_stores() -> Iterator[Stored]:
    for path in stores_folder().glob("*--*"):
        name = path.name
        for ending in UNFINISHED:
            name = name.removesuffix(ending)
        if path.is_dir():
            size = sum(file.lstat().st_size for file in path.rglob("*") if not file.is_dir())
            kind = "store" if path.name == name else "part"
            yield Stored(name.replace("--", "/"), _revision(path), size, kind, path.absolute())


def _revision(folder: Path) -> str | None:
    """Return the commit that a store was made from, where it tells."""
    try:
        return json.loads((folder / MODEL).read_text(encoding="utf-8"))["source"]["revision"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def remove(models: Collection[Stored]) -> None:
    """Remove models that ``stored`` returned, and nothing else; what other revisions share stays."""
    from huggingface_hub import scan_cache_dir

    ours = {model.path for model in stored()}
    if strange := [model for model in models if model.path not in ours]:
        raise CheckpointError(f"{strange[0].path} is not a model that was pulled")
    snapshots = [model for model in models if model.path.parent.name == "snapshots"]
    try:
        for model in snapshots:
            for cut in model.path.parents[1].glob("blobs/*.incomplete") if model.kind == "part" else ():
                cut.unlink()
        if snapshots:
            commits = [model.path.name for model in snapshots]
            scan_cache_dir(machine.hub_folder()).delete_revisions(*commits).execute()
        for model in models:
            if model not in snapshots:
                model.path.unlink() if model.path.is_symlink() else shutil.rmtree(model.path)
    except OSError as error:
        raise StorageError(f"{error.filename} cannot be removed ({error.strerror})") from error
    if left := [model for model in models if model.path.exists()]:
        raise StorageError(f"{left[0].path} cannot be removed", "may you write there?")
