"""Official archives: read pixel for pixel, and nothing that is hostile or broken gets further than an error."""

import codecs
import errno
import functools
import gzip
import hashlib
import http.client
import http.server
import io
import os
import pickle
import ssl
import tarfile
import threading
import zipfile
from dataclasses import replace

import numpy as np
import official
import pytest
import torch
from PIL import Image

from parabolic import InputError, RunSpec, make_stream
from parabolic.streams import PUBLISHED, Cache, archives, sources
from parabolic.streams.archives import download, load_pickle, open_tree
from parabolic.streams.sources import open_source, prepare

TRAIN, TEST = official.pictures(60, 10), official.pictures(20, 10, seed=1)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PARABOLIC_DATA", str(tmp_path / "cache"))
    return Cache()


def images_and_labels(name, path):
    """Images [n, height, width, channels] and labels of both parts, as a source gives them."""
    with open_source(name, str(path)) as raw:
        return [
            (np.concatenate(list(part.images)).transpose(0, 2, 3, 1), part.labels) for part in (raw.train, raw.test)
        ], raw


def assert_equal_parts(parts, *expected):
    for (images, labels), (expected_images, expected_labels) in zip(parts, expected, strict=True):
        np.testing.assert_array_equal(images, expected_images)
        np.testing.assert_array_equal(labels, expected_labels)


# -- what is read --------------------------------------------------------------------------------------------------


def test_the_pickles_are_like_the_official_ones():
    """What we write has the keys and key types of the official files, which Python 2 wrote."""
    data = official.cifar10_files(TRAIN, TEST)["data_batch_1"]
    batch = pickle.loads(data, encoding="bytes")
    assert sorted(batch) == [b"batch_label", b"data", b"filenames", b"labels"]
    assert batch[b"data"].shape == (12, 3072)
    assert b"numpy.core.multiarray\n_reconstruct\n" in data
    assert data.startswith(b"\x80\x02}")


@pytest.mark.parametrize("kind", ["tar", "folder", "inside"])
def test_cifar10_is_read_from_its_archive_and_its_folder(tmp_path, kind):
    files = official.cifar10_files(TRAIN, TEST)
    if kind == "tar":
        path = official.write_tar(tmp_path / "d" / "cifar-10-python.tar.gz", files, "cifar-10-batches-py")
    else:
        path = official.write_folder(tmp_path / "d" / "cifar-10-batches-py", files)
    parts, raw = images_and_labels("cifar10", path.parent if kind != "inside" else path)
    assert_equal_parts(parts, TRAIN, TEST)
    assert list(raw.class_names) == official.NAMES10
    assert list(sources.PUBLISHED["cifar10"].class_names) == official.NAMES10


@pytest.mark.parametrize("kind", ["tar", "folder"])
def test_cifar100_by_its_fine_labels(tmp_path, kind):
    train, test = official.pictures(200, 100), official.pictures(100, 100, seed=1)
    names = list(sources.PUBLISHED["cifar100"].class_names)
    assert len(set(names)) == 100
    files = official.cifar100_files(train, test, names)
    if kind == "tar":
        official.write_tar(tmp_path / "cifar-100-python.tar.gz", files, "cifar-100-python")
    else:
        official.write_folder(tmp_path / "cifar-100-python", files)
    parts, raw = images_and_labels("cifar100", tmp_path)
    assert_equal_parts(parts, train, test)
    assert list(raw.class_names) == names


@pytest.mark.parametrize("kind", ["zip", "folder"])
def test_tinyimagenet_with_grey_images_among_the_others(tmp_path, kind):
    files, ids = official.tiny_files()
    if kind == "zip":
        official.write_zip(tmp_path / "tiny-imagenet-200.zip", files, "tiny-imagenet-200")
    else:
        official.write_folder(tmp_path / "tiny-imagenet-200", files)

    def pixels(name):
        image = np.asarray(Image.open(io.BytesIO(files[name])))
        return image if image.ndim == 3 else np.stack([image] * 3, axis=2)

    train, test = [], []
    for label, wordnet in enumerate(sorted(ids)):
        train += [(pixels(f"train/{wordnet}/images/{wordnet}_{number}.JPEG"), label) for number in (9, 10)]
        test.append((pixels(f"val/images/val_{200 - ids.index(wordnet)}.JPEG"), label))
    parts, raw = images_and_labels("tinyimagenet", tmp_path)
    assert_equal_parts(
        parts, *[(np.stack([pair[0] for pair in part]), [pair[1] for pair in part]) for part in (train, test)]
    )
    assert raw.class_names[0] == f"thing {min(ids)}"


GREY = [
    (images[..., 0], labels) for images, labels in (official.pictures(60, 10, 2, 28), official.pictures(20, 10, 3, 28))
]


@pytest.mark.parametrize(
    ("mark", "packed", "below", "inner"),
    [
        ("-", True, "", ""),
        ("-", False, "", ""),
        (".", False, "", ""),
        (".", True, "", ""),
        ("-", True, "MNIST/raw", ""),  # torchvision's
        ("-", True, "MNIST/raw", "MNIST"),
        ("-", False, "mnist", ""),
        ("-", True, "", "t10k-labels-idx1-ubyte.gz"),
    ],
)
def test_mnist_is_read_from_every_layout_of_its_files(tmp_path, mark, packed, below, inner):
    folder = tmp_path / "d"
    official.write_folder(folder / below, official.mnist_files(*GREY, mark, packed))
    if below != "mnist":
        (folder / "mnist").touch()  # a program, say
    parts, raw = images_and_labels("mnist", folder / inner)
    assert_equal_parts(parts, *[(images[..., None], labels) for images, labels in GREY])
    assert raw.class_names == tuple("0123456789")


def test_fashionmnist_from_an_archive_too(tmp_path):
    path = official.write_zip(tmp_path / "a.zip", official.mnist_files(*GREY, "."), "fashion")
    parts, raw = images_and_labels("fashionmnist", path)
    assert_equal_parts(parts, *[(images[..., None], labels) for images, labels in GREY])
    assert (len(raw.class_names), raw.class_names[9]) == (10, "ankle boot")


def test_other_data_in_the_files_of_mnist_may_have_any_name(tmp_path):
    official.write_folder(tmp_path / "kmnist", official.mnist_files(*GREY, packed=True))
    official.write_folder(tmp_path / "torchvision" / "KMNIST" / "raw", official.mnist_files(*GREY))
    inner = ("", "KMNIST", "KMNIST/raw")
    for path in (tmp_path, tmp_path / "kmnist", *(tmp_path / "torchvision" / name for name in inner)):
        assert_equal_parts(
            images_and_labels("kmnist", path)[0], *[(images[..., None], labels) for images, labels in GREY]
        )
    with pytest.raises(InputError, match="--from: .*expected a folder with cifar-10-python.tar.gz"):
        images_and_labels("cifar10", tmp_path / "kmnist")


def test_mnist_is_not_taken_for_something_else(tmp_path, cache, monkeypatch):
    folder = official.write_folder(tmp_path / "d", official.mnist_files(*GREY))
    prepared = prepare("mine", folder, cache=cache)
    monkeypatch.setitem(PUBLISHED, "mnist", replace(PUBLISHED["mnist"], content=prepared.content))
    with pytest.raises(InputError, match="^data 'fashionmnist': got mnist, from .*; prepare it under its own name"):
        prepare("fashionmnist", folder, cache=cache)
    assert cache.names() == ["mine"]
    assert prepare("mnist", folder, cache=cache).content == prepared.content
    assert prepare("other", folder, cache=cache).content == prepared.content  # a name of one's own may be for anything


@pytest.mark.parametrize("name", ["mnist", "fashionmnist"])
def test_mnist_is_a_stream_of_its_own_pixels(tmp_path, name):
    (images, labels), (tests, answers) = GREY
    prepare(name, official.write_folder(tmp_path / "d", official.mnist_files(*GREY)))
    stream = make_stream(f"seq-{name}")
    assert (len(stream), stream.classes, stream.shape, stream.name) == (5, 10, (1, 28, 28), f"seq-{name}")
    for number, task in enumerate(stream):
        of_task, held_out = (np.isin(labels_of_part, task.classes) for labels_of_part in (labels, answers))
        assert task.classes == (2 * number, 2 * number + 1)
        for rows, (expected_images, expected_labels) in (
            (task.train.take(task.train_rows), (images[of_task], labels[of_task])),
            (task.test.take(task.test_rows), (tests[held_out], answers[held_out])),
        ):
            np.testing.assert_array_equal(rows[0][:, 0], expected_images)
            np.testing.assert_array_equal(rows[1], expected_labels)
    mean, std = {"mnist": (0.1307, 0.3081), "fashionmnist": (0.2860, 0.3530)}[name]
    white = torch.full((1, 1, 28, 28), 255, dtype=torch.uint8)
    assert torch.allclose(stream.prepare(white), torch.tensor((1 - mean) / std))
    assert stream.augment is None  # which a permutation of the pixels would not survive
    spec = RunSpec("er", f"seq-{name}").resolved()
    assert (spec["backbone"], spec["batch"], spec["precision"]) == ("mlp", 10, "fp32")


def test_mnist_may_be_permuted_and_rotated(tmp_path):
    (images, labels), _ = GREY
    prepare("mnist", official.write_folder(tmp_path / "d", official.mnist_files(*GREY)))
    for domain in ("permutation", "rotation"):
        stream = make_stream("seq-mnist", seed=1, domain=domain, tasks=3)
        examples = [task.train.take(task.train_rows) for task in stream]
        assert all(np.array_equal(y, labels) for _, y in examples)
        assert not any(torch.equal(examples[0][0], x) for x, _ in examples[1:])
        if domain == "permutation":
            views = [x.flatten(1).numpy() for x, _ in examples]
            for view in views:  # all images have their pixels in the same new places
                columns = {tuple(column) for column in view.T}
                assert columns == {tuple(column) for column in images.reshape(60, -1).T}


# -- what is refused -----------------------------------------------------------------------------------------------


class Calls:
    def __init__(self, call, *arguments):
        self.call, self.arguments = call, arguments

    def __reduce__(self):
        return self.call, self.arguments


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("call", [os.mkdir, exec, eval, getattr, __import__, np.load, np.fromfile, functools.partial])
def test_a_pickle_that_would_run_something_is_refused(tmp_path, call, protocol):
    marker = str(tmp_path / "was-here")
    data = pickle.dumps({"data": Calls(call, marker)}, protocol=protocol)
    with pytest.raises(InputError, match="^file: got .*, expected plain values and arrays only"):
        load_pickle(data, "file")
    assert not os.path.exists(marker)


def test_a_hostile_batch_in_an_archive_changes_nothing(tmp_path, cache):
    files = official.cifar10_files(TRAIN, TEST)
    good = official.write_tar(tmp_path / "good" / "cifar-10-python.tar.gz", files, "cifar-10-batches-py")
    prepared = prepare("cifar10", good)
    files["data_batch_3"] = pickle.dumps(Calls(os.mkdir, str(tmp_path / "was-here")))
    bad = official.write_tar(tmp_path / "bad" / "cifar-10-python.tar.gz", files, "cifar-10-batches-py")
    with pytest.raises(InputError, match="mkdir.*expected plain values"):
        prepare("cifar10", bad)
    assert not (tmp_path / "was-here").exists()
    assert cache.find("cifar10") == prepared
    cache.read(prepared)


def test_a_pickle_written_again_by_python_3_for_python_2_is_read():
    content = {b"data": np.arange(6, dtype=np.uint8).reshape(2, 3), b"names": [b"\xe9\xff", b"cat"]}
    data = pickle.dumps(content, protocol=2)
    assert b"_codecs\nencode\n" in data
    loaded = load_pickle(data, "file")
    np.testing.assert_array_equal(loaded["data"], content[b"data"])
    assert loaded["names"] == content[b"names"]


@pytest.mark.parametrize("arguments", [("x", "rot13"), ("x", "utf-8"), ("x",), (b"x", "latin1"), ("x", "latin1", 1)])
def test_no_other_use_of_codecs_is_allowed(arguments):
    data = pickle.dumps({"data": Calls(codecs.encode, *arguments)}, protocol=4)
    with pytest.raises(InputError, match="^file: got .*expected a pickle that can be read"):
        load_pickle(data, "file")


def test_a_pickle_cannot_change_what_it_is_given_to_call():
    data = b"\x80\x02c_codecs\nencode\n}U\x01aK\x01sb."  # which sets an attribute
    with pytest.raises(InputError, match="^file: got AttributeError"):
        load_pickle(data, "file")


class Forged:
    """Pickled as an array of another type."""

    def __init__(self, type_name, data, fields=None, flags=0):
        self.kind = [np.dtype, (type_name, False, True), (3, "|", None, fields and tuple(fields), fields, 8, 1, flags)]
        self.data = data

    def __reduce__(self):
        dtype = type("", (), {"__reduce__": lambda _, state=tuple(self.kind): state})()
        return np.empty(0).__reduce__()[0], (np.ndarray, (0,), b"b"), (1, (1,), dtype, False, self.data)


def test_bytes_of_a_pickle_do_not_become_pointers():
    """NumPy's own types would take any eight bytes for the address of an object, and end the process or worse."""
    objects = np.dtype("O")
    fields = {"f": (objects, 0)}
    for forged in (Forged("V8", b"A" * 8, fields), Forged("O", b"A" * 8), Forged("O", [1]), Forged("V8", b"A" * 8)):
        with pytest.raises(InputError, match="^file: got ValueError: an array of type .*, expected a pickle that can"):
            load_pickle(pickle.dumps({"label_names": [forged]}, protocol=2), "file")
    for type_name in (">i2", "<f8", "bool", "uint8"):
        for array in (np.arange(6).reshape(2, 3).astype(type_name), np.asfortranarray(np.ones((2, 3), type_name))):
            loaded = load_pickle(pickle.dumps({"data": array}, protocol=2), "file")["data"]
            assert loaded.dtype == array.dtype
            np.testing.assert_array_equal(loaded, array)


@pytest.mark.parametrize("kind", ["zip", "tar", "gz"])
def test_an_archive_that_unpacks_to_more_than_memory_holds_is_refused(tmp_path, monkeypatch, kind):
    files = official.mnist_files(*GREY, packed=kind == "gz")
    write = {"zip": official.write_zip, "tar": official.write_tar, "gz": official.write_zip}[kind]
    path = write(tmp_path / ("a.tar.gz" if kind == "tar" else "a.zip"), files, "mnist")
    images_and_labels("mnist", path)
    monkeypatch.setattr(archives, "LARGEST", 20_000)
    with pytest.raises(InputError, match=r"larger when unpacked, expected at most 20,000 bytes; .*unpack it and pass"):
        images_and_labels("mnist", path)


@pytest.mark.parametrize("data", [b"", b"junk", pickle.dumps([1]), pickle.dumps({"a": 1})[:-3]])
def test_a_broken_pickle_is_named(data):
    with pytest.raises(InputError, match="^batch 7: got"):
        load_pickle(data, "batch 7")


@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "/etc/evil", "C:\\evil", "a\\..\\evil"])
def test_an_archive_with_a_path_outside_is_refused(tmp_path, name):
    files = official.cifar10_files(TRAIN, TEST)
    tar = official.write_tar(tmp_path / "cifar-10-python.tar.gz", files, "cifar-10-batches-py")
    with tarfile.open(tar, "w:gz") as archive:
        member = tarfile.TarInfo(name)
        member.size = 1
        archive.addfile(member, io.BytesIO(b"x"))
    packed = tmp_path / "x.zip"
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr(name, "x")
    for path in (tar, packed):
        before = sorted(tmp_path.rglob("*"))
        with (
            pytest.raises(InputError, match=r"got the path .*evil.*, expected paths within its own folder"),
            open_tree(path),
        ):
            pass
        assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("member_type", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_an_archive_with_links_or_devices_is_refused(tmp_path, member_type):
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo("link")
        member.type, member.linkname = member_type, "/etc/passwd"
        archive.addfile(member)
    with pytest.raises(InputError, match="expected files and folders only"), open_tree(tmp_path / "a.tar.gz"):
        pass


def test_a_folder_and_archives_of_it_hold_the_same_files_whatever_their_names(tmp_path):
    folder = tmp_path / "top"
    (folder / "sub" / "empty").mkdir(parents=True)
    for name in ("a.txt", "sub/b.txt", "sub/.hidden"):
        (folder / name).write_text(name)
    with tarfile.open(tmp_path / "packed.anything", "w:gz") as tar:
        tar.add(folder, "top")
    with zipfile.ZipFile(tmp_path / "zipped.anything", "w") as packed:
        for path in folder.rglob("*"):
            packed.write(path, path.relative_to(tmp_path))
    for path in (folder, tmp_path / "packed.anything", tmp_path / "zipped.anything"):
        with open_tree(path) as tree:
            texts = {name: tree.get(name).decode() for name in tree.names}
        assert texts == {name: name for name in ("a.txt", "sub/b.txt")}
    with open_tree(tmp_path / "packed.anything", keep={"b.txt", "sub"}) as tree:
        assert [tree.get(name) for name in tree.names] == [b"sub/b.txt"]


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_truncated_archive_is_refused_and_nothing_is_left(tmp_path, cache, share):
    tar = official.write_tar(
        tmp_path / "a" / "cifar-10-python.tar.gz", official.cifar10_files(TRAIN, TEST), "cifar-10-batches-py"
    )
    packed = official.write_zip(
        tmp_path / "b" / "tiny-imagenet-200.zip", official.tiny_files(3)[0], "tiny-imagenet-200"
    )
    for name, path in (("cifar10", tar), ("tinyimagenet", packed)):
        data = path.read_bytes()
        path.write_bytes(data[: int(share * len(data))])
        with pytest.raises(InputError, match=r"expected (a whole archive|all files of the data set)") as error:
            prepare(name, path)
        assert len(str(error.value).splitlines()) == 1
        assert cache.find(name) is None
        assert list(cache.root.glob("*/files-*")) == []


@pytest.mark.parametrize("compression", ["gz", "bz2", "xz"])
def test_one_flipped_bit_of_an_archive_is_noticed_wherever_it_is(tmp_path, compression):
    """Pixels do not compress: a changed one decompresses without complaint, and only the checksum tells."""
    path = tmp_path / "cifar-10-python.tar.gz"
    with tarfile.open(path, f"w:{compression}") as archive:
        for name, data in official.cifar10_files(TRAIN, TEST).items():
            member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    intact = path.read_bytes()
    assert_equal_parts(images_and_labels("cifar10", path)[0], TRAIN, TEST)
    for position in np.linspace(64, len(intact) - 8, 12).astype(int):  # between a name and bits that do not count
        data = bytearray(intact)
        data[position] ^= 4
        path.write_bytes(bytes(data))
        with pytest.raises(
            InputError, match="expected a whole archive; it may be truncated or damaged: download it again"
        ):
            images_and_labels("cifar10", path)


def test_what_a_mac_packs_besides_and_a_blank_line_do_not_matter(tmp_path):
    files = official.tiny_files(3)[0]
    expected = images_and_labels("tinyimagenet", official.write_zip(tmp_path / "a.zip", files, "tiny-imagenet-200"))[0]
    files = {f"tiny-imagenet-200/{name}": data for name, data in files.items()}
    files["tiny-imagenet-200/val/val_annotations.txt"] += b"\n \n"
    files |= {f"__MACOSX/{name.replace('images/', 'images/._')}": b"junk" for name in files}
    files["tiny-imagenet-200/train/.DS_Store"] = files["tiny-imagenet-200/train/n1/images/._n1_0.JPEG"] = b"junk"
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    assert_equal_parts(images_and_labels("tinyimagenet", tmp_path / "b.zip")[0], *expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": np.zeros((0, 3072), np.uint8), "labels": []}, "data_batch_2 of .*: got no images"),
        ({"labels": [2**70] * 12}, "data_batch_2 of .*: got no matching labels, expected .* all below"),
    ],
)
def test_a_batch_that_is_empty_or_has_impossible_labels_is_named(tmp_path, change, message):
    files = official.cifar10_files(TRAIN, TEST)
    files["data_batch_2"] = pickle.dumps(pickle.loads(files["data_batch_2"], encoding="latin1") | change)
    with pytest.raises(InputError, match=message):
        images_and_labels("cifar10", official.write_folder(tmp_path / "cifar-10-batches-py", files))


def test_text_that_is_not_utf_8_is_named(tmp_path):
    files = official.cifar10_files(TRAIN, TEST)
    files["batches.meta"] = pickle.dumps({"label_names": [b"caf\xe9"] * 10})
    with pytest.raises(InputError, match="batches.meta of .*expected UTF-8 text"):
        images_and_labels("cifar10", official.write_folder(tmp_path / "cifar-10-batches-py", files))
    for name in ("val/val_annotations.txt", "words.txt"):
        files = official.tiny_files(3)[0]
        files[name] += b"\xe9\n"
        with pytest.raises(InputError, match=rf"{name.rsplit('/')[-1]} of .*expected UTF-8 text"):
            images_and_labels("tinyimagenet", official.write_folder(tmp_path / name[0] / "tiny-imagenet-200", files))


def test_an_archive_that_lacks_a_file_says_which(tmp_path):
    files = official.cifar10_files(TRAIN, TEST)
    del files["data_batch_4"]
    official.write_tar(tmp_path / "cifar-10-python.tar.gz", files, "cifar-10-batches-py")
    with pytest.raises(InputError, match="no data_batch_4"):
        prepare("cifar10", tmp_path)


def truncated_gzip(data):
    return gzip.compress(data)[:-20]


def flipped_gzip(data):
    packed = bytearray(gzip.compress(data))
    packed[len(packed) // 2] ^= 4
    return bytes(packed)


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("train-images-idx3-ubyte", truncated_gzip, "got EOFError: .*expected a .gz file that can be read to its end"),
        ("t10k-images-idx3-ubyte", flipped_gzip, "expected a .gz file that can be read to its end"),
        ("train-images-idx3-ubyte", lambda data: b"", "got 0 bytes, the first missing, expected a header of 16 bytes"),
        (
            "t10k-images-idx3-ubyte",
            lambda data: data[:9],
            "got 9 bytes, the first 00 00 08 03, expected a header of 16",
        ),
        (
            "train-images-idx3-ubyte",
            lambda data: b"<html>" * 9,
            "got 54 bytes, .* 3c 68 74 6d, .*the first 00 00 08 03",
        ),
        ("train-labels-idx1-ubyte", lambda data: b"\0\0\x0b" + data[3:], "the first 00 00 0b 01, .* 00 00 08 01"),
        ("t10k-images-idx3-ubyte", lambda data: data[:-1], "got 15,679 bytes after a header that says 20 × 28 × 28"),
        ("t10k-labels-idx1-ubyte", lambda data: data + b"\0", "got 21 bytes after a header that says 20, expected 20 "),
        (
            "train-images-idx3-ubyte",
            lambda data: data[:4] + b"\xff" * 12 + data[16:],
            "got 47,040 bytes after a header",
        ),
        (
            "train-images-idx3-ubyte",
            lambda data: data[:4] + bytes(12),
            "got 0 bytes after .* says 0 × 0 × 0, expected at least one",
        ),
        ("train-labels-idx1-ubyte", lambda data: official.idx(np.arange(59)), "got 59 labels, .* of the 60 images"),
    ],
)
def test_a_damaged_file_of_mnist_is_named_and_changes_nothing(tmp_path, cache, file, damage, message):
    files = official.mnist_files(*GREY)
    prepared = prepare("mnist", official.write_folder(tmp_path / "good", files))
    files[file] = damage(files[file])
    bad_folder = official.write_folder(tmp_path / "bad", files)
    for name in ("mnist", "fashionmnist"):
        with pytest.raises(InputError, match=f"^{file} of .*bad: .*{message}.*; .*get (it|them) again"):
            prepare(name, bad_folder)
    assert (cache.find("mnist"), cache.find("fashionmnist")) == (prepared, None)
    cache.read(prepared)
    assert [folder.name for folder in cache.root.glob("*/files-*")] == [prepared.folder]


def test_a_file_of_mnist_that_is_missing_is_named(tmp_path):
    files = official.mnist_files(*GREY, packed=True)
    del files["t10k-labels-idx1-ubyte.gz"]
    with pytest.raises(InputError, match="got no t10k-labels-idx1-ubyte, expected all files"):
        prepare("mnist", official.write_folder(tmp_path / "d", files))
    (tmp_path / "e").mkdir()
    with pytest.raises(
        InputError, match=r"--from: .*train-images-idx3-ubyte.gz, .*MNIST/raw/.*; .*download them from http"
    ):
        prepare("mnist", tmp_path / "e")


# -- downloads -----------------------------------------------------------------------------------------------------

BODY = np.random.default_rng(0).bytes(300_000)
DIGEST = hashlib.sha256(BODY).hexdigest()


class Server(http.server.BaseHTTPRequestHandler):
    ranges, cut, files = True, None, {}

    def do_GET(self):
        range_header = self.headers.get("Range")
        type(self).ranges_asked.append(range_header)
        body = self.files.get(self.path, BODY)
        if self.path == "/missing":
            self.send_error(404)
            return
        start = int(range_header.removeprefix("bytes=").rstrip("-")) if range_header and self.ranges else 0
        if start >= len(body):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        self.wfile.write(body[start : self.cut])

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server():
    class Handler(Server):
        pass

    Handler.ranges_asked = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http_server:
        thread = threading.Thread(target=http_server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        Handler.url = f"http://127.0.0.1:{http_server.server_port}"
        yield Handler
        http_server.shutdown()
        thread.join()


def test_a_download_reports_its_progress(server, tmp_path):
    calls = []
    path = download(f"{server.url}/a", tmp_path / "new" / "a", DIGEST, lambda *arguments: calls.append(arguments))
    assert path.read_bytes() == BODY
    assert calls[-1] == ("a", len(BODY), len(BODY))
    assert [path_in_folder.name for path_in_folder in path.parent.iterdir()] == ["a"]
    assert download(f"{server.url}/a", path, DIGEST) == path
    assert server.ranges_asked == [None]  # what is there and right is not asked for again


@pytest.mark.parametrize("ranges", [True, False])
def test_a_download_goes_on_where_it_stopped(server, tmp_path, ranges):
    server.ranges, server.cut = ranges, 100_000
    with pytest.raises(InputError, match="download: got .*ended after 100,000 of 300,000.*resume after 100,000 bytes"):
        download(f"{server.url}/a", tmp_path / "a", DIGEST)
    assert [path.name for path in tmp_path.iterdir()] == ["a.part"]
    server.cut = None
    assert download(f"{server.url}/a", tmp_path / "a", DIGEST).read_bytes() == BODY
    assert server.ranges_asked == [None, "bytes=100000-"]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_download_that_was_complete_but_for_the_move_is_not_repeated(server, tmp_path):
    (tmp_path / "a.part").write_bytes(BODY)
    assert download(f"{server.url}/a", tmp_path / "a", DIGEST).read_bytes() == BODY
    assert server.ranges_asked == ["bytes=300000-"]


def test_a_wrong_checksum_leaves_nothing(server, tmp_path):
    with pytest.raises(InputError, match="download: got SHA-256 .*expected SHA-256 0000"):
        download(f"{server.url}/a", tmp_path / "a", "0" * 64)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_downloaded_is_reported(server, tmp_path):
    with pytest.raises(InputError, match="download: got HTTP Error 404"):
        download(f"{server.url}/missing", tmp_path / "a", DIGEST)
    with pytest.raises(InputError, match="url: got 'file:///etc/passwd'"):
        download("file:///etc/passwd", tmp_path / "a", DIGEST)
    with pytest.raises(InputError, match="download: got .*refused"):
        download("http://127.0.0.1:9/a", tmp_path / "a", DIGEST)


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENETUNREACH, "Network is unreachable"), ssl.SSLError(1, "bad record"), TimeoutError("timed out")],
)
@pytest.mark.parametrize("function", ["begin", "read"])
def test_a_network_that_fails_is_not_taken_for_a_full_disk(server, tmp_path, monkeypatch, error, function):
    """It may fail before the server has answered, or while the file is received."""

    def fail(*arguments):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(http.client.HTTPResponse, function, fail)
        with pytest.raises(InputError, match=f"^download: got .*{error.args[-1]}.* from http.*; run it again to"):
            download(f"{server.url}/a", tmp_path / "a", DIGEST)
    assert download(f"{server.url}/a", tmp_path / "a", DIGEST).read_bytes() == BODY


def test_four_files_are_downloaded_and_what_is_there_is_not_asked_for_again(server, cache, monkeypatch):
    files = official.mnist_files(*GREY, packed=True)
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    for name in ("mnist", "fashionmnist"):  # whose files are called alike
        published = sources.replace(sources.PUBLISHED[name], url=f"{server.url}/{name}", sha256=hashes)
        monkeypatch.setitem(sources.PUBLISHED, name, published)
    server.files = {
        f"/{data_set}/{name}": data for data_set in ("mnist", "fashionmnist") for name, data in files.items()
    }
    server.files["/mnist/t10k-labels-idx1-ubyte.gz"] = b"an excuse"
    with pytest.raises(InputError, match=f"got SHA-256 .*, expected SHA-256 .* of {server.url}/mnist/t10k-labels-"):
        prepare("mnist")
    assert cache.find("mnist") is None
    with pytest.raises(InputError, match="`parabolic data prepare mnist` downloads it"):
        make_stream("seq-mnist")
    assert len(server.ranges_asked) == 4  # a stream downloads nothing
    server.files["/mnist/t10k-labels-idx1-ubyte.gz"] = files["t10k-labels-idx1-ubyte.gz"]
    prepared = prepare("mnist")
    assert (prepared.train, prepared.test, len(server.ranges_asked)) == (60, 20, 5)
    assert prepare("fashionmnist").content == prepared.content
    assert len(server.ranges_asked) == 9
    for file in (cache.root / "mnist").glob("files-*/*"):
        file.write_bytes(b"damaged")
    assert make_stream("seq-mnist").classes == 10  # prepared again from what was downloaded
    assert len(server.ranges_asked) == 9


def test_a_full_disk_during_a_download_is_reported_and_it_resumes_later(server, tmp_path, monkeypatch):
    def fail_halfway(path, mode="r"):
        if mode == "rb":
            return path.open(mode)
        path.write_bytes(BODY[:1000])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(archives, "open", fail_halfway, raising=False)
        with pytest.raises(InputError, match="data folder: got No space left on device"):
            download(f"{server.url}/a", tmp_path / "a", DIGEST)
    assert download(f"{server.url}/a", tmp_path / "a", DIGEST).read_bytes() == BODY
    assert server.ranges_asked[-1] == "bytes=1000-"
