"""What every training engine has to do, on any number of ranks; the engines are listed in fleet.py.

The twin is as slow and obvious as it gets: the stock model, one row at a time, and torch's own AdamW.
"""

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from arctic_platform.errors import ExactnessError, InputError, NonFiniteError
from arctic_platform.rl.config import OptimizerConfig
from arctic_platform.rl.engines.models import tiny_model
from arctic_platform.rl.engines.optimizer import learning_rate
from arctic_platform.rl.protocol import Processing, RolloutBatch
from tests.rl.engines.builders import grouped_batch, part_of
from tests.rl.engines.conformance.fleet import Fleet, counters

OPTIMIZER = {"lr": 1e-3, "eps": 1e-6, "weight_decay": 0.1, "max_grad_norm": 0.5}
"""AdamW divides by the gradient's size: with a smaller eps the rounding of gradients near zero becomes a weight's."""


class Twin:
    """GRPO by hand: mean over rows of the mean over tokens of `-advantage * log-prob`, at a ratio of one."""

    def __init__(self, **optimizer: object) -> None:
        self.config = OptimizerConfig(**{**OPTIMIZER, **optimizer})
        self.model = tiny_model()
        self.adamw = self.adamw_of(list(self.model.parameters()))
        self.num_steps = 0

    def adamw_of(self, params: list[nn.Parameter]) -> torch.optim.AdamW:
        config = self.config
        return torch.optim.AdamW(params, lr=1.0, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay)

    def step(self, batch: RolloutBatch) -> float:
        num_rows = batch.num_loss_rows
        for row in range(batch.num_rows):
            if batch.response_lens[row]:
                logprobs = row_logprobs(self.model, batch, row)
                advantages = torch.tensor(list(batch.advantages[row]))
                (-(advantages * logprobs).mean() / num_rows).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm or float("inf"))
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate(self.config, self.num_steps)
        self.adamw.step()
        self.adamw.zero_grad()
        self.num_steps += 1
        return float(norm)

    @property
    def weights(self) -> dict[str, Tensor]:
        return {name: param.detach() for name, param in self.model.named_parameters()}


def row_logprobs(model: PreTrainedModel, batch: RolloutBatch, row: int) -> Tensor:
    prompt, response = list(batch.prompts[row]), list(batch.responses[row])
    table = model(torch.tensor([prompt + response])).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
    return table.gather(1, torch.tensor(response, dtype=torch.long)[:, None]).flatten()


def furthest(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name].float() - theirs[name].float()).abs().max()) for name in theirs)


def assert_same_state(before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


# --- weights


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_grad_norm": None},
        {"schedule": "linear", "total_steps": 5},
        {"schedule": "cosine", "total_steps": 6, "warmup_steps": 2},
        {"schedule": "constant", "warmup_steps": 3},
        {"schedule": "cosine", "total_steps": 8, "warmup_ratio": 0.25},
    ],
    ids=["clipped", "unclipped", "linear", "cosine", "constant", "fractional-warm-up"],
)
def test_weights_after_every_step_are_those_of_plain_adamw(fleet: Fleet, settings: dict) -> None:
    fleet.start(optimizer={**OPTIMIZER, **settings})
    twin = Twin(**settings)
    for seed in range(5):
        batch = grouped_batch(seed)
        fleet.fwd_bwd(batch)
        metrics, norm = fleet.step(), twin.step(batch)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert metrics["lr"] == pytest.approx(learning_rate(twin.config, seed))
        assert furthest(fleet.weights(), twin.weights) <= 1e-5


SPLITS = [[[0, 1, 2, 3], [4, 5, 6, 7]], [[7, 0], [3, 1, 2], [5], [4, 6]], [[0], [1, 2, 3, 4, 5, 6, 7]]]


@pytest.mark.parametrize(("loss", "is_given"), [("grpo", True), ("dapo", False)], ids=["given counts", "own counts"])
def test_any_split_into_calls_before_one_step_equals_one_call(fleet: Fleet, loss: str, is_given: bool) -> None:
    """Calls after the first must not be lost, nor be added twice, whatever an engine does between micro-batches."""
    batch = grouped_batch()
    counts = {"num_loss_tokens": batch.num_loss_tokens, "num_loss_rows": batch.num_loss_rows} if is_given else {}
    processing = Processing(loss=loss, **counts)
    settings = {"optimizer": OPTIMIZER, "zorro_train": {"max_rows": 2}}
    fleet.start(**settings)
    whole = []
    for _ in range(2):  # the second step starts from what the first left behind
        fleet.fwd_bwd(batch, processing)
        whole.append((fleet.step()["grad_norm"], fleet.weights()))
    for split in SPLITS:
        fleet.start(**settings)
        for norm, weights in whole:
            for rows in split:
                fleet.fwd_bwd(part_of(batch, rows), processing, shares=first_to_last(rows, fleet.case.num_ranks))
            assert fleet.step()["grad_norm"] == pytest.approx(norm, rel=1e-4), split
            assert furthest(fleet.weights(), weights) <= 1e-5, split


def first_to_last(rows: list[int], num_ranks: int) -> list[list[int]]:
    """All rows but one on the first rank, that one on the last; ranks between them have none."""
    order = list(range(len(rows)))
    return [order] if num_ranks == 1 else [order[:-1], *([] for _ in range(num_ranks - 2)), order[-1:]]


def test_values_are_those_of_the_stock_model_in_the_order_of_the_caller(fleet: Fleet) -> None:
    batch, stock = grouped_batch(), tiny_model()
    fleet.start(reference=True, zorro_train={"max_rows": 3})
    scored = fleet.rows("log_probs", batch, Processing(calculate_entropy=True))
    of_reference = fleet.rows("log_probs", batch, reference=True)
    trained, dry = fleet.fwd_bwd(batch), fleet.rows("fwd_no_grad", batch)
    for row in range(batch.num_rows):
        with torch.no_grad():
            expected = row_logprobs(stock, batch, row).tolist()
        for answer in (scored, of_reference, trained, dry):
            assert answer.logprobs[row] == pytest.approx(expected, abs=1e-5)
    assert trained.metrics["loss"] == pytest.approx(dry.metrics["loss"], abs=1e-6)
    assert scored.metrics["tokens_naive"] == sum(map(len, batch.prompts)) + sum(batch.response_lens)
    assert trained.metrics["num_loss_tokens"] == batch.num_loss_tokens


def test_reference_stays_and_scores_behind_a_step_are_of_the_new_weights(fleet: Fleet) -> None:
    batch, twin = grouped_batch(), Twin()
    fleet.start(reference=True, optimizer=OPTIMIZER)
    first = fleet.rows("log_probs", batch, reference=True)
    fleet.fwd_bwd(batch)
    fleet.rows("log_probs", batch)  # weights that this gathered are not those behind the step
    fleet.step()
    twin.step(batch)
    assert fleet.rows("log_probs", batch, reference=True).logprobs == first.logprobs
    new = fleet.rows("log_probs", batch).logprobs
    for row in range(batch.num_rows):
        with torch.no_grad():
            assert new[row] == pytest.approx(row_logprobs(twin.model, batch, row).tolist(), abs=1e-4)
    assert new != first.logprobs


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_checkpointing": True},
        {"zorro_train": {"enable": False}},
        {"zorro_train": {"max_token_len": 30}},
        {"zorro_train": {"logits_optimization": "memory"}, "gradient_checkpointing": True},
    ],
    ids=["checkpointing", "unshared", "small budget", "memory"],
)
def test_ways_to_run_a_batch_do_not_change_the_weights(fleet: Fleet, settings: dict) -> None:
    fleet.start(optimizer=OPTIMIZER, **settings)
    twin = Twin()
    for seed in range(2):
        batch = grouped_batch(seed)
        fleet.fwd_bwd(batch)
        fleet.step()
        twin.step(batch)
    assert furthest(fleet.weights(), twin.weights) <= 1e-5


def test_sharing_may_be_switched_by_the_call(fleet: Fleet) -> None:
    batch = grouped_batch()
    fleet.start(optimizer=OPTIMIZER, zorro_train={"enable": False})
    assert fleet.fwd_bwd(batch, Processing(zorro=True)).metrics["zorro_active"] == 1.0
    fleet.step()
    twin = Twin()
    twin.step(batch)
    assert furthest(fleet.weights(), twin.weights) <= 1e-5


def test_bf16_learns_from_updates_too_small_for_bf16(fleet: Fleet) -> None:
    """At this rate a bf16 weight would round back to itself in every step."""
    fleet.start(dtype="bfloat16", optimizer={"lr": 1e-5})
    before = fleet.weights()
    for _ in range(8):
        fleet.fwd_bwd(grouped_batch())
        fleet.step()
    state = fleet.state()
    assert all(state[name].dtype == torch.bfloat16 for name in before)
    moved = [float((state[name] != before[name]).float().mean()) for name in before]
    assert max(moved) > 0.01
    names = [name.removeprefix("master.") for name in state if name.startswith("master.")]
    assert {f"param.{name}" for name in names} == {name for name in state if name.startswith("param.")}
    assert all(torch.equal(state[f"master.{name}"].bfloat16(), state[f"param.{name}"]) for name in names)


def test_bf16_gradients_are_those_of_one_rank(fleet: Fleet) -> None:
    batch = grouped_batch()
    fleet.start(dtype="bfloat16", optimizer=OPTIMIZER).fwd_bwd(batch)
    norm = fleet.step()["grad_norm"]
    assert norm == pytest.approx(Twin().step(batch), rel=0.02)


# --- batches at the edge


def test_batch_that_is_all_masked_gives_loss_zero_and_a_counted_step(fleet: Fleet) -> None:
    fleet.start(optimizer={"lr": 1e-2, "weight_decay": 0.0})
    batch, before = grouped_batch(), fleet.weights()
    masked = batch.model_copy(update={"response_mask": [[0] * length for length in batch.response_lens]})
    answer = fleet.fwd_bwd(masked)
    metrics = fleet.step()
    assert (answer.metrics["loss"], metrics["grad_norm"], metrics["step"]) == (0.0, 0.0, 1.0)
    assert furthest(fleet.weights(), before) == 0.0


def test_rank_whose_rows_have_no_answer_keeps_step(fleet: Fleet) -> None:
    rows = {"prompts": [[5, 6], [5, 7], [5, 8]], "responses": [[9, 10], [11], []], "advantages": [1.0, -1.0, 0.5]}
    batch, twin = RolloutBatch(**rows), Twin()
    fleet.start(optimizer=OPTIMIZER)
    answer = fleet.fwd_bwd(batch, shares=first_to_last([0, 1, 2], fleet.case.num_ranks))
    assert [len(row) for row in answer.logprobs] == [2, 1, 0]
    fleet.step()
    twin.step(batch)
    assert furthest(fleet.weights(), twin.weights) <= 1e-5


def test_fewer_rows_than_ranks_is_a_batch(fleet: Fleet) -> None:
    batch = part_of(grouped_batch(), [0])
    fleet.start(optimizer=OPTIMIZER, reference=True)
    shares = [[] for _ in range(fleet.case.num_ranks - 1)] + [[0]]
    twin = Twin()
    expected = row_logprobs(twin.model, batch, 0).tolist()
    for answer in (
        fleet.rows("log_probs", batch, reference=True, shares=shares),
        fleet.rows("fwd_no_grad", batch, shares=shares),
        fleet.fwd_bwd(batch, Processing(), shares=shares),
    ):
        assert answer.logprobs[0] == pytest.approx(expected, abs=1e-5)
    fleet.step()
    twin.step(batch)
    assert furthest(fleet.weights(), twin.weights) <= 1e-5


@pytest.mark.parametrize("max_rows", [None, 1], ids=["one pass", "many passes"])
def test_pairs_are_trained_on_whichever_rank_they_are(fleet: Fleet, max_rows: int | None) -> None:
    rows = {"prompts": [[5, 6]] * 6, "responses": [[7], [8, 9], [10], [11, 12], [13], [14]]}
    pairs = [[0, 1], [3, 2], [4, 5]]
    ref = [[-5.0] * len(row) for row in rows["responses"]]
    batch = RolloutBatch(**rows, pairs=pairs, ref_logprobs=ref)
    model = tiny_model()
    scores = torch.stack([row_logprobs(model, batch, row).sum() + 5.0 * len(ref[row]) for row in range(6)])
    expected = torch.stack([-torch.nn.functional.logsigmoid(0.1 * (scores[a] - scores[b])) for a, b in pairs]).mean()
    expected.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    fleet.start(zorro_train={"max_rows": max_rows})
    num = fleet.case.num_ranks
    shares = [list(range(6))] if num == 1 else [[0, 1, 2, 3], [4, 5], *([] for _ in range(num - 2))]
    each = [pairs] if num == 1 else [[[0, 1], [3, 2]], [[0, 1]]]
    parts = [
        RolloutBatch(**{**part_of(RolloutBatch(**rows, ref_logprobs=ref), own).model_dump(), "pairs": of_rank})
        for own, of_rank in zip(shares, each, strict=False)
    ]
    answers = fleet.on_all(dpo, each=[(part,) for part in [*parts, *([None] * (num - 2))]])
    assert answers[0]["loss"] == pytest.approx(expected.item(), abs=1e-6)
    assert answers[0]["num_loss_pairs"] == 3.0
    assert fleet.step()["grad_norm"] == pytest.approx(float(norm), rel=1e-4)


def dpo(state: dict, batch: RolloutBatch | None) -> dict[str, float]:
    return state["engine"].fwd_bwd(batch, Processing(loss="dpo")).metrics


# --- nothing half applied


def with_field(batch: RolloutBatch, name: str, row: int, value: list) -> RolloutBatch:
    rows = [list(values) for values in getattr(batch, name)]
    rows[row] = value
    return batch.model_copy(update={name: rows})


def unknown_token(batch: RolloutBatch) -> RolloutBatch:
    return with_field(batch, "prompts", batch.num_rows - 1, [5, 999])


def infinite_loss(batch: RolloutBatch) -> RolloutBatch:
    """In the last row only, so on one rank only."""
    row = batch.num_rows - 1
    batch = with_field(batch, "responses", row, [7, 8])
    old = [[-60.0 if b == row else -5.5] * length for b, length in enumerate(batch.response_lens)]
    advantages = [[-3e38 if b == row else 1.0] * length for b, length in enumerate(batch.response_lens)]
    return batch.model_copy(update={"old_logprobs": old, "advantages": advantages})


SPOILT = [
    (unknown_token, InputError, "has token id 999"),
    (infinite_loss, NonFiniteError, r"the loss of rows .* is inf"),
]


@pytest.mark.parametrize("max_rows", [None, 2], ids=["one pass", "many passes"])
def test_batch_that_fails_in_the_middle_leaves_everything(fleet: Fleet, max_rows: int | None) -> None:
    first, second = grouped_batch(0), grouped_batch(1)
    counts = Processing(num_loss_rows=first.num_loss_rows + second.num_loss_rows)
    fleet.start(optimizer=OPTIMIZER, zorro_train={"max_rows": max_rows})
    fleet.fwd_bwd(first)
    fleet.step()
    fleet.fwd_bwd(first, counts)
    before = fleet.state()
    for spoil, error, message in SPOILT:
        with pytest.raises(error, match=message):
            fleet.fwd_bwd(spoil(grouped_batch(2)), counts)
        assert_same_state(before, fleet.state())
    fleet.fwd_bwd(second, counts)
    norm = fleet.step()["grad_norm"]
    undisturbed = fleet.weights()
    fleet.start(optimizer=OPTIMIZER, zorro_train={"max_rows": max_rows})
    fleet.fwd_bwd(first)
    fleet.step()
    fleet.fwd_bwd(first, counts)
    fleet.fwd_bwd(second, counts)
    assert fleet.step()["grad_norm"] == pytest.approx(norm, rel=1e-6)
    assert furthest(fleet.weights(), undisturbed) <= 1e-6


def test_advantage_that_is_not_a_number_is_no_batch() -> None:
    with pytest.raises(NonFiniteError):
        RolloutBatch(prompts=[[5]], responses=[[6]], advantages=[float("nan")])


def test_call_that_counts_differently_is_refused_and_changes_nothing(fleet: Fleet) -> None:
    batch = grouped_batch()
    fleet.start(optimizer=OPTIMIZER).fwd_bwd(batch)
    before = fleet.state()
    with pytest.raises(InputError, match="give num_loss_tokens and num_loss_rows"):
        fleet.fwd_bwd(batch, Processing(loss="dapo"))
    assert_same_state(before, fleet.state())


def test_step_without_a_call_is_refused(fleet: Fleet) -> None:
    fleet.start()
    with pytest.raises(InputError, match="call fwd_bwd"):
        fleet.step()


def test_step_of_a_gradient_that_is_not_finite_is_dropped_on_all_ranks(fleet: Fleet) -> None:
    batch = grouped_batch()
    fleet.start(optimizer=OPTIMIZER).fwd_bwd(batch)
    fleet.step()
    before = fleet.state()
    fleet.fwd_bwd(batch)
    fleet.on_all(spoil_gradient)
    with pytest.raises(NonFiniteError, match="the step was dropped"):
        fleet.step()
    assert_same_state(before, fleet.state())
    fleet.fwd_bwd(batch)
    assert fleet.step()["step"] == 2.0


def spoil_gradient(state: dict) -> None:
    """On the last rank only."""
    engine = state["engine"]
    if engine.world.rank == engine.world.size - 1:
        held = getattr(engine.gradients, "held", None) or [engine.gradients.params[0].grad]
        held[0].mul_(torch.nan)


def test_discarded_call_leaves_everything(fleet: Fleet) -> None:
    batch = grouped_batch()
    fleet.start(optimizer=OPTIMIZER)
    kept = fleet.fwd_bwd(batch)
    before = fleet.state()
    dry = fleet.rows("fwd_bwd_discarding", grouped_batch(1))
    fleet.rows("fwd_no_grad", grouped_batch(1))
    assert dry.metrics["loss"] != kept.metrics["loss"]
    assert_same_state(before, fleet.state())
    assert fleet.step()["grad_norm"] == pytest.approx(Twin().step(batch), rel=1e-4)


# --- receipts and state


def test_receipt_is_taken_beside_the_gradients(fleet: Fleet) -> None:
    batch = grouped_batch()
    fleet.start(optimizer=OPTIMIZER, zorro_train={"receipt_every": 2})
    first, second = fleet.fwd_bwd(batch).metrics, fleet.fwd_bwd(batch).metrics
    assert 0.0 < first["receipt/gradient_rel"] < 1e-5
    assert first["receipt/logprob_max_abs"] < 1e-5
    assert "receipt/gradient_rel" not in second
    assert fleet.step()["grad_norm"] == pytest.approx(Twin().step(batch), rel=1e-4)


def test_receipt_beyond_its_tolerance_changes_nothing(fleet: Fleet) -> None:
    fleet.start(zorro_train={"receipt_every": 1, "receipt_tolerance": 1e-12})
    before = fleet.state()
    with pytest.raises(ExactnessError, match=r"zorro_train\.enable: false"):
        fleet.fwd_bwd(grouped_batch())
    assert_same_state(before, fleet.state())


def test_norm_and_number_of_weights_are_of_the_whole(fleet: Fleet) -> None:
    fleet.start()
    weights = [param.detach().double().flatten() for param in tiny_model().parameters()]
    norms = fleet.on_all(numbers)
    assert all(norm == pytest.approx(float(torch.cat(weights).norm())) for norm, _ in norms)
    assert all(num == sum(len(weight) for weight in weights) for _, num in norms)


def numbers(state: dict) -> tuple[float, int]:
    return state["engine"].weight_norm(), state["engine"].num_parameters


def test_specs_are_those_of_what_is_gathered(fleet: Fleet) -> None:
    fleet.start(dtype="bfloat16")
    manifest = fleet.on_all(specs)[0]
    found = {name: (tuple(x.shape), str(x.dtype).removeprefix("torch.")) for name, x in fleet.weights().items()}
    assert found == {name: (spec.shape, spec.dtype) for name, spec in manifest.specs.items()}
    assert manifest.aliases == {"lm_head.weight": "model.embed_tokens.weight"}


def specs(state: dict):
    return state["engine"].weight_specs()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_state_that_is_put_back_continues_as_if_nothing_had_been(fleet: Fleet, dtype: str) -> None:
    settings = {"optimizer": OPTIMIZER, "dtype": dtype}
    fleet.start(**settings)
    for seed in range(2):
        fleet.fwd_bwd(grouped_batch(seed))
        fleet.step()
    saved = fleet.on_all(gather_training)[0]
    fleet.fwd_bwd(grouped_batch(2))
    fleet.step()
    expected = fleet.weights()
    fleet.start(**settings)
    fleet.on_all(put_back, saved, 2)
    fleet.fwd_bwd(grouped_batch(2))
    fleet.step()
    assert furthest(fleet.weights(), expected) == 0.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_state_of_an_engine_that_has_not_stepped_has_no_moments(fleet: Fleet, dtype: str) -> None:
    fleet.start(dtype=dtype, optimizer={**OPTIMIZER, "lr": 1.0})
    saved, first = fleet.on_all(gather_training)[0], fleet.weights()
    assert {name.split(".")[0] for name in saved} == {"param", *(["master"] if dtype == "bfloat16" else [])}
    for name in first if dtype == "bfloat16" else ():
        assert torch.equal(saved[f"master.{name}"], first[name].float())
    fleet.fwd_bwd(grouped_batch())
    fleet.step()
    assert fleet.on_all(counters)[0]["counters"][2] == 1
    fleet.on_all(put_back, saved, 0)
    assert furthest(fleet.weights(), first) == 0.0
    assert fleet.on_all(gather_training)[0].keys() == saved.keys()


def gather_training(state: dict) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in state["engine"].gather_training()}


def put_back(state: dict, saved: dict[str, Tensor], optimizer_step: int) -> None:
    engine = state["engine"]
    engine.scatter_training(saved.get, optimizer_step)
    assert engine.optimizer_step == optimizer_step


def test_no_batch_at_all_is_refused_where_there_is_one_rank(fleet: Fleet) -> None:
    if fleet.case.num_ranks == 1:
        fleet.start()
        with pytest.raises(InputError, match="there is no batch"):
            fleet.on_all(no_rows)


def no_rows(state: dict) -> None:
    state["engine"].fwd_bwd(None)
