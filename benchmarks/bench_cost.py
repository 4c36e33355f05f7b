"""The cost model against measured step times and peak memory, over random forests on the CPU.

    python benchmarks/bench_cost.py
    python benchmarks/bench_cost.py --num-forests 48 --repeats 7 --out benchmarks/results/cost.json

Every forest is one forward and backward pass of a Qwen3-like model of random weights in fp32. Times are medians of
interleaved rounds over all forests, by the wall clock and by the CPU seconds of the process (which other processes of
a busy machine disturb less; with one thread both are the same on an idle one). One factor (the median of time over
FLOPs) turns predicted FLOPs into seconds; the worst ratio is how far any forest is from that, either way. Memory is
the peak of torch's own allocations above what was there before. The last line is one JSON object.
"""

from __future__ import annotations

import gc
import json
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cyclopts
import numpy as np
import torch
import transformers
from torch.profiler import ProfilerActivity, profile

from arctic_platform.forest import build_forest, find_targets
from arctic_platform.forest.cost import ModelShape, forest_cost, peak_bytes
from arctic_platform.rl.zorro_train import ModuleReconstructionPatcher
from arctic_platform.rl.zorro_train.tests import build_qwen3

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Case:
    """Rows of one forest with their targets, and what the cost model says of them."""

    rows: list[np.ndarray]
    masks: list[np.ndarray]
    num_tokens: int
    num_predicting: int
    flops: float


def bench(
    *,
    num_forests: int = 36,
    max_groups: int = 5,
    repeats: int = 5,
    hidden_size: int = 256,
    num_layers: int = 2,
    vocab_size: int = 4096,
    num_threads: int = 1,
    seed: int = 0,
    out: Path | None = None,
) -> None:
    """Measure and compare.

    Parameters
    ----------
    num_forests: Random forests: groups of 1 to 12 rows, some with answers that fork.
    max_groups: Most groups of a forest.
    repeats: Rounds over all forests; the median time of each counts.
    hidden_size: Width of the model; heads of 64.
    num_layers: Layers.
    vocab_size: Vocabulary.
    num_threads: Threads of torch.
    seed: Of forests and weights.
    out: File that also receives the JSON object.
    """
    settings = {name: value for name, value in locals().items() if name != "out"}
    torch.set_num_threads(num_threads)
    torch.manual_seed(seed)
    heads = hidden_size // 64
    model = build_qwen3(hidden_size, num_layers, heads, max(heads // 2, 1), 64, vocab_size)
    patcher, shape = ModuleReconstructionPatcher(model), ModelShape.of(model.config)
    rng = np.random.default_rng(seed)
    cases = [random_case(rng, vocab_size, shape, max_groups) for _ in range(num_forests)]
    run(patcher, cases[0])
    rounds = np.array([[timed(patcher, case) for case in cases] for _ in range(repeats)])
    wall, cpu = np.median(rounds, axis=0).T
    flops = np.array([case.flops for case in cases])
    memory = np.array([measured_peak(patcher, case) for case in cases])
    record = {
        "benchmark": "cost",
        "settings": settings,
        "time": compared(flops, wall),
        "cpu_time": compared(flops, cpu),
        "cpu_time_by_tokens": compared(np.array([float(case.num_tokens) for case in cases]), cpu),
        "memory": compared(
            np.array([float(peak_bytes(shape, case.num_tokens, case.num_predicting)) for case in cases]), memory, 1.0
        ),
        "gflops_per_cpu_second": float(np.median(flops / cpu) / 1e9),
        "tokens": [min(case.num_tokens for case in cases), max(case.num_tokens for case in cases)],
        **origin(),
    }
    print(lines(record))
    text = json.dumps(record)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n")
    print(text)


def random_case(rng: np.random.Generator, vocab_size: int, shape: ModelShape, max_groups: int) -> Case:
    """Groups of long-tailed responses behind prompts of very different lengths; a third of the responses fork."""
    rows, masks = [], []
    for _ in range(int(rng.integers(1, max_groups + 1))):
        prompt = rng.integers(0, vocab_size, int(rng.integers(32, 800)))
        stem = rng.integers(0, vocab_size, int(rng.integers(0, 100)))
        for _ in range(int(rng.integers(1, 13))):
            response = rng.integers(0, vocab_size, int(np.clip(rng.lognormal(4, 0.8), 4, 400)))
            row = np.concatenate([prompt, stem, response] if rng.random() < 1 / 3 else [prompt, response])
            rows.append(row)
            masks.append(np.arange(len(row)) >= len(prompt))
    forest = build_forest(rows)
    num_predicting = len(find_targets(forest, masks).parents)
    flops = forest_cost(forest, shape, num_predicting=num_predicting, num_targets=0).flops
    return Case(rows, masks, forest.num_tokens, num_predicting, flops)


def run(patcher: ModuleReconstructionPatcher, case: Case) -> None:
    """One forward and backward pass; gradients are dropped."""
    patcher.forward_rows(case.rows, case.masks).logprobs.sum().backward()
    patcher.model.zero_grad(set_to_none=True)


def timed(patcher: ModuleReconstructionPatcher, case: Case) -> tuple[float, float]:
    """Wall and CPU seconds of one pass."""
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    run(patcher, case)
    return time.perf_counter() - wall, time.process_time() - cpu


def measured_peak(patcher: ModuleReconstructionPatcher, case: Case) -> float:
    """Bytes at the peak of a pass, above what was allocated before, gradients of parameters excluded."""
    patcher.forward_rows(case.rows[:1], case.masks[:1]).logprobs.sum().backward()  # gradients exist
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        patcher.forward_rows(case.rows, case.masks).logprobs.sum().backward()
    patcher.model.zero_grad(set_to_none=True)
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return float(np.cumsum(changes).max(initial=0))


def compared(predicted: np.ndarray, measured: np.ndarray, factor: float | None = None) -> dict[str, float]:
    """Correlations, and how far the worst forest is from `factor * predicted` (default: the median factor)."""
    factor = float(np.median(measured / predicted)) if factor is None else factor
    order = [np.argsort(np.argsort(values)) for values in (predicted, measured)]
    ratio = measured / (factor * predicted)
    return {
        "correlation": float(np.corrcoef(predicted, measured)[0, 1]),
        "rank_correlation": float(np.corrcoef(*order)[0, 1]),
        "worst_ratio": float(np.maximum(ratio, 1 / ratio).max()),
        "median_off": float(np.median(np.abs(ratio - 1))),
    }


def lines(record: dict) -> str:
    """The comparison as a table."""
    head = f"{record['settings']['num_forests']} forests of {record['tokens'][0]} to {record['tokens'][1]} tokens"
    table = [head, f"{'':16}{'correlation':>12}{'of ranks':>10}{'worst ratio':>13}{'median off':>12}"]
    names = {
        "time": "FLOPs, wall",
        "cpu_time": "FLOPs, CPU",
        "cpu_time_by_tokens": "tokens, CPU",
        "memory": "peak bytes",
    }
    for name, label in names.items():
        row = record[name]
        table.append(
            f"{label:16}{row['correlation']:12.4f}{row['rank_correlation']:10.4f}{row['worst_ratio']:13.2f}"
            f"{100 * row['median_off']:11.1f}%"
        )
    return "\n".join(table)


def origin() -> dict[str, object]:
    """Where and how this was measured."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "commit": git.stdout.strip() if git.returncode == 0 else "unknown",
        "command": " ".join(["python", *sys.argv]),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


if __name__ == "__main__":
    cyclopts.run(bench)
