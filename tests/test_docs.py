"""The code in the pages works as pasted."""

import copy
import json
import os
import re
import runpy
import subprocess
import sys
import textwrap
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch
from avalanches import need_avalanche
from scipy import stats
from test_learners import frozen, same
from torch.nn.functional import cross_entropy

import parabolic
from parabolic import ER, MLP, InputError, Journal, ParabolicClassifier, RunSpec, Store, make_stream, run, train
from parabolic.engine import Callback, Diverged
from parabolic.experiments.paper import (
    METHODS,
    PLUS,
    SEEDS,
    Estimates,
    Selection,
    bound_tables,
    bounds_in,
    paper_tables,
)
from parabolic.experiments.records import BackedStore, Records
from parabolic.learners.pcl import ABLATIONS
from parabolic.learners.whole import left_behind
from parabolic.states import same_state
from parabolic.statistics import Summary, paired, welch

ROOT = Path(__file__).parent.parent


def blocks(page):
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def test_the_example_of_the_readme(capsys):
    (code,) = blocks("README.md")
    assert accuracy_of(code, capsys) > 60


def test_the_reference_is_that_of_the_code():
    """It is as its script writes it, and has every name that the package exports or that a page imports."""
    script = runpy.run_path(str(ROOT / "docs/reference.py"))
    assert script["PAGE"].read_text() == script["text"]()
    modules = [module for section in script["SECTIONS"] for module in section.names.items()]
    listed = {name for home, names in modules for name in (home.rpartition(".")[2], *names.split())}
    imported = {*parabolic.__all__}
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for names in re.findall(r"^from parabolic[\w.]* import ([\w, ]+)$", page.read_text(), re.MULTILINE):
            imported |= {*names.split(", ")}
    assert imported - listed == {"TRACKERS"}  # a list to add to


def test_the_learners_that_the_readme_offers_for_its_example(capsys):
    (code,) = blocks("README.md")
    page = " ".join((ROOT / "README.md").read_text().split())
    (preset,) = re.findall(r"`(load_preset\(.*?\))`", page)
    (imported,) = re.findall(r"`(from parabolic import load_preset)`", page)
    (decay, part) = re.findall(r"`(average=\S+)` with `(average_part=\S+)`", page)[0]
    (construction,) = re.findall(r"PCL\(.*\)", code)
    assert accuracy_of(f"{imported}\n{code.replace(construction, preset)}", capsys) > 85
    averaged = f"{construction[:-1]}, {decay}, {part})"
    assert accuracy_of(code.replace(construction, averaged), capsys) > 80


def accuracy_of(code, capsys):
    """What the README's example says, in percent."""
    torch.manual_seed(0)
    exec(compile(code, "README.md", "exec"), {})
    match = re.fullmatch(r"accuracy over all ten digits: (\d+)%\n", capsys.readouterr().out)
    assert match is not None
    return int(match[1])


def test_the_learner_of_contributing():
    (code,) = blocks("CONTRIBUTING.md")
    names = {"__name__": "pasted"}
    exec(compile(code, "CONTRIBUTING.md", "exec"), names)
    stream = make_stream("seq-digits")
    learner = names["WeightedER"](MLP(stream.shape, stream.classes), prepare=stream.prepare, weight=1)
    assert train(learner, stream, batch=10).accuracy > 40
    assert learner.lr == 0.05


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch, tmp_path):
    """What pages write is not to lie about where the tests are called."""
    monkeypatch.chdir(tmp_path)


def test_the_code_of_durability():
    for _ in range(2):  # as a program that is started again
        names = {"__name__": "pasted"}
        for code in blocks("docs/durability.md"):
            exec(compile(code, "docs/durability.md", "exec"), names)
        assert names["again"].steps == 0
        assert names["journal"].tasks == 2
    assert [path.name for path in sorted(Path("journal").glob("0*"))] == [
        f"{count:012d}.safetensors" for count in (100, 200, 250)
    ]


def run_blocks(page):
    names = {"__name__": "pasted"}
    for code in blocks(page):
        exec(compile(code, page, "exec"), names)
    return names


def test_the_code_of_pcl_plus():
    learner = run_blocks("docs/pcl-plus.md")["learner"]
    assert (learner.name, learner.repeats, learner.past.capacity) == ("pcl", 2, 1000)


def test_the_code_of_the_guide_to_own_data(capsys):
    names = run_blocks("docs/guides/own-data.md")
    assert "True\n" in capsys.readouterr().out  # what was kept is what was there
    assert names["shops"].score(names["columns"].transform(names["frame"]), names["labels"]) > 0.9
    assert ((names["logits"] > 0) == names["tags"][800:]).mean() > 0.7
    assert names["right"] > 0.25  # one of six by guessing
    assert names["accuracy"]["SGD"] < 35 < 40 < min(names["accuracy"]["PCL"], names["accuracy"]["ER"])


def test_the_code_of_the_guide_to_regression(capsys):
    run_blocks("docs/guides/regression.md")
    errors = re.findall(r"(\w+): (\S+) on the first half", capsys.readouterr().out)
    error = {name: float(value) for name, value in errors}
    assert max(error["pcl"], error["er"]) < 0.15 < 0.5 < error["sgd"]


@pytest.mark.parametrize("page", [path.relative_to(ROOT) for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]])
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#:]*)#?([^):]*)\)", (ROOT / page).read_text()):
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), f"{target}#{anchor}"


def anchors(page):
    """Its headings, as GitHub names them in links."""
    headings = re.findall(r"^#+ (.*)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_code_of_the_guide_to_monitoring(capsys):
    names = run_blocks("docs/guides/monitoring.md")
    looks = re.findall(
        r"^step ([\d,]+): loss .*; memory 200 of 200, ([23]) classes of", capsys.readouterr().out, re.MULTILINE
    )
    assert [(step, int(classes)) for step, classes in looks[4:6]] == [("500", 2), ("600", 3)]
    assert names["seen"][-1].bound is not None
    counts = names["model"].memory_counts()
    assert {*counts} == {"small", "medium", "large"}
    assert sum(counts.values()) == 200
    assert len(Path("monitor.jsonl").read_text().splitlines()) == 13  # it began, looked at ten and all, and ended


def test_the_code_of_the_guide_to_choosing():
    names = run_blocks("docs/guides/choosing.md")
    assert len(names["outcome"].records) == 4
    assert not names["outcome"].failures


def test_the_code_of_the_guide_to_methods_of_ones_own(capsys):
    names = run_blocks("docs/guides/own-method.md")
    percentages = [int(digits) for digits in re.findall(r"^(\d+) %", capsys.readouterr().out, re.MULTILINE)]
    assert len(percentages) == 11
    assert percentages[0] > 70
    assert min(percentages) > 50
    stream = names["stream"]
    own = {"prepare": stream.prepare, "augment": stream.augment}  # as `train` has given it to the other
    fresh = names["Anchored"](MLP(stream.shape, 10), memory=200, **own)
    assert left_behind(names["learner"], fresh) == []
    assert fresh.tasks == 5
    fresh = names["Contrastive"](MLP(stream.shape, 10), memory=200, **own)
    assert left_behind(names["contrastive"], fresh) == []
    for name, settings in (
        ("Aligned", {"average": 0.99, "average_part": 0.1}),
        ("GDumb", {"optimizer": "Adam", "lr": 0.003}),
    ):
        fresh = names[name](MLP(stream.shape, 10), memory=200, **own, **settings)
        assert left_behind(names[name.lower()], fresh) == []
    newest = names["Newest"](32)  # from Python, or as the policy of a class
    for memory, kind in ((32, names["NewestER"]), (newest, ER)):
        learner = kind(torch.nn.Linear(1, 4), memory=memory)
        for number in range(50):
            learner.observe(torch.tensor([[float(number)]]), [0])
        assert sorted(learner.past["x"].flatten().tolist()) == list(range(18, 50))
    chosen = names["chosen"]
    assert chosen.past["y"].bincount().tolist() == [20] * 10
    there = chosen.past["x"].data_ptr()
    chosen.end_task([(names["stream"][0].train.x[:10], torch.arange(10))])
    assert chosen.past["x"].data_ptr() == there  # rewritten in place
    assert [group["lr"] for group in names["slowly"].optim.param_groups] == [0.001, 0.01]


def test_the_code_of_the_guide_to_runs_of_ones_own():
    names = run_blocks("docs/guides/own-runs.md")
    assert names["state"].accuracy > 60
    assert names["data"].digest() == names["same"].digest()
    assert names["frozen"].body[1].num_batches_tracked == 0


def test_the_code_of_the_guide_to_metrics(capsys):
    names = run_blocks("docs/guides/metrics.md")
    out = capsys.readouterr().out
    plain, with_task = map(int, re.search(r"^(\d+) %, with the task told (\d+) %$", out, re.MULTILINE).groups())
    assert plain < with_task
    assert names["known"].task_matrix[-1].min() > 80  # of two digits each
    assert names["state"].accuracy > 60
    assert len(names["state"].measured["calibration"]) == 5
    assert (names["angled"].matrix[-1] == names["known"].matrix[-1]).all()  # ER's own step
    assert all(-1 <= value <= 1 for value in names["angled"].measured["angle"])
    stream, learner = names["stream"], names["angled"].learner
    own = {"prepare": stream.prepare, "augment": stream.augment}
    fresh = names["AngledER"](MLP(stream.shape, 10), memory=200, **own)
    assert left_behind(learner, fresh) == []
    assert fresh.cosines[1] == learner.steps - 1  # at the first there is nothing to recall
    assert [step for _, step, _ in names["norms"].norms] == list(range(20, 146, 20))


def defined(*wanted):
    """What the blocks of the guide to methods define in which these words are, without what they train."""
    names = {"__name__": "pasted", "torch": torch}
    for word in wanted:
        (code,) = (each for each in blocks("docs/guides/own-method.md") if word in each)
        exec(compile(code[: code.rindex("\n\n\n")], "docs/guides/own-method.md", "exec"), names)
    return names


GUIDE = ("import ReplayLearner", "class TwoViews", "class Anchored", "class Nearest", "class Contrastive")


@pytest.mark.parametrize("name", ["Anchored", "Contrastive", "Aligned", "GDumb"])
def test_the_methods_of_the_guide_learn_new_classes_in_an_estimator(name):
    kind = defined(*GUIDE, "class Aligned", "class GDumb")[name]
    model, rng = ParabolicClassifier(kind, batch_size=10, random_state=0), torch.Generator().manual_seed(0)
    for first in (0, 2, 4):  # its network is in float64
        y = first + torch.arange(40) % 2
        model.partial_fit(torch.randn(40, 6, generator=rng) + 3 * torch.nn.functional.one_hot(y, 6), y)
    assert model.predict_proba(torch.zeros(1, 6)).shape == (1, 6)


def test_the_last_layer_of_the_guide_to_methods_is_aligned_in_the_average_too():
    torch.manual_seed(0)
    learner = defined(*GUIDE, "class Aligned")["Aligned"](torch.nn.Linear(3, 4), memory=50, lr=1.0, average=0.9)
    for task in range(2):
        x, y = torch.randn(40, 3), 2 * task + torch.arange(40) % 2
        learner.observe(x, y, task=task)
        learner.end_task([(x, y)])
    for weight in (learner.model.weight, learner.averaged.weights["weight"]):
        norms = weight.norm(dim=1)
        assert norms[2:].mean().item() == pytest.approx(norms[:2].mean().item())


@pytest.mark.parametrize("optimizer", ["Adam", "SGD(momentum=0.9)"])
def test_the_network_of_the_guide_to_methods_that_starts_over_is_as_a_new_one(optimizer):
    kind, x, y = defined(*GUIDE, "class GDumb")["GDumb"], torch.randn(40, 3), torch.arange(40) % 4
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 4)
    used, new = (kind(copy.deepcopy(model), optimizer=optimizer, lr=0.01, average=0.9) for _ in range(2))
    used.observe(x, y, task=0)
    used.end_task([])
    used.start_over()
    for _ in range(5):
        for learner in (used, new):
            ER.descend(learner, learner.error(learner.model(x), y))
    assert torch.equal(used.model.weight, new.model.weight)
    assert torch.allclose(used.scores(x), new.scores(x), atol=1e-6)  # the average, which comes from other weights
    assert not torch.allclose(used.scores(x), used.model(x), atol=1e-3)


def test_the_candidates_that_the_guide_to_methods_learns_are_those_that_a_step_harms_most():
    """MIR, written naively: a copy of the network takes the step, with torch's own optimiser."""
    mir = defined("import ReplayLearner", "class TwoViews", "class MIR")["MIR"]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)).double()
    x, y = torch.randn(50, 3).double(), torch.randint(4, (50,))
    batch, recalled = {"x": x[:10], "y": y[:10]}, {"x": x[10:], "y": y[10:]}
    moved = copy.deepcopy(model)
    cross_entropy(moved(batch["x"]), batch["y"]).backward()
    torch.optim.SGD(moved.parameters(), lr=0.1).step()
    rises = []
    for one, label in zip(recalled["x"].split(1), recalled["y"].split(1), strict=True):
        rises.append((cross_entropy(moved(one), label) - cross_entropy(model(one), label)).item())
    worst = sorted(range(40), key=rises.__getitem__)[-5:]
    expected = cross_entropy(model(batch["x"]), batch["y"])
    expected += cross_entropy(model(recalled["x"][worst]), recalled["y"][worst])
    learner = mir(model, lr=0.1, harmed=5)
    assert torch.allclose(learner.loss(batch, recalled), expected, rtol=1e-12)


def test_the_memory_of_the_guide_to_methods_keeps_the_hardest_of_all():
    names = defined("import ReplayLearner", "class TwoViews", "class MIR", "class Newest", "class Hardest")
    memory, hard = names["Hardest"](20), torch.rand(200, generator=torch.Generator().manual_seed(0))
    for some in hard.split(8):
        memory.offer({"x": some, "hard": some})
    # Of the batch in which it became full, what no longer fitted was left out.
    there = torch.cat([hard[:20], hard[24:]])
    assert memory["x"].sort().values.equal(there.sort().values[-20:])
    with pytest.raises(InputError, match="expected one that does not need hard"):
        ER(torch.nn.Linear(1, 2), memory=names["Hardest"](20), replay=8)
    learner, fresh = (names["HardER"](torch.nn.Linear(3, 2), memory=20, replay=8) for _ in range(2))
    for _ in range(9):
        learner.observe(torch.randn(4, 3), torch.arange(4) % 2)
    assert left_behind(learner, fresh) == []


def test_the_rates_of_the_guide_to_methods_go_on_after_a_resume():
    cosine = defined("class TwoViews", "class Cosine")["Cosine"]
    learner, fresh = (cosine(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))) for _ in range(2))
    for _ in range(20):  # memory has as many as are recalled before that
        before = learner.phase()
        learner.observe(torch.randn(4, 3), torch.arange(4) % 2)
        assert learner.phase() != before  # else a captured step would leave the schedule behind
    assert left_behind(learner, fresh) == []
    slow, fast = fresh.schedule.get_last_lr()
    assert fast == pytest.approx(2 * slow)
    assert slow < learner.lr


def test_the_second_view_of_the_guide_to_methods_is_of_raw_examples():
    views, seen = defined("class TwoViews")["TwoViews"], []

    def augment(x, generator):
        seen.append(x)
        return x + torch.rand(x.shape, generator=generator)

    x = torch.randn(4, 3)
    views(torch.nn.Linear(3, 2), augment=augment).observe(x, torch.arange(4) % 2)
    assert [torch.equal(each, x) for each in seen] == [True, True]


class Faster(Callback):
    """Changes the training, as a schedule does."""

    def on_start(self, state):
        state.learner.optim.param_groups[0]["lr"] *= 5


def test_neither_callbacks_nor_files_that_code_reads_are_part_of_a_key(tmp_path):
    """As the pages tell."""
    (tmp_path / "net.py").write_text(
        "import torch\ndef net(shape, classes):\n    made = torch.nn.Linear(*shape, classes)\n"
        "    made.load_state_dict(torch.load('weights.pt'))\n    return made\n"
    )
    torch.save(torch.nn.Linear(2, 6).state_dict(), "weights.pt")
    spec, store = RunSpec("sgd", stream="seq-blobs", backbone="net.py:net"), Store("runs")
    changed, _ = run(spec, store, callbacks=[Faster()])
    torch.save(torch.nn.Linear(2, 6).state_dict(), "weights.pt")
    record, reused = run(spec, store)
    assert reused
    assert record.accuracy == changed.accuracy


def test_the_learner_of_the_guide_to_methods_is_one_of_a_file(tmp_path, parabolic):
    (tmp_path / "ace.py").write_text(blocks("docs/guides/own-method.md")[0])
    code, out, err = parabolic("run", "--learner", "ace.py:ERACE", "--stream", "seq-blobs")
    assert (code, err) == (0, "")
    assert out.startswith("ace.py:ERACE on seq-blobs")  # and nothing else: a file that is imported trains nothing


def test_the_stream_of_the_guide_to_runs_is_one_of_a_file(tmp_path, parabolic):
    (code,) = (each for each in blocks("docs/guides/own-runs.md") if "def mine(seed)" in each)
    (tmp_path / "mine.py").write_text(code)
    code, out, err = parabolic("compare", "--learners", "sgd", "--stream", "mine.py:mine", "--seeds", "1")
    assert (code, err) == (0, "")
    assert "After 5 tasks" in out


def test_the_words_of_the_guide_to_runs_are_learned_in_runs(tmp_path, parabolic):
    (code,) = (each for each in blocks("docs/guides/own-runs.md") if "class WordPCL" in each)
    mixed = code.replace("class WordPCL(PCL)", "class WordMixup(MixupER)").replace("import PCL,", "import MixupER,")
    (tmp_path / "words.py").write_text(code)
    (tmp_path / "mixed.py").write_text(mixed)
    asked = ("--stream", "words.py:sentences", "--set", "backbone=words.py:Reader", "--set", "batch=10")
    for learner, often in (("words.py:WordPCL", "1e-9"), ("mixed.py:WordMixup", "1e-9"), ("er", "60")):
        code, out, err = parabolic("run", "--learner", learner, *asked, "--checkpoint", often, "--json")
        assert (code, err) == (0, "")  # without a warning that it could not be resumed
        assert json.loads(out)["metrics"]["task_acc"] > 60
    for learner in ("pcl", "mixup"):
        assert "take the embedding out of the model" in parabolic("run", "--learner", learner, *asked)[2]


def test_two_settings_of_one_method_as_the_page_on_experiments_has_them(tmp_path):
    (code,) = re.findall(r"```\n(printf.*?)\n```", (ROOT / "docs/experiments.md").read_text(), re.DOTALL)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    small = f"{code} --stream seq-blobs --seeds 1 --workers 0 --json"
    listing = subprocess.run(
        ["bash", "-c", small], cwd=tmp_path, env={**os.environ, "PATH": path}, stdout=subprocess.PIPE
    )
    assert listing.returncode == 0
    assert [run["spec"]["options"]["lr"] for run in json.loads(listing.stdout)["runs"]] == [0.05, 0.2]


def test_the_code_of_the_guide_to_production(capsys):
    names = run_blocks("docs/guides/production.md")
    output = capsys.readouterr().out
    assert output.count("True\n") == 2
    erased = [int(count) for count in re.findall(r"(\d+) rows erased", output)]
    assert len(erased) == 2
    assert min(erased) > 0
    left = Journal.load("shops", model=names["Network"]()).past
    assert names["forget"](left, names["features"](names["theirs"])) == 0
    rows, y = zip(*names["labelled"](1000, 1010), strict=True)
    learner, rows, y = names["learner"], torch.cat(rows), torch.cat(y)
    predictions = learner.predict(names["features"](rows))
    recall = [(predictions == label)[y == label].float().mean().item() for label in range(3)]
    assert min(recall) > 0.5  # one in ten is of class 1, which lies between the others
    assert learner.past["y"].bincount().min() > 100  # balanced, however rare
    old, new = learner.past, names["carried_over"]("shops")
    wider = torch.nn.functional.pad(names["features"](rows), (0, 1))
    assert torch.allclose(new.scores(wider), learner.scores(wider[:, :-1]), atol=1e-5)
    assert (new.past.offered, len(new.past)) == (old.offered, len(old))
    assert torch.equal(new.past["y"], old["y"])
    with Journal("shops-2", new) as journal:  # as a program that is started again
        assert (journal.batches, new.steps) == (1, 1)
    again = names["learn"]("shops")
    assert again.steps == learner.steps == 400
    assert all(
        torch.equal(one, other) for one, other in zip(again.model.parameters(), learner.model.parameters(), strict=True)
    )
    bad = bad_batches(*next(names["labelled"](1000, 1001)))
    names["labelled"] = lambda first: bad
    capsys.readouterr()
    third = names["learn"]("shops")
    assert capsys.readouterr().out.count(" is left out: ") == len(bad)
    assert (third.steps, third.classes, Path(f"shops/{400 + len(bad):012d}.safetensors").exists()) == (400, 3, True)
    assert same(frozen(again.state_dict()), third.state_dict())


def test_the_table_of_the_guide_to_production_is_learned_as_if_nothing_had_happened():
    (code,) = (each for each in blocks("docs/guides/production.md") if "def learn_table" in each)
    exec(compile(code, "docs/guides/production.md", "exec"), names := {"__name__": "pasted"})
    for path, stops in (("whole", [400]), ("stopped", [150, 399, 400])):
        for last in stops:
            names["learn_table"](path, last)
    (count, columns, whole), (again, _, stopped) = names["resume"]("whole"), names["resume"]("stopped")
    assert count == again == 400
    assert same_state(whole.learner_.state_dict(), stopped.learner_.state_dict())
    assert whole.classes_.tolist() == stopped.classes_.tolist() == ["kept", "returned", "stolen"]
    frame, labels = names["sold"](1000, 1000)
    assert whole.score(columns.transform(frame), labels) > 0.8
    sold = names["sold"]
    wrong = [frame.drop(columns="price"), frame.assign(price=1e9)] * 55
    names["sold"] = lambda number: (wrong[number - 400], labels) if 400 <= number < 510 else sold(number)
    names["learn_table"]("whole", 520)  # batches without a column, or far off, are left out
    count, _, model = names["resume"]("whole")
    assert (count, model.learner_.steps) == (511, 401)


def bad_batches(rows, y):
    """Infinite in the end, or far off, with a class that is new; unknown shops, sizes that do not fit, wrong labels."""
    wrong = [(2, torch.inf), (3, 3e38), (4, 1e12), (0, 50.0), (0, -1.0), (0, torch.nan)]
    cells = [(rows.index_fill(1, torch.tensor(column), value), y + 5) for column, value in wrong]
    return [*cells, (rows[:0], y[:0]), (rows[:5], y), (rows[:, :4], y), (rows, y + 97), (rows, y - 1)]


def test_the_code_of_the_guide_to_avalanche():
    need_avalanche()  # skips, and says so, where it is not installed
    names = run_blocks("docs/guides/avalanche.md")
    assert names["found"]["Top1_Acc_Stream/eval_phase/test_stream"] > 0.6


def test_the_code_of_the_guide_to_promises():
    names = run_blocks("docs/guides/promises.md")
    torch.testing.assert_close(names["u"].mean, 1 + (1 - names["start"][:, 0] ** 2), atol=0.1, rtol=0)
    assert names["kept"].holds
    assert names["kept"].covered > 0.8
    assert names["ahead"].holds
    assert all(each.holds for each in names["three"].values())
    assert names["three"]["forgetful"].bound > 2 * names["kept"].bound > 2 * names["three"]["untrained"].bound
    assert names["found"].holds
    assert names["soon"] > names["peaked"].stated
    assert names["late"] < 0
    assert names["share"][2] > 0.8
    assert names["share"][64] == 0
    assert not names["unseen"].holds


def test_the_code_of_troubleshooting():
    names = run_blocks("docs/guides/troubleshooting.md")
    assert names["found"]["long"] < 60 < 70 < names["found"]["short"]


def test_a_step_that_diverges_is_bounded_as_troubleshooting_tells():
    stream = make_stream("seq-digits")

    def accuracy(**options):
        torch.manual_seed(0)
        return train(ER(MLP(stream.shape, 10), memory=200, lr=5, **options), stream, batch=10).accuracy

    with pytest.raises(Diverged, match=r"became nan in task 1, by step 29: lower lr \(now 5\) or set clip_norm"):
        accuracy()
    assert accuracy(clip_norm=0.1) > 60


def test_published_settings_are_those_of_the_tables():
    page = (ROOT / "docs/methods.md").read_text().split("## Published settings")[1].split("\n## ")[0]
    lines = re.findall(r"^\| ([^|]+) \| `(\w+)` \| ([\d.]+) \|([^|]*)\|([^|]*)\|$", page, re.MULTILINE)
    settings = paper_tables()["main"].settings
    documented = {row: (learner, f"lr={lr}{own}", there) for row, learner, lr, own, there in lines}
    rows = [row for row in METHODS if row not in ABLATIONS and row != PLUS]
    assert list(documented) == rows
    for row, (learner, own, there) in documented.items():
        for setting in settings:
            (spec,) = setting.specs(row, seeds=1)
            cells = own + there * (setting.stream == "seq-tinyimagenet")  # of two values the later one counts
            expected = dict(value_of(each) for each in cells.replace("`", " ").split())
            options = spec.resolved()["options"]
            assert spec.learner == learner
            assert {name: options[name] for name in expected} == expected, (row, setting.title)
            assert options["optimizer"] == "SGD"
            assert (options["average"], options["repeats"], spec.resolved()["batch"]) == (None, 1, 32)
            assert options.get("replay", 32) == expected.get("replay", 32)


def value_of(text):
    name, value = text.split("=")
    return name, value if name == "variant" else json.loads(value)


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda path: path.name)
def test_every_benchmark_tells_what_it_does_and_measures_nothing(path, monkeypatch, capsys):
    if path.name == "parts.py":
        pytest.importorskip("triton", reason="needs Triton, which torch has where there is CUDA")
    monkeypatch.syspath_prepend(path.parent)  # as of a script: some take parts from others
    monkeypatch.setattr(sys, "argv", [path.name, "--help"])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(path), run_name="__main__")
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: {path.name}")


def test_every_page_is_in_the_list_of_pages():
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")} - {"README.md"}
    assert pages <= {*re.findall(r"\]\(([^)]+)\)", (ROOT / "docs/README.md").read_text())}


def shown(runs, metric, diverged=0):
    """Ours as the pages have it."""
    if not runs:
        return ""
    ours = Summary.of([run.metrics[metric] for run in runs])
    count = f"n = {len(runs)}, {diverged} diverged" if diverged else f"n = {len(runs)}"
    spread = f" ± {ours.sd:.1f}" if len(runs) > 1 else ""
    return f"{ours.mean:.1f}{spread}" + (f" ({count})" if len(runs) < SEEDS else "")


@pytest.mark.parametrize(
    ("name", "places", "tuned"),
    [("main seq-cifar", (0, 1), False), ("main seq-tiny", (2,), False), ("main-tuned seq-cifar", (0, 1), True)],
)
def test_the_figures_of_the_results_are_those_of_the_records(name, places, tuned):
    """Each row of these tables, ours and the paper's, worked out again; a row with runs is there, no other is."""
    table, records = paper_tables()["main"], Records(ROOT / "results" / "records")
    page = (ROOT / "docs/results.md").read_text().replace("**", "")
    (page,) = re.findall(rf"<!-- {name} -->\n(.*?)<!-- end -->", page, re.DOTALL)
    lines = re.findall(r"^\| ([^|]+?) \|(.*)\|$", page, re.MULTILINE)
    documented = {row: [cell.strip() for cell in cells.split("|")] for row, cells in lines if row in METHODS}
    for row in METHODS:
        expected, seconds = [], []
        for place in places:
            specs = table.settings[place].specs(row, tuned=tuned or row == PLUS)
            ended = [run for spec in specs if (run := records.ended(spec))]
            runs = [run for run in ended if not run.diverged]
            for number, metric in enumerate(table.metrics):
                expected.append(shown(runs, metric, len(ended) - len(runs)))
                theirs = table.rows[row][2 * place + number].value if row in table.rows else None
                expected += [] if tuned else [f"{theirs.mean:.1f} ± {theirs.sd:.1f}" if theirs else ""]
            seconds += [fmean(sum(run.train_seconds) for run in runs)] if runs else []
        listed = row in table.rows or row in ("PCL (text)", PLUS)
        if seconds and listed and not (tuned and row == "PCL (text)"):  # which tuned is the same as PCL
            assert documented[row] == [*expected, f"{seconds[-1]:.1f}"], row
        else:
            assert row not in documented


def test_the_tables_of_the_results_are_as_the_records_have_them():
    written = runpy.run_path(str(ROOT / "benchmarks" / "results.py"))["written"]
    page, records = (ROOT / "docs/results.md").read_text(), Records(ROOT / "results" / "records")
    assert written(page, records) == page, "write them anew: python benchmarks/results.py"


def test_the_plot_of_the_readme_is_described_as_the_records_have_it():
    along = runpy.run_path(str(ROOT / "benchmarks" / "results.py"))["along"](Records(ROOT / "results" / "records"))
    ends = {method.name: method.curves.mean(0).round().astype(int) for method in along.methods}
    (description,) = re.findall(r"!\[(.*?)\]\(docs/curves.png\)", " ".join((ROOT / "README.md").read_text().split()))
    for words, name in {
        "PCL+ falls": "PCL+",
        "PCL with published settings": "PCL, published settings",
        "SGD": "SGD, published settings",
    }.items():
        assert f"{words} from {ends[name][0]} to {ends[name][-1]} %" in description


def test_uneven_classes_agree_with_the_paper_as_often_as_the_results_tell():
    even = runpy.run_path(str(ROOT / "benchmarks" / "results.py"))["even"](Records(ROOT / "results" / "records"))
    uneven, plain = zip(*((float(row[at]), float(row[at + 2])) for row in even for at in (3, 8)), strict=True)
    assert [sum(p < 0.05 for p in each) for each in (uneven, plain)] == [11, 0]
    page = " ".join((ROOT / "docs/results.md").read_text().split())
    assert "in all eighteen cases; with uneven classes, eleven of them are lower" in page


def test_leads_that_the_results_tell_of_are_those_of_the_records():
    """Of PCL+ over the best of the others on the CIFARs, in each column of a table: the smallest and the largest."""
    records, page = Records(ROOT / "results" / "records"), " ".join((ROOT / "docs/results.md").read_text().split())
    leads, rivals = {}, {}
    for name in ("main", "corrupt", "imbalance", "small_buffers", "buffers"):
        table = paper_tables()[name]
        for setting in (each for each in table.settings if each.stream != "seq-tinyimagenet"):
            specs = {row: setting.specs(row, tuned=True) for row in [*table.rows, PLUS]}
            rows = {row: [records.find(spec) for spec in each] for row, each in specs.items()}
            for metric in table.metrics:
                means = {
                    row: fmean(run.metrics[metric] for run in runs) for row, runs in rows.items() if runs and all(runs)
                }
                if ours := means.pop(PLUS, 0):
                    rivals[name, setting.title, metric] = best = max(means, key=means.__getitem__)
                    leads[name, setting.title, metric] = ours - means[best]

    def of(table):
        return [f"{lead:.1f}" for (name, *_), lead in leads.items() if name == table]

    low, *_, high = sorted(of("main"), key=float)
    assert f"leads every column by {low} to {high} points over the best other method" in page
    ten, hundred = of("corrupt")[:2], of("corrupt")[2:]
    assert f"by {ten[0]} and {ten[1]} points (AAA, Acc) on Seq-CIFAR-10, by {hundred[0]} and {hundred[1]}" in page
    low, *_, high = sorted(of("imbalance"), key=float)
    assert f"**Uneven classes**: by {low} to {high} points" in page
    small, large = of("small_buffers"), of("buffers")
    sentence = "by {} and {} with 50 slots (over {}), {} and {} with 100, {} and {} with 150 (both over {})"
    next_best = {each: "CLS-ER" if each == "CLSER" else each for each in rivals.values()}
    low, high = (
        {rivals["small_buffers", f"memory {size}", metric] for size in sizes for metric in ("aaa", "acc")}
        for sizes in ((50,), (100, 150))
    )
    assert sentence.format(*small[:2], *low, *small[2:], *(next_best[each] for each in high)) in page
    assert "by {} and {} with 200 slots, {} and {} with 600".format(*large) in page


@pytest.mark.parametrize(
    ("first", "second", "tuned", "columns", "metrics", "sentence"),
    [
        (
            "CLSER", "PCL", False, "main 1", "aaa acc",
            "by {0} and {1} points on Seq-CIFAR-100 (paired over seeds, p ≤ 0.002)",
        ),
        (
            "CLSER", "PCL", False, "main 0", "aaa acc",
            "by {0} and {1} on Seq-CIFAR-10, where that is not significant (p ≥ 0.053)",
        ),
        ("PCL", "CLSER", True, "main 2", "aaa acc", "behind CLS-ER by {0} and {1} points (p = 0.006 and 0.01)"),
        ("PCL", "MixupER", True, "main 2", "aaa", "ahead of MixupER by {0} points of AAA (p = 0.007)"),
        ("VRMCL", "PCL", True, "main 0", "aaa acc", "it is level with PCL (paired over seeds, p ≥ 0.50)"),
        (
            "VRMCL", "PCL", False, "corrupt 0 1", "aaa acc",
            "VR-MCL and PCL are level here too (paired over seeds, p ≥ 0.077)",
        ),
        ("CLSER", "PCL", False, "corrupt 0 1", "aaa acc", "{low} to {high} ahead of PCL (p ≤ 0.034)"),
        (
            "GEM", "AGEM", False, "buffers 0 2", "aaa acc",
            "by {0} and {1} points with 200 slots and by {2} and {3} with 1,000 (paired over seeds, p ≤ 0.032)",
        ),
        (
            "VRMCL", "ER-OBC", False, "small_buffers 0 1 2", "aaa acc",
            "level with ER-OBC's (paired over seeds, p ≥ 0.24)",
        ),
        (
            "VRMCL", "PCL", False, "small_buffers 0 1 2", "aaa",
            "behind PCL's by {low} to {high} points in AAA (p ≤ 0.03)",
        ),
        ("PCL", "ER", False, "main 2", "aaa", "ahead of ER by {0} points of AAA** (paired over seeds, p = 0.03)"),
        ("PCL", "CLSER", False, "main 2", "aaa acc", "by {0} points of AAA and {1} of Acc (p ≤ 0.001)"),
        ("PCL", "ER-OBC", False, "main 2", "aaa acc", "level with ER-OBC and VR-MCL in both figures (p ≥ 0.19)"),
        ("PCL", "VRMCL", False, "main 2", "aaa acc", "level with ER-OBC and VR-MCL in both figures (p ≥ 0.19)"),
        (
            "CLSER", "ER", False, "corrupt 2", "aaa acc",
            "{0} points of AAA and {1} of Acc ahead of ER (paired over seeds, p ≤ 0.001)",
        ),
        ("On-EWC", "SGD", False, "corrupt 2", "aaa acc", "no better than SGD: {0} and {1} points behind it (p ≤ 0.02)"),
        ("SI", "SGD", False, "corrupt 2", "aaa acc", "SI is level with SGD too (p ≥ 0.44)"),
        ("PCL", "ER", False, "corrupt 2", "aaa", "ahead of ER by {0} points of AAA (paired over seeds, p = 0.07)"),
        ("PCL", "ER", False, "corrupt 2", "acc", "and {0} of Acc (p = 0.03), level with ER-OBC"),
        ("PCL", "ER-OBC", False, "corrupt 2", "aaa acc", "level with ER-OBC (p ≥ 0.18)"),
        ("PCL", "CLSER", False, "corrupt 2", "aaa acc", "behind CLS-ER by {0} and {1} points (p ≤ 0.002)"),
        ("VRMCL", "ER", False, "corrupt 2", "aaa acc", "is level with ER (paired over seeds, p ≥ 0.075)"),
        ("VRMCL", "PCL", False, "corrupt 2", "aaa acc", "and with PCL (p ≥ 0.48)"),
        ("GEM", "SGD", False, "corrupt 2", "aaa acc", "is level with SGD** (p ≥ 0.08)"),
        ("PCL", "ER", False, "corrupt_buffers 0 1", "aaa acc", "by {low} to {high} points; three of the four"),
        ("PCL", "ER", False, "corrupt_buffers 1", "aaa acc", "are significant (paired over seeds, p ≤ 0.02"),
        ("PCL", "VRMCL", False, "corrupt_buffers 0", "aaa", "where it is {0} ahead (p = 0.04)"),
        (
            "PCL", "CLSER", False, "corrupt_buffers 0 1", "aaa acc",
            "and behind CLS-ER by {low} to {high} points (p ≤ 0.045)",
        ),
        (
            "Eu endpoints", "PCL", False, "ablation 2", "aaa acc",
            "*Eu endpoints* by {0} points of AAA and {1} of Acc (paired over seeds, p ≤ 0.001)",
        ),
        ("Max Loss", "PCL", False, "ablation 2", "aaa acc", "*Max Loss* by {0} and {1} (p ≤ 0.005)"),
        (
            "Min Loss", "PCL", False, "ablation 2", "aaa acc",
            "(*Min Loss*) gains {0} points of AAA and {1} of Acc here** (p ≤ 0.02)",
        ),
        ("One BB", "PCL", False, "ablation 2", "aaa acc", "and tempering are level with PCL (p ≥ 0.14)"),
        ("BB Tempering", "PCL", False, "ablation 2", "aaa acc", "and tempering are level with PCL (p ≥ 0.14)"),
        (
            "Min Loss", "PCL", False, "ablation_buffers 0 1", "aaa acc",
            "by {low} to {high} points, but in none of them significantly (p ≥ 0.068)",
        ),
        (
            "Middle 50% Loss", "PCL", False, "ablation_buffers 0 1", "aaa acc",
            "from PCL by at most {high} points and in no figure significantly (p ≥ 0.16)",
        ),
        (
            "Max Loss", "PCL", False, "ablation_buffers 0 1", "aaa acc",
            "behind PCL by {low} to 11.5 points (paired over seeds, p ≤ 0.02)",
        ),
        (
            "Eu endpoints", "PCL", False, "ablation_buffers 0 1", "aaa acc",
            "behind PCL by 2.6 to {high} points (paired over seeds, p ≤ 0.02)",
        ),
        ("PCL", "CLSER", True, "small_buffers 0 1 2", "aaa acc", "it is level with CLS-ER (p ≥ 0.068)"),
        ("PCL", "ER-OBC", True, "small_buffers 0 1 2", "aaa acc", "{low} to {high} points ahead of ER-OBC (p ≤ 0.04)"),
        ("PCL", "ER", True, "buffers 0", "aaa acc", "it is level with ER (p ≥ 0.63)"),
        ("PCL", "ER", True, "imbalance 0 1 2", "aaa acc", "it is behind ER by {low} to {high} points (p ≤ 0.007)"),
        ("PCL", "ER", True, "corrupt 2", "aaa acc", "on Seq-TinyImageNet it is level with ER (p ≥ 0.094)"),
        ("PCL", "CLSER", True, "corrupt 2", "aaa acc", "and CLS-ER (p ≥ 0.15)"),
        (
            "PCL+", "CLSER", True, "corrupt 2", "aaa",
            "on Seq-TinyImageNet by {0} over CLS-ER (paired over three seeds, p = 0.03)",
        ),
        ("PCL+", "PCL", True, "corrupt 2", "acc", "and {0} over PCL (p = 0.02)"),
        ("GEM", "VRMCL", True, "main 2", "acc", "has {0} points less Acc (p = 0.007)"),
    ],
)  # fmt: skip
def test_differences_are_told_as_the_records_have_them(first, second, tuned, columns, metrics, sentence):
    """Each, or the smallest and the largest; "p ≤" and "p ≥" are true of the p that scipy finds, before rounding."""
    page, records = " ".join((ROOT / "docs/results.md").read_text().split()), Records(ROOT / "results" / "records")
    name, *places = columns.split()
    gaps, chances = [], []
    for place in places:
        specs = [paper_tables()[name].settings[int(place)].specs(row, tuned=tuned) for row in (first, second)]
        runs = [two for each in zip(*specs, strict=True) if all(two := [records.find(spec) for spec in each])]
        for metric in metrics.split():
            one, other = zip(*[[run.metrics[metric] for run in two] for two in runs], strict=True)
            gaps.append(abs(fmean(one) - fmean(other)))
            chances.append(stats.ttest_rel(one, other).pvalue)
    written = sentence.format(*(f"{gap:.1f}" for gap in gaps), low=f"{min(gaps):.1f}", high=f"{max(gaps):.1f}")
    assert written in page
    for sign, *stated in re.findall(r"p ([≤≥=]) ([\d.]+\d)(?: and ([\d.]+\d))?", sentence)[:1]:
        for chance, bound in zip(chances, stated if sign == "=" else [stated[0]] * len(chances), strict=False):
            if sign == "=" and bound:
                assert f"{chance:.{len(bound) - 2}f}" == bound
            elif bound:
                assert chance <= float(bound) if sign == "≤" else chance >= float(bound)


SLOTS = "figures with 200 and 600 slots, not counting methods without a memory"


@pytest.mark.parametrize(
    ("name", "places", "figures", "skipped"),
    [
        ("main", (0, 1), "comparable figures in this table", ""),
        ("main", (2,), "comparable figures", ""),
        ("corrupt", (0, 1), "figures", ""),
        ("corrupt", (2,), "figures", ""),
        ("corrupt_buffers", (0, 1), SLOTS, "SGD SI On-EWC LWF"),
        ("buffers", (0, 1), SLOTS, "SGD SI On-EWC LWF"),
        ("ablation_buffers", (0, 1), "figures of variants with 200 and 600 slots", "PCL"),
        ("imbalance", (0, 1, 2), "figures with uneven classes", ""),
    ],
)
def test_how_many_figures_differ_from_the_paper_is_told_as_the_records_have_it(name, places, figures, skipped):
    page, records = " ".join((ROOT / "docs/results.md").read_text().split()), Records(ROOT / "results" / "records")
    table, verdicts = paper_tables()[name], []
    for row, published in table.rows.items():
        for place in places if row not in skipped.split() else ():
            runs = [run for spec in table.settings[place].specs(row) if (run := records.find(spec))]
            for number, metric in enumerate(table.metrics * (len(runs) > 1)):
                theirs = published[len(table.metrics) * place + number].value
                verdicts.append(welch(Summary.of([run.metrics[metric] for run in runs]), theirs).verdict)
    same, higher, lower = (verdicts.count(each) for each in ("no difference", "higher", "lower"))
    fewer = {0: "none is", 1: "one is"}.get(lower, f"{lower}( are)?")
    sentence = (
        f"{len(verdicts)} {figures}, {same} do not differ from the paper's, {higher} are higher and {fewer} lower"
    )
    assert re.search(f"Of the(se)? {sentence}", page)


def test_vrmcl_learns_the_newest_tasks_as_little_as_the_results_tell():
    page, records = " ".join((ROOT / "docs/results.md").read_text().split()), Records(ROOT / "results" / "records")

    def newest(row, place, tasks, *, tuned=False):
        """The accuracy on a task right after it, averaged over the last tasks and all seeds."""
        specs = paper_tables()["main"].settings[place].specs(row, tuned=tuned)
        runs = [run for spec in specs if (run := records.find(spec))]
        return fmean(accuracies[-1] for run in runs for accuracies in run.accuracy[-tasks:])

    on_tiny = [newest(row, 2, tasks=5) for row in ("VRMCL", "SGD", "PCL")]
    sentence = (
        "the last five tasks, its accuracy on the newest is {:.1f} % on average, where SGD has {:.1f} and PCL {:.1f}"
    )
    assert sentence.format(*on_tiny) in page
    assert f"on Seq-CIFAR-100 it is {newest('VRMCL', 1, tasks=3):.1f} % after the last three" in page
    assert f"in which all classes compete, and has {newest('VRMCL', 2, tasks=5, tuned=True):.1f} %" in page
    wrong = [records.find(spec) for spec in paper_tables()["corrupt"].settings[2].specs("VRMCL")]
    assert {accuracies[-1] for run in wrong for accuracies in run.accuracy[-8:]} == {0.0}
    assert "accuracy on the newest task is 0.0 % after each of the last eight tasks, in all seeds" in page


def test_tinyimagenet_is_told_as_the_records_have_it():
    """What PCL+ leads by, over the seeds that both have."""
    page, elsewhere = (" ".join((ROOT / "docs" / name).read_text().split()) for name in ("results.md", "pcl-plus.md"))
    table, records = paper_tables()["main"], Records(ROOT / "results" / "records")

    def stored(row, *, tuned=False, table=table):
        specs = table.settings[2].specs(row, tuned=tuned or row == PLUS)
        runs = [run for spec in specs if (run := records.find(spec))]
        return {metric: [run.metrics[metric] for run in runs] for metric in table.metrics}

    plus = stored(PLUS)
    alone = {
        row: fmean(
            sum(records.find(spec).train_seconds) for spec in table.settings[2].specs(row, tuned=row == PLUS)[:3]
        )
        for row in ("ER", "PCL", PLUS)
    }
    assert "On the first three alone ER took {:.1f} s, PCL {:.1f} and PCL+ {:.1f}".format(*alone.values()) in page

    def pairs(rival, plus=plus):
        return [[*zip(plus[metric], rival[metric], strict=False)] for metric in table.metrics]

    def leads(rival, plus=plus):
        return [f"{fmean(ours - theirs for ours, theirs in each):.1f}" for each in pairs(rival, plus)]

    def chances(rival, plus=plus):
        return [stats.ttest_rel(*zip(*each, strict=True)).pvalue for each in pairs(rival, plus)]

    published = stored("CLSER")
    sentence = "by {} points of AAA and {} of Acc over CLS-ER (p < 0.0001 and p = {:.3f})"
    assert sentence.format(*leads(published), chances(published)[1]) in page
    assert chances(published)[0] < 0.0001
    wrong = {row: stored(row, table=paper_tables()["corrupt"]) for row in ("CLSER", PLUS)}
    sentence = "behind PCL+ by {} and {} (over three seeds, p = {:.3f} and {:.2f})"
    assert sentence.format(*leads(wrong["CLSER"], wrong[PLUS]), *chances(wrong["CLSER"], wrong[PLUS])) in page
    tuned = {row: figures for row in table.rows if (figures := stored(row, tuned=True))["aaa"]}
    assert {*table.rows} == {*tuned}
    assert [row for row, figures in {**tuned, PLUS: plus}.items() if len(figures["aaa"]) != 3] == ["CLSER", PLUS]
    assert "with three seeds (`parabolic paper main --tuned --show`; CLS-ER and PCL+ have five)" in page
    assert "All fourteen methods have been tuned here" in page
    assert "the best of the fourteen other methods, all tuned there" in elsewhere
    assert all(max(tuned, key=lambda row: fmean(tuned[row][metric])) == "CLSER" for metric in table.metrics)
    next_best = "PCL+ leads** CLS-ER, the next best, by {} points of AAA (p < 0.0001) and by {} of Acc"
    assert next_best.format(*leads(tuned["CLSER"])) in page
    assert "it leads ER by {} and {} (p".format(*leads(tuned["ER"])) in page
    here, cifar = (
        {row: METHODS[row].tuned(f"seq-{name}") for row in table.rows} for name in ("tinyimagenet", "cifar100")
    )
    others = [row for row in table.rows if here[row].settings != cifar[row].settings]
    assert (len(table.rows), others) == (14, ["On-EWC", "LWF"])
    assert "for twelve of the fourteen, the best of the six trials is the one that is best on Seq-CIFAR-100" in page
    for row in others:
        trials = here[row].study["trials"]
        assert trials.index(max(trials, key=lambda trial: trial["score"])) == 3
        assert trials[3]["lr"] == min(trial["lr"] for trial in trials[1:])
    diverged = [trial["strength"] >= 10 for trial in here["On-EWC"].study["trials"] if trial["score"] == 0]
    assert diverged == [True] * 3


def test_how_often_long_steps_meet_a_ball_is_as_the_page_on_theory_says(capsys):
    page = (ROOT / "docs" / "theory.md").read_text()
    (code,) = re.findall(r"  ```python\n(.*?)  ```", page, re.DOTALL)
    torch.manual_seed(0)
    with pytest.warns(RuntimeWarning, match="too often"):
        exec(textwrap.dedent(code), {})
    shares = [float(line.split()[0]) for line in capsys.readouterr().out.splitlines()]
    long, short = map(float, re.findall(r"two radii (\S+) of them do, with steps of half a radius (\S+);", page)[0])
    assert shares == [pytest.approx(long, abs=0.011), pytest.approx(short, abs=0.011)]
    assert f"(0.4 / 0.53)⁸ = {(0.4 / 0.53) ** 8:.3f} would" in page  # (r/‖x‖)ᵈ⁻²


def test_what_the_results_say_of_the_bounds_is_so():
    page = " ".join((ROOT / "docs/results.md").read_text().split())
    by_seed = [bounds_in(run) for run in Records(ROOT / "results" / "records" / "bounds.jsonl")]
    looks = [look for run in by_seed for look in run]
    assert not any(look["forgetting.broken"] or look["forgetting.covered"] for look in looks)
    assert f"holds in all {len(looks)} cases" in page
    mean = {name: np.mean([[look[name] for look in run] for run in by_seed], 0) for name in looks[0]}
    ratios = mean["forgetting_bound"] / mean["forgetting.past.mean"]
    assert page.count(f"{min(ratios):.0f} to {max(ratios):.0f} times the loss that it bounds") == 2
    above = [run[-1]["forgetting.past.mean"] > run[-1]["forgetting.memory.mean"] for run in by_seed]
    assert (sum(above), len(above)) == (4, 5)
    assert "above the memory's mean in four of five seeds" in page
    broken = [task for run in by_seed for task, look in enumerate(run) if look["generalisation.broken"]]
    assert {*broken} == {0}
    assert f"broken in {len(broken)} of {len(looks)} cases**, both after the first task" in page
    for name, among_own in (("forgetting", "first_among_own"), ("generalisation", "last_among_own")):
        assert np.abs(mean[among_own] - bound_tables()[name].task).max() < 0.15
    assert "are within 0.15 of the paper's" in page


def test_how_much_is_done_is_as_the_results_say():
    records, page = Records(ROOT / "results" / "records"), " ".join((ROOT / "docs/results.md").read_text().split())
    estimates = Estimates(iter(records))
    for tuned in (False, True):
        selection = Selection(tuned=tuned)
        plan = selection.plans(BackedStore("none", records), estimates)["all"]
        done = {run.key: run for spec in selection.runs if (run := records.ended(spec))}.values()
        minutes = sum(sum(run.train_seconds) + sum(run.test_seconds) for run in done) / 60
        if tuned:
            sentence = f"With tuned settings {plan.done} of {plan.runs:,} are done, in {minutes:.0f} minutes"
            assert f"{sentence}, and the rest would take about {plan.seconds / 60:.0f}." in page
        else:
            assert f"Of the {plan.runs:,} runs of the paper's tables at published settings {plan.done} are done" in page
            sentence = (
                f"they took {minutes:.0f} minutes of one H200. The other {plan.runs - plan.done} would take about"
            )
            assert f"{sentence} {plan.seconds / 60:.0f} more" in page
    files = (ROOT / "results" / "records").glob("*.jsonl")
    diverged = sum(bool(run.diverged) for path in files for run in Records(path).every())
    assert diverged == 6
    assert "among its runs, of which six diverged" in page


def test_the_figures_of_the_readme_are_those_of_the_records():
    records, setting = Records(ROOT / "results" / "records"), paper_tables()["main"].settings[1]
    parts = runpy.run_path(str(ROOT / "benchmarks" / "plus.py"))["rows"]("seq-cifar100", 1000, SEEDS)
    rows = {
        "PCL, published settings": setting.specs("PCL"),
        "PCL, tuned, averaged weights": setting.specs("PCL", tuned=True),
        "ER, tuned likewise": setting.specs("ER", tuned=True),
        "best other method (CLS-ER), tuned likewise": setting.specs("CLSER", tuned=True),
        "ER with everything in `pcl-plus` except bridges": parts["no bridges (ER)"],
        "`pcl-plus`": parts["pcl-plus"],
    }
    page = (ROOT / "README.md").read_text().replace("**", "")
    theirs = [f"{figure.value.mean:.1f} ± {figure.value.sd:.1f}" for figure in paper_tables()["main"].rows["PCL"][2:4]]
    assert f"| PCL in the paper | {' | '.join(theirs)} | |" in page
    for row, specs in rows.items():
        runs = [records.find(spec) for spec in specs]
        seconds = fmean(sum(run.train_seconds) for run in runs)
        assert f"| {row} | {shown(runs, 'aaa')} | {shown(runs, 'acc')} | {seconds:.1f} |" in page


def test_some_rows_of_the_parts_of_pcl_plus_are_compared_with_the_whole_preset_as_in_the_table_of_all(
    monkeypatch, capsys, tmp_path
):
    monkeypatch.setenv("PARABOLIC_RECORDS", str(ROOT / "results" / "records"))

    def line_of_second_row(chosen):
        monkeypatch.setattr(sys, "argv", ["plus.py", "--rows", chosen, "--runs", str(tmp_path)])
        runpy.run_path(str(ROOT / "benchmarks" / "plus.py"), run_name="__main__")
        return next(line for line in capsys.readouterr().out.splitlines() if "no balance of" in line)

    assert line_of_second_row("1,3") == line_of_second_row("0,1,3")
    assert "[" in line_of_second_row("1,3")  # the interval of the difference


def test_the_figures_of_pcl_plus_are_those_of_the_records():
    rows = runpy.run_path(str(ROOT / "benchmarks" / "plus.py"))["rows"]
    records = Records(ROOT / "results" / "records")
    page = (ROOT / "docs/pcl-plus.md").read_text()
    runs_by_row = {
        row: [run for spec in specs if (run := records.find(spec))]
        for row, specs in rows("seq-cifar100", 1000, SEEDS).items()
    }
    for row, runs in runs_by_row.items():
        if not runs:
            assert f"| {row} |" not in page
            continue
        cells = []
        for metric in ("aaa", "acc"):
            ours, whole = ([run.metrics[metric] for run in each] for each in (runs, runs_by_row["pcl-plus"]))
            gap, summary = paired(ours, whole), Summary.of(ours)
            apart = f"{gap.mean:+.1f} [{gap.low:+.1f}, {gap.high:+.1f}]".replace("-", "−")
            cells += [f"{summary.mean:.1f} ± {summary.sd:.1f}", "" if row == "pcl-plus" else apart]
        (line,) = re.findall(rf"^\| {re.escape(row)} \|.*", page, re.MULTILINE)
        forgetting = fmean(run.metrics["forgetting"] for run in runs)
        assert [cell.strip() for cell in line.split("|")[2:-1]] == [*cells, f"{forgetting:.1f}"]
    seconds = [fmean(sum(run.train_seconds) for run in runs_by_row[row]) for row in ("pcl-plus", "no bridges (ER)")]
    assert "`pcl-plus` takes {:.1f} s to train, and without bridges {:.1f} s.".format(*seconds) in page


@pytest.mark.parametrize("balance", [0.5, 1.0])
def test_what_balance_does_with_few_examples_is_as_the_records_have_it(balance):
    rows = runpy.run_path(str(ROOT / "benchmarks" / "plus.py"))["rows"]
    records, cells = Records(ROOT / "results" / "records"), []
    for memory in (100, 150, 1000):
        runs = [records.find(spec) for spec in rows("seq-cifar100", memory, SEEDS, balance=balance)["pcl-plus"]]
        acc, aaa = (fmean(run.metrics[metric] for run in runs) for metric in ("acc", "aaa"))
        cells.append(f"{acc:.1f} ({aaa:.1f})")
    assert f"| `balance={balance:g}` | {' | '.join(cells)} |" in (ROOT / "docs/pcl-plus.md").read_text()
