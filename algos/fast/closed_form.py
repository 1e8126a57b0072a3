"""PPO's update of small networks with a gradient written by hand, in place of autograd's.

Actor and critic are one batched product per layer. During an update all their weights are one vector, as are their
gradient and Adam's averages, so that norm, clipping and Adam are one operation each.

This stands for exactly the functions in `STANDS_FOR`. After a change of one of them it is not used, until somebody has
compared both again (tests/algos/fast/test_closed_form.py) and recorded the digests (tests/helpers/digests.py).
"""

import logging
import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from algos.fast.adam import Adam
from algos.fast.towers import linear_layers, tanh
from textenv.acceleration import Originals, find

STANDS_FOR = {
    "algos.ppo:PPO.update": "d7048b38fe7a",
    "algos.ppo:PPO.loss": "e958089b19aa",
    "algos.minibatches:minibatches": "bb32d06b57c9",
    "algos.minibatches:shuffle_and_split": "ce8fca42e652",
    "algos.minibatches:whiten_advantage": "5ced83f2f33c",
    "algos.advantages:whiten": "18882b0841a0",
    "algos.losses:log_ratio": "e1533fbefb72",
    "algos.losses:clipped_policy_loss": "0427a7a792df",
    "algos.losses:value_loss": "768d32a722df",
    "algos.losses:token_mean": "ad0cd84574da",
    "algos.losses:by_name": "c161128bf9d1",
    "algos.optimizer:Optimizer.step": "94eba68fcf6c",
    "algos.optimizer:Optimizer._parts": "beacb623740b",
    "algos.optimizer:Optimizer._backward": "5fdadbb8cde3",
    "algos.optimizer:Optimizer._clip": "2b0f4f6bbe9e",
    "algos.optimizer:_finite": "b9368137e286",
    "algos.parallel:own_rows": "cf0f94ad116c",
    "algos.parallel:add_up": "30888dcec7d2",
    "algos.fast.adam:Adam.clip_grad_norm_": "34b151fcc5fb",
    "algos.fast.adam:Adam.step": "7c64152133f7",
    "algos.fast.adam:Adam._step_kind": "19efa84e586e",
    "algos.policies.mlp:MLPPolicy.evaluate": "b9565d77fbd2",
    "algos.policies.policy:ControlPolicy._evaluation": "fbb818eeabba",
    "algos.policies.policy:ControlPolicy._read": "b2967d531441",
    "algos.policies.policy:ControlPolicy._flat": "1b34b685c16b",
    "algos.policies.towers:both": "5a3f528bde4a",
    "algos.policies.distributions:Categorical.score": "7d48760d5e28",
    "algos.policies.distributions:Categorical.index": "297ad4344fd1",
    "algos.policies.distributions:Gaussian.score": "df19eeb180d6",
    "algos.policies.distributions:Gaussian.parametrize": "fbeb4d033fc3",
    "algos.policies.distributions:_log_prob_and_entropy": "a998af817808",
    "algos.policies.distributions:_masked": "0e8e90bc5211",
    "algos.training.invariants:check_advantages": "c32b74da939f",
    "algos.training.invariants:check_finite": "19e0652289af",
    "algos.training.invariants:check_inert": "2a89753a6cae",
    "algos.training.invariants:check_whitened": "57146e3e1943",
    "algos.training.invariants:check_first": "169acaa1e0ee",
    "algos.training.invariants:scoring_dtype": "487f9ac07468",
    "algos.training.metrics:MetricMeans.add": "8aa529e3ee8b",
    "algos.training.metrics:MetricMeans.result": "2eb4dfdd0288",
    "algos.training.metrics:minibatch_means": "f552e39b4993",
    "algos.training.metrics:ratio_metrics": "bd32f7c5a7b6",
    "algos.training.metrics:sampler_gap": "7645db54daa0",
    "textenv.rollout:check_mask": "be0b55444a17",
    "textenv.rollout:ratio_tolerance": "a13c50037bc8",
}
"""Functions that `take_steps` replaces, with the digest of each when both were last compared."""
ORIGINALS = Originals(STANDS_FOR)

logger = logging.getLogger(__name__)
LOG_2PI = math.log(2 * math.pi)
LARGEST_GAP = 1e-4
"""Largest first log-ratio, nats; beyond it the plain update decides (`algos.training.invariants.check_first`)."""
WHITE_TOLERANCE = 1e-2
"""Largest distance of whitened advantages from mean 0 and deviation 1; beyond it the plain update decides."""
ALIKE = 1e-6
"""As `algos.advantages.ALIKE`."""
LOGGED = ("policy/loss", "value/loss", "policy/entropy", "policy/approx_kl", "policy/clip_frac", "update/grad_norm")


@torch.no_grad()
def take_steps(agent: Any, rollout: Any, *, clip_range: float) -> dict[str, float] | None:
    """Take the steps of `algos.ppo.PPO.update` for an `MLPPolicy`; return their metrics.

    None, with nothing changed, if this is not such an update, if a function that this stands for has changed, or if
    something is wrong with the data, which the plain update explains.
    """
    if not _has_original_methods(agent):
        return None
    changed = ORIGINALS.changed()
    if changed is not None:
        _log_once(logging.WARNING, f"{changed} was edited or patched, so PPO's update is not computed in closed form")
        return None
    if not (_is_plain_ppo(agent, rollout) and _has_plain_parameters(agent)):
        return None
    generator_state = agent.generator.get_state()
    metrics = _train(agent, rollout, clip_range=clip_range)
    if metrics is None:
        agent.generator.set_state(generator_state)
    return metrics


@cache
def _log_once(level: int, message: str) -> None:
    logger.log(level, message)


def _has_original_methods(agent: Any) -> bool:
    """Whether agent, optimizer and policy have the methods of the library, rather than those of a subclass."""
    policy = agent.policy
    methods = {
        "algos.ppo:PPO.update": agent.update,
        "algos.ppo:PPO.loss": agent.loss,
        "algos.optimizer:Optimizer.step": agent.optimizer.step,
        "algos.optimizer:Optimizer._parts": agent.optimizer._parts,
        "algos.optimizer:Optimizer._backward": agent.optimizer._backward,
        "algos.optimizer:Optimizer._clip": agent.optimizer._clip,
        "algos.policies.mlp:MLPPolicy.evaluate": policy.evaluate,
        "algos.policies.policy:ControlPolicy._evaluation": getattr(policy, "_evaluation", None),
        "algos.policies.policy:ControlPolicy._read": getattr(policy, "_read", None),
        "algos.policies.policy:ControlPolicy._flat": getattr(policy, "_flat", None),
    }
    for name, method in methods.items():
        if getattr(method, "__func__", None) is not find(name):
            _log_once(logging.INFO, f"{name} was overridden, so PPO's update is not computed in closed form")
            return False
    return True


def _is_plain_ppo(agent: Any, rollout: Any) -> bool:
    """Whether the loss is PPO's clipped one, without further terms, masks, weights, parts or ranks."""
    config = agent.config
    by_name = find("algos.losses:by_name")
    if by_name(choice=config.policy_loss) is not find("algos.losses:clipped_policy_loss"):
        return False
    if by_name(choice=config.aggregation) is not find("algos.losses:token_mean"):
        return False
    further = (agent.penalty, agent.auxiliary, agent.shards, config.max_importance_weight, config.micro_batch_size)
    if any(x is not None for x in further) or "action_mask" in rollout.keys():
        return False
    return not (torch.distributed.is_available() and torch.distributed.is_initialized())


def _has_plain_parameters(agent: Any) -> bool:
    """Whether the networks are covered, and Adam trains exactly their parameters, in one group, in float32 on a CPU."""
    adam = agent.optimizer.adam
    parameters = _parameters_of(agent.policy)
    if not parameters or not isinstance(adam, Adam) or len(adam.param_groups) != 1:
        return False
    if sorted(map(id, adam.param_groups[0]["params"])) != sorted(map(id, parameters)):
        return False
    if not all(p.is_cpu and p.dtype is torch.float32 and not p._backward_hooks for p in parameters):
        return False
    steps = {float(adam.state[p]["step"]) if p in adam.state else 0.0 for p in parameters}
    return len(steps) == 1


def _parameters_of(policy: Any) -> list[nn.Parameter]:
    """A policy's parameters in the order of `_Networks`; empty unless its networks and distribution are covered."""
    activation: type[nn.Module] = nn.Tanh if linear_layers(policy.actor, nn.Tanh) else nn.ReLU
    actor = linear_layers(policy.actor, activation)
    critic = linear_layers(policy.critic, activation)
    if not actor or [x.weight.shape for x in actor[:-1]] != [x.weight.shape for x in critic[:-1]]:
        return []
    parameters: list[Any] = []
    for one, two in zip(actor[:-1], critic[:-1], strict=True):
        parameters += [one.weight, two.weight, one.bias, two.bias]
    parameters += [actor[-1].weight, actor[-1].bias, critic[-1].weight, critic[-1].bias]
    if _is_categorical(policy):
        return parameters
    if type(policy.distribution) is find("algos.policies.distributions:Gaussian"):
        return [*parameters, policy.distribution.log_std]
    return []


def _is_categorical(policy: Any) -> bool:
    return type(policy.distribution) is find("algos.policies.distributions:Categorical")


class _Layer(NamedTuple):
    """Views of a vector: ``[2, after, before]`` and ``[2, 1, after]``; of a head ``[size, before]`` and ``[size]``."""

    weight: Tensor
    bias: Tensor


class _Networks:
    """Actor, critic and Adam, on one vector of weights."""

    def __init__(self, policy: Any, adam: Adam) -> None:
        self.adam = adam
        self.parameters = _parameters_of(policy)
        self.tanh = bool(linear_layers(policy.actor, nn.Tanh))
        self.states = [adam.state[p] or adam.begin(p) for p in self.parameters]
        self.weights = _joined(self.parameters)
        self.mean = _joined([state["exp_avg"] for state in self.states])
        self.square = _joined([state["exp_avg_sq"] for state in self.states])
        self.steps = self.states[0]["step"].clone()
        self.gradient = torch.empty_like(self.weights)
        self.hidden, self.heads, self.log_std = self._layers(self.weights)
        self.hidden_slopes, self.head_slopes, self.log_std_slope = self._layers(self.gradient)
        self.inputs: list[Tensor] = []
        """Input of each layer in the last `forward`, ``[2, n, before]``."""

    def _layers(self, vector: Tensor) -> tuple[list[_Layer], list[_Layer], Tensor]:
        """Views: hidden layers, heads of actor and critic, and log standard deviation (empty for discrete actions)."""
        hidden = []
        start = 0
        num_hidden = len(self.parameters) // 4 - 1
        for number in range(num_hidden):
            after, before = self.parameters[4 * number].shape
            middle = start + 2 * after * before
            end = middle + 2 * after
            weight = vector[start:middle].view(2, after, before)
            bias = vector[middle:end].view(2, 1, after)
            hidden.append(_Layer(weight, bias))
            start = end
        actor_weight, actor_bias, critic_weight, critic_bias, *rest = self._split(vector)[4 * num_hidden :]
        heads = [_Layer(actor_weight, actor_bias), _Layer(critic_weight, critic_bias)]
        return hidden, heads, rest[0] if rest else vector[:0]

    def _split(self, vector: Tensor) -> list[Tensor]:
        """View of each parameter."""
        parts = vector.split([p.numel() for p in self.parameters])
        return [part.view_as(p) for part, p in zip(parts, self.parameters, strict=True)]

    def forward(self, observation: Tensor) -> list[Tensor]:
        """Outputs of actor ``[n, size]`` and critic ``[n, 1]``."""
        x = observation.expand(2, *observation.shape)
        self.inputs = [x]
        for weight, bias in self.hidden:
            x = torch.baddbmm(bias, x, weight.transpose(1, 2))
            x = tanh(x) if self.tanh else x.relu_()
            self.inputs.append(x)
        return [torch.addmm(bias, features, weight.t()) for (weight, bias), features in zip(self.heads, x, strict=True)]

    def backward(self, output_slopes: list[Tensor]) -> None:
        """Write the gradient, from that of the outputs."""
        # Heads
        x = self.inputs[-1]
        slope = torch.empty_like(x, memory_format=torch.contiguous_format)
        for tower in (0, 1):
            torch.mm(output_slopes[tower].t(), x[tower], out=self.head_slopes[tower].weight)
            torch.sum(output_slopes[tower], 0, out=self.head_slopes[tower].bias)
            torch.mm(output_slopes[tower], self.heads[tower].weight, out=slope[tower])

        # Hidden layers, the last first
        for number in reversed(range(len(self.hidden))):
            if self.tanh:
                torch.ops.aten.tanh_backward.grad_input(slope, x, grad_input=slope)
            else:
                torch.ops.aten.threshold_backward.grad_input(slope, x, 0, grad_input=slope)
            x = self.inputs[number]
            torch.bmm(slope.transpose(1, 2), x, out=self.hidden_slopes[number].weight)
            torch.sum(slope, 1, keepdim=True, out=self.hidden_slopes[number].bias)
            if number:
                slope = torch.bmm(slope, self.hidden[number].weight)

    def step(self, max_norm: float) -> Tensor:
        """Take a step of Adam with the gradient clipped; return its norm before."""
        (group,) = self.adam.param_groups
        norm = torch.linalg.vector_norm(self.gradient)
        self.steps.add_(1)
        torch._fused_adamw_(
            [self.weights],
            [self.gradient],
            [self.mean],
            [self.square],
            [],
            [self.steps],
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=((norm + 1e-6) / max_norm).clamp_(min=1.0),
        )
        return norm

    def write_back(self) -> None:
        """Write the weights, Adam's state and the last gradient to their owners."""
        torch._foreach_copy_([*self.parameters], self._split(self.weights))
        torch._foreach_copy_([state["exp_avg"] for state in self.states], self._split(self.mean))
        torch._foreach_copy_([state["exp_avg_sq"] for state in self.states], self._split(self.square))
        torch._foreach_copy_([state["step"] for state in self.states], [self.steps] * len(self.states))
        for parameter, gradient in zip(self.parameters, self._split(self.gradient), strict=True):
            parameter.grad = gradient.clone()


def _joined(tensors: list[Any]) -> Tensor:
    return torch.cat([x.flatten() for x in tensors])


def _train(agent: Any, rollout: Any, *, clip_range: float) -> dict[str, float] | None:
    """Take the steps of an update; None, with no weight changed, if something is wrong."""
    config = agent.config
    max_norm = agent.optimizer.config.max_grad_norm
    clip_higher = clip_range if config.clip_higher is None else config.clip_higher
    networks = _Networks(agent.policy, agent.optimizer.adam)
    logged: list[Tensor] = []
    for observation, action, columns in _minibatches(agent, rollout):
        old_log_prob, advantage, old_value, value_target = columns
        weight = 1 / len(action)

        # Ratio of the action probabilities to those of the policy that acted
        output, value = networks.forward(observation)
        log_prob, entropy, output_slope = _score_actions(output, action, networks)
        log_ratio = log_prob - old_log_prob
        change = log_ratio.expm1()
        if not logged:
            gap = log_ratio.abs()
            if not gap.max().item() <= min(LARGEST_GAP, config.ratio_tolerance or LARGEST_GAP):
                return None

        # Policy loss, value loss, and their slopes
        unclipped = (change + 1).mul_(advantage)
        clipped = change.clamp(-clip_range, clip_higher).add_(1).mul_(advantage)
        policy_loss = -torch.minimum(unclipped, clipped)
        log_prob_slope = unclipped.mul(unclipped <= clipped).mul_(-weight)
        value_loss, value_slope = _value_loss(value.squeeze(1), value_target, old_value, config.clip_range_vf)

        # Gradient and step
        networks.backward(
            [
                output_slope(log_prob_slope, config.ent_coef * weight),
                value_slope.mul_(config.vf_coef * weight).unsqueeze(1),
            ]
        )
        norm = networks.step(max_norm)

        # Metrics, in the order of `LOGGED`
        approx_kl = change - log_ratio
        outside = (change.abs() > clip_range).float()
        means = torch.stack((policy_loss, value_loss, entropy, approx_kl, outside)).mean(1)
        logged += [means, norm.unsqueeze(0)]
        if config.target_kl is not None and means[3].item() > config.target_kl:
            break
    if not logged:
        return None
    values = torch.cat(logged).view(-1, len(LOGGED))
    if not values.isfinite().all():
        return None
    networks.write_back()
    metrics = dict(zip(LOGGED, values.double().mean(0).tolist(), strict=True))
    metrics["policy/sampler_gap"] = gap.mean().item()
    return metrics | {"update/minibatches": len(values), "update/skipped": 0, "update/path": 2}


def _minibatches(agent: Any, rollout: Any) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Observations, actions and columns ``[4, n]`` of each minibatch, in the order of `algos.minibatches.minibatches`.

    Yields nothing if advantages or value targets are not finite, not 0 outside the mask, or not whitened.
    """
    policy = agent.policy
    config = agent.config
    normalize = config.normalize_advantage
    mask = rollout["mask"].flatten()

    # Columns: log_prob, advantage, value, value_target
    columns = torch.stack([rollout[x].flatten() for x in ("log_prob", "advantage", "value", "value_target")])
    to_check = columns[1::2]
    outside = to_check[:, ~mask]
    if not math.isfinite(to_check.sum().item()) or outside.count_nonzero():
        return

    # Single steps inside the mask
    observation = policy._read(rollout["observation"].flatten(0, 1))
    action = rollout["action"].flatten(0, 1)
    if _is_categorical(policy):
        action = policy.distribution.index(action).unsqueeze(1)
    if outside.numel():
        observation = observation[mask]
        action = action[mask]
        columns = columns.t()[mask].t()
    columns = columns.contiguous()
    count = len(action)
    size = min(config.minibatch_size, count)
    if normalize == "rollout" or (normalize and size == count):
        columns[1] = _whiten(columns[1])

    for epoch in range(config.num_epochs):
        shuffled = (observation, action, columns)
        if size < count:
            order = torch.randperm(count, generator=agent.generator, device=agent.generator.device)
            shuffled = (observation[order], action[order], columns[:, order])
            if normalize == "minibatch":
                _whiten_each(shuffled[2][1], size)
        if normalize and epoch == 0:
            first = shuffled[2][1, :size] if normalize == "minibatch" else columns[1]
            variance, mean = torch.var_mean(first, correction=0)
            if not (abs(mean.item()) <= WHITE_TOLERANCE and abs(variance.item() ** 0.5 - 1) <= WHITE_TOLERANCE):
                return
        yield from zip(shuffled[0].split(size), shuffled[1].split(size), shuffled[2].split(size, dim=1), strict=True)


def _whiten_each(advantage: Tensor, size: int) -> None:
    """Whiten each minibatch of the advantages ``[count]``, in place; the last may be smaller."""
    full = len(advantage) // size * size
    advantage[:full] = _whiten(advantage[:full].view(-1, size)).flatten()
    if full < len(advantage):
        advantage[full:] = _whiten(advantage[full:])


def _whiten(x: Tensor) -> Tensor:
    """`algos.advantages.whiten` along the last dimension."""
    variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    spread = variance.sqrt_()
    return (x - mean) / torch.where(spread > ALIKE * x.abs().amax(-1, keepdim=True), spread + 1e-8, 1.0)


def _score_actions(output: Tensor, action: Tensor, networks: _Networks) -> tuple[Tensor, Tensor, Callable[..., Tensor]]:
    """Log-probabilities and entropies ``[n]``, and a function from the slope of the loss in the former to its slope in
    the output. Its second argument is the weight of each entropy. A Gaussian's writes the standard deviation's slope.
    """
    log_std = networks.log_std
    if log_std.numel():
        inverse = (-log_std).exp_()
        standard = (action.reshape(output.shape) - output).mul_(inverse)
        log_prob = -(0.5 * standard.square() + (log_std + 0.5 * LOG_2PI)).sum(-1)
        entropy = (log_std + 0.5 * (LOG_2PI + 1)).sum().expand(log_prob.shape)

        def mean_slope(slope: Tensor, entropy_weight: float) -> Tensor:
            torch.mv((standard.square() - 1).t(), slope, out=networks.log_std_slope).sub_(entropy_weight * len(slope))
            return standard * inverse * slope.unsqueeze(1)

        return log_prob, entropy, mean_slope
    log_probs = output.log_softmax(-1)
    probs = log_probs.exp()
    entropy = (probs * log_probs).sum(-1).neg_()

    def logits_slope(slope: Tensor, entropy_weight: float) -> Tensor:
        factor: Tensor | float = 0.0
        if entropy_weight:
            factor = (log_probs + entropy.unsqueeze(1)).mul_(entropy_weight)
        return probs.mul_(factor - slope.unsqueeze(1)).scatter_add_(1, action, slope.unsqueeze(1))

    return log_probs.gather(1, action).squeeze(1), entropy, logits_slope


def _value_loss(value: Tensor, target: Tensor, old_value: Tensor, clip_range: float | None) -> tuple[Tensor, Tensor]:
    """Entries of `algos.losses.value_loss`, and their slopes."""
    slope = value - target
    squared_error = slope.square()
    if clip_range is None:
        return 0.5 * squared_error, slope
    change = value - old_value
    clipped = change.clamp(-clip_range, clip_range).add_(old_value - target)
    clipped_error = clipped.square()
    slope = torch.where(squared_error >= clipped_error, slope, clipped * (change.abs() <= clip_range))
    return 0.5 * torch.maximum(squared_error, clipped_error), slope
