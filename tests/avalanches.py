"""Avalanche, wherever it is installed, also beside a torch that was built without CUDA."""

import importlib.util
import warnings

import pytest
import torch

_operators = []  # a library of operators lives as long as it is held


def need_avalanche():
    """Import Avalanche, or skip what calls this.

    Avalanche imports torchvision, of which PyPI has builds for CUDA alone: where torch has none, its compiled part
    cannot be loaded, and its import fails on operators that were to be there. No test needs them: it is enough to say
    what they are called, and the rest, which is Python, is imported as it is.
    """
    if importlib.util.find_spec("avalanche") is None:
        pytest.skip("needs the extra `avalanche`: pip install 'parabolic-cl[avalanche]'", allow_module_level=True)
    with warnings.catch_warnings(action="ignore"):  # of packages that Avalanche imports
        try:
            import torchvision  # noqa: F401
        except RuntimeError:
            _operators.append(torch.library.Library("torchvision", "DEF"))
            for name in ("nms", "qnms"):
                _operators[-1].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import avalanche.training  # noqa: F401
