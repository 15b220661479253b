"""Heads that grow and learners on disk, where the two meet and where they are hard: nothing is half done."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from parabolic import ER, PCL, SGD, InputError, Journal, Learner, make_backbone
from parabolic.estimators import ParabolicClassifier
from parabolic.learners import MSE, CrossEntropy, Huber, Scale
from parabolic.learners.head import last_linear
from parabolic.states import pack_state, read_state, same_state


def batch(classes=3, size=6):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(size, 4, generator=generator), torch.arange(size) % classes


# -- what grows --------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Words in, scores of words out, by the same weights."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(3, 4), nn.Linear(4, 3, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x):
        return self.head(self.words(x).mean(1))


class Aside(nn.Module):
    """The layer that gives the scores is not the last one that it has."""

    def __init__(self):
        super().__init__()
        self.head, self.aside = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(x)


class Summed(Aside):
    """Neither of its layers can have more outputs alone."""

    def forward(self, x):
        return self.head(x) + self.aside(x)


class Packed(nn.Module):
    """A model of sequences that takes none without a word: zeros say nothing of it."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(5, 4), nn.Linear(4, 3)

    def forward(self, x):
        lengths = (x > 0).sum(1)
        packed = nn.utils.rnn.pack_padded_sequence(self.words(x), lengths, batch_first=True, enforce_sorted=False)
        return self.head(nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)[0].sum(1))


def assert_growth_refused(learner, classes, match):
    """Assert that growing to `classes` is refused with this message and leaves everything as it was."""
    before, weights = copy.deepcopy(learner.state_dict()), [*learner.model.parameters()]
    head, classes_before = last_linear(learner.model)[1], learner.classes
    outputs = head.out_features
    with pytest.raises(InputError, match=match):
        learner.grow(classes)
    assert same_state(before, learner.state_dict())
    assert all(
        weight is weight_before for weight, weight_before in zip(learner.model.parameters(), weights, strict=True)
    )
    assert (head.out_features, learner.classes) == (outputs, classes_before)


def test_a_head_that_shares_its_weights_does_not_grow():
    learner = SGD(Tied())
    assert_growth_refused(learner, 5, r"^model: got .*that shares weights with words, expected its own weights")
    learner.observe(torch.tensor([[0, 1], [2, 2]]), torch.tensor([0, 1]))


@pytest.mark.parametrize("norm", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm])
def test_a_head_whose_weights_are_computed_does_not_grow(norm):
    learner = SGD(nn.Sequential(nn.Linear(4, 8), norm(nn.Linear(8, 3))))
    assert_growth_refused(
        learner, 5, r"^model: got .*parametrizations.weight.original.*, expected no parameters but weight and bias"
    )
    learner.observe(*batch())


@pytest.mark.parametrize("model", [Aside, Summed])
def test_a_layer_that_does_not_give_the_scores_is_not_widened(model):
    learner = ER(model(), average=0.9)
    learner.observe(*batch())
    assert_growth_refused(learner, 5, r"^model: got 3 scores that are not .*, expected .* gives the scores; define")
    learner.observe(*batch())


class Early(nn.Module):
    """The layer that gives the scores is defined before a wider one."""

    def __init__(self):
        super().__init__()
        self.head, self.body = nn.Linear(8, 3), nn.Linear(4, 8)

    def forward(self, x):
        return self.head(self.body(x))


@pytest.mark.parametrize("cls", [PCL, ER])
def test_a_wide_layer_elsewhere_is_not_taken_for_room(cls):
    learner = cls(Early())
    learner.observe(*batch())
    assert_growth_refused(
        learner, 5, r"^model: got 3 scores that are not .*out_features=8.*, expected .* gives the scores; define"
    )
    learner.observe(*batch())
    x = np.random.default_rng(0).normal(size=(30, 4))
    model = ParabolicClassifier(model=Early(), learner=cls.name).fit(x, np.array(["a", "b", "c"] * 10))
    before = model.predict(x)
    with pytest.raises(InputError, match="3 scores that are not"):
        model.partial_fit(x[:2], ["d", "d"])
    assert [*model.classes_] == ["a", "b", "c"]
    assert (model.predict(x) == before).all()


def test_a_growth_of_the_wrong_layer_before_the_first_batch_is_refused_with_that_batch():
    learner = ER(Aside())
    learner.grow(5)
    with pytest.raises(InputError, match=r"^classes: got 5, expected at most 3, .* last torch.nn.Linear"):
        learner.observe(*batch(5))


def test_a_model_that_takes_no_zeros_grows_all_the_same():
    learner = ER(Packed())
    x = torch.tensor([[1, 2, 0], [3, 3, 4]])
    learner.observe(x, torch.tensor([0, 1]))
    learner.grow(5)
    learner.observe(x, torch.tensor([3, 4]))
    assert learner.scores(x).shape == (2, 5)


@pytest.mark.parametrize("optimizer", ["Adafactor", "Rprop", "Adagrad", "NAdam", "ASGD"])
def test_any_optimiser_goes_on_with_more_rows_and_moves_them(optimizer):
    learner = SGD(nn.Linear(4, 2), optimizer=optimizer, lr=0.01)
    for _ in range(3):
        learner.observe(*batch(2))
    learner.grow(4)
    before = learner.model.weight.detach().clone()
    for _ in range(3):
        learner.observe(*batch(4))
    assert ((learner.model.weight - before).abs() > 1e-4).any(1).all()


# -- what is saved -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("outputs", [2, 5])
def test_a_journal_goes_on_after_growth_with_weights_of_classes(tmp_path, outputs):
    def make_learner(weights=(1.0, 3.0)):
        return ER(nn.Linear(4, outputs), classes=2, criterion=CrossEntropy(weights=weights))

    with Journal(tmp_path, make_learner()) as journal:
        journal.learner.grow(3)
        journal.observe(*batch())
    with pytest.raises(InputError, match="^criterion: "):
        Journal(tmp_path, make_learner((1.0, 2.0)))
    with Journal(tmp_path, make_learner()) as resumed:
        assert resumed.learner.criterion.weights == [1.0, 3.0, 1.0]
        assert same_state(resumed.learner.state_dict(), journal.learner.state_dict())
        assert torch.equal(resumed.observe(*batch()), journal.learner.observe(*batch()))


class Halved(nn.Module):
    """What a user brings, with numbers of its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("by", torch.tensor(1.0))

    def forward(self, x):
        return x / self.by


def test_what_scales_inputs_and_targets_comes_back_to_the_bit(tmp_path):
    def parts():
        return {"prepare": Scale(), "criterion": MSE(units=Scale())}

    def numbers(learner, seed):
        generator = torch.Generator().manual_seed(seed)
        x = 5 + 3 * torch.randn(7, 4, generator=generator)
        y = 100 * x[:, :2].cumsum(1)
        learner.prepare.update(x)
        learner.error.units.update(y)
        return x, y

    learner = ER(make_backbone("mlp", (4,), 2), **parts())
    learner.observe(*numbers(learner, 0))
    learner.save(tmp_path / "a")
    loaded = Learner.load(tmp_path / "a", **parts())
    assert loaded.prepare.count == loaded.error.units.count == 7
    assert same_state(loaded.state_dict(), learner.state_dict())
    assert torch.equal(loaded.observe(*numbers(loaded, 1)), learner.observe(*numbers(learner, 1)))
    x = torch.ones(1, 4)
    assert torch.equal(loaded.predict(x), learner.predict(x))
    # A file of an earlier version says nothing of them: then they are as they were given.
    content = read_state(tmp_path / "a")
    del content["state"]["prepare"], content["state"]["units"]
    (tmp_path / "a").write_bytes(pack_state(content))
    new_parts = parts()
    new_parts["prepare"].update(x)
    from_old_file = Learner.load(tmp_path / "a", **new_parts)
    assert (from_old_file.prepare.count, from_old_file.error.units.count) == (1, 0)


def test_a_journal_keeps_what_scales_inputs(tmp_path):
    with Journal(tmp_path, ER(nn.Linear(4, 3), prepare=Scale())) as journal:
        x, y = batch()
        journal.learner.prepare.update(10 * x)
        journal.observe(10 * x, y)
    with Journal(tmp_path, ER(nn.Linear(4, 3), prepare=Scale())) as resumed:
        assert torch.equal(resumed.learner.scores(x), journal.learner.scores(x))


def test_a_module_that_prepares_is_saved_along(tmp_path):
    learner = ER(make_backbone("mlp", (4,), 3), prepare=Halved())
    learner.prepare.by.fill_(2)
    learner.save(tmp_path / "a")
    assert Learner.load(tmp_path / "a", prepare=Halved()).prepare.by == 2


def test_a_network_of_another_type_is_made_anew(tmp_path):
    learner = ER(make_backbone("mlp", (4,), 3).double(), average=0.9)
    learner.observe(*batch())
    learner.save(tmp_path / "a")
    loaded = Learner.load(tmp_path / "a")
    assert loaded.dtype == torch.float64
    assert same_state(loaded.state_dict(), learner.state_dict())


def test_class_weights_come_as_tensors_and_arrays_too(tmp_path):
    x, y = batch()
    array = np.array([1.0, 2, 3], dtype=np.float32)
    for weights in (torch.tensor([1.0, 2, 3]), array, list(array), torch.tensor([1, 2, 3])):
        learner = ER(make_backbone("mlp", (4,), 3), criterion=CrossEntropy(weights=weights))
        assert learner.criterion.weights == [1, 2, 3]
        expected = nn.functional.cross_entropy(learner.scores(x), y, torch.tensor([1.0, 2, 3]))
        assert learner.observe(x, y).item() == pytest.approx(expected.item(), rel=1e-6)
        learner.save(tmp_path / "a")
        assert Learner.load(tmp_path / "a").criterion.weights == [1, 2, 3]
    ER(make_backbone("mlp", (4,), 3), criterion=Huber(array[0])).save(tmp_path / "b")
    assert Learner.load(tmp_path / "b").criterion.delta == 1
    for bad_weights in (torch.ones(3, 2), torch.tensor(1.0), torch.tensor([1.0, -1.0])):
        with pytest.raises(InputError, match="^weights: "):
            CrossEntropy(weights=bad_weights)


@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0:RuntimeWarning")
def test_a_file_does_not_depend_on_whether_the_model_is_compiled(tmp_path):
    def compiled_model():
        return torch.compile(make_backbone("mlp", (4,), 3), backend="eager")

    plain, compiled_learner = (ER(model, average=0.9) for model in (make_backbone("mlp", (4,), 3), compiled_model()))
    for learner in (plain, compiled_learner):
        learner.observe(*batch())
    plain.save(tmp_path / "plain")
    compiled_learner.save(tmp_path / "compiled")
    for name in ("plain", "compiled"):
        for model in (None, compiled_model()):
            loaded = Learner.load(tmp_path / name, model=model)
            assert loaded.steps == 1
            assert torch.equal(loaded.scores(batch()[0]), plain.scores(batch()[0]))
            loaded.grow(4)
            loaded.save(tmp_path / "grown")
            assert Learner.load(tmp_path / "grown", model=compiled_model()).classes == 4


# -- what a model does not take ----------------------------------------------------------------------------


def test_a_single_example_that_batch_norm_cannot_learn_is_refused_with_a_remedy():
    learner = ER(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)))
    x, y = batch()
    before = copy.deepcopy([*learner.model.parameters()])
    with pytest.raises(InputError, match=r"^x: got .*\[1, 4\].*, expected at least two examples, .*batch norm"):
        learner.observe(x[:1], y[:1])
    assert same_state(before, [*learner.model.parameters()])
    assert learner.steps == 0
    learner.observe(x, y)
    learner.observe(x[:1], y[:1])  # with those recalled it is enough
