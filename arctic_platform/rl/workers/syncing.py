"""A weight sync between two processes, as the server arranges it.

receiver (sampler's process)   opens an offer, and waits for who brings its token
sender (ranks, or the server)  gets the offer, and sends; both at the same time
either fails                   the other is released, the caller gets the reason, a later sync starts from nothing
"""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol, cast

import torch
from torch import Tensor

from arctic_platform.errors import WeightSyncError, WorkerLostError
from arctic_platform.rl.config import ArcticRLClientConfig
from arctic_platform.rl.engines.base import SampleEngine
from arctic_platform.rl.engines.torch_sample import TorchSampleEngine
from arctic_platform.rl.engines.torch_train import TorchTrainEngine
from arctic_platform.rl.weight_sync.base import Manifest, SyncReport, manifest_of
from arctic_platform.rl.weight_sync.delta import DeltaBase
from arctic_platform.rl.weight_sync.session import (
    ModelSink,
    Receiver,
    SyncOffer,
    WeightSink,
    follow,
    open_receiver,
    refuse,
    send_weights,
)
from arctic_platform.rl.weight_sync.vllm import Receiver as VllmReceiver
from arctic_platform.rl.weight_sync.vllm import load_weights


class Sends(Protocol):
    """The trainer's side."""

    def send_weights(self, offer: SyncOffer) -> None:
        """Send the weights to who made the offer."""


class Receives(Protocol):
    """The sampler's side."""

    def open_offer(self, *, low_memory: bool, cuda_ipc: bool) -> SyncOffer:
        """For one sync."""

    def receive(self) -> SyncReport:
        """Wait for the sender and take its weights."""


def sync_between(sender: Sends, receiver: Receives, *, low_memory: bool, cuda_ipc: bool) -> SyncReport:
    """Make the receiver's weights the sender's.

    Raises WorkerLostError where a process is gone, WeightSyncError with the reason of whichever side failed.
    """
    offer = receiver.open_offer(low_memory=low_memory, cuda_ipc=cuda_ipc)
    with ThreadPoolExecutor(1, thread_name_prefix="arctic-receive") as threads:
        receiving = threads.submit(receiver.receive)
        sending: BaseException | None = None
        try:
            sender.send_weights(offer)
        except BaseException as error:
            sending = error
            with contextlib.suppress(WeightSyncError):  # where it was reached, it knows already
                refuse(offer, f"the sender failed: {error}")
        faults = [error for error in (receiving.exception(), sending) if error is not None]
    if not faults:
        return receiving.result()
    raise next((error for error in faults if isinstance(error, WorkerLostError)), faults[-1])


class EngineSender:
    """Sends the weights of a training engine in this process, of which every rank calls this at the same time.

    Keeps what it sent last, where the receiver asks for changes only.
    """

    def __init__(self, engine: TorchTrainEngine) -> None:
        self._engine = engine
        self._base = DeltaBase()

    def send_weights(self, offer: SyncOffer) -> None:
        """From the first rank; the others take part in gathering, and raise what it raises."""
        engine, fault = self._engine, None
        weights = engine.gather_weights()
        try:
            if engine.world.is_first:
                send_weights(offer, engine.weight_specs(), weights, version=engine.version, base=self._base)
            else:
                follow(weights)
        except Exception as error:
            fault = error
        with engine.world.together():
            if fault is not None:
                raise fault


class EngineReceiver:
    """Takes weights into a sampling engine in this process. host: where senders reach it."""

    def __init__(self, config: ArcticRLClientConfig, engine: SampleEngine, *, host: str) -> None:
        self._engine = engine
        self._host = host
        self._config = config
        self._receivers: dict[bool, Receiver] = {}
        self._sink: WeightSink
        if config.sampling_engine == "vllm":
            self._sink = _StagedSink(cast(VllmReceiver, engine))
        else:
            assert isinstance(engine, TorchSampleEngine)
            self._sink = ModelSink(engine.model, engine.begin_overwrite)
        self._is_cuda_ipc = False

    def open_offer(self, *, low_memory: bool, cuda_ipc: bool) -> SyncOffer:
        """For one sync. vLLM takes weights layer by layer, from a copy that is filled first."""
        settings = self._config.weight_sync
        self._is_cuda_ipc = cuda_ipc
        if cuda_ipc not in self._receivers:
            chosen = settings.model_copy(update={"mechanism": "cuda_ipc"}) if cuda_ipc else settings
            self._receivers[cuda_ipc] = open_receiver(chosen, self._sink, host=self._host)
        is_staged = isinstance(self._sink, _StagedSink)
        return self._receivers[cuda_ipc].new_offer(low_memory=low_memory or is_staged)

    def receive(self) -> SyncReport:
        """Wait for the sender of the last offer."""
        report = self._receivers[self._is_cuda_ipc].run()
        if isinstance(self._sink, _StagedSink):
            self._sink.load()
            report = replace(report, mechanism=f"vllm-{report.mechanism.removesuffix('-low-memory')}")
        return report

    def free_memory(self) -> None:
        """Give second copies back."""
        for receiver in self._receivers.values():
            receiver.free_memory()

    def close(self) -> None:
        """Nothing listens any more."""
        for receiver in self._receivers.values():
            receiver.close()


class _StagedSink:
    """A copy of what vLLM holds, in CPU memory; vLLM gets it once it is whole."""

    def __init__(self, engine: VllmReceiver) -> None:
        self._engine = engine
        self._tensors: dict[str, Tensor] = {}

    def contents(self) -> tuple[Manifest, dict[str, Tensor]]:
        """Of the model that vLLM was built for, and the copy."""
        manifest = manifest_of(self._engine.model)
        if not self._tensors:
            self._tensors = {
                name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for name, spec in manifest.specs.items()
            }
        return manifest, self._tensors

    def begin_overwrite(self) -> None:
        """The copy is of no use to anybody."""

    def load(self) -> None:
        """Hand the copy to vLLM, and give its memory back. Raises WeightSyncError."""
        tensors, self._tensors = self._tensors, {}
        load_weights(manifest_of(self._engine.model), tensors.items(), self._engine)
