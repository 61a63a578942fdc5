"""What distinguishes the architectures that `make_tiny_model` writes: their metadata and their tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Shape:
    """Sizes of a tiny model; heads_kv: per layer."""

    n_layer: int
    n_head: int
    heads_kv: tuple[int, ...]
    head_dim_k: int
    head_dim_v: int
    n_embd: int
    n_ff: int
    n_vocab: int
    n_expert: int = 0


@dataclass(frozen=True)
class Architecture:
    """How a tiny model of one `general.architecture` differs from a tiny llama.

    pre: pre-tokenizer.  whole: llama.cpp needs `n_embd = n_head * head_dim`.  qkv_bias: biases on queries, keys and
    values.  head_norm: "none", "head" or "all".  pre_norms, post_norms: norms before and after each half of a block.
    fused: queries, keys and values in one matrix, gate and up in another.  tied: the output matrix may be left out.
    experts: every layer has them.  scaled: embeddings are multiplied by the root of `n_embd` when tokens enter.
    keys: further metadata, `{arch}.*`.
    """

    pre: str = "gpt-2"
    whole: bool = False
    qkv_bias: bool = False
    head_norm: str = "none"
    pre_norms: bool = True
    post_norms: bool = False
    fused: bool = False
    tied: bool = True
    experts: bool = False
    scaled: bool = False
    keys: dict[str, Any] = field(default_factory=dict)


_GRANITE = {"embedding_scale": 3.0, "residual_scale": 0.6, "attention.scale": 0.2, "logit_scale": 2.0}
# Caps that are felt, and a window that 300 tokens are far past.
_GEMMA2 = {"attention.sliding_window": 40, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 6.0}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(),
    "qwen2": Architecture("qwen2", whole=True, qkv_bias=True),
    "qwen3": Architecture("qwen2", head_norm="head"),
    "qwen3moe": Architecture("qwen2", head_norm="head", experts=True),
    "olmo2": Architecture(whole=True, head_norm="all", pre_norms=False, post_norms=True, tied=False),
    "granite": Architecture(keys=_GRANITE),
    "granitemoe": Architecture(keys=_GRANITE, experts=True),
    "smollm3": Architecture(),
    "phi3": Architecture(whole=True, fused=True),
    "gemma2": Architecture(post_norms=True, scaled=True, keys=_GEMMA2),
    "gemma3": Architecture(post_norms=True, scaled=True, head_norm="head", keys={"attention.sliding_window": 40}),
}


def tensors(arch: Architecture, shape: Shape, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random weights of a model, scaled so that it behaves like one."""
    n_embd, n_ff = shape.n_embd, shape.n_ff

    def matrix(n_out: int, n_in: int, gain: float) -> np.ndarray:
        """Maps a vector of mean square 1 to one of mean square `gain` squared."""
        return rng.standard_normal((n_out, n_in)) * gain * n_in**-0.5

    def norm(dim: int = n_embd, around: float = 1.0) -> np.ndarray:
        return around * (1 + 0.1 * rng.standard_normal(dim))

    def uneven(values: np.ndarray) -> np.ndarray:
        """Channels of different size, a few of them large, as keys have them."""
        sizes = np.exp(0.6 * rng.standard_normal(len(values)))
        return (values.T * sizes).T

    scale = n_embd**0.5 if arch.scaled else 1.0  # a tied output gets back what the embedding is made smaller by
    out = {
        "token_embd.weight": matrix(shape.n_vocab, n_embd, 2.5 / scale),
        "output_norm.weight": norm(around=scale),
        "output.weight": matrix(shape.n_vocab, n_embd, 2.5),
    }
    # Layers outweigh the embedding (2.5 / sqrt(n_embd)), or a tied output would only ever repeat its input.
    added = 1.5 * shape.n_layer**-0.5
    for il, n_kv in enumerate(shape.heads_kv):
        n_q, n_k, n_v = shape.n_head * shape.head_dim_k, n_kv * shape.head_dim_k, n_kv * shape.head_dim_v
        layer: dict[str, np.ndarray] = {
            "attn_norm.weight": norm(),
            "attn_q.weight": matrix(n_q, n_embd, 1.2),
            "attn_k.weight": uneven(matrix(n_k, n_embd, 1.2)),
            "attn_v.weight": uneven(matrix(n_v, n_embd, 0.8)),
            "attn_output.weight": matrix(n_embd, shape.n_head * shape.head_dim_v, added),
            "ffn_norm.weight": norm(),
            "ffn_gate.weight": matrix(n_ff, n_embd, 1.0),
            "ffn_up.weight": matrix(n_ff, n_embd, 1.0),
            "ffn_down.weight": matrix(n_embd, n_ff, added),
        }
        if arch.qkv_bias:
            layer["attn_q.bias"] = 0.3 * rng.standard_normal(n_q)
            layer["attn_k.bias"] = uneven(rng.standard_normal(n_k))
            layer["attn_v.bias"] = 0.1 * rng.standard_normal(n_v)
        if arch.head_norm != "none":
            whole = arch.head_norm == "all"
            layer["attn_q_norm.weight"] = norm(n_q if whole else shape.head_dim_k)
            layer["attn_k_norm.weight"] = uneven(norm(n_k if whole else shape.head_dim_k))
        if not arch.pre_norms:
            del layer["attn_norm.weight"], layer["ffn_norm.weight"]
        if arch.post_norms:
            layer["post_attention_norm.weight"] = norm(around=added)
            layer["post_ffw_norm.weight"] = norm(around=added)
        if shape.n_expert:
            del layer["ffn_gate.weight"], layer["ffn_up.weight"], layer["ffn_down.weight"]
            layer["ffn_gate_inp.weight"] = matrix(shape.n_expert, n_embd, 1.0)
            for name, n_out, n_in, gain in (
                ("gate", n_ff, n_embd, 1.0),
                ("up", n_ff, n_embd, 1.0),
                ("down", n_embd, n_ff, added),
            ):
                experts = [matrix(n_out, n_in, gain) for _ in range(shape.n_expert)]
                layer[f"ffn_{name}_exps.weight"] = np.stack(experts)
        if arch.fused:
            layer["attn_qkv.weight"] = np.concatenate([layer.pop(f"attn_{x}.weight") for x in "qkv"])
            layer["ffn_up.weight"] = np.concatenate([layer.pop(f"ffn_{x}.weight") for x in ("gate", "up")])
        out |= {f"blk.{il}.{key}": value for key, value in layer.items()}
    return out
