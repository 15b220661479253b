"""The mathematics: it knows tensors, and nothing of learning."""

from parabolic.pde.bridge import bridge, on_simplex

__all__ = ["bridge", "on_simplex"]
