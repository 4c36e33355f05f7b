"""Training forward and backward against the plain padded Hugging Face batch (sdpa).

    python benchmarks/bench_train.py
    python benchmarks/bench_train.py --num-prompts 4 --prompt-len 512 --num-rollouts 8 --response-len 256

The last line is one JSON object. Times are medians of interleaved passes; memory is the peak of the resident set
above the level before the pass (parameters and gradients exist already), each way in a process of its own.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cyclopts
import torch
import transformers

from arctic_platform.rl.zorro_train.logprobs import LogitsMode
from arctic_platform.rl.zorro_train.tests import Performance, benchmark_performance, build_qwen3, create_dummy_batch

ROOT = Path(__file__).resolve().parents[1]


def bench(
    *,
    num_prompts: int = 1,
    prompt_len: int = 2048,
    num_rollouts: int = 16,
    response_len: int = 128,
    hidden_size: int = 512,
    num_layers: int = 8,
    num_heads: int = 8,
    num_kv_heads: int = 2,
    vocab_size: int = 32000,
    logits_optimization: LogitsMode = "none",
    repeats: int = 3,
    num_threads: int | None = None,
    out: Path | None = None,
) -> None:
    """Measure one shape on the CPU in fp32 with a Qwen3-like model of random weights.

    Parameters
    ----------
    num_prompts: Different prompts.
    prompt_len: Tokens of each prompt.
    num_rollouts: Responses to each prompt.
    response_len: Tokens of each response.
    hidden_size: Width of the model; head size is hidden_size / num_heads.
    num_layers: Layers.
    num_heads: Query heads.
    num_kv_heads: Key-value heads.
    vocab_size: Vocabulary.
    logits_optimization: How the deduplicated pass holds its logits: none, compute or memory.
    repeats: Timed passes of each way, interleaved.
    num_threads: Threads of torch; without it as many as torch takes.
    out: File that also receives the JSON object.
    """
    settings = {name: value for name, value in locals().items() if name not in ("out", "num_threads")}
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    build_model = partial(
        build_qwen3, hidden_size, num_layers, num_heads, num_kv_heads, hidden_size // num_heads, vocab_size
    )
    batch = create_dummy_batch(
        num_prompts * num_rollouts, num_prompts, prompt_len, response_len, vocab_size=vocab_size,
        include_training_fields=False, seed=0,
    )  # fmt: skip
    performance = benchmark_performance(build_model, batch, repeats, logits_optimization=logits_optimization)
    print(f"{num_prompts} x {prompt_len} x {num_rollouts} x {response_len}, fp32, {torch.get_num_threads()} threads")
    print(performance.lines())
    record = json.dumps(_record(settings, performance))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(record + "\n")
    print(record)


def _record(settings: dict[str, int | str], performance: Performance) -> dict[str, object]:
    return {
        "benchmark": "train",
        "settings": settings,
        "baseline": asdict(performance.baseline),
        "dedup": asdict(performance.dedup),
        "time_ratio": performance.baseline.overall / performance.dedup.overall,
        "memory_ratio": performance.baseline.peak_bytes / performance.dedup.peak_bytes,
        "num_threads": torch.get_num_threads(),
        "commit": _commit(),
        "command": " ".join(["python", *sys.argv]),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def _commit() -> str:
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return git.stdout.strip() if git.returncode == 0 else "unknown"


if __name__ == "__main__":
    cyclopts.run(bench)
