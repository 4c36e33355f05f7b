"""The report needs nothing but itself, and shows what the run wrote down."""

import asyncio
import dataclasses
import html.parser
import io
import re
import struct
from pathlib import Path

import pytest
from rich.console import Console

from arctic_platform.errors import InputError
from arctic_platform.rl.charts import Series, line_chart, moving_average, stacked_bar
from arctic_platform.rl.loop import train
from arctic_platform.rl.progress import PlainView
from arctic_platform.rl.recipe import load_recipe
from arctic_platform.rl.report import RunData, render, write_report
from arctic_platform.rl.run_folder import RunFolder

VOID = {"meta", "link", "br", "img"}
SECTIONS = [
    "Reward and accuracy",
    "Answers before and after",
    "Rollouts of the first and the last step",
    "The forest of one batch",
    "Sharing on and off",
    "Where the time went",
    "Exactness",
    "Training",
    "Settings",
]


class Page(html.parser.HTMLParser):
    """Checks that tags are closed in order, and collects what a browser would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "data", "srcset")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def finished(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    replace = {"model": str(tiny_model_folder), "output_dir": str(tmp_path_factory.mktemp("runs"))}
    overrides = ["num_steps=3", "eval.num_questions=8", "eval.every=2", "prompts_per_step=4"]
    recipe = load_recipe("recipes/tiny.yaml", overrides=overrides, replace=replace)
    return asyncio.run(train(recipe, PlainView(Console(file=io.StringIO())))).run


def test_the_page_is_whole_and_loads_nothing(finished):
    text = write_report(finished).read_text()
    page = Page(text)
    assert page.open == []
    assert page.loads == []
    assert not re.search(r"@import|url\(|<script", text)


def test_every_section_has_its_content(finished):
    text = render(RunData.read(finished))
    for title in SECTIONS:
        assert f"<h2>{title}</h2>" in text
    assert 'class="muted">Shown' not in text
    for piece in (
        "are computed",
        "sharing off",
        "worst log-prob",
        "fwd_bwd",
        "num_steps: 3",
    ):
        assert piece in text


def test_numbers_on_the_page_are_those_of_the_run(finished):
    text = render(RunData.read(finished))
    before, after = finished.evaluations()[0].accuracy, finished.evaluations()[-1].accuracy
    assert f"{before:.0%} &rarr; {after:.0%}" in text
    assert f"{finished.summary().side_by_side['train_ratio']:.2f}&times;" in text
    computed = sum(record.tokens_computed for record in finished.steps())
    assert f"{computed:,} computed" in text


def test_the_page_says_what_trained_which_steps(finished):
    data = RunData.read(finished)
    first, *others = data.steps
    moved = [first, *(dataclasses.replace(record, trainer="fsdp on 2 ranks") for record in others)]
    assert "Trained by torch." in render(data)
    assert "Steps 1 to 1 by torch, 2 to 3 by fsdp on 2 ranks." in render(dataclasses.replace(data, steps=moved))


def test_text_of_a_model_cannot_break_the_page(finished):
    data = RunData.read(finished)
    for evaluation in data.evaluations:
        object.__setattr__(evaluation.answers[0], "given", "</code><script>alert(1)</script>")
    text = render(data)
    assert "<script" not in text
    assert Page(text).open == []


@pytest.mark.parametrize("missing", ["metrics.jsonl", "evaluations.jsonl", "rollouts_last.json", "summary.json"])
def test_a_run_that_has_just_begun_has_a_report_too(finished, tmp_path, missing):
    copy = RunFolder(tmp_path / "run")
    copy.path.mkdir()
    for file in finished.path.iterdir():
        if file.is_file() and file.name != missing:
            (copy.path / file.name).write_bytes(file.read_bytes())
    assert Page(write_report(copy).read_text()).open == []


def test_the_reward_curve_is_a_png(finished):
    write_report(finished)
    data = (finished.path / "reward_curve.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width > 800
    assert height > 400


def test_a_folder_that_is_no_run_says_so(tmp_path):
    with pytest.raises(InputError, match=r"is not a run: it holds no config\.yaml"):
        RunFolder.open(tmp_path)


def test_a_chart_of_one_point_or_equal_values_is_drawn():
    for points in ([(1, 0.0)], [(1, 2.0), (2, 2.0)], [(0, -1e-9), (5, 1e-9)]):
        text = line_chart([Series("x", points, "red")], label="x")
        assert Page(text).open == []
        assert not re.search(r'["> ,](nan|inf)', text)
    assert "Nothing was recorded" in line_chart([Series("x", [], "red")], label="x")


def test_a_bar_is_as_wide_as_its_shares():
    widths = [
        float(width)
        for width in re.findall(
            r'<rect x="[\d.]+" y="0" width="([\d.]+)"',
            stacked_bar([("a", 3.0, "red"), ("b", 1.0, "blue"), ("c", 0.0, "green")]),
        )
    ]
    assert widths == [645.0, 215.0, 0.0]


def test_the_moving_average_starts_with_what_there_is():
    assert moving_average([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]
