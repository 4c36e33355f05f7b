"""A frame: one JSON control part and named arrays, as bytes. What travels is data, never code: no pickle.

    bytes 0-3    b"ZoRR"
    bytes 4-7    version of the format, little endian like every number here
    bytes 8-15   length of the control part
    control      a JSON object without NaN literals, padded with spaces so that the body starts at a multiple of 8
    body         a safetensors file: length of its header, header, the arrays' bytes

The body is written and read here instead of by the safetensors package because nothing is copied: an encoded frame
refers to the arrays' own memory, decoded arrays refer to the frame's. What is read is believed only after it was
compared with the number of bytes that are really there.
"""

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from arctic_platform.errors import InputError, WireError

FRAME_VERSION = 1
MAX_CONTROL_LEN = 64 * 2**20
MAX_CONTROL_VALUES = 4 * 2**20
MAX_NUM_DIMS = 32
CHUNK_BYTES = 2**20

Part = bytes | memoryview
Buffer = bytes | bytearray | memoryview

_MAGIC = b"ZoRR"
_PREFIX = struct.Struct("<4sIQ")
_LENGTH = struct.Struct("<Q")
_NUMPY_NAMES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "C64": "<c8", "BOOL": "|b1", "I8": "|i1", "U8": "|u1",
    "I16": "<i2", "U16": "<u2", "I32": "<i4", "U32": "<u4", "I64": "<i8", "U64": "<u8",
}  # fmt: skip
_NUMPY_DTYPES = {name: np.dtype(spelling) for name, spelling in _NUMPY_NAMES.items()}
_DTYPE_NAMES = {dtype: name for name, dtype in _NUMPY_DTYPES.items()}
RAW_SIZES = {"BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}


@dataclass(frozen=True, eq=False)
class RawArray:
    """Numbers of a type that numpy lacks, as their bytes. dtype: safetensors' name, a key of `RAW_SIZES`."""

    dtype: str
    shape: tuple[int, ...]
    data: Buffer

    def __post_init__(self) -> None:
        if self.dtype not in RAW_SIZES:
            raise InputError(f"dtype={self.dtype!r} is unknown; choose one of {', '.join(RAW_SIZES)}")
        num_bytes = math.prod(self.shape) * RAW_SIZES[self.dtype]
        if memoryview(self.data).nbytes != num_bytes:
            raise InputError(
                f"{self.dtype} of shape {list(self.shape)} has {num_bytes} bytes, "
                f"{memoryview(self.data).nbytes} were given; give all of them"
            )


Array = np.ndarray | RawArray


@dataclass(frozen=True, eq=False)
class Frame:
    """What a frame holds. Arrays are views of the frame's memory: read-only where that is."""

    control: dict[str, Any]
    arrays: dict[str, Array]


def encode_frame(control: Mapping[str, Any], arrays: Mapping[str, Array | list[np.ndarray]]) -> list[Part]:
    """A frame as parts to be sent one after the other; large ones are views of the arrays, so leave those unchanged.

    A list stands for one flat array in pieces, of one type.

    Raises InputError for a control part that is no JSON, and for an array of a type that has no name here.
    """
    text = _json_bytes(control, at=_PREFIX.size)
    if len(text) > MAX_CONTROL_LEN:
        raise InputError(f"the control part has {len(text)} bytes; at most {MAX_CONTROL_LEN}: send numbers as arrays")
    if (num := _num_values(text)) > MAX_CONTROL_VALUES:
        raise InputError(f"the control part has about {num} values; at most {MAX_CONTROL_VALUES}: send them as arrays")
    header: dict[str, Any] = {}
    data, at = [], 0
    for name, array in sorted(arrays.items(), key=lambda item: -_item_size(_first(item[1]))):
        views = [_bytes_of(piece, name) for piece in (array if isinstance(array, list) else [array])]
        end = at + sum(view.nbytes for view in views)
        shape = [sum(map(len, array))] if isinstance(array, list) else list(array.shape)
        header[name] = {"dtype": _dtype_name(_first(array)), "shape": shape, "data_offsets": [at, end]}
        data += views
        at = end
    body = _json_bytes(header, at=_LENGTH.size)
    return [_PREFIX.pack(_MAGIC, FRAME_VERSION, len(text)) + text + _LENGTH.pack(len(body)) + body, *data]


def chunks(parts: Iterable[Part], size: int = CHUNK_BYTES) -> Iterator[Part]:
    """The parts of a frame in pieces that are worth a call each: long ones cut, short ones joined."""
    short: list[memoryview] = []
    num_bytes = 0
    for part in parts:
        view = memoryview(part)
        is_long = view.nbytes > size // 4
        if short and (is_long or num_bytes + view.nbytes > size):
            yield b"".join(short)
            short, num_bytes = [], 0
        if is_long:
            yield from (view[at : at + size] for at in range(0, view.nbytes, size))
        else:
            short.append(view)
            num_bytes += view.nbytes
    if short:
        yield b"".join(short)


def decode_frame(buffer: Buffer) -> Frame:
    """The frame in a buffer. Raises WireError for anything else, having allocated no more than the buffer explains."""
    view = memoryview(buffer).cast("B")
    if view.nbytes < _PREFIX.size or view[:4] != _MAGIC:
        raise WireError(f"these {view.nbytes} bytes are no frame; it begins with {_MAGIC.decode()!r} and a version")
    _, version, control_len = _PREFIX.unpack_from(view)
    if version != FRAME_VERSION:
        older = "the sender" if version < FRAME_VERSION else "this side"
        raise WireError(f"frame format {version} arrived, this side reads {FRAME_VERSION}; update {older}")
    control, body = _split(view[_PREFIX.size :], control_len, "control part")
    length, body = _split(body, _LENGTH.size, "length of the body's header")
    header, data = _split(body, _LENGTH.unpack(length)[0], "body's header")
    return Frame(_json_object(control, "control part"), _read_arrays(_json_object(header, "body's header"), data))


def _split(view: memoryview, length: int, name: str) -> tuple[memoryview, memoryview]:
    if length > view.nbytes:
        raise WireError(f"the frame is cut off: its {name} has {length} bytes, {view.nbytes} arrived")
    if length > MAX_CONTROL_LEN:
        raise WireError(f"the {name} has {length} bytes; at most {MAX_CONTROL_LEN}")
    return view[:length], view[length:]


def _read_arrays(header: dict[str, Any], data: memoryview) -> dict[str, Array]:
    """Arrays lie one behind the other without gaps, as the header's order says, and fill the data."""
    arrays: dict[str, Array] = {}
    at = 0
    header.pop("__metadata__", None)
    for name, entry in sorted(header.items(), key=lambda item: _begin(*item)):
        begin, end = entry["data_offsets"]
        if begin != at or end < begin or end > data.nbytes:
            raise WireError(f"array {name!r} lies at bytes {begin} to {end}; expected {at} to at most {data.nbytes}")
        arrays[name] = _view_array(name, entry, data[begin:end])
        at = end
    if at != data.nbytes:
        raise WireError(f"the frame has {data.nbytes - at} bytes behind its last array")
    return arrays


def _begin(name: str, entry: Any) -> tuple[int, int]:
    """Where an array lies, of an entry that has the right form."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise WireError(f"array {name!r} is described by {_short(entry)}; give dtype, shape and data_offsets")
    offsets, shape = entry["data_offsets"], entry["shape"]
    if not (_is_sizes(offsets) and len(offsets) == 2 and _is_sizes(shape) and len(shape) <= MAX_NUM_DIMS):
        raise WireError(f"array {name!r} has shape {_short(shape)} at {_short(offsets)}; give counts")
    return offsets[0], offsets[1]


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 2**48 for size in value)


def _view_array(name: str, entry: dict[str, Any], data: memoryview) -> Array:
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    if not isinstance(dtype, str) or not (dtype in RAW_SIZES or dtype in _NUMPY_DTYPES):
        raise WireError(f"array {name!r} has dtype {_short(dtype)}; known: {', '.join([*_NUMPY_DTYPES, *RAW_SIZES])}")
    size = RAW_SIZES[dtype] if dtype in RAW_SIZES else _NUMPY_DTYPES[dtype].itemsize
    if math.prod(shape) * size != data.nbytes:
        raise WireError(f"array {name!r} has {data.nbytes} bytes, {dtype} of shape {_short(entry['shape'])} has others")
    if dtype in RAW_SIZES:
        return RawArray(dtype, shape, data)
    if dtype == "BOOL" and data.nbytes and np.frombuffer(data, np.uint8).max() > 1:
        raise WireError(f"array {name!r} is BOOL with a byte other than 0 and 1")
    try:
        return np.ndarray(shape, _NUMPY_DTYPES[dtype], data)
    except (ValueError, OverflowError) as error:
        raise WireError(f"array {name!r} has an unusable shape {_short(entry['shape'])}: {error}") from error


def _json_object(view: memoryview, name: str) -> dict[str, Any]:
    text = bytes(view)
    if (num := _num_values(text)) > MAX_CONTROL_VALUES:
        raise WireError(f"the frame's {name} has about {num} values; at most {MAX_CONTROL_VALUES}")
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise WireError(f"the frame's {name} is no JSON: {_short(str(error))}") from error
    if not isinstance(value, dict):
        raise WireError(f"the frame's {name} is a JSON {type(value).__name__}; expected an object")
    return value


def _num_values(text: bytes) -> int:
    """No fewer than JSON values are in a text: each is a Python object of many times its size here."""
    return text.count(b",") + text.count(b"[") + text.count(b"{") + text.count(b":")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _json_bytes(value: Mapping[str, Any], at: int) -> bytes:
    """JSON that ends at a multiple of 8 when it begins at `at`."""
    try:
        text = json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"the control part of a message must be JSON: {error}") from error
    return text + b" " * (-(at + len(text)) % 8)


def _bytes_of(array: Array, name: str) -> memoryview:
    """The bytes of an array, copied only if they do not lie one behind the other or in the other byte order."""
    if isinstance(array, RawArray):
        return memoryview(array.data).cast("B")
    if array.dtype.newbyteorder("<") not in _DTYPE_NAMES:
        raise InputError(f"array {name!r} has dtype {array.dtype}; known: {', '.join([*_NUMPY_DTYPES, *RAW_SIZES])}")
    flat = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1)
    return flat.view(np.uint8).data


def _dtype_name(array: Array) -> str:
    return array.dtype if isinstance(array, RawArray) else _DTYPE_NAMES[array.dtype.newbyteorder("<")]


def _first(array: Array | list[np.ndarray]) -> Array:
    return array[0] if isinstance(array, list) else array


def _item_size(array: Array) -> int:
    return RAW_SIZES[array.dtype] if isinstance(array, RawArray) else array.dtype.itemsize


def _short(value: Any, limit: int = 80) -> str:
    text = repr(value) if not isinstance(value, str) else value
    return text if len(text) <= limit else text[: limit - 3] + "..."
