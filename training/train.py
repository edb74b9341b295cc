"""The training loop: stages by tokens seen, stops against the wall clock, resumes.

python -m training.train --data DIR --state DIR --plan short:300e6,long:150e6,chat:200e6 --seconds 540 --out DIR
"""

import argparse
import json
import math
import os
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from training import data
from training.model import K3, SOUND, Config, Layout, eager_pieces, load_checkpoint
from training.optim import Optimiser, Recipe

WARMUP = 150  # steps, and again after a resumption without the optimiser's state


def schedule(step: int, done: float) -> float:
    """Learning-rate factor: a linear start, then half a cosine to zero; ``done`` is the share of the whole plan."""
    return min(1.0, (step + 1) / WARMUP) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


# ------------------------------------------------------------------ batches


class Rows:
    """Rows of a stage in a fixed order (shard, then worker); waits for shards still being written."""

    def __init__(self, folder: Path | str, stage: str, jobs: int, cursor: tuple[int, int] = (0, 0)) -> None:
        self.folder, self.stage, self.jobs = Path(folder), stage, jobs
        self.file, self.row = cursor
        self.rows = None

    def _open(self):
        began = time.time()
        while time.time() - began < 300:
            path = self.folder / f"{self.stage}-{self.file // self.jobs:04d}-{self.file % self.jobs:02d}.npy"
            if path.exists():
                return np.load(path)
            if (self.folder / f"{self.stage}.done").exists() and not path.exists():
                last = max(self.folder.glob(f"{self.stage}-*.npy")).name
                self.file = self.file + 1 if path.name < last else 0  # a gap, or another pass
            else:
                time.sleep(0.1)
        raise RuntimeError(f"{path} never came")

    def take(self, n: int) -> np.ndarray:
        """The next n rows."""
        parts = []
        while n:
            if self.rows is None:
                self.rows = self._open()
            part = self.rows[self.row : self.row + n]
            parts.append(part)
            n, self.row = n - len(part), self.row + len(part)
            if self.row >= len(self.rows):
                self.rows, self.row, self.file = None, 0, self.file + 1
        return np.concatenate(parts)


class Batch:
    """A micro-batch of rows, flattened. Every token is asked for the one after it in its document.

    ``context`` is the weight of targets without the mark LEARN (the others weigh 1).
    """

    def __init__(self, rows: np.ndarray, pad: int, context: float = 1.0) -> None:
        flat = rows.reshape(-1)
        self.pad, self.context, self.rows = pad, context, len(rows)
        starts = np.flatnonzero(flat & data.FIRST)
        self.cu = torch.from_numpy(np.append(starts, flat.size).astype(np.int32))
        self.longest = int(self.cu.diff().max())
        self.flat = torch.from_numpy(flat.astype(np.int32))
        self.total = float(self._weights(self._after(self.flat)).sum())

    def _after(self, flat):
        return torch.cat([flat[1:], flat.new_full((1,), data.FIRST)])

    def _weights(self, after):
        real = ((after & data.FIRST) == 0) & ((after & data.TOKEN) != self.pad)
        return torch.where((after & data.LEARN) != 0, 1.0, self.context) * real

    def pin(self) -> "Batch":
        """In memory that a GPU can read by itself."""
        self.cu, self.flat = self.cu.pin_memory(), self.flat.pin_memory()
        return self

    def to(self, device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Layout]:
        """Tokens, targets, weights and layout for ``K3.loss``."""
        x = self.flat.to(device, non_blocking=True)
        docs = ((x & data.FIRST) > 0).cumsum(0, dtype=torch.int32) - 1
        layout = Layout(docs, self.cu.to(device, non_blocking=True), self.longest, self.rows)
        after = self._after(x)
        return (x & data.TOKEN).long(), (after & data.TOKEN).long(), self._weights(after), layout


def batches(rows: Rows, per_batch: int, per_micro: int, pad: int, context: float, pin: bool) -> Iterator:
    """Lists of micro-batches, each with the cursor that follows it; read ahead by a thread."""
    out = queue.Queue(maxsize=6)

    def run():
        try:
            while True:
                micro = [Batch(rows.take(per_micro), pad, context) for _ in range(per_batch // per_micro)]
                out.put(([m.pin() for m in micro] if pin else micro, (rows.file, rows.row)))
        except Exception as error:  # handed to the reader
            out.put((error, None))

    threading.Thread(target=run, daemon=True).start()
    while True:
        micro, cursor = out.get()
        if isinstance(micro, Exception):
            raise micro
        yield micro, cursor


def accumulate(model: K3, micro: list[Batch], device) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """Gradients of the weighted mean loss over all of ``micro``; that loss, and each layer's load of experts."""
    total, loss, load = sum(m.total for m in micro), 0.0, {}
    for m in micro:
        part = model.loss(*m.to(device))[0] / total
        part.backward()
        loss = loss + part.detach()
        for layer, counts in model.load.items():
            load[layer] = load.get(layer, 0) + counts
    return loss, load


@torch.no_grad()
def balance(model: K3, load: dict[int, torch.Tensor], rate: float) -> None:
    """Move each expert's selection bias towards an even load."""
    for layer, counts in load.items():
        bias = model.model.layers[layer].block_sparse_moe.gate.e_score_correction_bias
        bias += rate * torch.sign(counts.mean() - counts)


def agreement(model: K3, rows: np.ndarray, pad: int, device, part: int = 16384) -> dict[str, float]:
    """Cosine, by large parameter, of the gradients of the compiled pieces and of the same pieces run eagerly.

    The eager half takes ``part`` tokens at a time, for it needs more memory.
    """
    found, pieces = [], model.f
    per = max(1, part // rows.shape[1])
    for eager in (False, True):
        model.f = eager_pieces() if eager else pieces
        whole = Batch(rows, pad)
        parts = [Batch(rows[i : i + per], pad) for i in range(0, len(rows), per)] if eager else [whole]
        accumulate(model, parts, device)
        found.append(
            {
                k: torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten()
                for k, p in model.named_parameters()
                if p.numel() > 4096
            }
        )
        model.zero_grad(set_to_none=True)
    model.f = pieces
    return {k: torch.cosine_similarity(v, found[1][k], 0).item() for k, v in found[0].items()}


def compile_soundly(model: K3, rows: np.ndarray, pad: int, device, say=print) -> None:
    """Compile the pieces that are known to be sound, or none if their gradients on these rows say otherwise.

    A compiler that drops gradients shows in no loss at once: the first training ran like that to its end.
    """
    for names in (SOUND, ()):
        model.compile(names)
        cosines = agreement(model, rows, pad, device)
        worst = min(cosines, key=cosines.__getitem__)
        say(f"compiled {', '.join(names)}: smallest cosine with eager gradients {cosines[worst]:.4f} ({worst})")
        if cosines[worst] > 0.8:
            return
    raise RuntimeError("even eager gradients do not agree with themselves")


# ------------------------------------------------------------------ held-out text


class HeldOut:
    """Rows by kind, scored together."""

    def __init__(self, rows: dict[str, np.ndarray], micro_tokens: int, pad: int) -> None:
        self.kinds = list(rows)
        label = np.concatenate([np.full(len(r), i) for i, r in enumerate(rows.values())])
        every = np.concatenate(list(rows.values()))
        length = every.shape[1]
        per = max(1, micro_tokens // length)
        empty = np.full((-len(every) % per, length), pad, np.uint16)
        empty[:, 0] |= data.FIRST
        every, label = np.concatenate([every, empty]), np.append(label, np.full(len(empty), -1))
        starts = range(0, len(every), per)
        self.parts = [(Batch(every[i : i + per], pad), label[i : i + per].repeat(length)) for i in starts]

    @torch.no_grad()
    def score(self, model: K3, device) -> dict[str, dict[str, float]]:
        """By kind: nats a token over ``all`` and over ``learn``-marked tokens, share of ``replies`` right.

        A reply, which is a run of marked tokens, is right when each of them is the likeliest after those before.
        """
        sums = np.zeros((len(self.kinds), 6))
        for batch, label in self.parts:
            _, losses, hits = model.loss(*batch.to(device))
            losses, hits = losses.cpu().numpy(), hits.cpu().numpy()
            after = batch._after(batch.flat).numpy()
            real = (batch._weights(batch._after(batch.flat)).numpy() > 0) & (label >= 0)
            learn = real & ((after & data.LEARN) != 0)
            run = np.cumsum(np.diff(learn, prepend=False) & learn)  # number of the run, at marked tokens
            wrong = np.unique(run[learn & ~hits])
            first = np.flatnonzero(learn & np.diff(learn, prepend=False))
            right = ~np.isin(run[first], wrong)
            for column, keep, what in ((0, real, losses), (2, learn, losses)):
                sums[:, column] += np.bincount(label[keep], what[keep], len(self.kinds))
                sums[:, column + 1] += np.bincount(label[keep], minlength=len(self.kinds))
            sums[:, 4] += np.bincount(label[first], right, len(self.kinds))
            sums[:, 5] += np.bincount(label[first], minlength=len(self.kinds))
        ratio = sums[:, ::2] / np.where(sums[:, 1::2], sums[:, 1::2], np.nan)
        names = ("all", "learn", "replies")
        return {k: dict(zip(names, map(float, r), strict=True)) for k, r in zip(self.kinds, ratio, strict=True)}


def show(scores: dict[str, dict[str, float]]) -> str:
    """One line: all / marked tokens, share of whole replies right."""
    return " ".join(f"{k} {s['all']:.3f}/{s['learn']:.3f}/{s['replies']:.2f}" for k, s in scores.items())


# ------------------------------------------------------------------ saving


def save(path: Path, model: K3, optimiser: Optimiser, progress: dict) -> None:
    """Everything needed to go on, in one file that is never half written."""
    state = {"config": asdict(model.config), "model": model.state_dict(), "optimiser": optimiser.state_dict()}
    torch.save(state | {"progress": progress}, path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)


def copy_out(folder: Path | str, model: K3, progress: dict, limit: int = 15 << 20) -> None:
    """Weights alone in bfloat16, high and low bytes apart so that they compress, in files below ``limit`` bytes."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    parts, size = [{}], 0
    for name, value in model.state_dict().items():
        value = value.detach().cpu()
        planes = value.bfloat16().view(torch.uint8).numpy().reshape(-1, 2).T if value.ndim > 1 else value.numpy()
        if size + planes.nbytes > limit:
            parts.append({})
            size = 0
        parts[-1][name] = planes.copy()
        size += planes.nbytes
    for i, part in enumerate(parts):
        np.savez_compressed(folder / f"weights-{i}.npz", **part)
    about = {"config": asdict(model.config), "progress": progress}
    (folder / "progress.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def read_copy(folder: Path | str) -> tuple[K3, dict]:
    """A model from ``copy_out``'s folder, and the progress."""
    folder = Path(folder)
    about = json.loads((folder / "progress.json").read_text(encoding="utf-8"))
    model = K3(Config(**about["config"]))
    state = model.state_dict()
    for path in sorted(folder.glob("weights-*.npz")):
        with np.load(path) as part:
            for name, planes in part.items():
                if state[name].ndim > 1:
                    value = torch.from_numpy(np.ascontiguousarray(planes.T)).view(torch.bfloat16).float()
                else:
                    value = torch.from_numpy(planes)
                state[name] = value.view(state[name].shape)
    model.load_state_dict(state)
    return model, about["progress"]


# ------------------------------------------------------------------ the loop


def stage_at(plan: dict[str, float], done: float) -> str:
    """The stage that a share of the whole plan lies in."""
    position = done * sum(plan.values())
    for stage, tokens in plan.items():
        if position < tokens:
            return stage
        position -= tokens
    return stage


def main() -> None:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    p.add_argument("--data", required=True, help="filled by training.data, perhaps at the same time")
    p.add_argument("--state", required=True, help="folder of the full state; goes on from it if there is one")
    p.add_argument("--corpus", required=True, help="for the held-out text")
    p.add_argument("--vocabulary", default=data.VOCABULARY)
    p.add_argument("--plan", required=True, help="stage:tokens,...")
    p.add_argument("--seconds", type=float, default=1e9, help="stop this long after --began")
    p.add_argument("--began", type=float, default=time.time(), help="Unix time the clock started")
    p.add_argument("--finish", action="store_true", help="run the plan to its end within --seconds, shortening it")
    p.add_argument("--out", help="folder for a bfloat16 copy of the weights at the end")
    p.add_argument("--resume", help="when --state is empty, start from such a copy or from an exported model")
    p.add_argument("--recipe", default="{}", help="JSON of Recipe fields to change")
    p.add_argument("--context", type=float, default=1.0, help="weight of what others say, before the chat stage")
    p.add_argument("--bias-rate", type=float, default=1e-3)
    p.add_argument("--batch", type=int, default=131072, help="tokens a step")
    p.add_argument("--micro", type=int, default=131072, help="tokens a micro-batch")
    p.add_argument("--jobs", type=int, default=16, help="as given to training.data")
    p.add_argument("--device", default="cuda")
    p.add_argument("--eager", action="store_true")
    p.add_argument("--config", default="{}", help="JSON of Config fields to change")
    p.add_argument("--each", type=int, default=147, help="held-out documents a task")
    a = p.parse_args()

    def clock():
        return time.time() - a.began

    def say(*words):
        print(f"[{clock():6.1f}]", *words, flush=True)

    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64
    cuda = a.device == "cuda"
    plan = {k: float(v) for k, v in (part.split(":") for part in a.plan.split(","))}
    encoder = data.Encoder(a.vocabulary)
    held = HeldOut(data.heldout_rows(a.corpus, encoder, each=a.each), a.micro, encoder.pad)
    path = Path(a.state) / "last.pt"
    path.parent.mkdir(parents=True, exist_ok=True)

    model = K3(Config(**json.loads(a.config)))
    progress = {"tokens": 0, "step": 0, "done": 0.0, "warm": 0, "cursors": {}}
    if not path.exists() and a.resume:
        if (Path(a.resume) / "progress.json").exists():
            model, progress = read_copy(a.resume)
            progress["warm"] = 0  # the optimiser's state is gone: warm up again
        else:
            model = load_checkpoint(a.resume)
    model.compute = torch.bfloat16 if cuda else torch.float32
    model = model.to(a.device)
    optimiser = Optimiser(model, Recipe(**json.loads(a.recipe)))
    if path.exists():
        saved = torch.load(path, map_location=a.device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimiser.load_state_dict(saved["optimiser"])
        progress = saved["progress"]
    say(f"{sum(x.numel() for x in model.parameters()) / 1e6:.2f}M parameters, at {progress}")

    begun_at, began, saved_at, stage, source = progress["done"], clock(), time.time(), None, None
    compiled = False
    while progress["done"] < 1 and (a.finish or clock() < a.seconds):
        if stage_at(plan, progress["done"]) != stage:
            if stage:
                say(f"end of {stage}, held out:", show(held.score(model, a.device)))
            stage = stage_at(plan, progress["done"])
            length = data.STAGES[stage]["length"]
            talks = data.STAGES[stage].get("noise", False)  # the stages that teach how to answer
            model.quantised = talks
            rows = Rows(a.data, stage, a.jobs, tuple(progress["cursors"].get(stage, (0, 0))))
            if not (a.eager or compiled):
                some = Rows(a.data, stage, a.jobs).take(a.micro // length)
                compile_soundly(model, some, encoder.pad, a.device, say)
                compiled = True
            context = 0.0 if talks else a.context
            source = batches(rows, a.batch // length, min(a.micro, a.batch) // length, encoder.pad, context, cuda)
            mark, marked, waiting, loads = time.time(), 0, 0.0, {}
        asked = time.time()
        micro, progress["cursors"][stage] = next(source)
        waiting += time.time() - asked
        loss, load = accumulate(model, micro, a.device)
        factor = schedule(progress["warm"], progress["done"])
        norm = optimiser.step(factor)
        model.zero_grad(set_to_none=True)
        balance(model, load, a.bias_rate * min(1.0, factor / 0.3))
        loads = {i: loads.get(i, 0) + counts for i, counts in load.items()}
        progress["step"] += 1
        progress["warm"] += 1
        progress["tokens"] += a.batch
        progress["done"] += a.batch / sum(plan.values())
        if a.finish:  # whichever runs out first, tokens or seconds
            spent = (clock() - began) / max(1e-9, a.seconds - began)
            progress["done"] = max(progress["done"], begun_at + (1 - begun_at) * spent)
        marked += a.batch
        if progress["step"] % 40 == 0 or progress["step"] in (1, 2, 5):
            if not math.isfinite(loss.item()):
                raise SystemExit("the loss is not finite")
            spread = torch.stack(list(loads.values()))
            spread = spread / spread.mean(-1, keepdim=True)
            rate = marked / (time.time() - mark)
            say(
                f"{stage} step {progress['step']} tokens {progress['tokens'] / 1e6:.1f}M loss {loss.item():.4f} "
                f"norm {norm.item():.2f} factor {factor:.3f} {rate / 1e3:.0f}k tok/s wait {waiting:.1f}s "
                f"load {spread.min().item():.2f}-{spread.max().item():.2f}"
            )
            mark, marked, waiting, loads = time.time(), 0, 0.0, {}
        if progress["step"] % 1000 == 0:
            say("held out:", show(held.score(model, a.device)))
            mark = time.time()
        if time.time() - saved_at > 120:
            save(path, model, optimiser, progress)
            saved_at = time.time()
    say("stopped, held out:", show(held.score(model, a.device)))
    if progress["done"] >= 1:
        model.quantised = not model.quantised
        say(f"with MXFP4 {'on' if model.quantised else 'off'}, held out:", show(held.score(model, a.device)))
    save(path, model, optimiser, progress)
    if a.out:
        copy_out(a.out, model, progress)
    if cuda:
        say(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    say("stopped at", progress)


if __name__ == "__main__":
    main()
