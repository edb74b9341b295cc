"""The table of operations a model is made of; a backend is a table with some rows replaced.

The plain torch rows in ``reference`` are right by definition. A faster row has the same signature, changes the
same state and gives the same answer; ``deltafin verify`` compares every row with the reference.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace

import torch

from deltafin.ops import reference
from deltafin.ops.reference import DeltaState, DeltaWeights, Expert, Stack

__all__ = [
    "BACKENDS",
    "FEW",
    "REFERENCE",
    "ROWS",
    "DeltaState",
    "DeltaWeights",
    "Expert",
    "Ops",
    "Stack",
    "gpus",
    "load",
    "overrides",
    "ready",
]


@dataclass(frozen=True)
class Ops:
    """One implementation of everything a model needs. Signatures and meaning: the functions in ``reference``."""

    name: str
    device: torch.device = field(default_factory=lambda: torch.device("cpu"), kw_only=True)
    """Where tensors lie that are given to it."""
    linear: Callable = reference.linear
    linears: Callable = reference.linears
    rms_norm: Callable = reference.rms_norm
    delta_net: Callable = reference.delta_net
    attention: Callable = reference.attention
    route: Callable = reference.route
    experts: Callable = reference.experts
    gated: Callable = reference.gated
    mix_depth: Callable = reference.mix_depth
    together: bool = False
    """Whether a few tokens in one call give the same bits as one after the other."""
    whole: Mapping[type, Callable] = field(default_factory=dict)
    """Whole sublayers for a few tokens, by kind of layer, where that is faster: what ``Block`` does, or False."""
    widens: bool = False
    """Whether the stream of a few tokens is in float32: those who compute in float32 would only convert it."""
    form: str = ""
    """Which of several forms of itself the backend uses on this machine, for people."""
    threads: Callable[[], int] = field(default_factory=lambda: torch.get_num_threads)
    """How many threads the operations use now. Not an operation: those have a default."""


FEW = 8
"""Up to this many tokens in a call are decoding; more are prefill."""

HELD = 16
"""Up to this many rows in a call, ``experts`` may hold all its experts at once; with more it takes one at a time."""

REFERENCE = Ops("torch")

ROWS = tuple(f.name for f in fields(Ops) if callable(f.default))
"""Names of the operations."""

BACKENDS = {"torch": "deltafin.ops", "numba": "deltafin.cpu_kernels", "triton": "deltafin.gpu_kernels"}
"""Where each backend's table is found."""


def load(name: str) -> Ops:
    """Return the backend ``name``, imported when it is asked for; ``ready`` also prepares it to run."""
    return REFERENCE if name == "torch" else importlib.import_module(BACKENDS[name]).OPS


def ready(name: str, threads: int, cores: list[int], progress: Callable[[str], None] | None = None) -> Ops:
    """Return the backend ``name``, prepared to run on so many threads (see its ``prepare``)."""
    backend = importlib.import_module(BACKENDS[name])
    backend.prepare(threads, cores, progress)
    return backend.OPS


OLDEST, HALVES = (7, 5), (8, 0)
"""Compute capabilities of GPUs from which on kernels run, and from which on these multiply bfloat16."""


def has_halves(device: torch.device) -> bool:
    """Whether a device multiplies bfloat16; a processor does, in kernels that are interpreted there."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= HALVES


def gpus() -> list[Ops]:
    """Return the operations of every GPU that kernels run on; ``ImportError`` where there is one, but no Triton.

    Their ``form`` names the chip, and what it lacks.
    """
    if not torch.cuda.is_available():
        return []
    table, found = load("triton"), list[Ops]()
    for i in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(i)
        chip = (about.major, about.minor)
        form = about.name if chip >= HALVES else f"{about.name}, which has no bfloat16: products in float32"
        if chip >= OLDEST:
            found.append(replace(table, device=torch.device("cuda", i), form=form))
    return found


def overrides(ops: Ops) -> Iterator[str]:
    """Names of the rows in which ``ops`` differs from the reference."""
    for row in ROWS:
        if getattr(ops, row) is not getattr(REFERENCE, row):
            yield row
