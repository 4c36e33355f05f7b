"""Weights and rejection against the same rules written out on padded [B, R] tensors."""

import pytest
import torch
from torch import Tensor

from arctic_platform.errors import InputError
from arctic_platform.rl.correction import RolloutCorrection, correct
from arctic_platform.rl.losses import LOSSES, UNCORRECTED, check_terms, compute_loss, summarise
from tests.rl.test_losses import packed, padded_rows, settings_of

RULES = [
    RolloutCorrection(rollout_is="token"),
    RolloutCorrection(rollout_is="token", rollout_is_threshold=1.1),
    RolloutCorrection(rollout_is="sequence", rollout_is_threshold=3.0),
    RolloutCorrection(rollout_rs="token", rollout_rs_threshold=1.5),
    RolloutCorrection(rollout_rs="token", rollout_rs_threshold=1.5, rollout_rs_threshold_lower=0.0),
    RolloutCorrection(rollout_rs="sequence", rollout_rs_threshold=4.0),
    RolloutCorrection(rollout_rs="geometric", rollout_rs_threshold=1.2, rollout_rs_threshold_lower=0.9),
    RolloutCorrection(rollout_is="token", rollout_rs="geometric", rollout_rs_threshold=1.3),
    RolloutCorrection(rollout_is="sequence", rollout_rs="sequence"),
]


def rows_near(seed: int, spread: float = 0.5) -> dict[str, Tensor]:
    """Sampler values around the trainer's old ones."""
    rows = padded_rows(seed)
    rows["rollout_logprobs"] = rows["old_logprobs"] + spread * rows["rollout_logprobs"]
    return rows


def plain_rule(rule: RolloutCorrection, rows: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The padded twin: `(weights, kept)`, one row after the other."""
    weights, kept = torch.ones_like(rows["logprobs"]), torch.ones_like(rows["mask"])
    for b in range(len(weights)):
        live = rows["mask"][b]
        gap = (rows["old_logprobs"] - rows["rollout_logprobs"])[b]
        ratios = {"token": gap.exp(), "sequence": gap[live].sum().exp(), "geometric": gap[live].mean().exp()}
        if rule.rollout_is:
            weights[b] = ratios[rule.rollout_is].clamp(max=rule.rollout_is_threshold or 2.0)
        if rule.rollout_rs and live.any():
            ratio, high = ratios[rule.rollout_rs], rule.rollout_rs_threshold or 2.0
            low = 1 / high if rule.rollout_rs_threshold_lower is None else rule.rollout_rs_threshold_lower
            kept[b] = (ratio >= low) & (ratio <= high)
    return weights, kept


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_weights_and_rejection_equal_the_rule_written_out(rule: RolloutCorrection, seed: int) -> None:
    rows = rows_near(seed)
    batch = packed(rows)
    gap = batch.old_logprobs - batch.rollout_logprobs
    got = correct(rule, gap, batch.mask, batch.row_offsets)
    weights, kept = plain_rule(rule, rows)
    live = batch.mask
    torch.testing.assert_close(got.weights[live], weights[rows["valid"]][live], rtol=1e-12, atol=1e-12)
    assert torch.equal(got.is_kept[live], kept[rows["valid"]][live])


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("name", ["grpo", "dapo", "cispo", "importance_sampling"])
def test_loss_and_gradient_equal_weighed_terms_of_the_kept_tokens(name: str, rule: RolloutCorrection) -> None:
    """Token by token, the corrected gradient is the plain one times the weight, and 0 where a token is rejected."""
    rows = rows_near(3)
    plain, corrected = packed(rows), packed(rows)
    expected = compute_loss(name, plain, settings_of(rows))
    expected.loss.backward()
    result = compute_loss(name, corrected, settings_of(rows, correction=rule))
    result.loss.backward()
    weights, kept = (x[rows["valid"]] for x in plain_rule(rule, rows))
    torch.testing.assert_close(corrected.logprobs.grad, plain.logprobs.grad * weights * kept, rtol=1e-12, atol=1e-12)


def test_rejected_tokens_take_part_in_no_term_and_still_count() -> None:
    rows = rows_near(4)
    rule = RolloutCorrection(rollout_rs="token", rollout_rs_threshold=1.2)
    kept = plain_rule(rule, rows)[1]
    changed = {**rows, "mask": rows["mask"] & kept}
    ours = compute_loss("dapo", packed(rows), settings_of(rows, kl_coef=0.1, entropy_coef=0.1, correction=rule))
    theirs = compute_loss("dapo", packed(changed), settings_of(rows, kl_coef=0.1, entropy_coef=0.1))
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-12, atol=1e-12)


def test_icepop_is_a_token_weight_inside_two_bounds_and_zero_outside() -> None:
    rule = RolloutCorrection(
        rollout_is="token",
        rollout_is_threshold=5.0,
        rollout_rs="token",
        rollout_rs_threshold=5.0,
        rollout_rs_threshold_lower=0.5,
    )
    ratio = torch.tensor([0.4, 0.5, 1.0, 4.9, 5.1], dtype=torch.float64)
    got = correct(rule, ratio.log(), torch.ones(5, dtype=torch.bool), torch.tensor([0, 5]))
    effect = got.weights * got.is_kept
    torch.testing.assert_close(effect, torch.tensor([0.0, 0.5, 1.0, 4.9, 0.0], dtype=torch.float64))


def test_masked_importance_sampling_drops_what_truncation_would_cap() -> None:
    ratio = torch.tensor([0.1, 1.9, 2.1], dtype=torch.float64)
    shared = (ratio.log(), torch.ones(3, dtype=torch.bool), torch.tensor([0, 3]))
    capped = correct(RolloutCorrection(rollout_is="token"), *shared)
    masked = correct(RolloutCorrection("token", None, "token", 2.0, 0.0), *shared)
    torch.testing.assert_close(capped.weights, torch.tensor([0.1, 1.9, 2.0], dtype=torch.float64))
    assert (masked.weights * masked.is_kept).tolist() == pytest.approx([0.1, 1.9, 0.0])


def test_ratio_one_changes_nothing_bit_for_bit() -> None:
    rows = rows_near(5, spread=0.0)
    rule = RolloutCorrection(rollout_is="sequence", rollout_rs="geometric", rollout_rs_threshold=1.001)
    plain, corrected = packed(rows), packed(rows)
    assert torch.equal(
        compute_loss("grpo", corrected, settings_of(rows, correction=rule)).loss,
        compute_loss("grpo", plain, settings_of(rows)).loss,
    )


def test_without_old_logprobs_the_current_ones_are_compared_and_carry_no_gradient_through_the_weight() -> None:
    rows = rows_near(6)
    rows["old_logprobs"] = rows["logprobs"]
    rule = RolloutCorrection(rollout_is="token")
    given, absent = packed(rows), packed(rows, old_logprobs=None)
    for batch in (given, absent):
        compute_loss("importance_sampling", batch, settings_of(rows, correction=rule)).loss.backward()
    torch.testing.assert_close(given.logprobs.grad, absent.logprobs.grad, rtol=1e-12, atol=1e-12)


def test_metrics_say_how_much_was_weighed_and_rejected() -> None:
    rows = rows_near(7)
    rule = RolloutCorrection(rollout_is="token", rollout_is_threshold=1.1, rollout_rs="token", rollout_rs_threshold=1.5)
    metrics = summarise([compute_loss("grpo", packed(rows), settings_of(rows, correction=rule))])
    weights, kept = plain_rule(rule, rows)
    live = rows["mask"]
    ratio = (rows["old_logprobs"] - rows["rollout_logprobs"]).exp()
    assert metrics["rollout_is_mean"] == pytest.approx(weights[live].mean().item())
    assert metrics["rollout_rs_rejected"] == pytest.approx((~kept)[live].double().mean().item())
    assert metrics["rollout_is_truncated"] == pytest.approx(((ratio > 1.1) & kept)[live].double().mean().item())
    assert "rollout_is_mean" not in summarise([compute_loss("grpo", packed(rows), settings_of(rows))])


def test_ratio_beyond_any_float_stays_finite() -> None:
    gap = torch.tensor([500.0, -500.0], requires_grad=False)
    for level in ("token", "sequence"):
        got = correct(
            RolloutCorrection(rollout_is=level, rollout_is_threshold=1e6), gap, gap.bool(), torch.tensor([0, 1, 2])
        )
        assert torch.isfinite(got.weights).all()


@pytest.mark.parametrize(
    ("rule", "has_rollout", "message"),
    [
        (RolloutCorrection(rollout_is="token"), False, "need rollout_logprobs"),
        (RolloutCorrection(rollout_rs="token"), False, "need rollout_logprobs"),
        (RolloutCorrection(rollout_is_threshold=2.0), True, "no effect without rollout_is"),
        (RolloutCorrection(rollout_rs_threshold=2.0), True, "no effect without rollout_rs"),
        (RolloutCorrection(rollout_rs_threshold_lower=0.5), True, "no effect without rollout_rs"),
        (RolloutCorrection("token", None, "token", 1.5, 1.6), True, "which is none"),
    ],
)
def test_idle_or_impossible_setting_is_refused(rule: RolloutCorrection, has_rollout: bool, message: str) -> None:
    rows = padded_rows()
    with pytest.raises(InputError, match=message):
        check_terms(
            "grpo", settings_of(rows, correction=rule), has_advantages=True, has_ref=False, has_rollout=has_rollout
        )


@pytest.mark.parametrize("name", [*sorted(LOSSES), "dpo"])
def test_losses_without_a_policy_ratio_refuse_a_correction(name: str) -> None:
    settings = settings_of(padded_rows(), correction=RolloutCorrection(rollout_is="token"))
    given = {"has_advantages": True, "has_ref": True, "has_rollout": True, "has_pairs": True}
    if name in UNCORRECTED:
        with pytest.raises(InputError, match="have no effect on loss"):
            check_terms(name, settings, **given)
    else:
        check_terms(name, settings, **given)
