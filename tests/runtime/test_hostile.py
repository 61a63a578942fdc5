"""Hostile files through the command line, and chat templates that reach for Python: one line, exit 1."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from kvconv.cli import app as kvconv_app
from kvrun.cli import app as kvrun_app
from kvrun.console import exit_status
from kvrun.errors import KvError
from kvrun.gguf_file import GGUFFile
from kvrun.gguf_write import rewrite, write_metadata_file
from kvrun.tokenizer import Tokenizer
from tools.make_tiny_model import make_tiny_model

HELLO = [{"role": "user", "content": "hello"}]


def pairs(*raw: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(raw)) + b"".join(raw)


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value


CONTENTS = {
    "array of 2^63": pairs(pair(b"k", 9, struct.pack("<IQ", 4, 1 << 63))),
    "2^63 keys": b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 63),
    "2^63 tensors": b"GGUF" + struct.pack("<IQQ", 3, 1 << 63, 0),
    "key twice, with control characters": pairs(*[pair(b"\x1b[2J\nx", 4, bytes(4))] * 2),
    "truncated": b"GGUF" + bytes(3),
}


def only_line(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and lines[0].isprintable(), captured.err
    assert not captured.out
    return lines[0]


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS.keys())
def test_the_command_line_says_one_line(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad file ü.gguf"
    bad.write_bytes(content)
    for app, argv in (
        (kvconv_app, ["inspect", str(bad)]),
        (kvconv_app, ["strip", str(bad), "-o", str(tmp_path / "out.gguf")]),
        (kvrun_app, ["generate", "-m", str(bad), "-p", "hello"]),
    ):
        assert exit_status(app, argv) == 1
        assert "bad file ü.gguf" in only_line(capsys)
    assert not (tmp_path / "out.gguf").exists()


def test_the_longest_key_is_read_and_a_longer_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "k.gguf"
    path.write_bytes(pairs(pair(b"k" * 65535, 4, bytes(4))))
    assert GGUFFile(path).get("k" * 65535) == 0
    path.write_bytes(pairs(pair(b"k" * 65536, 4, bytes(4))))
    with pytest.raises(KvError, match="a key of 65536 bytes"):
        GGUFFile(path)


@pytest.mark.parametrize("value", ["x", -1.0, [], True])
def test_a_split_count_of_another_type_is_no_traceback(
    value: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.gguf"
    write_metadata_file(path, {"general.architecture": "nothing\x1b", "split.count": value})
    assert exit_status(kvrun_app, ["generate", "-m", str(path), "-p", "hello"]) == 1
    assert "not supported" in only_line(capsys)


def with_template(folder: Path, template: str) -> Path:
    base = GGUFFile(make_tiny_model("llama", folder / "base.gguf"))
    rewrite(
        base,
        folder / "model.gguf",
        drop_prefix="tokenizer.chat_template",
        add={"tokenizer.chat_template": template},
        force=True,
    )
    return folder / "model.gguf"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ raise_exception.__globals__['__builtins__'] }}",
        "{{ strftime_now.__func__.__globals__.keys() }}",
        "{{ (''|attr('__class__')).mro() }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ raise_exception('two\\nlines \\x1b[2J') }}",
        "{% for i in range(10 ** 12) %}x{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_reaches_for_python_is_one_line(
    template: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = with_template(tmp_path, template)
    tokenizer = Tokenizer(path)
    assert tokenizer.chat_template == template
    with pytest.raises(KvError, match="chat template"):
        tokenizer.render_chat(HELLO, add_generation_prompt=True)
    assert exit_status(kvrun_app, ["chat", "-m", str(path), "-st", "-p", "hello", "-n", "1", "--no-recipe"]) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "chat template" in lines[0] and lines[0].isprintable()


@pytest.mark.parametrize("template", ["{{ ''.__class__ }}", "{{ raise_exception.__globals__ }}"])
def test_what_a_template_may_not_see_is_empty(template: str, tmp_path: Path) -> None:
    rendered = Tokenizer(with_template(tmp_path, template)).render_chat(HELLO, add_generation_prompt=True)
    assert rendered == ""
