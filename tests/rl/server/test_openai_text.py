"""Text to ids and back: every byte is kept, chats are tokenised as one text, templates get what they read."""

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from arctic_platform.errors import ConfigError, RequestError
from arctic_platform.rl.server.openai_text import Chat, Texts, load_texts

TURNS = [{"role": "user", "content": "Find it"}, {"role": "assistant", "content": "the 5"}]


@pytest.fixture(scope="module")
def sentencepiece() -> Texts:
    """A tokenizer of the Llama kind: a mark for a space before the text, and bytes as tokens."""
    inner = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=special, show_progress=False)
    inner.train_from_iterator(["find it the 5 user assistant find it the"] * 20, trainer)
    inner.pre_tokenizer = pre_tokenizers.Sequence([])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    template = "{{ bos_token }}{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}"
    return Texts(tokenizer, chat_template=template)


@pytest.mark.parametrize(
    "text", ["Q: Find 17", "na\u00efve \u65e5\u672c\u8a9e", "\U0001f600 ok", " \n\t x  y", "\u00e9" * 3]
)
def test_the_bytes_of_tokens_are_those_of_the_text(texts, text):
    ids = texts.encode(text)
    assert b"".join(texts.token(token_id).raw for token_id in ids) == text.encode()
    assert texts.decode(ids) == text


def test_part_of_a_character_is_readable_as_what_it_is(texts):
    parts = [texts.token(token_id) for token_id in texts.encode("\U0001f600")]
    assert len(parts) > 1
    assert {part.text for part in parts} == {"\ufffd"}


def test_a_special_token_is_its_own_name(texts):
    assert texts.token(texts.tokenizer.eos_token_id).text == "<|end|>"


def test_the_bytes_of_sentencepiece_tokens_are_those_of_the_text(sentencepiece):
    ids = sentencepiece.encode("find it \u00e9")
    assert b"".join(sentencepiece.token(token_id).raw for token_id in ids) == " find it \u00e9".encode()


def test_a_chat_is_tokenised_as_one_text_and_not_turn_by_turn(sentencepiece):
    chat = Chat(TURNS, add_generation_prompt=False)
    whole = sentencepiece.encode("<s>Find it</s>the 5</s>", add_special_tokens=False)
    assert sentencepiece.encode(sentencepiece.render(chat), add_special_tokens=False) == whole


def test_a_chat_is_rendered_with_its_tools_and_arguments(texts):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    call = {"type": "function", "id": "1", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [*TURNS, {"role": "assistant", "content": "", "tool_calls": [call]}]
    text = texts.render(Chat(messages, tools=tools))
    assert '"name": "add"' in text
    assert "add([('a', 1)])" in text
    assert text.endswith("<|end|>\nassistant:")


def test_a_message_can_be_continued(texts):
    text = texts.render(Chat(TURNS, add_generation_prompt=False, continue_final_message=True))
    assert text.endswith("assistant: the 5")


@pytest.mark.parametrize("given", [{"enable_thinking": False}, {"reasoning_effort": "low"}])
def test_what_a_template_does_not_read_is_refused_by_name(texts, given):
    with pytest.raises(RequestError, match="does not read it") as caught:
        texts.render(Chat(TURNS, template_kwargs=given))
    assert caught.value.param == next(iter(given))


def test_what_a_template_reads_reaches_it(texts):
    assert texts.render(Chat(TURNS, template_kwargs={"mood": "calm"})).startswith("mood: calm\n")


def test_tools_and_documents_are_refused_where_the_template_knows_none(sentencepiece):
    for given in ({"tools": [{"type": "function"}]}, {"documents": [{"text": "x"}]}):
        with pytest.raises(RequestError, match=next(iter(given))):
            sentencepiece.render(Chat(TURNS, **given))


def test_messages_that_a_template_refuses_are_the_callers_mistake(texts):
    refusing = Texts(texts.tokenizer, chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="roles must alternate"):
        refusing.render(Chat(TURNS))


def test_without_a_template_the_error_says_what_to_do(texts, tiny_model_folder):
    bare = load_texts(str(tiny_model_folder))
    assert bare is not None
    with pytest.raises(RequestError, match="--chat-template"):
        bare.render(Chat(TURNS))


def test_a_template_file_takes_the_place_of_the_models_own(chat_model_folder, tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages[0].content }}!", encoding="utf-8")
    loaded = load_texts(str(chat_model_folder), chat_template=file)
    assert loaded is not None
    assert loaded.render(Chat(TURNS)) == "Find it!"
    with pytest.raises(ConfigError, match="cannot be read"):
        load_texts(str(chat_model_folder), chat_template=tmp_path / "absent")


def test_a_model_without_a_tokenizer_has_no_texts(tmp_path):
    assert load_texts(str(tmp_path)) is None
    assert load_texts("tiny-random") is None
