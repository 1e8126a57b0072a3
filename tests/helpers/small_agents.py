"""Small policies and agents, a lookup-table model, and what their updates leave behind."""

import gymnasium as gym
import torch
from gymnasium.vector import SyncVectorEnv
from torch import nn

from algos import PPO, Critic, LMPolicy, MLPPolicy, PPOConfig, collect
from tests.helpers.models import MODELS, WORDS, make_gpt2, make_tokenizer
from tests.helpers.tolerances import GRADIENT
from textenv import LanguageModel


def scored(rollout, policy):
    """The rollout with ``log_prob`` as if this policy had written it."""
    with torch.no_grad():
        rollout["log_prob"] = policy.evaluate(rollout).log_prob
    return rollout


def lm_policy(make=make_gpt2, *, tokenizer=None, head=True, **options):
    """A policy whose value head is not the zero of a fresh one, so that values have something to say."""
    policy = LMPolicy(make(), make_tokenizer(WORDS) if tokenizer is None else tokenizer, **options)
    if head:
        with torch.no_grad():
            policy.value_head.weight.normal_(generator=torch.Generator().manual_seed(1))
    return policy


def with_critic(name="gpt2", *, critic=None, model=None, **options):
    """A policy whose critic's head is not the zero of a fresh one."""
    model, tokenizer = MODELS[name]() if model is None else model, make_tokenizer(WORDS)
    if critic is None:
        critic = Critic.from_language_model(LanguageModel(model, tokenizer))
        with torch.no_grad():
            critic.head.weight.normal_(generator=torch.Generator().manual_seed(1))
    return LMPolicy(model, tokenizer, critic=critic, **options)


TEXT = dict(num_steps=None, num_episodes=16, num_epochs=1, minibatch_size=16, learning_rate=1e-30, max_grad_norm=1e9,
            bootstrap_truncated=False)  # fmt: skip
"""An update that moves nothing: gradients and figures can be read afterwards."""
CONTROL = dict(num_steps=32, num_epochs=1, minibatch_size=10_000, learning_rate=1e-30, max_grad_norm=1e9)


def agent_of(env, policy, *, penalty=None, **options):
    defaults = TEXT if hasattr(env, "take_episodes") else CONTROL
    return PPO(env, policy, PPOConfig(**(defaults | options)), penalty=penalty)


def gradients(policy):
    return {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}


def take_gradients(model):
    """The gradients, which the model has no more."""
    found = gradients(model)
    model.zero_grad()
    return found


def close_gradients(found, expected, share=GRADIENT):
    """Equal but for the order of their sums."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        atol = share * max(1.0, gradient.abs().max().item())
        torch.testing.assert_close(found[name], gradient, atol=atol, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def product_dtypes(policy):
    """Set of the dtypes that the policy's matrix products give from now on, but for those of one number (values)."""
    found = set()
    for module in policy.modules():
        if type(module) is nn.Linear or type(module).__name__ == "Conv1D":
            module.register_forward_hook(lambda m, args, out: found.add(out.dtype) if out.shape[-1] > 1 else None)
    return found


def cartpole(num_envs=4, mode="NextStep", **options):
    return SyncVectorEnv([lambda: gym.make("CartPole-v1", **options) for _ in range(num_envs)], autoreset_mode=mode)


def mlp_for(env, **options):
    return MLPPolicy(env.single_observation_space, env.single_action_space, hidden=(16,), **options)


def control_rollout(steps=48, seed=0):
    """CartPole with reset rows inside: environment, policy and rollout."""
    env = cartpole()
    policy = mlp_for(env, seed=seed)
    rollout = collect(env, policy, num_steps=steps, seed=seed)
    assert not rollout["mask"].all(), "a rollout without reset rows guards nothing"
    return env, policy, rollout


def table_model(table):
    """A causal language model whose next-token log-probabilities are ``table[last token]``, ``[n, n]``.

    Its trunk's output is the one-hot last token, so a value head's weights are the values of the tokens.
    """
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

    class Trunk(PreTrainedModel):
        config_class = PreTrainedConfig

        def __init__(self, config):
            super().__init__(config)
            self.embedding = nn.Embedding.from_pretrained(torch.eye(len(table)), freeze=False)

        def forward(self, input_ids, **_):
            return BaseModelOutput(last_hidden_state=self.embedding(input_ids))

    class TableLM(PreTrainedModel):
        config_class, base_model_prefix = PreTrainedConfig, "trunk"

        def __init__(self, config):
            super().__init__(config)
            self.trunk, self.head = Trunk(config), nn.Linear(len(table), len(table), bias=False)
            self.head.weight.data = table.T.clone()

        def get_input_embeddings(self):
            return self.trunk.embedding

        def get_output_embeddings(self):
            return self.head

        def forward(self, input_ids, **_):
            return CausalLMOutput(logits=self.head(self.trunk(input_ids).last_hidden_state))

    return TableLM(PreTrainedConfig(num_hidden_layers=0, hidden_size=len(table), num_attention_heads=1))


def random_table(seed=0):
    n = len(WORDS)
    return torch.randn(n, n, generator=torch.Generator().manual_seed(seed)).log_softmax(-1)
