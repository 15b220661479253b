"""Learners on disk: what is loaded goes on to the bit, and what is not whole is refused; no file runs code."""

import copy
import functools
import hashlib
import importlib
import json
import math
import os
import pickle
import stat
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from parabolic import ER, MLP, PCL, SGD, ConvNet, InputError, Learner, LwF, Memory, ReplayLearner
from parabolic.files import write_bytes
from parabolic.learners import find_learner, known_learners, saving
from parabolic.learners.average import WeightAverage
from parabolic.learners.criterion import CrossEntropy, Huber
from parabolic.learners.saving import describe, restore
from parabolic.memory import ClassBalanced
from parabolic.states import pack_state, read_outline, read_state, same_state
from parabolic.streams import CropFlip, Normalise

ALL = sorted(known_learners())
TASK, LENGTH = 4, 12  # batches of a task, and of the stream


def net(seed=0):
    """A small convolutional network with batch norm, of the package's own: a file can tell how to build it."""
    torch.manual_seed(seed)
    return ConvNet((1, 4, 4), 4, width=4)


def batches(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randint(256, (6, 1, 4, 4), generator=generator, dtype=torch.uint8),
            torch.randint(4, (6,), generator=generator),
        )
        for _ in range(LENGTH)
    ]


def make_learner(name, **options):
    cls = find_learner(name)
    if issubclass(cls, ReplayLearner):
        options = {"memory": 20, "replay": 5} | options
    return cls(net(), prepare=Normalise((0.5,), (0.3,)), augment=CropFlip(1), **options)


def learn(learner, begin, end):
    """Learn some batches of the stream, with the work at the start and the end of tasks."""
    data = batches()
    for number in range(begin, end):
        task = data[number - number % TASK : number - number % TASK + TASK]
        if number % TASK == 0:
            learner.start_task(task)
        learner.observe(*data[number], number // TASK)
        if number % TASK == TASK - 1:
            learner.end_task(task)


@pytest.fixture(scope="module")
def elsewhere():
    """Another process: loads a learner from one file, goes on with the stream, and saves it to another."""
    code = (
        "import sys; from test_saving import *\n"
        "for line in sys.stdin:\n"
        "    begin, one, other = line.split()\n"
        "    learner = Learner.load(one); learn(learner, int(begin), LENGTH); learner.save(other)\n"
        "    print('done', flush=True)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )

    def go_on(begin, source, target):
        process.stdin.write(f"{begin} {source} {target}\n")
        process.stdin.flush()
        assert process.stdout.readline() == "done\n"

    yield go_on
    process.stdin.close()
    assert process.wait() == 0
    process.stdout.close()


@functools.cache
def undisturbed_learner(name, average, optimizer):
    """A learner that went through the whole stream without a stop."""
    learner = make_learner(name, average=average, optimizer=optimizer, lr=0.01)
    learn(learner, 0, LENGTH)
    return learner


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, LENGTH), average=st.sampled_from([None, 0.9]), optimizer=st.sampled_from(["SGD", "Adam"]))
def test_a_learner_goes_on_in_another_process_as_if_it_had_never_stopped(
    elsewhere, tmp_path, name, cut, average, optimizer
):
    learner = make_learner(name, average=average, optimizer=optimizer, lr=0.01)
    learn(learner, 0, cut)
    learner.save(tmp_path / "one")
    elsewhere(cut, tmp_path / "one", tmp_path / "other")
    resumed, undisturbed = Learner.load(tmp_path / "other"), undisturbed_learner(name, average, optimizer)
    assert type(resumed) is type(undisturbed)
    assert repr(resumed) == repr(undisturbed)
    assert same_state(resumed.state_dict(), undisturbed.state_dict())
    probe = batches(seed=9)[0][0]
    assert torch.equal(resumed.scores(probe), undisturbed.scores(probe))


def test_a_file_can_be_read_by_any_reader_of_safetensors(tmp_path):
    """Any reader of safetensors can look into it."""
    learner = PCL(MLP((3,), 4, hidden=(5,)), memory=20, replay=5, sigma_x=0.1, seed=3)
    learner.save(tmp_path / "a.safetensors")
    with safetensors.safe_open(tmp_path / "a.safetensors", "pt") as file:
        header = json.loads(file.metadata()["parabolic"])
        assert torch.equal(file.get_tensor("state.model.1.weight"), learner.model[1].weight)
    assert header["version"] == 2
    loaded = Learner.load(tmp_path / "a.safetensors")
    assert (loaded.sigma_x, loaded.seed, loaded.past.capacity) == (0.1, 3, 20)
    assert loaded.model.arguments == {"shape": (3,), "classes": 4, "hidden": (5,)}


def test_a_memory_of_another_kind_comes_back_as_it_was(tmp_path):
    ER(net(), memory=ClassBalanced(40)).save(tmp_path / "a")
    assert isinstance(Learner.load(tmp_path / "a").past, ClassBalanced)


class Ring(Memory):
    def place(self, batch, generator):
        return (self.clock + torch.arange(len(batch["y"]), device=self.clock.device)) % self.capacity


class Parts(Ring):
    def __init__(self, capacity, parts=2):
        super().__init__(capacity)
        self.parts = parts


class RingER(ER):
    policy = Ring


class PartsER(ER):
    policy = Parts


def test_a_memory_that_its_class_makes_need_not_be_given_again(tmp_path):
    x, y = torch.randn(60, 3), torch.arange(60) % 2
    for memory in (40, Ring(40)):
        learner = RingER(MLP((3,), 2), memory=memory)
        learner.observe(x, y)
        learner.save(tmp_path / "a")
        for loaded in (Learner.load(tmp_path / "a"), Learner.load(tmp_path / "a", memory=Ring(40))):
            assert type(loaded.past) is Ring
            assert loaded.past.capacity == 40
            assert torch.equal(loaded.past["x"], learner.past["x"])
    with pytest.raises(InputError, match="capacity of 50"):
        Learner.load(tmp_path / "a", memory=Ring(50))
    for learner in (ER(MLP((3,), 2), memory=Ring(40)), PartsER(MLP((3,), 2), memory=Parts(40, parts=3))):
        learner.save(tmp_path / "b")  # its class would make another one
        with pytest.raises(InputError, match="^load: got no memory, .*; pass memory= as it was"):
            Learner.load(tmp_path / "b")


def test_loading_leaves_the_random_numbers_of_the_process_alone(tmp_path):
    make_learner("er").save(tmp_path / "a")
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    Learner.load(tmp_path / "a")
    assert torch.equal(torch.rand(3), expected)


class Doubled(ER):
    """A learner of a user's own."""


def test_what_a_file_cannot_hold_is_given_again(tmp_path):
    def half(x):
        return x.float() / 2

    def own_net():
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 4))

    factory = functools.partial(torch.optim.SGD, momentum=0.9)
    learner = Doubled(own_net(), prepare=half, optimizer=factory, replay=5)
    learn(learner, 0, 5)
    learner.save(tmp_path / "a")
    with pytest.raises(InputError, match="load: got no optimizer, prepare, .* pass optimizer=, prepare= as it was"):
        Learner.load(tmp_path / "a", model=own_net())
    with pytest.raises(InputError, match="model: got None, .* pass model="):
        Learner.load(tmp_path / "a", prepare=half, optimizer=factory)
    with pytest.raises(InputError, match="load: got lr, expected only what the file cannot hold"):
        Learner.load(tmp_path / "a", model=own_net(), prepare=half, optimizer=factory, lr=1.0)
    with pytest.raises(InputError, match="expected a SGD that has been imported; call Learner.load"):
        SGD.load(tmp_path / "a", model=own_net(), prepare=half, optimizer=factory)
    for cls in (Learner, ER, Doubled):
        loaded = cls.load(tmp_path / "a", model=own_net(), prepare=half, optimizer=factory)
        assert type(loaded) is Doubled
        assert same_state(loaded.state_dict(), learner.state_dict())


def test_what_a_file_holds_may_be_given_again_if_it_is_the_same(tmp_path):
    learner = ER(nn.Linear(3, 4), prepare=Normalise([1.0], [2.0]), memory=Memory(50))
    path = learner.save(tmp_path / "a")
    loaded = Learner.load(path, model=nn.Linear(3, 4), prepare=Normalise([1.0], [2.0]))
    assert same_state(loaded.state_dict(), learner.state_dict())
    with pytest.raises(InputError, match="^prepare: got .*, expected .* as it was saved"):
        Learner.load(path, model=nn.Linear(3, 4), prepare=Normalise([0.0], [2.0]))


def test_what_a_stream_prepares_with_is_found_by_a_process_that_has_no_streams(tmp_path):
    make_learner("er").save(tmp_path / "a")
    code = "import sys; from parabolic.learners import ER; print(ER.load(sys.argv[1]).prepare)"
    process = subprocess.run([sys.executable, "-c", code, tmp_path / "a"], capture_output=True, text=True)
    assert (process.stdout, process.stderr) == (f"{Normalise((0.5,), (0.3,))}\n", "")


def test_a_class_of_a_script_is_found_by_its_name(tmp_path, monkeypatch):
    """It was saved by a program, and is loaded by one that imports it."""
    with monkeypatch.context() as program:
        program.setattr(Doubled, "__module__", "__main__")
        Doubled(net()).save(tmp_path / "a")
    with pytest.raises(
        InputError, match="'__main__:Doubled', expected a Learner that has been imported; import the module"
    ):
        Learner.load(tmp_path / "a")
    assert type(Doubled.load(tmp_path / "a")) is Doubled


def test_what_is_minimised_is_part_of_a_learner(tmp_path):
    ER(MLP((3,), 2), criterion=Huber(delta=0.5)).save(tmp_path / "numbers")
    assert Learner.load(tmp_path / "numbers").criterion.delta == 0.5
    learner = ER(MLP((3,), 2), criterion=CrossEntropy(weights=[1.0, 5.0]))
    learner.grow(3)
    learner.save(tmp_path / "classes")
    assert Learner.load(tmp_path / "classes").criterion.weights == [1.0, 5.0, 1.0]


def test_what_comes_before_the_model_is_given_again(tmp_path):
    def embedding():
        return nn.Embedding(10, 4)

    data = torch.randint(10, (6, 3)), torch.arange(6) % 2
    learner = PCL(MLP((3, 4), 2, hidden=(5,)), embed=embedding(), replay=4)
    learner.observe(*data)
    learner.save(tmp_path / "a")
    with pytest.raises(InputError, match="pass embed="):
        Learner.load(tmp_path / "a")
    loaded = Learner.load(tmp_path / "a", embed=embedding())
    assert torch.equal(loaded.observe(*data), learner.observe(*data))
    assert same_state(loaded.state_dict(), learner.state_dict())


def test_a_drift_is_given_again(tmp_path):
    PCL(net(), drift=torch.neg).save(tmp_path / "a")
    with pytest.raises(InputError, match="pass drift="):
        Learner.load(tmp_path / "a")
    assert Learner.load(tmp_path / "a", drift=torch.neg).drift is torch.neg


def test_a_head_that_has_grown_comes_back_as_large(tmp_path):
    learner = make_learner("er", average=0.9)
    learn(learner, 0, 3)
    learner.grow(7)
    learn(learner, 3, 4)
    learner.save(tmp_path / "a")
    for model in (None, net()):  # made anew, or as it was before
        loaded = Learner.load(tmp_path / "a", model=model)
        assert loaded.scores(batches()[0][0]).shape == (6, 7)
        assert same_state(loaded.state_dict(), learner.state_dict())


def test_a_model_that_does_not_fit_is_refused_and_stays_as_it_was(tmp_path):
    learner = ER(nn.Linear(4, 3), memory=10, replay=5)
    learner.save(tmp_path / "a")
    for other_model, message in [
        (nn.Linear(5, 3), "weight of the model: got \\(\\(3, 5\\)"),
        (nn.Linear(4, 3).double(), "bias of the model: .* expected .*float32"),
        (nn.Linear(4, 3, bias=False), "bias of the model: got nothing"),
        (nn.Sequential(nn.Linear(4, 3)), "0.bias of the model: .* expected nothing"),
    ]:
        before = pickle.dumps(other_model.state_dict())
        with pytest.raises(InputError, match=message):
            Learner.load(tmp_path / "a", model=other_model)
        assert pickle.dumps(other_model.state_dict()) == before


def test_a_model_of_which_other_layers_are_frozen_is_refused_with_a_remedy(tmp_path):
    """The error told the settings of the optimiser, which are the same, and was cut short."""

    def make_model(frozen=False):
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        model[0].requires_grad_(not frozen)
        return model

    learner = ER(make_model(), memory=20, replay=5, optimizer="Adam")
    learner.observe(torch.randn(6, 4), torch.arange(6) % 3)
    path = learner.save(tmp_path / "er.safetensors")
    message = "^model: got one of which 2 tensors are trained, expected one of which 4 are, as it was saved; freeze"
    with pytest.raises(InputError, match=message):
        Learner.load(path, model=make_model(frozen=True))
    assert Learner.load(path, model=make_model()).steps == 1


def test_a_state_that_breaks_off_leaves_the_learner_as_it_was(tmp_path):
    """It is whole by its digest, but a part of it is not what the learner needs."""
    learner = LwF(net())
    content = read_state(learner.save(tmp_path / "a"))
    content["state"]["old"] = torch.zeros(9, dtype=torch.bool)
    (tmp_path / "a").write_bytes(pack_state(content))
    model = net(seed=7)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(InputError, match="expected the state of a LwF like this"):
        Learner.load(tmp_path / "a", model=model)
    assert same_state(before, dict(model.state_dict()))


@pytest.mark.parametrize(("name", "part"), [("er", "memory"), ("lwf", "old"), ("obc", "surrogate"), ("si", "path")])
def test_a_state_of_more_classes_that_breaks_off_leaves_all_as_it_was(tmp_path, name, part):
    learner, larger = make_learner(name, average=0.9), make_learner(name, average=0.9)
    larger.grow(7)
    learn(larger, 0, 2)
    content = read_state(larger.save(tmp_path / "a"))
    content["state"][part] = {}
    before = copy.deepcopy(describe(learner))
    with pytest.raises(InputError, match="^state: got .*, expected the state of a "):
        restore(learner, content)
    assert same_state(describe(learner), before)


class Scaled(nn.Linear):
    """A layer with a weight whose name says nothing of what it is."""

    def __init__(self):
        super().__init__(3, 2)
        self.updates = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return super().forward(x) * self.updates


def test_a_weight_may_have_any_name_and_an_average_of_before_that_is_read(tmp_path):
    learner = SGD(Scaled(), average=0.9)
    for _ in range(5):
        learner.observe(torch.randn(8, 3), torch.arange(8) % 2)
    loaded = Learner.load(learner.save(tmp_path / "a"), model=Scaled())
    assert same_state(loaded.averaged.weights, learner.averaged.weights)
    assert loaded.averaged.updates == 5

    average = WeightAverage(nn.Linear(3, 2), decay=0.9)
    old_state = {"weight": torch.ones(2, 3), "bias": torch.ones(2), "updates": torch.tensor(7.0, dtype=torch.float64)}
    average.load_state_dict(old_state)
    assert same_state({**average.weights, "updates": average.updates}, old_state)


@pytest.mark.parametrize(
    "stretch", [lambda tensor: tensor.new_zeros(tensor.shape[-1:]), lambda tensor: tensor.new_zeros(1)]
)
def test_an_average_of_another_shape_is_refused_and_changes_nothing(tmp_path, stretch):
    average = WeightAverage(nn.Linear(3, 2), decay=0.9)
    before = copy.deepcopy(average.state_dict())
    with pytest.raises(InputError, match="^weight: got .*, expected one of shape"):
        average.load_state_dict({**before, "weight": stretch(before["weight"])})
    assert same_state(average.state_dict(), before)

    learner = make_learner("er", average=0.9)
    learn(learner, 0, 2)
    name, weight = next((name, tensor) for name, tensor in learner.averaged.weights.items() if tensor.ndim > 1)
    content = read_state(learner.save(tmp_path / "a"))
    content["state"]["average"][name] = stretch(weight)
    before = copy.deepcopy(describe(learner))
    with pytest.raises(InputError, match="^state: got .*, expected the state of a "):
        restore(learner, content)
    assert same_state(describe(learner), before)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("si", "path"),
        ("ewc", "anchor"),
        ("ewc", "importance"),
        ("lwf", "old"),
        ("vrmcl", "velocity"),
        ("clser", "stable"),
    ],
)
def test_states_of_another_shape_are_not_stretched(name, part):
    learner = make_learner(name)
    learn(learner, 0, TASK)
    state = copy.deepcopy(learner.state_dict())
    if isinstance(state[part], dict):
        state[part] |= {name: tensor[:1] for name, tensor in state[part].items() if tensor.ndim > 0 and len(tensor) > 1}
    else:
        state[part] = state[part][:1]
    with pytest.raises(InputError, match="expected one of shape"):
        make_learner(name).load_state_dict(state)


@pytest.mark.parametrize(("name", "part"), [("si", "path"), ("ewc", "anchor"), ("vrmcl", "velocity")])
def test_a_part_of_a_state_that_is_no_table_is_refused(name, part):
    learner = make_learner(name)
    with pytest.raises(InputError, match="^state: got None, expected tensors named "):
        learner.load_state_dict(learner.state_dict() | {part: None})


def test_a_state_is_the_same_as_its_copy_and_as_no_other():
    states = [
        torch.zeros(2), -torch.zeros(2), torch.zeros(2).double(), torch.zeros(1, 2), torch.tensor([0.0, math.nan]),
        {"a": 1}, {"b": 1}, {"a": 1, "b": 1}, [1], [1, 2], [{"a": math.nan}], 1, 1.0, True, "1", None, math.nan,
    ]  # fmt: skip
    for first, state in enumerate(states):
        for second, copied in enumerate(copy.deepcopy(states)):
            assert same_state(state, copied) == (first == second)


# -- damage ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    """A small file of a learner that has learned."""
    path = tmp_path_factory.mktemp("sample") / "a.safetensors"
    learner = SGD(MLP((3,), 2, hidden=(2,)))
    learner.observe(torch.ones(2, 3), torch.tensor([0, 1]))
    learner.save(path)
    return path.read_bytes()


def test_a_flipped_bit_anywhere_is_refused(tmp_path, sample):
    path = tmp_path / "a"
    for byte in range(len(sample)):
        flipped = bytearray(sample)
        flipped[byte] ^= 1 << byte % 8
        path.write_bytes(flipped)
        with pytest.raises(InputError, match="damaged"):
            Learner.load(path)


def test_an_outline_has_all_but_the_tensors_and_reads_no_more_than_the_header(tmp_path, sample, monkeypatch):
    path = tmp_path / "a"
    path.write_bytes(sample)
    content = read_state(path)
    monkeypatch.setattr(Path, "read_bytes", None)
    outline = read_outline(path)
    assert {name: outline[name] for name in outline if name != "state"} == {
        name: content[name] for name in content if name != "state"
    }
    assert outline["state"].keys() == content["state"].keys()
    for name, tensor in content["state"]["model"].items():
        placeholder = outline["state"]["model"][name]
        assert (placeholder.shape, placeholder.dtype, placeholder.device.type) == (tensor.shape, tensor.dtype, "meta")


def test_an_outline_of_a_file_cut_off_is_refused_and_one_of_a_changed_header_raises_no_other_error(tmp_path, sample):
    path, start = tmp_path / "a", 8 + int.from_bytes(sample[:8], "little")
    for end in (*range(0, len(sample), 7), len(sample) - 1):
        path.write_bytes(sample[:end])
        with pytest.raises(InputError, match="damaged"):
            read_outline(path)
    for byte in range(start):
        flipped = bytearray(sample)
        flipped[byte] ^= 1 << byte % 8
        path.write_bytes(flipped)
        with suppress(InputError):  # the header alone has no digest
            assert isinstance(read_outline(path), dict)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_other_bytes_are_refused(tmp_path, sample, data):
    """Cut off, lengthened, pieced together anew, or nothing like it."""
    cut = st.integers(0, len(sample))
    changed = data.draw(
        st.one_of(
            cut.map(lambda end: sample[:end]),
            st.binary(min_size=1, max_size=50).map(lambda suffix: sample + suffix),
            st.tuples(cut, cut, st.binary(max_size=20)).map(
                lambda cuts: sample[: cuts[0]] + cuts[2] + sample[cuts[1] :]
            ),
            st.binary(max_size=300),
            st.binary(max_size=300).map(lambda junk: len(junk).to_bytes(8, "little") + junk),
        )
    )
    if changed == sample:
        return
    (tmp_path / "a").write_bytes(changed)
    with pytest.raises(InputError, match="path: got .*a'"):
        Learner.load(tmp_path / "a")


def sealed_file(header, tensors):
    """A file as it is documented to be, written here by other means."""
    header = header | {"sha256": "0" * 64}
    data = safetensors.torch.save(tensors, {"parabolic": json.dumps(header)})
    return data.replace(b"0" * 64, hashlib.sha256(data).hexdigest().encode(), 1)


def header_and_tensors(data):
    """What a file says, and its tensors."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["parabolic"])
    return header, safetensors.torch.load(data)


def test_the_file_is_as_documented(tmp_path, sample):
    header, tensors = header_and_tensors(sample)
    (tmp_path / "a").write_bytes(sealed_file(header, tensors))
    assert Learner.load(tmp_path / "a").steps == 1


def test_tensors_of_every_kind_are_written_as_other_readers_find_them(tmp_path):
    integers, base = torch.arange(-6, 6).view(3, 4), torch.randn(4, 5, dtype=torch.float64)
    common = [
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.float16,
        torch.bfloat16,
        torch.float32,
    ]
    rare = [torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2]
    tensors = {str(dtype): integers.to(dtype) for dtype in common + rare}
    tensors |= {"turned": base.T, "part": base[1:, ::2], "one": base[0, 0], "none": torch.empty(0, 3), "again": base}
    tensors |= {"stretched": torch.ones(1, 3).expand(2, 3), "weight": nn.Parameter(base), "größe": torch.ones(1)}
    (tmp_path / "a").write_bytes(pack_state({"tensors": tensors}))
    _, read_by_others = header_and_tensors((tmp_path / "a").read_bytes())
    ours = read_state(tmp_path / "a")["tensors"]
    assert read_by_others.keys() == {f"tensors.{name}" for name in tensors}
    for name, tensor in tensors.items():
        assert same_state(read_by_others[f"tensors.{name}"], tensor)
        assert same_state(ours[name], tensor)


def test_names_that_are_no_utf_8_are_read_again(tmp_path):
    """Such as names of files, as Python has them."""
    content = {os.fsdecode(b"\xff"): torch.ones(2), "\\udcff": torch.zeros(1)}
    (tmp_path / "a").write_bytes(pack_state({"notes": content}))
    assert same_state(read_state(tmp_path / "a")["notes"], content)
    assert read_outline(tmp_path / "a")["notes"].keys() == content.keys()


@pytest.mark.parametrize("unusual", [torch.eye(2).to_sparse(), torch.ones(2, dtype=torch.complex128)])
def test_tensors_that_no_file_takes_are_named(unusual):
    with pytest.raises(InputError, match=r"^notes.0: got a tensor .* expected a dense tensor of a type that"):
        pack_state({"notes": [unusual]})


def test_a_file_of_a_later_version_is_refused(tmp_path, sample):
    header, tensors = header_and_tensors(sample)
    (tmp_path / "a").write_bytes(sealed_file(header | {"version": 3}, tensors))
    with pytest.raises(InputError, match="of version 3, expected a file of version 2 or earlier; install a newer"):
        Learner.load(tmp_path / "a")


@pytest.mark.parametrize("section", ["learner", "fields", "made", "given", "state", "backbone"])
def test_a_file_whose_sections_are_of_another_kind_is_refused(tmp_path, section):
    path = tmp_path / "a"
    path.write_bytes(pack_state(describe(SGD(nn.Linear(3, 4))) | {section: 5}))
    for read_file in (
        lambda: Learner.load(path, model=nn.Linear(3, 4)),
        lambda: saving.read_learner(path, outline=True),
    ):
        with pytest.raises(InputError, match="^path: .* expected a file of a learner; it holds something else"):
            read_file()


def test_a_file_is_no_way_to_run_code_or_to_set_what_a_learner_does_not_have(tmp_path):
    path, content, ran = tmp_path / "a", describe(SGD(nn.Linear(3, 4))), tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nfrom torch.optim import SGD")
    for fields, message in (
        ({"optimizer": f"{tmp_path / 'evil.py'}:SGD"}, "^optimizer: .* expected none that a file names; do not trust"),
        ({"colour": "red"}, "^path: .* expected options that SGD has in this version; .*colour"),
    ):
        path.write_bytes(pack_state(content | {"fields": content["fields"] | fields}))
        with pytest.raises(InputError, match=message):
            Learner.load(path, model=nn.Linear(3, 4))
    importlib.import_module("parabolic.experiments")  # as a program has that also makes runs
    for arguments in ({"learner": f"{tmp_path / 'evil.py'}:SGD"}, {"stream": f"{tmp_path / 'evil.py'}:SGD"}):
        path.write_bytes(pack_state(content | {"made": {"prepare": ("parabolic.experiments.spec:RunSpec", arguments)}}))
        with pytest.raises(InputError, match="^prepare: got .*RunSpec', expected a class that this version of"):
            Learner.load(path, model=nn.Linear(3, 4))
    assert not ran.exists()
    path.write_bytes(pack_state(content | {"state": {"steps": 3}}))
    with pytest.raises(InputError, match="^path: .* expected a file of a learner; it holds something else"):
        Learner.load(path, model=nn.Linear(3, 4))


def test_what_is_no_model_is_refused_before_anything_is_loaded_into_it(tmp_path):
    path = SGD(nn.Linear(3, 4)).save(tmp_path / "a")
    with pytest.raises(InputError, match="^model: got 'mlp', expected a torch.nn.Module"):
        Learner.load(path, model="mlp", device="cpu")


def test_a_network_without_a_linear_layer_is_restored_too(tmp_path):
    def make_model():
        return nn.Sequential(nn.Conv1d(2, 4, 3), nn.Flatten())

    learner = SGD(make_model())
    learner.observe(torch.randn(8, 2, 3), torch.arange(8) % 4)
    loaded = Learner.load(learner.save(tmp_path / "a"), model=make_model())
    assert same_state(loaded.state_dict(), learner.state_dict())


def test_files_of_others_are_refused(tmp_path):
    safetensors.torch.save_file({"weight": torch.ones(3)}, tmp_path / "foreign")
    torch.save({"weight": torch.ones(3)}, tmp_path / "zip")
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("hello")
    (tmp_path / "list").write_bytes(pack_state([1]))
    for name in ("foreign", "zip", "empty", "text", "list"):
        with pytest.raises(InputError, match=f"{name}', expected a whole file that parabolic wrote"):
            Learner.load(tmp_path / name)
    (tmp_path / "something").write_bytes(pack_state({"a": 1}))
    with pytest.raises(InputError, match="expected a file of a learner"):
        Learner.load(tmp_path / "something")
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(InputError, match="expected a file that can be read"):
            Learner.load(path)


class Trap:
    """What a pickle would run."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_loading_unpickles_nothing(tmp_path, sample, monkeypatch):
    (tmp_path / "pickle").write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    torch.save(Trap(tmp_path / "sprung"), tmp_path / "torch")
    (tmp_path / "good").write_bytes(sample)

    def forbidden(*args, **options):
        raise AssertionError("a pickle was read")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, forbidden)
    assert Learner.load(tmp_path / "good").steps == 1
    for name in ("pickle", "torch"):
        with pytest.raises(InputError):
            Learner.load(tmp_path / name)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    ("section", "value"),
    [
        ("learner", "trap:Trap"),
        ("made", {"dict": [["prepare", {"tuple": ["trap:Trap", {"dict": []}]}]]}),
        ("made", {"dict": [["prepare", {"tuple": ["parabolic.trap:Trap", {"dict": []}]}]]}),
        ("backbone", {"tuple": ["trap:Trap", {"dict": []}]}),
    ],
)
def test_a_forged_file_imports_nothing(tmp_path, sample, monkeypatch, section, value):
    """Whoever writes a file can give it a right digest; it still cannot name code to be run."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "trap.py").write_text("from pathlib import Path\nPath(__file__).with_name('sprung').touch()\n")
    header, tensors = header_and_tensors(sample)
    content = dict(header["content"]["dict"])
    content[section] = value
    header["content"]["dict"] = [list(pair) for pair in content.items()]
    (tmp_path / "a").write_bytes(sealed_file(header, tensors))
    with pytest.raises(InputError, match="trap:Trap"):
        Learner.load(tmp_path / "a")
    assert not (tmp_path / "sprung").exists()


# -- writing -----------------------------------------------------------------------------------------------


def test_what_cannot_be_written_down_is_refused_and_named(tmp_path):
    class Odd(SGD):
        def state_dict(self):
            return super().state_dict() | {"odd": [object()]}

    with pytest.raises(InputError, match=r"state.odd.0: got <class 'object'>"):
        Odd(net()).save(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_fails_leaves_the_file_that_was_there(tmp_path, monkeypatch):
    learner = make_learner("er")
    learner.save(tmp_path / "a")
    before = (tmp_path / "a").read_bytes()

    def fail_halfway(self, data):
        with open(self, "wb") as file:
            file.write(data[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail_halfway)
    learn(learner, 0, 1)
    with pytest.raises(InputError, match="No space left on device .* an existing file is unchanged"):
        learner.save(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_others_predict_while_a_file_is_written(tmp_path, monkeypatch):
    learner = make_learner("er")
    learn(learner, 0, 1)
    prediction = threading.Thread(target=learner.predict, args=(batches()[0][0],))

    def write_while_predicting(path, data):
        prediction.start()
        prediction.join(60)
        assert not prediction.is_alive()
        return write_bytes(path, data)

    monkeypatch.setattr(saving, "write_bytes", write_while_predicting)
    learner.save(tmp_path / "a")
    assert same_state(Learner.load(tmp_path / "a").state_dict(), learner.state_dict())


def test_a_file_counts_as_written_when_it_is_on_disk(tmp_path, monkeypatch):
    """First what it holds, then its name: a power failure at any moment leaves the old file or the new."""
    events = []

    def sync(descriptor, sync=os.fsync):
        events.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        sync(descriptor)

    def replace(*paths, replace=os.replace):
        events.append("name")
        replace(*paths)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", replace)
    make_learner("er").save(tmp_path / "a")
    assert events == ["file", "name", "folder"]


def test_what_is_no_file_is_refused_and_left_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    learner = make_learner("sgd")
    os.mkfifo("pipe")
    os.symlink("pipe", "link")
    os.symlink("loop", "loop")
    Path("folder").mkdir()
    before = sorted(tmp_path.iterdir())
    for name, message in [
        ("pipe", r"a pipe \(pipe\)"), ("link", r"a pipe \(link\)"), ("folder", r"a folder \(folder\)"),
        (".", r"a folder \(.\)"), ("", r"a folder \(.\)"), ("/", r"a folder \(/\)"),
    ]:  # fmt: skip
        with pytest.raises(InputError, match=f"path: got {message}, expected a file, or a name that is free; name"):
            learner.save(name)
    with pytest.raises(InputError, match="path: got Too many levels of symbolic links"):
        learner.save("loop")
    assert sorted(tmp_path.iterdir()) == before
    assert stat.S_ISFIFO(os.lstat("pipe").st_mode)


def test_a_link_is_followed(tmp_path):
    """To a file or to where one will be, by another link too; what is written aside is beside the file."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to(tmp_path / "disk" / "new" / "file")
    for seed in (0, 1):
        learner = make_learner("sgd", seed=seed)
        assert learner.save(tmp_path / "a") == tmp_path / "a"
        assert Learner.load(tmp_path / "disk" / "new" / "file").seed == seed
    assert [path.name for path in (tmp_path / "disk" / "new").iterdir()] == ["file"]
    assert (tmp_path / "a").is_symlink()
    assert (tmp_path / "b").is_symlink()


def test_a_batch_unlike_the_first_is_refused_after_a_load_too(tmp_path):
    learner = make_learner("sgd")
    learn(learner, 0, 1)
    learner.save(tmp_path / "a")
    loaded = Learner.load(tmp_path / "a")
    with pytest.raises(InputError, match="examples as in the first batch"):
        loaded.observe(torch.zeros(2, 1, 8, 8, dtype=torch.uint8), torch.tensor([0, 1]))


def test_a_generator_of_another_kind_of_device_is_seeded_by_the_state():
    """As from a GPU, whose generators have 16 bytes: the draws differ, but are the same at every load."""
    learner = make_learner("er")
    learn(learner, 0, 2)
    state = learner.state_dict() | {"generator": torch.arange(16, dtype=torch.uint8)}
    draws = []
    for change in (0, 0, 1):
        restored = make_learner("er")
        restored.load_state_dict(state | {"generator": state["generator"] + change})
        assert same_state(restored.state_dict()["memory"], state["memory"])
        draws.append(torch.rand(3, generator=restored.generator))
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("saved", "loaded"), [("cpu", "cuda"), ("cuda", "cpu"), ("cuda", "cuda")])
def test_a_learner_changes_devices(tmp_path, name, saved, loaded):
    learner = make_learner(name, optimizer="Adam", lr=0.01)
    learner.save(tmp_path / "new")
    learner = Learner.load(tmp_path / "new", device=saved)
    learn(learner, 0, 5)
    learner.save(tmp_path / "a")
    on_other_device = Learner.load(tmp_path / "a", device=loaded)
    assert on_other_device.device.type == loaded
    assert same_state(dict(learner.model.state_dict()), dict(on_other_device.model.state_dict()))
    if isinstance(learner, ReplayLearner):
        assert isinstance(on_other_device.past, Memory)
        assert same_state(learner.past.state_dict(), on_other_device.past.state_dict())
    learn(on_other_device, 5, LENGTH)
    if saved == loaded:
        learn(learner, 5, LENGTH)
        assert same_state(learner.state_dict(), on_other_device.state_dict())


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_a_device_that_is_not_there_is_named(device, tmp_path):
    ER(MLP((3,), 2), memory=50).save(tmp_path / "er")
    with pytest.raises(InputError, match=f"^device: got '{device}', expected a device of this machine, such as cpu; "):
        Learner.load(tmp_path / "er", device=device)


@pytest.mark.skipif(os.name != "posix", reason="needs the signals of POSIX")
def test_what_a_kill_during_a_save_leaves_behind_is_removed_by_a_later_save(tmp_path):
    """Also where the name looks like a pattern, and where the file is behind a link."""
    folder, link = tmp_path / "files", tmp_path / "link"
    folder.mkdir()
    link.symlink_to(folder / "a[1].safetensors")
    code = """if True:
        import os, signal, sys, torch
        from parabolic import ER
        os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
        ER(torch.nn.Linear(4, 3)).save(sys.argv[1])
    """
    for _ in range(2):
        assert subprocess.run([sys.executable, "-c", code, link]).returncode == -9
    (old, young), foreign = sorted(folder.iterdir()), folder / f".b.safetensors.{'0' * 16}"
    foreign.touch()
    for path in (old, foreign):
        os.utime(path, (0, 0))
    ER(nn.Linear(4, 3)).save(link)
    assert {*folder.iterdir()} == {folder / "a[1].safetensors", young, foreign}  # one may still be written by another
    assert Learner.load(link, model=nn.Linear(4, 3)).steps == 0
