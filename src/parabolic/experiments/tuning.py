"""Tuning: find a learner's best settings by trials on held-out training examples."""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch

from parabolic import metrics
from parabolic.checks import Description, check_name, check_number, invalid
from parabolic.engine import Callback
from parabolic.engine.callbacks import as_callbacks
from parabolic.experiments.execution import Yard, environment, execute_fleet
from parabolic.experiments.presets import Preset
from parabolic.experiments.search import METRICS, Search, Trial
from parabolic.experiments.spec import RunSpec
from parabolic.experiments.store import Record, Store, check_store
from parabolic.files import check_file_name, file_name
from parabolic.learners import find_learner
from parabolic.learners.registry import built_in
from parabolic.plugins import require

if TYPE_CHECKING:
    import optuna

__all__ = ["Tuned", "study_name", "tune"]

# Parts of the environment that a preset records.
ENVIRONMENT = ("parabolic", "torch", "optuna", "python", "processor", "device", "command", "finished")


@dataclass(frozen=True)
class Tuned:
    """The result of a search."""

    name: str
    search: Search
    trials: list[Trial]  # in the order in which they started
    running: int  # trials in progress in other processes
    environment: Mapping[str, Any]  # of the best trial: versions, hardware, command, time

    @property
    def best(self) -> Trial:
        """The trial with the best score; of several, the first."""
        return _best(self.search, self.trials)

    def preset(self) -> Preset:
        """A preset with the best values and a record of how they were found."""
        spec, best, definition = self.search.spec, self.best, self.search.definition()
        about = f"best of {len(self.trials)} trials by {definition['metric']} on held-out training examples"
        study: dict[str, Any] = {"score": self._rounded(best)}
        study |= {name: definition[name] for name in ("metric", "seeds", "validation", "space", "seed", "prune")}
        study["trials"] = [{"score": self._rounded(trial), **trial.values} for trial in self.trials]
        study["scenario"] = dict(spec.scenario)
        study["environment"] = {name: self.environment[name] for name in ENVIRONMENT if name in self.environment}
        settings = {**self.search.fixed, **best.values}
        settings.pop("measure", None)  # it does not affect training
        return Preset(self.name, spec.learner, about, spec.stream, definition.get("memory"), settings, study)

    def _rounded(self, trial: Trial) -> float | None:
        """A score as it is written down: in percent with two decimals, by a measure with six digits."""
        if trial.score is None:
            return None
        return round(trial.score, 2) if self.search.measure is None else float(f"{trial.score:.6g}")


def tune(
    search: Search,
    store: Store,
    *,
    trials: int = 30,
    name: str | None = None,
    storage: str | optuna.storages.BaseStorage | None = None,
    parallel: int = 1,
    workers: int = 1,
    device: str = "auto",
    callbacks: Iterable[Callback] = (),
    watch: Callable[[list[Trial]], None] | None = None,
) -> Tuned:
    """Start or continue a search until its study has `trials` trials in total, and return the result.

    Args:
        search: what to tune, and how to judge it.
        store: where the trials' runs are saved; a run that is already there is not trained again.
        trials: the total number of trials, including those of earlier calls and of other processes.
        name: the study's name (by default LEARNER-STREAM). A study continues only with the search it began with.
        storage: an Optuna storage: a URL that Optuna accepts, `journal:FILE`, or an object (by default SQLite, in the
            store's folder). Processes anywhere that name the same storage and study work on it together.
        parallel: how many trials to propose at once; a GPU trains their runs side by side.
        workers: how many processes of this machine work on the study; with more than one, or with several that
            share a storage, the values tried depend on which finishes first.
        device: where to train runs.
        callbacks: observe the runs that this process trains.
        watch: called with all trials so far whenever some have ended.
    """
    require("optuna", "tune", "tune", "Optuna")
    check_store(store)
    for argument, value in (("trials", trials), ("parallel", parallel), ("workers", workers)):
        check_number(argument, value, whole=True, at_least=1)
    if search.prune and parallel > 1:
        raise invalid("parallel", parallel, "1 if trials are pruned", "set `workers` to run several at once")
    name = name or study_name(search.spec)
    check_file_name(name, "choose another")
    if workers > 1 and not isinstance(storage, str | None):
        raise invalid("storage", storage, "a URL if there are several workers", "objects cannot be shared")
    callbacks = as_callbacks(callbacks)
    job = Job(search, store, trials, name, storage or _sqlite_url(store), parallel, device)
    spawn = multiprocessing.get_context("spawn")
    helpers = [spawn.Process(target=_work_as_helper, args=(job,), daemon=True) for _ in range(workers - 1)]
    try:
        for process in helpers:
            process.start()
        ended, running = _work(job, callbacks, watch)
        if helpers:
            for process in helpers:
                process.join()
            ended, running = _work(job, callbacks, watch)  # finish what they left undone
    finally:
        for process in helpers:
            if process.pid is not None:  # started
                process.terminate()
                process.join()
    record = store.ended(search.specs(_best(search, ended).values)[0])
    best_environment = environment(torch.device("cpu")) if record is None else record.environment
    return Tuned(name, search, ended, running, {**best_environment, "optuna": version("optuna")})


@dataclass(frozen=True)
class Job:
    """Everything that a process needs to work on a study."""

    search: Search
    store: Store
    trials: int
    name: str
    storage: str | optuna.storages.BaseStorage
    parallel: int
    device: str
    yard: Yard = field(default_factory=Yard)  # so that no trial tries more runs at once than fit


def _work_as_helper(job: Job) -> None:
    """Work on a study in another process; its errors need no report, as the parent process meets them too."""
    Thread(target=_exit_with_parent, daemon=True).start()
    with suppress(Exception, KeyboardInterrupt):
        _work(job)


def _exit_with_parent() -> None:
    """End when the parent process ends, however it ends, even in the middle of a run."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(
    job: Job, callbacks: Iterable[Callback] = (), watch: Callable[[list[Trial]], None] | None = None
) -> tuple[list[Trial], int]:
    """Do trials until none are left; returns those that have ended, and how many are still running elsewhere."""
    from parabolic.experiments.study import open_study  # here: it imports Optuna

    with open_study(job.search, job.name, job.storage, job.store.root) as study:
        while taken := study.ask(job.parallel, job.trials):
            try:
                with study.pulse(taken):
                    scores = _score_trials(taken, job, list(callbacks))
            except BaseException:
                study.give_back(taken)
                raise
            for trial, trial_scores in zip(taken, scores, strict=True):
                study.tell(trial, trial_scores)
            if watch is not None:
                watch(study.trials)
        return study.trials, study.running


def _score_trials(taken: Sequence[optuna.Trial], job: Job, callbacks: list[Callback]) -> list[list[float] | None]:
    """The scores of each trial's runs, NaN for those that diverged; None if the trial was pruned."""
    specs = [job.search.specs(job.search.rounded(trial.params)) for trial in taken]
    if job.search.prune:
        return [_score_with_pruning(taken[0], specs[0], job, callbacks)]
    scores = _train([spec for trial_specs in specs for spec in trial_specs], job, callbacks)
    return [[scores[spec.key] for spec in trial_specs] for trial_specs in specs]


def _score_with_pruning(
    trial: optuna.Trial, specs: list[RunSpec], job: Job, callbacks: list[Callback]
) -> list[float] | None:
    """The scores of a trial's runs, or None if it was pruned because its first run did badly after a task."""
    from optuna import TrialPruned

    from parabolic.experiments.study import Pruner

    first, rest, metric = specs[0], specs[1:], job.search.metric
    if (record := _stored_run(first, job)) is not None and record.accuracy:
        matrix = record.task_matrix if metric.startswith("task_") else record.matrix
        assert matrix is not None  # as `_stored_run` has made sure
        for task, figure in enumerate(record.measured.get(metric) or metrics.anytime(matrix)):
            trial.report(float(figure), task)
    try:
        scores = _train([first], job, [*callbacks, Pruner(trial, metric)])
    except TrialPruned:
        return None
    return list((scores | _train(rest, job, callbacks)).values())


def _train(specs: list[RunSpec], job: Job, callbacks: list[Callback]) -> dict[str, float]:
    """The score of each run by key, NaN if it diverged; runs of one shape are trained together, and all are saved."""
    metric, scores, missing = job.search.metric, dict[str, float](), dict[str, dict[str, RunSpec]]()
    for spec in specs:
        if (record := _stored_run(spec, job)) is not None:
            scores[spec.key] = _score(record, metric)
        else:
            missing.setdefault(spec.shape, {})[spec.key] = spec
    for fleet in missing.values():
        for spec, result in execute_fleet(list(fleet.values()), device=job.device, callbacks=callbacks, yard=job.yard):
            if isinstance(result, Exception):
                raise result
            job.store.save(result)
            scores[spec.key] = _score(result, metric)
    return scores


def _stored_run(spec: RunSpec, job: Job) -> Record | None:
    """The run of a spec, if it has the metric or diverged: old runs lack the metrics that start with `task_`."""
    record = job.store.ended(spec)
    return record if record is not None and (record.diverged or job.search.metric in record.metrics) else None


def _score(record: Record, metric: str) -> float:
    """A run's score; NaN if it diverged."""
    if record.diverged:
        return math.nan
    known = {*METRICS, *record.measured}
    check_name("metric", metric, known, "a measure that returns several numbers is judged by one of them")
    return record.metrics[metric]


def _sqlite_url(store: Store) -> str:
    """The URL of a store's own SQLite file, with its path properly escaped."""
    from sqlalchemy import URL  # here: it comes with Optuna

    return URL.create("sqlite", database=str(store.root / "tune.db")).render_as_string()


def study_name(spec: RunSpec, preset: str = "") -> str:
    """The default name of a study: LEARNER-STREAM or PRESET-STREAM, without the paths of the user's own."""
    learner_class = find_learner(spec.learner)
    # One of ours has the name already if the class was copied or derived from it.
    is_taken = built_in().get(learner_class.name, learner_class) is not learner_class
    learner = spec.learner if is_taken or not learner_class.name else learner_class.name
    names = (reference.rpartition(":")[2] for reference in (preset or learner, spec.stream))
    return file_name("-".join(names))


def _best(search: Search, trials: list[Trial]) -> Trial:
    best = search.best(trials)
    if best is None:
        diverged = any(trial.diverged for trial in trials)
        got = Description("only trials that diverged" if diverged else "none that finished")
        raise invalid("trials", got, "at least one with a score", "search smaller values" if diverged else "try more")
    return best
