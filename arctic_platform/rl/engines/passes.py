"""A batch of rows through a model: shared where that saves enough, otherwise as the plain padded batch."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from arctic_platform.errors import InputError
from arctic_platform.forest import build_forest
from arctic_platform.rl.config import ZoRRoTrainConfig
from arctic_platform.rl.protocol import RolloutBatch
from arctic_platform.rl.zorro_train.logprobs import LogitsMode
from arctic_platform.rl.zorro_train.module_patcher import Head, ModuleReconstructionPatcher, RowValues, find_head
from arctic_platform.rl.zorro_train.proof import measure_receipt, plain_attention, plain_rows
from arctic_platform.rl.zorro_train.schedule import cut_micro_batches
from arctic_platform.rl.zorro_train.staged import Stage, can_stage, num_staged_groups, plan_stages, run_stages


@dataclass(frozen=True)
class Rows:
    """`ids[b]`: prompt and response of row b, int64. `targets[b]`: True at its response tokens.

    `content_keys[b]`: what its tokens stand for, int64, where equal ids may differ in that; none: they do not.
    """

    ids: list[np.ndarray]
    targets: list[np.ndarray]
    content_keys: list[np.ndarray] | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows, shared ones counted once per row."""
        return sum(len(row) for row in self.ids)

    def select(self, rows: list[int]) -> "Rows":
        """Some of the rows, in the given order."""
        keys = None if self.content_keys is None else [self.content_keys[b] for b in rows]
        return Rows([self.ids[b] for b in rows], [self.targets[b] for b in rows], keys)


def rows_of(batch: RolloutBatch, *, vocab_size: int, max_row_len: int | None) -> Rows:
    """The rows of a batch as arrays. Raises InputError for a token id or a length that the model does not have."""
    ids, targets = [], []
    for b, (prompt, response) in enumerate(zip(batch.prompts, batch.responses, strict=True)):
        row = np.array(prompt + response, dtype=np.int64)
        if row.max() >= vocab_size:
            raise InputError(f"row {b} has token id {row.max()}; the model's vocabulary ends at {vocab_size - 1}")
        if max_row_len is not None and len(row) > max_row_len:
            raise InputError(
                f"row {b} has {len(prompt)} prompt and {len(response)} response tokens, the model takes {max_row_len} "
                "in all; shorten the prompt or lower max_tokens"
            )
        ids.append(row)
        targets.append(np.arange(len(row)) >= len(prompt))
    keys = None if batch.content_keys is None else [np.array(row, dtype=np.int64) for row in batch.content_keys]
    return Rows(ids, targets, keys)


@dataclass(frozen=True)
class MicroBatch:
    """Values of some rows: `rows` their indices in the batch, `values` in that order, `tokens` what was computed."""

    rows: list[int]
    values: RowValues
    tokens: int

    def detached(self) -> "MicroBatch":
        """The same without the graph, to be kept while other micro-batches run."""
        entropy = self.values.entropy
        values = replace(
            self.values, logprobs=self.values.logprobs.detach(), entropy=None if entropy is None else entropy.detach()
        )
        return replace(self, values=values)


@dataclass(frozen=True)
class PassPlan:
    """Whether a batch is shared, the rows of each pass, and, where it is shared, what is held while they run."""

    is_shared: bool
    parts: list[list[int]]
    stages: list[Stage] = field(default_factory=list)


@dataclass(frozen=True)
class _PlainModel:
    """What the unshared pass reads of a patcher, for a model that is not prepared for sharing."""

    model: PreTrainedModel
    head: Head
    logits_optimization: LogitsMode
    logits_peak_gib: float | None


class RowPasses:
    """Runs rows through one model. The model is prepared for sharing when the first shared pass needs it."""

    def __init__(self, model: PreTrainedModel, config: ZoRRoTrainConfig) -> None:
        self.model = model
        self.config = config
        self.head = find_head(model, is_fp32=config.fp32_lm_head)
        self._patcher: ModuleReconstructionPatcher | None = None
        self._stages_exactly: bool | None = None
        if config.enable:
            self._prepared()

    @property
    def device(self) -> torch.device:
        """Where the model's first parameter lives."""
        return next(self.model.parameters()).device

    def rows_of(self, batch: RolloutBatch) -> Rows:
        """The rows of a batch, checked against the model. Raises InputError."""
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return rows_of(batch, vocab_size=self.head.vocab_size, max_row_len=limit)

    def plan(self, rows: Rows, override: bool | None) -> PassPlan:
        """How to run `rows`: shared as asked for, if that saves at least `min_saving`, and cut to the budgets."""
        wanted = self.config.enable if override is None else override
        if not wanted or not rows.ids:
            return PassPlan(False, self._limited(cut_padded(rows.ids, self.config.max_token_len)))
        forest = build_forest(
            rows.ids,
            granularity=self.config.granularity,
            prompt_lens=[len(mask) - int(mask.sum()) for mask in rows.targets],
            min_shared=self.config.min_shared,
            content_keys=rows.content_keys,
        )
        if 1.0 - forest.num_tokens / rows.num_tokens < self.config.min_saving:
            return self.plan(rows, False)
        budget = self.config.max_token_len
        if budget is None or forest.num_tokens <= budget:
            parts = self._limited([list(range(len(rows.ids)))])
        else:
            parts = self._limited(cut_micro_batches(rows.ids, budget))
        return self._staged(rows, parts)

    def _staged(self, rows: Rows, parts: list[list[int]]) -> PassPlan:
        """In stages where one tree fills several micro-batches, otherwise the given ones."""
        if len(parts) > 1 and self._can_stage():
            stages = plan_stages(
                self._prepared(),
                rows.ids,
                rows.targets,
                max_token_len=self.config.max_token_len,
                max_rows=self.config.max_rollouts,
                content_keys=rows.content_keys,
                min_saving=self.config.min_saving,
            )
            if num_staged_groups(stages):
                return PassPlan(True, [stage.rows for stage in stages], stages)
        return PassPlan(True, parts, [Stage(part) for part in parts])

    def _can_stage(self) -> bool:
        """Asked of the model once, when a batch first exceeds the budget."""
        if self._stages_exactly is None:
            self._stages_exactly = can_stage(self._prepared())
        return self._stages_exactly

    @contextmanager
    def evaluating(self) -> Generator[None]:
        """The model in eval mode, so that scores are free of dropout; afterwards as it was."""
        was_training = self.model.training
        self.model.eval()
        try:
            yield
        finally:
            self.model.train(was_training)

    def attention(self, is_shared: bool) -> AbstractContextManager[None]:
        """Hold this open around the whole of `micro_batches` and the backward passes."""
        if is_shared or self._patcher is None:
            return nullcontext()
        return plain_attention(self.model)

    def micro_batches(
        self, rows: Rows, plan: PassPlan, *, temperature: float, calculate_entropy: bool
    ) -> Iterator[MicroBatch]:
        """Forward passes one after the other; use up (and run backward through) each before asking for the next."""
        if plan.is_shared:
            shared = run_stages(
                self._prepared(),
                rows.ids,
                rows.targets,
                plan.stages,
                temperature=temperature,
                calculate_entropy=calculate_entropy,
                content_keys=rows.content_keys,
            )
            for one in shared:
                yield MicroBatch(one.rows, one.values, one.num_tokens)
            return
        plain = cast(ModuleReconstructionPatcher, self._plain_model())
        for chosen in plan.parts:
            part = rows.select(chosen)
            values = plain_rows(
                plain,
                part.ids,
                part.targets,
                temperature=temperature,
                calculate_entropy=calculate_entropy,
                padded=True,
            )
            yield MicroBatch(chosen, values, len(chosen) * max(len(row) for row in part.ids))

    def receipt(self, rows: Rows, plan: PassPlan, temperature: float) -> dict[str, float]:
        """Metrics of a comparison, on rows spread over a micro-batch, of shared results with those of each row alone.

        Raises ExactnessError beyond the tolerance. No gradient of the model is touched.
        """
        first = plan.parts[0]
        num = min(self.config.receipt_rows, len(first))
        sample = rows.select([first[at * len(first) // num] for at in range(num)])
        receipt = measure_receipt(
            self._prepared(),
            sample.ids,
            sample.targets,
            temperature=temperature,
            tolerance=self.config.receipt_tolerance,
            content_keys=sample.content_keys,
        )
        return receipt.metrics()

    def _limited(self, parts: list[list[int]]) -> list[list[int]]:
        """Parts of at most `max_rollouts` rows."""
        size = self.config.max_rollouts
        if size is None:
            return parts
        return [part[at : at + size] for part in parts for at in range(0, len(part), size)]

    def _plain_model(self) -> _PlainModel:
        config = self.config
        peak_gib = config.logits_optimization_peak_mem_size_in_gib
        return _PlainModel(self.model, self.head, config.logits_optimization, peak_gib)

    def _prepared(self) -> ModuleReconstructionPatcher:
        if self._patcher is None:
            self._patcher = ModuleReconstructionPatcher(
                self.model,
                logits_optimization=self.config.logits_optimization,
                attn_implementation=self.config.attn_implementation,
                use_split_attention=self.config.use_split_attention,
                granularity=self.config.granularity,
                min_shared=self.config.min_shared,
                logits_optimization_peak_mem_size_in_gib=self.config.logits_optimization_peak_mem_size_in_gib,
                fp32_lm_head=self.config.fp32_lm_head,
                compile_backend=self.config.compile_backend,
            )
        return self._patcher


def cut_padded(rows: list[np.ndarray], max_token_len: int | None) -> list[list[int]]:
    """Row indices of padded batches of at most `max_token_len` positions, rows of like length together.

    A row longer than the budget goes alone. None: one batch.
    """
    if max_token_len is None:
        return [list(range(len(rows)))] if rows else []
    parts: list[list[int]] = []
    for b in sorted(range(len(rows)), key=lambda b: -len(rows[b])):
        if not parts or (len(parts[-1]) + 1) * len(rows[parts[-1][0]]) > max_token_len:
            parts.append([])
        parts[-1].append(b)
    return [sorted(part) for part in parts]


def flat(values: Sequence[Sequence[float]] | None, rows: list[int], like: Tensor) -> Tensor | None:
    """Per-token lists of some rows as one tensor [M], in the type and on the device of `like`."""
    if values is None:
        return None
    return torch.tensor([value for b in rows for value in values[b]], dtype=like.dtype, device=like.device)
