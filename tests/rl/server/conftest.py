"""A tiny model with a tokenizer and a chat template, and a server for it."""

import shutil
from collections.abc import Generator
from pathlib import Path

import pytest

from arctic_platform.rl.server.openai_text import Texts, load_texts
from tests.rl.server.served import Served, served, serving_of

CHAT_TEMPLATE = """\
{%- if tools %}tools: {{ tools | tojson }}
{% endif -%}
{%- if mood %}mood: {{ mood }}
{% endif -%}
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{%- for call in message.tool_calls or [] %}
{{ call.function.name }}({{ call.function.arguments.items() | list }})
{%- endfor %}<|end|>
{% endfor -%}
{%- if add_generation_prompt %}assistant:{% endif -%}
"""


@pytest.fixture(scope="session")
def chat_model_folder(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model of the recipes with a chat template."""
    folder = tmp_path_factory.mktemp("models") / "tiny-chat"
    shutil.copytree(tiny_model_folder, folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def texts(chat_model_folder: Path) -> Texts:
    """Its tokenizer."""
    loaded = load_texts(str(chat_model_folder))
    assert loaded is not None
    return loaded


@pytest.fixture(scope="session")
def _server(chat_model_folder: Path) -> Generator[Served]:
    with served(serving_of(chat_model_folder)) as running:
        yield running


@pytest.fixture
def server(_server: Served) -> Generator[Served]:
    """A running server; whatever a test did, nothing may be left in it."""
    yield _server
    _server.expect_nothing_left()
