"""What is particular to FSDP2; what it has in common with every engine is in conformance/."""

from collections.abc import Callable

import pytest
import torch
from torch.distributed.tensor import DTensor

from arctic_platform.errors import ConfigError, WorkerLostError
from arctic_platform.rl.engines.fsdp_train import FsdpTrainEngine
from arctic_platform.rl.engines.models import tiny_model
from arctic_platform.rl.engines.torch_train import TorchTrainEngine
from arctic_platform.rl.engines.world import World
from arctic_platform.rl.protocol import Processing, RolloutBatch
from tests.rl.engines.builders import config, grouped_batch, part_of
from tests.rl.engines.conformance.fleet import CASES, Fleet
from tests.rl.engines.conformance.ranks import Ranks
from tests.rl.engines.test_router_loss import COEF, moe, rollouts, stock_router_loss
from tests.zorro_train.architectures import build

OPTIMIZER = {"lr": 1e-3, "eps": 1e-6, "weight_decay": 0.1}


@pytest.fixture(scope="module")
def two(rank_groups: Callable[[int], Ranks]) -> Ranks:
    return rank_groups(2)


def start(state: dict, make_model: Callable | None = None, **settings: object) -> None:
    """An engine on a rank, of a model that every rank builds alike."""
    given = config(training_engine="fsdp", ranks={"num_ranks": 2}, **settings)
    state["engine"] = FsdpTrainEngine(given, make_model and make_model(), world=state["world"])


def train(state: dict, shares: list[list[int]], batches: list[RolloutBatch]) -> dict[str, torch.Tensor]:
    engine, rank = state["engine"], state["world"].rank
    for batch in batches:
        engine.fwd_bwd(part_of(batch, shares[rank]) if shares[rank] else None)
        engine.step()
    return {name: weight.clone() for name, weight in engine.gather_weights()}


def held(state: dict) -> dict[str, tuple[int, ...]]:
    """Shapes of what a rank holds."""
    return {name: tuple(param.to_local().shape) for name, param in state["engine"].model.named_parameters()}


def answers(found: list) -> list:
    for answer in found:
        if isinstance(answer, Exception):
            raise answer
    return found


def untied():
    """No two weights are one, and nothing divides by two."""
    return build("llama", tie_word_embeddings=False, intermediate_size=57, num_hidden_layers=3)


@pytest.mark.parametrize(
    ("make_model", "settings"),
    [
        (untied, {}),
        (None, {"fsdp": {"reshard_after_forward": False}}),
        (None, {"fsdp": {"reshard_after_forward": False}, "gradient_checkpointing": True}),
        (None, {"dtype": "float64"}),
        (moe, {}),
    ],
    ids=["untied and uneven", "kept gathered", "kept gathered, checkpointed", "float64", "mixture of experts"],
)
def test_two_ranks_train_to_the_weights_of_one(two: Ranks, make_model: Callable | None, settings: dict) -> None:
    answers(two.call(start_with, make_model, {"optimizer": OPTIMIZER, **settings}))
    batches = [rollouts() if make_model else grouped_batch(seed) for seed in range(3)]
    if make_model is moe:  # a router's loss is that of each pass, and ranks run several
        batches = batches[:1]
        shares = [list(range(8)), []]
    else:
        shares = [[0, 2, 3, 5, 6, 7], [1, 4]]
    ours = answers(two.call(train, shares, batches))[0]
    plain = TorchTrainEngine(
        config(optimizer=OPTIMIZER, dtype=settings.get("dtype", "float32")), make_model and make_model()
    )
    for batch in batches:
        plain.fwd_bwd(batch)
        plain.step()
    for name, weight in plain.model.named_parameters():
        assert float((ours[name] - weight.detach()).abs().max()) <= 1e-5, name


def start_with(state: dict, make_model: Callable | None, settings: dict) -> None:
    start(state, make_model, **settings)


def test_rank_holds_half_of_every_weight_and_of_its_moments(two: Ranks) -> None:
    answers(two.call(start_with, None, {"optimizer": OPTIMIZER}))
    answers(two.call(train, [[0, 1, 2], [3, 4]], [grouped_batch()]))
    whole = {name: tuple(param.shape) for name, param in tiny_model().named_parameters()}
    for own in answers(two.call(held)):
        assert own == {name: (rows // 2, *others) for name, (rows, *others) in whole.items()}
    for num in answers(two.call(num_moments)):
        assert num == sum(param.numel() for param in tiny_model().parameters())


def num_moments(state: dict) -> int:
    """Numbers in both moments that a rank holds."""
    states = state["engine"].optimizer.adamw.state.values()
    return sum(moments[name].to_local().numel() for moments in states for name in ("exp_avg", "exp_avg_sq"))


def test_router_loss_weighs_each_rank_by_its_tokens(two: Ranks) -> None:
    batch = rollouts(advantage=0.0)
    shares = [[0, 2, 3, 5, 6, 7], [1, 4]]
    plain, expected = moe(), 0.0
    num_tokens = sum(map(len, batch.prompts)) + sum(batch.response_lens)
    for rows in shares:
        part = part_of(batch, rows)
        weight = (sum(map(len, part.prompts)) + sum(part.response_lens)) / num_tokens
        loss = COEF * weight * stock_router_loss(plain, part)
        loss.backward()
        expected += loss.item()
    norm = torch.cat([p.grad.flatten() for p in plain.parameters() if p.grad is not None]).norm().item()
    answers(two.call(start_with, moe, {}))
    for metrics, own_norm in answers(two.call(router_metrics, shares, batch)):
        assert metrics["loss"] == pytest.approx(expected, rel=1e-5)
        assert own_norm == pytest.approx(norm, rel=1e-4)


def router_metrics(state: dict, shares: list[list[int]], batch: RolloutBatch) -> tuple[dict[str, float], float]:
    engine = state["engine"]
    metrics = engine.fwd_bwd(part_of(batch, shares[state["world"].rank])).metrics
    return metrics, engine.step().metrics["grad_norm"]


def test_ranks_that_loaded_different_weights_are_refused(two: Ranks, tmp_path) -> None:
    for rank in range(2):
        tiny_model(seed=rank).save_pretrained(tmp_path / f"rank-{rank}")
    found = two.call(start_from, str(tmp_path))
    assert all(isinstance(error, ConfigError) for error in found)
    assert "rank 1 loaded another" in str(found[0])
    assert str(found[0]) == str(found[1])


def start_from(state: dict, folder: str) -> None:
    start(state, model=f"{folder}/rank-{state['world'].rank}")


def test_model_that_cannot_share_prefixes_is_refused_on_all_ranks(two: Ranks) -> None:
    found = two.call(start_with, alibi, {})
    assert len({str(error) for error in found}) == 1
    assert "cannot be trained with shared prefixes" in str(found[0])
    answers(two.call(start_with, alibi, {"zorro_train": {"enable": False}}))
    answers(two.call(train, [[0, 1, 2], [3, 4]], [rollouts()]))


def alibi():
    return build("bloom")


@pytest.mark.parametrize("is_checkpointed", [True, False])
def test_engine_that_broke_in_the_middle_of_a_pass_refuses_to_go_on(is_checkpointed: bool) -> None:
    """FSDP2 does not notice, and adds what was left of the gradients to the next ones."""
    fleet = Fleet(CASES[1], None).start(gradient_checkpointing=is_checkpointed)
    fleet.on_all(break_backward)
    with pytest.raises(WorkerLostError, match=r"rank 0 of 1 broke in the middle of a pass \(RuntimeError: no memory"):
        fleet.fwd_bwd(grouped_batch())
    for call in (lambda: fleet.fwd_bwd(grouped_batch()), fleet.step, lambda: fleet.rows("log_probs", grouped_batch())):
        with pytest.raises(WorkerLostError, match="start its group anew"):
            call()


def break_backward(state: dict) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("no memory")

    state["engine"].model.model.layers[0].mlp.register_full_backward_hook(fail)


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_weights_that_stay_gathered_train_alike_on_one_rank(is_checkpointed: bool) -> None:
    settings = {"optimizer": OPTIMIZER, "gradient_checkpointing": is_checkpointed}
    kept, freed = (
        FsdpTrainEngine(config(training_engine="fsdp", fsdp={"reshard_after_forward": value}, **settings))
        for value in (False, True)
    )
    plain = TorchTrainEngine(config(**settings))
    is_sharded = [behind_the_layers(engine) for engine in (kept, freed)]
    for seed in range(3):
        for engine in (kept, freed, plain):
            engine.fwd_bwd(grouped_batch(seed))
            engine.step()
    assert [set(seen) for seen in is_sharded] == [{False}, {True}]
    found = dict(kept.gather_weights())
    for name, weight in plain.model.named_parameters():
        assert float((found[name] - weight.detach()).abs().max()) <= 1e-5, name


def behind_the_layers(engine: FsdpTrainEngine) -> list[bool]:
    """Whether the first layer's weights are a shard again, each time that the last layer is done."""
    seen: list[bool] = []
    body = engine.model.model
    body.norm.register_forward_hook(lambda *_: seen.append(isinstance(next(body.layers[0].parameters()), DTensor)))
    return seen


def test_plain_engine_is_refused_on_several_ranks() -> None:
    with pytest.raises(ConfigError, match="trains on one rank; use 'fsdp'"):
        TorchTrainEngine(config(), world=World(0, 2))


# --- CUDA


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [{}, {"fsdp": {"cpu_offload": True}}, {"gradient_checkpointing": True}])
def test_cuda_weights_are_those_of_the_plain_engine(settings: dict) -> None:
    """One NCCL rank in this process."""
    given = {"device": "cuda", "optimizer": OPTIMIZER}
    ours = FsdpTrainEngine(config(training_engine="fsdp", **given, **settings))
    plain = TorchTrainEngine(config(**given))
    for seed in range(3):
        for engine in (ours, plain):
            engine.fwd_bwd(grouped_batch(seed), Processing(calculate_entropy=True))
            engine.step()
    found = dict(ours.gather_weights())
    for name, weight in plain.model.named_parameters():
        assert float((found[name].to(weight) - weight.detach()).abs().max()) <= 1e-5, name
