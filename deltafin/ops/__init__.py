"""The table of operations a model is made of; a backend is a table with some rows replaced.

The plain torch rows in ``reference`` are right by definition. A faster row has the same signature, changes the
same state and gives the same answer; ``deltafin verify`` compares every row with the reference.
"""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

from deltafin.ops import reference
from deltafin.ops.reference import Expert

__all__ = ["BACKENDS", "REFERENCE", "Expert", "Ops", "load", "overrides"]


@dataclass(frozen=True)
class Ops:
    """One implementation of everything a model needs. Signatures and meaning: the functions in ``reference``."""

    name: str
    linear: Callable = reference.linear
    rms_norm: Callable = reference.rms_norm
    short_conv: Callable = reference.short_conv
    delta_rule: Callable = reference.delta_rule
    attention: Callable = reference.attention
    route: Callable = reference.route
    experts: Callable = reference.experts
    mix_depth: Callable = reference.mix_depth


REFERENCE = Ops("torch")

BACKENDS = {"torch": "deltafin.ops", "numba": "deltafin.cpu_kernels", "triton": "deltafin.gpu_kernels"}
"""Where each backend's table is found."""


def load(name: str) -> Ops:
    """Return the backend ``name``: the only import of a kernel package in the project."""
    return REFERENCE if name == "torch" else importlib.import_module(BACKENDS[name]).OPS


def overrides(ops: Ops) -> Iterator[str]:
    """Names of the rows in which ``ops`` differs from the reference."""
    for f in fields(Ops):
        if f.name != "name" and getattr(ops, f.name) is not getattr(REFERENCE, f.name):
            yield f.name
