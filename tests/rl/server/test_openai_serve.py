"""`arctic-rl serve --sample-only` as a command: where it says it is, what it refuses, how it stops."""

import signal
import threading

import httpx
import pytest

from tests.rl.server.served import WAIT_SECONDS, wait_until
from tests.rl.server.test_serve import KEY, call, serving

BODY = {"prompt": [5, 6, 7], "max_tokens": 300, "ignore_eos": True, "return_token_ids": True}


def test_the_first_signal_lets_requests_finish_and_the_log_holds_no_prompt(chat_model_folder):
    options = ("--sample-only", "--model", str(chat_model_folder), "--log-format", "json")
    with serving(*options, ARCTIC_RL_API_KEY=KEY) as (process, url):
        client = httpx.Client(base_url=url, headers={"authorization": f"Bearer {KEY}"}, timeout=60)
        assert client.get("/v1/models").json()["data"][0]["id"] == str(chat_model_folder)
        for name in (str(chat_model_folder), chat_model_folder.name):
            body = {"prompt": "what nobody else may read", "max_tokens": 1, "model": name}
            assert client.post("/v1/completions", json=body).status_code == 200
        answers: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: answers.append(client.post("/v1/completions", json=BODY)))
        asking.start()
        wait_until(lambda: "arctic_running 1.0" in client.get("/metrics").text or not asking.is_alive())
        process.send_signal(signal.SIGTERM)
        asking.join(WAIT_SECONDS)
        _, log = process.communicate(timeout=30)
    assert len(answers[0].json()["choices"][0]["token_ids"]) == 300
    assert process.returncode == 0
    assert "nobody else" not in log
    assert KEY not in log


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--sample-only"], "--sample-only needs --model"),
        (["--model", "x"], "--model needs --sample-only"),
        (["--max-batch-rows", "3"], "--max-batch-rows needs --sample-only"),
        (["--sample-only", "--model", "no/such/folder", "--port", "0"], "there is no such folder"),
        (["--sample-only", "--model", "tiny-random", "--port", "0", "--max-batch-rows", "0"], "max_batch_rows"),
        (["--sample-only", "--model", "tiny-random", "--port", "0", "--weights-root", "nowhere"], "is no folder"),
        (["--sample-only", "--model", "tiny-random", "--host", "0.0.0.0"], "needs an API key"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(options, said, capsys):
    assert call("serve", *options) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("arctic-rl: ")
    assert said in line
