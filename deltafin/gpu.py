"""What of a model goes to the GPUs of this machine, within what may be used of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import torch

from deltafin import measure, ops
from deltafin.errors import UsageError
from deltafin.executor import Home, homes
from deltafin.ops import Ops
from deltafin.placement import DRIVER, GPU, PLACES, SHARE, Demand, Placement, least, on_each, plan_over, sizes_of
from deltafin.policy import AgedFrequency, Key


@dataclass(frozen=True)
class Placed:
    """A placement on GPUs: the home of each layer, the head's operations, and what a user should know about it."""

    placement: Placement
    homes: Sequence[Home]
    head: Ops
    policy: AgedFrequency
    notes: Sequence[str] = ()
    devices: Sequence[int] = ()
    """On which of several GPUs each layer is, and the head (``placement.spread``)."""

    def info(self) -> dict[str, object]:
        """Return where the model runs, for people; sizes are bytes."""
        p, layers = self.placement, len(self.placement.demand.layers)
        about: dict[str, object] = {
            "place": f"{p.place}, {min(p.gpu_units, layers)} of {layers} layers on the GPU",
            "GPU memory": p.total(GPU),
        }
        held = [(p.slots(layer)[GPU], layer.experts) for layer in p.demand.layers if layer.experts]
        if held:
            there, count = map(sum, zip(*held, strict=True))
            about["experts on the GPU"] = f"{there:,} of {count:,}"
        about |= on_each(p, self.devices)
        return about | ({"notes": "; ".join(self.notes)} if self.notes else {})


def tables() -> list[Ops]:
    """Return the operations of every GPU that can be used."""
    return ops.gpus() if find_spec("triton") else []


def free(table: Ops) -> int:
    """Return the bytes of a GPU's memory that nobody uses now."""
    return torch.cuda.mem_get_info(table.device)[0]


def limit(table: Ops, budget: int) -> None:
    """Let torch take no more than ``budget`` bytes of a GPU, its driver's context included."""
    total = torch.cuda.get_device_properties(table.device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, max(0, budget - DRIVER) / total), table.device)


def placed(
    path: Path,
    needs: Demand,
    cpu: Ops,
    *,
    place: str,
    gpu: str | int | None,
    ram: int,
    heat: Mapping[Key, float],
    progress: Callable[[str], None] | None = None,
) -> Placed | None:
    """Return what goes where; None where all of it stays with the processor.

    ``place`` is one of ``PLACES``, ``gpu`` how much memory of each GPU may be used (default: nine tenths of what is
    free), sizes parted by commas; ``ram`` that of the machine, bytes. ``heat`` is that of earlier runs, the
    hottest expert first.

    Raises ``UsageError`` where a GPU is asked for and cannot be used.
    """
    if place not in PLACES:
        raise UsageError(f"place {place!r} is not supported", f"use {', '.join(PLACES)}")
    if place == "cpu":
        if gpu is not None:
            raise UsageError("gpu means nothing here: all of the model stays with the processor", "leave it out")
        return None
    found = tables()
    if not found:
        if place != "auto" or gpu is not None:
            hint = "it takes compute capability 7.5, a CUDA build of torch, and Triton: pip install 'deltafin[gpu]'"
            raise UsageError("there is no GPU here that deltafin can use", hint)
        return None
    budgets, notes = _budgets(found, gpu)
    have = measure.measured(path, max(layer.expert for layer in needs.layers), progress=progress).machine
    p, devices = plan_over(needs, replace(have, ram=ram), needs.context, place, budgets)
    if not p.gpu_units:
        needed = least(needs, needs.context, place)
        if place == "auto" and max(budgets) >= needed:
            return None
        short = f"{sum(budgets) / 1e9:.2f} GB of GPU memory do not hold the first layer of this model"
        what = f"{needed / 1e9:.2f} GB would, driver and buffers included"
        if place != "auto":
            raise UsageError(short, f"{what}: give more --gpu, or use --place cpu")
        return Placed(p, [], cpu, AgedFrequency(), [*notes, f"{short} ({what}), so the processor runs all of it"])
    for table, budget in zip(found, budgets, strict=False):
        limit(table, budget)
    return Placed(p, *homes(p, cpu, found, devices, heat), AgedFrequency(heat), notes, devices)


def _budgets(found: Sequence[Ops], gpu: str | int | None) -> tuple[list[int], list[str]]:
    """Return how much may be used of each GPU, and what to say where that is less than was asked for."""
    if gpu is None:
        return [int(free(table) * SHARE) for table in found], []
    asked = sizes_of(gpu)
    if len(asked) > len(found):
        raise UsageError(f"there are sizes for {len(asked)} GPUs, and {len(found)} here", "give one for each")
    budgets, notes = list[int](), list[str]()
    for i, (table, size) in enumerate(zip(found, asked, strict=False)):
        there = free(table)
        budgets.append(min(size, there))
        if there < size:
            notes.append(
                f"other programs use GPU {i}: {there / 1e9:.1f} GB of it are free, less than the {size / 1e9:.1f} GB "
                "that may be used, so fewer weights live there"
            )
    return budgets, notes
