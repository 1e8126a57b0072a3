"""examples/rlhf.py: its data against hand-worked cases, all stages on a tiny slice, and (slow) what it claims."""

import dataclasses
import importlib.util
import math
import random
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared" / "data"


@pytest.fixture
def example():
    spec = importlib.util.spec_from_file_location("rlhf_example", ROOT / "examples" / "rlhf.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def reviews(count, seed):
    """Sentences of seven words and more, which one word makes liked or disliked."""
    rng, rows = random.Random(seed), []
    for _ in range(count):
        label = rng.randrange(2)
        said = rng.choice([["dull", "poor"], ["great", "fine"]][label])
        parts = [
            rng.choice("abcdefghijklmnopqrst"),
            rng.choice(["new", "old"]),
            rng.choice(["film", "plot", "cast"]),
            "is",
        ]
        rows.append((" ".join([*parts, "very", said, "and", rng.choice(["long", "short", "loud"])]), label))
    return rows


def test_beginnings_are_three_four_and_five_words_in_turn_and_nothing_is_lost(example):
    rows = [("a b c d e f g", 1), ("too short a text here", 0), ("h i j k l m", 0), ("n o p q r s", 1)]
    rows.append((" ".join("x" * (example.MOST_WORDS + 1)), 1))
    assert example.beginnings(rows) == [
        {"prompt": "a b c", "completion": " d e f g"},
        {"prompt": "h i j k l", "completion": " m"},
        {"prompt": "n o p", "completion": " q r s"},
    ]


def test_preferences_are_pairs_of_one_first_word_the_liked_one_chosen_and_none_left_out(example):
    rows = [("the good", 1), ("the fine", 1), ("the bad", 0), ("it won", 1), ("it lost", 0), ("it sank", 0), ("so", 1)]
    assert example.preferences(rows) == [
        {"prompt": "it", "chosen": " won", "rejected": " lost"},
        {"prompt": "it", "chosen": " won", "rejected": " sank"},
        {"prompt": "the", "chosen": " good", "rejected": " bad"},
        {"prompt": "the", "chosen": " fine", "rejected": " bad"},
    ]


def test_the_judge_is_naive_bayes(example):
    judge = example.WordCounts([("good film", 1), ("bad film", 0)])
    # Three words, each counted once more: p(good | liked) = 2/5, p(good | disliked) = 1/5.
    said = judge.scores(["good", "good good film", "bad", "film", "unheard"])
    torch.testing.assert_close(said, torch.tensor([2 / 3, 4 / 5, 1 / 3, 1 / 2, 1 / 2]))
    assert judge.accuracy([("good", 1), ("bad film", 1), ("bad", 0), ("good", 0)]) == 0.5


@pytest.fixture
def small(example, monkeypatch):
    """All stages in seconds."""
    for name in ("LANGUAGE", "FINE_TUNING", "REWARD"):
        monkeypatch.setattr(example, name, dataclasses.replace(getattr(example, name), epochs=1))
    monkeypatch.setattr(example, "CONFIG", dataclasses.replace(example.CONFIG, episodes=32))
    monkeypatch.setattr(example, "TOTAL_STEPS", 400)
    monkeypatch.setattr(example, "NEW_TOKENS", 8)
    return example


def test_all_stages_run_and_both_critics_give_the_same_kind_of_result(small, capsys):
    rows, dev = reviews(120, seed=1), [(f"now {text}", label) for text, label in reviews(40, seed=2)]
    runs = {critic: small.run(rows, dev, critic, 1) for critic in ("head", "model")}
    (made, head), (made_again, model) = runs["head"], runs["model"]
    assert made == made_again, "what comes before PPO does not know the critic"
    assert list(head) == list(model) == ["LM", "SFT", "PPO seed 1"]
    for columns in (head, model):
        assert len({tuple(figures) for figures, _ in columns.values()}) == 1
        assert all(math.isfinite(figure) for figures, _ in columns.values() for figure in figures.values())
        assert all(" |" in text for _, texts in columns.values() for text in texts)
    assert head["LM"] == model["LM"] and head["SFT"] == model["SFT"]
    assert head["PPO seed 1"] != model["PPO seed 1"], "the two critics are not one"
    kl = {name: figures["KL to SFT, nats"] for name, (figures, _) in model.items()}
    assert kl["SFT"] == pytest.approx(0, abs=1e-4) and kl["LM"] > 0.01 and kl["PPO seed 1"] != 0
    small.report(model)
    assert capsys.readouterr().out.count("PPO seed 1:") == 8


def test_the_reward_model_begins_as_the_fine_tuned_model(example):
    rows = reviews(60, seed=3)
    tokenizer = example.make_tokenizer([text for text, _ in rows])
    torch.manual_seed(5)
    lm, _ = small_language_model(example, rows, tokenizer)
    ids = torch.tensor([tokenizer("the new film is very fine")["input_ids"]])
    hidden = example.make_reward_model(lm).model.transformer(input_ids=ids).last_hidden_state
    torch.testing.assert_close(hidden, lm.hidden(ids))


def small_language_model(example, rows, tokenizer):
    example.LANGUAGE = dataclasses.replace(example.LANGUAGE, epochs=1)
    return example.train_language_model(rows, tokenizer, rows)


def test_data_that_is_not_there_is_named(example, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("sys.argv", ["rlhf.py", "--data", str(tmp_path)])
    with pytest.raises(SystemExit):
        example.main()
    assert f"there is no {tmp_path}/sst2/train.tsv: give the folder that holds" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("critic", ["head", "model"])
def test_ppo_raises_the_score_and_the_judge_agrees(example, critic):
    """The README's claim, one seed; answers stay varied and go on ending by themselves."""
    if not (DATA / "sst2").is_dir():
        pytest.skip(f"there is no {DATA / 'sst2'}: the data of shared/data is not here")
    _, columns = example.run(*(example.read(DATA / "sst2" / name) for name in ("train.tsv", "dev.tsv")), critic, 1)
    (lm, _), (before, _), (after, _) = columns.values()
    assert lm["ended by itself"] < 0.1 and before["ended by itself"] > 0.75
    assert after["reward model's score"] > before["reward model's score"] + 1.5
    assert after["judge: positive"] > before["judge: positive"] + 0.1
    assert after["ended by itself"] > 0.9 and after["distinct-2"] > 0.65
