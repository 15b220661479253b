"""What people get wrong, and what they are told: at once, in a line, and with nothing half done."""

import dataclasses
import json
import signal
import subprocess
import sys
from dataclasses import replace
from shutil import copytree

import numpy as np
import pandas as pd
import pytest
import torch
from grids import fragile, until
from made_up import record, save_few_runs
from torch import nn

from parabolic import (
    ER,
    MLP,
    SGD,
    ConvNet,
    InputError,
    Journal,
    ParabolicClassifier,
    ResNet18,
    RunSpec,
    Store,
    Stream,
    make_backbone,
    run,
)
from parabolic.checks import check_name
from parabolic.experiments import Search, build, execute, run_grid, tune
from parabolic.learners import known_learners
from parabolic.options import option, options_of
from parabolic.report.scenes import find_scenes
from parabolic.streams import Cache, Scenario, prepare


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "runs")


def start_command(folder, *arguments):
    """The command in a process of its own."""
    command = [sys.executable, "-m", "parabolic", *arguments]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


# -- the command line --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "--learner", ""), "learner: got ''"),
        (("run", "--learner", "broken.py:Mine"), "learner: got 'broken.py:Mine'"),
        (("run", "--runs", "broken.py", "--learner", "sgd"), "runs: got Not a directory (broken.py)"),
        (("compare", "--learners", "er,sgd", "--set", "average_part=0.1"), "average_part: got 0.1"),
        (("compare", "--learners", "sgd,pcl", "--set", "drift_weight=1", "--workers", "0"), "drift_weight: got 1.0"),
        (("runs", "--csv", "."), "--csv: got a folder (.)"),
        (("run", "--preset", "nothing.toml"), "preset: got 'nothing.toml', expected an existing file"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_trained(parabolic, tmp_path, arguments, message):
    (tmp_path / "broken.py").write_text("def (:")
    code, out, err = parabolic(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["broken.py"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "--set", "foo=3"), "`parabolic list pcl` shows them"),
        (("run", "--preset", "er-seq-digits", "--set", "lrr=3"), "did you mean 'lr'? `parabolic list er` shows them"),
        (("compare", "--learners", "er,sgd", "--set", "foo=3"), "`parabolic list LEARNER` shows them"),
        (("compare", "--learners", "er,sgd", "--set", "sgd.foo=3"), "`parabolic list sgd` shows them"),
        (("compare", "--learners", "er", "--set", "pcl.lr=0.1"), "--set pcl.lr: got 'pcl', expected one of er; "),
        (("tune", "--learners", "er,sgd", "--space", "pcl.lr=0.1:1"), "--space pcl.lr: got 'pcl', expected one of er,"),
        (("run", "--stream", "seq-digit"), "did you mean 'seq-digits'? `parabolic list` shows them; module:function"),
        (("data", "prepare", "x", "--from", "/nope"), "--from: got /nope, which does not exist, expected "),
    ],
)
def test_an_unknown_name_is_refused_with_the_command_that_lists_the_others(
    parabolic, tmp_path, monkeypatch, arguments, message
):
    monkeypatch.setenv("PARABOLIC_DATA", str(tmp_path / "data"))
    code, out, err = parabolic(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("arguments", [("er", "--set", "lr=0.1,0.2"), ("er", "--set", "er.lr=0.1,0.2"), ("er,sgd,er",)])
def test_two_settings_of_one_method_are_refused_with_how_to_compare_them_as_presets(parabolic, tmp_path, arguments):
    code, out, err = parabolic("compare", "--learners", *arguments)
    assert (code, out) == (2, "")
    assert "compare settings of one method as presets: --preset a.toml --preset b.toml" in err
    for name, lr in (("a", 0.1), ("b", 0.2)):
        (tmp_path / f"{name}.toml").write_text(f'learner = "er"\n[settings]\nlr = {lr}\n')
    options = ("--stream", "seq-blobs", "--seeds", "1", "--workers", "0", "--json")
    code, out, _ = parabolic("compare", "--preset", "a.toml", "--preset", "b.toml", *options)
    assert [run["spec"]["options"]["lr"] for run in json.loads(out)["runs"]] == [0.1, 0.2]


@pytest.mark.parametrize("optimizer", ["SGD(momentum=0.9, nesterov=True)", "SGD(momentum=2, nesterov=True)"])
def test_what_has_commas_of_its_own_is_no_list_of_values(parabolic, optimizer):
    arguments = ("compare", "--learners", "er", "--stream", "seq-blobs", "--seeds", "1", "--workers", "0")
    assert "presets" not in parabolic(*arguments, "--set", f"optimizer={optimizer}", "--set", "lr=-1")[2]


def test_a_row_of_a_comparison_whose_code_fails_stops_no_other(parabolic, tmp_path, monkeypatch):
    monkeypatch.setenv("BROKEN", "")  # which the learner sets, in this process: no other test is to find it
    spec = fragile(tmp_path, "broken")
    code, out, err = parabolic(
        "compare", "--learners", f"sgd,{spec.learner}", "--seeds", "1", "--workers", "0", "--set", "trouble=broken",
        "--set", "backbone=mlp",
    )  # fmt: skip
    assert code == 1
    assert "something nobody expected" in err
    assert "sgd" in out


def test_a_run_is_trained_by_one_process_at_a_time(parabolic, store):
    spec = RunSpec("sgd", stream="seq-blobs")
    store.save(record(RunSpec("er", stream="seq-blobs")))
    claim = store.claim(spec.key)
    code, _, err = parabolic("run", "--learner", "sgd", "--stream", "seq-blobs")
    assert code == 2
    assert f"parabolic watch {spec.key[:8]}" in err
    assert store.begun() == [RunSpec("er", stream="seq-blobs").key]
    assert parabolic("run", "--learner", "er", "--stream", "seq-blobs")[0] == 0  # what is finished may always be seen
    claim.release()
    assert parabolic("run", "--learner", "sgd", "--stream", "seq-blobs")[0] == 0
    store.claim(spec.key).release()  # it was let go


def test_a_run_that_is_stopped_says_how_it_goes_on(tmp_path):
    for seconds, continuation in (("0", "starts over"), ("60", "resumes from the last checkpoint")):
        command = ("run", "--learner", "sgd", "--set", "epochs=5000", "--set", "backbone=mlp", "--checkpoint", seconds)
        (tmp_path / seconds).mkdir()
        with start_command(tmp_path / seconds, *command) as process:
            assert until(lambda seconds=seconds: list(tmp_path.glob(f"{seconds}/runs/*/monitor.jsonl")))
            process.send_signal(signal.SIGINT)
            err = process.communicate(timeout=60)[1]
        assert process.returncode == 130
        assert err.startswith(f"stopped: the same command {continuation}")


def test_a_watch_that_saw_no_run_ends_as_any_other(tmp_path):
    page = tmp_path / "report.html"
    with start_command(tmp_path, "report", "--watch", "--every", "0.2") as process:
        assert until(page.exists)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert f"The report: {page}" in out
    text = page.read_text()
    assert "There are no runs in this folder yet" in text
    assert '"refresh":null' in text


def test_warnings_of_a_command_are_lines(tmp_path):
    (tmp_path / "runs" / RunSpec("sgd", stream="seq-blobs").key / "monitor.jsonl").mkdir(parents=True)
    with start_command(tmp_path, "run", "--learner", "sgd", "--stream", "seq-blobs") as process:
        err = process.communicate(timeout=60)[1]
    assert process.returncode == 0
    assert err.startswith("warning: ")
    assert err.count("\n") == 1


def test_a_folder_that_is_not_there_is_reported(parabolic):
    assert parabolic("runs", "--runs", "ruins")[1].endswith("0 runs in ruins, which is not a folder\n")


# -- runs that are kept ------------------------------------------------------------------------------------------------


def test_copies_of_a_run_count_once(parabolic, store):
    save_few_runs(store, seeds=1)
    er, failed_spec = RunSpec("er"), RunSpec("gem")
    store.save_failure(failed_spec, "no luck")
    for spec in (er, failed_spec):
        for name in (f"0 {spec.learner} before", f"{spec.key} (copy)"):
            copytree(store.path(spec.key), store.path(name))
    store.save(replace(store.find(er), steps=7))  # the run in the folder that is called by its key counts
    assert sorted(run.spec["learner"] for run in store) == ["er", "pcl", "sgd"]
    assert [run.steps for run in store if run.key == er.key] == [7]
    assert [failure.key for failure in store.failures()] == [failed_spec.key]
    assert "3 runs in runs" in parabolic("runs")[1]
    store.save(record(failed_spec))
    assert list(store.failures()) == []  # its copies failed, and it is finished


def test_learners_without_a_memory_stay_beside_each_size_of_it(parabolic, store):
    for spec in (
        *(RunSpec(learner, memory=memory) for learner in ("er", "pcl") for memory in (50, 100)),
        RunSpec("sgd"),
        RunSpec("sgd", scenario={"tasks": 2}),
        RunSpec("sgd", stream="seq-blobs"),
        RunSpec("er", stream="seq-blobs", memory=200),
    ):
        store.save(record(spec))

    def selected_runs(*arguments):
        rows = json.loads(parabolic("runs", "--json", *arguments)[1])["runs"]
        found_runs = [(row["learner"], row["stream"], row.get("memory"), row["scenario.tasks"]) for row in rows]
        return sorted(found_runs, key=str)

    small = [("er", "seq-digits", 50, None), ("pcl", "seq-digits", 50, None), ("sgd", "seq-digits", None, None)]
    assert selected_runs("--where", "memory=50") == small
    assert selected_runs("--where", "memory=50", "--learner", "er") == small[:1]
    assert len(selected_runs("--where", "memory=50", "--learner", "sgd")) == 3  # which are of any size
    assert selected_runs("--where", "memory=70") == []
    [scene] = find_scenes(store, {"memory": "100"}).scenes
    assert scene.title == "seq-digits, memory 100"
    assert {method.name for method in scene.methods} == {"er", "pcl", "sgd"}


def test_a_store_is_not_its_folder():
    with pytest.raises(InputError, match=r"store: got 'runs', expected a Store; as in Store\(\"runs\"\)"):
        run(RunSpec("sgd"), "runs")


# -- data --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "problem"), [('["a", "b"', "Expecting"), ('{"a": 0}', "{'a': 0}"), ("[null]", "None")]
)
def test_damaged_names_of_classes_are_refused(tmp_path, text, problem):
    np.save(tmp_path / "train_images.npy", np.zeros((20, 8, 8, 3), np.uint8))
    np.save(tmp_path / "train_labels.npy", np.arange(20) % 2)
    (tmp_path / "class_names.json").write_text(text)
    with pytest.raises(InputError, match=rf"class_names\.json: got .*{problem}.*fix or remove it"):
        prepare("mine", tmp_path, cache=Cache(tmp_path / "cache"))
    (tmp_path / "class_names.json").write_text('["cat", 7]')
    assert prepare("mine", tmp_path, cache=Cache(tmp_path / "cache")).class_names == ("cat", "7")


def task_part(width, dtype=torch.float32):
    return torch.zeros(6, width, dtype=dtype), torch.arange(6) % 2


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        (
            [(task_part(2), task_part(2)), (task_part(3), task_part(3))],
            r"x of task 1: got .*\[6, 3\].* like those of task 0, \[2\]",
        ),
        ([(task_part(2), task_part(3))], r"test x of task 0: got .*\[6, 3\]"),
        ([(task_part(2), task_part(2, torch.uint8))], "test x of task 0: got .* uint8"),
        ([task_part(2)], r"task 0: .* expected \(\(x, y\), \(test x, test y\)\)"),
        (3, "parts: got 3, expected a list"),
    ],
)
def test_tasks_that_do_not_fit_together_are_refused(tasks, message):
    with pytest.raises(InputError, match=message):
        Stream.from_tasks(tasks)


# -- estimators and journals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "frame",
    [
        pd.DataFrame({"size": range(6), "colour": pd.Categorical(list("rgbrgb"))}),
        pd.DataFrame({"when": pd.date_range("2026-01-01", periods=6)}),
    ],
)
def test_columns_that_are_no_numbers_are_refused(frame):
    with pytest.raises(InputError, match="X: got columns that are no numbers: '(colour|when)' .*, expected numbers"):
        ParabolicClassifier("er").fit(frame, [0, 1] * 3)


@pytest.mark.parametrize("learner", ["sgd", "er"])
def test_a_single_example_that_is_left_over_does_not_stop_batch_norm(learner):
    network = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    x, y = np.random.default_rng(0).normal(size=(33, 2)), np.arange(33) % 2
    model = ParabolicClassifier(learner, model=network, batch_size=32, epochs=2, random_state=0)
    assert model.partial_fit(x, y).learner_.steps == 1
    assert model.partial_fit(x[:20], y[:20]).learner_.steps == 2
    assert model.fit(x, y).learner_.steps == 2
    with pytest.raises(InputError, match="hold it back"):
        ParabolicClassifier(learner, model=network).partial_fit(x[:1], y[:1])


def test_a_journal_of_something_else_is_refused(tmp_path):
    with pytest.raises(InputError, match="learner: got <class 'torch.nn.*Linear'>, expected a learner"):
        Journal(tmp_path / "journal", nn.Linear(2, 2))
    assert list(tmp_path.iterdir()) == []
    Journal(tmp_path / "journal", ER(nn.Linear(2, 2))).close()


@pytest.mark.parametrize("command", ["bounds", "profile"])
def test_a_missing_plotting_library_is_reported_before_anything_is_trained(parabolic, tmp_path, monkeypatch, command):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as where it is not installed
    code, out, err = parabolic(command, "--stream", "seq-blobs")
    assert (code, out) == (2, "")
    assert err == "error: --output: got no matplotlib, expected it to be installed; pip install 'parabolic-cl[plot]'\n"
    assert list(tmp_path.iterdir()) == []


def test_a_learner_of_a_file_is_found_by_its_name(parabolic, tmp_path, store):
    store.save(record(replace(fragile(tmp_path, "none"), backbone="mlp")))
    assert "1 run in runs" in parabolic("runs", "--learner", "Fragile")[1]
    assert "0 runs in runs" in parabolic("runs", "--learner", "Agile")[1]


# -- what a learner is made of and given -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda: make_backbone("mlp", 4, 3), r"^shape: got 4, expected the shape of an example, such as \(4,\)"),
        (lambda: make_backbone("mlp", (4, 0), 3), r"^shape: got \(4, 0\), expected the shape"),
        (
            lambda: observe_labels(["cat", "dog"]),
            "^y: got .*, expected a tensor.*; number them from 0, or use an",
        ),
        (lambda: observe_labels([["cat"], "dog"]), "^y: got .*, expected a tensor"),
        (
            lambda: observe_labels([0, 1], memory=10**14),
            r"^memory: got 10+, expected .* room for; an example takes 24 bytes",
        ),
    ],
)
def test_what_no_learner_can_use_is_refused(function, message):
    with pytest.raises(InputError, match=message):
        function()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("name-7", "one of 30 names such as name-17, name-27, name-7x, name-9; did you mean 'name-7x'? ask for them"),
        ("?", "one of 30 names such as name-0, name-1, name-10, name-11; ask for them"),
    ],
)
def test_of_many_names_an_error_lists_the_nearest(name, expected):
    names = ["name-7x" if number == 7 else f"name-{number}" for number in range(30)]
    with pytest.raises(InputError) as error:
        check_name("name", name, names, "ask for them")
    assert str(error.value) == f"name: got {name!r}, expected {expected}"


def test_a_memory_too_large_is_refused_before_anything_is_learned():
    learner = ER(make_backbone("mlp", (4,), 3), memory=10**14)
    before = [weight.clone() for weight in learner.model.parameters()]
    for _ in range(2):  # the second time as the first
        with pytest.raises(InputError, match="^memory: got 10+"):
            learner.observe(torch.ones(2, 4), [0, 1])
    assert learner.steps == 0
    assert all(map(torch.equal, learner.model.parameters(), before))


def observe_labels(y, memory=50):
    return ER(make_backbone("mlp", np.array([4]).tolist(), 3), memory=memory).observe(torch.ones(2, 4), y)


# -- from Python -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda _: RunSpec(ER), "learner: got <class .*ER'>, expected a name, .* give mine.py:NAME"),
        (lambda _: RunSpec("er", stream=len), "stream: got <.* len>, expected a name"),
        (lambda _: RunSpec("er", backbone=nn.Linear), "backbone: got <class .*>, expected a name"),
        (lambda store: run("er", store), r"spec: got 'er', expected a RunSpec; as in RunSpec\(\"er\"\)"),
        (lambda _: build("er"), "spec: got 'er'"),
        (lambda _: execute("er"), "spec: got 'er'"),
        (lambda _: Search("er"), "spec: got 'er'"),
        (lambda store: run_grid(["er"], store), "spec: got 'er'"),
        (lambda store: run_grid(RunSpec("er"), store), r"specs: got RunSpec\(.*, expected a list of RunSpecs"),
        (lambda _: run_grid([RunSpec("er")], "runs"), "store: got 'runs', expected a Store"),
        (lambda _: tune(Search(RunSpec("er")), "runs"), "store: got 'runs', expected a Store"),
        (lambda _: Store(None), "root: got None, expected a folder"),
    ],
)
def test_what_is_no_run_and_no_store_is_refused(store, function, message):
    with pytest.raises(InputError, match=message):
        function(store)
    assert not store.root.exists()


def test_what_only_this_process_has_is_not_given_to_others(store, monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "Mine", ER, raising=False)
    spec = RunSpec("__main__:Mine", stream="seq-blobs", backbone="mlp")
    with pytest.raises(InputError, match="learner: got '__main__:Mine', .* a file, as mine.py:Mine, or use workers=0"):
        run_grid([spec], store, workers=2, device="cpu")
    assert run_grid([spec], store, workers=0, device="cpu").trained == 1


def test_what_was_typed_into_a_session_is_another_with_every_definition(store, monkeypatch):
    """No file tells whether a cell of a notebook has changed since a run of it was stored."""
    main = sys.modules["__main__"]
    monkeypatch.delattr(main, "__file__", raising=False)
    for _ in range(2):
        monkeypatch.setattr(main, "Mine", type("Mine", (ER,), {}), raising=False)
        spec = RunSpec("__main__:Mine", stream="seq-blobs", backbone="mlp")
        assert [run(spec, store, device="cpu")[1] for _ in range(2)] == [False, True]


def test_an_optimiser_that_only_this_process_has_is_not_given_to_others(store, monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "Mine", torch.optim.SGD, raising=False)
    spec = RunSpec("er", stream="seq-blobs", backbone="mlp", options={"optimizer": "__main__:Mine(momentum=0.5)"})
    with pytest.raises(InputError, match="optimizer: got '__main__:Mine.*; put it into a file, as mine.py:Mine"):
        run_grid([spec], store, workers=2, device="cpu")
    assert run_grid([spec], store, workers=0, device="cpu").trained == 1


# -- learners of one's own ---------------------------------------------------------------------------------------------


def test_a_run_that_fails_is_noted_and_one_that_is_refused_is_not(parabolic, tmp_path, store):
    text = "from parabolic import ER\n\nclass Mine(ER):\n    def loss(self, batch, recalled):\n        return 1 / 0\n"
    (tmp_path / "mine.py").write_text(text)
    arguments = ("run", "--learner", "mine.py:Mine", "--stream", "seq-blobs")
    with pytest.raises(ZeroDivisionError):
        parabolic(*arguments)
    [failed] = store.failures()
    assert failed.reason == "ZeroDivisionError: division by zero"
    assert "return 1 / 0" in failed.trace
    assert "ZeroDivisionError: division by zero (in mine.py:5, loss)" in parabolic("runs", "--failed")[1]
    claim = store.claim(failed.key)
    assert parabolic(*arguments)[0] == 2  # as another process is at it
    claim.release()
    assert [failure.failed for failure in store.failures()] == [failed.failed]
    assert parabolic("run", "--learner", "sgd", "--set", "average_part=0.1")[0] == 2
    assert len(store.begun()) == 1


def test_a_learner_that_forgets_to_set_itself_up_says_so():
    class Forgetful(ER):
        def __post_init__(self):
            self.seen = 0

    with pytest.raises(InputError, match=r"__post_init__ of Forgetful: got .* make it the first line"):
        Forgetful(torch.nn.Linear(2, 2))


def test_the_traceback_of_an_error_in_ones_own_code_starts_there(parabolic, tmp_path, monkeypatch, capsys):
    text = "import torch\nfrom parabolic import ER\n\nclass Mine(ER):\n    def loss(self, batch, recalled):\n"
    (tmp_path / "mine.py").write_text(text + "        return torch.nn.Linear(7, 7)(batch['x'])\n")
    with pytest.raises(RuntimeError, match="cannot be multiplied") as error:
        parabolic("run", "--learner", "mine.py:Mine", "--stream", "seq-blobs")
    sys.excepthook(error.type, error.value, error.tb)  # as Python does when a program ends with an error
    first, location, line, *_ = capsys.readouterr().err.splitlines()
    assert first == "Traceback (most recent call last):"
    assert location.endswith('mine.py", line 6, in loss')
    assert line.strip() == "return torch.nn.Linear(7, 7)(batch['x'])"

    monkeypatch.setattr("parabolic.cli.run.run", None)  # in code of this package: without the calls of typer
    with pytest.raises(TypeError, match="not callable") as error:
        parabolic("run")
    sys.excepthook(error.type, error.value, error.tb)
    assert "in run_one" in capsys.readouterr().err.splitlines()[1]


def test_one_example_that_batch_norm_cannot_learn_alone_is_refused_with_the_error_of_the_library(
    parabolic, tmp_path, store
):
    (tmp_path / "net.py").write_text(
        "from torch import nn\n\ndef small(shape, classes):\n"
        "    return nn.Sequential(nn.Linear(*shape, 8), nn.BatchNorm1d(8), nn.Linear(8, classes))\n"
    )
    code, _, err = parabolic("run", "--learner", "der", "--stream", "seq-blobs", "--set", "replay=1",
                             "--set", "backbone=net.py:small")  # fmt: skip
    assert code == 2
    assert err.startswith(
        "error: step of der: got one example, recalled or split off, that passes through the model alone"
    )
    assert err.endswith("expected at least two examples, as batch norm needs here; raise replay, memory or chunk\n")
    [failed] = store.failures()
    assert f"error: {failed.reason}\n" == err


def test_a_learner_with_a_name_of_ours_leaves_our_preset_alone(parabolic, tmp_path):
    (tmp_path / "mine.py").write_text("from parabolic import ER\n\nclass Clash(ER):\n    name = 'er'\n")
    code, _, err = parabolic("tune", "--learner", "mine.py:Clash", "--stream", "seq-blobs", "--trials", "1")
    assert (code, err) == (0, "")
    assert [path.name for path in (tmp_path / "presets").iterdir()] == ["Clash-seq-blobs.toml"]


def file_with_option(name, base="ER"):
    """The file of a learner that has an option of its own."""
    return (
        f"from parabolic.learners import {base}\nfrom parabolic.options import option\n\n"
        f"class Mine({base}):\n    {name}: int = option(5, 'something', at_least=0)\n"
    )


@pytest.mark.parametrize("name", sorted(known_learners()))
def test_no_field_may_have_the_name_of_what_a_learner_is_made_with(name):
    learner_class = known_learners()[name]
    fields = {field.name for field in dataclasses.fields(SGD)}
    attributes = {
        attribute for attribute in vars(SGD(nn.Linear(4, 3), average=0.9)) if not attribute.startswith("_")
    } - fields
    assert attributes >= {"lock", "stepping", "steps", "body", "device", "dtype", "generator", "optim", "averaged"}
    for taken in (*attributes, "loss", "predict", "error", "state_dict", "own_name"):
        with pytest.raises(
            InputError, match=f"^field of Mine: got '{taken}', expected a name that is not taken; .*my_"
        ):
            type("Mine", (learner_class,), {"__annotations__": {taken: int}, taken: option(5, "something")})

    class Mine(learner_class):
        name: str = "mine"
        lr: float = 0.5
        other: int = option(5, "something")

    learner = Mine(nn.Sequential(nn.Linear(4, 3)), other=7)
    assert (learner.name, learner.lr, learner.other) == ("mine", 0.5, 7)


@pytest.mark.parametrize(
    ("name", "whose"),
    [*((name, "runs") for name in ("epochs", "batch", "precision", "stream", "options")),
     *((name, "streams") for name in options_of(Scenario))],
)  # fmt: skip
def test_an_option_that_is_called_like_another_setting_of_a_run_is_refused(parabolic, tmp_path, name, whose):
    (tmp_path / "mine.py").write_text(file_with_option(name))
    message = (
        f"option of mine.py:Mine: got {name!r}, expected a name that is not taken; {whose} have a setting of that name"
    )
    for arguments in (
        ("run", "--learner", "mine.py:Mine", "--set", f"{name}=3"),
        ("compare", "--learners", "mine.py:Mine"),
    ):
        code, out, err = parabolic(*arguments)
        assert (code, out) == (2, "")
        assert err.startswith(f"error: {message}: choose another in the class, such as my_{name}")
    with pytest.raises(InputError, match="^option of mine.py:Mine: got"):
        RunSpec("mine.py:Mine", options={name: 3})


@pytest.mark.parametrize("name", ["memory", "seed"])
def test_what_a_run_hands_to_its_learner_may_be_an_option(tmp_path, name):
    (tmp_path / "mine.py").write_text(file_with_option(name, "SGD"))
    learner, _ = build(RunSpec(f"{tmp_path}/mine.py:Mine", **{name: 70}), device="cpu")
    assert getattr(learner, name) == 70


def test_an_option_whose_name_is_taken_is_refused_with_the_name_of_its_file(parabolic, tmp_path):
    (tmp_path / "mine.py").write_text(file_with_option("steps"))
    code, out, err = parabolic("run", "--learner", "mine.py:Mine")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: learner: got 'mine.py:Mine'")
    assert "field of Mine: got 'steps', expected a name that is not taken" in err


def test_a_preset_says_where_its_code_was_looked_for(parabolic, tmp_path):
    (tmp_path / "presets").mkdir()
    (tmp_path / "presets" / "a.toml").write_text('learner = "mine.py:Mine"\n[settings]\nlr = 0.1\n')
    code, _, err = parabolic("run", "--preset", "a")
    assert code == 2
    assert "learner: got 'mine.py:Mine', expected file.py:name of an existing file" in err
    assert f"there is no {tmp_path / 'mine.py'}: change to the folder" in err


@pytest.mark.parametrize(
    ("shape", "hidden", "message"),
    [
        (64, (8,), "^shape: got 64, expected a list of whole numbers; as in shape="),
        ((64,), 8, "^hidden: got 8, expected a list of whole numbers; as in hidden="),
        ((64,), (0,), "^hidden: got 0, expected a whole number of at least 1"),
    ],
)
def test_sizes_of_a_perceptron_are_lists(shape, hidden, message):
    with pytest.raises(InputError, match=message):
        MLP(shape, 10, hidden=hidden)


@pytest.mark.parametrize("network", [MLP, ConvNet, ResNet18])
def test_networks_that_cannot_be_made_are_refused(network):
    for arguments, message in (
        ({"classes": 0}, "^classes: got 0, expected a whole number of at least 1"),
        ({"classes": 2.0}, "^classes: got 2.0, expected a whole number of at least 1"),
        ({"shape": (3, 8.5, 8)}, "^shape: got 8.5, expected a whole number of at least 1"),
        ({"shape": 3}, "^shape: got 3, expected a list of whole numbers"),
        *[({"width": width}, f"^width: got {width}, expected a") for width in (0, 1.5) if network is not MLP],
    ):
        with pytest.raises(InputError, match=message):
            network(**({"shape": (3, 8, 8), "classes": 2} | arguments))


def test_a_seed_of_a_network_is_a_whole_number():
    with pytest.raises(InputError, match="^seed: got 'first', expected a whole number"):
        make_backbone("mlp", (4,), 2, seed="first")


def test_sizes_of_a_perceptron_may_come_from_an_iterator():
    one, other = (MLP(shape, 10, hidden=hidden) for shape, hidden in (((8, 8), (5, 6)), (iter([8, 8]), iter([5, 6]))))
    assert repr(one) == repr(other)
    assert one.arguments == other.arguments
