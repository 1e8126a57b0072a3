"""Gradient descent as every algorithm does it: Adam, a schedule, micro-batches, a longest gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from algos.config import ActorCriticConfig, Config
from algos.fast.adam import Adam
from algos.training.diagnose import LossOf, explain_step


class Term(NamedTuple):
    """A part of a loss."""

    coefficient: float
    """What it is multiplied by in the loss; the log has it as it is."""
    entries: Tensor
    """One number an entry, 0 where the mask is False."""


Terms = dict[str, Term]
Totals = dict[str, Tensor]


class Descent:
    """An optimiser with its learning rate's schedule.

    Args:
        parameters: what is trained; those that need no gradient are left out.
        config: learning rates, warm-up, Adam's numbers, longest gradient, what becomes of a step that is not finite.
        policy: whose parameters they are: asked which of them only the value depends on, and what it says about a batch
            whose gradient is not finite.

    Example:
        >>> weight, batch = nn.Parameter(torch.ones(1)), TensorDict({}, batch_size=[1])
        >>> descent = Descent([weight], Config(learning_rate=0.1))
        >>> totals = descent.step(lambda part: (weight.square().sum(), {}), [batch])
        >>> round(weight.item(), 3)
        0.9
    """

    def __init__(self, parameters: Iterable[nn.Parameter], config: Config, *, policy: Any = None) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.config, self.policy = config, policy
        groups, self._shares = [self.parameters], [1.0]
        self._cuts: list[tuple[tuple[int, ...], float]] = [((), config.max_grad_norm)]
        """Groups whose gradient is measured together, all if none is named, and how long it may be."""
        if isinstance(config, ActorCriticConfig) and (config.value_learning_rate or config.value_max_grad_norm):
            own = {id(p) for p in policy.value_parameters()}
            groups = [[p for p in self.parameters if (id(p) in own) is value] for value in (False, True)]
            self._shares.append((config.value_learning_rate or config.learning_rate) / config.learning_rate)
            if config.value_max_grad_norm is not None:
                self._cuts = [((0,), config.max_grad_norm), ((1,), config.value_max_grad_norm)]
        eps = 1e-5 if config.adam_eps is None else config.adam_eps
        self.optimizer = Adam(
            groups,
            learning_rate=config.learning_rate,
            eps=eps,
            betas=config.adam_betas,
            weight_decay=config.weight_decay,
        )

    def schedule(self, progress: float) -> None:
        """Set the learning rate for a share of the training that is done, 0 to 1.

        It rises linearly over the warm-up, to where it starts, and then falls linearly to its end, if it has one.
        """
        config = self.config
        if progress < config.warmup:
            # The first step is taken at progress 0 and is no step at all if the rate is 0 there.
            rate = config.learning_rate * max(progress / config.warmup, 0.01)
        else:
            rest = (progress - config.warmup) / max(1 - config.warmup, 1e-9)
            rate = scheduled(config.learning_rate, config.final_learning_rate, rest)
        for group, share in zip(self.optimizer.param_groups, self._shares, strict=True):
            group["lr"] = rate * share

    def state_dict(self) -> dict[str, Any]:
        """What the optimiser has learnt."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self.optimizer.load_state_dict(state)

    def step(
        self, loss_of: LossOf, parts: Sequence[TensorDict], *others: Callable[[], tuple[Tensor, Totals]]
    ) -> Totals:
        """Take one step on the sum of some losses.

        Args:
            loss_of: gives the loss of a part, and quantities for the log.
            parts: of the minibatch; the gradient of one is taken before the loss of the next.
            others: further losses, which need no batch.

        Returns:
            The sum of each quantity, without gradient, and ``update/grad_norm``, before it is cut. Nothing if the step
            was skipped (`Config.skip_nonfinite`).

        Raises:
            NonFiniteError: if a loss or the gradient is not finite; the weights are left as they are.
        """
        for parameter in self.parameters:
            parameter.grad = None
        totals: Totals = {}
        found: list[Tensor] = []
        losses: list[Callable[[], tuple[Tensor, Totals]]] = [partial(loss_of, part) for part in parts]
        for compute in (*losses, *others):
            loss, terms = compute()
            loss.backward(inputs=self.parameters)  # and no further, where others share the graph
            found.append(loss.detach())
            for name, term in terms.items():
                totals[name] = totals[name] + term.detach() if name in totals else term.detach()
        norms = [self.optimizer.grad_norm(*groups) for groups, _ in self._cuts]
        totals["update/grad_norm"] = grad_norm = norms[0] if len(norms) == 1 else torch.stack(norms).norm()
        # Each is read from the device; the first read waits, and the others find their work done.
        if not all(math.isfinite(x.item()) for x in (grad_norm, *found)):
            if self.config.skip_nonfinite:
                return {}
            step = f"step {self._taken() + 1} of the optimiser"
            raise explain_step(
                loss_of, parts, parameters=self.parameters, policy=self.policy, quantities=totals, step=step
            )
        for norm, (groups, longest) in zip(norms, self._cuts, strict=True):
            self.optimizer.cut_and_step(norm, *groups, longest=longest)
        return totals

    def _taken(self) -> int:
        """Steps of the optimiser so far."""
        return max((int(state["step"]) for state in self.optimizer.state.values()), default=0)


def scheduled(start: float, end: float | None, progress: float) -> float:
    """Linear from start to end over the training; constant without an end."""
    return start if end is None else start + progress * (end - start)


def cut(batch: TensorDict, size: int | None) -> Sequence[TensorDict]:
    """A minibatch in parts of so many units; None leaves it whole."""
    return [batch] if size is None else batch.split(size)


def add_up(terms: Terms, *, weight: Tensor, share: Tensor) -> tuple[Tensor, Totals]:
    """A loss from its terms.

    Args:
        terms: by their names in the log.
        weight: of each entry in the loss (`algos.losses.Aggregation`).
        share: of each entry in the log: one over the True entries of the whole minibatch.

    Returns:
        The loss, and each term's mean over the True entries.
    """
    # What a loss leaves out has no gradient either.
    columns = [term.entries if term.coefficient else term.entries.detach() for term in terms.values()]
    entries = torch.stack([column.flatten() for column in columns])
    sums = entries @ weight.flatten()
    means = sums.detach() if weight is share else entries.detach() @ share.flatten()
    loss = sums @ sums.new_tensor([term.coefficient for term in terms.values()])
    return loss, dict(zip(terms, means.unbind(), strict=True))
