"""A stream: examples split into tasks that arrive one after the other."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, SupportsIndex, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from parabolic.checks import (
    Description,
    InputError,
    check_finite,
    check_gaps,
    check_number,
    first_line,
    invalid,
    plain,
    signed,
)

__all__ = ["LABEL_COLUMNS", "Batches", "Examples", "Stream", "Task"]

LABELS = 2**24  # labels must be smaller: a network has an output for each, and must fit into memory
LABEL_COLUMNS, EXAMPLE_COLUMNS = ("label", "labels", "fine_label"), ("image", "img")  # usual names, in this order
PERMUTED = 0x5EED_1ABE  # separates these draws from those of the order


class Examples(NamedTuple):
    """Raw examples `[n, *shape]` and their labels `[n]`.

    With `views`, one row of pixel indices per task, the examples exist once per view: row `v · n + i` is example i
    under view v, where each pixel shows the pixel that the view names (−1: none, a zero). So tasks that rotate or
    permute the same images share them in memory.
    """

    x: Tensor
    y: Tensor
    views: Tensor | None = None

    def take(self, rows: Tensor, label_rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the examples and labels at `rows`; the labels are taken from `label_rows` instead, if given.

        >>> turned = Examples(torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([0, 1]), torch.tensor([[2, 1, -1]]))
        >>> turned.take(torch.tensor([1]))
        (tensor([[6, 5, 0]]), tensor([1]))
        """
        label_rows = rows if label_rows is None else label_rows
        if self.views is None:
            return self.x.index_select(0, rows), self.y.index_select(0, label_rows)
        view = self.views[rows // len(self.x)][:, None]
        x = self.x.index_select(0, self.numbers(rows))
        pixels = x.reshape(len(x), -1, view.shape[-1])
        viewed = pixels.gather(2, view.clamp(min=0).expand_as(pixels)).masked_fill_(view < 0, 0)
        return viewed.reshape(x.shape), self.y.index_select(0, self.numbers(label_rows))

    def numbers(self, rows: Tensor) -> Tensor:
        """Which example each of the `rows` shows: the same one in every view."""
        return rows % len(self.x)

    def to(self, device: torch.device | str) -> Examples:
        """The same examples on another device."""
        return Examples(*[None if tensor is None else tensor.to(device) for tensor in self])  # type: ignore[arg-type]


@dataclass(frozen=True)
class Batches:
    """The batches of a task in order; they can be iterated over repeatedly.

    The order depends on the seed, the task and the epoch alone; without `shuffle` it is that of the rows, in every
    epoch. The last batch may be shorter: it is not dropped.
    """

    data: Examples
    rows: Tensor  # the rows of `data` that belong to the task
    size: int
    epochs: int
    entropy: tuple[int, ...]
    permuted: float = 0.0  # the share of each batch, from its start, within which labels are permuted
    start: int = 0  # how many batches are skipped
    joined: bool = False  # whether a last batch of a single example is merged into the one before it
    shuffle: bool = True  # anew in every epoch

    def __len__(self) -> int:
        return self.epochs * len(self._sizes) - self.start

    def after(self, count: int) -> Batches:
        """The same batches without the first `count`, which are skipped without being gathered.

        >>> batches = Stream.from_arrays(torch.arange(40), torch.arange(40) % 2, tasks=1)[0].batches(8, epochs=2)
        >>> len(batches), len(batches.after(5)), list(batches)[5][0].equal(next(iter(batches.after(5)))[0])
        (8, 3, True)
        """
        check_number("count", count, whole=True, at_least=0, at_most=len(self))
        return replace(self, start=self.start + count)

    def once(self) -> Batches:
        """The batches of the first epoch alone, with each example once."""
        return replace(self, epochs=1, start=0)

    @property
    def _sizes(self) -> list[int]:
        """The sizes of the batches of an epoch."""
        whole, left = divmod(len(self.rows), self.size)
        sizes = [self.size] * whole + [left] * (left > 0)
        if self.joined and whole and left == 1:
            sizes[-2:] = [self.size + 1]
        return sizes

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        sizes = self._sizes
        first_epoch, first_batch = divmod(self.start, len(sizes) or 1)
        for epoch in range(first_epoch, self.epochs):
            order = np.arange(len(self.rows))
            if self.shuffle:
                order = np.random.default_rng([*self.entropy, epoch]).permutation(len(self.rows))
            rows = self.rows[torch.from_numpy(order).to(self.rows.device)]
            labels = rows
            if self.permuted:
                labels = self.rows[torch.from_numpy(self._permute(order, epoch)).to(self.rows.device)]
            skip = first_batch if epoch == first_epoch else 0
            parts = (indices[skip * self.size :].split(sizes[skip:]) for indices in (rows, labels))
            for part, label_part in zip(*parts, strict=True):
                yield self.data.take(part, label_part)

    def _permute(self, order: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        """The source of each example's label: for a whole epoch at once, so that no batch waits for the host."""
        rng, labels = np.random.default_rng([*self.entropy, epoch, PERMUTED]), order.copy()
        for start in range(0, len(order), self.size):
            end = min(start + self.size, len(order))
            share = slice(start, start + int(self.permuted * (end - start)))
            labels[share] = rng.permutation(labels[share])
        return labels


@dataclass(frozen=True)
class Task:
    """One task: its classes, its training examples, and its test examples.

    The training examples arrive shuffled by the seed or, without `shuffle`, in the order of `train_rows`.
    """

    index: int
    classes: tuple[int, ...]
    train: Examples = field(repr=False)  # of the whole stream; `train_rows` selects the task's
    test: Examples = field(repr=False)
    train_rows: Tensor = field(repr=False)
    test_rows: Tensor = field(repr=False)
    seed: int = 0
    permuted: float = 0.0  # see Batches
    shuffle: bool = True  # see Batches

    def batches(self, size: int = 32, epochs: int = 1) -> Batches:
        """The task's training batches, shuffled anew in every epoch if the task has `shuffle`."""
        check_number("batch", size, whole=True, at_least=1)
        check_number("epochs", epochs, whole=True, at_least=1)
        return Batches(
            self.train, self.train_rows, int(size), int(epochs), (self.seed, self.index), self.permuted,
            shuffle=self.shuffle,
        )  # fmt: skip

    @cached_property
    def tested(self) -> tuple[int, ...]:
        """The classes of the test examples; there may be more of them than in training."""
        return tuple(self.test.y[self.test.numbers(self.test_rows)].unique().tolist())

    def test_batches(self, size: int = 512) -> Iterator[tuple[Tensor, Tensor]]:
        """The task's test examples in batches, in order."""
        check_number("size", size, whole=True, at_least=1)
        for part in self.test_rows.split(int(size)):
            yield self.test.take(part)


@dataclass(frozen=True)
class Stream(Sequence[Task]):
    """Tasks in order of arrival, and how their examples become a model's input.

    The learner applies `prepare` and `augment`: `train` passes them to a learner that has none of its own, and in a
    loop of your own you pass them yourself, as in ER(model, prepare=stream.prepare).

    >>> x, y = torch.randn(100, 4), torch.arange(100) % 4
    >>> stream = Stream.from_arrays(x, y, tasks=2)
    >>> [task.classes for task in stream]
    [(0, 1), (2, 3)]
    >>> x, y = next(iter(stream[0].batches(32)))
    >>> x.shape, sorted(set(y.tolist()))
    (torch.Size([32, 4]), [0, 1])
    """

    name: str
    tasks: tuple[Task, ...] = field(repr=False)  # they share their examples
    classes: int
    shape: tuple[int, ...]
    prepare: Callable[[Tensor], Tensor] | None = None
    augment: Callable[[Tensor, Generator], Tensor] | None = None
    class_names: tuple[str, ...] | None = None
    boundaries: bool = True  # whether learners are told where a task starts and ends

    def __post_init__(self) -> None:
        if not self.tasks:
            raise invalid("tasks", self.tasks, "at least one task")
        first = self.tasks[0]
        for task in self.tasks:
            shared = zip((*first.train, *first.test), (*task.train, *task.test), strict=True)
            if any(one is not other for one, other in shared):
                got = Description(f"task {task.index} with examples of its own")
                raise invalid("tasks", got, "tasks that share one set of examples", "use Stream.from_tasks")
        if self.class_names is not None and len(self.class_names) < self.classes:
            raise invalid("class_names", self.class_names, f"a name for each of the {self.classes} classes")

    def __len__(self) -> int:
        return len(self.tasks)

    @overload
    def __getitem__(self, index: SupportsIndex) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Task]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Task | Sequence[Task]:
        return self.tasks[index]

    def __iter__(self) -> Iterator[Task]:
        return iter(self.tasks)

    def seen(self, index: int) -> list[int]:
        """The classes seen up to and including task `index`; with blurred boundaries, also those of other tasks."""
        tasks = self.tasks[: index + 1]
        classes = {label for task in tasks for label in task.classes}
        if not self.boundaries:
            classes.update(*(task.train.y[task.train.numbers(task.train_rows)].unique().tolist() for task in tasks))
        return sorted(classes)

    def together(self, size: int = 32, epochs: int = 1) -> Batches:
        """The training batches of all tasks at once, shuffled, as for joint training."""
        first = self.tasks[0]
        rows = torch.cat([task.train_rows for task in self.tasks])
        return replace(first.batches(size, epochs), rows=rows, entropy=(first.seed, len(self.tasks)), shuffle=True)

    def digest(self) -> str:
        """A hash of the stream: every task's classes, examples and labels, and what determines their order.

        >>> x, y = torch.arange(20), torch.arange(20) % 4
        >>> stream = Stream.from_arrays(x, y, tasks=2)
        >>> stream.digest() == Stream.from_arrays(x.numpy(), y.numpy(), tasks=2).digest()
        True
        >>> stream.digest() == Stream.from_arrays(x, y, tasks=2, seed=1).digest()
        False
        """
        digest = hashlib.sha256(repr((self.classes, self.shape, self.boundaries)).encode())
        for task in self.tasks:
            ordered = () if task.shuffle else ("in order",)  # nothing if shuffled: older hashes did not include it
            digest.update(repr((task.classes, task.seed, task.permuted, *ordered)).encode())
            for data, rows in ((task.train, task.train_rows), (task.test, task.test_rows)):
                digest.update(repr((len(rows), str(data.x.dtype))).encode())
                for part in rows.split(4096):
                    for tensor in data.take(part):
                        digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def to(self, device: torch.device | str) -> Stream:
        """The same stream with all examples on another device."""
        first = self.tasks[0]
        train = first.train.to(device)
        # Test examples that are held out of the training data share its tensor: so do their copies.
        shared = first.test.x is first.train.x
        test = first.test._replace(x=train.x if shared else first.test.x).to(device)
        tasks = []
        for task in self.tasks:
            train_rows, test_rows = task.train_rows.to(device), task.test_rows.to(device)
            tasks.append(replace(task, train=train, test=test, train_rows=train_rows, test_rows=test_rows))
        return replace(self, tasks=tuple(tasks))

    @classmethod
    def from_arrays(
        cls,
        x: Any,
        y: Any,
        *,
        test: tuple[Any, Any] | None = None,
        tasks: int | Sequence[Sequence[int]] | None = None,
        domains: Any = None,
        test_domains: Any = None,
        seed: int = 0,
        shuffle: bool = True,
        name: str = "arrays",
        **settings: Any,
    ) -> Stream:
        """Split arrays or tensors into tasks: by class, or by a domain number for each example.

        Args:
            x: raw examples `[n, *shape]`, in the dtype to hold in memory: bytes may stay bytes.
            y: labels `[n]`, whole numbers from 0.
            test: test examples and labels; without them every fifth example of each class (and domain) is held out.
            tasks: the number of tasks, with equally many classes in the order of their labels (5 by default); or the
                classes of each task: if a class is in several, all of its examples are in each of them; if it is in
                none, its training and test examples are left out.
            domains: instead of `tasks`, a whole number for each example: examples with the same number form a task,
                whatever their classes, and tasks come in the order of these numbers.
            test_domains: the same for the test examples, if given.
            seed: determines the order of the examples within each task.
            shuffle: False for time-ordered data: within each task examples then arrive in the given order.
            name: the stream's name.
            settings: `prepare`, `augment`, `class_names`, `boundaries`.

        >>> x, y = torch.arange(20.0), torch.arange(20) % 2
        >>> stream = Stream.from_arrays(x, y, test=(x, y), tasks=1, shuffle=False)
        >>> next(iter(stream[0].batches(6)))[0]
        tensor([0., 1., 2., 3., 4., 5.])
        >>> years = Stream.from_arrays(x, y, domains=[2024] * 10 + [2025] * 10)
        >>> [(task.classes, len(task.train_rows), len(task.test_rows)) for task in years]
        [((0, 1), 8, 2), ((0, 1), 8, 2)]
        """
        train = _examples("x", "y", x, y)
        seed, shuffle = _check_order(seed, shuffle)
        if test is not None and not _is_pair(test):
            raise invalid("test", type(test), "a pair of examples and labels")
        test_data = train if test is None else _examples("test x", "test y", *test)
        if test_data.x.shape[1:] != train.x.shape[1:] or test_data.x.dtype != train.x.dtype:
            raise invalid("test", test_data.x, f"examples like x, {list(train.x.shape[1:])} of {train.x.dtype}")
        by_class = domains is None and test_domains is None
        if by_class:
            if isinstance(tasks, int | np.integer | None):  # listed classes leave the others out
                _check_trained(test_data.y, train.y)
            keys, groups = (train.y, test_data.y), _groups(5 if tasks is None else tasks, train.y)
        elif tasks is not None:
            raise invalid("tasks", tasks, "none if domains are given", "they already assign examples to tasks")
        else:
            train_domains = _domain_numbers("domains", domains, len(train.y))
            if test is not None:
                keys = train_domains, _domain_numbers("test_domains", test_domains, len(test_data.y), train_domains)
            elif test_domains is not None:
                raise invalid("test_domains", type(test_domains), "none without test", "give test=(x, y) as well")
            else:
                keys = train_domains, train_domains
            groups = train_domains.unique()[:, None].tolist()
        rows_by_key = [_rows_by_number(key) for key in keys]
        held_out = _hold_out(train.y, keys[0]) if test is None else None
        new_tasks = []
        for index, group in enumerate(groups):
            train_rows, test_rows = (_rows_of_numbers(rows, group) for rows in rows_by_key)
            if held_out is not None:
                train_rows, test_rows = train_rows[~held_out[train_rows]], test_rows[held_out[test_rows]]
            for kind, selected in (("training", train_rows), ("test", test_rows)):
                if not len(selected):
                    remedy = "every fifth of a class is held out: give more, or test=" if test is None else ""
                    if by_class:
                        raise invalid("tasks", group, f"classes with {kind} examples", remedy)
                    raise invalid("domains", group[0], f"a domain with {kind} examples", remedy)
            labels = group if by_class else train.y[train_rows].unique().tolist()
            new_tasks.append(Task(index, tuple(labels), train, test_data, train_rows, test_rows, seed, shuffle=shuffle))
        classes = int((train.y if by_class else torch.cat([train.y, test_data.y])).max()) + 1
        return cls(name, tuple(new_tasks), classes, tuple(train.x.shape[1:]), **settings)

    @classmethod
    def from_dataset(cls, dataset: Any, *, test: Any = None, **settings: Any) -> Stream:
        """Read a torch `Dataset` (or any sequence) of pairs `(example, label)` and split it into tasks by class.

        Instead of pairs there may be rows with named columns, as in Hugging Face's `datasets`: `label` (`labels`,
        `fine_label`) and `image` (`img`, or the only other one). Examples are tensors, arrays or Pillow images, all of
        one size. They are read once and stored as they are: leave out random transforms, which would be frozen, and
        pass `augment` instead. `test` is another data set; `settings` are those of `from_arrays`.

        >>> pairs = [(torch.full((1, 2, 2), i, dtype=torch.uint8), i % 4) for i in range(40)]
        >>> [len(task.train_rows) for task in Stream.from_dataset(pairs, tasks=2)]
        [16, 16]
        """
        trained, tested = _class_numbering(dataset), _class_numbering(test)
        if trained is not None and tested is not None and trained != tested:
            got, remedy = Description("classes that are numbered differently"), "give both data sets all classes"
            raise invalid("test", got, "labels that stand for the same classes as those of dataset", remedy)
        test_pair = None if test is None else _collect("test", test)
        return cls.from_arrays(*_collect("dataset", dataset), test=test_pair, **settings)

    @classmethod
    def from_tasks(
        cls,
        parts: Sequence[tuple[tuple[Any, Any], tuple[Any, Any]]],
        *,
        seed: int = 0,
        shuffle: bool = True,
        name: str = "tasks",
        **settings: Any,
    ) -> Stream:
        """Make a stream from given tasks, each `((x, y), (test x, test y))`; they may share classes.

        Within each task examples are shuffled by the seed, or arrive in the given order (`shuffle=False`).

        >>> part = lambda shift: (torch.randn(20, 2) + shift, torch.arange(20) % 2)
        >>> len(Stream.from_tasks([(part(0), part(0)), (part(3), part(3))]))
        2
        """
        if not (isinstance(parts, Sequence) and parts):
            raise invalid("parts", parts, "a list of at least one task")
        seed, shuffle = _check_order(seed, shuffle)
        pieces: list[list[Examples]] = [[], []]
        for index, part in enumerate(parts):
            if not (_is_pair(part) and all(_is_pair(split) for split in part)):
                raise invalid(f"task {index}", type(part), "((x, y), (test x, test y))")
            for split, (x, y) in enumerate(part):
                kind = ("", "test ")[split]
                examples = _examples(f"{kind}x of task {index}", f"{kind}y of task {index}", x, y)
                first = pieces[0][0].x if pieces[0] else examples.x
                if examples.x.shape[1:] != first.shape[1:] or examples.x.dtype != first.dtype:
                    like = f"examples like those of task 0, {list(first.shape[1:])} of {first.dtype}"
                    remedy = "convert all to one size and type first"
                    raise invalid(f"{kind}x of task {index}", examples.x, like, remedy)
                pieces[split].append(examples)
        train, test = (
            Examples(torch.cat([piece.x for piece in split]), torch.cat([piece.y for piece in split]))
            for split in pieces
        )
        counts = [[len(piece.y) for piece in split] for split in pieces]
        rows = [torch.arange(sum(sizes)).split(sizes) for sizes in counts]
        tasks = []
        for index, (train_rows, test_rows) in enumerate(zip(*rows, strict=True)):
            labels = tuple(train.y[train_rows].unique().tolist())
            tasks.append(Task(index, labels, train, test, train_rows, test_rows, seed, shuffle=shuffle))
        classes = int(torch.cat([train.y, test.y]).max()) + 1
        return cls(name, tuple(tasks), classes, tuple(train.x.shape[1:]), **settings)


def _collect(name: str, dataset: Any) -> tuple[Tensor, Tensor]:
    """Read the examples and labels of a data set of pairs into two tensors."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        remedy = "pass a loader's data set; for what can only be iterated over, call learner.observe(x, y) in a loop"
        raise invalid(name, type(dataset), "a data set with a length and items that can be indexed", remedy)
    x, y = torch.empty(0), torch.empty(len(dataset), dtype=torch.long)
    for i in range(len(dataset)):
        try:
            item = dataset[i]
            value, label = _example_and_label(f"item {i} of {name}", item) if isinstance(item, Mapping) else item
            label = operator.index(label)
        except InputError:
            raise
        except (TypeError, ValueError, IndexError, KeyError) as error:
            got = Description(f"{type(error).__name__}: {error}")
            raise invalid(f"item {i} of {name}", got, "a pair of an example and a whole number") from error
        if not 0 <= label < LABELS:
            raise invalid(f"item {i} of {name}", label, f"a label of at least 0 and below {LABELS}")
        if getattr(value, "mode", None) in ("P", "PA"):  # a Pillow image of palette indices
            value = value.convert("RGB")
        example = _tensor(f"item {i} of {name}", value)
        if hasattr(value, "getbands"):  # a Pillow image: channels go first
            example = example[None] if example.ndim == 2 else example.permute(2, 0, 1)
        if i == 0:
            x = torch.empty(len(dataset), *example.shape, dtype=example.dtype)
        if example.shape != x.shape[1:] or example.dtype != x.dtype:
            like = f"an example like the first, {list(x.shape[1:])} of {x.dtype}"
            raise invalid(f"item {i} of {name}", example, like, "convert all to one size and type first")
        x[i], y[i] = example, label
    return x, y


def _class_numbering(dataset: Any) -> Any:
    """How a data set of torchvision or of Hugging Face numbers its classes; None if it does not say."""
    features = getattr(dataset, "features", None)
    if isinstance(features, Mapping):
        label = next((features[column] for column in LABEL_COLUMNS if column in features), None)
        return getattr(label, "names", None)
    return getattr(dataset, "class_to_idx", None)


def _example_and_label(name: str, row: Mapping[str, Any]) -> tuple[Any, Any]:
    """The example and the label in a row with named columns."""
    label = next((key for key in LABEL_COLUMNS if key in row), None)
    others = [key for key in row if key != label]
    example = next((key for key in EXAMPLE_COLUMNS if key in row), others[0] if len(others) == 1 else None)
    if label is None or example is None:
        remedy = "give pairs: [(row['EXAMPLE'], row['LABEL']) for row in dataset]"
        raise invalid(name, Description(f"columns {', '.join(map(str, row))}"), "columns label and image", remedy)
    return row[example], row[label]


def _examples(x_name: str, y_name: str, x: Any, y: Any) -> Examples:
    """Check arrays or tensors of examples and labels, and wrap them without a copy where that is safe."""
    inputs, labels = _tensor(x_name, x), _tensor(y_name, y)
    if inputs.ndim < 1 or len(inputs) == 0:
        raise invalid(x_name, inputs, "at least one example")
    if labels.ndim != 1 or len(labels) != len(inputs) or labels.is_floating_point():
        regression = "for regression, call a learner's `observe` in a loop, or use ParabolicRegressor"
        remedy = regression if labels.is_floating_point() else ""
        raise invalid(y_name, labels, f"one whole number for each of the {len(inputs)} examples", remedy)
    labels = labels.long()
    low, high = (int(value) for value in labels.aminmax())
    if low < 0 or high >= LABELS:
        expected = f"labels from 0 up, below {LABELS}"
        raise invalid(y_name, low if low < 0 else high, expected, "number the classes 0, 1, 2, …")
    check_finite(x_name, inputs)
    return Examples(inputs, labels)


def _tensor(name: str, value: Any) -> Tensor:
    check_gaps(name, value)
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_complex() or value.is_quantized or value.is_meta:
            raise invalid(name, value, "a dense tensor of real numbers")
        return signed(name, value.detach().cpu())  # tasks are formed on the host; `Stream.to` moves them
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise invalid(name, type(value), "examples that are all of one shape", str(error)) from error
    except (TypeError, RuntimeError) as error:  # tensors in a list may have gradients or be on a GPU
        remedy = f"make a list of tensors one with torch.stack; {first_line(error)}"
        raise invalid(name, type(value), "an array or a tensor", remedy) from error
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        remedy = "for words, use np.unique(words, return_inverse=True)[1]" if array.dtype.kind in "OSU" else ""
        expected = "real numbers of at most 64 bits"
        raise invalid(name, Description(f"an array of type {array.dtype}"), expected, remedy)
    if any(step < 0 for step in array.strides):
        array = array.copy()  # torch has no negative strides
    return signed(name, torch.from_numpy(np.require(array, array.dtype.newbyteorder("="), ["C", "W"])))


def _check_trained(tested: Tensor, trained: Tensor) -> None:
    """Refuse test labels without training examples."""
    if unknown := tested[~torch.isin(tested, trained)].unique().tolist():
        remedy = "drop those examples, or list each task's classes in tasks, which leaves the others out"
        raise invalid("test", Description(f"labels {unknown}"), "classes that have training examples", remedy)


def _domain_numbers(name: str, value: Any, count: int, among: Tensor | None = None) -> Tensor:
    """Check the domain numbers of `count` examples; those of test examples must be `among` the training ones."""
    expected = f"one whole number for each of the {count} {'' if among is None else 'test '}examples"
    if value is None:
        raise invalid(name, value, expected)
    numbers = _tensor(name, value)
    if numbers.ndim != 1 or len(numbers) != count or numbers.is_floating_point():
        raise invalid(name, numbers, expected)
    numbers = numbers.long()
    if among is not None and not torch.isin(numbers, among).all():
        unknown = numbers[~torch.isin(numbers, among)].unique().tolist()
        raise invalid(name, unknown, f"domains of training examples, {among.unique().tolist()}")
    return numbers


def _rows_by_number(numbers: Tensor) -> dict[int, Tensor]:
    """For each of the numbers, the rows that hold it, in ascending order."""
    distinct, counts = numbers.unique(return_counts=True)
    parts = numbers.argsort(stable=True).split(counts.tolist())
    return dict(zip(distinct.tolist(), parts, strict=True))


def _rows_of_numbers(rows_by_number: Mapping[int, Tensor], numbers: Sequence[int]) -> Tensor:
    """The rows that hold one of `numbers`, in ascending order."""
    parts = [rows_by_number[number] for number in numbers if number in rows_by_number]
    return torch.cat(parts).sort().values if parts else torch.empty(0, dtype=torch.long)


def _hold_out(y: Tensor, domains: Tensor) -> Tensor:
    """A mask of every fifth example of each class in each domain."""
    mask = torch.zeros(len(y), dtype=torch.bool)
    groups = domains.unique(return_inverse=True)[1] * (int(y.max()) + 1) + y
    mask[torch.cat([rows[4::5] for rows in _rows_by_number(groups).values()])] = True
    return mask


def _check_order(seed: Any, shuffle: Any) -> tuple[int, bool]:
    """Check what determines the order of a task's examples, and return it as Python's own types."""
    check_number("seed", seed, whole=True, at_least=0)
    if not isinstance(plain(shuffle), bool):
        raise invalid("shuffle", shuffle, "True or False", "the seed determines the order")
    return int(seed), bool(shuffle)


def _is_pair(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2


def _groups(tasks: int | Sequence[Sequence[int]], y: Tensor) -> list[list[int]]:
    classes = y.unique().tolist()
    if isinstance(tasks, int | np.integer):
        check_number("tasks", tasks, whole=True, at_least=1)
        if len(classes) % tasks:
            expected = f"a divisor of the number of classes, {len(classes)}"
            raise invalid("tasks", tasks, expected, "or list each task's classes")
        size = len(classes) // tasks
        return [classes[start : start + size] for start in range(0, len(classes), size)]
    try:
        groups = [[operator.index(label) for label in labels] for labels in tasks]
    except TypeError as error:
        per_example = hasattr(tasks, "__len__") and len(tasks) == len(y)
        remedy = "domains= takes the task of each example" if per_example else ""
        raise invalid("tasks", tasks, "a number of tasks, or the classes of each", remedy) from error
    if not groups or any(not labels or not set(labels) <= set(classes) for labels in groups):
        raise invalid("tasks", tasks, f"for each task, some of the classes {classes}")
    if any(len(set(labels)) < len(labels) for labels in groups):
        raise invalid("tasks", tasks, "a class at most once in a task")
    return groups
