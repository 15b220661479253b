"""Runs grouped by what they have in common: a scene is a comparison of methods, each with one run per seed."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parabolic import metrics
from parabolic.experiments import FailedRun, Record, Store, known_presets, load_preset
from parabolic.experiments.paper import is_bound
from parabolic.plugins import is_loaded
from parabolic.report.comparisons import cell_of, column_of, have_heads, joint_notes, judged_by, plural
from parabolic.report.runs import (
    Row,
    conditions_of,
    default_options,
    departures,
    format_settings,
    name_of,
    row_of,
    select,
    short_name,
    unusual_settings,
)
from parabolic.report.tables import Cell, Column, Results
from parabolic.statistics import Summary

__all__ = ["FoundScenes", "Method", "Scene", "find_scenes", "results_of"]

VALIDATION = {"validation", "scenario.validation"}
COLUMNS = {
    "acc": Column("Acc, %"),
    "aaa": Column("AAA, %"),
    "forgetting": Column("forgetting, points", better="lower"),
    "seconds": Column("training, s", better="lower"),
}
VERSIONED = ("environment.code", "environment.data")  # the user's own: if they differ, it is another method


@dataclass(frozen=True)
class Method:
    """A learner with its settings: its runs that finished, diverged and failed, by seed.

    If these have a head for each task, all accuracies are those with the task told, and so is forgetting.
    """

    name: str
    runs: Mapping[int, Record] = field(default_factory=dict)
    diverged: Mapping[int, Record] = field(default_factory=dict)
    failed: Mapping[int, FailedRun] = field(default_factory=dict)

    def cell(self, metric: str, wanted: int = 0) -> Cell:
        """A metric, or the training `seconds`, by seed."""
        runs = [*self.runs.values(), *self.diverged.values()]
        return cell_of(runs, judged_by(metric, heads=self.has_heads), wanted)

    @cached_property
    def has_heads(self) -> bool:
        """Whether its runs have a head for each task."""
        return have_heads(self.tried.values())

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
        return np.array([metrics.anytime(matrix) for matrix in self.matrices])

    @property
    def matrices(self) -> NDArray[np.float64]:
        """The accuracy matrices, one per seed, with NaN above the diagonal."""
        matrices = (record.task_matrix if self.has_heads else record.matrix for record in self._longest)
        return np.stack([matrix for matrix in matrices if matrix is not None])

    @property
    def _longest(self) -> list[Record]:
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
    def has_heads(self) -> bool:
        """Whether its runs have a head for each task; as this is a setting, all of them do or none."""
        return any(method.has_heads for method in self.methods)

    @property
    def remark(self) -> str:
        """What is added to the names of its figures, unless all classes compete."""
        return ", the task told" if self.has_heads else ""

    @property
    def leaders(self) -> list[Method]:
        """The most accurate methods: several if their printed accuracies are equal."""
        best = [f"{method.summary('acc').mean:.1f}" for method in self.done]
        return [method for method, acc in zip(self.done, best, strict=True) if acc == best[0]]

    @cached_property
    def seeds(self) -> list[int]:
        """The seeds that at least half of the methods were run with: those that `missing` looks for."""
        tried = Counter(seed for method in self.methods for seed in method.tried)
        return sorted(seed for seed, times in tried.items() if 2 * times >= len(self.methods))

    def missing(self, method: Method) -> list[int]:
        """The seeds of the scene that a method was not run with."""
        return [seed for seed in self.seeds if seed not in method.tried]


@dataclass(frozen=True)
class FoundScenes:
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


def find_scenes(store: Store, where: Mapping[str, str] | None = None) -> FoundScenes:
    """Group the runs of a store (those that `where` selects, as `parabolic runs --where` does) into scenes.

    Runs with held-out examples are included only if `where` selects by `validation`. Trials of a search are such runs:
    among many, one is always ahead, and a test of that is meaningless.
    """
    where = where or {}
    ended, failed, damaged = store.read()
    rows = select([*map(row_of, ended), *map(row_of, failed)], where)
    held_out = [] if where.keys() & VALIDATION else [row for row in rows if row.get("scenario.validation")]
    keys = {row["key"] for row in rows} - {row["key"] for row in held_out}
    rows = [row for row in rows if row["key"] in keys]
    selected = [run for run in ended if run.key in keys]
    outcomes = (
        {run.key: run for run in selected if not run.diverged},
        {run.key: run for run in selected if run.diverged},
        {run.key: run for run in failed if run.key in keys},
    )
    unreadable = {str(path): reason for path, reason in damaged.items()}
    return FoundScenes(_scenes(rows, outcomes), *outcomes, unreadable, _left_out_note(held_out))


def _left_out_note(rows: Sequence[Row]) -> str:
    """A note on runs with held-out examples that are not shown."""
    shares = sorted({row["scenario.validation"] for row in rows})
    filters = " or ".join(f"--where validation={share}" for share in shares)
    note = f"{plural(len(rows), 'run')} with held-out examples, such as trials of a search, left out"
    return f"{note}; to see them: {filters}" if rows else ""


def results_of(scene: Scene) -> Results:
    """A table of a scene's methods against metrics and the user's own measures."""
    wanted = max([len(scene.seeds), *[len(method.runs) for method in scene.methods]])
    runs = {method.name: list(method.runs.values()) for method in scene.methods}
    records = [record for same_method in runs.values() for record in same_method]
    measures = dict.fromkeys(name for record in records for name in record.measured if not is_bound(record, name))
    columns = COLUMNS | {name: column_of(name) for name in measures}
    if scene.has_heads:
        columns |= {name: replace(columns[name], group="the task told") for name in ("acc", "aaa", "forgetting")}
    rows = {method.name: [method.cell(name, wanted) for name in columns] for method in scene.methods}
    return Results("scene", scene.title, list(columns.values()), rows, joint_notes(runs), heading="method")


def _scenes(rows: Iterable[Row], outcomes: Sequence[Mapping[str, Any]]) -> list[Scene]:
    """Group rows by stream and non-default settings, then by memory; a learner without one is in every size's scene.

    `outcomes` are the runs that finished, diverged and failed, by key.
    """
    groups: defaultdict[tuple[str, str], dict[int | None, list[Row]]] = defaultdict(dict)
    setting_names = dict.fromkeys(("stream", "memory"))
    for row in rows:
        setting_names |= dict.fromkeys(unusual_settings(row))
        groups[conditions_of(row)].setdefault(row.get("memory"), []).append(row)
    scenes, presets = [], _presets()
    for (stream, others), sizes in sorted(groups.items()):
        memoryless = sizes.pop(None, [])
        for memory, same_size in sorted(sizes.items()) or [(None, [])]:
            parts = [stream, f"memory {memory}" if memory is not None else "", others]
            title = ", ".join(filter(None, parts))
            scene_rows = [*same_size, *memoryless]
            settings = {short_name(name): scene_rows[0][name] for name in setting_names if name in scene_rows[0]}
            scenes.append(Scene(title, stream, _methods(scene_rows, outcomes, presets), memory, settings))
    return scenes


def _methods(
    rows: Sequence[Row], outcomes: Sequence[Mapping[str, Any]], presets: Mapping[str, Mapping[str, Row]]
) -> list[Method]:
    groups: defaultdict[tuple[str, str], list[Row]] = defaultdict(list)
    defaults = {learner: default_options(learner) for learner in {row["learner"] for row in rows}}
    for row in rows:
        groups[_method_name(row, defaults[row["learner"]], presets.get(row["learner"], {}))].append(row)
    names = {learner: name_of(learner) for learner, _ in groups}
    uses = Counter((names[learner], settings) for learner, settings in groups)
    methods = []
    for (learner, settings), group in groups.items():
        name = names[learner] if uses[names[learner], settings] == 1 else learner
        for version, same_version in _by_version(group).items():
            title = " ".join(filter(None, (name, settings, version)))
            methods.append(Method(title, *(_by_seed(same_version, runs) for runs in outcomes)))

    def rank(method: Method) -> tuple[bool, float, str]:
        # Without a finished run the accuracy is NaN, by which nothing can be sorted.
        return not method.runs, -method.summary("acc").mean if method.runs else 0, method.name

    return sorted(methods, key=rank)


def _by_version(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Group rows by their code and data, under names in words: "" for the newest, and for rows that record none."""
    ordered = sorted(rows, key=lambda row: str(row.get("environment.finished", "")), reverse=True)
    newest = {part: str(row[part]) for row in reversed(ordered) for part in VERSIONED if part in row}
    by_version = defaultdict[tuple[str, ...], list[Row]](list)
    for row in ordered:
        by_version[tuple(str(row.get(part, value)) for part, value in newest.items())].append(row)
    groups, seen = dict[str, list[Row]](), Counter[str]()
    for version, same_version in by_version.items():
        changed = [part for part, value in zip(newest, version, strict=True) if value != newest[part]]
        older = " and ".join(map(short_name, changed))
        seen[older] += 1
        number = f" {seen[older]}" if seen[older] > 1 else ""
        groups[f"(older {older}{number})" if older else ""] = same_version
    return groups


def _method_name(row: Row, defaults: Row, presets: Mapping[str, Row]) -> tuple[str, str]:
    """A learner or one of its presets, and the options in which a run differs from it: whichever is shorter.

    Among equally short presets, one for the run's stream is preferred. An option that did not exist when the run was
    trained has its default.
    """
    options = {name: value for name, value in departures(row).items() if name.startswith("options.")}
    candidates = [(row["learner"], options)]
    all_options = defaults | {name: row[name] for name in row if name.startswith("options.")}
    for preset, preset_options in presets.items():
        changed = (name for name, value in all_options.items() if value != preset_options.get(name))
        candidates.append((preset, {name: all_options[name] for name in changed}))

    def length(candidate: tuple[str, Row]) -> tuple[int, bool, bool]:
        name, options = candidate
        is_preset = name != row["learner"]
        return len(options) + is_preset, is_preset, is_preset and presets[name]["stream"] != row["stream"]

    name, options = min(candidates, key=length)
    return name, format_settings(options)


def _presets() -> dict[str, dict[str, Row]]:
    """The stream and the options of every preset that can be used, by learner and name."""
    presets = defaultdict[str, dict[str, Row]](dict)
    for name in known_presets():
        with suppress(Exception):  # anything can be wrong in a user's file
            preset = load_preset(name)
            names = [preset.learner, preset.stream or "", *map(str, preset.settings.values())]
            if all(map(is_loaded, names)):
                resolved = preset.spec().resolved()["options"]
                options = {f"options.{option}": value for option, value in resolved.items()}
            else:  # it names code, which is not run to give its name to a run
                options = default_options(preset.learner)
                changed = {f"options.{name}": value for name, value in preset.settings.items()}
                options |= {name: value for name, value in changed.items() if name in options}
            presets[preset.learner][name] = {"stream": preset.stream, **options}
    return presets


def _by_seed(rows: Iterable[Row], runs: Mapping[str, Any]) -> dict[int, Any]:
    return {row["seed"]: runs[row["key"]] for row in sorted(rows, key=lambda row: row["seed"]) if row["key"] in runs}
