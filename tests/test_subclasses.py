"""A learner of one's own is what it says, or the class is refused."""

import copy

import pytest
import torch
from torch import nn

from parabolic import ER, GEM, InputError, ResNet18, make_stream, train
from parabolic.backbones import make_backbone
from parabolic.learners import saving
from parabolic.options import option
from parabolic.states import same_state


def test_a_default_needs_its_type():
    with pytest.raises(InputError, match=r"Mine\.lr: got 0\.5, expected a field with its type; as in lr: float = …"):
        type("Mine", (ER,), {"lr": 0.5})
    with pytest.raises(InputError, match=r"Mine\.weight: got .*, expected a field with its type"):
        type("Mine", (ER,), {"weight": option(0.5, "a weight")})

    class Typed(ER):
        lr: float = 0.5
        tasks = 0  # no field of any class, and so no matter

    assert Typed(nn.Linear(2, 2)).lr == 0.5


@pytest.mark.parametrize("name", ["body", "steps", "augment"])
def test_a_method_that_an_attribute_would_hide_is_refused(name):
    message = rf"attribute of Mine: got '{name}', expected a name that is not taken; .* such as my_{name}"
    with pytest.raises(InputError, match=message):
        type("Mine", (ER,), {name: lambda self, x: x})


def test_a_default_may_be_a_function():
    def shifted(x, generator):
        return x + 1

    class Shifted(ER):
        augment: object = staticmethod(shifted)

    assert Shifted(nn.Linear(2, 2)).augmented(torch.zeros(1, 2)).tolist() == [[1, 1]]


class Nearest(ER):
    """Predicts by the mean features of each class in memory."""

    def scores_at(self, inputs):
        scores = super().scores_at(inputs)
        if not len(self.past):
            return scores
        remembered = self.features(self.inputs(self.past["x"]))
        means = remembered.new_zeros(scores.shape[1], remembered.shape[1]).index_add(0, self.past["y"], remembered)
        return self.features(inputs) @ means.T


def trained_nearest(**options):
    torch.manual_seed(0)
    learner = Nearest(ResNet18((1, 8, 8), 4, width=4), memory=20, replay=5, lr=0.01, **options)
    for _ in range(2):  # an average begins as the weights after the first
        learner.observe(torch.randn(6, 1, 8, 8), torch.arange(6) % 4)
    return learner


def test_ones_own_scores_are_those_of_evaluation_mode():
    learner, x = trained_nearest(), torch.randn(6, 1, 8, 8)
    before = copy.deepcopy(learner.state_dict())
    torch.testing.assert_close(learner.scores(x)[:1], learner.scores(x[:1]))  # batch norm does not mix examples
    assert not learner.scores(x).requires_grad
    assert same_state(learner.state_dict(), before)  # nor does it learn from tests
    assert learner.model.training


def test_ones_own_scores_are_those_of_the_average():
    learner, x = trained_nearest(average=0.9), torch.randn(6, 1, 8, 8)
    averaged = learner.scores(x)
    weights, learner.averaged = learner.predicting_weights(), None
    assert not torch.allclose(learner.scores(x), averaged)
    learner.model.load_state_dict(weights, strict=False)
    torch.testing.assert_close(learner.scores(x), averaged)


class Rescored:
    """For several methods: scores of its own, and a count of tasks, in a class that is no learner."""

    def scores_at(self, inputs):
        return 2 * self.model(inputs)

    def end_task(self, batches):
        self.tasks = getattr(self, "tasks", 0) + 1


class RescoredER(Rescored, ER):
    needs_tasks = True


def test_a_base_that_is_no_learner_defines_methods_as_a_learner_does():
    torch.manual_seed(0)
    learner = RescoredER(nn.Sequential(nn.Dropout(), nn.Linear(2, 3)), average=0.9)
    x, y = torch.randn(6, 2), torch.arange(6) % 3
    for _ in range(3):
        learner.observe(x, y, task=0)
    scores = learner.scores(x)
    assert not scores.requires_grad
    torch.testing.assert_close(scores, 2 * ER.scores_at(learner, x))  # those of evaluation mode and of the average
    with pytest.raises(InputError, match="^task: got 1, expected 0 until end_task is called; RescoredER"):
        learner.observe(x, y, task=1)
    learner.end_task([(x, y)])
    learner.observe(x, y, task=1)


def test_a_boundary_may_be_a_method_of_another_name():
    class Consolidating(ER):
        needs_tasks = True

        def consolidate(self, batches):
            pass

        end_task = consolidate

    learner, (x, y) = Consolidating(nn.Linear(2, 2)), (torch.zeros(2, 2), torch.tensor([0, 1]))
    learner.observe(x, y, task=0)
    learner.end_task([(x, y)])
    learner.observe(x, y, task=1)
    assert learner.steps == 2


def test_features_are_what_the_last_layer_gets_and_are_learned():
    learner, x = trained_nearest(), torch.randn(6, 1, 8, 8)
    features = learner.features(x)
    torch.testing.assert_close(learner.model.head(features), learner.model(x))
    learner.optim.zero_grad()
    features.square().sum().backward()
    assert learner.model.stem.weight.grad.abs().sum() > 0
    assert learner.model.head.weight.grad is None


class Predicting(ER):
    def predict(self, x):
        return super().predict(x) * 0


class Scoring(ER):
    def scores(self, x):
        return super().scores(x) * 0


class Observing(GEM):  # whose step is its own, but not that of this class
    def observe(self, x, y, task=None):
        return super().observe(x, y, task)


class Stepping(Observing):
    def step(self, x, y, task=None):
        return super().step(x, y, task)


@pytest.mark.parametrize(
    ("cls", "overridden", "expected"),
    [(Predicting, "predict", "scores_at"), (Scoring, "scores", "scores_at"), (Observing, "observe", "step")],
)
def test_what_the_loop_would_not_ask_is_refused(cls, overridden, expected):
    stream = make_stream("seq-blobs")
    learner = cls(make_backbone("mlp", stream.shape, stream.classes), memory=40)
    message = f"{overridden} of {cls.__name__}: got an override, expected one of {expected}, which this loop calls"
    with pytest.raises(InputError, match=message):
        train(learner, stream)
    assert learner.steps == 0


def test_what_it_asks_may_be_ones_own():
    stream = make_stream("seq-blobs")
    assert train(Stepping(make_backbone("mlp", stream.shape, stream.classes), memory=40), stream).step > 0


def test_a_field_that_a_memory_is_to_keep_and_no_batch_has_is_refused_by_name():
    class Weighing(ER):
        keeps = ("x", "y", "weight")

    class ByTask(ER):
        keeps = ("x", "y", "task")

    x, y = torch.zeros(3, 2), torch.zeros(3, dtype=torch.long)
    expected = r"expected what Weighing keeps: x, y, weight; add it to `batch` in `loss`"
    with pytest.raises(InputError, match=f"batch: got no weight, {expected}"):
        Weighing(nn.Linear(2, 2)).observe(x, y)
    learner = ByTask(nn.Linear(2, 2))
    with pytest.raises(InputError, match=r"batch: got no task, .*; pass task= with every batch"):
        learner.observe(x, y)
    learner.observe(x, y, task=4)
    assert learner.past["task"].tolist() == [4, 4, 4]


def test_what_loss_replaces_and_remember_changes_is_as_before_if_a_batch_is_refused():
    class Counting(ER):
        def __post_init__(self):
            super().__post_init__()
            self.labels, self.tried = torch.zeros(3), 0

        def loss(self, batch, recalled):
            self.tried += 1
            return super().loss(batch, recalled)

        def remember(self, raw, batch):
            super().remember(raw, batch)
            self.labels.index_add_(0, raw["y"], torch.ones(len(raw["y"])))

    learner = Counting(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3)))
    with pytest.raises(InputError, match="at least two examples, as batch norm needs here"):
        learner.observe(torch.randn(1, 2), [2])
    learner.observe(torch.randn(3, 2), [0, 0, 1])
    assert (learner.labels.tolist(), learner.tried) == ([2, 1, 0], 1)


def test_a_state_that_does_not_fit_changes_nothing():
    def learner(classes=3, **options):
        torch.manual_seed(classes)
        trained = ER(nn.Linear(4, classes), **options)
        trained.observe(torch.randn(8, 4), torch.arange(8) % 3)
        return trained

    kept_learner = learner(memory=50)
    before = copy.deepcopy(kept_learner.state_dict())
    states = {
        r"state: got weight of shape \[5, 4\], expected \[3, 4\].*Learner\.load": learner(5, memory=50).state_dict(),
        r"memory: got a state of \[5, 5\] examples, expected 8": learner(memory=5, replay=5).state_dict(),
        r"memory: got no number offered": {**learner(memory=50).state_dict(), "memory": {}},
    }
    for message, state in states.items():
        with pytest.raises(InputError, match=message):
            kept_learner.load_state_dict(state)
        assert same_state(kept_learner.state_dict(), before)


class Logging(ER):
    """Keeps its last loss, and with it the graph that computed it."""

    def loss(self, batch, recalled):
        self.last = super().loss(batch, recalled)
        return self.last


def test_a_method_that_keeps_what_it_computed_is_copied_and_restored():
    learner, (x, y) = Logging(nn.Linear(2, 2)), (torch.randn(4, 2), torch.tensor([0, 1, 1, 0]))
    learner.observe(x, y)
    copied = copy.deepcopy(learner)
    saving.restore(learner, saving.describe(copied))
    learner.observe(x, y)
    copied.observe(x, y)
    assert same_state(learner.state_dict(), copied.state_dict())


class Counting(ER):
    """Counts its labels, at the place of each output, in a step."""

    def __post_init__(self):
        super().__post_init__()
        self.counts = torch.zeros(2)

    def loss(self, batch, recalled):
        self.counts += batch["y"].bincount(minlength=self.model.out_features)
        return super().loss(batch, recalled)


class Copying(ER):
    """Goes back to its first weights after a task."""

    needs_tasks = True

    def __post_init__(self):
        super().__post_init__()
        self.first = copy.deepcopy(self.model)

    def end_task(self, batches):
        self.model.load_state_dict(self.first.state_dict())


@pytest.mark.parametrize(("cls", "name"), [(Counting, "counts"), (Copying, "first")])
def test_what_was_not_widened_when_the_network_grew_is_named(cls, name):
    def learn(learner):
        y = torch.arange(8) % learner.model.out_features
        learner.observe(torch.randn(8, 3), y, task=0)
        learner.end_task([])

    learner = cls(nn.Linear(3, 2), memory=50)
    learn(learner)
    copied = copy.deepcopy(learner)
    learner.grow(4)
    message = (
        f"on_growth of {cls.__name__}: got none that widens `{name}`, which is still for 2 outputs, .* now has 4; .*"
    )
    with pytest.raises(InputError, match=rf"(?s){message}torch says: "):
        learn(learner)
    with pytest.raises(InputError, match="NaN"):  # what says enough itself is left as it is
        learner.observe(torch.full((1, 3), torch.nan), [0], task=0)

    class Widening(cls):
        def on_growth(self, moved):
            super().on_growth(moved)
            self.counts, self.first = torch.zeros(4), copy.deepcopy(self.model)

    copied.__class__ = Widening
    copied.grow(4)
    learn(copied)


def test_an_error_that_growth_does_not_explain_stays_as_it_is():
    class Failing(ER):
        def loss(self, batch, recalled):
            raise RuntimeError("mine")

    learner = Failing(nn.Linear(3, 2), memory=50)
    learner.grow(4)
    with pytest.raises(RuntimeError, match="^mine$"):
        learner.observe(torch.randn(8, 3), torch.arange(8) % 4)


def test_a_network_without_weights_to_train_is_refused_with_a_remedy():
    with pytest.raises(InputError, match="expected a module with trainable parameters; leave some"):
        ER(nn.Linear(3, 2).requires_grad_(False))
