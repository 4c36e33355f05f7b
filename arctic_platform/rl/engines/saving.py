"""What every training engine does to save, load and export: all ranks gather, the first writes, each reads its part.

An engine gives its state by name and whole (`SavedEngine`), however it is cut over ranks; so what one engine on some
ranks wrote, another one on other ranks reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor
from transformers import PreTrainedModel

from arctic_platform.errors import CheckpointError, ConfigError, InputError
from arctic_platform.rl.config import ArcticRLClientConfig
from arctic_platform.rl.engines import checkpoints, lora
from arctic_platform.rl.engines.checkpoints import TrainerState
from arctic_platform.rl.engines.folders import Draft
from arctic_platform.rl.engines.models import Publishing, copy_tokenizer, write_model_config
from arctic_platform.rl.engines.training_files import (
    TensorFiles,
    random_state,
    restore_random,
    write_random,
    write_tensors,
)
from arctic_platform.rl.engines.world import World
from arctic_platform.rl.protocol import CheckpointResponse
from arctic_platform.rl.weight_sync.base import Manifest

Read = Callable[[str], Tensor | None]


class SavedEngine(Protocol):
    """What is needed of a training engine. The gathering calls are collective, and whole tensors come on rank 0."""

    config: ArcticRLClientConfig
    model: PreTrainedModel
    world: World
    num_steps: int
    version: int
    run_id: str

    @property
    def optimizer_step(self) -> int:
        """Updates that AdamW counted."""

    @property
    def has_pending_gradients(self) -> bool:
        """Whether `fwd_bwd` was called since the last `step`."""

    def gather_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Each distinct parameter and saved buffer by its first name; merged where there are adapters."""

    def weight_specs(self) -> Manifest:
        """Names, shapes and dtypes of `gather_weights`."""

    def gather_training(self) -> Iterator[tuple[str, Tensor]]:
        """`param.`, `exp_avg.`, `exp_avg_sq.` and, in half precision, `master.` of everything that is trained."""

    def scatter_training(self, read: Read, optimizer_step: int) -> None:
        """The inverse: take what `read` gives under these names, None where nothing was saved."""


def save_checkpoint(engine: SavedEngine, path: str | None, client_state: dict[str, Any] | None) -> CheckpointResponse:
    """Write a checkpoint, or nothing; then delete those beyond `keep_checkpoints`, where `path` is none.

    Raises CheckpointError when the folder cannot be written, ConfigError when there is neither `path` nor
    `checkpoint_path`, InputError when gradients are pending or `client_state` is not JSON.
    """
    _check_json(client_state)
    if engine.has_pending_gradients:
        raise InputError("save_checkpoint() cannot keep gradients that wait for a step; call step() before it")
    config, world = engine.config, engine.world
    folder = _target(config, path, engine.num_steps)
    state = _state_of(engine, client_state or {})
    states = world.gather(random_state(config.device))

    def fill(draft: Draft) -> None:
        write_model(engine, draft)
        write_tensors(draft, "optimizer", _optimizer_tensors(engine))
        write_random(draft, states)
        draft.attempt(lambda: checkpoints.write_state(draft.part, state))

    _write_together(world, folder, fill, sign=checkpoints.STATE_FILE)
    if path is None and config.keep_checkpoints is not None and world.is_first:
        checkpoints.keep_newest(folder.parent, config.keep_checkpoints, engine.run_id)
    return _response(folder, state)


def load_checkpoint(engine: SavedEngine, path: str | None) -> CheckpointResponse:
    """Take over weights, optimizer, random state, step, version and run of a checkpoint; pending gradients stay.

    Raises CheckpointError when it is missing, incomplete, damaged or of another model; nothing is changed then.
    """
    source = Path(path) if path is not None else engine.config.checkpoint_folder
    if source is None:
        raise ConfigError("load_checkpoint() needs a path; give one or set checkpoint_path")
    world = engine.world
    with world.together():
        found = _find_whole(source) if world.is_first else None
    folder = world.gather(found)[0]
    assert folder is not None
    with world.together():
        saved = _Saved.open(engine, folder)
    engine.scatter_training(saved.read, saved.state.optimizer_step)
    restore_random(
        TensorFiles(folder, "random"),
        engine.config.device,
        world.rank,
        is_same_world=saved.state.num_ranks == world.size,
        seed=engine.config.seed,
        step=saved.state.step,
    )
    engine.num_steps, engine.version, engine.run_id = saved.state.step, saved.state.version, saved.state.run_id
    return _response(folder, saved.state)


def export_model(engine: SavedEngine, path: str) -> str:
    """Write the weights (and the tokenizer, where it is at hand) as a Hugging Face folder; returns its path."""
    folder = Path(path).expanduser()

    def fill(draft: Draft) -> None:
        shapes = {name: spec.shape for name, spec in engine.weight_specs().specs.items()}
        write_tensors(draft, "model", engine.gather_weights(), conversion=Publishing(engine.model, shapes))
        _write_model_files(engine, draft)

    _write_together(engine.world, folder, fill)
    return str(folder)


def write_model(engine: SavedEngine, draft: Draft) -> None:
    """The weights under the names that they have in this model, so that they are read back one by one.

    Where adapters are trained they alone, as peft names them: the base does not change, and merging would round.
    """
    if engine.config.lora is None:
        write_tensors(draft, "model", engine.gather_weights())
        _write_model_files(engine, draft)
        return
    trained = ((name, tensor) for name, tensor in engine.gather_training() if name.startswith("param."))
    adapters = ((lora.file_name(name.removeprefix("param.")), tensor) for name, tensor in trained)
    write_tensors(draft, "adapter_model", adapters)
    draft.attempt(lambda: lora.write_adapter_config(engine.model, draft.part))
    draft.attempt(lambda: copy_tokenizer(engine.config.model, draft.part))


def _write_model_files(engine: SavedEngine, draft: Draft) -> None:
    draft.attempt(lambda: write_model_config(engine.model, draft.part))
    draft.attempt(lambda: copy_tokenizer(engine.config.model, draft.part))


def _optimizer_tensors(engine: SavedEngine) -> Iterator[tuple[str, Tensor]]:
    """All but the parameters themselves, which the model's own files hold."""
    return ((name, tensor) for name, tensor in engine.gather_training() if not name.startswith("param."))


def _write_together(world: World, folder: Path, fill: Callable[[Draft], None], *, sign: str | None = None) -> None:
    """`fill` runs on all ranks; when the first one cannot write, all raise that, once all gathering is over."""
    draft = Draft(folder, is_writer=world.is_first, sign=sign)
    with world.together():
        draft.begin()
    try:
        fill(draft)
        with world.together():
            draft.put_in_place()
    finally:
        draft.close()


@dataclass(frozen=True)
class _Saved:
    """A checkpoint that was found to be of the engine's own kind; `model` holds adapters alone if `is_adapter`."""

    state: TrainerState
    is_adapter: bool
    model: TensorFiles
    optimizer: TensorFiles

    @classmethod
    def open(cls, engine: SavedEngine, folder: Path) -> _Saved:
        state = checkpoints.read_state(folder)
        _check_settings(folder, state.settings, _settings_of(engine))
        is_adapter = engine.config.lora is not None
        stem = "adapter_model" if is_adapter else "model"
        saved = cls(state, is_adapter, TensorFiles(folder, stem), TensorFiles(folder, "optimizer"))
        saved._check_tensors(engine, folder)
        return saved

    def read(self, name: str) -> Tensor | None:
        """One tensor by the name that `gather_training` gave it."""
        if name.startswith("param."):
            return self.model.read(self._file_name(name.removeprefix("param.")))
        return self.optimizer.read(name)

    def _file_name(self, name: str) -> str:
        return lora.file_name(name) if self.is_adapter else name

    def _check_tensors(self, engine: SavedEngine, folder: Path) -> None:
        own = lora.adapter_specs(engine.model) if self.is_adapter else engine.weight_specs().specs
        files = {self._file_name(name): spec for name, spec in own.items()}
        wrong = sorted(files.keys() ^ self.model.specs.keys())
        wrong = wrong or sorted(name for name in files if files[name] != self.model.specs[name])
        for name, spec in () if wrong else self.optimizer.specs.items():
            of = name.partition(".")[2]
            if of not in own or own[of].shape != spec.shape:
                wrong = [name]
                break
        if wrong:
            raise CheckpointError(f"{folder} is of another model: {wrong[0]} differs in name, shape or dtype")


def _find_whole(source: Path) -> Path:
    folder = checkpoints.find_checkpoint(source)
    checkpoints.check_content(folder, checkpoints.read_state(folder))
    return folder


def _target(config: ArcticRLClientConfig, path: str | None, step: int) -> Path:
    if path is not None:
        return Path(path).expanduser()
    if config.checkpoint_folder is None:
        raise ConfigError("save_checkpoint() needs a path; give one or set checkpoint_path")
    return checkpoints.step_folder(config.checkpoint_folder, step)


def _state_of(engine: SavedEngine, client_state: dict[str, Any]) -> TrainerState:
    return TrainerState(
        step=engine.num_steps,
        version=engine.version,
        run_id=engine.run_id,
        optimizer_step=engine.optimizer_step,
        client_state=client_state,
        settings=_settings_of(engine),
        engine=type(engine).__name__,
        num_ranks=engine.world.size,
    )


def _settings_of(engine: SavedEngine) -> dict[str, Any]:
    """What a job must have alike to go on with a checkpoint."""
    adapters = engine.config.lora
    return {
        "model_type": engine.model.config.model_type,
        "dtype": engine.config.dtype,
        "lora": None if adapters is None else adapters.model_dump(mode="json"),
    }


def _check_settings(folder: Path, saved: dict[str, Any], own: dict[str, Any]) -> None:
    for name, value in own.items():
        if saved.get(name) == value:
            continue
        if name == "model_type":
            raise CheckpointError(
                f"{folder} is of another model: a {saved.get(name)!r}, while this job trains a {value!r}; give another"
            )
        raise CheckpointError(
            f"{folder} was written with {name}={saved.get(name)!r}, this job has {name}={value!r}; set it alike, or "
            "start from the weights alone with model: set to that folder"
        )


def _response(folder: Path, state: TrainerState) -> CheckpointResponse:
    return CheckpointResponse(
        path=str(folder), step=state.step, weight_version=state.version, client_state=state.client_state
    )


def _check_json(client_state: dict[str, Any] | None) -> None:
    try:
        json.dumps(client_state)
    except (TypeError, ValueError) as error:
        raise InputError(f"client_state must hold JSON values only: {error}") from error
