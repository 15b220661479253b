"""`parabolic report` and `parabolic plot`: results as a page or as curves."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from parabolic.checks import Description, check_name, invalid
from parabolic.cli.common import OnlyLearner, OnlyStream, Runs, Where, listing, plain_console, read_where
from parabolic.experiments import BackedStore, Records, Store
from parabolic.report.comparisons import plural
from parabolic.report.curves import STYLES, draw_curves, plot_text
from parabolic.report.page import TITLE, TRAIN, write_page
from parabolic.report.scenes import Scene, find_scenes

__all__ = ["plot", "report"]

WIDE = 100  # columns, if the output is not a terminal


def report(
    output: Annotated[Path, typer.Option("--output", "-o", help="The file for the page.")] = Path("report.html"),
    runs: Runs = Path("runs"),
    learner: OnlyLearner = None,
    stream: OnlyStream = None,
    where: Where = None,
    bounds: Annotated[Path, typer.Option(help="The folder with the results of `parabolic bounds`.")] = Path("bounds"),
    records: Annotated[
        bool,
        typer.Option("--records", help="Also show the package's records, or those in PARABOLIC_RECORDS."),
    ] = False,
    title: Annotated[str, typer.Option(help="The title of the page.")] = TITLE,
    watch: Annotated[
        bool, typer.Option("--watch", help="Keep the page up to date as runs come in, until Ctrl-C.")
    ] = False,
    every: Annotated[
        float, typer.Option(min=0.2, max=86_400, help="With --watch: seconds between checks for new runs.")
    ] = 10.0,
) -> None:
    """Write all results as one page that works offline: which method is best, by how much, and at what cost."""
    store = BackedStore(runs, Records.ours() if records else Records())
    filters = read_where(where, learner, stream)

    def write(refresh: float | None = None) -> Path:
        return write_page(store, output, title=title, where=filters, bounds=bounds, refresh=refresh, may_be_empty=watch)

    console = plain_console()
    if watch:
        with suppress(KeyboardInterrupt):
            seen = store.written()  # before the page is written, so that runs which finish meanwhile count as new
            write(every)
            console.print(f"{output.resolve()} is kept up to date; Ctrl-C ends this")
            _keep_current(store, seen, lambda: write(every), every)
    console.print(f"The report: {write().resolve()}")


def plot(
    context: typer.Context,
    folder: Annotated[Path | None, typer.Argument(help="The folder of runs; the same as --runs.")] = None,
    runs: Runs = Path("runs"),
    learner: OnlyLearner = None,
    stream: OnlyStream = None,
    where: Where = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Draw to this file (.png, .svg or .pdf) instead.")
    ] = None,
    style: Annotated[
        str, typer.Option(help=f"Style of the file: {' or '.join(STYLES)} (LaTeX sizes, no title).")
    ] = "screen",
) -> None:
    """Plot the anytime accuracy of each method, in the terminal or to a file."""
    check_name("--style", style, STYLES)
    if folder is not None:
        source = context.get_parameter_source("runs")  # PARABOLIC_RUNS gives way to the folder
        if source is not None and source.name == "COMMANDLINE":
            raise invalid("--runs", str(runs), f"none with {folder}", "leave one of them out")
        runs = folder
    store = Store(runs)
    finds = find_scenes(store, read_where(where, learner, stream))
    scenes = [scene for scene in finds.scenes if scene.done]
    if not scenes:
        got = Description(f"no finished runs{' that fit' if learner or stream or where else ''} in {store.root}")
        count = len(finds.diverged)
        diverged = f"{plural(count, 'run')} diverged: {listing('diverged', runs)}" if count else ""
        raise invalid("runs", got, "at least one", diverged or finds.left_out or TRAIN)
    console = plain_console()
    if output is None:
        width = console.width if console.is_terminal else WIDE
        for scene in scenes:
            console.print(plot_text(scene, width))
    else:
        if len(scenes) > 1:
            got = Description(f"runs of {len(scenes)} kinds: {'; '.join(scene.title for scene in scenes)}")
            raise invalid("runs", got, "runs of one kind for a file", _describe_choice(scenes))
        console.print(f"Written: {draw_curves(scenes[0], output, style)}")
    if finds.left_out:
        console.print(finds.left_out)
    for path in finds.damaged:
        console.print(f"Cannot be read: {path}")


def _describe_choice(scenes: Sequence[Scene]) -> str:
    """Describe how to choose one of several scenes: the settings that differ, and an example that selects the last."""
    names = dict.fromkeys(name for scene in scenes for name in scene.settings)
    differing = [name for name in names if len({str(scene.settings.get(name)) for scene in scenes}) > 1]
    choices = []
    for name in differing:
        values = dict.fromkeys(str(scene.settings[name]) for scene in scenes if name in scene.settings)
        choices.append(f"{name} ({', '.join(values)})")
    last = scenes[-1].settings
    example = shlex.join(word for name in differing if name in last for word in ("--where", f"{name}={last[name]}"))
    return f"choose by {' and '.join(choices)}, for example {example}"


def _keep_current(store: Store, seen: Mapping[Path, int], write: Callable[[], object], every: float) -> None:
    """Write the page again whenever the runs have changed, until Ctrl-C."""
    while True:
        time.sleep(every)
        now = store.written()
        if now != seen:
            write()
            seen = now
