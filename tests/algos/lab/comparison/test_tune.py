"""Hyper-parameter search: it starts from the recipe, continues where it stopped, and leaves a configuration."""

import sys
from dataclasses import fields, replace

import gymnasium
import optuna
import pytest
import yaml
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers import TransformReward

from algos import PPOConfig, presets
from algos.cli import main
from algos.config import CONFIGS
from algos.lab.comparison.tune import COMPLEMENTS, RANGES, SIZES, searched_fields, suggested_recipe, tune
from algos.recipe import Recipe
from tests.helpers.errors import refused

SMALL = PPOConfig(num_steps=16, minibatch_size=32, num_epochs=1, ent_coef=0.0)
OPTIONS = dict(num_episodes=2, quiet=True)
built = []
"""Environments made since the start of a test; a case below acts on one of them."""


interrupted_at = set()
"""Numbers of environments at which a search is interrupted."""


@pytest.fixture(autouse=True)
def none_built():
    built.clear()
    interrupted_at.clear()


def make(num_envs, pays=lambda number: 1.0, fails=None):
    built.append(num_envs)
    number = len(built)
    if number in interrupted_at:
        raise KeyboardInterrupt
    if number == fails:
        raise ValueError("as the test asks")

    def single():
        return TransformReward(
            gymnasium.make("CartPole-v1", max_episode_steps=10), lambda reward: reward * pays(number)
        )

    return SyncVectorEnv([single] * num_envs)


def sound(num_envs):
    return make(num_envs)


def recipe(env=sound):
    return Recipe(env=env, config=SMALL, num_envs=4, total_steps=128)


def trials(folder):
    """Read a search as Optuna's own tools do."""
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(folder / "study.log")))
    return optuna.load_study(study_name="tune", storage=storage).trials


def test_the_first_trial_is_the_recipe(tmp_path):
    """And the best one is written as flags."""
    result = tune(recipe(), run_dir=tmp_path, trials=1, **OPTIONS)
    assert result["trials"] == 1 and result["mean_return"] == result["recipe_mean_return"] == 10
    flags = yaml.safe_load((tmp_path / "best.yaml").read_text())
    assert flags["algo"] == "ppo" and flags["total_steps"] == 128 and flags["num_envs"] == 4
    config = PPOConfig(**flags["config"] | {"adam_betas": tuple(flags["config"]["adam_betas"])})
    for field in ("ent_coef", "gae_lambda", "num_steps", "minibatch_size", "num_epochs", "max_grad_norm"):
        assert getattr(config, field) == getattr(SMALL, field)
    # None in the recipe, so what is trained decides; that is where the search starts.
    assert config.learning_rate == trials(tmp_path)[0].params["learning_rate"] == 2.5e-4
    assert config.gamma == 0.99


@pytest.mark.heavy
def test_an_interrupted_search_ends_as_without(tmp_path):
    tune(recipe(), run_dir=tmp_path / "whole", trials=4, **OPTIONS)
    # Two environments before the first trial ends, two more before the second ends; the check at the start makes one.
    built.clear()
    interrupted_at.add(4)
    with pytest.raises(KeyboardInterrupt):
        tune(recipe(), run_dir=tmp_path / "cut", trials=4, **OPTIONS)
    interrupted_at.clear()
    assert [trial.state.name for trial in trials(tmp_path / "cut")] == ["COMPLETE", "FAIL"]
    result = tune(recipe(), run_dir=tmp_path / "cut", trials=4, **OPTIONS)
    whole, cut = trials(tmp_path / "whole"), [trial for trial in trials(tmp_path / "cut") if trial.values]
    assert [trial.params for trial in cut] == [trial.params for trial in whole]
    assert [trial.value for trial in cut] == [trial.value for trial in whole]
    assert result["trials"] == 4 and result["failed"] == 0
    assert tune(recipe(), run_dir=tmp_path / "cut", trials=4, **OPTIONS) == result
    changed = recipe(lambda num_envs: make(num_envs, pays=lambda number: 2.0))
    changed.env.__qualname__ = sound.__qualname__
    with refused(ValueError, "holds a search with other code or files", "env has changed", "another folder"):
        tune(changed, run_dir=tmp_path / "cut", trials=4, **OPTIONS)


@pytest.mark.heavy
def test_a_weak_trial_ends_early_a_failed_one_counts(tmp_path):
    # After the one at the start, a trial makes two environments: to train in, and to evaluate in.
    weak = recipe(lambda num_envs: make(num_envs, pays=lambda number: 1 / number, fails=4))
    result = tune(weak, run_dir=tmp_path, trials=8, **OPTIONS)
    states = [trial.state.name for trial in trials(tmp_path)]
    assert states[:3] == ["COMPLETE", "FAIL", "COMPLETE"] and states[-1] == "PRUNED"
    assert result["failed"] == 1 and result["ended_early"] == states.count("PRUNED")
    assert "as the test asks" in trials(tmp_path)[1].user_attrs["error"]


def test_the_best_recipe_is_written_again(tmp_path):
    """As where a call was killed between Optuna's journal and the file."""
    first = tune(recipe(), run_dir=tmp_path, trials=1, **OPTIONS)
    best = (tmp_path / "best.yaml").read_text()
    (tmp_path / "best.yaml").unlink()
    assert tune(recipe(), run_dir=tmp_path, trials=1, **OPTIONS) == first
    assert (tmp_path / "best.yaml").read_text() == best


def test_a_search_without_a_good_trial_says_so(tmp_path):
    broken = recipe(lambda num_envs: make(num_envs, pays=lambda number: float("nan") if number > 1 else 1.0))
    with refused(ValueError, "none of 2 trials was completed", "nan"):
        tune(broken, run_dir=tmp_path, trials=2, **OPTIONS)


def test_input_that_every_trial_refuses_is_an_error(tmp_path):
    with refused(ValueError, "as the test asks"):
        tune(recipe(lambda num_envs: make(num_envs, fails=2)), run_dir=tmp_path, **OPTIONS)
    result = tune(recipe(), run_dir=tmp_path, trials=1, **OPTIONS)  # the input is right now, and nothing is in the way
    assert result["trials"] == 1 and result["failed"] == 0


def test_the_value_of_a_trial_is_the_mean_of_seeds(tmp_path):
    # The environments of the two evaluations are the third and the fifth; an episode has ten steps.
    graded = recipe(lambda num_envs: make(num_envs, pays=lambda number: number))
    assert tune(graded, run_dir=tmp_path, trials=1, seeds=2, **OPTIONS)["mean_return"] == 10 * (3 + 5) / 2


def test_a_folder_of_another_search_is_refused(tmp_path):
    """Or of a run."""
    tune(recipe(), run_dir=tmp_path / "search", trials=1, **OPTIONS)
    with refused(ValueError, "holds a search with total_steps=128, not 256", "give another folder"):
        tune(replace(recipe(), total_steps=256), run_dir=tmp_path / "search", **OPTIONS)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    with refused(FileExistsError, "holds a run already"):
        tune(recipe(), run_dir=tmp_path / "run", **OPTIONS)


def test_every_range_belongs_to_a_field():
    known = {field.name for config in CONFIGS.values() for field in fields(config)} | {"kl_coef"}
    assert {*RANGES, *COMPLEMENTS, *SIZES} <= known


@pytest.mark.heavy
@pytest.mark.parametrize(
    "env, algorithm",
    [*presets.RECIPES, *(("textenv/Copy-v0", name) for name in CONFIGS if name not in presets.VALUE_POLICIES)],
)
def test_suggestions_around_a_recipe_are_valid(env, algorithm):
    given = presets.recipe(env, algorithm)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    for _ in range(20):
        suggested = suggested_recipe(study.ask(), given)  # an invalid config raises
        config, own = suggested.config, given.config
        if own.final_learning_rate:
            assert config.final_learning_rate / config.learning_rate == pytest.approx(
                own.final_learning_rate / own.learning_rate
            )
    assert len(study.trials[-1].params) >= 4
    assert ("kl_coef" in searched_fields(given)) == bool(given.kl_coef)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "there is nothing to search for: give ENV"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        (["CartPole"], "cannot make environment 'CartPole'"),
        (["CartPole-v1", "--trials", "0"], "'trials': 0.*expected at least 1"),
        (["CartPole-v1", "--total-steps", "0"], "'total_steps': 0.*expected at least 1"),
        (["textenv/Copy-v0", "--algo", "dqn"], "dqn is not for text"),
        (["CartPole-v1", "--trails", "1"], "there is no --trails: did you mean --trials"),
    ],
)
def test_wrong_input_is_refused_and_leaves_nothing(arguments, words, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["tune", *arguments, "--run-dir", str(tmp_path / "search")])
    assert stop.value.code == 2 and not (tmp_path / "search").exists()
    error = capsys.readouterr().err
    with refused(ValueError, words):
        raise ValueError(error)
    assert error.count("\n") == 1


@pytest.mark.heavy
def test_the_command_continues_and_prints_a_table(tmp_path, capsys):
    command = ["tune", "CartPole-v1", "--total-steps", "2048", "--num-episodes", "2", "--run-dir", str(tmp_path)]
    main([*command, "--trials", "1"])
    assert "trial 1 of 1: " in capsys.readouterr().out
    main([*command, "--trials", "2"])
    out = capsys.readouterr().out
    assert "trial 2 of 2: " in out and "trial 1 of" not in out and "hyper-parameters" in out
    best = str(tmp_path / "best.yaml")
    main(["train", "--config", best, "--run-dir", str(tmp_path / "run"), "--num-episodes", "2", "--json"])
    started, searched = (yaml.safe_load((tmp_path / name).read_text()) for name in ("run/run.yaml", "best.yaml"))
    assert searched["config"].items() <= started["config"].items() and started["total_steps"] == 2048


@pytest.mark.heavy
def test_a_search_starts_from_own_prompts_and_rewards(tmp_path, monkeypatch, caplog):
    """What only a training uses is told, since neither trials nor ``best.yaml`` have it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(
        "def short(completions):\n    return [float(len(x) < 9) for x in completions]\n"
    )
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt": "the film {n}"}}\n' for n in range(8)))
    options = {"prompts": "prompts.jsonl", "reward": ["rewards.py:short"], "kl_coef": 0.1, "total_steps": 200}
    options |= {"max_prompt_tokens": 32, "max_new_tokens": 8, "config": {"num_episodes": 16, "gamma": 0.5}}
    options |= {"max_kl": 0.5, "logger": "tensorboard", "seed": 3, "quiet": True}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(options))
    main(["tune", "--config", "own.yaml", "--trials", "1", "--num-episodes", "2", "--run-dir", "search"])
    assert "do without --max-kl 0.5, --logger tensorboard, and best.yaml too" in caplog.text
    best = yaml.safe_load((tmp_path / "search" / "best.yaml").read_text())
    assert best["env"] == "textenv/Prompts-v0" and best["kl_coef"] == 0.1 and best["total_steps"] == 200
    assert best["config"]["num_episodes"] == 16 and best["config"]["gamma"] == 0.5
    own = best["env_kwargs"]  # with paths for every folder
    assert own["prompts"] == f"{tmp_path}/prompts.jsonl" and own["reward"] == [f"{tmp_path}/rewards.py:short"]


def test_without_optuna_the_install_line_is_said(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.delitem(sys.modules, "algos.lab.comparison.tune")
    with pytest.raises(SystemExit) as stop:
        main(["tune", "CartPole-v1", "--run-dir", str(tmp_path / "search")])
    assert stop.value.code == 2 and "pip install 'optuna>=4'" in capsys.readouterr().err
    assert not (tmp_path / "search").exists()
