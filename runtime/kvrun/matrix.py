"""A comparison from a file: several texts, contexts and settings in TOML, or in JSON with the same keys."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrun.cache_types import plan_for
from kvrun.compare_settings import LLAMA_SETTINGS, Setting, hadamard
from kvrun.console import printable
from kvrun.errors import KvError
from kvrun.evaluation.windows import MIN_CTX
from kvrun.llamacpp import LlamaSetting
from kvrun.plan import CachePlan, LayerGeometry
from kvrun.presets import preset_plan

if TYPE_CHECKING:
    from kvrun.recipe import Recipe

_KEYS = ("texts", "contexts", "chunks", "llama", "settings")
_SETTING_KEYS = {"keys": str, "values": str, "sinks": int, "window": int, "rotate": bool, "preset": str}


@dataclass(frozen=True)
class Matrix:
    """What a file asks for; None is what the command's options say, or the rows that are there without a file.

    texts: files, from the folder of the matrix.  contexts: tokens per window.  chunks: windows, -1 for all.
    llama: types of llama.cpp's, each with rotation on and off; f16 is always among them unless there are none.
    settings: tables with `keys`, `values`, `sinks`, `window` and `rotate`, or with `preset`.
    """

    texts: tuple[Path, ...] | None = None
    contexts: tuple[int, ...] | None = None
    chunks: int | None = None
    llama: tuple[LlamaSetting, ...] | None = None
    settings: tuple[dict[str, Any], ...] | None = None

    def our_settings(self, geometry: Sequence[LayerGeometry], recipe: Recipe | None) -> list[Setting] | None:
        """The rows that `settings` asks for; KvError where a type or preset does not exist or does not fit."""
        if self.settings is None:
            return None
        return [Setting(_plan_of(wanted, geometry, recipe)) for wanted in self.settings]


def read_matrix(path: Path) -> Matrix:
    """Read a file and check it. Raises KvError, naming the key, for what is no matrix; OSError where there is none."""
    name = printable(str(path))
    content = _content_of(path, name)

    def fail(why: str) -> KvError:
        return KvError(f"{name}: {why}")

    def listed(key: str, kind: type, what: str) -> list[Any] | None:
        values = content.get(key)
        if values is None:
            return None
        good = isinstance(values, list) and all(type(value) is kind for value in values)
        if not good or (not values and key != "llama"):
            raise fail(f"{key} must be a list of {what}")
        return list(values)

    unknown = next((key for key in content if key not in _KEYS), None)
    if unknown is not None:
        raise fail(f"unknown key {printable(str(unknown))}; use {', '.join(_KEYS)}")
    texts, contexts = listed("texts", str, "files"), listed("contexts", int, "numbers of tokens")
    if any(n < MIN_CTX for n in contexts or ()):
        raise fail(f"contexts must be {MIN_CTX} or more")
    chunks = content.get("chunks")
    if chunks is not None and (type(chunks) is not int or chunks < -1 or chunks == 0):
        raise fail("chunks must be a number of windows, 1 or more, or -1 for all")
    settings = listed("settings", dict, "tables")
    for wanted in settings or ():
        _check_setting(wanted, fail)
    known = list(dict.fromkeys(setting.type_k for setting in LLAMA_SETTINGS))
    llama = listed("llama", str, f"llama.cpp's types ({', '.join(known)})")
    wrong = next((kind for kind in llama or () if kind not in known), None)
    if wrong is not None:
        raise fail(f"unknown type of llama.cpp's {printable(wrong)}; use {', '.join(known)}")
    return Matrix(
        texts=None if texts is None else tuple(path.parent / text for text in texts),
        contexts=None if contexts is None else tuple(dict.fromkeys(contexts)),
        chunks=chunks,
        llama=None if llama is None else tuple(s for s in LLAMA_SETTINGS if llama and s.type_k in ("f16", *llama)),
        settings=None if settings is None else tuple(settings),
    )


def _content_of(path: Path, name: str) -> dict[str, Any]:
    data = path.read_bytes()
    is_json = path.suffix.lower() == ".json"
    try:
        text = data.decode("utf-8-sig")
        if is_json:
            content = json.loads(text)
        else:
            try:
                tomllib = import_module("tomllib")
            except ModuleNotFoundError as error:
                raise KvError(f"{name}: TOML needs Python 3.11; write the matrix as JSON (NAME.json)") from error
            content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise KvError(f"{name} is not {'JSON' if is_json else 'TOML'}: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise KvError(f"{name}: a matrix has keys: {', '.join(_KEYS)}")
    return content


def _check_setting(wanted: dict[str, Any], fail: Any) -> None:
    for key, value in wanted.items():
        kind = _SETTING_KEYS.get(key)
        if kind is None:
            raise fail(f"unknown key {printable(str(key))} of a setting; use {', '.join(_SETTING_KEYS)}")
        if type(value) is not kind or (isinstance(value, int) and value < 0):
            raise fail(f"{key} of a setting must be {({str: 'text', int: '0 or more', bool: 'true or false'})[kind]}")
    if ("preset" in wanted) == ("keys" in wanted) or ("preset" in wanted and len(wanted) > 1):
        raise fail("a setting has keys (and values, sinks, window, rotate), or a preset and nothing else")


def _plan_of(wanted: dict[str, Any], geometry: Sequence[LayerGeometry], recipe: Recipe | None) -> CachePlan:
    if "preset" in wanted:
        return preset_plan(wanted["preset"], geometry, recipe)
    keys = wanted["keys"]
    values = wanted.get("values", keys)
    plan = plan_for(geometry, keys, values, recipe=recipe, sinks=wanted.get("sinks"), window=wanted.get("window"))
    if not wanted.get("rotate"):
        return plan
    if plan.recipe or keys.startswith("emu-") or values.startswith("emu-"):
        raise KvError(f"rotate belongs to plain types, not to {keys}/{values}")
    return hadamard(plan)
