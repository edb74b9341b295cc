"""Layer kinds: each is config, weights, state and forward; the four stand in one file per kind."""

from deltafin import config
from deltafin.model import kda, mla, mlp, moe

MIXERS = {config.KDA: kda, config.MLA: mla}
FEED_FORWARDS = {config.MLP: mlp, config.MoE: moe}
