"""Points in the plane: a stream that can be plotted."""

from __future__ import annotations

import numpy as np

from parabolic.streams.stream import Stream

__all__ = ["seq_blobs"]


def seq_blobs(seed: int = 0) -> Stream:
    """Six round clouds of 250 points on a circle, two opposite ones per task.

    Opposite clouds form a task, so that one task says nothing about the next and forgetting becomes visible. The points
    are always the same; the seed determines the order of arrival.

    >>> stream = seq_blobs()
    >>> [task.classes for task in stream], stream.shape
    ([(0, 3), (1, 4), (2, 5)], (2,))
    """
    labels = np.arange(1500) % 6
    angle = labels * np.pi / 3
    centres = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    points = centres + np.random.default_rng(0).normal(scale=0.22, size=(1500, 2))
    return Stream.from_arrays(
        points.astype(np.float32), labels, tasks=[[0, 3], [1, 4], [2, 5]], seed=seed, name="seq-blobs"
    )
