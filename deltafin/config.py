"""What a model is made of: one frozen dataclass per kind of layer, and ``ModelConfig`` that lists them.

Only the standard library is imported here. Each kind answers ``sizes()``: the letters that the shapes of its
weights are written with (one key for the whole project, see ``docs/architecture.md``).
"""

from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from deltafin.errors import ConfigError


@dataclass(frozen=True)
class SiLU:
    """``silu(gate) * up``."""


@dataclass(frozen=True)
class SiTU:
    """``a tanh(gate / a) sigmoid(gate) * b tanh(up / b)``: a SiLU whose two factors saturate (Kimi K3)."""

    gate_limit: float = 4.0
    up_limit: float = 25.0


Activation = SiLU | SiTU


@dataclass(frozen=True)
class KDA:
    """Kimi Delta Attention: a recurrent state decayed per key channel, corrected by the delta rule.

    ``decay_floor`` is the lowest log-decay of one step (Kimi K3: -5); without it the decay is the unbounded
    softplus form (Kimi Linear). ``gate_rank`` is the rank of the output gate; ``None`` means full rank.
    """

    heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    decay_rank: int
    decay_floor: float | None = None
    gate_rank: int | None = None

    def sizes(self) -> dict[str, int]:
        """Letters of the weight shapes."""
        return {
            "H": self.heads,
            "K": self.key_dim,
            "V": self.value_dim,
            "W": self.conv_width,
            "L": self.decay_rank,
            "O": self.gate_rank or 0,
        }


@dataclass(frozen=True)
class MLA:
    """Multi-head latent attention without rotation: the cache holds one latent and one shared key a token.

    A head's key is ``plain_dim`` channels of its own, made from the latent, and ``shared_dim`` channels that all
    heads share. ``query_rank`` is the rank of the query projection; ``None`` means one full matrix.
    """

    heads: int
    plain_dim: int
    shared_dim: int
    value_dim: int
    latent_rank: int
    query_rank: int | None = None
    gate: bool = False
    eps: float = 1e-6

    def sizes(self) -> dict[str, int]:
        """Letters of the weight shapes."""
        return {
            "H": self.heads,
            "P": self.plain_dim,
            "J": self.shared_dim,
            "V": self.value_dim,
            "R": self.latent_rank,
            "L": self.query_rank or 0,
        }


@dataclass(frozen=True)
class MLP:
    """A gated feed-forward of ``width`` units."""

    width: int
    activation: Activation

    def sizes(self) -> dict[str, int]:
        """Letters of the weight shapes."""
        return {"F": self.width}


@dataclass(frozen=True)
class MoE:
    """A mixture of ``experts``, of which a token uses ``chosen``, beside a shared MLP that every token uses.

    With ``latent`` the routed experts work on that many channels between two common projections, otherwise on the
    model's width. ``shared_width`` 0 means no shared MLP.
    """

    experts: int
    chosen: int
    width: int
    shared_width: int
    activation: Activation
    latent: int | None = None
    latent_norm: bool = False
    renormalize: bool = True
    scale: float = 1.0

    def sizes(self) -> dict[str, int]:
        """Letters of the weight shapes; ``M``, an expert's width of input and output, only where it is latent."""
        latent = {} if self.latent is None else {"M": self.latent}
        return {"X": self.experts, "F": self.width, "U": self.shared_width, **latent}


@dataclass(frozen=True)
class Plain:
    """The residual stream is a sum."""


@dataclass(frozen=True)
class AttentionResidual:
    """The stream is a learned mixture over the sums of earlier blocks of ``block`` layers (Kimi K3)."""

    block: int


@dataclass(frozen=True)
class Layer:
    """One mixer of tokens and one feed-forward."""

    mixer: KDA | MLA
    ffn: MLP | MoE


@dataclass(frozen=True)
class ModelConfig:
    """Everything that decides what a model computes, apart from its weights."""

    family: str
    vocab: int
    width: int
    eps: float
    layers: tuple[Layer, ...]
    residual: Plain | AttentionResidual = Plain()
    tied: bool = False
    context: int | None = None
    """The longest context the model's makers promise, in tokens; nothing here depends on it."""

    @property
    def mixes(self) -> bool:
        """Whether the residual stream is a mixture and has queries."""
        return isinstance(self.residual, AttentionResidual)

    def sizes(self) -> dict[str, int]:
        """Letters that are the same in every layer."""
        return {"Z": self.vocab, "D": self.width}


KINDS: dict[str, type] = {
    kind.__name__: kind for kind in (ModelConfig, Layer, KDA, MLA, MLP, MoE, SiLU, SiTU, Plain, AttentionResidual)
}


def to_json(value: Any) -> Any:
    """Return a config as JSON has it: a dataclass becomes an object whose ``kind`` is its name."""
    if is_dataclass(value):
        return {"kind": type(value).__name__} | {f.name: to_json(getattr(value, f.name)) for f in fields(value)}
    return [to_json(item) for item in value] if isinstance(value, tuple) else value  # type: ignore[reportUnknownVariableType]


def from_json(value: Any) -> Any:
    """Return what ``to_json`` was given; ``ConfigError`` for a kind, or a field of one, that is not known."""
    if isinstance(value, list):
        return tuple(from_json(item) for item in value)  # type: ignore[reportUnknownVariableType]
    if not isinstance(value, dict):
        return value
    content: dict[str, Any] = {name: from_json(item) for name, item in value.items()}  # type: ignore[reportUnknownVariableType]
    kind = content.pop("kind", None)
    try:
        return KINDS[kind](**content)
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"{kind!r} with {', '.join(content) or 'no fields'} is not a part of a model that is known"
        ) from error
