"""Short comparisons that change one thing at a time, and a check of the fast path's gradients.

    python -m training.experiments --corpus DIR --out DIR --seconds 390 --processes 3

Every run sees the same rows: the first stage's mixture, part of which is random words to be said again. The table
has, on held-out text, nats a token over what the assistant says and the share of replies that are right to the last
token (teacher-forced), and nats a token of books.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from training import data
from training.model import K3, PIECES, SOUND, Config, load_checkpoint
from training.optim import Optimiser, Recipe
from training.train import Batch, HeldOut, accumulate, balance, compile_soundly

KINDS = ("copy", "list", "session", "storyqa", "world", "book")
NANO = data.VOCABULARY


ADAM = Recipe()
MUON = replace(ADAM, muon=2e-3)
OLD = Recipe(4e-3, 0.0, muon=0.02, muon_decay=0.01, spectral=True, head=0.5)


@dataclass(frozen=True)
class Run:
    """One training run; the defaults are the baseline."""

    name: str
    recipe: Recipe = ADAM
    fall: bool = True
    init: str = "small"  # or "old"
    embedding: float | None = None
    config: dict = field(default_factory=dict)
    masked: bool = False
    bias_rate: float = 1e-3
    context: float = 1.0
    micro: int = 1  # micro-batches a step
    length: float = 1.0  # of the usual number of tokens
    stage: str = "short"
    seed: int = 1


RUNS = [  # the most telling first: --count takes so many
    Run("AdamW 2e-3 (baseline)"),
    Run("AdamW 4e-3", replace(ADAM, rate=4e-3)),
    Run("Muon sized as AdamW, 2e-3", MUON),
    Run("Muon sized as AdamW, 5e-3", replace(MUON, muon=5e-3)),
    Run("the old recipe", OLD, fall=False, init="old"),
    Run("plain residuals", config={"attn_res_block_size": 0}),
    Run("dense, no experts", config={"first_k_dense_replace": 9}),
    Run("embedding starts at 1.0", embedding=1.0),
    Run("context weighs 0.3", context=0.3),
    Run("the old recipe, falling rate", OLD, init="old"),
    Run("AdamW 1e-3", replace(ADAM, rate=1e-3)),
    Run("selection bias never moved", bias_rate=0.0),
    Run("router rate / 4", replace(ADAM, router=0.25)),
    Run("masked float32 attention", masked=True),
    Run("batch of 131k", micro=4),
    Run("baseline optimiser, old start", init="old"),
    Run("another seed", seed=2),
    Run("no random words to copy", stage="nocopy"),
    Run("baseline, three times as long", length=3.0),
    Run("Muon 2e-3, three times as long", MUON, length=3.0),
]


def old_start(model: K3) -> None:
    """The first training's initial weights: rows of matrices of length 0.5, the embedding at 1, the head at 0.02."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name == "model.embed_tokens.weight":
                p.normal_()
            elif p.ndim >= 2 and not name.endswith(("lm_head.weight", "res_proj.weight", "conv1d.weight")):
                p.normal_(0, 0.5 * p.shape[-1] ** -0.5)


def attention_size(model: K3) -> float:
    """The largest score that full attention's matrices allow: how far it may saturate."""
    top, c = 0.0, model.config
    inputs = (c.q_lora_rank * c.hidden_size / (c.qk_nope_head_dim + c.qk_rope_head_dim)) ** 0.5
    for layer in model.model.layers:
        a = layer.self_attn
        if hasattr(a, "q_b_proj"):
            q = torch.linalg.matrix_norm(a.q_b_proj.weight * a.q_a_layernorm.weight, 2)
            k = torch.linalg.matrix_norm(a.kv_a_proj_with_mqa.weight[c.kv_lora_rank :], 2)
            top = max(top, (q * k).item() * inputs)
    return top


def train(run: Run, rows: np.ndarray, held: HeldOut, settings: argparse.Namespace, pieces: dict) -> dict:
    """Train and score one run; ``pieces`` are the compiled functions, shared by all."""
    a = settings
    torch.manual_seed(run.seed)
    size = json.loads(a.config)
    model = K3(Config(**(size | run.config)))
    if run.init == "old":
        old_start(model)
    if run.embedding:
        torch.nn.init.normal_(model.model.embed_tokens.weight, 0, run.embedding)
    model.compute, model.masked = torch.bfloat16 if a.device == "cuda" else torch.float32, run.masked
    model = model.to(a.device)
    model.f = pieces or model.f
    optimiser = Optimiser(model, run.recipe)
    per = a.micro // rows.shape[1]
    steps = max(2, int(a.steps * run.length) // run.micro)
    began, losses, norms, load = time.time(), [], [], {}
    for step in range(steps):
        at = [(step * run.micro + i) * per % (len(rows) - per + 1) for i in range(run.micro)]
        micro = [Batch(rows[i : i + per], a.pad, run.context) for i in at]
        loss, load = accumulate(model, micro, a.device)
        warm = min(1.0, (step + 1) * run.micro / min(60, a.steps / 4))
        factor = warm * (0.5 * (1 + math.cos(math.pi * step / steps)) if run.fall else 1.0)
        norms.append(optimiser.step(factor))
        model.zero_grad(set_to_none=True)
        balance(model, load, run.bias_rate)
        losses.append(loss)
    spread = torch.stack(list(load.values())) if load else torch.ones(1, 1)
    spread = spread / spread.mean(-1, keepdim=True)
    losses = torch.stack(losses).float().cpu()
    scores = held.score(model, a.device)
    return {
        "name": run.name,
        "tokens": steps * run.micro * a.micro,
        "seconds": time.time() - began,
        "scores": scores,
        "loss": [round(x.mean().item(), 4) for x in losses.tensor_split(min(20, len(losses)))],
        "norm": torch.stack(norms).median().item(),
        "load": [spread.min().item(), spread.max().item()],
        "attention": attention_size(model),
    }


# ------------------------------------------------------------------ gradients


def group_of(name: str) -> str:
    """What a parameter belongs to, for the table of gradients."""
    parts = ("embed_tokens", "lm_head", "res_proj", "res_norm", "norm", "shared_experts", "block_sparse_moe", "mlp")
    for part in parts:
        if part in name and "self_attn." not in name:
            return {"block_sparse_moe": "experts and router", "mlp": "dense"}.get(part, part)
    return "attention"


def gradients(model: K3, batch: Batch, device) -> dict[str, torch.Tensor]:
    """Gradients of the mean loss by parameter, float64."""
    model.zero_grad(set_to_none=True)
    accumulate(model, [batch], device)
    return {k: p.grad.double() for k, p in model.named_parameters() if p.grad is not None}


def usable_pieces(rows: np.ndarray, a: argparse.Namespace) -> dict:
    """Compiled pieces; those that spoil gradients are left as they are."""
    torch.manual_seed(1)
    model = K3(Config(**json.loads(a.config)), torch.bfloat16).to(a.device)
    compile_soundly(model, rows[: a.micro // rows.shape[1]], a.pad, a.device)
    return model.f


def gradient_check(rows: np.ndarray, a: argparse.Namespace) -> list[dict]:
    """Relative errors for each step towards the fast path, at the start and with Nano's weights."""
    found, half = [], torch.bfloat16 if a.device == "cuda" else torch.float32
    for state in ("start", "trained"):
        torch.manual_seed(1)
        trained = state != "start" and a.config == "{}"
        model = (load_checkpoint(NANO) if trained else K3(Config(**json.loads(a.config)))).to(a.device)
        kda = {i for i in range(model.config.num_hidden_layers) if not model.config.is_mla(i)}
        some = Batch(rows[:4], a.pad)
        torch.set_float32_matmul_precision("highest")
        model.double()
        model.compute = torch.float64
        exact = gradients(model, some, a.device)
        model.float()
        paths = [
            ("float32, masked", torch.float32, True),
            ("bfloat16, masked", half, True),
            ("bfloat16, flash", half, False),
        ]
        for label, model.compute, model.masked in paths:
            found += differences(state, label, exact, gradients(model, some, a.device), kda)
        torch.set_float32_matmul_precision("high")
        batch = Batch(rows[: max(1, a.micro // rows.shape[1])], a.pad)  # the shape that the runs compile for
        eager = gradients(model, batch, a.device)
        for label, names in {"compiled": PIECES, "compiled but for mix": SOUND}.items():
            if a.device == "cuda":
                model.compile(names)
            fast = gradients(model, batch, a.device)
            found += differences(state, f"{label}, against bfloat16, flash", eager, fast, kda)
    return found


def differences(state: str, label: str, exact: dict, other: dict, kda: set[int]) -> list[dict]:
    """Relative error and cosine by group of parameters."""
    groups: dict[str, list] = {}
    for name, want in exact.items():
        group = group_of(name)
        if group == "attention":
            group = "KDA" if int(name.split(".")[2]) in kda else "MLA"
        groups.setdefault(group, []).append((want.flatten(), other[name].flatten()))
    rows = []
    for group, pairs in groups.items():
        want, got = (torch.cat(x) for x in zip(*pairs, strict=True))
        error = ((got - want).norm() / want.norm().clamp_min(1e-30)).item()
        cosine = torch.cosine_similarity(want, got, 0).item()
        rows.append({"state": state, "path": label, "group": group, "error": error, "cosine": cosine})
    return rows


# ------------------------------------------------------------------ the command


def work(a: argparse.Namespace) -> None:
    """One process's share of the runs; a line of JSON for each."""
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 256
    encoder = data.Encoder(a.vocabulary)
    a.pad = encoder.pad
    with np.load(Path(a.out) / "rows.npz") as packed:
        rows, kinds = {k: packed[k] for k in packed if k in data.STAGES}, {k: packed[k] for k in KINDS}
    held = HeldOut(kinds, a.micro, encoder.pad)
    pieces = usable_pieces(rows["short"], a) if a.device == "cuda" and not a.gradients else {}
    with open(Path(a.out) / f"results-{a.part}.jsonl", "w", encoding="utf-8") as lines:

        def say(what):
            print(json.dumps(what), file=lines, flush=True)
            print(f"[{time.time() - a.began:5.0f}]", json.dumps(what)[:300], flush=True)

        for i, run in enumerate(() if a.gradients else RUNS[: a.count]):
            try:
                (Path(a.out) / f"taken-{i}").touch(exist_ok=False)
            except FileExistsError:
                continue
            left = a.seconds - (time.time() - a.began)
            if left < a.reserve * run.length:
                say({"name": run.name, "left out": "no time"})
                continue
            try:
                say(train(run, rows[run.stage], held, a, pieces))
            except Exception as error:  # one failed row must not cost the others
                say({"name": run.name, "failed": repr(error)[:400]})
    if a.gradients:
        with open(Path(a.out) / "gradients.json", "w", encoding="utf-8") as file:
            json.dump(gradient_check(rows["short"], a), file)


def table(out: Path) -> str:
    """The results as markdown."""
    results = {}
    for path in out.glob("results-*.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            result = json.loads(line)
            results[result["name"]] = result
    lines = []
    if (out / "gradients.json").exists():
        rows = json.loads((out / "gradients.json").read_text(encoding="utf-8"))
        groups = list(dict.fromkeys(r["group"] for r in rows))
        lines += ["| weights, path | " + " | ".join(groups) + " |", "|---" * (len(groups) + 1) + "|"]
        for key in dict.fromkeys((r["state"], r["path"]) for r in rows):
            cells = {r["group"]: r for r in rows if (r["state"], r["path"]) == key}
            shown = [f"{cells[g]['error']:.1e} ({cells[g]['cosine']:.4f})" if g in cells else "" for g in groups]
            lines.append(f"| {key[0]}: {key[1]} | " + " | ".join(shown) + " |")
        lines.append("")
    head = ["run", "M tokens", *KINDS, "gradient", "load", "attention bound", "s"]
    lines += ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for run in RUNS:
        if run.name not in results:
            continue
        r = results[run.name]
        if "scores" not in r:
            lines.append(f"| {run.name} | {r.get('left out') or r.get('failed')} |" + " |" * (len(head) - 2))
            continue
        cells = [f"{r['scores'][k]['learn']:.3f} ({100 * r['scores'][k]['replies']:.0f} %)" for k in KINDS[:-1]]
        cells.append(f"{r['scores']['book']['all']:.3f}")
        low, high = r["load"]
        tail = f"{r['norm']:.2f} | {low:.2f}-{high:.2f} | {r['attention']:.0f} | {r['seconds']:.0f}"
        lines.append(f"| {run.name} | {r['tokens'] / 1e6:.1f} | " + " | ".join(cells) + f" | {tail} |")
    return "\n".join(lines) + "\n"


def prepare(a: argparse.Namespace) -> None:
    """Training and held-out rows for all runs, in one file."""
    encoder, rows = data.Encoder(a.vocabulary), {}
    for stage in dict.fromkeys(run.stage for run in RUNS[: a.count]):
        folder = Path(a.scratch) / stage
        longest = max(run.length for run in RUNS[: a.count] if run.stage == stage)
        options = {
            "stage": stage,
            "tokens": a.steps * a.micro * 1.02 * longest,
            "out": folder,
            "seed": 1,
            "shard": 1e5,
            "books": a.books,
        }
        data.build(argparse.Namespace(corpus=a.corpus, vocabulary=a.vocabulary, jobs=a.jobs, **options))
        rows[stage] = np.concatenate([np.load(p) for p in sorted(folder.glob("*.npy"))])
    held = data.heldout_rows(a.corpus, encoder, each=a.each, kinds=KINDS)
    held = {k: v[: a.rows] for k, v in held.items()}
    print({k: v.shape for k, v in (rows | held).items()}, flush=True)
    np.savez(Path(a.out) / "rows.npz", **rows, **held)


def main() -> None:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    p.add_argument("--corpus", required=True)
    p.add_argument("--out", required=True)
    p.add_argument("--scratch", default="/tmp/experiments")
    p.add_argument("--vocabulary", default=data.VOCABULARY)
    p.add_argument("--seconds", type=float, default=390)
    p.add_argument("--reserve", type=float, default=20, help="seconds a run may need")
    p.add_argument("--processes", type=int, default=3)
    p.add_argument("--jobs", type=int, default=16)
    p.add_argument("--steps", type=int, default=400)
    p.add_argument("--micro", type=int, default=32768, help="tokens a step")
    p.add_argument("--each", type=int, default=100, help="held-out documents a task")
    p.add_argument("--rows", type=int, default=32, help="held-out rows a kind, at most")
    p.add_argument("--books", type=int, help="read only so many books")
    p.add_argument("--count", type=int, default=len(RUNS), help="only the first runs of the list")
    p.add_argument("--config", default="{}")
    p.add_argument("--device", default="cuda")
    p.add_argument("--began", type=float, default=time.time())
    p.add_argument("--part", type=int, help="internal: do one process's share")
    p.add_argument("--gradients", action="store_true", help="internal: check the gradients, too")
    a = p.parse_args()
    if a.part is not None:
        return work(a)
    Path(a.out).mkdir(parents=True, exist_ok=True)
    prepare(a)
    own = [sys.executable, "-m", "training.experiments", *sys.argv[1:], f"--began={a.began}"]
    children = [subprocess.Popen([*own, f"--part={i}"]) for i in range(a.processes)]
    children.append(subprocess.Popen([*own, f"--part={a.processes}", "--gradients"]))
    for child in children:
        child.wait()
    for mark in Path(a.out).glob("taken-*"):
        mark.unlink()
    (Path(a.out) / "rows.npz").unlink()
    text = table(Path(a.out))
    (Path(a.out) / "table.md").write_text(text, encoding="utf-8")
    print(text, f"\nafter {time.time() - a.began:.0f} s")
    return None


if __name__ == "__main__":
    main()
