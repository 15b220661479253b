"""Formats of data: the official archives, folders of arrays or images, and columns of the Hugging Face hub."""

from __future__ import annotations

import io
import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from parabolic.checks import Description, InputError, check_name, invalid
from parabolic.plugins import require
from parabolic.streams.archives import Tree, gunzip, is_hidden, load_pickle
from parabolic.streams.cache import Part, Raw, untrained_error
from parabolic.streams.stream import LABEL_COLUMNS, LABELS

__all__ = [
    "IDX_FILES", "cifar10", "cifar100", "from_arrays", "from_hub", "from_images", "has_idx", "idx", "is_saved",
    "tinyimagenet",
]  # fmt: skip

CHUNK = 1000  # images decoded and written at a time
THREADS = 4  # that decode them; small images are mostly Python's work, which more threads would only interrupt
IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")


# -- CIFAR ---------------------------------------------------------------------------------------------------------


def _cifar(tree: Tree, train: Sequence[str], test: str, meta: str, labels_key: str, names_key: str) -> Raw:
    parts = [_cifar_part(tree, files, labels_key) for files in (train, [test])]
    where = f"{meta} of {tree.where}"
    names = load_pickle(tree.get(meta), where).get(names_key)
    if not isinstance(names, list) or not names:
        raise invalid(where, Description(f"no {names_key}"), "the names of the classes")
    class_names = tuple(_text(where, name) if isinstance(name, bytes) else str(name) for name in names)
    return _raw(parts, class_names)


def _text(where: str, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise invalid(where, Description(str(error)), "UTF-8 text", "it may be damaged: get it again") from error


def _cifar_part(tree: Tree, files: Sequence[str], labels_key: str) -> Part:
    images, labels = [], []
    for file in files:
        where = f"{file} of {tree.where}"
        batch = load_pickle(tree.get(file), where)
        pixels, batch_labels = batch.get("data"), batch.get(labels_key)
        if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape[1:] != (3072,):
            got = Description(f"data of shape {list(getattr(pixels, 'shape', []))}")
            raise invalid(where, got, "bytes [n, 3072], each row an image of 32 × 32 pixels and 3 channels")
        if not len(pixels):
            raise invalid(where, Description("no images"), "at least one", "it is incomplete: get it again")
        if (
            not isinstance(batch_labels, list)
            or len(batch_labels) != len(pixels)
            or not all(isinstance(label, int) and abs(label) < LABELS for label in batch_labels)
        ):
            expected = f"a label for each of the {len(pixels)} images, all below {LABELS}"
            raise invalid(where, Description(f"no matching {labels_key}"), expected)
        images.append(pixels.reshape(-1, 3, 32, 32))
        labels += batch_labels
    return Part(images, np.array(labels, np.int64))


def cifar10(tree: Tree) -> Raw:
    """The files of CIFAR-10."""
    train = [f"data_batch_{number}" for number in range(1, 6)]
    return _cifar(tree, train, "test_batch", "batches.meta", "labels", "label_names")


def cifar100(tree: Tree) -> Raw:
    """The files of CIFAR-100, with its fine labels."""
    return _cifar(tree, ["train"], "test", "meta", "fine_labels", "fine_label_names")


# -- TinyImageNet --------------------------------------------------------------------------------------------------


def tinyimagenet(tree: Tree) -> Raw:
    """Classes are numbered by sorted WordNet ids; the test set is the public validation set, as is common practice."""
    paths = [name.split("/") for name in tree.names]
    train = [parts for parts in paths if len(parts) == 4 and parts[0] == "train" and parts[2] == "images"]
    ids = sorted({parts[1] for parts in train})
    label_of = {wordnet: label for label, wordnet in enumerate(ids)}
    if not ids:
        raise invalid(tree.where, Description("no train/<class>/images/"), "the folders of TinyImageNet")
    train.sort(key=lambda parts: (parts[1], _file_number(parts[3])))
    test_files = []
    where = f"val_annotations.txt of {tree.where}"
    for line in filter(str.strip, _text(where, tree.get("val/val_annotations.txt")).splitlines()):
        file, wordnet, *_ = [*line.split("\t"), ""]
        if wordnet not in label_of:
            raise invalid(where, line, f"one of the {len(ids)} classes of train/")
        test_files.append((label_of[wordnet], _file_number(file), f"val/images/{file}"))
    test_files.sort()
    files = [("/".join(parts), label_of[parts[1]]) for parts in train], [(file, label) for label, _, file in test_files]
    parts = [_image_part(part, tree.get, "RGB", tree.where) for part in files]
    listing = tree.get("words.txt") if "words.txt" in tree.names else b""
    lines = _text(f"words.txt of {tree.where}", listing).splitlines()
    words = dict(line.split("\t", 1) for line in lines if "\t" in line)
    return _raw(parts, tuple(words.get(wordnet, wordnet).split(",")[0].strip() for wordnet in ids))


def _file_number(file: str) -> tuple[int, str]:
    """The number in a file's name, by which the files of a class are sorted."""
    digits = re.findall(r"\d+", file.rsplit(".", 1)[0])
    return (int(digits[-1]) if digits else 0, file)


# -- MNIST ---------------------------------------------------------------------------------------------------------


def _idx_names(part: str, kind: str) -> list[str]:
    """The possible names of a file of images or labels."""
    axes = {"images": 3, "labels": 1}[kind]
    return [f"{part}-{kind}{mark}idx{axes}-ubyte{packed}" for packed in ("", ".gz") for mark in "-."]


IDX_FILES = {name for part in ("train", "t10k") for kind in ("images", "labels") for name in _idx_names(part, kind)}


def has_idx(folder: Path) -> bool:
    """Whether a folder has files as MNIST's."""
    return any((folder / name).is_file() for name in _idx_names("train", "images"))


def idx(tree: Tree) -> Raw:
    """The four files of MNIST, or of a data set in the same format."""
    parts = []
    for part in ("train", "t10k"):
        (_, images), (where, labels) = (_idx_array(tree, _idx_names(part, kind)) for kind in ("images", "labels"))
        if len(labels) != len(images):
            got, expected = Description(f"{len(labels):,} labels"), f"one for each of the {len(images):,} images"
            raise invalid(where, got, expected, "the files belong to different data sets: get them again")
        chunks = [images[start : start + CHUNK, None] for start in range(0, len(images), CHUNK)]
        parts.append(Part(chunks, labels))
    return _raw(parts, None)


def _idx_array(tree: Tree, names: Sequence[str]) -> tuple[str, NDArray[np.uint8]]:
    """Read an array of bytes from a file in IDX format; also return its location, for error texts."""
    name = next((name for name in names if name in tree.names), names[0])
    where, remedy = f"{name} of {tree.where}", "it may be truncated or damaged: get it again"
    data, axes = tree.get(name), 3 if "images" in name else 1
    if data.startswith(b"\x1f\x8b"):
        try:
            data = gunzip(tree.where, name, data)
        except (OSError, EOFError, zlib.error) as error:
            got = Description(f"{type(error).__name__}: {error}")
            raise invalid(where, got, "a .gz file that can be read to its end", remedy) from error
    start, header = bytes([0, 0, 8, axes]), 4 + 4 * axes
    if not data.startswith(start) or len(data) < header:
        got = Description(f"{len(data):,} bytes, the first {data[:4].hex(' ') or 'missing'}")
        raise invalid(where, got, f"a header of {header} bytes, the first {start.hex(' ')}", remedy)
    shape = np.frombuffer(data, ">u4", axes, offset=4).tolist()
    size, sizes = math.prod(shape), " × ".join(f"{length:,}" for length in shape)
    if len(data) - header != size or not size:
        got = Description(f"{len(data) - header:,} bytes after a header that says {sizes}")
        raise invalid(where, got, f"{size:,} bytes" if size else "at least one", remedy)
    return where, np.frombuffer(data, np.uint8, offset=header).reshape(shape)


# -- folders -------------------------------------------------------------------------------------------------------


def from_arrays(folder: Path) -> Raw:
    """Read `{train,test}_{images,labels}.npy` and, if it exists, the list in `class_names.json`."""
    parts = []
    for part in ("train", "test"):
        if part == "test" and not (folder / "test_images.npy").exists():
            continue
        images, labels = (_open_array(folder / f"{part}_{kind}.npy") for kind in ("images", "labels"))
        parts.append(Part(_channels_first(folder / f"{part}_images.npy", images), np.asarray(labels)))
    names_file = folder / "class_names.json"
    return _raw(parts, _class_names(names_file) if names_file.exists() else None)


def _class_names(path: Path) -> tuple[str, ...]:
    try:
        names = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise invalid(str(path), Description(str(error)), "a list of names in JSON", "fix or remove it") from error
    if not (isinstance(names, list) and all(isinstance(name, str | int) for name in names)):
        raise invalid(str(path), names, 'a list of names, as in ["cat", "dog"]', "fix or remove it")
    return tuple(str(name) for name in names)


def _open_array(path: Path) -> NDArray[Any]:
    try:
        loaded = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        raise invalid(str(path), Description(str(error)), "an array written by numpy.save") from error
    if isinstance(loaded, np.ndarray):
        return loaded
    loaded.close()
    raise invalid(str(path), Description("an .npz archive"), "an array written by numpy.save", "save each by itself")


def _channels_first(path: Path, images: NDArray[Any]) -> Iterator[NDArray[np.uint8]]:
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or 0 in images.shape:
        got = Description(f"an array of shape {list(images.shape)} and type {images.dtype}")
        raise invalid(str(path), got, "bytes [n, height, width, 3], or [n, height, width] for grey")
    channels_last = images.ndim == 4 and images.shape[3] in (1, 3)
    if images.ndim == 4 and not channels_last and images.shape[1] not in (1, 3):
        raise invalid(str(path), Description(f"shape {list(images.shape)}"), "1 or 3 channels, last or first")
    for start in range(0, len(images), CHUNK):
        chunk = np.asarray(images[start : start + CHUNK])
        yield chunk[:, None] if chunk.ndim == 3 else chunk.transpose(0, 3, 1, 2) if channels_last else chunk


def from_images(folder: Path) -> Raw:
    """Read one folder per class, in `train/` and `test/` (or `val/`, `validation/`) or, without tests, at the top."""
    folders = _subfolders(folder)
    test_folders = [name for name in ("test", "val", "validation") if name in folders]
    tops = [folder / name for name in ("train", *test_folders[:1])] if "train" in folders else [folder]
    names = _subfolders(tops[0])
    if len(names) < 2:
        got = Description(f"{len(names)} folders in {tops[0]}")
        expected = "a folder of images for each of two or more classes, the arrays {train,test}_{images,labels}.npy"
        raise invalid("--from", got, f"{expected}, or MNIST's four files")
    files_by_part = []
    for top in tops:
        files = [(str(file), label) for label, name in enumerate(names) for file in _image_files(top / name)]
        if not files:
            raise invalid("--from", str(top), f"images ({', '.join(IMAGES)}) in {', '.join(names[:3])}, …")
        files_by_part.append(files)
    filled = {label for _, label in files_by_part[0]}
    if empty := [name for label, name in enumerate(names) if label not in filled]:
        got = Description(f"no images in {', '.join(empty)} of {tops[0]}")
        raise invalid("--from", got, f"images ({', '.join(IMAGES)}) in every class's folder", "remove other folders")
    if unknown := [name for name in _subfolders(tops[-1]) if name not in names and _image_files(tops[-1] / name)]:
        raise untrained_error(", ".join(unknown))
    mode = _colour_mode([file for files in files_by_part for file, _ in files], _read_path)
    parts = [_image_part(files, _read_path, mode) for files in files_by_part]
    return _raw(parts, tuple(names))


def _subfolders(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and not is_hidden(path.name))


def _image_files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.glob("*")) if path.suffix.lower() in IMAGES and not is_hidden(path.name)]


def _read_path(path: str) -> bytes:
    return Path(path).read_bytes()


# -- the hub -------------------------------------------------------------------------------------------------------


def is_saved(folder: Path) -> bool:
    """Whether a folder was written by `save_to_disk`."""
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))


def from_hub(name: str, requested: str | None) -> Raw:
    """Read a data set of images with `datasets`: from the hub, or from a folder that `save_to_disk` wrote."""
    where = f"hf:{name}"
    datasets = require("datasets", "hf", where, "`datasets`")
    try:
        local = Path(name).expanduser()
        loaded = datasets.load_from_disk(str(local)) if is_saved(local) else datasets.load_dataset(name)
    except Exception as error:  # the hub, the network and the data set's own files can fail in many ways
        got = Description(" ".join(f"{type(error).__name__}: {error}".split()))
        raise invalid(where, got, "a data set that can be loaded") from error
    splits = dict(loaded) if hasattr(loaded, "keys") else {"train": loaded}
    if "train" not in splits:
        raise invalid(where, sorted(splits), "a split called train")
    features = splits["train"].features
    image_column = next((key for key, feature in features.items() if isinstance(feature, datasets.Image)), None)
    if image_column is None:
        remedy = "dataset.cast_column('COLUMN', datasets.Image()) turns files or bytes into images"
        raise invalid(where, dict(features), "a column of images", remedy)
    label_column = _label_column(where, features, requested, datasets.ClassLabel)
    names = getattr(features[label_column], "names", None)  # only a ClassLabel has them
    parts = []
    for split in ("train", *_test_splits(splits, label_column)):
        if getattr(splits[split].features[label_column], "names", None) != names:
            got = Description(f"other classes, or in another order, in {split} than in train")
            remedy = f"turn words into numbers by cast_column({label_column!r}, datasets.ClassLabel(names=[…]))"
            raise invalid(where, got, "labels that stand for the same classes", remedy)
        rows = splits[split].cast_column(image_column, datasets.Image(decode=False))
        labels = np.asarray(splits[split][label_column][:])
        parts.append((range(len(rows)), partial(_image_bytes, rows, image_column), labels))
    mode = "L" if all(_colour_mode(numbers, read, where) == "L" for numbers, read, _ in parts) else "RGB"
    decoded = [Part(_decode(numbers, read, mode, where), labels) for numbers, read, labels in parts]
    return replace(_raw(decoded, names and tuple(names)), label=requested)


def _test_splits(splits: Mapping[str, Any], label_column: str) -> list[str]:
    """The split to test on, or none; on the hub, labels of −1, or none, mean that those of a test set are withheld."""
    for split in ("test", "validation", "valid", "val"):
        if not len(splits.get(split, ())) or label_column not in splits[split].features:
            continue
        if all(value is not None and value >= 0 for value in splits[split][label_column]):
            return [split]
    return []


def _label_column(name: str, features: Mapping[str, Any], requested: str | None, kind: type) -> str:
    """The column of labels: the one named by the user, or one of type `kind` (ClassLabel), or one of whole numbers."""
    integer_columns = [
        key for key, feature in features.items() if re.fullmatch(r"u?int\d+", str(getattr(feature, "dtype", None)))
    ]
    if requested is not None and integer_columns:
        check_name("--label", requested, integer_columns)
        return requested
    class_columns = [key for key in integer_columns if isinstance(features[key], kind)]
    candidates = (
        [key for key in LABEL_COLUMNS if key in (class_columns or integer_columns)] or class_columns or integer_columns
    )
    if not candidates or (candidates is integer_columns and len(integer_columns) > 1):
        encode = "dataset.class_encode_column('COLUMN') turns words into numbers"
        remedy = f"name the column with --label: {', '.join(integer_columns)}" if integer_columns else encode
        raise invalid(name, dict(features), "a column of class labels or whole numbers", remedy)
    return candidates[0]


def _image_bytes(rows: Any, column: str, number: int) -> bytes:
    """The encoded image in a row of a column of images."""
    image = rows[number][column]
    return bytes(image["bytes"]) if image["bytes"] is not None else Path(image["path"]).read_bytes()


def _raw(parts: Sequence[Part], class_names: tuple[str, ...] | None) -> Raw:
    return Raw(parts[0], parts[1] if len(parts) > 1 else None, class_names)


# -- images --------------------------------------------------------------------------------------------------------


def _image_part(files: Sequence[tuple[str, int]], read: Callable[[str], bytes], mode: str, where: str = "") -> Part:
    """The part made of these files and their labels."""
    return Part(_decode([file for file, _ in files], read, mode, where), np.array([label for _, label in files]))


@contextmanager
def _open_image(item: Any, read: Callable[[Any], bytes], where: str) -> Iterator[Any]:
    """An image, which is decoded when its pixels are used."""
    pillow = require("PIL.Image", "images", "images", "Pillow")
    try:
        with pillow.open(io.BytesIO(read(item))) as image:
            yield image
    except InputError:
        raise
    except Exception as error:  # Pillow raises many kinds of errors for broken images
        got = Description(f"{type(error).__name__}: {error}")
        raise invalid(_item_name(item, where), got, "an image that can be read", "get it again") from error


def _item_name(item: Any, where: str) -> str:
    return f"{item} of {where}" if where else str(item)


def _colour_mode(items: Iterable[Any], read: Callable[[Any], bytes], where: str = "") -> str:
    """Grey if all images are grey, else colour; only their headers are decoded."""
    for item in items:
        with _open_image(item, read, where) as image:
            if image.mode not in ("1", "L"):
                return "RGB"
    return "L"


def _decode(items: Sequence[Any], read: Callable[[Any], bytes], mode: str, where: str) -> Iterator[NDArray[np.uint8]]:
    """Decode images in chunks, in several threads; all must have the size of the first."""
    size = None

    def decode(item: Any) -> NDArray[np.uint8]:
        with _open_image(item, read, where) as image:
            if image.mode[0] in "IF":  # Pillow would clip values above 255
                got = Description(f"an image of mode {image.mode}")
                raise invalid(_item_name(item, where), got, "at most 8 bits per channel", "convert it first")
            pixels = np.asarray(image.convert(mode))
        return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)

    def decode_all(share: Sequence[Any]) -> list[NDArray[np.uint8]]:
        return [decode(item) for item in share]

    with ThreadPoolExecutor(THREADS) as pool:
        for start in range(0, len(items), CHUNK):
            chunk = items[start : start + CHUNK]
            share_size = math.ceil(len(chunk) / THREADS)
            shares = [chunk[first : first + share_size] for first in range(0, len(chunk), share_size)]
            decoded = [pixels for share in pool.map(decode_all, shares) for pixels in share]
            size = size or decoded[0].shape
            for item, pixels in zip(chunk, decoded, strict=True):
                if pixels.shape != size:
                    got = Description(f"{pixels.shape[2]} × {pixels.shape[1]} pixels")
                    expected = f"{size[2]} × {size[1]} pixels like the first image"
                    raise invalid(_item_name(item, where), got, expected, "resize all images to one size first")
            yield np.stack(decoded)
