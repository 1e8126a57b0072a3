"""Policies and their references: of text, control and memory, and one of three tokens to enumerate."""

import warnings

import torch
from gymnasium import spaces
from tensordict import TensorDict

from algos import LSTMPolicy, MLPPolicy
from tests.helpers.small_agents import cartpole, lm_policy
from tests.helpers.text_envs import text_env
from textenv import KLPenalty
from textenv.kl.estimators import ESTIMATORS, EXACT

Kl = torch.distributions.kl_divergence


def perturbed(policy, *, seed=0):
    """A reference of the policy's kind, near it."""
    reference = policy.reference()
    generator = torch.Generator().manual_seed(seed)
    for weight in reference.parameters():
        weight += 0.1 * torch.randn(weight.shape, generator=generator)
    return reference


def control_case():
    env = cartpole()
    return env, MLPPolicy(env.single_observation_space, env.single_action_space, hidden=(16,)), dict(num_steps=16)


def recurrent_case():
    env = cartpole()
    return env, LSTMPolicy(env.single_observation_space, env.single_action_space, hidden=16), dict(num_steps=16)


COMBINATIONS = [(name, place) for name in (*ESTIMATORS, EXACT) for place in ("reward", "loss")]
COMBINATIONS.remove(("k1", "loss"))  # refused
RIGHT = {("k1", "reward"), ("k2", "loss"), ("exact", "loss")}


class ThreeTokens:
    """One state and three actions: a policy, a reference of another opinion, and every action once."""

    def __init__(self):
        self.policy, self.reference = (MLPPolicy(spaces.Box(-1, 1, (2,)), spaces.Discrete(3)) for _ in range(2))
        self.policy.actor[-1].bias.data = torch.tensor([0.5, -0.3, 0.1])
        self.reference.actor[-1].bias.data = torch.tensor([-0.8, 0.4, 0.9])
        self.weights = list(self.policy.actor.parameters())
        state = torch.full((3, 1, 2), 0.5)
        self.rollout = TensorDict(
            {
                "observation": state,
                "action": torch.arange(3)[:, None],
                "reward": torch.zeros(3, 1),
                "mask": torch.ones(3, 1, dtype=torch.bool),
            },
            batch_size=[3, 1],
        )
        self.rollout["log_prob"] = self.policy.evaluate(self.rollout).log_prob.detach()
        self.own = torch.distributions.Categorical(logits=self.policy.actor(state[0, 0]))
        self.other = torch.distributions.Categorical(logits=self.reference.actor(state[0, 0]).detach())
        self.probability = self.own.probs.detach()[:, None]

    def gradient(self, x):
        return torch.cat([g.flatten() for g in torch.autograd.grad(x, self.weights, retain_graph=True)])

    def charged(self, name, place):
        """Expected gradient of what the penalty charges, each action weighed by its probability."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            penalty = KLPenalty(self.reference, 1.0, name, place)
        rollout = self.rollout.clone()
        penalty(rollout, self.policy)
        log_prob = self.policy.evaluate(rollout).log_prob
        if place == "reward":  # the score function weighs ∇log π by what was taken from the reward
            return self.gradient((self.probability * log_prob * -rollout["reward"]).sum())
        loss = penalty.loss(rollout, log_prob=log_prob, policy=self.policy)
        return self.gradient((self.probability * loss).sum())

    def documented(self, name, place):
        """What the table in KLPenalty's docstring says, from torch's own divergences."""
        forward, reverse = self.gradient(Kl(self.own, self.other)), self.gradient(Kl(self.other, self.own))
        if (name, place) in RIGHT:
            return forward
        log_ratio = (self.own.logits - self.other.logits).detach()
        return {
            ("k2", "reward"): self.gradient((self.own.probs * log_ratio.square() / 2).sum()),
            ("k3", "reward"): forward - reverse,
            ("k3", "loss"): reverse,
            ("exact", "reward"): torch.zeros_like(forward),
        }[name, place]


def text_case():
    return text_env(forbidden=[0]), lm_policy(temperature=0.8), dict(num_episodes=8)
