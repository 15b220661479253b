"""`parabolic compare`: several learners on one stream."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from parabolic.checks import Description, InputError, check_name, invalid
from parabolic.cli.common import (
    Again,
    Checkpoint,
    Device,
    PresetStream,
    Runs,
    Set,
    check_once,
    naming_preset,
    read_settings,
    settings_of_each,
)
from parabolic.cli.grids import Address, Engine, Fleet, Gpus, Minutes, Workers, close_grid, tell_package, train_all
from parabolic.cli.tables import Format, Intervals, Output, check_output, made_with, show, titles_of
from parabolic.cli.tracking import Track
from parabolic.engine.measures import Measure, find_measures, owner
from parabolic.experiments import Outcome, Preset, Record, RunSpec, Store, build, load_preset
from parabolic.experiments.paper import Effort
from parabolic.options import options_of, parse_option
from parabolic.report import FORMATS, comparison, in_words
from parabolic.report.comparisons import FIGURES, USUAL, column_of, finished, many
from parabolic.report.tables import Column

__all__ = ["compare"]

SEVERAL = "compare settings of one method as presets: --preset a.toml --preset b.toml, each with learner and [settings]"


def compare(
    learners: Annotated[
        str | None,
        typer.Option(help="Learners, separated by commas.", show_default="pcl,er,sgd if there is no preset"),
    ] = None,
    preset: Annotated[
        list[str] | None, typer.Option(help="A preset to compare, in a row of its own; may be repeated.")
    ] = None,
    stream: PresetStream = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help="How many examples the memory holds; several sizes, separated by commas, give a table each.",
            show_default="the preset's, or 200",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds, counted from 0.")] = 5,
    settings: Set = None,
    runs: Runs = Path("runs"),
    again: Again = False,
    device: Device = "auto",
    engine: Engine = "local",
    workers: Workers = None,
    address: Address = None,
    fleet: Fleet = 5,
    gpus: Gpus = 1.0,
    minutes: Minutes = None,
    checkpoint: Checkpoint = 60.0,
    track: Track = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            help=f"The columns, separated by commas: {', '.join(FIGURES)}, and the measures of `--set measure`.",
            show_default=f"{','.join(USUAL)} and all measures",
        ),
    ] = None,
    format: Format = "terminal",
    intervals: Intervals = False,
    output: Output = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the records of all runs instead of a table.")] = False,
) -> None:
    """Train several learners with several seeds and print their results side by side."""
    check_name("--format", format, FORMATS)
    if as_json and (output is not None or format != "terminal"):
        raise invalid(
            "--json", Description("it with --output or --format"), "one kind of output", "leave the others out"
        )
    chosen = [load_preset(name) for name in preset or []]
    rows = _rows(learners, chosen)
    tables = [_specs(rows, chosen, settings, stream, size, seeds) for size in _sizes(memory, chosen, settings)]
    every = (spec for each in tables for row in each.values() for spec in row)
    wanted = list({spec.key: spec for spec in every}.values())  # without a memory, runs are the same at all sizes
    columns = _columns(metrics, wanted)
    store = Store(runs)
    if engine == "local":  # the data on the nodes of a cluster may be missing here
        first = (row[0] for each in tables for row in each.values())
        with naming_preset(chosen, stream):
            _check_built([spec for spec in first if spec.options and store.ended(spec) is None])
    if output is not None:
        check_output(output)
    outcome = train_all(
        wanted, store, track, engine=engine, workers=workers, address=address, device=device, fleet=fleet, gpus=gpus,
        minutes=minutes, checkpoint=checkpoint, again=again,
    )  # fmt: skip
    ended = outcome.records | outcome.diverged
    if as_json:
        _print_records(outcome)
    else:
        shown = {row: row for row in rows} if format == "json" else titles_of(rows)
        records = {
            _title(specs, settings or []): {
                shown[row]: [ended[spec.key] for spec in each if spec.key in ended] for row, each in specs.items()
            }
            for specs in tables
        }
        columns = _parted(columns, outcome.records.values())
        results = [
            comparison(each, title=title, seeds=seeds, notes=_tried(chosen), columns=columns)
            for title, each in records.items()
        ]
        show(results, format, intervals=intervals, output=output)
        if format == "terminal" and output is None:
            _print_words(records, outcome, runs)
    tell_package(ended.values())
    close_grid(outcome, store)


def _columns(asked: str | None, specs: Iterable[RunSpec]) -> dict[str, Column]:
    """Return the columns of a comparison by name; every measure of the runs can be one."""
    specs, measures = list(specs), dict[str, Measure]()
    for spec in specs:
        for name, each in find_measures(spec.measure).items():
            if measures.setdefault(name, each) is not each:
                remedy = "two files have a function of this name: rename one"
                raise invalid("measure", name, "one function for each column", remedy)
    names = [*USUAL, *measures] if asked is None else [name.strip() for name in asked.split(",")]
    own = {name: column_of(name, measures[owner(name)]) for name in names if owner(name) in measures}
    for name in names:
        check_name("--metrics", name, {*FIGURES, *measures, *own})
    if len(set(names)) < len(names):
        raise invalid("--metrics", asked, "each metric once")
    if "task_forward_transfer" in names and not any(spec.future for spec in specs):
        got = Description("task_forward_transfer")
        raise invalid("--metrics", got, "figures that are measured", "add --set future=true")
    return {name: own.get(name) or FIGURES[name] for name in names}


def _parted(columns: Mapping[str, Column], records: Iterable[Record]) -> dict[str, Column]:
    """Return the columns, with one for each number of a measure that returns several."""
    found = dict.fromkeys(name for record in records for name in record.measured)
    parts = {name: [each for each in found if each.startswith(f"{name}.")] or [name] for name in columns}
    for name in columns:
        numbers = [each for each in found if owner(each) == owner(name)]
        if numbers and not {*parts[name]} & {*numbers}:
            check_name("--metrics", name, numbers)
    return {
        part: column if part == name else dataclasses.replace(column, title=part)
        for name, column in columns.items()
        for part in parts[name]
    }


def _sizes(memory: str | None, presets: list[Preset], settings: list[str] | None) -> list[int]:
    """Parse the sizes of `--memory`."""
    if memory is None:
        return [_meant_for("memory", presets, 200)]
    sizes = [parse_option(options_of(RunSpec), "memory", text.strip()) for text in memory.split(",")]
    if len(set(sizes)) < len(sizes):
        raise invalid("--memory", memory, "each size once")
    own = read_settings(settings)
    if len(sizes) > 1 and any(each.rpartition(".")[2] == "memory" for each in own):
        raise invalid("--memory", memory, "one size with --set memory", "leave one of them out")
    check_once(own, {"--memory": sizes[0]})  # er.memory=50, for one row, may differ
    return sizes


def _rows(learners: str | None, presets: Sequence[Preset]) -> dict[str, Preset]:
    """Return the rows of a comparison by name: plain learners, then presets."""
    if learners is None:
        learners = "" if presets else "pcl,er,sgd"
    names = [name.strip() for name in learners.split(",") if name.strip()]
    if len(set(names)) < len(names):
        raise invalid("--learners", learners, "each name once", SEVERAL)
    rows = {name: Preset(name, name) for name in names}
    for each in presets:
        if each.name in rows:
            raise invalid("--preset", each.name, "a name that no other row has", "rename the file")
        rows[each.name] = each
    if not rows:
        raise invalid("--learners", learners, "at least one name", "for example --learners pcl,er,sgd")
    return rows


def _specs(
    rows: Mapping[str, Preset],
    presets: list[Preset],
    settings: list[str] | None,
    stream: str | None,
    memory: int,
    seeds: int,
) -> dict[str, list[RunSpec]]:
    """Return the runs of each row, one for each seed, all on the same stream."""
    given = settings_of_each({name: row.learner for name, row in rows.items()}, read_settings(settings))
    for name, instead in (("stream", "--stream"), ("seed", "--seeds")):
        if any(name in own for own in given.values()):
            raise invalid(
                "--set", name, "a setting that may differ between rows", f"use {instead}, which applies to all rows"
            )
        for row in (each.name for each in presets if name in each.settings):
            remedy = f"take it out of [settings] and use {instead}, which applies to all rows"
            raise invalid(f"preset {row!r}", name, "a setting that may differ between rows", remedy)
    stream = _meant_for("stream", presets, "seq-digits") if stream is None else stream
    try:
        return {
            name: [row.spec(given[name], stream=stream, memory=memory, seed=seed) for seed in range(seeds)]
            for name, row in rows.items()
        }
    except InputError as error:
        texts = [text for own in given.values() for text in own.values()]
        if any("," in text and repr(text) == error.got for text in texts):  # probably meant as a list of values
            error.remedy = "; ".join(filter(None, [error.remedy, SEVERAL]))
        raise


def _print_records(outcome: Outcome) -> None:
    """Print the complete records of the runs as JSON."""
    told = {
        "reused": outcome.reused,
        "runs": [dataclasses.asdict(each) for each in outcome.records.values()],
        "diverged": [dataclasses.asdict(each) for each in outcome.diverged.values()],
        "failed": [{"key": each.spec.key, "reason": each.reason} for each in outcome.failures],
    }
    print(json.dumps(told, indent=1))


def _print_words(tables: Mapping[str, Mapping[str, Sequence[Record]]], outcome: Outcome, folder: Path) -> None:
    """Print the lines below the tables: how the runs were trained, how many there are, and what their results mean."""
    console = Console(markup=False)
    if told := _made_alike(next(iter(tables.values()))):
        console.print(told)
    count = len(outcome.records) + len(outcome.diverged)
    diverged = f", {len(outcome.diverged)} diverged" * bool(outcome.diverged)
    print(f"{many(count, 'run')}, {outcome.reused} of them already there ({folder}){diverged}")
    for title, rows in tables.items():
        console.print((f"{title}: " if len(tables) > 1 else "") + in_words(rows))


def _check_built(specs: Iterable[RunSpec]) -> None:
    """Refuse incompatible settings at once, before any run fails because of them."""
    for spec in specs:
        try:
            build(spec, device="cpu")
        except InputError:
            raise
        except Exception:  # an unexpected error must not stop the other rows; the grid reports it
            continue


def _title(rows: Mapping[str, Sequence[RunSpec]], settings: Iterable[str]) -> str:
    """Return the title of a comparison: the stream, the memory and the other settings."""
    runs = [spec.resolved() for row in rows.values() for spec in row]
    sizes = " and ".join(str(size) for size in sorted({run["memory"] for run in runs if "memory" in run}))
    named = ("memory", "measure", "future")  # shown in the title already, or as columns
    others = " ".join(each for each in settings if each.partition("=")[0].rpartition(".")[2] not in named)
    told = [runs[0]["stream"], f"memory {sizes}" if sizes else "", others]
    return ", ".join(each for each in told if each)


def _made_alike(rows: Mapping[str, Sequence[Record]]) -> str:
    """Describe how the runs of all rows were trained, once for rows that agree."""
    alike = defaultdict[str, list[str]](list)
    for name, records in rows.items():
        if whole := finished(records):
            alike[made_with(whole)].append(name)
    if len(alike) == 1:
        return next(iter(alike))
    return "; ".join(f"{', '.join(names)}: {made}" for made, names in alike.items())


def _tried(presets: Sequence[Preset]) -> list[str]:
    """Return a note if the presets were not tuned with the same effort."""
    spent = defaultdict[Effort, list[str]](list)
    for preset in presets:
        spent[Effort.of(preset)].append(preset.name)
    if len(spent) < 2:
        return []
    told = (f"{', '.join(names)} ({effort}{' each' * (len(names) > 1)})" for effort, names in spent.items())
    return [f"Tuning effort differs: {', '.join(told)}."]


def _meant_for(what: str, presets: list[Preset], otherwise: Any) -> Any:
    """Return the stream or memory that all presets were made for, if they name one."""
    meant = {value for each in presets if (value := getattr(each, what)) is not None}
    if len(meant) > 1:
        got = Description(f"presets for {' and '.join(map(str, sorted(meant)))}")
        raise invalid(f"--{what}", got, "the same for all rows", f"give --{what}")
    return meant.pop() if meant else otherwise
