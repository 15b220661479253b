"""What lets a step be captured as a CUDA graph: it waits for nothing, and its phase tells what it is made of."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from parabolic import ReplayLearner
from parabolic.learners import find_learner, known_learners

# Operations whose outcome the host waits for, or whose shape depends on values.
WAITS = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten._unique", "aten.bincount")


class Trace(TorchDispatchMode):
    """The operations of a step: their names, and the shapes and types of what they are given."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [(tuple(each.shape), each.dtype) for each in tensors((args, kwargs or {}))]
        self.operations.append((str(func), given))
        return func(*args, **(kwargs or {}))


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [each for one in value for each in tensors(one)] if isinstance(value, list | tuple) else []


def make(name, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 6))
    cls = find_learner(name)
    if issubclass(cls, ReplayLearner):
        options = {"memory": 12, "replay": 4} | options
    return cls(model, classes=6, **options)


def tasks(count=3, sizes=(5, 5, 5, 5, 5, 5, 3)):
    g = torch.Generator().manual_seed(0)
    return [
        [
            (torch.randint(256, (n, 1, 6, 6), generator=g, dtype=torch.uint8), torch.randint(6, (n,), generator=g))
            for n in sizes
        ]
        for _ in range(count)
    ]


def places(learner):
    """Where a learner's state is; the state of the generator is handed out as a copy."""
    return [each.data_ptr() for each in tensors({**learner.state_dict(), "generator": None}) if each.numel()]


@pytest.mark.parametrize("name", sorted(known_learners()))
@pytest.mark.parametrize("average", [None, 0.9])
def test_steps_of_one_phase_are_the_same_operations_on_the_same_tensors(name, average):
    learner, known, again = make(name, average=average), {}, 0
    for index, batches in enumerate(tasks()):
        learner.start_task(batches)
        for x, y in batches:
            key = (learner.phase(), len(x))
            before = places(learner)
            with Trace() as trace:
                learner.step(x, y, torch.tensor(index) if learner.needs_tasks else None)
            assert not [each for each, _ in trace.operations if each.startswith(WAITS)]
            if key in known:
                assert trace.operations == known[key]
                assert before == places(learner)
                again += 1
            known[key] = trace.operations
        learner.end_task(batches)
    assert again >= 3
