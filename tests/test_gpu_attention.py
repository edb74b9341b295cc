"""The rows of ``gpu_kernels.attention`` and ``gpu_kernels.small`` against the reference, on a GPU or interpreted."""

import sys

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from interpreted import DEVICE

from deltafin import verify
from deltafin.gpu_kernels.attention import _absorbs, append, attend_few, attention
from deltafin.gpu_kernels.expanded import attend_many
from deltafin.gpu_kernels.small import mix_depth, rms_norm, route
from deltafin.ops import reference
from deltafin.quant import MXFP4, Int8, pack_int8, pack_mxfp4

ROWS = {"attention": attention, "rms_norm": rms_norm, "mix_depth": mix_depth, "route": route}

BFLOAT16 = {
    # Largest error of bfloat16 activations relative to the largest value of the result.
    "attention": 2e-2,  # queries, shares and the result are rounded to 8 bits, and scores with the queries
    "rms_norm": 1e-2,  # rounded before the weight, after it, and the weight
    "mix_depth": 4e-3,  # rounded once, at the end
    "route": 1e-5,  # the input is widened, all else is float32
}

FEWER = settings(
    max_examples=5, deadline=None, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck)
)


def on(x, dtype=None):
    """``x`` on the device under test; floats among its tensors in ``dtype``, if given."""
    if isinstance(x, Int8 | MXFP4):
        return type(x)(x.codes.to(DEVICE), x.scales.to(DEVICE))
    if not isinstance(x, torch.Tensor):
        return x
    return x.to(DEVICE, dtype if dtype and x.dtype == torch.float32 else None)


def truth(op, arguments):
    exact = [verify._cast(on_cpu(a), torch.float64) for a in arguments]
    return verify.result(verify.TRUTH[op], exact, ())


def on_cpu(x):
    if isinstance(x, Int8 | MXFP4):
        return type(x)(x.codes.cpu(), x.scales.cpu())
    return x.cpu() if isinstance(x, torch.Tensor) else x


def check(op, function, arguments, bound):
    got = [t.cpu() for t in verify.result(function, arguments, ())]
    _, error = verify.compare(got, truth(op, arguments))
    assert error <= bound, error


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("op", ROWS)
def test_every_case_of_verify(op):
    bound = verify.BOUNDS.get(f"{op} float32", verify.BOUNDS["float32"])
    for _, arguments in verify.cases(op):
        check(op, ROWS[op], [on(a) for a in arguments], bound)


@pytest.mark.parametrize("op", ROWS)
def test_bfloat16_activations(op):
    for case, arguments in list(verify.cases(op))[::3]:
        if case != "scores of hundreds":
            check(op, ROWS[op], [on(arguments[0], torch.bfloat16), *map(on, arguments[1:])], BFLOAT16[op])


def caches(heads, plain, common, value, rank, positions, batch=1, dtype=torch.float32):
    """Latents, shared keys and an up projection."""
    latent = normal(1, batch, positions, rank).to(DEVICE, dtype)
    shared = normal(2, batch, positions, common).to(DEVICE, dtype)
    return latent, shared, normal(3, heads * (plain + value), rank) / rank**0.5


@FEWER
@given(
    st.sampled_from([1, 5, 33]),
    st.integers(1, 20),
    st.integers(1, 20),
    st.integers(1, 20),
    st.integers(1, 3),
    st.data(),
)
def test_odd_shapes(heads, plain, common, value, batch, data):
    rank, tokens = data.draw(st.sampled_from([7, 32, 50, 64])), data.draw(st.sampled_from([1, 2, 9, 20]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    latent, shared, up = caches(
        heads, plain, common, value, rank, tokens + data.draw(st.integers(0, 100)), batch, dtype
    )
    store = data.draw(st.sampled_from([lambda w: w, torch.Tensor.bfloat16, pack_int8]))
    q = normal(4, batch, tokens, heads, plain + common).to(DEVICE)
    check("attention", attention, [q, latent, shared, on(store(up)), value], 1e-4)
    q, latent, shared = q.bfloat16(), latent.bfloat16(), shared.bfloat16()
    check("attention", attention, [q, latent, shared, on(store(up)), value], BFLOAT16["attention"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_up_projections(dtype):
    latent, shared, up = caches(4, 64, 32, 64, 96, 70, 1, dtype)
    for weight in (pack_mxfp4(up), pack_int8(up)):
        for tokens in (1, 9):
            q = normal(4, 1, tokens, 4, 96).to(DEVICE, dtype)
            bound = 1e-4 if dtype == torch.float32 else BFLOAT16["attention"]
            check("attention", attention, [q, latent, shared, on(weight), 64], bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "batch", "most"), [(2, 2, 8), (33, 1, 1)])
def test_rows_capacity_and_what_lies_behind_the_end_change_no_bit(dtype, heads, batch, most):
    """Tokens together, one by one, and from a larger buffer full of not-a-number: the same bits."""
    latent, shared, up = caches(heads, 12, 6, 10, 20, 70, batch, dtype)
    up, q = on(up), normal(4, batch, most, heads, 18).to(DEVICE, dtype)
    larger = [torch.full((batch, 120, x.shape[2]), torch.nan, dtype=dtype, device=DEVICE) for x in (latent, shared)]
    for buffer, x in zip(larger, (latent, shared), strict=True):
        buffer[:, :70] = x
    alone = [attention(q[:, t : t + 1], latent[:, : 63 + t], shared[:, : 63 + t], up, 10) for t in range(most)]
    for tokens in {1, 2, 5, 8} & {*range(most + 1)}:
        seen = 62 + tokens
        together = attention(q[:, :tokens], latent[:, :seen], shared[:, :seen], up, 10)
        assert torch.equal(together, torch.cat(alone[:tokens], 1))
        length = torch.tensor([seen], dtype=torch.int32, device=DEVICE)
        assert torch.equal(attend_few(q[:, :tokens], *larger, length, up, 10), together)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_not_a_number_is_seen():
    latent, shared, up = caches(3, 12, 6, 10, 20, 40)
    for tokens in (2, 12):
        q = normal(4, 1, tokens, 3, 18).to(DEVICE)
        for spoiled in (q, latent, shared, up):
            kept = spoiled.flatten()[0].item()
            # A score of minus infinity is a share of nothing: an infinite shared key may leave no trace.
            for bad in (torch.nan,) if spoiled is shared else (torch.nan, torch.inf):
                spoiled.view(-1)[0] = bad
                out = attention(q, latent, shared, on(up), 10)
                assert not out[0, 0, 0].isfinite().all()
            spoiled.view(-1)[0] = kept


def test_output_gate():
    latent, shared, up = caches(3, 12, 6, 10, 20, 40)
    q, gate = normal(4, 1, 2, 3, 18).to(DEVICE), normal(5, 1, 2, 30).to(DEVICE)
    length = torch.tensor([40], dtype=torch.int32, device=DEVICE)
    want = attend_few(q, latent, shared, length, on(up), 10).flatten(2) * torch.sigmoid(gate)
    got = attend_few(q, latent, shared, length, on(up), 10, gate).flatten(2)
    assert torch.allclose(got, want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [8, torch.tensor([8], dtype=torch.int32)])
def test_append(dtype, length):
    latent = torch.full((2, 9, 20), 7.0, device=DEVICE, dtype=dtype)
    shared = torch.full((2, 9, 6), 7.0, device=DEVICE, dtype=dtype)
    x, norm = normal(1, 2, 3, 26).to(DEVICE, dtype), normal(2, 20).to(DEVICE)
    append(x, norm, 1e-5, latent, shared, on(length))
    want = reference.rms_norm(x[..., :20], norm, 1e-5)
    assert torch.allclose(latent[:, 5:8].float(), want.float(), rtol=1e-2 if dtype == torch.bfloat16 else 1e-6)
    assert torch.equal(shared[:, 5:8], x[..., 20:])
    for buffer in (latent, shared):
        assert bool((buffer[:, :5] == 7).all())
        assert bool((buffer[:, 8:] == 7).all())


def test_many_positions_in_blocks(monkeypatch):
    """Later blocks go on where earlier ones stopped, and a token stops at its own position."""
    monkeypatch.setattr(sys.modules[attend_many.__module__], "POSITIONS", 32)
    latent, shared, up = caches(3, 12, 6, 10, 20, 130, 2)
    q = normal(4, 2, 70, 3, 18).to(DEVICE)
    check("attention", attend_many, [q, latent, shared, on(up), 10], 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_absorbed_form_of_more_tokens(dtype):
    """More rows are cut into fewer ranges, and mean the same."""
    latent, shared, up = caches(3, 12, 6, 10, 20, 130, 1, dtype)
    q, length = normal(4, 1, 20, 3, 18).to(DEVICE, dtype), torch.tensor([130], dtype=torch.int32, device=DEVICE)

    def absorbed(q, latent, shared, up, value):
        return attend_few(q, latent, shared, length, up, value)

    bound = 1e-4 if dtype == torch.float32 else BFLOAT16["attention"]
    check("attention", absorbed, [q, latent, shared, on(up), 10], bound)


def test_which_form_is_less_work():
    assert _absorbs(64, 128, 128, 512)
    assert not _absorbs(65, 128, 128, 512)
    assert _absorbs(20, 64, 64, 96)  # Nano: at most 191 by operations
    assert _absorbs(30, 16, 16, 32)
    assert not _absorbs(32, 16, 16, 32)


@FEWER
@given(st.integers(1, 12), st.integers(1, 300), st.integers(1, 5))
def test_odd_widths(rows, width, depths):
    x, w = normal(1, depths, 1, rows, width).to(DEVICE), normal(2, width).to(DEVICE)
    check("rms_norm", rms_norm, [x, w, 1e-5], 1e-5)
    check("mix_depth", mix_depth, [x, w / width**0.5, 1e-5], 1e-5)


@FEWER
@given(st.sampled_from([1, 3, 17]), st.integers(2, 40), st.integers(1, 100), st.booleans(), st.data())
def test_odd_routes(rows, experts, width, renormalize, data):
    chosen = data.draw(st.integers(1, min(32, experts)))
    gate = normal(1, experts, width).to(data.draw(st.sampled_from([torch.float32, torch.bfloat16])))
    x, bias = normal(2, rows, width).to(DEVICE) / width**0.5, normal(3, experts).to(DEVICE) / 10
    check("route", route, [x, gate.to(DEVICE), bias, chosen, renormalize, 2.5], 1e-5)


def test_small_rows_change_no_bit():
    x, w, gate = normal(1, 3, 1, 8, 50).to(DEVICE), normal(2, 50).to(DEVICE), normal(3, 12, 50).to(DEVICE)
    one = [x[:, :, n : n + 1] for n in range(8)]
    mixed, normed = ([f(a, w, 1e-5) for a in one] for f in (mix_depth, rms_norm))
    routed = [route(a[0, 0], gate, w[:12], 4, True, 1.5) for a in one]
    for rows in (1, 2, 5, 8):
        part = x[:, :, :rows]
        assert torch.equal(mix_depth(part, w, 1e-5), torch.cat(mixed[:rows], 1))
        assert torch.equal(rms_norm(part, w, 1e-5), torch.cat(normed[:rows], 2))
        for got, want in zip(
            route(part[0, 0], gate, w[:12], 4, True, 1.5), zip(*routed[:rows], strict=True), strict=True
        ):
            assert torch.equal(got, torch.cat(want))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_routes_that_cannot_be_made_are_seen():
    """Not a number in a row or a gate makes weights that are none; ties and -inf as in the reference."""
    x, gate, bias = normal(1, 2, 16).to(DEVICE), normal(2, 8, 16).to(DEVICE), torch.zeros(8, device=DEVICE)
    x[0, 3] = torch.nan
    ids, weights = route(x, gate, bias, 4, True, 1.0)
    assert weights.isnan().all(-1).tolist() == [True, False]
    assert ids[0].tolist() == [0, 1, 2, 3]
    gate[5] = torch.nan
    assert bool(route(x[1:], gate, bias, 4, True, 1.0)[1].isnan().all())
    bias[:6] = -torch.inf
    ids, _ = route(x[1:], torch.ones_like(gate), bias, 4, True, 1.0)
    assert ids[0].tolist() == [0, 1, 6, 7]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter has no Hopper GPU")
@pytest.mark.parametrize("heads", [32, 96])
def test_shapes_of_kimi_in_bfloat16(heads):
    """What a Hopper GPU reads in its own way: short and long ranges, rows, and nothing behind the end."""
    latent, shared, up = caches(heads, 128, 64, 128, 512, 9000, 2, torch.bfloat16)
    up, q = on(up, torch.bfloat16), normal(4, 2, 5, heads, 192).to(DEVICE, torch.bfloat16)
    latent[:], shared[:] = torch.nan, torch.nan
    for seen in (5, 31, 64, 65, 1000, 8900):
        latent[:, :seen], shared[:, :seen] = normal(6, 2, seen, 512).to(DEVICE), normal(7, 2, seen, 64).to(DEVICE)
        length = torch.tensor([seen], dtype=torch.int32, device=DEVICE)
        got = attend_few(q, latent, shared, length, up, 128)
        alone = [attend_few(q[:, t : t + 1], latent, shared, length - 4 + t, up, 128) for t in range(5)]
        assert torch.equal(got, torch.cat(alone, 1))
        want = reference.attention_expanded(q.float(), latent[:, :seen], shared[:, :seen], up, 128)
        assert verify.compare((got,), (want,))[1] <= BFLOAT16["attention"]
    q = normal(5, 2, 40, heads, 192).to(DEVICE, torch.bfloat16)
    for seen in (40, 65, 1000):
        got = attention(q, latent[:, :seen], shared[:, :seen], up, 128)
        want = reference.attention_expanded(q.float(), latent[:, :seen], shared[:, :seen], up, 128)
        assert verify.compare((got,), (want,))[1] <= BFLOAT16["attention"]
