"""Streams: data sets, how they are split into tasks, and how their examples are normalised and augmented."""

from parabolic.streams.augment import CropFlip, Normalise
from parabolic.streams.benchmarks import BENCHMARKS
from parabolic.streams.cache import Cache, DataSet, ShowProgress, data_folder
from parabolic.streams.catalog import find_stream, known_streams, make_stream, prepared_streams
from parabolic.streams.scenarios import Scenario
from parabolic.streams.sources import PUBLISHED, find_data, load, prepare
from parabolic.streams.stream import Batches, Examples, Stream, Task

__all__ = [
    "BENCHMARKS",
    "PUBLISHED",
    "Batches",
    "Cache",
    "CropFlip",
    "DataSet",
    "Examples",
    "Normalise",
    "Scenario",
    "ShowProgress",
    "Stream",
    "Task",
    "data_folder",
    "find_data",
    "find_stream",
    "known_streams",
    "load",
    "make_stream",
    "prepare",
    "prepared_streams",
]
