"""Learners on disk: how they were made, and their state.

A file holds everything that can be stored without code. The rest (functions, the user's own models) it only names, to
be passed again when loading.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from parabolic.backbones import BACKBONES, drawing_apart
from parabolic.checks import (
    DEVICE_ERRORS,
    Description,
    InputError,
    all_finite,
    check_module,
    check_name,
    first_line,
    invalid,
)
from parabolic.files import disk_errors, sweep_beside, write_bytes
from parabolic.learners.gradients import trainable
from parabolic.learners.head import last_linear
from parabolic.learners.learner import GO_BACK, Diverged, Learner
from parabolic.learners.optimizers import check_trained, own_optimizer
from parabolic.memory import Memory
from parabolic.states import pack_state, read_outline, read_state, same_state

__all__ = ["describe", "load", "read_learner", "restore", "save"]

Kind = TypeVar("Kind", bound=Learner)

# Where classes are that a file may name. RunSpec is not among them: it imports the learner whose name it is given.
PACKAGES = ("parabolic.memory", "parabolic.learners", "parabolic.streams.augment")


def save(learner: Learner, path: str | Path) -> Path:
    """Write a learner to a file."""
    path = Path(path)
    with learner._lock_to_read():
        learner.check_whole("save")
        if not all(all_finite(weight) for weight in trainable(learner.model)):
            raise Diverged(f"save: weights are NaN or infinite, so {path} is left unchanged; {GO_BACK}")
        packed = pack_state(describe(learner))
    with disk_errors("path", path.parent, "free some space or name another folder; an existing file is unchanged"):
        sweep_beside(path)  # else every save that was killed would leave a file for good
        return write_bytes(path, packed)


def load(
    cls: type[Kind], path: str | Path, model: nn.Module | None, device: torch.device | str | None, given: dict[str, Any]
) -> Kind:
    """Load the learner from a file; see `Learner.load`."""
    saved = read_learner(Path(path))
    kind = _find_class(cls, saved["learner"])
    if extra := sorted(given.keys() - {*saved["given"], *saved["made"]}):
        raise invalid("load", Description(", ".join(extra)), "only what the file cannot hold", "leave out the others")
    if missing := sorted(set(saved["given"]) - saved["fields"].keys() - given.keys()):
        remedy = f"pass {', '.join(f'{name}=' for name in missing)} as it was: a file holds no code"
        raise invalid("load", Description(f"no {', '.join(missing)}"), f"everything that {path} cannot hold", remedy)
    if code_path := own_optimizer(saved["fields"].get("optimizer")):  # no file that `save` wrote names one
        raise invalid("optimizer", code_path, "none that a file names", "do not trust this file")
    if model is None:
        model = _rebuild(path, saved["backbone"], saved["state"]["model"])
    check_module("model", model)
    if device is not None:
        _check_device(device)
        model = model.to(device)
        given = {name: part.to(device) if isinstance(part, nn.Module) else part for name, part in given.items()}
    try:
        made = {name: _make_object(name, *recipe) for name, recipe in saved["made"].items()}
        learner = kind(model, **saved["fields"] | made | given | {"classes": None})  # `restore` sets the number
    except TypeError as error:
        raise invalid("path", str(path), f"options that {kind.__name__} has in this version", str(error)) from error
    restore(learner, saved)
    return learner


def read_learner(path: Path, *more: str, outline: bool = False) -> dict[str, Any]:
    """The contents of a learner's file, which must also have the sections `more`.

    With `outline`, its tensors have a shape and a type, but no numbers (`read_outline`).
    """
    saved = read_outline(path) if outline else read_state(path)
    kinds: dict[str, Any] = dict.fromkeys(more, dict)
    kinds |= {"learner": str, "fields": dict, "made": dict, "given": list, "state": dict, "backbone": tuple | None}
    complete = all(name in saved and isinstance(saved[name], kind) for name, kind in kinds.items())
    if not (complete and isinstance(saved["state"].get("model"), dict)):
        raise invalid("path", str(path), f"a file of {' and '.join(['a learner', *more])}", "it holds something else")
    return saved


def describe(learner: Learner) -> dict[str, Any]:
    """A learner in the form that `pack_state` accepts: its class and options by name, and its state."""
    description: dict[str, Any] = {
        "learner": _class_path(type(learner)), "backbone": _describe_backbone(learner.body),
        "fields": {}, "made": {}, "given": [], "state": learner.state_dict(),
    }  # fmt: skip
    for field in dataclasses.fields(learner):
        if field.name != "model" and field.init:
            _describe_option(description, field.name, getattr(learner, field.name))
    if "memory" in description["given"]:
        memory: Any = getattr(learner, "memory", None)
        kind = type(memory)
        if kind is getattr(learner, "policy", None) and [*inspect.signature(kind).parameters] == ["capacity"]:
            description["fields"]["memory"] = memory.capacity  # from which the learner's class makes one like it
    return description


def _describe_option(description: dict[str, Any], name: str, value: Any) -> None:
    """Add an option to a description: its value, else how to make it, else only its name."""
    if _is_plain(value) and not own_optimizer(value if name == "optimizer" else None):
        description["fields"][name] = value
    elif (arguments := _arguments(value)) is not None:
        description["made"][name] = (_class_path(type(value)), arguments)
    else:
        description["given"].append(name)


def restore(learner: Learner, saved: Mapping[str, Any]) -> None:
    """Restore the state of a learner with the same options; one that does not fit is refused, changing nothing."""
    classes, own = saved["fields"].get("classes"), describe(learner)
    criterion = learner.error if classes is None else learner.error.widened(classes)
    _describe_option(own, "criterion", criterion)
    _check_description(own, saved)
    state = _with_names_of(saved["state"], own["state"])
    outputs = _check_model(learner, state["model"])
    check_trained(learner.optim, state.get("optimizer"))
    # These are the user's and may hold anything: only those with a state are copied.
    callables = (learner.prepare, learner.augment)
    shared = {id(part): part for part in callables if not hasattr(part, "load_state_dict")}
    rehearsal = copy.deepcopy(learner, shared)
    try:
        _take_over(rehearsal, state, outputs)
    except (InputError, RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        got = Description(" ".join(str(error).split()))
        raise invalid("state", got, f"the state of a {type(learner).__name__} like this") from error
    _take_over(learner, state, outputs)
    learner.classes, learner.criterion = classes, criterion


def _check_device(device: torch.device | str) -> None:
    expected = "a device of this machine, such as cpu"
    try:
        place = torch.device(device)
        if place.type == "cuda" and (place.index or 0) >= (count := torch.cuda.device_count()):
            raise invalid("device", str(device), expected, f"there are {count} CUDA devices here, counted from 0")
        torch.empty(0, device=place)
    except DEVICE_ERRORS:
        raise
    except (RuntimeError, AssertionError) as error:  # which one depends on how torch was built
        raise invalid("device", str(device), expected, first_line(error)) from error


def _take_over(learner: Learner, state: Mapping[str, Any], outputs: int) -> None:
    if outputs:
        learner.grow(outputs)
    learner.load_state_dict(state)


def _with_names_of(state: Any, like: Any) -> Any:
    """A state with its names as in another: torch.compile adds a prefix to the names of what it wraps."""
    if not (isinstance(state, dict) and isinstance(like, dict)):
        return state
    names = {_uncompiled_name(name): name for name in like}
    renamed = copy.copy(state)  # keeps the versions of a model's modules
    renamed.clear()
    for name, value in state.items():
        own_name = names.get(_uncompiled_name(name), name)
        renamed[own_name] = _with_names_of(value, like.get(own_name))
    return renamed


def _uncompiled_name(name: Any) -> Any:
    """A name without the prefix of torch.compile."""
    return name.replace("_orig_mod.", "") if isinstance(name, str) else name


def _find_class(cls: type[Kind], path: str) -> type[Kind]:
    """The class at that path, if it is already imported: nothing is imported because a file says so."""
    from parabolic.learners.registry import built_in

    built_in()
    found = [kind for kind in (cls, *_subclasses(cls)) if _class_path(kind) == path]
    # A class of a script is in the module "__main__" when the script runs, and in another when it is imported.
    if not found and cls is not Learner and cls.__qualname__ == path.rpartition(":")[2]:
        found = [cls]
    if not found:
        remedy = "import the module that defines it first" if cls is Learner else "call Learner.load"
        raise invalid("learner", path, f"a {cls.__name__} that has been imported", remedy)
    return found[-1]


def _subclasses(cls: type[Kind]) -> Iterator[type[Kind]]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _class_path(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _is_plain(value: Any) -> bool:
    """Whether a value can be stored as it is."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | Tensor)


def _arguments(value: Any) -> dict[str, Any] | None:
    """The arguments that an object of this package was made with; None if they cannot be stored."""
    if not _may_be_made(type(value)):
        return None
    if isinstance(value, Memory):
        return value.arguments
    arguments = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    return arguments if all(map(_is_plain, arguments.values())) else None


def _make_object(name: str, path: str, arguments: dict[str, Any]) -> Any:
    """Make an object of this package: a memory or a dataclass."""
    module, _, class_name = path.rpartition(":")
    if module.startswith("parabolic.streams."):  # whose `prepare` and `augment` a learner may have been given
        import_module("parabolic.streams")
    cls: Any = getattr(sys.modules.get(module), class_name, None)
    if not (isinstance(cls, type) and _may_be_made(cls)):
        raise invalid(name, path, "a class that this version of parabolic has")
    try:
        return cls(**arguments)
    except TypeError as error:
        raise invalid(name, path, "arguments that it accepts", str(error)) from error


def _may_be_made(cls: type) -> bool:
    """Whether a file may name a class: a memory of this package, or a dataclass that is not a learner."""
    is_ours = any(f"{cls.__module__}.".startswith(f"{package}.") for package in PACKAGES)
    return is_ours and (issubclass(cls, Memory) or (dataclasses.is_dataclass(cls) and not issubclass(cls, Learner)))


def _describe_backbone(model: nn.Module) -> tuple[str, dict[str, Any]] | None:
    """The name and arguments of a network of this package, with its current number of classes."""
    model = getattr(model, "_orig_mod", model)  # compiled or not
    name = next((name for name, kind in BACKBONES.items() if kind is type(model)), None)
    if name is None:
        return None
    arguments: Any = model.arguments
    return name, {**arguments, "classes": last_linear(model)[1].out_features}


def _rebuild(path: str | Path, backbone: tuple[str, dict[str, Any]] | None, weights: Mapping[str, Tensor]) -> nn.Module:
    if backbone is None:
        raise invalid("model", None, f"the network that {path} holds the weights of", "pass model=")
    name, arguments = backbone
    check_name("backbone", name, BACKBONES)
    factory: Callable[..., nn.Module] = BACKBONES[name]
    with drawing_apart():
        model = factory(**arguments)
    types = [weight.dtype for weight in weights.values() if isinstance(weight, Tensor) and weight.is_floating_point()]
    return model.to(dtype=types[-1] if types else None)  # the first may be those of `embed`, of another type


def _check_description(own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Refuse the state of a learner of another class, or with other options."""
    if own["learner"].rpartition(":")[2] != saved["learner"].rpartition(":")[2]:
        raise invalid("learner", own["learner"], f"{saved['learner']}, as it was saved")
    own_options, saved_options = _options(own), _options(saved)
    for name in sorted(saved_options.keys() - {"classes"}):  # their number may have grown
        if not same_state(own_options.get(name), saved_options[name]):
            expected, remedy = f"{saved_options[name]}, as it was saved", "give the learner the options that it had"
            raise invalid(name, own_options.get(name), expected, remedy)


def _options(description: Mapping[str, Any]) -> dict[str, Any]:
    """All options by name; for one that cannot be stored, only that it is there."""
    unstored: dict[str, Any] = dict.fromkeys(description["given"], Description("one of your own"))
    return {**description["fields"], **description["made"], **unstored}


def _check_model(learner: Learner, saved: Mapping[str, Any]) -> int:
    """Refuse the weights of another model. Returns how many outputs to grow to if the saved one had grown, else 0."""
    own_kinds, stored_kinds = (
        {name: (tuple(value.shape), value.dtype) for name, value in state.items() if isinstance(value, Tensor)}
        for state in (learner.model.state_dict(), saved)
    )
    grown, head_names = 0, _head_names(learner)
    for name in sorted(own_kinds.keys() | stored_kinds.keys()):
        own, stored = own_kinds.get(name), stored_kinds.get(name)
        if own is not None and stored is not None and name in head_names and _more_rows(*own, *stored):
            grown = stored[0][0]
        elif own != stored:
            got, expected = (kind or Description("nothing") for kind in (own, stored))
            remedy = "pass a model like the one saved"
            if own is None:
                remedy += "; one that gets layers as it learns must have them all from the start"
            raise invalid(f"{name} of the model", got, f"{expected}, as it was saved", remedy)
    return grown


def _head_names(learner: Learner) -> set[str]:
    """The names of the weights to which `grow` adds rows."""
    if not learner.error.of_classes:
        return set()
    try:
        name, layer = last_linear(learner.model)
    except InputError:  # it has none
        return set()
    return {f"{name and name + '.'}{weight_name}" for weight_name, _ in layer.named_parameters()}


def _more_rows(
    own_shape: tuple[int, ...], own_type: torch.dtype, stored_shape: tuple[int, ...], stored_type: torch.dtype
) -> bool:
    return own_type == stored_type and own_shape[1:] == stored_shape[1:] and own_shape[0] < stored_shape[0]
