"""Where the equation holds and where a path stops: balls around points, convex hulls, and intersections."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import combinations
from math import sqrt
from typing import Protocol, runtime_checkable

import torch
from torch import Generator, Tensor

from parabolic.checks import check_finite, check_generator, check_number, invalid, type_name
from parabolic.gpus import tf32

__all__ = ["Balls", "Domain", "Hull", "Intersection", "MemoryDomain"]

EXACT = 3  # up to this dimension a hull is represented by its facets; beyond it their number explodes
ITERATIONS = 5000  # the maximum for a projection; images need a few hundred


@runtime_checkable
class Domain(Protocol):
    """The region that a path moves in. To bring your own, define these three methods.

    Each takes points `[n, *shape]` and treats every point on its own.

    >>> class Disc:
    ...     def inside(self, x): return x.norm(dim=1) <= 1
    ...     def hit(self, x): return 1 - x.norm(dim=1)
    ...     def nearest(self, x): return x / x.norm(dim=1, keepdim=True)
    >>> isinstance(Disc(), Domain)
    True
    """

    def inside(self, x: Tensor) -> Tensor:
        """Whether u is defined at x, `[n]`: in the region, including its edge and what is cut out of it."""

    def hit(self, x: Tensor) -> Tensor:
        """The signed distance to the edge, `[n]`: positive while a path runs, zero or less once it has hit the edge.

        Infinity means that x is inside at an unknown depth: crossings between two such points then go unnoticed.
        """

    def nearest(self, x: Tensor) -> Tensor:
        """The point of the edge nearest to x, `[n, *shape]`: where a path that crossed it is stopped."""


class Balls:
    """All of space except M^(ε), the balls ‖x − xᵢ‖² ≤ ε around the points: the *squared* norm, so radius √ε.

    >>> memory = Balls(torch.tensor([[0.0, 0.0], [4.0, 0.0]]), eps=0.25)
    >>> memory.hit(torch.tensor([[1.0, 0.0], [4.0, 0.25]]))  # half a unit to go; a quarter too deep
    tensor([ 0.5000, -0.2500])
    >>> memory.nearest(torch.tensor([[1.0, 0.0]]))
    tensor([[0.5000, 0.0000]])
    """

    def __init__(self, points: Tensor, eps: float) -> None:
        _check_points(points, 1)
        check_number("eps", eps, above=0, remedy="it is the squared radius of the balls")
        self.points, self.eps, self.radius = points.detach().clone(), float(eps), sqrt(eps)
        flat = self.points.flatten(1)
        # Distances come from ‖p‖² − 2x·p + ‖x‖², a small difference of large numbers: so measure from the
        # centre, and in double precision unless rounding errors are far below the balls' size anyway.
        self._centre = flat.mean(0)
        largest = float((flat - self._centre).square().sum(1).max())
        is_precise = torch.finfo(points.dtype).eps * largest < 1e-4 * eps
        self._centred = (flat - self._centre).to(points.dtype if is_precise else torch.float64)
        self._ones = torch.ones_like(self._centred[0])
        self._squares = self._centred.square().sum(1, keepdim=True)

    def inside(self, x: Tensor) -> Tensor:
        """True everywhere: in the balls u is the loss itself."""
        return torch.ones(len(_flat_points(x, self.points)), dtype=torch.bool, device=x.device)

    def hit(self, x: Tensor) -> Tensor:
        """The distance to the surface of the nearest ball, negative inside it."""
        y = self._from_centre(x)
        least = torch.cat([self._table(part).amin(0) for part in self._parts(y)])
        return (least + y.square() @ self._ones).clamp_min(0).sqrt().to(x.dtype) - self.radius

    def nearest(self, x: Tensor) -> Tensor:
        """The nearest point on the surface of the nearest ball (for a centre, itself)."""
        y = self._from_centre(x)
        point = self._centred[torch.cat([self._table(part).argmin(0) for part in self._parts(y)])]
        return (point + _unit(y - point) * self.radius).to(x.dtype).add(self._centre).reshape(x.shape)

    def _from_centre(self, x: Tensor) -> Tensor:
        return (_flat_points(x, self.points) - self._centre).to(self._centred.dtype)

    def _parts(self, y: Tensor) -> tuple[Tensor, ...]:
        return torch.split(y, _rows(len(self.points), y))

    def _table(self, y: Tensor) -> Tensor:
        """‖y − p‖² − ‖y‖² for every point p (rows) and y (columns): in this layout the reduction is fastest."""
        with _exact_products(y):
            return torch.addmm(self._squares, self._centred, y.T, alpha=-2)


class Hull:
    """The convex hull C of points, grown by `margin` on all sides.

    In up to three dimensions it is exact, computed from its facets (Qhull). In more, it is computed by projection: the
    distance to the hull lies between those to a separating plane and to a point of the hull, and the search ends when
    the two agree within `tolerance` times the hull's radius (and 1 % of the margin).

    Points that do not span their space have a `flat` hull, without an inside; a margin gives it one. In more than three
    dimensions the depth of a point in a hull that is not flat is unknown: `hit` returns infinity for every point of the
    hull, but not of its margin. Such a hull is `blind`, and its `width`, otherwise the least distance from a side to
    the farthest point, is taken to be infinite.

    Args:
        points: `[n, *shape]`, float32 or float64.
        margin: how far beyond the hull the region reaches. With √ε it is the hull of M^(ε).
        tolerance: the accuracy of distances and of `inside` in more than three dimensions.

    >>> triangle = Hull(torch.tensor([[0.0, 0.0], [4.0, 0.0], [0.0, 4.0]]))
    >>> triangle.hit(torch.tensor([[1.0, 0.5], [1.0, -0.5]]))
    tensor([ 0.5000, -0.5000])
    >>> segment = Hull(torch.eye(5)[:2], margin=0.1)  # of no volume without its margin
    >>> segment.flat, segment.inside(torch.tensor([[0.5, 0.5, 0.05, 0, 0], [0.5, 0.6, 0.2, 0, 0]])).tolist()
    (True, [True, False])
    """

    def __init__(self, points: Tensor, margin: float = 0.0, tolerance: float = 1e-4) -> None:
        _check_points(points, 2)
        check_number("margin", margin, at_least=0)
        check_number("tolerance", tolerance, above=0, below=1)
        self.points, self.margin = points.detach().clone(), float(margin)
        flat = self.points.flatten(1)
        self.radius = float((flat - flat.mean(0)).norm(dim=1).max())
        eps = torch.finfo(points.dtype).eps
        accuracy, facets = 10 * eps * self.radius, _Facets.of(flat)  # facets are exact up to rounding
        if facets is None:
            accuracy = max(accuracy, min(tolerance * self.radius, 0.01 * margin if margin else torch.inf))
        self._body = facets or _Cloud(flat, accuracy)
        # Points that `nearest` finds are also off by the rounding of the margin, and of coordinates of this size.
        self._reach = self.margin + accuracy + eps * (10 * self.margin + 4 * float(flat.norm(dim=1).max()))
        self.flat = isinstance(self._body, _Cloud) and self._body.flat
        self.blind = isinstance(self._body, _Cloud) and not self._body.flat
        self.width = self._body.width + 2 * self.margin

    def inside(self, x: Tensor) -> Tensor:
        """Whether x is in the grown hull, including its edge."""
        return self._body.within(_flat_points(x, self.points), self._reach)

    def hit(self, x: Tensor) -> Tensor:
        """The distance to the edge, negative outside."""
        return self._body.depth(_flat_points(x, self.points)) + self.margin

    def nearest(self, x: Tensor) -> Tensor:
        """The nearest point of the edge; x itself where its depth is unknown."""
        base, outward = self._body.surface(_flat_points(x, self.points))
        return (base + outward * self.margin).reshape(x.shape)

    def meet(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`hit` and `nearest` of the same points: in more than three dimensions by one projection instead of two."""
        depth, base, outward = self._body.meet(_flat_points(x, self.points))
        return depth + self.margin, (base + outward * self.margin).reshape(x.shape)


class Intersection:
    """The intersection of several domains: a path stops at whichever edge it meets first.

    >>> ring = Intersection(Hull(torch.tensor([[-3.0], [3.0]])), Balls(torch.zeros(1, 1), eps=1.0))
    >>> ring.hit(torch.tensor([[2.5], [1.25], [0.5]]))
    tensor([ 0.5000,  0.2500, -0.5000])
    """

    def __init__(self, *parts: Domain) -> None:
        if not parts:
            raise invalid("parts", parts, "at least one domain")
        for part in parts:
            check_domain("parts", part)
        self.parts = parts

    def inside(self, x: Tensor) -> Tensor:
        """Whether x is in every part."""
        return torch.stack([part.inside(x) for part in self.parts]).all(0)

    def hit(self, x: Tensor) -> Tensor:
        """The distance to the nearest edge; negative once any edge has been crossed."""
        return torch.stack([part.hit(x) for part in self.parts]).amin(0)

    def nearest(self, x: Tensor) -> Tensor:
        """The nearest point of the nearest edge or, once edges are crossed, of the one crossed furthest."""
        nearest_part = torch.stack([part.hit(x) for part in self.parts]).argmin(0)
        points = torch.empty_like(x)
        for index, part in enumerate(self.parts):
            rows = (nearest_part == index).nonzero().squeeze(1)
            if len(rows):
                points[rows] = part.nearest(x[rows])
        return points


class MemoryDomain(Intersection):
    """The paper's domain: the hull of the memory, minus the balls M^(ε) around its points.

    Args:
        points: the memory, `[n, *shape]`, float32 or float64.
        eps: the squared radius of the balls.
        margin: how far the region reaches beyond the hull of the points. By default √ε: the hull of M^(ε),
            which has an inside for any two or more points. With 0, the hull of the points themselves.
        tolerance: see `Hull`.

    >>> domain = MemoryDomain(torch.tensor([[0.0, 0.0], [4.0, 0.0], [0.0, 4.0]]), eps=0.01)
    >>> domain.inside(torch.tensor([[1.0, 1.0], [0.0, 0.0], [3.0, 3.0]]))  # u is the loss on memory
    tensor([ True,  True, False])
    >>> domain.hit(torch.tensor([[0.5, 0.25], [0.0, 0.05]]))
    tensor([ 0.3500, -0.0500])
    """

    def __init__(self, points: Tensor, eps: float, margin: float | None = None, tolerance: float = 1e-4) -> None:
        self.balls = Balls(points, eps)
        self.hull = Hull(points, self.balls.radius if margin is None else margin, tolerance)
        if self.hull.flat and not self.hull.margin:
            raise invalid(
                "points",
                points,
                f"points that span their space: at least {points[0].numel() + 1}, not all on one plane",
                "keep more of them, or leave margin at its default for the hull of M^(ε)",
            )
        super().__init__(self.balls, self.hull)
        self.points, self.eps = self.balls.points, self.balls.eps

    def interior(self, count: int, generator: Generator | None = None) -> Tensor:
        """Sample points of the grown hull: mixtures of a few random points of the memory, moved within its margin.

        Each is moved in a random direction by a random part of the margin: so the points fill the margin too, where
        paths also run, and which is all of the inside of a flat hull. Mixtures are of at most eight points: in
        more than seven dimensions they do not reach all of a hull.

        >>> memory = MemoryDomain(torch.randn(9, 2, generator=torch.Generator().manual_seed(0)), eps=0.01)
        >>> bool(memory.inside(memory.interior(100)).all())
        True
        """
        check_number("count", count, whole=True, at_least=1)
        points = self._mix(count, generator)
        # Not evenly by volume: in many dimensions nearly all of it is next to the surface.
        direction = _unit(random_like(torch.randn, (count, self.points[0].numel()), points, generator))
        length = self.hull.margin * random_like(torch.rand, (count, 1), points, generator)
        return points + (direction * length).reshape(points.shape)

    def _mix(self, count: int, generator: Generator | None) -> Tensor:
        # A point of a hull in d dimensions is a mixture of d + 1 others; mixtures of many are all close to the mean.
        size = min(self.points[0].numel() + 1, 8)
        # Logarithms of uniform numbers, scaled to sum to one, are uniform on the simplex.
        shares = random_like(torch.rand, (count, size), self.points, generator).clamp_min(1e-6).log()
        mixtures = (shares / _total(shares)).unsqueeze(1) @ self._pick(count, size, generator=generator).flatten(2)
        return mixtures.reshape(count, *self.points.shape[1:])

    def edge(self, count: int, generator: Generator | None = None) -> Tensor:
        """Sample points that stop a path: in turn in a ball (half of them on its surface) and on the hull's surface.

        >>> memory = MemoryDomain(torch.randn(9, 2, generator=torch.Generator().manual_seed(0)), eps=0.01)
        >>> bool((memory.hit(memory.edge(100)) < 1e-5).all())
        True
        """
        check_number("count", count, whole=True, at_least=1)
        shape, radius = (count, *self.points.shape[1:]), self.hull.radius
        direction = _unit(random_like(torch.randn, (count, self.points[0].numel()), self.points, generator))
        length = random_like(torch.rand, (count, 1), direction, generator)
        points = self._pick(count, generator=generator)
        points += (direction * self.balls.radius * (2 * length).clamp_max(1)).reshape(shape)
        # From inside the hull outwards and back to it: by a random length or, if still inside, by one that leads out.
        start = self._mix(count, generator)
        outer = start + (direction * length * 2 * radius).reshape(shape)
        gap, points[1::2] = self.hull.meet(outer[1::2])
        if len(inside := (gap > 0).nonzero().squeeze(1) * 2 + 1):
            outer[inside] = start[inside] + (direction[inside] * 3 * radius).reshape(-1, *shape[1:])
            points[inside] = self.hull.nearest(outer[inside])
        return points

    def _pick(self, *shape: int, generator: Generator | None) -> Tensor:
        return self.points[torch.randint(len(self.points), shape, generator=generator, device=self.points.device)]


class _Facets:
    """A low-dimensional hull as half-spaces `normal·y + offset ≤ 0`, and all of its faces.

    Here y is x minus the centre of the points: far from the origin `normal·x + offset` is a small difference of large
    numbers.
    """

    def __init__(self, normal: Tensor, offset: Tensor, simplices: Tensor, points: Tensor, centre: Tensor) -> None:
        self.normal, self.offset, self.centre = normal, offset[:, None], centre
        self.width = -float(torch.addmm(self.offset, normal, points.T).amin(1).max())
        # A face: its first corner, the sides from there to the others, and the map from x to their weights.
        self.faces = []
        for size in range(1, simplices.shape[1] + 1):
            index_sets = {tuple(sorted(c)) for row in simplices.tolist() for c in combinations(row, size)}
            corners = points[torch.tensor(sorted(index_sets), device=points.device)]
            sides = corners[:, 1:] - corners[:, :1]
            self.faces.append((corners[:, 0], sides, torch.linalg.pinv(sides)))

    @classmethod
    def of(cls, points: Tensor) -> _Facets | None:
        """The hull of some points; None if there are too many dimensions, or if the points lie on one plane."""
        if points.shape[1] > EXACT:
            return None
        centre = points.double().mean(0).to(points)
        points = points - centre
        if points.shape[1] == 1:
            ends = torch.stack([points.argmin(), points.argmax()])
            sign = points.new_tensor([[-1.0], [1.0]])
            corners = points[ends]
            if not corners[0] < corners[1]:
                return None
            return cls(sign, -(sign * corners)[:, 0], ends[:, None], points, centre)
        from scipy.spatial import ConvexHull, QhullError  # slow to import, and rarely needed

        try:
            hull = ConvexHull(points.double().cpu().numpy())
        except QhullError:
            return None
        plane = torch.as_tensor(hull.equations).to(points)
        return cls(plane[:, :-1], plane[:, -1], torch.as_tensor(hull.simplices), points, centre)

    def within(self, x: Tensor, reach: float) -> Tensor:
        """Whether the hull is at most `reach` away."""
        return self.depth(x) >= -reach

    def depth(self, x: Tensor) -> Tensor:
        """The distance to the surface, negative outside."""
        y = x - self.centre
        depth = -self._over(y).amax(0)
        # Beyond a corner the planes are nearer than the hull.
        beyond = (depth < 0).nonzero().squeeze(1)
        depth[beyond] = -(y[beyond] - self._project(y[beyond])).norm(dim=1)
        return depth

    def surface(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The nearest point of the surface, and the unit normal there that points outwards."""
        y = x - self.centre
        over, facet = self._over(y).max(0)
        outward = self.normal[facet]
        base = y - over[:, None] * outward
        beyond = (over > 0).nonzero().squeeze(1)
        base[beyond] = self._project(y[beyond])
        away = y[beyond] - base[beyond]
        # A point on the surface is off it only by rounding, in an arbitrary direction: it keeps the facet's normal.
        clear = _length(away) > 8 * torch.finfo(x.dtype).eps * x[beyond].abs().amax(1, keepdim=True)
        outward[beyond] = torch.where(clear, _unit(away), outward[beyond])
        return base + self.centre, outward

    def meet(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`depth` and `surface`."""
        return self.depth(x), *self.surface(x)

    def _over(self, y: Tensor) -> Tensor:
        """How far each point (columns) is beyond the plane of each facet (rows)."""
        with _exact_products(y):
            return torch.addmm(self.offset, self.normal, y.T)

    def _project(self, y: Tensor) -> Tensor:
        """The nearest point of the hull to points outside: the projection onto one of its faces."""
        width = sum(first.numel() for first, _, _ in self.faces)
        with _exact_products(y):
            return torch.cat([self._project_chunk(part) for part in torch.split(y, _rows(width, y))])

    def _project_chunk(self, y: Tensor) -> Tensor:
        nearest, best = torch.empty_like(y), y.new_full((len(y), 1), torch.inf)
        for first, sides, to_weights in self.faces:
            weight = torch.einsum("nfd,fds->nfs", y[:, None] - first, to_weights)
            point = first + torch.einsum("nfs,fsd->nfd", weight, sides)
            length = (y[:, None] - point).square().sum(2)
            if sides.shape[1]:  # every point projects onto a corner
                length[(weight.amin(2) < 0) | (weight.sum(2) > 1)] = torch.inf
            least, face = length.min(1, keepdim=True)
            choice = point.gather(1, face[..., None].expand(-1, -1, y.shape[1])).squeeze(1)
            nearest, best = torch.where(least < best, choice, nearest), torch.minimum(least, best)
        return nearest


class _Cloud:
    """A hull of any dimension, by projection onto it: min ‖Pᵀλ − y‖² over λ ≥ 0, Σλ = 1.

    The alternating direction method of multipliers (ADMM) splits λ, which solves the least squares with Σλ = 1, from
    z ≥ 0. In the points' principal axes, P = U S Vᵀ, the least squares take two thin products for any step size ρ, so
    that each query can have its own; the part of y orthogonal to the points' span only adds to the distance.
    """

    def __init__(self, points: Tensor, accuracy: float) -> None:
        # In double precision: a residual as small as the accuracy is a difference of much larger numbers.
        self.centre = points.double().mean(0)
        u, s, vt = torch.linalg.svd(points - self.centre, full_matrices=False)
        noise = 10 * torch.finfo(s.dtype).eps * float(points.double().norm())  # from the rounding of the centre
        span = int((s > max(noise, float(s[0]) * 1e-10)).sum())
        self.u, self.s, self.axes = u[:, :span].contiguous(), s[:span], vt[:span]
        self.corners, self.accuracy = self.u * self.s, accuracy
        # In few dimensions, points that Qhull has refused lie on one plane too, up to rounding.
        self.flat = span < points.shape[1] or points.shape[1] <= EXACT
        self.width = 0.0 if self.flat else torch.inf

    def within(self, x: Tensor, reach: float) -> Tensor:
        """Whether the hull is at most `reach` away."""
        return self._project(x, reach)[0] <= reach

    def depth(self, x: Tensor) -> Tensor:
        """Minus the distance outside; inside, 0 if the hull is flat (all surface), else infinity (unknown)."""
        return self._depth(self._project(x)[0]).to(x.dtype)

    def surface(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The nearest point of the hull, and the direction from there to x; x itself and 0 at an unknown depth."""
        return self.meet(x)[1:]

    def meet(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`depth` and `surface`, from one projection."""
        distance, nearest = self._project(x)
        depth, base = self._depth(distance).to(x.dtype), (nearest @ self.axes + self.centre).to(x.dtype)
        outward, known = _unit(x - base), (distance > self.accuracy)[:, None]
        if self.flat:
            return depth, base, outward
        return depth, torch.where(known, base, x), torch.where(known, outward, 0.0)

    def _depth(self, distance: Tensor) -> Tensor:
        return torch.where(distance > self.accuracy, -distance, 0.0 if self.flat else torch.inf)

    def _project(self, x: Tensor, reach: float = torch.inf) -> tuple[Tensor, Tensor]:
        """Distances and nearest points (in the axes); with `reach`, only until it is clear which of the two is less."""
        y = x - self.centre
        coords = y @ self.axes.T
        distance, nearest = (y - coords @ self.axes).norm(dim=1), coords.clone()
        if not self.s.numel():  # all points coincide
            return distance, nearest
        near = (distance <= reach).nonzero().squeeze(1)
        for rows in torch.split(near, _rows(len(self.u), x)):
            distance[rows], nearest[rows] = self._descend(coords[rows], distance[rows], reach)
        return distance, nearest

    def _descend(self, coords: Tensor, across: Tensor, reach: float) -> tuple[Tensor, Tensor]:
        """The same for points given by their coordinates in the axes, `coords`, and their distance from the axes' span.

        Points that are done leave the iteration, so that the last few do not cost as much as all.
        """
        n, curve = len(self.u), self.s.square()
        distance, nearest, rows = across.clone(), coords.clone(), torch.arange(len(coords), device=coords.device)
        z = coords.new_full((len(coords), n), 1 / n)
        dual = torch.zeros_like(z)
        rho = coords.new_full((len(coords), 1), 0.1 * float(curve.mean()))
        low, pull, least = across, coords * self.s, float(self.s[0] * self.s[-1] / curve.mean())
        for step in range(ITERATIONS):
            previous, v = z, z - dual
            weights = v + ((pull - (v @ self.u) * curve) / (curve + rho)) @ self.u.T + (1 - _total(v)) / n
            eased = 1.6 * weights - 0.6 * z  # over-relaxation by the usual factor: fewer steps
            z = (eased + dual).clamp_min(0)
            dual = dual + eased - z
            if step % 10 != 9:
                continue
            # Feasible weights bound the distance from above, a separating plane from below.
            point = (z / _total(z)) @ self.corners
            high = torch.hypot((coords - point).norm(dim=1), across)
            for towards in (coords - point, coords - weights @ self.corners):
                low = torch.maximum(low, torch.hypot(self._beyond(coords, towards), across))
            distance[rows], nearest[rows] = high, point
            done = high - low <= self.accuracy
            if reach < torch.inf:
                done |= (high <= reach) | (low > reach)
            remaining = (~done).nonzero().squeeze(1)
            if not len(remaining):
                break
            # ρ trades the two residuals against each other: balance them, each relative to its own scale. For
            # y in the hull the dual is zero and gives no scale: then √(λmin λmax) of PᵀP takes its place.
            primal = _length(weights - z) / torch.maximum(_length(weights), _length(z))
            scale = torch.maximum(rho * _length(dual), least * _length(pull)).clamp_min(1e-30)
            change = (primal / (rho * _length(z - previous) / scale).clamp_min(1e-30)).sqrt().clamp(0.2, 5)
            change = torch.where((change > 1.5) | (change < 0.66), change, 1.0)
            rho, dual = rho * change, dual / change
            coords, across, low, pull, rows, z, dual, rho = (
                a[remaining] for a in (coords, across, low, pull, rows, z, dual, rho)
            )
        else:
            if reach < torch.inf:  # points that no plane could separate in time count as within reach
                distance[rows] = low
        return distance, nearest

    def _beyond(self, coords: Tensor, towards: Tensor) -> Tensor:
        """How far y is beyond the plane normal to `towards` that touches the hull; 0 if it is not beyond it."""
        normal = _unit(towards)
        over: Tensor = (coords * normal).sum(1) - (normal @ self.corners.T).amax(1)
        return over.clamp_min(0)


def _exact_products(x: Tensor) -> AbstractContextManager[None]:
    """A context in which a GPU does not shorten numbers to multiply them, whatever precision a network computes in."""
    return tf32(False) if x.is_cuda else nullcontext()


def _total(x: Tensor) -> Tensor:
    return x.sum(1, keepdim=True)


def _rows(width: int, like: Tensor) -> int:
    """How many rows of a table to compute at once: what a core's cache holds, or what keeps a GPU busy."""
    return max(1, (2**19 if like.device.type == "cpu" else 2**26) // width)


def _length(x: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(x, dim=1, keepdim=True)
    return length


def _unit(x: Tensor) -> Tensor:
    return torch.nn.functional.normalize(x, eps=torch.finfo(x.dtype).tiny)


def random_like(
    sampler: Callable[..., Tensor], shape: Sequence[int], like: Tensor, generator: Generator | None
) -> Tensor:
    """Numbers drawn by `torch.rand` or `torch.randn`, with the type and on the device of `like`."""
    check_generator(generator)
    return sampler(shape, generator=generator, dtype=like.dtype, device=like.device)


def check_domain(name: str, domain: object) -> None:
    """Refuse what is no domain: a class, too, instead of an object made of it."""
    if isinstance(domain, type) or not isinstance(domain, Domain):
        raise invalid(name, domain, "an object with the methods inside, hit and nearest", "such as a MemoryDomain")


def check_methods(domain: Domain, x: Tensor) -> None:
    """Refuse a domain whose methods do not return what `Domain` says for points x."""
    kinds = {"inside": (x.shape[:1], torch.bool), "hit": (x.shape[:1], x.dtype), "nearest": (x.shape, x.dtype)}
    for name, (shape, dtype) in kinds.items():
        got = getattr(domain, name)(x)
        if not isinstance(got, Tensor) or got.shape != shape or got.dtype != dtype:
            expected = f"to return a tensor of shape {list(shape)} and type {type_name(dtype)}"
            raise invalid(f"domain.{name}", got, expected)


def _check_points(points: Tensor, least: int) -> None:
    # Half precision is too coarse for balls and margins.
    if not isinstance(points, Tensor) or points.dtype not in (torch.float32, torch.float64) or points.ndim < 2:
        remedy = "convert it with torch.as_tensor(points).float(), and a tensor of one dimension with [:, None]"
        raise invalid("points", points, "a tensor [n, *shape], float32 or float64", remedy)
    if len(points) < least or not points[0].numel():
        raise invalid("points", points, f"at least {least} points", "keep more of them in memory")
    check_finite("points", points)


def _flat_points(x: Tensor, points: Tensor) -> Tensor:
    if not isinstance(x, Tensor) or x.shape[1:] != points.shape[1:] or x.ndim < 2:
        raise invalid("x", x, f"a tensor [n{''.join(f', {k}' for k in points.shape[1:])}], like the domain's points")
    if x.dtype != points.dtype or x.device != points.device:
        expected = f"type {points.dtype} on {points.device}, like the domain's points"
        raise invalid("x", x, expected, "convert it with .to()")
    return x.flatten(1)
