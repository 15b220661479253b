"""`parabolic compare`: several learners on one stream."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from parabolic.checks import Description, InputError, check_name, invalid
from parabolic.cli.common import (
    Again,
    PresetStream,
    Runs,
    Set,
    check_once,
    naming_preset,
    read_settings,
    settings_of_each,
    table_console,
)
from parabolic.cli.grids import GridOptions, close_grid, note_package, train_all
from parabolic.cli.groups import with_groups
from parabolic.cli.tables import TableOptions, describe_training, titles_of
from parabolic.cli.tracking import Track
from parabolic.engine.measures import Measure, find_measures, owner
from parabolic.experiments import Outcome, Preset, Record, RunSpec, Store, build, load_preset
from parabolic.experiments.paper import Effort
from parabolic.options import options_of, parse_option
from parabolic.report import comparison, in_words
from parabolic.report.comparisons import FIGURES, USUAL, column_of, finished, judged_by, plural
from parabolic.report.tables import Column

__all__ = ["compare"]

SEVERAL = "compare settings of one method as presets: --preset a.toml --preset b.toml, each with learner and [settings]"


@with_groups
def compare(
    *,
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
    grid: GridOptions,
    track: Track = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            help=f"The columns, separated by commas: {', '.join(FIGURES)}, and the measures of `--set measure`.",
            show_default=f"{','.join(USUAL)} and all measures; with heads=true, with the task told",
        ),
    ] = None,
    tables: TableOptions,
    as_json: Annotated[bool, typer.Option("--json", help="Print the records of all runs instead of a table.")] = False,
) -> None:
    """Train several learners with several seeds and print their results side by side."""
    if as_json and not tables.in_terminal:
        raise invalid(
            "--json", Description("it with --output or --format"), "one kind of output", "leave the others out"
        )
    chosen = [load_preset(name) for name in preset or []]
    rows = _rows(learners, chosen)
    given = read_settings(settings)
    sizes = _sizes(memory, rows, given)
    row_settings = _row_settings(rows, given)
    stream_name = _preset_value("stream", rows, "seq-digits") if stream is None else stream
    by_size = [_specs(rows, row_settings, stream_name, size, seeds) for size in sizes]
    all_specs = (spec for table in by_size for row in table.values() for spec in row)
    specs = list({spec.key: spec for spec in all_specs}.values())  # without a memory, runs are the same at all sizes
    columns = _columns(metrics, specs)
    store = Store(runs)
    if grid.engine == "local":  # the data on the nodes of a cluster may be missing here
        first_specs = (row[0] for table in by_size for row in table.values())
        with naming_preset(chosen, stream):
            _check_built([spec for spec in first_specs if spec.options and store.ended(spec) is None])
    tables.check_file()
    outcome = train_all(specs, store, grid, track, again=again)
    ended = outcome.records | outcome.diverged
    if as_json:
        _print_records(outcome)
    else:
        titles = {row: row for row in rows} if tables.format == "json" else titles_of(rows)
        records = {
            _title(table, given): {
                titles[row]: [ended[spec.key] for spec in row_specs if spec.key in ended]
                for row, row_specs in table.items()
            }
            for table in by_size
        }
        columns = _split_columns(columns, outcome.records.values())
        results = [
            comparison(row_records, title=title, seeds=seeds, notes=_effort_notes(chosen), columns=columns)
            for title, row_records in records.items()
        ]
        tables.show(results)
        if tables.in_terminal:
            _print_summary(records, outcome, runs)
    note_package(ended.values())
    close_grid(outcome, store)


def _columns(metrics: str | None, specs: Iterable[RunSpec]) -> dict[str, Column]:
    """Return the columns of a comparison by name; every measure of the runs can be one."""
    specs, measures = list(specs), dict[str, Measure]()
    for spec in specs:
        for name, measure in find_measures(spec.measure).items():
            if measures.setdefault(name, measure) is not measure:
                remedy = "two files have a function of this name: rename one"
                raise invalid("measure", name, "one function for each column", remedy)
    heads = all(spec.heads for spec in specs)
    usual = [judged_by(name, heads=heads) for name in USUAL]
    names = [*usual, *measures] if metrics is None else [name.strip() for name in metrics.split(",")]
    own_columns = {name: column_of(name, measures[owner(name)]) for name in names if owner(name) in measures}
    for name in names:
        check_name("--metrics", name, {*FIGURES, *measures, *own_columns})
    if len(set(names)) < len(names):
        raise invalid("--metrics", metrics, "each metric once")
    if "task_forward_transfer" in names and not any(spec.future for spec in specs):
        got = Description("task_forward_transfer")
        raise invalid("--metrics", got, "figures that are measured", "add --set future=true")
    return {name: own_columns.get(name) or FIGURES[name] for name in names}


def _split_columns(columns: Mapping[str, Column], records: Iterable[Record]) -> dict[str, Column]:
    """Return the columns, with one for each number of a measure that returns several."""
    measured = dict.fromkeys(name for record in records for name in record.measured)
    parts = {name: [part for part in measured if part.startswith(f"{name}.")] or [name] for name in columns}
    for name in columns:
        numbers = [part for part in measured if owner(part) == owner(name)]
        if numbers and not {*parts[name]} & {*numbers}:
            check_name("--metrics", name, numbers)
    return {
        part: column if part == name else dataclasses.replace(column, title=part)
        for name, column in columns.items()
        for part in parts[name]
    }


def _sizes(memory: str | None, rows: Mapping[str, Preset], settings: Mapping[str, str]) -> list[int]:
    """Parse the sizes of `--memory`."""
    if memory is None:
        return [_preset_value("memory", rows, 200)]
    sizes = [parse_option(options_of(RunSpec), "memory", text.strip()) for text in memory.split(",")]
    if len(set(sizes)) < len(sizes):
        raise invalid("--memory", memory, "each size once")
    if len(sizes) > 1 and any(key.rpartition(".")[2] == "memory" for key in settings):
        raise invalid("--memory", memory, "one size with --set memory", "leave one of them out")
    check_once(settings, {"--memory": sizes[0]})  # er.memory=50, for one row, may differ
    return sizes


def _rows(learners: str | None, presets: Sequence[Preset]) -> dict[str, Preset]:
    """Return the rows of a comparison by name: plain learners, then presets."""
    if learners is None:
        learners = "" if presets else "pcl,er,sgd"
    names = [name.strip() for name in learners.split(",") if name.strip()]
    if len(set(names)) < len(names):
        raise invalid("--learners", learners, "each name once", SEVERAL)
    rows = {name: Preset(name, name) for name in names}
    for preset in presets:
        if preset.name in rows:
            raise invalid("--preset", preset.name, "a name that no other row has", "rename the file")
        rows[preset.name] = preset
    if not rows:
        raise invalid("--learners", learners, "at least one name", "for example --learners pcl,er,sgd")
    return rows


def _row_settings(rows: Mapping[str, Preset], settings: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return the settings of each row; the stream and the seeds, which all rows share, cannot be among them."""
    row_settings = settings_of_each({name: row.learner for name, row in rows.items()}, settings)
    for name, option in (("stream", "--stream"), ("seed", "--seeds")):
        expected, remedy = "a setting that may differ between rows", f"use {option}, which applies to all rows"
        if any(name in values for values in row_settings.values()):
            raise invalid("--set", name, expected, remedy)
        for row in rows.values():
            if name in row.settings:
                raise invalid(f"preset {row.name!r}", name, expected, f"take it out of [settings] and {remedy}")
    return row_settings


def _specs(
    rows: Mapping[str, Preset], row_settings: Mapping[str, Mapping[str, str]], stream: str, memory: int, seeds: int
) -> dict[str, list[RunSpec]]:
    """Return the runs of each row, one for each seed, all on the same stream."""
    try:
        return {
            name: [row.spec(row_settings[name], stream=stream, memory=memory, seed=seed) for seed in range(seeds)]
            for name, row in rows.items()
        }
    except InputError as error:
        texts = [text for values in row_settings.values() for text in values.values()]
        if any("," in text and repr(text) == error.got for text in texts):  # probably meant as a list of values
            error.remedy = "; ".join(filter(None, [error.remedy, SEVERAL]))
        raise


def _print_records(outcome: Outcome) -> None:
    """Print the complete records of the runs as JSON."""
    payload = {
        "reused": outcome.reused,
        "runs": [dataclasses.asdict(record) for record in outcome.records.values()],
        "diverged": [dataclasses.asdict(record) for record in outcome.diverged.values()],
        "failed": [{"key": failure.spec.key, "reason": failure.reason} for failure in outcome.failures],
    }
    print(json.dumps(payload, indent=1))


def _print_summary(tables: Mapping[str, Mapping[str, Sequence[Record]]], outcome: Outcome, folder: Path) -> None:
    """Print the lines below the tables: how the runs were trained, how many there are, and what their results mean."""
    console = table_console()
    if description := _describe_rows(next(iter(tables.values()))):
        console.print(description)
    count = len(outcome.records) + len(outcome.diverged)
    diverged = f", {len(outcome.diverged)} diverged" * bool(outcome.diverged)
    print(f"{plural(count, 'run')}, {outcome.reused} of them already there ({folder}){diverged}")
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


def _title(rows: Mapping[str, Sequence[RunSpec]], settings: Mapping[str, str]) -> str:
    """Return the title of a comparison: the stream, the memory and the other settings."""
    runs = [spec.resolved() for row in rows.values() for spec in row]
    sizes = " and ".join(str(size) for size in sorted({run["memory"] for run in runs if "memory" in run}))
    shown = ("memory", "measure", "future")  # in the title already, or as columns
    others = " ".join(f"{key}={text}" for key, text in settings.items() if key.rpartition(".")[2] not in shown)
    parts = [runs[0]["stream"], f"memory {sizes}" if sizes else "", others]
    return ", ".join(part for part in parts if part)


def _describe_rows(rows: Mapping[str, Sequence[Record]]) -> str:
    """Describe how the runs of all rows were trained, once for rows that agree."""
    groups = defaultdict[str, list[str]](list)
    for name, records in rows.items():
        if done := finished(records):
            groups[describe_training(done)].append(name)
    if len(groups) == 1:
        return next(iter(groups))
    return "; ".join(f"{', '.join(names)}: {description}" for description, names in groups.items())


def _effort_notes(presets: Sequence[Preset]) -> list[str]:
    """Return a note if the presets were not tuned with the same effort."""
    efforts = defaultdict[Effort, list[str]](list)
    for preset in presets:
        efforts[Effort.of(preset)].append(preset.name)
    if len(efforts) < 2:
        return []
    parts = (f"{', '.join(names)} ({effort}{' each' * (len(names) > 1)})" for effort, names in efforts.items())
    return [f"Tuning effort differs: {', '.join(parts)}."]


def _preset_value(field: str, rows: Mapping[str, Preset], default: Any) -> Any:
    """Return the stream or memory that all presets were made for, if they name one."""
    values = {value for preset in rows.values() if (value := getattr(preset, field)) is not None}
    if len(values) > 1:
        got = Description(f"presets for {' and '.join(map(str, sorted(values)))}")
        raise invalid(f"--{field}", got, "the same for all rows", f"give --{field}")
    return values.pop() if values else default
