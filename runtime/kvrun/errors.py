"""Errors that a user can act on. The command line prints each as one line and exits with status 1."""

from __future__ import annotations


class KvError(Exception):
    """Something went wrong that the user can understand: the message is one line that says why and what to do."""


class GGUFError(KvError):
    """A file is not GGUF, is truncated, or is malformed."""


class UnsupportedModelError(KvError):
    """The file is valid GGUF, but holds something that this project cannot run."""


class RecipeError(KvError):
    """A recipe is missing, damaged, of a newer version, or belongs to another model."""


class MeasurementError(KvError):
    """A figure was asked for that would not measure what it claims to (for example a cache that was never read)."""
