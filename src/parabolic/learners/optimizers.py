"""Optimisers given as text, for options, presets and command lines."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from parabolic.checks import check_call, check_name, invalid
from parabolic.plugins import load_object

__all__ = ["make_optimizer", "own_optimizer", "parse_optimizer"]

OWN = re.compile(r"(.+:\w+)\s*(?:\(.*\))?", re.DOTALL)  # file.py:name or module:name, and arguments

UNFIT = (torch.optim.LBFGS, torch.optim.SparseAdam)
"""Unsupported optimisers: they need the loss several times per step, or sparse gradients."""


def make_optimizer(
    named: str | Callable[..., torch.optim.Optimizer], weights: Sequence[nn.Parameter], lr: float
) -> torch.optim.Optimizer:
    """The optimiser of some weights, from a text such as `SGD(momentum=0.9)` or `file.py:Lion`, or from a factory.

    >>> weights = list(nn.Linear(2, 2).parameters())
    >>> make_optimizer("SGD(momentum=0.9, nesterov=True)", weights, lr=0.1).param_groups[0]["momentum"]
    0.9
    """
    if not isinstance(named, str):
        return _made_by(named, weights, lr)
    factory, arguments = parse_optimizer(named)
    if own_optimizer(named):
        return _made_by(partial(factory, **arguments), weights, lr)
    try:
        return factory(weights, lr=lr, **arguments)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:  # its type depends on the class
        expected = f"arguments that torch.optim.{named.partition('(')[0].strip()} takes"
        raise invalid("optimizer", named, expected, f"it says: {error}") from error


def own_optimizer(named: object) -> str:
    """The path of the user's own factory in a text; empty for a class of torch.optim, and for what is no text.

    >>> own_optimizer("mine.py:Lion(betas=(0.9, 0.99))"), own_optimizer("SGD"), own_optimizer(torch.optim.SGD)
    ('mine.py:Lion', '', '')
    """
    found = OWN.fullmatch(named.strip()) if isinstance(named, str) else None
    return found[1] if found else ""


def parse_optimizer(text: str) -> tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]:
    """The factory that a text names, a class of torch.optim or `file.py:name`, and its arguments: plain values.

    >>> parse_optimizer("AdamW(betas=(0.9, 0.99))")
    (<class 'torch.optim.adamw.AdamW'>, {'betas': (0.9, 0.99)})
    """
    remedy = "as in SGD or SGD(momentum=0.9); name your own as file.py:name"
    path = own_optimizer(text)
    try:
        node = ast.parse("own" + text.strip().removeprefix(path) if path else text.strip(), mode="eval").body
        given = node.keywords if isinstance(node, ast.Call) and not node.args else []
        named = node.func if isinstance(node, ast.Call) and not node.args else node
        arguments = {each.arg: ast.literal_eval(each.value) for each in given if each.arg is not None}
    except (SyntaxError, ValueError) as error:
        raise invalid("optimizer", text, "a class of torch.optim and plain values for its arguments", remedy) from error
    if not isinstance(named, ast.Name) or len(arguments) < len(given):
        raise invalid("optimizer", text, "a class of torch.optim, with arguments by name", remedy)
    if "lr" in arguments:
        raise invalid("optimizer", text, "no lr among the arguments", "set the option lr instead")
    if path:
        factory = load_object("optimizer", path)
        check_call("optimizer", factory, "parameters", lr=1.0, **arguments)
        return factory, arguments
    unfit = {torch.optim.Optimizer, *UNFIT}
    known = {name for name, value in vars(torch.optim).items() if isinstance(value, type) and value not in unfit}
    check_name("optimizer", named.id, known, remedy)
    return getattr(torch.optim, named.id), arguments


def _made_by(
    factory: Callable[..., torch.optim.Optimizer], weights: Sequence[nn.Parameter], lr: float
) -> torch.optim.Optimizer:
    check_call("optimizer", factory, "parameters", lr=lr)
    made = factory(weights, lr=lr)
    if not isinstance(made, torch.optim.Optimizer) or isinstance(made, UNFIT):
        expected = "a factory of an optimiser that uses dense gradients and no closure"
        raise invalid("optimizer", type(made), expected, "torch.optim.SGD, for example")
    return made
