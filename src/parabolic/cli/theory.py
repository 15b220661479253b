"""`parabolic bounds` and `profile`: the theory compared with measurements."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from parabolic.checks import check_number
from parabolic.cli.common import MEMORY, Device, Json, RunOptions, table_console
from parabolic.cli.groups import with_groups
from parabolic.cli.tables import check_output
from parabolic.engine import BoundsMonitor, BoundsRow, Callback, ProfileRecorder, ProgressBar, State, train
from parabolic.engine.theory import EPS, SAMPLES
from parabolic.experiments import RunSpec, build
from parabolic.files import disk_errors, file_name, write_text
from parabolic.pde import Range
from parabolic.report.figures import check_picture, draw_bounds, draw_profiles
from parabolic.report.formats import WholeTable

__all__ = ["bounds", "profile"]

Output = Annotated[Path, typer.Option("--output", "--out", "-o", help="The folder for the JSON file and the picture.")]
Eps = Annotated[float, typer.Option(help="Squared radius of the balls around the examples in memory.")]


@dataclass(frozen=True)
class PlaneOptions(RunOptions):
    """The options of a run for `profile`: on points in the plane, with few of them in memory."""

    stream: Annotated[
        str | None,
        typer.Option(
            help="The stream, of points in the plane: a name from `parabolic list`, or module:function.",
            show_default="the preset's, or seq-blobs",
        ),
    ] = None
    memory: Annotated[int | None, typer.Option(help=MEMORY, show_default="the preset's, or 60")] = None


@with_groups
def bounds(
    *,
    options: RunOptions,
    eps: Eps = EPS,
    samples: Annotated[
        int, typer.Option(help="How many points to sample on the boundary, and as many inside.")
    ] = SAMPLES,
    output: Output = Path("bounds"),
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Compare the loss on memory with the loss on the first and last task, after every task (the paper's appendix)."""
    chosen, spec = options.read()
    _check_folder(output)
    console = table_console(stderr=as_json)
    monitor = BoundsMonitor(
        eps=eps, samples=samples, seed=spec.seed, warn=lambda text: console.print(text, style="bold")
    )
    state = _train(spec, device, monitor)
    rows = [row.as_dict() for row in monitor.rows]
    payload = {"spec": spec.resolved(), "eps": eps, "samples": samples, "rows": rows}
    title = f"{chosen.name} on {spec.stream}: the loss and its bounds"
    message = _write(output, spec, payload, partial(draw_bounds, monitor.rows, title=title))
    if as_json:
        print(json.dumps(payload, indent=1))
        return
    console.print(_forgetting_table(monitor.rows), _generalisation_table(monitor.rows, len(state.stream)), sep="\n")
    console.print(message, soft_wrap=True)


@with_groups
def profile(
    *,
    options: PlaneOptions,
    eps: Eps = EPS,
    time: Annotated[float, typer.Option(help="The time t of u(x, t).")] = 1.0,
    sigma: Annotated[float, typer.Option(help="The diffusion coefficient of the equation.")] = 0.05,
    grid: Annotated[int, typer.Option(min=2, help="Grid points along each side.")] = 48,
    paths: Annotated[int, typer.Option(min=2, help="Random paths from each grid point.")] = 100,
    output: Output = Path("profile"),
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Draw the continual loss profile u(x, t) of a learner after each task of a stream of points in the plane."""
    chosen, spec = options.read(stream="seq-blobs", memory=60)
    check_number("--memory", spec.memory, whole=True, at_least=3, remedy="three points are needed to span an area")
    _check_folder(output)
    recorder = ProfileRecorder(grid=grid, eps=eps, t=time, sigma=sigma, paths=paths, seed=spec.seed)
    _train(spec, device, recorder)
    rows: list[dict[str, Any]] = [
        {
            "task": task,
            "memory_loss": _range_dict(result.memory_loss),
            "u": _range_dict(result.u.mean),
            "largest_standard_error": float(result.u.error.max()),
            "stopped": float(result.u.stopped.mean()),
            "points": result.points.tolist(),
            "values": result.u.mean.tolist(),
        }
        for task, result in enumerate(recorder.profiles)
    ]
    payload = {
        "spec": spec.resolved(), "eps": eps, "time": time, "sigma": sigma, "grid": grid, "paths": paths,
        "rows": rows,
    }  # fmt: skip
    title = (
        f"What {chosen.name} expects to lose on {spec.stream}: u(x, t) with σ = {sigma:g}, ε = {eps:g}, "
        f"{paths} paths a point"
    )
    message = _write(output, spec, payload, partial(draw_profiles, recorder.profiles, title=title))
    if as_json:
        print(json.dumps(payload, indent=1))
        return
    console = table_console()
    console.print(_profile_table(rows, f"{chosen.name} on {spec.stream}: u(x, {time:g}) over the hull of the memory"))
    console.print(message, soft_wrap=True)


def _check_folder(output: Path) -> None:
    """Refuse a folder in which no picture can be drawn: before the training rather than after it."""
    check_picture("--output", output / "picture.png")
    check_output(output / "picture.png", "name another folder")


def _write(output: Path, spec: RunSpec, payload: Mapping[str, Any], draw: Callable[[Path], Path]) -> str:
    """Write the JSON file and the picture, named by all settings; returns a line that names them."""
    settings = json.dumps({**payload, "rows": None}).encode()
    digest = hashlib.sha256(settings).hexdigest()[:6]
    stem = output / file_name(f"{spec.stream}-{spec.learner}-{spec.seed}-{digest}")
    with disk_errors("--output", output, "name another folder"):
        json_file = write_text(Path(f"{stem}.json"), json.dumps(payload, indent=1))
        return f"Written: {json_file}, {draw(Path(f'{stem}.png'))}"


def _train(spec: RunSpec, device: str, callback: Callback) -> State:
    learner, stream = build(spec, device)
    with ProgressBar() as bar:
        bar.title = spec.learner
        return train(learner, stream, batch=spec.resolved()["batch"], epochs=spec.epochs, callbacks=[bar, callback])


def _forgetting_table(rows: list[BoundsRow]) -> WholeTable:
    caption = (
        "Loss on test examples with their true labels, over all classes (in brackets: over the task's own classes). "
        "The bound is the largest loss found on the memory, the hull and the interior; 'covered' is the share of the "
        "examples that lie within the hull, to which the proposition applies."
    )
    table = WholeTable(title="Proposition 1: the past", caption=caption, title_justify="left", caption_justify="left")
    for column in ("after task", "memory: min / mean / max", "first task", "bound", "holds", "covered"):
        table.add_column(column, justify="right")
    for row in rows:
        bounds = row.forgetting
        table.add_row(
            str(row.task + 1), _format_range(bounds.memory), f"{bounds.realised:.3f} ({row.first_among_own:.3f})",
            f"{bounds.bound:.3f}", "yes" if bounds.holds else "no", f"{bounds.covered:.0%}",
        )  # fmt: skip
    return table


def _generalisation_table(rows: list[BoundsRow], tasks: int) -> WholeTable:
    caption = "The upper bound is C·τ + max, with τ = 1 and C the largest loss found on the domain."
    table = WholeTable(title="Corollary 1: the future", caption=caption, title_justify="left", caption_justify="left")
    for column in ("after task", f"task {tasks}", "lower bound", "upper bound", "holds", "covered"):
        table.add_column(column, justify="right")
    for row in rows:
        bounds = row.generalisation
        table.add_row(
            str(row.task + 1), f"{bounds.realised:.3f} ({row.last_among_own:.3f})",
            f"{bounds.lower:.3f}", f"{bounds.upper:.3f}", "yes" if bounds.holds else "no", f"{bounds.covered:.0%}",
        )  # fmt: skip
    return table


def _profile_table(rows: list[dict[str, Any]], title: str) -> WholeTable:
    table = WholeTable(title=title, title_justify="left")
    for column in ("after task", "loss on memory: mean", "max", "u: min", "mean", "max", "paths stopped"):
        table.add_column(column, justify="right")
    for row in rows:
        memory_loss, u = row["memory_loss"], row["u"]
        figures = (memory_loss["mean"], memory_loss["max"], u["min"], u["mean"], u["max"])
        table.add_row(str(row["task"] + 1), *[f"{value:.3f}" for value in figures], f"{row['stopped']:.0%}")
    return table


def _format_range(losses: Range) -> str:
    return f"{losses.min:.3f} / {losses.mean:.3f} / {losses.max:.3f}"


def _range_dict(values: Any) -> dict[str, float]:
    return {"min": float(values.min()), "mean": float(values.mean()), "max": float(values.max())}
