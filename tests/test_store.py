"""The store: many may read and write at once, folders merge by copying, and what is damaged is named."""

import csv
import importlib.util
import json
import math
import os
import resource
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
from grids import SPECS, kill

from parabolic import InputError, RunSpec, Store
from parabolic.experiments import execute, execute_fleet, run_grid
from parabolic.experiments import store as module
from parabolic.experiments.execution import typed_command
from parabolic.report.runs import row_of, select, settings_of

SPEC = RunSpec("sgd", backbone="mlp", options={"lr": 0.05})


@pytest.fixture(scope="module")
def record():
    return execute(SPEC, device="cpu")


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "runs")


def test_a_record_is_shown_in_a_line(record):
    figures = ", ".join(f"{name} {value:.4g}" for name, value in record.metrics.items())
    assert repr(record) == f"Record(sgd on seq-digits, seed 0: {figures})"
    ((_, diverged),) = execute_fleet([RunSpec("sgd", stream="seq-blobs", seed=3, options={"lr": 1e30})])
    assert repr(diverged).startswith("Record(sgd on seq-blobs, seed 3: the loss became ")


def start_python(code, *arguments):
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE, text=True)


READER = """
import sys
from parabolic import Store
print("ready", flush=True)
reads = 0
while not (Store(sys.argv[1]).root / "stop").exists():
    assert len(list(Store(sys.argv[1]))) == 3
    reads += 1
print(reads)
"""


def test_readers_never_see_half_of_what_is_being_written(store):
    outcome = run_grid(SPECS[:3], store, workers=0, device="cpu")
    readers = [start_python(READER, store.root) for _ in range(2)]
    assert [reader.stdout.readline() for reader in readers] == ["ready\n", "ready\n"]
    for _ in range(100):
        for saved_record in outcome.records.values():
            store.save(saved_record)
    (store.root / "stop").touch()
    reads = [int(reader.communicate()[0]) for reader in readers]
    assert [reader.returncode for reader in readers] == [0, 0]
    assert min(reads) > 10


HOLDER = """
import sys, time
from parabolic import Store
claim = Store(sys.argv[1]).claim("some-run")
print(claim is not None, flush=True)
time.sleep(600)
"""


def test_a_claim_is_one_process_s_own_and_ends_with_it(store):
    holder = start_python(HOLDER, store.root)
    assert holder.stdout.readline() == "True\n"
    assert store.claim("some-run") is None
    other_claim = store.claim("another-run")
    assert other_claim is not None
    kill(holder.pid)
    holder.communicate()
    claim = store.claim("some-run")
    assert claim is not None
    assert store.claim("some-run") is None
    claim.release()
    second_claim = store.claim("some-run")
    assert second_claim is not None
    second_claim.release()
    other_claim.release()


def test_a_store_says_what_is_unfinished_and_what_is_new(store, record):
    assert not store.unfinished(record.key)
    (store.root / "journal").mkdir(parents=True)
    (store.root / "journal" / "000000000012.safetensors").touch()
    assert store.unfinished("journal")
    store.path(record.key).mkdir()
    store.checkpoint(record.key).touch()
    assert store.unfinished(record.key)
    assert store.written() == {}
    folder = store.save(record)
    assert not store.unfinished(record.key)
    store.checkpoint(record.key).touch()  # as if it was killed before it could delete it
    assert not store.unfinished(record.key)
    before = store.written()
    assert [*before] == [folder / "run.json"]
    store.claim(record.key).release()
    (folder / "gone.json").symlink_to("nowhere")  # as if it was deleted meanwhile
    assert store.written() == before
    store.monitor(record.key).write_text("{}")  # changes all the time, and no result is in it
    assert store.written() == before
    failed_spec = RunSpec("er", seed=77)
    store.save_failure(failed_spec, "no luck")
    assert store.written().keys() - before.keys() == {store.path(failed_spec.key) / "failed.json"}
    assert store.begun() == sorted([record.key, failed_spec.key, "journal"])
    assert store.begun(failed_spec.key[:5]) == [failed_spec.key]
    assert store.begun(failed_spec.key[1:]) == []


CSV = """
import sys, warnings
from pathlib import Path
from parabolic.report.runs import write_csv
warnings.simplefilter("error", EncodingWarning)
write_csv([{"stream": "späße"}], Path(sys.argv[1]))
"""


def test_a_file_has_no_line_for_each_of_its_numbers(store, record):
    lines = (store.save(record) / "run.json").read_text().splitlines()
    assert f'"accuracy": {json.dumps(record.accuracy)},' in lines
    assert ' "learner": "sgd",' in lines  # what is read by people


def test_a_table_reads_alike_on_every_machine(tmp_path):
    command = [sys.executable, "-X", "warn_default_encoding", "-c", CSV, str(tmp_path / "a.csv")]
    subprocess.run(command, check=True)
    assert (tmp_path / "a.csv").read_bytes().split() == [b"stream", "späße".encode()]


def test_stores_of_several_machines_merge_by_copying(tmp_path):
    spec_lists = [SPECS[:2], SPECS[1:3]]
    for number, specs in enumerate(spec_lists):
        run_grid(specs, Store(tmp_path / str(number)), workers=0, device="cpu")
    Store(tmp_path / "0").save_failure(SPECS[2], "it failed there and was done elsewhere")
    for number in range(2):
        shutil.copytree(tmp_path / str(number), tmp_path / "all", dirs_exist_ok=True)
    merged = Store(tmp_path / "all")
    outcome = run_grid(SPECS[:3], merged)
    assert (outcome.reused, outcome.trained) == (3, 0)
    assert list(outcome.records) == [spec.key for spec in SPECS[:3]]
    assert list(merged.failures()) == []


def test_a_failure_is_noted_until_the_run_is_done(store, record):
    store.save_failure(SPEC, "no luck", "a trace")
    (failed,) = store.failures()
    assert (failed.key, failed.reason, failed.trace) == (SPEC.key, "no luck", "a trace")
    assert failed.spec == SPEC.resolved()
    assert store.find(SPEC) is None
    assert list(store) == []
    store.save(record)
    assert list(store.failures()) == []
    assert [path.name for path in store.path(SPEC.key).iterdir()] == ["run.json"]


@pytest.mark.parametrize("damage", ["", '{"key": ', "[]", '{"key": "x"}', "\udcff", '{"spec": []}', "[" * 100_000])
def test_what_cannot_be_read_is_named_with_the_reason(store, record, damage):
    store.save(record)
    bad_file = store.path("0123") / "run.json"
    bad_file.parent.mkdir()
    bad_file.write_bytes(damage.encode(errors="surrogateescape"))
    (store.root / "notes.txt").write_text("not a run")
    (store.root / "empty").mkdir()
    assert list(store) == [record]
    ((path, reason),) = store.unreadable().items()
    assert path == bad_file
    assert reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda content: content["metrics"].update(acc=99.9), "its acc does not match its accuracies"),
        (lambda content: content["metrics"].update(forgetting=-1.0), "its forgetting does not match its accuracies"),
        (
            lambda content: content["accuracy"][-1].__setitem__(0, content["accuracy"][-1][0] + 1),
            "its acc does not match",
        ),
        (lambda content: content["accuracy"][0].__setitem__(0, 123.0), "its accuracies are not percentages"),
        (lambda content: content["metrics"].update(task_acc=99.9), "its task_acc does not match its accuracies"),
        (lambda content: content["task_accuracy"][0].__setitem__(0, 123.0), "its accuracies are not percentages"),
        (lambda content: content["task_accuracy"].pop(), "it does not have an accuracy for each task seen"),
        (lambda content: content.pop("task_accuracy"), "it lacks the accuracies that its metrics are computed from"),
        (lambda content: content.update(task_accuracy={}), "its parts are missing or of the wrong type"),
        (lambda content: content.update(accuracy=""), "its parts are missing or of the wrong type"),
        (lambda content: content.update(measured={"x": []}), "its measures are not a number for each task"),
        (lambda content: content.update(measured={"x": {}}), "its measures are not a number for each task"),
        (lambda content: content.update(measured={"x": [1.0]}), "its measures are not a number for each task"),
        (lambda content: content["spec"].pop("backbone"), "its spec lacks a backbone or epochs"),
        (lambda content: content["spec"].update(epochs=0), "its spec lacks a backbone or epochs"),
        (lambda content: content["spec"].update(epochs=1.5), "its spec lacks a backbone or epochs"),
        (lambda content: content["spec"].update(memory="lots"), "its memory or validation is not a number"),
        (lambda content: content["spec"].update(memory=None), "its memory or validation is not a number"),
        (
            lambda content: content["spec"]["scenario"].update(validation="a tenth"),
            "its memory or validation is not a number",
        ),
        (lambda content: content["spec"].update(options=[]), "its parts are missing or of the wrong type"),
        (lambda content: content["spec"].update(scenario=[]), "its parts are missing or of the wrong type"),
        (lambda content: content.update(environment=[]), "its parts are missing or of the wrong type"),
        (lambda content: content["accuracy"].insert(0, []), "its parts are missing or of the wrong type"),
        (lambda content: content["accuracy"][-1].append(50.0), "it does not have an accuracy for each task seen"),
        (lambda content: content["metrics"].pop("acc"), "its figures are missing or not finite numbers"),
        (lambda content: content["metrics"].pop("aaa"), "its figures are missing or not finite numbers"),
        (lambda content: content["metrics"].pop("forgetting"), "its figures are missing or not finite numbers"),
        (
            lambda content: (content["spec"].update(heads=True), content["metrics"].pop("task_acc")),
            "its figures are missing or not finite numbers",
        ),
        (lambda content: content["metrics"].update(of_old="many"), "its figures are missing or not finite numbers"),
        (lambda content: content["metrics"].update(of_old=math.nan), "its figures are missing or not finite numbers"),
        (
            lambda content: content["accuracy"][0].__setitem__(0, math.nan),
            "its figures are missing or not finite numbers",
        ),
        (lambda content: content["train_seconds"].append(math.inf), "its figures are missing or not finite numbers"),
        (lambda content: content["test_seconds"].append(math.inf), "its figures are missing or not finite numbers"),
        (
            lambda content: content.update(measured={"x": [math.nan for _ in content["test_seconds"]]}),
            "its figures are missing or not finite numbers",
        ),
        (lambda content: content["train_seconds"].append(10**400), "int too large to convert to float"),
        (lambda content: content["spec"].update(learner="er\x1b[2J"), "its spec has control characters"),
        (lambda content: content["spec"].update(options={"lr": "\x9b2J"}), "its spec has control characters"),
        (lambda content: content["spec"].update(options={"\ud800": 1}), "its spec has control characters"),
        (lambda content: content["accuracy"][0].__setitem__(0, -1.0), "its accuracies are not percentages"),
        (lambda content: content["task_accuracy"][0].__setitem__(0, -1.0), "its accuracies are not percentages"),
    ],
)
def test_a_record_that_contradicts_itself_is_none(store, record, change, reason):
    path = store.save(record) / "run.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    assert store.find(SPEC) is None
    assert store.unreadable()[path].startswith(reason)


def test_a_terminal_obeys_nothing_that_a_run_says(store):
    store.save_failure(SPECS[0], "it said \x1b]0;title\x07", "\x1b[2J")
    (failure,) = store.failures()
    assert (failure.reason, failure.trace) == (r"it said \x1b]0;title\x07", r"\x1b[2J")


@pytest.mark.parametrize("name", ["reason", "trace", "failed"])
def test_a_failure_that_is_not_told_in_words_is_damaged(store, name):
    path = store.save_failure(SPEC, "no luck") / "failed.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: {"why": ["no luck"]}}))
    assert store.failures() == []
    assert store.unreadable() == {path: "it does not say in words why and when it failed"}


def test_a_run_under_the_name_of_another_is_noticed_and_a_copy_is_not(store, record):
    folder = store.save(record)
    other_folder = store.path(SPECS[0].key)
    shutil.copytree(folder, other_folder)
    shutil.copytree(folder, store.path("a copy"))
    assert store.unreadable() == {other_folder / "run.json": f"its key, {SPEC.key}, does not match its folder"}
    assert list(store) == [record]


def test_what_killed_writers_of_checkpoints_left_goes_with_the_claim(store, record):
    folder = store.save(record)
    checkpoint, run = (folder / f".{name}.0123456789abcdef" for name in ("checkpoint.safetensors", "run.json"))
    checkpoint.touch()
    run.touch()
    store.save(record)  # without the claim: another may be writing
    assert checkpoint.exists()
    assert run.exists()
    claim = store.claim(record.key)
    assert not checkpoint.exists()
    assert run.exists()  # whoever saves needs no claim
    claim.release()
    for clean in (lambda: store.save(record), lambda: store.claim(record.key).release()):
        run.touch()
        os.utime(run, (0, 0))  # too old to be written still
        clean()
        assert not run.exists()


def test_a_disk_without_room_for_a_record_is_reported_at_the_claim_which_is_released(store):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))  # a write breaks off in its middle
    try:
        with pytest.raises(InputError, match="^runs: got File too large") as error:
            store.claim("some-run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not store.in_progress("some-run")
    assert error.tb is not None  # which holds on to the lock: nobody waits for the error to be forgotten


def test_files_that_cannot_be_removed_are_reported_and_locks_that_cannot_be_taken_left_alone(store, record):
    folder = store.path(record.key)
    (folder / "failed.json").mkdir(parents=True)
    with pytest.raises(InputError, match="^runs: got .*; free some space or name another folder"):
        store.save(record)
    (store.root / ".claims" / record.key).mkdir(parents=True)
    assert not store.in_progress(record.key)


def test_a_record_from_before_a_metric_was_added_counts(store, record):
    path = store.save(record) / "run.json"
    content = json.loads(path.read_text())
    del content["metrics"]["backward_transfer"]
    path.write_text(json.dumps(content))
    assert store.find(SPEC) is not None
    content["metrics"] = {name: value for name, value in content["metrics"].items() if not name.startswith("task_")}
    del content["task_accuracy"]
    path.write_text(json.dumps(content))
    assert store.find(SPEC).task_matrix is None
    del content["spec"]["options"], content["spec"]["scenario"]  # as before there were any
    path.write_text(json.dumps(content))
    assert store.find(SPEC) is not None


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_is_closed_to_us_is_named(store, record):
    store.save(record)
    store.path(record.key).chmod(0)
    try:
        assert "Permission denied" in store.unreadable()[store.path(record.key) / "run.json"]
    finally:
        store.path(record.key).chmod(0o700)


def test_a_store_that_is_not_there_is_empty(store):
    assert (list(store), list(store.failures()), store.unreadable()) == ([], [], {})
    assert not store.in_progress(SPEC.key)
    assert not store.root.exists()  # who looks leaves nothing


@pytest.fixture
def stored_specs(store):
    """Three runs of two learners, one failed run, and a damaged file."""
    specs = [
        RunSpec("sgd", backbone="mlp"),
        RunSpec("sgd", backbone="mlp", seed=1, options={"lr": 0.05}),
        RunSpec("er", backbone="mlp", scenario={"tasks": 2}),
    ]
    run_grid(specs, store, workers=0, device="cpu")
    store.save_failure(RunSpec("er", seed=3, options={"lr": 0.5}), "the loss became nan: lower lr")
    (store.root / "damaged").mkdir()
    (store.root / "damaged" / "run.json").write_text("{")
    return specs


def listed_keys(parabolic, *arguments):
    code, out, err = parabolic("runs", "--json", *arguments)
    assert (code, err) == (0, "")
    return [row["key"] for row in json.loads(out)["runs"]]


def test_runs_are_listed_and_filtered(parabolic, stored_specs):
    plain, with_rate, er = (spec.key for spec in stored_specs)
    assert listed_keys(parabolic) == [er, plain, with_rate]
    assert listed_keys(parabolic, "--learner", "sgd") == [plain, with_rate]
    assert listed_keys(parabolic, "--stream", "seq-blobs") == []
    assert listed_keys(parabolic, "--where", "lr=5e-2") == [with_rate]
    assert listed_keys(parabolic, "--where", "options.lr=0.05", "--where", "seed=0") == []
    assert listed_keys(parabolic, "--where", "tasks=2") == [er]
    assert listed_keys(parabolic, "--where", "tasks=none") == [plain, with_rate]
    assert listed_keys(parabolic, "--where", "replay=32") == [er]
    assert listed_keys(parabolic, "--failed") == [RunSpec("er", seed=3, options={"lr": 0.5}).key]
    code, _, err = parabolic("runs", "--where", "sede=1")
    assert code == 2
    assert "did you mean 'seed'?" in err
    code, _, err = parabolic("runs", "--where", "seed")
    assert code == 2
    assert "for example --where lr=0.05" in err


def test_the_list_of_runs_reports_what_failed_and_what_is_damaged(parabolic, stored_specs):
    _, out, _ = parabolic("runs")
    assert (
        [line.split()[:-3] for line in out.splitlines()[1:4]]
        == [  # without the figures
            [stored_specs[2].key[:8], "er", "seq-digits", "200", "0", "backbone=mlp", "tasks=2"],
            [stored_specs[0].key[:8], "sgd", "seq-digits", "0", "backbone=mlp"],
            [stored_specs[1].key[:8], "sgd", "seq-digits", "1", "backbone=mlp", "lr=0.05"],
        ]
    )
    assert "3 runs in runs" in out
    assert "1 more failed at their last attempt" in out
    assert "Cannot be read: runs/damaged/run.json (Expecting" in out
    _, out, _ = parabolic("runs", "--failed")
    assert "er on seq-digits, seed 3 lr=0.5" in out
    assert "the loss became nan: lower lr" in out
    for learner, count in (("er", 1), ("sgd", 0)):  # only of the runs that were asked for
        assert ("1 more failed" in parabolic("runs", "--learner", learner)[1]) == bool(count)
        assert json.loads(parabolic("runs", "--learner", learner, "--json")[1])["failed"] == count


def test_a_hint_names_the_folder_that_the_runs_are_in(parabolic, tmp_path):
    Store(tmp_path / "my runs").save_failure(SPEC, "out of luck")
    hint = parabolic("runs", "--runs", "my runs")[1].splitlines()[-1]
    assert hint == "1 more failed at their last attempt: parabolic runs --failed --runs 'my runs'"
    assert "out of luck" in parabolic(*shlex.split(hint.partition("parabolic ")[2]))[1]


def test_runs_are_handed_to_other_programs(parabolic, stored_specs, store, tmp_path):
    arguments = ["--csv", str(tmp_path / "a.csv"), "--parquet", str(tmp_path / "a.parquet")]
    code, out, _ = parabolic("runs", *arguments)
    assert code == 0
    assert "a.csv" in out
    records = {record.key: record for record in store}
    with open(tmp_path / "a.csv", newline="") as file:
        rows = {row["key"]: row for row in csv.DictReader(file)}
    assert rows.keys() == records.keys()
    for key, row in rows.items():
        assert float(row["metrics.acc"]) == records[key].metrics["acc"]
        assert float(row["train_seconds"]) == sum(records[key].train_seconds)
        assert float(row["options.lr"]) == records[key].spec["options"]["lr"]
    assert [rows[spec.key]["options.replay"] for spec in stored_specs] == ["", "", "32"]
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra `parquet`")
    table = {row["key"]: row for row in parquet.read_table(tmp_path / "a.parquet").to_pylist()}
    assert table.keys() == records.keys()
    assert [table[spec.key]["options.replay"] for spec in stored_specs] == [None, None, 32]
    assert table[stored_specs[2].key]["scenario.tasks"] == 2
    code, _, err = parabolic("runs", "--csv", "runs/damaged/run.json/a.csv")
    assert code == 2
    assert "name another file" in err


def test_a_measure_of_several_numbers_has_a_column_for_each(parabolic, tmp_path):
    (tmp_path / "mine.py").write_text("def both(state):\n    return {'low': 1.0 + state.task, 'high': 9.0}\n")
    parabolic("run", "--learner", "sgd", "--stream", "seq-blobs", "--set", "measure=mine.py:both", "--device", "cpu")
    code, out, _ = parabolic("runs", "--csv", "-", "--where", "both.high=9")
    assert code == 0
    [row] = csv.DictReader(out.splitlines())
    assert (float(row["metrics.both.low"]), float(row["metrics.both.high"])) == (3, 9)  # after the last task


def test_runs_are_printed_for_another_program(parabolic, stored_specs, tmp_path):
    code, out, err = parabolic("runs", "--csv", "-")
    assert code == 0
    assert {row["key"] for row in csv.DictReader(out.splitlines())} == {spec.key for spec in stored_specs}
    assert err.startswith("3 runs in runs\n")
    assert not (tmp_path / "-").exists()
    code, out, err = parabolic("runs", "--csv", "-", "--json")
    assert (code, out) == (2, "")
    assert err.startswith("error: --csv: got '-', expected a file together with --json")


def test_each_file_is_read_once(parabolic, stored_specs, monkeypatch):
    reads, load = Counter(), module._load
    monkeypatch.setattr(module, "_load", lambda kind, path: reads.update([path]) or load(kind, path))
    assert parabolic("runs")[0] == 0
    assert len(reads) >= 4
    assert set(reads.values()) == {1}


def test_a_run_that_predates_a_setting_has_its_default(record):
    spec = {name: value for name, value in record.spec.items() if name not in ("future", "measure")}
    old_record = replace(record, spec={**spec, "scenario": {"tasks": None}})
    rows = [row_of(old_record), row_of(record)]
    for name, text in (("future", "false"), ("measure", "none"), ("blur", "0"), ("scenario.domain", "none")):
        assert select(rows, {name: text}) == rows
    assert rows[0] == rows[1]
    assert "memory" not in rows[0]  # the learner has none
    assert settings_of(rows[0]) == "backbone=mlp lr=0.05"


def test_a_command_that_is_no_utf8_can_be_stored_and_shown_everywhere(parabolic, store, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["parabolic", "run", "--runs", "a\udcff"])
    assert typed_command().encode().endswith(rb"a\udcff'")
    spec = RunSpec("sgd", "seq-blobs")
    record = execute(spec, device="cpu")
    old_record = replace(record, environment={**record.environment, "command": "parabolic run a\udcff"})
    store.save(old_record)  # as it was kept before
    exports = [("runs", "--csv", "a.csv"), ("runs", "--records", "a.jsonl"), ("report", "-o", "a.html")]
    if importlib.util.find_spec("pyarrow"):
        exports.append(("runs", "--parquet", "a.parquet"))
    for arguments in exports:
        assert parabolic(*arguments)[0] == 0, arguments
    assert store.find(spec).environment["command"] == r"parabolic run a\udcff"


def test_a_parquet_table_takes_an_option_that_is_a_number_here_and_a_word_there(tmp_path, record):
    pytest.importorskip("pyarrow", reason="needs the extra `parquet`")
    import pyarrow.parquet

    from parabolic.report.runs import write_parquet

    rows = [{"key": "a", "options.rate": 1}, {"key": "b", "options.rate": 0.5}, {"key": "c", "options.rate": "auto"}]
    path = write_parquet(rows, tmp_path / "a.parquet")
    assert pyarrow.parquet.read_table(path)["options.rate"].to_pylist() == ["1", "0.5", "auto"]
    path = write_parquet(rows[:2], tmp_path / "a.parquet")
    assert pyarrow.parquet.read_table(path)["options.rate"].to_pylist() == [1.0, 0.5]


def test_a_run_of_a_learner_that_is_not_here_is_shown_with_all_its_options(record):
    row = row_of(record) | {"learner": "gone.py:Gone"}
    assert settings_of(row).split()[:3] == ["backbone=mlp", "lr=0.05", "optimizer=SGD"]
    assert settings_of(row_of(record)) == "backbone=mlp lr=0.05"
    assert select([row], {"learner": "gone.py:Gone"}) == [row]
