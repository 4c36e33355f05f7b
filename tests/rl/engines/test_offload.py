"""A trainer that sleeps and wakes: bit for bit what it was, its memory really free, and nothing half moved."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from arctic_platform.errors import CheckpointError, InputError
from arctic_platform.rl.engines.models import load_model
from arctic_platform.rl.engines.offload import Offload
from arctic_platform.rl.engines.torch_train import TorchTrainEngine
from arctic_platform.rl.engines.world import ALONE
from tests.rl.engines.builders import config, grouped_batch
from tests.rl.engines.test_checkpoints import full_disk, train
from tests.rl.engines.test_torch_train import assert_untouched, engine, everything


@pytest.fixture(autouse=True)
def temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where files of a sleeping trainer go that has no folder of checkpoints."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def storages(trainer: TorchTrainEngine) -> int:
    """Bytes behind everything that the engine holds."""
    found = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in trainer._held_tensors()}
    return sum(found.values())


@pytest.mark.parametrize("target", ["cpu", "disk"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"dtype": "bfloat16"}, {"reference": True}, {"lora": {"rank": 4}, "reference": True}],
    ids=["fp32", "bf16", "reference", "adapters"],
)
def test_a_trainer_that_slept_goes_on_as_one_that_did_not(temporary_files: Path, target: str, settings: dict) -> None:
    trainer, whole = engine(**settings), engine(**settings)
    assert train(trainer, range(1)) == train(whole, range(1))
    before, identities = everything(trainer), [id(x) for x in trainer._held_tensors()]
    held = storages(trainer)
    trainer.sleep(target)
    assert trainer.is_asleep
    assert storages(trainer) == 0
    assert trainer.num_parameters == whole.num_parameters
    assert len(list(temporary_files.iterdir())) == (target == "disk")
    trainer.wake()
    assert not trainer.is_asleep
    assert (storages(trainer), [id(x) for x in trainer._held_tensors()]) == (held, identities)
    assert_untouched(trainer, before)
    assert not list(temporary_files.iterdir())
    assert train(trainer, range(1, 3)) == train(whole, range(1, 3))
    if settings.get("reference"):
        scored = [one.log_probs(grouped_batch(), reference=True).logprobs for one in (trainer, whole)]
        assert scored[0] == scored[1]


def test_weights_mapped_from_a_file_sleep_too(tmp_path: Path) -> None:
    """Their memory cannot be emptied, only left; views and tied weights stay views and tied."""
    save_file({"big": torch.arange(1000.0)}, tmp_path / "file.safetensors")
    storage = torch.UntypedStorage.from_file(str(tmp_path / "file.safetensors"), False, 4000)
    whole = torch.empty(0).set_(storage, 0, (1000,), (1,))
    expected, part, strided = whole.clone(), whole[10:20], whole[::7]
    offload = Offload([whole, part, strided], "disk", ALONE, tmp_path)
    assert offload.num_bytes == 4000
    offload.leave()
    assert sum(x.untyped_storage().nbytes() for x in (whole, part, strided)) <= 12
    assert (whole.shape, part.shape, strided.shape) == ((1000,), (10,), (143,))
    offload.come_back()
    assert all(
        torch.equal(x.view(torch.int32), y.view(torch.int32)) for x, y in ((whole, expected), (part, expected[10:20]))
    )
    whole[14] = -1.0
    assert (part[4], strided[2]) == (-1.0, -1.0)


def test_disk_sleep_gives_the_memory_of_the_process_back(tmp_path: Path) -> None:
    def resident() -> int:
        return next(
            int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in line
        )

    tensors = [torch.ones(1 << 20) for _ in range(48)]
    offload = Offload(tensors, "disk", ALONE, tmp_path)
    awake = resident()
    offload.leave()
    asleep = resident()
    assert awake - asleep > 0.9 * 48 * 4096
    offload.come_back()
    assert all(bool((x == 1.0).all()) for x in tensors)
    assert resident() - asleep > 0.9 * 48 * 4096


def test_the_way_to_disk_and_back_takes_the_memory_of_a_piece_at_most(tmp_path: Path) -> None:
    def peak() -> int:
        return next(
            int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line
        )

    tensors = [torch.ones(1 << 20) for _ in range(48)]
    offload = Offload(tensors, "disk", ALONE, tmp_path)
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    offload.leave()
    assert peak() - before < 8 * 4096
    offload.come_back()
    assert peak() - before < 8 * 4096


@pytest.mark.parametrize("target", ["cpu", "disk"])
def test_every_call_is_refused_meanwhile_and_names_the_one_that_wakes(tmp_path: Path, target: str) -> None:
    trainer, batch = engine(), grouped_batch()
    trainer.sleep(target)
    trainer.sleep(target)
    calls = {
        "log_probs": lambda: trainer.log_probs(batch),
        "fwd_bwd": lambda: trainer.fwd_bwd(batch),
        "fwd_no_grad": lambda: trainer.fwd_no_grad(batch),
        "fwd_bwd_discarding": lambda: trainer.fwd_bwd_discarding(batch),
        "step": trainer.step,
        "save_checkpoint": lambda: trainer.save_checkpoint(str(tmp_path / "c")),
        "load_checkpoint": lambda: trainer.load_checkpoint(str(tmp_path / "c")),
        "export_model": lambda: trainer.export_model(str(tmp_path / "c")),
        "weight_norm": trainer.weight_norm,
        "gather_weights": trainer.gather_weights,
        "gather_training": trainer.gather_training,
    }
    for name, call in calls.items():
        with pytest.raises(InputError, match=rf"the trainer is asleep; call wake_training\(\) before {name}\(\)"):
            call()
    with pytest.raises(InputError, match=rf"asleep on '{target}'; call wake_training\(\)"):
        trainer.sleep("disk" if target == "cpu" else "cpu")
    trainer.wake()
    trainer.wake()
    assert trainer.weight_norm() == engine().weight_norm()


def test_gradients_that_wait_for_a_step_keep_the_trainer_awake() -> None:
    trainer = engine()
    trainer.fwd_bwd(grouped_batch())
    with pytest.raises(InputError, match=r"call step\(\) before it"):
        trainer.sleep("cpu")
    assert not trainer.is_asleep
    assert trainer.step().metrics["step"] == 1.0


@pytest.mark.parametrize("max_file_bytes", [0, 100_000])
def test_a_full_disk_leaves_the_trainer_awake_and_whole(temporary_files: Path, max_file_bytes: int) -> None:
    trainer = engine()
    train(trainer, range(1))
    before = everything(trainer)
    with full_disk(max_file_bytes), pytest.raises(CheckpointError, match="free space or choose another folder"):
        trainer.sleep("disk")
    assert not trainer.is_asleep
    assert_untouched(trainer, before)
    assert not list(temporary_files.iterdir())
    trainer.sleep("disk")
    trainer.wake()
    assert_untouched(trainer, before)


def test_the_file_is_beside_the_checkpoints_and_may_be_deleted_by_others(tmp_path: Path) -> None:
    trainer = engine(checkpoint_path=str(tmp_path / "checkpoints"), keep_checkpoints=1)
    trainer.save_checkpoint()
    before = everything(trainer)
    trainer.sleep("disk")
    names = sorted(file.name for file in (tmp_path / "checkpoints").iterdir())
    assert len(names) == 2
    assert engine(checkpoint_path=str(tmp_path / "checkpoints")).load_checkpoint().step == 0
    for file in (tmp_path / "checkpoints").rglob("tensors.safetensors"):
        file.unlink()
    trainer.wake()
    assert_untouched(trainer, before)
    assert [file.name for file in (tmp_path / "checkpoints").iterdir()] == ["step-000000"]


def test_waking_without_memory_leaves_the_trainer_asleep_and_a_retry_works(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = engine()
    before = everything(trainer)
    trainer.sleep("cpu")
    real, left = torch.UntypedStorage.resize_, [5]

    def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        if size:
            left[0] -= 1
            if left[0] < 0:
                raise torch.OutOfMemoryError("no memory")
        return real(storage, size)

    with monkeypatch.context() as patched:
        patched.setattr(torch.UntypedStorage, "resize_", resize)
        with pytest.raises(torch.OutOfMemoryError):
            trainer.wake()
    assert trainer.is_asleep
    assert storages(trainer) == 0
    trainer.wake()
    assert_untouched(trainer, before)


@pytest.fixture
def folder_of_a_model(tmp_path: Path) -> Iterator[Path]:
    """A saved model: loading maps its file."""
    load_model("tiny-random").save_pretrained(tmp_path / "model")
    yield tmp_path / "model"


def test_a_model_that_was_loaded_from_a_folder_sleeps_on_disk(folder_of_a_model: Path) -> None:
    trainer, whole = (TorchTrainEngine(config(model=str(folder_of_a_model))) for _ in range(2))
    trainer.sleep("disk")
    trainer.wake()
    assert train(trainer, range(2)) == train(whole, range(2))


def test_sleeping_on_the_cpu_says_that_it_frees_nothing_there(caplog: pytest.LogCaptureFixture) -> None:
    engine().sleep("cpu")
    assert "frees nothing: the trainer is in CPU memory; use 'disk'" in caplog.text


def test_a_file_that_was_cut_while_the_trainer_slept_leaves_it_asleep(temporary_files: Path) -> None:
    trainer = engine()
    trainer.sleep("disk")
    os.truncate(next(temporary_files.rglob("tensors.safetensors")), 1000)
    with pytest.raises(CheckpointError, match=r"tensors\.safetensors was cut while the trainer slept"):
        trainer.wake()
    assert trainer.is_asleep
    with pytest.raises(InputError, match="wake_training"):
        trainer.step()


@pytest.mark.gpu
@pytest.mark.parametrize("target", ["cpu", "disk"])
def test_a_sleeping_trainer_leaves_the_gpu(target: str) -> None:
    trainer = engine(device="cuda")
    train(trainer, range(1))
    before, held = everything(trainer), storages(trainer)
    awake = torch.cuda.memory_allocated()
    trainer.sleep(target)
    assert awake - torch.cuda.memory_allocated() >= 0.9 * held
    trainer.wake()
    assert_untouched(trainer, before)
