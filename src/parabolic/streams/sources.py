"""Sources of data: official archives, folders of arrays or images, the Hugging Face hub."""

from __future__ import annotations

import gzip
import io
import json
import math
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from parabolic.checks import Description, InputError, check_name, invalid
from parabolic.files import file_name
from parabolic.plugins import require
from parabolic.streams.archives import Tree, download, hidden, load_pickle, open_tree
from parabolic.streams.cache import Arrays, Cache, Damaged, DataSet, Origin, Part, Raw, ShowProgress, not_trained
from parabolic.streams.stream import LABEL_COLUMNS, LABELS

__all__ = ["PUBLISHED", "Published", "find_data", "load", "open_source", "own_names", "prepare"]

CHUNK = 1000  # images decoded and written at a time
IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
HUB = "hf:"


@dataclass(frozen=True)
class Published:
    """A data set that is officially published as an archive, or as several files."""

    about: str
    classes: int
    folder: str  # what the archive unpacks to, or where torchvision puts the files
    url: str  # of the archive, or of the folder of the files
    sha256: Mapping[str, str]  # of the archive, or of each file, by its name
    content: str | None  # hash of the images and labels, as `DataSet.content`; None if unknown
    read: Callable[[Tree], Raw]
    wanted: Collection[str] | None = None  # the files to read from a .tar.gz
    class_names: tuple[str, ...] | None = None

    @property
    def packed(self) -> bool:
        """Whether it is a single archive."""
        return len(self.sha256) == 1


def find_data(name: str, cache: Cache | None = None) -> DataSet | None:
    """The description of a prepared data set (`hf:NAME` too), or None if there is none; its files are not checked."""
    return (cache or Cache()).find(_key(name))


def own_names() -> list[str]:
    """Names of prepared data that the user chose; data requested as `hf:NAME` are stored under generated names."""
    cache = Cache()
    known = {name: cache.find(name) for name in cache.names()}
    return [name for name, data in known.items() if data is None or _key(data.source) != name]


def load(name: str, cache: Cache | None = None) -> tuple[DataSet, Arrays, Arrays | None]:
    """Load a prepared data set with its training and test arrays, memory-mapped and verified.

    A damaged data set is prepared again if its source is still available. Nothing is downloaded, except that
    `hf:NAME` is fetched from the hub the first time.
    """
    cache = cache or Cache()
    known = find_data(name, cache)
    if known is None:
        if not _at_hand(name, cache):
            if (damage := cache.damaged(_key(name))) is not None:
                raise damage
            how = f"`parabolic data prepare {name}`"
            how += " downloads it, or with --from FOLDER reads it from there" if name in PUBLISHED else " --from FOLDER"
            raise invalid("data", name, f"a data set prepared in {cache.root}", how)
        known = prepare(name, cache=cache)
    try:
        return known, *cache.read(known)
    except Damaged:
        newer = find_data(name, cache)  # another process may have replaced it meanwhile and removed the old files
        if newer is None or newer == known:
            if not _at_hand(name, cache):
                raise
            newer = prepare(name, cache=cache)
        return newer, *cache.read(newer)


def prepare(
    name: str,
    source: str | Path | None = None,
    *,
    label: str | None = None,
    again: bool = False,
    cache: Cache | None = None,
    progress: ShowProgress | None = None,
) -> DataSet:
    """Prepare a data set in the cache, unless it is already there and intact.

    Args:
        name: `cifar10`, `cifar100`, `tinyimagenet`, `mnist`, `fashionmnist`; `hf:NAME` on the Hugging Face hub (or
            `hf:FOLDER`, saved by `datasets`); or any name for data of your own, which become the stream `seq-NAME`.
        source: a folder or archive, or `hf:NAME`. By default the previous source, or the official download.
        label: the column of `hf:NAME` with the labels. By default the one named before, or one with a usual name
            (`label`, `labels`, `fine_label`), or the only one possible.
        again: whether to prepare it even if it is there.
        cache: where prepared data are stored.
        progress: called as the work proceeds.
    """
    cache, key = cache or Cache(), _key(name)
    with cache.lock(key):
        known, origin = cache.find(key), cache.origin(key)
        there = None if known is None or again or label not in (None, known.label) else known
        if source is None and there is not None and _whole(there, cache):
            return there
        place = _place(name, source, origin)
        if there is not None and there.source == place and _whole(there, cache):
            return there
        if label is None:
            label = origin.label if origin is not None and origin.source == place else None
        elif not (place or "").startswith(HUB):
            raise invalid("--label", label, "a source with columns, hf:NAME", "leave it out")
        if place is None:
            place = _download(name, cache, progress)
        others = {each.content: other for other, each in PUBLISHED.items() if each.content and other != name}
        with open_source(name, place, label) as raw:
            return cache.write(key, raw, place, progress, others if name in PUBLISHED else None)


def _whole(known: DataSet, cache: Cache) -> bool:
    try:
        cache.read(known)
    except Damaged:
        return False
    return True


def _at_hand(name: str, cache: Cache) -> bool:
    """Whether a data set can be prepared from local files, or is named as one of the hub."""
    downloaded = name in PUBLISHED and all(path.exists() for path in _downloads(name, cache))
    origin = cache.origin(_key(name))
    return name.startswith(HUB) or downloaded or (origin is not None and Path(origin.source).exists())


def _place(name: str, source: str | Path | None, origin: Origin | None) -> str | None:
    """Where to read a data set from; None means the official archive, downloaded unless it already is."""
    if source is None:
        if origin is not None and (origin.source.startswith(HUB) or Path(origin.source).exists()):
            return origin.source
        if name in PUBLISHED:
            return None
        if not name.startswith(HUB):
            gone = f"{origin.source}, which no longer exists" if origin else "nothing"
            raise invalid("--from", Description(gone), f"the folder that holds {name}", "pass it with --from")
        source = name
    if str(source).startswith(HUB):
        return _with_path(str(source))
    path = Path(source).expanduser().resolve()
    if not path.exists():
        raise invalid("--from", Description(f"{source}, which does not exist"), "an existing folder or archive")
    return str(path)


def _download(name: str, cache: Cache, progress: ShowProgress | None) -> str:
    """Download the missing files of an official data set and return its archive or folder."""
    official, paths = PUBLISHED[name], _downloads(name, cache)
    for path in paths:
        url = official.url if official.packed else f"{official.url}/{path.name}"
        download(url, path, official.sha256[path.name], progress)
    return str(paths[0] if official.packed else paths[0].parent)


def _downloads(name: str, cache: Cache) -> list[Path]:
    """The paths of an official data set's files once they are downloaded."""
    official, folder = PUBLISHED[name], cache.root / "downloads"
    return [(folder if official.packed else folder / name) / file for file in official.sha256]


def _with_path(name: str) -> str:
    """A hub name unchanged; a saved folder's name with its absolute path, as a relative one is ambiguous."""
    local = Path(name.removeprefix(HUB)).expanduser()
    return f"{HUB}{local.resolve()}" if _saved(local) else name


def _saved(folder: Path) -> bool:
    """Whether a folder was written by `save_to_disk`."""
    return any((folder / each).is_file() for each in ("state.json", "dataset_dict.json"))


def _key(name: str) -> str:
    """The folder name of a data set in the cache, distinct for distinct hub names."""
    if not name.startswith(HUB):
        return name
    name = _with_path(name)
    plain = file_name(name.removeprefix(HUB)).strip("-.")
    return f"hf-{plain[-40:].strip('-.')}-{sha256(name.encode()).hexdigest()[:8]}"


@contextmanager
def open_source(name: str, place: str, label: str | None = None) -> Iterator[Raw]:
    """Open a data set in a folder, in an archive or on the hub; it can be read within the context."""
    if place.startswith(HUB):
        yield _from_hub(place.removeprefix(HUB), label)
        return
    path, official = Path(place), PUBLISHED.get(name)
    if path.name in IDX_FILES and path.is_file():  # one of MNIST's four files
        path = path.parent
    if official is not None:
        archives = [path, *(path / each for each in official.sha256 if official.packed)]
        folders = [path / each for each in (name, official.folder, Path(official.folder).name, ".")]
        found = [each for each in archives if each.is_file()]
        found += [each for each in folders if _looks_like(each, official)]
        if found:
            with open_tree(found[0], official.wanted) as tree:
                raw = official.read(tree)
                yield replace(raw, classes=official.classes, class_names=raw.class_names or official.class_names)
            return
    for each in _rooms(path, name):
        if (each / "train_images.npy").is_file():
            yield _from_arrays(each, official)
            return
        if official is None and _has_idx(each):
            with open_tree(each) as tree:
                yield _idx(tree)
            return
    if official is not None:
        looked = f"{', '.join(official.sha256)}, {official.folder}/ or {{train,test}}_{{images,labels}}.npy"
        raise invalid("--from", str(path), f"a folder with {looked}", f"download them from {official.url}")
    if not path.is_dir():
        raise invalid("--from", str(path), "a folder of arrays or of images")
    yield _from_images(path)


def _rooms(folder: Path, name: str) -> Iterator[Path]:
    """Where the files of a data set may be: a subfolder of that name, this folder, or torchvision's `raw` in either."""
    called = [each for each in sorted(folder.glob("*")) if each.name.lower() == name.lower()]
    for each in (*called, folder):
        yield from (each, each / "raw")


def _looks_like(folder: Path, official: Published) -> bool:
    if official.read is _idx:
        return _has_idx(folder)
    return all((folder / each).exists() for each in official.wanted or ("train", "val"))


# -- CIFAR ---------------------------------------------------------------------------------------------------------


def _cifar(tree: Tree, train: Sequence[str], test: str, meta: str, labels: str, names: str) -> Raw:
    parts = [_cifar_part(tree, files, labels) for files in (train, [test])]
    where = f"{meta} of {tree.where}"
    told = load_pickle(tree.get(meta), where).get(names)
    if not isinstance(told, list) or not told:
        raise invalid(where, Description(f"no {names}"), "the names of the classes")
    words = tuple(_text(where, each) if isinstance(each, bytes) else str(each) for each in told)
    return _raw(parts, words)


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
        pixels, told = batch.get("data"), batch.get(labels_key)
        if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape[1:] != (3072,):
            got = Description(f"data of shape {list(getattr(pixels, 'shape', []))}")
            raise invalid(where, got, "bytes [n, 3072], each row an image of 32 × 32 pixels and 3 channels")
        if not len(pixels):
            raise invalid(where, Description("no images"), "at least one", "it is incomplete: get it again")
        if (
            not isinstance(told, list)
            or len(told) != len(pixels)
            or not all(isinstance(each, int) and abs(each) < LABELS for each in told)
        ):
            wanted = f"a label for each of the {len(pixels)} images, all below {LABELS}"
            raise invalid(where, Description(f"no matching {labels_key}"), wanted)
        images.append(pixels.reshape(-1, 3, 32, 32))
        labels += told
    return Part(images, np.array(labels, np.int64))


def _cifar10(tree: Tree) -> Raw:
    train = [f"data_batch_{number}" for number in range(1, 6)]
    return _cifar(tree, train, "test_batch", "batches.meta", "labels", "label_names")


def _cifar100(tree: Tree) -> Raw:
    return _cifar(tree, ["train"], "test", "meta", "fine_labels", "fine_label_names")


# -- TinyImageNet --------------------------------------------------------------------------------------------------


def _tinyimagenet(tree: Tree) -> Raw:
    """Classes are numbered by sorted WordNet ids; the test set is the public validation set, as is common practice."""
    found = [name.split("/") for name in tree.names]
    train = [parts for parts in found if len(parts) == 4 and parts[0] == "train" and parts[2] == "images"]
    ids = sorted({parts[1] for parts in train})
    number = {each: label for label, each in enumerate(ids)}
    if not ids:
        raise invalid(tree.where, Description("no train/<class>/images/"), "the folders of TinyImageNet")
    train.sort(key=lambda parts: (parts[1], _number(parts[3])))
    tests = []
    where = f"val_annotations.txt of {tree.where}"
    for line in filter(str.strip, _text(where, tree.get("val/val_annotations.txt")).splitlines()):
        file, wordnet, *_ = [*line.split("\t"), ""]
        if wordnet not in number:
            raise invalid(where, line, f"one of the {len(ids)} classes of train/")
        tests.append((number[wordnet], _number(file), f"val/images/{file}"))
    tests.sort()
    listed = [("/".join(parts), number[parts[1]]) for parts in train], [(file, label) for label, _, file in tests]
    parts = [
        Part(_decode([file for file, _ in part], tree.get, "RGB", tree.where), np.array([label for _, label in part]))
        for part in listed
    ]
    listing = tree.get("words.txt") if "words.txt" in tree.names else b""
    lines = _text(f"words.txt of {tree.where}", listing).splitlines()
    words = dict(line.split("\t", 1) for line in lines if "\t" in line)
    return _raw(parts, tuple(words.get(each, each).split(",")[0].strip() for each in ids))


def _number(file: str) -> tuple[int, str]:
    """The number in a file's name, by which the files of a class are sorted."""
    digits = re.findall(r"\d+", file.rsplit(".", 1)[0])
    return (int(digits[-1]) if digits else 0, file)


# -- MNIST ---------------------------------------------------------------------------------------------------------


def _idx_names(part: str, kind: str) -> list[str]:
    """The possible names of a file of images or labels."""
    axes = {"images": 3, "labels": 1}[kind]
    return [f"{part}-{kind}{mark}idx{axes}-ubyte{packed}" for packed in ("", ".gz") for mark in "-."]


IDX_FILES = {name for part in ("train", "t10k") for kind in ("images", "labels") for name in _idx_names(part, kind)}


def _has_idx(folder: Path) -> bool:
    return any((folder / each).is_file() for each in _idx_names("train", "images"))


def _idx(tree: Tree) -> Raw:
    """The four files of MNIST, or of a data set in the same format."""
    parts = []
    for part in ("train", "t10k"):
        (_, images), (where, labels) = (_idx_array(tree, _idx_names(part, kind)) for kind in ("images", "labels"))
        if len(labels) != len(images):
            got, wanted = Description(f"{len(labels):,} labels"), f"one for each of the {len(images):,} images"
            raise invalid(where, got, wanted, "the files belong to different data sets: get them again")
        chunks = [images[start : start + CHUNK, None] for start in range(0, len(images), CHUNK)]
        parts.append(Part(chunks, labels))
    return _raw(parts, None)


def _idx_array(tree: Tree, names: Sequence[str]) -> tuple[str, NDArray[np.uint8]]:
    """Read an array of bytes from a file in IDX format; also return its location, for error texts."""
    name = next((each for each in names if each in tree.names), names[0])
    where, again = f"{name} of {tree.where}", "it may be truncated or damaged: get it again"
    data, axes = tree.get(name), 3 if "images" in name else 1
    if data.startswith(b"\x1f\x8b"):
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            got = Description(f"{type(error).__name__}: {error}")
            raise invalid(where, got, "a .gz file that can be read to its end", again) from error
    start, header = bytes([0, 0, 8, axes]), 4 + 4 * axes
    if not data.startswith(start) or len(data) < header:
        got = Description(f"{len(data):,} bytes, the first {data[:4].hex(' ') or 'missing'}")
        raise invalid(where, got, f"a header of {header} bytes, the first {start.hex(' ')}", again)
    shape = np.frombuffer(data, ">u4", axes, offset=4).tolist()
    size, sizes = math.prod(shape), " × ".join(f"{each:,}" for each in shape)
    if len(data) - header != size or not size:
        got = Description(f"{len(data) - header:,} bytes after a header that says {sizes}")
        raise invalid(where, got, f"{size:,} bytes" if size else "at least one", again)
    return where, np.frombuffer(data, np.uint8, offset=header).reshape(shape)


# -- folders -------------------------------------------------------------------------------------------------------


def _from_arrays(folder: Path, official: Published | None) -> Raw:
    """Read `{train,test}_{images,labels}.npy` and, if it exists, the list in `class_names.json`."""
    parts = []
    for part in ("train", "test"):
        if part == "test" and not (folder / "test_images.npy").exists():
            continue
        images, labels = (_open_array(folder / f"{part}_{kind}.npy") for kind in ("images", "labels"))
        parts.append(Part(_channels_first(folder / f"{part}_images.npy", images), np.asarray(labels)))
    names = official.class_names if official else None
    if (listed := folder / "class_names.json").exists():
        names = _class_names(listed)
    return _raw(parts, names, official.classes if official else None)


def _class_names(path: Path) -> tuple[str, ...]:
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise invalid(str(path), Description(str(error)), "a list of names in JSON", "fix or remove it") from error
    if not (isinstance(told, list) and all(isinstance(each, str | int) for each in told)):
        raise invalid(str(path), told, 'a list of names, as in ["cat", "dog"]', "fix or remove it")
    return tuple(str(each) for each in told)


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
    last = images.ndim == 4 and images.shape[3] in (1, 3)
    if images.ndim == 4 and not last and images.shape[1] not in (1, 3):
        raise invalid(str(path), Description(f"shape {list(images.shape)}"), "1 or 3 channels, last or first")
    for start in range(0, len(images), CHUNK):
        chunk = np.asarray(images[start : start + CHUNK])
        yield chunk[:, None] if chunk.ndim == 3 else chunk.transpose(0, 3, 1, 2) if last else chunk


def _from_images(folder: Path) -> Raw:
    """Read one folder per class, in `train/` and `test/` (or `val/`, `validation/`) or, without tests, at the top."""
    inner = _folders(folder)
    tests = [each for each in ("test", "val", "validation") if each in inner]
    tops = [folder / each for each in ("train", *tests[:1])] if "train" in inner else [folder]
    names = _folders(tops[0])
    if len(names) < 2:
        got = Description(f"{len(names)} folders in {tops[0]}")
        expected = "a folder of images for each of two or more classes, the arrays {train,test}_{images,labels}.npy"
        raise invalid("--from", got, f"{expected}, or MNIST's four files")
    listed = []
    for top in tops:
        files = [(str(file), label) for label, name in enumerate(names) for file in _pictures(top / name)]
        if not files:
            raise invalid("--from", str(top), f"images ({', '.join(IMAGES)}) in {', '.join(names[:3])}, …")
        listed.append(files)
    filled = {label for _, label in listed[0]}
    if empty := [name for label, name in enumerate(names) if label not in filled]:
        got = Description(f"no images in {', '.join(empty)} of {tops[0]}")
        raise invalid("--from", got, f"images ({', '.join(IMAGES)}) in every class's folder", "remove other folders")
    if strange := [name for name in _folders(tops[-1]) if name not in names and _pictures(tops[-1] / name)]:
        raise not_trained(", ".join(strange))
    mode = _mode([file for files in listed for file, _ in files], _read_path, "")
    parts = [
        Part(_decode([file for file, _ in files], _read_path, mode, ""), np.array([label for _, label in files]))
        for files in listed
    ]
    return _raw(parts, tuple(names))


def _folders(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir() if each.is_dir() and not hidden(each.name))


def _pictures(folder: Path) -> list[Path]:
    return [each for each in sorted(folder.glob("*")) if each.suffix.lower() in IMAGES and not hidden(each.name)]


def _read_path(path: str) -> bytes:
    return Path(path).read_bytes()


# -- the hub -------------------------------------------------------------------------------------------------------


def _from_hub(name: str, named: str | None) -> Raw:
    """Read a data set of images with `datasets`: from the hub, or from a folder that `save_to_disk` wrote."""
    datasets = require("datasets", "hf", f"hf:{name}", "`datasets`")
    try:
        local = Path(name).expanduser()
        loaded = datasets.load_from_disk(str(local)) if _saved(local) else datasets.load_dataset(name)
    except Exception as error:  # the hub, the network and the data set's own files can fail in many ways
        got = Description(" ".join(f"{type(error).__name__}: {error}".split()))
        raise invalid(f"hf:{name}", got, "a data set that can be loaded") from error
    splits = dict(loaded) if hasattr(loaded, "keys") else {"train": loaded}
    if "train" not in splits:
        raise invalid(f"hf:{name}", sorted(splits), "a split called train")
    features = splits["train"].features
    image = next((key for key, each in features.items() if isinstance(each, datasets.Image)), None)
    if image is None:
        remedy = "dataset.cast_column('COLUMN', datasets.Image()) turns files or bytes into images"
        raise invalid(f"hf:{name}", dict(features), "a column of images", remedy)
    label = _label_column(f"hf:{name}", features, named, datasets.ClassLabel)
    parts = []
    held_out = [key for key in ("test", "validation", "valid", "val") if len(splits.get(key, ()))]
    # On the hub, labels of −1, or none, mean that a test set's labels are withheld.
    told = (key for key in held_out if all(each is not None and each >= 0 for each in splits[key][label]))
    tested = next(told, None)
    for split in ["train", *([tested] if tested else [])]:
        rows = splits[split].cast_column(image, datasets.Image(decode=False))
        parts.append((range(len(rows)), partial(_encoded, rows, image), np.asarray(splits[split][label][:])))
    where = f"hf:{name}"
    mode = "L" if all(_mode(numbers, read, where) == "L" for numbers, read, _ in parts) else "RGB"
    decoded = [Part(_decode(numbers, read, mode, where), labels) for numbers, read, labels in parts]
    names = getattr(features[label], "names", None)  # only a ClassLabel has them
    return replace(_raw(decoded, names and tuple(names)), label=named)


def _label_column(name: str, features: Mapping[str, Any], named: str | None, kind: type) -> str:
    """The column of labels: the one named by the user, or one of type `kind` (ClassLabel), or one of whole numbers."""
    whole = [key for key, each in features.items() if re.fullmatch(r"u?int\d+", str(getattr(each, "dtype", None)))]
    if named is not None and whole:
        check_name("--label", named, whole)
        return named
    classes = [key for key in whole if isinstance(features[key], kind)]
    found = [key for key in LABEL_COLUMNS if key in (classes or whole)] or classes or whole
    if not found or (found is whole and len(whole) > 1):
        words = "dataset.class_encode_column('COLUMN') turns words into numbers"
        remedy = f"name the column with --label: {', '.join(whole)}" if whole else words
        raise invalid(name, dict(features), "a column of class labels or whole numbers", remedy)
    return found[0]


def _encoded(rows: Any, column: str, number: int) -> bytes:
    """The encoded image in a row of a column of images."""
    told = rows[number][column]
    return bytes(told["bytes"]) if told["bytes"] is not None else Path(told["path"]).read_bytes()


def _raw(parts: Sequence[Part], class_names: tuple[str, ...] | None, classes: int | None = None) -> Raw:
    return Raw(parts[0], parts[1] if len(parts) > 1 else None, class_names, classes)


# -- images --------------------------------------------------------------------------------------------------------


@contextmanager
def _opened(item: Any, read: Callable[[Any], bytes], where: str) -> Iterator[Any]:
    """An image, which is decoded when its pixels are used."""
    pillow = require("PIL.Image", "images", "images", "Pillow")
    try:
        with pillow.open(io.BytesIO(read(item))) as image:
            yield image
    except InputError:
        raise
    except Exception as error:  # Pillow raises many kinds of errors for broken images
        got = Description(f"{type(error).__name__}: {error}")
        raise invalid(_called(item, where), got, "an image that can be read", "get it again") from error


def _called(item: Any, where: str) -> str:
    return f"{item} of {where}" if where else str(item)


def _mode(items: Iterable[Any], read: Callable[[Any], bytes], where: str) -> str:
    """Grey if all images are grey, else colour; only their headers are decoded."""
    for item in items:
        with _opened(item, read, where) as image:
            if image.mode not in ("1", "L"):
                return "RGB"
    return "L"


def _decode(items: Sequence[Any], read: Callable[[Any], bytes], mode: str, where: str) -> Iterator[NDArray[np.uint8]]:
    """Decode images in chunks, in several threads; all must have the size of the first."""
    size = None

    def decode(item: Any) -> NDArray[np.uint8]:
        with _opened(item, read, where) as image:
            if image.mode[0] in "IF":  # Pillow would clip values above 255
                got = Description(f"an image of mode {image.mode}")
                raise invalid(_called(item, where), got, "at most 8 bits per channel", "convert it first")
            pixels = np.asarray(image.convert(mode))
        return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)

    with ThreadPoolExecutor() as pool:
        for start in range(0, len(items), CHUNK):
            chunk = items[start : start + CHUNK]
            decoded = list(pool.map(decode, chunk))
            size = size or decoded[0].shape
            for item, pixels in zip(chunk, decoded, strict=True):
                if pixels.shape != size:
                    got = Description(f"{pixels.shape[2]} × {pixels.shape[1]} pixels")
                    wanted = f"{size[2]} × {size[1]} pixels like the first image"
                    raise invalid(_called(item, where), got, wanted, "resize all images to one size first")
            yield np.stack(decoded)


CIFAR10 = "airplane automobile bird cat deer dog frog horse ship truck"
CIFAR100 = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
    castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
    elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster
    man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck
    pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
    skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger
    tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""
FASHION = "T-shirt/top, trouser, pullover, dress, coat, sandal, shirt, sneaker, bag, ankle boot"

PUBLISHED = {
    "cifar10": Published(
        about="60,000 photographs of 32 × 32 pixels, 10 classes (Krizhevsky, 2009)",
        classes=10,
        folder="cifar-10-batches-py",
        url="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
        sha256={"cifar-10-python.tar.gz": "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"},
        content="088db17c50ddf8b6d4ae26627291c330435e1f1bd0f0f70db194a685896d7abd",
        read=_cifar10,
        wanted=[*[f"data_batch_{number}" for number in range(1, 6)], "test_batch", "batches.meta"],
        class_names=tuple(CIFAR10.split()),
    ),
    "cifar100": Published(
        about="60,000 photographs of 32 × 32 pixels, 100 classes (Krizhevsky, 2009)",
        classes=100,
        folder="cifar-100-python",
        url="https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
        sha256={"cifar-100-python.tar.gz": "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7"},
        content="4ec76184412ef58723bcb458e1cec84a30cf0ba7aab1200cf1b630ae839d37eb",
        read=_cifar100,
        wanted=["train", "test", "meta"],
        class_names=tuple(CIFAR100.split()),
    ),
    "tinyimagenet": Published(
        about="110,000 photographs of 64 × 64 pixels, 200 classes (Stanford CS231n, 2015)",
        classes=200,
        folder="tiny-imagenet-200",
        url="http://cs231n.stanford.edu/tiny-imagenet-200.zip",
        sha256={"tiny-imagenet-200.zip": "6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821"},
        content="54e8153e135bff6c70e91ffd7b4dd42fe48353067a79206d0b7538202d6a2dcd",
        read=_tinyimagenet,
    ),
    "mnist": Published(
        about="70,000 handwritten digits of 28 × 28 pixels, grey, 10 classes (LeCun et al., 1998)",
        classes=10,
        folder="MNIST/raw",
        url="https://ossci-datasets.s3.amazonaws.com/mnist",
        sha256={
            "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        },
        content="e0130f111822ed58de3ba94ad450971c80ee446d2ff4d08e2b4c8e8be16eae50",
        read=_idx,
        class_names=tuple("0123456789"),
    ),
    "fashionmnist": Published(
        about="70,000 pictures of clothes of 28 × 28 pixels, grey, 10 classes (Xiao et al., 2017)",
        classes=10,
        folder="FashionMNIST/raw",
        url="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        sha256={
            "train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        },
        content=None,
        read=_idx,
        class_names=tuple(FASHION.split(", ")),
    ),
}
"""Data sets that can be downloaded; their hashes are the ones widely quoted."""
