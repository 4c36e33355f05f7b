"""Deduplicated against plain training on one batch: are the numbers the same, and what is saved.

    python arctic_platform/rl/zorro_train/demo.py

Runs from a bare checkout and asks nothing. It uses CUDA where there is one, otherwise the CPU; the model is a small
Qwen3 with random weights, or the folder or Hugging Face id in the environment variable ZORRO_DEMO_MODEL.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[3])

import torch

from arctic_platform.rl.zorro_train.actor import DeduplicatedActor
from arctic_platform.rl.zorro_train.tests import (
    benchmark_performance,
    build_qwen3,
    check_gradient_correctness,
    create_dummy_batch,
    load_model,
)

LOGPROB_LIMIT = {torch.float32: 1e-4, torch.bfloat16: 0.3}
GRADIENT_LIMIT = {torch.float32: 1e-4, torch.bfloat16: 0.1}


def main() -> int:
    """Print the correctness of one step, then forward, backward, overall and memory; 1 when the numbers differ."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    name = os.environ.get("ZORRO_DEMO_MODEL")
    if name:
        build_model = partial(load_model, name, dtype, device)
    else:
        build_model = partial(build_qwen3, 256, 4, 8, 2, 32, 4096, dtype, device)
    print(f"model   {name or 'Qwen3, hidden 256, 4 layers, random weights'}\ndevice  {device}, {dtype}")

    actor = DeduplicatedActor(build_model(), device=device, attn_implementation="sdpa")
    batch = create_dummy_batch(8, 2, 48, 16, device, add_padding=True, seed=0)
    print("\n8 rows over 2 prompts, padded: deduplicated against the plain padded batch")
    result = check_gradient_correctness(actor.patch(batch["response_length"]), batch)
    print(
        f"correctness: log-probs differ by {result.logprob_error:.1e} at most, gradients by "
        f"{result.gradient_error:.1e} relative"
    )
    metrics = actor.compute_policy_loss_and_backward(batch)
    print("one PPO step: " + "  ".join(f"{key.removeprefix('actor/')} {value:.4f}" for key, value in metrics.items()))
    del actor

    print("\n8 responses of 32 tokens to one prompt of 512: medians of 3 interleaved passes")
    batch = create_dummy_batch(8, 1, 512, 32, device, include_training_fields=False, seed=0)
    print(benchmark_performance(build_model, batch).lines())
    is_exact = result.logprob_error <= LOGPROB_LIMIT[dtype] and result.gradient_error <= GRADIENT_LIMIT[dtype]
    print("\nthe results agree" if is_exact else "\nTHE RESULTS DIFFER by more than rounding explains")
    return 0 if is_exact else 1


if __name__ == "__main__":
    sys.exit(main())
