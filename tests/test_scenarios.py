"""Scenarios: exactly what was asked for, by count, and a pure function of the spec."""

import json
import os
import re
import subprocess
import sys
import zlib
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from parabolic import ER, MLP, SGD, InputError, RunSpec, Store, Stream, make_stream, run, train
from parabolic.experiments import build
from parabolic.learners import known_learners
from parabolic.options import options_of
from parabolic.streams import Scenario, prepare
from parabolic.streams.scenarios import PAPER_SIZES, domains, permute_labels, rotation


def numbered(per_class=40, classes=10, tasks=5, seed=0, tests=4):
    """A stream whose examples are their own numbers, so that each can be recognised."""
    y = np.arange(per_class * classes) % classes
    x, test_numbers = np.arange(len(y)), np.arange(tests * classes)
    return Stream.from_arrays(x, y, test=(test_numbers + 10**6, test_numbers % classes), tasks=tasks, seed=seed)


def applied(stream, seed=0, **settings):
    return Scenario.of(settings).apply(stream, seed)


def arriving_tensors(stream, size=32, epochs=1):
    """All examples and labels of each task, as they arrive."""
    return [tuple(torch.cat(tensors) for tensors in zip(*task.batches(size, epochs), strict=True)) for task in stream]


def true_label(x, classes=10):
    return x % classes


def test_a_plain_scenario_changes_nothing():
    stream = numbered()
    assert applied(stream) is stream
    assert make_stream("seq-digits", 3).digest() == make_stream("seq-digits", 3, tasks=5).digest()


# -- split ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tasks", [1, 2, 5, 10])
def test_any_number_of_tasks_with_every_example_once(tasks):
    stream = applied(numbered(), tasks=tasks)
    assert [task.classes for task in stream] == [
        tuple(classes) for classes in np.arange(10).reshape(tasks, -1).tolist()
    ]
    for task, (x, y) in zip(stream, arriving_tensors(stream), strict=True):
        assert set(y.tolist()) == set(task.classes)
        assert torch.equal(y, true_label(x))
        assert set(task.test.y[task.test_rows].tolist()) == set(task.classes)
    assert sorted(torch.cat([x for x, _ in arriving_tensors(stream)]).tolist()) == list(range(400))


def test_the_order_of_classes_is_decided_by_the_seed():
    orders = [tuple(task.classes for task in applied(numbered(), seed, class_order="shuffled")) for seed in range(8)]
    assert len(set(orders)) == 8
    assert orders[3] == tuple(task.classes for task in applied(numbered(), 3, class_order="shuffled"))
    for order in orders:
        assert sorted(label for task in order for label in task) == list(range(10))
    for task, (x, y) in zip(orders[0], arriving_tensors(applied(numbered(), 0, class_order="shuffled")), strict=True):
        assert set(y.tolist()) == set(task)
        assert torch.equal(y, true_label(x))


def test_an_order_of_ones_own_and_uneven_tasks():
    order = [9, 0, 8, 1, 7, 2, 6, 3, 5, 4]
    stream = applied(numbered(), class_order=order, tasks=[5, 2, 3])
    assert [task.classes for task in stream] == [(9, 0, 8, 1, 7), (2, 6), (3, 5, 4)]
    for task, (x, y) in zip(stream, arriving_tensors(stream), strict=True):
        assert set(y.tolist()) == set(task.classes) == set(task.tested)
        assert torch.equal(y, true_label(x))
    assert sorted(torch.cat([x for x, _ in arriving_tensors(stream)]).tolist()) == list(range(400))
    without_sizes = applied(
        numbered(), 3, class_order=order
    )  # of the same lengths as before, and the same for every seed
    assert [task.classes for task in without_sizes] == [(9, 0), (8, 1), (7, 2), (6, 3), (5, 4)]
    assert [len(task.classes) for task in applied(numbered(), 1, tasks="4,6", class_order="shuffled")] == [4, 6]
    # Sizes are told in the order of arrival.
    assert class_sizes(applied(numbered(), class_order=order, tasks="9,1", imbalance=4))[::9] == [40, 10]


def test_a_list_is_one_setting_however_it_is_written():
    spellings = ("3,2,5", " 3, 2,5", [3, 2, 5], (3, 2, 5), np.array([3, 2, 5]))
    specs = [RunSpec(learner="er", scenario={"tasks": sizes}) for sizes in spellings]
    assert len({spec.key for spec in specs}) == 1
    assert {spec.scenario["tasks"] for spec in specs} == {"3,2,5"}
    lists = RunSpec("er", scenario={"class_order": [1, 0], "class_sizes": [30, 20]})
    assert lists.scenario == {"class_order": "1,0", "class_sizes": "30,20"}
    assert RunSpec.from_settings("er", {"class_order": "1, 0", "class_sizes": " 30, 20"}).key == lists.key
    assert RunSpec(**specs[0].resolved()).key == specs[0].key
    assert RunSpec.from_settings("er", {"tasks": "2"}).scenario == {"tasks": 2}


# Keys of specs as they were before there were lists: stored runs are found by them.
KEYS = {
    "60f28f7ebdbc811f": {"tasks": 2},
    "5e393d623114e941": {"class_order": "shuffled"},
    "3da6e2d8b7de4431": {"imbalance": 2, "class_sizes": None, "tasks": 10},
    "d2607d352839528d": {"class_sizes": "paper-random", "corruption": "uniform"},
}


def test_the_keys_of_stored_runs_stay():
    assert {
        RunSpec(learner="er", stream="seq-cifar10", scenario=scenario).key: scenario for scenario in KEYS.values()
    } == KEYS


# -- corruption ----------------------------------------------------------------------------------------------------


def slow_uniform(stream, rate, among, seed):
    """Corruption one example at a time: the labels of all training examples."""
    rng = np.random.default_rng([seed, 2**32 + zlib.crc32(b"corruption")])
    labels = stream[0].train.y.tolist()
    everything = sorted({label for task in stream for label in task.classes})
    for task in stream:
        candidates = sorted(task.classes) if among == "task" else everything
        rows = task.train_rows.tolist()
        order = rng.permutation(len(rows)).tolist()
        chosen = [rows[index] for index in order[: round(rate * len(rows))]]
        for row, step in zip(chosen, rng.integers(1, len(candidates), len(chosen)).tolist(), strict=True):
            labels[row] = candidates[(candidates.index(labels[row]) + step) % len(candidates)]
    return labels


@hypothesis_settings(max_examples=40)
@given(
    rate=st.floats(0, 1),
    among=st.sampled_from(["task", "all"]),
    tasks=st.sampled_from([1, 2, 5]),
    seed=st.integers(0, 99),
)
def test_uniform_corruption_is_exact_by_count_and_as_one_by_one(rate, among, tasks, seed):
    plain = numbered(tasks=tasks, seed=seed)
    stream = applied(plain, seed, corruption="uniform", corruption_rate=rate, corruption_among=among)
    assert stream[0].train.y.tolist() == slow_uniform(plain, rate, among, seed)
    for task, (x, y) in zip(stream, arriving_tensors(stream), strict=True):
        assert int((y != true_label(x)).sum()) == round(rate * len(x))
        assert set(y.tolist()) <= set(task.classes if among == "task" else range(10))
        assert torch.equal(task.test.y, plain[0].test.y)
    assert torch.equal(plain[0].train.y, torch.arange(400) % 10)  # the plain stream is not touched
    assert stream[0].train.x is plain[0].train.x


def test_a_corrupted_label_is_each_of_the_others_as_often():
    stream = applied(numbered(per_class=3000, tasks=1), corruption="uniform", corruption_rate=0.5)
    x, y = arriving_tensors(stream)[0]
    wrong = y != true_label(x)
    shifts = Counter(((y - true_label(x)) % 10)[wrong].tolist())
    assert sorted(shifts) == list(range(1, 10))
    assert chisquare(list(shifts.values())).pvalue > 1e-3


@pytest.mark.parametrize("among", ["task", "all"])
@pytest.mark.parametrize("rate", [0.3, 1.0])
def test_an_example_of_several_tasks_is_corrupted_once(rate, among):
    x = np.arange(400)
    plain = Stream.from_arrays(x, x % 4, test=(x, x % 4), tasks=[[0, 1], [1, 2], [0, 1], [2, 3]])
    stream = applied(plain, corruption="uniform", corruption_rate=rate, corruption_among=among)
    labels = {}
    for task, new_count, (x, y) in zip(stream, (200, 100, 0, 100), arriving_tensors(stream), strict=True):
        arrived = dict(zip(x.tolist(), y.tolist(), strict=True))
        new = arrived.keys() - labels.keys()
        assert len(new) == new_count
        assert sum(arrived[example] != true_label(example, 4) for example in new) == round(rate * new_count)
        assert {arrived[example] for example in new} <= set(task.classes if among == "task" else range(4))
        assert arrived.items() >= {example: labels[example] for example in arrived.keys() - new}.items()
        labels |= arrived


def published_shuffle(labels, rng):
    """The published step, on a list: the first half of a batch has its labels permuted within itself."""
    half = len(labels) // 2
    permuted = rng.permutation(labels[:half]).tolist()
    return permuted + labels[half:]


@pytest.mark.parametrize(("size", "epochs"), [(32, 1), (7, 2), (1, 1), (500, 3)])
def test_shuffle_permutes_the_labels_of_half_of_each_batch_within_itself(size, epochs):
    plain, stream = numbered(seed=4), applied(numbered(seed=4), 4, corruption="shuffle")
    for plain_task, task in zip(plain, stream, strict=True):
        per_epoch = -(-len(task.train_rows) // size)
        for number, ((x, y), (plain_x, plain_y)) in enumerate(
            zip(task.batches(size, epochs), plain_task.batches(size, epochs), strict=True)
        ):
            if number % per_epoch == 0:
                rng = np.random.default_rng([4, task.index, number // per_epoch, 0x5EED1ABE])
            assert torch.equal(x, plain_x)
            assert y.tolist() == published_shuffle(plain_y.tolist(), rng)
            half = len(x) // 2
            assert sorted(y[:half].tolist()) == sorted(plain_y[:half].tolist())
            assert torch.equal(y[half:], plain_y[half:])


def test_shuffle_gets_23_percent_wrong_of_two_classes_and_42_percent_of_ten():
    for tasks, classes, share in ((5, 2, 0.234), (1, 10, 0.422)):
        stream = applied(numbered(per_class=2000, tasks=tasks), corruption="shuffle")
        wrong = torch.cat([y != true_label(x) for x, y in arriving_tensors(stream)]).float().mean()
        # Of the half of a batch of 32 a label stays where it was in one case of 16, or else falls on any class.
        assert share == round(0.5 * 15 / 16 * (1 - 1 / classes), 3)
        assert abs(float(wrong) - share) < 0.01


def test_memory_keeps_the_corrupted_label():
    for corruption in ("uniform", "shuffle"):
        stream = make_stream("seq-digits", corruption=corruption)
        arrived = {}
        for task in stream:
            for x, y in task.batches(10):
                arrived |= {tuple(image.flatten().tolist()): int(label) for image, label in zip(x, y, strict=True)}
        learner = ER(MLP(stream.shape, stream.classes), prepare=stream.prepare, memory=100)
        train(learner, stream, batch=10)
        memory_state = learner.past.state_dict()
        images, labels = memory_state["x"][:100], memory_state["y"][:100]
        clean = make_stream("seq-digits")[0].train
        true_labels = {tuple(image.flatten().tolist()): int(label) for image, label in zip(*clean[:2], strict=True)}
        keys = [tuple(image.flatten().tolist()) for image in images]
        assert [arrived[key] for key in keys] == labels.tolist()
        assert any(true_labels[key] != label for key, label in zip(keys, labels.tolist(), strict=True))


# -- imbalance and validation --------------------------------------------------------------------------------------


def class_sizes(stream):
    return [Counter(task.train.y[task.train_rows].tolist())[label] for task in stream for label in task.classes]


def test_the_paper_s_lists_by_count_and_by_their_formula():
    stream = numbered(per_class=5000)
    for name, sizes in PAPER_SIZES.items():
        assert class_sizes(applied(stream, class_sizes=name)) == list(sizes)
        assert class_sizes(applied(stream, class_sizes=",".join(map(str, sizes)))) == list(sizes)
    normal = [int(5000 / 2 ** (position / 9)) for position in range(10)]
    assert PAPER_SIZES["paper-normal"] == tuple(normal)
    assert class_sizes(applied(stream, imbalance=2)) == normal
    assert class_sizes(applied(stream, imbalance=2, imbalance_order="reversed")) == normal[::-1]
    random_sizes = [class_sizes(applied(stream, seed, imbalance=2, imbalance_order="random")) for seed in range(3)]
    assert all(sorted(sizes) == sorted(normal) for sizes in [*random_sizes, PAPER_SIZES["paper-random"]])
    assert len(set(map(tuple, random_sizes))) == 3
    # Sizes are told in the order of arrival, so that tasks shrink whatever the order of the classes.
    assert class_sizes(applied(stream, 1, imbalance=2, class_order="shuffled")) == normal


def test_imbalance_keeps_a_random_part_of_each_class():
    plain, first, second = numbered(), applied(numbered(), 0, imbalance=4), applied(numbered(), 1, imbalance=4)
    rows = [set(torch.cat([task.train_rows for task in stream]).tolist()) for stream in (plain, first, second)]
    assert rows[1] < rows[0]
    assert rows[1] != rows[2]
    assert all(torch.equal(plain_task.test_rows, task.test_rows) for plain_task, task in zip(plain, first, strict=True))


def domain_stream(count=3000, classes=6, sizes=(1000, 1000, 1000)):
    """A stream of domains of these sizes, with all classes in each, whose examples are their own numbers."""
    x, test = np.arange(count), np.arange(classes * len(sizes))
    domains = np.repeat(np.arange(len(sizes)), sizes)
    return Stream.from_arrays(
        x, x % classes, test=(test, test % classes), domains=domains, test_domains=test // classes
    )


def counts_by_task(stream):
    return [Counter(task.train.y[task.train_rows].tolist()) for task in stream]


def test_imbalance_is_by_class_whatever_tasks_it_is_in():
    stream = applied(domain_stream(), imbalance=10)
    expected = [int(500 / 10 ** (i / 5)) for i in range(6)]
    assert sum(counts_by_task(stream), Counter()) == dict(enumerate(expected))
    for counts in counts_by_task(stream):  # in every domain in the same proportion
        assert all(abs(counts[label] - size / 3) <= 1 for label, size in enumerate(expected))
    uneven = applied(domain_stream(sizes=(1800, 900, 300)), class_sizes="300,250,200,150,100,50")
    assert [[counts[label] for label in range(6)] for counts in counts_by_task(uneven)] == [
        [180, 150, 120, 90, 60, 30], [90, 75, 60, 45, 30, 15], [30, 25, 20, 15, 10, 5],
    ]  # fmt: skip
    with pytest.raises(InputError, match="class_sizes: got 2, expected enough for an example in each of the 3 tasks"):
        applied(domain_stream(), class_sizes="9,9,9,9,9,2")
    with pytest.raises(InputError, match="class_sizes: got 18 sizes, expected one for each of the 6 classes"):
        applied(domain_stream(), class_sizes=",".join(["9"] * 18))


def test_an_example_of_several_tasks_is_kept_in_all_of_them_or_in_none():
    x = np.arange(400)
    plain = Stream.from_arrays(x, x % 4, test=(x, x % 4), tasks=[[0, 1], [1, 2], [2, 3]])
    stream = applied(plain, class_sizes="10,20,30,40")
    assert counts_by_task(stream) == [{0: 10, 1: 20}, {1: 20, 2: 30}, {2: 30, 3: 40}]
    assert len(torch.cat([task.train_rows for task in stream]).unique()) == 100


@given(st.integers(0, 58), st.lists(st.integers(2, 30), min_size=2, max_size=2), st.integers(0, 20))
@hypothesis_settings(max_examples=20)
def test_tasks_that_overlap_keep_the_same_examples(first, sizes, seed):
    """Both classes are in both tasks, which share the examples from `first` up to 60."""
    plain = domain_stream(120, 2, (60, 60))
    later = replace(plain[1], train_rows=torch.arange(first, 120))
    stream = applied(replace(plain, tasks=(plain[0], later)), seed, class_sizes=",".join(map(str, sizes)))
    first_rows, later_rows = (set(task.train_rows.tolist()) for task in stream)
    assert first_rows <= set(range(60))
    assert {row for row in first_rows if row >= first} == {row for row in later_rows if row < 60}
    assert Counter(row % 2 for row in first_rows | later_rows) == dict(enumerate(sizes))


@pytest.mark.parametrize("settings", [{"imbalance": 2}, {"class_sizes": [20] * 10}])
def test_a_blurred_stream_is_not_resized_as_what_others_gave_its_tasks_would_be_lost(settings):
    with pytest.raises(InputError, match="^stream: got task 1 with examples of classes .*; resize before .* at once$"):
        applied(applied(numbered(), blur=0.3), **settings)
    at_once = applied(numbered(), blur=0.3, **settings)
    assert sum(len(task.train_rows) for task in at_once) == sum(class_sizes(applied(numbered(), **settings)))


def test_imbalance_applies_in_a_single_task_too():
    assert counts_by_task(applied(numbered(tasks=1), imbalance=4)) == [{i: int(40 / 4 ** (i / 9)) for i in range(10)}]


@pytest.mark.parametrize(
    "stream", [numbered(per_class=7), domain_stream(90, 6, (40, 30, 20)), domain_stream(66, 6, (54, 12))]
)
@pytest.mark.parametrize("order", ["normal", "reversed"])
def test_the_largest_imbalance_that_an_error_names_can_be_had(stream, order):
    with pytest.raises(InputError, match="imbalance: got 1000.0, expected at most") as error:
        applied(stream, imbalance=1000, imbalance_order=order)
    largest = int(re.findall("at most ([0-9]+)", str(error.value))[0])
    assert largest > 1
    shared = len(stream[0].classes + stream[1].classes) > len({*stream[0].classes, *stream[1].classes})
    assert str(error.value).endswith("of every class" + " in each of its tasks" * shared)
    assert all(counts_by_task(applied(stream, imbalance=largest, imbalance_order=order)))
    with pytest.raises(InputError, match="imbalance"):
        applied(stream, imbalance=1.5 * largest + 1, imbalance_order=order)


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
def test_validation_tests_on_training_examples_that_are_not_learned(share):
    plain = numbered()
    stream = applied(plain, 0, validation=share, corruption="uniform")
    assert class_sizes(applied(plain, 0, validation=share)) == [40 - round(share * 40)] * 10
    for task, plain_task in zip(stream, plain, strict=True):
        learned, tested = set(task.train_rows.tolist()), set(task.test_rows.tolist())
        assert not learned & tested
        assert learned | tested == set(plain_task.train_rows.tolist())
        x, y = (torch.cat(tensors) for tensors in zip(*task.test_batches(), strict=True))
        assert torch.equal(y, true_label(x))  # never corrupted
        assert Counter(y.tolist()) == dict.fromkeys(task.classes, round(share * 40))
    # Like a test set it is the same for every seed.
    other_seed = applied(numbered(seed=5), 5, validation=share)
    assert all(
        torch.equal(task.test_rows, other_task.test_rows) for task, other_task in zip(stream, other_seed, strict=True)
    )


def test_validation_may_hold_out_none_of_a_class_in_a_task_if_it_does_so_in_another():
    labels = np.r_[np.arange(200) % 2, np.ones(100), np.zeros(4), np.arange(10) % 2].astype(int)
    years = np.r_[np.full(200, 2023), np.full(104, 2024), np.full(10, 2025)]
    stream = Stream.from_arrays(np.arange(304), labels[:304], domains=years[:304])
    held_out = applied(stream, validation=0.1)
    assert [task.classes for task in held_out] == [(0, 1), (0, 1)]
    assert [set(task.test.y[task.test_rows].tolist()) for task in held_out] == [{0, 1}, {1}]
    for task, plain_task in zip(held_out, stream, strict=True):
        assert sorted(task.train_rows.tolist() + task.test_rows.tolist()) == sorted(plain_task.train_rows.tolist())
    too_few = Stream.from_arrays(np.arange(314), labels, domains=years)
    with pytest.raises(InputError, match="which is 0 of the 8 examples of task 3, .*; choose a larger one$"):
        applied(too_few, validation=0.1)
    assert len(applied(too_few, validation=0.2)[2].test_rows) == 2


@given(st.integers(0, 60), st.sampled_from([0.1, 0.25, 0.5]))
@hypothesis_settings(max_examples=20)
def test_what_a_task_holds_out_is_learned_in_no_other_that_has_it(first, share):
    """Both classes are in both tasks, which share the examples from `first` up to 60."""
    plain = domain_stream(120, 2, (60, 60))
    plain = replace(plain, tasks=(plain[0], replace(plain[1], train_rows=torch.arange(first, 120))))
    stream = applied(plain, validation=share)
    tested = {row for task in stream for row in task.test_rows.tolist()}
    assert len(tested) == pytest.approx(share * 120, abs=2)
    for task, plain_task in zip(stream, plain, strict=True):
        rows = set(plain_task.train_rows.tolist())
        assert set(task.test_rows.tolist()) == rows & tested
        assert set(task.train_rows.tolist()) == rows - tested


# -- blur and domains ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_blurred_tasks_trade_examples_and_lose_none(share):
    stream = applied(numbered(), 2, blur=share)
    assert not stream.boundaries
    assert [len(task.train_rows) for task in stream] == [80] * 5
    assert sorted(torch.cat([x for x, _ in arriving_tensors(stream)]).tolist()) == list(range(400))
    for task, (x, y) in zip(stream, arriving_tensors(stream), strict=True):
        assert torch.equal(y, true_label(x))
        foreign = int((~torch.isin(y, torch.tensor(task.classes))).sum())
        assert 0 < foreign <= round(share * 80)
    with pytest.raises(InputError, match="as seq-digits does not say where they begin .* a stream without `blur`"):
        train(
            build(RunSpec(learner="ewc" if "ewc" in known_learners() else "si"))[0], make_stream("seq-digits", blur=0.1)
        )


def test_a_task_is_dealt_some_of_its_own_back():
    stream = applied(numbered(per_class=2000), blur=0.3)
    foreign = [
        float((~torch.isin(y, torch.tensor(task.classes))).float().mean())
        for task, (_, y) in zip(stream, arriving_tensors(stream), strict=True)
    ]
    np.testing.assert_allclose(foreign, 0.24, atol=0.02)  # four fifths of the share: so says the guide


def test_every_class_that_a_blur_brought_competes_in_a_test():
    plain, blurred = numbered(), applied(numbered(), blur=0.3)
    assert [plain.seen(row) for row in range(5)] == [list(range(2 * row + 2)) for row in range(5)]
    arrived = [set(y.tolist()) for _, y in arriving_tensors(blurred)]
    assert [blurred.seen(row) for row in range(5)] == [sorted(set().union(*arrived[: row + 1])) for row in range(5)]
    assert blurred.seen(0) == list(range(10))
    # Without boundaries, but not blurred, nothing else has come.
    assert [replace(plain, boundaries=False).seen(row) for row in range(5)] == [plain.seen(row) for row in range(5)]
    # A learner that always says 9 is wrong at once where a 9 has come, and cannot say it where none has.
    for stream, right in ((plain, 50), (blurred, 0)):
        model = torch.nn.Linear(1, 10)
        torch.nn.init.zeros_(model.weight)
        model.bias.data = torch.arange(10.0)
        learner = SGD(model, lr=1e-12, prepare=lambda x: 0.0 * x.float()[:, None])
        assert train(learner, stream).matrix[0, 0] == right


def test_rotations_are_those_of_numpy_and_of_one_pixel_at_a_time():
    image = np.arange(35).reshape(5, 7) + 1
    square = np.arange(36).reshape(6, 6) + 1

    def rotated(image, degrees):
        view = rotation(*image.shape, degrees)
        return np.where(view < 0, 0, image.ravel()[view]).reshape(image.shape)

    for times in range(4):
        np.testing.assert_array_equal(rotated(square, 90 * times), np.rot90(square, times))
    np.testing.assert_array_equal(rotated(image, 180), image[::-1, ::-1])
    for degrees in (17.3, 61.9, 133.3):
        expected = np.zeros_like(image)
        for new_row in range(5):
            for new_column in range(7):
                # A point of the new image, turned back to the right about the centre, in the old one.
                source = complex(new_column - 3, -(new_row - 2)) * np.exp(-1j * np.deg2rad(degrees))
                row, column = round(2 - source.imag), round(3 + source.real)
                if 0 <= row < 5 and 0 <= column < 7:
                    expected[new_row, new_column] = image[row, column]
        np.testing.assert_array_equal(rotated(image, degrees), expected)


def test_domains_show_every_example_in_every_task_and_share_them_in_memory():
    plain = make_stream("seq-digits", seed=1)
    base = make_stream("seq-digits", seed=1, tasks=1)[0]
    for domain in ("rotation", "permutation"):
        stream = make_stream("seq-digits", seed=1, tasks=4, domain=domain, corruption="uniform", corruption_rate=0.25)
        assert (len(stream), stream.classes) == (4, 10)
        assert {task.train.x.data_ptr() for task in stream} == {stream[0].test.x.data_ptr()}
        for task in stream:
            assert task.classes == tuple(range(10))
            assert len(task.train_rows) == sum(len(plain_task.train_rows) for plain_task in plain)
            view = stream[0].train.views[task.index]
            x, y = task.train.take(task.train_rows)
            original = base.train.x[base.train_rows]
            for example in (0, 77, 1000):
                flat = original[example].flatten().tolist()
                assert x[example].flatten().tolist() == [flat[source] if source >= 0 else 0 for source in view.tolist()]
            assert int((y != base.train.y[base.train_rows]).sum()) == round(0.25 * len(y))
            tested, labels = (torch.cat(tensors) for tensors in zip(*task.test_batches(), strict=True))
            assert torch.equal(labels, base.test.y[base.test_rows])
            assert not torch.equal(tested, base.test.x[base.test_rows])
        assert len({tuple(view.tolist()) for view in stream[0].train.views}) == 4
        # All tasks at once, for a reference, keep each its view.
        joint = [x for x, _ in stream.together(64)]
        assert sorted(torch.cat(joint).long().sum((1, 2, 3)).tolist()) == sorted(
            torch.cat([x for task in stream for x, _ in task.batches(64)]).long().sum((1, 2, 3)).tolist()
        )


@pytest.mark.parametrize(
    "settings",
    [
        {"validation": 0.2},
        {"imbalance": 3},
        {"class_sizes": [40, 30] * 5},
        {"corruption": "uniform"},
        {"corruption": "shuffle"},
        {"validation": 0.1, "imbalance": 2, "corruption": "uniform"},
    ],
)
def test_a_scenario_of_a_stream_of_domains_is_as_if_both_were_given_at_once(settings):
    seed = 1
    in_turn = applied(make_stream("seq-digits", seed, tasks=3, domain="rotation"), seed, **settings)
    assert in_turn.digest() == make_stream("seq-digits", seed, tasks=3, domain="rotation", **settings).digest()


def test_a_domain_of_a_domain_is_refused():
    stream = make_stream("seq-digits", tasks=1, domain="rotation")
    with pytest.raises(InputError, match="^domain: got 'permutation', expected none for a stream of domains; make"):
        applied(stream, domain="permutation")


@pytest.mark.gpu
@pytest.mark.parametrize("domain", ["rotation", "permutation"])
def test_domains_are_the_same_data_on_a_gpu(domain):
    stream = make_stream("seq-digits", seed=1, tasks=4, domain=domain)
    assert stream.to("cuda").digest() == stream.digest()


def test_permuted_pixels_are_not_shifted_and_what_is_the_users_own_stays():
    plain = make_stream("seq-digits", tasks=1)
    assert plain.augment is not None
    assert domains(plain, "permutation", 2).augment is None
    assert domains(plain, "rotation", 2).augment is plain.augment
    with_own_augment = replace(plain, augment=lambda x, generator: x)
    assert domains(with_own_augment, "permutation", 2).augment is with_own_augment.augment


def test_a_permutation_keeps_the_pixels_of_points_too():
    stream = make_stream("seq-blobs", tasks=2, domain="permutation")
    x, _ = stream[0].train.take(stream[0].train_rows)
    assert x.shape == (1200, 2)


# -- spec ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"corupt": 1}, "scenario: got 'corupt', .*did you mean 'corruption'"),
        ({"corruption": "unifrom"}, "corruption: got 'unifrom', .*did you mean 'uniform'"),
        ({"corruption_rate": 1.5}, "corruption_rate: got 1.5"),
        ({"tasks": 0}, "tasks: got 0"),
        ({"tasks": 3}, "tasks: got 3, expected a divisor of the number of classes, 10; or give .* of each task"),
        ({"tasks": "5,4"}, "tasks: got 5,4, which add up to 9, expected sizes that add up to the .* classes, 10"),
        ({"tasks": "10,0"}, "tasks: got '10,0', expected a whole number, or at least two of at least 1"),
        ({"tasks": "5"}, "tasks: got '5', expected a whole number, or"),
        ({"tasks": "five"}, "tasks: got 'five', expected a whole number, or"),
        ({"tasks": "5,5", "domain": "permutation"}, "tasks: got '5,5', expected a number if domain is set; every"),
        ({"class_order": "shufled"}, "class_order: got 'shufled', .*did you mean 'shuffled'"),
        ({"class_order": "1,0,x"}, "class_order: got '1,0,x', expected one of fixed, shuffled; .*separated by commas"),
        ({"class_order": "1,0,1"}, "class_order: got 1,0,1, expected each class once$"),
        (
            {"class_order": "9,8,7,6,5,4,3,2,11"},
            "class_order: got .*, expected each of the 10 classes once; mis.*: 0,1; unk.*: 11$",
        ),
        ({"class_order": "1,0", "domain": "permutation"}, "class_order: got '1,0', expected fixed if domain"),
        ({"class_sizes": "paper-random", "imbalance": 2.0}, "class_sizes: got 'paper-random', expected none"),
        ({"class_sizes": 10}, "class_sizes: got 10, expected training examples per class, .*comma-separated"),
        ({"class_sizes": "paper"}, "class_sizes: got 'paper', expected comma-separated numbers"),
        ({"class_sizes": "1,2,3"}, "class_sizes: got 3 sizes, expected one for each of the 10"),
        ({"class_sizes": "paper-normal"}, "class_sizes: got 5000, expected 1 to 40, .* of class 0"),
        ({"validation": 0.001}, "validation: got 0.001, which is 0 of the 40 examples of class 0"),
        ({"validation": 1.0}, "validation: got 1.0"),
        ({"domain": "rotation"}, r"domain: got 'rotation', expected images"),
        ({"domain": "rotation", "blur": 0.1}, "blur: got 0.1, expected 0"),
        ({"tasks": 10, "corruption": "uniform"}, "corruption: got a task of one class"),
        ({"imbalance": 0.5}, "imbalance: got 0.5"),
        ({"imbalance": 41}, "imbalance: got 41.0, expected at most 40, to keep an example of every class$"),
        ({"corruption_rate": 0.3}, "corruption_rate: got 0.3, expected 0.5 without corruption; .*set corruption=unif"),
        ({"corruption_among": "all"}, "corruption_among: got 'all', expected task unless corruption=uniform; set"),
        ({"corruption_among": "all", "corruption": "shuffle"}, "corruption_among: got 'all', expected task unless"),
        ({"imbalance_order": "reversed"}, "imbalance_order: got 'reversed', expected normal without imbalance; .*set"),
        ({"imbalance_order": "random", "class_sizes": "paper-random"}, "imbalance_order: got 'random', expected nor"),
        ({"class_order": "shuffled", "domain": "permutation"}, "class_order: got 'shuffled', expected fixed if domain"),
    ],
)
def test_what_cannot_be_is_refused(settings, message):
    with pytest.raises(InputError, match=message):
        applied(numbered(), **settings)


@pytest.mark.parametrize("seed", [-1, 0.5])
def test_a_seed_that_is_none_is_refused(seed):
    with pytest.raises(InputError, match=f"^seed: got {seed}, expected a whole number of at least 0"):
        applied(numbered(), seed, class_order="shuffled")


def test_a_scenario_is_applied_to_a_stream_not_to_its_name():
    with pytest.raises(InputError, match="^stream: got 'seq-digits', expected a parabolic.Stream; make_stream"):
        applied("seq-digits", tasks=2)


def test_labels_are_permuted_in_a_share_of_each_batch():
    with pytest.raises(InputError, match="corruption_rate: got 1.5, expected a number of at least 0 and of at most 1"):
        permute_labels(numbered(), 1.5)
    for share in (0, 1):
        assert [task.permuted for task in permute_labels(numbered(), share)] == [share] * 5


def test_settings_may_be_given_in_full():
    for settings in ({}, {"corruption": "shuffle"}, {"class_sizes": "paper-random"}, {"domain": "permutation"}):
        in_full = {name: option.default for name, option in options_of(Scenario).items()} | settings
        assert Scenario.of(in_full) == Scenario.of(settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tasks": 1}, "tasks: got 1, expected none for a stream whose tasks share classes; leave tasks out"),
        ({"tasks": "1,1"}, r"tasks: got \(1, 1\), expected none for a stream whose tasks share classes"),
        ({"class_order": "shuffled"}, "class_order: got 'shuffled', expected fixed for a stream whose tasks share"),
        ({"class_order": "1,0"}, r"class_order: got \(1, 0\), expected fixed for a stream whose tasks share"),
        ({"domain": "permutation"}, "domain: got 'permutation', .* share classes, .*; make the stream with one task"),
    ],
)
def test_tasks_that_share_classes_are_not_cut_anew(settings, message):
    examples = (torch.arange(20), torch.arange(20) % 2)
    with pytest.raises(InputError, match=message):
        applied(Stream.from_tasks([(examples, examples), (examples, examples)]), **settings)


def test_the_scenario_is_part_of_the_spec_and_of_its_key():
    plain = RunSpec(learner="er")
    assert RunSpec(learner="er", scenario={"corruption": "none", "tasks": None}).key == plain.key
    noisy = RunSpec(learner="er", scenario={"corruption": "uniform"})
    assert noisy.key != plain.key
    assert noisy.key == RunSpec(learner="er", scenario={"corruption": "uniform", "corruption_rate": 0.5}).key
    assert noisy.resolved()["scenario"]["corruption_among"] == "task"
    assert plain.resolved()["scenario"] == {name: option.default for name, option in options_of(Scenario).items()}
    json.dumps(noisy.resolved())
    spec = RunSpec.from_settings("er", {"corruption": "uniform", "corruption_rate": "0.2", "lr": "0.05", "tasks": "2"})
    assert spec.scenario == {"corruption": "uniform", "corruption_rate": 0.2, "tasks": 2}
    assert spec.options == {"lr": 0.05}
    with pytest.raises(InputError, match="^settings: got 'corrupton'.*did you mean 'corruption'"):
        RunSpec.from_settings("er", {"corrupton": "uniform"})
    with pytest.raises(InputError, match="scenario: got 'corrupton'.*did you mean 'corruption'"):
        RunSpec(scenario={"corrupton": "uniform"})


def test_no_name_means_two_things():
    taken = {name for learner in known_learners().values() for name in options_of(learner)} | set(options_of(RunSpec))
    assert not taken & set(options_of(Scenario))


def test_a_run_under_a_scenario_is_kept_apart(tmp_path):
    store, spec = Store(tmp_path), RunSpec(learner="sgd", backbone="mlp", scenario={"tasks": 2})
    record, _ = run(spec, store, device="cpu")
    assert len(record.accuracy) == 2
    assert record.spec["scenario"]["tasks"] == 2
    assert store.find(RunSpec(learner="sgd", backbone="mlp")) is None
    # A record from before there were scenarios is the run of a plain stream.
    plain = RunSpec(learner="sgd", backbone="mlp")
    old = {name: value for name, value in plain.resolved().items() if name != "scenario"}
    store.save(replace(record, key=plain.key, spec=old))
    assert store.find(plain) is not None


def test_the_examples_of_the_guide(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PARABOLIC_DATA", str(tmp_path / "data"))
    by_domain, larger, folder_of_images, under_a_scenario, of_ones_own = re.findall(
        r"```python\n(.*?)```", (Path(__file__).parent.parent / "docs" / "data.md").read_text(), re.DOTALL
    )
    names = {}
    exec(compile(by_domain, "docs/data.md", "exec"), names)
    assert capsys.readouterr().out.startswith("[(0, 1), (0, 1), (0, 1)]\n[[")
    exec(compile(larger, "docs/data.md", "exec"), names)
    assert np.shares_memory(names["lazy"][0].train.x.numpy(), names["mapped"])
    exec(compile(folder_of_images, "docs/data.md", "exec"), {})
    prepare("mine", "digits")
    stream = make_stream("seq-mine")
    joined = [replace(task.batches(32), joined=True) for task in stream]  # as resnet18 needs two of such images
    assert sum(len(list(batches)) for batches in joined) == 46
    assert sum(len(list(task.batches(10))) for task in stream) == 146
    exec(compile(under_a_scenario, "docs/data.md", "exec"), {})
    assert re.fullmatch(r"[0-9a-f]{12}\n", capsys.readouterr().out)
    exec(compile(of_ones_own, "docs/data.md", "exec"), {})
    assert capsys.readouterr().out == "[(36, 4), (36, 4)]\n"
    stream_code = "Stream.from_arrays([[0.0]] * 100, [0, 1] * 50, tasks=1)"
    Path("mine.py").write_text(f"from parabolic import Stream\ndef mine(seed):\n    return {stream_code}\n")
    assert len(make_stream("mine.py:mine", validation=0.1)[0].test_rows) == 8


SCENARIOS = [
    {},
    {"class_order": "shuffled", "tasks": 2},
    {"corruption": "uniform", "corruption_among": "all", "imbalance": 3, "imbalance_order": "random"},
    {"corruption": "shuffle", "blur": 0.3, "validation": 0.2},
    {"domain": "rotation", "tasks": 3},
    {"domain": "permutation", "tasks": 3, "corruption": "uniform"},
]
TELL = """
import hashlib
from parabolic import make_stream

def tell(scenario):
    stream, batches = make_stream("seq-digits", 7, **scenario), hashlib.sha256()
    for task in stream:
        for x, y in task.batches(10, 2):
            batches.update(x.numpy().tobytes() + y.numpy().tobytes())
    return [stream.digest(), batches.hexdigest()]
"""


def test_a_stream_is_a_pure_function_of_its_spec():
    """The same hash and the same batches in another process, with another hash seed and number of threads."""
    torch.manual_seed(1)
    namespace = {}
    exec(TELL, namespace)
    digests = [namespace["tell"](scenario) for scenario in SCENARIOS]
    environment = os.environ | {"PYTHONHASHSEED": "2", "OMP_NUM_THREADS": "2"}  # unlike those here
    code = f"{TELL}\nimport json; print(json.dumps([tell(each) for each in {SCENARIOS}]))"
    process = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(process.stdout) == digests
    # And on any machine, in any version: these are fixed.
    assert [digest[:12] for digest, _ in digests] == PINNED


PINNED = ["27126e46a4fd", "a4ceda35c6e3", "491ce7063ea3", "2d93e1d72863", "395a8d1c4a27", "88727ec7aed9"]


def test_a_learner_goes_through_any_scenario():
    for scenario in SCENARIOS:
        stream = make_stream("seq-digits", **scenario)
        learner = SGD(MLP(stream.shape, stream.classes), prepare=stream.prepare, augment=stream.augment)
        assert train(learner, stream, batch=32).matrix.shape == (len(stream), len(stream))
