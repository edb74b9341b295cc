"""Reading from a hub: what is asked, what is refused, and what comes of a bad line."""

import re
import socket
import time
from email.utils import formatdate

import checkpoints
import pytest
from hub_server import NAME, NEEDED, SHARDS, TOKEN, HubServer

from deltafin import hub as module
from deltafin.errors import CheckpointError, ConfigError, HubError
from deltafin.hub import Repository, remote_headers
from deltafin.snapshot import Snapshot

# What is read


def test_headers_tell_what_the_files_tell(hub, published, tmp_path):
    hub.publish(NAME, published)
    remote = remote_headers(NAME)
    for name in NEEDED:
        (tmp_path / name).write_bytes(published[name])
    local = Snapshot(tmp_path).layout
    got = remote.layout()
    assert got.entries == local.entries
    assert (got.totals, got.config) == (local.totals, local.config)
    assert remote.files == SHARDS
    assert remote.sizes == [len(published[name]) for name in SHARDS]
    assert remote.commit == hub.repos[NAME].branches["main"]


def test_only_the_front_of_a_file_is_read(hub, published, monkeypatch):
    monkeypatch.setattr(module, "FRONT", 1000)
    hub.publish(NAME, published)
    remote_headers(NAME)
    for name in SHARDS:
        header = 8 + int.from_bytes(published[name][:8], "little")
        assert [a.sent for a in hub.asked(name, "cdn")] == [1000, header - 1000]
    assert sum(a.sent for a in hub.asked()) < sum(map(len, published.values())) / 2


@pytest.mark.parametrize("length", [*range(99_990, 100_002), *range((1 << 17) - 10, (1 << 17) + 10, 3)])
def test_headers_of_any_length_are_read(hub, published, length):
    files = dict(published)
    for name in SHARDS[:1]:
        old = int.from_bytes(files[name][:8], "little")
        text = files[name][8 : 8 + old].rstrip().ljust(length)
        files[name] = length.to_bytes(8, "little") + text + files[name][8 + old :]
    hub.publish(NAME, files)
    remote = remote_headers(NAME)
    assert min(e.start for e in remote.headers[0].values()) == 8 + length


def test_the_index_is_read_only_where_names_do_not_tell(hub, published):
    hub.publish(NAME, published)
    assert remote_headers(NAME).files == SHARDS
    assert not hub.asked("index.json")
    hub.publish(NAME, published | {"oracle.safetensors": b"not of the model"})
    assert remote_headers(NAME).files == SHARDS
    assert hub.asked("index.json")
    assert not hub.asked("oracle.safetensors")


def test_a_single_file_without_an_index_is_a_model(hub, tmp_path):
    c = checkpoints.config()
    folder = checkpoints.write(tmp_path / "single", c, checkpoints.tensors(c))
    hub.publish(NAME, folder)
    assert remote_headers(NAME).files == ["model.safetensors"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config.json": b"{"}, r"config\.json of org/name is not valid JSON"),
        ({"config.json": b'{"model_type": "bert"}'}, r"model_type 'bert'.*not supported"),
        ({"config.json": None}, r"org/name has no config\.json at commit"),
        ({SHARDS[1]: None}, rf"org/name has no {SHARDS[1]}"),
        ({SHARDS[1]: b"a web page" * 900}, rf"org/name/{SHARDS[1]} is not a safetensors file"),
        ({SHARDS[0]: b"tiny"}, rf"org/name/{SHARDS[0]} is not a safetensors file \(4 bytes\)"),
        (
            dict.fromkeys([*SHARDS, "model-00004-of-000004.safetensors", "model.safetensors.index.json"]),
            r"safetensors file",
        ),
    ],
)
def test_what_is_wrong_with_a_repository_is_named(hub, published, change, message):
    files = {name: content for name, content in (published | change).items() if content is not None}
    hub.publish(NAME, files)
    with pytest.raises((CheckpointError, ConfigError, HubError), match=message):
        remote_headers(NAME)


def test_a_cut_header_is_an_error_with_both_sizes(hub, published):
    cut = published[SHARDS[0]][:-10]
    hub.publish(NAME, published | {SHARDS[0]: cut})
    with pytest.raises(CheckpointError, match=rf"org/name/{SHARDS[0]} has {len(cut)} bytes.* {len(cut) + 10}"):
        remote_headers(NAME)


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub, published):
    first = hub.publish(NAME, published)
    second = hub.publish(NAME, published | {"NOTICE": b"new"}, branch="refs/pr/1")
    for revision, commit in ((None, first), ("main", first), ("refs/pr/1", second), (second, second)):
        with Repository(NAME, revision) as repo:
            assert repo.commit == commit
            assert all("/" not in a.path.split("/revision/")[-1] for a in hub.log[-1:])


# Who asks


def test_the_token_goes_to_the_hub_and_nowhere_else(hub, published):
    hub.publish(NAME, published, access="private")
    remote_headers(NAME)
    assert {a.token for a in hub.log if a.server == "hub"} == {f"Bearer {TOKEN}"}
    assert {a.token for a in hub.log if a.server == "cdn"} == {None}


def test_without_a_token_none_is_sent(hub, anonymous, published):
    hub.publish(NAME, published)
    remote_headers(NAME)
    assert {a.token for a in hub.log} == {None}


def test_the_environment_is_read_when_something_is_asked(hub, published, monkeypatch):
    hub.publish(NAME, published)
    with HubServer() as other:
        commit = other.publish(NAME, published | {"NOTICE": b"of the other"})
        monkeypatch.setenv("HF_ENDPOINT", f"{other.url}/")
        assert remote_headers(NAME).commit == commit
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")
    monkeypatch.setenv("HTTP_PROXY", hub.url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    remote_headers(NAME)
    assert hub.log[0].path.startswith("http://hub.invalid/api/models/org/name/")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    asked = len(hub.log)
    with pytest.raises(HubError, match="HF_HUB_OFFLINE is set"):
        remote_headers(NAME)
    assert len(hub.log) == asked


# What is refused


@pytest.mark.parametrize(
    ("access", "token", "name", "message", "hint"),
    [
        ("open", TOKEN, "org/gone", "there is no repository org/gone on http.*, or it is private", "look at the name"),
        ("open", None, "org/gone", "there is no repository org/gone", "hf auth login"),
        ("private", None, NAME, "there is no repository org/name on .*private", "HF_TOKEN"),
        ("gated", None, NAME, "org/name is gated", "ask for it at http.*/org/name, then set HF_TOKEN"),
        ("open", "hf_wrong", NAME, "does not accept the token", "expired"),
    ],
)
def test_a_refusal_says_what_to_do(hub, anonymous, published, monkeypatch, access, token, name, message, hint):
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    hub.publish(NAME, published, access=access)
    with pytest.raises(HubError, match=message) as error:
        remote_headers(name)
    assert re.search(hint, error.value.hint or "")


def test_an_unknown_revision_is_named(hub, published):
    hub.publish(NAME, published)
    with pytest.raises(HubError, match="org/name has no revision 'v2'"):
        remote_headers(NAME, "v2")


def test_no_network_is_said_with_the_address(hub, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free.getsockname()[1]}")
        with pytest.raises(HubError, match=r"http://127\.0\.0\.1:\d+ cannot be reached") as error:
            remote_headers(NAME)
    assert "is there a network" in (error.value.hint or "")


@pytest.mark.parametrize(
    "body", [b"<html>", b"{}", b"[1]", b'{"sha": "x", "siblings": []}', b'{"sha": 3, "siblings": []}']
)
def test_a_server_that_is_no_hub_is_told_from_one(hub, monkeypatch, body):
    monkeypatch.setattr("hub_server._Handler.api", lambda self, *_: self.send(200, body, {}))
    with pytest.raises(HubError, match=r"answered no JSON|does not tell sizes and hashes|as commit"):
        remote_headers(NAME)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("HTTP_PROXY", "gopher://127.0.0.1:1", "proxy, certificates or token"),
        ("SSL_CERT_FILE", "/nowhere/certificates.pem", "proxy, certificates or token"),
        ("HF_TOKEN", "hf_naïve", "proxy, certificates or token"),
        ("HF_ENDPOINT", "http://[::1", "is no address"),
        ("HF_ENDPOINT", "huggingface.co", "huggingface.co cannot be reached"),
    ],
)
def test_an_environment_that_cannot_be_used_is_an_error_of_ours(hub, monkeypatch, name, value, message):
    monkeypatch.setenv(name, value)
    with pytest.raises(HubError, match=re.escape(message)):
        remote_headers(NAME)


def test_a_redirect_without_end_is_an_error_of_ours(hub, published):
    hub.publish(NAME, published)
    hub.faults["config.json"] = [("status", 302, {"Location": f"/{NAME}/resolve/main/config.json"})] * 100
    with pytest.raises(HubError, match="cannot be reached"):
        remote_headers(NAME)


def test_an_error_never_shows_a_signature(hub, published):
    hub.publish(NAME, published)
    hub.faults[SHARDS[0]] = [("status", 418, {})]
    with pytest.raises(HubError, match=f"{SHARDS[0]} answered 418") as error:
        remote_headers(NAME)
    assert "secret" not in str(error.value)


# A bad line


def content(name):
    with Repository(NAME) as repo:
        return b"".join(repo.read(repo.file(name)))


@pytest.mark.parametrize("cuts", [[0], [1], [4095, 0, 7], [100, 100, 100, 100, 100, 100, 100], [0, 0, 0]])
def test_a_cut_connection_is_gone_on_with(hub, published, cuts):
    hub.publish(NAME, published)
    hub.faults[SHARDS[0]] = list(cuts)
    assert content(SHARDS[0]) == published[SHARDS[0]]
    asked = hub.asked(SHARDS[0], "cdn")
    assert len(asked) == len(cuts) + 1
    assert sum(a.sent for a in asked) == len(published[SHARDS[0]])  # no byte twice
    at = 0
    for a in asked:
        assert a.range == (f"bytes={at}-{len(published[SHARDS[0]]) - 1}" if at else None)
        at += a.sent


def test_a_line_without_progress_is_given_up(hub, published):
    hub.publish(NAME, published)
    hub.faults[SHARDS[0]] = [9, *[0] * 4]
    with pytest.raises(HubError, match="cannot be reached") as error:
        content(SHARDS[0])
    assert "what has arrived is kept" in (error.value.hint or "").lower()


def test_an_answer_that_ends_early_is_gone_on_with(hub, published):
    hub.publish(NAME, published)
    hub.faults[SHARDS[0]] = [5000, "short", "short"]
    assert content(SHARDS[0]) == published[SHARDS[0]]


def test_a_server_without_ranges_is_read_from_its_beginning(hub, published):
    hub.publish(NAME, published)
    hub.faults[SHARDS[0]] = [5000, "no ranges"]
    assert content(SHARDS[0]) == published[SHARDS[0]]


@pytest.mark.parametrize("code", [408, 429, 500, 502, 503, 504])
@pytest.mark.parametrize("at", ["api", SHARDS[0]])
def test_a_busy_hub_is_asked_again(hub, published, code, at):
    hub.publish(NAME, published)
    past = formatdate(time.time() - 60, usegmt=True)
    hub.faults[at] = [("status", code, {"Retry-After": "0"}), ("status", code, {"Retry-After": past})]
    assert content(SHARDS[0]) == published[SHARDS[0]]


def test_a_hub_that_asks_for_patience_gets_it(hub, published, monkeypatch):
    hub.publish(NAME, published)
    hub.faults[SHARDS[0]] = [("status", 429, {"Retry-After": "7"})]
    waited = []
    with Repository(NAME) as repo:
        monkeypatch.setattr(repo._stop, "wait", lambda seconds: waited.append(seconds))
        assert b"".join(repo.read(repo.file(SHARDS[0]))) == published[SHARDS[0]]
    assert waited == [7]


def test_a_hub_that_asks_for_an_hour_is_not_waited_for(hub, published):
    hub.publish(NAME, published)
    hub.faults[SHARDS[0]] = [("status", 429, {"Retry-After": "3600"})]
    with pytest.raises(HubError, match="answered 429 Too Many Requests; it asks to wait 3600 seconds"):
        content(SHARDS[0])


@pytest.mark.parametrize("cut", [None, 5000])
def test_a_file_that_changes_size_between_two_requests_is_noticed(hub, published, cut):
    hub.publish(NAME, published)
    hub.faults[SHARDS[0]] = [*([cut] if cut else []), published[SHARDS[0]] + b"more"]
    with pytest.raises(HubError, match=f"{SHARDS[0]} on the hub is not the file that was listed any more"):
        content(SHARDS[0])


def test_a_file_that_changes_under_its_commit_is_noticed(hub, published):
    commit = hub.publish(NAME, published)
    with Repository(NAME) as repo:
        for name in (SHARDS[0], "tokenizer_config.json"):
            file = repo.file(name)
            hub.repos[NAME].commits[commit][name] = bytes(len(published[name]))
            if name == SHARDS[0]:  # the hub tells its hash beside a redirect
                with pytest.raises(HubError, match=f"{name} on the hub is not the file that was listed"):
                    b"".join(repo.read(file))
            del hub.repos[NAME].commits[commit][name]
            with pytest.raises(HubError, match="is not what it was when its repository was listed"):
                b"".join(repo.read(file))
