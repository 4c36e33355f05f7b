"""The calls, written once: requests in, responses out, over one training and one sampling engine.

One caller at a time: the job that owns a backend gives it one request after the other (`service.py`), knows which it
has seen before, and keeps the answers. A request that raised changed nothing.
"""

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import torch

from arctic_platform.errors import ConfigError, InputError
from arctic_platform.rl.config import ArcticRLClientConfig, Kind
from arctic_platform.rl.engines.base import Progress, SampleEngine, TrainEngine
from arctic_platform.rl.engines.models import fetch_weights, load_model
from arctic_platform.rl.engines.torch_sample import TorchSampleEngine
from arctic_platform.rl.engines.torch_train import TorchTrainEngine
from arctic_platform.rl.protocol import (
    CheckpointResponse,
    EmptyResponse,
    ExportModelRequest,
    FwdBwdRequest,
    FwdBwdResponse,
    FwdNoGradRequest,
    GenerateRequest,
    GenerateResponse,
    LoadCheckpointRequest,
    LogProbsRequest,
    LogProbsResponse,
    PathResponse,
    Request,
    ResetPrefixCacheRequest,
    Response,
    SamplingParams,
    SaveCheckpointRequest,
    SideBySideRequest,
    SideBySideResponse,
    SleepSamplingRequest,
    SleepTrainingRequest,
    StatusRequest,
    StatusResponse,
    StepRequest,
    StepResponse,
    SyncResponse,
    SyncWeightsRequest,
    WakeSamplingRequest,
    WakeTrainingRequest,
    WeightNormRequest,
    WeightNormResponse,
)
from arctic_platform.rl.server.gate import GATE
from arctic_platform.rl.weight_sync.base import SyncReport
from arctic_platform.rl.weight_sync.local import copy_weights
from arctic_platform.rl.weight_sync.vllm import Receiver, load_weights
from arctic_platform.rl.workers.engine_calls import sampler_of
from arctic_platform.rl.workers.group import RankGroup
from arctic_platform.rl.workers.remote import RemoteEngine
from arctic_platform.rl.workers.sampler import SampleWorker
from arctic_platform.rl.workers.syncing import EngineReceiver, EngineSender, Receives, Sends, sync_between
from arctic_platform.rl.workers.watch import OnWait

TRAIN_OFF = "off: zorro_train.enable is false"
INFERENCE_OFF = "off: zorro_inference.enable is false"
NOT_LOADED = "off: this job's kinds leave it out"


class Backend:
    """Executes requests. An engine that is none was not asked for, and calls that need it are refused."""

    def __init__(
        self,
        config: ArcticRLClientConfig,
        train: TrainEngine | None,
        sample: SampleEngine | None,
        *,
        kinds: tuple[Kind, ...] | None = None,
    ) -> None:
        self.config = config
        self.kinds = config.kinds if kinds is None else kinds
        self.num_generate_calls = 0
        self._train = train
        self._sample = sample
        self._engine_receiver: EngineReceiver | None = None
        self._engine_sender: EngineSender | None = None
        self._train_effect = "on; no batch was run yet" if config.zorro_train.enable else TRAIN_OFF
        self._inference_effect = "on; nothing was sampled yet" if config.zorro_inference.enable else INFERENCE_OFF

    @property
    def train(self) -> TrainEngine:
        """The training engine. Raises InputError where none was asked for."""
        if self._train is None:
            raise InputError(f"this job does no training, its kinds are {list(self.kinds)}; add 'training' to kinds")
        return self._train

    @property
    def sample(self) -> SampleEngine:
        """The sampling engine. Raises InputError where none was asked for."""
        if self._sample is None:
            raise InputError(f"this job does no sampling, its kinds are {list(self.kinds)}; add 'sampling' to kinds")
        return self._sample

    def close(self) -> None:
        """End what the engines run beside this object; no call may follow."""
        for part in (self._engine_receiver, self._train, self._sample):
            if part is not None:
                part.close()

    @property
    def lost(self) -> str | None:
        """Which process of an engine is gone; none where all is well."""
        errors = (engine.lost for engine in (self._train, self._sample) if isinstance(engine, RemoteEngine))
        return next((str(error) for error in errors if error is not None), None)

    def handle(self, request: Request, progress: Progress | None = None) -> Response:
        """Execute one request. `progress` is called by `generate` with (finished, all) rollouts.

        Raises what the engines raise, InputError for a call that this job's kinds leave out.
        """
        if isinstance(request, GenerateRequest):
            response = self._generate(request, progress)
            self._inference_effect = _sampling_effect(response)
            return response
        handler = _HANDLERS.get(type(request))
        if handler is None:
            raise InputError(f"{type(request).__name__} is no call; the calls are in arctic_platform.rl.protocol")
        if type(request) in _TRAINING_CALLS and "training" not in self.kinds:
            raise InputError(
                f"{request.method} needs a job that trains, this one's kinds are {list(self.kinds)}; add 'training'"
            )
        response = handler(self, request)
        if isinstance(request, (LogProbsRequest, FwdBwdRequest, FwdNoGradRequest)):
            self._train_effect = _training_effect(self.config, request, response)
        return response

    def _generate(self, request: GenerateRequest, progress: Progress | None) -> GenerateResponse:
        """Without a seed of the caller, each call gets its own from the configured one and the number of the call."""
        params = self._seeded(request.sampling_params)
        response = self.sample.generate(request.prompts, params, share=None, progress=progress)
        self.num_generate_calls += 1
        return response

    def _seeded(self, params: SamplingParams) -> SamplingParams:
        if params.seed is not None:
            return params
        return params.model_copy(update={"seed": (self.config.seed << 32) + self.num_generate_calls})

    def _log_probs(self, request: LogProbsRequest) -> LogProbsResponse:
        return self.train.log_probs(request.batch, request.processing, reference=request.reference)

    def _fwd_bwd(self, request: FwdBwdRequest) -> FwdBwdResponse:
        return self.train.fwd_bwd(request.batch, request.processing)

    def _fwd_no_grad(self, request: FwdNoGradRequest) -> FwdBwdResponse:
        return self.train.fwd_no_grad(request.batch, request.processing)

    def _step(self, request: StepRequest) -> StepResponse:
        return self.train.step()

    def _sync_weights(self, request: SyncWeightsRequest) -> SyncResponse:
        """Into a sampler whose process was lost, after starting it anew."""
        config = self.config
        cuda_ipc = config.cuda_ipc_weight_sync if request.cuda_ipc is None else request.cuda_ipc
        if cuda_ipc and not (self._is_apart and config.device.startswith("cuda")):
            raise ConfigError(
                "sync_weights(cuda_ipc=True) needs trainer and sampler in two processes with CUDA (colocate=false, or "
                "ranks): leave cuda_ipc out"
            )
        low_memory = config.low_memory_weight_sync if request.low_memory is None else request.low_memory
        if low_memory and self._is_apart and config.sampling_engine == "vllm":
            raise ConfigError(
                "sync_weights(low_memory=True) has no effect on a vLLM apart from the trainer, which takes its weights "
                "from one copy, once that is whole; leave low_memory out"
            )
        self._revive_sampler()
        return self._sync(low_memory, cuda_ipc=cuda_ipc)

    @property
    def _is_apart(self) -> bool:
        """Whether trainer and sampler are in different processes."""
        return isinstance(self._train, RankGroup) or isinstance(self._sample, SampleWorker)

    def _revive_sampler(self) -> None:
        if isinstance(self._sample, SampleWorker) and self._sample.lost is not None:
            self._sample.start_anew()

    def _sync(self, low_memory: bool, *, cuda_ipc: bool) -> SyncResponse:
        started = time.perf_counter()
        if self.train.is_asleep:
            raise InputError("the trainer is asleep; call wake_training() before sync_weights()")
        if self.sample.is_asleep:
            raise InputError("the sampler is asleep; call wake_sampling() before sync_weights()")
        if self._is_apart:
            report = sync_between(self._sender(), self._receiver(), low_memory=low_memory, cuda_ipc=cuda_ipc)
        else:
            report = self._copy_weights(low_memory)
        self.sample.adopt(self.train.version)
        return SyncResponse(
            weight_version=self.sample.version,
            num_tensors=report.num_tensors,
            num_bytes=report.num_bytes,
            seconds=time.perf_counter() - started,
            mechanism=report.mechanism,
        )

    def _sender(self) -> Sends:
        train = self.train
        if isinstance(train, RankGroup):
            return train
        if self._engine_sender is None:
            self._engine_sender = EngineSender(cast(TorchTrainEngine, train))
        return self._engine_sender

    def _receiver(self) -> Receives:
        """The sampler's process, or, for ranks and a sampler in this one, what keeps its second copy between syncs."""
        if isinstance(self._sample, SampleWorker):
            return self._sample
        if self._engine_receiver is None:
            assert isinstance(self._train, RankGroup)
            self._engine_receiver = EngineReceiver(self.config, self.sample, host=self._train.host)
        return self._engine_receiver

    def _copy_weights(self, low_memory: bool) -> SyncReport:
        """Into the embedded sampler's model, or into vLLM, which always takes them layer by layer."""
        train = cast(TorchTrainEngine, self.train)
        specs, weights = train.weight_specs(), train.gather_weights()
        if self.config.sampling_engine == "vllm":
            return load_weights(specs, weights, cast(Receiver, self.sample))
        sample = cast(TorchSampleEngine, self.sample)
        return copy_weights(specs, weights, sample.model, low_memory=low_memory, on_overwrite=sample.begin_overwrite)

    def _save_checkpoint(self, request: SaveCheckpointRequest) -> CheckpointResponse:
        state = {"client": request.client_state, "num_generate_calls": self.num_generate_calls}
        return _with_client_state(self.train.save_checkpoint(request.path, state))

    def _load_checkpoint(self, request: LoadCheckpointRequest) -> CheckpointResponse:
        """The sampler gets the loaded weights as well; one that is asleep needs a sync after its waking.

        Cached prefixes are forgotten: an equal version, counted before it was loaded, may be of other weights.
        """
        response = self.train.load_checkpoint(request.path)
        self.num_generate_calls = response.client_state.get("num_generate_calls", 0)
        if self._sample is None:
            return _with_client_state(response)
        self._revive_sampler()
        if self._sample.is_asleep:
            self._sample.begin_overwrite()
        else:
            self._sample.reset_prefix_cache()
            self._sync(self.config.low_memory_weight_sync, cuda_ipc=self.config.cuda_ipc_weight_sync)
        return _with_client_state(response)

    def _export_model(self, request: ExportModelRequest) -> PathResponse:
        return PathResponse(path=self.train.export_model(request.path))

    def _sleep_sampling(self, request: SleepSamplingRequest) -> EmptyResponse:
        self.sample.sleep(request.level)
        return EmptyResponse()

    def _wake_sampling(self, request: WakeSamplingRequest) -> EmptyResponse:
        self.sample.wake()
        return EmptyResponse()

    def _sleep_training(self, request: SleepTrainingRequest) -> EmptyResponse:
        self.train.sleep(request.target)
        return EmptyResponse()

    def _wake_training(self, request: WakeTrainingRequest) -> EmptyResponse:
        self.train.wake()
        return EmptyResponse()

    def _reset_prefix_cache(self, request: ResetPrefixCacheRequest) -> EmptyResponse:
        self.sample.reset_prefix_cache()
        return EmptyResponse()

    def _weight_norm(self, request: WeightNormRequest) -> WeightNormResponse:
        return WeightNormResponse(norm=self.train.weight_norm())

    def _status(self, request: StatusRequest) -> StatusResponse:
        return self.status()

    def status(self) -> StatusResponse:
        """What is loaded and in effect; cheap, it looks at no weight."""
        train, sample, config = self._train, self._sample, self.config
        loaded = train or sample
        assert loaded is not None
        return StatusResponse(
            model=config.model,
            kinds=self.kinds,
            num_parameters=loaded.num_parameters,
            num_ranks=config.ranks.num_ranks if train else 0,
            rank_pids=tuple(train.pids) if isinstance(train, RankGroup) else (),
            sampler_pid=sample.pid if isinstance(sample, SampleWorker) else None,
            dtype=config.dtype,
            device=config.device,
            training_engine=_name_of(train),
            sampling_engine=_name_of(sample),
            step=train.num_steps if train else None,
            trainer_version=train.version if train else None,
            sampler_version=sample.version if sample else None,
            is_sampler_current=sample is not None
            and sample.is_complete
            and (train is None or sample.version == train.version),
            is_sampler_asleep=sample is not None and sample.is_asleep,
            is_trainer_asleep=train is not None and train.is_asleep,
            has_pending_gradients=train is not None and train.has_pending_gradients,
            zorro_train=config.zorro_train.enable,
            zorro_train_effect=self._train_effect if train else NOT_LOADED,
            zorro_inference=config.zorro_inference.enable,
            zorro_inference_effect=self._inference_effect if sample else NOT_LOADED,
            max_rollouts=config.zorro_train.max_rollouts,
            max_token_len=config.zorro_train.max_token_len,
            max_rows=config.zorro_train.max_rows,
            lost=self.lost,
        )

    def _side_by_side(self, request: SideBySideRequest) -> SideBySideResponse:
        """On, off, on, off ...; medians. Weights, gradients, optimizer and seeds stay as they are."""
        params = self._seeded(request.sampling_params)
        runs: dict[str, list[float]] = {}
        for _ in range(request.repeats):
            for name, share in (("on", True), ("off", False)):
                processing = request.processing.model_copy(update={"zorro": share})
                started = time.perf_counter()
                trained = self.train.fwd_bwd_discarding(request.batch, processing)
                half = time.perf_counter()
                sampled = self.sample.generate(request.prompts, params, share=share, progress=None)
                _note(runs, f"train_seconds_{name}", half - started)
                _note(runs, f"sample_seconds_{name}", time.perf_counter() - half)
                _note(runs, f"train_tokens_{name}", trained.metrics["tokens_computed"])
                _note(runs, f"train_loss_{name}", trained.metrics["loss"])
                _note(runs, f"sample_tokens_{name}", sampled.metrics["tokens_computed"])
        medians = {name: statistics.median(values) for name, values in runs.items()}
        return SideBySideResponse(
            repeats=request.repeats,
            train_ratio=medians["train_seconds_off"] / medians["train_seconds_on"],
            sample_ratio=medians["sample_seconds_off"] / medians["sample_seconds_on"],
            **medians,
        )


_HANDLERS: dict[type[Request], Callable[[Backend, Any], Response]] = {
    LogProbsRequest: Backend._log_probs,
    FwdBwdRequest: Backend._fwd_bwd,
    FwdNoGradRequest: Backend._fwd_no_grad,
    StepRequest: Backend._step,
    SyncWeightsRequest: Backend._sync_weights,
    SaveCheckpointRequest: Backend._save_checkpoint,
    LoadCheckpointRequest: Backend._load_checkpoint,
    ExportModelRequest: Backend._export_model,
    SleepSamplingRequest: Backend._sleep_sampling,
    WakeSamplingRequest: Backend._wake_sampling,
    SleepTrainingRequest: Backend._sleep_training,
    WakeTrainingRequest: Backend._wake_training,
    ResetPrefixCacheRequest: Backend._reset_prefix_cache,
    WeightNormRequest: Backend._weight_norm,
    StatusRequest: Backend._status,
    SideBySideRequest: Backend._side_by_side,
}


_TRAINING_CALLS = (
    FwdBwdRequest,
    FwdNoGradRequest,
    StepRequest,
    SyncWeightsRequest,
    SaveCheckpointRequest,
    LoadCheckpointRequest,
    ExportModelRequest,
    WeightNormRequest,
    SideBySideRequest,
)


def create_backend(
    config: ArcticRLClientConfig, kinds: tuple[Kind, ...] | None = None, *, on_wait: OnWait | None = None
) -> Backend:
    """Load the model once and build the engines that `kinds` ask for around it (none: the config's).

    Raises ConfigError when the model cannot be loaded. A download goes on beside other jobs' calls, loading does not.
    """
    kinds = config.kinds if kinds is None else kinds
    config = config.model_copy(update={"kinds": kinds})
    fetch_weights(config.model)
    trains, samples = not {"training", "log_prob"}.isdisjoint(kinds), "sampling" in kinds
    train, sample = _start_processes(config, trains=trains and config.trains_in_ranks, samples=samples, on_wait=on_wait)
    try:
        if (trains and train is None) or (samples and sample is None):
            with GATE.load():
                train, sample = _build_here(config, train, sample, trains=trains, samples=samples)
        return Backend(config, train, sample, kinds=kinds)
    except BaseException:
        for engine in (train, sample):
            if engine is not None:
                engine.close()
        raise


def _start_processes(
    config: ArcticRLClientConfig, *, trains: bool, samples: bool, on_wait: OnWait | None
) -> tuple[RankGroup | None, SampleWorker | None]:
    """The engines that run in processes of their own, started side by side."""
    with ThreadPoolExecutor(2) as threads:
        ranks = threads.submit(RankGroup, config, on_wait=on_wait) if trains else None
        sampler = threads.submit(SampleWorker, config, on_wait=on_wait) if samples and not config.colocate else None
    started = [future for future in (ranks, sampler) if future is not None]
    faults = [error for future in started if (error := future.exception()) is not None]
    if faults:
        for future in started:
            if future.exception() is None:
                future.result().close()
        raise faults[0]
    return ranks.result() if ranks else None, sampler.result() if sampler else None


def _build_here(
    config: ArcticRLClientConfig,
    train: TrainEngine | None,
    sample: SampleEngine | None,
    *,
    trains: bool,
    samples: bool,
) -> tuple[TrainEngine | None, SampleEngine | None]:
    """What is not in a process of its own yet, in this one, around one loaded model."""
    model = load_model(config.model, getattr(torch, config.dtype), config.device, seed=config.seed)
    is_shared = trains and train is None
    if samples and sample is None:
        sample = sampler_of(config, model, owns_model=not is_shared)
    if is_shared:
        train = TorchTrainEngine(config, model)
    return train, sample


def _name_of(engine: TrainEngine | SampleEngine | None) -> str | None:
    """Class of an engine, wherever it runs."""
    if engine is None:
        return None
    return engine.engine if isinstance(engine, RemoteEngine) else type(engine).__name__


def _training_effect(config: ArcticRLClientConfig, request: Any, response: Any) -> str:
    """Whether the batch was shared, and why not."""
    computed, naive = int(response.metrics["tokens_computed"]), int(response.metrics["tokens_naive"])
    if response.metrics["zorro_active"]:
        return f"on: the last batch computed {computed} tokens of {naive}"
    if request.processing.zorro is False:
        return "off in the last call, which asked for zorro=false"
    if request.processing.zorro is None and not config.zorro_train.enable:
        return TRAIN_OFF
    least = config.zorro_train.min_saving
    return f"off in the last batch: sharing would save less than zorro_train.min_saving={least:g} of its {naive} tokens"


def _sampling_effect(response: GenerateResponse) -> str:
    computed, naive = response.metrics.get("tokens_computed", 0), response.metrics.get("tokens_naive", 0)
    how = "on" if computed < naive else "nothing was shared"
    return f"{how}: the last call computed {computed:.0f} tokens of {naive:.0f}"


def _with_client_state(response: CheckpointResponse) -> CheckpointResponse:
    """The caller's own part of the saved state."""
    return response.model_copy(update={"client_state": response.client_state.get("client", {})})


def _note(runs: dict[str, list[float]], name: str, value: float) -> None:
    runs.setdefault(name, []).append(value)
