"""`LMPolicy.generate` against `transformers`, and its seeds."""

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from algos import LMPolicy
from tests.helpers.models import make_gpt2, make_llama
from tests.helpers.text_envs import EOS

PROMPTS = ["a b", "c", "d a b good", "b"]


@pytest.mark.parametrize("make", [make_gpt2, make_llama])
def test_greedy_completions_are_those_of_transformers(make, tokenizer):
    policy = LMPolicy(make(), tokenizer)
    tokenizer.padding_side = "left"
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    batch.pop("token_type_ids", None)
    model = policy.lm.model
    found = model.generate(**batch, do_sample=False, max_new_tokens=6, eos_token_id=EOS, pad_token_id=EOS)
    whole_texts = tokenizer.batch_decode(found, skip_special_tokens=True)
    expected = [text.removeprefix(prompt) for text, prompt in zip(whole_texts, PROMPTS, strict=True)]
    assert policy.generate(PROMPTS, max_new_tokens=6, deterministic=True) == expected
    assert len(set(expected)) > 1, "equal completions show nothing"


def test_samples_follow_the_seed_and_change_nothing(tokenizer):
    policy = LMPolicy(make_gpt2(), tokenizer, seed=5)
    before = policy.generator.get_state()
    first, again, other = (policy.generate(PROMPTS, max_new_tokens=12, seed=seed) for seed in (1, 1, 2))
    assert first == again != other
    assert policy.generate(PROMPTS[:2], max_new_tokens=12, seed=1) == first[:2]
    assert torch.equal(policy.generator.get_state(), before) and policy.decoder is None and not policy.memory


def test_a_completion_ends_at_eos_limit_or_context(tokenizer):
    policy = LMPolicy(make_gpt2(n_positions=8), tokenizer)
    lengths = [len(text.split()) for text in policy.generate([[0, 1, 2]] * 40, max_new_tokens=100)]
    assert max(lengths) <= 5 and min(lengths) < 5
    assert max(len(text.split()) for text in policy.generate(PROMPTS * 10, max_new_tokens=2)) <= 2
    with pytest.raises(ValueError, match="the model has 8 positions"):
        policy.generate([[0] * 9])


def test_a_chat_is_rendered_by_the_template():
    policy = LMPolicy.load("embedded")
    policy.lm.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    chat = [{"role": "user", "content": "the film was"}]
    assert policy.generate([chat], seed=3) == policy.generate(["the film was"], seed=3)
    assert isinstance(policy.tokenizer, type(AutoTokenizer.from_pretrained(policy.lm.model.name_or_path)))


def test_wrong_arguments_are_answered(tokenizer):
    policy = LMPolicy(make_gpt2(), tokenizer)
    assert policy.generate([]) == []
    for wrong in ("a b", 5):
        with pytest.raises(ValueError, match=f"prompts is {wrong!r}, expected a sequence of rows: texts"):
            policy.generate(wrong)
    for ids in ([3, 9], [3, -1]):
        with pytest.raises(ValueError, match="prompt 1 has ids outside the vocabulary, expected 0 to 8"):
            policy.generate(["a", ids])
    with pytest.raises(ValueError, match=r"prompt 0 is \[True\], expected text, a list of token ids"):
        policy.generate([[True]])
    for wrong, shown in ((0, "0"), (3.0, "3.0"), ("3", "'3'")):
        with pytest.raises(ValueError, match=rf"max_new_tokens is {shown}, expected an integer of at least 1"):
            policy.generate(PROMPTS, max_new_tokens=wrong)
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        policy.generate(["a", ""])


def test_a_data_set_is_read_as_the_environment_reads_it(tokenizer):
    datasets = pytest.importorskip("datasets", reason="needs datasets")
    policy = LMPolicy(make_gpt2(), tokenizer)
    rows = [{"prompt": prompt, 3: "c"} for prompt in PROMPTS]
    data = datasets.Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS])
    assert policy.generate(data) == policy.generate(rows) == policy.generate(PROMPTS)


TEMPLATE = "{% for m in messages %}{{ m['content'] }}\nEND\n{% endfor %}"


@pytest.mark.heavy
@pytest.mark.parametrize("write", [LMPolicy.save, LMPolicy.merge])
def test_a_folder_that_was_used_before_has_no_template_left(write, tmp_path):
    first = LMPolicy.load("embedded")
    first.lm.tokenizer.chat_template = TEMPLATE
    first.save(tmp_path)
    assert LMPolicy.load(tmp_path).tokenizer.chat_template == TEMPLATE
    second = LMPolicy.load("embedded", lora="r=2")
    write(second, tmp_path)
    loaded = LMPolicy.load(tmp_path)
    assert loaded.tokenizer.chat_template is None and str(loaded.ends) == str(second.ends)


def test_a_folder_with_the_name_of_a_built_in_model_is_not_mixed_with_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain = LMPolicy.load("embedded")
    other = LMPolicy.load("embedded", temperature=0.5)
    with torch.no_grad():
        other.value_head.bias.fill_(7)
    other.save(tmp_path / "embedded")
    again = LMPolicy.load("embedded")
    assert again.temperature == plain.temperature == 1.0 and again.value_head.bias == plain.value_head.bias
    assert LMPolicy.load("./embedded").temperature == 0.5


def test_a_critic_replaces_a_saved_value_head_and_its_option(tmp_path):
    LMPolicy.load("embedded", detach_value=True).save(tmp_path)
    assert LMPolicy.load(tmp_path, critic="copy").critic is not None
    with pytest.raises(ValueError, match="detach_value"):
        LMPolicy.load(tmp_path, critic="copy", detach_value=True)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"temperature": "0.7"}, "temperature is '0.7', expected a number > 0"),
        ({"temperature": None}, "temperature is None, expected a number > 0"),
        ({"top_k": 5.0}, "top_k is 5.0, expected an integer of at least 1"),
        ({"top_k": "5"}, "top_k is '5', expected an integer of at least 1"),
        ({"top_k": 0}, "top_k is 0, expected an integer of at least 1"),
        ({"top_p": "0.9"}, r"top_p is '0.9', expected a number in \(0, 1\]"),
    ],
)
def test_wrong_numbers_of_the_sampling_are_refused_at_once(options, sentence, tokenizer):
    """A text was an error of Python's own, and a float for top_k failed at the first token."""
    with pytest.raises(ValueError, match=sentence):
        LMPolicy(make_gpt2(), tokenizer, **options)


def test_numbers_of_numpy_and_torch_sample_as_those_of_python(tokenizer):
    numbers = {"temperature": np.float64(0.5), "top_k": np.int64(3), "top_p": torch.tensor(0.9)}
    expected = LMPolicy(make_gpt2(), tokenizer, temperature=0.5, top_k=3, top_p=0.9).generate(PROMPTS, max_new_tokens=6)
    assert LMPolicy(make_gpt2(), tokenizer, **numbers).generate(PROMPTS, max_new_tokens=np.int64(6)) == expected
