"""Turns a store into an HTML page."""

from __future__ import annotations

import json
import secrets
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from parabolic import __version__
from parabolic.checks import UNREADABLE, Description, InputError, invalid
from parabolic.engine.theory import EPS, SAMPLES
from parabolic.experiments import FailedRun, Record, Store, is_record
from parabolic.experiments.paper import Rows, bounds_in
from parabolic.experiments.records import SOURCE
from parabolic.files import disk_errors, write_text
from parabolic.learners import known_learners
from parabolic.options import dotted
from parabolic.plugins import require
from parabolic.report import charts
from parabolic.report.comparisons import judged_by
from parabolic.report.page.bridges import Bridges, draw_bridges
from parabolic.report.page.tables import TableView, paper_table_views, scene_table_view
from parabolic.report.paper import hardware
from parabolic.report.runs import Row, departures, fault_of, format_settings, row_of, select, settings_of
from parabolic.report.scenes import FoundScenes, Scene, find_scenes
from parabolic.report.words import headline, judgement, lead
from parabolic.streams import known_streams

__all__ = ["TITLE", "TRAIN", "page_of", "write_page"]

TITLE = "Continual learning, compared"
USUAL = {"eps": EPS, "samples": SAMPLES}  # with which `parabolic bounds` measures
TRAIN = "train some: parabolic compare --learners pcl,er,sgd"


def write_page(
    store: Store,
    path: str | Path,
    *,
    title: str = TITLE,
    where: Mapping[str, str] | None = None,
    bounds: str | Path | None = None,
    refresh: float | None = None,
    may_be_empty: bool = False,
) -> Path:
    """Write the report on a store to one file, atomically.

    The arguments are those of `parabolic.report.page.page_of`.
    """
    text = page_of(store, title=title, where=where, bounds=bounds, refresh=refresh, may_be_empty=may_be_empty)
    with disk_errors("output", Path(path), "free some space or name another file"):
        return write_text(Path(path), text)


def page_of(
    store: Store,
    *,
    title: str = TITLE,
    where: Mapping[str, str] | None = None,
    bounds: str | Path | None = None,
    refresh: float | None = None,
    may_be_empty: bool = False,
) -> str:
    """The report on a store, as HTML that needs no other file and no network.

    Args:
        store: the runs.
        title: the page's title.
        where: which runs to include, as for `parabolic runs --where`; all by default.
        bounds: a folder with the output of `parabolic bounds`, shown in addition to the bounds stored with runs.
        refresh: after how many seconds an open page reloads itself; never by default.
        may_be_empty: whether a page without runs is allowed, as for a grid that has just started.
    """
    jinja = require("jinja2", "report", "report", "Jinja")
    plotly = require("plotly.offline", "report", "report", "Plotly")
    finds = find_scenes(store, where)
    if not (may_be_empty or finds.runs or finds.diverged or finds.failed or (finds.damaged and not where)):
        matching = " that fit" if where else ""
        got = Description(f"no runs{matching} in {store.root}")
        raise invalid("runs", got, "at least one", finds.left_out or TRAIN)
    book = _Book()
    scenes = [_scene_view(book, number, scene) for number, scene in enumerate(finds.scenes)]
    measured, damaged = _bounds_views(book, finds, Path(bounds) if bounds is not None else None, where or {})
    context = {
        "title": title,
        "version": __version__,
        "created": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "finds": finds,
        "scenes": scenes,
        "first": max(scenes, key=lambda view: int(view.glance["runs"])).id if scenes else "",
        "paper": paper_table_views(finds, store),
        "bounds": measured,
        "runs": list(_all_runs(finds)),
        "damaged": {**finds.damaged, **damaged},
        "data": {**_facts(finds, store), "figures": book.figures, "refresh": refresh},
        "shown": charts.MAX_METHODS,
        "tasks": charts.TASKS,
        "nonce": secrets.token_urlsafe(16),
        "css": jinja.utils.markupsafe.Markup(_asset("page.css")),
        "scripts": [jinja.utils.markupsafe.Markup(script) for script in (plotly.get_plotlyjs(), _asset("page.js"))],
    }
    environment = jinja.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja.StrictUndefined
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "ensure_ascii": False, "separators": (",", ":")}
    page: str = environment.from_string(_asset("page.html")).render(context)
    return page.encode("utf-8", "backslashreplace").decode()  # the names of folders and files may be no UTF-8


@dataclass
class _Book:
    """The figures of a page, by the id of the place where each is drawn."""

    figures: dict[str, charts.Figure] = field(default_factory=dict)

    def add(self, figure: charts.Figure) -> str:
        name = f"figure-{len(self.figures) + 1}"
        self.figures[name] = figure
        return name


@dataclass(frozen=True)
class _SceneView:
    """A scene as the page shows it; charts by the ids of their figures."""

    id: str
    scene: Scene
    headline: Sequence[str]
    table: TableView
    glance: Mapping[str, str]
    anytime: str = ""
    tradeoff: str = ""
    forgetting: str = ""
    heat_maps: Sequence[tuple[str, str]] = ()
    bridges: Bridges | None = None
    bridges_chart: str = ""
    devices: Sequence[str] = ()

    @property
    def tasks(self) -> int:
        """How many tasks its longest run has."""
        return max(len(run.accuracy) for method in self.scene.done for run in method.runs.values())

    @property
    def learners(self) -> dict[str, str]:
        """One line on each built-in learner; the user's own are left to the user to explain."""
        learners = (run.spec["learner"] for method in self.scene.methods for run in method.tried.values())
        names, known = dict.fromkeys(learners), known_learners()
        return {name: (known[name].__doc__ or "").partition("\n")[0] for name in names if name in known}

    @property
    def about(self) -> str:
        """One line on the stream, for someone who does not know it."""
        scene, stream = self.scene, known_streams().get(self.scene.stream)
        memory = f" Methods with a memory store {scene.memory} examples of it." if scene.memory else ""
        return f"{stream.about.partition(';')[0]}; one task after the other.{memory}" if stream else ""


def _scene_view(book: _Book, number: int, scene: Scene) -> _SceneView:
    name = f"scene-{number + 1}"
    overview = (name, scene, headline(scene), scene_table_view(scene), _glance(scene))
    if not scene.done:
        return _SceneView(*overview)
    bridges = draw_bridges(scene)
    return _SceneView(
        *overview,
        anytime=book.add(charts.anytime_chart(scene)),
        tradeoff=book.add(charts.tradeoff_chart(scene)),
        forgetting=book.add(charts.forgetting_chart(scene)),
        heat_maps=[(method.name, book.add(charts.heat_map(method))) for method in scene.done[: charts.MAX_METHODS]],
        bridges=bridges,
        bridges_chart=book.add(bridges.chart) if bridges and bridges.chart else "",
        devices=sorted({hardware(run) for method in scene.done for run in method.runs.values()}),
    )


def _glance(scene: Scene) -> dict[str, str]:
    """A scene's line in the table of all scenes."""
    done = scene.done
    cells = dict.fromkeys(("best", "acc", "ahead", "judgement"), "–")
    for outcome in ("runs", "diverged", "failed"):
        cells[outcome] = str(sum(len(getattr(method, outcome)) for method in scene.methods))
    if done:
        acc = done[0].summary("acc")
        spread = f" ± {acc.sd:.1f}" if acc.n > 1 else ""
        cells |= {
            "best": ", ".join(method.name for method in scene.leaders),
            "acc": f"{acc.mean:.1f}{spread} (n={acc.n}){scene.remark}",
        }
    if len(done) > 1:
        gap = lead(done[0], done[1])
        points = f"{gap.mean:+z.1f} points" if gap else "–"
        cells |= {"ahead": f"{points} over {done[1].name}", "judgement": judgement(gap)}
    return cells


def _bounds_views(
    book: _Book, finds: FoundScenes, folder: Path | None, where: Mapping[str, str]
) -> tuple[list[tuple[str, int, dict[str, str]]], dict[str, str]]:
    """The charts of measured bounds that `where` selects, with titles and numbers of runs; and the damaged files."""
    groups: defaultdict[str, dict[int, Rows]] = defaultdict(dict)  # by title and seed: a run may be in both places
    for record in finds.runs.values():
        if rows := bounds_in(record):
            groups[_bounds_title({**record.spec, "measure": None})][record.spec["seed"]] = rows
    damaged = {}
    for path in sorted(folder.glob("*.json")) if folder is not None and folder.is_dir() else []:
        try:
            payload = json.loads(path.read_text())
            rows = [dotted(row) for row in payload["rows"]]
            charts.bounds_charts([rows])  # raises an error if a number is missing
            spec = dotted(payload["spec"])
            title, seed = _bounds_title(payload["spec"], payload), int(spec["seed"])
        except (OSError, *UNREADABLE) as error:
            damaged[str(path)] = f"it does not contain bounds ({type(error).__name__}: {error})"
            continue
        with suppress(InputError):  # it does not have a setting that `where` names
            if select([spec], where):
                groups[title].setdefault(seed, rows)
    views = []
    for title, by_seed in groups.items():
        figures = charts.bounds_charts(list(by_seed.values()))
        views.append((title, len(by_seed), {name: book.add(figure) for name, figure in figures.items()}))
    return views, damaged


def _bounds_title(spec: Mapping[str, Any], measured_with: Mapping[str, Any] = USUAL) -> str:
    row = dotted(spec)
    memory = f", memory {row['memory']}" if "memory" in row else ""
    unusual = {name: value for name, usual in USUAL.items() if (value := measured_with.get(name, usual)) != usual}
    return f"{row['learner']} on {row['stream']}{memory} {format_settings({**departures(row), **unusual})}".strip()


def _facts(finds: FoundScenes, store: Store) -> dict[str, Any]:
    """The origin of each number: every run's figures, and its settings and environment, which many runs share."""
    specs, surroundings = _DistinctList(), _DistinctList()
    runs = {}
    all_runs: dict[str, Record | FailedRun] = {**finds.failed, **finds.diverged, **finds.runs}
    for key, run in all_runs.items():
        row = row_of(run)
        spec = {name: value for name, value in dotted(run.spec).items() if name != "seed"}
        runs[key] = {
            "seed": row["seed"],
            "folder": _origin(run, store),
            "spec": specs.index({name: str(value) for name, value in spec.items()}),
            "unusual": sorted(departures(row)),
        }
        if isinstance(run, FailedRun):
            runs[key] |= {"how": "failed", "reason": run.reason, "trace": run.trace, "when": run.failed}
            continue
        environment = {name.partition(".")[2]: value for name, value in row.items() if name.startswith("environment.")}
        runs[key] |= {
            "when": environment.pop("finished", ""),
            "around": surroundings.index({name: str(value) for name, value in environment.items()}),
        }
        if run.diverged:
            runs[key] |= {"how": "diverged", "reason": run.diverged}
        else:
            runs[key] |= {
                "figures": [round(row[name], 2) for name in _judged_by(row)],
                "seconds": [round(row[name], 2) for name in ("train_seconds", "test_seconds")],
            }
    return {"runs": runs, "specs": specs.items, "surroundings": surroundings.items}


def _origin(run: Record | FailedRun, store: Store) -> str:
    if isinstance(run, Record) and is_record(run):
        return f"records: {run.environment[SOURCE]}"
    return str(store.path(run.key))


class _DistinctList:
    """A list of distinct dictionaries."""

    def __init__(self) -> None:
        self._indices: dict[tuple[tuple[str, str], ...], int] = {}

    def index(self, item: dict[str, str]) -> int:
        """The index of a dictionary, which is added if it is new."""
        return self._indices.setdefault(tuple(item.items()), len(self._indices))

    @property
    def items(self) -> list[dict[str, str]]:
        """The dictionaries, in order."""
        return [dict(item) for item in self._indices]


def _all_runs(finds: FoundScenes) -> Iterator[dict[str, Any]]:
    """A line for every run, those that failed or diverged first."""
    states = {run.key: f"failed: {fault_of(run.reason, run.trace)}" for run in finds.failed.values()}
    states |= {run.key: f"diverged: {run.diverged}" for run in finds.diverged.values()}
    ended = [*finds.diverged.values(), *finds.runs.values()]
    rows = [*map(row_of, finds.failed.values()), *map(row_of, ended)]
    for row in sorted(rows, key=lambda row: (row["key"] not in states, row["stream"], row["learner"], row["seed"])):
        yield {
            "key": row["key"],
            "state": states.get(row["key"], "finished"),
            "named": [
                row["learner"],
                row["stream"],
                row.get("memory", "–"),
                row["seed"],
                settings_of(row) or "default",
            ],
            "figures": [*map(row.get, (*_judged_by(row), "train_seconds"))],
        }


def _judged_by(row: Row) -> list[str]:
    """The columns of the accuracy, AAA and forgetting that a run is judged by."""
    return [f"metrics.{judged_by(name, heads=bool(row['heads']))}" for name in ("acc", "aaa", "forgetting")]


def _asset(name: str) -> str:
    return files("parabolic.report.page").joinpath(name).read_text("utf-8")
