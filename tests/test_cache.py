"""Prepared data: the same from every source, whole or not there, whatever happens on the way."""

import errno
import json
import os
import resource
import signal
import stat
import subprocess
import sys
import time
from types import ModuleType, SimpleNamespace

import numpy as np
import official
import pytest
import torch
from PIL import Image

from parabolic import InputError, Stream, make_stream
from parabolic.streams import BENCHMARKS, Cache, data_folder, known_streams, load, prepare, prepared_streams, sources
from parabolic.streams.cache import Part, Raw

TRAIN, TEST = official.pictures(100, 10), official.pictures(20, 10, seed=1)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PARABOLIC_DATA", str(tmp_path / "cache"))
    return Cache()


def arrays(folder, train=TRAIN, test=TEST, **more):
    """A folder of arrays, images [n, height, width, 3]."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = {"train": train} | ({"test": test} if test else {})
    for part, (images, labels) in parts.items():
        np.save(folder / f"{part}_images.npy", images)
        np.save(folder / f"{part}_labels.npy", np.asarray(labels))
    return folder


def channels_first(images):
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2))


def expected_stream(**settings):
    """The stream that every source must give, made of arrays at hand."""
    return Stream.from_arrays(
        channels_first(TRAIN[0]), TRAIN[1], test=(channels_first(TEST[0]), TEST[1]), tasks=5, **settings
    )


def file_contents(folder):
    """All files but the locks, which are empty and stay."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"]
    return {path.relative_to(folder): path.read_bytes() for path in files}


# -- every source --------------------------------------------------------------------------------------------------


def write_official_tar(folder):
    return official.write_tar(
        folder / "cifar-10-python.tar.gz", official.cifar10_files(TRAIN, TEST), "cifar-10-batches-py"
    )


def write_extracted(folder):
    return official.write_folder(folder / "cifar-10-batches-py", official.cifar10_files(TRAIN, TEST)).parent


def write_arrays_within(folder):
    return arrays(folder / "cifar10").parent


def write_channels_first(folder):
    return arrays(folder, (channels_first(TRAIN[0]), TRAIN[1]), (channels_first(TEST[0]), TEST[1]))


@pytest.mark.parametrize(
    "write", [write_official_tar, write_extracted, arrays, write_arrays_within, write_channels_first]
)
def test_every_place_of_cifar10_gives_the_same_stream(tmp_path, write):
    prepared = prepare("cifar10", write(tmp_path / "source"))
    stream = make_stream("seq-cifar10", seed=3)
    assert stream.digest() == expected_stream(seed=3).digest()
    assert (prepared.train, prepared.test, prepared.classes, prepared.shape) == (100, 20, 10, (3, 32, 32))
    assert list(stream.class_names) == official.NAMES10


def write_images(folder, mode="RGB"):
    for part, (pixels, labels) in (("train", TRAIN), ("test", TEST)):
        for number, (image, label) in enumerate(zip(pixels, labels, strict=True)):
            path = folder / part / official.NAMES10[label] / f"{number:03d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).convert(mode).save(path)
    (folder / "train" / "bird" / "Thumbs.db").write_bytes(b"junk")
    return folder


def test_a_folder_of_images_gives_the_same_stream_under_a_name_of_ones_own(tmp_path):
    prepare("mine", write_images(tmp_path / "images"))
    stream = make_stream("seq-mine")
    assert stream.digest() == expected_stream().digest()
    assert list(stream.class_names) == official.NAMES10
    # Normalised by what the training images are, channel by channel.
    inputs = stream.prepare(torch.from_numpy(channels_first(TRAIN[0])))
    assert torch.allclose(inputs.mean((0, 2, 3)), torch.zeros(3), atol=1e-5)
    assert torch.allclose(inputs.std((0, 2, 3), correction=0), torch.ones(3), atol=1e-5)


def test_grey_images_stay_grey_and_one_in_colour_makes_all_so(tmp_path):
    folder = write_images(tmp_path / "images", mode="L")
    assert prepare("grey", folder).shape == (1, 32, 32)
    Image.fromarray(TRAIN[0][0]).save(folder / "test" / "truck" / "999.png")
    assert prepare("colour", folder).shape == (3, 32, 32)


def test_a_torch_dataset_gives_the_same_stream():
    class Pairs(torch.utils.data.Dataset):
        def __init__(self, images, labels, convert):
            self.images, self.labels, self.kind = images, labels, convert

        def __len__(self):
            return len(self.labels)

        def __getitem__(self, index):
            return self.kind(self.images[index]), self.labels[index]

    conversions = [Image.fromarray, lambda x: x.transpose(2, 0, 1), lambda x: torch.from_numpy(x).permute(2, 0, 1)]
    for convert in conversions:
        stream = Stream.from_dataset(Pairs(*TRAIN, convert), test=Pairs(*TEST, convert), tasks=5)
        assert stream.digest() == expected_stream().digest()
    for names in (("image", "label"), ("img", "fine_label"), ("pixels", "labels")):
        parts = [
            [dict(zip(names, pair, strict=True)) for pair in Pairs(*part, Image.fromarray)] for part in (TRAIN, TEST)
        ]
        assert Stream.from_dataset(parts[0], test=parts[1], tasks=5).digest() == expected_stream().digest()
    mixed = [(torch.zeros(3, 4), 0), (torch.zeros(4, 4), 1)]
    for bad_dataset, message in (
        (mixed, "item 1 of dataset: got .*expected an example like the first"),
        ([1, 2], "a pair"),
        (5, "length"),
        (
            torch.utils.data.DataLoader(mixed),
            "dataset: got .*DataLoader.*; pass a loader's data set; .*learner.observe",
        ),
        ([{"a": 1, "b": 2, "label": 0}], "item 0 of dataset: got columns a, b, label, .* image; give pairs: "),
        ([{"image": 1, "class": 0}], "item 0 of dataset: got columns image, class, "),
        ([{"image": torch.zeros(3), "label": "cat"}], "item 0 of dataset: got TypeError: .*a whole number"),
    ):
        with pytest.raises(InputError, match=message):
            Stream.from_dataset(bad_dataset)


def test_data_sets_that_number_their_classes_differently_are_refused(save_split):
    """torchvision's ImageFolder numbers the folders that it finds: without cats, the dogs are number 0."""

    class Folder(list):
        pass

    train, test = Folder((torch.zeros(3), i % 2) for i in range(20)), Folder((torch.zeros(3), 0) for _ in range(4))
    train.class_to_idx, test.class_to_idx = {"cat": 0, "dog": 1}, {"dog": 0}
    with pytest.raises(InputError, match="^test: got classes that are numbered differently, .* as those of dataset"):
        Stream.from_dataset(train, test=test, tasks=1)
    test.class_to_idx = {"cat": 0, "dog": 1}
    assert len(Stream.from_dataset(train, test=test, tasks=1)[0].test_rows) == 4
    rows = [save_split("any", *part, names=names) for part, names in ((TRAIN, ["a", "b"]), (TEST, ["b", "a"]))]
    with pytest.raises(InputError, match="^test: got classes that are numbered differently"):
        Stream.from_dataset(rows[0], test=rows[1])


def test_the_hub_s_format_gives_the_same_stream(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # before it is imported
    datasets = pytest.importorskip("datasets", reason="needs the extra `hf`")
    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=official.NAMES10)})

    def part(pixels, labels):
        rows = {"img": [Image.fromarray(image) for image in pixels], "label": [int(label) for label in labels]}
        return datasets.Dataset.from_dict(rows, features=features)

    datasets.DatasetDict({"train": part(*TRAIN), "test": part(*TEST)}).save_to_disk(str(tmp_path / "saved"))
    name = f"hf:{tmp_path}/saved"
    stream = make_stream(name)
    assert stream.digest() == expected_stream().digest()
    assert list(stream.class_names) == official.NAMES10
    assert make_stream(name).digest() == stream.digest()
    assert prepare("named", name).content == prepare(name).content
    monkeypatch.chdir(tmp_path)
    assert make_stream("hf:saved").digest() == stream.digest()
    (tmp_path / "other").mkdir()  # where a folder of that name holds something else
    datasets.DatasetDict({"train": part(*TEST), "test": part(*TEST)}).save_to_disk(str(tmp_path / "other" / "saved"))
    monkeypatch.chdir(tmp_path / "other")
    assert make_stream("hf:saved").digest() != stream.digest()
    with pytest.raises(InputError, match="hf:no/such-thing: got"):
        make_stream("hf:no/such-thing")


def test_data_of_any_name_are_a_stream_save_those_that_the_hub_s_name_stands_for(tmp_path, cache):
    prepare("hf-mine", arrays(tmp_path / "a"))
    assert make_stream("seq-hf-mine").digest() == expected_stream().digest()
    # As `hf:user/set` would be kept, and as it is kept where it is given another name.
    cache_name = sources._key("hf:user/set")
    with cache.lock(cache_name):
        for name in (cache_name, "hf-too"):
            cache.write(name, Raw(Part([channels_first(TRAIN[0])], TRAIN[1])), "hf:user/set")
    assert sorted(prepared_streams()) == ["seq-hf-mine", "seq-hf-too"]


def test_data_cannot_be_called_as_those_of_a_stream_that_comes_with_the_package(tmp_path, cache):
    """They would be prepared, and the stream of their name would be of other data."""
    embedded = [name.removeprefix("seq-") for name, entry in known_streams().items() if entry.data is None]
    assert "digits" in embedded
    for name in embedded:
        with pytest.raises(InputError, match=f"^name: got '{name}', expected another one: .*seq-{name} comes with"):
            prepare(name, arrays(tmp_path / "a"))
    assert cache.names() == []


def test_hidden_folders_and_files_are_no_data(tmp_path):
    source = write_images(tmp_path / "images")
    before = prepare("mine", source)
    for name in ("train/.ipynb_checkpoints", "train/__MACOSX", "test/.ipynb_checkpoints", ".git", "train/cat"):
        (source / name).mkdir(exist_ok=True)
        Image.fromarray(TRAIN[0][0]).save(source / name / "._copy.png")
        Image.fromarray(TRAIN[0][0]).save(source / name / ".copy.png")
    for name in ("train/.ipynb_checkpoints", "test/.ipynb_checkpoints"):
        Image.fromarray(TRAIN[0][0]).save(source / name / "copy.png")
    after = prepare("mine", source, again=True)
    assert (after.content, after.class_names) == (before.content, before.class_names)


def test_images_without_pixels_are_refused(cache):
    for size in ((20, 3, 0, 4), (0, 3, 4, 4)):
        raw = Raw(Part([np.zeros(size, np.uint8)], np.arange(20) % 2))
        with cache.lock("mine"), pytest.raises(InputError, match="train images: got .*expected at least one pixel"):
            cache.write("mine", raw, "an example")


def test_without_datasets_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"hf:x: got no `datasets`, .*pip install 'parabolic-cl\[hf\]'"):
        make_stream("hf:x")


class Split(list):
    """As much of a split of `datasets` as is read: a list of rows, and columns by name."""

    def __getitem__(self, key):
        return [row[key] for row in self] if isinstance(key, str) else super().__getitem__(key)

    def cast_column(self, column, feature_type):
        return self


@pytest.fixture
def save_split(tmp_path, monkeypatch):
    """Splits of `datasets` that are read as hf:x, whose rows have an image and a label."""
    hub, splits = ModuleType("datasets"), {}
    hub.Image, hub.ClassLabel = type("Image", (), {"__init__": lambda *_, **__: None}), type("ClassLabel", (), {})
    hub.load_dataset = lambda _: splits
    monkeypatch.setitem(sys.modules, "datasets", hub)

    def encoded(pixels):
        Image.fromarray(pixels).save(tmp_path / "a.png")
        return {"bytes": (tmp_path / "a.png").read_bytes(), "path": None}

    def save(name, images, labels, **label_type):
        split = Split({"image": encoded(pixels), "label": label} for pixels, label in zip(images, labels, strict=False))
        split.features = {"image": hub.Image(), "label": SimpleNamespace(dtype="int64", **label_type)}
        splits[name] = split
        return split

    return save


@pytest.mark.parametrize("labels", [[], [-1, -1], [0, None]])
def test_a_split_without_examples_or_labels_is_no_test_set(save_split, labels):
    save_split("train", *TRAIN)
    save_split("test", TEST[0], labels)
    assert prepare("mine", "hf:x").test == 0


def test_a_split_without_a_column_of_labels_is_no_test_set(save_split):
    save_split("train", *TRAIN)
    split = save_split("test", *TEST)
    split[:] = [{"image": row["image"]} for row in split]
    del split.features["label"]
    assert prepare("mine", "hf:x").test == 0


def test_splits_that_number_their_classes_differently_are_refused(save_split, cache):
    """`class_encode_column` numbers the words of each split by itself, and one may lack a class."""
    save_split("train", *TRAIN, names=official.NAMES10)
    save_split("test", TEST[0], [label - 1 for label in TEST[1] if label], names=official.NAMES10[1:])
    with pytest.raises(InputError, match="^hf:x: got other classes, .* in test than in train, .*; turn words into num"):
        prepare("mine", "hf:x")
    assert cache.find("mine") is None
    save_split("test", *TEST, names=official.NAMES10)
    assert prepare("mine", "hf:x").class_names == tuple(official.NAMES10)


def test_a_source_without_a_test_set_has_every_fifth_example_held_out(tmp_path):
    prepared = prepare("mine", arrays(tmp_path / "a", test=None))
    assert prepared.test == 0
    assert make_stream("seq-mine").digest() == Stream.from_arrays(channels_first(TRAIN[0]), TRAIN[1], tasks=5).digest()


def test_classes_that_do_not_divide_by_five_make_tasks_of_nearly_equal_size(tmp_path):
    prepare("seven", arrays(tmp_path / "a", official.pictures(70, 7), official.pictures(14, 7)))
    assert [len(task.classes) for task in make_stream("seq-seven")] == [2, 2, 1, 1, 1]
    prepare("three", arrays(tmp_path / "b", official.pictures(30, 3), official.pictures(6, 3)))
    assert [len(task.classes) for task in make_stream("seq-three")] == [1, 1, 1]


def test_the_benchmarks_are_those_of_the_paper(tmp_path):
    expected = {"seq-cifar10": (5, 10), "seq-cifar100": (10, 100), "seq-tinyimagenet": (20, 200)}
    for name, (tasks, classes) in expected.items():
        data, size = BENCHMARKS[name].data, 64 if "tiny" in name else 32
        train, test = official.pictures(classes, classes, size=size), official.pictures(classes, classes, 1, size)
        prepare(data, arrays(tmp_path / name, train, test))
        stream = make_stream(name)
        assert (len(stream), stream.classes, stream.name) == (tasks, classes, name)
        assert [task.classes for task in stream] == [
            tuple(classes_of_task) for classes_of_task in np.arange(classes).reshape(tasks, -1)
        ]
        assert (stream.augment.padding, stream.augment.flip) == (4, True)
        # Normalised as (x / 255 − mean) / std.
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (BENCHMARKS[name].mean, BENCHMARKS[name].std))
        x = torch.from_numpy(channels_first(train[0]))
        assert torch.allclose(stream.prepare(x), (x / 255 - mean) / std, atol=1e-5)


# -- the cache -----------------------------------------------------------------------------------------------------


def test_the_folder_is_the_user_s_or_the_one_that_is_named(monkeypatch, tmp_path):
    assert data_folder() == tmp_path / "cache"
    monkeypatch.delenv("PARABOLIC_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    if sys.platform == "linux":
        assert data_folder() == tmp_path / "xdg" / "parabolic"


def test_prepared_arrays_are_mapped_and_cannot_be_changed_through_the_map(tmp_path, cache):
    prepared = prepare("mine", arrays(tmp_path / "a"))
    _, train, _ = load("mine")
    assert isinstance(train.x, np.memmap)
    assert make_stream("seq-mine")[0].train.x.data_ptr() != 0
    train.x[:] = 0
    cache.read(prepared)
    np.testing.assert_array_equal(load("mine")[1].x, channels_first(TRAIN[0]))


@pytest.mark.parametrize(
    "scenario",
    [
        {},
        {"corruption": "uniform", "validation": 0.2},
        {"imbalance": 2, "blur": 0.5},
        {"domain": "rotation", "tasks": 10},
    ],
)
def test_a_stream_keeps_little_more_than_the_bytes_of_its_images(tmp_path, scenario):
    prepare("cifar10", arrays(tmp_path / "a"))
    stream = make_stream("seq-cifar10", **scenario)
    storages = {}
    for task in stream:
        for tensor in (*task.train, *task.test, task.train_rows, task.test_rows):
            if tensor is not None:
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    views = stream[0].train.views
    view_bytes = 0 if views is None else views.nbytes  # one for each task, however many images there are
    assert sum(storages.values()) - view_bytes < 1.2 * (TRAIN[0].nbytes + TEST[0].nbytes)


def test_what_is_there_is_not_prepared_again(tmp_path, monkeypatch):
    source = arrays(tmp_path / "a")
    prepared = prepare("mine", source)
    with monkeypatch.context() as patch:
        patch.setattr(sources, "open_source", None)
        assert prepare("mine") == prepare("mine", source) == prepared
    replaced = prepare("mine", arrays(tmp_path / "b", test=None))
    assert replaced.test == 0
    assert len(list((data_folder() / "mine").glob("files-*"))) == 1
    assert prepare("mine", source, again=True).content == prepared.content


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip_bit(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    stat = path.stat()
    path.write_bytes(bytes(data))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # not even the times tell


@pytest.mark.parametrize("file", ["train_images.npy", "test_labels.npy"])
@pytest.mark.parametrize("damage", [truncate, flip_bit, os.remove])
def test_damage_is_noticed_and_mended_from_the_source_or_refused(tmp_path, cache, damage, file):
    source = arrays(tmp_path / "a")
    prepare("mine", source)
    (path,) = cache.root.glob(f"mine/*/{file}")
    damage(path)
    assert make_stream("seq-mine").digest() == expected_stream().digest()
    (path,) = cache.root.glob(f"mine/*/{file}")
    damage(path)
    source.rename(tmp_path / "moved")
    with pytest.raises(InputError, match=f"data 'mine': got a damaged {file} .*`parabolic data prepare mine --again`"):
        make_stream("seq-mine")
    with pytest.raises(InputError, match="--from: got .*which no longer exists"):
        prepare("mine")
    prepare("mine", tmp_path / "moved")
    assert make_stream("seq-mine").digest() == expected_stream().digest()


def misspell_field(description):
    description["files"]["train_images.npy"]["sha266"] = description["files"]["train_images.npy"].pop("sha256")


def drop_file(description):
    del description["files"]["train_labels.npy"]


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize(
    "damage", [lambda description: description["mean"].__setitem__(0, 0.25), misspell_field, drop_file]
)
def test_a_changed_description_is_noticed_and_mended_from_the_source_or_refused(tmp_path, cache, damage, signed):
    source = arrays(tmp_path / "a")
    path = cache.root / "mine" / "data.json"

    def spoil():
        description = json.loads(path.read_text())
        damage(description)
        if not signed:
            del description["digest"]
        path.write_text(json.dumps(description))

    prepared = prepare("mine", source)
    spoil()
    if not signed and damage not in (misspell_field, drop_file):
        assert cache.find("mine").mean[0] == 0.25  # as of an earlier version, which had no digest
        return
    assert cache.find("mine") is None
    assert load("mine")[0].content == prepared.content
    assert (cache.find("mine").mean, make_stream("seq-mine").digest()) == (prepared.mean, expected_stream().digest())
    spoil()
    assert prepare("mine").mean == prepared.mean
    spoil()
    source.rename(tmp_path / "moved")
    with pytest.raises(
        InputError, match="data 'mine': got a damaged data.json .*`parabolic data prepare mine --again`"
    ):
        make_stream("seq-mine")
    with pytest.raises(InputError, match="--from: got .*which no longer exists"):
        prepare("mine")
    assert prepare("mine", tmp_path / "moved").mean == prepared.mean


def test_a_description_of_an_earlier_version_without_a_digest_is_accepted(tmp_path, cache):
    prepared = prepare("mine", arrays(tmp_path / "a"))
    path = cache.root / "mine" / "data.json"
    description = json.loads(path.read_text())
    del description["digest"], description["label"]
    path.write_text(json.dumps(description, indent=1))
    assert cache.find("mine") == load("mine")[0] == prepared
    assert cache.damaged("mine") is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"format": 99}'])
def test_a_damaged_description_counts_as_nothing(tmp_path, cache, text):
    prepare("mine", arrays(tmp_path / "a"))
    (cache.root / "mine" / "data.json").write_text(text)
    assert cache.find("mine") is None
    prepare("mine", tmp_path / "a")
    assert make_stream("seq-mine").digest() == expected_stream().digest()


@pytest.mark.parametrize(
    "part",
    [{"shape": [3, 4]}, {"shape": None}, {"mean": 3}, {"files": [1]}, {"files": {"a": {}}}, {"class_names": 5},
     {"folder": 7}],
)  # fmt: skip
@pytest.mark.parametrize("earlier", [False, True])
def test_a_description_with_a_damaged_part_counts_as_nothing(tmp_path, cache, part, earlier):
    prepare("mine", arrays(tmp_path / "a"))
    path = cache.root / "mine" / "data.json"
    description = json.loads(path.read_text()) | part
    if earlier:  # without a digest, which would give away any change
        del description["digest"]
    path.write_text(json.dumps(description))
    assert cache.find("mine") is None
    prepare("mine", tmp_path / "a")
    assert make_stream("seq-mine").digest() == expected_stream().digest()


def test_what_a_killed_process_left_beside_a_data_set_is_removed_and_nothing_else(tmp_path, cache):
    prepared = prepare("mine", arrays(tmp_path / "a"))
    folder = cache.root / "mine"
    (folder / f".data.json.{'0' * 16}").touch()
    (folder / "files-left").mkdir()
    (folder / "files-left" / "train_images.npy").touch()
    (folder / "notes.txt").touch()  # the user's own
    prepared_again = prepare("mine", tmp_path / "a", again=True)
    assert {path.name for path in folder.iterdir()} == {"data.json", prepared_again.folder, "notes.txt"}
    assert prepared_again.content == prepared.content


def test_what_is_not_prepared_says_how():
    with pytest.raises(InputError, match="data: got 'cifar10', .*`parabolic data prepare cifar10` downloads it"):
        make_stream("seq-cifar10")
    (Cache().root / "downloads").mkdir(parents=True)
    (Cache().root / "downloads" / "none").touch()  # which is nobody's archive
    with pytest.raises(InputError, match="data: got 'mine', .*`parabolic data prepare mine` --from FOLDER"):
        load("mine")
    with pytest.raises(InputError, match="--from: got nothing, expected the folder that holds mine"):
        prepare("mine")
    with pytest.raises(InputError, match="--from: got /no/such/place, which does not exist"):
        prepare("mine", "/no/such/place")
    with pytest.raises(InputError, match="name: got '../evil'"):
        prepare("../evil", "/")


# -- what goes wrong -----------------------------------------------------------------------------------------------


def mixed_sizes(folder):
    folder = write_images(folder)
    Image.fromarray(TRAIN[0][0][:30]).save(folder / "train" / "dog" / "zzz.png")
    return folder


def write_unreadable_image(folder):
    folder = write_images(folder)
    path = folder / "train" / "dog" / "050.png"
    path.write_bytes(path.read_bytes()[:60])
    return folder


def write_empty_class(folder):
    (write_images(folder) / "train" / "aardvark").mkdir()
    return folder


def write_class_only_tested(folder):
    (write_images(folder) / "test" / "zebra").mkdir()
    Image.fromarray(TEST[0][0]).save(folder / "test" / "zebra" / "0.png")
    return folder


def write_npz(folder):
    arrays(folder)
    with open(folder / "train_images.npy", "wb") as file:
        np.savez(file, TRAIN[0])
    return folder


UNKNOWN = "expected classes with training examples; remove"


@pytest.mark.parametrize(
    ("write", "name", "message"),
    [
        (mixed_sizes, "mine", "zzz.png: got 32 × 30 pixels, expected 32 × 32 pixels like the first image; resize"),
        (write_unreadable_image, "mine", "050.png: got .*expected an image that can be read"),
        (lambda f: arrays(f, (TRAIN[0], TRAIN[1] + 1)), "cifar10", "train labels: got 10 at 90, expected .* 0 to 9"),
        (lambda f: arrays(f, (TRAIN[0], TRAIN[1] - 1)), "mine", "train labels: got -1 at 0"),
        (lambda f: arrays(f, test=(TEST[0], TEST[1] + 5)), "cifar10", "test labels: got 10 at 10"),
        (lambda f: arrays(f, (TRAIN[0], TRAIN[1][:-1])), "mine", "train labels: got 99, expected one for each"),
        (lambda f: arrays(f, (TRAIN[0], TRAIN[1] * 0.5)), "mine", "train labels: got an array .* float64"),
        (lambda f: arrays(f, (TRAIN[0], TRAIN[1] * np.nan)), "mine", "train labels: got an array .* float64"),
        (lambda f: arrays(f, (TRAIN[0], TRAIN[1].astype(str))), "mine", "train labels: got an array .* <U"),
        (lambda f: arrays(f, (TRAIN[0] / 255, TRAIN[1])), "mine", "train_images.npy: got .*float64, expected bytes"),
        (lambda f: arrays(f, test=(TEST[0][:, :30], TEST[1])), "mine", "test images: got .*expected all of one size"),
        (lambda f: (arrays(f), truncate(f / "train_images.npy"))[0], "mine", "train_images.npy: got .*numpy.save"),
        (lambda f: arrays(f, (TRAIN[0], TRAIN[1] + 2**40)), "mine", "train labels: got 10995.*below 16777216"),
        (lambda f: arrays(f, test=(TEST[0], TEST[1] + 2)), "mine", f"test labels: got 10, 11, {UNKNOWN}"),
        (write_class_only_tested, "mine", f"test labels: got zebra, {UNKNOWN}"),
        (write_empty_class, "mine", "--from: got no images in aardvark of .*train"),
        (write_npz, "mine", "train_images.npy: got an .npz archive, expected an array written by numpy.save"),
        (lambda f: arrays(f, (TRAIN[0][:, :0], TRAIN[1])), "mine", r"train_images.npy: got .*\[100, 0, 32, 3\]"),
        (lambda f: f.mkdir() or f, "mine", "--from: got 0 folders"),
        (lambda f: f.mkdir() or f, "cifar10", "--from: got .*expected a folder with cifar-10-python.tar.gz, "),
        (
            lambda f: official.write_folder(f / "tiny-imagenet-200", official.tiny_files(3)[0]).parent,
            "tinyimagenet", "tinyimagenet: got 3 class names, expected one for each of the 200",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("earlier", [True, False])
def test_bad_data_are_refused_and_what_was_there_stays(tmp_path, cache, write, name, message, earlier):
    if earlier:
        prepare(name, arrays(tmp_path / "good", *([official.pictures(200, 200)] * 2 if "tiny" in name else [])))
    files_before = file_contents(cache.root)
    source = write(tmp_path / "bad")
    with pytest.raises(InputError, match=message):
        prepare(name, source)
    assert file_contents(cache.root) == files_before


@pytest.mark.skipif(sys.platform == "win32", reason="permissions of files are POSIX's")
@pytest.mark.parametrize("mask", [0o022, 0o002, 0o077])
def test_who_may_read_prepared_data_is_decided_by_the_umask(tmp_path, cache, mask):
    source, before = arrays(tmp_path / "a"), os.umask(mask)
    try:
        data = prepare("mine", source)
    finally:
        os.umask(before)
    folder = cache.root / "mine" / data.folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o777 & ~mask
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o666 & ~mask}


def fail_with_full_disk(*arguments):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("function", ["os.fsync", "os.replace", "os.mkdir"])
@pytest.mark.parametrize("earlier", [True, False])
def test_a_full_disk_is_reported_and_leaves_what_was_there(tmp_path, cache, monkeypatch, function, earlier):
    source = arrays(tmp_path / "a")
    if earlier:
        prepare("mine", source)
    files_before = file_contents(cache.root)
    with monkeypatch.context() as patch:
        patch.setattr(function, lambda *args, **named: fail_with_full_disk())
        with pytest.raises(InputError, match="data folder: got No space left on device .*PARABOLIC_DATA"):
            prepare("mine", source, again=True)
    assert file_contents(cache.root) == files_before
    prepare("mine", source, again=True)
    assert make_stream("seq-mine").digest() == expected_stream().digest()


def test_files_are_on_disk_before_they_are_named(tmp_path, cache, monkeypatch):
    """Their contents and their names: a power failure at any moment leaves the old data set or the new."""
    synced, not_synced = set(), []

    def sync(descriptor, sync=os.fsync):
        synced.add(os.fstat(descriptor).st_ino)
        sync(descriptor)

    def replace(aside, path, replace=os.replace):
        files = [file for folder in path.parent.glob("files-*") for file in (folder, *folder.iterdir())]
        not_synced.append([path.name for path in files if path.stat().st_ino not in synced])
        assert len(files) == 5
        replace(aside, path)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", replace)
    prepare("mine", arrays(tmp_path / "a"))
    assert not_synced == [[]]


@pytest.mark.skipif(sys.platform == "win32", reason="limits of files are POSIX's")
def test_a_disk_that_is_full_half_way_through_a_file_leaves_what_was_there(tmp_path, cache):
    """Here the operating system itself refuses: no file may grow beyond 100 kB."""
    source = arrays(tmp_path / "a")
    prepare("mine", source)
    files_before = file_contents(cache.root)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(InputError, match="data folder: got File too large"):
            prepare("mine", source, again=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert file_contents(cache.root) == files_before


# -- several processes ---------------------------------------------------------------------------------------------


def start_python(code, *arguments):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE, text=True, env=environment
    )


STOPS_HALF_WAY = """
import sys, time
from parabolic.streams import prepare, readers
read = readers._channels_first
def slow(path, images):
    for chunk in read(path, images):
        yield chunk[:50]
        print("half", flush=True)
        time.sleep(60)
readers._channels_first = slow
prepare("mine", sys.argv[1], again=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL is POSIX's")
def test_a_process_that_is_killed_leaves_what_the_next_one_repairs(tmp_path, cache):
    source = arrays(tmp_path / "a")
    with start_python(STOPS_HALF_WAY, source) as process:
        assert process.stdout.readline() == "half\n"
        process.kill()
    assert process.returncode == -signal.SIGKILL
    (left_over,) = cache.root.glob("mine/files-*")  # something was left
    assert cache.find("mine") is None
    prepare("mine", source)
    assert not left_over.exists()
    assert len(list(cache.root.glob("mine/*"))) == 2
    assert make_stream("seq-mine").digest() == expected_stream().digest()
    # The same where there is something already: it stays good throughout.
    files_before = file_contents(cache.root)
    with start_python(STOPS_HALF_WAY, source) as process:
        assert process.stdout.readline() == "half\n"
        process.kill()
    assert file_contents(cache.root).items() >= files_before.items()
    assert make_stream("seq-mine").digest() == expected_stream().digest()
    prepare("mine", source, again=True)
    assert len(list(cache.root.glob("mine/*"))) == 2


PREPARES = """
import sys, time
from parabolic.streams import make_stream, prepare
print("ready", flush=True)
prepare("mine", sys.argv[1])
print(make_stream("seq-mine").digest(), flush=True)
"""


def test_two_processes_that_prepare_at_once_both_succeed(tmp_path, cache):
    source = arrays(tmp_path / "a")
    with cache.lock("mine"):  # held until both have come so far
        processes = [start_python(PREPARES, source) for _ in range(2)]
        assert [process.stdout.readline() for process in processes] == ["ready\n"] * 2
        time.sleep(0.3)
        assert [process.poll() for process in processes] == [None, None]
        assert cache.find("mine") is None
    digests = [process.communicate()[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert digests == [expected_stream().digest()] * 2
    assert len(list(cache.root.glob("mine/*"))) == 2


def test_a_reader_finds_the_new_files_where_another_process_replaced_them(tmp_path, cache, monkeypatch):
    prepare("mine", arrays(tmp_path / "a"))
    outdated = cache.find("mine")
    prepare("mine", arrays(tmp_path / "b"), again=True)
    answers = iter([outdated])
    find = Cache.find
    monkeypatch.setattr(Cache, "find", lambda self, name: next(answers, None) or find(self, name))
    assert load("mine")[0].source == str(tmp_path / "b")


# -- by download ---------------------------------------------------------------------------------------------------


def test_a_download_is_prepared_kept_and_used_again(tmp_path, cache, monkeypatch):
    archive, urls = write_official_tar(tmp_path / "official"), []

    def fake_download(url, path, sha256, progress=None):
        urls.append(url)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(archive.read_bytes())
        return path

    monkeypatch.setattr(sources, "download", fake_download)
    prepared = prepare("cifar10")
    assert urls == ["https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"]
    (images_file,) = cache.root.glob("cifar10/*/train_images.npy")
    flip_bit(images_file)
    assert make_stream("seq-cifar10").digest() == expected_stream().digest()  # from the archive that was kept
    assert len(urls) == 1
    assert json.loads((cache.root / "cifar10" / "data.json").read_text())["content"] == prepared.content


def test_the_content_s_hash_is_of_pixels_and_labels_alone(tmp_path, cache):
    prepared = prepare("cifar10", write_official_tar(tmp_path / "a"))
    prepared_from_arrays = prepare("other", arrays(tmp_path / "b"))
    assert prepared.content == prepared_from_arrays.content
    changed = TRAIN[0].copy()
    changed[0, 0, 0, 0] ^= 1
    assert prepare("changed", arrays(tmp_path / "c", (changed, TRAIN[1]))).content != prepared.content
    with cache.lock("direct"):
        raw = Raw(
            Part([channels_first(TRAIN[0][:30]), channels_first(TRAIN[0][30:])], TRAIN[1]),
            Part([channels_first(TEST[0])], TEST[1]),
        )
        assert cache.write("direct", raw, "chunks of another size").content == prepared.content
