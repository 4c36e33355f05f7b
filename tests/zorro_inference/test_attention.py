import numpy as np
import pytest
import torch

from arctic_platform.forest import native, plain_attention
from arctic_platform.rl.zorro_inference import plan as plan_module
from arctic_platform.rl.zorro_inference.attention import DecodePlan, Readers
from arctic_platform.rl.zorro_inference.cache import KvForest
from arctic_platform.rl.zorro_inference.plan import lay_out
from arctic_platform.rl.zorro_inference.pool import KvPool
from arctic_platform.rl.zorro_inference.suffix import SuffixCache
from tests.zorro_inference.models import forest_prompts

K, G, D = 2, 3, 32
CPU = torch.device("cpu")


class Scene:
    """Rollouts in the middle of decoding, with random keys and values, and the rows that they stand for."""

    def __init__(
        self,
        dtype: torch.dtype,
        *,
        n: int = 2,
        value_dim: int = D,
        share: bool = True,
        prompts: list[list[int]] | None = None,
    ) -> None:
        self.random = torch.Generator().manual_seed(0)
        self.dtype, self.dims = dtype, (D, value_dim)
        pool = KvPool(10_000)
        forest = KvForest(pool)
        rows = [np.array(prompt) for prompt in prompts or forest_prompts() for _ in range(n)]
        held = [forest.hold(row, limit=10_000, is_private=not share) for row in rows]
        self.prompt_kv = tuple(self.randn(1, K, forest.num_tokens, dim) for dim in self.dims)
        pool.store(0, *self.prompt_kv, torch.arange(forest.num_tokens))
        self.paths = [path for i, path in enumerate(held) if i % 3 != 1]
        self.rows = [f"row {i}" for i in np.random.default_rng(0).permutation(len(self.paths))]
        self.own = [[] for _ in self.rows]
        self.pool, self.suffix = pool, SuffixCache()
        self.suffix.add(sorted(self.rows))
        for path in held:
            for segment in path.path():
                segment.is_ready = True
            forest.release(path)

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random, dtype=torch.float64).to(self.dtype)

    def step(self, *, is_uneven: bool = False, kernel: str = "flash", **rule) -> tuple[torch.Tensor, torch.Tensor]:
        """One step of all: `(ours, reference)`, both `[H, R, Dv]`; uneven: odd rows pretend to have just joined."""
        if is_uneven:
            for i in range(1, len(self.rows), 2):
                self.own[i].clear()
                self.suffix.remove(self.rows[i])
                self.suffix.add([self.rows[i]])
        num_rows = len(self.rows)
        q, k, v = self.randn(1, K * G, num_rows, D), *(self.randn(1, K, num_rows, dim) for dim in self.dims)
        self.suffix.make_room()
        self.readers = readers = Readers(lay_out(self.paths), self.rows, self.suffix, self.pool, CPU)
        plan = DecodePlan(readers, kernel)
        ours = plan.attend(0, q, k, v, scale=0.2, **rule)[0]
        plan.commit()
        numbers = [self.rows.index(row) for row in readers.order]
        for at, i in enumerate(numbers):
            self.own[i].append((k[0, :, at], v[0, :, at]))
        return ours, torch.stack([self._alone(i, q[:, :, at : at + 1], **rule) for at, i in enumerate(numbers)], 1)

    def _alone(self, i: int, q, *, sliding_window=None, softcap=None, sinks=None) -> torch.Tensor:
        places = np.concatenate([np.arange(*segment.span) for segment in self.paths[i].path()])
        rows = [
            torch.cat([x[:, :, places], torch.stack([own[part] for own in self.own[i]], 1)[None]], 2)
            for part, x in enumerate(self.prompt_kv)
        ]
        distance = torch.arange(rows[0].shape[2]).flip(0)[None]
        visible = distance < (sliding_window or distance.numel())
        return plain_attention(q, *rows, visible, scale=0.2, softcap=softcap, sinks=sinks)[0, :, 0]


RULES = {
    "plain": {},
    "window": {"sliding_window": 7},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": torch.linspace(-2, 2, K * G, dtype=torch.float64), "sliding_window": 2},
    "uneven": {},
}


@pytest.mark.parametrize("kernel", ["flash", "math"])
@pytest.mark.parametrize("call_cost", [0, 60, 10**6])
@pytest.mark.parametrize("rule", RULES)
def test_decode_attention_is_that_of_every_row_alone(rule, call_cost, kernel, monkeypatch):
    monkeypatch.setattr(plan_module, "CALL_COST", call_cost)
    scene = Scene(torch.float64)
    for i in range(20 if rule == "uneven" else 4):
        ours, alone = scene.step(kernel=kernel, is_uneven=rule == "uneven" and i in (2, 14), **RULES[rule])
        torch.testing.assert_close(ours, alone, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("call_cost", [0, 60, 10**6])
@pytest.mark.parametrize("rule", RULES)
def test_single_precision_is_that_of_every_row_alone_on_either_kernel(rule, call_cost, is_native, monkeypatch):
    if not is_native:
        monkeypatch.setattr(native, "serves", lambda *_: False)
    monkeypatch.setattr(plan_module, "CALL_COST", call_cost)
    exact, scene = Scene(torch.float64), Scene(torch.float32)
    for i in range(20 if rule == "uneven" else 4):
        step = RULES[rule] | {"is_uneven": rule == "uneven" and i in (2, 14)}
        truth, (ours, alone) = exact.step(**step)[1], scene.step(**step)
        limit = max(2 * float((alone - truth).abs().max()), 1e-6)
        assert float((ours - truth).abs().max()) <= limit


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_precisions_are_as_close_as_plain_attention(dtype, share):
    exact, scene = Scene(torch.float64, share=share), Scene(dtype, share=share)
    for _ in range(3):
        truth, (ours, alone) = exact.step(sliding_window=9)[1], scene.step(sliding_window=9)
        limit = 2 * (alone.double() - truth).abs().max()
        assert (ours.double() - truth).abs().max() <= limit


def test_values_may_be_narrower_than_keys():
    scene = Scene(torch.float64, value_dim=20)
    ours, alone = scene.step()
    assert ours.shape[-1] == 20
    torch.testing.assert_close(ours, alone, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("rule", ["plain", "window", "sinks"])
@pytest.mark.parametrize("kernel", ["flash", "math"])
@pytest.mark.parametrize(("num_threads", "num_lanes"), [(1, 1), (2, 1), (4, 2), (6, 3), (10, 1)])
def test_shared_prefix_is_given_to_threads_in_equal_parts(num_threads, num_lanes, kernel, rule, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    options = {
        "plain": {},
        "window": {"sliding_window": 23},
        "sinks": {"sinks": torch.linspace(-2, 2, K * G, dtype=torch.float64)},
    }[rule]
    scene = Scene(torch.float64, n=9, prompts=[list(range(40))])
    for _ in range(3):
        ours, alone = scene.step(kernel=kernel, **options)
        torch.testing.assert_close(ours, alone, atol=1e-12, rtol=1e-12)
    assert len(scene.paths) == 6
    assert [call.num_lanes for call in scene.readers.calls] == [6, num_lanes]


def test_rows_in_the_order_of_their_slots_need_no_table():
    scene = Scene(torch.float64, n=9, prompts=[list(range(40))])
    scene.rows.sort()
    scene.suffix = SuffixCache()
    scene.suffix.add(scene.rows)
    for _ in range(3):
        ours, alone = scene.step()
        assert scene.readers.is_even
        torch.testing.assert_close(ours, alone, atol=1e-12, rtol=1e-12)


def test_output_has_the_shape_and_dtype_of_the_queries():
    ours, _ = Scene(torch.bfloat16).step()
    assert ours.shape[:1] == (K * G,)
    assert ours.dtype == torch.bfloat16
