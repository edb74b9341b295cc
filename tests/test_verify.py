"""The user's proof: it passes, it covers everything, and it would notice."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from deltafin import ops, verify
from deltafin.ops import reference

ALL = list(verify.implementations())


@pytest.mark.parametrize(("op", "name", "implementation"), ALL, ids=[f"{op}: {name}" for op, name, _ in ALL])
def test_every_implementation_stays_within_its_bound(op, name, implementation):
    row = verify.check(op, name, implementation)
    assert row.ok, row


def test_every_operation_has_cases_and_a_row():
    assert sorted(verify.CASES) == sorted([*ops.ROWS, *verify.PARTS])
    assert {op for op, _, _ in ALL} == set(verify.CASES)


def test_a_new_backend_appears_by_itself(monkeypatch):
    def rms_norm(x, weight, eps):
        return reference.rms_norm(x, weight, eps) * 1.01

    faulty = replace(ops.REFERENCE, name="faulty", rms_norm=rms_norm)
    load = ops.load
    monkeypatch.setattr(ops, "load", lambda name: faulty if name == "numba" else load(name))
    row = next(r for r in verify.run() if r.implementation == "faulty, float32")
    assert row.op == "rms_norm"
    assert not row.ok


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_result_that_is_not_a_number_breaks_the_bound(value):
    def broken(x, weight, eps):
        y = reference.rms_norm(x, weight, eps)
        y[..., 0] = value
        return y

    assert not verify.check("rms_norm", "broken, float32", broken).ok


FAULTS = {
    "state transposed": lambda q, k, v, g, beta, S: (reference.delta_rule(q, k, v, g, beta, S), S.mul_(0))[0],
    "decay after": lambda q, k, v, g, beta, S: reference.delta_rule(q, k, v, g.roll(1, 1), beta, S),
    "no beta": lambda q, k, v, g, beta, S: reference.delta_rule(q, k, v, g, torch.ones_like(beta), S),
    "one percent": lambda q, k, v, g, beta, S: reference.delta_rule(q, k, v, g * 1.01, beta, S),
    "query scaled": lambda q, k, v, g, beta, S: reference.delta_rule(q, k, v, g, beta, S) * 1.0001,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_noticed(fault):
    assert not verify.check("delta_rule", f"{fault}, float32", FAULTS[fault]).ok


def test_a_model_passes_and_a_damaged_state_does_not(tiny, monkeypatch):
    rows = [check(tiny) for check in verify.MODEL_CHECKS.values()]
    assert all(row.ok for row in rows), rows
    monkeypatch.setattr(
        reference, "delta_rule_chunkwise", lambda *a: reference.delta_rule_recurrent(*a[:5], a[5].clone())
    )  # forgets the state after each call
    assert not verify.MODEL_CHECKS["model: any split"](tiny).ok


# The delta rule against the published recurrence ----------------------------------------------------------------------

KNOWN = load_file(Path(__file__).parent / "data" / "delta-rule" / "oracle.safetensors")


@pytest.mark.parametrize("form", [reference.delta_rule, reference.delta_rule_recurrent, reference.delta_rule_chunkwise])
@pytest.mark.parametrize("case", sorted({name.partition(".")[0] for name in KNOWN}))
def test_the_delta_rule_meets_the_reference_numbers(form, case):
    q, k, v, g, beta, out, before, after = (
        KNOWN[f"{case}.{n}"] for n in ("q", "k", "v", "g", "beta", "out", "state0", "state")
    )
    S = before.mT.contiguous().clone()
    got = form(q, k, v, g if g.ndim == 4 else g.unsqueeze(-1), beta, S)
    torch.testing.assert_close(got, out, rtol=0, atol=5e-6 * out.std().item())
    torch.testing.assert_close(S.mT, after, rtol=0, atol=5e-6 * after.std().item())


@given(st.integers(1, 150), st.integers(0, 2**31), st.sampled_from([1e-3, 1.0, 30.0]))
def test_chunks_equal_the_recurrence_far_below_one_part_in_a_trillion(tokens, seed, fastest):
    random = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    batch, groups, heads, key, value = 2, 3, 3, 7, 5
    q, k, v = (
        normal(batch, tokens, groups, key),
        normal(batch, tokens, groups, key),
        normal(batch, tokens, heads, value),
    )
    g = -fastest * torch.rand(batch, tokens, heads, key, generator=random, dtype=torch.float64)
    beta = torch.rand(batch, tokens, heads, generator=random, dtype=torch.float64)
    a = normal(batch, heads, value, key)
    b = a.clone()
    want = reference.delta_rule_recurrent(q, k, v, g, beta, a)
    got = reference.delta_rule_chunkwise(q, k, v, g, beta, b)
    assert (got - want).abs().max() <= 1e-12 * want.abs().max()
    assert (b - a).abs().max() <= 1e-12 * a.abs().max()


def test_a_mask_of_padding_is_never_needed_and_neighbours_do_not_leak():
    # Sizes are distinct primes: a mixed-up dimension cannot pass.
    x, w = torch.randn(2, 5, 21), torch.randn(21, 4)
    fresh = reference.short_conv(x, w, torch.zeros(2, 3, 21))
    for pad in range(1, 6):
        padded = torch.cat([torch.zeros(2, pad, 21), x], 1)
        torch.testing.assert_close(reference.short_conv(padded, w, torch.zeros(2, 3, 21))[:, pad:], fresh)


def test_attention_knows_no_positions():
    # Nothing is rotated: in which order earlier tokens stand in the cache cannot matter.
    random = torch.Generator().manual_seed(3)
    q, latent, shared, up = (
        torch.randn(*shape, generator=random, dtype=torch.float64)
        for shape in ((1, 1, 3, 11), (1, 13, 7), (1, 13, 5), (3 * (6 + 2), 7))
    )
    order = torch.randperm(13, generator=random)
    for form in (reference.attention_absorbed, reference.attention_expanded):
        want = form(q, latent, shared, up, 2)
        torch.testing.assert_close(form(q, latent[:, order], shared[:, order], up, 2), want)
