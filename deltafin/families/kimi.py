"""Kimi K3 and Kimi Linear: one configuration class with two names, and one layout of tensors with few variants."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deltafin.config import KDA, MLA, MLP, Activation, AttentionResidual, Layer, ModelConfig, MoE, Plain, SiLU, SiTU
from deltafin.errors import CheckpointError, ConfigError
from deltafin.families.reading import Fields

MODEL_TYPES = ("kimi_k3", "kimi_linear")

INNER_EPS = 1e-6
"""Epsilon of the norms inside latent attention: the first-party norm class's own default, not ``rms_norm_eps``."""

# Fields that describe files, training or generation, or that the architecture never reads.
IGNORED = frozenset(
    """
    architectures auto_map model_type dtype torch_dtype transformers_version _name_or_path initializer_range use_cache
    bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id tokenizer_class prefix
    head_dim rope_theta rope_scaling rope_parameters use_grouped_topk
    return_dict output_hidden_states output_attentions torchscript use_bfloat16 tf_legacy_loss pruned_heads
    chunk_size_feed_forward is_encoder_decoder is_decoder cross_attention_hidden_size add_cross_attention
    tie_encoder_decoder max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores return_dict_in_generate
    forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
    begin_suppress_tokens finetuning_task id2label label2id task_specific_params problem_type attention_dropout
    """.split()  # noqa: SIM905 - sixty lines otherwise
)
IGNORED_OUTSIDE = frozenset(
    ["ignore_index", "image_placeholder", "media_placeholder_token_id", "vision_config", "text_config"]
)
SKIPPED_PARTS = ("vision_tower", "mm_projector", "mtp")
"""Parts of a checkpoint that a text model does not run: passed over, counted, shown; so are layers past the last."""


def matches(raw: Mapping[str, Any]) -> bool:
    """Whether this family reads a ``config.json``."""
    return raw.get("model_type") in MODEL_TYPES


@dataclass(frozen=True)
class Rule:
    """How one of our tensors is made: the sources by name, and what is done with them (nothing: taken as it is).

    ``make`` raises ``ValueError`` for values that cannot be right. A source ``x.weight`` may also be stored packed, as
    ``x.weight_packed`` and ``x.weight_scale``; only a rule that does nothing takes such a source.
    """

    sources: tuple[str, ...]
    make: Callable[..., Tensor] | None = None


def config(raw: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> ModelConfig:
    """Read a ``config.json``; ``shapes`` are the checkpoint's tensors, which decide the ranks of the gates.

    An absent field means what the first-party configuration class makes of it. Raises ``ConfigError`` for a field
    that is missing, malformed, or has a value that is not supported.
    """
    outside = Fields(raw, "config.json")
    nested = raw.get("text_config") is not None
    text = Fields(raw["text_config"], "config.json, text_config") if nested else outside
    tied = outside.flag("tie_word_embeddings", False)
    _check_packing(outside)
    if nested:
        tied = text.flag("tie_word_embeddings", tied)
        _check_packing(text)
        outside.finish(IGNORED | IGNORED_OUTSIDE)
    text.only("moe_router_activation_func", ["sigmoid"], "sigmoid")
    text.only("mla_use_nope", [True], False)
    text.only("moe_layer_freq", [1], 1)
    text.only("topk_method", ["noaux_tc"], "noaux_tc")
    text.only("num_expert_group", [1], 1)
    text.only("topk_group", [1], 1)
    text.only("attention_bias", [False], False)
    text.integer("num_nextn_predict_layers", 0, least=0)  # such layers are skipped, whether stored or not

    layers, width = text.integer("num_hidden_layers"), text.integer("hidden_size")
    activation = _activation(text)
    attention, mixers = _mixers(text, layers, shapes)
    dense = text.integer("first_k_dense_replace", 0, least=0)
    mlp = MLP(text.integer("intermediate_size"), activation)
    moe = _moe(text, activation)
    block = text.integer("attn_res_block_size", None)
    result = ModelConfig(
        family=raw["model_type"],
        vocab=text.integer("vocab_size"),
        width=width,
        eps=text.number("rms_norm_eps", 1e-6),
        layers=tuple(Layer(mixers.get(i, attention), mlp if moe is None or i < dense else moe) for i in range(layers)),
        residual=AttentionResidual(block) if block else Plain(),
        tied=tied,
        context=text.integer("max_position_embeddings", text.integer("model_max_length", None)),
    )
    text.finish(IGNORED | IGNORED_OUTSIDE)
    return result


def _activation(text: Fields) -> Activation:
    betas = text.number("activation_situ_beta", 4.0), text.number("activation_situ_linear_beta", 25.0)
    return SiTU(*betas) if text.only("hidden_act", ["silu", "situ"], "silu") == "situ" else SiLU()


def _mixers(text: Fields, layers: int, shapes: Mapping[str, tuple[int, ...]]) -> tuple[MLA, dict[int, KDA]]:
    """Return the attention of every other layer, and the KDA layers by index from 0 (the file counts from 1)."""
    heads = text.integer("num_attention_heads")
    text.only("num_key_value_heads", [heads], heads)
    attention = MLA(
        heads,
        text.integer("qk_nope_head_dim"),
        text.integer("qk_rope_head_dim"),
        text.integer("v_head_dim"),
        text.integer("kv_lora_rank"),
        text.integer("q_lora_rank", None),
        text.flag("mla_use_output_gate", False),
        INNER_EPS,
    )
    linear = Fields(text.get("linear_attn_config"), "config.json, linear_attn_config")
    kda, full = linear.integers("kda_layers"), linear.integers("full_attn_layers")
    if sorted(kda + full) != list(range(1, layers + 1)):
        raise ConfigError(
            f"kda_layers and full_attn_layers do not name each of the {layers} layers once",
            "they count from 1, in config.json, linear_attn_config",
        )
    heads, dim = linear.integer("num_heads"), linear.integer("head_dim")
    full_rank = linear.flag("use_full_rank_gate", None)
    floor = linear.number("gate_lower_bound", None)
    if floor is not None and floor >= 0:
        raise ConfigError(f"gate_lower_bound {floor} is not supported", "a log-decay is negative")
    width = linear.integer("short_conv_kernel_size", 4)
    linear.finish(())
    root = _root(shapes)

    def kind(i: int) -> KDA:
        stored = lambda name: shapes.get(f"{root}layers.{i}.self_attn.{name}.weight", (dim,))[0]  # noqa: E731
        low = not full_rank if full_rank is not None else f"{root}layers.{i}.self_attn.g_a_proj.weight" in shapes
        return KDA(heads, dim, dim, width, stored("f_a_proj"), floor, stored("g_a_proj") if low else None)

    return attention, {i - 1: kind(i - 1) for i in kda}


def _moe(text: Fields, activation: Activation) -> MoE | None:
    experts = text.integer("num_experts", 0, least=0)
    chosen, width = text.integer("num_experts_per_token", 0, least=0), text.integer("moe_intermediate_size", 0, least=0)
    shared = text.integer("num_shared_experts", 0, least=0)
    latent, norm = text.integer("routed_expert_hidden_size", None), text.flag("latent_moe_use_norm", False)
    renormalize, scale = text.flag("moe_renormalize", True), text.number("routed_scaling_factor", 1.0)
    if not experts:
        return None
    if not 0 < chosen <= experts:
        raise ConfigError(f"num_experts_per_token {chosen} is not supported", f"there are {experts} experts")
    if not width:
        raise ConfigError("config.json lacks moe_intermediate_size", "a mixture of experts needs it")
    return MoE(
        experts, chosen, width, shared * width, activation, latent, norm and latent is not None, renormalize, scale
    )


def _check_packing(text: Fields) -> None:
    """Which tensors are packed is decided by what is stored; the config only has to name a format that is known."""
    packing = text.get("quantization_config", None)
    if packing is not None:
        fields = Fields(packing, "config.json, quantization_config")
        fields.only("quant_method", ["compressed-tensors"], None)
        fields.only("format", ["mxfp4-pack-quantized"], None)


def _root(shapes: Mapping[str, Any]) -> str:
    """What stands before ``layers.0``: ``language_model.model.`` in the release, ``model.`` in text-only exports."""
    for root in ("language_model.model.", "model.", ""):
        if f"{root}embed_tokens.weight" in shapes or f"{root}embed_tokens.weight_packed" in shapes:
            return root
    raise CheckpointError("the checkpoint has no embed_tokens.weight", "is this a text model, and is it complete?")


def skipped(name: str, raw: Mapping[str, Any]) -> str | None:
    """Return the part that a tensor belongs to when a text model passes it over, else ``None``."""
    parts = name.split(".")
    for part in SKIPPED_PARTS:
        if part in parts:
            return f"{part}.*"
    layer = parts[parts.index("layers") + 1] if "layers" in parts[:-1] else ""
    count = (raw.get("text_config") or raw).get("num_hidden_layers")
    if layer.isdigit() and isinstance(count, int) and int(layer) >= count:
        return f"layers.{layer}.*"
    return None


def tensors(c: ModelConfig, shapes: Mapping[str, Any]) -> dict[str, Rule]:
    """Return the rule of each of our tensors except the routed experts."""
    root = _root(shapes)
    embed, head = f"{root}embed_tokens.weight", f"{root.removesuffix('model.')}lm_head.weight"
    if c.tied and head not in shapes:
        head = embed
    rules = {
        "edges.embed": Rule((embed,)),
        "edges.norm": Rule((f"{root}norm.weight",)),
        "edges.head": Rule((head,)),
    }
    if c.mixes:
        rules["edges.read"] = _query(root, "output_attn_res", shapes)
    for i, layer in enumerate(c.layers):
        source, ours = f"{root}layers.{i}.", f"layers.{i}."
        rules[f"{ours}norms.mixer"] = Rule((f"{source}input_layernorm.weight",))
        rules[f"{ours}norms.ffn"] = Rule((f"{source}post_attention_layernorm.weight",))
        if c.mixes:
            rules[f"{ours}norms.mixer_read"] = _query(source, "self_attention_res", shapes)
            rules[f"{ours}norms.ffn_read"] = _query(source, "mlp_res", shapes)
        mixer = _kda(layer.mixer) if isinstance(layer.mixer, KDA) else _MLA
        for name, (theirs, make) in mixer.items():
            rules[f"{ours}mixer.{name}"] = Rule((f"{source}self_attn.{theirs}",), make)
        if isinstance(layer.ffn, MoE):
            names, inner = _MOE, "block_sparse_moe"
        else:  # re-saved files keep even a dense layer under the mixture's name
            names, inner = _MLP, "mlp" if f"{source}mlp.gate_proj.weight" in shapes else "block_sparse_moe"
        for name, theirs in names.items():
            rules[f"{ours}ffn.{name}"] = Rule((f"{source}{inner}.{theirs}",))
    return rules


def expert(c: ModelConfig, shapes: Mapping[str, Any], layer: int) -> Callable[[int], Iterator[str]]:
    """Return a function from an expert's number to the names of its gate, up and down."""
    stem = f"{_root(shapes)}layers.{layer}.block_sparse_moe.experts"
    return lambda x: (f"{stem}.{x}.{matrix}.weight" for matrix in ("w1", "w3", "w2"))


_MLP = {"gate": "gate_proj.weight", "up": "up_proj.weight", "down": "down_proj.weight"}
_MOE = {
    "router": "gate.weight",
    "router_bias": "gate.e_score_correction_bias",
    "latent_down": "routed_expert_down_proj.weight",
    "latent_norm": "routed_expert_norm.weight",
    "latent_up": "routed_expert_up_proj.weight",
    "shared_gate": "shared_experts.gate_proj.weight",
    "shared_up": "shared_experts.up_proj.weight",
    "shared_down": "shared_experts.down_proj.weight",
}
_MLA = {
    "q": ("q_proj.weight", None),
    "q_down": ("q_a_proj.weight", None),
    "q_norm": ("q_a_layernorm.weight", None),
    "q_up": ("q_b_proj.weight", None),
    "latent_down": ("kv_a_proj_with_mqa.weight", None),
    "latent_norm": ("kv_a_layernorm.weight", None),
    "latent_up": ("kv_b_proj.weight", None),
    "gate": ("g_proj.weight", None),
    "out": ("o_proj.weight", None),
}


def _kda(c: KDA) -> dict[str, tuple[str, Callable[..., Tensor] | None]]:
    def taps(w: Tensor) -> Tensor:
        return w.squeeze(1)

    def per_head(w: Tensor) -> Tensor:
        """Take [H], [1, 1, H, 1], or the release's 128 values of which those after H are zero padding."""
        flat = w.flatten()
        if bool((flat[c.heads :] != 0).any()):
            raise ValueError(f"there are {len(flat)} values for {c.heads} heads, and the rest is not zero padding")
        return flat[: c.heads]

    return {
        "q": ("q_proj.weight", None),
        "k": ("k_proj.weight", None),
        "v": ("v_proj.weight", None),
        "q_conv": ("q_conv1d.weight", taps),
        "k_conv": ("k_conv1d.weight", taps),
        "v_conv": ("v_conv1d.weight", taps),
        "decay_down": ("f_a_proj.weight", None),
        "decay_up": ("f_b_proj.weight", None),
        "decay_log": ("A_log", per_head),
        "decay_bias": ("dt_bias", None),
        "beta": ("b_proj.weight", None),
        "gate": ("g_proj.weight", None),
        "gate_down": ("g_a_proj.weight", None),
        "gate_up": ("g_b_proj.weight", None),
        "norm": ("o_norm.weight", None),
        "out": ("o_proj.weight", None),
    }


def _query(source: str, name: str, shapes: Mapping[str, Any]) -> Rule:
    """A mixture's query is the product of a norm's weight and a projection of one row."""
    split = f"{source}{name}_norm.weight", f"{source}{name}_proj.weight"
    joined = f"{source}{name}.norm_weight", f"{source}{name}.proj_weight"
    return Rule(
        joined if joined[0] in shapes else split,
        lambda norm, proj: norm.to(torch.float32) * proj.to(torch.float32).flatten(),
    )
