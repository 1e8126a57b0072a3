"""Wrappers by name: what they do to an environment, where they are saved, and that a saved name alone runs nothing."""

import json
from contextlib import closing

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorWrapper
from gymnasium.wrappers.vector import DictInfoToList, RecordEpisodeStatistics, TransformObservation, TransformReward

import algos
from algos import PPO, CNNPolicy, SubprocessVectorEnv
from algos.cli import main
from algos.envs.wrapping import single_environment
from algos.lab.comparison.summary import Case
from algos.make import make_policy, make_vector_environment, remake_environment
from algos.storage.env_state import env_state, set_env_state
from algos.training.save import read_description
from tests.helpers.errors import refused

SHORT = ("--total-steps", "64", "--num-envs", "2", "--num-episodes", "2", "--config.num-steps", "16", "--json")
OWN = """
from pathlib import Path

import gymnasium
import numpy as np
from gymnasium.wrappers import TransformObservation, TransformReward

Path({marker!r}).touch()

def two(env):
    space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    return TransformObservation(env, lambda x: x[:2], space)

def tenfold(env):
    return TransformReward(env, lambda reward: 10 * reward)

def nothing(env):
    pass

def fails(env):
    raise KeyError("image")
"""


@pytest.fixture
def own(tmp_path):
    """File of wrappers, which leaves a mark beside it when it is run."""
    (tmp_path / "own.py").write_text(OWN.format(marker=str(tmp_path / "it-ran")))
    return tmp_path / "own.py"


def test_a_wrapped_environment_is_gymnasiums_own(own):
    names = [f"{own}:two", f"{own}:tenfold"]
    env = make_vector_environment("CartPole-v1", 2, wrappers=names)
    single = gymnasium.make("CartPole-v1")
    observation, _ = env.reset(seed=5)
    assert observation.shape == (2, 2) and env.single_observation_space.shape == (2,)
    np.testing.assert_array_equal(observation[0], single.reset(seed=5)[0][:2])
    following, reward, *_ = env.step(np.array([1, 0]))
    np.testing.assert_array_equal(following[0], single.step(1)[0][:2])
    assert reward.tolist() == [10, 10]
    with_function = make_vector_environment("CartPole-v1", 2, wrappers=[gymnasium.wrappers.FlattenObservation])
    assert with_function.reset(seed=5)[0].shape == (2, 4)


REUSES = """
import gymnasium
import numpy as np

class Reuses(gymnasium.Env):
    observation_space = gymnasium.spaces.Dict(
        start=gymnasium.spaces.Box(0, np.inf, (1,)), time=gymnasium.spaces.Box(0, 5, (1,))
    )
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self):
        self.shown = {"start": np.zeros(1, np.float32), "time": np.zeros(1, np.float32)}
        self.mask = np.ones(2, np.int8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.shown["start"][:] = self.np_random.integers(1, 1000)
        self.shown["time"][:] = 0
        self.mask[:] = 1
        return self.shown, {"action_mask": self.mask}

    def step(self, action):
        self.shown["time"] += 1
        self.mask[0] = 0
        return self.shown, 1.0, False, False, {"action_mask": self.mask}

gymnasium.register("Reuses-v0", Reuses, max_episode_steps=5)
"""


@pytest.mark.filterwarnings("ignore:.*share an object:UserWarning")  # of Gymnasium, which sees the dictionary only
@pytest.mark.parametrize("process_timeout", [None, 60.0], ids=["here", "processes"])
def test_a_final_observation_is_its_own_where_arrays_are_reused(tmp_path, monkeypatch, process_timeout):
    """Every step leads from time t to t + 1 with the same start, where action 0 is closed; also at the limit of 5."""
    (tmp_path / "reuses.py").write_text(REUSES)
    monkeypatch.syspath_prepend(tmp_path)
    with closing(make_vector_environment("reuses:Reuses-v0", 2, process_timeout=process_timeout)) as env:
        rollout = algos.collect(env, make_policy(env), num_steps=12, seed=0)
    before, after = rollout["observation"], rollout["next_observation"]
    assert rollout["truncated"].sum() == 4 and before[:, :, 0].unique().numel() > 4
    assert torch.equal(after[:, :, 0], before[:, :, 0]) and torch.equal(after[:, :, 1], before[:, :, 1] + 1)
    assert rollout["next_action_mask"][:, :, 1].all() and not rollout["next_action_mask"][:, :, 0].any()


def test_the_state_of_an_environment_fits_those_made_without_copies():
    """Runs of earlier versions have no such wrapper."""
    env = make_vector_environment("MountainCar-v0", 2)
    plain = SyncVectorEnv([lambda: gymnasium.make("MountainCar-v0")] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    plain.reset(seed=3)
    plain.step(np.array([2, 0]))
    set_env_state(env, env_state(plain))
    np.testing.assert_array_equal(env.step(np.array([1, 2]))[0], plain.step(np.array([1, 2]))[0])


@pytest.mark.heavy
def test_wrappers_of_a_file_reach_processes_too(own):
    env = make_vector_environment("CartPole-v1", 2, wrappers=[f"{own}:two"], process_timeout=60)
    assert isinstance(env, SubprocessVectorEnv)
    expected = make_vector_environment("CartPole-v1", 2, wrappers=[f"{own}:two"]).reset(seed=3)[0]
    np.testing.assert_array_equal(env.reset(seed=3)[0], expected)
    env.close()


@pytest.mark.parametrize(("wrapper", "words"), [
    ("{own}:fails", ("own.py:fails", "cannot wrap", "KeyError")),
    ("{own}:nothing", ("own.py:nothing", "returned None", "wrapped gymnasium.Env")),
    ("{own}:treble", ("no function named 'treble'", "two, tenfold, nothing, fails")),
    ("gymnasium.wrappers.FlattenObservation", ("expected", "package.module:name")),
])  # fmt: skip
def test_a_wrapper_that_is_none_is_named(own, wrapper, words):
    with refused(ValueError, *words):
        make_vector_environment("CartPole-v1", 2, wrappers=[wrapper.format(own=own)])


def test_text_has_no_wrappers(own):
    with refused(ValueError, "wrappers are for control", "textenv/Copy-v0"):
        make_vector_environment("textenv/Copy-v0", 2, wrappers=[f"{own}:two"])


@pytest.mark.heavy
def test_a_saved_wrapper_runs_only_if_named_again(own, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    given = ["--wrapper", "own.py:two", "--wrapper", "own.py:tenfold"]
    main(["train", "CartPole-v1", *given, "--run-dir", "run", *SHORT])
    assert json.loads(capsys.readouterr().out)["mean_return"] >= 80
    saved = json.loads((run / "config.json").read_text())
    assert saved["environment"]["wrappers"] == [f"{own}:two", f"{own}:tenfold"]
    assert algos.load(run).act(np.zeros((1, 2), np.float32)).action.shape == (1,)
    main(["train", "--resume", "run", "--total-steps", "128", "--json"])
    assert json.loads(capsys.readouterr().out)["steps"] == 128
    main(["show", "run", "--json"])
    assert json.loads(capsys.readouterr().out)["wrappers"] == saved["environment"]["wrappers"]
    main(["evaluate", "run", *given, "--json", "--num-episodes", "2", "--video", "film.gif"])
    assert json.loads(capsys.readouterr().out)["mean_return"] >= 80 and (tmp_path / "film.gif").stat().st_size
    (tmp_path / "it-ran").unlink()
    own.write_text(own.read_text() + "\n")  # a file is run once for each change
    saved["environment"]["kwargs"]["wrappers"] = [f"{own}:two"]  # an attack: arguments are read from the file
    (run / "config.json").write_text(json.dumps(saved))
    with pytest.raises(SystemExit):
        main(["evaluate", "run"])
    assert f"only if you name it: --wrapper {own}:two --wrapper {own}:tenfold" in capsys.readouterr().err
    del saved["environment"]["wrappers"]
    (run / "config.json").write_text(json.dumps(saved))
    with pytest.raises(SystemExit):
        main(["evaluate", "run"])
    assert not (tmp_path / "it-ran").exists()


class Slower(VectorWrapper):
    """A wrapper of one's own, of which nobody knows what it changes."""


def cart_pole():
    return gymnasium.make_vec("CartPole-v1", num_envs=2)


def description_of(env, folder):
    """What is saved with an agent of this environment."""
    return read_description(PPO(env, num_steps=8).save(folder))


@pytest.mark.parametrize(("wrap", "names"), [
    (lambda env: TransformObservation(env, lambda x: -x), ["TransformObservation"]),
    (lambda env: TransformReward(env, lambda x: 2 * x), ["TransformReward"]),
    (lambda env: TransformReward(RecordEpisodeStatistics(Slower(env)), abs), ["Slower", "TransformReward"]),
])  # fmt: skip
def test_wrappers_of_all_slots_are_not_forgotten(wrap, names, own, tmp_path):
    """`algos evaluate` played without them: 10 where the agent earned 720."""
    description = description_of(wrap(cart_pole()), tmp_path / "agent")
    saved = description["environment"]
    assert [name.rpartition(":")[2] for name in saved["wrappers"]] == names
    assert saved["vector_wrappers"] == saved["wrappers"]
    for env_id in (None, "CartPole-v1"):
        with refused(ValueError, "wrappers of all slots at once", *names, "algos.evaluate", "--wrapper"):
            remake_environment(description, num_envs=2, env_id=env_id)
    env = remake_environment(description, num_envs=2, wrappers=[f"{own}:two"])
    assert env.single_observation_space.shape == (2,)


def test_wrappers_that_only_watch_are_not_asked_for(tmp_path):
    description = description_of(DictInfoToList(RecordEpisodeStatistics(cart_pole())), tmp_path)
    assert "wrappers" not in description["environment"]
    assert remake_environment(description, num_envs=2).single_observation_space.shape == (4,)


def rescaled():
    """An environment made of the specification of a wrapped one."""
    single = gymnasium.wrappers.RescaleAction(gymnasium.make("Pendulum-v1"), np.float32(-1), np.float32(1))
    return gymnasium.make_vec(single.spec, num_envs=2)


def test_wrappers_in_a_specification_are_not_forgotten(tmp_path):
    description = description_of(rescaled(), tmp_path)
    with refused(ValueError, "only if you name it: --wrapper .*:RescaleAction"):
        remake_environment(description, num_envs=2)


def test_a_single_environment_has_the_wrappers_of_all():
    with closing(single_environment(rescaled())) as single:
        assert single.action_space.high == 1
    with refused(ValueError, "TransformReward", "a single environment would lack"):
        single_environment(TransformReward(cart_pole(), abs))


@pytest.mark.heavy
def test_compare_and_tune_take_a_wrapper(own, tmp_path, capsys, monkeypatch):
    pytest.importorskip("optuna")
    monkeypatch.chdir(tmp_path)
    options = {"seeds": 1, "total_steps": 64, "processes": 0, "quiet": True, "run_dir": "compared"}
    plain = algos.compare(["CartPole-v1"], **options)["CartPole-v1:ppo"]
    paid = algos.compare(["CartPole-v1"], **options | {"overwrite": True}, wrappers=["own.py:tenfold"])[
        "CartPole-v1:ppo"
    ]
    assert paid["return before"] > 5 * plain["return before"]
    own_case = Case("CartPole-v1", env_kwargs={"wrappers": ["own.py:tenfold"]})
    twice = algos.compare([own_case], **options | {"overwrite": True}, wrappers=["own.py:tenfold"])
    assert twice["CartPole-v1:ppo"]["return before"] > 50 * plain["return before"], "the case's own wrapper is gone"
    short = ["--total-steps", "64", "--trials", "1", "--num-episodes", "2", "--run-dir", "tuned", "--json"]
    main(["tune", "CartPole-v1", "--wrapper", "own.py:two", *short])
    best = (tmp_path / "tuned" / "best.yaml").read_text()
    assert f"{own}:two" in best


@pytest.mark.heavy
def test_minigrid_is_played_by_its_name(tmp_path, capsys):
    pytest.importorskip("minigrid")
    named = ["MiniGrid-Empty-5x5-v0", "--wrapper", "minigrid.wrappers:ImgObsWrapper"]
    main(["train", *named, "--run-dir", str(tmp_path / "run"), *SHORT])
    policy = algos.load(tmp_path / "run")
    assert isinstance(policy, CNNPolicy)
    env = make_vector_environment(named[0], 3, wrappers=[named[-1]])
    images = env.reset(seed=0)[0]
    assert images.shape == (3, 7, 7, 3) and images.dtype == np.uint8
    expected, _ = gymnasium.make(named[0]).reset(seed=0)
    np.testing.assert_array_equal(images[0], expected["image"])
    by_hand = policy.actor(policy.trunk(torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255))
    torch.testing.assert_close(policy.output({"observation": torch.from_numpy(images)}), by_hand, atol=1e-6, rtol=0)
    capsys.readouterr()
    main(["evaluate", str(tmp_path / "run"), *named[1:], "--num-episodes", "2", "--json"])
    assert json.loads(capsys.readouterr().out)["episodes"] == 2


@pytest.mark.heavy
def test_a_wrapper_takes_the_place_of_that_of_a_preset(tmp_path, capsys):
    """Unlock's flattens observations and has them normalized, which images are not; in `compare`, too."""
    pytest.importorskip("minigrid")
    named = ["minigrid:MiniGrid-Unlock-v0", "--wrapper", "minigrid.wrappers:ImgObsWrapper"]
    main(["train", *named, "--run-dir", str(tmp_path / "run"), *SHORT])
    assert isinstance(algos.load(tmp_path / "run"), CNNPolicy)
    main(["compare", *named, "--run-dir", str(tmp_path / "compare"), "--seeds", "1", "--total-steps", "64", "--json"])
    (folder,) = (tmp_path / "compare").glob("*-1")
    assert isinstance(algos.load(folder), CNNPolicy)


def test_an_unreadable_observation_asks_for_a_wrapper():
    pytest.importorskip("minigrid")
    with refused(ValueError, "MissionSpace", "--wrapper", "minigrid.wrappers:ImgObsWrapper"):
        make_vector_environment("minigrid:MiniGrid-Empty-5x5-v0", 1)
