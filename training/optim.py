"""AdamW, alone or with Muon for the hidden matrices."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# Never Muon: tables, vectors, and matrices with one row a head or an expert, where nothing is to orthogonalise.
_ADAM_ENDINGS = (
    "embed_tokens.weight",
    "lm_head.weight",
    "gate.weight",
    "b_proj.weight",
    "res_proj.weight",
    "conv1d.weight",
)
# Small by nature: decay would pull them away from what they mean.
_NO_DECAY = ("res_proj.weight", "conv1d.weight", "norm.weight", "A_log", "dt_bias")


@dataclass(frozen=True)
class Recipe:
    """Rates at a schedule factor of 1.

    ``muon`` is the rate of Muon, 0 for AdamW alone. Its update is an orthogonal matrix times ``0.2 sqrt(max(rows,
    columns))``, the root mean square of an AdamW update, or with ``spectral`` times ``sqrt(max(1, rows / columns))``.
    """

    rate: float = 2e-3
    decay: float = 0.1
    muon: float = 0.0
    muon_decay: float = 0.1
    spectral: bool = False
    embedding: float = 1.0
    head: float = 1.0
    router: float = 1.0
    clip: float = 1.0


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether a parameter is a hidden matrix, or a stack of them: what Muon may train."""
    return parameter.ndim >= 2 and not name.endswith(_ADAM_ENDINGS)


@torch.no_grad()
def orthogonalise(gradient: Tensor, steps: int = 5) -> Tensor:
    """[.., rows, columns] -> near the closest semi-orthogonal matrix (Newton-Schulz), each matrix on its own."""
    x = gradient.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.transpose(-1, -2)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        a = x @ x.transpose(-1, -2)
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.transpose(-1, -2) if tall else x


class Muon:
    """Nesterov momentum, orthogonalised; matrices of one shape are updated as one batch."""

    def __init__(self, parameters: Iterable[nn.Parameter], recipe: Recipe, momentum: float = 0.95) -> None:
        self.recipe, self.momentum = recipe, momentum
        self.groups: dict[tuple[int, int], list[nn.Parameter]] = {}
        for p in parameters:
            self.groups.setdefault((p.shape[-2], p.shape[-1]), []).append(p)
        self.buffers = {
            (r, c): torch.zeros(sum(p.numel() for p in ps) // (r * c), r, c, device=ps[0].device)
            for (r, c), ps in self.groups.items()
        }

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """Update every matrix; ``factor`` is the schedule's."""
        rate = self.recipe.muon * factor
        for (rows, columns), ps in self.groups.items():
            buffer = self.buffers[rows, columns]
            gradient = torch.cat([p.grad.view(-1, rows, columns) for p in ps])
            buffer.lerp_(gradient, 1 - self.momentum)
            update = orthogonalise(gradient.lerp_(buffer, self.momentum)).float()
            size = max(1, rows / columns) ** 0.5 if self.recipe.spectral else 0.2 * max(rows, columns) ** 0.5
            parts = update.split([p.numel() // (rows * columns) for p in ps])
            torch._foreach_mul_(ps, 1 - rate * self.recipe.muon_decay)
            torch._foreach_add_(ps, [u.view_as(p) for u, p in zip(parts, ps, strict=True)], alpha=-rate * size)


class Optimiser:
    """One step over all parameters, with one factor from the schedule."""

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        self.recipe = recipe
        self.muon, groups = None, {}
        matrices = []
        for name, p in model.named_parameters():
            if recipe.muon and is_matrix(name, p):
                matrices.append(p)
                continue
            special = {"embed_tokens.weight": recipe.embedding, "lm_head.weight": recipe.head}
            special["gate.weight"] = recipe.router
            share = next((v for k, v in special.items() if name.endswith(k)), 1.0)
            decay = 0.0 if p.ndim < 2 or name.endswith(_NO_DECAY) else recipe.decay
            groups.setdefault((share, decay), []).append(p)
        if matrices:
            self.muon = Muon(matrices, recipe)
        self.rest = [p for ps in groups.values() for p in ps]
        self.adam = torch.optim.AdamW(
            [{"params": ps, "base": recipe.rate * share, "weight_decay": d} for (share, d), ps in groups.items()],
            betas=(0.9, 0.95),
            fused=self.rest[0].is_cuda,
        )

    def step(self, factor: float) -> Tensor:
        """Clip, update, and return the gradient's norm over AdamW's parameters before clipping."""
        norm = nn.utils.clip_grad_norm_([p for p in self.rest if p.grad is not None], self.recipe.clip)
        for group in self.adam.param_groups:
            group["lr"] = group["base"] * factor
        self.adam.step()
        if self.muon is not None:
            self.muon.step(factor)
        return norm

    def state_dict(self) -> dict:
        """Everything needed to go on."""
        muon = {f"{r}x{c}": b for (r, c), b in self.muon.buffers.items()} if self.muon else {}
        return {"adam": self.adam.state_dict(), "muon": muon}

    def load_state_dict(self, state: dict) -> None:
        """The reverse of ``state_dict``."""
        self.adam.load_state_dict(state["adam"])
        for (r, c), buffer in self.muon.buffers.items() if self.muon else ():
            buffer.copy_(state["muon"][f"{r}x{c}"])
