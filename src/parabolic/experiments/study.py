"""The trials of a search in an Optuna storage, on which any number of processes can work at once.

All they need to know of each other is in the storage. A process takes a trial by asking for it and says every few
seconds that it is still at it. A trial whose process is gone is marked as failed, and its values wait for whoever asks
next. So a study that was killed ends like one that was not; a trial that two processes take by mistake does no
harm, as both find the same.
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
import optuna  # an extra: `tune` imports this module when it is called
from filelock import FileLock
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from parabolic.checks import Description, InputError, invalid
from parabolic.engine import Callback, State
from parabolic.experiments.search import Choices, Range, Search, Trial
from parabolic.files import disk_errors

__all__ = ["Pruner", "Study", "open_study"]

PULSE = 10.0  # seconds between two signs of life
SILENCE = 60.0  # after so many without one, a process is taken to be gone
DIVERGED = "diverged"  # under which a trial says how many of its runs did
WORKER = "worker"  # under which a process puts its name to a trial and, from the start, to the study


@contextmanager
def open_study(search: Search, name: str, storage: str | optuna.storages.BaseStorage, folder: Path) -> Iterator[Study]:
    """The study of that name, made if there is none; what goes wrong with its storage is told in a line."""
    try:
        with closing(Study(search, name, storage, folder)) as study:
            yield study
    except (SQLAlchemyError, optuna.exceptions.OptunaError) as error:
        raise _unusable(storage, error.__cause__ or error) from error


class Study:
    """A search as it stands: what was tried, what is being tried, what is tried next."""

    def __init__(self, search: Search, name: str, storage: str | optuna.storages.BaseStorage, folder: Path) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)  # what there is to say we say
        self.search = search
        self.distributions = {name: _distribution(each) for name, each in search.ranges.items()}
        with disk_errors("runs", folder, "free some space, or name another folder with --runs"):
            folder.mkdir(parents=True, exist_ok=True)
            guard = FileLock(folder / "tune.lock")  # the tables of a new data base are made by one process alone
            guard.acquire()
        try:
            self.storage = _open(storage)
            self.study = self._found_or_made(name)
            if self._differs() and not self._begun():  # its settings were refused, say, and are mended now
                optuna.delete_study(study_name=name, storage=self.storage)
                self.study = self._found_or_made(name)
            self._check_definition(name)
            self.study.set_user_attr(f"{WORKER} {_here()}", time.time())
        finally:
            guard.release()

    def _found_or_made(self, name: str) -> optuna.Study:
        return optuna.create_study(
            study_name=name, storage=self.storage, direction="maximize", load_if_exists=True,
            sampler=Sampler(self.search),
            pruner=optuna.pruners.MedianPruner() if self.search.prune else optuna.pruners.NopPruner(),
        )  # fmt: skip

    def close(self) -> None:
        """Let go of the storage."""
        self.storage.remove_session()
        if isinstance(self.storage, optuna.storages.RDBStorage):
            self.storage.engine.dispose()

    @property
    def trials(self) -> list[Trial]:
        """What was tried, in the order in which it began."""
        done = self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))
        return [
            Trial(
                self.search.rounded(each.params),
                each.value if each.state == TrialState.COMPLETE else None,
                each.user_attrs.get(DIVERGED, 0),
            )
            for each in done
        ]

    @property
    def running(self) -> int:
        """How many trials are being worked on."""
        return len(self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)))

    def ask(self, count: int, total: int) -> list[optuna.Trial]:
        """Take up to `count` trials to work on, as long as the study has fewer than `total`."""
        for each in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if self._abandoned(each):
                self._retry(each.number, each.params)
        taken: list[optuna.Trial] = []
        while len(taken) < count and _places(self.study) < total:
            trial = self.study.ask(self.distributions)
            if _places(self.study, before=trial.number) >= total:  # another process took the last place meanwhile
                self.study.tell(trial, state=TrialState.FAIL)
                break
            trial.set_user_attr(WORKER, _here())
            taken.append(trial)
        return taken

    def tell(self, trial: optuna.Trial, scores: Sequence[float] | None) -> None:
        """Say what the runs of a trial scored, NaN where one diverged; none means that the trial was given up."""
        if scores is None:
            self.study.tell(trial, state=TrialState.PRUNED, skip_if_finished=True)
            return
        if diverged := int(np.isnan(scores).sum()):
            with suppress(optuna.exceptions.UpdateFinishedTrialError):
                trial.set_user_attr(DIVERGED, diverged)
        score = float(np.nan_to_num(scores).mean())  # what diverged has learned nothing
        self.study.tell(trial, score, TrialState.COMPLETE, skip_if_finished=True)

    def give_back(self, trials: Sequence[optuna.Trial]) -> None:
        """Let someone else try, later, what could not be tried to the end."""
        for each in trials:
            self._retry(each.number, each.params)

    @contextmanager
    def pulse(self, trials: Sequence[optuna.Trial]) -> Iterator[None]:
        """Say every few seconds that these trials are being worked on."""
        done = threading.Event()

        def beat() -> None:
            while not done.wait(PULSE):
                for each in trials:
                    with suppress(Exception):  # a sign that is missed now is given the next time
                        each.set_user_attr("pulse", time.time())
            self.storage.remove_session()

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _abandoned(self, trial: FrozenTrial) -> bool:
        """Whether the process that worked on a trial is gone: dead, if it was here, or silent for long."""
        # Killed before it could put its name to the trial, it was one of those that have worked on the study.
        suspects = [trial.user_attrs[WORKER]] if WORKER in trial.user_attrs else self._others()
        if suspects and all(_dead(each) for each in suspects):
            return True
        assert trial.datetime_start is not None
        heard: float = trial.user_attrs.get("pulse", trial.datetime_start.timestamp())
        return time.time() - heard > SILENCE

    def _others(self) -> list[str]:
        """The other processes that have worked on the study."""
        known = (name.partition(" ") for name in self.study.user_attrs)
        return [worker for kind, _, worker in known if kind == WORKER and worker != _here()]

    def _begun(self) -> bool:
        """Whether a trial of the study counts, or someone may be about to make one."""
        return _places(self.study) > 0 or not all(_dead(each) for each in self._others())

    def _retry(self, number: int, values: Mapping[str, Any]) -> None:
        """Mark a trial as failed and have its values tried again, unless it is finished or someone was faster."""
        with suppress(ValueError, optuna.exceptions.UpdateFinishedTrialError):
            self.study.tell(number, state=TrialState.FAIL)
            self.study.enqueue_trial(dict(values))

    def _check_definition(self, name: str) -> None:
        """A study goes on only as it began."""
        if "definition" not in self.study.user_attrs:
            self.study.set_user_attr("definition", self.search.definition())
        if differs := self._differs():
            got = Description(f"{name!r} with " + ", ".join(f"{each}={now}" for each, (now, _) in differs.items()))
            began = "it to go on as it began, with " + ", ".join(f"{each}={was}" for each, (_, was) in differs.items())
            raise invalid("study", got, began, "give another --name, or what was given at first")

    def _differs(self) -> dict[str, tuple[Any, Any]]:
        """What is other than when the study began, by name: as it is now, and as it was."""
        now, then = _flat(self.search.definition()), _flat(self.study.user_attrs.get("definition", {}))
        # What only one of them says was added to the package later, and its default changes nothing.
        return {each: (now[each], then[each]) for each in now if each in then and now[each] != then[each]}


class Pruner(Callback):
    """Tells the study how a trial stands after each task, and ends it once it is worse than half of those before it."""

    def __init__(self, trial: optuna.Trial) -> None:
        self.trial = trial

    def on_task(self, state: State) -> None:
        """Report the accuracy so far, and raise optuna.TrialPruned where it is too low."""
        assert state.accuracy is not None
        self.trial.report(state.accuracy, state.task)
        if self.trial.should_prune():
            raise optuna.TrialPruned


class Sampler(optuna.samplers.BaseSampler):
    """Optuna's TPE with draws that depend on the search's seed and a trial's place alone, and not on who draws.

    The first trial has the learner's own values, so that what is found is never worse (by the same measure).
    """

    def __init__(self, search: Search) -> None:
        self.search = search

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Which values are drawn together."""
        return self._tpe(study, trial).infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Draw those."""
        return self._tpe(study, trial).sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Draw one of the others."""
        if _places(study, before=trial.number) == 0 and param_name in self.search.defaults:
            return self.search.defaults[param_name]
        return self._tpe(study, trial, param_name).sample_independent(study, trial, param_name, param_distribution)

    def _tpe(self, study: optuna.Study, trial: FrozenTrial, name: str = "") -> optuna.samplers.TPESampler:
        place = f"{self.search.seed} {_places(study, before=trial.number)} {name}"
        return optuna.samplers.TPESampler(seed=zlib.crc32(place.encode()))


def _places(study: optuna.Study, before: int | None = None) -> int:
    """How many trials have a place: all but those that failed and those that wait, which are still to be taken.

    `before` a number: how many places are ahead of that trial. There those that wait count too, whether they are taken
    yet or not, so that a trial's own place, by which its values are drawn, does not depend on when others begin.
    """
    uncounted = (TrialState.FAIL,) if before is not None else (TrialState.FAIL, TrialState.WAITING)
    return sum(
        each.state not in uncounted and (before is None or each.number < before)
        for each in study.get_trials(deepcopy=False)
    )


def _here() -> str:
    return f"{platform.node()}:{os.getpid()}"


def _dead(worker: str) -> bool:
    """Whether a process was on this machine and is gone."""
    host, _, pid = worker.rpartition(":")
    if host != platform.node() or os.name != "posix":
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # it lives, under another user
        pass
    return False


def _distribution(values: Range | Choices) -> BaseDistribution:
    if isinstance(values, Choices):
        return CategoricalDistribution(values)
    if isinstance(values.low, int) and isinstance(values.high, int):
        return IntDistribution(values.low, values.high, log=values.log)
    return FloatDistribution(values.low, values.high, log=values.log)


def _open(storage: str | optuna.storages.BaseStorage) -> optuna.storages.BaseStorage:
    if not isinstance(storage, str):
        return storage
    kind, _, rest = storage.partition(":")
    if kind == "journal":
        with disk_errors("--storage", Path(rest).parent, "name another file"):
            return optuna.storages.JournalStorage(JournalFileBackend(rest))
    patient = {"connect_args": {"timeout": 60}} if kind == "sqlite" else {}  # others may be writing
    try:
        return optuna.storages.RDBStorage(storage, engine_kwargs=patient)
    except ImportError as error:  # of what speaks to that kind of data base
        raise _unusable(storage, error) from error


def _flat(told: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings by their names; the space is one, as it is a difference to tune more or less."""
    flat: dict[str, Any] = {}
    for name, value in told.items():
        if name == "space":
            flat[name] = " ".join(f"{option}={text}" for option, text in value.items())
        elif isinstance(value, Mapping):
            flat |= _flat(value)
        else:
            flat[name] = value
    return flat


def _unusable(storage: object, error: BaseException) -> InputError:
    shown = re.sub(r"//[^/]*@", "//…@", str(storage))  # without a password
    return invalid("--storage", shown, "an Optuna storage that works", str(error).partition("\n")[0])
