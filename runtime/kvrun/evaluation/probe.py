"""A probe of the cache that gives the figures: does it hold and return what its plan says?

Before any figure is printed, a few random keys and values go through a cache of the same kind, one layer at a time, and
what its attention returns is held against the definition, computed here from the plan alone: transform once, quantize,
restore, attend to what the visibility rule shows, undo the transform. A cache that returns full-precision keys, applies
or undoes a transform wrongly, or ignores sinks and window is far from the definition, whatever its counters say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvkernels.quantize import decode, encode, round_queries_ggml
from kvrun.cache import KVCache, head_matrix
from kvrun.errors import MeasurementError
from kvrun.plan import CachePlan, HeadPlan
from kvrun.visibility import first_seen, packed_end

if TYPE_CHECKING:
    from kvrun.layers import Rope

#: Error allowed, as a share of what quantizing changes: a code that float32 rounds the other way stays far below it.
TOLERANCE = 0.2
#: Queries that are compared, the latest ones.
_N_QUERIES = 4
#: Longest sliding window that a probe is made to go past, in tokens.
_MOST_SLIDING = 1024


def check_cache_obeys(plan: CachePlan, n_ctx: int, rope_of: Callable[[int], Rope] | None = None) -> None:
    """Raise MeasurementError, naming the layer, where a cache of this plan does not compute what the plan says.

    n_ctx: tokens of a window; the probe is no longer. Layers that store alike are probed once. rope_of: as `KVCache`
    takes it; needed where the plan rotates.
    """
    seen: set[tuple[object, ...]] = set()
    for il, shape in enumerate(plan.geometry):
        heads = (*plan.k[il], *plan.v[il])
        alike = (shape, *(_storage(head) for head in heads))
        if alike in seen or not any(head.spec.quantized for head in heads):
            continue
        seen.add(alike)
        _probe_layer(plan, il, n_ctx, None if rope_of is None else rope_of(il))


def _storage(head: HeadPlan) -> tuple[object, ...]:
    """What decides how a head is stored; learned arrays count as alike only where they are the same object."""
    transform = head.transform
    return (
        head.spec,
        head.clip,
        transform.hadamard,
        transform.rotating,
        *map(id, (transform.order, transform.matrix, transform.offset)),
    )


def _probe_layer(plan: CachePlan, il: int, n_ctx: int, rope: Rope | None) -> None:
    shape, heads_k, heads_v = plan.geometry[il], plan.k[il], plan.v[il]
    block = max(head.spec.block for head in (*heads_k, *heads_v))
    n = min(n_ctx, plan.sinks + plan.window + 2 * block + 6 + min(shape.sliding, _MOST_SLIDING))
    generator = torch.Generator().manual_seed(il)
    n_kv = shape.n_head_kv
    # Channels of very different size, as real ones are: a wrong order or rotation then shows.
    spread_k = torch.exp(torch.randn(n_kv, 1, shape.head_dim_k, generator=generator, dtype=torch.float64))
    spread_v = torch.exp(torch.randn(n_kv, 1, shape.head_dim_v, generator=generator, dtype=torch.float64))
    k = torch.randn(n_kv, n, shape.head_dim_k, generator=generator, dtype=torch.float64) * spread_k
    v = torch.randn(n_kv, n, shape.head_dim_v, generator=generator, dtype=torch.float64) * spread_v
    q = torch.randn(n_kv, n, shape.head_dim_k, generator=generator, dtype=torch.float64) / spread_k
    scale = shape.head_dim_k**-0.5

    one = CachePlan((shape,), (heads_k,), (heads_v,), plan.sinks, plan.window, plan.type_k, plan.type_v)
    cache = KVCache(one, n, torch.float64, rope_of=None if rope is None else lambda _: rope)
    half = n // 2
    parts = []
    for piece in (slice(0, half), slice(half, n)):
        parts.append(cache.attend(0, q[:, piece], k[:, piece], v[:, piece], scale))
        cache.commit(piece.stop - piece.start)
    got = torch.cat(parts, 1)[:, -_N_QUERIES:]

    quantized, plain = torch.empty_like(got), torch.empty_like(got)
    blocks = [max(head.spec.block for head in side) for side in (heads_k, heads_v)]
    for ih in range(n_kv):
        for i in range(got.shape[1]):
            t = n - got.shape[1] + i
            for out, stored in ((quantized, True), (plain, False)):
                keys, values = (
                    _seen(x[ih, : t + 1], head, plan, block, stored, rope)
                    for x, head, block in zip((k, v), (heads_k[ih], heads_v[ih]), blocks, strict=True)
                )
                query = _query(q[ih, t], heads_k, ih) if stored else q[ih, t]
                first = first_seen(t + 1, shape.sliding)
                weights = torch.softmax(keys[first:] @ query * scale, 0)
                out[ih, i] = weights @ values[first:]
    # An offset of the keys shifts all scores of a query alike and leaves no trace in the outputs.
    error, effect = (float((x - quantized).square().sum().sqrt()) for x in (got, plain))
    if not error <= TOLERANCE * effect:
        raise MeasurementError(
            f"refused: the cache of {plan.type_k}/{plan.type_v} does not compute what its plan says (layer {il}: error "
            f"{error:.2g} where quantizing changes {effect:.2g}); the figures would not be this cache's, please report "
            "this"
        )


def _seen(x: Tensor, head: HeadPlan, plan: CachePlan, block: int, stored: bool, rope: Rope | None) -> Tensor:
    """The tokens x [n, d] of one head as the last query sees them, in the model's own space, float64.

    stored: through the quantizer where the visibility rule says packed; else as they are.
    """
    if not stored:
        return x
    transform, d = head.transform, x.shape[-1]
    offset = torch.zeros(x.shape, dtype=torch.float64)
    if transform.offset is not None:
        offset += torch.from_numpy(transform.offset)
    if transform.rotating and rope is not None:
        offset = rope(offset[None], torch.arange(len(x)))[0]
    t = head_matrix(transform, d)
    t = torch.eye(d, dtype=torch.float64) if t is None else t
    y = ((x - offset) @ t.T).half()
    full = y.double()
    end = packed_end(len(x), plan.sinks, plan.window, block)
    if head.spec.quantized and end > plan.sinks:
        full[plan.sinks : end] = _restored(y[None, plan.sinks : end], head)
    return full @ torch.linalg.inv(t).T + offset


def _query(q: Tensor, heads: tuple[HeadPlan, ...], ih: int) -> Tensor:
    """The query q [d] in the model's own space: rounded in the stored space where llama.cpp's blocks are emulated."""
    if not all(head.spec.emulates for head in heads):
        return q
    t = head_matrix(heads[ih].transform, len(q))
    t = torch.eye(len(q), dtype=torch.float64) if t is None else t
    return t.T @ round_queries_ggml((torch.linalg.inv(t).T @ q)[None, None])[0, 0]


def _restored(y: Tensor, head: HeadPlan) -> Tensor:
    clip = torch.tensor([head.clip]) if head.clip != 1.0 else None
    return decode(encode(y, head.spec, clip), head.spec, torch.float64)[0]
