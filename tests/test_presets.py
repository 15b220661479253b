"""Presets: values by name, in files that people write too."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parabolic import MLP, InputError, ReplayLearner, RunSpec
from parabolic.experiments import Preset, known_presets, load_preset, save_preset
from parabolic.experiments.presets import OURS
from parabolic.memory import Memory

PLUS = """
about = "PCL as published, with the weights averaged"
learner = "pcl"

[settings]
variant = "reference"
average = 0.99
shared = true
integral = "none"
times = 3

[study]
by = "hand"
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PARABOLIC_PRESETS", raising=False)
    (tmp_path / "presets").mkdir()
    (tmp_path / "presets" / "pcl-plus.toml").write_text(PLUS)


words = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
plain = st.one_of(words, st.integers(-(2**62), 2**62), st.floats(allow_nan=False), st.booleans())
tables = st.dictionaries(words, plain, max_size=3)


@given(about=words, settings=tables, study=st.dictionaries(words, plain | tables | st.lists(tables), max_size=3))
def test_what_is_written_is_read(tmp_path_factory, about, settings, study):
    preset = Preset("a.b", "er", about, "seq-digits", 7, settings, study)
    loaded = load_preset(save_preset(preset, tmp_path_factory.getbasetemp() / "written"))
    study_read = {name: value for name, value in study.items() if value != {}}  # an empty table says nothing
    assert loaded == Preset("a.b", "er", about, "seq-digits", 7, settings, study_read)


def test_a_study_of_any_information_is_read_again(tmp_path):
    study = {"rates": (0.1, 1), "folder": Path("runs"), "best": np.bool_(True), "score": np.float32(0.5), "none": None}
    loaded = load_preset(save_preset(Preset("any", "er", study=study), str(tmp_path)))
    assert loaded.study == {"rates": [0.1, 1], "folder": "runs", "best": True, "score": 0.5, "none": "none"}


def test_a_preset_can_be_written_by_hand():
    preset = load_preset("pcl-plus")
    assert preset.about == "PCL as published, with the weights averaged"
    options = {"variant": "reference", "average": 0.99, "shared": True, "integral": None, "times": 3}
    assert preset.spec(seed=4) == RunSpec(learner="pcl", seed=4, options=options)


def test_a_file_that_is_named_is_looked_for_here_and_then_beside_the_preset(tmp_path, monkeypatch):
    preset_folder = tmp_path / "shared"
    preset_folder.mkdir()
    (preset_folder / "own.py").write_text(
        "from parabolic import ER, MLP, make_stream\nclass Mine(ER):\n    name = 'mine'\n"
        "def stream(seed):\n    return make_stream('seq-blobs', seed)\n"
    )
    preset_text = 'learner = "own.py:Mine"\nstream = "own.py:stream"\n[settings]\nbackbone = "own.py:MLP"\n'
    (preset_folder / "mine.toml").write_text(preset_text)
    for preset in ("shared/mine.toml", str(preset_folder / "mine.toml")):
        folder = preset.removesuffix("/mine.toml")
        spec = load_preset(preset).spec()
        expected = [f"{folder}/own.py:{name}" for name in ("Mine", "stream", "MLP")]
        assert [spec.learner, spec.stream, spec.backbone] == expected
        assert spec.resolved()["options"]["replay"] == 32
    (tmp_path / "own.py").write_text("from parabolic import ER\nclass Mine(ER):\n    pass\n")
    assert load_preset("shared/mine.toml").learner == "own.py:Mine"  # as ever, the one that is here
    monkeypatch.chdir(preset_folder)
    assert load_preset("mine.toml").learner == "own.py:Mine"
    (preset_folder / "gone.toml").write_text('learner = "gone.py:Mine"\n')
    with pytest.raises(InputError, match=r"^learner: got 'gone.py:Mine', .* there is no "):
        load_preset("gone.toml").spec()


def test_what_is_given_comes_before_the_preset():
    save_preset(Preset("one", "er", "", "seq-blobs", 300, {"lr": 0.3, "batch": 5}))
    preset = load_preset("one")
    assert preset.spec() == RunSpec(learner="er", stream="seq-blobs", memory=300, batch=5, options={"lr": 0.3})
    changed = preset.spec({"lr": "0.5", "replay": "8"}, stream="seq-digits", memory=50)
    assert changed == RunSpec(learner="er", memory=50, batch=5, options={"lr": 0.5, "replay": 8})
    save_preset(Preset("two", "er", settings={"memory": 300, "seed": 7, "batch": 5}))  # a run's fields, as for --set
    assert load_preset("two").spec() == RunSpec(learner="er", memory=300, seed=7, batch=5)
    assert load_preset("two").spec(memory=50, seed=1) == RunSpec(learner="er", memory=50, seed=1, batch=5)
    assert preset.spec({"replay": "8"}, options={"lr": 0.7, "replay": 9}).options == {"lr": 0.7, "replay": 8}


def test_ours_can_be_used_and_the_user_comes_first(tmp_path, monkeypatch):
    ours = sorted(path.stem for path in OURS.glob("*.toml"))
    assert ours
    for name in ours:
        preset = load_preset(name)
        assert preset.about
        assert preset.spec().learner == preset.learner
    elsewhere = tmp_path / "elsewhere"
    monkeypatch.setenv("PARABOLIC_PRESETS", str(elsewhere))
    save_preset(Preset(ours[0], "sgd"))
    assert load_preset(ours[0]).learner == "sgd"
    assert known_presets()[ours[0]] == elsewhere / f"{ours[0]}.toml"


def test_a_failed_write_leaves_what_was_there(tmp_path):
    save_preset(Preset("one", "er"), tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="presets: got .*; free some space, or name another folder$"):
        save_preset(Preset("one", "sgd"), tmp_path / "file")
    assert load_preset(str(tmp_path / "one.toml")).learner == "er"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("about = " + "[" * 100_000, "got .*, expected a TOML file; repair the file, or remove it"),
        ("learner = ", "got .*, expected a TOML file; repair the file, or remove it"),
        ("learner = \xff", "got .*, expected a TOML file"),
        ("about = 'no learner'", "got no learner, expected one"),
        ("learner = 'er'\nlr = 0.1", "got 'lr', expected one of about, learner"),
        ("learner = 'er'\nsetting = {lr = 0.1}", "got 'setting', expected one of .* did you mean 'settings'"),
        ("learner = 3", "got learner = 3, expected a text there"),
        ("learner = 'er'\nmemory = 'all'", "got memory = 'all', expected a whole number there"),
        ("learner = 'er'\nsettings = 3", "got settings = 3, expected a table there"),
        ("learner = 'er'\nsettings = {lr = [0.1]}", r"got lr = \[0.1\], expected a number, a text"),
    ],
)
def test_a_damaged_preset_says_what_is_wrong_with_it(parabolic, tmp_path, text, message):
    (tmp_path / "presets" / "bad.toml").write_text(text, encoding="latin-1")
    with pytest.raises(InputError, match=rf"^preset presets/bad\.toml: {message}"):
        load_preset("bad")
    code, out, err = parabolic("presets", "--json")
    assert code == 2
    assert "bad.toml" in err
    assert "pcl-plus" in {preset["name"] for preset in json.loads(out)}  # the others are there


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "--preset", "pcl-plu"), "preset: got 'pcl-plu', .* did you mean 'pcl-plus'"),
        (("run", "--preset", "nothing.toml"), "preset: got 'nothing.toml', expected an existing file"),
        (
            ("run", "--preset", "pcl-plus", "--learner", "er"),
            "--learner: got 'er', expected pcl, as in preset 'pcl-plus'",
        ),
        (("run", "--preset", "pcl-plus", "--set", "lrr=1"), "--set: got 'lrr'.* did you mean 'lr'"),
        (("run", "--set", "learner=er"), "--set: got 'learner', expected one of"),
        (("run", "--preset", "typo"), "preset 'typo': settings: got 'lrr'.* did you mean 'lr'"),
        (("compare", "--preset", "here", "--preset", "there"), "--stream: got presets for seq-blobs and seq-digits"),
    ],
)
def test_bad_arguments_are_refused(parabolic, arguments, message):
    save_preset(Preset("typo", "er", settings={"lrr": 1}))
    save_preset(Preset("here", "er", stream="seq-digits"))
    save_preset(Preset("there", "er", stream="seq-blobs"))
    code, out, err = parabolic(*arguments)
    assert (code, out) == (2, "")
    assert re.search(message, err)


@pytest.mark.parametrize("command", ["run", "compare"])
def test_data_that_only_a_preset_asks_for_are_reported_as_such(parabolic, command, tmp_path, monkeypatch):
    monkeypatch.setenv("PARABOLIC_DATA", str(tmp_path))
    remedy = "; or name another stream, as in --stream seq-digits: er-seq-cifar100 is for seq-cifar100"
    code, _, err = parabolic(command, "--preset", "er-seq-cifar100")
    assert (code, err.strip().endswith(remedy)) == (2, True)
    _, _, err = parabolic(command, "--preset", "er-seq-cifar100", "--stream", "seq-cifar10")
    assert "data: got 'cifar10'" in err
    assert remedy not in err


def test_the_command_line_uses_presets(parabolic):
    save_preset(Preset("bold", "er", stream="seq-blobs", memory=40, settings={"lr": 0.3}))
    record = json.loads(parabolic("run", "--preset", "bold", "--json")[1])
    assert (record["spec"]["stream"], record["spec"]["memory"]) == ("seq-blobs", 40)
    assert record["spec"]["options"]["lr"] == 0.3
    record = json.loads(parabolic("run", "--preset", "bold", "--memory", "50", "--set", "lr=0.2", "--json")[1])
    assert (record["spec"]["memory"], record["spec"]["options"]["lr"]) == (50, 0.2)
    arguments = ("compare", "--learners", "er", "--preset", "bold", "--seeds", "1", "--set", "er.replay=8", "--json")
    code, out, _ = parabolic(*arguments)
    assert code == 0
    runs = [run["spec"] for run in json.loads(out)["runs"]]
    assert [(run["memory"], run["options"]["lr"], run["options"]["replay"]) for run in runs] == [
        (40, 0.1, 8),
        (40, 0.3, 32),
    ]
    output = parabolic("presets")[1]
    assert "bold" in output
    assert "lr=0.3" in output


def test_a_preset_that_is_used_in_place_of_ours_is_marked(parabolic, monkeypatch):
    note = "yours, in place of the package's"
    save_preset(Preset("mine", "er", "my own"))
    assert [name for name, text in listed(parabolic).items() if note in text] == ["pcl-plus"]  # above
    save_preset(Preset("er-seq-digits", "er", "my own"))
    assert listed(parabolic)["er-seq-digits"] == f"er for anything: {note}: my own"
    monkeypatch.setenv("PARABOLIC_PRESETS", str(OURS))
    assert not any(note in text for text in listed(parabolic).values())


def listed(parabolic):
    """What the list of presets says of each."""
    texts, name = {}, ""
    for line in parabolic("presets")[1].splitlines()[:-1]:
        head, text = line.split("  ", 1)
        name = head or name
        texts[name] = f"{texts.get(name, '')} {text.strip()}".strip()
    return texts


def test_a_comparison_of_presets_reports_unequal_tuning_effort(parabolic):
    for name, trials in (("one", 30), ("same", 30), ("two", 20), ("none", 0)):
        study = {"seeds": 1, "trials": [{"score": 1.0}] * trials} if trials else {}
        save_preset(Preset(name, "sgd", stream="seq-blobs", settings={"lr": 0.1}, study=study))

    def compare_output(*names, format="terminal"):
        arguments = [argument for name in names for argument in ("--preset", name)]
        return parabolic("compare", *arguments, "--seeds", "1", "--workers", "0", "--format", format)[1]

    note = "Tuning effort differs: one (30 trials), two (20 trials)."
    assert note in compare_output("one", "two")
    assert note in compare_output("one", "two", format="markdown")
    assert "one (30 trials), none (no trials)." in compare_output("one", "none")
    assert "one, same (30 trials each), two (20 trials)." in compare_output("one", "two", "same")
    assert "Tuning effort" not in compare_output("one", "same")
    assert "Tuning effort" not in compare_output("one")


def test_the_names_of_presets_are_whole_in_a_narrow_terminal(parabolic, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    save_preset(Preset("er-on-a-stream-of-my-own-100", "er", settings={"average_part": 0.25}))
    output = parabolic("presets")[1]
    assert {path.stem for path in OURS.glob("*.toml")} | {"er-on-a-stream-of-my-own-100"} <= {*output.split()}
    assert "…" not in output


def test_the_list_says_what_a_preset_was_made_for(parabolic, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    for name, stream, memory in (("one", "seq-blobs", 40), ("two", "seq-blobs", None), ("three", None, None)):
        save_preset(Preset(name, "er", stream=stream, memory=memory))
    texts = listed(parabolic)
    assert [texts[name] for name in ("one", "two", "three")] == [
        "er for seq-blobs, memory 40",
        "er for seq-blobs",
        "er for anything",
    ]


@pytest.mark.parametrize("name", sorted(path.stem for path in OURS.glob("*.toml")))
def test_every_preset_makes_a_learner_with_the_values_of_its_run(name):
    preset = load_preset(str(OURS / f"{name}.toml"))
    learner, spec = preset.make(MLP((4,), 3)), preset.spec()
    options = {option: getattr(learner, option) for option in RunSpec.learner_options(preset.learner)}
    assert options == spec.resolved()["options"]
    if isinstance(learner, ReplayLearner):
        assert learner.past.capacity == spec.memory


def test_options_that_are_given_come_before_those_of_a_preset_and_fields_of_a_run_are_no_options():
    preset = Preset("mine", "er", memory=500, settings={"lr": 0.05, "batch": 16, "average": "none", "replay": 8})
    learner = preset.make(MLP((4,), 3), lr=0.2, seed=3)
    assert (learner.lr, learner.seed, learner.replay, learner.average, learner.past.capacity) == (0.2, 3, 8, None, 500)


def test_a_preset_recalls_at_most_what_the_memory_holds_and_what_is_asked_for_is_refused(parabolic):
    preset, network = Preset("mine", "er", memory=500, settings={"replay": 64}), MLP((4,), 3)
    for memory, recalled in ((50, 50), (64, 64), (500, 64)):
        specs = [
            preset.spec(memory=memory),
            preset.spec({"memory": str(memory)}),
            preset.spec({"memory": str(memory)}, memory=9),
        ]
        assert [(spec.memory, spec.options["replay"]) for spec in specs] == [(memory, recalled)] * 3
        assert [preset.make(network, memory=memory_given).replay for memory_given in (memory, Memory(memory))] == [
            recalled
        ] * 2
    assert Preset("own", "er", settings={"replay": 300}).spec(memory=1000).options["replay"] == 300
    for settings in ({"replay": 64, "memory": 50}, {"replay": "64", "memory": 50}):
        assert Preset("own", "er", settings=settings).make(network).replay == 50
    for attempt in (
        lambda: preset.spec({"replay": "64"}, memory=50),
        lambda: preset.spec(memory=50, options={"replay": 64}),
        lambda: preset.make(network, memory=50, replay=64),
        lambda: Preset("er", "er").spec(memory=20),  # of 32, which no preset says
    ):
        with pytest.raises(InputError, match=r"expected .*at (least|most)"):
            attempt()
    for memory in (0, -1, 2.5, "none"):
        with pytest.raises(InputError, match="^memory: got "):
            preset.spec(memory=memory)
    save_preset(preset)
    record = json.loads(parabolic("run", "--preset", "mine", "--stream", "seq-blobs", "--memory", "20", "--json")[1])
    assert (record["spec"]["memory"], record["spec"]["options"]["replay"]) == (20, 20)
    code, _, err = parabolic("run", "--preset", "mine", "--memory", "20", "--set", "replay=64")
    assert code == 2
    assert "replay=64" in err


def test_a_learner_of_a_preset_is_refused_where_its_run_is():
    for settings in ({"lrr": 0.1}, {"learner": "sgd"}):
        preset = Preset("typo", "er", settings=settings)
        for attempt in (preset.spec, lambda preset=preset: preset.make(MLP((4,), 3))):
            with pytest.raises(InputError, match=f"preset 'typo': .*got '{next(iter(settings))}', expected one of"):
                attempt()
    fields = Preset("mine", "er", settings={"lr": 0.3, "batch": 16, "corruption": "uniform"})  # are no typos
    assert fields.make(MLP((4,), 3)).lr == 0.3


def test_the_seed_of_a_preset_counts_where_none_is_given(parabolic, tmp_path):
    (tmp_path / "mine.toml").write_text('learner = "sgd"\n[settings]\nseed = 3\n')
    arguments = ["--preset", "mine.toml", "--stream", "seq-blobs", "--device", "cpu"]
    for options, seed in ([], 3), (["--seed", "0"], 0), (["--set", "seed=2"], 2):
        code, out, err = parabolic("run", *arguments, "--json", *options)
        assert (code, err) == (0, "")
        assert json.loads(out)["spec"]["seed"] == seed
    code, _, err = parabolic("compare", *arguments)
    assert code == 2
    assert "preset 'mine': got 'seed', expected a setting that may differ between rows" in err
    assert "--seeds" in err
