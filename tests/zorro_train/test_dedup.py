import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arctic_platform.errors import InputError
from arctic_platform.rl.zorro_train import ReconstructionInfo, ZoRRoTrain
from arctic_platform.rl.zorro_train.tests import compare_gradients, create_dummy_batch

PROMPT_LEN, RESPONSE_LEN = 6, 4


def dedup(batch: dict, use_unpad: bool, groups: list[list[int]] | None = None):
    """The documented call sequence; returns ids, positions, info."""
    length, mask = batch["response_length"], batch["attention_mask"]
    found, unique = ZoRRoTrain.find_prompt_groups(batch["input_ids"], length, attention_mask=mask)
    if groups is not None:
        prompts = batch["input_ids"][:, : batch["input_ids"].shape[1] - length]
        found, unique = groups, prompts[[group[0] for group in groups]]
    return ZoRRoTrain.create_deduplicated_batch(
        batch["input_ids"], batch["position_ids"], length, found, unique, mask, use_unpad
    )


def small_batch(**changes) -> dict:
    settings = {"batch_size": 6, "num_unique_prompts": 2, "add_padding": True, "seed": 3} | changes
    return create_dummy_batch(
        settings.pop("batch_size"), settings.pop("num_unique_prompts"), PROMPT_LEN, RESPONSE_LEN, **settings
    )


def shuffled(batch: dict, seed: int) -> dict:
    order = torch.randperm(len(batch["input_ids"]), generator=torch.Generator().manual_seed(seed))
    return {key: value[order] if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


@st.composite
def batches(draw):
    """Padded rows in any order: prompts from a small pool, lengths 0..P and 0..R, ids that include the pad id."""
    num_rows = draw(st.integers(1, 7))
    pool = draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=PROMPT_LEN), min_size=1, max_size=3))
    ids = torch.zeros((num_rows, PROMPT_LEN + RESPONSE_LEN), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row in range(num_rows):
        prompt = draw(st.sampled_from(pool))
        response = draw(st.lists(st.integers(0, 2), max_size=RESPONSE_LEN))
        start = PROMPT_LEN - len(prompt)
        ids[row, start : PROMPT_LEN + len(response)] = torch.tensor(prompt + response)
        mask[row, start : PROMPT_LEN + len(response)] = 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "response_length": RESPONSE_LEN}


def test_groups_come_in_first_seen_order_with_their_prompts():
    prompts = torch.tensor([[5, 6], [1, 2], [5, 6], [3, 3], [1, 2]])
    ids = torch.cat([prompts, torch.arange(10).reshape(5, 2)], dim=1)
    groups, unique = ZoRRoTrain.find_prompt_groups(ids, 2)
    assert groups == [[0, 2], [1, 4], [3]]
    assert unique.tolist() == [[5, 6], [1, 2], [3, 3]]


@pytest.mark.parametrize("num_prompts", [1, 2, 5, 6])
def test_dummy_batch_has_the_groups_that_were_asked_for(num_prompts):
    batch = small_batch(num_unique_prompts=num_prompts)
    groups, unique = ZoRRoTrain.find_prompt_groups(batch["input_ids"], RESPONSE_LEN)
    assert len(groups) == num_prompts == len(unique)
    assert [row for group in groups for row in group] == list(range(6))
    assert max(map(len, groups)) - min(map(len, groups)) <= 1


def test_layout_is_each_prompt_then_its_responses_in_group_order():
    batch = shuffled(small_batch(add_padding=False), seed=1)
    ids, positions, info = dedup(batch, use_unpad=False)
    expected_ids, expected_positions = [], []
    for group in info["prompt_groups"]:
        expected_ids.append(batch["input_ids"][group[0], :PROMPT_LEN])
        expected_positions.append(batch["position_ids"][group[0], :PROMPT_LEN])
        for row in group:
            expected_ids.append(batch["input_ids"][row, PROMPT_LEN:])
            expected_positions.append(batch["position_ids"][row, PROMPT_LEN:])
    assert ids.tolist() == [torch.cat(expected_ids).tolist()]
    assert positions.tolist() == [torch.cat(expected_positions).tolist()]
    assert ids.shape == (1, 2 * PROMPT_LEN + 6 * RESPONSE_LEN)


@given(batches(), st.booleans())
def test_reconstruction_and_deduplication_are_inverse(batch, use_unpad):
    ids, positions, info = dedup(batch, use_unpad)
    rows, mask = batch["input_ids"], batch["attention_mask"].bool()
    for packed, full in ((ids, rows), (positions, batch["position_ids"])):
        back = ZoRRoTrain.reconstruct_sequences(packed, info)
        if use_unpad:
            assert back.tolist() == [full[mask].tolist()]
        else:
            assert back[mask].tolist() == full[mask].tolist() and back.shape == full.shape
    hidden = torch.randn(1, ids.shape[1], 3, 2)
    assert torch.equal(ZoRRoTrain.deduplicate_sequences(ZoRRoTrain.reconstruct_sequences(hidden, info), info), hidden)


@given(batches())
def test_padded_reconstruction_returns_the_callers_batch_bit_for_bit(batch):
    ids, _, info = dedup(batch, use_unpad=False)
    table = torch.randn(3, 5)
    assert torch.equal(ZoRRoTrain.reconstruct_sequences(table[ids], info), table[batch["input_ids"]])


@given(batches(), st.booleans())
def test_segments_tile_the_pack_and_hold_the_rows_tokens(batch, use_unpad):
    ids, _, info = dedup(batch, use_unpad)
    end = 0
    for segment in info["segment_info"]:
        assert segment["start"] == end
        end = segment["end"]
        row, is_prompt = segment["original_idx"], segment["type"] == "prompt"
        columns = slice(None, PROMPT_LEN) if is_prompt else slice(PROMPT_LEN, None)
        kept = batch["attention_mask"][row, columns].bool() if use_unpad else slice(None)
        assert ids[0, segment["start"] : end].tolist() == batch["input_ids"][row, columns][kept].tolist()
        assert row in info["prompt_groups"][segment["group_idx"]]
    assert end == ids.shape[1]
    assert sum(segment["type"] == "response" for segment in info["segment_info"]) == len(batch["input_ids"])


@given(batches(), st.booleans())
def test_extracted_responses_return_to_the_callers_row_order(batch, use_unpad):
    ids, _, info = dedup(batch, use_unpad)
    packed = ZoRRoTrain.extract_unpadded_responses_from_deduped_packed_ids(ids[0], info)
    order = [row for group in info["prompt_groups"] for row in group]
    mask = batch["attention_mask"][:, PROMPT_LEN:].bool()
    responses = batch["input_ids"][:, PROMPT_LEN:]
    assert packed.tolist() == [t for row in order for t in responses[row][mask[row]].tolist()]
    assert ZoRRoTrain.responses_in_orig_sample_order(packed, info).tolist() == responses[mask].tolist()


@given(batches(), st.booleans())
def test_offset_minus_one_reads_the_predecessor_in_the_tokens_own_row(batch, use_unpad):
    ids, _, info = dedup(batch, use_unpad)
    packed = ZoRRoTrain.extract_unpadded_responses_from_deduped_packed_ids(ids[0], info, offset=-1)
    in_rows = ZoRRoTrain.responses_in_orig_sample_order(packed, info).tolist()
    expected = []
    for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
        live = row[mask.bool()].tolist()
        num_responses = int(mask[PROMPT_LEN:].sum())
        expected += live[len(live) - num_responses - 1 : -1] if num_responses else []
    assert in_rows == expected


def test_every_first_answer_token_is_predicted_by_the_shared_last_prompt_token():
    rows = torch.tensor([[1, 2, 5], [1, 2, 6], [1, 2, 7]])
    batch = {"input_ids": rows, "attention_mask": torch.ones_like(rows), "response_length": 1}
    batch["position_ids"] = torch.arange(3).expand(3, 3)
    ids, _, info = dedup(batch, use_unpad=True)
    place = torch.arange(ids.shape[1])
    at = ZoRRoTrain.extract_unpadded_responses_from_deduped_packed_ids(place, info, offset=-1)
    assert at.tolist() == [1, 1, 1] and ids.tolist() == [[1, 2, 5, 6, 7]]


def test_sample_order_reads_only_groups_and_bounds():
    info = {"prompt_groups": [[2, 0], [1], [3]], "cu_seqlens_response": torch.tensor([0, 3, 3, 5, 6])}
    packed = torch.tensor([20.0, 21.0, 22.0, 10.0, 11.0, 30.0])
    ordered = ZoRRoTrain.responses_in_orig_sample_order(packed, info)
    assert ordered.tolist() == [10.0, 11.0, 20.0, 21.0, 22.0, 30.0]
    in_order = {"prompt_groups": [[0, 1], [2]], "cu_seqlens_response": torch.tensor([0, 3, 3, 6])}
    assert ZoRRoTrain.responses_in_orig_sample_order(packed, in_order) is packed


@pytest.mark.parametrize("use_unpad", [False, True])
@pytest.mark.parametrize("groups", [None, [[0, 1]]], ids=["groups-by-mask", "groups-by-padded-ids"])
def test_pad_id_that_is_a_real_token_does_not_make_prompts_equal(use_unpad, groups):
    ids = torch.tensor([[0, 0, 5, 6], [0, 0, 5, 6]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    batch = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "response_length": 1}
    packed, _, info = dedup(batch, use_unpad, groups)
    assert info["prompt_groups"] == [[0], [1]]
    if use_unpad:
        assert packed.tolist() == [[5, 6, 0, 0, 5, 6]]
        assert info["cu_seqlens_packed"].tolist() == [0, 2, 6]
    else:
        assert ZoRRoTrain.reconstruct_sequences(packed, info).tolist() == ids.tolist()


def test_garbage_behind_the_mask_does_not_keep_prompts_apart():
    ids = torch.tensor([[9, 4, 5, 6], [8, 4, 5, 7]])
    mask = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 1]])
    assert ZoRRoTrain.find_prompt_groups(ids, 1, attention_mask=mask)[0] == [[0, 1]]
    assert ZoRRoTrain.find_prompt_groups(ids, 1)[0] == [[0], [1]]


def test_rows_with_other_positions_do_not_share():
    ids = torch.tensor([[1, 2, 3], [1, 2, 4]])
    positions = torch.tensor([[0, 1, 2], [5, 6, 7]])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": positions, "response_length": 1}
    _, packed_positions, info = dedup(batch, use_unpad=True)
    assert info["prompt_groups"] == [[0], [1]] and packed_positions.tolist() == [[0, 1, 2, 5, 6, 7]]


def test_prompts_that_differ_in_one_token_are_groups_of_their_own():
    ids = torch.tensor([[1, 2, token, 7] for token in (3, 4, 5, 6)])
    assert ZoRRoTrain.find_prompt_groups(ids, 1)[0] == [[0], [1], [2], [3]]


def test_info_has_the_documented_keys():
    batch = small_batch()
    _, _, padded = dedup(batch, use_unpad=False)
    _, _, unpadded = dedup(batch, use_unpad=True)
    for info, is_unpadded in ((padded, False), (unpadded, True)):
        assert isinstance(info, ReconstructionInfo) and isinstance(info, dict)
        assert (info["prompt_len"], info["response_length"]) == (PROMPT_LEN, RESPONSE_LEN)
        assert (info["original_batch_size"], info["original_seq_len"]) == (6, PROMPT_LEN + RESPONSE_LEN)
        assert info["is_unpadded"] is is_unpadded
    lens = batch["attention_mask"].sum(1)
    order = [row for group in unpadded["prompt_groups"] for row in group]
    response_lens = batch["attention_mask"][:, PROMPT_LEN:].sum(1)[order]
    assert unpadded["cu_seqlens_packed"].diff().tolist() == lens.tolist()
    assert unpadded["cu_seqlens_response"].diff().tolist() == response_lens.tolist()


def test_reconstruction_carries_gradients_of_all_sharing_rows():
    batch = small_batch(num_unique_prompts=1, add_padding=False)
    ids, _, info = dedup(batch, use_unpad=False)
    hidden = torch.zeros(1, ids.shape[1], requires_grad=True)
    ZoRRoTrain.reconstruct_sequences(hidden, info).sum().backward()
    assert hidden.grad[0, :PROMPT_LEN].tolist() == [6.0] * PROMPT_LEN
    assert hidden.grad[0, PROMPT_LEN:].eq(1).all()


def test_without_positions_live_tokens_are_counted():
    batch = small_batch()
    _, positions, _ = dedup(batch | {"position_ids": None}, use_unpad=True)
    assert torch.equal(positions, dedup(batch, use_unpad=True)[1])


BAD_CALLS = {
    "response as long as the row": (lambda b: ZoRRoTrain.find_prompt_groups(b["input_ids"], 10), "response_length=10"),
    "no response": (lambda b: ZoRRoTrain.find_prompt_groups(b["input_ids"], 0), "response_length=0"),
    "flat ids": (lambda b: ZoRRoTrain.find_prompt_groups(b["input_ids"][0], 4), "shape"),
    "float ids": (lambda b: ZoRRoTrain.find_prompt_groups(b["input_ids"].float(), 4), "integer"),
    "negative id": (lambda b: ZoRRoTrain.find_prompt_groups(b["input_ids"] - 100, 4), "0 or more"),
    "short mask": (lambda b: dedup(b | {"attention_mask": b["attention_mask"][:, 1:]}, True), "attention_mask"),
    "additive mask": (lambda b: dedup(b | {"attention_mask": b["attention_mask"] * -1.0}, True), "attention_mask"),
    "several position axes": (lambda b: dedup(b | {"position_ids": torch.zeros(3, 6, 10)}, True), "M-RoPE"),
    "row left out": (lambda b: dedup(b, True, [[0, 1, 2], [3, 4]]), "each of the 6 rows"),
    "row named twice": (lambda b: dedup(b, True, [[0, 1, 2, 3], [3, 4, 5]]), "each of the 6 rows"),
    "wrong group": (lambda b: dedup(b, True, [[0, 1, 2, 3], [4, 5]]), "the prompt of row 3"),
    "stale unique prompts": (
        lambda b: ZoRRoTrain.create_deduplicated_batch(
            b["input_ids"], None, 4, [[0, 1, 2], [3, 4, 5]], torch.zeros(2, 6, dtype=torch.long)
        ),
        "unique_prompts",
    ),
    "values of another pack": (
        lambda b: ZoRRoTrain.reconstruct_sequences(torch.zeros(1, 3), dedup(b, True)[2]),
        "dedup_hidden",
    ),
    "rows of another batch": (
        lambda b: ZoRRoTrain.deduplicate_sequences(torch.zeros(1, 3), dedup(b, True)[2]),
        "full_hidden",
    ),
    "shift behind the end": (
        lambda b: ZoRRoTrain.extract_unpadded_responses_from_deduped_packed_ids(
            *dedup(b, True)[0], dedup(b, True)[2], offset=1
        ),
        "offset=1",
    ),
    "shift before the start": (
        lambda b: ZoRRoTrain.extract_unpadded_responses_from_deduped_packed_ids(
            *dedup(b, True)[0], dedup(b, True)[2], offset=-7
        ),
        "offset=-7",
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_input_is_named_in_one_line(name):
    call, words = BAD_CALLS[name]
    with pytest.raises(InputError) as error:
        call(small_batch(add_padding=False))
    assert words in str(error.value) and "\n" not in str(error.value)


def test_dummy_batch_has_the_documented_fields_and_padding():
    batch = small_batch()
    mask = batch["attention_mask"]
    assert batch["response_length"] == RESPONSE_LEN
    assert torch.equal(batch["responses"], batch["input_ids"][:, PROMPT_LEN:])
    assert (mask[:, :PROMPT_LEN].diff(dim=1) >= 0).all() and (mask[:, PROMPT_LEN:].diff(dim=1) <= 0).all()
    assert (mask[:, PROMPT_LEN - 1 : PROMPT_LEN + 1] == 1).all()
    assert (batch["input_ids"] == 0).equal(mask == 0)
    for name in ("old_log_probs", "advantages", "ref_log_prob"):
        assert batch[name].shape == (6, RESPONSE_LEN)
        assert (batch[name][mask[:, PROMPT_LEN:] == 0] == 0).all()
    assert "advantages" not in small_batch(include_training_fields=False)
    assert torch.equal(small_batch()["input_ids"], batch["input_ids"])


@settings(max_examples=30)
@given(st.integers(1, 5), st.integers(1, 12), st.integers(0, 99))
def test_dummy_prompts_always_differ(num_prompts, prompt_len, seed):
    batch = create_dummy_batch(2 * num_prompts, num_prompts, prompt_len, 2, add_padding=True, vocab_size=8, seed=seed)
    assert len(ZoRRoTrain.find_prompt_groups(batch["input_ids"], 2)[0]) == num_prompts


@pytest.mark.parametrize("sizes", [(0, 0, 4, 4), (2, 3, 4, 4), (2, 1, 0, 4), (2, 1, 4, 0)])
def test_dummy_batch_refuses_impossible_sizes(sizes):
    with pytest.raises(InputError, match="sizes are at least 1"):
        create_dummy_batch(*sizes)


def test_dummy_batch_refuses_more_prompts_than_exist():
    with pytest.raises(InputError, match="vocab_size"):
        create_dummy_batch(4, 4, 1, 2, vocab_size=4)


def test_gradient_error_is_relative_to_all_gradients_together():
    baseline = {"w": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])}
    assert compare_gradients(baseline, baseline) == 0.0
    with pytest.warns(UserWarning, match="gradients of b differ"):
        assert compare_gradients(baseline | {"b": torch.tensor([4.5])}, baseline) == pytest.approx(0.1)
    with pytest.warns(UserWarning, match="b"):
        assert compare_gradients(baseline | {"b": None}, baseline) == pytest.approx(0.8)
    assert compare_gradients({"w": None}, {"w": torch.zeros(2)}) == 0.0


def test_gradient_tolerances_decide_what_is_named():
    baseline, ours = {"w": torch.tensor([1.0])}, {"w": torch.tensor([1.001])}
    assert compare_gradients(ours, baseline, rtol=1e-2) == pytest.approx(1e-3, rel=1e-3)
    assert compare_gradients(ours, baseline, atol=1e-2) == pytest.approx(1e-3, rel=1e-3)
    with pytest.warns(UserWarning, match="w differ"):
        compare_gradients(ours, baseline)


def test_gradients_of_different_parameters_are_refused():
    with pytest.raises(InputError, match="'b' is in one"):
        compare_gradients({"w": torch.ones(1)}, {"w": torch.ones(1), "b": torch.ones(1)})
    with pytest.raises(InputError, match="shape"):
        compare_gradients({"w": torch.ones(1)}, {"w": torch.ones(2)})


def test_half_precision_gradients_are_compared_in_float64():
    grads = {"w": torch.tensor(np.linspace(0, 1, 7), dtype=torch.bfloat16)}
    assert compare_gradients(grads, {"w": grads["w"].double()}) == 0.0
