"""The embedded default: the grammar, the tokenizer and models made from it, and the cache that keeps them."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from textenv.embedded import accepts, embedded_folder, label_of, openings, sample_review
from textenv.embedded.cache import cache_root, cached, fingerprint
from textenv.embedded.grammar import expansions
from textenv.embedded.phrases import PREDICATES, SENTENCES

ROOT = Path(__file__).parents[3]
REVIEW = (
    "this quiet film from last year was a real joy from start to finish. "
    "every scene shines and the plot was superb. catch it tonight."
)


def draw(n, seed=0):
    rng = np.random.default_rng(seed)
    return [sample_review(rng) for _ in range(n)]


def test_the_recogniser_accepts_every_sample():
    reviews = draw(3000)
    assert all(label_of(review.text) == review.label for review in reviews)
    assert all(review.text.startswith(review.opening + " ") for review in reviews)
    assert {review.text.count(".") for review in reviews} == {1, 2, 3}
    assert 0.45 < np.mean([review.label for review in reviews]) < 0.55
    assert draw(5) == draw(5) != draw(5, seed=1)


def test_there_are_thousands_of_reviews():
    assert len({review.text for review in draw(5000)}) > 4800
    assert len({review.text.removeprefix(review.opening) for review in draw(5000)}) > 3000
    assert len(openings()) == len(set(openings())) >= 400
    assert {len(opening.split()) for opening in openings()} <= set(range(2, 9))
    assert 100 <= len({word.strip(".") for review in draw(5000) for word in review.text.split()}) <= 150


def test_no_opening_begins_another():
    """So a response never prolongs its prompt."""
    known = set(openings())
    for opening in openings():
        words = opening.split()
        assert not known & {" ".join(words[:count]) for count in range(1, len(words))}


@pytest.mark.parametrize("patterns", [PREDICATES, SENTENCES])
def test_no_clause_belongs_to_both_sentiments(patterns):
    negative, positive = ({text for pattern in patterns for text in expansions(pattern, label)} for label in (0, 1))
    assert not negative & positive and len(negative) > 200


@pytest.mark.parametrize(
    "change",
    [
        ("was a real joy", "a real joy"),
        ("a real joy", "real joy"),
        ("quiet film", "film quiet"),
        ("real joy", "joy real"),
        ("real joy", "real mess"),
        ("superb", "dull"),
        ("catch", "skip"),
        ("superb", "superb and brilliant"),
        ("superb", "splendid"),
        ("tonight.", "tonight"),
        ("finish. ", "finish "),
        (". ", "."),
        (". ", ".. "),
        ("catch it tonight.", "catch it tonight. catch it tonight."),
        ("this quiet", "This quiet"),
        ("this quiet film from last year ", ""),
        ("this quiet", " this quiet"),
        ("tonight.", "tonight. "),
        ("tonight.", "tonight.\n"),
        ("tonight.", "tonight. the end"),
    ],
)
def test_a_changed_review_is_refused(change):
    assert label_of(REVIEW) == 1
    assert change[0] in REVIEW and not accepts(REVIEW.replace(*change))


def test_mixed_or_unfinished_reviews_are_refused():
    positive, negative = (next(r for r in draw(99) if r.label == label and r.text.count(".") == 1) for label in (1, 0))
    assert accepts(positive.text + " catch it tonight.") and not accepts(positive.text + " skip it tonight.")
    assert accepts(negative.text + " skip it tonight.") and not accepts(negative.text + " catch it tonight.")
    for review in draw(50):
        tails = (review.text[:cut] for cut in range(len(review.text)))
        assert all(tail.endswith(".") for tail in tails if accepts(tail)), review


def test_finding_the_models_loads_nothing_heavy(folder):
    program = (
        "from textenv.embedded import embedded_folder as f; import sys; print(f()); assert 'torch' not in sys.modules"
    )
    found = subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, capture_output=True, text=True)
    assert found.stdout.strip() == str(folder)


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


class Builder:
    """Stands in for the build: counts its calls and writes two files."""

    def __init__(self):
        self.calls = 0

    def __call__(self, folder):
        assert not list(folder.iterdir())
        self.calls += 1
        (folder / "lm").mkdir()
        (folder / "lm" / "weights").write_text("1 2 3")
        (folder / "config").write_text("{}")


def test_a_cached_folder_is_built_once_and_says_so(tmp_path, capsys):
    build, folder = Builder(), tmp_path / "new" / "embedded-0"
    assert cached(folder, build) == cached(folder, build) == folder
    assert build.calls == 1 and (folder / "lm" / "weights").read_text() == "1 2 3"
    assert capsys.readouterr().err == f"textenv: building the embedded model (about 40 s) in {folder}, once\n"


@pytest.mark.parametrize("damage", ["changed", "shortened", "file gone", "manifest gone", "manifest cut", "emptied"])
def test_a_damaged_folder_is_built_again(tmp_path, damage):
    build, folder = Builder(), tmp_path / "embedded-0"
    cached(folder, build)
    weights, manifest = folder / "lm" / "weights", folder / "manifest.json"
    {
        "changed": lambda: weights.write_text("1 2 4"),
        "shortened": lambda: weights.write_text("1 2"),
        "file gone": weights.unlink,
        "manifest gone": manifest.unlink,
        "manifest cut": lambda: manifest.write_text(manifest.read_text()[:20]),
        "emptied": lambda: manifest.write_text("{}"),
    }[damage]()
    assert cached(folder, build) == folder
    assert build.calls == 2 and weights.read_text() == "1 2 3"


def test_a_build_that_dies_leaves_nothing_to_be_found(tmp_path):
    folder = tmp_path / "embedded-0"

    def die(unfinished):
        (unfinished / "config").write_text("{}")
        assert not folder.exists()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached(folder, die)
    assert not folder.exists()
    (tmp_path / "embedded-0.unfinished").mkdir()  # what a killed process leaves
    (tmp_path / "embedded-0.unfinished" / "config").write_text("half")
    assert (cached(folder, Builder()) / "config").read_text() == "{}"


def test_of_two_at_once_one_builds_and_the_other_waits(tmp_path):
    build = Builder()
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(lambda _: cached(tmp_path / "embedded-0", build), range(4)))
    assert build.calls == 1 and folders == {tmp_path / "embedded-0"}


def test_an_unwritable_cache_names_the_variable(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TEXTENV_CACHE", str(tmp_path / "file"))
    with pytest.raises(OSError, match=r"file/textenv/embedded-\w+: .*TEXTENV_CACHE"):
        embedded_folder()


def test_where_the_cache_is(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("TEXTENV_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_root() == tmp_path / "home" / ".cache" / "textenv"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "textenv"
    monkeypatch.setenv("TEXTENV_CACHE", str(tmp_path / "mine"))
    assert cache_root() == tmp_path / "mine" / "textenv"


def test_the_name_changes_with_data_and_versions(monkeypatch):
    names = [fingerprint(("1", {"the": ("a",)}), ["torch"]), fingerprint(("1", {"the": ("a",)}), ["numpy"])]
    names.append(fingerprint(("1", {"the": ("b",)}), ["torch"]))
    assert fingerprint(("1", {"the": ("a",)}), ["torch"]) == names[0]
    monkeypatch.setattr("textenv.embedded.cache.version", lambda package: "99")
    names.append(fingerprint(("1", {"the": ("a",)}), ["torch"]))
    assert len(set(names)) == 4
