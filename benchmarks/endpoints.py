"""Where PCL's bridges end: at how many examples in a step, and how that affects the accuracy.

    python benchmarks/endpoints.py                                   # seq-digits: two minutes; p paired over seeds
    python benchmarks/endpoints.py --stream seq-cifar100 --seeds 0   # once it is prepared; only the counts

`farthest, once` also leads far away, but each example ends exactly one bridge: of all such pairings it is the one with
the largest sum of distances. It separates two reasons why `farthest` is worse: that nearly all bridges lead to the same
few examples, and that they are long.
"""

from __future__ import annotations

import argparse

import torch
from scipy.optimize import linear_sum_assignment
from torch import Generator, Tensor

from parabolic import PCL, Stream, make_stream, metrics, train
from parabolic.backbones import make_backbone
from parabolic.learners import pairing
from parabolic.statistics import Summary, paired
from parabolic.streams import find_stream

BATCH, BATCHES = 32, 200
METRICS = ("AAA", "Acc")


def farthest_once(x: Tensor, new: int, generator: Generator) -> Tensor:  # noqa: ARG001
    """Return the pairing with the largest sum of distances in which each example ends one bridge."""
    distances = pairing._distances(x).cpu().numpy()
    return torch.from_numpy(linear_sum_assignment(distances, maximize=True)[1]).to(x.device)


PAIRINGS = {
    "random": pairing.random,
    "farthest": pairing.farthest,
    "farthest, once": farthest_once,
    "nearest": pairing.nearest,
    "across": pairing.across,
}


def ends(stream: Stream, name: str, generator: Generator) -> tuple[float, float]:
    """Return at how many examples the bridges of a step end, and how many at the most common; half are new examples."""
    place = len(stream) // 2
    old, new = torch.cat([task.train_rows for task in stream[:place]]), stream[place].train_rows
    counts = []
    for _ in range(BATCHES):
        rows = [part[torch.randperm(len(part), generator=generator)[:BATCH]] for part in (new, old)]
        x, _ = stream[place].train.take(torch.cat(rows))
        x = stream.augment(x, generator) if stream.augment is not None else x
        x = stream.prepare(x) if stream.prepare is not None else x
        counts.append(PAIRINGS[name](x, BATCH, generator).bincount())
    return (
        sum(int((each > 0).sum()) for each in counts) / BATCHES,
        sum(int(each.max()) for each in counts) / BATCHES,
    )


def accuracy(stream: str, name: str, seed: int, memory: int) -> tuple[float, float]:
    """Return AAA and Acc of PCL as in the published code, with a small convolutional network."""
    made, batch = make_stream(stream, seed), find_stream(stream).batch
    model = make_backbone("convnet", made.shape, made.classes, seed)
    learner = PCL(model, memory=memory, classes=made.classes, seed=seed, variant="reference")
    pairing.PAIRINGS[name] = PAIRINGS[name]
    learner.endpoints = name
    state = train(learner, made, batch=batch)
    return metrics.aaa(state.matrix), metrics.acc(state.matrix)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stream", default="seq-digits")
    parser.add_argument("--memory", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=5, help="0: train nothing")
    asked = parser.parse_args()
    stream, usual = make_stream(asked.stream), list[tuple[float, float]]()
    for name in PAIRINGS:
        many, most = ends(stream, name, Generator().manual_seed(0))
        print(f"{name:15}{2 * BATCH} bridges end at {many:4.1f} examples, {most:4.1f} at the most common", end="")
        found = [accuracy(asked.stream, name, seed, asked.memory) for seed in range(asked.seeds)]
        usual = usual or found  # that of random endpoints, which come first
        for metric, values, others in zip(METRICS, zip(*found, strict=True), zip(*usual, strict=True), strict=False):
            summary, gap = Summary.of(values), paired(values, others)
            against = f" ({gap.mean:+.1f}, p = {gap.p:.2f})" if found is not usual else ""
            print(f"; {metric} {summary.mean:.1f} ± {summary.sd:.1f}{against}", end="")
        print(flush=True)


if __name__ == "__main__":
    main()
