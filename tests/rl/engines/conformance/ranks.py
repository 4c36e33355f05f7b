"""Rank processes for tests: they start once, then each runs the functions that it is given, all at the same time."""

import gc
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.forks import forks

LONGEST_CALL = 120.0
"""Seconds that one call may take."""


class Ranks:
    """`size` processes in one gloo group; a function that is given runs on each as `function(state, *args)`.

    `state` is a dict that lives as long as the process; under "world" it holds the rank's World. Processes start with
    the first call, and with the first one behind `close`.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.pipes: list[Connection] = []
        self.processes: list[multiprocessing.process.BaseProcess] = []

    def _start(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        context = forks()
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            args = (rank, self.size, str(Path(self.folder.name) / "store"), theirs)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def call(self, function: Callable, *args: Any, each: list[tuple] | None = None) -> list[Any]:
        """What `function` returns on every rank; what it raises is returned too. each: further arguments per rank."""
        if not self.processes:
            self._start()
        for rank, pipe in enumerate(self.pipes):
            pipe.send((function, (*args, *(each[rank] if each else ()))))
        return [self._answer(rank) for rank in range(self.size)]

    def _answer(self, rank: int) -> Any:
        if not self.pipes[rank].poll(LONGEST_CALL):
            self.close()
            raise TimeoutError(f"rank {rank} of {self.size} gave no answer within {LONGEST_CALL} s")
        return self.pipes[rank].recv()

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
            process.join()
        if self.processes:
            self.folder.cleanup()
        self.processes, self.pipes = [], []


def _serve(rank: int, size: int, store: str, pipe: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import datetime

    import torch
    import torch.distributed as dist

    from arctic_platform.rl.engines.world import World

    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=LONGEST_CALL / 2)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    state: dict[str, Any] = {"world": World.of_processes(LONGEST_CALL / 2)}
    num_modules = 0
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = function(state, *args)
        except Exception as error:  # sent to the test, which knows what to expect
            answer = error
            answer.__notes__ = [traceback.format_exc()]
        pipe.send(answer)
        if num_modules < len(sys.modules):
            num_modules = len(sys.modules)
            gc.freeze()  # ZeRO-3 collects garbage when it starts: 0.4 s, if it looks at all that was imported
