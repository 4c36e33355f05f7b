"""What runs inside vLLM's worker when the sampler takes new weights: load them, and read back what was loaded.

vLLM keeps some of a model's weights under other names and in other shapes: q, k and v are one matrix, gate and up are
another, and on CPU a linear layer's matrix is laid out for its matmul and then dropped. So each layer's weights are
digested at the last moment at which they exist as a matrix, right before vLLM lays them out.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from arctic_platform.rl.weight_sync.base import digest

Shapes = Mapping[str, tuple[int, ...]]


def report_logprobs(worker: Any, temperature: float) -> None:
    """Define log-probs as the model's own at `temperature`, whatever filters and penalties a token is drawn under.

    vLLM knows them before all that and without the temperature, or behind all that; a trainer needs neither.
    """
    scale = temperature or 1.0
    worker.model_runner.sampler.compute_logprobs = lambda logits: torch.log_softmax(logits.float() / scale, dim=-1)


def load_weights(worker: Any, weights: Iterable[tuple[str, Tensor]], shapes: Shapes) -> dict[str, int]:
    """Load `weights`, named as in the trainer's model, and return the digests of what vLLM then holds, by those names.

    shapes: of all weights that will come. A weight that vLLM stores in a way not known here has no digest. If loading
    fails, each layer has either its old or its new weights, and loading again is possible.
    """
    from vllm.config import set_current_vllm_config

    model = worker.get_model()
    witness = _Witness(model, _sources(model, shapes))
    with set_current_vllm_config(worker.vllm_config), torch.no_grad():
        try:
            with witness.watching():
                worker.reload_weights(weights_iterator=iter(weights))
        except BaseException:
            _put_back(model)
            raise
        witness.lay_out_the_rest()
    return witness.all_digests()


class _Witness:
    """Digests the parameters of every layer when vLLM is about to lay them out.

    sources: vLLM's parameter name -> the trainer's names whose rows it holds, in order, with their numbers of rows.
    """

    def __init__(self, model: nn.Module, sources: Mapping[str, list[tuple[str, int]]]) -> None:
        self._names = {layer: name for name, layer in model.named_modules()}
        self._params = dict(model.named_parameters())
        self._owners = {name: model.get_submodule(name.rpartition(".")[0]) for name in self._params}
        self._sources = {name: parts for name, parts in sources.items() if name in self._params}
        self._digests: dict[str, int] = {}
        self._seen: set[nn.Module] = set()

    @contextmanager
    def watching(self) -> Generator[None]:
        """Look at each layer before its `process_weights_after_loading`."""
        methods = list({id(method): method for method in map(_method_of, self._names) if method is not None}.values())
        for method in methods:
            method.process_weights_after_loading = partial(self._observe, method.process_weights_after_loading)
        try:
            yield
        finally:
            for method in methods:
                del method.process_weights_after_loading

    def lay_out_the_rest(self) -> None:
        """Lay out again what shares its matrix with a loaded layer: a tied head would keep the old one."""
        for layer in self._names:
            weight = getattr(layer, "weight", None)
            if hasattr(layer, "cpu_linear") and layer not in self._seen and weight is not None and weight.numel():
                _method_of(layer).process_weights_after_loading(layer)

    def all_digests(self) -> dict[str, int]:
        """By the trainer's names. Raises RuntimeError for a weight that was not stored, or never sent."""
        for name, layer in self._owners.items():
            if name not in self._sources and layer not in self._seen:
                raise RuntimeError(f"nothing that was sent belongs into {name!r}")
        for name, parts in self._sources.items():
            if parts[0][0] in self._digests:
                continue
            if not self._params[name].numel():
                raise RuntimeError(f"{parts[0][0]!r} was sent and not stored in {name!r}")
            self._digests.update(_digests(self._params[name], parts))
        return self._digests

    def _observe(self, process: Callable[[nn.Module], None], layer: nn.Module) -> None:
        self._seen.add(layer)
        for name, param in layer.named_parameters(prefix=self._names[layer], recurse=False):
            if name in self._sources:
                self._digests.update(_digests(param, self._sources[name]))
        process(layer)


def _method_of(layer: nn.Module) -> Any:
    return getattr(layer, "quant_method", None)


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
    """Digest of each source's rows of a parameter."""
    rows = param.detach().reshape(-1) if param.dim() == 0 else param.detach()
    lens = [num for _, num in sources]
    if sum(lens) > len(rows):
        raise ValueError(f"{sources[0][0]!r} has {sum(lens)} rows with its neighbours, vLLM's matrix {len(rows)}")
    parts = rows[: sum(lens)].split(lens)
    return {name: digest(part) for (name, _), part in zip(sources, parts, strict=True)}


def _put_back(model: nn.Module) -> None:
    """Give every layer that waits for the rest of its weights its old ones, and forget what had come."""
    from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info

    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            _place_kernel_tensors(layer, info)
            info.reset()
