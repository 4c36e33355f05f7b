"""`arctic-rl plan`: rows of a recipe's first step, or of a file, and the forecast for them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from arctic_platform.errors import InputError
from arctic_platform.rl.config import ZoRRoTrainConfig
from arctic_platform.rl.protocol import RolloutBatch
from arctic_platform.rl.recipe import Recipe, load_recipe
from arctic_platform.rl.tasks import Task, load_tokenizer

if TYPE_CHECKING:
    from arctic_platform.forest.cost import ModelShape

Rows = tuple[list[list[int]], list[list[int]]]


def plan_source(
    source: Path, *, model: str | None = None, max_token_len: int | None = None, overrides: Sequence[str] = ()
) -> list[str]:
    """The lines that `arctic-rl plan` prints. Raises InputError or ConfigError for a file that is neither kind."""
    from arctic_platform.rl.zorro_train.forecast import forecast

    if source.suffix in (".jsonl", ".json"):
        if overrides:
            raise InputError("--set changes a recipe and has no effect on a batch; use --max-token-len")
        rows, config = read_rows(source), ZoRRoTrainConfig()
    else:
        recipe = load_recipe(source, overrides=overrides, replace={"model": model} if model else None)
        model = recipe.model
        rows, config = rows_of_first_step(recipe), recipe.client.zorro_train
    if max_token_len is not None:
        config = ZoRRoTrainConfig.model_validate(config.model_dump() | {"max_token_len": max_token_len})
    shape = shape_of(model) if model else None
    return forecast(*rows, config=config, shape=shape).lines()


def read_rows(path: Path) -> Rows:
    """Prompts and responses of a file with one JSON object per line. Raises InputError with the line that is wrong."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError as error:
        raise InputError(f'batch "{path}" does not exist; give a file with one row per line') from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f'batch "{path}" cannot be read ({error}); give a text file with one row per line') from error
    prompts, responses = [], []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            checked = RolloutBatch(prompts=[row["prompt"]], responses=[row["response"]])
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f'line {number} of "{path}" is no row ({error}); write {{"prompt": [ids], "response": [ids]}}'
            ) from error
        prompts += checked.prompts.tolist()
        responses += checked.responses.tolist()
    if not prompts:
        raise InputError(f'batch "{path}" holds no rows; write {{"prompt": [ids], "response": [ids]}} on each line')
    return prompts, responses


def rows_of_first_step(recipe: Recipe) -> Rows:
    """The prompts of step 0, each with its rollouts: answers of full length that differ from the first token on."""
    from arctic_platform.rl.fetch import resolve_model

    task = Task(
        recipe.task,
        load_tokenizer(resolve_model(recipe.model)),
        num_held_out=recipe.eval.num_questions,
        seed=recipe.seed,
    )
    prompts, responses = [], []
    for index in range(recipe.prompts_per_step):
        prompt = task.train_question(index).prompt
        for member in range(recipe.rollouts_per_prompt):
            prompts.append(prompt)
            responses.append([member] * recipe.sampling.max_tokens)
    return prompts, responses


def shape_of(model: str) -> ModelShape | None:
    """Sizes of a model from its config alone; none where the config does not name them. Raises for no such model."""
    from transformers import AutoConfig

    from arctic_platform.forest.cost import ModelShape
    from arctic_platform.rl.fetch import resolve_model

    folder = resolve_model(model)
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(f'model "{model}" has no config to be read ({reason}); check --model') from error
    try:
        return ModelShape.of(config)
    except InputError:
        return None
