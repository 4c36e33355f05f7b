"""The engine of a working process, and its calls as they travel: requests and responses of the protocol."""

from __future__ import annotations

import dataclasses
import datetime
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from arctic_platform.rl.config import ArcticRLClientConfig
from arctic_platform.rl.engines.base import Progress, SampleEngine, TrainEngine
from arctic_platform.rl.engines.models import load_model
from arctic_platform.rl.engines.torch_sample import TorchSampleEngine
from arctic_platform.rl.engines.torch_train import TorchTrainEngine
from arctic_platform.rl.engines.world import ALONE, World
from arctic_platform.rl.protocol import (
    ExportModelRequest,
    FwdBwdRequest,
    GenerateRequest,
    LoadCheckpointRequest,
    LogProbsRequest,
    PathResponse,
    Response,
    RolloutBatch,
    SaveCheckpointRequest,
    SleepTrainingRequest,
    WeightNormResponse,
)
from arctic_platform.rl.weight_sync.session import SyncOffer
from arctic_platform.rl.workers.channel import Packet
from arctic_platform.rl.workers.job import Job
from arctic_platform.rl.workers.syncing import EngineReceiver, EngineSender

COLLECTIVE_SECONDS = 1800.0
"""Ranks that wait for each other for so long have lost step; one that died or fell silent is noticed by the server."""

Answered = tuple[Response | None, Any]
"""A response, and JSON beside it."""


def build(job: Job, host: str) -> TrainCalls | SampleCalls:
    """The engine that a job asks for; host: where others reach this process. Raises what building it raises."""
    torch.set_num_threads(job.num_threads or _fair_share())
    if job.role == "sample":
        return SampleCalls(build_sampler(job.config), job.config, host)
    return TrainCalls(build_trainer(job.config, _meet(job)))


def build_trainer(config: ArcticRLClientConfig, world: World) -> TorchTrainEngine:
    """The training engine of one rank; those that need more than torch are imported only where they are wanted."""
    if config.rank_engine == "fsdp":
        from arctic_platform.rl.engines.fsdp_train import FsdpTrainEngine

        return FsdpTrainEngine(config, world=world)
    if config.rank_engine == "deepspeed":
        from arctic_platform.rl.engines.deepspeed_train import DeepSpeedTrainEngine

        return DeepSpeedTrainEngine(config, world=world)
    return TorchTrainEngine(config)


def build_sampler(config: ArcticRLClientConfig) -> SampleEngine:
    """The sampling engine, with the first weights of the model."""
    model = load_model(config.model, getattr(torch, config.dtype), config.device, seed=config.seed)
    return sampler_of(config, model, owns_model=True)


def sampler_of(config: ArcticRLClientConfig, model: PreTrainedModel, *, owns_model: bool) -> SampleEngine:
    """The sampling engine that a config asks for, around a loaded model; owns_model: it need not copy it."""
    if config.sampling_engine == "vllm":
        from arctic_platform.rl.engines.vllm_sample import VllmSampleEngine

        return VllmSampleEngine(config, model)
    return TorchSampleEngine(config, model, owns_model=owns_model)


def _fair_share() -> int:
    """Threads of a rank that torchrun started."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)


def _meet(job: Job) -> World:
    """Join the other ranks' process group; a plain engine that is alone needs none."""
    os.environ.update(RANK=str(job.rank), WORLD_SIZE=str(job.size), LOCAL_RANK="0")
    if job.store is None:
        return ALONE
    host, port = job.store
    seconds = datetime.timedelta(seconds=job.config.ranks.start_seconds)
    store = dist.TCPStore(host, port, is_master=False, timeout=seconds)
    is_cuda = job.config.device.startswith("cuda")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
        store=store,
        rank=job.rank,
        world_size=job.size,
        timeout=datetime.timedelta(seconds=COLLECTIVE_SECONDS),
    )
    return World.of_processes(COLLECTIVE_SECONDS)


class TrainCalls:
    """Calls of a training engine; every rank gets each of them, with its own rows."""

    def __init__(self, engine: TorchTrainEngine) -> None:
        self.engine = engine
        self._sender = EngineSender(engine)
        passes = engine.passes
        self._sizes = {
            "shape": None if passes.shape is None else dataclasses.asdict(passes.shape),
            "limits": {"vocab_size": passes.head.vocab_size, "max_row_len": passes.max_row_len},
        }

    def state(self) -> dict[str, Any]:
        """What the server's side of the engine knows without asking."""
        engine = self.engine
        return {
            "engine": type(engine).__name__,
            "num_steps": engine.num_steps,
            "version": engine.version,
            "num_parameters": engine.num_parameters,
            "has_pending_gradients": engine.has_pending_gradients,
            "is_asleep": engine.is_asleep,
            **self._sizes,
        }

    def run(self, name: str, packet: Packet, progress: Callable[[], Progress]) -> Answered:
        """Execute one call. Raises what the engine raises."""
        if name == "send_weights":
            self._sender.send_weights(SyncOffer.from_json(packet.header["offer"]))
            return None, None
        return _TRAIN_CALLS[name](self.engine, packet)

    def close(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()


def _rows(batch: RolloutBatch, packet: Packet) -> Any:
    """A rank that got no rows is told so by none."""
    return None if packet.header["is_without_rows"] else batch


def _log_probs(engine: TrainEngine, packet: Packet) -> Answered:
    request = packet.message(LogProbsRequest)
    batch = _rows(request.batch, packet)
    return engine.log_probs(batch, request.processing, reference=request.reference), None


def _pass_call(name: str) -> Callable[[TrainEngine, Packet], Answered]:
    def run(engine: TrainEngine, packet: Packet) -> Answered:
        request = packet.message(FwdBwdRequest)
        return getattr(engine, name)(_rows(request.batch, packet), request.processing), None

    return run


def _step(engine: TrainEngine, packet: Packet) -> Answered:
    return engine.step(), None


def _save_checkpoint(engine: TrainEngine, packet: Packet) -> Answered:
    request = packet.message(SaveCheckpointRequest)
    return engine.save_checkpoint(request.path, request.client_state), None


def _load_checkpoint(engine: TrainEngine, packet: Packet) -> Answered:
    return engine.load_checkpoint(packet.message(LoadCheckpointRequest).path), None


def _export_model(engine: TrainEngine, packet: Packet) -> Answered:
    return PathResponse(path=engine.export_model(packet.message(ExportModelRequest).path)), None


def _weight_norm(engine: TrainEngine, packet: Packet) -> Answered:
    return WeightNormResponse(norm=engine.weight_norm()), None


def _sleep(engine: TrainEngine, packet: Packet) -> Answered:
    engine.sleep(packet.message(SleepTrainingRequest).target)
    return None, None


def _wake(engine: TrainEngine, packet: Packet) -> Answered:
    engine.wake()
    return None, None


_TRAIN_CALLS: dict[str, Callable[[TorchTrainEngine, Packet], Answered]] = {
    "log_probs": _log_probs,
    "fwd_bwd": _pass_call("fwd_bwd"),
    "fwd_no_grad": _pass_call("fwd_no_grad"),
    "fwd_bwd_discarding": _pass_call("fwd_bwd_discarding"),
    "step": _step,
    "save_checkpoint": _save_checkpoint,
    "load_checkpoint": _load_checkpoint,
    "export_model": _export_model,
    "weight_norm": _weight_norm,
    "sleep": _sleep,
    "wake": _wake,
}


class SampleCalls:
    """Calls of a sampling engine."""

    def __init__(self, engine: SampleEngine, config: ArcticRLClientConfig, host: str) -> None:
        self.engine = engine
        self._receiver = EngineReceiver(config, engine, host=host)

    def state(self) -> dict[str, Any]:
        """What the server's side of the engine knows without asking."""
        engine = self.engine
        return {
            "engine": type(engine).__name__,
            "version": engine.version,
            "num_parameters": engine.num_parameters,
            "is_asleep": engine.is_asleep,
            "is_complete": engine.is_complete,
        }

    def run(self, name: str, packet: Packet, progress: Callable[[], Progress]) -> Answered:
        """Execute one call. Raises what the engine raises, `serve.Stopped` for one that nobody waits for."""
        if name == "generate":
            request = packet.message(GenerateRequest)
            share = packet.header["share"]
            return self.engine.generate(
                request.prompts, request.sampling_params, share=share, progress=progress()
            ), None
        if name == "open_offer":
            options = {key: packet.header[key] for key in ("low_memory", "cuda_ipc")}
            return None, self._receiver.open_offer(**options).to_json()
        if name == "receive":
            return None, self._receiver.receive().to_json()
        _SAMPLE_CALLS[name](self.engine, packet.header)
        return None, None

    def close(self) -> None:
        """End what runs beside the engine."""
        self._receiver.close()
        self.engine.close()


_SAMPLE_CALLS: dict[str, Callable[[SampleEngine, dict[str, Any]], None]] = {
    "begin_overwrite": lambda engine, header: engine.begin_overwrite(),
    "adopt": lambda engine, header: engine.adopt(header["version"]),
    "sleep": lambda engine, header: engine.sleep(header["level"]),
    "wake": lambda engine, header: engine.wake(),
    "reset_prefix_cache": lambda engine, header: engine.reset_prefix_cache(),
}
