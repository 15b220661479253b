"""The reservoir: exactly Vitter's algorithm, uniform, resumable, and open to custom policies."""

import itertools
import math
import pickle
from collections import deque

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from parabolic import ER, InputError, Learner, Memory, Recent, ReplayLearner
from parabolic.learners import known_learners
from parabolic.memory import ClassBalanced, EqualShares, distinct, half_by_loss
from parabolic.states import same_state

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class OneByOne:
    """Algorithm R as published: one example at a time, one random number each."""

    def __init__(self, capacity):
        self.slots, self.capacity, self.seen = [], capacity, 0

    def offer(self, example, chance):
        if self.seen < self.capacity:
            self.slots.append(example)
        else:
            slot = math.floor(chance * (self.seen + 1))
            if slot < self.capacity:
                self.slots[slot] = example
        self.seen += 1


@settings(max_examples=1500)
@given(
    capacity=st.integers(1, 40),
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    seed=st.integers(0, 2**32),
)
def test_a_batch_is_offered_as_if_one_by_one(capacity, sizes, seed):
    ours, theirs = Memory(capacity), OneByOne(capacity)
    generator, same_generator = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed)
    number = itertools.count()
    for size in sizes:
        batch = torch.tensor([next(number) for _ in range(size)])
        ours.offer({"x": batch, "y": -batch}, generator=generator)
        for example, chance in zip(
            batch.tolist(), torch.rand(size, generator=same_generator, dtype=torch.float64).tolist(), strict=True
        ):
            theirs.offer(example, chance)
    assert ours["x"].tolist() == theirs.slots
    assert ours["y"].tolist() == [-example for example in theirs.slots]
    assert (ours.offered, len(ours)) == (theirs.seen, len(theirs.slots))


@pytest.mark.parametrize("device", DEVICES)
def test_every_example_of_the_stream_is_equally_likely_to_be_kept(device):
    length, capacity, trials = 60, 10, 4000
    generator = torch.Generator(device).manual_seed(0)
    counts = np.zeros(length)
    for _ in range(trials):
        memory = Memory(capacity)
        for part in torch.arange(length, device=device).split(7):
            memory.offer({"x": part}, generator=generator)
        counts[memory["x"].cpu().numpy()] += 1
    # Inclusions of one trial are negatively correlated: the statistic is chi-square after this scaling.
    expected = trials * capacity / length
    statistic = ((counts - expected) ** 2 / expected).sum() * (length - 1) / length / (1 - capacity / length)
    assert 1e-4 < stats.chi2.sf(statistic, length - 1) < 1 - 1e-4


@settings(max_examples=500)
@given(size=st.integers(1, 40), rest=st.integers(0, 60), seed=st.integers(0, 2**32))
def test_drawing_is_floyds_algorithm(size, rest, seed):
    total = size + rest
    chances = torch.rand(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).tolist()
    expected = []
    for last, chance in zip(range(total - size, total), chances, strict=True):
        drawn = math.floor(chance * (last + 1))
        expected.append(last if drawn in expected else drawn)
    assert distinct(size, total, generator=torch.Generator().manual_seed(seed)).tolist() == expected
    assert len(set(expected)) == size


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("size", "total"), [(1, 5), (2, 5), (3, 6), (5, 6), (4, 4)])
def test_every_subset_is_equally_likely_to_be_drawn(size, total, device):
    generator = torch.Generator(device).manual_seed(0)
    subsets = dict.fromkeys(itertools.combinations(range(total), size), 0)
    trials = 300 * len(subsets)
    for _ in range(trials):
        subsets[tuple(sorted(distinct(size, total, device=device, generator=generator).tolist()))] += 1
    if len(subsets) > 1:
        assert stats.chisquare(list(subsets.values())).pvalue > 1e-4


def test_draw_returns_rows_that_belong_together_and_all_of_a_small_memory():
    memory = Memory(50)
    x = torch.arange(30)
    memory.offer({"x": x, "y": 2 * x, "logits": torch.stack([x, -x], 1).float()})
    drawn = memory.draw(8)
    assert torch.equal(drawn["y"], 2 * drawn["x"])
    assert torch.equal(drawn["logits"][:, 1], -drawn["x"].float())
    assert sorted(memory.draw(100)["x"].tolist()) == x.tolist()


def test_examples_keep_their_type():
    memory = Memory(4)
    memory.offer({"x": torch.full((2, 3, 8, 8), 200, dtype=torch.uint8), "y": torch.tensor([1, 2])})
    assert memory["x"].dtype == torch.uint8
    assert memory["x"].shape == (2, 3, 8, 8)


def test_state_goes_on_where_it_was():
    memory, restored = Memory(10), Memory(10)
    generator = torch.Generator().manual_seed(0)
    memory.offer({"x": torch.arange(25)}, generator=generator)
    restored.load_state_dict(
        {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in memory.state_dict().items()
        }
    )
    same_generator = torch.Generator()
    same_generator.set_state(generator.get_state())
    memory.offer({"x": torch.arange(25, 60)}, generator=generator)
    restored.offer({"x": torch.arange(25, 60)}, generator=same_generator)
    assert torch.equal(memory["x"], restored["x"])
    with pytest.raises(InputError, match="capacity"):
        Memory(7).load_state_dict(memory.state_dict())


def test_a_field_may_have_any_name_and_a_state_of_before_that_is_read():
    memory, restored, from_old_state = Memory(5), Memory(5), Memory(5)
    memory.offer({"x": torch.randn(7, 2), "offered": torch.arange(7)})
    restored.load_state_dict(memory.state_dict())
    assert (restored.fields, restored.offered) == (("x", "offered"), 7)
    assert torch.equal(restored["offered"], memory["offered"])
    from_old_state.load_state_dict({"offered": 7, "x": memory["x"]})
    assert (from_old_state.fields, from_old_state.offered) == (("x",), 7)
    assert torch.equal(from_old_state["x"], memory["x"])


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ({"x": torch.zeros(3, 1)}, "x"),
        ({"x": torch.zeros(3, 4, dtype=torch.float64)}, "x"),
        ({"x": torch.zeros(3, 4), "logits": torch.zeros(3, 2)}, "batch"),
        ({}, "batch"),
    ],
)
def test_a_state_of_another_kind_of_example_is_refused_and_changes_nothing(field, name):
    memory = Memory(5)
    memory.offer({"x": torch.ones(2, 4), "y": torch.ones(2)})
    state = {"offered": 3, "y": torch.zeros(3), **field}
    with pytest.raises(InputError, match=f"^{name}: got "):
        memory.load_state_dict(state)
    with pytest.raises(InputError, match=f"^({name}|memory): got "):  # and beforehand, on request
        memory.check_state(state)
    assert memory.offered == 2
    assert torch.equal(memory["x"], torch.ones(2, 4))


@pytest.mark.parametrize(
    ("batch", "name"),
    [
        ({}, "batch"),
        ({"x": torch.zeros(0, 3)}, "batch"),
        ({"x": torch.zeros(2, 3), "y": torch.zeros(3)}, "batch"),
        ({"x": torch.zeros(2, 3)}, "batch"),
        ({"x": torch.zeros(2, 4), "y": torch.zeros(2)}, "x"),
        ({"x": torch.zeros(2, 3, dtype=torch.uint8), "y": torch.zeros(2)}, "x"),
        (torch.zeros(2, 3), "batch"),
        ({"x": {"x": torch.zeros(2, 3)}, "y": torch.zeros(2)}, r'batch\["x"\]'),
        ({"x": np.zeros((2, 3)), "y": torch.zeros(2)}, r'batch\["x"\]'),
        ({"x": torch.zeros(2, 3), "y": None}, r'batch\["y"\]'),
    ],
)
def test_bad_batches_are_refused_and_leave_the_memory_alone(batch, name):
    memory = Memory(5)
    memory.offer({"x": torch.ones(2, 3), "y": torch.ones(2)})
    with pytest.raises(InputError, match=f"^{name}: got "):
        memory.offer(batch)
    assert len(memory) == 2
    assert torch.equal(memory["x"], torch.ones(2, 3))


@pytest.mark.parametrize("capacity", [0, -3, 1.5, "10", True])
def test_a_capacity_is_a_whole_number_above_zero(capacity):
    with pytest.raises(InputError, match="^memory: got "):
        Memory(capacity)


def test_an_empty_memory_cannot_be_drawn_from():
    with pytest.raises(InputError, match="empty"):
        Memory(5).draw(1)


def test_what_is_stored_has_no_graph():
    """Else each batch would stay in memory with all of its activations, and the next step could not go back."""

    class Scores(ER):
        keeps = ("x", "y", "scores")

        def loss(self, batch, recalled):
            batch["scores"] = self.model(batch["x"])
            loss = self.error(batch["scores"], batch["y"])
            return (
                loss if recalled is None else loss + self.model(recalled["x"]).sub(recalled["scores"]).square().mean()
            )

    learner = Scores(torch.nn.Linear(2, 3), memory=8, replay=3)
    for _ in range(3):
        learner.observe(torch.randn(5, 2), torch.arange(5) % 3)
    state = learner.past.state_dict()
    learner.past.load_state_dict(state | {"scores": learner.model(state["x"])})
    assert not learner.past["scores"].requires_grad


class Newest(Memory):
    """A custom policy: a ring of the newest examples."""

    def place(self, batch, generator):
        return (self.clock + torch.arange(len(batch["x"]), device=self.clock.device)) % self.capacity


def test_a_policy_of_ones_own_decides_where_examples_go():
    """Compared with a queue of the newest examples, in a learner with this policy, and after a resume."""

    class Recent(ER):
        policy = Newest

    learner, resumed = (Recent(torch.nn.Linear(2, 3), memory=8, replay=3) for _ in range(2))
    queue, generator = deque(maxlen=8), torch.Generator().manual_seed(0)
    for size in (3, 4, 5, 2, 7, 1):
        x = torch.randn(size, 2, generator=generator)
        learner.observe(x, torch.arange(size) % 3)
        queue.extend(x.tolist())
        assert sorted(learner.past["x"].tolist()) == sorted(queue)
        assert all(row in queue for row in learner.past.draw(3)["x"].tolist())
        resumed.load_state_dict(learner.state_dict())
    x, y = torch.randn(4, 2, generator=generator), torch.arange(4) % 3
    assert learner.observe(x, y) == resumed.observe(x, y)
    assert torch.equal(learner.past["x"], resumed.past["x"])
    assert sorted(learner.past.ages.tolist()) == list(range(8))


def test_a_policy_may_come_by_more_state_as_it_goes():
    class Counting(Memory):
        placed = None

        def place(self, batch, generator):
            self.placed = (self.placed or 0) + len(batch["x"])
            return super().place(batch, generator)

        def state_dict(self):
            return super().state_dict() | ({} if self.placed is None else {"placed": self.placed})

        def load_state_dict(self, state):
            super().load_state_dict({name: value for name, value in state.items() if name != "placed"})
            self.placed = state.get("placed")

    learner, resumed = (ER(torch.nn.Linear(2, 3), memory=Counting(8), replay=3) for _ in range(2))
    learner.observe(torch.randn(5, 2), torch.arange(5) % 3)
    resumed.load_state_dict(learner.state_dict())
    assert resumed.past.placed == 5


@pytest.mark.parametrize("slots", [torch.zeros(3, dtype=torch.long), torch.zeros(2), None, [0, 1]])
def test_slots_that_are_none_are_refused_by_the_policys_name(slots):
    class Wrong(Memory):
        def place(self, batch, generator):
            return slots

    memory = Wrong(5)
    with pytest.raises(InputError, match="^place of Wrong: got .*, expected the slots of 2 examples"):
        memory.offer({"x": torch.ones(2, 3)})
    assert len(memory) == 0


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([0, -1], "got slots from -1 to 0, expected slots from 0 to 4, and 5 for examples that are not stored"),
        ([0, 6], "got slots from 0 to 6, expected slots from 0 to 4, and 5 for examples that are not stored"),
        ([0, 2], "got slots without 1, expected the slots from 0 to 1 among others, as the memory is not yet full"),
        ([0, 5], "got slots without 1, expected the slots from 0 to 1 among others, as the memory is not yet full"),
    ],
)
def test_slots_from_which_nothing_sensible_could_be_drawn_are_refused(slots, message):
    """A slot that nothing was written to counts as filled: it would be recalled as an example of zeros."""

    class Wrong(Memory):
        def place(self, batch, generator):
            return torch.tensor(slots)

    memory = Wrong(5)
    with pytest.raises(InputError, match=f"^place of Wrong: {message}"):
        memory.offer({"x": torch.ones(2, 3)})
    assert len(memory) == 0


def test_slots_may_come_in_any_order_as_long_as_none_is_left_empty():
    class Backwards(Memory):
        def place(self, batch, generator):
            return torch.arange(len(batch["x"])).flip(0) if len(self) < 5 else torch.tensor([5, 3])

    memory = Backwards(5)
    memory.offer({"x": torch.arange(5)})
    memory.offer({"x": torch.tensor([8, 9])})  # full: an example may be left out
    assert memory["x"].tolist() == [4, 3, 2, 9, 0]


def test_a_number_for_all_examples_of_a_batch_is_refused_by_the_name_of_its_field():
    with pytest.raises(InputError, match=r'^batch\["loss"\]: got .*, expected a row for each example'):
        Memory(5).offer({"x": torch.ones(2, 3), "loss": torch.tensor(0.5)})


@pytest.mark.parametrize("device", DEVICES)
def test_a_recent_memory_keeps_examples_for_an_exponential_time(device):
    """The chance that an example is still there after n others is (1 − 1/horizon)ⁿ, times that of being stored."""
    length, capacity, horizon, trials = 120, 10, 30, 4000
    generator = torch.Generator(device).manual_seed(0)
    counts = np.zeros(length)
    for _ in range(trials):
        memory = Recent(capacity, horizon=horizon)
        for part in torch.arange(length, device=device).split(7):
            memory.offer({"x": part}, generator=generator)
        counts[memory["x"].cpu().numpy()] += 1
    stored = np.where(np.arange(length) < capacity, 1, capacity / horizon)
    replacements = length - np.maximum(np.arange(length) + 1, capacity)  # while it fills, nothing is replaced
    expected = stored * (1 - 1 / horizon) ** replacements
    assert expected.sum() == pytest.approx(capacity)
    assert np.abs((counts / trials - expected) / np.sqrt(expected * (1 - expected) / trials)).max() < 4.5


def test_a_recent_memory_has_the_newest_example_unless_it_looks_further_back(tmp_path):
    for horizon in (None, 4):
        memory = Recent(4, horizon)
        for number in range(50):
            memory.offer({"x": torch.tensor([number])})
            assert number in memory["x"]
    with pytest.raises(InputError, match="^horizon: got 3, expected .*at least 4"):
        Recent(4, horizon=3)
    learner = ER(torch.nn.Linear(2, 2), memory=Recent(40, horizon=90))
    for _ in range(12):
        learner.observe(torch.randn(8, 2), torch.arange(8) % 2)
    loaded = Learner.load(learner.save(tmp_path / "er"), model=torch.nn.Linear(2, 2))
    assert repr(loaded.past) == repr(learner.past) == "Recent(40, 90.0)"
    assert torch.equal(loaded.past.ages, learner.past.ages)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("memory_class", [Memory, Recent, ClassBalanced, EqualShares])
@pytest.mark.parametrize("length", [30, 200])
def test_nothing_is_left_of_what_is_erased(memory_class, length, device):
    """Examples carry the number of their arrival, which is in no row any more: not in the spare one either."""
    memory, generator = memory_class(60), torch.Generator(device).manual_seed(0)
    for part in torch.arange(length, device=device).split(7):
        batch = {"x": torch.stack([part, -part - 1], 1).float(), "y": part % 5, "task": part * 3 // length}
        memory.offer(batch, generator=generator)
    before, tasks, size = memory["x"].clone(), memory["task"].bincount(), len(memory)
    rows = torch.rand(size, generator=generator, device=device) < 0.4
    assert memory.erase(rows, generator=generator) == int(rows.sum()) > 0
    assert (len(memory), memory.offered) == (size, length)
    all_rows = memory._slots["x"]
    assert not torch.isin(all_rows[:, 1], before[rows][:, 1]).any()  # below 0, as no empty row is
    assert torch.equal(memory["x"][~rows], before[~rows])
    number = -memory["x"][:, 1].long() - 1  # rows belong together
    assert torch.equal(memory["y"], number % 5)
    assert torch.equal(memory.ages, length - 1 - number)
    if memory_class is EqualShares:
        assert torch.equal(memory["task"].bincount(), tasks)
    restored = memory_class(60)
    restored.load_state_dict(memory.state_dict())
    assert torch.equal(restored["x"], memory["x"])
    memory.offer(
        {"x": torch.zeros(9, 2, device=device), "y": part[:1].expand(9) % 5, "task": part[:1].expand(9) * 0 + 2}
    )
    assert memory.offered == length + 9


@pytest.mark.parametrize("memory_class", [Memory, Recent, ClassBalanced])
def test_a_memory_of_which_all_is_erased_begins_anew(memory_class):
    memory = memory_class(10)
    memory.offer({"x": torch.arange(1.0, 31)[:, None], "y": torch.arange(30) % 3})
    assert memory.erase(torch.ones(10, dtype=torch.bool)) == 10
    assert (len(memory), memory.offered, memory._slots["x"].any().item()) == (0, 0, False)
    for number in range(15):
        memory.offer({"x": torch.full((1, 1), 100.0 + number), "y": torch.tensor([number % 3])})
    assert len(memory) == 10
    assert (memory["x"] >= 100).all()
    assert memory.ages.tolist() == (114 - memory["x"][:, 0]).tolist()


def test_what_cannot_be_erased_is_refused_and_nothing_changes():
    memory = EqualShares(12)
    assert memory.erase(torch.zeros(0, dtype=torch.bool)) == 0
    memory.offer({"x": torch.randn(20, 2), "task": torch.arange(20) // 10})
    before = memory["x"].clone()
    with pytest.raises(
        InputError, match=r"^rows: got all examples of the tasks \[1\], expected at least one left of each"
    ):
        memory.erase(memory["task"] == 1)
    for rows in (torch.zeros(5, dtype=torch.bool), torch.tensor([0, 1]), torch.zeros(12)):
        with pytest.raises(InputError, match="^rows: got .*, expected 12 truth values, one for each stored example"):
            memory.erase(rows)
    assert torch.equal(memory["x"], before)


@pytest.mark.parametrize("name", [name for name, cls in known_learners().items() if issubclass(cls, ReplayLearner)])
def test_a_learner_goes_on_without_what_was_erased(name):
    learner = known_learners()[name](torch.nn.Linear(3, 4), memory=40)
    for task in range(2):
        batches = [(torch.randn(8, 3), torch.arange(8) % 2 + 2 * task) for _ in range(6)]
        learner.start_task(batches)
        for x, y in batches:
            learner.observe(x, y, task)
        learner.end_task(batches)
    rows = learner.past["x"][:, 0] > 0.5
    assert learner.past.erase(rows) == int(rows.sum()) > 0
    assert not (learner.past["x"][:, 0] > 0.5).any()
    learner.start_task(batches)
    assert torch.isfinite(learner.observe(*batches[0], 2))


def test_a_class_of_which_all_is_erased_comes_back():
    """As if it had never been seen: its first examples replace some of the largest class."""
    memory, generator = ClassBalanced(20), torch.Generator().manual_seed(0)

    def offer(times):
        for _ in range(times):
            memory.offer({"x": torch.randn(8, 2, generator=generator), "y": torch.arange(8) % 2}, generator=generator)

    offer(30)
    assert memory.erase(memory["y"] == 1) == 10
    assert memory["y"].bincount().tolist() == [20]
    offer(30)
    assert memory["y"].bincount().tolist() == [10, 10]
    assert memory.ages[memory["y"] == 1].max() < 240


def test_a_class_balanced_memory_of_which_all_is_erased_is_like_a_new_one():
    memory, new = ClassBalanced(20), ClassBalanced(20)
    memory.offer({"x": torch.randn(90, 2), "y": torch.arange(90) % 3})
    memory.erase(torch.ones(20, dtype=torch.bool))
    for filled in (memory, new):
        generator = torch.Generator().manual_seed(1)
        for label in (0, 0, 0, 1, 2, 1, 2):
            x = torch.randn(10, 2, generator=generator)
            filled.offer({"x": x, "y": torch.full((10,), label)}, generator=generator)
    assert same_state(memory.state_dict(), new.state_dict())


@pytest.mark.parametrize("memory_class", [Memory, Recent, ClassBalanced, EqualShares])
def test_an_example_that_was_not_stored_is_erased_too(memory_class):
    """It may be in the spare row, and so in a pickle."""
    secret, in_pickles = torch.tensor([[123.456, 234.567]]), []
    for seed in range(20):
        memory, generator = memory_class(5), torch.Generator().manual_seed(seed)
        for part in (*torch.randn(20, 4, 2), torch.cat([torch.zeros(3, 2), secret])):
            batch = {"x": part, "y": torch.arange(4) % 2, "task": torch.zeros(4, dtype=torch.long)}
            memory.offer(batch, generator=generator)
        before = secret.numpy().tobytes() in pickle.dumps(memory)
        memory.erase((memory["x"] == secret).all(1))
        in_pickles.append((before, secret.numpy().tobytes() in pickle.dumps(memory)))
    assert any(before for before, _ in in_pickles)
    assert not any(after for _, after in in_pickles)


def test_a_field_that_is_not_there_is_named():
    memory = Memory(5)
    with pytest.raises(InputError, match=r'^memory\["x"\]: got a memory to which nothing was offered, .*check len'):
        memory["x"]
    memory.offer({"x": torch.zeros(1, 2)})
    with pytest.raises(InputError, match="^field: got 'y', expected one of x"):
        memory["y"]


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (torch.eye(3).to_sparse(), "float32, expected a plain tensor; .*to_dense"),
        (torch.eye(3).to(torch.float8_e5m2), "float8_e5m2, expected floating-point numbers of at least 16 bits"),
        (torch.ones(3, dtype=torch.uint16), r"uint16, expected a type that torch can index; .*\.to\(torch\.int32\)"),
    ],
)
def test_a_memory_refuses_tensors_that_no_slot_can_hold(x, expected):
    memory = Memory(4)
    with pytest.raises(InputError, match=rf'^batch\["x"\]: got .*{expected}'):
        memory.offer({"x": x})
    assert (len(memory), memory.fields) == (0, ())


@pytest.mark.parametrize("memory_class", [Memory, Recent, ClassBalanced, EqualShares])
def test_a_memory_filled_in_inference_mode_goes_on_outside(memory_class):
    memory, restored, expected = memory_class(4), memory_class(4), memory_class(4)
    batch = {"x": torch.arange(6), "y": torch.arange(6) % 3, "task": torch.arange(6) // 3}
    with torch.inference_mode():
        memory.offer({name: value.clone() for name, value in batch.items()}, generator=torch.Generator().manual_seed(0))
        restored.load_state_dict(memory.state_dict())
    expected.offer(batch, generator=torch.Generator().manual_seed(0))
    for each in (memory, restored, expected):
        each.offer(batch, generator=torch.Generator().manual_seed(1))
    assert same_state(memory.state_dict(), expected.state_dict())
    assert same_state(restored.state_dict(), expected.state_dict())


def test_bad_arguments_of_memories_and_draws_are_named():
    with pytest.raises(InputError, match=r"^horizon: got 1e\+30, expected .*below"):
        Recent(4, horizon=1e30)
    with pytest.raises(InputError, match="^total: got 2, expected a whole number of at least 3; draw fewer"):
        distinct(3, 2)
    with pytest.raises(InputError, match="^part: got 'best', expected one of highest, lowest, middle"):
        half_by_loss(torch.ones(3), "best")


def test_a_seed_in_place_of_a_generator_is_named():
    memory = Memory(4)
    memory.offer({"x": torch.arange(3)})
    for call in (
        lambda: memory.offer({"x": torch.arange(3)}, generator=3),
        lambda: memory.draw(2, generator=3),
        lambda: memory.erase(memory["x"] == 1, generator=3),
        lambda: distinct(2, 3, generator=3),
    ):
        with pytest.raises(InputError, match=r"^generator: got 3, expected a torch.Generator; pass .*manual_seed\(3\)"):
            call()
    assert memory["x"].tolist() == [0, 1, 2]
