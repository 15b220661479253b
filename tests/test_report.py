"""The report: one page that says what is known of the runs, whatever became of them; and curves as text and files."""

import ast
import base64
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from html import unescape
from pathlib import Path
from statistics import mean, stdev
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from grids import until
from made_up import (
    AROUND,
    EVIL,
    bounds_row,
    record,
    record_with_heads,
    rename_in_file,
    save_few_runs,
    save_many_runs,
    save_run_with_bounds,
)
from matplotlib.figure import Figure
from PIL import Image
from scipy import stats

from parabolic import InputError, RunSpec, Store, load_preset, metrics
from parabolic.experiments.paper import Selection
from parabolic.experiments.paper.plan import Estimates, plan
from parabolic.learners import find_learner
from parabolic.report import comparison, in_words, runs, sketches
from parabolic.report.curves import SIGNS, draw_curves, plot_text
from parabolic.report.formats import legend, lines
from parabolic.report.page import page_of, write_page
from parabolic.report.page.bridges import png
from parabolic.report.page.tables import _selected
from parabolic.report.runs import name_of, sees_all
from parabolic.report.scenes import Method, Scene, find_scenes, results_of
from parabolic.report.sketches import sketch_of
from parabolic.report.words import headline


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "runs")


def data_of(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


def text_of(page):
    """What a person can read, without styles and scripts."""
    page = re.sub(r"<(style|script)\b.*?</\1>", "", page, flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]*>", "", page)).split())


def accuracies(store, learner):
    return [
        run.metrics["acc"] for run in sorted(store, key=lambda run: run.spec["seed"]) if run.spec["learner"] == learner
    ]


def test_the_page_says_first_who_wins_by_how_much_and_whether_that_may_be_chance(store):
    save_few_runs(store, seeds=4)
    er, pcl = accuracies(store, "er"), accuracies(store, "pcl")
    test = stats.ttest_rel(er, pcl)
    interval = test.confidence_interval(0.95)
    assert test.pvalue < 0.05
    text = text_of(page_of(store))
    assert (
        f"er does best: after 5 tasks its accuracy is {mean(er):.1f} %, averaged over the tasks, all classes competing "
        "(the mean of 4 seeds)." in text
    )
    lead = mean(er) - mean(pcl)
    assert (
        f"On the same 4 seeds er is {lead:.1f} points ahead of pcl (95 % interval {interval.low:.1f} to "
        f"{interval.high:.1f}, p = {test.pvalue:.2g}): that is unlikely to be chance (5 % level)." in text
    )
    assert text.index("er does best") < text.index("All figures")
    assert f"{mean(er):.1f} ± {stdev(er):.1f}" in text


def test_a_difference_that_may_be_chance_is_said_to_be(store):
    for seed, (er_skill, pcl_skill) in enumerate(((80, 70), (80, 86))):
        store.save(record(RunSpec("er", seed=seed), er_skill))
        store.save(record(RunSpec("pcl", seed=seed), pcl_skill))
    [scene] = find_scenes(store).scenes
    assert "that may be chance; more seeds would tell" in " ".join(headline(scene))
    [one_seed] = find_scenes(store, {"seed": "0"}).scenes
    assert "a single seed cannot tell whether that is chance" in " ".join(headline(one_seed))
    store.path(RunSpec("er", seed=0).key).joinpath("run.json").unlink()
    store.path(RunSpec("pcl", seed=1).key).joinpath("run.json").unlink()
    [no_common_seed] = find_scenes(store).scenes
    assert "no seed in common" in " ".join(headline(no_common_seed))


def test_a_tie_is_no_lead_and_a_gain_no_loss(store):
    rows = [*([71.0] * task for task in range(1, 5)), [80.0] * 5]
    summary = metrics.summary([row + [float("nan")] * (5 - len(row)) for row in rows])
    for spec in (RunSpec(learner, seed=seed) for learner in ("er", "pcl") for seed in range(2)):
        store.save(replace(record(spec), accuracy=rows, metrics=summary))
    store.save(record(RunSpec("sgd"), 20))
    store.save(record(RunSpec("sgd", stream="seq-blobs"), 20, tasks=3))  # so that there is a table of scenes
    page = page_of(store)
    text = text_of(page)
    assert "er and pcl do equally well: after 5 tasks their accuracy is 80.0 %, averaged" in text
    assert "On the same 2 seeds there is no difference between er and pcl (95 % interval 0.0 to 0.0, p = 1)." in text
    assert (
        "On the earlier tasks er has gained 9.0 points against its best before the end; sgd, which does worst" in text
    )
    overview = re.search(r'<a href="#scene-2">.*?</tr>', page)[0]
    assert re.findall("<td>(.*?)</td>", overview)[:4] == [
        "er, pcl",
        "80.0 ± 0.0 (n=2)",
        "+0.0 points over pcl",
        "no difference",
    ]
    store.path(RunSpec("sgd").key).joinpath("run.json").unlink()
    assert "does worst" not in text_of(page_of(store))


def test_runs_with_a_head_for_each_task_are_shown_with_the_task_told(store, tmp_path):
    """Scores of different heads are not comparable: with all classes competing, the order says nothing."""
    for seed in range(3):
        store.save(record_with_heads(RunSpec("er", seed=seed), 80, 60))
        store.save(record_with_heads(RunSpec("ewc", seed=seed), 20, 81))
        store.save(record(RunSpec("er", seed=seed), 50))
        store.save(record(RunSpec("ewc", seed=seed), 45))
    all_runs = sorted(store, key=lambda run: run.spec["seed"])
    told = {
        learner: [run for run in all_runs if run.spec["learner"] == learner and run.spec["heads"]]
        for learner in ("er", "ewc")
    }
    acc, lost = (
        {learner: mean(run.metrics[name] for run in same) for learner, same in told.items()}
        for name in ("task_acc", "task_forgetting")
    )
    plain, scene = find_scenes(store).scenes
    assert [method.name for method in plain.done] == ["er", "ewc"]
    assert "all classes competing" in headline(plain)[0]
    sentences = headline(scene)
    assert sentences[0] == (
        f"ewc does best: after 5 tasks its accuracy is {acc['ewc']:.1f} %, averaged over the tasks, the task told "
        "(the mean of 3 seeds)."
    )
    assert f"ewc is {acc['ewc'] - acc['er']:.1f} points ahead of er" in sentences[1]
    assert f"ewc has lost {lost['ewc']:.1f} points against" in sentences[2]
    assert f"er, which does worst of 2, has lost {lost['er']:.1f} points" in sentences[2]

    best, _ = scene.done
    assert best.matrices == pytest.approx(np.stack([run.task_matrix for run in told["ewc"]]), nan_ok=True)
    assert best.curves == pytest.approx(np.array([metrics.anytime(run.task_matrix) for run in told["ewc"]]))
    results = results_of(scene)
    assert [column.group for column in results.columns] == [*["the task told"] * 3, ""]
    assert [cell.by_seed for cell in results.rows["ewc"]][:3] == [
        {run.spec["seed"]: run.metrics[f"task_{name}"] for run in told["ewc"]} for name in ("acc", "aaa", "forgetting")
    ]

    page = page_of(store)
    text, data = text_of(page), data_of(page)
    assert "the mean accuracy over all tasks so far, the task told; higher" in text
    assert re.search(rf"{acc['ewc']:.1f} ± \S+ \(n=3\), the task told", text)
    titles = [figure["layout"]["yaxis"].get("title", {}).get("text") for figure in data["figures"].values()]
    assert {"accuracy so far, %", "accuracy so far, the task told, %"} <= {*titles}
    for run in told["ewc"]:
        values = [run.metrics[f"task_{name}"] for name in ("acc", "aaa", "forgetting")]
        assert data["runs"][run.key]["figures"] == [round(value, 2) for value in values]
        line = re.search(rf'data-runs="{run.key}"><code>.*?</tr>', page)[0]
        assert re.findall(r">(-?[\d.]+)</td>", line)[-4:-1] == [f"{value:z.1f}" for value in values]

    lines_of_plot = plot_text(scene).plain.splitlines()
    assert lines_of_plot[0].endswith("heads=True: mean accuracy over the tasks so far, the task told, %")
    assert lines_of_plot[-2].startswith(f"{SIGNS[0]} ewc: {acc['ewc']:.1f} ± ")
    svg = draw_curves(scene, tmp_path / "told.svg", "paper").read_text()
    assert "the task told (%)" in svg
    assert "the task told" not in draw_curves(plain, tmp_path / "plain.svg", "paper").read_text()


def test_runs_on_held_out_examples_are_shown_where_they_are_asked_for(parabolic):
    """Trials of a search are such: of many, one is ahead of the others by chance."""
    store = Store("runs")
    for lr in (0.1, 0.2):
        store.save(record(RunSpec("er", options={"lr": lr}, scenario={"validation": 0.1})))
    for command in ("report", "plot"):
        code, _, err = parabolic(command)
        assert code == 2
        assert "expected at least one; 2 runs with held-out examples" in err
    save_few_runs(store)
    note = "2 runs with held-out examples, such as trials of a search, left out; to see them: --where validation=0.1"
    assert parabolic("report")[0] == 0
    text = text_of(Path("report.html").read_text())
    assert "9 finished runs" in text
    assert "validation=0.1" not in text.replace(note, "")
    assert note in text
    assert note in parabolic("plot")[1]
    assert parabolic("report", "--where", "validation=0.1")[0] == 0
    text = text_of(Path("report.html").read_text())
    assert "2 finished runs" in text
    assert "such as trials" not in text


def test_learners_without_a_memory_are_compared_with_every_size_of_it(store):
    for memory in (50, 100):
        store.save(record(RunSpec("er", memory=memory), 80))
    store.save(record(RunSpec("sgd"), 20))
    store.save(record(RunSpec("sgd", scenario={"tasks": 2}), 20, tasks=2))
    methods = {scene.title: [method.name for method in scene.methods] for scene in find_scenes(store).scenes}
    assert methods == {
        "seq-digits, memory 50": ["er", "sgd"],
        "seq-digits, memory 100": ["er", "sgd"],
        "seq-digits, tasks=2": ["sgd"],
    }


def test_runs_of_a_preset_are_called_by_it_where_that_is_shorter(store, tmp_path, monkeypatch):
    monkeypatch.setenv("PARABOLIC_PRESETS", str(tmp_path))
    (tmp_path / "mine.toml").write_text('learner = "er"\n[settings]\nlr = 0.05\nreplay = 8\naverage = 0.9\n')
    (tmp_path / "broken.toml").write_text("learner = ")
    (tmp_path / "unknown.toml").write_text('learner = "er"\n[settings]\nreply = 8\n')
    plus_spec = load_preset("pcl-plus").spec(stream="seq-digits", memory=200)
    preset_spec = load_preset("mine").spec()
    for spec in (
        plus_spec,
        replace(plus_spec, options={**plus_spec.options, "repeats": 1}),
        replace(plus_spec, options={"lr": 0.05}),
        preset_spec,
        replace(preset_spec, options={**preset_spec.options, "replay": 9}),
        replace(preset_spec, options={"lr": 0.05}),
    ):
        store.save(record(spec))
    [scene] = find_scenes(store).scenes
    assert {method.name for method in scene.methods} == {
        "pcl-plus", "pcl-plus repeats=1", "pcl lr=0.05", "mine", "mine replay=9", "er lr=0.05"
    }  # fmt: skip


def test_of_presets_that_are_equal_a_run_is_called_by_the_one_for_its_stream(store, tmp_path, monkeypatch):
    monkeypatch.setenv("PARABOLIC_PRESETS", str(tmp_path))
    for name, stream in {"first": "seq-digits", "then": "seq-blobs"}.items():
        settings = "[settings]\nlr = 0.05\nreplay = 8\n"
        (tmp_path / f"{name}.toml").write_text(f'learner = "er"\nstream = "{stream}"\n{settings}')
    for stream in ("seq-digits", "seq-blobs"):
        store.save(record(load_preset("first").spec(stream=stream)))
        store.save(record(replace(load_preset("then").spec(stream=stream), options={"lr": 0.05})))
    methods = {scene.stream: {method.name for method in scene.methods} for scene in find_scenes(store).scenes}
    assert methods == {"seq-digits": {"first", "er lr=0.05"}, "seq-blobs": {"then", "er lr=0.05"}}


OWN = """
from parabolic import ER
class Mine(ER):
    name = "my-er"
class Taken(ER):
    name = "er"
class Silent(Mine):
    pass
"""


def test_a_class_of_a_file_has_the_name_that_it_states_as_long_as_the_file_is_there(parabolic):
    store = Store("runs")
    Path("own.py").write_text(OWN)
    for number, class_name in enumerate(("Mine", "Taken", "Silent")):
        store.save(record(RunSpec(f"own.py:{class_name}"), 90 - 5 * number))
    store.save(record(RunSpec("er"), 50))
    [scene] = find_scenes(store).scenes
    assert [method.name for method in scene.methods] == ["my-er", "Taken", "Silent", "er"]
    for command in ("runs", "plot"):
        assert [parabolic(command, "--learner", name)[1].count("Mine") for name in ("er", "Silent")] == [0, 0]
        assert parabolic(command, "--learner", "my-er") == parabolic(command, "--learner", "Mine")
        assert parabolic(command, "--learner", "Taken")[1] != parabolic(command, "--learner", "er")[1]
    assert "1 run in runs" in parabolic("runs", "--learner", "MY-ER")[1]
    assert parabolic("report", "--learner", "my-er")[0] == 0
    Path("same.py").write_text(OWN)
    store.save(record(RunSpec("same.py:Mine"), 30))
    [scene] = find_scenes(store).scenes
    assert [method.name for method in scene.methods][::4] == ["own.py:Mine", "same.py:Mine"]
    store.path(RunSpec("same.py:Mine").key).rename("elsewhere")
    Path("own.py").unlink()
    [scene] = find_scenes(store).scenes
    assert [method.name.split()[0] for method in scene.methods] == ["Mine", "Taken", "Silent", "er"]


def test_a_file_is_read_anew_at_each_look_but_parsed_once_as_long_as_it_stays_the_same(store, tmp_path, monkeypatch):
    parsed, path = [], tmp_path / "own.py"
    recording_ast = {**vars(ast), "parse": lambda source: parsed.append(source) or ast.parse(source)}
    monkeypatch.setattr(sketches, "ast", SimpleNamespace(**recording_ast))
    for seed in range(30):
        spec = RunSpec("er", seed=seed, options={"lr": (1 + seed % 10) / 100})
        store.save(record(spec, 80))
        rename_in_file(store, spec.key, f"{path}:Mine")
    for name in ("one", "two"):
        path.write_text(f"from parabolic import ER\nclass Mine(ER):\n    name = '{name}'\n")
        [scene] = find_scenes(store, {"learner": name}).scenes
        assert len(results_of(scene).rows) == 10
        assert all(method.name.startswith(name) for method in scene.methods)
    assert len(parsed) == 2


def test_the_name_of_a_learner_is_asked_once_however_many_runs_it_has(monkeypatch):
    names_asked = []
    monkeypatch.setattr(runs, "name_of", lambda learner: names_asked.append(learner) or "mine")
    rows = [{"learner": f"{file}.py:Mine", "seed": seed} for file in "ab" for seed in range(50)]
    assert len(runs.select(rows, {"learner": "mine"})) == 100
    assert sorted(names_asked) == ["a.py:Mine", "b.py:Mine"]


def test_looking_at_runs_and_presets_runs_no_code_that_they_name(parabolic):
    """Of a stranger's runs, which may come with a file."""
    store = Store("runs")
    Path("presets").mkdir()
    Path("presets/theirs.toml").write_text('learner = "runs/own.py:Mine"\n[settings]\nlr = 0.01\n')
    for seed, names in enumerate(
        ({"learner": "runs/own.py:Mine"}, {"learner": "runs.own:Mine"}, {"stream": "runs/own.py:Mine"})
    ):
        spec = RunSpec("er", seed=seed)
        store.save(record(spec, 90))
        rename_in_file(store, spec.key, **names)
    Path("runs/own.py").write_text("open('ran', 'w')\n" + OWN)
    for command in (["runs"], ["runs", "--learner", "my-er"], ["report"], ["plot"], ["presets"]):
        code, output = parabolic(*command)[:2]
        assert code == 0, output
        assert not Path("ran").exists()
    assert "my-er" in Path("report.html").read_text()
    spec = RunSpec("er", seed=9)
    plan([spec], store.find, Estimates(store))
    assert not Path("ran").exists()


def test_a_learner_is_read_as_it_would_be_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("open('ran', 'w')")
    text = """
import parabolic
from parabolic import ER
from parabolic.learners.learner import ReplayLearner
from parabolic.options import option

RATE = 0.5

class Mine(parabolic.ReplayLearner):
    name = "mine"
    lr: float = 0.07
    weight: float = option(0.5, "weight", at_least=0)
    other: int = option(default=3, about="other")

class Further(Mine):
    sees_all = True
    weight: float = 0.25
    rate: float = option(RATE, "computed")

class Ours(ER):
    pass
"""
    for path in ("mine.py", "pack/inner.py"):
        Path(path).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert sketch_of("pack.inner:Mine") == sketch_of("mine.py:Mine")
    assert not Path("ran").exists()
    names = [f"mine.py:{name}" for name in ("Mine", "Further", "Ours")]
    for name, sketch in zip(names, [*map(sketch_of, names)], strict=True):
        find_learner(name)
        loaded = sketch_of(name)
        assert (sketch.name, sketch.sees_all) == (loaded.name, loaded.sees_all)
        assert sketch.defaults.keys() == loaded.defaults.keys()
        wrong = {option for option in loaded.defaults if sketch.defaults[option] != loaded.defaults[option]}
        assert wrong == {"rate"} & loaded.defaults.keys()
    assert [sketch_of(name).name for name in names] == ["mine", "", ""]
    assert [sketch_of(name).sees_all for name in names] == [False, True, False]
    for missing in ("mine.py:Gone", "gone.py:Mine", "gone.module:Mine", "\0.py:Mine", ":Mine", "a..b:Mine"):
        assert sketch_of(missing) is None
        assert name_of(missing) == missing.rpartition(":")[2]
        assert not sees_all(missing)


def test_what_learns_all_tasks_at_once_has_no_forgetting(store):
    skills = {"joint": 90, "er": 80, "sgd": 30}
    runs = {name: [record(RunSpec(name, seed=seed), skills[name]) for seed in range(3)] for name in skills}
    for run in (*runs["joint"], *runs["er"], *runs["sgd"]):
        store.save(run)
    [scene] = find_scenes(store).scenes
    compared = comparison(runs, title="three", seeds=3)
    for results in (compared, results_of(scene)):
        column_index = [column.title.startswith("forgetting") for column in results.columns].index(True)
        cells, judged = ([row[column_index] for row in rows] for rows in (results.rows.values(), results.judged))
        assert [cell.ours and cell.ours.n for cell in cells] == [None, 3, 3]
        assert [cell.mark for cell in judged] == ["", "best", "second"]
        assert [entry.mean for entry in next(lines(results)).entries][column_index] == "–"
        assert "joint learned all tasks at once: there is no forgetting, and AAA is" in legend(results)[-1]
    assert "joint" not in legend(comparison({"er": runs["er"]}, title="one", seeds=3))[-1]
    assert "On the earlier tasks sgd has lost" in in_words(runs)
    assert "On the earlier tasks sgd, which does worst of 3, has lost" in " ".join(headline(scene))
    figures = data_of(page_of(store))["figures"].values()
    [bars] = [figure["data"][0] for figure in figures if figure["data"][0]["type"] == "bar"]
    assert bars["y"] == ["er", "sgd"]
    assert len(bars["meta"]) == len(bars["x"]) == len(bars["marker"]["color"]) == 2


def test_runs_of_code_or_data_that_were_changed_since_have_no_mean_with_others(store):
    def save(seed, skill, hour, **made_by):
        run = record(RunSpec("er", seed=seed), skill)
        store.save(
            replace(run, environment={**run.environment, "finished": f"2026-01-02T{hour}:00:00+00:00", **made_by})
        )

    save(4, 90, "01", code="first", data="all")
    save(3, 20, "02", code="second", data="all")
    save(2, 30, "03", code="third", data="some")
    save(1, 80, "04", code="third", data="all")
    save(0, 80, "05")  # it does not say: as ever, it counts as one of the newest
    [scene] = find_scenes(store).scenes
    assert {method.name: list(method.runs) for method in scene.methods} == {
        "er": [0, 1], "er (older data)": [2], "er (older code)": [3], "er (older code 2)": [4]
    }  # fmt: skip


def test_failed_and_missing_runs_are_reported(store):
    save_few_runs(store)
    store.path(RunSpec("pcl", seed=1).key).joinpath("run.json").unlink()
    store.save_failure(RunSpec("pcl", seed=2), "never shown, for it is finished")
    store.save_failure(RunSpec("gem", seed=0), "the loss became nan", "Traceback ...")
    page = page_of(store)
    text = text_of(page)
    assert "8 finished runs, 1 failed" in text
    assert "pcl: Not run with seed 1, unlike others." in text
    assert "gem: failed with seed 0 (the loss became nan). Not run with seed 1, 2, unlike others." in text
    assert "(n=2)" in text
    assert "never shown" not in text
    assert data_of(page)["runs"][RunSpec("gem").key]["trace"] == "Traceback ..."


def test_every_number_leads_to_its_runs_their_command_versions_and_settings(store):
    save_few_runs(store)
    page = page_of(store)
    data = data_of(page)
    cells = re.findall(r'data-runs="([^"]+)"><b>([\d.]+)</b>', page)
    assert len(cells) == 3 * 4
    for keys, figure in cells[::4]:  # the first of each row is Acc
        runs = [data["runs"][key] for key in keys.split()]
        assert len(runs) == 3
        assert float(figure) == pytest.approx(mean(run["figures"][0] for run in runs), abs=0.06)
        for key, run in zip(keys.split(), runs, strict=True):
            assert data["surroundings"][run["around"]] == {
                name: str(value) for name, value in AROUND.items() if name != "finished"
            }
            spec = data["specs"][run["spec"]] | {"seed": run["seed"]}
            assert spec["options.lr"] == str(RunSpec(spec["learner"]).resolved()["options"]["lr"])
            assert run["folder"] == str(store.path(key))


def test_names_of_the_user_are_shown_as_text_wherever_they_stand(store):
    save_few_runs(store, 1)
    for seed in range(2):
        spec = RunSpec("er", seed=seed, memory=77)
        store.save(record(spec))
        rename_in_file(store, spec.key, learner=f"x.py:{EVIL}", stream=EVIL)
    store.save_failure(RunSpec("gem"), f"it said {EVIL}", EVIL)
    (store.root / EVIL.replace("/", "")).mkdir()
    (store.root / EVIL.replace("/", "") / "run.json").write_text("{")
    page = page_of(store, title=EVIL)
    assert "<script>alert" not in page
    assert page.count("</script>") == 3  # of the data, of Plotly and of our own
    assert text_of(page).count(EVIL) > 5


def test_the_page_needs_no_other_file_and_no_network(store):
    save_few_runs(store)
    page = re.sub(r"<script nonce=.*?</script>", "", page_of(store), flags=re.DOTALL)
    assert not re.search(r'(src|href|action)="(?!#|data:)', page)
    assert "url(" not in page
    assert "@import" not in page
    assert "default-src 'none'" in page


def test_ours_stands_beside_what_the_paper_has(store):
    for spec in Selection(("main",), ("pcl", "er"), seeds=2, quick=True).specs("main"):
        store.save(record(spec, 70, spec.scenario.get("tasks", 5)))
    page = page_of(store)
    page = page[page.index("Three streams, memory 1000") :]
    row = re.search(r'<th scope="row" data-value="PCL">.*?</tr>', page, re.DOTALL)[0]
    cell = re.search(r"<td.*?</td>", row, re.DOTALL)[0]
    keys = re.search(r'data-runs="([^"]+)"', cell)[1].split()
    specs = {spec.key: spec for spec in Selection(("main",), quick=True).runs}
    ours = [store.find(specs[key]).metrics["aaa"] for key in keys if store.find(specs[key])]
    assert len(ours) == 2
    assert f"{mean(ours):.2f} ± {stdev(ours):.1f}" in text_of(cell)
    assert "paper 64.55 ± 1.9" in text_of(cell)
    assert "none yet" in page  # of the methods that were not run
    assert "the paper's figures are for other data" in text_of(page)


def test_bounds_are_drawn_from_beside_the_runs_and_from_their_own_folder(store, tmp_path):
    save_few_runs(store, 2)
    for seed in range(2):
        save_run_with_bounds(store, RunSpec("pcl", seed=seed))
    folder = tmp_path / "bounds"
    folder.mkdir()
    bounds = {"spec": RunSpec("er", stream="seq-blobs").resolved(), "rows": [bounds_row(task) for task in range(3)]}
    (folder / "a.json").write_text(json.dumps(bounds))
    (folder / "b.json").write_text('{"rows": [{}]}')
    page = page_of(store, bounds=folder)
    text = text_of(page)
    assert "pcl on seq-digits, memory 200 In theory, the loss on memory" in text
    assert "Mean of 2 runs (n = 2)." in text
    assert "er on seq-blobs" in text
    assert "b.json: it does not contain bounds" in text
    curves = [
        trace["y"]
        for figure in data_of(page)["figures"].values()
        for trace in figure["data"]
        if trace.get("name") == "first task: mean loss, all classes competing"
    ]
    assert curves == [[0.4, 0.5, 0.6, 0.7, 0.8], [0.4, 0.5, 0.6]]


def test_bounds_are_those_of_the_runs_that_are_asked_for_and_are_not_averaged_with_others(store, tmp_path):
    save_few_runs(store, 1)
    save_run_with_bounds(store, RunSpec("pcl"))
    folder = tmp_path / "bounds"
    folder.mkdir()
    rows = [bounds_row(task) for task in range(5)]
    for name, spec, eps in (
        ("the same run", RunSpec("pcl"), 0.01),
        ("another seed", RunSpec("pcl", seed=1), 0.01),
        ("other balls", RunSpec("pcl", seed=2), 0.25),
        ("another stream", RunSpec("pcl", stream="seq-blobs"), 0.01),
    ):
        content = {"spec": spec.resolved(), "eps": eps, "samples": 256, "rows": rows}
        (folder / f"{name}.json").write_text(json.dumps(content))

    def measured(**where):
        text = text_of(page_of(store, bounds=folder, where=where))
        return re.findall(r"(pcl on [^(]*?) In theory.*?Mean of (\d) run", text)

    digits = [("pcl on seq-digits, memory 200", "2"), ("pcl on seq-digits, memory 200 eps=0.25", "1")]
    assert sorted(measured()) == [("pcl on seq-blobs, memory 200", "1"), *digits]
    assert measured(stream="seq-digits") == digits
    assert measured(stream="seq-digits", balance="0") == digits
    assert measured(learner="er") == []
    assert measured(acc=str(accuracies(store, "er")[0])) == []


def test_a_folder_may_have_any_name(tmp_path):
    store = Store(tmp_path / os.fsdecode(b"runs \xff"))
    save_few_runs(store, 1)
    page = write_page(store, tmp_path / "page.html").read_text("utf-8")
    assert data_of(page)["runs"][RunSpec("er").key]["folder"] == str(store.path(RunSpec("er").key))


def test_a_run_has_no_preset_that_sets_what_did_not_exist_then(store):
    """An option that its record lacks has its default."""
    preset = load_preset("pcl-seq-digits")
    run = record(replace(preset.spec(), stream="seq-digits"))
    options = {name: value for name, value in run.spec["options"].items() if name != "average_part"}
    assert preset.settings["average_part"] != RunSpec("pcl").resolved()["options"]["average_part"]
    for key, kept in (("0" * 16, run.spec["options"]), ("1" * 16, options)):
        store.save(replace(run, key=key, spec={**run.spec, "options": kept}))
    names = [method.name for scene in find_scenes(store).scenes for method in scene.methods]
    assert sorted(names) == ["pcl-seq-digits", "pcl-seq-digits average_part=1.0"]


def test_what_is_measured_beside_bounds_has_a_column(store):
    save_run_with_bounds(store, RunSpec("pcl"))
    [run] = store
    measures = "parabolic.engine.theory:bounds, mine.py:own"
    run = replace(run, spec={**run.spec, "measure": measures}, measured={**run.measured, "own": [1.0] * 5})
    store.save(replace(run, metrics=run.summary))
    [scene] = find_scenes(store).scenes
    titles = [column.title for column in results_of(scene).columns]
    assert titles[-1] == "own"
    assert not any(title.startswith("bounds") for title in titles)


def test_bridges_are_images_of_what_the_stream_holds(store):
    save_few_runs(store, 1)
    page = page_of(store)
    images = re.findall(r'<img src="(data:image/png;base64,[^"]+)" alt="([^"]+)"', page)
    assert len(images) == 10
    assert images[0][1].endswith("100%")
    assert images[0][0] == images[5][0] != images[1][0]  # both start at the same example and part on the way


def test_only_bridges_of_images_are_said_to_have_labels_below(store):
    said = "PCL learns every point along the way"
    for spec, sentence in (
        (RunSpec("pcl"), f"{said}, with the label below it."),
        (RunSpec("pcl", "seq-blobs"), f"{said}."),
    ):
        store.save(record(spec))
        assert sentence in text_of(page_of(store, where={"stream": spec.stream}))


def test_an_image_in_the_page_is_the_image(tmp_path):
    image = torch.rand(3, 5, 7)
    path = tmp_path / "a.png"
    path.write_bytes(base64.b64decode(png(image).partition(",")[2]))
    with Image.open(path) as picture:
        pixels = torch.from_numpy(np.array(picture))
    assert (pixels == (image * 255).round().permute(1, 2, 0)).all()


DAMAGED = {
    "not JSON": "{",
    "no run": '{"key": 1}',
    "a figure that is none": {"metrics": {"acc": "high", "aaa": 1, "forgetting": 1}},
    "metrics that are a list": {"metrics": [1]},
    "an accuracy that is NaN": {"accuracy": [[float("nan")]]},
    "no accuracies": {"accuracy": []},
    "times that are words": {"train_seconds": ["long"]},
    "a seed that is none": {"spec": {"learner": "er", "stream": "a", "seed": "x"}},
    "surroundings that are none": {"environment": None},
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_run_is_named_and_stops_nothing(parabolic, kind):
    store, spec = Store("runs"), RunSpec("er")
    store.save(record(spec))
    damage = DAMAGED[kind]
    path = store.path(spec.key) / "run.json"
    path.write_text(damage if isinstance(damage, str) else json.dumps(json.loads(path.read_text()) | damage))
    code, out, _ = parabolic("report")
    assert code == 0
    assert "report.html" in out
    text = text_of(Path("report.html").read_text())
    assert "1 unreadable" in text
    assert f"{path}: " in text
    store.save(record(RunSpec("sgd"), 20))
    assert parabolic("report")[0] == 0
    assert "sgd: after 5 tasks its accuracy is" in text_of(Path("report.html").read_text())
    code, out, _ = parabolic("plot")
    assert code == 0
    assert f"Cannot be read: {path}" in out
    assert parabolic("runs")[0] == 0


@pytest.mark.parametrize(
    "settings",
    [{"batch": ["x"]}, {"later": {"a": 1}}, {"options": {"sigma_x": 1e308}}, {"options": {"times": {"a": 2}}}],
)
def test_whatever_settings_a_file_has_all_runs_can_be_seen(parabolic, settings):
    store, spec = Store("runs"), RunSpec("pcl")
    store.save(record(spec))
    path = store.path(spec.key) / "run.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"spec": content["spec"] | settings}))
    store.save(record(RunSpec("er")))
    for command in (["report"], ["plot"], ["runs"], ["runs", "--csv", "-"], ["runs", "--json"]):
        code, out, _ = parabolic(*command)
        assert (code, bool(out)) == (0, True)
    assert "er" in parabolic("runs")[1]


def test_with_no_runs_there_is_a_message_and_with_one_a_page(parabolic):
    for command in ("report", "plot"):
        code, out, err = parabolic(command)
        assert (code, out) == (2, "")
        assert err == (
            f"error: runs: got no {'finished ' * (command == 'plot')}runs in runs, expected at least one; "
            "train some: parabolic compare --learners pcl,er,sgd\n"
        )
    assert not Path("report.html").exists()
    store = Store("runs")
    store.save(record(RunSpec("er"), 80))
    code, out, _ = parabolic("report", "-o", "a/page.html")
    assert code == 0
    assert str(Path("a/page.html").resolve()) in out.replace("\n", "")
    text = text_of(Path("a/page.html").read_text())
    assert "er: after 5 tasks its accuracy is" in text
    assert "One seed (n = 1)" in text
    code, _, err = parabolic("report", "--where", "learner=pcl")
    assert code == 2
    assert "no runs that fit" in err
    code, _, err = parabolic("report", "--watch", "--every", "inf")
    assert code == 2
    assert "--every" in err


def test_a_plot_is_of_one_folder_of_runs(parabolic, monkeypatch):
    save_few_runs(Store("here"), 1)
    code, _, err = parabolic("plot", "here", "--runs", "elsewhere")
    assert (code, err) == (2, "error: --runs: got 'elsewhere', expected none with here; leave one of them out\n")
    monkeypatch.setenv("PARABOLIC_RUNS", "elsewhere")
    assert parabolic("plot", "here")[0] == 0


def test_runs_of_several_streams_are_not_mixed(parabolic):
    store = Store("runs")
    save_few_runs(store, 2)
    for seed in range(2):
        store.save(record(RunSpec("er", "seq-blobs", seed=seed), 90, tasks=3))
    assert parabolic("report")[0] == 0
    text = text_of(Path("report.html").read_text())
    assert "after 3 tasks its accuracy is" in text
    assert "after 5 tasks its accuracy is" in text
    code, _, err = parabolic("plot", "-o", "a.png")
    assert code == 2
    assert "runs of 2 kinds" in err
    assert "; choose by stream (seq-blobs, seq-digits)" in err
    assert parabolic("plot", "--stream", "seq-blobs", "-o", "a.png")[0] == 0
    assert parabolic("report", "--stream", "seq-blobs")[0] == 0
    assert "seq-digits" not in text_of(Path("report.html").read_text())


@pytest.mark.parametrize(
    ("other_specs", "message"),
    [
        ([{"scenario": {"tasks": 2}}], "choose by tasks (None, 2), for example --where tasks=2"),
        ([{"memory": 50, "epochs": 3}], "choose by memory (200, 50) and epochs (1, 3), for example "),
        ([{"memory": 50}, {"stream": "seq-blobs"}], "choose by stream (seq-blobs, seq-digits) and memory (200, 50), "),
    ],
)
def test_runs_of_several_kinds_are_told_apart_by_what_differs(parabolic, other_specs, message):
    store = Store("runs")
    for options in ({}, *other_specs):
        store.save(record(RunSpec("er", **options), tasks=options.get("scenario", {}).get("tasks", 5)))
    code, _, err = parabolic("plot", "-o", "a.svg")
    assert code == 2
    assert message in err
    assert parabolic("plot", "-o", "a.svg", *err.split("for example ")[1].split())[0] == 0


def test_the_page_of_five_hundred_runs_is_small(store, tmp_path):
    save_many_runs(store)
    path = write_page(store, tmp_path / "page.html")
    assert path.stat().st_size < 8e6
    assert "487 finished runs, 13 failed, 2 unreadable" in text_of(path.read_text())


def test_the_seeds_of_a_scene_are_counted_once_for_all_its_methods(monkeypatch):
    counts, tried = [], Method.tried.fget
    monkeypatch.setattr(Method, "tried", property(lambda self: counts.append(self) or tried(self)))
    run = record(RunSpec("er"))
    scene = Scene("", "", [Method(str(number), {number % 2: run}) for number in range(100)])
    assert [scene.missing(method) for method in scene.methods[:2]] == [[1], [0]]
    assert len(list(map(scene.missing, scene.methods))) == 100
    assert len(counts) <= 5 * 100


@pytest.mark.parametrize(("tasks", "shown"), [(100, range(1, 101)), (101, range(1, 102, 2)), (350, range(2, 351, 4))])
def test_a_heat_map_of_many_tasks_shows_some_of_them_up_to_the_last(store, tasks, shown):
    run = record(RunSpec("er"), tasks=tasks)
    store.save(run)
    page = page_of(store)
    [heat_map] = [trace for figure in data_of(page)["figures"].values() for trace in figure["data"] if "zmax" in trace]
    assert heat_map["x"] == heat_map["y"] == list(shown)
    expected = [
        [round(run.accuracy[row - 1][column - 1], 2) if column <= row else None for column in shown] for row in shown
    ]
    assert heat_map["z"] == expected
    assert (f"Of the {tasks} tasks at most 100 are shown" in text_of(page)) == (tasks > 100)


@pytest.mark.parametrize(("stream", "expected"), [("seq-blobs", []), ("seq-digits", [True] * 2)])
def test_the_paper_s_runs_are_only_listed_if_there_are_runs_on_its_streams(store, monkeypatch, stream, expected):
    listings, list_runs = [], Selection.runs.fget
    monkeypatch.setattr(Selection, "runs", property(lambda self: listings.append(self.quick) or list_runs(self)))
    _selected.cache_clear()
    store.save(record(RunSpec("er", stream=stream)))
    page_of(store)
    assert listings == expected


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("tuned", [False, True])
def test_the_streams_of_a_selection_are_those_of_its_runs(quick, tuned):
    selection = Selection(quick=quick, tuned=tuned)
    assert {spec.stream for spec in selection.runs} <= selection.streams
    assert tuned or {spec.stream for spec in selection.runs} == selection.streams


def test_curves_in_a_terminal(store):
    save_few_runs(store)
    [scene] = find_scenes(store).scenes
    plot_lines = plot_text(scene, width=60, height=21).plain.splitlines()
    assert plot_lines[0].startswith("seq-digits, memory 200")
    rows = plot_lines[1:22]
    assert [row[:5] for row in (rows[0], rows[10], rows[20])] == ["100 ┤", " 50 ┤", "  0 ┤"]
    assert all(len(row) <= 60 for row in rows)
    for index, method in enumerate(scene.methods):
        end = method.curves.mean(0)[-1]
        (line,) = [number for number, row in enumerate(rows) if row.rstrip().endswith(SIGNS[index])]
        assert line + 0.5 == pytest.approx((1 - end / 100) * 21, abs=0.6)
        assert plot_lines[24 + index].startswith(f"{SIGNS[index]} {method.name}: {method.summary('acc').mean:.1f} ± ")
    assert plot_lines[23].split() == ["1", "2", "3", "4", "5", "task"]


def test_curves_for_a_paper(parabolic):
    save_few_runs(Store("runs"))
    for suffix in ("png", "svg", "pdf"):
        assert parabolic("plot", "runs", "-o", f"a.{suffix}", "--style", "paper")[0] == 0
    assert Path("a.pdf").read_bytes().startswith(b"%PDF")
    with Image.open("a.png") as picture:
        assert picture.size[0] == pytest.approx(3.25 * 150, abs=1)
    svg = Path("a.svg").read_text()
    assert 'width="234pt"' in svg  # a column of 3.25 inches
    assert "er (n=3)" in svg
    assert "seq-digits" not in svg
    assert parabolic("plot", "--runs", "runs", "--output", "b.svg")[0] == 0
    assert "seq-digits" in Path("b.svg").read_text()
    code, _, err = parabolic("plot", "-o", "a.gif")
    assert code == 2
    assert ".svg" in err
    assert parabolic("plot", "--style", "papper")[2].endswith("did you mean 'paper'?\n")


def test_a_file_shows_every_method(store, tmp_path):
    rates = [0.01 * number for number in range(11, 26)]
    for lr in rates:
        store.save(record(RunSpec("er", options={"lr": lr})))
    [scene] = find_scenes(store).scenes
    assert "and 3 more with lower accuracy" in plot_text(scene).plain
    svg = draw_curves(scene, tmp_path / "all.svg", "paper").read_text()
    assert len(set(re.findall(r"lr=[\d.]+ \(n=1\)", svg))) == len(rates)


@pytest.mark.parametrize("style", ["paper", "screen"])
@pytest.mark.parametrize("methods", [1, 3, 12])
@pytest.mark.parametrize("words", [0, 3, 12])
def test_the_words_of_a_picture_lie_within_it(tmp_path, monkeypatch, style, methods, words):
    width, height, checked = (3.25, 2.4, []) if style == "paper" else (8, 5, [])

    def check(canvas, path, **_):
        path.touch()
        canvas.draw_without_rendering()
        [legend], [axis], room = canvas.legends, canvas.axes, canvas.bbox
        for artist in (legend, *legend.get_texts(), *([axis.title] if style == "screen" else [])):
            box = artist.get_window_extent()
            assert room.x0 <= box.x0 < box.x1 <= room.x1
            assert room.y0 <= box.y0 < box.y1 <= room.y1
        assert canvas.get_figwidth() == width
        assert axis.get_window_extent().height > 0.5 * height * canvas.dpi  # the curves have room, too
        checked.append(len(legend.get_texts()))

    monkeypatch.setattr(Figure, "savefig", check)
    settings = " ".join(["settings=0.125"] * words)
    all_methods = [Method(f"method-{number} {settings}", {0: record(RunSpec("er"))}) for number in range(methods)]
    draw_curves(Scene(f"a stream {settings}", "a stream", all_methods), tmp_path / "a.png", style)
    assert checked == [methods]


def test_a_watched_page_is_current_and_whole_at_any_moment(tmp_path):
    store, path = Store(tmp_path / "runs"), tmp_path / "report.html"
    command = [sys.executable, "-m", "parabolic", "report", "--watch", "--every", "0.2"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert until(path.exists)
        assert "There are no runs in this folder yet" in path.read_text()
        store.save(record(RunSpec("er", seed=0), 80))
        truncated = []

        def page_says(words):
            text = path.read_text()
            truncated.append(not text.endswith("</html>"))
            return words in text_of(text)

        assert until(lambda: page_says("1 finished run"))
        store.save_failure(RunSpec("sgd"), "no luck")
        assert until(lambda: page_says("1 failed"))
        assert data_of(path.read_text())["refresh"] == 0.2
        process.send_signal(signal.SIGINT)
        out = process.communicate(timeout=60)[0]
    assert process.returncode == 0
    assert f"The report: {path}" in out
    assert not any(truncated)
    assert data_of(path.read_text())["refresh"] is None


def test_a_page_that_cannot_be_written_is_an_error_with_a_remedy(store, tmp_path):
    save_few_runs(store, 1)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="name another file"):
        write_page(store, tmp_path / "file" / "page.html")


def test_the_code_of_the_page_on_reports(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard", reason="needs the extra `tensorboard`")
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parent.parent / "docs" / "report.md").read_text()
    names_of_all = {}
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(code, "report.md", "exec"), names := {})  # each on its own
        names_of_all |= names
    assert names_of_all["again"].accuracy == names_of_all["record"].accuracy
    forgotten = [run.metrics["forgetting"] for run in Store("runs") if run.spec["learner"] == "sgd"]
    assert names_of_all["lost"]["sgd"][3] == pytest.approx(np.mean(forgotten))
    assert "My runs" in text_of(Path("report.html").read_text())
    assert list(Path("tracked/tensorboard").iterdir())
    (csv_file,) = Path("tracked").glob("*.csv")
    assert re.findall(r"^task,(\d),worst,", csv_file.read_text(), re.MULTILINE) == ["1", "2", "3"]
