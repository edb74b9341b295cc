"""The vocabulary: its files, split rule, merges (against tiktoken), streaming and stop ids."""

import base64
import json
import shutil
import unicodedata
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import tiktoken
from hypothesis import example, given
from hypothesis import strategies as st

from deltafin.errors import TokenizerError
from deltafin.tokenizer import SPLIT_PATTERN, Tokenizer, eos_ids

NANO_FOLDER = Path(__file__).parents[1] / "deltafin" / "nano"
NANO = Tokenizer.open(NANO_FOLDER)
GOLDEN = json.loads((Path(__file__).parent / "data" / "kimi-k3-golden.json").read_text(encoding="utf-8"))
GOLDEN_TEXTS = [case["text"] for case in GOLDEN["text"] + GOLDEN["pieces"]]
RANKS = {
    base64.b64decode(line.split()[0]): int(line.split()[1])
    for line in (NANO_FOLDER / "tiktoken.model").read_text(encoding="utf-8").splitlines()
}

# Characters at which split rules differ: letters of every kind, marks, Han letters and symbols, kana, hangul,
# numbers of three categories, white space that Python and Unicode see differently, signs, the long s.
TRICKY = (
    "aZsSdtTlLmMrReEvV'\u017fǅʰªﬀßéЖ漢字々〇⺀⽀㐀ーのア한글۳٣½Ⅷ1290 \t\n\r\x0b\x1c\x1f\x85\xa0\u2003\u3000"
    ".,!/<|>-_“🎉🇩\u0301\u200d\ufe0f\0"
)
texts = st.text(st.sampled_from(TRICKY) | st.characters(exclude_categories=["Cs", "Cn", "Co"]), max_size=16)


# ------------------------------------------------------------------ an independent splitter, from the prose
HAN = [
    *((0x2E80, 0x2E99), (0x2E9B, 0x2EF3), (0x2F00, 0x2FD5), (0x3005, 0x3005), (0x3007, 0x3007)),
    *((0x3021, 0x3029), (0x3038, 0x303B), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFA6D)),
    *((0xFA70, 0xFAD9), (0x16FE2, 0x16FE3), (0x16FF0, 0x16FF1), (0x20000, 0x2A6DF), (0x2A700, 0x2B739)),
    *((0x2B740, 0x2B81D), (0x2B820, 0x2CEA1), (0x2CEB0, 0x2EBE0), (0x2EBF0, 0x2EE5D), (0x2F800, 0x2FA1D)),
    *((0x30000, 0x3134A), (0x31350, 0x323AF)),
]
SPACES = set("\t\n\x0b\x0c\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000") | {chr(c) for c in range(0x2000, 0x200B)}


def kind(c: str) -> str:
    return unicodedata.category(c)


def is_han(c: str) -> bool:
    return any(low <= ord(c) <= high for low, high in HAN)


def is_upper(c: str) -> bool:
    return (kind(c) in ("Lu", "Lt", "Lm", "Lo") or kind(c)[0] == "M") and not is_han(c)


def is_lower(c: str) -> bool:
    return (kind(c) in ("Ll", "Lm", "Lo") or kind(c)[0] == "M") and not is_han(c)


def is_sign(c: str) -> bool:
    return c not in SPACES and kind(c)[0] not in "LN"


def run_of(test, text: str, at: int) -> int:
    while at < len(text) and test(text[at]):
        at += 1
    return at


def after_contraction(text: str, at: int) -> int:
    for ending in ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d"):
        if [c.casefold() for c in text[at : at + len(ending)]] == list(ending):
            return at + len(ending)
    return at


def after_word(text: str, start: int) -> int | None:
    """The second and third alternatives: lower-case ending wanted first, then any."""
    starts = [start]
    if text[start] not in "\r\n" and kind(text[start])[0] not in "LN":
        starts.insert(0, start + 1)
    for at in starts:
        for lower in range(run_of(is_upper, text, at), at - 1, -1):
            if lower < len(text) and is_lower(text[lower]):
                return after_contraction(text, run_of(is_lower, text, lower))
    for at in starts:
        upper = run_of(is_upper, text, at)
        if upper > at:
            return after_contraction(text, run_of(is_lower, text, upper))
    return None


def next_border(text: str, at: int) -> int:
    if is_han(text[at]):
        return run_of(is_han, text, at)
    if (end := after_word(text, at)) is not None:
        return end
    if kind(text[at])[0] == "N":
        return min(run_of(lambda c: kind(c)[0] == "N", text, at), at + 3)
    signs = at + (text[at] == " ")
    if (end := run_of(is_sign, text, signs)) > signs:
        return run_of(lambda c: c in "\r\n", text, end)
    end = run_of(SPACES.__contains__, text, at)
    newlines = [i for i in range(at, end) if text[i] in "\r\n"]
    if newlines:
        return newlines[-1] + 1
    return end if end == len(text) or end == at + 1 else end - 1


def split(text: str) -> list[str]:
    pieces, at = [], 0
    while at < len(text):
        end = next_border(text, at)
        pieces.append(text[at:end])
        at = end
    return pieces


def split_by_tokenizer(text: str) -> list[str]:
    """With a vocabulary that knows every substring, each split piece is one token."""
    tokens = dict.fromkeys(bytes([i]) for i in range(256))
    tokens |= dict.fromkeys(text[i:j].encode() for i in range(len(text)) for j in range(i + 1, len(text) + 1))
    tokenizer = Tokenizer({token: rank for rank, token in enumerate(tokens)}, {})
    return [tokenizer.token_bytes(i).decode() for i in tokenizer.encode(text)]


@given(texts)
@example("\u0301a")
@example(" ʰA'\u017f")
@example("!\n/a")
@example("!⺀漢")
@example("a \n \n b  c")
@example("\x1c\x1ca\x85b")
def test_split_follows_its_description(text):
    assert split_by_tokenizer(text) == split(text)


@pytest.mark.parametrize("text", GOLDEN_TEXTS[:18])
def test_split_of_published_texts(text):
    assert split_by_tokenizer(text) == split(text)


def test_published_ids_agree_with_the_split():
    """Texts with as many ids as pieces map each piece to one id: always the same, and never two to one."""
    id_of: dict[str, int] = {}
    for case in GOLDEN["text"] + GOLDEN["pieces"]:
        pieces = split(case["text"])
        assert len(pieces) <= len(case["ids"])
        if len(pieces) == len(case["ids"]):
            for piece, id in zip(pieces, case["ids"], strict=True):
                assert id_of.setdefault(piece, id) == id
    assert len(id_of) > 90
    assert len(set(id_of.values())) == len(id_of)


# ------------------------------------------------------------------ merging
def merged(piece: bytes) -> list[int]:
    """Byte pairs merged, lowest rank first."""
    parts = [bytes([b]) for b in piece]
    while True:
        pairs = [(RANKS[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in RANKS]
        if piece in RANKS:
            return [RANKS[piece]]
        if not pairs:
            return [RANKS[part] for part in parts]
        _, i = min(pairs)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


words = st.text(st.sampled_from(TRICKY + " the and you quick brown"), max_size=60)


@given(words | st.sampled_from(GOLDEN_TEXTS))
def test_encode_is_split_then_merge(text):
    ids = NANO.encode(text)
    assert ids == [id for piece in split(text) for id in merged(piece.encode())]
    assert ids == [id for piece in split(text) for id in NANO.encode(piece)]
    assert NANO.decode(ids) == text


@given(words | st.sampled_from(GOLDEN_TEXTS))
def test_encode_equals_plain_tiktoken(text):
    plain = tiktoken.Encoding("plain", pat_str=SPLIT_PATTERN, mergeable_ranks=RANKS, special_tokens=NANO.special)
    assert NANO.encode(text) == plain.encode(text, disallowed_special=())
    assert NANO.encode(text, special=True) == plain.encode(text, allowed_special="all")


@given(st.lists(st.sampled_from([*NANO.special, "a", " ", "<|", "é"]), max_size=8).map("".join))
def test_control_ids_only_when_asked_for(text):
    first_control = len(RANKS)
    assert all(id < first_control for id in NANO.encode(text))
    assert any(id >= first_control for id in NANO.encode(text, special=True)) == any(n in text for n in NANO.special)
    assert NANO.decode(NANO.encode(text)) == NANO.decode(NANO.encode(text, special=True)) == text


def test_special_names_in_published_text():
    (case,) = GOLDEN["text_special"]
    ids = NANO.encode(case["text"], special=True)
    found = {NANO.decode([id]): at for at, id in enumerate(ids) if id >= len(RANKS)}
    assert list(found) == ["<|open|>", "[BOS]"]
    assert all(id < len(RANKS) for id in NANO.encode(case["text"]))


def test_long_input_is_cut_where_the_release_cuts_it():
    whole = tiktoken.Encoding("plain", pat_str=SPLIT_PATTERN, mergeable_ranks=RANKS, special_tokens={})
    run = "the" * 10_000  # cut after 25,000 characters, inside a word
    assert NANO.encode(run) == NANO.encode(run[:25_000]) + NANO.encode(run[25_000:])
    assert NANO.encode(run) != whole.encode(run)
    assert NANO.encode("so " + run) == NANO.encode("so " + run[:25_000]) + NANO.encode(run[25_000:])
    assert NANO.encode(run[:25_000]) == whole.encode(run[:25_000])
    words = "the sea " * 50_001  # cut after 400,000
    assert NANO.encode(words) == NANO.encode(words[:400_000]) + NANO.encode(words[400_000:])
    spaces = "x" + " " * 60_000 + "y"
    parts = [spaces[:25_001], spaces[25_001:50_001], spaces[50_001:]]
    assert NANO.encode(spaces) == [id for part in parts for id in NANO.encode(part)]
    for text in (run, words, spaces):
        assert NANO.decode(NANO.encode(text)) == text


@pytest.mark.parametrize("special", [False, True])
def test_surrogates_become_characters_or_replacements(special):
    assert NANO.decode(NANO.encode("a\ud800b", special=special)) == "a\ufffdb"
    assert NANO.decode(NANO.encode("\ud83d\ude00", special=special)) == "😀"


def test_empty():
    assert NANO.encode("") == NANO.encode("", special=True) == []
    assert NANO.decode([]) == ""


# ------------------------------------------------------------------ decoding
def byte_ids(data: bytes) -> list[int]:
    return [RANKS[bytes([b])] for b in data]


def deltas(ids: list[int]) -> list[str]:
    decoder = NANO.decoder()
    return [*map(decoder.push, ids), decoder.flush()]


@given(st.lists(st.integers(0, NANO.size - 1), max_size=20) | st.binary(max_size=20).map(byte_ids))
@example(byte_ids(b"\xf0\x80\xe2\x82A\xe2\x82"))
def test_stream_joins_to_the_whole(ids):
    assert "".join(deltas(ids)) == NANO.decode(ids)
    assert NANO.decode(ids) == b"".join(map(NANO.token_bytes, ids)).decode("utf-8", "replace")


@given(st.text(st.sampled_from("한글漢字🎉🇩🇪👩\u200d🚀é\u0301a "), max_size=12))
def test_stream_never_shows_half_a_character(text):
    shown = list(accumulate(deltas(byte_ids(text.encode())), initial=""))
    assert all(text.startswith(prefix) for prefix in shown)
    assert shown[-1] == text


def test_decoder_starts_again_after_flush():
    decoder = NANO.decoder()
    assert decoder.push(RANKS[b"\xe2"]) == ""
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""
    assert decoder.push(RANKS[b"a"]) == "a"


@pytest.mark.parametrize("id", [-1, NANO.size, 10**12])
def test_no_such_id(id):
    for use in (NANO.token_bytes, NANO.decoder().push, lambda id: NANO.decode([0, id])):
        with pytest.raises(ValueError, match=str(id)):
            use(id)


# ------------------------------------------------------------------ files
def copy_nano(folder: Path) -> Path:
    for name in ("tiktoken.model", "tokenizer_config.json", "config.json", "generation_config.json"):
        shutil.copy(NANO_FOLDER / name, folder / name)
    return folder


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | values), encoding="utf-8")


def test_special_tokens_come_from_the_files(tmp_path):
    assert NANO.size == 4096
    assert sorted(NANO.special.values()) == list(range(3968, 4096))
    assert NANO.special["<|close|>"] == 3972
    assert NANO.special["<|reserved_token_3976|>"] == 3976
    table = {"3968": {"content": "<|im_end|>"}, "3970": {"content": "[EOT]"}}
    change(copy_nano(tmp_path) / "tokenizer_config.json", added_tokens_decoder=table)
    other = Tokenizer.open(tmp_path, 3972)
    assert other.size == 3972
    assert other.special == {
        "<|im_end|>": 3968, "<|reserved_token_3969|>": 3969, "[EOT]": 3970, "<|reserved_token_3971|>": 3971,
    }  # fmt: skip
    assert other.encode("[EOS]<|im_end|>", special=True)[-1] == 3968
    assert {3968, 3970} <= other.stop_ids


def test_size_without_a_model(tmp_path):
    (copy_nano(tmp_path) / "config.json").unlink()
    (tmp_path / "generation_config.json").unlink()
    assert Tokenizer.open(tmp_path).size == 4096  # the highest named id and below
    assert Tokenizer.open(tmp_path, 5000).size == 5000
    with pytest.raises(TokenizerError, match=r"4095.*4000"):
        Tokenizer.open(tmp_path, 4000)


def test_blank_lines_and_windows_line_ends(tmp_path):
    model = copy_nano(tmp_path) / "tiktoken.model"
    model.write_bytes(model.read_bytes().replace(b"\n", b"\r\n") + b"\r\n")
    assert Tokenizer.open(tmp_path).encode("Hello, world") == NANO.encode("Hello, world")


def test_folder_with_an_unusual_name(tmp_path):
    folder = tmp_path / "mödel 漢 🎉 'x'"
    folder.mkdir()
    assert Tokenizer.open(copy_nano(folder)).encode("é") == NANO.encode("é")


@pytest.mark.parametrize(
    "gone", [["tiktoken.model"], ["tokenizer_config.json"], ["tiktoken.model", "tokenizer_config.json"]]
)
def test_missing_files_are_named(tmp_path, gone):
    copy_nano(tmp_path)
    for name in gone:
        (tmp_path / name).unlink()
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.open(tmp_path)
    assert all(f"no {name}" in caught.value.message for name in gone)
    assert str(tmp_path) in caught.value.message
    assert "token ids work without" in caught.value.message


def ranks_with(line: int, text: bytes | None) -> bytes:
    lines = (NANO_FOLDER / "tiktoken.model").read_bytes().splitlines()
    lines[line - 1 : line] = [] if text is None else [text]
    return b"\n".join(lines) + b"\n"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (ranks_with(300, b"YWI= 299 1"), "line 300"),
        (ranks_with(300, b"YWI="), "line 300"),
        (ranks_with(300, b"YW?I= 299"), "line 300"),
        (ranks_with(300, b"YWI 299"), "line 300"),
        (ranks_with(300, b"YWI= x"), "line 300"),
        (ranks_with(300, b"\xff\xfe 299"), "line 300"),
        (ranks_with(300, b"AA== 299"), "line 300 repeats a token"),
        (ranks_with(300, b"//////8= 5"), "repeats rank 5 of line 6"),
        (ranks_with(300, b"//////8= -7"), "line 300 has rank -7"),
        (ranks_with(300, None), "rank 3967"),
        (ranks_with(300, b"//////8= 99999"), "line 300 has rank 99999"),
        (ranks_with(66, b"//////8= 65"), "0x41"),
        (b"", "256 of the 256"),
        (b"version https://git-lfs.github.com/spec/v1\n", "line 1"),
    ],
)  # fmt: skip
def test_damaged_ranks(tmp_path, content, said):
    (copy_nano(tmp_path) / "tiktoken.model").write_bytes(content)
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.open(tmp_path)
    assert str(tmp_path / "tiktoken.model") in caught.value.message
    assert said in caught.value.message


@given(st.binary(max_size=40), st.integers(0, 40_000))
def test_any_damage_to_the_ranks_is_our_error_or_none(tmp_path_factory, data, at):
    folder = copy_nano(tmp_path_factory.mktemp("damaged"))
    whole = (folder / "tiktoken.model").read_bytes()
    (folder / "tiktoken.model").write_bytes(whole[:at] + data + whole[at + len(data) :])
    try:
        tokenizer = Tokenizer.open(folder)
    except TokenizerError as error:
        named = "tiktoken.model" in error.message
        assert named
    else:
        assert tokenizer.decode(tokenizer.encode("Hello é")) == "Hello é"


@pytest.mark.parametrize("name", ["tokenizer_config.json", "config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000])
def test_damaged_json_names_itself(tmp_path, name, content):
    (copy_nano(tmp_path) / name).write_bytes(content)
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.open(tmp_path)
    assert str(tmp_path / name) in caught.value.message


@pytest.mark.parametrize(
    "values",
    [
        {"added_tokens_decoder": None},
        {"added_tokens_decoder": {"x": {"content": "[A]"}}},
        {"added_tokens_decoder": {"4000": {}}},
        {"added_tokens_decoder": {"4000": "[A]"}},
        {"added_tokens_decoder": {"12": {"content": "[A]"}}},
        {"added_tokens_decoder": {"4000": {"content": "[A]"}, "4001": {"content": "[A]"}}},
    ],
)
def test_damaged_special_tokens(tmp_path, values):
    change(copy_nano(tmp_path) / "tokenizer_config.json", **values)
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
        Tokenizer.open(tmp_path)


# ------------------------------------------------------------------ stop ids
def test_nano_stops():
    assert NANO.stop_ids == {NANO.special[name] for name in ("<|end_of_msg|>", "[EOS]", "[EOT]")}


def test_stop_ids_are_the_union_of_all_files(tmp_path):
    copy_nano(tmp_path)
    change(tmp_path / "generation_config.json", eos_token_id=[4000, 4001])
    change(tmp_path / "config.json", eos_token_id=4002, text_config={"vocab_size": 4096, "eos_token_id": [4003]})
    change(tmp_path / "tokenizer_config.json", eos_token={"content": "[PAD]"})
    assert eos_ids(tmp_path) == {4000, 4001, 4002, 4003}
    assert Tokenizer.open(tmp_path).stop_ids == {4000, 4001, 4002, 4003, 4095} | NANO.stop_ids
    change(tmp_path / "tokenizer_config.json", eos_token="[UNK]")
    assert 4094 in Tokenizer.open(tmp_path).stop_ids


def test_end_ids_need_no_files_at_all(tmp_path):
    assert eos_ids(tmp_path) == frozenset()
    change(copy_nano(tmp_path) / "config.json", eos_token_id=None)
    assert eos_ids(tmp_path) == {3970}


@pytest.mark.parametrize("value", ["3970", -1, True, 1.0, [3970, None], {"id": 1}])
def test_end_id_that_is_none(tmp_path, value):
    change(copy_nano(tmp_path) / "generation_config.json", eos_token_id=value)
    with pytest.raises(TokenizerError, match=r"eos_token_id in .*generation_config\.json"):
        Tokenizer.open(tmp_path)
