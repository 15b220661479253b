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
from typing import Annotated

import typer

from parabolic import __version__
from parabolic.checks import InputError
from parabolic.cli import data, kept, paper, report, runs, theory, tune, watch
from parabolic.engine import DeviceFailed, Diverged

__all__ = ["app", "main"]

app = typer.Typer(
    name="parabolic", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    help="Learn from a stream without forgetting.",
)  # fmt: skip
app.command("list")(runs.list_all)
app.command("run")(runs.run_one)
app.command("watch")(watch.watch)
app.command("compare")(runs.compare)
app.command("runs")(kept.list_runs)
app.command("tune")(tune.tune_one)
app.command("presets")(tune.list_presets)
app.command("paper")(paper.paper)
app.command("report")(report.report)
app.command("plot")(report.plot)
app.command("bounds")(theory.bounds)
app.command("profile")(theory.profile)
app.add_typer(data.app, name="data")


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def _plainly(message: Warning | str, *_: object, **__: object) -> str:
    """Format a warning as one line, without its position in the source code."""
    return f"warning: {message}\n"


def main() -> None:
    """The entry point. Invalid input ends with a short message and exit code 2, other failures with exit code 1."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the caller, for example with `>&-`
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a character that the terminal cannot show must not fail the command
    warnings.formatwarning = _plainly
    try:
        try:
            with _terminable():
                _command()
        finally:
            sys.stdout.flush()
    except OSError as error:
        if not _cut_off():
            raise
        if error.errno != errno.EPIPE:  # a closed pipe, as by `head`, needs no message
            told = f"error: standard output: got {error.strerror}, expected room for the output"
            print(f"{told}; finished runs are stored, and the same command prints them", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout once more at exit
        sys.exit(1)


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM end a command as Ctrl-C does, except for the exit code; a second SIGTERM ends it at once."""
    asked = []

    def end(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        asked.append(True)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:  # the parent process may have set it to be ignored
        signal.signal(signal.SIGTERM, end)
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        if not asked:
            raise
    finally:
        if signal.getsignal(signal.SIGTERM) == end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if asked:
        sys.exit(128 + signal.SIGTERM)


def _cut_off() -> bool:
    """Whether standard output accepts no more text."""
    try:
        print(flush=True)  # the text that failed may no longer be in the buffer
    except OSError:
        return True
    return False


def _command() -> None:
    try:
        app()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except (Diverged, DeviceFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
