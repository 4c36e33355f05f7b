"""DPO on packed tokens against the paper's formula on padded rows, however the pairs are cut."""

import pytest
import torch
from torch import Tensor

from arctic_platform.errors import InputError
from arctic_platform.rl.losses import LossResult, LossSettings, Pairs, TokenBatch, compute_loss, row_scores, summarise
from arctic_platform.rl.protocol import Processing, RolloutBatch
from tests.rl.engines.builders import grouped_batch
from tests.rl.engines.test_torch_train import assert_same_grads, engine, grads
from tests.rl.test_losses import packed, padded_rows

PAIRS = torch.tensor([[0, 3], [3, 1], [2, 0], [4, 1]])


def plain_dpo(rows: dict[str, Tensor], logprobs: Tensor, beta: float) -> Tensor:
    """Rafailov et al. 2023, eq. 7: -log sigmoid(beta log(pi/ref)(y_w) - beta log(pi/ref)(y_l))."""
    gap = ((logprobs - rows["ref_logprobs"]) * rows["mask"]).sum(1)
    terms = [-torch.nn.functional.logsigmoid(beta * gap[w] - beta * gap[loser]) for w, loser in PAIRS.tolist()]
    return torch.stack(terms).mean()


def parts_of(rows: dict[str, Tensor], cut: list[list[int]], beta: float | None) -> tuple[list[LossResult], Tensor]:
    """Results of the parts, and the gradient of every valid token in row order."""
    scores = row_scores(packed(rows)).detach()
    results, by_row = [], {}
    for some in cut:
        chosen = {key: value[some] for key, value in rows.items()}
        batch = packed(chosen, advantages=None, pairs=Pairs(PAIRS, torch.tensor(some), scores))
        results.append(compute_loss("dpo", batch, LossSettings(1, 1, num_loss_pairs=len(PAIRS), dpo_beta=beta)))
        results[-1].loss.backward()
        by_row |= dict(zip(some, batch.logprobs.grad.split(chosen["valid"].sum(1).tolist()), strict=True))
    return results, torch.cat([by_row[b] for b in sorted(by_row)])


@pytest.mark.parametrize("beta", [None, 0.5])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    "cut",
    [[[0, 1, 2, 3, 4]], [[0, 3], [1, 2, 4]], [[4], [3], [2], [1], [0]], [[0, 2, 4], [1, 3]]],
    ids=["one piece", "one pair together", "every row alone", "most pairs apart"],
)
def test_loss_and_gradient_equal_the_paper_however_pairs_are_cut(
    cut: list[list[int]], seed: int, beta: float | None
) -> None:
    rows = padded_rows(seed)
    logprobs = rows["logprobs"].clone().requires_grad_()
    expected = plain_dpo(rows, logprobs, beta or 0.1)
    expected.backward()
    results, gradient = parts_of(rows, cut, beta)
    assert sum(result.loss.item() for result in results) == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(gradient, logprobs.grad[rows["valid"]], rtol=1e-12, atol=1e-12)
    metrics = summarise(results)
    gap = ((rows["logprobs"] - rows["ref_logprobs"]) * rows["mask"]).sum(1)
    margins = (beta or 0.1) * (gap[PAIRS[:, 0]] - gap[PAIRS[:, 1]])
    assert metrics["dpo_accuracy"] == (margins > 0).double().mean()
    assert metrics["dpo_margin"] == pytest.approx(margins.mean().item(), rel=1e-12)
    assert metrics["num_loss_pairs"] == 4


def test_far_apart_pairs_stay_finite() -> None:
    logprobs = torch.tensor([0.0, -1e5], requires_grad=True)
    pairs = Pairs(torch.tensor([[1, 0]]), torch.arange(2), torch.zeros(2))
    batch = TokenBatch(
        logprobs, None, torch.ones(2).bool(), torch.tensor([0, 1, 2]), ref_logprobs=torch.zeros(2), pairs=pairs
    )
    result = compute_loss("dpo", batch, LossSettings(1, 1))
    result.loss.backward()
    assert torch.isfinite(result.loss) and logprobs.grad.tolist() == pytest.approx([0.1, -0.1])


def preferences(**fields: object) -> RolloutBatch:
    batch = grouped_batch(seed=3, num_groups=2, group_size=6, prompt_len=24)
    rows = batch.model_dump(include={"prompts", "responses"})
    return RolloutBatch(**rows, pairs=[[0, 1], [2, 5], [7, 6], [0, 4], [11, 8]], **fields)


@pytest.mark.parametrize("zorro", [{"max_token_len": 34}, {"enable": False}, {"enable": False, "max_token_len": 34}])
def test_engine_gives_the_gradient_of_one_pass_also_where_pairs_are_cut(zorro: dict) -> None:
    reference = engine().log_probs(preferences()).logprobs
    shifted = [[value - 0.1 * at for at, value in enumerate(row)] for row in reference]
    batch, processing = preferences(ref_logprobs=shifted), Processing(loss="dpo", dpo_beta=0.3)
    whole, cut = engine(), engine(zorro_train=zorro)
    expected, got = whole.fwd_bwd(batch, processing), cut.fwd_bwd(batch, processing)
    assert expected.metrics["num_micro_batches"] == 1
    for name in ("loss", "dpo_accuracy", "dpo_margin", "num_loss_pairs"):
        assert got.metrics[name] == pytest.approx(expected.metrics[name], abs=1e-5), name
    assert_same_grads(grads(cut), grads(whole), 1e-4)
    assert cut.fwd_no_grad(batch, processing).metrics["loss"] == pytest.approx(got.metrics["loss"], abs=1e-5)


def test_calls_of_one_step_are_weighed_by_their_pairs() -> None:
    reference = engine().log_probs(preferences()).logprobs
    batch = preferences(ref_logprobs=reference)
    whole, split = engine(), engine()
    whole.fwd_bwd(batch, Processing(loss="dpo"))
    for pairs in (batch.pairs[:1], batch.pairs[1:]):
        split.fwd_bwd(batch.model_copy(update={"pairs": pairs}), Processing(loss="dpo"))
    assert_same_grads(grads(split), grads(whole), 1e-5)


@pytest.mark.parametrize(
    ("fields", "processing", "message"),
    [
        ({"pairs": None}, {}, "needs pairs"),
        ({"ref_logprobs": None}, {}, "needs ref_logprobs"),
        ({}, {"kl_coef": 0.1}, "no effect on loss='dpo'"),
        ({}, {"clip_low": 0.1}, "no effect on loss='dpo'"),
        ({}, {"loss": "sft", "dpo_beta": 0.1}, "dpo_beta has no effect on loss='sft'"),
        ({"pairs": [[0, 0]]}, {}, r"pairs\[0\] is \[0, 0\]"),
        ({"pairs": [[0, 2]]}, {}, "two different ones of 2 rows"),
    ],
)
def test_what_is_missing_or_idle_is_refused(fields: dict, processing: dict, message: str) -> None:
    rows = {"prompts": [[5], [5]], "responses": [[6], [7]], "pairs": [[0, 1]], "ref_logprobs": [[-1.0], [-1.0]]}
    with pytest.raises(InputError, match=message):
        engine().fwd_bwd(RolloutBatch(**{**rows, **fields}), Processing(**{"loss": "dpo", **processing}))
