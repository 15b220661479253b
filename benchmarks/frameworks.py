"""Our learners beside Avalanche's strategies, and mammoth's models: time and accuracy of the same methods.

    pip install '.[avalanche]'
    OMP_NUM_THREADS=1 python benchmarks/frameworks.py [--parts perceptron] [--only ER,GEM] [--mammoth CHECKOUT]

The digits arrive two classes at a time, once, in batches of ten. Both sides start from the same weights, and get the
same floats in the same batches in the same order, except where Avalanche has to shuffle (ER). Settings are the same, or
as alike as the options of both allow. The sides learn each task in turn, so that a busy machine affects both equally.
The time is processor time of learning, including what a method does at a task's end, without tests; ratios are medians
over the seeds.

Parts:
    perceptron: 2 × 256 units. Time, and final accuracy over all ten digits and with the task given, measured by one
        function for both sides, with the difference of the means and its 95 % interval (paired t-test).
    resnet: a ResNet-18 of width 8 on images enlarged to 32 × 32, six batches of each task. Time only.
    comparison: four methods with three seeds on the perceptron, tested after each task, from the start of Python to its
        end: by `parabolic compare`, by a loop over Avalanche's strategies, and by the same `compare` again.

With --mammoth, the path of a checkout whose requirements are installed, its models learn the same batches. Only their
own steps and work at a task's end are timed, not mammoth's loop and data loading.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import logging
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from parabolic import AGEM, DER, ER, EWC, GEM, MLP, SGD, SI, DERpp, Learner, LwF, ResNet18, make_stream
from parabolic.learners.functional import predicting
from parabolic.learners.learner import ReplayLearner, TaskBatches
from parabolic.memory import Batch
from parabolic.statistics import Summary, paired

TASKS, BATCH, LR, MEMORY = 5, 10, 0.05, 200
REPLAY = 24  # Avalanche's A-GEM divides it evenly among up to four past tasks
SHARE = MEMORY // TASKS
RECALL = {"memory": MEMORY, "replay": REPLAY}
MARGIN, ALPHA, BETA, STRENGTH, TEMPERATURE = 0.5, 0.3, 0.5, 10.0, 2.0
DER_OPTIONS = {**RECALL, "alpha": ALPHA}
DERPP_OPTIONS = {**DER_OPTIONS, "beta": BETA}
SIDES = {"perceptron": 8, "resnet": 32}  # pixels of an image
COMPARED, COMPARED_SEEDS = {"sgd": "SGD", "er": "ER", "agem": "A-GEM", "derpp": "DER++"}, 3

_operators: list[torch.library.Library] = []  # a library of operators lives as long as it is held


class Task(NamedTuple):
    """The batches of a task, and its test examples."""

    batches: list[tuple[Tensor, Tensor]]
    test: tuple[Tensor, Tensor]


Run = Iterator[None]  # its first `next` sets up, and each further one learns a task


class Pair(NamedTuple):
    """A method of ours, and what learns the tasks with the other library's: run(model, seed, tasks)."""

    learner: type[Learner]
    options: dict[str, Any]
    other: Callable[[nn.Module, int, list[Task]], Run]


class Outcome(NamedTuple):
    """Of one side: seconds of learning, percent right over all classes and with the task given, and the weights."""

    seconds: float
    accuracy: float
    task_accuracy: float
    weights: Tensor


# -- ours ----------------------------------------------------------------------------------------------------


class ByTask(ReplayLearner):
    """A learner that stores the examples of a task at its end, as Avalanche does, and so recalls past tasks only."""

    def remember(self, raw: Batch, batch: Batch) -> None:
        """Store nothing yet."""

    def end_task(self, batches: TaskBatches) -> None:
        """Offer the task's examples to memory; those of DER with the scores that they have by now."""
        for x, y in batches:
            with torch.no_grad(), predicting(self.model):
                logits = {"logits": self.model(self.inputs(x))} if "logits" in self.keeps else {}
            super().remember({"x": x, "y": y}, logits)


class ERByTask(ByTask, ER):
    """ER that recalls past tasks only."""


class DERByTask(ByTask, DER):
    """DER that recalls past tasks only."""


class DERppByTask(ByTask, DERpp):
    """DER++ that recalls past tasks only."""


def learn(pair: Pair, model: nn.Module, seed: int, tasks: list[Task]) -> Run:
    """Learn the tasks with our learner, in a plain loop."""
    learner = pair.learner(model, lr=LR, seed=seed, **pair.options)
    yield
    for number, task in enumerate(tasks):
        learner.start_task(task.batches)
        for x, y in task.batches:
            learner.observe(x, y, task=number)
        learner.end_task(task.batches)
        yield


# -- Avalanche -----------------------------------------------------------------------------------------------


def import_avalanche() -> None:
    """Import Avalanche, also where the compiled part of torchvision, which it imports, is not for this torch.

    Nothing here calls torchvision's operators: where they cannot be loaded, it is enough to declare them.
    """
    with warnings.catch_warnings(action="ignore"):
        try:
            import torchvision  # noqa: F401
        except RuntimeError:
            _operators.append(torch.library.Library("torchvision", "DEF"))
            for name in ("nms", "qnms"):
                _operators[-1].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import avalanche.training  # noqa: F401
    warnings.showwarning = lambda *_, **__: None  # Avalanche turns its warnings of deprecation on at every call


def avalanche_strategies() -> dict[str, Callable[[dict[str, Any]], Any]]:
    """Return what makes each strategy from the arguments that all have in common."""
    from avalanche import training
    from avalanche.training.plugins import ReplayPlugin
    from avalanche.training.storage_policy import ReservoirSamplingBuffer

    def replay(common: dict[str, Any]) -> Any:
        policy = ReservoirSamplingBuffer(MEMORY)  # as ours; by default each experience has an equal share
        plugin = ReplayPlugin(mem_size=MEMORY, batch_size_mem=REPLAY, storage_policy=policy)
        return training.Naive(**common, plugins=[plugin])

    def der(beta: float) -> Callable[[dict[str, Any]], Any]:
        recall = {"mem_size": MEMORY, "batch_size_mem": REPLAY}
        return lambda common: training.DER(**common, **recall, alpha=ALPHA, beta=beta)

    share = {"patterns_per_exp": SHARE}
    # The square of a batch's mean gradient is about 1 / BATCH of the mean of the examples' squares.
    online = {"ewc_lambda": STRENGTH * BATCH, "mode": "online", "decay_factor": 1.0}
    return {
        "SGD": lambda common: training.Naive(**common),
        "ER": replay,
        "A-GEM": lambda common: training.AGEM(**common, **share, sample_size=REPLAY),
        "GEM": lambda common: training.GEM(**common, **share, memory_strength=MARGIN),
        "DER": der(0.0),
        "DER++": der(BETA),
        "online EWC": lambda common: training.EWC(**common, **online),
        "SI": lambda common: training.SynapticIntelligence(**common, si_lambda=2 * STRENGTH, eps=1.0),
        "LwF": lambda common: training.LwF(**common, alpha=1.0, temperature=TEMPERATURE),
    }


def avalanche_pairs() -> dict[str, Pair]:
    """Return the methods; those "by task" store examples when Avalanche does, the others of ours after each batch."""
    strategies = avalanche_strategies()

    def run(name: str, **settings: bool) -> Callable[[nn.Module, int, list[Task]], Run]:
        return lambda model, seed, tasks: learn_by_avalanche(strategies[name], model, seed, tasks, **settings)

    return {
        "SGD": Pair(SGD, {}, run("SGD")),
        "ER": Pair(ER, RECALL, run("ER", shuffle=True, online=True)),
        "ER by task": Pair(ERByTask, RECALL, run("ER", shuffle=True)),
        "A-GEM": Pair(AGEM, RECALL, run("A-GEM")),
        "GEM": Pair(GEM, {"memory": MEMORY, "replay": SHARE, "margin": MARGIN}, run("GEM")),
        "DER": Pair(DER, DER_OPTIONS, run("DER")),
        "DER by task": Pair(DERByTask, DER_OPTIONS, run("DER")),
        "DER++": Pair(DERpp, DERPP_OPTIONS, run("DER++")),
        "DER++ by task": Pair(DERppByTask, DERPP_OPTIONS, run("DER++")),
        "online EWC": Pair(EWC, {"strength": STRENGTH}, run("online EWC")),
        "SI": Pair(SI, {"strength": STRENGTH, "damping": 1.0, "clip": None}, run("SI")),
        "LwF": Pair(
            LwF, {"alpha": 1.0, "temperature": TEMPERATURE, "warmup": 0, "weight_decay": 0.0}, run("LwF")
        ),
    }  # fmt: skip


def learn_by_avalanche(
    make: Callable[[dict[str, Any]], Any],
    model: nn.Module,
    seed: int,
    tasks: list[Task],
    shuffle: bool = False,
    online: bool = False,
) -> Run:
    """Learn the tasks with a strategy of Avalanche; `online`: each batch is an experience."""
    from avalanche.benchmarks import split_online_stream

    seed_all(seed)
    strategy = make(common_arguments(model, evaluator=None))
    stream = make_benchmark(tasks).train_stream
    parts = [split_online_stream([task], BATCH, shuffle=False) if online else [task] for task in stream]
    yield
    for experiences in parts:
        for experience in experiences:
            strategy.train(experience, shuffle=shuffle)
        yield


def common_arguments(model: nn.Module, evaluator: Any) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    common = {"model": model, "optimizer": optimizer, "criterion": nn.CrossEntropyLoss(), "evaluator": evaluator}
    return {**common, "train_mb_size": BATCH, "eval_mb_size": 512}


def make_benchmark(tasks: list[Task]) -> Any:
    """Return the tasks as a benchmark of Avalanche, with the examples of each in the order of its batches."""
    from avalanche.benchmarks import tensors_benchmark

    train = [tuple(torch.cat(tensors) for tensors in zip(*task.batches, strict=True)) for task in tasks]
    test = [task.test for task in tasks]
    return tensors_benchmark(train_tensors=train, test_tensors=test, task_labels=[0] * len(tasks))


# -- mammoth -------------------------------------------------------------------------------------------------


def mammoth_pairs(path: Path) -> dict[str, Pair]:
    """Return the methods whose models need nothing but batches."""
    # Its package of data sets imports all of them, with all that they need; its models need none.
    datasets = types.ModuleType("datasets")
    datasets.__path__, datasets.__getattr__ = [str(path / "datasets")], lambda _: None
    sys.modules["datasets"] = datasets
    sys.path.insert(0, str(path))
    logging.disable()  # it tells about each model that it makes

    def run(module: str, kind: str, **options: float) -> Callable[[nn.Module, int, list[Task]], Run]:
        model_class = getattr(importlib.import_module(f"models.{module}"), kind)
        return lambda model, seed, tasks: learn_by_mammoth(model_class, options, model, seed, tasks)

    return {
        "SGD": Pair(SGD, {}, run("sgd", "Sgd")),
        "ER": Pair(ER, RECALL, run("er", "Er")),
        "DER": Pair(DER, DER_OPTIONS, run("der", "Der", alpha=ALPHA)),
        "DER++": Pair(DERpp, DERPP_OPTIONS, run("derpp", "Derpp", alpha=ALPHA, beta=BETA)),
        "online EWC": Pair(
            EWC, {"strength": STRENGTH, "variant": "reference"}, run("ewc_on", "EwcOn", e_lambda=STRENGTH, gamma=1.0)
        ),
        "SI": Pair(SI, {"strength": STRENGTH, "damping": 1.0}, run("si", "SI", c=STRENGTH, xi=1.0)),
    }


def learn_by_mammoth(
    model_class: type[Any], options: dict[str, float], model: nn.Module, seed: int, tasks: list[Task]
) -> Run:
    """Learn the tasks with a model of mammoth."""
    from backbone import MammothBackbone

    class Backbone(MammothBackbone):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: Tensor, **_: Any) -> Any:
            return self.layers(x)

    seed_all(seed)
    general = {"lr": LR, "optimizer": "sgd", "optim_wd": 0, "optim_mom": 0, "optim_nesterov": False, "label_perc": 1}
    sizes = {"batch_size": BATCH, "buffer_size": MEMORY, "minibatch_size": REPLAY}
    dataset = types.SimpleNamespace(N_CLASSES=10, N_TASKS=TASKS, N_CLASSES_PER_TASK=2, SETTING="class-il")
    dataset.get_offsets = lambda task: (2 * task, 2 * task + 2)  # the classes of a task
    args = argparse.Namespace(**general, **sizes, **options, nowand=1)
    learner = model_class(Backbone(), nn.CrossEntropyLoss(), args, None, dataset=dataset)
    yield
    for task in tasks:
        dataset.train_loader = [(x, y, x) for x, y in task.batches]
        learner.net.train()
        learner.meta_begin_task(dataset)
        for x, y in task.batches:
            learner.meta_observe(x, y, x, epoch=0)
        learner.meta_end_task(dataset)
        yield


# -- both sides ----------------------------------------------------------------------------------------------


def seed_all(seed: int) -> None:
    """Seed what the other libraries draw from; ours draws from its own generator."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002


def make_tasks(seed: int, side: int, count: int | None) -> list[Task]:
    """Return the tasks, with images of `side` pixels as inputs of the network, and so many batches of each."""
    stream = make_stream("seq-digits", seed=seed)

    def inputs(x: Tensor) -> Tensor:
        assert stream.prepare is not None
        scale = side // x.shape[-1]
        return stream.prepare(x).repeat_interleave(scale, -1).repeat_interleave(scale, -2)

    tasks = []
    for task in stream:
        batches = [(inputs(x), y) for x, y in task.batches(BATCH)][:count]
        tests = [(inputs(x), y) for x, y in task.test_batches()]
        tasks.append(Task(batches, (torch.cat([x for x, _ in tests]), torch.cat([y for _, y in tests]))))
    return tasks


def make_network(seed: int, side: int) -> nn.Module:
    torch.manual_seed(seed)
    return MLP((1, side, side), 10) if side == SIDES["perceptron"] else ResNet18((1, side, side), 10, width=8)


def side_by_side(pair: Pair, seed: int, side: int, count: int | None) -> tuple[Outcome, Outcome]:
    """Return the outcomes of ours and of the other, which learn each task in turn."""
    tasks, model = make_tasks(seed, side, count), make_network(seed, side)
    models = [model, copy.deepcopy(model)]
    runs = [learn(pair, models[0], seed, tasks), pair.other(models[1], seed, tasks)]
    for run in runs:
        next(run)
    seconds = [0.0, 0.0]
    for number in range(len(tasks)):
        for place in (0, 1) if (number + seed) % 2 else (1, 0):
            started = time.process_time()
            next(runs[place])
            seconds[place] += time.process_time() - started
    one, other = (
        Outcome(spent, *accuracies(model, tasks), nn.utils.parameters_to_vector(model.parameters()).detach())
        for spent, model in zip(seconds, models, strict=True)
    )
    return one, other


@torch.no_grad()
def accuracies(model: nn.Module, tasks: list[Task]) -> tuple[float, float]:
    """Return the percent of test examples that are right, averaged over tasks: over all classes, and given the task."""
    right = []
    model.eval()
    for x, y in (task.test for task in tasks):
        scores, classes = model(x), y.unique()
        answers = scores.argmax(1), classes[scores[:, classes].argmax(1)]
        right.append([float((labels == y).double().mean()) for labels in answers])
    overall, within = (100 * statistics.fmean(column) for column in zip(*right, strict=True))
    return overall, within


def measure(library: str, pairs: dict[str, Pair], part: str, only: Sequence[str], seeds: int) -> None:
    """Print a row for each method."""
    side, count = SIDES[part], None if part == "perceptron" else 6
    steps = sum(len(task.batches) for task in make_tasks(0, side, count))
    print(f"\n{library} and ours, {part}: {steps} steps, {seeds} seeds")
    head = f"{'':16} {'ms per step':>17} {'ratio':>22}"
    print(f"{head} {'Acc %':>40} {'Acc % given the task':>40}" if part == "perceptron" else head)
    plain = []  # the weights that the other's SGD ends with
    for name, pair in pairs.items():
        if only and name not in (*only, "SGD"):  # whose weights others are compared with
            continue
        side_by_side(pair, seeds, side, 2)  # the first steps are slower
        both = [side_by_side(pair, seed, side, count) for seed in range(seeds)]
        ours, other = zip(*both, strict=True)
        ratios = [b.seconds / a.seconds for a, b in both]
        cells = [f"{1e3 * statistics.median(each.seconds for each in one) / steps:8.2f}" for one in (ours, other)]
        cells.append(f"{statistics.median(ratios):8.2f} {f'({min(ratios):.2f} to {max(ratios):.2f})':>13}")
        if part == "perceptron":
            cells += [format_means([each.accuracy for each in one] for one in (ours, other))]
            cells += [format_means([each.task_accuracy for each in one] for one in (ours, other))]
            if name == "SGD":
                plain = [each.weights for each in other]
            same = sum(torch.equal(a.weights, b.weights) for a, b in both)
            cells += [f"the same weights on both sides in {same} runs"] if same else []
            same = sum(torch.equal(a.weights, b) for a, b in zip(other, plain, strict=True))
            cells += [f"theirs has the weights of its SGD in {same} runs"] if same and name != "SGD" else []
        print(f"{name:16}", *cells, flush=True)


def format_means(samples: Iterator[list[float]]) -> str:
    """Return the means of two samples, and the difference of the first from the second."""
    one, other = samples
    gap = paired(one, other)
    means = " ".join(f"{Summary.of(each).mean:5.1f} ± {Summary.of(each).sd:4.1f}" for each in (one, other))
    return f"{means} {f'{gap.mean:+.1f} ({gap.low:+.1f} to {gap.high:+.1f})':>22}"


# -- a whole comparison --------------------------------------------------------------------------------------


def compare_by_avalanche() -> None:
    """Train and test the compared methods in a plain loop, and print their accuracies."""
    from avalanche.evaluation.metrics import accuracy_metrics
    from avalanche.training.plugins import EvaluationPlugin

    torch.set_num_threads(1)
    strategies = avalanche_strategies()
    for name in COMPARED.values():
        final = []
        for seed in range(COMPARED_SEEDS):
            benchmark = make_benchmark(make_tasks(seed, SIDES["perceptron"], None))
            model = make_network(seed, SIDES["perceptron"])
            seed_all(seed)
            evaluator = EvaluationPlugin(accuracy_metrics(experience=True, stream=True), loggers=[])
            strategy = strategies[name](common_arguments(model, evaluator))
            for experience in benchmark.train_stream:
                strategy.train(experience)
                metrics = strategy.eval(benchmark.test_stream)
            final.append(100 * next(value for key, value in metrics.items() if key.startswith("Top1_Acc_Stream")))
        print(f"{name} {Summary.of(final).mean:.1f}")


def measure_comparison(times: int) -> None:
    """Print how long whole comparisons take."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [
            "backbone=mlp",
            f"lr={LR}",
            f"batch={BATCH}",
            *(f"{name}.replay={REPLAY}" for name in COMPARED if name != "sgd"),
        ]
        settings += [f"derpp.alpha={ALPHA}", f"derpp.beta={BETA}"]
        compare = [
            *(sys.executable, "-m", "parabolic", "compare", "--learners", ",".join(COMPARED), "--stream", "seq-digits"),
            *("--memory", str(MEMORY), "--seeds", str(COMPARED_SEEDS), "--device", "cpu"),
            *(part for setting in settings for part in ("--set", setting)),
        ]
        spent: dict[str, list[tuple[float, float]]] = {}
        for turn in range(times):
            one, several = (["--runs", f"{folder}/{workers}{turn}"] for workers in ("one", "several"))
            commands = {
                "compare in one process": [*compare, *one, "--workers", "0"],
                "a loop over Avalanche's strategies": [sys.executable, __file__, "--parts", "loop"],
                "compare as it is": [*compare, *several],
                "the same compare again": [*compare, *several],
            }
            for name, command in commands.items():
                started, before = time.perf_counter(), processor_time_of_children()
                subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
                seconds = time.perf_counter() - started, processor_time_of_children() - before
                spent.setdefault(name, []).append(seconds)
    print(f"\n{len(COMPARED)} methods, {COMPARED_SEEDS} seeds, {os.cpu_count()} cores: seconds, medians of {times}")
    for name, pairs in spent.items():
        passed, used = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(f"{name:36} {passed:6.1f}, of processor time {used:6.1f}")


def processor_time_of_children() -> float:
    spent = os.times()
    return spent.children_user + spent.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="perceptron,resnet,comparison", help="separated by commas")
    parser.add_argument("--only", default="", help="methods of the tables, separated by commas")
    parser.add_argument("--seeds", type=int, default=20, help="for the perceptron; the ResNet has three at most")
    parser.add_argument("--times", type=int, default=3, help="how often the whole comparisons are made")
    parser.add_argument("--mammoth", type=Path, help="a checkout of mammoth")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # a network that has memorised its batches would be slower than a fresh one
    import_avalanche()
    parts, only = args.parts.split(","), [name for name in args.only.split(",") if name]
    if "loop" in parts:
        compare_by_avalanche()
    libraries = {"Avalanche": avalanche_pairs()} | ({"mammoth": mammoth_pairs(args.mammoth)} if args.mammoth else {})
    for library, pairs in libraries.items():
        for part in [part for part in SIDES if part in parts]:
            measure(library, pairs, part, only, args.seeds if part == "perceptron" else min(args.seeds, 3))
    if "comparison" in parts:
        measure_comparison(args.times)


if __name__ == "__main__":
    main()
