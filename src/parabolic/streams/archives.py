"""Untrusted archives and folders: read in place, never unpacked to disk, and nothing in them is executed."""

from __future__ import annotations

import gzip
import http.client
import io
import os
import pickle
import re
import tarfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from parabolic.checks import Description, InputError, first_line, invalid
from parabolic.files import sha256_of
from parabolic.streams.cache import ShowProgress

__all__ = ["Tree", "download", "gunzip", "is_hidden", "load_pickle", "open_tree"]

CHUNK = 1 << 20
LARGEST = 4 << 30  # bytes to unpack into memory: a small archive may claim any size


class Tree(NamedTuple):
    """The files of a folder or an archive, by their relative paths with `/` as the separator."""

    where: str
    names: frozenset[str]
    read: Callable[[str], bytes]

    def get(self, name: str) -> bytes:
        """Return the contents of a file; if it is missing, raise an error that names it."""
        if name not in self.names:
            remedy = "it is incomplete: get it again"
            raise invalid(self.where, Description(f"no {name}"), "all files of the data set", remedy)
        return self.read(name)


@contextmanager
def open_tree(path: Path, keep: Collection[str] | None = None) -> Iterator[Tree]:
    """Open a folder, a .zip or a .tar.gz as a `Tree`, without hidden files.

    A top-level folder that contains everything else in an archive is stripped from the paths.

    Args:
        path: the folder or archive.
        keep: base names of the files to read from a .tar.gz (all by default), which is read through once.
    """
    if path.is_dir():
        names = (file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
        yield Tree(str(path), frozenset(_visible(names)), lambda name: _read_file(path / name))
    elif zipfile.is_zipfile(path) or path.suffix == ".zip":
        with _refuse_damaged(path):
            archive = zipfile.ZipFile(path)
        with archive:
            _check_inside(path, archive.namelist())

            def read(name: str) -> bytes:
                _check_size(path, name, archive.getinfo(name).file_size)
                with _refuse_damaged(path):
                    return archive.read(name)

            yield _tree_without_top(path, [name for name in archive.namelist() if not name.endswith("/")], read)
    else:
        with _refuse_damaged(path):
            contents = _read_tar(path, keep)
        yield _tree_without_top(path, contents, contents.__getitem__)


@contextmanager
def _refuse_damaged(path: Path) -> Iterator[None]:
    """Refuse an archive that cannot be read to its end."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # each compression has errors of its own, and a damaged header can raise anything
        remedy = "it may be truncated or damaged: download it again"
        got = Description(f"{type(error).__name__}: {first_line(error)}")
        raise invalid(str(path), got, "a whole archive", remedy) from error


def is_hidden(name: str) -> bool:
    """Whether a name is that of a hidden file or folder, as operating systems and tools leave behind.

    >>> [name for name in (".DS_Store", ".ipynb_checkpoints", "__MACOSX", "cat", ".") if is_hidden(name)]
    ['.DS_Store', '.ipynb_checkpoints', '__MACOSX']
    """
    return name == "__MACOSX" or (name.startswith(".") and name != ".")


def _visible(names: Iterable[str]) -> list[str]:
    return [name for name in names if not any(is_hidden(part) for part in name.split("/"))]


def _tree_without_top(path: Path, paths: Iterable[str], read: Callable[[str], bytes]) -> Tree:
    names = {name: name for name in _visible(paths)}
    tops = {name.split("/", 1)[0] if "/" in name else "" for name in names}
    if len(tops) == 1 and (top := tops.pop()):
        names = {name.removeprefix(f"{top}/"): name for name in names}
    return Tree(str(path), frozenset(names), lambda name: read(names[name]))


def _read_tar(path: Path, keep: Collection[str] | None) -> dict[str, bytes]:
    contents, size = dict[str, bytes](), 0
    with tarfile.open(path, "r:*") as archive:
        for member in archive:
            _check_inside(path, [member.name])
            if not (member.isfile() or member.isdir()):
                raise invalid(str(path), Description(f"{member.name}, a link or device"), "files and folders only")
            if member.isfile() and (keep is None or member.name.rsplit("/", 1)[-1] in keep):
                size += member.size
                _check_size(path, member.name, size)
                file = archive.extractfile(member)
                assert file is not None
                contents[member.name.removeprefix("./")] = file.read()
        assert archive.fileobj is not None
        while archive.fileobj.read(CHUNK):  # tarfile stops before the checksum of a .gz, which is verified at its end
            pass
    return contents


def _check_size(path: Path | str, name: str, size: int) -> None:
    """Refuse a file that would take too much memory when unpacked."""
    if size > LARGEST:
        remedy = "if its source can be trusted, unpack it and pass the folder with --from"
        raise invalid(str(path), Description(f"{name}, larger when unpacked"), f"at most {LARGEST:,} bytes", remedy)


def gunzip(path: Path | str, name: str, data: bytes) -> bytes:
    """Unpack the contents of a .gz file."""
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
        contents = file.read(LARGEST + 1)
    _check_size(path, name, len(contents))
    return contents


def _check_inside(path: Path, names: Collection[str]) -> None:
    """Refuse an archive with paths that lead out of its own folder, as only a malicious or broken one has."""
    for name in names:
        if name.startswith(("/", "\\")) or re.match(r"[A-Za-z]:", name) or ".." in re.split(r"[/\\]", name):
            remedy = "do not use this archive: get it from its official source"
            raise invalid(str(path), Description(f"the path {name!r}"), "paths within its own folder", remedy)


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise invalid(str(path), Description(error.strerror or str(error)), "a file that can be read") from error


class _Latin1:
    """Replaces `_codecs.encode` in a pickle: in files for Python 2 too, Python 3 stores bytes as text to be encoded."""

    __slots__ = ()  # a pickle cannot change it

    def __call__(self, text: str, encoding: str) -> bytes:
        if not isinstance(text, str) or encoding != "latin1":
            raise ValueError(f"_codecs.encode to {encoding!r}")
        return text.encode("latin1")


class _Type:
    """Replaces `numpy.dtype` in a pickle: NumPy would believe a state that calls bytes pointers to objects."""

    __slots__ = ("data_type",)

    def __init__(self, name: bytes | str, *_: object) -> None:
        self.data_type = np.dtype(name.decode() if isinstance(name, bytes) else name)
        if self.data_type.kind not in "biuf":
            raise ValueError(f"an array of type {self.data_type}")

    def __setstate__(self, state: Any) -> None:
        order: Any = state[1].decode() if isinstance(state[1], bytes) else state[1]
        self.data_type = self.data_type.newbyteorder(order)


class _Array:
    """Replaces `_reconstruct` in a pickle: an array, which is built when the pickle gives its state."""

    __slots__ = ("array",)
    array: NDArray[Any]

    def __init__(self, *_: object) -> None: ...

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, by_columns, data = state
        self.array = np.frombuffer(data, kind.data_type).reshape(shape, order="F" if by_columns else "C")


# What CIFAR's pickles refer to besides plain values: functions that rebuild arrays and bytes, and the array types.
_ALLOWED: dict[tuple[str, str], Any] = {
    (f"numpy{core}.multiarray", "_reconstruct"): _Array for core in (".core", "._core")
} | {("numpy", "ndarray"): "ndarray", ("numpy", "dtype"): _Type, ("_codecs", "encode"): _Latin1()}


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, where: str) -> None:
        super().__init__(io.BytesIO(data), encoding="bytes")
        self.where = where

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            expected = "plain values and arrays only"
            raise invalid(self.where, f"{module}.{name}", expected, "do not use this file") from None


def load_pickle(data: bytes, where: str) -> dict[str, Any]:
    """Load a dictionary from a pickle of plain values and NumPy arrays; anything else is refused before it can run.

    >>> load_pickle(pickle.dumps({"labels": [3, 1]}), "example")
    {'labels': [3, 1]}
    >>> load_pickle(pickle.dumps({"labels": eval}), "example")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    parabolic.checks.InputError: example: got 'builtins.eval', expected plain values and arrays only; ...
    """
    try:
        value = _Unpickler(data, where).load()
        if isinstance(value, dict):
            return {
                key.decode() if isinstance(key, bytes) else str(key): item.array if isinstance(item, _Array) else item
                for key, item in value.items()
            }
    except InputError:
        raise
    except Exception as error:  # a broken pickle can raise anything
        raise invalid(where, Description(f"{type(error).__name__}: {error}"), "a pickle that can be read") from error
    raise invalid(where, type(value), "a pickled dictionary")


def download(url: str, path: Path, sha256: str, progress: ShowProgress | None = None) -> Path:
    """Download a file, resuming an earlier attempt if there is one, and keep it only if its hash is correct.

    Args:
        url: http or https.
        path: where the file goes; a partial download is stored beside it as `<name>.part`.
        sha256: the expected hash of the whole file.
        progress: called with the number of bytes received so far.
    """
    if not url.startswith(("http://", "https://")):
        raise invalid("url", url, "http:// or https://")
    if path.exists() and sha256_of(path) == sha256:
        return path
    part = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _fetch(url, part, path.name, progress)
    except (urllib.error.URLError, http.client.HTTPException, ConnectionError) as error:
        received = part.stat().st_size if part.exists() else 0
        resume = f"run it again to resume after {received:,} bytes"
        remedy = f"{resume}, or get the file elsewhere and pass its folder with --from"
        raise invalid("download", Description(f"{error} from {url}"), "the whole file", remedy) from error
    except OSError as error:
        remedy = "free some space, or set PARABOLIC_DATA to another folder; run it again to resume"
        got = Description(f"{error.strerror or error} ({part})")
        raise invalid("data folder", got, "room for the file", remedy) from error
    if (digest := sha256_of(part)) != sha256:
        part.unlink()
        remedy = "it was deleted: run it again, or get the file elsewhere and pass its folder with --from"
        raise invalid("download", Description(f"SHA-256 {digest}"), f"SHA-256 {sha256} of {url}", remedy)
    os.replace(part, path)
    return path


def _fetch(url: str, part: Path, name: str, progress: ShowProgress | None) -> None:
    received = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={received}-"} if received else {})
    try:
        with _network_errors():
            response = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        # The server has no more bytes: the hash decides whether ours are the whole file.
        if error.code == 416 and received:
            return
        raise
    with response:
        resumed = response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {received}-")
        done = received if resumed else 0
        length = response.headers.get("Content-Length")
        total = None if length is None else done + int(length)
        with open(part, "ab" if resumed else "wb") as file:
            while block := _next_block(response):
                file.write(block)
                done += len(block)
                if progress:
                    progress(name, done, total)
    if total is not None and done < total:
        raise ConnectionError(f"the connection ended after {done:,} of {total:,} bytes")


def _next_block(response: Any) -> bytes:
    with _network_errors():
        block: bytes = response.read(CHUNK)
    return block


@contextmanager
def _network_errors() -> Iterator[None]:
    """Tell the network's errors from those of the disk: both are OSErrors, such as for a network that is gone."""
    try:
        yield
    except urllib.error.URLError:
        raise
    except OSError as error:
        raise ConnectionError(str(error)) from error
