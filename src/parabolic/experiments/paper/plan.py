"""How much is left to do, and how long it may take, from what was done so far."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass
from statistics import fmean
from typing import Any

from parabolic.experiments.spec import RunSpec
from parabolic.experiments.store import Record

__all__ = ["Estimates", "Plan", "plan"]


@dataclass(frozen=True)
class Plan:
    """Runs that are wanted, those that are done, and the seconds that the others may take, one after another."""

    runs: int
    done: int
    seconds: float  # of those that can be estimated
    unknown: int  # how many cannot: nothing like them has been done

    def __add__(self, other: Plan) -> Plan:
        return Plan(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


class Estimates:
    """The seconds that a run may take, by the finished runs that are most like it.

    Those that differ only in the seed, if there are any; else those of the same learner, stream and network, in
    proportion to the passes over the data.
    """

    def __init__(self, records: Iterable[Record]) -> None:
        self.alike: defaultdict[str, list[float]] = defaultdict(list)
        self.a_pass: defaultdict[str, list[float]] = defaultdict(list)
        for record in records:
            seconds = sum(record.train_seconds) + sum(record.test_seconds)
            self.alike[_but_for_seed(record.spec)].append(seconds)
            self.a_pass[_kind(record.spec)].append(seconds / record.spec["epochs"])

    def seconds(self, spec: RunSpec) -> float | None:
        """The seconds of a run, or None where nothing like it has been done."""
        resolved = spec.resolved()
        if alike := self.alike.get(_but_for_seed(resolved)):
            return fmean(alike)
        if kin := self.a_pass.get(_kind(resolved)):
            return fmean(kin) * spec.epochs
        return None


def plan(specs: Iterable[RunSpec], find: Callable[[RunSpec], object | None], estimates: Estimates) -> Plan:
    """What is left to do of some runs, each counted once; `find` returns what is there of a run that is done.

    >>> plan([RunSpec(), RunSpec(), RunSpec(seed=1)], lambda spec: spec.seed or None, Estimates([]))
    Plan(runs=2, done=1, seconds=0.0, unknown=1)
    """
    wanted = {spec.key: spec for spec in specs}.values()
    told = [estimates.seconds(spec) for spec in wanted if find(spec) is None]
    known = [seconds for seconds in told if seconds is not None]
    return Plan(len(wanted), len(wanted) - len(told), math.fsum(known), len(told) - len(known))


def _but_for_seed(resolved: Mapping[str, Any]) -> str:
    return json.dumps({name: value for name, value in resolved.items() if name != "seed"}, sort_keys=True)


def _kind(resolved: Mapping[str, Any]) -> str:
    return json.dumps([resolved[name] for name in ("learner", "stream", "backbone")])
