"""The entry of a working process: `python -m arctic_platform.rl.workers.main --join ADDRESS`.

torchrun starts several with one command, and tells each its rank:

    ARCTIC_RL_RANK_TOKEN=... torchrun --nproc-per-node 2 -m arctic_platform.rl.workers.main --join HOST:PORT
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys

from arctic_platform.rl.workers.channel import join
from arctic_platform.rl.workers.job import TOKEN_VARIABLE
from arctic_platform.rl.workers.serve import serve

JOIN_SECONDS = 600.0
_SET_PARENT_DEATH_SIGNAL = 1


def main(arguments: list[str] | None = None) -> int:
    """Join the server and work for it; returns only where that failed."""
    parser = argparse.ArgumentParser(prog="arctic_platform.rl.workers.main", description=__doc__)
    parser.add_argument("--join", required=True, metavar="ADDRESS", help="host:port of ranks.listen")
    parser.add_argument("--name", help="which process of the job this is; torchrun's RANK says it otherwise")
    parser.add_argument("--parent", type=int, help="end with this process")
    parser.add_argument("--wait-seconds", type=float, default=JOIN_SECONDS, help="longest wait for the server")
    given = parser.parse_args(arguments)
    token = os.environ.pop(TOKEN_VARIABLE, "")
    if not token:
        return _complain(f"set {TOKEN_VARIABLE} to the value that the server was started with")
    rank = os.environ.get("RANK")
    if given.name is None and rank is None:
        return _complain("start this with torchrun, which sets RANK")
    if given.parent is not None:
        _end_with(given.parent)
    else:
        _take_own_device()
    try:
        channel = join(given.join, token, wait_seconds=given.wait_seconds)
    except ConnectionError as error:
        return _complain(str(error))
    serve(channel, given.name or f"rank {rank}")
    return 1


def _end_with(parent: int) -> None:
    """On Linux the kernel ends this process with the thread that started it, even where it is stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


def _take_own_device() -> None:
    """Of several CUDA devices a rank sees its own alone, as the server's own processes and Ray's actors do."""
    local_rank = os.environ.get("LOCAL_RANK")
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if local_rank is None:
        return
    if not visible:
        os.environ["CUDA_VISIBLE_DEVICES"] = local_rank
    elif int(local_rank) < len(visible):
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[int(local_rank)]


def _complain(text: str) -> int:
    print(text, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
