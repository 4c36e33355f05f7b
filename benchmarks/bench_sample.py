"""Sampling with shared prompts against the same sampler with nothing shared, and against plain model.generate.

    python benchmarks/bench_sample.py
    python benchmarks/bench_sample.py --num-prompts 8 --shared-len 150 --prompt-len 165 --num-rollouts 8 --new-tokens 6
    python benchmarks/bench_sample.py --prompt-len 512 --num-rollouts 8 --new-tokens 32 --plain

The last line is one JSON object. Times are medians of interleaved runs. Both ways of the sampler run the same code and
kernels; with sharing off every rollout is prefilled and stored by itself, which is what model.generate does too.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cyclopts
import numpy as np
import torch
import transformers
from torch import nn

from arctic_platform.rl.protocol import SamplingParams
from arctic_platform.rl.zorro_inference import Sampler

ROOT = Path(__file__).resolve().parents[1]


def bench(
    *,
    model: str = "models/smollm2-135m",
    num_prompts: int = 1,
    prompt_len: int = 2049,
    shared_len: int = 0,
    num_rollouts: int = 16,
    new_tokens: int = 64,
    max_batch_rows: int = 64,
    dtype: str = "float32",
    repeats: int = 3,
    plain: bool = False,
    num_threads: int | None = None,
    out: Path | None = None,
) -> None:
    """Measure one shape on the CPU; prompts are random tokens, all rollouts have the same length.

    Parameters
    ----------
    model: Folder or hub id of a Hugging Face causal LM.
    num_prompts: Different prompts.
    prompt_len: Tokens of each prompt.
    shared_len: Tokens at the start of the prompts that all of them share.
    num_rollouts: Rollouts of each prompt.
    new_tokens: Tokens of each rollout, at least 2.
    max_batch_rows: Rollouts that decode at once.
    dtype: Precision of the weights.
    repeats: Timed runs of each way, interleaved.
    plain: Time model.generate on the expanded batch as well.
    num_threads: Threads of torch; without it as many as torch takes.
    out: File that also receives the JSON object.
    """
    shape = {name: value for name, value in locals().items() if name not in ("out", "num_threads")}
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    causal_lm = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    prompts = _prompts(causal_lm.config.vocab_size, num_prompts, prompt_len, shared_len)
    params = SamplingParams(n=num_rollouts, max_tokens=new_tokens, seed=0, ignore_eos=True)
    ways = {
        name: _sampler_run(
            Sampler(causal_lm, eos_token_ids=[], share=share, max_batch_rows=max_batch_rows), prompts, params
        )
        for name, share in (("shared", True), ("unshared", False))
    }
    if plain:
        ways["plain"] = _plain_run(causal_lm, prompts, params)
    record = _record(shape, _interleave(ways, repeats))
    _print(record)
    line = json.dumps(record)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(line + "\n")
    print(line)


def _prompts(vocab_size: int, num_prompts: int, prompt_len: int, shared_len: int) -> list[list[int]]:
    random = np.random.default_rng(0)
    shared = random.integers(0, vocab_size, shared_len).tolist()
    return [shared + random.integers(0, vocab_size, prompt_len - shared_len).tolist() for _ in range(num_prompts)]


def _sampler_run(sampler: Sampler, prompts: list[list[int]], params: SamplingParams) -> Callable[[], dict[str, float]]:
    def run() -> dict[str, float]:
        started = time.perf_counter()
        metrics = sampler.generate(prompts, params).metrics
        seconds = time.perf_counter() - started
        return {"seconds": seconds, **metrics, "step_ms": 1000 * metrics["decode_seconds"] / (params.max_tokens - 1)}

    return run


def _plain_run(model: nn.Module, prompts: list[list[int]], params: SamplingParams) -> Callable[[], dict[str, float]]:
    ids = torch.tensor(prompts).repeat_interleave(params.n, 0)
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": params.max_tokens, "min_new_tokens": params.max_tokens}

    def run() -> dict[str, float]:
        started = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)
        return {"seconds": time.perf_counter() - started}

    return run


def _interleave(ways: dict[str, Callable[[], dict[str, float]]], repeats: int) -> dict[str, dict[str, float]]:
    """Medians of every value of every way; the ways take turns."""
    runs = {name: [] for name in ways}
    for _ in range(repeats):
        for name, run in ways.items():
            runs[name].append(run())
    return {name: {key: median(run[key] for run in found) for key in found[0]} for name, found in runs.items()}


def _record(shape: dict[str, object], medians: dict[str, dict[str, float]]) -> dict[str, object]:
    shared, unshared = medians["shared"], medians["unshared"]
    ratios = {key: unshared[key] / shared[key] for key in ("seconds", "prefill_seconds", "decode_seconds")}
    if "plain" in medians:
        ratios["plain_seconds"] = medians["plain"]["seconds"] / shared["seconds"]
    return {
        "benchmark": "sample",
        "shape": shape,
        **medians,
        "ratios": ratios,
        "num_threads": torch.get_num_threads(),
        "commit": _commit(),
        "command": " ".join(["python", *sys.argv]),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def _print(record: dict) -> None:
    for name in ("shared", "unshared"):
        way = record[name]
        print(
            f"{name:9}{way['seconds']:8.2f} s   prefill {way['prefill_seconds']:7.2f} s   "
            f"step {way['step_ms']:7.1f} ms   tokens computed {way['tokens_computed']:.0f}, "
            f"kept {way['kv_tokens_stored']:.0f}"
        )
    if "plain" in record:
        print(f"{'plain':9}{record['plain']['seconds']:8.2f} s   model.generate on the expanded batch")
    print("times as fast with sharing: " + ", ".join(f"{key} {ratio:.2f}" for key, ratio in record["ratios"].items()))


def _commit() -> str:
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return git.stdout.strip() if git.returncode == 0 else "unknown"


if __name__ == "__main__":
    cyclopts.run(bench)
