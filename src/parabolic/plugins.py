"""Things that users bring, found by their path: `package.module:name`, or `file.py:name`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

from parabolic.checks import Description, invalid

__all__ = ["load_object", "require"]


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

    >>> load_object("backbone", "torch.nn:Linear").__name__
    'Linear'
    """
    place, _, name = path.rpartition(":")
    try:
        module = _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (ImportError, FileNotFoundError, ValueError) as error:
        file = Path(*place.split(".")).with_suffix(".py")
        here = f": there is a file, so {file}:{name} may be meant" if file.is_file() else ""
        raise invalid(argument, path, "module:name or file.py:name that can be imported", f"{error}{here}") from error
    if not hasattr(module, name):
        public = sorted(key for key in vars(module) if not key.startswith("_"))
        raise invalid(argument, path, f"a name that {place} defines", Description(f"it has {', '.join(public)}"))
    return getattr(module, name)


def _load_file(path: Path) -> Any:
    """Import a file under a name made from its path, once, so that its classes are the same at every call."""
    path = path.resolve(strict=True)
    name = f"parabolic_plugin_{path.stem}_{sha256(str(path).encode()).hexdigest()[:8]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
