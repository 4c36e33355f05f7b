"""The part of `arctic-rl doctor` that needs torch: its build, devices, threads, kernels, and a tiny model's receipt."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from arctic_platform.errors import ArcticError
from arctic_platform.forest import native
from arctic_platform.forest.backends import ATTN_IMPLEMENTATIONS, check_implementation, plan_of
from arctic_platform.forest.trie import build_forest
from arctic_platform.rl.doctor import Check, usable_cpus
from arctic_platform.rl.engines.models import tiny_model
from arctic_platform.rl.zorro_train import ModuleReconstructionPatcher
from arctic_platform.rl.zorro_train.proof import measure_receipt

GIB = 2**30


def examine_torch() -> list[Check]:
    """All checks of this module."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return [
        _check_build(),
        *_check_devices(),
        _check_threads(),
        _check_ranks(device),
        *[_check_kernel(name, device) for name in ATTN_IMPLEMENTATIONS],
        _check_native(),
        _check_tiny_model(device),
    ]


def _check_build() -> Check:
    cuda = torch.version.cuda
    found = f"{torch.__version__}, built for {f'CUDA {cuda}' if cuda else 'CPU'}"
    has_driver = Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidia0").exists()
    if has_driver and not cuda:
        advice = "this machine has an NVIDIA driver, this torch cannot use it: install a CUDA build of torch"
        return Check("torch", "build", "warning", found, advice)
    if cuda and not torch.cuda.is_available():
        return Check("torch", "build", "warning", f"{found}, no CUDA device", "check the driver: nvidia-smi")
    return Check("torch", "build", "ok", found)


def _check_devices() -> list[Check]:
    checks = []
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        found = f"{device.name}, {free / GIB:.1f} GiB free of {total / GIB:.1f} GiB"
        if free < total // 10:
            advice = "another process holds its memory: nvidia-smi shows which"
            checks.append(Check("torch", f"cuda:{index}", "warning", found, advice))
        else:
            checks.append(Check("torch", f"cuda:{index}", "ok", found))
    return checks


def _check_threads() -> Check:
    threads, cores = torch.get_num_threads(), usable_cpus()
    setting = os.environ.get("OMP_NUM_THREADS")
    found = f"{threads} for {cores} usable cores" + (f", OMP_NUM_THREADS={setting}" if setting else "")
    if threads > cores:
        return Check("torch", "threads", "warning", found, f"more threads than cores is slow: OMP_NUM_THREADS={cores}")
    return Check("torch", "threads", "ok", found)


def _check_ranks(device: str) -> Check:
    """What several training processes speak: gloo, and on CUDA NCCL beside it."""
    advice = "training in one process works (training_engine: torch); for ranks install a build of torch with it"
    if not dist.is_available() or not dist.is_gloo_available():
        return Check("torch", "ranks", "absent", "this torch has no gloo", advice)
    if device == "cpu":
        return Check("torch", "ranks", "ok", f"gloo on cpu, {usable_cpus()} ranks of one thread fill the cores")
    if not dist.is_nccl_available():
        return Check("torch", "ranks", "warning", "gloo, but this torch has no NCCL", advice)
    return Check(
        "torch", "ranks", "ok", f"NCCL and gloo on {torch.cuda.device_count()} CUDA devices, one for each rank"
    )


def _check_kernel(name: str, device: str) -> Check:
    """One small forest through the kernel, compared with matmuls; a kernel for another device is absent."""
    dtype = torch.bfloat16 if name.startswith("flash_attention") else torch.float32
    try:
        check_implementation(name, device, dtype)
    except ArcticError as error:
        return Check("kernels", name, "absent", str(error).split("; ")[0].removeprefix(f"attn_implementation={name} "))
    try:
        with warnings.catch_warnings(action="ignore"):
            error = _kernel_error(name, device, dtype)
    except Exception as error:  # whatever a driver, a compiler or an extension of torch raises is the finding
        return Check("kernels", name, "problem", f"fails: {_one_line(error)}", "use attn_implementation: eager")
    limit = 0.05 if dtype == torch.bfloat16 else 1e-4
    found = f"runs on {device}" + (f", {error:.0e} from eager" if name != "eager" else "")
    if error > limit:
        return Check("kernels", name, "problem", found, "do not use it: attn_implementation: eager")
    return Check("kernels", name, "ok", found)


def _check_native() -> Check:
    """Whether fp32 attention on the CPU, `sdpa` above, runs on the kernel that is compiled at installation."""
    reason = native.why_absent()
    if reason is None:
        found = f"fp32 attention on CPUs, compiled for {torch.backends.cpu.get_cpu_capability()}"
        return Check("kernels", "native", "ok", found)
    advice = "install g++ and the package again (torch's kernel serves until then)" if "compiler" in reason else ""
    return Check("kernels", "native", "absent", reason, advice)


@torch.no_grad()
def _kernel_error(name: str, device: str, dtype: torch.dtype) -> float:
    forest = build_forest([np.arange(24) % 7, np.concatenate([np.arange(16) % 7, np.arange(9)])])
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, forest.num_tokens, 32, generator=generator).to(device, dtype) for heads in (4, 2, 2)
    )
    out, plain = (plan_of(which, forest, device).attend(0, q, k, v, scale=32**-0.5) for which in (name, "eager"))
    return float((out - plain).abs().max())


def _check_tiny_model(device: str) -> Check:
    """Shared against unshared log-probs and gradients of four rows."""
    trunk = np.arange(40) % 200
    rows = [np.concatenate([trunk, np.arange(tail, tail + 8)]) for tail in (3, 3, 50, 90)]
    masks = [np.arange(len(row)) >= len(trunk) for row in rows]
    try:
        patcher = ModuleReconstructionPatcher(tiny_model().to(device), probe=True)
        receipt = measure_receipt(patcher, rows, masks)
    except Exception as error:  # the finding is whatever stops a model from running here
        return Check("kernels", "tiny model", "problem", _one_line(error), "reinstall: pip install 'zorro-rl[torch]'")
    found = (
        f"trains exactly on {device}: log-probs {receipt.logprob_max_abs:.0e}, gradients {receipt.gradient_rel:.0e} "
        f"from unshared; {receipt.tokens_shared} tokens computed for {receipt.tokens_alone}"
    )
    return Check("kernels", "tiny model", "ok", found)


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
