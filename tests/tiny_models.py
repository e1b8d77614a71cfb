"""Random models small enough that a program compiles in a second or two, peaked enough that text is not all ties."""

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax.config import DraftConfig, TargetConfig
from eagle3_jax.draft import Eagle3Draft
from eagle3_jax.params import fill, initialize, named_variables
from eagle3_jax.target import Target

VOCAB, DRAFT_VOCAB = 50, 24


def tiny_target(seed=0, max_position=256, **changes):
    config = TargetConfig(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 8,
            "max_position": max_position,
            "eos_token_ids": (0,),
            **changes,
        }
    )
    target = initialize(Target(config), jax.random.key(seed))
    values = {name: variable.get_value() for name, variable in named_variables(target)}
    if "head" in values:
        values["head"] = values["head"] * 4
    return fill(target, values)


def tiny_draft(target, seed=1, draft_vocab_size=DRAFT_VOCAB, **changes):
    config = DraftConfig.for_target(target.config, draft_vocab_size, **{"taps": (0, 1), **changes})
    draft = initialize(Eagle3Draft(config), jax.random.key(seed))
    values = {name: variable.get_value() for name, variable in named_variables(draft)}
    kept = np.sort(np.random.default_rng(seed).permutation(target.config.vocab_size)[: config.draft_vocab_size])
    values["d2t"] = jnp.asarray(kept, jnp.int32)
    values["head"] = values["head"] * 3
    return fill(draft, values)
