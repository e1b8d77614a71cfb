"""The weights bridge: checkpoints of targets and heads, in and out."""

from eagle3_jax.weights.load import load_target
from eagle3_jax.weights.table import WeightsError

__all__ = ["WeightsError", "load_target"]
