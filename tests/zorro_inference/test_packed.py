import pytest
import torch
from torch import nn

from arctic_platform.rl.zorro_inference.packed import packed_linears

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")


@needs_onednn
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_rows", [1, 3, 64])
def test_packed_linear_is_the_same_product(bias, num_rows):
    linear = nn.Linear(48, 80, bias=bias)
    x = torch.randn(2, num_rows, 48)
    with torch.no_grad(), packed_linears(linear, num_rows=16) as num_packed:
        packed = linear(x)
    assert num_packed == 1
    torch.testing.assert_close(packed, linear(x), atol=1e-5, rtol=1e-5)


@needs_onednn
def test_half_precision_is_as_close_as_the_plain_layer():
    linear, x = nn.Linear(64, 96).bfloat16(), torch.randn(8, 64).bfloat16()
    exact = nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double())
    with torch.no_grad(), packed_linears(linear, num_rows=8):
        packed = linear(x)
    assert (packed - exact).abs().max() <= 2 * (linear(x) - exact).abs().max()


def test_layers_are_restored_also_after_an_error():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    with pytest.raises(KeyError), packed_linears(model, num_rows=4):
        raise KeyError
    assert "forward" not in vars(model[0])


def test_layers_with_a_forward_of_their_own_are_left_alone():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = nn.Sequential(Scaled(4, 4), nn.Linear(4, 4, dtype=torch.float64))
    with packed_linears(model, num_rows=4) as num_packed:
        assert num_packed == 0
