"""Plain values <-> canonical JSON: compact ASCII, with one-key objects ``{"~x": ...}`` for what JSON lacks.

======  ===========================================================
``~f``  float that is not finite: its 8 bytes, big-endian, as hex
``~i``  int of more than 4096 bits, as hex
``~s``  str with lone surrogates: base64 of UTF-8 with surrogatepass
``~b``  bytes, base64
``~n``  numpy scalar: [dtype, base64 of its bytes, little-endian]
``~t``  tuple: [items]
``~d``  dict with keys that are not all plain str: [[key, value]]
``~o``  OrderedDict, likewise
``~c``  Counter, likewise
``~r``  a tensor, stored under the value's own name + "/" + this
======  ===========================================================
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ckptstore.errors import CorruptCheckpoint, UnsupportedValue
from ckptstore.format.document import loads
from ckptstore.state.markers import Sharded
from ckptstore.state.names import join
from ckptstore.state.tensors import is_tensor

MAX_DEPTH = 100
MAX_BYTES = 256 << 20  #: of one encoded value: what a reader is willing to parse
_INT_BITS = 4096
_NUMPY = {"bool"} | {
    f"{kind}{bits}"
    for kind, sizes in (
        ("int", (8, 16, 32, 64)),
        ("uint", (8, 16, 32, 64)),
        ("float", (16, 32, 64)),
        ("complex", (64, 128)),
    )
    for bits in sizes
}
_REMEDY = (
    "a state holds modules, optimizers, objects with state_dict and load_state_dict, tensors, numpy arrays, None, "
    "bool, int, float, str, bytes, list, tuple and dict; convert it to one of those"
)
OnTensor = Callable[[str, object], None]


def encode(obj: object, path: str, on_tensor: OnTensor | None = None) -> bytes:
    """The encoding of `obj`, which lies at `path` of the state.

    Tensors in it become references, and `on_tensor(relative name, tensor)` is called for each; without it they are
    refused. Raises UnsupportedValue, naming the path, for what is not plain.
    """
    tree = _Encoder(path, on_tensor).node(obj, "", ())
    data = json.dumps(tree, separators=(",", ":"), allow_nan=False).encode("ascii")
    if len(data) > MAX_BYTES:
        raise UnsupportedValue(
            f"{path}: {len(data)} bytes of plain data, more than {MAX_BYTES}; make it a tensor or an array"
        )
    return data


def unsupported(path: str, obj: object) -> UnsupportedValue:
    kind = type(obj)
    return UnsupportedValue(f"{path}: {kind.__module__}.{kind.__qualname__} cannot be saved; {_REMEDY}")


class _Encoder:
    def __init__(self, path: str, on_tensor: OnTensor | None) -> None:
        self.path = path
        self.on_tensor = on_tensor
        self.rels: set[str] = set()

    def at(self, rel: str) -> str:
        return f"{self.path}/{rel}" if rel else self.path

    def node(self, obj: object, rel: str, parents: tuple[int, ...]) -> Any:
        made = _scalar(obj)
        if made is not NotImplemented:
            return made
        if is_tensor(obj) or isinstance(obj, Sharded):
            return self.tensor(obj, rel)
        if not isinstance(obj, list | tuple | Mapping):
            raise unsupported(self.at(rel), obj)
        if id(obj) in parents:
            raise UnsupportedValue(f"{self.at(rel)}: the container contains itself")
        if len(parents) >= MAX_DEPTH:
            raise UnsupportedValue(f"{self.at(rel)}: nested more than {MAX_DEPTH} deep")
        parents += (id(obj),)
        if isinstance(obj, Mapping):
            return self.mapping(obj, rel, parents)
        items = []
        for index, item in enumerate(obj):
            made = _scalar(item)  # first, since a relative name costs more than most items
            items.append(self.node(item, join(rel, index), parents) if made is NotImplemented else made)
        return {"~t": items} if isinstance(obj, tuple) else items

    def mapping(self, obj: Mapping[Any, Any], rel: str, parents: tuple[int, ...]) -> Any:
        tag = "~o" if isinstance(obj, OrderedDict) else "~c" if isinstance(obj, Counter) else ""
        if not tag and all(type(key) is str and _as_json_key(key) for key in obj):
            return {key: self.node(item, join(rel, key), parents) for key, item in obj.items()}
        pairs = [[self.key(key, rel), self.node(item, join(rel, key), parents)] for key, item in obj.items()]
        return {tag or "~d": pairs}

    def key(self, key: object, rel: str) -> Any:
        return _Encoder(f"a key of {self.at(rel)}", None).node(key, "", ())

    def tensor(self, obj: object, rel: str) -> Any:
        if self.on_tensor is None:
            raise UnsupportedValue(f"{self.at(rel)}: a tensor cannot be here")
        if rel in self.rels:
            raise UnsupportedValue(f"{self.at(rel)}: two keys of a dict that read the same hold tensors; rename one")
        self.rels.add(rel)
        self.on_tensor(rel, obj)
        return {"~r": rel}


def _as_json_key(key: str) -> bool:
    return not key.startswith("~") and (key.isascii() or _is_unicode(key))


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _scalar(obj: object) -> Any:
    """What stands for an atom in JSON; NotImplemented for anything else."""
    if obj is None or obj is True or obj is False:
        return obj
    if isinstance(obj, np.generic):
        return _numpy_scalar(obj)
    if isinstance(obj, int):
        plain = int.__int__(obj)
        return plain if plain.bit_length() <= _INT_BITS else {"~i": hex(plain)}
    if isinstance(obj, float):
        number = float.__float__(obj)
        return number if math.isfinite(number) else {"~f": struct.pack(">d", number).hex()}
    if isinstance(obj, str):
        text = str.__str__(obj)
        return text if text.isascii() or _is_unicode(text) else {"~s": _b64(text.encode("utf-8", "surrogatepass"))}
    if isinstance(obj, bytes):
        return {"~b": _b64(obj)}
    return NotImplemented


def _numpy_scalar(obj: np.generic) -> Any:
    if obj.dtype.name in _NUMPY:
        return {"~n": [obj.dtype.name, _b64(obj.astype(obj.dtype.newbyteorder("<")).tobytes())]}
    if isinstance(obj, str):  # np.str_ is a str, np.bytes_ are bytes
        return _scalar(str.__str__(obj))
    return {"~b": _b64(obj)} if isinstance(obj, bytes) else NotImplemented


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def decode(data: bytes, tensors: Callable[[str], object] | None = None) -> object:
    """The value that `data` encodes; `tensors(relative name)` gives what its references stand for.

    `data` is not trusted: raises CorruptCheckpoint unless it is what `encode` writes.
    """
    if len(data) > MAX_BYTES:
        raise CorruptCheckpoint(f"a plain value of {len(data)} bytes, more than {MAX_BYTES}")
    try:
        tree = loads(data)
        return _Decoder(tensors).node(tree, 0)
    except (ValueError, TypeError, LookupError, RecursionError, struct.error) as error:
        raise CorruptCheckpoint(f"a plain value does not decode: {type(error).__name__}: {error}") from error


class _Decoder:
    def __init__(self, tensors: Callable[[str], object] | None) -> None:
        self.tensors = tensors

    def node(self, node: Any, depth: int) -> Any:
        if not isinstance(node, list | dict):
            return node
        if depth > MAX_DEPTH:
            raise ValueError(f"nested more than {MAX_DEPTH} deep")
        if isinstance(node, list):
            return self.items(node, depth)
        if len(node) == 1:
            ((tag, body),) = node.items()
            if tag.startswith("~"):
                return self.tagged(tag, body, depth)
        if any(key.startswith("~") for key in node):
            raise ValueError("a tag beside other keys")
        return {key: self.node(item, depth + 1) for key, item in node.items()}

    def items(self, body: Any, depth: int) -> list[Any]:
        if not isinstance(body, list):
            raise TypeError("a list is missing")
        return [self.node(item, depth + 1) for item in body]

    def tagged(self, tag: str, body: Any, depth: int) -> Any:
        match tag:
            case "~f":
                return struct.unpack(">d", bytes.fromhex(body))[0]
            case "~i":
                return int(body, 16)
            case "~s":
                return base64.b64decode(body, validate=True).decode("utf-8", "surrogatepass")
            case "~b":
                return base64.b64decode(body, validate=True)
            case "~n":
                return _decode_numpy(body)
            case "~t":
                return tuple(self.items(body, depth))
            case "~d" | "~o" | "~c":
                return self.pairs(tag, body, depth)
            case "~r":
                if self.tensors is None or not isinstance(body, str):
                    raise ValueError("a reference where no tensor can be")
                return self.tensors(body)
        raise ValueError(f"unknown tag {tag}")

    def pairs(self, tag: str, body: Any, depth: int) -> Any:
        made = {self.node(key, depth + 1): self.node(item, depth + 1) for key, item in body}
        if len(made) != len(body):
            raise ValueError("a key twice in one dict")
        return OrderedDict(made) if tag == "~o" else Counter(made) if tag == "~c" else made


def _decode_numpy(body: Any) -> np.generic:
    name, data = body
    if name not in _NUMPY:
        raise ValueError(f"unknown numpy dtype {name}")
    dtype = np.dtype(name).newbyteorder("<")
    raw = base64.b64decode(data, validate=True)
    if len(raw) != dtype.itemsize:
        raise ValueError(f"{len(raw)} bytes for a {name}")
    scalar: np.generic = np.frombuffer(raw, dtype)[0]
    return scalar
