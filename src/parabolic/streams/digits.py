"""Handwritten digits, two classes per task: a stream that needs no download."""

from __future__ import annotations

import numpy as np

from parabolic.streams.augment import CropFlip, Normalise
from parabolic.streams.stream import Stream

__all__ = ["seq_digits"]


def seq_digits(seed: int = 0) -> Stream:
    """The 1,797 images of handwritten digits that come with scikit-learn, as 5 tasks of 2 classes.

    Every fifth image of each digit is a test image. Images are shifted by up to one pixel during training.

    >>> stream = seq_digits()
    >>> sum(len(task.train_rows) for task in stream), sum(len(task.test_rows) for task in stream)
    (1442, 355)
    """
    from sklearn.datasets import load_digits  # here because the import takes a second

    digits = load_digits()
    images = digits.images.astype(np.uint8)[:, None]  # 0 to 16
    return Stream.from_arrays(
        images,
        digits.target,
        tasks=5,
        seed=seed,
        name="seq-digits",
        prepare=Normalise((0.3,), (0.38,), scale=16),
        augment=CropFlip(padding=1, flip=False),
        class_names=tuple(str(digit) for digit in range(10)),
    )
