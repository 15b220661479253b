"""Tuned tables: every row with the values of its preset, as much tried for each, and gaps where there is none."""

import json
import re

import pytest
from recorded import made_up

from parabolic import InputError, RunSpec, Store
from parabolic.experiments import Preset, Records, Search, Tuned, known_presets, load_preset, save_preset, write_records
from parabolic.experiments.paper import METHODS, NAMES, PLUS, Selection, Tuning, paper_tables
from parabolic.experiments.presets import OURS
from parabolic.experiments.search import Trial
from parabolic.learners import SI, known_learners
from parabolic.learners.pcl import ABLATIONS

STREAMS = ["seq-cifar10", "seq-cifar100", "seq-tinyimagenet"]
LEARNERS = sorted({method.learner for method in METHODS.values()})


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty folder of presets, and none in the package, whatever it has by now; and no data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("parabolic.experiments.presets.OURS", tmp_path / "ours")
    monkeypatch.setenv("PARABOLIC_PRESETS", str(tmp_path / "presets"))
    monkeypatch.setenv("PARABOLIC_DATA", str(tmp_path / "no data"))
    return tmp_path / "presets"


def rate(learner, stream):
    """A learning rate that no other learner and stream has."""
    return round(0.01 + 0.001 * (LEARNERS.index(learner) * 3 + STREAMS.index(stream)), 3)


def tuned_preset(learner, stream, trials=10, seeds=1, **settings):
    """A preset as `parabolic tune` writes it."""
    search = Search(RunSpec(learner, stream=stream, memory=1000, options=settings), seeds=seeds)
    values = {**search.defaults, "lr": rate(learner, stream)}
    tried = [Trial(search.defaults, 50.0)] * (trials - 1) + [Trial(values, 60.0)]
    return Tuned(f"{learner}-{stream}", search, tried, 0, {}).preset()


@pytest.fixture
def shipped(folder, monkeypatch):
    """The presets that the package has after all."""
    monkeypatch.setattr("parabolic.experiments.presets.OURS", OURS)


@pytest.fixture
def tuned(folder):
    """All learners tuned on all streams, with averaging."""
    for learner in LEARNERS:
        for stream in STREAMS:
            save_preset(tuned_preset(learner, stream, average=0.99))
    save_preset(Preset("pcl-plus", "pcl", "PCL, and more", settings={"lr": 0.5, "replay": 64, "average": 0.995}))


def test_rows_have_the_settings_of_their_presets_at_every_size_and_in_every_scenario(tuned):
    for name, table in paper_tables().items():
        ours = [] if name.startswith("ablation") else [PLUS]  # which is no ablation
        assert table.of(None, tuned=True) == [*table.rows, *ours]
        for row in table.rows:
            for setting in table.settings:
                learner = METHODS[row].learner
                preset = load_preset(f"{learner}-{setting.stream}")
                for seed, spec in enumerate(setting.specs(row, tuned=True)):
                    assert (spec.learner, spec.stream, spec.seed) == (learner, setting.stream, seed)
                    assert (spec.memory, spec.scenario) == (setting.memory, dict(setting.scenario))
                    assert spec.options == {**preset.settings, **ABLATIONS.get(row, {})}
                    assert spec.options["lr"] == rate(learner, setting.stream)
                assert seed == 4


def test_a_run_of_a_tuned_table_is_that_of_the_preset(tuned):
    spec = paper_tables()["main"].settings[1].specs("ER", tuned=True)[3]
    assert spec.key == load_preset("er-seq-cifar100").spec(seed=3).key
    published = {spec.key for spec in Selection(seeds=1).runs}
    assert not published & {spec.key for spec in Selection(seeds=1, tuned=True).runs}


def test_pcl_plus_is_a_row_of_its_own_by_stream_where_there_is_such_a_preset(tuned):
    save_preset(Preset("pcl-plus-seq-cifar100", "pcl", settings={"lr": 0.25}))
    main, small = paper_tables()["main"], paper_tables()["small_buffers"]
    rates = [setting.specs(PLUS, 1, tuned=True)[0].options["lr"] for setting in main.settings]
    assert rates == [0.5, 0.25, 0.5]
    known_presets()["pcl-plus-seq-cifar100"].unlink()
    # One that was made for a larger memory recalls no more than there is.
    replays = [setting.specs(PLUS, 1, tuned=True)[0].options["replay"] for setting in small.settings]
    assert replays == [50, 64, 64]
    assert [setting.memory for setting in small.settings] == [50, 100, 150]
    only = Selection(tuned=True, learners=("pcl-plus",))
    assert only.tables == [name for name in NAMES if name not in ("bounds", "ablation", "ablation_buffers")]
    assert {spec.options["lr"] for spec in only.runs} == {0.5}
    with pytest.raises(InputError, match="learners: got 'pcl-plus', .*; add --tuned, or .* --also pcl-plus"):
        Selection(learners=("pcl-plus",))


def test_a_tuned_table_says_how_it_was_tuned_and_by_how_many_trials(parabolic, tuned, tmp_path):
    selection = Selection(("main",), learners=("er", "pcl"), seeds=2, tuned=True)
    for spec in selection.runs:
        Store(tmp_path / "runs").save(made_up(spec))
    arguments = ("paper", "main", "--tuned", "--learners", "er,pcl", "--seeds", "2", "--format", "markdown")
    code, out, err = parabolic(*arguments)
    assert (code, err) == (0, "")
    assert out.startswith("**Three streams, memory 1000, tuned**")
    assert "for each method, the best of 10 trials on held-out training examples" in out
    assert f"{PLUS} is the preset pcl-plus: PCL, and more." in out
    assert "Not as much was tried" not in out
    rows = [line.split(" | ")[0] for line in out.splitlines() if line.startswith("| ")]
    assert rows == ["| method", "| ---", "| ER", "| paper", "| PCL", "| paper", f"| {PLUS}"]  # nothing published of it
    assert "| paper | <ins>56.44</ins> ± 0.8 |" in out
    # Presets for which more or less was tried are named.
    save_preset(tuned_preset("er", "seq-cifar10", trials=12))
    save_preset(tuned_preset("pcl", "seq-cifar100", seeds=3))
    save_preset(Preset("pcl-seq-tinyimagenet", "pcl", settings={"lr": 0.1}))
    expected = "er-seq-cifar10 (12 trials), pcl-seq-cifar100 (10 trials of 3 seeds), pcl-seq-tinyimagenet (no trials)"
    assert f"Not as much was tried for each: {expected}." in parabolic(*arguments, "--show")[1]


def test_rows_without_a_preset_stay_empty_and_the_commands_that_would_fill_them_are_printed(
    parabolic, folder, tmp_path
):
    for learner in ("er", "pcl"):
        settings = {} if learner == "er" else {"balance": 0.5}  # what only one has is not for the others
        settings |= {"average": 0.99, "optimizer": "SGD(momentum=0.9)"}
        save_preset(tuned_preset(learner, "seq-cifar10", trials=7, seeds=2, **settings))
    code, out, err = parabolic("paper", "main", "--tuned", "--learners", "er,pcl,gem", "--seeds", "2", "--show")
    assert (code, err) == (0, "")
    assert "4 runs are missing" in out  # of which presets say what they are
    commands = re.findall(r"^    (parabolic tune .*)$", out, re.MULTILINE)
    options = "--memory 1000 --trials 7 --seeds 2 --validation 0.1 --space lr=0.001:1:log --set average=0.99"
    options += " --set 'optimizer=SGD(momentum=0.9)'"  # as a shell takes it
    assert commands == [
        f"parabolic tune --learners er,gem,pcl --stream seq-cifar100 {options}",
        f"parabolic tune --learners er,gem,pcl --stream seq-tinyimagenet {options}",
        f"parabolic tune --learners gem --stream seq-cifar10 {options}",
    ]
    assert f"{PLUS} stays empty without a preset pcl-plus or pcl-plus-STREAM." in out
    plan = parabolic("paper", "main", "--tuned", "--learners", "er,pcl,gem", "--dry-run", "--format", "json")[1]
    assert json.loads(plan)["all"]["runs"] == 10
    planned = parabolic("paper", "main", "--tuned", "--learners", "er,pcl,gem", "--dry-run")[1]
    assert re.findall(r"^    (parabolic tune .*)$", planned, re.MULTILINE) == commands
    # VR-MCL's own learning rate is outside such a range: it is left to that which it states.
    for name, preset in known_presets().items():
        preset.write_text(preset.read_text().replace('lr = "0.001:1:log"', 'lr = "0.01:0.3:log"'))
        assert load_preset(name).study["space"]["lr"] == "0.01:0.3:log"
    output = parabolic("paper", "main", "--tuned", "--learners", "er,pcl,gem,vrmcl", "--show")[1]
    first, second = re.findall(r"^    (parabolic tune .* --stream seq-cifar10 .*)$", output, re.MULTILINE)
    assert first == commands[-1].replace("0.001:1", "0.01:0.3")
    assert second == commands[-1].replace("gem", "vrmcl").replace(" --space lr=0.001:1:log", "")
    # Once it has a preset, with that range, the others are still tuned like most.
    save_preset(tuned_preset("vrmcl", "seq-cifar10", trials=7, seeds=2, average=0.99, optimizer="SGD(momentum=0.9)"))
    output = parabolic("paper", "main", "--tuned", "--learners", "er,pcl,gem,vrmcl", "--show")[1]
    assert re.findall(r"^    (parabolic tune .* --stream seq-cifar10 .*)$", output, re.MULTILINE) == [first]
    save_preset(Preset("er-seq-cifar10", "sgd"))
    code, out, err = parabolic("paper", "main", "--tuned", "--show")
    assert (code, out) == (2, "")
    assert "preset 'er-seq-cifar10': got 'sgd', expected the learner er" in err


def write_preset(folder, name, text):
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.toml").write_text(text)


def test_the_column_says_on_what_a_row_is_run_and_not_the_preset(folder):
    settings = 'memory = 64\nseed = 7\nstream = "seq-blobs"\nvalidation = 0.1\ncorruption = "uniform"\nreplay = "48"'
    write_preset(folder, "er-seq-cifar100", f'learner = "er"\n[settings]\nlr = "0.2"\n{settings}\nbatch = 16')
    for name in ("main", "corrupt", "small_buffers"):
        for setting in paper_tables()[name].settings:
            for seed, spec in enumerate(setting.specs("ER", 2, tuned=True)):
                assert (spec.stream, spec.memory, spec.seed) == (setting.stream, setting.memory, seed)
                assert spec.scenario == dict(setting.scenario)
                assert (spec.batch, spec.options) == (16, {"lr": 0.2, "replay": min(48, setting.memory)})


def test_a_stand_in_recalls_as_many_as_its_preset_says_and_as_its_memory_holds(folder):
    small = paper_tables()["small_buffers"]  # of 50, 100 and 150, and a fifth of it
    for setting, recalled in (("", [10, 10, 10]), ("replay = 5", [5, 5, 5]), ("replay = 24", [10, 20, 24])):
        write_preset(folder, "obc-seq-digits", f'learner = "obc"\n[settings]\nlr = 0.1\n{setting}')
        specs = [setting.specs("ER-OBC", 1, quick=True, tuned=True)[0] for setting in small.settings]
        assert [spec.options["replay"] for spec in specs] == recalled


@pytest.mark.parametrize("study", ["", "trials = 30", "trials = 'many'\nseeds = [1]", "seeds = '3'"])
def test_presets_that_were_written_by_hand_took_no_trials_whatever_they_say(parabolic, folder, study):
    write_preset(folder, "er-seq-cifar10", f'learner = "er"\n[settings]\nlr = 0.1\n[study]\n{study}')
    code, out, err = parabolic("paper", "main", "--tuned", "--learners", "er", "--seeds", "1", "--show")
    assert (code, err) == (0, "")
    assert "The presets mention no trials" in out
    assert "held-out" not in out
    assert "    parabolic tune --learners er --stream seq-cifar100 --memory 1000\n" in out
    study = "trials = [1, 2]\nseeds = '3'\nspace = 'wide'"  # what is no number of seeds is not told, and no space
    write_preset(folder, "er-seq-cifar10", f'learner = "er"\n[settings]\nlr = 0.1\n[study]\n{study}')
    assert "the best of 2 trials on held-out" in parabolic("paper", "main", "--tuned", "--learners", "er", "--show")[1]


def test_rows_that_are_not_in_a_table_are_not_explained_below_it(parabolic):
    note = "“PCL (text)” is the paper's Algorithm 1"
    assert note in parabolic("paper", "main", "--learners", "pcl", "--show")[1]
    for arguments in (("--tuned", "--learners", "pcl"), ("--learners", "er")):
        assert note not in parabolic("paper", "main", *arguments, "--show")[1]


def test_tuned_runs_are_found_among_records_until_they_are_tuned_anew(parabolic, tuned, tmp_path, monkeypatch):
    monkeypatch.setenv("PARABOLIC_RECORDS", str(tmp_path / "tuned.jsonl"))
    selection = Selection(("small_buffers",), learners=("sgd",), seeds=2, tuned=True)
    write_records(map(made_up, selection.runs), tmp_path / "tuned.jsonl")
    arguments = ("paper", "small_buffers", "--tuned", "--learners", "sgd", "--seeds", "2", "--show")
    assert "2 of 2 runs are records" in parabolic(*arguments)[1]
    assert "parabolic paper small_buffers --tuned --no-records" in parabolic(*arguments)[1]
    assert all(Records.ours().find(spec) for spec in selection.runs)
    save_preset(Preset("sgd-seq-cifar100", "sgd", settings={"lr": 0.9}))
    assert "2 runs are missing" in parabolic(*arguments)[1]


def test_presets_of_the_package_serve_the_quick_tables(parabolic, shipped, tmp_path):
    tuning = Tuning.of(Selection(quick=True, tuned=True))
    assert tuning.missing == {}
    assert tuning.unlike == {}
    assert sorted(tuning.presets) == [f"{learner}-seq-digits" for learner in LEARNERS]
    code, out, err = parabolic(
        "paper", "small_buffers", "--tuned", "--quick", "--learners", "sgd,si", "--seeds", "1", "--workers", "0",
        "--device", "cpu",
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert f"the best of {tuning.effort} on held-out" in out
    for record in Store(tmp_path / "runs"):
        preset = load_preset(f"{record.spec['learner']}-seq-digits")
        assert preset.settings.items() <= record.spec["options"].items()
        assert (record.spec["stream"], record.spec["backbone"]) == ("seq-digits", "mlp")
    assert len(list(Store(tmp_path / "runs"))) == 2


def test_learners_that_only_some_of_the_tables_have_can_be_asked_for(parabolic):
    """CBRS is in the table of uneven classes alone."""
    arguments = (
        "paper",
        "all",
        "--tuned",
        "--quick",
        "--learners",
        "er,cbrs",
        "--seeds",
        "1",
        "--show",
        "--format",
        "json",
    )
    code, out, _ = parabolic(*arguments)
    assert code == 0
    assert {table["name"]: [row["name"] for row in table["rows"]] for table in json.loads(out)} == {
        "main": ["ER"], "buffers": ["ER"], "corrupt": ["ER"], "corrupt_buffers": ["ER"], "imbalance": ["ER", "CBRS"],
    }  # fmt: skip


# -- tuning several learners at once -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(known_learners()))
def test_averaging_can_be_fixed_for_every_learner(name):
    search = Search(RunSpec.from_settings(name, {"average": "0.99"}))
    assert "average" not in search.ranges
    assert {spec.options["average"] for spec in search.specs(search.defaults)} == {0.99}
    settings = Tuned("one", search, [Trial(search.defaults, 1.0)], 0, {}).preset().settings
    assert settings["average"] == 0.99
    assert settings.keys() == {"average", *search.ranges}


def test_several_learners_are_tuned_with_as_many_trials_each(parabolic, folder):
    arguments = ("tune", "--learners", "er, clser,sgd", "--stream", "seq-blobs", "--trials", "2", "--device", "cpu")
    code, out, err = parabolic(*arguments, "--set", "average=0.9", "--set", "replay=8", "--set", "er.clip_norm=5")
    assert (code, err) == (0, "")
    assert out.count("the best of 2 trials") == 3
    presets = {name: load_preset(f"{name}-seq-blobs") for name in ("er", "clser", "sgd")}
    assert all(len(preset.study["trials"]) == 2 for preset in presets.values())
    expected = {"er": {"average": 0.9, "replay": 8, "clip_norm": 5.0}, "clser": {"average": 0.9, "replay": 8}}
    expected["sgd"] = {"average": 0.9}  # it has no memory to recall from
    for name, preset in presets.items():
        assert expected[name].items() <= preset.settings.items()
        assert preset.settings.keys() == expected[name].keys() | preset.study["space"].keys()
    # A call for one of them goes on with the same study.
    result = json.loads(parabolic("tune", "--learner", "sgd", *arguments[3:], "--set", "average=0.9", "--json")[1])
    assert [trial["score"] for trial in result["trials"]] == [
        pytest.approx(trial_of_preset["score"], abs=0.01) for trial_of_preset in presets["sgd"].study["trials"]
    ]


def test_one_that_fails_does_not_stop_the_others(parabolic, folder, monkeypatch):
    def fail(*_):
        raise RuntimeError("no luck\nat all")

    monkeypatch.setattr(SI, "loss", fail)
    arguments = ("--stream", "seq-blobs", "--trials", "1", "--device", "cpu", "--json")
    code, out, err = parabolic("tune", "--learners", "si,sgd", *arguments)
    assert code == 1
    assert err == "error: si: no luck\nfailed: si; the same command tries them again\n"
    assert [preset["preset"] for preset in json.loads(out)] == [str(folder / "sgd-seq-blobs.toml")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--learners", "er,sgd", "--learner", "pcl"), "--learner: got 'pcl', expected none with --learners"),
        (("--learners", "er,sgd", "--name", "a"), "--name: got 'a', expected no name for several learners"),
        (("--learners", ","), "--learners: got ',', expected at least one name"),
        (("--learners", "er,sdg"), "learner: got 'sdg', .* did you mean 'sgd'"),
        (("--learners", "er,sgd", "--set", "lrr=1"), "--set: got 'lrr'"),
        (("--learners", "er,sgd", "--set", "lr=1"), "space: got nothing to tune"),
        (("--learners", "er,sgd", "--space", "lrr=1:2"), "--space: got 'lrr'"),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_is_trained(parabolic, tmp_path, arguments, message):
    code, out, err = parabolic("tune", "--stream", "seq-blobs", "--trials", "1", *arguments)
    assert (code, out) == (2, "")
    assert re.search(message, err)
    assert not (tmp_path / "runs").exists()


def test_all_are_those_of_the_tables_and_no_other(parabolic, monkeypatch):
    """They are asked for by one word; what each would do is told by what is refused."""
    learners_tuned = []

    def note_and_refuse(search, *_, **__):
        learners_tuned.append(search.spec.learner)
        raise InputError("not now")

    monkeypatch.setattr("parabolic.cli.tune.tune", note_and_refuse)
    code, _, err = parabolic("tune", "--learners", "all", "--stream", "seq-blobs", "--set", "average=0.99")
    assert code == 1
    assert learners_tuned == LEARNERS
    assert err.count("not now") == len(LEARNERS)
