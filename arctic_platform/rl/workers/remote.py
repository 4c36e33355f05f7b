"""What an engine in other processes is, whichever it is: a crew, and what the first process last said of its engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from arctic_platform.errors import WorkerLostError
from arctic_platform.rl.config import ArcticRLClientConfig
from arctic_platform.rl.workers.job import Job
from arctic_platform.rl.workers.launch import Launcher
from arctic_platform.rl.workers.watch import Crew, OnWait


class RemoteEngine:
    """Starts the processes named `names`. Raises what `Crew` raises."""

    def __init__(
        self,
        config: ArcticRLClientConfig,
        names: Sequence[str],
        launcher: Launcher,
        job_of: Callable[[int, tuple[str, int] | None], Job],
        *,
        needs_store: bool,
        remedy: str,
        on_wait: OnWait | None,
    ) -> None:
        self.config = config
        self._crew = Crew(
            names,
            launcher,
            job_of,
            start_seconds=config.ranks.start_seconds,
            heartbeat_seconds=config.ranks.heartbeat_seconds,
            needs_store=needs_store,
            remedy=remedy,
            on_wait=on_wait,
        )

    @property
    def engine(self) -> str:
        """Class of the engine in each process."""
        return self._crew.state["engine"]

    @property
    def version(self) -> int:
        """Of the weights."""
        return self._crew.state["version"]

    @property
    def num_parameters(self) -> int:
        """Of the whole policy."""
        return self._crew.state["num_parameters"]

    @property
    def lost(self) -> WorkerLostError | None:
        """Which process is gone; every call raises this until the processes are started anew."""
        return self._crew.lost

    @property
    def pids(self) -> list[int]:
        """Of the processes."""
        return self._crew.pids

    def close(self) -> None:
        """End the processes."""
        self._crew.close()
