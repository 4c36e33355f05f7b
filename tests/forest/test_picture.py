"""A picture shows every segment once, as high as its rows, and never needs torch."""

import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from arctic_platform.forest.picture import count_segment_rows, draw_svg, draw_text
from arctic_platform.forest.trie import build_forest

ROWS = [[1, 1, 1, 2, 2, 5], [1, 1, 1, 2, 2, 6, 6], [1, 1, 1, 3, 7, 7], [1, 1, 1, 2, 2, 6, 8], [9]]
SVG = "{http://www.w3.org/2000/svg}"


def test_text_shows_the_tree_with_tokens_and_rows():
    lines = draw_text(build_forest(ROWS)).splitlines()
    assert lines[0] == "5 rows, 27 tokens; 13 computed"
    assert lines[1:] == [
        "3 tokens, 4 rows  1 1 1",
        "|- 2 tokens, 3 rows  2 2",
        "|  |- 1 token, 1 row  5",
        "|  `- 1 token, 2 rows  6",
        "|     |- 1 token, 1 row  6",
        "|     `- 1 token, 1 row  8",
        "`- 3 tokens, 1 row  3 7 7",
        "1 token, 1 row  9",
    ]


def test_text_decodes_and_shortens_the_content():
    text = draw_text(build_forest([[1] * 100]), decode=lambda ids: "word " * len(ids), max_chars=20)
    assert text.splitlines()[1] == "100 tokens, 1 row  'word word word w..."


def test_text_counts_the_lines_it_leaves_out():
    text = draw_text(build_forest([[b, b] for b in range(50)]), max_lines=10)
    assert text.splitlines()[-1] == "... 41 more segments"


@pytest.mark.parametrize("rows", [ROWS, [[4, 4]], [[1, 2], [1, 2], [1]], [[3, 1, 2]] * 7])
def test_row_counts_are_those_of_the_forest(rows):
    forest = build_forest(rows)
    expected = [len(forest.segment_rows(n)) for n in range(forest.num_segments)]
    assert count_segment_rows(forest).tolist() == expected


def test_svg_is_well_formed_and_draws_each_segment_once():
    forest = build_forest(ROWS)
    root = ElementTree.fromstring(draw_svg(forest, decode=lambda ids: f"<&>{ids}"))
    assert len(root.findall(f".//{SVG}rect")) == forest.num_segments


def test_svg_blocks_of_one_depth_never_overlap():
    rng = np.random.default_rng(0)
    forest = build_forest([rng.integers(0, 3, size=rng.integers(1, 9)) for _ in range(40)])
    root = ElementTree.fromstring(draw_svg(forest))
    boxes = [
        [float(rect.get(name, "nan")) for name in ("x", "y", "width", "height")] for rect in root.iter(f"{SVG}rect")
    ]
    for i, (x1, y1, w1, h1) in enumerate(boxes):
        for x2, y2, w2, h2 in boxes[i + 1 :]:
            assert min(x1 + w1, x2 + w2) - max(x1, x2) < 0.3 or min(y1 + h1, y2 + h2) - max(y1, y2) < 0.3


def test_an_empty_forest_is_drawn():
    forest = build_forest([])
    assert draw_text(forest) == "0 rows, 0 tokens; 0 computed"
    assert ElementTree.fromstring(draw_svg(forest)).tag == f"{SVG}svg"


def test_the_drawing_itself_needs_only_numpy():
    code = (
        "import sys, types, pathlib\n"
        "import arctic_platform\n"
        "package = types.ModuleType('arctic_platform.forest')\n"
        "package.__path__ = [str(pathlib.Path(arctic_platform.__file__).parent / 'forest')]\n"
        "sys.modules['arctic_platform.forest'] = package\n"
        "import arctic_platform.forest.picture\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
