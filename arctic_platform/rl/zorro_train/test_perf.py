"""Time and memory of one training pass, deduplicated against the plain padded batch.

    python arctic_platform/rl/zorro_train/test_perf.py
    python arctic_platform/rl/zorro_train/test_perf.py --prompt-len 4096 --num-rollouts 16 --model Qwen/Qwen3-0.6B

Prints four lines: forward, backward, overall, memory. A script, not a test: it asserts nothing.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[3])

import cyclopts
import torch

from arctic_platform.rl.zorro_train.logprobs import LogitsMode
from arctic_platform.rl.zorro_train.tests import benchmark_performance, build_qwen3, create_dummy_batch, load_model


def measure(
    *,
    prompt_len: int = 512,
    response_len: int = 32,
    num_rollouts: int = 8,
    num_prompts: int = 1,
    repeats: int = 3,
    attn_implementation: str = "sdpa",
    logits_optimization: LogitsMode = "none",
    model: str | None = None,
) -> None:
    """Compare both ways on one random batch.

    Parameters
    ----------
    prompt_len: Tokens of each prompt.
    response_len: Tokens of each response.
    num_rollouts: Responses to each prompt.
    num_prompts: Different prompts.
    repeats: Timed passes of each way, interleaved; medians are printed.
    attn_implementation: Kernel of the deduplicated attention, such as eager or sdpa.
    logits_optimization: How the deduplicated pass holds its logits: none, compute or memory.
    model: A folder or a Hugging Face id; without it a Qwen3 with random weights (hidden 256, 4 layers).
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if model is None:
        build_model = partial(build_qwen3, 256, 4, 8, 2, 32, 4096, dtype, device)
    else:
        build_model = partial(load_model, model, dtype, device)
    batch = create_dummy_batch(
        num_prompts * num_rollouts, num_prompts, prompt_len, response_len, device, include_training_fields=False, seed=0
    )
    options = {"attn_implementation": attn_implementation, "logits_optimization": logits_optimization}
    print(f"{num_prompts} prompts of {prompt_len} x {num_rollouts} responses of {response_len}, {device}, {dtype}")
    print(benchmark_performance(build_model, batch, repeats, **options).lines())


if __name__ == "__main__":
    cyclopts.run(measure)
