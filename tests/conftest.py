"""Fixtures that every test may use: models, opened once a worker."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import hub_server
import hypothesis
import pytest
import torch

import deltafin
from deltafin import ops

DATA = Path(__file__).parent / "data"

TIMELESS = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("fixed", derandomize=True, max_examples=30, **TIMELESS)
hypothesis.settings.register_profile("search", max_examples=300, **TIMELESS)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

torch.set_num_threads(1)  # tests run in several processes


def pytest_configure(config: pytest.Config) -> None:
    """Compile the kernels before several workers start: each would do all of it."""
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        from deltafin.cpu_kernels import warm

        warm.compile_all()


@pytest.fixture
def unpinned() -> Iterator[None]:
    """Let a test use several threads: afterwards there is one again, and it may run on any core."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    yield
    ops.ready("numba", 1, [])
    torch.set_num_threads(1)
    if cores:
        os.sched_setaffinity(0, cores)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C is ignored where a shell runs the tests in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def tiny() -> deltafin.Model:
    """A random Kimi K3 of nine small layers, without a vocabulary."""
    return deltafin.load(DATA / "kimi-k3-tiny")


@pytest.fixture(scope="session")
def linear() -> deltafin.Model:
    """A random Kimi Linear of six small layers, without a vocabulary."""
    return deltafin.load(DATA / "kimi-linear")


@pytest.fixture(scope="session")
def nano() -> deltafin.Model:
    """The embedded model."""
    return deltafin.load("nano")


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What the repository of a small model holds: content by name."""
    return hub_server.example(tmp_path_factory.mktemp("published"))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[hub_server.HubServer]:
    """A hub that the environment points to, with empty places to store in; no try waits."""
    for name in ("HF_HUB_OFFLINE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setattr("deltafin.hub.WAITS", (0, 0, 0))
    with hub_server.HubServer() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_TOKEN", hub_server.TOKEN)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
        yield server


@pytest.fixture
def anonymous(monkeypatch: pytest.MonkeyPatch) -> None:
    """No token, wherever it might come from."""
    from huggingface_hub import constants

    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nowhere/token")
