"""Optimisers: made from a text, as in options, presets and command lines; their states, and their weights."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from parabolic.checks import DEVICE_ERRORS, Description, check_call, check_name, invalid
from parabolic.plugins import load_object

__all__ = [
    "check_state", "check_trained", "count_steps_on", "load_state", "make_optimizer", "own_optimizer",
    "parse_optimizer", "weights_of",
]  # fmt: skip

OWN_FACTORY = re.compile(r"(.+:\w+)\s*(?:\(.*\))?", re.DOTALL)  # file.py:name or module:name, and arguments

UNSUPPORTED = (torch.optim.LBFGS, torch.optim.SparseAdam)
"""Unsupported optimisers: they need the loss several times per step, or sparse gradients."""


def make_optimizer(
    optimizer: str | Callable[..., torch.optim.Optimizer], weights: Sequence[nn.Parameter], lr: float
) -> torch.optim.Optimizer:
    """The optimiser of some weights, from a text such as `SGD(momentum=0.9)` or `file.py:Lion`, or from a factory.

    >>> weights = list(nn.Linear(2, 2).parameters())
    >>> make_optimizer("SGD(momentum=0.9, nesterov=True)", weights, lr=0.1).param_groups[0]["momentum"]
    0.9
    """
    if not isinstance(optimizer, str):
        return _call_factory(optimizer, weights, lr)
    factory, arguments = parse_optimizer(optimizer)
    if own_optimizer(optimizer):
        return _call_factory(partial(factory, **arguments), weights, lr)
    try:
        return factory(weights, lr=lr, **arguments)
    except DEVICE_ERRORS:
        raise
    except Exception as error:  # its type depends on the class
        expected = f"arguments that torch.optim.{optimizer.partition('(')[0].strip()} takes"
        raise invalid("optimizer", optimizer, expected, f"it says: {error}") from error


def own_optimizer(optimizer: object) -> str:
    """The path of the user's own factory in a text; empty for a class of torch.optim, and for what is no text.

    >>> own_optimizer("mine.py:Lion(betas=(0.9, 0.99))"), own_optimizer("SGD"), own_optimizer(torch.optim.SGD)
    ('mine.py:Lion', '', '')
    """
    match = OWN_FACTORY.fullmatch(optimizer.strip()) if isinstance(optimizer, str) else None
    return match[1] if match else ""


def parse_optimizer(text: str) -> tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]:
    """The factory that a text names, a class of torch.optim or `file.py:name`, and its arguments: plain values.

    >>> parse_optimizer("AdamW(betas=(0.9, 0.99))")
    (<class 'torch.optim.adamw.AdamW'>, {'betas': (0.9, 0.99)})
    """
    remedy = "as in SGD or SGD(momentum=0.9); name your own as file.py:name"
    path = own_optimizer(text)
    try:
        node = ast.parse("own" + text.strip().removeprefix(path) if path else text.strip(), mode="eval").body
        factory_node, keywords = (
            (node.func, node.keywords) if isinstance(node, ast.Call) and not node.args else (node, [])
        )
        arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in keywords if keyword.arg is not None}
    except (SyntaxError, ValueError) as error:
        raise invalid("optimizer", text, "a class of torch.optim and plain values for its arguments", remedy) from error
    if not isinstance(factory_node, ast.Name) or len(arguments) < len(keywords):
        raise invalid("optimizer", text, "a class of torch.optim, with arguments by name", remedy)
    if "lr" in arguments:
        raise invalid("optimizer", text, "no lr among the arguments", "set the option lr instead")
    if path:
        factory = load_object("optimizer", path)
        check_call("optimizer", factory, "parameters", lr=1.0, **arguments)
        return factory, arguments
    unsupported = {torch.optim.Optimizer, *UNSUPPORTED}
    known = {name for name, value in vars(torch.optim).items() if isinstance(value, type) and value not in unsupported}
    check_name("optimizer", factory_node.id, known, remedy)
    return getattr(torch.optim, factory_node.id), arguments


def weights_of(optim: torch.optim.Optimizer) -> list[Tensor]:
    """The weights that an optimiser trains, in the order in which its state numbers them."""
    return [weight for group in optim.param_groups for weight in group["params"]]


def count_steps_on(optim: torch.optim.Optimizer, device: torch.device) -> None:
    """Have an optimiser that counts its steps (Adam) do so on a GPU itself, as in a CUDA graph; on a CPU torch cannot.

    >>> adam = torch.optim.Adam(nn.Linear(2, 2).parameters(), capturable=True)
    >>> count_steps_on(adam, torch.device("cpu"))
    >>> adam.param_groups[0]["capturable"]
    False
    """
    for group in (*optim.param_groups, optim.defaults):  # the defaults are those of groups added later
        if "capturable" in group:
            group["capturable"] = device.type == "cuda"


def check_state(optim: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Refuse the state of another optimiser: it has settings that this one lacks, and lacks some of this one's."""
    own_groups, saved_groups = optim.param_groups, state["param_groups"]
    same_sizes = [len(group["params"]) for group in own_groups] == [len(group["params"]) for group in saved_groups]
    pairs = zip(own_groups, saved_groups, strict=False)
    if not same_sizes or any(own.keys() - saved.keys() and saved.keys() - own.keys() for own, saved in pairs):
        settings = [", ".join(sorted(group.keys() - {"params"})) for group in saved_groups]
        got = Description(" and ".join(f"one with {names}" for names in settings))
        expected = f"that of {type(optim).__name__} for the weights of this model"
        raise invalid("state of the optimizer", got, expected, "make the learner with the optimizer that it had")


def check_trained(optim: torch.optim.Optimizer, state: Any) -> None:
    """Refuse the state of an optimiser of more or fewer weights: other layers were frozen then."""
    try:
        saved = sum(len(group["params"]) for group in state["param_groups"])
    except (LookupError, TypeError):  # not the state of an optimiser, which is refused when it is taken over
        return
    own = len(weights_of(optim))
    if own != saved:
        got = Description(f"one of which {own} tensors are trained")
        remedy = "freeze the same layers, before the learner is created"
        raise invalid("model", got, f"one of which {saved} are, as it was saved", remedy)


def load_state(optim: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Take over the state of another optimiser of the same kind, whatever device it was on."""
    # Where steps are counted (`capturable`) depends on the device, not on the state.
    groups = [
        {**saved, "capturable": own["capturable"]} if "capturable" in own else saved
        for saved, own in zip(state["param_groups"], optim.param_groups, strict=True)
    ]
    optim.load_state_dict({**state, "param_groups": groups})
    # Torch takes over tensors that fit without a copy, and casts others: copy each, in its own type.
    weights = weights_of(optim)
    for number, saved in state["state"].items():
        own = optim.state[weights[number]]
        for name in [name for name, value in saved.items() if isinstance(value, Tensor)]:
            own[name] = saved[name].to(own[name].device, copy=True)


def _call_factory(
    factory: Callable[..., torch.optim.Optimizer], weights: Sequence[nn.Parameter], lr: float
) -> torch.optim.Optimizer:
    check_call("optimizer", factory, "parameters", lr=lr)
    optimizer = factory(weights, lr=lr)
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, UNSUPPORTED):
        expected = "a factory of an optimiser that uses dense gradients and no closure"
        raise invalid("optimizer", type(optimizer), expected, "torch.optim.SGD, for example")
    if {*weights}.isdisjoint(weights_of(optimizer)):
        got = Description("one of other weights than the model's")
        raise invalid("optimizer", got, "an optimiser of the weights that the factory is called with")
    return optimizer
