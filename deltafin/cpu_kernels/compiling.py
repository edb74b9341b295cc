"""Compiled kernels, kept: once per machine, type of CPU, and version of deltafin, Numba and Python.

Numba notices a change of CPU by itself, and of the file that a kernel stands in, but not of the files that it calls;
so the folder's name is a hash of all of them. A home that cannot be written to is replaced by the temporary folder.
"""

import hashlib
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import llvmlite
import numba
from numba import config, njit
from numba.core.registry import cpu_target

_codegen = cpu_target.target_context.codegen()
CPU: str = _codegen._get_host_cpu_name()
"""The type of CPU that kernels are compiled for, as LLVM calls it."""

FEATURES = frozenset(f[1:] for f in _codegen._get_host_cpu_features().split(",") if f[:1] == "+")
"""What that CPU can do, as LLVM calls it."""


def _homes() -> Iterator[Path]:
    """Folders for caches, the best first."""
    if sys.platform == "darwin":
        yield Path.home() / "Library" / "Caches"
    elif "LOCALAPPDATA" in os.environ:
        yield Path(os.environ["LOCALAPPDATA"])
    elif os.environ.get("XDG_CACHE_HOME"):
        yield Path(os.environ["XDG_CACHE_HOME"])
    else:
        yield Path.home() / ".cache"
    yield Path(tempfile.gettempdir()) / f"deltafin-{os.getuid() if hasattr(os, 'getuid') else 'cache'}"


def _version() -> str:
    sources = sorted(Path(__file__).parent.glob("*.py"))
    about = [
        numba.__version__,
        llvmlite.__version__,
        platform.python_version(),
        *(p.read_text(encoding="utf-8") for p in sources),
    ]
    return hashlib.blake2b("\n".join(about).encode(), digest_size=8).hexdigest()


def _folder() -> Path | None:
    for home in _homes():
        folder = home / "deltafin" / f"kernels-{_version()}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile("wb", dir=folder):
                return folder
        except OSError:
            continue
    return None


FOLDER = Path(config.CACHE_DIR) if config.CACHE_DIR else _folder()
"""Where compiled kernels are kept; None where nothing can be written, and every process compiles for itself."""

if FOLDER is not None:
    config.CACHE_DIR = str(FOLDER)

kernel = partial(njit, nogil=True, error_model="numpy", cache=FOLDER is not None)
"""Compile a function, keep the result, release the interpreter's lock while it runs, divide as IEEE does.

No ``fastmath``: a sum that the compiler may reorder differs between two copies of one function, and a kernel that was
compiled just now may call other copies than one that was kept. Sums are explicit, in ``vector``.
"""


def marker() -> Path | None:
    """The file that says that every kernel has been compiled for this CPU; None where nothing is kept."""
    if FOLDER is None:
        return None
    name = hashlib.blake2b((CPU + ",".join(sorted(FEATURES))).encode(), digest_size=8).hexdigest()
    return FOLDER / f"complete-{name}"
