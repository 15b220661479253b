"""Threads that predict while another learns see the model before or after a step, never in between."""

import copy
import os
import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from grids import until
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from parabolic import ER, PCL, Journal, ParabolicClassifier, ParabolicRegressor
from parabolic.learners import find_learner, known_learners
from parabolic.learners.saving import describe
from parabolic.profile import LearnerLoss
from parabolic.states import pack_state

STEPS, READERS = 150, 3


def net():
    """One that answers differently in its training mode, and takes long enough to be caught in the middle."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 64), nn.ReLU(),
                         nn.Linear(64, 4)).double()  # fmt: skip


def batches():
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 8, generator=generator, dtype=torch.float64), torch.randint(4, (8,), generator=generator))
        for _ in range(STEPS)
    ]


def read_while_learning(learn, read):
    """What several threads read while one learns; an error in any of them is raised here."""
    results, errors, done = [], [], threading.Event()

    def reader():
        try:
            while not done.is_set():
                results.append(read())
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=reader) for _ in range(READERS)]
    for thread in threads:
        thread.start()
    try:
        learn()
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert not errors, errors
    return results


def largest_distance(results, expected):
    """How far what was found is, at most, from what there was at some moment."""
    expected = torch.stack(expected)
    return max((expected - result).abs().amax((1, 2)).min().item() for result in results)


@pytest.mark.parametrize("average", [None, 0.9])
@pytest.mark.parametrize("learner_class", [ER, PCL])
def test_scores_are_those_before_or_after_a_step(learner_class, average):
    torch.manual_seed(0)
    probe, data = torch.randn(16, 8, dtype=torch.float64), batches()
    learner = learner_class(net(), memory=40, average=average)

    torch.manual_seed(5)  # dropout draws from torch's own generator
    expected, undisturbed = [], copy.deepcopy(learner)
    expected.append(undisturbed.scores(probe))
    for x, y in data:
        undisturbed.observe(x, y)
        expected.append(undisturbed.scores(probe))
    torch.manual_seed(5)
    results = read_while_learning(lambda: [learner.observe(x, y) for x, y in data], lambda: learner.scores(probe))

    assert torch.allclose(learner.scores(probe), expected[-1])  # nor did reading disturb the learning
    assert len(results) > READERS
    assert largest_distance(results, expected) < 1e-9


def through_pickle(learner):
    with learner.lock:
        return pickle.loads(pickle.dumps(learner))


def through_estimator(learner):
    estimator = ParabolicClassifier("er")
    estimator.learner_ = learner
    return pickle.loads(pickle.dumps(estimator)).learner_


@pytest.mark.parametrize("make_copy", [copy.deepcopy, through_pickle, through_estimator])
def test_copies_made_while_others_predict_are_whole(make_copy):
    """A prediction puts averaged weights in place of the model's own, in its evaluation mode, for a moment."""
    torch.manual_seed(0)
    learner, data, probe = ER(net(), memory=40, average=0.9), batches(), torch.randn(64, 8, dtype=torch.float64)
    for x, y in data[:20]:
        learner.observe(x, y)
    weights = {name: weight.clone() for name, weight in learner.model.named_parameters()}
    copies = []
    read_while_learning(lambda: copies.extend(make_copy(learner) for _ in range(60)), lambda: learner.scores(probe))
    for copied_learner in copies:
        parameters = dict(copied_learner.model.named_parameters())
        assert parameters.keys() == weights.keys()
        assert all(
            torch.equal(parameters[name], weight) and parameters[name].requires_grad for name, weight in weights.items()
        )
        assert all(module.training for module in copied_learner.model.modules())
        copied_learner.observe(*data[20])


@pytest.mark.parametrize("call", ["predict", "predictor", "save", "copy", "write"])
def test_a_thread_that_learns_gives_way_to_whoever_asks(call, tmp_path):
    """Otherwise a lock goes to the first to ask, which is the next batch, and a copy may wait for hundreds of them."""
    learner = ER(net(), memory=40)
    learner.observe(*batches()[0])
    journal = Journal(tmp_path / "journal", copy.deepcopy(learner))
    learner = journal.learner if call == "write" else learner
    calls = {
        "predict": lambda: learner.predict(torch.ones(1, 8, dtype=torch.float64)),
        "predictor": learner.predictor,
        "save": lambda: learner.save(tmp_path / "saved.safetensors"),
        "copy": lambda: copy.deepcopy(learner),
        "write": journal.write,
    }
    asking = threading.Thread(target=calls[call])
    with learner.lock:  # as in the middle of a step
        asking.start()
        assert until(lambda: learner._waiting)  # for which `observe` waits a moment before the next batch
    asking.join()
    assert not learner._waiting
    journal.close()


@pytest.mark.parametrize("name", ["ewc", "lwf"])
def test_work_between_tasks_is_not_seen_half_done(name):
    """These leave the training mode, or change weights, when a task starts or ends."""
    torch.manual_seed(0)
    probe = torch.randn(16, 8, dtype=torch.float64)
    data = [(x, y % 2 + 2 * (number % 2)) for number, (x, y) in enumerate(batches())]
    tasks = [data[number : number + 4 : 2] for start in range(0, 120, 4) for number in (start, start + 1)]

    def go_through(learner, look=lambda: None):
        torch.manual_seed(5)
        for number, task in enumerate(tasks):
            learner.start_task(task * 10)
            look()
            for x, y in task:
                learner.observe(x, y, number)
                look()
            learner.end_task(task * 10)

    undisturbed, learner = (find_learner(name)(net()) for _ in range(2))
    expected = [undisturbed.scores(probe)]
    go_through(undisturbed, lambda: expected.append(undisturbed.scores(probe)))
    results = read_while_learning(lambda: go_through(learner), lambda: learner.scores(probe))
    assert largest_distance(results, expected) < 1e-9


class Onlooker(TorchDispatchMode):
    """Before each operation on tensors another thread comes and, if it gets the lock, writes the learner down."""

    def __init__(self, learner):
        super().__init__()
        self.learner, self.states, self.looks = learner, set(), 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        thread = threading.Thread(target=self.look)
        thread.start()
        thread.join()
        self.looks += 1
        return operation(*args, **kwargs or {})

    def look(self):
        if self.learner.lock.acquire(blocking=False):
            try:
                self.states.add(packed_state(self.learner))
            finally:
                self.learner.lock.release()


def packed_state(learner):
    return bytes(pack_state(describe(learner)))  # what `save` writes


@pytest.mark.parametrize("name", [name for name, cls in known_learners().items() if cls.needs_tasks])
def test_work_between_tasks_is_not_written_down_half_done(name):
    torch.manual_seed(0)
    data = [(x, y % 2 + 2 * (number // 3)) for number, (x, y) in enumerate(batches()[:6])]
    learner_class = find_learner(name)
    learner, other_learner = (
        learner_class(net(), **({"memory": 40} if hasattr(learner_class, "memory") else {})) for _ in range(2)
    )
    other_learner.start_task(data)
    for number, task in enumerate((data[:3], data[3:])):
        calls = [lambda task=task: learner.start_task(task)]
        calls += [lambda x=x, y=y, number=number: learner.step(x, y, number) for x, y in task]
        calls += [lambda task=task: learner.end_task(task)]
        if number == 1:
            calls += [lambda: learner.grow(6), lambda: learner.load_state_dict(other_learner.state_dict())]
            other_learner.grow(6)
        for call in calls:
            before = packed_state(learner)
            with Onlooker(learner) as onlooker:
                call()
            assert onlooker.states <= {before, packed_state(learner)}
    assert onlooker.looks > 10


def test_predictions_are_whole_while_an_estimator_gets_new_classes():
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(6, 4)) * 4
    model = ParabolicClassifier("er", random_state=0).partial_fit(centres[:1], ["class 0"])
    probe = rng.normal(size=(5, 4))

    def learn():
        for label in range(1, 6):
            for _ in range(10):
                model.partial_fit(centres[[label]] + rng.normal(size=(32, 4)), [f"class {label}"] * 32)

    results = read_while_learning(learn, lambda: (model.predict(probe), model.predict_proba(probe)))
    widths = [chances.shape[1] for _, chances in results]
    assert all(np.isfinite(chances).all() and np.allclose(chances.sum(1), 1) for _, chances in results)
    assert set(widths) > {min(widths)}  # they were caught at it
    assert {label for labels, _ in results for label in labels} <= {f"class {number}" for number in range(6)}


def test_predictions_are_of_one_fit_while_an_estimator_is_fitted_anew():
    """With more classes or fewer: what is told is of the one fit or the other."""
    rng = np.random.default_rng(0)
    x, probe, labels = rng.normal(size=(90, 4)), rng.normal(size=(2000, 4)), [np.arange(90) % 2, 5 + np.arange(90) % 9]
    model = ParabolicClassifier("er", epochs=1, random_state=0).fit(x, labels[0])

    def learn():
        for number in range(40):
            model.fit(x, labels[number % 2])

    results = read_while_learning(learn, lambda: (model.predict(probe), model.predict_proba(probe)))
    assert {chances.shape[1] for _, chances in results} == {2, 9}
    assert all(set(predictions) <= {0, 1} or set(predictions) <= set(range(5, 14)) for predictions, _ in results)


def test_predictions_are_in_the_units_of_their_moment():
    """Targets come in sizes of all kinds, so that the units change with each of the first calls."""
    rng = np.random.default_rng(0)
    data = [(rng.normal(size=(8, 4)), 10.0 ** (number % 7) * rng.normal(size=8)) for number in range(100)]
    model, probe = ParabolicRegressor("er", random_state=0).partial_fit(*data[0]), rng.normal(size=(5, 4))
    undisturbed = copy.deepcopy(model)
    expected, learn = [undisturbed.predict(probe)], undisturbed._learn

    def predict_and_learn(*arguments):  # after the units have changed, and after the step
        expected.append(undisturbed.predict(probe))
        learn(*arguments)
        expected.append(undisturbed.predict(probe))

    undisturbed._learn = predict_and_learn
    for batch in data[1:]:
        undisturbed.partial_fit(*batch)
    predictions = read_while_learning(
        lambda: [model.partial_fit(*batch) for batch in data[1:]], lambda: model.predict(probe)
    )
    assert len({prediction.tobytes() for prediction in predictions}) > READERS  # they were caught at it
    assert all(
        any(np.allclose(prediction, expected_one, rtol=1e-9, atol=0) for expected_one in expected)
        for prediction in predictions
    )


def results_after_waiting(lock, functions, act):
    """What others find who ask while the lock is held, and then wait until this one has done something."""
    results = {}
    threads = [
        threading.Thread(target=lambda index=index: results.update({index: functions[index]()}))
        for index in range(len(functions))
    ]
    with lock:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(0.3)
            assert thread.is_alive()
        act()
    for thread in threads:
        thread.join()
    return [results[index] for index in range(len(functions))]


def blob(label, count=200):
    return np.random.default_rng(0).normal(10 * label, 1, size=(count, 2)), [label] * count


def two_class_estimator():
    return ParabolicClassifier("er", random_state=0).partial_fit(*blob(0)).partial_fit(*blob(1))


def test_a_copy_and_an_answer_of_an_estimator_are_of_one_moment():
    """Classes and network too: those who waited while a class came know of it."""
    model, (x, y) = two_class_estimator(), blob(2)
    functions = [
        lambda: copy.deepcopy(model),
        lambda: pickle.loads(pickle.dumps(model)),
        lambda: model.predict_proba(x),
        lambda: model.predict(x),
    ]
    *copies, chances, predictions = results_after_waiting(
        model.learner_.lock, functions, lambda: model.partial_fit(x, y)
    )
    for copied in copies:
        assert copied.classes_.tolist() == [0, 1, 2]
        np.testing.assert_array_equal(copied.predict_proba(x), chances)
    assert (predictions == 2).mean() > 0.9


def test_no_thread_that_learns_loses_the_classes_of_another():
    model = two_class_estimator()
    learning = [lambda label=label: model.partial_fit(*blob(label)) for label in (2, 3)]
    results_after_waiting(model.learner_.lock, learning, lambda: model.partial_fit(*blob(4)))
    assert model.classes_.tolist() == [0, 1, 2, 3, 4]
    assert sorted(model._outputs) == [0, 1, 2, 3, 4]
    assert (model.learner_.classes, model.learner_.prepare.count) == (5, 1000)


class Meeting(ER):
    """One whose first step waits until another's is made, too."""

    place = threading.Barrier(2)

    def loss(self, batch, recalled):
        if self.steps == 0:
            self.place.wait(60)
        return super().loss(batch, recalled)


@pytest.mark.parametrize("estimator_class", [ParabolicClassifier, ParabolicRegressor])
def test_of_two_first_calls_neither_is_lost(estimator_class):
    model = estimator_class(Meeting, batch_size=200, random_state=0)
    threads = [threading.Thread(target=model.partial_fit, args=blob(label)) for label in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (model.learner_.steps, model.learner_.prepare.count, len(model.learner_.past)) == (2, 400, 200)
    assert set(model.learner_.past["y"].flatten().tolist()) == {0, 1}
    if estimator_class is ParabolicClassifier:
        assert model.classes_.tolist() == [0, 1]


def test_a_network_is_that_of_its_seed_whatever_another_thread_makes():
    """Another one comes, if it can, when half of the network is made; torch's own generator is left as it was."""
    x, y = np.random.default_rng(0).normal(size=(40, 2)), np.arange(40) % 2
    reached, done = threading.Event(), threading.Event()

    def slow_network(shape, outputs):
        reached.set()
        done.wait(60)
        return nn.Linear(*shape, outputs)

    def fit_and_predict(wait):
        def network(shape, outputs):
            first_layer = nn.Linear(*shape, 8)
            wait()
            return nn.Sequential(first_layer, nn.ReLU(), nn.Linear(8, outputs))

        torch.manual_seed(7)
        return ParabolicClassifier("er", model=network, epochs=1, random_state=0).fit(x, y).predict_proba(x)

    other_estimator = ParabolicClassifier("er", model=slow_network, epochs=1, random_state=1)
    thread = threading.Thread(target=other_estimator.fit, args=(x, y))
    expected, drawn = fit_and_predict(lambda: None), torch.rand(1)
    np.testing.assert_array_equal(fit_and_predict(lambda: (thread.start(), reached.wait(0.3))), expected)
    done.set()
    thread.join()
    assert torch.equal(torch.rand(1), drawn)


def test_a_copy_and_a_pickle_have_a_lock_of_their_own():
    learner = ER(net(), memory=40)
    for copied in (copy.deepcopy(learner), pickle.loads(pickle.dumps(learner))):
        assert copied.lock is not learner.lock
        with learner.lock:
            thread = threading.Thread(target=copied.predict, args=(torch.zeros(2, 8, dtype=torch.float64),))
            thread.start()
            thread.join(60)
            assert not thread.is_alive()


def test_points_and_labels_of_a_bound_are_those_of_one_moment():
    """While the points are read, another thread fills the memory with another class, if it can."""
    learner = ER(nn.Linear(1, 3), memory=4, replay=1, lr=1e-9)
    learner.observe(torch.zeros(4, 1), torch.zeros(4, dtype=torch.long))
    thread = threading.Thread(target=learner.step, args=(torch.ones(4000, 1), torch.ones(4000, dtype=torch.long)))

    def prepare(x):
        x = x.clone()
        if thread.ident is None:
            thread.start()
            thread.join(0.5)
        return x

    learner.prepare = prepare
    loss = LearnerLoss(learner)
    thread.join()
    assert learner.past["y"].tolist() == [1] * 4
    assert loss.points.flatten().tolist() == loss.labels.tolist()


def test_scores_are_of_one_moment_with_what_prepares_the_examples():
    """While the examples are prepared, another thread learns, if it can."""
    asking = threading.Event()

    def prepare(x):
        if asking.is_set() and thread.ident is None:
            thread.start()
            thread.join(0.3)
        return x

    learner, x = ER(nn.Linear(2, 2), memory=8, replay=2, lr=1.0, prepare=prepare), torch.randn(4, 2)
    thread = threading.Thread(target=learner.observe, args=(x, torch.arange(4) % 2))
    before = learner.scores(x)
    asking.set()
    assert torch.equal(learner.scores(x), before)
    thread.join()
    assert not torch.equal(learner.scores(x), before)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a system that forks")
def test_a_process_that_is_forked_under_the_lock_answers_while_another_thread_learns():
    code = """if True:
        import multiprocessing, threading, warnings
        import torch
        from parabolic import ER
        warnings.simplefilter("ignore")  # of Python 3.12 and later, about forks of processes with threads
        torch.set_num_threads(1)
        learner, x, y = ER(torch.nn.Linear(4, 3)), torch.randn(64, 4), torch.arange(64) % 3
        learner.observe(x, y)
        done, fork = threading.Event(), multiprocessing.get_context("fork")

        def learn():
            while not done.is_set():
                learner.observe(x, y)

        def answer(found):
            found.send(learner.predict(x).shape[0])

        thread = threading.Thread(target=learn)
        thread.start()
        try:
            for _ in range(5):
                ours, theirs = fork.Pipe()
                process = fork.Process(target=answer, args=(theirs,), daemon=True)
                with learner.lock:
                    process.start()
                assert ours.poll(60) and ours.recv() == 64
                process.join()
        finally:
            done.set()
            thread.join()
    """
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
