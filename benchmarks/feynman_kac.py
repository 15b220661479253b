"""Paths per second of `parabolic.pde.solve`, of torchsde's Euler–Maruyama, and of one path at a time in NumPy.

All solve the same problem: u at one point of a hull in two dimensions with 20 eps-balls cut out, in the same number of
steps, on one thread, in CPU time. torchsde simulates whole paths, which are then cut where they first leave the domain;
it and the NumPy loop check for the boundary only after each step, and the last column shows the error this causes.

    python benchmarks/feynman_kac.py
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Callable

import numpy as np
import torch
from scipy.spatial import ConvexHull
from torch import Tensor

from parabolic.pde import MemoryDomain, solve

SIGMA, T, EPS = 0.2, 1.0, 0.01  # four in five paths stop before the time is up
POINTS = torch.randn(20, 2, generator=torch.Generator().manual_seed(3))
START = torch.tensor([[0.87, -0.99]])
PLANES = torch.tensor(ConvexHull(POINTS.numpy()).equations, dtype=torch.float32)


def loss(x: Tensor) -> Tensor:
    return 1 + torch.sin(3 * x[:, 0]) * torch.cos(2 * x[:, 1])


def ours(paths: int, steps: int) -> tuple[float, float]:
    domain = MemoryDomain(POINTS, EPS, margin=0.0)
    u = solve(loss, START, T, domain, SIGMA, paths=paths, steps=steps, generator=torch.Generator().manual_seed(0))
    return float(u.mean), float(u.error)


def by_torchsde(paths: int, steps: int) -> tuple[float, float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torchsde

    class Diffusion(torch.nn.Module):
        noise_type, sde_type = "diagonal", "ito"

        def f(self, _: float, y: Tensor) -> Tensor:
            return torch.zeros_like(y)

        def g(self, _: float, y: Tensor) -> Tensor:
            return torch.full_like(y, math.sqrt(2 * SIGMA))

    torch.manual_seed(0)
    with torch.no_grad():
        times = torch.linspace(0, T, steps + 1)
        path = torchsde.sdeint(Diffusion(), START.expand(paths, 2), times, dt=T / steps, method="euler")
        flat = path.flatten(0, 1)
        left = (flat @ PLANES[:, :2].T + PLANES[:, 2]).amax(1) >= 0
        left |= torch.cdist(flat, POINTS).amin(1) <= math.sqrt(EPS)
        left = left.reshape(steps + 1, paths)
        left[-1] = True  # at the latest when the time is up
        stop = left.to(torch.uint8).argmax(0, keepdim=True)
        value = loss(flat).reshape(steps + 1, paths)
        integral = torch.cat([torch.zeros(1, paths), torch.cumulative_trapezoid(value, dx=T / steps, dim=0)])
        payoff = (value + integral).gather(0, stop)
    return float(payoff.mean()), float(payoff.std()) / math.sqrt(paths)


def one_by_one(paths: int, steps: int) -> tuple[float, float]:
    points, planes, start = POINTS.numpy(), PLANES.numpy(), START[0].numpy()
    noise, dt, payoff = np.random.default_rng(0), T / steps, []

    def value(y: np.ndarray) -> float:
        return 1 + math.sin(3 * y[0]) * math.cos(2 * y[1])

    for _ in range(paths):
        y, integral = start, 0.0
        now = value(y)
        for _ in range(steps):
            y = y + math.sqrt(2 * SIGMA * dt) * noise.standard_normal(2)
            before, now = now, value(y)
            integral += (before + now) * dt / 2
            if (planes[:, :2] @ y + planes[:, 2]).max() >= 0 or ((points - y) ** 2).sum(1).min() <= EPS:
                break
        payoff.append(now + integral)
    return float(np.mean(payoff)), float(np.std(payoff)) / math.sqrt(paths)


def timed(solver: Callable[[int, int], tuple[float, float]], paths: int, steps: int) -> tuple[float, float, float]:
    solver(max(2, paths // 10), steps)  # warm up
    best, found = math.inf, (0.0, 0.0)
    for _ in range(3):
        start = time.process_time()
        found = solver(paths, steps)
        best = min(best, time.process_time() - start)
    return paths / best, *found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--paths", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    torch.set_num_threads(1)
    exact, _ = ours(20 * args.paths, 10 * args.steps)
    rows = [
        ("parabolic", *timed(ours, args.paths, args.steps)),
        ("torchsde, Euler–Maruyama", *timed(by_torchsde, args.paths, args.steps)),
        ("NumPy, one path at a time", *timed(one_by_one, max(2, args.paths // 100), args.steps)),
    ]
    print(f"{args.paths} paths of {args.steps} steps, 2 dimensions, 20 balls, one thread, torch {torch.__version__}")
    print(f"{'solver':28}{'paths/s':>10}{'ours is':>9}{'u − u(fine)':>20}")
    for name, rate, u, error in rows:
        print(f"{name:28}{rate:10,.0f}{rows[0][1] / rate:8.1f}×{u - exact:+12.4f} ± {error:.4f}")


if __name__ == "__main__":
    main()
