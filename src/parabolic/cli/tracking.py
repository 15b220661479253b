"""What the commands that train share: the trackers that are told of it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console

from parabolic.engine import TRACKERS, Tracker

__all__ = ["Track", "tracking"]

Track = Annotated[
    str | None,
    typer.Option(
        metavar="NAMES",
        help=f"Tell these trackers too: {', '.join(TRACKERS)}, with commas between them. They write to the folder "
        "`tracked`, or the one that PARABOLIC_TRACKED names.",
    ),
]


@contextmanager
def tracking(names: str | None, settings: Mapping[str, Any] | None = None) -> Iterator[Tracker | None]:
    """The trackers of these names, if there are any; what goes wrong with one is told on standard error."""
    if names is None:
        yield None
        return
    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    folder = os.environ.get("PARABOLIC_TRACKED") or "tracked"
    with Tracker(names, folder, settings=settings, warn=console.print) as tracker:
        yield tracker
