"""Where every byte of a model would live on a machine, and how fast it would then run: arithmetic, without torch.

Memory is given in an order that a person can recite: the program itself, the state for the context that is asked for,
the weights that every token reads, then experts, as many of each layer, fastest memory first; last the embedding.
What remains stays on the disk. ``docs/performance.md`` derives the speeds.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from deltafin.errors import UsageError

PROCESS = 700_000_000
"""Bytes that Python, torch, Numba and the compiled kernels take before there is a model, as measured with two threads.

About a quarter of it are pages of libraries, which other processes of the same kind share.
"""

SHARE = 0.9
"""How much of the memory that is free now deltafin plans with; the rest is left to other programs."""

CONTEXT = 8192
"""Tokens of a conversation that memory is planned for, where nobody says otherwise."""

EMBEDDING = 64_000_000
"""Bytes of an embedding that are taken to lie in memory: a token reads one row of it, with the pages around."""

DRIVER = 500_000_000
"""Bytes of a GPU's memory that its driver's context takes."""

SMALLER = 0.95
"""How much of several GPUs' memory is tried next, where layers cannot be divided so that each keeps its budget."""

TIERS: tuple[str, str, str] = ("gpu", "ram", "disk")
"""Where bytes can live, the fastest first."""

GPU, RAM, DISK = TIERS

UNITS = {"": 1} | {f"{p}{b}": 1000**i for i, p in enumerate("KMGT", 1) for b in ("", "B")}
UNITS |= {f"{p}IB": 1024**i for i, p in enumerate("KMGT", 1)} | {"B": 1}


def bytes_of(text: str | int) -> int:
    """Read a size: bytes, or a number with KB, MB, GB, TB (powers of 1000) or KiB ... TiB (of 1024)."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    if match is None or match[2].upper() not in UNITS:
        raise UsageError(f"{text!r} is not a size", "write it like 48GB, 500MB or 16GiB")
    return int(float(match[1]) * UNITS[match[2].upper()])


def sizes_of(texts: str | int) -> list[int]:
    """Read several sizes, parted by commas."""
    return [bytes_of(text) for text in str(texts).split(",")]


@dataclass(frozen=True)
class Machine:
    """What there is to run on: bytes that may be used, 1e9 bytes a second, 1e9 operations a second.

    ``ram`` and ``gpu`` are budgets: what deltafin may take. ``disk_gbs`` is of reads of an expert's size at random
    places, ``cpu_gflops`` and ``gpu_gflops`` of matrix products of many rows. An ``integrated`` GPU's memory is RAM:
    what lies there is not free a second time.
    """

    ram: int
    ram_gbs: float
    disk_gbs: float
    cpu_gflops: float
    gpu: int = 0
    gpu_gbs: float = 0.0
    gpu_gflops: float = 0.0
    link_gbs: float = 0.0
    integrated: bool = False

    def __post_init__(self) -> None:
        for f in fields(self):
            value, least = getattr(self, f.name), 0
            if f.name in ("ram_gbs", "disk_gbs", "cpu_gflops") or (self.gpu and f.name.startswith(("gpu", "link"))):
                least = 1e-9
            if not isinstance(value, int | float) or not least <= value < float("inf"):
                raise UsageError(f"a machine cannot have {f.name} {value!r}", "it takes a positive number")

    @classmethod
    def read(cls, path: Path) -> "Machine":
        """Read a machine from a JSON file of the fields; sizes may be texts such as "48GB"."""
        known = {f.name for f in fields(cls)}
        needed = "ram, ram_gbs, disk_gbs, cpu_gflops"
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} cannot be read as JSON ({error})", f"it takes an object with {needed}") from error
        if not isinstance(raw, dict) or raw.keys() - known or set(needed.split(", ")) - raw.keys():
            odd = ", ".join(sorted(raw.keys() - known)) if isinstance(raw, dict) else ""
            what = f"has {odd}, which a machine has not" if odd else "does not describe a machine"
            raise UsageError(f"{path} {what}", f"it takes {needed}; and for a GPU {', '.join(sorted(known))}")
        for name in raw.keys() & {"ram", "gpu"}:
            raw[name] = bytes_of(raw[name])
        return cls(**raw)


@dataclass(frozen=True)
class LayerDemand:
    """What one layer asks for.

    ``weights`` are bytes that every token reads; ``state`` bytes that every token reads and writes, however long the
    context is; ``position`` bytes that are kept for each token of it, and read by every later one. ``flops`` are
    operations a token, ``attention`` operations a token for each token before it. ``mixer`` and ``mixer_flops`` are
    those of the weights and operations that belong to the mixer of tokens. Of ``experts`` of ``expert`` bytes each a
    token uses ``chosen``, at ``expert_flops`` operations each.
    """

    weights: int
    state: int = 0
    position: int = 0
    flops: float = 0.0
    attention: float = 0.0
    experts: int = 0
    chosen: int = 0
    expert: int = 0
    expert_flops: float = 0.0
    mixer: int = 0
    mixer_flops: float = 0.0


@dataclass(frozen=True)
class Demand:
    """What a model asks for: its layers, its ``head`` (with the last norm), and its ``embed``, read a ``row`` a token.

    Sizes are bytes; an embedding that is the head as well is not counted again. A prompt is read ``piece`` tokens at
    a time, which takes ``buffers`` bytes. ``copies`` says how many copies of the state a conversation keeps, its own
    among them. ``longest`` is the context that the model's makers promise.
    """

    layers: tuple[LayerDemand, ...]
    head: int
    embed: int
    row: int
    head_flops: float = 0.0
    piece: int = 512
    buffers: int = 0
    copies: int = 1
    longest: int | None = None

    @property
    def read(self) -> int:
        """Bytes of weights that every token reads."""
        return sum(layer.weights for layer in self.layers) + self.head

    @property
    def experts(self) -> int:
        """Bytes of all routed experts."""
        return sum(layer.experts * layer.expert for layer in self.layers)

    @property
    def weights(self) -> int:
        """Bytes of all weights."""
        return self.read + self.experts + self.embed

    def held(self, layer: LayerDemand, context: int) -> int:
        """Bytes of memory that the state of a layer takes in a conversation of ``context`` tokens."""
        return self.copies * layer.state + layer.position * context

    def others(self, context: int) -> int:
        """Bytes of memory for a conversation of ``context`` tokens, without routed experts, and the program's own."""
        return sum(self.needs(context).values())

    def needs(self, context: int) -> dict[str, int]:
        """What ``others`` consists of, for people."""
        return {
            "the program": PROCESS,
            "buffers": self.buffers,
            f"state for {context:,} tokens": sum(self.held(layer, context) for layer in self.layers),
            "weights that every token reads": self.read,
            "embedding, as far as it is read": min(self.embed, EMBEDDING),
        }

    @property
    def context(self) -> int:
        """Tokens that a conversation is planned for where nobody says how many."""
        return min(CONTEXT, self.longest or CONTEXT)

    def bytes_per_token(self, context: int) -> int:
        """Bytes that decoding one token after ``context`` others must move, wherever they are.

        Every weight once, of the embedding one row and of the experts the chosen ones; the state of recurrent layers
        read and written; the cache of latent attention read.
        """
        return self.head + self.row + sum(map(sum, (moved(layer, context) for layer in self.layers)))


def moved(layer: LayerDemand, context: int) -> tuple[int, int, int]:
    """Bytes that one token moves in a layer: of weights that every token reads, of state, of experts."""
    return layer.weights, 2 * layer.state + layer.position * context, layer.chosen * layer.expert


def roofline(amounts: Mapping[str, float], gbs: Mapping[str, float]) -> dict[str, float]:
    """Return how long it takes to move so many bytes of each memory at its 1e9 bytes a second."""
    return {tier: amount / gbs[tier] / 1e9 for tier, amount in amounts.items() if amount}


@dataclass(frozen=True)
class Share:
    """One kind of bytes: how many live where, and how many of them a token moves from there."""

    what: str
    held: Mapping[str, int]
    token: Mapping[str, float]


@dataclass(frozen=True)
class Placement:
    """Where everything lives, and what follows from it.

    ``gpu_units`` of the layers (the head counts as one more) are on the GPU, the next ``ram_units`` in RAM, what
    comes after them stays on the disk. Each layer has room for ``gpu_slots`` experts on the GPU and ``ram_slots`` in
    RAM, or for all it has. In a ``hybrid``, recurrent mixers with their state are in RAM wherever their layer is.
    """

    demand: Demand
    machine: Machine
    context: int
    gpu_units: int
    ram_units: int
    gpu_slots: int
    ram_slots: int
    embed_in_ram: bool
    hybrid: bool = False

    @property
    def place(self) -> str:
        """The name of this way to place a model: one of ``PLACES``."""
        return ("hybrid" if self.hybrid else "gpu") if self.gpu_units else "cpu"

    def apart(self, unit: int) -> LayerDemand | None:
        """The demand of a layer whose mixer is in RAM while the rest of it is on the GPU; None for any other."""
        if not self.hybrid or unit >= min(self.gpu_units, len(self.demand.layers)):
            return None
        layer = self.demand.layers[unit]
        return layer if layer.state else None

    def on_gpu(self, unit: int) -> int:
        """Bytes of a layer, or of the head, that live on the GPU."""
        if self.tier(unit) != GPU:
            return 0
        if unit == len(self.demand.layers):
            return self.demand.head
        layer = self.demand.layers[unit]
        apart = self.apart(unit)
        held = layer.weights - layer.mixer if apart else layer.weights + self.demand.held(layer, self.context)
        return held + self.slots(layer)[GPU] * layer.expert

    @property
    def left(self) -> Demand:
        """What is asked of the memory beside the GPU."""
        layers = list[LayerDemand]()
        for i, layer in enumerate(self.demand.layers):
            if self.tier(i) == GPU:
                mixer = layer.mixer if self.apart(i) else 0
                layer = replace(layer, weights=mixer, state=layer.state * bool(mixer), position=0)
            layers.append(replace(layer, experts=layer.experts - self.slots(layer)[GPU]))
        head = 0 if self.tier(len(layers)) == GPU else self.demand.head
        return replace(self.demand, layers=tuple(layers), head=head)

    def tier(self, unit: int) -> str:
        """Where the weights of a layer live, or those of the head, the last unit."""
        return GPU if unit < self.gpu_units else RAM if unit < self.gpu_units + self.ram_units else DISK

    def slots(self, layer: LayerDemand) -> dict[str, int]:
        """How many of a layer's experts live where."""
        on_gpu = min(self.gpu_slots, layer.experts)
        in_ram = min(self.ram_slots, layer.experts - on_gpu)
        return {GPU: on_gpu, RAM: in_ram, DISK: layer.experts - on_gpu - in_ram}

    @property
    def shares(self) -> list[Share]:
        """Everything there is, by kind; the bytes of weights add up to the model's."""
        d, names = self.demand, ("state for the context", "weights every token reads", "routed experts")
        held = {name: dict.fromkeys(TIERS, 0) for name in names}
        token = {name: dict.fromkeys(TIERS, 0.0) for name in names}
        for i, layer in enumerate(d.layers):
            tier = self.tier(i)
            weights, state, experts = moved(layer, self.context)
            apart = layer.mixer if self.apart(i) else 0
            where: list[tuple[str, str, int, float]] = [
                (names[0], GPU if tier == GPU and not apart else RAM, d.held(layer, self.context), state),
                (names[1], tier, layer.weights - apart, weights - apart),
                (names[1], RAM, apart, apart),
            ]
            for slot, count in self.slots(layer).items() if layer.experts else ():
                where.append((names[2], slot, count * layer.expert, experts * count / layer.experts))
            for name, memory, size, amount in where:
                held[name][memory] += size
                token[name][memory] += amount
        held[names[1]][self.tier(len(d.layers))] += d.head
        token[names[1]][self.tier(len(d.layers))] += d.head
        embed, buffers = RAM if self.embed_in_ram else DISK, {RAM: PROCESS + d.buffers}
        if self.gpu_units or self.gpu_slots:
            buffers[GPU] = DRIVER + d.buffers
        return [
            Share("program and buffers", buffers, {}),
            *(Share(name, held[name], token[name]) for name in names),
            Share("embedding", {embed: d.embed}, {embed: float(d.row)}),
        ]

    def total(self, tier: str) -> int:
        """Bytes that live in a memory."""
        return sum(share.held.get(tier, 0) for share in self.shares)

    @property
    def resident(self) -> float:
        """Which share of the routed experts is in memory; what is expected to be found there."""
        held = next(share.held for share in self.shares if share.what == "routed experts")
        return 1 - held[DISK] / self.demand.experts if self.demand.experts else 1.0

    @property
    def token_bytes(self) -> dict[str, float]:
        """Bytes that a token moves, by where they come from; what the disk gives then passes through RAM as well."""
        amounts = {tier: sum(share.token.get(tier, 0.0) for share in self.shares) for tier in TIERS}
        return amounts | {RAM: amounts[RAM] + amounts[DISK]}

    @property
    def token_seconds(self) -> dict[str, float]:
        """How long the bytes of one token take, by where they come from."""
        m = self.machine
        return roofline(self.token_bytes, {GPU: m.gpu_gbs, RAM: m.ram_gbs, DISK: m.disk_gbs})

    @property
    def tokens_per_second(self) -> float:
        """Predicted speed of decoding after ``context`` tokens."""
        return 1 / sum(self.token_seconds.values())

    @property
    def bottleneck(self) -> str:
        """Which memory a token waits for the longest."""
        return max(self.token_seconds.items(), key=lambda item: item[1])[0]

    @property
    def load_seconds(self) -> float:
        """How long it takes at least to bring from the disk what lives in memory."""
        weights = [share for share in self.shares if share.what not in ("program and buffers", "state for the context")]
        return sum(share.held.get(t, 0) for share in weights for t in (GPU, RAM)) / self.machine.disk_gbs / 1e9

    def first_token(self, prompt: int) -> dict[str, float]:
        """How many seconds pass until a prompt of so many tokens is read: of work on GPU and CPU, and of the disk.

        Work is operations at the rate of matrix products, or bytes at the memory's bandwidth, whichever takes longer,
        layer by layer. Every piece of the prompt reads each weight once, and each expert that any of its tokens
        chose, as if all were equally likely.
        """
        m, total = self.machine, {GPU: 0.0, RAM: 0.0, DISK: 0.0}
        rates = {GPU: (m.gpu_gbs, m.gpu_gflops), RAM: (m.ram_gbs, m.cpu_gflops)}

        def work(where: str, amount: float, operations: float) -> float:
            gbs, gflops = rates[where]
            return max(amount / gbs, operations / gflops) / 1e9

        for before in range(0, prompt, self.demand.piece):
            tokens = min(self.demand.piece, prompt - before)
            for i, layer in enumerate(self.demand.layers):
                tier = self.tier(i)
                where = GPU if tier == GPU else RAM
                weights, state, _ = moved(layer, before + tokens)
                operations = tokens * (layer.flops + layer.attention * (before + tokens / 2))
                if self.apart(i):
                    total[RAM] += work(RAM, layer.mixer + state, tokens * layer.mixer_flops)
                    weights, state, operations = weights - layer.mixer, 0, operations - tokens * layer.mixer_flops
                total[where] += work(where, weights + state, operations)
                total[DISK] += weights / m.disk_gbs / 1e9 * (tier == DISK)
                if not layer.experts:
                    continue
                met = layer.experts * (1 - (1 - layer.chosen / layer.experts) ** tokens)
                share = {t: n / layer.experts for t, n in self.slots(layer).items()}
                size, operations = met * layer.expert, tokens * layer.chosen * layer.expert_flops
                if share[GPU]:
                    total[GPU] += work(GPU, size * share[GPU], operations * share[GPU])
                elsewhere = share[RAM] + share[DISK]
                here = work(RAM, size * elsewhere, operations * elsewhere)
                if tier == GPU and m.link_gbs:  # they can be worked on where they are, or sent over
                    sent = max(size * elsewhere / m.link_gbs / 1e9, work(GPU, 0, operations * elsewhere))
                    total[GPU if sent < here else RAM] += min(sent, here)
                else:
                    total[RAM] += here
                total[DISK] += size * share[DISK] / m.disk_gbs / 1e9
        head = self.tier(len(self.demand.layers))
        total[GPU if head == GPU else RAM] += work(
            GPU if head == GPU else RAM, self.demand.head, self.demand.head_flops
        )
        total[DISK] += self.demand.head / m.disk_gbs / 1e9 * (head == DISK)
        return total


PLACES = ("auto", "cpu", "gpu", "hybrid")
"""Where a model may run: all of it on the processor; as much as fits on the GPU; the same without recurrent mixers."""


def plan(demand: Demand, machine: Machine, context: int, place: str = "auto") -> Placement:
    """Place a model on a machine for conversations of ``context`` tokens, in one of ``PLACES``; "auto" is the fastest.

    Raises ``UsageError`` when memory does not even hold the program and the state.
    """
    if place != "auto":
        return _plan(demand, replace(machine, gpu=0) if place == "cpu" else machine, context, place == "hybrid")
    ways = list[Placement]()
    for way in ("gpu", "hybrid", "cpu") if machine.gpu else ():
        with suppress(UsageError):
            ways.append(plan(demand, machine, context, way))
    return max(ways, key=lambda way: way.tokens_per_second, default=None) or plan(demand, machine, context, "cpu")


def _plan(demand: Demand, machine: Machine, context: int, hybrid: bool) -> Placement:
    gpu, ram, gpu_units = _gpu(demand, machine, context, hybrid)
    ram -= PROCESS + demand.buffers + sum(demand.held(layer, context) for layer in demand.layers[gpu_units:])
    ram -= _mixers(demand, context, gpu_units) if hybrid else 0
    if ram < 0:
        raise UsageError(
            f"a context of {context} tokens needs {-ram / 1e9:.2f} GB more memory than the {machine.ram / 1e9:.2f} GB "
            "that there are",
            "ask for a shorter --context, or give more --ram",
        )
    units = [layer.weights for layer in demand.layers] + [demand.head]
    ram_units = 0
    for unit in units[gpu_units:]:
        if unit > ram:
            break
        ram, ram_units = ram - unit, ram_units + 1
    if gpu_units + ram_units < len(units):
        return Placement(demand, machine, context, gpu_units, ram_units, 0, 0, False, hybrid)
    sizes = [(layer.experts, layer.expert) for layer in demand.layers if layer.experts]
    gpu_slots, taken = _slots(sizes, gpu)
    if machine.integrated:
        ram -= taken
    left = [(count - min(gpu_slots, count), size) for count, size in sizes]
    ram_slots, taken = _slots(left, ram)
    every = all(count <= ram_slots for count, _ in left)
    everything = every and demand.embed <= ram - taken
    return Placement(demand, machine, context, gpu_units, ram_units, gpu_slots, ram_slots, everything, hybrid)


def spread(p: Placement, budgets: Sequence[int]) -> list[int] | None:
    """Return on which of several GPUs each layer lives, and last the head: in order, each GPU up to its budget.

    None where they do not fit so; ``budgets`` are bytes for what is placed. What is not on a GPU gets the last one.
    """
    device, used, devices = 0, 0, list[int]()
    for unit in range(len(p.demand.layers) + 1):
        size = p.on_gpu(unit)
        while used + size > budgets[device]:
            device, used = device + 1, 0
            if device == len(budgets):
                return None
        used += size
        devices.append(device)
    return devices


def plan_over(
    demand: Demand, machine: Machine, context: int, place: str, sizes: Sequence[int]
) -> tuple[Placement, list[int]]:
    """Place a model on a machine with a GPU of each of ``sizes``; return also where ``spread`` puts its layers.

    The GPUs are planned as one, smaller than all together where layers cannot be divided so that each keeps its own.
    """
    beside = DRIVER + demand.buffers
    budgets = [max(0, size - beside) for size in sizes]
    room = sum(budgets)
    while True:
        p = plan(demand, replace(machine, gpu=room + beside if room else 0), context, place)
        devices = spread(p, budgets)
        if devices is not None:
            return p, devices
        room = int(room * SMALLER)


def on_each(p: Placement, devices: Sequence[int]) -> dict[str, str]:
    """Say for people which layers each of several GPUs has; ``devices`` are those of ``spread``. Nothing of one GPU."""
    said, last = dict[str, str](), len(devices) - 1
    for device in range(devices[-1] + 1) if any(devices) else ():
        units = [unit for unit in range(min(p.gpu_units, len(devices))) if devices[unit] == device]
        layers = [unit + 1 for unit in units if unit < last]
        parts = [f"layers {layers[0]} to {layers[-1]}"] * bool(layers) + ["the head"] * (last in units)
        said[f"GPU {device}"] = ", ".join(parts) or "nothing"
    return said


def least(demand: Demand, context: int, place: str) -> int:
    """Bytes that a GPU must have for the first layer of a model, in one of ``PLACES``."""
    layer = demand.layers[0]
    whole = layer.weights + demand.held(layer, context)
    apart = layer.weights - layer.mixer if layer.state else whole
    return DRIVER + demand.buffers + {"gpu": whole, "hybrid": apart}.get(place, min(whole, apart))


def _mixers(demand: Demand, context: int, units: int) -> int:
    """Bytes of the recurrent mixers of the first layers, with their state."""
    return sum(layer.mixer + demand.held(layer, context) for layer in demand.layers[:units] if layer.state)


def _gpu(demand: Demand, machine: Machine, context: int, hybrid: bool) -> tuple[int, int, int]:
    """Fill the GPU with layers from the first on; return what is left there, RAM's budget, how many there are.

    The layers are whole, or in a ``hybrid`` without their recurrent mixers.

    Of an integrated GPU's memory, what is used there is taken from RAM, once, and what the rest needs is left to it.
    """
    ram, gpu = machine.ram, machine.gpu - DRIVER - demand.buffers
    if gpu <= 0:
        return 0, ram, 0
    if machine.integrated:
        state = sum(demand.held(layer, context) for layer in demand.layers)
        state += sum(layer.mixer for layer in demand.layers if layer.state) if hybrid else 0
        ram -= DRIVER + demand.buffers
        gpu = min(gpu, ram - PROCESS - demand.buffers - state)
        if gpu <= 0:
            return 0, machine.ram, 0
    units = [layer.weights + demand.held(layer, context) for layer in demand.layers] + [demand.head]
    if hybrid:
        units = [unit - _mixers(demand, context, i + 1) + _mixers(demand, context, i) for i, unit in enumerate(units)]
    count = 0
    for unit in units:
        if unit > gpu:
            break
        gpu, count = gpu - unit, count + 1
        ram -= unit * machine.integrated
    return gpu * (count == len(units)), ram, count


def _slots(sizes: list[tuple[int, int]], room: int) -> tuple[int, int]:
    """Return how many experts of every layer fit in ``room`` bytes (or all it has), and the bytes that they take."""

    def taken(slots: int) -> int:
        return sum(min(slots, count) * size for count, size in sizes)

    least, most = 0, max((count for count, _ in sizes), default=0)
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if taken(middle) <= room else (least, middle - 1)
    return least, taken(least)


def fewest(sizes: Mapping[int, int], chosen: Mapping[int, int], counts: Mapping[int, int]) -> dict[int, int]:
    """Return how many slots of each size one token needs in a layer; all arguments are by layer."""
    least = dict.fromkeys(sizes.values(), 0)
    for layer, size in sizes.items():
        least[size] = max(least[size], min(chosen[layer], counts[layer]))
    return least


def divided(room: int, sizes: Mapping[int, int], counts: Mapping[int, int], least: Mapping[int, int]) -> dict[int, int]:
    """Return how many slots there are of each size: those of ``least``, and what fits in ``room`` bytes beside them.

    The room is shared out by the bytes of the experts that are left.
    """
    most = Counter[int]()
    for layer, size in sizes.items():
        most[size] += counts[layer]
    wanted = {size: size * (most[size] - least[size]) for size in most}
    share = min(1.0, room / max(1, sum(wanted.values())))
    return {size: least[size] + int(wanted[size] * share) // size for size in most}


def context_that_fits(demand: Demand, machine: Machine, place: str = "auto") -> int:
    """Return the longest context, as far as the model's makers promise one, beside all weights that a token reads."""

    def fits(context: int) -> bool:
        try:
            p = plan(demand, machine, context, place)
        except UsageError:
            return False
        return p.gpu_units + p.ram_units > len(demand.layers)

    least, most = -1, demand.longest or 1 << 20
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if fits(middle) else (least, middle - 1)
    return max(least, 0)


def faster(machine: Machine) -> Iterator[tuple[str, Machine]]:
    """Machines that differ from this one in one thing that can be bought."""
    yield "twice the memory", replace(machine, ram=2 * machine.ram)
    yield "a disk twice as fast", replace(machine, disk_gbs=2 * machine.disk_gbs)


def as_json(p: Placement, prompts: tuple[int, ...]) -> dict[str, Any]:
    """Return a placement as JSON: sizes are bytes, times seconds."""
    return {
        "context": p.context,
        "place": p.place,
        "machine": asdict(p.machine),
        "shares": [{"what": s.what, "bytes": dict(s.held), "per_token": dict(s.token)} for s in p.shares],
        "bytes": {tier: p.total(tier) for tier in TIERS},
        "weights": p.demand.weights,
        "experts_resident": p.resident,
        "expert_slots": {GPU: p.gpu_slots, RAM: p.ram_slots},
        "bytes_per_token": p.token_bytes,
        "seconds_per_token": p.token_seconds,
        "tokens_per_second": p.tokens_per_second,
        "first_token_seconds": {str(n): sum(p.first_token(n).values()) for n in prompts},
        "load_seconds": p.load_seconds,
        "bottleneck": p.bottleneck,
        "context_that_fits": context_that_fits(p.demand, p.machine, p.place),
    }
