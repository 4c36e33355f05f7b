"""Checkpoints and sleep of every training engine: each reads what any other wrote, on any number of ranks."""

import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from arctic_platform.errors import CheckpointError, InputError
from arctic_platform.rl.engines.training_files import TensorFiles
from tests.rl.engines.builders import grouped_batch
from tests.rl.engines.conformance.fleet import CASES, Case, Fleet
from tests.rl.engines.conformance.ranks import Ranks
from tests.rl.engines.conformance.test_conformance import OPTIMIZER, assert_same_state, furthest
from tests.rl.engines.test_checkpoints import mixture

HERE = [case for case in CASES if "deepspeed" not in case.settings]
"""Each is read by each. What DeepSpeed saves and reads is in test_deepspeed.py, where its processes are up."""

SETTINGS = {"optimizer": {**OPTIMIZER, "schedule": "cosine", "total_steps": 6, "warmup_steps": 1}}


@pytest.fixture(scope="module", params=HERE, ids=str)
def fleet(request: pytest.FixtureRequest, rank_groups: Callable[[int], Ranks]) -> Fleet:
    return of_case(request.param, rank_groups)


def of_case(case: Case, rank_groups: Callable[[int], Ranks]) -> Fleet:
    return Fleet(case, None if case.is_here and case.num_ranks == 1 else rank_groups(case.num_ranks))


def train(fleet: Fleet, seeds: range) -> list[dict[str, float]]:
    return [fleet.fwd_bwd(grouped_batch(seed)).metrics | fleet.step() for seed in seeds]


def run(state: dict, method: str, *args: object) -> object:
    return getattr(state["engine"], method)(*args)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_one_engine_saved_every_engine_goes_on_with(
    fleet: Fleet, rank_groups: Callable[[int], Ranks], tmp_path: Path, dtype: str
) -> None:
    fleet.start(**SETTINGS, dtype=dtype)
    train(fleet, range(2))
    saved = fleet.on_all(run, "save_checkpoint", str(tmp_path / "c"), {"position": 2})[0]
    state = fleet.state()
    losses, expected = train(fleet, range(2, 4)), fleet.weights()
    plain = AutoModelForCausalLM.from_pretrained(saved.path, dtype=dtype).state_dict()
    assert all(torch.equal(plain[name], state[name]) for name in expected)
    for case in HERE:
        reader = of_case(case, rank_groups).start(**SETTINGS, dtype=dtype)
        train(reader, range(5, 6))
        loaded = reader.on_all(run, "load_checkpoint", str(tmp_path / "c"))
        assert {(one.step, one.weight_version, one.client_state["position"]) for one in loaded} == {(2, 2, 2)}
        assert_same_state(state, reader.state())
        ours = train(reader, range(2, 4))
        is_same = case == fleet.case
        for name in ("loss", "lr", "grad_norm", "step"):
            bound = 0.0 if is_same else 1e-6 if dtype == "float32" else 2e-2
            assert [one[name] for one in ours] == pytest.approx([one[name] for one in losses], abs=bound, rel=bound)
        assert furthest(reader.weights(), expected) <= (0.0 if is_same else 1e-6 if dtype == "float32" else 1e-2)


@pytest.mark.parametrize("target", ["cpu", "disk"])
def test_an_engine_that_slept_is_what_it_was(fleet: Fleet, tmp_path: Path, target: str) -> None:
    fleet.start(**SETTINGS, reference=True, checkpoint_path=str(tmp_path))
    train(fleet, range(1))
    before = fleet.state()
    fleet.on_all(run, "sleep", target)
    assert len(list(tmp_path.iterdir())) == (fleet.case.num_ranks if target == "disk" else 0)
    with pytest.raises(InputError, match="wake_training"):
        fleet.on_all(run, "weight_norm")
    fleet.on_all(run, "wake")
    assert_same_state(before, fleet.state())
    assert not list(tmp_path.iterdir())
    losses, weights = train(fleet, range(1, 3)), fleet.weights()
    fleet.start(**SETTINGS, reference=True)
    assert [one["loss"] for one in train(fleet, range(3))[1:]] == [one["loss"] for one in losses]
    assert furthest(fleet.weights(), weights) == 0.0


def on_a_full_disk(state: dict, rank: int, method: str, *args: object) -> object:
    """Full on one rank's machine only."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if state["world"].rank == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        return run(state, method, *args)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_is_full_on_one_rank_is_said_on_all_and_nothing_changes(fleet: Fleet, tmp_path: Path) -> None:
    fleet.start(**SETTINGS, checkpoint_path=str(tmp_path))
    train(fleet, range(1))
    fleet.on_all(run, "save_checkpoint")
    before = fleet.state()
    last = fleet.case.num_ranks - 1
    calls = [
        (0, "save_checkpoint"),
        (0, "export_model", str(tmp_path / "m")),
        (0, "sleep", "disk"),
        (last, "sleep", "disk"),
    ]
    for rank, method, *args in calls:
        with pytest.raises(CheckpointError, match="free space or choose another folder"):
            fleet.on_all(on_a_full_disk, rank, method, *args)
        assert [file.name for file in tmp_path.iterdir()] == ["step-000001"]
        assert_same_state(before, fleet.state())
    train(fleet, range(1, 2))
    assert fleet.on_all(run, "save_checkpoint")[0].step == 2


def test_a_damaged_checkpoint_is_refused_on_all_ranks_and_nothing_changes(fleet: Fleet, tmp_path: Path) -> None:
    fleet.start(**SETTINGS)
    fleet.on_all(run, "save_checkpoint", str(tmp_path / "c"))
    train(fleet, range(1))
    before = fleet.state()
    file = tmp_path / "c" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match=r"incomplete: model\.safetensors has"):
        fleet.on_all(run, "load_checkpoint", str(tmp_path / "c"))
    assert_same_state(before, fleet.state())


def draw(state: dict) -> bytes:
    return torch.rand(4).numpy().tobytes()


def test_ranks_draw_on_where_they_were_and_on_other_ranks_as_the_step_says(
    fleet: Fleet, rank_groups: Callable[[int], Ranks], tmp_path: Path
) -> None:
    fleet.start(**SETTINGS)
    fleet.on_all(run, "save_checkpoint", str(tmp_path / "c"))
    expected = fleet.on_all(draw)
    for case in HERE:
        reader = of_case(case, rank_groups).start(**SETTINGS)
        drawn = []
        for _ in range(2):
            reader.on_all(run, "load_checkpoint", str(tmp_path / "c"))
            drawn.append(reader.on_all(draw))
        assert drawn[0] == drawn[1]
        assert (drawn[0] == expected) == (case.num_ranks == fleet.case.num_ranks)
        assert case.num_ranks == fleet.case.num_ranks or len(set(drawn[0])) == case.num_ranks


def test_an_exported_mixture_has_the_names_and_pieces_of_the_published_one(fleet: Fleet, tmp_path: Path) -> None:
    mixture().save_pretrained(tmp_path / "published")
    fleet.start(model=str(tmp_path / "published"))
    fleet.on_all(run, "export_model", str(tmp_path / "ours"))
    ours, theirs = (TensorFiles(tmp_path / side, "model") for side in ("ours", "published"))
    assert ours.specs == theirs.specs
    assert all(torch.equal(ours.read(name), theirs.read(name)) for name in ours.specs)
    fleet.on_all(run, "save_checkpoint", str(tmp_path / "c"))
    before = fleet.state()
    fleet.on_all(run, "load_checkpoint", str(tmp_path / "c"))
    assert_same_state(before, fleet.state())
