"""Trust region policy optimization (Schulman et al. 2015): natural-gradient steps of bounded KL."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from gymnasium.vector import VectorEnv
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from algos.agent import Agent
from algos.config import TRPOConfig
from algos.losses import token_mean, value_loss
from algos.optimize import (
    PLACE,
    MetricMeans,
    Metrics,
    Optimizer,
    Sums,
    Term,
    add_advantages,
    log_ratios,
    places,
    rollout_metrics,
    total_loss,
    weighted_minibatches,
    whiten_advantage,
)
from algos.policies.policy import Policy
from algos.training.diagnose import explain_step
from algos.training.invariants import check_advantages


class TRPO(Agent[TRPOConfig]):
    """Natural gradient with GAE and a line search; the critic is trained separately.

    The critic step changes only parameters that the action probabilities do not depend on (for a language model the
    value head or a separate critic), since a step of a shared trunk could leave the trust region.

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
        self._critic: Optimizer | None = None

    def update(self, rollout: TensorDict) -> Metrics:
        """Improve the policy on a rollout and add its value and advantage columns; return metrics."""
        config = self.config
        add_advantages(self, rollout)
        check_advantages(rollout)
        mask = rollout["mask"]
        if not mask.any():
            return rollout_metrics(rollout)
        units = rollout.copy().set(PLACE, places(rollout))
        if config.normalize_advantage:
            whiten_advantage(units)
        # As in `minibatches`, single steps outside the mask are dropped.
        units = units[mask.any(dim=1) if self.policy.sequential else mask]
        with sdpa_kernel(SDPBackend.MATH):  # the only attention backend with second derivatives
            metrics = self._improve(units)
        fitted = self._fit_value(rollout)
        skipped = metrics.get("update/skipped", 0) + fitted["update/skipped"]
        return metrics | fitted | rollout_metrics(rollout) | {"update/skipped": skipped}

    def state_dict(self) -> dict[str, Any]:
        """See `Agent.state_dict`; includes the critic's own optimizer."""
        state: dict[str, Any] = {"critic": None, "critic_weights": None}
        if self._critic is not None:
            own = {id(p) for p in self._critic.parameters}
            places = [i for i, p in enumerate(self.policy.parameters()) if id(p) in own]
            state = {"critic": self._critic.state_dict(), "critic_weights": places}
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
        old, config = self.policy.reference(), self.config
        gain = self._gain(rollout, first=True)
        parameters = [p for p in self.policy.parameters() if p.requires_grad]
        slopes = torch.autograd.grad(gain, parameters, allow_unused=True)
        self._actor = [p for p, slope in zip(parameters, slopes, strict=True) if slope is not None]
        gradient = _flat([slope for slope in slopes if slope is not None])
        norm = gradient.norm()
        if not norm.isfinite() and not config.skip_nonfinite:
            quantities = {"policy/gain": gain.detach(), "update/grad_norm": norm}
            raise explain_step(
                lambda part: (self._gain(part), {}), [rollout], parameters=parameters, policy=self.policy,
                quantities=quantities, step="the actor's step",
            )  # fmt: skip
        if not norm.isfinite() or not gradient.any():  # not finite (skipped), or zero
            still = {"policy/approx_kl": 0.0, "policy/gain": 0.0, "update/line_search_steps": 0}
            return still | {"update/skipped": int(not norm.isfinite())}
        curvature = self._curvature(rollout, old)
        direction = conjugate_gradient(curvature, gradient, steps=config.conjugate_gradient_steps)
        # The longest step in this direction that the second-order model of the KL allows (appendix C).
        length = (2 * config.max_kl / (direction @ curvature(direction))).sqrt()
        return self._line_search(rollout, old, step=length * direction, before=gain.item())

    def _gain(self, rollout: TensorDict, *, first: bool = False) -> Tensor:
        """The surrogate objective, mean of ratio times advantage (eq. 14)."""
        evaluation = self.policy.evaluate(rollout)
        ratios = log_ratios(rollout, evaluation=evaluation, policy=self.policy, config=self.config, first=first)
        return (ratios.exp() * rollout["advantage"] * token_mean(mask=rollout["mask"])).sum()

    def _kl(self, rollout: TensorDict, old: object) -> Tensor:
        kl = torch.where(rollout["mask"], self.policy.divergence(rollout, old), 0.0)
        return (kl * token_mean(mask=rollout["mask"])).sum()

    def _curvature(self, rollout: TensorDict, old: object) -> Callable[[Tensor], Tensor]:
        """Function that multiplies a vector by the damped Hessian of the KL at the old policy (Fisher)."""
        slope = _flat(torch.autograd.grad(self._kl(rollout, old), self._actor, create_graph=True))

        def product(vector: Tensor) -> Tensor:
            second = torch.autograd.grad(slope @ vector, self._actor, retain_graph=True)
            return _flat(second) + self.config.damping * vector

        return product

    @torch.no_grad()
    def _line_search(self, rollout: TensorDict, old: object, *, step: Tensor, before: float) -> Metrics:
        """Shorten the step until the policy improves inside the trust region; otherwise restore the old policy."""
        start = _flat(self._actor)
        for tried in range(self.config.line_search_steps):
            _write(start + self.config.line_search_factor**tried * step, self._actor)
            gain, kl = self._gain(rollout).item() - before, self._kl(rollout, old).item()
            if gain > 0 and kl <= self.config.max_kl:
                return {"policy/approx_kl": kl, "policy/gain": gain, "update/line_search_steps": tried + 1}
        _write(start, self._actor)
        return {"policy/approx_kl": 0.0, "policy/gain": 0.0, "update/line_search_steps": self.config.line_search_steps}

    def _fit_value(self, rollout: TensorDict) -> Metrics:
        """Minimize the value loss over the parameters that the action probabilities do not depend on."""
        if self._critic is None:
            own = {id(p) for p in self._actor}
            self._critic = Optimizer(
                (p for p in self.policy.parameters() if id(p) not in own), self.config, policy=self.policy
            )
        self._critic.schedule(self.progress)
        means = MetricMeans()
        for batch in weighted_minibatches(
            rollout,
            policy=self.policy,
            generator=self.generator,
            size=self.config.minibatch_size,
            num_epochs=self.config.critic_epochs,
        ):
            means.add(self._critic.step(self._value_loss, [batch]))
        return means.result()

    def _value_loss(self, batch: TensorDict) -> tuple[Tensor, Sums]:
        evaluation = self.policy.evaluate(batch)
        assert evaluation.value is not None, "a policy's evaluation has a value; only a reference's has none"
        error = value_loss(value=evaluation.value, value_target=batch["value_target"], mask=batch["mask"])
        entropy = torch.where(batch["mask"], evaluation.entropy.detach(), 0.0)
        terms = {"value/loss": Term(1.0, error), "policy/entropy": Term(0.0, entropy)}
        return total_loss(terms, weight=batch["weight"], share=batch["share"])


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.reshape(-1) for x in tensors])


def _write(vector: Tensor, parameters: Sequence[nn.Parameter]) -> None:
    """Copy a vector from `_flat` into the parameters; views of one vector could not be saved separately."""
    for parameter, part in zip(parameters, vector.split([p.numel() for p in parameters]), strict=True):
        parameter.copy_(part.view_as(parameter))


def conjugate_gradient(product: Callable[[Tensor], Tensor], target: Tensor, *, steps: int) -> Tensor:
    """Solve A x = b for a positive definite A given by its matrix-vector products (Hestenes and Stiefel 1952).

    Args:
        product: maps a vector ``[n]`` to A times it.
        target: b ``[n]``.
        steps: maximum number of iterations; stops early once the residual vanishes.

    Returns:
        x ``[n]``, exact after n steps up to rounding.
    """
    solution, residual = torch.zeros_like(target), target.clone()
    direction, size = residual.clone(), residual @ residual
    for _ in range(steps):
        image = product(direction)
        stride = size / (direction @ image)
        solution, residual = solution + stride * direction, residual - stride * image
        size, last = residual @ residual, size
        if size < 1e-10 * (target @ target):
            break
        direction = residual + size / last * direction
    return solution
