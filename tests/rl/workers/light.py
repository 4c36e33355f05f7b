"""A working process without torch: what surrounds an engine, with calls that do as they are told.

python -m tests.rl.workers.light --join ADDRESS --name NAME --parent PID
"""

import logging
import os
import sys
import time
import warnings
from typing import Any

from arctic_platform.errors import InputError
from arctic_platform.rl.workers import main, serve
from arctic_platform.rl.workers.job import Job

logger = logging.getLogger("arctic_platform.light")


class LightCalls:
    """Counts calls; an option names what else is to happen, on all ranks or on one."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.num_calls = 0

    def state(self) -> dict[str, Any]:
        return {"num_calls": self.num_calls}

    def run(self, name: str, packet: Any, progress: Any) -> tuple[None, Any]:
        header = packet.header
        self.num_calls += 1
        if header.get("only", self.job.rank) == self.job.rank:
            getattr(self, name)(progress())
        return None, self.job.rank

    def count(self, progress: Any) -> None:
        """Nothing more."""

    def refuse(self, progress: Any) -> None:
        raise InputError(f"rank {self.job.rank} refuses")

    def break_down(self, progress: Any) -> None:
        raise RuntimeError("something broke")

    def hang(self, progress: Any) -> None:
        time.sleep(600)

    def say(self, progress: Any) -> None:
        logger.info("said by rank %d", self.job.rank)
        warnings.warn("a warning", stacklevel=1)
        print("a last line", flush=True)

    def leave(self, progress: Any) -> None:
        print("a last line", flush=True)
        os._exit(3)

    def go_on(self, progress: Any) -> None:
        while True:
            progress(1, 2)
            time.sleep(0.001)

    def close(self) -> None:
        """Nothing runs beside it."""


if __name__ == "__main__":
    serve._build = lambda job, host: LightCalls(job)
    sys.exit(main.main())
