"""Training state beside the weights as JSON and tensors. No pickle, neither out nor in.

pack() turns a tree of plain Python values, numpy arrays and tensors into a JSON document and named
tensors; unpack() is its inverse, bit for bit. What JSON lacks is an object with one key:

    {"$tensor": name}  {"$array": name}           a tensor, a numpy array: stored under that name
    {"$scalar": [dtype, base64]}                  a 0-d tensor in main memory (optimizers' "step")
    {"$number": [numpy dtype, base64]}            a numpy scalar
    {"$tuple": [...]}  {"$set": [...]}            a tuple, a set
    {"$map": [[key, value], ...]}                 a dict with keys other than plain strings
    {"$counter": [[key, value], ...]}             a collections.Counter
    {"$float": "nan" | "inf" | "-inf"}  {"$bytes": base64}  {"$dtype": "BF16"}

Everything else is refused by the path to it. Documents come from a server, so unpack() builds these
types only and nothing it reads is executed.
"""

from __future__ import annotations

import base64
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch

from stockpot import dtypes
from stockpot.errors import ErrorCode, StockpotError

MAX_DEPTH = 64  # of a tree, in both directions
_PLAIN_KEY_TYPES = (str, int, float, bool, type(None))

Fetch = Callable[[str], torch.Tensor]  # name -> the tensor that pack() gave that name


def pack(value: Any, tensors: MutableMapping[str, torch.Tensor], path: str, depth: int = 0) -> Any:
    """The JSON form of `value`; its tensors go into `tensors`, under names that begin with path.

    The tensors are the live ones, not copies.

    Raises:
        StockpotError: INVALID_ARGUMENT names the place of a value that cannot be stored.
    """
    if depth > MAX_DEPTH:
        raise _refused(path, "is nested too deeply")
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": str(value)}

    def child(item: Any, key: object) -> Any:
        return pack(item, tensors, f"{path}/{key}", depth + 1)

    if isinstance(value, torch.Tensor):
        return _pack_tensor(value, tensors, path)
    if isinstance(value, np.ndarray):
        try:
            tensors[path] = torch.from_numpy(np.array(value, order="C"))
        except TypeError as error:
            raise _refused(path, str(error)) from None
        return {"$array": path}
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        return {"$number": [value.dtype.str, _text_of(value.tobytes())]}
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": _text_of(bytes(value))}
    if isinstance(value, torch.dtype):
        return {"$dtype": dtypes.name_of(value)}
    if isinstance(value, list):
        return [child(item, index) for index, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": [child(item, index) for index, item in enumerate(value)]}
    if isinstance(value, (set, frozenset)):
        return {"$set": [child(item, index) for index, item in enumerate(sorted(value))]}
    if isinstance(value, Mapping):
        return _pack_mapping(value, child, path)
    raise _refused(path, f"is a {type(value).__name__}, not plain data, an array or a tensor")


def _pack_tensor(value: torch.Tensor, tensors: MutableMapping[str, torch.Tensor], path: str
                 ) -> Any:
    is_plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided
    if is_plain and value.dim() == 0 and value.is_cpu:
        data = value.detach().contiguous().view(1).view(torch.uint8).numpy().tobytes()
        return {"$scalar": [dtypes.name_of(value.dtype), _text_of(data)]}
    tensors[path] = value
    return {"$tensor": path}


def _pack_mapping(value: Mapping[Any, Any], child: Callable[[Any, object], Any], path: str) -> Any:
    if isinstance(value, Counter):
        return {"$counter": [[child(key, index), child(item, index)]
                             for index, (key, item) in enumerate(value.items())]}
    if all(type(key) is str and not key.startswith("$") for key in value):
        return {key: child(item, key) for key, item in value.items()}
    for key in value:
        if type(key) not in _PLAIN_KEY_TYPES:
            raise _refused(path, f"has a key that is a {type(key).__name__}")
    return {"$map": [[child(key, "key"), child(item, key)] for key, item in value.items()]}


def unpack(document: Any, fetch: Fetch, depth: int = 0) -> Any:
    """The inverse of pack(); `fetch` gives the tensors.

    Raises:
        StockpotError: CORRUPTION if it is not what pack() writes.
    """
    if depth > MAX_DEPTH:
        raise _broken("it is nested too deeply")
    if document is None or isinstance(document, (bool, int, float, str)):
        return document
    if isinstance(document, list):
        return [unpack(item, fetch, depth + 1) for item in document]
    if not isinstance(document, dict):
        raise _broken(f"it holds a {type(document).__name__}")
    tag = next(iter(document), "")
    if len(document) != 1 or not tag.startswith("$"):
        return {key: unpack(item, fetch, depth + 1) for key, item in document.items()}
    try:
        return _untag(tag, document[tag], fetch, depth + 1)
    except (ValueError, TypeError, LookupError, RuntimeError) as error:
        raise _broken(f"{tag}: {error}") from None


def _untag(tag: str, content: Any, fetch: Fetch, depth: int) -> Any:
    def pairs() -> Iterator[tuple[Any, Any]]:
        for key, item in content:
            yield unpack(key, fetch, depth), unpack(item, fetch, depth)

    if tag == "$tensor":
        return fetch(content)
    if tag == "$array":
        return fetch(content).numpy()
    if tag == "$scalar":
        data = bytearray(base64.b64decode(content[1], validate=True))
        return torch.frombuffer(data, dtype=dtypes.dtype_of(content[0])).view(())
    if tag == "$number":
        dtype = np.dtype(content[0])
        if dtype.kind not in "biufc":
            raise _broken(f"a number of type {content[0]}")
        return np.frombuffer(base64.b64decode(content[1], validate=True), dtype)[0]
    if tag == "$float":
        return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[content]
    if tag == "$bytes":
        return base64.b64decode(content, validate=True)
    if tag == "$dtype":
        return dtypes.dtype_of(content)
    if tag == "$tuple":
        return tuple(unpack(item, fetch, depth) for item in content)
    if tag == "$set":
        return {unpack(item, fetch, depth) for item in content}
    if tag == "$map":
        return dict(pairs())
    if tag == "$counter":
        return Counter(dict(pairs()))
    raise _broken(f"unknown tag {tag!r}")


def tensor_names(document: Any) -> Iterator[str]:
    """The names of the tensors that a document refers to, in its order."""
    if isinstance(document, list):
        for item in document:
            yield from tensor_names(item)
    elif isinstance(document, dict):
        for key, item in document.items():
            if key in ("$tensor", "$array") and isinstance(item, str):
                yield item
            else:
                yield from tensor_names(item)


def rng_state() -> dict[str, Any]:
    """The generators a step may draw from: Python's, numpy's, torch's, and this process's GPU's."""
    state: dict[str, Any] = {"python": random.getstate(), "numpy": np.random.get_state(),
                             "torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Puts the generators back to what rng_state() said."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())


def _text_of(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _refused(path: str, why: str) -> StockpotError:
    return StockpotError(ErrorCode.INVALID_ARGUMENT, f"state {path} {why}")


def _broken(why: str) -> StockpotError:
    return StockpotError(ErrorCode.CORRUPTION, f"the stored training state cannot be read: {why}")
