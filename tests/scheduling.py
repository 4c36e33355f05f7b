"""Which tests run in the same process under pytest-xdist: those that share what is slow to start."""

from typing import Any

from xdist.scheduler import LoadFileScheduling

ONE_PLACE = {
    "tests/rl/engines/conformance/": "ranks",
    "tests/rl/engines/test_deepspeed.py": "ranks",
    "tests/rl/engines/test_fsdp_train.py": "ranks",
    "tests/transports/test_every_transport.py": "ray",
    "tests/transports/test_ray.py": "ray",
    "tests/faults/test_ray.py": "ray",
    "tests/rl/workers/test_launch.py": "ray",
}
"""Files that share processes of the whole session: rank processes, a Ray cluster."""

FIRST = (
    "ranks",
    "ray",
    "tests/rl/workers/test_jobs.py",
    "tests/test_examples.py",
    "tests/rl/workers/test_group.py",
    "tests/rl/weight_sync/test_sync_processes.py",
    "tests/rl/test_loop.py",
    "tests/faults/test_processes.py",
    "tests/rl/server/test_serve.py",
    "tests/rl/server/test_openai_verifiers.py",
)
"""What takes longest, so that nobody waits for it at the end."""


class ByFile(LoadFileScheduling):
    """A file's tests go to one worker, where a fixture of its module is made once."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return next((place for prefix, place in ONE_PLACE.items() if file.startswith(prefix)), file)

    def schedule(self) -> None:
        """Hand out work; what is in FIRST goes before files of many tests."""
        is_first = self.collection is None
        super().schedule()
        queue: Any = self.workqueue
        for scope in reversed(FIRST) if is_first else ():
            if scope in queue:
                queue.move_to_end(scope, last=False)

    def _assign_work_unit(self, node: Any) -> None:
        """As the library's, which runs one test of those that share an id, as a fuzzer's do."""
        scope, unit = self.workqueue.popitem(last=False)
        self.assigned_work.setdefault(node, {})[scope] = unit
        tests = enumerate(self.registered_collections[node])
        node.send_runtest_some([at for at, nodeid in tests if nodeid in unit and not unit[nodeid]])
