"""How a layer declares its weights, and how they are read, checked and bound.

The declarations on a ``Weights`` class are the only list of tensors in the project: what a checkpoint must fill, and
in which shape, comes from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, get_args

import torch
from torch import Tensor

from deltafin.errors import CheckpointError
from deltafin.quant import MXFP4, Int8

Weight = Tensor | MXFP4 | Int8
"""A matrix as a layer sees it: dense, or packed."""

W = TypeVar("W")


@dataclass(frozen=True)
class Spec:
    """One declared tensor: its shape in letters, whether it must be float32, and when a layer has it."""

    dims: str
    float32: bool
    when: Callable[[Any], bool]

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape in numbers: ``"H*P+H*V R"`` with ``sizes`` gives two integers."""
        return tuple(sum(_product(term, sizes) for term in part.split("+")) for part in self.dims.split())


def _product(term: str, sizes: Mapping[str, int]) -> int:
    result = 1
    for letter in term.split("*"):
        result *= sizes[letter]
    return result


def weight(dims: str, *, float32: bool = False, when: Callable[[Any], bool] | None = None) -> Any:
    """Declare one tensor on a dataclass field.

    ``float32`` widens what is stored in fewer bits (decays, convolutions, router bias: small and sensitive).
    ``when`` is asked with the layer's config; where it says no, the field is ``None``.
    """
    return field(metadata={"spec": Spec(dims, float32, when or (lambda config: True))})


def specs(kind: type, config: Any) -> Iterator[tuple[str, Spec]]:
    """Names and declarations of the tensors that a weights class needs under ``config``."""
    for f in fields(kind):
        spec = f.metadata.get("spec")
        if spec is not None and spec.when(config):
            yield f.name, spec


def matrices(kind: type) -> frozenset[str]:
    """Names of the tensors that a weights class declares as ``Weight``: those that may be packed."""
    return frozenset(f.name for f in fields(kind) if MXFP4 in get_args(f.type))


def bind(
    kind: type[W],
    config: Any,
    sizes: Mapping[str, int],
    read: Callable[[str], Weight],
    describe: Callable[[str], str],
    **others: Any,
) -> W:
    """Read every declared tensor, check its shape, build the weights.

    ``read`` gives a tensor by field name and ``describe`` says where it comes from, for the error. ``others`` are the
    fields that are not declared tensors (routed experts). Raises ``CheckpointError`` on a wrong shape.
    """
    bound: dict[str, Any] = {f.name: None for f in fields(kind) if "spec" in f.metadata}  # type: ignore[arg-type]
    may_be_packed = matrices(kind)
    for name, spec in specs(kind, config):
        tensor = read(name)
        if not isinstance(tensor, Tensor) and name not in may_be_packed:
            raise CheckpointError(f"{describe(name)} is packed, which is not supported for it")
        check_shape(tensor, spec.shape(sizes), describe(name))
        bound[name] = tensor.to(torch.float32) if spec.float32 and isinstance(tensor, Tensor) else tensor
    return kind(**bound, **others)


def check_shape(tensor: Weight, shape: tuple[int, ...], where: str) -> None:
    """Raise ``CheckpointError`` unless ``tensor`` has ``shape``."""
    if tuple(tensor.shape) != shape:
        raise CheckpointError(
            f"{where} is {tuple(tensor.shape)}, but config.json makes it {shape}",
            "the files of two different models may be mixed in this folder",
        )
