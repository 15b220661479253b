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
    chosen = [torch.isin(y, torch.tensor(pair)).nonzero()[first:last, 0] for pair in PAIRS]
    return [(x[each], y[each]) for each in chosen]


def dataset(x, y):
    made = TensorDataset(x, y)
    made.targets = y
    return made


@pytest.fixture(scope="module")
def benchmark():
    parts = {"train": tensors(0, 60), "test": tensors(60, 117)}
    return benchmark_from_datasets(
        **{name: [as_classification_dataset(dataset(*each)) for each in part] for name, part in parts.items()}
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


def strategy(name="pcl", model=None, **given):
    return strategy_of(name)(
        model=network() if model is None else model,
        **{"train_mb_size": 10, "eval_mb_size": 50, "evaluator": None} | given,
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


def same(one, other):
    """Whether two states are equal to the last bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(*each) for each in zip(one, other, strict=True))
    return one == other


def without_optimizer(learner):
    return {name: value for name, value in learner.state_dict().items() if name != "optimizer"}


# -- the learner's own steps ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LEARNERS)
def test_a_strategy_learns_what_its_learner_learns_from_the_same_batches(name, benchmark):
    model, seen = network(), Recorder()
    options = {"seed": 3, "average": 0.9, "memory": 60}
    options = {key: value for key, value in options.items() if hasattr(known_learners()[name], key)}
    plain = known_learners()[name](copy.deepcopy(model), optimizer=momentum, lr=0.05, **options)
    made = strategy(name, model, optimizer=momentum(model.parameters()), plugins=[seen], **options)
    for experience in benchmark.train_stream:
        made.train(experience, shuffle=False)  # so that methods that look at a task beforehand find it in one order

    assert [len(batches) for batches in seen.batches] == [6, 6, 6]
    assert made.learner.steps == 18
    for task, batches in enumerate(seen.batches):
        plain.start_task(batches)
        for x, y in batches:
            plain.observe(x, y, task)
        plain.end_task(batches)
    assert same(without_optimizer(made.learner), without_optimizer(plain))
    assert made.model is model


def test_the_learner_s_own_optimiser_and_avalanche_s_shuffling(benchmark):
    model, seen = network(), Recorder()
    plain = known_learners()["pcl"](copy.deepcopy(model), lr=0.2, memory=60, sigma_x=0.1)
    made = PCL(
        model=model, train_mb_size=10, train_epochs=2, plugins=[seen], evaluator=None, lr=0.2, memory=60, sigma_x=0.1
    )
    made.train(benchmark.train_stream)
    for batches in seen.batches:
        assert len(batches) == 12
        for x, y in batches:
            plain.observe(x, y)
    assert same(made.learner.state_dict(), plain.state_dict())


def test_experiences_with_task_labels():
    x, y = (torch.cat(each) for each in zip(*tensors(0, 60), strict=True))
    made = nc_benchmark(
        dataset(x, y), dataset(x, y), n_experiences=3, task_labels=True, fixed_class_order=list(range(6))
    )
    learned = strategy("gem", lr=0.05, memory=60)
    for experience in made.train_stream:
        learned.train(experience)
    assert set(learned.learner.past["task"].tolist()) == {0, 1, 2}


def test_an_online_stream_has_no_tasks(benchmark):
    online = list(split_online_stream(benchmark.train_stream, experience_size=10, shuffle=False))
    learned = strategy("er", memory=60)
    learned.train(online)
    assert learned.learner.steps == len(online) == 18
    with pytest.raises(InputError, match="learner: got 'lwf', expected one that works without tasks, on an online"):
        strategy("lwf").train(online[:1])


# -- what Avalanche sees -------------------------------------------------------------------------------------


def test_metrics_are_those_of_the_learner(benchmark):
    model, seen = network(), Recorder()
    evaluator = EvaluationPlugin(
        accuracy_metrics(epoch=True, experience=True, stream=True),
        loss_metrics(epoch=True, experience=True),
        forgetting_metrics(experience=True, stream=True),
        timing_metrics(epoch=True),
        loggers=[],
    )
    made = PCL(
        model=copy.deepcopy(model), train_mb_size=10, eval_mb_size=50, evaluator=evaluator, plugins=[seen],
        memory=60, lr=0.2, average=0.8,
    )  # fmt: skip
    plain = known_learners()["pcl"](model, memory=60, lr=0.2, average=0.8)
    tests, accuracy = tensors(60, 117), []
    for experience in benchmark.train_stream:
        trained, found = made.train(experience), made.eval(benchmark.test_stream)
        right, loss, count = 0, 0.0, 0
        for x, y in seen.batches[-1]:
            right += int((plain.predict(x) == y).sum())
            loss += float(plain.observe(x, y)) * len(y)
            count += len(y)
        assert trained["Top1_Acc_Epoch/train_phase/train_stream"] == pytest.approx(right / count)
        assert trained["Loss_Epoch/train_phase/train_stream"] == pytest.approx(loss / count)
        assert "Time_Epoch/train_phase/train_stream" in trained
        accuracy.append([float((plain.predict(x) == y).float().mean()) for x, y in tests])
        for place, (x, y) in enumerate(tests):
            error = nn.functional.cross_entropy(plain.scores(x), y)
            assert found[f"Top1_Acc_Exp/eval_phase/test_stream/Exp{place:03}"] == pytest.approx(accuracy[-1][place])
            assert found[f"Loss_Exp/eval_phase/test_stream/Exp{place:03}"] == pytest.approx(float(error), rel=1e-5)
        whole = sum(share * len(y) for share, (_, y) in zip(accuracy[-1], tests, strict=True))
        assert found["Top1_Acc_Stream/eval_phase/test_stream"] == pytest.approx(whole / sum(len(y) for _, y in tests))
    lost = [accuracy[place][place] - accuracy[-1][place] for place in range(2)]
    for place in range(2):
        assert found[f"ExperienceForgetting/eval_phase/test_stream/Exp{place:03}"] == pytest.approx(lost[place])
    assert found["StreamForgetting/eval_phase/test_stream"] == pytest.approx(sum(lost) / 2)
    assert accuracy[-1][0] > 0.2  # the figures are of something learned, and kept


@pytest.mark.parametrize("name", LEARNERS)
def test_plugins_hear_of_the_same_events_in_the_same_order_as_with_avalanche_s_own(name, benchmark):
    model, theirs, ours = network(), Recorder(), Recorder()
    own = Naive(
        model=model, optimizer=momentum(model.parameters()), train_mb_size=10, eval_mb_size=50, plugins=[theirs],
        evaluator=None,
    )  # fmt: skip
    made = strategy(name, plugins=[ours])
    for each in (own, made):
        each.train(benchmark.train_stream[0])
        each.eval(benchmark.test_stream[:1])
    assert ours.events == theirs.events
    assert "after_backward" in ours.events


def test_what_a_plugin_adds_to_the_loss_is_learned(benchmark):
    class Decay(SupervisedPlugin):
        def before_backward(self, strategy, **kwargs):
            strategy.loss += 0.05 * sum(weight.square().sum() for weight in strategy.model.parameters())

    decayed, plain = strategy("er", plugins=[Decay()]), network()
    other = strategy("er", plain, optimizer=torch.optim.SGD(plain.parameters(), lr=0.1, weight_decay=0.1))
    bare = strategy("er")
    for each in (decayed, other, bare):
        each.train(benchmark.train_stream, shuffle=False)
    for one, two in zip(decayed.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(one, two)
    assert not torch.allclose(bare.model[0].weight, decayed.model[0].weight)


def test_what_a_plugin_does_to_gradients_counts(benchmark):
    class Frozen(SupervisedPlugin):
        def after_backward(self, strategy, **kwargs):
            strategy.model[0].weight.grad.zero_()

    made, before = strategy("pcl", plugins=[Frozen()]), network()
    made.train(benchmark.train_stream[0])
    assert torch.equal(made.model[0].weight, before[0].weight)
    assert not torch.equal(made.model[3].weight, before[3].weight)


def test_avalanche_s_own_plugins_work(benchmark):
    model = network()
    optimizer = momentum(model.parameters(), lr=0.2)
    schedule = LRSchedulerPlugin(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), reset_lr=False)
    replay, ewc = ReplayPlugin(mem_size=30), EWCPlugin(ewc_lambda=0.4)
    made = strategy("er", model, optimizer=optimizer, plugins=[schedule, replay, ewc])
    for experience in benchmark.train_stream:
        made.train(experience)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.2 / 8)
    assert len(replay.storage_policy.buffer) == 30
    assert len(ewc.importances) == 3
    assert made.learner.past.offered > 180  # what Avalanche replays comes on top


def test_testing_while_training_changes_nothing(benchmark):
    watched, plain = strategy("pcl", eval_every=1, peval_mode="iteration"), strategy("pcl")
    for each in (watched, plain):
        each.train(benchmark.train_stream, eval_streams=[benchmark.test_stream], shuffle=False)
    assert same(watched.learner.state_dict(), plain.learner.state_dict())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
def test_a_copy_goes_on_by_itself(benchmark, copied):
    model = network()
    made = strategy("er", model, optimizer=momentum(model.parameters()), memory=60, average=0.9)
    made.train(benchmark.train_stream[0], shuffle=False)
    again = copied(made)
    before = copy.deepcopy(made.learner.state_dict())
    again.train(benchmark.train_stream[1], shuffle=False)
    assert same(made.learner.state_dict(), before)
    made.train(benchmark.train_stream[1], shuffle=False)
    assert same(again.learner.state_dict(), made.learner.state_dict())
    assert again.model is again.learner.model
    assert again.optimizer is again.learner.optim is not made.optimizer


def test_a_strategy_of_a_learner_of_one_s_own_can_be_pickled(benchmark):
    """Its class is in no module; and that of a second learner whose class is called ER is not the first one's."""
    for kind in (Own, AnotherER):
        made = strategy(kind)
        made.train(benchmark.train_stream[0])
        again = pickle.loads(pickle.dumps(made))
        assert type(again) is strategy_of(kind)
        assert same(again.learner.state_dict(), made.learner.state_dict())


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
    kept = []
    for reset in (False, True):
        model = network()
        made = strategy("sgd", model, optimizer=momentum(model.parameters()))
        made.train(benchmark.train_stream[0], shuffle=False)
        made.train(benchmark.train_stream[1], shuffle=False, reset_optimizer_state=reset)
        kept.append(made.learner.state_dict()["optimizer"]["state"][0]["momentum_buffer"])
    plain, batches = network(), [benchmark.train_stream[place].dataset for place in range(2)]
    learner = known_learners()["sgd"](plain, optimizer=momentum, lr=0.05)
    for place, data in enumerate(batches):
        x, y = (torch.stack([torch.as_tensor(data[row][part]) for row in range(60)]) for part in range(2))
        if place == 1:
            learner.optim.state.clear()
        for start in range(0, 60, 10):
            learner.observe(x[start : start + 10], y[start : start + 10])
    assert torch.equal(kept[1], learner.optim.state[plain[0].weight]["momentum_buffer"])
    assert not torch.equal(kept[0], kept[1])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": nn.Sequential(nn.Linear(64, 8), IncrementalClassifier(8))}, "model: got IncrementalClassifier in 1"),
        ({"criterion": nn.CrossEntropyLoss(label_smoothing=0.1)}, "criterion: got .*with no setting but weight"),
        ({"optimizer": momentum(network().parameters()), "lr": 0.1}, "lr: got 0.1, expected none with an optimizer"),
        ({"model": 3}, "model: got 3, expected a torch.nn.Module"),
        ({"optimizer": "SGD"}, "optimizer: got 'SGD', expected a torch optimizer over the model's weights, or None"),
        ({"memory": -1}, "memory: got -1, expected a whole number of at least 1"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(given, message):
    with pytest.raises(InputError, match=message):
        strategy(**given)


def test_unknown_options_and_joint_training_are_refused():
    with pytest.raises(TypeError, match="unexpected keyword argument: sigmax"):
        strategy(sigmax=1)
    with pytest.raises(InputError, match="learner: got 'joint', expected one that learns from a stream"):
        strategy_of("joint")
    with pytest.raises(InputError, match="learner: got <class 'int'>, expected a subclass of parabolic.Learner"):
        strategy_of(int)


def test_a_model_that_was_exchanged_is_refused(benchmark):
    made = strategy("er")
    made.model = network()
    with pytest.raises(InputError, match="expected the model that the strategy was made with"):
        made.train(benchmark.train_stream[0])


def test_avalanche_is_imported_when_it_is_asked_for_and_missed_in_plain_words():
    code = """
import sys
import parabolic.integrations
assert "avalanche" not in sys.modules
sys.modules["avalanche"] = None  # as if it were not installed
import parabolic.integrations.avalanche
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    told = "InputError: avalanche: got no Avalanche, expected it to be installed; pip install 'parabolic-cl[avalanche]'"
    assert said.stderr.splitlines()[-1].endswith(told)
