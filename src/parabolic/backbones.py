"""Networks: ResNet-18 as the paper uses it, a small convolutional net, and a multilayer perceptron."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parabolic.checks import check_name, invalid
from parabolic.plugins import load_object

__all__ = ["BACKBONES", "MLP", "ConvNet", "ResNet18", "make_backbone"]


class MLP(nn.Sequential):
    """A multilayer perceptron on flattened examples.

    >>> MLP((1, 8, 8), 10, hidden=(100,))(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """

    def __init__(self, shape: Sequence[int], classes: int, hidden: Sequence[int] = (256, 256)) -> None:
        widths = [math.prod(shape), *hidden]
        layers: list[nn.Module] = [nn.Flatten()]
        for before, after in itertools.pairwise(widths):
            layers += [nn.Linear(before, after), nn.ReLU()]
        super().__init__(*layers, nn.Linear(widths[-1], classes))


class ConvNet(nn.Sequential):
    """Three 3 × 3 convolutions with batch norm, for small images.

    >>> ConvNet((3, 32, 32), 10)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(self, shape: Sequence[int], classes: int, width: int = 32) -> None:
        channels = _channels("convnet", shape)
        layers: list[nn.Module] = []
        for before, after, stride in ((channels, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2)):
            layers += [
                nn.Conv2d(before, after, 3, stride, padding=1, bias=False),
                nn.BatchNorm2d(after),
                nn.ReLU(),
            ]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, classes))


class ResNet18(nn.Module):
    """ResNet-18 for small images: a 3 × 3 stem without pooling, four stages of two blocks, `width` channels first.

    >>> ResNet18((3, 32, 32), 10, width=8)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(self, shape: Sequence[int], classes: int, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Conv2d(_channels("resnet18", shape), width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        blocks, before = [], width
        for stage in range(4):
            after = width * 2**stage
            blocks += [_Block(before, after, stride=1 if stage == 0 else 2), _Block(after, after, stride=1)]
            before = after
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(before, classes)

    def forward(self, x: Tensor) -> Tensor:
        """One score a class for images `[n, channels, height, width]`."""
        x = F.relu(self.norm(self.stem(x)))
        scores: Tensor = self.head(self.blocks(x).mean((2, 3)))
        return scores


class _Block(nn.Module):
    """Two convolutions and a shortcut, which is a 1 × 1 convolution where the shape changes."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.shortcut = nn.Sequential()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(inner)) + self.shortcut(x))


BACKBONES: dict[str, Callable[[Sequence[int], int], nn.Module]] = {
    "mlp": MLP,
    "convnet": ConvNet,
    "resnet18": ResNet18,
}


def make_backbone(name: str, shape: Sequence[int], classes: int, seed: int = 0) -> nn.Module:
    """Build a network by name, or by the path `module:factory` of anything called as factory(shape, classes).

    The weights depend on `seed` alone; torch's own random state is left as it was.

    >>> len(make_backbone("mlp", (1, 8, 8), 10))
    6
    """
    if ":" in name:
        factory = load_object("backbone", name)
    else:
        check_name("backbone", name, BACKBONES, "or give module:factory")
        factory = BACKBONES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = factory(shape, classes)
    if not isinstance(model, nn.Module):
        raise invalid("backbone", type(model), f"{name} to return a torch.nn.Module")
    return model


def _channels(name: str, shape: Sequence[int]) -> int:
    if len(shape) != 3:
        raise invalid("backbone", name, f"images [channels, height, width]; the examples are {list(shape)}", "use mlp")
    return shape[0]
