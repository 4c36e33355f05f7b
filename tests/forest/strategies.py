"""Random batches of rows that share a lot, for property tests."""

import numpy as np
from hypothesis import strategies as st

token = st.integers(0, 3)
"""Few distinct ids, pad id 0 among them, so that rows collide, nest and repeat."""

row = st.lists(token, max_size=9)


@st.composite
def batches(draw: st.DrawFn, min_size: int = 1) -> list[np.ndarray]:
    """1 to 8 rows: fresh ones, exact duplicates, extensions of earlier rows, and cuts of them, shuffled."""
    rows: list[list[int]] = [draw(row)]
    for _ in range(draw(st.integers(max(0, min_size - 1), 7))):
        kind = draw(st.sampled_from(["fresh", "copy", "extend", "cut", "fork"]))
        base = draw(st.sampled_from(rows))
        at = draw(st.integers(0, len(base)))
        tail = draw(row)
        grown = {"fresh": tail, "copy": base, "extend": base + tail, "cut": base[:at], "fork": base[:at] + tail}
        rows.append(list(grown[kind]))
    return [np.array(r, dtype=np.int64) for r in draw(st.permutations(rows))]
