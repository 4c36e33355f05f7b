"""Questions are numbered, prompts share their prefix by ids, and only a whole right line is rewarded."""

import pytest
from tokenizers import Tokenizer

from arctic_platform.errors import ConfigError, InputError
from arctic_platform.rl.tasks import Task, TaskConfig, load_tokenizer

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def make_task(tokenizer: Tokenizer, *, num_held_out: int = 64, seed: int = 0, **settings) -> Task:
    config = TaskConfig(**{"name": "chain_sum", "params": SUMS} | settings)
    return Task(config, tokenizer, num_held_out=num_held_out, seed=seed)


def encode(task_tokenizer: Tokenizer, text: str) -> list[int]:
    return task_tokenizer.encode(text, add_special_tokens=False).ids


def test_the_shots_are_one_prefix_of_ids_of_every_prompt(tiny_tokenizer):
    task = make_task(tiny_tokenizer)
    assert len(task.prefix_ids) > 100
    for question in [*task.held_out, *(task.train_question(index) for index in range(50))]:
        assert question.prompt[: len(task.prefix_ids)] == task.prefix_ids
        assert len(question.prompt) > len(task.prefix_ids)


def test_pieces_tokenised_one_by_one_give_the_ids_of_the_whole_text(tiny_tokenizer):
    task = make_task(tiny_tokenizer)
    for question in task.held_out[:20]:
        whole = task.text_of(question.prompt)
        assert encode(tiny_tokenizer, whole) == question.prompt
        assert whole.endswith(f"Q: {question.text}\nA:")


def test_held_out_questions_are_different_and_never_asked_in_training(tiny_tokenizer):
    task = make_task(tiny_tokenizer)
    held_out = {question.text for question in task.held_out}
    asked = {task.train_question(index).text for index in range(3000)}
    shots = task.text_of(task.prefix_ids)
    assert len(held_out) == 64
    assert not held_out & asked
    assert not any(text in shots for text in held_out | asked)


def test_a_question_is_a_function_of_seed_and_number(tiny_tokenizer):
    first, again, other = (make_task(tiny_tokenizer, seed=seed) for seed in (1, 1, 2))
    forwards = [first.train_question(index).text for index in range(40)]
    backwards = [again.train_question(index).text for index in reversed(range(40))]
    assert forwards == backwards[::-1]
    assert forwards != [other.train_question(index).text for index in range(40)]


def test_held_out_questions_and_shots_are_the_same_for_every_training_seed(tiny_tokenizer):
    first, other = (make_task(tiny_tokenizer, seed=seed) for seed in (1, 2))
    assert [question.prompt for question in first.held_out] == [question.prompt for question in other.held_out]


@pytest.mark.parametrize(
    ("form", "reward"),
    [
        (" {answer}\n", 1.0),
        (" {answer}<|end|>", 1.0),
        ("{answer}\nQ: and more", 1.0),
        (" +{answer}\n", 1.0),
        (" {answer}", 0.0),
        (" {answer}.5\n", 0.0),
        (" the answer is {answer}\n", 0.0),
        (" {answer} 1\n", 0.0),
        (" 99\n{answer}\n", 0.0),
        ("\n{answer}\n", 0.0),
        ("", 0.0),
        ("<|end|>", 0.0),
    ],
)
def test_only_a_whole_right_line_is_rewarded(tiny_tokenizer, form, reward):
    task = make_task(tiny_tokenizer)
    question = next(question for question in task.held_out if not question.answer.startswith("-"))
    response = encode(tiny_tokenizer, form.format(answer=question.answer))
    assert task.score(question, response) == reward


def test_partial_credit_is_given_only_when_asked_for(tiny_tokenizer):
    strict, lenient = make_task(tiny_tokenizer), make_task(tiny_tokenizer, partial_credit=True)
    question = strict.held_out[0]
    response = encode(tiny_tokenizer, f" x {question.answer}\n")
    assert strict.score(question, response) == 0.0
    assert 0.0 < lenient.score(question, response) < 1.0


def test_without_shots_the_prompt_is_the_question_alone(tiny_tokenizer):
    task = make_task(tiny_tokenizer, num_shots=0)
    assert task.prefix_ids == []
    assert task.text_of(task.held_out[0].prompt).startswith("Q: ")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "chain_sums"}, 'task "chain_sums" does not exist in reasoning-gym; nearest: chain_sum'),
        ({"name": "zzzz"}, "for example chain_sum"),
        ({"params": {"digits": 1}}, 'has no parameter "digits"; accepted: allow_negation, max_digits'),
        ({"params": {"min_digits": 0}}, "refuses params {'min_digits': 0}: min_digits must be positive"),
        ({"num_held_out": 300}, "different questions for held-out, 300 were asked for"),
        ({"name": "mini_sudoku", "params": {}}, "has answers of several lines"),
    ],
)
def test_a_task_that_cannot_be_asked_says_what_to_change(tiny_tokenizer, settings, message):
    with pytest.raises(ConfigError) as error:
        make_task(tiny_tokenizer, **settings)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_when_everything_is_held_out_nothing_is_left_for_training(tiny_tokenizer):
    task = make_task(tiny_tokenizer, num_held_out=192, num_shots=8)
    with pytest.raises(ConfigError, match="no question left for training"):
        task.train_question(0)


def test_a_folder_without_a_tokenizer_says_so(tmp_path):
    with pytest.raises(InputError, match=r"holds no tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match=r"tokenizer\.json\" is no tokenizer"):
        load_tokenizer(str(tmp_path))


def test_a_hub_id_that_cannot_be_reached_says_so(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="check the id and the network, or give a model folder") as error:
        load_tokenizer("some-owner/some-model")
    assert "\n" not in str(error.value)


def test_a_bos_token_stands_once_in_front_of_the_shots(tiny_model_folder):
    from tokenizers.processors import TemplateProcessing

    tokenizer = load_tokenizer(str(tiny_model_folder))
    tokenizer.post_processor = TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", 0)])
    prompt = make_task(tokenizer).held_out[0].prompt
    assert prompt[0] == 0
    assert prompt.count(0) == 1
