"""The command `arctic-rl`. Everything heavy is imported by the command that needs it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import warnings
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, CycloptsError, Parameter
from rich.console import Console

import arctic_platform
from arctic_platform.errors import ArcticError, ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from arctic_platform.rl.recipe import Recipe
    from arctic_platform.rl.server.settings import ServerSettings

EXIT_USER_MISTAKE = 2
LOSSES = "arctic_platform.rl.workers.watch"

app = App(
    name="arctic-rl",
    help="Reinforcement learning that computes every shared token of a batch of rollouts once.",
    version=arctic_platform.__version__,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; a warning, a user's mistake (exit code 2) and a file system that refuses are one line each.

    All of them go to stderr.
    """
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _say_warning  # ty: ignore[invalid-assignment]
            code = app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
    except (ArcticError, CycloptsError) as error:
        _say(str(error))
        code = EXIT_USER_MISTAKE
    except OSError as error:
        _say(
            f'"{error.filename}": {error.strerror}; free space or choose another place'
            if error.filename
            else str(error)
        )
        code = EXIT_USER_MISTAKE
    except KeyboardInterrupt:
        code = 130
    sys.exit(code or 0)


def _say(text: str) -> None:
    print(f"arctic-rl: {' '.join(text.split())}", file=sys.stderr)


def _say_warning(message: Warning | str, *_: object, **__: object) -> None:
    _say(f"warning: {message}")


@app.command
def train(
    recipe: Path,
    /,
    *,
    fresh: Annotated[bool, Parameter(negative=())] = False,
    name: str | None = None,
    model: str | None = None,
    num_steps: int | None = None,
    seed: int | None = None,
    output_dir: Path | None = None,
    server_url: str | None = None,
    set_: Annotated[tuple[str, ...], Parameter(name="--set", negative=())] = (),
) -> int:
    """Run a recipe, or go on with a run of it that was stopped.

    Parameters
    ----------
    recipe
        A YAML file, for example recipes/tiny.yaml.
    fresh
        Start anew and remove what an earlier run of this name left.
    name
        Name of the run's folder.
    model
        A known model, a Hugging Face folder, or a hub id.
    num_steps
        Steps of the whole run.
    seed
        Order of the questions and every draw of the sampler.
    output_dir
        Folder that holds the run's folder.
    server_url
        Train on the server at this address, as `arctic-rl serve` prints it, instead of in this process.
    set_
        Any setting of the recipe as key=value, for example client.optimizer.lr=1e-6; may be repeated.
    """
    from arctic_platform.rl.recipe import load_recipe

    given = {"name": name, "model": model, "num_steps": num_steps, "seed": seed, "output_dir": output_dir}
    replace = {key: str(value) if isinstance(value, Path) else value for key, value in given.items()}
    replace = {key: value for key, value in replace.items() if value is not None}
    served = [f"client.server_url={server_url}"] if server_url else []
    return _run_recipe(load_recipe(recipe, overrides=[*set_, *served], replace=replace), fresh=fresh)


def _run_recipe(recipe: Recipe, *, fresh: bool) -> int:
    from arctic_platform.rl.loop import train as run_loop
    from arctic_platform.rl.progress import EXIT_INTERRUPTED, StopRequest, make_view
    from arctic_platform.rl.report import write_report

    view = make_view(Console())
    with StopRequest(view).on_interrupt() as stop, _saying_logs():
        outcome = asyncio.run(run_loop(recipe, view, fresh=fresh, stop=stop))
    path = write_report(outcome.run)
    if not outcome.is_complete:
        print(f"Stopped after step {outcome.steps_done}; a checkpoint is saved. The same command goes on from there.")
        return EXIT_INTERRUPTED
    if outcome.was_complete_before:
        print(f"{outcome.run.path} is complete already ({outcome.steps_done} steps); --fresh starts it anew.")
    print(f"Report: {path}")
    return 0


@contextlib.contextmanager
def _saying_logs() -> Generator[None]:
    """While open, a logged warning is a line like any other; a lost process is not one, the loop tells of it."""

    class Says(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info:
                print(self.format(record), file=sys.stderr)
            elif record.name != LOSSES:
                _say(f"{record.levelname.lower()}: {record.getMessage()}")

    handler = Says(logging.WARNING)
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)


@app.command
def plan(
    source: Path,
    /,
    *,
    model: str | None = None,
    max_token_len: int | None = None,
    set_: Annotated[tuple[str, ...], Parameter(name="--set", negative=())] = (),
) -> int:
    """Say what sharing will bring, before a run: bound, saving, micro-batches, and what cuts take.

    Parameters
    ----------
    source
        A recipe (YAML), whose first step is planned with answers of full length that share nothing; or a batch, one
        JSON object per line with token ids: {"prompt": [...], "response": [...]}.
    model
        Model folder or hub id whose sizes weigh the tokens; the recipe's own if not given. A batch without one counts
        every token alike.
    max_token_len
        Token budget of a pass, instead of the configured one.
    set_
        Any setting of the recipe as key=value; may be repeated.
    """
    from arctic_platform.rl.plan_command import plan_source

    for line in plan_source(source, model=model, max_token_len=max_token_len, overrides=set_):
        print(line)
    return 0


@app.command
def fetch(name: str, /, *, to: Path | None = None) -> int:
    """Bring a known model to this machine: smollm2-135m (downloaded), tiny-llama (built here).

    Parameters
    ----------
    name
        The model's short name.
    to
        The folder to make; models/NAME if not given.
    """
    from arctic_platform.rl.fetch import fetch_model

    console = Console()
    with console.status("") as status:

        def say(text: str) -> None:
            console.print(text, highlight=False, markup=False, soft_wrap=True)
            status.update(text)

        fetch_model(name, to, say=say)
    return 0


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ListenOptions:
    """What every server is told.

    Parameters
    ----------
    host
        Address to listen on. Beyond its own machine only with an API key.
    api_key_file
        File with the API key that every HTTP request must bear; without it, the variable ARCTIC_RL_API_KEY.
    max_body
        Largest request body: bytes, 512M, 2G.
    max_jobs
        Jobs at the same time, each holds a model; 8 if not given.
    idle_seconds
        Close a job that nobody called for so long; never if not given.
    """

    host: str = "127.0.0.1"
    api_key_file: Path | None = None
    max_body: str = "1G"
    max_jobs: int | None = None
    idle_seconds: float | None = None

    @property
    def of_jobs(self) -> dict[str, Any]:
        """What was given of the options that only a server with jobs has."""
        return _given({"max_jobs": self.max_jobs, "idle_seconds": self.idle_seconds})

    def settings(self, **others: Any) -> ServerSettings:
        """Checked; others: fields of ServerSettings that not every server has."""
        from arctic_platform.rl.server.settings import ServerSettings, parse_bytes, read_api_key

        return ServerSettings(
            host=self.host,
            api_key=read_api_key(self.api_key_file),
            max_body_bytes=parse_bytes(self.max_body),
            **self.of_jobs,
            **others,
        )


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """What a server that only samples is told of its model.

    Parameters
    ----------
    model
        A Hugging Face folder, or a hub id.
    served_name
        Name that clients ask for; the model as it was given, if not.
    dtype
        Type of weights and activations; float32 if not given.
    device
        cpu, cuda or cuda:<index>; cpu if not given.
    max_batch_rows
        Most rollouts decoded at the same time; 64 if not given.
    kv_cache_tokens
        Tokens whose keys and values are kept, of running and finished rollouts; as many as 4 GiB hold if not given.
    prefix_cache_policy
        What new weights do to cached prefixes: reset, keep (go on using them) or version; reset if not given.
    prefill_chunk_tokens
        Prompt tokens between two decode steps; 512 if not given.
    chat_template
        Jinja file, in place of the model's own chat template.
    weights_root
        Take new weights from folders below this one (POST /update_weights); none if not given.
    """

    model: str | None = None
    served_name: str | None = None
    dtype: Literal["float32", "float64", "bfloat16"] | None = None
    device: str | None = None
    max_batch_rows: int | None = None
    kv_cache_tokens: int | None = None
    prefix_cache_policy: Literal["reset", "keep", "version"] | None = None
    prefill_chunk_tokens: int | None = None
    chat_template: Path | None = None
    weights_root: Path | None = None

    @property
    def given(self) -> dict[str, Any]:
        """The options that were given."""
        return _given(vars(self))


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


@app.command
def serve(
    listen: ListenOptions = ListenOptions(),
    sample: SampleOptions = SampleOptions(),
    *,
    port: int = 8790,
    drain_seconds: float = 60.0,
    log_format: Literal["text", "json"] = "text",
    sample_only: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Serve the calls over HTTP to clients with transport=http (docs/protocol.md), or one model to OpenAI's clients.

    Parameters
    ----------
    port
        Port to listen on; 0 for any free one.
    drain_seconds
        How long running calls may take after Ctrl-C or SIGTERM; a second one ends at once.
    log_format
        Lines for people, or one JSON object per line.
    sample_only
        Serve one model for sampling, OpenAI-shaped; see docs/serving.md. --model and what describes it need this.
    """
    if sample_only and listen.of_jobs:
        raise ConfigError(f"{_flag(listen.of_jobs)} has no effect with --sample-only, which has no jobs")
    settings = listen.settings(port=port, drain_seconds=drain_seconds, log_format=log_format)
    if sample.given and not sample_only:
        raise ConfigError(f"{_flag(sample.given)} needs --sample-only")
    if sample_only and sample.model is None:
        raise ConfigError("--sample-only needs --model, a Hugging Face folder or a hub id")
    try:
        return _serve(settings, sample.given)
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"serving needs {error.name}; install it with: pip install 'zorro-rl[server]'"
        ) from error


def _flag(options: dict[str, Any]) -> str:
    """The first of the options as it is written."""
    return f"--{next(iter(options)).replace('_', '-')}"


def _serve(settings: ServerSettings, sampling: dict[str, Any]) -> int:
    if not sampling:
        from arctic_platform.rl.server.run import serve as run_server

        return run_server(settings)
    from arctic_platform.rl.server.openai_run import serve_samples
    from arctic_platform.rl.server.openai_settings import SamplingSettings

    return serve_samples(settings, SamplingSettings(**sampling))


@app.command
def ray_serve(
    name: str,
    /,
    listen: ListenOptions = ListenOptions(),
    *,
    address: str = "auto",
    namespace: str = "arctic",
    port: int = 0,
    num_cpus: float = 1.0,
    num_gpus: float = 0.0,
    placement_group: str | None = None,
) -> int:
    """Start a server in a Ray cluster that stays until `arctic-rl ray-stop NAME`; see docs/deployment.md.

    Clients in the cluster join it with transport: ray and ray.server: NAME, others with transport: http.

    Parameters
    ----------
    name
        Name of the server within its namespace.
    address
        host:port of the cluster's head node; the cluster of this machine if not given.
    namespace
        Ray namespace of the server.
    port
        Port to listen on; 0 for a free one that is none of Ray's.
    num_cpus
        CPUs that the server takes; its threads too.
    num_gpus
        GPUs, or a part of one.
    placement_group
        Name of a placement group to run in.
    """
    from arctic_platform.rl.config import RayConfig
    from arctic_platform.rl.server.ray_cluster import serve_in_cluster

    ray = RayConfig(
        address=address,
        namespace=namespace,
        server=name,
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        placement_group=placement_group,
    )
    url = serve_in_cluster(listen.settings(port=port), ray, device="cpu")
    print(f"Ray server {name} runs and listens on {url}")
    print(f'in the cluster: ArcticRLClientConfig(model=..., transport="ray", ray={{"server": "{name}"}})')
    print(f'over HTTP:      ArcticRLClientConfig(model=..., transport="http", server_url="{url}")')
    return 0


@app.command
def ray_stop(name: str, /, *, address: str = "auto", namespace: str = "arctic", drain_seconds: float = 60.0) -> int:
    """End a server that `arctic-rl ray-serve` started, after the calls that run.

    Parameters
    ----------
    name
        Name of the server within its namespace.
    address
        host:port of the cluster's head node; the cluster of this machine if not given.
    namespace
        Ray namespace of the server.
    drain_seconds
        How long running calls may take; exit code 1 if one was given up.
    """
    from arctic_platform.rl.config import RayConfig
    from arctic_platform.rl.server.ray_cluster import stop_in_cluster

    is_done = stop_in_cluster(RayConfig(address=address, namespace=namespace), name, drain_seconds=drain_seconds)
    print(f"Ray server {name} ended" + ("" if is_done else f"; calls still ran after {drain_seconds:g} s"))
    return 0 if is_done else 1


@app.command
def report(run: Path, /) -> int:
    """Write report.html and reward_curve.png of a run anew, finished or not.

    Parameters
    ----------
    run
        The run's folder, for example runs/tiny.
    """
    from arctic_platform.rl.report import write_report
    from arctic_platform.rl.run_folder import RunFolder

    print(write_report(RunFolder.open(run)))
    return 0


@app.command
def doctor(*, port: int = 8790, json: Annotated[bool, Parameter(negative=())] = False) -> int:
    """Check this installation and this machine, and say what to do about what is amiss; exit code 1 for a problem.

    Looks at Python, packages and extras, torch and its kernels, shared memory, ports, disk and models, and compares
    one shared pass of a tiny model with unshared ones.

    Parameters
    ----------
    port
        Where a server would listen.
    json
        Print the report as JSON.
    """
    from arctic_platform.rl.doctor import as_json, examine, exit_code, show

    console = Console()
    with console.status("examining"):
        checks = examine(port=port)
    if json:
        print(as_json(checks))
    else:
        show(checks, console)
    return exit_code(checks)


if __name__ == "__main__":
    main()
