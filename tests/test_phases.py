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
        inputs = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors((args, kwargs or {}))]
        self.operations.append((str(func), inputs))
        return func(*args, **(kwargs or {}))


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for item in value for tensor in tensors(item)] if isinstance(value, list | tuple) else []


def make_learner(name, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 6))
    cls = find_learner(name)
    if issubclass(cls, ReplayLearner):
        options = {"memory": 12, "replay": 4} | options
    return cls(model, classes=6, **options)


def tasks(count=3, sizes=(5, 5, 5, 5, 5, 5, 3)):
    generator = torch.Generator().manual_seed(0)
    return [
        [
            (
                torch.randint(256, (size, 1, 6, 6), generator=generator, dtype=torch.uint8),
                torch.randint(6, (size,), generator=generator),
            )
            for size in sizes
        ]
        for _ in range(count)
    ]


def addresses(learner):
    """Where a learner's state is; the state of the generator is handed out as a copy."""
    return [tensor.data_ptr() for tensor in tensors({**learner.state_dict(), "generator": None}) if tensor.numel()]


@pytest.mark.parametrize("name", sorted(known_learners()))
@pytest.mark.parametrize("average", [None, 0.9])
def test_steps_of_one_phase_are_the_same_operations_on_the_same_tensors(name, average):
    learner, operations_by_phase, repeats = make_learner(name, average=average), {}, 0
    for index, batches in enumerate(tasks()):
        learner.start_task(batches)
        for x, y in batches:
            key = (learner.phase(), len(x))
            before = addresses(learner)
            with Trace() as trace:
                learner.step(x, y, torch.tensor(index) if learner.needs_tasks else None)
            assert not [operation for operation, _ in trace.operations if operation.startswith(WAITS)]
            if key in operations_by_phase:
                assert trace.operations == operations_by_phase[key]
                assert before == addresses(learner)
                repeats += 1
            operations_by_phase[key] = trace.operations
        learner.end_task(batches)
    assert repeats >= 3
