"""Streams by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from parabolic.checks import check_call, check_name, check_number, invalid
from parabolic.plugins import load_object
from parabolic.streams.benchmarks import BENCHMARKS, IMAGES, prepared_stream
from parabolic.streams.digits import seq_digits
from parabolic.streams.scenarios import Scenario
from parabolic.streams.sources import own_names
from parabolic.streams.stream import Stream
from parabolic.streams.toy import seq_blobs

__all__ = ["Listed", "find_stream", "known_streams", "make_stream", "prepared_streams"]


@dataclass(frozen=True)
class Listed:
    """A stream known by name: how to build it, and the network, batch size and precision that suit it."""

    build: Callable[[int], Stream]  # called with the seed
    about: str
    backbone: str = "mlp"
    batch: int = 32
    precision: str = "fp32"
    channels_last: bool = False
    data: str | None = None  # the prepared data set that it needs


def known_streams() -> dict[str, Listed]:
    """Every built-in stream, by name."""
    return {
        "seq-digits": Listed(
            seq_digits,
            "1,797 handwritten digits of 8 × 8 pixels, 5 tasks of 2 classes; embedded",
            backbone="convnet",
            batch=10,  # a task has under 300 images: with batches of 32 it would be nine steps
        ),
        "seq-blobs": Listed(seq_blobs, "1,500 points in the plane, 3 tasks of 2 round clouds; embedded", batch=10),
    } | {
        name: Listed(
            benchmark.build,
            f"{benchmark.about}; needs `parabolic data prepare {benchmark.data}`",
            data=benchmark.data,
            **benchmark.suits,
        )
        for name, benchmark in BENCHMARKS.items()
    }


def prepared_streams() -> dict[str, Listed]:
    """The streams of data sets that the user prepared under names of their own."""
    built_in = {benchmark.data for benchmark in BENCHMARKS.values()}
    return {
        f"seq-{name}": Listed(partial(prepared_stream, name), f"prepared data {name!r}", data=name, **IMAGES)
        for name in own_names()
        if name not in built_in
    }


def find_stream(name: str) -> Listed:
    """Find a stream by name: a built-in one, `hf:NAME` on the Hugging Face hub, `seq-NAME` for data prepared as NAME,
    or `module:function` or `file.py:function`, which builds it from a seed.
    """
    if not isinstance(name, str):
        raise invalid("stream", name, "a name", "a Stream object can be used directly")
    if name.startswith("hf:"):
        return Listed(partial(prepared_stream, name), "a data set from the Hugging Face hub", data=name, **IMAGES)
    if ":" in name:
        build = load_object("stream", name)
        check_call("stream", build, "seed")
        return Listed(build, f"built by {name}")
    known = known_streams()
    if name not in known:
        known |= prepared_streams()
    check_name("stream", name, known, "`parabolic list` shows them; module:function names your own")
    return known[name]


def make_stream(name: str, seed: int = 0, **scenario: Any) -> Stream:
    """Build a stream by name; the seed determines the order of its examples and all random draws of the scenario.

    >>> len(make_stream("seq-digits"))
    5
    >>> len(make_stream("seq-digits", tasks=2, class_order="shuffled"))
    2
    """
    check_number("seed", seed, whole=True, at_least=0, below=2**63)
    applied = Scenario.of(scenario)
    stream = find_stream(name).build(int(seed))
    if not isinstance(stream, Stream):
        raise invalid("stream", type(stream), f"{name} to return a parabolic.Stream")
    return applied.apply(stream, int(seed))
