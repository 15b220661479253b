"""The trials of a search in an Optuna storage, on which any number of processes can work at once.

Processes communicate only through the storage. Each asks for a trial and then sends a heartbeat every few seconds. A
trial whose process is gone is marked as failed, and its values are queued for the next process that asks. So a study
that was killed gives the same result as one that was not. If two processes work on the same trial by mistake, nothing
is lost: both get the same result.
"""

from __future__ import annotations

import os
import platform
import re
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import optuna  # an extra: `tune` imports this module only when called
from filelock import FileLock
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from parabolic.checks import Description, InputError, invalid
from parabolic.engine import Callback, State
from parabolic.experiments.search import Choices, Range, Search, Trial
from parabolic.files import disk_errors
from parabolic.options import dotted

__all__ = ["Pruner", "Study", "open_study"]

PULSE = 10.0  # seconds between heartbeats
SILENCE = 60.0  # seconds without a heartbeat after which a process counts as gone
DIVERGED = "diverged"  # attribute of a trial: how many of its runs diverged
WORKER = "worker"  # attribute of a trial: its process; also the prefix of a study's attributes, one per process


@contextmanager
def open_study(search: Search, name: str, storage: str | optuna.storages.BaseStorage, folder: Path) -> Iterator[Study]:
    """Open the study of that name, creating it if needed; errors of its storage are reported in one line."""
    try:
        with closing(Study(search, name, storage, folder)) as study:
            yield study
    except (SQLAlchemyError, optuna.exceptions.OptunaError) as error:
        raise _storage_error(storage, error.__cause__ or error) from error


class Study:
    """The state of a search: finished, running and next trials."""

    def __init__(self, search: Search, name: str, storage: str | optuna.storages.BaseStorage, folder: Path) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)  # `tune` reports progress itself
        self.search = search
        self.distributions = {name: _distribution(domain) for name, domain in search.ranges.items()}
        with disk_errors("runs", folder, "free some space, or name another folder of runs"):
            folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(folder / "tune.lock")  # one process creates the tables of a new database
            lock.acquire()
        try:
            self.storage = _open_storage(storage)
            try:
                self._join(name)
            except BaseException:
                self.close()
                raise
        finally:
            lock.release()

    def _join(self, name: str) -> None:
        """Take part in the study, which must be one of the same search."""
        self.study = self._create_or_load(name)
        # Without a trial its settings may change: they were refused, say, and have been corrected.
        if self._changed_settings() and not self._has_begun():
            optuna.delete_study(study_name=name, storage=self.storage)
            self.study = self._create_or_load(name)
        self._check_definition(name)
        self.study.set_user_attr(f"{WORKER} {_this_worker()}", time.time())

    def _create_or_load(self, name: str) -> optuna.Study:
        return optuna.create_study(
            study_name=name, storage=self.storage, load_if_exists=True,
            direction="minimize" if self.search.better == "lower" else "maximize",
            sampler=Sampler(self.search), pruner=optuna.pruners.MedianPruner(),
        )  # fmt: skip

    def close(self) -> None:
        """Close the storage."""
        self.storage.remove_session()
        if isinstance(self.storage, optuna.storages.RDBStorage):
            self.storage.engine.dispose()

    @property
    def trials(self) -> list[Trial]:
        """The finished trials, in the order in which they started."""
        finished = self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))
        return [
            Trial(
                self.search.rounded(trial.params),
                trial.value if trial.state == TrialState.COMPLETE else None,
                trial.user_attrs.get(DIVERGED, 0),
            )
            for trial in finished
        ]

    @property
    def running(self) -> int:
        """The number of trials in progress."""
        return len(self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)))

    def ask(self, count: int, total: int) -> list[optuna.Trial]:
        """Take up to `count` trials to work on, as long as the study has fewer than `total`."""
        for running_trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if self._is_abandoned(running_trial):
                self._retry(running_trial.number, running_trial.params)
        taken: list[optuna.Trial] = []
        while len(taken) < count and _count_trials(self.study) < total:
            trial = self.study.ask(self.distributions)
            if _count_trials(self.study, before=trial.number) >= total:  # another process took the last place
                self.study.tell(trial, state=TrialState.FAIL)
                break
            trial.set_user_attr(WORKER, _this_worker())
            taken.append(trial)
        return taken

    def tell(self, trial: optuna.Trial, scores: Sequence[float] | None) -> None:
        """Report the scores of a trial's runs, NaN for those that diverged; None means that the trial was pruned."""
        if diverged := int(np.isnan(scores or []).sum()):
            with suppress(optuna.exceptions.UpdateFinishedTrialError):
                trial.set_user_attr(DIVERGED, diverged)
        # A diverged run has no score by a user's measure, as it is not known which value would be bad.
        if scores is None or (diverged and self.search.measure is not None):
            self.study.tell(trial, state=TrialState.PRUNED, skip_if_finished=True)
            return
        score = float(np.nan_to_num(scores).mean())  # a diverged run counts as 0
        self.study.tell(trial, score, TrialState.COMPLETE, skip_if_finished=True)

    def give_back(self, trials: Sequence[optuna.Trial]) -> None:
        """Return unfinished trials, to be retried later by any process."""
        for trial in trials:
            self._retry(trial.number, trial.params)

    @contextmanager
    def pulse(self, trials: Sequence[optuna.Trial]) -> Iterator[None]:
        """Send heartbeats for these trials while the context is open."""
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(PULSE):
                for trial in trials:
                    with suppress(Exception):  # the next heartbeat will do
                        trial.set_user_attr("pulse", time.time())
            self.storage.remove_session()

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _is_abandoned(self, trial: FrozenTrial) -> bool:
        """Whether the process of a trial is gone: dead, if it was on this machine, or silent for too long."""
        # If it was killed before it could name itself, it was one of the processes that have worked on the study.
        suspects = [trial.user_attrs[WORKER]] if WORKER in trial.user_attrs else self._other_workers()
        if suspects and all(_is_dead(worker) for worker in suspects):
            return True
        assert trial.datetime_start is not None
        last_heartbeat: float = trial.user_attrs.get("pulse", trial.datetime_start.timestamp())
        return time.time() - last_heartbeat > SILENCE

    def _other_workers(self) -> list[str]:
        """The other processes that have worked on the study."""
        attributes = (name.partition(" ") for name in self.study.user_attrs)
        return [worker for kind, _, worker in attributes if kind == WORKER and worker != _this_worker()]

    def _has_begun(self) -> bool:
        """Whether the study has trials, or another live process may be about to add one."""
        return _count_trials(self.study) > 0 or not all(_is_dead(worker) for worker in self._other_workers())

    def _retry(self, number: int, values: Mapping[str, Any]) -> None:
        """Mark a trial as failed and queue its values again, unless it has finished or another process already did."""
        with suppress(ValueError, optuna.exceptions.UpdateFinishedTrialError):
            self.study.tell(number, state=TrialState.FAIL)
            self.study.enqueue_trial(dict(values))

    def _check_definition(self, name: str) -> None:
        """Raise an error unless the search is the one that the study began with."""
        if "definition" not in self.study.user_attrs:
            self.study.set_user_attr("definition", self.search.definition())
        if changes := self._changed_settings():
            new = ", ".join(f"{setting}={now}" for setting, (now, _) in changes.items())
            old = ", ".join(f"{setting}={then}" for setting, (_, then) in changes.items())
            got = Description(f"{name!r} with {new}")
            raise invalid("study", got, f"its original settings, {old}", "give another name, or the original settings")

    def _changed_settings(self) -> dict[str, tuple[Any, Any]]:
        """The settings that have changed since the study began, by name: the new and the old value."""
        now = _flat_settings(self.search.definition())
        then = _flat_settings(self.study.user_attrs.get("definition", {}))
        # A setting that only one of them has was added to the package later, with a neutral default.
        paths = [path for path in now if path in then and now[path] != then[path]]
        return {re.sub(r"^(options|scenario)\.", "", path): (now[path], then[path]) for path in paths}


class Pruner(Callback):
    """Reports a trial's accuracy, or the user's measure, after each task, and ends a trial that is worse than the
    median of the earlier ones.
    """

    def __init__(self, trial: optuna.Trial, metric: str) -> None:
        self.trial, self.metric = trial, metric

    def on_task(self, state: State) -> None:
        """Report the figure so far; raises optuna.TrialPruned if it is too bad."""
        matrix = state.task_matrix if self.metric.startswith("task_") else state.matrix
        accuracy = float(matrix[state.task, : state.task + 1].mean())
        self.trial.report(state.measured[self.metric][-1] if self.metric in state.measured else accuracy, state.task)
        if self.trial.should_prune():
            raise optuna.TrialPruned


class Sampler(optuna.samplers.BaseSampler):
    """Optuna's TPE with draws that depend only on the search's seed and a trial's place, not on the process.

    The first trial has the learner's default values, so that the best is never worse (by the same metric).
    """

    def __init__(self, search: Search) -> None:
        self.search = search

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """The parameters that are drawn together."""
        return self._tpe(study, trial).infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Draw them."""
        return self._tpe(study, trial).sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Draw one of the other parameters."""
        if _count_trials(study, before=trial.number) == 0 and param_name in self.search.defaults:
            return self.search.defaults[param_name]
        return self._tpe(study, trial, param_name).sample_independent(study, trial, param_name, param_distribution)

    def _tpe(self, study: optuna.Study, trial: FrozenTrial, name: str = "") -> optuna.samplers.TPESampler:
        key = f"{self.search.seed} {_count_trials(study, before=trial.number)} {name}"
        return optuna.samplers.TPESampler(seed=zlib.crc32(key.encode()))


def _count_trials(study: optuna.Study, before: int | None = None) -> int:
    """The number of trials that count: all but those that failed or are still waiting in the queue.

    With `before`, only trials with a lower number are counted, those waiting included: a trial's place, which
    determines its draws, then does not depend on when others start.
    """
    uncounted = (TrialState.FAIL,) if before is not None else (TrialState.FAIL, TrialState.WAITING)
    return sum(
        trial.state not in uncounted and (before is None or trial.number < before)
        for trial in study.get_trials(deepcopy=False)
    )


def _this_worker() -> str:
    return f"{platform.node()}:{os.getpid()}"


def _is_dead(worker: str) -> bool:
    """Whether a process of this machine has ended."""
    host, _, pid = worker.rpartition(":")
    if host != platform.node() or os.name != "posix":
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # alive, under another user
        pass
    return False


def _distribution(domain: Range | Choices) -> BaseDistribution:
    if isinstance(domain, Choices):
        return CategoricalDistribution(domain)
    if isinstance(domain.low, int) and isinstance(domain.high, int):
        return IntDistribution(domain.low, domain.high, log=domain.log)
    return FloatDistribution(domain.low, domain.high, log=domain.log)


def _open_storage(storage: str | optuna.storages.BaseStorage) -> optuna.storages.BaseStorage:
    if not isinstance(storage, str):
        return storage
    kind, _, rest = storage.partition(":")
    if kind == "journal":
        with disk_errors("storage", Path(rest).parent, "name another file"):
            return optuna.storages.JournalStorage(JournalFileBackend(rest))
    engine_kwargs = {"connect_args": {"timeout": 60}} if kind == "sqlite" else {}  # wait while others are writing
    try:
        return optuna.storages.RDBStorage(storage, engine_kwargs=engine_kwargs)
    except ImportError as error:  # the driver of that database is missing
        raise _storage_error(storage, error) from error


def _flat_settings(definition: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings, flattened; the space becomes one string, as adding or removing options is a change too."""
    space = " ".join(f"{option}={text}" for option, text in definition.get("space", {}).items())
    return dotted({**definition, "space": space})


def _storage_error(storage: object, error: BaseException) -> InputError:
    url = re.sub(r"//[^/]*@", "//…@", str(storage))  # hide the password
    return invalid("storage", url, "an Optuna storage that works", str(error).partition("\n")[0])
