"""The reference GRPO loop: it speaks to the client alone, so it runs the same over every transport.

One step (arXiv 2402.03300, section 4):

    questions --prompts--> generate --rollouts--> score --rewards--> group advantages
              --batch----> fwd_bwd --> step --> sync_weights --> records

Everything random is a function of the seed and the step, so a run that was stopped goes on as if it never was.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass

import numpy as np

from arctic_platform.errors import ArcticError
from arctic_platform.rl.client import ArcticRLClient, create_arctic_rl_client
from arctic_platform.rl.fetch import resolve_model
from arctic_platform.rl.progress import StopRequest, Stopwatch, View
from arctic_platform.rl.protocol import GenerateResponse, RolloutBatch
from arctic_platform.rl.recipe import Recipe
from arctic_platform.rl.records import Summary, make_batch_record, make_evaluation, make_step_record
from arctic_platform.rl.restarts import Restarts, is_loss, with_synced_weights
from arctic_platform.rl.run_folder import RunFolder
from arctic_platform.rl.tasks import Question, Task, load_tokenizer


@dataclass(frozen=True)
class Outcome:
    """How far `train` came; `is_complete` is false when it was asked to stop."""

    run: RunFolder
    steps_done: int
    is_complete: bool
    was_complete_before: bool = False


async def train(recipe: Recipe, view: View, *, fresh: bool = False, stop: StopRequest | None = None) -> Outcome:
    """Run the recipe, or what is left of it, and leave everything in its run folder; a lost server is outlived.

    Raises any `ArcticError`: ConfigError for settings, InputError for data, ExactnessError for a failed receipt.
    """
    model = resolve_model(recipe.model)
    task = Task(recipe.task, load_tokenizer(model), num_held_out=recipe.eval.num_questions, seed=recipe.seed)
    run = RunFolder.start(recipe, fresh=fresh)
    summary = run.summary()
    if summary and summary.num_steps >= recipe.num_steps:
        return Outcome(run, summary.num_steps, is_complete=True, was_complete_before=True)
    view.say(f"loading {model}")
    stop = stop or StopRequest(view)
    restarts = Restarts(recipe.max_restarts, run, view, stop)
    started = time.perf_counter()
    client = _connect(recipe, model, view)
    try:
        while True:
            try:
                return await GrpoLoop(recipe, client, task, run, view, stop, started).go()
            except ArcticError as error:
                if not is_loss(error):
                    raise
                client = await restarts.after(error, client, lambda: _connect(recipe, model, view, anew=True))
    finally:
        await client.shutdown()


def _connect(recipe: Recipe, model: str, view: View, *, anew: bool = False) -> ArcticRLClient:
    """A client of this run; `anew`: of a job of its own, whatever job the recipe joined."""
    config = recipe.client_config(model)
    if anew:
        config = config.model_copy(update={"server_id": None})
    return create_arctic_rl_client(config, on_progress=lambda call: view.waiting(call.line))


def group_advantages(rewards: np.ndarray) -> np.ndarray:
    """`[G, n] float64`: reward minus the mean of its group, over the group's standard deviation.

    A group whose rewards are all equal teaches nothing and gets zeros.
    """
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    std = rewards.std(axis=1, keepdims=True)
    return np.divide(centred, std, out=np.zeros_like(centred), where=std > 1e-8)


def make_batch(questions: list[Question], answers: GenerateResponse, advantages: np.ndarray) -> RolloutBatch:
    """One row per rollout, as token ids; `advantages`: `[G, n]`."""
    return RolloutBatch(
        prompts=[questions[rollout.prompt_index].prompt for rollout in answers.rollouts],
        responses=[rollout.token_ids for rollout in answers.rollouts],
        advantages=advantages.reshape(-1),
        rollout_logprobs=[rollout.logprobs for rollout in answers.rollouts],
    )


class GrpoLoop:
    """One run: what it needs, and one method per stage."""

    def __init__(
        self,
        recipe: Recipe,
        client: ArcticRLClient,
        task: Task,
        run: RunFolder,
        view: View,
        stop: StopRequest,
        started: float,
    ) -> None:
        self.recipe = recipe
        self.client = client
        self.task = task
        self.run = run
        self.view = view
        self.stop = stop
        self.started = started
        self.steps_done = 0

    async def go(self) -> Outcome:
        """All steps that are left, then the end of the run; or, when asked to stop, a checkpoint."""
        await self.restore()
        self.view.begin(self.recipe, self.steps_done)
        try:
            if not self.run.evaluations():
                await self.evaluate()
            while self.steps_done < self.recipe.num_steps and not self.stop.is_set:
                await self.step(self.steps_done + 1)
            is_complete = self.steps_done >= self.recipe.num_steps
            await (self.finish() if is_complete else self.save())
            return Outcome(self.run, self.steps_done, is_complete)
        finally:
            self.view.end()

    async def restore(self) -> None:
        """Go on from the newest checkpoint, if there is one; records of later steps are dropped."""
        if self.run.has_checkpoint():
            checkpoint = await with_synced_weights(self.client.load_checkpoint, self.view, self.stop)
            self.steps_done = int(checkpoint.client_state["steps_done"])
        self.run.rewind(self.steps_done)

    async def step(self, step: int) -> None:
        """One step; a stop request that comes before its first update abandons it without a trace."""
        clock = Stopwatch(self.view)
        questions = self.questions_of(step)
        params = self.recipe.training_params(step, self.task.stop_token_ids)
        with clock.phase("generate"):
            answers = await self.client.generate([question.prompt for question in questions], params)
        with clock.phase("score"):
            scores = [self.task.score(questions[one.prompt_index], one.token_ids) for one in answers.rollouts]
            rewards = np.array(scores).reshape(len(questions), -1)
            advantages = group_advantages(rewards)
            batch = make_batch(questions, answers, advantages)
        if self.stop.is_set:
            return
        passes = await self.update(batch, clock)
        with clock.phase("sync"):
            await with_synced_weights(self.client.sync_weights, self.view, self.stop)
        self.steps_done = step
        record = make_step_record(step, answers, rewards, passes, clock.seconds, self.recipe.client.trainer)
        self.run.append_step(record)
        self.run.write_batch(make_batch_record(step, self.task, questions, answers, rewards, advantages))
        self.view.step(record)
        if self.is_due(self.recipe.eval.every):
            await self.evaluate()
        if self.is_due(self.recipe.checkpoint_every):
            await self.save()

    async def update(self, batch: RolloutBatch, clock: Stopwatch) -> list[dict[str, float]]:
        """The updates on one batch; returns the metrics of each pass together with those of its update."""
        processing = self.recipe.processing
        if self.recipe.client.reference:
            with clock.phase("reference"):
                scored = await self.client.log_probs(batch, processing, reference=True)
                batch = batch.model_copy(update={"ref_logprobs": scored.logprobs})
        if self.recipe.updates_per_step > 1:
            with clock.phase("log_probs"):
                scored = await self.client.log_probs(batch, processing)
                batch = batch.model_copy(update={"old_logprobs": scored.logprobs})
        passes = []
        for _ in range(self.recipe.updates_per_step):
            with clock.phase("fwd_bwd"):
                trained = await self.client.fwd_bwd(batch, processing)
            with clock.phase("step"):
                updated = await self.client.step()
            passes.append(updated.metrics | trained.metrics)
        return passes

    async def evaluate(self) -> None:
        """Greedy answers to the held-out questions."""
        clock = Stopwatch(self.view)
        with clock.phase("evaluate"):
            params = self.recipe.greedy_params(self.task.stop_token_ids)
            answers = await self.client.generate([question.prompt for question in self.task.held_out], params)
        # What an evaluation cached would shift later log-probs in their last bits; a resumed run has none of it.
        await self.client.reset_prefix_cache()
        evaluation = make_evaluation(self.steps_done, self.task, answers, clock.seconds["evaluate"])
        self.run.append_evaluation(evaluation)
        self.view.evaluation(evaluation)

    async def save(self) -> None:
        """A checkpoint of the steps done."""
        with Stopwatch(self.view).phase("checkpoint"):
            await self.client.save_checkpoint(client_state={"steps_done": self.steps_done})

    async def finish(self) -> None:
        """The last evaluation and checkpoint, the trained model, sharing against no sharing, the summary."""
        if self.run.evaluations()[-1].step < self.steps_done:
            await self.evaluate()
        if not self.is_due(self.recipe.checkpoint_every):
            await self.save()
        with Stopwatch(self.view).phase("export"):
            shutil.rmtree(self.run.model, ignore_errors=True)
            await self.client.export_model(str(self.run.model.absolute()))
        side_by_side = await self.side_by_side()
        evaluations = self.run.evaluations()
        self.run.write_summary(
            Summary(
                num_steps=self.steps_done,
                accuracy_before=evaluations[0].accuracy,
                accuracy_after=evaluations[-1].accuracy,
                seconds=time.perf_counter() - self.started,
                side_by_side=side_by_side,
                num_restarts=len(self.run.restarts()),
            )
        )

    async def side_by_side(self) -> dict[str, float] | None:
        """One training pass and one sampling phase of the last step, with sharing and without, interleaved."""
        last, repeats = self.run.batch("last"), self.recipe.side_by_side_repeats
        if last is None or not repeats:
            return None
        processing = self.recipe.processing_without_side_inputs
        params = self.recipe.training_params(last.step, self.task.stop_token_ids)
        self.view.say("timing the last step with sharing on and off")
        with Stopwatch(self.view).phase("side by side"):
            response = await self.client.side_by_side(
                last.to_batch(), processing, last.prompts, params, repeats=repeats
            )
        return response.model_dump()

    def questions_of(self, step: int) -> list[Question]:
        """The questions of a step, by their numbers: resuming needs nothing but the step."""
        first = (step - 1) * self.recipe.prompts_per_step
        return [self.task.train_question(first + place) for place in range(self.recipe.prompts_per_step)]

    def is_due(self, every: int) -> bool:
        """True when the step just done is one of every so many."""
        return every > 0 and self.steps_done % every == 0
