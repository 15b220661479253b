"""Objects that users provide, loaded by their path: `package.module:name` or `file.py:name`."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
import sysconfig
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

__all__ = ["is_loaded", "is_own", "load_object", "load_with_module", "require", "source_of", "sources_imported_by"]

# Attributes in which a module loaded from a file stores the file's contents, and those of the files that it imports.
SOURCE, IMPORTED = "__parabolic_source__", "__parabolic_imported__"
INSTALLED, NOT_OWN = {"site-packages", "dist-packages"}, (Path(__file__).parent, Path(sysconfig.get_path("stdlib")))

_lock = RLock()  # held by the thread that imports a file, which may load another file
_importing: list[tuple[Path, set[str]]] = []  # the folder of each file being imported, and the modules before that
# Names of the modules that a folder's files imported from it, and such modules while another folder's are in use.
_imported_from: defaultdict[Path, set[str]] = defaultdict(set)
_set_aside: defaultdict[Path, dict[str, ModuleType]] = defaultdict(dict)


def require(module: str, extra: str, argument: str, called: str) -> Any:
    """Import a module that an extra of this package installs; if it is missing, the error says how to get it.

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
    """Load the object at `module:name` or `file.py:name`; `argument` is its name in errors.

    A file may import modules beside it at its top level, as a script may. Modules of one name in two folders are
    distinct: `sys.modules` has the one beside the file that was loaded last.

    >>> load_object("backbone", "torch.nn:Linear").__name__
    'Linear'
    """
    return load_with_module(argument, path)[1]


def load_with_module(argument: str, path: str) -> tuple[ModuleType, Any]:
    """The module that a path names and the object in it, which may have been defined in another module."""
    place, _, name = path.rpartition(":")
    if place.endswith(".py") and not Path(place).is_file():
        remedy = f"there is no {Path(place).absolute()}: change to the folder that it is in, or give its full path"
        raise invalid(argument, path, "file.py:name of an existing file", remedy)
    try:
        module = _load_file(Path(place)) if place.endswith(".py") else _import_module(place)
    except (ImportError, FileNotFoundError, ValueError, SyntaxError) as error:
        file = Path(f"{place if '/' in place else place.replace('.', '/')}.py")
        hint = f": there is such a file; did you mean {file}:{name}?" if file.is_file() else ""
        raise invalid(argument, path, "module:name or file.py:name that can be imported", f"{error}{hint}") from error
    if not hasattr(module, name):
        public = sorted(key for key in vars(module) if not key.startswith("_"))
        raise invalid(argument, path, f"a name that {place} defines", f"it defines {', '.join(public)}")
    return module, getattr(module, name)


def is_loaded(path: str) -> bool:
    """Whether the code at `module:name` or `file.py:name` has been imported; a name without a colon needs none.

    >>> is_loaded("er"), is_loaded("parabolic.plugins:is_loaded"), is_loaded("mine.py:Mine")
    (True, True, False)
    """
    place = path.rpartition(":")[0]
    try:
        name = _plugin_name(Path(place).resolve()) if place.endswith(".py") else place
    except (OSError, RuntimeError, ValueError):  # not the path of a file
        return False
    return not place or name in sys.modules


def source_of(module: ModuleType) -> bytes:
    """The contents of a module's file when it was imported, as far as that is known; empty if it has no file.

    >>> source_of(sys.modules["parabolic.plugins"]) == Path(__file__).read_bytes(), source_of(sys)
    (True, b'')
    """
    attributes = vars(module)
    return attributes[SOURCE] if SOURCE in attributes else _read_once(attributes.get("__file__") or "")


def is_own(file: Path) -> bool:
    """Whether a file is the user's own: neither installed nor of Python's library or this package.

    >>> is_own(Path("mine.py")), is_own(Path(__file__))
    (True, False)
    """
    return not (INSTALLED & {*file.parts} or any(map(file.is_relative_to, NOT_OWN)))


def sources_imported_by(module: ModuleType) -> dict[str, bytes]:
    """The contents, as `source_of` has them, of the user's own files that a module imports, by path.

    They are those of its folder (for a module of a package: the folder of the outermost one), and in turn what they
    import from there; nothing that is installed, nor of Python's library or this package. Only import statements count,
    anywhere in a file, except those for type checkers.

    >>> sources_imported_by(sys.modules["parabolic.plugins"])
    {}
    """
    attributes = vars(module)
    if IMPORTED in attributes:
        return dict(attributes[IMPORTED])
    file = attributes.get("__file__")
    return dict(_imported_files_once(module.__name__, file)) if file else {}


@cache  # editing a file later does not change what was imported
def _read_once(file: str) -> bytes:
    try:
        return Path(file).read_bytes() if file else b""
    except OSError:  # it is in an archive, or was removed
        return b""


@cache
def _imported_files_once(name: str, file: str) -> dict[str, bytes]:
    parents, depth = list(Path(file).parents), _is_package(file) + name.count(".")
    return _imported_files(_read_once(file), _package_of(name, file), parents[depth]) if depth < len(parents) else {}


def _imported_files(source: bytes, package: str, folder: Path) -> dict[str, bytes]:
    """The files that a source imports from a folder; `package` is what its relative imports start from."""
    files: dict[str, bytes] = {}
    pending = [(source, package)]
    while pending:
        for name in _imported_names(*pending.pop(), folder):
            file = _own_file(name, folder)
            if file is not None and file not in files:
                files[file] = _read_once(file)
                pending.append((files[file], _package_of(name, file)))
    return files


def _imported_names(source: bytes, package: str, folder: Path) -> Iterator[str]:
    """The full names of all modules that the import statements of a source may load from a folder."""
    try:
        pending: list[ast.AST] = [ast.parse(source)]
    except (SyntaxError, ValueError):  # compiled code
        return
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
            module = ".".join(filter(None, [*parents, node.module]))
            members = [f"{module}.{alias.name}" for alias in node.names]
            yield from members
            if not all(_own_file(name, folder) for name in members):  # else only modules of a package are used
                yield module
        elif isinstance(node, ast.If) and ast.unparse(node.test).rpartition(".")[2] == "TYPE_CHECKING":
            pending.extend(node.orelse)
        else:
            pending.extend(ast.iter_child_nodes(node))


def _own_file(name: str, folder: Path) -> str | None:
    """The file of a module if it is the user's own and in a folder; one not yet imported is looked up there."""
    if name in sys.modules:
        file = getattr(sys.modules[name], "__file__", None)
    else:
        path = folder.joinpath(*name.split("."))
        candidates = (path / "__init__.py", path.with_name(f"{path.name}.py"))
        file = next((str(candidate) for candidate in candidates if candidate.is_file()), None)
    if isinstance(file, str) and not Path(file).is_relative_to(folder):
        file = str(Path(file).resolve())  # imported from the folder by a link to it
    is_own_file = isinstance(file, str) and Path(file).is_relative_to(folder) and is_own(Path(file))
    return file if is_own_file else None


def _package_of(name: str, file: str) -> str:
    return name if _is_package(file) else name.rpartition(".")[0]


def _is_package(file: str) -> bool:
    return Path(file).stem == "__init__"


def _import_module(name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise ImportError(f"{name!r} is not a module name")  # importlib would raise various errors
    return importlib.import_module(name)


def _load_file(path: Path) -> ModuleType:
    """Import a file under a name made from its path, or again if it was edited.

    So its classes are the same at every call, and its current code runs.
    """
    path = path.resolve(strict=True)
    name = _plugin_name(path)
    with _folder_first(path.parent):
        source, loaded = path.read_bytes(), sys.modules.get(name)
        if loaded is not None and vars(loaded)[SOURCE] == source:
            return loaded
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        setattr(module, SOURCE, source)
        sys.modules[name] = module
        try:
            # Not by its loader, which may use stale bytecode of a file of the same size and time, to the second.
            exec(compile(source, str(path), "exec"), vars(module))
            setattr(module, IMPORTED, _imported_files(source, "", path.parent))
        except BaseException:
            del sys.modules[name]
            raise
        return module


def _plugin_name(path: Path) -> str:
    """The name under which a file is imported."""
    return f"parabolic_plugin_{path.stem}_{sha256(str(path).encode()).hexdigest()[:8]}"


@contextmanager
def _folder_first(folder: Path) -> Iterator[None]:
    """Within this context, modules in a file's folder are found first, as those beside a script are."""
    with _lock:
        _record_imports()
        _switch_to(folder)
        sys.path.insert(0, str(folder))
        _importing.append((folder, set(sys.modules)))
        try:
            yield
        finally:
            _record_imports()
            _importing.pop()
            with suppress(ValueError):  # the file may have removed it
                sys.path.remove(str(folder))
            if _importing:  # back to the file that loaded this one
                _switch_to(_importing[-1][0])


def _record_imports() -> None:
    """Record which modules the file being imported, if any, has imported from its own folder so far."""
    if _importing:
        folder, earlier = _importing[-1]
        names = {name for name in sys.modules.keys() - earlier if _is_beside(name, folder)}
        for name in names:
            source_of(sys.modules[name])  # read now, as it was imported
        _imported_from[folder] |= names


def _switch_to(folder: Path) -> None:
    """Set aside the modules that were imported from other folders, and restore those of this one."""
    for other in _imported_from.keys() - {folder}:
        for name in [name for name in _imported_from[other] if _is_beside(name, other)]:
            _set_aside[other][name] = sys.modules.pop(name)
    sys.modules.update(_set_aside.pop(folder, {}))


def _is_beside(name: str, folder: Path) -> bool:
    """Whether a module, or its package, lies in a folder; files that were loaded by their path do not count."""
    module = sys.modules.get(name.partition(".")[0])
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    is_excluded = name not in sys.modules or hasattr(module, SOURCE)
    return not is_excluded and any(isinstance(place, str) and Path(place).parent == folder for place in places)
