"""The models as a whole, against independent implementations."""

import json
from dataclasses import replace
from pathlib import Path

import checkpoints
import independent
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import deltafin
from deltafin.model.decoder import FEW, advance, embedded, forward

DATA = Path(__file__).parent / "data"


def oracle(name):
    return load_file(DATA / name / "oracle.safetensors")


# Kimi K3 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["long", "short", "one"])
def test_k3_prefill_and_decode_meet_the_reference_numbers(tiny, case):
    known = oracle("kimi-k3-tiny")
    ids, prefill, decode = (known[f"{case}.{part}"] for part in ("input_ids", "prefill_logits", "decode_logits"))
    state, ids = tiny.decoder.empty_state(), ids.long()[None]
    got = forward(tiny.decoder, state, ids[:, : len(prefill)], last=len(prefill))[0]
    torch.testing.assert_close(got, prefill, rtol=0, atol=1e-3)
    for j, want in enumerate(decode):
        at = len(prefill) + j
        got = forward(tiny.decoder, state, ids[:, at : at + 1])[0, -1]
        torch.testing.assert_close(got, want, rtol=0, atol=1e-3)


@pytest.mark.parametrize("first", [0, 1, 3, 15, 16, 17, 33, 63, 64, 65, 69])
def test_k3_any_split_meets_the_reference_numbers(tiny, first):
    known = oracle("kimi-k3-tiny")
    ids, want = known["long.input_ids"][:70].long()[None], known["long.prefill_logits"]
    state = tiny.decoder.empty_state()
    got = [
        forward(tiny.decoder, state, part, last=part.shape[1])[0]
        for part in ids.tensor_split([first], 1)
        if part.numel()
    ]
    torch.testing.assert_close(torch.cat(got), want, rtol=0, atol=1e-3)


def test_k3_streams_routes_and_caches_meet_the_reference_numbers(tiny):
    known, routes = oracle("kimi-k3-tiny"), {}

    def spy(i, experts):
        def call(x, ids, weights, *rest):
            routes[i] = ids, weights
            return experts(x, ids, weights, *rest)

        return call

    blocks = tuple(
        replace(b, ffn=replace(b.ffn, experts=spy(i, b.ffn.experts))) if i else b
        for i, b in enumerate(tiny.decoder.blocks)
    )
    decoder = replace(tiny.decoder, blocks=blocks)
    state = decoder.empty_state()
    ids = known["long.input_ids"][:70].long()[None]
    for i, stream in enumerate(advance(decoder, state, embedded(decoder, ids))):
        torch.testing.assert_close(stream.prefix[0], known["long.layer_streams"][i], rtol=0, atol=1e-3)
    for i, s in enumerate(state):
        if f"long.cache.{i}.state" in known:
            torch.testing.assert_close(s.S_BHVK[0].mT, known[f"long.cache.{i}.state"], rtol=0, atol=1e-3)
            tails = torch.cat([s.q_tail, s.k_tail, s.v_tail], -1)[0]
            torch.testing.assert_close(tails, known[f"long.cache.{i}.conv"], rtol=0, atol=1e-3)
        else:
            torch.testing.assert_close(s.latent_BSR[0, :70], known[f"long.cache.{i}.kv_latent"], rtol=0, atol=1e-3)
            torch.testing.assert_close(s.shared_BSJ[0, :70], known[f"long.cache.{i}.k_shared"], rtol=0, atol=1e-3)
    for i, (ids, weights) in routes.items():
        assert torch.equal(ids, known[f"long.router.{i}.experts"].long())
        torch.testing.assert_close(weights, known[f"long.router.{i}.weights"], rtol=0, atol=1e-4)


# Kimi Linear --------------------------------------------------------------------------------------------------------


def test_kimi_linear_meets_the_reference_numbers(linear):
    known, m = oracle("kimi-linear"), linear.decoder
    ids, spread = known["input_ids"].long(), 2e-4 * known["logits"].std().item()
    whole = forward(m, m.empty_state(), ids, last=150)
    torch.testing.assert_close(whole, known["logits"], rtol=0, atol=spread)
    batch = forward(m, m.empty_state(2), known["batch_input_ids"].long(), last=70)
    torch.testing.assert_close(batch, known["batch_logits"], rtol=0, atol=spread)
    state = m.empty_state()
    chunks = [forward(m, state, part, last=part.shape[1]) for part in ids.split([70, 3, 1, 41, 35], 1)]
    torch.testing.assert_close(torch.cat(chunks, 1), known["chunked_logits"], rtol=0, atol=spread)


def test_kimi_linear_step_by_step_meets_the_reference_numbers(linear):
    known, m = oracle("kimi-linear"), linear.decoder
    ids, spread = known["input_ids"].long(), 2e-4 * known["logits"].std().item()
    state = m.empty_state()
    steps = [forward(m, state, ids[:, :131])]
    steps += [forward(m, state, ids[:, i : i + 1]) for i in range(131, 150)]
    torch.testing.assert_close(torch.cat(steps, 1), known["step_logits"], rtol=0, atol=spread)
    for i, s in enumerate(state):
        if f"state.{i}.recurrent.0" in known:
            torch.testing.assert_close(s.S_BHVK.mT, known[f"state.{i}.recurrent.0"], rtol=0, atol=1e-4)
            tails = torch.cat([s.q_tail, s.k_tail, s.v_tail], -1).mT
            torch.testing.assert_close(tails, known[f"state.{i}.conv.0"][..., 1:], rtol=0, atol=1e-4)
        else:
            torch.testing.assert_close(s.latent_BSR[:, :150], known[f"state.{i}.keys"][:, 0], rtol=0, atol=1e-4)
            torch.testing.assert_close(s.shared_BSJ[:, :150], known[f"state.{i}.values"][:, 0], rtol=0, atol=1e-4)


def test_kimi_linear_layers_and_greedy_text_meet_the_reference(linear):
    known, m = oracle("kimi-linear"), linear.decoder
    ids = known["input_ids"].long()
    for i, stream in enumerate(advance(m, m.empty_state(), embedded(m, ids[:, :72]))):
        torch.testing.assert_close(stream.prefix, known[f"hidden.{i}"], rtol=0, atol=2e-3)
    session = linear.session()
    session.feed(ids[0, :20].tolist())
    assert list(session.generate(deltafin.Sampler(), 24)) == known["greedy_ids"][0].tolist()


# Every variant, against the second implementation ---------------------------------------------------------------------

VARIANTS = {
    "as Kimi K3": {},
    "softplus decay": {"linear_gate_lower_bound": None},
    "low-rank gate": {"linear_use_full_rank_gate": None},
    "no latent experts": {"routed_expert_hidden_size": None, "latent_moe_use_norm": None},
    "latent experts without norm": {"latent_moe_use_norm": None},
    "full query": {"q_lora_rank": None},
    "no attention gate": {"mla_use_output_gate": None},
    "plain residual": {"attn_res_block_size": None},
    "block of one layer": {"attn_res_block_size": 1},
    "block longer than the model": {"attn_res_block_size": 9},
    "no shared expert": {"num_shared_experts": None},
    "not renormalised": {"moe_renormalize": False},
    "all dense": {"num_experts": None},
    "all mixtures": {"first_k_dense_replace": None},
    "SiLU, default eps": {"hidden_act": None, "rms_norm_eps": None},
    "other SiTU": {"activation_situ_beta": 2.0, "activation_situ_linear_beta": 1.5},
    "tied": {"tie_word_embeddings": True},
    "convolution of 3": {"linear_short_conv_kernel_size": 3},
    "all KDA": {"linear_kda_layers": [1, 2, 3, 4], "linear_full_attn_layers": []},
    "all latent attention": {"linear_kda_layers": [], "linear_full_attn_layers": [1, 2, 3, 4]},
    "as Kimi Linear": {
        "linear_gate_lower_bound": None,
        "linear_use_full_rank_gate": None,
        "routed_expert_hidden_size": None,
        "latent_moe_use_norm": None,
        "q_lora_rank": None,
        "mla_use_output_gate": None,
        "attn_res_block_size": None,
        "hidden_act": "silu",
        "num_shared_experts": 1,
    },
}
IDS = [int(i) for i in np.random.default_rng(5).integers(0, 50, 70)]


UNPACKED = ("as Kimi K3", "as Kimi Linear", "softplus decay")  # the others do not touch the experts' format


@pytest.mark.parametrize(("name", "packed"), [*((n, True) for n in VARIANTS), *((n, False) for n in UNPACKED)])
def test_every_variant_equals_the_second_implementation(tmp_path, name, packed):
    c = checkpoints.config(**VARIANTS[name])
    folder = checkpoints.write(tmp_path / "model", c, checkpoints.tensors(c, packed))
    want = torch.from_numpy(independent.Model(folder).logits(IDS))
    m = deltafin.load(folder, dtype="float64").decoder
    ids = torch.tensor([IDS])
    whole = forward(m, m.empty_state(), ids, last=len(IDS))[0]
    torch.testing.assert_close(whole, want, rtol=1e-9, atol=1e-9)
    state = m.empty_state()
    steps = torch.cat([forward(m, state, ids[:, i : i + 1])[0] for i in range(len(IDS))])
    torch.testing.assert_close(steps, want, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(deltafin.load(folder).logits(IDS).double(), want, rtol=0, atol=1e-3)


def test_a_thousand_tokens_stay_with_the_second_implementation(tmp_path):
    c = checkpoints.config(**VARIANTS["as Kimi Linear"], vocab_size=20)
    folder = checkpoints.write(tmp_path / "model", c, checkpoints.tensors(c))
    ids = np.random.default_rng(6).integers(0, 20, 1000).tolist()
    want = torch.from_numpy(independent.Model(folder).logits(ids))
    torch.testing.assert_close(deltafin.load(folder).logits(ids).double(), want, rtol=0, atol=1e-3)


# What holds for every model -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [63, 64, 65, 127, 129])
def test_prefill_equals_prefill_of_all_but_one_and_a_step(linear, length):
    m = replace(linear.decoder, dtype=torch.float64)
    ids = torch.arange(length)[None] * 7 % 192
    state = m.empty_state()
    forward(m, state, ids[:, :-1])
    torch.testing.assert_close(forward(m, state, ids[:, -1:]), forward(m, m.empty_state(), ids), rtol=1e-10, atol=1e-10)


def test_rows_of_a_batch_do_not_influence_each_other(tiny):
    m = replace(tiny.decoder, dtype=torch.float64)
    rows = torch.arange(3 * 37).view(3, 37) * 11 % 512
    state = m.empty_state(3)
    both = torch.cat(
        [forward(m, state, rows[:, :30], last=30), *(forward(m, state, rows[:, i : i + 1]) for i in range(30, 37))], 1
    )
    for b in range(3):
        alone = forward(m, m.empty_state(), rows[b : b + 1], last=37)
        torch.testing.assert_close(both[b : b + 1], alone, rtol=1e-9, atol=1e-9)


def test_several_tokens_at_once_give_the_bits_of_one_by_one(tiny):
    ids = torch.arange(30 + FEW)[None] * 5 % 512
    a, b = tiny.decoder.empty_state(), tiny.decoder.empty_state()
    for state in (a, b):
        forward(tiny.decoder, state, ids[:, :30])
    at_once = forward(tiny.decoder, a, ids[:, 30:], last=FEW)
    by_one = torch.cat([forward(tiny.decoder, b, ids[:, i : i + 1]) for i in range(30, 30 + FEW)], 1)
    assert torch.equal(at_once, by_one)
    for x, y in zip(a, b, strict=True):
        assert all(torch.equal(t, u) for t, u in zip(x.tensors().values(), y.tensors().values(), strict=True))


def test_forward_changes_nothing_but_state(tiny):
    def weights():
        for b in tiny.decoder.blocks:
            for part in (b.norms, b.mixer, b.ffn):
                for t in vars(part).values():
                    if isinstance(t, torch.Tensor):
                        yield t.clone()

    before = list(weights())
    ids = torch.arange(20)[None]
    kept = ids.clone()
    forward(tiny.decoder, tiny.decoder.empty_state(), ids)
    assert torch.equal(ids, kept)
    assert all(torch.equal(t, u) for t, u in zip(before, weights(), strict=True))


def test_what_lies_beyond_the_end_of_a_cache_means_nothing(tiny):
    ids = torch.arange(12)[None]
    clean, poisoned = tiny.decoder.empty_state(), tiny.decoder.empty_state()
    for s in poisoned:
        for buffer in ("latent_BSR", "shared_BSJ"):
            if hasattr(s, buffer):
                getattr(s, buffer).fill_(torch.nan)
    for part in ids.split([5, 1, 6], 1):
        assert torch.equal(forward(tiny.decoder, poisoned, part), forward(tiny.decoder, clean, part))


def test_a_cache_grows_past_its_first_room(linear):
    m = linear.decoder
    ids = torch.arange(700)[None] % 192
    state = m.empty_state()
    for part in ids.split([250, 7, 300, 143], 1):
        last = forward(m, state, part)
    assert {s.length for s in state} == {700}
    torch.testing.assert_close(last, forward(m, m.empty_state(), ids), rtol=0, atol=1e-3)


def test_the_stream_type_is_the_one_asked_for(tiny):
    known = oracle("kimi-k3-tiny")
    ids, want = known["long.input_ids"][:70].long()[None], known["long.prefill_logits"]
    m = replace(tiny.decoder, dtype=torch.bfloat16)
    *_, stream = advance(m, m.empty_state(), embedded(m, ids))
    assert stream.prefix.dtype == torch.bfloat16
    got = forward(m, m.empty_state(), ids, last=70)[0]
    assert got.dtype == torch.float32
    error = (got - want).square().mean().sqrt() / want.std()
    assert 0.01 < error < 0.4  # bfloat16 flips near ties of the router; float32 would be far below, an error above


def test_a_nested_and_a_flat_config_are_the_same_model(tmp_path):
    c = checkpoints.config()
    t = checkpoints.tensors(c)
    flat = deltafin.load(checkpoints.write(tmp_path / "flat", c, t))
    nested = {"model_type": "kimi_k3", "text_config": c, "vision_config": {"patch_size": 14}}
    t = {f"language_model.{name}": tensor for name, tensor in t.items()}
    t["vision_tower.patch_embed.weight"] = torch.zeros(2, 2)
    wrapped = deltafin.load(checkpoints.write(tmp_path / "nested", nested, t, shards=3))
    assert torch.equal(flat.logits(IDS), wrapped.logits(IDS))
    assert json.dumps(wrapped.info(), default=str).count("vision_tower") == 1
