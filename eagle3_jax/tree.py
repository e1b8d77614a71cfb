"""The draft tree: its size, and how a pool of scored candidates becomes nodes, parents and an ancestor mask. Static shapes throughout.

Source: EAGLE-2's dynamic tree as EAGLE-3 uses it; official code `eagle/model/cnets.py`, `topK_genrate`.
The pool lists `width` tokens of level 1, then `width`^2 children per further level, so a parent always precedes its child.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Tree:
    """nodes: tree size, the root (the pending token) included; depth: levels of drafted tokens.

    width: candidates per node, and frontier size.

    Raises ValueError for a tree that cannot be filled: more nodes than the pool holds, or fewer than 2.
    """

    nodes: int
    depth: int
    width: int

    def __post_init__(self) -> None:
        for name in ("nodes", "depth", "width"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"Tree {name} must be an int, found {value!r}")
        if self.nodes < 2 or self.depth < 1 or self.width < 1:
            raise ValueError(f"{self}: needs nodes >= 2 (the root and a drafted token), depth >= 1, width >= 1")
        if self.nodes - 1 > self.pool_size:
            raise ValueError(
                f"{self}: a tree of this depth and width has at most {self.pool_size + 1} nodes (1 + width + (depth-1)·width²)"
            )

    @property
    def tree(self) -> Tree:
        """Itself, as `Chain.tree` is the chain's."""
        return self

    @property
    def pool_size(self) -> int:
        """Scored candidates of one growth."""
        return self.width + (self.depth - 1) * self.width**2

    @classmethod
    def official(cls, total_token: int = 60, depth: int = 7, top_k: int = 10) -> Tree:
        """The size that the official code's arguments of these names give: its depth counts the levels after the first."""
        return cls(nodes=total_token, depth=depth + 1, width=top_k)

    @classmethod
    def sglang(cls, num_steps: int = 5, eagle_topk: int = 8, num_draft_tokens: int = 64) -> Tree:
        """The size that SGLang's speculative arguments of these names give."""
        return cls(nodes=num_draft_tokens, depth=num_steps, width=eagle_topk)


@dataclasses.dataclass(frozen=True)
class Chain:
    """A chain of `length` drafted tokens: the tree of width 1."""

    length: int

    def __post_init__(self) -> None:
        if not isinstance(self.length, int) or isinstance(self.length, bool) or self.length < 1:
            raise ValueError(f"Chain length must be an int >= 1, found {self.length!r}")

    @property
    def tree(self) -> Tree:
        """The tree that it is."""
        return Tree(nodes=self.length + 1, depth=self.length, width=1)


TreeChoice = Chain | Tree | Literal["auto"] | None
"""What can be asked for: a size, "auto" (what pays on this machine), or None (a stored choice, else a size that suits the backend)."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pool:
    """Scored candidates, each [B, P]: tokens int32, scores float32 (summed log-probabilities, <= 0), parents int32 (-1 the root)."""

    tokens: jax.Array
    scores: jax.Array
    parents: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftTree:
    """One tree per row: tokens, parents (the root's own is 0), depths, each int32 [B, M]; mask bool [B, M, M], ancestors and self.

    scores: float32 [B, M], by which the nodes were chosen (the root's own is 0); None for a tree that was not drafted.
    """

    tokens: jax.Array
    parents: jax.Array
    depths: jax.Array
    mask: jax.Array
    scores: jax.Array | None = None


def root_only(root_B: jax.Array) -> DraftTree:
    """The tree of plain decoding: the pending token alone."""
    zero = jnp.zeros((root_B.shape[0], 1), jnp.int32)
    return DraftTree(root_B[:, None], zero, zero, jnp.ones((root_B.shape[0], 1, 1), bool))


def select(root_B: jax.Array, pool: Pool, tree: Tree) -> DraftTree:
    """The root and the nodes-1 best candidates of the pool, in pool order.

    A child's score is never above its parent's and top_k keeps the lower index on ties, so no child is kept without its parent.
    """
    B, P = pool.scores.shape
    if tree.nodes - 1 == P:
        kept = jnp.broadcast_to(jnp.arange(P, dtype=jnp.int32), (B, P))
    else:
        kept = jnp.sort(jax.lax.top_k(pool.scores, tree.nodes - 1)[1], axis=-1)
    tokens = jnp.concatenate([root_B[:, None], jnp.take_along_axis(pool.tokens, kept, axis=1)], axis=1)
    parents_in_pool = jnp.take_along_axis(pool.parents, kept, axis=1)
    rank = jnp.sum(kept[:, None, :] < parents_in_pool[:, :, None], axis=-1, dtype=jnp.int32)
    parents = jnp.where(parents_in_pool < 0, 0, rank + 1)
    depths = jnp.where(kept < tree.width, 1, 2 + (kept - tree.width) // tree.width**2)
    zero = jnp.zeros((B, 1), jnp.int32)
    parents = jnp.concatenate([zero, parents], axis=1)
    depths = jnp.concatenate([zero, depths.astype(jnp.int32)], axis=1)
    scores = jnp.concatenate([jnp.zeros((B, 1)), jnp.take_along_axis(pool.scores, kept, axis=1)], axis=1)
    return DraftTree(tokens, parents, depths, ancestor_mask(parents, tree.depth), scores)


def ancestor_mask(parents_BM: jax.Array, depth: int) -> jax.Array:
    """bool [B, M, M]: node m reads itself and every node on its path to the root; `depth` pointer steps, all nodes at once."""
    B, M = parents_BM.shape
    ids = jnp.arange(M, dtype=jnp.int32)
    at = jnp.broadcast_to(ids, (B, M))
    mask = at[:, :, None] == ids[None, None, :]
    for _ in range(depth):
        at = jnp.take_along_axis(parents_BM, at, axis=1)
        mask = mask | (at[:, :, None] == ids[None, None, :])
    return mask
