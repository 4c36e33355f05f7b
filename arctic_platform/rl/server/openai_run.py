"""One model behind OpenAI-shaped endpoints: `arctic-rl serve --sample-only`, and the same within a process."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from arctic_platform.errors import ConfigError
from arctic_platform.rl.server.openai_app import build_openai_app
from arctic_platform.rl.server.openai_serving import Serving, load_serving
from arctic_platform.rl.server.openai_settings import SamplingSettings
from arctic_platform.rl.server.run import Server, listen, set_up_logging, url_of
from arctic_platform.rl.server.settings import ServerSettings


def serve_samples(settings: ServerSettings, sampling: SamplingSettings) -> int:
    """Serve until a signal comes; returns the exit code. Raises ConfigError for a port, a model or a folder."""
    if sampling.weights_root is not None and not sampling.weights_root.is_dir():
        raise ConfigError(f'weights_root="{sampling.weights_root}" is no folder; make it, or leave it out')
    with listen(settings) as listener:
        serving = load_serving(sampling)
        set_up_logging(settings.log_format)
        url = url_of(listener)
        print(f"arctic-rl samples from {sampling.names[0]} on {url}", flush=True)
        print(f'client: openai.OpenAI(base_url="{url}/v1", api_key=...)', flush=True)
        app = build_openai_app(serving, settings, weights_root=sampling.weights_root)
        Server(app, serving, settings).run([listener])
        serving.close()
    return 0


@contextmanager
def sampling_server(sampling: SamplingSettings, settings: ServerSettings | None = None) -> Generator[str]:
    """A server in a thread of this process, on a free port of this machine unless told otherwise; its address."""
    serving = load_serving(sampling)
    with serving_in_thread(serving, settings, weights_root=sampling.weights_root) as url:
        yield url


@contextmanager
def serving_in_thread(
    serving: Serving, settings: ServerSettings | None = None, *, weights_root: Path | None = None
) -> Generator[str]:
    """The same for a model that is loaded already; at the end requests finish first, then `serving` is closed."""
    settings = ServerSettings(port=0) if settings is None else settings
    try:
        with listen(settings) as listener:
            server = Server(build_openai_app(serving, settings, weights_root=weights_root), serving, settings)
            thread = threading.Thread(target=server.run, args=([listener],), name="sampling-server")
            thread.start()
            try:
                yield url_of(listener)
            finally:
                serving.drain(settings.drain_seconds)
                server.should_exit = True
                thread.join()
    finally:
        serving.close()
