"""Estimators for scikit-learn: a classifier and a regressor that learn continually."""

from parabolic.estimators.classifier import ParabolicClassifier
from parabolic.estimators.regressor import ParabolicRegressor
from parabolic.estimators.serving import Columns as _Columns  # noqa: F401  # where pickles of earlier versions have them
from parabolic.estimators.serving import Rows as _Rows  # noqa: F401
from parabolic.estimators.serving import Targets as _Targets  # noqa: F401

__all__ = ["ParabolicClassifier", "ParabolicRegressor"]
