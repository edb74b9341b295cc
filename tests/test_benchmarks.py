"""The tools of ``benchmarks/``: checkpoints that deltafin opens, and a comparison that compares."""

import json
import sys
from pathlib import Path

import make_synthetic
import peers
import pytest
import tiers
import torch
from click.testing import CliRunner

import deltafin
from deltafin.convert import convert

# Checkpoints


@pytest.mark.parametrize("experts", ["bf16", "mxfp4"])
@pytest.mark.parametrize("arch", ["kimi-linear", "kimi-k3"])
def test_a_checkpoint_runs(tmp_path, arch, experts):
    options = ["--arch", arch, "--scale", "tiny", "--expert-format", experts, "--out", str(tmp_path)]
    result = CliRunner().invoke(make_synthetic.main, options)
    assert result.exit_code == 0, result.output
    model, synthetic = deltafin.load(tmp_path), make_synthetic.Model(arch, "tiny")
    assert model.info()["parameters"] == synthetic.parameters()[0]
    assert model.config.family == arch.replace("-", "_")
    assert torch.isfinite(model.logits(model.tokenizer.encode("a random model"))).all()
    words = make_synthetic.vocabulary(synthetic.sizes.vocab - len(make_synthetic.SPECIALS))
    assert len(set(words)) == len(words) == synthetic.sizes.vocab - len(make_synthetic.SPECIALS)


def test_a_checkpoint_is_the_same_each_time(tmp_path):
    model = make_synthetic.Model("kimi-k3", "tiny")
    for seed, name in ((1, "a"), (1, "b"), (2, "c")):
        make_synthetic.write_hub(model, tmp_path / name, seed, packed=False)
    a, b, c = ({f.name: f.read_bytes() for f in (tmp_path / name).iterdir()} for name in "abc")
    assert a == b != c


# Comparison


def program(name, prefill, decode, code=0):
    """A program that measures what it is told, as the readers of peers expect it."""
    output = json.dumps({"prefill": prefill, "decode": decode})
    script = f"import sys; print('loading'); print({output!r}); sys.exit({code} and 'no such model')"
    return peers.Program(name, [sys.executable, "-c", script], peers.read_peer)


def test_programs_take_turns_and_a_failing_one_drops_out():
    told = []
    entrants = [program("a", [1, 3, 2], [5]), program("b", [1], [1], code=1), program("c", [4], [8])]
    turns = peers.compete(entrants, 2, told.append)
    assert turns == {"a": [peers.Turn(2, 5)] * 2, "c": [peers.Turn(4, 8)] * 2}
    assert [line.split(":")[0] for line in told] == [
        *("round 1, a", "b failed (1)", "round 1, c"),
        *("round 2, a", "round 2, c"),
    ]
    assert "no such model" in told[1]


def test_ratios_are_between_turns_of_one_round():
    turns = {
        "deltafin": [peers.Turn(100, 10), peers.Turn(10, 1), peers.Turn(100, 10)],
        "other": [peers.Turn(50, 20), peers.Turn(5, 2), peers.Turn(50, 20)],
    }
    _, ours, other = peers.table(turns)
    assert ours.split() == ["deltafin", "10.0", "(1.0-10.0)", "1.00", "100.0", "(10.0-100.0)", "1.00"]
    assert other.split() == ["other", "20.0", "(2.0-20.0)", "0.50", "50.0", "(5.0-50.0)", "2.00"]


def test_llama_bench_is_read():
    entries = [
        {"n_prompt": 512, "n_gen": 0, "samples_ts": [120.0, 90.0, 100.0]},
        {"n_prompt": 0, "n_gen": 64, "samples_ts": [30.0, 33.0, 31.0]},
    ]
    assert peers.read_llama(json.dumps(entries)) == peers.Turn(100.0, 31.0)


def test_deltafin_is_measured_by_its_own_command(tmp_path):
    make_synthetic.write_hub(make_synthetic.Model("kimi-linear", "tiny"), tmp_path, 1, packed=False)
    ours, llama = peers.programs(tmp_path, [tmp_path / "x.gguf"], 1, "llama-bench", {})
    assert ours.command[-6:] == [str(tmp_path), "--json", "--contexts", "0,512", "--threads", "1"]
    assert llama.name == "llama.cpp x"
    names = [p.name for p in peers.programs(tmp_path, [], 1, None, {}, packed=True, bfloat16=True)]
    assert names[::3] == ["deltafin", "deltafin, in bfloat16"]
    rows = [{"context": 0, "decode_tok_s": 7.0, "prefill_tok_s": None}]
    rows += [{"context": 512, "decode_tok_s": 6.0, "prefill_tok_s": 90.0}]
    assert peers.read_deltafin(json.dumps({"rows": rows})) == peers.Turn(90.0, 7.0)


def test_what_is_not_installed_is_left_out():
    assert not peers.has(sys.executable, "no_such_module")
    assert not peers.has("/nowhere/python", "json")
    assert peers.has(sys.executable, "json")


# Tiers


def test_tiers_are_measured(tmp_path):
    convert(Path(__file__).parent / "data" / "kimi-k3-tiny", tmp_path / "store")

    def invoke(*arguments):
        result = CliRunner().invoke(tiers.main, [str(a) for a in arguments])
        assert result.exit_code == 0, result.output
        return result.output

    output = invoke("disk", tmp_path / "store", "--tokens", 2, "--rounds", 1, "--seconds", 0.05)
    assert "of the raw disk" in output
    assert "512 tokens in" in output
    assert json.loads(invoke("memory", tmp_path / "store", "--tokens", 4, "--threads", 1)).keys() == {
        *("mapped_ms", "tiers_ms", "paired"),
    }
