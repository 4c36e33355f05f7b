"""The simulator and the cost benchmark run at a small size and say what they promise; their times are not asserted."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from arctic_platform.rl.engines.models import tiny_model

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_the_cost_benchmark_compares_flops_and_bytes(tmp_path, capsys):
    bench = load("bench_cost")
    out = tmp_path / "cost.json"
    bench.bench(num_forests=2, max_groups=1, repeats=1, hidden_size=64, num_layers=1, vocab_size=64, out=out)
    record = json.loads(out.read_text())
    assert record == json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(record["time"]) == {"correlation", "rank_correlation", "worst_ratio", "median_off"}
    assert record["memory"]["correlation"] > 0.95
    assert record["memory"]["worst_ratio"] < 1.5


@pytest.mark.parametrize("batch", ["long_tail", "long_prompt", "agentic", "recorded"])
def test_the_planner_beats_the_other_policies(batch):
    bench = load("bench_balance")
    made = bench.BATCHES[batch](np.random.default_rng(0), 32)
    results = {policy: bench.simulate(batch, made, policy, 16, 32_768) for policy in bench.POLICIES}
    ours = results.pop("planner")
    assert ours.rows == 512
    assert ours.level <= 1.05
    assert ours.saving_kept > 0.85
    assert all(ours.makespan <= other.makespan for other in results.values())


def assert_level(bench: ModuleType, batch: str, num_ranks: int, seeds: range) -> None:
    for seed in seeds:
        made = bench.BATCHES[batch](np.random.default_rng(seed), max(64, num_ranks))
        plan = bench.planned(made, bench.Limits(max_token_len=32_768, num_ranks=num_ranks))
        assert sorted(row for r in range(num_ranks) for row in plan.rank_rows(r)) == list(range(len(made.prompt_lens)))
        assert plan.makespan <= 1.05 * plan.ideal, (batch, num_ranks, seed)
        assert plan.makespan <= 1.3 * plan.bound, "level ranks are no use where all of them compute more"


@pytest.mark.parametrize("num_ranks", [8, 16, 32, 48, 64, 256])
@pytest.mark.parametrize("batch", ["long_tail", "long_prompt", "agentic", "recorded"])
def test_ranks_finish_within_five_per_cent_of_the_ideal_for_every_kind_of_batch(batch, num_ranks):
    assert_level(load("bench_balance"), batch, num_ranks, range(1 if num_ranks > 64 else 3))


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [8, 24, 64])
@pytest.mark.parametrize("batch", ["long_tail", "long_prompt", "agentic", "recorded"])
def test_ranks_finish_within_five_per_cent_of_the_ideal_for_thirty_more_batches(batch, num_ranks):
    assert_level(load("bench_balance"), batch, num_ranks, range(3, 33))


def test_the_simulator_draws_its_table_and_its_plot(tmp_path, monkeypatch, capsys):
    bench = load("bench_balance")
    monkeypatch.setattr(bench, "BATCHES", {"recorded": bench.recorded})
    monkeypatch.setattr(bench, "planning_times", lambda repeats, max_token_len: [])
    files = {name: tmp_path / name for name in ("table", "plot.svg", "out.json")}
    bench.bench(ranks=(4, 8), seeds=1, out=files["out.json"], table=files["table"], plot=files["plot.svg"])
    assert len(json.loads(files["out.json"].read_text())["results"]) == 2 * 4
    assert files["table"].read_text().count("| recorded |") == 2
    assert "<svg" in files["plot.svg"].read_text()
    assert "planner: makespan, saving" in capsys.readouterr().out


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux's /proc")
def test_the_wire_benchmark_measures_both_directions_between_two_processes(tmp_path, capsys):
    bench = load("bench_wire")
    out = tmp_path / "wire.json"
    bench.bench(num_rows=16, row_len=4096, repeats=1, num_calls=3, out=out)
    record = json.loads(out.read_text())
    assert record == json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(record["part_of_memcpy"]) == {"send", "receive"}
    assert record["megabytes"]["send"] > 16 * 4096 * 8 / 1e6


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is read from Linux's /proc")
def test_the_sync_benchmark_measures_every_way_between_two_processes(tmp_path, capsys):
    bench = load("bench_sync")
    out = tmp_path / "sync.json"
    bench.bench(quick=True, ways="shared_memory,stream", out=out)
    record = json.loads(out.read_text())
    assert record == json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(record["ways"]) == [a + b for a in ("shared_memory", "stream") for b in ("", "_low_memory")]
    assert all(way["is_equal"] and way["gb_per_s"] > 0 for way in record["ways"].values())
    assert all(change["is_equal"] and change["times_smaller"] > 1 for change in record["changes"].values())


def test_ways_to_decode_take_turns_and_the_record_compares_them(tmp_path, capsys):
    bench = load("bench_sample")
    tiny_model().save_pretrained(tmp_path / "model")
    files = {name: tmp_path / name for name in ("table", "plot.svg", "out.json")}
    bench.bench(
        model=str(tmp_path / "model"), prompt_len=40, num_rollouts=3, new_tokens=5,
        ways="shared,unshared,generate,static", out=files["out.json"], table=files["table"], plot=files["plot.svg"],
    )  # fmt: skip
    record = json.loads(files["out.json"].read_text())
    assert record == json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(record["ways"]) == ["shared", "unshared", "generate", "static"]
    assert all(way["num_steps"] == 4 and way["step_ms"] > 0 for way in record["ways"].values())
    assert files["table"].read_text().count("\n| ") == 5
    assert "<svg" in files["plot.svg"].read_text()


def test_the_curve_has_a_point_for_every_length_and_group(tmp_path, capsys):
    bench = load("bench_sample")
    tiny_model().save_pretrained(tmp_path / "model")
    plot = tmp_path / "plot.svg"
    bench.bench(model=str(tmp_path / "model"), curve=True, curve_lens="9,17", curve_groups="2", plot=plot)
    points = json.loads(capsys.readouterr().out.splitlines()[-1])["points"]
    assert [(p["num_rollouts"], p["prompt_len"]) for p in points] == [(2, 9), (2, 17)]
    assert "<svg" in plot.read_text()


@pytest.mark.parametrize(
    ("ways", "message"), [("shared,quick", "'quick'; choose some of shared"), ("vllm-eager", "make")]
)
def test_a_way_that_cannot_run_is_refused_in_one_line(ways, message, monkeypatch):
    bench = load("bench_sample")
    monkeypatch.setattr(bench, "_vllm_environment", lambda: None)
    with pytest.raises(SystemExit, match=message):
        bench.bench(ways=ways)
