"""Checkpoints and sleep of every training engine: each reads what any other wrote, on any number of ranks."""

import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from arctic_platform.errors import CheckpointError, InputError
from arctic_platform.rl.engines.training_files import TensorFiles
from tests.rl.engines.builders import grouped_batch
from tests.rl.engines.conformance.fleet import CASES, Case, Fleet
from tests.rl.engines.conformance.ranks import Ranks
from tests.rl.engines.conformance.test_conformance import OPTIMIZER, assert_same_state, furthest
from tests.rl.engines.test_checkpoints import mixture

PLAIN, FSDP = CASES[0], CASES[2]
"""One engine of one rank and one of two: every engine reads what both wrote, and both read what every engine wrote."""

SETTINGS = {"optimizer": {**OPTIMIZER, "schedule": "cosine", "total_steps": 6, "warmup_steps": 1}}


def readers_of(case: Case) -> list[Case]:
    """Itself last, so that its checkpoint has been through the others'."""
    return [*(one for one in (PLAIN, FSDP) if one != case), case]


def train(fleet: Fleet, seeds: range) -> list[dict[str, float]]:
    return [fleet.fwd_bwd(grouped_batch(seed)).metrics | fleet.step() for seed in seeds]


def run(state: dict, method: str, *args: object) -> object:
    return getattr(state["engine"], method)(*args)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_one_engine_saved_every_engine_goes_on_with_and_saves_alike(
    fleet: Fleet, rank_groups: Callable[[int], Ranks], tmp_path: Path, dtype: str
) -> None:
    """Each reader writes again what it has read, and the next one reads that; the last is the first writer's kind."""
    fleet.start(**SETTINGS, dtype=dtype)
    train(fleet, range(2))
    saved = fleet.on_all(run, "save_checkpoint", str(tmp_path / "0"), {"position": 2})[0]
    state = fleet.state()
    losses, expected = train(fleet, range(2, 4)), fleet.weights()
    plain = AutoModelForCausalLM.from_pretrained(saved.path, dtype=dtype).state_dict()
    assert all(torch.equal(plain[name], state[name]) for name in expected)
    for number, case in enumerate(readers_of(fleet.case)):
        reader = Fleet.of(case, rank_groups).start(**SETTINGS, dtype=dtype)
        train(reader, range(5, 6))
        loaded = reader.on_all(run, "load_checkpoint", str(tmp_path / str(number)))
        assert {(one.step, one.weight_version, one.client_state["position"]) for one in loaded} == {(2, 2, 2)}
        assert_same_state(state, reader.state())
        reader.on_all(run, "save_checkpoint", str(tmp_path / str(number + 1)), {"position": 2})
        ours = train(reader, range(2, 4))
        is_same = case == fleet.case
        for name in ("loss", "lr", "grad_norm", "step"):
            bound = 0.0 if is_same else 1e-6 if dtype == "float32" else 2e-2
            assert [one[name] for one in ours] == pytest.approx([one[name] for one in losses], abs=bound, rel=bound)
        assert furthest(reader.weights(), expected) <= (0.0 if is_same else 1e-6 if dtype == "float32" else 1e-2)


@pytest.mark.parametrize(("target", "dtype"), [("cpu", "float32"), ("disk", "bfloat16")])
def test_an_engine_that_slept_is_what_it_was(fleet: Fleet, tmp_path: Path, target: str, dtype: str) -> None:
    settings = {**SETTINGS, "dtype": dtype, "reference": True}
    fleet.start(**settings, checkpoint_path=str(tmp_path))
    train(fleet, range(1))
    before = fleet.state()
    num_bytes = fleet.on_all(fall_asleep, target)
    assert all(awake > 0 and asleep == 0 for awake, asleep in num_bytes)
    assert len(list(tmp_path.iterdir())) == (fleet.case.num_ranks if target == "disk" else 0)
    with pytest.raises(InputError, match="wake_training"):
        fleet.on_all(run, "weight_norm")
    fleet.on_all(run, "wake")
    assert_same_state(before, fleet.state())
    assert not list(tmp_path.iterdir())
    losses, weights = train(fleet, range(1, 3)), fleet.weights()
    fleet.start(**settings)
    assert [one["loss"] for one in train(fleet, range(3))[1:]] == [one["loss"] for one in losses]
    assert furthest(fleet.weights(), weights) == 0.0


def fall_asleep(state: dict, target: str) -> tuple[int, int]:
    """The bytes of weights, gradients and optimizer in memory, awake and asleep."""
    engine = state["engine"]
    held = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in engine._held_tensors()]
    awake = bytes_in(held)
    engine.sleep(target)
    return awake, bytes_in(held)


def bytes_in(tensors: list[torch.Tensor]) -> int:
    return sum({storage._cdata: storage.nbytes() for storage in map(torch.Tensor.untyped_storage, tensors)}.values())


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


def test_a_folder_that_nobody_may_write_is_named_on_all_ranks_and_nothing_changes(fleet: Fleet, tmp_path: Path) -> None:
    closed = "/sys/kernel"  # root may not write there either
    fleet.start(**SETTINGS, checkpoint_path=f"{closed}/c")
    train(fleet, range(1))
    before = fleet.state()
    for method, *args in (("save_checkpoint",), ("export_model", f"{closed}/m"), ("sleep", "disk")):
        fleet.on_all(refuses_to_write_in, closed, method, *args)
        assert_same_state(before, fleet.state())
    assert fleet.on_all(run, "save_checkpoint", str(tmp_path / "c"))[0].step == 1


def refuses_to_write_in(state: dict, folder: str, method: str, *args: object) -> None:
    with pytest.raises(CheckpointError, match=rf"cannot write {folder}/.*choose another folder"):
        run(state, method, *args)


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
    for case in readers_of(fleet.case):
        reader = Fleet.of(case, rank_groups).start(**SETTINGS)
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
