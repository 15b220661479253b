"""Labels of any kind: which there are, the network's output for each, and how much each counts in the loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d
from torch import Tensor

from parabolic.checks import FILL_IN, Description, check_gaps, check_name, check_number, invalid

__all__ = ["balanced_weights", "check_labels", "given_weights", "labels_of", "merge_labels", "outputs_of"]

LABELS = {"O": "a word", "U": "a word", "M": "a date", "m": "a duration"}  # by kind of array; all others are numbers
EXACT = 2**53  # from here on float64 cannot represent every whole number


def check_labels(name: str, y: Any) -> None:
    """Refuse missing labels, which would be a class: NumPy turns them into words."""
    check_gaps(name, y)
    if y is None:
        return
    is_object = getattr(getattr(y, "dtype", None), "kind", "O") == "O"  # a list may mix words and gaps
    labels = np.asarray(y, dtype=object if is_object else None)
    missing = sum(map(_is_missing, labels.flat)) if labels.dtype == object else int((labels != labels).sum())
    if missing:
        raise invalid(name, Description(f"{missing} missing labels"), "words or numbers", f"{FILL_IN}, or drop it")


def labels_of(y: NDArray[Any], classes: Any, part: bool = True) -> NDArray[Any]:
    """Return the labels of a batch and those that `classes` announces."""
    _check_kind("y", y)
    labels = np.array(sorted({*y}), dtype=object) if y.dtype == object else np.unique(y)  # which compares words slowly
    # In part of the data every label may differ; repeating them avoids scikit-learn's warning about too many classes.
    check_classification_targets(np.repeat(labels, 2) if part else y)
    check_labels("classes", classes)
    if classes is None:
        return labels
    try:
        announced = column_or_1d(classes)
    except ValueError as error:  # which calls them y
        raise invalid("classes", classes, "a list of labels") from error
    _check_kind("classes", announced)
    return _union("classes", labels, np.unique(announced))


def merge_labels(
    classes: NDArray[Any], outputs: NDArray[np.int64], labels: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the classes and new labels, sorted, and the output of each; known classes keep their outputs."""
    union = _union("y", classes, labels)
    union_outputs = np.full(len(union), -1, dtype=np.int64)
    union_outputs[np.searchsorted(union, classes)] = outputs
    union_outputs[union_outputs < 0] = np.arange(len(classes), len(union))
    return union, union_outputs


def outputs_of(y: NDArray[Any], labels: NDArray[Any], outputs: NDArray[np.int64]) -> Tensor:
    """The output of each label in a batch; `outputs` are those of all labels, which are sorted."""
    return torch.from_numpy(outputs[np.searchsorted(labels, y)])


def balanced_weights(mode: str, labels: NDArray[Any], y: NDArray[Any] | None) -> NDArray[np.float64]:
    """Weights that are inverse to how often the classes occur, as in scikit-learn."""
    check_name("class_weight", mode, ["balanced"], "or give a dict from labels to weights")
    if y is None:
        remedy = (
            "a new class is rare only so far, and already half of what is learned: "
            "options={'balance': 0.5} or learner='cbrs' compensate for frequencies as they change"
        )
        raise invalid("class_weight", mode, "None or a dict from labels to weights for partial_fit", remedy)
    weights: NDArray[np.float64] = compute_class_weight(mode, classes=labels, y=y)
    return weights


def given_weights(weights: Any, labels: NDArray[Any]) -> list[float]:
    """The weight of each label in a mapping: 1 if it is not there."""
    if not isinstance(weights, Mapping):
        raise invalid("class_weight", weights, "None, 'balanced', or a dict from labels to weights")
    for label, weight in weights.items():
        check_number(f"class_weight of {label!r}", weight, at_least=0)
        if isinstance(label, str) != (labels.dtype.kind in "OU"):
            raise invalid("class_weight", label, f"labels like those in y, such as {labels[:1].tolist()[0]!r}")
    if labels.dtype.kind in "mM":  # in the unit of the labels: a key may have another
        weights = {np.asarray(label, labels.dtype).item(): weight for label, weight in weights.items()}
    return [float(weights.get(label, 1.0)) for label in labels.tolist()]


def _check_kind(name: str, labels: NDArray[Any]) -> None:
    """Refuse Python objects that are no words: some cannot be sorted, and scikit-learn's checks accept none of them."""
    if labels.dtype.kind == "O" and (kinds := {type(label).__name__ for label in labels if not isinstance(label, str)}):
        got = Description(f"Unknown label type: Python objects ({', '.join(sorted(kinds))})")  # scikit-learn's words
        raise invalid(name, got, "words or numbers", f"convert them: {name}.astype(int) or .astype(str)")
    if labels.dtype.kind == "S":
        raise invalid(name, Description("labels that are bytes"), "words or numbers", "decode them: .astype(str)")


def _is_missing(label: Any) -> bool:
    """Whether a label is None, or NaN, NaT or pandas' NA, which do not equal themselves."""
    return label is None or str(label == label) in ("False", "<NA>")


def _union(name: str, one: NDArray[Any], other: NDArray[Any]) -> NDArray[Any]:
    """The labels of both, sorted; errors call the others `name`."""
    if not len(other):
        return one
    kinds = [LABELS.get(labels.dtype.kind, "a number") for labels in (one, other)]
    if len(one) and kinds[0] != kinds[1]:
        raise invalid(name, Description(f"{kinds[1]} for a label"), f"{kinds[0]}, like the labels before")
    union = np.unique(np.concatenate([one, other]))
    if union.dtype.kind == "f" and float(np.abs(union).max()) >= EXACT:
        got = Description(f"labels of {EXACT} or more as floats, or of types that NumPy merges into floats")
        raise invalid("y", got, "labels that stay distinct", "give all of them as int64, or as words")
    return union
