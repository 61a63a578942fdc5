"""Writing: byte for byte what was there, plus what is added; and nothing at all where it fails."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader

from kvrun.errors import KvError
from kvrun.gguf_file import GGUFFile
from kvrun.gguf_write import encode_kv, rewrite, write_metadata_file
from tools.make_tiny_model import make_tiny_model

ADDED: dict[str, Any] = {
    "kvconv.version": 1,
    "kvconv.big": 1 << 40,
    "kvconv.flag": False,
    "kvconv.share": 0.1,
    "kvconv.name": "Grüße",
    "kvconv.names": ["a", "", "ü"],
    "kvconv.none": [],
    "kvconv.order8": np.arange(64, dtype=np.uint8)[::-1],
    "kvconv.order16": np.arange(300, dtype=np.uint16),
    "kvconv.i32": np.array([-1, 2], dtype=np.int32),
    "kvconv.u32": np.array([1 << 31], dtype=np.uint32),
    "kvconv.u64": np.array([1 << 63], dtype=np.uint64),
    "kvconv.f32": np.array([0.5, -2.0], dtype=np.float32),
    "kvconv.empty": np.array([], dtype=np.float32),
}


@pytest.fixture
def model(tmp_path: Path) -> GGUFFile:
    return GGUFFile(make_tiny_model("llama", tmp_path / "model.gguf"))


def check_values(file: GGUFFile) -> None:
    for key, value in ADDED.items():
        found = file.get(key)
        if isinstance(value, np.ndarray):
            assert found.dtype == value.dtype
            np.testing.assert_array_equal(found, value)
        else:
            assert type(found) is type(value)
            assert found == (float(np.float32(value)) if isinstance(value, float) else value)


def test_added_keys_read_back_and_dropping_them_gives_the_source_back(tmp_path: Path, model: GGUFFile) -> None:
    progress: list[tuple[int, int]] = []
    out = tmp_path / "with recipe ü.gguf"
    rewrite(model, out, drop_prefix="kvconv.", add=ADDED, on_progress=lambda *at: progress.append(at))
    written = GGUFFile(out)
    check_values(written)
    assert written.keys() == model.keys() + list(ADDED)
    assert all(written.raw_kv(key) == model.raw_kv(key) for key in model)
    assert written.tensor_infos_raw == model.tensor_infos_raw
    assert written.data_raw().tobytes() == model.data_raw().tobytes()
    assert written.fingerprint() == model.fingerprint()
    assert progress[-1] == (out.stat().st_size, out.stat().st_size)

    rewrite(written, tmp_path / "replaced.gguf", drop_prefix="kvconv.", add={"kvconv.version": 2})
    assert [k for k in GGUFFile(tmp_path / "replaced.gguf") if k.startswith("kvconv.")] == ["kvconv.version"]
    rewrite(written, tmp_path / "stripped.gguf", drop_prefix="kvconv.", add={})
    assert (tmp_path / "stripped.gguf").read_bytes() == model.path.read_bytes()


def test_the_stock_reader_agrees(tmp_path: Path, model: GGUFFile) -> None:
    filled = {key: value for key, value in ADDED.items() if not hasattr(value, "__len__") or len(value)}
    rewrite(model, tmp_path / "out.gguf", drop_prefix="", add=filled)
    stock = GGUFReader(tmp_path / "out.gguf")
    for key, value in filled.items():
        found = stock.fields[key].contents()
        assert found == (value.tolist() if isinstance(value, np.ndarray) else pytest.approx(value)), key
    assert [tensor.name for tensor in stock.tensors] == list(model.tensors)


def test_a_file_of_metadata_alone(tmp_path: Path) -> None:
    out = tmp_path / "side.gguf"
    write_metadata_file(out, {"general.type": "kvconv", **ADDED})
    file = GGUFFile(out)
    assert file.tensors == {} and file.get("general.type") == "kvconv" and file.version == 3
    check_values(file)
    assert out.stat().st_mode & 0o777 == 0o666 & ~current_umask()


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize(
    "value", [-1, 1 << 64, None, [1, 2], {}, np.zeros((2, 2)), np.array(["a"]), object()], ids=repr
)
def test_values_without_a_type_are_refused(value: Any) -> None:
    with pytest.raises(ValueError):
        encode_kv("key", value)


@pytest.mark.parametrize("key", ["", "ü", "k" * 65536], ids=["empty", "not ASCII", "too long"])
def test_bad_keys_are_refused(key: str) -> None:
    with pytest.raises(ValueError):
        encode_kv(key, 1)


def test_keys_that_would_break_the_file_are_refused(tmp_path: Path, model: GGUFFile) -> None:
    for prefix, add in (("", {"general.name": "twice"}), ("", {"general.alignment": 64})):
        with pytest.raises(ValueError):
            rewrite(model, tmp_path / "out.gguf", drop_prefix=prefix, add=add)
    assert os.listdir(tmp_path) == ["model.gguf"]


def test_the_source_is_never_written_to(tmp_path: Path, model: GGUFFile) -> None:
    before = model.path.read_bytes()
    link = tmp_path / "link.gguf"
    link.symlink_to(model.path)
    for out in (model.path, link, tmp_path / "." / "model.gguf"):
        with pytest.raises(KvError, match="never changed"):
            rewrite(model, out, drop_prefix="kvconv.", add={}, force=True)
    assert model.path.read_bytes() == before


def test_what_exists_stays_without_force(tmp_path: Path, model: GGUFFile) -> None:
    out = tmp_path / "out.gguf"
    out.write_bytes(b"precious")
    with pytest.raises(KvError, match="--force"):
        rewrite(model, out, drop_prefix="kvconv.", add={})
    with pytest.raises(KvError, match="--force"):
        write_metadata_file(out, {"a": 1})
    assert out.read_bytes() == b"precious"
    write_metadata_file(out, {"a": 1}, force=True)
    assert GGUFFile(out).get("a") == 1


def test_bad_targets_end_in_one_line(tmp_path: Path, model: GGUFFile) -> None:
    for out, why in ((tmp_path / "no" / "out.gguf", "does not exist"), (tmp_path, "is a folder")):
        with pytest.raises(KvError, match=why) as caught:
            rewrite(model, out, drop_prefix="kvconv.", add={}, force=True)
        assert str(caught.value).isprintable()


def test_a_folder_that_cannot_be_written_to(model: GGUFFile) -> None:
    """/proc takes no new files, whoever asks; a mode of 0500 would not stop root."""
    with pytest.raises(KvError, match="cannot be written"):
        rewrite(model, Path("/proc/out.gguf"), drop_prefix="kvconv.", add={})


@contextmanager
def files_limited_to(n_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, model: GGUFFile) -> None:
    """A limit on the size of files fails a write half-way, as a disk that fills up does."""
    out = tmp_path / "out.gguf"
    out.write_bytes(b"precious")
    with files_limited_to(100_000), pytest.raises(KvError, match="disk is full") as caught:
        rewrite(model, out, drop_prefix="kvconv.", add={}, force=True)
    assert str(caught.value).isprintable()
    assert out.read_bytes() == b"precious" and sorted(os.listdir(tmp_path)) == ["model.gguf", "out.gguf"]


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, RuntimeError])
def test_an_interruption_leaves_nothing(tmp_path: Path, model: GGUFFile, interruption: type[BaseException]) -> None:
    def stop(done: int, total: int) -> None:
        assert any(name.endswith(".tmp") for name in os.listdir(tmp_path))
        raise interruption

    with pytest.raises(interruption):
        rewrite(model, tmp_path / "out.gguf", drop_prefix="kvconv.", add={}, on_progress=stop)
    assert os.listdir(tmp_path) == ["model.gguf"]
