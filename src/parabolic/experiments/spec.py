"""The spec of a run, and the key derived from it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from parabolic.backbones import find_backbone
from parabolic.checks import CONTROL, check_name, check_number, invalid, plain
from parabolic.engine import PRECISIONS
from parabolic.engine.measures import find_measures
from parabolic.learners import find_learner
from parabolic.learners.optimizers import own_optimizer
from parabolic.options import Option, check_options, dotted, no_option, option, options_of, parse_option
from parabolic.plugins import load_with_module
from parabolic.streams import Scenario, find_stream

__all__ = ["NAMED", "OF_STREAMS", "SHARED", "RunSpec", "check_spec"]

NAMED = ("learner", "stream", "memory", "seed")
"""Fields that commands have options for and tables columns; the others are settings."""

OF_STREAMS = ("backbone", "batch", "precision", "channels_last")
"""Fields whose defaults are the stream's own."""

SHARED = ("memory", "seed")
"""Fields of a run that are passed to its learner as the options of the same names."""


@dataclass(frozen=True)
class RunSpec:
    """Everything that determines the outcome of a run. What is not given takes the learner's or the stream's default.

    >>> spec = RunSpec(learner="pcl", options={"lr": 0.05})
    >>> spec.resolved()["options"]["sigma_x"]
    0.03
    >>> spec.key == RunSpec(learner="pcl", options={"lr": 0.05, "sigma_x": 0.03}, batch=10).key
    True
    """

    learner: str = option("pcl", "the method, by name or as module:Class")
    stream: str = option("seq-digits", "what arrives, by name or as module:function")
    memory: int = option(200, "how many examples a learner that has a memory keeps", at_least=1)
    seed: int = option(0, "determines initial weights, order of arrival and every draw", at_least=0, below=2**63)
    backbone: str | None = option(None, "the network, by name or as module:factory (none: the stream's own)")
    batch: int | None = option(None, "how many examples arrive at a step (none: the stream's own)", at_least=1)
    epochs: int = option(1, "passes over each task", at_least=1)
    precision: str | None = option(
        None,
        "the precision of the network on a GPU: fp32, tf32 or bf16; a CPU uses fp32 (none: the stream's own)",
        among=PRECISIONS,
    )
    channels_last: bool | None = option(None, "whether images are stored channels-last (none: the stream's own)")
    measure: str | None = option(
        None,
        "your own functions, as file.py:function, separated by commas: after every task each is called with the state "
        "of the run, and the number it returns, or a dict of numbers, is stored (none: nothing else is measured)",
    )
    heads: bool = option(
        False, "whether each task has a head of its own: in training, too, only the classes of its task compete"
    )
    future: bool = option(False, "whether tasks are also tested before they are learned, for the forward transfer")
    options: Mapping[str, Any] = field(default_factory=dict)  # the learner's own, by name
    scenario: Mapping[str, Any] = field(default_factory=dict)  # how the stream departs from the plain one, by name

    def __post_init__(self) -> None:
        for name in ("learner", "stream", "backbone"):
            value = getattr(self, name)
            if not isinstance(value, str) and (value is not None or name != "backbone"):
                hint = "put one of your own into a file, and give mine.py:NAME"
                raise invalid(name, value, "a name, as specs are saved as text", f"`parabolic list` shows them; {hint}")
        check_options(self)
        for group in ("options", "scenario"):
            values = getattr(self, group)
            if not isinstance(values, Mapping):
                raise invalid(group, values, "a dict of values by name", "as in {'lr': 0.05}")
            object.__setattr__(self, group, {name: plain(value) for name, value in values.items()})
        for name, value in dotted(vars(self)).items():
            if isinstance(value, str) and CONTROL.search(value):  # a store would not read it back
                raise invalid(name, value, "a text in UTF-8 without control characters", "rename the file")
        known = self.learner_options(self.learner)
        object.__setattr__(self, "options", self._checked_options(known))
        if "replay" in known:
            replay = self.options.get("replay", known["replay"].default)
            remedy = f"the learner recalls replay={replay} per step: keep at least as many, or recall fewer"
            check_number("memory", self.memory, whole=True, at_least=replay, remedy=remedy)
        scenario = Scenario.of(self.scenario)
        object.__setattr__(self, "scenario", {name: getattr(scenario, name) for name in self.scenario})
        find_stream(self.stream)
        if self.backbone:
            find_backbone(self.backbone)
        find_measures(self.measure)

    def _checked_options(self, known: Mapping[str, Option]) -> dict[str, Any]:
        """The options as they are stored; one that cannot be saved as text is refused."""
        saved_defaults = {
            name: saved for name, opt in known.items() if (saved := _saved_default(self.learner, opt)) != opt.default
        }
        # In a spec read from a record, a default that is an object is given as it was saved.
        given = {
            name: value
            for name, value in self.options.items()
            if name not in saved_defaults or value != saved_defaults[name]
        }
        for name, value in given.items():
            check_name(f"option of {self.learner}", name, known, no_option(find_learner(self.learner), name))
            if not isinstance(value, str | int | float | None):
                known[name].check(value)
                raise invalid(
                    name, value, "a value that can be saved as text", "give an optimizer, say, as file.py:name"
                )
        return {name: known[name].taken(value) for name, value in given.items()}

    def __hash__(self) -> int:
        return hash(self.key)

    @staticmethod
    def learner_options(learner: str) -> dict[str, Option]:
        """The options of a learner that are not fields of the spec. An ambiguous name is an error."""
        options = options_of(find_learner(learner))
        taken = {field.name for field in dataclasses.fields(RunSpec)} | options_of(Scenario).keys()
        for name in sorted(options.keys() & taken - set(SHARED)):
            owner = "streams" if name in options_of(Scenario) else "runs"
            remedy = f"{owner} have a setting of that name: choose another in the class, such as my_{name}"
            raise invalid(f"option of {learner}", name, "a name that is not taken", remedy)
        return {name: opt for name, opt in options.items() if name not in SHARED}

    @staticmethod
    def known_settings(learner: str) -> dict[str, Option]:
        """Everything that --set accepts for a learner: fields of a run, the learner's options, and the scenario's."""
        fields = options_of(RunSpec)
        del fields["learner"]  # it determines the settings
        return options_of(Scenario) | RunSpec.learner_options(learner) | fields

    @classmethod
    def from_settings(cls, learner: str, settings: Mapping[str, str], **given: Any) -> RunSpec:
        """A spec from strings, as on a command line: `name=value` for any field, option or part of the scenario.

        They take precedence over the keyword arguments, including those in `options` and `scenario`.

        >>> RunSpec.from_settings("er", {"lr": "0.05", "batch": "16", "corruption": "uniform"})  # doctest: +ELLIPSIS
        RunSpec(learner='er', ..., batch=16, ..., options={'lr': 0.05}, scenario={'corruption': 'uniform'})
        """
        known, fields = cls.known_settings(learner), options_of(cls)
        values = {name: parse_option(known, name, text) for name, text in settings.items()}
        given |= {name: value for name, value in values.items() if name in fields}
        for group, names in (("options", cls.learner_options(learner)), ("scenario", options_of(Scenario))):
            group_values = {name: value for name, value in values.items() if name in names}
            given[group] = {**given.get(group, {}), **group_values}
        return cls(learner=learner, **given)

    def resolved(self) -> dict[str, Any]:
        """The spec with every default filled in, as plain JSON values."""
        spec = self._defaults()
        for name, default in spec.items():
            value = getattr(self, name)
            if isinstance(value, Mapping):
                spec[name] = {**default, **value}
            elif value not in (None, ""):  # an empty name counts as not given
                spec[name] = value
        return spec

    def _defaults(self) -> dict[str, Any]:
        """The spec that `resolved` returns if nothing but the learner and the stream are given."""
        options, stream = options_of(find_learner(self.learner)), find_stream(self.stream)
        spec = {name: opt.default for name, opt in options_of(RunSpec).items()}
        if "memory" not in options:
            del spec["memory"]  # so that a learner without a memory has one run for all sizes
        spec |= {name: getattr(stream, name) for name in OF_STREAMS}
        spec |= {"learner": self.learner, "stream": self.stream}
        spec["options"] = {
            name: _saved_default(self.learner, opt) for name, opt in self.learner_options(self.learner).items()
        }
        spec["scenario"] = {name: opt.default for name, opt in options_of(Scenario).items()}
        return spec

    @cached_property
    def key(self) -> str:
        """The name of the run's folder: a hash of what differs from the defaults.

        Adding a field or option with a neutral default does not change it.
        """
        defaults, resolved = self._defaults(), self.resolved()
        changes = {name: value for name, value in resolved.items() if value != defaults[name]}
        changes |= {"learner": self.learner, "stream": self.stream, "seed": self.seed}
        for group in ("options", "scenario"):
            group_changes = {name: value for name, value in resolved[group].items() if value != defaults[group][name]}
            if group_changes or group == "options":  # keys predate scenarios: without one, the key must not change
                changes[group] = group_changes
        return hashlib.sha256(json.dumps(changes, sort_keys=True).encode()).hexdigest()[:16]

    @cached_property
    def shape(self) -> str:
        """What runs must share to be trained side by side: a hash of all but the seed and the learner's options.

        Of the options, only the path of the user's own optimiser is part of it, so that such runs have the same code.
        """
        resolved = self.resolved()
        shape = {name: value for name, value in resolved.items() if name not in ("seed", "options")}
        if path := own_optimizer(resolved["options"].get("optimizer")):
            shape["optimizer"] = path
        return hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()[:16]


def _saved_default(learner: str, opt: Option) -> Any:
    """The default of a learner's option as it is saved: an object, such as an optimizer's class, by its path."""
    default = opt.default
    if isinstance(default, str | int | float | None):
        return default
    with suppress(TypeError):
        return json.loads(json.dumps(default))  # a tuple becomes the list that is read back
    learner_class, path = find_learner(learner), learner.rpartition(":")[0]
    module = load_with_module("learner", learner)[0] if path else sys.modules[learner_class.__module__]
    for name, value in vars(module).items():
        if value is default:
            return f"{path or learner_class.__module__}:{name}"
    remedy = f"assign it to a name at the top level of {path or learner_class.__module__}, and give that as the default"
    raise invalid(f"{learner_class.__name__}.{opt.name}", default, "a default that can be saved as text", remedy)


def check_spec(spec: object) -> None:
    """Raise an error unless `spec` is a RunSpec (and not, say, a learner's name).

    >>> check_spec("er")
    Traceback (most recent call last):
        ...
    parabolic.checks.InputError: spec: got 'er', expected a RunSpec; as in RunSpec("er")
    """
    if not isinstance(spec, RunSpec):
        raise invalid("spec", spec, "a RunSpec", 'as in RunSpec("er")')
