"""Options that several commands share, and how they are parsed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from parabolic.checks import Description, InputError, check_name, invalid
from parabolic.experiments import Preset, RunSpec, load_preset
from parabolic.experiments.store import runs_option
from parabolic.learners import find_learner
from parabolic.options import no_option, options_of, parse_option

__all__ = [
    "MEMORY", "Again", "Checkpoint", "Device", "FromPreset", "Json", "OnlyLearner", "OnlyStream", "PresetLearner",
    "PresetMemory", "PresetStream", "RunOptions", "Runs", "Seed", "Set", "Where", "check_once", "chosen_preset",
    "listing", "naming_preset", "plain_console", "read_settings", "read_where", "settings_of_each",
    "table_console",
]  # fmt: skip

LEARNER = "The learner: a name from `parabolic list`, or module:Class."
STREAM = "The stream: a name from `parabolic list`, or module:function."
MEMORY = "How many examples the memory holds."
SEED = "Decides the initial weights, the order of arrival and every draw."

Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Set a field of the run or an option of the learner (LEARNER.NAME=VALUE: of that learner only); "
        "may be repeated.",
    ),
]
Runs = Annotated[Path, typer.Option(envvar="PARABOLIC_RUNS", help="The folder in which runs are stored.")]
Seed = Annotated[int | None, typer.Option(help=SEED, show_default="0")]
FromPreset = Annotated[
    str | None,
    typer.Option("--preset", help="Settings that suit a learner: a name from `parabolic presets`, or FILE.toml."),
]
# The same, for commands that take a preset, whose values come before the defaults.
PresetLearner = Annotated[str | None, typer.Option("--learner", help=LEARNER, show_default="the preset's, or pcl")]
PresetStream = Annotated[str | None, typer.Option("--stream", help=STREAM, show_default="the preset's, or seq-digits")]
PresetMemory = Annotated[int | None, typer.Option("--memory", help=MEMORY, show_default="the preset's, or 200")]
OnlyLearner = Annotated[str | None, typer.Option("--learner", help="Only runs of this learner.")]
OnlyStream = Annotated[str | None, typer.Option("--stream", help="Only runs on this stream.")]
Where = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE", help="Only runs whose setting NAME has this value; may be repeated."),
]
Again = Annotated[bool, typer.Option("--again", help="Train again even if a run has already finished or diverged.")]
Checkpoint = Annotated[
    float,
    typer.Option(metavar="SECONDS", help="How often to save a checkpoint, from which a killed run resumes; 0: never."),
]
Device = Annotated[str, typer.Option(help="The device: auto, cpu, cuda or cuda:N.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def listing(kind: str, runs: Path) -> str:
    """The command that lists the runs of this kind in a folder.

    >>> listing("failed", Path("runs")), listing("failed", Path("my runs"))
    ('parabolic runs --failed', "parabolic runs --failed --runs 'my runs'")
    """
    return f"parabolic runs --{kind}{runs_option(runs)}"


def table_console(*, stderr: bool = False) -> Console:
    """A console for tables and sentences, which are fitted to its width; nothing in them is markup."""
    return Console(stderr=stderr, markup=False, emoji=False)


def plain_console(*, stderr: bool = False) -> Console:
    """A console that prints text as it is: nothing in it is markup, and long lines, as of paths, are not broken."""
    return Console(stderr=stderr, soft_wrap=True, highlight=False, markup=False, emoji=False)


@dataclass(frozen=True)
class RunOptions:
    """The options of commands that train one run, which determine its spec."""

    learner: PresetLearner = None
    preset: FromPreset = None
    stream: PresetStream = None
    memory: PresetMemory = None
    seed: Annotated[int | None, typer.Option(help=SEED, show_default="the preset's, or 0")] = None
    settings: Set = None

    def read(self, **defaults: Any) -> tuple[Preset, RunSpec]:
        """Return the preset (for a plain learner: an empty one) and the spec of its run.

        A stream or memory that is not given is the preset's or, if that has none, the one in `defaults`.
        """
        chosen = chosen_preset(self.learner, self.preset)
        chosen = replace(chosen, **{name: value for name, value in defaults.items() if getattr(chosen, name) is None})
        settings = settings_of_each({chosen.name: chosen.learner}, read_settings(self.settings))[chosen.name]
        given = {name: value for name in ("stream", "memory", "seed") if (value := getattr(self, name)) is not None}
        check_once(settings, {f"--{name}": value for name, value in given.items()})
        return chosen, chosen.spec(settings, **given)


def chosen_preset(learner: str | None, preset: str | None) -> Preset:
    """Return the preset, which must be of the learner if both are given; for a plain learner, an empty one."""
    name = "pcl" if learner is None else learner
    chosen = load_preset(preset) if preset else Preset(name, name)
    if learner not in (None, chosen.learner):
        raise invalid("--learner", learner, f"{chosen.learner}, as in preset {preset!r}", "leave one of them out")
    return chosen


@contextmanager
def naming_preset(presets: Sequence[Preset], stream: str | None) -> Iterator[None]:
    """Name the preset in the error about data that are not prepared, if the stream is the preset's, not the user's."""
    try:
        yield
    except InputError as error:
        preset = next((preset for preset in presets if preset.stream), None)
        if error.name == "data" and stream is None and preset is not None:
            error.remedy += f"; or name another stream, as in --stream seq-digits: {preset.name} is for {preset.stream}"
        raise


def check_once(settings: Mapping[str, str], options: Mapping[str, Any]) -> None:
    """Refuse an option of a command, such as `--seed`, to which `--set` gives another value."""
    for option, value in options.items():
        name = option.removeprefix("--")
        if value is None or name not in settings:
            continue
        if parse_option(options_of(RunSpec), name, settings[name]) != value:
            raise invalid(option, value, f"the value of --set {name}={settings[name]}", "leave one of them out")


def read_settings(pairs: list[str] | None, name: str = "--set", example: str = "lr=0.05") -> dict[str, str]:
    """Parse the NAME=VALUE pairs of `--set`, or of a similar option; a name cannot have two values."""
    settings: dict[str, str] = {}
    for pair in pairs or []:
        setting, equals, value = pair.partition("=")
        if not (setting and equals):
            raise invalid(name, pair, "NAME=VALUE", f"for example {name} {example}")
        if settings.setdefault(setting, value) != value:
            got = Description(f"{setting}={settings[setting]} and {setting}={value}")
            raise invalid(name, got, "one value for each name", "leave one of them out")
    return settings


def read_where(where: list[str] | None, learner: str | None, stream: str | None) -> dict[str, str]:
    """Return the values that the settings of the wanted runs must have."""
    pairs = [f"{name}={value}" for name, value in (("learner", learner), ("stream", stream)) if value is not None]
    return read_settings([*(where or []), *pairs], "--where")


def settings_of_each(
    learners: Mapping[str, str], settings: Mapping[str, str], name: str = "--set"
) -> dict[str, dict[str, str]]:
    """Return the settings of each row, given its learner: `name=value` goes to all rows whose learner has that setting,
    `row.name=value` to that row only. A row named by a path has its learner's name too, if no other such row does.

    A setting that no row has raises an error that suggests the nearest name.
    """
    known = {row: RunSpec.known_settings(learner) for row, learner in learners.items()}
    by_row: dict[str, dict[str, str]] = {row: {} for row in learners}
    names = {row: find_learner(learner).name for row, learner in learners.items() if ":" in row}
    uses = Counter(names.values())
    row_names = {name: row for row, name in names.items() if uses[name] == 1} | {row: row for row in learners}
    for key, text in settings.items():
        prefix, dot, setting = key.rpartition(".")
        if dot:
            check_name(f"{name} {key}", prefix, row_names, "it is not among the learners")
        rows = [row_names[prefix]] if dot else list(learners)
        matching = [row for row in rows if setting in known[row]]
        if not matching:
            learner_name = learners[rows[0]] if len(rows) == 1 else "LEARNER"
            hint = next(filter(None, (no_option(find_learner(learners[row]), setting) for row in rows)), "")
            remedy = "; ".join(filter(None, (hint, f"`parabolic list {learner_name}` shows them")))
            check_name(name, setting, {known_name for row in rows for known_name in known[row]}, remedy)
        for row in matching:
            by_row[row][setting] = text if dot else by_row[row].get(setting, text)
    return by_row
