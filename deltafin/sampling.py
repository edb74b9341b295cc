"""Choosing the next token from logits."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deltafin.errors import NumericsError, UsageError


@dataclass(frozen=True)
class Sampler:
    """How tokens are chosen. The defaults are greedy: the likeliest token, the lower id on a tie.

    The steps stand in the order in which they are applied. ``repetition_penalty`` divides positive logits of tokens
    seen before (and multiplies negative ones); ``temperature`` divides all, 0 means greedy; ``top_k`` keeps that many
    (0: all); ``top_p`` keeps the fewest whose probabilities reach it; ``min_p`` keeps those at least that fraction as
    likely as the likeliest. With a ``seed`` the same session says the same again.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        bounds = {
            "temperature": (0.0 <= self.temperature < float("inf"), "0 or more"),
            "top_k": (self.top_k >= 0, "0 or more"),
            "top_p": (0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            "min_p": (0.0 <= self.min_p <= 1.0, "from 0 to 1"),
            "seed": (self.seed is None or -(2**63) <= self.seed < 2**64, "from -2^63 to 2^64 - 1"),
            "repetition_penalty": (0.0 < self.repetition_penalty < float("inf"), "above 0"),
        }
        for name, (ok, range_) in bounds.items():
            if not ok:
                raise UsageError(f"{name} {getattr(self, name)} is not {range_}")

    def generator(self) -> torch.Generator:
        """Return the source of chance for one generation."""
        generator = torch.Generator()
        if self.seed is None:
            generator.seed()
        else:
            generator.manual_seed(self.seed)
        return generator

    def __call__(self, logits_Z: Tensor, seen: Sequence[int], generator: torch.Generator) -> int:
        """Return the next token; ``seen`` are the tokens so far.

        Raises ``NumericsError`` when a logit is NaN or infinite: such a token is never sampled.
        """
        check_finite(logits_Z)
        logits = logits_Z.float()
        if self.repetition_penalty != 1.0 and seen:
            ids = torch.tensor(sorted(set(seen)))
            found = logits[ids]
            logits = logits.clone()
            logits[ids] = torch.where(found > 0, found / self.repetition_penalty, found * self.repetition_penalty)
        if self.temperature == 0.0:
            return int(logits.argmax())
        return int(torch.multinomial(self.probabilities(logits), 1, generator=generator))

    def probabilities(self, logits_Z: Tensor) -> Tensor:
        """Return what is drawn from at a temperature above 0: float32 [Z], zero for tokens that are out."""
        logits = logits_Z.double()
        logits = ((logits - logits.max()) / self.temperature).log_softmax(0)  # at most 0, at any temperature
        ordered, ids = logits.sort(descending=True, stable=True)
        p = ordered.exp()
        keep = torch.ones_like(p, dtype=torch.bool)
        if self.top_k:
            keep[self.top_k :] = False
        kept = torch.where(keep, p, 0)
        keep &= kept.cumsum(0) - kept < self.top_p * kept.sum()  # what stands before a token is not yet enough
        keep &= p >= self.min_p * p[0]
        result = torch.zeros_like(p)
        result[ids] = torch.where(keep, p, 0)
        return (result / result.sum()).float()


def check_finite(logits: Tensor) -> None:
    """Raise ``NumericsError`` when a logit is NaN or infinite."""
    if not bool(torch.isfinite(logits).all()):
        raise NumericsError(
            "the model produced a logit that is not a number", "its weights or a restored state may be damaged"
        )
