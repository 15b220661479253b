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
from parabolic.memory import ClassBalanced, EqualShares, distinct, equal_shares
from parabolic.states import same_state

CAPACITY, REPLAY, LR = 13, 5, 0.2
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def tasks(norm=False, seed=1, count=4):
    """Tasks that contradict each other, so that there is something to bend; the last batch is short."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [
            (
                torch.randn(size, 3, generator=generator, dtype=torch.float64),
                torch.randint(CLASSES, (size,), generator=generator),
            )
            for size in (5, 5, 4, 2 if norm else 1)
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
    generator = torch.Generator().manual_seed(seed)
    past = torch.randn(rows, size, generator=generator, dtype=torch.float64)
    return torch.randn(size, generator=generator, dtype=torch.float64) - 0.3 * past.sum(0), past


# -- A-GEM -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [False, True])
def test_agem_is_the_published_step(norm):
    ours, theirs = net(norm), net(norm)
    learner = AGEM(ours, lr=LR, memory=CAPACITY, replay=REPLAY, seed=7)
    generator, remembered, seen, bends = torch.Generator().manual_seed(7), [], 0, 0
    for index, batches in enumerate(tasks(norm)):
        learner.start_task(batches)
        for x, y in batches:
            learner.observe(x, y, index)
            reference = None
            if remembered:
                rows = distinct(min(REPLAY, len(remembered)), len(remembered), generator=generator).tolist()
                recalled = (
                    torch.stack([remembered[row][0] for row in rows]),
                    torch.tensor([remembered[row][1] for row in rows]),
                )
                reference = slow_gradient(theirs, *recalled)
            gradient = slow_gradient(theirs, x, y)
            if reference is not None and gradient @ reference < 0:
                gradient, bends = (
                    gradient - (gradient @ reference) / (reference @ reference) * reference,
                    bends + 1,
                )
            move(theirs, gradient)
        learner.end_task(batches)
        for x, y in batches:  # only now: what is recalled is of past tasks
            seen = reservoir(remembered, seen, CAPACITY, list(zip(x, y.tolist(), strict=True)), generator)
    assert 0 < bends < 12
    assert_same(ours, theirs, 1e-8)
    assert learner.past["y"].tolist() == [label for _, label in remembered]


@pytest.mark.parametrize("memory", [8, ClassBalanced(8)])
def test_agem_keeps_nothing_of_a_task_whose_end_fails(memory):
    learner = AGEM(net().float(), memory=memory, replay=4)
    batches = [(torch.randn(2048, 3), torch.arange(2048) % CLASSES) for _ in range(2)]
    for x, y in batches:
        learner.observe(x[:8], y[:8], task=0)
    for _ in range(2):
        before = copy.deepcopy(learner.past.state_dict())
        with pytest.raises(InputError, match="^x: .* NaN or infinite"):
            learner.end_task([batches[0], (batches[1][0] / 0, batches[1][1])])
        assert same_state(learner.past.state_dict(), before)
        learner.end_task(batches)
    assert learner.past.offered == 2 * 4096


@settings(max_examples=200)
@given(seed=st.integers(0, 2**32), size=st.integers(1, 50), along=st.floats(-2, 2))
def test_agem_takes_the_nearest_vector_that_does_not_raise_the_recalled_loss(seed, size, along):
    learner = AGEM(nn.Linear(1, 1))
    generator = torch.Generator().manual_seed(seed)
    past, noise = (torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(2))
    vector = noise + along * past
    projected = learner.project(vector, past)
    assert projected @ past >= -1e-12 * past.norm() * vector.norm()
    if vector @ past >= 0:
        assert torch.equal(projected, vector)
    else:  # what was taken away is along the past gradient, and no more than needed
        assert abs(projected @ past) <= 1e-12 * past.norm() * vector.norm()
        assert torch.allclose((vector - projected) * past.norm() ** 2, past * (vector @ past), atol=1e-10)


def test_agem_takes_a_past_gradient_of_zero():
    vector = torch.randn(5)
    assert torch.equal(AGEM(nn.Linear(1, 1)).project(vector, torch.zeros(5)), vector)


SCALES = [
    *((torch.float32, scale) for scale in (1e-36, 1e-25, 1e-20, 1.0, 1e19, 1e30)),
    *((torch.bfloat16, scale) for scale in (1e-25, 1.0, 1e19)),
    *((torch.float16, scale) for scale in (1e-3, 1.0, 1e4)),
]


@pytest.mark.parametrize(("dtype", "scale"), SCALES)
@pytest.mark.parametrize("scaled", ["both", "new", "past"])
def test_gradients_of_any_size_and_type_are_bent_as_their_exact_values(dtype, scale, scaled):
    """Their squares, and in float16 their lengths, may be too small or too large for their type."""
    for seed in range(5):
        vector, past = vectors(1, seed)
        vector = (vector * (1.0 if scaled == "past" else scale)).to(dtype)
        past = (past * (1.0 if scaled == "new" else scale)).to(dtype)
        g, r = vector.double(), past[0].double()
        exact = g - (g @ r).clamp(max=0) / (r @ r) * r
        ours = AGEM(nn.Linear(1, 1)).project(vector, past[0]), GEM(nn.Linear(1, 1), margin=0.0).project(vector, past)
        for projected in ours:
            assert projected.dtype == dtype
            assert (projected.double() - exact).norm() <= 2 * torch.finfo(dtype).eps * g.norm()


# -- GEM ---------------------------------------------------------------------------------------------------------------


class SlowShares:
    """Of each task those with the smallest numbers: the first of every task, the second of every task, …"""

    def __init__(self, capacity):
        self.capacity, self.slots = capacity, []

    def offer(self, examples):
        """`examples` are tuples (task, number, whatever)."""
        everyone = [slot for slot in self.slots if slot is not None] + examples
        by_task = collections.defaultdict(list)
        for example in sorted(everyone, key=lambda example: example[:2]):
            by_task[example[0]].append(example)
        rounds = itertools.zip_longest(*[by_task[task] for task in sorted(by_task)])
        stays = [example for round_of_tasks in rounds for example in round_of_tasks if example is not None][
            : self.capacity
        ]
        slots = [slot if slot in stays else None for slot in self.slots] + [None] * (self.capacity - len(self.slots))
        for example in examples:
            if example in stays:
                slots[slots.index(None)] = example
        self.slots = slots

    @property
    def stored(self):
        return [slot for slot in self.slots if slot is not None]


def slow_projection(gradient, past, margin):
    """min |g + Σ vₖ gₖ|² over v ≥ margin, as a problem of non-negative least squares."""
    if not past or min(gradient @ past_gradient for past_gradient in past) >= 0:
        return gradient, False
    rows = torch.stack(past)
    shares, _ = nnls(rows.T.numpy(), -(gradient + margin * rows.sum(0)).numpy())
    return gradient + sum(
        (margin + share) * past_gradient for share, past_gradient in zip(shares, past, strict=True)
    ), True


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("margin", "replay"), [(0.5, 0), (0.0, 0), (0.1, 2)])
def test_gem_is_the_published_step(norm, margin, replay):
    ours, theirs = net(norm), net(norm)
    learner = GEM(ours, lr=LR, memory=CAPACITY, replay=replay, margin=margin, seed=7)
    generator, memory, number, bends = torch.Generator().manual_seed(7), SlowShares(CAPACITY), itertools.count(), 0
    examples = {}
    for index, batches in enumerate(tasks(norm)):
        for x, y in batches:
            learner.observe(x, y, index)
            past, later = [], SlowShares(CAPACITY)
            later.offer(
                [*memory.stored, *((index, 1 + number, None) for number in range(CAPACITY))]
            )  # with its share, in the end
            for task in range(index):
                rows = [examples[key] for other_task, _, key in sorted(later.stored) if other_task == task]
                if replay:
                    rows = [
                        rows[row] for row in distinct(min(replay, len(rows)), len(rows), generator=generator).tolist()
                    ]
                recalled = torch.stack([row[0] for row in rows]), torch.tensor([row[1] for row in rows])
                past.append(slow_gradient(theirs, *recalled))
            gradient, was_projected = slow_projection(slow_gradient(theirs, x, y), past, margin)
            bends += was_projected
            move(theirs, gradient)
            keys = [next(number) for _ in y]
            examples |= dict(zip(keys, zip(x, y.tolist(), strict=True), strict=True))
            chances = torch.rand(len(x), generator=generator, dtype=torch.float64).tolist()
            memory.offer([(index, chance, key) for chance, key in zip(chances, keys, strict=True)])
    assert bends > 3
    assert_same(ours, theirs, 1e-8)
    assert learner.past["task"].tolist() == [task for task, _, _ in memory.stored]
    assert learner.past["y"].tolist() == [examples[key][1] for _, _, key in memory.stored]


@settings(max_examples=200)
@given(rows=st.integers(1, 9), seed=st.integers(0, 2**32), margin=st.sampled_from([0.0, 0.1, 0.5, 2.0]))
def test_gem_satisfies_its_constraints_and_the_kkt_conditions(rows, seed, margin):
    learner = GEM(nn.Linear(1, 1), margin=margin)
    vector, past = vectors(rows, seed)
    projected = learner.project(vector, past)
    scale = past.norm() ** 2
    assert (past @ projected).min() >= -1e-9 * scale  # no past loss is raised
    if (past @ vector).min() >= 0:
        assert torch.equal(projected, vector)
        return
    share = torch.linalg.lstsq(past.T, (projected - vector)[:, None]).solution[:, 0]
    assert torch.allclose(share @ past, projected - vector, atol=1e-9)  # stationarity: g̃ = g + Σ vₖ gₖ
    assert share.min() >= margin - 1e-9  # the dual's own constraint
    assert ((share - margin) * (past @ projected)).abs().max() <= 1e-8 * scale  # complementary slackness


def test_gem_without_margin_takes_the_nearest_vector():
    learner, generator = GEM(nn.Linear(1, 1), margin=0.0), torch.Generator().manual_seed(0)
    vector, past = vectors(4, 5)
    projected = learner.project(vector, past)
    assert (past @ vector).min() < 0
    for _ in range(200):  # any other vector that satisfies the constraints is farther away
        share = torch.rand(4, generator=generator, dtype=torch.float64) * 3
        noise = 0.1 * torch.randn(30, generator=generator, dtype=torch.float64)
        for other in (vector + share @ past, projected + noise):
            if (past @ other).min() >= 0:
                assert (other - vector).norm() >= (projected - vector).norm() - 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_gem_takes_past_gradients_that_depend_on_each_other(dtype, scale):
    vector, past = (scale * tensor.to(dtype) for tensor in vectors(2, 3))
    past = torch.cat([past, past, past.sum(0, keepdim=True), torch.zeros_like(past[:1])])
    for margin in (0.0, 0.5):
        projected = GEM(nn.Linear(1, 1), margin=margin).project(vector, past)
        assert torch.isfinite(projected).all()
        assert (past @ projected).min() >= -1e-2 * scale**2 * 30


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("margin", [0.0, 0.5])
def test_gem_bends_gradients_of_a_short_type_as_their_exact_values(dtype, margin):
    learner = GEM(nn.Linear(1, 1), margin=margin)
    for seed in range(20):
        vector, past = (tensor.to(dtype) for tensor in vectors(4, seed))
        projected, exact = learner.project(vector, past), learner.project(vector.double(), past.double())
        assert projected.dtype == dtype
        assert (projected.double() - exact).norm() <= torch.finfo(dtype).eps * exact.norm()
        if (past.double() @ vector.double()).min() >= 0:
            assert torch.equal(projected, vector)


def test_with_one_past_task_and_no_margin_gem_is_agem():
    for seed in range(10):
        vector, past = vectors(1, seed)
        projected = GEM(nn.Linear(1, 1), margin=0.0).project(vector, past)
        assert torch.allclose(projected, AGEM(nn.Linear(1, 1)).project(vector, past[0]), atol=1e-9)


def unit_rows(kind, count, seed):
    """Gradients that are hard to tell apart, contradict each other, vanish, or differ in scale; and one to bend."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

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
        past = past[torch.randint(max(1, count // 2), (count,), generator=generator)]
    elif kind == "zero":
        past[torch.rand(count, generator=generator) < 0.5] = 0
    elif kind == "whole numbers":  # many ties
        past, vector = (torch.randint(-1, 2, shape, generator=generator).double() for shape in ((count, 6), (6,)))
    elif kind == "chain":
        past = past.cumsum(0)
        vector -= past.mean(0)
    elif kind == "as many as numbers":
        past, vector = past[:, :count], vector[:count]
    elif kind == "badly scaled":
        past *= 10 ** (12 * torch.rand(count, 1, generator=generator, dtype=torch.float64) - 6)
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
    projected = GEM(nn.Linear(1, 1), margin=margin).project(vector, past)
    overlap = (past @ vector) / past.norm(dim=1).clamp(min=1e-300) / vector.norm().clamp(min=1e-300)
    if overlap.min() >= -1e-15:  # zero, but for rounding
        assert torch.equal(projected, vector)
        return
    # Zero rows say nothing, and of those that depend on each other quadprog wants them a little independent.
    rows = past[past.norm(dim=1) > 0]
    lengths = rows.norm(dim=1)
    minimal = vector + margin * rows.sum(0)
    units = (rows / lengths[:, None]).numpy()
    size = minimal.norm().item()
    gram = units @ units.T + 1e-11 * np.eye(len(rows))
    share = quadprog.solve_qp(gram, -units @ minimal.numpy() / size, np.eye(len(rows)), np.zeros(len(rows)))[0]
    expected = minimal + size * torch.from_numpy(share @ units)
    assert (projected - expected).norm() <= 1e-4 * size
    assert projected.norm() <= expected.norm() + 1e-7 * size  # the ridge can only make it longer


@settings(max_examples=200)
@given(**PROGRAMMES)
def test_gem_bends_gradients_of_single_precision(kind, count, seed):
    vector, past = (tensor.float() for tensor in unit_rows(kind, count, seed))
    projected = GEM(nn.Linear(1, 1), margin=0.0).project(vector, past)
    assert projected.dtype == torch.float32
    after = (past @ projected) / past.norm(dim=1).clamp(min=1e-20)
    assert after.min() >= -2e-2 * vector.norm()
    exact = GEM(nn.Linear(1, 1), margin=0.0).project(vector.double(), past.double())
    # Nor is it bent more than it must.
    assert (projected - vector).norm() <= (exact - vector).norm() + 2e-2 * vector.norm()


@settings(max_examples=50)
@given(rows=st.integers(1, 5), size=st.sampled_from([1, 100, 4095, 4096, 4097, 10000]), seed=st.integers(0, 2**32))
def test_inner_products_piece_by_piece(rows, size, seed):
    vectors_of_size = torch.randn(rows, size, generator=torch.Generator().manual_seed(seed))
    exact = vectors_of_size.double() @ vectors_of_size.double().T
    products = inner_products(vectors_of_size)
    assert products.dtype == torch.float64
    assert torch.allclose(products, exact, rtol=1e-5, atol=1e-5 * size**0.5)


def test_gem_leaves_a_vector_of_zero_and_takes_gradients_that_are_no_numbers():
    _, past = vectors(3, 0)
    assert not GEM(nn.Linear(1, 1)).project(torch.zeros(30, dtype=torch.float64), past).any()
    assert GEM(nn.Linear(1, 1)).project(torch.full((30,), torch.nan, dtype=torch.float64), past).isnan().all()


@pytest.mark.parametrize("replay", [0, 2])
def test_gem_is_told_of_a_task_by_a_number_or_by_a_start_and_a_tensor(replay):
    outcomes = []
    for way in ("number", "start and number", "start and tensor"):
        model = net(norm=True)
        learner = GEM(model, lr=LR, memory=CAPACITY, replay=replay, seed=7)
        for index, batches in enumerate(tasks(norm=True)):
            if way != "number":
                learner.start_task(batches)
            for x, y in batches:
                learner.step(x, y, torch.tensor(index) if way == "start and tensor" else index)
        outcomes.append(model)
    assert_same(outcomes[0], outcomes[1], 1e-8)
    assert_same(outcomes[0], outcomes[2], 1e-8)


def test_gem_takes_tasks_in_any_order_and_again():
    """How many examples of each past task will stay is known from counting alone; here the memory is asked."""
    learner, (batches, *_) = GEM(net(), lr=LR, memory=CAPACITY), tasks(norm=True)
    for task in (5, 2, 2, 7, 5, 0, 7):
        shares_seen, stayed = set(), {}
        for x, y in batches:
            learner.observe(x, y, task)
            shares_seen.add(tuple(learner.shares()))
            counts = collections.Counter(learner.past["task"].tolist())
            order, tasks_of = (tensor.tolist() for tensor in learner.past.by_task())
            for past, share in learner.shares():
                first = tasks_of.index(past)
                assert tasks_of[first : first + share] == [past] * share
                recalled = sorted(learner.past["x"][order[first : first + share]].tolist())
                assert stayed.setdefault(past, recalled) == recalled  # from the task's first batch on
        assert len(shares_seen) == 1  # all steps of a task have one shape
        assert counts == dict(learner.shares()) | {task: counts[task]}
        assert counts.total() == CAPACITY


def test_gem_keeps_account_of_no_more_tasks_than_have_a_slot():
    """The account is gone through at every step: with one entry per task ever seen, steps would become ever slower."""
    learner = GEM(torch.nn.Linear(2, 3), memory=5)
    offered = collections.Counter()
    for task in [*range(9, 40), *range(8), 3, 50, 12, 11]:  # lower numbers take slots from higher ones
        x, y = torch.randn(3, 2), torch.arange(3)
        learner.start_task([(x, y)])
        learner.observe(x, y, task)
        assert len(learner._offered) <= 5
        offered[task] += len(y)
        tasks_of = sorted(offered)
        shares = equal_shares(5, [offered[past_task] for past_task in tasks_of])
        assert learner.past["task"].sort().values.tolist() == [
            past_task for past_task, share in zip(tasks_of, shares, strict=True) for _ in range(share)
        ]
        with_current = offered | collections.Counter({task: 5})
        tasks_of = sorted(with_current)
        shares = equal_shares(5, [with_current[past_task] for past_task in tasks_of])
        expected = [
            (past_task, share) for past_task, share in zip(tasks_of, shares, strict=True) if share and past_task != task
        ]
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
    generator, same_generator = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed)
    number, offered = itertools.count(), collections.Counter()
    for task, size in offers:
        keys = [next(number) for _ in range(size)]
        ours.offer({"x": torch.tensor(keys), "task": torch.full((size,), task)}, generator=generator)
        chances = torch.rand(size, generator=same_generator, dtype=torch.float64).tolist()
        examples = [(task, chance, key) for chance, key in zip(chances, keys, strict=True)]
        batched.offer(examples)
        for example in examples:
            single.offer([example])
        offered[task] += size
        assert ours["x"].tolist() == [key for _, _, key in batched.stored]
        assert sorted(ours["x"].tolist()) == sorted(key for _, _, key in single.stored)
        counts = collections.Counter(ours["task"].tolist())
        assert len(ours) == min(sum(offered.values()), capacity) == counts.total()
        short = [task for task in offered if counts[task] < offered[task]]  # tasks that had to give something up
        level = min((counts[task] for task in short), default=capacity)
        assert all(counts[task] - level <= 1 for task in offered)


@settings(max_examples=300)
@given(capacity=st.integers(1, 30), offers=OFFERS, restart=st.integers(0, 12), seed=st.integers(0, 2**32))
def test_shares_are_known_without_looking(capacity, offers, restart, seed):
    """From what was offered of each task; or, from some time on, from what was kept of it by then."""
    memory, generator = EqualShares(capacity), torch.Generator().manual_seed(seed)
    offered = collections.Counter()
    for number, (task, size) in enumerate(offers):
        memory.offer({"x": torch.rand(size), "task": torch.full((size,), task)}, generator=generator)
        offered[task] += size
        counts = collections.Counter(memory["task"].tolist())
        tasks = sorted(offered)
        assert equal_shares(capacity, [offered[task] for task in tasks]) == [counts[task] for task in tasks]
        order, sorted_tasks = memory.by_task()
        assert memory.take(order[: len(memory)])["task"].tolist() == sorted(memory["task"].tolist())
        assert sorted_tasks[: len(memory)].tolist() == sorted(memory["task"].tolist())
        assert sorted(order.tolist()) == list(range(capacity))
        if number == restart:
            offered = counts


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
    for counts_of_task in counts:  # inclusions are negatively correlated: chi-square after this scaling
        statistic = (
            ((counts_of_task - expected) ** 2 / expected).sum() * (length - 1) / length / (1 - capacity / 2 / length)
        )
        assert 1e-4 < stats.chi2.sf(statistic, length - 1) < 1 - 1e-4


def test_shares_go_on_where_they_were():
    memory, restored = EqualShares(10), EqualShares(10)
    generator = torch.Generator().manual_seed(0)
    memory.offer({"x": torch.arange(25), "task": torch.zeros(25, dtype=torch.long)}, generator=generator)
    memory.offer({"x": torch.arange(3), "task": torch.ones(3, dtype=torch.long)}, generator=generator)
    state = copy.deepcopy(memory.state_dict())
    restored.load_state_dict(state)
    memory.offer({"x": torch.arange(50, 90), "task": torch.full((40,), 2)}, generator=torch.Generator().manual_seed(1))
    restored.offer(
        {"x": torch.arange(50, 90), "task": torch.full((40,), 2)}, generator=torch.Generator().manual_seed(1)
    )
    assert torch.equal(memory["x"], restored["x"])
    memory.load_state_dict(state)  # and back, in place
    assert memory["task"].bincount().tolist() == [7, 3]
    empty = EqualShares(10)
    empty.load_state_dict(EqualShares(10).state_dict())
    assert len(empty) == 0


def test_shares_need_tasks():
    with pytest.raises(InputError, match='batch: got .*, expected a field "task"'):
        EqualShares(10).offer({"x": torch.arange(3)})


@pytest.mark.parametrize("task", [torch.zeros(3, 2).long(), torch.zeros(3), torch.zeros(3).bool(), torch.zeros(3) * 1j])
def test_tasks_that_are_no_numbers_of_examples_are_refused_and_leave_no_trace(task):
    memory = EqualShares(10)
    with pytest.raises(InputError, match=r"^task: got a tensor of shape .*, expected a whole number for each example"):
        memory.offer({"x": torch.arange(3), "task": task})
    memory.offer({"x": torch.arange(3), "task": torch.zeros(3, dtype=torch.long)})
    assert len(memory) == 3


# -- both --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [AGEM, GEM])
def test_images_batch_norm_and_single_examples_are_welcome(cls):
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, CLASSES))
    learner = cls(model, memory=5, replay=2, average=0.9, augment=lambda x, g: x.roll(1, -1))
    generator = torch.Generator().manual_seed(0)
    for task in range(3):
        batches = [
            (torch.randint(256, (size, 1, 8, 8), generator=generator, dtype=torch.uint8), torch.full((size,), task))
            for size in (6, 1)
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
