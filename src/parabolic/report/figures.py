"""Pictures, in colours that colour-blind readers can tell apart."""

from __future__ import annotations

import re
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from parabolic.checks import invalid
from parabolic.engine import BoundsRow
from parabolic.files import atomic_write
from parabolic.options import dotted
from parabolic.plugins import require
from parabolic.profile import Profile
from parabolic.report.statements import STATEMENTS

__all__ = ["check_picture", "draw_bounds", "draw_profiles", "figure", "legend_below"]

SUFFIXES = (".png", ".svg", ".pdf")

# Fonts with Chinese, Japanese or Korean characters, in the systems that have them: matplotlib's own have none.
EAST_ASIAN = (
    "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans CJK KR", "Noto Sans SC", "Noto Sans JP", "Noto Sans KR",
    "Source Han Sans SC", "WenQuanYi Micro Hei", "WenQuanYi Zen Hei", "Droid Sans Fallback", "IPAGothic", "NanumGothic",
    "Microsoft YaHei", "Yu Gothic", "Malgun Gothic", "PingFang SC", "Hiragino Sans", "Apple SD Gothic Neo",
    "Arial Unicode MS",
)  # fmt: skip

MISSING = r"Glyph .* missing from"  # matplotlib's warning

# Okabe and Ito's colours, each with a marker, so that classes also differ in black and white.
COLOURS = ("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


def check_picture(name: str, path: Path) -> None:
    """Refuse a file name whose format cannot be drawn, and any if matplotlib is not installed."""
    if path.suffix.lower() not in SUFFIXES:
        raise invalid(name, str(path), f"a file that ends in {', '.join(SUFFIXES)}")
    require("matplotlib", "plot", name, "matplotlib")


@contextmanager
def figure(path: Path, rows: int, columns: int, width: float, height: float) -> Iterator[tuple[Any, Any]]:
    """A figure with a grid of axes, written to `path` at the end, atomically; names may have dollar signs."""
    matplotlib = require("matplotlib", "plot", "plot", "matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.font_manager import fontManager

    installed = {*fontManager.get_font_names()}
    families = [*matplotlib.rcParams["font.family"], *(name for name in EAST_ASIAN if name in installed)]
    with matplotlib.rc_context({"text.parse_math": False, "font.family": families}), _without_glyph_warnings():
        canvas = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(canvas)
        yield canvas, canvas.subplots(rows, columns, squeeze=False)
        with atomic_write(path) as temporary:
            canvas.savefig(temporary, dpi=150, format=path.suffix.lstrip(".") or "png")


@contextmanager
def _without_glyph_warnings() -> Iterator[None]:
    """Replace matplotlib's warnings about each character that no font has by a single one."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", MISSING)
        yield
    missing = {str(each.message) for each in caught if re.match(MISSING, str(each.message))}
    for each in caught:
        if str(each.message) not in missing:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    if missing:
        got = f"the picture has boxes in place of {len(missing)} characters, as no font that was found has them"
        warnings.warn(f"{got}; install one that does, such as Noto Sans CJK", UserWarning, stacklevel=5)


def legend_below(canvas: Any, axis: Any, columns: int) -> None:
    """Put the legend of an axis below the figure, in at most so many columns, as far as there is room for them.

    Names that are wider than the figure are wrapped. A tall legend makes the figure taller.
    """
    handles, names = axis.get_legend_handles_labels()
    for ncols, wrap_at in [*((n, 200) for n in range(columns, 0, -1)), *((1, n) for n in range(100, 0, -20))]:
        labels = [textwrap.fill(name, wrap_at) for name in names]
        legend = canvas.legend(handles, labels, loc="outside lower center", ncols=ncols, frameon=False)
        size = legend.get_window_extent(canvas.canvas.get_renderer())
        if size.width <= 0.98 * canvas.bbox.width or wrap_at == 20:
            break
        legend.remove()
    height = canvas.get_figheight()
    canvas.set_figheight(height + max(0.0, size.height / canvas.dpi - 0.15 * height))


def draw_profiles(profiles: Sequence[Profile], path: str | Path, title: str) -> Path:
    """Draw u over the plane after each task: a heat map with the memory, its hull and its eps-balls.

    Args:
        profiles: one per task; their points are the points of a grid that lie within the hull.
        path: where to write the picture.
        title: its title.
    """
    path = Path(path)
    span = torch.cat([profile.domain.points for profile in profiles])
    low, high = span.amin(0).tolist(), span.amax(0).tolist()
    pad = 0.06 * max(high[0] - low[0], high[1] - low[1])
    top = max(float(profile.u.mean.max()) for profile in profiles)
    with figure(path, 1, len(profiles), 4.6 * len(profiles) + 0.8, 4.9) as (canvas, axes):
        for task, (axis, profile) in enumerate(zip(axes[0], profiles, strict=True)):
            image = axis.pcolormesh(*_field(profile), cmap="viridis", vmin=0, vmax=top, shading="nearest")
            _draw_memory(axis, profile)
            axis.set(
                title=f"after task {task + 1}", xlabel="first coordinate", ylabel="" if task else "second coordinate",
                xlim=(low[0] - pad, high[0] + pad), ylim=(low[1] - pad, high[1] + pad), aspect="equal",
            )  # fmt: skip
        canvas.colorbar(image, ax=list(axes[0]), label=f"expected loss u(x, t = {profiles[0].t:g})", shrink=0.85)
        legend_below(canvas, axes[0][-1], columns=12)
        canvas.suptitle(title)
    return path


def draw_bounds(rows: Sequence[BoundsRow], path: str | Path, title: str) -> Path:
    """Draw the losses on memory, on the first and on the last task after each task, beside their bounds."""
    path, tasks, measured = Path(path), [row.task + 1 for row in rows], [dotted(row.as_dict()) for row in rows]

    def losses(quantity: str) -> list[float]:
        return [values[quantity] for values in measured]

    with figure(path, 1, 2, 10.5, 4.6) as (canvas, axes):
        for axis, statement in zip(axes[0], STATEMENTS.values(), strict=True):
            *_, upper = statement.bounds.values()
            axis.plot(tasks, losses(upper), color="black", linestyle="--", marker="_", label="upper bound")
            low, mean, high = (losses(f"{statement.memory}.{part}") for part in ("min", "mean", "max"))
            axis.fill_between(tasks, low, high, color=COLOURS[1], alpha=0.25, label="memory: smallest to largest loss")
            axis.plot(tasks, mean, color=COLOURS[4], marker="s", label="memory: mean loss")
            competing, among_own = losses(statement.competing), losses(statement.among_own)
            axis.plot(tasks, competing, color=COLOURS[5], marker="o", label="task: mean loss, all classes competing")
            axis.plot(tasks, among_own, color=COLOURS[2], marker="^", label="task: mean loss among its own classes")
            panel_title = f"{statement.name}: the {statement.task} task"
            axis.set(title=panel_title, xlabel="after task", ylabel="loss (cross-entropy, nats)", xticks=tasks)
            axis.set_ylim(bottom=0)
        legend_below(canvas, axes[0][0], columns=3)
        canvas.suptitle(title)
    return path


def _draw_memory(axis: Any, profile: Profile) -> None:
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Circle
    from matplotlib.patheffects import Normal, Stroke
    from scipy.spatial import ConvexHull

    points, labels = profile.domain.points.cpu().numpy(), profile.labels.cpu().numpy()
    balls = [Circle(point, profile.domain.balls.radius) for point in points]
    axis.add_collection(PatchCollection(balls, facecolor="none", edgecolor="white", linewidth=0.5, alpha=0.7))
    corners = points[ConvexHull(points).vertices]
    outline = [Stroke(linewidth=3, foreground="black"), Normal()]  # visible on any colour, and in the legend
    ring = np.vstack([corners, corners[:1]]).T
    axis.plot(*ring, color="white", linewidth=1.5, path_effects=outline, label="hull of the memory")
    for label in np.unique(labels):
        members = points[labels == label]
        axis.scatter(
            *members.T, s=22, color=COLOURS[label % 8], marker=MARKERS[label % 8], edgecolor="black", linewidth=0.5,
            label=f"class {label}", zorder=3,
        )  # fmt: skip


def _field(profile: Profile) -> tuple[Any, Any, Any]:
    """The grid's coordinates and u on it, NaN outside the hull."""
    points, u = profile.points.cpu().numpy(), profile.u.mean.cpu().numpy()
    xs, ys = (np.unique(points[:, axis]) for axis in (0, 1))
    field = np.full((len(ys), len(xs)), np.nan)
    field[np.searchsorted(ys, points[:, 1]), np.searchsorted(xs, points[:, 0])] = u
    return xs, ys, field
