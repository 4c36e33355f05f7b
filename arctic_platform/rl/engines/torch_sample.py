"""The sampling engine on plain PyTorch: the embedded sampler over its own copy of the weights."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from arctic_platform.errors import InputError, WeightSyncError
from arctic_platform.rl.config import ArcticRLClientConfig
from arctic_platform.rl.engines.base import Progress
from arctic_platform.rl.engines.models import copy_model, eos_token_ids, load_tokenizer
from arctic_platform.rl.protocol import GenerateResponse, SamplingParams
from arctic_platform.rl.zorro_inference.sampler import Sampler


class TorchSampleEngine:
    """Draws rollouts. Prefixes stay cached between calls; `zorro_inference.prefix_cache_policy` says across what.

    Args:
        model: copied, unless `owns_model` says that the engine may have it. Copy before a trainer prepares it.
    """

    def __init__(self, config: ArcticRLClientConfig, model: PreTrainedModel, *, owns_model: bool = False) -> None:
        self.model = model.requires_grad_(False).eval() if owns_model else copy_model(model)
        self.version = 0
        self.is_asleep = False
        self.is_complete = True
        self.config = config
        self._has_weights = True
        self._shapes: dict[str, torch.Size] = {}
        self._tokenizer = load_tokenizer(config.model)
        self._samplers = {share: self._sampler(share) for share in (True, False)}

    @property
    def num_parameters(self) -> int:
        """Of this copy of the policy."""
        return sum(param.numel() for param in self.model.parameters())

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        share: bool | None = None,
        progress: Progress | None = None,
    ) -> GenerateResponse:
        """Draw `params.n` rollouts per prompt, in prompt order.

        share: by default as configured, over what is cached. One that is given asks for a measurement, which begins
        with nothing: no cached prefixes, no laid-out weights.

        Raises:
            InputError: the engine sleeps, or a prompt does not fit. WeightSyncError: the weights are not whole.
        """
        if self.is_asleep:
            raise InputError("the sampler is asleep; call wake_sampling() before generate()")
        if not self.is_complete:
            raise WeightSyncError("the sampler's weights are not whole; call sync_weights() before generate()")
        if share is None:
            return self._samplers[self.config.zorro_inference.enable].generate(prompts, params, progress)
        self._samplers[share].free_memory()
        response = self._samplers[share].generate(prompts, params, progress)
        if share != self.config.zorro_inference.enable:
            self._samplers[share].free_memory()
        return response

    def begin_overwrite(self) -> None:
        """The weights are about to be written piece by piece: refuse to generate until `adopt`."""
        self.is_complete = False

    def adopt(self, version: int) -> None:
        """The weights now are the trainer's of `version`."""
        self.version = version
        self.is_complete = True
        for sampler in self._samplers.values():
            sampler.update_weights(version)

    def sleep(self, level: int = 1) -> None:
        """Refuse calls until `wake`, and free cached keys and values. Level 1 keeps the weights.

        Level 2 frees the weights as well: after `wake` a sync must bring them back before anything is generated.
        """
        self.is_asleep = True
        for sampler in self._samplers.values():
            sampler.free_memory()
        if level == 2 and self._has_weights:
            self._shapes = {name: param.shape for name, param in self.model.named_parameters()}
            for param in self.model.parameters():
                param.data = param.data.new_empty(0)
            self._has_weights = self.is_complete = False

    def wake(self) -> None:
        """Take calls again; after level 2 only a sync, which must come first."""
        if not self._has_weights:
            for name, param in self.model.named_parameters():
                param.data = param.data.new_empty(self._shapes[name])
            self._has_weights = True
        self.is_asleep = False

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix, of every version."""
        for sampler in self._samplers.values():
            sampler.reset_prefix_cache()

    def close(self) -> None:
        """Nothing runs beside this object."""

    def _sampler(self, share: bool) -> Sampler:
        config = self.config.zorro_inference
        return Sampler(
            self.model,
            eos_token_ids=eos_token_ids(self.model),
            tokenizer=self._tokenizer,
            share=share,
            probe=share,
            max_batch_rows=config.max_batch_rows,
            kv_cache_tokens=config.kv_cache_tokens,
            prefix_cache_policy=config.prefix_cache_policy,
            pack_weights=config.pack_weights,
        )
