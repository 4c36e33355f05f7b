"""The report of a run: one HTML file that needs nothing else, and the reward curve as a picture.

write_report(RunFolder.open("runs/tiny"))     works while the run goes, and after it
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from arctic_platform.errors import ArcticError
from arctic_platform.rl.charts import Series, line_chart, moving_average, stacked_bar
from arctic_platform.rl.fetch import resolve_model
from arctic_platform.rl.recipe import Recipe
from arctic_platform.rl.records import Answer, BatchRecord, Evaluation, Restart, RolloutRecord, StepRecord, Summary
from arctic_platform.rl.run_folder import RunFolder
from arctic_platform.rl.tasks import load_tokenizer

REWARD, ACCURACY, OTHER = "var(--reward)", "var(--accuracy)", "var(--other)"
PHASE_COLOURS = ("#3b6fd4", "#e08a2c", "#2f9e77", "#a05cc0", "#c9475a", "#7a8794", "#b8a125")
AVERAGED_STEPS = 5
NUM_ANSWERS_SHOWN = 12
MAX_ROWS_DRAWN = 128
RECEIPT_COLUMNS = {
    "logprob_max_abs": "worst log-prob",
    "gradient_rel": "gradients",
    "worst_parameter_rel": "worst parameter",
    "num_rows": "rows",
    "tokens_shared": "tokens shared",
    "tokens_alone": "alone",
    "seconds": "seconds",
}
NO_LOSS = 1e-6


@dataclass(frozen=True)
class RunData:
    """All that the report is made of."""

    recipe: Recipe
    steps: list[StepRecord]
    evaluations: list[Evaluation]
    first: BatchRecord | None
    last: BatchRecord | None
    summary: Summary | None
    restarts: list[Restart]

    @classmethod
    def read(cls, run: RunFolder) -> RunData:
        """Read a run's folder."""
        return cls(
            recipe=run.recipe(),
            steps=run.steps(),
            evaluations=run.evaluations(),
            first=run.batch("first"),
            last=run.batch("last"),
            summary=run.summary(),
            restarts=run.restarts(),
        )


def write_report(run: RunFolder) -> Path:
    """Write `report.html`, and `reward_curve.png` where matplotlib is installed; returns the path of the former."""
    data = RunData.read(run)
    path = run.path / "report.html"
    path.write_text(render(data), encoding="utf-8")
    _write_curve(data, run.path / "reward_curve.png")
    return path


def render(data: RunData) -> str:
    """The page as a string."""
    sections: list[tuple[str, Callable[[RunData], str]]] = [
        ("Reward and accuracy", _rewards),
        ("Answers before and after", _answers),
        ("Rollouts of the first and the last step", _rollouts),
        ("The forest of one batch", _forest),
        ("Sharing on and off", _side_by_side),
        ("Where the time went", _time),
        ("Exactness", _exactness),
        ("Training", _training),
        ("Settings", _settings),
    ]
    body = "".join(f"<section><h2>{title}</h2>{write(data)}</section>" for title, write in sections)
    title = _text(data.recipe.name)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head><body><main>{_header(data)}{body}</main></body></html>"
    )


def _header(data: RunData) -> str:
    recipe, done = data.recipe, data.steps[-1].step if data.steps else 0
    state = "complete" if data.summary else f"{done} of {recipe.num_steps} steps so far"
    line = (
        f"{recipe.model} on {recipe.task.name}, {recipe.loss.loss}, {done} steps of {_rows_per_step(recipe)}; {state}"
    )
    tiles = "".join(_tile(*tile) for tile in _tiles(data))
    head = f'<h1>{_text(recipe.name)}</h1><p class="muted">{_text(line)}</p>'
    return f'<header>{head}<div class="tiles">{tiles}</div></header>'


def _rows_per_step(recipe: Recipe) -> str:
    return f"{recipe.prompts_per_step} prompts x {recipe.rollouts_per_prompt} rollouts"


def _tiles(data: RunData) -> Iterable[tuple[str, str, str]]:
    """(value, what it is, detail) of the numbers that matter most."""
    if data.evaluations:
        before, after = data.evaluations[0], data.evaluations[-1]
        detail = f"greedy, {len(after.answers)} held-out questions, step {before.step} and step {after.step}"
        yield f"{before.accuracy:.0%} &rarr; {after.accuracy:.0%}", "accuracy", detail
    if data.steps:
        rewards = [record.reward for record in data.steps]
        start, end = _mean(rewards[:AVERAGED_STEPS]), _mean(rewards[-AVERAGED_STEPS:])
        yield f"{start:.2f} &rarr; {end:.2f}", "reward", f"mean of the first and the last {AVERAGED_STEPS} steps"
        computed, naive = (sum(getattr(r, name) for r in data.steps) for name in ("tokens_computed", "tokens_naive"))
        yield f"{naive / max(computed, 1):.1f}&times;", "fewer tokens", f"{computed:,} computed, {naive:,} row by row"
    if data.summary and data.summary.side_by_side:
        ratio = data.summary.side_by_side["train_ratio"]
        yield f"{ratio:.1f}&times;", "faster training pass", "sharing on against off, in this run"


def _tile(value: str, name: str, detail: str) -> str:
    return f'<div class="tile"><b>{value}</b><span>{_text(name)}</span><small>{_text(detail)}</small></div>'


def _rewards(data: RunData) -> str:
    steps = [record.step for record in data.steps]
    rewards = [record.reward for record in data.steps]
    average = moving_average(rewards, AVERAGED_STEPS)
    accuracy = [(evaluation.step, evaluation.accuracy) for evaluation in data.evaluations]
    chart = line_chart(
        [
            Series("reward per step", list(zip(steps, rewards, strict=True)), REWARD, "faint"),
            Series(f"mean of {AVERAGED_STEPS} steps", list(zip(steps, average, strict=True)), REWARD),
            Series("greedy accuracy, held out", accuracy, ACCURACY, "dots"),
        ],
        label="reward and accuracy over steps",
        y_range=(0.0, 1.0),
        percent=True,
    )
    return f"<figure>{chart}</figure>"


def _answers(data: RunData) -> str:
    if len(data.evaluations) < 2:
        return _muted("Shown once the run has been evaluated twice.")
    before, after = data.evaluations[0], data.evaluations[-1]
    pairs = list(zip(before.answers, after.answers, strict=True))
    learned = sum(b.is_right < a.is_right for b, a in pairs)
    lost = sum(b.is_right > a.is_right for b, a in pairs)
    shown = sorted(pairs, key=lambda pair: (pair[0].is_right - pair[1].is_right, pair[1].is_right))[:NUM_ANSWERS_SHOWN]
    rows = [[_text(b.question), f"<code>{_text(b.reference)}</code>", _verdict(b), _verdict(a)] for b, a in shown]
    intro = f"<p>{learned} of {len(pairs)} questions went from wrong to right, {lost} from right to wrong."
    table = _table(["question", "answer", f"step {before.step}", f"step {after.step}"], rows)
    return f"{intro} The first {len(rows)}, changed ones in front:</p>{table}"


def _verdict(answer: Answer) -> str:
    return _marked(answer.given.split("\n")[0] or "(nothing)", answer.is_right)


def _marked(text: str, is_right: bool) -> str:
    mark, kind = ("&#10003;", "right") if is_right else ("&#10007;", "wrong")
    return f'<span class="{kind}">{mark}</span> <code>{_text(text)}</code>'


def _rollouts(data: RunData) -> str:
    if data.first is None or data.last is None:
        return _muted("Shown after the first step.")
    return f'<div class="columns">{_group(data.first)}{_group(data.last)}</div>'


def _group(batch: BatchRecord) -> str:
    """The rollouts of the prompt of a batch whose rewards differ most."""
    by_prompt = [[one for one in batch.rollouts if one.prompt_index == index] for index in range(len(batch.prompts))]
    index = max(range(len(by_prompt)), key=lambda index: _spread([one.reward for one in by_prompt[index]]))
    rows = [[_rollout_text(one), f"{one.reward:.2f}", f"{one.advantage:+.2f}"] for one in by_prompt[index]]
    question = f"<p>{_text(batch.questions[index])} <code>{_text(batch.references[index])}</code></p>"
    return f"<div><h3>Step {batch.step}</h3>{question}{_table(['rollout', 'reward', 'advantage'], rows)}</div>"


def _rollout_text(rollout: RolloutRecord) -> str:
    shown = rollout.text.strip(" ").replace("\n", "\\n")
    return _marked(shown or "(nothing)", rollout.reward == 1.0)


def _spread(values: Sequence[float]) -> float:
    mean = _mean(values)
    return sum((value - mean) ** 2 for value in values)


def _forest(data: RunData) -> str:
    if data.last is None:
        return _muted("Shown after the first step.")
    try:
        from arctic_platform.forest import build_forest
        from arctic_platform.forest.picture import draw_svg, draw_text
    except ModuleNotFoundError as error:
        return _muted(f"Drawn where {error.name} is installed: pip install 'zorro-rl[torch]', then arctic-rl report.")
    forest = build_forest(data.last.rows[:MAX_ROWS_DRAWN])
    decode = _decoder(data.recipe)
    caption = (
        f"Step {data.last.step}: {forest.num_rows} rows of {forest.num_row_tokens:,} tokens in all; "
        f"<b>{forest.num_tokens:,} are computed</b>. Depth runs to the right (block width: square root of its tokens), "
        "rows run down. A block is one segment: as high as the rows that share it, and computed once."
    )
    tree = f"<details><summary>The same as a tree</summary><pre>{_text(draw_text(forest, decode))}</pre></details>"
    return f"<figure>{draw_svg(forest, decode)}<figcaption>{caption}</figcaption></figure>{tree}"


def _decoder(recipe: Recipe) -> Callable[[Sequence[int]], str] | None:
    """Token ids to text, where the tokenizer is still at hand."""
    try:
        tokenizer = load_tokenizer(resolve_model(recipe.model))
    except ArcticError:
        return None
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False)


def _side_by_side(data: RunData) -> str:
    numbers = data.summary.side_by_side if data.summary else None
    if not numbers:
        return _muted("Measured at the end of a run whose side_by_side_repeats is above 0.")
    rows = [
        [
            name,
            f"{numbers[f'{kind}_seconds_on']:.3f} s",
            f"{numbers[f'{kind}_seconds_off']:.3f} s",
            f"<b>{numbers[f'{kind}_ratio']:.2f}&times;</b>",
            f"{numbers[f'{kind}_tokens_on']:,.0f}",
            f"{numbers[f'{kind}_tokens_off']:,.0f}",
        ]
        for name, kind in (("training pass (forward and backward)", "train"), ("sampling phase", "sample"))
    ]
    intro = (
        f"<p>The last step's rows, {numbers['repeats']:.0f} interleaved pairs on the same weights, medians. "
        "Off computes every row in full: training as padded micro-batches in the model's own attention, sampling with "
        "the same kernels and nothing shared.</p>"
    )
    table = _table(["", "sharing on", "sharing off", "speed-up", "tokens on", "tokens off"], rows)
    return intro + table


def _time(data: RunData) -> str:
    totals: dict[str, float] = {}
    for record in data.steps:
        for name, seconds in record.seconds.items():
            totals[name] = totals.get(name, 0.0) + seconds
    totals["evaluate"] = sum(evaluation.seconds for evaluation in data.evaluations)
    if not data.steps:
        return _muted("Shown after the first step.")
    all_seconds = sum(totals.values())
    ordered = sorted(totals.items(), key=lambda item: -item[1])
    parts = [(name, seconds, PHASE_COLOURS[i % len(PHASE_COLOURS)]) for i, (name, seconds) in enumerate(ordered)]
    rows = [
        [
            f'<span class="swatch" style="background:{colour}"></span>{_text(name)}',
            f"{seconds:.1f} s",
            f"{seconds / all_seconds:.0%}",
            "" if name == "evaluate" else f"{seconds / len(data.steps):.2f} s",
        ]
        for name, seconds, colour in parts
    ]
    return stacked_bar(parts) + _table(["phase", "all steps", "share", "per step"], rows)


def _exactness(data: RunData) -> str:
    if not data.steps:
        return _muted("Shown after the first step.")
    worst = max(record.sampler_diff_max for record in data.steps)
    mean = _mean([record.sampler_diff_mean for record in data.steps])
    sampler = (
        f"<p>Sampler against trainer, log-probs of all sampled tokens: <b>{worst:.1e}</b> nats at most, {mean:.1e} on "
        "average. Both run the same attention over the same forest.</p>"
    )
    receipts = [record for record in data.steps if record.receipt]
    if not receipts:
        return sampler + _muted("No receipt was taken: set client.zorro_train.receipt_every to have them.")
    rows = [
        [
            f"step&nbsp;{record.step}",
            *(f"{(record.receipt or {}).get(name, float('nan')):.3g}" for name in RECEIPT_COLUMNS),
        ]
        for record in receipts
    ]
    intro = (
        "<p>A receipt computes some rows of the batch twice, shared and one by one, and compares their log-probs "
        "(absolute difference, nats) and the gradients of all parameters (relative).</p>"
    )
    return sampler + intro + _table(["", *RECEIPT_COLUMNS.values()], rows)


def _training(data: RunData) -> str:
    charts: list[tuple[str, Callable[[StepRecord], float | None]]] = [
        ("loss", lambda record: record.loss),
        ("KL to the reference", lambda record: record.kl),
        ("entropy", lambda record: record.entropy),
        ("gradient norm", lambda record: record.grad_norm),
        ("groups without a signal", lambda record: record.num_flat_groups),
        ("seconds", lambda record: sum(record.seconds.values())),
    ]
    has_loss = any(abs(record.loss) > NO_LOSS for record in data.steps)
    body = "".join(_small_chart(title, value, data.steps) for title, value in charts[0 if has_loss else 1 :])
    note = (
        ""
        if has_loss or not data.steps
        else _muted(
            "The loss is zero by construction: one update per batch, and the advantages of a group add up to nothing. "
            "Only its gradient carries the signal."
        )
    )
    if not body:
        return _muted("Shown after the first step.")
    return f'<p>{_trainers(data.steps)}</p><div class="columns">{body}</div>{note}{_restarts(data)}'


def _trainers(steps: Sequence[StepRecord]) -> str:
    """Which engine trained which steps; a run may go on with another one."""
    runs = [(name, [record.step for record in some]) for name, some in groupby(steps, lambda record: record.trainer)]
    if len(runs) == 1:
        return f"Trained by {_text(runs[0][0])}."
    return f"Steps {', '.join(f'{some[0]} to {some[-1]} by {_text(name)}' for name, some in runs)}."


def _restarts(data: RunData) -> str:
    """Nothing for a run that nothing befell."""
    if not data.restarts:
        return ""
    rows = [[str(one.lost_step), str(one.from_step), _text(one.error)] for one in data.restarts]
    return "<h3>Restarts</h3>" + _table(["step that was lost", "went on after step", "why"], rows)


def _small_chart(title: str, value: Callable[[StepRecord], float | None], steps: Sequence[StepRecord]) -> str:
    points = [(record.step, number) for record in steps if (number := value(record)) is not None]
    if not points:
        return ""
    chart = line_chart([Series(title, points, OTHER)], label=f"{title} over steps", width=420, height=170)
    return f"<figure><h3>{title}</h3>{chart}</figure>"


def _settings(data: RunData) -> str:
    return f"<details><summary>config.yaml</summary><pre>{_text(data.recipe.to_yaml())}</pre></details>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of cells that are HTML already."""
    header = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table></div>'


def _text(value: object) -> str:
    return html.escape(str(value))


def _muted(text: str) -> str:
    return f'<p class="muted">{_text(text)}</p>'


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(len(values), 1)


def _write_curve(data: RunData, path: Path) -> None:
    """Reward and accuracy as a PNG; nothing is written without matplotlib or before the first step."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return
    if not data.steps:
        return
    figure = Figure(figsize=(8, 4), dpi=150, layout="constrained")
    axes = figure.subplots()
    steps = [record.step for record in data.steps]
    rewards = [record.reward for record in data.steps]
    axes.plot(steps, rewards, color="#3b6fd4", alpha=0.35, linewidth=1, label="reward per step")
    axes.plot(steps, moving_average(rewards, AVERAGED_STEPS), color="#3b6fd4", label=f"mean of {AVERAGED_STEPS} steps")
    points = [(evaluation.step, evaluation.accuracy) for evaluation in data.evaluations]
    axes.plot(*zip(*points, strict=True), "o-", color="#e08a2c", label="greedy accuracy, held out")
    axes.set(ylim=(0, 1), xlabel="step", title=f"{data.recipe.name}: {data.recipe.model} on {data.recipe.task.name}")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)


STYLE = """
:root {
  color-scheme: light dark;
  --page: #ffffff; --card: #f5f7fa; --ink: #1b2430; --muted: #5c6b7a; --line: #dde3ea;
  --reward: #3b6fd4; --accuracy: #d9771a; --other: #2f8f6d; --right: #1f8a5b; --wrong: #c23b4e;
  --forest-block: #3b6fd4; --forest-ink: #ffffff; --forest-page: #ffffff;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #12161c; --card: #1b212a; --ink: #e6ebf1; --muted: #93a1b0; --line: #2c3541;
    --reward: #7ba4f7; --accuracy: #f0a255; --other: #5cc9a0; --right: #58c98f; --wrong: #f07b8b;
    --forest-block: #5b8df0; --forest-ink: #ffffff; --forest-page: #12161c;
  }
}
* { box-sizing: border-box }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.55 system-ui, -apple-system, sans-serif }
main { max-width: 940px; margin: 0 auto; padding: 40px 24px 80px }
h1 { margin: 0; font-size: 30px; letter-spacing: -0.01em }
h2 { margin: 52px 0 14px; font-size: 20px; letter-spacing: -0.005em }
h3 { margin: 0 0 6px; font-size: 15px }
p { margin: 8px 0 }
.muted, figcaption, small { color: var(--muted) }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); gap: 12px; margin-top: 22px }
.tile { background: var(--card); border-radius: 12px; padding: 16px 18px; display: flex; flex-direction: column }
.tile b { font-size: 25px; letter-spacing: -0.02em; white-space: nowrap; font-variant-numeric: tabular-nums }
.tile span { font-weight: 600; font-size: 14px }
.tile small { font-size: 12.5px; line-height: 1.4; margin-top: 4px }
figure { margin: 0 }
figcaption { margin-top: 10px; font-size: 14px }
figcaption b { color: var(--ink) }
svg.chart { display: block; width: 100%; height: auto }
svg.bar { display: block; width: 100%; height: 26px; border-radius: 6px; margin-bottom: 12px }
.grid { stroke: var(--line); stroke-width: 1 }
.tick { fill: var(--muted); font: 12px system-ui, sans-serif }
.dot { stroke: var(--page); stroke-width: 1.5 }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 6px 22px; margin: 8px 0 0; padding: 0 }
.legend { font-size: 14px }
.swatch { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 8px }
.scroll { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums }
th { text-align: left; color: var(--muted); font-weight: 600 }
th, td { padding: 7px 16px 7px 0; border-bottom: 1px solid var(--line); vertical-align: top }
th { white-space: nowrap }
tbody tr:last-child td { border-bottom: 0 }
code, pre { font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, monospace }
pre { background: var(--card); border-radius: 10px; padding: 14px 16px; overflow-x: auto; margin: 10px 0 0 }
details summary { cursor: pointer; color: var(--muted); font-size: 14px; margin-top: 10px }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(360px, 1fr)); gap: 24px 32px }
.right { color: var(--right); font-weight: 700 } .wrong { color: var(--wrong); font-weight: 700 }
@media (max-width: 480px) { .columns { grid-template-columns: 1fr } }
"""
