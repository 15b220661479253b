"""What a spec only names: the files that its learner, stream, network and measures are written in, and prepared data.

With others it is another run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from parabolic.experiments.spec import RunSpec
from parabolic.learners import find_learner
from parabolic.plugins import load_object, source_of
from parabolic.streams import find_data, find_stream

__all__ = ["made_of", "own_code_of", "package_code"]

OURS = Path(__file__).parents[1]
TELLING = ("cli", "estimators.py", "experiments", "integrations", "report")  # rooms that no step of a run is in


@cache  # what is edited later is not what was imported
def package_code(root: Path = OURS) -> str:
    """A hash of all code of this package that a training goes through.

    >>> len(package_code())
    64
    """
    files = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    return _digest((root / each).read_bytes() for each in files if each.parts[0] not in TELLING)


def own_code_of(spec: RunSpec) -> str:
    """A hash of those that are the user's own; empty where there are none. What they import is not looked at.

    >>> own_code_of(RunSpec("er"))
    ''
    """
    modules = _modules(spec)
    own = [file for file in sorted(modules) if not Path(file).is_relative_to(OURS)]
    return _digest(source_of(modules[file]) for file in own) if own else ""


def made_of(spec: RunSpec) -> dict[str, str]:
    """Hashes of the user's own `code`, empty where there is none, and of prepared `data`, where the stream is of some
    that are here.

    >>> made_of(RunSpec("er"))
    {'code': ''}
    """
    name = find_stream(spec.stream).data
    data = find_data(name) if name else None
    return {"code": own_code_of(spec), **({"data": data.content} if data is not None else {})}


def _modules(spec: RunSpec) -> dict[str, ModuleType]:
    """The modules, by their files."""
    found = _of(*find_learner(spec.learner).__mro__)
    for name in (spec.stream, spec.backbone or "", *(spec.measure or "").split(",")):
        if ":" in name and not name.startswith("hf:"):
            found |= _of(load_object("spec", name.strip()))
    return found


def _of(*objects: Any) -> dict[str, ModuleType]:
    """Those of objects just found: of files in two folders, only one's modules are there by their names at a time."""
    modules = [sys.modules.get(getattr(each, "__module__", "")) for each in objects]
    return {file: module for module in modules if module and (file := getattr(module, "__file__", None))}


def _digest(sources: Iterable[bytes]) -> str:
    return sha256(b"".join(sources)).hexdigest()
