"""The definition of a search for a learner's best settings: which values are tried, and how they are judged."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from parabolic.checks import Description, InputError, check_name, invalid
from parabolic.engine.measures import Measure, find_measures, owner
from parabolic.experiments.code import content_hashes, own_code_of
from parabolic.experiments.spec import NAMED, RunSpec, check_spec
from parabolic.options import Option, check_options, option, options_of, write_option

__all__ = ["METRICS", "Choices", "Range", "Search", "Trial"]

METRICS = ("aaa", "acc", "task_aaa", "task_acc")


@dataclass(frozen=True)
class Range:
    """All numbers from `low` to `high`; with `log`, on a logarithmic scale.

    >>> Range(0.001, 1, log=True).nearest(0.0123456)
    0.01235
    """

    low: float
    high: float
    log: bool = False

    def __str__(self) -> str:
        return f"{self.low:.12g}:{self.high:.12g}" + (":log" if self.log else "")

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int | float) and self.low <= value <= self.high

    def nearest(self, value: float) -> float:
        """The value as it is if an integer, otherwise rounded to four significant digits: more would be noise."""
        return value if isinstance(value, int) else min(max(float(f"{value:.4g}"), self.low), self.high)

    @property
    def ends(self) -> tuple[float, float]:
        """The lowest and the highest value."""
        return self.low, self.high


class Choices(tuple[Any, ...]):
    """A few values to choose from."""

    def __str__(self) -> str:
        return ",".join(write_option(value) for value in self)

    def nearest(self, value: Any) -> Any:
        """The value as it is."""
        return value

    @property
    def ends(self) -> tuple[Any, Any]:
        """The first and the last value."""
        return self[0], self[-1]


@dataclass(frozen=True)
class Trial:
    """Values that were tried, and their score."""

    values: Mapping[str, Any]
    score: float | None  # None if the trial was pruned
    diverged: int = 0  # how many of its runs diverged: they count as 0 %, and a trial has no score by a measure then


@dataclass(frozen=True)
class Search:
    """A search for the best settings of a run, judged on held-out training examples: test examples are never used.

    Every option for which the learner states a range (`option(..., tune=...)`) is tuned, unless the spec fixes it.
    `space` adds or replaces ranges by name, as strings such as "0.01:0.3:log", "1:8" or "SGD,mine.py:Lion(decay=0.1)".
    What it names is tuned even if the spec has a value for it, which the first trial takes then.

    >>> search = Search(RunSpec(learner="der", options={"alpha": 0.5}), space={"batch": "8,16"})
    >>> search.ranges
    {'lr': Range(low=0.001, high=1.0, log=True), 'batch': (8, 16)}
    >>> search.specs({"lr": 0.05, "batch": 8})  # doctest: +ELLIPSIS
    [RunSpec(learner='der', ... batch=8, ... options={'alpha': 0.5, 'lr': 0.05}, scenario={'validation': 0.1})]
    """

    spec: RunSpec
    space: Mapping[str, str] = field(default_factory=dict)
    metric: str = option(
        None,
        "the metric to maximise, or a measure of --set measure that says what is `better` (none: aaa, or "
        "task_aaa with a head for each task)",
    )
    seeds: int = option(1, "how many seeds a trial is run with, from 0; their mean is its score", at_least=1)
    validation: float = option(0.1, "share of each class's training examples to hold out for judging", above=0, below=1)
    seed: int = option(0, "determines which values are tried", at_least=0)
    prune: bool = option(False, "whether to stop a trial once it is below the median of the earlier ones")

    def __post_init__(self) -> None:
        check_spec(self.spec)
        object.__setattr__(self, "metric", self.metric or ("task_aaa" if self.spec.heads else "aaa"))
        check_options(self)
        if "validation" in self.spec.scenario:
            got = self.spec.scenario["validation"]
            raise invalid("validation", got, "none for the run", "set `validation` of the search instead")
        if self.spec.seed:
            remedy = "`seeds` of the search sets how many there are, and its `seed` which values are tried"
            raise invalid("seed", self.spec.seed, "none for the run, as the seeds of a trial start at 0", remedy)
        if self.measure is None:
            owners = find_measures(self.spec.measure)
            check_name("metric", self.metric, {*METRICS, *owners}, "a measure of your own must be one of the run too")
        elif self.better not in ("higher", "lower"):
            remedy = f"as in {owner(self.metric)}.better = 'lower'"
            raise invalid("metric", self.metric, "a measure whose attribute `better` is 'higher' or 'lower'", remedy)
        if not self.ranges:
            raise invalid("space", Description("nothing to tune"), "an option", "for example lr=0.01:0.3:log")
        for end in (0, 1):  # find invalid values before the first run
            self.specs({name: domain.ends[end] for name, domain in self.ranges.items()})

    @cached_property
    def ranges(self) -> dict[str, Range | Choices]:
        """The options to tune, each with its range or choices."""
        known = self._tunable()
        for name in self.space:
            check_name("space", name, known)
        declared = {name: opt.tune for name, opt in known.items() if opt.tune and name not in self.fixed}
        texts = {**declared, **self.space}
        return {name: _parse_range(known[name], text) for name, text in texts.items()}

    @property
    def measure(self) -> Measure | None:
        """The user's own measure that trials are judged by, if any; if it has several numbers, `metric` names one."""
        return find_measures(self.spec.measure).get(owner(self.metric))

    @property
    def better(self) -> str:
        """Which scores are better: the `higher` or the `lower`."""
        return "higher" if self.measure is None else str(getattr(self.measure, "better", ""))

    def best(self, trials: Iterable[Trial]) -> Trial | None:
        """The trial with the best score, of several the first; None if none has a score, or all their runs diverged."""
        scored = (trial for trial in self.ranked(trials) if trial.score is not None and trial.diverged < self.seeds)
        return next(scored, None)

    def ranked(self, trials: Iterable[Trial]) -> list[Trial]:
        """The trials by score, the best first and those without one last."""
        sign = 1 if self.better == "lower" else -1
        return sorted(trials, key=lambda trial: math.inf if trial.score is None else sign * trial.score)

    @cached_property
    def fixed(self) -> dict[str, Any]:
        """The settings that the spec gives for the learner and the run and that are not tuned."""
        fields = {name: getattr(self.spec, name) for name in self._tunable().keys() - self._learner_options().keys()}
        given = {name: value for name, value in fields.items() if value != options_of(RunSpec)[name].default}
        return {name: value for name, value in {**given, **self.spec.options}.items() if name not in self.space}

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """The values that the spec gives, or are the default, where these lie within the ranges: the first trial's."""
        values = {name: self._value(name) for name in self.ranges}
        return {name: value for name, value in values.items() if value in self.ranges[name]}

    @cached_property
    def outside(self) -> dict[str, Any]:
        """The values that the spec gives, or are the default, outside the ranges: no trial can have them.

        >>> Search(RunSpec("vrmcl"), {"lr": "0.01:0.3:log"}).outside
        {'lr': 0.35}
        """
        return {name: self._value(name) for name in self.ranges if name not in self.defaults}

    def rounded(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Sampled values, rounded as they are tried."""
        return {name: domain.nearest(values[name]) for name, domain in self.ranges.items()}

    def specs(self, values: Mapping[str, Any]) -> list[RunSpec]:
        """The runs of a trial with these values, one per seed, all tested on held-out training examples only."""
        learner_options = self._learner_options()
        fields: dict[str, Any] = {name: value for name, value in values.items() if name not in learner_options}
        fields["options"] = {**self.spec.options, **{name: values[name] for name in values if name in learner_options}}
        fields["scenario"] = {**self.spec.scenario, "validation": self.validation}
        return [dataclasses.replace(self.spec, seed=seed, **fields) for seed in range(self.seeds)]

    def definition(self) -> dict[str, Any]:
        """Everything that determines the search, as plain JSON values."""
        first = self.specs({})[0]
        spec = first.resolved() | {name: digest[:12] for name, digest in content_hashes(first).items()}
        del spec["seed"]
        settings = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "spec"}
        space = {name: str(domain) for name, domain in sorted(self.ranges.items())}
        return {**spec, **settings, "space": space, **self._own_code_of_choices()}

    def _own_code_of_choices(self) -> dict[str, str]:
        """The code of each choice that is the user's own, by its path."""
        codes = dict[str, str]()
        for name, domain in self.ranges.items():
            if name in ("backbone", "optimizer", "measure") and isinstance(domain, Choices):
                codes |= {choice: own_code_of(self.specs({name: choice})[0]) for choice in domain if choice}
        return {f"code of {choice}": code[:12] for choice, code in codes.items() if code and ":" in choice}

    def _learner_options(self) -> dict[str, Option]:
        return RunSpec.learner_options(self.spec.learner)

    def _tunable(self) -> dict[str, Option]:
        return {name: opt for name, opt in options_of(RunSpec).items() if name not in NAMED} | self._learner_options()

    def _value(self, name: str) -> Any:
        resolved = self.spec.resolved()
        return resolved["options"].get(name, resolved.get(name))


def _parse_range(opt: Option, text: str) -> Range | Choices:
    """Parse a range or a list of choices; all values must be valid for the option."""
    choices = _split(text)
    low, *rest = text.split(":")
    if not rest or len(choices) > 1:  # file.py:name may be a choice too
        return Choices(opt.parse(value) for value in choices)
    if rest[1:] not in ([], ["log"]):
        raise _range_error(opt.name, text)
    ends = [opt.parse(end) for end in (low, rest[0])]
    if not all(isinstance(end, int | float) for end in ends) or not ends[0] < ends[1]:
        raise _range_error(opt.name, text)
    if rest[1:] and ends[0] <= 0:
        raise invalid(f"space {opt.name}", text, "a range above 0 if it is log")
    return Range(ends[0], ends[1], log=bool(rest[1:]))


def _split(text: str) -> list[str]:
    """The parts of a text between commas that are not in parentheses.

    >>> _split("SGD, mine.py:Lion(betas=(0.9, 0.99), decay=0.1)")
    ['SGD', 'mine.py:Lion(betas=(0.9, 0.99), decay=0.1)']
    """
    parts, depth = [""], 0
    for char in text:
        depth += (char == "(") - (char == ")")
        if char == "," and not depth:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts]


def _range_error(name: str, text: str) -> InputError:
    return invalid(f"space {name}", text, "LOW:HIGH, LOW:HIGH:log or A,B,C", "as in 0.1:1")
