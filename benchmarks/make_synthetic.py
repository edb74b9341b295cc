"""Write a random Kimi Linear or Kimi K3 checkpoint, to compare the speed of programs that run it.

Nothing is trained: the text that comes out is noise, the work done for a token is the architecture's. The folder has
the hub's layout. With --gguf the same weights are also written as GGUF: matrices bfloat16, vectors, convolutions and
the router float32 (needs the package gguf).
"""

import base64
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import click
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from deltafin.quant import GROUP, MXFP4

KEY, CONV, LATENT, SHARED, PLAIN, VALUE = 128, 4, 512, 64, 128, 128
"""Channels of a KDA head, taps; and of latent attention: rank, shared key, a head's own key, its value."""

SCALE = 120
"""Of every group of packed experts: random codes then spread as 0.02 does, the scale of matrices that are not."""

EPS, CONTEXT = 1e-5, 1 << 20
SPECIALS = [
    *("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "[EOT]", "<|end_of_msg|>", "<|tool_call_begin|>"),
    *("<|tool_call_end|>", "<|media_begin|>", "[UNK]", "[PAD]"),
]


@dataclass(frozen=True)
class Sizes:
    """What decides how large a model is; ``latent``, ``query_rank`` and ``block`` are Kimi K3's."""

    width: int
    layers: int
    heads: int
    dense: int
    experts: int
    chosen: int
    inner: int
    vocab: int
    shared: int = 1
    latent: int | None = None
    query_rank: int | None = None
    block: int | None = None


SIZES = {
    ("kimi-linear", "tiny"): Sizes(256, 4, 4, 512, 8, 2, 128, 2048),
    ("kimi-linear", "medium"): Sizes(1024, 12, 16, 4096, 64, 8, 512, 32768),
    ("kimi-linear", "large"): Sizes(2048, 16, 16, 8192, 64, 8, 768, 65536),
    ("kimi-k3", "tiny"): Sizes(256, 4, 4, 512, 8, 2, 128, 2048, 2, 128, 128, 2),
    ("kimi-k3", "medium"): Sizes(1024, 12, 16, 4096, 128, 16, 512, 32768, 2, 512, 384, 4),
    ("kimi-k3", "large"): Sizes(2048, 16, 16, 8192, 128, 16, 768, 65536, 2, 1024, 768, 4),
    ("kimi-k3", "deep disk"): Sizes(2048, 5, 16, 8192, 64, 16, 3072, 8192, 1, 3584, 768, 4),
}
"""Medium is 1.3 billion parameters, of which a token reads 310 (Kimi Linear) or 360 million (K3).

Deep disk has few layers, and experts as large as Kimi K3's own: 4.5 GB of them in MXFP4.
"""


class Item(NamedTuple):
    """One tensor: name on the hub, shape, how its values are drawn, and its layer (-1 before the first)."""

    name: str
    shape: tuple[int, ...]
    kind: str
    layer: int


class Model:
    """Every tensor of a checkpoint, in the order in which they are drawn."""

    def __init__(self, arch: str, scale: str) -> None:
        self.arch, self.scale, self.sizes = arch, scale, SIZES[arch, scale]
        self.k3 = arch == "kimi-k3"
        self.root = "language_model." if self.k3 else ""
        # Three recurrent layers, one of attention; the last is always attention.
        layers = self.sizes.layers
        self.attends = [i % 4 == 3 or i == layers - 1 for i in range(layers)]
        self.items = [Item(*fields) for fields in self._items()]

    def _items(self) -> Iterator[tuple[str, tuple[int, ...], str, int]]:
        s = self.sizes
        yield "model.embed_tokens.weight", (s.vocab, s.width), "embed", -1
        for i, attends in enumerate(self.attends):
            at = f"model.layers.{i}."
            yield at + "input_layernorm.weight", (s.width,), "norm", i
            yield at + "post_attention_layernorm.weight", (s.width,), "norm", i
            for site in ("self_attention_res", "mlp_res") if self.k3 else ():
                yield f"{at}{site}_norm.weight", (s.width,), "norm", i
                yield f"{at}{site}_proj.weight", (1, s.width), "query", i
            for name, shape, kind in self._attention() if attends else self._delta():
                yield at + "self_attn." + name, shape, kind, i
            for name, shape, kind in self._feed_forward() if i else self._gated("mlp", s.dense):
                yield at + name, shape, kind, i
        yield "model.norm.weight", (s.width,), "norm", s.layers
        if self.k3:
            yield "model.output_attn_res_norm.weight", (s.width,), "norm", s.layers
            yield "model.output_attn_res_proj.weight", (1, s.width), "query", s.layers
        yield "lm_head.weight", (s.vocab, s.width), "matrix", s.layers

    def _delta(self) -> Iterator[tuple[str, tuple[int, ...], str]]:
        s, channels = self.sizes, self.sizes.heads * KEY
        for x in "qkv":
            yield f"{x}_proj.weight", (channels, s.width), "matrix"
            yield f"{x}_conv1d.weight", (channels, 1, CONV), "conv"
        yield "A_log", (s.heads,) if self.k3 else (1, 1, s.heads, 1), "decay"
        yield "dt_bias", (channels,), "decay bias"
        yield "f_a_proj.weight", (KEY, s.width), "matrix"
        yield "f_b_proj.weight", (channels, KEY), "matrix"
        yield "b_proj.weight", (s.heads, s.width), "matrix"
        if self.k3:
            yield "g_proj.weight", (channels, s.width), "matrix"
        else:
            yield "g_a_proj.weight", (KEY, s.width), "matrix"
            yield "g_b_proj.weight", (channels, KEY), "matrix"
        yield "o_norm.weight", (KEY,), "norm"
        yield "o_proj.weight", (s.width, channels), "matrix"

    def _attention(self) -> Iterator[tuple[str, tuple[int, ...], str]]:
        s, queries = self.sizes, self.sizes.heads * (PLAIN + SHARED)
        if s.query_rank:
            yield "q_a_proj.weight", (s.query_rank, s.width), "matrix"
            yield "q_a_layernorm.weight", (s.query_rank,), "norm"
            yield "q_b_proj.weight", (queries, s.query_rank), "matrix"
        else:
            yield "q_proj.weight", (queries, s.width), "matrix"
        yield "kv_a_proj_with_mqa.weight", (LATENT + SHARED, s.width), "matrix"
        yield "kv_a_layernorm.weight", (LATENT,), "norm"
        yield "kv_b_proj.weight", (s.heads * (PLAIN + VALUE), LATENT), "matrix"
        if self.k3:
            yield "g_proj.weight", (s.heads * VALUE, s.width), "matrix"
        yield "o_proj.weight", (s.width, s.heads * VALUE), "matrix"

    def _feed_forward(self) -> Iterator[tuple[str, tuple[int, ...], str]]:
        s, at = self.sizes, "block_sparse_moe."
        width = s.latent or s.width
        yield at + "gate.weight", (s.experts, s.width), "matrix"
        yield at + "gate.e_score_correction_bias", (s.experts,), "bias"
        if s.latent:
            yield at + "routed_expert_down_proj.weight", (width, s.width), "matrix"
            yield at + "routed_expert_up_proj.weight", (s.width, width), "matrix"
            yield at + "routed_expert_norm.weight", (width,), "norm"
        yield from self._gated(at + "shared_experts", s.inner * s.shared)
        for x in range(s.experts):
            yield f"{at}experts.{x}.w1.weight", (s.inner, width), "expert"
            yield f"{at}experts.{x}.w2.weight", (width, s.inner), "expert"
            yield f"{at}experts.{x}.w3.weight", (s.inner, width), "expert"

    def _gated(self, at: str, inner: int) -> Iterator[tuple[str, tuple[int, ...], str]]:
        yield f"{at}.gate_proj.weight", (inner, self.sizes.width), "matrix"
        yield f"{at}.up_proj.weight", (inner, self.sizes.width), "matrix"
        yield f"{at}.down_proj.weight", (self.sizes.width, inner), "matrix"

    def parameters(self) -> tuple[int, int]:
        """Return how many parameters there are, and how many a token uses."""
        total = {kind: 0 for kind in ("expert", "embed", "other")}
        for item in self.items:
            total[item.kind if item.kind in total else "other"] += math.prod(item.shape)
        used = total["expert"] * self.sizes.chosen // self.sizes.experts
        return sum(total.values()), total["other"] + used

    def config(self) -> dict:
        """Return the content of ``config.json``."""
        s = self.sizes
        first = s.vocab - len(SPECIALS)
        layers = {kind: [i + 1 for i, a in enumerate(self.attends) if a == kind] for kind in (True, False)}
        ids = {f"{name}_token_id": first + SPECIALS.index(token) for name, token in TOKENS.items()}
        text = {
            "model_type": "kimi_linear",
            "architectures": ["KimiLinearForCausalLM"],
            "dtype": "bfloat16",
            "vocab_size": s.vocab,
            "hidden_size": s.width,
            "intermediate_size": s.dense,
            "num_hidden_layers": s.layers,
            "num_attention_heads": s.heads,
            "num_key_value_heads": s.heads,
            "head_dim": KEY,
            "hidden_act": "situ" if self.k3 else "silu",
            "initializer_range": 0.02,
            "rms_norm_eps": EPS,
            "rope_theta": 10000.0,
            "rope_scaling": None,
            "model_max_length": CONTEXT,
            "use_cache": True,
            "tie_word_embeddings": False,
            "kv_lora_rank": LATENT,
            "q_lora_rank": s.query_rank,
            "qk_nope_head_dim": PLAIN,
            "qk_rope_head_dim": SHARED,
            "v_head_dim": VALUE,
            "mla_use_nope": True,
            "moe_intermediate_size": s.inner,
            "moe_layer_freq": 1,
            "moe_renormalize": True,
            "moe_router_activation_func": "sigmoid",
            "num_experts": s.experts,
            "num_experts_per_token": s.chosen,
            "num_shared_experts": s.shared,
            "num_expert_group": 1,
            "topk_group": 1,
            "use_grouped_topk": True,
            "topk_method": "noaux_tc",
            "routed_scaling_factor": 1.0 if self.k3 else 2.446,
            "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 0,
            **ids,
            "linear_attn_config": {
                "full_attn_layers": layers[True],
                "kda_layers": layers[False],
                "head_dim": KEY,
                "num_heads": s.heads,
                "short_conv_kernel_size": CONV,
            },
        }
        if not self.k3:
            return text
        text |= {
            "routed_expert_hidden_size": s.latent,
            "latent_moe_use_norm": True,
            "mla_use_output_gate": True,
            "activation_situ_beta": 4.0,
            "activation_situ_linear_beta": 25.0,
            "attn_res_block_size": s.block,
        }
        text["linear_attn_config"]["gate_lower_bound"] = -5.0
        return {
            "model_type": "kimi_k3",
            "architectures": ["KimiK3ForConditionalGeneration"],
            "dtype": "bfloat16",
            "tie_word_embeddings": False,
            "text_config": text,
            **ids,
        }


TOKENS = {"bos": "[BOS]", "eos": "<|im_end|>", "pad": "[PAD]"}


def draw(item: Item, random: torch.Generator) -> Tensor:
    """Return the values of one tensor."""
    match item.kind:
        case "norm":
            return torch.ones(item.shape, dtype=torch.bfloat16)
        case "decay":
            return torch.empty(item.shape).uniform_(1, 16, generator=random).log()
        case "decay bias":
            return torch.empty(item.shape).uniform_(-4, -1, generator=random)
        case "bias":
            return torch.empty(item.shape).uniform_(-0.01, 0.01, generator=random)
        case "conv":
            return torch.empty(item.shape).normal_(0, 0.5, generator=random)
    scale = {"embed": 1.0, "query": 0.1}.get(item.kind, 0.02)
    return torch.empty(item.shape).normal_(0, scale, generator=random).bfloat16()


def write_json(path: Path, content: object) -> None:
    """Write a JSON file."""
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")


def write_hub(model: Model, out: Path, seed: int, packed: bool) -> None:
    """Write a checkpoint as the hub has it, a file a layer; ``packed`` experts are MXFP4."""
    out.mkdir(parents=True, exist_ok=True)
    config = model.config()
    if packed:
        ignored = ["re:.*self_attn.*", "re:.*shared_experts.*", "lm_head"]
        how = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "ignore": ignored}
        config.get("text_config", config)["quantization_config"] = how
    write_json(out / "config.json", config)
    write_json(out / "generation_config.json", {k: config[k] for k in ("bos_token_id", "eos_token_id")})
    write_vocabulary(out, model.sizes.vocab)
    random, weight_map = torch.Generator().manual_seed(seed), {}
    layers = range(-1, model.sizes.layers + 1)
    for number, layer in enumerate(layers, 1):
        file, tensors = f"model-{number:05}-of-{len(layers):05}.safetensors", {}
        for item in (item for item in model.items if item.layer == layer):
            name = model.root + item.name
            if packed and item.kind == "expert":
                rows, columns = item.shape
                codes = torch.randint(256, (rows, columns // 2), dtype=torch.uint8, generator=random)
                scales = torch.full((rows, columns // GROUP), SCALE, dtype=torch.uint8)
                tensors |= {name + "_packed": codes, name + "_scale": scales}
            else:
                tensors[name] = draw(item, random)
        save_file(tensors, out / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    write_json(out / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


# Vocabulary: 256 bytes, then pairs of bytes, then control tokens


def vocabulary(count: int) -> list[bytes]:
    """Return ``count`` words: every byte, then pairs, those of common letters first."""
    common = list(b" etaoinshrdlucmfwypvbgkjqxz")
    order = common + [b for b in range(256) if b not in common]
    pairs = (bytes((order[i], order[n - i])) for n in range(511) for i in range(max(0, n - 255), min(n, 255) + 1))
    return [*(bytes((b,)) for b in range(256)), *(pair for pair, _ in zip(pairs, range(count - 256), strict=False))]


@cache
def letters() -> list[str]:
    """Return the printable character that stands for each byte in byte-level vocabularies."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(b if b in shown else next(others)) for b in range(256)]


def spelled(words: list[bytes]) -> list[str]:
    """Return words as byte-level vocabularies spell them."""
    return ["".join(letters()[b] for b in word) for word in words]


def write_vocabulary(out: Path, size: int) -> None:
    """Write ``tiktoken.model`` and, for programs that read no other, ``tokenizer.json``."""
    words = vocabulary(size - len(SPECIALS))
    lines = (base64.b64encode(word) + b" %d\n" % i for i, word in enumerate(words))
    (out / "tiktoken.model").write_bytes(b"".join(lines))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    added = [{"id": len(words) + i, "content": token, **flags} for i, token in enumerate(SPECIALS)]
    by_byte = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    texts = spelled(words)
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": by_byte | {"add_prefix_space": False},
        "post_processor": None,
        "decoder": by_byte | {"add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {text: i for i, text in enumerate(texts)},
            "merges": [list(text) for text in texts[256:]],
        },
    }
    write_json(out / "tokenizer.json", tokenizer)
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{name}_token": token for name, token in TOKENS.items()},
        "unk_token": "[UNK]",
        "model_max_length": CONTEXT,
        "added_tokens_decoder": {str(t["id"]): {k: v for k, v in t.items() if k != "id"} for t in added},
    }
    write_json(out / "tokenizer_config.json", about)


# GGUF

GGUF_MATRICES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.f_a_proj": "ssm_f_a",
    "self_attn.f_b_proj": "ssm_f_b",
    "self_attn.b_proj": "ssm_beta",
    "self_attn.g_a_proj": "ssm_g_a",
    "self_attn.g_b_proj": "ssm_g_b",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "block_sparse_moe.routed_expert_down_proj": "ffn_routed_down",
    "block_sparse_moe.routed_expert_up_proj": "ffn_routed_up",
    "block_sparse_moe.shared_experts.gate_proj": "ffn_gate_shexp",
    "block_sparse_moe.shared_experts.up_proj": "ffn_up_shexp",
    "block_sparse_moe.shared_experts.down_proj": "ffn_down_shexp",
}
GGUF_VECTORS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_norm": "ssm_norm",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "block_sparse_moe.routed_expert_norm": "ffn_routed_norm",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
GGUF_EXPERTS = {"w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps"}


def write_gguf(model: Model, hub: Path, path: Path) -> None:
    """Write the weights of a checkpoint that ``write_hub`` wrote as one GGUF file."""
    import gguf

    writer = gguf.GGUFWriter(str(path), model.arch)
    _write_gguf_keys(writer, model, gguf)

    def bfloat16(name: str, values: Tensor) -> None:
        raw = values.bfloat16().contiguous().view(torch.uint8).numpy()
        writer.add_tensor(f"{name}.weight", raw, raw_dtype=gguf.GGMLQuantizationType.BF16)

    def float32(name: str, values: Tensor) -> None:
        writer.add_tensor(name, values.float().contiguous().numpy())

    read = reader(hub, model.root)
    bfloat16("token_embd", read("model.embed_tokens.weight"))
    for i, attends in enumerate(model.attends):
        at = f"model.layers.{i}."
        for item in (item for item in model.items if item.layer == i and item.kind != "expert"):
            _write_gguf_tensor(item, at, f"blk.{i}.", "attn_gate" if attends else "ssm_g", read, bfloat16, float32)
        for source, name in GGUF_EXPERTS.items() if i else ():
            names = (f"{at}block_sparse_moe.experts.{x}.{source}.weight" for x in range(model.sizes.experts))
            bfloat16(f"blk.{i}.{name}", torch.stack([read(n) for n in names]))
    float32("output_norm.weight", read("model.norm.weight"))
    if model.k3:
        score = read("model.output_attn_res_norm.weight").float() * read("model.output_attn_res_proj.weight")[0].float()
        float32("output_res_score.weight", score)
    bfloat16("output", read("lm_head.weight"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def reader(hub: Path, root: str) -> Callable[[str], Tensor]:
    """Return what reads a tensor of a checkpoint by its name; packed ones are unpacked."""
    files = json.loads((hub / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]
    opened = cache(lambda file: safe_open(hub / file, framework="pt"))

    def read(name: str) -> Tensor:
        name = root + name
        if name in files:
            return opened(files[name]).get_tensor(name)
        return MXFP4(read(f"{name}_packed"[len(root) :]), read(f"{name}_scale"[len(root) :])).unpack(torch.float32)

    return read


def _write_gguf_tensor(
    item: Item,
    at: str,
    block: str,
    gate: str,
    read: Callable[[str], Tensor],
    bfloat16: Callable[[str, Tensor], None],
    float32: Callable[[str, Tensor], None],
) -> None:
    name = item.name.removeprefix(at).removesuffix(".weight")
    if name.endswith("_res_proj"):
        return  # is part of the score
    values = read(item.name)
    if name in GGUF_MATRICES:
        bfloat16(block + GGUF_MATRICES[name], values)
    elif name in GGUF_VECTORS:
        float32(f"{block}{GGUF_VECTORS[name]}.weight", values)
    elif name.endswith("_conv1d"):
        float32(f"{block}ssm_conv1d_{name[-8]}.weight", values.view(1, -1, 1, CONV))
    elif name.endswith("A_log"):
        float32(f"{block}ssm_a", -values.exp())
    elif name.endswith("dt_bias"):
        float32(f"{block}ssm_dt.bias", values)
    elif name.endswith("e_score_correction_bias"):
        float32(f"{block}exp_probs_b.bias", values)
    elif name == "self_attn.g_proj":
        bfloat16(block + gate, values)
    elif name == "self_attn.kv_b_proj":
        up = values.view(-1, PLAIN + VALUE, LATENT)
        bfloat16(f"{block}attn_k_b", up[:, :PLAIN].transpose(1, 2))
        bfloat16(f"{block}attn_v_b", up[:, PLAIN:])
    elif name.endswith("_res_norm"):
        query = read(item.name.replace("_norm.", "_proj."))[0]
        site = "attn" if "self_attention" in name else "ffn"
        float32(f"{block}{site}_res_score.weight", values.float() * query.float())
    else:
        raise ValueError(f"{item.name} has no name in GGUF")


def _write_gguf_keys(writer, model: Model, gguf) -> None:
    s, at = model.sizes, f"{model.arch}."
    text = model.config()
    text = text.get("text_config", text)
    writer.add_name(f"synthetic-{model.arch}")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    integers = {
        "block_count": s.layers,
        "context_length": CONTEXT,
        "embedding_length": s.width,
        "feed_forward_length": s.dense,
        "vocab_size": s.vocab,
        "attention.head_count": s.heads,
        "attention.kv_lora_rank": LATENT,
        "attention.q_lora_rank": s.query_rank,
        "attention.key_length": LATENT + SHARED,
        "attention.value_length": LATENT,
        "attention.key_length_mla": PLAIN + SHARED,
        "attention.value_length_mla": VALUE,
        "rope.dimension_count": SHARED,
        "ssm.conv_kernel": CONV,
        "kda.head_dim": KEY,
        "expert_count": s.experts,
        "expert_used_count": s.chosen,
        "expert_feed_forward_length": s.inner,
        "expert_shared_count": s.shared,
        "leading_dense_block_count": 1,
        "expert_gating_func": 2,  # sigmoid
        "expert_latent_length": s.latent,
        "attn_res.block_size": s.block,
    }
    floats = {"attention.layer_norm_rms_epsilon": EPS, "expert_weights_scale": text["routed_scaling_factor"]}
    if model.k3:
        floats |= {"kda.gate_lower_bound": -5.0, "activation.situ_beta": 4.0, "activation.situ_linear_beta": 25.0}
    for key, number in integers.items():
        if number is not None:
            writer.add_uint32(at + key, number)
    for key, number in floats.items():
        writer.add_float32(at + key, number)
    writer.add_array(at + "attention.head_count_kv", [int(attends) for attends in model.attends])
    writer.add_bool(at + "expert_weights_norm", True)
    words = spelled(vocabulary(s.vocab - len(SPECIALS)))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("kimi-k2")
    writer.add_token_list(words + SPECIALS)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(words) + [gguf.TokenType.CONTROL] * len(SPECIALS))
    writer.add_token_merges([f"{word[0]} {word[1]}" for word in words[256:]])
    writer.add_bos_token_id(text["bos_token_id"])
    writer.add_eos_token_id(text["eos_token_id"])
    writer.add_pad_token_id(text["pad_token_id"])
    writer.add_add_bos_token(False)


@click.command(help=__doc__)
@click.option("--arch", type=click.Choice(["kimi-linear", "kimi-k3"]), default="kimi-linear", show_default=True)
@click.option(
    "--scale", type=click.Choice(["tiny", "medium", "large", "deep disk"]), default="medium", show_default=True
)
@click.option("--expert-format", type=click.Choice(["bf16", "mxfp4"]), default="bf16", show_default=True)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="Folder to write.")
@click.option("--gguf", type=click.Path(dir_okay=False, path_type=Path), help="Write this file as well.")
@click.option("--seed", type=int, default=1, show_default=True)
def main(arch: str, scale: str, expert_format: str, out: Path, gguf: Path | None, seed: int) -> None:
    """Write the checkpoint, unless the folder has one, and the GGUF file."""
    if (arch, scale) not in SIZES:
        raise click.UsageError(f"{arch} has no scale {scale}")
    model = Model(arch, scale)
    total, used = model.parameters()
    click.echo(f"{arch} {scale}: {total:,} parameters, {used:,} a token")
    if not (out / "model.safetensors.index.json").exists():
        write_hub(model, out, seed, expert_format == "mxfp4")
    if gguf:
        write_gguf(model, out, gguf)


if __name__ == "__main__":
    main()
