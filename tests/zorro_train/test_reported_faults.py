"""Faults that people of this field have met, as inputs, each with its neighbours."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from arctic_platform.errors import InputError
from arctic_platform.rl.protocol import Processing, RolloutBatch
from arctic_platform.rl.zorro_train import ModuleReconstructionPatcher
from tests.rl.engines.builders import grouped_batch
from tests.rl.engines.test_torch_train import engine
from tests.zorro_train.memory import PeakMemory
from tests.zorro_train.twins import build_model, pad, random_rows, rows_alone, split


def padded_call(model, batch: dict) -> torch.Tensor:
    names = ("input_ids", "position_ids", "attention_mask")
    return model(**{name: batch[name] for name in names}, use_cache=False).logprobs


@pytest.mark.parametrize("extra", [0, 1, 3, 17])
@pytest.mark.parametrize("has_positions", [True, False])
def test_left_padding_without_positions_shifts_no_score(extra, has_positions):
    rows, masks = split(["5 6 7 | 8 9", "5 6 | 8"])
    batch = pad(rows, masks, extra=extra)
    patcher = ModuleReconstructionPatcher(build_model(), response_len=batch["responses"].shape[1])
    if not has_positions:
        batch["position_ids"] = None
    expected = rows_alone(build_model(), rows, masks)[0]
    torch.testing.assert_close(padded_call(patcher.patch_forward(), batch), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["qwen3", "qwen2-window"])
def test_no_row_without_a_visible_key_makes_a_nan(family, attn, dtype):
    rows, masks = random_rows(3)
    batch = pad(rows, masks, extra=5)
    patcher = ModuleReconstructionPatcher(
        build_model(family, dtype), response_len=batch["responses"].shape[1], attn_implementation=attn
    )
    logprobs = padded_call(patcher.patch_forward(), batch)
    logprobs.sum().backward()
    assert torch.isfinite(logprobs).all()
    assert all(torch.isfinite(p.grad).all() for p in patcher.model.parameters() if p.grad is not None)


@pytest.mark.parametrize("temperature", [0.6, 0.7, 1.0, 1.5])
@pytest.mark.parametrize("max_token_len", [None, 34])
def test_scores_and_training_use_one_temperature_so_the_ratio_is_one(temperature, max_token_len):
    trainer = engine(zorro_train={"max_token_len": max_token_len})
    batch, processing = grouped_batch(seed=3, group_size=6, prompt_len=24), Processing(temperature=temperature)
    scored = trainer.log_probs(batch, processing)
    fields = batch.model_dump(exclude_none=True) | {"old_logprobs": scored.logprobs}
    metrics = trainer.fwd_bwd(RolloutBatch(**fields), processing).metrics
    assert metrics["ppo_kl"] == pytest.approx(0.0, abs=1e-6) and metrics["clip_fraction"] == 0.0
    if temperature != 1.0:
        again = trainer.log_probs(batch)
        assert max(abs(a - b) for x, y in zip(again.logprobs, scored.logprobs, strict=True) for a, b in zip(x, y)) > 0.1  # noqa: B905


@pytest.mark.parametrize("mode", ["none", "compute", "memory"])
def test_prompt_tokens_get_no_logits(mode):
    """A prompt of 400 tokens and 4 answers of 3: logits at 1 + 4 * 2 positions, and never for the prompt."""
    model = build_model()
    seen = []
    model.lm_head.register_forward_pre_hook(lambda _module, args: seen.append(len(args[0])))
    patcher = ModuleReconstructionPatcher(model, logits_optimization=mode, probe=False)
    prompt = np.arange(400) % 100
    rows = [np.concatenate([prompt, [row, row + 1, row + 2]]) for row in range(4)]
    masks = [np.arange(len(row)) >= len(prompt) for row in rows]
    patcher.forward_rows(rows, masks).logprobs.sum().backward()
    assert max(seen) == 9 and sum(seen) <= 2 * 9


@pytest.mark.parametrize("mode", ["none", "compute", "memory"])
@pytest.mark.parametrize("prompt_len", [2, 500, 2000])
def test_memory_of_a_pass_does_not_grow_with_prompt_times_vocabulary(prompt_len, mode):
    """8 answers of 4 tokens: 25 rows of logits, though the prompt alone would have up to 2,000 of 200 KB each."""
    vocab, num_predicting = 50_000, 1 + 8 * 3
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 16, "vocab_size": vocab}
    model = AutoModelForCausalLM.from_config(Qwen3Config(**sizes, num_attention_heads=1, num_key_value_heads=1))
    patcher = ModuleReconstructionPatcher(model, logits_optimization=mode, probe=False)
    rows = [np.concatenate([np.arange(prompt_len), [row, 1, 2, 3]]) for row in range(3000, 3008)]
    masks = [np.arange(len(row)) >= prompt_len for row in rows]
    with PeakMemory() as memory:
        patcher.forward_rows(rows, masks).logprobs.sum().backward()
    logits, weights = 4 * num_predicting * vocab, 4 * 16 * vocab
    assert memory.peak <= 5 * logits + 3 * weights + 4 * 2000 * 16 * 100


@pytest.mark.parametrize("answers", [["5 6", "6 5"], ["5", "6 5 7"], ["7 7 7", "7"]])
def test_score_i_is_that_of_answer_token_i(answers):
    """One token of the answer is changed: its own score and those behind it move, none before."""
    rows, masks = split([f"1 2 3 | {answer}" for answer in answers])
    patcher = ModuleReconstructionPatcher(build_model())
    with torch.no_grad():
        values = patcher.forward_rows(rows, masks)
        table = build_model()(input_ids=torch.from_numpy(rows[0])[None]).logits[0].log_softmax(-1)
    own = [table[2 + i, token] for i, token in enumerate(rows[0][3:].tolist())]
    assert values.logprobs[: values.offsets[1]].tolist() == pytest.approx([float(x) for x in own], abs=1e-5)
    assert np.diff(values.offsets).tolist() == [len(answer.split()) for answer in answers]


@pytest.mark.parametrize("bad", [-100, -1, 128, 5000])
@pytest.mark.parametrize("at", [0, 2, 4])
def test_pad_sentinel_inside_a_live_mask_is_an_error(bad, at):
    rows, masks = split(["5 6 7 | 8 9"])
    batch = pad(rows, masks)
    batch["input_ids"][0, at] = bad
    model = ModuleReconstructionPatcher(build_model(), response_len=2).patch_forward()
    with pytest.raises(InputError):
        padded_call(model, batch)


@pytest.mark.parametrize("rows", [["1 2 | 3 4 5", "1 2 | 3 9", "1 2 | 3 4 5 6"], ["1 | 2", "1 | 2", "1 2 | 3"]])
def test_multi_turn_rows_that_extend_or_fork_each_other_are_exact(rows):
    """The same tokens are prompt in one row and answer in another; each row's own mask decides."""
    ids, masks = split(rows)
    patcher = ModuleReconstructionPatcher(build_model(dtype=torch.float64))
    expected = rows_alone(build_model(dtype=torch.float64), ids, masks)[0]
    torch.testing.assert_close(patcher.forward_rows(ids, masks).logprobs, expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("seed", range(4))
def test_conversation_trees_are_exact_anywhere_they_fork(seed):
    """Turns alternate between context and answer; a row goes on from any point of an earlier one."""
    draw = np.random.default_rng(seed)
    rows, masks = [draw.integers(0, 100, 6)], [np.arange(6) >= 3]
    for _ in range(9):
        base = int(draw.integers(len(rows)))
        at = int(draw.integers(1, len(rows[base]) + 1))
        turn = draw.integers(0, 100, int(draw.integers(1, 7)))
        rows.append(np.concatenate([rows[base][:at], turn]))
        masks.append(np.concatenate([masks[base][:at] & bool(draw.integers(2)), draw.integers(0, 2, len(turn)) > 0]))
    patcher = ModuleReconstructionPatcher(build_model(dtype=torch.float64))
    expected = rows_alone(build_model(dtype=torch.float64), rows, masks)[0]
    torch.testing.assert_close(patcher.forward_rows(rows, masks).logprobs, expected, rtol=1e-7, atol=1e-7)
