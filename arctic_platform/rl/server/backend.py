"""The calls, written once: requests in, responses out, over one training and one sampling engine.

Calls are executed one at a time, in the order in which they arrive. A request whose id was answered before gets the
same answer again and is not executed twice; one that failed changed nothing and may be sent again.
"""

import statistics
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from arctic_platform.errors import ConfigError, InputError
from arctic_platform.rl.config import ArcticRLClientConfig
from arctic_platform.rl.engines.base import Progress, SampleEngine, TrainEngine
from arctic_platform.rl.engines.models import load_model
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
    StatusRequest,
    StatusResponse,
    StepRequest,
    StepResponse,
    SyncResponse,
    SyncWeightsRequest,
    WakeSamplingRequest,
    WeightNormRequest,
    WeightNormResponse,
)
from arctic_platform.rl.weight_sync.local import sync_local

ANSWERS_KEPT = 32


class Backend:
    """Executes requests. Thread-safe; at most one call runs at a time."""

    def __init__(self, config: ArcticRLClientConfig, train: TrainEngine, sample: SampleEngine) -> None:
        self.config = config
        self.train = train
        self.sample = sample
        self.num_generate_calls = 0
        self._lock = threading.Lock()
        self._answers: OrderedDict[tuple[str, str], Response] = OrderedDict()

    def handle(self, request: Request, progress: Progress | None = None) -> Response:
        """Execute one request. `progress` is called by `generate` with (finished, all) rollouts.

        Raises what the engines raise; a request that raised changed nothing and is not remembered.
        """
        with self._lock:
            key = (request.method, request.request_id)
            if key in self._answers:
                return self._answers[key]
            response = self._execute(request, progress)
            self._answers[key] = response
            while len(self._answers) > ANSWERS_KEPT:
                self._answers.popitem(last=False)
            return response

    def _execute(self, request: Request, progress: Progress | None) -> Response:
        if isinstance(request, GenerateRequest):
            return self._generate(request, progress)
        handler = _HANDLERS.get(type(request))
        if handler is None:
            raise InputError(f"{type(request).__name__} is no call; the calls are in arctic_platform.rl.protocol")
        return handler(self, request)

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
        if request.cuda_ipc:
            raise ConfigError(
                "sync_weights(cuda_ipc=True) needs trainer and sampler in two processes with CUDA; the embedded "
                "transport copies within one process: leave cuda_ipc out"
            )
        return self._sync(self.config.low_memory_weight_sync if request.low_memory is None else request.low_memory)

    def _sync(self, low_memory: bool) -> SyncResponse:
        started = time.perf_counter()
        if self.sample.is_asleep:
            raise InputError("the sampler is asleep; call wake_sampling() before sync_weights()")
        report = sync_local(
            self.train.model, self.sample.model, low_memory=low_memory, on_overwrite=self.sample.begin_overwrite
        )
        self.sample.adopt(self.train.version)
        return SyncResponse(
            weight_version=self.sample.version,
            num_tensors=report.num_tensors,
            num_bytes=report.num_bytes,
            seconds=time.perf_counter() - started,
            mechanism=report.mechanism,
        )

    def _save_checkpoint(self, request: SaveCheckpointRequest) -> CheckpointResponse:
        state = {"client": request.client_state, "num_generate_calls": self.num_generate_calls}
        return _with_client_state(self.train.save_checkpoint(request.path, state))

    def _load_checkpoint(self, request: LoadCheckpointRequest) -> CheckpointResponse:
        """The sampler gets the loaded weights as well; one that is asleep needs a sync after its waking."""
        response = self.train.load_checkpoint(request.path)
        self.num_generate_calls = response.client_state.get("num_generate_calls", 0)
        if self.sample.is_asleep:
            self.sample.begin_overwrite()
        else:
            self._sync(self.config.low_memory_weight_sync)
        return _with_client_state(response)

    def _export_model(self, request: ExportModelRequest) -> PathResponse:
        return PathResponse(path=self.train.export_model(request.path))

    def _sleep_sampling(self, request: SleepSamplingRequest) -> EmptyResponse:
        self.sample.sleep(request.level)
        return EmptyResponse()

    def _wake_sampling(self, request: WakeSamplingRequest) -> EmptyResponse:
        self.sample.wake()
        return EmptyResponse()

    def _reset_prefix_cache(self, request: ResetPrefixCacheRequest) -> EmptyResponse:
        self.sample.reset_prefix_cache()
        return EmptyResponse()

    def _weight_norm(self, request: WeightNormRequest) -> WeightNormResponse:
        return WeightNormResponse(norm=self.train.weight_norm())

    def _status(self, request: StatusRequest) -> StatusResponse:
        return StatusResponse(
            model=self.config.model,
            num_parameters=sum(param.numel() for param in self.train.model.parameters()),
            dtype=self.config.dtype,
            device=self.config.device,
            step=self.train.num_steps,
            trainer_version=self.train.version,
            sampler_version=self.sample.version,
            is_sampler_current=self.sample.is_complete and self.sample.version == self.train.version,
            is_sampler_asleep=self.sample.is_asleep,
            has_pending_gradients=self.train.has_pending_gradients,
            zorro_train=self.config.zorro_train.enable,
            zorro_inference=self.config.zorro_inference.enable,
            max_rollouts=self.config.zorro_train.max_rollouts,
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
    ResetPrefixCacheRequest: Backend._reset_prefix_cache,
    WeightNormRequest: Backend._weight_norm,
    StatusRequest: Backend._status,
    SideBySideRequest: Backend._side_by_side,
}


def create_backend(config: ArcticRLClientConfig) -> Backend:
    """Load the model once and build both engines around it. Raises ConfigError when it cannot be loaded."""
    import torch

    model = load_model(config.model, getattr(torch, config.dtype), config.device, seed=config.seed)
    sample = TorchSampleEngine(config, model)
    return Backend(config, TorchTrainEngine(config, model), sample)


def _with_client_state(response: CheckpointResponse) -> CheckpointResponse:
    """The caller's own part of the saved state."""
    return response.model_copy(update={"client_state": response.client_state.get("client", {})})


def _note(runs: dict[str, list[float]], name: str, value: float) -> None:
    runs.setdefault(name, []).append(value)
