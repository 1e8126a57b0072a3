"""Second derivatives of a language model's exact KL, which TRPO's natural gradient is made of."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.helpers.chunks import limit_logits
from tests.helpers.lora import lora
from tests.helpers.models import make_gpt2, make_llama
from tests.helpers.small_agents import lm_policy
from tests.helpers.text_envs import play, text_env

ANSWERS = [(5, 1, 7), (7,), (3, 3, 3, 3, 3)]
POLICIES = {
    "gpt2": lambda **options: lm_policy(make_gpt2, **options),
    "llama": lambda **options: lm_policy(make_llama, **options),
    "lora": lora,
}


def nearby(policy):
    """A reference some way off, so that the KL has a gradient too."""
    reference = policy.reference()
    with torch.no_grad():
        for p in reference.parameters():
            p.add_(0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    return reference


def flat_gradient(policy, rollout, reference, **options):
    """Of the mean KL over the steps, with respect to all that trains of the language model: ``[n]``."""
    parameters = [p for p in policy.lm.parameters() if p.requires_grad]
    kl = policy.divergence(rollout, reference).sum() / rollout["mask"].sum()
    found = torch.autograd.grad(kl, parameters, **options)
    return torch.cat([g.flatten() for g in found]), parameters


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("elements", [2**24, 20], ids=["whole", "chunks"])
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_hessian_products_are_changes_of_the_gradient(name, elements, options, monkeypatch):
    """Central differences; in chunks the logits are computed again in both backward passes."""
    limit_logits(monkeypatch, elements)
    policy, rollout = POLICIES[name](**options), play(text_env(), ANSWERS)
    reference = nearby(policy)
    with sdpa_kernel(SDPBackend.MATH):
        gradient, parameters = flat_gradient(policy, rollout, reference, create_graph=True)
        vector = torch.randn(len(gradient), generator=torch.Generator().manual_seed(1))
        product = torch.cat([g.flatten() for g in torch.autograd.grad(gradient @ vector, parameters)])
        start, ends = torch.nn.utils.parameters_to_vector(parameters).detach(), []
        for step in (1e-3, -1e-3):
            torch.nn.utils.vector_to_parameters(start + step * vector, parameters)
            ends.append(flat_gradient(policy, rollout, reference)[0])
    expected = (ends[0] - ends[1]) / 2e-3
    assert gradient.norm() > 1e-2 and product.norm() > 1e-2
    assert (product - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_at_equality_the_hessian_is_the_fisher_matrix(name):
    """v·F·v is the mean of Σ π (v·∇ log π)² over the states: by all tokens and first differences."""
    policy, rollout = POLICIES[name](), play(text_env(), ANSWERS)
    with sdpa_kernel(SDPBackend.MATH):
        gradient, parameters = flat_gradient(policy, rollout, policy.reference(), create_graph=True)
        assert gradient.abs().max() < 1e-5
        vector = torch.randn(len(gradient), generator=torch.Generator().manual_seed(1))
        found = torch.cat([g.flatten() for g in torch.autograd.grad(gradient @ vector, parameters)]) @ vector
        start, ends = torch.nn.utils.parameters_to_vector(parameters).detach(), []
        for step in (1e-3, -1e-3, 0.0):
            torch.nn.utils.vector_to_parameters(start + step * vector, parameters)
            hidden = policy.lm.hidden(rollout["observation"])[rollout["mask"]]
            ends.append(policy.lm.logits(hidden).log_softmax(-1).detach())
    slope = (ends[0] - ends[1]) / 2e-3
    expected = (ends[2].exp() * slope.square()).sum(-1).mean()
    torch.testing.assert_close(found, expected, atol=0, rtol=0.02)
