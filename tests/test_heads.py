"""A head for each task: what is learned is what a network with several last layers would learn."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from parabolic import ER, EWC, PCL, SGD, Heads, InputError, Learner, LwF, RunSpec, make_stream, train
from parabolic.experiments import execute, execute_fleet
from parabolic.learners import known_learners

TASKS = [[0, 3], [1, 2, 4]]


def network(outputs=5):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, outputs)).double()


def batches(count=6):
    torch.manual_seed(1)
    tasks = [TASKS[number % 2] for number in range(count)]
    return [(torch.randn(8, 4).double(), torch.tensor(task)[torch.arange(8) % len(task)]) for task in tasks]


class ManyHeads(nn.Module):
    """A body and a last layer for each task, as written by hand."""

    def __init__(self, model):
        super().__init__()
        self.body, self.heads = model[:-1], nn.ModuleList()
        for task in TASKS:
            head = nn.Linear(7, len(task)).double()
            head.weight.data, head.bias.data = model[-1].weight.data[task], model[-1].bias.data[task]
            self.heads.append(head)

    def loss(self, x, y):
        losses = []
        for task, head in zip(TASKS, self.heads, strict=True):
            in_task = torch.isin(y, torch.tensor(task))
            labels = torch.tensor([task.index(label) for label in y[in_task].tolist()], dtype=torch.long)
            losses.append(cross_entropy(head(self.body(x[in_task])), labels, reduction="sum"))
        return sum(losses) / len(y)


def test_it_learns_as_a_network_with_several_last_layers():
    learner, many = SGD(network(), lr=0.3, criterion=Heads(tasks=TASKS)), ManyHeads(network())
    optim = torch.optim.SGD(many.parameters(), lr=0.3)
    mixed = [
        (torch.cat([first_x, second_x]), torch.cat([first_y, second_y]))
        for (first_x, first_y), (second_x, second_y) in zip(batches(), batches()[1:], strict=False)
    ]
    for x, y in [*batches(), *mixed]:  # of one task, and of both, as with replay
        ours = learner.observe(x, y)
        theirs = many.loss(x, y)
        optim.zero_grad()
        theirs.backward()
        optim.step()
        torch.testing.assert_close(ours, theirs.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(learner.model[0].weight, many.body[0].weight, rtol=0, atol=1e-12)
    for task, head in zip(TASKS, many.heads, strict=True):
        torch.testing.assert_close(learner.model[-1].weight[task], head.weight, rtol=0, atol=1e-12)


@pytest.mark.parametrize("variant", ["paper", "reference"])
def test_only_the_head_of_a_task_matters_to_it(variant):
    learner = EWC(network(), criterion=Heads(tasks=TASKS, weights=[1.0, 2.0, 3.0, 4.0, 5.0]), variant=variant)
    first_task_batches = [batch for batch in batches() if 0 in batch[1]]
    x, y = first_task_batches[0]
    probable = learner.scores(x)[:, TASKS[0]].softmax(-1)[torch.arange(8), torch.tensor([0, 1] * 4)]
    learner.start_task(first_task_batches)
    fisher = learner.fisher([(x, y)])
    bias = fisher[-5:]  # the last of all weights
    assert (bias[TASKS[0]] > 0).all()
    assert (bias[TASKS[1]] == 0).all()
    squared = (1 - probable).square() * (1 if variant == "paper" else probable)
    torch.testing.assert_close(bias[0], squared.mean(), rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", sorted(set(known_learners()) - {"pcl"}))
def test_every_learner_but_pcl_has_heads_for_each_task_in_runs(name):
    spec = {"learner": name, "stream": "seq-blobs", "batch": 50, "backbone": "mlp"}
    with_heads, without = (execute(RunSpec(**spec, heads=heads), device="cpu") for heads in (True, False))
    assert with_heads.key != without.key
    assert with_heads.accuracy != without.accuracy or with_heads.task_accuracy != without.task_accuracy
    assert with_heads.metrics["task_acc"] > 70


@pytest.mark.parametrize(
    "changes", [{"seed": 1}, {"scenario": {"class_order": "5,0,4,1,3,2"}}, {"scenario": {"tasks": 2}}]
)
def test_each_run_of_several_has_the_heads_of_its_own_tasks(changes):
    spec = RunSpec("er", stream="seq-blobs", batch=50, backbone="mlp", heads=True, scenario={"class_order": "shuffled"})
    specs = [spec, dataclasses.replace(spec, **changes)]
    results = [record.task_accuracy for _, record in execute_fleet(specs, device="cpu")]
    assert results == [execute(each, device="cpu").task_accuracy for each in specs]


@pytest.mark.parametrize(("setting", "title"), [("heads", "Acc %, task told"), ("er.heads", "Acc %")])
def test_a_comparison_of_runs_with_heads_has_the_figures_with_the_task_told(parabolic, setting, title):
    settings = ("--learners", "er,sgd", "--stream", "seq-blobs", "--seeds", "1", "--workers", "0")
    code, out, _ = parabolic("compare", *settings, "--set", f"{setting}=true", "--format", "json")
    assert code == 0
    [table] = json.loads(out)
    assert table["columns"][0]["title"] == title


def test_a_method_that_forgets_keeps_more_with_heads_for_each_task():
    forgetting = []
    for heads in (False, True):
        stream = make_stream("seq-digits")
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10))
        criterion = Heads(tasks=[task.classes for task in stream]) if heads else "cross-entropy"
        state = train(SGD(model, criterion=criterion), stream, batch=10, epochs=5)
        forgetting.append(state.metrics["task_forgetting"])
    assert forgetting[1] < forgetting[0]


def test_more_outputs_than_classes_share_a_head():
    loss = Heads(tasks=TASKS)
    scores = torch.zeros(1, 8).double()
    for label, rivals in ((0, 2), (4, 3), (6, 3)):
        assert loss(scores, torch.tensor([label])).item() == pytest.approx(np.log(rivals))
    assert Heads(tasks=[[0, 9]])(torch.zeros(1, 3), torch.tensor([1])).item() == pytest.approx(np.log(2))


def test_heads_are_saved_and_grow(tmp_path):
    learner = ER(network(), memory=40, criterion=Heads(tasks=TASKS))
    for x, y in batches():
        learner.observe(x, y)
    learner.save(tmp_path / "heads.safetensors")
    loaded = Learner.load(tmp_path / "heads.safetensors", model=network())
    assert loaded.criterion.tasks == TASKS
    for either in (learner, loaded):
        either.grow(6)
    x, y = batches()[0]
    assert learner.observe(x, y).equal(loaded.observe(x, y))


def test_lwf_has_heads_for_each_task_too():
    learner = LwF(network(), criterion=Heads(tasks=TASKS))
    for number, task in enumerate(TASKS):
        task_batches = [batch for batch in batches() if task[0] in batch[1]]
        learner.start_task(task_batches)
        for x, y in task_batches:
            assert torch.isfinite(learner.observe(x, y, task=number))
        learner.end_task(task_batches)


@pytest.mark.parametrize("tasks", [[], [[0, 1], [1, 2]], [[0, -1]], [[0.5]], 5, None, [0, 1]])
def test_tasks_that_have_no_heads_are_refused(tasks):
    with pytest.raises(InputError, match="^tasks"):
        Heads(tasks=tasks)


@pytest.mark.parametrize(("learner_class", "options"), [(PCL, {}), (ER, {"smoothing": 0.1})])
def test_labels_between_tasks_are_refused(learner_class, options):
    learner = learner_class(network(), criterion=Heads(tasks=TASKS), **options)
    with pytest.raises(InputError, match="^criterion: got Heads, expected one for labels .* or the heads"):
        learner.observe(*batches()[0])


def test_bounds_of_labels_between_tasks_are_refused():
    with pytest.raises(InputError, match="bounds use labels between classes: leave these out, or the heads"):
        execute(RunSpec("er", stream="seq-blobs", heads=True, measure="parabolic.engine.theory:bounds"))


def test_a_stream_of_domains_is_refused_heads_for_each_task():
    with pytest.raises(InputError, match="^tasks: .* such as domains"):
        execute(RunSpec("er", heads=True, scenario={"domain": "rotation"}))
