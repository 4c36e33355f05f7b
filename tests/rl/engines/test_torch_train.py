import itertools
from pathlib import Path

import pytest
import torch

from arctic_platform.errors import ConfigError, ExactnessError, InputError, NonFiniteError
from arctic_platform.rl.config import OptimizerConfig
from arctic_platform.rl.engines.models import load_model, tiny_model
from arctic_platform.rl.engines.optimizer import learning_rate
from arctic_platform.rl.engines.torch_train import TorchTrainEngine
from arctic_platform.rl.losses import LOSSES
from arctic_platform.rl.protocol import Processing, RolloutBatch
from tests.rl.engines.builders import config, grouped_batch, part_of


def engine(**settings: object) -> TorchTrainEngine:
    return TorchTrainEngine(config(**settings))


def weights(trainer: TorchTrainEngine) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in trainer.model.named_parameters()}


def grads(trainer: TorchTrainEngine) -> torch.Tensor:
    return torch.cat([param.grad.flatten() for param in trainer.model.parameters()]).clone()


def assert_same_grads(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = 1e-5) -> None:
    assert ((ours - theirs).norm() / theirs.norm().clamp(min=1e-12)).item() < tolerance


def everything(trainer: TorchTrainEngine) -> list[torch.Tensor]:
    """All that a failed call must leave as it was."""
    state = trainer.optimizer.adamw.state_dict()["state"]
    moments = [value for index in sorted(state) for value in state[index].values()]
    pending = [param.grad for param in trainer.model.parameters() if param.grad is not None]
    counters = [torch.tensor([trainer.num_steps, trainer.version, int(trainer.has_pending_gradients)])]
    return [tensor.detach().clone() for tensor in [*trainer.model.parameters(), *moments, *pending, *counters]]


def assert_untouched(trainer: TorchTrainEngine, before: list[torch.Tensor]) -> None:
    after = everything(trainer)
    assert len(before) == len(after)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


# --- values and gradients


def test_log_probs_equal_those_of_each_row_alone_in_the_stock_model() -> None:
    trainer, batch = engine(), grouped_batch()
    scored = trainer.log_probs(batch, Processing(temperature=0.7, calculate_entropy=True))
    stock = tiny_model()
    for row, (prompt, response) in enumerate(zip(batch.prompts, batch.responses, strict=True)):
        with torch.no_grad():
            logits = stock(torch.tensor([prompt + response])).logits[0] / 0.7
        table = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        expected = table.gather(1, torch.tensor(response, dtype=torch.long)[:, None]).flatten()
        torch.testing.assert_close(torch.tensor(scored.logprobs[row]), expected, rtol=1e-5, atol=1e-5)
        entropy = -(table.exp() * table).sum(-1)
        torch.testing.assert_close(torch.tensor(scored.entropy[row]), entropy, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_sharing_changes_neither_loss_nor_gradient(loss: str) -> None:
    batch, processing = grouped_batch(), Processing(loss=loss)
    shared, plain = engine(), engine(zorro_train={"enable": False})
    on, off = shared.fwd_bwd(batch, processing), plain.fwd_bwd(batch, processing)
    assert on.metrics["loss"] == pytest.approx(off.metrics["loss"], abs=1e-5)
    assert (on.metrics["zorro_active"], off.metrics["zorro_active"]) == (1.0, 0.0)
    assert on.metrics["tokens_computed"] < on.metrics["tokens_naive"]
    assert_same_grads(grads(shared), grads(plain), 1e-4)


def test_one_call_may_switch_sharing() -> None:
    batch = grouped_batch()
    on, off = engine(), engine(zorro_train={"enable": False})
    assert on.fwd_bwd(batch, Processing(zorro=False)).metrics["zorro_active"] == 0.0
    assert off.fwd_bwd(batch, Processing(zorro=True)).metrics["zorro_active"] == 1.0
    assert_same_grads(grads(on), grads(off), 1e-4)
    again = on.fwd_bwd(batch)
    assert again.metrics["zorro_active"] == 1.0


def test_rows_that_share_too_little_switch_sharing_off() -> None:
    batch = RolloutBatch(prompts=[[5, 6, 7, 8], [9, 10, 11, 12]], responses=[[1, 2], [3, 4]], advantages=[1.0, -1.0])
    assert engine().fwd_bwd(batch).metrics["zorro_active"] == 0.0
    assert engine(zorro_train={"min_saving": 0.0}).fwd_bwd(batch).metrics["zorro_active"] == 1.0
    shared = engine(zorro_train={"min_saving": 0.9})
    assert shared.fwd_bwd(grouped_batch()).metrics["zorro_active"] == 0.0


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("limits", [{"max_token_len": 30}, {"max_rows": 3}, {"max_rows": 1}])
def test_micro_batches_change_nothing_but_their_number(limits: dict, is_shared: bool) -> None:
    batch, processing = grouped_batch(), Processing(zorro=is_shared, kl_coef=0.0)
    whole, cut = engine(), engine(zorro_train=limits)
    one, many = whole.fwd_bwd(batch, processing), cut.fwd_bwd(batch, processing)
    assert many.metrics["num_micro_batches"] > one.metrics["num_micro_batches"] == 1
    assert many.metrics["loss"] == pytest.approx(one.metrics["loss"], abs=1e-6)
    for ours, theirs in zip(many.logprobs, one.logprobs, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
    assert_same_grads(grads(cut), grads(whole), 1e-4)


def test_rollouts_of_a_prompt_in_a_pass_are_limited_by_themselves() -> None:
    batch = grouped_batch(num_groups=2, group_size=4)
    whole, cut = engine(), engine(zorro_train={"max_rollouts": 2})
    one, many = whole.fwd_bwd(batch), cut.fwd_bwd(batch)
    assert many.metrics["num_micro_batches"] >= 2 > one.metrics["num_micro_batches"]
    assert_same_grads(grads(cut), grads(whole), 1e-4)


@pytest.mark.parametrize("enable", [True, False])
@pytest.mark.parametrize(
    "budget", [{"log_prob_max_rows": 2}, {"log_prob_max_token_len": 30}, {"log_prob_max_rows": 99, "max_rows": 2}]
)
def test_passes_without_gradients_have_budgets_of_their_own(budget: dict, enable: bool) -> None:
    batch = grouped_batch(num_groups=2, group_size=4)
    whole, cut = engine(zorro_train={"enable": enable}), engine(zorro_train={"enable": enable, **budget})
    trained, scored, lost = cut.fwd_bwd(batch), cut.log_probs(batch), cut.fwd_no_grad(batch)
    counts = [result.metrics["num_micro_batches"] > 1 for result in (trained, scored, lost)]
    assert counts == ([True, False, False] if "max_rows" in budget else [False, True, True])
    for ours, theirs in zip(scored.logprobs, whole.log_probs(batch).logprobs, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"granularity": "prompt"},
        {"min_shared": 4},
        {"attn_implementation": "eager"},
        {"use_split_attention": False},
        {"logits_optimization": "compute"},
        {"logits_optimization": "memory"},
    ],
)
def test_way_of_sharing_changes_neither_loss_nor_gradient(options: dict) -> None:
    batch, processing = grouped_batch(), Processing(temperature=0.8, calculate_entropy=True)
    default, other = engine(), engine(zorro_train=options)
    expected, result = default.fwd_bwd(batch, processing), other.fwd_bwd(batch, processing)
    assert result.metrics["zorro_active"] == 1.0
    assert result.metrics["loss"] == pytest.approx(expected.metrics["loss"], abs=1e-5)
    assert result.metrics["entropy"] == pytest.approx(expected.metrics["entropy"], rel=1e-5)
    assert_same_grads(grads(other), grads(default), 1e-4)


def test_prompt_granularity_and_min_shared_are_seen_in_the_tokens() -> None:
    batch = grouped_batch()
    trie, prompt, coarse = (
        engine(zorro_train=options).fwd_bwd(batch).metrics["tokens_computed"]
        for options in ({}, {"granularity": "prompt"}, {"min_shared": 8})
    )
    assert trie < prompt
    assert trie < coarse


@pytest.mark.parametrize("is_shared", [True, False])
def test_entropy_bonus_is_part_of_the_loss(is_shared: bool) -> None:
    batch, processing = grouped_batch(), Processing(loss="dapo", entropy_coef=0.1, zorro=is_shared)
    result = engine().fwd_bwd(batch, processing)
    expected = result.metrics["pg_loss"] - 0.1 * result.metrics["entropy"]
    assert result.metrics["loss"] == pytest.approx(expected, abs=1e-6)
    assert [len(row) for row in result.entropy] == batch.response_lens


def test_gradient_checkpointing_changes_nothing() -> None:
    batch = grouped_batch()
    plain, saving = engine(), engine(gradient_checkpointing=True)
    plain.fwd_bwd(batch)
    saving.fwd_bwd(batch)
    assert all(layer.gradient_checkpointing for layer in saving.model.model.layers)
    assert_same_grads(grads(saving), grads(plain), 1e-6)


def test_old_log_probs_of_the_same_weights_give_a_ratio_of_exactly_one() -> None:
    trainer, batch = engine(), grouped_batch()
    old = trainer.log_probs(batch)
    result = trainer.fwd_bwd(batch.model_copy(update={"old_logprobs": old.logprobs}))
    assert result.logprobs == old.logprobs
    assert (result.metrics["ppo_kl"], result.metrics["clip_fraction"]) == (0.0, 0.0)


def test_row_twice_counts_for_each_of_its_advantages() -> None:
    rows = {"prompts": [[5, 6, 7]] * 2, "responses": [[8, 9]] * 2}
    counts = Processing(loss="dapo", num_loss_tokens=4)
    cancel, double, once = engine(), engine(), engine()
    cancel.fwd_bwd(RolloutBatch(**rows, advantages=[1.0, -1.0]), counts)
    double.fwd_bwd(RolloutBatch(**rows, advantages=[1.0, 1.0]), counts)
    once.fwd_bwd(RolloutBatch(prompts=[[5, 6, 7]], responses=[[8, 9]], advantages=[1.0]), counts)
    assert grads(cancel).abs().max() < 1e-7
    assert_same_grads(grads(double), 2 * grads(once))


def test_sharing_follows_tokens_and_advantages_follow_rows() -> None:
    """Four prompts that differ in their third token: two tokens are shared, every advantage stays with its row."""
    batch = RolloutBatch(
        prompts=[[5, 6, 10 + row, 7] for row in range(4)],
        responses=[[8, 9]] * 4,
        advantages=[1.0, -1.0, 0.5, -0.5],
    )
    shared, plain = engine(zorro_train={"min_saving": 0.0}), engine(zorro_train={"enable": False})
    on = shared.fwd_bwd(batch)
    plain.fwd_bwd(batch)
    assert on.metrics["tokens_naive"] - on.metrics["tokens_computed"] == 3 * 2
    assert_same_grads(grads(shared), grads(plain), 1e-4)


def test_real_token_with_the_id_of_padding_is_a_token() -> None:
    rows = [([5, 6], [7]), ([0, 0, 5, 6], [7])]
    batch = RolloutBatch(prompts=[p for p, _ in rows], responses=[r for _, r in rows], advantages=[1.0, 1.0])
    scored = engine(zorro_train={"min_saving": 0.0}).log_probs(batch)
    for row, (prompt, response) in enumerate(rows):
        alone = engine().log_probs(RolloutBatch(prompts=[prompt], responses=[response]))
        assert scored.logprobs[row] == pytest.approx(alone.logprobs[0], abs=1e-6)
    assert scored.logprobs[0] != pytest.approx(scored.logprobs[1], abs=1e-4)


def test_masked_response_tokens_are_scored_and_carry_no_loss() -> None:
    """An answer whose first half was given, not sampled: the same gradient as with those tokens in the prompt."""
    prefilled, moved = engine(), engine()
    given = RolloutBatch(prompts=[[5, 6]], responses=[[7, 8, 9, 10]], response_mask=[[0, 0, 1, 1]], advantages=[1.0])
    result = prefilled.fwd_bwd(given)
    moved.fwd_bwd(RolloutBatch(prompts=[[5, 6, 7, 8]], responses=[[9, 10]], advantages=[1.0]))
    assert len(result.logprobs[0]) == 4
    assert result.metrics["num_loss_tokens"] == 2
    assert_same_grads(grads(prefilled), grads(moved))


def test_shared_answer_token_is_weighed_by_each_rows_mask() -> None:
    rows = {"prompts": [[5], [5]], "responses": [[7, 8], [7, 9]], "advantages": [1.0, 1.0]}
    counts = Processing(loss="sft", num_loss_tokens=4)
    both, one = engine(), engine()
    both.fwd_bwd(RolloutBatch(**rows), counts)
    one.fwd_bwd(RolloutBatch(**rows, response_mask=[[1, 1], [0, 1]]), counts)
    first = engine()
    first.fwd_bwd(RolloutBatch(prompts=[[5]], responses=[[7]], advantages=[1.0]), counts)
    assert_same_grads(grads(both) - grads(one), grads(first))


@pytest.mark.parametrize("is_shared", [True, False])
def test_batch_that_is_all_masked_gives_loss_zero_and_a_counted_step(is_shared: bool) -> None:
    trainer = engine(optimizer={"lr": 1e-2, "weight_decay": 0.0})
    batch = grouped_batch().model_copy()
    mask = [[0] * length for length in batch.response_lens]
    before = weights(trainer)
    result = trainer.fwd_bwd(batch.model_copy(update={"response_mask": mask}), Processing(zorro=is_shared))
    assert result.metrics["loss"] == 0.0
    assert trainer.step().metrics["grad_norm"] == 0.0
    assert trainer.num_steps == 1
    assert all(torch.equal(before[name], value) for name, value in weights(trainer).items())


@pytest.mark.parametrize("is_shared", [True, False])
def test_batch_of_empty_responses_is_a_batch(is_shared: bool) -> None:
    trainer = engine()
    batch = RolloutBatch(prompts=[[5, 6], [5, 7]], responses=[[], []], advantages=[1.0, -1.0])
    assert trainer.fwd_bwd(batch, Processing(zorro=is_shared)).logprobs == [[], []]
    assert trainer.log_probs(batch, Processing(zorro=is_shared, calculate_entropy=True)).entropy == [[], []]
    assert trainer.step().metrics["step"] == 1.0


def test_batch_without_rows_is_a_batch() -> None:
    trainer = engine()
    assert trainer.fwd_bwd(RolloutBatch(prompts=[], responses=[], advantages=[])).metrics["loss"] == 0.0


# --- accumulation and step


SPLITS = [[[0, 1, 2, 3, 4, 5, 6, 7]], [[0, 1, 2, 3], [4, 5, 6, 7]], [[7, 0], [3, 1, 2], [5], [4, 6]]]


@pytest.mark.parametrize("is_given", [True, False])
@pytest.mark.parametrize("split", SPLITS[1:])
@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo", "sft"])
def test_calls_in_any_split_give_the_gradient_of_one(loss: str, split: list[list[int]], is_given: bool) -> None:
    batch = grouped_batch()
    counts = {"num_loss_tokens": batch.num_loss_tokens, "num_loss_rows": batch.num_loss_rows} if is_given else {}
    processing = Processing(loss=loss, **counts)
    one, many = engine(), engine()
    one.fwd_bwd(batch, processing)
    for rows in split:
        many.fwd_bwd(part_of(batch, rows), processing)
    assert_same_grads(grads(many), grads(one))
    one.step()
    many.step()
    for name, value in weights(one).items():
        torch.testing.assert_close(weights(many)[name], value, rtol=1e-3, atol=2e-3)


def test_short_call_does_not_weigh_more_than_its_tokens() -> None:
    """Calls of 1 and of 9 tokens equal one of 10."""
    short = RolloutBatch(prompts=[[5, 6]], responses=[[7]], advantages=[1.0])
    long = RolloutBatch(prompts=[[5, 6]], responses=[[8, 9, 10, 11, 12, 13, 14, 15, 16]], advantages=[-1.0])
    both = RolloutBatch(prompts=[[5, 6]] * 2, responses=short.responses + long.responses, advantages=[1.0, -1.0])
    one, many = engine(), engine()
    one.fwd_bwd(both, Processing(loss="dapo"))
    for part in (short, long):
        many.fwd_bwd(part, Processing(loss="dapo"))
    assert_same_grads(grads(many), grads(one))


def test_loss_of_a_call_is_its_own_mean_unless_counts_are_given() -> None:
    batch = grouped_batch()
    first, second = part_of(batch, [0, 1, 2, 3]), part_of(batch, [4, 5, 6, 7])
    alone, trainer = engine(), engine()
    trainer.fwd_bwd(first)
    assert trainer.fwd_bwd(second).metrics["loss"] == pytest.approx(alone.fwd_bwd(second).metrics["loss"], abs=1e-6)


def test_calls_that_count_differently_are_refused_and_change_nothing() -> None:
    trainer, batch = engine(), grouped_batch()
    trainer.fwd_bwd(batch, Processing(loss="grpo"))
    before = everything(trainer)
    for processing in (Processing(loss="dapo"), Processing(loss="grpo", num_loss_rows=8)):
        with pytest.raises(InputError, match="give num_loss_tokens and num_loss_rows"):
            trainer.fwd_bwd(batch, processing)
    assert_untouched(trainer, before)


def test_step_clips_to_the_norm() -> None:
    batch = grouped_batch()
    clipped, free = engine(optimizer={"max_grad_norm": 1e-3}), engine(optimizer={"max_grad_norm": None})
    for trainer in (clipped, free):
        trainer.fwd_bwd(batch)
    norm = free.gradients.norm()
    applied: list[float] = []
    clipped.optimizer.adamw.step = lambda: applied.append(clipped.gradients.norm())  # type: ignore[method-assign]
    assert clipped.step().metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert applied == [pytest.approx(1e-3, rel=1e-4)]


def test_step_equals_plain_adamw() -> None:
    settings = {"lr": 1e-2, "betas": (0.8, 0.9), "weight_decay": 0.1, "max_grad_norm": 0.5}
    trainer, batch = engine(optimizer=settings), grouped_batch()
    twin = tiny_model()
    plain = torch.optim.AdamW(twin.parameters(), lr=1e-2, betas=(0.8, 0.9), weight_decay=0.1)
    for _ in range(3):
        trainer.fwd_bwd(batch)
        for ours, theirs in zip(trainer.model.parameters(), twin.parameters(), strict=True):
            theirs.grad = ours.grad.clone()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        plain.step()
        trainer.step()
    for ours, theirs in zip(trainer.model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_step_without_gradients_is_refused() -> None:
    trainer = engine()
    with pytest.raises(InputError, match="call fwd_bwd"):
        trainer.step()
    trainer.fwd_bwd(grouped_batch())
    trainer.step()
    with pytest.raises(InputError, match="call fwd_bwd"):
        trainer.step()


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]),
        ("cosine", [0.5, 1.0, 1.0, 0.853553, 0.5, 0.146447, 0.0]),
    ],
)
def test_schedule_warms_up_and_decays(schedule: str, expected: list[float]) -> None:
    total = None if schedule == "constant" else 6
    settings = OptimizerConfig(lr=1.0, schedule=schedule, warmup_steps=2, total_steps=total)
    assert [learning_rate(settings, step) for step in range(7)] == pytest.approx(expected, abs=1e-6)


def test_warm_up_may_be_a_part_of_all_steps() -> None:
    for schedule in ("constant", "linear", "cosine"):
        part = OptimizerConfig(lr=1.0, schedule=schedule, warmup_ratio=0.3, total_steps=10)
        assert part.num_warmup_steps == 3
        rates = [learning_rate(part, step) for step in range(12)]
        assert rates[:4] == pytest.approx([1 / 3, 2 / 3, 1.0, 1.0])
        assert rates[10:] == ([1.0, 1.0] if schedule == "constant" else pytest.approx([0.0, 0.0], abs=1e-12))
    assert OptimizerConfig(warmup_ratio=0.05, total_steps=30).num_warmup_steps == 2, "rounded up"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"warmup_ratio": 0.1}, "set total_steps"),
        ({"warmup_ratio": 0.1, "warmup_steps": 2, "total_steps": 9}, "give one of them"),
        ({"warmup_ratio": 0.99, "total_steps": 9, "schedule": "linear"}, "must be below total_steps=9"),
        ({"warmup_ratio": 1.0, "total_steps": 9}, "less than 1"),
    ],
)
def test_warm_up_that_says_too_little_or_too_much_is_refused(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OptimizerConfig(**settings)


def test_bf16_learns_from_updates_too_small_for_bf16() -> None:
    """At this rate a bf16 weight would round back to itself in every step."""
    trainer = engine(dtype="bfloat16", optimizer={"lr": 1e-5})
    before = weights(trainer)
    for _ in range(40):
        trainer.fwd_bwd(grouped_batch())
        trainer.step()
    assert trainer.model.dtype == torch.bfloat16
    moved = [(value != before[name]).float().mean().item() for name, value in weights(trainer).items()]
    assert max(moved) > 0.02
    masters = zip(trainer.optimizer.targets, trainer.model.parameters(), strict=True)
    assert all(torch.equal(master.bfloat16(), param) for master, param in masters)


# --- nothing half applied


def break_backward(trainer: TorchTrainEngine, after: int) -> None:
    """Let the backward pass of micro-batch number `after` raise, once gradients of some layers are there."""
    calls = itertools.count()

    def raise_late(grad: torch.Tensor) -> torch.Tensor:
        if next(calls) == after:
            raise RuntimeError("out of memory, say")
        return grad

    trainer.model.model.layers[0].self_attn.q_proj.weight.register_hook(raise_late)


@pytest.mark.parametrize("has_earlier_call", [True, False])
def test_call_that_breaks_in_backward_leaves_everything(has_earlier_call: bool) -> None:
    trainer, batch = engine(zorro_train={"max_rollouts": 2}), grouped_batch()
    trainer.fwd_bwd(batch)
    trainer.step()
    if has_earlier_call:
        trainer.fwd_bwd(batch)
    before = everything(trainer)
    break_backward(trainer, after=2)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.fwd_bwd(batch)
    assert_untouched(trainer, before)
    trainer.fwd_bwd(batch)
    trainer.step()


def test_call_that_breaks_unshared_leaves_the_shared_path_in_order() -> None:
    trainer, batch = engine(), grouped_batch()
    expected = trainer.log_probs(batch).logprobs
    break_backward(trainer, after=0)
    with pytest.raises(RuntimeError) as caught:
        trainer.fwd_bwd(batch, Processing(zorro=False))
    assert caught.traceback
    assert trainer.model.config._attn_implementation == "arctic_forest"
    assert trainer.log_probs(batch).logprobs == expected


def test_nan_in_the_weights_is_an_error_that_changes_nothing() -> None:
    trainer, batch = engine(), grouped_batch()
    trainer.fwd_bwd(batch)
    with torch.no_grad():
        trainer.model.model.norm.weight[0] = torch.nan
    with pytest.raises(NonFiniteError, match="the loss of rows 0 to 7 is nan"):
        trainer.fwd_bwd(batch)
    assert torch.isfinite(grads(trainer)).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_step_with_a_gradient_that_is_not_finite_changes_nothing_but_clears_it(value: float) -> None:
    trainer, batch = engine(), grouped_batch()
    trainer.fwd_bwd(batch)
    trainer.step()
    before = everything(trainer)
    trainer.fwd_bwd(batch)
    next(trainer.model.parameters()).grad[0, 0] = value
    with pytest.raises(NonFiniteError, match="the step was dropped"):
        trainer.step()
    assert_untouched(trainer, before)
    trainer.fwd_bwd(batch)
    trainer.step()


@pytest.mark.parametrize(
    ("fields", "processing", "message"),
    [
        ({"responses": [[256]]}, {}, "row 0 has token id 256; the model's vocabulary ends at 255"),
        ({"prompts": [[5] * 4096]}, {}, "row 0 has 4096 prompt and 1 response tokens, the model takes 4096"),
        ({"advantages": None}, {}, "needs advantages"),
        ({}, {"kl_coef": 0.1}, "needs ref_logprobs"),
        ({}, {"loss": "grop"}, "choose one of grpo"),
        ({}, {"loss": "sft", "clip_high": 0.2}, "no effect"),
    ],
)
def test_batch_that_cannot_be_trained_on_changes_nothing(fields: dict, processing: dict, message: str) -> None:
    trainer = engine()
    before = everything(trainer)
    rows = {"prompts": [[5]], "responses": [[6]], "advantages": [1.0], **fields}
    with pytest.raises((InputError, ConfigError), match=message):
        trainer.fwd_bwd(RolloutBatch(**rows), Processing(**processing))
    assert_untouched(trainer, before)


def test_fwd_no_grad_and_a_discarded_call_leave_everything_and_agree() -> None:
    trainer, batch = engine(), grouped_batch()
    trainer.fwd_bwd(part_of(batch, [0, 1]))
    before = everything(trainer)
    dry, discarded = trainer.fwd_no_grad(batch), trainer.fwd_bwd_discarding(batch)
    assert dry.metrics["loss"] == pytest.approx(discarded.metrics["loss"], abs=1e-7)
    assert dry.metrics["loss"] == pytest.approx(engine().fwd_bwd(batch).metrics["loss"], abs=1e-6)
    assert_untouched(trainer, before)


# --- reference and receipt


def test_reference_stays_where_the_policy_began() -> None:
    trainer, batch = engine(reference=True), grouped_batch()
    first = trainer.log_probs(batch, reference=True)
    assert first.logprobs == trainer.log_probs(batch).logprobs
    trainer.fwd_bwd(batch)
    trainer.step()
    assert trainer.log_probs(batch, reference=True).logprobs == first.logprobs
    assert trainer.log_probs(batch).logprobs != first.logprobs
    held = batch.model_copy(update={"ref_logprobs": first.logprobs})
    result = trainer.fwd_bwd(held, Processing(kl_coef=0.1))
    assert result.metrics["kl_loss"] > 0.0
    assert result.metrics["loss"] == pytest.approx(result.metrics["pg_loss"] + 0.1 * result.metrics["kl_loss"])


def test_reference_that_was_not_configured_is_refused() -> None:
    with pytest.raises(ConfigError, match="reference: true"):
        engine().log_probs(grouped_batch(), reference=True)


def test_receipt_is_taken_on_the_first_step_and_every_so_many() -> None:
    trainer, batch = engine(zorro_train={"receipt_every": 2}), grouped_batch()
    taken = []
    for _ in range(5):
        first, second = trainer.fwd_bwd(batch).metrics, trainer.fwd_bwd(batch).metrics
        taken.append(("receipt/logprob_max_abs" in first, "receipt/logprob_max_abs" in second))
        trainer.step()
    assert taken == [(True, False), (False, False), (True, False), (False, False), (True, False)]


def test_receipt_does_not_touch_the_gradients() -> None:
    batch = grouped_batch()
    checked, plain = engine(zorro_train={"receipt_every": 1}), engine()
    assert checked.fwd_bwd(batch).metrics["receipt/gradient_rel"] < 1e-5
    plain.fwd_bwd(batch)
    assert torch.equal(grads(checked), grads(plain))


def test_receipt_beyond_its_tolerance_stops_the_run_before_anything_changes() -> None:
    trainer = engine(zorro_train={"receipt_every": 1, "receipt_tolerance": 1e-12})
    before = everything(trainer)
    with pytest.raises(ExactnessError, match=r"zorro_train\.enable: false"):
        trainer.fwd_bwd(grouped_batch())
    assert_untouched(trainer, before)


# --- models


@pytest.mark.parametrize("name", ["models/no-such-model", "./nothing", "/no/such/folder", "~/no-such-folder", "a/b/c"])
def test_missing_folder_names_the_command_that_fetches(name: str) -> None:
    with pytest.raises(ConfigError, match="arctic-rl fetch"):
        load_model(name)


def test_folder_or_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"without config\.json"):
        load_model(str(tmp_path))
    file = tmp_path / "model.safetensors"
    file.write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        load_model(str(file))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_model(str(tmp_path))


def test_tiny_model_follows_its_seed_and_leaves_the_random_state() -> None:
    state = torch.get_rng_state()
    first, same, other = tiny_model(1), tiny_model(1), tiny_model(2)
    assert torch.equal(torch.get_rng_state(), state)
    ours, theirs, others = (model.lm_head.weight for model in (first, same, other))
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, others)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_absent_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="no CUDA; use device='cpu'"):
        engine(device="cuda")


def test_dropout_is_refused_by_name() -> None:
    model = tiny_model()
    model.config.attention_dropout = 0.1
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    trainer = TorchTrainEngine(config(), model)
    with pytest.raises(InputError, match="dropout"):
        trainer.fwd_bwd(grouped_batch())
    assert trainer.log_probs(grouped_batch()).logprobs == engine().log_probs(grouped_batch()).logprobs
