"""The command line, as a person uses it."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from grids import alive, children, until
from rich.console import Console

from parabolic import InputError, RunSpec, Store, __version__
from parabolic.engine import Tail
from parabolic.options import write_option
from parabolic.report.formats import accuracies


@pytest.mark.parametrize(
    ("arguments", "named", "remedy"),
    [
        (["run", "--learner", "nope"], "learner", "parabolic list"),
        (["run", "--learner", "pcll"], "learner", "did you mean 'pcl'?"),
        (["run", "--set", "lrr=1"], "lrr", "did you mean 'lr'?"),
        (["run", "--set", "lr"], "--set", "--set lr=0.05"),
        (["run", "--set", "lr=-1"], "lr", "above 0"),
        (["run", "--memory", "-3"], "memory", "at least"),
        (["run", "--memory", "10"], "memory", "keep at least as many, or recall fewer"),
        (["run", "--seed", "-1"], "seed", "at least 0"),
        (["run", "--stream", "seq-digit"], "stream", "did you mean 'seq-digits'?"),
        (["run", "--set", "backbone=resnet"], "backbone", "did you mean 'resnet18'?"),
        (["run", "--device", "tpu9"], "device", "cpu"),
        (["compare", "--learners", ","], "--learners", "pcl,er,sgd"),
        (["compare", "--learners", "pcl,nope"], "learner", "parabolic list"),
        (["compare", "--set", "sigmax=1"], "sigmax", "did you mean 'sigma_x'?"),
        (["compare", "--set", "optimizer=SDG"], "optimizer", "did you mean 'SGD'?"),
        (["run", "--seed", str(2**70)], "seed", "below"),
        (["list", "pcll"], "learner", "did you mean 'pcl'?"),
        (["run", "--seed", "4", "--set", "seed=3"], "--seed: got 4, expected the value of --set seed=3", "leave one"),
        (["run", "--memory", "60", "--set", "memory=50"], "--memory: got 60, expected the value of --set me", "leave"),
        (["run", "--set", "lr=0.1", "--set", "lr=0.2"], "--set: got lr=0.1 and lr=0.2, expected one value", "leave"),
        (["run", "--stream", "seq-blobs", "--set", "stream=seq-digits"], "--set stream=seq-digits", "leave one of"),
        (["compare", "--memory", "60", "--set", "memory=50"], "--memory: got 60, expected the value of", "leave one"),
        (["compare", "--set", "er.lr=0.1", "--set", "er.lr=0.2"], "er.lr=0.1 and er.lr=0.2", "leave one of them out"),
        (["tune", "--memory", "60", "--set", "memory=50"], "--memory: got 60, expected the value of", "leave one"),
        (["tune", "--stream", "seq-blobs", "--set", "stream=seq-digits"], "--stream: got 'seq-blobs'", "leave one"),
        (["tune", "--space", "lr=0.1:1", "--space", "lr=0.2:1"], "--space: got lr=0.1:1 and lr=0.2:1", "leave one"),
        (["bounds", "--seed", "4", "--set", "seed=3"], "--seed: got 4, expected the value of", "leave one of them"),
        (["data", "show", "seq-digits", "--seed", "4", "--set", "seed=3"], "--seed: got 4", "leave one of them out"),
        (["runs", "--learner", "er", "--where", "learner=pcl"], "learner=pcl and learner=er", "leave one of them out"),
    ],
)
def test_bad_arguments_are_refused_in_a_line_or_two(parabolic, tmp_path, arguments, named, remedy):
    code, out, err = parabolic(*arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") <= 2
    assert named in err
    assert remedy in err
    assert list(tmp_path.iterdir()) == []


def test_run_prints_the_matrix_and_finds_itself_again(parabolic, tmp_path):
    code, out, err = parabolic("run", "--learner", "er", "--memory", "50", "--set", "backbone=mlp", "--set", "lr=0.05")
    assert (code, err) == (0, "")
    assert "er on seq-digits, seed 0" in out
    assert "forgetting" in out
    assert "\nwith the task told: acc " in out
    assert "stored in" in out
    code, out, _ = parabolic(
        "run", "--learner", "er", "--memory", "50", "--set", "backbone=mlp", "--set", "lr=0.05", "--json"
    )
    record = json.loads(out)
    assert record["reused"]
    assert record["spec"]["memory"] == 50
    assert record["spec"]["options"]["lr"] == 0.05
    assert len(list((tmp_path / "runs").glob("[!.]*"))) == 1


def test_compare_prints_every_learner_and_counts_what_was_there(parabolic):
    arguments = (
        "compare",
        "--learners",
        "er,sgd",
        "--seeds",
        "2",
        "--set",
        "backbone=mlp",
        "--set",
        "replay=16",
        "--workers",
        "0",
    )
    code, out, err = parabolic(*arguments)
    assert (code, err) == (0, "")
    assert "4 runs, 0 of them already there" in out
    assert "After 5 tasks" in " ".join(out.split())
    code, out, _ = parabolic("compare", "--learners", "er,sgd", "--seeds", "3", *arguments[5:])
    assert "6 runs, 4 of them already there" in out
    code, out, _ = parabolic(*arguments, "--json")
    result = json.loads(out)
    assert result["reused"] == 4
    assert [(run["spec"]["learner"], run["spec"]["seed"]) for run in result["runs"]] == [
        ("er", 0),
        ("er", 1),
        ("sgd", 0),
        ("sgd", 1),
    ]
    assert result["runs"][0]["spec"]["options"]["replay"] == 16  # which SGD does not have


def test_a_comparison_has_each_figure_once(parabolic):
    code, _, err = parabolic("compare", "--learners", "sgd", "--metrics", "acc,acc")
    assert (code, "--metrics: got 'acc,acc', expected each metric once" in err) == (2, True)


def test_a_comparison_says_of_what_it_is(parabolic):
    arguments = ("compare", "--learners", "er,sgd", "--stream", "seq-blobs", "--seeds", "1", "--workers", "0")
    for settings, title in (
        ((), "seq-blobs, memory 200"),
        (("memory=100", "corruption=uniform", "lr=0.01"), "seq-blobs, memory 100, corruption=uniform lr=0.01"),
        (("er.lr=0.2", "er.memory=50"), "seq-blobs, memory 50, er.lr=0.2"),
    ):
        options = [argument for setting in settings for argument in ("--set", setting)]
        code, out, err = parabolic(*arguments, *options, "--format", "markdown")
        assert (code, err) == (0, "")
        assert out.splitlines()[0] == f"**{title}**"
        assert "already there" not in out  # it is for a paper
    for name, remedy in (("seed=7", "--seeds"), ("stream=seq-digits", "--stream")):
        code, out, err = parabolic(*arguments, "--set", name)
        assert (code, out) == (2, "")
        assert f"use {remedy}" in err


def test_compare_takes_several_sizes_of_memory(parabolic):
    arguments = ("compare", "--learners", "er,sgd", "--stream", "seq-blobs", "--seeds", "2", "--workers", "0")
    code, out, err = parabolic(*arguments, "--memory", "50, 100")
    assert (code, err) == (0, "")
    assert "6 runs, 0 of them already there" in out  # SGD has no memory, and so the same runs at both
    text = " ".join(out.split())
    for size in (50, 100):
        assert f"seq-blobs, memory {size} ┏" in text
        assert f"seq-blobs, memory {size}: After 3 tasks" in text
    runs = json.loads(parabolic(*arguments, "--memory", "50,100", "--json")[1])["runs"]
    sizes = [(run["spec"]["learner"], run["spec"].get("memory"), run["spec"]["seed"]) for run in runs]
    assert sizes == [
        ("er", 50, 0), ("er", 50, 1), ("sgd", None, 0), ("sgd", None, 1), ("er", 100, 0), ("er", 100, 1)
    ]  # fmt: skip
    for memory, options, expected in (
        ("50,50", (), "each size once"),
        ("50,many", (), "memory: got 'many', expected a whole number"),
        ("50,", (), "memory: got ''"),
        ("50,100", ("--set", "er.memory=70"), "one size with --set memory"),
        ("0", (), "memory"),
    ):
        code, out, err = parabolic(*arguments, "--memory", memory, *options)
        assert (code, out) == (2, "")
        assert expected in err


def test_compare_takes_settings_for_one_learner_alone(parabolic):
    settings = ("--set", "lr=0.05", "--set", "er.lr=0.2", "--set", "backbone=mlp", "--workers", "0")
    _, out, _ = parabolic("compare", "--learners", "er,sgd", "--seeds", "1", *settings, "--json")
    assert [run["spec"]["options"]["lr"] for run in json.loads(out)["runs"]] == [0.2, 0.05]
    code, _, err = parabolic("compare", "--learners", "er,sgd", "--set", "er.lrr=0.2")
    assert code == 2
    assert "did you mean 'lr'?" in err


def test_a_setting_may_be_given_twice_if_it_is_the_same(parabolic):
    args = ("run", "--learner", "sgd", "--stream", "seq-blobs", "--json", "--seed", "3", "--set", "seed=3")
    code, out, _ = parabolic(*args, "--set", "lr=0.05", "--set", "lr=0.05")
    assert (code, json.loads(out)["spec"]["seed"], json.loads(out)["spec"]["options"]["lr"]) == (0, 3, 0.05)
    args = ("compare", "--learners", "er", "--stream", "seq-blobs", "--seeds", "1", "--workers", "0", "--json")
    code, out, _ = parabolic(*args, "--memory", "80", "--set", "er.memory=70")  # what is said of one row, goes first
    assert (code, json.loads(out)["runs"][0]["spec"]["memory"]) == (0, 70)


def test_list_names_what_there_is(parabolic):
    code, out, _ = parabolic("list")
    assert code == 0
    for word in ("pcl", "er", "sgd", "seq-digits", "resnet18", "sigma_x=0.03"):
        assert word in out
    listing = json.loads(parabolic("list", "--json")[1])
    needs = {name: facts["needs"] for name, facts in listing["learners"].items()}
    assert (needs["pcl"], needs["sgd"], needs["gem"]) == (["memory"], [], ["memory", "tasks"])
    assert needs["joint"] == ["all tasks at once"]
    assert all(
        re.search(r"\b(19|20)\d\d\b", facts["reference"])
        for name, facts in listing["learners"].items()
        if name != "joint"
    )
    assert listing["learners"]["pcl"]["options"]["sigma_x"] == {
        "default": 0.03,
        "about": "noise of the bridges between examples",
    }


def test_list_names_each_default_once(parabolic, monkeypatch):
    """A learner's defaults are those that all have, those of a memory if it needs one, and its own."""
    monkeypatch.setenv("COLUMNS", "400")
    out, listing = parabolic("list")[1], json.loads(parabolic("list", "--json")[1])
    shared = re.search(r"Unless listed, all have (.*); those with a memory (.*)\.\n", out)
    everyones, replay = (dict(setting.split("=") for setting in group.split(", ")) for group in shared.groups())
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]
    cells = {row[0]: row[3] for row in rows if row[0] in listing["learners"]}
    own = {name: dict(setting.split("=") for setting in cell.split(", ") if cell) for name, cell in cells.items()}
    for name, facts in listing["learners"].items():
        shown = everyones | (replay if "memory" in facts["needs"] else {}) | own[name]
        assert shown == {key: write_option(option["default"]) for key, option in facts["options"].items()}
        assert not own[name].items() & (everyones | replay).items()


def test_narrow_lists_cut_off_no_name_and_no_value(parabolic, monkeypatch):
    """A key, a setting or a name that is cut off cannot be used."""
    settings = ("--set", "average=0.9999", "--set", "average_part=0.25")
    parabolic("run", "--learner", "er", "--stream", "seq-blobs", *settings)
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setattr(Console, "is_terminal", True)
    for command in (("list",), ("list", "clser"), ("data", "list"), ("runs",), ("paper", "main", "--dry-run")):
        code, out, _ = parabolic(*command)
        assert (code, "…" in out) == (0, False)
    assert RunSpec("er", "seq-blobs", options={"average": 0.9999, "average_part": 0.25}).key[:8] in parabolic("runs")[1]


def test_list_tells_what_the_options_of_one_learner_do(parabolic, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = parabolic("list", "pcl")
    assert code == 0
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]
    assert ["sigma_x", "0.03", "a number ≥ 0", "noise of the bridges between examples"] in rows
    assert ["average", "none", "a number ≥ 0, < 1, or none"] in [row[:3] for row in rows]
    assert ["variant", "paper", "paper, reference"] in [row[:3] for row in rows]
    assert ["epochs", "1", "a whole number ≥ 1", "passes over each task"] in rows
    assert "Parabolic continual learning" in out
    assert out.index("│ sigma_x ") < out.index("│ lr ") < out.index("│ epochs ")  # what is special comes first
    assert json.loads(parabolic("list", "pcl", "--json")[1])["needs"] == ["memory"]


def test_a_diverging_run_is_an_error_and_is_kept(parabolic, tmp_path):
    code, _, err = parabolic("run", "--learner", "sgd", "--set", "lr=1e30")
    assert code == 1
    assert "lower lr" in err
    files = {path.name for path in tmp_path.glob("runs/[!.]*/*")}
    assert files == {".monitor.jsonl.lock", "monitor.jsonl", "run.json"}
    assert "failed: sgd on seq-digits, seed 0: the loss became nan" in " ".join(parabolic("watch")[1].split())


def test_the_installed_command_works():
    process = subprocess.run(
        [sys.executable, "-m", "parabolic", "--version"], capture_output=True, text=True, check=True
    )
    assert process.stdout.strip() == __version__
    refused = subprocess.run(
        [sys.executable, "-m", "parabolic", "run", "--learner", "nope"], capture_output=True, text=True
    )
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr


def test_names_are_printed_as_they_are(parabolic, tmp_path, monkeypatch):
    folder, about = tmp_path / "presets", "uses [/x], [bold] and :cat:"
    folder.mkdir()
    (folder / "mine.toml").write_text(f'learner = "sgd"\nabout = "{about}"\n[study]\nday = 2026-01-01\n')
    monkeypatch.setenv("PARABOLIC_PRESETS", str(folder))
    code, out, err = parabolic("presets")
    assert (code, err) == (0, "")
    assert about in " ".join(out.replace("│", " ").split())
    assert parabolic("presets", "--json")[0] == 0
    runs = tmp_path / "w [/x] y"
    code, out, err = parabolic("run", "--learner", "sgd", "--stream", "seq-blobs", "--runs", str(runs), "--no-monitor")
    assert (code, err) == (0, "")
    assert runs.name in " ".join(out.split())


def test_two_rows_of_a_comparison_cannot_have_one_name(parabolic, tmp_path, monkeypatch):
    monkeypatch.setenv("PARABOLIC_PRESETS", str(tmp_path))
    (tmp_path / "sgd.toml").write_text('learner = "er"')
    code, out, err = parabolic("compare", "--learners", "sgd,er", "--preset", "sgd", "--stream", "seq-blobs")
    assert (code, out) == (2, "")
    assert "--preset: got 'sgd', expected a name that no other row has" in err


def test_a_device_that_fails_is_reported_in_a_line(parabolic, monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr("parabolic.learners.er.ER.loss", fail)
    code, _, err = parabolic("run", "--learner", "er", "--stream", "seq-blobs")
    assert code == 1
    assert err.splitlines()[-1].startswith("error: er on seq-blobs, seed 0")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("compare", "--json", "--output", "x.json"), "--json: got it with --output"),
        (("data", "show", "seq-digits", "-o", "s.foo"), "--output: got 's.foo'"),
        (("profile", "--memory", "2", "--set", "replay=1"), "--memory: got 2"),
    ],
)
def test_what_could_not_be_written_is_refused_first(parabolic, arguments, message):
    code, out, err = parabolic(*arguments)
    assert (code, out) == (2, "")
    assert message in err


# -- what a table does not say by itself ---------------------------------------------------------------------


MINE = """
from parabolic import ER, Stream
from parabolic.options import option
import torch

class Named(ER):
    name = "lode"
    width: int = 3

class Bare(ER):
    strength: float = option(1.0, "how strong")

class Again(ER):
    name = "lode"

class Ours(ER):
    name = "pcl"

def mine(seed):
    x = torch.randn(400, 4)
    return Stream.from_arrays(x, torch.arange(400) % 4, tasks=2, seed=seed, name="mine")

def many(seed):
    x = torch.randn(600, 4)
    return Stream.from_arrays(x, torch.arange(600) % 20, tasks=20, seed=seed)
"""


@pytest.fixture
def with_file(tmp_path, parabolic):
    (tmp_path / "mine.py").write_text(MINE)
    return parabolic


def test_a_run_prints_its_network_batches_and_steps(with_file):
    assert "\nmlp, batches of 32: 10 steps\n" in with_file("run", "--learner", "er", "--stream", "mine.py:mine")[1]
    out = with_file("run", "--learner", "er", "--stream", "seq-digits", "--set", "backbone=mlp", "--set", "epochs=2")[1]
    assert "\nmlp, batches of 10, 2 epochs: 292 steps\n" in out
    arguments = ("compare", "--learners", "er,sgd", "--stream", "mine.py:mine", "--seeds", "1", "--workers", "0")
    assert "\nmlp, batches of 32: 10 steps\n" in with_file(*arguments)[1]
    text = " ".join(with_file(*arguments, "--set", "er.batch=16")[1].split())
    assert "er: mlp, batches of 16: 20 steps; sgd: mlp, batches of 32: 10 steps" in text
    for output_format in (("--json",), ("--format", "json"), ("--format", "latex"), ("--format", "markdown")):
        assert "batches of" not in with_file(*arguments, *output_format)[1]


def test_the_accuracies_of_twenty_tasks_can_be_read_in_eighty_columns(with_file, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    arguments = ("run", "--learner", "er", "--stream", "mine.py:many")
    record = json.loads(with_file(*arguments, "--json")[1])
    lines = with_file(*arguments)[1].splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines[1:])
    assert lines[1].split() == [str(task) for task in range(1, 21)]
    for task, row in enumerate(record["accuracy"]):
        assert lines[task + 2].split() == [str(task + 1), *(f"{value:.0f}" for value in row)]


@pytest.mark.parametrize(
    ("tasks", "width", "shown"), [(5, 80, 5), (10, 80, 10), (19, 80, 19), (40, 80, 19), (20, 30, 7)]
)
def test_however_narrow_it_is_the_first_and_the_last_task_are_whole(tasks, width, shown):
    matrix = [[100.0] * (task + 1) for task in range(tasks)]
    table, count = accuracies(matrix, width, "er")
    console = Console(width=width)
    with console.capture() as capture:
        console.print(table)
    lines = [re.sub("[│┃]", " ", line).split() for line in capture.get().splitlines()]
    rows = [line for line in lines if line and line[0].isdigit() and line[-1].startswith("100")]
    assert count == len(rows) == shown
    assert [rows[0][0], rows[-1][0]] == ["1", str(tasks)]
    assert [len(row) for row in rows] == [*range(2, shown + 2)]


def test_what_is_left_out_of_a_narrow_table_has_a_place(with_file, monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    output = with_file("run", "--learner", "er", "--stream", "mine.py:many")[1]
    assert re.search(r"1\d of 20 tasks; all are in\s+runs/\w+/run.json", output)


def test_a_row_is_called_as_its_class_calls_itself(with_file):
    options = ("--stream", "seq-blobs", "--seeds", "1", "--workers", "0")
    output = with_file("compare", "--learners", "mine.py:Named,mine.py:Bare,mine.py:Ours,er", *options)[1]
    for name in ("lode", "mine.py:Bare", "mine.py:Ours", "er"):  # pcl is another's name
        assert f"│ {name} " in output
    assert "mine.py:Named" not in output
    latex = with_file("compare", "--learners", "mine.py:Named,mine.py:Again", "--format", "latex", *options)[1]
    assert "\nmine.py:Named &" in latex
    assert "\nmine.py:Again &" in latex
    assert "\nlode &" in with_file("compare", "--learners", "mine.py:Named", "--format", "latex", *options)[1]
    runs = json.loads(with_file("compare", "--learners", "mine.py:Named", "--json", *options)[1])["runs"]
    assert runs[0]["spec"]["learner"] == "mine.py:Named"


def test_a_name_that_two_rows_have_addresses_neither(with_file):
    arguments = ("compare", "--learners", "mine.py:Named,mine.py:Again", "--stream", "seq-blobs", "--seeds", "1")
    code, _, err = with_file(*arguments, "--set", "lode.lr=0.5")
    assert code == 2
    assert "--set lode.lr: got 'lode', expected one of mine.py:Again, mine.py:Named" in err
    arguments = (*arguments, "--set", "mine.py:Again.lr=0.5", "--workers", "0", "--json")
    runs = json.loads(with_file(*arguments)[1])["runs"]
    rates = {run["spec"]["learner"]: run["spec"]["options"]["lr"] for run in runs}
    assert rates["mine.py:Again"] == 0.5 != rates["mine.py:Named"]


def test_a_class_without_a_description_has_none(with_file):
    assert with_file("list", "mine.py:Bare")[1].splitlines()[0] == "mine.py:Bare"
    assert with_file("list", "er")[1].startswith("er: Experience replay")


def test_setting_a_field_that_is_no_option_is_refused_as_such(with_file):
    code, _, err = with_file("run", "--learner", "mine.py:Named", "--set", "width=4")
    assert code == 2
    assert "it is a field of the class, but not an option(...); `parabolic list mine.py:Named` shows them" in err
    assert "no option(...)" not in with_file("run", "--learner", "mine.py:Named", "--set", "wdth=4")[2]
    with pytest.raises(
        InputError, match=r"^option of mine.py:Named: got 'width'.* field of the class, but not an option"
    ):
        RunSpec("mine.py:Named", options={"width": 4})


@pytest.mark.parametrize(
    ("command", "output"),
    [
        (["compare", "--learners", "sgd", "--stream", "seq-blobs", "--seeds", "1"], "file/x.md"),
        (["compare", "--learners", "sgd", "--stream", "seq-blobs", "--seeds", "1"], "folder"),
        (["tune", "--learner", "sgd", "--stream", "seq-blobs", "--trials", "1"], "file/presets"),
        (["paper", "main", "--quick", "--learners", "sgd", "--seeds", "1", "--no-records"], "file/x.md"),
        (["bounds", "--learner", "er", "--stream", "seq-blobs"], "file/bounds"),
        (["profile", "--learner", "er"], "file/profile"),
    ],
)
def test_where_nothing_can_be_written_nothing_is_trained(parabolic, tmp_path, command, output):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    runs = [] if command[0] in ("bounds", "profile") else ["--runs", "runs"]
    code, out, err = parabolic(*command, *runs, "--device", "cpu", "--output", output)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("error: ")
    assert output.partition("/")[0] in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]
    assert not [*(tmp_path / "folder").iterdir()]


def test_what_is_there_stays_where_tables_are_to_be_written_and_training_is_refused(parabolic, tmp_path):
    (tmp_path / "x.md").write_text("old")
    code, _, _ = parabolic(
        "compare", "--learners", "sgd", "--stream", "seq-blobs", "--workers", "-1", "--output", "x.md"
    )
    assert code == 2
    assert [path.read_text() for path in tmp_path.glob("*.md")] == ["old"]
    assert not [*tmp_path.glob(".x.md*")]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no such device")
@pytest.mark.parametrize("options", [[], ["--json"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_under_the_output_is_reported_in_a_line_and_the_run_is_kept(tmp_path, options, unbuffered):
    command = ["run", "--learner", "sgd", "--stream", "seq-blobs", "--device", "cpu", "--runs", str(tmp_path)]
    with open("/dev/full", "w") as full:
        process = subprocess.run(
            [sys.executable, "-m", "parabolic", *command, *options], stdout=full, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )  # fmt: skip
    assert process.returncode == 1
    assert process.stderr.startswith("error: standard output: got No space left on device, expected ")
    assert process.stderr.count("\n") == 1
    assert Store(tmp_path).find(RunSpec("sgd", "seq-blobs")) is not None


@pytest.mark.parametrize("closed", ["1", "2", "1 2"])
def test_a_closed_output_raises_no_error(tmp_path, closed):
    redirections = " ".join(f"{descriptor}>&-" for descriptor in closed.split())
    process = subprocess.run(
        f"{sys.executable} -m parabolic list {redirections}", shell=True, capture_output=True, text=True, cwd=tmp_path
    )
    assert (process.returncode, process.stderr) == (0, "")
    assert ("Streams" in process.stdout) == ("1" not in closed)


WAITING = """
import time
from pathlib import Path

from parabolic import ER


class Waiting(ER):
    name = "waiting"

    def loss(self, batch, recalled):
        if self.steps == 5:
            Path("here").touch()
            time.sleep(600)
        return super().loss(batch, recalled)
"""


@pytest.mark.parametrize("command", ["run --learner", "compare --seeds 1 --workers 1 --learners", "tune --learner"])
def test_one_that_is_asked_to_end_ends_as_by_ctrl_c(tmp_path, command):
    (tmp_path / "own.py").write_text(WAITING)
    arguments = [*command.split(), "own.py:Waiting", "--stream", "seq-blobs", "--device", "cpu"]
    process = subprocess.Popen(
        [sys.executable, "-m", "parabolic", *arguments], cwd=tmp_path, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    with process:
        assert until(lambda: (tmp_path / "here").exists() or process.poll() is not None)
        workers = children(process.pid)
        process.terminate()
        _, err = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "topped" in err
    assert "Traceback" not in err
    assert until(lambda: not any(map(alive, workers)))
    tail = Tail(next(tmp_path.glob("runs/*/monitor.jsonl"), tmp_path / "none"))
    assert tail.poll() == command.startswith("run")
    assert tail.ended.get("how", "stopped") == "stopped"


def test_a_full_disk_is_reported_before_the_first_step(parabolic, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    monkeypatch.setattr("parabolic.learners.sgd.SGD.step", lambda *_: pytest.fail("a step was made"))
    code, out, err = parabolic("run", "--learner", "sgd", "--stream", "seq-blobs", "--device", "cpu")
    assert (code, out) == (2, "")
    assert err.startswith("error: runs: got No space left on device (runs), expected a folder with room")
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and ".claims" not in path.parts]


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_run_that_cannot_be_stored_still_prints_its_figures(parabolic, monkeypatch, options):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("parabolic.experiments.store.write_text", fail)
    code, out, err = parabolic("run", "--learner", "sgd", "--stream", "seq-blobs", "--device", "cpu", *options)
    assert code == 1
    if options:
        assert json.loads(out)["metrics"]["acc"] > 0
    else:
        assert re.search(r"acc \d", out)
        assert "not stored" in out
        assert "stored in" not in out
    assert err.startswith("error: runs: got No space left on device (runs), expected a folder with room")
    assert err.count("\n") == 1


def test_an_error_of_the_system_is_not_laid_to_the_output(parabolic, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("parabolic.cli.list.known_learners", fail)
    with pytest.raises(OSError, match="Input/output error"):
        parabolic("list")


@pytest.mark.parametrize(("option", "value"), [("checkpoint", "nan"), ("checkpoint", "-1"), ("device", "meta")])
def test_options_are_looked_at_where_the_run_is_there_too(parabolic, option, value):
    command = ["run", "--learner", "sgd", "--stream", "seq-blobs"]
    assert parabolic(*command, "--device", "cpu")[0] == 0
    code, out, err = parabolic(*command, f"--{option}", value)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {option}: got ")


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "--learner", "sgd", "--set", "backbone=mlp", "--runs"),
        ("tune", "--learner", "sgd", "--trials", "1", "--output"),
        ("bounds", "--samples", "2", "--output"),
        ("profile", "--grid", "4", "--paths", "2", "--output"),
        ("data", "show", "seq-blobs", "--output"),
        ("data", "list"),
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_long_paths_are_printed_unbroken(parabolic, tmp_path, monkeypatch, arguments):
    monkeypatch.setenv("COLUMNS", "80")
    path = str(tmp_path / ("long" * 30))
    if arguments == ("data", "list"):
        monkeypatch.setenv("PARABOLIC_DATA", path)
    else:
        on_blobs = () if "show" in arguments else ("--stream", "seq-blobs")
        path += ".png" * ("show" in arguments)
        arguments = (*arguments, path, *on_blobs)
    code, out, err = parabolic(*arguments)
    assert (code, err) == (0, "")
    assert path in out
