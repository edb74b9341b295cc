"""The Hugging Face hub: what a repository publishes, read in place or fetched, and proven to be what was published.

huggingface-hub knows the user's token and keeps the cache; the bytes are read here, because its own downloads begin
a file anew that was cut by the end of a process, and trust what arrives.
"""

import email.utils
import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar
from urllib.parse import quote

import httpx2

from deltafin import __version__, families, machine
from deltafin.errors import CheckpointError, HubError
from deltafin.headers import Entry, header_length, parse_header
from deltafin.layout import INDEX, NUMBERED, Layout, shards

CONNECTIONS = 8
"""Files that are read at the same time."""

FRONT = 1 << 17
"""Bytes that are asked for when the length of a header is not known yet: most headers are shorter."""

WAITS = (0.5, 1, 2, 4, 8, 16)
"""Seconds to wait before each further try without a byte of progress; then the hub counts as unreachable."""

TIMEOUT = 10
"""Seconds without a byte after which a connection is given up, and another one tried."""

LONGEST_WAIT = 300
"""Seconds that a hub which asks for patience is waited for."""

BUSY = (408, 429, 500, 502, 503, 504)

Item = TypeVar("Item")
Result = TypeVar("Result")


class Stopped(Exception):
    """Raised in threads that read, when reading has lost its purpose."""


@dataclass(frozen=True, slots=True)
class File:
    """A file of a repository. ``digest`` is SHA-256 for large files, Git's SHA-1 of a blob for others, in hex."""

    name: str
    size: int
    digest: str

    def hash(self) -> Any:
        """Return a hash object that gives ``digest`` when it is fed the file's content."""
        return hashlib.sha256() if len(self.digest) == 64 else hashlib.sha1(b"blob %d\0" % self.size)


class Repository:
    """A repository of models at one commit; what its files are is known, and their content can be read.

    ``name`` is ``org/name``; ``revision`` a branch, tag or commit (default: the main branch). ``HF_ENDPOINT``,
    ``HF_TOKEN``, ``HF_HUB_OFFLINE`` and proxies are what the environment says now. Use as a context manager, which
    closes connections. Raises ``HubError`` saying what stands in the way.
    """

    def __init__(self, name: str, revision: str | None = None) -> None:
        from huggingface_hub import get_token

        if machine.offline():
            raise HubError(
                f"HF_HUB_OFFLINE is set, so {name} is not looked for on the hub",
                "unset it, or name a model that is here: `deltafin list` shows them",
            )
        self.name = name
        self.endpoint = (os.getenv("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
        self.revision = revision or "main"
        self._stop = threading.Event()
        headers = {"User-Agent": f"deltafin/{__version__}", "Accept-Encoding": "identity"}
        if token := get_token():
            headers["Authorization"] = f"Bearer {token}"  # dropped by a redirect to another server
        try:
            self._client = httpx2.Client(headers=headers, follow_redirects=True, timeout=TIMEOUT)
        except (ImportError, ValueError, OSError, httpx2.InvalidURL) as error:
            raise HubError(
                f"proxy, certificates or token that the environment names cannot be used: {error}",
                "look at HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, NO_PROXY, SSL_CERT_FILE and HF_TOKEN",
            ) from error
        try:
            self._list()
        except BaseException:
            self._client.close()
            raise

    def _list(self) -> None:
        url = f"{self.endpoint}/api/models/{quote(self.name)}/revision/{quote(self.revision, safe='')}"
        told = self._try(lambda: self._json(url, {"blobs": "true"}), waits=WAITS[:2])
        try:
            self.commit: str = told["sha"]
            listed = (
                File(
                    s["rfilename"],
                    *((lfs["size"], lfs["sha256"]) if (lfs := s.get("lfs")) else (s["size"], s["blobId"])),
                )
                for s in told["siblings"]
            )
            self.files = {file.name: file for file in listed}
        except (KeyError, TypeError) as error:
            raise HubError(
                f"{self.endpoint} does not tell sizes and hashes of the files of {self.name}",
                "is this a hub? HF_ENDPOINT chooses it",
            ) from error
        if not re.fullmatch(r"[0-9a-f]{40}", str(self.commit)):
            raise HubError(f"{self.endpoint} names {self.commit!r} as commit of {self.name}", "is this a hub?")

    def _json(self, url: str, params: Mapping[str, str]) -> Any:
        try:
            answer = self._client.get(url, params=params)
        except httpx2.InvalidURL as error:
            raise HubError(f"{self.endpoint} is no address ({error})", "HF_ENDPOINT names the hub") from error
        self._check(answer)
        try:
            return answer.json()
        except ValueError as error:
            raise HubError(f"{_place(answer)} answered no JSON", "is this a hub? HF_ENDPOINT chooses it") from error

    def __enter__(self) -> Self:
        """Keep connections open."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close connections; threads that still read are stopped."""
        self.stop()
        self._client.close()

    def stop(self) -> None:
        """Let threads that read stop."""
        self._stop.set()

    def file(self, name: str) -> File:
        """Return a file by name; ``HubError`` when the repository has none of that name."""
        if name not in self.files:
            raise HubError(
                f"{self.name} has no {name} at commit {self.commit[:12]}",
                "deltafin reads repositories of safetensors checkpoints",
            )
        return self.files[name]

    def read(self, file: File, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
        """Yield a file's bytes from ``start`` to ``stop``, going on where a connection is cut.

        Raises ``HubError`` when the hub stays unreachable, refuses, or has another file there by now.
        """
        url = f"{self.endpoint}/{quote(self.name)}/resolve/{self.commit}/{quote(file.name)}"
        at, stop = start, file.size if stop is None else stop

        def connect() -> Generator[bytes, None, None]:
            whole = at == 0 and stop == file.size
            headers = {} if whole else {"Range": f"bytes={at}-{stop - 1}"}
            with self._client.stream("GET", url, headers=headers) as answer:
                self._check(answer)
                _same(answer, file, at)
                skip = at if answer.status_code == 200 else 0  # ranges are not understood there
                for chunk in answer.iter_raw():  # as it comes: what is gathered first would be lost with the line
                    if self._stop.is_set():
                        raise Stopped
                    yield chunk[skip:]
                    skip = max(0, skip - len(chunk))

        tries = 0
        while at < stop:
            before, source = at, connect()
            try:
                with closing(source):
                    for chunk in source:
                        wanted = chunk[: stop - at]
                        at += len(wanted)
                        if wanted:
                            yield wanted
                        if at == stop:
                            return
                error: Exception = HubError(f"{self.endpoint} ends {file.name} at byte {at} of {file.size}")
            except (_Busy, httpx2.RequestError) as failed:
                error = failed
            tries = 0 if at > before else tries + 1
            self._wait(error, tries, WAITS)

    def json(self, name: str) -> Any:
        """Return the content of a JSON file."""
        try:
            return json.loads(b"".join(self.read(self.file(name))))
        except ValueError as error:
            raise CheckpointError(
                f"{name} of {self.name} is not valid JSON ({error})", "its makers must mend it"
            ) from error

    def together(self, work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """Return the result of ``work`` for each item, from several threads; the first failure stops all of them."""
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            futures = [pool.submit(work, item) for item in items]
            try:
                for future in as_completed(futures):
                    future.result()
            except BaseException:
                self.stop()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return [future.result() for future in futures]

    def ahead(self, work: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[tuple[Item, Result]]:
        """Yield each item with the result of ``work``, while a thread does the next one's."""
        with ThreadPoolExecutor(1) as pool:
            try:
                coming = [pool.submit(work, item) for item in items[:1]]
                for i, item in enumerate(items):
                    result = coming.pop().result()
                    coming = [pool.submit(work, following) for following in items[i + 1 : i + 2]]
                    yield item, result
            except BaseException:
                self.stop()
                raise

    def _try(self, ask: Callable[[], Any], waits: Sequence[float]) -> Any:
        """Return what ``ask`` returns, once it does."""
        for tries in range(1, len(waits) + 2):
            try:
                return ask()
            except (_Busy, httpx2.RequestError) as error:
                self._wait(error, tries, waits)
        raise AssertionError("waiting raises after the last try")

    def _wait(self, error: Exception, tries: int, waits: Sequence[float]) -> None:
        """Wait before a further try; raise ``HubError`` when that was the last, or no other try could help."""
        asked = error.seconds if isinstance(error, _Busy) else None
        if tries > len(waits) or (asked is not None and asked > LONGEST_WAIT):
            raise self._unreachable(error) from error
        if self._stop.wait(asked if asked is not None else waits[tries - 1] if tries else 0):
            raise Stopped

    def _unreachable(self, error: Exception) -> HubError:
        if isinstance(error, HubError):
            return HubError(error.message, "run it again: what has arrived is kept")
        if isinstance(error, _Busy):
            patience = f"; it asks to wait {error.seconds:.0f} seconds" if error.seconds else ""
            return HubError(f"{error}{patience}", "try again later: what has arrived is kept")
        return HubError(
            f"{self.endpoint} cannot be reached ({str(error) or type(error).__name__})",
            "is there a network, and do HF_ENDPOINT and the proxies name what they should? What has arrived is kept",
        )

    def _check(self, answer: httpx2.Response) -> None:
        """Raise for an answer that is none, in words about this repository."""
        status, code = answer.status_code, answer.headers.get("X-Error-Code", "")
        if status < 400:
            return
        said = answer.headers.get("X-Error-Message", "")
        login = "set HF_TOKEN or run `hf auth login`"
        if status in BUSY:
            raise _Busy(f"{_place(answer)} answered {status} {answer.reason_phrase}", _patience(answer))
        if code == "GatedRepo":
            raise HubError(
                f"{self.name} is gated: its makers give it to whom they choose",
                f"ask for it at {self.endpoint}/{self.name}, then {login}",
            )
        if code == "RevisionNotFound":
            raise HubError(f"{self.name} has no revision {self.revision!r}", "give a branch, a tag or a commit")
        if status == 401 and "Invalid" in said:
            raise HubError(f"{self.endpoint} does not accept the token", f"it may have expired: {login}")
        if code == "EntryNotFound" or status == 416:
            raise HubError(f"{_place(answer)} is not what it was when its repository was listed", "run it again")
        if code == "RepoNotFound" or status in (401, 404):
            raise HubError(
                f"there is no repository {self.name} on {self.endpoint}, or it is private",
                f"look at the name; for a private one {login}",
            )
        if status == 403:
            raise HubError(f"{self.endpoint} forbids access to {self.name}{said and f': {said}'}", f"{login}")
        raise HubError(f"{_place(answer)} answered {status} {answer.reason_phrase}{said and f': {said}'}")


class _Busy(Exception):
    def __init__(self, message: str, seconds: float | None) -> None:
        super().__init__(message)
        self.seconds = seconds


def _patience(answer: httpx2.Response) -> float | None:
    """Return the seconds that an answer asks to wait, if it does: a number or a date."""
    value = answer.headers.get("Retry-After", "").strip()
    if value.isdecimal():
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None


def _place(answer: httpx2.Response) -> str:
    """Name an address without its query, which may hold a signature."""
    return str(answer.request.url.copy_with(query=None))


def _same(answer: httpx2.Response, file: File, at: int) -> None:
    """Raise ``HubError`` when headers tell that a file is not the one that was listed."""
    size: str | None = answer.headers.get("Content-Length") if answer.status_code == 200 else None
    if span := re.fullmatch(r"bytes (\d+)-\d+/(\d+)", answer.headers.get("Content-Range", "")):
        size = span[2]
    found = [size, *(a.headers.get("X-Linked-Size") for a in answer.history)]
    tags = [a.headers.get("X-Linked-Etag", "").removeprefix("W/").strip('"') for a in [*answer.history, answer]]
    changed = any(int(s) != file.size for s in found if s) or any(t != file.digest for t in tags if t)
    if changed or (span and int(span[1]) != at):
        raise HubError(f"{file.name} on the hub is not the file that was listed any more", "run it again")


class Remote(NamedTuple):
    """What a repository tells of a model without its weights: as ``Layout`` takes it, and each file's size."""

    raw: dict[str, Any]
    files: list[str]
    headers: list[dict[str, Entry]]
    sizes: list[int]
    name: str
    commit: str

    def layout(self) -> Layout:
        """Return the checkpoint's layout; raises as ``Layout`` does."""
        return Layout(self.raw, self.files, self.headers, self.name)


def remote_headers(name: str, revision: str | None = None) -> Remote:
    """Read only ``config.json`` and the headers of the shards of a repository, a few MB in parallel range requests.

    The index is read where the names of the shards do not tell what belongs to the model. Files that hold only parts
    that are passed over are left out. Raises ``HubError``, and what a ``Snapshot`` raises of the same files.
    """
    with Repository(name, revision) as repo:
        return read_headers(repo)


def read_headers(repo: Repository) -> Remote:
    """Do what ``remote_headers`` does, with a repository that is open."""
    raw = repo.json("config.json")
    family = families.family(raw)
    present = [file for file in repo.files if file.endswith(".safetensors") and "/" not in file]
    told = INDEX in repo.files and not all(NUMBERED.fullmatch(file) for file in present)
    files = shards(raw, () if told else present, repo.json(INDEX) if told else None, f"{repo.name}/{INDEX}")
    listed = [repo.file(file) for file in files]
    found = repo.together(lambda file: _header(repo, file), listed)
    used = [(f, h) for f, h in zip(listed, found, strict=True) if any(family.skipped(name, raw) is None for name in h)]
    if not used:
        raise CheckpointError(f"{repo.name} has no *.safetensors file", "deltafin reads safetensors checkpoints")
    headers = [{name: replace(entry, file=i) for name, entry in header.items()} for i, (_, header) in enumerate(used)]
    return Remote(raw, [f.name for f, _ in used], headers, [f.size for f, _ in used], repo.name, repo.commit)


def _header(repo: Repository, file: File) -> dict[str, Entry]:
    where = f"{repo.name}/{file.name}"
    front = b"".join(repo.read(file, 0, min(FRONT, file.size)))
    end = 8 + header_length(front[:8], file.size, where)
    if end > len(front):
        front += b"".join(repo.read(file, len(front), end))
    return parse_header(front[8:end], file.size, where)
