"""On a GPU: every learner steps there, and no step waits for the host."""

import pytest
import torch
from torch import nn

from parabolic import ReplayLearner, Stream
from parabolic.learners import find_learner, known_learners

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")]


def make_learner(name, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 6))
    cls = find_learner(name)
    if issubclass(cls, ReplayLearner):
        options = {"memory": 60, "replay": 16} | options
    return cls(model.cuda(), **options)


def batches(count, size=12):
    generator = torch.Generator("cuda").manual_seed(0)
    return [
        (
            torch.randint(256, (size, 3, 8, 8), dtype=torch.uint8, device="cuda", generator=generator),
            torch.randint(6, (size,), device="cuda", generator=generator),
        )
        for _ in range(count)
    ]


def test_a_stream_of_tensors_on_a_gpu_is_that_of_their_copies_on_the_host():
    x, y = torch.randn(60, 4, device="cuda"), torch.arange(60, device="cuda") % 6
    ours, theirs = (Stream.from_arrays(x.to(device), y.to(device), tasks=3) for device in ("cuda", "cpu"))
    assert ours.digest() == theirs.digest() == ours.to("cuda").digest()


@pytest.mark.parametrize("average", [None, 0.9])
@pytest.mark.parametrize("name", sorted(known_learners()))
def test_a_step_does_not_wait_for_the_host(name, average):
    learner, data = make_learner(name, average=average), batches(16)
    for first in (0, 8):
        task = first // 8 if learner.needs_tasks else None
        learner.start_task(data[first : first + 8])
        for x, y in data[first : first + 3]:  # the first steps may set things up
            learner.observe(x, y, task)
        torch.cuda.synchronize()
        try:
            torch.cuda.set_sync_debug_mode("error")
            for x, y in data[first + 3 : first + 8]:
                loss = learner.step(x, y, task)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        learner.end_task(data[first : first + 8])
    assert torch.isfinite(loss)
    assert learner.predict(data[0][0]).shape == (12,)
