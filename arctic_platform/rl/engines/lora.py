"""Low-rank adapters in a model that is trained, and the whole weights that leave it.

    in the trainer                                  what a sampler, an export and a sync get
    q_proj.base_layer.weight  W [out, in], frozen   q_proj.weight = W + scale * B @ A, one tensor at a time
    q_proj.lora_A.weight      A [rank, in]
    q_proj.lora_B.weight      B [out, rank]

The adapters are peft's. Whoever gets merged weights holds the plain architecture, so an adapter is never applied twice.
Experts that are one stacked tensor have adapters of their own for each expert, where peft knows the architecture.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from arctic_platform.errors import CheckpointError, ConfigError, MissingDependencyError, WeightSyncError
from arctic_platform.rl.config import LoraConfig
from arctic_platform.rl.weight_sync.base import Manifest, TensorSpec, manifest_of, weights_of

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

ADAPTER = "default"
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_OWN_NAME = re.compile(rf"\.(lora_[AB])\.{ADAPTER}\.weight$")
_FILE_NAME = re.compile(r"\.(lora_[AB])\.weight$")
_FILE_PREFIX = "base_model.model."
_EXPECTED_WARNINGS = (
    r".*(_pattern keys did not match|fan_in_fan_out is set to False|a tied layer is part of the adapter)"
)
"""Of peft's own changes to the settings, and of what is refused here."""
EXPERT_MATRICES = ("gate_up_proj", "gate_proj", "up_proj", "down_proj")
STACKED_AS = {
    **dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), "gate_up_proj"),
    **dict.fromkeys(("down_proj", "w2"), "down_proj"),
}
"""A layer of one expert -> the stacked tensor that it is part of."""


def apply_lora(model: PreTrainedModel, config: LoraConfig, *, base: str = "", seed: int = 0) -> PreTrainedModel:
    """Put adapters into the layers of `model`, in place, and freeze everything else; returns the model.

    They have the dtype and device of the layer, and change nothing before the first step: B is zero, A drawn from
    `seed`. Do this before the model is prepared for sharing or spread over ranks. base: name for saved adapters.

    Raises:
        MissingDependencyError: peft is not installed.
        ConfigError: a name of `target_modules` matches no layer that can have adapters.
    """
    try:
        import peft
    except ImportError as error:
        raise MissingDependencyError("lora needs peft; install it with: pip install 'zorro-rl[lora]'") from error
    targets = config.target_modules
    stacks = _stacks(model)
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=cast(Any, config.alpha),
        target_modules=targets if isinstance(targets, str) else list(targets),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=base or None,
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_EXPECTED_WARNINGS)
        torch.manual_seed(seed)
        try:
            peft.inject_adapter_in_model(settings, model, adapter_name=ADAPTER)
        except ValueError as error:
            raise ConfigError(_unfit(model, targets, error)) from error
    _check_targets(model, targets, stacks)
    for layer in adapted_layers(model).values():
        for matrix in (layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]):
            matrix.to(_base_weight(layer).dtype)
    return model


def adapted_layers(model: nn.Module) -> dict[str, LoraLayer]:
    """The layers with adapters by their names; none in a model without."""
    if not hasattr(model, "peft_config"):
        return {}
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


@contextmanager
def adapters_disabled(model: nn.Module) -> Generator[None]:
    """Run the base model inside: the reference, without a second copy of it.

    peft's own switch would also turn `requires_grad` off and on, which engines that spread weights take up.
    """
    layers = [layer for layer in adapted_layers(model).values() if not layer._disable_adapters]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def base_manifest(model: nn.Module) -> Manifest:
    """Names, shapes and dtypes of what `merged_weights` yields."""
    specs = {base_name(name): _spec_of(one) for name, one in weights_of(model).items() if not _is_adapter(name)}
    aliases = manifest_of(model).aliases
    return Manifest(specs, {base_name(alias): base_name(name) for alias, name in aliases.items()})


def adapter_specs(model: nn.Module) -> dict[str, TensorSpec]:
    """Shapes and dtypes of the adapters, whole, by the names of the model's parameters."""
    return {name: _spec_of(param) for name, param in model.named_parameters() if _is_adapter(name)}


def whole_tensor(tensor: Tensor) -> Tensor:
    """All of a tensor that `fully_shard` has cut; collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def merged_weights(
    model: nn.Module, *, whole: Callable[[Tensor], Tensor] = whole_tensor, refuse_unchanged: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """The weights of the plain architecture, each once: the base's, plus scale * B @ A where there is an adapter.

    The sum is formed in fp32 (fp64 for fp64) and rounded once. The live model is not touched, and one merged tensor
    exists at a time if the caller keeps none. A model without adapters yields its weights as they are.

    Args:
        whole: gives all of a tensor of which this rank may hold a part; called for every tensor in the same order.
        refuse_unchanged: raise at the end if adapters were trained and yet every merged weight is the base's.

    Raises:
        WeightSyncError: see `refuse_unchanged`; the receiver would draw from the base model for ever.
    """
    layers: dict[int, Any] = {id(_base_weight(layer)): layer for layer in adapted_layers(model).values()}
    is_trained = is_changed = False
    for name, tensor in weights_of(model).items():
        if _is_adapter(name):
            continue
        base = whole(tensor).detach()
        layer = layers.get(id(tensor))
        if layer is None:
            yield base_name(name), base
            continue
        first, second = (whole(one[ADAPTER].weight).detach() for one in (layer.lora_A, layer.lora_B))
        merged = _merge(layer, base, first, second)
        is_trained = is_trained or bool(second.any())
        is_changed = is_changed or not torch.equal(merged, base)
        yield base_name(name), merged
    if refuse_unchanged and is_trained and not is_changed:
        raise WeightSyncError(
            f"the adapters of {len(layers)} layers were trained, and no merged weight differs from the base's: in "
            f"{_dtypes(layers.values())} their product is rounded away, so a sampler would draw from the base model "
            "for ever; raise optimizer.lr or lora.alpha, or use dtype=float32"
        )


@torch.no_grad()
def merged_norm(model: nn.Module, *, whole: Callable[[Tensor], Tensor] = whole_tensor) -> float:
    """Euclidean norm over the merged parameters; collective where `whole` is."""
    names = {base_name(name) for name, _ in model.named_parameters()}
    merged = merged_weights(model, whole=whole)
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for name, tensor in merged if name in names]
    return float(torch.linalg.vector_norm(torch.stack(norms)))


def base_name(name: str) -> str:
    """The name that a weight has in the model without adapters."""
    return name.replace(".base_layer.", ".").replace(".base_layer.", ".")


@torch.no_grad()
def adapter_weights(
    model: nn.Module, *, whole: Callable[[Tensor], Tensor] = whole_tensor
) -> Iterator[tuple[str, Tensor]]:
    """The adapters under the names that peft gives them in its files; collective where `whole` is."""
    for name, param in model.named_parameters():
        if _is_adapter(name):
            yield file_name(name), whole(param).detach()


def file_name(name: str) -> str:
    """What peft calls a parameter of an adapter in its files."""
    return _FILE_PREFIX + _OWN_NAME.sub(r".\1.weight", name)


def own_name(name: str) -> str:
    """The inverse of `file_name`."""
    return _FILE_NAME.sub(rf".\1.{ADAPTER}.weight", name.removeprefix(_FILE_PREFIX))


def write_adapter_config(model: nn.Module, folder: Path) -> None:
    """`adapter_config.json`, as peft reads it."""
    settings = deepcopy(_settings_of(model))
    settings.inference_mode = True
    settings.save_pretrained(str(folder))


def write_adapter(
    model: nn.Module, folder: Path, *, whole: Callable[[Tensor], Tensor] = whole_tensor, is_writer: bool = True
) -> None:
    """Fill a folder with the adapters alone, as `PeftModel.from_pretrained` takes them; collective where sharded."""
    tensors = {name: tensor.cpu().contiguous() for name, tensor in adapter_weights(model, whole=whole) if is_writer}
    if is_writer:
        save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        write_adapter_config(model, folder)


def read_adapter(folder: Path) -> dict[str, Tensor]:
    """The adapters in a folder by the names of this engine's parameters. Raises CheckpointError."""
    try:
        tensors = load_file(folder / WEIGHTS_FILE)
    except Exception as error:  # safetensors raises its own class, and OSError
        raise CheckpointError(f"{folder} holds no adapters that can be read: {error}; give a PEFT folder") from error
    return {own_name(name): tensor for name, tensor in tensors.items()}


@torch.no_grad()
def load_adapter(model: nn.Module, folder: Path) -> None:
    """Take over the adapters of a PEFT folder.

    Raises CheckpointError when it is damaged or of another model; nothing is changed then.
    """
    saved = read_adapter(folder)
    own = {name: param for name, param in model.named_parameters() if _is_adapter(name)}
    wrong = sorted(own.keys() ^ saved.keys()) or sorted(n for n in own if own[n].shape != saved[n].shape)
    if wrong:
        raise CheckpointError(
            f"{folder} holds other adapters ({len(saved)} tensors, {len(own)} here): {wrong[0]} differs in name or "
            "shape; set lora.rank and lora.target_modules as they were"
        )
    for name, param in own.items():
        param.copy_(saved[name])


def _spec_of(tensor: Tensor) -> TensorSpec:
    """Of the whole tensor, also where DeepSpeed has left nothing of it in its place."""
    shape = getattr(tensor, "ds_shape", tensor.shape)
    return TensorSpec(tuple(shape), str(tensor.dtype).removeprefix("torch."))


def _is_adapter(name: str) -> bool:
    return _OWN_NAME.search(name) is not None


def _settings_of(model: nn.Module) -> Any:
    return getattr(model, "peft_config")[ADAPTER]  # noqa: B009  a plain attribute that peft sets


def _base_weight(layer: LoraLayer) -> Tensor:
    return getattr(layer.get_base_layer(), getattr(layer, "parameter_name", None) or "weight")


def _merge(layer: Any, base: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """base + scale * second @ first, laid out as the base weight is.

    first: [rank, in], second: [out, rank]; of a stack of E experts [E * rank, in] and [out, rank * E].
    """
    wide = torch.promote_types(base.dtype, torch.float32)
    first, second = first.to(wide), second.to(wide)
    if base.dim() == 3:
        first = first.reshape(base.shape[0], -1, first.shape[-1])
        second = second.reshape(second.shape[0], -1, base.shape[0]).permute(2, 0, 1)
        is_input_first = not layer._did_swap_in_out_features
    else:
        is_input_first = layer.fan_in_fan_out
    product = second @ first
    product = product.transpose(-1, -2) if is_input_first else product
    return torch.add(base.to(wide), product, alpha=layer.scaling[ADAPTER]).to(base.dtype)


def _stacks(model: nn.Module) -> dict[int, str]:
    """Experts that are one tensor: names by identity."""
    found = {}
    for name, param in model.named_parameters():
        *_, module, leaf = ("", *name.split("."))
        if param.dim() == 3 and module == "experts" and leaf in EXPERT_MATRICES:
            found[id(param)] = name
    return found


def _check_targets(model: PreTrainedModel, targets: tuple[str, ...] | str, stacks: dict[int, str]) -> None:
    """Every name that was given has its layers, each of which can be merged; what is left out is said."""
    from peft.tuners.lora import Linear
    from peft.tuners.lora.layer import ParamWrapper

    layers = adapted_layers(model)
    counts = Counter(id(tensor) for tensor in model.state_dict(keep_vars=True).values())
    for name, layer in layers.items():
        if not isinstance(layer, (Linear, ParamWrapper)):
            what = type(layer.get_base_layer()).__name__
            raise ConfigError(f"lora.target_modules: {name} is a {what}; name linear layers, or 'all-linear'")
        if counts[id(_base_weight(layer))] > 1:
            raise ConfigError(
                f"lora.target_modules: the weight of {name} is tied to another one, which an adapter would untie; "
                f"leave {name} out, or use a model with tie_word_embeddings=false"
            )
    left_out = [name for at, name in stacks.items() if at not in {id(_base_weight(layer)) for layer in layers.values()}]
    matched = set(layers) | {layer.parameter_name for layer in layers.values() if isinstance(layer, ParamWrapper)}
    for target in () if isinstance(targets, str) else targets:
        known = (target, STACKED_AS.get(target, target))
        if not any(f".{name}".endswith(f".{one}") for name in matched for one in known):
            of = f"; {left_out[0]} is one tensor for all experts, which peft cannot adapt here" if left_out else ""
            raise ConfigError(f"lora.target_modules: no layer of this model is named {target!r}{of}; leave it out")
    if left_out and (isinstance(targets, str) or not STACKED_AS.keys().isdisjoint(targets)):
        warnings.warn(
            f"the experts of {model.config.model_type} get no adapters: {left_out[0]} and {len(left_out) - 1} more are "
            "stacked tensors that peft cannot adapt in this architecture",
            UserWarning,
            stacklevel=3,
        )


def _unfit(model: PreTrainedModel, targets: tuple[str, ...] | str, error: ValueError) -> str:
    """What to say where peft finds no layer at all, or one that it cannot adapt."""
    names = sorted({name.rpartition(".")[2] for name, one in model.named_modules() if isinstance(one, nn.Linear)})
    if isinstance(targets, str) or not set(names).isdisjoint(targets):
        return f"lora.target_modules={targets!r} does not fit this model: {error}"
    missing = ", ".join(repr(target) for target in targets)
    return f"lora.target_modules: no layer of this model is named {missing}; it has {', '.join(names)}, or all-linear"


def _dtypes(layers: Iterable[LoraLayer]) -> str:
    return ", ".join(sorted({str(_base_weight(layer).dtype).removeprefix("torch.") for layer in layers}))
