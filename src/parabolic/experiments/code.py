"""Hashes of what a spec only names: the source files of its learner, stream, network, optimiser and measures, with the
user's own files that they import, and prepared data.

If any of them changes, it is a different run. What was typed into a session, such as a notebook, has no file: each
definition of it counts as a change. Records also note the code of this package and the git commit, but a change of
these does not make it a different run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import uuid4

from parabolic.experiments.spec import RunSpec
from parabolic.learners import find_learner
from parabolic.learners.optimizers import own_optimizer
from parabolic.plugins import load_with_module, source_of, sources_imported_by
from parabolic.streams import find_data, find_stream

__all__ = ["commit_here", "content_hashes", "own_code_of", "package_code"]

OURS = Path(__file__).parents[1]
PATIENCE = 2.0  # seconds to wait for git
OUTPUT_PACKAGES = ("cli", "estimators", "integrations", "report")  # whose code no run depends on

_typed: dict[int, tuple[Any, bytes]] = {}  # definitions of a session, by id; kept, so that no other gets the same id


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

    The files that they import from their own folder or package are part of it, as `sources_imported_by` finds them. So
    is each definition that was typed into a session: no file tells whether it is what it was before.

    >>> own_code_of(RunSpec("er"))
    ''
    """
    parts = [*_parts(spec)]
    files = {module: getattr(module, "__file__", None) for module, _ in parts}
    modules = {file: module for module, file in files.items() if file and not Path(file).is_relative_to(OURS)}
    sources: dict[str, bytes] = {}
    for module in modules.values():
        sources |= sources_imported_by(module)
    sources |= {file: source_of(module) for file, module in modules.items()}
    typed = [
        _typed.setdefault(id(part), (part, uuid4().bytes))[1]
        for module, part in parts
        if module is sys.modules["__main__"] and not files[module]
    ]
    return _digest([*(sources[file] for file in sorted(sources)), *typed]) if sources or typed else ""


def content_hashes(spec: RunSpec) -> dict[str, str]:
    """Hashes of the user's own `code` (empty if there is none) and of the stream's prepared `data`, if they are here.

    >>> content_hashes(RunSpec("er"))
    {'code': ''}
    """
    name = find_stream(spec.stream).data
    data = find_data(name) if name else None
    return {"code": own_code_of(spec), **({"data": data.content} if data is not None else {})}


def _parts(spec: RunSpec) -> Iterator[tuple[ModuleType, Any]]:
    """What a spec names, and the bases of its learner, each with the module that it is from."""
    yield from _with_modules(*find_learner(spec.learner).__mro__)
    optimizer = own_optimizer(spec.resolved()["options"].get("optimizer"))
    for name in (spec.learner, spec.stream, spec.backbone or "", optimizer, *(spec.measure or "").split(",")):
        if ":" in name and not name.startswith("hf:"):
            module, loaded = load_with_module("spec", name.strip())
            yield module, loaded
            yield from _with_modules(loaded)  # it may claim to be of another module: a partial, of functools


def _with_modules(*loaded: Any) -> Iterator[tuple[ModuleType, Any]]:
    """Objects just loaded, with modules: of files of the same name in two folders, `sys.modules` has only the last."""
    for part in loaded:
        if (module := sys.modules.get(getattr(part, "__module__", ""))) is not None:
            yield module, part


def _digest(sources: Iterable[bytes]) -> str:
    return sha256(b"".join(sources)).hexdigest()
