"""PCL's bridges for the page: images that are embedded in it, or a chart of points."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from parabolic.checks import UNREADABLE, invalid
from parabolic.report.charts import Figure, bridge_chart
from parabolic.report.scenes import Scene
from parabolic.report.sheets import bridges_of
from parabolic.streams import Stream, make_stream

__all__ = ["Bridges", "draw_bridges", "png"]


@dataclass(frozen=True)
class Bridges:
    """The bridges that a page shows: images with their labels, or a chart; or why there are none."""

    ends: tuple[str, str] = ("", "")
    sigmas: tuple[float, float] = (0.0, 0.0)
    images: list[list[tuple[str, str]]] | None = None  # one row per bridge: the value of <img src>, and the label
    chart: Figure | None = None
    why_not: str = ""


def draw_bridges(scene: Scene) -> Bridges | None:
    """The bridges between two examples of a scene's stream, with the options of its first PCL, if it has one."""
    pcl_methods = (method for method in scene.done if next(iter(method.runs.values())).spec["learner"] == "pcl")
    record = next((next(iter(method.runs.values())) for method in pcl_methods), None)
    if record is None:
        return None
    try:
        strip = bridges_of(_stream(record.spec), record.spec["options"], batch=record.spec["batch"])
    except (RuntimeError, *UNREADABLE) as error:  # the data may not be here, and the record may be old, or strange
        return Bridges(why_not=str(error))
    shared = strip.ends, strip.sigmas
    if strip.paths.ndim == 3:
        return Bridges(*shared, chart=bridge_chart(strip.paths.double().numpy(), strip.ends))
    images = [
        [(png(image), label) for image, label in zip(row, labels, strict=True)]
        for row, labels in zip(strip.paths, strip.labels, strict=True)
    ]
    return Bridges(*shared, images=images)


def png(image: Tensor) -> str:
    """An image `[1 or 3, height, width]` with values from 0 to 1, as the data URL of a PNG.

    >>> png(torch.zeros(1, 2, 2))[:30]
    'data:image/png;base64,iVBORw0K'
    """
    channels, height, width = image.shape
    pixels = (image.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).reshape(height, -1)
    rows = b"".join(b"\0" + bytes(row.tolist()) for row in pixels)  # each starts with its filter type: 0, none
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    chunks = (
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in parts
    )
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(chunks)).decode()


def _stream(spec: Mapping[str, Any]) -> Stream:
    if ":" in spec["stream"]:  # making it could execute a user's file, or download data
        raise invalid("stream", spec["stream"], "one of `parabolic list`, whose examples can be drawn")
    return _cached_stream(spec["stream"], spec["seed"], tuple((spec.get("scenario") or {}).items()))


@lru_cache(maxsize=1)  # scenes of the same stream are consecutive
def _cached_stream(name: str, seed: int, scenario: tuple[tuple[str, Any], ...]) -> Stream:
    return make_stream(name, seed, **dict(scenario))
