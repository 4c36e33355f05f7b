import pytest
import torch
from torch import nn

from arctic_platform.rl.zorro_inference.packed import PACK_FOR_TOKENS, PackedLinears, Product

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")


def packed(model: nn.Module) -> PackedLinears:
    linears = PackedLinears(model)
    linears.pack()
    return linears


@needs_onednn
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_rows", [1, 3, 64])
def test_packed_linear_is_the_same_product(bias, num_rows):
    linear = nn.Linear(48, 80, bias=bias)
    x = torch.randn(2, num_rows, 48)
    linears = packed(linear)
    assert linears.num_packed == 1
    with torch.no_grad(), linears.active(True):
        ours = linear(x)
    torch.testing.assert_close(ours, linear(x), atol=1e-5, rtol=1e-5)


@needs_onednn
def test_half_precision_is_as_close_as_the_plain_layer():
    linear, x = nn.Linear(64, 96).bfloat16(), torch.randn(8, 64).bfloat16()
    exact = nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double())
    with torch.no_grad(), packed(linear).active(True):
        ours = linear(x)
    assert (ours - exact).abs().max() <= 2 * (linear(x) - exact).abs().max()


def test_layers_are_restored_also_after_an_error():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    with pytest.raises(KeyError), packed(model).active(True):
        raise KeyError
    assert "forward" not in vars(model[0])


def test_layers_with_a_forward_of_their_own_are_left_alone():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    assert packed(nn.Sequential(Scaled(4, 4), nn.Linear(4, 4, dtype=torch.float64))).num_packed == 0


def test_copies_are_due_once_enough_tokens_ran():
    linears = PackedLinears(nn.Linear(8, 8))
    assert not linears.is_due(4)
    assert linears.is_due(PACK_FOR_TOKENS)
    assert linears.is_due(4)
    linears.drop()
    assert not linears.is_due(4)


def test_call_that_decides_for_itself_does_not_depend_on_what_ran_before():
    linears = PackedLinears(nn.Linear(8, 8))
    assert not linears.is_due(10**6, pays=False)
    assert linears.is_due(1, pays=True)


def test_switched_off_nothing_is_due():
    linears = PackedLinears(nn.Linear(8, 8), enable=False)
    assert not linears.is_due(10**6, pays=True)


@needs_onednn
def test_layers_run_on_the_copies_only_where_they_are_due():
    linear = nn.Linear(8, 8)
    linears = PackedLinears(linear)
    with linears.active(False):
        assert linears.num_packed == 0
    with linears.active(True):
        assert linears.num_packed == 1
        assert "forward" in vars(linear)
    with linears.active(False):
        assert "forward" not in vars(linear)


@needs_onednn
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("biases", [(False, False), (True, False), (True, True)])
def test_product_of_several_layers_is_that_of_each(biases, dtype):
    first, second = (nn.Linear(48, num, bias=bias, dtype=dtype) for num, bias in zip((80, 32), biases, strict=True))
    x, other = torch.randn(5, 48, dtype=dtype), torch.randn(5, 112, dtype=dtype)
    product, exact = Product.of(first, second), torch.cat([first.double()(x.double()), second.double()(x.double())], 1)
    tolerance = {"atol": 0.05, "rtol": 0.02} if dtype == torch.bfloat16 else {"atol": 1e-5, "rtol": 1e-5}
    with torch.no_grad():
        torch.testing.assert_close(product(x).double(), exact, **tolerance)
        torch.testing.assert_close(product.silu(x).double(), nn.functional.silu(exact), **tolerance)
        torch.testing.assert_close(product.times(x, other).double(), exact * other, **tolerance)
        torch.testing.assert_close(product.plus(x, other).double(), exact + other, **tolerance)


@needs_onednn
def test_new_weights_count_after_a_drop():
    linear, x = nn.Linear(8, 8), torch.randn(3, 8)
    linears = packed(linear)
    linear.weight.data.mul_(2)
    linears.drop()
    with torch.no_grad(), linears.active(True):
        torch.testing.assert_close(linear(x), nn.functional.linear(x, linear.weight, linear.bias))
