"""A group larger than the token budget, through the engine."""

import pytest

from arctic_platform.errors import InputError
from arctic_platform.rl.losses import LOSSES
from arctic_platform.rl.protocol import Processing, RolloutBatch
from tests.rl.engines.builders import grouped_batch
from tests.rl.engines.test_torch_train import assert_same_grads, engine, grads

BATCH = grouped_batch(seed=3, num_groups=2, group_size=6, prompt_len=24)
BUDGET = 34


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_budget_changes_neither_loss_nor_gradient(loss: str, is_checkpointed: bool) -> None:
    processing = Processing(loss=loss, calculate_entropy=True)
    whole = engine()
    staged = engine(zorro_train={"max_token_len": BUDGET}, gradient_checkpointing=is_checkpointed)
    expected, got = whole.fwd_bwd(BATCH, processing), staged.fwd_bwd(BATCH, processing)
    assert (expected.metrics["num_staged_groups"], got.metrics["num_staged_groups"]) == (0.0, 1.0)
    assert got.metrics["num_micro_batches"] > 1
    assert got.metrics["tokens_computed"] == expected.metrics["tokens_computed"], "each token once"
    assert got.metrics["loss"] == pytest.approx(expected.metrics["loss"], abs=1e-5)
    for name in ("logprobs", "entropy"):
        for ours, theirs in zip(getattr(got, name), getattr(expected, name), strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5)
    assert_same_grads(grads(staged), grads(whole), 1e-5)


def test_scores_of_stages_are_those_of_one_pass_and_make_the_ratio_one() -> None:
    whole, staged = engine(), engine(zorro_train={"max_token_len": BUDGET})
    scored = staged.log_probs(BATCH)
    assert scored.metrics["num_staged_groups"] == 1.0
    for ours, theirs in zip(scored.logprobs, whole.log_probs(BATCH).logprobs, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
    fields = BATCH.model_dump(exclude_none=True) | {"old_logprobs": scored.logprobs}
    trained = staged.fwd_bwd(RolloutBatch(**fields))
    assert trained.metrics["ppo_kl"] == 0.0


def test_rollout_limit_alone_runs_in_stages_too() -> None:
    whole, limited = engine(), engine(zorro_train={"max_rollouts": 2})
    whole.fwd_bwd(BATCH)
    trained = limited.fwd_bwd(BATCH)
    assert trained.metrics["num_micro_batches"] >= 6
    assert trained.metrics["num_staged_groups"] == 1.0
    assert_same_grads(grads(limited), grads(whole), 1e-5)


def test_attention_that_cannot_stage_computes_the_prefix_again() -> None:
    whole = engine()
    again = engine(zorro_train={"max_token_len": BUDGET, "use_split_attention": False})
    expected, got = whole.fwd_bwd(BATCH), again.fwd_bwd(BATCH)
    assert got.metrics["num_staged_groups"] == 0.0
    assert got.metrics["tokens_computed"] > expected.metrics["tokens_computed"]
    assert_same_grads(grads(again), grads(whole), 1e-5)


def test_correction_of_the_sampler_reaches_the_loss_in_stages_too() -> None:
    sampled = [[value + 0.3 * (-1) ** at for at, value in enumerate(row)] for row in engine().log_probs(BATCH).logprobs]
    fields = BATCH.model_dump(exclude_none=True) | {"rollout_logprobs": sampled}
    processing = Processing(rollout_is="token", rollout_is_threshold=1.2, rollout_rs="geometric")
    whole, staged, plain = engine(), engine(zorro_train={"max_token_len": BUDGET}), engine()
    expected = whole.fwd_bwd(RolloutBatch(**fields), processing)
    got = staged.fwd_bwd(RolloutBatch(**fields), processing)
    plain.fwd_bwd(RolloutBatch(**fields))
    assert 0 < got.metrics["rollout_is_truncated"] < 1
    for name in ("loss", "rollout_is_mean", "rollout_is_truncated", "rollout_rs_rejected"):
        assert got.metrics[name] == pytest.approx(expected.metrics[name], abs=1e-5), name
    assert_same_grads(grads(staged), grads(whole), 1e-5)
    with pytest.raises(AssertionError):
        assert_same_grads(grads(plain), grads(whole), 1e-2)


@pytest.mark.parametrize("budget", [None, BUDGET])
def test_content_keys_keep_equal_placeholders_of_two_images_apart(budget: int | None) -> None:
    """Equal ids and keys share; equal ids under other keys do not, from the first differing key on."""
    keys = [
        [0] * 10 + [row % 2] * 4 + [0] * (len(BATCH.prompts[row]) + len(BATCH.responses[row]) - 14)
        for row in range(BATCH.num_rows)
    ]
    plain, keyed = engine(), engine(zorro_train={"max_token_len": budget})
    expected = plain.fwd_bwd(BATCH)
    got = keyed.fwd_bwd(RolloutBatch(**BATCH.model_dump(exclude_none=True), content_keys=keys))
    more = got.metrics["tokens_computed"] - expected.metrics["tokens_computed"]
    assert more >= 2 * (24 - 12), "each group's prompt is stored once per image behind the common start"
    assert got.metrics["loss"] == pytest.approx(expected.metrics["loss"], abs=1e-5)
    assert_same_grads(grads(keyed), grads(plain), 1e-5)


@pytest.mark.parametrize(
    ("keys", "message"), [([[0]], "content_keys has 1 rows"), ([[0]] * 12, "give one per token of both")]
)
def test_content_keys_of_another_shape_are_refused(keys: list, message: str) -> None:
    with pytest.raises(InputError, match=message):
        RolloutBatch(**BATCH.model_dump(exclude_none=True), content_keys=keys)
