"""Each loss against its formula, written a second time on padded [B, R] tensors as the papers state it."""

import pytest
import torch
from torch import Tensor

from arctic_platform.errors import ConfigError, InputError
from arctic_platform.rl.losses import (
    LOSSES,
    LossResult,
    LossSettings,
    TokenBatch,
    check_terms,
    compute_loss,
    counted_by,
    k3_divergence,
    summarise,
)

LENS = [3, 1, 0, 5, 2]
CLIPPED = {"grpo", "dr_grpo", "dapo", "gspo", "cispo", "ppo"}


def padded_rows(seed: int = 0) -> dict[str, Tensor]:
    """Random values [B, R] of five rows of different lengths; `mask` has live and dead tokens, and a dead row."""
    generator = torch.Generator().manual_seed(seed)
    valid = torch.arange(max(LENS))[None] < torch.tensor(LENS)[:, None]
    draw = {
        name: torch.randn(len(LENS), max(LENS), generator=generator, dtype=torch.float64)
        for name in ("logprobs", "old_logprobs", "ref_logprobs", "rollout_logprobs", "advantages", "entropy")
    }
    draw["old_logprobs"] = draw["logprobs"] + 0.4 * draw["old_logprobs"]
    mask = (torch.rand(len(LENS), max(LENS), generator=generator) < 0.7) & valid
    mask[0, 0] = True
    mask[4] = False
    return {**draw, "valid": valid, "mask": mask}


def packed(rows: dict[str, Tensor], **changes: Tensor | None) -> TokenBatch:
    valid = rows["valid"]
    fields = {
        name: rows[name][valid]
        for name in ("advantages", "mask", "old_logprobs", "ref_logprobs", "rollout_logprobs", "entropy")
    }
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), valid.sum(1).cumsum(0)])
    fields.update(logprobs=rows["logprobs"][valid].clone().requires_grad_(), row_offsets=offsets)
    return TokenBatch(**{**fields, **changes})


def settings_of(rows: dict[str, Tensor], **changes: object) -> LossSettings:
    mask = rows["mask"]
    counts = {"num_loss_tokens": int(mask.sum()), "num_loss_rows": int(mask.any(1).sum())}
    return LossSettings(**{**counts, **changes})


def plain_loss(
    name: str, rows: dict[str, Tensor], logprobs: Tensor, clip: tuple[float, float], kl_coef: float, entropy_coef: float
) -> Tensor:
    """The padded twin."""
    mask, advantages = rows["mask"].double(), rows["advantages"]
    counts = mask.sum(1).clamp(min=1)
    ratio = (logprobs - rows["old_logprobs"]).exp()
    low, high = 1 - clip[0], 1 + clip[1]
    if name == "gspo":
        mean = ((logprobs - rows["old_logprobs"]) * mask).sum(1) / counts
        ratio = mean.exp()[:, None].expand_as(logprobs)
        advantages = ((advantages * mask).sum(1) / counts)[:, None].expand_as(logprobs)
    if name in ("grpo", "dr_grpo", "dapo", "ppo", "gspo"):
        values = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    elif name == "cispo":
        values = -ratio.clamp(low, high).detach() * advantages * logprobs
    elif name == "importance_sampling":
        values = -ratio * advantages
    else:
        values = -advantages * logprobs
    log_ratio_ref = rows["ref_logprobs"] - logprobs
    values = values + kl_coef * (log_ratio_ref.exp() - log_ratio_ref - 1) - entropy_coef * rows["entropy"]
    num_rows = (mask.sum(1) > 0).sum()
    if name in ("grpo", "gspo"):
        return ((values * mask).sum(1) / counts).sum() / num_rows
    if name == "dr_grpo":
        return (values * mask).sum() / num_rows
    return (values * mask).sum() / mask.sum()


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("coefs", [(0.0, 0.0), (0.1, 0.01)])
@pytest.mark.parametrize("name", sorted(LOSSES))
def test_loss_and_gradient_equal_the_padded_formula(name: str, coefs: tuple[float, float], seed: int) -> None:
    rows = padded_rows(seed)
    if name == "gspo":
        rows["advantages"] = rows["advantages"][:, :1].expand_as(rows["advantages"])
    clip = (0.2, 0.3)
    chosen = {"clip_low": clip[0], "clip_high": clip[1]} if name in CLIPPED else {}
    batch = packed(rows)
    result = compute_loss(name, batch, settings_of(rows, kl_coef=coefs[0], entropy_coef=coefs[1], **chosen))
    result.loss.backward()
    logprobs = rows["logprobs"].clone().requires_grad_()
    expected = plain_loss(name, rows, logprobs, clip, *coefs)
    expected.backward()
    torch.testing.assert_close(result.loss, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(batch.logprobs.grad, logprobs.grad[rows["valid"]], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_parts_add_up_to_the_whole(name: str) -> None:
    rows = padded_rows()
    settings = settings_of(rows, kl_coef=0.1)
    whole = packed(rows)
    results = [compute_loss(name, whole, settings)]
    results[0].loss.backward()
    grads, parts = [], []
    for some in ([0, 1], [2], [3, 4]):
        part = packed({key: value[some] for key, value in rows.items()})
        parts.append(compute_loss(name, part, settings))
        if parts[-1].loss.requires_grad:
            parts[-1].loss.backward()
        grads.append(part.logprobs.grad if part.logprobs.grad is not None else torch.zeros(0))
    torch.testing.assert_close(torch.cat(grads), whole.logprobs.grad, rtol=1e-12, atol=1e-12)
    joined, alone = summarise(parts), summarise(results)
    assert joined.keys() == alone.keys()
    for key, value in alone.items():
        assert joined[key] == pytest.approx(value, rel=1e-12, abs=1e-12), key


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_batch_that_is_all_masked_has_loss_zero_and_zero_gradients(name: str) -> None:
    rows = padded_rows()
    rows["mask"] = torch.zeros_like(rows["mask"])
    rows["entropy"][rows["valid"]] = torch.nan
    batch = packed(rows)
    settings = LossSettings(num_loss_tokens=1, num_loss_rows=1, kl_coef=0.1, entropy_coef=0.1)
    result = compute_loss(name, batch, settings)
    result.loss.backward()
    assert result.loss.item() == 0.0
    assert torch.equal(batch.logprobs.grad, torch.zeros_like(batch.logprobs))


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_batch_without_tokens_has_loss_zero(name: str) -> None:
    nothing = torch.zeros(0)
    offsets = torch.zeros(3, dtype=torch.long)
    batch = TokenBatch(
        nothing, nothing, nothing.bool(), offsets, rollout_logprobs=nothing, ref_logprobs=nothing, entropy=nothing
    )
    result = compute_loss(name, batch, LossSettings(num_loss_tokens=1, num_loss_rows=1))
    assert result.loss.item() == 0.0
    assert summarise([result])["sampler_diff_max"] == 0.0


@pytest.mark.parametrize("name", sorted(CLIPPED | {"importance_sampling"}))
def test_without_old_logprobs_the_ratio_is_exactly_one(name: str) -> None:
    rows = padded_rows()
    result = compute_loss(name, packed(rows, old_logprobs=None), settings_of(rows))
    metrics = summarise([result])
    assert metrics["clip_fraction"] == 0.0
    assert metrics["ppo_kl"] == 0.0


@pytest.mark.parametrize(
    ("ratio", "advantage", "is_clipped"), [(1.5, 1.0, 1), (1.5, -1.0, 0), (0.5, -1.0, 1), (0.5, 1.0, 0)]
)
def test_only_a_ratio_that_went_too_far_in_the_good_direction_loses_its_gradient(
    ratio: float, advantage: float, is_clipped: int
) -> None:
    logprobs = torch.tensor([ratio], dtype=torch.float64).log().requires_grad_()
    batch = TokenBatch(
        logprobs,
        torch.tensor([advantage], dtype=torch.float64),
        torch.tensor([True]),
        torch.tensor([0, 1]),
        old_logprobs=torch.zeros(1, dtype=torch.float64),
    )
    result = compute_loss("ppo", batch, LossSettings(num_loss_tokens=1, num_loss_rows=1))
    result.loss.backward()
    assert summarise([result])["clip_fraction"] == is_clipped
    assert (logprobs.grad.item() == 0.0) is bool(is_clipped)


def test_long_rows_do_not_weigh_more_in_grpo_and_do_in_dapo() -> None:
    """One row of 1 token, one of 9: means of rows against the mean of tokens."""
    values = torch.tensor([1.0] + [3.0] * 9)
    batch = TokenBatch(torch.zeros(10), -values, torch.ones(10, dtype=torch.bool), torch.tensor([0, 1, 10]))
    settings = LossSettings(num_loss_tokens=10, num_loss_rows=2)
    assert compute_loss("grpo", batch, settings).loss.item() == pytest.approx(2.0)
    assert compute_loss("dapo", batch, settings).loss.item() == pytest.approx(2.8)


def test_dr_grpo_divides_by_rows_and_a_constant() -> None:
    batch = TokenBatch(torch.zeros(4), -torch.ones(4), torch.ones(4, dtype=torch.bool), torch.tensor([0, 1, 4]))
    settings = LossSettings(num_loss_tokens=4, num_loss_rows=2, max_response_len=8)
    assert compute_loss("dr_grpo", batch, settings).loss.item() == pytest.approx(4 / 2 / 8)


def test_sft_weighs_every_token_alike_without_advantages() -> None:
    logprobs = torch.tensor([-1.0, -3.0], requires_grad=True)
    batch = TokenBatch(logprobs, None, torch.tensor([True, True]), torch.tensor([0, 2]))
    assert compute_loss("sft", batch, LossSettings(num_loss_tokens=2, num_loss_rows=1)).loss.item() == 2.0


def test_ratio_beyond_any_float_stays_finite() -> None:
    logprobs = torch.tensor([0.0, -500.0], requires_grad=True)
    batch = TokenBatch(
        logprobs, torch.ones(2), torch.ones(2).bool(), torch.tensor([0, 2]), old_logprobs=torch.tensor([-500.0, 0.0])
    )
    result = compute_loss("importance_sampling", batch, LossSettings(num_loss_tokens=2, num_loss_rows=1))
    result.loss.backward()
    assert torch.isfinite(result.loss)
    assert torch.isfinite(logprobs.grad).all()


def test_metrics_of_sampler_and_entropy_are_over_live_tokens() -> None:
    rows = padded_rows()
    metrics = summarise([compute_loss("grpo", packed(rows), settings_of(rows))])
    diff = (rows["logprobs"] - rows["rollout_logprobs"]).abs()[rows["mask"]]
    assert metrics["sampler_diff_max"] == pytest.approx(diff.max().item())
    assert metrics["sampler_diff_mean"] == pytest.approx(diff.mean().item())
    assert metrics["entropy"] == pytest.approx(rows["entropy"][rows["mask"]].mean().item())
    assert metrics["num_loss_tokens"] == rows["mask"].sum()


def test_k3_is_zero_on_equal_and_positive_elsewhere() -> None:
    logprobs = torch.randn(50, dtype=torch.float64)
    assert torch.equal(k3_divergence(logprobs, logprobs), torch.zeros(50, dtype=torch.float64))
    assert (k3_divergence(logprobs, torch.randn(50, dtype=torch.float64)) > 0).all()


def test_unknown_loss_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="loss='grop' is not known; choose one of grpo, dr_grpo"):
        counted_by("grop")


@pytest.mark.parametrize(
    ("name", "changes", "given", "message"),
    [
        ("grpo", {}, {"has_advantages": False, "has_ref": False}, "needs advantages"),
        ("grpo", {"kl_coef": 0.1}, {"has_advantages": True, "has_ref": False}, "needs ref_logprobs"),
        ("ppo", {"max_response_len": 8}, {"has_advantages": True, "has_ref": False}, "max_response_len has no effect"),
        ("sft", {"clip_low": 0.1}, {"has_advantages": True, "has_ref": False}, "clip_low and clip_high have no effect"),
    ],
)
def test_missing_or_idle_setting_is_refused(name: str, changes: dict, given: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_terms(name, LossSettings(1, 1, **changes), **given)


def test_no_results_have_no_metrics() -> None:
    results: list[LossResult] = []
    assert summarise(results) == {}
