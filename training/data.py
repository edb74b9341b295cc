"""Documents, drawn from the corpus, rendered in the package's chat format and packed into rows.

    python -m training.data --corpus DIR --out DIR --stage short --tokens 3e8 --jobs 16

Rows are uint16 arrays [rows, length]: the low 12 bits are the token, bit 14 marks a document's first token, bit 15
a token to be learnt in the chat stage (an assistant's words, and prose). Shards appear under their final name only
when complete, so that training can start on the first while the rest are being written.
"""

import argparse
import importlib.util
import json
import lzma
import os
import random
import re
import time
from functools import lru_cache
from itertools import pairwise
from multiprocessing import Process
from pathlib import Path

import numpy as np

from deltafin.chat import Special, chat_format
from deltafin.tokenizer import Tokenizer

FIRST, LEARN, TOKEN = 1 << 14, 1 << 15, (1 << 12) - 1
VOCABULARY = Path(__file__).resolve().parents[1] / "deltafin" / "nano"
NATURAL_KINDS = ("book", "story_qa", "barista")  # kinds in heldout.txt

# Row length; share of tokens by source; weights of synthetic tasks against the generator's own; sizes in characters
# for the two search tasks (its own if absent); whether user turns are roughened; how often strongly (``roughen``);
# how often a chat about who is where goes on to ask about all the others (``ask_all``).
STAGES = {
    "short": {
        "length": 1024,
        "share": {"synthetic": 0.76, "copy": 0.08, "books": 0.11, "fairytales": 0.04, "talk": 0.01},
    },
    "long": {
        "length": 4096,
        "share": {"synthetic": 0.79, "copy": 0.03, "books": 0.15, "fairytales": 0.03},
        "tasks": {"needle": 4, "passkey": 4, "list": 4, "session": 4, "track": 2, "storyqa": 2},
    },
    "longest": {
        "length": 16384,
        "share": {"synthetic": 0.80, "books": 0.20},
        "tasks": {"needle": 12, "passkey": 12, "list": 4, "session": 4},
        "sizes": [1500, 5000, 10000, 16000, 24000, 32000, 40000, 48000],
    },
    "chat": {
        "length": 8192,
        "share": {"synthetic": 0.86, "books": 0.10, "fairytales": 0.02, "talk": 0.02},
        "tasks": {"story_text": 0, "define": 0.5, "world": 1.5, "school": 1.5, "maths": 2, "ops": 2.5, "track": 4}
        | {"list": 3, "storyqa": 1.5, "needle": 2, "passkey": 2, "tool": 2, "fallback": 2},
        "sizes": [500, 1500, 3000, 6000, 10000, 14000, 20000, 26000],
        "noise": True,
    },
    # After all others, for what was weakest: who is where, lists of words, and openings as people type them.
    "polish": {
        "length": 8192,
        "share": {"synthetic": 0.87, "copy": 0.02, "books": 0.08, "fairytales": 0.01, "talk": 0.02},
        "tasks": {"story_text": 0, "define": 0.5, "world": 1.5, "school": 1.5, "maths": 2, "ops": 3.5, "track": 20}
        | {"talk": 2, "list": 3, "storyqa": 1.5, "needle": 2, "passkey": 2, "tool": 2, "fallback": 3},
        "sizes": [500, 1500, 3000, 6000, 10000, 14000, 20000, 26000],
        "noise": True,
        "rough": 0.35,
        "ask_all": 0.8,
    },
    # The first stage without the copying of random words, for comparison.
    "nocopy": {"length": 1024, "share": {"synthetic": 0.84, "books": 0.11, "fairytales": 0.04, "talk": 0.01}},
}


# Tasks whose user turns may be strongly roughened, and which words may be misspelt: not those that are the matter.
ANY, NONE = re.compile("[a-z]{4,}"), re.compile("(?!)")
ROUGH = {"talk": ANY, "school": ANY, "fallback": ANY, "world": NONE, "ops": NONE, "maths": NONE}
ROUGH["story"] = re.compile("story|tell|about|short|please|write|make|something|could|would|with")
CLIPPED = {"you": "u", "are": "r", "your": "ur", "please": "pls", "thanks": "thx", "okay": "k", "hello": "helo"}
CLIPPED |= {"what is": "whats", "who is": "whos", "i am": "im", "do not": "dont", "tell me": "tel me", "and": "n"}


def misspell(word: str, rng: random.Random) -> str:
    """A word with one slip of the fingers: a letter left out, doubled, or swapped with the next."""
    i = rng.randrange(len(word) - 1)
    return word[:i] + rng.choice([word[i + 1 :], word[i] + word[i:], word[i + 1] + word[i] + word[i + 2 :]])


def roughen(text: str, rng: random.Random, misspelt: re.Pattern = ANY) -> str:
    """A short user turn as typed in haste: no capitals, no full stop, no commas, words clipped or misspelt."""
    text = text.lower() if rng.random() < 0.8 else text
    text = text.rstrip(".?!") if rng.random() < 0.7 else text
    text = text.replace(", ", " ") if rng.random() < 0.3 else text
    if misspelt is NONE:
        return text or "?"
    for whole, clipped in CLIPPED.items():
        if rng.random() < 0.4:
            text = re.sub(rf"\b{whole}\b", clipped, text)
    words = text.split(" ")
    plain = [i for i, w in enumerate(words) if misspelt.fullmatch(w)]
    for i in rng.sample(plain, min(len(plain), rng.choice([0, 0, 1, 1, 2]))):
        words[i] = misspell(words[i], rng)
    return " ".join(words) or "?"


def ask_all(messages: list[dict], rng: random.Random) -> list[dict]:
    """A chat about who is where and who has what that goes on to ask about everyone and everything else in it."""
    text, asked = re.fullmatch(r"(.*\.) ((?:Where is|Who has) .*\?)", messages[-2]["content"]).groups()
    lines, at, has = re.split(r"(?<=\.) ", text), {}, {}
    for line in lines:
        who, what, whom = re.fullmatch(r"(\w+) .* the (\w+)(?: to (\w+))?\.", line).groups()
        if " to the " in line:
            at[who] = what
        else:
            has[what] = whom or who
    answers = [(f"Where is {x}?", x, at[x], f"{x} is at the {at[x]}.") for x in at]
    answers += [(f"Who has the {x}?", x, has[x], f"{has[x]} has the {x}.") for x in has]
    more = []
    for question, x, found, answer in rng.sample(answers, len(answers)):
        reply = {"role": "assistant", "content": answer}
        if "reasoning" in messages[-1]:
            reply["reasoning"] = " ".join(line for line in lines if x in line) + f" So the answer is {found}."
        if question != asked:
            more += [{"role": "user", "content": question}, reply]
    return [*messages, *more]


class Encoder:
    """Texts and chats as arrays of tokens with their marks."""

    def __init__(self, folder: Path | str = VOCABULARY) -> None:
        self.tokenizer = Tokenizer.open(folder)
        if self.tokenizer.size > TOKEN + 1:
            raise ValueError(f"{self.tokenizer.size} ids do not fit in 12 bits")
        self.format = chat_format(self.tokenizer)
        self.end = self.tokenizer.special["[EOS]"]
        self.pad = self.tokenizer.special["[PAD]"]
        self.short = lru_cache(50_000)(self.tokenizer.encode)

    def text(self, text: str) -> list[int]:
        """Ids of a text."""
        return self.short(text) if len(text) <= 24 else self.tokenizer.encode(text)

    def prose(self, ids: list[int], learn: bool = True) -> np.ndarray:
        """A document of plain text."""
        tokens = np.array(ids, np.uint16)
        if learn:
            tokens |= LEARN
        tokens[0] |= FIRST
        return tokens

    def chat(self, messages: list[dict], tools: list | None, thinking: bool, effort: str | None) -> np.ndarray:
        """A conversation. Learnt is what an assistant has to say: all after the tags that a prompt ends with."""
        options = {"thinking": thinking, "effort": effort, "generate": False}
        segments = self.format.render(messages, tools=tools, **options)
        tokens, learn_from, mark = [], None, 0
        for at, segment in enumerate(segments):
            if not isinstance(segment, Special):
                tokens += [i | mark for i in self.text(segment)]
                continue
            if segment.name == "<|open|>" and segments[at + 1] == "message":
                tag = segments[at : segments.index(Special("<|sep|>"), at)]
                learn_from = at + len(tag) + 3 if "assistant" in tag else None  # the next tag is open, name, sep
            tokens.append(self.tokenizer.special[segment.name] | mark)
            if learn_from is not None and at >= learn_from:
                mark = LEARN
            if segment.name == "<|end_of_msg|>":
                mark, learn_from = 0, None
        tokens[0] |= FIRST
        return np.array(tokens, np.uint16)


def load_generator(corpus: Path | str):
    """The corpus's generator as a module."""
    spec = importlib.util.spec_from_file_location("generate", Path(corpus) / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_rows(corpus: Path | str, name: str) -> list[dict]:
    """The rows of one packed text file."""
    with lzma.open(Path(corpus) / f"{name}.jsonl.xz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


class Source:
    """Documents of one worker, drawn so that the token shares come out right."""

    def __init__(self, stage, encoder, rng, generator, natural, part=0, parts=1):
        self.stage, self.encoder, self.rng, self.generator = STAGES[stage], encoder, rng, generator
        self.length = self.stage["length"]
        self.glosses, self.fill = natural["glosses"], natural["fill"]
        changed = self.stage.get("tasks", {})
        self.tasks = {k: w * changed.get(k, 1) for k, w in generator.MIXT.items() if changed.get(k, 1)}
        self.got_task = dict.fromkeys(self.tasks, 0.0)
        self.got = dict.fromkeys(self.stage["share"], 0.0)
        self.pools = {k: natural[k][part::parts] for k in self.stage["share"] if k in natural}
        self.queues = {k: [] for k in self.pools}
        tokens = map(encoder.tokenizer.token_bytes, range(encoder.tokenizer.size))
        self.words = [t.decode() for t in tokens if re.fullmatch(rb" [A-Za-z]{2,}", t)]
        self.thinking = False
        plain_math = generator.t_math  # sums carry reasoning exactly when the chat has thinking on
        generator.t_math = lambda r, think=None: plain_math(r, self.thinking if think is None else think)

    def chat(self, document):
        """Thinking on or off for a whole chat; where a task can reason, on means that it does."""
        effort = self.rng.choice(["max", "max", "high", "low"]) if self.rng.random() < 0.5 else None
        return self.encoder.chat(document["messages"], document.get("tools"), self.thinking, effort)

    def copy(self):
        """Random words to be said again: nothing but the context helps."""
        words = "".join(self.rng.choices(self.words, k=self.rng.randint(4, 60))).strip()
        self.thinking = False
        user, reply = {"role": "user", "content": f"Repeat: {words}"}, {"role": "assistant", "content": words}
        return self.chat({"messages": [user, reply]})

    def synthetic(self, task=None):
        """A document of a task, or of the one that is furthest behind its share."""
        rng, chosen = self.rng, task
        while True:
            if chosen is None:
                some = rng.sample(list(self.tasks), min(4, len(self.tasks)))
                task = min(some, key=lambda k: self.got_task[k] / self.tasks[k])
            self.thinking = rng.random() < 0.5
            if task in ("needle", "passkey") and "sizes" in self.stage:
                make = self.generator.t_needle if task == "needle" else self.generator.t_passkey
                messages = make(rng, self.fill, rng.choice(self.stage["sizes"]))[0]
                document = {"kind": "chat", "task": task, "messages": messages}
            else:
                document = self.generator.make(task, rng, self.glosses, self.fill)
            if task == "track" and self.thinking != any("reasoning" in m for m in document["messages"]):
                continue
            if task == "track" and rng.random() < self.stage.get("ask_all", 0):
                document["messages"] = ask_all(document["messages"], rng)
            if self.stage.get("noise"):
                document = self.generator.noisy(document, rng)
            if document["kind"] == "chat" and task in ROUGH and rng.random() < self.stage.get("rough", 0):
                for message in document["messages"]:
                    if message["role"] == "user" and len(message["content"]) < 90:
                        message["content"] = roughen(message["content"], rng, ROUGH[task])
            if document["kind"] == "text":
                tokens = self.encoder.prose([*self.encoder.text(document["text"]), self.encoder.end])
            else:
                tokens = self.chat(document)
            if len(tokens) <= self.length:
                self.got_task[task] += len(tokens)
                return tokens

    def refill(self, kind):
        """One pass over this worker's part of a natural source, cut to row length at a random phase."""
        length, out = self.length, []
        for document in self.pools[kind]:
            if document["kind"] == "chat":
                self.thinking = self.rng.random() < 0.5
                tokens = self.chat(document)
                if len(tokens) <= length:
                    out.append(tokens)
            else:
                ids = document["ids"]
                at = self.rng.randrange(min(length, len(ids)))
                cuts = [0, *range(at, len(ids), length), len(ids)]
                pieces = (ids[a:b] for a, b in pairwise(cuts))
                out += [self.encoder.prose(piece) for piece in pieces if len(piece) > 32]
        self.rng.shuffle(out)
        self.queues[kind] = out

    def next(self):
        """The next document, of the kind that is furthest behind its share."""
        kind = min(self.got, key=lambda k: self.got[k] / self.stage["share"][k])
        if kind in self.pools:
            if not self.queues[kind]:
                self.refill(kind)
            tokens = self.queues[kind].pop()
        else:
            tokens = self.copy() if kind == "copy" else self.synthetic()
        self.got[kind] += len(tokens)
        return tokens


class Packer:
    """Best fit: each document goes to the open row with the least room that holds it."""

    def __init__(self, length: int, pad: int, width: int = 96) -> None:
        self.length, self.pad, self.width, self.rows, self.full = length, pad, width, [], []

    def add(self, document: np.ndarray) -> None:
        """Place a document of at most ``length`` tokens."""
        fits = [row for row in self.rows if row[0] + len(document) <= self.length]
        if fits:
            row = max(fits, key=lambda r: r[0])
        else:
            if len(self.rows) >= self.width:
                self.close(max(self.rows, key=lambda r: r[0]))
            row = [0, []]
            self.rows.append(row)
        row[0] += len(document)
        row[1].append(document)
        if row[0] > self.length - 12:
            self.close(row)

    def close(self, row: list) -> None:
        """Fill a row up with padding, a document of its own."""
        self.rows = [r for r in self.rows if r is not row]
        padding = np.full(self.length - row[0], self.pad, np.uint16)
        padding[:1] |= FIRST
        self.full.append(np.concatenate([*row[1], padding]))

    def finish(self) -> np.ndarray:
        """All rows, the open ones closed."""
        for row in list(self.rows):
            self.close(row)
        return np.stack(self.full)


def _worker(part, arguments, natural):
    a = arguments
    rng, encoder = random.Random(f"{a.seed}:{a.stage}:{part}"), Encoder(a.vocabulary)
    source = Source(a.stage, encoder, rng, load_generator(a.corpus), natural, part, a.jobs)
    length = source.length
    packer, goal, shard, done = Packer(length, encoder.pad), a.tokens / a.jobs, 0, 0
    per_shard = max(1, int(a.shard // length))
    while done < goal:
        packer.add(source.next())
        if len(packer.full) >= per_shard or (done + len(packer.full) * length >= goal and packer.full):
            rows = np.stack(packer.full)[rng.sample(range(len(packer.full)), len(packer.full))]
            path = Path(a.out) / f"{a.stage}-{shard:04d}-{part:02d}.npy"
            np.save(path.with_suffix(".part.npy"), rows)
            os.replace(path.with_suffix(".part.npy"), path)
            done, shard, packer.full = done + rows.size, shard + 1, []


def read_natural(corpus: Path | str, encoder: Encoder, seed: int, jobs: int = 1, books: int | None = None) -> dict:
    """The corpus's texts and chats by source, shuffled; texts with their ids. ``books`` reads only so many of them."""
    natural = {
        "glosses": read_rows(corpus, "glosses"),
        "books": read_rows(corpus, "books")[:books],
        "fairytales": read_rows(corpus, "fairytaleqa")[:books],
        "talk": read_rows(corpus, "barista") + read_rows(corpus, "smalltalk") * 3,
    }
    natural["fill"] = [book for book in natural["books"] if len(book["text"]) > 3000]
    texts = [d for k in ("books", "fairytales") for d in natural[k] if d["kind"] == "text"]
    for document in texts:
        document["ids"] = [*encoder.tokenizer.encode(document["text"]), encoder.end]
    for kind in ("books", "fairytales", "talk"):
        random.Random(seed).shuffle(natural[kind])
    return natural


def build(arguments: argparse.Namespace) -> None:
    """Write a stage's shards with several processes, and a file that says when all are there."""
    a, begin = arguments, time.time()
    natural = read_natural(a.corpus, Encoder(a.vocabulary), a.seed, a.jobs, getattr(a, "books", None))
    Path(a.out).mkdir(parents=True, exist_ok=True)
    print(f"data {a.stage}: sources ready after {time.time() - begin:.0f} s", flush=True)
    workers = [Process(target=_worker, args=(i, a, natural)) for i in range(a.jobs)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    (Path(a.out) / f"{a.stage}.done").touch()
    print(f"data {a.stage}: all written after {time.time() - begin:.0f} s", flush=True)


def heldout_rows(corpus, encoder, length=1024, each=147, kinds=None, seed=998) -> dict[str, np.ndarray]:
    """Rows by kind: synthetic tasks with a seed of their own, copying of random words, and heldout.txt."""
    rng, documents = random.Random(f"heldout:{seed}"), {}
    natural = {"glosses": read_rows(corpus, "glosses"), "fill": []}
    source = Source("short", encoder, rng, load_generator(corpus), natural)
    for task in [*source.tasks, "copy"]:
        if kinds is None or task in kinds:
            documents[task] = [source.copy() if task == "copy" else source.synthetic(task) for _ in range(each)]
    text = (Path(corpus) / "heldout.txt").read_text(encoding="utf-8")
    for piece in text.split("<<<doc ")[1:]:
        head, _, body = piece.partition("\n")
        kind, body = re.search(r"kind=(\w+)", head)[1], body.strip("\n")
        found = documents.setdefault(kind, [])
        if kind == "book":
            ids = [*encoder.tokenizer.encode(body), encoder.end]
            starts = range(0, len(ids) - 32, length)
            found += [encoder.prose(ids[i : i + length], False) for i in starts]
        else:  # a chat, a line "role: " before each turn
            turns = re.split(r"^(system|user|assistant): ", body, flags=re.M)[1:]
            pairs = zip(turns[::2], turns[1::2], strict=True)
            tokens = encoder.chat([{"role": r, "content": t.strip("\n")} for r, t in pairs], None, False, None)
            if len(tokens) <= length:
                found.append(tokens)
    out = {}
    for kind, some in documents.items():
        if kinds is None or kind in kinds:
            packer = Packer(length, encoder.pad)
            for document in some:
                packer.add(document)
            out[kind] = packer.finish()
    return out


def main() -> None:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    p.add_argument("--corpus", required=True)
    p.add_argument("--out", required=True)
    p.add_argument("--stage", choices=list(STAGES), required=True)
    p.add_argument("--tokens", type=float, required=True)
    p.add_argument("--vocabulary", default=VOCABULARY, help="folder with tiktoken.model and tokenizer_config.json")
    p.add_argument("--jobs", type=int, default=os.cpu_count())
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--shard", type=float, default=4e5, help="tokens a shard")
    build(p.parse_args())


if __name__ == "__main__":
    main()
