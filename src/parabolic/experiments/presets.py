"""Presets: learners with settings that suit them, by name, in files that are easy to read and write.

    about = "what it is, in one line"
    learner = "er"
    stream = "seq-cifar100"  # what it was made for; it can be used with any other
    memory = 1000            # likewise

    [settings]               # as for --set: options of the learner and fields of a run
    lr = 0.04

    [study]                  # how the values were found: any information worth keeping

A file `NAME.toml` is looked up in the folder `presets`, or the one that `PARABOLIC_PRESETS` names, and then among the
package's presets. Only `learner` is required. A learner, stream, backbone or optimizer in a file, such as
"mine.py:Mine", is looked up in the current folder, then beside the preset. With a memory smaller than the preset's
`replay`, the whole memory is recalled.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from parabolic.checks import Description, InputError, check_name, invalid, plain
from parabolic.experiments.spec import RunSpec
from parabolic.files import check_file_name, disk_errors, write_text
from parabolic.learners import Learner, find_learner
from parabolic.options import options_of, parse_option, write_option

__all__ = ["OURS", "Preset", "is_replaced", "known_presets", "load_preset", "preset_folder", "save_preset"]

OURS = Path(__file__).parent.parent / "presets"
"""The folder of the presets that come with the package."""

KINDS: Mapping[str, tuple[type, str]] = {
    "about": (str, "a text"),
    "learner": (str, "a text"),
    "stream": (str, "a text"),
    "memory": (int, "a whole number"),
    "settings": (dict, "a table"),
    "study": (dict, "a table"),
}


@dataclass(frozen=True)
class Preset:
    """A learner with settings that suit it.

    >>> preset = Preset("mine", learner="er", settings={"lr": 0.05, "batch": 16}, memory=500)
    >>> preset.spec(seed=3)  # doctest: +ELLIPSIS
    RunSpec(learner='er', ..., memory=500, seed=3, ..., batch=16, ..., options={'lr': 0.05}, ...)
    >>> preset.spec({"lr": "0.1"}, stream="seq-blobs").options
    {'lr': 0.1}
    >>> load_preset("pcl-plus").settings["replay"], load_preset("pcl-plus").spec(memory=50).options["replay"]
    (64, 50)
    """

    name: str
    learner: str
    about: str = ""
    stream: str | None = None
    memory: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    study: Mapping[str, Any] = field(default_factory=dict)

    def spec(self, settings: Mapping[str, str] | None = None, **given: Any) -> RunSpec:
        """The spec of a run; `settings` (strings, as for --set) and given fields take precedence over the preset's."""
        preset_settings = {name: write_option(value) for name, value in self.settings.items()}
        preset_fields = {name: value for name in ("stream", "memory") if (value := getattr(self, name)) is not None}
        if preset_settings:
            try:  # the preset alone first, so that an error can name it
                RunSpec.from_settings(self.learner, _fit_replay(preset_settings, preset_fields), **preset_fields)
            except InputError as error:
                error.name = f"preset {self.name!r}: {error.name}"
                raise
        given_names = {*given, *given.get("options", {}), *given.get("scenario", {})}
        remaining = {name: text for name, text in preset_settings.items() if name not in given_names}
        overrides, fields = dict(settings or {}), preset_fields | given
        return RunSpec.from_settings(self.learner, _fit_replay(remaining | overrides, fields) | overrides, **fields)

    def make(self, model: nn.Module, **given: Any) -> Learner:
        """Create a learner for your own model; the options given take precedence over the preset's.

        >>> learner = load_preset("pcl-plus").make(nn.Linear(4, 3), memory=100)
        >>> learner.repeats, learner.past.capacity
        (2, 100)
        """
        learner_class = find_learner(self.learner)
        for name in self.settings:
            check_name(f"preset {self.name!r}", name, RunSpec.known_settings(self.learner))
        options, preset_values = options_of(learner_class), {"memory": self.memory, **self.settings}
        remaining = {
            name: value
            for name, value in preset_values.items()
            if name in options and name not in given and value is not None
        }
        texts = _fit_replay({name: write_option(value) for name, value in remaining.items()}, given)
        return learner_class(model, **{name: parse_option(options, name, text) for name, text in texts.items()} | given)


def known_presets() -> dict[str, Path]:
    """The files of all presets by name; the user's own take precedence over the package's.

    >>> "er-seq-digits" in known_presets()
    True
    """
    return {path.stem: path for folder in (OURS, preset_folder()) for path in sorted(folder.glob("*.toml"))}


def is_replaced(path: Path) -> bool:
    """Whether a preset of the user's own takes the place of one of the package's with the same name."""
    ours = OURS / path.name
    return ours.exists() and not path.samefile(ours)


def preset_folder() -> Path:
    """The folder of the user's own presets: `PARABOLIC_PRESETS`, or `presets` in the current folder."""
    return Path(os.environ.get("PARABOLIC_PRESETS") or "presets").expanduser()


def load_preset(name: str | Path) -> Preset:
    """Load the preset of that name, or from that file if the name ends in `.toml`.

    >>> load_preset("er-seq-digits").learner
    'er'
    """
    text = str(name)
    if text.endswith(".toml"):
        if not Path(name).exists():
            raise invalid("preset", text, "an existing file", "`parabolic presets` lists presets by name")
        return _read(Path(name))
    known = known_presets()
    check_name("preset", text, known, "`parabolic presets` lists them; for a file of your own, give FILE.toml")
    return _read(known[text])


def save_preset(preset: Preset, folder: str | Path | None = None) -> Path:
    """Write a preset atomically; returns its file."""
    check_file_name(preset.name, "choose another")
    folder = Path(folder or preset_folder())
    content = {name: value for name in KINDS if (value := getattr(preset, name)) not in (None, "", {})}
    with disk_errors("presets", folder, "free some space, or name another folder"):
        return write_text(folder / f"{preset.name}.toml", _to_toml(content))


def _read(path: Path) -> Preset:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _invalid_file(path, str(error), "a TOML file") from error
    for key, value in content.items():
        check_name(f"preset {path}", key, KINDS)
        if not isinstance(value, KINDS[key][0]) or isinstance(value, bool):
            raise _invalid_file(path, f"{key} = {value!r}", f"{KINDS[key][1]} there")
    settings = content.get("settings", {})
    for key, value in settings.items():
        if not isinstance(value, str | int | float):
            raise _invalid_file(path, f"{key} = {value!r}", "a number, a text, true or false there")
    if "learner" not in content:
        raise _invalid_file(path, "no learner", 'one, as in learner = "er"')
    for table, name in ((content, "learner"), (content, "stream"), (settings, "backbone"), (settings, "optimizer")):
        if isinstance(table.get(name), str):
            table[name] = _resolve_beside(path, table[name])
    return Preset(path.stem, **content)


def _resolve_beside(path: Path, reference: str) -> str:
    """A reference file.py:NAME with the path of the file beside the preset, if it exists there and not in the current
    folder.
    """
    file, colon, name = reference.rpartition(":")
    candidate = path.parent / file
    if file.endswith(".py") and not Path(file).is_file() and candidate.is_file():
        return f"{candidate}{colon}{name}"
    return reference


def _fit_replay(settings: Mapping[str, str], given: Mapping[str, Any]) -> dict[str, str]:
    """A preset's settings with `replay` reduced to the size of the memory, if that is smaller."""
    memory = settings.get("memory", given.get("memory", RunSpec.memory))
    try:
        size, replay = int(getattr(memory, "capacity", memory)), int(settings["replay"])
    except (KeyError, TypeError, ValueError):  # missing, or not a number, which is reported where it is parsed
        return dict(settings)
    return {**settings, "replay": str(size)} if 0 < size < replay else dict(settings)


def _invalid_file(path: Path, got: str, expected: str) -> InputError:
    return invalid(f"preset {path}", Description(got), expected, "repair the file, or remove it")


def _to_toml(table: Mapping[str, Any], section: str = "") -> str:
    """A TOML file: plain values first, then a section for each table."""
    lines = [
        f"{_toml_key(name)} = {_toml_value(value)}\n" for name, value in table.items() if not isinstance(value, Mapping)
    ]
    for name, value in table.items():
        if isinstance(value, Mapping) and value:
            lines += [f"\n[{section}{_toml_key(name)}]\n", _to_toml(value, f"{section}{_toml_key(name)}.")]
    return "".join(lines)


def _toml_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml_key(key)} = {_toml_value(item)}" for key, item in value.items()) + "}"
    value = plain(value)
    if isinstance(value, list | tuple):
        return "".join(["[\n", *[f"    {_toml_value(item)},\n" for item in value], "]"])
    if isinstance(value, int | float):
        return write_option(value)
    # TOML has no None: it is written as a string, as for --set, and so is anything else.
    return json.dumps(write_option(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def _toml_key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml_value(name)
