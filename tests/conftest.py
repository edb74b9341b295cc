"""Fixtures that every test may use: models, opened once a worker."""

import os
from collections.abc import Iterator
from pathlib import Path

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
