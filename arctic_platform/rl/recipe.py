"""A recipe: everything that decides how a run goes, in one YAML file.

recipe = load_recipe("recipes/tiny.yaml", overrides=["num_steps=5", "client.optimizer.lr=1e-4"])
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import Field, model_validator

from arctic_platform.errors import ConfigError
from arctic_platform.rl.config import ArcticRLClientConfig, StrictModel
from arctic_platform.rl.protocol import Processing, SamplingParams
from arctic_platform.rl.tasks import TaskConfig

# Settings of the client that the recipe or the run decides; the recipe's own key is on the right.
DECIDED_ABOVE = {
    "model": "model",
    "seed": "seed",
    "checkpoint_path": "output_dir and name",
    "keep_checkpoints": "keep_checkpoints",
}

LossName = Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "ppo", "importance_sampling", "sft"]


class EvalConfig(StrictModel):
    """Greedy accuracy on held-out questions."""

    every: int = Field(10, ge=0, description="Steps between evaluations; 0: only before and after the run.")
    num_questions: int = Field(64, ge=1, description="Held-out questions, never asked in training.")


class SamplingConfig(StrictModel):
    """How rollouts are drawn in training; evaluation is greedy with the same max_tokens."""

    temperature: float = Field(1.0, gt=0.0, allow_inf_nan=False, description="Also the temperature of the loss.")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="Smallest set of tokens with this probability.")
    top_k: int = Field(-1, ge=-1, description="Most probable tokens to draw from; -1 or 0: all.")
    max_tokens: int = Field(64, ge=1, description="Most new tokens per answer.")


class LossConfig(StrictModel):
    """The loss of the training side; see `losses.py` for the names."""

    loss: LossName = Field("grpo", description="Name of a loss.")
    clip_low: float | None = Field(None, ge=0.0, description="Ratio may fall by this much; none: the loss's own.")
    clip_high: float | None = Field(None, ge=0.0, description="Ratio may rise by this much; none: the loss's own.")
    kl_coef: float = Field(0.0, ge=0.0, allow_inf_nan=False, description="Weight of the KL term; needs a reference.")
    entropy_coef: float = Field(0.0, ge=0.0, allow_inf_nan=False, description="Weight of the entropy bonus.")
    calculate_entropy: bool = Field(False, description="Report the entropy of the answers.")
    max_response_len: int | None = Field(None, ge=1, description="Constant that dr_grpo divides by; none: 1.")
    rollout_is: Literal["token", "sequence"] | None = Field(
        None, description="Weigh the policy term by p_trainer / p_sampler, of the token or of its row; none: do not."
    )
    rollout_is_threshold: float | None = Field(
        None, gt=0.0, allow_inf_nan=False, description="Largest such weight (TIS); none: 2."
    )
    rollout_rs: Literal["token", "sequence", "geometric"] | None = Field(
        None, description="Reject a token, or a row by product or geometric mean, whose ratio is out of bounds."
    )
    rollout_rs_threshold: float | None = Field(
        None, gt=0.0, allow_inf_nan=False, description="Largest ratio that is not rejected; none: 2."
    )
    rollout_rs_threshold_lower: float | None = Field(
        None, ge=0.0, allow_inf_nan=False, description="Smallest such ratio; none: one over the largest."
    )

    @model_validator(mode="after")
    def _check_correction_has_an_effect(self) -> Self:
        if self.loss == "sft" and (self.rollout_is or self.rollout_rs):
            raise ConfigError("loss.rollout_is and loss.rollout_rs have no effect on loss.loss: sft; drop them")
        if self.rollout_is is None and self.rollout_is_threshold is not None:
            raise ConfigError("loss.rollout_is_threshold has no effect without loss.rollout_is; set token or sequence")
        bounds = (self.rollout_rs_threshold, self.rollout_rs_threshold_lower)
        if self.rollout_rs is None and bounds != (None, None):
            raise ConfigError("loss.rollout_rs_threshold has no effect without loss.rollout_rs; set token, for example")
        return self


class Recipe(StrictModel):
    """One run: model, task, client, and the numbers of the loop.

    Raises:
        ConfigError: a key is unknown, a value is out of range, or two settings contradict each other.
    """

    name: str = Field(pattern=r"^\w[\w.-]*$", description="Name of the run's folder.")
    model: str = Field(description="A known model, a Hugging Face folder, or a hub id.")
    task: TaskConfig = Field(description="What is asked.")
    client: ArcticRLClientConfig = Field(description="Training and sampling engines.")
    prompts_per_step: int = Field(8, ge=1, description="Different questions per step.")
    rollouts_per_prompt: int = Field(8, ge=2, description="Answers per question; advantages compare these.")
    num_steps: int = Field(100, ge=1, description="Steps of the whole run.")
    updates_per_step: int = Field(1, ge=1, description="Optimizer updates on each step's rollouts.")
    sampling: SamplingConfig = Field(default_factory=SamplingConfig, description="How rollouts are drawn.")
    loss: LossConfig = Field(default_factory=LossConfig, description="What is minimised.")
    eval: EvalConfig = Field(default_factory=EvalConfig, description="When and on what accuracy is measured.")
    checkpoint_every: int = Field(10, ge=0, description="Steps between checkpoints; 0: only at the end.")
    keep_checkpoints: int = Field(2, ge=1, description="How many checkpoints to keep.")
    max_restarts: int = Field(
        3,
        ge=0,
        description="Most restarts from the last checkpoint after a lost process or server; those without progress "
        "count twice.",
    )
    side_by_side_repeats: int = Field(0, ge=0, description="Pairs of sharing on and off timed at the end; 0: none.")
    seed: int = Field(0, ge=0, description="Order of the questions and every draw of the sampler.")
    output_dir: str = Field("runs", description="Folder that holds the run's folder.")

    @model_validator(mode="before")
    @classmethod
    def _complete_client(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        client = data.get("client") or {}
        if not isinstance(client, dict):
            return data
        for key, above in DECIDED_ABOVE.items():
            if key in client:
                raise ConfigError(f"client.{key} is set by the recipe's own {above}; drop it from client")
        return data | {"client": client | {"model": str(data.get("model", "")), "seed": data.get("seed", 0)}}

    @model_validator(mode="after")
    def _check_parts_together(self) -> Self:
        if self.loss.kl_coef and not self.client.reference:
            raise ConfigError("loss.kl_coef above 0 needs client.reference: true, the model that it stays close to")
        if self.side_by_side_repeats and self.client.zorro_train.max_token_len is None:
            raise ConfigError(
                "side_by_side_repeats above 0 needs client.zorro_train.max_token_len (2048, say): the pass without "
                "sharing holds every row in full and must be cut to fit into memory"
            )
        return self

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.output_dir) / self.name

    @property
    def processing(self) -> Processing:
        """What a training call does: the loss, at the temperature of the sampler."""
        return Processing(temperature=self.sampling.temperature, **self.loss.model_dump())

    @property
    def processing_without_side_inputs(self) -> Processing:
        """The same for a batch that has tokens and advantages only: no reference, no log-probs of the sampler."""
        correction = {name: None for name in LossConfig.model_fields if name.startswith("rollout_")}
        return self.processing.model_copy(update={"kl_coef": 0.0} | correction)

    def client_config(self, model: str) -> ArcticRLClientConfig:
        """The client's settings for this run; `model` is the resolved folder or hub id.

        A server has a working folder of its own, so that it is told whole paths.
        """
        is_served, folder = self.client.transport != "embedded", self.folder / "checkpoints"
        decided: dict[str, Any] = {
            "model": str(Path(model).absolute()) if is_served and Path(model).exists() else model,
            "checkpoint_path": str(folder.absolute() if is_served else folder),
            "keep_checkpoints": self.keep_checkpoints,
            "api_key": self.client.api_key,
        }
        return ArcticRLClientConfig(**self.client.model_dump() | decided)

    def training_params(self, step: int, stop_token_ids: tuple[int, ...]) -> SamplingParams:
        """How step `step` samples: a seed of its own, so that a resumed run draws the same."""
        settings: dict[str, Any] = self.sampling.model_dump()
        seed = self.seed * 1_000_003 + step
        return SamplingParams(n=self.rollouts_per_prompt, seed=seed, stop_token_ids=stop_token_ids, **settings)

    def greedy_params(self, stop_token_ids: tuple[int, ...]) -> SamplingParams:
        """How accuracy is measured."""
        return SamplingParams(temperature=0.0, max_tokens=self.sampling.max_tokens, stop_token_ids=stop_token_ids)

    def to_yaml(self) -> str:
        """The recipe with every default written out; `load_recipe` reads it back."""
        data = self.model_dump(mode="json")
        for key in DECIDED_ABOVE:
            data["client"].pop(key)
        return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)


def load_recipe(path: str | Path, *, overrides: Sequence[str] = (), replace: Mapping[str, Any] | None = None) -> Recipe:
    """Read a recipe file. `overrides`: `key=value` with dots for nesting, the value in YAML; `replace`: top-level keys.

    Raises:
        ConfigError: no such file, not to be read, not a mapping, or a setting that `Recipe` refuses.
    """
    file = Path(path)
    try:
        data = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise ConfigError(f'recipe "{path}" does not exist; {_nearby_recipes(file)}') from error
    except OSError as error:
        raise ConfigError(
            f'recipe "{path}" cannot be read ({error.strerror}); give a file that you may read'
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f'recipe "{path}" is not YAML: {" ".join(str(error).split())}') from error
    if not isinstance(data, dict):
        raise ConfigError(f'recipe "{path}" must hold "key: value" lines, found {type(data).__name__}')
    for override in overrides:
        _apply_override(data, override)
    return Recipe(**{str(key): value for key, value in data.items()} | dict(replace or {}))


def _nearby_recipes(file: Path) -> str:
    folder = file.parent if file.parent.is_dir() else Path("recipes")
    names = sorted(str(found) for found in folder.glob("*.yaml"))
    nearest = difflib.get_close_matches(str(file), names, n=1, cutoff=0.4)
    if nearest:
        return f"did you mean {nearest[0]}?"
    return f"found there: {', '.join(names)}" if names else "give the path of a YAML file"


def _apply_override(data: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f'override "{override}" must look like key=value, for example client.optimizer.lr=1e-6')
    *parents, last = key.split(".")
    for parent in parents:
        data = data.setdefault(parent, {})
        if not isinstance(data, dict):
            raise ConfigError(f'override "{override}": {parent} is a single value, it has no keys below it')
    try:
        data[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f'override "{override}": the value is not YAML') from error
