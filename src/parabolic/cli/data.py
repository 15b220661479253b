"""`parabolic data prepare`, `list` and `show`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from parabolic import streams
from parabolic.cli.common import (
    Json,
    Seed,
    Set,
    check_once,
    plain_console,
    read_settings,
    settings_of_each,
    table_console,
)
from parabolic.experiments import RunSpec
from parabolic.files import disk_errors, file_name
from parabolic.options import options_of
from parabolic.report.figures import check_picture
from parabolic.report.formats import WholeTable
from parabolic.report.sheets import draw_sheet
from parabolic.streams import PUBLISHED, Cache, DataSet, Scenario, make_stream

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Prepare, list and show data sets.")


@app.command("prepare")
def prepare(
    name: Annotated[str, typer.Argument(help=f"{', '.join(PUBLISHED)}, hf:NAME, or a name for your own data.")],
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="PATH", help="A folder, an archive or hf:NAME (default: download it)."),
    ] = None,
    label: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN", help="The column of labels in hf:NAME.", show_default="`label`, or the only one"
        ),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Prepare it again even if it is already there.")] = False,
    as_json: Json = False,
) -> None:
    """Store a data set in the cache, from a folder, an archive, the Hugging Face hub or a download."""
    previous = streams.find_data(name)
    with _progress_bars() as progress:
        data = streams.prepare(name, source, label=label, again=again, progress=progress)
    if as_json:
        print(json.dumps(_facts(data), indent=1))
        return
    console = plain_console()
    parts = f"{data.train:,} training and {data.test:,} test images"
    if not data.test:
        parts = f"{data.train:,} images (every fifth of each class is held out for testing)"
    console.print(f"{name}: {parts} of {' × '.join(map(str, data.shape))}, {data.classes} classes, from {data.source}")
    if previous is not None and previous.content != data.content:
        console.print(
            f"It replaces other data of that name, from {previous.source}: runs on them will be trained again."
        )
    if _matches_published(data) is False:
        console.print("Note: the images and labels are not bit for bit those of the official archive.")
    stream = name if name.startswith("hf:") else f"seq-{name}"
    console.print(f"Use it as a stream: parabolic run --stream {stream}")
    if name not in PUBLISHED:
        entry = streams.find_stream(stream)
        steps = data.train * (1 if data.test else 0.8) / entry.batch
        console.print(
            f"By default a run uses network {entry.backbone} and batches of {entry.batch}: about {steps:,.0f} steps. "
            "If the images are small or few, --set backbone=convnet --set batch=10 may learn far more; "
            "`parabolic list` shows the networks."
        )


@app.command("list")
def list_data(as_json: Json = False) -> None:
    """List the data sets that are prepared or can be, and the scenarios that can be applied to them."""
    cache = Cache()
    prepared = {name: data for name in cache.names() if (data := cache.find(name)) is not None}
    damaged = {name: str(error) for name in cache.names() if (error := cache.damaged(name)) is not None}
    scenario = {
        name: {"default": option.default, "about": option.about} for name, option in options_of(Scenario).items()
    }
    if as_json:
        payload = {
            "folder": str(cache.root),
            "prepared": {name: _facts(data) for name, data in prepared.items()},
            "damaged": damaged,
            "published": {
                name: {"about": published.about, "url": published.url} for name, published in PUBLISHED.items()
            },
            "scenario": scenario,
        }
        print(json.dumps(payload, indent=1))
        return
    console = table_console()
    table = WholeTable("data", "what it is", "images", "MB", "as published", title="Data", title_justify="left")
    for name in sorted({*prepared, *PUBLISHED}):
        about = PUBLISHED[name].about if name in PUBLISHED else ""
        if name not in prepared:
            table.add_row(name, about, f"not prepared yet: parabolic data prepare {name}", "", "")
            continue
        data = prepared[name]
        table.add_row(
            name,
            about or f"{data.classes} classes, from {data.source}",
            f"{data.train:,} + {data.test:,} of {' × '.join(map(str, data.shape))}",
            f"{sum(file['bytes'] for file in data.files.values()) / 1e6:.0f}",
            {None: "", True: "yes", False: "no"}[_matches_published(data)],
        )
    console.print(table)
    for problem in damaged.values():
        console.print(f"Cannot be used: {problem}\n")
    title = "Scenarios: --set setting=value"
    table = WholeTable("setting", "default", "what it does", title=title, title_justify="left")
    for name, facts in scenario.items():
        table.add_row(name, str(facts["default"]).lower(), str(facts["about"]))
    console.print(table)
    console.print(
        f"Prepared data are stored in {cache.root} (set PARABOLIC_DATA to use another folder).", soft_wrap=True
    )


@app.command("show")
def show(
    stream: Annotated[str, typer.Argument(help="A name from `parabolic list`, seq-NAME, hf:NAME or module:function.")],
    output: Annotated[
        Path | None, typer.Option("--output", "--out", "-o", help="File for the picture.", show_default="STREAM.png")
    ] = None,
    seed: Seed = None,
    settings: Set = None,
) -> None:
    """Draw what a learner sees: examples of each task with their labels, and PCL's bridges."""
    parsed_settings = settings_of_each({"pcl": "pcl"}, read_settings(settings))["pcl"]
    check_once(parsed_settings, {"--seed": seed})
    spec = RunSpec.from_settings("pcl", parsed_settings, stream=stream, seed=seed or 0)
    resolved = spec.resolved()
    built_stream = make_stream(spec.stream, spec.seed, **spec.scenario)
    path = output or Path(file_name(spec.stream) + ".png")
    check_picture("--output", path)
    with disk_errors("--output", path.parent, "name another file"):
        draw_sheet(built_stream, path, resolved["options"], batch=resolved["batch"], seed=spec.seed)
    plain_console().print(f"{len(built_stream)} tasks, {built_stream.classes} classes: {path}")


def _facts(data: DataSet) -> dict[str, object]:
    return dataclasses.asdict(data) | {"as_published": _matches_published(data)}


def _matches_published(data: DataSet) -> bool | None:
    """Whether a data set has the contents of the official archive of that name; None if these are not known."""
    official = PUBLISHED.get(data.name)
    return None if official is None or official.content is None else data.content == official.content


@contextmanager
def _progress_bars() -> Iterator[streams.ShowProgress]:
    """A progress bar for each activity; silent if standard error is not a terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:3.0f}%"),
        TimeRemainingColumn(),
    )
    bars = Progress(*columns, console=console)
    # before version 14.3 of rich, a disabled bar ends with an empty line: without a terminal, none is started
    with bars if console.is_terminal else nullcontext():
        tasks: dict[str, TaskID] = {}

        def show_progress(activity: str, done: int, total: int | None) -> None:
            if activity not in tasks:
                tasks[activity] = bars.add_task(activity, total=total)
            bars.update(tasks[activity], completed=done, total=total)

        yield show_progress
