"""Measures of one's own: what is asked after every task is kept with the figures of the run, and changes nothing."""

import csv
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from parabolic import ER, MLP, InputError, Joint, RunSpec, Store, make_stream, run, train
from parabolic.engine import Callback
from parabolic.experiments import Records, execute, run_grid, write_records
from parabolic.experiments.execution import build
from parabolic.report.scenes import find_scenes, results_of

SPEC = {"learner": "er", "stream": "seq-blobs", "batch": 50, "backbone": "mlp"}

MINE = """
import torch


def length(state):
    weights = torch.cat([weight.flatten() for weight in state.learner.model.parameters()])
    return {factor} * weights.norm()


length.better = "lower"


def drawn(state):
    torch.randn(3)
    torch.randn(2, generator=state.learner.generator)
    return state.task
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE.format(factor=1))
    return tmp_path


def learner_and_stream(learner_class=ER):
    stream = make_stream("seq-digits")
    return learner_class(MLP(stream.shape, stream.classes)), stream


def test_measures_are_taken_after_every_task_before_callbacks_are_called():
    learner, stream = learner_and_stream()
    measured_so_far = []

    class Watch(Callback):
        def on_task(self, state):
            measured_so_far.append({name: list(values) for name, values in state.measured.items()})

    measures = {"step": lambda state: state.step, "best": lambda state: state.matrix[state.task, 0]}
    state = train(learner, stream, batch=10, callbacks=[Watch()], measures=measures)
    steps = np.cumsum([len(task.batches(10)) for task in stream]).tolist()
    assert state.measured == {"step": steps, "best": state.matrix[:, 0].tolist()}
    assert measured_so_far == [
        {"step": steps[:tasks], "best": state.matrix[:tasks, 0].tolist()} for tasks in range(1, 6)
    ]
    assert state.metrics["step"] == 146
    assert state.metrics["acc"] == pytest.approx(state.matrix[-1].mean())


def test_what_learns_all_tasks_at_once_is_asked_once():
    state = train(*learner_and_stream(Joint), batch=10, measures={"step": lambda state: state.step})
    assert len(state.measured["step"]) == 1


def test_draws_of_a_measure_leave_the_run_as_it_is(folder):
    plain, measured = (
        execute(RunSpec(**SPEC, **options)) for options in ({}, {"measure": "mine.py:drawn, mine.py:length"})
    )
    assert plain.accuracy == measured.accuracy
    assert measured.measured["drawn"] == [0, 1, 2]
    assert set(measured.metrics) - set(plain.metrics) == {"drawn", "length"}
    assert plain.measured == {}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "measure mine: got nan, expected a finite number"),
        ("many", "measure mine: got 'many', expected a number"),
        (None, "measure mine: got None, expected a number"),
        (torch.tensor(1j), "measure mine: got .*, expected a number"),
        (10**400, "measure mine: got .*, expected a number"),
    ],
)
def test_what_is_no_number_is_refused(value, message):
    with pytest.raises(InputError, match=message):
        train(*learner_and_stream(), batch=10, measures={"mine": lambda _: value})


def test_a_measure_may_return_several_numbers():
    measures = {"mine": lambda state: {"step": state.step, "task": torch.tensor(state.task)}, "one": lambda _: 1}
    state = train(*learner_and_stream(), batch=10, measures=measures)
    assert state.measured["mine.task"] == [0, 1, 2, 3, 4]
    assert state.measured["mine.step"][-1] == state.metrics["mine.step"] == state.step
    assert state.measured.keys() == {"mine.step", "mine.task", "one"}


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ([{}], r"measure mine: got \[\], expected at least one number"),
        ([{"a": "many"}], "measure mine.a: got 'many', expected a number"),
        ([{"a": 1}, {"b": 1}], r"measure mine: got \['mine.b'\], expected mine.a, as before"),
        ([1, {"a": 1}], r"measure mine: got \['mine.a'\], expected mine, as before"),
        ([{"a": 1, "b": 2}, {"a": 1}], r"measure mine: got \['mine.a'\], expected mine.a, mine.b, as before"),
    ],
)
def test_several_numbers_must_be_the_same_ones_after_every_task(numbers, message):
    with pytest.raises(InputError, match=message):
        train(*learner_and_stream(), batch=10, measures={"mine": lambda state: numbers[state.task]})


def test_each_of_several_numbers_has_a_column(folder, parabolic):
    (folder / "several.py").write_text("def mine(state): return {'low': state.task, 'high': 2 * state.task}")
    args = ("compare", "--learners", "er", "--stream", "seq-blobs", "--seeds", "1", "--set", "measure=several.py:mine")
    _, out, _ = parabolic(*args, "--format", "json")
    [table] = json.loads(out)
    assert [column["title"] for column in table["columns"]][-2:] == ["mine.low", "mine.high"]
    assert [cell["by_seed"]["0"] for cell in table["rows"][0]["cells"]][-2:] == [2, 4]
    _, out, _ = parabolic(*args, "--format", "json", "--metrics", "mine.high,acc")
    [table] = json.loads(out)
    assert table["rows"][0]["cells"][0]["by_seed"] == {"0": 4}
    for unknown, known in (("their.high", "acc"), ("mine.hihg", "mine.high, mine.low")):
        code, _, err = parabolic(*args, "--metrics", unknown)
        assert (code, f"got '{unknown}', expected one of" in err, known in err) == (2, True, True)


def test_what_cannot_be_asked_is_refused_before_the_first_step(folder):
    learner, stream = learner_and_stream()
    for measures, message in (
        ({"mine": 3}, r"measure: got 3, expected a function that is called as measure\(state\)"),
        ({"mine": lambda: 0}, "expected a function that is called"),
        ({"acc": lambda _: 0}, "measure: got 'acc', expected a name that no other metric has"),
        ([len], "measures: got .*, expected a dict of functions"),
        ({"": lambda _: 0}, "measures: got '', expected names that are texts"),
        ({None: lambda _: 0}, "measures: got None, expected names that are texts"),
        ({"a": lambda _: {"b": 1}, "a.b": lambda _: 2}, "measures: got 'a.b', expected names .* without a dot"),
    ):
        with pytest.raises(InputError, match=message):
            train(learner, stream, measures=measures)
    assert learner.steps == 0
    (folder / "other.py").write_text("def length(state): ...\ndef task_acc(state): ...")
    for measure, message in (
        ("length", "measure: got 'length', expected file.py:function"),
        ("mine.py:lenght", "measure: got 'mine.py:lenght', expected a name that mine.py defines"),
        ("mine.py:length,other.py:length", "expected functions with different names"),
        ("other.py:task_acc", "measure: got 'task_acc', expected a name that no other metric has"),
    ):
        with pytest.raises(InputError, match=message):
            RunSpec(measure=measure)


def test_a_run_keeps_what_was_measured_and_is_another_where_that_is_another(folder):
    spec, store = RunSpec(**SPEC, measure="mine.py:length"), Store("runs")
    assert spec.key != RunSpec(**SPEC).key
    record, _ = run(spec, store, device="cpu")
    learner, stream = build(spec, "cpu")
    train(learner, stream, batch=50)
    norm = torch.cat([weight.detach().flatten() for weight in learner.model.parameters()]).norm()
    assert record.metrics["length"] == record.measured["length"][-1] == pytest.approx(float(norm))
    assert store.find(spec) == record
    (folder / "mine.py").write_text(MINE.format(factor=2))
    assert store.find(spec) is None  # what it measured is not what it would measure
    assert run(spec, store, device="cpu")[0].metrics["length"] == pytest.approx(2 * float(norm))


MADE = """
from functools import partial

from parabolic import MLP
from given import twice


def scaled(factor, state):
    return factor * state.step


part = partial(scaled, {factor})
small = partial(MLP, hidden=({factor},))


@twice
def doubled(state):
    return {factor}
"""


@pytest.mark.parametrize(
    "options", [{"measure": "made.py:part"}, {"measure": "made.py:doubled"}, {"backbone": "made.py:small"}]
)
def test_what_a_file_makes_of_another_modules_functions_is_of_that_file(folder, options):
    """A partial says that it is of functools, and a wrapped function that it is of the wrapper's module."""
    (folder / "given.py").write_text("def twice(function):\n    return lambda state: 2 * function(state)\n")
    (folder / "made.py").write_text(MADE.format(factor=3))
    spec, store = RunSpec(**SPEC | options), Store("runs")
    run(spec, store, device="cpu")
    assert store.find(spec) is not None
    (folder / "made.py").write_text(MADE.format(factor=4))
    assert store.find(spec) is None


def test_a_measure_of_one_row_alone_and_two_of_one_name(parabolic, folder):
    arguments = ("compare", "--learners", "er,joint", "--stream", "seq-blobs", "--seeds", "1", "--workers", "0")
    (folder / "mine.py").write_text("def my_forgetting(state): return 3\ndef other(state): return 4")
    code, out, _ = parabolic(*arguments, "--set", "measure=mine.py:my_forgetting", "--format", "markdown")
    joint = next(line for line in out.splitlines() if line.startswith("| joint"))
    assert (code, joint.split(" | ")[5].strip(" |")) == (0, "3.000")
    code, out, _ = parabolic(*arguments, "--set", "er.measure=mine.py:other")
    assert code == 0
    assert "before one of these figures" not in out
    (folder / "two.py").write_text("def other(state): return 5")
    code, _, err = parabolic(*arguments, "--set", "er.measure=mine.py:other", "--set", "joint.measure=two.py:other")
    assert (code, "measure: got 'other', expected one function for each column" in " ".join(err.split())) == (2, True)


def test_a_record_whose_figure_is_not_what_was_measured_is_none(folder):
    spec, store = RunSpec(**SPEC, measure="mine.py:length"), Store("runs")
    run(spec, store, device="cpu")
    path = store.path(spec.key) / "run.json"
    content = json.loads(path.read_text())
    content["metrics"]["length"] += 1
    path.write_text(json.dumps(content))
    assert store.find(spec) is None
    assert store.unreadable()[path] == "its length does not match its measures"


def test_records_keep_what_was_measured(folder):
    spec = RunSpec(**SPEC, measure="mine.py:length")
    record, _ = run(spec, Store("runs"), device="cpu")
    write_records([record], folder / "kept.jsonl")
    stored = Records(folder / "kept.jsonl").find(spec)
    assert (stored.measured, stored.metrics["length"]) == (record.measured, record.metrics["length"])


def test_a_run_that_was_stopped_has_what_was_measured_before(folder):
    class Stop(Callback):
        def on_step(self, state):
            if state.step == 20:
                raise KeyboardInterrupt

    spec, store = RunSpec(**SPEC, measure="mine.py:length"), Store("runs")
    with pytest.raises(KeyboardInterrupt):
        run(spec, store, device="cpu", checkpoint=1e-9, callbacks=[Stop()])
    record, _ = run(spec, store, device="cpu")
    assert record.environment["resumed"] == 1
    assert record.measured == execute(spec, device="cpu").measured


def test_workers_of_a_grid_measure_too(folder, monkeypatch):
    specs = [RunSpec(**SPEC, measure="mine.py:length", seed=seed) for seed in range(2)]
    outcome = run_grid(specs, Store("runs"), workers=2, device="cpu")
    assert [len(run.measured["length"]) for run in outcome.records.values()] == [3, 3]
    monkeypatch.setattr(sys.modules["__main__"], "mine", lambda _: 0, raising=False)
    spec = RunSpec(**SPEC, measure="mine.py:length,__main__:mine")
    assert run_grid([spec], Store("runs"), workers=0, device="cpu").trained == 1
    with pytest.raises(InputError, match="^measure: got .*, expected a name that worker processes can import"):
        run_grid([spec], Store("others"), workers=1, device="cpu")


def test_a_comparison_has_a_column_for_each(parabolic, folder):
    settings = ("--stream", "seq-blobs", "--set", "batch=50", "--set", "measure=mine.py:length,mine.py:drawn")
    arguments = ("compare", "--learners", "er,sgd", "--seeds", "2", "--workers", "0", *settings, "--format", "markdown")
    code, out, err = parabolic(*arguments)
    assert (code, err) == (0, "")
    title, _, head, _, er, sgd, *_ = out.splitlines()
    assert title == "**seq-blobs, memory 200, batch=50**"
    assert head == "| learner | Acc % | AAA % | forgetting | seconds | length | drawn |"
    lengths = [row.split(" | ")[5] for row in (er, sgd)]
    values = [float(cell.split()[0].strip("*<>/ins")) for cell in lengths]
    assert [cell.startswith("**") for cell in lengths] == [value == min(values) for value in values]  # the lower
    assert er.split(" | ")[6] == sgd.split(" | ")[6] == "2.000 ± 0.000 |"  # and of these nobody said which is better
    code, out, _ = parabolic(*arguments, "--metrics", "drawn,acc")
    assert out.splitlines()[2] == "| learner | drawn | Acc % |"
    code, _, err = parabolic(*arguments, "--metrics", "lenght")
    assert (code, "did you mean 'length'?" in err) == (2, True)


def test_the_page_shows_what_was_measured(parabolic, folder):
    options = ("--stream", "seq-blobs", "--set", "batch=50", "--set", "measure=mine.py:length")
    assert parabolic("compare", "--learners", "er,sgd", "--seeds", "2", "--workers", "0", *options)[0] == 0
    (scene,) = find_scenes(Store("runs")).scenes
    results = results_of(scene)
    assert [column.title for column in results.columns][4:] == ["length"]
    lengths = [[record.metrics["length"] for record in method.runs.values()] for method in scene.methods]
    assert [list(row[4].by_seed.values()) for row in results.rows.values()] == lengths
    assert parabolic("report", "-o", "page.html")[0] == 0
    assert ">length" in Path("page.html").read_text()


def test_a_run_prints_its_measures_and_a_table_of_runs_has_a_column(parabolic, folder):
    code, out, _ = parabolic("run", "--learner", "er", "--stream", "seq-blobs", "--set", "measure=mine.py:length")
    assert code == 0
    assert any(line.startswith("length ") for line in out.splitlines())
    parabolic("runs", "--csv", "runs.csv")
    with open("runs.csv") as file:
        (row,) = csv.DictReader(file)
    assert float(row["metrics.length"]) > 0
    assert "measured" not in "".join(row)
