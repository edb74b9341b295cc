"""Reference numbers of an exported model, by the code that trained it: what the tests of the package are held to.

    python -m training.reference deltafin/nano tests/data/nano

Reads ``prompts.jsonl`` and ``heldout.jsonl`` of the second folder; writes ``reference.safetensors`` and
``reference.json`` (logits of three prompts and their greedy continuations) and ``expected.json`` (losses of some
documents, greedy replies to some prompts) into it. Float32 on the CPU, the whole text anew for every token: slow, and
nothing shared with sessions.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from deltafin.chat import chat_format
from deltafin.tokenizer import Tokenizer
from training.model import Layout, load_checkpoint

TEXTS = {
    "chat": ([{"role": "user", "content": "Tell me a story about a fox and a lantern."}], False),
    "thinking": (
        [
            {"role": "system", "content": "You are Nano, a small and friendly helper."},
            {"role": "user", "content": "My name is Ada. I live in Rome."},
            {"role": "assistant", "content": "Hello, Ada!"},
            {"role": "user", "content": "What is 347 + 285?"},
        ],
        True,
    ),
    "text": (
        "Once upon a time, there was a little girl called Alice, who was very fond of cats, of rainy afternoons, and "
        "of asking questions that nobody could answer. One morning she walked down to the harbour.",
        None,
    ),
}
DOCUMENTS = {"book": 2, "story_qa": 5, "barista": 5}
REPLIES = {"math": 8, "passkey-500": 2, "passkey-2000": 1, "needle-500": 2} | dict.fromkeys(
    ("world", "school", "ops", "track", "list", "session", "storyqa"), 2
)
LONGEST = 4000  # characters of a document that are used


class Oracle:
    """The trained model, asked token by token."""

    def __init__(self, folder: str) -> None:
        self.model, self.tokenizer = load_checkpoint(folder), Tokenizer.open(folder)
        self.format = chat_format(self.tokenizer)

    @torch.no_grad()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """Logits after each token, [T, vocabulary]."""
        return self.model.logits(torch.tensor(ids), Layout.one(len(ids)))

    def greedy(self, ids: list[int], limit: int) -> list[int]:
        """The likeliest continuation; ends with a stop token or after ``limit``."""
        said: list[int] = []
        while len(said) < limit and (not said or said[-1] not in self.tokenizer.stop_ids):
            said.append(int(self.logits(ids + said)[-1].argmax()))
        return said

    def prompt(self, messages: list[dict], thinking: bool) -> list[int]:
        """Ids of a chat up to the reply."""
        return self.format.encode(messages, thinking=thinking, effort=None)


def references(oracle: Oracle) -> tuple[dict, dict]:
    """Tensors and descriptions of the three texts."""
    tensors, about = {}, {}
    for name, (text, thinking) in TEXTS.items():
        ids = oracle.tokenizer.encode(text) if isinstance(text, str) else oracle.prompt(text, bool(thinking))
        said = oracle.greedy(ids, 48)
        whole = oracle.logits(ids + said)
        tensors[f"{name}.input_ids"] = torch.tensor(ids, dtype=torch.int32)
        tensors[f"{name}.greedy_ids"] = torch.tensor(said, dtype=torch.int32)
        tensors[f"{name}.prefill_logits"] = whole[: len(ids)].contiguous()
        tensors[f"{name}.decode_logits"] = whole[len(ids) :].contiguous()
        about[name] = {"prompt": text, "thinking": thinking, "prompt_tokens": len(ids)}
        about[name]["greedy_text"] = oracle.tokenizer.decode(said)
    return tensors, about


def losses(oracle: Oracle, lines: list[dict]) -> list[dict]:
    """Nats of some documents, over all tokens but the first, and over what an assistant says."""
    rows, left = [], dict(DOCUMENTS)
    for number, document in enumerate(lines, 1):
        if not left.get(document["kind"]):
            continue
        left[document["kind"]] -= 1
        row: dict = {"line": number}
        if "text" in document:
            row["characters"] = LONGEST
            ids, spoken = oracle.tokenizer.encode(document["text"][:LONGEST]), None
        else:
            ids = oracle.format.encode(document["messages"], thinking=False, effort=None, generate=False)
            spoken = torch.zeros(len(ids), dtype=torch.bool)
            for i, message in enumerate(document["messages"]):
                if message["role"] == "assistant":
                    before = document["messages"][:i]
                    start = len(oracle.prompt(before, False))
                    stop = len(oracle.format.encode([*before, message], thinking=False, effort=None, generate=False))
                    spoken[start:stop] = True
        nats = torch.nn.functional.cross_entropy(
            oracle.logits(ids)[:-1].double(), torch.tensor(ids[1:]), reduction="none"
        )
        row |= {"tokens": len(nats), "nats": round(nats.sum().item(), 4)}
        if spoken is not None:
            own = nats[spoken[1:]]
            row |= {"assistant_tokens": len(own), "assistant_nats": round(own.sum().item(), 4)}
        rows.append(row)
    return rows


def replies(oracle: Oracle, lines: list[dict]) -> list[dict]:
    """Greedy replies to some of the graded prompts."""
    rows, left = [], dict(REPLIES)
    for number, prompt in enumerate(lines, 1):
        if left.get(prompt["task"]):
            left[prompt["task"]] -= 1
            said = oracle.greedy(oracle.prompt(prompt["messages"], False), 64)
            parser = oracle.format.parser(thinking=False)
            text = "".join(piece for token in said for piece in parser.push(token)) + "".join(parser.finish())
            rows.append({"line": number, "task": prompt["task"], "reply": text})
    return rows


def main() -> None:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    p.add_argument("model")
    p.add_argument("folder")
    a = p.parse_args()
    folder, oracle = Path(a.folder), Oracle(a.model)

    def read(name):
        return [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]

    def write(name, what):
        (folder / name).write_text(json.dumps(what, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    tensors, about = references(oracle)
    save_file(tensors, folder / "reference.safetensors")
    write("reference.json", about)
    note = (
        "By the code that trained the model, in float32. Losses are nats over all tokens but the first; replies greedy."
    )
    expected = {"about": note, "sample": losses(oracle, read("heldout.jsonl"))}
    write("expected.json", expected | {"replies": replies(oracle, read("prompts.jsonl"))})


if __name__ == "__main__":
    main()
