"""The loop: the accuracy matrix, what watches it, and that a seed decides everything."""

import io
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

from parabolic import ER, MLP, SGD, Callback, InputError, Learner, RunSpec, Stream, make_stream, metrics, train
from parabolic.checks import short_of_memory
from parabolic.engine import BoundsMonitor, Diverged, Fleet, ProfileRecorder, ProgressBar, Tracker, train_fleet
from parabolic.engine.loop import LOOK
from parabolic.experiments import build, execute
from parabolic.learners import find_learner
from parabolic.states import same_state


def blobs(tasks=3, per_task=60, seed=0):
    """Classes that are blobs on a circle, two a task."""
    rng = np.random.default_rng(seed)
    y = np.arange(per_task * tasks) % (2 * tasks)
    angle = 2 * np.pi * y / (2 * tasks)
    x = np.stack([np.cos(angle), np.sin(angle)], 1) * 3 + rng.normal(size=(len(y), 2)) * 0.4
    return Stream.from_arrays(x.astype(np.float32), y, tasks=tasks)


class Meet(Callback):
    """Holds a run at its first task until others have come as far, and at its end until it is let go."""

    def __init__(self, others, go):
        self.others, self.go, self.threads_seen = others, go, []

    def on_task(self, state):
        if state.task == 0:
            self.others.wait(60)
        self.threads_seen.append(torch.get_num_threads())

    def on_end(self, state):
        assert self.go.wait(60)


def in_a_new_thread(function):
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


@pytest.mark.parametrize("first", [0, 1])
def test_two_that_train_at_once_leave_as_many_threads_as_there_were(first):
    """Whichever ends first: each computes in one thread meanwhile, and those that begin afterwards have all."""
    torch.set_num_threads(3)
    assert in_a_new_thread(torch.get_num_threads) == 3
    together, begun, after = threading.Barrier(2), threading.Event(), [None, None]
    runs = [Meet(together, threading.Event()) for _ in range(2)]

    class Begun(Callback):
        def on_start(self, state):
            begun.set()

    def train_run(number):
        train(SGD(MLP((2,), 6)), blobs(), callbacks=[Begun(), runs[number]])
        after[number] = torch.get_num_threads()

    threads = [threading.Thread(target=train_run, args=(number,)) for number in range(2)]
    threads[0].start()
    assert begun.wait(60)  # so that the second begins while the first has one thread
    threads[1].start()
    for number in (first, 1 - first):
        runs[number].go.set()
        threads[number].join()
    assert [run.threads_seen for run in runs] == [[1, 1, 1]] * 2
    assert after == [3, 3]
    assert in_a_new_thread(torch.get_num_threads) == torch.get_num_threads() == 3


class Watch(Callback):
    def __init__(self):
        self.events, self.matrices = [], []

    def on_start(self, state):
        self.events.append("start")

    def on_step(self, state):
        self.events.append("step")

    def on_task(self, state):
        self.events.append(f"task {state.task}")
        self.matrices.append(state.matrix.copy())

    def on_end(self, state):
        self.events.append("end")


def test_the_matrices_are_what_a_slow_look_after_each_task_says():
    stream, expected = blobs(), []

    def accuracy(learner, task, competing):
        right = 0
        for index in task.test_rows.tolist():
            scores = learner.scores(task.test.x[index][None])[0]
            best = max(competing, key=lambda label: float(scores[label]))
            right += best == int(task.test.y[index])
        return 100 * right / len(task.test_rows)

    class Look(Callback):
        def on_task(self, state):
            seen, tasks = stream.seen(state.task), stream.tasks[: state.task + 1]
            expected.append([
                [accuracy(state.learner, task, seen) for task in tasks],
                [accuracy(state.learner, task, task.classes) for task in tasks],
            ])  # fmt: skip

    torch.manual_seed(0)
    state = train(SGD(MLP((2,), 6)), stream, batch=7, callbacks=[Look()])
    for task_number, rows in enumerate(expected):
        for matrix, row in zip((state.matrix, state.task_matrix), rows, strict=True):
            assert matrix[task_number, : task_number + 1].tolist() == row
            assert np.isnan(matrix[task_number, task_number + 1 :]).all()
    assert metrics.acc(state.task_matrix) > metrics.acc(state.matrix) + 20  # what was forgotten is mostly which task


def test_where_all_tasks_have_the_same_classes_it_makes_no_difference_to_be_told_the_task():
    x, y = torch.randn(120, 2), torch.arange(120) % 3
    stream = Stream.from_arrays(x, y, domains=torch.arange(120) // 40)
    state = train(ER(MLP((2,), 3), memory=50), stream, batch=10)
    np.testing.assert_array_equal(state.matrix, state.task_matrix)


def test_to_be_told_the_task_never_harms_though_it_is_tested_on_more_classes_than_it_has_to_learn():
    torch.manual_seed(0)
    y = torch.arange(120) % 4
    x = 10 * torch.eye(4)[y] + torch.randn(120, 4)
    tested = (x, y)
    stream = Stream.from_tasks([((x[y < 2], y[y < 2]), tested), ((x[y >= 2], y[y >= 2]), tested)])
    state = train(ER(MLP((4,), 4), memory=50), stream, batch=10, epochs=5)
    np.testing.assert_array_equal(state.matrix, state.task_matrix)  # all that was seen competes in both
    assert state.matrix[1].min() > 95
    assert state.matrix[0, 0] == 50  # what has not come yet does not compete, and cannot be told


def test_callbacks_are_told_in_order_and_short_batches_are_trained_on():
    watch, stream = Watch(), blobs(tasks=2)
    learner = SGD(MLP((2,), 4))
    sizes = []
    step = learner.step
    learner.step = lambda x, y, task=None: (sizes.append(len(x)), step(x, y, task))[1]
    state = train(learner, stream, batch=10, callbacks=[watch])
    train_sizes = [len(task.train_rows) for task in stream]
    assert sum(sizes) == sum(train_sizes)
    assert train_sizes[0] % 10
    assert sizes[-1] == train_sizes[1] % 10
    steps = [-(-size // 10) for size in train_sizes]
    assert watch.events == ["start", *["step"] * steps[0], "task 0", *["step"] * steps[1], "task 1", "end"]
    assert state.step == state.total_steps == sum(steps)
    assert len(state.train_seconds) == len(state.test_seconds) == 2


def test_two_runs_with_one_seed_are_the_same_to_the_bit():
    outcomes = []
    for seed in (3, 3, 4):
        learner, stream = build(RunSpec("pcl", seed=seed, scenario={"class_sizes": [30] * 10}), "cpu")
        state = train(learner, stream, batch=10)
        outcomes.append((learner.model.state_dict(), state.matrix))
    assert all(torch.equal(outcomes[0][0][key], outcomes[1][0][key]) for key in outcomes[0][0])
    assert np.array_equal(outcomes[0][1], outcomes[1][1], equal_nan=True)
    assert not all(torch.equal(outcomes[0][0][key], outcomes[2][0][key]) for key in outcomes[0][0])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_it_learns_the_same_where_gradients_are_switched_off(mode):
    learner, other = (ER(MLP((2,), 6)) for _ in range(2))
    other.model.load_state_dict(learner.model.state_dict())
    train(learner, blobs())
    with mode():
        train(other, blobs())
    assert same_state(learner.state_dict(), other.state_dict())


def test_a_state_is_shown_in_a_line():
    shown = []

    class Show(Callback):
        def on_start(self, state):
            shown.append(repr(state))

    stream = make_stream("seq-blobs")
    state = train(SGD(MLP(stream.shape, stream.classes), seed=4), stream, callbacks=[Show()])
    run, steps = "State(sgd on seq-blobs, seed 4: task", state.total_steps
    assert [*shown, repr(state)] == [
        f"{run} 1 of 3, step 0 of {steps})",
        f"{run} 3 of 3, step {steps} of {steps}, accuracy {metrics.acc(state.matrix):.1f} %)",
    ]


def test_replay_keeps_what_sgd_forgets():
    acc = {name: execute(RunSpec(learner=name), device="cpu").metrics["acc"] for name in ("pcl", "er", "sgd")}
    assert acc["pcl"] > acc["sgd"] + 40
    assert acc["er"] > acc["sgd"] + 40


def test_learners_are_told_where_tasks_start_and_end():
    events = []

    class Nosy(Learner):
        def loss(self, batch, recalled):
            events.append(batch["task"].unique().tolist())
            return self.model(batch["x"]).square().mean()

        def start_task(self, batches):
            events.append(("start", sum(len(x) for x, _ in batches)))

        def end_task(self, batches):
            events.append(("end", sum(len(x) for x, _ in batches)))

    Nosy.needs_tasks = True
    stream = blobs(tasks=2, per_task=20)
    train(Nosy(MLP((2,), 4)), stream, batch=100)
    sizes = [len(task.train_rows) for task in stream]
    assert events == [("start", sizes[0]), [0], ("end", sizes[0]), ("start", sizes[1]), [1], ("end", sizes[1])]


def test_joint_sees_all_tasks_at_once_and_each_example_once():
    stream, labels = blobs(), []
    torch.manual_seed(0)
    learner = find_learner("joint")(MLP((2,), 6))
    step = learner.step
    learner.step = lambda x, y, task=None: (labels.append(y), step(x, y, task))[1]
    watch = Watch()
    state = train(learner, stream, batch=7, callbacks=[watch])
    assert len(torch.cat(labels)) == sum(len(task.train_rows) for task in stream)
    assert len(labels[0].unique()) > 2  # not the two classes of a task
    assert np.isfinite(state.matrix[np.tril_indices(3)]).all()
    assert watch.events == ["start", *["step"] * state.total_steps, "task 2", "end"]


def test_a_loss_that_explodes_is_an_error_that_says_where():
    with pytest.raises(Diverged, match=r"sgd on arrays, seed 0.*task 1, by step \d+: lower lr \(now 1e\+30\)"):
        train(SGD(MLP((2,), 6), lr=1e30), blobs(), batch=5)


def test_a_long_task_is_not_learned_to_its_end_once_its_loss_is_no_number():
    stream = blobs(per_task=400)
    learner = SGD(MLP((2,), 6), lr=1e30)
    with pytest.raises(Diverged, match=f"by step {LOOK}:"):
        train(learner, stream, batch=1)
    assert learner.steps == LOOK < len(stream[0].train_rows)


def test_scores_that_are_no_numbers_end_that_run_alone():
    class Spoil(Callback):
        """The last step of the first task, whose loss was still a number."""

        def on_step(self, state):
            if (state.learner.seed, state.step) == (1, state.total_steps // 3):
                for weight in state.learner.model.parameters():
                    weight.data.fill_(torch.nan)

    learners = [SGD(MLP((2,), 6), seed=seed) for seed in (0, 1)]
    sound, spoiled = train_fleet(Fleet(learners), [blobs(), blobs()], batch=6, callbacks=[Spoil()])
    assert sound.error is None
    assert np.isfinite(sound.matrix[np.tril_indices(3)]).all()
    assert isinstance(spoiled.error, Diverged)
    assert "seed 1: the scores became NaN in task 1, by step" in str(spoiled.error)
    assert np.isnan(spoiled.matrix).all()


def test_an_error_that_is_not_of_the_device_is_raised_as_it_is():
    class Fails(Callback):
        error = RuntimeError("one of the user's own")

        def on_step(self, state):
            raise self.error

    with pytest.raises(RuntimeError) as error:
        train(SGD(MLP((2,), 6)), blobs(), callbacks=[Fails()])
    assert error.value is Fails.error


def test_a_model_that_does_not_fit_is_refused_before_the_first_step():
    with pytest.raises(InputError, match="expected examples that the model accepts"):
        train(SGD(MLP((5,), 6)), blobs())
    with pytest.raises(InputError, match="6 classes"):
        train(SGD(MLP((2,), 4)), blobs())
    with pytest.raises(InputError, match="^classes: got 4, expected at least 6, as .* has; leave it out"):
        train(SGD(MLP((2,), 6), classes=4), blobs())  # it would be trained, and never predict the last two


@pytest.mark.parametrize("callbacks", [Watch(), [Watch], [print], None])
def test_what_is_no_callback_is_refused(callbacks):
    with pytest.raises(InputError, match="^callbacks: got .*, expected a list of Callbacks"):
        train(SGD(MLP((2,), 6)), blobs(), callbacks=callbacks)


def test_learner_and_stream_are_not_mixed_up():
    with pytest.raises(InputError, match="^learner: got .*Stream'>, expected a Learner; as in train"):
        train(blobs(), SGD(MLP((2,), 6)))
    with pytest.raises(InputError, match="^stream: got .*list'>, expected a Stream.*call learner.observe"):
        train(SGD(MLP((2,), 6)), [])


def bar_output(terminal, title=""):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120)
    with ProgressBar(console, every=1) as bar:
        bar.title = title
        train(SGD(nn.Sequential(nn.Flatten(), nn.Linear(64, 10))), make_stream("seq-digits"), callbacks=[bar])
    return out.getvalue()


def test_the_bar_shows_tasks_steps_loss_accuracy_and_time_on_a_terminal_alone():
    output = bar_output(terminal=True)
    assert "task 5/5" in output
    assert "loss" in output
    assert "accuracy" in output
    assert bar_output(terminal=False) == ""


@pytest.mark.parametrize("terminal", [True, False])
def test_the_bar_says_that_a_run_is_trained_while_others_look_at_it(terminal):
    class LastLook(Callback):
        def on_end(self, state):
            (task,) = bar.progress.tasks
            notes.append(task.fields["note"])

    notes = []
    with ProgressBar(Console(file=io.StringIO(), force_terminal=terminal)) as bar:
        train(SGD(MLP((2,), 6)), make_stream("seq-blobs"), callbacks=[bar, LastLook()])
    assert [note.endswith("finishing") for note in notes] == [True]


def test_the_title_of_the_bar_is_shown_as_it_is():
    assert "in [/x] and [bold]" in bar_output(terminal=True, title="in [/x] and [bold]")


@pytest.mark.parametrize(
    ("make_watcher", "message"),
    [
        (lambda: ProgressBar(every=0), "every: got 0"),
        (lambda: Tracker("tensorboard", every=0), "every: got 0"),
        (lambda: Tracker(None), "kinds: got None, expected names of trackers: .*; as in Tracker"),
        (lambda: BoundsMonitor(eps=-1), "eps: got -1"),
        (lambda: BoundsMonitor(samples=0), "samples: got 0"),
        (lambda: BoundsMonitor(seed="a"), "seed: got 'a'"),
        (lambda: ProfileRecorder(seed=0.5), "seed: got 0.5"),
        (lambda: ProfileRecorder(grid=0), "grid: got 0"),
        (lambda: ProfileRecorder(sigma=0), "sigma: got 0"),
    ],
)
def test_a_watcher_that_could_not_watch_is_refused_before_the_first_step(make_watcher, message):
    with pytest.raises(InputError, match=message):
        make_watcher()


def left_with_one(size):
    """Two tasks of nine images, which batches of four leave with one."""
    x, y = torch.rand(18, 1, size, size), torch.tensor([0, 1, 0, 1, 0, 1, 0, 1, 0, 2, 3, 2, 3, 2, 3, 2, 3, 2])
    return Stream.from_arrays(x, y, test=(x, y), tasks=2)


@pytest.mark.parametrize(("size", "sizes"), [(4, [4, 5, 4, 5]), (8, [4, 4, 1, 4, 4, 1])])
def test_an_example_that_batch_norm_cannot_learn_alone_goes_with_the_batch_before(size, sizes):
    """Where images have become single points; where they have not, an example is a batch as any other."""
    batch_sizes, points = [], (size - 3) ** 2

    class Counts(SGD):
        def step(self, x, y, task=None):
            batch_sizes.append(len(y))
            return super().step(x, y, task)

    model = nn.Sequential(nn.Conv2d(1, 4, 4), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * points, 4))
    learner = Counts(model, classes=4)
    train(learner, left_with_one(size), batch=4)
    assert batch_sizes == sizes


@pytest.mark.parametrize("epochs", [1, 3])
def test_at_a_task_s_end_each_of_its_examples_is_offered_once(epochs):
    learner = find_learner("agem")(MLP((1, 4, 4), 4), memory=50, classes=4)
    train(learner, left_with_one(4), batch=4, epochs=epochs)
    assert learner.past.offered == 18
    assert learner.past["x"].flatten(1).unique(dim=0).shape == (18, 16)


# -- what a stream brings ------------------------------------------------------------------------------------


def halve(x):
    return x / 2


def shift(x, generator):
    return x + torch.rand((), generator=generator)


def prepared_blobs(**changes):
    return replace(blobs(), **{"prepare": halve, "augment": shift, **changes})


def test_a_learner_takes_over_what_it_lacks_of_a_stream(tmp_path):
    torch.manual_seed(0)
    explicit = ER(MLP((2,), 6), memory=50, prepare=halve, augment=shift)
    torch.manual_seed(0)
    implicit = ER(MLP((2,), 6), memory=50)
    stream = prepared_blobs()
    theirs, ours = train(explicit, stream, batch=7), train(implicit, stream, batch=7)
    assert (implicit.prepare, implicit.augment) == (halve, shift)
    np.testing.assert_array_equal(theirs.matrix, ours.matrix)
    x = torch.randn(5, 2)
    assert explicit.scores(x).equal(implicit.scores(x))
    # And for good: a second stream is learned as the first was, and a file asks for them.
    train(implicit, replace(stream, prepare=None, augment=None), batch=7)
    assert (implicit.prepare, implicit.augment) == (halve, shift)
    with pytest.raises(InputError, match=r"^load: got no augment, prepare"):
        Learner.load(implicit.save(tmp_path / "er"))
    assert Learner.load(tmp_path / "er", prepare=halve, augment=shift).scores(x).equal(implicit.scores(x))


def test_what_is_taken_over_of_ours_is_saved_and_resumed(tmp_path):
    stream = make_stream("seq-digits")
    learner = ER(MLP(stream.shape, stream.classes), memory=50)
    assert train(learner, stream, batch=10).accuracy > 50  # at chance, were the bytes taken for those of a photograph
    loaded = Learner.load(learner.save(tmp_path / "er"))
    assert (loaded.prepare, loaded.augment) == (stream.prepare, stream.augment)
    x, y = next(iter(stream[0].batches(10)))
    assert loaded.observe(x, y) == learner.observe(x, y)


def test_a_learner_s_own_comes_first():
    def own_prepare(x):
        return x * 3

    learner = SGD(MLP((2,), 6), prepare=own_prepare)
    train(learner, prepared_blobs())
    assert (learner.prepare, learner.augment) == (own_prepare, shift)


@pytest.mark.parametrize("name", ["prepare", "augment"])
def test_a_learner_that_has_learned_without_is_not_given_another_meaning(name):
    learner, neither = SGD(MLP((2,), 6)), {"prepare": None, "augment": None}
    train(learner, prepared_blobs(**neither))
    stream = prepared_blobs(**{**neither, name: halve if name == "prepare" else shift})
    before = learner.steps
    expected = f"^{name}: got none, in a learner that has made {before} steps without it, expected that of arrays.*"
    ways = rf"create the learner with {name}=stream.{name}; or, .*dataclasses.replace\(stream, {name}=None\)"
    with pytest.raises(InputError, match=expected + ways):
        train(learner, stream)
    assert (getattr(learner, name), learner.steps) == (None, before)
    train(learner, replace(stream, **neither))
    assert learner.steps == 2 * before


def test_a_learner_that_is_refused_is_left_as_it_was():
    learner = SGD(MLP((2,), 4))
    with pytest.raises(InputError, match="a score for each of the 6 classes"):
        train(learner, prepared_blobs())
    assert (learner.prepare, learner.augment) == (None, None)
    with pytest.raises(InputError, match=r"^augment: got .*called as augment\(x, generator\)"):
        train(SGD(MLP((2,), 6)), prepared_blobs(augment=halve))


# -- who is meant --------------------------------------------------------------------------------------------


def test_an_error_names_the_class_where_the_name_is_another_s():
    class Vector(ER):
        def loss(self, batch, recalled):
            return self.model(batch["x"]).sum(1)

    class Called(Vector):
        name = "called"

    for learner_class, name in ((Vector, "Vector"), (Called, "called")):
        with pytest.raises(InputError, match=f"^loss of {name}: "):
            learner_class(MLP((2,), 6), memory=50).observe(torch.randn(4, 2), [0, 1, 2, 3])


def test_a_stream_without_boundaries_names_what_makes_it_one():
    ewc = find_learner("ewc")(MLP((2,), 6))
    with pytest.raises(InputError, match=r"^learner: got 'ewc'.* `blur` .one of your own: with boundaries=True"):
        train(ewc, replace(blobs(), boundaries=False))


def test_too_little_memory_is_found_out_behind_another_error():
    def error_behind(last, first):
        try:
            try:
                raise first
            except type(first):
                raise last  # noqa: B904
        except type(last) as error:
            return error

    assert short_of_memory(error_behind(UserWarning("the graph is empty"), torch.OutOfMemoryError("no room")))
    assert short_of_memory(error_behind(KeyError(3), RuntimeError("CUDA error: out of memory")))
    assert not short_of_memory(error_behind(KeyError(3), RuntimeError("CUDA error: an illegal memory access")))
