"""`python -m kvrun`."""

from __future__ import annotations

from kvrun.cli import main

main()
