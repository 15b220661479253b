"""Specs and the store: one spec, one folder, written whole or not at all."""

import dataclasses
import errno
import gc
import json
import os
import re
import shlex
import sys
import threading
import traceback
import weakref
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import parabolic
from parabolic import Callback, InputError, RunSpec, Store, run
from parabolic.backbones import make_backbone
from parabolic.engine import DeviceFailed, Diverged
from parabolic.experiments import Record, execute, execute_fleet
from parabolic.experiments.execution import Yard, environment, find_device, reason_of
from parabolic.experiments.resume import Keeping
from parabolic.experiments.work import Job, work
from parabolic.learners import ER

SPEC = RunSpec(learner="sgd", options={"lr": 0.05})


class Threads(Callback):
    """Notes how many compute at the end of a task."""

    def on_task(self, state):
        self.number = torch.get_num_threads()


@pytest.mark.parametrize("before", [1, 2, 3])
@pytest.mark.parametrize(("backbone", "small"), [("mlp", True), ("test_experiments:wide", False)])
def test_a_record_has_the_number_of_threads_that_trained(before, backbone, small):
    torch.set_num_threads(before)
    counter = Threads()
    record = execute(
        dataclasses.replace(SPEC, stream="seq-blobs", backbone=backbone), device="cpu", callbacks=[counter]
    )
    assert record.environment["threads"] == counter.number == (1 if small else before)
    assert torch.get_num_threads() == before


def wide(shape, classes):
    """A network of more than a million weights, of which few compute."""
    model = torch.nn.Linear(shape[0], classes)
    model.rest = torch.nn.Parameter(torch.zeros(1_000_000))
    return model


def test_a_worker_trains_in_one_thread():
    torch.set_num_threads(3)
    spec = dataclasses.replace(SPEC, stream="seq-blobs", backbone="test_experiments:wide")
    (result,) = work(Job((spec,)), "cpu")
    assert result.record.environment["threads"] == 1
    assert torch.get_num_threads() == 3


def test_the_key_depends_on_what_is_run_and_not_on_how_it_is_said():
    assert RunSpec().key == RunSpec(memory=200, batch=10, backbone="convnet", options={"lr": 0.08, "times": 5}).key
    different = [
        RunSpec(),
        RunSpec(seed=1),
        RunSpec(memory=100),
        RunSpec(learner="er"),
        RunSpec(batch=32),
        RunSpec(epochs=2),
        RunSpec(backbone="mlp"),
        RunSpec(options={"lr": 0.05}),
        RunSpec(options={"average": 0.99}),
        RunSpec(stream="seq-blobs"),
        RunSpec(precision="bf16"),
        RunSpec(channels_last=True),
        RunSpec(heads=True),
        RunSpec(future=True),
        RunSpec(scenario={"tasks": 2}),
    ]
    assert len({spec.key for spec in different}) == len(different)
    stream_defaults = {"backbone": "resnet18", "precision": "bf16", "channels_last": True}  # as the stream says
    assert RunSpec(stream="seq-cifar10", **stream_defaults).key == RunSpec(stream="seq-cifar10").key
    # A learner without memory is the same run whatever the size of the memory.
    assert RunSpec(learner="sgd", memory=50).key == RunSpec(learner="sgd", memory=1000).key


def test_the_key_is_the_same_in_every_version():
    """Runs are found again by it: it may not change when options are added."""
    assert RunSpec(learner="er", seed=3, options={"lr": 0.05}).key == "5f425ce2432bfa05"


def test_a_run_is_kept_and_found_again(tmp_path):
    store = Store(tmp_path)
    record, reused = run(SPEC, store, device="cpu")
    assert not reused
    found, reused = run(SPEC, store, device="cpu")
    assert reused
    assert found == record
    folder = store.path(SPEC.key)
    assert [path.name for path in folder.iterdir()] == ["run.json"]
    stored = json.loads((folder / "run.json").read_text())
    assert stored["spec"]["options"]["lr"] == 0.05
    assert stored["environment"]["torch"]
    assert stored["environment"]["processor"]
    assert stored["environment"]["command"]
    assert [len(row) for row in stored["accuracy"]] == [1, 2, 3, 4, 5]
    assert np.isnan(record.matrix[0, 1:]).all()
    trained, reused = run(SPEC, store, again=True, device="cpu")
    assert not reused
    assert trained.accuracy == record.accuracy


class Overtaken(Store):
    """A store in which another process finishes the run just before this one can claim it."""

    def __init__(self, root, spec):
        super().__init__(root)
        self.spec = spec

    def claim(self, key):
        with suppress(Diverged):
            run(self.spec, Store(self.root), device="cpu")
        return super().claim(key)


def test_a_run_that_another_process_has_just_finished_is_not_trained_again(tmp_path):
    watcher = Claimed(Store(tmp_path))
    record, reused = run(SPEC, Overtaken(tmp_path, SPEC), device="cpu", callbacks=[watcher])
    assert reused
    assert record == Store(tmp_path).find(SPEC)
    assert watcher.claims == []  # no task was learned
    diverging = dataclasses.replace(SPEC, options={"lr": 1e30})
    with pytest.raises(Diverged, match="; found in .*, and trained again only with again=True"):
        run(diverging, Overtaken(tmp_path, diverging), device="cpu")
    for spec in (SPEC, diverging):
        assert [path.name for path in Store(tmp_path).path(spec.key).iterdir()] == ["run.json"]
        Store(tmp_path).claim(spec.key).release()  # it was let go
    assert not run(SPEC, Overtaken(tmp_path, SPEC), again=True, device="cpu")[1]


class Claimed(Callback):
    """Tries to take hold of a run that is being trained."""

    def __init__(self, store):
        self.store, self.claims = store, []

    def on_task(self, state):
        self.claims.append(self.store.claim(SPEC.key))


def test_a_run_is_trained_once_at_a_time(tmp_path):
    store = Store(tmp_path)
    claim = store.claim(SPEC.key)
    hint = re.escape(f"; `parabolic watch {SPEC.key[:8]} --runs {shlex.quote(str(tmp_path))}` shows")
    with pytest.raises(InputError, match=f"^run: got {SPEC.key}, which another process is training, .*{hint}"):
        run(SPEC, store, device="cpu")
    assert store.begun() == []
    claim.release()
    watcher = Claimed(store)
    run(SPEC, store, device="cpu", callbacks=[watcher])
    assert watcher.claims == [None] * 5
    store.claim(SPEC.key).release()  # it was let go
    with pytest.raises(InputError, match="average_part"):
        run(RunSpec("sgd", options={"average_part": 0.1}), Store(tmp_path / "none"), device="cpu")
    assert not (tmp_path / "none").exists()  # what cannot be built leaves nothing behind


class Refuses(Callback):
    def on_start(self, state):
        raise InputError("not this one")


def broken(shape, classes):
    """A network that cannot be made, for a reason that nobody expected."""
    raise ZeroDivisionError("no luck")


def test_a_fault_before_the_first_step_is_noted_and_a_refusal_is_not(tmp_path):
    store = Store(tmp_path)
    with pytest.raises(InputError, match="not this one"):
        run(SPEC, store, device="cpu", callbacks=[Refuses()])
    assert store.failures() == []
    spec = dataclasses.replace(SPEC, backbone="test_experiments:broken")
    with pytest.raises(ZeroDivisionError):
        run(spec, store, device="cpu")
    assert [(failure.key, failure.reason) for failure in store.failures()] == [(spec.key, "ZeroDivisionError: no luck")]
    assert "in broken" in store.failures()[0].trace
    assert reason_of(Diverged("lower lr")) == ("lower lr", "")  # which a callback that saves the learner may raise


def test_a_full_disk_hides_neither_the_result_of_a_run_nor_its_fault(tmp_path, monkeypatch):
    def fail(*args):
        raise OSError(errno.ENOSPC, "No space left")

    monkeypatch.setattr("parabolic.experiments.store.write_text", fail)
    with pytest.raises(InputError, match="^runs: got No space left") as error:
        run(SPEC, Store(tmp_path), device="cpu")
    assert (error.value.name, error.value.record.metrics["acc"] > 0) == ("runs", True)
    with pytest.raises(ZeroDivisionError):
        run(dataclasses.replace(SPEC, backbone="test_experiments:broken"), Store(tmp_path), device="cpu")
    with pytest.raises(Diverged):
        run(dataclasses.replace(SPEC, options={"lr": 1e30}), Store(tmp_path), device="cpu")


def test_a_record_made_under_another_default_is_another_run(tmp_path):
    store = Store(tmp_path)
    record = execute(SPEC, device="cpu")
    old_record = dataclasses.replace(record, spec={**record.spec, "batch": 99})
    store.save(old_record)
    assert store.find(SPEC) is None
    store.save(record)
    assert store.find(SPEC) == record


@pytest.mark.parametrize(
    ("failure", "expected_error"),
    [(OSError(errno.ENOSPC, "No space left"), InputError), (KeyboardInterrupt(), KeyboardInterrupt)],
)
def test_a_failed_write_leaves_nothing_or_what_was_there(tmp_path, monkeypatch, failure, expected_error):
    store, record = Store(tmp_path), execute(SPEC, device="cpu")

    def fail(*args):
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(expected_error):
            store.save(record)
    assert list(store) == []
    store.save(record)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(expected_error):
            store.save(dataclasses.replace(record, steps=-1))
    assert list(store) == [record]
    assert [path.name for path in store.path(record.key).iterdir()] == ["run.json"]


@pytest.mark.parametrize("damage", ["", "{", '{"key": "x"}', "[]"])
def test_a_damaged_record_does_not_count_as_finished(tmp_path, damage):
    store = Store(tmp_path)
    folder = store.path(SPEC.key)
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(damage)
    assert store.find(SPEC) is None
    assert list(store) == []
    record, reused = run(SPEC, store, device="cpu")
    assert not reused
    assert list(store) == [record]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"learner": "nope"}, "learner: got 'nope', expected one of .*er.* pcl"),
        ({"learner": "pcll"}, "did you mean 'pcl'"),
        ({"stream": "seq-digit"}, "stream: got"),
        ({"memory": -3}, "memory: got -3, expected a whole number of at least 1"),
        ({"memory": 20}, "memory: got 20, expected a whole number of at least 32"),
        ({"memory": 50, "options": {"replay": 64}}, "memory: got 50, expected a whole number of at least 64"),
        ({"seed": -1}, "seed: got -1"),
        ({"batch": 0}, "batch: got 0"),
        ({"epochs": 1.5}, "epochs: got 1.5"),
        ({"options": {"lrr": 1}}, "option of pcl: got 'lrr', .* did you mean 'lr'"),
        ({"options": {"lr": -1}}, "lr: got -1"),
        ({"options": {"lr": [0.1]}}, r"lr: got \[0.1\], expected a number"),
        ({"options": ["lr"]}, r"options: got \['lr'\], expected a dict of values by name"),
        ({"options": {"optimizer": "SDG"}}, "optimizer: got 'SDG', .* did you mean 'SGD'"),
        ({"options": {"optimizer": "SGD(0.9)"}}, "optimizer: got .*, expected .*, with arguments by name"),
        ({"seed": 2**70}, "seed: got .*, expected a whole number of at least 0 and below 9223372036854775808"),
        ({"options": {"optimizer": ER}}, "optimizer: got .*, expected a value that can be saved as text"),
        ({"learner": "torch.nn:Linear"}, "expected a subclass of parabolic.Learner"),
        ({"learner": "a\x1b.py:Mine"}, "learner: .* expected a text in UTF-8 without control characters; rename"),
        ({"options": {"optimizer": "a\udcff.py:own"}}, r"options\.optimizer: .* expected a text in UTF-8"),
        ({"learner": "no.such:Thing"}, "learner: got 'no.such:Thing'"),
        ({"learner": "parabolic:Nothing"}, "learner: got 'parabolic:Nothing'"),
        ({"backbone": "resnet81"}, "backbone: got 'resnet81', expected one of .* did you mean 'resnet18'"),
        ({"backbone": "parabolic:Nothing"}, "backbone: got 'parabolic:Nothing'"),
        ({"backbone": "math:sqrt"}, r"backbone: .* called as backbone\(shape, classes\)"),
    ],
)
def test_a_bad_spec_is_refused_at_once(arguments, message):
    with pytest.raises(InputError, match=message):
        RunSpec(**arguments)


def test_numbers_of_numpy_make_the_same_run():
    options, scenario = {"lr": 0.25, "replay": 8}, {"corruption": "uniform", "corruption_rate": 0.5}
    plain = RunSpec("er", memory=50, seed=3, options=options, scenario=scenario)
    spec = RunSpec(
        "er",
        memory=np.int64(50),
        seed=np.uint8(3),
        options={"lr": np.float32(0.25), "replay": np.int64(8)},
        scenario=scenario | {"corruption_rate": np.float64(0.5)},
    )
    assert (spec.key, spec) == (plain.key, plain)


def test_a_whole_number_makes_the_same_run_where_any_number_will_do():
    plain = RunSpec("er", options={"lr": 1.0}, scenario={"corruption": "uniform", "corruption_rate": 1.0})
    spec = RunSpec("er", options={"lr": 1}, scenario={"corruption": "uniform", "corruption_rate": 1})
    assert spec.key == plain.key == RunSpec.from_settings("er", {"lr": "1"}, scenario=plain.scenario).key
    assert type(ER(torch.nn.Linear(2, 2), lr=1).lr) is float
    assert type(ER(torch.nn.Linear(2, 2), repeats=2).repeats) is int


def test_texts_come_before_what_is_given_besides():
    texts = {"lr": "0.5", "batch": "16", "blur": "0.2"}
    arguments = {"options": {"lr": 0.25, "replay": 8}, "scenario": {"blur": 0.1, "tasks": 2}, "batch": 8, "seed": 3}
    spec = RunSpec.from_settings("er", texts, **arguments)
    assert (spec.batch, spec.seed) == (16, 3)
    assert spec.options == {"lr": 0.5, "replay": 8}
    assert spec.scenario == {"blur": 0.2, "tasks": 2}
    assert arguments["options"] == {"lr": 0.25, "replay": 8}  # as it was


def test_equal_specs_are_one_in_a_set():
    first = RunSpec("er", options={"lr": 1}, scenario={"corruption": "uniform", "corruption_rate": 1})
    second = RunSpec("er", options={"lr": 1.0}, scenario={"corruption_rate": 1.0, "corruption": "uniform"})
    assert first == second
    assert {first, second, RunSpec("er")} == {second, RunSpec("er")}


def test_settings_are_texts_of_any_field_or_option():
    settings = {
        "lr": "0.5",
        "average": "none",
        "times": "3",
        "batch": "7",
        "variant": "reference",
        "backbone": "mlp",
    }
    spec = RunSpec.from_settings("pcl", settings)
    assert (spec.batch, spec.backbone) == (7, "mlp")
    assert spec.options == {"lr": 0.5, "average": None, "times": 3, "variant": "reference"}
    with pytest.raises(InputError, match="^settings: got 'lrr'.*did you mean 'lr'"):
        RunSpec.from_settings("pcl", {"lrr": "1"})
    with pytest.raises(InputError, match="lr: got 'fast', expected a number above 0"):
        RunSpec.from_settings("pcl", {"lr": "fast"})


NETWORK = """
import torch
def network(shape, classes):
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 50), torch.nn.ReLU(), torch.nn.Dropout(), torch.nn.Linear(50, classes)
    )
"""


def test_a_run_of_a_network_that_draws_is_determined_by_its_spec(tmp_path):
    (tmp_path / "mine.py").write_text(NETWORK)
    spec = RunSpec("er", seed=1, backbone=f"{tmp_path}/mine.py:network")
    torch.manual_seed(5)
    first, state = execute(spec, device="cpu"), torch.get_rng_state()
    torch.rand(100)
    second = execute(spec, device="cpu")
    assert first.accuracy == second.accuracy
    assert first.accuracy != execute(dataclasses.replace(spec, seed=2), device="cpu").accuracy
    torch.manual_seed(5)
    assert torch.equal(state, torch.get_rng_state())  # torch's own generator is as it was


def test_threads_train_their_runs_in_turn():
    """They share torch's generators, from which networks are drawn."""
    begun = threading.Event()

    class Beginning(Callback):
        def on_start(self, state):
            begun.set()

    class Starting(Callback):
        def on_start(self, state):
            other.start()
            assert not begun.wait(1)

    other = threading.Thread(target=lambda: execute(SPEC, device="cpu", callbacks=[Beginning()]))
    execute(SPEC, device="cpu", callbacks=[Starting()])
    other.join()
    assert begun.is_set()


def test_a_callback_that_is_in_no_list_is_refused(tmp_path):
    for train in (partial(run, store=Store(tmp_path)), execute):
        with pytest.raises(InputError, match=r"^callbacks: got .*, expected a list of Callbacks; as in callbacks=\["):
            train(SPEC, callbacks=Callback())


@pytest.mark.parametrize("name", ["mps", "meta", "cuda:99", "abacus"])
def test_a_device_that_cannot_be_used_is_refused(name):
    with pytest.raises(InputError, match=f"device: got '{name}'"):
        find_device(name)


def test_the_cpu_is_one_device_whatever_its_number():
    assert find_device("cpu:0") == find_device("cpu")


def test_records_are_plain_json(tmp_path):
    record = execute(SPEC, device="cpu")
    assert Record(**json.loads(json.dumps(dataclasses.asdict(record)))) == record


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("/usr/local/bin/parabolic", "parabolic run --seed 1"),
        (str(Path(parabolic.__file__).with_name("__main__.py")), "parabolic run --seed 1"),  # python -m parabolic
        ("mine.py", "mine.py run --seed 1"),
        ("mine/__main__.py", "mine/__main__.py run --seed 1"),
    ],
)
def test_a_record_has_the_command_as_anyone_would_type_it(program, expected, monkeypatch):
    monkeypatch.setattr(sys, "argv", [program, "run", "--seed", "1"])
    assert environment(torch.device("cpu"))["command"] == expected


def test_a_worker_names_the_command_of_its_grid_and_keeps_its_own():
    before = list(sys.argv)
    [result] = work(Job((SPEC,), command="parabolic compare --seeds 1"), "cpu")
    assert result.record.environment["command"] == "parabolic compare --seeds 1"
    assert sys.argv == before


def test_a_failed_run_does_not_hold_on_to_its_learner(monkeypatch):
    references = []

    def make_and_note(*arguments):
        model = make_backbone(*arguments)
        references.append(weakref.ref(model))
        return model

    def crowded(*_):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr("parabolic.experiments.execution.make_backbone", make_and_note)
    monkeypatch.setattr("parabolic.learners.er.ER.loss", crowded)
    [(_, error)] = execute_fleet([RunSpec("er")], device="cpu")
    assert isinstance(error, DeviceFailed)
    assert "seed 0: the device failed in task 1, after step 0: no room" in str(error)
    assert "in crowded" in "".join(traceback.format_exception(error))
    gc.collect()
    assert [model() for model in references] == [None]


def test_an_error_that_was_raised_from_itself_ends_its_run_like_any_other(monkeypatch):
    def fails(*_):
        try:
            raise KeyError("lost")
        except KeyError as error:
            raise error from error

    monkeypatch.setattr("parabolic.learners.er.ER.loss", fails)
    [(_, error)] = execute_fleet([RunSpec("er")], device="cpu")
    assert isinstance(error, KeyError)


@pytest.mark.parametrize(
    ("error", "expected_sizes"),
    [
        (torch.OutOfMemoryError("no room"), [6, 3, 2, 2, 2]),  # two fit
        (ValueError("one of more than two fails"), [6, 1, 1, 1, 1, 1, 1]),
    ],
)
@pytest.mark.filterwarnings("ignore:.*at once go on")
def test_runs_that_fail_side_by_side_are_trained_in_smaller_groups(monkeypatch, error, expected_sizes):
    sizes = []

    def train(specs, *_):
        sizes.append(len(specs))
        if len(specs) > 2:
            raise error
        return [f"record {spec.seed}" for spec in specs]

    monkeypatch.setattr("parabolic.experiments.execution._train_side_by_side", train)
    monkeypatch.setattr("parabolic.experiments.execution.find_device", lambda _: torch.device("cuda"))
    results = [(spec.seed, result) for spec, result in execute_fleet([RunSpec("er", seed=seed) for seed in range(6)])]
    assert results == [(seed, f"record {seed}") for seed in range(6)]
    assert sizes == expected_sizes


def test_a_fleet_that_does_not_fit_says_how_it_goes_on_and_the_next_tries_no_more_at_once(tmp_path, monkeypatch):
    sizes = []

    def train(specs, *_):
        sizes.append(len(specs))
        if len(specs) > 3 and specs[0].memory == 50:
            raise torch.OutOfMemoryError("no room")
        return [f"record {spec.seed}" for spec in specs]

    monkeypatch.setattr("parabolic.experiments.execution._train_side_by_side", train)
    monkeypatch.setattr("parabolic.experiments.execution.find_device", lambda _: torch.device("cuda"))
    small, large = ([RunSpec("er", memory=memory, seed=seed) for seed in range(5)] for memory in (40, 50))
    yard, keeping = Yard(), Keeping(Store(tmp_path))
    with pytest.warns(RuntimeWarning, match="seed 0.*out of memory.*at most 3 .* from their last checkpoints"):
        list(execute_fleet(large, yard=yard, keeping=keeping))
    for specs in (large, small):  # of another shape nothing is known
        assert [result for _, result in execute_fleet(specs, yard=yard)] == [f"record {seed}" for seed in range(5)]
    assert sizes == [5, 3, 2, 3, 2, 5]
    with pytest.warns(RuntimeWarning, match="at most 3 at once go on, from the start"):
        list(execute_fleet(large))
    assert list(execute_fleet([])) == []


def test_too_little_memory_of_a_library_is_reported_with_the_step(monkeypatch):
    loss, steps = ER.loss, []

    def fails_later(self, *arguments):
        steps.append(self.steps)
        if self.steps == 5:
            raise RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED")
        return loss(self, *arguments)

    monkeypatch.setattr("parabolic.learners.er.ER.loss", fails_later)
    [(_, error)] = execute_fleet([RunSpec("er")], device="cpu")
    assert "the device failed in task 1, after step 5: cuDNN error" in str(error)
    assert "train fewer runs at once" in str(error)


def test_an_empty_name_of_a_network_means_the_streams_own():
    assert RunSpec(backbone="").resolved() == RunSpec().resolved()
    assert RunSpec(backbone="").key == RunSpec().key
