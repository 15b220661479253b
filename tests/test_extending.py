"""A new learner is one file and no change elsewhere: done here, inside the package and outside."""

import ast
import importlib
import importlib.metadata
import json
import os
import pickle
import pkgutil
import shutil
import subprocess
import sys
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import parabolic
from parabolic import ER, InputError, RunSpec, Store, run
from parabolic.cli import COMMANDS, find_command
from parabolic.experiments import BackedStore, Records, execute, execute_fleet, write_records
from parabolic.experiments.code import own_code_of
from parabolic.experiments.execution import Yard
from parabolic.learners import find_learner, known_learners, registry
from parabolic.plugins import load_object

NEW = '''
"""Replay that weighs the past."""

from torch import Tensor
from torch.nn.functional import cross_entropy

from parabolic import ReplayLearner
from parabolic.memory import Batch
from parabolic.options import option


class WeightedER(ReplayLearner):
    """Experience replay with a weight on what is recalled."""

    name = "weighted"
    reference = "This test, 2025: On weights"

    weight: float = option(0.5, "weight of the recalled batch", at_least=0)

    def loss(self, batch: Batch, recalled: Batch | None) -> Tensor:
        loss = cross_entropy(self.model(batch["x"]), batch["y"])
        if recalled is None:
            return loss
        return loss + self.weight * cross_entropy(self.model(recalled["x"]), recalled["y"])
'''


def run_command(*arguments, cwd, path=None):
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | ({"PYTHONPATH": str(path)} if path else {})
    process = subprocess.run(
        [sys.executable, "-m", "parabolic", *arguments], capture_output=True, text=True, cwd=cwd, env=environment
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_a_file_in_the_folder_of_learners_is_a_learner(tmp_path):
    package = tmp_path / "src" / "parabolic"
    shutil.copytree(Path(parabolic.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "learners" / "weighted.py").write_text(
        NEW.replace("from parabolic import ReplayLearner", "from parabolic.learners.learner import ReplayLearner")
    )
    listing = json.loads(run_command("list", "--json", cwd=tmp_path, path=tmp_path / "src"))
    assert listing["learners"]["weighted"]["options"]["weight"]["default"] == 0.5
    out = run_command(
        "run",
        "--learner",
        "weighted",
        "--set",
        "weight=2",
        "--set",
        "backbone=mlp",
        "--json",
        cwd=tmp_path,
        path=tmp_path / "src",
    )
    assert json.loads(out)["spec"]["options"]["weight"] == 2


def test_a_file_anywhere_is_a_learner(tmp_path):
    (tmp_path / "mine.py").write_text(NEW)
    out = run_command(
        "compare",
        "--learners",
        "mine.py:WeightedER,sgd",
        "--seeds",
        "1",
        "--workers",
        "1",
        "--set",
        "weight=1",
        "--set",
        "backbone=mlp",
        cwd=tmp_path,
    )
    assert "│ weighted │" in out  # as the class calls itself
    assert "mine.py" not in out
    assert find_learner(f"{tmp_path}/mine.py:WeightedER").name == "weighted"
    assert "weighted" not in known_learners()


def test_a_run_by_code_that_was_changed_since_is_trained_again(tmp_path):
    file = tmp_path / "mine.py"
    settings = ("--seeds", "1", "--set", "backbone=mlp", "--workers", "0")
    arguments = ("compare", "--learners", "mine.py:WeightedER,sgd", *settings)

    def reused_and_accuracy():
        result = json.loads(run_command(*arguments, "--set", "weighted.weight=0.5", "--json", cwd=tmp_path))
        return result["reused"], result["runs"][0]["metrics"]["acc"]

    file.write_text(NEW)
    first, repeated = reused_and_accuracy(), reused_and_accuracy()
    assert (first[0], repeated) == (0, (2, first[1]))
    assert "self.weight" in NEW
    file.write_text(NEW.replace("self.weight", "0.1 * self.weight"))
    changed = reused_and_accuracy()
    assert changed[0] == 1  # SGD is as it was
    assert changed[1] != first[1]
    assert reused_and_accuracy() == (2, changed[1])


FACTOR = """
from parabolic import SGD

class Mine(SGD):
    def loss(self, *both):
        return {} * super().loss(*both)
"""


def test_a_file_that_is_edited_is_what_runs_in_the_same_process_too(tmp_path):
    """As in a notebook; the edit leaves the file as long, and within the second as old, as it was."""
    file, store = tmp_path / "mine.py", Store(tmp_path / "runs")
    records, yard = tmp_path / "records" / "a.jsonl", Yard()
    spec = RunSpec("sgd", stream="seq-blobs", backbone="mlp")

    def train_with(factor):
        file.write_text(FACTOR.format(factor))
        mine_spec = replace(spec, learner=f"{file}:Mine")
        assert store.find(mine_spec) is None
        assert BackedStore(tmp_path / "none", Records(records)).find(mine_spec) is None
        record, _ = run(mine_spec, store, device="cpu")
        ((_, by_fleet),) = execute_fleet(
            [mine_spec], device="cpu", yard=yard
        )  # as a worker does, which keeps its fleet
        assert by_fleet.accuracy == record.accuracy
        write_records([record], records)
        assert BackedStore(tmp_path / "none", Records(records)).find(mine_spec).steps == record.steps
        return record

    with_factor_1, with_factor_0 = train_with(1), train_with(0)
    assert with_factor_1.environment["code"] != with_factor_0.environment["code"]
    assert with_factor_1.accuracy == execute(spec, device="cpu").accuracy != with_factor_0.accuracy


def test_a_module_that_was_imported_counts_as_it_was(tmp_path, monkeypatch):
    """What runs is what was imported, whatever has become of its file."""
    file = tmp_path / "imported_once.py"
    file.write_text(FACTOR.format(1))
    monkeypatch.syspath_prepend(tmp_path)
    spec = RunSpec("imported_once:Mine")
    before = own_code_of(spec)
    file.write_text(FACTOR.format(0))
    assert before == own_code_of(spec) != ""


@pytest.mark.parametrize("module", ["", ".mine", "./mine", "..", "a b", "/tmp", "a..b"])
def test_what_is_no_module_is_refused_in_a_line(module):
    with pytest.raises(InputError, match="^learner: got .*expected module:name or file.py:name that can be imported"):
        find_learner(f"{module}:Mine")


def test_the_study_of_a_learner_of_ones_own_has_a_name(tmp_path):
    (tmp_path / "mine.py").write_text(NEW)
    args = ("--learners", "mine.py:WeightedER,sgd", "--stream", "seq-blobs", "--trials", "1", "--set", "backbone=mlp")
    run_command("tune", *args, cwd=tmp_path)
    assert {path.name for path in (tmp_path / "presets").iterdir()} == {
        "weighted-seq-blobs.toml", "sgd-seq-blobs.toml"
    }  # fmt: skip


def test_a_package_adds_learners_by_entry_point(monkeypatch):
    point = importlib.metadata.EntryPoint("borrowed", "parabolic.learners.er:ER", "parabolic.learners")
    monkeypatch.setattr("parabolic.learners.registry.entry_points", lambda group: [point])
    assert find_learner("borrowed") is parabolic.ER


def test_a_package_cannot_take_the_name_of_a_learner_of_ours(monkeypatch):
    point = importlib.metadata.EntryPoint("er", "parabolic.learners.sgd:SGD", "parabolic.learners")
    monkeypatch.setattr("parabolic.learners.registry.entry_points", lambda group: [point])
    registry._warn.cache_clear()
    assert find_learner("er") is parabolic.ER
    with pytest.warns(RuntimeWarning, match="the learner 'er' of .* is left out: the name is taken"):
        assert known_learners()["er"] is parabolic.ER


def test_a_package_that_is_broken_takes_no_learner_of_ours_away(monkeypatch):
    point = importlib.metadata.EntryPoint("broken", "no_such_module:Learner", "parabolic.learners")
    monkeypatch.setattr("parabolic.learners.registry.entry_points", lambda group: [point])
    assert find_learner("er") is parabolic.ER
    with pytest.raises(
        InputError, match=r"^learner: got 'broken', .* cannot be used \(No module named 'no_such_module'"
    ):
        find_learner("broken")


def test_a_package_that_is_broken_is_reported_once_and_left_out(tmp_path, parabolic, monkeypatch):
    """Installed as packages are, of which one can be imported and the others cannot."""
    points = "no_such_module:Mine", "announced_but_raises:Mine", "json:dumps", "parabolic.learners.er:ER"
    (tmp_path / "announced_but_raises.py").write_text("raise RuntimeError('no driver\\nand more')")
    metadata_folder = tmp_path / "badplug-1.0.dist-info"
    metadata_folder.mkdir()
    (metadata_folder / "METADATA").write_text("Metadata-Version: 2.1\nName: badplug\nVersion: 1.0\n")
    lines = [f"plug{number} = {value}" for number, value in enumerate(points)]
    (metadata_folder / "entry_points.txt").write_text("\n".join(["[parabolic.learners]", *lines]))
    monkeypatch.syspath_prepend(tmp_path)
    read_entry_points = importlib.metadata.entry_points
    monkeypatch.setattr("parabolic.learners.registry.entry_points", lambda group: read_entry_points(group=group))
    with pytest.warns(RuntimeWarning) as caught:
        learners = known_learners()
    assert [str(warning.message).partition(" (")[0] for warning in caught] == [
        f"the learner 'plug{number}' is left out: badplug cannot be used" for number in range(3)
    ]
    assert "(no driver): fix or remove it" in str(caught[1].message)
    assert learners["plug3"] is find_learner("plug3") is ER
    assert not {"plug0", "plug1", "plug2"} & learners.keys()
    code, out, err = parabolic("list", "--json")  # without a second warning, which would be an error
    assert (code, err) == (0, "")
    assert "plug3" in json.loads(out)["learners"]
    code, _, err = parabolic("run", "--learner", "plg3")
    assert code == 2
    assert "did you mean 'plug3'?" in err
    code, _, err = parabolic("run", "--learner", "plug1")
    assert code == 2
    assert err.startswith(
        "error: learner: got 'plug1', expected a learner, as badplug declares; badplug cannot be used"
    )
    assert parabolic("report")[2].startswith("error: runs:")


def test_streams_and_networks_of_ones_own(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "from parabolic import Stream\n"
        "def stream(seed):\n"
        "    g = torch.Generator().manual_seed(0)\n"
        "    y = torch.arange(200) % 4\n"
        "    return Stream.from_arrays(torch.randn(200, 5, generator=g) + 3 * y[:, None], y, tasks=2, seed=seed)\n"
        "def network(shape, classes):\n"
        "    return torch.nn.Linear(shape[0], classes)\n"
    )
    out = run_command(
        "run",
        "--stream",
        "mine.py:stream",
        "--set",
        "backbone=mine.py:network",
        "--set",
        "batch=20",
        "--json",
        cwd=tmp_path,
    )
    record = json.loads(out)
    assert len(record["accuracy"]) == 2
    assert record["spec"]["backbone"] == "mine.py:network"


def test_a_file_that_is_named_like_a_module_is_pointed_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_alone.py").write_text(NEW)
    with pytest.raises(parabolic.InputError, match=r"did you mean mine_alone\.py:WeightedER\?"):
        find_learner("mine_alone:WeightedER")


def test_a_network_is_made_by_a_function_of_shape_and_classes():
    with pytest.raises(parabolic.InputError, match=r"^backbone: .* called as backbone\(shape, classes\)"):
        parabolic.make_backbone("math:sqrt", (4,), 3)
    with pytest.raises(parabolic.InputError, match="^classes: got 'three', expected a whole number"):
        parabolic.make_backbone("mlp", (4,), "three")


def test_a_learner_without_a_loss_says_so():
    class Empty(parabolic.Learner):
        """Nothing yet."""

    with pytest.raises(NotImplementedError, match=r"Empty defines no loss\(batch, recalled\)"):
        Empty(torch.nn.Linear(2, 2)).observe(torch.zeros(1, 2), [0])


def test_what_few_need_is_not_imported_by_all():
    code = (
        "import sys; from parabolic.cli import COMMANDS, find_command\n"
        "commands = [find_command(name) for name in COMMANDS]\n"
        "print([name for name in ('scipy.spatial', 'sklearn') if name in sys.modules])"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "[]"


@pytest.mark.parametrize(("option", "expected"), [("--version", parabolic.__version__), ("--help", "Usage: parabolic")])
def test_the_version_and_the_list_of_commands_need_no_torch(option, expected):
    code = (
        "import sys; from parabolic.cli import main\n"
        f"sys.argv = ['parabolic', {option!r}]\n"
        "try:\n    main()\nfinally:\n    print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert expected in process.stdout
    assert process.stdout.endswith("\n[]\n")


def test_the_list_of_commands_says_what_each_says_of_itself():
    for name, (_, about) in COMMANDS.items():
        assert find_command(name).help.partition("\n\n")[0] == about, name


def test_every_public_name_is_found_in_the_part_that_has_it():
    """The type checker's imports, `__all__` and the table of `__getattr__` say the same."""
    tree = ast.parse(Path(parabolic.__file__).read_text())
    for_type_checkers, _ = [node for node in tree.body if isinstance(node, ast.If)]  # the other has `__getattr__`
    modules, *names = for_type_checkers.body
    for imported_name in modules.names:
        assert getattr(parabolic, imported_name.name) is importlib.import_module(f"parabolic.{imported_name.name}")
    imported = {f"{node.module}.{imported_name.name}" for node in names for imported_name in node.names}
    assert imported == {f"parabolic.{module}.{name}" for name, module in parabolic._HOMES.items()}
    assert sorted(parabolic._HOMES) == sorted(parabolic.__all__)
    for name, module in parabolic._HOMES.items():
        assert getattr(parabolic, name) is getattr(importlib.import_module(f"parabolic.{module}"), name)
        assert name in dir(parabolic)
    assert parabolic.metrics is importlib.import_module("parabolic.metrics")
    assert "import_module" not in dir(parabolic)  # what only its own code uses
    with pytest.raises(AttributeError, match="module 'parabolic' has no attribute 'PLC'") as error:
        parabolic.PLC  # noqa: B018
    assert (error.value.name, error.value.obj) == ("PLC", parabolic)  # Python suggests the nearest name then


def test_any_part_may_be_the_first_to_be_imported():
    """No module counts on what another one has imported; those within a package come after the package."""
    names = [module.name for module in pkgutil.iter_modules(parabolic.__path__, "parabolic.")]
    code = (
        "import os, sys, torch, numpy, scipy, sklearn.base, rich, typer\n"
        "for name in sys.argv[1:]:\n"
        "    if os.fork() == 0:\n"
        "        __import__(name); os._exit(0)\n"
        "    if os.wait()[1]: print(name)\n"
    )
    names += [f"parabolic.cli.{module_name.partition(':')[0]}" for module_name, _ in COMMANDS.values()]
    without_triton = [
        name for name in dict.fromkeys(names) if name.split(".")[1] not in ("kernels", "draws", "vectors")
    ]
    warning_filter = "ignore:This process:DeprecationWarning"  # from Python 3.12 on: that it has threads and forks
    process = subprocess.run(
        [sys.executable, "-W", warning_filter, "-c", code, *without_triton], capture_output=True, text=True, check=True
    )
    assert (process.stdout, process.stderr) == ("", "")


def test_no_module_is_hidden_by_what_its_package_offers():
    """Else `import parabolic.experiments.x as x` would give something else than the module."""
    packages = [module.name for module in pkgutil.walk_packages(parabolic.__path__, "parabolic.") if module.ispkg]
    assert "parabolic.report.page" in packages
    for name in ["parabolic", *packages]:
        package = importlib.import_module(name)
        modules = {module.name for module in pkgutil.iter_modules(package.__path__)}
        assert not modules & {*getattr(package, "__all__", ())}, name


def test_a_file_may_import_what_is_beside_it(tmp_path):
    """From any folder, and in the processes that train."""
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "the_weight_of_the_past.py").write_text("from torch.nn.functional import cross_entropy")
    learner_code = NEW.replace("torch.nn.functional import cross_entropy", "the_weight_of_the_past import *")
    (folder / "mine.py").write_text(learner_code)
    before = list(sys.path)
    assert find_learner(f"{folder}/mine.py:WeightedER").name == "weighted"
    assert sys.path == before
    arguments = ("--stream", "seq-blobs", "--seeds", "2", "--workers", "2", "--json")
    result = json.loads(run_command("compare", "--learners", "code/mine.py:WeightedER", *arguments, cwd=tmp_path))
    assert json.dumps(result).count("code/mine.py:WeightedER") >= 1


HELPER = """
from __future__ import annotations

from parabolic import SGD
from parabolic.options import option

Number{side} = float
SIDE, FACTOR = "{side}", {factor}

class Base(SGD):
    weight: Number{side} = option(1.0, "a weight", above=0)
"""

MINE = """
from parts import names
from helper import FACTOR, Base

class Mine(Base):
    side = names.SIDE

    def loss(self, *both):
        return FACTOR * super().loss(*both)
"""


@pytest.fixture
def two_folders(tmp_path):
    """The learners of two files, each of which imports a module and a package of the same names beside it."""
    for side, factor in (("a", 1), ("b", 0)):
        folder = tmp_path / side
        (folder / "parts").mkdir(parents=True)
        (folder / "parts" / "__init__.py").touch()
        (folder / "parts" / "names.py").write_text("from helper import SIDE")
        (folder / "helper.py").write_text(HELPER.format(side=side, factor=factor))
        (folder / "mine.py").write_text(MINE)
    return [f"{tmp_path}/{side}/mine.py:Mine" for side in "ab"]


def test_files_of_two_folders_have_each_their_own_helper(two_folders):
    first, second = map(find_learner, two_folders)
    assert (first.side, second.side) == ("a", "b")
    for learner, side in ((first, "a"), (second, "b"), (first, "a")):  # whichever was asked for last
        instance = learner(torch.nn.Linear(2, 2), weight=2)
        assert (instance.side, instance.weight) == (side, 2.0)
        assert pickle.loads(pickle.dumps(instance)).side == side
    assert [find_learner(path) for path in two_folders] == [first, second]  # and nothing is imported anew


def test_the_code_of_a_run_is_that_beside_its_file(two_folders, tmp_path):
    """Of both sides `helper` has its part in the hash, whichever was asked for last."""
    first, second = (RunSpec(path, stream="seq-blobs") for path in two_folders)
    hashes = [own_code_of(spec) for spec in (first, second, first, second)]
    assert hashes[:2] == hashes[2:]
    assert hashes[0] != hashes[1]
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "helper.py").write_text("from parabolic import make_stream")
    (tmp_path / "c" / "mine.py").write_text(
        "from helper import *\nstream = lambda seed: make_stream('seq-blobs', seed)"
    )
    before = own_code_of(RunSpec(two_folders[0], stream=f"{tmp_path}/c/mine.py:stream"))
    (tmp_path / "a" / "helper.py").write_text("")  # that of the learner, which is imported already
    assert own_code_of(RunSpec(two_folders[0], stream=f"{tmp_path}/c/mine.py:stream")) == before
    assert before not in hashes


LAYOUTS = {
    # the file of the learner and how it is named; what it imports; files that count, and files that do not
    "file": (
        "mine.py", "mine.py:Mine", "import gearing, json\nfrom parts import names\nfrom parts.more import X",
        ["gearing.py", "cogs.py", "late.py", "parts/names.py", "parts/more/__init__.py"],
        ["other.py", "parts/unused.py", "parts/__init__.py", "hints.py", "json.py", "venv/site-packages/far.py"],
    ),
    "module": (
        "mine.py", "mine:Mine", "import gearing",
        ["gearing.py", "cogs.py", "late.py"],
        ["other.py", "parts/names.py", "venv/site-packages/far.py"],
    ),
    "package": (
        "ours/methods/mine.py", "ours.methods.mine:Mine",
        "from .gearing import *\nfrom .. import names\nfrom ..more import X",
        ["ours/methods/gearing.py", "ours/methods/cogs.py", "ours/methods/late.py", "ours/names.py", "ours/more.py"],
        ["ours/methods/other.py", "other.py", "ours/__init__.py", "venv/site-packages/far.py"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_file_imports_of_ones_own_is_part_of_its_code(layout, tmp_path, monkeypatch):
    """Also what that imports in turn and what is imported within a function; not what nobody imports, nor a library."""
    file, learner, imports, relevant, irrelevant = LAYOUTS[layout]
    start = "from . " if layout == "package" else ""
    texts = dict.fromkeys([*relevant, *irrelevant], "X = 1\n")
    texts[file] = f"{imports}\n{FACTOR.format(1)}\ndef later():\n    {start}import late\n"
    texts[relevant[0]] = (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import hints\n"
        f"import sys\nsys.path.append('venv/site-packages')\nimport far\n{start}import cogs\n"
    )
    before = list(sys.path)

    def code_after_edit(edited=""):
        """As a process finds it that is started after the edit."""
        folder = tmp_path / (edited.replace("/", " ") or "as it was")
        for name, text in texts.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text + "# edited" * (name == edited))
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "path", [str(folder), *before])
        with patch.dict(sys.modules):
            return own_code_of(RunSpec(learner))

    assert {code_after_edit(file_name) for file_name in irrelevant} == {code_after_edit()}
    assert len({code_after_edit(), *map(code_after_edit, relevant)}) == 1 + len(relevant)


def test_all_that_a_spec_names_is_part_of_its_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = {
        "learner.py": FACTOR.format(1),
        "stream.py": "from parabolic import make_stream\nstream = lambda seed: make_stream('seq-blobs', seed)\n",
        "network.py": "from parabolic import MLP\ndef network(shape, classes):\n    return MLP(shape, classes)\n",
        "rule.py": "from torch.optim import SGD\nclass Rule(SGD):\n    pass\n",
        "one.py": "def one(state):\n    return 1\n",
        "two.py": "def two(state):\n    return 2\n",
    }
    settings = {"stream": "stream.py:stream", "backbone": "network.py:network", "measure": "one.py:one, two.py:two"}

    def code_after_edit(edited=""):
        for name, text in texts.items():
            Path(name).write_text(text + "# edited" * (name == edited))
        return own_code_of(RunSpec("learner.py:Mine", **settings, options={"optimizer": "rule.py:Rule"}))

    assert len({code_after_edit(), *map(code_after_edit, texts)}) == 1 + len(texts)
    assert own_code_of(RunSpec("er", stream="hf:user/set")) == ""  # the name of data, not of a module


def test_a_learner_derived_from_one_in_another_folder_counts_with_it(tmp_path, monkeypatch):
    base, derived = FACTOR.format(1), "from base_elsewhere import Mine as Base\n\n\nclass Mine(Base):\n    pass\n"
    for folder, name, text in (("a", "base_elsewhere.py", base), ("b", "mine.py", derived)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path / "a")
    assert own_code_of(RunSpec(f"{tmp_path}/b/mine.py:Mine")) == sha256((base + derived).encode()).hexdigest()


def test_a_helper_that_the_program_imported_by_a_link_to_its_folder_counts(tmp_path, monkeypatch):
    sources = {"helper_by_a_link.py": "GAIN = 1\n", "mine.py": FACTOR.format("1") + "import helper_by_a_link\n"}
    (tmp_path / "real").mkdir()
    for name, text in sources.items():
        (tmp_path / "real" / name).write_text(text)
    (tmp_path / "link").symlink_to("real")
    monkeypatch.syspath_prepend(tmp_path / "link")
    monkeypatch.setitem(sys.modules, "helper_by_a_link", importlib.import_module("helper_by_a_link"))
    expected = sha256("".join(sources.values()).encode()).hexdigest()
    assert own_code_of(RunSpec(f"{tmp_path}/link/mine.py:Mine")) == expected


def test_a_file_that_imports_nothing_of_its_own_has_the_code_that_it_had(tmp_path):
    """Finished runs of it must still be found: a hash of the file alone."""
    (tmp_path / "mine.py").write_text(NEW)
    (tmp_path / "other.py").touch()
    assert own_code_of(RunSpec(f"{tmp_path}/mine.py:WeightedER")) == sha256(NEW.encode()).hexdigest()
    layer = b"".join(Path(sys.modules[name].__file__).read_bytes() for name in ("torch.nn", "torch.nn.modules.linear"))
    assert own_code_of(RunSpec("er", backbone="torch.nn:Linear")) == sha256(layer).hexdigest()


def test_a_helper_counts_as_it_was_imported_even_by_a_file_that_failed(tmp_path):
    (tmp_path / "helper_of_one_that_failed.py").write_text("GAIN = 1")
    start = "import helper_of_one_that_failed as helper\n"
    (tmp_path / "mine.py").write_text(f"{start}raise ImportError('not yet')")
    spec = f"{tmp_path}/mine.py:Mine"
    with pytest.raises(InputError, match="not yet"):
        find_learner(spec)
    (tmp_path / "helper_of_one_that_failed.py").write_text("GAIN = 2")
    (tmp_path / "mine.py").write_text(start + FACTOR.format("helper.GAIN"))
    assert load_object("x", f"{tmp_path}/mine.py:helper").GAIN == 1
    sources = ["GAIN = 1", start + FACTOR.format("helper.GAIN")]
    assert own_code_of(RunSpec(spec)) == sha256("".join(sources).encode()).hexdigest()


def test_runs_are_trained_again_after_an_edit_of_what_their_file_imports(tmp_path):
    (tmp_path / "gains.py").write_text("GAIN = 1")
    (tmp_path / "mine.py").write_text("import gains\n" + FACTOR.format("gains.GAIN"))
    args = ("compare", "--learners", "mine.py:Mine", "--stream", "seq-blobs", "--set", "backbone=mlp", "--seeds", "1")

    def train_all():
        result = json.loads(run_command(*args, "--json", cwd=tmp_path))
        return result["reused"], result["runs"][0]["accuracy"]

    first = train_all()
    assert train_all() == (1, first[1])
    (tmp_path / "gains.py").write_text("GAIN = 0")
    reused, accuracy = train_all()
    assert reused == 0
    assert accuracy != first[1]


def test_runs_of_two_folders_are_trained_by_their_own_code(two_folders, tmp_path):
    names = ",".join(path.removeprefix(f"{tmp_path}/") for path in two_folders)
    args = ("compare", "--learners", names, "--stream", "seq-blobs", "--seeds", "1", "--set", "backbone=mlp", "--json")
    expected = [
        execute(RunSpec(path, stream="seq-blobs", backbone="mlp"), device="cpu").accuracy for path in two_folders
    ]
    assert expected[0] != expected[1]
    for number in ("0", "1"):  # here, and in one process for both
        result = json.loads(run_command(*args, "--workers", number, "--runs", f"runs{number}", cwd=tmp_path))
        assert [run["accuracy"] for run in result["runs"]] == expected


def test_a_file_that_asks_for_another_goes_on_with_its_own_helper(two_folders, tmp_path):
    (tmp_path / "b" / "other.py").write_text("from helper import SIDE")
    (tmp_path / "a" / "asks.py").write_text(
        "import helper\nfrom parabolic.plugins import load_object\n"
        f"other = load_object('other', '{tmp_path}/b/other.py:SIDE')\nimport helper as again\nfrom parts import names\n"
    )
    names = ("helper", "again", "names", "other")
    helper, imported_again, names_module, other_side = (
        load_object("x", f"{tmp_path}/a/asks.py:{name}") for name in names
    )
    assert (helper.SIDE, names_module.SIDE, other_side) == ("a", "a", "b")
    assert imported_again is helper


def test_what_a_file_imports_from_elsewhere_is_imported_once(tmp_path, monkeypatch):
    """Not so a module that is beside the file and yet was there before; nor one of a package in a folder below."""
    (tmp_path / "a" / "lib").mkdir(parents=True)
    (tmp_path / "a" / "lib" / "lies_below.py").touch()
    (tmp_path / "a" / "was_there_before.py").touch()
    (tmp_path / "b").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "a")
    monkeypatch.syspath_prepend(tmp_path / "a" / "lib")
    before = importlib.import_module("was_there_before")
    for side in "ab":
        (tmp_path / side / "mine.py").write_text("import lies_below, was_there_before\n")
    in_a, in_b = ([load_object("x", f"{tmp_path}/{side}/mine.py:{name}") for name in ("lies_below", "was_there_before")]
                  for side in "ab")  # fmt: skip
    assert in_a == in_b
    assert in_a[1] is before


def test_a_file_that_fails_leaves_the_places_of_modules_as_they_were(tmp_path):
    (tmp_path / "mine.py").write_text("import no_such_module_anywhere")
    before = list(sys.path)
    with pytest.raises(InputError, match="No module named 'no_such_module_anywhere'"):
        find_learner(f"{tmp_path}/mine.py:Mine")
    assert sys.path == before
