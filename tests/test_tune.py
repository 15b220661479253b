"""Tuning: never on test data, the same for the same seed, and none the worse for being killed."""

import gc
import json
import multiprocessing
import os
import platform
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from grids import alive, kill, until

from parabolic import InputError, RunSpec, Store, run
from parabolic.engine import Callback
from parabolic.experiments import Search, Trial, Tuned, execute, execute_fleet, load_preset, tune, tuning
from parabolic.learners import known_learners

optuna = pytest.importorskip("optuna", reason="needs the extra `tune`: pip install 'parabolic-cl[tune]'")
study_module = pytest.importorskip("parabolic.experiments.study")  # imports Optuna
Pruner, Study = study_module.Pruner, study_module.Study

BLOBS = RunSpec(learner="er", stream="seq-blobs")

# Test examples that cannot be looked at: whatever is done with them fails, but for handing them on.
UNTOUCHABLE = """
from dataclasses import replace

import torch

from parabolic.streams import Stream
from parabolic.streams.stream import Examples


class Untouchable(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise AssertionError("test data were touched")


def build(seed):
    x, y = torch.randn(200, 4, generator=torch.Generator().manual_seed(1)), torch.arange(200) % 4
    x[torch.arange(200), y] += 3
    stream = Stream.from_arrays(x, y, test=(x[:40].clone(), y[:40].clone()), tasks=2, seed=seed, name="untouchable")
    hidden = Examples(*[each.as_subclass(Untouchable) for each in stream[0].test[:2]])
    rows = [task.test_rows.as_subclass(Untouchable) for task in stream]
    return replace(stream, tasks=tuple(replace(task, test=hidden, test_rows=rows[task.index]) for task in stream))
"""

# The same training examples, and test examples that differ from file to file.
OTHERWISE = """
import torch

from parabolic.streams import Stream


def build(seed):
    x, y = torch.randn(200, 4, generator=torch.Generator().manual_seed(1)), torch.arange(200) % 4
    x[torch.arange(200), y] += 3
    noise = torch.randn(80, 4, generator=torch.Generator().manual_seed({})) * 100
    return Stream.from_arrays(x, y, test=(noise, torch.arange(80) % 4), tasks=2, seed=seed, name="otherwise")
"""

TIMID = """
from parabolic import ER


class Timid(ER):
    lr: float = 0.0001
"""


# -- test data -----------------------------------------------------------------------------------------------------


def test_no_test_example_is_ever_touched(tmp_path):
    (tmp_path / "untouchable.py").write_text(UNTOUCHABLE)
    spec = RunSpec(learner="er", stream=f"{tmp_path / 'untouchable.py'}:build")
    with pytest.raises(AssertionError, match="test data were touched"):
        execute(spec, device="cpu")  # an ordinary run does touch them
    tuned = tune(Search(spec), Store(tmp_path / "runs"), trials=3, name="safe", device="cpu")
    assert len(tuned.trials) == 3
    assert tuned.best.score > 80
    assert [record.spec["scenario"]["validation"] for record in Store(tmp_path / "runs")] == [0.1] * 3


def test_other_test_data_change_nothing(tmp_path):
    trials = []
    for seed in (1, 2):
        (tmp_path / f"otherwise{seed}.py").write_text(OTHERWISE.format(seed))
        spec = RunSpec(learner="er", stream=f"{tmp_path / f'otherwise{seed}.py'}:build")
        trials.append(tune(Search(spec), Store(tmp_path / f"runs{seed}"), trials=3, name="same", device="cpu").trials)
    assert trials[0] == trials[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--validation", "0"), "validation: got 0.0, expected a number above 0"),
        (("--set", "validation=0"), "validation: got 0.0, .* set `validation` of the search"),
        (("--set", "validation=0.2"), "validation: got 0.2, .* set `validation` of the search"),
        (("--set", "seed=9"), "seed: got 9, expected none for the run, .* `seeds` of the search sets how many"),
        (("--space", "lr"), "--space: got 'lr', expected NAME=VALUE; for example --space lr=0.01:0.3:log"),
        (("--space", "lrr=0.1:1"), "--space: got 'lrr', .* did you mean 'lr'"),
        (("--space", "lr=1:0.1"), "space lr: got '1:0.1', expected LOW:HIGH"),
        (("--space", "lr=0.1:1:2:3"), "space lr: got '0.1:1:2:3', expected LOW:HIGH"),
        (("--space", "lr=0.1:1:cubic"), "space lr: got '0.1:1:cubic', expected LOW:HIGH"),
        (("--space", "lr=0:1"), "lr: got 0.0, expected a number above 0"),
        (("--space", "lr=fast:slow"), "lr: got 'fast', expected a number above 0"),
        (("--space", "average=0:0.9:log"), "space average: got '0:0.9:log', expected a range above 0"),
        (("--space", "average=0.5:1.5"), "average: got 1.5"),
        (("--space", "replay=8:500"), "memory: got 200, expected a whole number of at least 500"),
        (("--space", "optimizer=SGD:Adam"), "space optimizer: got 'SGD:Adam'"),
        (("--space", "memory=50:500"), "^error: space: got 'memory'"),
        (("--space", "seed=0,1"), "^error: space: got 'seed'"),
        (("--space", "lr=0.1:1", "--set", "lr=0.1"), "--space: got 'lr', expected an option that --set leaves open"),
        (("--preset", "pcl-plus"), "--learner: got 'er', expected pcl, as in preset 'pcl-plus'"),
        (("--set", "lr=0.1"), "space: got nothing to tune, expected an option"),
        (("--metric", "accuracy"), "metric: got 'accuracy', expected one of aaa, acc, task_aaa, task_acc"),
        (("--prune", "--parallel", "2"), "parallel: got 2, expected 1"),
        (("--name", "a/b"), "name: got 'a/b'"),
        (("--device", "abacus"), "device: got 'abacus'"),
        (("--storage", "nonsense"), "storage: got 'nonsense', expected an Optuna storage"),
        (("--storage", "journal:no/such/folder"), "storage: got No such file or directory"),
        (("--storage", "sqlite:////no/such/folder/a.db"), "storage: got .* unable to open database file"),
        (("--storage", "postgresql+none://me:secret@host/a"), "storage: got 'postgresql.none://…@host/a'"),
    ],
)
def test_what_cannot_be_tuned_is_refused_at_once(parabolic, tmp_path, arguments, message):
    code, out, err = parabolic("tune", "--learner", "er", *arguments)
    assert (code, out) == (2, "")
    assert re.search(message, err)
    assert "secret" not in err
    assert not list(tmp_path.glob("runs/*/run.json"))


# -- what is searched ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(known_learners()))
def test_every_learner_says_where_its_best_values_may_lie(name):
    search = Search(RunSpec(learner=name))
    assert "lr" in search.ranges
    assert search.defaults.keys() == search.ranges.keys()  # its own values are among those that can be tried


def test_a_value_of_the_run_in_the_space_is_where_the_search_starts():
    spec = RunSpec(learner="der", batch=16, options={"lr": 0.07, "alpha": 0.5})
    search = Search(spec, {"lr": "0.01:0.3:log", "batch": "8,16"})
    assert search.ranges.keys() == {"lr", "batch"}  # alpha stays as it is
    assert search.fixed == {"alpha": 0.5}
    assert search.defaults == {"lr": 0.07, "batch": 16}
    (spec_tried,) = search.specs({"lr": 0.2, "batch": 8})
    assert (spec_tried.batch, spec_tried.options) == (8, {"lr": 0.2, "alpha": 0.5})
    assert Search(spec, {"lr": "0.1:0.3"}).outside == {"lr": 0.07}
    other_start = Search(RunSpec(learner="der", batch=16, options={"lr": 0.08, "alpha": 0.5}), dict(search.space))
    assert other_start.definition() != search.definition()  # it would not continue the same study


def test_a_default_that_is_no_number_lies_in_no_range():
    assert Search(RunSpec("er"), {"average": "0.5:0.9"}).outside == {"average": None}


def test_rounding_leaves_no_range():
    lr_range = Search(RunSpec("er"), {"lr": "0.12344:0.12346"}).ranges["lr"]
    assert [lr_range.nearest(value) for value in lr_range.ends] == [0.12344, 0.12346]


def test_searches_of_ranges_that_hardly_differ_are_two():
    first, second = (Search(RunSpec("er"), {"lr": f"{low}:1:log"}).definition() for low in ("0.0123456", "0.0123457"))
    assert first["space"] != second["space"]


def test_a_preset_can_be_tuned_further(parabolic, tmp_path):
    (tmp_path / "mine.toml").write_text(
        'learner = "der"\nstream = "seq-blobs"\nmemory = 60\n[settings]\nlr = 0.07\nalpha = 0.4\nbatch = 5\n'
    )
    code, out, err = parabolic(
        "tune", "--preset", "mine.toml", "--space", "lr=0.01:0.3:log", "--trials", "2", "--device", "cpu"
    )
    assert (code, err) == (0, "")
    assert "With the preset's values: " in out
    preset = load_preset("mine-seq-blobs")
    assert (preset.learner, preset.stream, preset.memory) == ("der", "seq-blobs", 60)
    assert [{*trial} for trial in preset.study["trials"]] == [{"score", "lr"}] * 2
    assert preset.study["trials"][0]["lr"] == 0.07
    assert preset.settings == {"alpha": 0.4, "batch": 5, "lr": preset.settings["lr"]}
    assert {run.spec["options"]["alpha"] for run in Store(tmp_path / "runs")} == {0.4}
    # What is set on the command line takes precedence, as for `run`.
    _, _, err = parabolic(
        "tune", "--preset", "mine.toml", "--set", "alpha=0.2", "--memory", "40", "--space", "lr=0.1:0.3",
        "--trials", "1", "--name", "other", "--device", "cpu",
    )  # fmt: skip
    assert err == "note: der: the preset's lr=0.07 is outside 0.1:0.3: no trial uses it\n"
    assert (load_preset("other").memory, load_preset("other").settings["alpha"]) == (40, 0.2)


def test_a_preset_is_tuned_alone(parabolic, tmp_path):
    code, _, err = parabolic("tune", "--preset", "pcl-plus", "--learners", "er,der")
    assert (code, err) == (2, "error: --preset: got 'pcl-plus', expected none with --learners; leave one of them out\n")
    (tmp_path / "far.toml").write_text('learner = "er"\nstream = "seq-cifar10"\n')
    code, _, err = parabolic("tune", "--preset", "far.toml", "--trials", "1")
    assert code == 2
    assert "or name another stream, as in --stream seq-digits: far is for seq-cifar10" in err


def test_every_weight_of_a_method_is_tuned():
    for name in known_learners():
        for option, field in RunSpec.learner_options(name).items():
            if field.about.startswith("weight of") and field.default:  # 0: it is off
                assert field.tune, f"{name}.{option}"


def test_a_better_learning_rate_is_found_and_helps_on_test_data(parabolic, tmp_path):
    (tmp_path / "timid.py").write_text(TIMID)
    common = ("--set", "backbone=mlp", "--device", "cpu")
    arguments = ("tune", "--learner", "timid.py:Timid", "--space", "lr=0.0001:1:log", "--trials", "6", "--name", "bold")
    code, out, err = parabolic(*arguments, *common)
    assert (code, err) == (0, "")
    assert "the best of 6 trials" in out
    assert "to use it: parabolic run --preset bold" in out
    preset = load_preset("bold")
    first = preset.study["trials"][0]
    assert first["lr"] == 0.0001  # the learner's own
    assert preset.study["score"] > first["score"] + 30
    assert preset.settings["lr"] > 0.01
    assert preset.study["score"] == max(trial["score"] for trial in preset.study["trials"])
    accuracy = {}
    for name, choice in (("own", ("--learner", "timid.py:Timid", *common)), ("tuned", ("--preset", "bold"))):
        record = json.loads(parabolic("run", *choice, "--json")[1])
        assert record["spec"]["backbone"] == "mlp"
        accuracy[name] = record["metrics"]["aaa"]
    assert accuracy["tuned"] > accuracy["own"] + 30
    # The same seed tries the same values, in another folder and with another name.
    repeated = json.loads(parabolic(*arguments, "--runs", "others", "--name", "again", *common, "--json")[1])
    assert load_preset("again").study["trials"] == preset.study["trials"]
    other_seed = (*arguments, "--seed", "1", "--name", "other", "--trials", "2")
    result = json.loads(parabolic(*other_seed, *common, "--json")[1])
    assert result["trials"][0] == repeated["trials"][0]
    assert result["trials"][1] != repeated["trials"][1]


def test_choices_whole_numbers_and_fields_of_a_run_can_be_tuned(tmp_path):
    space = {"average": "none,0.9", "replay": "8:32", "batch": "10,20"}
    tuned = tune(Search(BLOBS, space, seeds=2), Store(tmp_path), trials=4, device="cpu")
    for trial in tuned.trials:
        assert trial.values["average"] in (None, 0.9)
        assert isinstance(trial.values["replay"], int)
        assert trial.values["batch"] in (10, 20)
    records = {
        (record.spec["batch"], record.spec["options"]["lr"], record.spec["seed"]): record for record in Store(tmp_path)
    }
    for trial in tuned.trials:
        runs = [records[trial.values["batch"], trial.values["lr"], seed].metrics["aaa"] for seed in (0, 1)]
        assert trial.score == pytest.approx(sum(runs) / 2)


def test_choices_may_have_arguments_and_be_the_users_own(tmp_path):
    wide = "from parabolic import MLP\ndef wide(shape, classes): return MLP(shape, classes, (99,))"
    (tmp_path / "nets.py").write_text(wide)
    nets, optimizers = f"mlp,{tmp_path / 'nets.py'}:wide", "SGD(momentum=0.5, nesterov=True),Adam(betas=(0.9, 0.99))"
    search = Search(BLOBS, {"backbone": nets, "optimizer": optimizers, "lr": "0.01,0.02"})
    assert search.ranges["backbone"] == ("mlp", f"{tmp_path / 'nets.py'}:wide")
    assert search.ranges["optimizer"] == ("SGD(momentum=0.5, nesterov=True)", "Adam(betas=(0.9, 0.99))")
    tuned = tune(search, Store(tmp_path), trials=2, device="cpu")
    assert all(trial.values[name] in search.ranges[name] for trial in tuned.trials for name in trial.values)
    (tmp_path / "nets.py").write_text(wide.replace("99", "98"))
    with pytest.raises(InputError, match="study: got .* with code of .*nets.py:wide=.* original settings"):
        tune(search, Store(tmp_path), trials=3, device="cpu")


def test_runs_with_a_head_for_each_task_are_judged_with_the_task_told(tmp_path):
    spec = RunSpec("sgd", stream="seq-blobs", heads=True)
    assert (Search(spec).metric, Search(spec, metric="acc").metric, Search(BLOBS).metric) == ("task_aaa", "acc", "aaa")
    store, search = Store(tmp_path), Search(spec, {"lr": "0.0001,0.1"})
    [best, _] = sorted(tune(search, store, trials=2, device="cpu").trials, key=lambda trial: -trial.score)
    assert best.score == max(record.metrics["task_aaa"] for record in store)


@pytest.mark.parametrize("metric", ["task_aaa", "task_acc"])
def test_trials_may_be_judged_with_the_task_told(tmp_path, metric):
    store, search = Store(tmp_path), Search(BLOBS, {"lr": "0.01,0.1"}, metric=metric)
    for spec in search.specs({"lr": 0.01}) + search.specs({"lr": 0.1}):  # one that predates these figures is run again
        record, _ = run(spec, store, device="cpu")
        old_metrics = {name: value for name, value in record.metrics.items() if not name.startswith("task_")}
        store.save(replace(record, task_accuracy=[], metrics=old_metrics))
    tuned = tune(search, store, trials=2, device="cpu")
    scores = {record.spec["options"]["lr"]: record.metrics[metric] for record in store}
    assert [trial.score for trial in tuned.trials] == [
        pytest.approx(scores[trial.values["lr"]]) for trial in tuned.trials
    ]


def test_a_trial_judged_with_the_task_told_is_given_up_by_the_same_figures():
    reported, matrix = [], np.array([[50.0, np.nan], [10.0, 20.0]])
    trial = SimpleNamespace(report=lambda *values: reported.append(values), should_prune=lambda: False)
    for metric in ("aaa", "task_aaa"):
        state = SimpleNamespace(task=1, matrix=matrix, task_matrix=matrix + 60, measured={})
        Pruner(trial, metric).on_task(state)
    assert reported == [(15, 1), (75, 1)]


MINE = """
def far(state):
    return abs(state.learner.lr - 0.05)


far.better = "lower"


def near(state):
    return {"lr": -abs(state.learner.lr - 0.05), "task": state.task}


near.better = "higher"


def undecided(state):
    return 0
"""


@pytest.fixture
def measures_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)


@pytest.mark.parametrize(("metric", "sign"), [("far", 1), ("near.lr", -1)])
@pytest.mark.parametrize("prune", [False, True])
def test_trials_may_be_judged_by_a_measure_of_ones_own(tmp_path, measures_file, metric, sign, prune):
    spec = RunSpec("er", stream="seq-blobs", measure=f"mine.py:{metric.partition('.')[0]}")
    tuned = tune(Search(spec, {"lr": "0.01,0.04,0.5"}, metric, prune=prune), Store(tmp_path), trials=9, device="cpu")
    assert tuned.best.values["lr"] == 0.04
    assert tuned.best.score == pytest.approx(sign * 0.01)
    preset = tuned.preset()
    assert "measure" not in preset.settings  # it only looked on
    assert preset.study["score"] == pytest.approx(sign * 0.01)
    ends = [trial.score for trial in tuned.search.ranked(tuned.trials) if trial.score is not None]
    assert ends == sorted(ends, reverse=sign < 0)


@pytest.mark.parametrize(("metric", "score"), [("aaa", 0.12), ("far", 0.123457)])
def test_scores_are_written_with_two_decimals_in_percent_and_with_six_digits_by_a_measure(measures_file, metric, score):
    search = Search(RunSpec("er", stream="seq-blobs", measure="mine.py:far"), {"lr": "0.01,0.04"}, metric)
    trials = [Trial({"lr": 0.01}, 0.123456789), Trial({"lr": 0.04}, None)]
    study = Tuned("one", search, trials, 0, {}).preset().study
    assert study["score"] == score
    assert study["trials"] == [{"score": score, "lr": 0.01}, {"score": None, "lr": 0.04}]


def test_a_trial_of_which_a_run_diverged_has_no_score_by_a_measure(tmp_path, measures_file):
    spec = RunSpec("er", stream="seq-blobs", measure="mine.py:far")
    study = Study(Search(spec, {"lr": "0.01,0.04"}, "far", seeds=2), "one", optuna.storages.InMemoryStorage(), tmp_path)
    (trial,) = study.ask(1, total=1)
    study.tell(trial, [0.5, np.nan])
    assert [(trial.score, trial.diverged) for trial in study.trials] == [(None, 1)]


def test_a_search_by_a_measure_is_reported_in_its_own_units(parabolic, measures_file):
    arguments = ("--stream", "seq-blobs", "--set", "measure=mine.py:far", "--metric", "far", "--trials", "4")
    code, out, _ = parabolic("tune", "--learner", "er", *arguments, "--space", "lr=1e30,0.1", "--device", "cpu")
    assert code == 0
    assert "%" not in out.partition("Judged")[0]
    assert "– (1 diverged)" in out  # of a run that diverged no value is known
    assert "With the learner's default values: 0.05." in out
    code, _, err = parabolic("tune", "--learner", "sgd", *arguments, "--space", "lr=1e30,1e31", "--device", "cpu")
    assert (code, "got only trials that diverged" in err) == (2, True)


@pytest.mark.parametrize(
    ("measure", "metric", "message"),
    [
        ("mine.py:far", "fare", "metric: got 'fare', expected one of .*; did you mean 'far'"),
        (None, "far", "a measure of your own must be one of the run too"),
        ("mine.py:undecided", "undecided", "expected a measure whose attribute `better` is"),
        ("mine.py:near", "near.rate", "got 'near.rate', expected one of aaa, acc, near.lr, near.task, task_aaa,"),
    ],
)
def test_what_cannot_be_judged_by_is_refused(tmp_path, measures_file, measure, metric, message):
    spec = RunSpec("er", stream="seq-blobs", measure=measure)
    with pytest.raises(InputError, match=message):
        tune(Search(spec, {}, metric), Store(tmp_path), trials=1, device="cpu")


def test_a_run_that_diverges_has_learned_nothing(tmp_path):
    tuned = tune(Search(BLOBS, {"lr": "0.1,1e30"}), Store(tmp_path), trials=8, device="cpu")
    assert {trial.values["lr"]: trial.score == 0 for trial in tuned.trials} == {0.1: False, 1e30: True}


def test_a_trial_says_how_many_of_its_runs_diverged(parabolic):
    arguments = ("--space", "lr=1e30,0.1", "--trials", "4", "--seeds", "2", "--device", "cpu")
    code, out, err = parabolic("tune", "--learner", "er", "--stream", "seq-blobs", *arguments)
    assert code == 0, err
    assert "0.0 (2 diverged)" in out
    code, out, err = parabolic(
        "tune", "--learner", "er", "--stream", "seq-blobs", *arguments, "--json"
    )  # from the study
    assert {trial["values"]["lr"]: trial["diverged"] for trial in json.loads(out)["trials"]} == {0.1: 0, 1e30: 2}


def test_values_with_which_all_runs_diverge_become_no_preset(parabolic, tmp_path):
    arguments = ("--space", "lr=1e30,1e31", "--trials", "2", "--seeds", "2", "--device", "cpu")
    code, out, err = parabolic("tune", "--learner", "er", "--stream", "seq-blobs", *arguments)
    assert (code, out, "got only trials that diverged" in err) == (2, "", True)
    assert not (tmp_path / "presets").exists()


def test_a_default_value_that_no_trial_can_have_is_reported(parabolic):
    arguments = ("tune", "--learner", "er", "--stream", "seq-blobs", "--trials", "1", "--device", "cpu")
    code, _, err = parabolic(*arguments, "--space", "lr=0.2:0.3", "--name", "narrow")
    assert code == 0
    assert "note: er: the default lr=0.1 is outside 0.2:0.3: no trial uses it" in err
    assert "note" not in parabolic(*arguments, "--space", "lr=0.1:0.3")[2]


@pytest.mark.parametrize("running", [0, 2])
def test_trials_in_other_processes_are_reported(parabolic, monkeypatch, running):
    def fake_tune(search, *_, **__):
        return Tuned("one", search, [Trial(search.defaults, 50.0)], running, {})

    monkeypatch.setattr("parabolic.cli.tune.tune", fake_tune)
    _, out, _ = parabolic("tune", "--learner", "er", "--stream", "seq-blobs")
    assert ("Trials still running in other processes: 2." in out) == bool(running)


def test_the_score_of_the_default_values_is_told_also_if_they_were_tried_later(parabolic, monkeypatch):
    def found(search, *_, **__):  # as after a worker was killed in the first trial while another went on
        return Tuned("one", search, [Trial({"lr": 0.2}, 50.0), Trial({"lr": 0.1}, 40.0)], 0, {})

    monkeypatch.setattr("parabolic.cli.tune.tune", found)
    _, out, _ = parabolic("tune", "--learner", "er", "--stream", "seq-blobs")
    assert "With the learner's default values: 40.0 %." in out


def test_nothing_is_told_of_default_values_that_are_still_being_tried(parabolic, monkeypatch):
    def found(search, *_, **__):
        return Tuned("one", search, [Trial({"lr": 0.2}, 50.0)], 1, {})

    monkeypatch.setattr("parabolic.cli.tune.tune", found)
    code, out, _ = parabolic("tune", "--learner", "er", "--stream", "seq-blobs")
    assert (code, "default values" in out) == (0, False)
    assert "the best of 1 trial\n" in out


# -- the study -----------------------------------------------------------------------------------------------------


def test_a_study_goes_on_where_it_stopped(tmp_path):
    search = Search(BLOBS)
    studies = [tune(search, Store(tmp_path / "a"), trials=count, device="cpu") for count in (2, 3, 3, 11)]
    assert [len(study.trials) for study in studies] == [2, 3, 3, 11]
    at_once = tune(search, Store(tmp_path / "b"), trials=11, device="cpu")
    assert studies[-1].trials == at_once.trials
    assert len({trial.values["lr"] for trial in at_once.trials}) == 11


def test_a_study_is_called_by_the_names_of_its_learner_and_its_stream(tmp_path):
    (tmp_path / "own.py").write_text(
        "from parabolic import ER, Learner, make_stream\n"
        "class Derived(ER):\n    pass\n"
        "class Nameless(Learner):\n    pass\n"
        "class Named(ER):\n    name = 'mine'\n"
        "def build(seed):\n    return make_stream('seq-blobs', seed)\n"
    )
    paths = {learner: f"{tmp_path / 'own.py'}:{learner}" for learner in ("Derived", "Nameless", "Named")}
    names = {learner: tuning.study_name(RunSpec(path, stream="seq-blobs")) for learner, path in paths.items()}
    assert names == {"Derived": "Derived-seq-blobs", "Nameless": "Nameless-seq-blobs", "Named": "mine-seq-blobs"}
    assert tuning.study_name(RunSpec("er", stream=f"{tmp_path / 'own.py'}:build")) == "er-build"
    assert tuning.study_name(BLOBS, "mine") == "mine-seq-blobs"


def test_a_study_can_be_built_again_from_its_runs(tmp_path, monkeypatch):
    search, store = Search(BLOBS), Store(tmp_path)
    before = tune(search, store, trials=4, device="cpu")
    (tmp_path / "tune.db").unlink()

    def no_training(*args, **kwargs):
        raise AssertionError("trained again")

    monkeypatch.setattr(tuning, "execute_fleet", no_training)
    after = tune(search, store, trials=4, device="cpu")
    assert after.trials == before.trials


def test_a_preset_says_where_the_best_trial_was_run(tmp_path):
    search, store, storage = Search(BLOBS), Store(tmp_path / "runs"), f"sqlite:///{tmp_path}/a.db"
    (best,) = search.specs(tune(search, store, trials=2, storage=storage, device="cpu").best.values)
    record = store.ended(best)
    store.save(replace(record, environment={**record.environment, "processor": "abacus"}))
    environment = tune(search, store, trials=2, storage=storage, device="cpu").preset().study["environment"]
    assert environment["processor"] == "abacus"
    assert environment["optuna"] == optuna.__version__
    # If the study was kept and its runs were not, it says where they were looked for.
    environment = tune(search, Store(tmp_path), trials=2, storage=storage, device="cpu").preset().study["environment"]
    assert environment["processor"] != "abacus"


@pytest.mark.parametrize(
    ("changed", "differs"),
    [
        (Search(BLOBS, metric="acc"), "metric=acc, .* metric=aaa"),
        (Search(BLOBS, {"lr": "0.01:1:log"}), "space=lr=0.01:1:log, .* space=lr=0.001:1:log"),
        (Search(BLOBS, validation=0.2, seeds=2), "validation=0.2, seeds=2, .* validation=0.1, seeds=1"),
        (Search(RunSpec(learner="er", stream="seq-blobs", memory=100)), "memory=100, .* memory=200"),
        (Search(RunSpec(learner="er", stream="seq-blobs", options={"replay": 8})), "replay=8, .* replay=32"),
    ],
)
def test_a_study_goes_on_only_as_it_began(tmp_path, changed, differs):
    tune(Search(BLOBS), Store(tmp_path), trials=1, name="one", device="cpu")
    with pytest.raises(InputError, match=f"study: got 'one' with {differs}; give another name"):
        tune(changed, Store(tmp_path), trials=1, name="one", device="cpu")


def test_a_study_that_is_refused_leaves_no_connection_open(tmp_path):
    storage = optuna.storages.RDBStorage(f"sqlite:///{tmp_path}/a.db")
    tune(Search(BLOBS), Store(tmp_path), trials=1, name="one", storage=storage, device="cpu")
    with pytest.raises(InputError, match="study: got 'one'"):
        tune(Search(BLOBS, metric="acc"), Store(tmp_path), trials=1, name="one", storage=storage, device="cpu")
    assert storage.engine.pool.checkedin() + storage.engine.pool.checkedout() == 0


@pytest.mark.parametrize(("name", "change"), [("prune", (0.1, 0.2)), ("space", (3, 4))])
def test_a_learner_may_have_options_that_are_called_like_settings_of_a_search(tmp_path, name, change):
    file = tmp_path / "sparse.py"
    file.write_text(f"""
from parabolic import ER
from parabolic.options import option

class Sparse(ER):
    {name}: float = option(0.5, "how much is left out")
""")
    first, other = (Search(RunSpec(f"{file}:Sparse", "seq-blobs", options={name: value})) for value in change)
    tune(first, Store(tmp_path), trials=1, name="one", device="cpu")
    tune(first, Store(tmp_path), trials=2, name="one", device="cpu")
    with pytest.raises(InputError, match=f"study: got 'one' with {name}={change[1]}.*, expected .* {name}={change[0]}"):
        tune(other, Store(tmp_path), trials=2, name="one", device="cpu")


def test_a_study_goes_on_only_with_the_code_it_began_with(tmp_path):
    file = tmp_path / "timid.py"
    file.write_text(TIMID)
    search = Search(RunSpec(f"{file}:Timid", stream="seq-blobs", backbone="mlp"), {"lr": "0.01:1:log"})
    tune(search, Store(tmp_path), trials=1, name="one", device="cpu")
    tune(search, Store(tmp_path), trials=2, name="one", device="cpu")
    file.write_text(f"{TIMID}# edited")
    with pytest.raises(InputError, match="study: got 'one' with code=[0-9a-f]{12}, expected .*; give another name"):
        tune(search, Store(tmp_path), trials=3, name="one", device="cpu")


def test_a_study_from_before_code_was_noted_goes_on(tmp_path, monkeypatch):
    search, definition = Search(BLOBS), Search.definition

    def old_definition(self):
        return {name: value for name, value in definition(self).items() if name not in ("code", "data")}

    with monkeypatch.context() as patch:
        patch.setattr(Search, "definition", old_definition)
        tune(search, Store(tmp_path), trials=1, name="one", device="cpu")
    assert len(tune(search, Store(tmp_path), trials=2, name="one", device="cpu").trials) == 2


def test_a_study_whose_settings_were_refused_begins_anew_once_they_are_mended(tmp_path):
    refused = RunSpec("er", stream="seq-blobs", options={"average_part": 0.1})
    with pytest.raises(InputError, match="average_part: got 0.1, expected 1 without an average"):
        tune(Search(refused), Store(tmp_path), trials=1, name="one", device="cpu")
    assert len(tune(Search(BLOBS), Store(tmp_path), trials=1, name="one", device="cpu").trials) == 1


@pytest.mark.parametrize("storage", ["sqlite:///{}/a.db", "journal:{}/a.log"])
def test_a_study_can_be_kept_anywhere(tmp_path, storage):
    url = storage.format(tmp_path)
    for trials in (1, 3):
        tuned = tune(Search(BLOBS), Store(tmp_path / "runs"), trials=trials, storage=url, device="cpu")
    assert len(tuned.trials) == 3
    assert not (tmp_path / "runs" / "tune.db").exists()


def test_trials_that_are_asked_for_at_once_are_trained_by_shape(tmp_path, monkeypatch):
    fleets = []

    def record_fleet(specs, **kwargs):
        fleets.append(specs)
        return execute_fleet(specs, **kwargs)

    monkeypatch.setattr(tuning, "execute_fleet", record_fleet)
    search = Search(BLOBS, seeds=2)
    tuned = tune(search, Store(tmp_path / "a"), trials=5, parallel=2, device="cpu")
    assert len(tuned.trials) == 5
    assert sorted(spec.key for fleet in fleets for spec in fleet) == sorted(
        spec.key for trial in tuned.trials for spec in search.specs(trial.values)
    )
    assert all(len({spec.shape for spec in fleet}) == 1 for fleet in fleets)
    assert all(len(fleet) >= 2 for fleet in fleets)  # the seeds of a trial have one shape
    repeated = tune(search, Store(tmp_path / "b"), trials=5, parallel=2, device="cpu")
    assert repeated.trials == tuned.trials


def test_a_trial_that_does_badly_is_given_up_if_asked(tmp_path):
    search = Search(RunSpec(learner="er", backbone="mlp"), prune=True)
    tuned = tune(search, Store(tmp_path), trials=8, device="cpu")
    given_up = [trial for trial in tuned.trials if trial.score is None]
    assert given_up
    assert tuned.best.score == max(trial.score for trial in tuned.trials if trial.score is not None)
    stored_rates = {record.spec["options"]["lr"] for record in Store(tmp_path)}
    assert stored_rates == {trial.values["lr"] for trial in tuned.trials if trial.score is not None}
    (tmp_path / "tune.db").unlink()
    assert tune(search, Store(tmp_path), trials=8, device="cpu").trials == tuned.trials


# -- trouble -------------------------------------------------------------------------------------------------------


def test_what_fails_is_reported_and_tried_again_by_the_next_call(tmp_path, monkeypatch):
    search, calls = Search(BLOBS), []

    def fail(specs, **kwargs):
        calls.append(specs[0].options["lr"])
        for spec in specs:
            yield spec, OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(tuning, "execute_fleet", fail)
        for _ in range(2):
            with pytest.raises(OSError, match="no space left"):
                tune(search, Store(tmp_path / "a"), trials=3, device="cpu")
    assert calls == [0.1, 0.1]
    tuned = tune(search, Store(tmp_path / "a"), trials=3, device="cpu")
    assert tuned.trials == tune(search, Store(tmp_path / "b"), trials=3, device="cpu").trials


@pytest.mark.filterwarnings("ignore:unclosed database:ResourceWarning")  # by Optuna, if it cannot read one
@pytest.mark.parametrize("when", ["before", "in the middle"])
def test_a_damaged_storage_is_reported_in_a_line(tmp_path, when):
    def damage(trials=()):
        (tmp_path / "tune.db").write_bytes(b"damaged" * 1000)

    if when == "before":
        damage()
    with pytest.raises(InputError, match="storage: got 'sqlite:.*', expected an Optuna storage that works; .*database"):
        tune(Search(BLOBS), Store(tmp_path), trials=3, device="cpu", watch=damage)
    gc.collect()  # what warns
    (tmp_path / "tune.db").unlink()
    assert len(tune(Search(BLOBS), Store(tmp_path), trials=3, device="cpu").trials) == 3


def test_a_process_killed_before_it_could_sign_its_trial_leaves_it_to_the_next(tmp_path):
    code = (
        "import os, optuna\n"
        "optuna.Trial.set_user_attr = lambda *_: os.kill(os.getpid(), 9)\n"
        "from test_tune import BLOBS, Search, Store, tune\n"
        f"tune(Search(BLOBS), Store({str(tmp_path / 'runs')!r}), trials=2, device='cpu')\n"
    )
    killed = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, check=False, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = tune(Search(BLOBS), Store(tmp_path / "runs"), trials=2, device="cpu")
    undisturbed = tune(Search(BLOBS), Store(tmp_path / "others"), trials=2, device="cpu")
    assert len(resumed.trials) == 2
    assert resumed.trials == undisturbed.trials


def test_killed_or_stopped_at_any_moment_a_study_ends_like_an_undisturbed_one(tmp_path):
    command = [sys.executable, "-m", "parabolic", "tune", "--learner", "er", "--stream", "seq-blobs",
               "--trials", "6", "--seeds", "2", "--device", "cpu"]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PARABOLIC_PRESETS": str(tmp_path / "presets")}
    rng, finished = random.Random(0), {}
    for stop, runs in ((signal.SIGKILL, 3), (signal.SIGINT, 6)):
        with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as process:
            while len(list(tmp_path.glob("runs/*/run.json"))) < runs:
                assert process.poll() is None, process.stderr.read()
                time.sleep(0.01)
            time.sleep(rng.uniform(0, 0.2))
            process.send_signal(stop)
            _, errors = process.communicate()
        if stop == signal.SIGINT:
            assert process.returncode == 130
            assert errors == "stopped: finished trials are stored, and the same command resumes\n"
        finished_now = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/run.json")}
        assert finished.items() <= finished_now.items()  # what was there is not trained again
        finished = finished_now
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    assert finished.items() <= {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/run.json")}.items()
    undisturbed = tune(Search(BLOBS, seeds=2), Store(tmp_path / "others"), trials=6, device="cpu")
    preset = load_preset(str(tmp_path / "presets" / "er-seq-blobs.toml"))
    assert preset.study["trials"] == undisturbed.preset().study["trials"]
    assert len(list(tmp_path.glob("runs/*/run.json"))) == 12


MEETING = """
import os
import time
from pathlib import Path

from parabolic import make_stream


def build(seed):
    here = Path(__file__).parent
    (here / f"{os.getpid()}.here").touch()
    deadline = time.time() + 120
    while len(list(here.glob("*.here"))) < 2:
        assert time.time() < deadline, "no other process came"
        time.sleep(0.01)
    return make_stream("seq-blobs", seed)
"""


def test_several_processes_work_on_one_study(tmp_path):
    # A run waits until another process runs one too; the other process is the last to end, and is waited for.
    slow_end = (
        "import multiprocessing\n    time.sleep(2 * (multiprocessing.parent_process() is not None))\n    return make"
    )
    (tmp_path / "meeting.py").write_text(MEETING.replace("return make", slow_end))
    spec = RunSpec(learner="er", stream=f"{tmp_path / 'meeting.py'}:build")
    tuned = tune(Search(spec), Store(tmp_path / "runs"), trials=7, name="together", workers=2, device="cpu")
    assert len(list(tmp_path.glob("*.here"))) == 2
    assert (len(tuned.trials), tuned.running) == (7, 0)
    assert len(list(Store(tmp_path / "runs"))) == len({trial.values["lr"] for trial in tuned.trials}) == 7


def test_a_storage_that_other_processes_cannot_reach_is_refused(tmp_path):
    storage = optuna.storages.InMemoryStorage()
    with pytest.raises(InputError, match="storage: got .*, expected a URL if there are several workers"):
        tune(Search(BLOBS), Store(tmp_path), trials=1, storage=storage, workers=2, device="cpu")
    assert len(tune(Search(BLOBS), Store(tmp_path), trials=1, storage=storage, device="cpu").trials) == 1


def test_a_callback_that_is_no_list_is_refused(tmp_path):
    with pytest.raises(InputError, match="^callbacks: got .*, expected a list of Callbacks"):
        tune(Search(BLOBS), Store(tmp_path), trials=1, callbacks=Callback(), device="cpu")


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_the_process_that_started_them_in_the_middle_of_a_run(tmp_path, sent):
    (tmp_path / "meeting.py").write_text(MEETING.replace("return make", "time.sleep(600)\n    return make"))
    command = [sys.executable, "-m", "parabolic", "tune", "--learner", "er", "--stream", "meeting.py:build",
               "--name", "endless", "--trials", "100000", "--workers", "2", "--device", "cpu"]  # fmt: skip
    with subprocess.Popen(command, cwd=tmp_path) as process:
        while len(list(tmp_path.glob("*.here"))) < 2:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(sent)
        (worker,) = {int(path.stem) for path in tmp_path.glob("*.here")} - {process.pid}
    assert process.returncode == {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: 143}[sent]
    try:
        assert until(lambda: not alive(worker))
    finally:
        if alive(worker):
            kill(worker)


def test_an_error_ends_the_other_workers_too(tmp_path):
    def watch(trials):
        raise ValueError("of the one who watches")

    with pytest.raises(ValueError, match="of the one who watches"):
        tune(Search(BLOBS), Store(tmp_path), trials=100_000, workers=2, device="cpu", watch=watch)
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("name", ["a?b", "a#b", "a%20b", "{a}", "a b"])
def test_the_study_lies_in_the_folder_of_runs_whatever_it_is_called(tmp_path, name):
    tune(Search(BLOBS), Store(tmp_path / name), trials=1, device="cpu")
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name / "tune.db").is_file()


def test_a_trial_is_taken_over_from_the_dead_but_not_from_the_living(tmp_path):
    storage = optuna.storages.InMemoryStorage()
    search = Search(BLOBS)
    study = Study(search, "one", storage, tmp_path)
    (trial,) = study.ask(1, total=1)
    assert study.ask(1, total=1) == []  # there is no place left, and this process lives
    now = time.time()
    dead_process = subprocess.Popen([sys.executable, "-c", ""])
    dead_process.wait()
    host = trial.user_attrs["worker"].rpartition(":")[0]
    for worker, pulse, lives in (
        (f"elsewhere:{dead_process.pid}", now, True),
        (f"elsewhere:{dead_process.pid}", now - 1000, False),
        (f"{host}:{dead_process.pid}", now, False),
    ):
        trial.set_user_attr("worker", worker)
        trial.set_user_attr("pulse", pulse)
        taken_over = study.ask(1, total=1)
        assert bool(taken_over) != lives
        if taken_over:
            assert taken_over[0].params == trial.params
            study.tell(trial, [1.0])  # whom all thought dead comes back: too late
            (trial,) = taken_over
    study.tell(trial, [50.0])
    assert [trial.score for trial in study.trials] == [50.0]


def test_a_trial_that_is_given_back_is_tried_with_its_values_whatever_others_did_meanwhile(tmp_path):
    study = Study(Search(BLOBS), "one", optuna.storages.InMemoryStorage(), tmp_path)
    first, second = study.ask(2, total=3)
    study.tell(second, [50.0])
    study.give_back([first, second])  # of which only the first is unfinished
    assert [trial.params for trial in study.ask(3, total=2)] == [first.params]


def test_scores_of_a_trial_that_has_ended_change_nothing(tmp_path, monkeypatch):
    study = Study(Search(BLOBS), "one", optuna.storages.InMemoryStorage(), tmp_path)
    (trial,) = study.ask(1, total=1)
    study.tell(trial, [50.0])
    for scores in ([1.0], [np.nan], None):
        study.tell(trial, scores)
    assert [(ended.score, ended.diverged) for ended in study.trials] == [(50.0, 0)]

    def fail(*args, **kwargs):  # by a process that tells at the same moment
        raise optuna.exceptions.UpdateFinishedTrialError

    monkeypatch.setattr(study.study, "tell", fail)
    study.give_back([trial])
    assert len(study.study.trials) == 1  # it is not queued again


def test_a_trial_that_nobody_has_signed_yet_is_taken_over_only_if_all_who_may_have_begun_it_are_dead(tmp_path):
    dead_process = subprocess.Popen([sys.executable, "-c", ""])
    dead_process.wait()
    dead, alive = (f"worker {platform.node()}:{pid}" for pid in (dead_process.pid, os.getppid()))
    for workers, taken_over in (((), 0), ((dead, alive), 0), ((dead,), 1)):  # nobody known: it was begun just now
        study = Study(Search(BLOBS), "one", optuna.storages.InMemoryStorage(), tmp_path)
        study.study.ask(study.distributions)
        for worker in workers:
            study.study.set_user_attr(worker, time.time())
        assert len(study.ask(1, total=1)) == taken_over


def test_a_process_of_another_user_lives(monkeypatch):
    def fail(*args):
        raise PermissionError

    monkeypatch.setattr(os, "kill", fail)
    assert not study_module._is_dead(f"{platform.node()}:1")


def test_a_study_that_another_process_has_just_opened_is_not_deleted(tmp_path):
    storage = optuna.storages.InMemoryStorage()
    opened = Study(Search(BLOBS), "one", storage, tmp_path).study
    opened.set_user_attr(f"worker {platform.node()}:{os.getppid()}", time.time())
    with pytest.raises(InputError, match="^study: got 'one' with seeds=2, expected its original settings, seeds=1"):
        Study(Search(BLOBS, seeds=2), "one", storage, tmp_path)
    assert [study.study_name for study in storage.get_all_studies()] == ["one"]
    assert opened.user_attrs["definition"]["seeds"] == 1


def test_a_process_says_that_it_lives(tmp_path, monkeypatch):
    monkeypatch.setattr("parabolic.experiments.study.PULSE", 0.01)
    study = Study(Search(BLOBS), "one", optuna.storages.InMemoryStorage(), tmp_path)
    (trial,) = study.ask(1, total=1)
    set_user_attr, failed = trial.set_user_attr, []

    def fail_once(name, value):  # a storage that is busy at first
        if not failed:
            failed.append(name)
            raise RuntimeError
        set_user_attr(name, value)

    trial.set_user_attr = fail_once
    with study.pulse([trial]):
        assert until(lambda: "pulse" in study.study.trials[0].user_attrs)


def test_a_process_says_that_it_lives_while_it_trains(tmp_path, monkeypatch):
    storage = optuna.storages.InMemoryStorage()

    def has_pulse():
        (trial,) = optuna.load_study(study_name="one", storage=storage).trials
        return "pulse" in trial.user_attrs

    def train_slowly(specs, **kwargs):
        assert until(has_pulse)
        return execute_fleet(specs, **kwargs)

    monkeypatch.setattr("parabolic.experiments.study.PULSE", 0.01)
    monkeypatch.setattr(tuning, "execute_fleet", train_slowly)
    tune(Search(BLOBS), Store(tmp_path), trials=1, name="one", storage=storage, device="cpu")


def test_the_last_place_is_taken_once(tmp_path):
    """Two processes that both saw a free place: the one whose trial began later withdraws."""
    storage = optuna.storages.InMemoryStorage()
    first, second = (Study(Search(BLOBS), "one", storage, tmp_path) for _ in range(2))
    ask = first.study.ask

    def ask_late(distributions):
        assert len(second.ask(1, total=1)) == 1  # someone else asks in between
        return ask(distributions)

    first.study.ask = ask_late
    assert first.ask(1, total=1) == []
    assert first.running == 1


def test_without_optuna_the_rest_works_and_tuning_says_what_to_do():
    code = """
import sys
sys.modules["optuna"] = None  # as if it were not installed
from parabolic.cli import app, main
app(["presets"], standalone_mode=False)
sys.argv = ["parabolic", "tune"]
main()
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.returncode == 2
    assert "pcl-plus" in process.stdout
    assert process.stderr == (
        "error: tune: got no Optuna, expected it to be installed; pip install 'parabolic-cl[tune]'\n"
    )


def test_the_page_on_tuning(parabolic, tmp_path, monkeypatch):
    page = (Path(__file__).parent.parent / "docs" / "experiments.md").read_text()
    codes = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "Search(" in block]
    (preset,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names = {}
    for code in codes:
        exec(compile(code, "experiments.md", "exec"), names)
    assert names["spec"].seed == 3
    (command,) = re.findall(r"^parabolic (tune --preset .*)$", page, re.MULTILINE)
    code, out, _ = parabolic(*command.split())
    assert (code, "the best of 3 trials" in out) == (0, True)
    tuned, plus = load_preset("pcl-plus-seq-blobs"), load_preset("pcl-plus")
    assert tuned.study["trials"] == names["tuned"].preset().study["trials"]  # the same study
    assert tuned.study["trials"][0]["lr"] == plus.settings["lr"]
    assert tuned.settings.items() >= (plus.settings.items() - {("lr", plus.settings["lr"])})
    assert len(tuned.study["trials"]) == 3
    assert all("lr" in trial and "repeats" not in trial for trial in tuned.study["trials"])
    (tmp_path / "mine.toml").write_text(preset)
    assert load_preset("mine.toml").spec().options == {"variant": "reference", "average": 0.99, "average_part": 0.1}
