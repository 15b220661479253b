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
    what other learners take on the two. Of runs that differ only in the seed the fastest counts: the others may have
    shared the device with more work.
    """

    def __init__(self, records: Iterable[Record]) -> None:
        self.run_seconds: dict[str, float] = {}
        self.epoch_seconds: defaultdict[tuple[str, str, str], dict[str, float]] = defaultdict(dict)
        for record in records:
            seconds, settings = sum(record.train_seconds) + sum(record.test_seconds), _key_without_seed(record.spec)
            self.run_seconds[settings] = fastest = min(seconds, self.run_seconds.get(settings, math.inf))
            self.epoch_seconds[_kind(record.spec)][settings] = fastest / record.spec["epochs"]

    def seconds(self, spec: RunSpec) -> float | None:
        """The estimated seconds of a run, or None if nothing similar has been done."""
        resolved = spec.resolved()
        if (run_seconds := self.run_seconds.get(_key_without_seed(resolved))) is not None:
            return run_seconds
        if epoch_seconds := self.epoch_seconds.get(_kind(resolved)):
            return fmean(epoch_seconds.values()) * spec.epochs
        estimate = self._from_other_streams(*_kind(resolved))
        return None if estimate is None else estimate * spec.epochs

    def _from_other_streams(self, learner: str, stream: str, backbone: str) -> float | None:
        mean = {kind: fmean(seconds.values()) for kind, seconds in self.epoch_seconds.items() if kind[2] == backbone}
        scaled = []
        for other in {kind[1] for kind in mean if kind[0] == learner}:
            pairs = [((name, stream, backbone), (name, other, backbone)) for name, *_ in mean]
            ratios = {
                mean[kind] / mean[other_kind] for kind, other_kind in pairs if kind in mean and other_kind in mean
            }
            scaled += [mean[learner, other, backbone] * ratio for ratio in ratios]
        return fmean(scaled) if scaled else None


def plan(specs: Iterable[RunSpec], find: Callable[[RunSpec], object | None], estimates: Estimates) -> Plan:
    """What is left to do of some runs, each counted once; `find` returns None for a run that is not done.

    >>> plan([RunSpec(), RunSpec(), RunSpec(seed=1)], lambda spec: spec.seed or None, Estimates([]))
    Plan(runs=2, done=1, seconds=0.0, unknown=1)
    """
    unique = {spec.key: spec for spec in specs}.values()
    estimated = [estimates.seconds(spec) for spec in unique if find(spec) is None]
    known = [seconds for seconds in estimated if seconds is not None]
    return Plan(len(unique), len(unique) - len(estimated), math.fsum(known), len(estimated) - len(known))


def _key_without_seed(resolved: Mapping[str, Any]) -> str:
    """Everything but the seed, as text; settings that were added after a run have their defaults."""
    defaults = _defaults(resolved["learner"], resolved["stream"])
    settings = {**defaults, **resolved} | {
        part: {**defaults.get(part, {}), **resolved.get(part, {})} for part in ("options", "scenario")
    }
    return json.dumps({name: value for name, value in settings.items() if name != "seed"}, sort_keys=True)


@cache
def _defaults(learner: str, stream: str) -> Mapping[str, Any]:
    if not (is_loaded(learner) and is_loaded(stream)):  # code that a record names is not run to estimate a time
        return {}
    try:
        return RunSpec(learner, stream=stream).resolved()
    except Exception:  # the user's own code may be gone
        return {}


def _kind(resolved: Mapping[str, Any]) -> tuple[str, str, str]:
    return resolved["learner"], resolved["stream"], resolved["backbone"]
