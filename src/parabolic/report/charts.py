"""The charts of the report page as Plotly figures: plain dictionaries that the browser draws."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parabolic.report.scenes import Method, Scene
from parabolic.report.statements import STATEMENTS

__all__ = [
    "MAX_METHODS", "anytime_chart", "bounds_charts", "bridge_chart", "forgetting_chart", "heat_map", "tradeoff_chart",
]  # fmt: skip

Figure = dict[str, Any]

MAX_METHODS = 12  # methods in a chart: the best ones
TASKS = 100  # rows and columns of a heat map: a page of a thousand tasks would have hundreds of megabytes
# Okabe and Ito's colours without yellow and black, which disappear on white and dark pages; instead, a grey.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#8A8A8A")
DASHES = ("solid", "dash", "dot", "dashdot")  # one for each round through the colours
MARKERS = ("circle", "square", "diamond", "triangle-up", "x", "triangle-down", "cross", "star")


def anytime_chart(scene: Scene) -> Figure:
    """The mean accuracy over the tasks seen so far, after each task, with a band of one standard deviation."""
    traces: list[Figure] = []
    longest = 0
    for index, method in enumerate(scene.done[:MAX_METHODS]):
        mean, sd, n = _over_seeds(method.curves)
        tasks, style = list(range(1, len(mean) + 1)), _style(index)
        longest = max(longest, len(tasks))
        if n > 1:
            traces.append(_band(tasks, mean - sd, mean + sd, style["colour"]) | {"legendgroup": str(index)})
        traces.append(
            {
                "type": "scatter",
                "name": _shorten(method.name),
                "legendgroup": str(index),
                "x": tasks,
                "y": _json_numbers(mean),
                "customdata": [[spread, n] for spread in _json_numbers(sd)],
                "mode": "lines+markers",
                "line": {"color": style["colour"], "dash": style["dash"], "width": 2.5},
                "marker": {"symbol": style["marker"], "size": 8},
                "meta": _run_keys(method),
                "hovertemplate": "after task %{x}: %{y:.1f} %"
                + _spread_template(n)
                + "<extra>%{fullData.name}</extra>",
            }
        )
    return {
        "data": traces,
        "layout": {
            "xaxis": _axis("after task", dtick=_tick_step(longest)),
            "yaxis": _axis(f"accuracy so far{scene.remark}, %", range=[0, 101]),
        },
    }


def tradeoff_chart(scene: Scene) -> Figure:
    """Accuracy at the end against training time; a line joins the methods that no other beats in both."""
    methods = scene.done[:MAX_METHODS]
    points = [(method.summary("seconds"), method.summary("acc")) for method in methods]
    seconds = [time.mean for time, _ in points]
    front = sorted(
        (time.mean, acc.mean)
        for time, acc in points
        if not any(t.mean <= time.mean and a.mean >= acc.mean and (t, a) != (time, acc) for t, a in points)
    )
    traces: list[Figure] = [
        {
            "type": "scatter", "mode": "lines", "name": "nothing is both faster and better",
            "x": _json_numbers([x for x, _ in front], 3), "y": _json_numbers([y for _, y in front]),
            "line": {"color": "#8A8A8A", "dash": "dot", "width": 1.5}, "hoverinfo": "skip",
        }
    ]  # fmt: skip
    for index, (method, (time, acc)) in enumerate(zip(methods, points, strict=True)):
        style = _style(index)
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": _shorten(method.name),
                "x": _json_numbers([time.mean], 3),
                "y": _json_numbers([acc.mean]),
                "error_x": _error_bars([time.sd], 3),
                "error_y": _error_bars([acc.sd]),
                "marker": {"symbol": style["marker"], "size": 13, "color": style["colour"]},
                "meta": _run_keys(method),
                "hovertemplate": f"%{{x:.3g}} s, %{{y:.1f}} % (n = {acc.n})<extra>%{{fullData.name}}</extra>",
            }
        )
    logarithmic = min(seconds) > 0 and max(seconds) / min(seconds) > 8
    return {
        "data": traces,
        "layout": {
            "showlegend": len(methods) <= 6,  # a longer one would leave no room for the points
            "xaxis": _axis(f"training time of a run, s{', logarithmic' if logarithmic else ''}")
            | ({"type": "log", **_log_ticks(seconds)} if logarithmic else {"rangemode": "tozero"}),
            "yaxis": _axis("accuracy at the end, %", range=[0, 101]),
        },
    }


def _log_ticks(values: Sequence[float]) -> dict[str, Any]:
    """1, 2 and 5 times every power of ten, written out: Plotly would write 0.5 as a small 5."""
    powers = range(math.floor(math.log10(min(values))) - 1, math.ceil(math.log10(max(values))) + 2)
    marks = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
    return {"tickvals": marks, "ticktext": [f"{mark:g}" for mark in marks]}


def forgetting_chart(scene: Scene) -> Figure:
    """How many points the earlier tasks have lost from their best: one bar per method."""
    drawn = enumerate(scene.done[:MAX_METHODS])
    summaries = [(index, method, method.cell("forgetting").ours) for index, method in drawn]
    measured = [(index, method, summary) for index, method, summary in summaries if summary is not None]
    methods, lost = [method for _, method, _ in measured], [summary for *_, summary in measured]
    names = _make_distinct([_shorten(method.name, 22) for method in methods])
    bars: Figure = {
        "type": "bar",
        "orientation": "h",
        "x": _json_numbers([summary.mean for summary in lost]),
        "y": names,
        "customdata": [[summary.n] for summary in lost],
        "error_x": _error_bars([summary.sd for summary in lost]),
        "marker": {"color": [_style(index)["colour"] for index, *_ in measured]},
        "meta": [_run_keys(method) for method in methods],
        "hovertemplate": "%{x:.1f} points (n = %{customdata[0]})<extra>%{y}</extra>",
        "showlegend": False,
    }
    return {
        "data": [bars],
        "layout": {
            "xaxis": _axis(f"forgetting{scene.remark}, points", rangemode="tozero"),
            "yaxis": {"autorange": "reversed", "automargin": True, "type": "category"},
        },
    }


def heat_map(method: Method) -> Figure:
    """The accuracy matrix of a method: a row after each task, a column for each task that was tested.

    Of more than a hundred tasks every second, or third and so on, is shown, counted from the last.
    """
    matrices = method.matrices
    total, step = matrices.shape[1], math.ceil(matrices.shape[1] / TASKS)
    first = (total - 1) % step
    mean, sd, n = _over_seeds(matrices[:, first::step, first::step])
    tasks = list(range(first + 1, total + 1, step))
    few = len(tasks) <= 10
    labels = [["" if math.isnan(accuracy) else f"{accuracy:.0f}" for accuracy in row] for row in mean]
    return {
        "data": [
            {
                "type": "heatmap",
                "z": [_json_numbers(row) for row in mean],
                "x": tasks,
                "y": tasks,
                "zmin": 0,
                "zmax": 100,
                "colorscale": "Cividis",
                "xgap": 1,
                "ygap": 1,
                "hoverongaps": False,
                "customdata": [_json_numbers(row) for row in sd],
                "text": labels,
                "texttemplate": "%{text}" if few else "",
                "meta": _run_keys(method),
                "colorbar": {"title": {"text": "%"}, "thickness": 12, "len": 0.9},
                "hovertemplate": "after task %{y}, on task %{x}: %{z:.1f} %"
                + (f" ± %{{customdata:.1f}} (n = {n})" if n > 1 else " (n = 1)")
                + "<extra></extra>",
            }
        ],
        "layout": {
            "xaxis": _axis("accuracy on task", dtick=_tick_step(total), showgrid=False, zeroline=False),
            "yaxis": _axis("after task", dtick=_tick_step(total), showgrid=False, zeroline=False)
            | {"autorange": "reversed"},
        },
    }


def bounds_charts(measured: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Figure]:
    """The bounds and the actual losses after each task, averaged over the measured runs."""
    tasks = list(range(1, min(len(rows) for rows in measured) + 1))

    def mean_of(quantity: str) -> list[float | None]:
        values = [[float(rows[task - 1][quantity]) for task in tasks] for rows in measured]
        return _json_numbers(np.mean(values, 0), 4)

    charts = {}
    for statement in STATEMENTS.values():
        task_name = f"{statement.task} task"
        lines = [
            ("memory: mean loss", f"{statement.memory}.mean", COLOURS[0], "solid", "square"),
            (f"{task_name}: mean loss, all classes competing", statement.competing, COLOURS[3], "solid", "circle"),
            (f"{task_name}: among its own classes", statement.among_own, COLOURS[2], "dot", "triangle-up"),
            *[
                (name, quantity, COLOURS[6], DASHES[1 + i], "line-ew-open")
                for i, (name, quantity) in enumerate(statement.bounds.items())
            ],
        ]
        band = _band(tasks, mean_of(f"{statement.memory}.min"), mean_of(f"{statement.memory}.max"), COLOURS[4])
        traces = [band | {"name": "memory: smallest to largest loss", "showlegend": True}] + [
            {
                "type": "scatter", "mode": "lines+markers", "name": name, "x": tasks, "y": mean_of(quantity),
                "line": {"color": colour, "dash": dash, "width": 2.5}, "marker": {"symbol": marker, "size": 8},
                "hovertemplate": f"after task %{{x}}: %{{y:.3f}} nats (n = {len(measured)})<extra></extra>",
            }
            for name, quantity, colour, dash, marker in lines
        ]  # fmt: skip
        charts[f"{statement.name}: the {task_name}"] = {
            "data": traces,
            "layout": {
                "xaxis": _axis("after task", dtick=_tick_step(len(tasks))),
                "yaxis": _axis("loss (cross-entropy), nats", rangemode="tozero"),
            },
        }
    return charts


def bridge_chart(points: NDArray[np.float64], names: tuple[str, str]) -> Figure:
    """Bridges `[bridges, times, 2]` between two points of the plane."""
    traces = [
        {
            "type": "scatter", "mode": "lines+markers", "name": f"bridge {number + 1}",
            "x": _json_numbers(path[:, 0], 3), "y": _json_numbers(path[:, 1], 3),
            "line": {"color": COLOURS[number], "dash": DASHES[number % 4], "width": 2},
            "marker": {"symbol": MARKERS[number], "size": 8},
        }
        for number, path in enumerate(points)
    ]  # fmt: skip
    ends = [points[0, 0], points[0, -1]]
    traces.append(
        {
            "type": "scatter", "mode": "markers", "name": f"from {names[0]} to {names[1]}",
            "x": _json_numbers([end[0] for end in ends], 3), "y": _json_numbers([end[1] for end in ends], 3),
            "marker": {"symbol": "star", "size": 15, "color": COLOURS[6]},
        }
    )  # fmt: skip
    return {
        "data": traces,
        "layout": {"xaxis": _axis("first coordinate"), "yaxis": _axis("second coordinate")},
    }


def _over_seeds(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64], int]:
    """Mean and sample standard deviation over the first dimension, and how many there are."""
    n = len(values)
    return values.mean(0), values.std(0, ddof=1) if n > 1 else np.full(values.shape[1:], np.nan), n


def _style(index: int) -> dict[str, str]:
    """The colour, dash and marker of the method at an index, which distinguish it in black and white too."""
    return {
        "colour": COLOURS[index % len(COLOURS)],
        "dash": DASHES[index // len(COLOURS) % len(DASHES)],
        "marker": MARKERS[index % len(MARKERS)],
    }


def _band(x: Sequence[int], low: Any, high: Any, colour: str) -> Figure:
    return {
        "type": "scatter", "x": [*x, *reversed(x)], "y": _json_numbers([*high, *reversed(list(low))], 4),
        "fill": "toself", "fillcolor": colour, "opacity": 0.18, "mode": "lines", "line": {"width": 0, "color": colour},
        "hoverinfo": "skip", "showlegend": False,
    }  # fmt: skip


def _axis(title: str, **others: Any) -> Figure:
    return {"title": {"text": title}, "automargin": True, **others}


def _tick_step(tasks: int) -> int:
    return 1 if tasks <= 10 else math.ceil(tasks / 10)


def _error_bars(spread: Sequence[float], digits: int = 2) -> Figure:
    visible = not any(map(math.isnan, spread)) or len(spread) > 1
    lengths = [length or 0 for length in _json_numbers(spread, digits)]
    return {"array": lengths, "visible": visible, "thickness": 1.3, "width": 4}


def _json_numbers(values: Any, digits: int = 2) -> list[float | None]:
    """Numbers for JSON, without digits that nobody sees, and with None for NaN and infinity."""
    return [None if value is None or not math.isfinite(value) else round(float(value), digits) for value in values]


def _spread_template(n: int) -> str:
    return " ± %{customdata[0]:.1f} (n = %{customdata[1]})" if n > 1 else " (n = 1)"


def _run_keys(method: Method) -> list[str]:
    return [record.key for record in method.runs.values()]


def _shorten(name: str, length: int = 34) -> str:
    """A name shortened for a legend, and escaped: Plotly interprets some tags."""
    name = name if len(name) <= length else name[: length - 1] + "…"
    return name.replace("&", "&amp;").replace("<", "&lt;")


def _make_distinct(names: Sequence[str]) -> list[str]:
    """Make names distinct: bars of the same name would overlap."""
    return [f"{name} ({index + 1})" if names.count(name) > 1 else name for index, name in enumerate(names)]
