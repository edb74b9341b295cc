"""Write a store, shard by shard."""

from collections.abc import Callable, Sequence
from pathlib import Path

from deltafin.layout import Layout


class Conversion:
    """A store in the making, in ``DEST.partial``; what is there already is verified and kept.

    The place of every byte follows from ``layout`` alone, so that shards can be taken in any order, each once, and be
    dropped after. ``stamps``, one for each file of ``layout.files``, tell whether a file is still the one that an
    earlier run read: a hash of its content from the hub, or size and time for a local file; what was made of a file
    with another stamp is made anew. ``extras`` are files that are copied beside the weights (vocabulary, config).
    ``source`` is repository and revision. ``progress`` is called with bytes of the store that are done, and in all.

    Use as a context manager: it holds files open, and a lock that keeps a second conversion out.

    Raises ``UsageError`` where DEST, or DEST.partial, is something else, or the disk has too little space;
    ``CheckpointError`` names a file that cannot be read, a tensor that is not finite.
    """

    def __init__(
        self,
        layout: Layout,
        dest: Path,
        stamps: Sequence[str],
        *,
        experts: str = "keep",
        resident: str = "keep",
        source: tuple[str | None, str | None] = (None, None),
        extras: Sequence[Path] = (),
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        raise NotImplementedError

    size: int
    """Bytes that the finished store's weights take; known before a byte is written, and reserved on the disk."""

    def __enter__(self) -> "Conversion":
        raise NotImplementedError

    def __exit__(self, *error: object) -> None:
        raise NotImplementedError

    def needs(self, shard: int) -> bool:
        """Whether anything of ``layout.files[shard]`` has still to be read."""
        raise NotImplementedError

    def take(self, shard: int, path: Path) -> None:
        """Convert everything of ``layout.files[shard]``, which lies at ``path``; then the file may be dropped."""
        raise NotImplementedError

    def finish(self) -> dict[str, float]:
        """Publish the store as DEST; return the relative error of each kind of tensor that was re-encoded."""
        raise NotImplementedError


def convert(
    source: str | Path,
    dest: str | Path,
    *,
    experts: str = "keep",
    resident: str = "keep",
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, float]:
    """Convert the snapshot in ``source`` to a store at ``dest``: ``Conversion`` over its files."""
    raise NotImplementedError
