"""Atomic writes: a file is replaced completely or not at all."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from secrets import token_hex

from parabolic.checks import Description, invalid

__all__ = [
    "NoFile", "atomic_write", "check_file_name", "disk_errors", "file_name", "sha256_of", "sweep", "sweep_beside",
    "sync_folder", "write_bytes", "write_text",
]  # fmt: skip

KINDS = {
    stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}  # fmt: skip

OWNER = stat.S_IRUSR | stat.S_IWUSR
TO_SYNC = "rb" if os.name == "posix" else "r+b"  # Windows syncs only what may be written


def file_name(text: str) -> str:
    """A text as part of a file's name: characters that not every file system allows become dashes.

    >>> file_name("package.module:My Class!")
    'package.module-My-Class'
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-")


def check_file_name(name: str, remedy: str) -> None:
    """Raise an error unless `name` can be the name of a file or folder as it is.

    >>> check_file_name("a/b", "rename it")
    Traceback (most recent call last):
        ...
    parabolic.checks.InputError: name: got 'a/b', expected letters, digits, dots, dashes and underscores; rename it
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise invalid("name", name, "letters, digits, dots, dashes and underscores", remedy)


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's contents, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class NoFile(OSError):
    """The path exists but is not a regular file: it is left alone, as replacing it would destroy it."""


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A temporary path to write to, beside `path`; it replaces `path` once it is on disk, or is removed on an error.

    A link stays a link: its target is replaced. A replaced file passes on its permissions. A path that exists but is
    not a regular file is refused.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> with atomic_write(folder / "a.txt") as temporary:
    ...     _ = temporary.write_text("done")
    >>> [path.name for path in folder.iterdir()]
    ['a.txt']
    """
    path = _link_target(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{token_hex(8)}")
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else None  # None: a new file, by the umask
    try:
        if mode is not None:
            temporary.touch(mode | OWNER)  # from the start: whoever could not read the old file cannot read this one
        yield temporary
        with temporary.open(TO_SYNC) as file:
            if mode is not None:
                temporary.chmod(mode)
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Sync a folder's entries to disk: otherwise a new file may be gone after a power failure."""
    if os.name != "posix":  # elsewhere a folder cannot be opened
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> Path:
    """Write a text file atomically: a crash at any moment leaves the old file or the complete new one."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path


def write_bytes(path: Path, data: bytes | bytearray) -> Path:
    """Write a file of bytes in the same way."""
    with atomic_write(path) as temporary:
        temporary.write_bytes(data)
    return path


def sweep_beside(path: Path) -> None:
    """Remove temporary files that killed writers of this one file left beside it, unless one may still be writing."""
    path = Path(os.path.realpath(path))
    sweep(path.parent, name=escape(path.name))


def sweep(folder: Path, older: float = 60.0, name: str = "*") -> None:
    """Remove temporary files that killed writers (of `name`) left in a folder, if `older` than so many seconds.

    With 0 all of them, whatever the clock says: it may have been put back since they were written.
    """
    for path in folder.glob(f".{name}." + "[0-9a-f]" * 16):
        with suppress(OSError):  # it has just been renamed, or belongs to someone else
            if not older or time.time() - path.stat().st_mtime > older:
                path.unlink()


@contextmanager
def disk_errors(name: str, folder: Path, remedy: str) -> Iterator[None]:
    """Turn errors of the operating system, such as for a full disk, into one that says what to do.

    >>> with disk_errors("out", Path("a"), "mend it"):
    ...     raise OSError(28, "No space left")
    Traceback (most recent call last):
        ...
    parabolic.checks.InputError: out: got No space left (a), expected a folder with room that can be written to; mend it
    """
    try:
        yield
    except NoFile as error:
        got = Description(error.strerror)
        raise invalid(name, got, "a file, or a name that is free", "name another file") from error
    except OSError as error:
        reason = error.strerror or error
        if folder.is_symlink() and not folder.exists():  # "File exists", in the system's words: the link does
            reason = "a link to a place that does not exist"
        got = Description(f"{reason} ({folder})")
        raise invalid(name, got, "a folder with room that can be written to", remedy) from error


def _link_target(path: Path) -> Path:
    """The target of links, if it is a regular file or does not exist."""
    with suppress(FileNotFoundError):
        kind = stat.S_IFMT(path.stat().st_mode)
        if kind != stat.S_IFREG:
            raise NoFile(errno.EEXIST, f"{KINDS.get(kind, 'something else')} ({path})")
    return Path(os.path.realpath(path))
