"""Reading and writing so that nothing is lost without a word: short reads, full disks, and what a crash leaves."""

import contextlib
import errno
import io
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

from deltafin.errors import CheckpointError, StorageError
from deltafin.headers import Entry


def open_raw(path: Path, mode: str) -> io.FileIO:
    """Open a file without a buffer."""
    return io.FileIO(path, mode)


def put(file: io.FileIO, data: memoryview | bytes | bytearray) -> None:
    """Write all of ``data``."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def sync(folder: Path) -> None:
    """Make the names in a folder last."""
    if hasattr(os, "O_DIRECTORY"):  # not on Windows
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_whole(path: Path, content: bytes) -> None:
    """Write a small file so that it is there whole or not at all."""
    temporary = path.with_name(f"{path.name}.new")
    with open_raw(temporary, "wb") as f:
        put(f, content)
        os.fsync(f.fileno())
    os.replace(temporary, path)


def reserve(file: io.FileIO, size: int) -> None:
    """Give a file its size, and where the system can, its room on the disk."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
    file.truncate(size)


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Say what could not be written, and what to do."""
    try:
        yield
    except OSError as error:
        where = error.filename or folder
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise StorageError(
            f"{where} cannot be written ({error.strerror or error})",
            f"{'make room' if full else 'mend that'}, then run the same again: what is done is kept in {folder}",
        ) from error


class Source:
    """The stored tensors of the shards at hand, by number, and of those that were ``kept`` aside, by name."""

    def __init__(self, entries: Mapping[str, Entry], shards: Mapping[int, Path], kept: Mapping[str, Path]) -> None:
        self.entries, self.shards, self.kept = entries, shards, kept
        self._files: dict[Path, io.FileIO] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files.values():
            file.close()

    def read(self, name: str, start: int, into: memoryview) -> None:
        """Fill ``into`` with a tensor's bytes from ``start`` on."""
        e = self.entries[name]
        path, start = (self.kept[name], start) if name in self.kept else (self.shards[e.file], e.start + start)
        try:
            if path not in self._files:
                self._files[path] = open_raw(path, "rb")
            file = self._files[path]
            file.seek(start)
            while into:
                count = file.readinto(into)
                if not count:
                    raise CheckpointError(
                        f"{path} ended at byte {start}, inside {name}", "it was cut since; fetch it again"
                    )
                start, into = start + count, into[count:]
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be read ({error.strerror or error}), at byte {start}, inside {name}",
                "what is done is kept; run the same again when the file can be read",
            ) from error
