"""Write reference.md, a list of the public names, from their docstrings: python docs/reference.py."""

import inspect
from collections.abc import Iterator
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import FunctionType, GenericAlias, MethodType
from typing import Any, NamedTuple

from parabolic import Learner, ReplayLearner

PAGE = Path(__file__).with_name("reference.md")
# Methods for this package's own use.
INNER = {"arguments", "check_room", "check_state", "check_whole", "overridden", "own_name"}
HEAD = """# Reference

The names to import, in one line each; `help(parabolic.PCL)` and so on say more. `parabolic list` shows the
learners with their options, the streams and the networks, and `parabolic --help` the commands.
`python docs/reference.py` writes this page.
"""


class Section(NamedTuple):
    """Names by module, under a heading, with the pages to see and a note; for those in `whole`, also their methods."""

    title: str
    pages: str
    names: dict[str, str]
    whole: str = ""
    note: str = ""


SECTIONS = (
    Section(
        "Learners",
        "[what each method does](methods.md), [in your own loop](guides/own-data.md), [a method of your "
        "own](guides/own-method.md)",
        {
            "parabolic": "Learner ReplayLearner PCL SGD ER SI AGEM GEM DER DERpp EWC LwF OBC CLSER MixupER VRMCL CBRS "
            "Joint Diverged InputError",
            "parabolic.learners": "Scale find_learner known_learners join",
            "parabolic.learners.functional": "predicting scores_by",
            "parabolic.learners.gradients": "Weights named_trainable",
            "parabolic.learners.head": "last_linear widen",
            "parabolic.options": "option",
        },
        whole="Learner",
        note="All learners have the options of `Learner`, those with a memory also the ones of `ReplayLearner`; of "
        "each method, only what is new or has another default is shown.",
    ),
    Section(
        "Losses",
        "[regression](guides/regression.md), [a head for each task](guides/metrics.md)",
        {"parabolic": "CrossEntropy Heads Classes MSE Huber Numbers", "parabolic.learners": "Criterion"},
        whole="Criterion",
    ),
    Section(
        "Memory",
        "[a policy of your own](guides/own-method.md#a-memory-policy)",
        {"parabolic": "Memory Recent", "parabolic.memory": "ClassBalanced EqualShares Batch distinct half_by_loss"},
        whole="Memory",
    ),
    Section("Networks", "", {"parabolic": "MLP ConvNet ResNet18 make_backbone"}),
    Section(
        "Streams and data",
        "[your own data](guides/own-runs.md), [data sets and scenarios](data.md)",
        {
            "parabolic": "Stream make_stream",
            "parabolic.streams": "Task Batches Examples Scenario Normalise CropFlip prepare load find_data "
            "known_streams prepared_streams",
        },
        whole="Stream Task",
    ),
    Section(
        "scikit-learn estimators",
        "[your own data](guides/own-data.md), [regression](guides/regression.md)",
        {"parabolic": "ParabolicClassifier ParabolicRegressor"},
        whole="ParabolicClassifier ParabolicRegressor",
    ),
    Section(
        "Training",
        "[durability](durability.md), [monitoring](guides/monitoring.md), [production](guides/production.md), [the "
        "engine](engine.md)",
        {
            "parabolic": "train Journal Monitor Callback",
            "parabolic.engine": "State Look ProgressBar Tracker BoundsMonitor ProfileRecorder Fleet train_fleet "
            "computing_in numerics DeviceFailed",
        },
        whole="Journal Monitor Callback State",
    ),
    Section(
        "Runs, grids, presets and tuning",
        "[experiments](experiments.md)",
        {
            "parabolic": "RunSpec run Store load_preset",
            "parabolic.experiments": "Record Records write_records execute run_grid Outcome Preset save_preset "
            "known_presets Search tune Tuned build",
        },
        whole="RunSpec Store Record Records Preset Tuned",
    ),
    Section(
        "Metrics and statistics",
        "[metrics](guides/metrics.md)",
        {
            "parabolic.metrics": "acc aaa anytime forgetting backward_transfer forward_transfer summary",
            "parabolic.statistics": "Summary Difference welch paired average_ranks",
        },
    ),
    Section(
        "Tables and pages",
        "[the report](report.md)",
        {"parabolic.report": "comparison render in_words write_page"},
    ),
    Section(
        "Theory",
        "[theory](theory.md), [what it promises](guides/promises.md)",
        {
            "parabolic": "bridge on_simplex",
            "parabolic.pde": "solve solve_by_bridges log_girsanov gradient_of Domain Hull Balls Intersection "
            "MemoryDomain forgetting_bound ForgettingBound generalisation_bound GeneralisationBound drift_bound "
            "DriftBound Estimate Range",
            "parabolic.profile": "loss_profile Profile bounds_of drift_of LearnerLoss",
        },
        whole="Domain MemoryDomain ForgettingBound GeneralisationBound DriftBound",
    ),
)


def text() -> str:
    """The page."""
    return "\n".join([HEAD, *(line for section in SECTIONS for line in _section(section))])


def _section(section: Section) -> Iterator[str]:
    yield f"## {section.title}\n"
    yield from (f"{each}\n" for each in (section.pages and f"See {section.pages}.", section.note) if each)
    for module, names in section.names.items():
        yield f"`{module}`:\n"
        for name in names.split():
            item = getattr(import_module(module), name)
            yield f"- **`{_called(name, item)}`**: {_about(item)}"
            if name in section.whole.split():
                yield from (f"  - `{_called(each, member)}`: {_about(member)}" for each, member in _members(item))
        yield ""


def _called(name: str, item: Any) -> str:
    """How it is called, without types; what is not called, by its name alone."""
    if not isinstance(item, type | FunctionType | MethodType) or _is_bare(item):
        return name
    called = inspect.signature(item)
    known = {repr(each) for base in _bases(item) for each in inspect.signature(base).parameters.values()}
    given = [
        each.replace(annotation=each.empty)
        for each in called.parameters.values()
        if each.name != "self" and (each.name == "model" or repr(each) not in known)
    ]
    return f"{name}{called.replace(parameters=given, return_annotation=called.empty)}".replace("<factory>", "…")


def _is_bare(item: Any) -> bool:
    """Whether it is a class without arguments of its own: an exception or a protocol."""
    return isinstance(item, type) and (issubclass(item, Exception) or getattr(item, "_is_protocol", False))


def _bases(item: Any) -> list[type]:
    """The learners whose options a learner shares."""
    return [base for base in (Learner, ReplayLearner) if isinstance(item, type) and base in item.__mro__[1:]]


def _about(item: Any) -> str:
    """The first paragraph of its docstring, or the type that it stands for."""
    if isinstance(item, GenericAlias):
        return f"`{item}`."
    return " ".join((inspect.getdoc(item) or "").split("\n\n")[0].split())


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    """Its public methods and properties, in the order of the code, also those of base classes of this package."""
    ours = [each for each in kind.__mro__ if each.__module__.startswith("parabolic")]
    for name in dict.fromkeys(name for each in ours for name in vars(each)):
        if name.startswith("_") or name in INNER:
            continue
        held = inspect.getattr_static(kind, name)
        if isinstance(held, FunctionType | classmethod):
            yield name, getattr(kind, name)
        elif isinstance(held, property | cached_property):
            yield name, held


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
