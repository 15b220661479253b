"""What is kept of the past: a fixed number of slots, filled by reservoir sampling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Generator, Tensor

from parabolic.checks import Description, check_number, invalid

__all__ = ["Batch", "Memory", "distinct", "half_by_loss"]

Batch = dict[str, Tensor]
"""Named tensors of one length: "x" the examples, "y" the labels, and whatever else a method keeps."""


class Memory:
    """A uniform sample of everything that was offered (Vitter's algorithm R), held as named tensors.

    Slots are allocated at the first offer, on the device and in the type of what is offered: uint8 images stay
    uint8. The time of `offer` and `draw` depends on neither the number of slots nor the length of the stream.

    >>> memory = Memory(100)
    >>> for start in range(0, 1000, 50):
    ...     memory.offer({"x": torch.arange(start, start + 50), "y": torch.zeros(50, dtype=torch.long)})
    >>> len(memory), memory.offered
    (100, 1000)
    >>> recalled = memory.draw(8)
    >>> len(recalled["x"].unique())
    8
    """

    def __init__(self, capacity: int) -> None:
        check_number("memory", capacity, whole=True, at_least=1, remedy="give the number of examples to keep")
        self.capacity = capacity
        self.offered = 0  # known to the host: it decides how many slots are filled
        self._clock: Tensor | None = None  # the same number on the device: it enters the arithmetic
        self._slots: Batch = {}  # one row more than the capacity: what is not kept is written to the last

    def __len__(self) -> int:
        return min(self.offered, self.capacity)

    def __getitem__(self, name: str) -> Tensor:
        """The filled part of one field, as a view."""
        return self._slots[name][: len(self)]

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the fields that are kept."""
        return tuple(self._slots)

    def offer(self, batch: Mapping[str, Tensor], *, generator: Generator | None = None) -> None:
        """Offer examples, in order: the outcome is the one of offering them one by one."""
        size = self._check(batch)
        slots = self._place(batch, generator)
        # A slot that several examples of this batch fall into keeps the last. We let all of them write that
        # last one, so that the order of the writes, which a GPU does not promise, makes no difference.
        slots, order = slots.sort(stable=True)
        last = order.index_select(0, torch.searchsorted(slots, slots, right=True) - 1)
        for name, value in batch.items():
            self._slots[name].index_copy_(0, slots, value.index_select(0, last))
        self.offered += size

    def _place(self, batch: Mapping[str, Tensor], generator: Generator | None) -> Tensor:
        """The slot of each new example; `capacity`, the spare row, for those that are not kept."""
        assert self._clock is not None
        size, device = len(next(iter(batch.values()))), self._clock.device
        position = self._clock + torch.arange(size, device=device)
        # float64: 53 random bits, so that a stream of billions is still sampled uniformly.
        chance = torch.rand(size, generator=generator, dtype=torch.float64, device=device)
        slot = torch.where(position < self.capacity, position, (chance * (position + 1)).long())
        self._clock += size
        return slot.clamp_(max=self.capacity)

    def draw(self, size: int, *, generator: Generator | None = None) -> Batch:
        """Draw `size` different examples (all of them, where fewer are kept), every subset equally likely.

        The subset is random, the order within it is not: shuffle it if the order matters.
        """
        check_number("size", size, whole=True, at_least=0)
        if not self._slots:
            raise invalid("draw", Description("a memory that is empty"), "one to which a batch was offered")
        device = next(iter(self._slots.values())).device
        rows = distinct(min(size, len(self)), len(self), device=device, generator=generator)
        return {name: slots.index_select(0, rows) for name, slots in self._slots.items()}

    def state_dict(self) -> dict[str, Any]:
        """Everything the next offer and draw depend on, by name."""
        return {"offered": self.offered, **{name: self[name] for name in self._slots}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the state of another memory, in place where the slots are allocated already."""
        fields = {name: value for name, value in state.items() if name != "offered"}
        filled = min(int(state["offered"]), self.capacity)
        if any(len(value) != filled for value in fields.values()):
            raise invalid(
                "memory",
                Description(f"a state of {[len(value) for value in fields.values()]} examples"),
                f"{filled}, for a capacity of {self.capacity} and {state['offered']} offered",
                "load it into a memory of the capacity it was saved with",
            )
        if fields:
            self._allocate(fields)
        for name, value in fields.items():
            self._slots[name][:filled].copy_(value)
        self.offered = int(state["offered"])
        if self._clock is not None:
            self._clock.fill_(self.offered)

    def _check(self, batch: Mapping[str, Tensor]) -> int:
        sizes = {name: len(value) for name, value in batch.items()}
        size = next(iter(sizes.values()), 0)
        if not size or len(set(sizes.values())) > 1:
            raise invalid(
                "batch", Description(f"fields of length {sizes}"), "at least one example, every field as long"
            )
        if not self._slots:
            self._allocate(batch)
        if self._slots.keys() != batch.keys():
            raise invalid("batch", sorted(batch), f"the fields that this memory keeps, {sorted(self._slots)}")
        for name, value in batch.items():
            slots = self._slots[name]
            if value.shape[1:] != slots.shape[1:] or value.dtype != slots.dtype:
                like = f"examples of shape {list(slots.shape[1:])} and type {str(slots.dtype).removeprefix('torch.')}"
                raise invalid(name, value, like, "one memory holds one kind of example")
        return size

    def _allocate(self, batch: Mapping[str, Tensor]) -> None:
        if self._slots:
            return
        self._slots = {name: value.new_zeros(self.capacity + 1, *value.shape[1:]) for name, value in batch.items()}
        device = next(iter(batch.values())).device
        self._clock = torch.full((), self.offered, dtype=torch.long, device=device)


def half_by_loss(loss: Tensor, part: str) -> Tensor:
    """The rows of that half of a batch that has the "highest", "lowest" or "middle" losses; at least one row.

    >>> half_by_loss(torch.tensor([0.3, 0.1, 0.4, 0.2]), "middle")
    tensor([3, 0])
    """
    order, size = loss.argsort(), (len(loss) + 1) // 2
    first = {"lowest": 0, "middle": (len(loss) - size) // 2, "highest": len(loss) - size}[part]
    return order[first : first + size]


def distinct(
    size: int, total: int, *, device: torch.device | str = "cpu", generator: Generator | None = None
) -> Tensor:
    """`size` different numbers below `total`, every subset equally likely, in time that does not depend on `total`.

    This is Floyd's algorithm: for j from total − size to total − 1 draw a number t of 0..j, and take t, or j
    if t is taken already. Sequentially that is a loop; here all draws are made at once. A draw is taken
    already if an earlier one drew the same, or if it drew an earlier j that had to be taken in its own right;
    that second condition refers back to an earlier draw, and pointer doubling resolves it in log(size) rounds.

    >>> distinct(3, 3, generator=torch.Generator().manual_seed(0)).sort().values
    tensor([0, 1, 2])
    """
    first = total - size
    ceiling = torch.arange(first + 1, total + 1, device=device)  # j + 1
    chance = torch.rand(size, generator=generator, dtype=torch.float64, device=device)
    drawn = (chance * ceiling).long()
    ordered, order = drawn.sort(stable=True)
    again = torch.zeros(size, dtype=torch.bool, device=device)
    again.scatter_(0, order[1:], ordered[1:] == ordered[:-1])

    # What decides about each draw, counted from 1: an earlier draw; 0 if it is free; size + 1 if it is taken.
    decides = torch.arange(size + 2, device=device)
    decides[1:-1] = (drawn - (first - 1)).clamp_(min=0).masked_fill_(again, size + 1)
    for _ in range((size - 1).bit_length()):
        decides = decides.index_select(0, decides)
    return torch.where(decides[1:-1] == size + 1, ceiling - 1, drawn)
