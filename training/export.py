"""Write a trained model in the layout of the released checkpoints.

    python -m training.export STATE OUT

STATE is a file saved by ``training.train`` or a folder with its bfloat16 copy. config.json with nested text_config,
two shards (spine, experts), index, vocabulary files. Routed experts are packed to MXFP4, the spine is rounded to
bfloat16, small tensors that the release keeps in float32 stay so, and ``A_log`` is padded to 128.
"""

import argparse
import json
import shutil
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor

from training import mxfp4
from training.data import VOCABULARY
from training.model import K3, Config
from training.train import read_copy

PREFIX = "language_model."
A_LOG_PAD = 128
VOCABULARY_FILES = ("tiktoken.model", "tokenizer_config.json", "generation_config.json")
_FLOAT32 = ("A_log", "dt_bias", "o_norm.weight", "conv1d.weight", "e_score_correction_bias")
_OWN_FIELDS = ("full_attn_layers", "kda_heads", "kda_head_dim", "conv_size", "gate_lower_bound", "lora_norm_eps")


def config_json(config: Config, like: dict) -> dict:
    """config.json: the shapes of ``config``, everything else as in ``like``, a config.json of the same family."""
    c, text = config, dict(like["text_config"])
    text |= {f.name: getattr(c, f.name) for f in fields(c) if f.name not in _OWN_FIELDS}
    text["num_key_value_heads"] = c.num_attention_heads
    text["linear_attn_config"] = text["linear_attn_config"] | {
        "full_attn_layers": list(c.full_attn_layers),
        "kda_layers": [i + 1 for i in range(c.num_hidden_layers) if not c.is_mla(i)],
        "num_heads": c.kda_heads,
        "head_dim": c.kda_head_dim,
        "short_conv_kernel_size": c.conv_size,
        "gate_lower_bound": c.gate_lower_bound,
    }
    return like | {"text_config": text}


def keeps_float32(name: str) -> bool:
    """Whether the release keeps a tensor in float32."""
    return name.endswith(_FLOAT32)


def tensors(model: K3) -> Iterator[tuple[str, Tensor, int]]:
    """Checkpoint name, tensor and shard, in the order of the files."""
    state = {k: v.detach().cpu() for k, v in model.state_dict().items()}
    for name, w in state.items():
        if name.endswith((".w1", ".w2", ".w3")):
            continue
        if name.endswith("A_log"):
            w = torch.cat([w, w.new_zeros(A_LOG_PAD - len(w))])
        yield PREFIX + name, w.float() if keeps_float32(name) else w.bfloat16(), 0
    for name in state:
        if not name.endswith(".w1"):
            continue
        stem = name.removesuffix(".w1")
        packed = {w: mxfp4.pack(state[f"{stem}.{w}"]) for w in ("w1", "w2", "w3")}
        for e in range(model.config.num_experts):
            for w, stack in packed.items():
                yield f"{PREFIX}{stem}.experts.{e}.{w}.weight_packed", stack.codes[e], 1
                yield f"{PREFIX}{stem}.experts.{e}.{w}.weight_scale", stack.scales[e], 1


def write_safetensors(path: Path, items: list[tuple[str, Tensor]]) -> int:
    """Write tensors in the given order, so that an expert's six lie together; returns their bytes."""
    kinds = {torch.float32: "F32", torch.bfloat16: "BF16", torch.uint8: "U8"}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    blobs, at = [], 0
    for name, t in sorted(items, key=lambda item: item[1].element_size(), reverse=True):  # keeps each aligned
        blob = t.contiguous().view(torch.uint8).numpy().tobytes()
        header[name] = {"dtype": kinds[t.dtype], "shape": list(t.shape), "data_offsets": [at, at + len(blob)]}
        blobs.append(blob)
        at += len(blob)
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with open(path, "wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.writelines(blobs)
    return at


def export(model: K3, out: Path | str, vocabulary: Path | str = VOCABULARY) -> int:
    """Write the whole folder, with the vocabulary files and other settings of ``vocabulary``; returns bytes."""
    out, vocabulary = Path(out), Path(vocabulary)
    out.mkdir(parents=True, exist_ok=True)
    items, where, total = list(tensors(model)), {}, 0
    for shard in (0, 1):
        name = f"model-{shard + 1:05d}-of-000002.safetensors"
        part = [(n, t) for n, t, s in items if s == shard]
        where |= {n: name for n, _ in part}
        total += write_safetensors(out / name, part)

    def dump(name: str, value: object) -> None:
        (out / name).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    dump("model.safetensors.index.json", index)
    like = json.loads((vocabulary / "config.json").read_text(encoding="utf-8"))
    dump("config.json", config_json(model.config, like))
    if out.resolve() != vocabulary.resolve():
        for name in VOCABULARY_FILES:
            shutil.copyfile(vocabulary / name, out / name)
    return total


def main() -> None:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    p.add_argument("state")
    p.add_argument("out")
    p.add_argument("--vocabulary", default=VOCABULARY, help="a model's folder, for its vocabulary and config.json")
    a = p.parse_args()
    if Path(a.state).is_dir():
        model, _ = read_copy(a.state)
    else:
        saved = torch.load(a.state, map_location="cpu", weights_only=True)
        model = K3(Config(**saved["config"]))
        model.load_state_dict(saved["model"])
    print(export(model, a.out, a.vocabulary), "bytes of tensors")


if __name__ == "__main__":
    main()
