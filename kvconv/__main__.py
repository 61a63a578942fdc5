"""`python -m kvconv`."""

from __future__ import annotations

from kvconv.cli import main

main()
