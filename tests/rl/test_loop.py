"""The whole path with the tiny model: what a run leaves, and that stopping it changes nothing."""

import asyncio
import io
import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn
from transformers import AutoModelForCausalLM

from arctic_platform.errors import ConfigError, InputError, WeightSyncError
from arctic_platform.rl.loop import Outcome, group_advantages, train
from arctic_platform.rl.progress import PlainView, StopRequest
from arctic_platform.rl.recipe import Recipe, load_recipe
from arctic_platform.rl.records import StepRecord
from arctic_platform.rl.run_folder import RunFolder
from tests.transports.serving import SERVICES, running_server

SMALL = ["prompts_per_step=4", "num_steps=4", "eval.every=2", "eval.num_questions=8", "checkpoint_every=2"]
SMALL += ["loss.entropy_coef=0.1"]  # so that a step changes the weights whatever its rewards are


WITHOUT_SHARING = ["client.zorro_train.enable=false", "client.zorro_inference.enable=false"]


class StopsAfter(PlainView):
    """A view that presses Ctrl-C when a phase of a step begins."""

    def __init__(self, phase: str, times: int) -> None:
        super().__init__(Console(file=io.StringIO()))
        self._left = times
        self._phase = phase

    def phase(self, name: str) -> None:
        self._left -= name == self._phase
        if self._left == 0 and name == self._phase:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def recipe(tiny_model_folder: Path, tmp_path: Path) -> Recipe:
    return make_recipe(tiny_model_folder, tmp_path)


def make_recipe(model: Path, folder: Path, *overrides: str, **replace) -> Recipe:
    replace = {"model": str(model), "output_dir": str(folder)} | replace
    return load_recipe("recipes/tiny.yaml", overrides=[*SMALL, *overrides], replace=replace)


def run(recipe: Recipe, *, fresh: bool = False, view: PlainView | None = None) -> Outcome:
    view = view or PlainView(Console(file=io.StringIO()))
    with StopRequest(view).on_interrupt() as stop:
        return asyncio.run(train(recipe, view, fresh=fresh, stop=stop))


class Listens(PlainView):
    """A view that keeps what it hears of calls that take long."""

    def __init__(self) -> None:
        super().__init__(Console(file=io.StringIO()))
        self.heard: list[str] = []

    def waiting(self, text: str) -> None:
        self.heard.append(text)


def test_over_http_a_run_that_ended_at_its_last_checkpoint_goes_on_and_says_what_it_waits_for(
    tiny_model_folder, tmp_path, monkeypatch
):
    monkeypatch.setattr("arctic_platform.rl.transports.http.PROGRESS_WAIT", 0.001)
    with running_server() as server:
        served = ["client.transport=http", f"client.server_url={server.url}", "side_by_side_repeats=0"]

        def steps(count: int, view: PlainView | None = None) -> Outcome:
            return run(make_recipe(tiny_model_folder, tmp_path, *served, f"num_steps={count}"), view=view)

        view = Listens()
        assert (steps(1, view).steps_done, steps(1).was_complete_before) == (1, True)
        again = steps(2)
        assert (again.steps_done, again.is_complete, again.was_complete_before) == (2, True, False)
    assert [record.step for record in again.run.steps()] == [1, 2]
    assert any(text.startswith("generate: ") for text in view.heard)


def numbers(record: StepRecord) -> list[float | None]:
    """What must not depend on how often a run was stopped."""
    return [record.step, record.reward, record.loss, record.kl, record.grad_norm, record.sampler_diff_max]


@pytest.fixture(scope="module")
def whole_run(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run(make_recipe(tiny_model_folder, tmp_path_factory.mktemp("whole")))


def test_a_run_leaves_its_settings_records_checkpoints_and_model(whole_run):
    folder = whole_run.run.path
    assert whole_run.is_complete
    assert [record.step for record in whole_run.run.steps()] == [1, 2, 3, 4]
    assert [evaluation.step for evaluation in whole_run.run.evaluations()] == [0, 2, 4]
    assert sorted(child.name for child in (folder / "checkpoints").iterdir()) == ["step-000002", "step-000004"]
    assert whole_run.run.recipe().num_steps == 4
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        json.loads(line)


def test_checkpoints_and_the_trained_model_load_with_plain_transformers(whole_run):
    folder = whole_run.run.path
    trained = AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
    newest = AutoModelForCausalLM.from_pretrained(folder / "checkpoints" / "step-000004").state_dict()
    assert all((trained[name] == newest[name]).all() for name in trained)
    assert (folder / "model" / "tokenizer.json").is_file()


def test_a_step_computes_fewer_tokens_and_sampler_and_trainer_agree(whole_run):
    for record in whole_run.run.steps():
        assert record.tokens_naive > 10 * record.tokens_computed
        assert record.grad_norm > 1e-3
        assert record.sampler_diff_max < 1e-4
        assert record.sampler_diff_mean < 1e-5
        assert set(record.seconds) == {"generate", "score", "reference", "fwd_bwd", "step", "sync"}
    receipt = whole_run.run.steps()[0].receipt
    assert receipt is not None
    assert receipt["logprob_max_abs"] < 1e-5


def test_the_side_by_side_says_what_sharing_saves(whole_run):
    numbers = whole_run.run.summary().side_by_side
    assert numbers["train_tokens_off"] > 10 * numbers["train_tokens_on"]
    assert numbers["train_loss_on"] == pytest.approx(numbers["train_loss_off"], abs=1e-5)


def test_a_complete_run_is_not_run_again_and_fresh_starts_anew(tiny_model_folder, tmp_path):
    recipe = make_recipe(tiny_model_folder, tmp_path, num_steps=1)
    first = run(recipe)
    again = run(recipe)
    assert again.was_complete_before
    assert again.run.steps() == first.run.steps()
    assert not run(recipe, fresh=True).was_complete_before


def test_a_longer_run_goes_on_from_a_complete_one(whole_run, tiny_model_folder, tmp_path):
    run(make_recipe(tiny_model_folder, tmp_path, num_steps=2))
    longer = run(make_recipe(tiny_model_folder, tmp_path))
    assert [numbers(record) for record in longer.run.steps()] == [numbers(r) for r in whole_run.run.steps()]


class BreaksSyncs(Listens):
    """A view that gives the sampler a weight that no trainer has as a sync begins, and takes it back after `tries`."""

    def __init__(self, url: str, tries: int) -> None:
        super().__init__()
        self._url = url
        self._left = tries
        self.said: list[str] = []

    @property
    def _model(self) -> nn.Module:
        (job,) = SERVICES[self._url].status().jobs
        return SERVICES[self._url].backend(job.info.job_id).sample.model

    def phase(self, name: str) -> None:
        if name == "sync" and self._left:
            self._model.register_buffer("foreign", torch.zeros(1))

    def say(self, text: str) -> None:
        if text.startswith("warning: "):
            self.said.append(text)
            self._left -= 1
            if not self._left:
                del self._model.foreign


@pytest.mark.parametrize("tries", [1, 2, 9])
def test_a_failed_sync_is_made_again_and_ends_the_run_only_if_it_fails_three_times(
    tries, whole_run, tiny_model_folder, tmp_path, monkeypatch
):
    monkeypatch.setattr("arctic_platform.rl.restarts.PAUSE_SECONDS", 0.01)
    with running_server() as server:
        recipe = make_recipe(tiny_model_folder, tmp_path, f"client.server_url={server.url}", "checkpoint_every=1")
        view = BreaksSyncs(server.url, tries)
        if tries > 2:
            with pytest.raises(WeightSyncError, match="foreign"):
                run(recipe, view=view)
            assert RunFolder(recipe.folder).steps() == []
        outcome = run(recipe, view=view if tries <= 2 else None)
    assert [numbers(record) for record in outcome.run.steps()] == [numbers(r) for r in whole_run.run.steps()]
    assert outcome.run.restarts() == []
    told = [f"warning: the weight sync failed and is made again ({n} of 2): " for n in (1, 2)][:tries]
    assert [text[: len(start)] for text, start in zip(view.said, told, strict=True)] == told


@pytest.mark.parametrize(
    ("phase", "times", "steps_done"),
    [("evaluate", 1, 0), ("generate", 1, 0), ("generate", 3, 2), ("fwd_bwd", 1, 1), ("sync", 3, 3), ("step", 4, 4)],
)
def test_a_stopped_run_goes_on_as_if_it_never_was(phase, times, steps_done, recipe, whole_run):
    handler = signal.getsignal(signal.SIGINT)
    stopped = run(recipe, view=StopsAfter(phase, times))
    assert signal.getsignal(signal.SIGINT) == handler
    assert stopped.steps_done == steps_done
    assert stopped.is_complete == (steps_done == 4)
    rest = run(recipe)
    assert rest.is_complete
    assert [numbers(record) for record in rest.run.steps()] == [numbers(r) for r in whole_run.run.steps()]
    accuracies = [[one.step, one.accuracy] for one in rest.run.evaluations()]
    assert accuracies == [[one.step, one.accuracy] for one in whole_run.run.evaluations()]


def test_records_after_the_checkpoint_are_done_again_after_a_crash(recipe, whole_run):
    stopped = run(recipe, view=StopsAfter("sync", 2))
    with (stopped.run.path / "metrics.jsonl").open("a") as file:
        lines = (whole_run.run.path / "metrics.jsonl").read_text().splitlines()
        file.write(lines[2] + "\n" + lines[3][:40])
    assert [record.step for record in stopped.run.steps()] == [1, 2, 3]
    assert [numbers(r) for r in run(recipe).run.steps()] == [numbers(r) for r in whole_run.run.steps()]


def test_other_settings_do_not_continue_a_run(recipe, tiny_model_folder, tmp_path):
    run(recipe, view=StopsAfter("sync", 1))
    changed = make_recipe(tiny_model_folder, tmp_path, "client.optimizer.lr=1e-5")
    with pytest.raises(ConfigError, match=r"client\.optimizer\.lr=0\.001, now client\.optimizer\.lr=1e-05; start anew"):
        run(changed)
    assert run(make_recipe(tiny_model_folder, tmp_path, "eval.every=1", "checkpoint_every=0")).is_complete


def test_a_run_goes_on_with_another_engine_and_says_which_one_it_was(
    recipe, whole_run, tiny_model_folder, tmp_path, forked_workers
):
    run(recipe, view=StopsAfter("sync", 2))
    ranks = ["client.ranks.num_ranks=2", "client.ranks.num_threads=1", "client.colocate=false"]
    view = PlainView(Console(file=io.StringIO(), width=200))
    moved = run(make_recipe(tiny_model_folder, tmp_path, *ranks), view=view)
    before, now = whole_run.run.steps(), moved.run.steps()
    assert [record.trainer for record in now] == ["torch", "torch", "fsdp on 2 ranks", "fsdp on 2 ranks"]
    assert [record.reward for record in now] == [record.reward for record in before]
    assert [record.loss for record in now] == pytest.approx([record.loss for record in before], abs=1e-5)
    assert [record.grad_norm for record in now] == pytest.approx([r.grad_norm for r in before], rel=1e-3)
    assert "on gcd, trained by fsdp on 2 ranks, going on after step 2" in view._console.file.getvalue()


def test_settings_may_change_while_nothing_has_been_computed(recipe, tiny_model_folder, tmp_path):
    with pytest.raises(InputError):
        run(make_recipe(tiny_model_folder, tmp_path, "sampling.max_tokens=5000"))
    assert run(recipe).is_complete


def test_a_folder_that_is_no_run_is_left_alone(recipe):
    recipe.folder.mkdir(parents=True)
    (recipe.folder / "thesis.tex").write_text("years of work")
    for fresh in (False, True):
        with pytest.raises(ConfigError, match="exists and is not a run"):
            run(recipe, fresh=fresh)
    assert (recipe.folder / "thesis.tex").is_file()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.yaml", "a: ["),
        ("config.yaml", "old_setting: 1"),
        ("metrics.jsonl", '{"step": 1}\n'),
        ("metrics.jsonl", "{}\n"),
        ("evaluations.jsonl", "{\n"),
        ("summary.json", "{"),
    ],
)
def test_a_damaged_run_says_which_file_and_what_to_do(recipe, whole_run, name, text):
    shutil.copytree(whole_run.run.path, recipe.folder)
    (recipe.folder / name).write_text(text)
    folder = RunFolder(recipe.folder)
    with pytest.raises((ConfigError, InputError), match=rf"{name}.*start .*anew with --fresh"):
        folder.start(recipe)
        folder.steps()
        folder.summary()
    assert folder.start(recipe, fresh=True).steps() == []


MANY = ["prompts_per_step=8", "rollouts_per_prompt=32"]  # some of so many answers are right


@pytest.fixture(scope="module")
def shared_step(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> StepRecord:
    folder = tmp_path_factory.mktemp("shared")
    return run(make_recipe(tiny_model_folder, folder, *MANY, num_steps=1)).run.steps()[0]


@pytest.mark.parametrize("off", [["client.zorro_train.enable=false"], WITHOUT_SHARING], ids=["train", "both"])
def test_without_sharing_the_run_has_the_same_numbers(off, shared_step, tiny_model_folder, tmp_path):
    alone = run(make_recipe(tiny_model_folder, tmp_path, *MANY, *off, num_steps=1)).run.steps()[0]
    assert alone.reward == shared_step.reward > 0
    assert abs(shared_step.loss) > 0.01 and shared_step.grad_norm > 0.01
    assert alone.loss == pytest.approx(shared_step.loss, abs=1e-5)
    assert alone.grad_norm == pytest.approx(shared_step.grad_norm, rel=1e-3, abs=1e-6)
    assert alone.tokens_computed > 10 * shared_step.tokens_computed


def test_several_updates_per_step_use_the_old_log_probs(recipe, tiny_model_folder, tmp_path):
    outcome = run(make_recipe(tiny_model_folder, tmp_path, "updates_per_step=2", "num_steps=2"))
    assert "log_probs" in outcome.run.steps()[0].seconds
    assert outcome.run.steps()[1].weight_version == outcome.run.steps()[0].weight_version + 2


def test_a_kl_term_runs_through(tiny_model_folder, tmp_path):
    outcome = run(make_recipe(tiny_model_folder, tmp_path, "loss.kl_coef=0.1", "loss.calculate_entropy=true"))
    assert outcome.is_complete
    assert outcome.run.steps()[0].entropy > 0


def test_a_correction_of_the_sampler_runs_through_and_changes_nothing_where_it_agrees(tiny_model_folder, tmp_path):
    correction = ["loss.rollout_is=token", "loss.rollout_is_threshold=3.0", "loss.rollout_rs=sequence"]
    plain = run(make_recipe(tiny_model_folder, tmp_path, num_steps=2, name="plain"))
    corrected = run(make_recipe(tiny_model_folder, tmp_path, *correction, num_steps=2, name="corrected"))
    assert corrected.is_complete and corrected.run.summary().side_by_side is not None
    for ours, theirs in zip(corrected.run.steps(), plain.run.steps(), strict=True):
        assert ours.reward == theirs.reward and ours.loss == pytest.approx(theirs.loss, abs=1e-4)


def test_advantages_are_normalised_per_group_and_equal_rewards_teach_nothing():
    advantages = group_advantages(np.array([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0], [0.1, 0.1, 0.1, 0.1]]))
    assert advantages.tolist() == [[1.0, -1.0, -1.0, 1.0], [0.0] * 4, [0.0] * 4]
