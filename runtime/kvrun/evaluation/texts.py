"""The text that is measured: a file of the user's, or prose that every Python installation has.

The default is not the calibrator's default text (`pydoc_data.topics`): measuring on the calibration text flatters a
recipe. It is the documentation inside Python's own library, read from the source files without importing them, so it
depends on the Python version; its hash stands in every row.
"""

from __future__ import annotations

import ast
import codecs
import hashlib
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from kvrun.errors import KvError

if TYPE_CHECKING:
    from kvrun.recipe import Recipe

#: Modules whose documentation is mostly sentences, in the order they are read.
_MODULES = (
    "statistics.py",
    "difflib.py",
    "random.py",
    "threading.py",
    "_pydecimal.py",
    "turtle.py",
    "argparse.py",
    "subprocess.py",
    "ipaddress.py",
    "doctest.py",
    "zipfile.py",
    "zipfile/__init__.py",
    "textwrap.py",
    "functools.py",
    "fractions.py",
    "datetime.py",
    "_pydatetime.py",
    "smtplib.py",
    "ftplib.py",
    "imaplib.py",
    "inspect.py",
    "logging/__init__.py",
    "mailbox.py",
    "optparse.py",
    "pathlib.py",
    "pickletools.py",
    "selectors.py",
    "shelve.py",
    "shutil.py",
    "socket.py",
    "tempfile.py",
    "typing.py",
    "uuid.py",
    "weakref.py",
)

#: A docstring shorter than this is a label, not prose.
_MIN_CHARACTERS = 300

#: Enough for several windows of 4096 tokens.
_WANTED_CHARACTERS = 160_000


@dataclass(frozen=True)
class MeasuredText:
    """A text and where it came from. name: for tables and reports."""

    name: str
    text: str

    @cached_property
    def sha256(self) -> str:
        """Hash of the text as UTF-8: the same as in a recipe that was calibrated on it, but for a byte order mark."""
        return hashlib.sha256(self.text.encode("utf-8", "surrogatepass")).hexdigest()

    def was_used_by(self, recipe: Recipe | None) -> bool:
        """Whether the recipe was calibrated on this very text: then it measures memory, not quality."""
        if recipe is None:
            return False
        with_mark = hashlib.sha256(codecs.BOM_UTF8 + self.text.encode("utf-8", "surrogatepass")).hexdigest()
        return recipe.provenance.text_sha256 in (self.sha256, with_mark)


def default_text() -> MeasuredText:
    """Documentation of Python's own library: prose, at least 30 kB, the same for a given Python version."""
    library = Path(sysconfig.get_path("stdlib"))
    parts: list[str] = []
    length = 0
    for name in _MODULES:
        for part in _paragraphs(library / name):
            if length < _WANTED_CHARACTERS:
                parts.append(part)
                length += len(part)
    if length < 30_000:
        raise KvError("this Python has no library sources to take a text from; give a text with -f")
    version = ".".join(platform.python_version_tuple()[:2])
    return MeasuredText(f"docstrings of Python {version}'s library", "\n\n".join(parts) + "\n")


def _paragraphs(path: Path) -> Iterator[str]:
    """The longer docstrings of a source file, without their interpreter sessions; nothing when it cannot be read."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return  # not part of this installation
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            document = ast.get_docstring(node) or ""
            prose = "\n\n".join(p for p in document.split("\n\n") if ">>>" not in p)
            if len(prose) >= _MIN_CHARACTERS:
                yield prose
