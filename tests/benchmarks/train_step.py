"""Tokens per second of a training step, SmolLM2-135M's widths, T 512, J 7: this project's, online and offline, and a plain PyTorch one.

    python tests/benchmarks/train_step.py jax                   # in this project's environment
    python tests/benchmarks/train_step.py torch                 # in one with torch and transformers; each thread count is tried

Random weights and tokens: only the shapes matter. Every slot is scored. Both steps are online: the target's pass, seven unrolled steps
of the head, the loss against the target's distribution, backward, clip, AdamW. The PyTorch step is written as one writes it first:
Hugging Face's model, one mask [T, s T], full logits, autograd.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

V, D, F, L, N, K, H, U = 49152, 576, 1536, 30, 9, 3, 64, 8192


def best_of(step: Callable[[], Any], tries: int) -> float:
    """Seconds of the median step, the first apart."""
    step()
    seconds = []
    for _ in range(tries):
        begun = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


def run_jax(args: argparse.Namespace) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from eagle3_jax.config import DraftConfig, TargetConfig
    from eagle3_jax.params import initialize
    from eagle3_jax.target import Target
    from eagle3_jax.training.flops import measured_peak, step_flops
    from eagle3_jax.training.train import fresh_draft, frozen_tables
    from eagle3_jax.training.trainer import Fixed, TrainConfig, complete, new_state, split, train_step
    from eagle3_jax.training.ttt import Batch, recipe

    sizes = TargetConfig(
        vocab_size=V,
        hidden_size=D,
        intermediate_size=F,
        num_layers=L,
        num_heads=N,
        num_kv_heads=K,
        head_dim=H,
        max_position=8192,
        tie_embeddings=True,
    )
    target = initialize(Target(sizes), jax.random.key(0))
    kept = np.arange(U, dtype=np.int32)
    draft_config = DraftConfig.for_target(sizes, U)
    T, B = args.tokens, args.rows
    row = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
    batch = Batch(
        tokens=np.random.default_rng(0).integers(0, V, (B, T)).astype(np.int32),
        positions=row,
        features=None,
        hidden=None,
        argmax=None,
        response=np.ones((B, T), np.int32),
        segments=np.ones((B, T), np.int32),
        valid=np.ones((B, T), bool),
        slots=row,
    )  # type: ignore[arg-type]
    peak = measured_peak("float32", 2048, 5)
    print(f"measured peak of a float32 product: {peak / 1e9:.0f} GFLOP/s")
    for online in (True, False):
        config = TrainConfig(recipe=recipe("aligned", steps=7), rows=B, row_tokens=T, row_slots=T, online=online)
        params, variables = split(fresh_draft(draft_config, kept, 0), config.recipe)
        fixed = Fixed(frozen_tables(target, kept), variables, target if online else None)
        held: list[Any] = [new_state(params, config)]
        filled = batch
        if not online:
            inside = Fixed(fixed.frozen, variables, target)
            filled = jax.tree.map(np.asarray, jax.jit(complete, static_argnums=0)(draft_config, inside, batch))
            filled = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == np.float32 else x, filled)
        stacked = jax.tree.map(lambda x: x[None], filled)

        def step(config=config, fixed=fixed, held=held, stacked=stacked) -> None:
            held[0], metrics = train_step(draft_config, config, held[0], fixed, stacked)
            jax.block_until_ready((held[0], metrics))

        seconds = best_of(step, args.tries)
        flops = step_flops(draft_config, config, sizes if online else None).total
        print(
            f"jax, {'online' if online else 'offline'}: {seconds:.2f} s, {B * T / seconds:.0f} tokens/s, "
            f"{flops / seconds / 1e9:.0f} GFLOP/s, {flops / seconds / peak:.0%} of the peak",
            flush=True,
        )


def run_torch(args: argparse.Namespace) -> None:
    import torch
    import torch.nn.functional as f
    from torch import nn
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb, repeat_kv

    J, T, B = 7, args.tokens, args.rows
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=D,
        intermediate_size=F,
        num_hidden_layers=L,
        num_attention_heads=N,
        num_key_value_heads=K,
        head_dim=H,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    target = LlamaForCausalLM(config).eval().requires_grad_(False)

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            dense = lambda a, b: nn.Linear(a, b, bias=False)  # noqa: E731
            self.fc, self.input_norm, self.hidden_norm = dense(3 * D, D), LlamaRMSNorm(D), LlamaRMSNorm(D)
            self.q, self.k, self.v, self.o = dense(2 * D, N * H), dense(2 * D, K * H), dense(2 * D, K * H), dense(N * H, D)
            self.mlp_norm, self.norm = LlamaRMSNorm(D), LlamaRMSNorm(D)
            self.gate, self.up, self.down, self.head = dense(D, F), dense(D, F), dense(F, D), dense(D, U)
            self.rotary = LlamaRotaryEmbedding(config)

        def forward(self, features: Any, tokens: Any, teacher: Any, counts: Any) -> Any:
            x, keys, values, total = self.fc(features), [], [], 0.0
            causal = torch.full((T, T), float("-inf")).triu(1)
            diagonal = torch.full((T, T), float("-inf")).fill_diagonal_(0.0)
            for s in range(J):
                embedded = target.model.embed_tokens(torch.roll(tokens, -1 - s, 1))
                u = torch.cat([self.input_norm(embedded), self.hidden_norm(x)], -1)
                q, k, v = (p(u).view(B, T, -1, H).transpose(1, 2) for p in (self.q, self.k, self.v))
                cos, sin = self.rotary(u, torch.arange(s, T + s)[None])
                q, k = apply_rotary_pos_emb(q, k, cos, sin)
                keys.append(repeat_kv(k, N // K))
                values.append(repeat_kv(v, N // K))
                mask = torch.cat([causal, *[diagonal] * s], -1)
                attended = f.scaled_dot_product_attention(q, torch.cat(keys, 2), torch.cat(values, 2), attn_mask=mask)
                x = x + self.o(attended.transpose(1, 2).reshape(B, T, -1))
                u = self.mlp_norm(x)
                x = x + self.down(f.silu(self.gate(u)) * self.up(u))
                logits = self.head(self.norm(x)).float()
                p = torch.roll(teacher, -1 - s, 1)
                loss = -(p * f.log_softmax(logits, -1)).sum(-1) * torch.roll(counts, -1 - s, 1)
                total = total + 0.8**s * loss.mean()
            return total

    for threads in args.threads:
        torch.set_num_threads(threads)
        head = Head()
        optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
        tokens = torch.randint(0, V, (B, T))

        def step(head=head, optimizer=optimizer, tokens=tokens) -> None:
            with torch.no_grad():
                out = target(tokens, output_hidden_states=True)
                features = torch.cat([out.hidden_states[i] for i in (2, L // 2, L - 3)], -1)
                counts = (out.logits.argmax(-1) < U).float()
                teacher = out.logits[..., :U].softmax(-1)
            optimizer.zero_grad()
            head(features, tokens, teacher, counts).backward()
            nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimizer.step()

        seconds = best_of(step, args.tries)
        print(f"torch, online, {threads} threads: {seconds:.2f} s, {B * T / seconds:.0f} tokens/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("jax", "torch"))
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--tries", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    (run_jax if args.what == "jax" else run_torch)(args)


if __name__ == "__main__":
    main()
