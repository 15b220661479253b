"""CBRS: its memory against a sequential one, and its step written out slowly."""

import copy
import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from slow import SlowReplay, mean, net, same_weights, surprise, tasks
from torch.utils._python_dispatch import TorchDispatchMode

from parabolic import InputError, Memory
from parabolic.learners.cbrs import CBRS
from parabolic.memory import ClassBalanced
from parabolic.states import same_state


class OneByOne:
    """Class-balancing reservoir sampling as published: one example at a time, one random number each."""

    def __init__(self, capacity):
        self.slots, self.capacity = [], capacity
        self.seen, self.full = Counter(), set()

    def offer(self, example, chance):
        label = example[1]
        self.seen[label] += 1
        if len(self.slots) < self.capacity:
            self.slots.append(example)
            return
        stored = Counter(stored_label for _, stored_label in self.slots)
        largest = {stored_label for stored_label, count in stored.items() if count == max(stored.values())}
        self.full |= largest
        if label in self.full:
            own = [slot for slot, (_, stored_label) in enumerate(self.slots) if stored_label == label]
            number = math.floor(chance * self.seen[label])
            if number < len(own):
                self.slots[own[number]] = example
        else:
            theirs = [slot for slot, (_, stored_label) in enumerate(self.slots) if stored_label in largest]
            self.slots[theirs[math.floor(chance * len(theirs))]] = example


@settings(max_examples=700)
@given(
    capacity=st.integers(1, 20),
    batches=st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=16), min_size=1, max_size=8),
    announced=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_a_batch_is_offered_as_if_one_by_one(capacity, batches, announced, seed):
    ours, theirs = ClassBalanced(capacity), OneByOne(capacity)
    if announced:
        ours.seen_by_class(7, torch.device("cpu"))
    generator, same_generator = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed)
    number = itertools.count()
    for labels in batches:
        x = torch.tensor([next(number) for _ in labels])
        ours.offer({"x": x, "y": torch.tensor(labels)}, generator=generator)
        chances = torch.rand(len(labels), generator=same_generator, dtype=torch.float64).tolist()
        for example, chance in zip(zip(x.tolist(), labels, strict=True), chances, strict=True):
            theirs.offer(example, chance)
        assert list(zip(ours["x"].tolist(), ours["y"].tolist(), strict=True)) == theirs.slots
    seen = ours.seen_by_class(7, torch.device("cpu"))
    assert seen.tolist() == [theirs.seen[label] for label in range(7)]


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that is made."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [
            tensor
            for tensor in (result if isinstance(result, tuple) else (result,))
            if isinstance(tensor, torch.Tensor)
        ]
        self.most = max(self.most, *(tensor.numel() for tensor in tensors), 0)
        return result


def test_no_tensor_has_a_row_for_each_example_and_a_column_for_each_class():
    memory = ClassBalanced(300)
    with Largest() as largest:
        for _ in range(2):
            memory.offer({"y": torch.arange(200) * 5})
    assert 996 <= largest.most < 2000


def test_it_is_as_balanced_as_the_stream_allows():
    """Sizes 400, 200, 40, 8, 3 in random order for 60 slots: small classes are kept whole, large ones share alike."""
    sizes = (400, 200, 40, 8, 3)
    labels = torch.repeat_interleave(torch.arange(5), torch.tensor(sizes))
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        memory = ClassBalanced(60)
        for batch in labels[torch.randperm(len(labels), generator=generator)].split(17):
            memory.offer({"y": batch}, generator=generator)
        counts = memory["y"].bincount(minlength=5).tolist()
        assert counts[3:] == [8, 3]
        assert sum(counts) == 60
        assert max(counts[:3]) - min(counts[:3]) <= 2


def test_with_fewer_slots_than_classes_a_class_that_is_gone_stays_away():
    memory, gone = ClassBalanced(3), set()
    for label in [*range(10), *range(10)] * 3:
        memory.offer({"y": torch.full((4,), label)}, generator=torch.Generator().manual_seed(label))
        assert not gone & {*memory["y"].tolist()}
        gone |= {*range(label + 1)} - {*memory["y"].tolist()}
        assert len(memory) == 3
    assert 9 in memory["y"]  # the last to come: each in turn took the place of a random one


def test_of_a_class_every_example_is_equally_likely_to_be_kept():
    """Those of a class that was full when the memory was, which are kept or not by a reservoir of their own."""
    length, capacity, trials = 40, 10, 800
    generator = torch.Generator().manual_seed(0)
    batches = [{"x": part, "y": torch.zeros_like(part)} for part in torch.arange(length).split(7)]
    counts = np.zeros(length)
    for _ in range(trials):
        memory = ClassBalanced(capacity)
        for batch in batches:
            memory.offer(batch, generator=generator)
        counts[memory["x"].numpy()] += 1
    expected = trials * capacity / length
    # Inclusions of one trial are negatively correlated: the statistic is chi-square after this scaling.
    statistic = ((counts - expected) ** 2 / expected).sum() * (length - 1) / length / (1 - capacity / length)
    assert 1e-4 < stats.chi2.sf(statistic, length - 1) < 1 - 1e-4


@pytest.mark.parametrize("first", [0, 1, 5])
def test_its_state_goes_on_where_it_was(first):
    generator = torch.Generator().manual_seed(0)
    batches = [{"y": torch.randint(5, (8,), generator=generator) // 2} for _ in range(10)]
    memory, restored = ClassBalanced(11), ClassBalanced(11)
    for batch in batches[:first]:
        memory.offer(batch, generator=generator)
    restored.offer({"y": torch.full((30,), 9)})  # what is there already is forgotten
    restored.load_state_dict({name: value if isinstance(value, int) else value.clone() for name, value in
                           memory.state_dict().items()})  # fmt: skip
    same_generator = torch.Generator()
    same_generator.set_state(generator.get_state())
    for batch in batches[first:]:
        memory.offer(batch, generator=generator)
        restored.offer(batch, generator=same_generator)
    assert torch.equal(memory["y"], restored["y"])
    seen, restored_seen = (either.seen_by_class(10, torch.device("cpu")) for either in (memory, restored))
    assert torch.equal(seen, restored_seen)


def test_a_batch_without_labels_is_refused_and_leaves_the_memory_alone():
    memory = ClassBalanced(5)
    with pytest.raises(InputError, match='^batch: got .*, expected a field "y"'):
        memory.offer({"x": torch.zeros(3, 2)})
    memory.offer({"x": torch.zeros(3, 2), "y": torch.zeros(3, dtype=torch.long)})
    assert len(memory) == 3


@pytest.mark.parametrize(
    ("y", "expected"),
    [
        (torch.tensor([0, -1, 1]), "a label of -1, expected numbers from 0 on"),
        (torch.tensor([0.0, 1.5, 1.0]), "a tensor .*, expected a whole number for each example"),
        (torch.tensor([0, 1j, 1]), "a tensor .*, expected a whole number for each example"),
    ],
)
def test_labels_that_are_no_classes_are_refused_and_leave_no_trace(y, expected):
    memory = ClassBalanced(5)
    before = copy.deepcopy(memory.state_dict())
    with pytest.raises(InputError, match=f"^y: got {expected}"):
        memory.offer({"x": torch.zeros(3, 2), "y": y})
    assert (memory.fields, same_state(memory.state_dict(), before)) == ((), True)


class SlowCBRS(SlowReplay):
    """1/n of the batch's loss and 1 − 1/n of the recalled one's, from the sequential memory."""

    def __init__(self, model, **common):
        super().__init__(model, **common)
        self.past = OneByOne(self.capacity)

    def step(self, x, y):
        self.remembered = self.past.slots
        recalled = self.recall()
        classes = len({*self.past.seen, *y.tolist()})
        loss = mean(surprise(self.scores(example), label) for example, label in zip(x, y, strict=True)) / classes
        if recalled:
            loss = loss + (1 - 1 / classes) * mean(surprise(self.scores(example), label) for example, label in recalled)
        value = self.descend(loss)
        chances = torch.rand(len(x), generator=self.generator, dtype=torch.float64).tolist()
        for example, chance in zip(zip(x, y.tolist(), strict=True), chances, strict=True):
            self.past.offer(example, chance)
        return value


def test_the_step_of_cbrs():
    common = {"lr": 0.3, "memory": 12, "replay": 6, "seed": 7}
    ours, theirs = net(), net()
    fast, slow = CBRS(ours, **common), SlowCBRS(theirs, **common)
    for task in tasks(batches=6):
        for x, y in task:
            y = y.clamp(max=2)  # three classes: a third is no round number
            assert fast.observe(x, y).item() == pytest.approx(slow.step(x, y), abs=1e-10)
    assert same_weights(ours, theirs)
    assert fast.past["y"].tolist() == [label for _, label in slow.past.slots]


@pytest.mark.parametrize(("name", "value"), [("memory", 0), ("memory", Memory(50)), ("replay", 300), ("lr", -1)])
def test_bad_options_are_named(name, value):
    with pytest.raises(InputError, match=f"^{name}: got .*, expected "):
        CBRS(net(), **{name: value})
