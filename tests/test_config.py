"""Config files: every field is understood, ignored by name, or refused with its name and value."""

import json
from pathlib import Path

import checkpoints
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from deltafin import config as kinds
from deltafin.errors import ConfigError
from deltafin.families import family, kimi

DATA = Path(__file__).parent / "data"
SHAPES = {name: tuple(t.shape) for name, t in checkpoints.tensors(checkpoints.config()).items()}


def read(**changes):
    return kimi.config(checkpoints.config(**changes), SHAPES)


def test_the_released_kimi_k3_becomes_what_its_makers_published():
    layers = range(1, 94)
    full = [*range(4, 93, 4), 93]
    text = {
        **dict(hidden_size=7168, num_hidden_layers=93, vocab_size=163840, intermediate_size=33792),
        **dict(first_k_dense_replace=1, moe_layer_freq=1, num_attention_heads=96, num_key_value_heads=96),
        **dict(q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
        **dict(mla_use_nope=True, mla_use_output_gate=True, attn_res_block_size=12, rms_norm_eps=1e-05),
        **dict(max_position_embeddings=1048576, num_experts=896, num_experts_per_token=16, num_shared_experts=2),
        **dict(moe_intermediate_size=3072, routed_expert_hidden_size=3584, latent_moe_use_norm=True),
        **dict(moe_router_activation_func="sigmoid", moe_renormalize=True, routed_scaling_factor=1.0),
        **dict(topk_method="noaux_tc", use_grouped_topk=True, num_expert_group=1, topk_group=1, hidden_act="situ"),
        **dict(activation_situ_beta=4.0, activation_situ_linear_beta=25.0, num_nextn_predict_layers=0),
        **dict(bos_token_id=163584, eos_token_id=163586, pad_token_id=163839, dtype="bfloat16"),
        **dict(initializer_range=0.02, use_cache=True, tie_word_embeddings=False, transformers_version="4.56.2"),
        **dict(model_type="kimi_linear", max_length=20, top_k=50, temperature=1.0, do_sample=False, num_beams=1),
        "linear_attn_config": {
            **dict(num_heads=96, head_dim=128, short_conv_kernel_size=4, gate_lower_bound=-5.0),
            **dict(use_full_rank_gate=True, full_attn_layers=full),
            "kda_layers": [i for i in layers if i not in full],
        },
        "quantization_config": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
    }
    raw = {"model_type": "kimi_k3", "ignore_index": -100, "text_config": text, "vision_config": {"patch_size": 14}}
    c = kimi.config(raw, {"language_model.model.embed_tokens.weight": (163840, 7168)})
    assert [type(layer.mixer) for layer in c.layers].count(kinds.KDA) == 69
    assert [i for i, layer in enumerate(c.layers) if isinstance(layer.mixer, kinds.MLA)] == [*range(3, 92, 4), 92]
    assert c.layers[0].mixer == kinds.KDA(96, 128, 128, 4, 128, -5.0, None)
    assert c.layers[92].mixer == kinds.MLA(96, 128, 64, 128, 512, 1536, True, 1e-6)
    assert c.layers[0].ffn == kinds.MLP(33792, kinds.SiTU(4.0, 25.0))
    assert c.layers[1].ffn == kinds.MoE(896, 16, 3072, 6144, kinds.SiTU(4.0, 25.0), 3584, True, True, 1.0)
    assert c.residual == kinds.AttentionResidual(12)
    assert (c.vocab, c.width, c.eps, c.tied, c.context) == (163840, 7168, 1e-5, False, 1048576)


def test_the_released_kimi_linear_becomes_what_its_makers_published():
    raw = json.loads((DATA / "kimi-linear" / "config.json").read_text(encoding="utf-8"))
    raw |= dict(num_hidden_layers=27, hidden_size=2304, num_experts=256, num_experts_per_token=8, head_dim=72)
    full = [4, 8, 12, 16, 20, 24, 27]
    raw["linear_attn_config"] = dict(num_heads=32, head_dim=128, short_conv_kernel_size=4, full_attn_layers=full)
    raw["linear_attn_config"]["kda_layers"] = [i for i in range(1, 28) if i not in full]
    c = kimi.config(
        raw, {"model.embed_tokens.weight": (192, 2304), "model.layers.0.self_attn.g_a_proj.weight": (128, 2304)}
    )
    assert c.layers[0].mixer == kinds.KDA(32, 128, 128, 4, 128, None, 128)
    assert [i for i, layer in enumerate(c.layers) if isinstance(layer.mixer, kinds.MLA)] == [3, 7, 11, 15, 19, 23, 26]
    assert isinstance(c.layers[1].ffn, kinds.MoE)
    assert c.layers[1].ffn.scale == 2.446
    assert c.residual == kinds.Plain()


def test_an_absent_field_means_what_the_first_party_class_makes_of_it():
    c = read(
        rms_norm_eps=None, hidden_act=None, attn_res_block_size=None, routed_scaling_factor=None, moe_renormalize=None
    )
    assert (c.eps, c.residual) == (1e-6, kinds.Plain())
    assert c.layers[1].ffn.activation == kinds.SiLU()
    assert (c.layers[1].ffn.scale, c.layers[1].ffn.renormalize) == (1.0, True)
    assert read(first_k_dense_replace=None).layers[0].ffn == read().layers[1].ffn
    assert read(mla_use_output_gate=None).layers[2].mixer.gate is False
    assert read(q_lora_rank=None).layers[2].mixer.query_rank is None
    assert read(linear_gate_lower_bound=None).layers[0].mixer.decay_floor is None
    with pytest.raises(ConfigError, match="mla_use_nope false is not supported"):
        read(mla_use_nope=None)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_expert_group", 2, "num_expert_group 2 is not supported"),
        ("topk_group", 4, "topk_group 4 is not supported"),
        ("moe_layer_freq", 2, "moe_layer_freq 2 is not supported"),
        ("moe_router_activation_func", "softmax", "moe_router_activation_func softmax is not supported"),
        ("mla_use_nope", False, "mla_use_nope false is not supported"),
        ("hidden_act", "gelu", "hidden_act gelu is not supported"),
        ("topk_method", "greedy", "topk_method greedy is not supported"),
        ("num_key_value_heads", 1, "num_key_value_heads 1 is not supported"),
        ("attention_bias", True, "attention_bias true is not supported"),
        ("sliding_window", 4096, "sliding_window 4096 is not supported"),
        ("linear_allow_neg_eigval", True, "allow_neg_eigval true is not supported"),
        ("linear_gate_lower_bound", 1.0, "gate_lower_bound 1.0 is not supported"),
        ("quantization_config", {"quant_method": "fp8"}, "quant_method fp8 is not supported"),
        ("hidden_size", "wide", "hidden_size wide .* is not an integer"),
        ("hidden_size", None, "lacks hidden_size"),
        ("hidden_size", 0, "hidden_size 0 .* is not an integer from 1"),
        ("vocab_size", True, "vocab_size true .* is not an integer"),
        ("rms_norm_eps", "tiny", "rms_norm_eps tiny .* is not a number"),
        ("linear_kda_layers", [1, 2], "do not name each of the 4 layers once"),
        ("linear_full_attn_layers", [3, 4], "do not name each of the 4 layers once"),
        ("linear_kda_layers", ["a"], "is not a list of integers"),
        ("num_experts_per_token", 9, "num_experts_per_token 9 is not supported"),
        ("moe_intermediate_size", None, "lacks moe_intermediate_size"),
    ],
)
def test_what_is_not_supported_is_refused_with_name_and_value(name, value, message):
    with pytest.raises(ConfigError, match=message):
        read(**{name: value})


@given(st.text("abcdefghijklmnopqrstuvwxyz_", min_size=3))
@example("tie_word_embeddings")
def test_no_field_is_passed_over_in_silence(name):
    c = checkpoints.config()
    if name not in c and name not in kimi.IGNORED | kimi.IGNORED_OUTSIDE:
        with pytest.raises(ConfigError, match=rf"{name} 1 (in .* )?is not "):  # supported, or what it should be
            kimi.config({**c, name: 1}, SHAPES)


def test_a_field_outside_the_text_part_is_not_passed_over_either():
    raw = {"model_type": "kimi_k3", "text_config": checkpoints.config(), "surprise": 1}
    with pytest.raises(ConfigError, match="surprise 1 is not supported"):
        kimi.config(raw, SHAPES)


@pytest.mark.parametrize("raw", [{"model_type": "llama"}, {}, {"model_type": None}])
def test_an_unknown_family_is_named(raw):
    with pytest.raises(ConfigError, match="model_type"):
        family(raw)


def test_sizes_name_every_letter_of_the_declared_shapes():
    from deltafin.model.decoder import parts
    from deltafin.weights import specs

    for changes in ({}, {"routed_expert_hidden_size": None, "q_lora_rank": None, "linear_use_full_rank_gate": None}):
        for part in parts(read(**changes)):
            for _, spec in specs(part.weights, part.config):
                assert all(type(n) is int and n > 0 for n in spec.shape(part.sizes))
    assert torch.Size(kinds.MLP(7, kinds.SiLU()).sizes().values()) == torch.Size([7])
