"""What deltafin needs of this machine, looked at piece by piece: what is there, what is wrong, what to do about it."""

import importlib
import importlib.metadata
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from deltafin import __version__, machine
from deltafin.errors import DeltafinError

LITTLE = 2_000_000_000
"""Bytes of free memory, and of free disk, below which there is a warning."""

SLOW = 0.5
"""1e9 bytes a second of a disk below which there is a warning."""

FEATURES = {"AVX-512 VNNI": "avx512bw and avx512vnni", "AVX2": "avx2", "SSSE3": "ssse3", "portable": "nothing"}
"""What the forms of the kernels need, the fastest first."""

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Check:
    """One thing that was looked at; ``status`` is ``"ok"``, ``"warning"`` or ``"error"``, ``hint`` what to do."""

    name: str
    status: str
    text: str
    hint: str = ""


def checks(model: Path | None = None, measured: bool = False, progress: Progress | None = None) -> Iterator[Check]:
    """Look at everything, and at a ``model``'s files; a part that breaks is an error, and the others go on.

    ``measured`` measures the disk again. ``progress`` is called with one line before anything that takes seconds.
    """
    tell = progress or (lambda what: None)
    looks: list[tuple[str, Callable[[], Iterator[Check]]]] = [
        ("python", _python),
        ("packages", _packages),
        ("cpu", _cpu),
        ("threads", _threads),
        ("memory", _memory),
        ("gpu", _gpu),
        ("caches", _caches),
        ("kernels", _kernels),
        ("disk", lambda: _disk(model, measured, tell)),
        ("hub", _hub),
        *([("model", lambda: _model(model))] if model else []),
    ]
    for name, look in looks:
        try:
            yield from look()
        except DeltafinError as error:
            yield Check(name, "error", error.message, error.hint or "")
        except ImportError as error:  # was an error above, as a package
            yield Check(name, "warning", f"not looked at: {error}")
        except Exception as error:  # whatever is broken here, the rest is worth knowing
            yield Check(name, "error", f"{type(error).__name__}: {error}", "what it belongs to may be badly installed")


def _python() -> Iterator[Check]:
    about = f"{platform.python_implementation()} {platform.python_version()}, {platform.platform()}"
    if sys.maxsize < 1 << 32:
        yield Check("python", "error", f"{about}: 32 bits", "models need a Python of 64 bits")
    else:
        yield Check("python", "ok", about)
    yield Check("deltafin", "ok", f"{__version__} in {Path(__file__).parent}")


def _packages() -> Iterator[Check]:
    for name, purpose in (("torch", "nothing runs"), ("numba", "there are no fast kernels"), ("triton", "")):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if purpose:
                yield Check(name, "error", f"is not installed; without it {purpose}", f"pip install {name}")
            else:
                yield Check(name, "ok", "is not installed; it is for GPUs alone")
            continue
        try:
            importlib.import_module(name)
        except Exception as error:  # broken libraries raise anything
            status = "error" if purpose else "warning"
            yield Check(
                name, status, f"{version} cannot be imported ({error})", f"pip install --force-reinstall {name}"
            )
        else:
            yield Check(name, "ok", version)


def _cpu() -> Iterator[Check]:
    from deltafin import ops

    table = ops.load("numba")
    compiling = importlib.import_module("deltafin.cpu_kernels.compiling")
    others = [f"{form} (needs {needs})" for form, needs in FEATURES.items()]
    form, *_ = table.form.split(",")
    faster = others[: list(FEATURES).index(form)]
    text = f"{compiling.CPU}, kernels use {table.form}"
    if form == "portable":
        hint = f"packed weights are slow here; faster is {', '.join(faster)}"
        yield Check("cpu", "warning", text, hint)
    else:
        yield Check("cpu", "ok", f"{text}; this CPU lacks what {', '.join(faster)}" if faster else text)


def _threads() -> Iterator[Check]:
    cores, quota, logical = machine.cores(), machine.quota(), os.cpu_count() or 1
    why = f"{len(cores)} cores of {logical} logical CPUs: {', '.join(map(str, cores))}"
    if quota is not None:
        why += f"; a container's limit allows {quota:g} CPUs"
    yield Check("threads", "ok", f"{machine.threads()} ({why})")


def _memory() -> Iterator[Check]:
    memory = machine.memory()
    text = f"{memory.available / 1e9:.1f} GB free of {memory.total / 1e9:.1f} GB, limited by {memory.limit}"
    if memory.available < LITTLE:
        yield Check("memory", "warning", text, "end other programs, or raise the container's limit")
    else:
        yield Check("memory", "ok", text)


def _gpu() -> Iterator[Check]:
    driver = ""
    with suppress(OSError):
        driver = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0]
    import torch

    from deltafin import ops

    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            about = torch.cuda.get_device_properties(i)
            text = f"{about.name}, {about.total_memory / 1e9:.1f} GB, CUDA {torch.version.cuda}, {driver}"
            text = text.rstrip(", ")
            if (about.major, about.minor) < ops.OLDEST:
                yield Check("gpu", "warning", f"{text}: older than compute capability 7.5, so it is not used")
            elif find_spec("triton"):
                yield Check("gpu", "ok", text)
            else:
                yield Check("gpu", "warning", f"{text}, but Triton is missing", "pip install 'deltafin[gpu]'")
    elif driver:
        hint = "install a torch that is built for CUDA"
        yield Check("gpu", "warning", f"{driver}, but torch {torch.__version__} does not use it", hint)
    else:
        yield Check("gpu", "ok", "none that torch can use")


def _writable(folder: Path) -> bool:
    """Whether a file can be written in a folder, or in the nearest one above it that is there."""
    folder = folder.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryFile("wb", dir=folder):
            return True
    except OSError:
        return False


def _caches() -> Iterator[Check]:
    folder, wanted = machine.cache_folder(), next(machine.cache_homes())
    if folder is None:
        hint = "kernels are compiled at every start, and nothing that is measured is kept; make it writable"
        yield Check("caches", "error", f"neither {wanted} nor the temporary folder can be written to", hint)
        return
    free = shutil.disk_usage(folder).free
    text = f"{folder}, {free / 1e9:.1f} GB free on its disk"
    if folder != wanted:
        hint = "what is kept there is lost when temporary files are; make the first writable"
        yield Check("caches", "warning", f"{wanted} cannot be written to, so it is {text}", hint)
    elif free < LITTLE:
        yield Check("caches", "warning", text, "free some space")
    else:
        yield Check("caches", "ok", text)


def _kernels() -> Iterator[Check]:
    compiling = importlib.import_module("deltafin.cpu_kernels.compiling")
    folder, mark = compiling.FOLDER, compiling.marker()
    if folder is None or mark is None:
        hint = "make the cache folder writable, or every start compiles for a minute or two"
        yield Check("kernels", "warning", "compiled kernels cannot be kept", hint)
        return
    size = _size(folder)
    if mark.exists():
        yield Check("kernels", "ok", f"compiled for this CPU, {size / 1e6:.1f} MB in {folder}")
    else:
        hint = "the first model that is loaded compiles them, which takes a minute or two"
        yield Check("kernels", "warning", f"not all compiled for this CPU yet, {size / 1e6:.1f} MB in {folder}", hint)
    old = [f for f in folder.parent.glob("kernels-*") if f != folder and f.is_dir()]
    if old:
        names = ", ".join(f.name for f in sorted(old))
        total = sum(map(_size, old)) / 1e6
        yield Check(
            "kernels", "ok", f"{total:.1f} MB of other versions: {names}", "can be deleted if they are not used"
        )


def _size(folder: Path) -> int:
    total = 0
    for f in folder.rglob("*"):
        with suppress(OSError):  # another process may tidy up
            total += f.stat().st_size
    return total


def _disk(model: Path | None, again: bool, tell: Progress) -> Iterator[Check]:
    from deltafin import measure

    path = model or machine.cache_folder() or Path(tempfile.gettempdir())
    found = measure.disk_of(path, measure.PIECES[1], again, tell)
    text = f"{found.gbs:.2f} GB/s at random places, {found.piece / 1e6:.1f} MB a read, {path}, measured {found.date}"
    if not found.direct:
        hint = "this disk cannot be read past the page cache: the figure may be the memory's"
        yield Check("disk", "warning", text, hint)
    elif found.gbs < SLOW:
        yield Check("disk", "warning", text, "experts that are read from it will be slow; keep models on a faster one")
    else:
        yield Check("disk", "ok", text)


def _hub() -> Iterator[Check]:
    from huggingface_hub import get_token

    endpoint = os.environ.get("HF_ENDPOINT", "the default")
    folder = machine.hub_folder()
    token = "is set" if get_token() else "is not set: gated models cannot be fetched"
    text = f"{folder}, endpoint {endpoint}{', offline' * machine.offline()}, a token {token}"
    if _writable(folder):
        yield Check("hub", "ok", text)
    else:
        hint = "models can be read from it, not fetched into it; HF_HOME names another folder"
        yield Check("hub", "warning", f"{text}; it cannot be written to", hint)


def _model(path: Path | None) -> Iterator[Check]:
    from deltafin import demand, placement
    from deltafin.store import open_model

    assert path is not None
    opened = open_model(path)
    need = demand.of_files(opened)
    text = f"{path.name}: {opened.config.family}, {need.weights / 1e9:.2f} GB of weights"
    free = machine.memory().available
    if placement.PROCESS + need.buffers + need.read > free:
        hint = f"what every token reads takes {need.read / 1e9:.1f} GB; see deltafin plan"
        yield Check("model", "warning", f"{text}, more than fits into memory", hint)
    else:
        yield Check("model", "ok", f"{text}, of which every token reads {need.read / 1e9:.2f} GB")
