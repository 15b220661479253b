"""The option `--track` of the commands that train."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from parabolic.cli.common import plain_console
from parabolic.engine import TRACKERS, Tracker

__all__ = ["Track", "tracking"]

Track = Annotated[
    str | None,
    typer.Option(
        metavar="NAMES",
        help=f"Also log to these trackers, separated by commas: {', '.join(TRACKERS)}. They write to the folder "
        "`tracked`, or to PARABOLIC_TRACKED if that is set.",
    ),
]


@contextmanager
def tracking(names: str | None, settings: Mapping[str, Any] | None = None) -> Iterator[Tracker | None]:
    """Yield a tracker for these names, or None without names; its problems are printed on standard error."""
    if names is None:
        yield None
        return
    folder = os.environ.get("PARABOLIC_TRACKED") or "tracked"
    with Tracker(names, folder, settings=settings, warn=plain_console(stderr=True).print) as tracker:
        yield tracker
