"""What stands above a report: enough to measure the same again."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

from kvrun.cli import COMPONENTS

if TYPE_CHECKING:
    from kvrun.evaluation.texts import MeasuredText
    from kvrun.evaluation.windows import Windows
    from kvrun.gguf_file import GGUFFile
    from kvrun.recipe import Recipe


def versions() -> str:
    """Our version, and those of what it stands on and of Python."""
    from importlib.metadata import PackageNotFoundError, version

    from kvrun import __version__

    found = [f"kvrun {__version__}"]
    for name in COMPONENTS:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join([*found, f"Python {platform.python_version()}"])


def header_of(file: GGUFFile, text: MeasuredText, windows: Windows, recipe: Recipe | None) -> dict[str, Any]:
    """Model, text, windows, recipe with its calibration text, and versions, with their hashes."""
    header: dict[str, Any] = {
        "Model": [file.path.name, f"{file.arch}, fingerprint {file.fingerprint()}"],
        "Text": [text.name, f"sha256 {text.sha256}"],
        "Windows": f"{len(windows)} of {windows.n_ctx} tokens, {windows.n_scored} positions scored",
    }
    if recipe is not None:
        made = recipe.provenance
        header["Recipe"] = [
            f"{recipe.digest()}, by {made.tool_version}",
            f"calibrated on {made.text_name}, sha256 {made.text_sha256}",
        ]
    header["Versions"] = versions()
    return header
