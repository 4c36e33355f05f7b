"""One training engine over several ranks: rows go out as sub-forests of equal cost, answers come back in order.

    the caller's rows --> plan over ranks --> each rank its rows --> the same call on all of them --> the caller's order

What a rank computes is the plain engine's own code; counts, clipping and metrics are of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from arctic_platform.errors import ConfigError
from arctic_platform.forest import order_rows
from arctic_platform.forest.cost import ModelShape
from arctic_platform.rl.config import ArcticRLClientConfig
from arctic_platform.rl.engines.deepspeed_settings import deepspeed_settings
from arctic_platform.rl.engines.passes import Rows, rows_of
from arctic_platform.rl.protocol import (
    CheckpointResponse,
    ExportModelRequest,
    FwdBwdRequest,
    FwdBwdResponse,
    LoadCheckpointRequest,
    LogProbsRequest,
    LogProbsResponse,
    Message,
    PathResponse,
    Processing,
    RolloutBatch,
    SaveCheckpointRequest,
    SleepTrainingRequest,
    StepResponse,
    WeightNormResponse,
)
from arctic_platform.rl.ragged import Ragged
from arctic_platform.rl.weight_sync.session import SyncOffer
from arctic_platform.rl.workers.job import Job
from arctic_platform.rl.workers.launch import launcher_of
from arctic_platform.rl.workers.remote import RemoteEngine
from arctic_platform.rl.workers.watch import Answer, OnWait
from arctic_platform.rl.zorro_train.planner import Limits, plan_padded, plan_visits

ROW_FIELDS = (
    "prompts",
    "responses",
    "response_mask",
    "advantages",
    "old_logprobs",
    "ref_logprobs",
    "rollout_logprobs",
    "content_keys",
)


class RankGroup(RemoteEngine):
    """A TrainEngine whose work is done by `config.ranks.num_ranks` processes.

    Raises what a rank raises while it builds its engine, WorkerLostError for one that dies or does not come.
    """

    def __init__(self, config: ArcticRLClientConfig, *, on_wait: OnWait | None = None) -> None:
        if config.rank_engine == "deepspeed":
            deepspeed_settings(config)  # refuses them here, not once in every process
        size = config.ranks.num_ranks
        settings = for_workers(config)

        def job_of(rank: int, store: tuple[str, int] | None) -> Job:
            threads = launcher.num_threads
            return Job(role="train", rank=rank, size=size, store=store, config=settings, num_threads=threads)

        launcher = launcher_of(config)
        super().__init__(
            config,
            [f"rank {rank}" for rank in range(size)],
            launcher,
            job_of,
            needs_store=config.trains_in_ranks,
            remedy="its group was ended: load_checkpoint() starts it anew",
            on_wait=on_wait,
        )

    @property
    def num_steps(self) -> int:
        """Updates that were made."""
        return self._crew.state["num_steps"]

    @property
    def has_pending_gradients(self) -> bool:
        """Whether `fwd_bwd` was called since the last `step`."""
        return self._crew.state["has_pending_gradients"]

    @property
    def is_asleep(self) -> bool:
        """Whether the ranks sleep; a group that was started anew does not."""
        return self._crew.state["is_asleep"]

    @property
    def host(self) -> str:
        """Where the ranks reach this process."""
        return self._crew.host

    @property
    def _num_ranks(self) -> int:
        return self.config.ranks.num_ranks

    def log_probs(
        self, batch: RolloutBatch, processing: Processing | None = None, *, reference: bool = False
    ) -> LogProbsResponse:
        """As the plain engine's, rows spread over the ranks."""
        processing = processing or Processing()
        if reference and not self.config.reference:
            raise ConfigError("log_probs(reference=True) needs a reference model; set reference: true")
        held = self._spread(batch, processing, scoring=True)
        requests = [
            LogProbsRequest(batch=part_of(batch, rows), processing=processing, reference=reference) for rows in held
        ]
        answers = [answer.message(LogProbsResponse) for answer in self._call_with_rows("log_probs", requests, held)]
        return answers[0].model_copy(update=_in_order(answers, held, batch.num_rows))

    def fwd_bwd(self, batch: RolloutBatch, processing: Processing | None = None) -> FwdBwdResponse:
        """As the plain engine's: the loss is normalised over the rows of all ranks."""
        return self._pass("fwd_bwd", batch, processing, scoring=False)

    def fwd_no_grad(self, batch: RolloutBatch, processing: Processing | None = None) -> FwdBwdResponse:
        """The forward and loss of `fwd_bwd`, without gradients."""
        return self._pass("fwd_no_grad", batch, processing, scoring=True)

    def fwd_bwd_discarding(self, batch: RolloutBatch, processing: Processing | None = None) -> FwdBwdResponse:
        """The whole work of `fwd_bwd`, with nothing kept."""
        return self._pass("fwd_bwd_discarding", batch, processing, scoring=False)

    def step(self) -> StepResponse:
        """Clip, update, advance the schedule, clear the gradients, on all ranks."""
        return self._call("step")[0].message(StepResponse)

    def save_checkpoint(
        self, path: str | None = None, client_state: dict[str, Any] | None = None
    ) -> CheckpointResponse:
        """One folder, which any engine on any number of ranks can load."""
        request = SaveCheckpointRequest(path=path, client_state=client_state or {})
        return self._call("save_checkpoint", request)[0].message(CheckpointResponse)

    def load_checkpoint(self, path: str | None = None) -> CheckpointResponse:
        """Continue where a checkpoint was written; a group that was lost is started anew for that.

        Where the new group cannot load it, it is ended again: its weights would be the first ones.
        """
        request = LoadCheckpointRequest(path=path)
        if self.lost is None:
            return self._call("load_checkpoint", request)[0].message(CheckpointResponse)
        with self._crew.starting_anew():
            return self._call("load_checkpoint", request)[0].message(CheckpointResponse)

    def export_model(self, path: str) -> str:
        """Write the weights as a Hugging Face folder."""
        return self._call("export_model", ExportModelRequest(path=path))[0].message(PathResponse).path

    def weight_norm(self) -> float:
        """Euclidean norm over all parameters."""
        return self._call("weight_norm")[0].message(WeightNormResponse).norm

    def send_weights(self, offer: SyncOffer) -> None:
        """All ranks gather, the first one sends. Raises WeightSyncError with either side's reason."""
        options = [{"offer": offer.to_json()}] * self._num_ranks
        self._crew.call("send_weights", [None] * self._num_ranks, options)

    def sleep(self, target: Literal["cpu", "disk"] = "cpu") -> None:
        """Each rank moves its part out of its device's memory, or none does."""
        self._call("sleep", SleepTrainingRequest(target=target))

    def wake(self) -> None:
        """Each rank brings its part back."""
        self._call("wake")

    def _pass(self, name: str, batch: RolloutBatch, processing: Processing | None, *, scoring: bool) -> FwdBwdResponse:
        processing = processing or Processing()
        held = self._spread(batch, processing, scoring=scoring)
        has_pairs = processing.loss == "dpo"
        requests = [
            FwdBwdRequest(batch=part_of(batch, rows, with_pairs=has_pairs), processing=processing) for rows in held
        ]
        answers = [answer.message(FwdBwdResponse) for answer in self._call_with_rows(name, requests, held)]
        return answers[0].model_copy(update=_in_order(answers, held, batch.num_rows))

    def _spread(self, batch: RolloutBatch, processing: Processing, *, scoring: bool) -> list[list[int]]:
        """The rows of each rank. Raises InputError for a row that the model cannot take, before anything is sent."""
        shape = self._crew.state["shape"]
        limits = self._crew.state["limits"]
        rows = rows_of(batch, vocab_size=limits["vocab_size"], max_row_len=limits["max_row_len"])
        if self._num_ranks == 1 or not batch.num_rows:
            return [list(range(batch.num_rows)), *([] for _ in range(self._num_ranks - 1))]
        if processing.loss == "dpo" and batch.pairs is not None:
            return spread_pairs(batch, self._num_ranks)
        return spread_rows(
            rows,
            self.config,
            override=processing.zorro,
            scoring=scoring,
            shape=None if shape is None else ModelShape(**shape),
        )

    def _call(self, name: str, request: Message | None = None) -> list[Answer]:
        return self._crew.call(name, [request] * self._num_ranks)

    def _call_with_rows(self, name: str, requests: Sequence[Message], held: list[list[int]]) -> list[Answer]:
        options = [{"is_without_rows": not rows and self._num_ranks > 1} for rows in held]
        return self._crew.call(name, requests, options)


def spread_rows(
    rows: Rows,
    config: ArcticRLClientConfig,
    *,
    override: bool | None = None,
    scoring: bool = False,
    shape: ModelShape | None = None,
) -> list[list[int]]:
    """The rows of each rank, ascending: sub-forests of near-equal cost, or, where too little is shared, of rows alone.

    It is decided as the passes of one rank decide it, see `RowPasses.plan`.
    """
    zorro = config.zorro_train
    limits = Limits.of(zorro, num_ranks=config.ranks.num_ranks, scoring=scoring)
    plan = None
    if zorro.enable if override is None else override:
        before = np.array([len(mask) - int(mask.sum()) for mask in rows.targets])
        visits = order_rows(rows.ids, granularity=zorro.granularity, prompt_lens=before, content_keys=rows.content_keys)
        if 1.0 - visits.num_packed(zorro.min_shared) / rows.num_tokens >= zorro.min_saving:
            plan = plan_visits(visits, limits, prompt_lens=before, shape=shape, min_shared=zorro.min_shared)
    plan = plan or plan_padded([len(row) for row in rows.ids], limits, shape=shape)
    return [plan.rank_rows(rank) for rank in range(config.ranks.num_ranks)]


def spread_pairs(batch: RolloutBatch, num_ranks: int) -> list[list[int]]:
    """Rows of each rank, no pair apart: whatever pairs join goes, longest first, to the rank with fewest tokens."""
    joined = list(range(batch.num_rows))

    def root_of(row: int) -> int:
        while joined[row] != row:
            row = joined[row]
        return row

    assert batch.pairs is not None
    for first, second in batch.pairs.tolist():
        low, high = sorted((root_of(first), root_of(second)))
        joined[high] = low
    parts: dict[int, list[int]] = {}
    for row in range(batch.num_rows):
        parts.setdefault(root_of(row), []).append(row)
    lens = batch.prompts.lens + batch.responses.lens
    held: list[list[int]] = [[] for _ in range(num_ranks)]
    num_tokens = [0] * num_ranks
    for rows in sorted(parts.values(), key=lambda rows: -int(lens[rows].sum())):
        rank = num_tokens.index(min(num_tokens))
        held[rank] += rows
        num_tokens[rank] += int(lens[rows].sum())
    return [sorted(rows) for rows in held]


def part_of(batch: RolloutBatch, rows: list[int], *, with_pairs: bool = False) -> RolloutBatch:
    """Some rows of a batch, and the pairs among them by their new numbers."""
    if not with_pairs and batch.pairs is None and rows == list(range(batch.num_rows)):
        return batch
    chosen: dict[str, Any] = {
        name: None if (values := getattr(batch, name)) is None else values.select(rows) for name in ROW_FIELDS
    }
    chosen["pairs"] = None
    if with_pairs and batch.pairs is not None:
        at = {row: number for number, row in enumerate(rows)}
        inside = [[at[first], at[second]] for first, second in batch.pairs.tolist() if first in at]
        chosen["pairs"] = Ragged.from_rows(inside)
    return batch.model_copy(update=chosen)


def _in_order(
    answers: Sequence[LogProbsResponse | FwdBwdResponse], held: list[list[int]], num_rows: int
) -> dict[str, Any]:
    """Values per row in the caller's order; None where no rank computed any."""
    update: dict[str, Any] = {}
    for name in ("logprobs", "entropy"):
        if getattr(answers[0], name) is None:
            continue
        rows = [np.empty(0, np.float32)] * num_rows
        for answer, chosen in zip(answers, held, strict=True):
            values = getattr(answer, name)
            for at, row in enumerate(chosen):
                rows[row] = values.array(at)
        update[name] = Ragged.from_rows(rows)
    return update


def for_workers(config: ArcticRLClientConfig) -> ArcticRLClientConfig:
    """The settings as a rank sees them: its own device is the only one."""
    device = "cuda" if config.device.startswith("cuda") else "cpu"
    return config.model_copy(update={"device": device})
