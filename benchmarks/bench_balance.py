"""Four ways to spread a batch over ranks, simulated: no model and no GPU is needed.

    python benchmarks/bench_balance.py
    python benchmarks/bench_balance.py --out benchmarks/results/balance.json --plot docs/images/balance.svg

Batches (16 rows for every rank, at least 1,024): *long_tail*, groups of 16 with log-normal prompts (median 1,024
tokens) and responses (median 2,048, sigma 0.9, at most 16,384); *long_prompt*, prompts of 8,192 and responses of 512
(medians); *agentic*, trees of turns, all behind one system prompt; *recorded*, lengths of real text: classes of
Python's standard library as prompts and their methods as responses (`record_lengths.py`), drawn from that file.

Policies: *round_robin* (row i to rank i mod R); *lengths* (Karmarkar-Karp on row lengths, which knows no sharing);
*groups* (whole groups, dearest first, to the rank with the least tokens; none is cut); *planner* (ours). Each says
which rows a rank has; the micro-batches of a rank are cut in the same way for all, and rows that meet in a micro-batch
share. Costs are the FLOPs of a Qwen3-8B-like model.

`makespan` is the dearest rank over the larger of (cost of the uncut forest / ranks) and the dearest row, which nothing
can beat; `level` the same with the mean of what the policy itself computes, `worst` that of the worst batch. Planning
is single-threaded and timed in CPU seconds, so that a busy machine does not count. The last line is one JSON object.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cyclopts
import numpy as np

from arctic_platform.forest import RowOrder, order_rows
from arctic_platform.forest.cost import ModelShape
from arctic_platform.rl.zorro_train.planner import Limits, Plan, plan_visits
from arctic_platform.rl.zorro_train.seqlen_balancing import get_seqlen_balanced_partitions

ROOT = Path(__file__).resolve().parents[1]
RECORDED = ROOT / "benchmarks" / "data" / "text_lengths.json"
SHAPE = ModelShape(
    num_layers=36,
    num_heads=32,
    head_dim=128,
    hidden_size=4096,
    vocab_size=151_936,
    layer_params=6_950_000_000,
    num_kv_heads=8,
)
RANK_FLOPS = 4e14
"""What a rank is taken to compute per second, for the share of a step that planning takes."""


@dataclass(frozen=True)
class Batch:
    """Rows in depth-first order, and the prompt tokens of each row (caller's order)."""

    visits: RowOrder
    prompt_lens: np.ndarray
    groups: list[list[int]]


@dataclass(frozen=True)
class Result:
    """One policy on one batch."""

    batch: str
    ranks: int
    rows: int
    policy: str
    makespan: float
    level: float
    worst: float
    saving_kept: float
    seconds: float


def bench(
    *,
    ranks: tuple[int, ...] = (8, 16, 32, 64, 256, 1024),
    max_token_len: int = 32_768,
    seeds: int = 5,
    repeats: int = 5,
    out: Path | None = None,
    table: Path | None = None,
    plot: Path | None = None,
) -> None:
    """Simulate, time the planner, and print.

    Parameters
    ----------
    ranks: Numbers of data-parallel ranks.
    max_token_len: Budget of a micro-batch.
    seeds: Batches of each kind, medians over them are shown; one batch beyond 64 ranks.
    repeats: Timed plans of each size; the median counts.
    out: File that receives the JSON object.
    table: File that receives the tables in Markdown.
    plot: Picture of makespan and saving over ranks (SVG or PNG).
    """
    results = []
    for name, make in BATCHES.items():
        for num_ranks in ranks:
            num_batches = seeds if num_ranks <= 64 else 1
            batches = [make(np.random.default_rng(seed), max(64, num_ranks)) for seed in range(num_batches)]
            for policy in POLICIES:
                runs = [simulate(name, batch, policy, num_ranks, max_token_len) for batch in batches]
                results.append(median(runs))
            print("\n".join(text_of(result) for result in results[-len(POLICIES) :]), flush=True)
    times = planning_times(repeats, max_token_len)
    lines = [*markdown(results), "", *markdown_times(times)]
    print("\n".join(lines))
    if table is not None:
        table.write_text("\n".join(lines) + "\n")
    if plot is not None:
        draw(results, plot)
    record = json.dumps(
        {"benchmark": "balance", "results": [asdict(result) for result in results], "planning": times, **origin()}
    )
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(record + "\n")
    print(record)


# --- batches


def grouped(prompts: list[int], responses: list[list[int]]) -> Batch:
    """Groups that share a prompt and nothing else."""
    lens, shared, prompt_lens, groups = [], [], [], []
    for prompt, answers in zip(prompts, responses, strict=True):
        groups.append(list(range(len(lens), len(lens) + len(answers))))
        shared += [0] + [prompt] * (len(answers) - 1)
        lens += [prompt + answer for answer in answers]
        prompt_lens += [prompt] * len(answers)
    visits = RowOrder(np.arange(len(lens)), np.array(shared, np.int64), np.array(lens, np.int64))
    return Batch(visits, np.array(prompt_lens, np.int64), groups)


def long_tail(
    rng: np.random.Generator, num_groups: int, *, prompt: int = 1024, response: int = 2048, sigma: float = 0.9
) -> Batch:
    """Log-normal prompts and responses, 16 to a group."""
    prompts = np.clip(prompt * rng.lognormal(0, 0.5, num_groups), 16, 16_384).astype(int)
    answers = np.clip(response * rng.lognormal(0, sigma, (num_groups, 16)), 1, 16_384).astype(int)
    return grouped(prompts.tolist(), answers.tolist())


def long_prompt(rng: np.random.Generator, num_groups: int) -> Batch:
    """Prompts that are far longer than what is answered."""
    return long_tail(rng, num_groups, prompt=8192, response=512)


def agentic(rng: np.random.Generator, num_groups: int) -> Batch:
    """Trees of turns behind one system prompt: a row leaves the row before it at one of its turns."""
    system = 1536
    lens, shared, prompt_lens, groups = [], [], [], []
    for _ in range(num_groups):
        task = system + int(np.clip(rng.lognormal(6, 0.6), 32, 4096))
        turns: list[int] = []
        groups.append(list(range(len(lens), len(lens) + 16)))
        for member in range(16):
            keep = int(rng.integers(0, len(turns) + 1)) if member else 0
            turns = turns[:keep] + [int(np.clip(rng.lognormal(5.5, 0.8), 8, 4096)) for _ in range(rng.integers(1, 7))]
            shared.append(task + sum(turns[:keep]) if member else system * bool(lens))
            lens.append(task + sum(turns))
            prompt_lens.append(task)
    visits = RowOrder(np.arange(len(lens)), np.array(shared, np.int64), np.array(lens, np.int64))
    return Batch(visits, np.array(prompt_lens, np.int64), groups)


def recorded(rng: np.random.Generator, num_groups: int) -> Batch:
    """Groups and lengths drawn from recorded text."""
    groups = json.loads(RECORDED.read_text())["groups"]
    drawn = [groups[i] for i in rng.integers(0, len(groups), num_groups)]
    answers = [rng.choice(group["response_lens"], 16).tolist() for group in drawn]
    return grouped([group["prompt_len"] for group in drawn], answers)


BATCHES: dict[str, Callable[[np.random.Generator, int], Batch]] = {
    "long_tail": long_tail,
    "long_prompt": long_prompt,
    "agentic": agentic,
    "recorded": recorded,
}


# --- policies


def round_robin(batch: Batch, num_ranks: int) -> list[list[int]]:
    """Row i to rank i mod R."""
    return [list(range(r, len(batch.prompt_lens), num_ranks)) for r in range(num_ranks)]


def by_lengths(batch: Batch, num_ranks: int) -> list[list[int]]:
    """Karmarkar-Karp on the lengths of rows."""
    return get_seqlen_balanced_partitions(batch.visits.lens.tolist(), num_ranks, equal_size=False)


def by_groups(batch: Batch, num_ranks: int) -> list[list[int]]:
    """Whole groups to the rank with the least deduplicated tokens, largest first."""
    lens, before = batch.visits.lens, batch.prompt_lens
    sizes = [int(lens[rows].sum() - before[rows[0]] * (len(rows) - 1)) for rows in batch.groups]
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = np.zeros(num_ranks)
    for g in sorted(range(len(sizes)), key=lambda g: -sizes[g]):
        r = int(np.argmin(loads))
        ranks[r] += batch.groups[g]
        loads[r] += sizes[g]
    return ranks


POLICIES: dict[str, Callable[[Batch, int], list[list[int]]] | None] = {
    "round_robin": round_robin,
    "lengths": by_lengths,
    "groups": by_groups,
    "planner": None,
}


def simulate(name: str, batch: Batch, policy: str, num_ranks: int, max_token_len: int) -> Result:
    """What a policy makes of a batch, and how long it thinks."""
    started = time.process_time()
    spread = POLICIES[policy]
    ours = None if spread else planned(batch, Limits(max_token_len=max_token_len, num_ranks=num_ranks))
    rows = spread(batch, num_ranks) if spread else []
    seconds = time.process_time() - started
    whole = ours or planned(batch, Limits(max_token_len=max_token_len))
    parts = [ours] if ours else [part_plan(batch, chosen, max_token_len) for chosen in rows]
    costs = np.concatenate([part.rank_costs for part in parts])
    num_tokens = sum(part.num_tokens for part in parts)
    saved = whole.num_tokens_unshared - whole.num_tokens_whole
    level = float(costs.max() / max(costs.mean(), whole.dearest_row))
    return Result(
        batch=name,
        ranks=num_ranks,
        rows=len(batch.prompt_lens),
        policy=policy,
        makespan=float(costs.max() / max(whole.cost_whole / num_ranks, whole.dearest_row)),
        level=level,
        worst=level,
        saving_kept=(whole.num_tokens_unshared - num_tokens) / saved,
        seconds=seconds,
    )


def planned(batch: Batch, limits: Limits) -> Plan:
    """A plan for Qwen3-8B-like costs."""
    return plan_visits(batch.visits, limits, prompt_lens=batch.prompt_lens, shape=SHAPE)


def part_plan(batch: Batch, rows: list[int], max_token_len: int) -> Plan:
    """The micro-batches of one rank's rows."""
    at = np.sort(np.array(rows, np.int64))
    shared = np.zeros(len(at), np.int64)
    if len(at) > 1:
        shared[1:] = np.minimum.reduceat(batch.visits.shared[: at[-1] + 1], at[:-1] + 1)
    visits = RowOrder(np.arange(len(at)), shared, batch.visits.lens[at])
    return plan_visits(visits, Limits(max_token_len=max_token_len), prompt_lens=batch.prompt_lens[at], shape=SHAPE)


def median(runs: list[Result]) -> Result:
    """The median of every figure, and the worst level."""
    first = runs[0]
    figures = {
        field: float(np.median([getattr(run, field) for run in runs]))
        for field in ("makespan", "level", "saving_kept", "seconds")
    }
    worst = max(run.worst for run in runs)
    return Result(first.batch, first.ranks, first.rows, first.policy, worst=worst, **figures)


# --- planning time


def planning_times(repeats: int, max_token_len: int) -> list[dict[str, float]]:
    """Seconds to order token ids and to plan, median of `repeats`; 1,024 rows of 8K tokens first, then ever more rows.

    The share is of a step of Qwen3-8B-like cost on the ranks, at RANK_FLOPS each.
    """
    times = []
    for num_rows, prompt_len, response_len, num_ranks in [
        *((1024, 6144, 2048, num_ranks) for num_ranks in (8, 16, 32, 64)),
        *((num_rows, 192, 64, 64) for num_rows in (1024, 4096, 16_384, 65_536)),
    ]:
        rows = [
            np.concatenate([prompt, answer])
            for seed in range(num_rows // 16)
            for prompt, answers in [draw_tokens(seed, prompt_len, response_len)]
            for answer in answers
        ]
        before = np.full(num_rows, prompt_len)
        limits = Limits(max_token_len=max_token_len, num_ranks=num_ranks)
        runs = []
        for _ in range(repeats):
            started = time.process_time()
            visits = order_rows(rows)
            ordered = time.process_time()
            plan = plan_visits(visits, limits, prompt_lens=before, shape=SHAPE)
            runs.append((ordered - started, time.process_time() - ordered))
        order_seconds, plan_seconds = np.median(runs, axis=0).tolist()
        times.append(
            {
                "rows": num_rows,
                "tokens_per_row": prompt_len + response_len,
                "ranks": num_ranks,
                "order_seconds": order_seconds,
                "plan_seconds": plan_seconds,
                "microseconds_per_row": 1e6 * (order_seconds + plan_seconds) / num_rows,
                "share_of_step": (order_seconds + plan_seconds) * RANK_FLOPS / plan.makespan,
                "level": plan.makespan / plan.ideal,
            }
        )
        print(f"planned {num_rows} rows", flush=True)
    return times


def draw_tokens(seed: int, prompt_len: int, response_len: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """One prompt and 16 answers of lengths around `response_len`."""
    rng = np.random.default_rng(seed)
    lens = rng.integers(response_len // 2, 3 * response_len // 2, 16)
    return rng.integers(0, 151_936, prompt_len), [rng.integers(0, 151_936, n) for n in lens]


# --- output


def text_of(result: Result) -> str:
    """One line."""
    return (
        f"{result.batch:12}{result.ranks:6}{result.policy:>13}{result.makespan:9.3f}{result.level:8.3f}"
        f"{100 * result.saving_kept:8.1f}%{1000 * result.seconds:9.1f} ms"
    )


def markdown(results: list[Result]) -> list[str]:
    """One line for a batch and a number of ranks: makespan and saving of every policy."""
    names = list(POLICIES)
    head = " | ".join(
        ["batch", "ranks", "rows", *(f"{name}: makespan, saving" for name in names), "level", "worst", "planning"]
    )
    lines = [f"| {head} |", "|---" * (len(names) + 6) + "|"]
    for at in range(0, len(results), len(names)):
        runs = results[at : at + len(names)]
        cells = [f"{run.makespan:.2f}, {100 * max(run.saving_kept, 0.0):.0f} %" for run in runs]
        ours = runs[-1]
        first = [ours.batch.replace("_", " "), f"{ours.ranks:,}", f"{ours.rows:,}"]
        levels = [f"{ours.level:.3f}", f"{ours.worst:.3f}", f"{1000 * ours.seconds:.0f} ms"]
        lines.append(f"| {' | '.join([*first, *cells, *levels])} |")
    return lines


def markdown_times(times: list[dict[str, float]]) -> list[str]:
    """The planning times."""
    lines = ["| rows | tokens of a row | ranks | order | plan | per row | of a step |", "|---|---|---|---|---|---|---|"]
    for entry in times:
        share = f"{100 * entry['share_of_step']:.2f} %" if entry["tokens_per_row"] > 1024 else "-"
        lines.append(
            f"| {entry['rows']:,} | {entry['tokens_per_row']:,} | {entry['ranks']} "
            f"| {1000 * entry['order_seconds']:.0f} ms | {1000 * entry['plan_seconds']:.0f} ms "
            f"| {entry['microseconds_per_row']:.0f} us | {share} |"
        )
    return lines


def draw(results: list[Result], path: Path) -> None:
    """Makespan (top) and saving kept (bottom) over ranks, one column a batch."""
    import matplotlib

    matplotlib.use("svg" if path.suffix == ".svg" else "agg")
    import matplotlib.pyplot as plt

    names = list(BATCHES)
    figure, axes = plt.subplots(
        2, len(names), figsize=(3 * len(names), 5), sharex=True, squeeze=False, layout="constrained"
    )
    for column, name in enumerate(names):
        for policy in POLICIES:
            runs = [result for result in results if (result.batch, result.policy) == (name, policy)]
            style = {"marker": "o", "markersize": 3, "linewidth": 2 if policy == "planner" else 1}
            ranks = [run.ranks for run in runs]
            axes[0, column].plot(ranks, [run.makespan for run in runs], label=policy.replace("_", " "), **style)
            axes[1, column].plot(ranks, [100 * run.saving_kept for run in runs], **style)
        axes[0, column].set_title(name.replace("_", " "))
        axes[0, column].set_ylim(0.95, 3.0)
        axes[0, column].set_xscale("log", base=2)
        axes[1, column].set_ylim(-5, 105)
        axes[1, column].set_xlabel("ranks")
    axes[0, 0].set_ylabel("makespan / bound")
    axes[1, 0].set_ylabel("saving kept, %")
    axes[0, 0].legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def origin() -> dict[str, object]:
    """Where and how this was measured."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "commit": git.stdout.strip() if git.returncode == 0 else "unknown",
        "command": " ".join(["python", *sys.argv]),
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
    }


if __name__ == "__main__":
    cyclopts.run(bench)
