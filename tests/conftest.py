"""Fixtures that every test may use: models, opened once a worker."""

import os
from pathlib import Path

import hypothesis
import pytest
import torch

import deltafin

DATA = Path(__file__).parent / "data"

hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=30)
hypothesis.settings.register_profile("search", deadline=None, max_examples=300)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

torch.set_num_threads(1)  # tests run in several processes


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
