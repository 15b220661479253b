"""Records: finished runs that come with the package, found like those of a store, and told apart from them."""

import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from recorded import made_up

from parabolic import InputError, RunSpec, Store, metrics, run
from parabolic.experiments import BackedStore, Records, is_record, write_records
from parabolic.experiments.paper import Estimates, Selection, paper_tables
from parabolic.experiments.records import PARTS, records_place

ROOT = Path(__file__).parent.parent


def fill_store(store, selection, **options):
    for spec in selection.runs:
        store.save(made_up(spec, **options))
    return selection


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder in place of the records that come with the package; and no data to train on."""
    monkeypatch.setenv("PARABOLIC_RECORDS", str(tmp_path / "records"))
    monkeypatch.setenv("PARABOLIC_DATA", str(tmp_path / "no data"))
    return tmp_path / "records"


# -- a store as records --------------------------------------------------------------------------------------------


def test_a_store_and_its_records_make_the_same_tables(parabolic, tmp_path, folder):
    fill_store(Store(tmp_path / "runs"), Selection(("main", "runtime"), learners=("pcl", "vrmcl", "sgd"), seeds=3))
    options = ("--seeds", "3", "--format", "markdown")
    arguments = {"main": (*options, "--learners", "pcl,vrmcl,sgd"), "runtime": options}
    before = {name: parabolic("paper", name, *arguments[name]) for name in arguments}
    code, out, err = parabolic("runs", "--records", "records/all.jsonl")
    assert (code, err) == (0, "")
    assert "Records: records/all.jsonl (36 runs written, 36 in the file)" in out
    for name, (code, table, _) in before.items():
        count = 36 if name == "main" else 6
        note = f" {count} of {count} runs are records, which come with the package (A fast GPU, 2026-11-15). "
        note += f"To train them yourself: parabolic paper {name} --no-records."
        after = parabolic("paper", name, *arguments[name], "--runs", "empty")
        assert (code, after[0], after[2]) == (0, 0, "")
        assert after[1].replace(note, "") == table
        assert after[1] != table
    assert not (tmp_path / "empty").exists()  # nothing was trained, nothing was written


def test_figures_and_settings_are_kept_and_what_says_nothing_elsewhere_is_not(tmp_path):
    spec = RunSpec("er", stream="seq-tinyimagenet", memory=1000, seed=3)
    run = made_up(spec)
    run = replace(run, accuracy=[[value + 1 / 7 for value in row] for row in run.accuracy])
    run = replace(run, metrics=metrics.summary(run.matrix), train_seconds=[2.123456] * 20)
    write_records([run], str(tmp_path / "a.jsonl"))
    (stored,) = Records(tmp_path)
    assert (stored.key, stored.spec, stored.steps) == (run.key, spec.resolved(), 7)
    assert stored.metrics == pytest.approx(run.metrics, abs=0.001)
    assert stored.train_seconds == pytest.approx(run.train_seconds, abs=0.001)
    assert stored.environment == {
        "parabolic": "0.1.0", "torch": "2.13.0", "python": "3.11.7", "device": "A fast GPU", "fleet": 5,
        "command": "parabolic paper main --runs runs", "finished": "2026-11-15T10:00:00+00:00", "record": "a.jsonl",
    }  # fmt: skip
    line = (tmp_path / "a.jsonl").read_text()
    assert len(line) < 4000  # 20 tasks: 210 accuracies and 40 times
    assert all(value or name in PARTS for name, value in json.loads(line).items())  # nothing that the run has not
    write_records([replace(run, environment={**run.environment, "device": "cpu"})], tmp_path / "b.jsonl")
    assert next(iter(Records(tmp_path / "b.jsonl"))).environment["processor"] == "a processor"


def test_a_real_run_is_found_again_by_its_spec_alone(tmp_path):
    spec = RunSpec("er", stream="seq-blobs", seed=1)
    trained, _ = run(spec, Store(tmp_path / "runs"), device="cpu")
    write_records([trained], tmp_path / "a.jsonl")
    records = Records(tmp_path / "a.jsonl")
    stored = records.find(spec)
    assert "task_acc" in stored.metrics
    assert stored.metrics == pytest.approx(trained.metrics, abs=0.001)
    assert is_record(stored)
    assert not is_record(trained)
    for other_spec in (replace(spec, seed=0), replace(spec, memory=50), replace(spec, options={"lr": 0.2})):
        assert records.find(other_spec) is None


def test_a_run_under_other_defaults_is_another_run(tmp_path):
    spec = RunSpec("er", stream="seq-cifar100", memory=1000)
    record = made_up(spec)
    for change in ({"precision": "fp64"}, {"options": {**record.spec["options"], "lr": 0.25}}):
        write_records([replace(record, spec={**record.spec, **change})], tmp_path / "a.jsonl")
        records = Records(tmp_path / "a.jsonl")
        assert spec.key in records
        assert records.find(spec) is None
    # An option that came later, with a default that changes nothing, does not matter.
    options = {name: value for name, value in record.spec["options"].items() if name != "clip_norm"}
    write_records([replace(record, spec={**record.spec, "options": options})], tmp_path / "a.jsonl")
    assert Records(tmp_path / "a.jsonl").find(spec) is not None


def test_files_merge_by_key_and_the_newer_run_stays(tmp_path):
    specs = [RunSpec("er", stream="seq-cifar10", seed=seed) for seed in range(3)]
    first, second = [made_up(specs[seed], finished="2026-01-02") for seed in (2, 0)]
    path = tmp_path / "some" / "a.jsonl"
    assert write_records([first, second], path) == 2
    older, newer, other = (
        made_up(specs[index], seed=1, finished=day) for index, day in ((2, "2026-01-01"), (0, "2026-01-03"), (1, ""))
    )
    assert write_records([older, newer, other], path) == 3
    assert [json.loads(line)["key"] for line in path.read_text().splitlines()] == sorted(spec.key for spec in specs)
    records = Records(path)
    assert [records.find(spec).accuracy for spec in specs] == [newer.accuracy, other.accuracy, first.accuracy]
    text = path.read_text()
    write_records(records, path)
    assert path.read_text() == text  # what is written again is the same, byte for byte
    write_records([older], tmp_path / "some" / "b.jsonl")
    assert Records(tmp_path / "some").find(specs[2]).accuracy == first.accuracy


def test_runs_of_several_files_are_in_the_order_of_their_keys(tmp_path):
    keys = sorted(spec.key for spec in (RunSpec("er", stream="seq-cifar10", seed=seed) for seed in range(2)))
    for seed in range(2):
        record = made_up(RunSpec("er", stream="seq-cifar10", seed=seed))
        write_records([record], tmp_path / f"{keys.index(record.key)}.jsonl")
    assert [record.key for record in Records(tmp_path / "1.jsonl", tmp_path / "0.jsonl")] == keys


DAMAGE = {
    "not JSON": "<<<<<<< ours",
    "a number": "7",
    "an empty object": "{}",
    "another key": '{"key": "a", "what": 1}',
}


def test_damaged_and_foreign_lines_are_named_and_passed_over(parabolic, folder):
    good = made_up(RunSpec("sgd", stream="seq-cifar10"))
    write_records([good], folder / "a.jsonl")
    (line,) = (folder / "a.jsonl").read_text().splitlines()
    content = json.loads(line)
    changes = [
        {"spec": {}}, {"spec": None}, {"accuracy": []}, {"accuracy": [[1.0], [2.0]]}, {"accuracy": [["a"]]},
        {"accuracy": [[float("nan")]]}, {"train_seconds": None}, {"train_seconds": ["a"]}, {"environment": []},
        {"key": 3}, {"accuracy": [[1.0, 2.0], [3.0, 4.0]]}, {"spec": {**content["spec"], "epochs": 0}},
        {"spec": {**content["spec"], "backbone": None}}, {"spec": {**content["spec"], "scenario": 3}},
    ]  # fmt: skip
    damaged = [*DAMAGE.values(), *(json.dumps({**content, **change}) for change in changes), line[: len(line) // 2]]
    (folder / "a.jsonl").write_text("\n".join([*damaged, "", line, ""]))
    (folder / "b.jsonl").write_bytes(b"\xff\xfe")
    (folder / "README.md").write_text("no records")
    records = Records(folder)
    assert [record.key for record in records] == [good.key]
    expected = [f"{folder / 'a.jsonl'}:{number}" for number in range(1, len(damaged) + 1)] + [str(folder / "b.jsonl")]
    assert sorted(map(str, records.unreadable())) == sorted(expected)
    code, out, err = parabolic("paper", "main", "--learners", "sgd", "--seeds", "1", "--show")
    assert (code, err) == (0, "")
    assert "1 of 1 runs are records" in out
    assert f"\nCannot be read: {expected[0]} (" in out
    # And nothing that cannot be read is written over.
    text = (folder / "a.jsonl").read_text()
    with pytest.raises(InputError, match="^records: got .*a.jsonl:1 .*, expected a records file; repair or remove"):
        write_records([good], folder / "a.jsonl")
    assert (folder / "a.jsonl").read_text() == text


MERGE = """
import sys
from pathlib import Path
from recorded import made_up
from parabolic import RunSpec
from parabolic.experiments import write_records
mine = [made_up(RunSpec(sys.argv[1], stream="seq-cifar10", seed=seed)) for seed in range(20)]
print("ready", flush=True)
sys.stdin.readline()
for run in mine:
    write_records([run], Path(sys.argv[2]))
"""


def test_processes_that_merge_into_one_file_lose_nothing(tmp_path):
    path = tmp_path / "a.jsonl"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", MERGE, learner, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        )
        for learner in ("er", "sgd")
    ]  # fmt: skip
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * 2
    for process in processes:  # now that both are there
        process.stdin.write("go\n")
        process.stdin.flush()
    assert [process.communicate()[0] for process in processes] == [""] * 2
    assert sorted((run.spec["learner"], run.spec["seed"]) for run in Records(path)) == [
        (learner, seed) for learner in ("er", "sgd") for seed in range(20)
    ]


def test_a_file_may_have_any_name_where_it_is_named(tmp_path):
    spec = RunSpec("er", stream="seq-cifar10")
    write_records([made_up(spec)], tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").rename(tmp_path / "of mine")
    assert Records(tmp_path / "of mine").find(spec) is not None
    assert list(Records(tmp_path)) == []
    assert list(Records(tmp_path / "a.jsonl").unreadable()) == [tmp_path / "a.jsonl"]  # which is not there any more


def test_failed_runs_stand_ins_and_trials_are_no_records(parabolic, tmp_path):
    store = Store(tmp_path / "runs")
    real = RunSpec("sgd", stream="seq-cifar10")
    fill_store(store, Selection(("small_buffers",), learners=("sgd",), seeds=1, quick=True))
    store.save(made_up(replace(real, scenario={"validation": 0.1})))
    store.save_failure(real, "no luck")
    code, _, err = parabolic("runs", "--records", "a.jsonl")
    assert code == 2
    assert "got 2 runs, of which 1 are stand-ins of `paper --quick`, 1 have held-out examples" in err
    assert re.search("got runs that failed", parabolic("runs", "--failed", "--records", "a.jsonl")[2])
    assert re.search("expected a file called NAME.jsonl", parabolic("runs", "--records", "a.csv")[2])
    assert not list(tmp_path.glob("a.*"))
    store.save(made_up(real))
    store.save(made_up(RunSpec("er", stream="seq-cifar10")))
    result = json.loads(parabolic("runs", "--learner", "sgd", "--records", "a.jsonl", "--json")[1])
    assert result["records"] == {"written": 1, "there": 1, "stand-ins": 1, "held-out": 1}
    assert [record.key for record in Records(tmp_path / "a.jsonl")] == [real.key]
    output = parabolic("runs", "--learner", "sgd", "--records", "a.jsonl")[1]
    assert "(1 run written, 1 in the file, 1 stand-ins left out, 1 with held-out examples left out)" in output


def test_a_run_of_ones_own_that_is_like_a_stand_in_is_a_record(parabolic, tmp_path):
    spec = RunSpec("er", backbone="mlp")
    record = made_up(spec)
    commands = {"command": "parabolic compare --set backbone=mlp"}
    Store(tmp_path / "runs").save(replace(record, environment={**record.environment, **commands}))
    assert parabolic("runs", "--records", "a.jsonl")[0] == 0
    assert [stored.key for stored in Records(tmp_path / "a.jsonl")] == [spec.key]


# -- the paper's tables --------------------------------------------------------------------------------------------


def test_tables_are_printed_without_data_and_say_what_is_missing(parabolic, tmp_path, folder):
    selection = Selection(("main",), learners=("pcl", "sgd"), seeds=2)
    known_specs = [spec for spec in selection.runs if spec.stream != "seq-tinyimagenet"]
    write_records([made_up(spec) for spec in known_specs[1:]], folder / "main.jsonl")
    Store(tmp_path / "runs").save(made_up(known_specs[0], seed=1))
    arguments = ("paper", "main", "--learners", "pcl,sgd", "--seeds", "2")
    code, out, err = parabolic(*arguments)
    assert (code, err) == (0, "")
    assert "11 of 12 runs are records, which come with the package (A fast GPU, 2026-11-15)." in out
    assert "12 runs, 1 of them already there (runs), 11 records\n" in out
    missing = "    seq-tinyimagenet, memory 1000: SGD 2, PCL 2, PCL (text) 2\n"
    assert out.endswith(
        "6 runs are missing. To train them: parabolic data prepare tinyimagenet, then the same command.\n" + missing
    )
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [known_specs[0].key]  # no failures, no claims
    shown_output = parabolic(*arguments, "--show")
    assert shown_output[0] == 0
    assert shown_output[1] == out.replace("then the same command.", "then the same command without --show.")
    tables = json.loads(parabolic(*arguments, "--show", "--format", "json")[1])
    sgd = tables[0]["rows"][0]["cells"]
    assert [cell["ours"] and cell["ours"]["n"] for cell in sgd] == [2, 2, 2, 2, None, None]
    own_record, stored_record = Store(tmp_path / "runs").find(known_specs[0]), Records(folder).find(known_specs[1])
    assert sgd[0]["by_seed"] == {
        "0": own_record.metrics["aaa"],
        "1": stored_record.metrics["aaa"],
    }  # the store comes first


def test_without_records_they_do_not_count(parabolic, folder):
    selection = Selection(("small_buffers",), learners=("sgd",), seeds=2)
    write_records([made_up(spec) for spec in selection.runs], folder / "a.jsonl")
    arguments = ("paper", "small_buffers", "--learners", "sgd", "--seeds", "2")
    plan = json.loads(parabolic(*arguments, "--dry-run", "--format", "json")[1])["all"]
    assert (plan["runs"], plan["done"]) == (2, 2)
    plan = json.loads(parabolic(*arguments, "--dry-run", "--no-records", "--format", "json")[1])["all"]
    assert (plan["runs"], plan["done"], plan["unknown"]) == (2, 0, 2)
    code, out, _ = parabolic(*arguments, "--no-records")
    assert code == 0
    assert "2 runs are missing" in out
    assert "records" not in out


def test_estimates_use_the_seconds_of_records_from_the_same_device(parabolic, folder):
    first, second = Selection(("small_buffers",), learners=("sgd",), seeds=2).runs[:2]
    arguments = ("paper", "small_buffers", "--learners", "sgd", "--seeds", "2", "--device", "cpu", "--workers", "0")
    for device, same_device in (("cpu", True), ("A fast GPU", False)):
        record = made_up(first, finished="2026-11-16" if same_device else "2026-11-17", device=device)
        write_records([record], folder / "a.jsonl")
        plan = json.loads(parabolic(*arguments, "--dry-run", "--format", "json")[1])["all"]
        assert (plan["runs"], plan["done"], plan["unknown"]) == (2, 1, 0 if same_device else 1)
        expected = Estimates(Records(folder)).seconds(second) if same_device else 0
        assert plan["seconds"] == pytest.approx(expected)


def test_estimates_may_be_for_another_device(parabolic, folder):
    first, second = Selection(("small_buffers",), learners=("sgd",), seeds=2).runs[:2]
    write_records([made_up(first, device="A fast GPU")], folder / "a.jsonl")
    arguments = ("paper", "small_buffers", "--learners", "sgd", "--seeds", "2")
    code, out, _ = parabolic(*arguments, "--dry-run", "--like", "A fast GPU", "--format", "json")
    plan = json.loads(out)["all"]
    assert (code, plan["done"], plan["unknown"]) == (0, 1, 0)
    assert plan["seconds"] == pytest.approx(Estimates(Records(folder)).seconds(second))
    code, _, err = parabolic(*arguments, "--dry-run", "--like", "A fast CPU")
    assert (code, "did you mean 'A fast GPU'?" in err) == (2, True)
    assert "add --dry-run" in parabolic(*arguments, "--like", "A fast GPU")[2]


def test_a_learner_that_was_never_run_on_a_stream_is_estimated_by_others():
    def timed(learner, stream, seconds):
        return replace(made_up(RunSpec(learner, stream=stream)), train_seconds=[seconds], test_seconds=[0.0])

    runs = [timed("sgd", "seq-cifar100", 2.0), timed("sgd", "seq-tinyimagenet", 20.0), timed("er", "seq-cifar100", 3.0)]
    estimates = Estimates(runs)
    assert estimates.seconds(RunSpec("er", stream="seq-tinyimagenet", epochs=2)) == 60.0
    assert estimates.seconds(RunSpec("si", stream="seq-tinyimagenet")) is None  # of it nothing is known anywhere
    assert estimates.seconds(RunSpec("er", stream="seq-digits")) is None  # nor of any learner there


def test_bounds_that_cannot_be_measured_here_are_gaps(parabolic, folder):
    code, out, err = parabolic("paper", "bounds", "--seeds", "2")
    assert (code, err) == (0, "")
    assert "seq-cifar10, memory 1000: bounds of PCL 2" in out
    assert "parabolic data prepare cifar10, then the same command." in out


def test_with_show_nothing_is_trained_even_where_it_could_be(parabolic, tmp_path):
    code, out, err = parabolic("paper", "small_buffers", "--learners", "sgd", "--quick", "--show")
    assert (code, err) == (0, "")
    assert out.count("– (n=0)") == 6
    assert "5 runs are missing. To train them: the same command without --show.\n    seq-digits, memory 10" in out
    assert not (tmp_path / "runs").exists()


# -- a store with records behind it, and the page ------------------------------------------------------------------


def test_what_is_not_in_the_store_is_looked_for_in_the_records(tmp_path):
    specs = [RunSpec("er", stream="seq-cifar10", seed=seed) for seed in range(3)]
    write_records([made_up(spec) for spec in specs[:2]], tmp_path / "a.jsonl")
    store = BackedStore(tmp_path / "runs", Records(tmp_path / "a.jsonl"))
    store.save(made_up(specs[0], seed=1))
    store.save_failure(specs[1], "no luck here")
    store.save_failure(specs[2], "no luck anywhere")
    assert [is_record(record) for record in map(store.find, specs[:2])] == [False, True]
    assert store.find(specs[2]) is None
    assert sorted(record.key for record in store) == sorted(spec.key for spec in specs[:2])
    assert [failed.key for failed in store.failures()] == [specs[2].key]
    assert [record.key for record in Store(tmp_path / "runs")] == [specs[0].key]
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write("damaged")
    store = BackedStore(tmp_path / "runs", Records(tmp_path / "a.jsonl"))
    assert list(store.unreadable()) == [tmp_path / "a.jsonl:3"]


def test_the_page_shows_records_if_asked(parabolic, tmp_path, folder):
    specs = Selection(("main",), learners=("pcl", "er"), seeds=2).runs
    write_records([made_up(spec) for spec in specs], folder / "main.jsonl")
    code, _, err = parabolic("report")
    assert code == 2
    assert "no runs in runs" in err
    code, _, err = parabolic("report", "--records")
    assert (code, err) == (0, "")
    page = (tmp_path / "report.html").read_text()
    assert "Three streams, memory 1000" in page
    assert "18 of 18 runs are records" in page
    assert page.count('"folder":"records: main.jsonl"') == 18


def test_a_preset_that_leads_nowhere_is_no_reason_to_have_no_page(parabolic, tmp_path, folder):
    write_records([made_up(RunSpec("er", stream="seq-cifar10", memory=1000))], folder / "main.jsonl")
    (tmp_path / "presets").mkdir()
    (tmp_path / "presets" / "er-seq-cifar10.toml").symlink_to("nowhere.toml")
    assert parabolic("report", "--records")[::2] == (0, "")
    assert "Three streams, memory 1000" in (tmp_path / "report.html").read_text()


# -- where they are ------------------------------------------------------------------------------------------------


def test_a_folder_of_ones_own_may_be_at_home(monkeypatch):
    monkeypatch.setenv("PARABOLIC_RECORDS", "~/kept")
    assert records_place() == Path.home() / "kept"


def test_a_checkout_has_the_records_under_results(monkeypatch):
    monkeypatch.delenv("PARABOLIC_RECORDS")
    assert records_place() == ROOT / "results" / "records"
    records = Records.ours()
    assert records.unreadable() == {}  # all that is committed can be read
    for record in records:
        assert not re.search(r"(^|\s)/", record.environment["command"])  # no paths of a machine


def test_a_wheel_contains_the_records(tmp_path):
    """Build it, unpack it, and ask the package that was in it."""
    included = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert included["force-include"] == {"results/records": "parabolic/records"}
    pytest.importorskip("hatchling", reason="needs hatchling, to build a wheel")
    code = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
    built = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, check=True, capture_output=True, text=True
    )
    with zipfile.ZipFile(tmp_path / built.stdout.split()[-1]) as wheel:
        wheel.extractall(tmp_path / "installed")
    inside = tmp_path / "installed" / "parabolic" / "records"
    assert {path.name for path in inside.iterdir()} == {path.name for path in (ROOT / "results" / "records").iterdir()}
    code = "import parabolic; from parabolic.experiments.records import records_place; print(records_place())"
    environment = {name: value for name, value in os.environ.items() if name != "PARABOLIC_RECORDS"}
    process = subprocess.run(
        [sys.executable, "-c", code], env={**environment, "PYTHONPATH": str(tmp_path / "installed")},
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert process.stdout.strip() == str(inside)


def test_every_table_of_the_paper_can_be_made_of_records(tmp_path, folder):
    """The size of all of them, which are to be committed."""
    specs = {spec.key: spec for spec in Selection(seeds=1).runs}
    write_records(map(made_up, specs.values()), folder / "all.jsonl")
    records = Records(folder)
    assert all(records.find(spec) is not None for name in paper_tables() for spec in Selection((name,), seeds=1).runs)
    lines = (folder / "all.jsonl").read_text().splitlines()
    assert sum(map(len, lines)) / len(lines) < 2000
