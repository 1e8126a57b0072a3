"""VinePPO's values (Kazemnejad et al. 2024): means of the returns of several completions from the same state.

An answer is cut into steps of equal length. The value of the state before a step is not learned: the policy completes
its text several times, and the mean return is an estimate without bias.
"""

import torch
from tensordict import TensorDict
from torch import Tensor

from algos.advantages import episode_returns
from algos.collection import Collector
from algos.config import ActorCriticConfig
from algos.training.learner import Learner, StateValues
from algos.training.metrics import Metrics
from textenv.envs.branches import Beginning, branch_env, check_branches
from textenv.envs.vector_env import TextVectorEnv
from textenv.kl.penalty import KLPenalty
from textenv.rollout import prompt_lengths
from textenv.state import frozen_states

MAX_SLOTS = 256
"""Maximum number of completions that are generated at the same time."""


class Vine:
    """Estimates values by completions, for ``config.vine_samples``.

    The reward is called once for the completions of a whole rollout: one that compares the answers of a batch, such as
    `textenv.rewards.whiten`, compares them with one another.

    Args:
        samples: completions for each state.
        interval: tokens of a step.
    """

    def __init__(self, *, samples: int, interval: int) -> None:
        self.samples = samples
        self.interval = interval

    @torch.no_grad()
    def __call__(self, agent: Learner[ActorCriticConfig], rollout: TensorDict) -> StateValues:
        """Complete the answers of a rollout from each of their steps on, and return the mean returns.

        A KL penalty in the reward is charged to the completions as to the answers. Where the reward leaves out all
        completions of a state, its value is the mean of the others of the same step.

        Args:
            agent: collected the rollout.
            rollout: text ``[B, T]``.

        Raises:
            ValueError: if the rollout is not the one that the environment has scored last.
        """
        env = check_branches(agent.env)
        mask = rollout["mask"]
        length_of_row = mask.sum(1)
        beginnings, places = self._beginnings(env, rollout)
        metrics: Metrics = {"update/steps": 0}
        num_steps = -(-int(length_of_row.max()) // self.interval)
        value_of_step = torch.zeros(len(rollout), num_steps, device=mask.device)
        if beginnings:
            branches = self._complete(agent, env, beginnings)
            metrics["update/steps"] = int(branches["mask"].sum())
            if agent.penalty is not None and agent.penalty.place == "reward":
                branches = self._charged(agent, agent.penalty, branches, size=len(rollout))
            rows, steps = torch.tensor(places, device=mask.device).unbind(1)
            value_of_step[rows, steps] = self._mean_returns(branches, steps=steps)

        # Entries of a row, counted from its first token, and the step of each
        first = mask.int().argmax(1, keepdim=True)
        index = (torch.arange(mask.shape[1], device=mask.device) - first).clamp(min=0)
        step = (index // self.interval).clamp(max=num_steps - 1)
        is_last = index == length_of_row[:, None] - 1
        ends = mask & (is_last | (index % self.interval == self.interval - 1))
        value = torch.where(mask, value_of_step.gather(1, step), 0.0)
        following = value_of_step.gather(1, (step + 1).clamp(max=num_steps - 1))
        next_value = torch.where(ends, following, value)
        return StateValues(value, torch.where(mask & ~is_last, next_value, 0.0), ends, metrics)

    def _beginnings(self, env: TextVectorEnv, rollout: TensorDict) -> tuple[list[Beginning], list[tuple[int, int]]]:
        """Beginnings of all steps of the answers of a rollout, and the row and step of each."""
        # Turns and tokens of the answers
        turns = dict(zip(env.scored_turns.episodes, env.scored_turns.turns, strict=True))
        tokens = rollout["observation"].tolist()
        actions = rollout["action"].tolist()
        starts = prompt_lengths(rollout).tolist()
        lengths = rollout["mask"].sum(1).tolist()

        # Those that the reward has left out are not completed
        beginnings = []
        places = []
        for row, length in enumerate(lengths):
            if not length:
                continue
            start = starts[row]
            turn = turns.get(row)
            answer = actions[row][start - 1 : start - 1 + length]
            if turn is None or turn.prompt_ids != tokens[row][:start] or turn.completion_ids != answer:
                raise ValueError(
                    f"row {row} of the rollout is not the episode {row} that the environment has scored last: "
                    "vine_samples needs rollouts of agent.collect, updated before anything else is played in it"
                )
            for step, begin in enumerate(range(0, length, self.interval)):
                beginnings.append(Beginning(turn, begin))
                places.append((row, step))
        return beginnings, places

    def _complete(
        self, agent: Learner[ActorCriticConfig], env: TextVectorEnv, beginnings: list[Beginning]
    ) -> TensorDict:
        """Sample completions of each beginning; rewards with a state use their present one, and do not change it."""
        count = len(beginnings) * self.samples
        branches = branch_env(env, beginnings, num_envs=min(count, MAX_SLOTS))
        collector = Collector(branches, agent.policy.fork(), seed=0)
        with frozen_states(env.user_objects):
            rollout = collector.collect(num_episodes=count, group_size=self.samples)
        return rollout.to(agent.policy.device)

    def _charged(
        self, agent: Learner[ActorCriticConfig], penalty: KLPenalty, branches: TensorDict, *, size: int
    ) -> TensorDict:
        """Return the completions with the KL in their rewards; as many rows are scored at once as a rollout has."""
        rewards = []
        for rows in branches.split(size):
            charged = rows.clone()
            penalty(charged, agent.policy)
            rewards.append(charged["reward"])
        return branches.copy().set("reward", torch.cat(rewards))

    def _mean_returns(self, branches: TensorDict, *, steps: Tensor) -> Tensor:
        """Mean return of the completions of each beginning, float32 ``[N]``, without those that the reward left out.

        Args:
            branches: ``[N * samples, T]``.
            steps: number of the step that each beginning comes before, ``[N]``.
        """
        returns = episode_returns(branches)  # 0 for those that were left out
        count = branches["mask"].any(1).view(-1, self.samples).sum(1)
        mean = returns.view(-1, self.samples).sum(1) / count.clamp(min=1)

        # Where all were left out: the mean of the others of this step
        for step in steps[count == 0].unique():
            same_step = (steps == step) & (count > 0)
            if same_step.any():
                mean[(steps == step) & (count == 0)] = mean[same_step].mean()
        return mean
