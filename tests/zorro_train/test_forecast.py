"""What is promised before a run against what the engine then reports."""

import json

import numpy as np
import pytest

from arctic_platform import cli
from arctic_platform.errors import ConfigError, InputError
from arctic_platform.forest.cost import ModelShape
from arctic_platform.rl.config import ZoRRoTrainConfig
from arctic_platform.rl.plan_command import plan_source, read_rows
from arctic_platform.rl.zorro_train.forecast import forecast
from tests.rl.engines.builders import grouped_batch
from tests.rl.engines.test_torch_train import engine

BATCH = grouped_batch(seed=3, num_groups=2, group_size=6, prompt_len=24)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_token_len": 34},
        {"max_token_len": 50},
        {"max_rollouts": 3},
        {"granularity": "prompt", "max_token_len": 40},
        {"min_shared": 4},
        {"min_saving": 0.9},
    ],
    ids=str,
)
def test_promised_counts_are_what_the_engine_computes(options):
    promised = forecast(BATCH.prompts, BATCH.responses, ZoRRoTrainConfig(**options))
    metrics = engine(zorro_train=options).fwd_bwd(BATCH).metrics
    assert promised.is_active == bool(metrics["zorro_active"])
    assert promised.num_tokens_unshared == metrics["tokens_naive"]
    if promised.is_active:
        assert promised.num_tokens_staged == metrics["tokens_computed"]
        assert promised.num_micro_batches == metrics["num_micro_batches"]
        assert promised.num_staged_groups == metrics["num_staged_groups"]


def test_cuts_lose_saving_that_stages_keep():
    prompts, responses = [list(range(100))] * 8, [[200 + row] * 20 for row in range(8)]
    promised = forecast(prompts, responses, ZoRRoTrainConfig(max_token_len=140))
    assert promised.num_tokens_whole == promised.num_tokens_staged == 100 + 8 * 20
    assert promised.num_tokens_cut == 4 * 140
    assert promised.lost_to_cuts == pytest.approx(3 * 100 / (7 * 100))
    assert promised.saving == pytest.approx(1 - 260 / 960)


def test_bound_counts_flops_where_the_model_is_known():
    prompts, responses = [list(range(100))] * 4, [[row] * 10 for row in range(4)]
    by_token = forecast(prompts, responses).flop_bound
    shape = ModelShape(2, 2, 32, 64, 100_000, 50_000)
    assert by_token == pytest.approx(440 / 140)
    assert 1.0 < forecast(prompts, responses, shape=shape).flop_bound < by_token, "logits are not shared"


def test_nothing_to_share_is_said_and_switched_off():
    promised = forecast([[row] for row in range(4)], [[9]] * 4)
    assert not promised.is_active and promised.flop_bound == 1.0
    assert "off: saves less than min_saving=0.05" in promised.lines()[-1]


def test_no_rows_have_a_forecast():
    assert forecast([], []).num_tokens_unshared == 0


def write_rows(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    return path


def test_command_plans_a_batch_from_a_file(tmp_path, capsys):
    rows = [{"prompt": list(range(50)), "response": [row]} for row in range(4)]
    with pytest.raises(SystemExit) as stop:
        cli.main(["plan", str(write_rows(tmp_path / "batch.jsonl", rows)), "--max-token-len", "60"])
    assert stop.value.code == 0
    said = capsys.readouterr().out
    assert "54 computed instead of 204" in said and "sharing           on" in said


@pytest.mark.parametrize(
    "line",
    [
        "{",
        '{"prompt": [1]}',
        '{"prompt": 3, "response": [1]}',
        "[1]",
        '{"prompt": "12", "response": "3"}',
        '{"prompt": [1.5], "response": [3]}',
        '{"prompt": [], "response": [3]}',
        '{"prompt": [-1], "response": [3]}',
        '{"prompt": [1%s], "response": [3]}' % ("0" * 30),
    ],
)
def test_line_that_is_no_row_is_named(tmp_path, line):
    path = tmp_path / "batch.jsonl"
    path.write_text('{"prompt": [1], "response": [2]}\n' + line)
    with pytest.raises(InputError, match="line 2 of"):
        read_rows(path)


@pytest.mark.parametrize(
    ("content", "message"), [(b"", "holds no rows"), (b"\xff\xfe", "cannot be read"), (None, "does not exist")]
)
def test_file_without_rows_is_refused(tmp_path, content, message):
    path = tmp_path / "batch.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_rows(path)


def test_model_that_does_not_exist_is_not_passed_over(tmp_path):
    path = write_rows(tmp_path / "batch.jsonl", [{"prompt": [1, 2], "response": [3]}])
    with pytest.raises(ConfigError, match="does not exist"):
        plan_source(path, model=str(tmp_path / "nowhere"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="has no config to be read"):
        plan_source(path, model=str(tmp_path))


def test_command_plans_the_first_step_of_a_recipe(tmp_path, monkeypatch):
    pytest.importorskip("reasoning_gym")
    lines = plan_source(__import__("pathlib").Path("recipes/tiny.yaml"), overrides=["prompts_per_step=2"])
    assert lines[0].startswith("rows              16 in")
    assert any("bound" in line for line in lines)


def test_unusable_source_is_one_line(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        plan_source(tmp_path / "absent.jsonl")
    with pytest.raises(InputError, match="no effect on a batch"):
        plan_source(write_rows(tmp_path / "b.jsonl", []), overrides=["seed=1"])


def test_forecast_takes_arrays():
    assert forecast([np.arange(5)], [np.arange(2)]).num_tokens_unshared == 7
