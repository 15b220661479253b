"""States on disk: nested dicts and lists of numbers and tensors, in one safetensors file that contains no code.

    safetensors header       __metadata__.parabolic: JSON with the digest, the version and the outline of the content
    safetensors data         the tensors, which the outline names

The digest covers every byte of the file, with zeros in its own place.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from parabolic.checks import Description, InputError, first_line, invalid, plain

__all__ = ["Damaged", "check_state", "overwrite", "pack_state", "read_outline", "read_state", "refill", "same_state"]

VERSION = 2  # since memories store when examples arrived; all versions write and find the digest in the same way
BLANK = "0" * 64
TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


class Damaged(InputError):
    """A file is missing, or is not, or no longer, what was written."""


def pack_state(content: Mapping[str, Any]) -> bytearray:
    """Pack nested dicts, lists, tuples, tensors, strings and numbers into the bytes of a file.

    Each tensor is copied once, to its place in the file: packing takes as much memory again as the state, and no more.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "a.safetensors"
    >>> size = path.write_bytes(pack_state({"steps": 3, "weights": {0: torch.ones(2)}}))
    >>> read_state(path)
    {'steps': 3, 'weights': {0: tensor([1., 1.])}}
    """
    tensors: dict[str, Tensor] = {}
    metadata = {"sha256": BLANK, "version": VERSION, "content": _outline(content, "", tensors)}
    header: dict[str, Any] = {"__metadata__": {"parabolic": json.dumps(metadata)}}
    end = 0
    for name in sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize):  # each at a multiple of its size
        tensor = tensors[name]
        start, end = end, end + tensor.numel() * tensor.dtype.itemsize
        header[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    header_end = 8 + len(text)
    data = bytearray(header_end + end)
    data[:header_end] = len(text).to_bytes(8, "little") + text
    for name, tensor in tensors.items():
        if tensor.numel():
            span = {"count": tensor.numel(), "offset": header_end + header[name]["data_offsets"][0]}
            torch.frombuffer(data, dtype=tensor.dtype, **span).view(tensor.shape).copy_(tensor)
    seal_start = data.index(_seal(BLANK))
    data[seal_start : seal_start + len(_seal(BLANK))] = _seal(sha256(data).hexdigest())
    return data


def check_state(name: str, content: Any) -> None:
    """Refuse what `pack_state` would refuse.

    >>> check_state("notes", {"seen": {2, 3}})
    Traceback (most recent call last):
        ...
    parabolic.checks.InputError: notes.seen: got <class 'set'>, expected dicts, lists, tensors, texts and numbers; ...
    """
    _outline(content, name, {})


def read_state(path: Path) -> dict[str, Any]:
    """Read what `pack_state` packed; refuse a file that is damaged, of another program or of a later version."""
    with _read_errors(path):
        data = path.read_bytes()
        metadata = _verified_metadata(data)
        return _content(path, metadata, safetensors.torch.load(data))


def read_outline(path: Path) -> dict[str, Any]:
    """Read all but the tensors, which are on the device `meta`: they have a shape and a type, but no numbers.

    Only the header is read, so the digest is not verified: a file that is too short is refused, but other damage to
    the tensors goes unnoticed.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "a.safetensors"
    >>> size = path.write_bytes(pack_state({"steps": 3, "weights": torch.ones(2)}))
    >>> read_outline(path)
    {'steps': 3, 'weights': tensor(..., device='meta', size=(2,))}
    """
    with _read_errors(path), path.open("rb") as file:
        size, header_end = os.fstat(file.fileno()).st_size, 8 + int.from_bytes(file.read(8), "little")
        if header_end > size:
            raise ValueError("its header is incomplete")
        header = json.loads(file.read(header_end - 8))
        metadata = json.loads(header.pop("__metadata__")["parabolic"])
        if size - header_end != max((entry["data_offsets"][1] for entry in header.values()), default=0):
            raise ValueError("its tensors are incomplete")
        return _content(path, metadata, {name: _meta_tensor(**entry) for name, entry in header.items()})


def same_state(one: Any, other: Any) -> bool:
    """Whether two states are bit-identical; numbers that are NaN count as the same.

    >>> same_state({"a": [torch.ones(2)]}, {"a": [torch.ones(2)]}), same_state(torch.ones(2), torch.ones(2).double())
    (True, False)
    """
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and _bytes(one) == _bytes(other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same_state(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same_state, one, other))
    return type(one) is type(other) and bool(one == other or (one != one and other != other))


def overwrite(targets: Mapping[str, Tensor], values: Mapping[str, Tensor] | None) -> None:
    """Copy values into tensors of the same names and shapes, in place; if any shape differs, nothing is changed.

    `Tensor.copy_` alone would broadcast, as of a row over a table.

    >>> averages = {"weight": torch.zeros(2, 2)}
    >>> overwrite(averages, {"weight": torch.ones(2)})
    Traceback (most recent call last):
        ...
    parabolic.checks.InputError: weight: got a tensor of shape [2] and type float32, expected one of shape [2, 2]
    """
    if not isinstance(values, Mapping):
        raise invalid("state", values, "tensors named " + ", ".join(targets), "it was saved by another version")
    for name, target in targets.items():
        value = values.get(name)
        if not isinstance(value, Tensor) or value.shape != target.shape:
            raise invalid(name, value, f"one of shape {list(target.shape)}")
    for name, target in targets.items():
        target.copy_(values[name])


def refill(target: Tensor, values: Tensor) -> None:
    """Set the beginning of a tensor to `values` and the rest to zeros, in place; `values` may be that beginning itself.

    >>> seen = torch.tensor([5, 5, 5])
    >>> refill(seen, torch.tensor([1, 2]))
    >>> seen
    tensor([1, 2, 0])
    """
    target[: len(values)].copy_(values)
    target[len(values) :].zero_()


@contextmanager
def _read_errors(path: Path) -> Iterator[None]:
    """Turn the errors of reading a file into one that says what to do."""
    try:
        yield
    except InputError:
        raise
    except OSError as error:
        raise invalid("path", str(path), "a file that can be read", error.strerror or str(error)) from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, safetensors.SafetensorError) as error:
        expected = "a whole file that parabolic wrote"
        remedy = f"it is another program's, truncated or damaged ({error}): use a copy, or an earlier file"
        raise invalid("path", str(path), expected, remedy, kind=Damaged) from error


def _content(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The content of a file, by its header's JSON and its tensors."""
    if metadata["version"] > VERSION:
        got = Description(f"{path}, of version {metadata['version']}")
        raise invalid("path", got, f"a file of version {VERSION} or earlier", "install a newer parabolic-cl")
    content = _build(metadata["content"], tensors)
    if not isinstance(content, dict):
        raise ValueError("it is empty")
    return content


def _meta_tensor(dtype: str, shape: list[int], data_offsets: list[int]) -> Tensor:
    """A tensor without numbers, by its entry in a header."""
    dtypes = {name: kind for kind, name in TYPES.items()}
    try:
        tensor = torch.empty(shape, dtype=dtypes[dtype], device="meta")
    except RuntimeError as error:  # for a shape that no tensor has
        raise ValueError(first_line(error)) from error
    if tensor.nbytes != data_offsets[1] - data_offsets[0]:
        raise ValueError("its tensors are of another size")
    return tensor


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _seal(digest: str) -> bytes:
    """The digest as it is in the header: JSON within a JSON string. No text of the content can look like it."""
    return json.dumps(json.dumps({"sha256": digest})[:-1])[1:-1].encode()


def _verified_metadata(data: bytes) -> dict[str, Any]:
    """The header's JSON, after verifying the digest."""
    header_end = 8 + int.from_bytes(data[:8], "little")
    metadata: dict[str, Any] = json.loads(json.loads(data[8:header_end])["__metadata__"]["parabolic"])
    digest = sha256(data[:header_end].replace(_seal(metadata["sha256"]), _seal(BLANK), 1))
    digest.update(memoryview(data)[header_end:])
    if digest.hexdigest() != metadata["sha256"]:
        raise ValueError("its digest does not match")
    return metadata


def _outline(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """A value as JSON in which every object is a tag; tensors are collected under dotted names."""
    value = plain(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        name = name.encode("utf-8", "backslashreplace").decode()  # readers refuse what is no UTF-8
        while name in tensors:
            name += "'"  # keys that contain dots may yield the same name
        if value.layout != torch.strided or value.dtype not in TYPES:
            raise invalid(name, value, "a dense tensor of a type that safetensors has", "convert it")
        tensors[name] = value.detach()
        return {"tensor": name}
    if isinstance(value, list | tuple):
        items = [_outline(item, _child_name(name, i), tensors) for i, item in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        pairs = [[_key(key, name), _outline(item, _child_name(name, key), tensors)] for key, item in value.items()]
        versions = getattr(value, "_metadata", None)  # of a model's modules, which need them to read their state
        return {"dict": pairs} | ({"versions": _outline(versions, name, tensors)} if versions else {})
    raise invalid(name, type(value), "dicts, lists, tensors, texts and numbers", "nothing else can be saved")


def _key(key: Any, name: str) -> str | int:
    """Check a key; in a list, unlike in an object, JSON can hold whole numbers too."""
    key = plain(key)
    if not isinstance(key, str | int):
        raise invalid(name, Description(f"the key {key!r}"), "keys that are texts or whole numbers", "rename it")
    return key


def _child_name(name: str, key: str | int) -> str:
    return f"{name}.{key}" if name else str(key)


def _build(node: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(node, list):
        return [_build(child, tensors) for child in node]
    if not isinstance(node, dict):
        return node
    if "tensor" in node:
        return tensors[node["tensor"]]
    if "tuple" in node:
        return tuple(_build(child, tensors) for child in node["tuple"])
    if "versions" not in node:
        return {key: _build(child, tensors) for key, child in node["dict"]}
    state = _StateDict((key, _build(child, tensors)) for key, child in node["dict"])
    state._metadata = _build(node["versions"], tensors)
    return state


class _StateDict(dict[str, Any]):
    """A model's state with the versions of its modules, in the attribute where torch looks for them."""

    _metadata: dict[str, Any]
