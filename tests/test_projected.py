"""A-GEM and GEM against their papers' steps, written out slowly; and GEM's memory against one that goes one by one."""

import collections
import copy
import itertools
import math

import numpy as np
import pytest
import quadprog
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.optimize import nnls
from slow import CLASSES, assert_same, net, reservoir, step_on_both
from torch import nn
from torch.nn.functional import cross_entropy

from parabolic import InputError, Memory, Stream, train
from parabolic.learners.agem import AGEM
from parabolic.learners.gem import GEM
from parabolic.learners.programme import inner_products, nonnegative_shares
from parabolic.memory import EqualShares, distinct, equal_shares

CAPACITY, REPLAY, LR = 13, 5, 0.2
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def tasks(norm=False, seed=1, count=4):
    """Tasks that contradict each other, so that there is something to bend; the last batch is short."""
    g = torch.Generator().manual_seed(seed)
    return [
        [
            (torch.randn(n, 3, generator=g, dtype=torch.float64), torch.randint(CLASSES, (n,), generator=g))
            for n in (5, 5, 4, 2 if norm else 1)
        ]
        for _ in range(count)
    ]


def slow_gradient(model, x, y):
    gradients = torch.autograd.grad(cross_entropy(model(x), y), list(model.parameters()))
    return torch.cat([gradient.flatten() for gradient in gradients])


@torch.no_grad()
def move(model, vector):
    start = 0
    for weight in model.parameters():
        weight -= LR * vector[start : start + weight.numel()].view(weight.shape)
        start += weight.numel()


def vectors(rows, seed, size=30):
    """A gradient and past ones, of which some pull against it."""
    g = torch.Generator().manual_seed(seed)
    past = torch.randn(rows, size, generator=g, dtype=torch.float64)
    return torch.randn(size, generator=g, dtype=torch.float64) - 0.3 * past.sum(0), past


# -- A-GEM -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [False, True])
def test_agem_is_the_published_step(norm):
    ours, theirs = net(norm), net(norm)
    learner = AGEM(ours, lr=LR, memory=CAPACITY, replay=REPLAY, seed=7)
    g, kept, seen, bent = torch.Generator().manual_seed(7), [], 0, 0
    for index, batches in enumerate(tasks(norm)):
        learner.start_task(batches)
        for x, y in batches:
            learner.observe(x, y, index)
            reference = None
            if kept:
                rows = distinct(min(REPLAY, len(kept)), len(kept), generator=g).tolist()
                recalled = torch.stack([kept[r][0] for r in rows]), torch.tensor([kept[r][1] for r in rows])
                reference = slow_gradient(theirs, *recalled)
            gradient = slow_gradient(theirs, x, y)
            if reference is not None and gradient @ reference < 0:
                gradient, bent = gradient - (gradient @ reference) / (reference @ reference) * reference, bent + 1
            move(theirs, gradient)
        learner.end_task(batches)
        for x, y in batches:  # only now: what is recalled is of past tasks
            seen = reservoir(kept, seen, CAPACITY, list(zip(x, y.tolist(), strict=True)), g)
    assert 0 < bent < 12
    assert_same(ours, theirs, 1e-8)
    assert learner.past["y"].tolist() == [label for _, label in kept]


@settings(max_examples=200)
@given(seed=st.integers(0, 2**32), size=st.integers(1, 50), along=st.floats(-2, 2))
def test_agem_takes_the_nearest_vector_that_does_not_raise_the_recalled_loss(seed, size, along):
    learner = AGEM(nn.Linear(1, 1))
    g = torch.Generator().manual_seed(seed)
    past, other = (torch.randn(size, generator=g, dtype=torch.float64) for _ in range(2))
    vector = other + along * past
    bent = learner.project(vector, past)
    assert bent @ past >= -1e-12 * past.norm() * vector.norm()
    if vector @ past >= 0:
        assert torch.equal(bent, vector)
    else:  # what was taken away is along the past gradient, and no more than needed
        assert abs(bent @ past) <= 1e-12 * past.norm() * vector.norm()
        assert torch.allclose((vector - bent) * past.norm() ** 2, past * (vector @ past), atol=1e-10)


def test_agem_takes_a_past_gradient_of_zero():
    vector = torch.randn(5)
    assert torch.equal(AGEM(nn.Linear(1, 1)).project(vector, torch.zeros(5)), vector)


# -- GEM ---------------------------------------------------------------------------------------------------------------


class SlowShares:
    """Of each task those with the smallest numbers: the first of every task, the second of every task, …"""

    def __init__(self, capacity):
        self.capacity, self.slots = capacity, []

    def offer(self, examples):
        """`examples` are tuples (task, number, whatever)."""
        everyone = [slot for slot in self.slots if slot is not None] + examples
        by_task = collections.defaultdict(list)
        for example in sorted(everyone, key=lambda each: each[:2]):
            by_task[example[0]].append(example)
        rounds = itertools.zip_longest(*[by_task[task] for task in sorted(by_task)])
        stays = [example for each in rounds for example in each if example is not None][: self.capacity]
        slots = [slot if slot in stays else None for slot in self.slots] + [None] * (self.capacity - len(self.slots))
        for example in examples:
            if example in stays:
                slots[slots.index(None)] = example
        self.slots = slots

    @property
    def kept(self):
        return [slot for slot in self.slots if slot is not None]


def slow_projection(gradient, past, margin):
    """min |g + Σ vₖ gₖ|² over v ≥ margin, as a problem of non-negative least squares."""
    if not past or min(gradient @ each for each in past) >= 0:
        return gradient, False
    rows = torch.stack(past)
    beyond, _ = nnls(rows.T.numpy(), -(gradient + margin * rows.sum(0)).numpy())
    return gradient + sum((margin + v) * each for v, each in zip(beyond, past, strict=True)), True


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("margin", "replay"), [(0.5, 0), (0.0, 0), (0.1, 2)])
def test_gem_is_the_published_step(norm, margin, replay):
    ours, theirs = net(norm), net(norm)
    learner = GEM(ours, lr=LR, memory=CAPACITY, replay=replay, margin=margin, seed=7)
    g, memory, number, bent = torch.Generator().manual_seed(7), SlowShares(CAPACITY), itertools.count(), 0
    examples = {}
    for index, batches in enumerate(tasks(norm)):
        for x, y in batches:
            learner.observe(x, y, index)
            past, later = [], SlowShares(CAPACITY)
            later.offer([*memory.kept, *((index, 1 + i, None) for i in range(CAPACITY))])  # with its share, in the end
            for task in range(index):
                rows = [examples[key] for each, _, key in sorted(later.kept) if each == task]
                if replay:
                    rows = [rows[r] for r in distinct(min(replay, len(rows)), len(rows), generator=g).tolist()]
                recalled = torch.stack([row[0] for row in rows]), torch.tensor([row[1] for row in rows])
                past.append(slow_gradient(theirs, *recalled))
            gradient, was_bent = slow_projection(slow_gradient(theirs, x, y), past, margin)
            bent += was_bent
            move(theirs, gradient)
            keys = [next(number) for _ in y]
            examples |= dict(zip(keys, zip(x, y.tolist(), strict=True), strict=True))
            chances = torch.rand(len(x), generator=g, dtype=torch.float64).tolist()
            memory.offer([(index, chance, key) for chance, key in zip(chances, keys, strict=True)])
    assert bent > 3
    assert_same(ours, theirs, 1e-8)
    assert learner.past["task"].tolist() == [task for task, _, _ in memory.kept]
    assert learner.past["y"].tolist() == [examples[key][1] for _, _, key in memory.kept]


@settings(max_examples=200)
@given(rows=st.integers(1, 9), seed=st.integers(0, 2**32), margin=st.sampled_from([0.0, 0.1, 0.5, 2.0]))
def test_gem_satisfies_its_constraints_and_the_kkt_conditions(rows, seed, margin):
    learner = GEM(nn.Linear(1, 1), margin=margin)
    vector, past = vectors(rows, seed)
    bent = learner.project(vector, past)
    scale = past.norm() ** 2
    assert (past @ bent).min() >= -1e-9 * scale  # no past loss is raised
    if (past @ vector).min() >= 0:
        assert torch.equal(bent, vector)
        return
    share = torch.linalg.lstsq(past.T, (bent - vector)[:, None]).solution[:, 0]
    assert torch.allclose(share @ past, bent - vector, atol=1e-9)  # stationarity: g̃ = g + Σ vₖ gₖ
    assert share.min() >= margin - 1e-9  # the dual's own constraint
    assert ((share - margin) * (past @ bent)).abs().max() <= 1e-8 * scale  # complementary slackness


def test_gem_without_margin_takes_the_nearest_vector():
    learner, g = GEM(nn.Linear(1, 1), margin=0.0), torch.Generator().manual_seed(0)
    vector, past = vectors(4, 5)
    bent = learner.project(vector, past)
    assert (past @ vector).min() < 0
    for _ in range(200):  # any other vector that satisfies the constraints is farther away
        share = torch.rand(4, generator=g, dtype=torch.float64) * 3
        noise = 0.1 * torch.randn(30, generator=g, dtype=torch.float64)
        for other in (vector + share @ past, bent + noise):
            if (past @ other).min() >= 0:
                assert (other - vector).norm() >= (bent - vector).norm() - 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_gem_takes_past_gradients_that_depend_on_each_other(dtype, scale):
    vector, past = (scale * each.to(dtype) for each in vectors(2, 3))
    past = torch.cat([past, past, past.sum(0, keepdim=True), torch.zeros_like(past[:1])])
    for margin in (0.0, 0.5):
        bent = GEM(nn.Linear(1, 1), margin=margin).project(vector, past)
        assert torch.isfinite(bent).all()
        assert (past @ bent).min() >= -1e-2 * scale**2 * 30


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("margin", [0.0, 0.5])
def test_gem_bends_gradients_of_a_short_type_as_their_exact_values(dtype, margin):
    learner = GEM(nn.Linear(1, 1), margin=margin)
    for seed in range(20):
        vector, past = (each.to(dtype) for each in vectors(4, seed))
        bent, exact = learner.project(vector, past), learner.project(vector.double(), past.double())
        assert bent.dtype == dtype
        assert (bent.double() - exact).norm() <= torch.finfo(dtype).eps * exact.norm()
        if (past.double() @ vector.double()).min() >= 0:
            assert torch.equal(bent, vector)


def test_with_one_past_task_and_no_margin_gem_is_agem():
    for seed in range(10):
        vector, past = vectors(1, seed)
        bent = GEM(nn.Linear(1, 1), margin=0.0).project(vector, past)
        assert torch.allclose(bent, AGEM(nn.Linear(1, 1)).project(vector, past[0]), atol=1e-9)


def unit_rows(kind, count, seed):
    """Gradients that are hard to tell apart, contradict each other, vanish, or differ in scale; and one to bend."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    past, vector = normal(count, 25), normal(25)
    if kind == "against":
        vector -= past.sum(0)
    elif kind == "alike":
        past += 3 * normal(25)
        vector -= past.mean(0)
    elif kind == "dependent":
        past = normal(count, 3) @ normal(3, 25)
        vector -= past.sum(0)
    elif kind == "equal":
        past = past[torch.randint(max(1, count // 2), (count,), generator=g)]
    elif kind == "zero":
        past[torch.rand(count, generator=g) < 0.5] = 0
    elif kind == "whole numbers":  # many ties
        past, vector = (torch.randint(-1, 2, shape, generator=g).double() for shape in ((count, 6), (6,)))
    elif kind == "chain":
        past = past.cumsum(0)
        vector -= past.mean(0)
    elif kind == "as many as numbers":
        past, vector = past[:, :count], vector[:count]
    elif kind == "badly scaled":
        past *= 10 ** (12 * torch.rand(count, 1, generator=g, dtype=torch.float64) - 6)
    return vector, past


KINDS = ["any", "against", "alike", "dependent", "equal", "zero", "whole numbers", "chain", "as many as numbers",
         "badly scaled"]  # fmt: skip
PROGRAMMES = {"kind": st.sampled_from(KINDS), "count": st.integers(1, 20), "seed": st.integers(0, 2**32)}


@settings(max_examples=500)
@given(**PROGRAMMES)
def test_shares_satisfy_the_conditions_of_a_minimum(kind, count, seed):
    """Karush, Kuhn and Tucker: no share is negative, no vector is stepped against, and of both one is zero."""
    vector, past = unit_rows(kind, count, seed)
    lengths = past.norm(dim=1, keepdim=True)
    past, vector = past / lengths.masked_fill(lengths == 0, 1), vector / vector.norm().clamp(min=1e-300)
    share = nonnegative_shares(past @ past.T, past @ vector, 1e3 * torch.finfo(torch.float64).eps)
    after = past @ (vector + share @ past)
    assert share.min() >= 0
    assert after.min() >= -1e-9
    assert (share * after).abs().max() <= 1e-9 * (1 + share.max())


@settings(max_examples=300)
@given(margin=st.sampled_from([0.0, 0.5, 3.0]), **PROGRAMMES)
def test_gem_bends_as_quadprog_does(kind, count, seed, margin):
    vector, past = unit_rows(kind, count, seed)
    bent = GEM(nn.Linear(1, 1), margin=margin).project(vector, past)
    overlap = (past @ vector) / past.norm(dim=1).clamp(min=1e-300) / vector.norm().clamp(min=1e-300)
    if overlap.min() >= -1e-15:  # zero, but for rounding
        assert torch.equal(bent, vector)
        return
    # Zero rows say nothing, and of those that depend on each other quadprog wants them a little independent.
    rows = past[past.norm(dim=1) > 0]
    lengths = rows.norm(dim=1)
    least = vector + margin * rows.sum(0)
    units = (rows / lengths[:, None]).numpy()
    size = least.norm().item()
    gram = units @ units.T + 1e-11 * np.eye(len(rows))
    share = quadprog.solve_qp(gram, -units @ least.numpy() / size, np.eye(len(rows)), np.zeros(len(rows)))[0]
    expected = least + size * torch.from_numpy(share @ units)
    assert (bent - expected).norm() <= 1e-4 * size
    assert bent.norm() <= expected.norm() + 1e-7 * size  # the ridge can only make it longer


@settings(max_examples=200)
@given(**PROGRAMMES)
def test_gem_bends_gradients_of_single_precision(kind, count, seed):
    vector, past = (each.float() for each in unit_rows(kind, count, seed))
    bent = GEM(nn.Linear(1, 1), margin=0.0).project(vector, past)
    assert bent.dtype == torch.float32
    after = (past @ bent) / past.norm(dim=1).clamp(min=1e-20)
    assert after.min() >= -2e-2 * vector.norm()
    exact = GEM(nn.Linear(1, 1), margin=0.0).project(vector.double(), past.double())
    assert (bent - vector).norm() <= (exact - vector).norm() + 2e-2 * vector.norm()  # nor is it bent more than it must


@settings(max_examples=50)
@given(rows=st.integers(1, 5), size=st.sampled_from([1, 100, 4095, 4096, 4097, 10000]), seed=st.integers(0, 2**32))
def test_inner_products_piece_by_piece(rows, size, seed):
    long = torch.randn(rows, size, generator=torch.Generator().manual_seed(seed))
    exact = long.double() @ long.double().T
    products = inner_products(long)
    assert products.dtype == torch.float64
    assert torch.allclose(products, exact, rtol=1e-5, atol=1e-5 * size**0.5)


def test_gem_leaves_a_vector_of_zero_and_takes_gradients_that_are_no_numbers():
    _, past = vectors(3, 0)
    assert not GEM(nn.Linear(1, 1)).project(torch.zeros(30, dtype=torch.float64), past).any()
    assert GEM(nn.Linear(1, 1)).project(torch.full((30,), torch.nan, dtype=torch.float64), past).isnan().all()


@pytest.mark.parametrize("replay", [0, 2])
def test_gem_is_told_of_a_task_by_a_number_or_by_a_start_and_a_tensor(replay):
    outcomes = []
    for told in ("number", "start and number", "start and tensor"):
        model = net(norm=True)
        learner = GEM(model, lr=LR, memory=CAPACITY, replay=replay, seed=7)
        for index, batches in enumerate(tasks(norm=True)):
            if told != "number":
                learner.start_task(batches)
            for x, y in batches:
                learner.step(x, y, torch.tensor(index) if told == "start and tensor" else index)
        outcomes.append(model)
    assert_same(outcomes[0], outcomes[1], 1e-8)
    assert_same(outcomes[0], outcomes[2], 1e-8)


def test_gem_takes_tasks_in_any_order_and_again():
    """How many examples of each past task will stay is known from counting alone; here the memory is asked."""
    learner, (batches, *_) = GEM(net(), lr=LR, memory=CAPACITY), tasks(norm=True)
    for task in (5, 2, 2, 7, 5, 0, 7):
        known, stayed = set(), {}
        for x, y in batches:
            learner.observe(x, y, task)
            known.add(tuple(learner.shares()))
            held = collections.Counter(learner.past["task"].tolist())
            order, tasks_of = (each.tolist() for each in learner.past.by_task())
            for past, share in learner.shares():
                first = tasks_of.index(past)
                assert tasks_of[first : first + share] == [past] * share
                same = sorted(learner.past["x"][order[first : first + share]].tolist())
                assert stayed.setdefault(past, same) == same  # from the task's first batch on
        assert len(known) == 1  # all steps of a task have one shape
        assert held == dict(learner.shares()) | {task: held[task]}
        assert held.total() == CAPACITY


def test_gem_keeps_account_of_no_more_tasks_than_have_a_slot():
    """The account is gone through at every step: with one entry per task ever seen, steps would become ever slower."""
    learner = GEM(torch.nn.Linear(2, 3), memory=5)
    seen = collections.Counter()
    for task in [*range(9, 40), *range(8), 3, 50, 12, 11]:  # lower numbers take slots from higher ones
        x, y = torch.randn(3, 2), torch.arange(3)
        learner.start_task([(x, y)])
        learner.observe(x, y, task)
        assert len(learner._offered) <= 5
        seen[task] += len(y)
        tasks_of = sorted(seen)
        shares = equal_shares(5, [seen[each] for each in tasks_of])
        assert learner.past["task"].sort().values.tolist() == [
            each for each, share in zip(tasks_of, shares, strict=True) for _ in range(share)
        ]
        with_current = seen | collections.Counter({task: 5})
        tasks_of = sorted(with_current)
        shares = equal_shares(5, [with_current[each] for each in tasks_of])
        expected = [(each, share) for each, share in zip(tasks_of, shares, strict=True) if share and each != task]
        assert learner.shares() == expected


def test_gem_needs_a_memory_of_equal_shares():
    with pytest.raises(InputError, match="^memory: got .*Memory.*, expected a parabolic.memory.EqualShares"):
        GEM(net(), memory=Memory(10))
    memory = EqualShares(10)
    x, y = tasks()[0][0]
    memory.offer({"x": x, "y": y, "task": torch.zeros_like(y)})
    learner = GEM(net(), memory=memory)
    assert learner.shares() == [(0, 5)]  # what it was given is of a past task
    learner.observe(x, y, 1)
    assert learner.past is memory


# -- equal shares ------------------------------------------------------------------------------------------------------

OFFERS = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 25)), min_size=1, max_size=12)


@settings(max_examples=300)
@given(capacity=st.integers(1, 30), offers=OFFERS, seed=st.integers(0, 2**32))
def test_shares_evolve_as_if_one_by_one(capacity, offers, seed):
    ours, batched, single = EqualShares(capacity), SlowShares(capacity), SlowShares(capacity)
    mine, same = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed)
    number, offered = itertools.count(), collections.Counter()
    for task, size in offers:
        keys = [next(number) for _ in range(size)]
        ours.offer({"x": torch.tensor(keys), "task": torch.full((size,), task)}, generator=mine)
        chances = torch.rand(size, generator=same, dtype=torch.float64).tolist()
        examples = [(task, chance, key) for chance, key in zip(chances, keys, strict=True)]
        batched.offer(examples)
        for example in examples:
            single.offer([example])
        offered[task] += size
        assert ours["x"].tolist() == [key for _, _, key in batched.kept]
        assert sorted(ours["x"].tolist()) == sorted(key for _, _, key in single.kept)
        held = collections.Counter(ours["task"].tolist())
        assert len(ours) == min(sum(offered.values()), capacity) == held.total()
        short = [task for task in offered if held[task] < offered[task]]  # tasks that had to give something up
        level = min((held[task] for task in short), default=capacity)
        assert all(held[task] - level <= 1 for task in offered)


@settings(max_examples=300)
@given(capacity=st.integers(1, 30), offers=OFFERS, again=st.integers(0, 12), seed=st.integers(0, 2**32))
def test_shares_are_known_without_looking(capacity, offers, again, seed):
    """From what was offered of each task; or, from some time on, from what was kept of it by then."""
    memory, g = EqualShares(capacity), torch.Generator().manual_seed(seed)
    offered = collections.Counter()
    for i, (task, size) in enumerate(offers):
        memory.offer({"x": torch.rand(size), "task": torch.full((size,), task)}, generator=g)
        offered[task] += size
        kept = collections.Counter(memory["task"].tolist())
        tasks = sorted(offered)
        assert equal_shares(capacity, [offered[task] for task in tasks]) == [kept[task] for task in tasks]
        order, sorted_tasks = memory.by_task()
        assert memory.take(order[: len(memory)])["task"].tolist() == sorted(memory["task"].tolist())
        assert sorted_tasks[: len(memory)].tolist() == sorted(memory["task"].tolist())
        assert sorted(order.tolist()) == list(range(capacity))
        if i == again:
            offered = kept


@pytest.mark.parametrize("device", DEVICES)
def test_every_example_of_a_task_is_equally_likely_to_be_kept(device):
    length, capacity, trials = 30, 12, 1000
    generator, counts = torch.Generator(device).manual_seed(0), np.zeros((2, length))
    for _ in range(trials):
        memory = EqualShares(capacity)
        for task in range(2):
            for part in torch.arange(length, device=device).split(15):
                memory.offer({"x": part, "task": torch.full_like(part, task)}, generator=generator)
        for task in range(2):
            counts[task, memory["x"][memory["task"] == task].cpu().numpy()] += 1
    expected = trials * capacity / 2 / length
    for each in counts:  # inclusions are negatively correlated: chi-square after this scaling
        statistic = ((each - expected) ** 2 / expected).sum() * (length - 1) / length / (1 - capacity / 2 / length)
        assert 1e-4 < stats.chi2.sf(statistic, length - 1) < 1 - 1e-4


def test_shares_go_on_where_they_were():
    one, other = EqualShares(10), EqualShares(10)
    g = torch.Generator().manual_seed(0)
    one.offer({"x": torch.arange(25), "task": torch.zeros(25, dtype=torch.long)}, generator=g)
    one.offer({"x": torch.arange(3), "task": torch.ones(3, dtype=torch.long)}, generator=g)
    state = copy.deepcopy(one.state_dict())
    other.load_state_dict(state)
    one.offer({"x": torch.arange(50, 90), "task": torch.full((40,), 2)}, generator=torch.Generator().manual_seed(1))
    other.offer({"x": torch.arange(50, 90), "task": torch.full((40,), 2)}, generator=torch.Generator().manual_seed(1))
    assert torch.equal(one["x"], other["x"])
    one.load_state_dict(state)  # and back, in place
    assert one["task"].bincount().tolist() == [7, 3]
    empty = EqualShares(10)
    empty.load_state_dict(EqualShares(10).state_dict())
    assert len(empty) == 0


def test_shares_need_tasks():
    with pytest.raises(InputError, match='batch: got .*, expected a field "task"'):
        EqualShares(10).offer({"x": torch.arange(3)})


# -- both --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [AGEM, GEM])
def test_images_batch_norm_and_single_examples_are_welcome(cls):
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, CLASSES))
    learner = cls(model, memory=5, replay=2, average=0.9, augment=lambda x, g: x.roll(1, -1))
    g = torch.Generator().manual_seed(0)
    for task in range(3):
        batches = [
            (torch.randint(256, (n, 1, 8, 8), generator=g, dtype=torch.uint8), torch.full((n,), task)) for n in (6, 1)
        ]
        learner.start_task(batches)
        for x, y in batches:
            learner.observe(x, y, task)
        learner.end_task(batches)
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())
    assert learner.past["x"].dtype == torch.uint8


@pytest.mark.parametrize("cls", [AGEM, GEM])
def test_a_stream_without_tasks_is_refused(cls):
    stream = Stream.from_arrays(torch.randn(60, 3), torch.arange(60) % 4, tasks=2, boundaries=False)
    with pytest.raises(InputError, match=f"learner: got '{cls.name}', expected one that needs no tasks"):
        train(cls(net().float()), stream)


def test_defaults_are_the_published_ones():
    assert (AGEM(net()).lr, AGEM(net()).replay) == (0.03, 32)
    assert (GEM(net()).lr, GEM(net()).margin, GEM(net()).replay) == (0.03, 0.5, 0)


@pytest.mark.parametrize(
    ("cls", "name", "value"),
    [(AGEM, "lr", 0), (AGEM, "memory", 0), (AGEM, "replay", 0), (AGEM, "replay", 300), (GEM, "margin", -0.1),
     (GEM, "margin", math.nan), (GEM, "replay", -1), (GEM, "replay", 300), (GEM, "memory", -3), (GEM, "lr", -1)],
)  # fmt: skip
def test_bad_options_are_named(cls, name, value):
    with pytest.raises(InputError, match=f"^{name}: got .*, expected "):
        cls(net(), **{name: value})


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("cls", [AGEM, GEM])
def test_a_step_on_a_gpu_agrees_with_the_cpu_and_waits_for_nothing(cls):
    models = [net(norm=True), net(norm=True).cuda()]
    # All that is kept is recalled, so that the two generators need not agree.
    learners = [cls(model, lr=0.1, memory=200, replay=200 if cls is AGEM else 0, average=0.9) for model in models]
    step_on_both(learners, tasks(norm=True))
    assert_same(*models, 1e-6)
