"""What sharing will bring a batch, before anything runs: bound, saving, and what cuts take of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from arctic_platform.forest import Forest, RowOrder, build_forest
from arctic_platform.forest.cost import ModelShape
from arctic_platform.rl.config import ZoRRoTrainConfig
from arctic_platform.rl.zorro_train.planner import Limits, plan_batch
from arctic_platform.rl.zorro_train.staged import Stage, num_staged_groups, plan_stages


@dataclass(frozen=True)
class Forecast:
    """Counts of tokens that one forward and backward over a batch computes, and what follows from them.

    `num_tokens_unshared`: every row by itself, unpadded. `num_tokens_whole`: one pass over the whole forest.
    `num_tokens_cut`: micro-batches under the budget, each computing its prefixes. `num_tokens_staged`: the same with
    prefixes held, what the engine does for models that attend in every layer. `flop_bound`: unshared over shared FLOPs
    of the whole batch, by tokens where the model's sizes are not known. `is_active`: whether the saving reaches
    `min_saving`; below it the engine runs plain padded batches.
    """

    num_rows: int
    num_segments: int
    num_tokens_unshared: int
    num_tokens_whole: int
    num_tokens_cut: int
    num_tokens_staged: int
    num_micro_batches: int
    num_staged_groups: int
    flop_bound: float
    min_saving: float

    @property
    def saving(self) -> float:
        """Part of the unshared tokens that is not computed."""
        return 1.0 - self.num_tokens_staged / max(self.num_tokens_unshared, 1)

    @property
    def lost_to_cuts(self) -> float:
        """Part of what sharing could save that micro-batches without held prefixes would compute again."""
        could = self.num_tokens_unshared - self.num_tokens_whole
        return (self.num_tokens_cut - self.num_tokens_whole) / could if could else 0.0

    @property
    def is_active(self) -> bool:
        """Whether the engine shares this batch."""
        return 1.0 - self.num_tokens_whole / max(self.num_tokens_unshared, 1) >= self.min_saving

    def lines(self) -> list[str]:
        """The forecast as text, a line for each thing to know."""
        state = "on" if self.is_active else f"off: saves less than min_saving={self.min_saving:g}"
        return [
            f"rows              {self.num_rows} in {self.num_segments} segments",
            f"tokens            {self.num_tokens_staged} computed instead of {self.num_tokens_unshared}, "
            f"{100 * self.saving:.1f} % saved",
            f"bound             {self.flop_bound:.2f}x in FLOPs, whole batch in one pass",
            f"micro-batches     {self.num_micro_batches}, {self.num_staged_groups} groups in stages",
            f"lost to cuts      {100 * self.lost_to_cuts:.1f} % of the saving without stages, "
            f"{100 * self._lost_in_stages:.1f} % with them",
            f"sharing           {state}",
        ]

    @property
    def _lost_in_stages(self) -> float:
        could = self.num_tokens_unshared - self.num_tokens_whole
        return (self.num_tokens_staged - self.num_tokens_whole) / could if could else 0.0


@dataclass(frozen=True)
class _Sharing:
    """The options of a patcher that decide what is shared, without a model."""

    granularity: str
    min_shared: int

    def forest_of(
        self,
        rows: Sequence[ArrayLike],
        target_masks: Sequence[ArrayLike],
        content_keys: Sequence[ArrayLike] | None = None,
        visits: RowOrder | None = None,
    ) -> Forest:
        before = [len(np.asarray(mask)) - int(np.sum(mask)) for mask in target_masks]
        granularity = "prompt" if self.granularity == "prompt" else "trie"
        return build_forest(
            rows,
            granularity=granularity,
            prompt_lens=before,
            min_shared=self.min_shared,
            content_keys=content_keys,
            visits=visits,
        )


def forecast(
    prompts: Sequence[ArrayLike],
    responses: Sequence[ArrayLike],
    config: ZoRRoTrainConfig | None = None,
    shape: ModelShape | None = None,
) -> Forecast:
    """Plan a batch as the engine would and count. Raises InputError for token ids that are none."""
    config = config or ZoRRoTrainConfig()
    rows = [np.concatenate([np.asarray(p, np.int64), np.asarray(r, np.int64)]) for p, r in _pairs(prompts, responses)]
    lens = [len(np.asarray(prompt)) for prompt in prompts]
    masks = [np.arange(len(row)) >= length for row, length in zip(rows, lens, strict=True)]
    sharing = _Sharing(config.granularity, config.min_shared)
    whole = sharing.forest_of(rows, masks)
    limits = Limits.of(config)
    options = {"prompt_lens": lens, "shape": shape, "min_shared": config.min_shared}
    plan = plan_batch(rows, limits, granularity=config.granularity, **options)
    stages = plan_stages(
        sharing,
        rows,
        masks,
        max_token_len=config.max_token_len,
        max_rows=limits.most_rows,
        min_saving=config.min_saving,
    )
    alone = plan_batch(rows, Limits(max_rows=1), granularity=config.granularity, **options)
    parts = [list(batch.rows) for batches in plan.ranks for batch in batches]
    is_staged = num_staged_groups(stages) > 0
    cut = _staged_tokens(sharing, rows, masks, [Stage(part) for part in parts])
    return Forecast(
        num_rows=len(rows),
        num_segments=whole.num_segments,
        num_tokens_unshared=whole.num_row_tokens,
        num_tokens_whole=whole.num_tokens,
        num_tokens_cut=cut,
        num_tokens_staged=_staged_tokens(sharing, rows, masks, stages) if is_staged else cut,
        num_micro_batches=len(stages) if is_staged else len(parts),
        num_staged_groups=num_staged_groups(stages),
        flop_bound=float(alone.rank_costs.sum()) / plan.cost_whole if plan.cost_whole else 1.0,
        min_saving=config.min_saving,
    )


def _pairs(prompts: Sequence[ArrayLike], responses: Sequence[ArrayLike]) -> zip:
    return zip(prompts, responses, strict=True)


def _staged_tokens(sharing: _Sharing, rows: list[np.ndarray], masks: list[np.ndarray], stages: list[Stage]) -> int:
    """Tokens of all passes: each held run once, and what each micro-batch has behind its own."""
    total, runs = 0, {}
    for stage in stages:
        forest = sharing.forest_of([rows[b] for b in stage.rows], [masks[b] for b in stage.rows])
        total += forest.num_tokens - (stage.held[-1].end if stage.held else 0)
        begin = 0
        for run in stage.held:
            runs[run.run_id] = run.end - begin
            begin = run.end
    return total + sum(runs.values())
