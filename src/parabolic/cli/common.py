"""What the commands share: options and how they are read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from parabolic.checks import invalid
from parabolic.experiments import RunSpec
from parabolic.learners import find_learner
from parabolic.options import options_of

__all__ = [
    "Again",
    "Device",
    "Json",
    "Memory",
    "OnlyLearner",
    "OnlyStream",
    "PresetMemory",
    "PresetStream",
    "Runs",
    "Seed",
    "Set",
    "Stream",
    "Where",
    "read_settings",
    "read_where",
    "settings_of_each",
]

Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Any field of a run or option of a learner (learner.NAME=VALUE: of one of several); may be repeated.",
    ),
]
Runs = Annotated[Path, typer.Option(envvar="PARABOLIC_RUNS", help="The folder of finished runs.")]
Stream = Annotated[str, typer.Option(help="What arrives: a name of `parabolic list`, or module:function.")]
Memory = Annotated[int, typer.Option(help="How many examples are kept.")]
PresetStream = Annotated[
    str | None,
    typer.Option(
        "--stream",
        help="What arrives: a name of `parabolic list`, or module:function.",
        show_default="the preset's, or seq-digits",
    ),
]
PresetMemory = Annotated[
    int | None, typer.Option("--memory", help="How many examples are kept.", show_default="the preset's, or 200")
]
OnlyLearner = Annotated[str | None, typer.Option("--learner", help="Only runs of this learner.")]
OnlyStream = Annotated[str | None, typer.Option("--stream", help="Only runs on this stream.")]
Where = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE", help="Only runs in which a setting has this value; may be repeated."),
]
Again = Annotated[bool, typer.Option("--again", help="Train even what is finished already.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines instead of a table.")]
Seed = Annotated[int, typer.Option(help="Decides weights, order and draws.")]


def read_settings(pairs: list[str] | None, name: str = "--set", example: str = "lr=0.05") -> dict[str, str]:
    """The pairs NAME=VALUE of `--set`, or of an option like it."""
    settings = {}
    for pair in pairs or []:
        setting, equals, value = pair.partition("=")
        if not (setting and equals):
            raise invalid(name, pair, "NAME=VALUE", f"for example {name} {example}")
        settings[setting] = value
    return settings


def read_where(where: list[str] | None, learner: str | None, stream: str | None) -> dict[str, str]:
    """Which runs are wanted, by the values of their settings."""
    named = {name: value for name, value in (("learner", learner), ("stream", stream)) if value is not None}
    return read_settings(where, "--where", "lr=0.05") | named


def settings_of_each(learners: Mapping[str, str], settings: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """The settings of each of several rows, given the learner of each: `name=value` goes to those whose learner has it,
    `row.name=value` to that one; a row that is called by a path may also be called by its learner's name.

    What none of them has goes to all, to be refused with the nearest name.
    """
    fields = options_of(RunSpec).keys()
    known = {row: RunSpec.learner_options(learner).keys() | fields for row, learner in learners.items()}
    given: dict[str, dict[str, str]] = {row: {} for row in learners}
    short = {find_learner(learner).name: row for row, learner in learners.items() if ":" in row}
    for key, text in settings.items():
        named, _, own = key.rpartition(".")
        named = named if named in learners else short.get(named, named)
        if named in learners:
            given[named][own] = text
            continue
        having = [row for row in learners if key in known[row]]
        for row in having or learners:
            given[row].setdefault(key, text)
    return given
