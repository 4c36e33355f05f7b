"""What the server says of its jobs and calls: the JSON that travels beside the calls themselves.

    call:  waiting -> running -> done | failed          job:  loading -> ready | failed -> closed

A client reads these with every answer that is not yet a response; none of them holds a token, a prompt or a key.
"""

from collections.abc import Callable
from typing import Any, Literal

from pydantic import Field

from arctic_platform.rl.config import ArcticRLClientConfig, Kind, StrictModel
from arctic_platform.rl.protocol import ErrorInfo, StatusResponse

FRAME_TYPE = "application/vnd.arctic-rl.frame"


class CallState(StrictModel):
    """How far a call is."""

    call_id: str = Field(description="The request's own id.")
    method: str = Field(description="Name of the call.")
    state: Literal["waiting", "running", "done", "failed"] = Field(description="Where it stands.")
    seconds: float = Field(0.0, description="Since it was submitted.")
    calls_ahead: int = Field(0, description="Calls of this job that run or wait before it.")
    num_finished: int = Field(0, description="Rollouts that are finished.")
    num_total: int = Field(0, description="Rollouts in all; 0 where a call has no such count.")
    reason: str = Field("", description="One line: what the call is waiting for.")
    error: ErrorInfo | None = Field(None, description="Why it failed.")
    response: Any = Field(None, exclude=True, description="The Response, when done; it travels as a frame.")

    @property
    def line(self) -> str:
        """What a person reads while it is pending."""
        return f"{self.method}: {self.reason}"

    @property
    def is_pending(self) -> bool:
        """Whether it is worth asking again."""
        return self.state in ("waiting", "running")


OnProgress = Callable[[CallState], None]
"""Told about once a second how far a call is, until it ends."""


class JobRequest(StrictModel):
    """Asks for a job."""

    config: ArcticRLClientConfig = Field(description="The client's settings; those of its transport have no effect.")
    kinds: tuple[Kind, ...] | None = Field(None, description="What to load; none: what the config says.")
    request_id: str | None = Field(
        None, min_length=1, max_length=128, description="The same id again is the same job again, not a second one."
    )


class JobInfo(StrictModel):
    """A job: one loaded model with its engines."""

    job_id: str = Field(description="Names the job in every later call; it cannot be guessed.")
    state: Literal["loading", "ready", "failed", "closed"] = Field(description="Where it stands.")
    kinds: tuple[Kind, ...] = Field(description="What it can do.")
    model: str = Field(description="Folder or name of the model.")
    seconds: float = Field(0.0, description="Since it was created.")
    waits_for: str = Field("", description="While it loads: the processes, of its own, that are not there yet.")
    error: ErrorInfo | None = Field(None, description="Why it could not be loaded.")

    def as_call(self) -> CallState:
        """Its loading, told as a call is: what a client shows while it waits for the model."""
        reason = f"the server loads {self.model} since {self.seconds:.1f} s"
        reason += f", waiting for {self.waits_for}" if self.waits_for else ""
        return CallState(call_id=self.job_id, method="loading", state="waiting", seconds=self.seconds, reason=reason)


class JobStatus(StrictModel):
    """A job with what is really in effect, and its queue."""

    info: JobInfo
    backend: StatusResponse | None = Field(None, description="As of its last finished call; none: not loaded.")
    running: CallState | None = Field(None, description="The call that runs now.")
    num_waiting: int = Field(description="Calls that wait.")
    num_clients: int = Field(description="Clients that numbered their calls here.")
    idle_seconds: float = Field(description="Since anybody last called or asked.")


class ServiceStatus(StrictModel):
    """Everything that a server can say of itself."""

    state: Literal["serving", "draining", "closed"]
    version: str = Field(description="Of this package.")
    versions: dict[str, str] = Field(description="Of Python and of the packages that compute.")
    seconds: float = Field(description="Since the server started.")
    max_jobs: int
    jobs: tuple[JobStatus, ...]
