"""The presets behind tuned tables: whether each took the same effort, and how to create missing ones."""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from parabolic.experiments.paper.bounds import table_of
from parabolic.experiments.paper.quick import SHRINK, STREAM
from parabolic.experiments.paper.selection import Selection
from parabolic.experiments.paper.tables import PLUS, Setting, method_of
from parabolic.experiments.presets import Preset
from parabolic.experiments.search import Search
from parabolic.experiments.spec import RunSpec
from parabolic.options import write_option

__all__ = ["Effort", "Tuning"]

_Ranges = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Effort:
    """The effort spent on a preset: the number of trials, and of seeds per trial.

    >>> str(Effort(20, 3)), str(Effort(1, 1)), str(Effort(0, 0))
    ('20 trials of 3 seeds', '1 trial', 'no trials')
    """

    trials: int
    seeds: int

    def __str__(self) -> str:
        trials = "1 trial" if self.trials == 1 else f"{self.trials or 'no'} trials"
        return f"{trials} of {self.seeds} seeds" if self.seeds > 1 else trials

    @classmethod
    def of(cls, preset: Preset) -> Effort:
        """The effort according to the preset's record of its study; one written by hand took no trials."""
        trials, seeds = (preset.study.get(name) for name in ("trials", "seeds"))
        if not (isinstance(trials, list) and trials):
            return cls(0, 0)
        return cls(len(trials), seeds if isinstance(seeds, int) else 1)


@dataclass(frozen=True)
class Tuning:
    """The presets behind some tables.

    >>> tuning = Tuning.of(Selection(("main",), learners=("er",), quick=True, tuned=True))
    >>> list(tuning.presets), tuning.missing
    (['er-seq-digits'], {})
    """

    presets: Mapping[str, Preset]  # those of all rows but PCL+ and the user's own, by name
    plus: Mapping[str, Preset | None]  # of the row PCL+, by stream; empty if it is not selected
    missing: Mapping[str, Sequence[str]]  # learners without a preset, by stream
    own: Mapping[str, Preset] = field(default_factory=dict)  # by row
    quick: bool = False

    @classmethod
    def of(cls, selection: Selection, tables: Sequence[str] | None = None) -> Tuning:
        """The presets of some of the selected tables, or of all."""
        presets, plus, missing = dict[str, Preset](), dict[str, Preset | None](), defaultdict[str, list[str]](list)
        own = dict[str, Preset]()
        for row, stream in _rows(selection, selection.tables if tables is None else tables):
            method = method_of(row)
            preset = method.tuned(stream)
            if method.own is not None:
                own[row] = method.own
            elif row == PLUS:
                plus[stream] = preset
            elif preset is not None:
                presets[preset.name] = preset
            elif method.learner not in missing[stream]:
                missing[stream].append(method.learner)
        return cls(presets, plus, {stream: names for stream, names in missing.items() if names}, own, selection.quick)

    @property
    def effort(self) -> Effort | None:
        """The effort that most presets took, or None."""
        efforts = Counter(Effort.of(preset) for preset in self.presets.values())
        return efforts.most_common(1)[0][0] if efforts else None

    @property
    def unlike(self) -> dict[str, Effort]:
        """The presets that took another effort than most, by name, and the user's own rows that did."""
        efforts = {name: Effort.of(preset) for name, preset in (*self.presets.items(), *self.own.items())}
        return {name: effort for name, effort in efforts.items() if self.effort not in (None, effort)}

    @property
    def commands(self) -> list[str]:
        """The commands that would create the missing presets, in the way most of the others were created.

        If a range does not include a learner's default value, the learner's own range is used instead.
        """
        memory = Setting("").memory // (SHRINK if self.quick else 1)
        effort = self.effort or Effort(0, 0)
        similar = [preset for preset in self.presets.values() if effort.trials and Effort.of(preset) == effort]
        validation = _common_entries([preset.study for preset in similar]).get("validation")
        study = {"trials": effort.trials, "seeds": effort.seeds, "validation": validation}
        study_options = "".join(f" --{name} {value}" for name, value in study.items() if value)
        space = _common_entries([_space(preset) for preset in similar])
        fixed = _common_entries([_fixed(preset) for preset in similar])
        commands = []
        for stream, learners in self.missing.items():
            for ranges, group in _by_space(learners, space).items():
                settings = [("space", entry) for entry in ranges] + [("set", entry) for entry in fixed.items()]
                pairs = ((option, f"{name}={write_option(value)}") for option, (name, value) in settings)
                setting_options = "".join(f" --{option} {shlex.quote(pair)}" for option, pair in pairs)
                target = f"--learners {','.join(group)} --stream {stream} --memory {memory}"
                commands.append(f"parabolic tune {target}{study_options}{setting_options}")
        return commands


def _rows(selection: Selection, tables: Sequence[str]) -> dict[tuple[str, str], None]:
    """The rows of the tables, each with the streams whose presets it uses."""
    rows = dict[tuple[str, str], None]()
    for name in tables:
        streams = [STREAM if selection.quick else setting.stream for setting in table_of(name).settings]
        rows |= {(row, stream): None for row in selection.rows(name) for stream in streams}
    return rows


def _by_space(learners: Sequence[str], space: Mapping[str, str]) -> dict[_Ranges, list[str]]:
    """The learners, grouped by the ranges of a space that include their default values."""
    groups = defaultdict[_Ranges, list[str]](list)
    for learner in learners:
        outside = Search(RunSpec(learner), space).outside
        groups[tuple((name, text) for name, text in space.items() if name not in outside)].append(learner)
    return groups


def _space(preset: Preset) -> Mapping[str, Any]:
    """The ranges in which the preset's values were searched."""
    space = preset.study.get("space")
    return space if isinstance(space, Mapping) else {}


def _fixed(preset: Preset) -> Mapping[str, Any]:
    """The settings that were fixed beforehand."""
    return {name: value for name, value in preset.settings.items() if name not in _space(preset)}


def _common_entries(tables: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The entries that more than half of the tables have."""
    entries = [entry for table in tables for entry in table.items()]
    return {name: value for name, value in entries if 2 * entries.count((name, value)) > len(tables)}
