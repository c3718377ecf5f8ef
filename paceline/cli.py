"""The command line: finds the command, and turns failures into one sentence and an exit code.

Exit codes: 0 done, 1 failed, 2 the user's input is wrong, 130 stopped with Ctrl-C. Each command lives in
paceline/commands/ and is imported when it is called, so that `paceline --help` starts at once.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from paceline.core.errors import PacelineError, UserError
from paceline.core.extras import install
from paceline.core.printable import printable

# name → (module in paceline/commands, function or Typer app in it, what the list of commands says)
COMMANDS: dict[str, tuple[str, str, str]] = {
    "run": ("run", "run", "Start a whole topology here, generate, print text and latency, stop."),
    "up": ("up", "up", "Start and supervise what belongs on this machine, until Ctrl-C."),
    "drafter": ("node", "drafter", "Run one drafter in the foreground."),
    "target": ("node", "target", "Run one target in the foreground."),
    "check": ("check", "check", "Validate a topology and show who talks to whom."),
    "plan": ("plan", "plan", "Predict rounds, rates, best draft length and lanes; say when not to speculate."),
    "nodes": ("node", "nodes", ""),  # every node in one process; for the memory link, not for people
    "keys": ("keys", "app", "Make the deployment's key and certificates."),
    "broker": ("broker", "broker", ""),  # what local_broker starts
    "bench": ("bench", "bench", "Measure plain, standard, star, two-lane and auto side by side."),
    "profile": ("profile", "profile", "Measure a model on this device: its step times."),
    "export": ("export", "export", "Make a bundle of a model for a runtime; it is checked before it is done."),
    "engine": ("engine", "engine", "Build a bundle's TensorRT engine on the machine that will run it."),
    "report": ("report", "report", "Show what drafters recorded: where a round's time goes, power, energy, limits."),
    "trace": ("trace", "trace", "Write what drafters recorded as a trace for ui.perfetto.dev."),
    "schema": ("schema", "schema", "Print the JSON Schema of topology files, for editors."),
    "doctor": ("doctor", "doctor", "Check this machine: versions, devices, ports, models, keys, clocks, links."),
}


class LazyGroup(TyperGroup):
    """Lists commands without importing them; imports the one that is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for name, (_, _, summary) in COMMANDS.items() if summary]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        summary = COMMANDS[cmd_name][2]
        return TyperCommand(name=cmd_name, help=summary, short_help=summary)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name = args[0] if args else ""
        if name not in COMMANDS:
            self.commands = {known: self.get_command(ctx, known) for known in COMMANDS}  # for `did you mean`
            return super().resolve_command(ctx, args)
        return name, load_command(name), args[1:]


def load_command(name: str) -> Any:
    """Imports a command and builds its parser. Raises UserError when this installation lacks it."""
    module_name, attribute, summary = COMMANDS[name]
    module_path = f"paceline.commands.{module_name}"
    try:
        module = import_module(module_path)
    except ModuleNotFoundError as error:
        if error.name == module_path:
            raise UserError(f"paceline {name} is not part of this version") from None
        raise _not_installed(name, error) from error
    entry = getattr(module, attribute)
    if not isinstance(entry, typer.Typer):
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        app.command(name=name, short_help=summary, no_args_is_help=False)(entry)
        entry = app
    return typer.main.get_command(entry)


def _not_installed(name: str, error: ModuleNotFoundError) -> Exception:
    """A missing package becomes a sentence; a missing module of our own is a bug and stays a traceback."""
    package = (error.name or "").split(".")[0]
    if package in ("", "paceline"):
        return error
    extra = "cloud" if package in ("torch", "transformers", "fastapi", "uvicorn", "safetensors") else None
    how = install(extra) if extra else f"pip install {package}"
    return UserError(f"paceline {name} needs the package {package}; run: {how}")


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(show: bool) -> None:
    if show:
        from paceline import __version__

        typer.echo(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Distributed speculative decoding: a small drafter proposes tokens, large targets verify them in one pass."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line (default: the process's own) and returns its exit code. Never shows a traceback for
    a failure that is expected."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        typer.main.get_command(app)(args=arguments, prog_name="paceline")
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):
            return 0  # click took it for a failure; see _flushed
        return _flushed(stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1)
    except UserError as error:
        _say(error)
        return 2
    except PacelineError as error:
        _say(error)
        return 1
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _say(PacelineError("cannot write the output: no space left on device"))
        return 1
    return 0


def _say(error: PacelineError) -> None:
    """The sentence, or each of several, on stderr. The topology's own messages begin with file:line already."""
    typer.echo(printable(str(error), lines=True) or type(error).__name__, err=True)


def _flushed(code: int) -> int:
    """The exit code, once output is out; a reader that left early (`| head`) is no failure of ours."""
    try:
        if sys.stdout is not None:  # None: it was closed before this process began
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code
