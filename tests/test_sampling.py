"""Sampling against a few lines of numpy, and what must never be sampled."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from deltafin import Sampler
from deltafin.errors import NumericsError, UsageError

LOGITS = st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=30)
ANY = torch.Generator()


def softmax(logits) -> np.ndarray:
    e = np.exp(np.array(logits, np.float64) - np.max(logits))
    return e / e.sum()


def probabilities(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> tuple[np.ndarray, bool]:
    """The definition, token by token; and whether no token stands on the border of a cut."""
    p = softmax(np.array(logits, np.float64) / temperature)
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))[: top_k or None]
    enough, before, kept, clear = top_p * sum(p[order]), 0.0, np.zeros_like(p), True
    for i in order:
        clear &= top_p == 1.0 or abs(before - enough) > 1e-9
        clear &= min_p in (0.0, 1.0) or abs(p[i] - min_p * p.max()) > 1e-9
        if before < enough and p[i] >= min_p * p.max():
            kept[i] = p[i]
        before += p[i]
    return kept / kept.sum(), clear


@given(
    LOGITS,
    st.floats(0.05, 5),
    st.integers(0, 40),
    st.floats(0.01, 1) | st.just(1.0),
    st.floats(0, 1) | st.just(0.0),
)
def test_probabilities_are_those_of_the_definition(logits, temperature, top_k, top_p, min_p):
    wanted, clear = probabilities(logits, temperature, top_k, top_p, min_p)
    assume(clear)
    got = Sampler(temperature, top_k, top_p, min_p).probabilities(torch.tensor(logits))
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got.numpy(), wanted, atol=1e-6)


@pytest.mark.parametrize(
    ("sampler", "left"),
    [
        (Sampler(1.0), [0, 1, 2, 3, 4]),
        (Sampler(1.0, top_k=2), [1, 3]),
        (Sampler(1.0, top_k=9), [0, 1, 2, 3, 4]),
        (Sampler(1.0, top_p=0.39), [1]),
        (Sampler(1.0, top_p=0.41), [1, 3]),
        (Sampler(1.0, top_p=0.95), [0, 1, 2, 3]),
        (Sampler(1.0, min_p=0.7), [1, 3]),
        (Sampler(1.0, min_p=1.0), [1]),
        (Sampler(1.0, top_k=3, top_p=0.8), [1, 3]),  # 0.4 and 0.3 of 0.85 are enough
        (Sampler(0.5, min_p=0.4), [1, 3]),  # the temperature comes first: 0.16, 0.09, 0.0225
    ],
    ids=repr,
)
def test_each_parameter_leaves_the_right_tokens(sampler, left):
    p = np.array([0.10, 0.40, 0.15, 0.30, 0.05])
    got = sampler.probabilities(torch.tensor(p).log()).numpy()
    assert got.nonzero()[0].tolist() == left
    assert got.sum() == pytest.approx(1)
    wanted = p[left] ** (1 / sampler.temperature)
    np.testing.assert_allclose(got[left], wanted / wanted.sum(), rtol=1e-6)


@given(LOGITS)
def test_greedy_is_the_likeliest_and_the_lower_id_of_equals(logits):
    assert Sampler()(torch.tensor(logits), [], ANY) == logits.index(max(logits))


@given(LOGITS, st.floats(0.01, 5), st.integers(0, 2**63))
def test_the_top_one_is_greedy_and_so_is_nearly_no_temperature(logits, temperature, seed):
    chance = torch.Generator().manual_seed(seed)
    assert Sampler(temperature, top_k=1)(torch.tensor(logits), [], chance) == logits.index(max(logits))
    apart = sorted(logits)[-2:]
    if len(set(apart)) == len(apart) == 2 and apart[1] - apart[0] > 1e-3:
        assert Sampler(1e-6)(torch.tensor(logits), [], chance) == logits.index(max(logits))


@pytest.mark.parametrize("temperature", [1e-6, 1e-300, 5e-324, 1e30])
def test_any_temperature_gives_finite_probabilities(temperature):
    p = Sampler(temperature).probabilities(torch.tensor([3e4, -3e4, 3e4, 0.0]))
    assert bool(torch.isfinite(p).all())
    assert p.sum().item() == pytest.approx(1)
    wanted = [0.5, 0, 0.5, 0] if temperature < 1 else [0.25] * 4
    np.testing.assert_allclose(p.numpy(), wanted, atol=1e-6)


@given(LOGITS, st.lists(st.integers(0, 29), max_size=8), st.floats(0.5, 2))
def test_repetition_is_punished_once_however_often_it_was_said(logits, seen, penalty):
    seen = [i for i in seen if i < len(logits)]
    wanted = [
        (x / penalty if x > 0 else x * penalty) if i in seen else x for i, x in enumerate(np.float32(logits).tolist())
    ]
    top = sorted(wanted)[-2:]
    assume(len(wanted) == 1 or top[1] - top[0] > 1e-4)
    given_ = torch.tensor(logits)
    assert Sampler(repetition_penalty=penalty)(given_, seen, ANY) == int(np.argmax(wanted))
    assert given_.tolist() == torch.tensor(logits).tolist()  # the session's logits stay as they were


@pytest.mark.parametrize(
    ("logits", "seen", "choice"),
    [
        ([2.0, 1.9, 1.8, 1.75], [], 0),
        ([2.0, 1.9, 1.8, 1.75], [2, 0, 1], 3),  # 1.67, 1.58 and 1.5 are left of the others
        ([2.0, 1.5], [0, 0], 0),  # once: 1.67; twice it would be 1.39
        ([-1.0, -1.1], [0], 1),  # -1.2: below zero the penalty pushes down as well
    ],
)
def test_a_penalty_can_change_the_choice(logits, seen, choice):
    assert Sampler(repetition_penalty=1.2)(torch.tensor(logits), seen, ANY) == choice


def draws(sampler: Sampler, logits: torch.Tensor, count: int) -> list[int]:
    chance = sampler.generator()
    return [sampler(logits, [], chance) for _ in range(count)]


def test_a_seed_repeats_and_no_seed_does_not():
    logits = torch.zeros(1000)
    first = draws(Sampler(1.0, seed=7), logits, 20)
    assert first == draws(Sampler(1.0, seed=7), logits, 20)
    assert first != draws(Sampler(1.0, seed=8), logits, 20)
    assert draws(Sampler(1.0), logits, 20) != draws(Sampler(1.0), logits, 20)


def chi_square(drawn: list[int], p: np.ndarray) -> float:
    counts = Counter(drawn)
    return sum((counts[i] - len(drawn) * x) ** 2 / (len(drawn) * x) for i, x in enumerate(p) if x > 0)


def test_draws_follow_the_probabilities():
    logits = [2.0, 1.0, 0.0, -1.0, 0.5, 1.5, -4.0, 0.25]
    sampler = Sampler(0.8, top_k=6, seed=11)
    drawn = draws(sampler, torch.tensor(logits), 5000)
    p, _ = probabilities(logits, 0.8, 6)
    assert set(drawn) == {i for i, x in enumerate(p) if x > 0}
    assert chi_square(drawn, p) < 25  # five degrees of freedom: one honest seed in 7,000 is above
    assert chi_square(drawn, probabilities(logits, 1.0, 6)[0]) > 40  # and with a wrong temperature every seed is


BAD = [
    {"temperature": -0.1},
    {"temperature": math.nan},
    {"temperature": math.inf},
    {"top_k": -1},
    {"top_p": 0.0},
    {"top_p": 1.1},
    {"top_p": math.nan},
    {"min_p": -0.1},
    {"min_p": 1.5},
    {"min_p": math.nan},
    {"repetition_penalty": 0.0},
    {"repetition_penalty": -1.0},
    {"repetition_penalty": math.inf},
    {"seed": 2**64},
    {"seed": -(2**63) - 1},
]


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_a_parameter_that_cannot_work_is_refused_by_name(bad):
    ((name, value),) = bad.items()
    with pytest.raises(UsageError, match=rf"{name} {value}"):
        Sampler(**bad)


@pytest.mark.parametrize("seed", [0, -1, 2**64 - 1, -(2**63)])
def test_every_other_seed_works(seed):
    assert draws(Sampler(1.0, seed=seed), torch.zeros(50), 5) == draws(Sampler(1.0, seed=seed), torch.zeros(50), 5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("sampler", [Sampler(), Sampler(1.0), Sampler(0.7, 5, 0.9, 0.1, 1.2, 3)], ids=repr)
def test_what_is_not_a_number_is_never_sampled(sampler, bad):
    logits = torch.zeros(20)
    logits[13] = bad
    with pytest.raises(NumericsError, match="not a number"):
        sampler(logits, [1, 2], ANY)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_logits_of_any_type_will_do(dtype):
    logits = torch.tensor([0.0, 3.0, 1.0], dtype=dtype)
    assert Sampler()(logits, [], ANY) == 1
    np.testing.assert_allclose(Sampler(1.0).probabilities(logits).numpy(), softmax([0, 3, 1]), rtol=1e-6)
