"""Text to token ids and back, with the vocabulary files of a Kimi checkpoint."""

import base64
import binascii
import codecs
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from operator import index
from pathlib import Path

import tiktoken

from deltafin.errors import TokenizerError

RANKS_FILE = "tiktoken.model"
CONFIG_FILE = "tokenizer_config.json"

# How text is cut before bytes are merged; the first alternative that matches wins (spec: Kimi K3 tokenizer).
# Han is a script, not a block, and stands apart from the other letters.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLIT_PATTERN = "|".join(
    [
        r"\p{Han}+",
        rf"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

# The released tokenizer cuts long input here before it splits; other borders would give other ids.
_LONGEST_BLOCK = 400_000
_LONGEST_RUN = 25_000
_RUN = re.compile(r"\s+|\S+")

# Tokens that end a reply in one of the chat formats, whatever the checkpoint's files say.
_END_NAMES = ("<|end_of_msg|>", "[EOS]", "[EOT]", "<|im_end|>")


class Tokenizer:
    """A byte-level vocabulary: ordinary tokens by merge rank, then special tokens by name.

    ``size`` is the number of ids, ``special`` maps every special token's name to its id and
    ``stop_ids`` are the ids after which a reply is over.
    """

    def __init__(self, ranks: Mapping[bytes, int], special: Mapping[str, int], stop_ids: Iterable[int] = ()) -> None:
        """Build from ranks 0 to n-1 (all 256 single bytes among them) and special ids from n on."""
        self.size = len(ranks) + len(special)
        self.special = dict(special)
        self.stop_ids = frozenset(stop_ids) | {special[name] for name in _END_NAMES if name in special}
        self._bytes = [b""] * self.size
        for token, number in ranks.items():
            self._bytes[number] = token
        for name, number in special.items():
            self._bytes[number] = name.encode()
        self._encoding = tiktoken.Encoding(
            "kimi", pat_str=SPLIT_PATTERN, mergeable_ranks=dict(ranks), special_tokens=self.special
        )

    @classmethod
    def open(cls, folder: Path | str, vocab_size: int | None = None) -> "Tokenizer":
        """Read ``tiktoken.model`` and ``tokenizer_config.json`` of a checkpoint's folder.

        ``vocab_size`` defaults to the one in ``config.json``. Ids the files give no name become
        ``<|reserved_token_N|>``. Raises TokenizerError with the file, and the line of a bad rank.
        """
        folder = Path(folder)
        missing = [name for name in (RANKS_FILE, CONFIG_FILE) if not (folder / name).is_file()]
        if missing:
            needed = "it" if len(missing) == 1 else "them"
            raise TokenizerError(
                f"no {' and no '.join(missing)} in {folder}: text needs {needed}; token ids work without",
                "put the checkpoint's vocabulary files there, or use token ids",
            )
        ranks = _read_ranks(folder / RANKS_FILE)
        names = _read_special(folder / CONFIG_FILE, len(ranks))
        size = vocab_size or _config_size(folder) or max(names, default=len(ranks) - 1) + 1
        if size < max(names, default=len(ranks) - 1) + 1:
            raise TokenizerError(
                f"the vocabulary in {folder} has {len(ranks)} ranks and special ids up to"
                f" {max(names, default=0)}, more than the model's {size} ids",
                "the vocabulary files seem to belong to another checkpoint",
            )
        special = {names.get(i, f"<|reserved_token_{i}|>"): i for i in range(len(ranks), size)}
        if len(special) != size - len(ranks):
            raise TokenizerError(f"two special tokens of {folder / CONFIG_FILE} have the same name")
        named_end = _read_json(folder / CONFIG_FILE).get("eos_token")
        if isinstance(named_end, dict):
            named_end = named_end.get("content")
        ends = eos_ids(folder)
        if isinstance(named_end, str) and named_end in special:
            ends |= {special[named_end]}
        return cls(ranks, special, ends)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return the ids of a text, without any token before or after it.

        Names of special tokens inside the text stay ordinary text unless ``special`` is true. A lone
        surrogate, which is no character, is encoded as U+FFFD.
        """
        if special:
            return [i for part in _parts(text) for i in self._encoding.encode(part, allowed_special="all")]
        return [i for part in _parts(text) for i in self._encoding.encode_ordinary(part)]

    def token_bytes(self, id: int) -> bytes:
        """Return the bytes one id stands for (a special token: its name). Raises ValueError."""
        number = index(id)
        if not 0 <= number < self.size:
            raise ValueError(f"token id {number} is outside the vocabulary of {self.size}")
        return self._bytes[number]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of some ids; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def decoder(self) -> "StreamDecoder":
        """Return a decoder that takes one id at a time."""
        return StreamDecoder(self)


class StreamDecoder:
    """Decodes id by id; what it returns, joined, equals ``Tokenizer.decode`` of all the ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Start at the beginning of a text."""
        self._token_bytes = tokenizer.token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, id: int) -> str:
        """Return the characters that are complete after this id, possibly none."""
        return self._utf8.decode(self._token_bytes(id))

    def flush(self) -> str:
        """Return U+FFFD for a character that was left incomplete, else nothing, and start again."""
        return self._utf8.decode(b"", final=True)


def eos_ids(folder: Path | str) -> frozenset[int]:
    """Return the end ids that ``generation_config.json`` and ``config.json`` name, as one set.

    Needs no vocabulary; a file that is not there adds nothing. Raises TokenizerError for a damaged one.
    """
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = Path(folder) / name
        if not path.is_file():
            continue
        top = _read_json(path)
        inner = top.get("text_config")
        for part in (top, inner if isinstance(inner, dict) else {}):
            value = part.get("eos_token_id")
            for id in value if isinstance(value, list) else [] if value is None else [value]:
                if not isinstance(id, int) or isinstance(id, bool) or id < 0:
                    raise TokenizerError(f"eos_token_id in {path} is {value!r}, not an id or a list of ids")
                found.add(id)
    return frozenset(found)


def _parts(text: str) -> Iterator[str]:
    """Cut a text into blocks, and blocks inside overlong runs of one kind, white space or not."""
    for start in range(0, len(text), _LONGEST_BLOCK):
        block = text[start : start + _LONGEST_BLOCK]
        cut = 0
        for run in _RUN.finditer(block) if len(block) > _LONGEST_RUN else ():
            for border in range(run.start() + _LONGEST_RUN, run.end(), _LONGEST_RUN):
                yield block[cut:border]
                cut = border
        yield block[cut:]


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Read lines of "base64 rank"; the ranks must be 0 to n-1, each once, and cover every byte."""
    ranks: dict[bytes, int] = {}
    line_of: dict[int, int] = {}
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            encoded, rank_text = line.split()
            token, rank = base64.b64decode(encoded, validate=True), int(rank_text)
        except (ValueError, binascii.Error):
            shown = line[:40].decode("ascii", "backslashreplace")
            raise _damaged(path, f"line {number} is {shown!r}, not a base64 token and its rank") from None
        if not token or token in ranks:
            raise _damaged(path, f"line {number} repeats a token" if token else f"line {number} has no token")
        if rank in line_of:
            raise _damaged(path, f"line {number} repeats rank {rank} of line {line_of[rank]}")
        ranks[token], line_of[rank] = rank, number
    for rank, number in line_of.items():
        if not 0 <= rank < len(ranks):
            raise _damaged(path, f"line {number} has rank {rank}, but there are {len(ranks)} ranks, counted from 0")
    absent = [i for i in range(256) if bytes([i]) not in ranks]
    if absent:
        raise _damaged(path, f"it lacks {len(absent)} of the 256 single bytes, the first is 0x{absent[0]:02x}")
    return ranks


def _damaged(path: Path, what: str) -> TokenizerError:
    return TokenizerError(f"{path} is damaged: {what}", "fetch the file again")


def _read_special(path: Path, first: int) -> dict[int, str]:
    """Read the named special tokens, id to name, from the tokenizer's configuration."""
    table = _read_json(path).get("added_tokens_decoder")
    if not isinstance(table, dict):
        raise TokenizerError(f"{path} has no added_tokens_decoder, the table of special tokens")
    names: dict[int, str] = {}
    for key, entry in table.items():
        name = entry.get("content") if isinstance(entry, dict) else None
        if not (key.isascii() and key.isdigit() and isinstance(name, str) and name):
            raise TokenizerError(f"{path}: the special token {key!r} needs a numeric id and a content")
        if int(key) < first:
            raise TokenizerError(f"{path}: the special token {name!r} has id {key}, which is one of the {first} ranks")
        names[int(key)] = name
    return names


def _config_size(folder: Path) -> int | None:
    """Return the model's vocabulary size, if there is a configuration that tells it."""
    path = folder / "config.json"
    if not path.is_file():
        return None
    config = _read_json(path)
    inner = config.get("text_config")
    size = (inner if isinstance(inner, dict) else config).get("vocab_size")
    if size is not None and (type(size) is not int or size < 1):
        raise TokenizerError(f"vocab_size in {path} is {size!r}, not a number of ids")
    return size


def _read_json(path: Path) -> dict[str, object]:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} is not valid JSON: {error}", "fetch the file again") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} holds no JSON object")
    return value
