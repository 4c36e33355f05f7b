import pytest
import tokenizers

from arctic_platform.errors import ConfigError, InputError
from arctic_platform.rl.config import ArcticRLClientConfig
from arctic_platform.rl.engines.models import load_tokenizer, tiny_model
from arctic_platform.rl.engines.torch_sample import TorchSampleEngine
from arctic_platform.rl.protocol import SamplingParams


@pytest.fixture
def folder(tmp_path):
    """A model with a tokenizer beside its weights: a token per word `w0 w1 ...`."""
    tiny_model().save_pretrained(tmp_path)
    model = tokenizers.models.WordLevel({f"w{i}": i for i in range(256)}, unk_token="w0")
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_engine_stops_at_a_text_with_the_tokenizer_beside_the_weights(folder):
    engine = TorchSampleEngine(ArcticRLClientConfig(model=str(folder)), tiny_model())
    free = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    plain = engine.generate([[1, 2]], free).rollouts[0]
    assert plain.text == "".join(f" w{token}" for token in plain.token_ids)
    stop = f"w{plain.token_ids[2]}"
    stopped = engine.generate([[1, 2]], SamplingParams(**free.model_dump() | {"stop": stop})).rollouts[0]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    assert stopped.text == plain.text[: plain.text.index(stop)]


def test_engine_without_a_tokenizer_refuses_texts_and_samples_the_rest():
    engine = TorchSampleEngine(ArcticRLClientConfig(model="tiny-random"), tiny_model())
    assert engine.generate([[1]], SamplingParams(max_tokens=2)).rollouts[0].text is None
    with pytest.raises(InputError, match="stop needs a tokenizer"):
        engine.generate([[1]], SamplingParams(stop="x"))


def test_a_damaged_tokenizer_is_named(folder):
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read as a tokenizer"):
        load_tokenizer(str(folder))


def test_no_tokenizer_is_none(tmp_path):
    assert load_tokenizer(str(tmp_path)) is None
    assert load_tokenizer("tiny-random") is None
