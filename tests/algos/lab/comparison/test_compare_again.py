"""A second call of `compare` with other code, settings or names: nothing of the first is passed off as its result."""

import functools

import gymnasium
import pytest

from algos import Case, PPOConfig
from algos.lab.comparison.compare import compare, train_all
from algos.lab.comparison.figures import plot_curves
from algos.lab.comparison.fingerprint import fingerprint
from algos.lab.comparison.jobs import make_jobs
from algos.lab.comparison.record import changed_settings
from algos.lab.comparison.runs import read_runs
from algos.statistics.pass_rates import read_sampling
from tests.helpers.compared import FailsBeside
from tests.helpers.errors import refused

PROMPTS = ["this film", "the movie"]


def paying(paid, name="b"):
    env_kwargs = {"prompts": PROMPTS, "reward": lambda completions: [paid] * len(completions), "max_new_tokens": 2}
    config = PPOConfig(num_steps=None, num_episodes=8, minibatch_size=8)
    return Case("textenv/Prompts-v0", env_kwargs=env_kwargs, config=config, name=name)


def cartpole(**fields):
    return Case("CartPole-v1", config=PPOConfig(**fields), num_envs=4, env_kwargs={"max_episode_steps": 20})


SHORT = dict(seeds=1, total_steps=64, processes=0, quiet=True)


@pytest.mark.heavy
def test_another_reward_is_another_case(tmp_path):
    def paid(case, **options):
        (run,) = train_all([case], run_dir=tmp_path, **SHORT, **options)
        return run.after["mean_return"]

    assert paid(paying(1.0)) == 1
    with refused(FileExistsError, "with other settings", r"env_kwargs.reward has changed", "overwrite=True"):
        paid(paying(10.0))
    assert paid(paying(1.0)) == 1  # the same is kept
    assert compare(paying(10.0), run_dir=tmp_path, overwrite=True, **SHORT)["b"]["mean_return"] == 10


def test_cases_of_one_name_have_their_own_code(tmp_path):
    def lower(env):
        return env

    plain = Case("Acrobot-v1", name="x")
    wrapped = Case("CartPole-v1", name="x", env_kwargs={"wrappers": [lower]})
    jobs = make_jobs(
        [wrapped, plain], [1], run_dir=tmp_path, overwrite=False, quiet=True, dynamics_every=0, num_episodes=None,
        deterministic=False, sampling=None,
    )  # fmt: skip
    code = {job.case.env_id: job.code for job in jobs}
    assert code == {"CartPole-v1": fingerprint(wrapped.recipe), "Acrobot-v1": fingerprint(plain.recipe)}
    assert "env_kwargs.wrappers.0" in code["CartPole-v1"] and "env_kwargs.wrappers.0" not in code["Acrobot-v1"]


def test_other_votes_are_other_settings(tmp_path):
    def settings_with(answer):
        (job,) = make_jobs(
            [Case("textenv/Periods-v0")], [1], run_dir=tmp_path, sampling=read_sampling(3, answer=answer),
            overwrite=False, quiet=True, dynamics_every=0, num_episodes=None, deterministic=False,
        )  # fmt: skip
        return job.settings

    first = settings_with(lambda text: text.strip())
    assert changed_settings(first, settings_with(lambda text: text.upper())) == ["answer has changed"]
    assert changed_settings(first, settings_with(lambda text: text.strip())) == []


@pytest.mark.heavy
def test_a_run_that_failed_goes_on_with_mended_code(tmp_path, caplog):
    class Broken(gymnasium.Wrapper):
        def step(self, action):
            if [*tmp_path.glob("*/checkpoints/step-*")]:  # after the first iteration
                raise ArithmeticError("a mistake")
            return self.env.step(action)

    case = Case("CartPole-v1", config=PPOConfig(num_steps=8), num_envs=2, env_kwargs={"wrappers": [Broken]})
    with pytest.raises(ArithmeticError):
        compare(case, run_dir=tmp_path, **SHORT)
    Broken.step = lambda self, action: self.env.step(action)
    compare(case, run_dir=tmp_path, **SHORT)
    assert "goes on with other code or files than it began with: env_kwargs.wrappers.0.step has changed" in caplog.text


@pytest.mark.heavy
@pytest.mark.parametrize("processes", [0, 1])
def test_a_run_that_fails_is_named_with_what_has_finished(processes, tmp_path):
    breaks = functools.partial(FailsBeside, path=str(tmp_path / "CartPole-v1-breaks-5" / "metrics.jsonl"))
    case = Case("CartPole-v1", "a2c", num_envs=2, env_kwargs={"wrappers": [breaks]}, name="breaks")
    options = SHORT | {"seeds": [3, 5], "processes": processes}
    with pytest.raises(ArithmeticError, match="broken sensor") as error:
        compare([case, "CartPole-v1:a2c"], run_dir=tmp_path, **options)
    *_, of_run, of_comparison = error.value.__notes__
    assert of_run == "in case breaks, seed 5"
    assert of_comparison == f"3 of 4 runs have finished; the same command goes on, in {tmp_path}"


@pytest.mark.heavy
def test_seeds_of_an_earlier_call_with_other_settings_are_a_case_of_their_own(tmp_path):
    compare(cartpole(num_steps=16), run_dir=tmp_path, **SHORT | {"seeds": 3})
    compare(cartpole(num_steps=8), run_dir=tmp_path, overwrite=True, **SHORT)
    seeds = {}
    for run in read_runs([tmp_path]):
        seeds.setdefault(run.case, set()).add(run.seed)
    assert seeds == {"CartPole-v1:ppo (num_steps 8)": {1}, "CartPole-v1:ppo (num_steps 16)": {2, 3}}


NAMES = ["_baseline", "$5 and \\frac$6", "50% & a_b#{}~^\\", "a name that is longer than a terminal is wide" * 2]


@pytest.mark.heavy
def test_any_name_on_one_line_is_reported(tmp_path):
    pytest.importorskip("matplotlib")
    options = dict(config=PPOConfig(num_steps=32), num_envs=4, env_kwargs={"max_episode_steps": 20})
    compare(
        [Case("CartPole-v1", name=name, **options) for name in NAMES], run_dir=tmp_path, **SHORT | {"total_steps": 256}
    )
    assert (tmp_path / "report.html").is_file()
    plot_curves(tmp_path, out=tmp_path / "own.svg")
    assert (tmp_path / "own.svg").is_file()


@pytest.mark.parametrize("name, reason", [
    ("report", "a key of the comparison's result"), ("seconds", "a key"), ("x" * 300, "too long for the name"),
    ("a\nb", "not printable"), ("a\0b", "not printable"),
])  # fmt: skip
def test_names_that_no_folder_can_have_are_refused_before_training(name, reason, tmp_path):
    with refused(ValueError, "the name of a case is", reason, "name="):
        compare(Case("CartPole-v1", name=name), run_dir=tmp_path, **SHORT)
    assert not [*tmp_path.iterdir()]


def heavy_cartpole(num_envs, gravity):
    env = gymnasium.make_vec("CartPole-v1", num_envs=num_envs, vectorization_mode="sync")
    env.set_attr("gravity", gravity)
    return env


@pytest.mark.heavy
def test_a_partial_is_named_by_its_function(tmp_path):
    case = Case(functools.partial(heavy_cartpole, gravity=5.0), "ppo")
    assert str(case) == "heavy_cartpole:ppo"
    assert "heavy_cartpole:ppo" in compare(case, run_dir=tmp_path, **SHORT)
