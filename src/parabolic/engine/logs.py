"""The backends of trackers: TensorBoard, MLflow, Weights & Biases."""

from __future__ import annotations

import importlib.util
import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Protocol

from filelock import FileLock

from parabolic.plugins import require

__all__ = ["TRACKERS", "Log", "check_installed"]


class Log(Protocol):
    """One run in one tracker. Its methods may fail or be slow: they are called outside the training thread."""

    def write(self, figures: Mapping[str, float], axis: str, at: int, /) -> None:
        """Log figures at a position on an axis, such as `step` 20 or `task` 3."""

    def close(self, failed: bool, /) -> None:
        """End the run."""


class _TensorBoard:
    """Event files, one folder per run: `tensorboard --logdir FOLDER/tensorboard` shows them."""

    def __init__(self, name: str, settings: Mapping[str, str], folder: Path) -> None:
        board = require("torch.utils.tensorboard", "tensorboard", "tracker", "TensorBoard")
        self._writer = board.SummaryWriter(str(_new_folder(folder / "tensorboard" / name)))
        lines = [f"| {key} | {value.replace('|', '&#124;')} |" for key, value in settings.items()]
        self._writer.add_text("settings", "\n".join(["| setting | value |", "| --- | --- |", *lines]))

    def write(self, figures: Mapping[str, float], _axis: str, at: int) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, at)

    def close(self, _failed: bool) -> None:
        self._writer.close()


class _Mlflow:
    """Runs of an experiment in `FOLDER/mlflow.db`, or wherever MLFLOW_TRACKING_URI says."""

    def __init__(self, name: str, settings: Mapping[str, str], folder: Path) -> None:
        # By default MLflow sends telemetry, and keeps retrying an unreachable server for minutes.
        for variable, value in (
            ("MLFLOW_DISABLE_TELEMETRY", "true"),
            ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2"),
            ("MLFLOW_HTTP_REQUEST_TIMEOUT", "10"),
        ):
            os.environ.setdefault(variable, value)
        mlflow = require("mlflow", "mlflow", "tracker", "MLflow")
        self._entities = mlflow.entities
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
        address, artifacts = os.environ.get("MLFLOW_TRACKING_URI"), None
        if not address:
            folder.mkdir(parents=True, exist_ok=True)
            address, artifacts = f"sqlite:///{folder / 'mlflow.db'}", (folder / "mlflow").as_uri()
        # If several processes start at once, only one creates the tables and the experiment.
        with FileLock(folder / ".mlflow.lock") if artifacts else nullcontext():
            self._client = mlflow.MlflowClient(address)
            experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", "parabolic")
            existing = self._client.get_experiment_by_name(experiment)
            number = existing.experiment_id if existing else self._client.create_experiment(experiment, artifacts)
        self._run = self._client.create_run(number, run_name=name).info.run_id
        params = [self._entities.Param(key, value) for key, value in settings.items()]
        for chunk in (params[start : start + 100] for start in range(0, len(params), 100)):  # MLflow's limit per call
            self._client.log_batch(self._run, params=chunk)

    def write(self, figures: Mapping[str, float], _axis: str, at: int) -> None:
        timestamp = int(time.time() * 1000)
        metrics = [self._entities.Metric(name, value, timestamp, at) for name, value in figures.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self._run, "FAILED" if failed else "FINISHED")


class _Wandb:
    """Runs of a project: in `FOLDER/wandb`, to be uploaded with `wandb sync`, or at once if WANDB_MODE is online."""

    def __init__(self, name: str, settings: Mapping[str, str], folder: Path) -> None:
        mode = os.environ.setdefault("WANDB_MODE", "offline")
        if mode == "offline":
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        wandb = require("wandb", "wandb", "tracker", "Weights & Biases")
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "parabolic"), name=name, config=dict(settings), dir=str(folder),
            reinit="create_new", settings=wandb.Settings(silent=True, console="off"),
        )  # fmt: skip
        self._axes: set[str] = set()

    def write(self, figures: Mapping[str, float], axis: str, at: int) -> None:
        for name in figures.keys() - self._axes:
            self._run.define_metric(name, step_metric=axis)
        self._axes.update(figures)
        self._run.log({axis: at, **figures})

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


TRACKERS: Mapping[str, Callable[[str, Mapping[str, str], Path], Log]] = {
    "tensorboard": _TensorBoard,
    "mlflow": _Mlflow,
    "wandb": _Wandb,
}
"""The trackers by name: each is called with a run's name, its settings and a folder, and returns its log."""


PACKAGES = {"tensorboard": "TensorBoard", "mlflow": "MLflow", "wandb": "Weights & Biases"}  # display names


def check_installed(kind: str) -> None:
    """Raise an error if a tracker's package is missing, without importing it, which may take seconds."""
    if kind in PACKAGES and importlib.util.find_spec(kind) is None:
        require(kind, kind, "tracker", PACKAGES[kind])


def _new_folder(path: Path) -> Path:
    """A new folder at a path or, if that exists, beside it: two runs in one folder would be drawn as one."""
    folder, number = path, 1
    while True:
        try:
            folder.mkdir(parents=True)  # refused if another process has just taken the name
            return folder
        except FileExistsError:
            number += 1
            folder = path.with_name(f"{path.name}-{number}")
