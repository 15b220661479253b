"""What the commands share: options and how they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from parabolic.checks import check_name, invalid
from parabolic.experiments import Preset, RunSpec, load_preset
from parabolic.learners import find_learner
from parabolic.options import no_option

__all__ = [
    "Again",
    "Checkpoint",
    "Device",
    "FromPreset",
    "Json",
    "Memory",
    "OnlyLearner",
    "OnlyStream",
    "PresetLearner",
    "PresetMemory",
    "PresetSeed",
    "PresetStream",
    "Runs",
    "Seed",
    "Set",
    "Stream",
    "Where",
    "read_run",
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
FromPreset = Annotated[
    str | None,
    typer.Option("--preset", help="Values that suit a learner: a name of `parabolic presets`, or FILE.toml."),
]
PresetLearner = Annotated[
    str | None,
    typer.Option(
        "--learner",
        help="The method: a name of `parabolic list`, or module:Class.",
        show_default="the preset's, or pcl",
    ),
]
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
Checkpoint = Annotated[
    float,
    typer.Option(metavar="SECONDS", help="How often to write down how far a run is, to go on after a kill; 0: never."),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines instead of a table.")]
Seed = Annotated[int, typer.Option(help="Decides weights, order and draws.")]
PresetSeed = Annotated[
    int | None, typer.Option("--seed", help="Decides weights, order and draws.", show_default="the preset's, or 0")
]


def read_run(
    learner: str | None,
    preset: str | None,
    settings: list[str] | None,
    usual: Mapping[str, Any] | None = None,
    **given: Any,
) -> tuple[Preset, RunSpec]:
    """A preset, or a learner as it is, and the run that it makes; what is given as None is the preset's, or usual.

    `usual` are the stream and the memory of a command that has its own.
    """
    method = "pcl" if learner is None else learner
    chosen = load_preset(preset) if preset else Preset(method, method)
    if learner not in (None, chosen.learner):
        raise invalid("--learner", learner, f"{chosen.learner}, as in preset {preset!r}", "leave one of them out")
    chosen = replace(chosen, **{name: value for name, value in (usual or {}).items() if getattr(chosen, name) is None})
    own = settings_of_each({chosen.name: chosen.learner}, read_settings(settings))[chosen.name]
    return chosen, chosen.spec(own, **{name: value for name, value in given.items() if value is not None})


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


def settings_of_each(
    learners: Mapping[str, str], settings: Mapping[str, str], name: str = "--set"
) -> dict[str, dict[str, str]]:
    """The settings of each of several rows, given the learner of each: `name=value` goes to those whose learner has it,
    `row.name=value` to that one; a row that is called by a path may also be called by its learner's name.

    What none of them has is refused with the nearest name.
    """
    known = {row: RunSpec.known_settings(learner) for row, learner in learners.items()}
    given: dict[str, dict[str, str]] = {row: {} for row in learners}
    called = {find_learner(learner).name: row for row, learner in learners.items() if ":" in row}
    called |= {row: row for row in learners}
    for key, text in settings.items():
        named, dot, own = key.rpartition(".")
        if dot:
            check_name(f"{name} {key}", named, called, "it is not among the learners")
        asked = [called[named]] if dot else list(learners)
        having = [row for row in asked if own in known[row]]
        if not having:
            one = learners[asked[0]] if len(asked) == 1 else "LEARNER"
            field = next(filter(None, (no_option(find_learner(learners[row]), own) for row in asked)), "")
            remedy = "; ".join(filter(None, (field, f"`parabolic list {one}` shows them")))
            check_name(name, own, {each for row in asked for each in known[row]}, remedy)
        for row in having:
            given[row][own] = text if dot else given[row].get(own, text)
    return given
