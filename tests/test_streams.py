"""Streams: what arrives is what was asked for, and nothing is dropped."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from parabolic import MLP, SGD, InputError, RunSpec, Stream, make_stream, train
from parabolic.experiments import execute
from parabolic.learners import find_learner
from parabolic.plugins import load_object
from parabolic.streams import CropFlip, Examples, Normalise, Scenario, Task
from parabolic.streams.scenarios import validate


def arrivals(task, size=32, epochs=1):
    return torch.cat([x for x, _ in task.batches(size, epochs)])


def test_seq_digits_holds_every_digit_once():
    stream = make_stream("seq-digits")
    assert [task.classes for task in stream] == [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)]
    assert (stream.classes, stream.shape) == (10, (1, 8, 8))
    images = torch.cat([part for task in stream for part in (arrivals(task), *[x for x, _ in task.test_batches()])])
    assert sorted(map(tuple, images.flatten(1).tolist())) == sorted(map(tuple, load_digits().data.tolist()))
    assert images.dtype == torch.uint8
    # The split does not depend on the seed: only the order of arrival does.
    other_seed = make_stream("seq-digits", seed=1)
    for task, other_task in zip(stream, other_seed, strict=True):
        assert torch.equal(task.test_rows, other_task.test_rows)
        assert not torch.equal(arrivals(task), arrivals(other_task))
        assert torch.equal(arrivals(task), arrivals(task))


@settings(max_examples=60)
@given(n=st.integers(8, 60), size=st.integers(1, 20), epochs=st.integers(1, 3), seed=st.integers(0, 100))
def test_every_example_comes_once_an_epoch_and_the_last_batch_may_be_short(n, size, epochs, seed):
    x, y = torch.arange(n), torch.arange(n) % 2
    stream = Stream.from_arrays(x, y, test=(x, y), tasks=1, seed=seed)
    batches = list(stream[0].batches(size, epochs))
    assert len(batches) == len(stream[0].batches(size, epochs)) == epochs * -(-n // size)
    assert sorted(torch.cat([values for values, _ in batches]).tolist()) == sorted(list(range(n)) * epochs)
    assert all(torch.equal(labels, values % 2) for values, labels in batches)


def test_tasks_by_class_by_list_and_ready_made():
    x, y = np.random.default_rng(0).normal(size=(120, 3)).astype(np.float32), np.arange(120) % 6
    by_number = Stream.from_arrays(x, y, tasks=3)
    by_list = Stream.from_arrays(x, y, tasks=[[5, 0], [1, 2, 3, 4]])
    assert [task.classes for task in by_number] == [(0, 1), (2, 3), (4, 5)]
    assert [task.classes for task in by_list] == [(5, 0), (1, 2, 3, 4)]
    assert by_list.seen(0) == [0, 5]
    assert by_number.seen(1) == [0, 1, 2, 3]
    for task in by_list:
        assert set(torch.cat([labels for _, labels in task.batches(7)]).tolist()) == set(task.classes)
        assert not set(task.train_rows.tolist()) & set(task.test_rows.tolist())
    shifted = Stream.from_tasks([((x, y), (x, y)), ((x + 9, y), (x + 9, y))])
    assert len(shifted) == 2
    assert all(task.classes == tuple(range(6)) for task in shifted)
    assert arrivals(shifted[1]).mean() > 8


def domain_examples(n=120, domains=3, classes=4):
    """Examples whose number tells all of them: the domain first, then the class."""
    numbers = np.random.default_rng(0).permutation(n)
    return numbers.astype(np.float32)[:, None], numbers % classes, 10 * (numbers // classes % domains)


def test_tasks_by_domain_have_the_examples_of_their_number_and_may_share_all_classes():
    x, y, domains = domain_examples()
    stream = Stream.from_arrays(x, y, domains=domains, seed=3)
    assert [task.classes for task in stream] == [(0, 1, 2, 3)] * 3
    assert stream.classes == 4
    numbers_seen = set()
    for task in stream:
        training, held_out = (
            set(task.train.x[rows_of_part].flatten().tolist()) for rows_of_part in (task.train_rows, task.test_rows)
        )
        assert {(number // 4 % 3, number % 4) for number in training} == {(task.index, label) for label in range(4)}
        assert {number // 4 % 3 for number in held_out} == {task.index}
        assert (len(training), len(held_out), training & held_out) == (32, 8, set())  # every fifth of ten of each class
        numbers_seen |= training | held_out
    assert numbers_seen == set(range(120))
    assert sorted(torch.cat([y for _, y in stream.together(7)]).tolist()) == sorted([0, 1, 2, 3] * 24)
    in_time = Stream.from_arrays(x, y, domains=domains, shuffle=False)
    assert all(torch.equal(task.train_rows, task.train_rows.sort().values) for task in in_time)
    from_dataset = Stream.from_dataset(list(zip(x, y, strict=True)), domains=domains, seed=3)
    assert from_dataset.digest() == stream.digest()


def test_test_examples_are_in_the_domain_that_was_given():
    x, y, domains = domain_examples()
    stream = Stream.from_arrays(x, y, test=(x[:60], y[:60]), domains=domains, test_domains=domains[:60])
    assert [len(task.train_rows) for task in stream] == [40] * 3
    for task in stream:
        numbers = torch.cat([x for x, _ in task.test_batches()]).flatten().long()
        assert sorted(numbers.tolist()) == sorted(
            x[:60][domains[:60] == 10 * task.index].flatten().astype(int).tolist()
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"domains": [0, 1]}, "^domains: got a tensor of shape .2. .*, expected one whole number for each of the 120"),
        ({"domains": np.zeros(120)}, "^domains: got .*float64, expected one whole number"),
        ({"domains": np.zeros((120, 1), int)}, "^domains: got a tensor of shape .120, 1."),
        ({"domains": ["a"] * 120}, "^domains: got .*; for words, use np.unique"),
        ({"domains": range(120)}, "^domains: got 0, expected a domain with test examples; every fifth of a class"),
        ({"domains": [0] * 120, "tasks": 2}, "^tasks: got 2, expected none if domains are given"),
        ({"domains": [0] * 120, "test_domains": [0] * 120}, "^test_domains: got .*, expected none without test"),
        ({"test_domains": [0] * 120}, "^domains: got None, expected one whole number"),
        (
            {"domains": [0] * 120, "test": 1},
            "^test_domains: got None, expected one whole number for each of the 120 test",
        ),
        ({"domains": [0] * 120, "test": 1, "test_domains": [1] * 120}, r"^test_domains: got \[1\], expected .*, \[0\]"),
        ({"domains": [0, 1] * 60, "test": 1, "test_domains": [0] * 120}, "^domains: got 1, expected .* test examples$"),
        ({"tasks": [0, 1] * 60}, "^tasks: .*; domains= takes the task of each example$"),
        ({"tasks": np.arange(120) % 2}, "^tasks: .*; domains= takes the task of each example$"),
        ({"tasks": [0, 1]}, "^tasks: got .0, 1., expected a number of tasks, or the classes of each$"),
    ],
)
def test_domains_that_do_not_fit_are_refused(arguments, message):
    x, y, _ = domain_examples()
    arguments = arguments | ({"test": (x, y)} if "test" in arguments else {})
    with pytest.raises(InputError, match=message):
        Stream.from_arrays(x, y, **arguments)


def test_learners_of_tasks_joint_and_validation_work_by_domain():
    _, y, domains = domain_examples(n=480)
    shifted = np.concatenate([y[:, None] == np.arange(4), domains[:, None] == [0, 10, 20]], axis=1).astype(np.float32)
    stream = Stream.from_arrays(shifted, y, domains=domains)
    for name in ("ewc", "lwf", "gem", "joint"):
        state = train(find_learner(name)(MLP(stream.shape, stream.classes)), stream, batch=10)
        assert state.matrix.shape == (3, 3)
        assert state.accuracy > 50
    validated = validate(stream, 0.25)
    for task, before in zip(validated, stream, strict=True):
        tested = set(task.test_rows.tolist())
        assert tested < set(before.train_rows.tolist())
        assert tested.isdisjoint(task.train_rows.tolist())
        assert task.classes == before.classes


def test_tasks_made_by_hand_share_one_set_of_examples():
    """Else what is trained together, tested together or moved to a GPU would be the first task's examples."""
    examples, other = (Examples(torch.arange(8.0)[:, None] + shift, torch.arange(8) % 2) for shift in (0, 8))
    early, late = torch.arange(4), torch.arange(4, 8)
    shared = Stream(
        "mine",
        (Task(0, (0, 1), examples, examples, early, early), Task(1, (0, 1), examples, examples, late, late)),
        2,
        (1,),
    )
    assert sorted(torch.cat([x for x, _ in shared.together(3)]).flatten().tolist()) == list(range(8))
    assert [arrivals(task).sum().item() for task in shared.to("cpu")] == [0 + 1 + 2 + 3, 4 + 5 + 6 + 7]
    assert list(replace(shared[0], train_rows=early[:0]).batches()) == []
    with pytest.raises(InputError, match=r"^tasks: got \(\), expected at least one task"):
        replace(shared, tasks=())
    for changed in ({"train": other}, {"test": other}, {"train": Examples(examples.x, other.y)}):
        tasks = (shared[0], replace(shared[1], **changed))
        with pytest.raises(InputError, match="^tasks: got task 1 with examples of its own, .*; use Stream.from_tasks"):
            replace(shared, tasks=tasks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.uint8, torch.int64])
def test_the_digest_tells_examples_of_any_type_apart(dtype):
    x, y = torch.arange(60).reshape(20, 3).to(dtype), torch.arange(20) % 2
    digest, same_digest, other_digest = (
        Stream.from_arrays(examples, y, tasks=1).digest() for examples in (x, x.clone(), x.roll(1, 1))
    )
    assert digest == same_digest != other_digest


def test_the_arrays_are_not_copied_task_by_task():
    x = np.zeros((1000, 64), dtype=np.uint8)
    stream = Stream.from_arrays(x, np.arange(1000) % 10, tasks=5)
    assert len({task.train.x.data_ptr() for task in stream} | {x.ctypes.data}) == 1


@settings(max_examples=40)
@given(
    n=st.integers(1, 5), channels=st.integers(1, 3), height=st.integers(2, 7), width=st.integers(2, 7),
    padding=st.integers(0, 3), flip=st.booleans(), seed=st.integers(0, 1000),
)  # fmt: skip
def test_crop_and_flip_are_those_of_one_image_at_a_time(n, channels, height, width, padding, flip, seed):
    images = torch.randint(1, 256, (n, channels, height, width), dtype=torch.uint8)
    ours = CropFlip(padding, flip)(images, torch.Generator().manual_seed(seed))
    generator = torch.Generator().manual_seed(seed)
    shift = torch.randint(2 * padding + 1, (2, n, 1), generator=generator)
    mirrored = torch.rand(n, 1, generator=generator) < 0.5
    for row in range(n):
        canvas = torch.zeros(channels, height + 2 * padding, width + 2 * padding, dtype=torch.uint8)
        canvas[:, padding : padding + height, padding : padding + width] = images[row]
        top, left = int(shift[0, row]), int(shift[1, row])
        window = canvas[:, top : top + height, left : left + width]
        if flip and mirrored[row]:
            window = window.flip(-1)
        assert torch.equal(ours[row], window)


def test_normalise_is_by_channel():
    x = torch.randint(256, (4, 3, 5, 5), dtype=torch.uint8)
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)
    ours = Normalise(mean, std)(x)
    for channel in range(3):
        assert torch.allclose(ours[:, channel], (x[:, channel] / 255 - mean[channel]) / std[channel], atol=1e-6)


def test_what_cannot_be_cropped_is_refused():
    with pytest.raises(InputError, match="^augment: got a tensor of shape .20, 3. and type float32, expected images "):
        SGD(MLP((3,), 4), augment=CropFlip()).observe(torch.zeros(20, 3), torch.arange(20) % 4)
    for padding in (-1, 1.5):
        with pytest.raises(InputError, match=f"^padding: got {padding}, expected a whole number of at least 0"):
            CropFlip(padding)


X, Y = np.zeros((20, 3), dtype=np.float32), np.arange(20) % 4


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"x": np.full((20, 3), np.nan, dtype=np.float32)}, "x"),
        ({"x": np.array([["a"] * 3] * 20)}, "x"),
        ({"x": np.zeros((0, 3))}, "x"),
        ({"x": np.ma.masked_equal(np.eye(20, 3), 1)}, "x"),  # what is under a mask is no value
        ({"y": np.ma.masked_equal(Y, 3)}, "y"),
        ({"x": [torch.zeros(3, requires_grad=True)] * 20}, "x"),
        ({"seed": -1}, "seed"),
        ({"seed": 0.5}, "seed"),
        ({"class_names": ("one", "two", "three")}, "class_names"),
        ({"y": Y[:5]}, "y"),
        ({"y": Y.astype(float)}, "y"),
        ({"y": Y - 1}, "y"),
        ({"tasks": 3}, "tasks"),
        ({"tasks": [[0, 9]]}, "tasks"),
        ({"tasks": [[0, 0], [1]]}, "tasks"),
        ({"tasks": 0}, "tasks"),
        ({"test": (np.zeros((4, 5), dtype=np.float32), np.arange(4))}, "test"),
        ({"test": (X[:2], np.array([0, 1]))}, "tasks"),
        ({"x": X[:8], "y": Y[:8]}, "tasks"),
    ],
)
def test_bad_arrays_are_named(arguments, name):
    with pytest.raises(InputError, match=f"^{name}: got .*, expected "):
        Stream.from_arrays(**({"x": X, "y": Y, "tasks": 2} | arguments))


def test_words_and_too_few_examples_are_told_what_to_do():
    with pytest.raises(InputError, match=r"^y: got an array of type <U1, .*; for words, use np.unique"):
        Stream.from_arrays(X, list("abcd") * 5, tasks=2)
    with pytest.raises(InputError, match="^tasks: got .* expected classes with test examples; every fifth"):
        Stream.from_arrays(X[:8], Y[:8], tasks=2)


def test_numbers_of_numpy_cut_a_stream_as_pythons_do():
    plain, stream = (Stream.from_arrays(np.arange(20), Y, tasks=tasks) for tasks in (2, np.int64(2)))
    ours, theirs = stream[1].batches(np.int64(3), np.int64(2)), plain[1].batches(3, 2)
    assert [x.tolist() for x, _ in ours] == [x.tolist() for x, _ in theirs]
    assert [len(y) for _, y in plain[1].test_batches(np.int64(1))] == [1, 1]
    assert make_stream("seq-blobs", seed=np.int64(3)).digest() == make_stream("seq-blobs", seed=3).digest()
    assert Stream.from_arrays(np.arange(20), Y, tasks=2, seed=np.int64(0)).digest() == plain.digest()
    ordered = Stream.from_arrays(np.arange(20), Y, tasks=2, shuffle=np.bool_(False))
    assert [task.shuffle for task in ordered] == [False, False]
    assert ordered.digest() == Stream.from_arrays(np.arange(20), Y, tasks=2, shuffle=False).digest()


def test_targets_that_are_numbers_are_refused_with_the_way_to_learn_them():
    x, y = torch.randn(20, 2), torch.randn(20)
    way = "call a learner's `observe` in a loop, or use ParabolicRegressor"
    with pytest.raises(InputError, match=f"^y: got .*float32, expected one whole number .*{way}$"):
        Stream.from_arrays(x, y, tasks=1)
    with pytest.raises(InputError, match=f"^test y of task 0: .*{way}$"):
        Stream.from_tasks([((x, (y > 0).long()), (x, y[:, None]))])
    with pytest.raises(InputError, match="for each of the 20 examples$"):
        Stream.from_arrays(x, torch.arange(19) % 2, tasks=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("seq-digit",), "did you mean 'seq-digits'"),
        ((None,), "^stream: got None, expected a name"),
        (("seq-blobs", "first"), "^seed: got 'first', expected a whole number"),
        (("platform:node",), r"^stream: got .*, expected a function that is called as stream\(seed\)"),
    ],
)
def test_streams_that_cannot_be_made_are_named(arguments, message):
    with pytest.raises(InputError, match=message):
        make_stream(*arguments)


# -- an order of time ------------------------------------------------------------------------------------------


def test_test_classes_that_were_never_trained_are_refused_unless_left_out_by_choice():
    x, y = torch.arange(60.0), torch.arange(60) % 6
    known = y < 4
    for tasks in (2, np.int64(2), None):
        with pytest.raises(
            InputError, match=r"test: got labels \[4, 5\], expected classes that have training examples; "
        ):
            Stream.from_arrays(x[known], y[known], test=(x, y), tasks=tasks)
    for trained in (known, y < 6):  # where the others have training examples, these are left out too
        stream = Stream.from_arrays(x[trained], y[trained], test=(x, y), tasks=[[0, 1], [2, 3]])
        for task in stream:
            assert set(task.train.y[task.train_rows].tolist()) == set(task.tested) == set(task.classes)


def drifting(seed=0, n=120, **settings):
    """A point a second, whose second number is the time; what a class is turns round half way through."""
    generator = torch.Generator().manual_seed(seed)
    time = torch.arange(float(n))
    side = torch.randn(n, generator=generator).sign()
    y = ((side > 0) ^ (time >= n / 2)).long()
    x = torch.stack([side, time], 1)
    return Stream.from_arrays(x, y, test=(x[-20:], y[-20:]), tasks=1, seed=seed, boundaries=False, **settings)


def test_without_shuffling_examples_arrive_as_they_were_given():
    task = drifting(shuffle=False)[0]
    assert arrivals(task, 7)[:, 1].tolist() == list(range(120))
    assert arrivals(task, 7, epochs=3)[:, 1].tolist() == [*range(120)] * 3
    assert [len(y) for _, y in task.batches(50)] == [50, 50, 20]
    assert arrivals(drifting()[0])[:, 1].tolist() != list(range(120))
    assert arrivals(drifting(seed=5, shuffle=False)[0])[:, 1].tolist() == list(range(120))
    # Of several tasks, each by itself.
    x, y = torch.arange(40.0)[:, None], torch.arange(40) % 4
    by_class = Stream.from_arrays(x, y, test=(x, y), tasks=2, shuffle=False)
    assert arrivals(by_class[1])[:, 0].tolist() == [number for number in range(40) if number % 4 > 1]
    from_tasks = Stream.from_tasks([((x, y), (x, y)), ((x.flip(0), y), (x, y))], shuffle=False)
    assert [arrivals(task)[:, 0].tolist() for task in from_tasks] == [[*range(40)], [*range(39, -1, -1)]]
    pairs = Stream.from_dataset(list(zip(x, y.tolist(), strict=True)), test=[(x[0], 0)], tasks=1, shuffle=False)
    assert arrivals(pairs[0])[:, 0].tolist() == list(range(40))
    assert [task.shuffle for task in from_tasks.to("cpu")] == [False, False]
    with pytest.raises(InputError, match="^shuffle: got 1, expected True or False"):
        drifting(shuffle=1)


def test_all_tasks_at_once_are_shuffled_all_the_same():
    stream = drifting(shuffle=False)
    assert torch.cat([x for x, _ in stream.together()])[:, 1].tolist() != list(range(120))


def test_the_order_is_part_of_the_digest_and_of_no_stream_that_was_there_before():
    assert drifting(shuffle=False).digest() not in (drifting().digest(), drifting(shuffle=False, n=60).digest())
    assert drifting(shuffle=True).digest() == drifting().digest()
    assert make_stream("seq-digits").digest().startswith("2bb67211d37e35ce")  # as it was before streams had an order
    assert make_stream("seq-digits", domain="rotation").digest().startswith("7d6727b746accc50")
    assert make_stream("seq-digits", imbalance=3.0).digest().startswith("22db338d7addd614")


def test_a_learner_follows_a_drift_only_if_it_arrives_in_order():
    accuracy = {}
    for shuffle in (True, False):
        torch.manual_seed(0)
        learner = SGD(torch.nn.Linear(2, 2), lr=0.5, prepare=lambda x: x * torch.tensor([1.0, 0.0]))
        accuracy[shuffle] = train(learner, drifting(shuffle=shuffle), batch=4).accuracy
    assert accuracy[False] == 100  # it has learned what holds now
    assert accuracy[True] < 100


def test_a_run_on_a_stream_of_one_s_own_keeps_the_order(tmp_path, monkeypatch):
    (tmp_path / "drift.py").write_text(
        "import torch\n"
        "from parabolic import Stream\n"
        "seen = []\n"
        "def kept(x, generator):\n"
        "    seen.extend(x[:, 0].tolist())\n"
        "    return x\n"
        "def drift(seed):\n"
        "    x = torch.arange(50.0)[:, None]\n"
        "    return Stream.from_arrays(x, torch.arange(50) % 2, test=(x, torch.arange(50) % 2), tasks=1,\n"
        "                              seed=seed, shuffle=False, augment=kept)\n"
    )
    monkeypatch.chdir(tmp_path)
    spec = RunSpec("sgd", stream="drift.py:drift", batch=8, epochs=2, seed=3)
    execute(spec, device="cpu")
    seen = load_object("stream", "drift.py:seen")
    assert seen == [*range(50)] * 2
    seen.clear()
    execute(RunSpec("sgd", stream="drift.py:drift", batch=8, scenario={"validation": 0.2}), device="cpu")
    assert len(seen) == 40
    assert seen == sorted(seen)


@pytest.mark.parametrize(
    ("scenario", "count"),
    [
        ({"validation": 0.2}, 80), ({"imbalance": 4.0}, 55), ({"corruption": "uniform"}, 100), ({"tasks": 1}, 100),
        ({"corruption": "shuffle"}, 100), ({"class_order": "shuffled"}, 100), ({"domain": "permutation"}, 200),
    ],
)  # fmt: skip
def test_scenarios_keep_the_order(scenario, count):
    x, y = torch.arange(100.0)[:, None].expand(100, 2), torch.arange(100) % 4
    stream = Scenario.of(scenario).apply(Stream.from_arrays(x, y, test=(x, y), tasks=2, shuffle=False), 0)
    assert not any(task.shuffle for task in stream)
    arrived = [arrivals(task)[:, 0].tolist() for task in stream]
    assert all(task_numbers == sorted(task_numbers) for task_numbers in arrived)
    assert sum(map(len, arrived)) == count


def test_an_order_of_time_cannot_be_dealt_anew():
    with pytest.raises(InputError, match=r"^blur: got 0.5, expected 0 if .* in a fixed order .*boundaries=False"):
        Scenario.of({"blur": 0.5}).apply(drifting(shuffle=False), 0)
