"""A mixture of experts with a load-balancing loss, trained through the engine and through the actor."""

import numpy as np
import pytest
import torch

from arctic_platform.rl.engines.torch_train import TorchTrainEngine
from arctic_platform.rl.protocol import Processing, RolloutBatch
from arctic_platform.rl.zorro_train import DeduplicatedActor
from arctic_platform.rl.zorro_train.tests import create_dummy_batch
from tests.rl.engines.builders import config, part_of
from tests.zorro_train.architectures import VOCAB, build
from tests.zorro_train.twins import relative

COEF = 0.5


def moe(**options):
    return build("qwen3_moe", output_router_logits=True, router_aux_loss_coef=COEF, **options)


def rollouts(num_rows=8, advantage=1.0):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, 12).tolist() for _ in range(2)]
    return RolloutBatch(
        prompts=[prompts[b % 2] for b in range(num_rows)],
        responses=[rng.integers(0, VOCAB, 3 + b % 4).tolist() for b in range(num_rows)],
        advantages=[advantage] * num_rows,
    )


def flat_grads(model):
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([grad.flatten() for grad in grads])


def stock_router_loss(model, batch):
    """The family's own loss of the padded batch."""
    rows = [torch.tensor(p + r) for p, r in zip(batch.prompts, batch.responses, strict=True)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    live = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return model(input_ids=ids, attention_mask=live).aux_loss


@pytest.mark.parametrize("is_shared", [True, False])
def test_engine_adds_the_stock_router_loss_of_the_unshared_batch(is_shared):
    trainer, batch = TorchTrainEngine(config(), model=moe()), rollouts(advantage=0.0)
    done = trainer.fwd_bwd(batch, Processing(zorro=is_shared))
    assert done.metrics["zorro_active"] == float(is_shared)
    plain = moe()
    expected = stock_router_loss(plain, batch)
    (COEF * expected).backward()
    assert done.metrics["router_loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert done.metrics["loss"] == pytest.approx(COEF * expected.item(), rel=1e-5)
    assert relative(flat_grads(trainer.model), flat_grads(plain)) <= 1e-5


def test_engine_divides_the_router_loss_over_the_calls_of_a_step():
    """Equal halves: each call's loss counts half."""
    trainer, batch = TorchTrainEngine(config(), model=moe()), rollouts(advantage=0.0)
    halves = [part_of(batch, rows) for rows in ([0, 1, 2, 3], [4, 5, 6, 7])]
    for half in halves:
        trainer.fwd_bwd(half)
    plain = moe()
    sizes = [sum(map(len, half.responses)) for half in halves]
    for half, size in zip(halves, sizes, strict=True):
        (COEF * stock_router_loss(plain, half) * size / sum(sizes)).backward()
    assert relative(flat_grads(trainer.model), flat_grads(plain)) <= 1e-5


def test_a_model_that_does_not_ask_gets_no_router_loss():
    trainer = TorchTrainEngine(config(), model=build("qwen3_moe"))
    assert "router_loss" not in trainer.fwd_bwd(rollouts()).metrics


@pytest.mark.parametrize("max_token_len", [4096, 40])
def test_actor_adds_the_router_loss_to_the_gradients(max_token_len):
    batch = create_dummy_batch(4, 2, 10, 4, "cpu", True, False)
    batch["input_ids"] %= VOCAB
    batch["advantages"] = torch.zeros_like(batch["advantages"])
    batch.pop("ref_log_prob", None)
    actor = DeduplicatedActor(moe(), device="cpu", attn_implementation="sdpa", max_token_len=max_token_len)
    actor.compute_policy_loss_and_backward(batch)
    ours = flat_grads(actor.model)
    plain = moe()
    loss = plain(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).aux_loss
    (COEF * loss).backward()
    limit = 1e-5 if max_token_len == 4096 else 0.5  # several passes balance each by itself
    assert relative(ours, flat_grads(plain)) <= limit
