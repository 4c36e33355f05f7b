"""Ranks in processes compute what the plain engine computes in this one, and what breaks is told."""

import json

import numpy as np
import pytest

from arctic_platform.errors import (
    CheckpointError,
    ConfigError,
    InputError,
    NonFiniteError,
)
from arctic_platform.rl.config import ArcticRLClientConfig
from arctic_platform.rl.engines.passes import rows_of
from arctic_platform.rl.engines.torch_train import TorchTrainEngine
from arctic_platform.rl.protocol import Processing, RolloutBatch
from arctic_platform.rl.workers.group import RankGroup, part_of, spread_pairs, spread_rows
from tests.rl.engines.builders import config, grouped_batch
from tests.rl.engines.builders import part_of as plain_part_of
from tests.rl.workers.processes import all_end

RANKS = {"heartbeat_seconds": 5.0, "start_seconds": 120.0, "num_threads": 1}


def ranks_config(num_ranks: int = 1, **settings: object) -> ArcticRLClientConfig:
    """Plain PyTorch on one rank, FSDP2 on more."""
    given: dict = {"reference": True, "colocate": False, **settings}
    return config(**{**given, "ranks": {**RANKS, "num_ranks": num_ranks}})


@pytest.fixture(scope="module", params=[1, 2])
def group(request, forked_workers):
    """A group of processes."""
    group = RankGroup(ranks_config(request.param))
    yield group
    pids = group.pids
    group.close()
    assert all_end(pids)


@pytest.fixture
def plain():
    """The same engine in this process."""
    return TorchTrainEngine(config(reference=True))


def fresh(group: RankGroup, tmp_path) -> None:
    """Bring a group that was used back to the first weights."""
    folder = tmp_path / "first"
    TorchTrainEngine(config(reference=True)).save_checkpoint(str(folder))
    group.load_checkpoint(str(folder))


def values(rows) -> np.ndarray:
    return np.concatenate([np.asarray(row) for row in rows])


def test_steps_give_the_weights_and_the_answers_of_one_process(group, plain, tmp_path):
    fresh(group, tmp_path)
    for seed in range(3):
        for part in (grouped_batch(seed), grouped_batch(seed + 10, num_groups=1)):
            ours, theirs = group.fwd_bwd(part), plain.fwd_bwd(part)
            assert group.has_pending_gradients
            assert ours.logprobs.offsets.tolist() == theirs.logprobs.offsets.tolist()
            assert values(ours.logprobs) == pytest.approx(values(theirs.logprobs), abs=1e-5)
            assert ours.metrics["loss"] == pytest.approx(theirs.metrics["loss"], abs=1e-6)
        ours, theirs = group.step(), plain.step()
        assert ours.metrics["grad_norm"] == pytest.approx(theirs.metrics["grad_norm"], rel=1e-5)
        assert group.weight_norm() == pytest.approx(plain.weight_norm(), rel=1e-6)
    assert (group.num_steps, group.version, group.num_parameters) == (3, 3, plain.num_parameters)
    assert not group.has_pending_gradients


@pytest.mark.parametrize("zorro", [None, True, False])
def test_scores_come_in_the_callers_order(group, plain, tmp_path, zorro):
    fresh(group, tmp_path)
    batch, processing = grouped_batch(5, num_groups=3), Processing(calculate_entropy=True, zorro=zorro)
    for reference in (False, True):
        ours = group.log_probs(batch, processing, reference=reference)
        theirs = plain.log_probs(batch, processing, reference=reference)
        assert values(ours.logprobs) == pytest.approx(values(theirs.logprobs), abs=1e-5)
        assert values(ours.entropy) == pytest.approx(values(theirs.entropy), abs=1e-5)


def test_calls_that_keep_nothing_keep_nothing(group, plain, tmp_path):
    fresh(group, tmp_path)
    batch = grouped_batch(2)
    for name in ("fwd_no_grad", "fwd_bwd_discarding"):
        ours, theirs = getattr(group, name)(batch), getattr(plain, name)(batch)
        assert ours.metrics["loss"] == pytest.approx(theirs.metrics["loss"], abs=1e-6)
        assert not group.has_pending_gradients
    assert group.weight_norm() == pytest.approx(plain.weight_norm(), rel=1e-7)


def test_ranks_sleep_and_wake_as_they_were(group, tmp_path):
    norm = group.weight_norm()
    group.sleep("disk")
    assert group.is_asleep
    with pytest.raises(InputError, match=r"the trainer is asleep; call wake_training\(\) before weight_norm\(\)"):
        group.weight_norm()
    group.wake()
    assert (group.is_asleep, group.weight_norm()) == (False, norm)


def test_a_checkpoint_brings_the_state_of_the_client_back(group, tmp_path):
    group.fwd_bwd(grouped_batch(0))
    group.step()
    saved = group.save_checkpoint(str(tmp_path / "c"), {"position": 7})
    norm = group.weight_norm()
    group.fwd_bwd(grouped_batch(1))
    group.step()
    loaded = group.load_checkpoint(str(tmp_path / "c"))
    assert (loaded.client_state, loaded.step) == ({"position": 7}, saved.step)
    assert group.weight_norm() == norm
    assert json.loads((tmp_path / "c" / "config.json").read_text())["model_type"] == "llama"
    assert group.export_model(str(tmp_path / "e")) == str(tmp_path / "e")


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda group: group.fwd_bwd(RolloutBatch(prompts=[[1, 999]], responses=[[2]])), InputError, "token id 999"),
        (lambda group: group.log_probs(RolloutBatch(prompts=[[1] * 5000], responses=[[2]])), InputError, "takes 4096"),
        (lambda group: group.fwd_bwd(grouped_batch(0), Processing(loss="nope")), ConfigError, "nope"),
        (lambda group: group.load_checkpoint("/nowhere/at/all"), CheckpointError, "/nowhere/at/all"),
        (lambda group: group.step(), InputError, "no gradients"),
        (lambda group: group.save_checkpoint(None), ConfigError, "needs a path"),
        (lambda group: group.save_checkpoint("x", {"a": {1, 2}}), InputError, "client_state"),
        (lambda group: group.fwd_bwd(grouped_batch(0), Processing(temperature=1e-44)), NonFiniteError, "loss of rows"),
    ],
)
def test_errors_are_those_of_one_process_and_the_group_goes_on(group, call, kind, text):
    with pytest.raises(kind, match=text):
        call(group)
    assert group.lost is None
    group.log_probs(grouped_batch(1))


def test_a_batch_smaller_than_the_group_and_one_without_loss_are_worked_on(group, plain, tmp_path):
    fresh(group, tmp_path)
    one = grouped_batch(0, num_groups=1, group_size=1)
    masked = grouped_batch(1).model_copy(update={"response_mask": [[0] * n for n in grouped_batch(1).response_lens]})
    for batch in (one, masked):
        ours, theirs = group.fwd_bwd(batch), plain.fwd_bwd(batch)
        assert values(ours.logprobs) == pytest.approx(values(theirs.logprobs), abs=1e-5)
        assert ours.metrics["loss"] == pytest.approx(theirs.metrics["loss"], abs=1e-6)
    group.step()
    plain.step()
    assert group.weight_norm() == pytest.approx(plain.weight_norm(), rel=1e-6)


def test_a_loss_over_pairs_is_that_of_one_process(group, plain, tmp_path):
    fresh(group, tmp_path)
    batch = grouped_batch(4)
    scored = plain.log_probs(batch, reference=True).logprobs
    reference = [[value - 0.1 * row for value in values] for row, values in enumerate(scored)]
    batch = batch.model_copy(update={"pairs": [[0, 5], [5, 1], [2, 3], [6, 7]], "ref_logprobs": reference})
    ours, theirs = (engine.fwd_bwd(batch, Processing(loss="dpo")) for engine in (group, plain))
    assert ours.metrics["loss"] == pytest.approx(theirs.metrics["loss"], abs=1e-6)
    assert ours.metrics["dpo_accuracy"] == theirs.metrics["dpo_accuracy"]
    group.step()
    plain.step()
    assert group.weight_norm() == pytest.approx(plain.weight_norm(), rel=1e-6)


def test_rows_are_spread_so_that_trees_stay_whole_and_no_rank_is_empty():
    batch = grouped_batch(3, num_groups=4, group_size=4)
    rows = rows_of(batch, vocab_size=256, max_row_len=None)
    for num_ranks in (2, 3, 5):
        held = spread_rows(rows, ranks_config(num_ranks))
        assert sorted(row for part in held for row in part) == list(range(16))
        assert all(held)
    whole = spread_rows(rows, ranks_config(4))
    assert max(len({row // 4 for row in part}) for part in whole) <= 2


def test_pairs_stay_on_one_rank_and_are_renumbered():
    batch = grouped_batch(4).model_copy(update={"pairs": [[0, 5], [5, 1], [2, 3], [6, 7]]})
    held = spread_pairs(batch, 2)
    assert sorted(row for rows in held for row in rows) == list(range(8))
    found = []
    for rows in held:
        part = part_of(batch, rows, with_pairs=True)
        found += [[rows[first], rows[second]] for first, second in part.pairs.tolist()]
    assert sorted(found) == sorted([[0, 5], [5, 1], [2, 3], [6, 7]])


def test_a_part_of_a_batch_is_what_taking_its_rows_one_by_one_gives():
    batch = grouped_batch(6)
    for rows in ([3, 1], [], [0], list(range(8))):
        part = part_of(batch, rows)
        if rows:
            assert part == plain_part_of(batch, rows)
        assert part.num_rows == len(rows)
