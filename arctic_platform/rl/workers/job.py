"""What a process that works for a server is told once, after it joined."""

from typing import Any, Literal

from pydantic import Field

from arctic_platform.rl.config import ArcticRLClientConfig, StrictModel

TOKEN_VARIABLE = "ARCTIC_RL_RANK_TOKEN"
"""Environment variable with the secret that a server and its processes share."""


class Job(StrictModel):
    """Which engine a process builds, and how it meets the others."""

    role: Literal["train", "sample"] = Field(description="Trains, or draws rollouts.")
    rank: int = Field(0, ge=0, description="Among the processes of its role.")
    size: int = Field(1, ge=1, description="How many these are.")
    store: tuple[str, int] | None = Field(None, description="Where ranks meet: host and port of a TCPStore.")
    config: ArcticRLClientConfig = Field(description="The job's settings; the device as this process sees it.")
    num_threads: int | None = Field(None, ge=1, description="CPU threads; none: this machine's cores shared out.")

    def as_json(self) -> dict[str, Any]:
        """As it travels."""
        return {**self.model_dump(mode="json", exclude={"config"}), "config": self.config.for_server()}
