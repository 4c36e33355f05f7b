import pytest
import torch

from arctic_platform.forest.kernels import rectangle_forward
from arctic_platform.rl.zorro_inference import products
from arctic_platform.rl.zorro_inference.products import ProductsRule, products_forward

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")

K, G, D = 2, 3, 32


def heads(num_queries: int, num_keys: int) -> list[torch.Tensor]:
    """q, k and v as views of tokens, in fp32; some scores are large."""
    random = torch.Generator().manual_seed(0)
    shapes = [(num_queries, K * G), (num_keys, K), (num_keys, K)]
    return [3 * torch.randn(n, h, D, generator=random).transpose(0, 1).unsqueeze(0) for n, h in shapes]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(300, 300), (300, 200), (200, 300), (129, 128), (43, 257)])
def test_products_are_the_rectangle(num_queries, num_keys, causal, monkeypatch):
    monkeypatch.setattr(products, "TILE_SCORES", 100 * G * num_keys)
    tensors = heads(num_queries, num_keys)
    exact = rectangle_forward(*(x.double() for x in tensors), scale=0.3, causal=causal)
    plain = rectangle_forward(*tensors, scale=0.3, causal=causal, kernel="flash")
    for ours, theirs, truth in zip(products_forward(*tensors, scale=0.3, causal=causal), plain, exact, strict=True):
        assert ours.shape == truth.shape
        assert (ours - truth).abs().max() <= 2 * (theirs - truth).abs().max()


@pytest.mark.parametrize("spread", [1e-3, 1e3])
def test_log_sum_exp_is_exact_for_flat_and_for_peaked_scores(spread):
    q, k, v = heads(200, 200)
    exact = rectangle_forward((spread * q).double(), k.double(), v.double(), scale=1.0, causal=True)
    ours = products_forward(spread * q, k, v, scale=1.0, causal=True)
    torch.testing.assert_close(ours[1].double(), exact[1], atol=1e-5, rtol=5e-6)


def test_small_half_precise_and_masked_rectangles_stay_with_torch(monkeypatch):
    monkeypatch.setattr(products, "products_forward", None)
    rule = ProductsRule(0.3, None, None, "flash")
    q, k, v = heads(200, 200)
    rule.forward(q[:, :, :9], k, v, None)
    rule.forward(q, k[:, :, :9], v[:, :, :9], None, causal=False)
    rule.forward(q.bfloat16(), k.bfloat16(), v.bfloat16(), None)
    rule.forward(q, k, v, torch.ones(200, 200, dtype=torch.bool))
    ProductsRule(0.3, None, 2.0, "math").forward(q, k, v, None)
    with pytest.raises(TypeError):
        rule.forward(q, k, v, None)
