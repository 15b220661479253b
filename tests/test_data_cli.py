"""`parabolic data`, as a person uses it."""

import json
import re
import shutil
from dataclasses import replace

import made_up
import numpy as np
import official
import pytest
from PIL import Image

from parabolic import RunSpec, Stream, make_stream
from parabolic.experiments.store import is_of
from parabolic.streams import Cache, sources

TRAIN, TEST = official.pictures(100, 10), official.pictures(20, 10, seed=1)


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PARABOLIC_DATA", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "160")


@pytest.fixture
def archive(tmp_path):
    files = official.cifar10_files(TRAIN, TEST)
    return official.write_tar(tmp_path / "data" / "cifar-10-python.tar.gz", files, "cifar-10-batches-py").parent


def test_prepare_then_run(parabolic, archive):
    code, out, err = parabolic("data", "prepare", "cifar10", "--from", str(archive))
    assert (code, err) == (0, "")
    assert "100 training and 20 test images of 3 × 32 × 32, 10 classes" in out
    assert "not bit for bit those of the official archive" in out  # they are random
    prepared = json.loads(parabolic("data", "prepare", "cifar10", "--json")[1])
    assert (prepared["train"], prepared["as_published"]) == (100, False)
    run = ("run", "--learner", "sgd", "--stream", "seq-cifar10", "--set", "backbone=mlp", "--set", "tasks=2", "--json")
    code, out, _ = parabolic(*run, "--set", "corruption=uniform")
    assert code == 0
    assert json.loads(out)["spec"]["scenario"]["corruption"] == "uniform"
    assert len(json.loads(out)["accuracy"]) == 2


def test_prepare_says_what_a_run_on_your_own_data_is_like_and_how_to_choose(parabolic, archive, tmp_path):
    published_output = parabolic("data", "prepare", "cifar10", "--from", str(archive))[1]
    assert "By default a run uses" not in published_output  # the paper's settings are those of the paper
    (tmp_path / "mine").mkdir()
    for part, array in zip(("images", "labels"), TRAIN, strict=True):
        np.save(tmp_path / "mine" / f"train_{part}.npy", array)
    code, out, _ = parabolic("data", "prepare", "mine", "--from", "mine")
    assert code == 0
    [(network, batch, steps)] = re.findall(r"uses network (\w+) and batches of (\d+): about (\d+) steps", out)
    spec = RunSpec("er", "seq-mine").resolved()
    assert (network, int(batch)) == (spec["backbone"], spec["batch"])
    learned = sum(len(task.train_rows) for task in make_stream("seq-mine"))
    assert int(steps) == round(learned / spec["batch"])
    settings = dict(setting.split("=") for setting in re.findall(r"--set (\S+)", out))
    chosen = RunSpec.from_settings("er", settings, stream="seq-mine").resolved()
    assert (chosen["backbone"], chosen["batch"]) == ("convnet", 10)


@pytest.fixture
def save_dataset(tmp_path, monkeypatch):
    """A folder of `datasets` with the images and some columns more."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # before it is imported
    datasets = pytest.importorskip("datasets", reason="needs the extra `hf`")

    def save(name, **columns):
        types = {
            key: datasets.Value("string" if isinstance(values[0], str) else "int64") for key, values in columns.items()
        }
        rows = {"image": [Image.fromarray(image) for image in TRAIN[0]], **columns}
        features = datasets.Features({"image": datasets.Image(), **types})
        data = datasets.Dataset.from_dict(rows, features=features)
        data.save_to_disk(str(tmp_path / name))
        return data

    return save


def test_labels_of_the_hub_may_be_plain_numbers_in_a_column_that_can_be_named(parabolic, save_dataset, tmp_path):
    labels = [int(label) for label in TRAIN[1]]
    plain = Stream.from_arrays(TRAIN[0].transpose(0, 3, 1, 2), TRAIN[1], tasks=5).digest()
    rows = save_dataset("numbers", label=labels, id=list(range(100)))
    assert make_stream("hf:numbers").digest() == plain == Stream.from_dataset(rows, tasks=5).digest()
    save_dataset("only", kind=labels)
    assert make_stream("hf:only").digest() == plain
    save_dataset("several", kind=labels, half=[label // 2 for label in labels])
    code, _, err = parabolic("data", "prepare", "hf:several")
    assert code == 2
    assert "name the column with --label: kind, half" in err
    code, _, err = parabolic("data", "prepare", "hf:several", "--label", "knd")
    assert code == 2
    assert "--label: got 'knd', expected one of half, kind; did you mean 'kind'?" in err
    for column, classes in (("kind", 10), ("half", 5)):  # the other column is prepared though the data are there
        prepared = json.loads(parabolic("data", "prepare", "hf:several", "--label", column, "--json")[1])
        assert (prepared["label"], prepared["classes"]) == (column, classes)
    assert json.loads(parabolic("data", "prepare", "hf:several", "--again", "--json")[1])["label"] == "half"
    [file] = (tmp_path / "cache").glob("hf-*several-*/files-*/train_labels.npy")
    file.write_bytes(b"damaged")
    assert make_stream("hf:several").classes == 5  # prepared again, from the same column


@pytest.mark.parametrize("options", [[], ["--label", "breed"]])
def test_labels_of_the_hub_that_are_words_are_refused_with_a_remedy(parabolic, save_dataset, options):
    save_dataset("words", breed=["cat"] * 100)
    code, out, err = parabolic("data", "prepare", "hf:words", *options)
    assert (code, out) == (2, "")
    assert "expected a column of class labels or whole numbers; dataset.class_encode_column('COLUMN')" in err


def test_a_run_on_data_that_were_replaced_is_trained_again(parabolic, tmp_path):
    for name, labels in (("some", TRAIN[1]), ("others", TRAIN[1][::-1])):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "train_images.npy", TRAIN[0])
        np.save(tmp_path / name / "train_labels.npy", labels)

    def prepare_mine(name):
        code, out, err = parabolic("data", "prepare", "mine", "--from", name)
        assert (code, err) == (0, "")
        return out

    def run_once():
        code, out, _ = parabolic("run", "--learner", "sgd", "--stream", "seq-mine", "--set", "backbone=mlp", "--json")
        assert code == 0
        return json.loads(out)

    assert "replaces" not in prepare_mine("some")
    first = run_once()
    assert first["environment"]["data"] == Cache().find("mine").content
    assert "replaces" not in prepare_mine("some")
    assert (run_once()["reused"], first["reused"]) == (True, False)
    assert f"It replaces other data of that name, from {tmp_path / 'some'}: runs on them" in prepare_mine("others")
    second = run_once()
    assert not second["reused"]
    assert second["environment"]["data"] == Cache().find("mine").content != first["environment"]["data"]
    assert run_once()["reused"]


def test_a_run_counts_where_its_data_are_not_here_or_it_does_not_say_which_it_saw(parabolic, archive):
    parabolic("data", "prepare", "cifar10", "--from", str(archive))
    spec = RunSpec("sgd", "seq-cifar10", backbone="mlp")
    record = made_up.record(spec)
    of_other_data = replace(record, environment={**record.environment, "data": "another"})
    assert is_of(record, spec)
    assert not is_of(of_other_data, spec)
    shutil.rmtree(Cache().root)
    assert is_of(of_other_data, spec)


def test_data_that_may_or_may_not_be_as_published_are_called_neither(parabolic, tmp_path):
    grey = [(images[..., 0], labels) for images, labels in (TRAIN, TEST)]
    official.write_folder(tmp_path / "idx", official.mnist_files(*grey))
    for name, as_published in (("mnist", False), ("fashionmnist", None)):
        code, out, _ = parabolic("data", "prepare", name, "--from", "idx")
        assert code == 0
        assert ("not bit for bit those of the official" in out) == (as_published is False)
        assert "By default a run uses" not in out
        assert json.loads(parabolic("data", "prepare", name, "--json")[1])["as_published"] is as_published


def test_list_says_what_is_here_and_what_could_be(parabolic, archive, monkeypatch):
    code, out, err = parabolic("data", "list")
    assert (code, err) == (0, "")
    for word in (
        "parabolic data prepare cifar100",
        "tinyimagenet",
        " mnist ",
        "prepare fashionmnist",
        "corruption_rate",
        "PARABOLIC_DATA",
    ):
        assert word in out
    parabolic("data", "prepare", "cifar10", "--from", str(archive))
    content = Cache().find("cifar10").content
    monkeypatch.setitem(sources.PUBLISHED, "cifar10", sources.replace(sources.PUBLISHED["cifar10"], content=content))
    np.save(archive / "train_images.npy", TRAIN[0])
    np.save(archive / "train_labels.npy", TRAIN[1])
    parabolic("data", "prepare", "mine", "--from", str(archive))
    listing = json.loads(parabolic("data", "list", "--json")[1])
    assert sorted(listing["prepared"]) == ["cifar10", "mine"]
    assert listing["prepared"]["cifar10"]["as_published"] is True
    assert listing["prepared"]["mine"]["as_published"] is None
    assert listing["scenario"]["corruption_rate"]["default"] == 0.5
    assert " yes " in parabolic("data", "list")[1]
    (Cache().root / "mine" / "data.json").write_text("{")
    listing = json.loads(parabolic("data", "list", "--json")[1])
    assert (sorted(listing["prepared"]), sorted(listing["damaged"])) == (["cifar10"], ["mine"])
    out = " ".join(parabolic("data", "list")[1].split())
    assert "Cannot be used: data 'mine': got a damaged data.json" in out
    assert "`parabolic data prepare mine --again`" in out


@pytest.mark.parametrize(
    ("stream", "options"),
    [
        ("seq-digits", []),
        ("seq-digits", ["--set", "corruption=shuffle", "--set", "times=12", "--set", "tasks=2"]),
        ("seq-digits", ["--set", "domain=rotation", "--set", "tasks=3"]),
        ("seq-blobs", ["--seed", "3"]),
    ],
)
def test_show_draws_a_picture(parabolic, tmp_path, stream, options):
    code, out, err = parabolic("data", "show", stream, *options)
    assert (code, err) == (0, "")
    assert f"{stream}.png" in out
    with Image.open(tmp_path / f"{stream}.png") as picture:
        assert np.asarray(picture.convert("L")).std() > 10  # something is on it
    assert [path.name for path in tmp_path.glob("*.png")] == [f"{stream}.png"]


def test_show_names_the_picture_by_what_is_on_it(parabolic, tmp_path):
    code, out, _ = parabolic("data", "show", "seq-digits", "--set", "stream=seq-blobs", "--set", "seed=3")
    assert code == 0
    assert "3 tasks, 6 classes: seq-blobs.png" in out
    picture = (tmp_path / "seq-blobs.png").read_bytes()
    parabolic("data", "show", "seq-blobs", "--seed", "3", "--output", "same.png")
    assert (tmp_path / "same.png").read_bytes() == picture
    assert not (tmp_path / "seq-digits.png").exists()


def test_show_takes_a_setting_of_pcl_by_its_full_name_too(parabolic, tmp_path):
    drawn = []
    for setting in ("sigma_x=0.3", "pcl.sigma_x=0.3", "sigma_x=0.1"):
        code, _, err = parabolic("data", "show", "seq-blobs", "--set", setting)
        assert (code, err) == (0, "")
        drawn.append((tmp_path / "seq-blobs.png").read_bytes())
    assert drawn[0] == drawn[1] != drawn[2]


def test_show_takes_colours_and_a_place(parabolic, archive, tmp_path):
    parabolic("data", "prepare", "cifar10", "--from", str(archive))
    code, out, _ = parabolic("data", "show", "seq-cifar10", "--output", "sub/a.png")
    assert code == 0
    assert "5 tasks, 10 classes" in out
    with Image.open(tmp_path / "sub" / "a.png") as picture:
        assert picture.size[0] > 1000


@pytest.mark.parametrize(
    ("arguments", "name", "remedy"),
    [
        (["prepare", "mine"], "--from", "pass it with --from"),
        (["prepare", "mine", "--from", "nowhere"], "--from", "an existing folder or archive"),
        (["prepare", "../mine", "--from", "."], "name", "letters"),
        (["prepare", "mine", "--from", ".", "--label", "y"], "--label", "a source with columns, hf:NAME"),
        (["show", "seq-digit"], "stream", "did you mean 'seq-digits'?"),
        (["show", "seq-cifar10"], "data", "parabolic data prepare cifar10"),
        (["show", "seq-digits", "--set", "corupt=1"], "--set", "did you mean 'corruption'?"),
        (["show", "seq-digits", "--set", "corruption_rate=2"], "corruption_rate", "at most 1"),
    ],
)
def test_bad_arguments_are_refused(parabolic, tmp_path, arguments, name, remedy):
    code, out, err = parabolic("data", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {name}: got ")
    assert remedy in err
    assert list(tmp_path.glob("*.png")) == []
