"""What runs inside vLLM's worker when the sampler takes new weights: load them, and read back what was loaded.

vLLM keeps some of a model's weights under other names and in other shapes: q, k and v are one matrix, gate and up are
another, and on CPU a linear layer's matrix is laid out for its matmul and then dropped. So each layer's weights are
digested at the last moment at which they exist as a matrix, right before vLLM lays them out.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

Shapes = Mapping[str, tuple[int, ...]]


def load_weights(worker: Any, weights: Iterable[tuple[str, Tensor]], shapes: Shapes) -> dict[str, int]:
    """Load `weights`, named as in the trainer's model, and return the digests of what vLLM then holds, by those names.

    shapes: of all weights that will come. A weight that vLLM splits over ranks or stores in a way not known here has
    no digest. If loading fails, each layer has either its old or its new weights, and loading again is possible.
    """
    from vllm.config import set_current_vllm_config

    model = worker.get_model()
    sources = {} if worker.vllm_config.parallel_config.tensor_parallel_size > 1 else _sources(model, shapes)
    with set_current_vllm_config(worker.vllm_config), torch.no_grad():
        try:
            with _witness(model, sources) as digests:
                worker.reload_weights(weights_iterator=iter(weights))
        except BaseException:
            _put_back(model)
            raise
    for name, param in model.named_parameters():
        if name in sources and param.numel() and not _is_known(sources[name], digests):
            digests.update(_digests(param, sources[name]))
    return digests


@contextmanager
def _witness(model: nn.Module, sources: Mapping[str, list[tuple[str, int]]]) -> Generator[dict[str, int]]:
    """Digest the parameters of every layer that vLLM is about to lay out; yields digests by the trainer's names."""
    digests: dict[str, int] = {}
    names = {layer: name for name, layer in model.named_modules()}
    methods = {id(m): m for m in (getattr(layer, "quant_method", None) for layer in names) if m is not None}
    originals = {key: method.process_weights_after_loading for key, method in methods.items()}

    def observed(key: int, layer: nn.Module) -> None:
        for name, param in layer.named_parameters(prefix=names[layer], recurse=False):
            if name in sources:
                digests.update(_digests(param, sources[name]))
        originals[key](layer)

    for key, method in methods.items():
        method.process_weights_after_loading = lambda layer, key=key: observed(key, layer)
    try:
        yield digests
    finally:
        for method in methods.values():
            del method.process_weights_after_loading


def _sources(model: nn.Module, shapes: Shapes) -> dict[str, list[tuple[str, int]]]:
    """vLLM's parameter name -> the trainer's names whose rows it holds, in order, with their numbers of rows."""
    packed = {part: whole for whole, parts in getattr(model, "packed_modules_mapping", {}).items() for part in parts}
    places = {
        part: at for parts in getattr(model, "packed_modules_mapping", {}).values() for at, part in enumerate(parts)
    }
    found: dict[str, list[tuple[int, str, int]]] = {}
    for name, shape in shapes.items():
        module, _, leaf = name.rpartition(".")
        parent, _, last = module.rpartition(".")
        target = f"{parent}.{packed[last]}.{leaf}" if last in packed else name
        found.setdefault(target, []).append((places.get(last, 0), name, shape[0] if shape else 1))
    return {target: [(name, rows) for _, name, rows in sorted(parts)] for target, parts in found.items()}


def _digests(param: Tensor, sources: list[tuple[str, int]]) -> dict[str, int]:
    """CRC-32 of each source's rows of a parameter."""
    rows = param.detach().reshape(-1) if param.dim() == 0 else param.detach()
    parts = rows[: sum(num for _, num in sources)].split([num for _, num in sources])
    return {
        name: zlib.crc32(memoryview(part.contiguous().reshape(-1).view(torch.uint8).cpu().numpy()))
        for (name, _), part in zip(sources, parts, strict=True)
    }


def _is_known(sources: list[tuple[str, int]], digests: Mapping[str, int]) -> bool:
    return all(name in digests for name, _ in sources)


def _put_back(model: nn.Module) -> None:
    """Give every layer that waits for the rest of its weights its old ones, and forget what had come."""
    from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info

    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            _place_kernel_tensors(layer, info)
            info.reset()
