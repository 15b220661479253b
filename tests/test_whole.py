"""A learner of one's own is resumed as it was, or not at all: what its state leaves out is told."""

import random
import warnings
from collections import deque
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import pytest
import torch
from test_resume import ALWAYS, Stop, outcome_of
from torch import nn

from parabolic import ER, MLP, SGD, InputError, Memory, RunSpec, Store, make_stream, run, train
from parabolic.backbones import make_backbone
from parabolic.experiments import execute
from parabolic.learners import known_learners
from parabolic.learners.whole import is_built_in, left_behind

# Stays near the scores of the model as it was after the task before. `Kept` has all of that in its state.
ANCHOR = '''
import copy
import threading

import torch
from torch.nn.functional import mse_loss

from parabolic import ReplayLearner


class Anchor(ReplayLearner):
    needs_tasks = True

    def __post_init__(self):
        super().__post_init__()
        self.old, self.tasks = copy.deepcopy(self.model).requires_grad_(False).eval(), 0

    def end_task(self, batches):
        self.old.load_state_dict(self.model.state_dict())
        self.tasks += 1

    def loss(self, batch, recalled):
        scores = self.model(batch["x"])
        loss = self.error(scores, batch["y"])
        return loss + 5 * mse_loss(scores, self.old(batch["x"])) if self.tasks else loss


class Kept(Anchor):
    def state_dict(self):
        return super().state_dict() | {"old": self.old.state_dict(), "tasks": self.tasks}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.old.load_state_dict(state["old"])
        self.tasks = int(state["tasks"])


class Drawn(Kept):
    """Begins with numbers that no seed decides."""

    def __post_init__(self):
        super().__post_init__()
        self.direction = torch.randn(4)


class Fading(torch.nn.Sequential):
    """A network whose noise fades with the number of its calls, which only it counts."""

    def __init__(self, shape, classes):
        super().__init__(torch.nn.Linear(*shape, classes))
        self.calls = 0

    def forward(self, x):
        self.calls += self.training
        return super().forward(x * (1 + 9 / (1 + self.calls)))


class Slowing(torch.optim.SGD):
    """Steps that become smaller with their number, which only it counts."""

    calls = 0

    def step(self, closure=None):
        self.calls += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.calls
        return super().step(closure)


class Guarded(Kept):
    """Holds what cannot be copied."""

    def __post_init__(self):
        super().__post_init__()
        self.guard = threading.Lock()
'''


@pytest.fixture
def spec_of(tmp_path):
    """Three tasks of eight steps, by a class of a file."""
    file = tmp_path / "mine.py"
    file.write_text(ANCHOR)
    return lambda name: RunSpec(f"{file}:{name}", stream="seq-blobs", batch=50, backbone="mlp")


def stopped_and_resumed(spec, store):
    """A run that is stopped in its second task, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(KeyboardInterrupt):
            run(spec, store, device="cpu", checkpoint=ALWAYS, callbacks=[Stop(13)])
        record, _ = run(spec, store, device="cpu", checkpoint=ALWAYS)
    return record, [str(warning.message) for warning in caught]


def test_what_a_state_leaves_out_is_reported_and_the_run_is_not_resumed_without_it(tmp_path, spec_of):
    spec = spec_of("Anchor")
    record, messages = stopped_and_resumed(spec, Store(tmp_path / "runs"))
    assert outcome_of(record) == outcome_of(execute(spec, device="cpu"))
    assert record.environment["resumed"] == 1  # from the end of the first task, up to which its state was all
    assert len(messages) == 2  # once each time
    assert set(messages) == {
        "no checkpoint is saved of Anchor, which would be resumed without `old`, `tasks`: include what it needs in "
        "state_dict(), and restore it in load_state_dict()"
    }


@pytest.mark.parametrize("part", ["network", "optimiser"])
def test_what_a_network_or_an_optimiser_keeps_to_itself_is_reported_with_our_learners_too(tmp_path, spec_of, part):
    file = spec_of("Kept").learner.rpartition(":")[0]
    own = {"backbone": f"{file}:Fading"} if part == "network" else {"options": {"optimizer": f"{file}:Slowing"}}
    spec = RunSpec("er", stream="seq-blobs", batch=50, **own)
    record, messages = stopped_and_resumed(spec, Store(tmp_path / "runs"))
    assert outcome_of(record) == outcome_of(execute(spec, device="cpu"))
    name = "model.calls" if part == "network" else "optim.calls"
    assert {message.partition(":")[0] for message in messages} == {
        f"no checkpoint is saved of ER, which would be resumed without `{name}`"
    }


def test_a_state_that_is_all_is_resumed_without_a_word(tmp_path, spec_of):
    spec = spec_of("Kept")
    record, messages = stopped_and_resumed(spec, Store(tmp_path / "runs"))
    assert outcome_of(record) == outcome_of(execute(spec, device="cpu"))
    assert (record.environment["resumed"], messages) == (1, [])


@pytest.mark.parametrize("submodule", ["", "0"])
def test_attributes_that_were_set_on_a_module_are_reported_too(submodule):
    class Noting(ER):
        def end_task(self, batches):
            self.model.get_submodule(submodule).task = 1

    def make_learner():
        return Noting(nn.Sequential(nn.Linear(4, 3)))

    learner = make_learner()
    assert left_behind(learner, make_learner()) == []
    learner.end_task([])
    learner.model[0].seen = torch.ones(3)  # which may be there by any call
    assert left_behind(learner, make_learner()) == [f"model.{submodule and submodule + '.'}task"]


def test_what_no_seed_decides_is_no_part_of_a_resumed_run(tmp_path, spec_of):
    """And to look changes no draw of torch's own."""
    spec, store = spec_of("Drawn"), Store(tmp_path / "runs")
    torch.manual_seed(1)
    with pytest.warns(RuntimeWarning, match="without `direction`:"):
        run(spec, store, device="cpu", checkpoint=ALWAYS)
    draws = torch.rand(3)
    torch.manual_seed(1)
    run(spec, store, device="cpu", checkpoint=0, again=True)
    assert torch.equal(draws, torch.rand(3))


def test_what_could_not_be_resumed_stops_no_run(tmp_path, spec_of):
    with pytest.warns(RuntimeWarning, match="of Guarded, which could not be resumed: cannot pickle '_thread.lock'"):
        run(spec_of("Guarded"), Store(tmp_path / "runs"), device="cpu", checkpoint=ALWAYS)


def test_a_device_without_room_for_a_second_one_costs_the_checkpoints_and_not_the_run(tmp_path, spec_of, monkeypatch):
    spec, made = spec_of("Kept"), []

    def make_once(*arguments):
        if made:
            raise torch.OutOfMemoryError("no room")
        made.append(make_backbone(*arguments))
        return made[0]

    expected = outcome_of(execute(spec, device="cpu"))
    monkeypatch.setattr("parabolic.experiments.execution.make_backbone", make_once)
    with pytest.warns(RuntimeWarning, match="no checkpoint is saved of Kept, as the device has no room for another"):
        record, _ = run(spec, Store(tmp_path / "runs"), device="cpu", checkpoint=ALWAYS)
    assert outcome_of(record) == expected


def test_a_network_that_gets_layers_as_it_learns_is_told_what_it_lacks():
    class Longer(SGD):
        def start_task(self, batches):
            self.model.append(nn.Linear(3, 3))

    learner, fresh = (Longer(nn.Sequential(nn.Linear(4, 3))) for _ in range(2))
    learner.start_task([])
    message = (
        r"1\.bias of the model: got nothing, .*; one that gets layers as it learns must have them all from the start"
    )
    with pytest.raises(InputError, match=message):
        left_behind(learner, fresh)


class Buffer:
    """A memory as one writes it for oneself."""

    def __init__(self):
        self.examples = []


@dataclass(slots=True)
class Count:
    value: int = 0


def after_a_draw(generator):
    generator.random()
    return generator


ATTRIBUTES = {
    "an object with slots": (Count, lambda learner: Count(1)),
    "a complex number": (lambda: 0j, lambda learner: 1j),
    "a generator of NumPy": (partial(np.random.default_rng, 0), lambda learner: after_a_draw(learner.part)),
    "an old one of NumPy": (partial(np.random.RandomState, 0), lambda learner: after_a_draw(learner.part)),
    "a generator of Python": (partial(random.Random, 0), lambda learner: after_a_draw(learner.part)),
    "a number": (lambda: 0, lambda learner: 1),
    "a model": (lambda: None, lambda learner: nn.Linear(2, 2)),
    "a list": (list, lambda learner: [(torch.ones(2), 3)]),
    "a queue": (deque, lambda learner: deque([1.0])),
    "a set": (set, lambda learner: {3}),
    "numbers by name": (dict, lambda learner: {"a": np.float32(1)}),
    "an array": (lambda: np.zeros(2), lambda learner: np.array([0.0, np.nan])),
    "a generator": (torch.Generator, lambda learner: torch.Generator().manual_seed(3)),
    "an object": (Buffer, lambda learner: learner.part.examples.append(torch.ones(1)) or learner.part),
    "a memory": (lambda: Memory(5), lambda learner: learner.part.offer({"x": torch.ones(2)}) or learner.part),
}


class Own(SGD):
    """Has something of its own."""

    def __post_init__(self):
        super().__post_init__()
        self.begin, self.change = ATTRIBUTES[self.kind]
        self.part = self.begin()

    kind: str = "a number"

    @cached_property
    def size(self):
        return len(list(self.model.parameters()))


@pytest.mark.parametrize("kind", sorted(ATTRIBUTES))
def test_attributes_of_every_kind_are_looked_at(kind):
    learner = Own(nn.Linear(4, 3), kind=kind)
    learner.observe(torch.randn(8, 4), torch.arange(8) % 3)
    assert left_behind(learner, Own(nn.Linear(4, 3), kind=kind)) == []
    learner.part = learner.change(learner)
    assert left_behind(learner, Own(nn.Linear(4, 3), kind=kind)) == ["part"]


def test_what_is_no_data_is_not_looked_at():
    learner, fresh = (Own(nn.Linear(4, 3)) for _ in range(2))
    assert learner.size == 2  # which is kept from now on
    for either in (learner, fresh):
        either.ring = []
        either.ring.append(either.ring)
    learner.compute, fresh.missing = (lambda x: x), float("nan")
    learner.missing = float("nan")
    assert left_behind(learner, fresh) == []


def test_a_number_that_is_none_yet_is_restored_too():
    class Best(SGD):
        best = float("nan")

        def state_dict(self):
            return super().state_dict() | {"best": self.best}

        def load_state_dict(self, state):
            super().load_state_dict(state)
            self.best = state["best"]

    learner, fresh = (Best(nn.Linear(4, 3)) for _ in range(2))
    assert left_behind(learner, fresh) == []


def test_a_memory_of_ones_own_and_a_state_that_is_not_taken_back_are_looked_at():
    class Counting(Memory):
        offers = 0

        def place(self, batch, generator):
            self.offers += 1
            return super().place(batch, generator)

    class Silent(known_learners()["er"]):
        policy = Counting

        def load_state_dict(self, state):
            self.model.load_state_dict(state["model"])

    learner, fresh = (Silent(nn.Linear(4, 3), memory=50) for _ in range(2))
    learner.observe(torch.randn(8, 4), torch.arange(8) % 3)
    assert {"steps", "generator", "memory", "memory.offers"} <= set(left_behind(learner, fresh))


def test_a_memory_that_needs_what_only_the_own_class_keeps_is_looked_at():
    class Marked(Memory):
        needs = ("mark",)

    class Marking(known_learners()["er"]):
        policy, keeps = Marked, ("x", "y", "mark")

        def loss(self, batch, recalled):
            batch["mark"] = torch.ones(len(batch["y"]))
            return super().loss(batch, recalled)

    learner, fresh = (Marking(nn.Linear(4, 3), memory=50) for _ in range(2))
    learner.observe(torch.randn(8, 4), torch.arange(8) % 3)
    assert left_behind(learner, fresh) == []


@pytest.mark.parametrize("name", sorted(known_learners()))
def test_states_of_our_learners_are_all_that_there_is(name):
    learner_class, stream = known_learners()[name], make_stream("seq-blobs")
    assert is_built_in(learner_class(nn.Linear(4, 3)))
    derived = type("Derived", (learner_class,), {"__module__": "elsewhere"})

    def make_learner():
        model = MLP(stream.shape, stream.classes)
        return derived(model, prepare=stream.prepare, classes=stream.classes, average=0.9, optimizer="Adam", lr=0.01)

    learner = make_learner()
    train(learner, stream, batch=50)
    assert not is_built_in(learner)
    assert left_behind(learner, make_learner()) == []
