"""Runs grouped by what they have in common: a scene is a comparison of methods, each with one run per seed."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parabolic.experiments import FailedRun, Record, Store, known_presets, load_preset
from parabolic.experiments.paper import is_bound
from parabolic.plugins import is_loaded
from parabolic.report.comparisons import at_once, cell_of, column_of, many
from parabolic.report.runs import (
    Row,
    departures,
    name_of,
    place_of,
    row_of,
    select,
    short,
    unusual,
    usual_options,
    written,
)
from parabolic.report.tables import Cell, Column, Results
from parabolic.statistics import Summary

__all__ = ["Finds", "Method", "Scene", "find_scenes", "results_of"]

VALIDATION = {"validation", "scenario.validation"}
COLUMNS = {
    "acc": Column("Acc, %"),
    "aaa": Column("AAA, %"),
    "forgetting": Column("forgetting, points", better="lower"),
    "seconds": Column("training, s", better="lower"),
}
MADE_OF = ("environment.code", "environment.data")  # the user's own: if they differ, it is another method


@dataclass(frozen=True)
class Method:
    """A learner with its settings: its runs that finished, diverged and failed, by seed."""

    name: str
    runs: Mapping[int, Record] = field(default_factory=dict)
    diverged: Mapping[int, Record] = field(default_factory=dict)
    failed: Mapping[int, FailedRun] = field(default_factory=dict)

    def cell(self, metric: str, wanted: int = 0) -> Cell:
        """A metric, or the training `seconds`, by seed."""
        return cell_of([*self.runs.values(), *self.diverged.values()], metric, wanted)

    @property
    def tried(self) -> dict[int, Record | FailedRun]:
        """All of its runs, by seed."""
        return {**self.failed, **self.diverged, **self.runs}

    def summary(self, metric: str) -> Summary:
        """The summary of a metric over the seeds."""
        return self.cell(metric).ours or Summary(math.nan, math.nan, 0)

    @property
    def curves(self) -> NDArray[np.float64]:
        """The mean accuracy over the tasks seen so far, after each task: one row per seed."""
        return np.array([[fmean(row) for row in record.accuracy] for record in self._alike])

    @property
    def matrices(self) -> NDArray[np.float64]:
        """The accuracy matrices, one per seed, with NaN above the diagonal."""
        return np.stack([record.matrix for record in self._alike])

    @property
    def _alike(self) -> list[Record]:
        """The runs with the most tasks: a user's stream may have a different number of tasks with each seed."""
        tasks = max(len(record.accuracy) for record in self.runs.values())
        return [record for record in self.runs.values() if len(record.accuracy) == tasks]


@dataclass(frozen=True)
class Scene:
    """What methods are compared on: a stream, a memory size, and any other non-default settings."""

    title: str
    stream: str
    methods: Sequence[Method]  # the most accurate first; those without a finished run last
    memory: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)  # stream, memory, and what is non-default in any scene

    @property
    def done(self) -> list[Method]:
        """The methods with finished runs."""
        return [method for method in self.methods if method.runs]

    @property
    def leaders(self) -> list[Method]:
        """The most accurate methods: several if their printed accuracies are equal."""
        best = [f"{method.summary('acc').mean:.1f}" for method in self.done]
        return [method for method, acc in zip(self.done, best, strict=True) if acc == best[0]]

    @cached_property
    def seeds(self) -> list[int]:
        """The seeds that at least half of the methods were run with; a method without one of them is missing it."""
        tried = Counter(seed for method in self.methods for seed in method.tried)
        return sorted(seed for seed, times in tried.items() if 2 * times >= len(self.methods))

    def missing(self, method: Method) -> list[int]:
        """The seeds of the scene that a method was not run with."""
        return [seed for seed in self.seeds if seed not in method.tried]


@dataclass(frozen=True)
class Finds:
    """The contents of a store: scenes in order, runs, and what could not be read."""

    scenes: Sequence[Scene]
    runs: Mapping[str, Record]  # by key
    diverged: Mapping[str, Record]
    failed: Mapping[str, FailedRun]
    damaged: Mapping[str, str]  # the reason, by file
    left_out: str = ""  # what is not shown, and how to show it

    @property
    def finished(self) -> str:
        """When the last run finished."""
        return max((str(record.environment.get("finished", "")) for record in self.runs.values()), default="")


def find_scenes(store: Store, where: Mapping[str, str] | None = None) -> Finds:
    """Group the runs of a store (those that `where` selects, as `parabolic runs --where` does) into scenes.

    Runs with held-out examples are included only if `where` selects by `validation`. Trials of a search are such runs:
    among many, one is always ahead, and a test of that is meaningless.
    """
    where = where or {}
    ended, lost, damaged = store.read()
    rows = select([*map(row_of, ended), *map(row_of, lost)], where)
    held_out = [] if where.keys() & VALIDATION else [row for row in rows if row.get("scenario.validation")]
    chosen = {row["key"] for row in rows} - {row["key"] for row in held_out}
    rows = [row for row in rows if row["key"] in chosen]
    shown = [each for each in ended if each.key in chosen]
    kept = (
        {each.key: each for each in shown if not each.diverged},
        {each.key: each for each in shown if each.diverged},
        {each.key: each for each in lost if each.key in chosen},
    )
    unreadable = {str(path): reason for path, reason in damaged.items()}
    return Finds(_scenes(rows, kept), *kept, unreadable, _left_out(held_out))


def _left_out(rows: Sequence[Row]) -> str:
    """A note on runs with held-out examples that are not shown."""
    shares = sorted({row["scenario.validation"] for row in rows})
    how = " or ".join(f"--where validation={share}" for share in shares)
    told = f"{many(len(rows), 'run')} with held-out examples, such as trials of a search, left out"
    return f"{told}; to see them: {how}" if rows else ""


def results_of(scene: Scene) -> Results:
    """A table of a scene's methods against metrics and the user's own measures."""
    wanted = max([len(scene.seeds), *[len(method.runs) for method in scene.methods]])
    runs = {method.name: list(method.runs.values()) for method in scene.methods}
    every = [record for each in runs.values() for record in each]
    measures = dict.fromkeys(name for record in every for name in record.measured if not is_bound(record, name))
    columns = COLUMNS | {name: column_of(name) for name in measures}
    rows = {method.name: [method.cell(name, wanted) for name in columns] for method in scene.methods}
    return Results("scene", scene.title, list(columns.values()), rows, at_once(runs), heading="method")


def _scenes(rows: Iterable[Row], kept: Sequence[Mapping[str, Any]]) -> list[Scene]:
    """Group rows by stream and non-default settings, then by memory; a learner without one is in every size's scene.

    `kept` are the runs that finished, diverged and failed, by key.
    """
    places: defaultdict[tuple[str, str], dict[int | None, list[Row]]] = defaultdict(dict)
    names = dict.fromkeys(("stream", "memory"))
    for row in rows:
        names |= dict.fromkeys(unusual(row))
        places[place_of(row)].setdefault(row.get("memory"), []).append(row)
    scenes, presets = [], _presets()
    for (stream, others), sizes in sorted(places.items()):
        without = sizes.pop(None, [])
        for memory, mine in sorted(sizes.items()) or [(None, [])]:
            told = [stream, f"memory {memory}" if memory is not None else "", others]
            title = ", ".join(each for each in told if each)
            here = [*mine, *without]
            settings = {short(name): here[0][name] for name in names if name in here[0]}
            scenes.append(Scene(title, stream, _methods(here, kept, presets), memory, settings))
    return scenes


def _methods(
    rows: Sequence[Row], kept: Sequence[Mapping[str, Any]], presets: Mapping[str, Mapping[str, Row]]
) -> list[Method]:
    called: defaultdict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        called[_called(row, presets.get(row["learner"], {}))].append(row)
    names = {learner: name_of(learner) for learner, _ in called}
    short = Counter((names[learner], settings) for learner, settings in called)
    methods = []
    for (learner, settings), mine in called.items():
        name = names[learner] if short[names[learner], settings] == 1 else learner
        for made, alike in _by_making(mine).items():
            said = " ".join(each for each in (name, settings, made) if each)
            methods.append(Method(said, *(_by_seed(alike, each) for each in kept)))
    # Without a finished run the accuracy is NaN, by which nothing can be sorted.
    return sorted(methods, key=lambda each: (not each.runs, -each.summary("acc").mean if each.runs else 0, each.name))


def _by_making(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Group rows by their code and data, under names in words: "" for the newest, and for rows that record none."""
    ordered = sorted(rows, key=lambda row: str(row.get("environment.finished", "")), reverse=True)
    newest = {part: str(row[part]) for row in reversed(ordered) for part in MADE_OF if part in row}
    alike = defaultdict[tuple[str, ...], list[Row]](list)
    for row in ordered:
        alike[tuple(str(row.get(part, each)) for part, each in newest.items())].append(row)
    named, seen = dict[str, list[Row]](), Counter[str]()
    for made, mine in alike.items():
        older = " and ".join(short(part) for part, each in zip(newest, made, strict=True) if each != newest[part])
        seen[older] += 1
        again = f" {seen[older]}" if seen[older] > 1 else ""
        named[f"(older {older}{again})" if older else ""] = mine
    return named


def _called(row: Row, presets: Mapping[str, Row]) -> tuple[str, str]:
    """A learner or one of its presets, and the options in which a run differs from it: whichever is shorter.

    Among equally short presets, one for the run's stream is preferred.
    """
    own = {name: value for name, value in departures(row).items() if name.startswith("options.")}
    said = [(row["learner"], own)]
    for preset, usual in presets.items():
        differs = (name for name in row if name.startswith("options.") and row[name] != usual.get(name))
        said.append((preset, {name: row[name] for name in differs}))

    def effort(each: tuple[str, Row]) -> tuple[int, bool, bool]:
        name, others = each
        other = name != row["learner"]
        return len(others) + other, other, other and presets[name]["stream"] != row["stream"]

    name, others = min(said, key=effort)
    return name, written(others)


def _presets() -> dict[str, dict[str, Row]]:
    """The stream and the options of every preset that can be used, by learner and name."""
    found = defaultdict[str, dict[str, Row]](dict)
    for name in known_presets():
        with suppress(Exception):  # anything can be wrong in a user's file
            preset = load_preset(name)
            named = [preset.learner, preset.stream or "", *map(str, preset.settings.values())]
            if all(map(is_loaded, named)):
                options = preset.spec().resolved()["options"]
                usual = {f"options.{option}": value for option, value in options.items()}
            else:  # it names code, which is not run to give its name to a run
                usual = usual_options(preset.learner)
                own = {f"options.{name}": value for name, value in preset.settings.items()}
                usual |= {name: value for name, value in own.items() if name in usual}
            found[preset.learner][name] = {"stream": preset.stream, **usual}
    return found


def _by_seed(rows: Iterable[Row], kept: Mapping[str, Any]) -> dict[int, Any]:
    return {row["seed"]: kept[row["key"]] for row in sorted(rows, key=lambda row: row["seed"]) if row["key"] in kept}
