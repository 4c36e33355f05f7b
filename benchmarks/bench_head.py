"""Memory and time of the output head with its log-probs, forward and backward, in each logits mode.

    python benchmarks/bench_head.py
    python benchmarks/bench_head.py --num-tokens 2048 --modes none compute memory

The last line is one JSON object. Memory is the peak of the resident set above the level before the pass, when hidden
states and the head's weights exist: it holds the gradients of both. Each mode runs in a process of its own.
"""

from __future__ import annotations

import json
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cyclopts
import torch

from arctic_platform.rl.zorro_train.logprobs import LinearHead, LogitsMode, target_logprobs

ROOT = Path(__file__).resolve().parents[1]


def measure(
    mode: LogitsMode, num_tokens: int, hidden_size: int, vocab_size: int, peak_gib: float | None, entropy: bool
) -> dict[str, float]:
    """Seconds, and GB of the resident set above the level before, of one forward and backward."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(vocab_size, hidden_size, generator=generator).mul_(0.02).requires_grad_()
    hidden = torch.randn(num_tokens, hidden_size, generator=generator).requires_grad_()
    slots = torch.arange(num_tokens)
    before = _peak_bytes()
    started = time.perf_counter()
    logprobs, entropies = target_logprobs(
        hidden,
        LinearHead(weight),
        torch.randint(vocab_size, (num_tokens,), generator=generator),
        slots,
        vocab_size=vocab_size,
        mode=mode,
        calculate_entropy=entropy,
        peak_gib=None if mode == "none" else peak_gib,
    )
    loss = -logprobs.mean() if entropies is None else -logprobs.mean() - 0.01 * entropies.mean()
    loss.backward()
    return {
        "seconds": round(time.perf_counter() - started, 1),
        "peak_gb": round((_peak_bytes() - before) / 1e9, 2),
        "loss": round(loss.item(), 4),
    }


def bench(
    *,
    num_tokens: int = 4096,
    hidden_size: int = 1024,
    vocab_size: int = 151936,
    modes: tuple[LogitsMode, ...] = ("none", "compute", "memory"),
    peak_gib: float | None = None,
    entropy: bool = False,
    in_process: bool = False,
    out: Path | None = None,
) -> None:
    """Measure the modes on the CPU in fp32.

    Parameters
    ----------
    num_tokens: Predicted tokens.
    hidden_size: Width of the hidden states.
    vocab_size: Vocabulary.
    modes: Logits modes to measure.
    peak_gib: logits_optimization_peak_mem_size_in_gib, for compute and memory.
    entropy: Also compute entropies and send a gradient through them.
    in_process: Measure the first mode here and print its numbers alone.
    out: File that the JSON line is appended to.
    """
    sizes = {"num_tokens": num_tokens, "hidden_size": hidden_size, "vocab_size": vocab_size}
    if in_process:
        print(json.dumps(measure(modes[0], *sizes.values(), peak_gib, entropy)))
        return
    results = {}
    for mode in modes:
        options = [f"--{name.replace('_', '-')}={value}" for name, value in sizes.items()]
        options += [f"--peak-gib={peak_gib}"] * (peak_gib is not None) + ["--entropy"] * entropy
        command = [sys.executable, __file__, "--in-process", "--modes", mode, *options]
        results[mode] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        print(f"{mode:8} {results[mode]['peak_gb']:6.2f} GB  {results[mode]['seconds']:6.1f} s", flush=True)
    line = json.dumps(
        {"bench": "head", **sizes, "entropy": entropy, "peak_gib": peak_gib, "modes": results} | _versions()
    )
    print(line)
    if out is not None:
        with out.open("a") as file:
            file.write(line + "\n")


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _versions() -> dict[str, object]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "commit": commit,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "threads": torch.get_num_threads(),
        "command": " ".join(["python", *sys.argv]),
    }


if __name__ == "__main__":
    cyclopts.run(bench)
