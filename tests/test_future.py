"""Tasks that are tested before they are learned: the accuracies and the forward transfer; nothing else changes."""

import json

import numpy as np
import pytest
import torch
from test_resume import Stop

from parabolic import ER, MLP, SGD, InputError, Joint, RunSpec, Store, make_stream, metrics, run, train
from parabolic.engine import Callback, Diverged
from parabolic.experiments import Records, execute, write_records

SPEC = {"learner": "er", "stream": "seq-blobs", "batch": 50, "backbone": "mlp"}
STREAMS = [("seq-blobs", {}), ("seq-blobs", {"blur": 0.4}), ("seq-digits", {"domain": "rotation"})]


@pytest.mark.parametrize(("name", "scenario"), STREAMS)
def test_it_is_what_a_slow_look_before_each_task_says(name, scenario):
    stream, expected = make_stream(name, **scenario), []

    def accuracy(learner, task):
        x, y = (torch.cat(tensors) for tensors in zip(*task.test_batches(7), strict=True))
        answers = [max(task.classes, key=lambda label: float(row[label])) for row in learner.scores(x)]
        return 100 * sum(int(label) == answer for label, answer in zip(y, answers, strict=True)) / len(y)

    class Look(Callback):
        def on_start(self, state):
            expected.append([accuracy(state.learner, task) for task in stream])

        def on_task(self, state):
            expected.append([accuracy(state.learner, task) for task in stream.tasks[state.task + 1 :]])

    torch.manual_seed(0)
    state = train(ER(MLP(stream.shape, stream.classes)), stream, batch=50, callbacks=[Look()], future=True)
    assert expected.pop() == []  # after the last task there are none to come
    assert [row[task_number:].tolist() for task_number, row in enumerate(state.future)] == expected
    assert np.isnan(state.future[np.tril_indices(len(stream), -1)]).all()
    gains = [expected[task_index][0] - expected[0][task_index] for task_index in range(1, len(stream))]
    assert state.metrics["task_forward_transfer"] == pytest.approx(sum(gains) / len(gains))


def test_similar_tasks_help_those_to_come():
    stream = make_stream("seq-digits", domain="rotation")
    torch.manual_seed(0)
    state = train(SGD(MLP(stream.shape, stream.classes)), stream, batch=10, future=True)
    assert state.metrics["task_forward_transfer"] > 10


def test_it_changes_nothing_else_and_is_another_run():
    plain, with_future = (RunSpec(**SPEC, **options) for options in ({}, {"future": True}))
    assert plain.key != with_future.key
    without, tested_ahead = execute(plain), execute(with_future)
    assert (without.accuracy, without.task_accuracy) == (tested_ahead.accuracy, tested_ahead.task_accuracy)
    assert tested_ahead.metrics.keys() - without.metrics.keys() == {"task_forward_transfer"}
    assert without.future_accuracy == []
    assert [len(row) for row in tested_ahead.future_accuracy] == [3, 2, 1]


def test_what_learns_all_tasks_at_once_has_none():
    stream = make_stream("seq-blobs")
    state = train(Joint(MLP(stream.shape, stream.classes)), stream, future=True)
    assert state.future is None
    assert "task_forward_transfer" not in state.metrics


def test_a_run_that_was_stopped_has_the_accuracies_before_learning(tmp_path):
    spec, store = RunSpec(**SPEC, future=True), Store(tmp_path)
    for stop in (Stop(2), Stop(12), Stop(task=1), Stop(20)):
        with pytest.raises(KeyboardInterrupt):
            run(spec, store, device="cpu", checkpoint=1e-9, callbacks=[stop])
    record, _ = run(spec, store, device="cpu")
    assert record.environment["resumed"] == 4
    undisturbed = execute(spec, device="cpu")
    assert (record.future_accuracy, record.metrics) == (undisturbed.future_accuracy, undisturbed.metrics)


def test_stores_and_records_keep_it_and_refuse_what_does_not_fit(tmp_path):
    spec, store = RunSpec(**SPEC, future=True), Store(tmp_path / "runs")
    record, _ = run(spec, store, device="cpu")
    assert store.find(spec).future_accuracy == record.future_accuracy
    write_records([record], tmp_path / "kept.jsonl")
    stored = Records(tmp_path / "kept.jsonl").find(spec)
    assert stored.metrics["task_forward_transfer"] == pytest.approx(metrics.forward_transfer(record.future_accuracy))
    path = store.path(spec.key) / "run.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"future_accuracy": content["future_accuracy"][:-1]}))
    assert store.find(spec) is None
    assert store.unreadable()[path] == "it does not have an accuracy for each task to come"
    content["future_accuracy"][0][0] = -1.0
    path.write_text(json.dumps(content))
    assert store.unreadable()[path] == "its accuracies are not percentages"


def test_a_run_that_diverges_has_none_and_is_kept(tmp_path):
    spec, store = RunSpec(**SPEC, future=True, options={"lr": 1e30}), Store(tmp_path)
    with pytest.raises(Diverged):
        run(spec, store, device="cpu")
    assert store.unreadable() == {}
    assert store.ended(spec).future_accuracy == []


def test_a_comparison_has_a_column_where_it_is_measured(parabolic, tmp_path):
    arguments = ("compare", "--learners", "er,joint", "--seeds", "2", "--workers", "0", "--stream", "seq-blobs",
                 "--runs", str(tmp_path), "--metrics", "acc,task_forward_transfer", "--format", "markdown")  # fmt: skip
    code, _, err = parabolic(*arguments)
    assert (code, err.strip()) == (
        2, "error: --metrics: got task_forward_transfer, expected figures that are measured; add --set future=true",
    )  # fmt: skip
    code, out, err = parabolic(*arguments, "--set", "future=true")
    assert (code, err) == (0, "")
    title, _, head, _, er, joint, *_ = out.splitlines()
    assert title == "**seq-blobs, memory 200**"
    assert head == "| learner | Acc % | forward transfer, task told |"
    assert er.split(" | ")[2] != joint.split(" | ")[2] == "– |"
    assert "was measured" not in out


def test_its_name_is_not_free_for_a_measure():
    stream = make_stream("seq-blobs")
    with pytest.raises(InputError, match="measure: got 'task_forward_transfer', expected a name that no other"):
        train(SGD(MLP(stream.shape, stream.classes)), stream, measures={"task_forward_transfer": lambda state: 0})
