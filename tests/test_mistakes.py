"""What people get wrong, and what they are told: at once, in a line, and with nothing half done."""

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
from made_up import few, record
from torch import nn

from parabolic import ER, InputError, Journal, ParabolicClassifier, RunSpec, Store, Stream, make_backbone, run
from parabolic.checks import check_name
from parabolic.report.scenes import find_scenes
from parabolic.streams import Cache, prepare


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "runs")


def started(folder, *arguments):
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
        (("run", "--preset", "nothing.toml"), "preset: got 'nothing.toml', expected a file that is there"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_trained(parabolic, tmp_path, arguments, message):
    (tmp_path / "broken.py").write_text("def (:")
    code, out, err = parabolic(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["broken.py"]


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
    for more, told in (((), "begins anew"), (("--checkpoint", "0.01"), "goes on from its last checkpoint")):
        command = ("run", "--learner", "sgd", "--set", "epochs=5000", "--set", "backbone=mlp", *more)
        with started(tmp_path, *command) as process:
            pattern = "runs/*/checkpoint.safetensors" if more else "runs/*/monitor.jsonl"
            assert until(lambda pattern=pattern: list(tmp_path.glob(pattern)))
            process.send_signal(signal.SIGINT)
            err = process.communicate(timeout=60)[1]
        assert process.returncode == 130
        assert err.startswith(f"stopped: the same command {told}")


def test_a_watch_that_saw_no_run_ends_as_any_other(tmp_path):
    page = tmp_path / "report.html"
    with started(tmp_path, "report", "--watch", "--every", "0.2") as process:
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
    with started(tmp_path, "run", "--learner", "sgd", "--stream", "seq-blobs") as process:
        err = process.communicate(timeout=60)[1]
    assert process.returncode == 0
    assert err.startswith("warning: ")
    assert err.count("\n") == 1


def test_a_folder_that_is_not_there_is_told(parabolic):
    assert parabolic("runs", "--runs", "ruins")[1].endswith("0 runs in ruins, which is no folder\n")


# -- runs that are kept ------------------------------------------------------------------------------------------------


def test_copies_of_a_run_count_once(parabolic, store):
    few(store, seeds=1)
    er, gone = RunSpec("er"), RunSpec("gem")
    store.save_failure(gone, "no luck")
    for spec in (er, gone):
        for name in (f"0 {spec.learner} before", f"{spec.key} (copy)"):
            copytree(store.path(spec.key), store.path(name))
    store.save(replace(store.find(er), steps=7))  # the run in the folder that is called by its key counts
    assert sorted(each.spec["learner"] for each in store) == ["er", "pcl", "sgd"]
    assert [each.steps for each in store if each.key == er.key] == [7]
    assert [each.key for each in store.failures()] == [gone.key]
    assert "3 runs in runs" in parabolic("runs")[1]
    store.save(record(gone))
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

    def chosen(*arguments):
        rows = json.loads(parabolic("runs", "--json", *arguments)[1])["runs"]
        told = [(row["learner"], row["stream"], row.get("memory"), row["scenario.tasks"]) for row in rows]
        return sorted(told, key=str)

    small = [("er", "seq-digits", 50, None), ("pcl", "seq-digits", 50, None), ("sgd", "seq-digits", None, None)]
    assert chosen("--where", "memory=50") == small
    assert chosen("--where", "memory=50", "--learner", "er") == small[:1]
    assert len(chosen("--where", "memory=50", "--learner", "sgd")) == 3  # which are of any size
    assert chosen("--where", "memory=70") == []
    [scene] = find_scenes(store, {"memory": "100"}).scenes
    assert scene.title == "seq-digits, memory 100"
    assert {method.name for method in scene.methods} == {"er", "pcl", "sgd"}


def test_a_store_is_not_its_folder():
    with pytest.raises(InputError, match=r"store: got 'runs', expected a Store; as in Store\(\"runs\"\)"):
        run(RunSpec("sgd"), "runs")


# -- data --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "got"), [('["a", "b"', "Expecting"), ('{"a": 0}', "{'a': 0}"), ("[null]", "None")])
def test_damaged_names_of_classes_are_told(tmp_path, text, got):
    np.save(tmp_path / "train_images.npy", np.zeros((20, 8, 8, 3), np.uint8))
    np.save(tmp_path / "train_labels.npy", np.arange(20) % 2)
    (tmp_path / "class_names.json").write_text(text)
    with pytest.raises(InputError, match=rf"class_names\.json: got .*{got}.*mend or remove it"):
        prepare("mine", tmp_path, cache=Cache(tmp_path / "cache"))
    (tmp_path / "class_names.json").write_text('["cat", 7]')
    assert prepare("mine", tmp_path, cache=Cache(tmp_path / "cache")).class_names == ("cat", "7")


def part(width, kind=torch.float32):
    return torch.zeros(6, width, dtype=kind), torch.arange(6) % 2


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ([(part(2), part(2)), (part(3), part(3))], r"x of task 1: got .*\[6, 3\].* like those of task 0, \[2\]"),
        ([(part(2), part(3))], r"test x of task 0: got .*\[6, 3\]"),
        ([(part(2), part(2, torch.uint8))], "test x of task 0: got .* uint8"),
        ([part(2)], r"task 0: .* expected \(\(x, y\), \(test x, test y\)\)"),
        (3, "parts: got 3, expected a list"),
    ],
)
def test_tasks_that_do_not_fit_together_are_told(tasks, message):
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
def test_columns_that_are_no_numbers_are_told(frame):
    with pytest.raises(InputError, match="X: got an array of type .*, expected numbers"):
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
def test_what_cannot_be_drawn_is_told_before_anything_is_trained(parabolic, tmp_path, monkeypatch, command):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as where it is not installed
    code, out, err = parabolic(command, "--stream", "seq-blobs")
    assert (code, out) == (2, "")
    assert err == "error: --out: got no matplotlib, expected it to be installed; pip install 'parabolic-cl[plot]'\n"
    assert list(tmp_path.iterdir()) == []


def test_a_learner_of_a_file_is_found_by_its_name(parabolic, tmp_path, store):
    store.save(record(replace(fragile(tmp_path, "none"), backbone="mlp")))
    assert "1 run in runs" in parabolic("runs", "--learner", "Fragile")[1]
    assert "0 runs in runs" in parabolic("runs", "--learner", "Agile")[1]


# -- what a learner is made of and given -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: make_backbone("mlp", 4, 3), r"^shape: got 4, expected the shape of an example, such as \(4,\)"),
        (lambda: make_backbone("mlp", (4, 0), 3), r"^shape: got \(4, 0\), expected the shape"),
        (
            lambda: observed(["cat", "dog"]),
            "^y: got .*, expected a tensor.*; number them from 0, or use an",
        ),
        (lambda: observed([["cat"], "dog"]), "^y: got .*, expected a tensor"),
        (lambda: observed([0, 1], memory=10**14), r"^memory: got 10+, expected .* room for; an example takes 24 bytes"),
    ],
)
def test_what_no_learner_can_use_is_told_in_its_words(call, message):
    with pytest.raises(InputError, match=message):
        call()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("name-7", "one of 30 names such as name-17, name-27, name-7x, name-9; did you mean 'name-7x'?"),
        ("?", "one of 30 names such as name-0, name-1, name-10, name-11; ask for them"),
    ],
)
def test_of_many_names_an_error_lists_the_nearest(given, told):
    names = ["name-7x" if number == 7 else f"name-{number}" for number in range(30)]
    with pytest.raises(InputError) as caught:
        check_name("name", given, names, "ask for them")
    assert str(caught.value) == f"name: got {given!r}, expected {told}"


def test_a_memory_too_large_is_refused_before_anything_is_learned():
    learner = ER(make_backbone("mlp", (4,), 3), memory=10**14)
    before = [weight.clone() for weight in learner.model.parameters()]
    for _ in range(2):  # the second time as the first
        with pytest.raises(InputError, match="^memory: got 10+"):
            learner.observe(torch.ones(2, 4), [0, 1])
    assert learner.steps == 0
    assert all(map(torch.equal, learner.model.parameters(), before))


def observed(y, memory=50):
    return ER(make_backbone("mlp", np.array([4]).tolist(), 3), memory=memory).observe(torch.ones(2, 4), y)
