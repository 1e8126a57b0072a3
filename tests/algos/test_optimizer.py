"""`Optimizer`: its schedule and its clipping, by hand."""

import copy
import json
import math

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from algos import PPOConfig, sft
from algos.config import Config
from algos.optimizer import Optimizer
from algos.storage.serialization import from_json, to_json
from tests.helpers.errors import refused
from tests.helpers.models import WORDS, make_gpt2, make_tokenizer
from textenv import LanguageModel


class TwoParts:
    """A policy with one weight, and one for the value."""

    def __init__(self):
        self.weight, self.value_weight = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))

    def parameters(self):
        return iter([self.weight, self.value_weight])

    def value_parameters(self):
        return iter([self.value_weight])


@pytest.mark.parametrize(
    ("fields", "clipped"),
    [
        ({}, (0.3, 0.4)),
        ({"value_learning_rate": 0.1}, (0.3, 0.4)),
        ({"value_max_grad_norm": 2.0}, (0.5, 2.0)),
        ({"value_learning_rate": 0.1, "value_max_grad_norm": 2.0}, (0.5, 2.0)),
        ({"value_learning_rate": 0.1, "max_grad_norm": 10.0}, (3.0, 4.0)),
    ],
)
def test_policy_and_value_are_clipped_together(fields, clipped):
    """Gradients 3 and 4 have norm 5: to at most .5 together they are .3 and .4; apart .5, and 2 of the value."""
    policy = TwoParts()
    config = PPOConfig(**({"learning_rate": 0.1, "max_grad_norm": 0.5} | fields))
    optimizer = Optimizer(policy.parameters(), config, policy=policy)
    metrics = optimizer.step(
        lambda batch: (3 * policy.weight.sum() + 4 * policy.value_weight.sum(), {}), TensorDict({}, batch_size=[1])
    )
    assert (policy.weight.grad.item(), policy.value_weight.grad.item()) == pytest.approx(clipped, rel=1e-4)
    assert metrics["update/grad_norm"].item() == pytest.approx(math.hypot(3, 4), rel=1e-5)


def test_the_value_is_trained_alone_at_first():
    """For a quarter of the training; then both move, by about the learning rate each."""
    policy = TwoParts()
    config = PPOConfig(learning_rate=0.1, value_pretraining=0.25)
    optimizer = Optimizer(policy.parameters(), config, policy=policy)
    weights = []
    for progress in (0.0, 0.2, 0.25, 1.0):
        optimizer.schedule(progress)
        optimizer.step(
            lambda batch: (policy.weight.sum() + policy.value_weight.sum(), {}), TensorDict({}, batch_size=[1])
        )
        weights.append((policy.weight.item(), policy.value_weight.item()))
    start = TwoParts()
    moved = [(weight - start.weight.item(), value - start.value_weight.item()) for weight, value in weights]
    assert moved[1] == (0.0, pytest.approx(-0.2, rel=1e-3))
    assert moved[3] == (pytest.approx(-0.2, rel=1e-3), pytest.approx(-0.4, rel=1e-3))
    with refused(ValueError, "value_pretraining is 0.25", "has no parameters that only the value uses"):
        Optimizer([policy.weight], config, policy=policy)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {0.0: 1, 0.5: 1, 1.0: 1}),
        ({"final_learning_rate": 0.2}, {0.0: 1, 0.5: 0.6, 1.0: 0.2}),
        ({"warmup_ratio": 0.5}, {0.0: 0.01, 0.25: 0.5, 0.5: 1, 1.0: 1}),
        # Up to the full step size, and down over what is left.
        ({"warmup_ratio": 0.2, "final_learning_rate": 0.0}, {0.1: 0.5, 0.2: 1, 0.6: 0.5, 1.0: 0}),
        ({"warmup_ratio": 1.0, "final_learning_rate": 0.0}, {0.5: 0.5, 0.9: 0.9, 1.0: 1}),
    ],
)
def test_the_step_size_warms_up_and_falls_to_its_end(options, expected):
    descent = Optimizer([torch.nn.Parameter(torch.ones(1))], Config(learning_rate=1.0, **options))
    for progress, rate in expected.items():
        descent.schedule(progress)
        assert descent.adam.param_groups[0]["lr"] == pytest.approx(rate)


def test_a_loss_that_reaches_no_parameter_is_refused():
    listed, other = (nn.Parameter(torch.ones(1)) for _ in range(2))
    optimizer = Optimizer([listed], Config(learning_rate=0.1))
    with pytest.raises(ValueError, match="no parameter of the optimizer has a gradient"):
        optimizer.step(lambda part: (other.square().sum(), {}), TensorDict({}, batch_size=[1]))
    assert listed.item() == 1


@pytest.mark.parametrize("result, kind, words", [
    (lambda loss: loss, TypeError, "the loss returned tensor"),
    (lambda loss: (loss, {}, 1), TypeError, "expected a tuple"),
    (lambda loss: (1.0, {}), TypeError, r"the loss returned \(1.0, {}\)"),
    (lambda loss: (loss, None), TypeError, "a dictionary of metrics"),
    (lambda loss: (loss, {"x": 1.0}), TypeError, "the metric 'x' as 1.0, expected a tensor"),
    (lambda loss: (loss.expand(3), {}), ValueError, r"a tensor of shape \(3,\), expected"),
    (lambda loss: (loss.detach(), {}), ValueError, "without a gradient"),
])  # fmt: skip
def test_a_loss_that_returns_something_else_is_told_what_is_expected(result, kind, words):
    weight = nn.Parameter(torch.ones(1))
    optimizer = Optimizer([weight], Config(learning_rate=0.1))
    with pytest.raises(kind, match=words):
        optimizer.step(lambda part: result(weight.square().sum()), TensorDict({}, batch_size=[1]))
    assert weight.item() == 1


class Transposed:
    """A policy whose only weight is a transposed matrix, as some models have."""

    def __init__(self):
        start = torch.arange(6.0).reshape(2, 3).T
        self.weight = nn.Parameter(start)

    def parameters(self):
        return iter([self.weight])

    def value_parameters(self):
        return iter([])


def test_a_restored_optimizer_steps_transposed_weights_as_torch_does():
    """Torch's plain AdamW, which never stopped; the state has been through a file, so its arrays are contiguous."""
    targets = torch.randn(20, 3, 2, generator=torch.Generator().manual_seed(0))
    plain = Transposed()
    reference = torch.optim.AdamW([plain.weight], lr=0.1, eps=1e-5, weight_decay=0.0, fused=False, foreach=False)
    config = PPOConfig(learning_rate=0.1, adam_eps=1e-5, max_grad_norm=1e9)
    policy = Transposed()
    optimizer = Optimizer(policy.parameters(), config, policy=policy)
    assert not policy.weight.is_contiguous()
    for number, target in enumerate(targets):
        if number == 10:
            tensors = {}
            structure = json.loads(json.dumps(to_json(optimizer.state_dict(), tensors)))
            saved = from_json(structure, {name: tensor.contiguous() for name, tensor in tensors.items()})
            optimizer = Optimizer(policy.parameters(), config, policy=policy)
            optimizer.load_state_dict(saved)

        def loss_of(batch, target=target):
            return ((policy.weight - target) ** 2).sum(), {}

        optimizer.step(loss_of, TensorDict({}, batch_size=[1]))
        reference.zero_grad()
        ((plain.weight - target) ** 2).sum().backward()
        reference.step()
        assert torch.allclose(policy.weight, plain.weight, atol=1e-5), number


def test_a_restored_optimizer_has_the_settings_of_its_config():
    """Weights after a step are those of torch's AdamW with the same averages and the new settings."""
    weight = nn.Parameter(torch.tensor([1.0, -2.0]))
    first = Optimizer([weight], Config(learning_rate=0.1))
    batch = TensorDict({}, batch_size=[1])
    first.step(lambda part: (weight.square().sum(), {}), batch)
    settings = dict(adam_eps=0.1, adam_betas=(0.5, 0.9), weight_decay=0.5)
    resumed = Optimizer([weight], Config(learning_rate=0.1, max_grad_norm=1e9, **settings))
    resumed.load_state_dict(first.state_dict())

    expected = nn.Parameter(weight.detach().clone())
    adam = torch.optim.AdamW([expected], lr=0.1, eps=0.1, betas=(0.5, 0.9), weight_decay=0.5)
    adam.load_state_dict(copy.deepcopy(first.state_dict()) | {"param_groups": adam.state_dict()["param_groups"]})
    resumed.step(lambda part: (weight.square().sum(), {}), batch)
    expected.square().sum().backward()
    adam.step()
    torch.testing.assert_close(weight, expected)


def test_float16_parameters_are_not_trained():
    """A gradient of 1e-5 squared is 1e-10, which is 0 in float16: Adam would divide by its epsilon alone."""
    assert torch.tensor(1e-5, dtype=torch.float16).square() == 0
    weights = [nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1, dtype=torch.float16))]
    with refused(ValueError, "parameters to train are float16", "autocast=torch.bfloat16", "--lora"):
        Optimizer(weights, Config(learning_rate=0.1))
    weights[1].requires_grad_(False)
    assert Optimizer(weights, Config(learning_rate=0.1)).parameters == weights[:1]
    model = LanguageModel(make_gpt2().half(), make_tokenizer(WORDS))
    with refused(ValueError, "parameters to train are float16"):
        sft(model, ["a b"])
