"""The runs behind each cell of the paper's tables, and the published figures."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any

from parabolic.checks import invalid
from parabolic.experiments.paper.quick import STREAM, stand_in
from parabolic.experiments.presets import Preset, known_presets, load_preset
from parabolic.experiments.spec import RunSpec
from parabolic.learners.pcl import ABLATIONS
from parabolic.statistics import Summary

__all__ = ["METHODS", "PLUS", "SEEDS", "Figure", "Method", "PaperTable", "Setting", "method_of", "paper_tables"]

SEEDS = 5  # "All experiments are repeated over 5 trials."
PLUS = "PCL+"  # the additional row of tuned tables


@dataclass(frozen=True)
class Method:
    """A row: the learner, the options that differ from its defaults, and those that depend on the stream (`on`).

    A tuned row has the settings of a preset instead: LEARNER-STREAM or, if `preset` is a NAME, NAME-STREAM or NAME.
    A row of the user's always has those of the preset `own`.
    """

    learner: str
    options: Mapping[str, Any] = field(default_factory=dict)
    on: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    preset: str = ""
    own: Preset | None = None

    def tuned(self, stream: str) -> Preset | None:
        """The preset for a stream, or None.

        >>> METHODS["ER"].tuned("seq-digits").name
        'er-seq-digits'
        """
        if self.own is not None:
            return self.own
        known = known_presets()
        name = next((name for name in (self.preset_name(stream), self.preset) if name in known), None)
        if name is None:
            return None
        preset = load_preset(name)
        if preset.learner != self.learner and not self.preset:
            raise invalid(f"preset {name!r}", preset.learner, f"the learner {self.learner}", "rename the preset")
        return preset

    def preset_name(self, stream: str) -> str:
        """The name of its preset for a stream."""
        return f"{self.preset or self.learner}-{stream}"


# The published figures come from the published code, so rows follow it where they can; SI does not yet.
REFERENCE = {"variant": "reference"}
METHODS = {
    "SGD": Method("sgd", on={"seq-tinyimagenet": {"lr": 0.03}}),
    "ER": Method("er"),
    "SI": Method("si"),
    "AGEM": Method("agem"),
    "GEM": Method("gem"),
    "DER": Method("der"),
    "DER++": Method("derpp"),
    "On-EWC": Method("ewc", REFERENCE, on={"seq-tinyimagenet": {"strength": 25.0}}),
    "LWF": Method("lwf", on={"seq-tinyimagenet": {"alpha": 1.0}}),
    "ER-OBC": Method("obc"),
    "CLSER": Method("clser"),
    "MixupER": Method("mixup", {"exclude": False, "pairwise": True}),
    "CBRS": Method("cbrs"),
    "VRMCL": Method("vrmcl", REFERENCE),
    "PCL": Method("pcl", REFERENCE),
    "PCL (text)": Method("pcl"),
    PLUS: Method("pcl", preset="pcl-plus"),
} | {row: Method("pcl", {**REFERENCE, **options}) for row, options in ABLATIONS.items()}
"""The rows of the paper's tables by the paper's names, and ours."""


def method_of(row: str) -> Method:
    """The method of a row: one of the tables', or the user's own, a preset (by name or file) or a learner.

    >>> method_of("PCL").learner, method_of("er").own
    ('pcl', Preset(name='er', learner='er', about='', stream=None, memory=None, settings={}, study={}))
    """
    if row in METHODS:
        return METHODS[row]
    is_preset = row.endswith(".toml") or row in known_presets()
    own = load_preset(row) if is_preset else Preset(row, row)
    return Method(own.learner, own=own)


@dataclass(frozen=True)
class Setting:
    """What a group of columns has in common."""

    title: str
    stream: str = "seq-cifar100"
    memory: int = 1000
    scenario: Mapping[str, Any] = field(default_factory=dict, hash=False)
    measure: str | None = None  # as in `RunSpec`

    def specs(self, row: str, seeds: int = SEEDS, *, quick: bool = False, tuned: bool = False) -> list[RunSpec]:
        """The runs of a row, one per seed; with `quick`, their stand-ins on the bundled digits.

        With `tuned` a row has the settings of its preset for the stream, and no runs if there is no preset.

        >>> [spec.seed for spec in Setting("memory 200", memory=200).specs("ER", seeds=3)]
        [0, 1, 2]
        """
        method = method_of(row)
        uses_preset = tuned or method.own is not None
        if uses_preset:
            spec = self._tuned_spec(row, method, STREAM if quick else self.stream)
        else:
            spec = self._published_spec(method)
        if spec is None:
            return []
        first = stand_in(spec) if quick else spec
        return [replace(first, seed=seed, measure=self.measure) for seed in range(seeds)]

    def _published_spec(self, method: Method) -> RunSpec:
        options = {**method.options, **method.on.get(self.stream, {})}
        return RunSpec(method.learner, self.stream, self.memory, options=options, scenario=self.scenario)

    def _tuned_spec(self, row: str, method: Method, stream: str) -> RunSpec | None:
        preset = method.tuned(stream)
        if preset is None:
            return None
        # The column determines stream and memory, whatever the preset was made for.
        spec = preset.spec(stream=self.stream, memory=self.memory)
        options = {**spec.options, **ABLATIONS.get(row, {})}  # an ablation changes the tuned method
        return replace(spec, options=options, scenario=self.scenario)


@dataclass(frozen=True)
class Figure:
    """A figure as printed, and whether the paper marks it as the best or second best of its column."""

    value: Summary
    mark: str = ""


@dataclass(frozen=True)
class PaperTable:
    """A table of the paper: one row per method, one column per metric and setting.

    >>> table = paper_tables()["main"]
    >>> table.rows["PCL"][1]
    Figure(value=Summary(mean=54.98, sd=4.1, n=5), mark='best')
    >>> table.of(["pcl", "er"])
    ['ER', 'PCL', 'PCL (text)']
    """

    title: str
    rows: Mapping[str, Sequence[Figure]]  # the figures of all metrics in the first setting, then in the next
    settings: Sequence[Setting]
    metrics: Sequence[str] = ("aaa", "acc")
    underlines: bool = True  # whether the second best of each column is underlined
    note: str = ""
    plus: bool = True  # whether it compares methods, so that it can have PCL+ (if tuned) and rows of the user's own
    also: Mapping[str, str] = field(default_factory=dict)  # our own untuned rows, and what each is

    def of(self, learners: Sequence[str] | None, *, tuned: bool = False) -> list[str]:
        """The rows of some learners or of all, including ours."""
        extra = self.also if not tuned else [PLUS] if self.plus else []
        rows = [*self.rows, *extra]
        return [row for row in rows if learners is None or {METHODS[row].learner, METHODS[row].preset} & {*learners}]


@cache
def paper_tables() -> dict[str, PaperTable]:
    """The paper's tables by name, from `tables.toml`.

    >>> list(paper_tables())[:3]
    ['main', 'buffers', 'corrupt']
    """
    return {name: _table(**parts) for name, parts in published().items() if name != "bounds"}


@cache
def published() -> dict[str, Any]:
    """The content of `tables.toml`."""
    return tomllib.loads(files("parabolic.experiments.paper").joinpath("tables.toml").read_text("utf-8"))


def _table(
    rows: dict[str, list[str]], settings: list[dict[str, Any]], scenario: dict[str, Any] | None = None, **others: Any
) -> PaperTable:
    return PaperTable(
        rows={row: [_figure(text) for text in cells] for row, cells in rows.items()},
        settings=[Setting(**{"scenario": scenario or {}, **setting}) for setting in settings],
        **others,
    )


def _figure(text: str) -> Figure:
    match = re.fullmatch(r"(\*\*|_|)([\d.]+)\1 ± ([\d.]+)", text)
    assert match is not None, text
    mark, mean, sd = match.groups()
    return Figure(Summary(float(mean), float(sd), SEEDS), {"**": "best", "_": "second", "": ""}[mark])
