"""Where the time of an ER step goes on a GPU, five replicas at once: convolutions, norms, update, and the whole step.

    python benchmarks/parts.py                # on a machine with a GPU; no data needed
    python benchmarks/parts.py --stopwatch    # with each convolution's fastest algorithm, by timing rather than by rule

Each part is captured on its own, many times over, on one CUDA stream per replica; times are per replica.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from gpu import images, learner
from torch import Tensor

from parabolic.backbones import make_backbone
from parabolic.engine import Berth, computing_in, numerics
from parabolic.kernels import norm_add_relu

REPLICAS, BATCH = 5, 64  # 32 new examples and 32 recalled
STAGES = [(64, 32), (128, 16), (256, 8), (512, 4)]  # channels and sides of ResNet-18's feature maps
# Their number, channels in and out, the side of the input, and the stride.
CONVOLUTIONS = [(1, 8, 64, 32, 1), (4, 64, 64, 32, 1), (1, 64, 128, 32, 2), (3, 128, 128, 16, 1),
                (1, 128, 256, 16, 2), (3, 256, 256, 8, 1), (1, 256, 512, 8, 2), (3, 512, 512, 4, 1)]  # fmt: skip
MEMORY_RATE = 4.2e6  # bytes per microsecond, as benchmarks/gpu.py measures it


def at_once(make: Callable[[], Callable[[], object]], replicas: int = REPLICAS, times: int = 10) -> float:
    """Return the microseconds of some work, per replica."""
    graphs = []
    for _ in range(replicas):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            work = make()
            for _ in range(3):
                work()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            for _ in range(times):
                work()
            graph.capture_end()
        graphs.append((stream, graph, work))
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for stream, graph, _ in graphs:
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return 1e6 * best / times / replicas


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)


def convolution(before: int, after: int, side: int, stride: int, which: str):
    def make():
        x, weight = random(BATCH, before, side, side), random(after, before, 3, 3)
        dy = random(BATCH, after, side // stride, side // stride)
        if which == "forward":
            return lambda: F.conv2d(x, weight, None, stride, 1)
        layout, wanted = ((stride, stride), (1, 1), (1, 1), False, (0, 0), 1), (which == "images", which == "weights")
        return lambda: torch.ops.aten.convolution_backward(dy, x, weight, None, *layout, (*wanted, False))

    return make


def norms() -> list[tuple[int, int, bool, bool, bool]]:
    """For each: channels, side, whether a shortcut is added, whether ReLU follows, and whether two layers read it."""
    first, *_ = STAGES
    found = [(*first, False, True, True)]
    for number, (channels, side) in enumerate(STAGES):
        for block in range(2):
            last = number == len(STAGES) - 1 and block == 1
            found += [(channels, side, False, True, False), (channels, side, True, True, not last)]
            if number and not block:
                found.append((channels, side, False, False, False))
    return found


def all_norms():
    work = []
    for channels, side, added, relu, two in norms():
        x, shortcut, *slopes = (random(BATCH, channels, side, side) for _ in range(4))
        weights = [torch.randn(channels, device="cuda", requires_grad=True) for _ in range(2)]
        running = (torch.zeros(channels, device="cuda"), torch.ones(channels, device="cuda"))
        images = [each.requires_grad_() for each in (x, shortcut)[: 1 + added]]
        work.append((images, weights, running, relu, slopes[: 1 + two]))

    def step():
        for images, weights, running, relu, slopes in work:
            made = norm_add_relu(images[0], *weights, running, *images[1:], relu=relu)
            torch.autograd.grad(made[: len(slopes)], [*images, *weights], slopes)

    return step


def bytes_of_norms() -> int:
    """The bytes that their kernels must move: forward, one pass to sum and one to normalise, and the same backward."""
    total = 0
    for channels, side, added, relu, two in norms():
        kept = two or (added and relu)
        passes = 1 + (2 + added) + (2 + two + kept + (added and relu)) + 3
        total += 2 * BATCH * channels * side * side * passes
    return total


def update(*parts: str):
    def make():
        weights = [each.detach().clone() for each in make_backbone("resnet18", (3, 32, 32), 100, 0).cuda().parameters()]
        halves, slopes = [each.bfloat16() for each in weights], [torch.zeros_like(each) for each in weights]
        work = {
            "to bfloat16": lambda: torch._foreach_copy_(halves, weights),
            "back": lambda: torch._foreach_copy_(slopes, halves),
            "step": lambda: torch._foreach_add_(weights, slopes, alpha=-0.1),
        }
        return lambda: [work[part]() for part in parts]

    return make


def prediction():
    net = computing_in(make_backbone("resnet18", (3, 32, 32), 100, 0).cuda(), "bf16", channels_last=True).eval()
    x = torch.randn(1000, 3, 32, 32, device="cuda")

    def make():
        one = copy.deepcopy(net)
        return lambda: one(x)

    return make


def steps(count: int = 250) -> float:
    stream = images(True, 0, tasks=1, each=640)
    berths = [Berth(learner("er", {}, 0, stream, "bf16")) for _ in range(REPLICAS)]
    x = torch.randint(256, (BATCH // 2, 3, 32, 32), dtype=torch.uint8, device="cuda")
    y = torch.randint(100, (BATCH // 2,), device="cuda")

    def go(times):
        for _ in range(times):
            for berth in berths:
                with berth.on_stream():
                    berth.step(x, y)
        torch.cuda.synchronize()

    go(45)  # until the memory is full and everything is captured
    started = time.perf_counter()
    go(count)
    return 1e6 * (time.perf_counter() - started) / count / REPLICAS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stopwatch", action="store_true", help="choose the convolution algorithms by timing")
    stopwatch = parser.parse_args().stopwatch
    with numerics("bf16"):
        torch.backends.cudnn.benchmark = stopwatch
        print(f"a step of ER, {REPLICAS} at once: {steps():.0f} µs per replica\n")
        total = 0.0
        for count, before, after, side, stride in CONVOLUTIONS:
            cells, operations = [], 2 * BATCH * (side // stride) ** 2 * after * before * 9
            for which in ("forward", "images", "weights"):
                if before == 8 and which == "images":  # the gradient of the input is not needed
                    continue
                took = at_once(convolution(before, after, side, stride, which))
                total += count * took
                cells.append(f"{which} {took:5.1f} µs {operations / took / 1e6:4.0f} TFLOP/s")
            print(f"{count} × {before:3} to {after:3}, {side:2} × {side:2}, stride {stride}: {', '.join(cells)}")
        print(f"convolutions: {total:.0f} µs")
        print(f"norms: {at_once(all_norms):.0f} µs; at the memory's rate {bytes_of_norms() / MEMORY_RATE:.0f} µs")
        parts = ("to bfloat16", "back", "step")
        shares = ", ".join(f"{part} {at_once(update(part)):.0f}" for part in parts)
        print(f"update: {at_once(update(*parts)):.0f} µs ({shares})")
        with torch.no_grad():
            print(f"prediction of 1,000 images: {at_once(prediction(), times=5):.0f} µs")


if __name__ == "__main__":
    main()
