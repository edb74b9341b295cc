"""Random checkpoints in the hub's layout, for every variant of the families; made by name, so always the same."""

import hashlib
import json

import torch
from safetensors.torch import save_file

from deltafin.quant import pack_mxfp4

BASE = {
    "model_type": "kimi_linear",
    "hidden_size": 32,
    "vocab_size": 50,
    "num_hidden_layers": 4,
    "intermediate_size": 40,
    "first_k_dense_replace": 1,
    "num_attention_heads": 3,
    "q_lora_rank": 10,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 6,
    "v_head_dim": 7,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "rms_norm_eps": 1e-5,
    "num_experts": 5,
    "num_experts_per_token": 2,
    "num_shared_experts": 2,
    "moe_intermediate_size": 32,
    "routed_expert_hidden_size": 64,
    "latent_moe_use_norm": True,
    "routed_scaling_factor": 1.5,
    "attn_res_block_size": 2,
    "linear_attn_config": {
        "kda_layers": [1, 2, 4],
        "full_attn_layers": [3],
        "num_heads": 2,
        "head_dim": 6,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
        "use_full_rank_gate": True,
    },
}
"""Kimi K3 in small; every width differs from every other where two could be mistaken for each other."""


def random(name, *shape, scale=None):
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * (shape[-1] ** -0.5 if scale is None else scale)


def config(**changes):
    """A copy of the base with fields changed (None: removed); ``linear_*`` change the nested part."""
    c = json.loads(json.dumps(BASE))
    for name, value in changes.items():
        part, field = (c["linear_attn_config"], name[7:]) if name.startswith("linear_") else (c, name)
        if value is None:
            part.pop(field, None)
        else:
            part[field] = value
    return c


def tensors(c, packed=True, root="model."):
    """Every tensor of a config, by its name on the hub."""
    d, f, heads = c["hidden_size"], c["moe_intermediate_size"], c["num_attention_heads"]
    linear = c["linear_attn_config"]
    n, dim = linear["num_heads"] * linear["head_dim"], linear["head_dim"]
    latent, lora, rank = c.get("routed_expert_hidden_size"), c.get("q_lora_rank"), c["kv_lora_rank"]
    plain, shared, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    t = {}

    def put(name, *shape, scale=None, plus=0.0, dtype=torch.bfloat16):
        t[root + name] = (random(name, *shape, scale=scale) + plus).to(dtype)

    def mlp(at, width):
        put(f"{at}.gate_proj.weight", width, d)
        put(f"{at}.up_proj.weight", width, d)
        put(f"{at}.down_proj.weight", d, width)

    def norm(name, width, dtype=torch.bfloat16):
        put(name, width, scale=0.2, plus=1.0, dtype=dtype)

    put("embed_tokens.weight", c["vocab_size"], d, scale=1.0)
    norm("norm.weight", d)
    sites = ["output_attn_res"] if c.get("attn_res_block_size") else []
    for i in range(c["num_hidden_layers"]):
        at, a = f"layers.{i}", f"layers.{i}.self_attn"
        norm(f"{at}.input_layernorm.weight", d)
        norm(f"{at}.post_attention_layernorm.weight", d)
        if c.get("attn_res_block_size"):
            sites += [f"{at}.self_attention_res", f"{at}.mlp_res"]
        if i + 1 in linear["kda_layers"]:
            for m in "qkv":
                put(f"{a}.{m}_proj.weight", n, d)
                put(f"{a}.{m}_conv1d.weight", n, 1, linear.get("short_conv_kernel_size", 4), dtype=torch.float32)
            put(f"{a}.f_a_proj.weight", dim, d)
            put(f"{a}.f_b_proj.weight", n, dim)
            put(f"{a}.A_log", linear["num_heads"], scale=0.5, dtype=torch.float32)
            put(f"{a}.dt_bias", n, scale=1.0, plus=-1.0, dtype=torch.float32)
            put(f"{a}.b_proj.weight", linear["num_heads"], d)
            if linear.get("use_full_rank_gate"):
                put(f"{a}.g_proj.weight", n, d)
            else:
                put(f"{a}.g_a_proj.weight", dim + 1, d)
                put(f"{a}.g_b_proj.weight", n, dim + 1)
            norm(f"{a}.o_norm.weight", dim, torch.float32)
            put(f"{a}.o_proj.weight", d, n)
        else:
            if lora:
                put(f"{a}.q_a_proj.weight", lora, d)
                norm(f"{a}.q_a_layernorm.weight", lora)
            put(f"{a}.q_{'b_' if lora else ''}proj.weight", heads * (plain + shared), lora or d)
            put(f"{a}.kv_a_proj_with_mqa.weight", rank + shared, d)
            norm(f"{a}.kv_a_layernorm.weight", rank)
            put(f"{a}.kv_b_proj.weight", heads * (plain + value), rank)
            if c.get("mla_use_output_gate"):
                put(f"{a}.g_proj.weight", heads * value, d)
            put(f"{a}.o_proj.weight", d, heads * value)
        moe = f"{at}.block_sparse_moe"
        if i < c.get("first_k_dense_replace", 0) or not c.get("num_experts"):
            mlp(f"{at}.mlp", c["intermediate_size"])
            continue
        put(f"{moe}.gate.weight", c["num_experts"], d)
        put(f"{moe}.gate.e_score_correction_bias", c["num_experts"], scale=0.3, dtype=torch.float32)
        if c.get("num_shared_experts"):
            mlp(f"{moe}.shared_experts", f * c["num_shared_experts"])
        if latent:
            put(f"{moe}.routed_expert_down_proj.weight", latent, d)
            put(f"{moe}.routed_expert_up_proj.weight", d, latent)
            if c.get("latent_moe_use_norm"):
                norm(f"{moe}.routed_expert_norm.weight", latent)
        for e in range(c["num_experts"]):
            for m, shape in (("w1", (f, latent or d)), ("w3", (f, latent or d)), ("w2", (latent or d, f))):
                put(f"{moe}.experts.{e}.{m}.weight", *shape)
                if packed:
                    w = pack_mxfp4(t.pop(f"{root}{moe}.experts.{e}.{m}.weight").float())
                    t[f"{root}{moe}.experts.{e}.{m}.weight_packed"] = w.codes
                    t[f"{root}{moe}.experts.{e}.{m}.weight_scale"] = w.scales
    for site in sites:
        norm(f"{site}_norm.weight", d)
        put(f"{site}_proj.weight", 1, d, scale=0.3)
    if not c.get("tie_word_embeddings"):
        t[root.removesuffix("model.") + "lm_head.weight"] = random("head", c["vocab_size"], d).bfloat16()
    return t


def write(folder, c, t, shards=1, index=True):
    """Write a snapshot: tensors in turn over ``shards`` files, with an index if there are several."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(c), encoding="utf-8")
    names, files = sorted(t), {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:06}.safetensors" if shards > 1 else "model.safetensors"
        part = {name: t[name].contiguous() for name in names[i::shards]}
        save_file(part, folder / file)
        files |= dict.fromkeys(part, file)
    if index and shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}), encoding="utf-8")
    return folder
