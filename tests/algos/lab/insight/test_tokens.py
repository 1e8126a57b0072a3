"""Pages of tokens: numbers, escaping, turns, and the command that writes them."""

import json
import re

import pytest
import torch

from algos import LMPolicy
from algos.lab.insight.tokens import COLUMNS, measured, page, show_tokens
from tests.helpers.errors import refused
from tests.helpers.models import WORDS, make_gpt2, make_tokenizer
from tests.helpers.small_agents import lm_policy
from tests.helpers.text_envs import make_env
from textenv import KLPenalty, Rewards


def read(page):
    """The samples in a page."""
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])["samples"]


def played(policy, **options):
    env = make_env(**options)
    env.penalty = KLPenalty(LMPolicy(make_gpt2(seed=1), policy.tokenizer).lm, 0.5)
    return env


@pytest.fixture(scope="module")
def policy():
    return lm_policy()


def test_a_page_has_the_numbers_of_each_token(policy, tmp_path):
    env, path = played(policy), tmp_path / "out.html"
    show_tokens(env, policy, str(path), config={}, num_episodes=4, seed=3)
    found, rollout = read(path.read_text()), env_rollout(env, policy, seed=3)
    for row, sample in enumerate(found):
        mask = rollout["mask"][row]
        for name in COLUMNS:
            values = [x for x, own in zip(sample["tokens"][name], sample["tokens"]["chosen"], strict=True) if own]
            torch.testing.assert_close(torch.tensor(values), rollout[name][row][mask], atol=1e-4, rtol=0)
        assert sample["kl"] == pytest.approx(rollout["kl"][row][mask].sum().item(), abs=1e-4)
    assert len(found) == 4 and {sample["prompt"] for sample in found} <= {"a b", "c", "d a b"}
    assert not re.search(r"\bsrc=|https?://(?!www.w3.org/2000/svg)", path.read_text()), "it loads nothing"


def env_rollout(env, policy, **options):
    from algos import evaluate

    return measured(evaluate(env, policy, num_episodes=4, **options).rollout, policy, penalty=env.penalty, config={})


def test_quantities_are_what_their_names_say(policy):
    env = played(policy)
    rollout, other = env_rollout(env, policy), env.penalty.reference
    mask = rollout["mask"]
    with torch.no_grad():
        both = [
            model.logits(model.hidden(rollout["observation"]))[mask].log_softmax(-1) for model in (policy.lm, other)
        ]
    gap = both[0] - both[1]
    taken = gap.gather(1, rollout["action"][mask][:, None])[:, 0]
    torch.testing.assert_close(rollout["log_ratio"][mask], taken, atol=1e-4, rtol=0)
    torch.testing.assert_close(rollout["kl"][mask], (both[0].exp() * gap).sum(1), atol=1e-4, rtol=0)
    torch.testing.assert_close(rollout["entropy"][mask], -(both[0].exp() * both[0]).sum(1), atol=1e-4, rtol=0)
    first = mask.int().argmax(1, keepdim=True)
    paid = (rollout["reward"] - 0.5 * torch.where(mask, rollout["log_ratio"], 0)).sum(1)
    at_start = (rollout["advantage"] + rollout["value"]).gather(1, first)[:, 0]
    torch.testing.assert_close(at_start, paid, atol=1e-4, rtol=0)  # gamma = lambda = 1: the penalised return


def test_markup_in_tokens_and_reward_names_is_text():
    evil = "<script>alert(1)</script>"
    words = [*WORDS[:5], evil, "bad", "<eos>", "<pad>"]

    def rewarded(prompts, completions, **columns):
        return [1.0] * len(completions)

    tokenizer = make_tokenizer(words)
    policy = LMPolicy(make_gpt2(), tokenizer)
    env = played(
        policy,
        tokenizer=tokenizer,
        reward=Rewards({"<img>": rewarded, "rewarded_too": rewarded_too}),
        prompts=[f"{evil} a"],
    )
    rollout = env_rollout(env, policy)
    text = page(rollout, tokenizer, env.samples(range(4)))
    assert text.count("<script") == 2 and "<img" not in text and "alert(1)</script>" not in text
    sample = read(text)[0]
    assert evil in sample["prompt"] and {"<img>", "rewarded_too"} == set(sample["parts"]), "the parts of the reward"


def rewarded_too(prompts, completions, **columns):
    return [2.0] * len(completions)


def test_without_a_reference_there_is_no_kl(policy, capsys):
    """And a wrong name says which ones there are."""
    env = make_env()
    show_tokens(env, policy, "entropy", config={}, num_episodes=2)
    printed = capsys.readouterr().out
    assert printed.count("episode") == 2 and "entropy, nats" in printed and "\x1b[4;97;48;2;0;200;0m" in printed
    with refused(ValueError, "tokens is 'kl'", "entropy, value, advantage, reward"):
        show_tokens(env, policy, "kl", config={}, num_episodes=2)


def test_a_conversation_has_a_block_for_each_turn(policy, tmp_path):
    from tests.helpers.text_envs import Script, text_env

    class Asks(Script):
        def reply(self, turns):
            return ["c c" if turn.index < 2 else None for turn in turns]

    env = text_env(Asks(), max_turns=3, max_new_tokens=2)
    path = tmp_path / "out.html"
    show_tokens(env, policy, str(path), config={}, num_episodes=1)
    (sample,) = read(path.read_text())
    tokens = sample["tokens"]
    assert tokens["chosen"] == [True] * 2 + [False] * 2 + [True] * 2 + [False] * 2 + [True] * 2
    replies = [text.strip() for text, chosen in zip(tokens["text"], tokens["chosen"], strict=True) if not chosen]
    assert replies == ["c", "c", "c", "c"]
