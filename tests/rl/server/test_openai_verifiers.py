"""`vf-eval` as a command against a server, with both of its clients: chats, and token ids."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.rl.server.served import MODEL_NAME

ENVIRONMENTS = Path(__file__).parent / "environments"
TASKS, ROLLOUTS = 2, 2


def vf_eval(server, output: Path, *options: str) -> list[dict]:
    """Run the command; the traces that it wrote."""
    command = [
        *(Path(sys.executable).with_name("vf-eval"), "tiny_sums", "-m", MODEL_NAME, "-n", str(TASKS)),
        *("--num-rollouts", str(ROLLOUTS), "--no-push", "--no-rich", "-o", output, "--run.name", "run"),
        *("--client.base-url", server.base_url, "--env.agent.runtime.type", "subprocess"),
        *("--sampling.max-tokens", "8", "--sampling.temperature", "0.9", *options),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ENVIRONMENTS), "HOME": str(output), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=output, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    episodes = [json.loads(line) for line in (output / "run" / "traces.jsonl").read_text("utf-8").splitlines()]
    return [trace for episode in episodes for trace in episode.get("traces", [episode])]


def errors_of(trace: dict) -> list:
    return [trace.get("error"), *trace.get("errors", [])]


def test_vf_eval_runs_chats(server, tmp_path):
    traces = vf_eval(server, tmp_path, "--client.type", "eval")
    assert len(traces) == TASKS * ROLLOUTS
    print(json.dumps(traces[0], indent=1)[:6000])


def test_vf_eval_trains_on_token_ids(server, chat_model_folder, tmp_path):
    options = ("--client.type", "train", "--client.renderer-model-name", str(chat_model_folder))
    traces = vf_eval(server, tmp_path, *options)
    assert len(traces) == TASKS * ROLLOUTS
    print(json.dumps(traces[0], indent=1)[:6000])
