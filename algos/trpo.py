"""Trust region policy optimization (Schulman et al. 2015): natural-gradient steps of bounded KL."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from gymnasium.vector import VectorEnv
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from algos import losses
from algos.advantages import add_advantages
from algos.agent import Agent
from algos.config import TRPOConfig
from algos.minibatches import minibatches, places, whiten_advantage
from algos.optimizer import Optimizer
from algos.policies.policy import Policy
from algos.training.diagnose import explain_step
from algos.training.invariants import check_advantages, check_first
from algos.training.metrics import MetricMeans, Metrics, StepMetrics, minibatch_means
from textenv.errors import PLACE


class TRPO(Agent[TRPOConfig]):
    """Natural gradient with GAE and a line search; the critic is trained separately.

    The critic's steps change only parameters that the action probabilities do not depend on (for a language model the
    value head or a separate critic), because a step of a shared trunk could leave the trust region.

    Arguments: see `algos.agent.Agent`. The policy's `divergence` must be twice differentiable.

    Raises:
        ValueError: if the penalty is charged in the loss, which TRPO does not support.

    Example:
        >>> TRPO(env, policy, TRPOConfig(num_steps=128)).learn(100_000)  # doctest: +SKIP
    """

    config_type = TRPOConfig

    def __init__(
        self, env: VectorEnv, policy: Policy | None = None, config: TRPOConfig | None = None, **options: Any
    ) -> None:
        super().__init__(env, policy, config, **options)
        if self.penalty is not None and self.penalty.place == "loss":
            raise ValueError("TRPO cannot charge the penalty in the loss: use KLPenalty(..., place='reward')")
        self._actor: list[nn.Parameter] = []
        """Parameters that the action probabilities depend on, found in each update."""
        self._critic: Optimizer | None = None
        """Optimizer of all other parameters; None before the first update."""

    def update(self, rollout: TensorDict) -> Metrics:
        """Improve the policy on a rollout and add its value and advantage columns; return metrics."""
        metrics = add_advantages(self, rollout)
        check_advantages(rollout)
        mask = rollout["mask"]
        if not mask.any():
            return {}

        # Rows if the policy is sequential, else single steps, as in minibatches; what is outside the mask is left out
        units = rollout.copy().set(PLACE, places(rollout))
        if self.config.normalize_advantage:
            whiten_advantage(units)
        if self.policy.sequential:
            units = units[mask.any(dim=1)]
        else:
            units = units[mask]

        # A step of the actor inside the trust region, then steps of the critic
        with sdpa_kernel(SDPBackend.MATH):  # the only attention backend with second derivatives
            actor_metrics = self._improve(units)
        critic_metrics = self._fit_value(rollout)
        skipped = actor_metrics.get("update/skipped", 0) + critic_metrics["update/skipped"]
        return actor_metrics | critic_metrics | {"update/skipped": skipped} | metrics

    def state_dict(self) -> dict[str, object]:
        """See `Agent.state_dict`; includes the critic's own optimizer."""
        state: dict[str, object] = {"critic": None, "critic_weights": None}
        if self._critic is not None:
            critic_ids = {id(p) for p in self._critic.parameters}
            indices = [i for i, p in enumerate(self.policy.parameters()) if id(p) in critic_ids]
            state = {"critic": self._critic.state_dict(), "critic_weights": indices}
        return super().state_dict() | state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Agent.load_state_dict`."""
        super().load_state_dict(state)
        if state["critic"] is not None:
            weights = list(self.policy.parameters())
            self._critic = Optimizer([weights[i] for i in state["critic_weights"]], self.config, policy=self.policy)
            self._critic.load_state_dict(state["critic"])

    def _improve(self, rollout: TensorDict) -> Metrics:
        """Take one step of the actor."""
        config = self.config
        old = self.policy.reference()

        # Gradient of the surrogate objective
        gain = self._gain(rollout, first=True)
        parameters = [p for p in self.policy.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(gain, parameters, allow_unused=True)
        self._actor = [p for p, gradient in zip(parameters, gradients, strict=True) if gradient is not None]
        gradient = _flat([x for x in gradients if x is not None])
        norm = gradient.norm()
        if not norm.isfinite() and not config.skip_nonfinite:
            raise explain_step(
                lambda part: (self._gain(part), {}),
                [rollout],
                parameters=parameters,
                policy=self.policy,
                quantities={"policy/gain": gain.detach(), "update/grad_norm": norm},
                step="the actor's step",
            )
        if not norm.isfinite() or not gradient.any():  # not finite (skipped), or zero
            no_step = {"policy/approx_kl": 0.0, "policy/gain": 0.0, "update/line_search_steps": 0}
            return no_step | {"update/skipped": int(not norm.isfinite())}

        # Natural gradient, scaled so that the quadratic model of the KL is max_kl (appendix C)
        curvature = self._curvature(rollout, old)
        direction = conjugate_gradient(curvature, gradient, steps=config.conjugate_gradient_steps)
        length = (2 * config.max_kl / (direction @ curvature(direction))).sqrt()
        return self._line_search(rollout, old, step=length * direction, old_gain=gain.item())

    def _gain(self, rollout: TensorDict, *, first: bool = False) -> Tensor:
        """The surrogate objective, mean of ratio times advantage (eq. 14)."""
        mask = rollout["mask"]
        evaluation = self.policy.evaluate(rollout)
        log_ratio = losses.log_ratio(log_prob=evaluation.log_prob, old_log_prob=rollout["log_prob"], mask=mask)
        if first:
            check_first(
                log_ratio,
                batch=rollout,
                evaluation=evaluation,
                policy=self.policy,
                tolerance=self.config.ratio_tolerance,
            )
        return (log_ratio.exp() * rollout["advantage"] * losses.token_mean(mask=mask)).sum()

    def _kl(self, rollout: TensorDict, old: object) -> Tensor:
        """Mean KL of the policy to the old one, nats per step."""
        mask = rollout["mask"]
        kl = torch.where(mask, self.policy.divergence(rollout, old), 0.0)
        return (kl * losses.token_mean(mask=mask)).sum()

    def _curvature(self, rollout: TensorDict, old: object) -> Callable[[Tensor], Tensor]:
        """Function that multiplies a vector by the damped Hessian of the KL at the old policy (Fisher)."""
        slope = _flat(torch.autograd.grad(self._kl(rollout, old), self._actor, create_graph=True))

        def product(vector: Tensor) -> Tensor:
            hessian_product = torch.autograd.grad(slope @ vector, self._actor, retain_graph=True)
            return _flat(hessian_product) + self.config.damping * vector

        return product

    @torch.no_grad()
    def _line_search(self, rollout: TensorDict, old: object, *, step: Tensor, old_gain: float) -> Metrics:
        """Shorten the step until the policy improves inside the trust region; otherwise restore the old policy."""
        config = self.config
        start = _flat(self._actor)
        for attempt in range(config.line_search_steps):
            _write(start + config.line_search_factor**attempt * step, self._actor)
            gain = self._gain(rollout).item() - old_gain
            kl = self._kl(rollout, old).item()
            if gain > 0 and kl <= config.max_kl:
                return {"policy/approx_kl": kl, "policy/gain": gain, "update/line_search_steps": attempt + 1}
        _write(start, self._actor)
        return {"policy/approx_kl": 0.0, "policy/gain": 0.0, "update/line_search_steps": config.line_search_steps}

    def _fit_value(self, rollout: TensorDict) -> Metrics:
        """Minimize the value loss over the parameters that the action probabilities do not depend on."""
        config = self.config
        if self._critic is None:
            actor_ids = {id(p) for p in self._actor}
            parameters = [p for p in self.policy.parameters() if id(p) not in actor_ids]
            self._critic = Optimizer(parameters, config, policy=self.policy)
        self._critic.schedule(self.progress)
        means = MetricMeans()
        batches = minibatches(
            rollout,
            sequential=self.policy.sequential,
            generator=self.update_generator,
            size=config.minibatch_size,
            num_epochs=config.critic_epochs,
        )
        for batch in batches:
            means.add(self._critic.step(self._value_loss, batch))
        return means.result()

    def _value_loss(self, batch: TensorDict) -> tuple[Tensor, StepMetrics]:
        """Value loss of a minibatch, or of a part of it, and its metrics."""
        mask = batch["mask"]
        evaluation = self.policy.evaluate(batch)
        value_loss = losses.value_loss(value=evaluation.value, value_target=batch["value_target"], mask=mask)
        entropy = torch.where(mask, evaluation.entropy, 0.0)
        metrics = minibatch_means(batch, {"value/loss": value_loss, "policy/entropy": entropy})
        return (value_loss * batch["weight"]).sum(), metrics


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """Write tensors one after the other into a vector."""
    return torch.cat([x.reshape(-1) for x in tensors])


def _write(vector: Tensor, parameters: Sequence[nn.Parameter]) -> None:
    """Copy a vector from `_flat` into the parameters. Views of the vector could not be saved separately."""
    for parameter, part in zip(parameters, vector.split([p.numel() for p in parameters]), strict=True):
        parameter.copy_(part.view_as(parameter))


def conjugate_gradient(product: Callable[[Tensor], Tensor], target: Tensor, *, steps: int) -> Tensor:
    """Solve A x = b for a positive definite A, from its products with vectors (Hestenes and Stiefel 1952).

    Args:
        product: returns A v for a vector v ``[n]``.
        target: b ``[n]``.
        steps: maximum number of iterations; stops early once the residual vanishes.

    Returns:
        x ``[n]``, exact after n steps up to rounding.
    """
    solution = torch.zeros_like(target)
    residual = target.clone()
    direction = residual.clone()
    squared_residual = residual @ residual
    for _ in range(steps):
        image = product(direction)
        stride = squared_residual / (direction @ image)
        solution = solution + stride * direction
        residual = residual - stride * image
        last_squared_residual = squared_residual
        squared_residual = residual @ residual
        if squared_residual < 1e-10 * (target @ target):
            break
        direction = residual + squared_residual / last_squared_residual * direction
    return solution
