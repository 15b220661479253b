"""Contact sheets: the examples of a stream as a learner sees them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from parabolic.checks import Description, invalid
from parabolic.learners import PCL
from parabolic.report.figures import COLOURS, MARKERS, figure
from parabolic.streams import Normalise, Stream, Task

__all__ = ["Strip", "bridges_of", "draw_sheet"]

COLUMNS = 10
BRIDGES = 2  # between the same ends, so that their randomness is visible
BRIDGE_OPTIONS = ("sigma_x", "sigma_y", "simplex", "times", "horizon", "variant")  # those that a picture shows


@dataclass(frozen=True)
class Strip:
    """Bridges of PCL between an example of the first task and one of the last."""

    paths: Tensor  # [bridges, times, *shape]: images with values from 0 to 1, or points
    labels: list[list[str]]  # the label at each time of each bridge: shares of classes
    ends: tuple[str, str]  # the classes at the two ends
    sigmas: tuple[float, float]  # the noise of examples and of labels


def bridges_of(stream: Stream, options: Mapping[str, Any], *, batch: int = 32, seed: int = 0) -> Strip:
    """Draw bridges as PCL does with these options, except for tempering, which needs a network.

    >>> from parabolic import make_stream
    >>> strip = bridges_of(make_stream("seq-digits"), {"sigma_x": 0.03, "times": 5})
    >>> strip.paths.shape, strip.labels[0][0]
    (torch.Size([2, 5, 1, 8, 8]), '1 100%')
    """
    first = [_arrivals(task, batch, COLUMNS) for task in (stream[0], stream[-1])]
    return _strip(stream, first, _learner(stream, options, seed))


def draw_sheet(stream: Stream, path: str | Path, options: Mapping[str, Any], *, batch: int = 32, seed: int = 0) -> Path:
    """Draw a row of labelled examples for each task, and the bridges that PCL draws between two of them.

    Args:
        stream: of images, or of points in the plane.
        path: where to write the picture.
        options: PCL's.
        batch: how many examples arrive at a step.
        seed: determines the augmentations and the bridges that are drawn.
    """
    path, learner = Path(path), _learner(stream, options, seed)
    if stream.shape == (2,):
        return _draw_points(stream, path, learner, batch)
    if len(stream.shape) != 3 or stream.shape[0] not in (1, 3):
        raise invalid("stream", Description(f"examples of shape {list(stream.shape)}"), "images or points in the plane")
    first = [_arrivals(task, batch, COLUMNS) for task in stream]
    rows = [
        (f"task {task.index + 1}", _images_of_raw(stream, x), _names(stream, y))
        for task, (x, y) in zip(stream, first, strict=True)
    ]
    if stream.augment is not None:
        x, y = first[-1]
        augmented = _images_of_raw(stream, stream.augment(x, learner.generator))
        rows.append((f"task {len(stream)}\naugmented\nfor training", augmented, _names(stream, y)))
    strip = _strip(stream, first, learner)
    times = [f"s = {time:g}" for time in torch.linspace(0, 1, strip.paths.shape[1]).tolist()]
    for number, (images, labels) in enumerate(zip(strip.paths, strip.labels, strict=True)):
        captions = [f"{label}\n{time}" for label, time in zip(labels, times, strict=True)]
        rows.append((f"bridge {number + 1}\nof PCL", images, captions))
    columns = max(COLUMNS, strip.paths.shape[1])
    with figure(path, len(rows), columns, 1.05 * columns + 1, 1.35 * len(rows) + 0.6) as (canvas, axes):
        for axis in axes.flat:
            axis.set_axis_off()
        for row_axes, (name, images, captions) in zip(axes, rows, strict=True):
            row_axes[0].text(-0.25, 0.5, name, transform=row_axes[0].transAxes, ha="right", va="center", fontsize=9)
            for axis, image, caption in zip(row_axes, images, captions, strict=False):
                pixels = image.permute(1, 2, 0).numpy()
                axis.imshow(pixels[..., 0] if pixels.shape[2] == 1 else pixels, cmap="gray", vmin=0, vmax=1)
                axis.text(0.5, -0.06, caption, transform=axis.transAxes, ha="center", va="top", fontsize=7)
        canvas.suptitle(_title(stream, learner), fontsize=11)
    return path


def _learner(stream: Stream, options: Mapping[str, Any], seed: int) -> PCL:
    """A PCL that draws the bridges; its network is not used."""
    bridge_options = {name: options[name] for name in BRIDGE_OPTIONS if name in options}
    return PCL(
        nn.Linear(1, 1), prepare=stream.prepare, classes=stream.classes, bridges=BRIDGES, seed=seed, **bridge_options
    )


def _title(stream: Stream, learner: PCL) -> str:
    blurred = "" if stream.boundaries else ", boundaries blurred"
    return (
        f"{stream.name}: the first examples of each task, with the labels that the learner is given{blurred};\n"
        f"and what PCL learns between two of them (σx = {learner.sigma_x:g}, σy = {learner.sigma_y:g})"
    )


def _arrivals(task: Task, batch: int, count: int) -> tuple[Tensor, Tensor]:
    """The first examples of a task as they arrive, with the labels that the learner is given."""
    x, y = zip(*islice(task.batches(batch), math.ceil(count / batch)), strict=True)
    return torch.cat(x)[:count], torch.cat(y)[:count]


def _strip(stream: Stream, first: list[tuple[Tensor, Tensor]], learner: PCL) -> Strip:
    """Bridges between two of the first examples of the tasks."""
    start, end = _ends(first)
    paths, targets = _bridges(learner, start, end)
    labels = [[_mixture(stream, target) for target in bridge] for bridge in targets]
    images = torch.stack([_images_of_inputs(stream, bridge) for bridge in paths]) if len(stream.shape) == 3 else paths
    ends = _name(stream, start[1]), _name(stream, end[1])
    return Strip(images, labels, ends, (learner.sigma_x, learner.sigma_y))


def _ends(first: list[tuple[Tensor, Tensor]]) -> tuple[tuple[Tensor, int], tuple[Tensor, int]]:
    """An example of the first task, as memory might hold it, and one of the last task that is of another class."""
    (x, y), (others, classes) = first[0], first[-1]
    other = int((classes != y[0]).int().argmax())
    return (x[0], int(y[0])), (others[other], int(classes[other]))


def _bridges(learner: PCL, start: tuple[Tensor, int], end: tuple[Tensor, int]) -> tuple[Tensor, Tensor]:
    """The paths between two examples, as inputs of a model, and between their labels, `[bridges, times, ...]`."""
    assert learner.classes is not None
    x = learner.inputs(torch.stack([start[0], end[0]]))
    y = learner.error.points(torch.tensor([start[1], end[1]]), learner.classes, x.dtype)
    paths = learner.paths(x[:1], x[1:], learner.sigma_x)
    return paths[0], learner.label_paths(y[:1], y[1:], learner.sigma_y)[0]


def _images_of_raw(stream: Stream, x: Tensor) -> Tensor:
    """Raw images with values from 0 to 1."""
    if isinstance(stream.prepare, Normalise):
        return _images_of_inputs(stream, stream.prepare(x))
    return _images_of_inputs(stream, x.float() / 255 if x.dtype == torch.uint8 else x)


def _images_of_inputs(stream: Stream, inputs: Tensor) -> Tensor:
    """Inputs of the model as images with values from 0 to 1."""
    if isinstance(stream.prepare, Normalise):
        return stream.prepare.undo(inputs).clamp(0, 1)
    low, high = inputs.aminmax()
    return (inputs - low) / (high - low) if low < 0 or high > 1 else inputs


def _names(stream: Stream, y: Tensor) -> list[str]:
    return [_name(stream, int(label)) for label in y]


def _name(stream: Stream, label: int) -> str:
    name = stream.class_names[label] if stream.class_names else str(label)
    return name if len(name) <= 14 else name[:13] + "…"


def _mixture(stream: Stream, target: Tensor) -> str:
    shares, labels = target.topk(2)
    parts = [
        f"{_name(stream, int(label))} {share:.0%}"
        for share, label in zip(shares, labels, strict=True)
        if share >= 0.005
    ]
    return "\n".join(parts)


def _draw_points(stream: Stream, path: Path, learner: PCL, batch: int) -> Path:
    """A panel of points for each task, as the model receives them, and one with bridges."""
    arrivals = [_arrivals(task, batch, len(task.train_rows)) for task in stream]
    inputs = [learner.inputs(x) for x, _ in arrivals]
    points = torch.cat(inputs)
    low, high = points.amin(0).tolist(), points.amax(0).tolist()
    with figure(path, 1, len(stream) + 1, 3.6 * (len(stream) + 1), 4.3) as (canvas, axes):
        for task, axis, x, (_, y) in zip(stream, axes[0], inputs, arrivals, strict=False):
            for label in y.unique().tolist():
                members, mark = x[y == label], label % len(COLOURS)
                axis.scatter(
                    *members.T.numpy(), s=9, color=COLOURS[mark], marker=MARKERS[mark], label=_name(stream, label)
                )
            axis.set_title(f"task {task.index + 1}")
            axis.legend(loc="upper right", fontsize=8, title="class")
        start, end = _ends(arrivals)
        paths, _ = _bridges(learner, start, end)
        for bridge in paths:
            axes[0][-1].plot(*bridge.T.numpy(), marker="o", markersize=4)
        axes[0][-1].set_title(f"bridges of PCL\nfrom {_name(stream, start[1])} to {_name(stream, end[1])}")
        for axis in axes[0]:
            axis.set(xlim=(low[0] - 0.1, high[0] + 0.1), ylim=(low[1] - 0.1, high[1] + 0.1), aspect="equal")
        canvas.suptitle(_title(stream, learner).replace("first examples", "training examples"), fontsize=11)
    return path
