"""Sources of data: where they are, and how they come into the cache."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from parabolic.checks import Description, invalid
from parabolic.files import file_name
from parabolic.states import Damaged
from parabolic.streams import readers
from parabolic.streams.archives import Tree, download, open_tree
from parabolic.streams.cache import Arrays, Cache, DataSet, Origin, Raw, ShowProgress

__all__ = ["PUBLISHED", "Published", "find_data", "load", "open_source", "own_names", "prepare"]

HUB = "hf:"
EMBEDDED = ("digits", "blobs")  # seq-digits and seq-blobs come with the package: other data cannot have these names


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

    def completed(self, raw: Raw) -> Raw:
        """What was read of it, with its number of classes and, unless they were read too, their names."""
        return replace(raw, classes=self.classes, class_names=raw.class_names or self.class_names)


def find_data(name: str, cache: Cache | None = None) -> DataSet | None:
    """The description of a prepared data set (`hf:NAME` too), or None if there is none; its files are not checked."""
    return (cache or Cache()).find(_key(name))


def own_names() -> list[str]:
    """Names of prepared data that the user chose; data requested as `hf:NAME` are stored under generated names."""
    cache = Cache()
    data_sets = {name: cache.find(name) for name in cache.names()}
    return [name for name, data in data_sets.items() if data is None or _key(data.source) != name]


def load(name: str, cache: Cache | None = None) -> tuple[DataSet, Arrays, Arrays | None]:
    """Load a prepared data set with its training and test arrays, memory-mapped and verified.

    A damaged data set is prepared again if its source is still available. Nothing is downloaded, except that
    `hf:NAME` is fetched from the hub the first time.
    """
    cache = cache or Cache()
    data = find_data(name, cache)
    if data is None:
        if not _is_available(name, cache):
            if (damage := cache.damaged(_key(name))) is not None:
                raise damage
            remedy = f"`parabolic data prepare {name}`"
            if name in PUBLISHED:
                remedy += " downloads it, or with --from FOLDER reads it from there"
            else:
                remedy += " --from FOLDER"
            raise invalid("data", name, f"a data set prepared in {cache.root}", remedy)
        data = prepare(name, cache=cache)
    try:
        return data, *cache.read(data)
    except Damaged:
        newer = find_data(name, cache)  # another process may have replaced it meanwhile and removed the old files
        if newer is None or newer == data:
            if not _is_available(name, cache):
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
    if name in EMBEDDED:
        raise invalid("name", name, f"another one: the stream seq-{name} comes with the package", f"use my-{name}")
    cache, key = cache or Cache(), _key(name)
    with cache.lock(key):
        found, origin = cache.find(key), cache.origin(key)
        current = None if found is None or again or label not in (None, found.label) else found
        if source is None and current is not None and _is_intact(current, cache):
            return current
        location = _locate(name, source, origin)
        if current is not None and current.source == location and _is_intact(current, cache):
            return current
        if label is None:
            label = origin.label if origin is not None and origin.source == location else None
        elif not (location or "").startswith(HUB):
            raise invalid("--label", label, "a source with columns, hf:NAME", "leave it out")
        if location is None:
            location = _download(name, cache, progress)
        others = {
            official.content: other for other, official in PUBLISHED.items() if official.content and other != name
        }
        with open_source(name, location, label) as raw:
            return cache.write(key, raw, location, progress, others if name in PUBLISHED else None)


def _is_intact(data: DataSet, cache: Cache) -> bool:
    try:
        cache.read(data)
    except Damaged:
        return False
    return True


def _is_available(name: str, cache: Cache) -> bool:
    """Whether a data set can be prepared from local files, or is named as one of the hub."""
    downloaded = name in PUBLISHED and all(path.exists() for path in _downloads(name, cache))
    origin = cache.origin(_key(name))
    return name.startswith(HUB) or downloaded or (origin is not None and Path(origin.source).exists())


def _locate(name: str, source: str | Path | None, origin: Origin | None) -> str | None:
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
        return _absolute_name(str(source))
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


def _absolute_name(name: str) -> str:
    """A hub name unchanged; a saved folder's name with its absolute path, as a relative one is ambiguous."""
    local = Path(name.removeprefix(HUB)).expanduser()
    return f"{HUB}{local.resolve()}" if readers.is_saved(local) else name


def _key(name: str) -> str:
    """The folder name of a data set in the cache, distinct for distinct hub names."""
    if not name.startswith(HUB):
        return name
    name = _absolute_name(name)
    readable = file_name(name.removeprefix(HUB)).strip("-.")
    return f"hf-{readable[-40:].strip('-.')}-{sha256(name.encode()).hexdigest()[:8]}"


@contextmanager
def open_source(name: str, location: str, label: str | None = None) -> Iterator[Raw]:
    """Open a data set in a folder, in an archive or on the hub; it can be read within the context."""
    if location.startswith(HUB):
        yield readers.from_hub(location.removeprefix(HUB), label)
        return
    path, official = Path(location), PUBLISHED.get(name)
    if path.name in readers.IDX_FILES and path.is_file():  # one of MNIST's four files
        path = path.parent
    if official is not None:
        archives = [path, *(path / file for file in official.sha256 if official.packed)]
        folders = [path / folder for folder in (name, official.folder, Path(official.folder).name, ".")]
        existing = [archive for archive in archives if archive.is_file()]
        existing += [folder for folder in folders if _looks_like(folder, official)]
        if existing:
            with open_tree(existing[0], official.wanted) as tree:
                yield official.completed(official.read(tree))
            return
    for folder in _candidate_folders(path, name):
        if (folder / "train_images.npy").is_file():
            raw = readers.from_arrays(folder)
            yield raw if official is None else official.completed(raw)
            return
        if official is None and readers.has_idx(folder):
            with open_tree(folder) as tree:
                yield readers.idx(tree)
            return
    if official is not None:
        expected = f"{', '.join(official.sha256)}, {official.folder}/ or {{train,test}}_{{images,labels}}.npy"
        raise invalid("--from", str(path), f"a folder with {expected}", f"download them from {official.url}")
    if not path.is_dir():
        raise invalid("--from", str(path), "a folder of arrays or of images")
    yield readers.from_images(path)


def _candidate_folders(folder: Path, name: str) -> Iterator[Path]:
    """Where the files of a data set may be: a subfolder of that name, this folder, or torchvision's `raw` in either."""
    same_name = [path for path in sorted(folder.glob("*")) if path.name.lower() == name.lower()]
    for path in (*same_name, folder):
        yield from (path, path / "raw")


def _looks_like(folder: Path, official: Published) -> bool:
    if official.read is readers.idx:
        return readers.has_idx(folder)
    return all((folder / file).exists() for file in official.wanted or ("train", "val"))


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
        read=readers.cifar10,
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
        read=readers.cifar100,
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
        read=readers.tinyimagenet,
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
        read=readers.idx,
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
        read=readers.idx,
        class_names=tuple(FASHION.split(", ")),
    ),
}
"""Data sets that can be downloaded; their hashes are the ones widely quoted."""
