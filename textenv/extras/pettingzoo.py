"""`from_pettingzoo`: games of several agents of PettingZoo, as a vector environment whose slots are the agents."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array

from textenv.optional import package
from textenv.rollout import WAITING

MASK = "action_mask"
"""Key of the mask of legal actions, in an agent's observation or info."""


def from_pettingzoo(make_env: str | Callable[[], Any] | Any, num_envs: int = 1) -> PettingZooVectorEnv:
    """Make a vector environment of games of PettingZoo: each agent of each game is a slot, and one policy plays all.

    Both interfaces work: parallel, in which all agents act at once, and AEC, in which they act in turn. A slot waits
    while its agent is not to move, or is out of the game: its action is not used, and the step does not count (False in
    the rollout's ``mask``). A reward that an agent gets meanwhile belongs to its action before. When all agents are
    out, the next step begins a new game.

    A Dict observation with the parts ``observation`` and ``action_mask``, as in PettingZoo's classic games, is divided
    into these; a mask in an agent's info is taken, too. If the agents' spaces differ, they are padded by SuperSuit.

    Args:
        make_env: an id of PettingZoo's registry, such as ``"classic/tictactoe-v3"`` (its parallel interface, if it has
            one); or a function that makes a game, such as ``simple_spread_v3.parallel_env``; or a game, for
            ``num_envs=1``.
        num_envs: number of games; the environment has a slot for each agent of each of them.

    Raises:
        TypeError: if it is, or makes, no environment of PettingZoo, or one game is to be played several times at once.
        ValueError: if the agents' spaces differ in a way that cannot be padded.

    Example:
        >>> PPO(from_pettingzoo("classic/tictactoe-v3", num_envs=16)).learn(50_000)  # doctest: +SKIP
    """
    pettingzoo = package("pettingzoo", "pettingzoo")
    if num_envs < 1:
        raise ValueError(f"num_envs is {num_envs}, expected at least 1")

    # A function that makes one game
    if isinstance(make_env, str):
        interface = "parallel" if make_env in pettingzoo.parallel_registry else "aec"
        make_env = functools.partial(pettingzoo.make, interface, make_env)
    is_game = hasattr(make_env, "possible_agents") and not isinstance(make_env, type)

    # The games
    games = []
    for _ in range(num_envs):
        if is_game and num_envs > 1:
            raise TypeError(
                f"make_env is the game {make_env}, which cannot be played {num_envs} times at once: give a function "
                "that makes one"
            )
        if not is_game and not callable(make_env):
            raise TypeError(
                f"make_env is {make_env!r:.200}, expected an id, or a function that makes a game of PettingZoo"
            )
        env = make_env if is_game else make_env()
        games.append(_as_game(env))
    return PettingZooVectorEnv(games)


def _as_game(env: Any) -> _Game:
    """Return a game with one interface for both kinds, padded if the agents' spaces differ."""
    pettingzoo = package("pettingzoo", "pettingzoo")
    is_parallel = isinstance(env, pettingzoo.ParallelEnv)
    if not is_parallel and not isinstance(env, pettingzoo.AECEnv):
        raise TypeError(f"make_env made {env!r:.200}, expected a ParallelEnv or an AECEnv of PettingZoo")
    observation_spaces = [env.observation_space(agent) for agent in env.possible_agents]
    action_spaces = [env.action_space(agent) for agent in env.possible_agents]
    differ = [any(space != of_agents[0] for space in of_agents) for of_agents in (observation_spaces, action_spaces)]
    if any(differ):
        supersuit = package("supersuit", "pettingzoo")
        try:
            if differ[0]:
                env = supersuit.pad_observations_v0(env)
            if differ[1]:
                env = supersuit.pad_action_space_v0(env)
        except AssertionError as error:  # how SuperSuit refuses spaces
            raise ValueError(
                f"the agents of {env} have different spaces, which SuperSuit cannot pad: {error}. Wrap the game so "
                "that they are equal"
            ) from error
    return _ParallelGame(env) if is_parallel else _TurnGame(env)


class _Game:
    """A game of PettingZoo, whose agents are numbered.

    The arrays have an entry for each agent.
    """

    def __init__(self, env: Any) -> None:
        self.env = env
        self.agents: list[str] = list(env.possible_agents)
        self.terminated = np.zeros(len(self.agents), dtype=bool)
        """Ends of the last step."""
        self.truncated = np.zeros(len(self.agents), dtype=bool)
        self.reward = np.zeros(len(self.agents))
        """Rewards of the last step."""
        self.out = np.zeros(len(self.agents), dtype=bool)
        """Agents whose episode is over."""
        self.observations: list[Any] = [None] * len(self.agents)
        """What each agent sees; of an agent that is out, what it saw last."""
        self.infos: list[dict[str, Any]] = [{} for _ in self.agents]

    @property
    def can_act(self) -> np.ndarray:
        """Bool: agents whose action the next step uses."""
        raise NotImplementedError

    def reset(self, seed: int | None) -> None:
        """Begin a game."""
        self.out[:] = False
        self.terminated[:] = False
        self.truncated[:] = False
        self.reward[:] = 0

    def step(self, actions: Sequence[Any]) -> None:
        """Play one step with the actions of those who `can_act`."""
        raise NotImplementedError

    def _note_ends(self, terminations: dict[str, bool], truncations: dict[str, bool]) -> None:
        """Note who is out since this step."""
        for number, agent in enumerate(self.agents):
            self.terminated[number] = bool(terminations.get(agent)) and not self.out[number]
            self.truncated[number] = bool(truncations.get(agent)) and not self.out[number]
        self.out |= self.terminated | self.truncated


class _ParallelGame(_Game):
    """A game in which all agents act at once."""

    @property
    def can_act(self) -> np.ndarray:
        return ~self.out

    def reset(self, seed: int | None) -> None:
        super().reset(seed)
        observations, infos = self.env.reset(seed=seed)
        missing = [agent for agent in self.agents if agent not in self.env.agents]
        if missing:
            raise ValueError(
                f"{', '.join(map(str, missing))} of possible_agents are not in the game when it begins: agents that "
                "join later are not supported, so begin with all of them, or leave them out of possible_agents"
            )
        self._see(observations, infos)

    def step(self, actions: Sequence[Any]) -> None:
        acting = {agent: actions[number] for number, agent in enumerate(self.agents) if not self.out[number]}
        observations, rewards, terminations, truncations, infos = self.env.step(acting)
        for number, agent in enumerate(self.agents):
            self.reward[number] = rewards.get(agent, 0.0)
        self._see(observations, infos)
        self._note_ends(terminations, truncations)
        for number, agent in enumerate(self.agents):  # out without having been told so
            if agent not in self.env.agents and not self.out[number]:
                self.terminated[number] = self.out[number] = True

    def _see(self, observations: dict[str, Any], infos: dict[str, dict[str, Any]]) -> None:
        for number, agent in enumerate(self.agents):
            if agent in observations:
                self.observations[number] = observations[agent]
            self.infos[number] = infos.get(agent, {})


class _TurnGame(_Game):
    """A game in which the agents act in turn (AEC)."""

    @property
    def can_act(self) -> np.ndarray:
        can_act = np.zeros(len(self.agents), dtype=bool)
        if not self.out.all():
            can_act[self.agents.index(self.env.agent_selection)] = True
        return can_act

    def reset(self, seed: int | None) -> None:
        super().reset(seed)
        self.env.reset(seed=seed)
        self._see()

    def step(self, actions: Sequence[Any]) -> None:
        self.env.step(actions[self.agents.index(self.env.agent_selection)])
        for number, agent in enumerate(self.agents):
            self.reward[number] = self.env.rewards.get(agent, 0.0)
        self._note_ends(self.env.terminations, self.env.truncations)
        self._see()
        while self.env.agents and self.out[self.agents.index(self.env.agent_selection)]:
            self.env.step(None)  # an agent that is out leaves the game
        self.out |= [agent not in self.env.agents for agent in self.agents]

    def _see(self) -> None:
        for number, agent in enumerate(self.agents):
            if agent in self.env.agents:
                self.observations[number] = self.env.observe(agent)
                self.infos[number] = self.env.infos.get(agent, {})


class PettingZooVectorEnv(VectorEnv[Any, Any, np.ndarray]):
    """Games of PettingZoo with a slot for each agent; see `from_pettingzoo`, which makes it.

    The slots of one game are neighbours, in the order of its ``possible_agents``. Autoreset mode NEXT_STEP: after the
    last agent of a game is out, the next step of its slots only resets. ``info["waiting"]`` is True in slots whose
    action the step has not used.
    """

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def __init__(self, games: Sequence[_Game]) -> None:
        self.games = list(games)
        first = self.games[0]
        self.agents_per_game = len(first.agents)
        self.num_envs = len(self.games) * self.agents_per_game

        # The mask of legal actions is no part of what a policy reads
        space = first.env.observation_space(first.agents[0])
        self._has_mask = isinstance(space, spaces.Dict) and set(space) == {"observation", MASK}
        if self._has_mask:
            space = space["observation"]
        self.single_observation_space = space
        self.single_action_space = first.env.action_space(first.agents[0])
        self.observation_space = batch_space(space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin new games.

        Args:
            seed: of the first game; the others get the following numbers. Or a seed for each slot, of which each game
                takes that of its first agent.
            options: not used.
        """
        for number, game in enumerate(self.games):
            game_seed: int | None
            if seed is None:
                game_seed = None
            elif isinstance(seed, (int, np.integer)):
                game_seed = int(seed) + number
            else:
                game_seed = seed[number * self.agents_per_game]
            game.reset(game_seed)
        return self._observe(), self._info(np.zeros(self.num_envs, dtype=bool))

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Play one step of each game; see the class for the slots whose actions are used."""
        waiting = []
        for number, game in enumerate(self.games):
            start = number * self.agents_per_game
            if game.out.all():
                game.reset(None)
                waiting.append(np.zeros(self.agents_per_game, dtype=bool))
                continue
            waiting.append(~game.can_act)
            game.step(actions[start : start + self.agents_per_game])
        reward = np.concatenate([game.reward for game in self.games])
        terminated = np.concatenate([game.terminated for game in self.games])
        truncated = np.concatenate([game.truncated for game in self.games])
        return self._observe(), reward, terminated, truncated, self._info(np.concatenate(waiting))

    def close_extras(self, **kwargs: Any) -> None:
        """Close the games."""
        for game in self.games:
            game.env.close()

    def _observe(self) -> Any:
        """Return what each agent sees."""
        observations = []
        for game in self.games:
            for observation in game.observations:
                if self._has_mask:
                    observation = observation["observation"]
                observations.append(observation)
        batch: Any = create_empty_array(self.single_observation_space, n=self.num_envs)
        return concatenate(self.single_observation_space, observations, batch)

    def _info(self, waiting: np.ndarray) -> dict[str, Any]:
        """Return who has waited in this step, and the legal actions if there are masks; all for those not to move."""
        info: dict[str, Any] = {WAITING: waiting}
        if not isinstance(self.single_action_space, spaces.Discrete):
            return info
        masks = np.ones((self.num_envs, int(self.single_action_space.n)), dtype=np.int8)
        has_masks = False
        for number, game in enumerate(self.games):
            for agent, can_act in enumerate(game.can_act):
                mask = game.infos[agent].get(MASK)
                if self._has_mask:
                    mask = game.observations[agent][MASK]
                if mask is None:
                    continue
                has_masks = True
                if can_act:
                    masks[number * self.agents_per_game + agent] = mask
        if has_masks:
            info[MASK] = masks
        return info
