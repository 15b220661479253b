"""The learners as Avalanche's strategies: Avalanche's own data, loop, plugins and metrics; the learners' own steps."""

import copy
import pickle
import re
import subprocess
import sys

import pytest
import torch
from avalanches import need_avalanche
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from parabolic import CrossEntropy, InputError
from parabolic.learners import known_learners

need_avalanche()

from avalanche.benchmarks import benchmark_from_datasets, nc_benchmark, split_online_stream  # noqa: E402
from avalanche.benchmarks.utils import as_classification_dataset  # noqa: E402
from avalanche.core import SupervisedPlugin  # noqa: E402
from avalanche.evaluation.metrics import (  # noqa: E402
    accuracy_metrics,
    forgetting_metrics,
    loss_metrics,
    timing_metrics,
)
from avalanche.models import IncrementalClassifier  # noqa: E402
from avalanche.training import Naive  # noqa: E402
from avalanche.training.plugins import EvaluationPlugin, EWCPlugin, LRSchedulerPlugin, ReplayPlugin  # noqa: E402

from parabolic.integrations import avalanche as integration  # noqa: E402
from parabolic.integrations.avalanche import PCL, strategy_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:No loggers specified")  # these tests look at metrics themselves

LEARNERS = sorted(name for name, kind in known_learners().items() if not kind.sees_all)
PAIRS = ([0, 1], [2, 3], [4, 5])


def tensors(first, last):
    """Sixty images or so of each pair of digits."""
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
    rows_by_pair = [torch.isin(y, torch.tensor(pair)).nonzero()[first:last, 0] for pair in PAIRS]
    return [(x[rows], y[rows]) for rows in rows_by_pair]


def dataset(x, y):
    data = TensorDataset(x, y)
    data.targets = y
    return data


@pytest.fixture(scope="module")
def benchmark():
    parts = {"train": tensors(0, 60), "test": tensors(60, 117)}
    return benchmark_from_datasets(
        **{
            name: [as_classification_dataset(dataset(*tensors_of_pair)) for tensors_of_pair in pairs]
            for name, pairs in parts.items()
        }
    )


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 10))


class Own(known_learners()["er"]):
    """A learner of one's own."""

    name = "own"


class AnotherER(known_learners()["er"]):
    """Another, whose strategy is called as the package's."""

    name = "another"


AnotherER.__name__ = "ER"


def strategy(name="pcl", model=None, **options):
    return strategy_of(name)(
        model=network() if model is None else model,
        **{"train_mb_size": 10, "eval_mb_size": 50, "evaluator": None} | options,
    )


def momentum(weights, lr=0.05):
    return torch.optim.SGD(weights, lr=lr, momentum=0.9)


class Recorder(SupervisedPlugin):
    """What comes by: the batches of each experience, and the events."""

    def __init__(self):
        super().__init__()
        self.batches, self.events = [], []

    def before_training_exp(self, strategy, **kwargs):
        self.batches.append([])

    def before_training_iteration(self, strategy, **kwargs):
        self.batches[-1].append((strategy.mb_x.clone(), strategy.mb_y.clone()))


for _event in [name for name in dir(SupervisedPlugin) if re.match("(before|after)_", name)]:

    def note(self, strategy, event=_event, then=getattr(Recorder, _event), **kwargs):  # noqa: B008
        self.events.append(event)
        then(self, strategy)

    setattr(Recorder, _event, note)


def same_state(first, second):
    """Whether two states are equal to the last bit."""
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same_state(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(same_state(*pair) for pair in zip(first, second, strict=True))
    return first == second


def without_optimizer(learner):
    return {name: value for name, value in learner.state_dict().items() if name != "optimizer"}


# -- the learner's own steps ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LEARNERS)
def test_a_strategy_learns_what_its_learner_learns_from_the_same_batches(name, benchmark):
    model, recorder = network(), Recorder()
    options = {"seed": 3, "average": 0.9, "memory": 60}
    options = {key: value for key, value in options.items() if hasattr(known_learners()[name], key)}
    plain = known_learners()[name](copy.deepcopy(model), optimizer=momentum, lr=0.05, **options)
    trainer = strategy(name, model, optimizer=momentum(model.parameters()), plugins=[recorder], **options)
    for experience in benchmark.train_stream:
        trainer.train(experience, shuffle=False)  # so that methods that look at a task beforehand find it in one order

    assert [len(batches) for batches in recorder.batches] == [6, 6, 6]
    assert trainer.learner.steps == 18
    for task, batches in enumerate(recorder.batches):
        plain.start_task(batches)
        for x, y in batches:
            plain.observe(x, y, task)
        plain.end_task(batches)
    assert same_state(without_optimizer(trainer.learner), without_optimizer(plain))
    assert trainer.model is model


def test_a_strategy_without_an_optimiser_uses_the_learners_own(benchmark):
    model, recorder = network(), Recorder()
    plain = known_learners()["pcl"](copy.deepcopy(model), lr=0.2, memory=60, sigma_x=0.1)
    trainer = PCL(
        model=model,
        train_mb_size=10,
        train_epochs=2,
        plugins=[recorder],
        evaluator=None,
        lr=0.2,
        memory=60,
        sigma_x=0.1,
    )
    trainer.train(benchmark.train_stream)
    for batches in recorder.batches:
        assert len(batches) == 12
        for x, y in batches:
            plain.observe(x, y)
    assert same_state(trainer.learner.state_dict(), plain.state_dict())


def test_experiences_may_have_task_labels():
    x, y = (torch.cat(parts) for parts in zip(*tensors(0, 60), strict=True))
    benchmark = nc_benchmark(
        dataset(x, y), dataset(x, y), n_experiences=3, task_labels=True, fixed_class_order=list(range(6))
    )
    gem = strategy("gem", lr=0.05, memory=60)
    for experience in benchmark.train_stream:
        gem.train(experience)
    assert set(gem.learner.past["task"].tolist()) == {0, 1, 2}


def test_an_online_stream_has_no_tasks(benchmark):
    online = list(split_online_stream(benchmark.train_stream, experience_size=10, shuffle=False))
    er = strategy("er", memory=60)
    er.train(online)
    assert er.learner.steps == len(online) == 18
    with pytest.raises(InputError, match="learner: got 'lwf', expected one that works without tasks, on an online"):
        strategy("lwf").train(online[:1])


# -- what Avalanche sees -------------------------------------------------------------------------------------


def test_metrics_are_those_of_the_learner(benchmark):
    model, recorder = network(), Recorder()
    evaluator = EvaluationPlugin(
        accuracy_metrics(epoch=True, experience=True, stream=True),
        loss_metrics(epoch=True, experience=True),
        forgetting_metrics(experience=True, stream=True),
        timing_metrics(epoch=True),
        loggers=[],
    )
    trainer = PCL(
        model=copy.deepcopy(model), train_mb_size=10, eval_mb_size=50, evaluator=evaluator, plugins=[recorder],
        memory=60, lr=0.2, average=0.8,
    )  # fmt: skip
    plain = known_learners()["pcl"](model, memory=60, lr=0.2, average=0.8)
    tests, accuracy = tensors(60, 117), []
    for experience in benchmark.train_stream:
        train_figures, figures = trainer.train(experience), trainer.eval(benchmark.test_stream)
        right, loss, count = 0, 0.0, 0
        for x, y in recorder.batches[-1]:
            right += int((plain.predict(x) == y).sum())
            loss += float(plain.observe(x, y)) * len(y)
            count += len(y)
        assert train_figures["Top1_Acc_Epoch/train_phase/train_stream"] == pytest.approx(right / count)
        assert train_figures["Loss_Epoch/train_phase/train_stream"] == pytest.approx(loss / count)
        assert "Time_Epoch/train_phase/train_stream" in train_figures
        accuracy.append([float((plain.predict(x) == y).float().mean()) for x, y in tests])
        for index, (x, y) in enumerate(tests):
            error = nn.functional.cross_entropy(plain.scores(x), y)
            assert figures[f"Top1_Acc_Exp/eval_phase/test_stream/Exp{index:03}"] == pytest.approx(accuracy[-1][index])
            assert figures[f"Loss_Exp/eval_phase/test_stream/Exp{index:03}"] == pytest.approx(float(error), rel=1e-5)
        correct = sum(share * len(y) for share, (_, y) in zip(accuracy[-1], tests, strict=True))
        assert figures["Top1_Acc_Stream/eval_phase/test_stream"] == pytest.approx(
            correct / sum(len(y) for _, y in tests)
        )
    lost = [accuracy[index][index] - accuracy[-1][index] for index in range(2)]
    for index in range(2):
        assert figures[f"ExperienceForgetting/eval_phase/test_stream/Exp{index:03}"] == pytest.approx(lost[index])
    assert figures["StreamForgetting/eval_phase/test_stream"] == pytest.approx(sum(lost) / 2)
    assert accuracy[-1][0] > 0.2  # the figures are of something learned, and kept


def test_the_loss_on_numbers_is_that_of_each_example():
    x = torch.arange(12.0).view(6, 2)
    data = TensorDataset(x, x.sum(1))
    data.targets = [0] * len(x)  # which Avalanche asks for
    benchmark = benchmark_from_datasets(train=[as_classification_dataset(data)], test=[as_classification_dataset(data)])
    evaluator = EvaluationPlugin(loss_metrics(experience=True), loggers=[])
    trainer = strategy("er", nn.Linear(2, 1), criterion="mse", lr=1e-3, evaluator=evaluator)
    trainer.train(benchmark.train_stream)
    figures = trainer.eval(benchmark.test_stream)
    error = (trainer.learner.predict(x)[:, 0] - x.sum(1)).square().mean()
    assert figures["Loss_Exp/eval_phase/test_stream/Exp000"] == pytest.approx(float(error), rel=1e-5)


@pytest.mark.parametrize("name", LEARNERS)
def test_plugins_hear_of_the_same_events_in_the_same_order_as_with_avalanche_s_own(name, benchmark):
    model, theirs, ours = network(), Recorder(), Recorder()
    naive = Naive(
        model=model, optimizer=momentum(model.parameters()), train_mb_size=10, eval_mb_size=50, plugins=[theirs],
        evaluator=None,
    )  # fmt: skip
    trainer = strategy(name, plugins=[ours])
    for trained in (naive, trainer):
        trained.train(benchmark.train_stream[0])
        trained.eval(benchmark.test_stream[:1])
    assert ours.events == theirs.events
    assert "after_backward" in ours.events


def test_what_a_plugin_adds_to_the_loss_is_learned(benchmark):
    class Decay(SupervisedPlugin):
        def before_backward(self, strategy, **kwargs):
            strategy.loss += 0.05 * sum(weight.square().sum() for weight in strategy.model.parameters())

    decayed, plain = strategy("er", plugins=[Decay()]), network()
    with_weight_decay = strategy("er", plain, optimizer=torch.optim.SGD(plain.parameters(), lr=0.1, weight_decay=0.1))
    without_plugin = strategy("er")
    for trained in (decayed, with_weight_decay, without_plugin):
        trained.train(benchmark.train_stream, shuffle=False)
    for decayed_weight, expected_weight in zip(
        decayed.model.parameters(), with_weight_decay.model.parameters(), strict=True
    ):
        torch.testing.assert_close(decayed_weight, expected_weight)
    assert not torch.allclose(without_plugin.model[0].weight, decayed.model[0].weight)


def test_what_a_plugin_does_to_gradients_counts(benchmark):
    class Frozen(SupervisedPlugin):
        def after_backward(self, strategy, **kwargs):
            strategy.model[0].weight.grad.zero_()

    trainer, before = strategy("pcl", plugins=[Frozen()]), network()
    trainer.train(benchmark.train_stream[0])
    assert torch.equal(trainer.model[0].weight, before[0].weight)
    assert not torch.equal(trainer.model[3].weight, before[3].weight)


def test_avalanche_s_own_plugins_work(benchmark):
    model = network()
    optimizer = momentum(model.parameters(), lr=0.2)
    schedule = LRSchedulerPlugin(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), reset_lr=False)
    replay, ewc = ReplayPlugin(mem_size=30), EWCPlugin(ewc_lambda=0.4)
    trainer = strategy("er", model, optimizer=optimizer, plugins=[schedule, replay, ewc])
    for experience in benchmark.train_stream:
        trainer.train(experience)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.2 / 8)
    assert len(replay.storage_policy.buffer) == 30
    assert len(ewc.importances) == 3
    assert trainer.learner.past.offered > 180  # what Avalanche replays comes on top


def test_testing_while_training_changes_nothing(benchmark):
    watched, plain = strategy("pcl", eval_every=1, peval_mode="iteration"), strategy("pcl")
    for trained in (watched, plain):
        trained.train(benchmark.train_stream, eval_streams=[benchmark.test_stream], shuffle=False)
    assert same_state(watched.learner.state_dict(), plain.learner.state_dict())


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda trainer: pickle.loads(pickle.dumps(trainer))])
def test_a_copy_goes_on_by_itself(benchmark, make_copy):
    model = network()
    trainer = strategy("er", model, optimizer=momentum(model.parameters()), memory=60, average=0.9)
    trainer.train(benchmark.train_stream[0], shuffle=False)
    copied_strategy = make_copy(trainer)
    before = copy.deepcopy(trainer.learner.state_dict())
    copied_strategy.train(benchmark.train_stream[1], shuffle=False)
    assert same_state(trainer.learner.state_dict(), before)
    trainer.train(benchmark.train_stream[1], shuffle=False)
    assert same_state(copied_strategy.learner.state_dict(), trainer.learner.state_dict())
    assert copied_strategy.model is copied_strategy.learner.model
    assert copied_strategy.optimizer is copied_strategy.learner.optim is not trainer.optimizer


def test_a_strategy_of_a_learner_of_one_s_own_can_be_pickled(benchmark):
    """Its class is in no module; and that of a second learner whose class is called ER is not the first one's."""
    for learner_class in (Own, AnotherER):
        trainer = strategy(learner_class)
        trainer.train(benchmark.train_stream[0])
        unpickled = pickle.loads(pickle.dumps(trainer))
        assert type(unpickled) is strategy_of(learner_class)
        assert same_state(unpickled.learner.state_dict(), trainer.learner.state_dict())


# -- what is given -------------------------------------------------------------------------------------------


def test_every_learner_can_be_imported_by_the_name_of_its_class():
    assert integration.ER is strategy_of("er") is strategy_of(known_learners()["er"])
    assert strategy_of("pcl") is PCL
    with pytest.raises(AttributeError, match="has no attribute 'Nobody'"):
        integration.Nobody  # noqa: B018


def test_a_weighted_cross_entropy_of_torch():
    weighted = strategy(criterion=nn.CrossEntropyLoss(weight=torch.arange(10.0)))
    assert isinstance(weighted.learner.error, CrossEntropy)
    assert weighted.learner.error.weights == list(range(10))


def test_the_optimiser_begins_anew_on_demand_only(benchmark):
    buffers = []
    for reset in (False, True):
        model = network()
        trainer = strategy("sgd", model, optimizer=momentum(model.parameters()))
        trainer.train(benchmark.train_stream[0], shuffle=False)
        trainer.train(benchmark.train_stream[1], shuffle=False, reset_optimizer_state=reset)
        buffers.append(trainer.learner.state_dict()["optimizer"]["state"][0]["momentum_buffer"])
    plain, batches = network(), [benchmark.train_stream[index].dataset for index in range(2)]
    learner = known_learners()["sgd"](plain, optimizer=momentum, lr=0.05)
    for index, data in enumerate(batches):
        x, y = (torch.stack([torch.as_tensor(data[row][part]) for row in range(60)]) for part in range(2))
        if index == 1:
            learner.optim.state.clear()
        for start in range(0, 60, 10):
            learner.observe(x[start : start + 10], y[start : start + 10])
    assert torch.equal(buffers[1], learner.optim.state[plain[0].weight]["momentum_buffer"])
    assert not torch.equal(buffers[0], buffers[1])


def test_an_optimiser_of_some_weights_trains_these_alone(benchmark):
    body, head = nn.Sequential(nn.Linear(64, 20), nn.ReLU()), nn.Linear(20, 10)
    before = copy.deepcopy(body.state_dict()), copy.deepcopy(head.state_dict())
    trainer = strategy("er", nn.Sequential(body, head), optimizer=momentum(head.parameters()))
    trainer.train(benchmark.train_stream[0])
    assert same_state(dict(body.state_dict()), dict(before[0]))
    assert not same_state(dict(head.state_dict()), dict(before[1]))


def test_weights_of_a_method_are_added_to_the_optimiser():
    model, embed = network(), nn.Linear(64, 64)
    trainer = strategy("pcl", model, optimizer=momentum(model.parameters()), embed=embed)
    trained = {weight for group in trainer.optimizer.param_groups for weight in group["params"]}
    assert trained == {*model.parameters(), *embed.parameters()}


class WithNotes(PCL):
    """Has arguments of its own."""

    def __init__(self, *, notes, **arguments):
        super().__init__(**arguments)
        self.notes = notes


class WithMoreNotes(WithNotes):
    """Has those of its base class."""


class OfER(PCL):
    """Another learner, whose options are its arguments."""

    kind = known_learners()["er"]


def test_a_subclass_is_made_as_its_base_class_unless_it_has_another_learner():
    assert WithMoreNotes(notes="seen", model=network(), sigma_x=0.1).notes == "seen"
    assert isinstance(OfER(model=network(), memory=50).learner, OfER.kind)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": momentum(network().parameters())}, "optimizer: got one over other weights, expected one over"),
        ({"model": nn.Sequential(nn.Linear(64, 8), IncrementalClassifier(8))}, "model: got IncrementalClassifier in 1"),
        ({"criterion": nn.CrossEntropyLoss(label_smoothing=0.1)}, "criterion: got .*with no setting but weight"),
        (
            {"model": (model := network()), "optimizer": momentum(model.parameters()), "lr": 0.1},
            "lr: got 0.1, expected none with an optimizer",
        ),
        ({"model": 3}, "model: got 3, expected a torch.nn.Module"),
        ({"optimizer": "SGD"}, "optimizer: got 'SGD', expected a torch optimizer over the model's weights, or None"),
        ({"memory": -1}, "memory: got -1, expected a whole number of at least 1"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        strategy(**options)


def test_unknown_options_and_joint_training_are_refused():
    with pytest.raises(TypeError, match="unexpected keyword argument: sigmax"):
        strategy(sigmax=1)
    with pytest.raises(InputError, match="learner: got 'joint', expected one that learns from a stream"):
        strategy_of("joint")
    with pytest.raises(InputError, match="learner: got <class 'int'>, expected a subclass of parabolic.Learner"):
        strategy_of(int)


def test_a_model_that_was_exchanged_is_refused(benchmark):
    trainer = strategy("er")
    trainer.model = network()
    with pytest.raises(InputError, match="expected the model that the strategy was made with"):
        trainer.train(benchmark.train_stream[0])


def error_of(code):
    """The last line that a program writes when it fails."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr.splitlines()[-1]


def test_avalanche_is_imported_when_it_is_asked_for_and_missed_in_plain_words():
    code = """
import sys
import parabolic.integrations
assert "avalanche" not in sys.modules
sys.modules["avalanche"] = None  # as if it were not installed
import parabolic.integrations.avalanche
"""
    message = (
        "InputError: avalanche: got no Avalanche, expected it to be installed; pip install 'parabolic-cl[avalanche]'"
    )
    assert error_of(code).endswith(message)


def test_a_torchvision_for_another_torch_is_named():
    """Avalanche imports it, and its own error says nothing of either."""
    code = """
import sys


class Finder:
    def find_spec(name, path=None, target=None):
        if name == "avalanche":
            raise RuntimeError("operator torchvision::nms does not exist")


sys.meta_path.insert(0, Finder)
import parabolic.integrations.avalanche
"""
    message = "got an error: operator torchvision::nms does not exist, expected it to be imported; install the torchvis"
    assert message in error_of(code)
