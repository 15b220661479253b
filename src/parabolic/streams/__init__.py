"""What arrives: data sets, how they are cut into tasks, and how their examples are changed on the way."""

from parabolic.streams.augment import CropFlip, Normalise
from parabolic.streams.catalog import find_stream, known_streams, make_stream
from parabolic.streams.stream import Batches, Examples, Stream, Task

__all__ = [
    "Batches", "CropFlip", "Examples", "Normalise", "Stream", "Task", "find_stream", "known_streams", "make_stream",
]  # fmt: skip
