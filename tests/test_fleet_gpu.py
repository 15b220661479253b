"""On a GPU: captured steps and fleets compute, to the bit, what the learners' own steps do."""

import gc
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from parabolic import ER, MLP, Heads, ReplayLearner, Stream
from parabolic.backbones import Block, ConvNet, Norm, Stem
from parabolic.engine import BoundsMonitor, DeviceFailed, Fleet, computing_in, feed, loop, numerics, train, train_fleet
from parabolic.engine.fleet import Berth
from parabolic.engine.graphs import Graphs
from parabolic.experiments import RunSpec, execute, execute_fleet
from parabolic.experiments.execution import Yard
from parabolic.learners import find_learner, known_learners
from parabolic.streams import CropFlip

pytestmark = pytest.mark.gpu

BATCH, CLASSES = 32, 6  # some operations wait for the device only where there is much to do: so, the usual size
# Of a task: eight whole batches and a short one.
TASK = 8 * BATCH + 5


class Residual(nn.Sequential):
    """What a ResNet is made of, with its fused operations, but of few layers."""

    def __init__(self):
        super().__init__(
            Stem(3, 8, 3, padding=1), Norm(8), Block(8, 16, stride=2), Block(16, 16, stride=1),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES),
        )  # fmt: skip


def make_learner(name, seed, model="convnet", precision="fp32", **options):
    torch.manual_seed(seed)
    net = ConvNet((3, 8, 8), CLASSES, 8) if model == "convnet" else Residual()
    net = computing_in(net.cuda(), precision, channels_last=model == "residual")
    cls = find_learner(name)
    if issubclass(cls, ReplayLearner):
        options = {"memory": 70, "replay": 32} | options
    return cls(net, seed=seed, augment=CropFlip(1), classes=CLASSES, **options)


def make_stream(seed):
    """Two tasks of three classes whose images differ in brightness."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.cat([torch.arange(TASK) % 3, 3 + torch.arange(TASK) % 3])
    x = (torch.randint(64, (2 * TASK, 3, 8, 8), generator=generator) + 32 * y[:, None, None, None]).to(torch.uint8)
    return Stream.from_arrays(x, y, test=(x, y), tasks=2, seed=seed)


def flat_state(learner):
    """Every tensor and number that the next step depends on."""

    def flat(value, name=""):
        if isinstance(value, dict):
            return {key: leaf for part, inner in value.items() for key, leaf in flat(inner, f"{name}/{part}").items()}
        return {name: value.detach().clone() if isinstance(value, torch.Tensor) else repr(value)}

    return flat(learner.state_dict())


def assert_same_state(first, second):
    first, second = flat_state(first), flat_state(second)
    assert first.keys() == second.keys()
    unlike = [
        name
        for name, value in first.items()
        if not (torch.equal(value, second[name]) if isinstance(value, torch.Tensor) else value == second[name])
    ]
    assert not unlike


def captured_steps(berth):
    """The steps that were captured."""
    return {key for key in berth.graphs if key[0] == "step"}


def train_learners(learners, captured, epochs=3, **options):
    fleet = Fleet(learners)
    if not captured:
        for berth in fleet.berths:
            berth.graphs.why_not = "the test wants it so"
    states = train_fleet(
        fleet, [make_stream(learner.seed) for learner in learners], batch=BATCH, epochs=epochs, **options
    )
    return fleet, states


@pytest.mark.parametrize("average", [None, 0.9])
@pytest.mark.parametrize("model", ["convnet", "residual"])
@pytest.mark.parametrize("name", sorted(known_learners()))
def test_captured_steps_are_the_eager_ones(name, model, average):
    """Over a task boundary and short last batches, with a memory that fills on the way."""
    with numerics("fp32"):
        eager, (plain,) = train_learners([make_learner(name, 0, model, average=average)], captured=False)
        fleet, (captured,) = train_learners([make_learner(name, 0, model, average=average)], captured=True)
    (berth,) = fleet.berths
    assert berth.mode == "captured"
    assert len(captured_steps(berth)) >= 2  # whole batches and short ones
    assert_same_state(eager.learners[0], fleet.learners[0])
    assert (plain.matrix[1] == captured.matrix[1]).all()


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize("name", ["pcl", "er", "vrmcl", "obc", "lwf", "ewc"])
def test_captured_steps_are_the_eager_ones_in_any_precision(name, precision):
    with numerics(precision):
        eager, _ = train_learners([make_learner(name, 0, "residual", precision)], captured=False)
        fleet, _ = train_learners([make_learner(name, 0, "residual", precision)], captured=True)
    assert_same_state(eager.learners[0], fleet.learners[0])


def test_weights_turned_to_bfloat16_as_one_vector_are_those_turned_one_by_one(monkeypatch):
    # Without a limit, the norm of a gradient, which depends on how its entries are ordered, decides nothing.
    options = {"clip": 1e6, "lr": 0.01, "rate": 0.01, "rate_lr": 0.01}
    with numerics("bf16"):
        as_one_vector, _ = train_learners([make_learner("vrmcl", 0, "residual", "bf16", **options)], captured=True)
        monkeypatch.setattr(
            "parabolic.learners.vrmcl.types_of", lambda _, weights: [weight.dtype for weight in weights]
        )
        one_by_one, _ = train_learners([make_learner("vrmcl", 0, "residual", "bf16", **options)], captured=True)
    assert list(as_one_vector.learners[0]._by_type) == [torch.bfloat16, torch.float32]
    assert list(one_by_one.learners[0]._by_type) == [torch.float32]
    assert_same_state(as_one_vector.learners[0], one_by_one.learners[0])


@pytest.mark.parametrize(("name", "options"), [("er", {}), ("pcl", {"average": 0.9, "average_part": 0.1})])
def test_captured_steps_with_balance_are_the_eager_ones(name, options):
    with numerics("bf16"):
        eager, _ = train_learners([make_learner(name, 0, "residual", "bf16", balance=1.0, **options)], captured=False)
        fleet, _ = train_learners([make_learner(name, 0, "residual", "bf16", balance=1.0, **options)], captured=True)
    assert fleet.berths[0].mode == "captured"
    assert_same_state(eager.learners[0], fleet.learners[0])


@pytest.mark.parametrize("weights", [None, [1.0, 2.0, 1.0, 3.0, 1.0, 1.0]])
@pytest.mark.parametrize("name", ["er", "ewc", "lwf", "derpp", "clser"])
def test_captured_steps_with_a_head_for_each_task_are_the_eager_ones(name, weights):
    heads = Heads(tasks=[[0, 1, 2], [3, 4, 5]], weights=weights)
    with numerics("bf16"):
        eager, _ = train_learners([make_learner(name, 0, "residual", "bf16", criterion=heads)], captured=False)
        fleet, _ = train_learners([make_learner(name, 0, "residual", "bf16", criterion=heads)], captured=True)
    assert fleet.berths[0].mode == "captured"
    assert_same_state(eager.learners[0], fleet.learners[0])


@pytest.mark.parametrize("average", [None, 0.9])
@pytest.mark.parametrize("name", ["er", "clser", "pcl"])
def test_tests_ahead_are_the_eager_ones_and_leave_later_tests_as_they_are(name, average):
    """They are captured before anything is learned, and so before there is an average worth the name."""
    with numerics("fp32"):
        _, (eager,) = train_learners([make_learner(name, 0, "residual", average=average)], captured=False, future=True)
        _, (captured,) = train_learners(
            [make_learner(name, 0, "residual", average=average)], captured=True, future=True
        )
        _, (plain,) = train_learners([make_learner(name, 0, "residual", average=average)], captured=True)
    np.testing.assert_array_equal(captured.future, eager.future)
    np.testing.assert_array_equal(captured.matrix, eager.matrix)
    np.testing.assert_array_equal(captured.matrix, plain.matrix)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", sorted(known_learners()))
def test_replicas_of_a_fleet_are_solo_runs(name, precision):
    with numerics(precision):
        solo = [train_learners([make_learner(name, seed, "residual", precision)], captured=True) for seed in range(3)]
        fleet, states = train_learners(
            [make_learner(name, seed, "residual", precision) for seed in range(3)], captured=True
        )
    for (alone, (expected,)), learner, state in zip(solo, fleet.learners, states, strict=True):
        assert_same_state(alone.learners[0], learner)
        assert (expected.matrix[1] == state.matrix[1]).all()


def test_a_fleet_of_different_options():
    with numerics("fp32"):
        rates = [0.01, 0.05]
        solo = [train_learners([make_learner("er", 0, lr=lr)], captured=True)[0].learners[0] for lr in rates]
        fleet, _ = train_learners([make_learner("er", 0, lr=lr) for lr in rates], captured=True)
    for alone, learner in zip(solo, fleet.learners, strict=True):
        assert_same_state(alone, learner)


@pytest.mark.parametrize("name", sorted(known_learners()))
def test_a_fleet_that_starts_again_is_a_new_one(name):
    with numerics("fp32"):
        fresh_fleet, _ = train_learners([make_learner(name, seed) for seed in (3, 4)], captured=True)
        used_fleet, _ = train_learners([make_learner(name, seed) for seed in (1, 2)], captured=True)
        captured = [captured_steps(berth) for berth in used_fleet.berths]
        assert used_fleet.adopt([make_learner(name, seed) for seed in (3, 4)])
        train_fleet(used_fleet, [make_stream(seed) for seed in (3, 4)], batch=BATCH, epochs=3)
    assert [captured_steps(berth) for berth in used_fleet.berths] == captured
    for fresh_learner, used_learner in zip(fresh_fleet.learners, used_fleet.learners, strict=True):
        assert_same_state(fresh_learner, used_learner)


@pytest.mark.parametrize("name", sorted(known_learners()))
def test_captured_steps_that_are_repeated_are_the_eager_ones(name):
    with numerics("bf16"):
        eager, _ = train_learners([make_learner(name, 0, "residual", "bf16", repeats=2)], captured=False)
        fleet, _ = train_learners([make_learner(name, 0, "residual", "bf16", repeats=2)], captured=True)
    assert_same_state(eager.learners[0], fleet.learners[0])


@pytest.mark.parametrize("optimizer", ["SGD(momentum=0.5)", "Adam", "AdamW(weight_decay=0.1)", "RMSprop", "Adagrad"])
def test_steps_of_other_optimisers_are_captured_where_they_can_be(optimizer):
    """Captured where they can be; else the step goes on eagerly, with a warning, as if nothing had been tried."""
    with numerics("fp32"):
        eager, _ = train_learners([make_learner("er", 0, optimizer=optimizer, lr=0.01)], captured=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            fleet, _ = train_learners([make_learner("er", 0, optimizer=optimizer, lr=0.01)], captured=True)
    (berth,) = fleet.berths
    if optimizer == "Adagrad":
        assert "Adagrad keeps state on the host" in berth.mode
    else:
        assert berth.mode == "captured"
    assert_same_state(eager.learners[0], berth.learner)


class Peeking(ER):
    """A learner that looks at its loss at every step, which waits for the device."""

    name = "peeking"

    def loss(self, batch, recalled):
        loss = super().loss(batch, recalled)
        self.looked = bool(loss > 0)
        return loss


def test_a_step_that_waits_for_the_host_goes_on_eagerly_and_says_why():
    def peeking():
        plain = make_learner("er", 0)
        return Peeking(plain.model, memory=70, replay=32, augment=CropFlip(1), classes=CLASSES)

    with numerics("fp32"):
        eager, _ = train_learners([peeking()], captured=False)
        with pytest.warns(RuntimeWarning, match="cannot be captured"):
            fleet, _ = train_learners([peeking()], captured=True)
    assert "cannot be captured" in fleet.berths[0].mode
    assert_same_state(eager.learners[0], fleet.learners[0])


def test_a_rate_that_is_changed_between_steps_is_followed():
    with numerics("fp32"):
        learners = [make_learner("er", 0), make_learner("er", 0)]
        (berth,) = Fleet([learners[0]]).berths
        generator = torch.Generator("cuda").manual_seed(0)
        for step in range(12):
            x = torch.randint(256, (BATCH, 3, 8, 8), dtype=torch.uint8, device="cuda", generator=generator)
            y = torch.randint(CLASSES, (BATCH,), device="cuda", generator=generator)
            for learner in learners:
                learner.optim.param_groups[0]["lr"] = 0.1 / (1 + step // 4)
            berth.step(x, y)
            learners[1].step(x, y)
    assert len(captured_steps(berth)) >= 2
    assert_same_state(*learners)


def test_one_that_diverges_leaves_the_others_alone():
    with numerics("fp32"):
        alone, _ = train_learners([make_learner("er", 1)], captured=True, epochs=20)
        fleet, states = train_learners(
            [make_learner("er", 0, lr=1e30), make_learner("er", 1)], captured=True, epochs=20
        )
    assert "seed 0" in str(states[0].error)
    assert "by step" in str(states[0].error)
    assert states[1].error is None
    assert_same_state(alone.learners[0], fleet.learners[1])


def test_data_that_do_not_fit_are_streamed_with_the_same_outcome(monkeypatch):
    with numerics("fp32"):
        at_hand, (state_at_hand,) = train_learners([make_learner("pcl", 0)], captured=True)
        monkeypatch.setattr(feed, "SHARE", 0.0)
        streamed, (state_streamed,) = train_learners([make_learner("pcl", 0)], captured=True)
    assert state_streamed.stream[0].train.x.device.type == "cpu"
    assert_same_state(at_hand.learners[0], streamed.learners[0])
    assert (state_at_hand.matrix[1] == state_streamed.matrix[1]).all()


def test_the_bounds_of_data_that_do_not_fit_are_computed_too(monkeypatch):
    monkeypatch.setattr(feed, "SHARE", 0.0)
    monitor = BoundsMonitor(samples=8)
    train(make_learner("er", 0), make_stream(0), batch=BATCH, callbacks=[monitor])
    assert [row.forgetting.realised is not None for row in monitor.rows] == [True, True]


def test_streams_of_another_length_are_tested_by_graphs_of_their_own():
    fleet = Fleet([make_learner("er", 0)])
    (berth,), two_tasks = fleet.berths, make_stream(0)
    x, y = two_tasks[0].train.x, two_tasks[0].train.y
    three_tasks = Stream.from_arrays(x, y, test=(x, y), tasks=3)
    for tested in (two_tasks, three_tasks, two_tasks):
        for _ in range(4):  # captured by now
            with fleet.together(), berth.on_stream():
                right = berth.test(tested.to("cuda"), len(tested) - 1, size=100)
            scores = torch.cat([berth.learner.scores(part.cuda()) for part in x.split(100)])
            hits = scores.argmax(1).cpu() == y
            best_of_task = [scores[task.test_rows.cuda()][:, list(task.classes)].argmax(1).cpu() for task in tested]
            hits_by_task = [
                torch.tensor(task.classes)[best] == y[task.test_rows]
                for task, best in zip(tested, best_of_task, strict=True)
            ]
            assert right.tolist() == [
                [int(hits[task.test_rows].sum()) for task in tested], [int(correct.sum()) for correct in hits_by_task]
            ]  # fmt: skip


def test_no_step_of_a_captured_task_waits_for_the_device(monkeypatch):
    """Reading the loss waits, and is done now and then; here, never."""
    monkeypatch.setattr(loop, "LOOK", 10**9)
    learner, step = make_learner("er", 0), Berth.step

    def step_without_waiting(berth, x, y, task=None):
        torch.cuda.set_sync_debug_mode("error" if learner.steps > 30 else "default")
        try:
            return step(berth, x, y, task)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Berth, "step", step_without_waiting)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        train(learner, make_stream(0), batch=BATCH, epochs=20)
    assert learner.steps > 60  # so that as many steps as not were guarded, and none raised


class Asks(nn.Module):
    """A network that looks at a value on the device, but only when it predicts."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3 * 64, CLASSES)

    def forward(self, x):
        if not self.training and x.isnan().any():
            raise ValueError("no numbers")
        return self.head(x.flatten(1))


def test_a_network_that_can_be_captured_in_training_alone_is_tested_as_it_is():
    learner, images = ER(Asks().cuda(), memory=30, replay=8, classes=CLASSES), make_stream(0).to(torch.device("cuda"))
    berth = Berth(learner)
    with pytest.warns(RuntimeWarning, match="its test cannot be captured"):
        right = berth.test(images, 1, size=50)
    examples = [task.test.take(task.test_rows) for task in images]
    assert right[0].tolist() == [int((learner.predict(x) == y).sum()) for x, y in examples]


def test_specs_of_one_shape_in_one_fleet_are_their_solo_runs():
    specs = [RunSpec(learner="pcl", backbone="resnet18", channels_last=True, precision="bf16", seed=seed)
             for seed in range(3)]  # fmt: skip
    yard = Yard()
    for _ in range(2):  # the second time by the graphs of the first
        for spec, record in execute_fleet(specs, device="cuda", yard=yard):
            assert record.environment["fleet"] == 3
            assert record.environment["steps"] == "captured"
            assert record.accuracy == execute(spec, device="cuda").accuracy


@pytest.mark.parametrize("fail", [lambda: torch.ones((), device="cuda").item(),
                                  lambda: torch.empty(2**50, dtype=torch.uint8, device="cuda")])  # fmt: skip
def test_a_capture_that_fails_leaves_all_generators_as_they_were(fail):
    generator = torch.Generator("cuda").manual_seed(1)
    graphs = Graphs(torch.device("cuda"), generator)

    def work():
        torch.rand(3, device="cuda"), torch.rand(3, device="cuda", generator=generator)
        return fail() if torch.cuda.is_current_stream_capturing() else None

    for _ in range(2):
        graphs.run("work", work)
    before = [torch.cuda.get_rng_state(), generator.get_state()]
    with pytest.raises(RuntimeError):
        graphs.run("work", work)
    torch.cuda.synchronize()
    assert torch.equal(before[0], torch.cuda.get_rng_state())
    assert torch.equal(before[1], generator.get_state())
    torch.rand(3, device="cuda")
    torch.rand(3, device="cuda", generator=generator)


LITTLE_ROOM = """
import torch
from parabolic.engine.graphs import Graphs

graphs, size = Graphs(torch.device("cuda")), 2**30

def work():
    return torch.full((size,), 7, dtype=torch.uint8, device="cuda")[-1].clone()

torch.cuda.set_per_process_memory_fraction(3 * size // 2 / torch.cuda.get_device_properties(0).total_memory)
done = [graphs.run("work", work) for _ in range(4)]
print(*[(int(last), replayed) for last, replayed in done], "work" in graphs)
"""


def test_work_is_captured_where_there_is_not_room_for_it_twice():
    """Eager executions leave their memory in torch's cache, which a capture cannot use.

    In a process of its own: what other tests have left in pieces in the cache cannot be given back.
    """
    process = subprocess.run([sys.executable, "-c", LITTLE_ROOM], capture_output=True, text=True)
    assert process.stdout.split("\n")[0] == "(7, False) (7, False) (7, False) (7, True) True", process.stderr


ROOM = 2**31  # bytes that each run takes, and more than libraries keep for all the streams that they were used on


def heavy(shape, classes):
    """A network that takes a lot of room."""
    model = MLP(shape, classes, hidden=(20,))
    model.register_buffer("ballast", torch.empty(ROOM, dtype=torch.uint8, device="cuda"), persistent=False)
    return model


def test_with_too_little_memory_for_all_they_are_trained_in_parts():
    specs = [RunSpec("er", backbone=f"{__file__}:heavy", seed=seed) for seed in range(8)]
    expected = execute(specs[0], device="cuda").accuracy
    gc.collect()
    torch.cuda.empty_cache()
    try:
        room = torch.cuda.memory_reserved() + 7 * ROOM // 2
        torch.cuda.set_per_process_memory_fraction(room / torch.cuda.get_device_properties(0).total_memory)
        with pytest.warns(RuntimeWarning, match="out of memory.*at once go on, from the start"):
            results = [result for _, result in execute_fleet(specs, device="cuda")]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert [str(result) for result in results if isinstance(result, Exception)] == []
    # How many fit depends on what earlier tests have left reserved, but never all.
    assert max(result.environment["fleet"] for result in results) < len(specs)
    assert results[0].accuracy == expected


def test_too_little_memory_for_one_is_a_clear_error():
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    spec = RunSpec(learner="er", stream="seq-digits", backbone="resnet18", seed=7)
    try:
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 100 * 2**20) / total)
        with pytest.raises(DeviceFailed, match="er on seq-digits, seed 7.*out of memory"):
            execute(spec, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_bfloat16_is_inside_the_model_alone():
    model = computing_in(MLP((2,), 4).cuda(), "bf16")
    learner = ER(model, memory=30, replay=8, average=0.9)
    dtypes = []
    model[1].register_forward_hook(lambda _, x, y: dtypes.append(y.dtype))
    x, y = torch.randn(8, 2, device="cuda"), torch.arange(8, device="cuda") % 4
    for _ in range(3):
        loss = learner.observe(x, y)
    assert set(dtypes) == {torch.bfloat16}
    assert loss.dtype == learner.scores(x).dtype == torch.float32
    assert {weight.dtype for weight in (*model.parameters(), *learner.averaged.weights.values())} == {torch.float32}


def test_a_failed_pass_leaves_no_precision_behind():
    model = computing_in(MLP((2,), 4).cuda(), "bf16")
    with pytest.raises(RuntimeError):
        model(torch.randn(8, 3, device="cuda"))
    assert torch.nn.functional.linear(*torch.randn(2, 2, 2, device="cuda")).dtype == torch.float32
