"""Points in the plane: a stream that can be drawn."""

from __future__ import annotations

import numpy as np

from parabolic.streams.stream import Stream

__all__ = ["seq_blobs"]


def seq_blobs(seed: int = 0) -> Stream:
    """Six round clouds of 250 points on a circle, two opposite ones a task.

    Opposite clouds come together, so that what is learned of one task says nothing of the next: a learner that
    forgets shows it. The points are always the same; the seed decides the order of arrival.

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
