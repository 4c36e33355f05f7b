"""Verifiable tasks of reasoning-gym, asked as few-shot completions of token ids.

    Q: <shot 1>                     \
    A: <answer 1>                    |  prefix_ids: the shots, tokenised once; every prompt of the task
    ...                              |  begins with exactly these ids, so they are computed once per batch
    Q: <shot n>                      |
    A: <answer n>                   /
    Q: <question>
    A:                                  the model goes on from here, and a newline ends its answer

The text ends each piece with a newline, so that pieces tokenised one by one give the ids of the whole text.
Questions are numbered: question `index` of a stream is a pure function of the seed and the index, so a run
resumes by knowing its step. Held-out questions and shots are never asked in training.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from arctic_platform.errors import ConfigError, InputError, MissingDependencyError
from arctic_platform.rl.config import StrictModel

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset
    from tokenizers import Tokenizer

BLOCK_SIZE = 1024
MAX_ATTEMPTS = 500


class TaskConfig(StrictModel):
    """A task of reasoning-gym and how it is asked."""

    name: str = Field(description="Name of a reasoning-gym dataset, for example chain_sum.")
    params: dict[str, Any] = Field(default_factory=dict, description="Parameters of that dataset (difficulty).")
    num_shots: int = Field(8, ge=0, description="Solved examples in front of every question.")
    partial_credit: bool = Field(False, description="Reward nearly right answers too, as the dataset scores them.")
    seed: int = Field(0, ge=0, description="Picks the shots and the held-out questions; the same for every run.")


@dataclass(frozen=True)
class Question:
    """One question: its text, its prompt as token ids (shots included), and reasoning-gym's entry to score with."""

    text: str
    prompt: list[int]
    entry: dict[str, Any]

    @property
    def answer(self) -> str:
        """The reference answer; others may be right too."""
        return str(self.entry["answer"])


class Task:
    """A stream of training questions, a held-out set, and the score of an answer.

    Attributes:
        prefix_ids: ids that every prompt begins with. held_out: questions that training never asks.
        stop_token_ids: ids that end an answer, beside the model's own end token.

    Raises:
        ConfigError: the task or a parameter does not exist, or the task has too few different questions.
        MissingDependencyError: reasoning-gym is not installed.
    """

    def __init__(self, config: TaskConfig, tokenizer: Tokenizer, *, num_held_out: int, seed: int) -> None:
        self.config = config
        self.seed = seed
        self._tokenizer = tokenizer
        self._dataset = lru_cache(maxsize=64)(self._build_dataset)
        check_task(config)
        self._scorer = self._build_dataset(0, 1)
        held_out = self._distinct("held-out", num_held_out, taken=set())
        shots = self._distinct("shots", config.num_shots, taken={entry["question"] for entry in held_out})
        self._reserved = {entry["question"] for entry in [*held_out, *shots]}
        _refuse_long_answers(config.name, [*held_out, *shots])
        shots_text = "".join(_as_shot(entry) for entry in shots)
        self.prefix_ids = _leading_special_ids(tokenizer) + self._encode(shots_text)
        self.stop_token_ids = _newline_ids(tokenizer)
        self.held_out = [self._question(entry) for entry in held_out]

    def train_question(self, index: int) -> Question:
        """Question `index` of the training stream, never one of the held-out questions or shots."""
        for entry in self._candidates(f"train-{self.seed}", index):
            if entry["question"] not in self._reserved:
                return self._question(entry)
        raise ConfigError(
            f'task "{self.config.name}" with {self.config.params} has no question left for training; '
            "ask for fewer held-out questions or make it harder"
        )

    def score(self, question: Question, response: Sequence[int]) -> float:
        """Reward in [0, 1] of a response: the whole first line must be the answer, and the line must have ended."""
        line, newline, _ = self.text_of(response).partition("\n")
        has_ended = bool(newline) or self._ends_with_special(response)
        answer = line.strip()
        if not answer or not has_ended:
            return 0.0
        score = min(1.0, max(0.0, float(self._scorer.score_answer(answer, question.entry))))
        return score if self.config.partial_credit else float(score == 1.0)

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def _ends_with_special(self, response: Sequence[int]) -> bool:
        return bool(response) and not self.text_of(response[-1:])

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _question(self, entry: dict[str, Any]) -> Question:
        ids = self._encode(_as_question(entry))
        return Question(text=entry["question"], prompt=self.prefix_ids + ids, entry=entry)

    def _distinct(self, stream: str, number: int, *, taken: set[str]) -> list[dict[str, Any]]:
        """The first `number` questions of a stream that differ from each other and from those `taken`."""
        found: dict[str, dict[str, Any]] = {}
        for index in range(number):
            candidates = self._candidates(f"{stream}-{self.config.seed}", index)
            entry = next((one for one in candidates if one["question"] not in taken | found.keys()), None)
            if entry is None:
                raise ConfigError(
                    f'task "{self.config.name}" with {self.config.params} gives only about {len(found)} different '
                    f"questions for {stream}, {number} were asked for; ask for fewer or make it harder"
                )
            found[entry["question"]] = entry
        return list(found.values())

    def _candidates(self, stream: str, index: int) -> Iterator[dict[str, Any]]:
        """Entries that may stand at place `index`; the first suitable one is taken."""
        block, place = divmod(index, BLOCK_SIZE)
        for attempt in range(MAX_ATTEMPTS):
            yield self._dataset(_derive_seed(stream, block, attempt), BLOCK_SIZE)[place]

    def _build_dataset(self, seed: int, size: int) -> ProceduralDataset:
        import reasoning_gym

        try:
            return reasoning_gym.create_dataset(self.config.name, seed=seed, size=size, **self.config.params)
        except (AssertionError, TypeError, ValueError) as error:
            reason = str(error) or "a value is out of range"
            raise ConfigError(f'task "{self.config.name}" refuses params {self.config.params}: {reason}') from error


def check_task(config: TaskConfig) -> None:
    """Raise ConfigError, with the nearest names, when the task or one of its parameters does not exist."""
    known = _known_tasks()
    if config.name not in known:
        nearest = difflib.get_close_matches(config.name, known, n=3, cutoff=0.4)
        hint = f"nearest: {', '.join(nearest)}" if nearest else f"there are {len(known)}, for example chain_sum"
        raise ConfigError(f'task "{config.name}" does not exist in reasoning-gym; {hint}')
    accepted = sorted({field.name for field in fields(known[config.name])} - {"seed", "size"})
    for key in config.params:
        if key not in accepted:
            raise ConfigError(f'task "{config.name}" has no parameter "{key}"; accepted: {", ".join(accepted)}')


def load_tokenizer(model: str) -> Tokenizer:
    """The fast tokenizer of a model folder or hub id; raises InputError when there is none."""
    from tokenizers import Tokenizer

    file = Path(model) / "tokenizer.json" if Path(model).is_dir() else Path(_download_tokenizer(model))
    if not file.is_file():
        raise InputError(f'model folder "{model}" holds no tokenizer.json; save its fast tokenizer there')
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises nothing narrower
        raise InputError(f'"{file}" is no tokenizer ({error}); save the fast tokenizer of the model again') from error


def _download_tokenizer(model: str) -> str:
    from huggingface_hub import hf_hub_download

    try:
        return hf_hub_download(model, "tokenizer.json")
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(
            f'the tokenizer.json of model "{model}" cannot be had from the Hugging Face hub ({reason}); '
            "check the id and the network, or give a model folder"
        ) from error


def _known_tasks() -> dict[str, Any]:
    """Name to config dataclass."""
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise MissingDependencyError(
            "tasks need reasoning-gym; install it with: pip install 'zorro-rl[tasks]'"
        ) from error
    return {name: config for name, (_, config) in DATASETS.items()}


def _derive_seed(stream: str, block: int, attempt: int) -> int:
    """Seeds that share nothing: reasoning-gym adds the index to the seed, so nearby seeds repeat questions."""
    digest = hashlib.sha256(f"{stream}/{block}/{attempt}".encode()).digest()
    return int.from_bytes(digest[:4], "big")


def _as_question(entry: dict[str, Any]) -> str:
    return f"Q: {entry['question']}\nA:"


def _as_shot(entry: dict[str, Any]) -> str:
    return f"{_as_question(entry)} {entry['answer']}\n"


def _refuse_long_answers(name: str, entries: list[dict[str, Any]]) -> None:
    if any("\n" in str(entry["answer"]) for entry in entries):
        raise ConfigError(f'task "{name}" has answers of several lines; choose one whose answers fit on one line')


def _newline_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tokens that are one or two newlines and nothing else."""
    pieces = [tokenizer.encode(text, add_special_tokens=False).ids for text in ("\n", "\n\n")]
    return tuple(dict.fromkeys(ids[0] for ids in pieces if len(ids) == 1))


def _leading_special_ids(tokenizer: Tokenizer) -> list[int]:
    """What the tokenizer puts in front of a text (a BOS token), or nothing."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    marked = tokenizer.encode("a", add_special_tokens=True).ids
    return marked[: marked.index(plain[0])]
