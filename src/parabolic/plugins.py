"""Things that users bring, found by their path: `package.module:name`, or `file.py:name`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from threading import RLock
from types import ModuleType
from typing import Any

from parabolic.checks import Description, invalid

__all__ = ["load_object", "require", "source_of"]

SOURCE = "__parabolic_source__"  # under which a module that was made of a file keeps what the file said

_turn = RLock()  # held by the thread that imports a file, which may ask for another file
_importing: list[tuple[Path, set[str]]] = []  # the folder of each file that is being imported, and the modules before
_brought: defaultdict[Path, set[str]] = defaultdict(set)  # names of what the files of a folder imported from there
_aside: defaultdict[Path, dict[str, ModuleType]] = defaultdict(dict)  # those that gave way to another folder's


def require(module: str, extra: str, argument: str, called: str) -> Any:
    """The module that an extra of this package brings; where it is not installed, the error says how to get it.

    >>> require("no_such_module", "plot", "picture", "plotter")
    Traceback (most recent call last):
        ...
    parabolic.checks.InputError: picture: got no plotter, expected it to be installed; pip install 'parabolic-cl[plot]'
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        remedy = f"pip install 'parabolic-cl[{extra}]'"
        raise invalid(argument, Description(f"no {called}"), "it to be installed", remedy) from error


def load_object(argument: str, path: str) -> Any:
    """The object at `module:name` or `file.py:name`; `argument` is what an error calls it.

    A file may import what is beside it at its top, as a script may. What files of two folders call by one name are two
    modules: `sys.modules` has the one that is beside the file that was asked for last.

    >>> load_object("backbone", "torch.nn:Linear").__name__
    'Linear'
    """
    place, _, name = path.rpartition(":")
    if place.endswith(".py") and not Path(place).is_file():
        remedy = f"there is no {Path(place).absolute()}: go to the folder that it is in, or give its whole path"
        raise invalid(argument, path, "file.py:name of a file that is there", remedy)
    try:
        if not place.endswith(".py") and not all(part.isidentifier() for part in place.split(".")):
            raise ImportError(f"{place!r} is no name of a module")  # which importlib says in many ways
        module = _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (ImportError, FileNotFoundError, ValueError, SyntaxError) as error:
        file = Path(f"{place if '/' in place else place.replace('.', '/')}.py")
        here = f": there is a file, so {file}:{name} may be meant" if file.is_file() else ""
        raise invalid(argument, path, "module:name or file.py:name that can be imported", f"{error}{here}") from error
    if not hasattr(module, name):
        public = sorted(key for key in vars(module) if not key.startswith("_"))
        raise invalid(argument, path, f"a name that {place} defines", Description(f"it has {', '.join(public)}"))
    return getattr(module, name)


def source_of(module: ModuleType) -> bytes:
    """What the file of a module said when it was imported, as far as that is known; nothing where it has no file.

    >>> source_of(sys.modules["parabolic.plugins"]) == Path(__file__).read_bytes(), source_of(sys)
    (True, b'')
    """
    known = vars(module)
    return known[SOURCE] if SOURCE in known else _read_once(known.get("__file__") or "")


@cache  # a file that is edited later does not change what was imported
def _read_once(file: str) -> bytes:
    return Path(file).read_bytes() if file else b""


def _load_file(path: Path) -> Any:
    """Import a file under a name made from its path: once, so that its classes are the same at every call, and again
    after it was edited, so that what runs is what it says.
    """
    path = path.resolve(strict=True)
    name = f"parabolic_plugin_{path.stem}_{sha256(str(path).encode()).hexdigest()[:8]}"
    with _beside(path.parent):
        source, before = path.read_bytes(), sys.modules.get(name)
        if before is not None and vars(before)[SOURCE] == source:
            return before
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        setattr(module, SOURCE, source)
        sys.modules[name] = module
        try:
            # Not by its loader, which may take what Python compiled before of a file as long and as old to the second.
            exec(compile(source, str(path), "exec"), vars(module))
        except BaseException:
            del sys.modules[name]
            raise
        return module


@contextmanager
def _beside(folder: Path) -> Iterator[None]:
    """Modules in the folder of a file come first, as those beside a script do."""
    with _turn:
        _note()
        _give_way(folder)
        sys.path.insert(0, str(folder))
        _importing.append((folder, set(sys.modules)))
        try:
            yield
        finally:
            _note()
            _importing.pop()
            with suppress(ValueError):  # the file may have taken it away
                sys.path.remove(str(folder))
            if _importing:  # a file that asked for this one goes on
                _give_way(_importing[-1][0])


def _note() -> None:
    """Note which modules the file that is being imported, if any, has brought from beside it so far."""
    if _importing:
        folder, before = _importing[-1]
        _brought[folder] |= {name for name in sys.modules.keys() - before if _is_beside(name, folder)}


def _give_way(folder: Path) -> None:
    """Set aside the modules that were brought from other folders; those from this one are back."""
    for other in _brought.keys() - {folder}:
        for name in [name for name in _brought[other] if _is_beside(name, other)]:
            _aside[other][name] = sys.modules.pop(name)
    sys.modules.update(_aside.pop(folder, {}))


def _is_beside(name: str, folder: Path) -> bool:
    """Whether a module, or the package that it is in, lies in a folder; not so a file that was asked for itself."""
    module = sys.modules.get(name.partition(".")[0])
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    itself = name not in sys.modules or hasattr(module, SOURCE)
    return not itself and any(isinstance(at, str) and Path(at).parent == folder for at in places)
