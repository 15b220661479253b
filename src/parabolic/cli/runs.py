"""`parabolic list`, `run` and `compare`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from parabolic.backbones import BACKBONES
from parabolic.checks import invalid
from parabolic.cli.common import Again, Device, Json, Memory, Runs, Seed, Set, Stream, read_settings
from parabolic.engine import ProgressBar
from parabolic.experiments import Record, RunSpec, Store, run
from parabolic.learners import Learner, known_learners
from parabolic.options import options_of
from parabolic.report import comparison, in_words
from parabolic.streams import known_streams

__all__ = ["compare", "list_all", "run_one"]


def list_all(as_json: Json = False) -> None:
    """Show the learners with their options, the streams and the networks."""
    learners = {name: _facts(each) for name, each in sorted(known_learners().items())}
    if as_json:
        streams = {name: entry.about for name, entry in known_streams().items()}
        print(json.dumps({"learners": learners, "streams": streams, "backbones": sorted(BACKBONES)}, indent=1))
        return
    console = Console()
    table = Table("learner", "reference", "needs", "options", title="Learners", title_justify="left", show_lines=True)
    for name, facts in learners.items():
        options = ", ".join(f"{key}={stated['default']}" for key, stated in facts["options"].items())
        table.add_row(name, facts["reference"], ", ".join(facts["needs"]) or "nothing", options)
    console.print(table)
    table = Table("stream", "what it is", "network", "batch", title="Streams", title_justify="left")
    for name, entry in known_streams().items():
        table.add_row(name, entry.about, entry.backbone, str(entry.batch))
    console.print(table)
    console.print(f"Networks: {', '.join(sorted(BACKBONES))}, or module:factory of your own.")
    console.print("What an option does: parabolic list --json")


def run_one(
    learner: Annotated[str, typer.Option(help="The method: a name of `parabolic list`, or module:Class.")] = "pcl",
    stream: Stream = "seq-digits",
    memory: Memory = 200,
    seed: Seed = 0,
    settings: Set = None,
    runs: Runs = Path("runs"),
    again: Again = False,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Train one learner on one stream and keep the result."""
    spec = RunSpec.from_settings(learner, read_settings(settings), stream=stream, memory=memory, seed=seed)
    store = Store(runs)
    with ProgressBar() as bar:
        bar.title = learner
        record, reused = run(spec, store, again=again, device=device, callbacks=[bar])
    if as_json:
        print(json.dumps({**dataclasses.asdict(record), "reused": reused}, indent=1))
        return
    console = Console()
    table = Table(title=f"{learner} on {stream}, seed {seed}", title_justify="left")
    table.add_column("after task")
    for task in range(len(record.accuracy)):
        table.add_column(f"task {task + 1} %", justify="right")
    for task, row in enumerate(record.accuracy):
        table.add_row(str(task + 1), *[f"{value:.1f}" for value in row])
    console.print(table)
    console.print(", ".join(f"{name.replace('_', ' ')} {value:.1f}" for name, value in record.metrics.items()))
    console.print(
        f"{sum(record.train_seconds):.1f} s of training; {'found' if reused else 'kept'} in {store.path(record.key)}"
    )


def compare(
    learners: Annotated[str, typer.Option(help="Names, with commas between them.")] = "pcl,er,sgd",
    stream: Stream = "seq-digits",
    memory: Memory = 200,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds, from 0.")] = 5,
    settings: Set = None,
    runs: Runs = Path("runs"),
    again: Again = False,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Train several learners with several seeds and print them side by side."""
    names = [name.strip() for name in learners.split(",") if name.strip()]
    if not names:
        raise invalid("--learners", learners, "at least one name", "for example --learners pcl,er,sgd")
    given = _by_learner(names, read_settings(settings))
    specs = {
        name: [
            RunSpec.from_settings(name, given[name], stream=stream, memory=memory, seed=seed) for seed in range(seeds)
        ]
        for name in names
    }
    store, records, reused = Store(runs), dict[str, list[Record]](), 0
    with ProgressBar(runs=len(names) * seeds) as bar:
        for name, wanted in specs.items():
            records[name] = []
            for spec in wanted:
                bar.title = f"{name}, seed {spec.seed}"
                record, found = run(spec, store, again=again, device=device, callbacks=[bar])
                records[name].append(record)
                reused += found
                bar.finish_run()
    total = len(names) * seeds
    if as_json:
        print(
            json.dumps(
                {
                    "reused": reused,
                    "runs": [dataclasses.asdict(each) for rows in records.values() for each in rows],
                },
                indent=1,
            )
        )
        return
    console = Console()
    console.print(
        comparison(
            records,
            title=f"{stream}, memory {memory}, {seeds} seeds: mean ± sd",
            caption=f"{total} runs, {reused} of them already there ({runs})",
        )
    )
    console.print(in_words(records))


def _facts(learner: type[Learner]) -> dict[str, Any]:
    """What there is to know of a learner before using it."""
    options = options_of(learner)
    needs = {"memory": "memory" in options, "tasks": learner.needs_tasks, "all tasks at once": learner.sees_all}
    return {
        "reference": learner.reference,
        "needs": [need for need, needed in needs.items() if needed],
        "options": {name: {"default": stated.default, "about": stated.about} for name, stated in options.items()},
    }


def _by_learner(names: list[str], settings: dict[str, str]) -> dict[str, dict[str, str]]:
    """The settings of each learner: `name=value` goes to those that have it, `learner.name=value` to that one.

    What none of them has goes to all, to be refused with the nearest name.
    """
    known = {name: RunSpec.learner_options(name).keys() | options_of(RunSpec).keys() for name in names}
    given: dict[str, dict[str, str]] = {name: {} for name in names}
    for key, text in settings.items():
        learner, _, own = key.rpartition(".")
        if learner in names:
            given[learner][own] = text
            continue
        having = [name for name in names if key in known[name]]
        for name in having or names:
            given[name].setdefault(key, text)
    return given
