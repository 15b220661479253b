"""Stores with made-up runs: what a report shows of them is known beforehand."""

import json
import random
from dataclasses import replace

from parabolic import RunSpec, metrics
from parabolic.experiments import Record
from parabolic.experiments.paper import Selection
from parabolic.options import dotted

EVIL = "<script>alert(1)</script>"
AROUND = {
    "parabolic": "0.1.0", "python": "3.11.7", "torch": "2.13.0", "platform": "Linux", "processor": "A Processor",
    "cores": 2, "device": "cpu", "command": "parabolic compare --stream 'a & b'",
    "finished": "2026-01-02T03:04:05+00:00",
}  # fmt: skip


def record(spec, skill=80.0, tasks=5, seconds=1.0):
    """A made-up run: its accuracy on a task is about `skill` + 15 when the task comes, and falls with later ones."""
    rng = random.Random(f"{spec.key}")
    accuracy = [
        [
            min(100.0, max(0.0, skill + 15 - (100 - skill) * 0.25 * (row - column) + rng.gauss(0, 1)))
            for column in range(row + 1)
        ]
        for row in range(tasks)
    ]
    matrix = [row + [float("nan")] * (tasks - len(row)) for row in accuracy]
    train_seconds = [seconds / tasks * rng.uniform(0.9, 1.1)] * tasks
    return Record(
        spec.key, spec.resolved(), metrics.summary(matrix), accuracy, train_seconds, [0.1] * tasks, 100, AROUND
    )


def record_with_heads(spec, skill, told_skill, tasks=5):
    """A made-up run with a head for each task: as `record`, with another skill if the task is told."""
    run = record(replace(spec, heads=True), skill, tasks)
    run = replace(run, task_accuracy=record(spec, told_skill, tasks).accuracy)
    return replace(run, metrics=run.summary)


def rename_in_file(store, key, learner=None, stream=None):
    """Give a run of the store a name that only a file can have: of a learner or a stream that is not here."""
    path = store.path(key) / "run.json"
    content = json.loads(path.read_text())
    content["spec"] |= {name: value for name, value in (("learner", learner), ("stream", stream)) if value}
    path.write_text(json.dumps(content))


def save_few_runs(store, seeds=3):
    """Three methods on the digits, a few seeds each."""
    for seed in range(seeds):
        for learner, skill, seconds in (("er", 84, 1.0), ("pcl", 81, 3.0), ("sgd", 20, 0.6)):
            store.save(record(RunSpec(learner, seed=seed), skill, seconds=seconds))


def save_many_runs(store, runs=500):
    """So many runs of the paper's quick tables: of them 13 failed, five are missing, and two are damaged."""
    specs = list({spec.key: spec for spec in Selection(quick=True).runs}.values())[: runs + 5]
    for position, spec in enumerate(specs):
        if position % 100 == 50:
            continue
        if position % 41 == 7:
            store.save_failure(spec, "the loss became nan in task 2, by step 60: lower lr (now 0.1)")
        else:
            skill = 20 + len(spec.learner) * 13 % 65
            store.save(record(spec, skill, spec.scenario.get("tasks", 5), 0.5 + len(spec.learner) ** 2 / 3))
    for name, text in (("damaged", "{"), ("strange", '{"key": 1}')):
        (store.root / name).mkdir()
        (store.root / name / "run.json").write_text(text)


def bounds_row(task):
    """A row of bounds, as `BoundsRow.as_dict` has it, after a task."""
    memory = {"min": 0.0, "mean": 0.1 + 0.02 * task, "max": 1.5 + 0.1 * task}
    loss = {"min": 0.0, "mean": 0.4 + 0.1 * task, "max": 3.0}
    return {
        "task": task,
        "forgetting": {"memory": memory, "past": loss},
        "generalisation": {"memory": memory, "future": loss},
        "first_among_own": 0.2,
        "last_among_own": 0.7,
        "forgetting_bound": 2.0 + 0.1 * task,
        "generalisation_lower": 0.0,
        "generalisation_upper": 4.0 + 0.1 * task,
        "violations": [],
    }


def save_run_with_bounds(store, spec):
    """Keep a run that measured bounds."""
    rows = [
        dotted({name: value for name, value in bounds_row(task).items() if name not in ("task", "violations")})
        for task in range(5)
    ]
    rows = [row | {"forgetting.broken": 0, "generalisation.broken": 0} for row in rows]
    measured_by_name = {f"bounds.{name}": [row[name] for row in rows] for name in rows[0]}
    run = record(replace(spec, measure="parabolic.engine.theory:bounds"), 50)
    run = replace(run, measured=measured_by_name)
    store.save(replace(run, metrics=run.summary))
