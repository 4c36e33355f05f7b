"""Loading a model changes what belongs to the whole process for a moment: torch's default dtype, its random state.

So a load is alone in the process, between the calls of all jobs, and never beside one: otherwise a job that computes in
float32 would make bfloat16 tensors because somebody else's model is being loaded.
"""

import threading
from collections.abc import Generator
from contextlib import contextmanager


class Gate:
    """Any number of calls, or one load. A load that waits goes before calls that come later."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_calls = 0
        self._num_loads_waiting = 0
        self._is_loading = False

    @contextmanager
    def call(self) -> Generator[None]:
        """Beside other calls, beside no load."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_loading and not self._num_loads_waiting)
            self._num_calls += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_calls -= 1
                self._changed.notify_all()

    @contextmanager
    def load(self) -> Generator[None]:
        """Beside nothing."""
        with self._changed:
            self._num_loads_waiting += 1
            self._changed.wait_for(lambda: not self._is_loading and not self._num_calls)
            self._num_loads_waiting -= 1
            self._is_loading = True
        try:
            yield
        finally:
            with self._changed:
                self._is_loading = False
                self._changed.notify_all()


GATE = Gate()
"""Of this process, whatever number of services it holds."""
