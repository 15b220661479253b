"""The paper's benchmarks, other common ones, and streams of any prepared data set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from parabolic.streams.augment import CropFlip, Normalise
from parabolic.streams.sources import load
from parabolic.streams.stream import Stream

__all__ = ["BENCHMARKS", "IMAGES", "Benchmark", "prepared_stream"]

IMAGES: Mapping[str, Any] = {"backbone": "resnet18", "precision": "bf16", "channels_last": True}
"""For images: in bfloat16 a run is as accurate as in float32 and takes a tenth of the time (docs/engine.md)."""

SMALL: Mapping[str, Any] = {"backbone": "mlp", "batch": 10}
"""Common settings for MNIST and similar data sets."""


@dataclass(frozen=True)
class Benchmark:
    """A data set split into tasks as in the paper, or as is common elsewhere."""

    data: str
    tasks: int
    mean: tuple[float, ...]  # per channel of the training images, as in published code
    std: tuple[float, ...]
    about: str
    augment: CropFlip | None = CropFlip(padding=4)
    suits: Mapping[str, Any] = field(default_factory=lambda: IMAGES)  # network, batch size and precision

    def build(self, seed: int) -> Stream:
        """Build the stream: tasks with equal numbers of classes, in the order of their labels."""
        stream = prepared_stream(self.data, seed, tasks=self.tasks)
        return replace(stream, prepare=Normalise(self.mean, self.std), augment=self.augment)


BENCHMARKS = {
    "seq-cifar10": Benchmark(
        "cifar10", 5, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2615), "CIFAR-10, 5 tasks of 2 classes"
    ),
    "seq-cifar100": Benchmark(
        "cifar100", 10, (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761), "CIFAR-100, 10 tasks of 10 classes"
    ),
    "seq-tinyimagenet": Benchmark(
        "tinyimagenet", 20, (0.4802, 0.4480, 0.3975), (0.2770, 0.2691, 0.2821), "TinyImageNet, 20 tasks of 10 classes"
    ),
    "seq-mnist": Benchmark("mnist", 5, (0.1307,), (0.3081,), "MNIST, 5 tasks of 2 classes", None, SMALL),
    "seq-fashionmnist": Benchmark(
        "fashionmnist", 5, (0.2860,), (0.3530,), "Fashion-MNIST, 5 tasks of 2 classes", None, SMALL
    ),
}


def prepared_stream(data: str, seed: int = 0, *, tasks: int | None = None) -> Stream:
    """The stream of a prepared data set; images stay in the memory-mapped file until they are needed.

    By default there are five tasks, with numbers of classes as equal as possible. Images are normalised by the data's
    own mean and standard deviation, and shifted during training by up to an eighth of their height. They are not
    mirrored: whether that is valid depends on what they show.
    """
    data_set, train, test = load(data)
    groups = [part.tolist() for part in np.array_split(np.unique(train.y), 5) if len(part)]
    normalise = Normalise(data_set.mean, [std or 1.0 for std in data_set.std])  # a constant channel has std 0
    return Stream.from_arrays(
        *train,
        test=test,
        tasks=tasks or groups,
        seed=seed,
        name=data if data.startswith("hf:") else f"seq-{data}",
        prepare=normalise,
        augment=CropFlip(padding=data_set.shape[1] // 8, flip=False),
        class_names=data_set.class_names,
    )
