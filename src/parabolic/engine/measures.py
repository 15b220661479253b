"""The user's own measures: functions called after every task, whose numbers are stored with the run's metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from parabolic import metrics
from parabolic.checks import check_call, first_line, invalid
from parabolic.engine.callbacks import State
from parabolic.learners import Learner
from parabolic.learners.functional import draws_apart
from parabolic.plugins import load_object

__all__ = ["Measure", "append_measures", "check_measures", "find_measures", "owner"]

Measure = Callable[[State], float | Tensor | Mapping[str, float | Tensor]]
TAKEN = {"seconds", *metrics.summary([[0.0]], [[0.0]], future=[[0.0]])}  # names already used in tables


def find_measures(names: str | None) -> dict[str, Measure]:
    """The functions in a comma-separated list of `module:function` or `file.py:function`, by name.

    >>> find_measures("math:isfinite")
    {'isfinite': <built-in function isfinite>}
    """
    measures: dict[str, Measure] = {}
    for path in [path.strip() for path in names.split(",")] if names else []:
        if ":" not in path:
            raise invalid("measure", path, "file.py:function or module:function", "separate several by commas")
        name = path.rpartition(":")[2]
        if name in measures:
            raise invalid("measure", names, "functions with different names", f"two are called {name}")
        measures[name] = load_object("measure", path)
    check_measures(measures)
    return measures


def check_measures(measures: Mapping[str, Measure]) -> None:
    """Raise an error for measures that cannot be called with a state, or whose names are taken."""
    if not isinstance(measures, Mapping):
        raise invalid("measures", measures, "a dict of functions", "as in measures={'calibration': calibration}")
    for name, measure in measures.items():
        if not (isinstance(name, str) and name) or "." in name:  # MEASURE.NAME is one of several numbers
            remedy = "as in measures={'calibration': calibration}"
            raise invalid("measures", name, "names that are texts without a dot", remedy)
        if name in TAKEN:
            raise invalid("measure", name, "a name that no other metric has", "rename the function")
        check_call("measure", measure, "state")


def owner(name: str) -> str:
    """The measure that a number belongs to: one of several is called `MEASURE.NAME`.

    >>> owner("calibration"), owner("calibration.ece")
    ('calibration', 'calibration')
    """
    return name.partition(".")[0]


def append_measures(measures: Mapping[str, Measure], state: State) -> None:
    """Call each measure and append its number, or its numbers, named `MEASURE.NAME`.

    Random draws by a measure do not affect training.
    """
    for name, measure in measures.items():
        with _own_draws_apart(state.learner):
            result = measure(state)
        if isinstance(result, Mapping):
            values = {f"{name}.{part}": value for part, value in result.items()}
        else:
            values = {name: result}
        numbers = {part: _number(part, value) for part, value in values.items()}
        earlier = {part for part in state.measured if owner(part) == name}
        if not numbers or (earlier and earlier != numbers.keys()):
            expected = f"{', '.join(sorted(earlier))}, as before" if earlier else "at least one number"
            raise invalid(f"measure {name}", sorted(numbers), expected, "return the same numbers after every task")
        for part, number in numbers.items():
            state.measured.setdefault(part, []).append(number)


def _number(name: str, value: float | Tensor) -> float:
    try:
        number = float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise invalid(f"measure {name}", value, "a number, or a dict of numbers", first_line(error)) from error
    if not math.isfinite(number):
        raise invalid(f"measure {name}", number, "a finite number", "leave out what cannot be measured")
    return number


@contextmanager
def _own_draws_apart(learner: Learner) -> Iterator[None]:
    state = learner.generator.get_state()
    with draws_apart(learner.device):
        try:
            yield
        finally:
            learner.generator.set_state(state)
