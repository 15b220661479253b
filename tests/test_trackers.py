"""Trackers: what was written is read back with their own clients, and none of them ever stands in a run's way."""

import json
import os
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from grids import until

from parabolic import ER, MLP, Callback, InputError, RunSpec, make_stream, train
from parabolic.engine import Diverged, Tracker, logs, trackers
from parabolic.experiments import execute, execute_fleet, track_record
from parabolic.options import options_of

# MLflow's own code calls what SQLAlchemy deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")

KINDS = ("tensorboard", "mlflow", "wandb")
EXPECTED = {
    "accuracy/so_far",
    "metrics/acc",
    "metrics/aaa",
    "metrics/forgetting",
    "seconds/training",
    "seconds/testing",
}


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch, tmp_path):
    """Without the variables of whoever runs the tests; those that a tracker sets are unset afterwards."""
    for name in [name for name in os.environ if name.startswith(("MLFLOW_", "WANDB_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    before = set(os.environ)
    yield
    for name in set(os.environ) - before:
        del os.environ[name]


def needs(*kinds):
    """Skip a test where one of these trackers is not installed."""
    for kind in kinds:
        pytest.importorskip(kind, reason=f"needs the extra `{kind}`")


def learner_and_stream():
    stream = make_stream("seq-blobs")
    return ER(MLP(stream.shape, stream.classes), memory=40, lr=0.05, seed=3), stream


def read_tensorboard(folder):
    """The runs with their figures, each as (at, value) pairs, and their settings."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    runs = {}
    for run in sorted((folder / "tensorboard").iterdir()):
        events = EventAccumulator(str(run), size_guidance={"tensors": 0, "scalars": 0}).Reload()
        tags = events.Tags()
        figures = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags["scalars"]}
        text = events.Tensors("settings/text_summary")[0].tensor_proto.string_val[0].decode()
        rows = [line.strip("| ").split(" | ") for line in text.splitlines()[2:]]
        runs[run.name] = figures, dict(rows)
    return runs


def read_mlflow(folder, experiment="parabolic"):
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    runs = {}
    for run in client.search_runs([client.get_experiment_by_name(experiment).experiment_id]):
        history = {
            name: [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)]
            for name in run.data.metrics
        }
        runs[run.info.run_name] = history, run.data.params | {"status": run.info.status}
    return runs


def read_wandb(folder):
    runs = {}

    def all_ended():  # a process of its own writes the files, and may still be at it
        runs.clear()
        runs.update(offline_runs(folder))
        return runs and all("exit" in settings for _, settings in runs.values())

    until(all_ended)
    return runs


def offline_runs(folder):
    """Their messages are Weights & Biases' own, in the frames of LevelDB's log."""
    from wandb.proto import wandb_internal_pb2

    runs = {}
    for path in sorted((folder / "wandb").glob("offline-run-*/run-*.wandb")):
        name, settings, figures = "", {}, {}
        for frame in frames(path.read_bytes()):
            message = wandb_internal_pb2.Record.FromString(frame)
            if message.HasField("run"):
                name = message.run.display_name
                settings |= {item.key: json.loads(item.value_json) for item in message.run.config.update}
            elif message.HasField("history"):
                history = {
                    item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in message.history.item
                }
                axis = "step" if "step" in history else "task"
                for figure, value in history.items():
                    if figure != axis and not figure.startswith("_"):
                        figures.setdefault(figure, []).append((history[axis], value))
            elif message.HasField("exit"):
                settings["exit"] = message.exit.exit_code
        runs[name or path.name] = figures, settings
    return runs


def frames(log, block=1 << 15):
    position, parts = 7, b""
    while position + 7 <= len(log):
        if block - position % block < 7:
            position += block - position % block
            continue
        _, size, kind = struct.unpack_from("<IHB", log, position)
        parts += log[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


READ = {"tensorboard": read_tensorboard, "mlflow": read_mlflow, "wandb": read_wandb}


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_training_tracks_can_be_read_back(tmp_path, kind):
    needs(kind)
    learner, stream = learner_and_stream()
    losses = []

    class Listener(Tracker):
        def on_step(self, state):
            super().on_step(state)
            if state.step % 25 == 0 or state.step == state.total_steps:
                losses.append((state.step, state.loss.item()))

    with Listener(kind, tmp_path, every=25) as tracker:
        state = train(learner, stream, batch=10, callbacks=[tracker])
    [(name, (figures, settings))] = READ[kind](tmp_path).items()
    assert name == "er-seq-blobs-memory40-seed3"
    assert EXPECTED | {"loss"} <= set(figures)
    assert figures["loss"] == [(step, pytest.approx(loss)) for step, loss in losses]
    for task in range(3):
        expected = [(row + 1, pytest.approx(state.matrix[row, task])) for row in range(task, 3)]
        assert figures[f"accuracy/task_{task + 1}"] == expected
        expected = [(row + 1, pytest.approx(state.task_matrix[row, task])) for row in range(task, 3)]
        assert figures[f"task_accuracy/task_{task + 1}"] == expected
    assert figures["metrics/acc"] == [(3, pytest.approx(state.matrix[2].mean()))]
    assert figures["metrics/task_acc"] == [(3, pytest.approx(state.task_matrix[2].mean()))]
    assert [value for _, value in figures["seconds/training"]] == pytest.approx(state.train_seconds)
    assert settings["learner"] == "er"
    for option in options_of(ER):
        assert settings[f"options.{option}"] == str(getattr(learner, option))
    assert settings.get("status", "FINISHED") == "FINISHED"
    assert settings.get("exit", 0) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_finished_run_can_be_tracked_and_one_that_diverges_is_closed_as_failed(tmp_path, kind):
    needs(kind)
    record = execute(RunSpec("sgd", stream="seq-blobs", seed=1))
    ((_, diverged),) = execute_fleet([RunSpec("sgd", stream="seq-blobs", seed=3, options={"lr": 1e30})])
    with Tracker(kind, tmp_path) as tracker:
        track_record(tracker, record)
        track_record(tracker, diverged)
        with pytest.raises(Diverged):
            execute(RunSpec("sgd", stream="seq-blobs", seed=2, options={"lr": 1e30}), callbacks=[tracker])
    runs = READ[kind](tmp_path)
    figures, settings = runs["sgd-seq-blobs-seed1"]
    assert figures["accuracy/so_far"][-1] == (3, pytest.approx(record.metrics["acc"]))
    assert settings["key"] == record.key
    assert settings["environment.torch"] == record.environment["torch"]
    if kind != "tensorboard":  # which does not know of it
        for name in ("sgd-seq-blobs-seed2", "sgd-seq-blobs-seed3"):
            assert runs[name][1].get("status", "FAILED") == "FAILED"
            assert runs[name][1].get("exit", 1) == 1


@pytest.mark.parametrize(("learner", "times"), [("sgd", 3), ("joint", 1)])
def test_every_task_has_its_time_and_measures_and_those_learned_at_once_share_them(tmp_path, learner, times):
    needs("tensorboard")
    (tmp_path / "mine.py").write_text("def steps(state):\n    return state.step\n")
    record = execute(RunSpec(learner, stream="seq-blobs", measure=f"{tmp_path / 'mine.py'}:steps"))
    with Tracker("tensorboard", tmp_path) as tracker:
        track_record(tracker, record)
    ((figures, _),) = read_tensorboard(tmp_path).values()
    expected = {"seconds/training": record.train_seconds, "measured/steps": record.measured["steps"]}
    for name, values in expected.items():
        assert len(values) == times
        assert figures[name] == [(task, pytest.approx(value)) for task, value in enumerate(values * (3 // times), 1)]


def test_two_runs_of_one_name_are_kept_apart(tmp_path):
    needs("tensorboard")
    record = execute(RunSpec("sgd", stream="seq-blobs"))
    with Tracker("tensorboard", tmp_path) as tracker:
        for _ in range(2):
            track_record(tracker, record)
    assert list(read_tensorboard(tmp_path)) == ["sgd-seq-blobs-seed0", "sgd-seq-blobs-seed0-2"]


def test_a_tracker_whose_runs_have_ended_leaves_no_thread_behind_and_may_be_used_again(tmp_path):
    needs("tensorboard")
    tracker, before = Tracker("tensorboard", tmp_path), {*threading.enumerate()}
    for _ in range(2):
        train(ER(MLP((2,), 6)), make_stream("seq-blobs"), batch=100, callbacks=[tracker])
        assert until(lambda: before >= {*threading.enumerate()})
    runs = read_tensorboard(tmp_path).values()
    assert [figures.keys() >= EXPECTED for figures, _ in runs] == [True, True]


def test_a_run_that_fails_leaves_no_thread_behind_either(tmp_path):
    needs("tensorboard")
    tracker, before = Tracker("tensorboard", tmp_path), {*threading.enumerate()}
    with pytest.raises(Diverged):
        execute(RunSpec("sgd", stream="seq-blobs", options={"lr": 1e30}), callbacks=[tracker])
    assert until(lambda: before >= {*threading.enumerate()})


def test_a_run_that_nobody_ended_is_closed_with_the_tracker_which_then_writes_nothing_more_to_it(tmp_path):
    needs("tensorboard")

    class Begun(Callback):
        def on_start(self, state):
            with Tracker("tensorboard", tmp_path, warn=warnings_given.append) as tracker:
                tracker.on_start(state)
                tracker.write({"load": 0.5}, "step", 3)
            tracker.write({"load": 0.25}, "step", 4)  # to none: it was closed
            tracker.finish()

    warnings_given = []
    train(ER(MLP((2,), 6)), make_stream("seq-blobs"), batch=100, callbacks=[Begun()])
    ((figures, _),) = read_tensorboard(tmp_path).values()
    assert (figures["load"], warnings_given) == ([(3, 0.5)], [])


def test_an_entry_that_nobody_closed_has_all_its_figures_once_the_tracker_is_closed(tmp_path):
    """TensorBoard holds back the newest until an entry is closed."""
    needs("tensorboard")
    with Tracker("tensorboard", tmp_path) as tracker:
        entry = tracker.open("データ", {"memory": 200})  # no letter of it can be in every file's name
        for step in range(20):
            entry.write({"loss": 0.5}, "step", step)
        tracker.write({"load": 0.25}, "step", 20)
    entry.close()  # it is closed
    ((figures, _),) = read_tensorboard(tmp_path).values()
    assert ([step for step, _ in figures["loss"]], figures["load"]) == ([*range(20)], [(20, 0.25)])
    assert (tmp_path / "tensorboard" / "run").is_dir()


def test_processes_that_open_a_run_of_one_name_at_once_get_a_folder_each(tmp_path):
    assert len({logs._new_folder(tmp_path / "runs" / "er") for _ in range(3)}) == 3  # before anything is written there


def test_mlflow_is_told_where_to_write_by_its_own_variables(tmp_path, monkeypatch):
    needs("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    with Tracker("mlflow", tmp_path / "unused") as tracker:
        track_record(tracker, execute(RunSpec("sgd", stream="seq-blobs")))
    assert list(read_mlflow(tmp_path, "mine")) == ["sgd-seq-blobs-seed0"]
    assert not (tmp_path / "unused").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_a_tracker_that_is_not_installed_is_refused_at_once(tmp_path, monkeypatch, kind):
    monkeypatch.setitem(sys.modules, kind, None)  # as if it were not there
    with pytest.raises(InputError, match=rf"tracker: got no .*; pip install 'parabolic-cl\[{kind}\]'"):
        Tracker(kind, tmp_path / "a")
    assert not Path(tmp_path / "a").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_a_tracker_that_cannot_be_imported_is_reported_once_and_the_run_goes_on(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(trackers, "check_installed", str)  # it is there, and what it needs is not
    for module in ("torch.utils.tensorboard", "mlflow", "wandb"):
        monkeypatch.setitem(sys.modules, module, None)
    warnings_given = []
    with Tracker(kind, tmp_path, warn=warnings_given.append) as tracker:
        for _ in range(2):
            state = train(*learner_and_stream(), batch=10, callbacks=[tracker])
    assert state.accuracy > 50
    [message] = warnings_given
    assert message.startswith(f"tracker {kind}: InputError: ")
    assert f"pip install 'parabolic-cl[{kind}]'; the run continues without it" in message
    with pytest.warns(RuntimeWarning, match="continues without it"):
        train(*learner_and_stream(), batch=10, callbacks=[Tracker(kind, tmp_path)])


def test_measures_of_ones_own_are_told_after_every_task(tmp_path):
    needs("tensorboard")
    with Tracker("tensorboard", tmp_path) as tracker:
        state = train(*learner_and_stream(), batch=10, callbacks=[tracker], measures={"mine": lambda state: state.step})
    ((figures, _),) = read_tensorboard(tmp_path).values()
    assert figures["measured/mine"] == [(task, step) for task, step in enumerate(state.measured["mine"], 1)]
    assert figures["metrics/mine"] == [(3, state.step)]


def test_a_server_that_is_down_stops_nothing(tmp_path, monkeypatch):
    needs("mlflow", "tensorboard")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    warnings_given = []
    with Tracker("mlflow,tensorboard", tmp_path, warn=warnings_given.append) as tracker:
        state = train(*learner_and_stream(), batch=10, callbacks=[tracker])
    assert state.step == state.total_steps
    assert len(warnings_given) == 1
    assert warnings_given[0].startswith("tracker mlflow: ")
    assert "loss" in read_tensorboard(tmp_path)["er-seq-blobs-memory40-seed3"][0]  # the other one was not in its way


def test_a_tracker_that_hangs_is_given_up(tmp_path, monkeypatch):
    never = threading.Event()
    monkeypatch.setattr(trackers, "PATIENCE", 0.3)
    monkeypatch.setitem(trackers.TRACKERS, "stuck", lambda *_: never.wait())
    warnings_given = []
    with Tracker("stuck", tmp_path, warn=warnings_given.append) as tracker:
        for _ in range(2):
            train(*learner_and_stream(), batch=10, callbacks=[tracker])
    never.set()
    assert warnings_given == ["tracker stuck: TimeoutError: no answer within 0.3 s; the run continues without it"]


def test_a_disk_that_cannot_be_written_to_stops_nothing(tmp_path):
    needs(*KINDS)
    (tmp_path / "file").touch()
    warnings_given = []
    with Tracker(KINDS, tmp_path / "file", warn=warnings_given.append) as tracker:
        state = train(*learner_and_stream(), batch=10, callbacks=[tracker])
    assert state.step == state.total_steps
    assert sorted(words.split(":")[0] for words in warnings_given) == [f"tracker {kind}" for kind in sorted(KINDS)]


def test_the_commands_tell_trackers_and_say_what_is_wrong_with_one(parabolic, tmp_path, monkeypatch):
    needs("tensorboard", "mlflow")
    settings = ("--stream", "seq-blobs", "--track", "tensorboard,mlflow")
    assert parabolic("run", "--learner", "er", *settings)[0] == 0
    code, _, err = parabolic("compare", "--learners", "er,sgd", "--seeds", "1", "--workers", "0", *settings)
    assert (code, err) == (0, "")
    names = ["er-seq-blobs-memory200-seed0", "sgd-seq-blobs-seed0"]  # er was there already, and is told of once
    assert list(read_tensorboard(tmp_path / "tracked")) == names
    runs = read_mlflow(tmp_path / "tracked")
    assert sorted(runs) == names
    assert runs["er-seq-blobs-memory200-seed0"][1]["key"] == RunSpec("er", "seq-blobs").key
    (tmp_path / "file").touch()
    monkeypatch.setenv("PARABOLIC_TRACKED", "file")
    code, out, err = parabolic("run", "--stream", "seq-blobs", "--again", "--track", "tensorboard")
    assert code == 0
    assert "stored in" in out
    assert err.startswith("tracker tensorboard: ")
    assert err.count("\n") == 1
    monkeypatch.setitem(sys.modules, "wandb", None)
    code, out, err = parabolic("run", "--stream", "seq-blobs", "--again", "--track", "wandb")
    assert (code, out) == (2, "")
    assert err.startswith("error: tracker: got no Weights & Biases")
    code, _, err = parabolic("run", "--track", "tensorbord")
    assert code == 2
    assert "did you mean 'tensorboard'?" in err


EDITED = """
from parabolic import SGD


class Mine(SGD):
    def end_task(self, batches):
        with open(__file__, "a") as file:
            file.write("# an edit")
"""


def test_a_run_is_tracked_though_its_code_is_edited_while_it_trains(parabolic, tmp_path):
    needs("tensorboard")
    (tmp_path / "mine.py").write_text(EDITED)
    arguments = ("--learners", "mine.py:Mine", "--seeds", "1", "--workers", "0", "--stream", "seq-blobs")
    assert parabolic("compare", *arguments, "--track", "tensorboard")[0] == 0
    assert len(read_tensorboard(tmp_path / "tracked")) == 1


def test_the_package_needs_none_of_the_extras():
    absent = ["plotly", "mlflow", "wandb", "tensorboard", "matplotlib"]
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({absent})); import parabolic.report.page\n"
        "from parabolic.cli import COMMANDS, find_command\n"
        "for name in COMMANDS: find_command(name)"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (0, "")


def test_an_unknown_tracker_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(InputError, match="did you mean 'mlflow'"):
        Tracker(["mlfow"], tmp_path / "a")
    assert not Path(tmp_path / "a").exists()
