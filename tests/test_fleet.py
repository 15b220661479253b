"""Fleets on any device: learners that go in step are learners that go alone."""

import threading
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from parabolic import ER, MLP, InputError, Memory, ReplayLearner, Stream, train
from parabolic.engine import Diverged, Fleet, computing_in, feed, fleet, graphs, numerics, train_fleet
from parabolic.engine.fleet import Berth, counters, set_counters
from parabolic.experiments import RunSpec, execute, execute_fleet
from parabolic.experiments.execution import Yard
from parabolic.learners import find_learner, known_learners
from parabolic.streams import CropFlip, Normalise


def make_learner(name, seed, **options):
    torch.manual_seed(seed)
    cls = find_learner(name)
    if issubclass(cls, ReplayLearner):
        options = {"memory": 30, "replay": 8} | options
    return cls(MLP((2,), 4, hidden=(16,)), seed=seed, classes=4, **options)


def make_stream(seed, size=83):
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(2 * size) % 4
    return Stream.from_arrays(torch.randn(2 * size, 2, generator=generator) + y[:, None], y, tasks=2, seed=seed)


@pytest.mark.parametrize("name", sorted(known_learners()))
def test_replicas_are_solo_runs(name):
    states = train_fleet(
        Fleet([make_learner(name, seed) for seed in (0, 1)]), [make_stream(0), make_stream(1)], batch=10
    )
    for seed, state in enumerate(states):
        alone = train(make_learner(name, seed), make_stream(seed), batch=10)
        assert alone.step == state.step
        assert (alone.matrix[1] == state.matrix[1]).all()
        for solo_weight, fleet_weight in zip(
            alone.learner.model.parameters(), state.learner.model.parameters(), strict=True
        ):
            assert torch.equal(solo_weight, fleet_weight)


@pytest.mark.parametrize("name", sorted(known_learners()))
def test_a_fleet_that_starts_again_is_a_new_one(name):
    used = Fleet([make_learner(name, 1)])
    train_fleet(used, [make_stream(1)], batch=10)
    assert used.adopt([make_learner(name, 3)])
    (state,) = train_fleet(used, [make_stream(3)], batch=10)
    fresh = train(make_learner(name, 3), make_stream(3), batch=10)
    for fresh_weight, used_weight in zip(
        fresh.learner.model.parameters(), state.learner.model.parameters(), strict=True
    ):
        assert torch.equal(fresh_weight, used_weight)
    assert used.learners[0].steps == fresh.learner.steps


def test_a_fleet_that_cannot_start_again_is_left_as_it_is():
    used = Fleet([make_learner("er", 0), make_learner("er", 1)])
    train_fleet(used, [make_stream(0), make_stream(1)], batch=10)
    steps = [learner.steps for learner in used.learners]
    fresh = [make_learner("er", 2), make_learner("er", 3, prepare=torch.neg)]
    assert not used.adopt(fresh)
    assert [learner.steps for learner in used.learners] == steps
    assert [learner.seed for learner in used.learners] == [0, 1]


def test_an_optimiser_with_a_state_does_not_start_again():
    used = Fleet([make_learner("er", 0, optimizer="Adam", lr=0.01)])
    train_fleet(used, [make_stream(0)], batch=10)
    assert not used.adopt([make_learner("er", 1, optimizer="Adam", lr=0.01)])


def test_a_class_of_ones_own_whose_state_may_not_be_all_does_not_start_again():
    class Diary(Memory):
        pass

    class Mine(ER):
        pass

    assert not Fleet([make_learner("er", 0, memory=Diary(50))]).adopt([make_learner("er", 1, memory=Diary(50))])
    own_learners = [Mine(MLP((2,), 4), memory=50, seed=seed) for seed in (0, 1)]
    assert not Fleet(own_learners[:1]).adopt(own_learners[1:])


def test_a_network_or_an_optimiser_of_ones_own_that_may_remember_the_last_run_does_not_start_again():
    class Network(MLP):
        pass

    class Plain(torch.optim.SGD):
        pass

    assert not Fleet([ER(Network((2,), 4))]).adopt([ER(Network((2,), 4))])
    assert not Fleet([make_learner("er", 0, optimizer=Plain)]).adopt([make_learner("er", 1, optimizer=Plain)])
    assert Fleet([make_learner("er", 0)]).adopt([make_learner("er", 1)])


def test_one_that_prepares_its_examples_otherwise_does_not_start_again():
    def can_adopt(options, other_options):
        return Fleet([make_learner("er", 0, **options)]).adopt([make_learner("er", 1, **other_options)])

    plain, other_normalise = (Normalise((mean,), (0.2,)) for mean in (0.5, 0.4))
    assert can_adopt({"prepare": plain}, {"prepare": Normalise((0.5,), (0.2,))})
    assert not can_adopt({"prepare": plain}, {"prepare": other_normalise})
    assert not can_adopt({}, {"prepare": plain})
    assert can_adopt({"augment": CropFlip(4)}, {"augment": CropFlip(4)})
    assert not can_adopt({"augment": CropFlip(4)}, {"augment": CropFlip(2)})
    channels = np.array([0.5]), np.array([0.2])
    assert can_adopt({"prepare": plain}, {"prepare": Normalise(*channels)})
    assert can_adopt({"prepare": Normalise(*channels)}, {"prepare": Normalise(*channels)})

    class Centred(Normalise):  # does as it likes
        pass

    class Agreeable:
        def __call__(self, x):
            return x

        def __eq__(self, other):
            if other is not self:
                raise ValueError("ambiguous")
            return True

    for cls in (partial(Centred, (0.5,), (0.2,)), Agreeable):
        prepare = cls()
        assert can_adopt({"prepare": prepare}, {"prepare": prepare})
        for other_prepare in (cls(), plain):
            assert not can_adopt({"prepare": prepare}, {"prepare": other_prepare})
            assert not can_adopt({"prepare": other_prepare}, {"prepare": prepare})


@pytest.mark.parametrize(
    ("changes", "reused"),
    [
        ({"seed": 5}, True),
        ({"scenario": {"corruption": "uniform"}}, True),
        ({"scenario": {"tasks": 2}, "epochs": 2}, True),
        ({"memory": 40}, False),
        ({"options": {"lr": 0.02}}, False),
        ({"stream": "seq-digits"}, False),
    ],
)
def test_what_was_made_for_one_run_serves_others_of_the_same_learner(changes, reused):
    yard, spec = Yard(), RunSpec("er", stream="seq-blobs", backbone="mlp", memory=50)
    ((_, _),) = execute_fleet([spec], device="cpu", yard=yard)
    first, other = yard.fleet, replace(spec, **changes)
    ((_, record),) = execute_fleet([other], device="cpu", yard=yard)
    assert (yard.fleet is first) is reused
    assert record.accuracy == execute(other, device="cpu").accuracy


def test_what_a_captured_step_has_in_it_tells_graphs_apart():
    learner = make_learner("er", 0, optimizer="Adam", lr=0.01)
    before = fleet._hyperparameters(learner)
    learner.optim.param_groups[0]["betas"] = (0.5, 0.9)
    assert fleet._hyperparameters(learner) != before
    learner.optim.param_groups[0]["lr"] = rate = torch.tensor(0.01)
    before = fleet._hyperparameters(learner)
    rate.mul_(0.5)  # as torch's schedules change it
    assert fleet._hyperparameters(learner) != before


def test_labels_of_another_type_are_a_step_of_their_own(monkeypatch):
    """They come in other buffers: a replay would train once more on what was in the first ones."""
    berth, keys = Berth(make_learner("er", 0)), []
    berth.graphs.why_not = ""
    monkeypatch.setattr(berth.graphs, "due", lambda _: False)
    monkeypatch.setattr(berth.graphs, "run", lambda key, _: (keys.append(key), False))
    for dtype in (torch.long, torch.int32, torch.long):
        berth.step(torch.randn(8, 2), torch.ones(8, dtype=dtype))
    assert keys[0] == keys[2] != keys[1]


def test_accuracy_is_counted_by_task_with_all_classes_seen_competing_and_with_its_own():
    learner, data = make_learner("er", 0), make_stream(0)
    train(learner, data, batch=10)
    for row in (0, 1):
        right = Berth(learner).test(data, row, size=7).tolist()  # sheets that cut across tasks
        for task in data.tasks[: row + 1]:
            x, y = task.test.take(task.test_rows)
            scores = learner.scores(x)
            for counts, competing in zip(right, (data.seen(row), task.classes), strict=True):
                predictions = [max(competing, key=lambda label: scores[row, label].item()) for row in range(len(x))]
                assert counts[task.index] == sum(
                    int(prediction) == int(label) for prediction, label in zip(predictions, y, strict=True)
                )


def test_one_that_diverges_leaves_the_others_alone():
    fleet = Fleet([make_learner("er", 0, lr=1e30), make_learner("er", 1)])
    wrong, right = train_fleet(fleet, [make_stream(0), make_stream(1)], batch=10)
    assert "er on arrays, seed 0: the loss became nan in task 1, by step" in str(wrong.error)
    alone = train(make_learner("er", 1), make_stream(1), batch=10)
    assert (alone.matrix[1] == right.matrix[1]).all()


@pytest.mark.parametrize("place", [0, 1])
def test_one_that_diverges_counts_its_own_steps_and_no_later_ones(place):
    rates = [0.1, 0.1]
    rates[place] = 1e30
    learners = [make_learner("er", seed, lr=lr) for seed, lr in enumerate(rates)]
    states = train_fleet(Fleet(learners), [make_stream(0), make_stream(1)], batch=10)
    (alone,) = train_fleet(Fleet([make_learner("er", place, lr=1e30)]), [make_stream(place)], batch=10)
    assert states[place].step == alone.step < states[1 - place].step == states[1 - place].total_steps
    assert str(states[place].error) == str(alone.error)


class BlindLater(torch.nn.Module):
    """Learns well, but its scores for prediction are NaN after `after` training batches."""

    def __init__(self, after):
        super().__init__()
        self.model, self.left = MLP((2,), 4, hidden=(16,)), after

    def forward(self, x):
        self.left -= self.training
        return self.model(x) * (1 if self.training or self.left >= 0 else torch.nan)


def test_scores_that_are_nan_in_a_test_are_no_result():
    """NaN scores would count as predictions of class 0, although the loss is finite."""
    batches_of_first_task = sum(1 for _ in make_stream(0)[0].batches(10))
    torch.manual_seed(0)
    models = [BlindLater(batches_of_first_task), MLP((2,), 4, hidden=(16,))]
    wrong, right = train_fleet(
        Fleet([find_learner("sgd")(model, classes=4) for model in models]), [make_stream(0), make_stream(1)], batch=10
    )
    assert "sgd on arrays, seed 0: the scores became NaN in task 2, by step" in str(wrong.error)
    assert np.isfinite(wrong.matrix[0, 0])
    assert np.isnan(wrong.matrix[1]).all()
    assert (len(wrong.train_seconds), len(wrong.test_seconds)) == (2, 1)  # of task 2 it has only the training
    assert right.error is None
    assert np.isfinite(right.matrix[1]).all()
    with pytest.raises(Diverged, match="the scores became NaN in task 1"):
        train(find_learner("sgd")(BlindLater(1), classes=4), make_stream(0), batch=10)


def test_streams_of_different_lengths_are_refused():
    with pytest.raises(InputError, match="the same number and sizes of batches"):
        train_fleet(
            Fleet([make_learner("er", 0), make_learner("er", 1)]), [make_stream(0), make_stream(1, size=60)], batch=10
        )


@pytest.mark.parametrize("pick", [lambda stream: [stream], lambda stream: stream, lambda stream: [stream, None]])
def test_a_stream_for_each_learner_is_asked_for(pick):
    fleet = Fleet([make_learner("er", seed) for seed in (0, 1)])
    with pytest.raises(InputError, match="^streams: got .*, expected a list of 2 Streams, one for each learner"):
        train_fleet(fleet, pick(make_stream(0)))


def test_an_empty_fleet_is_refused():
    with pytest.raises(InputError, match="at least one"):
        Fleet([])


def test_counters_are_those_of_the_learner_and_its_memory():
    learner = make_learner("er", 0)
    before = counters(learner)
    learner.step(torch.randn(8, 2), torch.arange(8) % 4)
    after = counters(learner)
    assert {name: after[name] - before[name] for name in after if after[name] != before[name]} == {
        ".steps": 1,
        "memory.offered": 8,
    }
    set_counters(learner, before)
    assert (learner.steps, learner.past.offered) == (0, 0)


def test_a_replayed_step_carries_the_counters_on(monkeypatch):
    """What a replay does on the device is stood in for: here only the host's side is looked at."""
    learner = make_learner("er", 0)
    berth, x, y = Berth(learner), torch.randn(8, 2), torch.arange(8) % 4
    for _ in range(4):
        learner.step(x, y)
    berth.graphs.why_not = ""
    captured = []
    monkeypatch.setattr(berth.graphs, "due", lambda key: not captured)
    monkeypatch.setattr(berth.graphs, "run", lambda key, work: (captured[0], True) if captured else (work(), False))
    captured.append(berth.step(x, y))
    for _ in range(3):
        berth.step(x, y)
    assert (learner.steps, learner.past.offered) == (8, 64)


def test_a_phase_tells_steps_of_different_shape_apart():
    """While memory has less than a replay batch, every step is code of its own."""
    learner, phases = make_learner("er", 0), []
    for _ in range(5):
        phases.append(learner.phase())
        learner.step(torch.randn(3, 2), torch.arange(3))
    assert phases == [0, 3, 6, 8, 8]


def test_specs_that_diverge_come_back_with_a_record_that_says_so():
    specs = [RunSpec(learner="sgd", options={"lr": lr}) for lr in (1e30, 0.1)]
    (_, wrong), (_, right) = execute_fleet(specs, device="cpu")
    assert wrong.diverged.startswith("sgd on seq-digits, seed 0: the loss became nan")
    assert right.accuracy == execute(specs[1], device="cpu").accuracy
    assert right.environment["steps"] == "eager: the device is not a GPU"


def test_specs_of_one_shape_differ_in_seed_and_options_only():
    spec = RunSpec(learner="er", options={"lr": 0.1})
    assert spec.shape == RunSpec(learner="er", seed=3, options={"lr": 0.2}).shape
    changes = [
        {"learner": "sgd"}, {"stream": "seq-blobs"}, {"batch": 7}, {"memory": 100}, {"precision": "bf16"},
        {"backbone": "mlp"}, {"epochs": 2}, {"heads": True}, {"future": True}, {"scenario": {"tasks": 2}},
        {"measure": "math:sqrt"},
    ]  # fmt: skip
    for change in changes:
        assert spec.shape != RunSpec(**{"learner": "er", **change}).shape


class Diary(Memory):
    """A memory of a user's own, which counts on the host."""

    def __init__(self, capacity):
        super().__init__(capacity)
        self.pages = 0

    def offer(self, batch, **options):
        super().offer(batch, **options)
        self.pages += 1


def test_a_memory_of_ones_own_is_counted_when_steps_are_replayed():
    learner = ER(MLP((2,), 4), memory=Diary(50))
    before = counters(learner)
    for _ in range(2):
        learner.step(torch.randn(3, 2), torch.arange(3))
    after = counters(learner)
    increments = {name: value - before[name] for name, value in after.items() if value != before[name]}
    assert increments == {".steps": 2, "memory.offered": 6, "memory.pages": 2}


def test_a_precision_that_does_not_exist_is_no_other():
    with (
        pytest.raises(InputError, match="^precision: got 'float32', expected one of bf16, fp32, tf32"),
        numerics("float32"),
    ):
        pass


def test_numerics_are_set_for_a_while():
    places = [(torch.backends.cuda.matmul, "allow_tf32"), (torch.backends.cudnn, "deterministic")]
    before = [getattr(*place) for place in places]
    with numerics("tf32"):
        assert [getattr(*place) for place in places] == [True, True]
    assert [getattr(*place) for place in places] == before


def test_a_run_in_bfloat16_is_another_run():
    plain, half = RunSpec(learner="er"), RunSpec(learner="er", precision="bf16")
    assert plain.key == RunSpec(learner="er", precision="fp32").key != half.key


def test_a_cpu_computes_in_float32():
    model = computing_in(MLP((2,), 4), "bf16")
    dtypes = []
    model[1].register_forward_hook(lambda _, x, y: dtypes.append(y.dtype))
    model(torch.randn(8, 2))
    assert dtypes == [torch.float32]
    assert computing_in(torch.nn.ReLU(), "bf16")(torch.ones(1)) == 1  # of no weights, so on no device


def test_streams_that_share_their_examples_need_room_for_a_copy_each(monkeypatch):
    x, y = torch.zeros(100, 10), torch.arange(100) % 2  # 4,000 bytes
    streams = [Stream.from_arrays(x, y, tasks=1, seed=seed) for seed in range(3)]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (16_000, 32_000))
    assert feed.on_device(streams, torch.device("cuda")) == streams  # 12,000 bytes are more than half of what is free


def test_batches_at_hand_are_fed_as_they_are():
    batches = make_stream(0)[0].batches(10)
    for (x, y), (expected_x, expected_y) in zip(feed.feed(batches, torch.device("cpu")), batches, strict=True):
        assert torch.equal(x, expected_x)
        assert torch.equal(y, expected_y)


def test_an_error_of_the_feeding_thread_reaches_who_waits_for_batches(monkeypatch):
    def refuse(device):
        raise RuntimeError(f"no stream on {device}")

    monkeypatch.setattr(torch.cuda, "Stream", refuse)
    errors = []

    def wait():
        try:
            next(feed.feed(make_stream(0)[0].batches(10), torch.device("cuda", 0)))
        except RuntimeError as error:
            errors.append(str(error))

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join(60)
    assert errors == ["no stream on cuda:0"]


@pytest.mark.parametrize(
    ("free", "share", "reserved", "allocated", "given_back"),
    [
        (60, 1.0, 40, 10, False),
        (20, 1.0, 80, 10, True),  # 70 are cached
        (60, 0.5, 40, 10, True),  # 30 are cached, and only 10 more allowed
        (10, 1.0, 90, 90, False),  # nothing is cached
    ],
)
def test_what_is_cached_is_given_back_before_a_capture_if_more_than_is_free(
    free, share, reserved, allocated, given_back, monkeypatch
):
    cleared = []
    device_state = {
        "mem_get_info": (free, 100), "get_per_process_memory_fraction": share, "memory_reserved": reserved,
        "memory_allocated": allocated,
    }  # fmt: skip
    for name, value in device_state.items():
        monkeypatch.setattr(torch.cuda, name, lambda _device, value=value: value)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: cleared.append(True))
    graphs._make_room(0)
    assert bool(cleared) is given_back
