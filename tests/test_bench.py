"""What ``deltafin bench`` counts and prints. How fast anything is decides nothing here."""

import csv
import json
from dataclasses import replace
from types import SimpleNamespace

import checkpoints
import pytest
import torch
from click.testing import CliRunner
from conftest import DATA
from hypothesis import given
from hypothesis import strategies as st

import deltafin
from deltafin import bench, measure, ops
from deltafin.cli import main
from deltafin.config import MoE, SiLU
from deltafin.errors import UsageError

NANO_CASES = [case for case in bench.cases() if case.shape.startswith("Nano") and "32768" not in case.shape]
LIMITS = (10.0, 20.0)


@pytest.fixture
def quick(monkeypatch):
    """Every measurement is a single call, and the memory's speed is known."""
    monkeypatch.setattr(bench, "SECONDS", 0.0)
    monkeypatch.setattr(bench, "CALLS", 0.0)
    monkeypatch.setattr(bench, "ARENA", 4 << 20)
    monkeypatch.setattr(bench, "bandwidth", lambda threads, warm=0.0: LIMITS)


def invoke(*arguments):
    return CliRunner().invoke(main, ["bench", *map(str, arguments)])


# Bytes


def by_hand(context):
    """The bytes of a token of ``checkpoints.BASE``, from its numbers."""
    bf16, f32, d = 2, 4, 32
    kda = bf16 * (3 * 12 * d + 6 * d + 12 * 6 + 2 * d + 12 * d + d * 12) + f32 * (3 * 12 * 4 + 2 + 12 + 6)
    state = 2 * f32 * (2 * 6 * 6 + 3 * 3 * 12)
    mla = bf16 * (10 * d + 10 + 3 * 14 * 10 + 18 * d + 12 + 3 * 15 * 12 + 21 * d + d * 21)
    cache = f32 * context * (12 + 6)
    dense = bf16 * 3 * 40 * d
    expert = 3 * (32 * 64 // 2 + 32 * 64 // 32)
    moe = bf16 * (5 * d + 2 * 64 * d + 64 + 3 * 64 * d) + f32 * 5 + 2 * expert
    norms = 2 * bf16 * d + 2 * f32 * d
    edges = bf16 * (d + d + 50 * d) + f32 * d
    return edges + 4 * norms + 3 * (kda + state) + mla + cache + dense + 3 * moe


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    c = checkpoints.config()
    return deltafin.load(checkpoints.write(tmp_path_factory.mktemp("model"), c, checkpoints.tensors(c)))


@pytest.mark.parametrize("context", [0, 1, 1000])
def test_bytes_of_a_token_are_those_counted_by_hand(small, context):
    assert bench.bytes_per_token(small.decoder, context) == by_hand(context)


def test_a_wider_stream_moves_more_state_and_cache_but_no_more_weights(small):
    more = bench.bytes_per_token(small.in_dtype(torch.float64), 100) - bench.bytes_per_token(small.decoder, 100)
    assert more == 3 * 2 * 4 * (2 * 6 * 6 + 3 * 3 * 12) + 4 * 100 * (12 + 6)


def test_every_expert_chosen_counts(small):
    def chosen(count):
        blocks = tuple(
            replace(b, layer=replace(b.layer, ffn=replace(b.layer.ffn, chosen=count)))
            if isinstance(b.layer.ffn, MoE)
            else b
            for b in small.decoder.blocks
        )
        return bench.bytes_per_token(replace(small.decoder, blocks=blocks), 0)

    assert chosen(5) - chosen(2) == 3 * 3 * 3 * (32 * 64 // 2 + 32 * 64 // 32)


# A model


def test_measuring_changes_no_state(tiny):
    state = tiny.decoder.empty_state()
    bench._read(tiny.decoder, state, 30)
    before = [{name: t.clone() for name, t in s.tensors().items()} for s in state]
    bench._decoding(tiny.decoder, state, 0.0)
    bench._reading(tiny.decoder, state, 300, 0.0)  # more than the caches have room for
    for s, kept in zip(state, before, strict=True):
        assert all(torch.equal(t, kept[name]) for name, t in s.tensors().items())


def test_a_report_is_consistent(quick, tiny):
    report = bench.measure(tiny, [20, 0, 20])
    assert (report.model, report.read_gbs) == ("kimi-k3-tiny", LIMITS[0])
    assert report.backend == tiny.decoder.blocks[0].ops.name
    assert report.threads == torch.get_num_threads()
    assert [row.context for row in report.rows] == [0, 20]
    assert [row.prefill_tok_s is None for row in report.rows] == [True, False]
    for row in report.rows:
        assert row.bytes_per_token == bench.bytes_per_token(tiny.decoder, row.context)
        assert row.gbs == pytest.approx(row.bytes_per_token * row.decode_tok_s / 1e9)
        assert row.share == pytest.approx(row.gbs / report.read_gbs)
        assert row.share == pytest.approx(row.decode_tok_s / row.predicted_tok_s)


@pytest.mark.parametrize(
    ("own", "speed", "asked", "measured"),
    [
        (None, 1e6, None, [128, 1024, 4096]),
        (1024, 1e6, None, [128, 1024]),
        (100, 1e6, None, [0]),
        (None, 1.0, None, [128]),  # 1024 tokens at one a second are too long to wait
        (100, 1.0, [4096, 128], [128, 4096]),
    ],
)
def test_contexts_are_those_asked_for_or_what_fits(monkeypatch, quick, tiny, own, speed, asked, measured):
    row = bench.Speed(0, speed, 1.0, 1, 1.0, 1.0, 1.0)
    monkeypatch.setattr(bench, "_at", lambda decoder, context, prediction: replace(row, context=context))
    monkeypatch.setattr(bench, "parts", lambda decoder, context: [])
    decoder = replace(tiny.decoder, config=replace(tiny.config, context=own))
    report = bench.measure(SimpleNamespace(name="toy", decoder=decoder, placed=None), asked)
    assert [row.context for row in report.rows] == measured


def test_the_median_is_of_three_calls_at_least(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(bench.time, "perf_counter", lambda: float(next(clock)))
    answers = iter([0.1, 0.5, 0.2, 9.0])
    assert measure.median(lambda: next(answers), 0.3) == 0.2
    assert measure.median(lambda: next(answers), 0.3) == 9.0  # longer than all the time there is: once


# Operations


@given(st.lists(st.integers(1, 1000), min_size=20, max_size=80))
def test_memory_is_met_again_only_after_all_the_rest(sizes):
    room, largest = 8192, 1000
    ring, taken = bench._Ring(torch.empty(room, dtype=torch.uint8)), []
    for size in sizes:
        part = ring.take(size)
        assert len(part) == size
        assert part.storage_offset() % 64 == 0
        taken.append((part.storage_offset(), size))
    for i, (start, size) in enumerate(taken):
        since = 0  # bytes taken since, up to the piece that shares memory with this one
        for earlier, length in reversed(taken[:i]):
            since += -(-length // 64) * 64
            if earlier < start + size and start < earlier + length:
                assert since >= room - 2 * largest
                break


def test_an_arena_has_sound_values():
    arena = bench.Arena(8 << 20)
    for form in bench.FORMS:
        weight = arena.weight(form, 512, 1024)
        assert tuple(weight.shape) == (512, 1024)
        values = weight.float() if form == "bf16" else weight.unpack(torch.float32)
        assert torch.isfinite(values).all()
        assert len(values.sum(1).unique()) > 100
    assert torch.isfinite(arena.tensor(1 << 20)).all()


@pytest.mark.parametrize("case", NANO_CASES, ids=lambda case: case.kernel)
def test_calls_go_once_round_the_arena_and_work(case):
    arena = bench.Arena(4 << 20)
    noise = arena._noise.memory.clone()
    calls = case.calls(arena)
    moved = sum(call.moved for call in calls)
    assert arena.room <= moved < arena.room + 2 * calls[-1].moved
    for call in calls[:2]:
        y = getattr(ops.REFERENCE, case.kernel)(*call.arguments)
        assert all(torch.isfinite(t).all() for t in (y if isinstance(y, tuple) else (y,)))
    assert torch.equal(arena._noise.memory, noise)


def test_all_that_moves_many_bytes_is_measured():
    assert {case.kernel for case in bench.cases()} == set(ops.ROWS) - {"rms_norm", "route", "mix_depth"}
    keys = [(c.kernel, c.shape, c.weights, c.rows) for c in bench.cases()]
    assert len(set(keys)) == len(keys)


def test_bytes_of_experts_are_those_that_some_row_chose():
    case = bench._experts("toy", MoE(8, 3, 32, 0, SiLU()), 64, "bf16", 4)
    call = case.call(bench.Arena(4 << 20))
    _, ids, _, expert, _ = call.arguments
    chosen = ids.unique().tolist()
    assert call.moved == len(chosen) * 3 * 32 * 64 * 2
    for x in chosen:
        assert [tuple(m.shape) for m in expert(x)] == [(32, 64), (32, 64), (64, 32)]


def test_a_delta_rule_moves_its_state_twice():
    case = next(c for c in NANO_CASES if c.kernel == "delta_net")
    weights = 4 * (3 * 256 * 4 + 4 + 256 + 64)
    assert case.call(bench.Arena(4 << 20)).moved == weights + 2 * 4 * (4 * 64 * 64 + 3 * 3 * 256)


def test_kernels_are_held_against_the_right_limit(monkeypatch, quick):
    monkeypatch.setattr(bench, "cases", lambda: iter(NANO_CASES))
    measured = iter([(LIMITS[0], 5.0), (5.0, LIMITS[1])])  # of two measurements, the higher counts
    monkeypatch.setattr(bench, "bandwidth", lambda threads, warm=0.0: next(measured))
    told = []
    rows = bench.kernels(ops.REFERENCE, 1, told.append)
    assert [(r.kernel, r.shape, r.weights, r.rows) for r in rows] == [
        (c.kernel, c.shape, c.weights, c.rows) for c in NANO_CASES
    ]
    for row in rows:
        assert row.limit_gbs == LIMITS[row.kernel == "delta_net"]
        assert row.share == pytest.approx(row.gbs / row.limit_gbs)
    assert len(told) == 2 + len(rows)


def test_too_little_memory_is_said(monkeypatch):
    monkeypatch.setattr(bench, "room", lambda: bench.ARENA // 2)
    with pytest.raises(UsageError, match=f"{4 * bench.ARENA >> 20} MiB"):
        bench.kernels(ops.REFERENCE, 1)


def test_room_is_bounded():
    assert 1 << 20 <= bench.room() <= bench.ARENA
    assert bench.room() % (1 << 20) == 0


# The memory


def test_numba_leaves_the_threads_of_torch_alone(monkeypatch):
    def careless(threads, size, seconds, warm):
        torch.set_num_threads(threads + 1)
        return LIMITS

    monkeypatch.setattr(measure.importlib, "import_module", lambda name: SimpleNamespace(measure=careless))
    before = torch.get_num_threads()
    try:
        assert bench.bandwidth(before) == LIMITS
        assert torch.get_num_threads() == before
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_loops_touch_every_value_once(threads):
    from deltafin.cpu_kernels import bandwidth

    values = torch.arange(600, dtype=torch.float32).numpy()
    assert bandwidth.read.py_func(values, threads) == values.sum()
    expected = values * values.dtype.type(0.999)
    bandwidth.scale.py_func(values, threads)
    assert (values == expected).all()


@pytest.mark.slow
def test_the_memory_is_measured():
    before = torch.get_num_threads()
    assert all(0 < gbs < 1e5 for gbs in bench.bandwidth(1))
    assert torch.get_num_threads() == before


# The command

TOP = ["model", "backend", "threads", "read_gbs", "rows", "place", "gpu_gbs", "parts", "elsewhere"]
PART = ["part", "milliseconds", "bytes", "gbs"]
SPEED = ["context", "prefill_tok_s", "decode_tok_s", "bytes_per_token", "gbs", "share", "predicted_tok_s"]
KERNEL = ["kernel", "shape", "weights", "rows", "gbs", "limit_gbs", "share"]


def test_json_of_a_model(quick):
    result = invoke(DATA / "kimi-k3-tiny", "--contexts", "0,20", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert list(report) == TOP
    assert [list(row) for row in report["rows"]] == [SPEED] * 2
    assert [row["prefill_tok_s"] is None for row in report["rows"]] == [True, False]
    assert [list(part) for part in report["parts"]] == [PART] * 4
    assert sum(part["bytes"] for part in report["parts"]) == report["rows"][-1]["bytes_per_token"]


def test_csv_and_table_of_a_model(quick):
    result = invoke(DATA / "kimi-k3-tiny", "--contexts", "0,20", "--csv")
    rows = list(csv.DictReader(result.stdout.splitlines()))
    assert [list(row) for row in rows] == [SPEED] * 2
    assert [row["context"] for row in rows] == ["0", "20"]
    assert rows[0]["prefill_tok_s"] == ""
    table = invoke(DATA / "kimi-k3-tiny", "--contexts", "0,20").stdout
    assert table.startswith("kimi-k3-tiny, ")
    assert "memory 10.0 GB/s" in table
    assert "█" * 40 in table


def test_kernels_in_every_form(monkeypatch, quick):
    monkeypatch.setattr(bench, "cases", lambda: iter(NANO_CASES))
    records = json.loads(invoke("--kernels", "--json").stdout)
    assert [list(record) for record in records] == [KERNEL] * len(NANO_CASES)
    rows = list(csv.DictReader(invoke("--kernels", "--csv").stdout.splitlines()))
    assert [row["shape"] for row in rows] == [record["shape"] for record in records]
    assert [line.split()[0] for line in invoke("--kernels").stdout.splitlines()[1:]] == [r["kernel"] for r in records]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--contexts", "many"),
        ("--contexts", "10,-1"),
        ("--contexts", ""),
        ("--json", "--csv"),
        ("--kernels", "--contexts", "10"),
    ],
)
def test_wrong_usage(arguments):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert "Error: " in result.output
