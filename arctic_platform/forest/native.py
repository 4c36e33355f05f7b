"""Our own attention kernel for CPUs, fp32: attend.cpp, compiled when the package is installed.

It reads queries, keys and values wherever they lie, serves only those rows that are named, and merges its results into
others in place; torch's flash kernel wants copies for each of these, and on AMD processors reaches half the speed.
Where the package was installed without a compiler, or the processor has no AVX2, `serves` is False and torch's is used.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from struct import Struct

import torch
from torch import Tensor

VARIABLE = "ARCTIC_NATIVE_ATTENTION"
"""Set to 0 in the environment, the kernel is not used."""

MAX_DIM = 256
LIBRARIES = {"AVX512": ("_attend_avx512", "_attend_avx2"), "AVX2": ("_attend_avx2",)}
"""By what the processor has: the compiled files, the best first."""

_PROBLEM = Struct("=8Q26qd")


def why_absent() -> str | None:
    """Why the kernel cannot be used here, in a few words; None where it can."""
    capability = torch.backends.cpu.get_cpu_capability()
    if os.environ.get(VARIABLE) == "0":
        return f"switched off by {VARIABLE}=0"
    if capability not in LIBRARIES:
        return f"for processors with AVX2 or AVX-512, torch says {capability}"
    if _library() is None:
        return "the package was installed without a C++ compiler"
    return None if _thread_starter() else "torch's threads are not started by GOMP_parallel"


def is_available() -> bool:
    """Compiled, not switched off, and this processor runs it."""
    return _functions() is not None


def serves(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether `attend_` takes these tensors, `[..., D]`: fp32 on the CPU, heads of a multiple of 8 up to 256."""
    dim = q.shape[-1]
    return (
        q.dtype == torch.float32
        and q.device.type == "cpu"
        and dim == v.shape[-1]
        and dim % 8 == 0
        and dim <= MAX_DIM
        and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        and min(q.numel(), k.numel()) > 0
        and _functions() is not None
    )


def attend_(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    num_queries: int,
    scale: float,
    rows: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    merge: bool = False,
) -> None:
    """Attend to n runs of W keys, each for `num_queries` rows, and write the rows' `out` and `lse` in place.

    `k, v [n, K, W, D]`; `mask [n or 1, num_queries, W] bool`, True = visible, last stride 1. `q, out [n, rows, H, D]`
    and `lse [n, rows, H]` of all rows, of any strides but the last; query i of run j is row i of `q[j]`. With
    `rows [n * num_queries] int64` it is row `rows[j * num_queries + i]` of `q[0]`, and nobody where that is -1; no row
    may be named twice. causal: query i sees keys 0..i. merge: `out` and `lse` hold what the rows have seen elsewhere.
    A row that sees nothing has lse -inf and output 0.
    """
    functions = _functions()
    assert functions is not None
    attend, start = functions
    num_runs, num_heads, num_keys, dim = k.shape
    is_named = rows is not None
    problem = _PROBLEM.pack(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        out.data_ptr(),
        lse.data_ptr(),
        rows.data_ptr() if rows is not None else 0,
        mask.data_ptr() if mask is not None else 0,
        start,
        torch.get_num_threads(),
        causal,
        merge,
        num_runs,
        num_heads,
        q.shape[2] // num_heads,
        num_queries,
        num_keys,
        dim,
        *_strides(q, is_named),
        *(k.stride(0), k.stride(2), k.stride(1)),
        *(v.stride(0), v.stride(2), v.stride(1)),
        *_strides(out, is_named),
        *_strides(lse, is_named),
        *((mask.stride(0) if len(mask) > 1 else 0, mask.stride(1)) if mask is not None else (0, 0)),
        scale,
    )
    if attend(problem):
        raise MemoryError("no memory left for attention")


def _strides(x: Tensor, is_named: bool) -> tuple[int, int, int]:
    """Of runs, rows and heads; named rows are all those of the first run."""
    by_run, by_row, by_head = x.stride()[:3]
    return (0 if is_named else by_run), by_row, by_head


@cache
def _functions() -> tuple[Callable[[bytes], int], int] | None:
    """The kernel, and the address of the function that starts threads in torch's own OpenMP runtime."""
    if why_absent() is not None:
        return None
    path, start = _library(), _thread_starter()
    assert path is not None and start is not None
    attend = ctypes.CDLL(str(path)).arctic_attend
    attend.argtypes = [ctypes.c_char_p]
    return attend, start


def _library() -> Path | None:
    names = LIBRARIES.get(torch.backends.cpu.get_cpu_capability(), ())
    paths = [Path(__file__).with_name(name + suffix) for name in names for suffix in EXTENSION_SUFFIXES]
    return next((path for path in paths if path.exists()), None)


@cache
def _thread_starter() -> int | None:
    """Of the runtime that torch has loaded: with one of its own, each would keep the cores busy against the other."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    lines = maps.read_text(encoding="utf-8").splitlines()
    paths = {line.split(maxsplit=5)[-1] for line in lines if "libgomp" in line or "libiomp" in line}
    paths = {path for path in paths if Path(path).exists()}
    for path in sorted(paths, key=lambda path: (not path.startswith(str(Path(torch.__file__).parent)), path)):
        starter = getattr(ctypes.CDLL(path), "GOMP_parallel", None)
        if starter is not None:
            return ctypes.cast(starter, ctypes.c_void_p).value
    return None
