"""Write a tiny random-weight GGUF model that kvrun and llama.cpp both load and evaluate.

    python tools/make_tiny_model.py llama OUT.gguf [--n-layer 2 --n-head 4 --n-head-kv 2 --head-dim 64 --seed 0 ...]

Tests call `from tools.make_tiny_model import make_tiny_model`, then `make_tiny_model("qwen2", tmp_path / "tiny.gguf",
n_layer=3, seed=7)`. The file is F32, 0.6 MB (llama) or 2.4 MB (qwen2), with a byte-level vocabulary that tokenizes any
text and a ChatML template. Its weights are scaled so that it behaves like a model in the ways that matter to a cache:
attention is neither uniform nor one-hot, the next token neither certain nor uniform, and key channels differ in size.

llama.cpp does not load every shape that kvrun does: its qwen2, olmo2 and phi3 need `n_embd = n_head * head_dim` (the
default here), and few architectures take a `head_dim_v` of their own or KV heads that differ from layer to layer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

if __name__ == "__main__":  # run as a script, the folder of `tools` is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.tiny_architectures import ARCHITECTURES, Shape, tensors

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
    yarn_from: int | None = None,
    n_expert: int = 0,
    split: int = 0,
    keys: dict[str, Any] | None = None,
    name: str = "tiny",
) -> Path:
    """Write the model and return its path.

    n_head_kv: one number, or one per layer.  head_dim_v: channels of a value head, those of a key head by default.
    n_embd: 64 by default, or what llama.cpp needs.  n_ctx: context length in the metadata, in tokens.
    tied: leave the output matrix out, so that the embedding serves.
    rope_scale: linear RoPE scaling.  rope_factors: write `rope_freqs.weight`, as Llama 3 has it (phi3: a set of them
    for short and one for long contexts).  yarn_from: context before YaRN stretched it by `rope_scale`, in tokens.
    split: write the model in parts of so many tensors, the first of which holds none; returns the path of the first.
    n_expert: experts of a layer, of which a token uses 2; 4 where the architecture always has them.
    keys: more metadata, without the `{arch}.` before them; they replace what would be written.
    """
    import gguf

    if arch not in ARCHITECTURES:
        raise ValueError(f"architecture must be one of {', '.join(ARCHITECTURES)}, not {arch!r}")
    kind = ARCHITECTURES[arch]
    n_expert = n_expert or (4 if kind.experts else 0)
    tied = tied and kind.tied
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    if n_embd is None:
        n_embd = n_head * head_dim if kind.whole else 64
    heads_kv = [n_head_kv] * n_layer if isinstance(n_head_kv, int) else list(n_head_kv)
    tokens, merges = vocabulary()
    writer = gguf.GGUFWriter(str(out), arch, split_max_tensors=split, small_first_shard=split > 0)
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
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR if yarn_from is None else gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope_scale)
    if yarn_from is not None:
        writer.add_rope_scaling_orig_ctx_len(yarn_from)
    if n_expert:
        writer.add_expert_count(n_expert)
        writer.add_expert_used_count(2)
        if kind.experts:
            writer.add_expert_feed_forward_length(n_ff)
    for key, value in {**kind.keys, **(keys or {})}.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add.get(type(value), writer.add_array)(f"{arch}.{key}", value)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(kind.pre)
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * len(_SPECIAL) + [gguf.TokenType.NORMAL] * (len(tokens) - 3))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(_CHATML)
    shape = Shape(n_layer, n_head, tuple(heads_kv), head_dim, head_dim_v, n_embd, n_ff, len(tokens), n_expert)
    weights = tensors(kind, shape, np.random.default_rng(seed))
    if tied:
        del weights["output.weight"]
    if rope_factors and arch == "phi3":
        weights["rope_factors_short.weight"] = np.linspace(1, 2, head_dim // 2)
        weights["rope_factors_long.weight"] = np.linspace(1, 8, head_dim // 2)
    elif rope_factors:
        weights["rope_freqs.weight"] = np.linspace(1, 8, head_dim // 2)
    for tensor_name, values in weights.items():
        writer.add_tensor(tensor_name, np.ascontiguousarray(values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    first = writer.format_shard_names(Path(out))[0]
    writer.close()
    return first


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
        "n-expert": 0,
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
