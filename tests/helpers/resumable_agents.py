"""An agent of every algorithm that can stop and resume, and its training in another process."""

import gymnasium as gym
import numpy as np
import torch

import textenv  # noqa: F401 (registers the environments)
from algos import (
    A2C,
    DQN,
    GRPO,
    PPO,
    REINFORCE,
    SAC,
    TD3,
    TRPO,
    A2CConfig,
    DQNConfig,
    GRPOConfig,
    GSDEPolicy,
    LMPolicy,
    LSTMPolicy,
    MLPPolicy,
    MultiInputPolicy,
    PPOConfig,
    QPolicy,
    REINFORCEConfig,
    REINFORCEPlusPlus,
    REINFORCEPlusPlusConfig,
    SACGSDEPolicy,
    SACPolicy,
    TD3Policy,
    TRPOConfig,
    WordsPolicy,
)
from algos.finetuning.text_loss import TextLoss
from algos.losses import ClipCovLoss
from tests.helpers.models import WORDS, make_gpt2, make_t5, make_tokenizer
from textenv import ByPassRate, Curriculum, KLPenalty, LanguageModel, ProgramVectorEnv, TextVectorEnv
from textenv.kl.coefficients import AdaptiveCoefficient
from textenv.rewards import Normalize


def control(env_id, **options):
    return gym.make_vec(env_id, num_envs=4, **options)


def mlp(env, **options):
    return MLPPolicy(env.single_observation_space, env.single_action_space, hidden=(8, 8), **options)


def ppo_cartpole():
    env = control("CartPole-v1")
    config = PPOConfig(num_steps=16, minibatch_size=32, normalize_rewards=True, final_learning_rate=0.0)
    return PPO(env, mlp(env, normalize_observations=True), config)


def ppo_sync():
    env = control("CartPole-v1", vectorization_mode="sync", vector_kwargs={"autoreset_mode": "SameStep"})
    return PPO(env, mlp(env), PPOConfig(num_steps=16, minibatch_size=32))


def ppo_wrapped():
    """Gymnasium's own normalisers keep their statistics in objects."""
    env = gym.wrappers.vector.NormalizeReward(gym.wrappers.vector.NormalizeObservation(control("CartPole-v1")))
    return PPO(env, mlp(env), PPOConfig(num_steps=16, minibatch_size=32))


def ppo_sde():
    env = control("Pendulum-v1")
    policy = GSDEPolicy(env.single_observation_space, env.single_action_space, hidden=(8, 8), sde_sample_freq=5)
    return PPO(env, policy, PPOConfig(num_steps=16, minibatch_size=32))


def ppo_lstm():
    env = control("CartPole-v1")
    policy = LSTMPolicy(env.single_observation_space, env.single_action_space, hidden=8)
    return PPO(env, policy, PPOConfig(num_steps=16, minibatch_size=2))


class Camera(gym.Env):
    """Random images and numbers, by a generator that is saved."""

    observation_space = gym.spaces.Dict(
        {"camera": gym.spaces.Box(0, 255, (6, 7, 3), np.uint8), "speed": gym.spaces.Box(-1, 1, (3,))}
    )
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.show(), {}

    def step(self, action):
        self.time += 1
        return self.show(), float(action), self.time == 7, False, {}

    def show(self):
        camera = self.np_random.integers(0, 256, (6, 7, 3), dtype=np.uint8)
        return {"camera": camera, "speed": self.np_random.uniform(-1, 1, 3).astype(np.float32)}

    def state_dict(self):
        return {"generator": self.np_random, "time": self.time}

    def load_state_dict(self, state):
        self.np_random, self.time = state["generator"], state["time"]


def ppo_images():
    """A camera and numbers, whose rollouts are packed."""
    env = gym.vector.SyncVectorEnv([Camera] * 4)
    sizes = {"hidden": (8,), "image_features": 4}
    policy = MultiInputPolicy(
        env.single_observation_space, env.single_action_space, normalize_observations=True, **sizes
    )
    return PPO(env, policy, PPOConfig(num_steps=16, minibatch_size=32))


def ppo_words():
    """A language model plays control; it remembers what it, and its frozen first layer, have computed."""
    env = control("FrozenLake-v1", vectorization_mode="sync", is_slippery=False)
    model = make_gpt2()
    for part in (model.transformer.wte, model.transformer.wpe, model.transformer.h[0]):
        part.requires_grad_(False)
    policy = WordsPolicy.of(env, LanguageModel(model, make_tokenizer(WORDS)), describe=letters, actions=WORDS[:4],
                            remember_texts=True)  # fmt: skip
    return PPO(env, policy, PPOConfig(num_steps=16, minibatch_size=32))


def letters(observation):
    return " ".join([WORDS[observation % 4], WORDS[observation // 4]])


def a2c():
    env = control("Acrobot-v1")
    return A2C(env, mlp(env), A2CConfig(num_steps=16))


def trpo():
    env = control("CartPole-v1")
    return TRPO(env, mlp(env), TRPOConfig(num_steps=16, critic_epochs=2, minibatch_size=32))


def dqn():
    env = control("CartPole-v1")
    policy = QPolicy(env.single_observation_space, env.single_action_space, hidden=(8,))
    return DQN(
        env,
        policy,
        DQNConfig(num_steps=16, buffer_size=100, learning_starts=60, batch_size=16, target_update_gradient_steps=10),
    )


def sac():
    env = control("Pendulum-v1")
    policy = SACPolicy(env.single_observation_space, env.single_action_space, hidden=(8, 8))
    return SAC(
        env, policy, num_steps=16, buffer_size=100, learning_starts=60, batch_size=16, updates_per_step=0.3,
        final_learning_rate=0.0,
    )  # fmt: skip


def sac_gsde():
    env = control("Pendulum-v1")
    policy = SACGSDEPolicy(env.single_observation_space, env.single_action_space, hidden=(8, 8), sde_sample_freq=5)
    return SAC(env, policy, num_steps=16, buffer_size=100, learning_starts=40, batch_size=16, updates_per_step=0.3)


def td3():
    env = control("Pendulum-v1", vectorization_mode="sync", vector_kwargs={"autoreset_mode": "SameStep"})
    policy = TD3Policy(env.single_observation_space, env.single_action_space, hidden=(8, 8))
    options = dict(buffer_size=100, learning_starts=60, batch_size=16, updates_per_step=0.25, noise_correlation=0.9)
    return TD3(env, policy, num_steps=17, **options)


def grpo_control():
    env = control("CartPole-v1", vectorization_mode="sync")
    return GRPO(env, mlp(env), GRPOConfig(num_episodes=8, group_size=4))


def count_good(prompts, completions, **columns):
    return [float(text.count("good")) for text in completions]


def text_env(reward, num_envs):
    return TextVectorEnv(
        prompts=["a b", "c", "d a b", "b b", "a d"], reward=reward, tokenizer=make_tokenizer(WORDS), num_envs=num_envs,
        max_prompt_tokens=4, max_new_tokens=5,
    )  # fmt: skip


def text(algorithm, config, *, make=make_gpt2, policy_options=None, reward=count_good, **options):
    env = text_env(reward, 4)
    tokenizer = env.tokenizer
    policy = LMPolicy(make(), tokenizer, **({} if policy_options is None else policy_options()))
    penalty = KLPenalty(policy.reference(), AdaptiveCoefficient(0.1, target=2.0))
    return algorithm(env, policy, config, penalty=penalty, **options)


def ppo_text():
    stream = TextLoss(["a b", "c d good", "bad a b", "d"], coef=0.1, batch_size=2, max_length=4)
    config = PPOConfig(num_steps=None, num_episodes=8, minibatch_size=4, bootstrap_truncated=False, warmup_ratio=0.3)
    return text(PPO, config, auxiliary=stream)


def ppo_seq2seq():
    return text(
        PPO, PPOConfig(num_steps=None, num_episodes=8, minibatch_size=4, bootstrap_truncated=False), make=make_t5
    )


def normalized(slots):
    """An environment whose reward has running statistics."""
    return text_env(Normalize(count_good), slots)


def ppo_normalized():
    config = PPOConfig(num_steps=None, num_episodes=8, minibatch_size=4, bootstrap_truncated=False)
    return text(PPO, config, reward=Normalize(count_good))


def grpo_text():
    return text(GRPO, GRPOConfig(num_episodes=8, group_size=4))


def begins_well(prompts, completions, **columns):
    """Of few answers, so that many groups have only zeros."""
    return [float(text.split()[:1] == ["good"]) for text in completions]


def grpo_refills():
    return text(GRPO, GRPOConfig(num_episodes=8, group_size=2, max_refills=2), reward=begins_well)


LEVELS = [{"prompt": text, "level": len(text.split())} for text in ("a b", "c", "d a b", "b b", "a d")]


def with_sampler(sampler, reward):
    return TextVectorEnv(
        prompts=LEVELS, reward=reward, sampler=sampler, tokenizer=make_tokenizer(WORDS), num_envs=4,
        max_prompt_tokens=4, max_new_tokens=5,
    )  # fmt: skip


def grpo_pass_rate():
    """A refill draws from what the collection before it has taught the sampler."""
    env = with_sampler(ByPassRate(memory=6), begins_well)
    return GRPO(env, LMPolicy(make_gpt2(), env.tokenizer), GRPOConfig(num_episodes=8, group_size=2, max_refills=1))


def ppo_curriculum():
    env = with_sampler(Curriculum(column="level", threshold=0.4, window=6), count_good)
    config = PPOConfig(num_steps=None, num_episodes=8, minibatch_size=4, bootstrap_truncated=False)
    return PPO(env, LMPolicy(make_gpt2(), env.tokenizer), config)


def guess(first, second, task, rng):
    """Two rows for the first agent, by tasks and random numbers."""
    answer = first(f"{task} b")
    other = second("c", max_tokens=1)
    first("d")
    return float(len(answer)) + rng.random(), float(len(other))


def reinforce_game():
    env = ProgramVectorEnv(
        guess, tasks=["a", "d", "c"], agents=2, opponents={"self": None, "bad": says_bad},
        tokenizer=make_tokenizer(WORDS), num_envs=4, max_new_tokens=5, max_length=32,
    )  # fmt: skip
    policy = LMPolicy(make_gpt2(), env.tokenizer)
    return REINFORCE(env, policy, REINFORCEConfig(num_episodes=12, baseline="agent", normalize_advantage=False))


def ppo_vine():
    """With values by completions, and a reward that has running statistics."""
    config = PPOConfig(num_steps=None, num_episodes=8, minibatch_size=4, gamma=1.0, vine_samples=2, vine_interval=2)
    return text(PPO, config, reward=Normalize(count_good))


def reinforce_plus_plus():
    """With a loss that draws steps, and weights of rows."""
    config = REINFORCEPlusPlusConfig(
        num_episodes=8, num_epochs=2, minibatch_size=4, gamma=1.0, importance_weights="sequence_mask",
        policy_loss=ClipCovLoss(fraction=0.2, low=0.01),
    )  # fmt: skip
    return text(REINFORCEPlusPlus, config)


def guess_right(first, second, task, rng):
    """Two rows for the first agent, whose reward has few values; the second one's never differs."""
    answer = first(f"{task} b")
    second("c", max_tokens=1)
    first("d")
    return float("good" in answer.split()), 0.5


def grpo_refilled_game():
    env = ProgramVectorEnv(
        guess_right, tasks=["a", "d", "c"], agents=2, tokenizer=make_tokenizer(WORDS), num_envs=4, max_new_tokens=3,
        max_length=32,
    )  # fmt: skip
    return GRPO(env, LMPolicy(make_gpt2(), env.tokenizer), GRPOConfig(num_episodes=12, group_size=2, max_refills=3))


def says_bad(content):
    return "bad"


MAKERS = (
    ppo_cartpole, ppo_sync, ppo_wrapped, ppo_sde, ppo_lstm, ppo_images, a2c, trpo, dqn, sac, sac_gsde, td3,
    grpo_control, ppo_text, ppo_seq2seq, grpo_text, ppo_normalized, ppo_words, reinforce_game,
    reinforce_plus_plus, ppo_vine,
    grpo_refills, grpo_refilled_game, grpo_pass_rate, ppo_curriculum,
)  # fmt: skip


AGENTS = {make.__name__: make for make in MAKERS}


def train(name, folder, *, iterations, total, resume=None):
    """The agent's weights and the log after so many iterations of a training of ``total`` steps."""
    agent = AGENTS[name]()
    agent.learn(
        total, run_dir=folder, checkpoint_every=1, resume=resume,
        on_iteration=lambda metrics: metrics["iteration"] >= iterations,
    )  # fmt: skip
    torch.save(agent.policy.state_dict(), folder / "weights.pt")


STOPPED = 2
"""Iterations before the stop."""
ITERATIONS = 3
"""Iterations in all."""
TOTAL = 10**4
"""Steps of which the schedules are told."""


def go_on(home):
    """What the new process does."""
    for name in AGENTS:
        train(name, home / name, iterations=ITERATIONS, total=TOTAL, resume=home / name)
