"""`parabolic watch`: show what a monitor records, live."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from parabolic.checks import Description, invalid
from parabolic.cli.common import Runs
from parabolic.cli.runs import describe_stopped
from parabolic.engine import Tail
from parabolic.experiments import Store
from parabolic.experiments.resume import stopped_runs
from parabolic.report.live import View
from parabolic.report.runs import row_of

__all__ = ["watch"]

PAUSE = 0.25  # seconds between two reads of the file
MONITOR_HINT = (
    "`parabolic run` has one, and so has your own loop with the callback `Monitor`; compare, tune and paper have none"
)


def watch(
    run: Annotated[
        str | None,
        typer.Argument(
            help="A run's key or the beginning of it, the file of a monitor, the folder of that file, or one of runs.",
            show_default="the run with the latest entry",
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print the current state and exit.")] = False,
    runs: Runs = Path("runs"),
) -> None:
    """Watch a run, or your own stream with a monitor, until it ends (or Ctrl-C)."""
    try:
        path = _find_file(run, Store(runs))
        view = View(Tail(path), str(path))
    except OSError as error:
        raise invalid("RUN", run, "a run, a file or a folder that can be read", error.strerror or str(error)) from error
    console = Console(highlight=False)
    if view.tail.strange:
        raise invalid("RUN", str(path), "the file of a monitor", "this file is something else")
    if once or not console.is_terminal:
        console.print(view)
        return
    with suppress(KeyboardInterrupt), Live(view, console=console, auto_refresh=False) as live:
        while view.poll():
            live.refresh()
            time.sleep(PAUSE)
        live.refresh()


def _find_file(run: str | None, store: Store) -> Path:
    """Return the file to read."""
    if run is None:
        return _latest_file(store, None)
    path, keys = Path(run), store.begun(run)
    if path.is_file():
        return path
    if run in keys or len(keys) == 1:
        return _monitor_file(store, run if run in keys else keys[0], run)
    if keys:
        remedy = f"give more of it: {', '.join(key[: len(run) + 4] for key in keys[:4])}"
        raise invalid("RUN", run, f"the beginning of one key, not of {len(keys)}", remedy)
    if path.is_dir():
        parent_store = Store(path.parent)
        if Store(path).begun() and not (parent_store.monitor(path.name).exists() or parent_store.unfinished(path.name)):
            return _latest_file(Store(path), run)  # a folder of runs
        return _monitor_file(parent_store, path.name, run)
    expected = f"the key of a run in {store.root}, or the file of a monitor, or its folder"
    raise invalid("RUN", run, expected, "`parabolic runs` lists the finished runs")


def _latest_file(store: Store, run: str | None) -> Path:
    """Return the monitor's file with the latest entry."""
    files = [file for key in store.begun() if (file := store.monitor(key)).exists()]
    if not files:
        stopped = [row_of(run) for run in stopped_runs(store)]
        hint = f"{describe_stopped(stopped, store.root)}; " if stopped else ""
        raise invalid("RUN", run, "a key or a file", f"{hint}no run in {store.root} has a monitor: {MONITOR_HINT}")
    return max(files, key=lambda file: file.stat().st_mtime)


def _monitor_file(store: Store, key: str, run: str) -> Path:
    """Return the monitor's file of a run; an unfinished run without one may get it later."""
    file = store.monitor(key)
    if not (file.exists() or store.unfinished(key)):
        got = Description(f"{run}, where there is no {file.name}")
        raise invalid("RUN", got, "a run or a stream with a monitor", MONITOR_HINT)
    return file
