"""The sampler over every family of the training sweep."""

import pytest
import torch
import transformers

from arctic_platform.errors import UnsupportedModelError
from arctic_platform.rl.zorro_inference import Sampler
from tests.zorro_inference.architectures import COLUMN, EOS_ID, judge, sample_everywhere
from tests.zorro_train import sweep
from tests.zorro_train.architectures import FAMILIES, build, has_fp64, is_recurrent

TABLE = sweep.read_table()
EXACT = [name for name, row in TABLE.items() if row[COLUMN] == "exact"]
REFUSED = [name for name, row in TABLE.items() if row[COLUMN] == "refused"]


@pytest.mark.skipif(transformers.__version__ != sweep.VERSIONS[0], reason="the column is of the pinned transformers")
@pytest.mark.parametrize("name", FAMILIES)
def test_family_decodes_as_the_table_says(name):
    verdict = judge(name)
    assert verdict.word == TABLE[name][COLUMN], verdict.reason


def test_the_column_has_a_word_for_every_family_and_none_is_wrong():
    assert [*EXACT, *REFUSED] and set(EXACT) | set(REFUSED) == set(FAMILIES)


def test_what_is_decoded_is_trained_exactly_too():
    assert not [name for name in EXACT if TABLE[name][sweep.VERSIONS[0]] != "exact"]


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sampled_logprobs_are_exact_whatever_the_kernel_the_sharing_and_the_seats(name, dtype):
    if dtype == torch.float64 and not has_fp64(name):
        pytest.skip("the stock model does not run in fp64")
    errors = sample_everywhere(name, dtype)
    largest, mean = (1e-4, 1e-5) if dtype == torch.float32 else (1e-6, 1e-7)
    if dtype == torch.float64 and is_recurrent(name):
        largest, mean = 2e-5, 1e-6  # the state is kept in fp32 inside
    assert errors.max() <= largest
    assert errors.mean() <= mean


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_refused_family_is_refused_in_any_precision(name, dtype):
    if dtype == torch.float64 and not has_fp64(name):
        pytest.skip("the stock model does not run in fp64")
    model = build(name, dtype)
    with pytest.raises(UnsupportedModelError, match=model.config.model_type):
        Sampler(model, eos_token_ids=[EOS_ID])
