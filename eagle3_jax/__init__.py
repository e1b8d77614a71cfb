"""EAGLE-3 speculative decoding in JAX: train a draft head, decode faster, change nothing in the text.

    import eagle3_jax as e3
    target = e3.load_target("smollm2-135m")
    draft = e3.load_draft("smollm2-135m", target)
    out = e3.generate(target, draft, [[1, 4093, 198]], max_new_tokens=64)
    for event in e3.stream(target, draft, [[1, 4093, 198]], max_new_tokens=64):
        print(event.row, event.tokens)

One letter per dimension everywhere, in array names (`q_BTNH`), annotations and docstrings:

    B  batch rows                        V  target vocabulary
    T  tokens of one pass                U  draft vocabulary
    D  hidden width                      S  cache slots
    A  fused features, taps x D          M  nodes of a draft tree, the root included
    N  query heads                       W  width of a draft tree
    K  key/value heads                   C  nodes on a path: depth + 1, rows written by one commit
    H  head width                        R  keys of a pass (its own tokens, and drafted ones before them)
    F  feed-forward width                P  absolute positions, or candidates of a pool
    J  training-time-test steps          E  stop ids
    L  target blocks                     X  axes folded for one product
"""

from eagle3_jax.decoding.generate import NonFiniteLogitsError, Output, generate
from eagle3_jax.decoding.session import Session
from eagle3_jax.decoding.stream import Event, Stream, stream
from eagle3_jax.decoding.warmup import warmup
from eagle3_jax.lm_draft import LanguageModelDraft
from eagle3_jax.quantize import quantize_int8
from eagle3_jax.scripted import ScriptedDraft
from eagle3_jax.sharding import make_mesh
from eagle3_jax.tokenizer import load_tokenizer
from eagle3_jax.tree import Chain, Tree
from eagle3_jax.weights import load_draft, load_target

__all__ = [
    "Chain",
    "Event",
    "LanguageModelDraft",
    "NonFiniteLogitsError",
    "Output",
    "ScriptedDraft",
    "Session",
    "Stream",
    "Tree",
    "generate",
    "load_draft",
    "load_target",
    "load_tokenizer",
    "make_mesh",
    "quantize_int8",
    "stream",
    "warmup",
]
