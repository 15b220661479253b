"""Networks: ResNet-18 as the paper uses it, a small convolutional net, and a multilayer perceptron."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parabolic.checks import check_call, check_name, check_number, invalid
from parabolic.convolution import convolve, convolve_both, mix, thin
from parabolic.gpus import has_cudnn, has_triton
from parabolic.plugins import load_object

__all__ = [
    "BACKBONES", "MLP", "Block", "ConvNet", "Convolution", "Norm", "ResNet18", "Stem", "drawing_apart", "find_backbone",
    "make_backbone", "plain_operations", "uses_plain_operations",
]  # fmt: skip


class _Layers(nn.Sequential):
    """A Sequential with a constructor of its own; a slice of it is a plain `nn.Sequential`."""

    def __getitem__(self, idx: Any) -> Any:
        return nn.Sequential(*list(self)[idx]) if isinstance(idx, slice) else super().__getitem__(idx)


class MLP(_Layers):
    """A multilayer perceptron on flattened examples.

    >>> MLP((1, 8, 8), 10, hidden=(100,))(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    >>> MLP((1, 8, 8), 10, hidden=(100,))[:-1](torch.zeros(2, 1, 8, 8)).shape  # features
    torch.Size([2, 100])
    """

    arguments: dict[str, Any]  # of the constructor, to rebuild a saved network

    def __init__(self, shape: Sequence[int], classes: int, hidden: Sequence[int] = (256, 256)) -> None:
        shape, hidden = _sizes("shape", shape, "(1, 28, 28)"), _sizes("hidden", hidden, "(256, 256)")
        _check_sizes(classes=classes)
        widths = [math.prod(shape), *hidden]
        layers: list[nn.Module] = [nn.Flatten()]
        for before, after in itertools.pairwise(widths):
            layers += [nn.Linear(before, after), nn.ReLU()]
        super().__init__(*layers, nn.Linear(widths[-1], classes))
        self.arguments = {"shape": shape, "classes": classes, "hidden": hidden}


class ConvNet(_Layers):
    """Three 3 × 3 convolutions with batch norm, for small images.

    >>> ConvNet((3, 32, 32), 10)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    arguments: dict[str, Any]  # as in MLP

    def __init__(self, shape: Sequence[int], classes: int, width: int = 32) -> None:
        shape = _image_shape("convnet", shape)
        _check_sizes(classes=classes, width=width)
        layers: list[nn.Module] = []
        for before, after, stride in ((shape[0], width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2)):
            layers += [
                nn.Conv2d(before, after, 3, stride, padding=1, bias=False),
                nn.BatchNorm2d(after),
                nn.ReLU(),
            ]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, classes))
        self.arguments = {"shape": shape, "classes": classes, "width": width}


class ResNet18(nn.Module):
    """ResNet-18 for small images: a 3 × 3 stem without pooling, then four stages of two blocks, the first `width` wide.

    >>> ResNet18((3, 32, 32), 10, width=8)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    arguments: dict[str, Any]  # as in MLP

    def __init__(self, shape: Sequence[int], classes: int, width: int = 64) -> None:
        super().__init__()
        shape = _image_shape("resnet18", shape)
        _check_sizes(classes=classes, width=width)
        self.arguments = {"shape": shape, "classes": classes, "width": width}
        self.stem = Stem(shape[0], width, 3, padding=1)
        self.norm = Norm(width)
        blocks, before = [], width
        for stage in range(4):
            after = width * 2**stage
            blocks += [Block(before, after, stride=1 if stage == 0 else 2), Block(after, after, stride=1)]
            before = after
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(before, classes)

    def forward(self, x: Tensor) -> Tensor:
        """One score per class for images `[n, channels, height, width]`."""
        scores: Tensor = self.head(self.blocks(self.norm(self.stem(x))).mean((2, 3)))
        return scores


class Block(nn.Module):
    """Two convolutions and a shortcut, which is a 1 × 1 convolution where the shape changes."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = Convolution(before, after, 3, stride, padding=1)
        self.norm1 = Norm(after)
        self.conv2 = Convolution(after, after, 3, padding=1)
        self.norm2 = Norm(after)
        self.shortcut = nn.Sequential()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(Convolution(before, after, 1, stride), Norm(after, relu=False))

    def forward(self, x: Tensor) -> Tensor:
        """The block's feature maps."""
        if self._can_merge(x):
            return self._merged_maps(x)
        inner, shortcut = self._first_maps(x)
        y: Tensor = self.norm2(self.conv2(self.norm1(inner)), shortcut)
        return y

    def _first_maps(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The first convolution and the shortcut of x; on a GPU both at once if the shortcut has a convolution too."""
        short = next(iter(self.shortcut), None)
        if (
            isinstance(self.conv1, Convolution) and isinstance(short, Convolution)  # they may have been replaced
            and _use_own_convolution(x, short.weight) and x.is_contiguous(memory_format=torch.channels_last)
        ):  # fmt: skip
            weight = self.conv1.weight
            inner, thinned = convolve_both(x.to(weight.dtype), weight, short.weight, *self.conv1.layout)
            return inner, self.shortcut[1:](thinned)
        return self.conv1(x), self.shortcut(_second_use(x))

    def _can_merge(self, x: Tensor) -> bool:
        """Whether `_merged_maps` can be used: no gradient is needed, no part was replaced, and the tensors fit."""
        if torch.is_grad_enabled() or self.training or uses_plain_operations() or not has_cudnn(x):
            return False
        convs, norms = self._parts()
        return (
            [type(layer) for layer in (*convs, *norms)] == [Convolution] * len(convs) + [Norm] * len(norms)
            and [layer.kernel_size for layer in convs] == [(3, 3), (3, 3), (1, 1)][: len(convs)]
            and [layer.relu for layer in norms] == [True, True, False][: len(convs)]
            and all(layer.weight.dtype == x.dtype for layer in convs)
            and not any(layer.training or layer.running_mean is None for layer in norms)
            and not any(layer._forward_hooks or layer._forward_pre_hooks for layer in (*convs, *norms, self.shortcut))
            and x.dtype in (torch.bfloat16, torch.float16) and 0 < x.numel() < 2**31
            and x.is_contiguous(memory_format=torch.channels_last)
        )  # fmt: skip

    def _merged_maps(self, x: Tensor) -> Tensor:
        """The feature maps by running statistics, with which a norm is a scale and a bias per channel.

        The scale is folded into the convolution's weight; the bias, the shortcut and ReLU are applied by the
        convolution's own kernel before anything is written.
        """
        convs, norms = self._parts()
        (weight1, bias1), (weight2, bias2), *short = itertools.starmap(_fold_norm, zip(convs, norms, strict=True))
        shortcut = x if not short else mix(thin(x, convs[2].stride), *short[0])
        # The kernel always adds a tensor; the first call has none to add, so any finite one is scaled by zero.
        inner = torch.cudnn_convolution_add_relu(
            x, weight1, shortcut, 0.0, bias1, convs[0].stride, convs[0].padding, (1, 1), 1
        )
        return torch.cudnn_convolution_add_relu(
            inner, weight2, shortcut, 1.0, bias2, convs[1].stride, convs[1].padding, (1, 1), 1
        )

    def _parts(self) -> tuple[list[Any], list[Any]]:
        """The convolutions and the norms that follow them, those of the shortcut last."""
        short = [*self.shortcut]
        return [self.conv1, self.conv2, *short[:1]], [self.norm1, self.norm2, *short[1:]]


def _fold_norm(conv: Convolution, norm: Norm) -> tuple[Tensor, Tensor]:
    """The weight and bias of one convolution that equals a convolution followed by a norm in evaluation mode."""
    mean, variance = cast(Tensor, norm.running_mean).float(), cast(Tensor, norm.running_var).float()
    scale = norm.weight * (variance + norm.eps).rsqrt()
    weight = (conv.weight * scale.view(-1, 1, 1, 1)).to(conv.weight)
    return weight.contiguous(memory_format=torch.channels_last), (norm.bias - mean * scale).to(weight)


class Norm(nn.BatchNorm2d):
    """Batch norm, then the sum with a shortcut and ReLU; fused into one operation for channels-last images on a GPU."""

    def __init__(self, channels: int, relu: bool = True) -> None:
        super().__init__(channels)
        self.relu = relu

    def forward(self, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
        """Normalise the images, add the shortcut if given, and apply ReLU if the layer has it."""
        running = (cast(Tensor, self.running_mean), cast(Tensor, self.running_var))
        momentum = self.momentum or 0.0
        if self._can_fuse(x):
            from parabolic.kernels import norm_add_relu

            y, again = norm_add_relu(
                x, self.weight, self.bias, running, shortcut,
                relu=self.relu, training=self.training, momentum=momentum, eps=self.eps,
            )  # fmt: skip
            y.again = again  # type: ignore[attr-defined]
            return y
        y = F.batch_norm(x, *running, self.weight, self.bias, self.training, momentum, self.eps)
        if shortcut is not None:
            y = y + shortcut
        return F.relu(y) if self.relu else y

    def _can_fuse(self, x: Tensor) -> bool:
        """Whether the fused operation applies, which has no gradient with running statistics."""
        fits = x.is_cuda and x.is_contiguous(memory_format=torch.channels_last) and x.dtype != torch.float64
        fits = fits and x.shape[1] < x.numel() < 2**31  # one value has no deviation; offsets have 32 bits
        return fits and not uses_plain_operations() and (self.training or not torch.is_grad_enabled()) and has_triton()


def _second_use(x: Tensor) -> Tensor:
    """The same images for a second use; if a fused Norm made them, its backward receives both gradients unsummed."""
    again: Tensor = getattr(x, "again", x)
    return again if again.grad_fn is x.grad_fn else x  # x may have been changed in place


class Convolution(nn.Conv2d):
    """A convolution without bias; on a GPU, one with a fast second derivative."""

    def __init__(self, before: int, after: int, size: int, stride: int = 1, padding: int = 0) -> None:
        super().__init__(before, after, size, stride, padding, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The feature maps."""
        return self._convolve(x, self.weight)

    @property
    def layout(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The stride and the padding."""
        return cast(tuple[int, int], self.stride), cast(tuple[int, int], self.padding)

    def _convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        if torch.is_grad_enabled() and _use_own_convolution(x, weight):
            return convolve(x.to(weight.dtype), weight, *self.layout)
        return F.conv2d(x, weight, None, *self.layout)


class Stem(Convolution):
    """A convolution of input images; on a GPU, where only multiples of eight channels are fast, padded to one."""

    def forward(self, x: Tensor) -> Tensor:
        """The first feature maps."""
        padding = -self.in_channels % 8
        if not padding or not x.is_cuda:
            return super().forward(x)
        x, weight = (F.pad(tensor, (0, 0, 0, 0, 0, padding)) for tensor in (x, self.weight))
        return self._convolve(x, weight)


def _use_own_convolution(x: Tensor, weight: Tensor) -> bool:
    """Whether to use our own convolution: on a GPU, unless autocast has yet to cast the weight."""
    mixed = torch.is_autocast_enabled("cuda") and weight.dtype == torch.float32
    return x.is_cuda and not mixed and not uses_plain_operations()


class _Settings(threading.local):
    plain = False


_settings = _Settings()


@contextmanager
def plain_operations() -> Iterator[None]:
    """Within this context, in this thread, make our networks use only torch's own operations on their own weights.

    This is for code that inspects single operations, such as per-example gradients.
    """
    before, _settings.plain = _settings.plain, True
    try:
        yield
    finally:
        _settings.plain = before


def uses_plain_operations() -> bool:
    """Whether to avoid our own operations: within `plain_operations`, or where they cannot be handled.

    That is in a torch.func transform, and where the network is exported or traced.
    """
    return _settings.plain or bool(
        torch._C._are_functorch_transforms_active() or torch.compiler.is_exporting() or torch._C._is_tracing()
    )


BACKBONES: dict[str, Callable[[Sequence[int], int], nn.Module]] = {
    "mlp": MLP,
    "convnet": ConvNet,
    "resnet18": ResNet18,
}


def make_backbone(name: str, shape: Sequence[int], classes: int, seed: int = 0) -> nn.Module:
    """Build a network by name, or by the path `module:factory` of a function that is called as factory(shape, classes).

    The initial weights depend on `seed` alone; torch's global random state is restored.

    >>> len(make_backbone("mlp", (1, 8, 8), 10))
    6
    """
    _check_shape(shape)
    check_number("classes", classes, whole=True, at_least=1)
    check_number("seed", seed, whole=True, below=2**63)
    factory = find_backbone(name)
    with drawing_apart():
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also seed the GPUs' generators
        model = factory(shape, classes)
    if not isinstance(model, nn.Module):
        raise invalid("backbone", type(model), f"{name} to return a torch.nn.Module")
    return model


def find_backbone(name: str) -> Callable[..., Any]:
    """The factory of a built-in network, or the one at the path `module:factory`."""
    if ":" not in name:
        check_name("backbone", name, BACKBONES, "or give module:factory")
        return BACKBONES[name]
    factory: Callable[..., Any] = load_object("backbone", name)
    check_call("backbone", factory, "shape", "classes")
    return factory


@contextmanager
def drawing_apart() -> Iterator[None]:
    """Let a network draw its initial weights, then restore torch's global random state.

    Only one thread at a time may do so: the generator is shared, and each would draw from what another has seeded.
    """
    with _drawing_lock, torch.random.fork_rng(devices=[]):
        yield


_drawing_lock = threading.RLock()  # reentrant: a factory that makes a learner takes it again


def _check_shape(shape: Any) -> None:
    sides = shape if isinstance(shape, Sequence) else [None]
    if not all(isinstance(side, Integral) and int(side) > 0 for side in sides):
        raise invalid("shape", shape, "the shape of an example, such as (4,) or (3, 32, 32)")


def _sizes(name: str, sizes: Any, example: str) -> tuple[int, ...]:
    """Several sizes, which may come from an iterator; anything else is refused."""
    if not hasattr(sizes, "__iter__"):
        raise invalid(name, sizes, "a list of whole numbers", f"as in {name}={example}")
    listed: tuple[int, ...] = tuple(sizes)
    for size in listed:
        check_number(name, size, whole=True, at_least=1)
    return listed


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        check_number(name, size, whole=True, at_least=1)


def _image_shape(name: str, shape: Any) -> tuple[int, ...]:
    """The shape of the images that the network of this name is for."""
    sizes = _sizes("shape", shape, "(3, 32, 32)")
    if len(sizes) != 3:
        raise invalid("backbone", name, f"images [channels, height, width]; the examples are {list(sizes)}", "use mlp")
    return sizes
