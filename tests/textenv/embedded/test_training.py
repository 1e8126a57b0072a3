"""The embedded tokenizer, language model and classifier."""

import numpy as np
import pytest
import torch

from textenv.embedded import accepts, embedded_folder, openings, sample_review


def draw(n, seed=0):
    rng = np.random.default_rng(seed)
    return [sample_review(rng) for _ in range(n)]


@pytest.fixture(scope="module")
def folder():
    """The only real build of these tests, and none if this version's is in the user's cache."""
    return embedded_folder()


@pytest.fixture(scope="module")
def tokenizer(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder / "lm")


@pytest.fixture(scope="module")
def samples(folder, tokenizer):
    """(opening, whole text) of 320 samples at temperature 1."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "lm")
    prompts = np.random.default_rng(0).choice(openings(), 320, replace=False).tolist()
    batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        ids = model.generate(**batch, do_sample=True, top_k=0, max_new_tokens=40)
    return list(zip(prompts, tokenizer.batch_decode(ids, skip_special_tokens=True), strict=True))


@pytest.fixture(scope="module")
def classifier(folder):
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(folder / "classifier")


@torch.no_grad()
def positive(classifier, tokenizer, texts, side="right"):
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side=side)
    positions = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    return classifier(**batch, position_ids=positions).logits.softmax(-1)[:, 1]


@pytest.mark.parametrize(
    "text",
    ["12 345.6", "0 1 2 3 4 5 6 7 8 9", " a  b ", "line\n\nline\t", "Füße 🙂👩‍👩‍👧", "don't ...", "<|endoftext|>x", ""],
)
def test_any_text_survives_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_single_tokens_and_special_tokens(tokenizer):
    digits = [*"0123456789", *(f" {digit}" for digit in range(10)), "."]
    assert all(len(tokenizer.encode(text)) == 1 for text in digits)
    assert len(tokenizer.encode("2024")) == 4
    words = {f" {word.strip('.')}" for review in draw(3000) for word in review.text.split()[1:]}
    assert all(len(tokenizer.encode(word)) == 1 for word in words)
    assert tokenizer.eos_token == tokenizer.bos_token == "<|endoftext|>" and tokenizer.pad_token == "<|pad|>"
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    assert len(tokenizer) <= 1024 and tokenizer.model_max_length == 128


def test_tokens_of_an_opening_begin_its_review(tokenizer):
    for review in draw(500):
        opening, whole = tokenizer.encode(review.opening), tokenizer.encode(review.text)
        assert whole[: len(opening)] == opening and tokenizer.decode(whole) == review.text


@pytest.mark.heavy
def test_the_language_model_writes_both_sentiments(samples, classifier, tokenizer):
    texts = [text for _, text in samples]
    assert np.mean([accepts(text) for text in texts]) >= 0.9
    assert len({text.removeprefix(opening) for opening, text in samples}) >= 0.9 * len(samples)
    assert 0.4 <= positive(classifier, tokenizer, texts).mean() <= 0.6


def test_the_classifier_is_undecided_about_openings(classifier, tokenizer):
    reviews = draw(500, seed=99)
    scores = positive(classifier, tokenizer, [review.text for review in reviews])
    labels = torch.tensor([review.label for review in reviews])
    assert ((scores > 0.5) == labels).float().mean() >= 0.98
    assert classifier.config.id2label == {0: "negative", 1: "positive"}
    assert (positive(classifier, tokenizer, openings()) - 0.5).abs().max() < 0.3


def test_the_classifier_does_not_see_padding(classifier, tokenizer):
    texts = [review.text for review in draw(20)]
    alone = torch.cat([positive(classifier, tokenizer, [text]) for text in texts])
    for side in ("left", "right"):
        assert torch.allclose(positive(classifier, tokenizer, texts, side), alone, atol=1e-5)


def test_training_is_repeatable_and_isolated(tokenizer):
    from textenv.embedded.training import train_classifier, train_language_model

    def weights(train, reviews=48):
        return torch.cat([weight.flatten() for weight in train(tokenizer, reviews=reviews).state_dict().values()])

    for train in (train_language_model, train_classifier):
        first = weights(train)
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(2)
            torch.set_default_dtype(torch.float64)
            torch.manual_seed(5)
            state = torch.get_rng_state()
            with torch.inference_mode():
                assert torch.equal(weights(train), first) and torch.is_inference_mode_enabled()
            assert torch.equal(torch.get_rng_state(), state)
            assert torch.get_num_threads() == 2 and torch.get_default_dtype() == torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
            torch.set_num_threads(threads)
