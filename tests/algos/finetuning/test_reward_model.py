"""Training reward models: losses and measures by hand, training against torch alone, and what is refused."""

import json
import math
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from algos import RewardModelConfig, train_reward_model
from algos.finetuning.reward_data import read_reward_rows
from algos.finetuning.reward_model import bradley_terry_loss, expected_calibration_error, spearman
from tests.helpers.conversations import CHAT_WORDS, CHATML
from tests.helpers.errors import refused
from tests.helpers.lora import peft
from tests.helpers.models import WORDS, load_example, make_tokenizer
from tests.helpers.reward_models import NAMES, make_model
from textenv import RewardModel, TextVectorEnv
from textenv.extras.human import FeedbackFile, Question

EOS = WORDS.index("<eos>")
LONG = ["".join(f" {word}" for word in words) for words in product("abcd", repeat=3)]
SCORED = [{"prompt": f"{text} .", "completion": f" {word}", "score": int(word == "good")}
          for text in LONG for word in ("good", "bad")]  # fmt: skip
PAIRS = [{"prompt": f"{text} .", "chosen": " good", "rejected": " bad"} for text in LONG]
FAST = dict(num_epochs=4, batch_size=8, learning_rate=3e-3)


def judge(name="gpt2", **options):
    model = make_model(name, **options)
    return RewardModel(model, make_tokenizer(WORDS), batch_size=8)


def repeating(row):
    """The row with answers that repeat its prompt."""
    return row | {name: row["prompt"] + row[name] for name in ("completion", "chosen", "rejected") if name in row}


# --- losses and measures, by hand ------------------------------------------------------------------------------------


def test_bradley_terry_by_hand():
    """σ(0) = 1/2; σ(log 3) = 3/4; a margin of log 3 takes the latter back to 1/2."""
    log3 = math.log(3)
    found = bradley_terry_loss(
        chosen=torch.tensor([1.0, log3, log3, 200.0]),
        rejected=torch.tensor([1.0, 0.0, 0.0, 0.0]),
        margin=torch.tensor([0.0, 0.0, log3, 400.0]),
    )
    torch.testing.assert_close(found, torch.tensor([math.log(2), math.log(4 / 3), math.log(2), 200.0]))
    with pytest.raises(ValueError, match=r"shapes \(2,\), \(2, 1\), \(2,\), expected equal ones"):
        bradley_terry_loss(chosen=torch.zeros(2), rejected=torch.zeros(2, 1), margin=torch.zeros(2))


def test_expected_calibration_error_by_hand():
    """Bins: two at .05 (one came), four at .85 (three came), one at 1 (came): (2·.45 + 4·.1 + 0) / 7."""
    said = torch.tensor([0.05, 0.05, 0.85, 0.85, 0.85, 0.85, 1.0])
    came = torch.tensor([1, 0, 1, 1, 1, 0, 1])
    found = expected_calibration_error(probability=said, outcome=came)
    assert found == pytest.approx((2 * 0.45 + 4 * 0.10) / 7, abs=1e-6)
    # Within a bin errors of both signs cancel: it is the bin's means that are compared.
    both = expected_calibration_error(probability=torch.tensor([0.52, 0.58]), outcome=torch.tensor([True, False]))
    assert both == pytest.approx(0.05, abs=1e-6)
    apart = expected_calibration_error(probability=torch.tensor([0.45, 0.55]), outcome=torch.tensor([True, False]))
    assert apart == pytest.approx(0.55, abs=1e-6)
    with pytest.raises(ValueError, match="expected 0 to 1"):
        expected_calibration_error(probability=torch.tensor([1.5]), outcome=torch.tensor([1]))
    with pytest.raises(ValueError, match=r"expected \[n\] of both"):
        expected_calibration_error(probability=torch.zeros(2), outcome=torch.zeros(2, 1))


def test_a_sampler_of_its_probabilities_is_calibrated():
    generator = torch.Generator().manual_seed(0)
    said = torch.rand(20_000, generator=generator)
    came = torch.rand(20_000, generator=generator) < said
    assert expected_calibration_error(probability=said, outcome=came) < 0.02
    assert expected_calibration_error(probability=said, outcome=came < 0.5) > 0.2


def test_spearman_by_hand_and_with_ties():
    """1 - 6 Σd² / (n (n² - 1)) without ties; with them the correlation of the mean ranks 1, 2.5, 2.5, 4 and 1 to 4."""
    one, two = torch.tensor([10.0, 20.0, 15.0, 40.0, 30.0]), torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    assert spearman(predicted=one, actual=two) == pytest.approx(1 - 6 * 4 / (5 * 24))
    tied = spearman(predicted=torch.tensor([0.0, 1.0, 1.0, 2.0]), actual=torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert tied == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    assert spearman(predicted=torch.ones(3), actual=torch.arange(3.0)) == 0


class Says(RewardModel):
    """A reward model that says a number for the word of an answer, whatever it learns."""

    def __init__(self, **numbers):
        super().__init__(make_model("gpt2"), make_tokenizer(WORDS))
        self.numbers = numbers

    def logits(self, rows):
        weights = sum(weight.sum() for weight in self.model.parameters())
        return torch.tensor([[self.numbers[WORDS[ids[-2]]]] for ids in rows]) + 0 * weights


def test_figures_of_scores_by_hand():
    rows = [{"prompt": "a .", "completion": f" {word}", "score": s} for word, s in (("a", 1.0), ("b", 1.0), ("c", 0.0))]
    report = train_reward_model(Says(a=1.4, b=0.25, c=0.75, good=1.0, bad=0.0), SCORED, held_out=rows)
    assert report.accuracy == pytest.approx(1 / 3)
    assert report.mean_squared_error == pytest.approx((0.16 + 0.5625 + 0.5625) / 3, abs=1e-6)
    assert report.log_likelihood == pytest.approx((math.log(0.99) + 2 * math.log(0.25)) / 3, abs=1e-6)
    assert report.calibration_error == pytest.approx((0 + 0.75 + 0.75) / 3, abs=1e-6)
    marks = [row | {"score": score} for row, score in zip(rows, (0.2, 0.4, 1.0), strict=True)]
    report = train_reward_model(Says(a=0.1, b=0.5, c=0.9, good=1.0, bad=0.0), SCORED, held_out=marks)
    assert report.accuracy is report.log_likelihood is report.calibration_error is None
    assert report.spearman == pytest.approx(1)


def test_figures_of_pairs_by_hand():
    words = ("a", "d"), ("a", "c"), ("d", "a"), ("d", "c")
    rows = [{"prompt": "a .", "chosen": f" {chosen}", "rejected": f" {rejected}"} for chosen, rejected in words]
    judge = Says(a=math.log(3), c=0.0, d=0.0, good=1.0, bad=0.0)
    report = train_reward_model(judge, PAIRS, held_out=rows)
    assert report.accuracy == 0.5 and report.spearman is report.mean_squared_error is None
    assert report.log_likelihood == pytest.approx((2 * math.log(3 / 4) + math.log(1 / 4) + math.log(1 / 2)) / 4)
    assert report.calibration_error == pytest.approx((3 * (0.75 - 2 / 3) + 0.5) / 4, abs=1e-6)


# --- training --------------------------------------------------------------------------------------------------------


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "pad", "data"),
    [
        *((name, 8, SCORED) for name in NAMES),
        ("gpt2", EOS, SCORED),
        ("llama", EOS, PAIRS),
        ("gpt2", 8, PAIRS),
        ("bert", 8, PAIRS),
    ],
)
def test_it_learns_good_answers_and_then_pays_for_them(name, pad, data):
    model = make_model(name, pad=pad, initializer_range=0.1)
    rate = RewardModel(model, make_tokenizer(WORDS, pad=WORDS[pad]), batch_size=8)
    report = train_reward_model(rate, data, RewardModelConfig(**FAST))
    assert report.kind == ("pairs" if data is PAIRS else "scores")
    assert report.rows + report.held_out_rows == len(data) and 0 < report.held_out_rows < len(data) / 4
    assert report.accuracy == 1 and report.history[-1]["reward/loss"] < report.history[0]["reward/loss"]
    assert [row["steps"] for row in report.history] == [report.rows * n for n in (1, 2, 3, 4)]
    good, bad = rate(["a b c .", "a b c ."], [" good", " bad"])
    assert good - bad > 0.5
    assert not model.training


def test_training_scores_a_text_as_paying_does():
    """Dropout off and a step size of almost 0: the loss that is logged comes from the rewards that it would pay."""
    rate = judge("bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    config = RewardModelConfig(learning_rate=1e-12, batch_size=8)
    rows = PAIRS[:9]
    report = train_reward_model(rate, rows, config, held_out=PAIRS[9:10])

    def paid(rows, name):
        return rate([row["prompt"] for row in rows], [row[name] for row in rows], terminated=[True] * len(rows))

    rewards = [paid(rows, name) for name in ("chosen", "rejected")]
    expected = -torch.nn.functional.logsigmoid(torch.tensor(rewards[0]) - torch.tensor(rewards[1])).mean()
    assert report.history[0]["reward/loss"] == pytest.approx(expected.item(), abs=1e-5)
    report = train_reward_model(rate, SCORED[:20], config, held_out=SCORED[20:22])
    errors = [reward - row["score"] for reward, row in zip(paid(SCORED[:20], "completion"), SCORED[:20], strict=True)]
    expected = sum(error**2 for error in errors) / 20
    assert report.history[0]["reward/loss"] == pytest.approx(expected, abs=1e-5)


def test_one_epoch_is_what_torch_does_by_hand():
    """One batch: one AdamW step on the mean of the squared errors, row by row without padding."""
    options = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    rate, other = judge("bert", **options), make_model("bert", **options)
    rows = [
        {"prompt": "a", "completion": " b good", "score": 0.8},
        {"prompt": "d", "completion": "", "score": 0.3},
        {"prompt": "b", "completion": " bad", "score": 0},
    ]
    config = RewardModelConfig(learning_rate=1e-2, weight_decay=0.0, warmup_ratio=0.0, max_grad_norm=0.1)
    train_reward_model(rate, rows, config, held_out=[{"prompt": "c", "completion": "", "score": 1}])
    optimizer = torch.optim.AdamW(other.parameters(), lr=1e-2, weight_decay=0.0)
    for ids, score in (([0, 1, 5, 7], 0.8), ([3, 7], 0.3), ([1, 6, 7], 0.0)):  # closed by EOS
        ((other(input_ids=torch.tensor([ids])).logits[0, 0] - score).square() / 3).backward()
    torch.nn.utils.clip_grad_norm_(other.parameters(), 0.1)
    optimizer.step()
    texts = ["a b good", "d", "c c"]
    found = rate.scores(texts)
    after = [
        other.eval()(input_ids=torch.tensor([ids])).logits[0, 0].item() for ids in ([0, 1, 5, 7], [3, 7], [2, 2, 7])
    ]
    assert found.tolist() == pytest.approx(after, abs=1e-3)


def test_a_margin_asks_for_more():
    """Of a reward model that says a difference of 1."""

    def loss(**margin):
        history = train_reward_model(Says(good=1.0, bad=0.0), [PAIRS[0] | margin], held_out=PAIRS[1:2]).history
        return history[0]["reward/loss"]

    assert loss() == pytest.approx(math.log1p(math.exp(-1)), abs=1e-5)
    assert loss(margin=2.0) == pytest.approx(math.log1p(math.exp(1)), abs=1e-5)


def test_no_prompt_is_on_both_sides_of_the_split():
    """Whatever its spacing: it is the hash of the prompt that chooses the side."""
    rows = [row | {"prompt": f"{row['prompt']}{' ' * n}"} for row in SCORED for n in range(2)]
    judge = Says(good=1.0, bad=0.0)
    assert len({row.key for row in read_reward_rows(rows, judge).rows}) == len(LONG)
    report = train_reward_model(judge, rows, RewardModelConfig(held_out_fraction=0.5))
    assert report.rows + report.held_out_rows == len(rows) and 0.25 < report.held_out_rows / len(rows) < 0.75
    assert report.held_out_rows % 4 == 0, "two answers in two spellings of each prompt"
    with pytest.raises(ValueError, match="1 prompts are in both data and held_out"):
        train_reward_model(judge, SCORED[2:4], held_out=[SCORED[2] | {"completion": "d"}])


def test_without_prompts_answers_are_kept_apart():
    rows = [{"prompt": "", "completion": text, "score": 1} for text in LONG for _ in range(2)]
    assert len({row.key for row in read_reward_rows(rows, judge()).rows}) == len(LONG)


def test_a_feedback_file_is_read_and_skips_are_counted(tmp_path):
    thumbs, pairs = FeedbackFile(tmp_path / "thumbs.jsonl"), FeedbackFile(tmp_path / "pairs.jsonl")
    for i, text in enumerate(LONG[:20]):
        question = Question(prompt=text, responses=(" good",), scale="thumbs")
        thumbs.append(question, "skip" if i == 7 else "up", annotator="test")
        question = Question(prompt=text, responses=(" bad", " good"), scale="pairs")
        pairs.append(question, {3: "tie", 7: "skip"}.get(i, "second"), annotator="test")
    for file, skipped, kind in ((thumbs, 1, "scores"), (pairs, 2, "pairs")):
        lines = [json.loads(line) for line in file.path.read_text().splitlines()]
        report = train_reward_model(judge(), lines, RewardModelConfig(held_out_fraction=0.3))
        assert (report.kind, report.skipped, report.rows + report.held_out_rows) == (kind, skipped, 20 - skipped)
    report = train_reward_model(judge(), pairs.preferences(), RewardModelConfig(held_out_fraction=0.3))
    assert report.skipped == 0


def test_a_chat_is_encoded_as_it_is_when_it_pays():
    tokenizer = make_tokenizer(CHAT_WORDS, eos="<|im_end|>")
    tokenizer.chat_template = CHATML
    rate = RewardModel(make_model("gpt2", vocab_size=len(CHAT_WORDS)), tokenizer)
    row = {"prompt": [{"role": "user", "content": "a b"}], "score": 1}
    row["completion"] = [{"role": "assistant", "content": "good"}]
    (read,) = read_reward_rows([row], rate).rows
    said = " ".join(CHAT_WORDS[token] for token in read.ids[0])
    assert said == "<|im_start|> user a b <|im_end|> <|im_start|> assistant good <|im_end|>"


def chat_judge():
    tokenizer = make_tokenizer(CHAT_WORDS, eos="<|im_end|>")
    tokenizer.chat_template = CHATML
    return RewardModel(make_model("gpt2", vocab_size=len(CHAT_WORDS)), tokenizer)


ASKED = [{"role": "user", "content": "a b"}]
GOOD, BAD = ([{"role": "assistant", "content": word}] for word in ("good", "bad"))


@pytest.mark.parametrize(
    "pair",
    [
        {"chosen": ASKED + GOOD, "rejected": ASKED + BAD},
        {"prompt": None, "chosen": ASKED + GOOD, "rejected": ASKED + BAD},
        {"prompt": ASKED, "chosen": ASKED + GOOD, "rejected": ASKED + BAD},
        {"prompt": "a b", "chosen": ASKED + GOOD, "rejected": ASKED + BAD},
        {"prompt": ASKED, "chosen": "good", "rejected": "bad"},
        {"prompt": ASKED, "chosen": [GOOD[0] | {"content": [{"type": "text", "text": "good"}]}], "rejected": BAD},
    ],
    ids=["whole", "none", "repeated", "repeated text", "answers as text", "parts"],
)
def test_a_pair_of_chats_is_read_once_whole_or_not(pair):
    rate = chat_judge()
    (expected,) = read_reward_rows([{"prompt": ASKED, "chosen": GOOD, "rejected": BAD}], rate).rows
    (read,) = read_reward_rows([pair], rate).rows
    assert read == expected


def test_an_answer_that_the_prompt_begins_is_continued():
    rate = chat_judge()
    begun = [*ASKED, {"role": "assistant", "content": "c "}]
    (read,) = read_reward_rows([{"prompt": begun, "chosen": GOOD, "rejected": BAD}], rate).rows
    whole = [[*ASKED, {"role": "assistant", "content": f"c {word}"}] for word in ("good", "bad")]
    expected = tuple(rate.tokenizer.apply_chat_template(chat, return_dict=False) for chat in whole)
    assert read.ids == expected


def test_a_repeated_or_absent_prompt_is_read_once(caplog):
    rate = judge()
    expected = read_reward_rows(PAIRS, rate).rows
    joined = [{name: pair["prompt"] + pair[name] for name in ("chosen", "rejected")} for pair in PAIRS]
    assert [row.ids for row in read_reward_rows(joined, rate).rows] == [row.ids for row in expected]
    assert len({row.key for row in read_reward_rows(joined, rate).rows}) == len(LONG)  # the prompt that they share
    repeated = [{"prompt": pair["prompt"]} | whole for pair, whole in zip(PAIRS, joined, strict=True)]
    assert read_reward_rows(repeated, rate).rows == expected
    assert "repeat the text of their prompts" in caplog.text
    # One answer that begins as its prompt does is no repetition
    mixed = read_reward_rows([repeating(PAIRS[0]), *PAIRS[1:]], rate).rows
    assert len(mixed[0].ids[0]) > len(expected[0].ids[0]) and mixed[1:] == expected[1:]
    assert f"of 1 of {len(PAIRS)} rows (the first is row 0) begin with the text of their prompts" in caplog.text


@pytest.mark.parametrize("rows", [PAIRS[:5], SCORED[:10:2]], ids=["pairs", "scores"])
@pytest.mark.parametrize("space", ["%s\n", "%s  ", " %s", "\n%s \n"])
def test_white_space_around_a_prompt_does_not_double_others(rows, space):
    """One row with a line break made every row read its prompt twice."""
    rate = judge()
    rows = [row | {"prompt": row["prompt"].strip()} for row in rows]
    expected = read_reward_rows(rows, rate).rows
    data = [repeating(row) for row in rows]
    assert read_reward_rows(data, rate).rows == expected
    data[3] |= {"prompt": space % data[3]["prompt"]}
    assert read_reward_rows(data, rate).rows == expected
    data = [row | {"prompt": space % row["prompt"].strip()} for row in data]
    assert read_reward_rows(data, rate).rows == expected


def test_most_rows_decide_whether_prompts_are_repeated(caplog):
    rate = judge()
    bare = read_reward_rows(PAIRS[:5], rate).rows
    whole = [repeating(pair) for pair in PAIRS[:5]]
    read = read_reward_rows([*whole[:3], *PAIRS[3:5]], rate).rows
    assert read == bare
    assert "of 3 of 5 rows repeat the text of their prompts" in caplog.text and "first is row 3)" in caplog.text
    twice = read_reward_rows([*PAIRS[:3], *whole[3:]], rate).rows
    assert twice[:3] == bare[:3] and len(twice[3].ids[0]) > len(bare[3].ids[0])
    assert "of 2 of 5 rows (the first is row 3) begin with the text of their prompts" in caplog.text


def test_rows_without_a_prompt_decide_nothing():
    rate = judge()
    without = [{"chosen": " good", "rejected": " bad"}] * 2
    (expected,) = read_reward_rows(PAIRS[:1], rate).rows
    for prompt in ({}, {"prompt": None}, {"prompt": ""}, {"prompt": "\n"}):
        assert read_reward_rows([repeating(PAIRS[0]), *(row | prompt for row in without)], rate).rows[0] == expected


def test_chats_of_equal_questions_stay_on_one_side():
    rate = chat_judge()
    rows = [
        {"chosen": [*ASKED, {"role": "assistant", "content": word}], "rejected": ASKED + BAD} for word in ("a", "good")
    ]
    first, second = read_reward_rows(rows, rate).rows
    assert first.key == second.key


def test_a_table_of_rows_is_its_rows():
    pandas = pytest.importorskip("pandas")
    rate = judge()
    assert read_reward_rows(pandas.DataFrame(SCORED, index=range(9, 9 + len(SCORED))), rate) == (
        read_reward_rows(SCORED, rate)
    )


def test_dropout_follows_config_and_seed():
    def first_loss(p, seed):
        rate = judge("bert", hidden_dropout_prob=p)
        config = RewardModelConfig(learning_rate=1e-12, seed=seed)
        return train_reward_model(rate, SCORED[:20], config, held_out=SCORED[20:]).history[0]["reward/loss"]

    assert first_loss(0.5, 1) == first_loss(0.5, 1) != pytest.approx(first_loss(0.5, 2), abs=1e-4)
    assert first_loss(0.5, 1) != pytest.approx(first_loss(0.0, 1), abs=1e-4)


@pytest.mark.heavy
def test_of_lora_only_the_adapter_learns():
    model = make_model("gpt2")
    adapter = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    model = peft.get_peft_model(model, adapter)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    report = train_reward_model(RewardModel(model, make_tokenizer(WORDS)), SCORED, RewardModelConfig(**FAST))
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name, p in model.named_parameters() if p.requires_grad} != set()
    assert report.history[-1]["reward/loss"] < report.history[0]["reward/loss"]


@pytest.mark.heavy
def test_it_is_the_reward_of_an_environment_at_once():
    rate = judge()
    train_reward_model(rate, SCORED, RewardModelConfig(**FAST))
    env = TextVectorEnv(prompts=["a b ."], reward=rate, tokenizer=make_tokenizer(WORDS), num_envs=1, max_new_tokens=1)
    env.reset(seed=0)
    assert env.step([WORDS.index("good")])[1][0] > 0.7


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([], "0 scored answers and 0 pairs"),
        ([SCORED[0], PAIRS[0]], "1 scored answers and 1 pairs"),
        ([{"prompt": "a", "completion": "b"}], "row 0 is"),
        ([SCORED[0] | {"score": "up"}], "row 0 has the score 'up'"),
        ([SCORED[0] | {"score": float("nan")}], "row 0 has the score nan"),
        ([PAIRS[0] | {"margin": "wide"}], "row 0 has the margin 'wide'"),
        ([SCORED[0] | {"completion": []}], "expected both as text, or both as chat"),
        ([PAIRS[0] | {"chosen": [{"role": "user", "content": "a"}] * 2}], "expected both as text, or both as chat"),
        ([SCORED[0] | {"score": None}], "0 training rows and 0 held-out rows are left"),
    ],
)
def test_wrong_rows_are_refused(data, said):
    with pytest.raises(ValueError, match=said):
        train_reward_model(judge(), data)


def test_a_model_of_several_labels_is_refused():
    """And rows of kinds that differ."""
    with pytest.raises(ValueError, match="the model has 2 outputs, expected one"):
        train_reward_model(judge("bert", labels=2), SCORED)
    with pytest.raises(ValueError, match="data holds scores, but held_out holds pairs"):
        train_reward_model(judge(), SCORED[:2], held_out=PAIRS[4:])
    with pytest.raises(ValueError, match=r"RewardModelConfig\.held_out_fraction is 1\.5"):
        RewardModelConfig(held_out_fraction=1.5)


@pytest.mark.slow
def test_real_thumbs_are_learnt_from_scratch():
    """SST-2's sentences by the example's model; the best simple classifiers get about .80 on its dev set."""
    folder = Path(__file__).parents[4] / "shared" / "data" / "sst2"
    if not folder.is_dir():
        pytest.skip(f"there is no {folder}: the data of shared/data is not here")
    example = load_example("reward_model")
    train, dev = (example.sst2(folder / name) for name in ("train.tsv", "dev.tsv"))
    torch.manual_seed(1)
    rate = example.make_reward_model(example.make_tokenizer(example.texts(train), size=4096))
    report = train_reward_model(rate, train, RewardModelConfig(num_epochs=4, learning_rate=1e-3), held_out=dev)
    print(f"accuracy {report.accuracy:.3f}, calibration error {report.calibration_error:.3f}")
    assert report.accuracy >= 0.76 and report.spearman > 0.5


@pytest.mark.parametrize("rows", [
    [{"prompt": "a", "completion": "b", "score": 1.0}, {"prompt": "a", "completion": "c", "score": None}],
    [{"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "a", "chosen": None, "rejected": None}],
    [{"chosen": "b", "rejected": "c", "margin": 1.0}, {"chosen": "b", "rejected": "d"}],
    [{"prompt": "a", "chosen": "b", "rejected": "c"}, {"chosen": "b", "rejected": "d"}],
])  # fmt: skip
def test_a_data_frame_is_read_as_the_list_is(rows):
    pandas = pytest.importorskip("pandas", reason="needs pandas")
    model = judge()
    expected = read_reward_rows(rows, model)
    for frame in (pandas.DataFrame(rows), pandas.DataFrame(rows).convert_dtypes()):
        assert read_reward_rows(frame, model) == expected


def test_terminated_is_no_text():
    row = {"prompt": "a", "completion": "b", "score": 1.0}
    model = judge()
    whole, cut = (read_reward_rows([row | {"terminated": flag}], model).rows[0].ids[0] for flag in (True, False))
    assert cut == whole[:-1]
    for same, flag in ((whole, None), (whole, 1), (cut, np.bool_(False))):
        assert read_reward_rows([row | {"terminated": flag}], model).rows[0].ids[0] == same
    with refused(ValueError, "row 0 has terminated 'False', expected True or False"):
        read_reward_rows([row | {"terminated": "False"}], model)
