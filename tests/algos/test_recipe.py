"""A recipe is what its plain form says, in Python, in files of every version, and in what is built from it."""

import json
import sys
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from gymnasium.wrappers import TimeLimit
from hypothesis import given, settings, strategies as st

from algos import MLPPolicy, PPOConfig, losses, presets
from algos.cli import main
from algos.cli.train import PromptOptions, TextOptions, Train
from algos.config import CONFIGS
from algos.lab.comparison.record import changed_settings
from algos.ppo import PPO
from algos.recipe import ENV_OPTIONS, KINDS, OTHER_OPTIONS, POLICY_OPTIONS, Recipe
from algos.storage.run_files import CONFIG, METRICS, RUN
from tests.helpers.errors import refused
from textenv.kl.coefficients import AdaptiveCoefficient

RUN_OF_0_9_0 = """\
env: CartPole-v1
json: false
trust_remote_code: false
prompts: null
reward: []
eval_prompts: null
prompt_column: prompt
system_prompt: null
chat: false
model: embedded
kl_coef: null
max_kl: null
max_prompt_tokens: null
max_new_tokens: null
temperature: null
lora: null
critic: null
dtype: float32
autocast: false
gradient_checkpointing: false
generator: null
logger: null
sample_every: 10
eval_every: null
eval_num_episodes: 20
stop_at: null
patience: null
dynamics_every: 0
quiet: true
algo: ppo
total_steps: 200
num_envs: 16
policy: auto
policy_kwargs: {}
device: null
shard: false
env_kwargs: {}
wrapper: []
process_timeout: null
workers: null
staleness: 0
num_episodes: 20
checkpoint_every: null
seed: 1
config:
  num_steps: 64
  num_episodes: null
  learning_rate: 0.003
  final_learning_rate: 0.00015
  warmup_ratio: 0.0
  adam_eps: 1.0e-05
  adam_betas:
  - 0.9
  - 0.999
  weight_decay: 0.0
  max_grad_norm: 1.0
  skip_nonfinite: false
  micro_batch_size: null
  ent_coef: 0.0
  ratio_tolerance: null
  num_epochs: 8
  minibatch_size: 256
  clip_range: 0.2
  clip_higher: null
  max_importance_weight: null
  policy_loss: clipped_policy_loss
  aggregation: token_mean
  gamma: 0.98
  gae_lambda: 0.9
  whiten_rewards: false
  normalize_advantage: minibatch
  normalize_rewards: false
  bootstrap_truncated: true
  value_learning_rate: null
  value_max_grad_norm: null
  fit_value_head: false
  final_clip_range: null
  vf_coef: 0.5
  clip_range_vf: null
  target_kl: null
"""
"""``run.yaml`` of ``algos train CartPole-v1 --total-steps 200 --quiet``, as version 0.9.0 wrote it."""


def through_yaml(recipe):
    """The recipe as a file gives it back."""
    text = yaml.safe_dump(recipe.to_dict(), sort_keys=False)
    return Recipe.from_dict(yaml.safe_load(text), trusted=True)


def make_policy(env, seed, hidden=(8,)):
    return MLPPolicy(env.single_observation_space, env.single_action_space, hidden_sizes=hidden, seed=seed)


class OwnPPO(PPO):
    pass


@pytest.mark.parametrize(("env_id", "algorithm"), presets.RECIPES)
def test_a_preset_is_the_same_after_a_file(env_id, algorithm):
    recipe = presets.recipe(env_id, algorithm)
    assert through_yaml(recipe) == recipe


NAMES = st.text("abcdefgh_", min_size=1, max_size=8)
VALUES = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(max_size=20)
ARGUMENTS = st.dictionaries(NAMES, st.recursive(VALUES, lambda x: st.lists(x, max_size=3) | st.dictionaries(NAMES, x)))


@st.composite
def recipes(draw):
    algorithm = draw(st.sampled_from(sorted(CONFIGS)))
    config = CONFIGS[algorithm](
        learning_rate=draw(st.none() | st.floats(1e-6, 1.0)),
        adam_betas=(draw(st.floats(0, 0.99)), draw(st.floats(0, 0.9999))),
    )
    return Recipe(
        env=draw(st.sampled_from(["CartPole-v1", "textenv/Copy-v0", "some_module:Some-v0"])),
        algorithm=algorithm,
        config=config,
        num_envs=draw(st.integers(1, 64)),
        total_steps=draw(st.integers(1, 10**9)),
        policy=draw(st.sampled_from(["auto", "mlp", "lstm"])),
        policy_kwargs=draw(ARGUMENTS),
        env_kwargs=draw(ARGUMENTS),
        model=draw(st.text(max_size=20)),
        kl_coef=draw(st.none() | st.floats(0, 10)),
        device=draw(st.none() | st.just("cpu")),
        shard=draw(st.booleans()),
        generator=draw(st.none() | st.just("vllm")),
    )


@pytest.mark.heavy
@given(recipes())
@settings(max_examples=50, deadline=None, derandomize=True, database=None)
def test_any_recipe_is_the_same_after_a_file(recipe):
    assert through_yaml(recipe) == recipe


def test_functions_and_classes_are_found_by_name():
    fixed_length = partial(losses.fixed_length_mean, length=7)
    recipe = Recipe(
        env="CartPole-v1",
        algorithm=OwnPPO,
        config=PPOConfig(policy_loss=losses.clipped_policy_loss, aggregation=fixed_length),
        policy=make_policy,
        env_kwargs={"wrappers": [torch.nn.Identity]},
    )
    again = through_yaml(recipe)
    assert again.config.aggregation.func is losses.fixed_length_mean and again.config.aggregation.keywords == {
        "length": 7
    }
    assert replace(again, config=recipe.config) == recipe
    assert again.config.policy_loss is losses.clipped_policy_loss
    assert through_yaml(Recipe(policy=partial(make_policy, hidden=[4]))).policy.keywords == {"hidden": [4]}


class Scorer:
    __slots__ = ("weight",)

    def __init__(self, weight):
        self.weight = weight

    def score(self, completions):
        return [self.weight] * len(completions)


def test_methods_and_slots_keep_their_values():
    """A method was written as its function alone, and an object with slots without their values."""
    recipe = Recipe(env="textenv/Prompts-v0", env_kwargs={"reward": Scorer(2.0).score})
    assert through_yaml(recipe).env_kwargs["reward"](["a"]) == [2.0]
    assert recipe.to_dict() != replace(recipe, env_kwargs={"reward": Scorer(3.0).score}).to_dict()


def test_coefficients_and_own_configs_survive_a_file():
    again = through_yaml(presets.TRL_0_7)
    assert vars(again.kl_coef) == vars(presets.TRL_0_7.kl_coef) and type(again.kl_coef) is AdaptiveCoefficient
    assert replace(again, kl_coef=presets.TRL_0_7.kl_coef) == presets.TRL_0_7


def shortened(env):
    return TimeLimit(env, 5)


def test_the_command_finds_a_recipes_functions(tmp_path):
    config = PPOConfig(num_steps=16, minibatch_size=32)
    recipe = Recipe(env="CartPole-v1", config=config, env_kwargs={"wrappers": [shortened]}, num_envs=2, total_steps=32)
    (tmp_path / "best.yaml").write_text(yaml.safe_dump(recipe.to_dict()))
    main(["train", "--config", str(tmp_path / "best.yaml"), "--run-dir", str(tmp_path / "run"), "--quiet"])
    assert max(row["episode/length"] for row in rows_of(tmp_path / "run")) <= 5


def test_a_nameless_function_is_not_found_again():
    recipe = Recipe(policy=lambda env, seed: make_policy(env, seed))
    with refused(ValueError, "cannot be imported", "defined inside a function"):
        through_yaml(recipe)


@pytest.mark.parametrize(
    "option",
    [
        {"env": "attack:Env-v0"},
        {"env": {"import": "attack:make"}},
        {"algo": {"import": "attack:Agent"}},
        {"policy": {"import": "os:system"}},
        {"kl_coef": {"import": "attack:Coefficient", "state": {}}},
        {"config": {"policy_loss": {"import": "attack:loss"}}},
        {"reward": ["attack.py:reward"]},
        {"wrapper": ["attack:wrap"]},
        {"env_kwargs": {"wrappers": ["attack:wrap"]}},
        {"env-kwargs": {"wrappers": ["attack:wrap"]}},
        {"env_kwargs": {"x": [{"y": {"import": "attack:wrap"}}]}},
    ],
)
def test_what_is_not_trusted_imports_nothing(option, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "attack.py").write_text("import pathlib\npathlib.Path('ran').touch()\n")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"env": "CartPole-v1"} | option))
    with refused(ValueError, next(iter(option)).replace("-", "_"), "trusted=True"):
        Recipe.from_yaml(tmp_path / "run.yaml")
    assert not (tmp_path / "ran").exists() and "attack" not in sys.modules


@pytest.mark.parametrize(
    "options, words",
    [
        ({"num_envs": "many"}, "option num_envs is 'many', expected int"),
        ({"policy_kwargs": 3}, "policy_kwargs is 3"),
        ({"config": [1]}, "config is"),
        ({"env": None}, "env is None"),
        ({"algo": "sarsa"}, "expected one of ppo"),
        ({"config": {"gamma": 3}}, "PPOConfig.gamma is 3"),
    ],
)
def test_a_value_of_another_kind_is_refused(options, words):
    with refused(ValueError, words):
        Recipe.from_dict(options)


@pytest.mark.parametrize("options", [PromptOptions, TextOptions])
def test_options_have_the_command_lines_defaults(options):
    of_recipe = {"model", "kl_coef", "generator", "max_kl"}
    defaults = {field.name: field.default for field in fields(options) if field.name not in of_recipe}
    assert defaults.items() <= (POLICY_OPTIONS | ENV_OPTIONS).items()


def test_options_of_text_go_to_policy_and_environment():
    of_policy = {"temperature": 0.7, "autocast": True, "dtype": "float32"}
    recipe = Recipe.from_dict({"num-envs": 3, "logger": "wandb", "stop": ["."], "chat": False} | of_policy)
    assert recipe.policy_kwargs == {"temperature": 0.7, "autocast": "bfloat16"}
    assert recipe.env_kwargs == {"stop": (".",)} and recipe.num_envs == 3


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of 0.9.0's options, typed on the command line."""
    folder = tmp_path_factory.mktemp("run")
    main(["train", "CartPole-v1", "--total-steps", "200", "--quiet", "--run-dir", str(folder)])
    return folder


def rows_of(folder):
    """Metrics of a run's iterations, without times."""
    rows = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    return [{name: x for name, x in row.items() if not name.startswith("time/")} for row in rows]


def test_a_run_of_version_0_9_is_repeated(run, tmp_path):
    (tmp_path / RUN).write_text(RUN_OF_0_9_0)
    main(["train", "--config", str(tmp_path / RUN), "--run-dir", str(tmp_path / "again")])
    assert rows_of(tmp_path / "again") == rows_of(run)
    options, options_of_0_9 = yaml.safe_load((run / RUN).read_text()), yaml.safe_load(RUN_OF_0_9_0)
    config, config_of_0_9 = options.pop("config"), options_of_0_9.pop("config")
    assert {name: config[name] for name in config_of_0_9} == config_of_0_9  # later versions have more of them
    assert {name: options[name] for name in options_of_0_9} == options_of_0_9


def test_a_run_of_version_0_9_is_a_recipe(run, tmp_path):
    (tmp_path / RUN).write_text(RUN_OF_0_9_0)
    recipe = Recipe.from_yaml(tmp_path / RUN)
    assert recipe == Recipe.from_yaml(run / RUN)
    history = recipe.build(seed=1).learn(recipe.total_steps)
    assert [row["policy/loss"] for row in history] == [row["policy/loss"] for row in rows_of(run)]


@pytest.mark.heavy
def test_a_run_of_version_0_9_is_resumed(run, tmp_path):
    for folder in (tmp_path / "former", tmp_path / "present"):
        main(["train", "--config", str(run / RUN), "--run-dir", str(folder)])
    (tmp_path / "former" / RUN).write_text(RUN_OF_0_9_0)
    for folder in (tmp_path / "former", tmp_path / "present"):
        main(["train", "--resume", str(folder), "--total-steps", "2000"])
    assert rows_of(tmp_path / "former")[-1]["steps"] >= 2000
    assert rows_of(tmp_path / "former") == rows_of(tmp_path / "present")


def test_a_settings_file_of_version_0_10_says_the_same():
    recipe = Recipe(
        policy=make_policy,
        config=PPOConfig(aggregation=partial(losses.fixed_length_mean, length=7)),
        kl_coef=AdaptiveCoefficient(0.1, target=6.0),
    )
    now = recipe.to_dict()
    former = now | {
        "policy": "tests.algos.test_recipe.make_policy",
        "kl_coef": {
            "type": "textenv.kl.coefficients.AdaptiveCoefficient", "_state": {"value": 0.1}, "target": 6.0, "gain": 0.1
        },
        "config": now["config"]
        | {"aggregation": {"function": "algos.losses.fixed_length_mean", "arguments": {"length": 7}}},
    }  # fmt: skip
    assert changed_settings(former, now) == []
    assert changed_settings(former | {"policy": "tests.algos.test_recipe.other"}, now) != []


TEXT = Recipe(
    env="textenv/Copy-v0", config=replace(presets.TEXT, num_episodes=4, minibatch_size=4), num_envs=4, kl_coef=0.25
)


@pytest.mark.heavy
def test_the_agent_makes_the_penalty_once():
    agent = TEXT.build(seed=1)
    assert agent.env.penalty is None and agent.penalty.coef == 0.25
    assert TEXT.environment(2, split="test").penalty.coef == 0.25, "an evaluation measures the KL"


@pytest.mark.heavy
def test_a_saved_agent_has_its_coefficient(tmp_path):
    TEXT.build(seed=1).save(tmp_path)
    assert json.loads((tmp_path / CONFIG).read_text())["environment"]["kwargs"]["kl_coef"] == 0.25


@pytest.mark.heavy
def test_a_penalty_given_to_the_environment_stays():
    agent = replace(TEXT, env_kwargs={"kl_coef": 0.5}).build(seed=1)
    assert agent.penalty is agent.env.penalty and agent.penalty.coef == 0.5


def test_a_functions_policy_must_have_the_recipes_model():
    from algos import LMPolicy

    agent = replace(TEXT, policy=lambda env, seed: LMPolicy.load("embedded", seed=seed)).build(seed=1)
    assert agent.penalty is agent.env.penalty and agent.penalty.coef == 0.25


def test_absolute_paths_outlive_a_change_of_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rewards.py").touch()
    recipe = Recipe(model="gone", env_kwargs={"reward": ["rewards.py:f"]}).with_absolute_paths()
    assert recipe.env_kwargs == {"reward": [f"{tmp_path}/rewards.py:f"]} and recipe.model == "gone"


def test_an_unknown_option_is_named_with_the_nearest():
    with pytest.raises(TypeError, match="no option 'num_env' of a run; did you mean 'num_envs'"):
        Recipe.from_dict({"env": "CartPole-v1", "num_env": 4})


def test_every_option_of_a_training_is_known():
    known = {*KINDS, *POLICY_OPTIONS, *ENV_OPTIONS, *OTHER_OPTIONS}
    assert {option.name for option in fields(Train)} == known - {"seed"}, "the command line has config.seed"


def test_a_missing_file_is_said_to_be_missing(tmp_path):
    with pytest.raises(ValueError, match="there is no file .*none.yaml"):
        Recipe.from_yaml(tmp_path / "none.yaml")


def test_a_recipes_model_and_its_arguments_stay_apart(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in "abc":
        (tmp_path / name).mkdir()
    recipe = Recipe(
        env="textenv/Reviews-v0",
        model="a",
        env_kwargs={"model": "b"},
        policy_kwargs={"critic": "c", "temperature": 1.0},
    )
    absolute = recipe.with_absolute_paths()
    assert (absolute.model, absolute.env_kwargs) == (str(tmp_path / "a"), {"model": str(tmp_path / "b")})
    assert absolute.policy_kwargs == {"critic": str(tmp_path / "c"), "temperature": 1.0}


def test_what_a_command_says_needs_no_trust():
    """The file of `algos tune` has a recipe like this one."""
    recipe = Train(env="CartPole-v1", config=PPOConfig()).recipe()
    assert "wrappers" not in recipe.env_kwargs and Recipe.from_dict(recipe.to_dict()).env == "CartPole-v1"
    Recipe.from_dict({"env": "CartPole-v1", "env_kwargs": {"process_timeout": None, "wrappers": []}, "reward": None})


def test_a_flag_replaces_what_a_file_has():
    options = {"env": "CartPole-v1", "env_kwargs": {"wrappers": ["a:b"]}, "wrapper": "c:d", "critic": "head"}
    recipe = Recipe.from_dict(options, trusted=True)
    assert recipe.env_kwargs == {"wrappers": ("c:d",)} and recipe.policy_kwargs == {}


def test_an_unknown_generator_is_refused_at_once():
    with pytest.raises(ValueError, match="generator is 'x', expected None or one of vllm"):
        Recipe(env="textenv/Reviews-v0", generator="x")


@dataclass(frozen=True, kw_only=True)
class OwnConfig(PPOConfig):
    strength: float = 1.0


def test_a_config_of_ones_own_is_checked_when_it_is_read():
    recipe = Recipe(env="CartPole-v1", config=OwnConfig(strength=2.0, seed=5))
    data = recipe.to_dict()
    assert "seed" not in data["config"]["state"]
    assert Recipe.from_dict(data, trusted=True).config == OwnConfig(strength=2.0)
    data["config"]["state"]["learning_rate"] = -5
    with pytest.raises(ValueError, match="learning_rate"):
        Recipe.from_dict(data, trusted=True)
