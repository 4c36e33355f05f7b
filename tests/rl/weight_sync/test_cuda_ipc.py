"""Handles of GPU memory: their fields without a GPU, a whole sync with one."""

import json
import multiprocessing as mp
from typing import Any

import pytest
import torch

from arctic_platform.errors import WeightSyncError
from arctic_platform.rl.weight_sync.cuda_ipc import CudaHandle, device_index
from arctic_platform.rl.weight_sync.session import SyncOffer, send_weights
from tests.rl.weight_sync.pairs import DictSink, manifest, receiver, tensors

REDUCED = (
    torch.Tensor, torch.Size([4096]), (1,), 64, torch.storage.TypedStorage, torch.uint8, 3, b"\x00handle\xff", 8192,
    512, False, b"counter\x80", 7, b"event\x00", True,
)  # fmt: skip
"""What torch reduces a slot of 4096 bytes to, with bytes that are no text."""


def test_fields_survive_json_and_become_the_arguments_again_on_the_receivers_own_device() -> None:
    handle = CudaHandle.of_reduction(REDUCED, "GPU-1")
    again = CudaHandle.from_json(json.loads(json.dumps(handle.to_json())))
    assert again == handle
    assert again.arguments(0) == (*REDUCED[:6], 0, *REDUCED[7:])


@pytest.mark.parametrize(
    "change",
    [{"num_bytes": "4096"}, {"event_sync_required": 1}, {"storage_handle": None}, {"extra": 1}, {"offset": 1.5}],
)
def test_other_fields_or_types_are_refused(change: dict[str, Any]) -> None:
    fields = CudaHandle.of_reduction(REDUCED, "GPU-1").to_json()
    with pytest.raises(WeightSyncError, match="a CUDA handle has the fields device_uuid"):
        CudaHandle.from_json(fields | change)


def test_gpu_goes_by_its_uuid_and_one_that_is_not_seen_is_named() -> None:
    assert device_index(["GPU-b", "GPU-b"], ["GPU-a", "GPU-b"]) == 1
    with pytest.raises(WeightSyncError, match=r"GPU-c is not among those that the receiver sees .GPU-a, GPU-b."):
        device_index(["GPU-c"], ["GPU-a", "GPU-b"])
    with pytest.raises(WeightSyncError, match=r"not among those that the receiver sees .none."):
        device_index(["GPU-c"], [])


def be_synced(pipe: Any, mechanism: str, count: int) -> None:
    device = torch.device("cuda", torch.cuda.device_count() - 1 if mechanism == "collective" else 0)
    sink = DictSink({name: one.to(device) for name, one in tensors(0).items()})
    side = receiver(sink, mechanism, timeout_seconds=60)
    for _ in range(count):
        pipe.send(side.offer.to_json())
        side.run()
        pipe.send(({name: one.cpu() for name, one in sink.held.items()}, torch.cuda.memory_reserved(device)))


@pytest.mark.gpu
@pytest.mark.parametrize("mechanism", ["cuda_ipc", "collective", "shared_memory", "stream"])
def test_fifty_syncs_between_processes_on_gpus_pin_no_memory(mechanism: str) -> None:
    if mechanism == "collective" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL wants a GPU for each side")
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=be_synced, args=(theirs, mechanism, 50))
    process.start()
    weights = {name: one.cuda() for name, one in tensors(1).items()}
    reserved = []
    for version in range(50):
        offer = SyncOffer.from_json(ours.recv())
        send_weights(offer, manifest(weights), iter(weights.items()), version=version)
        held, theirs_reserved = ours.recv()
        assert all(torch.equal(held[name], one.cpu()) for name, one in weights.items())
        reserved.append((torch.cuda.memory_reserved(), theirs_reserved))
    process.join(30)
    assert reserved[-1] == reserved[5]
