"""The text environment by the plain Gymnasium interface, and against its own batched path."""

import logging

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode

from algos import PPO, LMPolicy, PPOConfig, collect
from tests.helpers.models import WORDS, make_gpt2, make_tokenizer
from tests.helpers.text_envs import good, prompt_env, text_arguments
from textenv import KLPenalty, KLReward, LanguageModel, ReferenceReward, TextEnv, TextVectorEnv
from textenv.prompts.prompts import PromptList

EOS = WORDS.index("<eos>")


def test_a_step_appends_one_token():
    env = prompt_env(num_envs=1)
    observation, _ = env.reset(seed=3)
    start = int(observation["length"][0, 0])
    prompt = observation["tokens"][0, :start].tolist()
    assert prompt in [[0, 1], [2], [3, 0, 1]]
    for action in (5, 6):
        observation, reward, terminated, truncated, _ = env.step(np.array([action]))
        assert reward[0] == 0 and not terminated[0] and not truncated[0]
    assert observation["tokens"][0, : observation["length"][0, 0]].tolist() == [*prompt, 5, 6]
    observation, reward, terminated, truncated, info = env.step(np.array([EOS]))
    assert (reward[0], terminated[0], truncated[0]) == (1.0, True, False)
    assert info["end_reason"][0] == "eos" and info["completion"][0] == " good bad"
    assert info["prompt"][0] == " ".join(WORDS[i] for i in prompt)


def test_the_length_limit_truncates_and_still_scores():
    env = prompt_env(num_envs=1)
    env.reset(seed=0)
    for _ in range(5):
        _, reward, terminated, truncated, info = env.step(np.array([5]))
    assert (reward[0], terminated[0], truncated[0]) == (5.0, False, True)
    assert info["end_reason"][0] == "length"


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_autoreset_modes_follow_gymnasium(mode):
    """Slot 0 ends at once, slot 1 goes on."""
    env = prompt_env(autoreset_mode=mode)
    env.reset(seed=0)
    observation, _, terminated, _, info = env.step(np.array([EOS, 1]))
    assert terminated.tolist() == [True, False]
    final = observation
    if mode is AutoresetMode.SAME_STEP:
        final = {key: x[None] for key, x in info["final_obs"][0].items()}
        assert info["final_obs"][1] is None
        assert info["_final_obs"].tolist() == [True, False]
        assert info["final_info"]["end_reason"][0] == "eos"
        assert observation["tokens"][0, observation["length"][0, 0] - 1] != EOS
    assert final["tokens"][0, final["length"][0, 0] - 1] == EOS
    if mode is AutoresetMode.DISABLED:
        with pytest.raises(ValueError, match="reset_mask"):
            env.step(np.array([1, 1]))
        observation, _ = env.reset(options={"reset_mask": np.array([True, False])})
    if mode is AutoresetMode.NEXT_STEP:
        observation, reward, terminated, truncated, _ = env.step(np.array([EOS, 1]))
        assert not terminated[0] and not truncated[0] and reward[0] == 0
    assert observation["tokens"][0, : observation["length"][0, 0]].tolist() in [[0, 1], [2], [3, 0, 1]]
    assert observation["tokens"][1, observation["length"][1, 0] - 1] == 1


def play_by_hand(env, actions, prompts):
    """Play these actions through `TextEnv.step`; returns one list of (tokens, rewards, flags) an episode."""
    episodes = []
    for _ in range(prompts):
        observation, _ = env.reset()
        rewards, done = [], False
        while not done:
            token = actions.pop(0)
            observation, reward, terminated, truncated, _ = env.step(token)
            rewards.append(reward)
            done = terminated or truncated
        tokens = observation["tokens"][: observation["length"][0]].tolist()
        episodes.append((tokens, rewards, terminated, truncated))
    return episodes


def test_stepping_equals_the_batched_path():
    """The same prompts and actions through `TextEnv.step` and through `collect`, whose slots are refilled."""
    policy = LMPolicy(make_gpt2(), make_tokenizer(WORDS), seed=5)
    rollout = collect(prompt_env(num_envs=3), policy, num_episodes=9, seed=11)
    plain = TextEnv(**text_arguments())
    plain.reset(seed=11)
    plain.vector.prompt_order |= {"position": 0}
    actions = rollout["action"][rollout["mask"]].tolist()
    for row, (tokens, rewards, terminated, truncated) in enumerate(play_by_hand(plain, actions, 9)):
        mask = rollout["mask"][row]
        sequence = [*rollout["observation"][row, :1].tolist(), *rollout["action"][row].tolist()]
        assert sequence[: len(tokens)] == tokens
        assert rollout["reward"][row][mask].tolist() == rewards
        assert rollout["terminated"][row].any().item() == terminated
        assert rollout["truncated"][row].any().item() == truncated
        assert int(mask.sum()) == len(rewards)


def test_exactly_the_dealt_episodes_are_collected():
    """Short answers are not favoured: as many rows as asked for, every prompt of a pass once."""
    policy = LMPolicy(make_gpt2(), make_tokenizer(WORDS))
    for num_envs in (1, 4, 20):
        rollout = collect(prompt_env(num_envs=num_envs), policy, num_episodes=12)
        assert rollout.shape[0] == 12
        assert (rollout["terminated"] | rollout["truncated"]).sum(1).tolist() == [1] * 12
        assert rollout["group"][:, 0].tolist() == list(range(12))
        first = rollout["observation"][:, 0].tolist()
        assert sorted(first) == sorted([0, 2, 3] * 4)


def test_deferred_and_immediate_scoring_agree():
    """The batched path scores once, the step path at each end; the reward function sees the same answers."""
    calls = []

    def reward(prompts, completions, completion_ids, **columns):
        calls.append(list(zip(prompts, completions, map(tuple, completion_ids), strict=True)))
        return [float(len(ids)) for ids in completion_ids]

    policy = LMPolicy(make_gpt2(), make_tokenizer(WORDS), seed=2)
    env = prompt_env(reward=reward)
    rollout = collect(env, policy, num_episodes=6)
    (once,) = calls
    calls.clear()
    env = prompt_env(num_envs=1, reward=reward)
    for row in range(6):
        env.task = PromptList([once[row][0]])
        env.task.score = lambda turns: reward(
            [t.prompt_text for t in turns], [t.completion for t in turns], [t.completion_ids for t in turns]
        )
        env.reset(seed=0)
        for token in rollout["action"][row][rollout["mask"][row]].tolist():
            env.step(np.array([token]))
    assert [call[0] for call in calls] == once


def test_forbidden_tokens_are_never_chosen():
    """The reference is masked alike."""
    lm = make_gpt2()
    policy = LMPolicy(lm, make_tokenizer(WORDS))
    env = prompt_env(forbidden=[EOS, 0], num_envs=4, penalty=KLPenalty(policy.reference(), 0.5))
    agent = PPO(env, policy, PPOConfig(num_steps=None, num_episodes=16, minibatch_size=8, learning_rate=1e-3))
    rollout = collect(env, policy, num_episodes=16)
    assert not torch.isin(rollout["action"][rollout["mask"]], torch.tensor([EOS, 0])).any()
    assert (rollout["mask"].sum(1) == 5).all() and rollout["truncated"].any(1).all()
    torch.testing.assert_close(policy.evaluate(rollout).log_prob, rollout["log_prob"], atol=1e-5, rtol=0)
    logits = lm(rollout["observation"]).logits.detach()[..., : len(WORDS)]
    logits[..., [EOS, 0]] = -torch.inf
    expected = logits.log_softmax(-1).gather(-1, rollout["action"].clamp(max=8)[..., None])[..., 0]
    mask = rollout["mask"]
    torch.testing.assert_close(rollout["log_prob"][mask], expected[mask], atol=1e-5, rtol=0)
    agent.penalty(rollout, policy)
    assert rollout["kl"].abs().max() < 1e-5
    with pytest.raises(ValueError, match="forbidden"):
        env.reset(seed=0)
        env.step(np.full(4, EOS))


def test_prompt_and_completion_make_the_text():
    """As Llama's does: decoded alone, an answer would lose the space between it and the prompt."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["▁the", "▁film", "▁is", "▁good", "</s>", "<s>"]
    inner = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="▁the"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", bos_token="<s>")
    seen = []

    def reward(prompts, completions, **columns):
        seen.extend(prompt + answer for prompt, answer in zip(prompts, completions, strict=True))
        return [0.0] * len(prompts)

    env = TextVectorEnv(prompts=["the film", [5, 0, 1]], reward=reward, tokenizer=tokenizer)
    for _ in range(2):
        env.reset()
        for token in (2, 3, 4):
            env.step(np.array([token]))
    assert seen == ["the film is good"] * 2


# --- the KL penalty's three ways ---------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_stepwise_kl_equals_batched_kl_to_1e_5_a_token(temperature):
    tokenizer = make_tokenizer(WORDS)
    policy = LMPolicy(make_gpt2(seed=1), tokenizer, temperature=temperature)
    reference = LanguageModel(make_gpt2(seed=2), tokenizer, temperature=temperature).requires_grad_(False)
    env = prompt_env(num_envs=3, forbidden=[4])
    rollout = collect(env, policy, num_episodes=8)
    score = rollout["reward"].clone()
    KLPenalty(reference, 0.3)(rollout, policy)
    for row in range(8):
        mask = rollout["mask"][row]
        start = int(mask.int().argmax()) + 1
        ids = rollout["observation"][row, :start].tolist()
        deck = PromptList([ids])
        deck.score = lambda turns, row=row: [score[row].sum().item()]
        single = TextEnv(deck, tokenizer=tokenizer, max_prompt_tokens=4, max_new_tokens=5, forbidden=[4])
        stepwise = KLReward(single, reference, 0.3)
        stepwise.reset(seed=0)
        for t in torch.nonzero(mask)[:, 0].tolist():
            action = {"token": rollout["action"][row, t].item(), "log_prob": rollout["log_prob"][row, t].item()}
            _, reward, _, _, info = stepwise.step(action)
            assert info["kl"] == pytest.approx(rollout["kl"][row, t].item(), abs=1e-5)
            assert reward == pytest.approx(rollout["reward"][row, t].item(), abs=1e-5)
    assert rollout["kl"].abs().sum() > 1


def test_the_reference_reward_is_exact_over_one_step():
    """E[r - β·KL] = E[r + β·log π_ref] + β·H(π) by enumeration; ReferenceReward pays the middle term."""
    tokenizer, beta = make_tokenizer(WORDS), 0.4
    reference = LanguageModel(make_gpt2(seed=2), tokenizer).requires_grad_(False)
    env = TextEnv(prompts=["a b"], reward=good, tokenizer=tokenizer, max_prompt_tokens=4, max_new_tokens=1)
    wrapped = ReferenceReward(env, reference, beta)
    policy = torch.softmax(torch.randn(9, generator=torch.Generator().manual_seed(0)), 0).double()
    paid, plain, kl = 0.0, 0.0, 0.0
    for token in range(9):
        wrapped.reset(seed=0)
        _, reward, _, _, info = wrapped.step(token)
        paid += policy[token].item() * reward
        plain += policy[token].item() * float(token == 5)
        kl += policy[token].item() * (policy[token].log().item() - info["reference_log_prob"])
    entropy = -(policy * policy.log()).sum().item()
    assert plain - beta * kl == pytest.approx(paid + beta * entropy, abs=1e-6)


def test_wrapper_and_penalty_together_are_refused():
    tokenizer = make_tokenizer(WORDS)
    reference = LanguageModel(make_gpt2(), tokenizer)
    env = TextEnv(prompts=["a"], reward=good, tokenizer=tokenizer, penalty=KLPenalty(reference, 0.1))
    with pytest.raises(ValueError, match="subtracted twice"):
        KLReward(env, reference, 0.1)
    plain = TextEnv(prompts=["a"], reward=good, tokenizer=tokenizer)
    vector = gymnasium.vector.SyncVectorEnv([lambda: KLReward(plain, reference, 0.1)])
    with pytest.raises(ValueError, match="KLReward"):
        PPO(vector, LMPolicy(make_gpt2(), tokenizer), PPOConfig(), penalty=KLPenalty(reference, 0.1))


@pytest.mark.parametrize("wrapper", [KLReward, ReferenceReward])
def test_a_reference_of_another_vocabulary_is_refused(wrapper):
    env = TextEnv(prompts=["a"], reward=good, tokenizer=make_tokenizer(WORDS))
    reference = LanguageModel(make_gpt2(), make_tokenizer([*WORDS[1::-1], *WORDS[2:]]))
    with pytest.raises(ValueError, match="id 0 is 'b' in the reference and 'a' in the policy"):
        wrapper(env, reference, 0.1)


# --- registered environments ------------------------------------------------------------------------------------


@pytest.mark.heavy
@pytest.mark.parametrize(
    "name", ["Periods", "Reviews", "Copy", "Sort", "GuessNumber", "Calculator", "TwentyQuestions", "ReasoningGym"]
)
def test_check_env_passes_without_a_warning(name):
    arguments = {"dataset": "chain_sum"} if name == "ReasoningGym" else {}
    env = gymnasium.make(f"textenv/{name}-v0", render_mode="ansi", **arguments).unwrapped
    check_env(env)  # pytest raises the warnings that it gives
    assert env.render()


def test_make_vec_returns_the_native_batched_class():
    env = gymnasium.make_vec("textenv/Periods-v0", num_envs=3, k=2)
    assert isinstance(env, TextVectorEnv) and env.num_envs == 3
    assert env.task.k == 2


@pytest.mark.heavy
def test_sync_vector_env_equals_the_native_one():
    def single():
        return gymnasium.make("textenv/Copy-v0")

    native = gymnasium.make_vec("textenv/Copy-v0", num_envs=1)
    sync = gymnasium.vector.SyncVectorEnv([single])
    ours, theirs = native.reset(seed=4)[0], sync.reset(seed=4)[0]
    for token in [300, 12, 40] * 8:
        assert all((ours[key] == theirs[key]).all() for key in ours)
        (ours, *one), (theirs, *two) = native.step(np.array([token])), sync.step(np.array([token]))
        assert [x.tolist() for x in one[:3]] == [x.tolist() for x in two[:3]]


@pytest.mark.heavy
def test_whole_episodes_fill_many_slots(caplog):
    """In one slot, they take 14 times as long; the answers are the same."""

    def generated(**options):
        tokenizer = make_tokenizer(WORDS)
        policy = LMPolicy(make_gpt2(), tokenizer, seed=1)
        reward = lambda completions: [float(len(text)) for text in completions]  # noqa: E731
        env = TextVectorEnv(prompts=["a b", "c"], reward=reward, tokenizer=tokenizer, **options)
        slots = len(env.start_episodes(100)["tokens"])
        return env, slots, collect(env, policy, num_episodes=100, seed=1)["action"]

    env, slots, actions = generated()
    assert (env.num_envs, slots, len(env.reset()[0]["tokens"])) == (1, 64, 1)
    assert "one slot" not in caplog.text
    with caplog.at_level(logging.WARNING):
        _, slots, same = generated(num_envs=1)
    assert slots == 1 and torch.equal(actions, same)
    assert "100 episodes are generated one after another, in one slot: num_envs=64" in caplog.text
    assert generated(num_envs=5)[1] == 5
