"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex

__all__ = ["write_text", "written_whole"]


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A path to write to, beside `path`; it takes its place once it is written and on disk, and else is removed.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> with written_whole(folder / "a.txt") as aside:
    ...     _ = aside.write_text("done")
    >>> [each.name for each in folder.iterdir()]
    ['a.txt']
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{token_hex(8)}")
    try:
        yield aside
        with aside.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> Path:
    """Write a text file, so that a crash at any moment leaves what was there or all of the new."""
    with written_whole(path) as aside:
        aside.write_text(text)
    return path
