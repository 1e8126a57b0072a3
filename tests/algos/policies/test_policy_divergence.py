"""Exact divergences: against torch's own, over masks and choices, in chunks."""

import pytest
import torch
from gymnasium import spaces
from tensordict import NonTensorData
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from algos import MLPPolicy, collect
from algos.policies.policy import Policy
from tests.helpers.chunks import limit_logits
from tests.helpers.kl_cases import Kl, control_case, perturbed, recurrent_case
from tests.helpers.models import WORDS, make_gpt2, make_tokenizer
from tests.helpers.small_agents import gradients, lm_policy
from tests.helpers.text_envs import text_env
from textenv import KLPenalty, LanguageModel


def normal(policy, rollout):
    return torch.distributions.Normal(policy.actor(rollout["observation"]), policy.log_std.exp())


def test_the_divergence_of_gaussians_is_that_of_torch():
    space = spaces.Box(-1, 1, (2, 2))
    policy, other = (MLPPolicy(spaces.Box(-1, 1, (3,)), space, seed=seed) for seed in (0, 1))
    policy.log_std.data, other.log_std.data = torch.tensor([0.3, -0.2, 0.0, 1.0]), torch.tensor([0.0, 0.5, -1.0, 0.2])
    policy.actor[-1].bias.data += 1
    rollout = {"observation": torch.randn(5, 4, 3)}
    found = policy.divergence(rollout, other)
    torch.testing.assert_close(found, Kl(normal(policy, rollout), normal(other, rollout)).sum(-1))
    found.sum().backward()
    assert policy.log_std.grad is not None and all(p.grad is None for p in other.parameters())


def test_the_divergence_of_many_choices_is_their_sum():
    space = spaces.MultiDiscrete([2, 4])
    policy, other = (MLPPolicy(spaces.Box(-1, 1, (3,)), space, seed=seed) for seed in (0, 1))
    policy.actor[-1].bias.data = torch.tensor([1.0, 0.0, 0.5, 0.0, -1.0, 0.2])
    rollout = {"observation": torch.randn(5, 4, 3)}
    both = [p.actor(rollout["observation"]).split([2, 4], dim=-1) for p in (policy, other)]
    expected = sum(Kl(*(torch.distributions.Categorical(logits=x) for x in pair)) for pair in zip(*both, strict=True))
    torch.testing.assert_close(policy.divergence(rollout, other), expected)


def test_the_divergence_is_over_open_actions_alone():
    policy, other = (MLPPolicy(spaces.Box(-1, 1, (3,)), spaces.Discrete(4), seed=seed) for seed in (0, 1))
    policy.actor[-1].bias.data = torch.tensor([1.0, -1.0, 0.5, 9.0])
    open_ = torch.tensor([True, True, True, False])
    rollout = {"observation": torch.randn(5, 2, 3), "action_mask": open_.expand(5, 2, 4)}
    pair = (torch.distributions.Categorical(logits=p.actor(rollout["observation"])[..., :3]) for p in (policy, other))
    found = policy.divergence(rollout, other)
    torch.testing.assert_close(found, Kl(*pair))
    found.sum().backward()
    assert policy.actor[-1].bias.grad[3] == 0 and torch.isfinite(policy.actor[-1].bias.grad).all()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_language_models_diverge_as_their_full_logits(temperature):
    env, policy = text_env(forbidden=[0, 4], min_new_tokens=2), lm_policy(temperature=temperature)
    reference = perturbed(policy)
    rollout = collect(env, policy, num_episodes=8)
    kl, mask = policy.divergence(rollout, reference), rollout["mask"]
    closed = ~rollout.get_non_tensor("allowed_sets")[rollout["allowed"]]
    assert closed.any() and len(rollout["allowed"][mask].unique()) > 1
    log_probs = []
    for model in (policy.lm.model, reference.model):
        logits = model(rollout["observation"], attention_mask=torch.ones_like(rollout["observation"])).logits
        log_probs.append((logits / temperature).masked_fill(closed, -1e30).log_softmax(-1))
    expected = (log_probs[0].exp() * (log_probs[0] - log_probs[1])).sum(-1)
    torch.testing.assert_close(kl[mask], expected[mask], atol=1e-5, rtol=1e-4)
    assert (kl[~mask] == 0).all() and kl[mask].min() > 0
    torch.testing.assert_close(policy.divergence(rollout, policy), torch.zeros_like(kl))


class Shapes(TorchDispatchMode):
    """Notes the shape of every tensor that an operation gives."""

    def __init__(self):
        super().__init__()
        self.of_results = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        self.of_results |= {tuple(x.shape) for x in tree_leaves(results) if isinstance(x, torch.Tensor)}
        return results


def test_the_divergence_never_holds_all_logits_at_once(monkeypatch):
    policy = lm_policy()
    reference = perturbed(policy)
    rollout = collect(text_env(), policy, num_episodes=8)
    rollout["allowed"] = rollout["mask"].long()
    rollout["allowed_sets"] = NonTensorData(torch.ones(2, 9, dtype=torch.bool), batch_size=rollout.batch_size)

    def value_and_gradient():
        policy.zero_grad()
        kl = policy.divergence(rollout, reference)
        kl.square().sum().backward()
        return kl.detach(), gradients(policy)

    count = int(rollout["mask"].sum())
    with Shapes() as shapes:
        whole, gradient = value_and_gradient()
    assert (count, len(WORDS)) in shapes.of_results
    limit_logits(monkeypatch, 4 * len(WORDS))
    rows = []
    for lm in (policy.lm, reference):
        lm.model.get_output_embeddings().register_forward_hook(lambda m, args, out: rows.append(out.shape[0]))
    with Shapes() as shapes:
        cut, cut_gradient = value_and_gradient()
    assert (count, len(WORDS)) not in shapes.of_results, "neither logits nor allowed tokens of all steps"
    assert max(rows) <= 4 and sum(rows) == 4 * count, "both models, forward and again for the gradient"
    torch.testing.assert_close(cut, whole, atol=1e-6, rtol=1e-5)
    for key in gradient:
        torch.testing.assert_close(cut_gradient[key], gradient[key], atol=1e-5, rtol=1e-3)


def test_an_exact_kl_needs_two_policies_of_one_kind():
    env, policy, count = control_case()
    _, recurrent, _ = recurrent_case()
    rollout = collect(env, recurrent, **count)
    with pytest.raises(TypeError, match="LSTMPolicy.*MLPPolicy"):
        KLPenalty(policy, 0.1, "exact", "loss")(rollout, recurrent)
    with pytest.raises(ValueError, match="9.*12"):
        lm_policy().lm.divergence(rollout, LanguageModel(make_gpt2(12), make_tokenizer([*WORDS, "x", "y", "z"])))

    class OnlyLogProbs(Policy):
        def evaluate(self, rollout):
            return policy.evaluate(rollout)

    with pytest.raises(ValueError, match="OnlyLogProbs has no divergence"):
        KLPenalty(policy.reference(), 0.1, "exact", "loss")(rollout, OnlyLogProbs())
