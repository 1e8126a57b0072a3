"""`AgentBaseline`: a baseline for each agent of a game in which one policy plays all of them."""

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from algos.advantages import episode_returns


class AgentBaseline:
    """Running mean of each agent's returns, as a baseline of games in which one policy plays all agents.

    A policy that plays against itself wins as much as it loses, but one agent may have the better seat: the mean of all
    returns then fits neither (role-conditioned advantage estimation: Liu et al. 2025, SPIRAL, section 3.2).

    Args:
        decay: weight of the former mean when an episode's return is added.
    """

    def __init__(self, decay: float = 0.95) -> None:
        self.decay = decay
        self.means: dict[int, float] = {}
        """Running mean of the returns, by agent; begins at 0."""

    def __call__(self, episodes: TensorDict) -> Tensor:
        """Update the means with these episodes, in their order, and return the baseline of each.

        Args:
            episodes: one row for each episode (`textenv.rollout.join_episodes`), in the order in which they are added.

        Returns:
            float32 ``[E]``: the agent's mean after each episode; 0 for episodes without a step. It includes the
            episode's own return with weight ``1 - decay``. So the advantage is ``decay * (return - former mean)``: only
            the scale changes, and the former mean does not depend on the episode's actions.
        """
        returns = episode_returns(episodes).tolist()
        has_steps = episodes["mask"].any(dim=1).tolist()
        agents = [0] * len(returns)
        if "agent" in episodes.keys():
            agents = episodes["agent"][:, 0].tolist()
        baseline = [0.0] * len(returns)
        for episode, agent in enumerate(agents):
            if has_steps[episode]:
                former_mean = self.means.get(agent, 0.0)
                self.means[agent] = self.decay * former_mean + (1 - self.decay) * returns[episode]
                baseline[episode] = self.means[agent]
        return episodes["mask"].new_tensor(baseline, dtype=torch.float32)

    def state_dict(self) -> dict[str, object]:
        """Return the running means."""
        return {"agents": list(self.means), "means": list(self.means.values())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.means = dict(zip(state["agents"], state["means"], strict=True))
