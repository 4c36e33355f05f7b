"""The bits of a tensor that changed since a version that both sides hold, compressed.

    change  = base xor new                     in pieces of 4 MiB
    payload = head | zstd(change) | ...        head: size, digests of base, of new, and of all that follows

At the learning rates of reinforcement learning a step changes few bits: of bf16 weights 0.3 % at 1e-6, where the
payload is 150 times smaller than the weights. Xor is its own inverse, so that a payload also leads back.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
import zstandard
from torch import Tensor

from arctic_platform.errors import WeightSyncError
from arctic_platform.rl.weight_sync.base import Manifest, TensorSpec, digest

PIECE_BYTES = 4 << 20
LEVEL = 1
SHUFFLED_FROM = 4  # Bytes of an element; see `_arranged`.

_HEAD = struct.Struct("<4sBQQQQ")
_LENGTH = struct.Struct("<I")
_MAGIC = b"ZDL2"


@dataclass(frozen=True)
class Head:
    """What a payload says of itself: bytes of an element and of the tensor, and three digests (XXH3)."""

    element_size: int
    num_bytes: int
    base_digest: int
    new_digest: int
    body_digest: int

    def packed(self) -> bytes:
        """As it stands at the front of a payload."""
        sizes = (self.element_size, self.num_bytes)
        return _HEAD.pack(_MAGIC, *sizes, self.base_digest, self.new_digest, self.body_digest)


def encode(base: Tensor, new: Tensor) -> bytes:
    """What leads from `base` to `new`: two CPU tensors of one shape and dtype.

    Raises:
        WeightSyncError: shapes or dtypes differ.
    """
    if base.shape != new.shape or base.dtype != new.dtype:
        raise WeightSyncError(
            f"a change leads from one tensor to another of its kind; given {base.dtype}{list(base.shape)} and "
            f"{new.dtype}{list(new.shape)}: send this tensor whole"
        )
    compressor = zstandard.ZstdCompressor(level=LEVEL)
    old_bytes, new_bytes, body = _bytes_of(base), _bytes_of(new), bytearray()
    base_digest, new_digest = xxhash.xxh3_64(), xxhash.xxh3_64()
    for piece in _pieces(len(old_bytes), base.element_size()):
        before, after = old_bytes[piece], new_bytes[piece]
        base_digest.update(before.data)
        new_digest.update(after.data)
        frame = compressor.compress(_arranged(np.bitwise_xor(before, after), base.element_size()).data)
        body += _LENGTH.pack(len(frame)) + frame
    digests = base_digest.intdigest(), new_digest.intdigest(), xxhash.xxh3_64_intdigest(body)
    return Head(base.element_size(), len(old_bytes), *digests).packed() + bytes(body)


def apply_delta(base: Tensor, payload: bytes | memoryview, *, out: Tensor | None = None) -> None:
    """Write what `encode` was given as `new` into `out`, or over `base` itself; all three are contiguous CPU tensors.

    The result is proved before the first byte is written.

    Raises:
        WeightSyncError: the payload is damaged, or leads from other bits than `base` has; nothing was written.
    """
    target = base if out is None else out
    head = read_head(payload)
    old_bytes, new_bytes = _bytes_of(base), _bytes_of(target)
    wanted = (head.element_size, head.num_bytes)
    if wanted != (base.element_size(), len(old_bytes)) or wanted != (target.element_size(), len(new_bytes)):
        raise WeightSyncError(
            f"a change of {head.num_bytes} bytes in elements of {head.element_size} does not fit a tensor of "
            f"{len(old_bytes)} bytes in elements of {base.element_size()}; sync all weights"
        )
    base_digest, new_digest = xxhash.xxh3_64(), xxhash.xxh3_64()
    for piece, change in _changes(payload, head):
        base_digest.update(old_bytes[piece].data)
        new_digest.update(np.bitwise_xor(old_bytes[piece], change).data)
    if base_digest.intdigest() != head.base_digest:
        raise WeightSyncError(
            f"a change leads from digest {head.base_digest:016x}, the weights here have {base_digest.hexdigest()}: the "
            "two sides started from different versions; sync all weights"
        )
    if new_digest.intdigest() != head.new_digest:
        raise _damaged("it leads to other bits than were sent")
    for piece, change in _changes(payload, head):
        np.bitwise_xor(old_bytes[piece], change, out=new_bytes[piece])


def read_head(payload: bytes | memoryview) -> Head:
    """The head of a payload whose body is as it was sent. Raises WeightSyncError for any other."""
    body = memoryview(payload)[_HEAD.size :]
    if len(payload) < _HEAD.size:
        raise _damaged(f"it ends after {len(payload)} bytes")
    magic, *fields = _HEAD.unpack_from(payload)
    head = Head(*fields)
    if magic != _MAGIC or not head.element_size or head.num_bytes % head.element_size:
        raise _damaged("its head makes no sense")
    if xxhash.xxh3_64_intdigest(body) != head.body_digest:
        raise _damaged("its digest differs")
    return head


class DeltaBase:
    """The weights that trainer and sampler last agreed on; each side holds one.

    Memory: one copy of the weights on the CPU, and while a sync runs its compressed changes. A sync moves the copy on
    tensor by tensor; `commit` keeps that, `rollback` leads back. Changes can only be told between two sides whose
    `identity` is the same; otherwise `clear`, and `replace` every tensor.
    """

    def __init__(self) -> None:
        self.clear()

    @property
    def identity(self) -> str | None:
        """Version and digest of what is held; none before the first commit, and where a sync was cut off."""
        return self._identity if not self._undo else None

    @property
    def num_bytes(self) -> int:
        """Memory of the copy."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors.values())

    def digest_of(self, name: str) -> int:
        """XXH3 of a tensor as it is held."""
        return self._digests[name]

    def clear(self) -> None:
        """Forget everything."""
        self._tensors: dict[str, Tensor] = {}
        self._digests: dict[str, int] = {}
        self._undo: dict[str, bytes] = {}
        self._identity: str | None = None

    def holds(self, manifest: Manifest) -> bool:
        """Whether these are the names, shapes and dtypes that are held."""
        return self._identity is not None and manifest.specs == {
            name: TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in self._tensors.items()
        }

    def replace(self, name: str, tensor: Tensor) -> None:
        """Hold a tensor that travels whole."""
        self._identity = None
        held = self._tensors.get(name)
        if held is not None and held.shape == tensor.shape and held.dtype == tensor.dtype:
            held.copy_(tensor.detach())
        else:
            self._tensors[name] = held = tensor.detach().to("cpu", copy=True).contiguous()
        self._digests[name] = digest(held)

    def encode(self, name: str, tensor: Tensor) -> bytes:
        """The sender's side: what leads to `tensor`, of any device."""
        held, new = self._tensors[name], tensor.detach().cpu().contiguous()
        payload = encode(held, new)
        self._note(name, payload)
        held.copy_(new)
        return payload

    def apply(self, name: str, payload: bytes | memoryview) -> Tensor:
        """The receiver's side: the new tensor, valid until the next sync."""
        if name not in self._tensors:
            raise WeightSyncError(f"a change of {name!r} arrived, which is not held here; sync all weights")
        apply_delta(self._tensors[name], payload)
        self._note(name, bytes(payload))
        return self._tensors[name]

    def commit(self, version: int) -> None:
        """Both sides hold these weights now, as `version`."""
        self._undo.clear()
        text = "".join(f"{name}={self._digests[name]:016x};" for name in sorted(self._digests))
        self._identity = f"{version}-{xxhash.xxh3_64_hexdigest(text.encode())}"

    def rollback(self) -> None:
        """Be as after the last commit, or empty if tensors came whole."""
        if self._identity is None:
            self.clear()
        for name, payload in self._undo.items():
            head = read_head(payload)
            for piece, change in _changes(payload, head):
                held = _bytes_of(self._tensors[name])[piece]
                np.bitwise_xor(held, change, out=held)
            self._digests[name] = head.base_digest
        self._undo.clear()

    def _note(self, name: str, payload: bytes) -> None:
        if name in self._undo:
            raise WeightSyncError(f"a second change of {name!r} within one sync; each tensor changes once")
        self._undo[name] = payload
        self._digests[name] = read_head(payload).new_digest


def _changes(payload: bytes | memoryview, head: Head) -> Iterator[tuple[slice, np.ndarray]]:
    """Every piece and what is to be xored into it. Raises WeightSyncError where frames and sizes do not fit."""
    decompressor = zstandard.ZstdDecompressor()
    view, at = memoryview(payload), _HEAD.size
    for piece in _pieces(head.num_bytes, head.element_size):
        num_bytes = piece.stop - piece.start
        try:
            (length,) = _LENGTH.unpack_from(view, at)
            at += _LENGTH.size + length
            frame = view[at - length : at]
            if zstandard.frame_content_size(frame) != num_bytes:
                raise _damaged(f"a piece of it is not of {num_bytes} bytes")
            change = decompressor.decompress(frame)
        except (struct.error, zstandard.ZstdError) as error:
            raise _damaged(str(error)) from error
        yield piece, _restored(np.frombuffer(change, np.uint8), head.element_size)
    if at != len(view):
        raise _damaged(f"{len(view) - at} bytes are left over")


def _pieces(num_bytes: int, element_size: int) -> Iterator[slice]:
    """Whole elements, at most PIECE_BYTES each."""
    step = PIECE_BYTES // element_size * element_size
    for start in range(0, num_bytes, step):
        yield slice(start, min(start + step, num_bytes))


def _arranged(change: np.ndarray, element_size: int) -> np.ndarray:
    """First bytes of all elements, second bytes, ...: in fp32 the upper bytes hardly change and compress well.

    Elements of two bytes stay as they are: that is as small, and twice as fast.
    """
    if element_size < SHUFFLED_FROM:
        return change
    return np.ascontiguousarray(change.reshape(-1, element_size).T).reshape(-1)


def _restored(change: np.ndarray, element_size: int) -> np.ndarray:
    """The inverse of `_arranged`."""
    if element_size < SHUFFLED_FROM:
        return change
    return np.ascontiguousarray(change.reshape(element_size, -1).T).reshape(-1)


def _bytes_of(tensor: Tensor) -> np.ndarray:
    """The memory of a contiguous CPU tensor, not a copy."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise WeightSyncError(
            f"changes are told between contiguous CPU tensors, given one on {tensor.device} with strides "
            f"{tensor.stride()}; copy it to the CPU first"
        )
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def _damaged(why: str) -> WeightSyncError:
    return WeightSyncError(f"a change was damaged on its way ({why}); call sync_weights() again")
