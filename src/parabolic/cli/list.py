"""`parabolic list`: the learners with their options, the streams and the networks."""

from __future__ import annotations

import inspect
import json
from typing import Annotated, Any

import typer
from rich.text import Text

from parabolic.backbones import BACKBONES
from parabolic.cli.common import Json, table_console
from parabolic.experiments import RunSpec
from parabolic.experiments.spec import NAMED
from parabolic.learners import Learner, ReplayLearner, find_learner, known_learners
from parabolic.options import options_of, write_option
from parabolic.report.formats import WholeTable
from parabolic.streams import known_streams

__all__ = ["list_all"]


def list_all(
    learner: Annotated[
        str | None, typer.Argument(help="Explain the options of this learner: its name, or module:Class.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the learners with their options, the streams and the networks."""
    if learner is not None:
        _list_one(learner, as_json)
        return
    classes = dict(sorted(known_learners().items()))
    learners = {name: _facts(learner_class) for name, learner_class in classes.items()}
    if as_json:
        streams = {name: entry.about for name, entry in known_streams().items()}
        print(json.dumps({"learners": learners, "streams": streams, "backbones": sorted(BACKBONES)}, indent=1))
        return
    console = table_console()
    everyones, replay = _settings(Learner), _settings(ReplayLearner)
    headings = ("learner", "reference", "needs", "own options")
    table = WholeTable(*headings, title="Learners", title_justify="left", show_lines=True)
    for name, facts in learners.items():
        own = [setting for setting in _settings(classes[name]) if setting not in replay]
        table.add_row(name, facts["reference"], ", ".join(facts["needs"]) or "nothing", ", ".join(own))
    console.print(table)
    of_memories = [setting for setting in replay if setting not in everyones]
    console.print(f"Unless listed, all have {', '.join(everyones)}; those with a memory {', '.join(of_memories)}.\n")
    table = WholeTable("stream", "what it is", "network", "batch", title="Streams", title_justify="left")
    for name, entry in known_streams().items():
        table.add_row(name, entry.about, entry.backbone, str(entry.batch))
    console.print(table)
    console.print(f"Networks: {', '.join(sorted(BACKBONES))}, or your own as module:factory.")
    console.print("To see what the options do: parabolic list LEARNER, or parabolic list --json")


def _list_one(name: str, as_json: bool) -> None:
    learner_class = find_learner(name)
    if as_json:
        print(json.dumps(_facts(learner_class), indent=1))
        return
    console = table_console()
    about = inspect.cleandoc(learner_class.__doc__ or "").partition("\n\n")[0]
    for line in filter(None, (f"{name}: {about}" if about else name, learner_class.reference)):
        console.print(Text(line))
    all_options, general = options_of(learner_class), options_of(ReplayLearner)
    groups = {
        "Its own options": {key: option for key, option in all_options.items() if key not in general},
        "General options": {key: option for key, option in all_options.items() if key in general},
        "Options of every run": {key: option for key, option in options_of(RunSpec).items() if key not in NAMED},
    }
    for title, options in groups.items():
        table = WholeTable("--set", "default", "values", "what it is", title=title, title_justify="left")
        for key, option in options.items():
            table.add_row(key, write_option(option.default), option.allowed, Text(option.about))
        if options:
            console.print(table)
    console.print("For the scenarios of streams: parabolic data list")


def _settings(learner: type[Learner]) -> list[str]:
    """Return a learner's options with their defaults, as they are written on the command line."""
    return [f"{name}={write_option(option.default)}" for name, option in options_of(learner).items()]


def _facts(learner: type[Learner]) -> dict[str, Any]:
    """Return a learner's reference, requirements and options."""
    options = options_of(learner)
    needs = {"memory": "memory" in options, "tasks": learner.needs_tasks, "all tasks at once": learner.sees_all}
    defaults = {
        name: write_option(option.default) if callable(option.default) else option.default
        for name, option in options.items()
    }
    return {
        "reference": learner.reference,
        "needs": [need for need, needed in needs.items() if needed],
        "options": {name: {"default": defaults[name], "about": option.about} for name, option in options.items()},
    }
