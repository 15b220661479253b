"""What every learner promises, and the two simplest against plain torch."""

import copy
import functools
import inspect
import pickle

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from parabolic import CLSER, ER, EWC, MLP, PCL, SGD, InputError, Learner, Memory, ReplayLearner
from parabolic.learners import Scale, find_learner, known_learners
from parabolic.learners.average import WeightAverage
from parabolic.learners.balance import BalancedLearner
from parabolic.memory import ClassBalanced, EqualShares, distinct
from parabolic.options import options_of
from parabolic.states import same_state

ALL = sorted(known_learners())


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))


def batches(count, size=6, seed=1, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 3, generator=generator, dtype=dtype), torch.randint(4, (size,), generator=generator))
        for _ in range(count)
    ]


def make_learner(name, model=None, **options):
    cls = find_learner(name)
    if issubclass(cls, ReplayLearner):
        options = {"memory": 20, "replay": 5} | options
    return cls(model or net(), **options)


def observe_batch(learner, data, index):
    """Learn batch `index` of `data`; a learner that needs tasks begins a new one every four batches."""
    if not learner.needs_tasks:
        return learner.observe(*data[index])
    task, first_of_task = index // 4, index - index % 4
    if index == first_of_task:
        learner.start_task(data[first_of_task : first_of_task + 4])
    loss = learner.observe(*data[index], task)
    if index == first_of_task + 3:
        learner.end_task(data[first_of_task : first_of_task + 4])
    return loss


def frozen(value):
    """A deep copy of a state, to compare with later."""
    if isinstance(value, dict):
        return {key: frozen(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [frozen(item) for item in value]
    return value.clone() if isinstance(value, torch.Tensor) else value


def same(ours, theirs):
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs


def test_sgd_is_plain_torch():
    ours, theirs = net().double(), net().double()
    learner = SGD(ours, lr=0.05)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.05)
    for x, y in batches(5, dtype=torch.float64):
        learner.observe(x, y)
        optimizer.zero_grad()
        cross_entropy(theirs(x), y).backward()
        optimizer.step()
    assert same(frozen(ours.state_dict()), frozen(theirs.state_dict()))


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_er_learns_the_batch_and_the_recalled_together(smoothing):
    ours, theirs = net().double(), net().double()
    learner = ER(ours, lr=0.05, memory=20, replay=5, seed=3, smoothing=smoothing)
    generator, remembered = torch.Generator().manual_seed(3), []
    for x, y in batches(3, dtype=torch.float64):  # 18 examples: every one is kept, in order
        joint_x, joint_y = x, y
        if remembered:
            rows = distinct(min(5, len(remembered)), len(remembered), generator=generator).tolist()
            joint_x = torch.cat([x, *[remembered[row][0][None] for row in rows]])
            joint_y = torch.cat([y, *[remembered[row][1][None] for row in rows]])
        loss = cross_entropy(theirs(joint_x), joint_y, label_smoothing=smoothing)
        gradients = torch.autograd.grad(loss, list(theirs.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(theirs.parameters(), gradients, strict=True):
                parameter -= 0.05 * gradient
        remembered += list(zip(x, y, strict=True))
        torch.rand(len(x), generator=generator, dtype=torch.float64)  # what the reservoir draws
        assert learner.observe(x, y).item() == pytest.approx(loss.item(), abs=1e-12)
    for our_weight, their_weight in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(our_weight, their_weight, atol=1e-12)


def test_smoothed_labels_leave_out_outputs_that_are_no_classes():
    model = nn.Linear(4, 5)
    learner = ER(model, memory=20, replay=5, classes=3, smoothing=0.3)
    x, y = torch.randn(6, 4), torch.arange(6) % 3
    target = torch.cat([0.7 * torch.eye(3)[y] + 0.1, torch.zeros(6, 2)], 1)
    expected = cross_entropy(model(x), target).item()
    assert learner.observe(x, y).item() == pytest.approx(expected, rel=1e-5)


def test_smoothing_is_for_classes():
    with pytest.raises(InputError, match=r"smoothing: got 0\.1, expected 0 where targets are numbers"):
        ER(nn.Linear(4, 1), memory=40, smoothing=0.1, criterion="mse")


@pytest.mark.parametrize("name", sorted(known_learners()))
def test_repeats_are_steps_on_one_batch_which_is_kept_once(name):
    cls = find_learner(name)

    class RepeatsByHand(cls):
        """Repeats by hand: only the last step of a batch is remembered."""

        last_step = True

        def remember(self, raw, batch):
            if self.last_step:
                super().remember(raw, batch)

        def repeat_steps(self, x, y, times, task):
            for number in range(times):
                self.last_step = number == times - 1
                loss = self.step(x, y, task)
            return loss

    memory = {"memory": 20, "replay": 5} if issubclass(cls, ReplayLearner) else {}
    ours, theirs = (learner_class(net(), lr=0.05, average=0.9, **memory) for learner_class in (cls, RepeatsByHand))
    ours.repeats, task = 3, 0 if cls.needs_tasks else None
    for learner in (ours, theirs):
        learner.start_task(batches(5))
    for x, y in batches(5):
        assert torch.equal(ours.step(x, y, task), theirs.repeat_steps(x, y, 3, task))
    assert ours.steps == 5
    assert same({**frozen(ours.state_dict()), "steps": 15}, frozen(theirs.state_dict()))


@pytest.mark.parametrize("spoil", [lambda loss: loss.item(), lambda loss: loss.expand(3), lambda loss: None])
def test_a_loss_that_is_not_one_number_is_refused(spoil):
    class Mine(SGD):
        name = "mine"

        def loss(self, batch, recalled):
            return spoil(super().loss(batch, recalled))

    learner = Mine(net())
    with pytest.raises(
        InputError, match="^loss of mine: got .*, expected a tensor of one number; take its mean, for example$"
    ):
        learner.observe(*batches(1)[0])
    assert not learner.stepping


@pytest.mark.parametrize("name", [name for name in ALL if name != "ewc"])  # whose penalty has one
def test_a_network_without_a_gradient_is_refused(name):
    class Detached(nn.Linear):
        def forward(self, x):
            return super().forward(x).detach()

    def learn():
        learner.start_task(data)
        for x, y in data:
            learner.observe(x, y, task=0)
        learner.end_task(data)  # joint training takes its steps here

    learner, data = known_learners()[name](Detached(3, 4)), batches(2)
    with pytest.raises(InputError, match=f"^loss of {name}: got a number without a gradient, .* also in the model"):
        learn()


def test_an_error_of_autograd_in_a_users_own_method_keeps_its_traceback():
    class Mine(SGD):
        def loss(self, batch, recalled):
            scores = self.model(batch["x"])
            torch.autograd.grad(scores.detach().sum(), self.model.weight)
            return self.error(scores, batch["y"])

    with pytest.raises(RuntimeError, match="does not require grad") as error:  # its loss has one
        Mine(nn.Linear(3, 4)).observe(*batches(1)[0])
    assert any("torch.autograd.grad(scores" in str(entry.statement) for entry in error.traceback)


def test_a_loss_that_was_differentiated_is_refused_with_what_to_leave_out():
    class Backward(SGD):
        name = "backward"

        def loss(self, batch, recalled):
            loss = super().loss(batch, recalled)
            loss.backward()
            return loss

    class Keeping(SGD):
        name = "keeping"
        last = 0.0

        def loss(self, batch, recalled):
            self.last = super().loss(batch, recalled) + self.last
            return self.last

    for method in (Backward, Keeping):
        learner, data = method(net()), batches(2)
        with pytest.raises(InputError, match=f"^loss of {method.name}: got .* differentiated.*; leave out .backward"):
            [learner.observe(x, y) for x, y in data]


def test_a_loss_without_a_gradient_is_refused_by_the_name_of_its_method():
    class Mine(SGD):
        name = "mine"

        def loss(self, batch, recalled):
            return super().loss(batch, recalled).detach()

    learner = Mine(net())
    before = [weight.clone() for weight in learner.model.parameters()]
    with pytest.raises(InputError, match="^loss of mine: got a number without a gradient, expected one computed from"):
        learner.observe(*batches(1)[0])
    assert all(torch.equal(*pair) for pair in zip(before, learner.model.parameters(), strict=True))


@pytest.mark.parametrize("value", [1e39, -1.7976931348623157e308])
@pytest.mark.parametrize("prepare", [None, lambda x: x - 1])
def test_a_number_that_the_model_cannot_hold_is_refused_before_anything_changes(value, prepare):
    learner = ER(net(), memory=20, replay=5, prepare=prepare)
    (x, y), (too_large, _) = batches(2, dtype=torch.float64)
    learner.observe(x, y)
    before = frozen(learner.state_dict())
    too_large[2, 1] = value
    for method in (lambda: learner.observe(too_large, y), lambda: learner.predict(too_large)):
        with pytest.raises(
            InputError,
            match=r"^x: got 1 values .* the first at \[2, 1\].*not finite as inputs of the model \(float32\)",
        ):
            method()
    assert same(frozen(learner.state_dict()), before)


@pytest.mark.parametrize("name", ALL)
def test_a_single_example_that_batch_norm_cannot_learn_changes_nothing(name):
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.BatchNorm1d(16), nn.Linear(16, 4))
    learner, x, y = make_learner(name, model), torch.randn(6, 1, 4, 4), torch.arange(6) % 3
    learner.start_task([(x, y)])
    undisturbed, before = copy.deepcopy(learner), frozen(learner.state_dict())
    single = (x[:1] + 100, torch.tensor([3]), 1 if learner.needs_tasks else None)  # of another class and another task
    if name == "pcl":  # which learns from all points of a bridge together
        learner.observe(*single)
        return
    with pytest.raises(InputError, match="^x: got .*, expected at least two examples, as batch norm needs here; hold"):
        learner.observe(*single)
    assert same({**frozen(learner.state_dict()), "example": None}, {**before, "example": None})
    assert_continues_alike(learner, undisturbed, x, y)


@pytest.mark.parametrize(
    ("name", "options"),
    [(name, {"replay": 1}) for name in ("agem", "cbrs", "clser", "der", "derpp", "gem", "mixup")]
    + [("gem", {"memory": 1, "replay": 0}), ("vrmcl", {"chunk": 1})],
)
def test_a_single_example_that_is_recalled_or_split_off_is_refused_and_changes_nothing(name, options):
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    learner, x, y = make_learner(name, model, **options), torch.randn(6, 3), torch.arange(6) % 3
    learner.start_task([(x, y)])
    if name != "vrmcl":
        learner.observe(x, y, 0)
        learner.end_task([(x, y)])
    undisturbed, before = copy.deepcopy(learner), frozen(learner.state_dict())
    with pytest.raises(
        InputError,
        match=f"^step of {name}: got one example, .*, expected at least two examples, as batch norm needs here; raise",
    ):
        learner.observe(x + 100, y.flip(0) + 1, 1)
    assert same({**frozen(learner.state_dict()), "example": None}, {**before, "example": None})
    for either in (learner, undisturbed):
        either.model[1].eval()  # frozen, it needs no second example
    assert_continues_alike(learner, undisturbed, x, y)


def test_what_a_method_of_ones_own_notes_of_a_batch_that_is_refused_is_taken_back():
    class Counting(ER):
        name = "counting"
        losses = 0

        def loss(self, batch, recalled):
            self.losses += 1
            return super().loss(batch, recalled)

    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    learner, x = Counting(model, memory=20, replay=5), torch.randn(6, 3)
    with pytest.raises(InputError, match="^x: got .*, expected at least two examples"):
        learner.observe(x[:1], [0])
    assert learner.losses == 0
    learner.observe(x, torch.arange(6) % 3)
    assert learner.losses == 1


def assert_continues_alike(learner, other, x, y):
    task = 0 if learner.needs_tasks else None
    assert torch.equal(learner.observe(x, y, task), other.observe(x, y, task))
    assert same(frozen(learner.state_dict()), frozen(other.state_dict()))


@pytest.mark.parametrize("learner_class", [ER, CLSER])
def test_an_id_that_has_no_embedding_is_refused_and_changes_nothing(learner_class):
    class Mixed(nn.Module):
        """Ids in the first column, measurements in the others."""

        def __init__(self):
            super().__init__()
            self.shops, self.norm, self.head = nn.Embedding(5, 2), nn.BatchNorm1d(2), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(torch.cat([self.norm(x[:, 1:]), self.shops(x[:, 0].long())], 1))

    learner, x, y = learner_class(Mixed(), memory=20, replay=5), torch.rand(6, 3), torch.arange(6) % 3
    learner.observe(x, y)
    learner.observe(x, y)
    before = frozen(learner.state_dict())
    x[4, 0] = 50
    with pytest.raises(
        InputError, match="^x: got .*, expected examples that the model accepts; the model says: index out"
    ):
        learner.observe(x, y)
    assert same(frozen(learner.state_dict()), before)


@pytest.mark.parametrize("save", [lambda learner: learner.save("never"), copy.deepcopy, pickle.dumps])
def test_in_the_middle_of_a_step_there_is_nothing_to_save(save, tmp_path, monkeypatch):
    """As by a signal handler, which runs in the thread that learns."""
    monkeypatch.chdir(tmp_path)

    class Interrupted(ER):
        def descend(self, loss):
            super().descend(loss)
            if self.steps == 1:
                with pytest.raises(RuntimeError, match="called in the middle of a step or prediction; set a flag"):
                    save(self)

    learner = Interrupted(net(), memory=20, replay=5)
    for x, y in batches(3):
        learner.observe(x, y)
    assert learner.steps == 3
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("save", [lambda learner: learner.save("never"), copy.deepcopy, pickle.dumps, ER.predictor])
@pytest.mark.parametrize("during", [lambda learner: learner.predict(torch.ones(1, 3)), lambda learner: learner.grow(9)])
def test_in_the_middle_of_a_prediction_or_of_growth_there_is_nothing_to_save(during, save, tmp_path, monkeypatch):
    """A prediction puts averaged weights in place of the model's own, and a head grows before its average does."""
    monkeypatch.chdir(tmp_path)

    class Interrupted(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(3, 4)

        def forward(self, x):
            for save in saves:
                with pytest.raises(RuntimeError, match="called in the middle of a step or prediction; set a flag"):
                    save(learner)
            return self.head(x)

    saves, learner = [], ER(Interrupted(), memory=20, replay=5, average=0.9)
    learner.observe(torch.rand(6, 3), torch.arange(6) % 4)
    saves.append(save)
    during(learner)
    saves.clear()
    assert not learner.stepping
    assert not list(tmp_path.iterdir())
    copy.deepcopy(learner).observe(torch.rand(6, 3), torch.arange(6) % 4)


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        (torch.zeros(3), r"of shape \[3\] .*add a dimension: x\[None\]"),
        (
            pd.DataFrame({"a": [1.0], "b": [2.0], "c": pd.array([None], dtype="Int64")}).to_numpy(),
            "fill in what is missing",
        ),
        (torch.ones(2, 3, dtype=torch.int64), r"convert them: x.to\(torch.float32\)$"),
        (torch.ones(2, 3, dtype=torch.uint8), r"convert them: x.to\(torch.float32\) / 255, if they were divided then"),
        (torch.ones(2, 4), "one learner learns one kind"),
    ],
)
def test_errors_say_what_to_do_with_examples(examples, message):
    learner = SGD(net())
    learner.observe(*batches(1)[0])
    with pytest.raises(InputError, match=message):
        learner.predict(examples)


def test_whole_numbers_for_a_model_of_floats_and_a_model_of_two_outputs_are_refused():
    with pytest.raises(InputError, match="if they are measurements, convert them with .float()"):
        SGD(net()).observe(torch.ones(2, 3, dtype=torch.int64), [0, 1])

    class TwoOutputs(nn.Linear):
        def forward(self, x):
            return super().forward(x), x

    with pytest.raises(InputError, match="^model: got .*tuple.*, expected one tensor of scores"):
        SGD(TwoOutputs(3, 4)).observe(torch.ones(2, 3), [0, 1])


def test_arrays_may_lie_backwards_or_in_the_order_of_another_machine():
    (x, y), learners = batches(1)[0], [SGD(net()) for _ in range(3)]
    arrays = (x.numpy(), x.flip(0).contiguous().numpy()[::-1], x.numpy().astype(">f4"))
    losses = [learner.observe(array, y) for learner, array in zip(learners, arrays, strict=True)]
    assert losses[0] == losses[1] == losses[2]


def test_an_optimiser_is_named_with_its_arguments():
    ours, theirs = net(), net()
    learner = SGD(ours, lr=0.05, optimizer="SGD(momentum=0.9, weight_decay=1e-3, nesterov=True)")
    from_factory = SGD(
        theirs, lr=0.05, optimizer=functools.partial(torch.optim.SGD, momentum=0.9, weight_decay=1e-3, nesterov=True)
    )
    for x, y in batches(5):
        learner.observe(x, y)
        from_factory.observe(x, y)
    assert same(frozen(learner.state_dict()), frozen(from_factory.state_dict()))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("SDG", "expected one of .*; did you mean 'SGD'"),
        ("SGD(0.9)", "expected a class of torch.optim, with arguments by name"),
        ("SGD(momentum=)", "expected a class of torch.optim and plain values for its arguments"),
        ("SGD(momentum=1 + x)", "expected a class of torch.optim and plain values for its arguments"),
        ("SGD(**{'momentum': 0.9})", "expected a class of torch.optim, with arguments by name"),
        ("SGD(momentum=0.9).step()", "expected a class of torch.optim, with arguments by name"),
        ("", "expected a class of torch.optim and plain values for its arguments"),
        ("Optimizer", "expected one of"),
        ("LBFGS", "expected one of"),  # it would ask for a closure
        ("SparseAdam", "expected one of"),
        ("SGD(lr=0.5)", "expected no lr among the arguments"),
        ("SGD(moment=0.9)", "expected arguments that torch.optim.SGD takes.*moment"),
        ("SGD(momentum=-1)", "expected arguments that torch.optim.SGD takes.*momentum"),
        ("Adam(fused=True, foreach=True)", "expected arguments that torch.optim.Adam takes.*`fused` and `foreach`"),
        ("Adam(betas=(0.9,))", "expected arguments that torch.optim.Adam takes"),
        ("__import__('os').getcwd()", "expected a class of torch.optim, with arguments by name"),
    ],
)
def test_an_optimiser_that_cannot_be_made_is_refused(text, message):
    with pytest.raises(InputError, match=f"^optimizer: got .*, {message}"):
        SGD(net(), optimizer=text)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (None, "got None, expected a class of torch.optim.*factory"),
        (torch.optim.SGD(net().parameters(), lr=0.1), "got SGD .*, expected a class of torch.optim.*factory"),
        (torch.optim.LBFGS, "LBFGS.*, expected a factory of an optimiser .* no closure"),
        (lambda parameters, lr: None, "NoneType.*, expected a factory"),
        (lambda parameters: None, r"expected a function that is called as optimizer\(parameters, lr=lr\)"),
    ],
)
def test_what_makes_no_optimiser_is_refused(optimizer, message):
    with pytest.raises(InputError, match=f"^optimizer: .*{message}"):
        SGD(net(), optimizer=optimizer)


def test_numbers_of_numpy_are_numbers(tmp_path):
    options = {"lr": 0.5, "memory": 20, "replay": 5, "seed": 3, "classes": 4}
    types = {"lr": np.float32, "memory": np.int64, "replay": np.uint8, "seed": np.int32, "classes": np.int16}
    plain, learner = ER(net(), **options), ER(net(), **{name: types[name](value) for name, value in options.items()})
    assert repr(learner) == repr(plain)
    for x, y in batches(3):
        learner.observe(x, y, np.int64(0))
        plain.observe(x, y, 0)
    learner.grow(np.int64(6))
    plain.grow(6)
    assert same(frozen(plain.state_dict()), frozen(learner.state_dict()))
    loaded = Learner.load(learner.save(tmp_path / "er.safetensors"), model=net())
    assert same(frozen(plain.state_dict()), frozen(loaded.state_dict()))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"lr": 10**400}, "^lr: got 1000.*, expected a number above 0"),
        ({"lr": np.float32("nan")}, "^lr: got nan, expected a number above 0"),
        ({"repeats": np.float64(2)}, "^repeats: got 2.0, expected a whole number"),
        ({"repeats": np.bool_(1)}, "^repeats: got "),
        ({"seed": 2**70}, "^seed: got .*, expected a whole number of at least 0 and below 9223372036854775808"),
        ({"prepare": 3}, r"^prepare: got 3, expected a function that is called as prepare\(x\)"),
        ({"augment": lambda x: x}, r"^augment: .* called as augment\(x, generator\)"),
    ],
)
def test_options_that_cannot_be_are_refused(option, message):
    with pytest.raises(InputError, match=message):
        SGD(net(), **option)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("average", [None, 0.9])
def test_a_restored_learner_goes_on_bit_for_bit(name, average):
    optimizer = functools.partial(torch.optim.SGD, momentum=0.9)
    learner = make_learner(name, average=average, optimizer=optimizer)
    data = batches(16)
    for index in range(7):
        observe_batch(learner, data, index)
    restored = make_learner(name, net(99), average=average, optimizer=optimizer, seed=5)
    restored.load_state_dict(copy.deepcopy(learner.state_dict()))
    for index in range(7, 16):
        assert torch.equal(observe_batch(learner, data, index), observe_batch(restored, data, index))
    assert same(learner.state_dict(), restored.state_dict())
    assert torch.equal(learner.scores(data[0][0]), restored.scores(data[0][0]))


@pytest.mark.parametrize("name", ALL)
def test_a_learner_that_is_given_its_own_state_stays_as_it_is(name):
    balance = {"balance": 1.0} if issubclass(find_learner(name), BalancedLearner) else {}
    learner, data = make_learner(name, average=0.9, **balance), batches(10)
    for index in range(10):
        observe_batch(learner, data, index)
    before = frozen(learner.state_dict())
    learner.load_state_dict(learner.state_dict())
    assert same(before, learner.state_dict())


@pytest.mark.parametrize("name", ALL)
def test_one_seed_one_outcome(name):
    outcomes = []
    for seed in (0, 0, 1):
        learner, data = make_learner(name, seed=seed), batches(8)
        for index in range(8):
            observe_batch(learner, data, index)
        outcomes.append(frozen(learner.model.state_dict()))
    assert same(outcomes[0], outcomes[1])
    if issubclass(find_learner(name), ReplayLearner):
        assert not same(outcomes[0], outcomes[2])


@pytest.mark.parametrize("name", ALL)
def test_prediction_changes_nothing(name):
    learner, data = make_learner(name, average=0.9), batches(6)
    for index in range(6):
        observe_batch(learner, data, index)
    before = frozen(learner.state_dict())
    assert learner.predict(torch.randn(7, 3)).shape == (7,)
    assert same(before, learner.state_dict())
    assert learner.model.training


@pytest.mark.parametrize("name", ALL)
def test_the_average_is_a_running_mean_that_only_prediction_uses(name):
    """Against an oracle: the mean of all models so far, then decay; and training goes as it would without."""
    decay, data = 0.75, batches(10)
    plain, averaged = make_learner(name), make_learner(name, average=decay)
    expected, history = None, []
    for step in range(10):
        assert torch.equal(observe_batch(plain, data, step), observe_batch(averaged, data, step))
        now = {
            key: value.clone().double()
            for key, value in averaged.model.state_dict().items()
            if value.is_floating_point()
        }
        share = min(1 - 1 / (step + 1), decay)
        expected = now if expected is None else {key: share * expected[key] + (1 - share) * now[key] for key in now}
        if step < 4:  # up to 1 / (1 − decay) models it is their plain mean
            history.append(now)
            for key in now:
                assert torch.allclose(expected[key], torch.stack([old[key] for old in history]).mean(0), atol=1e-6)
    model = copy.deepcopy(averaged.model).eval()
    model.load_state_dict({key: value.float() for key, value in expected.items()}, strict=False)
    probe = torch.randn(9, 3)
    assert torch.allclose(averaged.scores(probe), model(probe), atol=1e-5)
    assert not torch.allclose(averaged.scores(probe), plain.scores(probe), atol=1e-3)


@pytest.mark.parametrize("part", [1.0, 0.25, 0.1])
@pytest.mark.parametrize(("decay", "steps"), [(0.9999, 600), (0.9, 600)])
def test_an_average_lags_behind_by_the_part_it_spans(part, decay, steps):
    """Behind weights that grow by one a step: by t / (1 + 1 / part), up to decay / (1 − decay)."""
    model = nn.Linear(1, 1, bias=False).double()
    average = WeightAverage(model, decay, part)
    for step in range(steps + 1):
        nn.init.constant_(model.weight, step)
        average.update(model)
    lag = steps - average.weights["weight"].item()
    assert lag == pytest.approx(min(steps / (1 + 1 / part), decay / (1 - decay)), rel=0.02)


def test_a_part_of_no_average_is_refused():
    with pytest.raises(InputError, match="average_part: got 0.1, expected 1 without an average"):
        SGD(net(), average_part=0.1)


@pytest.mark.parametrize(
    "optimizer", ["Adam", torch.optim.AdamW, functools.partial(torch.optim.SGD, momentum=0.9, nesterov=True)]
)
def test_er_learns_with_any_optimizer(optimizer):
    learner = ER(net(), lr=0.01, memory=20, replay=5, optimizer=optimizer)
    first, *_, last = [learner.observe(x, y) for x, y in batches(1) * 60]
    assert learner.optim.param_groups[0]["lr"] == 0.01
    assert last < first


def test_frozen_parameters_stay():
    model = net()
    model[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    learner = SGD(model, average=0.5)
    for x, y in batches(3):
        learner.observe(x, y)
    assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize("name", ALL)
def test_modules_that_are_frozen_in_their_evaluation_mode_stay_in_it(name):
    model = net()
    model[1].eval()
    statistics = model[1].running_mean.clone()
    learner, data = make_learner(name, model, average=0.9), batches(8)
    for index in range(8):
        observe_batch(learner, data, index)
        learner.predict(data[index][0])
        assert [module.training for module in model] == [True, False, True, True]
    assert torch.equal(model[1].running_mean, statistics)


BAD = {
    "label out of range": (torch.zeros(2, 3), torch.tensor([0, 4]), "y: got 4, expected labels from 0 to 3"),
    "negative label": (torch.zeros(2, 3), torch.tensor([0, -1]), "y: got -1, expected labels from 0 to 3"),
    "NaN": (
        torch.tensor([[0.0, 0, 0], [0, float("nan"), 0]]),
        torch.tensor([0, 1]),
        r"x: got 1 values .*\[1, 1\]",
    ),
    "infinity": (torch.full((2, 3), float("inf")), torch.tensor([0, 1]), "x: got 6 values"),
    "another shape": (torch.zeros(2, 5), torch.tensor([0, 1]), "x: got .*, expected examples as in the first batch"),
    "another type": (torch.zeros(2, 3, dtype=torch.uint8), torch.tensor([0, 1]), "x: got .*uint8, expected"),
    "empty": (
        torch.zeros(0, 3),
        torch.zeros(0, dtype=torch.long),
        "x: got .*, expected a batch of at least one",
    ),
    "fewer labels": (
        torch.zeros(2, 3),
        torch.tensor([0]),
        "y: got .*, expected one whole number for each of the 2",
    ),
    "labels that are floats": (
        torch.zeros(2, 3),
        torch.tensor([0.0, 1.0]),
        "y: got .*, expected one whole number",
    ),
    "words": ("hello", torch.tensor([0, 1]), "x: got .*, expected a tensor"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("name", ALL)
def test_bad_batches_are_refused_and_change_nothing(name, case):
    x, y, message = BAD[case]
    learner, data = make_learner(name), batches(6)
    for index in range(6):
        observe_batch(learner, data, index)
    before = frozen(learner.state_dict())
    with pytest.raises(InputError, match=message) as error:
        learner.observe(x, y, 1)
    assert str(error.value).count("\n") <= 1
    assert same(before, learner.state_dict())


def test_the_first_batch_is_checked_against_the_model():
    learner = ER(net())
    with pytest.raises(InputError, match="x: got .*, expected examples that the model accepts"):
        learner.observe(torch.zeros(2, 99), torch.tensor([0, 1]))
    learner.observe(torch.zeros(2, 3), torch.tensor([0, 1]))


def test_numpy_lists_and_other_whole_types_are_welcome():
    learner = ER(net())
    learner.observe(np.zeros((2, 3), dtype=np.float32), [0, 1])
    learner.observe(torch.zeros(2, 3), torch.tensor([0, 1], dtype=torch.uint8))
    assert learner.past.offered == 4


def test_frames_are_taken_by_their_rows_and_not_by_their_index():
    x, y = batches(1)[0]
    plain, learner = SGD(net()), SGD(net())
    rows = [30, 10, 50, 20, 40, 0]
    plain.observe(x, y)
    learner.observe(pd.DataFrame(x.numpy(), index=rows), pd.Series(y.numpy(), index=rows))
    assert same(frozen(plain.state_dict()), frozen(learner.state_dict()))
    assert torch.equal(learner.predict(pd.DataFrame(x.numpy(), index=rows)), plain.predict(x))


def test_scores_are_checked_as_predictions_are():
    learner, (x, y) = SGD(net()), batches(1)[0]
    learner.observe(x, y)
    assert torch.equal(learner.scores(x.numpy()), learner.scores(x))
    for method in (learner.scores, learner.predict):
        with pytest.raises(InputError, match="x: got .*, expected examples as in the first batch"):
            method(x[:, :2])
        with pytest.raises(InputError, match=r"x: got 1 values that are NaN or infinite, the first at \[0, 1\]"):
            method([[0.0, float("nan"), 0.0]])


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_floats_of_another_type_are_learned_as_those_of_the_model(name, dtype):
    unconverted, on_converted = make_learner(name), make_learner(name)
    for index, (x, y) in enumerate(data := [(x.numpy().astype(dtype), y) for x, y in batches(8)]):
        as_they_are = [(torch.from_numpy(x), y) for x, y in data]
        converted = [(x.float(), y) for x, y in as_they_are]
        assert torch.equal(
            observe_batch(unconverted, as_they_are, index), observe_batch(on_converted, converted, index)
        )
        assert torch.equal(unconverted.predict(x), on_converted.predict(torch.from_numpy(x).float()))


def test_a_device_that_ran_out_of_memory_is_no_matter_of_the_input():
    class Full(nn.Linear):
        def forward(self, x):
            raise torch.OutOfMemoryError("no memory left")

    with pytest.raises(torch.OutOfMemoryError, match="no memory left"):
        SGD(Full(3, 4)).predict(torch.zeros(2, 3))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory left"), torch.AcceleratorError("lost", 0)])
def test_a_device_that_fails_while_examples_are_moved_to_it_is_no_matter_of_the_input(error, monkeypatch):
    def fail(*args, **kwargs):
        raise error

    learner, (x, y) = SGD(nn.Linear(3, 4)), batches(1)[0]
    monkeypatch.setattr(torch, "as_tensor", fail)
    for call in (lambda: learner.observe(x, y), lambda: learner.predict(x)):
        with pytest.raises(type(error), match=str(error)):
            call()


def test_two_classes_need_two_outputs():
    x, y = batches(1)[0]
    with pytest.raises(InputError, match=r"^y: got the labels 0 and 1 for one output, expected two outputs, .*'mse'"):
        ER(nn.Linear(3, 1)).observe(x, y % 2)
    with pytest.raises(InputError, match=r"^y: got 2, expected labels from 0 to 0"):
        ER(nn.Linear(3, 1)).observe(x, 0 * y + 2)
    for labels in (y.float(), y[:, None].float()):
        with pytest.raises(InputError, match=r"^y: got a tensor .*float32, .*\.long\(\); .*criterion='mse'"):
            ER(nn.Linear(3, 1)).observe(x, labels)


def test_a_class_or_a_function_is_no_model(tmp_path):
    for learner_class in (ER, PCL):
        with pytest.raises(InputError, match=r"^model: got the class Linear, .*; pass one made of it: Linear\(…\)$"):
            learner_class(nn.Linear)
    with pytest.raises(InputError, match=r"^model: got <function net.*; call it, and pass what it returns"):
        ER(net)
    with pytest.raises(InputError, match=r"^model: got 3, expected a torch.nn.Module$"):
        ER(3)
    with pytest.raises(InputError, match=r"^embed: got the class Embedding, .*: Embedding\(…\)$"):
        ER(net(), embed=nn.Embedding)
    path = ER(net()).save(tmp_path / "er.safetensors")
    with pytest.raises(InputError, match=r"^model: got the class Linear"):
        Learner.load(path, model=nn.Linear, device="cpu")


def test_more_classes_than_scores_are_refused():
    with pytest.raises(InputError, match=r"classes: got 9, expected at most 4, as many as the model scores"):
        ER(net(), classes=9, balance=1.0).observe(*batches(1)[0])


@pytest.mark.parametrize("name", ALL)
def test_fewer_classes_than_scores_are_welcome_and_may_become_more(name):
    learner, data = make_learner(name, classes=2), [(x, y % 2) for x, y in batches(8)]
    for index in range(8):
        observe_batch(learner, data, index)
    with pytest.raises(InputError, match=r"y: got 2, expected labels from 0 to 1; there are 2 classes: .* `grow`"):
        learner.observe(torch.zeros(2, 3), [0, 2], 1)
    learner.grow(3)
    assert torch.isfinite(learner.observe(torch.zeros(2, 3), [0, 2], 1))
    assert learner.scores(torch.zeros(2, 3)).shape == (2, 4)


def test_an_output_that_is_no_class_is_never_predicted():
    model = nn.Linear(3, 5)
    nn.init.zeros_(model.weight)
    model.bias.data = torch.tensor([0.0, 1.0, 0.0, 2.0, 3.0])
    learner, x = SGD(model, classes=3), torch.zeros(2, 3)
    assert learner.predict(x).tolist() == [1, 1]
    assert torch.equal(learner.scores(x), model.bias.detach().expand(2, 5))
    learner.grow(4)
    assert learner.predict(x).tolist() == [3, 3]


def test_to_grow_is_never_to_shrink():
    learner = ER(net())
    learner.grow(2)
    learner.observe(torch.zeros(2, 3), [0, 3])
    narrow = ER(net(), classes=3)
    narrow.grow(2)
    assert narrow.classes == 3


def test_what_is_not_a_model_is_refused():
    for not_a_model in (lambda x: x, nn.ReLU()):
        with pytest.raises(InputError, match="^model: got "):
            SGD(not_a_model)


def test_a_state_of_another_kind_is_refused():
    with pytest.raises(InputError, match="no memory"):
        ER(net()).load_state_dict(SGD(net()).state_dict())


@pytest.mark.parametrize("learned", [0, 2])
@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (("derpp", {}), ("er", {}), "memory: got a state of .*'logits'"),
        (("cbrs", {}), ("er", {}), "memory: got a state of .*'seen of class'"),
        (("er", {}), ("cbrs", {}), "memory: got a state of .*, expected one of .*'seen of class'"),
        (("er", {}), ("gem", {}), "memory: got a state of .*'task'"),
        (("er", {"memory": 8}), ("er", {}), "memory: got a state of .* 20"),
        (("er", {"optimizer": "Adam"}), ("er", {"optimizer": "SGD(momentum=0.9)"}), "optimizer: got .* betas"),
        (("er", {"model": nn.Linear(3, 4)}), ("er", {}), "optimizer: got"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(source, target, expected, learned):
    source_learner, target_learner = (make_learner(name, **options) for name, options in (source, target))
    for x, y in batches(5):
        source_learner.observe(x, y, task=0)
    for x, y in batches(learned, seed=2):
        target_learner.observe(x, y, task=0)
    before = copy.deepcopy(target_learner.state_dict())
    with pytest.raises(InputError, match=expected):
        target_learner.load_state_dict(source_learner.state_dict())
    assert same_state(target_learner.state_dict(), before)
    target_learner.observe(*batches(1)[0], task=0)


@pytest.mark.parametrize("optimizer", ["SGD(momentum=0.9)", "Adam", "NAdam"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_state_that_was_taken_over_is_ones_own_and_the_same_to_the_bit(optimizer, dtype):
    source, taking_over, undisturbed = (make_learner("er", net().to(dtype), optimizer=optimizer) for _ in range(3))
    for x, y in batches(3, dtype=dtype):
        source.observe(x, y)
        undisturbed.observe(x, y)
    taking_over.load_state_dict(source.state_dict())
    assert same_state(taking_over.state_dict(), undisturbed.state_dict())
    source.observe(*batches(1, seed=2, dtype=dtype)[0])
    for x, y in batches(2, seed=3, dtype=dtype):
        assert taking_over.observe(x, y) == undisturbed.observe(x, y)
    assert same_state(taking_over.state_dict(), undisturbed.state_dict())


@pytest.mark.parametrize(
    ("memory", "options", "expected"),
    [
        (EqualShares(20), {}, "memory: got EqualShares.20., expected one that does not need task; er keeps x, y"),
        (ClassBalanced(20), {"criterion": "mse"}, "memory: got ClassBalanced.20., expected one for targets that are"),
    ],
)
def test_a_memory_that_cannot_serve_is_refused_before_anything_is_learned(memory, options, expected):
    with pytest.raises(InputError, match=expected):
        ER(net(), memory=memory, replay=5, **options)


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("er", lambda x, y: {"x": x.double(), "y": y}, r"^x: got .*, expected examples of shape \[3\] and .* float64"),
        ("er", lambda x, y: {"x": x[:, :2], "y": y}, r"^x: got .*, expected examples of shape \[2\] and type float32"),
        ("er", lambda x, y: {"x": x}, "^batch: got .'x', 'y'., expected the fields that this memory keeps, .'x'."),
        ("der", lambda x, y: {"x": x, "y": y}, "^batch: got .'logits', 'x', 'y'., expected the fields that this"),
    ],
)
def test_a_memory_filled_with_other_examples_is_refused_before_anything_is_learned(name, change, expected):
    (x, y), memory = batches(1)[0], Memory(20)
    memory.offer(change(x, y))
    learner = find_learner(name)(net(), memory=memory, replay=5)
    before = copy.deepcopy(learner.state_dict())
    with pytest.raises(InputError, match=expected):
        learner.observe(x, y)
    assert same_state(learner.state_dict(), before)


@pytest.mark.parametrize(
    ("y", "options", "expected"),
    [
        ([0, 7], {}, r'^memory\["y"\]: got 7, expected labels from 0 to 3'),
        ([0, -1], {}, r'^memory\["y"\]: got -1, expected labels from 0 to 3'),
        ([[0.0] * 4, [float("nan")] * 4], {"criterion": "mse"}, r'^memory\["y"\]: got .*NaN'),
    ],
)
def test_a_memory_filled_with_impossible_labels_is_refused_before_anything_is_learned(y, options, expected):
    memory, y = Memory(20), torch.tensor(y)
    memory.offer({"x": torch.randn(2, 3), "y": y})
    learner = ER(net(), memory=memory, replay=5, **options)
    before = copy.deepcopy(learner.state_dict())
    with pytest.raises(InputError, match=expected):
        learner.observe(torch.randn(1, 3), y[:1])
    assert same_state(learner.state_dict(), before)


def test_a_memory_filled_with_numbers_that_are_not_finite_is_refused_before_anything_is_learned():
    memory = Memory(20)
    memory.offer({"x": torch.tensor([[1.0, 2.0, float("inf")]]), "y": torch.tensor([0])})
    learner = ER(net(), memory=memory, replay=5)
    before = copy.deepcopy(learner.state_dict())
    with pytest.raises(InputError, match=r'^memory\["x"\]: got 1 values that are NaN or infinite, .* \[0, 2\]'):
        learner.observe(*batches(1)[0])
    assert same_state(learner.state_dict(), before)


def test_a_memory_belongs_to_one_learner():
    memory = Memory(20)
    with pytest.raises(InputError, match="replay"):
        ER(net(), memory=memory, replay=30)
    learner = ER(net(), memory=memory, replay=5)  # one that was refused has not taken it
    with pytest.raises(InputError, match=r"^memory: got Memory\(20\), which belongs to another .*copy\.deepcopy"):
        PCL(net(), memory=memory, replay=5)
    for other in (copy.deepcopy(memory), pickle.loads(pickle.dumps(memory)), copy.deepcopy(learner).past):
        second = ER(net(), memory=other, replay=5)
        second.observe(*batches(1)[0])
        assert (len(learner.past), second.past is other) == (0, True)


def test_examples_of_any_floating_type_fit_a_model_of_doubles():
    scale = Scale()
    scale.update(torch.randn(9, 3))
    learner = ER(nn.Linear(3, 4).double(), prepare=scale)
    learner.observe(*batches(1)[0])
    assert learner.predict(batches(1)[0][0]).shape == (6,)


def test_augmentation_is_for_learning_and_memory_keeps_the_raw():
    sizes = []

    def augment(x, generator):
        sizes.append(len(x))
        return x + torch.rand(len(x), 1, generator=generator) + 10

    learner = ER(net(), memory=20, replay=5, augment=augment, prepare=lambda x: x / 2)
    for x, y in batches(2):
        learner.observe(x, y)
    assert sizes == [6, 5, 6]  # the batch; then what is recalled, and the batch
    assert learner.past["x"].max() < 10
    learner.predict(torch.zeros(3, 3))
    assert len(sizes) == 3


@pytest.mark.parametrize("name", [name for name in ALL if find_learner(name).needs_tasks])
def test_a_learner_that_must_know_of_tasks_says_so(name):
    with pytest.raises(InputError, match=f"^task: got None.*{name} must know the tasks"):
        make_learner(name).observe(*batches(1)[0])


BOUNDARIES = {"agem": "end_task", "ewc": "end_task", "si": "end_task", "lwf": "start_task", "vrmcl": "start_task"}


@pytest.mark.parametrize("name", BOUNDARIES)
def test_a_loop_that_leaves_out_a_boundary_between_tasks_is_refused(name, tmp_path):
    call, data, learner = BOUNDARIES[name], batches(6), make_learner(name)
    if call == "start_task":
        learner.start_task(data[:3])
    for x, y in data[:3]:
        learner.observe(x, y, 0)
    learner.save(tmp_path / "learner")
    loaded = Learner.load(tmp_path / "learner", model=net())
    copied, unpickled = copy.deepcopy(learner), pickle.loads(pickle.dumps(learner))
    for copied_or_loaded in (learner, loaded, copied, unpickled):  # a restart, such as a journal's, does not hide it
        before = frozen(copied_or_loaded.state_dict())
        for _ in range(2):
            message = f"^task: got 1, expected 0 until {call} is called; {name} depends on that call: pass the batches"
            with pytest.raises(InputError, match=message):
                copied_or_loaded.observe(*data[3], 1)
        assert same(frozen(copied_or_loaded.state_dict()), before)
        copied_or_loaded.observe(*data[3], 0)  # the first task goes on
        getattr(copied_or_loaded, call)(data[:3])
        copied_or_loaded.observe(*data[4], 1)


@pytest.mark.parametrize("name", BOUNDARIES)
def test_a_refused_batch_starts_no_task(name):
    (x, y), learner = batches(1)[0], make_learner(name)
    learner.start_task([(x, y)])
    with pytest.raises(InputError, match="^x: "):
        learner.observe(x * torch.nan, y, 3)
    learner.observe(x, y, 0)


def test_a_state_of_before_boundaries_were_checked_loads():
    learner = make_learner("ewc")
    learner.observe(*batches(1)[0], 0)
    state = {name: value for name, value in learner.state_dict().items() if name != "observed_task"}
    learner.load_state_dict(state)
    learner.observe(*batches(1)[0], 1)


def test_a_method_that_gathers_more_at_a_tasks_start_still_depends_on_its_end():
    class Counting(EWC):
        started = 0

        def start_task(self, batches):
            self.started += 1

    learner = Counting(net())
    for task in range(2):
        learner.start_task(batches(1))
        if task:
            with pytest.raises(InputError, match="^task: got 1, expected 0 until end_task is called; Counting"):
                learner.observe(*batches(1)[0], task)
        else:
            learner.observe(*batches(1)[0], task)


def test_a_memory_of_ones_own():
    memory = Memory(30)
    learner = ER(net(), memory=memory, replay=5)
    learner.observe(*batches(1)[0])
    assert learner.past is memory
    assert len(memory) == 6
    assert "memory=Memory(30)" in repr(learner)


@pytest.mark.parametrize("name", ALL)
def test_help_tells_what_every_option_is_for(name):
    learner_class = find_learner(name)
    lines = inspect.getdoc(learner_class).partition("\nOptions:\n")[2].splitlines()
    assert lines == [
        f"    {option.name}={option.default!r}: {option.about}" for option in options_of(learner_class).values()
    ]


def test_repr_shows_the_options():
    assert "sigma_x=0.03" in repr(PCL(MLP((3,), 4)))
    assert isinstance(PCL(MLP((3,), 4)), Learner)


def test_a_network_that_was_interrupted_while_it_predicted_learns_on_as_before():
    class Interrupted(nn.Linear):
        stopped = False

        def forward(self, x):
            if self.stopped:
                raise KeyboardInterrupt
            return super().forward(x)

    learner = SGD(Interrupted(3, 4), average=0.9)
    learner.observe(*batches(1)[0])
    learner.model.stopped = True
    with pytest.raises(KeyboardInterrupt):
        learner.predict(torch.randn(2, 3))
    assert learner.model.training


def test_labels_that_are_refused_do_not_say_how_many_classes_there_are():
    learner = ER(nn.Linear(4, 3), memory=50)
    with pytest.raises(InputError):
        learner.observe(torch.randn(4, 4), [0, 1, 2, 7])
    assert learner.classes is None


def test_what_was_descended_is_not_taken_back_by_half():
    class RefusesSecondStep(ER):
        """Refuses the second step on a batch."""

        def loss(self, batch, recalled):
            if self.steps == 0 and self.stepped:
                raise InputError("no more")
            self.stepped = True
            return super().loss(batch, recalled)

        stepped = False

    learner = RefusesSecondStep(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), memory=50, repeats=2)
    before = learner.model[0].weight.detach().clone()
    with pytest.raises(InputError):
        learner.observe(torch.randn(4, 4), torch.arange(4) % 3)
    assert not torch.equal(learner.model[0].weight, before)
    assert learner.model[1].num_batches_tracked == 1


@pytest.mark.parametrize("name", ["er", "pcl", "derpp", "clser", "cbrs", "mixup", "ewc", "lwf"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("out of memory"), MemoryError(), RuntimeError("no gradient")])
def test_a_step_whose_gradient_fails_leaves_all_as_it_was(name, error):
    """Memory mostly runs out there, after statistics were updated and examples were drawn."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            if failing:
                raise error
            return gradient

    class Layer(nn.Module):
        def forward(self, x):
            return Fails.apply(x)

    torch.manual_seed(0)
    learner_class, failing = find_learner(name), []
    memory = {"memory": 20, "replay": 5} if issubclass(learner_class, ReplayLearner) else {}
    learner = learner_class(
        nn.Sequential(nn.Linear(3, 8), Layer(), nn.BatchNorm1d(8), nn.Linear(8, 4)), average=0.9, **memory
    )
    *first, last = batches(4)
    learner.start_task(first)
    for x, y in first:
        learner.observe(x, y, 0)
    before = frozen(learner.state_dict())
    failing.append(True)
    with pytest.raises(type(error)):
        learner.observe(*last, 0)
    assert same(frozen(learner.state_dict()), before)
    failing.clear()
    learner.observe(*last, 0)
    assert learner.steps == 4


def test_copies_on_a_gpu_do_not_warn_that_their_steps_are_not_captured():
    """Torch's optimisers do once they have been copied: the mark that keeps a new one from it is not in their state."""
    learner = ER(nn.Linear(4, 3), memory=50, optimizer="Adam")
    for learner_or_copy in (learner, copy.deepcopy(learner), pickle.loads(pickle.dumps(learner))):
        assert learner_or_copy.optim._warned_capturable_if_run_uncaptured
    assert not hasattr(copy.deepcopy(learner.optim), "_warned_capturable_if_run_uncaptured")


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda x: 1 / 0, r"^prepare: got an error on examples of shape \[.*, .* accepts them; it says: div"),
        (lambda x: None, "^prepare: got None, expected a function that returns a tensor"),
        (lambda x: x[:0], r"^prepare: got inputs of shape \[0, 3\] for 1 examples, expected one input for each"),
    ],
)  # fmt: skip
def test_errors_of_prepare_are_not_those_of_the_model(prepare, message):
    learner = ER(nn.Linear(3, 2), memory=50, prepare=prepare)
    with pytest.raises(InputError, match=message):
        learner.observe(torch.randn(4, 3), torch.arange(4) % 2)
    assert (learner.steps, len(learner.past)) == (0, 0)


def test_weights_that_are_no_longer_frozen_are_not_silently_left_out():
    model = nn.Sequential(nn.Linear(3, 4).requires_grad_(False), nn.ReLU(), nn.Linear(4, 2))
    learner, (x, y) = ER(model, memory=50), (torch.randn(8, 3), torch.arange(8) % 2)
    learner.observe(x, y)
    model[0].requires_grad_(True)
    before = model[0].weight.detach().clone()
    with pytest.raises(InputError, match=r"^model: got weights that were frozen .* \(0.weight\), .*add_param"):
        learner.observe(x, y)
    assert learner.steps == 1
    learner.optim.add_param_group({"params": list(model[0].parameters())})
    learner.observe(x, y)
    assert not torch.equal(model[0].weight, before)


def test_a_layer_that_is_new_is_not_silently_left_out_of_learning():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    learner, (x, y) = ER(model, memory=50), (torch.randn(8, 3), torch.arange(8) % 2)
    model[2] = nn.Linear(4, 3)
    for grown in (False, True):
        with pytest.raises(InputError, match=r"^model: got weights that were frozen or missing .* \(2\.weight\)"):
            learner.observe(x, y)
        if not grown:
            learner.grow(4)
    learner.optim.add_param_group({"params": list(model[2].parameters())})
    before = model[2].weight.detach().clone()
    learner.observe(x, y)
    assert not torch.equal(model[2].weight, before)


def test_a_method_may_add_weights_that_it_changes_by_hand():
    class Centred(ER):
        def __post_init__(self):
            super().__post_init__()
            self.model.centre = nn.Parameter(torch.zeros(3))

    learner = Centred(nn.Linear(3, 2), memory=50)
    learner.observe(torch.randn(8, 3), torch.arange(8) % 2)


def test_an_optimizer_may_leave_out_weights_but_not_all_of_them():
    model, (x, y) = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), (torch.randn(8, 3), torch.arange(8) % 2)
    learner = ER(model, memory=50, optimizer=lambda weights, lr: torch.optim.SGD(weights[:2], lr=lr))
    learner.observe(x, y)
    learner.grow(3)  # of a layer that is left out
    before = model[2].weight.detach().clone()
    copy.deepcopy(learner).observe(x, y)
    learner.observe(x, y)
    assert torch.equal(model[2].weight, before)
    other = nn.Linear(3, 2)
    with pytest.raises(InputError, match="^optimizer: got one of other weights than the model's, expected an"):
        ER(model, optimizer=lambda weights, lr: torch.optim.SGD(other.parameters(), lr=lr))
