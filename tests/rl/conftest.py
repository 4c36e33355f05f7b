"""The tiny model of the recipes, built once per test session."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from arctic_platform.rl.fetch import fetch_model
from arctic_platform.rl.tasks import load_tokenizer
from tests.rl.workers.forked import ForkedProcess


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model that `model: tiny-llama` stands for."""
    return fetch_model("tiny-llama", tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_model_folder: Path) -> Tokenizer:
    """Its tokenizer."""
    return load_tokenizer(str(tiny_model_folder))


@pytest.fixture(scope="module")
def forked_workers() -> Iterator[None]:
    """Ranks and samplers that the module starts are forks, which costs a tenth of a new interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("arctic_platform.rl.workers.launch.LocalProcess", ForkedProcess)
        yield
