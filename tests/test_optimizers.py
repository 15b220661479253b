"""Optimisers of one's own: named by their path in runs, or the default of a class."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from parabolic import ER, InputError, Learner, LwF, RunSpec, Store, run
from parabolic.experiments import build, execute, load_preset
from parabolic.experiments.code import own_code_of
from parabolic.learners.moving import move
from parabolic.learners.optimizers import count_steps_on
from parabolic.states import pack_state, read_state

LION = """
import torch

class Lion(torch.optim.SGD):
    def __init__(self, parameters, lr, weight=1.0):
        super().__init__(parameters, lr=weight * lr)
"""
MINE = """
from collections.abc import Callable
from functools import partial
from typing import Any

from parabolic import SGD
from parabolic.options import option
from lion import Lion

class Mine(SGD):
    optimizer: Any = Lion

class Unnamed(SGD):
    optimizer: Any = partial(Lion, weight=0.01)

half, len = partial(Lion, weight=0.01), len

class Hooked(SGD):
    hook: Callable = option(len, "something to call")

class Half(SGD):
    optimizer: str | Callable = half

class Paired(SGD):
    shares: tuple = option((1, (2, 3)), "a default that files have as lists")
"""
SPEC = {"stream": "seq-blobs", "backbone": "mlp"}
QUICK = ("--stream", "seq-blobs", "--set", "backbone=mlp", "--device", "cpu", "--json")


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("lion.py").write_text(LION)
    Path("mine.py").write_text(MINE)


def accuracy(learner, lr=0.1, **options):
    return execute(RunSpec(learner, **SPEC, options={"lr": lr, **options}), device="cpu").accuracy


def test_a_run_names_an_optimiser_of_ones_own():
    assert accuracy("sgd", optimizer="lion.py:Lion") == accuracy("sgd")
    assert accuracy("sgd", optimizer="lion.py:Lion(weight=0.01)") == accuracy("sgd", lr=0.001) != accuracy("sgd")


@pytest.mark.parametrize("workers", ["0", "1"])
def test_the_command_line_and_presets_do_too(workers, parabolic):
    arguments = ("compare", "--learners", "sgd", "--seeds", "1", "--workers", workers, *QUICK)
    code, out, err = parabolic(*arguments, "--set", "optimizer=lion.py:Lion(weight=0.01)")
    assert (code, err) == (0, "")
    assert json.loads(out)["runs"][0]["accuracy"] == accuracy("sgd", lr=0.001)
    Path("p").mkdir()
    Path("lion.py").rename("p/lion.py")
    Path("p/half.toml").write_text('learner = "sgd"\n[settings]\noptimizer = "lion.py:Lion(weight=0.01)"\n')
    spec = load_preset("p/half.toml").spec()
    assert spec.options == {"optimizer": "p/lion.py:Lion(weight=0.01)"}


def test_the_file_of_an_optimiser_is_part_of_the_runs_code():
    spec, store = RunSpec("sgd", **SPEC, options={"optimizer": "lion.py:Lion"}), Store("runs")
    assert not run(spec, store, device="cpu")[1]
    assert run(spec, store, device="cpu")[1]
    before = own_code_of(spec)
    Path("lion.py").write_text(LION + "# edited")
    assert own_code_of(spec) != before
    assert store.find(spec) is None


def test_runs_of_one_shape_have_the_same_code():
    """Runs side by side note the code of the first."""
    Path("tiger.py").write_text(LION)
    names = ("SGD", "Adam", "lion.py:Lion", "lion.py:Lion(weight=0.01)", "tiger.py:Lion")
    sgd, adam, lion, slow, tiger = (RunSpec("er", options={"optimizer": name}).shape for name in names)
    assert sgd == adam
    assert lion == slow
    assert len({sgd, lion, tiger}) == 3


@pytest.mark.parametrize(("learner", "name", "lr"), [("Mine", "Lion", 0.1), ("Half", "half", 0.001)])
def test_an_optimiser_as_the_default_of_a_class(learner, name, lr, parabolic):
    code, out, err = parabolic("run", "--learner", f"mine.py:{learner}", *QUICK)
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert result["accuracy"] == accuracy("sgd", lr=lr)
    assert result["spec"]["options"]["optimizer"] == f"mine.py:{name}"
    spec = RunSpec(**result["spec"])
    assert spec.key == result["key"]
    assert execute(spec, device="cpu").accuracy == result["accuracy"]
    assert json.loads(parabolic("run", "--learner", f"mine.py:{learner}", *QUICK)[1])["reused"]
    assert parabolic("list", f"mine.py:{learner}", "--json")[0] == 0


def test_a_spec_from_a_record_has_the_objects_that_are_defaults():
    spec = RunSpec("mine.py:Hooked").resolved()
    assert spec["options"]["hook"] == "mine.py:len"
    assert RunSpec(**spec).options.keys() == spec["options"].keys() - {"hook"}
    assert build(RunSpec(**spec), device="cpu")[0].hook is len


def test_a_run_of_a_class_with_a_tuple_as_default_is_found_again():
    spec, store = RunSpec("mine.py:Paired", **SPEC), Store("runs")
    record, _ = run(spec, store, device="cpu")
    assert run(spec, store, device="cpu") == (record, True)
    assert RunSpec(**store.find(spec).spec).key == spec.key
    assert build(spec, device="cpu")[0].shares == (1, (2, 3))


def test_another_optimiser_than_the_default_of_a_class_makes_another_run():
    default_spec, adam_spec = RunSpec("mine.py:Mine"), RunSpec("mine.py:Mine", options={"optimizer": "Adam"})
    assert adam_spec.options == {"optimizer": "Adam"}
    assert adam_spec.key != default_spec.key == RunSpec("mine.py:Mine", options={"optimizer": "mine.py:Lion"}).key


def test_an_object_that_is_a_default_is_named_as_the_file_that_a_spec_names_has_it():
    Path("other.py").write_text("from lion import Lion as Tiger\nfrom mine import Mine\n")
    assert RunSpec("other.py:Mine").resolved()["options"]["optimizer"] == "other.py:Tiger"


def test_a_default_without_a_name_is_refused_when_the_spec_is_made():
    message = (
        r"^Unnamed.optimizer: got .*, expected a default that can be saved as text; assign it to a name at the top"
    )
    with pytest.raises(InputError, match=message):
        RunSpec("mine.py:Unnamed")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lion.py:Tiger", "optimizer: got 'lion.py:Tiger', expected a name that lion.py defines"),
        ("no.py:Lion", "optimizer: got 'no.py:Lion', expected file.py:name of an existing file"),
        ("lion.py:Lion(depth=1)", r"optimizer: got .*Lion.*, expected a function that is called as optimizer\(param"),
        ("lion.py:Lion(lr=1)", "optimizer: got 'lion.py:Lion.lr=1.', expected no lr among the arguments"),
        ("lion.py:Lion(0.5)", "optimizer: got .*, with arguments by name"),
        ("lion.py:Lion(weight=f())", "optimizer: got .*, expected .* plain values"),
    ],
)
def test_one_that_cannot_be_used_is_refused_when_the_spec_is_made(text, message):
    with pytest.raises(InputError, match=f"^{message}"):
        RunSpec("sgd", options={"optimizer": text})


def test_what_makes_no_optimiser_is_refused():
    Path("lion.py").write_text("def Lion(parameters, lr): return 3")
    with pytest.raises(InputError, match="^optimizer: got .*int.*, expected a factory of an optimiser"):
        ER(nn.Linear(2, 2), optimizer="lion.py:Lion")


def test_lwf_leaves_the_weight_decay_of_ones_own_alone():
    decays = {
        text: LwF(nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2)), optimizer=text).optim.param_groups[0]["weight_decay"]
        for text in ("SGD", "SGD(weight_decay=0.1)", "lion.py:Lion")
    }
    assert list(decays.values()) == [5e-4, 0.1, 0]


def test_a_saved_learner_names_no_code():
    """Loading imports nothing that a file names, even if someone else has written the name into it."""
    learner = ER(nn.Linear(2, 2), optimizer="lion.py:Lion(weight=0.01)", lr=0.1)
    path = learner.save("er.safetensors")
    assert b"lion" not in path.read_bytes()
    with pytest.raises(InputError, match="^load: got no optimizer, expected everything .* pass optimizer= as it was"):
        Learner.load(path, model=nn.Linear(2, 2))
    loaded = Learner.load(path, model=nn.Linear(2, 2), optimizer="lion.py:Lion(weight=0.01)")
    assert loaded.optim.param_groups[0]["lr"] == learner.optim.param_groups[0]["lr"] == 0.001
    saved = read_state(path)
    Path("lion.py").write_text("open('it ran', 'w')\n" + LION)
    saved["fields"]["optimizer"], saved["given"] = "lion.py:Lion", []
    path.write_bytes(pack_state(saved))
    with pytest.raises(InputError, match="^optimizer: got 'lion.py:Lion', expected none that a file names"):
        Learner.load(path, model=nn.Linear(2, 2))
    assert not Path("it ran").exists()
    assert isinstance(loaded.optim, torch.optim.SGD)


def test_steps_are_counted_where_the_learner_is_in_weights_added_later_too():
    """A learner moved from a GPU, or settings from one, must not keep counting there: on a CPU torch refuses that."""
    learner = ER(nn.Linear(4, 3), memory=50, optimizer="Adam(capturable=True)")
    batch = torch.randn(8, 4), torch.arange(8) % 3
    learner.observe(*batch)
    count_steps_on(learner.optim, torch.device("cuda"))  # as if it came from there
    move(learner, torch.device("cpu"))
    learner.optim.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    learner.optim.param_groups[1]["params"][0].grad = torch.ones(2)
    learner.optim.step()
    learner.observe(*batch)
