"""Optimisers given as text, for options, presets and command lines."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from parabolic.checks import check_call, check_name, invalid

__all__ = ["make_optimizer", "parse_optimizer"]

UNFIT = (torch.optim.LBFGS, torch.optim.SparseAdam)
"""Unsupported optimisers: they need the loss several times per step, or sparse gradients."""


def make_optimizer(
    named: str | Callable[..., torch.optim.Optimizer], weights: Sequence[nn.Parameter], lr: float
) -> torch.optim.Optimizer:
    """The optimiser of some weights, from a text such as `SGD` or `SGD(momentum=0.9)`, or from a factory.

    >>> weights = list(nn.Linear(2, 2).parameters())
    >>> make_optimizer("SGD(momentum=0.9, nesterov=True)", weights, lr=0.1).param_groups[0]["momentum"]
    0.9
    """
    if not isinstance(named, str):
        return _made_by(named, weights, lr)
    name, arguments = parse_optimizer(named)
    try:
        made: torch.optim.Optimizer = getattr(torch.optim, name)(weights, lr=lr, **arguments)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:  # its type depends on the class
        raise invalid("optimizer", named, f"arguments that torch.optim.{name} takes", f"it says: {error}") from error
    return made


def parse_optimizer(text: str) -> tuple[str, dict[str, Any]]:
    """The class of torch.optim that a text names, and its arguments. The text is not executed.

    >>> parse_optimizer("AdamW(betas=(0.9, 0.99))")
    ('AdamW', {'betas': (0.9, 0.99)})
    """
    remedy = "as in SGD or SGD(momentum=0.9)"
    try:
        node = ast.parse(text.strip(), mode="eval").body
        given = node.keywords if isinstance(node, ast.Call) and not node.args else []
        named = node.func if isinstance(node, ast.Call) and not node.args else node
        arguments = {each.arg: ast.literal_eval(each.value) for each in given if each.arg is not None}
    except (SyntaxError, ValueError) as error:
        raise invalid("optimizer", text, "a class of torch.optim and plain values for its arguments", remedy) from error
    if not isinstance(named, ast.Name) or len(arguments) < len(given):
        raise invalid("optimizer", text, "a class of torch.optim, with arguments by name", remedy)
    unfit = {torch.optim.Optimizer, *UNFIT}
    known = {name for name, value in vars(torch.optim).items() if isinstance(value, type) and value not in unfit}
    check_name("optimizer", named.id, known, remedy)
    if "lr" in arguments:
        raise invalid("optimizer", text, "no lr among the arguments", "set the option lr instead")
    return named.id, arguments


def _made_by(
    factory: Callable[..., torch.optim.Optimizer], weights: Sequence[nn.Parameter], lr: float
) -> torch.optim.Optimizer:
    check_call("optimizer", factory, "parameters", lr=lr)
    made = factory(weights, lr=lr)
    if not isinstance(made, torch.optim.Optimizer) or isinstance(made, UNFIT):
        expected = "a factory of an optimiser that uses dense gradients and no closure"
        raise invalid("optimizer", type(made), expected, "torch.optim.SGD, for example")
    return made
