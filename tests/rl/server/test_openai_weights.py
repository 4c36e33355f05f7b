"""Pause, weights from a folder, resume, as prime-rl asks for them; what does not fit changes nothing."""

import asyncio
import shutil

import httpx
import pytest
import torch

from arctic_platform.rl.engines.models import load_model
from tests.rl.server.served import WAIT_SECONDS, served, serving_of, wait_until
from tests.zorro_inference.models import plain_greedy

PROMPT = [5, 6, 7, 8]
BODY = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def weights_root(chat_model_folder, tmp_path_factory):
    """Two folders of weights: other ones of the same model, and those of another model."""
    root = tmp_path_factory.mktemp("weights")
    model = load_model(str(chat_model_folder))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    model.save_pretrained(root / "step_1")
    load_model("tiny-random").save_pretrained(root / "another")
    shutil.copytree(chat_model_folder, root / "step_0")
    return root


@pytest.fixture
def trained(chat_model_folder, weights_root):
    with served(serving_of(chat_model_folder), weights_root=weights_root) as running:
        yield running
        running.expect_nothing_left()


def post(at, path: str, **body) -> httpx.Response:
    return httpx.post(f"{at.url}{path}", json=body, timeout=WAIT_SECONDS)


def drawn(at, **more) -> dict:
    return post(at, "/v1/completions", **BODY | more).json()["choices"][0]


def test_after_an_update_the_sampler_is_a_fresh_one_of_the_new_weights(trained, weights_root):
    before = drawn(trained)
    assert post(trained, "/pause?mode=keep&clear_cache=false").json() == {"status": "paused"}
    assert httpx.get(f"{trained.url}/is_paused").json() == {"is_paused": True}
    told = post(trained, "/update_weights", weight_dir=str(weights_root / "step_1"))
    assert told.json() == {"status": "ok", "weight_version": 1}
    assert post(trained, "/resume").json() == {"status": "resumed"}
    after = drawn(trained)
    fresh = load_model(str(weights_root / "step_1")).eval()
    assert after["token_ids"] == plain_greedy(fresh, PROMPT, 12, eos_id=None)
    assert after["token_ids"] != before["token_ids"]
    assert (before["weight_version"], after["weight_version"]) == (0, 1)


@pytest.mark.parametrize(
    ("folder", "code"),
    [
        ("another", "weights_differ"),
        ("absent", "weights_refused"),
        ("../..", "weights_refused"),
        (".", "weights_unreadable"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(trained, weights_root, folder, code):
    before = drawn(trained)
    refused = post(trained, "/update_weights", weight_dir=str(weights_root / folder))
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, code)
    assert drawn(trained) == before


def test_without_a_root_no_folder_is_read(server, weights_root):
    refused = post(server, "/update_weights", weight_dir=str(weights_root / "step_0"))
    assert refused.status_code == 403
    assert "--weights-root" in refused.json()["error"]["message"]


def test_requests_wait_through_a_pause_and_answer_afterwards(trained):
    alone = drawn(trained)

    async def through_a_pause() -> dict:
        await asyncio.to_thread(post, trained, "/pause?mode=keep")
        task = asyncio.create_task(asyncio.to_thread(drawn, trained))
        await asyncio.to_thread(wait_until, lambda: bool(trained.serving.in_flight))
        await asyncio.to_thread(post, trained, "/resume")
        return await task

    assert asyncio.run(through_a_pause()) == alone


def test_a_pause_that_aborts_ends_requests_with_what_they_have(trained):
    async def ended() -> dict:
        task = asyncio.create_task(asyncio.to_thread(drawn, trained, max_tokens=1500))
        await asyncio.to_thread(wait_until, lambda: trained.num_tokens > 3)
        await asyncio.to_thread(post, trained, "/pause")
        return await task

    answer = asyncio.run(ended())
    assert answer["finish_reason"] == "abort"
    assert 0 < len(answer["token_ids"]) < 1500
    post(trained, "/resume")


def test_a_pause_that_waits_lets_requests_finish(trained):
    async def finished() -> dict:
        task = asyncio.create_task(asyncio.to_thread(drawn, trained, max_tokens=200))
        await asyncio.to_thread(wait_until, lambda: trained.num_tokens > 3)
        await asyncio.to_thread(post, trained, "/pause?mode=wait")
        return await task

    assert len(asyncio.run(finished())["token_ids"]) == 200
    post(trained, "/resume")


@pytest.mark.parametrize("in_flight", ["keep", "recompute"])
def test_requests_live_through_an_update(trained, weights_root, in_flight):
    async def through_an_update() -> dict:
        task = asyncio.create_task(asyncio.to_thread(drawn, trained, max_tokens=400))
        await asyncio.to_thread(wait_until, lambda: trained.num_tokens > 3)
        folder = str(weights_root / "step_1")
        await asyncio.to_thread(post, trained, "/update_weights", weight_dir=folder, in_flight=in_flight, version=7)
        return await task

    answer = asyncio.run(through_an_update())
    assert (len(answer["token_ids"]), answer["weight_version"]) == (400, 7)
