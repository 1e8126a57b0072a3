"""A teacher instead of the initial model (distillation): gradients by enumeration, and a vocabulary of its own.

The student chooses uniformly from a, b and <eos>, at most three times. So 27 rows, in which an answer of n tokens
stands 3^(3 - n) times, are its distribution exactly, and an update on them has the expected gradient.
"""

import pytest
import torch

from algos import GRPO, PPO, REINFORCE, RLOO, GRPOConfig, LMPolicy, PPOConfig, REINFORCEConfig, RLOOConfig
from tests.helpers.models import WORDS, make_gpt2, make_llama, make_tokenizer
from tests.helpers.small_agents import gradients, scored
from tests.helpers.text_envs import Script, play, text_env
from textenv import KLPenalty, LanguageModel

EOS, PROMPT, LENGTH = 2, 0, 3
PREFIXES = [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]
"""All states in which the student chooses."""
ANSWERS = [(*p, EOS) for p in PREFIXES] + [(*p, a) for p in PREFIXES if len(p) == LENGTH - 1 for a in (0, 1)]
ROWS = [answer for answer in ANSWERS for _ in range(3 ** (LENGTH - len(answer)))]
MEAN_LENGTH = sum(map(len, ROWS)) / len(ROWS)


def three_tokens():
    return make_tokenizer(["a", "b", "<eos>"], pad="<eos>")


def small_gpt2(seed, **options):
    return make_gpt2(3, seed=seed, bos_token_id=EOS, eos_token_id=EOS, pad_token_id=EOS, **options)


def uniform_student():
    model = small_gpt2(0, n_layer=1, n_embd=16, tie_word_embeddings=False)
    torch.nn.init.zeros_(model.lm_head.weight)
    return LMPolicy(model, three_tokens())


def wider_teacher():
    return LanguageModel(small_gpt2(1, n_layer=3, n_embd=48), three_tokens()).requires_grad_(False)


def next_log_probs(lm, prefix):
    """What `transformers` says of the next token."""
    return lm.model(torch.tensor([[PROMPT, *prefix]])).logits[0, -1].log_softmax(-1)


def token_kl(student, teacher):
    """The KL of a token, its states as they were visited: gamma 0."""
    total = 0.0
    for prefix in PREFIXES:
        log_probs = next_log_probs(student.lm, prefix)
        kl = (log_probs.exp() * (log_probs - next_log_probs(teacher, prefix))).sum()
        total = total + kl * 3.0 ** -len(prefix)  # the probability of the state is a number: no gradient
    return total / MEAN_LENGTH


def answer_kl(student, teacher):
    """The KL of whole answers: gamma 1."""
    total = 0.0
    for answer in ANSWERS:
        log_prob = sum(next_log_probs(student.lm, answer[:t])[a] for t, a in enumerate(answer))
        teacher_log_prob = sum(next_log_probs(teacher, answer[:t])[a] for t, a in enumerate(answer))
        total = total + log_prob.exp() * (log_prob - teacher_log_prob)
    return total / MEAN_LENGTH


COMMON = dict(num_steps=None, num_episodes=len(ROWS), learning_rate=1e-30, max_grad_norm=1e9)
ONE_STEP = dict(num_epochs=1, minibatch_size=len(ROWS))
GROUP = dict(group_size=len(ROWS), aggregation="token_mean")


def ppo(gamma):
    return PPO, PPOConfig(**COMMON, **ONE_STEP, gamma=gamma, gae_lambda=1.0, vf_coef=0.0, normalize_advantage=False)


def reinforce(gamma):
    return REINFORCE, REINFORCEConfig(**COMMON, gamma=gamma, normalize_advantage=False)


def grpo():
    return GRPO, GRPOConfig(**COMMON, **ONE_STEP, **GROUP, scale_by_std=False)


def rloo():
    return RLOO, RLOOConfig(**COMMON, **GROUP)


CASES = {
    "ppo, exact in the loss": (ppo(1.0), "exact", "loss", token_kl),
    "reinforce, exact in the loss": (reinforce(1.0), "exact", "loss", token_kl),
    "grpo, exact in the loss": (grpo(), "exact", "loss", token_kl),
    "rloo, exact in the loss": (rloo(), "exact", "loss", token_kl),
    "ppo, k1 in the reward, gamma 0": (ppo(0.0), "k1", "reward", token_kl),
    "reinforce, k1 in the reward, gamma 0": (reinforce(0.0), "k1", "reward", token_kl),
    "ppo, k1 in the reward, gamma 1": (ppo(1.0), "k1", "reward", answer_kl),
    "reinforce, k1 in the reward, gamma 1": (reinforce(1.0), "k1", "reward", answer_kl),
    "grpo, k1 in the reward": (grpo(), "k1", "reward", answer_kl),
    "rloo, k1 in the reward": (rloo(), "k1", "reward", answer_kl),
}


@pytest.mark.heavy
@pytest.mark.parametrize("name", CASES)
def test_an_update_has_the_gradient_of_the_kl(name):
    (algorithm, config), estimator, place, kl_of = CASES[name]
    student, teacher = uniform_student(), wider_teacher()
    env = text_env(Script([(PROMPT,)], scores=[0.0] * len(ROWS)), tokenizer=student.tokenizer, max_new_tokens=LENGTH)
    rollout = scored(play(env, ROWS), student)
    rollout["group"] = torch.zeros_like(rollout["group"])

    penalty = KLPenalty(teacher, 0.5, estimator, place)
    penalty(rollout, student)
    algorithm(env, student, config, penalty=penalty).update(rollout)
    found = gradients(student)["lm.model.lm_head.weight"]

    # A baseline of the other 26 returns is the mean of all times 27/26, less the own
    scale = len(ROWS) / (len(ROWS) - 1) if kl_of is answer_kl and algorithm is RLOO else 1.0
    by_kl = {}
    for each in (token_kl, answer_kl):
        by_kl[each] = 0.5 * torch.autograd.grad(each(student, teacher), student.lm.model.lm_head.weight)[0]
    torch.testing.assert_close(found, scale * by_kl[kl_of], atol=1e-6, rtol=1e-4)
    assert (by_kl[token_kl] - by_kl[answer_kl]).norm() > 0.1 * by_kl[answer_kl].norm(), "the two cannot be told apart"


OTHER = {
    "the same words in another order": (
        make_gpt2,
        [WORDS[1], WORDS[0], *WORDS[2:]],
        "id 0 is 'b' in the reference and",
    ),
    "more words": (lambda: make_gpt2(11), [*WORDS, "x", "y"], r"11 tokens, the policy 9, and id 9 is 'x'"),
    "fewer words": (lambda: make_gpt2(8), [*WORDS[:5], *WORDS[6:]], r"8 tokens, the policy 9, and id 5 is 'bad'"),
}


@pytest.mark.parametrize(("estimator", "place"), [("k1", "reward"), ("k2", "loss"), ("exact", "loss")])
@pytest.mark.parametrize("name", OTHER)
def test_a_teacher_of_another_vocabulary_is_refused(name, estimator, place):
    make, words, message = OTHER[name]
    teacher = LanguageModel(make(), make_tokenizer(words)).requires_grad_(False)
    policy = LMPolicy(make_gpt2(), make_tokenizer(WORDS))
    agent = PPO(
        text_env(), policy, PPOConfig(num_steps=None, num_episodes=4), penalty=KLPenalty(teacher, 1.0, estimator, place)
    )
    with pytest.raises(ValueError, match=message):
        agent.learn(10)


@pytest.mark.heavy
@pytest.mark.parametrize("make", [make_llama, lambda: make_gpt2(16, n_embd=64)], ids=["Llama", "unused ids"])
def test_a_teacher_may_be_any_model_of_the_vocabulary(make):
    """Its tokenizer may be another object, and its output layer may have ids that no tokenizer has."""
    teacher = LanguageModel(make(), make_tokenizer(WORDS)).requires_grad_(False)
    policy = LMPolicy(make_gpt2(), make_tokenizer(WORDS))
    config = PPOConfig(num_steps=None, num_episodes=64, num_epochs=2, minibatch_size=16, learning_rate=3e-3)
    history = PPO(text_env(), policy, config, penalty=KLPenalty(teacher, 10.0, "exact", "loss")).learn(2_500)
    first, *_, last = [metrics["reference/kl_per_step"] for metrics in history]
    print(f"KL a token {first:.3f} -> {last:.3f}")
    assert first > 0.5 and last < 0.7 * first
