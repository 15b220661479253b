"""`parabolic watch`: what a monitor sees, as it sees it."""

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
from parabolic.engine import Tail
from parabolic.experiments import Store
from parabolic.report.live import View

__all__ = ["watch"]

PAUSE = 0.25  # seconds between two looks at the file
WHOSE = (
    "`parabolic run` has one, and a loop of your own with the callback `Monitor`; compare, tune and paper do without"
)


def watch(
    run: Annotated[
        str | None,
        typer.Argument(
            help="A run by its key or the beginning of it, or the file of a monitor, or the folder that it is in.",
            show_default="the run that was written about last",
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print what there is now, and end.")] = False,
    runs: Runs = Path("runs"),
) -> None:
    """Watch a run, or a stream of your own with a monitor, until it ends (or Ctrl-C)."""
    try:
        path = _find(run, Store(runs))
        view = View(Tail(path), str(path))
    except OSError as error:
        raise invalid("RUN", run, "a run, a file or a folder that can be read", error.strerror or str(error)) from error
    console = Console(highlight=False)
    if view.tail.strange:
        raise invalid("RUN", str(path), "the file of a monitor", "it is something else")
    if once or not console.is_terminal:
        console.print(view)
        return
    with suppress(KeyboardInterrupt), Live(view, console=console, auto_refresh=False) as live:
        while view.poll():
            live.refresh()
            time.sleep(PAUSE)
        live.refresh()


def _find(run: str | None, store: Store) -> Path:
    """The file to read."""
    if run is None:
        files = [file for key in store.begun() if (file := store.monitor(key)).exists()]
        if not files:
            raise invalid("RUN", None, "a key or a file", f"no run in {store.root} has a monitor: {WHOSE}")
        return max(files, key=lambda file: file.stat().st_mtime)
    path, keys = Path(run), store.begun(run)
    if path.is_file():
        return path
    if run in keys or len(keys) == 1:
        return _of(store, run if run in keys else keys[0], run)
    if keys:
        remedy = f"say more of it: {', '.join(key[: len(run) + 4] for key in keys[:4])}"
        raise invalid("RUN", run, f"the beginning of one key, not of {len(keys)}", remedy)
    if path.is_dir():
        return _of(Store(path.parent), path.name, run)
    expected = f"the key of a run in {store.root}, or the file of a monitor, or its folder"
    raise invalid("RUN", run, expected, "`parabolic runs` lists what is finished")


def _of(store: Store, key: str, run: str) -> Path:
    """The file of a folder. Where something was begun and is not finished, a monitor may yet come to it."""
    file = store.monitor(key)
    if not (file.exists() or store.unfinished(key)):
        got = Description(f"{run}, where there is no {file.name}")
        raise invalid("RUN", got, "a run or a stream with a monitor", WHOSE)
    return file
