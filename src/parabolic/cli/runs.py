"""`parabolic list`, `run` and `compare`."""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from parabolic.backbones import BACKBONES
from parabolic.checks import Description, InputError, check_name, invalid
from parabolic.cli.common import (
    Again,
    Checkpoint,
    Device,
    FromPreset,
    Json,
    PresetLearner,
    PresetMemory,
    PresetSeed,
    PresetStream,
    Runs,
    Set,
    check_once,
    naming_preset,
    read_run,
    read_settings,
    settings_of_each,
)
from parabolic.cli.grids import (
    Address,
    Engine,
    Fleet,
    Gpus,
    Minutes,
    Workers,
    close_grid,
    tell_outdated,
    tell_package,
    train_all,
)
from parabolic.cli.tables import Format, Intervals, Output, check_output, show, titles_of
from parabolic.cli.tracking import Track, tracking
from parabolic.engine import Callback, Monitor, ProgressBar
from parabolic.engine.measures import Measure, find_measures, owner
from parabolic.experiments import Outcome, Preset, Record, RunSpec, Store, build, load_preset, run
from parabolic.experiments.execution import Unsaved, find_device
from parabolic.experiments.paper import Effort
from parabolic.experiments.resume import Keeping
from parabolic.learners import Learner, find_learner, known_learners
from parabolic.options import options_of, parse_option, write_option
from parabolic.report import FORMATS, comparison, in_words
from parabolic.report.comparisons import FIGURES, USUAL, briefly, column_of, finished, many
from parabolic.report.formats import accuracies
from parabolic.report.tables import Column
from parabolic.streams import known_streams

__all__ = ["compare", "list_all", "run_one"]

OF_A_RUN = ("backbone", "batch", "epochs", "precision", "channels_last", "measure", "heads", "future")
"""Fields of a run that only `--set` can set."""

SEVERAL = "compare settings of one method as presets: --preset a.toml --preset b.toml, each with learner and [settings]"


def list_all(
    learner: Annotated[
        str | None, typer.Argument(help="Explain the options of this learner: its name, or module:Class.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the learners with their options, the streams and the networks."""
    if learner is not None:
        _list_one(learner, as_json)
        return
    learners = {name: _facts(each) for name, each in sorted(known_learners().items())}
    if as_json:
        streams = {name: entry.about for name, entry in known_streams().items()}
        print(json.dumps({"learners": learners, "streams": streams, "backbones": sorted(BACKBONES)}, indent=1))
        return
    console = Console(markup=False)
    table = Table("learner", "reference", "needs", "options", title="Learners", title_justify="left", show_lines=True)
    for name, facts in learners.items():
        options = ", ".join(f"{key}={stated['default']}" for key, stated in facts["options"].items())
        table.add_row(name, facts["reference"], ", ".join(facts["needs"]) or "nothing", options)
    console.print(table)
    table = Table("stream", "what it is", "network", "batch", title="Streams", title_justify="left")
    for name, entry in known_streams().items():
        table.add_row(name, entry.about, entry.backbone, str(entry.batch))
    console.print(table)
    console.print(f"Networks: {', '.join(sorted(BACKBONES))}, or your own as module:factory.")
    console.print("To see what the options do: parabolic list LEARNER, or parabolic list --json")


def _list_one(name: str, as_json: bool) -> None:
    kind = find_learner(name)
    if as_json:
        print(json.dumps(_facts(kind), indent=1))
        return
    console, fields = Console(markup=False), options_of(RunSpec)
    about = inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0]
    for line in filter(None, (f"{name}: {about}" if about else name, kind.reference)):
        console.print(Text(line))
    groups = {
        "Its options": options_of(kind),
        "Options of every run": {key: fields[key] for key in fields if key in OF_A_RUN},
    }
    for title, options in groups.items():
        table = Table("--set", "default", "values", "what it is", title=title, title_justify="left")
        for key, stated in options.items():
            table.add_row(key, write_option(stated.default), stated.allowed, Text(stated.about))
        console.print(table)
    console.print("For the scenarios of streams: parabolic data list")


def run_one(
    learner: PresetLearner = None,
    preset: FromPreset = None,
    stream: PresetStream = None,
    memory: PresetMemory = None,
    seed: PresetSeed = None,
    settings: Set = None,
    runs: Runs = Path("runs"),
    again: Again = False,
    device: Device = "auto",
    checkpoint: Checkpoint = 60.0,
    monitor: Annotated[bool, typer.Option(help="Record what `parabolic watch` shows.")] = True,
    track: Track = None,
    as_json: Json = False,
) -> None:
    """Train one learner on one stream and store the result; a run that was stopped resumes."""
    chosen, spec = read_run(learner, preset, settings, stream=stream, memory=memory, seed=seed)
    store = Store(runs)
    find_device(device)  # checked even if the run is already stored and needs no device
    Keeping.of(store, checkpoint)
    if not again:
        tell_outdated([spec], store)
    lost: Unsaved | None = None
    with ExitStack() as stack:
        stack.enter_context(naming_preset([chosen], stream))
        bar = stack.enter_context(ProgressBar())
        bar.title = chosen.name
        tracker = stack.enter_context(tracking(track, {"key": spec.key, **spec.resolved()}))
        watchers: list[Callback] = [bar]
        if monitor:  # before the tracker, which closes its entry at the end of the run
            looks = Monitor(every=20, share=0.005, file=store.monitor(spec.key), tracker=tracker)
            watchers.append(stack.enter_context(looks))
        if tracker is not None:
            watchers.append(tracker)
        try:
            record, reused = run(spec, store, again=again, device=device, checkpoint=checkpoint, callbacks=watchers)
        except Unsaved as error:  # the results exist, and this is the last chance to see them
            record, reused, lost = error.record, False, error
        except KeyboardInterrupt:
            begun = store.checkpoint(spec.key).exists()
            told = "resumes from the last checkpoint" if begun else "starts over, as there was no checkpoint yet"
            print(f"stopped: the same command {told}", file=sys.stderr)
            raise typer.Exit(130) from None
    if as_json:
        print(json.dumps({**dataclasses.asdict(record), "reused": reused}, indent=1))
    else:
        title = f"{chosen.name} on {spec.stream}, seed {spec.seed}"
        _print_run(record, title, None if lost else store.path(record.key), reused)
    tell_package([record])
    if lost:
        print(f"error: {lost}", file=sys.stderr)
        raise typer.Exit(1)


def _print_run(record: Record, title: str, place: Path | None, reused: bool) -> None:
    """Print the results of a run, how it was trained, and where it is stored, if it is."""
    console = Console(markup=False)
    table, shown = accuracies(record.accuracy, console.width, title)
    console.print(table)
    if shown < len(record.accuracy):
        elsewhere = f"; all are in {place}/run.json" if place else ""
        console.print(f"{shown} of {len(record.accuracy)} tasks{elsewhere}")
    console.print(_made_with([record]))
    for start, told in (("", False), ("with the task told: ", True)):
        figures = {
            name.removeprefix("task_"): value
            for name, value in record.metrics.items()
            if name.startswith("task_") == told and name not in record.measured
        }
        if figures:
            console.print(start + ", ".join(f"{name.replace('_', ' ')} {each:z.1f}" for name, each in figures.items()))
    if record.measured:
        console.print(", ".join(f"{name} {values[-1]:.4g}" for name, values in record.measured.items()))
    kept = f"{'found' if reused else 'stored'} in {place}" if place else "not stored"
    console.print(f"{briefly(sum(record.train_seconds))} s of training; {kept}")


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
        called = rows if format == "json" else titles_of(rows).values()
        records = {
            _title([spec for row in specs.values() for spec in row], settings or []): {
                shown: [ended[spec.key] for spec in row if spec.key in ended]
                for shown, row in zip(called, specs.values(), strict=True)
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


def _title(specs: Iterable[RunSpec], settings: Iterable[str]) -> str:
    """Return the title of a comparison: the stream, the memory and the other settings."""
    runs = [spec.resolved() for spec in specs]
    sizes = " and ".join(str(size) for size in sorted({run["memory"] for run in runs if "memory" in run}))
    named = ("memory", "measure", "future")  # shown in the title already, or as columns
    others = " ".join(each for each in settings if each.partition("=")[0].rpartition(".")[2] not in named)
    told = [runs[0]["stream"], f"memory {sizes}" if sizes else "", others]
    return ", ".join(each for each in told if each)


def _made_with(records: Sequence[Record]) -> str:
    """Describe the network, batches and steps of runs that differ only in their seeds."""
    spec, steps = records[0].spec, sorted({record.steps for record in records})
    epochs = f", {many(spec['epochs'], 'epoch')}" if spec["epochs"] != 1 else ""
    told = " to ".join(f"{each:,}" for each in dict.fromkeys((steps[0], steps[-1])))
    return f"{spec['backbone']}, batches of {spec['batch']}{epochs}: {told} step{'s' * (told != '1')}"


def _made_alike(rows: Mapping[str, Sequence[Record]]) -> str:
    """Describe how the runs of all rows were trained, once for rows that agree."""
    alike = defaultdict[str, list[str]](list)
    for name, records in rows.items():
        if whole := finished(records):
            alike[_made_with(whole)].append(name)
    if len(alike) == 1:
        return next(iter(alike))
    return "; ".join(f"{', '.join(names)}: {made}" for made, names in alike.items())


def _tried(presets: Sequence[Preset]) -> list[str]:
    """Return a note if the presets were not tuned with the same effort."""
    spent = {preset.name: Effort.of(preset) for preset in presets}
    if len(set(spent.values())) < 2:
        return []
    return [f"Tuning effort differs: {', '.join(f'{name} ({each})' for name, each in spent.items())}."]


def _facts(learner: type[Learner]) -> dict[str, Any]:
    """Return a learner's reference, requirements and options."""
    options = options_of(learner)
    needs = {"memory": "memory" in options, "tasks": learner.needs_tasks, "all tasks at once": learner.sees_all}
    defaults = {
        name: write_option(each.default) if callable(each.default) else each.default for name, each in options.items()
    }
    return {
        "reference": learner.reference,
        "needs": [need for need, needed in needs.items() if needed],
        "options": {name: {"default": defaults[name], "about": each.about} for name, each in options.items()},
    }


def _meant_for(what: str, presets: list[Preset], otherwise: Any) -> Any:
    """Return the stream or memory that all presets were made for, if they name one."""
    meant = {value for each in presets if (value := getattr(each, what)) is not None}
    if len(meant) > 1:
        got = Description(f"presets for {' and '.join(map(str, sorted(meant)))}")
        raise invalid(f"--{what}", got, "the same for all rows", f"give --{what}")
    return meant.pop() if meant else otherwise
