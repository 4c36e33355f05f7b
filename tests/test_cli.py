"""The command: quick to start, one line for a user's mistake, and the exit codes that scripts rely on."""

import importlib
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from arctic_platform import cli
from arctic_platform.cli import main
from arctic_platform.rl.fetch import fetch_model

ROOT = Path(__file__).parent.parent
TINY = str(ROOT / "recipes" / "tiny.yaml")
SMALL = ["--set", "eval.num_questions=8", "--set", "prompts_per_step=2", "--set", "side_by_side_repeats=0"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models/tiny-llama in it, to work in."""
    folder = tmp_path_factory.mktemp("work")
    fetch_model("tiny-llama", folder / "models" / "tiny-llama")
    return folder


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return ended.value.code


def test_help_lists_the_commands(capsys):
    assert call("--help") == 0
    text = capsys.readouterr().out
    for command in ("train", "fetch", "report"):
        assert command in text


def test_the_command_line_starts_without_anything_heavy():
    code = (
        "import sys\nfrom arctic_platform.cli import main\n"
        "try: main(['train', '--help'])\nexcept SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'numpy', 'reasoning_gym', 'matplotlib'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_train_runs_reports_and_says_where(models, monkeypatch, capsys):
    monkeypatch.chdir(models)
    assert call("train", TINY, "--num-steps", "2", "--name", "short", *SMALL) == 0
    out = capsys.readouterr().out
    assert "step 2/2" in out
    assert out.splitlines()[-1] == "Report: runs/short/report.html"
    assert (models / "runs/short/report.html").is_file()
    assert call("train", TINY, "--num-steps", "2", "--name", "short", *SMALL) == 0
    assert "complete already (2 steps); --fresh starts it anew" in capsys.readouterr().out
    assert call("report", "runs/short") == 0
    assert capsys.readouterr().out.strip() == "runs/short/report.html"


def test_fetch_is_idempotent(models, monkeypatch, capsys):
    monkeypatch.chdir(models)
    assert call("fetch", "tiny-llama") == 0
    assert "is there already" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "no-such.yaml"], 'recipe "no-such.yaml" does not exist'),
        (["train", TINY, "--set", "num_stps=3"], "did you mean 'num_steps'?"),
        (["train", TINY, "--set", "task.name=chain_sums"], "nearest: chain_sum"),
        (["train", TINY, "--model", "models/nowhere"], 'model "models/nowhere" does not exist'),
        (["train", TINY, "--model", "smollm2-135m"], "run: arctic-rl fetch smollm2-135m"),
        (["train", TINY, "--set", "sampling.max_tokens=5000"], "5000"),
        (["train", TINY, "--num-steps", "many"], "num-steps"),
        (["train"], "RECIPE requires an argument"),
        (["trian", TINY], "trian"),
        (["fetch", "gpt5"], 'no known model is called "gpt5"'),
        (["report", "runs/nowhere"], "is not a run"),
    ],
    ids=lambda value: "-".join(value[:2]).replace("/", "_")[-40:] if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_exit_code_2(models, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(models)
    assert call(*arguments) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.startswith("arctic-rl: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err


def test_a_folder_that_cannot_be_written_is_one_line_with_the_fix(models, monkeypatch, capsys):
    monkeypatch.chdir(models)
    Path("file").write_text("no folder")
    for arguments, fix in (
        (["train", TINY, "--output-dir", "file", *SMALL], "choose another folder with --output-dir"),
        (["fetch", "tiny-llama", "--to", "file/model"], "give another place with --to"),
    ):
        assert call(*arguments) == 2
        err = capsys.readouterr().err
        assert fix in err
        assert err.count("\n") == 1


def test_what_cannot_be_written_at_the_end_is_one_line_too(models, monkeypatch, capsys):
    monkeypatch.chdir(models)
    assert call("train", TINY, "--num-steps", "1", "--name", "blocked", *SMALL) == 0
    Path("runs/blocked/report.html").unlink()
    Path("runs/blocked/report.html").mkdir()
    capsys.readouterr()
    assert call("report", "runs/blocked") == 2
    err = capsys.readouterr().err
    assert "report.html" in err
    assert err.count("\n") == 1


def test_a_warning_is_one_line(models, monkeypatch, capsys):
    monkeypatch.chdir(models)
    budget = ["--set", "client.zorro_train.max_token_len=50"]
    assert call("train", TINY, "--num-steps", "1", "--name", "narrow", *SMALL, *budget) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines
    assert all(line.startswith("arctic-rl: warning: a row of ") for line in lines)


def test_an_interrupt_saves_a_checkpoint_and_the_same_command_goes_on(models):
    command = [sys.executable, "-m", "arctic_platform.cli", "train", TINY, "--name", "stopped", *SMALL]
    command += ["--num-steps", "200", "--set", "checkpoint_every=0", "--set", "eval.every=0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, cwd=models, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 3/"):
            process.send_signal(signal.SIGINT)
            break
    rest = process.stdout.read()
    assert process.wait(60) == 130
    assert "a checkpoint is saved. The same command goes on from there." in rest
    done = int(rest.split("Stopped after step ")[1].split(";")[0])
    command[command.index("200")] = str(done + 1)
    again = subprocess.run(command, cwd=models, env=environment, capture_output=True, text=True, check=True)
    assert f"going on after step {done}" in again.stdout
    assert f"step {done + 1}/{done + 1}" in again.stdout


def test_help_comes_quickly():
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "arctic_platform.cli", "--help"], cwd=ROOT, check=True, capture_output=True)
    assert time.perf_counter() - started < 10.0


def test_a_logged_warning_is_one_line_and_a_loss_is_told_by_the_loop_alone(capsys):
    with cli._saying_logs():
        logging.getLogger("arctic_platform.rl.weight_sync").warning("%s went\n  another way", "weights")
        logging.getLogger("arctic_platform.rl.weight_sync").info("all is well")
        logging.getLogger(cli.LOSSES).error("rank 1 was lost")
    assert capsys.readouterr().err == "arctic-rl: warning: weights went another way\n"
    assert importlib.import_module(cli.LOSSES)
