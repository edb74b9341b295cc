"""A hub on loopback: the endpoints that a download uses, with faults on demand and a log of what was asked.

Small files come from the hub itself, large ones by a redirect to a second server, as from a content network.
``python tests/hub_server.py FOLDER`` serves a folder as ``org/name`` by itself.
"""

import hashlib
import json
import re
import sys
import threading
import urllib.parse
from collections import defaultdict
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import checkpoints
from safetensors.torch import save_file

LARGE = 4096
"""Bytes from which a file is one of Git LFS, and comes from the content network."""

TOKEN = "hf_right"

NAME = "org/name"
SHARDS = [f"model-0000{i}-of-000004.safetensors" for i in (1, 2, 3)]
NEEDED = {*SHARDS, "config.json", "generation_config.json", "tokenizer_config.json", "tiktoken.model", "LICENSE"}
NEEDED |= {"model.safetensors.index.json"}


def example(folder):
    """A small Kimi K3 in three shards with a fourth of vision, and what else lies in a repository: content by name."""
    c = checkpoints.config()
    checkpoints.write(folder, c, checkpoints.tensors(c), shards=3)
    index = folder / "model.safetensors.index.json"
    text = index.read_text(encoding="utf-8").replace("of-000003", "of-000004")
    told = json.loads(text)
    told["weight_map"] |= {"vision_tower.a.weight": "model-00004-of-000004.safetensors"}
    index.write_text(json.dumps(told), encoding="utf-8")
    for name in SHARDS:
        (folder / name.replace("of-000004", "of-000003")).rename(folder / name)
    vision = {"vision_tower.a.weight": checkpoints.random("vision", 40, 50)}
    save_file(vision, folder / "model-00004-of-000004.safetensors")
    (folder / "tiktoken.model").write_bytes(b"aGk= 0\n" * 900)
    for name in ("tokenizer_config.json", "generation_config.json"):
        (folder / name).write_text(json.dumps({"name": name}), encoding="utf-8")
    for name in ("LICENSE", "README.md", "modeling_kimi.py", "figure.png", "pytorch_model.bin.index.json"):
        (folder / name).write_text(name, encoding="utf-8")
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@dataclass
class Asked:
    """One request: which server it came to, and the headers that matter."""

    server: str
    method: str
    path: str
    range: str | None
    token: str | None
    code: int = 0
    sent: int = 0


@dataclass
class Repo:
    """Files by commit, and commits by name of a branch; ``access`` is open, private or gated."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    access: str = "open"


def digest(content):
    if len(content) >= LARGE:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class HubServer:
    """Both servers. ``faults`` holds, by file name, what to do with the next requests for its content:

    a number cuts the connection after so many bytes, ``("status", code, headers)`` answers that instead, ``bytes`` are
    served in place of the content, ``"no ranges"`` ignores a range, ``"short"`` ends early but orderly, and a function
    is called with how many bytes were asked for, before anything is sent. A fault of ``"api"`` is one of the listing.
    """

    def __init__(self):
        self.repos, self.log = {}, []
        self.faults = defaultdict(list)
        self.lock = threading.Lock()
        self.servers = {}
        for name in ("hub", "cdn"):
            handler = type("Handler", (_Handler,), {"hub": self, "server_name": name})
            server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
            server.daemon_threads = True
            server.handle_error = lambda *_: None  # a client that was killed
            self.servers[name] = server
        self.url, self.cdn = (f"http://127.0.0.1:{self.servers[s].server_port}" for s in ("hub", "cdn"))
        self.threads = [threading.Thread(target=s.serve_forever, args=(0.02,)) for s in self.servers.values()]

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        for server in self.servers.values():
            server.shutdown()
            server.server_close()
        for thread in self.threads:
            thread.join()

    def publish(self, name, files, branch="main", access="open"):
        """Publish files (a folder, or contents by name) as a new commit; return the commit."""
        if isinstance(files, Path):
            files = {f.relative_to(files).as_posix(): f.read_bytes() for f in files.rglob("*") if f.is_file()}
        repo = self.repos.setdefault(name, Repo())
        repo.access = access
        commit = hashlib.sha1(repr([(n, digest(c)) for n, c in sorted(files.items())]).encode()).hexdigest()
        repo.commits[commit] = dict(files)
        repo.branches[branch] = commit
        return commit

    def asked(self, name=None, server=None):
        """The requests for a file's content that were answered with some of it."""
        with self.lock:
            found = [a for a in self.log if a.code in (200, 206) and "/api/" not in a.path]
        return [
            a for a in found if (name is None or a.path.partition("?")[0].endswith(name)) and server in (None, a.server)
        ]

    def next_fault(self, name):
        with self.lock:
            return self.faults[name].pop(0) if self.faults[name] else None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer
    server_name: str

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def answer(self):
        token = self.headers.get("Authorization")
        self.entry = Asked(self.server_name, self.command, self.path, self.headers.get("Range"), token)
        with self.hub.lock:
            self.hub.log.append(self.entry)
        path = urllib.parse.unquote(
            re.sub(r"^http://[^/]+", "", self.path).partition("?")[0]
        )  # whole, from a proxy's client
        try:
            if self.server_name == "cdn":
                _, name, commit, file = path.split("/", 3)
                return self.content(file, self.hub.repos[name.replace("--", "/")].commits[commit][file], {})
            if api := re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/(.+)", path):
                return self.api(*api.groups())
            if resolve := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                return self.resolve(*resolve.groups())
            return self.refuse(404, "RepoNotFound")
        except ConnectionError:
            self.close_connection = True

    def find(self, name, revision):
        """The repository and the commit, or ``None`` when the answer has been given."""
        repo = self.hub.repos.get(name)
        token = (self.entry.token or "").removeprefix("Bearer ")
        if token and token != TOKEN:
            return self.refuse(401, "", "Invalid credentials in Authorization header")
        if repo is None or (repo.access == "private" and token != TOKEN):
            return self.refuse(404 if token else 401, "RepoNotFound")
        commit = repo.branches.get(revision, revision)
        if commit not in repo.commits:
            return self.refuse(404, "RevisionNotFound")
        return repo, commit

    def api(self, name, kind, revision):
        fault = self.hub.next_fault("api")
        if fault is not None and fault[0] == "status":
            return self.refuse(fault[1], "", headers=fault[2])
        if not (found := self.find(name, revision)):
            return None
        repo, commit = found
        listing = []
        for file, content in repo.commits[commit].items():
            entry = {"rfilename": file}
            if "blobs=" in self.path or kind == "tree":
                entry |= {"size": len(content), "blobId": hashlib.sha1(file.encode()).hexdigest()}
                if len(content) >= LARGE:
                    entry["lfs"] = {"size": len(content), "sha256": digest(content), "pointerSize": 134}
                else:
                    entry["blobId"] = digest(content)
            listing.append(entry)
        body = {"id": name, "sha": commit, "siblings": listing, "gated": repo.access == "gated"}
        if kind == "tree":
            body = [
                {"type": "file", "path": e["rfilename"], "size": e["size"], "oid": e["blobId"]}
                | ({"lfs": {"oid": e["lfs"]["sha256"], "size": e["size"], "pointerSize": 134}} if "lfs" in e else {})
                for e in listing
            ]
        return self.send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def resolve(self, name, revision, file):
        if not (found := self.find(name, revision)):
            return None
        repo, commit = found
        if repo.access == "gated" and self.entry.token != f"Bearer {TOKEN}":
            return self.refuse(403 if self.entry.token else 401, "GatedRepo")
        if file not in repo.commits[commit]:
            return self.refuse(404, "EntryNotFound")
        content = repo.commits[commit][file]
        told = {"X-Repo-Commit": commit}
        if len(content) < LARGE:
            return self.content(file, content, told | {"ETag": f'"{digest(content)}"'})
        location = f"{self.hub.cdn}/{name.replace('/', '--')}/{commit}/{urllib.parse.quote(file)}?signature=secret"
        linked = {"X-Linked-Etag": f'"{digest(content)}"', "X-Linked-Size": str(len(content))}
        return self.send(302, b"", told | linked | {"Location": location})

    def content(self, file, content, headers):
        fault = self.hub.next_fault(file)
        if isinstance(fault, bytes):
            content, fault = fault, None
        if isinstance(fault, tuple):
            return self.refuse(fault[1], "", headers=fault[2])
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.entry.range or "")
        if asked and fault != "no ranges":
            start, stop = int(asked[1]), min(int(asked[2] or sys.maxsize) + 1, len(content))
            if start >= len(content):
                return self.send(416, b"", {"Content-Range": f"bytes */{len(content)}"})
            code, headers = 206, headers | {"Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"}
        else:
            code, start, stop = 200, 0, len(content)
        body = content[start:stop]
        if callable(fault):
            fault(len(body))
        if fault == "short":
            return self.send(code, body[: len(body) // 2], headers)
        return self.send(code, body, headers, cut=fault if isinstance(fault, int) else None)

    def refuse(self, code, error, message="", headers=None):
        told = {"X-Error-Code": error, "X-Error-Message": message}
        self.send(code, b"{}", {k: v for k, v in told.items() if v} | (headers or {}))

    def send(self, code, body, headers, cut=None):
        """Answer; with ``cut`` the connection ends after so many bytes of the body."""
        self.entry.code, self.entry.sent = code, len(body) if cut is None else min(cut, len(body))
        self.send_response(code)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body[: len(body) if cut is None else cut])
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(2)


if __name__ == "__main__":
    with HubServer() as hub:
        hub.publish("org/name", Path(sys.argv[1]))
        print(hub.url, flush=True)
        threading.Event().wait()
