"""What the documents tell people to type exists."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.house.files import ROOT, name

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
PROGRAMS = ("kvconv", "kvrun")


def shell_lines(document: Path) -> Iterator[str]:
    """Lines of code blocks that are marked as shell; of a recorded session (`console`) only what was typed."""
    language: str | None = None
    for line in document.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
        if line.startswith("```"):
            language = line[3:].strip() if language is None else None
        elif language == "bash":
            yield line
        elif language == "console" and line.startswith("$ "):
            yield line[2:]


def commands(document: Path) -> list[list[str]]:
    """Calls of our programs or of make, as words; variables in front, comments and what follows a pipe are cut off."""
    found = []
    for line in shell_lines(document):
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        program = words[0].rsplit("/", 1)[-1] if words else ""
        if program in (*PROGRAMS, "make"):
            end = next((i for i, word in enumerate(words) if word in ("|", ">", "&&", ";", "<")), len(words))
            found.append([program, *words[1:end]])
    return found


def all_commands() -> list[Any]:
    return [pytest.param(words, id=f"{name(d)}: {' '.join(words)[:60]}") for d in DOCUMENTS for words in commands(d)]


def options(parameters: list[Any]) -> set[str]:
    return {opt for p in parameters for opt in (*p.opts, *p.secondary_opts) if opt.startswith("-")} | {"-h", "--help"}


@pytest.mark.parametrize("words", all_commands())
def test_commands_and_options_exist(words: list[str]) -> None:
    program, *rest = words
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert [w for w in rest if "=" not in w and w not in targets] == []
        return
    group: Any = typer.main.get_command(import_module(f"{program}.cli").app)
    if rest and rest[0] in group.commands:
        known = options(group.commands[rest[0]].params)
        arguments = rest[1:]
    else:
        assert not rest or rest[0].startswith("-"), f"{program} has no command {rest[0]!r}"
        known, arguments = options(group.params), rest
    unknown = [w for w in arguments if re.match(r"--?[a-zA-Z]", w) and w.split("=")[0] not in known]
    assert unknown == []


def test_the_readme_shows_every_command() -> None:
    shown = {tuple(words[:2]) for words in commands(ROOT / "README.md")}
    for program in PROGRAMS:
        group: Any = typer.main.get_command(import_module(f"{program}.cli").app)
        assert [c for c in group.commands if (program, c) not in shown] == []


def test_links_between_documents_lead_somewhere() -> None:
    broken = []
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text(encoding="utf-8")):
            if not re.match(r"[a-z]+:", target) and not (document.parent / target).exists():
                broken.append(f"{name(document)}: {target}")
    assert broken == []
