"""`RewardModel` against `transformers` run row by row without padding."""

import logging

import pytest
import torch
import transformers as tr

from tests.helpers.models import WORDS, make_tokenizer
from tests.helpers.reward_models import EOS, NAMES, PAD, make_model
from textenv import RewardModel, Rewards, TextVectorEnv
from textenv.envs.task import FunctionTask
from textenv.rewards import clip
from textenv.tasks.builtin import Reviews

ROWS = [[1, 2, 3, 5, 0, 2], [4], [6, 0, EOS], [EOS], [3, PAD], [2] * 11, [0, EOS, 1, EOS]]


@torch.no_grad()
def alone(model, ids):
    """Logits of one row; without a pad id `transformers` reads the last column."""
    before, model.config.pad_token_id = model.config.pad_token_id, None
    try:
        return model(input_ids=torch.tensor([ids])).logits[0].float()
    finally:
        model.config.pad_token_id = before


def padded(rows, left, right, filler):
    width = max(map(len, rows)) + left + right
    ids, mask = torch.full((len(rows), width), filler), torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        start = left if right else width - len(row)
        ids[i, start : start + len(row)], mask[i, start : start + len(row)] = torch.tensor(row), 1
    return ids, mask


@pytest.mark.heavy
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pad", [PAD, EOS, None])
def test_a_row_earns_what_it_earns_alone(name, dtype, pad):
    """Whatever pads it and whatever it ends with."""
    model = make_model(name, pad=pad).to(dtype)
    tokenizer = make_tokenizer(WORDS, pad=None if pad is None else WORDS[pad])
    expected = torch.stack([alone(model, row)[0] for row in ROWS])
    spread = expected.max() - expected.min()
    assert spread > 0.05
    reward_model = RewardModel(model, tokenizer)
    for pads in (0, 1, 4, 7):
        for left, right in ((pads, 0), (0, pads), (pads, 7 - pads)):
            for filler in (PAD, EOS, 3):
                found = reward_model.score_ids(*padded(ROWS, left, right, filler))
                tolerance = 3e-5 if dtype == torch.float32 else 0.03 * spread
                torch.testing.assert_close(found, expected, atol=float(tolerance), rtol=0)
    assert found.dtype == torch.float32 and next(model.parameters()).dtype == dtype
    assert model.config.pad_token_id == (pad if name in ("gpt2", "llama") else (1 if name == "roberta" else PAD))


def test_transformers_reads_another_token_here():
    """Pad is EOS and a text ends with EOS: without our care the last token is taken for padding."""
    model = make_model("gpt2", pad=EOS)
    ids, mask = padded([[6, 0, EOS], [1, 2, 3, 4]], 0, 1, EOS)
    wrong = model(input_ids=ids, attention_mask=mask).logits[0, 0].detach()
    assert abs(wrong - alone(model, [6, 0, EOS])[0]) > 1e-3


@pytest.mark.parametrize("batch_size", [1, 2, 8, 100])
def test_batches_come_back_in_order(batch_size):
    model, seen = make_model("llama"), []
    model.register_forward_pre_hook(
        lambda module, args, given: seen.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    rows = [[last] * length for length in (5, 1, 9) for last in range(len(WORDS))]  # every id ends a row
    found = RewardModel(model, make_tokenizer(WORDS), batch_size=batch_size).score_ids(*padded(rows, 0, 1, PAD))
    assert max(n for n, _ in seen) == min(batch_size, len(WORDS) - 1) and sum(n for n, _ in seen) == len(rows)
    assert [width for _, width in seen] == sorted(width for _, width in seen)
    torch.testing.assert_close(found, torch.stack([alone(model, row)[0] for row in rows]), atol=1e-5, rtol=0)


def test_a_score_is_raw_a_probability_or_log_odds():
    tokenizer, row = make_tokenizer(WORDS), torch.tensor([[1, 2, 3]])
    model = make_model("bert", labels=2)
    first, second = alone(model, [1, 2, 3])

    def score(**options):
        return RewardModel(model, tokenizer, **options).score_ids(row, torch.ones_like(row)).item()

    assert score() == score(label="Positive") == score(label=1) == pytest.approx(torch.sigmoid(second - first).item())
    assert score(label="negative") == pytest.approx(1 - score(), abs=1e-5)
    assert score(log_odds=True) == pytest.approx((second - first).item(), rel=1e-5)
    assert score(label=0, log_odds=True) == pytest.approx((first - second).item(), rel=1e-5)
    model.config.problem_type = "multi_label_classification"
    assert score() == pytest.approx(second.sigmoid().item()) and score(log_odds=True) == pytest.approx(second.item())
    three = make_model("bert", labels=3)
    logits = alone(three, [1, 2, 3])
    found = RewardModel(three, tokenizer, label=2, log_odds=True).score_ids(row, torch.ones_like(row))
    assert found.item() == pytest.approx(logits.softmax(-1)[2].logit().item(), rel=1e-4)


@pytest.mark.parametrize(
    ("labels", "options", "said"),
    [
        (1, {"label": "positive"}, "one output"),
        (1, {"log_odds": True}, "no log-odds"),
        (3, {}, "'positive', expected one of .'label_0', 'label_1'"),
        (2, {"label": 2}, "label is 2"),
        (1, {"batch_size": 0}, "at least 1"),
    ],
)
def test_a_label_that_is_not_there_is_refused(labels, options, said):
    with pytest.raises(ValueError, match=said):
        RewardModel(make_model("bert", labels=labels), make_tokenizer(WORDS), **options)


def test_a_chat_is_rendered_by_the_models_template():
    """Prompt and completion are one text."""
    tokenizer = make_tokenizer(WORDS)
    model = make_model("gpt2")
    rate = RewardModel(model, tokenizer)
    expected = [alone(model, [0, 1, 5])[0].item(), alone(model, [2])[0].item()]
    assert rate(prompts=["a b", "c"], completions=[" good", ""]) == pytest.approx(expected, abs=1e-5)
    chat = [{"role": "user", "content": "a b"}]
    answer = [{"role": "assistant", "content": "good"}]
    with pytest.raises(ValueError, match="no chat template"):
        rate(prompts=[chat], completions=[answer])
    rate.tokenizer.chat_template = (
        "{% for m in messages %}{{ 'c ' if m.role == 'user' else 'd ' }}{{ m.content }} {% endfor %}<eos>"
    )
    rendered = [2, 0, 1, 3, 5, EOS]
    found = rate(prompts=[chat, "c"], completions=[answer, ""], answer=[1, 2], terminated=[True, True])
    assert found == pytest.approx([alone(model, rendered)[0].item(), expected[1]], abs=1e-5)
    assert getattr(tokenizer, "chat_template", None) is None  # the caller's tokenizer is not touched


def test_a_chat_has_only_its_templates_special_tokens():
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tokenizer(WORDS, bos="a")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="a $A", special_tokens=[("a", 0)])
    tokenizer.chat_template = "a {% for m in messages %}{{ m.content }} {% endfor %}"
    model = make_model("gpt2")
    chat, answer = [{"role": "user", "content": "b"}], [{"role": "assistant", "content": "good"}]
    found = RewardModel(model, tokenizer)([chat, "b"], [answer, " good"])
    assert found == pytest.approx([alone(model, [0, 1, 5])[0].item()] * 2, abs=1e-5)


def test_a_system_message_that_its_template_leaves_out_is_warned_of(caplog):
    tokenizer = make_tokenizer(WORDS)
    tokenizer.name_or_path = "judge"
    tokenizer.chat_template = "{% for m in messages if m.role != 'system' %}{{ m.content }} {% endfor %}"
    rate = RewardModel(make_model("gpt2"), tokenizer)
    chat = [{"role": "user", "content": "a"}]
    expected = rate([chat], ["good"])
    assert "does not write" not in caplog.text
    assert rate([[{"role": "system", "content": "b"}, *chat]], ["good"]) == expected
    assert "the chat template of judge does not write system messages" in caplog.text


@pytest.mark.parametrize("name", NAMES)
def test_a_long_text_loses_its_beginning(name, caplog):
    """But no special token; the log says so once."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tokenizer(WORDS, bos="a")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="a $A", special_tokens=[("a", 0)])
    model = make_model(name, positions=16)
    rate = RewardModel(model, tokenizer)
    most = 14 if name == "roberta" else 16
    with caplog.at_level(logging.WARNING):
        scores = rate.scores(["b " * 30 + "good", "c " * 4000 + "d"])
    assert [record.getMessage() for record in caplog.records] == [
        f"a text of 32 tokens is cut at its beginning: the model reads {most}"
    ]
    expected = [alone(model, [0] + [word] * (most - 2) + [last])[0] for word, last in ((1, 5), (2, 3))]
    torch.testing.assert_close(scores, torch.stack(expected), atol=1e-5, rtol=0)
    assert tokenizer.truncation_side == "right"


def test_models_name_their_limit_in_other_ways(caplog):
    """XLNet's -1 is no limit, by which the first token was dropped; MPT calls it ``max_seq_len``."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer(WORDS)
    sizes = {"vocab_size": len(WORDS), "num_labels": 1, "d_model": 32}
    ids = [1, 2, 3, 5] * 5
    tokens = {"prompts": ["?"], "completions": ["?"], "prompt_ids": [ids[:10]], "completion_ids": [ids[10:]]}

    xlnet = tr.XLNetForSequenceClassification(tr.XLNetConfig(**sizes, n_layer=2, n_head=4, d_inner=48)).eval()
    paid = RewardModel(xlnet, tokenizer)(**tokens, tokenizer=tokenizer)
    assert paid == pytest.approx([alone(xlnet, ids)[0].item()], abs=1e-6)
    assert "cut at its beginning" not in caplog.text

    mpt = tr.MptForSequenceClassification(tr.MptConfig(**sizes, n_heads=4, n_layers=2, max_seq_len=16)).eval()
    paid = RewardModel(mpt, tokenizer)(**tokens, tokenizer=tokenizer)
    assert paid == pytest.approx([alone(mpt, ids[-16:])[0].item()], abs=1e-6)
    assert "cut at its beginning" in caplog.text


def test_an_empty_text_is_scored():
    rate = RewardModel(make_model("llama"), make_tokenizer(WORDS))
    assert rate([], []) == [] and torch.isfinite(rate.scores(["", "a", ""])).all()
    with pytest.raises(ValueError, match="all of row 1"):
        rate.score_ids(torch.tensor([[1, 2], [PAD, PAD]]), torch.tensor([[1, 1], [0, 0]]))


def test_a_folder_is_loaded_in_its_own_dtype(tmp_path):
    model, tokenizer = make_model("llama").to(torch.bfloat16), make_tokenizer(WORDS)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    rate = RewardModel.load(tmp_path)
    assert rate.model.dtype == torch.bfloat16
    env = TextVectorEnv(prompts=["a b"], reward=rate, tokenizer=tokenizer, num_envs=1, max_new_tokens=3)
    assert isinstance(env.task, FunctionTask)
    env.reset(seed=0)
    env.step([5])
    reward = env.step([EOS])[1]
    assert reward[0] == pytest.approx(rate.score_rows([[0, 1, 5, EOS]]).item(), abs=1e-4) != 0


def paying(rate, tokenizer, actions, **options):
    """What an environment pays for an answer of these ids to "a b"."""
    env = TextVectorEnv(prompts=["a b"], reward=rate, tokenizer=tokenizer, num_envs=1, max_new_tokens=3, **options)
    env.reset(seed=0)
    for action in actions:
        reward = env.step([action])[1]
    return reward[0]


@pytest.mark.parametrize("wrap", [lambda f: f, lambda f: Rewards({"rate": f}), lambda f: clip(f, -1e9, 1e9)])
def test_ids_are_read_where_tokenizers_agree(wrap):
    """Ids that no text would give: an unknown piece, EOS in the middle of a prompt, and the end of the answer."""
    rate = RewardModel(make_model("llama"), make_tokenizer(WORDS))
    for answer in ([5, EOS], [EOS], [5, 0, 5]):
        expected = alone(rate.model, [0, 1, *answer])[0].item()
        assert paying(wrap(rate), make_tokenizer(WORDS), answer) == pytest.approx(expected, abs=1e-4)
    ids = {"prompts": ["?"], "completions": ["?"], "prompt_ids": [[3, EOS]], "completion_ids": [[2]]}
    assert rate(**ids, tokenizer=make_tokenizer(WORDS)) == pytest.approx([alone(rate.model, [3, EOS, 2])[0].item()])


def test_texts_are_read_where_tokenizers_differ():
    """The policy's ids are the reward model's backwards, so ids would be another text."""
    rate, other = RewardModel(make_model("llama"), make_tokenizer(WORDS)), make_tokenizer(WORDS[::-1])
    good, end = 8 - 5, 8 - EOS
    for trained, expected in ((False, [0, 1, 5]), (True, [0, 1, 5, EOS])):
        rate.model.config.trained_with_eos = trained
        assert paying(rate, other, [good, end]) == pytest.approx(alone(rate.model, expected)[0].item(), abs=1e-4)
    unended = alone(rate.model, [0, 1, 5, 5, 5])[0].item()
    assert paying(rate, other, [good] * 3) == pytest.approx(unended, abs=1e-4)


@pytest.mark.parametrize("reads_ends", [False, True])
@pytest.mark.parametrize("words", [WORDS, WORDS[::-1]], ids=["ids", "texts"])
def test_an_answer_that_a_stop_text_ended_is_read_without_it(words, reads_ends):
    """The full stop, word 4, is no end to this model, which reads EOS instead if it was trained with it."""
    rate = RewardModel(make_model("llama"), make_tokenizer(WORDS))
    rate.model.config.trained_with_eos = reads_ends
    tokenizer = make_tokenizer(words)
    good, stop = tokenizer.convert_tokens_to_ids([WORDS[5], WORDS[4]])
    end = [EOS] if reads_ends else []
    expected = alone(rate.model, [0, 1, 5, *end])[0].item()
    assert paying(rate, tokenizer, [good, stop], stop=[WORDS[4]]) == pytest.approx(expected, abs=1e-4)


def test_an_answer_without_ids_is_read_as_text():
    """Checks of rewards ask about one; the policy itself writes at least one token."""
    rate = RewardModel(make_model("llama"), make_tokenizer(WORDS))
    ids = {"prompt_ids": [[0, 1]], "completion_ids": [[]], "terminated": [False], "tokenizer": make_tokenizer(WORDS)}
    assert rate(["a b"], [""], **ids) == pytest.approx([alone(rate.model, [0, 1])[0].item()], abs=1e-4)


def test_ids_that_are_too_many_lose_their_beginning(caplog):
    rate = RewardModel(make_model("gpt2", positions=8), make_tokenizer(WORDS))
    ids = [[1, 2, 3, 4, 5, 6], [0, 1, 2, 3]]
    found = rate(["?"], ["?"], prompt_ids=ids[:1], completion_ids=ids[1:], tokenizer=make_tokenizer(WORDS))
    assert found == pytest.approx([alone(rate.model, [*ids[0], *ids[1]][-8:])[0].item()], abs=1e-5)
    assert "a text of 10 tokens is cut at its beginning: the model reads 8" in caplog.text


def test_reviews_pay_the_probability_of_positive():
    """As before there was a RewardModel: the softmax of the embedded classifier, one text at a time."""
    from textenv.embedded import embedded_folder, openings

    folder = embedded_folder() / "classifier"
    model = tr.AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = tr.AutoTokenizer.from_pretrained(folder)
    texts = [opening + end for opening in openings()[:20] for end in (" was a real joy.", " was", " bores")]
    with torch.no_grad():
        expected = [model(**tokenizer(text, return_tensors="pt")).logits.softmax(-1)[0, 1] for text in texts]
    torch.testing.assert_close(Reviews().classifier.scores(texts), torch.stack(expected), atol=1e-5, rtol=0)
