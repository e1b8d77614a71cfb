"""The weights bridge: checkpoints of targets and heads, in and out."""

from eagle3_jax.weights.heads import load_head, save_head
from eagle3_jax.weights.load import load_draft, load_target
from eagle3_jax.weights.table import WeightsError

__all__ = ["WeightsError", "load_draft", "load_head", "load_target", "save_head"]
