"""VR-MCL with the details in which ours differs from its authors' code, one at a time and all together.

    python benchmarks/vrmcl.py                                                  # seq-digits: ten minutes
    python benchmarks/vrmcl.py --stream seq-cifar100 --memory 1000              # on a GPU, once it is prepared
    python benchmarks/vrmcl.py --stream seq-cifar100 --memory 1000 --backbone benchmarks/vrmcl.py:narrow

With all of them, the same batches and the same recalled examples, a step is that of the authors' code. `narrow` is the
ResNet-18 of that code. Differences are paired over seeds.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from parabolic import VRMCL, ResNet18
from parabolic.experiments import RunSpec, Store, run_grid
from parabolic.learners.learner import TaskBatches, join
from parabolic.memory import Batch
from parabolic.options import option
from parabolic.statistics import Summary, paired
from parabolic.streams import find_stream

ROWS = {
    "ours": (),
    "statistics twice": ("twice",),
    "rates by both": ("both",),
    "restarted": ("restart",),
    "full batches": ("full",),
    "all four": ("twice", "both", "restart", "full"),
}


class Published(VRMCL):
    """VR-MCL with details of its authors' code."""

    twice: bool = option(False, "whether batch norm's running statistics see the examples of a step twice")
    both: bool = option(False, "whether the rates also descend their gradient at the previous weights")
    restart: bool = option(False, "whether the weights at the start of a task count as the previous ones")
    full: int = option(0, "batches of fewer examples are dropped", at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._of_rates: Tensor | None = None  # their gradient at the previous weights, within a step

    def start_task(self, batches: TaskBatches) -> None:
        super().start_task(batches)
        if self.restart:
            with torch.no_grad():
                self.previous.copy_(self.weights.vector())

    def step(self, x: Tensor, y: Tensor, task: int | Tensor | None = None) -> Tensor:
        if len(y) < self.full:
            return torch.zeros((), device=self.device)
        return super().step(x, y, task)

    def loss(self, batch: Batch, recalled: Batch | None) -> Tensor:
        if self.twice:
            with torch.no_grad():
                self.model(join(batch, recalled)[0])
        return super().loss(batch, recalled)

    def ahead(self, weights: Tensor, rates: Tensor, batch: Batch, recalled: Batch | None) -> Tensor:
        if not self.both or rates is self.rates:
            return super().ahead(weights, rates, batch, recalled)
        rates = rates.clone().requires_grad_()
        loss = super().ahead(weights, rates, batch, recalled)
        with torch.autograd.set_multithreading_enabled(False):  # as in the look-ahead steps themselves
            (self._of_rates,) = torch.autograd.grad(loss, rates, retain_graph=True)
        return loss

    def descend(self, loss: Tensor) -> None:
        if not self.both:
            super().descend(loss)
            return
        if self.descents == 0:  # the previous weights are the first ones
            (self._of_rates,) = torch.autograd.grad(loss, self.rates, retain_graph=True)
        assert self._of_rates is not None
        before, self._of_rates = self._of_rates, None
        rates = self.rates.detach().clone()
        super().descend(loss)
        with torch.no_grad():
            # The gradient at the current weights is clipped, the other is added to it, and the sum is clipped again.
            total = (rates - self.rates) / self.rate_lr + before
            total *= (self.clip / (total.norm() + 1e-6)).clamp(max=1)
            self.rates.copy_(rates - self.rate_lr * total)


def narrow(shape: Sequence[int], classes: int) -> ResNet18:
    """Return the network of the authors' code: 20 channels instead of 64."""
    return ResNet18(shape, classes, width=20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stream", default="seq-digits")
    parser.add_argument("--memory", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--backbone", help="the network (by default the stream's)")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="the folder in which runs are stored")
    asked = parser.parse_args()
    batch = find_stream(asked.stream).batch
    store, usual = Store(asked.runs), dict[str, list[float]]()
    for name, details in ROWS.items():
        options = {"variant": "reference"} | {detail: batch if detail == "full" else True for detail in details}
        learner = "benchmarks/vrmcl.py:Published"
        specs = [
            RunSpec(learner, asked.stream, memory=asked.memory, seed=seed, backbone=asked.backbone, options=options)
            for seed in range(asked.seeds)
        ]
        runs = list(run_grid(specs, store, workers=0).records.values())
        print(f"{name:18}", end="")
        for metric in ("aaa", "acc"):
            values = [run.metrics[metric] for run in runs]
            summary, gap = Summary.of(values), paired(values, usual.setdefault(metric, values))
            against = f" ({gap.mean:+.1f}, p = {gap.p:.2g})" if details else ""
            print(f"  {metric} {summary.mean:.1f} ± {summary.sd:.1f}{against}", end="")
        print(flush=True)


if __name__ == "__main__":
    main()
