"""The sampler in a process of its own (`colocate: false`): trainer and sampler share neither memory nor a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from arctic_platform.rl.config import ArcticRLClientConfig
from arctic_platform.rl.engines.base import Progress
from arctic_platform.rl.protocol import GenerateRequest, GenerateResponse, SamplingParams
from arctic_platform.rl.ragged import Ragged
from arctic_platform.rl.weight_sync.base import SyncReport
from arctic_platform.rl.weight_sync.session import SyncOffer
from arctic_platform.rl.workers.group import for_workers
from arctic_platform.rl.workers.job import Job
from arctic_platform.rl.workers.launch import launcher_of
from arctic_platform.rl.workers.remote import RemoteEngine
from arctic_platform.rl.workers.watch import OnWait


class SampleWorker(RemoteEngine):
    """A SampleEngine whose work is done by a process.

    Raises what the process raises while it builds its engine, WorkerLostError where it dies or does not come.
    """

    def __init__(self, config: ArcticRLClientConfig, *, on_wait: OnWait | None = None) -> None:
        settings = for_workers(config)
        launcher = launcher_of(config, is_sampler=True)
        threads = launcher.num_threads

        def job_of(number: int, store: tuple[str, int] | None) -> Job:
            return Job(role="sample", config=settings, num_threads=threads)

        super().__init__(
            config,
            ["sampler"],
            launcher,
            job_of,
            needs_store=False,
            remedy="training goes on without it; sync_weights() or load_checkpoint() starts it anew",
            on_wait=on_wait,
        )

    @property
    def is_asleep(self) -> bool:
        """Whether `sleep` was called and `wake` was not."""
        return self.lost is None and self._crew.state["is_asleep"]

    @property
    def is_complete(self) -> bool:
        """Whether the weights are whole; those of a lost process are not."""
        return self.lost is None and self._crew.state["is_complete"]

    @property
    def pid(self) -> int:
        """Of the process."""
        return self.pids[0]

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        share: bool | None = None,
        progress: Progress | None = None,
    ) -> GenerateResponse:
        """As the engine's; what `progress` raises stops the process's sampling at its next token."""
        request = GenerateRequest(prompts=Ragged.from_rows(prompts), sampling_params=params)
        return self._crew.call("generate", [request], [{"share": share}], progress=progress)[0].message(
            GenerateResponse
        )

    def begin_overwrite(self) -> None:
        """The weights are about to be written piece by piece: refuse to generate until `adopt`."""
        self._call("begin_overwrite")

    def adopt(self, version: int) -> None:
        """The weights now are the trainer's of `version`."""
        self._call("adopt", version=version)

    def sleep(self, level: int = 1) -> None:
        """Give memory back."""
        self._call("sleep", level=level)

    def wake(self) -> None:
        """Take memory again."""
        self._call("wake")

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes."""
        self._call("reset_prefix_cache")

    def open_offer(self, *, low_memory: bool, cuda_ipc: bool) -> SyncOffer:
        """What a sender needs to reach the process, for one sync."""
        return SyncOffer.from_json(self._call("open_offer", low_memory=low_memory, cuda_ipc=cuda_ipc))

    def receive(self) -> SyncReport:
        """Wait for the sender and take its weights. Raises WeightSyncError with either side's reason."""
        return SyncReport(**self._call("receive"))

    def start_anew(self) -> None:
        """A new process in the place of a lost one; its weights are the first ones, so a sync must come first."""
        with self._crew.starting_anew():
            self.begin_overwrite()

    def _call(self, name: str, **options: Any) -> Any:
        return self._crew.call(name, [None], [options])[0].value
