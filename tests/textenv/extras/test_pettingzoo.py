"""Games of PettingZoo as a vector environment: each agent is a slot, against the package's own interface."""

import gymnasium
import numpy as np
import pytest
import torch

pettingzoo = pytest.importorskip("pettingzoo")
from gymnasium import spaces  # noqa: E402
from pettingzoo import ParallelEnv  # noqa: E402
from tensordict import TensorDict  # noqa: E402

from algos import DQN, PPO, RLOO, MLPPolicy, PPOConfig, collect, evaluate  # noqa: E402
from algos.advantages import after_waiting, discounted_returns  # noqa: E402
from textenv import from_pettingzoo  # noqa: E402
from textenv.rollout import waits_after  # noqa: E402

TICTACTOE = "classic/tictactoe-v3"


class Tag(ParallelEnv):
    """Three agents count; agent i is out after i + 2 steps, with the reward i. The last one is cut off."""

    metadata = {"name": "tag", "render_modes": []}
    render_mode = None
    sizes = (3, 3, 3)

    def __init__(self):
        self.possible_agents = ["a", "b", "c"]

    def observation_space(self, agent):
        size = self.sizes[self.possible_agents.index(agent)]
        return spaces.Box(-1, 100, (size,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(4)

    def observe(self, agent):
        number = self.possible_agents.index(agent)
        return np.full(self.sizes[number], 10 * number + self.time, dtype=np.float32)

    def reset(self, seed=None, options=None):
        self.agents = list(self.possible_agents)
        self.time = 0
        return {agent: self.observe(agent) for agent in self.agents}, {agent: {} for agent in self.agents}

    def step(self, actions):
        assert set(actions) == set(self.agents), "only those who are in the game act"
        self.time += 1
        out = [agent for agent in self.agents if self.time == self.possible_agents.index(agent) + 2]
        everyone = list(self.agents)
        rewards = {agent: float(actions[agent]) for agent in everyone}
        self.agents = [agent for agent in everyone if agent not in out]
        return (
            {agent: self.observe(agent) for agent in everyone},
            rewards,
            {agent: agent in out and agent != "c" for agent in everyone},
            {agent: agent in out and agent == "c" for agent in everyone},
            {agent: {} for agent in everyone},
        )


class Uneven(Tag):
    sizes = (3, 5, 2)


def mlp(env, seed=1):
    return MLPPolicy(env.single_observation_space, env.single_action_space, hidden=(32, 32), seed=seed)


def test_agents_that_are_out_wait_for_the_others():
    """Two games of three agents, for 11 steps: each game takes four steps, and the fifth only resets."""
    env = from_pettingzoo(Tag, num_envs=2)
    assert env.num_envs == 6 and env.single_observation_space.shape == (3,)
    rollout = collect(env, mlp(env), num_steps=11, seed=1)
    time = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0])
    for slot in range(6):
        length = slot % 3 + 2
        expected = [time[t].item() < length for t in range(11)]
        assert rollout["mask"][slot].tolist() == expected
        ends = [time[t].item() == length - 1 for t in range(11)]
        name, other = ("truncated", "terminated") if slot % 3 == 2 else ("terminated", "truncated")
        assert rollout[name][slot].tolist() == ends and not rollout[other][slot].any()
        assert rollout["is_init"][slot].tolist() == [t in (0, 5, 10) for t in range(11)]
        in_game = rollout["mask"][slot]
        assert torch.equal(rollout["observation"][slot, in_game, 0], (10.0 * (slot % 3) + time)[in_game])
        assert torch.equal(rollout["reward"][slot, in_game], rollout["action"][slot, in_game].float())


class Late(Tag):
    """Agent c joins later, as the package allows."""

    def reset(self, seed=None, options=None):
        super().reset()
        self.agents = ["a", "b"]
        return {agent: self.observe(agent) for agent in self.agents}, {agent: {} for agent in self.agents}


def test_a_game_that_an_agent_joins_later_is_refused_in_words():
    env = from_pettingzoo(Late, num_envs=1)
    with pytest.raises(ValueError, match="c of possible_agents are not in the game when it begins"):
        env.reset(seed=1)


def test_a_rollout_of_a_game_in_turns_is_what_the_package_plays():
    """The same moves in PettingZoo's own loop: observations, masks, rewards and who moves."""
    env = from_pettingzoo(TICTACTOE, num_envs=3)
    assert isinstance(env.single_observation_space, spaces.Box)
    rollout = collect(env, mlp(env), num_steps=40, seed=5)
    for game in range(3):
        own = pettingzoo.make("aec", TICTACTOE)
        own.reset(seed=5 + game)
        column = 0
        while column < 40:
            if not own.agents:  # the step that resets
                assert not rollout["mask"][2 * game : 2 * game + 2, column].any()
                own.reset()
                column += 1
                continue
            if own.terminations[own.agent_selection]:
                own.step(None)
                continue
            agent = own.possible_agents.index(own.agent_selection)
            slot, waiting = 2 * game + agent, 2 * game + 1 - agent
            assert rollout["mask"][slot, column] and not rollout["mask"][waiting, column]
            seen = own.observe(own.agent_selection)
            assert torch.equal(rollout["observation"][slot, column].bool(), torch.tensor(seen["observation"] > 0))
            assert rollout["action_mask"][slot, column].int().tolist() == seen["action_mask"].tolist()
            own.step(int(rollout["action"][slot, column]))
            for number, name in enumerate(own.possible_agents):
                assert rollout["reward"][2 * game + number, column] == own.rewards[name]
                assert rollout["terminated"][2 * game + number, column] == own.terminations[name]
            column += 1


def test_a_loss_belongs_to_the_move_before_it():
    """Each player's return is its result, at all of its moves; torch's sums over the masked rows agree."""
    env = from_pettingzoo(TICTACTOE, num_envs=8)
    rollout = collect(env, mlp(env), num_episodes=16, seed=2)
    columns = {name: rollout[name] for name in ("reward", "terminated", "truncated", "mask")}
    returns = discounted_returns(**columns, gamma=1.0)
    first_move = rollout["mask"].int().argmax(1)
    results = returns[torch.arange(16), first_move]
    pairs = results.reshape(8, 2)
    assert set(results.tolist()) <= {-1.0, 0.0, 1.0} and (pairs.sum(1) == 0).all() and (pairs != 0).any()


def test_every_episode_is_counted_once():
    env = from_pettingzoo(TICTACTOE, num_envs=4)
    result = evaluate(env, mlp(env), num_episodes=40, seed=1)
    assert len(result.returns) == 40 and set(result.returns) <= {-1.0, 0.0, 1.0}
    assert sum(result.returns) == 0, "what one wins the other loses"


class TagOfAgents(Tag):
    """`Tag` as a class that knows its agents before a game is made."""

    possible_agents = ("a", "b", "c")


def test_a_class_that_knows_its_agents_makes_games():
    env = from_pettingzoo(TagOfAgents, num_envs=2)
    assert env.num_envs == 6
    env.reset(seed=0)
    assert env.step(np.ones(6, int))[1].tolist() == [1] * 6


@pytest.mark.parametrize("num_steps, is_told", [(1, True), (9, True), (32, False)])
def test_short_rollouts_of_a_game_in_turns_are_warned_of(num_steps, is_told, caplog):
    """What an agent earns after the last step of a rollout, before its next turn, is in no advantage."""
    agent = PPO(from_pettingzoo(TICTACTOE), seed=1, num_steps=num_steps)
    for _ in range(-(-64 // num_steps)):
        agent.collect()
    assert caplog.text.count("agents earn rewards while they wait for others") == is_told


def test_agents_that_are_out_of_a_game_of_all_at_once_are_not_warned_of(caplog):
    PPO(from_pettingzoo(Tag, num_envs=2), seed=1, num_steps=11).collect()
    assert "agents earn rewards" not in caplog.text


def test_different_spaces_are_padded_as_supersuit_does():
    pytest.importorskip("supersuit")
    env = from_pettingzoo(Uneven, num_envs=1)
    observation, _ = env.reset(seed=1)
    assert env.single_observation_space.shape == (5,)
    assert observation.tolist() == [[0, 0, 0, 0, 0], [10, 10, 10, 10, 10], [20, 20, 0, 0, 0]]


def test_values_come_from_the_states_in_which_an_agent_acts_next():
    """By hand: what an agent sees while it waits has no value, and nothing follows a game that ends meanwhile."""
    mask = torch.tensor([[1, 0, 1, 0, 0, 1], [0, 1, 0, 1, 1, 0]]).bool()
    done = torch.tensor([[0, 0, 0, 0, 1, 0], [0, 0, 1, 0, 0, 0]]).bool()
    next_value = torch.arange(12.0).reshape(2, 6)
    columns = {"mask": mask, "terminated": done, "truncated": done & False, "is_init": done & False}
    waits = waits_after(TensorDict(columns, batch_size=(2, 6)))
    expected = [[1, 1, 4, 4, 4, 5], [6, 8, 8, 9, 11, 11]]
    assert after_waiting(next_value=next_value, waits=waits).tolist() == expected

    # Nothing is passed on where no agent waits, nor where an environment failed and began anew
    columns["mask"] = mask | True
    assert not waits_after(TensorDict(columns, batch_size=(2, 6))).any()
    columns |= {"mask": mask, "is_init": ~mask}
    assert not waits_after(TensorDict(columns, batch_size=(2, 6))).any()


def test_a_replay_buffer_refuses_steps_that_are_not_complete():
    env = from_pettingzoo(TICTACTOE, num_envs=2)
    with pytest.raises(ValueError, match="agents wait for one another.*use PPO or A2C"):
        DQN(env, learning_starts=10).learn(50)


@pytest.mark.long
def test_self_play_beats_a_random_player():
    env = from_pettingzoo(TICTACTOE, num_envs=32)
    config = PPOConfig(
        num_steps=64, minibatch_size=512, learning_rate=2e-3, ent_coef=0.03, gamma=1.0, gae_lambda=1.0, num_epochs=6
    )
    agent = PPO(env, mlp(env), config, seed=1)
    agent.learn(50_000)
    game = pettingzoo.make("aec", TICTACTOE)
    rng = np.random.default_rng(0)
    results = []
    for number in range(100):
        game.reset(seed=number)
        learner = game.possible_agents[number % 2]
        for name in game.agent_iter():
            seen, reward, terminated, truncated, _ = game.last()
            if terminated or truncated:
                action = None
            elif name == learner:
                observation = np.asarray(seen["observation"])[None]
                mask = torch.tensor(seen["action_mask"][None]).bool()
                step = agent.policy.act(observation, action_mask=mask, deterministic=True)
                action = int(step.action[0])
            else:
                action = int(rng.choice(np.flatnonzero(seen["action_mask"])))
            if name == learner and (terminated or truncated):
                results.append(reward)
            game.step(action)
    assert np.mean(results) > 0.5, "two random players: 0"


def test_other_games_and_algorithms():
    env = from_pettingzoo("classic/connect_four-v3", num_envs=2)
    PPO(env, num_steps=32, minibatch_size=64).learn(300)
    with pytest.raises(ValueError, match="accepts no list of seeds|starts differently"):
        RLOO(from_pettingzoo(Tag), num_episodes=8, group_size=2).learn(10)


@pytest.mark.parametrize(
    ("make_env", "num_envs", "message"),
    [
        (lambda: gymnasium.make("CartPole-v1"), 1, "expected a ParallelEnv or an AECEnv"),
        (3, 1, "expected an id, or a function that makes a game"),
        (Tag(), 2, "cannot be played 2 times at once"),
    ],
)
def test_what_is_no_game_is_refused(make_env, num_envs, message):
    with pytest.raises(TypeError, match=message):
        from_pettingzoo(make_env, num_envs=num_envs)
    with pytest.raises(ValueError, match="num_envs is 0"):
        from_pettingzoo(Tag, num_envs=0)
