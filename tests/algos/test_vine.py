"""Values by completions: against exact values by enumeration, and the advantages that follow from them."""

import dataclasses

import pytest
import torch

from algos import A2C, PPO, PPOConfig
from tests.helpers.errors import refused
from tests.helpers.models import make_gpt2, make_t5
from tests.helpers.oracle import RESPONSES, Problem, TabularPolicy, response_log_probs, state_index
from tests.helpers.small_agents import cartpole, lm_policy
from tests.helpers.text_envs import GOOD, text_env
from textenv import KLPenalty, TextVectorEnv
from textenv.prompts.prompts import PromptList, TurnLimits

VINE = dict(num_steps=None, num_episodes=8, gamma=1.0, gae_lambda=0.0, vine_samples=256, vine_interval=1)


def exact_value(problem, logits, prompt, prefix, *, beta):
    """Expected return after a prompt and some tokens: rewards and the KL of what is still to be written."""
    log_probs = response_log_probs(logits)[prompt]
    reference = response_log_probs(problem.reference)[prompt]
    chances = []
    returns = []
    for index, response in enumerate(RESPONSES):
        if response[: len(prefix)] != prefix or len(response) == len(prefix):
            continue
        chances.append(log_probs[index])
        returns.append(problem.rewards[prompt, index] - beta * (log_probs[index] - reference[index]))
    weights = torch.stack(chances).softmax(0)

    # The KL of the prefix, which is already paid, is the same in all of them
    table = logits.double().log_softmax(-1) - problem.reference.double().log_softmax(-1)
    states = state_index(torch.tensor([[prompt, *prefix]]))[0]
    paid = sum(table[states[step], token] for step, token in enumerate(prefix))
    return (weights @ torch.stack(returns) + beta * paid).item(), weights, torch.stack(returns)


@pytest.mark.heavy
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_values_are_those_of_the_policy(beta):
    """Within five standard errors of the exact ones, which enumeration gives, for every state of eight answers."""
    problem = Problem(seed=1, beta=0.3)
    logits = problem.reference + 0.5 * torch.randn(problem.reference.shape, generator=torch.Generator().manual_seed(2))
    policy = TabularPolicy(logits)
    penalty = None
    if beta:
        penalty = KLPenalty(TabularPolicy(problem.reference).requires_grad_(False), beta)
    agent = PPO(problem.environment(), policy, penalty=penalty, normalize_advantage=False, learning_rate=1e-3, **VINE)
    rollout = agent.collect()
    if penalty is not None:
        penalty(rollout, policy)
    values = agent.vine(agent, rollout).value
    checked = 0
    for row in range(len(rollout)):
        prompt = int(rollout["observation"][row, 0])
        answer = tuple(rollout["action"][row][rollout["mask"][row]].tolist())
        for step in range(len(answer)):
            expected, weights, returns = exact_value(problem, logits, prompt, answer[:step], beta=beta)
            deviation = (weights @ (returns - weights @ returns).square()).sqrt().item()
            assert abs(values[row, step].item() - expected) < 5 * deviation / 256**0.5 + 1e-5
            checked += 1
    assert checked > 16


def test_the_tokens_of_a_step_share_the_difference_of_two_values():
    """VinePPO's eq. 6, λ = 0: the value after the step, or at the end the return, minus the value before it."""
    env = text_env(num_envs=8, max_new_tokens=6)
    agent = PPO(env, lm_policy(), normalize_advantage=False, **(VINE | dict(vine_samples=3, vine_interval=2)))
    rollout = agent.collect()
    metrics = agent.update(rollout)
    longer_than_a_step = 0
    for row in range(len(rollout)):
        columns = rollout["mask"][row].nonzero().flatten().tolist()
        value = [rollout["value"][row, column].item() for column in columns]
        advantage = [rollout["advantage"][row, column].item() for column in columns]
        for begin in range(0, len(columns), 2):
            step = range(begin, min(begin + 2, len(columns)))
            after = rollout["reward"][row].sum().item()
            if begin + 2 < len(columns):
                after = value[begin + 2]
                longer_than_a_step += 1
            assert [value[i] for i in step] == [value[begin]] * len(step)
            assert [advantage[i] for i in step] == pytest.approx([after - value[begin]] * len(step), abs=1e-6)
    assert longer_than_a_step > 3
    assert metrics["update/steps"] > rollout["mask"].sum()


def test_all_that_is_sampled_counts_as_steps():
    agent = PPO(text_env(), lm_policy(), **(VINE | dict(vine_samples=2, vine_interval=3)))
    (metrics,) = agent.learn(1)
    assert metrics["rollout/steps"] == metrics["steps"] == agent.steps > metrics["update/steps"] > 0


def test_a_completion_is_scored_with_its_beginning_and_within_the_limit():
    """The reward sees the prompt's columns and whole answers, which begin as one of the answers and are not longer."""
    seen = []

    def reward(prompts, completion_ids, number, **_):
        seen.append(list(zip(prompts, completion_ids, number, strict=True)))
        return [float(len(ids)) for ids in completion_ids]

    policy = lm_policy()
    env = TextVectorEnv(
        prompts=[{"prompt": "a b", "number": 1}, {"prompt": "c", "number": 2}], reward=reward,
        tokenizer=policy.tokenizer, num_envs=4, max_prompt_tokens=4, max_new_tokens=5,
    )  # fmt: skip
    agent = PPO(env, policy, **(VINE | dict(vine_samples=4, vine_interval=2)))
    agent.update(agent.collect())
    answers, completions = seen[0], [each for batch in seen[1:] for each in batch]
    assert len(completions) > len(answers)
    beginnings = {
        (prompt, number, tuple(ids[:length])) for prompt, ids, number in answers for length in range(0, len(ids), 2)
    }
    assert {number for *_, number in completions} == {1, 2}
    for prompt, ids, number in completions:
        assert len(ids) <= 5
        assert any((prompt, number, tuple(ids[:length])) in beginnings for length in range(len(ids)))


def test_of_a_score_for_each_token_only_what_is_still_to_come_counts():
    """One for each token: the value of a state is the mean number of tokens that the completions add."""
    lengths = []

    def reward(completion_ids, **_):
        lengths.append([len(ids) for ids in completion_ids])
        return [[1.0] * len(ids) for ids in completion_ids]

    policy = lm_policy()
    env = TextVectorEnv(
        prompts=["a b"], reward=reward, tokenizer=policy.tokenizer, num_envs=4, max_prompt_tokens=4, max_new_tokens=5
    )
    agent = PPO(env, policy, **(VINE | dict(vine_samples=2)))
    rollout = agent.collect()
    values = agent.vine(agent, rollout).value
    whole = torch.tensor(lengths[1]).float().view(-1, 2).mean(1)  # of the whole answers, beginnings included
    expected = []
    for length in rollout["mask"].sum(1).tolist():
        expected += [whole[len(expected) + step].item() - step for step in range(length)]
    assert values[rollout["mask"]].tolist() == pytest.approx(expected)


def test_a_state_whose_completions_are_all_left_out_gets_the_mean_of_its_step():
    """Answers that begin with "good" have no score; their values are those of the other answers' same step."""

    def reward(completion_ids, **_):
        return [None if ids[0] == GOOD and len(ids) > 1 else 1.0 for ids in completion_ids]

    policy = lm_policy()
    env = TextVectorEnv(
        prompts=["a b"], reward=reward, tokenizer=policy.tokenizer, num_envs=8, max_prompt_tokens=4, max_new_tokens=3
    )
    agent = PPO(env, policy, **(VINE | dict(num_episodes=64, vine_samples=2)))
    rollout = agent.collect()
    values = agent.vine(agent, rollout).value
    assert (values[rollout["mask"]] == 1.0).all()


def test_a_rollout_of_another_origin_is_refused():
    agent = PPO(text_env(), lm_policy(), **(VINE | dict(vine_samples=2)))
    first = agent.collect()
    agent.collect()
    with refused(ValueError, "row 0 of the rollout is not the episode 0", "agent.collect"):
        agent.update(first)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fit_value_head": True}, "vine_samples is 2.* fit_value_head is True"),
        ({"whiten_rewards": True}, "vine_samples is 2.* whiten_rewards is True"),
        ({"gamma": 0.9}, "vine_samples is 2, but gamma is 0.9, expected 1"),
        ({"vine_samples": 0}, "vine_samples is 0, expected an integer of at least 1"),
    ],
)
def test_what_does_not_go_with_it_is_told(options, message):
    with refused(ValueError, message):
        PPOConfig(**(dict(num_steps=None, num_episodes=8, gamma=1.0, vine_samples=2) | options))


def test_only_single_turns_of_text_are_branched():
    with refused(ValueError, "only turns of a TextVectorEnv .* not those of a SyncVectorEnv"):
        PPO(cartpole(), gamma=1.0, vine_samples=2)
    with refused(ValueError, "allowed or min_new_tokens"):
        PPO(text_env(min_new_tokens=2), lm_policy(), **VINE)


def test_a2c_takes_it_too():
    agent = A2C(text_env(), lm_policy(), num_steps=None, num_episodes=8, gamma=1.0, vine_samples=2)
    (metrics,) = agent.learn(1)
    assert metrics["update/steps"] > 0


def test_no_value_is_learned():
    """The head of the value stays as it is, and the gradient is the policy's alone."""
    policy = lm_policy()
    before = policy.value_head.weight.detach().clone()
    agent = PPO(text_env(), policy, learning_rate=1e-2, **(VINE | dict(vine_samples=2)))
    agent.learn(20)
    assert agent.config.vf_coef == 0 and torch.equal(policy.value_head.weight, before)


def test_rewards_see_the_training_in_completions_too():
    seen = set()

    def reward(completions, evaluating, **_):
        seen.add(evaluating)
        return [float(len(text)) for text in completions]

    policy = lm_policy()
    env = TextVectorEnv(
        prompts=["a b"], reward=reward, tokenizer=policy.tokenizer, num_envs=4, max_prompt_tokens=4, max_new_tokens=3
    )
    PPO(env, policy, **(VINE | dict(vine_samples=2))).learn(20)
    assert seen == {False}


def test_texts_that_just_fit_the_model_are_completed_and_a_prompts_own_limit_holds():
    """Prompts of 3 tokens and answers of 5 in a model of 8 positions; one prompt limits its answers to 2 tokens."""
    lengths = {}

    class Limited(PromptList):
        def sample_prompts(self, numbers, *, seed):
            prompts = super().sample_prompts(numbers, seed=seed)
            limited = [TurnLimits(max_new_tokens=2) if len(prompt.content) == 1 else TurnLimits() for prompt in prompts]
            return [dataclasses.replace(prompt, limits=limit) for prompt, limit in zip(prompts, limited, strict=True)]

        def score(self, turns):
            for turn in turns:
                lengths.setdefault(len(turn.prompt_ids), set()).add(len(turn.completion_ids))
            return [1.0] * len(turns)

    policy = lm_policy(lambda: make_gpt2(n_positions=8))
    env = TextVectorEnv(
        Limited([(1, 2, 3), (1,)]), tokenizer=policy.tokenizer, num_envs=4, max_prompt_tokens=3, max_new_tokens=5
    )
    PPO(env, policy, **(VINE | dict(num_episodes=16, vine_samples=4))).learn(20)
    assert max(lengths[3]) == 5 and max(lengths[1]) == 2


def test_what_cannot_be_completed_is_refused():
    with refused(ValueError, "vine_samples is for decoder-only models"):
        PPO(text_env(), lm_policy(make_t5), **VINE)
    with refused(ValueError, "stop is .* give token ids"):
        PPO(text_env(stop=["c d"]), lm_policy(), **VINE)
    policy = lm_policy()
    policy.lm.stop = ("c d",)
    with refused(ValueError, "the policy's stop is .* give token ids"):
        PPO(text_env(), policy, **VINE)
    with refused(ValueError, "the scores of step come from elsewhere"):
        PPO(text_env(), lm_policy(), **VINE).step(["a b"] * 8, ["c"] * 8, [1.0] * 8)


def test_completions_are_as_long_as_answers_may_be():
    """Of an environment whose ``max_length`` is reached before ``max_new_tokens``."""
    lengths = []

    def reward(completion_ids):
        lengths.append(max(map(len, completion_ids)))
        return [float(len(ids)) for ids in completion_ids]

    policy = lm_policy()
    env = TextVectorEnv(
        prompts=["a b", "a"], reward=reward, tokenizer=policy.tokenizer, num_envs=4, max_prompt_tokens=3,
        max_new_tokens=20, max_length=9, forbidden=[GOOD],
    )  # fmt: skip
    agent = PPO(env, policy, **(VINE | {"vine_samples": 3}), minibatch_size=8)
    agent.learn(1)
    assert len(lengths) > 1 and max(lengths) <= 8
