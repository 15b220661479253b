"""How many runs are left to do, and an estimate of how long they take, from finished runs."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Any

from parabolic.experiments.spec import RunSpec
from parabolic.experiments.store import Record
from parabolic.plugins import is_loaded

__all__ = ["Estimates", "Plan", "plan"]


@dataclass(frozen=True)
class Plan:
    """The numbers of runs wanted and done, and the estimated seconds for the rest, one after another."""

    runs: int
    done: int
    seconds: float  # of those that can be estimated
    unknown: int  # how many cannot be estimated: nothing similar has been done


class Estimates:
    """Estimates the seconds of a run from the most similar finished runs.

    These are runs that differ only in the seed, if there are any; otherwise runs with the same learner, stream and
    network, in proportion to the number of epochs; otherwise runs of the learner on other streams, in proportion to
    what other learners take on the two.
    """

    def __init__(self, records: Iterable[Record]) -> None:
        self.alike: defaultdict[str, list[float]] = defaultdict(list)
        self.a_pass: defaultdict[tuple[str, str, str], list[float]] = defaultdict(list)
        for record in records:
            seconds = sum(record.train_seconds) + sum(record.test_seconds)
            self.alike[_but_for_seed(record.spec)].append(seconds)
            self.a_pass[_kind(record.spec)].append(seconds / record.spec["epochs"])

    def seconds(self, spec: RunSpec) -> float | None:
        """The estimated seconds of a run, or None if nothing similar has been done."""
        resolved = spec.resolved()
        if alike := self.alike.get(_but_for_seed(resolved)):
            return fmean(alike)
        if kin := self.a_pass.get(_kind(resolved)):
            return fmean(kin) * spec.epochs
        elsewhere = self._from_other_streams(*_kind(resolved))
        return None if elsewhere is None else elsewhere * spec.epochs

    def _from_other_streams(self, learner: str, stream: str, backbone: str) -> float | None:
        mean = {kind: fmean(seconds) for kind, seconds in self.a_pass.items() if kind[2] == backbone}
        scaled = []
        for other in {place for name, place, _ in mean if name == learner}:
            pairs = [((name, stream, backbone), (name, other, backbone)) for name, *_ in mean]
            ratios = {mean[here] / mean[there] for here, there in pairs if here in mean and there in mean}
            scaled += [mean[learner, other, backbone] * ratio for ratio in ratios]
        return fmean(scaled) if scaled else None


def plan(specs: Iterable[RunSpec], find: Callable[[RunSpec], object | None], estimates: Estimates) -> Plan:
    """What is left to do of some runs, each counted once; `find` returns None for a run that is not done.

    >>> plan([RunSpec(), RunSpec(), RunSpec(seed=1)], lambda spec: spec.seed or None, Estimates([]))
    Plan(runs=2, done=1, seconds=0.0, unknown=1)
    """
    wanted = {spec.key: spec for spec in specs}.values()
    told = [estimates.seconds(spec) for spec in wanted if find(spec) is None]
    known = [seconds for seconds in told if seconds is not None]
    return Plan(len(wanted), len(wanted) - len(told), math.fsum(known), len(told) - len(known))


def _but_for_seed(resolved: Mapping[str, Any]) -> str:
    """Everything but the seed, as text; settings that were added after a run have their defaults."""
    usual = _defaults(resolved["learner"], resolved["stream"])
    told = {**usual, **resolved} | {
        part: {**usual.get(part, {}), **resolved.get(part, {})} for part in ("options", "scenario")
    }
    return json.dumps({name: value for name, value in told.items() if name != "seed"}, sort_keys=True)


@cache
def _defaults(learner: str, stream: str) -> Mapping[str, Any]:
    if not (is_loaded(learner) and is_loaded(stream)):  # a record's, whose code is not run to estimate a time
        return {}
    try:
        return RunSpec(learner, stream=stream).resolved()
    except Exception:  # a user's own, of which the code is gone
        return {}


def _kind(resolved: Mapping[str, Any]) -> tuple[str, str, str]:
    return resolved["learner"], resolved["stream"], resolved["backbone"]
