"""What a type checker tells a user: mypy checks this file with the package, and nothing in it is run."""

from typing import Any, assert_type

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import parabolic
from parabolic import (
    ER,
    PCL,
    Callback,
    Journal,
    Learner,
    ParabolicClassifier,
    ReplayLearner,
    RunSpec,
    Store,
    Stream,
    load_preset,
    make_backbone,
    make_stream,
    run,
    train,
)
from parabolic.engine import State
from parabolic.experiments import Record
from parabolic.memory import Batch, Memory
from parabolic.options import option
from parabolic.streams import Task


class Weighted(ReplayLearner):
    """A method of one's own."""

    name = "weighted"
    lr: float = 0.05
    weight: float = option(0.5, "weight of the recalled batch", at_least=0, tune="0.05:5:log")

    def loss(self, batch: Batch, recalled: Batch | None) -> Tensor:
        """The loss of the new batch plus the weighted loss of the recalled one."""
        loss = assert_type(self.error(self.model(batch["x"]), batch["y"]), Tensor)
        if recalled is None:
            return loss
        return loss + self.weight * self.error(self.model(recalled["x"]), recalled["y"])


class Telling(Callback):
    """A callback of one's own."""

    def after_task(self, state: State) -> None:
        """Look at the state."""
        assert_type(state.matrix, NDArray[np.float64])


def learners(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Learners: made, used, saved."""
    learner = PCL(model, memory=200, lr=0.2, optimizer=torch.optim.AdamW)
    assert_type(learner.observe(x, y), Tensor)
    assert_type(learner.predict(x), Tensor)
    assert_type(learner.past, Memory)
    assert_type(learner.sigma_x, float)
    assert_type(PCL.load(learner.save("a")), PCL)
    assert_type(Weighted(model, weight=0.3, memory=100).weight, float)
    ER(model, momory=3)  # type: ignore[call-arg]
    assert_type(load_preset("pcl-plus").make(model, memory=200), Learner)
    with Journal("journal", ER(make_backbone("mlp", (4,), 3)), every=100) as journal:
        assert_type(journal, Journal)
        assert_type(journal.observe(x, y), Tensor)
        assert_type(journal.batches, int)


def streams(learner: Learner) -> None:
    """Streams, and training on them."""
    stream = make_stream("seq-digits")
    assert_type(stream, Stream)
    assert_type(stream[0], Task)
    assert_type(list(stream[1:]), list[Task])
    for task in stream:
        for x, y in task.batches(10):
            assert_type((x, y), tuple[Tensor, Tensor])
    assert_type(train(learner, stream, callbacks=[Telling()]), State)


def estimators(table: NDArray[np.float64], labels: list[str]) -> None:
    """Estimators."""
    model = ParabolicClassifier("er", epochs=1).fit(table, labels)
    assert_type(model, ParabolicClassifier)
    assert_type(model.partial_fit(table, labels), ParabolicClassifier)
    assert_type(model.predict(table), NDArray[Any])
    assert_type(model.predict_proba(table), NDArray[np.float64])


def runs() -> None:
    """Runs, and modules of the package by attribute."""
    parabolic.EPR  # type: ignore[attr-defined]  # noqa: B018
    store, spec = Store("runs"), RunSpec("er", options={"lr": 0.05})
    record, reused = run(spec, store)
    assert_type((record, reused), tuple[Record, bool])
    assert_type(store.find(spec), Record | None)
    assert_type(parabolic.metrics.summary(record.matrix), dict[str, float])
    assert_type(parabolic.experiments.execute(spec), Record)
