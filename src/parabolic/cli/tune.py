"""`parabolic tune` and `parabolic presets`."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from parabolic.checks import InputError, first_line, invalid
from parabolic.cli.common import (
    Device,
    FromPreset,
    Json,
    PresetLearner,
    PresetMemory,
    PresetStream,
    Runs,
    Set,
    check_once,
    chosen_preset,
    naming_preset,
    read_settings,
    settings_of_each,
    table_console,
)
from parabolic.cli.grids import note_package
from parabolic.cli.tables import check_output
from parabolic.engine import ProgressBar
from parabolic.experiments import Preset, Search, Store, Trial, Tuned, known_presets, load_preset, save_preset, tune
from parabolic.experiments.presets import is_replaced, preset_folder
from parabolic.experiments.search import METRICS
from parabolic.experiments.tuning import study_name
from parabolic.learners import known_learners
from parabolic.options import options_of, write_option
from parabolic.report.comparisons import plural
from parabolic.report.formats import WholeTable

__all__ = ["list_presets", "tune_one"]

SHOWN = 5  # trials in the table
ABOUT = {name: option.about[0].upper() + option.about[1:] + "." for name, option in options_of(Search).items()}


def tune_one(
    learner: PresetLearner = None,
    learners: Annotated[
        str | None,
        typer.Option(help="Several learners, tuned in turn with --trials each: names separated by commas, or all."),
    ] = None,
    preset: FromPreset = None,
    stream: PresetStream = None,
    memory: PresetMemory = None,
    trials: Annotated[int, typer.Option(min=1, help="Total number of trials, including those of earlier calls.")] = 30,
    space: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=LOW:HIGH[:log]|A,B,C", help="The values to try for a setting; may be repeated."),
    ] = None,
    settings: Set = None,
    metric: Annotated[
        str | None, typer.Option(help=f"{', '.join(METRICS)}. {ABOUT['metric']}", show_default=False)
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help=ABOUT["seeds"])] = 1,
    validation: Annotated[float, typer.Option(help=ABOUT["validation"])] = 0.1,
    seed: Annotated[int, typer.Option(help=ABOUT["seed"])] = 0,
    prune: Annotated[bool, typer.Option("--prune", help=ABOUT["prune"])] = False,
    parallel: Annotated[int, typer.Option(min=1, help="How many trials a GPU trains side by side.")] = 1,
    workers: Annotated[int, typer.Option(min=1, help="How many processes work on the study.")] = 1,
    name: Annotated[
        str | None,
        typer.Option(help="Name of the study and of its preset.", show_default="LEARNER-STREAM, or PRESET-STREAM"),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The folder for the preset.", show_default="PARABOLIC_PRESETS, or presets"),
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(
            envvar="PARABOLIC_STORAGE",
            help="Where the study is stored: an Optuna storage URL, or journal:FILE.",
            show_default="SQLite in the folder of runs",
        ),
    ] = None,
    runs: Runs = Path("runs"),
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Search for settings that suit a learner, judged on held-out training examples, and save the best as a preset."""
    presets = _chosen_presets(learner, learners, preset)
    if name is not None and len(presets) > 1:
        raise invalid("--name", name, "no name for several learners", "each preset is called LEARNER-STREAM")
    fields = {field: value for field, value in (("stream", stream), ("memory", memory)) if value is not None}
    searches = _searches(
        presets, settings, space, fields, metric=metric, seeds=seeds, validation=validation, seed=seed, prune=prune
    )
    if preset and name is None:
        name = study_name(searches[0].spec, presets[0].name)
    folder = output or preset_folder()
    check_output(folder / ".preset", "free some space, or name another folder with --output", "presets")
    for search in searches:
        _note_outside(search, "the preset's" if preset else "the default")
    results, failed, store = [], [], Store(runs)
    for search in searches:
        try:
            with naming_preset(presets, stream):
                tuned = _tune(
                    search, store, trials=trials, name=name, storage=storage, parallel=parallel, workers=workers,
                    device=device,
                )  # fmt: skip
            path = save_preset(tuned.preset(), folder)
        except KeyboardInterrupt:
            print("stopped: finished trials are stored, and the same command resumes", file=sys.stderr)
            raise typer.Exit(130) from None
        except Exception as error:
            if len(searches) == 1:
                raise
            failed.append(search.spec.learner)  # go on with the other learners
            print(f"error: {search.spec.learner}: {first_line(error)}", file=sys.stderr)
            continue
        results.append(
            {
                "preset": str(path),
                "running": tuned.running,
                "best": dataclasses.asdict(tuned.best),
                "trials": [dataclasses.asdict(trial) for trial in tuned.trials],
            }
        )
        stored = (store.ended(spec) for trial in tuned.trials for spec in search.specs(trial.values))
        note_package([run for run in stored if run is not None], again=False)
        if not as_json:
            _print_result(
                tuned, path, path if output else tuned.name, "the preset's" if preset else "the learner's default"
            )
    if as_json:
        print(json.dumps(results if learners else results[0], indent=1))
    if failed:
        print(f"failed: {', '.join(failed)}; the same command tries them again", file=sys.stderr)
        raise typer.Exit(1)


def _chosen_presets(learner: str | None, learners: str | None, preset: str | None) -> list[Preset]:
    """Return what to tune: the preset, or an empty one for each learner; `all` are those that learn task by task."""
    if learners is None:
        return [chosen_preset(learner, preset)]
    for option, value in (("--learner", learner), ("--preset", preset)):
        if value is not None:
            raise invalid(option, value, "none with --learners", "leave one of them out")
    if learners == "all":
        names = sorted(name for name, learner_class in known_learners().items() if not learner_class.sees_all)
    else:
        names = list(dict.fromkeys(name.strip() for name in learners.split(",") if name.strip()))
    if not names:
        raise invalid("--learners", learners, "at least one name, or all", "for example --learners pcl,er")
    return [Preset(name, name) for name in names]


def _searches(
    presets: list[Preset],
    settings: list[str] | None,
    space: list[str] | None,
    fields: Mapping[str, Any],
    **criteria: Any,
) -> list[Search]:
    """Return all searches at once, so that invalid input is refused before anything is trained."""
    learners = {preset.name: preset.learner for preset in presets}
    fixed = settings_of_each(learners, read_settings(settings))
    spaces = settings_of_each(learners, read_settings(space, "--space", "lr=0.01:0.3:log"), "--space")
    for row in learners:
        check_once(fixed[row], {f"--{name}": value for name, value in fields.items()})
        for name in fixed[row].keys() & spaces[row].keys():
            raise invalid("--space", name, "an option that --set leaves open", "give one of the two")
    return [Search(preset.spec(fixed[preset.name], **fields), spaces[preset.name], **criteria) for preset in presets]


def _note_outside(search: Search, origin: str) -> None:
    """Say on standard error which values of the preset, or defaults, the search cannot find."""
    for option, value in search.outside.items():
        note = f"{origin} {option}={write_option(value)} is outside {search.ranges[option]}: no trial uses it"
        print(f"note: {search.spec.learner}: {note}", file=sys.stderr)


def _tune(search: Search, store: Store, *, trials: int, **options: Any) -> Tuned:
    """Tune with a progress bar; `options` are those of `tune`."""
    with ProgressBar(many=trials) as bar:
        bar.title = f"{search.spec.learner} on {search.spec.stream}"
        bar.count("trials", 0)

        def watch(done: list[Trial]) -> None:
            best = search.best(done)
            bar.count("trials", len(done), f"best {_format_score(search, best)}{_unit(search)}" if best else "")

        return tune(search, store, trials=trials, callbacks=[bar], watch=watch, **options)


def _print_result(tuned: Tuned, path: Path, preset_name: Path | str, origin: str) -> None:
    console, search = table_console(), tuned.search
    count = plural(len(tuned.trials), "trial")
    console.print(f"{search.spec.learner} on {search.spec.stream}: the best of {count}")
    console.print(_trial_table(tuned))
    console.print(
        f"Judged on {search.validation:.0%} of the training examples, held out; seeds per trial: {search.seeds}."
    )
    if not search.outside:
        values = search.rounded(search.defaults)
        # Usually the first trial; if its process was killed, they are tried again later.
        if trial := next((trial for trial in tuned.trials if trial.values == values), None):
            console.print(f"With {origin} values: {_format_score(search, trial)}{_unit(search)}.")
    if tuned.running:
        console.print(f"Trials still running in other processes: {tuned.running}.")
    console.print(f"Saved to {path}; to use it: parabolic run --preset {preset_name}", soft_wrap=True)


def list_presets(as_json: Json = False) -> None:
    """List the presets: their settings, and what they were made for."""
    presets, damaged = [], []
    for name, path in sorted(known_presets().items()):
        try:
            presets.append((load_preset(name), path))
        except InputError as error:
            damaged.append(str(error))
    if as_json:
        print(
            json.dumps(
                [{**dataclasses.asdict(preset), "file": str(path)} for preset, path in presets], indent=1, default=str
            )
        )
    else:
        table, console = WholeTable.grid(padding=(0, 2)), table_console()
        table.add_column(no_wrap=True, style="bold")  # a name that is cut off cannot be used
        table.add_column()
        for preset, path in presets:
            made_for = f"{preset.learner} for {preset.stream or 'anything'}"
            made_for += f", memory {preset.memory}" if preset.memory is not None else ""
            about = ": ".join(
                filter(None, [made_for, "yours, in place of the package's" * is_replaced(path), preset.about])
            )
            table.add_row(preset.name, "\n".join(filter(None, [about, _format_settings(preset.settings)])))
        console.print(table)
        console.print("To use one: parabolic run --preset NAME")
    for problem in damaged:
        print(f"error: {problem}", file=sys.stderr)
    if damaged:
        raise typer.Exit(2)


def _trial_table(tuned: Tuned) -> WholeTable:
    """A table of the best trials and their values."""
    search, table = tuned.search, WholeTable()
    for name in search.ranges:
        table.add_column(name, justify="right")
    table.add_column(
        (search.metric.upper() if search.measure is None else search.metric) + _unit(search), justify="right"
    )
    for trial in search.ranked(tuned.trials)[:SHOWN]:
        table.add_row(*[write_option(value) for value in trial.values.values()], _format_score(search, trial))
    return table


def _format_score(search: Search, trial: Trial) -> str:
    """Format a trial's score, if it has one, and how many of its runs diverged."""
    diverged = f" ({trial.diverged} diverged)" if trial.diverged else ""
    score = "–" if trial.score is None else format(trial.score, ".1f" if search.measure is None else ".4g")
    return score + diverged


def _unit(search: Search) -> str:
    return " %" if search.measure is None else ""


def _format_settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={write_option(value)}" for name, value in settings.items())
