"""SKVQ's channel orders: clusters of equal size, and an order only where it helps when that is asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from kvconv.cli import app
from kvconv.collect import ChannelStatistics
from kvconv.skvq import CLIP, cluster_order, fit_head
from kvrun.cli import app as kvrun_app
from kvrun.console import exit_status
from kvrun.errors import KvError
from kvrun.gguf_file import GGUFFile
from kvrun.recipe import Recipe

PROSE = "It was the best of times, it was the worst of times, and the children went home with their mothers. " * 30


def interleaved() -> torch.Tensor:
    """float32 [2, 90, 24]: channels of three sizes, mixed up so that every 8 neighbours hold all of them."""
    sizes = torch.tensor([0.1, 1.0, 20.0]).repeat(8)
    return torch.randn(2, 90, 24, generator=torch.Generator().manual_seed(0)) * sizes


def test_clusters_hold_channels_of_like_range() -> None:
    order = cluster_order(ChannelStatistics.of(interleaved()), 8)
    assert sorted(order.tolist()) == list(range(24))
    assert sorted(sorted(order[i : i + 8].tolist()) for i in (0, 8, 16)) == [
        list(range(start, 24, 3)) for start in range(3)
    ]


def test_clusters_see_the_minimum_and_not_only_the_width() -> None:
    """Two channels as wide as each other but apart do not belong together."""
    x = torch.rand(1, 200, 16, generator=torch.Generator().manual_seed(0))
    x[..., ::2] += 50.0
    order = cluster_order(ChannelStatistics.of(x), 8)
    assert {frozenset(order[:8].tolist()), frozenset(order[8:].tolist())} == {
        frozenset(range(0, 16, 2)),
        frozenset(range(1, 16, 2)),
    }


def test_a_head_is_ordered_where_it_helps_and_safe_leaves_the_others() -> None:
    x = interleaved()
    for safe in (False, True):
        fitted = fit_head(x, 2, 8, safe=safe)
        assert fitted.plan.transform.order is not None and fitted.plan.clip == CLIP
        assert fitted.after < 0.95 * fitted.before
    sorted_already = x[..., torch.from_numpy(cluster_order(ChannelStatistics.of(x), 8).astype(np.int64))]
    assert fit_head(sorted_already, 2, 8, safe=False).plan.transform.order is not None
    kept = fit_head(sorted_already, 2, 8, safe=True)
    assert kept.plan.transform.order is None and kept.after == kept.before


def test_a_group_of_the_whole_head_has_nothing_to_order() -> None:
    fitted = fit_head(interleaved(), 2, 128, safe=False)
    assert fitted.plan.transform.order is None and fitted.plan.spec.group == 24
    with pytest.raises(KvError, match="65504"):
        fit_head(interleaved() * 1e5, 2, 8, safe=False)


@pytest.mark.parametrize("safe", [False, True])
def test_from_text_to_a_measured_preset(
    safe: bool, tiny_model: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, made, text = tiny_model("llama", n_layer=2), tmp_path / "recipe.gguf", tmp_path / "text.txt"
    text.write_text(PROSE)
    argv = ["skvq", str(model), "-f", str(text), "-o", str(made), "--sidecar", "--group", "8", "--chunks", "2"]
    argv += ["--chunk-tokens", "64"]
    assert exit_status(app, [*argv, "--safe"] if safe else argv, prog="kvconv") == 0
    recipe = Recipe.from_metadata(GGUFFile(made))
    assert (recipe.sinks, recipe.window) == (5, 128)
    ordered = [h.transform.order is not None for side in (recipe.k, recipe.v) for layer in side for h in layer]
    assert all(ordered) or safe
    method, other = ("skvq-safe", "skvq") if safe else ("skvq", "skvq-safe")
    assert recipe.provenance.objective == method
    measure = ["perplexity", str(model), "-f", str(text), "-c", "192", "--chunks", "1", "--recipe", str(made)]
    capsys.readouterr()
    assert exit_status(kvrun_app, [*measure, "--preset", method, "-o", "csv"], prog="kvrun") == 0
    assert f",{method}," in capsys.readouterr().out
    assert exit_status(kvrun_app, [*measure, "--preset", other], prog="kvrun") == 1
    assert f"was made for {method}" in capsys.readouterr().err
