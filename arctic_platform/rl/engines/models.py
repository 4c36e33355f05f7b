"""Models for the engines: a Hugging Face folder, a hub id, or the small built-in one."""

import contextlib
import copy
import shutil
import warnings
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils import cached_file, logging

from arctic_platform.errors import ConfigError

try:
    from transformers.core_model_loading import revert_weight_conversion
except ImportError:  # transformers 4 keeps the published names in memory
    revert_weight_conversion = None

TINY_RANDOM = "tiny-random"
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
)


def fetch_weights(name_or_path: str) -> None:
    """Bring a hub model to this machine's cache. Folders, and what is not to be had, are left to `load_model`."""
    if name_or_path == TINY_RANDOM or Path(name_or_path).expanduser().exists() or _is_path_like(name_or_path):
        return
    with contextlib.suppress(OSError, ValueError):
        snapshot_download(name_or_path, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"])


def load_model(
    name_or_path: str, dtype: torch.dtype = torch.float32, device: str = "cpu", *, seed: int = 0
) -> PreTrainedModel:
    """A causal LM in `dtype` on `device`; `tiny-random` is built from `seed`, anything else is loaded.

    Raises:
        ConfigError: there is no such folder or hub id, the folder holds no model, or the device is absent.
    """
    check_device(device)
    if name_or_path == TINY_RANDOM:
        return tiny_model(seed).to(device=device, dtype=dtype)
    _check_source(name_or_path)
    try:
        with quiet_transformers():
            model = AutoModelForCausalLM.from_pretrained(name_or_path, dtype=dtype)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"model={name_or_path!r} cannot be loaded: {_first_line(error)}; {_advice()}") from error
    return model.to(device)


def tiny_model(seed: int = 0) -> LlamaForCausalLM:
    """Two Llama layers with random weights: hidden 64, 4 heads over 2 KV heads of 32, 256 tokens, fp32."""
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=256,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def copy_model(model: PreTrainedModel) -> PreTrainedModel:
    """A copy that shares no memory, without gradients, in eval mode. Copy before the model is prepared for sharing."""
    return copy.deepcopy(model).requires_grad_(False).eval()


def enable_checkpointing(model: PreTrainedModel) -> None:
    """Recompute activations in backward. The method has this name in the whole range of versions that we support."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is deprecated.*", category=FutureWarning)
        model.gradient_checkpointing_enable({"use_reentrant": False})


def check_device(device: str) -> None:
    """Raise ConfigError when `device` is not on this machine."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device={device!r}: this machine or this build of torch has no CUDA; use device='cpu'")


def eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """The tokens that end an answer of this model."""
    generation = getattr(model, "generation_config", None)
    ids = getattr(generation, "eos_token_id", None)
    ids = model.config.eos_token_id if ids is None else ids
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, (list, tuple)) else (ids,)


def copy_tokenizer(name_or_path: str, target: Path) -> None:
    """Copy the tokenizer's files beside the weights, where the source has them on this machine."""
    source = _source_folder(name_or_path)
    if source is None:
        return
    for pattern in TOKENIZER_FILES:
        for file in sorted(source.glob(pattern)):
            if file.is_file():
                shutil.copyfile(file, target / file.name)


def write_model_config(model: PreTrainedModel, folder: Path) -> None:
    """`config.json` and the generation settings of a model in the precision that it has now."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)


class Publishing:
    """Weights under the names, and in the pieces, in which the model is published.

    Newer transformers fuse tensors when they load (experts of a mixture into one), and split them again to save. A
    tensor is turned back by itself, with all others only where one published tensor is made of several.

    shapes: of all weights by name, tied ones once.
    """

    def __init__(self, model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.model = model
        self.skipped = set(model._keys_to_ignore_on_save or ())
        self.held: dict[str, Tensor] = {}
        meta = {name: torch.empty(shape, device="meta") for name, shape in shapes.items() if name not in self.skipped}
        alone = {key for name, tensor in meta.items() for key in self._revert({name: tensor})}
        self.is_one_by_one = alone == self._revert(meta).keys()

    def convert(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """What is to be written once this weight is there."""
        if name in self.skipped:
            return ()
        if self.is_one_by_one:
            return self._revert({name: tensor}).items()
        self.held[name] = tensor
        return ()

    def finish(self) -> Iterable[tuple[str, Tensor]]:
        """What had to wait for all of them."""
        return self._revert(self.held).items() if self.held else ()

    def _revert(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return weights if revert_weight_conversion is None else revert_weight_conversion(self.model, weights)


def load_tokenizer(name_or_path: str) -> Tokenizer | None:
    """The tokenizer beside the weights, None where there is none on this machine. Raises ConfigError."""
    source = _source_folder(name_or_path)
    file = None if source is None else source / "tokenizer.json"
    if file is None or not file.is_file():
        return None
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"{file} cannot be read as a tokenizer: {_first_line(error)}") from error


def _source_folder(name_or_path: str) -> Path | None:
    if name_or_path == TINY_RANDOM:
        return None
    if Path(name_or_path).is_dir():
        return Path(name_or_path)
    config = cached_file(
        name_or_path, "config.json", local_files_only=True, _raise_exceptions_for_missing_entries=False
    )
    return Path(config).parent if config else None


def _check_source(name_or_path: str) -> None:
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"model={name_or_path!r} is a folder without config.json; {_advice()}")
    elif path.exists():
        raise ConfigError(f"model={name_or_path!r} is a file; give the Hugging Face folder that holds the model")
    elif _is_path_like(name_or_path):
        raise ConfigError(f"model={name_or_path!r}: there is no such folder; {_advice()}")


def _is_path_like(name: str) -> bool:
    """Whether a name can only be meant as a path: hub ids are `name` or `owner/name`, and no folder here."""
    parts = Path(name).parts
    return name.startswith((".", "/", "~")) or len(parts) > 2 or (len(parts) == 2 and parts[0] == "models")


def _advice() -> str:
    return "run `arctic-rl fetch smollm2-135m`, or give a Hugging Face folder, a hub id, or 'tiny-random'"


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


@contextmanager
def quiet_transformers() -> Generator[None]:
    """Without the progress bars of transformers, which would break a live progress view."""
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()
