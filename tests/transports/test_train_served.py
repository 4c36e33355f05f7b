"""The loop of a recipe against a served backend: one line changes, the numbers do not."""

from pathlib import Path

import pytest

from arctic_platform.cli import main
from arctic_platform.rl.fetch import fetch_model
from arctic_platform.rl.run_folder import RunFolder
from tests.transports.serving import running_server

TINY = str(Path(__file__).parent.parent.parent / "recipes" / "tiny.yaml")
SMALL = ["--set", "eval.num_questions=8", "--set", "prompts_per_step=2", "--set", "side_by_side_repeats=1"]


def train(name: str, *more: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", TINY, "--name", name, *SMALL, *more])
    assert ended.value.code == 0


def numbers(name: str) -> list[float | None]:
    return [
        n for step in RunFolder.open(f"runs/{name}").steps() for n in (step.reward, step.loss, step.kl, step.grad_norm)
    ]


def test_a_recipe_trains_on_a_server_by_one_more_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    fetch_model("tiny-llama", Path("models/tiny-llama"))
    train("here", "--num-steps", "2")
    with running_server() as running:
        train("there", "--num-steps", "2", "--server-url", running.url)
        assert "step 2/2" in capsys.readouterr().out
        assert running.service.jobs() == []
        train("moved", "--num-steps", "1")
        train("moved", "--num-steps", "2", "--set", f"client.server_url={running.url}")
    for name in ("there", "moved"):
        assert numbers(name) == pytest.approx(numbers("here"), abs=1e-6)
        for part in ("summary.json", "report.html", "model/config.json", "checkpoints"):
            assert Path(f"runs/{name}/{part}").exists()
