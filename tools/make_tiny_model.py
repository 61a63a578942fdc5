"""Write a tiny random-weight GGUF model that kvrun and llama.cpp both load and evaluate.

    python tools/make_tiny_model.py llama OUT.gguf [--n-layer 2 --n-head 4 --n-head-kv 2 --head-dim 64 --seed 0 ...]

Tests call `from tools.make_tiny_model import make_tiny_model`, then `make_tiny_model("qwen2", tmp_path / "tiny.gguf",
n_layer=3, seed=7)`. The file is F32, 0.6 MB (llama) or 2.4 MB (qwen2), with a byte-level vocabulary that tokenizes any
text and a ChatML template. Its weights are scaled so that it behaves like a model in the ways that matter to a cache:
attention is neither uniform nor one-hot, the next token neither certain nor uniform, and key channels differ in size.

llama.cpp does not load every shape that kvrun does: its qwen2 needs `n_embd = n_head * head_dim` (the default here),
and neither architecture takes a `head_dim_v` of its own or a number of KV heads that differs from layer to layer.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

# The commonest pairs of English, so that real merges happen; a leading space is written as G with a dot.
_MERGES = """Ġ t|h e|i n|r e|o n|Ġt he|e r|Ġ a|Ġ s|a t|Ġ w|o r|e n|Ġ o|Ġ c|i t|e s|n d|Ġ b|Ġo f|a n|e d|in g|Ġa nd|Ġ p
o u|Ġ f|a r|Ġ in|a l|Ġt o|i s|Ġ =|Ġ m|Ġ d|Ġ h|Ġ 1|i on|l e|a s|i c|v e|e nt|Ġ @|o m|Ġ l|Ġ n|Ġth at|Ġw as|r o""".replace(
    "\n", "|"
).split("|")
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# What differs between architectures: the pre-tokenizer, and whether queries, keys and values have biases.
_PRE_TOKENIZER = {"llama": "gpt-2", "qwen2": "qwen2"}
_QKV_BIAS = {"llama": False, "qwen2": True}
ARCHITECTURES = tuple(_PRE_TOKENIZER)


def _byte_letters() -> list[str]:
    """The letter that byte-level vocabularies write for each byte: itself where that is printable, else from 256 up."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


def vocabulary() -> tuple[list[str], list[str]]:
    """Tokens (special ones first) and merges."""
    merges = [merge for merge in _MERGES if merge]
    letters = _byte_letters()
    tokens = _SPECIAL + letters + [merge.replace(" ", "") for merge in merges]
    assert len(set(tokens)) == len(tokens)
    return tokens, merges


def make_tiny_model(
    arch: str,
    out: Path | str,
    *,
    n_layer: int = 2,
    n_head: int = 4,
    n_head_kv: int | Sequence[int] = 2,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    n_embd: int | None = None,
    n_ff: int = 96,
    n_ctx: int = 4096,
    seed: int = 0,
    tied: bool = True,
    rope_theta: float = 10000.0,
    rope_scale: float | None = None,
    rope_factors: bool = False,
    name: str = "tiny",
) -> Path:
    """Write the model and return its path.

    n_head_kv: one number, or one per layer.  head_dim_v: channels of a value head, those of a key head by default.
    n_embd: 64 by default, or what llama.cpp needs.  n_ctx: context length in the metadata, in tokens.
    tied: leave the output matrix out, so that the embedding serves.
    rope_scale: linear RoPE scaling.  rope_factors: write `rope_freqs.weight`, as Llama 3 has it (llama only).
    """
    import gguf

    if arch not in ARCHITECTURES:
        raise ValueError(f"architecture must be one of {', '.join(ARCHITECTURES)}, not {arch!r}")
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    if n_embd is None:
        n_embd = n_head * head_dim if arch == "qwen2" else 64
    heads_kv = [n_head_kv] * n_layer if isinstance(n_head_kv, int) else list(n_head_kv)
    tokens, merges = vocabulary()
    writer = gguf.GGUFWriter(str(out), arch)
    writer.add_name(name)
    writer.add_block_count(n_layer)
    writer.add_context_length(n_ctx)
    writer.add_embedding_length(n_embd)
    writer.add_feed_forward_length(n_ff)
    writer.add_head_count(n_head)
    writer.add_head_count_kv(n_head_kv if isinstance(n_head_kv, int) else heads_kv)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim_v)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope_theta)
    writer.add_layer_norm_rms_eps(1e-5)
    if rope_scale is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope_scale)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_PRE_TOKENIZER[arch])
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * len(_SPECIAL) + [gguf.TokenType.NORMAL] * (len(tokens) - 3))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(_CHATML)
    tensors = _tensors(
        arch, n_layer, n_head, heads_kv, head_dim, head_dim_v, n_embd, n_ff, len(tokens), np.random.default_rng(seed)
    )
    if tied:
        del tensors["output.weight"]
    if rope_factors:
        tensors["rope_freqs.weight"] = np.linspace(1, 8, head_dim // 2)
    for tensor_name, values in tensors.items():
        writer.add_tensor(tensor_name, np.ascontiguousarray(values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(out)


def _tensors(
    arch: str,
    n_layer: int,
    n_head: int,
    heads_kv: Sequence[int],
    head_dim_k: int,
    head_dim_v: int,
    n_embd: int,
    n_ff: int,
    n_vocab: int,
    rng: np.random.Generator,
) -> dict[str, np.ndarray]:
    def matrix(n_out: int, n_in: int, gain: float) -> np.ndarray:
        """Maps a vector of mean square 1 to one of mean square `gain` squared."""
        return rng.standard_normal((n_out, n_in)) * gain * n_in**-0.5

    def norm() -> np.ndarray:
        return 1 + 0.1 * rng.standard_normal(n_embd)

    def uneven(values: np.ndarray) -> np.ndarray:
        """Channels of different size, a few of them large, as keys have them."""
        sizes = np.exp(0.6 * rng.standard_normal(len(values)))
        return (values.T * sizes).T

    tensors = {
        "token_embd.weight": matrix(n_vocab, n_embd, 2.5),
        "output_norm.weight": norm(),
        "output.weight": matrix(n_vocab, n_embd, 2.5),
    }
    # Layers outweigh the embedding (2.5 / sqrt(n_embd)), or a tied output would only ever repeat its input.
    added = 1.5 * n_layer**-0.5
    for il in range(n_layer):
        n_q, n_k, n_v = n_head * head_dim_k, heads_kv[il] * head_dim_k, heads_kv[il] * head_dim_v
        layer: dict[str, np.ndarray] = {
            "attn_norm.weight": norm(),
            "attn_q.weight": matrix(n_q, n_embd, 1.2),
            "attn_k.weight": uneven(matrix(n_k, n_embd, 1.2)),
            "attn_v.weight": uneven(matrix(n_v, n_embd, 0.8)),
            "attn_output.weight": matrix(n_embd, n_head * head_dim_v, added),
            "ffn_norm.weight": norm(),
            "ffn_gate.weight": matrix(n_ff, n_embd, 1.0),
            "ffn_up.weight": matrix(n_ff, n_embd, 1.0),
            "ffn_down.weight": matrix(n_embd, n_ff, added),
        }
        if _QKV_BIAS[arch]:
            layer["attn_q.bias"] = 0.3 * rng.standard_normal(n_q)
            layer["attn_k.bias"] = uneven(rng.standard_normal(n_k))
            layer["attn_v.bias"] = 0.1 * rng.standard_normal(n_v)
        tensors |= {f"blk.{il}.{key}": value for key, value in layer.items()}
    return tensors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arch", choices=ARCHITECTURES)
    parser.add_argument("out", type=Path)
    for option, default in {
        "n-layer": 2,
        "n-head": 4,
        "n-head-kv": 2,
        "head-dim": 64,
        "n-embd": None,
        "n-ff": 96,
        "n-ctx": 4096,
        "seed": 0,
    }.items():
        parser.add_argument(
            f"--{option}",
            type=int,
            default=default,
            help="default: " + ("what llama.cpp needs" if default is None else str(default)),
        )
    parser.add_argument("--untied", action="store_true", help="write an output matrix of its own")
    arguments = vars(parser.parse_args())
    arguments["tied"] = not arguments.pop("untied")
    print(make_tiny_model(arguments.pop("arch"), arguments.pop("out"), **arguments))


if __name__ == "__main__":
    main()
