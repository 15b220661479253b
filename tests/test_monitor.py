"""The monitor: what it says is so, and what is learned does not depend on it."""

import contextlib
import copy
import itertools
import json
import logging
import math
import os
import signal
import threading
import time
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slow import reservoir
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from parabolic import (
    ER,
    MLP,
    PCL,
    SGD,
    InputError,
    Journal,
    Learner,
    Memory,
    Monitor,
    ParabolicClassifier,
    make_stream,
    train,
)
from parabolic.engine import BoundsMonitor, Callback, Diverged, Fleet, Look, Tail, Tracker, train_fleet
from parabolic.engine.looks import Lines
from parabolic.learners import ReplayLearner, find_learner, known_learners
from parabolic.memory import ClassBalanced, EqualShares
from parabolic.pde import ForgettingBound
from parabolic.pde.bounds import Range
from parabolic.states import same_state

OLD = Path(__file__).parent / "data" / "er-of-version-1.safetensors"


def numbered_batches(steps, size=6, classes=3):
    """A stream whose examples carry the number of their arrival."""
    for step in range(steps):
        numbers = torch.arange(step * size, (step + 1) * size)
        yield torch.stack([numbers.float(), numbers.float() % 5], 1), numbers % classes


def looks_at(learner, stream, **settings):
    """What a monitor sees of a learner in a loop of one's own."""
    looks = []
    with Monitor(tell=looks.append, **{"share": 1, "bound": 16} | settings) as monitor:
        for x, y in stream:
            monitor(learner, learner.observe(x, y))
    return looks


# -- ages --------------------------------------------------------------------------------------------------


@settings(max_examples=200)
@given(st.integers(1, 30), st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(0, 2**32))
def test_ages_are_those_of_examples_offered_one_by_one(capacity, sizes, seed):
    memory, remembered, seen = Memory(capacity), [], 0
    generator, same_generator = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed)
    for size in sizes:
        memory.offer({"x": torch.randn(size, 2)}, generator=generator)
        seen = reservoir(remembered, seen, capacity, range(seen, seen + size), same_generator)
    assert memory.ages.tolist() == [seen - 1 - number for number in remembered]


@pytest.mark.parametrize("memory_class", [Memory, ClassBalanced, EqualShares])
@pytest.mark.parametrize("reload_at", [2, 9, 25])
def test_ages_go_with_their_examples_through_a_state(memory_class, reload_at):
    memory = memory_class(20)
    for number, (x, y) in enumerate(numbered_batches(30)):
        if number == reload_at:
            saved, memory = memory.state_dict(), memory_class(20)
            memory.load_state_dict(saved)
        memory.offer({"x": x, "y": y, "task": y // 2}, generator=torch.Generator().manual_seed(number))
        assert memory.ages.tolist() == (memory.offered - 1 - memory["x"][:, 0].long()).tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["er", "cbrs"])
def test_ages_are_right_where_steps_are_captured(name):
    learner = find_learner(name)(MLP((2,), 3).cuda(), memory=50)
    (berth,) = Fleet([learner]).berths
    for x, y in numbered_batches(40):
        berth.step(x.cuda(), y.cuda())
    past = learner.past
    assert past.ages.tolist() == (past.offered - 1 - past["x"][:, 0].long()).tolist()


def test_a_file_from_before_ages_were_known_is_loaded(tmp_path):
    learner = Learner.load(OLD, model=nn.Linear(2, 2))
    assert (learner.steps, learner.past.offered) == (5, 15)
    assert learner.past.ages.tolist() == [15] * 8  # older than all there was: not known
    look = Monitor(tell=str, bound=0).look(learner)
    assert (look.kept, look.tenths, look.age, sum(look.classes.values())) == (8, None, None, 8)
    for x, y in numbered_batches(40, classes=2):
        learner.observe(x, y)
    known = learner.past.ages < learner.past.offered
    assert 0 < known.sum() <= 8
    assert sum(Monitor(tell=str, bound=0).look(learner).tenths) == known.sum()
    reloaded = Learner.load(learner.save(tmp_path / "a"), model=nn.Linear(2, 2))
    assert reloaded.past.ages.tolist() == learner.past.ages.tolist()


# -- what a look says --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["er", "cbrs", "obc"])
def test_a_look_counts_the_memory_by_class_and_age(name):
    learner = find_learner(name)(MLP((2,), 3), memory=40, replay=8, lr=1e-4)
    looks = []
    with Monitor(every=7, tell=looks.append, bound=0) as monitor:
        for x, y in numbered_batches(50):
            monitor(learner, learner.observe(x, y))
            if monitor.last is None or monitor.last.step != learner.steps:
                continue
            look, past = monitor.last, learner.past
            assert (look.kept, look.capacity, look.offered) == (len(past), 40, past.offered)
            assert look.classes == Counter(past["y"].tolist())
            if name != "obc":  # which offers half of what arrives
                arrived = past["x"][:, 0].long().tolist()
                assert look.tenths == [
                    Counter(number * 10 // past.offered for number in arrived)[tenth] for tenth in range(10)
                ]
                assert math.isclose(look.age, past.offered - 1 - sum(arrived) / len(arrived))
            assert sum(look.tenths) == len(past)
    assert [look.step for look in looks] == [7, 14, 21, 28, 35, 42, 49, 50]


def test_what_is_right_before_it_is_learned_is_counted_since_the_last_look():
    learner, plain, looks, right = ER(MLP((2,), 3), memory=50), None, [], []
    plain = copy.deepcopy(learner)
    with Monitor(every=10, tell=looks.append, share=0) as monitor:
        for number, (x, y) in enumerate(numbered_batches(25)):
            if number % 10 < 7:  # a part may do
                right.append(
                    [int(learner.predict(example[None])) == int(label) for example, label in zip(x, y, strict=True)]
                )
                monitor.ahead(learner, x.numpy(), y.tolist())
            else:
                right.append([])
            monitor(learner, learner.observe(x, y))
            plain.observe(x, y)
    assert same_state(learner.state_dict(), plain.state_dict())
    periods = [[*itertools.chain(*right[first : first + 10])] for first in (0, 10, 20)]
    assert [look.ahead for look in looks] == pytest.approx([100 * sum(period) / len(period) for period in periods])
    assert "% right before learning" in str(looks[0])
    assert looks[0].figures()["monitor/ahead"] == looks[0].ahead
    assert Look.from_dict(looks[0].as_dict()) == looks[0]
    new_look = monitor.look(learner)
    assert new_look.ahead is None  # a new stream
    monitor.ahead(learner, x, y)
    accuracies = [monitor.look(learner).ahead for _ in range(2)]  # the second look has nothing new
    assert accuracies == pytest.approx([100 * float((learner.predict(x) == y).double().mean())] * 2)


def test_labels_that_become_wrong_are_seen_ahead():
    torch.manual_seed(0)
    learner, looks = ER(MLP((4,), 2), memory=200, lr=0.05), []
    with Monitor(every=100, tell=looks.append, share=0) as monitor:
        for number in range(400):
            x = torch.randn(8, 4)
            y = ((x[:, 0] > 0) ^ (number >= 300)).long()
            monitor.ahead(learner, x, y)
            monitor(learner, learner.observe(x, y))
    before, after = looks[2:4]
    assert before.ahead > 90
    assert after.ahead < 50


def test_only_classes_can_be_right():
    monitor, x = Monitor(tell=str), torch.randn(4, 2)
    with pytest.raises(InputError, match="^learner: got 'ER', expected one that learns classes"):
        monitor.ahead(ER(nn.Linear(2, 1), criterion="mse"), x, torch.randn(4))
    with pytest.raises(InputError, match="^y: got .*, expected 4 labels, one for each example"):
        Monitor(tell=str).ahead(ER(nn.Linear(2, 2)), x, torch.zeros(3))
    with pytest.raises(InputError, match="^answers: got .*, expected 4 labels, one for each example"):
        Monitor(tell=str).ahead(ER(nn.Linear(2, 2)), x, [0, 1, 0, 1], [0, 1])


@pytest.mark.parametrize(
    "not_labels",
    [torch.full((4,), 0.9), [0.0, 1.0, float("nan"), 1.0], torch.ones(4) > 0, ["a", "b", "a", "b"], [None] * 4],
)
def test_what_is_no_class_is_not_counted_as_one(not_labels):
    """Probabilities, for example, would all be rounded to class 0."""
    monitor, learner, x = Monitor(tell=str), ER(nn.Linear(2, 2)), torch.randn(4, 2)
    with pytest.raises(InputError, match="^answers: got "):
        monitor.ahead(learner, x, [0, 1, 0, 1], not_labels)
    with pytest.raises(InputError, match="^y: got "):
        monitor.ahead(learner, x, not_labels)
    assert monitor.look(learner).ahead is None


def test_rare_classes_are_counted_by_themselves():
    learner, looks = ER(MLP((2,), 3), memory=50), []
    monitor, x, y = Monitor(tell=looks.append), torch.randn(20, 2), torch.tensor([0] * 18 + [1, 2])
    monitor.ahead(learner, x, y, answers=torch.zeros(20, dtype=torch.long))  # nobody is ever suspected
    monitor.ahead(learner, x[:2], [2, 0], answers=[2, 2])
    look = monitor.look(learner)
    assert (look.ahead, look.ahead_classes) == (100 * 19 / 22, {0: (18, 19), 1: (0, 1), 2: (1, 2)})
    assert look.balanced == pytest.approx(100 * (18 / 19 + 0 + 1 / 2) / 3)
    assert "86.4 % right before learning, 48.2 % averaged over classes" in str(look)
    figures = look.figures()
    assert (figures["monitor/balanced"], figures["ahead_by_class/2"]) == (look.balanced, 50)
    assert Look.from_dict(json.loads(json.dumps(look.as_dict()))) == look
    predictions = learner.predict(x)
    monitor.ahead(learner, x, y)
    right = {label: int((predictions[y == label] == label).sum()) for label in range(3)}
    assert monitor.look(learner).ahead_classes == {label: (right[label], [18, 1, 1][label]) for label in range(3)}


def test_the_loss_is_the_mean_since_the_last_look():
    learner, losses, looks = ER(MLP((2,), 3), lr=1e-3), [], []
    with Monitor(every=4, tell=looks.append) as monitor:
        for x, y in numbered_batches(12):
            losses.append(learner.observe(x, y))
            monitor(learner, losses[-1])
    assert [look.step for look in looks] == [4, 8, 12, 12]  # the last of them at everything
    for look, losses_since in zip(looks, [losses[:4], losses[4:8], losses[8:], losses[8:]], strict=True):
        assert look.loss == pytest.approx(torch.stack(losses_since).mean().item())


def test_losses_in_half_precision_are_added_up_in_full():
    learner, looks = ER(MLP((2,), 3), lr=1e-3), []
    monitor = Monitor(every=1000, tell=looks.append, bound=0)
    for _ in range(400):
        monitor(learner, torch.tensor([0.25], dtype=torch.bfloat16))
    assert looks == []  # a call without a step makes no look due
    assert monitor.look(learner).loss == 0.25


def test_an_accuracy_is_of_the_stream_that_was_tested():
    monitor = Monitor(every=1000, tell=str, bound=0)
    train(ER(MLP((2,), 6)), make_stream("seq-blobs"), batch=50, callbacks=[monitor])
    assert monitor.last.accuracy is not None
    assert monitor.look(ER(MLP((2,), 3))).accuracy is None


def test_drift_is_of_the_same_examples_at_two_moments():
    """Samples are taken at the first look and at every second one after it."""
    learner, samples, looks_and_drifts = ER(MLP((2,), 3), memory=30, replay=8, lr=1e-3), {}, []

    def mean_loss(x, y):
        return float(cross_entropy(learner.scores(x), y))

    def tell(look):
        looks_and_drifts.append(
            (look, samples.get(look.since) and mean_loss(*samples[look.since][:2]) - samples[look.since][2])
        )
        x, y = learner.past["x"].clone(), learner.past["y"].clone()
        samples[look.step] = (x, y, mean_loss(x, y))
        assert look.memory_loss == pytest.approx(samples[look.step][2], rel=1e-4)

    monitor = Monitor(every=5, tell=tell, share=1, follow=2, bound=0)
    for x, y in numbered_batches(30):
        monitor(learner, learner.observe(x, y))
    assert [look.since for look, _ in looks_and_drifts] == [None, 5, 5, 15, 15, 25]
    assert looks_and_drifts[0][0].drift is None
    for look, expected in looks_and_drifts[1:]:
        assert look.drift == pytest.approx(expected, rel=1e-3, abs=1e-4)
        assert look.drift != 0


def test_the_bound_is_that_of_the_bounds_monitor():
    stream, looks, bounds = make_stream("seq-blobs"), [], BoundsMonitor(samples=32, seed=3)
    torch.manual_seed(0)
    monitor = Monitor(every=1000, tell=looks.append, bound=32, seed=3)
    state = train(PCL(MLP((2,), 6)), stream, batch=50, callbacks=[bounds, monitor])
    (look,) = looks
    assert look.bound == bounds.rows[-1].forgetting.bound
    assert (look.step, look.accuracy) == (state.total_steps, state.accuracy)


def test_a_look_at_a_learner_without_a_memory_has_its_loss_alone():
    looks = looks_at(SGD(MLP((2,), 3), lr=1e-3), numbered_batches(10), every=5)
    assert [look.as_dict().keys() for look in looks] == [{"step", "time", "loss"}] * 3
    assert str(looks[0]) == f"step 5: loss {looks[0].loss:.3g}"


class Inputs(ReplayLearner):
    """Stores examples without their labels."""

    keeps = ("x",)

    def loss(self, batch, recalled):
        return self.error(self.model(batch["x"]), batch["y"])


def test_a_memory_without_labels_is_counted_and_not_evaluated():
    look = looks_at(Inputs(MLP((2,), 3), memory=50, lr=1e-3), numbered_batches(10))[-1]
    assert (look.kept, sum(look.tenths)) == (50, 50)
    assert (look.classes, look.memory_loss, look.bound, look.note) == (None, None, None, "")


def test_a_look_at_a_learner_of_numbers_has_no_classes():
    learner = ER(MLP((2,), 1), criterion="mse", lr=1e-4)
    look = looks_at(learner, ((x / 100, x[:, :1]) for x, _ in numbered_batches(20)))[-1]
    assert look.classes is None
    assert sum(look.tenths) == look.kept == 120
    assert look.memory_loss == pytest.approx(
        float(mse_loss(learner.scores(learner.past["x"]), learner.past["y"])), rel=1e-3
    )
    assert look.bound > look.memory_loss


def test_many_classes_are_summed_up():
    learner = ER(MLP((2,), 100), lr=1e-4, memory=200)
    look = looks_at(learner, numbered_batches(100, classes=100))[-1]
    assert sum(look.classes.values()) == 200
    least, most = min(look.classes.values()), max(look.classes.values())
    assert f"{len(look.classes)} classes of {least} to {most} each" in str(look)
    assert len(str(look)) < 200
    assert not any("by_class" in name for name in look.figures())


def test_where_there_is_no_bound_the_rest_is_still_measured():
    words = nn.Embedding(30, 4)
    learner = ER(nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), embed=words, memory=20, replay=5)
    look = looks_at(learner, ((torch.randint(30, (6, 3)), y) for _, y in numbered_batches(10)))[-1]
    assert look.bound is None
    assert "no bound: learner: got one with embed=" in look.note
    assert look.memory_loss is not None


def test_a_learner_that_diverged_is_still_looked_at():
    learner = ER(MLP((2,), 3), lr=1e18)
    look = looks_at(learner, numbered_batches(20))[-1]
    assert math.isnan(look.loss)
    loaded = Look.from_dict(json.loads(json.dumps(look.as_dict(), allow_nan=False)))
    assert math.isnan(loaded.loss)
    assert (loaded.classes, loaded.tenths, loaded.step) == (look.classes, look.tenths, look.step)


def test_the_note_on_a_missing_bound_distinguishes_a_diverged_model_from_examples_that_are_not_finite():
    class Trusts(ER):
        def observe(self, x, y, task=None):
            return self.step(x, y, task)  # without a check, as the engine does

    model, looks = (
        ER(MLP((2,), 3), lr=1e18),
        looks_at(Trusts(nn.Linear(2, 3), prepare=torch.log, classes=3), numbered_batches(1)),
    )
    assert looks[-1].note.startswith("no bound: points: got 3 values that are NaN or infinite")
    assert looks[-1].note.endswith("clean or drop those examples")
    note = looks_at(model, numbered_batches(20))[-1].note
    assert note.startswith("no bound: loss: got 120 values that are NaN or infinite")
    assert note.endswith("the points are finite, so it is the model: if it has diverged, lower its lr")


# -- what it must not do -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(known_learners()))
def test_nothing_that_is_learned_depends_on_it(name):
    def trained(callbacks):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(2, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 6))
        learner = find_learner(name)(model, average=0.9)
        state = train(learner, make_stream("seq-blobs"), batch=50, callbacks=callbacks)
        return learner.state_dict(), torch.get_rng_state(), torch.from_numpy(state.matrix)

    assert same_state(trained([Monitor(every=5, tell=str, share=1, bound=8)]), trained([]))


def test_a_model_that_draws_at_random_in_its_answers_too_learns_the_same():
    """As with dropout that stays on in evaluation, to say how certain an answer is."""

    class Sampled(nn.Linear):
        def forward(self, x):
            return super().forward(nn.functional.dropout(x, 0.5, training=True))

    def learned(watched):
        torch.manual_seed(0)
        learner, monitor = ER(Sampled(2, 3)), Monitor(every=5, tell=str, share=1, bound=8)
        for x, y in numbered_batches(10):
            if watched:
                monitor.ahead(learner, x, y)
            loss = learner.observe(x, y)
            if watched:
                monitor(learner, loss)
        return learner.state_dict()

    assert same_state(learned(watched=True), learned(watched=False))


def test_a_batch_that_another_thread_learns_during_a_look_has_draws_of_its_own(monkeypatch):
    def learned(watched):
        def learn_meanwhile(learner, **_):
            learner.observe(*next(batches))
            return ForgettingBound(*[Range(0.0, 0.0, 1.0)] * 3), None

        monkeypatch.setattr("parabolic.engine.monitor.bounds_of", learn_meanwhile)
        torch.manual_seed(0)
        learner, batches = ER(nn.Sequential(nn.Dropout(), nn.Linear(2, 3))), numbered_batches(3)
        learner.observe(*next(batches))
        Monitor(tell=str).look(learner) if watched else learner.observe(*next(batches))
        learner.observe(*next(batches))
        return learner.state_dict()

    assert same_state(learned(watched=True), learned(watched=False))


def test_a_model_that_cannot_be_asked_costs_the_answer_and_not_the_stream():
    class Small(nn.Linear):
        def forward(self, x):
            if len(x) > 60:
                raise self.error
            return super().forward(x)

    model = Small(2, 3)
    for model.error in (torch.OutOfMemoryError("out of memory"), ValueError("too many"), MemoryError()):
        learner = ER(model, memory=100, lr=1e-4)
        looks = looks_at(learner, numbered_batches(30), every=10)
        message = str(model.error) or "MemoryError"
        assert [look.memory_loss is None for look in looks] == [False, True, True, True]  # at 60 examples, and at 100
        assert looks[-1].note == f"no loss on memory: {message}; no bound: {message}"
        assert (looks[-1].kept, learner.steps, model.training) == (100, 30, True)


def test_a_learner_that_is_put_back_is_looked_at_from_there():
    learner, looks = ER(MLP((2,), 3), lr=1e-3), []
    monitor = Monitor(every=5, tell=looks.append, bound=0)
    early_state = copy.deepcopy(learner.state_dict())
    for _ in range(2):
        for x, y in numbered_batches(11):
            monitor(learner, learner.observe(x, y))
        learner.load_state_dict(early_state)
    assert [look.step for look in looks] == [5, 10, 1, 6, 11]


def test_between_looks_the_device_is_not_waited_for():
    learner, looks = ER(MLP((2,), 3), lr=1e-3), []
    monitor = Monitor(every=10, tell=looks.append)
    for x, y in numbered_batches(9):
        learner.observe(x, y)
        monitor(learner, torch.zeros((), device="meta"))  # whose value nobody can read
    learner.observe(x, y)
    with pytest.raises(RuntimeError, match="meta"):
        monitor(learner, torch.zeros((), device="meta"))


def test_without_time_to_spend_the_model_is_asked_at_the_first_and_the_last_look():
    looks = looks_at(ER(MLP((2,), 3), lr=1e-3), numbered_batches(25), every=5, share=0)
    assert [look.memory_loss is not None for look in looks] == [True, False, False, False, False, True]
    assert [look.bound is not None for look in looks] == [False] * 5 + [True]
    assert all(look.classes for look in looks)


def test_where_no_bound_is_asked_for_there_is_none_and_nothing_is_missing():
    for look in looks_at(ER(MLP((2,), 3), lr=1e-3), numbered_batches(10), every=5, bound=0):
        assert (look.bound, look.note) == (None, "")
        assert look.memory_loss is not None


@pytest.mark.parametrize(("bound", "part"), [(0, 0.1), (8, 0.2)])
def test_the_share_of_the_time_is_used_and_not_exceeded(monkeypatch, bound, part):
    """On a clock that steps and evaluations move. The loss on memory and the bound get half of the share each."""
    clock, spent = [0.0], [0.0]

    class Slow(nn.Linear):
        def forward(self, x):
            if not self.training:
                clock[0], spent[0] = clock[0] + 1, spent[0] + 1
            return super().forward(x)

    monkeypatch.setattr("parabolic.engine.monitor.time.perf_counter", lambda: clock[0])
    learner, monitor = ER(Slow(2, 3), lr=1e-3), Monitor(every=5, tell=str, share=0.2, bound=bound)
    for x, y in numbered_batches(1000):
        clock[0] += 1
        monitor(learner, learner.observe(x, y))
    assert spent[0] / clock[0] == pytest.approx(part, rel=0.1)


def test_a_bound_on_a_large_memory_waits_until_there_is_time_for_it(monkeypatch):
    """Also the first, of which only the size of the memory is known, and those of a memory that has grown since."""
    clock, spent, shares = [0.0], [0.0], []

    def compute_bounds(learner, **_):
        seconds = 0.001 * len(learner.past)
        clock[0], spent[0] = clock[0] + seconds, spent[0] + seconds
        return ForgettingBound(*[Range(0.0, 0.0, 1.0)] * 3), None

    monkeypatch.setattr("parabolic.engine.monitor.time.perf_counter", lambda: clock[0])
    monkeypatch.setattr("parabolic.engine.monitor.bounds_of", compute_bounds)
    learner = ER(MLP((2,), 3), memory=3000, lr=1e-3)
    monitor = Monitor(every=1, tell=lambda _: shares.append(spent[0] / (clock[0] or 1)), share=0.2)
    for x, y in numbered_batches(1000):
        clock[0] += 0.1
        monitor(learner, learner.observe(x, y))
    assert shares[-1] > 0.05
    assert max(shares) <= 0.1


def test_threads_that_share_it_are_looked_at_in_order_and_once(tmp_path):
    learner, steps_seen = ER(MLP((2,), 3), memory=50, lr=1e-3), []
    batches, errors = list(numbered_batches(40)), []

    def tell(look):
        time.sleep(0.002)  # long enough for another thread to come
        steps_seen.append(look.step)

    def learn():
        try:
            for x, y in batches:
                monitor(learner, journal.observe(x, y))
                learner.predict(x)
        except Exception as error:
            errors.append(error)

    monitor = Monitor(every=3, tell=tell, file=tmp_path / "m.jsonl", share=1, bound=16)
    with Journal(tmp_path, learner, every=10) as journal:
        threads = [threading.Thread(target=learn, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    assert (errors, learner.steps) == ([], 160)
    assert all(later - earlier >= 3 for earlier, later in itertools.pairwise(steps_seen))
    monitor.close()
    tail = Tail(tmp_path / "m.jsonl")
    assert tail.poll()
    assert [look.step for look in tail.looks] == steps_seen


def test_a_monitor_is_for_one_learner():
    first, second = (ER(MLP((2,), 3), lr=1e-3) for _ in range(2))
    monitor = Monitor(tell=str)
    monitor(first, 0.5)
    for call in (monitor, monitor.look):
        with pytest.raises(InputError, match="make a monitor for each learner"):
            call(second)
    monitor.close()
    monitor(second, 0.5)
    streams = [make_stream("seq-blobs", seed) for seed in (0, 1)]
    with pytest.raises(InputError, match="make a monitor for each learner"):
        train_fleet(Fleet([ER(MLP((2,), 6)), ER(MLP((2,), 6))]), streams, callbacks=[Monitor(tell=str)])


@pytest.mark.parametrize(
    "arguments",
    [{"every": 0}, {"share": 2}, {"sample": 0}, {"follow": 1.5}, {"bound": -1}, {"seed": 1.5}, {"tell": "print"},
     {"file": ""}, {"tracker": "tensorboard"}],
)  # fmt: skip
def test_wrong_arguments_are_refused_by_name(arguments):
    with pytest.raises(InputError, match=f"^{next(iter(arguments))}: got"):
        Monitor(**arguments)


def test_what_is_no_learner_or_no_loss_is_refused():
    learner, monitor = ER(MLP((2,), 3)), Monitor(tell=str)
    for call in (monitor, monitor.look):
        with pytest.raises(InputError, match=r"^learner: got .*MLP.*, expected a learner; pass an estimator's"):
            call(learner.model)
    with pytest.raises(InputError, match=r"^loss: got a tensor of shape \[2\] .*, expected one number"):
        monitor(learner, torch.zeros(2))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_ctrl_c_while_its_file_is_opened_is_not_hidden(tmp_path):
    """Opening a pipe that nobody reads waits; on a busy machine, or a slow disk, any file may take long."""

    def interrupt(*_):
        raise KeyboardInterrupt

    os.mkfifo(tmp_path / "pipe")
    learner = ER(MLP((2,), 3))
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(KeyboardInterrupt), Monitor(file=tmp_path / "pipe") as monitor:
            monitor(learner)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# -- whom it tells -----------------------------------------------------------------------------------------


def test_it_prints_or_logs(capsys, caplog):
    learner = ER(MLP((2,), 3), lr=1e-3)
    for monitor in (Monitor(), Monitor(tell=logging.getLogger("mine").info)):
        with caplog.at_level("INFO"):
            look = monitor.look(learner)
    assert capsys.readouterr().err == caplog.messages[0] + "\n" == f"{look}\n"


@pytest.mark.parametrize(
    ("figures", "text"),
    [({"loss": 0.5}, "loss 0.5"), ({"ahead": 25.0}, "25.0 %"), ({"memory_loss": 2.5}, "loss on memory 2.5"),
     ({"drift": -0.5, "since": 4}, "drift -0.5 since step 4"), ({"bound": 3.5}, "bound 3.5"),
     ({"accuracy": 75.0}, "accuracy 75.0 %"), ({"kept": 3, "capacity": 9, "offered": 3, "age": 4.0}, "mean age 4")],
)  # fmt: skip
def test_a_line_says_each_figure_that_there_is(figures, text):
    assert str(Look(5, 0.0)) == "step 5: "
    assert text in str(Look(5, 0.0, **figures))


def test_estimators_are_looked_at_too():
    model, looks = ParabolicClassifier(learner="er"), []
    monitor = Monitor(every=1, tell=looks.append, share=1)
    for x, y in numbered_batches(3, size=40):
        model.partial_fit(x.numpy(), y.numpy(), classes=[0, 1, 2])
        monitor(model.learner_)
    assert [look.offered for look in looks] == [40, 80, 120]
    assert looks[-1].loss is None
    assert looks[-1].drift is not None


class Stop(Callback):
    def on_step(self, state):
        if state.step == 10:
            raise ValueError("no more\nof it")


def test_the_file_says_how_it_ended(tmp_path):
    stream, file = make_stream("seq-blobs"), tmp_path / "new" / "looks.jsonl"

    def train_and_close(callbacks=()):
        with Monitor(every=4, file=file) as monitor:
            train(ER(MLP((2,), 6)), stream, batch=50, callbacks=[monitor, *callbacks])

    with pytest.raises(ValueError, match="no more"):
        train_and_close([Stop()])
    tail = Tail(file)
    assert tail.poll()
    assert (tail.ended["how"], tail.ended["why"], tail.ended["step"]) == ("failed", "no more", 10)
    assert [look.step for look in tail.looks] == [4, 8]
    train_and_close()
    assert tail.poll()
    assert (tail.began["learner"], tail.began["stream"], tail.began["until"]) == ("er", "seq-blobs", 24)
    assert [look.step for look in tail.looks] == [4, 8, 12, 16, 20, 24]
    assert tail.ended["how"] == "finished"
    assert not tail.poll()
    assert not tail.written


def test_a_training_takes_over_from_a_loop_that_was_not_ended(tmp_path):
    learner, monitor = ER(MLP((2,), 6)), Monitor(file=tmp_path / "a")
    monitor(learner, learner.observe(*next(numbered_batches(1))))
    train(learner, make_stream("seq-blobs"), batch=50, callbacks=[monitor])
    lines = [json.loads(line) for line in (tmp_path / "a").read_text().splitlines()]
    assert [kind for line in lines for kind in line] == ["began", "ended", "began", "look", "ended"]
    assert [line["ended"]["how"] for line in lines if "ended" in line] == ["stopped", "finished"]


@pytest.mark.parametrize("exception", [KeyboardInterrupt, SystemExit])
def test_one_who_stops_it_has_not_failed(tmp_path, exception):
    def loop():
        with Monitor(file=tmp_path / "a") as monitor:
            monitor(ER(MLP((2,), 3)), 0.5)
            raise exception

    with pytest.raises(exception):
        loop()
    tail = Tail(tmp_path / "a")
    tail.poll()
    assert (tail.ended["how"], tail.ended["why"]) == ("stopped", "")


@pytest.mark.parametrize(("error", "how"), [(KeyboardInterrupt(), "stopped"), (ValueError("no room"), "failed")])
def test_a_last_look_that_is_interrupted_lets_go_of_the_file(tmp_path, error, how):
    def tell(look):
        raise error

    learner = ER(MLP((2,), 3), lr=1e-3)
    with pytest.raises(type(error)), Monitor(file=tmp_path / "a", tell=tell, bound=0) as monitor:
        monitor(learner, learner.observe(*next(numbered_batches(1))))
    tail = Tail(tmp_path / "a")
    assert tail.poll()
    assert (tail.ended["how"], tail.written) == (how, False)


def test_looks_at_a_journalled_stream_that_is_started_again_are_taken_back(tmp_path):
    """Killed after batch 17, it goes on from batch 10; looks at 12 and 16 are taken back until they come again."""
    file = tmp_path / "monitor.jsonl"

    def start():
        return Journal(tmp_path, ER(MLP((2,), 3), lr=1e-3), every=10), Monitor(every=4, file=file, bound=0)

    stream = list(numbered_batches(30))
    journal, monitor = start()
    for x, y in stream[:17]:
        monitor(journal.learner, journal.observe(x, y))
    journal.close()
    monitor._lines.close()  # as the operating system does
    with file.open("a") as torn:
        torn.write('{"look": {"step": 1')
    tail = Tail(file)
    tail.poll()
    assert ([look.step for look in tail.looks], tail.written) == ([4, 8, 12, 16], False)
    journal, monitor = start()
    monitor(journal.learner, journal.observe(*stream[10]))
    tail.poll()
    assert ([look.step for look in tail.looks], tail.written, tail.began["step"]) == ([4, 8], True, 10)
    with journal, monitor:
        for x, y in stream[11:]:
            monitor(journal.learner, journal.observe(x, y))
    tail.poll()
    assert [look.step for look in tail.looks] == [4, 8, 14, 18, 22, 26, 30]
    assert all(isinstance(look.loss, float) for look in tail.looks)


def test_a_tail_follows_a_file_that_is_replaced_and_ignores_foreign_lines(tmp_path):
    file = tmp_path / "a.jsonl"
    tail = Tail(file)
    assert not tail.poll()
    strange = ["[3]", '{"time": 1}', '{"step": 4, "time": "never"}', '{"step": Infinity, "time": 1}', "[" * 200_000,
               '{"step": 4, "time": 1, "kept": 3}', '{"step": 4, "time": 1, "tenths": [3]}']  # fmt: skip
    file.write_text('{"look": {"step": 3, "time": 1}}\n7\n' + "".join(f'{{"look": {look}}}\n' for look in strange))
    assert tail.poll()
    assert ([look.step for look in tail.looks], tail.strange) == ([3], False)
    (tmp_path / "b").write_text('{"look": {"step": 9, "time": 1}}\n' * 9)
    (tmp_path / "b").replace(file)
    assert tail.poll()
    assert [look.step for look in tail.looks] == [9]
    longer = "".join(f'{{"look": {{"step": {step}, "time": 1}}}}\n' for step in range(99))
    (tmp_path / "c").write_text(longer)
    (tmp_path / "c").replace(file)
    assert tail.poll()
    assert [look.step for look in tail.looks] == [*range(99)]
    for began_at, until in (('"never"', 9), (1, '"soon"')):
        with file.open("a") as end_of_file:
            end_of_file.write(f'{{"began": {{"step": 0, "time": {began_at}, "until": {until}}}}}\n')
        assert tail.poll()
        assert (tail.began, len(tail.looks)) == ({}, 99)
    file.write_text("a letter\n")
    assert tail.poll()
    assert (tail.looks, tail.strange) == ([], True)


def test_a_file_that_cannot_be_written_costs_the_file_and_not_the_stream(tmp_path):
    (tmp_path / "full").symlink_to("/dev/full")
    learner = ER(MLP((2,), 3), lr=1e-3)
    with pytest.warns(RuntimeWarning, match="until it can be written again .*No space") as caught:
        looks_at(learner, numbered_batches(10), every=2, file=tmp_path / "full")
    assert len(caught) == 1
    other_writer = Lines(tmp_path / "taken")
    with pytest.warns(RuntimeWarning, match="another monitor is writing to it"):
        looks_at(learner, numbered_batches(3), file=tmp_path / "taken")
    other_writer.close()
    assert (tmp_path / "taken").read_bytes() == b""


def test_its_file_stays_where_it_was_when_the_program_changes_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    learner, batches = ER(MLP((2,), 3), lr=1e-3), numbered_batches(4)
    with Monitor(every=2, file="monitor.jsonl", bound=0) as monitor:
        for x, y in batches:
            monitor(learner, learner.observe(x, y))
            monkeypatch.chdir(tmp_path / "elsewhere")
    assert steps_in(tmp_path / "monitor.jsonl") == ("er", [2, 4])
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_file_that_can_be_written_again_is_written_again(tmp_path):
    file, looks = tmp_path / "monitor.jsonl", []
    learner, batches, monitor = (
        ER(MLP((2,), 3), lr=1e-3),
        numbered_batches(12),
        Monitor(1, file=file, tell=looks.append),
    )

    def learn(count):
        for _ in range(count):
            monitor(learner, learner.observe(*next(batches)))

    file.symlink_to("/dev/full")
    with pytest.warns(RuntimeWarning, match="No space") as caught:
        learn(3)  # the disk is full
    assert len(caught) == 1
    file.unlink()
    file.write_text('{"look": {"st')  # as far as there was room
    learn(3)
    assert steps_in(file) == ("er", [4, 5, 6])
    file.rename(tmp_path / "monitor.jsonl.1")  # rotated
    learn(3)
    assert steps_in(file) == ("er", [7, 8, 9])
    file.unlink()
    file.symlink_to("/dev/full")
    with pytest.warns(RuntimeWarning, match="No space"):
        learn(1)
    file.unlink()
    learn(2)
    assert steps_in(file) == ("er", [11, 12])
    monitor.close()
    assert [look.step for look in looks] == [*range(1, 13)]


def steps_in(file):
    tail = Tail(file)
    assert tail.poll()
    return tail.began["learner"], [look.step for look in tail.looks]


def test_looks_are_passed_on_to_trackers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Tracker("tensorboard", tmp_path) as tracker:
        monitor = Monitor(every=8, tracker=tracker, share=1, bound=8)
        train(ER(MLP((2,), 6)), make_stream("seq-blobs"), batch=50, callbacks=[monitor, tracker])
    (folder,) = (tmp_path / "tensorboard").iterdir()
    events = EventAccumulator(str(folder)).Reload()
    assert [event.step for event in events.Scalars("monitor/loss")] == [8, 16, 24, 24]
    assert events.Scalars("monitor/bound")[-1].value == pytest.approx(monitor.last.bound)
    assert events.Scalars("memory_by_class/5")[-1].value == monitor.last.classes[5]


def test_a_training_that_fails_ends_the_file_and_lets_go_of_it(tmp_path):
    file = tmp_path / "looks.jsonl"
    for lr, how in ((1e30, "failed"), (0.05, "finished")):
        monitor = Monitor(every=5, file=file)
        learner = ER(MLP((2,), 6), lr=lr)
        with contextlib.suppress(Diverged), warnings.catch_warnings():
            warnings.simplefilter("error")
            train(learner, make_stream("seq-blobs"), batch=10, callbacks=[monitor])
        ended = json.loads(file.read_text().splitlines()[-1])["ended"]
        assert (ended["how"], "the loss became" in ended["why"]) == (how, how == "failed")
