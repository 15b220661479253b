"""One run: from its spec to its record."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from parabolic import metrics
from parabolic.backbones import make_backbone
from parabolic.checks import invalid
from parabolic.engine import Callback, train
from parabolic.experiments.spec import RunSpec
from parabolic.experiments.store import Record, Store
from parabolic.learners import Learner, find_learner
from parabolic.streams import Stream, make_stream

__all__ = ["build", "execute", "run"]


def run(
    spec: RunSpec,
    store: Store,
    *,
    again: bool = False,
    device: str = "auto",
    callbacks: Iterable[Callback] = (),
) -> tuple[Record, bool]:
    """The record of a run, and whether it was there already; it is trained only if not, or if asked `again`."""
    finished = None if again else store.find(spec)
    if finished is not None:
        return finished, True
    record = execute(spec, device=device, callbacks=callbacks)
    store.save(record)
    return record, False


def execute(spec: RunSpec, *, device: str = "auto", callbacks: Iterable[Callback] = ()) -> Record:
    """Train a run and return its record; nothing is written."""
    learner, stream = build(spec, device)
    resolved = spec.resolved()
    state = train(learner, stream, batch=resolved["batch"], epochs=spec.epochs, callbacks=callbacks)
    return Record(
        key=spec.key,
        spec=resolved,
        metrics=metrics.summary(state.matrix),
        accuracy=[row[: i + 1].tolist() for i, row in enumerate(state.matrix)],
        train_seconds=state.train_seconds,
        test_seconds=state.test_seconds,
        steps=state.step,
        environment=environment(learner.device),
    )


def build(spec: RunSpec, device: str = "auto") -> tuple[Learner, Stream]:
    """The learner and the stream of a run, before the first step.

    >>> learner, stream = build(RunSpec(learner="er"), device="cpu")
    >>> type(learner).__name__, stream.name
    ('ER', 'seq-digits')
    """
    place, resolved = _device(device), spec.resolved()
    stream = make_stream(spec.stream, spec.seed, **spec.scenario)
    model = make_backbone(resolved["backbone"], stream.shape, stream.classes, spec.seed).to(place)
    options = resolved["options"] | ({"memory": spec.memory} if "memory" in resolved else {})
    learner = find_learner(spec.learner)(
        model, prepare=stream.prepare, augment=stream.augment, classes=stream.classes, seed=spec.seed,
        **options,
    )  # fmt: skip
    return learner, stream


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, hardware, command and time: where a number comes from."""
    from parabolic import __version__

    return {
        "parabolic": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "command": shlex.join(["parabolic" if Path(sys.argv[0]).stem == "parabolic" else sys.argv[0], *sys.argv[1:]]),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise invalid("device", name, "auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise invalid("device", name, "a device that is here", "no CUDA device was found: use --device cpu")
    return device


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
