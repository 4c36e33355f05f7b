"""`arctic-rl serve --sample-only`: one model behind OpenAI-shaped endpoints, until a signal comes."""

from arctic_platform.errors import ConfigError
from arctic_platform.rl.server.openai_app import build_openai_app
from arctic_platform.rl.server.openai_serving import load_serving
from arctic_platform.rl.server.openai_settings import SamplingSettings
from arctic_platform.rl.server.run import Server, listen, set_up_logging, url_of
from arctic_platform.rl.server.settings import ServerSettings


def serve_samples(settings: ServerSettings, sampling: SamplingSettings) -> int:
    """Serve until a signal comes; returns the exit code. Raises ConfigError for a port, a model or a folder."""
    set_up_logging(settings.log_format)
    if sampling.weights_root is not None and not sampling.weights_root.is_dir():
        raise ConfigError(f'weights_root="{sampling.weights_root}" is no folder; make it, or leave it out')
    with listen(settings) as listener:
        serving = load_serving(sampling)
        url = url_of(listener)
        print(f"arctic-rl samples from {sampling.name} on {url}", flush=True)
        print(f'client: openai.OpenAI(base_url="{url}/v1", api_key=...)', flush=True)
        app = build_openai_app(serving, settings, weights_root=sampling.weights_root)
        Server(app, serving, settings).run([listener])
        serving.close()
    return 0
