"""What a run writes down about itself: plain frozen records, the same in memory and in the run's files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from arctic_platform.rl.protocol import GenerateResponse, RolloutBatch
from arctic_platform.rl.tasks import Question, Task

RECEIPT = "receipt/"


@dataclass(frozen=True)
class StepRecord:
    """What one step did. Rewards in [0, 1], seconds of wall time per phase, losses as the server reports them.

    `num_flat_groups`: groups whose rewards are all equal, which teach nothing. `kl`: to the reference model, if one
    is kept. `sampler_diff_*`: absolute difference of log-probs, sampler against trainer, in nats.
    `trainer`: the engine and its ranks.
    `receipt`: errors of shared against unshared results, on the steps that measured them.
    `tokens_*`: positions that generation and training computed, and those of the same rows without sharing.
    """

    step: int
    reward: float
    reward_std: float
    num_flat_groups: int
    response_len: float
    loss: float
    kl: float | None
    clip_fraction: float
    grad_norm: float
    lr: float
    sampler_diff_max: float
    sampler_diff_mean: float
    tokens_computed: int
    tokens_naive: int
    weight_version: int
    seconds: dict[str, float]
    entropy: float | None = None
    receipt: dict[str, float] | None = None
    trainer: str = "torch"


@dataclass(frozen=True)
class Restart:
    """A process or the server was lost while `lost_step` was being done; the run went on after `from_step`."""

    lost_step: int
    from_step: int
    error: str


@dataclass(frozen=True)
class Answer:
    """A held-out question, its reference answer, and what the model said."""

    question: str
    reference: str
    given: str
    is_right: bool


@dataclass(frozen=True)
class Evaluation:
    """Greedy answers to all held-out questions after `step` steps; `seconds` is what they took."""

    step: int
    seconds: float
    answers: list[Answer]

    @property
    def accuracy(self) -> float:
        """Part of the questions answered right."""
        return sum(answer.is_right for answer in self.answers) / len(self.answers)


@dataclass(frozen=True)
class RolloutRecord:
    """One rollout of a step: token ids, text, reward and advantage."""

    prompt_index: int
    token_ids: list[int]
    text: str
    reward: float
    advantage: float


@dataclass(frozen=True)
class BatchRecord:
    """The rollouts of one step; `questions` and `prompts` (token ids) have one entry per prompt."""

    step: int
    questions: list[str]
    references: list[str]
    prompts: list[list[int]]
    rollouts: list[RolloutRecord]

    @property
    def rows(self) -> list[list[int]]:
        """Prompt and response of every rollout, as the trainer sees them."""
        return [self.prompts[rollout.prompt_index] + rollout.token_ids for rollout in self.rollouts]

    def to_batch(self) -> RolloutBatch:
        """The rows and their advantages, to train on."""
        return RolloutBatch(
            prompts=[self.prompts[rollout.prompt_index] for rollout in self.rollouts],
            responses=[rollout.token_ids for rollout in self.rollouts],
            advantages=[[rollout.advantage] * len(rollout.token_ids) for rollout in self.rollouts],
        )


@dataclass(frozen=True)
class Summary:
    """How a complete run ended; `side_by_side` as `protocol.SideBySideResponse`, or none."""

    num_steps: int
    accuracy_before: float
    accuracy_after: float
    seconds: float
    side_by_side: dict[str, float] | None = None
    num_restarts: int = 0


def make_step_record(
    step: int,
    answers: GenerateResponse,
    rewards: np.ndarray,
    passes: Sequence[dict[str, float]],
    seconds: dict[str, float],
    trainer: str,
) -> StepRecord:
    """`rewards`: `[G, n] float64`. `passes`: the metrics of each training pass and the update it led to.

    Loss and divergences are those of the first pass, which still sees the weights that sampled.
    """
    first, last = passes[0], passes[-1]
    return StepRecord(
        step=step,
        reward=float(rewards.mean()),
        reward_std=float(rewards.std()),
        num_flat_groups=int((rewards.std(axis=1) == 0).sum()),
        response_len=float(np.mean([len(rollout.token_ids) for rollout in answers.rollouts])),
        loss=first["loss"],
        kl=first.get("kl_loss"),
        clip_fraction=last["clip_fraction"],
        grad_norm=last["grad_norm"],
        lr=last["lr"],
        sampler_diff_max=first["sampler_diff_max"],
        sampler_diff_mean=first["sampler_diff_mean"],
        tokens_computed=_total("tokens_computed", answers, passes),
        tokens_naive=_total("tokens_naive", answers, passes),
        weight_version=answers.weight_version,
        seconds=dict(seconds),
        entropy=first.get("entropy"),
        receipt={name.removeprefix(RECEIPT): first[name] for name in first if name.startswith(RECEIPT)} or None,
        trainer=trainer,
    )


def make_batch_record(
    step: int,
    task: Task,
    questions: Sequence[Question],
    answers: GenerateResponse,
    rewards: np.ndarray,
    advantages: np.ndarray,
) -> BatchRecord:
    """`rewards` and `advantages`: `[G, n] float64`, in the order of the rollouts."""
    return BatchRecord(
        step=step,
        questions=[question.text for question in questions],
        references=[question.answer for question in questions],
        prompts=[question.prompt for question in questions],
        rollouts=[
            RolloutRecord(
                rollout.prompt_index, list(rollout.token_ids), task.text_of(rollout.token_ids), reward, advantage
            )
            for rollout, reward, advantage in zip(
                answers.rollouts, rewards.reshape(-1).tolist(), advantages.reshape(-1).tolist(), strict=True
            )
        ],
    )


def make_evaluation(step: int, task: Task, answers: GenerateResponse, seconds: float) -> Evaluation:
    """The greedy answers to the task's held-out questions, judged."""
    judged = []
    for rollout in answers.rollouts:
        question = task.held_out[rollout.prompt_index]
        given = task.text_of(rollout.token_ids).strip()
        judged.append(Answer(question.text, question.answer, given, task.score(question, rollout.token_ids) == 1.0))
    return Evaluation(step, seconds, judged)


def _total(name: str, answers: GenerateResponse, passes: Sequence[dict[str, float]]) -> int:
    return int(answers.metrics[name] + sum(metrics[name] for metrics in passes))
