"""PPO's update of small networks with a gradient written by hand, in place of autograd's.

Actor and critic are one batched product per layer. During an update all their weights are one vector, as are their
gradient and Adam's averages, so that norm, clipping and Adam are one operation each.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from algos.fast.adam import Adam
from algos.fast.towers import linear_layers, tanh

LOG_2PI = math.log(2 * math.pi)
CLOSE, WHITE, ALIKE = 1e-4, 1e-2, 1e-6
"""Limits of the first log-ratios, nats, and of the distance of whitened advantages from mean 0 and deviation 1, beyond
which `algos.training.invariants` decides; `algos.advantages.ALIKE`."""
LOGGED = ("policy/loss", "value/loss", "policy/entropy", "policy/approx_kl", "policy/clip_frac", "update/grad_norm")
COVERED = [
    "algos.ppo:PPO.update",
    "algos.ppo:PPO.loss",
    "algos.optimizer:Optimizer.step",
    "algos.policies.mlp:MLPPolicy.evaluate",
    "algos.policies.policy:ControlPolicy._evaluation",
]
"""What is computed here; of a subclass that overrides one of them nothing is."""
CATEGORICAL, GAUSSIAN = "algos.policies.distributions:Categorical", "algos.policies.distributions:Gaussian"


@torch.no_grad()
def take_steps(agent: Any, rollout: Any, *, clip_range: float) -> dict[str, float] | None:
    """Take the steps of `algos.ppo.PPO.update` for an `MLPPolicy`; return their metrics.

    None if this update is not one that is computed here, or if something is wrong: nothing was changed then, and the
    plain steps explain it.
    """
    if not _covers(agent, rollout):
        return None
    before = agent.generator.get_state()
    metrics = _train(agent, rollout, clip_range=clip_range)
    if metrics is None:
        agent.generator.set_state(before)
    return metrics


def _covers(agent: Any, rollout: Any) -> bool:
    """Whether this update is one that `_train` computes."""
    policy, config, optimizer = agent.policy, agent.config, agent.optimizer
    methods = (agent.update, agent.loss, optimizer.step, policy.evaluate, getattr(policy, "_evaluation", None))
    if [*map(_full_name, methods)] != COVERED:
        return False
    names = [getattr(x, "__name__", x) for x in (config.aggregation, config.policy_loss)]
    further = (agent.penalty, agent.shards, config.max_importance_weight, config.micro_batch_size, agent.auxiliary)
    if names != ["token_mean", "clipped_policy_loss"] or any(x is not None for x in further):
        return False
    if "action_mask" in rollout.keys() or (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    parameters, adam = _in_order(policy), optimizer.adam
    return (
        len(parameters) > 0
        and isinstance(adam, Adam)
        and [sorted(map(id, group["params"])) for group in adam.param_groups] == [sorted(map(id, parameters))]
        and all(p.is_cpu and p.dtype is torch.float32 and not p._backward_hooks for p in parameters)
        and len({float(adam.state[p]["step"]) if p in adam.state else 0.0 for p in parameters}) == 1
    )


def _in_order(policy: Any) -> list[nn.Parameter]:
    """A policy's parameters in the order of `_Networks`; empty unless its networks and distribution are covered."""
    activation: type[nn.Module] = nn.Tanh if linear_layers(policy.actor, nn.Tanh) else nn.ReLU
    one, two = (linear_layers(tower, activation) for tower in (policy.actor, policy.critic))
    kind = _full_name(type(policy.distribution))
    if not one or [x.weight.shape for x in one[:-1]] != [x.weight.shape for x in two[:-1]]:
        return []
    pairs = [p for a, b in zip(one[:-1], two[:-1], strict=True) for p in (a.weight, b.weight, a.bias, b.bias)]
    heads = [one[-1].weight, one[-1].bias, two[-1].weight, two[-1].bias]
    if kind not in (CATEGORICAL, GAUSSIAN):
        return []
    return [*pairs, *heads, *([policy.distribution.log_std] if kind == GAUSSIAN else [])]


def _full_name(x: Any) -> str:
    return f"{getattr(x, '__module__', None)}:{getattr(x, '__qualname__', None)}"


class _Layer(NamedTuple):
    """Views of a vector: ``[2, after, before]`` and ``[2, 1, after]``; of a head ``[size, before]`` and ``[size]``."""

    weight: Tensor
    bias: Tensor


class _Networks:
    """Actor, critic and Adam, on one vector of weights."""

    def __init__(self, policy: Any, adam: Adam) -> None:
        self.adam, self.owners = adam, _in_order(policy)
        self.tanh = bool(linear_layers(policy.actor, nn.Tanh))
        self.states = [adam.state[p] or adam.begin(p) for p in self.owners]
        averages = ([state[name] for state in self.states] for name in ("exp_avg", "exp_avg_sq"))
        self.kept: list[list[Tensor]] = [[*self.owners], *averages]
        self.weights, self.mean, self.square = (torch.cat([x.flatten() for x in kept]) for kept in self.kept)
        self.gradient, self.steps = torch.empty_like(self.weights), self.states[0]["step"].clone()
        self.hidden, self.heads, self.log_std = self._parts(self.weights)
        self.hidden_slopes, self.head_slopes, self.log_std_slope = self._parts(self.gradient)

    def _parts(self, vector: Tensor) -> tuple[list[_Layer], list[_Layer], Tensor]:
        """Views: hidden layers, heads of actor and critic, and log standard deviation (empty for discrete actions)."""
        count, start = len(self.owners) // 4, 0
        hidden = []
        for place in range(0, 4 * (count - 1), 4):
            after, before = self.owners[place].shape
            middle, end = start + 2 * after * before, start + 2 * after * (before + 1)
            hidden.append(_Layer(vector[start:middle].view(2, after, before), vector[middle:end].view(2, 1, after)))
            start = end
        first, first_bias, second, second_bias, *more = self._split(vector)[4 * (count - 1) :]
        return hidden, [_Layer(first, first_bias), _Layer(second, second_bias)], more[0] if more else vector[:0]

    def _split(self, vector: Tensor) -> list[Tensor]:
        """View of each parameter."""
        parts = vector.split([p.numel() for p in self.owners])
        return [part.view_as(p) for part, p in zip(parts, self.owners, strict=True)]

    def forward(self, observation: Tensor) -> list[Tensor]:
        """Outputs of actor ``[n, size]`` and critic ``[n, 1]``."""
        x = observation.expand(2, *observation.shape)
        self.inputs = [x]
        for weight, bias in self.hidden:
            x = torch.baddbmm(bias, x, weight.transpose(1, 2))
            x = tanh(x) if self.tanh else x.relu_()
            self.inputs.append(x)
        return [torch.addmm(bias, each, weight.t()) for (weight, bias), each in zip(self.heads, x, strict=True)]

    def backward(self, slopes: list[Tensor]) -> None:
        """Write the gradient, from that of the outputs."""
        x = self.inputs[-1]
        slope = torch.empty_like(x, memory_format=torch.contiguous_format)
        for tower, (of_output, (weight, _), own) in enumerate(zip(slopes, self.heads, self.head_slopes, strict=True)):
            torch.mm(of_output.t(), x[tower], out=own.weight)
            torch.sum(of_output, 0, out=own.bias)
            torch.mm(of_output, weight, out=slope[tower])
        for number in reversed(range(len(self.hidden))):
            if self.tanh:
                torch.ops.aten.tanh_backward.grad_input(slope, x, grad_input=slope)
            else:
                torch.ops.aten.threshold_backward.grad_input(slope, x, 0, grad_input=slope)
            x, own = self.inputs[number], self.hidden_slopes[number]
            torch.bmm(slope.transpose(1, 2), x, out=own.weight)
            torch.sum(slope, 1, keepdim=True, out=own.bias)
            if number:
                slope = torch.bmm(slope, self.hidden[number].weight)

    def step(self, max_norm: float) -> Tensor:
        """Take a step of Adam with the gradient clipped; return its norm before."""
        (group,), norm = self.adam.param_groups, torch.linalg.vector_norm(self.gradient)
        self.steps.add_(1)
        scale = ((norm + 1e-6) / max_norm).clamp_(min=1.0)
        torch._fused_adamw_(
            [self.weights], [self.gradient], [self.mean], [self.square], [], [self.steps], lr=group["lr"],
            beta1=group["betas"][0], beta2=group["betas"][1], weight_decay=group["weight_decay"], eps=group["eps"],
            amsgrad=False, maximize=False, grad_scale=scale,
        )  # fmt: skip
        return norm

    def write_back(self) -> None:
        """Write the weights, Adam's state and the last gradient to their owners."""
        for owners, vector in zip(self.kept, (self.weights, self.mean, self.square), strict=True):
            torch._foreach_copy_(owners, self._split(vector))
        torch._foreach_copy_([state["step"] for state in self.states], [self.steps] * len(self.states))
        for owner, gradient in zip(self.owners, self._split(self.gradient), strict=True):
            owner.grad = gradient.clone()


def _train(agent: Any, rollout: Any, *, clip_range: float) -> dict[str, float] | None:
    """Take the steps of an update; None, with no weight changed, if something is wrong."""
    networks, config, metrics = _Networks(agent.policy, agent.optimizer.adam), agent.config, list[Tensor]()
    for batch in _minibatches(agent, rollout):
        observation, action, (old, advantage, old_value, target) = batch
        output, value = networks.forward(observation)
        log_prob, entropy, back = _score_actions(output, action, networks)
        log_ratio = log_prob - old
        if not metrics:
            gap = log_ratio.abs()
            if not gap.max().item() <= min(CLOSE, config.ratio_tolerance or CLOSE):
                return None
        change, share = log_ratio.expm1(), 1 / len(action)
        gain, most = (change + 1).mul_(advantage), clip_range if config.clip_higher is None else config.clip_higher
        limit = change.clamp(-clip_range, most).add_(1).mul_(advantage)
        error, value_slope = _value_error(value.squeeze(1), target, old_value, config.clip_range_vf)
        slope = gain.mul(gain <= limit).mul_(-share)
        networks.backward([back(slope, config.ent_coef * share), value_slope.mul_(config.vf_coef * share).unsqueeze(1)])
        far = (change.abs() > clip_range).float()
        means = torch.stack((-torch.minimum(gain, limit), error, entropy, change - log_ratio, far)).mean(1)
        metrics += [means, networks.step(config.max_grad_norm).unsqueeze(0)]
        if config.target_kl is not None and means[3].item() > config.target_kl:
            break
    if not metrics or not (found := torch.cat(metrics).view(-1, len(LOGGED))).isfinite().all():
        return None
    networks.write_back()
    logged = dict(zip(LOGGED, found.double().mean(0).tolist(), strict=True))
    others = {"update/minibatches": len(found), "update/skipped": 0, "update/path": 2}
    return logged | {"policy/sampler_gap": gap.mean().item()} | others


def _minibatches(agent: Any, rollout: Any) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Observations, actions and columns ``[4, n]`` of each minibatch, in the order of `algos.minibatches.minibatches`.

    Yields nothing if advantages or value targets are not finite, not 0 outside the mask, or not whitened.
    """
    policy, mask = agent.policy, rollout["mask"].flatten()
    size, normalize = agent.config.minibatch_size, agent.config.normalize_advantage
    columns = torch.stack([rollout[x].flatten() for x in ("log_prob", "advantage", "value", "value_target")])
    outside = columns[1::2, ~mask]
    if not math.isfinite(columns[1::2].sum().item()) or outside.count_nonzero():
        return
    action = rollout["action"].flatten(0, 1)
    if _full_name(type(policy.distribution)) == CATEGORICAL:
        action = policy.distribution.index(action).unsqueeze(1)
    whole = [policy._read(rollout["observation"].flatten(0, 1)), action, columns.t()]
    observation, action, columns = (x[mask] for x in whole) if outside.numel() else whole
    columns, count = columns.t().contiguous(), len(action)
    every = min(size, count)
    if normalize == "rollout" or (normalize and every == count):
        columns[1] = _white(columns[1])
    for epoch in range(agent.config.num_epochs):
        own = observation, action, columns
        if every < count:
            order = torch.randperm(count, generator=agent.generator, device=agent.generator.device)
            own = observation[order], action[order], columns[:, order]
            if normalize == "minibatch":
                full = count // every * every
                own[2][1, :full] = _white(own[2][1, :full].view(-1, every)).flatten()
                own[2][1, full:] = _white(own[2][1, full:]) if full < count else own[2][1, full:]
        if normalize and epoch == 0:
            variance, centre = torch.var_mean(
                own[2][1, :every] if normalize == "minibatch" else columns[1], correction=0
            )
            if not (abs(centre.item()) <= WHITE and abs(variance.item() ** 0.5 - 1) <= WHITE):
                return
        yield from zip(own[0].split(every), own[1].split(every), own[2].split(every, dim=1), strict=True)


def _white(x: Tensor) -> Tensor:
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

        def of_mean(slope: Tensor, weight: float) -> Tensor:
            torch.mv((standard.square() - 1).t(), slope, out=networks.log_std_slope).sub_(weight * len(slope))
            return standard * inverse * slope.unsqueeze(1)

        return log_prob, (log_std + 0.5 * (LOG_2PI + 1)).sum().expand(log_prob.shape), of_mean
    log_probs = output.log_softmax(-1)
    probs = log_probs.exp()
    entropy = (probs * log_probs).sum(-1).neg_()

    def of_logits(slope: Tensor, weight: float) -> Tensor:
        factor = (log_probs + entropy.unsqueeze(1)).mul_(weight) if weight else 0.0
        return probs.mul_(factor - slope.unsqueeze(1)).scatter_add_(1, action, slope.unsqueeze(1))

    return log_probs.gather(1, action).squeeze(1), entropy, of_logits


def _value_error(value: Tensor, target: Tensor, old: Tensor, clip_range: float | None) -> tuple[Tensor, Tensor]:
    """Entries of `algos.losses.value_loss`, and their slopes."""
    slope = value - target
    error = slope.square()
    if clip_range is not None:
        change = value - old
        clipped = change.clamp(-clip_range, clip_range).add_(old - target)
        other = clipped.square()
        slope = torch.where(error >= other, slope, clipped * (change.abs() <= clip_range))
        error = torch.maximum(error, other)
    return 0.5 * error, slope
