"""The EAGLE-3 head: fuse three target features, one decoder layer over [token embedding; state], a reduced output head.

Source: paper section 3.1; official code `eagle/model/cnets.py`. The embedding table is the target's and is
passed in, unless the head has its own. Variants (norms before fc, of the residual, of the output): vLLM's `llama_eagle3.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from eagle3_jax.attention import attend, causal_mask
from eagle3_jax.cache import BlockKV, Cache, after, append, empty_cache
from eagle3_jax.config import DraftConfig
from eagle3_jax.fused import linear_onto, norm_linear
from eagle3_jax.layers import linear, rms_norm, rotary, rotate, swiglu
from eagle3_jax.panels import is_native
from eagle3_jax.params import VocabMap, fill, named_variables, param
from eagle3_jax.sharding import constrain, lookup, shards


class Eagle3Draft(nnx.Module):
    """Trainable parameters (weights [in, out]) and the vocabulary map.

    d2t: int32 [U], the target id of each draft id (absolute, ascending; on disk it is an offset). fused_norm [A],
    fc_norm [taps, target's D] and embed [V, D] exist where the configuration asks for them.
    """

    def __init__(self, config: DraftConfig):
        D, F, H, U = config.hidden_size, config.intermediate_size, config.head_dim, config.draft_vocab_size
        A = config.target_hidden_size * len(config.taps)
        q_width, kv_width = config.num_heads * H, config.num_kv_heads * H
        self.config = config
        self.fc = param((A, D), ("fused", "embed"))
        if config.norm_before_fc:
            self.fused_norm = param((A,), ("norm",), "ones")
        if config.fc_norm:
            self.fc_norm = param((len(config.taps), config.target_hidden_size), (None, "norm"), "ones")
        if config.own_embedding:
            self.embed = param((config.vocab_size, D), ("vocab", "embed"))
        self.input_norm = param((D,), ("norm",), "ones")
        self.hidden_norm = param((D,), ("norm",), "ones")
        self.q = param((2 * D, q_width), ("embed", "heads"))
        self.k = param((2 * D, kv_width), ("embed", "kv_heads"))
        self.v = param((2 * D, kv_width), ("embed", "kv_heads"))
        self.o = param((q_width, D), ("heads", "embed"))
        self.mlp_norm = param((D,), ("norm",), "ones")
        self.gate = param((D, F), ("embed", "mlp"))
        self.up = param((D, F), ("embed", "mlp"))
        self.down = param((F, D), ("mlp", "embed"))
        self.norm = param((D,), ("norm",), "ones")
        self.head = param((D, U), ("embed", "draft_vocab"))
        self.d2t = VocabMap(jax.ShapeDtypeStruct((U,), jnp.int32))

    @property
    def dtype(self) -> jnp.dtype:
        """The compute and cache type."""
        return self.fc.dtype

    def new_cache(self, batch: int, slots: int) -> Cache:
        """An empty draft cache: slot i holds the pair (feature of token i, embedding of token i+1)."""
        c = self.config
        return empty_cache(1, batch, c.num_kv_heads, c.head_dim, slots, self.dtype)

    def begin(self, embed_VD: jax.Array, cache: Cache, first_B: jax.Array) -> Cache:
        """The cache as it is: a pair holds a token after a feature, so a row's first token stands in none and is not read."""
        return cache

    @property
    def taps(self) -> tuple[int, ...]:
        """Entering-block ids of the target features it reads."""
        return self.config.taps

    @property
    def target_ids(self) -> jax.Array:
        """int32 [U], the target id of each draft id."""
        return self.d2t[...]

    def extend(
        self, embed_VD: jax.Array, cache: Cache, features_BTA: jax.Array, tokens_BT: jax.Array, count_B: jax.Array, *, first: bool = False
    ) -> tuple[Cache, jax.Array, jax.Array]:
        """Appends the first `count` of T real pairs; returns (cache, logits float32 [B, U] and a [B, D] of each row's last one).

        first: the cache is empty and is not read. (XLA would find that out by itself, but folds masked scores for seconds to do so.)
        """
        T = tokens_BT.shape[1]
        positions = cache.lengths[:, None] + jnp.arange(T, dtype=jnp.int32)[None]
        a, kv = forward(self, embed_VD, tokens_BT, fuse(self, features_BTA), positions, causal_mask(T), None if first else cache)
        last = jnp.maximum(count_B - 1, 0)
        a = jnp.take_along_axis(a, last[:, None, None], axis=1)[:, 0]
        return append(cache, [kv], None, after(count_B, a)), logits(self, a), a

    def expand(
        self, embed_VD: jax.Array, cache: Cache, tokens_BW: jax.Array, carry_BWD: jax.Array, mask_BWR: jax.Array, earlier: BlockKV | None
    ) -> tuple[jax.Array, jax.Array, BlockKV]:
        """Runs one level of W drafted nodes; returns (logits [B, W, U], a [B, W, D], K/V of all levels so far).

        Every node of level i (from 0) stands at rotary position (pairs in the cache) + i.
        """
        level = 0 if earlier is None else earlier[0].shape[1] // tokens_BW.shape[1]
        positions = jnp.broadcast_to(cache.lengths[:, None] + level, tokens_BW.shape)
        a, kv = forward(self, embed_VD, tokens_BW, carry_BWD, positions, mask_BWR, cache, earlier)
        return logits(self, a), a, kv


def reread(draft: Eagle3Draft, config: DraftConfig) -> Eagle3Draft:
    """The same weights read by another configuration. Raises ValueError where that would need other weights."""
    return fill(Eagle3Draft(config), {name: variable.get_value() for name, variable in named_variables(draft)})


def fuse(draft: Eagle3Draft, features_BTA: jax.Array) -> jax.Array:
    """g [B, T, D]: only target features pass through fc; the draft's own output never does."""
    c, x = draft.config, features_BTA.astype(draft.dtype)
    if c.norm_before_fc:
        x = rms_norm(x, draft.fused_norm[...], c.rms_norm_eps)
    if c.fc_norm:
        parts, weights = jnp.split(x, len(c.taps), axis=-1), draft.fc_norm[...]
        x = jnp.concatenate([rms_norm(part, weights[i], c.rms_norm_eps) for i, part in enumerate(parts)], axis=-1)
    return linear(x, draft.fc[...])


def table(draft: Eagle3Draft, embed_VD: jax.Array) -> jax.Array:
    """The embedding table [V, D] that the draft reads: the target's, which is given, or the head's own where it has one."""
    return draft.embed[...] if draft.config.own_embedding else embed_VD


def project_qkv(draft: Eagle3Draft, embedded_BTD: jax.Array, x_BTD: jax.Array, positions_BT: jax.Array) -> tuple[jax.Array, ...]:
    """q [B, T, N, H] and k, v [B, T, K, H] of u = concat(input_norm(embedding), hidden_norm(x)); q and k rotated."""
    c = draft.config
    u = jnp.concatenate(
        [rms_norm(embedded_BTD, draft.input_norm[...], c.rms_norm_eps), rms_norm(x_BTD, draft.hidden_norm[...], c.rms_norm_eps)], axis=-1
    )
    cos_sin = rotary(positions_BT, c.rope, c.head_dim)
    return _in_heads(draft, [linear(u, weight[...]) for weight in (draft.q, draft.k, draft.v)], cos_sin)


def _in_heads(draft: Eagle3Draft, products: Sequence[jax.Array], cos_sin: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
    q, k, v = (x.reshape(*x.shape[:2], -1, draft.config.head_dim) for x in products)
    return rotate(q, cos_sin), rotate(k, cos_sin), v


def embedding_part(draft: Eagle3Draft, embedded_BTD: jax.Array) -> list[jax.Array]:
    """What embeddings add to q, k and v before rotation, for `project_state`: the same at whatever step a token is read."""
    u = rms_norm(embedded_BTD, draft.input_norm[...], draft.config.rms_norm_eps)
    return [linear(u, weight[: u.shape[-1]]) for weight in _qkv(draft)]


def project_state(
    draft: Eagle3Draft, embedding: Sequence[jax.Array], x_BTD: jax.Array, cos_sin: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, ...]:
    """As `project_qkv`, of the `embedding_part` [B, T, ...] of the tokens read and the states x."""
    c = draft.config
    u = rms_norm(x_BTD, draft.hidden_norm[...], c.rms_norm_eps)
    products = [part + linear(u, weight[-u.shape[-1] :]) for part, weight in zip(embedding, _qkv(draft), strict=True)]
    if len(products) == 1:
        q_width, kv_width = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        products = jnp.split(products[0], [q_width, q_width + kv_width], axis=-1)
    return _in_heads(draft, products, cos_sin)


def _qkv(draft: Eagle3Draft) -> list[jax.Array]:
    """The weights of q, k and v as one [2 D, (N + 2 K) H]; where heads lie on different devices, as three."""
    weights = [weight[...][:] for weight in (draft.q, draft.k, draft.v)]  # [:]: floats, also of int8 or panels
    split = max(shards(axis, weight.shape[1]) for axis, weight in zip(("heads", "kv_heads", "kv_heads"), weights, strict=True))
    return weights if split > 1 else [jnp.concatenate(weights, axis=1)]


def finish_layer(draft: Eagle3Draft, x_BTD: jax.Array, attended_BTNH: jax.Array) -> jax.Array:
    """a [B, T, D], which the next step and `logits` read: residual x plus attention output, then the MLP.

    The residual is x as it came (normed for `norm_before_residual` heads), and a is not normed (but for `norm_output` heads).
    """
    c = draft.config
    B, T, _ = x_BTD.shape
    residual = rms_norm(x_BTD, draft.hidden_norm[...], c.rms_norm_eps) if c.norm_before_residual else x_BTD
    x = linear_onto(residual, attended_BTNH.reshape(B, T, -1), draft.o[...])
    u = rms_norm(x, draft.mlp_norm[...], c.rms_norm_eps)
    a = linear_onto(x, swiglu(linear(u, draft.gate[...]), linear(u, draft.up[...])), draft.down[...])
    return rms_norm(a, draft.norm[...], c.rms_norm_eps) if c.norm_output else a


def normed(draft: Eagle3Draft, a: jax.Array) -> jax.Array:
    """What the output head multiplies, of a [..., D]: norm(a), which an a of a `norm_output` head is already."""
    return a if draft.config.norm_output else rms_norm(a, draft.norm[...], draft.config.rms_norm_eps)


def logits(draft: Eagle3Draft, a: jax.Array) -> jax.Array:
    """float32 [..., U] from a [..., D]; on a mesh each device keeps its part of U."""
    c, head = draft.config, draft.head[...]
    scores = linear(a, head) if c.norm_output else norm_linear(a, draft.norm[...], c.rms_norm_eps, head)
    return constrain(scores, "rows", *(None,) * (a.ndim - 2), "draft_vocab").astype(jnp.float32)


def forward(
    draft: Eagle3Draft,
    embed_VD: jax.Array,
    tokens_BT: jax.Array,
    x_BTD: jax.Array,
    positions_BT: jax.Array,
    mask_BTR: jax.Array,
    cache: Cache | None = None,
    earlier: BlockKV | None = None,
) -> tuple[jax.Array, BlockKV]:
    """One decoder layer over T pairs; returns (a [B, T, D], K/V of [earlier; these] [B, R, K, H]). Nothing is written.

    tokens: target ids, the token AFTER each x. x: g at real positions, a at drafted ones.
    Keys: the cache's valid slots, then `earlier` drafted pairs, then these T; mask [B, T, R] covers the last two.
    """
    embedded = lookup(table(draft, embed_VD), tokens_BT).astype(draft.dtype)
    q, k, v = project_qkv(draft, embedded, x_BTD, positions_BT)
    if earlier is not None:
        k, v = jnp.concatenate([earlier[0], k], axis=1), jnp.concatenate([earlier[1], v], axis=1)
    cached = None if cache is None else (cache.k[0], cache.v[0], cache.lengths)
    attended = attend(q, k, v, mask_BTR, cached, native=is_native(draft.q[...]))
    return finish_layer(draft, x_BTD, attended), (k, v)
