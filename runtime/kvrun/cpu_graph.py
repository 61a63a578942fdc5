"""The graph of the llama family in ggml, with our attention in its middle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvkernels.attend.cpu import PagedLayer, set_fields
from kvkernels.attend.cpu_call import CALL

from .cpu_cache import SideMaps
from .ggml import Backend, FileTensors, Graph, Memory
from .ggml.library import ROPE_NEOX, ROPE_NORMAL
from .rope_scaling import TURNS_KEPT, TURNS_STRETCHED

if TYPE_CHECKING:
    from .models import Model

#: Nodes of one layer at most, counted generously.
NODES_PER_LAYER = 64


@dataclass(frozen=True)
class LayerMaps:
    """The transforms of one layer as ggml tensors, each None where it is the identity.

    k: `T`, v: `T`, q: `T^-T` of the keys, o: `T^-1` of the values; ggml [d, d, n_kv].
    offset, rotating: of keys after and before RoPE, ggml [d, 1, n_kv].
    """

    k: int | None = None
    v: int | None = None
    q: int | None = None
    o: int | None = None
    offset: int | None = None
    rotating: int | None = None

    @classmethod
    def of(cls, memory: Memory, keys: SideMaps, values: SideMaps) -> LayerMaps:
        """Copy the matrices of a layer to ggml."""

        def tensor(x: object) -> int | None:
            return None if x is None else memory.tensor(np.ascontiguousarray(x.numpy(), np.float32))  # type: ignore[attr-defined]

        return cls(
            k=tensor(keys.t),
            v=tensor(values.t),
            q=tensor(None if keys.t_inverse is None else keys.t_inverse.transpose(1, 2)),
            o=tensor(values.t_inverse),
            offset=tensor(None if keys.offset is None else keys.offset[:, None, :]),
            rotating=tensor(None if keys.rotating is None else keys.rotating[:, None, :]),
        )


class LlamaGraph:
    """Writes the layers of one model: pre-norm blocks, grouped-query attention, SwiGLU.

    weights: the model's tensors.  positions, freq_factors: ggml tensors, the latter None for most models.
    """

    #: `general.architecture` of the models whose graph this is.
    arch = ("llama", "qwen2")

    def __init__(self, model: Model, weights: FileTensors, freq_factors: int | None) -> None:
        self.config, self.weights, self.freq_factors = model.config, weights, freq_factors

    def _norm(self, g: Graph, x: int, name: str) -> int:
        return g.op("mul", g.op("rms_norm", x, self.config.rms_eps), self.weights[name])

    def _linear(self, g: Graph, x: int, name: str) -> int:
        y = g.op("mul_mat", self.weights[f"{name}.weight"], x)
        return g.op("add", y, self.weights[f"{name}.bias"]) if f"{name}.bias" in self.weights else y

    def _rope(self, g: Graph, x: int, positions: int) -> int:
        c = self.config
        mode = ROPE_NEOX if c.rope_style == "neox" else ROPE_NORMAL
        scaling = c.rope_scaling
        blend = 1.0 if scaling.yarn else 0.0
        rest = (c.n_rot, mode, scaling.n_ctx_orig, c.rope_theta, 1.0 / scaling.factor, blend, scaling.magnitude)
        return g.op("rope_ext", x, positions, self.freq_factors, *rest, TURNS_KEPT, TURNS_STRETCHED)

    def embed(self, g: Graph, tokens: int) -> int:
        """What enters the first block, ggml [n_embd, n]."""
        return g.op("get_rows", self.weights["token_embd.weight"], tokens)

    def output(self, g: Graph, x: int) -> int:
        """Logits, ggml [n_vocab, n]."""
        head = "output" if "output.weight" in self.weights else "token_embd"
        return self._linear(g, self._norm(g, x, "output_norm.weight"), head)

    def block(
        self, g: Graph, il: int, x: int, positions: int, n: int, layer: PagedLayer, call: np.ndarray, maps: LayerMaps
    ) -> tuple[int, dict[str, tuple[int, int, int]]]:
        """Layer `il` for `n` tokens.  x: ggml [n_embd, n].

        layer, call: the cache's steps and what they are called with.  Returns the layer's result and where the
        steps find `q`, `k`, `v`, `out` and, for rotating offsets, `raw`: (tensor, bytes between heads, bytes between
        tokens).
        """
        c, shape, name = self.config, layer.shape, f"blk.{il}."
        h = self._norm(g, x, f"{name}attn_norm.weight")
        q = g.op("reshape_3d", self._linear(g, h, f"{name}attn_q"), shape.d_k, shape.n_head, n)
        k = g.op("reshape_3d", self._linear(g, h, f"{name}attn_k"), shape.d_k, shape.n_kv, n)
        v = g.op("reshape_3d", self._linear(g, h, f"{name}attn_v"), shape.d_v, shape.n_kv, n)
        if maps.rotating is not None:
            # RoPE is linear: what is taken away before it has turned with the key after it.
            k = g.op("sub", k, g.op("reshape_3d", maps.rotating, shape.d_k, shape.n_kv, 1))
        q, k = self._rope(g, q, positions), self._rope(g, k, positions)
        if maps.offset is not None:
            k = g.op("sub", k, g.op("reshape_3d", maps.offset, shape.d_k, shape.n_kv, 1))
        places = {
            "q": self._mapped(g, q, maps.q, shape.d_k, shape.n_head, n),
            "k": self._mapped(g, k, maps.k, shape.d_k, shape.n_kv, n),
            "v": self._mapped(g, v, maps.v, shape.d_v, shape.n_kv, n),
        }
        if maps.rotating is not None:
            places["raw"] = q, 4 * shape.d_k, 4 * shape.d_k * shape.n_head
        sources = {which: place[0] for which, place in places.items()}
        appended = g.custom([1], [sources["k"], sources["v"]], layer.append.address, call)
        out_shape = [shape.d_v, shape.n_head, n] if maps.o is None else [shape.d_v, n, shape.n_head]
        queries = [sources["q"], *([sources["raw"]] if "raw" in sources else [])]
        part = g.custom(out_shape, [*queries, appended], layer.attend.address, call)
        o = g.custom([], [appended], layer.combine.address, call, inplace=part)
        row = 4 * shape.d_v
        places["out"] = (part, row, row * shape.n_head) if maps.o is None else (part, row * n, row)
        if maps.o is not None:
            o = g.op("permute", g.op("mul_mat", maps.o, o), 0, 2, 1, 3)
            o = g.op("cont_2d", o, shape.d_v * shape.n_head, n)
        o = g.op("reshape_2d", o, shape.d_v * shape.n_head, n)
        x = g.op("add", self._linear(g, o, f"{name}attn_output"), x)
        h = self._norm(g, x, f"{name}ffn_norm.weight")
        h = g.op("swiglu_split", self._linear(g, h, f"{name}ffn_gate"), self._linear(g, h, f"{name}ffn_up"))
        x = g.op("add", self._linear(g, h, f"{name}ffn_down"), x)
        assert c.n_embd
        return x, places

    def _mapped(self, g: Graph, x: int, t: int | None, d: int, n_head: int, n: int) -> tuple[int, int, int]:
        """x, ggml [d, n_head, n], through a head's matrix; (tensor, bytes between heads, bytes between tokens)."""
        if t is None:
            return x, 4 * d, 4 * d * n_head
        return g.op("mul_mat", t, g.op("permute", x, 0, 2, 1, 3)), 4 * d * n, 4 * d


class Stage:
    """Some consecutive layers for a fixed number of tokens, ready to compute."""

    def __init__(self, backend: Backend, n_layers: int) -> None:
        self.graph = Graph(backend, NODES_PER_LAYER * n_layers + 16)
        self._calls: list[tuple[np.ndarray, dict[str, tuple[int, int, int]]]] = []

    def add_call(self, call: np.ndarray, places: dict[str, tuple[int, int, int]]) -> None:
        """Remember where a layer's steps find their tensors, to fill in when they have addresses."""
        self._calls.append((call, places))

    def finish(self, result: int, target: int) -> None:
        """The stage's result goes to `target`."""
        self.graph.want(self.graph.op("cpy", result, target))
        self.graph.allocate()
        for call, places in self._calls:
            for name, (tensor, head_bytes, token_bytes) in places.items():
                values = {
                    name: self.graph.address(tensor),
                    f"{name}_head": head_bytes,
                    f"{name}_token": token_bytes,
                }
                set_fields(call, CALL, **values)
