"""Compile every kernel and keep the results: ``python -m deltafin.cpu_kernels.warm [N]``.

Kernels are compiled in processes of their own, two at a time, so that the process that uses them always runs the copies
that were kept: the first run gives the bits of every later one. What is run is each operation's smallest case.
"""

import subprocess
import sys
from types import SimpleNamespace

import torch

from deltafin import config
from deltafin.config import SiTU
from deltafin.cpu_kernels import OPS, compiling, layers
from deltafin.ops import FEW, DeltaState, DeltaWeights, Expert
from deltafin.quant import MXFP4, Int8


def missing() -> bool:
    """Whether kernels would still have to be compiled for this CPU."""
    mark = compiling.marker()
    return mark is not None and not mark.exists()


def compile_all() -> None:
    """Compile what is missing, in two processes; a failure is left to show when the kernel is used."""
    mark = compiling.marker()
    if mark is None or mark.exists():
        return
    command = [sys.executable, "-m", "deltafin.cpu_kernels.warm"]
    workers = [
        subprocess.Popen([*command, str(part)], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for part in range(2)
    ]
    try:
        if not any([worker.wait() for worker in workers]):
            mark.touch()
    finally:
        for worker in workers:
            worker.kill()


X, ONE = torch.ones(1, 1, 32), torch.ones(32, 32)


def _about() -> tuple:
    """A stream of one sum, a norm, no query, the operations."""
    sums = {"rows": X.numpy(), "finished": 0, "next": lambda: (0, False), "eps": 1e-5}
    stream = SimpleNamespace(**sums, batch=1, tokens=1, dtype=X.dtype)
    return stream, X[0, 0], None, OPS


def _delta_net(tokens: int) -> tuple[DeltaWeights, DeltaState]:
    conv, channels, x = torch.ones(32, 4), torch.ones(32), X.repeat(1, tokens, 1)
    q_tail, k_tail, v_tail = torch.zeros(3, 1, 3, 32)
    between = DeltaWeights(conv, conv, conv, torch.ones(1), channels, channels)
    state = DeltaState(q_tail, k_tail, v_tail, torch.zeros(1, 1, 32, 32))
    OPS.delta_net(x, x, x, x, x[..., :1], x, between, state, None, 1e-5)
    return between, state


def _mixers() -> None:
    """Their cores first: by the time that the rest is compiled, what it shares with feed-forwards has been."""
    between, state = _delta_net(1)
    cache, up = (torch.ones(1, 4, 16), torch.ones(1, 4, 16)), ONE[:, :16].contiguous()
    OPS.attention(X.unsqueeze(2), *cache, up, 16)

    w = SimpleNamespace(first=(ONE, ONE, ONE, ONE[:1], ONE, ONE), decay_up=ONE, gate_up=None, out=ONE, between=between)
    s = SimpleNamespace(**state._asdict(), length=0)
    layers.kda(config.KDA(heads=1, key_dim=32, value_dim=32, conv_width=4, decay_rank=32), w, s, *_about())
    w = SimpleNamespace(
        **{"first": (ONE, ONE, ONE[:16]), "q_up": None, "q_norm": None},
        **{"latent_up": up, "latent_norm": torch.ones(16), "out": up},
    )
    s = SimpleNamespace(reserve=lambda tokens: 1, buffers=lambda: cache)
    kind = config.MLA(heads=1, plain_dim=16, shared_dim=16, value_dim=16, latent_rank=16, gate=True)
    layers.mla(kind, w, s, *_about())


def _feed_forwards() -> None:
    layers.mlp(config.MLP(32, SiTU()), SimpleNamespace(gate=ONE, up=ONE, down=ONE), *_about())
    for lasting in (lambda _: Expert(ONE, ONE, ONE), None):
        w = SimpleNamespace(
            **{"experts": _Experts(lasting), "router": ONE, "router_bias": ONE[0], "latent_norm": None},
            **dict.fromkeys(("latent_down", "latent_up", "shared_gate", "shared_up", "shared_down"), None),
        )
        layers.moe(config.MoE(32, 1, 32, 0, SiTU()), w, *_about())


class _Experts:
    def __init__(self, lasting):
        self.lasting = lasting

    def __call__(self, x, ids, weights, activation, ops):
        return ops.experts(x, ids, weights, lambda _: Expert(ONE, ONE, ONE), activation)


def _others() -> None:
    packed = MXFP4(torch.zeros(1, 16, dtype=torch.uint8), torch.zeros(1, 1, dtype=torch.uint8))
    OPS.linears(X, (ONE, packed, Int8(torch.ones(1, 32, dtype=torch.int8), torch.ones(1))))
    OPS.gated(X, ONE, ONE, ONE, SiTU())
    many = MXFP4(torch.zeros(32, 16, dtype=torch.uint8), torch.zeros(32, 1, dtype=torch.uint8))
    OPS.gated(X.repeat(1, 20, 1), many, many, many, SiTU())
    OPS.rms_norm(X, X[0, 0], 1e-5)
    OPS.mix_depth(torch.stack([X, X]), X[0, 0], 1e-5)
    OPS.route(X[0], ONE, ONE[0], 1, True, 1.0)
    _delta_net(FEW + 1)


PARTS = ((_feed_forwards, _others), (_mixers,))

if __name__ == "__main__":
    for part in PARTS[int(sys.argv[1])]:
        part()
