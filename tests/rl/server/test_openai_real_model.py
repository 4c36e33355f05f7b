"""The server with a real model, where it was fetched: `arctic-rl fetch smollm2-135m`."""

from pathlib import Path

import pytest

from arctic_platform.rl.server.openai_run import serving_in_thread
from arctic_platform.rl.server.openai_serving import load_serving
from arctic_platform.rl.server.openai_settings import SamplingSettings
from tests.rl.server.served import Served
from tests.zorro_inference.models import plain_greedy

FOLDER = Path(__file__).parents[3] / "models" / "smollm2-135m"


@pytest.mark.slow
@pytest.mark.skipif(not FOLDER.is_dir(), reason="run arctic-rl fetch smollm2-135m")
def test_smollm2_answers_a_chat_as_plain_greedy_decoding_does():
    serving = load_serving(SamplingSettings(model=str(FOLDER)))
    with serving_in_thread(serving) as url:
        client = Served(url, serving).client()
        answer = client.chat.completions.create(
            model="smollm2-135m",
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            temperature=0,
            max_tokens=16,
            extra_body={"return_token_ids": True},
        )
        model = serving.engine.sampler.model
        prompt, ids = answer.model_extra["prompt_token_ids"], answer.choices[0].model_extra["token_ids"]
        assert ids == plain_greedy(model, prompt, 16, eos_id=2)
        assert "Paris" in answer.choices[0].message.content
