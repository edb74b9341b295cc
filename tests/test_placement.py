"""Plans: published sizes come out to the byte, budgets hold, more memory never hurts, and what is planned suffices."""

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import checkpoints
import hub_server
import make_synthetic
import pytest
from click.testing import CliRunner
from conftest import DATA
from hypothesis import assume, given
from hypothesis import strategies as st

import deltafin
from deltafin import bench, demand, families, library, measure
from deltafin.cli import main
from deltafin.convert import convert
from deltafin.errors import UsageError
from deltafin.headers import DTYPES, Entry
from deltafin.layout import Layout
from deltafin.placement import (
    DISK,
    DRIVER,
    GPU,
    PLACES,
    PROCESS,
    RAM,
    TIERS,
    Demand,
    LayerDemand,
    Machine,
    bytes_of,
    context_that_fits,
    least,
    plan,
)
from deltafin.pull import pull
from deltafin.snapshot import Snapshot
from deltafin.store import open_model

HUGE = 1 << 50
KIMI_LINEAR = make_synthetic.Sizes(2304, 27, 32, 9216, 256, 8, 1024, 163840)
KIMI_K3 = make_synthetic.Sizes(7168, 93, 96, 33792, 896, 16, 3072, 163840, 2, 3584, 1536, 12)

# The published models, from headers that are made up but true


def checkpoint(arch, sizes, monkeypatch, experts=None):
    """The config and the header of a checkpoint of real size; of ``experts`` of a layer, if not of all."""
    monkeypatch.setitem(make_synthetic.SIZES, (arch, "real"), replace(sizes, experts=experts or sizes.experts))
    model = make_synthetic.Model(arch, "real")
    raw, header, at = model.config(), {}, 0

    def put(name, dtype, shape):
        nonlocal at
        length = math.prod(shape) * DTYPES[dtype].itemsize
        header[model.root + name] = Entry(0, dtype, shape, at, at + length)
        at += length

    for name, shape, kind, _ in model.items:
        if kind == "expert" and model.k3:
            put(f"{name}_packed", "U8", (shape[0], shape[1] // 2))
            put(f"{name}_scale", "U8", (shape[0], shape[1] // 32))
        elif name.endswith(("block_sparse_moe.gate.weight", "e_score_correction_bias")):
            put(name, "F32" if name.endswith("bias") else "BF16", (sizes.experts, *shape[1:]))
        elif name.endswith("A_log") and model.k3:
            put(name, "F32", (128,))  # padded
        else:
            f32 = kind in ("conv", "decay", "decay bias") or name.endswith("o_norm.weight")
            put(name, "F32" if f32 and model.k3 else "BF16", shape)
    (raw["text_config"] if model.k3 else raw)["num_experts"] = sizes.experts
    return raw, header


@pytest.fixture(scope="module")
def k3():
    """What Kimi K3 asks for. Its layers' experts are alike, so that headers of one of each are enough."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        raw, header = checkpoint("kimi-k3", KIMI_K3, monkeypatch, experts=1)
    shapes = {name: e.shape for name, e in header.items()}
    family = families.family(raw)
    config = family.config(raw, shapes)
    layout = SimpleNamespace(config=config, rules=family.tensors(config, shapes), entries=header)
    layout.experts = {
        i: (replace(config.layers[i].ffn, experts=1), family.expert(config, shapes, i)) for i in range(1, 93)
    }
    layout.names = lambda source: Layout.names(layout, source)
    return lambda **options: demand.of_layout(layout, **options)


@pytest.fixture(scope="module")
def kimi_linear():
    """What Kimi Linear asks for, from all of its headers."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        raw, header = checkpoint("kimi-linear", KIMI_LINEAR, monkeypatch)
    layout = Layout(raw, ["all"], [header], "made up")
    assert len(layout.entries) == 20493
    assert layout.totals["parameters"] == 49_122_681_728
    return lambda **options: demand.of_layout(layout, **options)


PADDING = 69 * 32 * 4
"""Bytes of zeros behind the decays of K3's layers, which are not kept in memory."""


def test_kimi_k3_takes_the_bytes_that_it_has(k3):
    d = k3()
    assert d.weights == 1_559_965_606_912 - PADDING
    assert d.experts == 1_446_456_066_048
    assert d.layers[5].expert == 17_547_264
    assert d.embed == d.head - 43_008 == 2_348_810_240
    assert d.row == 14_336
    assert d.read == 111_160_730_624 - PADDING
    kda, mla, first = 1_267_744_256, 844_335_616, 2_341_213_184
    assert [d.layers[i].weights for i in (4, 3, 0)] == [kda - 128, mla, first - 128]


def test_kimi_k3_moves_the_bytes_of_its_budget(k3):
    d = k3(activation=2)
    windows = 69 * 3 * 3 * 12288
    assert sum(layer.state for layer in d.layers) == 434_110_464 + 2 * windows
    assert sum(layer.state for layer in k3().layers) == 434_110_464 + 69 * 442_368
    assert sum(layer.position for layer in d.layers) == 27_648
    assert sum(layer.chosen * layer.expert for layer in d.layers) == 25_829_572_608
    for context in (0, 1000):
        expected = d.read + 25_829_572_608 + d.row + 868_220_928 + 4 * windows + 27_648 * context
        assert d.bytes_per_token(context) == expected


def test_kimi_k3_in_int8_takes_about_what_was_computed_for_rows_with_short_scales(k3):
    assert k3(resident="int8").read == pytest.approx(56_216_516_800, rel=1e-3)
    assert k3(resident="int8").experts == k3(experts="mxfp4").experts == k3(experts="int8").experts == k3().experts


def test_kimi_k3_does_the_operations_of_its_budget(k3):
    d = k3()
    products = sum(layer.flops for layer in d.layers) + d.head_flops - 0.76e9
    experts = sum(layer.chosen * layer.expert_flops for layer in d.layers)
    assert products == pytest.approx(111.1e9, rel=1e-3)
    assert experts == pytest.approx(97.2e9, rel=1e-3)


@pytest.mark.parametrize(("gbs", "plain", "int8"), [(80, 0.58, 0.98), (300, 2.2, 3.7), (550, 4.0, 6.7)])
def test_kimi_k3_in_memory_has_the_ceilings_of_its_budget(k3, gbs, plain, int8):
    machine = Machine(HUGE, gbs, 1, 1000)
    assert plan(k3(), machine, 1).tokens_per_second == pytest.approx(plain, rel=0.02)
    assert plan(k3(resident="int8"), machine, 1).tokens_per_second == pytest.approx(int8, rel=0.025)


@pytest.mark.parametrize(("gbs", "speed"), [(3, 0.022), (7, 0.051), (14, 0.102)])
def test_kimi_k3_on_a_disk_has_the_ceilings_of_its_budget(k3, gbs, speed):
    d = k3()
    least = PROCESS + d.buffers + sum(d.held(layer, 1) for layer in d.layers)
    p = plan(d, Machine(least, 1e6, gbs, 1000), 1)
    assert p.tokens_per_second == pytest.approx(speed, rel=0.02)
    assert p.bottleneck == DISK
    assert context_that_fits(d, p.machine) == 0


def test_kimi_k3_with_one_large_gpu_waits_for_the_disk(k3):
    d = replace(k3(), copies=1)
    machine = Machine(8 << 30, 1e6, 14, 1000, gpu=141 * 10**9, gpu_gbs=4800, gpu_gflops=1e5, link_gbs=55)
    p = plan(d, machine, 1)
    assert p.gpu_units == 94
    assert p.gpu_slots == 16  # what is left, 26 GB
    assert p.token_seconds[GPU] == pytest.approx(0.0235, rel=0.02)
    assert p.token_seconds[DISK] == pytest.approx(1.84 * p_disk(p), rel=0.01)


def p_disk(p):
    return 1 - p.resident


def test_kimi_linear_takes_the_bytes_that_it_has(kimi_linear):
    d = kimi_linear(activation=2)
    widened = 20 * (2 * (3 * 4096 * 4 + 32 + 4096 + 128)) + 26 * 2 * 256
    assert d.weights == 2 * 49_122_681_728 + widened
    assert d.weights - d.experts == pytest.approx(4.0e9, rel=0.01)
    assert d.layers[1].expert == 2 * 7_077_888
    assert d.read + sum(layer.chosen * layer.expert for layer in d.layers) == pytest.approx(6.21e9, rel=0.002)
    assert 2 * sum(32 * 128 * 128 * 4 for layer in d.layers if layer.state) == pytest.approx(84e6, rel=0.01)
    assert sum(layer.position for layer in d.layers) == 8064
    assert sum(layer.position for layer in d.layers) * 32768 == pytest.approx(264e6, rel=0.01)


@pytest.mark.parametrize(("gbs", "speed"), [(60, 9.5), (120, 19)])
def test_kimi_linear_has_the_ceilings_of_its_budget(kimi_linear, gbs, speed):
    assert plan(kimi_linear(), Machine(HUGE, gbs, 1, 1000), 1).tokens_per_second == pytest.approx(speed, rel=0.02)


def test_packing_is_counted_as_it_is_done(kimi_linear):
    d = kimi_linear(resident="int8", experts="mxfp4")
    assert d.layers[1].expert == 7_077_888 * 17 // 32
    assert d.embed == 2 * 163840 * 2304  # is never packed
    assert d.read == pytest.approx(kimi_linear().read / 2, rel=0.02)


# One count for headers, files and what runs


@pytest.mark.parametrize("name", ["kimi-k3-tiny", "kimi-linear", "nano"])
@pytest.mark.parametrize("packing", [{}, {"resident": "int8", "experts": "int8"}])
def test_headers_files_and_a_running_model_agree(name, packing):
    model = deltafin.load(name if name == "nano" else DATA / name, backend="reference", **packing)
    files = Snapshot(model.path)
    want = demand.of_layout(files.layout, **packing)
    assert demand.of_files(files, **packing) == want
    for context in (0, 100):
        assert want.bytes_per_token(context) == bench.bytes_per_token(model.decoder, context)


def test_a_tied_embedding_is_held_once(tmp_path):
    c = checkpoints.config(tie_word_embeddings=True)
    files = Snapshot(checkpoints.write(tmp_path / "model", c, checkpoints.tensors(c)))
    d, packed = demand.of_files(files), demand.of_files(files, resident="int8")
    assert demand.of_layout(files.layout) == d
    assert (d.embed, d.row) == (0, 64)
    assert packed.embed == 50 * 32 * 2  # the head is packed beside it
    assert packed.head < d.head


# What always holds

sizes = st.integers(0, 1000)
layer_demands = st.builds(
    LayerDemand,
    *(sizes, sizes, st.integers(0, 20)),
    flops=st.floats(0, 1e4),
    attention=st.floats(0, 10),
    experts=st.integers(1, 12),
    chosen=st.just(1),
    expert=st.integers(1, 300),
    expert_flops=st.floats(0, 1e3),
) | st.builds(LayerDemand, sizes, sizes, st.integers(0, 20))
layer_demands = st.builds(
    lambda layer, part: replace(layer, mixer=int(layer.weights * part)), layer_demands, st.floats(0, 1)
)
demands = st.builds(
    Demand,
    st.lists(layer_demands, min_size=1, max_size=5).map(tuple),
    *(st.integers(1, 1000), sizes, st.integers(0, 50)),
    head_flops=st.floats(0, 1e4),
    piece=st.integers(1, 40),
    buffers=sizes,
    copies=st.integers(1, 6),
    longest=st.integers(1, 200),
)
speeds = st.floats(0.1, 1000)
machines = st.builds(
    lambda ram, *rest, gpu=0, **more: Machine(PROCESS + ram, *rest, gpu=DRIVER + gpu if gpu else 0, **more),
    st.integers(0, 30_000),
    *(speeds, speeds, speeds),
    gpu=st.just(0) | st.integers(1, 10_000),
    gpu_gbs=speeds,
    gpu_gflops=speeds,
    link_gbs=speeds,
)


def placed(d, machine, context, place="gpu"):
    try:
        return plan(d, machine, context, place)
    except UsageError:
        return None


@given(demands, machines, st.integers(1, 300), st.booleans(), st.sampled_from(PLACES))
def test_a_plan_keeps_its_budgets_and_loses_no_byte(d, machine, context, integrated, place):
    machine = replace(machine, integrated=integrated, ram=machine.ram + (DRIVER + d.buffers) * integrated)
    p = placed(d, machine, context, place)
    if p is None:
        return
    assert p.total(GPU) <= machine.gpu
    assert p.total(RAM) + p.total(GPU) * integrated <= machine.ram
    weights = [s for s in p.shares if s.what not in ("program and buffers", "state for the context")]
    assert sum(sum(s.held.values()) for s in weights) == d.weights
    state = next(s for s in p.shares if s.what == "state for the context")
    assert state.held[DISK] == 0
    assert sum(state.held.values()) == sum(d.held(layer, context) for layer in d.layers)
    once = sum(sum(s.token.values()) for s in p.shares)
    assert once == pytest.approx(d.bytes_per_token(context))
    assert 0 <= p.resident <= 1


@given(demands, machines, st.integers(1, 100), st.integers(0, 20_000))
def test_more_memory_never_keeps_fewer_experts_nor_is_slower(d, machine, context, more):
    p = placed(d, machine, context)
    assume(p is not None)
    q = plan(d, replace(machine, ram=machine.ram + more), context, "gpu")
    assert q.resident >= p.resident
    assert q.tokens_per_second >= p.tokens_per_second * (1 - 1e-9)
    assert sum(q.first_token(50).values()) <= sum(p.first_token(50).values()) * (1 + 1e-9)
    assert context_that_fits(d, q.machine, "gpu") >= context_that_fits(d, machine, "gpu")


@given(demands, machines, st.integers(1, 100))
def test_nothing_is_faster_than_auto(d, machine, context):
    ways = {place: p for place in PLACES if (p := placed(d, machine, context, place))}
    assume("gpu" in ways)
    assert "auto" in ways
    assert ways["auto"].tokens_per_second == max(p.tokens_per_second for p in ways.values())
    assert "cpu" not in ways or ways["cpu"].total(GPU) == 0


@given(demands, machines, st.integers(1, 300), st.sampled_from(["gpu", "hybrid"]), st.integers(-1, 1))
def test_a_gpu_holds_a_layer_from_a_size_on_that_can_be_told(d, machine, context, place, more):
    needed = least(d, context, place)
    assume(machine.gpu and needed - DRIVER - d.buffers > 0)
    p = placed(d, replace(machine, gpu=needed + more, ram=HUGE), context, place)
    assert bool(p.gpu_units) == (more >= 0)


def test_a_hybrid_keeps_recurrent_mixers_in_ram():
    kda = LayerDemand(100, state=10, flops=50.0, mixer=60, mixer_flops=40.0, experts=4, chosen=1, expert=20)
    mla = replace(kda, state=0, position=1)
    d = Demand((kda, mla), head=50, embed=70, row=7)
    machine = Machine(PROCESS + 1000, 1, 1, 1, DRIVER + 400, 1, 1, 1)
    hybrid, whole = plan(d, machine, 5, "hybrid"), plan(d, machine, 5, "gpu")
    assert (hybrid.place, whole.place) == ("hybrid", "gpu")
    assert whole.total(GPU) - DRIVER == 100 + 10 + 100 + 5 + 50 + 3 * 2 * 20
    assert hybrid.total(GPU) - DRIVER == 40 + 100 + 5 + 50 + 4 * 2 * 20
    assert hybrid.total(RAM) - PROCESS == 60 + 10 + 70
    assert hybrid.token_bytes[RAM] == 60 + 2 * 10 + 7
    assert [hybrid.apart(i) for i in range(3)] == [kda, None, None]


@given(demands, machines)
def test_the_context_that_fits_is_the_longest(d, machine):
    def whole(context):
        p = placed(d, machine, context, "auto")
        return p is not None and p.gpu_units + p.ram_units == len(d.layers) + 1

    fits = context_that_fits(d, machine)
    assert fits == 0 or whole(fits)
    assert fits == d.longest or not whole(fits + 1)


@given(demands, machines, st.integers(1, 100))
def test_a_longer_prompt_or_context_takes_longer(d, machine, context):
    machine = replace(machine, gpu=0)  # what a longer context moves from a slow GPU to fast RAM may gain
    p, q = placed(d, machine, context), placed(d, machine, 2 * context)
    assume(q is not None and p is not None)
    assert q.tokens_per_second <= p.tokens_per_second * (1 + 1e-9)
    assert sum(p.first_token(60).values()) <= sum(p.first_token(61).values()) * (1 + 1e-9)


def test_experts_come_after_all_that_every_token_reads():
    layers = (LayerDemand(100, experts=8, chosen=2, expert=10), LayerDemand(100, experts=4, chosen=2, expert=30))
    d = Demand(layers, head=50, embed=70, row=7)

    def slots(ram):
        p = plan(d, Machine(PROCESS + ram, 1, 1, 1), 1)
        return p.ram_units, p.ram_slots, p.embed_in_ram

    assert slots(99) == (0, 0, False)
    assert slots(249) == (2, 0, False)
    assert slots(250 + 39) == (3, 0, False)
    assert slots(250 + 40) == (3, 1, False)
    assert slots(250 + 160 + 39) == (3, 7, False)  # four of the second layer are all that it has
    assert slots(250 + 200 + 69) == (3, 8, False)
    assert slots(250 + 200 + 70) == (3, 8, True)


def test_layers_fill_the_gpu_first_and_experts_follow():
    layers = (LayerDemand(100, state=10, experts=4, chosen=1, expert=20),) * 2
    d = Demand(layers, head=50, embed=70, row=7)

    def on_gpu(gpu):
        p = plan(d, Machine(PROCESS + 1000, 1, 1, 1, DRIVER + gpu, 1, 1, 1), 1, "gpu")
        return p.gpu_units, p.gpu_slots, p.ram_slots

    assert on_gpu(109) == (0, 0, 4)
    assert on_gpu(219) == (1, 0, 4)
    assert on_gpu(270 + 39) == (3, 0, 4)
    assert on_gpu(270 + 80) == (3, 2, 2)
    assert plan(d, Machine(PROCESS + 1000, 1, 1, 1, DRIVER + 350, 1, 1, 1), 1, "gpu").slots(layers[0]) == {
        GPU: 2,
        RAM: 2,
        DISK: 0,
    }


def test_the_memory_of_an_integrated_gpu_is_counted_once():
    d = Demand((LayerDemand(1000, experts=10, chosen=1, expert=100),), head=0, embed=0, row=0)
    ram = PROCESS + DRIVER + 1500
    own = plan(d, Machine(ram, 1, 1, 1, DRIVER + 1200, 1, 1, 1), 1, "gpu")
    shared = plan(d, replace(own.machine, integrated=True), 1, "gpu")
    assert own.resident == 1
    assert shared.resident == 0.5  # 1000 and 200 on the GPU; of the 1500 there are, 300 are left
    assert shared.total(RAM) + shared.total(GPU) == ram
    assert plan(d, replace(shared.machine, gpu=HUGE), 1, "gpu").total(GPU) <= ram


def test_a_prompt_reads_each_expert_once_a_piece():
    layer = LayerDemand(0, experts=10, chosen=2, expert=10**9)
    d = Demand((layer,), head=0, embed=0, row=0, piece=100)
    p = plan(d, Machine(PROCESS, 1e6, 2, 1e6), 1)
    met = 10 * (1 - 0.8**100)
    assert p.first_token(100)[DISK] == pytest.approx(met / 2)
    assert p.first_token(300)[DISK] == pytest.approx(3 * met / 2)
    assert p.first_token(1)[DISK] == pytest.approx(2 / 2)


def test_a_prompt_is_bound_by_memory_or_by_operations():
    d = Demand((LayerDemand(10**9, flops=1e9),), head=0, embed=0, row=0)
    machine = Machine(HUGE, 10, 1, 100)
    assert sum(plan(d, machine, 1).first_token(5).values()) == pytest.approx(0.1)
    assert sum(plan(d, machine, 1).first_token(50).values()) == pytest.approx(0.5)


def test_without_room_for_the_state_what_is_missing_is_said():
    d = Demand((LayerDemand(1, state=10**9),), 1, 1, 1)
    with pytest.raises(UsageError, match=r"5000 tokens needs 0\.70 GB more memory than the 1\.00 GB") as error:
        plan(d, Machine(10**9, 1, 1, 1), 5000)
    assert "--context" in str(error.value.hint)


# Machines


@pytest.mark.parametrize(
    ("text", "size"),
    [("48GB", 48 * 10**9), ("1.5 gib", 3 << 29), ("500M", 5 * 10**8), ("7", 7), (9, 9), ("2TiB", 2 << 40), ("3B", 3)],
)
def test_sizes(text, size):
    assert bytes_of(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-3GB", "4 XB", "1e9", "nan"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(UsageError, match="is not a size"):
        bytes_of(text)


@pytest.mark.parametrize(
    "content",
    [
        "nonsense",
        "[]",
        "{}",
        '{"ram": "8GB", "ram_gbs": 30, "disk_gbs": 2}',
        '{"ram": "8GB", "ram_gbs": 30, "disk_gbs": 2, "cpu_gflops": 100, "tpu": 1}',
        '{"ram": "8 apples", "ram_gbs": 30, "disk_gbs": 2, "cpu_gflops": 100}',
        '{"ram": "8GB", "ram_gbs": 0, "disk_gbs": 2, "cpu_gflops": 100}',
        '{"ram": "8GB", "ram_gbs": "30", "disk_gbs": 2, "cpu_gflops": 100}',
        '{"ram": "8GB", "ram_gbs": NaN, "disk_gbs": 2, "cpu_gflops": 100}',
        '{"ram": "8GB", "ram_gbs": 30, "disk_gbs": 2, "cpu_gflops": 100, "gpu": "24GB"}',
    ],
)
def test_a_machine_that_cannot_be_is_refused(tmp_path, content):
    file = tmp_path / "machine.json"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(UsageError):
        Machine.read(file)


# What is planned is enough

SCRIPT = """
import sys, random
import deltafin
from deltafin.session import Session
model = deltafin.load(sys.argv[1], threads=2)
session = Session(model)
random.seed(0)
for _ in range(2):
    session.feed([random.randrange(model.config.vocab) for _ in range(int(sys.argv[2]))])
    session.checkpoint()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 1024, "vocab_size": 20000, "num_hidden_layers": 6, "attn_res_block_size": 1},
        {"hidden_size": 512, "num_attention_heads": 32, "kv_lora_rank": 512, "v_head_dim": 128},
        {"hidden_size": 512, "linear_num_heads": 64, "linear_head_dim": 64, "intermediate_size": 30000},
    ],
)
def test_a_process_takes_no_more_than_was_planned(tmp_path, changes):
    c = checkpoints.config(**changes)
    layers = list(range(1, c["num_hidden_layers"] + 1))
    c["linear_attn_config"] |= {"kda_layers": layers[:-1], "full_attn_layers": layers[-1:]}
    folder = checkpoints.write(tmp_path / "model", c, checkpoints.tensors(c))
    p = plan(demand.of_files(Snapshot(folder)), Machine(HUGE, 1, 1, 1), 3000)
    script = f"{SCRIPT}\nprint(open('/proc/self/status', encoding='utf-8').read())"
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder), "1500"], capture_output=True, text=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr
    peak = int(re.search(r"VmHWM:\s+(\d+)", done.stdout)[1]) * 1024
    assert peak <= p.total(RAM)
    assert p.total(RAM) < 2 * peak  # and it is no idle promise


# The command


def machine_file(tmp_path, **fields):
    file = tmp_path / "machine.json"
    machine = {"ram": "8GB", "ram_gbs": 40, "disk_gbs": 2, "cpu_gflops": 500}
    file.write_text(json.dumps(machine | fields), encoding="utf-8")
    return file


def invoke(*arguments):
    return CliRunner().invoke(main, ["plan", *map(str, arguments)])


def report(*arguments):
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_json_says_all(tmp_path):
    content = report("nano", "--machine", machine_file(tmp_path))
    assert content["model"] == "nano"
    assert content["context"] == 8192
    assert content["machine"]["ram"] == 8 * 10**9
    assert sum(sum(s["bytes"].values()) for s in content["shares"][2:]) == content["weights"]
    assert content["bottleneck"] == RAM
    assert content["context_that_fits"] == 32768
    assert set(content["first_token_seconds"]) == {"1024", "8192"}
    assert content["tokens_per_second"] == pytest.approx(1 / sum(content["seconds_per_token"].values()))
    assert [a["what"] for a in content["alternatives"]] == [
        "twice the memory",
        "a disk twice as fast",
        "--resident int8",
    ]
    assert content["bytes"][RAM] <= 8 * 10**9


def test_every_option_has_an_effect(tmp_path):
    file = machine_file(tmp_path, gpu_gbs=500, gpu_gflops=9000, link_gbs=20)
    base = report(DATA / "kimi-linear", "--machine", file)
    assert base["machine"]["gpu"] == 0
    assert report(DATA / "kimi-linear", "--machine", file, "--ram", "5GB")["machine"]["ram"] == 5 * 10**9
    on_gpu = report(DATA / "kimi-linear", "--machine", file, "--gpu", "2GB")
    assert on_gpu["bytes"][GPU] > 0
    assert on_gpu["bottleneck"] == GPU
    longer = report(DATA / "kimi-linear", "--machine", file, "--context", "20000")
    assert longer["bytes"][RAM] > base["bytes"][RAM]
    assert report(DATA / "kimi-linear", "--machine", file, "--resident", "int8")["weights"] < base["weights"]
    assert report(DATA / "kimi-linear", "--machine", file, "--experts", "int8")["weights"] < base["weights"]
    slower = machine_file(tmp_path, ram_gbs=20)
    assert report(DATA / "kimi-linear", "--machine", slower)["tokens_per_second"] == pytest.approx(
        base["tokens_per_second"] / 2
    )


def test_several_gpus_are_planned_with_the_layers_of_each(tmp_path):
    asked = (DATA / "kimi-linear", "--machine", machine_file(tmp_path, gpu_gbs=500, gpu_gflops=9000, link_gbs=20))
    needs = demand.of_files(open_model(DATA / "kimi-linear"))
    most = needs.weights + sum(needs.held(layer, needs.context) for layer in needs.layers)
    size = DRIVER + needs.buffers + most * 2 // 3
    gpus = report(*asked, "--place", "gpu", "--gpu", f"{size},{size}")["gpus"]
    first = int(gpus["GPU 0"].removeprefix("layers 1 to "))
    assert gpus == {"GPU 0": f"layers 1 to {first}", "GPU 1": f"layers {first + 1} to {len(needs.layers)}, the head"}
    text = invoke(*asked, "--place", "gpu", "--gpu", f"{size},{size}").stdout
    assert [line.split(maxsplit=2)[2] for line in text.splitlines() if line.startswith("GPU ")] == [*gpus.values()]
    assert "gpus" not in report(*asked, "--gpu", "20GB")


def test_a_gpu_that_is_too_small_is_said(tmp_path):
    file = machine_file(tmp_path, gpu_gbs=500, gpu_gflops=9000, link_gbs=20)
    content = report(DATA / "kimi-linear", "--machine", file, "--gpu", "0.5GB")
    assert content["place"] == "cpu"
    assert "the GPU holds no layer: the first takes" in content["notes"][-1]
    assert report(DATA / "kimi-linear", "--machine", file)["notes"] == [f"as {file} describes it"]


def test_a_table_for_people(tmp_path):
    text = invoke("nano", "--machine", machine_file(tmp_path)).stdout
    assert text.startswith("nano, 20.15 MB of weights, for 8,192 tokens of context\n")
    for words in ("routed experts", "tokens/s", "bottleneck    the memory's bandwidth", "32,768 tokens fit", "what if"):
        assert words in text
    assert "GPU" not in text
    assert max(map(len, text.splitlines()[:-1])) <= 80


def test_what_does_not_fit_is_said(k3, monkeypatch, tmp_path):
    from deltafin.cli import plan as command

    monkeypatch.setattr(command, "found", lambda model, tell: (tmp_path, lambda r, e: k3(resident=r, experts=e)))
    file = machine_file(tmp_path, ram="24GB")
    text = invoke("moonshotai/Kimi-K3", "--machine", file).stdout
    assert "what every token reads does not fit into memory" in text
    assert "the disk: 9" in text
    short = invoke("moonshotai/Kimi-K3", "--machine", file, "--ram", "1GB")
    assert short.exit_code == 1
    assert "more memory than the 1.00 GB" in short.stderr
    assert "Traceback" not in short.output


def test_a_repository_is_planned_from_its_headers(hub, published, tmp_path):
    hub.publish(hub_server.NAME, published)
    file = machine_file(tmp_path)
    there = report(f"{hub_server.NAME}@main", "--machine", file, "--context", "100")
    folder = tmp_path / "model"
    folder.mkdir()
    for name in hub_server.NEEDED:
        (folder / name).write_bytes(published[name])
    here = report(folder, "--machine", file, "--context", "100")
    assert there | {"model": ""} == here | {"model": ""}
    pull(hub_server.NAME)
    asked = len(hub.asked())
    assert report(hub_server.NAME, "--machine", file, "--context", "100")["shares"] == here["shares"]
    assert len(hub.asked()) == asked  # what was pulled is looked at where it is


def test_a_repository_that_is_not_there_is_said(hub, tmp_path):
    result = invoke("no/such-model", "--machine", machine_file(tmp_path))
    assert result.exit_code == 1
    assert "no/such-model" in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize("packing", [{}, {"resident": "int8", "experts": "int8"}, {"experts": "mxfp4"}])
def test_a_store_asks_for_what_was_planned_before_it_was_made(tmp_path, packing):
    c = checkpoints.config(hidden_size=64)
    source = checkpoints.write(tmp_path / "model", c, checkpoints.tensors(c, packed=False))
    convert(source, tmp_path / "store", **packing)
    assert demand.of_files(open_model(tmp_path / "store")) == demand.of_files(Snapshot(source), **packing)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no-such-folder"], "there is no model folder 'no-such-folder'"),
        (["nano", "--ram", "lots"], "'lots' is not a size"),
        (["nano", "--gpu", "8GB"], "there is no GPU to plan with"),
    ],
)
def test_mistakes_are_said(tmp_path, arguments, words):
    result = invoke(*arguments, "--machine", machine_file(tmp_path))
    assert result.exit_code == 1
    assert words in result.stderr


def test_a_machine_in_a_file_cannot_be_measured(tmp_path):
    assert invoke("nano", "--measure", "--machine", machine_file(tmp_path)).exit_code == 2


def test_this_machine_is_planned_with_what_was_measured(monkeypatch, tmp_path):
    machine = Machine(10**9, 20, 1, 100, gpu=10**10, gpu_gbs=100, gpu_gflops=1e4, link_gbs=10)
    asked = []

    def measured(path, expert, again, tell):
        asked.append((path, expert, again))
        return measure.Measured(machine, ["as measured"])

    monkeypatch.setattr(measure, "measured", measured)
    content = report("nano", "--measure", "--ram", "2GB")
    assert asked == [(library.EMBEDDED, Snapshot(library.EMBEDDED).layout.totals["expert bytes"] // 256, True)]
    assert content["machine"]["gpu"] == 9 * 10**9
    assert content["place"] == "gpu"
    assert report("nano", "--place", "cpu")["bytes"][GPU] == 0
    assert content["notes"][0] == "as measured"
    assert any("--ram is more than is free" in note for note in content["notes"])
    assert report("nano", "--gpu", "8GB")["bytes"][GPU] > 0


def test_tiers_are_named_everywhere():
    from deltafin.cli.plan import NAMES

    assert tuple(NAMES) == TIERS
