"""What a training engine and a sampling engine must do; the backend knows no more of them."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

from arctic_platform.rl.protocol import (
    CheckpointResponse,
    FwdBwdResponse,
    GenerateResponse,
    LogProbsResponse,
    Processing,
    RolloutBatch,
    SamplingParams,
    StepResponse,
)

Progress = Callable[..., None]


class TrainEngine(Protocol):
    """Holds the policy, its optimizer and, when asked for, a frozen reference.

    A call that raises leaves weights, optimizer, schedule and accumulated gradients as they were.
    """

    @property
    def num_steps(self) -> int:
        """Updates that were made."""

    @property
    def version(self) -> int:
        """Of the weights: one more with every step."""

    @property
    def num_parameters(self) -> int:
        """Of the whole policy."""

    @property
    def has_pending_gradients(self) -> bool:
        """Whether `fwd_bwd` was called since the last `step`."""

    def log_probs(self, batch: RolloutBatch, processing: Processing, *, reference: bool) -> LogProbsResponse:
        """Score the response tokens without gradients."""

    def fwd_bwd(self, batch: RolloutBatch, processing: Processing) -> FwdBwdResponse:
        """Add this batch's gradients to the accumulated ones."""

    def fwd_no_grad(self, batch: RolloutBatch, processing: Processing) -> FwdBwdResponse:
        """The forward and loss of `fwd_bwd` alone."""

    def fwd_bwd_discarding(self, batch: RolloutBatch, processing: Processing) -> FwdBwdResponse:
        """The whole work of `fwd_bwd`, with nothing kept; for measurements."""

    def step(self) -> StepResponse:
        """Clip, update, advance the schedule, clear the gradients."""

    def save_checkpoint(self, path: str | None, client_state: dict[str, Any]) -> CheckpointResponse:
        """Write weights and training state as one folder, or nothing."""

    def load_checkpoint(self, path: str | None) -> CheckpointResponse:
        """Continue exactly where a checkpoint was written."""

    def export_model(self, path: str) -> str:
        """Write the weights as a Hugging Face folder."""

    def weight_norm(self) -> float:
        """Euclidean norm over all parameters."""

    @property
    def is_asleep(self) -> bool:
        """Whether `sleep` was called and `wake` was not; every other call is refused then."""

    def sleep(self, target: Literal["cpu", "disk"]) -> None:
        """Move weights, optimizer state and reference out of the device's memory."""

    def wake(self) -> None:
        """Bring them back as they were."""

    def close(self) -> None:
        """End what runs beside this object; no call may follow."""


class SampleEngine(Protocol):
    """Holds its own copy of the policy and draws rollouts from it."""

    @property
    def version(self) -> int:
        """Of the weights: the trainer's when they were handed over."""

    @property
    def num_parameters(self) -> int:
        """Of the sampler's copy of the policy."""

    @property
    def is_asleep(self) -> bool:
        """Whether `sleep` was called and `wake` was not."""

    @property
    def is_complete(self) -> bool:
        """Whether the weights are whole: false after a sync that broke off, and from level-2 sleep to the next sync."""

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, share: bool | None, progress: Progress | None
    ) -> GenerateResponse:
        """Draw `params.n` rollouts per prompt; `share` overrides the configuration for this call."""

    def begin_overwrite(self) -> None:
        """The weights are about to be written piece by piece: refuse to generate until `adopt`."""

    def adopt(self, version: int) -> None:
        """The weights now are the trainer's of `version`; forget everything computed with others."""

    def sleep(self, level: int) -> None:
        """Give memory back."""

    def wake(self) -> None:
        """Take memory again."""

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes."""

    def close(self) -> None:
        """End what runs beside this object; no call may follow."""
