"""Atari games: the recipe plays a real one, scores are those of whole games, and a lost life ends the advantages."""

import json

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import algos
from algos import PPO, CNNPolicy, MLPPolicy, PPOConfig, collect, presets
from algos.advantages import add_advantages
from algos.cli import main
from algos.collection import Collector
from algos.make import make_vector_environment

SHORT_GAME = '{"max_num_frames_per_episode": 400, "num_threads": 1}'
"""A game of Breakout is cut after 400 frames, 100 steps."""


@pytest.mark.heavy
def test_the_recipe_plays_a_game_from_the_command_line(tmp_path, capsys):
    """By CleanRL's settings; saved, loaded and evaluated by name alone."""
    pytest.importorskip("ale_py", reason="install the extra: pip install '.[atari]'")
    run = str(tmp_path / "run")
    options = ["--env-kwargs", SHORT_GAME, "--num-envs", "2", "--total-steps", "64", "--num-episodes", "1", "--json"]
    main(["train", "ALE/Breakout-v5", *options, "--config.num-steps", "16", "--config.minibatch-size", "8",
          "--run-dir", run])  # fmt: skip
    result = json.loads(capsys.readouterr().out)
    assert result["steps"] >= 1
    policy = algos.load(run)
    assert isinstance(policy, CNNPolicy) and policy.observation_space.shape == (4, 84, 84)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    learnt = {name: config["config"][name] for name in ("clip_range", "ent_coef", "vf_coef", "gamma", "gae_lambda",
              "num_epochs", "learning_rate", "clip_rewards", "end_with_life")}  # fmt: skip
    assert learnt == {
        "clip_range": 0.1, "ent_coef": 0.01, "vf_coef": 0.5, "gamma": 0.99, "gae_lambda": 0.95, "num_epochs": 4,
        "learning_rate": 2.5e-4, "clip_rewards": 1.0, "end_with_life": True,
    }  # fmt: skip
    main(["evaluate", run, "--num-episodes", "1", "--json"])
    assert json.loads(capsys.readouterr().out)["episodes"] == 1


def test_minibatches_are_a_quarter_of_a_rollout():
    recipe = presets.recipe("ALE/Pong-v5")
    assert (recipe.num_envs, recipe.config.num_steps, recipe.config.minibatch_size) == (8, 128, 8 * 128 // 4)


def test_games_with_wrappers_are_single_ones_and_said_to_be(caplog):
    pytest.importorskip("ale_py", reason="install the extra: pip install '.[atari]'")
    wrappers = ["gymnasium.wrappers:RecordEpisodeStatistics"]
    env = make_vector_environment("ALE/Pong-v5", 1, wrappers=wrappers, obs_type="ram")
    env.close()
    assert "ALE/Pong-v5 is made as single games" in caplog.text
    caplog.clear()
    env = make_vector_environment("ALE/Pong-v5", 1, num_threads=1)
    assert env.single_observation_space.shape == (4, 84, 84) and not caplog.text
    env.close()


@pytest.mark.parametrize(
    ("arguments", "count"), [({}, 1), ({"reward_clipping": False}, 0), ({"reward_clipping": True}, 0)]
)
def test_clipped_points_are_told_unless_they_are_asked_for(arguments, count, caplog):
    """Gymnasium's `make_vec` makes ale_py's environment with its default, which clips."""
    pytest.importorskip("ale_py", reason="install the extra: pip install '.[atari]'")
    env = gymnasium.make_vec("ALE/Pong-v5", num_envs=1, num_threads=1, **arguments)
    PPO(env, num_steps=4)
    assert caplog.text.count("ALE/Pong-v5 clips its rewards") == count
    env.close()


@pytest.mark.heavy
def test_rewards_are_the_games_own_points():
    """The same actions in one game of ale_py itself, without its vector environment, earn the same points."""
    ale_py = pytest.importorskip("ale_py", reason="install the extra: pip install '.[atari]'")
    exact = {"repeat_action_probability": 0.0, "num_threads": 1, "noop_max": 0, "use_fire_reset": False}
    env = make_vector_environment("ALE/SpaceInvaders-v5", 1, **exact)
    policy = CNNPolicy(env.single_observation_space, env.single_action_space, hidden=8, seed=1)
    rollout = collect(env, policy, num_steps=300, seed=0)[0]
    env.close()
    gymnasium.register_envs(ale_py)
    game = gymnasium.make("ALE/SpaceInvaders-v5", repeat_action_probability=0.0)
    game.reset(seed=0)
    points, lives = [], []
    for action in rollout["action"]:
        _, reward, terminated, _, info = game.step(int(action))
        points.append(reward)
        lives.append(info["lives"])
        if terminated:
            break
    game.close()
    length = len(points)
    np.testing.assert_array_equal(rollout["reward"][:length], points)
    assert max(points) > 1 and rollout["observation"].dtype == torch.uint8
    lost = np.flatnonzero(np.diff([3, *lives]) < 0)
    ends = (rollout["life_lost"] | rollout["terminated"])[:length]
    assert len(lost) == 3 and np.flatnonzero(ends).tolist() == lost.tolist()


def by_area(image, side):
    """Shrink an image ``[height, width]``: each new pixel is the mean of the area that it covers."""

    def weights(size):
        edges = np.linspace(0, size, side + 1)
        pixels = np.arange(size)
        overlap = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
        return overlap.clip(0) * side / size

    return weights(image.shape[0]) @ image @ weights(image.shape[1]).T


@pytest.mark.heavy
def test_images_are_grey_small_maxima_of_two_frames_in_stacks_of_four():
    """By hand from the single frames of the game."""
    ale_py = pytest.importorskip("ale_py", reason="install the extra: pip install '.[atari]'")
    exact = {"repeat_action_probability": 0.0, "num_threads": 1, "noop_max": 0, "use_fire_reset": False}
    env = make_vector_environment("ALE/SpaceInvaders-v5", 1, **exact)
    env.reset(seed=0)
    gymnasium.register_envs(ale_py)
    game = gymnasium.make("ALE/SpaceInvaders-v5", repeat_action_probability=0.0, frameskip=1, obs_type="grayscale")
    game.reset(seed=0)
    stack = []
    for action in (1, 3, 3, 2, 1, 0):
        images = env.step(np.array([action]))[0]
        frames = [game.step(action)[0] for _ in range(4)]
        stack.append(by_area(np.maximum(frames[-1], frames[-2]).astype(float), 84))
    env.close()
    game.close()
    assert images.shape == (1, 4, 84, 84) and images.max() > 100
    np.testing.assert_allclose(images[0], stack[-4:], atol=1.0)


class Lives(gymnasium.Env):
    """Three lives, one lost at every third step; each step pays its number in the game, times ± 2."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return np.zeros(1, np.float32), {"lives": 3}

    def step(self, action):
        self.time += 1
        lives = 3 - self.time // 3
        reward = 2.0 * self.time * (-1) ** self.time
        return np.full(1, self.time / 10, np.float32), reward, lives == 0, False, {"lives": lives}


@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)
def test_lost_lives_are_recorded_across_rollouts_and_resets(mode):
    env = SyncVectorEnv([Lives] * 2, autoreset_mode=mode)
    policy = MLPPolicy(Lives.observation_space, Lives.action_space, hidden=(4,))
    collector = Collector(env, policy, seed=0)
    rollouts = [collector.collect(num_steps=5) for _ in range(5)]
    for slot in range(2):
        steps = torch.cat([rollout[slot] for rollout in rollouts])
        steps = steps[steps["mask"]]
        times = np.arange(len(steps)) % 9 + 1
        # In SAME_STEP mode the lives after the last step are those of the next game: there is an end anyway
        ends = steps["life_lost"] | steps["terminated"]
        np.testing.assert_array_equal(ends, times % 3 == 0)
        np.testing.assert_array_equal(steps["terminated"], times == 9)


@pytest.mark.parametrize("end_with_life", [True, False])
def test_advantages_end_with_a_life_and_rewards_are_clipped(end_with_life):
    """By a loop of its own over the definition; the rollout and the returns keep the points."""
    env = SyncVectorEnv([Lives], autoreset_mode=AutoresetMode.SAME_STEP)
    config = PPOConfig(num_steps=12, gamma=0.9, gae_lambda=0.8, clip_rewards=1.0, end_with_life=end_with_life)
    agent = PPO(env, MLPPolicy(Lives.observation_space, Lives.action_space, hidden=(4,)), config)
    rollout = agent.collect()
    assert rollout["reward"][0, :4].tolist() == [-2.0, 4.0, -6.0, 8.0]
    add_advantages(agent, rollout)
    assert rollout["reward"][0, :4].tolist() == [-2.0, 4.0, -6.0, 8.0]

    value, next_value = (rollout[name][0].tolist() for name in ("value", "next_value"))
    expected, following = [], 0.0
    for t in reversed(range(12)):
        time = t % 9 + 1
        over = time == 9 or (end_with_life and time % 3 == 0)
        delta = (-1.0) ** time + (0.0 if over else 0.9 * next_value[t]) - value[t]
        following = delta + (0.0 if over else 0.9 * 0.8 * following)
        expected.insert(0, following)
    np.testing.assert_allclose(rollout["advantage"][0], expected, atol=1e-5)
    returns, _ = algos.evaluate(env, agent.policy, num_episodes=2)
    assert returns == [2.0 * (-1 + 2 - 3 + 4 - 5 + 6 - 7 + 8 - 9)] * 2
