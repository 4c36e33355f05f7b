"""Tensors of a checkpoint as safetensors files: written in shards as they are gathered, read where they are needed.

`model.safetensors`, or `model-00001-of-00003.safetensors` and so on with `model.safetensors.index.json`, as
transformers names them; `optimizer` likewise. At most one shard is held while writing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from arctic_platform.errors import CheckpointError
from arctic_platform.rl.engines.folders import Draft, reason
from arctic_platform.rl.weight_sync.base import TensorSpec

SHARD_BYTES = 1 << 30
_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
}


class Conversion(Protocol):
    """Makes other tensors of those that are gathered, one by one as they come, or all at the end."""

    def convert(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """What can be written, given one more."""

    def finish(self) -> Iterable[tuple[str, Tensor]]:
        """What is left."""


def write_tensors(
    draft: Draft,
    stem: str,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    conversion: Conversion | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write `stem.safetensors`, or shards with their index. `tensors` is read to its end even when writing fails.

    A tensor that is yielded must stay as it is until the next 1 GiB (`shard_bytes`) of them was yielded.
    """
    shards = _Shards(draft, stem, shard_bytes)
    for name, tensor in tensors:
        if conversion is None:
            draft.attempt(shards.add, name, tensor)
        else:
            draft.attempt(lambda: shards.add_all(conversion.convert(name, tensor)))  # noqa: B023  called at once
    if conversion is not None:
        draft.attempt(lambda: shards.add_all(conversion.finish()))
    draft.attempt(shards.finish)


class _Shards:
    def __init__(self, draft: Draft, stem: str, shard_bytes: int) -> None:
        self.draft = draft
        self.stem = stem
        self.shard_bytes = shard_bytes
        self.held: dict[str, Tensor] = {}
        self.held_bytes = 0
        self.total_bytes = 0
        self.shards: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        if self.held and self.held_bytes + tensor.nbytes > self.shard_bytes:
            self.write()
        self.held[name] = tensor.detach().cpu().contiguous()
        self.held_bytes += tensor.nbytes
        self.total_bytes += tensor.nbytes

    def add_all(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            self.add(name, tensor)

    def write(self) -> None:
        """What is held, under a number: how many there will be is not known yet."""
        self.shards.append(list(self.held))
        _save(self.held, self._part(len(self.shards)))
        self.held = {}
        self.held_bytes = 0

    def finish(self) -> None:
        """The last shard, and the names that say how many there are."""
        if self.held or not self.shards:
            self.write()
        folder, num = self.draft.part, len(self.shards)
        if num == 1:
            self._part(1).rename(folder / f"{self.stem}.safetensors")
            return
        places = {}
        for at, names in enumerate(self.shards, start=1):
            file = folder / f"{self.stem}-{at:05d}-of-{num:05d}.safetensors"
            self._part(at).rename(file)
            places |= dict.fromkeys(names, file.name)
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": places}
        (folder / f"{self.stem}.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")

    def _part(self, number: int) -> Path:
        return self.draft.part / f"{self.stem}.{number}.part"


class TensorFiles:
    """The tensors under one stem of a checkpoint, mapped into memory: read when asked for.

    Raises CheckpointError when a file is no safetensors file.
    """

    def __init__(self, folder: Path, stem: str) -> None:
        self.folder = folder
        self.specs: dict[str, TensorSpec] = {}
        self._files: dict[str, Any] = {}
        for file in [*folder.glob(f"{stem}.safetensors"), *folder.glob(f"{stem}-*-of-*.safetensors")]:
            self._add(file)

    def _add(self, file: Path) -> None:
        try:
            opened = safe_open(file, framework="pt", device="cpu")
            for name in opened.keys():  # noqa: SIM118
                piece = opened.get_slice(name)
                dtype = piece.get_dtype()
                self.specs[name] = TensorSpec(tuple(piece.get_shape()), _DTYPES.get(dtype, dtype))
                self._files[name] = opened
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} is damaged: {reason(error)}; give another checkpoint") from error

    def read(self, name: str) -> Tensor | None:
        """One tensor on the CPU, None where there is none of that name."""
        return self._files[name].get_tensor(name) if name in self._files else None


def _save(tensors: dict[str, Tensor], file: Path) -> None:
    """Readable by whom the folder is; the library makes files for their owner alone."""
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(file.parent.stat().st_mode & 0o666)


def random_state(device: str) -> dict[str, Tensor]:
    """Of this process: of the CPU, and of its device."""
    state = {"cpu": torch.get_rng_state()}
    if device.startswith("cuda"):
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def write_random(draft: Draft, states: list[dict[str, Tensor]]) -> None:
    """`random.safetensors` with the states of all ranks, in their order."""
    tensors = {f"{kind}.{rank}": state for rank, states_ in enumerate(states) for kind, state in states_.items()}
    draft.attempt(lambda: _save(tensors, draft.part / "random.safetensors"))


def restore_random(files: TensorFiles, device: str, rank: int, *, is_same_world: bool, seed: int, step: int) -> None:
    """Go on with the saved state of this rank; on another number of ranks, with one that seed, step and rank give."""
    saved = files.read(f"cpu.{rank}") if is_same_world else None
    on_device = files.read(f"cuda.{rank}") if is_same_world else None
    if saved is not None:
        torch.set_rng_state(saved)
    else:
        torch.manual_seed(int(np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0]) >> 1)
    if on_device is not None and device.startswith("cuda"):
        torch.cuda.set_rng_state(on_device, device)
