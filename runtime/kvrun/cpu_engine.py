"""The CPU engine: weights stay in the file's blocks and are multiplied by ggml, attention reads the packed cache.

The whole model is ggml's graph; attention is three operations of our own in it (`kvkernels.attend.cpu_ops`), run by
ggml's threads. Nothing is dequantized beyond the tile in work.
"""

from __future__ import annotations

import ctypes
import os
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kvkernels.attend.cpu import Workspace
from kvkernels.jit import CompileError, prepare

from .cache import KVCache
from .cpu_cache import CpuKVCache
from .cpu_graph import LayerMaps, LlamaGraph, Stage
from .engine import Engine, Wanted
from .errors import KvError, UnsupportedModelError
from .ggml import Backend, FileTensors, Graph, Memory, load_library
from .plan import CachePlan

if TYPE_CHECKING:
    from .models import Model

#: Tokens of one pass through the layers at most; longer chunks are cut.
MAX_CHUNK = 512
#: Rows whose logits are computed at a time: 512 rows of a vocabulary of 150k would be 300 MB.
OUTPUT_ROWS = 32
#: Passes up to this length run as one graph; longer ones layer by layer, so that Ctrl-C is heard.
ONE_GRAPH_TOKENS = 8
#: Graphs that a cache keeps, by number of tokens.
MAX_GRAPHS = 4

GRAPHS = (LlamaGraph,)


def default_threads() -> int:
    """Threads to use: the cores that this process may run on."""
    try:
        return max(len(os.sched_getaffinity(0)), 1)
    except AttributeError:  # not on this platform
        return os.cpu_count() or 1


class CpuEngine(Engine):
    """Runs a model of the llama family on the CPU; same interface and same results as `Engine`, in float32.

    n_threads: None takes every core.  Raises GgmlError or UnsupportedModelError, with the way out, where it cannot run.
    """

    name = "cpu"

    def __init__(self, model: Model, *, dtype: torch.dtype = torch.float32, n_threads: int | None = None) -> None:
        if dtype != torch.float32:
            raise KvError(f"the CPU engine computes in float32, not {dtype}; use --engine reference")
        super().__init__(model, dtype=dtype)
        graph = next((g for g in GRAPHS if model.config.arch in g.arch), None)
        if graph is None:
            supported = ", ".join(name for g in GRAPHS for name in g.arch)
            raise UnsupportedModelError(
                f"the CPU engine has no graph for architecture {model.config.arch!r} (it has {supported}); "
                "use --engine reference"
            )
        if "blk.0.ffn_gate.weight" not in model.weights or "blk.0.attn_q.weight" not in model.weights:
            raise UnsupportedModelError(
                "the CPU engine has no graph for experts or for matrices that lie in one tensor; use --engine reference"
            )
        if any(d % 8 for shape in model.config.geometry for d in (shape.head_dim_k, shape.head_dim_v)):
            raise UnsupportedModelError(
                "the CPU engine takes heads of a multiple of 8 channels, which this model's are not; "
                "use --engine reference"
            )
        try:
            prepare()
        except CompileError as error:
            raise KvError(f"the CPU engine cannot compile its kernels ({error}); use --engine reference") from error
        self.lib = load_library()
        self.n_threads = n_threads or default_threads()
        self.backend = Backend(self.lib, self.n_threads)
        self.weights = FileTensors(self.lib, model.file)
        self.work = Workspace(self.n_threads, MAX_CHUNK)
        config = model.config
        self.memory = Memory(self.backend)
        self._tokens_in = self.memory.tensor(np.zeros(MAX_CHUNK, np.int32))
        self._positions = self.memory.tensor(np.zeros(MAX_CHUNK, np.int32))
        self._x = self.memory.tensor(np.zeros((MAX_CHUNK, config.n_embd), np.float32))
        self._x_out = self.memory.tensor(np.zeros((OUTPUT_ROWS, config.n_embd), np.float32))
        factors = self.weights.optional("rope_freqs.weight")
        self.graph = graph(model, self.weights, factors)
        self._outputs: dict[int, tuple[Graph, int]] = {}

    @staticmethod
    def check_plan(plan: CachePlan) -> None:
        """Raise KvError where a plan holds what the compiled attention cannot read."""
        if any(shape.sliding for shape in plan.geometry):
            raise KvError("the CPU engine has no sliding windows; use --engine reference")
        specs = (head.spec for layer in (*plan.k, *plan.v) for head in layer)
        other = next((spec.code for spec in specs if spec.emulates), None)
        if other is not None:
            raise KvError(f"the CPU engine has no {other} blocks; use --engine reference")

    def new_cache(self, plan: CachePlan, n_ctx: int) -> CpuKVCache:
        """An empty cache for `n_ctx` tokens; KvError as `check_plan`."""
        self.check_plan(plan)
        layers = range(self.model.config.n_layer)
        scales = [self.model.attention_scale(il) for il in layers]
        shared = {"scales": scales, "work": self.work, "rope_of": self.model.rope_of}
        return CpuKVCache(plan, n_ctx, n_head=self.model.config.n_head, **shared)  # type: ignore[arg-type]

    def forward(self, tokens: Sequence[int], cache: KVCache, *, logits: Wanted = "last") -> Tensor:
        """As `Engine.forward`."""
        ids = self._tokens(tokens)
        if not isinstance(cache, CpuKVCache):
            raise TypeError("this engine works on caches that its new_cache made")
        cache.check_room(len(ids))
        n_vocab = self.model.config.n_vocab
        if len(ids) <= MAX_CHUNK:
            return self._pass(ids, cache, logits)
        start, parts = cache.mark(), []
        try:
            for first in range(0, len(ids), MAX_CHUNK):
                last = first + MAX_CHUNK >= len(ids)
                wanted = logits if logits == "all" or last else "none"
                parts.append(self._pass(ids[first : first + MAX_CHUNK], cache, wanted))
        except BaseException:
            cache.rewind(start)
            raise
        return torch.cat(parts) if parts else torch.empty(0, n_vocab)

    def _pass(self, ids: Tensor, cache: CpuKVCache, logits: Wanted) -> Tensor:
        n = len(ids)
        stages = self._stages(cache, n)
        self.memory.array(self._tokens_in)[: 4 * n].view(np.int32)[:] = ids.numpy()
        self.memory.array(self._positions)[: 4 * n].view(np.int32)[:] = np.arange(cache.n_tokens, cache.n_tokens + n)
        self.work.begin(cache.n_tokens, n, cache.turn)
        for stage in stages:
            stage.graph.compute()
        cache.check_numbers()
        cache.count_reads(n)
        cache.commit(n)
        if logits == "none":
            return torch.empty(0, self.model.config.n_vocab)
        return self._logits(0 if logits == "all" else n - 1, n)

    def _stages(self, cache: CpuKVCache, n: int) -> list[Stage]:
        """The graphs that take `n` tokens through all layers of this cache."""
        kept = cache.__dict__.setdefault("_graphs", CacheGraphs(self, cache))
        return kept.get(n)

    def _view(self, g: Graph, tensor: int, n: int) -> int:
        width = self.model.config.n_embd
        return g.op("view_2d", tensor, width, n, 4 * width, 0)

    def build(self, cache: CpuKVCache, maps: Sequence[LayerMaps], n: int) -> list[Stage]:
        """Build and allocate the graphs for `n` tokens."""
        n_layer = self.model.config.n_layer
        per_stage = n_layer if n <= ONE_GRAPH_TOKENS else 1
        stages = []
        for first in range(0, n_layer, per_stage):
            stage = Stage(self.backend, per_stage)
            g = stage.graph
            positions = g.op("view_1d", self._positions, n, 0)
            x = self.graph.embed(g, g.op("view_1d", self._tokens_in, n, 0)) if first == 0 else self._view(g, self._x, n)
            for il in range(first, min(first + per_stage, n_layer)):
                call = cache.paged[il].call.copy()
                x, places = self.graph.block(g, il, x, positions, n, cache.paged[il], call, maps[il])
                stage.add_call(call, places)
            stage.finish(x, self._view(g, self._x, n))
            stages.append(stage)
        return stages

    def _logits(self, first: int, stop: int) -> Tensor:
        """Logits of rows `first .. stop - 1` of what left the last layer."""
        config = self.model.config
        out = torch.empty(stop - first, config.n_vocab)
        row = 4 * config.n_embd
        source, target = (self.memory.array(t).ctypes.data for t in (self._x, self._x_out))
        for start in range(first, stop, OUTPUT_ROWS):
            n = min(OUTPUT_ROWS, stop - start)
            graph, result = self._output(n)
            ctypes.memmove(target, source + start * row, n * row)
            graph.compute()
            place = out.data_ptr() + (start - first) * 4 * config.n_vocab
            ctypes.memmove(place, graph.address(result), n * 4 * config.n_vocab)
        return out

    def _output(self, n: int) -> tuple[Graph, int]:
        made = self._outputs.get(n)
        if made is not None and made[0].current:
            return made
        if made is not None:
            made[0].close()
        g = Graph(self.backend, 16)
        result = self.graph.output(g, self._view(g, self._x_out, n))
        self.lib.ggml_set_output(result)
        g.want(result)
        g.allocate()
        self._outputs[n] = g, result
        return g, result


class CacheGraphs:
    """The graphs of one cache, a few numbers of tokens at a time, and its transforms as ggml tensors."""

    def __init__(self, engine: CpuEngine, cache: CpuKVCache) -> None:
        self.engine, self.cache = engine, cache
        self.memory = Memory(engine.backend, 6 * len(cache.paged))
        self.maps = [LayerMaps.of(self.memory, k, v) for k, v in cache.maps]
        self._by_n: OrderedDict[int, list[Stage]] = OrderedDict()

    def get(self, n: int) -> list[Stage]:
        """The graphs for `n` tokens, built when they are first asked for or when their memory has moved."""
        stages = self._by_n.get(n)
        if stages is None or not all(stage.graph.current for stage in stages):
            for stage in stages or ():
                stage.graph.close()
            stages = self.engine.build(self.cache, self.maps, n)
            if not all(stage.graph.current for stage in stages):
                # The first of them made the shared memory grow in steps; now it is large enough.
                for stage in stages:
                    stage.graph.close()
                stages = self.engine.build(self.cache, self.maps, n)
            self._by_n[n] = stages
            while len(self._by_n) > MAX_GRAPHS:
                _, old = self._by_n.popitem(last=False)
                for stage in old:
                    stage.graph.close()
        self._by_n.move_to_end(n)
        return stages
