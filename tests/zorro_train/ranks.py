"""One of two data-parallel ranks in a process of its own: `python -m tests.zorro_train.ranks RANK STORE`.

Rank 0 has five prompts, rank 1 one. Prints, as JSON, the rows of each micro-batch: agreed over the default group, over
a group of both ranks, with TensorDicts, over a group of this rank alone, and without agreement; and how many
collectives, one in each micro-batch's pass, came through.
"""

import json
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from tensordict import TensorDict

from arctic_platform.rl.zorro_train import DeduplicatedActor
from arctic_platform.rl.zorro_train.seqlen_balancing import rearrange_micro_batches_with_dedup
from arctic_platform.rl.zorro_train.tests import build_qwen3, create_dummy_batch

RESPONSE_LEN, BUDGET = 8, 40


def main(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    options = {"init_method": f"file://{store}", "rank": rank, "world_size": 2, "timeout": timedelta(seconds=60)}
    dist.init_process_group("gloo", **options)
    num_prompts = 5 if rank == 0 else 1
    batch = create_dummy_batch(
        2 * num_prompts, num_prompts, 16, RESPONSE_LEN, vocab_size=100, include_training_fields=True, seed=rank
    )
    both, alone = dist.new_group([0, 1]), [dist.new_group([r]) for r in range(2)][rank]
    held = TensorDict({name: x for name, x in batch.items() if isinstance(x, torch.Tensor)}, batch_size=2 * num_prompts)
    micro_batches, rows = rearrange_micro_batches_with_dedup(batch, RESPONSE_LEN, BUDGET)
    told = {
        "default": rows,
        "both": rearrange_micro_batches_with_dedup(batch, RESPONSE_LEN, BUDGET, dp_group=both)[1],
        "tensordict": rearrange_micro_batches_with_dedup(held, RESPONSE_LEN, BUDGET, dp_group=both)[1],
        "alone": rearrange_micro_batches_with_dedup(batch, RESPONSE_LEN, BUDGET, dp_group=alone)[1],
        "unequal": rearrange_micro_batches_with_dedup(batch, RESPONSE_LEN, BUDGET, same_micro_num_in_dp=False)[1],
    }
    actor = DeduplicatedActor(build_qwen3(32, 1, 2, 1, 16, 128), device="cpu", dtype=torch.float32)
    told["collectives"] = 0
    for part in micro_batches:
        actor.compute_policy_loss_and_backward(part | {"response_length": RESPONSE_LEN})
        dist.all_reduce(next(actor.model.parameters()).grad.clone())
        told["collectives"] += 1
    print(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
