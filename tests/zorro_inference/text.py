"""Tokenizers built on the spot, one of each kind that spells text differently, and what rules do, token by token."""

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from arctic_platform.rl.protocol import SamplingParams

CORPUS = [
    "the cat sat on the mat\n\nObservation: hello world, END of it",
    "aaaa abab stop STOP é ü 日本語 日本 😀😀 👩‍👩‍👧 ñandú",
]
SPECIALS = ["<s>", "</s>"]


def byte_level() -> tokenizers.Tokenizer:
    """As of GPT-2 and its heirs: merges over bytes, so that a token may be a part of a character."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def sentence_piece() -> tokenizers.Tokenizer:
    """As of Llama 2: a space is written in front of every text, unknown characters fall back to bytes."""
    pieces = ["<unk>", *SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = sorted(set("".join(CORPUS[:1]).replace(" ", "") + "▁"))
    merges = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo"), ("▁", "hello"), ("▁", "t"), ("c", "a")]
    vocab = {piece: i for i, piece in enumerate([*pieces, *letters, *(a + b for a, b in merges)])}
    model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


def of_transformers() -> PreTrainedTokenizerFast:
    """The first one in transformers' clothes."""
    return PreTrainedTokenizerFast(tokenizer_object=byte_level(), bos_token="<s>", eos_token="</s>")


def word_tokenizer(vocab_size: int) -> tokenizers.Tokenizer:
    """A token per word `w0 w1 ...`."""
    model = models.WordLevel({f"w{i}": i for i in range(vocab_size)}, unk_token="w0")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def slow_edits(
    params: SamplingParams, prompt: list[int], tokens: list[int], logits: list[float], eos: int
) -> list[float]:
    """Logits as they are drawn from, in vLLM's order; bad words are of the word tokenizer."""
    out = list(logits)
    for token in range(len(out)):
        out[token] += params.logit_bias.get(token, 0.0)
        if token in prompt or token in tokens:
            factor = params.repetition_penalty
            out[token] = out[token] / factor if out[token] > 0 else out[token] * factor
        out[token] -= params.frequency_penalty * tokens.count(token) + params.presence_penalty * (token in tokens)
        if len(tokens) < params.min_tokens and token in (eos, *params.stop_token_ids):
            out[token] = -float("inf")
        for word in params.bad_words:
            *start, last = [int(piece[1:]) for piece in word.split()]
            if token == last and tokens[len(tokens) - len(start) :] == start:
                out[token] = -float("inf")
    return out


TOKENIZERS = {"byte_level": byte_level, "sentence_piece": sentence_piece, "transformers": of_transformers}
