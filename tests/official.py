"""Write tiny files in the published formats of the data sets."""

import gzip
import io
import pickle
import struct
import tarfile
import zipfile
from typing import ClassVar

import numpy as np
from PIL import Image

NAMES10 = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
RECONSTRUCT = np.empty(0).__reduce__()[0]


class Python2Pickler(pickle._Pickler):
    """Pickles like Python 2, which wrote the official files: every string is a byte string."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def save_string(self, value):
        data = value.encode() if isinstance(value, str) else value
        if len(data) < 256:
            self.write(pickle.SHORT_BINSTRING + bytes([len(data)]) + data)
        else:
            self.write(pickle.BINSTRING + struct.pack("<i", len(data)) + data)
        self.memoize(value)

    dispatch[str] = dispatch[bytes] = save_string

    def save_global(self, value, name=None):
        if value is RECONSTRUCT:
            self.write(pickle.GLOBAL + b"numpy.core.multiarray\n_reconstruct\n")
            self.memoize(value)
        else:
            super().save_global(value, name)

    dispatch[type(RECONSTRUCT)] = dispatch[type] = save_global


def python2(value):
    text = io.BytesIO()
    Python2Pickler(text, protocol=2).dump(value)
    return text.getvalue()


def batch(images, labels, key="labels"):
    """A batch in CIFAR's format: images [n, 32, 32, 3] become rows of red, green and blue planes."""
    names = [f"image_{i}.png" for i in range(len(images))]
    content = {
        "batch_label": "a batch", key: [int(label) for label in labels],
        "data": np.ascontiguousarray(images.transpose(0, 3, 1, 2).reshape(len(images), 3072)), "filenames": names,
    }  # fmt: skip
    return python2(content | ({"coarse_labels": [0] * len(labels)} if key == "fine_labels" else {}))


def cifar10_files(train, test):
    """The files of cifar-10-batches-py, by name; `train` and `test` are images and labels."""
    parts = zip(np.array_split(train[0], 5), np.array_split(train[1], 5), strict=True)
    files = {f"data_batch_{i}": batch(*part) for i, part in enumerate(parts, 1)}
    meta = {"num_cases_per_batch": 10000, "label_names": NAMES10, "num_vis": 3072}
    return files | {"test_batch": batch(*test), "batches.meta": python2(meta), "readme.html": b"<html></html>"}


def cifar100_files(train, test, names):
    meta = {"fine_label_names": names, "coarse_label_names": ["all"]}
    files = {"train": batch(*train, "fine_labels"), "test": batch(*test, "fine_labels"), "meta": python2(meta)}
    return files | {"file.txt~": b""}


def idx(values):
    """Bytes in the format of MNIST's files: two zeros, the type, the number of axes, their lengths, the values."""
    return struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + values.astype(np.uint8).tobytes()


def mnist_files(train, test, mark="-", packed=False):
    """The four files by name; `train` and `test` are grey images [n, height, width] and labels."""
    files = {}
    for part, (images, labels) in {"train": train, "t10k": test}.items():
        files |= {f"{part}-images{mark}idx3-ubyte": idx(images), f"{part}-labels{mark}idx1-ubyte": idx(labels)}
    return {f"{name}.gz": gzip.compress(data) for name, data in files.items()} if packed else files


def write_tar(path, files, top):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        folder = tarfile.TarInfo(top)
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for name, data in files.items():
            member = tarfile.TarInfo(f"{top}/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def write_zip(path, files, top):
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{top}/", "")
        for name, data in files.items():
            archive.writestr(f"{top}/{name}", data)
    return path


def write_folder(path, files):
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    return path


def jpeg(pixels):
    text = io.BytesIO()
    Image.fromarray(pixels).save(text, "JPEG")
    return text.getvalue()


def tiny_files(classes=200, per_class=2, seed=0):
    """The files of tiny-imagenet-200, with some grey images, and the ids of its classes, in no particular order."""
    rng = np.random.default_rng(seed)
    ids = [f"n{number:08d}" for number in rng.choice(10**8, classes, replace=False)]
    files = {
        "wnids.txt": "\n".join(ids).encode(),
        "words.txt": b"".join(f"{i}\tthing {i}, stuff\n".encode() for i in ids),
    }
    notes = []
    for number, wordnet in enumerate(ids):
        files[f"train/{wordnet}/{wordnet}_boxes.txt"] = b"\n"
        for i in range(per_class):
            grey = (number + i) % 7 == 0
            shape = (64, 64) if grey else (64, 64, 3)
            # File numbers pass ten, so that their order differs from that of the names.
            files[f"train/{wordnet}/images/{wordnet}_{9 + i}.JPEG"] = jpeg(rng.integers(0, 256, shape, np.uint8))
        files[f"val/images/val_{classes - number}.JPEG"] = jpeg(rng.integers(0, 256, (64, 64, 3), np.uint8))
        notes.append(f"val_{classes - number}.JPEG\t{wordnet}\t0\t32\t44\t62")
    files["val/val_annotations.txt"] = "\n".join(notes).encode() + b"\n"
    files["test/images/test_0.JPEG"] = jpeg(rng.integers(0, 256, (64, 64, 3), np.uint8))
    return files, ids


def pictures(n, classes, seed=0, size=32):
    """Random images [n, size, size, 3] in the order of their labels."""
    images = np.random.default_rng(seed).integers(0, 256, (n, size, size, 3), np.uint8)
    return images, np.sort(np.arange(n) % classes)
