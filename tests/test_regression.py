"""Targets that are numbers: criteria and learners against slow versions, and what is forgotten of a function."""

import copy

import numpy as np
import pytest
import torch
from slow import SlowReplay, same_weights
from test_learners import frozen, same
from torch import nn
from torch.nn.functional import cross_entropy

from parabolic import (
    ER,
    EWC,
    MLP,
    MSE,
    PCL,
    SGD,
    Classes,
    CrossEntropy,
    Huber,
    InputError,
    Numbers,
    ParabolicRegressor,
    ReplayLearner,
    make_stream,
    train,
)
from parabolic.learners import Scale, find_learner, known_learners
from parabolic.profile import LearnerLoss

TELL_CLASSES_APART = {"cbrs", "lwf", "mixup", "vrmcl"}


def net(outputs=2, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, outputs)).double()


def number_batches(count, size=6, outputs=2, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        x = torch.randn(size, 3, generator=generator, dtype=torch.float64)
        yield x, torch.stack([x.sum(1), x[:, 0] * x[:, 1]], 1)[:, :outputs]


def test_criteria_of_numbers_are_what_their_names_say():
    scores, y = torch.tensor([[0.0, 1.0], [2.0, -3.0]]), torch.tensor([[0.5, 1.0], [2.0, 1.0]])
    for criterion, losses in ((MSE(), [0.25 / 2, 16 / 2]), (Huber(1.5), [0.125 / 2, 1.5 * (4 - 0.75) / 2])):
        assert criterion(scores, y, "none").tolist() == pytest.approx(losses)
        assert criterion(scores, y).item() == pytest.approx(np.mean(losses))
        assert criterion(scores, y, "sum").item() == pytest.approx(np.sum(losses))
    units = Scale()
    units.update(torch.tensor([[10.0, 0.0], [30.0, 2.0]]))  # means 20 and 1, deviations 10 and 1
    scaled = MSE(units=units)
    assert scaled(torch.zeros(1, 2), torch.tensor([[30.0, 1.0]])).item() == pytest.approx(0.5)
    assert scaled.answer(torch.tensor([[1.0, -1.0]])).tolist() == [[30.0, 0.0]]


def test_class_weights_are_torchs_own_and_grow_with_the_head():
    x, y, weights = torch.randn(8, 3, dtype=torch.float64), torch.arange(8) % 2, [1.0, 5.0]
    ours, theirs = net(), net()
    learner = SGD(ours, lr=0.1, criterion=CrossEntropy(weights=weights))
    learner.observe(x, y)
    cross_entropy(theirs(x), y, torch.tensor(weights, dtype=torch.float64)).backward()
    with torch.no_grad():
        for weight in theirs.parameters():
            weight -= 0.1 * weight.grad
    assert same_weights(ours, theirs)
    learner.grow(3)
    assert learner.criterion.weights == [1.0, 5.0, 1.0]
    learner.observe(x, torch.arange(8) % 3)
    with pytest.raises(InputError, match="^weights: got 3 weights, expected one for each of 2 classes"):
        ER(net(), criterion=CrossEntropy(weights=[1, 2, 3])).observe(x, y)


@pytest.mark.parametrize("weights", [{0: 1.0, 1: 5.0}, {1, 5}, 3, iter([1.0, 5.0])])
def test_class_weights_are_given_in_the_order_of_the_classes(weights):
    with pytest.raises(InputError, match=r"^weights: got .*, expected one number for each class; in the order of .*"):
        CrossEntropy(weights=weights)


def test_the_class_of_a_criterion_is_not_one_itself():
    with pytest.raises(InputError, match=r"^criterion: got <class .*MSE'>, .*; pass one made of it: MSE"):
        ER(nn.Linear(3, 1), criterion=MSE)
    with pytest.raises(InputError, match=r"^criterion: got MSELoss\(\), .*; say what its targets are"):
        ER(nn.Linear(3, 1), criterion=nn.MSELoss())


def test_outputs_beyond_the_classes_have_a_weight_of_one():
    x, y, all_five = torch.randn(8, 3, dtype=torch.float64), torch.arange(8) % 2, torch.tensor([1.0, 5, 1, 1, 1])
    two_classes = {"classes": 2, "criterion": CrossEntropy(weights=[1.0, 5.0])}
    learner = SGD(net(5), **two_classes)
    expected = cross_entropy(net(5)(x), y, all_five.double())
    assert learner.observe(x, y).item() == pytest.approx(expected.item(), rel=1e-12)
    learner.grow(3)
    assert learner.criterion.weights == [1.0, 5.0, 1.0]
    learner.observe(x, torch.arange(8) % 3)
    all_classes = PCL(net(5), sigma_y=0.0, criterion=CrossEntropy(weights=all_five.tolist()))
    assert PCL(net(5), sigma_y=0.0, **two_classes).observe(x, y) == all_classes.observe(x, y)


def test_the_loss_of_any_criterion_is_one_number_an_example():
    scores, y, number = torch.randn(4, 2), torch.tensor([0, 1, 1, 0]), torch.randn(4, 2)
    for criterion in (CrossEntropy(), CrossEntropy(weights=[1.0, 3.0])):
        assert torch.equal(criterion.loss(scores, y), criterion(scores, y, "none"))
        assert copy.deepcopy(criterion).loss(scores, y).shape == (4,)
    for criterion in (MSE(), Huber()):
        assert torch.equal(criterion.loss(scores, number).mean(1), criterion(scores, number, "none"))


def test_single_targets_need_no_column():
    scores, y, units = torch.tensor([[0.0], [1.0], [5.0]]), torch.tensor([1.0, 1.0, 2.0]), Scale()
    units.update(y[:, None])
    for criterion in (MSE(), Huber(), Numbers(lambda scores, y: (scores - y).abs()), MSE(units=units)):
        for reduction in ("none", "mean", "sum"):
            assert torch.equal(criterion(scores, y, reduction), criterion(scores, y[:, None], reduction))


def test_as_many_numbers_are_learned_as_the_model_has_outputs():
    with pytest.raises(InputError, match="^classes: got 1, expected 2, as many as the model has outputs"):
        SGD(net(), criterion="mse", classes=1).observe(torch.zeros(4, 3), torch.zeros(4))


def test_pcl_of_numbers_follows_plain_bridges():
    """Against the paper's algorithm written out: no simplex, the squared distance from a point on the way."""
    sigma_x, sigma_y, times, seed = 0.3, 0.2, 4, 7
    ours = net()
    learner = PCL(ours, lr=0.05, memory=20, replay=5, sigma_x=sigma_x, sigma_y=sigma_y, times=times, seed=seed,
                  criterion="mse")  # fmt: skip
    slow = SlowReplay(net(), lr=0.05, memory=20, replay=5, seed=seed)

    def bridges(points, ends, sigma):
        noise = torch.randn(len(points), 1, times - 1, points.shape[1], generator=slow.generator, dtype=torch.float64)
        for row, end in enumerate(ends):
            walk = [torch.zeros(points.shape[1], dtype=torch.float64)]
            for step in noise[row, 0]:
                walk.append(walk[-1] + sigma * step * (1 / (times - 1)) ** 0.5)
            for point in range(times - 1):  # Euler's sum leaves out the last point
                share = point / (times - 1)
                yield (1 - share) * points[row] + share * points[end] + walk[point] - share * walk[-1]

    for x, y in number_batches(5):
        joint = [*zip(x, y, strict=True), *slow.recall()]
        xs, ys = (torch.stack(tensors) for tensors in zip(*joint, strict=True))
        ends = torch.randperm(len(joint), generator=slow.generator).tolist()
        pairs = zip(list(bridges(xs, ends, sigma_x)), list(bridges(ys, ends, sigma_y)), strict=True)
        losses = [((slow.scores(point) - target) ** 2).sum() / 2 for point, target in pairs]
        expected = slow.descend(sum(losses) / len(losses))
        slow.remember(list(zip(x, y, strict=True)))
        assert learner.observe(x, y).item() == pytest.approx(expected, abs=1e-12)
    assert same_weights(ours, slow.model)


def test_sgd_of_numbers_is_plain_torch():
    ours, theirs = net(1), net(1)
    learner = SGD(ours, lr=0.05, criterion="huber")
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.05)
    for x, y in number_batches(5, outputs=1):
        learner.observe(x, y[:, 0])  # a plain vector will do for one number an example
        optimizer.zero_grad()
        nn.functional.huber_loss(theirs(x), y).backward()
        optimizer.step()
    assert same_weights(ours, theirs, 1e-12)
    assert torch.equal(learner.predict(x), ours(x))


@pytest.mark.parametrize("criterion", ["mse", "huber", Numbers(nn.L1Loss(reduction="none"))])
@pytest.mark.parametrize("name", sorted(known_learners()))
def test_every_learner_learns_numbers_or_says_that_it_tells_classes_apart(name, criterion):
    cls = find_learner(name)
    options = {"memory": 60, "replay": 20} if issubclass(cls, ReplayLearner) else {}
    if name in TELL_CLASSES_APART:
        with pytest.raises(InputError, match=f"^criterion: .*{name} is for classes"):
            cls(net(), criterion=criterion, **options)
        return
    learner, data, task = (
        cls(net(), criterion=criterion, lr=0.05, **options),
        list(number_batches(8, size=20)) * 6,
        None,
    )
    if learner.needs_tasks:
        task = 0
        learner.start_task(data)
    first, *_, last = [learner.observe(x, y, task) for x, y in data]
    if learner.needs_tasks:
        learner.end_task(data)
        task = 1
        learner.observe(*data[0], task)
    assert last < 0.7 * first
    restored = cls(net(seed=5), criterion=criterion, lr=0.05, **options)
    restored.load_state_dict(copy.deepcopy(learner.state_dict()))
    assert torch.equal(learner.observe(*data[1], task), restored.observe(*data[1], task))
    assert same(learner.state_dict(), restored.state_dict())


def test_ewc_holds_weights_by_the_squared_gradients_of_the_loss_of_single_examples():
    learner, data = EWC(net(), criterion="mse"), list(number_batches(3))
    learner.end_task(data)
    total, count = torch.zeros_like(learner.importance), 0
    for x, y in data:
        for example, target in zip(x, y, strict=True):
            loss = ((learner.model(example[None])[0] - target) ** 2).mean()
            slopes = torch.autograd.grad(loss, list(learner.model.parameters()))
            total += torch.cat([slope.flatten() for slope in slopes]) ** 2
            count += 1
    assert torch.allclose(learner.importance, total / count)


BAD = {
    "classes": (torch.arange(6), "expected 2 numbers for each of the 6"),
    "one column": (torch.zeros(6, 1), "expected 2 numbers"),
    "fewer": (torch.zeros(5, 2), "expected 2 numbers"),
    "truths": (torch.zeros(6, 2, dtype=torch.bool), "expected 2 numbers"),
    "NaN": (torch.full((6, 2), torch.nan), "got 12 values that are NaN"),
    "too large for the model": (torch.full((6, 2), 1e300, dtype=torch.float64), "got 12 values"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_targets_are_refused_and_change_nothing(case):
    y, message = BAD[case]
    learner = PCL(net().float(), criterion="mse", memory=40)
    for x, good in number_batches(2):
        learner.observe(x.float(), good)
    before = frozen(learner.state_dict())
    with pytest.raises(InputError, match=f"^y: .*{message}"):
        learner.observe(x.float(), y)
    assert same(before, learner.state_dict())


def test_what_is_not_a_criterion_is_refused():
    with pytest.raises(InputError, match="did you mean 'mse'"):
        SGD(net(), criterion="msee")
    with pytest.raises(InputError, match=r"Classes\(loss\) or Numbers\(loss\)"):
        SGD(net(), criterion=nn.functional.mse_loss)
    learner = SGD(net(), criterion=Numbers(nn.MSELoss()))  # of the whole batch, not of each example
    with pytest.raises(InputError, match='criterion: .*reduction="none"'):
        learner.observe(*next(number_batches(1)))
    stream = make_stream("seq-digits")
    with pytest.raises(InputError, match="^criterion: .*loss of classes"):
        train(SGD(MLP(stream.shape, 10), prepare=stream.prepare, criterion="mse"), stream)


def test_a_loss_of_classes_of_ones_own():
    """Label smoothing by torch's module is label smoothing."""
    ours, theirs = net(), net()
    x, y = torch.randn(8, 3, dtype=torch.float64), torch.arange(8) % 2
    smooth = nn.CrossEntropyLoss(label_smoothing=0.1, reduction="none")
    assert SGD(ours, criterion=Classes(smooth)).observe(x, y) == cross_entropy(theirs(x), y, label_smoothing=0.1)
    PCL(ours, criterion=Classes(smooth)).observe(x, y)


def test_a_loss_that_knows_class_numbers_alone_is_refused_where_labels_are_soft():
    def chance(scores, y):
        return 1 - scores.softmax(1).gather(1, y[:, None])[:, 0]

    x, y = torch.randn(8, 3, dtype=torch.float64), torch.arange(8) % 2
    ER(net(), memory=40, criterion=Classes(chance)).observe(x, y)
    for learner in (
        PCL(net(), memory=40, criterion=Classes(chance)),
        ER(net(), criterion=Classes(chance), smoothing=0.1),
    ):
        before = copy.deepcopy(learner.model)
        with pytest.raises(
            InputError, match=r"^criterion: got an error on soft labels .*cross-entropy.* it says: gather"
        ):
            learner.observe(x, y)
        assert same_weights(learner.model, before)
    with pytest.raises(InputError, match="^criterion: got 0.5, expected a loss for each of 1 examples"):
        ER(net(), memory=40, criterion=Classes(lambda scores, y: 0.5)).observe(x, y)


def test_gradients_are_clipped_by_their_norm():
    ours, theirs = net(), net()
    learner = ER(ours, lr=0.1, memory=40, clip_norm=0.01)
    x, y = torch.randn(8, 3, dtype=torch.float64), torch.arange(8) % 2
    learner.observe(x, y)
    gradients = torch.autograd.grad(cross_entropy(theirs(x), y), list(theirs.parameters()))
    size = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    assert size > 0.01
    for new, old, gradient in zip(ours.parameters(), theirs.parameters(), gradients, strict=True):
        assert torch.allclose(new, old - 0.1 * gradient * 0.01 / size, atol=1e-7)


def test_a_schedule_of_torch_works_on_the_optimiser():
    learner = ER(net(), lr=0.1, memory=40)
    schedule = torch.optim.lr_scheduler.StepLR(learner.optim, step_size=1, gamma=0.5)
    before = copy.deepcopy(learner.model)
    for x, y in number_batches(2):
        learner.observe(x, y[:, 0].long().abs() % 2)
        schedule.step()
    assert learner.optim.param_groups[0]["lr"] == 0.025
    learner.optim.param_groups[0]["lr"] = 0.0
    weights = copy.deepcopy(learner.model)
    learner.observe(x, torch.zeros(6, dtype=torch.long))
    assert same_weights(learner.model, weights)
    assert not same_weights(weights, before)


def test_the_loss_profile_of_numbers_has_the_target_on_the_way_between_two():
    learner = ER(nn.Linear(1, 1), memory=40, criterion="mse")
    learner.observe(torch.tensor([[0.0], [1.0]]), torch.tensor([10.0, 20.0]))
    points = torch.tensor([[0.0], [0.25], [1.0]])
    target = torch.tensor([[10.0], [12.5], [20.0]])
    expected = (learner.scores(points) - target).square()[:, 0]
    assert torch.allclose(LearnerLoss(learner)(points), expected)


def test_criteria_are_saved_and_loaded(tmp_path):
    x = torch.randn(8, 4)
    for criterion, y in (
        ("mse", x[:, :2]),
        (Huber(delta=2.0), x[:, :2]),
        (CrossEntropy(weights=[1, 2]), torch.arange(8) % 2),
    ):
        learner = PCL(MLP((4,), 2), memory=40, criterion=criterion)
        learner.observe(x, y)
        loaded = PCL.load(learner.save(tmp_path / "learner"))
        assert repr(loaded.criterion) == repr(learner.criterion)
        assert torch.equal(loaded.observe(x, y), learner.observe(x, y))


def test_targets_that_were_kept_less_finely_are_learned_on():
    """As in files from before targets with units were kept in float64."""
    scale = Scale()
    scale.update(torch.tensor([[1e4], [1e4 + 2]]))

    def make_learner():
        return ER(MLP((4,), 1), memory=40, replay=8, criterion=MSE(units=copy.copy(scale)))

    learner, x = make_learner(), torch.randn(8, 4)
    learner.observe(x, 1e4 + x[:, 0])
    state = learner.state_dict()
    state["memory"]["y"] = state["memory"]["y"].float()
    restored = make_learner()
    restored.load_state_dict(state)
    restored.observe(x, 1e4 + x[:, 0])
    assert restored.past["y"].dtype == torch.float64
    assert torch.equal(restored.past["y"][:8], learner.past["y"].float().double())


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("criterion", ["mse", "huber", CrossEntropy(weights=[1, 2])])
def test_a_step_on_a_gpu_waits_for_nothing(criterion):
    learner = PCL(net().cuda(), criterion=criterion, clip_norm=0.1, memory=40)
    for x, y in number_batches(4):
        y = y[:, 0].gt(0).long() if learner.error.of_classes else y
        learner.observe(x, y)  # the first steps set things up
        x, y = x.cuda(), y.cuda()
        torch.cuda.set_sync_debug_mode("error")
        try:
            loss = learner.step(x, y)  # which raises where it waits
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.isfinite(loss)


# -- what is forgotten -------------------------------------------------------------------------------------------------


def drifting(seed, size=6000):
    """A wave that is seen through a window that moves along it: the function of the moment drifts."""
    rng = np.random.default_rng(seed)
    x = np.linspace(-2, 2, size) + rng.normal(0, 0.2, size)
    return x[:, None], np.sin(2 * x) + rng.normal(0, 0.1, size)


@pytest.mark.parametrize("seed", [0, 1])
def test_where_the_function_drifts_replay_keeps_the_past_and_sgd_forgets(seed):
    x, y = drifting(seed)
    past = np.linspace(-2, 0, 100)[:, None]
    error = {}
    for name in ("pcl", "er", "sgd"):
        model = ParabolicRegressor(name, lr=0.01, options={"optimizer": "Adam"}, batch_size=10, random_state=seed)
        for start in range(0, len(x), 500):
            model.partial_fit(x[start : start + 500], y[start : start + 500])
        error[name] = np.sqrt(np.mean((model.predict(past) - np.sin(2 * past[:, 0])) ** 2))
    assert error["pcl"] < 0.15
    assert error["er"] < 0.15
    assert error["sgd"] > 0.5
