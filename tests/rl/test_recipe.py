"""A recipe refuses what it does not know, and what it writes out is what it reads back."""

from pathlib import Path
from typing import get_args

import pytest
import yaml

from arctic_platform.errors import ConfigError
from arctic_platform.rl.losses import LOSSES
from arctic_platform.rl.protocol import Processing
from arctic_platform.rl.recipe import LossConfig, LossName, load_recipe

RECIPES = sorted(Path("recipes").glob("*.yaml"))
TINY = "recipes/tiny.yaml"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_of_the_project_loads_and_survives_being_written_out(path, tmp_path):
    recipe = load_recipe(path)
    copy = tmp_path / "copy.yaml"
    copy.write_text(recipe.to_yaml())
    assert load_recipe(copy) == recipe
    assert recipe.name == path.stem


def test_overrides_reach_nested_settings():
    recipe = load_recipe(TINY, overrides=["client.optimizer.lr=1e-5", "task.params.max_value=9", "num_steps=3"])
    assert recipe.client.optimizer.lr == 1e-5
    assert recipe.task.params["max_value"] == 9
    assert recipe.num_steps == 3


def test_replaced_values_are_taken_as_they_are():
    assert load_recipe(TINY, replace={"name": "007", "model": "some/model"}).name == "007"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("num_stps=3", "unknown key 'num_stps'; did you mean 'num_steps'?"),
        ("client.optimzer.lr=1", "unknown key 'optimzer'; did you mean 'optimizer'?"),
        ("client.optimizer.lrr=1", "unknown key 'lrr'; did you mean 'lr'?"),
        ("client.zorro_train.enabled=false", "unknown key 'enabled'; did you mean 'enable'?"),
        ("task.nm=3", "unknown key 'nm'; did you mean 'name'?"),
        ("client.seed=3", "client.seed is set by the recipe's own seed; drop it from client"),
        ("client.model=x", "client.model is set by the recipe's own model"),
        ("client.checkpoint_path=x", "client.checkpoint_path is set by the recipe's own output_dir and name"),
        ("sampling.temperature=0", "Input should be greater than 0 (given: 0)"),
        ("rollouts_per_prompt=1", "greater than or equal to 2 (given: 1)"),
        ("client.optimizer.lr=.inf", "finite number (given: inf)"),
        ("client.optimizer.weight_decay=.inf", "finite number (given: inf)"),
        ("loss.kl_coef=.nan", "finite number (given: nan)"),
        ("num_steps=0", "greater than or equal to 1 (given: 0)"),
        ("num_steps=many", "valid integer"),
        ("loss.loss=grppo", "Input should be 'grpo', 'dr_grpo'"),
        ("loss.rollout_is=row", "Input should be 'token' or 'sequence'"),
        ("loss.rollout_is_threshold=2", "no effect without loss.rollout_is"),
        ("loss.rollout_rs_threshold=2", "no effect without loss.rollout_rs"),
        ("loss.rollout_rs_threshold_lower=0", "no effect without loss.rollout_rs"),
        ("loss={loss: sft, rollout_rs: token}", "no effect on loss.loss: sft"),
        ("loss={rollout_is: token, rollout_is_threshold: 0}", "greater than 0"),
        ("side_by_side_repeats=1", "needs client.zorro_train.max_token_len"),
        ("name=a/b", "should match pattern"),
        ("name=..", "should match pattern"),
        ("client=3", "client"),
        ("task=3", "task"),
        ("eval=null", "eval"),
        ("foo", 'override "foo" must look like key=value'),
        ("a..b=3", "must look like key=value"),
        ("name.x=3", "name is a single value, it has no keys below it"),
        ("name=[", "the value is not YAML"),
    ],
)
def test_a_wrong_setting_is_one_line_that_names_it(override, message):
    with pytest.raises(ConfigError) as error:
        load_recipe(TINY, overrides=["client.zorro_train.max_token_len=null", "side_by_side_repeats=0", override])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_kl_term_needs_a_reference():
    with pytest.raises(ConfigError, match=r"needs client\.reference: true"):
        load_recipe(TINY, overrides=["loss.kl_coef=0.1", "client.reference=false"])


@pytest.mark.parametrize(
    ("text", "message"),
    [("- a\n- b\n", "found list"), ("", "found NoneType"), ("a: [", "is not YAML"), ("name: x\n", "Field required")],
)
def test_a_file_that_is_no_recipe_says_so(tmp_path, text, message):
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        load_recipe(file)
    assert "\n" not in str(error.value)


def test_a_missing_file_names_the_nearest_one():
    with pytest.raises(ConfigError, match=r"did you mean recipes/tiny\.yaml\?"):
        load_recipe("recipes/tinny.yaml")


def test_the_client_gets_the_resolved_model_and_the_folder_of_the_run():
    recipe = load_recipe(TINY, replace={"output_dir": "elsewhere", "seed": 7})
    config = recipe.client_config("models/somewhere")
    assert config.model == "models/somewhere"
    assert config.seed == 7
    assert config.checkpoint_path == "elsewhere/tiny/checkpoints"
    assert config.zorro_train == recipe.client.zorro_train


def test_every_step_draws_with_a_seed_of_its_own():
    recipe, other = load_recipe(TINY), load_recipe(TINY, replace={"seed": 1})
    seeds = {one.training_params(step, (5,)).seed for one in (recipe, other) for step in range(1, 50)}
    assert len(seeds) == 98
    assert recipe.training_params(3, (5,)) == recipe.training_params(3, (5,))
    assert recipe.greedy_params((5,)).temperature == 0.0


def test_the_loss_sees_the_temperature_of_the_sampler():
    recipe = load_recipe(TINY, overrides=["sampling.temperature=0.7"])
    assert recipe.processing.temperature == recipe.training_params(1, ()).temperature == 0.7


def test_every_setting_of_the_loss_reaches_the_call_under_its_own_name():
    given = {
        "loss": "dapo",
        "clip_low": 0.1,
        "clip_high": 0.3,
        "rollout_is": "token",
        "rollout_is_threshold": 3.0,
        "rollout_rs": "geometric",
        "rollout_rs_threshold": 1.5,
        "rollout_rs_threshold_lower": 0.0,
    }
    recipe = load_recipe(TINY, replace={"loss": given})
    assert recipe.processing.model_dump().items() >= given.items()
    assert set(LossConfig.model_fields) <= set(Processing.model_fields)


def test_a_batch_of_tokens_and_advantages_is_not_asked_for_what_it_lacks():
    loss = {"loss": "dapo", "kl_coef": 0.1, "rollout_is": "token", "rollout_is_threshold": 3.0, "rollout_rs": "token"}
    recipe = load_recipe(TINY, replace={"loss": loss})
    plain = load_recipe(TINY, replace={"loss": {"loss": "dapo"}})
    assert recipe.processing_without_side_inputs == plain.processing


def test_every_loss_of_the_trainer_can_be_named():
    assert set(get_args(LossName)) == set(LOSSES)


def test_what_is_written_out_is_plain_yaml():
    assert yaml.safe_load(load_recipe(TINY).to_yaml())["client"]["optimizer"]["betas"] == [0.9, 0.999]


def test_a_recipe_that_may_not_be_read_says_so(monkeypatch):
    def refuse(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(ConfigError, match=r'recipe "recipes/tiny.yaml" cannot be read \(Permission denied\)'):
        load_recipe(TINY)
