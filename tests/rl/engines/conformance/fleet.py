"""One engine over any number of ranks, as the conformance tests see it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from arctic_platform.rl.engines.deepspeed_train import DeepSpeedTrainEngine
from arctic_platform.rl.engines.fsdp_train import FsdpTrainEngine
from arctic_platform.rl.engines.torch_train import TorchTrainEngine
from arctic_platform.rl.engines.world import ALONE
from arctic_platform.rl.protocol import Processing, RolloutBatch
from tests.rl.engines.builders import config, part_of
from tests.rl.engines.conformance.ranks import Ranks


@dataclass(frozen=True)
class Case:
    """An engine of a configuration, on so many ranks; in this process where it is alone and `is_here`."""

    name: str
    engine: Callable[..., TorchTrainEngine]
    num_ranks: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    is_here: bool = True
    marks: tuple[pytest.MarkDecorator, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}-{self.num_ranks}"


def zero(stage: int, num_ranks: int) -> Case:
    """DeepSpeed changes its process, so it never runs in this one. With a threshold of 0 stage 3 cuts every weight.

    Stages differ in how they cut what is spread, so all of them run on two ranks; on one rank, one in the default run.
    """
    needs = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the extra 'deepspeed'")
    is_slow = num_ranks == 1 and stage != 1
    shard = {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {})}
    settings = {"training_engine": "deepspeed", "deepspeed": {"zero_optimization": shard}}
    return Case(
        f"zero{stage}",
        DeepSpeedTrainEngine,
        num_ranks,
        {**settings, "ranks": {"num_ranks": num_ranks}},
        is_here=False,
        marks=(needs, *([pytest.mark.slow] if is_slow else [])),
    )


CASES = [
    Case("torch", TorchTrainEngine),
    Case("fsdp", FsdpTrainEngine, settings={"training_engine": "fsdp"}),
    Case("fsdp", FsdpTrainEngine, 2, settings={"training_engine": "fsdp", "ranks": {"num_ranks": 2}}),
    *(zero(stage, num_ranks) for num_ranks in (1, 2) for stage in range(4)),
]
"""Every engine that has to pass; a further one is a line here."""


class Fleet:
    """Engines of one case on all its ranks. `start` builds them anew; calls go to all ranks, rows are shared out."""

    def __init__(self, case: Case, ranks: Ranks | None) -> None:
        self.case = case
        self.ranks = ranks
        self._here: dict[str, Any] = {"world": ALONE}

    @classmethod
    def of(cls, case: Case, rank_groups: Callable[[int], Ranks]) -> "Fleet":
        """In this process where the case allows it, else on ranks that other fleets have used and will use."""
        return cls(case, None if case.is_here and case.num_ranks == 1 else rank_groups(case.num_ranks))

    def start(self, **settings: Any) -> "Fleet":
        """With these settings of the configuration and the case's own."""
        self.on_all(build, self.case.engine, {**settings, **self.case.settings})
        return self

    def on_all(self, function: Callable, *args: Any, each: list[tuple] | None = None) -> list[Any]:
        """What a function `(state, *args)` returns on every rank. Raises what rank 0 raised; all must raise alike."""
        if self.ranks is None:
            return [function(self._here, *args, *(each[0] if each else ()))]
        answers = self.ranks.call(function, *args, each=each)
        errors = [answer for answer in answers if isinstance(answer, Exception)]
        if errors:
            notes = "\n".join(note for error in errors for note in getattr(error, "__notes__", ()))
            if len({(type(answer), str(answer)) for answer in answers}) > 1:
                self.ranks.close()  # those that wait for each other would spoil the tests to come
                raise AssertionError(f"ranks disagree about what failed: {notes}")
            raise errors[0]
        return answers

    def rows(self, method: str, batch: RolloutBatch, *args: Any, shares: list[list[int]] | None = None, **named: Any):
        """Call `method` with rows `shares[r]` of the batch on rank r; by default the last rank gets the fewest.

        Returns rank 0's metrics, which all must have, and log-probs in the order of the batch.
        """
        shares = self.default_shares(batch) if shares is None else shares
        each = [(part_of(batch, rows) if rows else None, args, named) for rows in shares]
        if len(shares) == 1:
            each = [(batch, args, named)]
        answers = self.on_all(call, method, each=each)
        assert all(same(answer.metrics) == same(answers[0].metrics) for answer in answers)
        logprobs: list[Any] = [None] * batch.num_rows
        for rows, answer in zip(shares, answers, strict=True):
            for at, row in enumerate(rows):
                logprobs[row] = list(answer.logprobs[at])
        return Answer(answers[0].metrics, logprobs)

    def default_shares(self, batch: RolloutBatch) -> list[list[int]]:
        """Every second row for rank 1 and so on, and what does not divide for rank 0."""
        num = self.case.num_ranks
        rows = list(range(batch.num_rows))
        return [
            rows[: len(rows) - 3 * (num - 1)],
            *(rows[len(rows) - 3 * r : len(rows) - 3 * (r - 1)] for r in range(1, num)),
        ]

    def fwd_bwd(self, batch: RolloutBatch, processing: Processing | None = None, **named: Any) -> "Answer":
        """As of an engine."""
        return self.rows("fwd_bwd", batch, processing, **named)

    def step(self) -> dict[str, float]:
        """Its metrics."""
        return self.on_all(call, "step", None, None, {})[0].metrics

    def weights(self) -> dict[str, Tensor]:
        """All parameters, whole."""
        return self.on_all(gather, "gather_weights")[0]

    def state(self) -> dict[str, Tensor]:
        """Weights, optimizer and counters."""
        return {**self.weights(), **self.on_all(gather, "gather_training")[0], **self.on_all(counters)[0]}


@dataclass(frozen=True)
class Answer:
    """Metrics, and log-probs by row of the batch."""

    metrics: dict[str, float]
    logprobs: list[list[float]]


def same(metrics: dict[str, float]) -> dict[str, float]:
    """Without what each rank measures with its own clock."""
    return {name: value for name, value in metrics.items() if "seconds" not in name}


# --- what runs on a rank


def build(state: dict[str, Any], engine: Callable[..., TorchTrainEngine], settings: dict[str, Any]) -> None:
    if "engine" in state:
        state.pop("engine").close()
    state["engine"] = engine(config(**settings), world=state["world"])


def call(state: dict[str, Any], method: str, batch: RolloutBatch | None, args: tuple | None, named: dict) -> Any:
    given = () if args is None else (batch, *args)
    return getattr(state["engine"], method)(*given, **named)


def gather(state: dict[str, Any], method: str) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in getattr(state["engine"], method)()}


def counters(state: dict[str, Any]) -> dict[str, Tensor]:
    engine = state["engine"]
    numbers = [engine.num_steps, engine.version, engine.optimizer_step, int(engine.has_pending_gradients)]
    return {"counters": torch.tensor(numbers)}
