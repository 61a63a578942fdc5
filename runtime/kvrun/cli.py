"""The command line `kvrun`: its commands are the modules of `kvrun.commands`."""

from __future__ import annotations

import sys
from importlib import import_module, metadata
from inspect import cleandoc
from pkgutil import iter_modules
from types import ModuleType
from typing import NoReturn

import typer

from kvrun import __version__, commands, console

COMPONENTS = ("torch", "llama-cpp-python", "gguf", "triton")


def version_text(program: str, version: str) -> str:
    """Version of the program and of what it stands on, without importing any of it."""
    lines = [f"{program} {version}"]
    for name in COMPONENTS:
        try:
            lines.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            lines.append(f"{name} (not installed)")
    return "\n".join([*lines, f"Python {sys.version.split()[0]}"])


def unwrap(docstring: str) -> str:
    """A docstring as paragraphs of one line each, which the help wraps to the width of the terminal."""
    return "\n\n".join(" ".join(part.split()) for part in cleandoc(docstring).split("\n\n"))


def new_app(program: str, program_version: str, summary: str, package: ModuleType) -> typer.Typer:
    """A command line whose commands are the modules of `package`, with `-h`, `--help` and `--version`.

    A module is a command when it has a function of its own name; the function's docstring is the help. Calls without a
    command print the help to stderr and exit with status 2.
    """
    app = typer.Typer(
        name=program,
        help=summary,
        context_settings={"help_option_names": ["-h", "--help"]},
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )

    def show_version(wanted: bool) -> None:
        if wanted:
            typer.echo(version_text(program, program_version))
            raise typer.Exit

    @app.callback(invoke_without_command=True, help=summary)
    def main_options(
        context: typer.Context,
        version: bool = typer.Option(
            False, "--version", callback=show_version, is_eager=True, help="Show versions and exit."
        ),
    ) -> None:
        if context.invoked_subcommand is None:
            raise console.UsageError(f"no command given; see `{program} --help`")

    for module in sorted(module.name for module in iter_modules(package.__path__)):
        function = getattr(import_module(f"{package.__name__}.{module}"), module, None)
        if function is not None:
            app.command(name=module, help=unwrap(function.__doc__ or ""))(function)
    return app


app = new_app("kvrun", __version__, "Run GGUF models with a quantized KV cache.", commands)


def main() -> NoReturn:
    """Entry point of `kvrun`."""
    console.run(app, prog="kvrun")
