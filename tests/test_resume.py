"""Runs that are stopped in the middle: they go on, and end with the figures of one that was not."""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import official
import pytest
import torch
from grids import fragile, kill, until

import parabolic
from parabolic import ER, MLP, Callback, InputError, Learner, RunSpec, Store, Stream, plugins, run, train
from parabolic.engine import Checkpoints, Fleet, train_fleet
from parabolic.experiments import execute, execute_fleet, run_grid
from parabolic.experiments.code import package_code
from parabolic.experiments.resume import Keeping, stopped_runs
from parabolic.learners import find_learner, known_learners
from parabolic.learners.saving import read_learner
from parabolic.states import read_state, same_state
from parabolic.streams import prepare
from parabolic.streams.stream import Batches, Examples

ALWAYS = 1e-9  # seconds: after every step


class Stop(Callback):
    """Ends a run as Ctrl-C would, in the middle of a step or after a task."""

    def __init__(self, step=None, task=None):
        self.step, self.task = step, task

    def on_step(self, state):
        if state.step == self.step:
            raise KeyboardInterrupt

    def on_task(self, state):
        if state.task == self.task:
            raise KeyboardInterrupt


def spec_of(learner, **settings):
    """Three tasks of eight steps."""
    return RunSpec(learner, stream="seq-blobs", batch=50, backbone="mlp", **settings)


def train_until(stop, spec, store, checkpoint=ALWAYS):
    """Train a run until it is stopped."""
    with pytest.raises(KeyboardInterrupt):
        run(spec, store, device="cpu", checkpoint=checkpoint, callbacks=[stop])


def outcome_of(record):
    """All that a record says of the outcome."""
    return record.spec, record.metrics, record.accuracy, record.steps


@pytest.mark.parametrize("name", sorted(known_learners()))
def test_a_run_stopped_anywhere_ends_as_one_that_was_not(tmp_path, name):
    spec, store = spec_of(name, options={"average": 0.9, "optimizer": "Adam", "lr": 0.01}), Store(tmp_path)
    all_at_once = find_learner(name).sees_all
    stops = [Stop(2), Stop(9), Stop(10), Stop(16), *([] if all_at_once else [Stop(task=1)]), Stop(24), Stop(task=2)]
    for stop in stops:
        train_until(stop, spec, store)
    record, reused = run(spec, store, device="cpu", checkpoint=ALWAYS)
    assert not reused
    assert outcome_of(record) == outcome_of(execute(spec, device="cpu"))
    assert record.environment["resumed"] == len(stops)
    assert len(record.train_seconds) == len(record.test_seconds) == (1 if all_at_once else 3)
    assert [path.name for path in store.path(spec.key).iterdir()] == ["run.json"]


def test_a_checkpoint_says_where_it_is_and_is_a_learner_too(tmp_path):
    spec, store = spec_of("er"), Store(tmp_path)
    train_until(Stop(12), spec, store)
    saved = read_state(store.checkpoint(spec.key))
    assert (saved["progress"]["step"], len(saved["progress"]["train_seconds"])) == (11, 1)
    assert saved["run"]["spec"] == spec.resolved()
    assert Learner.load(store.checkpoint(spec.key)).steps == 11
    assert list(store) == []  # it is no finished run
    assert store.unreadable() == {}


@pytest.mark.parametrize("permuted", [0.0, 0.5])
@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("shuffle", [True, False])
def test_batches_after_some_are_the_last_of_all(permuted, epochs, shuffle):
    data = Examples(torch.arange(46), torch.arange(46) % 5)
    batches = Batches(data, torch.arange(1, 46), 7, epochs, (3, 1), permuted, shuffle=shuffle)
    all_batches = list(batches)
    for count in range(len(all_batches) + 1):
        remaining = batches.after(count)
        assert len(remaining) == len(all_batches) - count
        assert same_state(list(remaining), all_batches[count:])
    assert same_state(list(batches.after(2).after(3)), all_batches[5:])
    with pytest.raises(InputError, match="count"):
        batches.after(len(all_batches) + 1)


def test_earlier_batches_are_not_gathered():
    class Counted(Examples):
        taken = 0

        def take(self, rows, label_rows=None):
            Counted.taken += 1
            return super().take(rows, label_rows)

    batches = Batches(Counted(torch.arange(40), torch.arange(40)), torch.arange(40), 4, 1, (0,))
    assert len(list(batches.after(7))) == 3 == Counted.taken


# -- kills -------------------------------------------------------------------------------------------------


def test_a_command_killed_again_and_again_ends_as_one_that_was_not(tmp_path):
    arguments = ["run", "--learner", "er", "--seed", "2", "--device", "cpu", "--runs", "runs", "--checkpoint", "0.001"]
    spec, store, moments = RunSpec("er", seed=2), Store(tmp_path / "runs"), random.Random(3)
    path, environment = store.checkpoint(spec.key), os.environ | {"OMP_NUM_THREADS": "1"}

    def step():
        return read_state(path)["progress"]["step"] if path.exists() else 0

    steps_reached = [0]
    for _ in range(2):
        process = subprocess.Popen([sys.executable, "-m", "parabolic", *arguments], cwd=tmp_path, env=environment)
        assert until(lambda: step() > steps_reached[-1] + 3)
        time.sleep(moments.uniform(0, 0.1))
        kill(process.pid)
        assert process.wait() == -9
        steps_reached.append(step())
        assert steps_reached[-1] > steps_reached[-2] + 3  # it went on, and did not begin anew
    assert steps_reached[-1] < 146
    process = subprocess.run(
        [sys.executable, "-m", "parabolic", *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    record = store.find(spec)
    assert outcome_of(record) == outcome_of(execute(spec, device="cpu"))
    assert record.environment["resumed"] == 2
    assert not path.exists()


def test_a_comparison_saves_checkpoints_as_often_as_asked(tmp_path, parabolic):
    spec = fragile(tmp_path, "killed_once")
    settings = ("--stream", "seq-blobs", "--set", "trouble=killed_once")
    arguments = ("--learners", spec.learner, "--seeds", "1", "--workers", "1", "--device", "cpu", *settings)
    code, out, err = parabolic("compare", *arguments, "--checkpoint", str(ALWAYS), "--json")
    assert (code, err) == (0, "")
    assert [run["environment"]["resumed"] for run in json.loads(out)["runs"]] == [1]
    for command in (("compare",), ("paper", "main", "--quick")):
        code, _, err = parabolic(*command, "--checkpoint", "-1")
        assert code == 2
        assert "checkpoint: got -1.0, expected a number of at least 0; 0 saves no checkpoints" in err


def test_a_grid_goes_on_with_a_run_whose_worker_was_killed(tmp_path):
    spec = replace(fragile(tmp_path, "killed_once"), stream="seq-blobs")  # at step 40 of 120
    outcome = run_grid([spec], Store(tmp_path / "a"), workers=1, device="cpu", checkpoint=ALWAYS)
    (record,) = outcome.records.values()
    assert record.environment["resumed"] == 1
    plain = run_grid([replace(spec, options={})], Store(tmp_path / "b"), workers=0, device="cpu", checkpoint=0)
    assert outcome_of(record)[1:] == outcome_of(*plain.records.values())[1:]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["er", "pcl", "lwf"])
def test_a_run_on_a_gpu_goes_on_too(tmp_path, name):
    spec, store = spec_of(name), Store(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run(spec, store, device="cuda", checkpoint=ALWAYS, callbacks=[Stop(12)])
    record, _ = run(spec, store, device="cuda", checkpoint=ALWAYS)
    assert record.environment["resumed"] == 1
    assert outcome_of(record) == outcome_of(execute(spec, device="cuda"))


# -- what a checkpoint does not serve ----------------------------------------------------------------------


def test_a_damaged_checkpoint_is_named_and_the_run_begins_anew(tmp_path):
    spec, store = spec_of("er"), Store(tmp_path)
    train_until(Stop(12), spec, store)
    path = store.checkpoint(spec.key)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.warns(RuntimeWarning, match=f"the run starts over: path: got '{path}'"):
        record, _ = run(spec, store, device="cpu")
    assert (record.environment["resumed"], outcome_of(record)) == (0, outcome_of(execute(spec, device="cpu")))


MINE = """
from parabolic import ER

class Mine(ER):
    def loss(self, batch, recalled):
        return {factor} * super().loss(batch, recalled)
"""


def test_a_learner_that_was_changed_begins_anew(tmp_path):
    """What it came to by other code is another run's."""
    (tmp_path / "mine.py").write_text(MINE.format(factor=1))
    spec, store = spec_of(f"{tmp_path}/mine.py:Mine"), Store(tmp_path / "runs")
    train_until(Stop(12), spec, store)
    keeping = Keeping(store)
    assert keeping.place(spec) == (1, 11)
    (tmp_path / "mine.py").write_text(MINE.format(factor=2))
    assert keeping.place(spec) == (0, 0)


def test_a_learner_whose_helper_was_changed_begins_anew(tmp_path):
    helper = tmp_path / "helper_of_a_stopped_run.py"
    helper.write_text("FACTOR = 1")
    (tmp_path / "mine.py").write_text(f"from {helper.stem} import FACTOR\n" + MINE.format(factor="FACTOR"))
    store = Store(tmp_path / "runs")
    with patch.dict(sys.modules):
        spec = spec_of(f"{tmp_path}/mine.py:Mine")
        train_until(Stop(12), spec, store)
        assert Keeping(store).place(spec) == (1, 11)
    helper.write_text("FACTOR = 2")
    plugins._read_once.cache_clear()  # as in another process
    assert Keeping(store).place(spec) == (0, 0)


def test_a_run_of_another_engine_begins_anew(tmp_path, monkeypatch):
    """A file by other code of this package is not gone on from, even if it bears the same version."""
    spec, store, package_copy = spec_of("er"), Store(tmp_path / "runs"), tmp_path / "parabolic"
    train_until(Stop(12), spec, store)
    keeping, read_code = Keeping(store), package_code.__wrapped__
    shutil.copytree(Path(parabolic.__file__).parent, package_copy, ignore=shutil.ignore_patterns("__pycache__"))
    for package in (parabolic, torch):
        with monkeypatch.context() as patch:
            patch.setattr(package, "__version__", "0.0.1")
            assert keeping.place(spec) == (0, 0)
    monkeypatch.setattr("parabolic.experiments.resume.package_code", lambda: read_code(package_copy))
    for change, expected in (("report/tables.py", (1, 11)), ("engine/loop.py", (0, 0))):
        (package_copy / change).write_text("# as it may be some day")
        assert keeping.place(spec) == expected


def test_a_run_whose_data_were_replaced_begins_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("PARABOLIC_DATA", str(tmp_path / "cache"))
    images, labels = official.pictures(300, 10)

    def prepare_again(labels):
        np.save(tmp_path / "train_images.npy", images)
        np.save(tmp_path / "train_labels.npy", labels)
        prepare("mine", tmp_path, again=True)

    prepare_again(labels)
    spec = RunSpec("sgd", stream="seq-mine", batch=16, backbone="mlp")
    store = Store(tmp_path / "runs")
    train_until(Stop(5), spec, store)
    keeping = Keeping(store)
    place = keeping.place(spec)
    assert place != (0, 0)
    prepare_again(labels)
    assert keeping.place(spec) == place
    prepare_again(labels[::-1])
    assert keeping.place(spec) == (0, 0)
    assert run(spec, store, device="cpu")[0].environment["resumed"] == 0


def test_stopped_runs_are_listed_with_the_task_they_had_come_to(parabolic, tmp_path):
    store, specs = Store("runs"), [spec_of("er"), spec_of("er", seed=1), spec_of("joint")]
    train_until(Stop(step=10), specs[0], store)
    line = "1 stopped run, which the same command resumes: er on seq-blobs, seed 0, batch=50, task 2 of 3"
    code, out, _ = parabolic("runs")
    assert code == 0
    assert f"0 runs in runs\n{line}\n" in out
    for folder in ((), ("runs",)):  # a comparison's runs have no monitor: the most there is to tell
        code, _, err = parabolic("watch", *folder)
        assert code == 2
        assert f"; {line}; no run in runs has a monitor" in err
    train_until(Stop(step=20), specs[1], store)
    train_until(Stop(step=3), specs[2], store)
    assert "3 stopped runs, which the same command resumes: parabolic runs --stopped\n" in parabolic("runs")[1]
    out = parabolic("runs", "--stopped")[1]
    assert f"{specs[1].key}  er on seq-blobs, seed 1, batch=50, task 3 of 3\n" in out
    assert "joint on seq-blobs, seed 0, batch=50, all tasks at once\n" in out
    assert out.endswith("3 stopped runs in runs\n")
    result = json.loads(parabolic("runs", "--stopped", "--where", "seed=1", "--json")[1])
    assert ([row["key"] for row in result["runs"]], result["stopped"]) == ([specs[1].key], 1)
    for option, message in (("--failed", "--stopped: got it with --failed"), ("--records=a.jsonl", "were stopped")):
        assert message in parabolic("runs", "--stopped", option)[2]


def test_a_list_of_stopped_runs_reads_no_whole_checkpoint(tmp_path, monkeypatch):
    store, spec = Store(tmp_path), spec_of("er")
    train_until(Stop(step=10), spec, store)
    monkeypatch.setattr("parabolic.states.safetensors", None)  # which reads the tensors
    assert [(run.reached, run.of) for run in stopped_runs(store)] == [(2, 3)]


def test_what_is_finished_or_failed_or_under_way_or_starts_over_is_not_stopped(tmp_path):
    store, specs = Store(tmp_path), [spec_of("er", seed=seed) for seed in range(5)]
    for spec in specs:
        train_until(Stop(step=10), spec, store)
    assert [run.key for run in stopped_runs(store)] == sorted(spec.key for spec in specs)
    checkpoint = store.checkpoint(specs[0].key).read_bytes()
    run(specs[0], store, device="cpu")
    store.checkpoint(specs[0].key).write_bytes(checkpoint)  # as if it was killed before it could delete it
    store.save_failure(specs[1], "a reason")
    store.checkpoint(specs[2].key).write_bytes(b"damaged")
    claim = store.claim(specs[3].key)
    assert [run.key for run in stopped_runs(store)] == [specs[4].key]
    claim.release()
    assert {run.key for run in stopped_runs(store)} == {specs[3].key, specs[4].key}


def test_a_run_that_is_asked_for_again_begins_anew(tmp_path):
    spec, store = spec_of("er"), Store(tmp_path)
    train_until(Stop(12), spec, store)
    record, _ = run(spec, store, device="cpu", again=True)
    assert record.environment["resumed"] == 0
    train_until(Stop(12), spec, Store(tmp_path / "other"))
    outcome = run_grid([spec], Store(tmp_path / "other"), workers=0, device="cpu", again=True)
    assert outcome.records[spec.key].environment["resumed"] == 0


def test_a_run_that_is_asked_for_again_and_retried_goes_on_where_it_failed(tmp_path):
    spec = fragile(tmp_path, "crowded_once")
    outcome = run_grid([spec], Store(tmp_path / "runs"), workers=0, device="cpu", again=True, checkpoint=ALWAYS)
    assert outcome.records[spec.key].environment["resumed"] == 1


def test_a_run_that_another_process_trains_keeps_its_checkpoint_when_it_is_asked_for_again(tmp_path):
    spec, store = spec_of("er"), Store(tmp_path)
    train_until(Stop(12), spec, store)
    checkpoint, claim = store.checkpoint(spec.key).read_bytes(), store.claim(spec.key)
    with pytest.raises(InputError, match="^run: got .*, which another process is training"):
        run(spec, store, device="cpu", again=True)
    assert store.checkpoint(spec.key).read_bytes() == checkpoint
    outcome = run_grid([spec], store, workers=0, device="cpu", again=True, minutes=1e-3)  # it waits, but not for long
    assert outcome.put_off == 1
    assert store.checkpoint(spec.key).read_bytes() == checkpoint
    claim.release()
    assert run(spec, store, device="cpu", again=True)[0].environment["resumed"] == 0


def test_a_run_that_is_asked_for_again_and_stopped_at_once_leaves_nothing_of_the_one_before(tmp_path):
    spec, store = spec_of("er"), Store(tmp_path)
    train_until(Stop(12), spec, store)
    with pytest.raises(KeyboardInterrupt):
        run(spec, store, device="cpu", again=True, callbacks=[Stop(2)])
    assert not store.checkpoint(spec.key).exists()


def test_a_run_that_diverged_is_not_resumed(tmp_path):
    spec, store = spec_of("sgd", options={"lr": 1e30}), Store(tmp_path)
    with pytest.raises(RuntimeError, match="lower lr"):
        run(spec, store, device="cpu", checkpoint=ALWAYS)
    assert not store.checkpoint(spec.key).exists()


def test_checkpoints_can_be_left_out(tmp_path):
    spec, store = spec_of("er"), Store(tmp_path)
    train_until(Stop(12), spec, store, checkpoint=0)
    assert store.begun() == []
    with pytest.raises(InputError, match="checkpoint: got -1, expected a number of at least 0; 0 saves no checkpoints"):
        run(spec, store, device="cpu", checkpoint=-1)
    assert run(spec, store, device="cpu", checkpoint=0, again=True)[0].environment["resumed"] == 0


@pytest.mark.parametrize(
    ("function", "error", "reason"),
    [
        ("write_bytes", OSError(28, "No space left on device"), "No space left on device"),
        ("pack_state", MemoryError(), "no memory left"),
    ],
)
def test_a_full_disk_or_memory_costs_checkpoints_and_not_the_run(tmp_path, monkeypatch, function, error, reason):
    spec, store = spec_of("er"), Store(tmp_path)

    def fail(*_):
        raise error

    monkeypatch.setattr(f"parabolic.engine.checkpoints.{function}", fail)
    with pytest.warns(RuntimeWarning, match=f"no checkpoint was saved .{reason}"):
        record, _ = run(spec, store, device="cpu", checkpoint=ALWAYS)
    assert outcome_of(record) == outcome_of(execute(spec, device="cpu"))


def test_a_state_that_no_file_can_hold_costs_checkpoints_and_not_the_run(tmp_path):
    model = MLP((2,), 4)
    model.register_buffer("turn", torch.ones(1, dtype=torch.complex128))
    with pytest.warns(
        RuntimeWarning, match="no checkpoint is saved of er: state.model.turn: got .*complex128"
    ) as caught:
        train_fleet(Fleet([ER(model)]), [stream(0)], batch=8, checkpoints=Checkpoints([tmp_path / "0"], ALWAYS, [{}]))
    assert len(caught) == 1


# -- side by side ------------------------------------------------------------------------------------------


def make_learner(name, seed):
    torch.manual_seed(seed)
    return find_learner(name)(MLP((2,), 4, hidden=(8,)), seed=seed, classes=4)


def stream(seed):
    y = torch.arange(160) % 4
    x = torch.randn(160, 2, generator=torch.Generator().manual_seed(seed)) + y[:, None]
    return Stream.from_arrays(x, y, tasks=2, seed=seed)


@pytest.mark.parametrize("name", ["pcl", "lwf", "gem"])
def test_learners_side_by_side_go_on_together(tmp_path, name):
    paths, seeds = [tmp_path / "0", tmp_path / "1"], (0, 1)
    checkpoints = Checkpoints(paths, ALWAYS, [{}, {}])
    with pytest.raises(KeyboardInterrupt):
        train_fleet(
            Fleet([make_learner(name, seed) for seed in seeds]), [stream(seed) for seed in seeds], batch=8,
            callbacks=[Stop(11)], checkpoints=checkpoints,
        )  # fmt: skip
    learners = [make_learner(name, seed) for seed in seeds]
    progress = [Checkpoints.resume(*pair) for pair in zip(learners, map(read_learner, paths), strict=True)]
    assert [progress_of_run.place for progress_of_run in progress] == [(1, 10)] * 2
    states = train_fleet(Fleet(learners), [stream(seed) for seed in seeds], batch=8, progress=progress)
    for seed, state in zip(seeds, states, strict=True):
        solo = train(make_learner(name, seed), stream(seed), batch=8)
        assert same_state(state.learner.state_dict(), solo.learner.state_dict())
        assert np.array_equal(state.matrix, solo.matrix, equal_nan=True)
        assert np.array_equal(state.task_matrix, solo.task_matrix, equal_nan=True)


def test_a_run_of_a_network_with_dropout_and_a_last_batch_of_one_goes_on_with_the_same_draws(tmp_path):
    def fresh():
        torch.manual_seed(0)
        layers = [torch.nn.Linear(2, 8), torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4)]
        return ER(torch.nn.Sequential(*layers))

    uncut, learner, path = train(fresh(), stream(0), batch=9).learner, fresh(), tmp_path / "0"  # 64 = 7 · 9 + 1
    with pytest.raises(KeyboardInterrupt):
        train_fleet(
            Fleet([learner]), [stream(0)], batch=9, callbacks=[Stop(4)], checkpoints=Checkpoints([path], ALWAYS, [{}])
        )
    resumed = fresh()
    train_fleet(Fleet([resumed]), [stream(0)], batch=9, progress=[Checkpoints.resume(resumed, read_learner(path))])
    assert same_state(resumed.model.state_dict(), uncut.model.state_dict())


def test_a_fleet_that_runs_out_of_memory_loses_only_what_was_trained_since_its_checkpoints(tmp_path, monkeypatch):
    specs, loss, steps = [spec_of("er", seed=seed) for seed in range(3)], ER.loss, []
    expected = {spec: outcome_of(execute(spec, device="cpu")) for spec in specs}
    devices = iter([torch.device("cuda")])  # only a GPU is asked to train several at once

    def out_of_memory_once(self, *arguments):
        steps.append(self.steps)
        if len(steps) == 3 * 12 + 2:  # the second run is in its 13th step
            raise torch.OutOfMemoryError("no room")
        return loss(self, *arguments)

    monkeypatch.setattr("parabolic.experiments.execution.find_device", lambda _: next(devices, torch.device("cpu")))
    monkeypatch.setattr(ER, "loss", out_of_memory_once)
    with pytest.warns(RuntimeWarning, match="seed 0 and 2 beside it.*no room.*at most 2 at once go on"):
        records = dict(execute_fleet(specs, device="cuda", keeping=Keeping(Store(tmp_path), ALWAYS)))
    assert {spec: outcome_of(record) for spec, record in records.items()} == expected
    assert [records[spec].environment["fleet"] for spec in specs] == [2, 2, 1]
    assert [records[spec].environment["resumed"] for spec in specs] == [1, 1, 1]
    assert len(steps) == 3 * 24 + 2  # the 13th step of two runs was made twice


def test_runs_that_stand_at_different_places_do_not_go_side_by_side(tmp_path, monkeypatch):
    specs, store = [spec_of("er", seed=seed) for seed in range(4)], Store(tmp_path)
    expected = {spec: outcome_of(execute(spec, device="cpu")) for spec in specs}
    for spec in (specs[0], specs[2]):
        train_until(Stop(12), spec, store)
    for keeping, fleets, resumed in ((Keeping(store), [2] * 4, [1, 0, 1, 0]), (None, [4] * 4, [0] * 4)):
        devices = iter([torch.device("cuda")])  # only a GPU is asked to train several at once
        monkeypatch.setattr(
            "parabolic.experiments.execution.find_device", lambda _, devices=devices: next(devices, torch.device("cpu"))
        )
        records = dict(execute_fleet(specs, device="cuda", keeping=keeping))
        assert {spec: outcome_of(record) for spec, record in records.items()} == expected
        assert [records[spec].environment["fleet"] for spec in specs] == fleets
        assert [records[spec].environment["resumed"] for spec in specs] == resumed
