"""The command line `kvconv`: its commands are the modules of `kvconv.commands`."""

from __future__ import annotations

from typing import NoReturn

from kvrun import console
from kvrun.cli import new_app

from . import __version__, commands

app = new_app("kvconv", __version__, "Calibrate the KV cache of GGUF models, head by head.", commands)


def main() -> NoReturn:
    """Entry point of `kvconv`."""
    console.run(app, prog="kvconv")
