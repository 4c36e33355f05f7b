"""A batch of rows through a model: shared where that saves enough, otherwise as the plain padded batch."""

from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from arctic_platform.errors import InputError
from arctic_platform.forest import RowOrder, order_rows
from arctic_platform.forest.cost import ModelShape
from arctic_platform.rl.config import ZoRRoTrainConfig
from arctic_platform.rl.engines.wrapped import PassModule, Root, result_through, values_through
from arctic_platform.rl.protocol import RolloutBatch
from arctic_platform.rl.ragged import Ragged
from arctic_platform.rl.zorro_train.logprobs import LogitsMode
from arctic_platform.rl.zorro_train.module_patcher import Head, ModuleReconstructionPatcher, RowValues, find_head
from arctic_platform.rl.zorro_train.planner import Limits, Plan, plan_padded, plan_visits
from arctic_platform.rl.zorro_train.proof import measure_receipt, plain_attention, plain_rows
from arctic_platform.rl.zorro_train.router import find_router_loss
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
    for b in range(batch.num_rows):
        prompt, response = batch.prompts.array(b), batch.responses.array(b)
        row = np.concatenate([prompt, response], dtype=np.int64)
        if row.max() >= vocab_size:
            raise InputError(f"row {b} has token id {row.max()}; the model's vocabulary ends at {vocab_size - 1}")
        if max_row_len is not None and len(row) > max_row_len:
            raise InputError(
                f"row {b} has {len(prompt)} prompt and {len(response)} response tokens, the model takes {max_row_len} "
                "in all; shorten the prompt or lower max_tokens"
            )
        ids.append(row)
        targets.append(np.arange(len(row)) >= len(prompt))
    keys = None if batch.content_keys is None else [row.array.astype(np.int64) for row in batch.content_keys]
    return Rows(ids, targets, keys)


@dataclass(frozen=True)
class MicroBatch:
    """Values of some rows: `rows` their indices in the batch, `values` in that order, `tokens` what was computed.

    An empty pass, which keeps step with other ranks, has no rows and values of length 0 with a graph through the model.
    """

    rows: list[int]
    values: RowValues
    tokens: int

    @property
    def is_empty(self) -> bool:
        """Whether this is an empty pass."""
        return not self.rows

    def detached(self) -> "MicroBatch":
        """The same without the graph, to be kept while other micro-batches run."""
        kept = {name: getattr(self.values, name) for name in ("logprobs", "entropy", "aux_loss")}
        values = replace(self.values, **{name: x if x is None else x.detach() for name, x in kept.items()})
        return replace(self, values=values)


@dataclass(frozen=True)
class PassPlan:
    """Whether a batch is shared, the rows of each pass, and, where it is shared, their order and what is held."""

    is_shared: bool
    parts: list[list[int]]
    stages: list[Stage] = field(default_factory=list)
    visits: RowOrder | None = None


@dataclass(frozen=True)
class _PlainModel:
    """What the unshared pass reads of a patcher, for a model that is not prepared for sharing."""

    model: PreTrainedModel
    head: Head
    logits_optimization: LogitsMode
    logits_peak_gib: float | None


EMPTY_PASS = Rows([np.zeros(2, np.int64)], [np.array([False, True])])
"""A row of two tokens, the second a target, so that every weight takes part."""


class RowPasses:
    """Runs rows through one model. The model is prepared for sharing when the first shared pass needs it.

    root: what every pass runs inside, see wrapped.py; none: a PassModule of the model. in_lockstep: all ranks call the
    methods alike and run equal numbers of passes, since passes contain collectives; no prefix is held between passes
    then, and a pass of rows without targets computes log-probs (of nothing) all the same.
    """

    def __init__(
        self, model: PreTrainedModel, config: ZoRRoTrainConfig, *, root: Root | None = None, in_lockstep: bool = False
    ) -> None:
        self.model = model
        self.config = config
        self.root: Root = PassModule(model) if root is None else root
        self.in_lockstep = in_lockstep
        self.head = find_head(model, is_fp32=config.fp32_lm_head)
        self.shape = _shape_of(model)
        router_loss = find_router_loss(model)
        self.router_coef = router_loss.coef if router_loss else 0.0
        self._patcher: ModuleReconstructionPatcher | None = None
        self._stages_exactly: bool | None = False if in_lockstep else None
        if config.enable:
            self._prepared()

    @property
    def device(self) -> torch.device:
        """Where the model's first parameter lives."""
        return next(self.model.parameters()).device

    @property
    def max_row_len(self) -> int | None:
        """Most tokens of a row, where the model has such a limit."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    def rows_of(self, batch: RolloutBatch) -> Rows:
        """The rows of a batch, checked against the model. Raises InputError."""
        return rows_of(batch, vocab_size=self.head.vocab_size, max_row_len=self.max_row_len)

    def prepare(self, override: bool | None) -> None:
        """Prepare the model for sharing if a call asks for it; in lockstep, before ranks plan rows of their own."""
        if self.in_lockstep and self._is_wanted(override):
            self._prepared()

    def _is_wanted(self, override: bool | None) -> bool:
        return self.config.enable if override is None else override

    def plan(self, rows: Rows, override: bool | None, *, scoring: bool = False) -> PassPlan:
        """How to run `rows`: shared as asked for, if that saves at least `min_saving`, and cut to the budgets.

        scoring: the passes keep nothing for a backward, and have budgets of their own.
        """
        limits = Limits.of(self.config, scoring=scoring)
        if self._is_wanted(override) and rows.ids:
            before = np.array([len(mask) - int(mask.sum()) for mask in rows.targets])
            visits = order_rows(
                rows.ids,
                granularity=self.config.granularity,
                prompt_lens=before,
                content_keys=rows.content_keys,
            )
            if 1.0 - visits.num_packed(self.config.min_shared) / rows.num_tokens >= self.config.min_saving:
                shared = plan_visits(
                    visits, limits, prompt_lens=before, shape=self.shape, min_shared=self.config.min_shared
                )
                return self._staged(rows, _parts(shared), visits, limits)
        return PassPlan(False, _parts(plan_padded([len(row) for row in rows.ids], limits, shape=self.shape)))

    def _staged(self, rows: Rows, parts: list[list[int]], visits: RowOrder, limits: Limits) -> PassPlan:
        """In stages where one tree fills several micro-batches, otherwise the given ones."""
        if len(parts) > 1 and self._can_stage():
            stages = plan_stages(
                self._prepared(),
                rows.ids,
                rows.targets,
                max_token_len=limits.max_token_len,
                max_rows=limits.most_rows,
                content_keys=rows.content_keys,
                min_saving=self.config.min_saving,
                visits=visits,
            )
            if num_staged_groups(stages):
                return PassPlan(True, [stage.rows for stage in stages], stages, visits)
        return PassPlan(True, parts, [Stage(part) for part in parts], visits)

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
        self, rows: Rows, plan: PassPlan, *, temperature: float, calculate_entropy: bool, num_passes: int = 0
    ) -> Iterator[MicroBatch]:
        """Forward passes one after the other; use up (and run backward through) each before asking for the next.

        num_passes: empty passes follow until there are so many.
        """
        if plan.is_shared and num_staged_groups(plan.stages):
            yield from self._staged_passes(rows, plan, temperature, calculate_entropy)
            return
        for chosen in plan.parts:
            yield self.one_pass(rows, plan, chosen, temperature=temperature, calculate_entropy=calculate_entropy)
        for _ in range(num_passes - len(plan.parts)):
            yield self.one_pass(rows, plan, [], temperature=temperature, calculate_entropy=calculate_entropy)

    def one_pass(
        self, rows: Rows, plan: PassPlan, chosen: list[int], *, temperature: float, calculate_entropy: bool
    ) -> MicroBatch:
        """The rows `chosen` of a batch, or an empty pass where there are none."""
        part = rows.select(chosen)
        is_padding = not chosen or (self.in_lockstep and not any(mask.any() for mask in part.targets))
        given = EMPTY_PASS if is_padding else part
        visits = plan.visits.select(chosen) if plan.is_shared and plan.visits and not is_padding else None

        def run() -> RowValues:
            if plan.is_shared:
                return self._prepared().forward_rows(
                    given.ids,
                    given.targets,
                    temperature=temperature,
                    calculate_entropy=calculate_entropy,
                    content_keys=given.content_keys,
                    visits=visits,
                )
            return plain_rows(
                self._plain_model(),
                given.ids,
                given.targets,
                temperature=temperature,
                calculate_entropy=calculate_entropy,
                padded=True,
            )

        values = values_through(self.root, run)
        if is_padding:
            return MicroBatch(chosen, _nothing_of(values, len(chosen)), 0)
        if plan.is_shared:
            return MicroBatch(chosen, values, values.forest.num_tokens if values.forest else 0)
        return MicroBatch(chosen, values, len(chosen) * max(len(row) for row in part.ids))

    def _staged_passes(
        self, rows: Rows, plan: PassPlan, temperature: float, calculate_entropy: bool
    ) -> Iterator[MicroBatch]:
        """Passes behind held prefixes, on one rank with whole weights: they need no hook of the root."""
        shared = run_stages(
            self._prepared(),
            rows.ids,
            rows.targets,
            plan.stages,
            temperature=temperature,
            calculate_entropy=calculate_entropy,
            content_keys=rows.content_keys,
            visits=plan.visits,
        )
        for one in shared:
            yield MicroBatch(one.rows, one.values, one.num_tokens)

    def sample_of(self, rows: Rows, plan: PassPlan) -> Rows:
        """Rows spread over the first micro-batch, as many as a receipt compares."""
        first = plan.parts[0] if plan.parts else []
        num = min(self.config.receipt_rows, len(first))
        return rows.select([first[at * len(first) // num] for at in range(num)])

    def receipt(self, rows: Rows, plan: PassPlan, temperature: float) -> dict[str, float]:
        """Metrics of a comparison, on rows spread over a micro-batch, of shared results with those of each row alone.

        Raises ExactnessError beyond the tolerance. No gradient of the model is touched.
        """
        sample = self.sample_of(rows, plan)
        receipt = measure_receipt(
            self._prepared(),
            sample.ids,
            sample.targets,
            temperature=temperature,
            tolerance=self.config.receipt_tolerance,
            content_keys=sample.content_keys,
        )
        return receipt.metrics()

    def _plain_model(self) -> _PlainModel:
        config = self.config
        peak_gib = config.logits_optimization_peak_mem_size_in_gib
        return _PlainModel(self.model, self.head, config.logits_optimization, peak_gib)

    def _prepared(self) -> ModuleReconstructionPatcher:
        if self._patcher is None:
            self._patcher = result_through(self.root, self._prepare_model)
        return self._patcher

    @torch.no_grad()
    def _prepare_model(self) -> ModuleReconstructionPatcher:
        """The isolation probe runs in here, on every rank alike."""
        return ModuleReconstructionPatcher(
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


def _nothing_of(values: RowValues, num_rows: int) -> RowValues:
    """No values of `num_rows` rows, with the graph of `values`."""
    entropy = None if values.entropy is None else values.entropy[:0]
    return RowValues(values.logprobs[:0], entropy, np.zeros(num_rows + 1, np.int64))


def _parts(plan: Plan) -> list[list[int]]:
    """The rows of each micro-batch of a plan for one rank."""
    return [list(batch.rows) for batch in plan.ranks[0]]


def _shape_of(model: PreTrainedModel) -> ModelShape | None:
    """The sizes that costs depend on; None, which makes every token cost the same, where the config names none."""
    try:
        return ModelShape.of(model.config)
    except InputError:
        return None


def flat(values: Ragged | None, rows: list[int], like: Tensor) -> Tensor | None:
    """Per-token values of some rows as one tensor [M], in the type and on the device of `like`."""
    if values is None:
        return None
    return torch.from_numpy(values.gather(rows)).to(like)
