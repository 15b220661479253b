"""Memories of past examples: a fixed number of slots, filled by reservoir sampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor
from torch.nn.functional import pad

from parabolic.checks import (
    DEVICE_ERRORS,
    SIGNED,
    Description,
    check_generator,
    check_name,
    check_number,
    check_plain,
    invalid,
    type_name,
)
from parabolic.gpus import has_triton
from parabolic.states import refill

__all__ = ["Batch", "ClassBalanced", "EqualShares", "Memory", "Recent", "distinct", "equal_shares", "half_by_loss"]

Batch = dict[str, Tensor]
"""Named tensors of equal length: "x" the examples, "y" the labels, and whatever else a method stores."""

FEW = 128  # up to this many draws, a GPU makes them one after the other
# Keys in a state that no field has. In version 1 there was no ARRIVAL, and OFFERED was "offered".
ARRIVAL, OFFERED = "arrival number", "number offered"
SEEN, FULL, DRAWN = "seen of class", "full class", "number drawn"  # those of single policies


class Memory:
    """A uniform sample of everything offered so far (Vitter's algorithm R), stored as named tensors.

    Slots are allocated at the first offer, with the device and type of what is offered: uint8 images stay
    uint8. The time of `offer` and `draw` depends on neither the number of slots nor the length of the stream.

    >>> memory = Memory(100)
    >>> for start in range(0, 1000, 50):
    ...     memory.offer({"x": torch.arange(start, start + 50), "y": torch.zeros(50, dtype=torch.long)})
    >>> len(memory), memory.offered
    (100, 1000)
    >>> recalled = memory.draw(8)
    >>> len(recalled["x"].unique())
    8

    For another policy, write a subclass that decides where examples go. This one keeps the newest:

    >>> class Newest(Memory):
    ...     def place(self, batch, generator):
    ...         return (self.clock + torch.arange(len(batch["x"]), device=self.clock.device)) % self.capacity
    >>> memory = Newest(4)
    >>> memory.offer({"x": torch.arange(10)})
    >>> memory["x"].tolist()
    [8, 9, 6, 7]

    A learner uses it if its class has `policy = Newest`, or with `memory=Newest(200)`. A memory belongs to one learner:
    another one takes a copy. Anything that a policy stores besides slots belongs in its `state_dict` and
    `load_state_dict`.
    """

    needs: ClassVar[tuple[str, ...]] = ()  # the fields that a policy uses
    needs_classes: ClassVar[bool] = False  # whether it is for classes only, not for targets that are numbers
    _is_taken: bool = False  # whether it belongs to a learner

    def __init__(self, capacity: int) -> None:
        check_number("memory", capacity, whole=True, at_least=1, remedy="give the number of examples to keep")
        self.capacity = int(capacity)
        self.offered = 0  # known to the host: it determines how many slots are filled
        self._clock: Tensor | None = None  # the same number on the device, for arithmetic
        self._slots: Batch = {}  # one row more than the capacity: what is not stored is written to the last
        self._arrival = torch.zeros(0, dtype=torch.long)  # for each slot's example, how many were offered before it

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(str, self.arguments.values()))})"

    def __getstate__(self) -> dict[str, Any]:
        """Everything, for a copy or a pickle; a copy is free for another learner."""
        return {**vars(self), "_is_taken": False}

    @property
    def arguments(self) -> dict[str, Any]:
        """What it was made with, by name."""
        return {"capacity": self.capacity}

    def __len__(self) -> int:
        return min(self.offered, self.capacity)

    def __getitem__(self, name: str) -> Tensor:
        """The filled part of one field, as a view."""
        if name not in self._slots:
            if not self._slots:
                got = Description("a memory to which nothing was offered")
                raise invalid(f'memory["{name}"]', got, "one that has stored something", "check len(memory) first")
            check_name("field", name, self._slots)
        return self._slots[name][: len(self)]

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the stored fields."""
        return tuple(self._slots)

    @property
    def clock(self) -> Tensor:
        """`offered` as a number on the device, for tensor code; available from the first offer on."""
        assert self._clock is not None
        return self._clock

    @property
    def ages(self) -> Tensor:
        """How many examples were offered after each stored one.

        For an example from a state of version 1, which has no ages, it is `offered`: more than any age can be.
        """
        return self.offered - 1 - self._arrival[: len(self)]

    @torch.inference_mode(False)  # slots allocated in it could not be changed outside
    @torch.no_grad()  # slots would keep every graph so far
    def offer(self, batch: Mapping[str, Tensor], *, generator: Generator | None = None) -> None:
        """Offer examples, in order: the result is the same as if they were offered one by one."""
        check_generator(generator)
        size = self._check(batch)
        if not self._slots:
            self._allocate(batch)
        self._check_kind(batch)
        slots = self.place(batch, generator)
        self._check_slots(slots, size)
        # A slot that several examples of this batch fall into keeps the last. All of them write that last
        # one, so that the order of the writes, which a GPU does not guarantee, makes no difference.
        slots, order = slots.sort(stable=True)
        last = order.index_select(0, torch.searchsorted(slots, slots, right=True) - 1)
        for name, value in batch.items():
            self._slots[name].index_copy_(0, slots, value.index_select(0, last))
        self._arrival.index_copy_(0, slots, last.add_(self.clock))
        self.clock.add_(size)
        self.offered += size

    def place(self, batch: Mapping[str, Tensor], generator: Generator | None) -> Tensor:
        """The policy: the slot of each new example, or `capacity`, a spare row, for those that are not stored.

        The first `capacity` examples must fill the slots, as `len(memory)` of them are drawn from: on a CPU, a policy
        that leaves one empty is refused. As part of a step, it must be tensor code that does not wait for the device,
        with random numbers from `generator` alone.
        """
        size, device = len(next(iter(batch.values()))), self.clock.device
        position = self.clock + torch.arange(size, device=device)
        # float64: 53 random bits, so that a stream of billions is still sampled uniformly.
        chance = torch.rand(size, generator=generator, dtype=torch.float64, device=device)
        slot = torch.where(position < self.capacity, position, (chance * self._reach(position)).long())
        return slot.clamp_(max=self.capacity)

    def _reach(self, position: Tensor) -> Tensor | float:
        """Of how many equally likely numbers each example draws one, which is its slot if it is below the capacity."""
        return position + 1

    def draw(self, size: int, *, generator: Generator | None = None) -> Batch:
        """Draw `size` different examples (all of them, if fewer are stored), every subset equally likely.

        The subset is random, the order within it is not: shuffle it if the order matters.
        """
        check_number("size", size, whole=True, at_least=0)
        if not self._slots:
            raise invalid("draw", Description("an empty memory"), "one to which a batch was offered")
        # On the device, so that a draw stays the same code as memory fills.
        filled = self.clock.clamp(max=self.capacity)
        rows = distinct(min(size, len(self)), filled, device=filled.device, generator=generator)
        return {name: slots.index_select(0, rows) for name, slots in self._slots.items()}

    def erase(self, rows: Tensor, *, generator: Generator | None = None) -> int:
        """Remove examples for good: `rows` says of each stored one whether to. Returns how many were removed.

        Each is overwritten with a copy of another one, so that the memory stays as full as it was and nothing else
        changes. If none remains, the memory is empty, as at the start. What a model has learned from them stays.

        >>> memory = Memory(100)
        >>> memory.offer({"x": torch.randn(80, 2), "y": torch.arange(80) % 4})
        >>> memory.erase(memory["y"] == 3), len(memory), 3 in memory["y"]
        (20, 80, False)
        """
        check_generator(generator)
        rows = torch.as_tensor(rows, device=self._arrival.device)
        if rows.dtype != torch.bool or rows.shape != (len(self),):
            remedy = "as in memory['y'] == 3"
            raise invalid("rows", rows, f"{len(self)} truth values, one for each stored example", remedy)
        gone, left = (mask.nonzero()[:, 0] for mask in (rows, ~rows))
        fields = (*self._slots.values(), self._arrival)
        for slots in fields:
            slots[-1:] = 0  # the spare row holds an example that was not stored, perhaps the one to be forgotten
        if not len(gone):
            return 0
        sources = self._replacements(gone, left, generator)
        for slots in fields:
            slots.index_copy_(0, gone, slots.index_select(0, sources))
        if not len(left):
            self.offered = 0
            self.clock.zero_()
        return len(gone)

    def _replacements(self, gone: Tensor, left: Tensor, generator: Generator | None) -> Tensor:
        """For each slot to overwrite, the slot to copy: a random one that is left, or the spare row if none is."""
        if not len(left):
            return torch.full_like(gone, self.capacity)
        return left[torch.randint(len(left), gone.shape, generator=generator, device=gone.device)]

    def widen(self, name: str, columns: int) -> None:
        """Give a field more columns, which are 0 for examples already stored."""
        if name in self._slots:
            self._slots[name] = pad(self._slots[name], (0, columns - self._slots[name].shape[-1]))

    def phase(self, size: int) -> int:
        """What the host knows of the fill that determines the operations of an offer and a draw of `size`."""
        return min(size, len(self))

    def state_dict(self) -> dict[str, Any]:
        """Everything the next offer and draw depend on, by name."""
        arrival = {ARRIVAL: self._arrival[: len(self)]} if self._slots else {}
        return {OFFERED: self.offered, **arrival, **{name: self[name] for name in self._slots}}

    @torch.inference_mode(False)
    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the state of another memory, in place if the slots are already allocated."""
        key = OFFERED if OFFERED in state else "offered"
        fields = {name: value for name, value in state.items() if name != key}
        offered, filled = self._fill_of(state, *fields)
        arrival = fields.pop(ARRIVAL, None)
        if fields:
            if not self._slots:
                self._allocate(fields)
            self._check_kind(fields)  # a copy would broadcast rows of one number, and cast types with loss
            self._arrival[:filled] = -1 if arrival is None else arrival
        for name, value in fields.items():
            self._slots[name][:filled].copy_(value)
        self.offered = offered
        if self._clock is not None:
            self._clock.fill_(self.offered)

    def check_state(self, state: Mapping[str, Any], *fields: str) -> None:
        """Refuse the state of a memory that does not fit this one: of another size or policy, or of other examples.

        `fields` are those that will be stored, if nothing has been offered yet.
        """
        stored = {*fields, *self._slots}
        own, counts = self.state_dict().keys() | stored, {OFFERED, ARRIVAL, "offered"}
        _, filled = self._fill_of(state, *stored)
        missing = own - state.keys() - counts - (set() if filled else stored)
        is_fixed = self._slots or (fields and type(self).__module__ == __name__)  # others may add entries as they go
        unexpected = state.keys() - own - counts if is_fixed else set()
        if missing or unexpected:
            remedy = "load it into a memory of the policy that it was saved with, for the same kind of learner"
            raise invalid("memory", Description(f"a state of {sorted(state)}"), f"one of {sorted(own)}", remedy)
        if filled:
            self._check_kind({name: state[name] for name in self._slots})

    def _fill_of(self, state: Mapping[str, Any], *fields: str) -> tuple[int, int]:
        """How many examples were offered and how many are stored, by a state; its `fields` must have that length."""
        offered = state.get(OFFERED, state.get("offered"))
        if offered is None:
            raise invalid("memory", Description(f"no {OFFERED}"), "a complete state", "load what `state_dict` returned")
        filled = min(int(offered), self.capacity)
        lengths = [len(state[name]) for name in dict.fromkeys(fields) if name in state]
        if any(length != filled for length in lengths):
            got, expected = f"a state of {lengths} examples", f"for a capacity of {self.capacity} and {offered} offered"
            remedy = "load it into a memory of the capacity it was saved with"
            raise invalid("memory", Description(got), f"{filled}, {expected}", remedy)
        return int(offered), filled

    def _check(self, batch: Mapping[str, Tensor]) -> int:
        """Refuse a batch that the policy cannot place; returns how many examples it has."""
        if not isinstance(batch, Mapping):
            raise invalid("batch", batch, 'tensors by name, as in {"x": x, "y": y}')
        for name in self.needs:
            if name not in batch:
                raise invalid("batch", sorted(batch), f'a field "{name}", which {type(self).__name__} needs')
        for name, value in batch.items():
            if not isinstance(value, Tensor):
                raise invalid(f'batch["{name}"]', type(value), "a tensor with a row for each example")
            check_plain(f'batch["{name}"]', value)
            if value.dtype in SIGNED:
                remedy = f"convert it with .to({SIGNED[value.dtype]})"
                raise invalid(f'batch["{name}"]', value, "a type that torch can index", remedy)
            if not value.ndim:
                raise invalid(f'batch["{name}"]', value, "a row for each example, not one number for all of them")
        sizes = {name: len(value) for name, value in batch.items()}
        size = next(iter(sizes.values()), 0)
        if not size or len(set(sizes.values())) > 1:
            raise invalid(
                "batch", Description(f"fields of length {sizes}"), "at least one example, and fields of equal length"
            )
        return size

    def _check_slots(self, slots: Any, size: int) -> None:
        """Refuse what a policy returned if it cannot be slots; their values only if that waits for no device."""
        name = f"place of {type(self).__name__}"
        if not isinstance(slots, Tensor) or slots.shape != (size,) or slots.dtype != torch.long:
            raise invalid(name, slots, f"the slots of {size} examples, of type int64")
        if slots.device.type != "cpu" or type(self).place.__module__ == __name__:
            return
        lowest, highest = (int(end) for end in slots.aminmax())
        if lowest < 0 or highest > self.capacity:
            expected = f"slots from 0 to {self.capacity - 1}, and {self.capacity} for examples that are not stored"
            raise invalid(name, Description(f"slots from {lowest} to {highest}"), expected)
        filled = min(len(self) + size, self.capacity)
        if empty := set(range(len(self), filled)).difference(slots.tolist()):
            expected = f"the slots from {len(self)} to {filled - 1} among others, as the memory is not yet full"
            remedy = "while there is room, put each example into the next slot"
            raise invalid(name, Description(f"slots without {min(empty)}"), expected, remedy)

    def _check_kind(self, batch: Mapping[str, Tensor], *more: str) -> None:
        """Refuse examples that do not fit into the slots; `more` are fields that they are yet to get."""
        if self._slots.keys() != (fields := {*batch, *more}):
            raise invalid("batch", sorted(fields), f"the fields that this memory keeps, {sorted(self._slots)}")
        for name, value in batch.items():
            slots = self._slots[name]
            if value.shape[1:] != slots.shape[1:] or value.dtype != slots.dtype:
                expected = f"examples of shape {list(slots.shape[1:])} and type {type_name(slots.dtype)}"
                raise invalid(name, value, expected, "one memory holds one kind of example")

    def check_room(self, batch: Mapping[str, Tensor], *fields: str) -> None:
        """Refuse examples that there is no room for, or that do not fit those stored, before any is offered.

        `fields` are all that will be offered, some of which the batch may be yet to get.
        """
        if not self._slots:
            self._empty_slots(batch)
        else:
            self._check_kind(batch, *fields)

    def _allocate(self, batch: Mapping[str, Tensor]) -> None:
        slots = {name: room.zero_() for name, room in self._empty_slots(batch).items()}
        self._arrival = slots.pop(ARRIVAL).fill_(-1)
        self._slots = slots
        self._clock = torch.full((), self.offered, dtype=torch.long, device=self._arrival.device)

    def _empty_slots(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Unfilled slots for `capacity` examples like these and a spare one, and for when they arrive."""
        device, rows = next(iter(batch.values())).device, self.capacity + 1
        try:
            slots = {name: value.new_empty(rows, *value.shape[1:]) for name, value in batch.items()}
            return slots | {ARRIVAL: torch.empty(rows, dtype=torch.long, device=device)}
        except DEVICE_ERRORS:
            raise  # the engine knows what to do about a GPU that is full, or lost
        except RuntimeError as error:
            size = sum(value[:1].nbytes for value in batch.values())
            remedy = f"an example takes {size:,} bytes: keep fewer, or smaller ones (images as uint8)"
            raise invalid("memory", self.capacity, "as many examples as there is room for", remedy) from error


class Recent(Memory):
    """A sample that favours recent examples, for streams in which old labels become wrong (biased reservoir sampling).

    Once the memory is full, an example replaces a random one with probability `capacity / horizon`. So an example that
    was stored stays for `horizon` further ones on average, and its chance of still being there falls exponentially. By
    default the horizon equals the capacity, and every example is stored.

    >>> memory = Recent(100, horizon=500)
    >>> for start in range(0, 20000, 50):
    ...     memory.offer({"x": torch.arange(start, start + 50)}, generator=torch.Generator().manual_seed(start))
    >>> 300 < float(memory.ages.float().mean()) < 800
    True
    """

    def __init__(self, capacity: int, horizon: float | None = None) -> None:
        super().__init__(capacity)
        if horizon is not None:
            remedy = "give how many examples back it reaches on average"
            check_number("horizon", horizon, at_least=capacity, below=2**63, remedy=remedy)
        self.horizon = float(capacity if horizon is None else horizon)

    @property
    def arguments(self) -> dict[str, Any]:
        """What it was made with, by name."""
        return super().arguments | {"horizon": self.horizon}

    def _reach(self, position: Tensor) -> float:  # noqa: ARG002
        """As many at every time, so that the chance of being stored does not fall as the stream goes on."""
        return self.horizon


class ClassBalanced(Memory):
    """A sample with as many examples of every class as the stream allows (class-balancing reservoir sampling).

    While there is room, everything is stored. Then an example of a class that has never been among the largest in
    memory replaces a random example of the largest; any other may replace one of its own class, so that those stored
    are a uniform sample of that class. With fewer slots than classes, a class that lost its last example does not come
    back: of classes that arrive one after another, late ones are favoured. The time of `offer` grows with the number of
    slots, once they are full.

    >>> memory = ClassBalanced(12)
    >>> for _ in range(10):  # nine examples of class 0 for one of class 1
    ...     memory.offer({"x": torch.randn(10, 2), "y": torch.arange(10) // 9})
    >>> memory["y"].bincount().tolist()
    [6, 6]
    """

    needs, needs_classes = ("y",), True

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._classes: int | None = None
        self._seen = torch.zeros(0, dtype=torch.long)  # for each class, how many examples were offered
        self._full = torch.zeros(0, dtype=torch.bool)  # for each class, whether it has been among the largest

    def seen_by_class(self, classes: int, device: torch.device) -> Tensor:
        """How many examples of each of `classes` classes were offered.

        The number of classes is stored: from now on offers need not find it from their labels, which would wait for
        the device.
        """
        self._classes = classes
        self._reserve(classes, device)
        return self._seen

    def phase(self, size: int) -> int:  # noqa: ARG002
        """How much is stored: until the memory is full, the operations of an offer depend on it."""
        return len(self)

    def _check(self, batch: Mapping[str, Tensor]) -> int:
        size, y = super()._check(batch), batch["y"]
        if y.ndim != 1 or y.is_floating_point() or y.is_complex():
            raise invalid("y", y, "a whole number for each example, its class")
        if self._classes is None and int(y.min()) < 0:  # else it is not checked, which would wait for the device
            raise invalid("y", Description(f"a label of {int(y.min())}"), "numbers from 0 on")
        return size

    def place(self, batch: Mapping[str, Tensor], generator: Generator | None) -> Tensor:
        """The slot of each new example, or `capacity`, the spare row, for those that are not stored."""
        y, room = batch["y"].long(), self.capacity - len(self)
        size, device = len(y), y.device
        self._reserve(int(y.max()) + 1 if self._classes is None else self._classes, device)
        slots = torch.arange(len(self), len(self) + size, device=device)
        chance = torch.rand(size, generator=generator, dtype=torch.float64, device=device)
        ones, classes = torch.ones_like(y), torch.arange(len(self._seen), device=device)
        grouped, rows = y.sort(stable=True)
        rank = torch.arange(1, size + 1, device=device) - torch.searchsorted(grouped, grouped)  # of a row in its class
        seen = self._seen.index_select(0, y).index_add_(0, rows, rank).double()  # of its class, including itself
        self._seen.index_add_(0, y, ones)
        if size > room:
            labels = torch.cat([self["y"].long(), y[:room], y[-1:]])  # of the slots, and of the spare row
            stored = torch.zeros_like(self._seen).index_add_(0, labels[:-1], torch.ones_like(labels[:-1]))
        # What happens to an example depends on what happened to the one before it, so they are taken one by one.
        for i in range(room, size):
            label = y[i : i + 1]
            largest = stored == stored.amax()
            self._full |= largest
            full = self._full.index_select(0, label)
            replaceable = torch.where(full, classes == label, largest).double()
            order = replaceable.index_select(0, labels[:-1]).cumsum(0)  # 1, 2, … m at the m slots to choose from
            # A random number below m chooses one of them; one below n does so with probability m / n, and otherwise
            # exceeds all entries: then the search ends after the last slot, at the spare row.
            number = chance[i : i + 1] * torch.where(full, seen[i], order[-1:])
            slot = torch.searchsorted(order, number, right=True, out=slots[i : i + 1])
            labels[-1:] = label  # an example that is not stored replaces itself in the counts
            stored.index_add_(0, label, ones[:1])
            stored.index_add_(0, labels.index_select(0, slot), torch.full_like(label, -1))
            labels.index_copy_(0, slot, label)
        return slots

    def erase(self, rows: Tensor, *, generator: Generator | None = None) -> int:
        """Remove examples for good, as `Memory.erase`; a class of which none is left is as if it had never been seen.

        Otherwise it could not come back: its next examples could only replace its own.
        """
        erased = super().erase(rows, generator=generator)
        if erased:
            labels = self["y"].long()
            is_gone = torch.ones_like(self._full).index_fill_(0, labels.to(self._full.device), False)
            self._seen.masked_fill_(is_gone, 0)
            self._full.masked_fill_(is_gone, False)
        return erased

    def _replacements(self, gone: Tensor, left: Tensor, generator: Generator | None) -> Tensor:
        """Copies of the same class, as long as there is an example of it."""
        sources = super()._replacements(gone, left, generator)
        return _replacements_in_group(self["y"], gone, left, sources, generator)

    def _reserve(self, classes: int, device: torch.device) -> None:
        """Make room for the labels below `classes`."""
        if classes > len(self._seen) or self._seen.device != device:
            padding = (0, max(classes - len(self._seen), 0))
            self._seen, self._full = (pad(counts.to(device), padding) for counts in (self._seen, self._full))

    def state_dict(self) -> dict[str, Any]:
        """Everything the next offer and draw depend on, by name."""
        return super().state_dict() | {SEEN: self._seen, FULL: self._full}

    @torch.inference_mode(False)
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the state of another memory, in place if the slots are already allocated."""
        self.check_state(state)
        super().load_state_dict({name: value for name, value in state.items() if name not in (SEEN, FULL)})
        seen, full = state[SEEN], state[FULL]
        if len(seen):
            self._reserve(len(seen), seen.device)
        refill(self._seen, seen)
        refill(self._full, full)


class EqualShares(Memory):
    """A uniform sample of every task, with an equal share of the slots for each: needs the field "task".

    A task with fewer examples than its share leaves the rest to the others. Every example draws a random number, and
    those of each task with the smallest stay, so that a share shrinks to a smaller uniform sample as tasks arrive. The
    time of `offer` grows with the number of slots.

    >>> memory = EqualShares(12)
    >>> for task in (0, 0, 1, 2):
    ...     memory.offer({"x": torch.randn(10, 2), "task": torch.full((10,), task)})
    >>> memory["task"].bincount().tolist()
    [4, 4, 4]
    """

    needs = ("task",)

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._chance = torch.zeros(0)  # the number that each stored example drew

    def _check(self, batch: Mapping[str, Tensor]) -> int:
        size, task = super()._check(batch), batch["task"]
        if task.ndim != 1 or task.is_floating_point() or task.is_complex() or task.dtype == torch.bool:
            raise invalid("task", task, "a whole number for each example, its task", "as in torch.full((len(x),), 3)")
        return size

    def place(self, batch: Mapping[str, Tensor], generator: Generator | None) -> Tensor:
        """The slot of each new example, or `capacity`, the spare row, for those that are not stored."""
        size, device = len(batch["task"]), self.clock.device
        chance = torch.rand(size, generator=generator, dtype=torch.float64, device=device)
        # All stored examples (the first `capacity` rows) and all new ones compete.
        task = torch.cat([self._slots["task"][:-1], batch["task"]])
        row = torch.arange(len(task), device=device)
        empty = (row >= self.clock) & (row < self.capacity)
        order, grouped = _by_task(task, torch.cat([self._chance[:-1], chance]), empty)
        rank = row - torch.searchsorted(grouped, grouped)
        rank = rank.masked_fill_(empty.index_select(0, order), len(task))
        # The best of every task go first, then the second best, and so on while there is room.
        order = order.index_select(0, rank.argsort(stable=True))
        stays = torch.zeros_like(empty).index_fill_(0, order[: self.capacity], True) & ~empty
        room = stays[: self.capacity].byte().argsort(stable=True)  # free slots go first
        taken = stays[self.capacity :].cumsum(0) - 1
        slot = room.index_select(0, taken.clamp_(min=0)).masked_fill_(~stays[self.capacity :], self.capacity)
        self._chance.index_copy_(0, slot, chance)
        return slot

    def _replacements(self, gone: Tensor, left: Tensor, generator: Generator | None) -> Tensor:
        """Copies of the same task, whose number of slots stays the same."""
        task = self["task"]
        if lost := sorted({*task[gone].tolist()} - {*task[left].tolist()}):
            got = Description(f"all examples of the tasks {lost}")
            raise invalid("rows", got, "at least one left of each task, which has its share", "use a new learner")
        return _replacements_in_group(task, gone, left, gone.clone(), generator)

    def by_task(self) -> tuple[Tensor, Tensor]:
        """All slots sorted by task, and the task of each; within a task, those that stay longest first.

        Empty slots come last, with a task beyond all others. `equal_shares` says how many slots belong to each task,
        without asking the device.
        """
        task = self._slots["task"][:-1]
        empty = torch.arange(self.capacity, device=task.device) >= self.clock
        return _by_task(task.masked_fill(empty, torch.iinfo(task.dtype).max), self._chance[:-1], empty)

    def take(self, slots: Tensor) -> Batch:
        """The contents of these slots."""
        return {name: values.index_select(0, slots) for name, values in self._slots.items()}

    def state_dict(self) -> dict[str, Any]:
        """Everything the next offer and draw depend on, by name."""
        return super().state_dict() | {DRAWN: self._chance[: len(self)]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the state of another memory, in place if the slots are already allocated."""
        self.check_state(state)
        super().load_state_dict({name: value for name, value in state.items() if name != DRAWN})
        self._chance[: len(self)].copy_(state[DRAWN])

    def _allocate(self, batch: Mapping[str, Tensor]) -> None:
        self._chance = torch.zeros(self.capacity + 1, dtype=torch.float64, device=batch["task"].device)
        super()._allocate(batch)


def equal_shares(capacity: int, offered: Sequence[int]) -> list[int]:
    """How many of each task's offered examples `EqualShares` stores; the tasks are in the order of their numbers.

    >>> equal_shares(12, [10, 3, 20])
    [5, 3, 4]
    """
    room, full = capacity, 0
    for i, count in enumerate(sorted(offered)):
        full = room // (len(offered) - i)
        if count > full:  # and so for every remaining task
            break
        room -= count
    else:
        return list(offered)
    shares = [min(count, full) for count in offered]
    cut = [i for i, share in enumerate(shares) if offered[i] > share]
    for i in cut[: capacity - sum(shares)]:  # the first tasks that were cut get one more
        shares[i] += 1
    return shares


def half_by_loss(loss: Tensor, part: str) -> Tensor:
    """The rows of the half of a batch with the "highest", "lowest" or "middle" losses; at least one row.

    >>> half_by_loss(torch.tensor([0.3, 0.1, 0.4, 0.2]), "middle")
    tensor([3, 0])
    """
    order, size = loss.argsort(), (len(loss) + 1) // 2
    starts = {"lowest": 0, "middle": (len(loss) - size) // 2, "highest": len(loss) - size}
    check_name("part", part, starts)
    first = starts[part]
    return order[first : first + size]


def distinct(
    size: int, total: int | Tensor, *, device: torch.device | str = "cpu", generator: Generator | None = None
) -> Tensor:
    """`size` different numbers below `total`, every subset equally likely, in time that does not depend on `total`.

    This is Floyd's algorithm: for j from total − size to total − 1 draw a number t from 0..j, and take t, or j
    if t is already taken. Sequentially that is a loop; here all draws are made at once. A number t is already
    taken if an earlier draw was the same, or if t is an earlier j that was taken in place of its own draw; the
    second condition refers back to an earlier draw, and pointer doubling resolves it in log(size) rounds.
    (On a GPU, few draws are made by the loop after all, within one kernel.)

    >>> distinct(3, 3, generator=torch.Generator().manual_seed(0)).sort().values
    tensor([0, 1, 2])
    """
    check_number("size", size, whole=True, at_least=0)
    check_generator(generator)
    if not isinstance(total, Tensor):  # to read one would wait for the device
        check_number("total", total, whole=True, at_least=size, remedy="draw fewer numbers")
    chance = torch.rand(size, generator=generator, dtype=torch.float64, device=device)
    if isinstance(total, Tensor) and total.is_cuda and 0 < size <= FEW and has_triton():
        from parabolic.draws import floyd

        return floyd(total, chance)
    first = total - size
    ceiling = torch.arange(1, size + 1, device=device) + first  # j + 1
    drawn = (chance * ceiling).long()
    ordered, order = drawn.sort(stable=True)
    repeated = torch.zeros(size, dtype=torch.bool, device=device)
    repeated.scatter_(0, order[1:], ordered[1:] == ordered[:-1])

    # What decides each draw, counted from 1: an earlier draw; 0 if it is free; size + 1 if it is taken.
    decides = torch.arange(size + 2, device=device)
    decides[1:-1] = (drawn - (first - 1)).clamp_(min=0).masked_fill_(repeated, size + 1)
    for _ in range((size - 1).bit_length()):
        decides = decides.index_select(0, decides)
    return torch.where(decides[1:-1] == size + 1, ceiling - 1, drawn)


def _by_task(task: Tensor, chance: Tensor, empty: Tensor) -> tuple[Tensor, Tensor]:
    """Rows sorted by task and within a task by the number drawn, those that are empty last; and the task of each."""
    order = chance.masked_fill(empty, 2).argsort(stable=True)
    grouped, within = task.index_select(0, order).sort(stable=True)
    return order.index_select(0, within), grouped


def _replacements_in_group(
    groups: Tensor, gone: Tensor, left: Tensor, sources: Tensor, generator: Generator | None
) -> Tensor:
    """For each slot in `gone`, a random one in `left` of the same group; if there is none, that in `sources`."""
    for group in groups[gone].unique():
        in_group, candidates = groups[gone] == group, left[groups[left] == group]
        if len(candidates):
            count = int(in_group.sum())
            picks = torch.randint(len(candidates), (count,), generator=generator, device=gone.device)
            sources[in_group] = candidates[picks]
    return sources
