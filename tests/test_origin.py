"""From a figure to the code that made it, and a word where that code is no longer what is here."""

import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

import parabolic.experiments.code
from parabolic import RunSpec, Store, run
from parabolic.experiments import Records, write_records
from parabolic.experiments.code import commit_here, package_code

QUICK = ("--stream", "seq-blobs", "--set", "backbone=mlp", "--device", "cpu")
MINE = "from parabolic import SGD\n\nclass Mine(SGD):\n    lr: float = {}\n"


@pytest.fixture
def change_package(monkeypatch):
    """A function that changes the code of this package, for what is read from then on."""
    return lambda: monkeypatch.setattr("parabolic.experiments.store.package_code", lambda: "as it is after a pull")


def test_runs_of_other_code_of_this_package_are_reported_and_kept(parabolic, change_package):
    arguments = ("compare", "--learners", "sgd,er", *QUICK, "--workers", "0")
    for command in (("run", "--learner", "sgd", *QUICK), (*arguments, "--seeds", "2")):
        assert parabolic(*command)[::2] == (0, "")
        assert parabolic(*command)[::2] == (0, "")  # nothing to tell as long as the code is the same
    change_package()
    note = "trained by other code of this package: --again trains"
    assert parabolic("run", "--learner", "sgd", *QUICK)[::2] == (0, f"1 run was {note} it anew\n")
    code, out, err = parabolic(*arguments, "--seeds", "2")
    assert "4 runs, 4 of them already there" in out
    assert (code, err) == (0, f"4 runs were {note} them anew\n")
    code, out, err = parabolic(*arguments, "--seeds", "2", "--format", "json")
    assert json.loads(out)
    assert err == f"4 runs were {note} them anew\n"


def test_tuning_reports_runs_of_other_code_of_this_package(parabolic, change_package):
    pytest.importorskip("optuna")
    arguments = ("tune", "--learner", "sgd", "--trials", "2", *QUICK)
    assert parabolic(*arguments)[::2] == (0, "")
    change_package()
    note = "2 runs were trained by other code of this package: another folder (--runs) trains them anew\n"
    assert parabolic(*arguments)[::2] == (0, note)


def test_code_that_only_reports_runs_is_no_part_of_the_code_that_trains_them(tmp_path):
    (tmp_path / "learners").mkdir()
    (tmp_path / "report").mkdir()
    codes = []
    for name in ("learners/er.py", "report/page.py", "report.py"):
        (tmp_path / name).write_text(name)
        codes.append(package_code.__wrapped__(tmp_path))
    assert codes[0] == codes[1] != codes[2]
    (tmp_path / "learners" / "er.py").write_text("edited")
    assert package_code.__wrapped__(tmp_path) not in codes


def test_runs_without_a_note_of_their_code_are_not_reported(parabolic, change_package, tmp_path):
    """Runs from before there was one, and records, which leave it out."""
    spec, store = RunSpec("sgd", stream="seq-blobs", backbone="mlp"), Store(tmp_path / "runs")
    record, _ = run(spec, store, device="cpu")
    assert record.environment["package"] == package_code()
    write_records([record], tmp_path / "a.jsonl")
    (stored,) = Records(tmp_path / "a.jsonl")
    environment_before = {name: value for name, value in record.environment.items() if name != "package"}
    store.save(replace(record, environment=environment_before))
    change_package()
    assert record.by_other_package
    assert not stored.by_other_package
    assert parabolic("run", "--learner", "sgd", *QUICK)[::2] == (0, "")


def test_a_run_that_is_trained_again_for_an_edit_says_so(parabolic, tmp_path):
    run_arguments = ("run", "--learner", "mine.py:Mine", *QUICK)
    compare_arguments = ("compare", "--learners", "mine.py:Mine,sgd", *QUICK, "--workers", "0", "--seeds", "2")
    note = "trained again, as your own code has changed\n"
    for rate, line in ((0.1, ""), (0.2, f"1 finished run is {note}")):
        (tmp_path / "mine.py").write_text(MINE.format(0.1) + f"# {rate}")
        assert parabolic(*run_arguments)[::2] == (0, line)
        assert parabolic(*run_arguments)[::2] == (0, "")
    assert parabolic(*compare_arguments)[::2] == (0, "")
    (tmp_path / "mine.py").write_text(MINE.format(0.1) + "# once more")
    assert parabolic(*compare_arguments)[::2] == (0, f"2 finished runs are {note}")
    (tmp_path / "mine.py").write_text(MINE.format(0.1) + "# and again")
    assert parabolic(*run_arguments, "--again")[::2] == (0, "")


def test_a_comparison_names_its_runs(parabolic, tmp_path):
    _, out, _ = parabolic(
        "compare", "--learners", "er,sgd", *QUICK, "--workers", "0", "--seeds", "2", "--format", "json"
    )
    [table] = json.loads(out)
    for row in table["rows"]:
        specs = [RunSpec(row["name"], stream="seq-blobs", backbone="mlp", seed=seed) for seed in range(2)]
        assert row["keys"] == {str(spec.seed): spec.key for spec in specs}
        assert all((tmp_path / "runs" / key / "run.json").exists() for key in row["keys"].values())


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_run_notes_the_commit_that_it_was_made_at(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ("-c", "user.name=me", "-c", "user.email=me@example.org")
        return subprocess.run(["git", *identity, *arguments], capture_output=True, text=True, check=True).stdout.strip()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    current_commit = commit_here.__wrapped__
    assert current_commit() == ""  # there is no repository
    git("init")
    assert current_commit() == ""  # nor a commit
    Path("mine.py").write_text("")
    git("add", "mine.py")
    git("commit", "-m", "one")
    git("tag", "-m", "one", "a-tag")
    Path("not yet added").touch()
    head = git("rev-parse", "HEAD")
    os.utime("mine.py", (0, 0))  # git would note its new time
    index = Path(".git/index").read_bytes()
    assert current_commit() == head
    Path("mine.py").write_text("# edited")
    assert current_commit() == f"{head}-dirty"
    assert Path(".git/index").read_bytes() == index
    commit_here.cache_clear()
    record, _ = run(RunSpec("sgd", stream="seq-blobs", backbone="mlp"), Store("runs"), device="cpu")
    commit_here.cache_clear()
    assert record.environment["commit"] == f"{head}-dirty"
    assert str(tmp_path) not in json.dumps(dict(record.environment))
    write_records([record], Path("a.jsonl"))
    assert next(iter(Records("a.jsonl"))).environment["commit"] == f"{head}-dirty"


def test_without_git_nothing_is_noted(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit_here.__wrapped__() == ""
    monkeypatch.undo()
    monkeypatch.setattr(parabolic.experiments.code, "PATIENCE", 0.0)  # it takes too long
    assert commit_here.__wrapped__() == ""
