"""The paper's tables in minutes: every run is replaced by a stand-in on the bundled digits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from parabolic.experiments.spec import RunSpec

__all__ = ["STREAM", "is_stand_in", "stand_in"]

STREAM, BACKBONE = "seq-digits", "mlp"  # of all stand-ins
# Three different streams of the digits for the paper's three, which have increasingly many classes and tasks.
STREAMS: dict[str, dict[str, Any]] = {
    "seq-cifar10": {},
    "seq-cifar100": {"tasks": 2},
    "seq-tinyimagenet": {"class_order": "shuffled"},
}
PAPER_BATCH, BATCH = 32, 10  # as many examples are recalled as arrive, in the paper's runs and in these
SHRINK = 5  # divides the memory: 1000 becomes 200 of 1,442 examples, 50 becomes one batch


def stand_in(spec: RunSpec) -> RunSpec:
    """The run on seq-digits, with a small network, that replaces one of the paper's.

    >>> stand_in(RunSpec(learner="er", stream="seq-cifar100", memory=600))  # doctest: +ELLIPSIS
    RunSpec(learner='er', stream='seq-digits', memory=120, ..., scenario={'tasks': 2})
    """
    options, scenario, memory = dict(spec.options), {**spec.scenario, **STREAMS[spec.stream]}, spec.memory // SHRINK
    replay = RunSpec.learner_options(spec.learner).get("replay")
    if replay is not None and replay.default:  # GEM's is 0: the whole memory
        # A preset, or a user's own class, may recall another number on purpose.
        default = BATCH if replay.default == PAPER_BATCH else replay.default
        options["replay"] = min(options.get("replay", default), memory)
    if sizes := scenario.pop("class_sizes", None):  # paper-normal, paper-reversed or paper-random
        scenario |= {"imbalance": 2.0, "imbalance_order": sizes.removeprefix("paper-")}
    return dataclasses.replace(
        spec, stream=STREAM, backbone=BACKBONE, memory=memory, options=options, scenario=scenario
    )


def is_stand_in(resolved: Mapping[str, Any], command: str = "") -> bool:
    """Whether a resolved spec is that of a stand-in, on which no result should rest.

    Other runs may be like one: if the command that trained it is known, it must be that of the paper's tables.

    >>> like_one = RunSpec("er", backbone="mlp").resolved()
    >>> [is_stand_in(like_one, f"parabolic {command}") for command in ("paper main --quick", "run --set backbone=mlp")]
    [True, False]
    """
    like_one = (resolved["stream"], resolved.get("backbone")) == (STREAM, BACKBONE)
    return like_one and (not command or command.split()[1:2] == ["paper"])
