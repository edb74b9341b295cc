"""A second forward pass in plain numpy float64, written from the published formulas, one token and one head at a time.

It shares nothing with the package but the checkpoint's files: names, layouts and packing are read here anew.
"""

import json
from pathlib import Path

import numpy as np
from safetensors.torch import load_file

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def rms(x, w, eps):
    return x / np.sqrt((x * x).mean() + eps) * w


class Model:
    def __init__(self, folder):
        folder = Path(folder)
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.c = raw.get("text_config") or raw
        self.t = {}
        for file in sorted(folder.glob("model*.safetensors")):
            self.t |= {
                k: v.float().double().numpy() if v.is_floating_point() else v.numpy()
                for k, v in load_file(file).items()
            }
        self.root = next(k for k in self.t if k.endswith("embed_tokens.weight")).removesuffix("embed_tokens.weight")
        self.eps = self.c.get("rms_norm_eps", 1e-6)

    def has(self, name):
        return self.root + name in self.t or self.root + name + "_packed" in self.t

    def get(self, name):
        if self.root + name in self.t:
            return self.t[self.root + name]
        codes, scales = self.t[f"{self.root}{name}_packed"], self.t[f"{self.root}{name}_scale"]
        w = np.empty((codes.shape[0], codes.shape[1] * 2))
        for r in range(w.shape[0]):
            for col in range(w.shape[1]):
                nibble = codes[r, col // 2] >> 4 if col % 2 else codes[r, col // 2] & 15
                w[r, col] = E2M1[nibble] * 2.0 ** (int(scales[r, col // 32]) - 127)
        self.t[self.root + name] = w
        return w

    def mix(self, blocks, prefix, at):
        sources = [*blocks, prefix]
        w = self.get(f"{at}_norm.weight") * self.get(f"{at}_proj.weight").reshape(-1)
        scores = np.array([(rms(s, np.ones_like(s), self.eps) * w).sum() for s in sources])
        p = np.exp(scores - scores.max())
        return sum(a * s for a, s in zip(p / p.sum(), sources, strict=True))

    def activation(self, gate, up):
        if self.c.get("hidden_act", "silu") == "silu":
            return gate * sigmoid(gate) * up
        a, b = self.c["activation_situ_beta"], self.c["activation_situ_linear_beta"]
        return a * np.tanh(gate / a) * sigmoid(gate) * b * np.tanh(up / b)

    def mlp(self, at, x):
        gate, up, down = (self.get(f"{at}.{m}_proj.weight") for m in ("gate", "up", "down"))
        return down @ self.activation(gate @ x, up @ x)

    def kda(self, at, x, state):
        c = self.c["linear_attn_config"]
        heads, d = c["num_heads"], c["head_dim"]
        made = []
        for m in "qkv":
            taps = self.get(f"{at}.{m}_conv1d.weight")[:, 0]
            window = state.setdefault(m, [np.zeros(heads * d)] * (taps.shape[1] - 1))
            window.append(self.get(f"{at}.{m}_proj.weight") @ x)
            y = sum(taps[:, j] * window[-taps.shape[1] + j] for j in range(taps.shape[1]))
            made.append((y * sigmoid(y)).reshape(heads, d))
        q, k, v = made
        z = (
            self.get(f"{at}.f_b_proj.weight") @ (self.get(f"{at}.f_a_proj.weight") @ x) + self.get(f"{at}.dt_bias")
        ).reshape(heads, d)
        speed = np.exp(self.get(f"{at}.A_log").reshape(-1)[:heads])[:, None]
        floor = c.get("gate_lower_bound")
        g = -speed * np.logaddexp(0, z) if floor is None else floor * sigmoid(speed * z)
        beta = sigmoid(self.get(f"{at}.b_proj.weight") @ x)
        if self.has(f"{at}.g_proj.weight"):
            gate = self.get(f"{at}.g_proj.weight") @ x
        else:
            gate = self.get(f"{at}.g_b_proj.weight") @ (self.get(f"{at}.g_a_proj.weight") @ x)
        out = []
        memory = state.setdefault("S", np.zeros((heads, d, d)))
        for h in range(heads):
            qh = q[h] / np.sqrt((q[h] ** 2).sum() + 1e-6) / np.sqrt(d)
            kh = k[h] / np.sqrt((k[h] ** 2).sum() + 1e-6)
            S = np.exp(g[h])[:, None] * memory[h]
            S = S + np.outer(kh, beta[h] * (v[h] - S.T @ kh))
            memory[h] = S
            out.append(rms(S.T @ qh, self.get(f"{at}.o_norm.weight"), self.eps))
        return self.get(f"{at}.o_proj.weight") @ (np.concatenate(out) * sigmoid(gate))

    def mla(self, at, x, state):
        c = self.c
        heads, plain, shared, value = (
            c[n] for n in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        )
        if c.get("q_lora_rank"):
            a = rms(self.get(f"{at}.q_a_proj.weight") @ x, self.get(f"{at}.q_a_layernorm.weight"), 1e-6)
            q = self.get(f"{at}.q_b_proj.weight") @ a
        else:
            q = self.get(f"{at}.q_proj.weight") @ x
        q = q.reshape(heads, plain + shared)
        both = self.get(f"{at}.kv_a_proj_with_mqa.weight") @ x
        latent = rms(both[: c["kv_lora_rank"]], self.get(f"{at}.kv_a_layernorm.weight"), 1e-6)
        kv = (self.get(f"{at}.kv_b_proj.weight") @ latent).reshape(heads, plain + value)
        seen = state.setdefault("seen", [])
        seen.append((kv, both[c["kv_lora_rank"] :]))
        out = []
        for h in range(heads):
            scores = np.array([q[h, :plain] @ kv[h, :plain] + q[h, plain:] @ s for kv, s in seen]) / np.sqrt(
                plain + shared
            )
            p = np.exp(scores - scores.max())
            p /= p.sum()
            out.append(sum(a * kv[h, plain:] for a, (kv, _) in zip(p, seen, strict=True)))
        y = np.concatenate(out)
        if c.get("mla_use_output_gate"):
            y = y * sigmoid(self.get(f"{at}.g_proj.weight") @ x)
        return self.get(f"{at}.o_proj.weight") @ y

    def moe(self, at, x):
        c = self.c
        s = sigmoid(self.get(f"{at}.gate.weight") @ x)
        ranked = s + self.get(f"{at}.gate.e_score_correction_bias")
        chosen = sorted(range(len(s)), key=lambda e: (-ranked[e], e))[: c["num_experts_per_token"]]
        w = {e: s[e] for e in chosen}
        if c.get("moe_renormalize", True):
            total = sum(w.values()) + 1e-20
            w = {e: value / total for e, value in w.items()}
        latent = c.get("routed_expert_hidden_size")
        z = self.get(f"{at}.routed_expert_down_proj.weight") @ x if latent else x
        y = 0
        for e in chosen:
            w1, w2, w3 = (self.get(f"{at}.experts.{e}.w{i}.weight") for i in (1, 2, 3))
            y = y + w[e] * c.get("routed_scaling_factor", 1.0) * (w2 @ self.activation(w1 @ z, w3 @ z))
        if latent and c.get("latent_moe_use_norm"):
            y = rms(y, self.get(f"{at}.routed_expert_norm.weight"), self.eps)
        if latent:
            y = self.get(f"{at}.routed_expert_up_proj.weight") @ y
        return y + self.mlp(f"{at}.shared_experts", x) if c.get("num_shared_experts") else y

    def logits(self, ids):
        """Logits after each id, one token at a time."""
        c, states, out = self.c, [{} for _ in range(self.c["num_hidden_layers"])], []
        block = c.get("attn_res_block_size")
        head = self.t.get(self.root.removesuffix("model.") + "lm_head.weight", self.get("embed_tokens.weight"))
        for token in ids:
            prefix, blocks = self.get("embed_tokens.weight")[token], []
            for i, state in enumerate(states):
                at = f"layers.{i}"
                h = self.mix(blocks, prefix, f"{at}.self_attention_res") if blocks else prefix
                x = rms(h, self.get(f"{at}.input_layernorm.weight"), self.eps)
                mixer = self.mla if i + 1 in c["linear_attn_config"]["full_attn_layers"] else self.kda
                y = mixer(f"{at}.self_attn", x, state)
                if block and i % block == 0:
                    blocks.append(prefix)
                    prefix = y
                else:
                    prefix = prefix + y
                h = self.mix(blocks, prefix, f"{at}.mlp_res") if block else prefix
                x = rms(h, self.get(f"{at}.post_attention_layernorm.weight"), self.eps)
                dense = i < c.get("first_k_dense_replace", 0) or not c.get("num_experts")
                prefix = prefix + (self.mlp(f"{at}.mlp", x) if dense else self.moe(f"{at}.block_sparse_moe", x))
            h = self.mix(blocks, prefix, "output_attn_res") if block else prefix
            out.append(head @ rms(h, self.get("norm.weight"), self.eps))
        return np.array(out)
