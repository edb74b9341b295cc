"""A trainable Kimi K3: KDA and gated MLA layers, latent mixture of experts, block attention residuals, SiTU.

Parameter names are the checkpoint's without the ``language_model.`` prefix, except that the routed experts of a
layer are three stacked tensors and ``A_log`` is not padded (``export`` and ``load_checkpoint`` translate).

Training runs on flat batches: ``tokens`` [n] and ``docs`` [n], where ``docs`` numbers the documents and every
mechanism that looks back (convolution, state, attention) stops at a document's start. The work is split into
functions of tensors that are compiled one by one; what lies between them (state recursion, attention kernel) is
left to eager PyTorch. Weights are float32; products run in ``compute`` (bfloat16 for training). The stream, norms,
decays, router and scores stay float32.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch._inductor
import torch.nn as nn
import torch.nn.functional as F

from deltafin.quant import MXFP4
from training import mxfp4
from training.kda import CHUNK, ChunkRecursion, chunk_terms


# ------------------------------------------------------------------ configuration
@dataclass
class Config:
    """The fields of config.json that shape the model; the defaults are Nano's."""

    hidden_size: int = 256
    vocab_size: int = 4096
    num_hidden_layers: int = 9
    full_attn_layers: tuple = (4, 8, 9)  # counted from 1, as in config.json
    kda_heads: int = 4
    kda_head_dim: int = 64
    conv_size: int = 4
    gate_lower_bound: float = -5.0
    num_attention_heads: int = 4
    qk_nope_head_dim: int = 64
    qk_rope_head_dim: int = 32
    v_head_dim: int = 64
    q_lora_rank: int = 128
    kv_lora_rank: int = 96
    intermediate_size: int = 768
    first_k_dense_replace: int = 1
    num_experts: int = 32
    num_experts_per_token: int = 4
    num_shared_experts: int = 2
    routed_expert_hidden_size: int = 128
    moe_intermediate_size: int = 96
    routed_scaling_factor: float = 1.0
    attn_res_block_size: int = 4  # 0: a plain residual stream, no K3 but good for comparison
    activation_situ_beta: float = 4.0
    activation_situ_linear_beta: float = 25.0
    rms_norm_eps: float = 1e-5
    lora_norm_eps: float = 1e-6  # the norms inside MLA: the released code's own default
    max_position_embeddings: int = 32768

    @classmethod
    def from_hf(cls, config):
        """From a parsed config.json."""
        t = config.get("text_config", config)
        la = t["linear_attn_config"]
        own = {k: t[k] for k in cls.__dataclass_fields__ if k in t}
        return cls(
            **own,
            full_attn_layers=tuple(la["full_attn_layers"]),
            kda_heads=la["num_heads"],
            kda_head_dim=la["head_dim"],
            conv_size=la["short_conv_kernel_size"],
            gate_lower_bound=la["gate_lower_bound"],
        )

    def is_mla(self, layer):
        """Whether a layer, counted from 0, is full attention."""
        return layer + 1 in self.full_attn_layers


# ------------------------------------------------------------------ small pieces
def wide(x):
    """float32, or float64 where a test runs in float64."""
    return x if x.dtype == torch.float64 else x.float()


def rms(x, weight, eps):
    """Root-mean-square norm in float32."""
    x = wide(x)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def l2(x):
    """Rows of length one."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def situ(gate, up, c):
    """SiTU: both factors softly bounded (spec: Kimi K3)."""
    a, b = c.activation_situ_beta, c.activation_situ_linear_beta
    gate, up = wide(gate), wide(up)
    return a * torch.tanh(gate / a) * torch.sigmoid(gate) * (b * torch.tanh(up / b))


def joined(*weights, compute):
    """Several projections of one input as a single weight; rows padded to a multiple of 8."""
    w = torch.cat(weights)
    return F.pad(w, (0, 0, 0, -w.shape[0] % 8)).to(compute)


def shifted(x, s):
    """x moved down by s tokens, zeros first."""
    return F.pad(x, (0, 0, s, 0))[: x.shape[0]] if s else x


# ------------------------------------------------------------------ attention residuals
def mix(blocks, prefix, y, res_norm, res_proj, norm, eps, compute):
    """prefix + y, the mixture over blocks and prefix, and its norm.

    blocks: tuple of stored vectors; prefix: None at a block's first sublayer;
    y: the last sublayer's output, or None at the embedding."""
    if y is not None:
        y = wide(y)
        prefix = y if prefix is None else prefix + y
    sources = (*blocks, prefix)
    if len(sources) == 1:
        return prefix, rms(prefix, norm, eps).to(compute)
    w = res_norm * res_proj[0]
    scores = torch.stack([(s * w).sum(-1) * torch.rsqrt(s.square().mean(-1) + eps) for s in sources])
    weights = torch.softmax(scores, 0)
    h = sum(p.unsqueeze(-1) * s for p, s in zip(weights.unbind(0), sources, strict=True))
    return prefix, rms(h, norm, eps).to(compute)


# ------------------------------------------------------------------ KDA
def kda_project(x, p, c, compute):
    """Joined projection: raw q, k, v (one tensor), gate, decay input, beta input."""
    n, d = c.kda_heads * c.kda_head_dim, c.kda_head_dim
    w = joined(p["q_proj"], p["k_proj"], p["v_proj"], p["g_proj"], p["f_a_proj"], p["b_proj"], compute=compute)
    y = F.linear(x, w)
    return y[:, : 3 * n], y[:, 3 * n : 4 * n], y[:, 4 * n : 4 * n + d], y[:, 4 * n + d : 4 * n + d + c.kda_heads]


def kda_gates(fa, b, p, c, compute):
    """Log decays [n, heads, width] and beta [n, heads]."""
    z = wide(F.linear(fa, p["f_b_proj"].to(compute))) + p["dt_bias"]
    z = z.unflatten(-1, (c.kda_heads, c.kda_head_dim)) * p["A_log"].exp()[:, None]
    return c.gate_lower_bound * torch.sigmoid(z), torch.sigmoid(wide(b))


def kda_heads(conv, c):
    """Queries, keys and values [n, heads, width] from the convolution."""
    q, k, v = F.silu(conv).unflatten(-1, (3, c.kda_heads, c.kda_head_dim)).unbind(-3)
    return l2(q) * c.kda_head_dim**-0.5, l2(k), v


def kda_before(x, docs, p, c, compute):
    """Projections, convolution, gates, and the state-free terms of the chunk form."""
    raw, gate, fa, b = kda_project(x, p, c, compute)
    taps = torch.cat([p["q_conv1d"], p["k_conv1d"], p["v_conv1d"]])[:, 0]  # [channels, 4]
    conv, wraw = 0, wide(raw)
    for s in range(c.conv_size):
        here = wraw
        if s:
            ok = shifted(docs[:, None] + 1, s) == docs[:, None] + 1
            here = torch.where(ok, shifted(wraw, s), 0.0)
        conv = conv + here * taps[:, c.conv_size - 1 - s]
    q, k, v = kda_heads(conv, c)
    g, beta = kda_gates(fa, b, p, c, compute)
    pad = -x.shape[0] % CHUNK
    if pad:  # inference only: tokens that change nothing
        q, k, v, g, beta = (torch.cat([t, t.new_zeros(pad, *t.shape[1:])]) for t in (q, k, v, g, beta))
        docs = torch.cat([docs, docs[-1:].expand(pad)])
    return (gate, *chunk_terms(q, k, v, g, beta, docs))


def kda_after(o, gate, p, c, compute):
    """o [chunks, heads, 16, V] -> layer output."""
    o = o.transpose(1, 2).reshape(-1, c.kda_heads, c.kda_head_dim)[: gate.shape[0]]
    o = rms(o, p["o_norm"], c.rms_norm_eps).flatten(1) * torch.sigmoid(wide(gate))
    return F.linear(o.to(compute), p["o_proj"].to(compute))


# ------------------------------------------------------------------ MLA
def mla_project(x, p, c, compute):
    """Query [n, heads, nope+rope], normalised latent [n, rank], shared key [n, rope], gate."""
    w = joined(p["q_a_proj"], p["kv_a_proj_with_mqa"], p["g_proj"], compute=compute)
    y = F.linear(x, w)
    a, kv = c.q_lora_rank, c.q_lora_rank + c.kv_lora_rank
    end = kv + c.qk_rope_head_dim
    q = rms(y[:, :a], p["q_a_layernorm"], c.lora_norm_eps).to(compute)
    q = F.linear(q, p["q_b_proj"].to(compute)).unflatten(-1, (c.num_attention_heads, -1))
    latent = rms(y[:, a:kv], p["kv_a_layernorm"], c.lora_norm_eps).to(compute)
    return q, latent, y[:, kv:end], y[:, end : end + c.num_attention_heads * c.v_head_dim]


def mla_before(x, p, c, compute):
    """q, k, v for an ordinary attention kernel (v padded to k's width), and gate."""
    q, latent, shared, gate = mla_project(x, p, c, compute)
    kv = F.linear(latent, p["kv_b_proj"].to(compute)).unflatten(-1, (c.num_attention_heads, -1))
    k, v = kv[..., : c.qk_nope_head_dim], kv[..., c.qk_nope_head_dim :]
    k = torch.cat([k, shared.unsqueeze(1).expand(-1, c.num_attention_heads, -1)], -1)
    v = F.pad(v, (0, k.shape[-1] - v.shape[-1]))
    return q.contiguous(), k.contiguous(), v.contiguous(), gate


def mla_after(o, gate, p, c, compute):
    """Gate and output projection of attention."""
    o = wide(o[..., : c.v_head_dim]).flatten(1) * torch.sigmoid(wide(gate))
    return F.linear(o.to(compute), p["o_proj"].to(compute))


def attend(q, k, v, layout, masked=False):
    """Causal attention inside documents: the variable-length flash kernel for bfloat16 on a GPU, else, or with
    ``masked``, plain attention under a mask in float32 or float64."""
    scale = q.shape[-1] ** -0.5
    if q.is_cuda and q.dtype == torch.bfloat16 and not masked:
        return torch.ops.aten._flash_attention_forward(
            q, k, v, layout.cu, layout.cu, layout.longest, layout.longest, 0.0, True, False, scale=scale
        )[0]
    docs = layout.docs.view(layout.rows, -1)
    mask = (docs[:, :, None] == docs[:, None, :]).tril()[:, None]
    parts = (wide(t).unflatten(0, docs.shape).transpose(1, 2) for t in (q, k, v))
    o = F.scaled_dot_product_attention(*parts, attn_mask=mask, scale=scale)
    return o.transpose(1, 2).flatten(0, 1).to(q.dtype)


# ------------------------------------------------------------------ feed-forward
def mlp(x, p, c, compute):
    """Gated feed-forward."""
    y = F.linear(x, joined(p["gate_proj"], p["up_proj"], compute=compute))
    n = p["gate_proj"].shape[0]
    return F.linear(situ(y[:, :n], y[:, n : 2 * n], c).to(compute), p["down_proj"].to(compute))


def route(x, p, c):
    """Weights [n, experts], zero for experts not chosen; ties go to the lower index."""
    scores = torch.sigmoid(F.linear(wide(x), p["gate"]))
    choice = scores.detach() + p["bias"]
    a, b = choice.unsqueeze(-1), choice.unsqueeze(-2)
    index = torch.arange(c.num_experts, device=x.device)
    ahead = (b > a) | ((b == a) & (index[None, :] < index[:, None]))
    chosen = ahead.sum(-1) < c.num_experts_per_token
    w = torch.where(chosen, scores, 0.0)
    w = w / (w.sum(-1, keepdim=True) + 1e-20) * c.routed_scaling_factor
    return w, chosen


def moe(x, w1, w2, w3, p, c, compute):
    """Every expert on every token as two plain products; experts that were not
    chosen get weight zero.  Wasteful in arithmetic, but the arithmetic is small
    and nothing is gathered, sorted or ragged."""
    w, chosen = route(x, p, c)
    z = F.linear(x, p["routed_expert_down_proj"].to(compute))
    gate = F.linear(z, w1.flatten(0, 1).to(compute)).unflatten(-1, (c.num_experts, -1))
    up = F.linear(z, w3.flatten(0, 1).to(compute)).unflatten(-1, (c.num_experts, -1))
    h = (situ(gate, up, c) * w.unsqueeze(-1)).to(compute).flatten(1)
    y = F.linear(h, w2.transpose(0, 1).flatten(1).to(compute))
    y = rms(y, p["routed_expert_norm"], c.rms_norm_eps).to(compute)
    y = F.linear(y, p["routed_expert_up_proj"].to(compute))
    shared = {k: p["shared_experts." + k] for k in ("gate_proj", "up_proj", "down_proj")}
    return y + mlp(x, shared, c, compute), chosen.sum(0, dtype=torch.float32)


def head_loss(x, weight, targets, weights, compute):
    """Cross entropy summed with ``weights`` [n]; detached per token: the loss, and whether the target is the argmax."""
    logits = wide(F.linear(x, weight.to(compute)))
    own = logits.gather(-1, targets[:, None])[:, 0]
    loss = torch.logsumexp(logits, -1) - own
    return (loss * weights).sum(), loss.detach(), own.detach() >= logits.detach().amax(-1)


# ------------------------------------------------------------------ the module
STD = 0.02
OUTPUTS = ("o_proj.weight", "down_proj.weight", "routed_expert_up_proj.weight", ".w2")  # write to the stream


class Weight(nn.Module):
    """A bare `weight`, so that names come out as in the checkpoint."""

    def __init__(self, *shape, std=STD, fill=None):
        super().__init__()
        w = torch.randn(shape) * std if fill is None else torch.full(shape, float(fill))
        self.weight = nn.Parameter(w)


def linear(out, inp):
    """A projection's weight [out, inp]."""
    return Weight(out, inp)


def kda_module(c):
    """Weights of a KDA layer."""
    n, d = c.kda_heads * c.kda_head_dim, c.kda_head_dim
    m = nn.Module()
    for name in ("q_proj", "k_proj", "v_proj", "g_proj"):
        m.add_module(name, linear(n, c.hidden_size))
    m.o_proj = linear(c.hidden_size, n)
    m.f_a_proj, m.f_b_proj, m.b_proj = linear(d, c.hidden_size), linear(n, d), linear(c.kda_heads, c.hidden_size)
    for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
        m.add_module(name, Weight(n, 1, c.conv_size, std=0.2))
        with torch.no_grad():
            m.get_submodule(name).weight[..., -1] += 0.5  # start near "this token"
    m.A_log = nn.Parameter(torch.zeros(c.kda_heads))
    m.dt_bias = nn.Parameter(torch.linspace(-5, 0, d).repeat(c.kda_heads))  # slow to fast channels in every head
    m.o_norm = Weight(d, fill=1)
    return m


def mla_module(c):
    """Weights of a full attention layer."""
    h, qk = c.num_attention_heads, c.qk_nope_head_dim + c.qk_rope_head_dim
    m = nn.Module()
    m.q_a_proj, m.q_a_layernorm = linear(c.q_lora_rank, c.hidden_size), Weight(c.q_lora_rank, fill=1)
    m.q_b_proj = linear(h * qk, c.q_lora_rank)
    m.kv_a_proj_with_mqa = linear(c.kv_lora_rank + c.qk_rope_head_dim, c.hidden_size)
    m.kv_a_layernorm = Weight(c.kv_lora_rank, fill=1)
    m.kv_b_proj = linear(h * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)
    m.g_proj, m.o_proj = linear(h * c.v_head_dim, c.hidden_size), linear(c.hidden_size, h * c.v_head_dim)
    return m


def mlp_module(c, width):
    """Weights of a feed-forward."""
    m = nn.Module()
    m.gate_proj, m.up_proj = linear(width, c.hidden_size), linear(width, c.hidden_size)
    m.down_proj = linear(c.hidden_size, width)
    return m


def moe_module(c):
    """Weights of a mixture of experts."""
    e, f, n = c.num_experts, c.moe_intermediate_size, c.routed_expert_hidden_size
    m = nn.Module()
    m.gate = linear(e, c.hidden_size)
    m.gate.register_buffer("e_score_correction_bias", torch.zeros(e))
    m.routed_expert_down_proj, m.routed_expert_up_proj = linear(n, c.hidden_size), linear(c.hidden_size, n)
    m.routed_expert_norm = Weight(n, fill=1)
    m.shared_experts = mlp_module(c, f * c.num_shared_experts)
    m.w1 = nn.Parameter(torch.randn(e, f, n) * STD)
    m.w3 = nn.Parameter(torch.randn(e, f, n) * STD)
    m.w2 = nn.Parameter(torch.randn(e, n, f) * STD)
    return m


def named(module):
    """Weights of a sublayer by short name: `q_proj`, `shared_experts.up_proj`, `A_log`."""
    return {k.removesuffix(".weight"): v for k, v in module.named_parameters()}


@dataclass(frozen=True)
class Layout:
    """Where documents lie in a flat batch of equal rows."""

    docs: torch.Tensor  # [n] int32, never decreasing
    cu: torch.Tensor | None = None  # starts of all documents and the end, int32: for the flash kernel
    longest: int = 0
    rows: int = 1

    @classmethod
    def one(cls, n, device="cpu"):
        """A single document."""
        ends = torch.tensor([0, n], dtype=torch.int32, device=device)
        return cls(torch.zeros(n, dtype=torch.int32, device=device), ends, n)


class K3(nn.Module):
    """The model. ``quantised`` rounds the routed experts to MXFP4, ``masked`` avoids the flash kernel."""

    def __init__(self, config, compute=torch.float32):
        super().__init__()
        c = self.config = config
        self.compute = compute
        self.quantised = self.masked = False
        m = self.model = nn.Module()
        m.embed_tokens = Weight(c.vocab_size, c.hidden_size)
        m.layers = nn.ModuleList()
        for i in range(c.num_hidden_layers):
            layer = nn.Module()
            layer.self_attn = mla_module(c) if c.is_mla(i) else kda_module(c)
            if i < c.first_k_dense_replace:
                layer.mlp = mlp_module(c, c.intermediate_size)
            else:
                layer.block_sparse_moe = moe_module(c)
            for name in ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm"):
                layer.add_module(name, Weight(c.hidden_size, fill=1))
            for name in ("self_attention_res_proj", "mlp_res_proj"):
                layer.add_module(name, Weight(1, c.hidden_size, fill=0))  # zero: a plain average at first
            m.layers.append(layer)
        m.norm, m.output_attn_res_norm = Weight(c.hidden_size, fill=1), Weight(c.hidden_size, fill=1)
        m.output_attn_res_proj = Weight(1, c.hidden_size, fill=0)
        self.lm_head = Weight(c.vocab_size, c.hidden_size)
        with torch.no_grad():
            for name, p in self.named_parameters():
                if name.endswith(OUTPUTS):
                    p.div_((2 * c.num_hidden_layers) ** 0.5)
        self.load = {}  # layer -> tokens sent to each expert in the last forward
        self.f = eager_pieces()

    def compile(self, names):
        """Compile some pieces (not the model: a few small graphs, shared by all layers), leave the others alone."""
        self.f = {k: torch.compile(v, dynamic=False) if k in names else v for k, v in eager_pieces().items()}

    def experts(self, i):
        """The routed experts' three stacks of a layer, rounded if the model is quantised."""
        m = self.model.layers[i].block_sparse_moe
        ws = (m.w1, m.w2, m.w3)
        return tuple(mxfp4.fake_quantise(w) for w in ws) if self.quantised else ws

    def hidden(self, tokens, layout):
        """Final normed vectors [n, hidden]."""
        c, f, compute = self.config, self.f, self.compute
        eps, size = c.rms_norm_eps, c.attn_res_block_size
        y, prefix, blocks = wide(F.embedding(tokens, self.model.embed_tokens.weight)), None, ()
        self.load = {}
        for i, layer in enumerate(self.model.layers):
            prefix, x = f["mix"](
                blocks,
                prefix,
                y,
                layer.self_attention_res_norm.weight,
                layer.self_attention_res_proj.weight,
                layer.input_layernorm.weight,
                eps,
                compute,
            )
            if size and i % size == 0:
                blocks, prefix = (*blocks, prefix), None
            p = named(layer.self_attn)
            if c.is_mla(i):
                q, k, v, gate = f["mla_before"](x, p, c, compute)
                y = f["mla_after"](attend(q, k, v, layout, self.masked), gate, p, c, compute)
            else:
                gate, *terms = f["kda_before"](x, layout.docs, p, c, compute)
                zero = terms[3].new_zeros(layout.rows, c.kda_heads, c.kda_head_dim, c.kda_head_dim)
                y = f["kda_after"](ChunkRecursion.apply(*terms, zero, layout.rows)[0], gate, p, c, compute)
            prefix, x = f["mix"](
                blocks,
                prefix,
                y,
                layer.mlp_res_norm.weight,
                layer.mlp_res_proj.weight,
                layer.post_attention_layernorm.weight,
                eps,
                compute,
            )
            if i < c.first_k_dense_replace:
                y = f["mlp"](x, named(layer.mlp), c, compute)
            else:
                m = layer.block_sparse_moe
                p = named(m) | {"bias": m.gate.e_score_correction_bias}
                y, self.load[i] = f["moe"](x, *self.experts(i), p, c, compute)
        m = self.model
        return f["mix"](
            blocks, prefix, y, m.output_attn_res_norm.weight, m.output_attn_res_proj.weight, m.norm.weight, eps, compute
        )[1]

    def logits(self, tokens, layout):
        """Float32 logits [n, vocabulary]."""
        return wide(F.linear(self.hidden(tokens, layout), self.lm_head.weight.to(self.compute)))

    def loss(self, tokens, targets, weights, layout):
        """See ``head_loss``."""
        x = self.hidden(tokens, layout)
        return self.f["head_loss"](x, self.lm_head.weight, targets, weights, self.compute)


PIECES = ("mix", "kda_before", "kda_after", "mla_before", "mla_after", "mlp", "moe", "head_loss")
# Compiled for a GPU (PyTorch 2.11), `mix` passes on no gradients to what it mixes, and no error shows it.
SOUND = tuple(name for name in PIECES if name != "mix")


def eager_pieces():
    """The functions that ``K3.compile`` may compile, as they are."""
    return {k: globals()[k] for k in PIECES}


# ------------------------------------------------------------------ reading a checkpoint
def load_checkpoint(folder, compute=torch.float32, device="cpu"):
    """A folder in K3's layout -> K3 with float32 weights (MXFP4 experts expanded)."""
    from safetensors.torch import load_file

    folder = Path(folder)
    c = Config.from_hf(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    raw = {}
    for name in sorted(set(index["weight_map"].values())):
        raw.update(load_file(folder / name))
    raw = {k.removeprefix("language_model."): v for k, v in raw.items() if k.startswith("language_model.")}
    model = K3(c, compute)
    state = model.state_dict()
    for name, own in state.items():
        if name.endswith((".w1", ".w2", ".w3")):
            stem, w = name.rsplit(".", 1)
            packed = [f"{stem}.experts.{e}.{w}.weight" for e in range(c.num_experts)]
            value = torch.stack([MXFP4(raw[f"{p}_packed"], raw[f"{p}_scale"]).unpack(torch.float32) for p in packed])
        else:
            value = raw[name].float()
            if name.endswith("A_log"):
                value = value[: c.kda_heads]
        if own.shape != value.shape:
            raise ValueError(f"{name} has the shape {tuple(value.shape)}, not {tuple(own.shape)}")
        state[name] = value
    model.load_state_dict(state)
    return model.to(device)
