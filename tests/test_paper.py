"""The paper's tables: which runs they need, and what the command makes of them."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from parabolic import Learner, RunSpec, Store, metrics
from parabolic.cli.paper import _format_time
from parabolic.engine import BoundsMonitor
from parabolic.experiments import Record, execute, write_records
from parabolic.experiments.paper import METHODS, NAMES, Estimates, Plan, Selection, bounds_in, paper_tables
from parabolic.learners import SI
from parabolic.streams.scenarios import PAPER_SIZES

STREAMS = ["seq-cifar10", "seq-cifar100", "seq-tinyimagenet"]


def test_the_tables_are_those_of_the_paper():
    tables = paper_tables()
    assert {*NAMES} == {*tables, "bounds"}
    shapes = {
        name: (len(table.rows), *{len(figures) for figures in table.rows.values()}) for name, table in tables.items()
    }
    assert shapes == {
        "main": (14, 6), "buffers": (14, 6), "corrupt": (13, 6), "corrupt_buffers": (13, 6), "imbalance": (12, 6),
        "small_buffers": (8, 6), "ablation": (7, 6), "ablation_buffers": (7, 6), "runtime": (2, 1),
    }  # fmt: skip
    for table in tables.values():
        assert all(len(figures) == len(table.settings) * len(table.metrics) for figures in table.rows.values())
        assert table.rows.keys() <= METHODS.keys()
    # Figures that the paper prints in several tables are the same in all of them.
    for row, figures in tables["ablation"].rows.items():
        assert [figure.value for figure in figures[2:4]] == [
            figure.value for figure in tables["ablation_buffers"].rows[row][4:6]
        ]
    for first, second in (("main", "buffers"), ("corrupt", "corrupt_buffers")):
        for row, figures in tables[first].rows.items():
            assert figures[2:4] == tables[second].rows[row][4:6]


def test_columns_stand_for_streams_memories_and_scenarios():
    def settings(name):
        return [(setting.stream, setting.memory, dict(setting.scenario)) for setting in paper_tables()[name].settings]

    shuffled = {"corruption": "shuffle", "corruption_rate": 0.5}
    for name, scenario in (("main", {}), ("ablation", {}), ("corrupt", shuffled)):
        assert settings(name) == [(stream, 1000, scenario) for stream in STREAMS]
    for name, scenario in (("buffers", {}), ("ablation_buffers", {}), ("corrupt_buffers", shuffled)):
        assert settings(name) == [("seq-cifar100", size, scenario) for size in (200, 600, 1000)]
    assert settings("small_buffers") == [("seq-cifar100", size, {}) for size in (50, 100, 150)]
    assert settings("imbalance") == [("seq-cifar10", 1000, {"class_sizes": name}) for name in PAPER_SIZES]
    assert settings("runtime") == [("seq-cifar100", 1000, {})]
    bounds = Selection(("bounds",)).runs
    assert len(bounds) == 5
    assert {replace(spec, measure=None).key for spec in bounds} <= {
        spec.key for spec in Selection(("main",), ("pcl",)).runs
    }


@pytest.mark.parametrize(
    ("row", "learner", "options", "on_tiny"),
    [
        ("SGD", "sgd", {"lr": 0.1}, {"lr": 0.03}),
        ("ER", "er", {"lr": 0.1, "replay": 32}, {}),
        ("SI", "si", {"lr": 0.03, "strength": 0.5, "damping": 1.0, "clip": 1.0}, {}),
        ("AGEM", "agem", {"lr": 0.03}, {}),
        ("GEM", "gem", {"lr": 0.03, "margin": 0.5}, {}),
        ("DER", "der", {"lr": 0.03, "alpha": 0.3}, {}),
        ("DER++", "derpp", {"lr": 0.03, "alpha": 0.1, "beta": 0.5}, {}),
        ("On-EWC", "ewc", {"lr": 0.03, "strength": 10.0, "decay": 1.0}, {"strength": 25.0}),
        ("LWF", "lwf", {"lr": 0.01, "alpha": 3.0, "temperature": 2.0, "weight_decay": 5e-4}, {"alpha": 1.0}),
        ("ER-OBC", "obc", {"lr": 0.1, "correction": 50}, {}),
        ("CLSER", "clser", {"weight": 0.15, "stable_rate": 0.8, "plastic_rate": 0.9, "stable_decay": 0.99}, {}),
        ("MixupER", "mixup", {"weight": 0.1, "alpha": 1.0, "exclude": False, "pairwise": True}, {}),
        ("CBRS", "cbrs", {"lr": 0.1}, {}),
        ("VRMCL", "vrmcl", {"lr": 0.35, "rate": 0.1, "rate_lr": 0.25, "momentum": 0.15, "variant": "reference"}, {}),
        ("PCL", "pcl", {"lr": 0.08, "sigma_x": 0.03, "sigma_y": 0.01, "times": 5, "variant": "reference"}, {}),
        ("One BB", "pcl", {"shared": True, "variant": "reference"}, {}),
        ("BB Tempering", "pcl", {"tempering": True, "variant": "reference"}, {}),
        ("Eu endpoints", "pcl", {"endpoints": "farthest", "variant": "reference"}, {}),
        ("Max Loss", "pcl", {"offers": "highest", "variant": "reference"}, {}),
        ("Min Loss", "pcl", {"offers": "lowest", "variant": "reference"}, {}),
        ("Middle 50% Loss", "pcl", {"offers": "middle", "variant": "reference"}, {}),
    ],
)
def test_rows_are_run_with_the_published_numbers(row, learner, options, on_tiny):
    for setting in paper_tables()["main"].settings:
        for seed, spec in enumerate(setting.specs(row)):
            resolved = spec.resolved()
            assert (spec.learner, spec.seed, spec.stream) == (learner, seed, setting.stream)
            assert (resolved["backbone"], resolved["batch"], resolved["epochs"]) == ("resnet18", 32, 1)
            assert (resolved["options"]["optimizer"], resolved["options"]["average"]) == ("SGD", None)
            expected = options | (on_tiny if setting.stream == "seq-tinyimagenet" else {})
            assert {name: resolved["options"][name] for name in expected} == expected


def test_tables_share_runs_and_every_run_has_a_stand_in_of_its_own():
    selection, stand_ins = Selection(seeds=1), Selection(seeds=1, quick=True).runs
    assert len(list(selection.by_row())) > len(selection.runs) == len({spec.key for spec in selection.runs}) == 201
    assert len(stand_ins) == 201
    resolved = [spec.resolved() for spec in stand_ins]
    assert {(spec["stream"], spec["backbone"], spec["batch"]) for spec in resolved} == {("seq-digits", "mlp", 10)}
    assert {spec.get("memory") for spec in resolved} == {None, 10, 20, 30, 40, 120, 200}
    corrupted = [spec["scenario"] for spec in resolved if spec["scenario"]["corruption"] == "shuffle"]
    assert len(corrupted) == 57
    orders = [spec["scenario"]["imbalance_order"] for spec in resolved if spec["scenario"]["imbalance"] == 2]
    assert {order: orders.count(order) for order in orders} == {"normal": 12, "reversed": 12, "random": 12}


def finished(spec, aaa=50.0, acc=50.0, seconds=1.0):
    """A run of the paper as it would be in the store, without its training."""
    where = {"device": "A fast GPU", "processor": "a processor"}
    before = (5 * aaa - acc) / 4  # after each of four tasks, so that the mean over five is aaa
    accuracy = [[before] * (task + 1) for task in range(4)] + [[acc] * 5]
    run = Record(spec.key, spec.resolved(), {}, accuracy, [seconds], [0.5], 1, where)
    return replace(run, metrics=metrics.summary(run.matrix))


def with_moments(mean, sd, n=5):
    """A sample of that mean and that standard deviation."""
    shape = np.arange(n) - (n - 1) / 2
    return (mean + sd * shape / shape.std(ddof=1)).tolist()


def fill(store, name, rows, shift=0.0):
    """Put runs into a store whose figures are the paper's, shifted by so much."""
    table = paper_tables()[name]
    for row in rows:
        figures = iter(table.rows[row])
        for setting in table.settings:
            columns = [with_moments(figure.value.mean + shift, figure.value.sd) for figure in map(next, [figures] * 2)]
            for spec, aaa, acc in zip(setting.specs(row), *columns, strict=True):
                store.save(finished(spec, aaa, acc))


def test_verdicts_say_where_ours_are_higher_lower_or_the_same(parabolic, tmp_path):
    """All runs are found in the store: there is no data here that one could train on."""
    store = Store(tmp_path / "runs")
    fill(store, "main", ["PCL"])
    fill(store, "main", ["VRMCL"], shift=20)
    fill(store, "main", ["CLSER"], shift=-7.5)
    code, out, err = parabolic("paper", "main", "--learners", "pcl,vrmcl,clser")
    assert (code, err) == (0, "")
    assert "▲ 6 higher, ▼ 6 lower, = 6 no difference, 0 unknown." in out
    assert "45 runs, 45 of them already there (runs)" in out
    ours, paper = [line for line in out.splitlines() if "54.98 ± 4.1" in line]
    assert ours.startswith("│ PCL        │ 64.55 ± 1.9 = ")
    assert paper.startswith("│ paper      │   64.55 ± 1.9 ")
    tables = json.loads(parabolic("paper", "main", "--learners", "pcl,vrmcl,clser", "--format", "json")[1])
    assert tables[0]["verdicts"] == {"higher": 6, "lower": 6, "no difference": 6, "unknown": 0}
    by_row = {row["name"]: {cell["verdict"] for cell in row["cells"]} for row in tables[0]["rows"]}
    unpublished = {"PCL (text)": {"unknown"}}  # of which nothing was published
    assert by_row == {"PCL": {"no difference"}, "VRMCL": {"higher"}, "CLSER": {"lower"}} | unpublished
    ranks = {row["name"]: (row["rank"], row["published_rank"]) for row in tables[0]["rows"]}
    assert {rank for rank, _ in ranks.values()} == {None}  # PCL (text) was not run
    assert [ranks[row][1] for row in ("VRMCL", "PCL", "CLSER")] == pytest.approx([9 / 6, 11 / 6, 16 / 6])
    [without_pcl] = json.loads(parabolic("paper", "main", "--learners", "vrmcl,clser", "--format", "json")[1])
    assert {row["name"]: row["rank"] for row in without_pcl["rows"]} == {"VRMCL": 1.0, "CLSER": 2.0}


def test_a_cell_that_lacks_runs_says_how_many_there_are(parabolic, tmp_path, monkeypatch):
    monkeypatch.setenv("PARABOLIC_DATA", str(tmp_path / "no data"))
    store = Store(tmp_path / "runs")
    fill(store, "ablation_buffers", ["PCL"])
    for spec in paper_tables()["ablation_buffers"].settings[0].specs("PCL")[3:]:
        shutil.rmtree(store.path(spec.key))
    code, out, err = parabolic(
        "paper", "buffers", "--learners", "pcl,sgd", "--format", "json", "--workers", "0", "--device", "cpu"
    )
    assert code == 0  # nothing went wrong
    assert err == (
        "7 runs are missing. To train them: parabolic data prepare cifar100, then the same command.\n"
        "    seq-cifar100, memory 200: SGD 5, PCL 2\n"
    )
    assert not list(store.failures())
    sgd, pcl = (row["cells"] for row in json.loads(out)[0]["rows"])
    assert [cell["ours"] and cell["ours"]["n"] for cell in pcl] == [3, 3, 5, 5, 5, 5]
    assert [cell["ours"] for cell in sgd] == [None] * 6  # and not the paper's
    assert {cell["verdict"] for cell in sgd} == {"unknown"}
    _, out, _ = parabolic("paper", "buffers", "--learners", "pcl,sgd", "--workers", "0", "--device", "cpu")
    assert len(re.findall(r"\(n=3\)", out)) == 2
    assert len(re.findall(r"– \(n=0\)", out)) == 6


def test_run_times_are_printed_with_the_hardware(parabolic, tmp_path):
    store = Store(tmp_path / "runs")
    for row, mean in (("VRMCL", 40.0), ("PCL", 165.0)):
        for spec, seconds in zip(paper_tables()["runtime"].settings[0].specs(row), with_moments(mean, 2), strict=True):
            store.save(finished(spec, 1.0, 1.0, seconds))
    code, out, _ = parabolic("paper", "runtime", "--format", "markdown")
    assert code == 0
    assert "| VRMCL | **40.00** ± 2.00 ▼ |" in out
    assert "| paper | 972.52 ± 10.27 |" in out
    assert "| PCL | 165.00 ± 2.00 = |" in out
    assert "NVIDIA RTX 6000" in out
    assert "Ours were measured on A fast GPU." in out


def test_run_times_of_a_fleet_have_no_deviation_and_no_verdict(parabolic, tmp_path):
    for spec in paper_tables()["runtime"].settings[0].specs("PCL"):
        run = finished(spec, seconds=7.93)
        Store(tmp_path / "runs").save(replace(run, environment={**run.environment, "fleet": 5}))
    code, out, _ = parabolic("paper", "runtime", "--show", "--format", "markdown")
    assert code == 0
    assert "| PCL | 7.93 |" in out
    assert "▲ 0 higher, ▼ 0 lower, = 0 no difference, 2 unknown." in out
    assert "Runs side by side share their time" in out


QUICK = ("--quick", "--learners", "sgd,si", "--workers", "0", "--device", "cpu")


@pytest.mark.parametrize(
    ("option", "value"),
    [("--workers", "-1"), ("--engine", "grid"), ("--address", "here:1")],
    ids=lambda argument: argument,
)
def test_a_dry_run_refuses_what_the_run_would_refuse(parabolic, option, value):
    code, _, err = parabolic("paper", "runtime", "--dry-run", option, value)
    assert code == 2
    assert err.startswith(f"error: {option.strip('-')}: got ")


def test_a_dry_run_refuses_a_file_that_it_would_not_write(parabolic, tmp_path):
    code, out, err = parabolic("paper", "runtime", "--dry-run", "--output", "tables.md", "--format", "markdown")
    assert (code, out) == (2, "")
    assert err.startswith("error: --output: got 'tables.md', expected none with --dry-run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("format", ["markdown", "latex"])
def test_a_dry_run_refuses_a_format_that_a_plan_does_not_have(parabolic, format):
    code, out, err = parabolic("paper", "runtime", "--dry-run", "--format", format)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: --format: got '{format}', expected one of json, terminal")


@pytest.mark.parametrize(
    ("seconds", "unknown", "text"),
    [(99, 0, "99 s"), (100, 0, "2 min"), (6000, 0, "1.7 h"), (99, 1, "99 s, and 1 run unknown"), (0, 2, "unknown")],
)
def test_the_time_of_a_plan_is_told_in_the_unit_that_suits_it(seconds, unknown, text):
    assert _format_time(Plan(3, 1, 4.0 * seconds, unknown), at_once=4) == text


def test_quick_tables_are_trained_once_and_then_found(parabolic, tmp_path, monkeypatch):
    arguments = ("paper", "small_buffers", *QUICK)
    plan = json.loads(parabolic(*arguments, "--seeds", "2", "--dry-run", "--format", "json")[1])
    assert plan["small_buffers"] == plan["all"] == {"runs": 4, "done": 0, "seconds": 0.0, "unknown": 4}
    assert "unknown" in parabolic(*arguments, "--seeds", "2", "--dry-run")[1]
    code, out, err = parabolic(*arguments, "--seeds", "2")
    assert (code, err) == (0, "")
    assert "4 runs, 0 of them already there (runs)" in out  # without a memory all columns are one run
    assert "No verdicts: the paper's figures are for other data." in out
    assert not {*"▲▼"} & {*out}
    with monkeypatch.context() as patch:
        patch.setattr(Learner, "step", pytest.fail)
        code, repeated, _ = parabolic(*arguments, "--seeds", "2")
    assert code == 0
    assert repeated == out.replace("4 runs, 0", "4 runs, 4")
    plan = json.loads(parabolic(*arguments, "--seeds", "3", "--dry-run", "--format", "json")[1])["all"]
    assert (plan["runs"], plan["done"], plan["unknown"]) == (6, 4, 0)
    seconds = {"sgd": [], "si": []}
    for run in Store(tmp_path / "runs"):
        seconds[run.spec["learner"]].append(sum(run.train_seconds) + sum(run.test_seconds))
    # A run of each learner, as long as the faster of its others.
    assert plan["seconds"] == pytest.approx(sum(map(min, seconds.values())))
    # The figures are those of the runs in the store.
    tables = json.loads(parabolic(*arguments, "--seeds", "2", "--format", "json")[1])
    records = {(run.spec["learner"], run.spec["seed"]): run for run in Store(tmp_path / "runs")}
    for row, learner in zip(tables[0]["rows"], ("sgd", "si"), strict=True):
        for cell, metric in zip(row["cells"], ["aaa", "acc"] * 3, strict=True):
            assert cell["by_seed"] == {str(seed): records[learner, seed].metrics[metric] for seed in range(2)}


def test_a_run_that_fails_leaves_the_others_standing(parabolic, monkeypatch):
    def fail(*_):
        raise RuntimeError("no luck")

    monkeypatch.setattr(SI, "loss", fail)
    code, out, err = parabolic("paper", "small_buffers", *QUICK, "--seeds", "1", "--format", "markdown")
    assert code == 1
    assert "si on seq-digits, seed 0" in err
    assert "no luck" in err
    assert "Traceback" not in err
    rows = {line.split(" | ")[0]: line for line in out.splitlines() if line.startswith("| S")}
    assert rows["| SI"].count("– (n=0)") == 6
    assert "–" not in rows["| SGD"].rsplit(" | ", 1)[0]


def test_bounds_are_measured_in_runs_of_their_own(parabolic, tmp_path, monkeypatch):
    arguments = ("paper", "bounds", "--quick", "--seeds", "1", "--device", "cpu", "--format", "json")
    code, out, err = parabolic(*arguments)
    assert (code, err) == (0, "")
    forgetting, generalisation = json.loads(out)
    [spec] = Selection(("bounds",), seeds=1, quick=True).runs
    store = Store(tmp_path / "runs")
    record = store.find(spec)
    rows = bounds_in(record)
    # What `parabolic bounds` measures, in a run that is otherwise the main table's.
    plain, monitor = replace(spec, measure=None), BoundsMonitor()
    assert execute(plain, device="cpu", callbacks=[monitor]).accuracy == record.accuracy
    assert [row["forgetting.memory.max"] for row in rows] == [row.forgetting.memory.max for row in monitor.rows]
    assert [row["forgetting.broken"] for row in rows] == [0] * 5
    assert [row["generalisation.broken"] for row in rows] == [bool(row.violations) for row in monitor.rows]
    measured = {row["name"]: [cell["by_seed"]["0"] for cell in row["cells"]] for row in forgetting["rows"]}
    assert measured["memory: largest"] == [row.forgetting.memory.max for row in monitor.rows]
    assert measured["first task, among its own classes"] == [row.first_among_own for row in monitor.rows]
    assert measured["bound"] == [row.forgetting.bound for row in monitor.rows]
    published = {row["name"]: [cell["published"] for cell in row["cells"]] for row in forgetting["rows"]}
    assert [figure["mean"] for figure in published["memory: mean"]] == [0.5077, 0.9894, 1.3542, 1.4373, 1.4208]
    assert published["bound"] == published["memory: smallest"] == [None] * 5
    # The paper's second table calls nearly nothing an average: it is compared with the smallest losses.
    second = {row["name"]: [cell["published"] for cell in row["cells"]] for row in generalisation["rows"]}
    assert [figure["mean"] for figure in second["memory: smallest"]] == [
        0.0,
        2.704e-08,
        2.082e-05,
        1.526e-05,
        1.937e-05,
    ]
    assert second["memory: mean"] == [None] * 5
    broken = sum("Corollary 1" in row.violations for row in monitor.rows)
    assert f"breaks the bound in {broken} of 5 cases" in generalisation["notes"][0]
    assert all(cell["verdict"] == "unknown" for row in forgetting["rows"] for cell in row["cells"])
    assert bounds_in(finished(plain)) is None
    assert parabolic(*arguments)[1] == out  # not measured again
    # Like all runs, they are records where others have them.
    write_records([record], tmp_path / "records" / "bounds.jsonl")
    monkeypatch.setenv("PARABOLIC_RECORDS", str(tmp_path / "records"))
    from_records = json.loads(parabolic(*arguments, "--show", "--runs", "none")[1])
    assert from_records[0]["rows"] == forgetting["rows"]
    assert any("1 of 1 runs are records" in note for note in from_records[0]["notes"])


def test_rows_of_ones_own_stand_beside_the_others(parabolic, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        "from parabolic import ER\n\n\nclass Mine(ER):\n    pass\n\n\n"
        "class Wide(ER):\n    name = 'wide'\n    replay: int = 25\n"
    )
    Path("soft.toml").write_text('learner = "mine.py:Mine"\nmemory = 77\n[settings]\nlr = 0.02\nbatch = 20\n')
    args = ("paper", "small_buffers", *QUICK, "--seeds", "1", "--learners", "sgd", "--also", "mine.py:Mine, soft.toml")
    code, out, err = parabolic(*args, "--format", "json")
    assert (code, err) == (0, "")
    [table] = json.loads(out)
    assert [row["name"] for row in table["rows"]] == ["SGD", "mine.py:Mine", "soft.toml"]
    assert all(cell["published"] is None for row in table["rows"][1:] for cell in row["cells"])
    # The columns determine stream and memory; the preset all else.
    selection = Selection(("small_buffers",), ("sgd",), 1, quick=True, own=("mine.py:Mine", "soft.toml"))
    runs = [Store(tmp_path / "runs").find(spec) for spec in selection.runs]
    own_runs = [run for run in runs if run.spec["learner"] == "mine.py:Mine"]
    assert [(run.spec["memory"], run.spec["batch"], run.spec["options"]["lr"]) for run in own_runs] == [
        *((size, 10, 0.1) for size in (10, 20, 30)), *((size, 20, 0.02) for size in (10, 20, 30)),
    ]  # fmt: skip
    aaa = [cell["by_seed"]["0"] for row in table["rows"][1:] for cell in row["cells"][::2]]
    assert aaa == [run.metrics["aaa"] for run in own_runs]
    code, out, _ = parabolic(*args, "--show")
    assert (code, "7 runs, 7 of them already there" in out) == (0, True)
    # What a class recalls by default stays, as far as there is room for it; tables have the name that it declares.
    wide = Selection(("small_buffers",), ("clser",), 1, quick=True, own=("mine.py:Wide",)).runs
    assert [spec.options["replay"] for spec in wide] == [10, 10, 10, 10, 20, 25]
    _, out, _ = parabolic(*args, "--also", "mine.py:Wide", "--show", "--format", "latex")
    assert "\nwide &" in out
    tuned = ("paper", "main", "--learners", "er", "--tuned", "--show")
    code, out, _ = parabolic(*tuned, "--also", "pcl-plus,mine.py:Mine,soft.toml")
    assert "pcl-plus" in out
    # How the others were tuned does not depend on them.
    line = next(line for line in parabolic(*tuned)[1].splitlines() if line.startswith("Tuned: for each method"))
    assert line in out
    assert "Not as much was tried for each: mine.py:Mine (no trials), pcl-plus (" in out
    for row, table, message in (
        ("mine.py:Nine", "main", "expected a name that mine.py defines"),
        ("nothing.toml", "main", "expected an existing file"),
        ("ER", "main", "none of the table's"),
        ("er,er", "main", "got 'er,er', expected each row once"),
        ("er", "ablation", "choose a table of several methods"),
    ):
        code, _, err = parabolic("paper", table, "--also", row, "--show")
        assert code == 2
        assert message in " ".join(err.split())


def test_estimates_come_from_the_runs_that_are_most_alike():
    def run_of(seconds, **options):
        return finished(RunSpec("er", **options), seconds=seconds)

    records = [run_of(9.5), run_of(19.5, seed=1), run_of(99.5, memory=50), run_of(999.5, stream="seq-blobs")]
    estimates = Estimates(records)  # half a second of testing each
    assert estimates.seconds(RunSpec("er", seed=7)) == 10  # the other seed may have shared the device
    assert estimates.seconds(RunSpec("er", memory=50, seed=7)) == 100
    assert estimates.seconds(RunSpec("er", memory=60)) == pytest.approx((10 + 100) / 2)
    assert estimates.seconds(RunSpec("er", memory=60, epochs=3)) == pytest.approx(3 * (10 + 100) / 2)
    assert estimates.seconds(RunSpec("er", backbone="mlp")) is None
    assert estimates.seconds(RunSpec("sgd")) is None


def test_a_run_from_before_a_setting_was_added_counts_as_one_with_its_default():
    old_run, other_run = finished(RunSpec("er"), seconds=9.5), finished(RunSpec("er", memory=50), seconds=99.5)
    del old_run.spec["measure"], old_run.spec["options"]["average_part"], old_run.spec["scenario"]["domain"]
    assert Estimates([old_run, other_run]).seconds(RunSpec("er", seed=7)) == 10


def test_a_run_that_several_tables_share_is_counted_once(tmp_path):
    selection, store = Selection(("main", "runtime", "bounds"), ("pcl",), seeds=2), Store(tmp_path)
    plans = selection.plans(store, Estimates([]))
    assert {name: plan.runs for name, plan in plans.items()} == {"main": 12, "runtime": 2, "bounds": 2, "all": 14}
    for spec in selection.specs("main"):
        store.save(finished(spec))
    plans = selection.plans(store, Estimates(store))
    assert {name: plan.done for name, plan in plans.items()} == {"main": 12, "runtime": 2, "bounds": 0, "all": 12}
    assert plans["bounds"].seconds == plans["all"].seconds == pytest.approx(2 * 1.5)


def test_tables_can_be_written_to_a_file(parabolic, tmp_path):
    fill(Store(tmp_path / "runs"), "small_buffers", ["PCL"])
    printed = parabolic("paper", "small_buffers", "--learners", "pcl", "--format", "latex")[1]
    code, out, _ = parabolic("paper", "small_buffers", "--learners", "pcl", "--format", "latex", "-o", "tables/a.tex")
    assert (code, out.strip()) == (0, "Written: tables/a.tex")
    assert (tmp_path / "tables" / "a.tex").read_text() == printed
    assert r"\quad paper & 18.71 $_{\pm 1.4}$" in printed  # alone in its table: nothing to be better than
    (tmp_path / "file").write_text("")
    code, _, err = parabolic("paper", "small_buffers", "--learners", "pcl", "-o", "file/a.txt")
    assert code == 2
    assert "--output" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mian"], "table: got 'mian'.*did you mean 'main'"),
        (["main", "--learners", "pcl,err"], "learners: got 'err'.*did you mean 'er'"),
        (["ablation", "--learners", "er"], "learners: got 'er', expected one of pcl"),
        (["bounds", "--learners", "er"], "learners: got 'er', expected one of pcl"),
        (["bounds", "--learners", ""], "learners: got '', expected one of pcl"),
        (["main", "--also", ""], "learner: got '', expected one of agem"),
        (["main", "--format", "html"], "--format: got 'html'"),
        (["main", "--quick", "--engine", "spark"], "engine: got 'spark'"),
    ],
)
def test_bad_arguments_are_refused(parabolic, tmp_path, arguments, message):
    code, out, err = parabolic("paper", *arguments)
    assert (code, out) == (2, "")
    assert re.match(f"error: {message}", err)
    assert list(tmp_path.iterdir()) == []
