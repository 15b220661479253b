"""Runs that diverged: results that are kept, counted beside the others, and not trained again."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from made_up import AROUND, save_few_runs
from recorded import made_up

from parabolic import RunSpec, Store, run
from parabolic.engine import Diverged
from parabolic.experiments import BackedStore, Records, Search, execution, run_grid, tune, write_records
from parabolic.experiments.execution import execute_fleet
from parabolic.experiments.paper import Selection
from parabolic.report.page import page_of

SHAKY = """
from parabolic import SGD


class Shaky(SGD):
    name = "shaky"

    def loss(self, batch, recalled):  # in task 2, of which the first step is the thirtieth
        return super().loss(batch, recalled) * (float("nan") if self.seed % 2 and self.steps > 40 else 1)
"""
HOT = RunSpec("sgd", backbone="mlp", options={"lr": 1e6})
WHY = "sgd on seq-digits, seed 0: the loss became nan in task 1, by step 29: lower lr (now 1e+06) or set clip_norm"
COMPARED = (
    "compare", "--learners", "shaky.py:Shaky,sgd", "--seeds", "3", "--set", "sgd.lr=1e6", "--set", "backbone=mlp",
    "--workers", "0", "--device", "cpu", "--metrics", "acc",
)  # fmt: skip


@pytest.fixture
def trained(monkeypatch):
    """The learners and seeds that are trained from here on."""
    train_fleet_before, trained_runs = execution.train_fleet, []

    def train_fleet(fleet, *others, **options):
        trained_runs.extend((learner.name, learner.seed) for learner in fleet.learners)
        return train_fleet_before(fleet, *others, **options)

    monkeypatch.setattr(execution, "train_fleet", train_fleet)
    return trained_runs


@pytest.fixture
def compare_again(parabolic, tmp_path, trained):
    """A comparison in which one of three runs of a row diverged, and all of another; it returns what is printed."""
    (tmp_path / "shaky.py").write_text(SHAKY)
    code, _, err = parabolic(*COMPARED)
    assert code == 0, err
    assert len(trained) == 6
    trained.clear()
    return lambda *options: parabolic(*COMPARED, *options)


def diverged_record(spec, reason="the loss became nan in task 1, by step 3", **environment):
    """A run that diverged as it would be in a store, without its training."""
    run = made_up(spec, **environment)
    return replace(run, metrics={}, accuracy=[], train_seconds=[0.5], test_seconds=[], diverged=reason)


# -- one run -------------------------------------------------------------------------------------------------------


def test_a_run_that_diverged_is_kept_and_trained_again_only_when_asked(parabolic, tmp_path, trained):
    arguments = ("run", "--learner", "sgd", "--set", "lr=1e6", "--set", "backbone=mlp", "--device", "cpu")
    assert parabolic(*arguments) == (1, "", f"error: {WHY}\n")
    [record] = Store(tmp_path / "runs").every()
    assert (record.diverged, record.steps, record.metrics, record.accuracy) == (WHY, 29, {}, [])
    assert record.spec == HOT.resolved()
    assert len(record.train_seconds) == 1
    assert record.environment["command"] == "parabolic run --learner sgd --set lr=1e6 --set backbone=mlp --device cpu"
    assert parabolic("runs", "--failed")[1].startswith("0 failed runs")

    note = f"found in runs/{record.key}, and trained again only with again=True (--again)"
    assert parabolic(*arguments) == (1, "", f"error: {WHY}; {note}\n")
    assert trained == [("sgd", 0)]
    assert parabolic(*arguments, "--again") == (1, "", f"error: {WHY}\n")
    assert trained == [("sgd", 0)] * 2


def test_who_looks_for_results_does_not_get_a_run_that_diverged(tmp_path):
    store = Store(tmp_path)
    with pytest.raises(Diverged, match="lower lr"):
        run(HOT, store, device="cpu")
    assert store.find(HOT) is None
    assert list(store) == []
    assert store.ended(HOT).diverged == WHY
    outcome = run_grid([HOT], store, device="cpu")
    assert (outcome.records, list(outcome.diverged), outcome.reused, outcome.trained) == ({}, [HOT.key], 1, 0)
    assert store.ended(replace(HOT, options={"lr": 2e6})) is None  # another run


def test_the_tasks_before_it_diverged_are_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("shaky.py").write_text(SHAKY)
    spec = RunSpec("shaky.py:Shaky", backbone="mlp")
    (_, sound), (_, shaky) = execute_fleet([spec, replace(spec, seed=1)], device="cpu")
    assert re.search("seed 1: the loss became nan in task 2, by step 5", shaky.diverged)
    assert (len(shaky.train_seconds), len(shaky.test_seconds)) == (2, 1)
    assert [len(row) for row in shaky.accuracy] == [len(row) for row in shaky.task_accuracy] == [1]
    assert len(sound.accuracy) == 5
    store = Store("runs")
    store.save(shaky)
    assert store.every() == [shaky]
    Path("shaky.py").write_text(SHAKY + "# changed\n")
    assert store.ended(replace(spec, seed=1)) is None  # of older code, as with a finished run


def test_a_run_that_failed_before_it_diverged_is_no_failure_any_more(tmp_path):
    store = Store(tmp_path)
    store.save_failure(HOT, "no luck")  # or diverged, as it was noted once
    assert run_grid([HOT], store, workers=0, device="cpu").trained == 1
    assert store.failures() == []
    assert [path.name for path in store.path(HOT.key).iterdir()] == ["run.json"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"diverged": None}, "it does not say how it diverged"),
        ({"metrics": {"acc": 1.0, "aaa": 1.0, "forgetting": 0.0}}, "its figures are missing or not finite"),
        ({"diverged": ""}, "its parts are missing"),
    ],
)
def test_a_run_that_half_diverged_is_damaged(tmp_path, change, reason):
    store, spec = Store(tmp_path), RunSpec("sgd", stream="seq-cifar10")
    path = store.save(replace(diverged_record(spec), **change)) / "run.json"
    assert store.ended(spec) is None
    assert store.unreadable()[path].startswith(reason)


# -- comparisons ---------------------------------------------------------------------------------------------------


def test_a_grid_trains_none_again_but_when_asked(compare_again, trained):
    code, out, err = compare_again()
    assert (code, trained) == (0, [])
    assert "6 runs, 6 of them already there (runs), 4 diverged\n" in out
    assert re.search(r"all classes competing, is: shaky \d+\s+% \(1 diverged\)", out)
    assert "shaky.py:Shaky on" not in err
    assert "shaky on seq-digits, seed 1: the loss became nan in task 2, by step 5" in err
    assert err.endswith("Diverged runs: 4. They are kept, and not tried again.\n")
    compare_again("--again")
    assert len(trained) == 6


def test_tables_say_how_many_diverged_in_every_format(compare_again):
    assert re.search(
        r"│ shaky +│ +\d+\.\d ± \d+\.\d \(n=2, 1 diverged\) │\n│ sgd +│ +– \(n=0, 3 diverged\) │", compare_again()[1]
    )
    for format, shaky, sgd in (
        ("markdown", r"\| shaky \| \d+\.\d ± \d+\.\d \(n=2, 1 diverged\) \|", r"\| sgd \| – \(n=0, 3 diverged\) \|"),
        ("latex", r"shaky & \d+\.\d \$_{\\pm \d+\.\d}\$ \(n\$=\$2, 1 diverged\)", r"sgd & -- \(n\$=\$0, 3 diverged\)"),
    ):
        out = compare_again("--format", format)[1]
        assert re.search(shaky, out)
        assert re.search(sgd, out)
        assert "(n): the number of seeds, if some are missing or diverged." in out
    [table] = json.loads(compare_again("--format", "json")[1])
    [[shaky], [sgd]] = [row["cells"] for row in table["rows"]]
    assert (shaky["diverged"], shaky["ours"]["n"], list(shaky["by_seed"])) == (1, 2, ["0", "2"])
    assert (sgd["diverged"], sgd["ours"]) == (3, None)
    assert [list(row["keys"]) for row in table["rows"]] == [["0", "1", "2"]] * 2
    result = json.loads(compare_again("--json")[1])
    assert [len(result[name]) for name in ("runs", "diverged", "failed")] == [2, 4, 0]


def test_the_list_of_runs_shows_which_diverged_and_why(compare_again, parabolic):
    out = parabolic("runs")[1]
    assert len(re.findall(r" diverged  – ", out)) == 4
    assert out.endswith("6 runs in runs\n4 of them diverged: parabolic runs --diverged\n")
    out = parabolic("runs", "--diverged", "--learner", "sgd")[1]
    assert WHY in out
    assert out.endswith("3 diverged runs in runs\n")
    result = json.loads(parabolic("runs", "--diverged", "--json")[1])
    assert (len(result["runs"]), result["diverged"], result["failed"]) == (4, 4, 0)
    assert {row["diverged"] for row in result["runs"] if row["learner"] == "sgd" and row["seed"] == 0} == {WHY}
    error = parabolic("plot", "--learner", "sgd")[2]
    assert "got no finished runs that fit in runs, expected at least one; 3 runs diverged: parabolic runs" in error
    assert "--failed: got it with --diverged" in parabolic("runs", "--diverged", "--failed")[2]


def test_a_failed_run_is_tried_again_beside_one_that_diverged(parabolic, tmp_path, trained):
    text = SHAKY.replace('float("nan")', "1 / 0")
    (tmp_path / "shaky.py").write_text(text)
    for tries in (1, 2):
        code, _, err = parabolic(*COMPARED)
        assert code == 1
        assert "Failed runs: 1. The same command tries them again." in err
        assert trained.count(("shaky", 1)) == tries
        assert trained.count(("sgd", 1)) == 1


def test_the_page_shows_which_runs_diverged(tmp_path):
    store = Store(tmp_path)
    save_few_runs(store)
    for seed in range(3):
        spec = RunSpec("ewc", seed=seed)
        store.save(replace(diverged_record(spec), environment=AROUND))
    store.save(replace(diverged_record(RunSpec("er", seed=2)), environment=AROUND))
    page = page_of(store)
    text = " ".join(re.sub(r"<[^>]*>", "", re.sub(r"<(style|script)\b.*?</\1>", "", page, flags=re.DOTALL)).split())
    assert "8 finished runs, 4 diverged;" in text
    assert "er: diverged with seed 2 (the loss became nan in task 1, by step 3)." in text
    assert "Not run" not in text
    assert "all classes competing (the mean of 2 seeds; 1 more diverged)." in text
    assert "(n=2, 1 diverged)" in text
    assert "– (n=0, 3 diverged)" in text
    assert text.count("diverged: the loss became nan in task 1, by step 3") == 4
    key = RunSpec("er", seed=2).key
    assert re.search(rf'data-runs="\w+ \w+ {key}"', page)  # a click on the figure shows it, too
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])
    assert data["runs"][key]["how"] == "diverged"
    assert data["surroundings"][data["runs"][key]["around"]]["torch"] == AROUND["torch"]


# -- records and the paper -----------------------------------------------------------------------------------------


def test_records_bring_back_what_diverged(compare_again, parabolic, tmp_path):
    assert "(6 runs written, 6 in the file)" in parabolic("runs", "--records", "a.jsonl")[1]
    [line] = [line for line in Path("a.jsonl").read_text().splitlines() if WHY in line]
    assert len(line) < 1500
    [record] = [run for run in Records(tmp_path / "a.jsonl").every() if run.diverged == WHY]
    stored = Store(tmp_path / "runs").ended(HOT)
    assert (record.key, record.spec, record.steps) == (stored.key, stored.spec, stored.steps)
    assert record.train_seconds == pytest.approx(stored.train_seconds, abs=1e-3)
    assert parabolic("runs", "--diverged", "--records", "b.jsonl")[0] == 0
    assert len(Records(tmp_path / "b.jsonl").every()) == 4
    backed = BackedStore(tmp_path / "none", Records(tmp_path / "a.jsonl"))
    assert backed.find(HOT) is None
    assert len(backed.every()) - len(list(backed)) == 4
    assert run_grid([HOT], backed, workers=0, device="cpu").reused == 1


def test_of_a_run_that_diverged_once_and_finished_once_the_newer_counts(tmp_path):
    spec, path = RunSpec("er", stream="seq-cifar10"), tmp_path / "a.jsonl"
    early, late = "2026-11-15T10:00:00+00:00", "2026-11-16T10:00:00+00:00"
    write_records([diverged_record(spec, finished=early)], path)
    assert write_records([made_up(spec, finished=late)], path) == 1
    assert Records(path).find(spec) is not None
    write_records([diverged_record(spec, finished=early)], path)
    assert Records(path).find(spec) is not None
    write_records([diverged_record(spec, finished="2026-11-17T10:00:00+00:00")], path)
    assert (Records(path).find(spec), Records(path).ended(spec).diverged != "") == (None, True)


def test_the_papers_tables_count_what_diverged_as_done(parabolic, tmp_path, monkeypatch):
    monkeypatch.setenv("PARABOLIC_RECORDS", str(tmp_path / "records"))
    selection = Selection(("main", "bounds"), learners=("pcl",))
    runs = [(diverged_record if spec.seed > 2 else made_up)(spec) for spec in selection.runs]
    write_records(runs, tmp_path / "records" / "main.jsonl")
    code, out, err = parabolic("paper", "main", "--learners", "pcl", "--show")
    assert (code, err) == (0, "")
    assert "30 of 30 runs are records" in out  # the paper's, and as its text has it
    assert "30 runs, 0 of them already there (runs), 30 records, 12 diverged\n" in out
    assert "missing." not in out
    assert "(n=3, 2 diverged)" in out
    [table] = json.loads(parabolic("paper", "main", "--learners", "pcl", "--show", "--format", "json")[1])
    assert {(cell["ours"]["n"], cell["diverged"]) for row in table["rows"] for cell in row["cells"]} == {(3, 2)}
    bounds = json.loads(parabolic("paper", "bounds", "--show", "--format", "json")[1])
    assert {cell["diverged"] for bounds_table in bounds for row in bounds_table["rows"] for cell in row["cells"]} == {2}
    plan = json.loads(parabolic("paper", "main", "--learners", "pcl", "--dry-run", "--format", "json")[1])
    assert (plan["all"]["runs"], plan["all"]["done"]) == (30, 30)


# -- tuning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prune", [False, True])
def test_a_lost_study_is_rebuilt_without_training_what_diverged(tmp_path, monkeypatch, trained, prune):
    monkeypatch.chdir(tmp_path)
    Path("shaky.py").write_text(SHAKY.replace("self.seed % 2", "self.lr > 0.1"))
    spec = RunSpec("shaky.py:Shaky", backbone="mlp")
    search, store = Search(spec, {"lr": "0.1,0.2,0.3,0.4"}, prune=prune), Store("runs")
    first = tune(search, store, trials=4, device="cpu")
    assert {trial.values["lr"] > 0.1: trial.diverged for trial in first.trials} == {False: 0, True: 1}
    Path("runs/tune.db").unlink()
    trained.clear()
    rebuilt = tune(search, store, trials=4, device="cpu")
    assert rebuilt.trials == first.trials
    if not prune:  # a pruned trial is trained until it is pruned again
        assert trained == []
