"""Options and errors: what is stated of an option holds for every type, and an error is there in parts."""

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from parabolic import ER, PCL, SI, InputError, Memory
from parabolic.checks import Description, invalid
from parabolic.estimators import ParabolicClassifier
from parabolic.experiments import Preset
from parabolic.options import check_options, option, options_of
from parabolic.states import Damaged, read_state


@dataclass
class Settings:
    size: int = option(1, "how large", among=(1, 2, 4))
    share: float | None = option(None, "how much", among=(0.5, 1.0))
    kind: str = option("plain", "which", among=("plain", "fancy"))
    place: str | Path = option("here", "where it is")
    made: str | Callable[..., int] = option("int", "how it is made")
    fast: bool = option(False, "whether it hurries")

    def __post_init__(self):
        check_options(self)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("size", 3, "size: got 3, expected one of 1, 2, 4"),
        ("size", 1.0, "size: got 1.0, expected a whole number"),
        ("size", True, "size: got True, expected a whole number"),
        ("share", 0.7, "share: got 0.7, expected one of 0.5, 1.0, or none"),
        ("kind", "fanci", "kind: got 'fanci', expected one of fancy, plain; did you mean 'fancy'?"),
        ("kind", len, "kind: got <built-in function len>, expected one of plain, fancy"),
        ("place", len, "place: got <built-in function len>, expected where it is"),
        ("made", 3, "made: got 3, expected how it is made"),
        ("fast", np.int64(1), "fast: got 1, expected true or false"),
        ("size", np.bool_(True), "size: got True, expected a whole number"),
    ],
)
def test_values_that_an_option_does_not_take_are_refused(name, value, message):
    with pytest.raises(InputError) as error:
        Settings(**{name: value})
    assert str(error.value) == message


def test_values_that_an_option_takes():
    chosen = Settings(size=4, share=1, kind="fancy", place=Path("there"), made=len)
    assert (chosen.size, chosen.share, chosen.kind, chosen.place, chosen.made) == (4, 1.0, "fancy", Path("there"), len)
    options = options_of(Settings)
    assert [options[name].allowed for name in ("size", "share", "kind")] == [
        "1, 2, 4",
        "0.5, 1.0, or none",
        "plain, fancy",
    ]
    assert (options["size"].parse("2"), options["share"].parse("none")) == (2, None)
    assert Settings(fast=np.bool_(True)).fast is True
    assert PCL(nn.Linear(2, 2), shared=np.array([True]).any()).shared is True


@pytest.mark.parametrize(("cls", "name"), [(PCL, "endpoints"), (SI, "variant")])
def test_a_function_is_no_name(cls, name):
    with pytest.raises(InputError, match=f"^{name}: got <built-in function print>, expected one of "):
        cls(nn.Linear(2, 2), **{name: print})


def test_an_optimizer_s_class_and_a_memory_are_taken_as_they_are():
    learner = ER(nn.Linear(2, 2), optimizer=torch.optim.Adam, memory=Memory(50))
    assert isinstance(learner.optim, torch.optim.Adam)
    assert learner.past.capacity == 50


# -- errors ------------------------------------------------------------------------------------------------------------


def test_an_error_is_there_in_parts_and_may_be_changed_on_its_way():
    error = invalid("rate", torch.zeros(2), "a number", "take its mean")
    parts = ("rate", "a tensor of shape [2] and type float32", "a number", "take its mean")
    for error_or_copy in (error, pickle.loads(pickle.dumps(error))):
        assert (error_or_copy.name, error_or_copy.got, error_or_copy.expected, error_or_copy.remedy) == parts
        assert (
            str(error_or_copy) == "rate: got a tensor of shape [2] and type float32, expected a number; take its mean"
        )
        assert error_or_copy.args == (str(error_or_copy),)
    error.name, error.remedy = "--rate", ""
    assert str(error) == "--rate: got a tensor of shape [2] and type float32, expected a number"
    plain = InputError("no luck")
    plain.name = "rate"
    assert (str(plain), plain.got) == ("no luck", "")
    assert str(invalid("a", Description("x"), "y")) == "a: got x, expected y"


def test_errors_that_others_pass_on_keep_their_parts(tmp_path):
    (tmp_path / "a").write_bytes(b"no state")
    with pytest.raises(Damaged) as damaged:
        read_state(tmp_path / "a")
    assert (damaged.value.name, damaged.value.got) == ("path", repr(str(tmp_path / "a")))
    with pytest.raises(InputError, match="^X: got .*, expected examples that the model accepts") as bad_model:
        ParabolicClassifier("sgd", model=nn.Linear(3, 2)).fit([[0.0, 1.0]] * 4, [0, 1, 0, 1])
    assert bad_model.value.name == "X"
    with pytest.raises(InputError, match="^preset 'mine': lr: got -1.0, expected a number above 0$") as bad_preset:
        Preset("mine", "er", settings={"lr": -1.0}).spec()
    assert bad_preset.value.got == "-1.0"
