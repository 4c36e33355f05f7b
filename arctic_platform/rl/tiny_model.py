"""A model small enough for tests and first tries: built here, without a network, in a few seconds.

Two llama layers over a few hundred tokens. Random weights never answer in the form that a task wants, so
nothing could be rewarded; a short supervised warm-up on made-up answers teaches the form (a number and a
newline) and nothing about what is right: that is left to reinforcement learning.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer
    from transformers import LlamaForCausalLM

END_TOKEN = "<|end|>"
MAX_VOCAB_SIZE = 384
QUESTION = (
    "Q: Find the Greatest Common Divisor (GCD) of these numbers: {left}, {right}. "
    "Give only the GCD as your final answer.\nA: {answer}\n"
)


def build_tiny_model(folder: Path, *, seed: int = 0, num_warmup_steps: int = 60) -> None:
    """Write a Hugging Face folder with a tiny llama (hidden 64, 2 layers, head_dim 32) and its tokenizer."""
    import torch
    from transformers import PreTrainedTokenizerFast

    rng = random.Random(seed)
    tokenizer = _train_tokenizer(rng)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _random_llama(tokenizer)
        _warm_up(model, tokenizer, rng, num_warmup_steps)
    model.save_pretrained(folder)
    special = {"eos_token": END_TOKEN, "pad_token": END_TOKEN}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def _made_up(rng: random.Random, num_questions: int) -> str:
    """`num_questions` questions, each with a random digit for an answer."""
    return "".join(
        QUESTION.format(left=rng.randint(1, 99), right=rng.randint(1, 99), answer=rng.randint(1, 9))
        for _ in range(num_questions)
    )


def _train_tokenizer(rng: random.Random) -> Tokenizer:
    """Byte-level, single digits, and the words of the questions as whole tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_VOCAB_SIZE,
        special_tokens=[END_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((_made_up(rng, 1) for _ in range(200)), trainer)
    return tokenizer


def _random_llama(tokenizer: Tokenizer) -> LlamaForCausalLM:
    from transformers import LlamaConfig, LlamaForCausalLM

    end_id = tokenizer.token_to_id(END_TOKEN)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=tokenizer.get_vocab_size(),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            bos_token_id=end_id,
            eos_token_id=end_id,
            pad_token_id=end_id,
        )
    )


def _warm_up(model: LlamaForCausalLM, tokenizer: Tokenizer, rng: random.Random, num_steps: int) -> None:
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for ids_BS in _batches(tokenizer, rng, num_steps):
        loss = model(input_ids=ids_BS, labels=ids_BS, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _batches(tokenizer: Tokenizer, rng: random.Random, num_batches: int) -> Iterator[torch.Tensor]:
    """Batches [8, 64] int64 of running text, eight windows each."""
    import torch

    for _ in range(num_batches):
        rows = [tokenizer.encode(_made_up(rng, 6)).ids[:64] for _ in range(8)]
        yield torch.tensor(rows)
