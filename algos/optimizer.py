"""`Optimizer`: a step of Adam on the loss of a minibatch: micro-batches, ranks, clipping, and a check for NaN."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from algos import parallel
from algos.config import CONTROL_RATE, ActorCriticConfig, Config, PolicyGradientConfig, scheduled
from algos.policies.sharding import ShardedAdam, Shards
from algos.training.diagnose import LossOf, explain_step
from algos.training.invariants import NonFiniteError
from algos.training.metrics import StepMetrics
from textenv.acceleration import accelerated

ExtraLoss = Callable[[], tuple[Tensor, StepMetrics]]
"""Function that returns a further loss, which needs no batch, and its metrics."""


@accelerated("algos.fast.adam:Adam", "b50e8f64ed72")
class Adam(torch.optim.AdamW):
    """AdamW that clips the gradients of some groups together; weight decay 0 gives Adam."""

    def clip_grad_norm_(self, max_norm: float, groups: Sequence[int]) -> Tensor:
        """Scale the gradients of these groups to a global norm of at most ``max_norm``; return the norm before."""
        parameters = [p for i in groups for p in self.param_groups[i]["params"]]
        return nn.utils.clip_grad_norm_(parameters, max_norm)


class Optimizer:
    """Adam with a learning-rate schedule and gradient clipping.

    Args:
        parameters: the parameters to train; those that need no gradient are left out.
        config: learning rates, warm-up, Adam's settings, maximum gradient norm, size of micro-batches, handling of
            non-finite steps.
        policy: owner of the parameters, used to find those that only the value depends on, and to explain a non-finite
            gradient.
        shards: whose parameters these are, if the ranks share them.

    Example:
        >>> weight, batch = nn.Parameter(torch.ones(1)), TensorDict({}, batch_size=[1])
        >>> optimizer = Optimizer([weight], Config(learning_rate=0.1))
        >>> metrics = optimizer.step(lambda part: (weight.square().sum(), {}), batch)
        >>> round(weight.item(), 3)
        0.9
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], config: Config, *, policy: Any = None, shards: Shards | None = None
    ) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.config = config
        self.policy = policy
        self.shards = shards
        self.micro_batch_size: int | None = None
        if isinstance(config, PolicyGradientConfig):
            self.micro_batch_size = config.micro_batch_size

        # One group of parameters, or two if the value has a learning rate or a gradient norm of its own
        self._rate = CONTROL_RATE if config.learning_rate is None else config.learning_rate
        groups = [self.parameters]
        self._rate_factors = [1.0]
        """Learning rate of each group, relative to the first."""
        self._clips: dict[tuple[int, ...], float] = {(0,): config.max_grad_norm}
        """Maximum norm of the gradients of each set of groups."""
        if isinstance(config, ActorCriticConfig) and (config.value_learning_rate or config.value_max_grad_norm):
            value_ids = {id(p) for p in policy.value_parameters()}
            value_group = [p for p in self.parameters if id(p) in value_ids]
            policy_group = [p for p in self.parameters if id(p) not in value_ids]
            groups = [policy_group, value_group]
            value_rate = config.value_learning_rate or self._rate
            self._rate_factors.append(value_rate / self._rate)
            if config.value_max_grad_norm is None:
                self._clips = {(0, 1): config.max_grad_norm}
            else:
                self._clips[(1,)] = config.value_max_grad_norm

        adam_type = Adam if shards is None else ShardedAdam
        self.adam = adam_type(
            [{"params": group} for group in groups],
            lr=self._rate,
            eps=config.adam_eps or 1e-5,
            betas=(config.adam_betas[0], config.adam_betas[1]),
            weight_decay=config.weight_decay,
            fused=True,
        )

    def schedule(self, progress: float) -> None:
        """Set the learning rate for a training progress from 0 to 1.

        It rises linearly over the warm-up to its initial value, then falls linearly to its final value, if any.
        """
        config = self.config
        if progress < config.warmup_ratio:
            # The first step is taken at progress 0 and would do nothing at a rate of 0.
            rate = self._rate * max(progress / config.warmup_ratio, 0.01)
        else:
            after_warmup = (progress - config.warmup_ratio) / max(1 - config.warmup_ratio, 1e-9)
            rate = scheduled(self._rate, config.final_learning_rate, after_warmup)
        for group, factor in zip(self.adam.param_groups, self._rate_factors, strict=True):
            group["lr"] = rate * factor

    def state_dict(self) -> dict[str, Any]:
        """Return the state of Adam."""
        return self.adam.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.adam.load_state_dict(state)

    def step(self, loss_of: LossOf, batch: TensorDict, *extra_losses: ExtraLoss) -> StepMetrics:
        """Take one step on the loss of a minibatch.

        Each rank computes the loss of its rows, in parts of ``micro_batch_size``. Losses and metrics of parts are added
        up, so they must be sums that are weighted over the whole minibatch.

        Args:
            loss_of: returns the loss of a part of the minibatch, and metrics.
            batch: the minibatch.
            extra_losses: further losses, which need no batch.

        Returns:
            The sum of each metric, without gradient, and ``update/grad_norm``, before clipping. Empty if the step was
            skipped (`Config.skip_nonfinite`).

        Raises:
            NonFiniteError: if a loss or the gradient is not finite; the weights stay unchanged.
            ValueError: if no parameter has a gradient.
        """
        # Gradient of this rank's rows: one backward pass for each part, then one for each further loss
        parts = self._parts(batch)
        losses, metrics = self._backward(
            [partial(loss_of, part) for part in parts] + [parallel.divided(extra) for extra in extra_losses]
        )

        # Gradient of all rows; shards have added up theirs already
        summed = self.parameters if self.shards is None else []
        parallel.add_up(summed, [*losses, *metrics.values()])

        # Clipping
        grad_norm = self._clip()
        metrics["update/grad_norm"] = grad_norm

        # Step, unless something is not finite
        if not _finite([grad_norm, *losses]):
            if self.config.skip_nonfinite:
                return {}
            raise self._explanation(loss_of, parts, metrics)
        self.adam.step()
        return metrics

    def _parts(self, batch: TensorDict) -> Sequence[TensorDict]:
        """Micro-batches of this rank's rows."""
        rows = parallel.own_rows(batch)
        return [rows] if self.micro_batch_size is None else rows.split(self.micro_batch_size)

    def _backward(self, computations: Sequence[ExtraLoss]) -> tuple[list[Tensor], StepMetrics]:
        """Write the gradient of the sum of some losses; return the losses, and the sum of each metric."""
        for parameter in self.parameters:
            parameter.grad = None
        losses: list[Tensor] = []
        sums: StepMetrics = {}
        for compute in computations:
            if self.shards is None:
                loss, metrics = compute()
                loss.backward(inputs=self.parameters)  # no others, even if they are in the graph
            else:
                loss, metrics = self.shards.run(compute)
                loss.backward()
            losses.append(loss.detach())
            for name, value in metrics.items():
                sums[name] = sums[name] + value.detach() if name in sums else value.detach()
        if all(p.grad is None for p in self.parameters):
            raise ValueError(
                "no parameter of the optimizer has a gradient: does the policy compute with the parameters that it "
                "lists, and did you replace them after the first update?"
            )
        return losses, sums

    def _clip(self) -> Tensor:
        """Clip the gradients; return their global norm before."""
        norms = [self.adam.clip_grad_norm_(max_norm, groups) for groups, max_norm in self._clips.items()]
        return norms[0] if len(norms) == 1 else torch.stack(norms).norm()

    def _explanation(self, loss_of: LossOf, parts: Sequence[TensorDict], metrics: StepMetrics) -> NonFiniteError:
        """Error that names what is not finite, by the whole minibatch on the whole policy."""
        steps = [int(state["step"]) for state in self.adam.state.values()]
        all_parts = parallel.gather_parts(parts)
        policy = self.policy
        parameters = self.parameters
        if self.shards is not None:
            policy = self.shards.leave()
            parameters = [p for p in policy.parameters() if p.requires_grad]
        return explain_step(
            loss_of,
            all_parts,
            parameters=parameters,
            policy=policy,
            quantities=metrics,
            step=f"step {max(steps, default=0) + 1} of the optimiser",
        )


def _finite(scalars: Iterable[Tensor]) -> bool:
    # Each is read from the device, but only the first read waits for it.
    return all(math.isfinite(x.item()) for x in scalars)
