"""The looks of a monitor, drawn in a terminal of any width."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import pairwise

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from parabolic.engine import Look, Tail

__all__ = ["View", "bar", "sparkline"]

BLOCKS, PLAIN = "▁▂▃▄▅▆▇█", "_.-=+*#@"  # PLAIN is for terminals without Unicode
ROWS = 12  # classes that have a bar each; more are drawn as one line
WIDE = 72  # columns from which bar charts are placed side by side


def sparkline(values: Sequence[float | None], width: int, blocks: str = BLOCKS) -> str:
    """A curve of at most `width` characters, each the mean of one or more values; an x if that is not finite.

    >>> sparkline([0, 1, None, 2, 3, math.nan], 10)
    '▁▃ ▆█x'
    >>> sparkline(range(100), 5)
    '▁▃▅▆█'
    """
    if not values:
        return ""
    places = min(width, len(values))
    cuts = [i * len(values) // places for i in range(places + 1)]
    parts = [[value for value in values[a:b] if value is not None] for a, b in pairwise(cuts)]
    means = [sum(part) / len(part) for part in parts if part]
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    top, span = len(blocks) - 1, (high - low) or 1.0
    marks = iter(blocks[round(top * ((mean - low) / span))] if math.isfinite(mean) else "x" for mean in means)
    return "".join(next(marks) if part else " " for part in parts)


def bar(count: int, most: int, width: int, block: str = "█") -> str:
    """A bar of length `width` for the largest count, and of at least one block for any count above 0.

    >>> bar(3, 6, 8)
    '████'
    """
    return block * (max(1, round(width * count / most)) if count else 0)


class View:
    """The state of a run that is watched: its progress, its curves, and what its memory contains."""

    def __init__(self, tail: Tail, name: str = "") -> None:
        self.tail, self.name = tail, name
        self.poll()

    def poll(self) -> bool:
        """Read what is new, and return whether more may come: the run has yet to start, or is running."""
        self.running = self.tail.written  # asked before reading, so that the last output is not missed
        self.tail.poll()
        return not self.tail.began or (self.running and not self.tail.ended)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """Render everything to the available width."""
        blocks = BLOCKS if options.encoding.lower().startswith("utf") else PLAIN
        yield Text(self._status_line(), style="bold")
        looks = self.tail.looks
        if not looks:
            yield Text("nothing measured yet")
            return
        yield _curves(looks, options.max_width, blocks)
        last = looks[-1]
        if last.note:
            yield Text(last.note, style="dim")
        if last.kept is not None:
            yield Text(
                f"memory: {last.kept:,} of {last.capacity:,} kept, out of {last.offered:,} examples", style="bold"
            )
            yield _bars(last, options.max_width, blocks)

    def _status_line(self) -> str:
        """The line with the run's progress, speed and state."""
        began, ended, looks = self.tail.began, self.tail.ended, self.tail.looks
        step, until = looks[-1].step if looks else began.get("step", 0), began.get("until")
        step = ended.get("step", step)
        title = " on ".join(str(began[name]) for name in ("learner", "stream") if began.get(name))
        parts = [title or self.name, f"step {step:,}" + (f" of {until:,}" if until else "")]
        current = [look for look in looks if look.time >= began.get("time", 0)]  # of the process that is writing now
        elapsed = current[-1].time - current[0].time if current else 0.0
        if self.running and not ended and elapsed > 0:  # 0 with a single look, below 0 if the clock was set back
            rate = (current[-1].step - current[0].step) / elapsed
            parts.append(f"{rate:.3g} steps/s")
            if until and rate:
                parts.append(f"{timedelta(seconds=round((until - step) / rate))} left")
        return ", ".join([*parts, self._state()])

    def _state(self) -> str:
        ended = self.tail.ended
        if ended:
            return f"{ended.get('how', 'ended')}" + (f": {ended['why']}" if ended.get("why") else "")
        if not self.tail.began:
            return "not started"
        return "running" if self.running else "stopped: its process is gone"


def _curves(looks: Sequence[Look], width: int, blocks: str) -> RenderableType:
    """A line for each figure: its name, its current value, and its curve."""
    since = next((f" since step {look.since:,}" for look in reversed(looks) if look.since is not None), "")
    formats = {
        "loss": ("loss", "{:.4g}"),
        "ahead": ("right before learning, %", "{:.1f}"),
        "balanced": ("averaged over classes, %", "{:.1f}"),
        "memory_loss": ("loss on memory", "{:.4g}"),
        "drift": (f"drift{since}", "{:+.2g}"),
        "bound": ("bound (Prop. 1)", "{:.4g}"),
        "accuracy": ("accuracy so far, %", "{:.1f}"),
    }
    rows: list[tuple[str, str, list[float | None]]] = []
    for field, (title, number_format) in formats.items():
        values = [getattr(look, field) for look in looks]
        measured = [value for value in values if value is not None]
        if measured:
            rows.append((title, number_format.format(measured[-1]), values))
    if not rows:
        return Text("no loss reported")
    room = max(4, width - 4 - max(len(title) for title, _, _ in rows) - max(len(now) for _, now, _ in rows))
    table = Table.grid(padding=(0, 2, 0, 0))
    for justify in ("left", "right", "left"):
        table.add_column(justify=justify, overflow="fold")
    for title, now, values in rows:
        table.add_row(title, now, sparkline(values, min(room, 60), blocks))
    return table


def _bars(look: Look, width: int, blocks: str) -> RenderableType:
    side = width // 2 - 2 if width >= WIDE else width
    parts = []
    if look.classes:
        parts.append(_by_class(look.classes, side, blocks))
    if look.tenths:
        names = ["oldest tenth", *[""] * (len(look.tenths) - 2), "newest tenth"]
        parts.append(_chart("by age", names, look.tenths, side, blocks))
    return Columns(parts, padding=(0, 4)) if width >= WIDE else Group(*parts)


def _by_class(classes: Mapping[int, int], width: int, blocks: str) -> RenderableType:
    if len(classes) <= ROWS:
        return _chart("by class", [str(label) for label in classes], list(classes.values()), width, blocks)
    least, most = min(classes.values()), max(classes.values())
    counts = f"{least}" if least == most else f"{least} to {most}"
    return Text(
        f"by class: {len(classes)} classes, {counts} of each\n{sparkline(list(classes.values()), width, blocks)}"
    )


def _chart(title: str, names: Sequence[str], counts: Sequence[int], width: int, blocks: str) -> RenderableType:
    most, name_width = max(counts), max(map(len, names))
    room = max(4, min(30, width - name_width - len(str(most)) - 3))
    lines = [
        f"{name:>{name_width}} {bar(count, most, room, blocks[-1])} {count}"
        for name, count in zip(names, counts, strict=True)
    ]
    return Text("\n".join([title, *lines]), no_wrap=True, overflow="crop")
