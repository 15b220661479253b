"""The command-line interface: each command is a thin layer over the library."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from parabolic import __version__

__all__ = ["app", "main"]

COMMANDS = {
    "list": ("list:list_all", "List the learners with their options, the streams and the networks."),
    "run": ("run:run_one", "Train one learner on one stream and store the result; a run that was stopped resumes."),
    "watch": ("watch:watch", "Watch a run, or your own stream with a monitor, until it ends (or Ctrl-C)."),
    "compare": ("compare:compare", "Train several learners with several seeds and print their results side by side."),
    "runs": ("runs:list_runs", "List, select and export the stored runs."),
    "tune": (
        "tune:tune_one",
        "Search for settings that suit a learner, judged on held-out training examples, and save the best as a preset.",
    ),
    "presets": ("tune:list_presets", "List the presets: their settings, and what they were made for."),
    "paper": (
        "paper:paper",
        "Train the runs that are missing from the paper's tables, and print our figures beside the published ones.",
    ),
    "report": (
        "report:report",
        "Write all results as one page that works offline: which method is best, by how much, and at what cost.",
    ),
    "plot": ("report:plot", "Plot the anytime accuracy of each method, in the terminal or to a file."),
    "bounds": (
        "theory:bounds",
        "Compare the loss on memory with the loss on the first and last task, after every task (the paper's appendix).",
    ),
    "profile": (
        "theory:profile",
        "Draw the continual loss profile u(x, t) of a learner after each task of a stream of points in the plane.",
    ),
    "data": ("data:app", "Prepare, list and show data sets."),
}
"""Where each command is, and the first line of its help, so that `parabolic --help` imports none of them."""

GROUPS = Path(__file__).with_name("groups.py")  # whose function calls a command, as typer's do


class _Commands(TyperGroup):
    """The commands by name; the module of one is imported when it is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Replace the entry that stands for a command with the command itself."""
        name, _, rest = super().resolve_command(ctx, args)
        return name, name and find_command(name), rest


def find_command(name: str) -> Any:
    """The command of that name."""
    module, _, attribute = COMMANDS[name][0].partition(":")
    command = getattr(import_module(f"parabolic.cli.{module}"), attribute)
    if not isinstance(command, typer.Typer):
        single = typer.Typer(add_completion=False)
        single.command(name)(command)
        command = single
    return typer.main.get_command(command)


app = typer.Typer(
    name="parabolic", cls=_Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    help="Learn from a stream without forgetting.",
)  # fmt: skip
for _name, (_, _about) in COMMANDS.items():
    app.command(_name, help=_about)(lambda: None)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def _format_warning(message: Warning | str, *_: object, **__: object) -> str:
    """Format a warning as one line, without its position in the source code."""
    return f"warning: {message}\n"


def _show_own_code_first(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an unexpected error with a traceback that starts in the user's own code or, without any, after typer's."""
    import traceback

    from parabolic.plugins import is_own

    calls = [trace] if trace else []
    while calls and calls[-1].tb_next:
        calls.append(calls[-1].tb_next)
    files = [Path(call.tb_frame.f_code.co_filename) for call in calls]
    command = max((i + 1 for i, file in enumerate(files) if "typer" in file.parts or file == GROUPS), default=0)
    start = next((i for i, file in enumerate(files) if i >= command and is_own(file)), command)
    traceback.print_exception(kind, error, calls[start] if start < len(calls) else trace)


def main() -> None:
    """The entry point. Invalid input ends with a short message and exit code 2, other failures with exit code 1."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the caller, for example with `>&-`
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a character that the terminal cannot show must not fail the command
    warnings.formatwarning = _format_warning
    try:
        try:
            with _terminable():
                _run_command()
        finally:
            sys.stdout.flush()
    except OSError as error:
        if not _is_output_closed():
            raise
        if error.errno != errno.EPIPE:  # a closed pipe, as by `head`, needs no message
            message = f"error: standard output: got {error.strerror}, expected room for the output"
            print(f"{message}; finished runs are stored, and the same command prints them", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout once more at exit
        sys.exit(1)


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM end a command as Ctrl-C does, except for the exit code; a second SIGTERM ends it at once."""
    received = []

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        received.append(True)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:  # the parent process may have set it to be ignored
        signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        if not received:
            raise
    finally:
        if signal.getsignal(signal.SIGTERM) == interrupt:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if received:
        sys.exit(128 + signal.SIGTERM)


def _is_output_closed() -> bool:
    """Whether standard output accepts no more text."""
    try:
        print(flush=True)  # the text that failed may no longer be in the buffer
    except OSError:
        return True
    return False


def _run_command() -> None:
    try:
        app()
    except Exception as error:
        # Here, as they import torch; a command that raises them has imported it.
        from parabolic.checks import InputError
        from parabolic.engine import DeviceFailed, Diverged

        if not isinstance(error, InputError | Diverged | DeviceFailed):
            sys.excepthook = _show_own_code_first  # now, as typer has set its own
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, InputError) else 1)
