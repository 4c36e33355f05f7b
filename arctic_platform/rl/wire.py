"""Requests and responses as frames: rows of numbers as flat arrays with offsets, everything else as JSON.

The control part is `{"message": class name, "fields": {...}, "nonfinite": [[path, "nan" | "inf" | "-inf"], ...]}`. A
ragged field `batch.prompts` is two arrays: `batch.prompts`, all rows one behind the other, and
`batch.prompts#offsets`, where row b is `[offsets[b], offsets[b + 1])`. A list per item of a list of messages, as
`token_ids` of the rollouts, is one ragged field `rollouts.*.token_ids` with one row per item. Tables per item, as
`top_logprobs`, are three: `rollouts.*.top_logprobs.counts` (entries of each table, -1 for none), `.ids`, `.values`.
Numbers that JSON lacks are null in `fields` and named in `nonfinite`, so no value of a caller is ever taken for one.
"""

import functools
import itertools
import math
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from arctic_platform.errors import InputError, WireError
from arctic_platform.rl.frames import Array, Buffer, Frame, Part, decode_frame, encode_frame
from arctic_platform.rl.protocol import Message
from arctic_platform.rl.ragged import Ragged, Row, offsets_of

M = TypeVar("M", bound=Message)
Path = tuple[str | int, ...]

_TABLE_PARTS: dict[str, Callable[[Any], Iterable[Any]]] = {
    "counts": lambda tables: (-1 if table is None else len(table) for table in tables),
    "ids": lambda tables: itertools.chain.from_iterable(table or () for table in tables),
    "values": lambda tables: itertools.chain.from_iterable((table or {}).values() for table in tables),
}
_NONFINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def encode(message: Message) -> list[Part]:
    """A message as the parts of a frame, to be sent one after the other.

    Raises InputError for a value that has no form on the wire: only JSON values, and numbers in rows.
    """
    out = _Encoded()
    fields = out.fields_of(message, ())
    control = {"message": type(message).__name__, "fields": fields, "nonfinite": out.nonfinite}
    return encode_frame(control, out.arrays)


def decode(buffer: Buffer, message_type: type[M]) -> M:
    """The message in a buffer, of `message_type` or a class below it.

    Raises WireError for bytes that are no such message, and what building the message by hand raises for its values.
    """
    frame = decode_frame(buffer)
    found = _class_named(frame.control.get("message"), message_type)
    fields = frame.control.get("fields")
    if not isinstance(fields, dict):
        raise WireError(f"{found.__name__}: fields are {type(fields).__name__}; expected an object")
    for entry in _list_of(frame.control, "nonfinite"):
        _restore_nonfinite(fields, entry)
    _place_rows(fields, frame, found)
    try:
        return found(**fields)
    except RecursionError:
        raise WireError(f"{found.__name__}: the fields are nested too deeply") from None


@dataclass
class _Encoded:
    """What a message becomes while its fields are walked."""

    arrays: dict[str, Array | list[np.ndarray]] = field(default_factory=dict)
    nonfinite: list[list[Any]] = field(default_factory=list)

    def fields_of(self, message: Message, path: Path) -> dict[str, Any]:
        """Fields as JSON values, without those that become arrays."""
        fields: dict[str, Any] = {}
        for name, kind in _kinds(type(message)).items():
            value = getattr(message, name)
            if value is not None and kind is Ragged:
                self.add_rows(_dotted((*path, name)), value)
            else:
                fields[name] = self.plain(value, (*path, name))
        return fields

    def plain(self, value: Any, path: Path) -> Any:
        """One value as JSON."""
        if value is None or isinstance(value, (bool, int, str)):
            return value
        if isinstance(value, float):
            if not math.isfinite(value):
                self.nonfinite.append([list(path), str(float(value))])
                return None
            return value
        if isinstance(value, Message):
            return self.fields_of(value, path)
        if isinstance(value, dict):
            return {_key(key, path): self.plain(item, (*path, _key(key, path))) for key, item in value.items()}
        if isinstance(value, (list, tuple, Row)):
            if value and all(isinstance(item, Message) for item in value):
                return self.items(list(value), path)
            return [self.plain(item, (*path, at)) for at, item in enumerate(value)]
        raise InputError(
            f"{_dotted(path)} is a {type(value).__name__}; a message holds JSON values and rows of numbers"
        )

    def items(self, messages: list[Message], path: Path) -> list[Any]:
        """A list of messages of one class: their lists of numbers become one array, a row for each message."""
        item_type = type(messages[0])
        columns = {name: kind for name, kind in _kinds(item_type).items() if kind is Row or _is_tables(kind)}
        for name, kind in columns.items():
            rows = [getattr(message, name) for message in messages]
            if all(row is None for row in rows):
                continue
            rows = [() if row is None else row for row in rows]
            column = _dotted((*path, "*", name))
            if kind is Row:
                self.add_rows(column, rows)
            else:
                for part, take in _TABLE_PARTS.items():
                    self.add_rows(f"{column}.{part}", [list(take(tables)) for tables in rows])
        plain = []
        for at, message in enumerate(messages):
            names = [name for name in item_type.model_fields if name not in columns or getattr(message, name) is None]
            plain.append({name: self.plain(getattr(message, name), (*path, at, name)) for name in names})
        return plain

    def add_rows(self, name: str, rows: Any) -> None:
        """Rows of numbers as one array with offsets; rows that are arrays of one type already are not copied for it."""
        filled = [row.array for row in rows if isinstance(row, Row) and row] if isinstance(rows, list) else []
        if len({array.dtype for array in filled}) == 1 and len(filled) == sum(1 for row in rows if len(row)):
            self.arrays[name], self.arrays[f"{name}#offsets"] = filled, offsets_of([len(row) for row in rows])
            return
        ragged = Ragged.from_rows(rows)
        self.arrays[name], self.arrays[f"{name}#offsets"] = ragged.values, ragged.offsets


def _place_rows(fields: dict[str, Any], frame: Frame, message_type: type[Message]) -> None:
    """Put the frame's arrays where the message's class has ragged fields. Arrays that it does not know are refused."""
    names = dict(_ragged_fields(message_type))
    for name in frame.arrays:
        base = name.removesuffix("#offsets")
        if base not in names or base not in frame.arrays or f"{base}#offsets" not in frame.arrays:
            raise WireError(f"{message_type.__name__}: array {name!r} is no ragged field of it, or one half of one")
    for name, path in names.items():
        if name not in frame.arrays:
            continue
        rows = _rows_in(frame, name)
        if "*" not in path:
            _parent_of(fields, path, name)[path[-1]] = rows
            continue
        at = path.index("*")
        items = _parent_of(fields, path[:at], name).get(path[at - 1])
        if not isinstance(items, list) or len(items) != len(rows) or not all(isinstance(item, dict) for item in items):
            raise WireError(f"array {name!r} has {len(rows)} rows; expected one per item of {path[at - 1]!r}")
        for item, row in zip(items, rows, strict=True):
            _place(item, path[at + 1 :], row)


def _place(item: dict[str, Any], path: tuple[str, ...], row: Row) -> None:
    """A row, or a part of tables, which are built when their last part has come. What the item holds already stays."""
    if len(path) == 1:
        item.setdefault(path[0], row)
        return
    parts = item.setdefault(path[0], _Parts())
    if isinstance(parts, _Parts):
        parts[path[1]] = row.array
        if len(parts) == len(_TABLE_PARTS):
            item[path[0]] = parts.tables()


class _Parts(dict[str, np.ndarray]):
    """Tables of one item, while they arrive."""

    def tables(self) -> list[dict[int, float] | None]:
        """One for each count."""
        counts, ids, values = self["counts"], self["ids"], self["values"]
        is_count = counts.dtype.kind == "i" and not ((counts < -1) | (counts > len(ids))).any()
        if not is_count or not counts.clip(0).sum() == len(ids) == len(values):
            raise WireError("counts, ids and values of the tables of an item do not fit together")
        entries = iter(zip(ids.tolist(), values.tolist(), strict=True))
        return [None if num < 0 else dict(itertools.islice(entries, num)) for num in counts.tolist()]


def _rows_in(frame: Frame, name: str) -> Ragged:
    values, offsets = frame.arrays[name], frame.arrays[f"{name}#offsets"]
    if not isinstance(values, np.ndarray) or not isinstance(offsets, np.ndarray):
        raise WireError(f"array {name!r} is {type(values).__name__}; rows need types that numpy has")
    try:
        return Ragged(values, offsets)
    except InputError as error:
        raise WireError(f"array {name!r}: {error}") from error


def _parent_of(fields: dict[str, Any], path: tuple[str, ...], name: str) -> dict[str, Any]:
    for key in path[:-1]:
        fields = fields.setdefault(key, {})
        if not isinstance(fields, dict):
            raise WireError(f"array {name!r} belongs into {key!r}, which is no object in this frame")
    return fields


def _restore_nonfinite(fields: Any, entry: Any) -> None:
    if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], list) and entry[0]):
        raise WireError("an entry of nonfinite is no pair of a path and a name")
    path, name = entry
    try:
        for key in path[:-1]:
            fields = fields[key]
        if fields[path[-1]] is not None:
            raise WireError(f"nonfinite names a place that holds a value: {_dotted(path)[:80]}")
        fields[path[-1]] = _NONFINITE[name]
    except (KeyError, IndexError, TypeError) as error:
        raise WireError(f"nonfinite names no place of the message, or no such number: {_dotted(path)[:80]}") from error


def _list_of(control: dict[str, Any], name: str) -> list[Any]:
    value = control.get(name)
    if not isinstance(value, list):
        raise WireError(f"{name} of a message is {type(value).__name__}; expected a list")
    return value


def _class_named(name: Any, base: type[M]) -> type[M]:
    for found in _classes_below(base):
        if found.__name__ == name:
            return found
    raise WireError(f"a message {str(name)[:80]!r} arrived; expected {base.__name__}")


def _classes_below(base: type[M]) -> Iterator[type[M]]:
    yield base
    for below in base.__subclasses__():
        yield from _classes_below(below)


@functools.cache
def _ragged_fields(message_type: type[Message]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Names and paths of all ragged fields of a class, those of messages inside it too."""
    found: list[tuple[str, ...]] = []
    for name, kind in _kinds(message_type).items():
        if kind is Ragged:
            found.append((name,))
        elif _is_message(kind):
            found += [(name, *path) for _, path in _ragged_fields(kind)]
        elif typing.get_origin(kind) is list and _is_message(typing.get_args(kind)[0]):
            items = _kinds(typing.get_args(kind)[0])
            found += [(name, "*", column) for column, its_kind in items.items() if its_kind is Row]
            tables = [column for column, its_kind in items.items() if _is_tables(its_kind)]
            found += [(name, "*", column, part) for column in tables for part in _TABLE_PARTS]
    return tuple((_dotted(path), path) for path in found)


@functools.cache
def _kinds(message_type: type[Message]) -> dict[str, Any]:
    """The type of each field, without `| None` and without annotations: `Ragged` and `Row` become arrays."""
    return {name: _bare(info.annotation) for name, info in message_type.model_fields.items()}


def _bare(annotation: Any) -> Any:
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        kinds = [kind for kind in typing.get_args(annotation) if kind is not types.NoneType]
        return _bare(kinds[0]) if len(kinds) == 1 else annotation
    return typing.get_args(annotation)[0] if typing.get_origin(annotation) is typing.Annotated else annotation


def _is_tables(kind: Any) -> bool:
    return typing.get_origin(kind) is list and _bare(typing.get_args(kind)[0]) == dict[int, float]


def _is_message(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Message)


def _key(key: Any, path: Path) -> str:
    if isinstance(key, bool) or not isinstance(key, (str, int)):
        raise InputError(f"{_dotted(path)} has a key of type {type(key).__name__}; use strings")
    return str(key)


def _dotted(path: Any) -> str:
    return ".".join(str(part) for part in path)
