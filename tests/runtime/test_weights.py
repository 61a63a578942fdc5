"""Weights on demand: values, budget, rows, and weights that are not numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from kvrun import weights as weights_module
from kvrun.errors import GGUFError, KvError
from kvrun.gguf_file import GGUFFile
from kvrun.memory import available_bytes
from kvrun.weights import Weights
from tools.make_tiny_model import make_tiny_model

Q, K, EMBEDDING = "blk.0.attn_q.weight", "blk.0.attn_k.weight", "token_embd.weight"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("weights") / "tiny.gguf")


def poisoned(path: Path, out: Path, tensor: str, value: float, index: int = -1) -> GGUFFile:
    """A copy of the model in which one value of a tensor is replaced."""
    file = GGUFFile(path)
    content = np.frombuffer(path.read_bytes(), np.uint8).copy()
    info = file.tensors[tensor]
    content[info.offset : info.offset + info.n_bytes].view("<f4")[index] = value
    out.write_bytes(content.tobytes())
    return GGUFFile(out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_and_dtype(path: Path, dtype: torch.dtype) -> None:
    file = GGUFFile(path)
    found = Weights(file, dtype=dtype).get(Q)
    assert found.dtype == dtype and found.is_contiguous()
    np.testing.assert_array_equal(found.numpy(), file.dequantize(Q))


def test_the_first_that_fit_are_kept(path: Path) -> None:
    file = GGUFFile(path)
    q_bytes = file.tensors[Q].n_bytes
    weights = Weights(file, budget_bytes=q_bytes)
    first = weights.get(Q)
    assert weights.get(Q) is first and weights.kept_bytes == q_bytes
    assert weights.get(K) is not weights.get(K) and weights.kept_bytes == q_bytes
    weights.release()
    assert weights.kept_bytes == 0 and weights.get(K) is weights.get(K)
    nothing = Weights(file, budget_bytes=0)
    assert nothing.get(Q) is not nothing.get(Q) and nothing.kept_bytes == 0
    assert 0 < Weights(file).budget_bytes <= available_bytes()


def test_rows_are_the_same_kept_or_not(path: Path) -> None:
    index = torch.tensor([300, 0, 7, 7])
    weights = Weights(GGUFFile(path))
    before = weights.rows(EMBEDDING, index)
    assert weights.kept_bytes == 0  # asking for rows does not expand the matrix
    whole = weights.get(EMBEDDING)
    assert torch.equal(before, whole[index]) and torch.equal(weights.rows(EMBEDDING, index), whole[index])


def test_a_large_matrix_is_multiplied_in_pieces(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    n_in = GGUFFile(path).tensors[EMBEDDING].shape[1]
    monkeypatch.setattr(weights_module, "_PIECE_BYTES", 50 * n_in * 8)
    x = torch.randn(3, n_in, dtype=torch.float64)
    kept = Weights(GGUFFile(path), dtype=torch.float64)
    pieces = Weights(GGUFFile(path), dtype=torch.float64, budget_bytes=0)
    seen: list[int] = []
    expand = pieces._expand

    def counted(name: str, rows: slice | np.ndarray | None) -> torch.Tensor:
        seen.append(1)
        return expand(name, rows)

    monkeypatch.setattr(pieces, "_expand", counted)
    torch.testing.assert_close(pieces.linear(EMBEDDING, x), kept.linear(EMBEDDING, x), rtol=0, atol=1e-12)
    assert len(seen) > 2 and pieces.kept_bytes == 0
    bias = torch.randn(kept.get(EMBEDDING).shape[0], dtype=torch.float64)
    torch.testing.assert_close(pieces.linear(EMBEDDING, x, bias), kept.linear(EMBEDDING, x, bias), rtol=0, atol=1e-12)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_numbers_name_the_tensor(path: Path, tmp_path: Path, value: float) -> None:
    weights = Weights(poisoned(path, tmp_path / "bad.gguf", Q, value))
    assert torch.isfinite(weights.get(K)).all()
    with pytest.raises(KvError, match=Q) as caught:
        weights.get(Q)
    assert "bad.gguf" in str(caught.value) and ";" in str(caught.value)


def test_a_poisoned_row_is_met_when_it_is_read(path: Path, tmp_path: Path) -> None:
    weights = Weights(poisoned(path, tmp_path / "bad.gguf", EMBEDDING, np.nan))
    last = GGUFFile(path).tensors[EMBEDDING].shape[0] - 1
    weights.rows(EMBEDDING, torch.tensor([0, last - 1]))
    with pytest.raises(KvError, match=EMBEDDING):
        weights.rows(EMBEDDING, torch.tensor([last]))


def test_huge_but_finite_weights_are_fine(path: Path, tmp_path: Path) -> None:
    """Their float32 sum overflows, which must not be taken for a damaged file."""
    poisoned(path, tmp_path / "a.gguf", K, 3e38, 0)
    file = poisoned(tmp_path / "a.gguf", tmp_path / "b.gguf", K, 3e38, 1)
    assert Weights(file).get(K)[0, :2].tolist() == pytest.approx([3e38, 3e38])


def test_a_missing_tensor_is_named(path: Path) -> None:
    weights = Weights(GGUFFile(path))
    assert Q in weights and "blk.9.attn_q.weight" not in weights
    with pytest.raises(GGUFError, match=r"blk\.9\.attn_q\.weight"):
        weights.get("blk.9.attn_q.weight")


def test_weights_made_in_inference_mode_still_take_part_in_gradients(path: Path) -> None:
    weights = Weights(GGUFFile(path))
    with torch.inference_mode():
        weights.get(Q)
    x = torch.ones(1, 64, requires_grad=True)
    weights.linear(Q, x).sum().backward()
    torch.testing.assert_close(x.grad, weights.get(Q).sum(0, keepdim=True))
