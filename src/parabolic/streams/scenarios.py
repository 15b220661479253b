"""Scenarios: variations of a stream, such as other tasks, wrong labels, rare classes, blurred boundaries, new domains.

Each is a function from a stream to a stream that does not copy the images; `Scenario` selects which apply. All draws
derive from the run's seed, each kind with its own generator, so that adding one does not change the others.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor

from parabolic.checks import Description, check_name, check_number, invalid, plain
from parabolic.options import check_options, option, options_of
from parabolic.streams.augment import CropFlip
from parabolic.streams.stream import Examples, Stream, Task

__all__ = [
    "PAPER_SIZES",
    "Scenario",
    "blur",
    "corrupt",
    "domains",
    "permute_labels",
    "resize",
    "sizes_by_factor",
    "split",
    "validate",
]

PAPER_SIZES = {
    "paper-normal": (5000, 4629, 4286, 3968, 3674, 3401, 3149, 2916, 2700, 2500),
    "paper-reversed": (2500, 2700, 2916, 3149, 3401, 3674, 3968, 4286, 4629, 5000),
    "paper-random": (2700, 2500, 5000, 4286, 3674, 3968, 3149, 3401, 2916, 4629),
}
"""The class sizes of the paper's imbalanced Seq-CIFAR-10."""

ORDERS = ("fixed", "shuffled")


def _check_tasks(text: str) -> None:
    sizes = _parse_numbers(text)
    if len(sizes) < 2 or min(sizes) < 1:
        expected = "a whole number, or at least two of at least 1, separated by commas"
        raise invalid("tasks", text, expected, "how many tasks, or how many classes each has")


def _check_order(text: str) -> None:
    classes = _parse_numbers(text)
    if not classes:
        check_name("class_order", text, ORDERS, "a list of classes is separated by commas")
    if len(set(classes)) < len(classes):
        raise invalid("class_order", Description(text), "each class once")


def _parse_sizes(text: str) -> tuple[int, ...]:
    if text in PAPER_SIZES:
        return PAPER_SIZES[text]
    if not (sizes := _parse_numbers(text)):
        raise invalid("class_sizes", text, f"comma-separated numbers, or one of {', '.join(PAPER_SIZES)}")
    return sizes


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """How a stream is varied; part of a run's spec.

    >>> from parabolic import make_stream
    >>> stream = make_stream("seq-digits", tasks=2, corruption="uniform", corruption_rate=0.2)
    >>> [task.classes for task in stream]
    [(0, 1, 2, 3, 4), (5, 6, 7, 8, 9)]
    >>> stream = make_stream("seq-digits", tasks="4,3,3", class_order="9,8,7,6,5,4,3,2,1,0")  # or lists of numbers
    >>> [task.classes for task in stream]
    [(9, 8, 7, 6), (5, 4, 3), (2, 1, 0)]
    """

    tasks: int | str | None = option(
        None, "how many tasks, or how many classes each has, as in 50,10,10 (none: the stream's own tasks)",
        at_least=1, reads=_check_tasks,
    )  # fmt: skip
    class_order: str = option(
        "fixed", "order in which classes arrive: fixed, shuffled by the seed, or all of them, as in 2,0,1",
        reads=_check_order,
    )  # fmt: skip
    corruption: str = option(
        "none", "wrong training labels: uniform (a random other class) or shuffle (permuted within part of each batch)",
        among=("none", "uniform", "shuffle"),
    )  # fmt: skip
    corruption_rate: float = option(
        0.5, "share of each task's labels (uniform) or of each batch (shuffle)", at_least=0, at_most=1
    )
    corruption_among: str = option("task", "which classes wrong labels are drawn from", among=("task", "all"))
    imbalance: float | None = option(None, "how many times larger the largest class is than the smallest", at_least=1)
    imbalance_order: str = option(
        "normal", "order of the class sizes (normal: the largest first)", among=("normal", "reversed", "random")
    )
    class_sizes: str | None = option(
        None, f"training examples per class, in order of arrival: comma-separated, or {', '.join(PAPER_SIZES)}",
        reads=_parse_sizes,
    )  # fmt: skip
    validation: float = option(
        0.0, "share of each class's training examples to test on, in place of the test set", at_least=0, below=1
    )
    blur: float = option(
        0.0, "share of each task's examples that are pooled and redistributed among all tasks", at_least=0, at_most=1
    )
    domain: str = option(
        "none", "every task has all classes, with a transform of its own", among=("none", "rotation", "permutation")
    )

    def __post_init__(self) -> None:
        for name in ("tasks", "class_order", "class_sizes"):  # one text for one list: it is part of a run's key
            object.__setattr__(self, name, _as_text(getattr(self, name)))
        check_options(self)
        if self.class_sizes is not None and self.imbalance is not None:
            raise invalid("class_sizes", self.class_sizes, "none if imbalance is given", "give one of the two")
        if self.domain != "none" and isinstance(self.tasks, str):
            raise invalid("tasks", self.tasks, "a number if domain is set", "every task then has all classes")
        if self.domain != "none" and self.blur:
            raise invalid("blur", self.blur, "0 if domain is set", "each transform belongs to one task")
        # A setting without effect would be stored as a different run with the same results.
        for name, has_effect, condition, remedy in (
            ("class_order", self.domain == "none", "if domain is set", "every task then has all classes"),
            ("corruption_rate", self.corruption != "none", "without corruption", "for example, set corruption=uniform"),
            ("corruption_among", self.corruption == "uniform", "unless corruption=uniform", "set corruption=uniform"),
            ("imbalance_order", self.imbalance is not None, "without imbalance", "for example, set imbalance=2"),
        ):
            value, default = getattr(self, name), options_of(type(self))[name].default
            if not has_effect and value != default:
                raise invalid(name, value, f"{default} {condition}", remedy)

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Scenario:
        """The scenario with these settings; the error for an unknown name suggests the nearest known one."""
        known = options_of(cls)
        for name in settings:
            check_name("scenario", name, known)
        return cls(**settings)

    def apply(self, stream: Stream, seed: int) -> Stream:
        """Apply the scenario to a stream."""
        if not isinstance(stream, Stream):
            raise invalid("stream", stream, "a parabolic.Stream", "make_stream(name) makes one that is known by name")
        check_number("seed", seed, whole=True, at_least=0)
        if self.domain != "none":
            if _tasks_share_classes(stream):
                expected = "none for a stream whose tasks share classes, as they cannot be merged"
                raise invalid("domain", self.domain, expected, "make the stream with one task")
            count = self.tasks if isinstance(self.tasks, int) else len(stream)
            stream = split(stream, 1)
        else:
            tasks = _parse_numbers(self.tasks) if isinstance(self.tasks, str) else self.tasks
            order = None if self.class_order in ORDERS else _parse_numbers(self.class_order)
            stream = split(stream, tasks, shuffle=self.class_order == "shuffled", seed=seed, order=order)
        stream = validate(stream, self.validation)
        if self.class_sizes is not None:
            stream = resize(stream, _parse_sizes(self.class_sizes), seed)
        elif self.imbalance is not None:
            stream = resize(stream, sizes_by_factor(stream, self.imbalance, self.imbalance_order, seed), seed)
        if self.corruption == "uniform":
            stream = corrupt(stream, self.corruption_rate, self.corruption_among, seed)
        elif self.corruption == "shuffle":
            stream = permute_labels(stream, self.corruption_rate)
        stream = blur(stream, self.blur, seed)
        return stream if self.domain == "none" else domains(stream, self.domain, count, seed)


def split(
    stream: Stream,
    tasks: int | Sequence[int] | None = None,
    shuffle: bool = False,
    seed: int = 0,
    order: Sequence[int] | None = None,
) -> Stream:
    """Split the classes of a stream into other tasks (as many, or with so many classes each), or in another order."""
    if tasks in (None, len(stream)) and not shuffle and order is None:
        return stream
    if _tasks_share_classes(stream):
        reordered = shuffle or order is not None
        name, default = ("class_order", "fixed") if reordered else ("tasks", "none")
        value = (order or "shuffled") if reordered else tasks
        raise invalid(name, value, f"{default} for a stream whose tasks share classes", f"leave {name} out")
    classes = [label for task in stream for label in task.classes]
    if order is not None:
        _check_each_once(order, classes)
        classes = list(order)
    elif shuffle:
        classes = [classes[i] for i in _rng(seed, "class order").permutation(len(classes))]
    sizes = [len(task.classes) for task in stream] if tasks is None else _task_sizes(tasks, len(classes))
    first, ends = stream[0], np.cumsum(sizes)
    train, test = (torch.cat([getattr(task, rows) for task in stream]) for rows in ("train_rows", "test_rows"))
    new_tasks = []
    for index, (end, size) in enumerate(zip(ends, sizes, strict=True)):
        members = classes[end - size : end]
        rows = [_rows_of_classes(data, rows, members) for data, rows in ((first.train, train), (first.test, test))]
        new_tasks.append(replace(first, index=index, classes=tuple(members), train_rows=rows[0], test_rows=rows[1]))
    return replace(stream, tasks=tuple(new_tasks))


def _check_each_once(order: Sequence[int], classes: Sequence[int]) -> None:
    """Refuse an order that leaves classes out, repeats them or has others."""
    if sorted(order) != sorted(classes):
        problems = {"missing": set(classes).difference(order), "unknown": set(order).difference(classes)}
        remedy = "; ".join(
            f"{problem}: {_abbreviate(sorted(labels))}" for problem, labels in problems.items() if labels
        )
        got = Description(_abbreviate(order))
        raise invalid("class_order", got, f"each of the {len(classes)} classes once", remedy)


def _task_sizes(tasks: int | Sequence[int], classes: int) -> list[int]:
    """How many classes each task has, given the number of tasks or these sizes themselves."""
    if isinstance(tasks, int):
        if classes % tasks:
            remedy = "or give the number of classes of each task, separated by commas"
            raise invalid("tasks", tasks, f"a divisor of the number of classes, {classes}", remedy)
        return [classes // tasks] * tasks
    if sum(tasks) != classes:
        got = Description(f"{_abbreviate(tasks)}, which add up to {sum(tasks)}")
        raise invalid("tasks", got, f"sizes that add up to the number of classes, {classes}")
    return list(tasks)


def validate(stream: Stream, share: float) -> Stream:
    """Hold out a share of each class's training examples and test on them; they are the same for every seed.

    An example that is in several tasks is held out in all of them or in none. A class that returns in several tasks
    may have too few examples in one of them to hold any out there.
    """
    if not share:
        return stream
    held_out = torch.zeros(len(stream[0].train.y), dtype=torch.bool)
    groups = defaultdict[str, list[Tensor]](list)  # the examples of each class and of each task
    for number, (task, new_examples) in enumerate(_new_examples(stream), 1):
        for label, members in _by_class(task, new_examples):
            order = torch.from_numpy(_rng(label, "validation").permutation(len(members)))
            held_out[members[order[: round(share * len(members))]]] = True
            groups[f"class {label}"].append(members)
        groups[f"task {number}"].append(task.train.numbers(task.train_rows))
    for group, parts in groups.items():
        tested = held_out[torch.cat(parts)]
        if tested.all() or not tested.any():
            got = Description(f"{share:g}, which is {int(tested.sum())} of the {len(tested)} examples of {group}")
            remedy = "choose a smaller one" if tested.any() else "choose a larger one"
            raise invalid("validation", got, "a share that leaves examples to train and to test on", remedy)
    new_tasks = []
    for task in stream:
        tested = held_out[task.train.numbers(task.train_rows)]
        train_rows, test_rows = task.train_rows[~tested], task.train_rows[tested].sort().values
        new_tasks.append(replace(task, test=task.train, train_rows=train_rows, test_rows=test_rows))
    return replace(stream, tasks=tuple(new_tasks))


def sizes_by_factor(stream: Stream, factor: float, order: str = "normal", seed: int = 0) -> list[int]:
    """Class sizes that fall geometrically, down to 1/factor of the last class; or rise; or in random order.

    >>> from parabolic import make_stream
    >>> sizes_by_factor(make_stream("seq-blobs"), 2)
    [200, 174, 151, 131, 114, 100]
    """
    check_number("imbalance", factor, at_least=1)
    check_name("imbalance_order", order, ("normal", "reversed", "random"))
    counts = list(_new_counts(stream).values())
    positions = np.arange(len(counts))
    if order == "reversed":
        positions = positions[::-1]
    elif order == "random":
        positions = _rng(seed, "imbalance").permutation(positions)
    powers = [int(i) / max(len(counts) - 1, 1) for i in positions]
    sizes = [int(sum(by_task) / factor**power) for by_task, power in zip(counts, powers, strict=True)]
    if not all(_reaches_all_tasks(size, by_task) for size, by_task in zip(sizes, counts, strict=True)):
        most = min(
            min(filter(None, by_task)) ** (1 / power) for by_task, power in zip(counts, powers, strict=True) if power
        )
        where = " in each of its tasks" if max(map(_count_tasks, counts)) > 1 else ""
        raise invalid("imbalance", factor, f"at most {int(most)}, to keep an example of every class{where}")
    return sizes


def resize(stream: Stream, sizes: Sequence[int], seed: int = 0) -> Stream:
    """Keep the given number of training examples of each class, in order of arrival.

    A class that is in several tasks keeps the same share of its examples in each of them, up to rounding. An example
    that is in several tasks counts once, and is kept in all of them or in none.
    """
    counts = _new_counts(stream)
    if len(sizes) != len(counts):
        raise invalid("class_sizes", Description(f"{len(sizes)} sizes"), f"one for each of the {len(counts)} classes")
    for (label, by_task), size in zip(counts.items(), sizes, strict=True):
        if not 1 <= size <= sum(by_task):
            raise invalid("class_sizes", size, f"1 to {sum(by_task)}, the number of examples of class {label}")
        if not _reaches_all_tasks(size, by_task):
            expected = f"enough for an example in each of the {_count_tasks(by_task)} tasks of class {label}"
            raise invalid("class_sizes", size, expected, "keep more of the class")
    shares = {label: _in_proportion(size, counts[label]) for label, size in zip(counts, sizes, strict=True)}
    rng, new_tasks, kept = _rng(seed, "sizes"), [], torch.zeros(len(stream[0].train.y), dtype=torch.bool)
    for index, (task, new_examples) in enumerate(_new_examples(stream)):
        for label, members in _by_class(task, new_examples):
            kept[members[torch.from_numpy(rng.permutation(len(members))[: shares[label][index]])]] = True
        rows = task.train_rows[kept[task.train.numbers(task.train_rows)]]
        new_tasks.append(replace(task, train_rows=rows.sort().values if task.shuffle else rows))
    return replace(stream, tasks=tuple(new_tasks))


def corrupt(stream: Stream, rate: float, among: str = "task", seed: int = 0) -> Stream:
    """Give a share of each task's training examples a wrong label: another class of the task, or of all classes.

    The share is of the examples that are new: one that was in an earlier task keeps the label that it had there.
    """
    check_number("corruption_rate", rate, at_least=0, at_most=1)
    check_name("corruption_among", among, ("task", "all"))
    rng, labels, all_classes = _rng(seed, "corruption"), stream[0].train.y.clone(), stream.seen(len(stream) - 1)
    for task, new_examples in _new_examples(stream):
        candidates = np.array(sorted(task.classes) if among == "task" else all_classes)
        if len(candidates) < 2:
            raise invalid(
                "corruption", Description(f"a task of one class, {task.classes}"), "another class to confuse it with"
            )
        order = torch.from_numpy(rng.permutation(len(new_examples)))
        chosen = new_examples[order[: round(rate * len(new_examples))]]
        # A step of 1 to k − 1 around the circle of the k classes reaches each of the others with equal probability.
        steps = rng.integers(1, len(candidates), len(chosen))
        positions = np.searchsorted(candidates, labels[chosen].numpy())
        labels[chosen] = torch.from_numpy(candidates[(positions + steps) % len(candidates)])
    return _with_labels(stream, labels)


def permute_labels(stream: Stream, share: float) -> Stream:
    """Permute the labels within the first part of each batch, with a new permutation in every epoch.

    With half of each batch this is what the code published with the paper does. A label may end up at its own example
    or at one of the same class: with batches of 32, 23 % of all labels are wrong if a task has two classes, and 42 % if
    it has ten.
    """
    check_number("corruption_rate", share, at_least=0, at_most=1)
    return replace(stream, tasks=tuple(replace(task, permuted=float(share)) for task in stream))


def blur(stream: Stream, share: float, seed: int = 0) -> Stream:
    """Pool a share of each task's training examples and redistribute them at random, as many to each task as before.

    Every example still arrives once and no task changes its length, but learners are not told where a task starts.
    """
    if not share:
        return stream
    if not all(task.shuffle for task in stream):
        remedy = "boundaries=False makes a stream whose learners are not told where tasks start"
        raise invalid("blur", share, "0 if examples arrive in a fixed order (shuffle=False)", remedy)
    rng, kept, pooled = _rng(seed, "blur"), [], []
    for task in stream:
        mixed = task.train_rows[torch.from_numpy(rng.permutation(len(task.train_rows)))]
        count = round(share * len(mixed))
        pooled.append(mixed[:count])
        kept.append(mixed[count:])
    pool = torch.cat(pooled)
    dealt = pool[torch.from_numpy(rng.permutation(len(pool)))].split([len(rows) for rows in pooled])
    new_tasks = (
        replace(task, train_rows=torch.cat([own, others]).sort().values)
        for task, own, others in zip(stream, kept, dealt, strict=True)
    )
    return replace(stream, tasks=tuple(new_tasks), boundaries=False)


def domains(stream: Stream, kind: str, tasks: int, seed: int = 0) -> Stream:
    """Show all examples in every task, rotated by an angle or with a permutation of the pixels of the task's own.

    With permuted pixels images are no longer shifted or mirrored in training: pixels have lost their neighbours.
    """
    check_name("domain", kind, ("rotation", "permutation"))
    if len(stream) != 1:
        raise invalid("stream", Description(f"{len(stream)} tasks"), "one with all classes", "use split(stream, 1)")
    if kind == "rotation" and len(stream.shape) != 3:
        raise invalid("domain", kind, "images [channels, height, width] to rotate", "use domain=permutation")
    if stream[0].train.views is not None:
        raise invalid("domain", kind, "none for a stream of domains", "make the stream without them")
    rng, first = _rng(seed, kind), stream[0]
    height, width = stream.shape[1:] if len(stream.shape) == 3 else (1, int(np.prod(stream.shape)))
    if kind == "rotation":
        views = [rotation(height, width, degrees) for degrees in rng.uniform(0, 180, tasks)]
    else:
        views = [rng.permutation(height * width) for _ in range(tasks)]
    all_views = torch.from_numpy(np.stack(views).astype(np.int64))
    train, test = (Examples(data.x, data.y, all_views) for data in (first.train, first.test))
    new_tasks = (
        replace(
            first, index=index, train=train, test=test,
            train_rows=first.train_rows + index * len(train.y), test_rows=first.test_rows + index * len(test.y),
        )
        for index in range(tasks)
    )  # fmt: skip
    drop_augment = kind == "permutation" and isinstance(stream.augment, CropFlip)
    return replace(stream, tasks=tuple(new_tasks), augment=None if drop_augment else stream.augment)


def rotation(height: int, width: int, degrees: float) -> NDArray[np.int64]:
    """For each pixel, the index of the nearest one that a counterclockwise rotation moves there; −1 if outside.

    >>> rotation(2, 2, 90).reshape(2, 2)
    array([[1, 3],
           [0, 2]])
    """
    row, column = np.mgrid[:height, :width]
    down, right = row - (height - 1) / 2, column - (width - 1) / 2
    sine, cosine = np.sin(np.deg2rad(degrees)), np.cos(np.deg2rad(degrees))
    # Round first, so that the last bit of a sine does not decide where a pixel halfway between two others goes.
    from_row = np.floor(np.round(sine * right + cosine * down + height / 2, 6)).astype(np.int64)
    from_column = np.floor(np.round(cosine * right - sine * down + width / 2, 6)).astype(np.int64)
    inside = (from_row >= 0) & (from_row < height) & (from_column >= 0) & (from_column < width)
    return np.where(inside, from_row * width + from_column, -1).ravel()


def _rows_of_classes(data: Examples, rows: Tensor, classes: Sequence[int]) -> Tensor:
    """The `rows` whose label is among `classes`, in ascending order."""
    return rows[torch.isin(data.y[data.numbers(rows)], torch.tensor(classes))].sort().values


def _tasks_share_classes(stream: Stream) -> bool:
    classes = [label for task in stream for label in task.classes]
    return len(set(classes)) < len(classes)


def _new_counts(stream: Stream) -> dict[int, list[int]]:
    """For each class, in order of arrival, how many of its training examples are new in each task."""
    counts = dict[int, list[int]]()
    for index, (task, new_examples) in enumerate(_new_examples(stream)):
        for label, members in _by_class(task, new_examples):
            counts.setdefault(label, [0] * len(stream))[index] = len(members)
        if sum(by_task[index] for by_task in counts.values()) < len(new_examples):
            got = Description(f"task {index + 1} with examples of classes that are not its own")
            remedy = "resize before tasks are blurred: give all settings at once"
            raise invalid("stream", got, "tasks whose classes can be resized", remedy)
    return counts


def _new_examples(stream: Stream) -> Iterator[tuple[Task, Tensor]]:
    """Each task with those of its training examples that no earlier task has: tasks with a common class share some."""
    is_new = torch.ones(len(stream[0].train.y), dtype=torch.bool)
    for task in stream:
        examples = task.train.numbers(task.train_rows)
        examples = examples[is_new[examples]]
        is_new[examples] = False
        yield task, examples


def _by_class(task: Task, examples: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The training examples of each of a task's classes, in ascending order."""
    examples = examples.sort().values
    labels, order = task.train.y[examples].sort(stable=True)
    for label in task.classes:
        start, end = torch.searchsorted(labels, torch.tensor([label, label + 1])).tolist()
        yield label, examples[order[start:end]]


def _in_proportion(size: int, counts: Sequence[int]) -> list[int]:
    """Whole numbers that add up to `size`, in proportion to the counts; what is left goes to the largest remainders.

    >>> _in_proportion(10, [40, 0, 20, 20])
    [5, 0, 3, 2]
    """
    shares, remainders = zip(*(divmod(size * count, sum(counts)) for count in counts), strict=True)
    rounded_up = sorted(range(len(counts)), key=lambda index: -remainders[index])[: size - sum(shares)]
    return [share + (index in rounded_up) for index, share in enumerate(shares)]


def _reaches_all_tasks(size: int, counts: Sequence[int]) -> bool:
    """Whether every task that has new examples of a class keeps one, if `size` are kept in all."""
    return size > 0 and _count_tasks(_in_proportion(size, counts)) == _count_tasks(counts)


def _count_tasks(counts: Sequence[int]) -> int:
    return sum(count > 0 for count in counts)


def _with_labels(stream: Stream, labels: Tensor) -> Stream:
    """The stream with other training labels; test labels stay the same."""
    train = stream[0].train._replace(y=labels)
    return replace(stream, tasks=tuple(replace(task, train=train) for task in stream))


def _rng(seed: int, purpose: str) -> Generator:
    """A generator for one purpose; the number made from its name exceeds any task's, so their draws differ."""
    return np.random.default_rng([seed, 1 << 32 | zlib.crc32(purpose.encode())])


def _as_text(value: Any) -> Any:
    """A list of numbers as it is written for --set, without spaces; all else as it is.

    >>> _as_text([2, 0, 1]), _as_text("2, 0,1"), _as_text("shuffled"), _as_text(5)
    ('2,0,1', '2,0,1', 'shuffled', 5)
    """
    if isinstance(value, list | tuple | range) or (isinstance(value, np.ndarray) and value.ndim == 1):
        value = ",".join(str(plain(number)) for number in value)
    return ",".join(map(str, _parse_numbers(value))) or value if isinstance(value, str) else value


def _parse_numbers(text: str) -> tuple[int, ...]:
    """The whole numbers in a text that are separated by commas; none if it is something else."""
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        return ()


def _abbreviate(numbers: Sequence[int]) -> str:
    """Numbers separated by commas, of many only the first ones."""
    return ",".join(map(str, numbers[:12])) + ",…" * (len(numbers) > 12)
