"""Plots of anytime accuracy: in a terminal, and as a file for a talk or a paper."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.text import Text

from parabolic.checks import check_name, invalid
from parabolic.files import disk_errors
from parabolic.plugins import require
from parabolic.report.figures import COLOURS, MARKERS, check_picture, figure, legend_below
from parabolic.report.scenes import Method, Scene

__all__ = ["STYLES", "draw_curves", "plot_text"]

STYLES = ("screen", "paper")
SIGNS = "●■▲◆▼✚✖★○□△◇"
INKS = ("blue", "yellow", "green", "red", "cyan", "magenta", "white")
LINES = ("-", "--", ":", "-.")
# For a column of a LaTeX page: fonts of the size of its captions, and its width and height in inches.
PAPER = {
    "font.family": "serif", "font.serif": ["STIXGeneral"], "mathtext.fontset": "stix", "font.size": 8,
    "axes.labelsize": 8, "legend.fontsize": 7, "xtick.labelsize": 7, "ytick.labelsize": 7, "axes.linewidth": 0.6,
    "lines.linewidth": 1.1, "lines.markersize": 3.5, "pdf.fonttype": 42, "svg.fonttype": "none",
}  # fmt: skip
COLUMN = (3.25, 2.4)


def plot_text(scene: Scene, width: int = 80, height: int = 16) -> Text:
    """Plot the anytime accuracy of a scene's best methods as text; the legend's signs identify them without colour.

    Args:
        scene: what to plot.
        width: available columns.
        height: lines for the curves; the axis and the legend come below.
    """
    methods = scene.done[: len(SIGNS)]
    text = Text(f"{scene.title}: mean accuracy over the tasks so far{scene.remark}, %\n", style="bold")
    if not methods:
        return text.append("no run has finished here yet\n")
    tasks = max(method.curves.shape[1] for method in methods)
    canvas = _Canvas(max(width - 7, 20), max(height, 4))
    for index, method in reversed(list(enumerate(methods))):  # the best one last, on top of the others
        mean = method.curves.mean(0)
        columns = [round(task * (canvas.width - 1) / max(tasks - 1, 1)) for task in range(len(mean))]
        canvas.line(columns, mean, index, (index + 1) / (len(methods) + 1))
    lowest, labels = canvas.height - 1, {0: "100", (canvas.height - 1) // 2: " 50"}
    for row in range(canvas.height):
        text.append(f"{labels.get(row, '  0' if row == lowest else '   ')} {'┤' if row in (*labels, lowest) else '│'}")
        text.append_text(canvas.row(row)).append("\n")
    text.append("    └" + "─" * canvas.width + "\n")
    text.append_text(_task_axis(tasks, canvas.width))
    for index, method in enumerate(methods):
        acc = method.summary("acc")
        spread = f" ± {acc.sd:.1f}" if acc.n > 1 else ""
        text.append(f"{SIGNS[index]} ", style=INKS[index % len(INKS)])
        text.append(f"{method.name}: {acc.mean:.1f}{spread} % at the end (n={acc.n})\n")
    if len(scene.done) > len(methods):
        text.append(f"and {len(scene.done) - len(methods)} more with lower accuracy\n")
    return text


def draw_curves(scene: Scene, path: str | Path, style: str = "screen") -> Path:
    """Draw all methods of a scene as PNG, SVG or PDF, by the file's suffix, each with a band of one standard deviation.

    `style="paper"` makes it as wide as a column of a LaTeX page, with a small serif font and no title.
    """
    path = Path(path)
    check_name("style", style, STYLES)
    check_picture("output", path)
    if not scene.done:
        raise invalid("runs", scene.title, "a finished run to draw")
    paper, tasks = style == "paper", 1
    size = COLUMN if paper else (8.0, 5.0)
    with (
        require("matplotlib", "plot", "output", "matplotlib").rc_context(PAPER if paper else {}),
        disk_errors("output", path, "name another file"),
        figure(path, 1, 1, *size) as (canvas, ((axis,),)),
    ):
        for index, method in enumerate(scene.done):
            tasks = max(tasks, _draw_curve(axis, index, method))
        ylabel = textwrap.fill(f"mean accuracy so far{scene.remark} (%)", 24)
        axis.set(xlabel="after task", ylabel=ylabel, ylim=(0, 102))
        axis.set_xticks(range(1, tasks + 1, math.ceil(tasks / 10)))
        axis.grid(alpha=0.3, linewidth=0.5)
        if not paper:
            axis.set_title(textwrap.fill(scene.title, 70))
        legend_below(canvas, axis, columns=2 if paper else 3)
    return path


def _draw_curve(axis: Any, index: int, method: Method) -> int:
    curves = method.curves
    tasks, mean = np.arange(1, curves.shape[1] + 1), curves.mean(0)
    colour = COLOURS[index % len(COLOURS)]
    line, mark = LINES[index // len(COLOURS) % len(LINES)], MARKERS[index % len(MARKERS)]
    axis.plot(tasks, mean, color=colour, linestyle=line, marker=mark, label=f"{method.name} (n={len(curves)})")
    if len(curves) > 1:
        spread = curves.std(0, ddof=1)
        axis.fill_between(tasks, mean - spread, mean + spread, color=colour, alpha=0.18, linewidth=0)
    return len(tasks)


def _task_axis(tasks: int, width: int) -> Text:
    """The task numbers below the axis, as many as there is room for, and the axis label."""
    line = [" "] * (width + 6)
    step = math.ceil(tasks / max(1, width // 5))
    for task in range(0, tasks, step):
        number = str(task + 1)
        start = 5 + round(task * (width - 1) / max(tasks - 1, 1)) - (len(number) - 1)
        line[start : start + len(number)] = number
    return Text("".join(line).rstrip() + "  task\n")


class _Canvas:
    """A drawing of Braille dots, two by four per character, each character in one colour; signs are drawn on top."""

    BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.dots = np.zeros((height, width), dtype=np.int64)
        self.inks = np.zeros((height, width), dtype=np.int64)
        self.signs = np.full((height, width), "", dtype=object)

    def line(self, columns: Sequence[int], values: NDArray[np.float64], index: int, share: float) -> None:
        """Draw a curve through values from 0 to 100, with a sign at each and one at a `share` of the way after it."""
        task_columns = np.array(columns) * 2
        dot_columns = np.arange(task_columns[0], task_columns[-1] + 1)
        depth = (1 - np.interp(dot_columns, task_columns, values).clip(0, 100) / 100) * (self.height * 4 - 1)
        heights = depth.round().astype(int).tolist()
        for x, y, before in zip(dot_columns.tolist(), heights, [heights[0], *heights], strict=False):
            for dot in range(min(before, y), max(before, y) + 1):  # no gaps where it is steep
                self.dots[dot // 4, x // 2] |= self.BITS[dot % 4][x % 2]
                self.inks[dot // 4, x // 2] = index
        between = [round(one + share * (other - one)) for one, other in itertools.pairwise(columns)]
        for column in (*columns, *between):  # where curves coincide, the signs in between still show each
            row = heights[2 * column - int(task_columns[0])] // 4
            self.signs[row, column], self.inks[row, column] = SIGNS[index], index

    def row(self, number: int) -> Text:
        """One line of the drawing, in colour."""
        line = Text()
        for dots, ink, sign in zip(self.dots[number], self.inks[number], self.signs[number], strict=True):
            letter = sign or (chr(0x2800 + dots) if dots else " ")
            line.append(letter, style=INKS[ink % len(INKS)] if letter != " " else "")
        return line
