"""The client: the calls as methods. It knows the protocol and a transport, no engine, and loads no torch by itself.

async with create_arctic_rl_client(ArcticRLClientConfig(model="models/smollm2-135m")) as client:
    answers = await client.generate(prompts, SamplingParams(n=8))
    await client.fwd_bwd(batch)
    await client.step()
    await client.sync_weights()
"""

import asyncio
import functools
import inspect
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Literal, Protocol, Self, overload

from arctic_platform.errors import ConfigError
from arctic_platform.rl import protocol
from arctic_platform.rl.config import ArcticRLClientConfig
from arctic_platform.rl.protocol import Processing, Request, RolloutBatch, SamplingParams
from arctic_platform.rl.server.states import OnProgress

Batch = RolloutBatch | dict[str, Any]
Settings = Processing | dict[str, Any] | None


class Transport(Protocol):
    """Carries a request to the server side and its response back."""

    server_id: str

    async def call(self, request: Request, on_progress: OnProgress | None = None) -> Any:
        """One request, one response; raises what the server side raised. Cancelling the task cancels the call."""

    async def close(self, *, stop: bool = True) -> None:
        """Let go of the server side; `stop` ends its job and frees its memory. Closing twice is fine."""


class ArcticRLClient:
    """Five calls train a policy: generate, log_probs, fwd_bwd, step, sync_weights; the rest looks after it.

    Calls are executed in the order in which they are made. A call that raises has changed nothing, unless its
    docstring says so. Use it as an async context manager, or call `shutdown` at the end.
    """

    def __init__(
        self, config: ArcticRLClientConfig, transport: Transport, on_progress: OnProgress | None = None
    ) -> None:
        self.config = config
        self._transport = transport
        self._on_progress = on_progress

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling_params: SamplingParams | dict[str, Any] | None = None,
        routing_key: str | None = None,
    ) -> protocol.GenerateResponse:
        """Sample answers to prompts of token ids: `sampling_params.n` each, in prompt order, with log-probs.

        Without a seed, rollouts follow from the configured seed and the number of the call, also after a resume.
        Raises InputError for an empty prompt or one too long, WeightSyncError when a sync broke off.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        return await self._call(
            protocol.GenerateRequest(prompts=prompts, sampling_params=params, routing_key=routing_key)
        )

    async def log_probs(
        self, batch: Batch, processing: Settings = None, reference: bool = False
    ) -> protocol.LogProbsResponse:
        """Log-prob of every response token under the policy, or under the reference model."""
        return await self._call(
            protocol.LogProbsRequest(batch=batch, processing=processing or Processing(), reference=reference)
        )

    async def fwd_bwd(self, batch: Batch, processing: Settings = None) -> protocol.FwdBwdResponse:
        """Forward, loss and backward; gradients add up until `step`. Raises NonFiniteError for a NaN anywhere."""
        return await self._call(protocol.FwdBwdRequest(batch=batch, processing=processing or Processing()))

    async def fwd_no_grad(self, batch: Batch, processing: Settings = None) -> protocol.FwdBwdResponse:
        """The forward and loss of `fwd_bwd` without gradients."""
        return await self._call(protocol.FwdNoGradRequest(batch=batch, processing=processing or Processing()))

    async def step(self) -> protocol.StepResponse:
        """Clip, update, advance the schedule. Raises NonFiniteError, and clears the gradients, if their norm is NaN."""
        return await self._call(protocol.StepRequest())

    async def sync_weights(self, cuda_ipc: bool | None = None, low_memory: bool | None = None) -> protocol.SyncResponse:
        """Give the sampler the trainer's weights. Raises WeightSyncError; the sampler then keeps its old ones, or,
        with `low_memory`, refuses to generate until a sync succeeds."""
        return await self._call(protocol.SyncWeightsRequest(cuda_ipc=cuda_ipc, low_memory=low_memory))

    async def save_checkpoint(
        self, path: str | None = None, client_state: dict[str, Any] | None = None
    ) -> protocol.CheckpointResponse:
        """Write a checkpoint; `client_state` (JSON values) comes back on load. Raises CheckpointError."""
        return await self._call(protocol.SaveCheckpointRequest(path=_text(path), client_state=client_state or {}))

    async def load_checkpoint(self, path: str | None = None) -> protocol.CheckpointResponse:
        """Continue where a checkpoint was written; the sampler gets its weights too. Raises CheckpointError, and
        WeightSyncError where the trainer went on and the sampler did not: call it again."""
        return await self._call(protocol.LoadCheckpointRequest(path=_text(path)))

    async def export_model(self, path: str) -> protocol.PathResponse:
        """Write the weights as a Hugging Face folder. Raises CheckpointError."""
        return await self._call(protocol.ExportModelRequest(path=_text(path)))

    async def sleep_sampling(self, level: Literal[1, 2] = 1) -> None:
        """Put the sampler to sleep; level 2 frees its weights, and a sync must follow the waking."""
        await self._call(protocol.SleepSamplingRequest(level=level))

    async def wake_sampling(self) -> None:
        """Wake the sampler."""
        await self._call(protocol.WakeSamplingRequest())

    async def sleep_training(self, target: Literal["cpu", "disk"] = "cpu") -> None:
        """Move weights, optimizer and reference out of the device's memory, until `wake_training` brings them back.

        Meanwhile every call that needs them is refused. Raises InputError when gradients wait for a step,
        CheckpointError when the disk is full; the trainer then stays awake, and whole.
        """
        await self._call(protocol.SleepTrainingRequest(target=target))

    async def wake_training(self) -> None:
        """Bring the trainer back as it was, bit for bit."""
        await self._call(protocol.WakeTrainingRequest())

    async def reset_prefix_cache(self) -> None:
        """Make the sampler forget prefixes that it computed."""
        await self._call(protocol.ResetPrefixCacheRequest())

    async def weight_norm(self) -> float:
        """Euclidean norm over all parameters of the trainer."""
        return (await self._call(protocol.WeightNormRequest())).norm

    async def status(self) -> protocol.StatusResponse:
        """What is loaded, which options are in effect, how far training is."""
        return await self._call(protocol.StatusRequest())

    async def side_by_side(
        self,
        batch: Batch,
        processing: Settings,
        prompts: Sequence[Sequence[int]],
        sampling_params: SamplingParams | dict[str, Any] | None = None,
        repeats: int = 3,
    ) -> protocol.SideBySideResponse:
        """Time `fwd_bwd` and `generate` with sharing on and off, interleaved; nothing of it is kept."""
        return await self._call(
            protocol.SideBySideRequest(
                batch=batch,
                processing=processing or Processing(),
                prompts=prompts,
                sampling_params=SamplingParams() if sampling_params is None else sampling_params,
                repeats=repeats,
            )
        )

    def reconnect_config(self) -> ArcticRLClientConfig:
        """A config with which another client reaches the same running server, over HTTP also from another process.

        Its dump holds no API key: give the other process the key as `api_key`, or in ARCTIC_RL_API_KEY.
        """
        return self.config.model_copy(update={"server_id": self._transport.server_id})

    async def shutdown(self) -> None:
        """Stop the server after the call that runs, and free its memory. Calling it twice is fine."""
        await self._transport.close()

    async def disconnect(self) -> None:
        """Leave the server as it is, for a client made with `reconnect_config()`."""
        await self._transport.close(stop=False)

    async def _call(self, request: Request) -> Any:
        return await self._transport.call(request, self._on_progress)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown()


class BlockingArcticRLClient:
    """The same client without `await`: every method runs to its end and returns its response."""

    def __init__(self, client: ArcticRLClient) -> None:
        self._client = client
        self._runner = asyncio.Runner()

    @property
    def config(self) -> ArcticRLClientConfig:
        """The config that the client was made with."""
        return self._client.config

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._client, name)
        if not inspect.iscoroutinefunction(method):
            return method

        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            return self._run(method, *args, **kwargs)

        return run

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._client)})

    def shutdown(self) -> None:
        """Stop the server and free its memory. Calling it twice is fine."""
        self._run(self._client.shutdown)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()
        self._runner.close()

    def _run(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._runner.run(method(*args, **kwargs))
        raise ConfigError(
            "a blocking client cannot be used inside a running event loop; create it with blocking_calls=False "
            "and await its methods"
        )


@overload
def create_arctic_rl_client(
    config: ArcticRLClientConfig | dict[str, Any],
    *,
    blocking_calls: Literal[False] = False,
    on_progress: OnProgress | None = None,
) -> ArcticRLClient: ...


@overload
def create_arctic_rl_client(
    config: ArcticRLClientConfig | dict[str, Any],
    *,
    blocking_calls: Literal[True],
    on_progress: OnProgress | None = None,
) -> BlockingArcticRLClient: ...


def create_arctic_rl_client(
    config: ArcticRLClientConfig | dict[str, Any],
    *,
    blocking_calls: bool = False,
    on_progress: OnProgress | None = None,
) -> ArcticRLClient | BlockingArcticRLClient:
    """Start the server side that `config` describes and return a client of it; the model is loaded here.

    on_progress: told about once a second how far loading or a call is (`CallState`: state, num_finished, reason ...).
    Raises ConfigError for a config that is wrong, or a model that is not there; TransportError for no such server.
    """
    config = ArcticRLClientConfig.model_validate(config)
    client = ArcticRLClient(config, _connect(config, on_progress), on_progress)
    return BlockingArcticRLClient(client) if blocking_calls else client


def _connect(config: ArcticRLClientConfig, on_progress: OnProgress | None) -> Transport:
    if config.transport == "http":
        from arctic_platform.rl.transports.http import connect
    elif config.transport == "ray":
        from arctic_platform.rl.transports.ray import connect
    else:
        from arctic_platform.rl.transports.embedded import connect
    return connect(config, on_progress)


def _text(path: Any) -> Any:
    return None if path is None else str(path)
