"""Elementary functions of the CPU's kernels against float64, wherever a number can lie."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafin.cpu_kernels import mathematics as m

ULP = 2.0**-23
TINY = 2.0**-126
"""The smallest normal number: what is smaller comes out as this or smaller."""

numbers = st.floats(-200, 200, width=32) | st.floats(width=32) | st.sampled_from([0.0, 88.7, 88.73, -87.3, 0.625])
vectors = st.lists(numbers, min_size=1, max_size=70).map(lambda x: np.array(x, np.float32))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softplus(x):
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def close(got, want, ulps, size=1.0):
    """Within some units in the last place; not a number, or too large, where it is so; tiny times ``size`` is tiny."""
    with np.errstate(over="ignore"):
        bounded = np.abs(want) <= np.exp(88.7)
    good = np.abs(got - want) <= ulps * ULP * np.abs(want) + 2 * TINY * size
    beyond = np.abs(got) >= 3e38
    return np.all(np.where(np.isnan(want), np.isnan(got), np.where(bounded, good, beyond)))


def evaluate(function, x, *more):
    y = np.full_like(x, np.nan)
    function(x, *more, y)
    return y


@pytest.fixture(autouse=True)
def quiet():
    with np.errstate(all="ignore"):
        yield


@given(vectors)
def test_exponentials(x):
    assert close(evaluate(m.exps, x, np.float32(0)), np.exp(x.astype(np.float64)), 4)


@given(vectors)
def test_sigmoids(x):
    wide = x.astype(np.float64)
    assert close(evaluate(m.sigmoids, x), sigmoid(wide), 6)
    x = x[~np.isinf(x)]
    wide = x.astype(np.float64)
    assert close(evaluate(m.silus, x), wide * sigmoid(wide), 7, np.abs(wide))


@given(vectors, st.floats(0.125, 16, width=32), st.floats(-10, 10, width=32))
def test_log_decays(z, speed, bias):
    bias, speed = np.full_like(z, bias), np.float32(speed)
    x = (z + bias).astype(np.float64)
    slow = evaluate(m.log_decays, z, speed, bias, np.float32(0))
    assert close(slow, -np.float64(speed) * softplus(x), 8, 16)
    y = (speed * (z + bias)).astype(np.float64)
    assert close(evaluate(m.log_decays, z, speed, bias, np.float32(-5)), -5 * sigmoid(y), 8, 5)


@given(vectors)
def test_a_number_alone_has_the_bits_that_it_has_in_a_vector(x):
    y = evaluate(m.sigmoids, x)
    alone = np.concatenate([evaluate(m.sigmoids, x[i : i + 1]) for i in range(len(x))])
    assert np.array_equal(y, alone, equal_nan=True)


@given(vectors, st.floats(0.5, 30, width=32))
def test_what_saturates(x, limit):
    limit = np.float32(limit)
    y = evaluate(m.situ_gated, x, np.ones_like(x), limit, np.float32(1))
    wide, most = x.astype(np.float64), np.float64(limit)
    want = most * np.tanh((x / limit).astype(np.float64)) * sigmoid(wide) * np.tanh(1.0)
    assert close(y, want, 16, most)


@given(vectors)
def test_in_place_is_as_elsewhere(x):
    y, z = evaluate(m.silu_gated, x, x[::-1].copy()), x.copy()
    m.silu_gated(z, x[::-1].copy(), z)
    assert np.array_equal(y, z, equal_nan=True)
