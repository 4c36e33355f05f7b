import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from arctic_platform.rl.protocol import SamplingParams
from arctic_platform.rl.zorro_inference.stop_strings import RolloutText, decode, encode_bad_words, first_stop, held_back
from tests.zorro_inference.text import TOKENIZERS

BUILT = {name: build() for name, build in TOKENIZERS.items()}
TEXTS = [
    "the cat sat on the mat",
    "hello world END of it",
    "é日本😀 👩‍👩‍👧!",
    "\n\nObservation: aaaa",
    "  two  spaces",
    "",
]
STOPS = [(), ("END",), ("\n\nObs", "a"), ("本",), ("aab", "aaa"), (" cat", "t s"), ("hello hello",), ("👧",)]


@pytest.fixture(params=BUILT)
def tokenizer(request):
    return BUILT[request.param]


def encode(tokenizer, text: str) -> list[int]:
    found = tokenizer.encode(text, add_special_tokens=False)
    return list(found.ids if isinstance(found, tokenizers.Encoding) else found)


def slow_stop(text: str, stop: tuple[str, ...], start: int = 0) -> tuple[str, int] | None:
    """Character by character."""
    for end in range(start + 1, len(text) + 1):
        for candidate in stop:
            if text[:end].endswith(candidate):
                return candidate, end - len(candidate)
    return None


def run(tokenizer, params: SamplingParams, prompt: list[int], tokens: list[int]) -> tuple[RolloutText, list[str], int]:
    """Feed tokens until a stop text; the text, what was given out after each token, how many tokens it took."""
    rollout, out = RolloutText(tokenizer, params, prompt), []
    for num, token in enumerate(tokens, start=1):
        out.append(given_out(rollout, token))
        if rollout.stop_string is not None:
            return rollout, out, num
    rollout.finish()
    out.append(rollout.release())
    return rollout, out, len(tokens)


def given_out(rollout: RolloutText, token: int) -> str:
    """Text that a token brings."""
    rollout.append(token)
    return rollout.release()


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("text", TEXTS)
def test_text_is_that_of_all_tokens_at_once_cut_at_the_first_stop(tokenizer, text, stop, include):
    prompt = encode(tokenizer, "the cat")
    tokens = encode(tokenizer, text)
    whole = decode(tokenizer, prompt + tokens)[len(decode(tokenizer, prompt)) :]
    params = SamplingParams(stop=stop, include_stop_str_in_output=include)
    rollout, out, _ = run(tokenizer, params, prompt, tokens)
    found = slow_stop(whole, stop)
    expected = whole if found is None else whole[: found[1] + (len(found[0]) if include else 0)]
    assert rollout.text == "".join(out) == expected
    assert rollout.stop_string == (found and found[0])


@settings(max_examples=150)
@given(
    st.sampled_from(["byte_level", "transformers"]),
    st.lists(st.integers(0, 339), max_size=30),
    st.lists(st.integers(0, 339), min_size=1, max_size=8),
    st.lists(st.text("ab t\ufffdé", min_size=1, max_size=3), max_size=3),
    st.integers(0, 10),
)
def test_any_tokens_give_the_text_of_all_at_once(name, tokens, prompt, stop, min_tokens):
    """Bytes that are no characters, special tokens, stops across any border."""
    tokenizer = BUILT[name]
    whole = decode(tokenizer, tokens)
    params = SamplingParams(stop=stop, min_tokens=min_tokens, max_tokens=30)
    rollout, out, num = run(tokenizer, params, [1], tokens)
    start = len(run(tokenizer, SamplingParams(), [1], tokens[:min_tokens])[0].text) if min_tokens else 0
    if "\ufffd" not in whole:
        found = slow_stop(whole, tuple(stop), start) if len(tokens) > min_tokens else None
        assert rollout.text == (whole if found is None else whole[: found[1]])
    assert rollout.text == "".join(out)
    assert num > min_tokens or rollout.stop_string is None
    behind_any_prompt, _, _ = run(tokenizer, SamplingParams(), prompt, tokens)
    assert decode(tokenizer, prompt + tokens).endswith(behind_any_prompt.text)


def test_nothing_is_given_out_that_is_taken_back():
    tokenizer = BUILT["byte_level"]
    tokens = encode(tokenizer, "the cat sat END")
    rollout = RolloutText(tokenizer, SamplingParams(stop=["sat END", "cat x"]), [0])
    seen = ""
    for token in tokens:
        seen += given_out(rollout, token)
        assert "the cat sat END".startswith(seen) and not "the cat ".startswith(seen + "x")
        assert len(seen) <= len("the cat ")
    assert (rollout.stop_string, rollout.text, seen) == ("sat END", "the cat ", "the cat ")


def test_what_was_held_back_comes_when_it_cannot_become_a_stop_text():
    tokenizer = BUILT["byte_level"]
    rollout = RolloutText(tokenizer, SamplingParams(stop=["ab!"]), [0])
    out = [given_out(rollout, token) for letter in "aab c" for token in encode(tokenizer, letter)]
    assert out == ["", "a", "", "ab ", "c"]


def test_a_stop_text_may_end_inside_a_token():
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"one": 0, "twoXthree": 1}, unk_token="one"))
    tokenizer.decoder = tokenizers.decoders.Fuse()
    for include, expected in ((False, "onetwo"), (True, "onetwoX")):
        params = SamplingParams(stop="X", include_stop_str_in_output=include)
        rollout, out, num = run(tokenizer, params, [0], [0, 1, 0])
        assert (rollout.text, "".join(out), num) == (expected, expected, 2)


def test_the_stop_that_is_complete_first_wins_then_the_one_named_first():
    assert first_stop("xabcd", ["abcd", "bc"], 0) == ("bc", 2)
    assert first_stop("xab", ["ab", "b"], 0) == ("ab", 1)
    assert first_stop("xab", ["b", "ab"], 0) == ("b", 2)


@given(st.text("ab", max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_held_back_is_the_longest_beginning_of_a_stop_text(text, stop):
    beginnings = {candidate[:num] for candidate in stop for num in range(1, len(candidate))}
    assert held_back(text, stop) == max((len(b) for b in beginnings if text.endswith(b)), default=0)


def test_a_stop_token_has_no_text_unless_asked_for():
    tokenizer = BUILT["byte_level"]
    *tokens, last = encode(tokenizer, "the cat!")
    for include, expected in ((False, "the cat"), (True, "the cat!")):
        rollout = RolloutText(tokenizer, SamplingParams(include_stop_str_in_output=include), [0])
        out = [given_out(rollout, token) for token in tokens]
        rollout.append(last, is_stop=True)
        rollout.finish()
        assert rollout.text == "".join(out) + rollout.release() == expected


@pytest.mark.parametrize("every", [1, 2, 5, 100])
def test_text_is_the_same_however_seldom_it_is_asked_for(tokenizer, every):
    tokens = encode(tokenizer, "é日本😀 the cat")
    rollout, out = RolloutText(tokenizer, SamplingParams(), encode(tokenizer, "the")), ""
    for num, token in enumerate(tokens):
        rollout.append(token)
        out += rollout.release() if num % every == 0 else ""
    rollout.finish()
    assert (
        out + rollout.release()
        == rollout.text
        == run(tokenizer, SamplingParams(), encode(tokenizer, "the"), tokens)[0].text
    )


def test_special_tokens_have_no_text_and_do_not_hold_it_up():
    tokenizer = BUILT["byte_level"]
    end = tokenizer.token_to_id("</s>")
    tokens = [*encode(tokenizer, "the"), end, *encode(tokenizer, " cat")]
    rollout, out, _ = run(tokenizer, SamplingParams(), [0], tokens)
    assert rollout.text == "".join(out) == "the cat"


def test_an_unfinished_character_is_held_until_it_is_whole_or_the_end():
    tokenizer = BUILT["sentence_piece"]
    tokens = encode(tokenizer, "日")
    _, out, _ = run(tokenizer, SamplingParams(), encode(tokenizer, "the"), tokens[:-1])
    assert out[1:-1] == [""] * (len(tokens) - 2) and set(out[-1]) == {"\ufffd"}
    _, out, _ = run(tokenizer, SamplingParams(), encode(tokenizer, "the"), tokens)
    assert "".join(out[1:]) == "日"


def test_a_prompt_that_ends_inside_a_character_is_gone_on_with():
    tokenizer = BUILT["byte_level"]
    tokens = encode(tokenizer, "ü" + "☃")
    rollout, _, _ = run(tokenizer, SamplingParams(), tokens[:-1], tokens[-1:])
    assert rollout.text == "☃"


def test_bad_words_are_encoded_as_they_stand_at_the_start_and_behind_a_space():
    tokenizer = BUILT["byte_level"]
    plain, spaced = encode(tokenizer, "cat"), encode(tokenizer, " cat")
    assert encode_bad_words(tokenizer, ["cat", "cat"])[0] == tuple(plain)
    assert len(spaced) != len(plain) or encode_bad_words(tokenizer, ["cat"])[1] == tuple(spaced)
    assert encode_bad_words(BUILT["transformers"], ["cat"]) == encode_bad_words(tokenizer, ["cat"])
