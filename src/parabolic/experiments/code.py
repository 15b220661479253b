"""Hashes of what a spec only names: the source files of its learner, stream, network, optimiser and measures, with the
user's own files that they import, and prepared data.

If any of them changes, it is a different run. Records also note the code of this package and the git commit, but a
change of these does not make it a different run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from parabolic.checks import invalid
from parabolic.experiments.spec import RunSpec
from parabolic.learners import find_learner
from parabolic.learners.optimizers import own_optimizer
from parabolic.plugins import load_with_module, source_of, sources_imported_by
from parabolic.streams import find_data, find_stream

__all__ = ["check_has_file", "commit_here", "content_hashes", "names_in_main", "own_code_of", "package_code"]

OURS = Path(__file__).parents[1]
PATIENCE = 2.0  # seconds to wait for git
OUTPUT_PACKAGES = ("cli", "estimators", "integrations", "report")  # whose code no run depends on


@cache  # later edits do not change what was imported
def package_code(root: Path = OURS) -> str:
    """A hash of all code of this package that training steps may run.

    >>> len(package_code())
    64
    """
    files = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    return _digest((root / file).read_bytes() for file in files if file.parts[0] not in OUTPUT_PACKAGES)


@cache
def commit_here() -> str:
    """The git commit of the current folder, with `-dirty` if a tracked file differs from it; empty if there is none."""
    command = ["git", "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        result = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=PATIENCE,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},  # nothing is written, as `git describe --dirty` would
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):  # no git or no repository
        return ""
    first, *others = result.stdout.splitlines()  # of bytes, as names of files need not be UTF-8
    commit = first.removeprefix(b"# branch.oid ").decode()
    if commit == "(initial)":  # there is none yet
        return ""
    return f"{commit}-dirty" if any(not line.startswith(b"#") for line in others) else commit


def own_code_of(spec: RunSpec) -> str:
    """A hash of the spec's source files outside this package; empty if there are none.

    The files that they import from their own folder or package are part of it, as `sources_imported_by` finds them.

    >>> own_code_of(RunSpec("er"))
    ''
    """
    modules = {file: module for file, module in _modules(spec).items() if not Path(file).is_relative_to(OURS)}
    sources: dict[str, bytes] = {}
    for module in modules.values():
        sources |= sources_imported_by(module)
    sources |= {file: source_of(module) for file, module in modules.items()}
    return _digest(sources[file] for file in sorted(sources)) if sources else ""


def names_in_main(spec: RunSpec) -> dict[str, str]:
    """The parts of a spec that are defined in `__main__`, by name.

    >>> names_in_main(RunSpec("er"))
    {}
    """
    references = {name: getattr(spec, name) for name in ("learner", "stream", "backbone", "measure")}
    references["optimizer"] = spec.options.get("optimizer")
    return {name: reference for name, reference in references.items() if reference and "__main__:" in reference}


def check_has_file(spec: RunSpec) -> None:
    """Raise an error for what was typed into a session, such as a notebook: no file tells whether it has changed."""
    if hasattr(sys.modules["__main__"], "__file__"):
        return
    for name, reference in names_in_main(spec).items():
        remedy = f"put it into a file, as mine.py:{reference.rpartition(':')[2]}; execute(spec) trains without a store"
        raise invalid(name, reference, "a name in a file, by which stored runs of it are told apart", remedy)


def content_hashes(spec: RunSpec) -> dict[str, str]:
    """Hashes of the user's own `code` (empty if there is none) and of the stream's prepared `data`, if they are here.

    >>> content_hashes(RunSpec("er"))
    {'code': ''}
    """
    name = find_stream(spec.stream).data
    data = find_data(name) if name else None
    return {"code": own_code_of(spec), **({"data": data.content} if data is not None else {})}


def _modules(spec: RunSpec) -> dict[str, ModuleType]:
    """The modules behind a spec, by file."""
    modules = _modules_of(*find_learner(spec.learner).__mro__)
    optimizer = own_optimizer(spec.resolved()["options"].get("optimizer"))
    for name in (spec.learner, spec.stream, spec.backbone or "", optimizer, *(spec.measure or "").split(",")):
        if ":" in name and not name.startswith("hf:"):
            module, loaded = load_with_module("spec", name.strip())
            # What was loaded may claim to be of another module: a partial, of functools.
            modules |= _by_file(module) | _modules_of(loaded)
    return modules


def _modules_of(*objects: Any) -> dict[str, ModuleType]:
    """The modules of objects just loaded: of files of the same name in two folders, `sys.modules` has only the last."""
    return _by_file(*(sys.modules.get(getattr(obj, "__module__", "")) for obj in objects))


def _by_file(*modules: ModuleType | None) -> dict[str, ModuleType]:
    return {file: module for module in modules if module and (file := getattr(module, "__file__", None))}


def _digest(sources: Iterable[bytes]) -> str:
    return sha256(b"".join(sources)).hexdigest()
