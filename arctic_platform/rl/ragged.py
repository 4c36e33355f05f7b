"""Rows of numbers as one flat array with offsets: read like lists of lists, without a Python object per number.

    rows     [[5, 6, 7], [], [8]]         Ragged.values   5 6 7 8
                                          Ragged.offsets  0 3 3 4

Fields of messages declare `IdRows`, `FloatRows`, `Ids` or `Floats`. They take lists, tuples, arrays and tensors, and
what is no number is refused by the words that pydantic has for lists of lists.
"""

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, overload

import numpy as np
from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from arctic_platform.errors import InputError

MAX_SHOWN = 1000


class Row(Sequence[Any]):
    """One row of numbers, read-only. Elements are Python numbers; `array` is the numpy array behind them.

    Equal to a list or tuple of the same numbers; `+` joins to a list.
    """

    __slots__ = ("array",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, array: np.ndarray) -> None:
        self.array = _read_only(array)

    def __len__(self) -> int:
        return len(self.array)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> "Row": ...
    def __getitem__(self, index: int | slice) -> Any:
        return Row(self.array[index]) if isinstance(index, slice) else self.array[index].item()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.array.tolist())

    def __eq__(self, other: object) -> bool:
        return self.tolist() == list(other) if isinstance(other, (Row, list, tuple)) else NotImplemented

    def __add__(self, other: object) -> list[Any]:
        return [*self, *other] if isinstance(other, (Row, list, tuple)) else NotImplemented

    def __radd__(self, other: object) -> list[Any]:
        return [*other, *self] if isinstance(other, (list, tuple)) else NotImplemented

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.array, dtype=dtype) if copy else np.asarray(self.array, dtype=dtype)

    def __repr__(self) -> str:
        return _shown(self.tolist(), len(self))

    def tolist(self) -> list[Any]:
        """The numbers as a list."""
        return self.array.tolist()


class Ragged(Sequence[Row]):
    """Rows of numbers, read-only. Row b is `values[offsets[b]:offsets[b + 1]]`.

    values: [numbers of all rows]. offsets: [B + 1] int64, from 0 to `len(values)`. Neither is copied.

    Raises:
        InputError: offsets do not rise from 0 to the number of values.
    """

    __slots__ = ("_facts", "offsets", "values")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, values: np.ndarray, offsets: np.ndarray) -> None:
        if values.ndim != 1 or offsets.ndim != 1 or offsets.dtype != np.int64 or not len(offsets):
            raise InputError("ragged rows need flat values and flat 64-bit offsets, one more than rows")
        if offsets[0] != 0 or offsets[-1] != len(values) or (offsets[1:] < offsets[:-1]).any():
            raise InputError(f"offsets of ragged rows must rise from 0 to the number of values, {len(values)}")
        self.values = _read_only(values)
        self.offsets = _read_only(offsets)
        self._facts: dict[str, bool] = {}

    @classmethod
    def from_rows(cls, rows: Any) -> "Ragged":
        """From a list of rows (lists, tuples, arrays, tensors) or a 2-D array. Raises InputError for other things."""
        found = _ragged_of(rows, "iubf")
        if found is None:
            raise InputError("ragged rows must be a list of flat rows of numbers, or an array of two dimensions")
        return found

    @property
    def lens(self) -> np.ndarray:
        """`[B] int64`: numbers in each row."""
        return np.diff(self.offsets)

    def is_within(self, low: int, high: int) -> bool:
        """Whether every value is in `low .. high`; looked up once."""
        fact = f"{low}..{high}"
        if fact not in self._facts:
            self._facts[fact] = not len(self.values) or self._is_within(low, high)
        return self._facts[fact]

    def is_finite(self) -> bool:
        """Whether no value is NaN or infinite; looked up once.

        The sum tells in one pass and without a second array; only where it overflows is each value looked at.
        """
        if "finite" not in self._facts:
            with np.errstate(over="ignore", invalid="ignore"):
                is_finite = bool(np.isfinite(self.values.sum()))
            self._facts["finite"] = is_finite or bool(np.isfinite(self.values).all())
        return self._facts["finite"]

    def _is_within(self, low: int, high: int) -> bool:
        """In one pass where `low` is 0: a negative number, read without its sign, is a large one."""
        dtype = self.values.dtype
        if low == 0 and dtype.kind == "i" and high < 2 ** (8 * dtype.itemsize - 1):
            return bool(self.values.view(f"u{dtype.itemsize}").max() <= high)
        return bool(self.values.min() >= low and self.values.max() <= high)

    def array(self, b: int) -> np.ndarray:
        """Row b as an array, a view."""
        return self.values[self.offsets[b] : self.offsets[b + 1]]

    def gather(self, rows: Sequence[int]) -> np.ndarray:
        """The numbers of some rows, one row behind the other in the given order, as an array of its own."""
        return np.concatenate([self.values[:0], *(self.array(b) for b in rows)])

    def select(self, rows: Sequence[int]) -> "Ragged":
        """Some of the rows, in the given order."""
        return Ragged(self.gather(rows), offsets_of(self.lens[list(rows)]))

    def row_of(self, at: int) -> int:
        """The row that holds the value at a flat index."""
        return int(np.searchsorted(self.offsets, at, side="right")) - 1

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> "Ragged": ...
    def __getitem__(self, index: int | slice) -> "Row | Ragged":
        rows = range(len(self))[index]
        return self.select(rows) if isinstance(rows, range) else Row(self.array(rows))

    def __iter__(self) -> Iterator[Row]:
        return (Row(self.array(b)) for b in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Ragged):
            return np.array_equal(self.offsets, other.offsets) and np.array_equal(self.values, other.values)
        if not isinstance(other, (list, tuple)):
            return NotImplemented
        return len(self) == len(other) and all(mine == theirs for mine, theirs in zip(self, other, strict=True))

    def __add__(self, other: object) -> "Ragged":
        return Ragged.from_rows([*self, *other]) if isinstance(other, (Ragged, list, tuple)) else NotImplemented

    def __radd__(self, other: object) -> "Ragged":
        return Ragged.from_rows([*other, *self]) if isinstance(other, (list, tuple)) else NotImplemented

    def __repr__(self) -> str:
        return (
            _shown(self.tolist(), len(self.values)) if len(self.values) <= MAX_SHOWN else _shown([], len(self.values))
        )

    def tolist(self) -> list[list[Any]]:
        """The rows as lists."""
        return [self.array(b).tolist() for b in range(len(self))]


def offsets_of(lens: Any) -> np.ndarray:
    """`[B + 1] int64` from the lengths of B rows."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lens, dtype=np.int64)])


def array_of(value: Any) -> Any:
    """A tensor as a numpy array (bfloat16 as float32, which holds it exactly); anything else as it is."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return value
    value = value.detach().cpu()
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()


@dataclass(frozen=True)
class NumbersOf:
    """Marks a field of numbers for pydantic: rows of them (`Ragged`), or one row (`Row`)."""

    kind: type[int] | type[float]
    is_nested: bool

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        kind = core_schema.int_schema() if self.kind is int else core_schema.float_schema()
        row = core_schema.list_schema(kind)
        lists = core_schema.list_schema(row) if self.is_nested else row
        as_lists = core_schema.plain_serializer_function_ser_schema(_as_lists, return_schema=lists)
        return core_schema.no_info_wrap_validator_function(self._validate, lists, serialization=as_lists)

    def _validate(self, value: Any, validate_lists: Callable[[Any], Any]) -> "Ragged | Row":
        """What numpy takes as numbers of the right kind needs no look at each; pydantic judges the rest."""
        kinds = "iub" if self.kind is int else "iubf"
        own_kinds = "iub" if self.kind is int else "f"
        if isinstance(value, Row) and not self.is_nested and _is_number(value.array.dtype, own_kinds):
            return value
        rows = value if self.is_nested else [value]
        found = _ragged_of(rows, kinds)
        if found is None:
            lists = validate_lists(_as_lists(value))
            found = _ragged_of_checked(lists if self.is_nested else [lists], self.kind)
        if self.kind is float and found.values.dtype.kind != "f":
            found = Ragged(found.values.astype(np.float64), found.offsets)
        return found if self.is_nested else Row(found.values)


IdRows = Annotated[Ragged, NumbersOf(int, is_nested=True)]
FloatRows = Annotated[Ragged, NumbersOf(float, is_nested=True)]
Ids = Annotated[Row, NumbersOf(int, is_nested=False)]
Floats = Annotated[Row, NumbersOf(float, is_nested=False)]


def _ragged_of(rows: Any, kinds: str) -> Ragged | None:
    """Rows whose numbers are all of one of numpy's `kinds`; None for what needs a closer look."""
    if isinstance(rows, Ragged):
        return rows if _is_number(rows.values.dtype, kinds) else None
    rows = array_of(rows)
    if isinstance(rows, np.ndarray) and rows.ndim == 2 and _is_number(rows.dtype, kinds):
        return Ragged(_native(rows.flatten()), np.arange(len(rows) + 1, dtype=np.int64) * rows.shape[1])
    if not isinstance(rows, (list, tuple)):
        return None
    try:
        arrays = [np.asarray(array_of(row)) for row in rows]
    except ValueError:
        return None
    if any(row.ndim != 1 or (len(row) and not _is_number(row.dtype, kinds)) for row in arrays):
        return None
    filled = [row for row in arrays if len(row)]
    values = np.concatenate(filled) if filled else np.empty(0, np.int64)
    return Ragged(_native(values), offsets_of([len(row) for row in arrays]))


def _ragged_of_checked(lists: list[list[Any]], kind: type) -> Ragged:
    """From lists that hold nothing but `kind`. Integers beyond 64 bits stay Python's, for the caller to refuse."""
    values = list(itertools.chain.from_iterable(lists))
    try:
        flat = np.array(values, np.int64 if kind is int else np.float64)
    except OverflowError:
        flat = np.array(values, object)
    return Ragged(flat, offsets_of([len(row) for row in lists]))


def _is_number(dtype: np.dtype, kinds: str) -> bool:
    """uint64 is left out: it and int64 together would become float64."""
    return dtype.kind in kinds and dtype != np.uint64 and dtype.itemsize <= 8


def _native(values: np.ndarray) -> np.ndarray:
    """In this machine's byte order, truth values as numbers."""
    dtype = np.dtype(np.uint8) if values.dtype == bool else values.dtype.newbyteorder("=")
    return values.astype(dtype, copy=False)


def _as_lists(value: Any) -> Any:
    """Arrays, tensors and rows as lists, one level down as well; anything else as it is."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [item.tolist() if hasattr(item, "tolist") else item for item in value]
    return value


def _read_only(array: np.ndarray) -> np.ndarray:
    if array.flags.writeable:
        array = array.view()
        array.flags.writeable = False
    return array


def _shown(lists: list[Any], num: int) -> str:
    return repr(lists) if num <= MAX_SHOWN else f"<rows of {num} numbers>"
