"""Each name of other libraries gets a hint, is ours, or is listed as one without a counterpart: by their signatures."""

import ast
import dataclasses
import inspect
import json
import re
from collections import Counter
from pathlib import Path

import gymnasium
import pytest

import algos
import textenv.foreign
from algos import DQN, GRPO, PPO, SAC, TD3, TRPO, EvaluateEvery, GRPOConfig, LMPolicy, MLPPolicy, PPOConfig
from algos.cli import main
from algos.cli.train import Train
from algos.config import CONFIGS
from algos.make import make_vector_environment
from tests.helpers.errors import refused
from textenv import HumanReward, KLPenalty, Rewards, TextVectorEnv
from textenv.foreign import ADVICE, FLAGS, METHODS, NO_EQUIVALENT, OF_CONFIG, PLACES, RENAMED, our_names
from textenv.names import advice, flag_advice, nearest
from textenv.rewards.scores import Scores

STORED = json.loads((Path(__file__).parents[1] / "data" / "foreign-names.json").read_text())["names"]


def parameters(function):
    return [name for name in inspect.signature(function).parameters if name not in ("self", "cls", "kwargs", "args")]


def names_of_ours():
    """Everything that can be written: fields of configs, arguments, and flags."""
    names = {field.name for config in (*CONFIGS.values(), algos.SFTConfig, algos.RewardModelConfig, Train, Scores)
             for field in dataclasses.fields(config)}  # fmt: skip
    functions = (
        PPO.__init__, PPO.learn, algos.collect, algos.evaluate, MLPPolicy.__init__, LMPolicy.__init__, LMPolicy.load,
        TextVectorEnv.__init__, KLPenalty.__init__, Rewards.__init__, EvaluateEvery.__init__, algos.sft,
        make_vector_environment, HumanReward.__init__,
    )  # fmt: skip
    for function in functions:
        names |= set(parameters(function))
    return names


OURS = names_of_ours()


def unanswered(names):
    answered = OURS | RENAMED.keys() | ADVICE.keys() | FLAGS.keys() | NO_EQUIVALENT
    return sorted(set(names) - answered)


@pytest.mark.parametrize("library", STORED)
def test_stored_names_of_libraries_are_answered(library):
    assert unanswered(STORED[library]) == []


def test_stable_baselines3s_names_are_answered():
    sb3 = pytest.importorskip("stable_baselines3")
    from stable_baselines3.common.callbacks import EvalCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.policies import ActorCriticPolicy

    kinds = (sb3.PPO, sb3.A2C, sb3.DQN, sb3.SAC, sb3.TD3, sb3.DDPG)
    functions = [kind.__init__ for kind in kinds] + [kind.learn for kind in kinds]
    functions += [evaluate_policy, EvalCallback.__init__, make_vec_env, ActorCriticPolicy.__init__]
    assert unanswered(name for function in functions for name in parameters(function)) == []
    methods = {name for kind in kinds for name in dir(kind) if not name.startswith("_")}
    assert sorted(name for name in methods if not hasattr(PPO, name) and name not in METHODS) == []


def test_transformers_trainer_arguments_are_answered():
    """TRL's configs inherit them."""
    from transformers import TrainingArguments

    assert unanswered(field.name for field in dataclasses.fields(TrainingArguments)) == []


def test_the_installed_trls_arguments_are_answered():
    trl = pytest.importorskip("trl")
    names = [field.name for kind in (trl.GRPOConfig, trl.RLOOConfig) for field in dataclasses.fields(kind)]
    names += [name for kind in (trl.GRPOTrainer, trl.RLOOTrainer) for name in parameters(kind.__init__)]
    assert unanswered(names) == []


def test_tables_are_consistent_and_name_what_exists():
    assert {ours for name in RENAMED for ours in our_names(name)} <= OURS
    assert PLACES.keys() <= OURS
    assert not NO_EQUIVALENT & (RENAMED.keys() | ADVICE.keys() | FLAGS.keys() | METHODS.keys())
    fields = {field.name for kind in (PPOConfig, GRPOConfig) for field in dataclasses.fields(kind)}
    assert not fields & (RENAMED.keys() | NO_EQUIVALENT)
    assert nearest("lr", ["gamma"]) is None and nearest("gama", ["gamma"]) == "gamma"


def test_no_name_stands_twice_in_a_table():
    """The later entry would silently replace the earlier one."""
    tree = ast.parse(Path(textenv.foreign.__file__).read_text())
    tables = [node for node in ast.walk(tree) if isinstance(node, ast.Dict)]
    assert len(tables) > 4
    for table in tables:
        keys = [key.value for key in table.keys]
        values = [value.value for value in table.values if isinstance(value, ast.Constant)]
        texts = values if "num_steps" in keys else keys  # our name first: theirs are the values
        names = " ".join(texts).split()
        assert [name for name, count in Counter(names).items() if count > 1] == []


@pytest.mark.parametrize("name", sorted(RENAMED.keys() | ADVICE.keys() | NO_EQUIVALENT))
def test_an_answer_names_only_what_can_be_written(name):
    """On the command line no argument of Python alone, in Python no flag."""
    known = [field.name for field in dataclasses.fields(GRPOConfig)]
    said = advice(name, known) if name not in known else ""
    assert "--" not in said or "algos " in said or "--generator" in said
    for flag in [word.strip(".,;:'`") for word in flag_advice(name).split() if word.startswith("--")]:
        if "Python" in flag_advice(name):
            continue
        of_train = {field.name for field in dataclasses.fields(Train)} | {"logger", "deterministic", "seed"}
        of_config = {f"config.{field.name}" for kind in CONFIGS.values() for field in dataclasses.fields(kind)}
        assert flag.removeprefix("--").replace("-", "_") in of_train | of_config, flag


def cartpole():
    return gymnasium.make_vec("CartPole-v1", num_envs=2)


def pendulum():
    return gymnasium.make_vec("Pendulum-v1", num_envs=2)


@pytest.mark.parametrize("name", OF_CONFIG)
def test_answers_for_one_config_name_fields_that_it_has(name):
    """And no name that it has is answered. What has no counterpart says so, or names what is not a field."""
    (config,) = [config for config in CONFIGS.values() if config.__name__ == name]
    fields = {field.name for field in dataclasses.fields(config)}
    assert not fields & OF_CONFIG[name].keys()
    for answer in OF_CONFIG[name].values():
        words = set(re.findall(r"\w+", answer))
        assert words & fields or "counterpart" in answer or "SACGSDEPolicy" in answer
        identifiers = {word for word in words if "_" in word} - {"sac_gsde"}
        assert identifiers <= fields


@pytest.mark.parametrize("call, words", [
    (lambda: PPO(cartpole(), verbose=1), "no 'verbose': agent.learn\\(..., progress=True\\)"),
    (lambda: PPO(cartpole(), tensorboard_log="x"), "no 'tensorboard_log': .*loggers=\\[\"tensorboard\"\\]"),
    (lambda: PPO(cartpole(), policy_kwargs={}), "no 'policy_kwargs': make the policy yourself"),
    (lambda: PPO(cartpole(), num_envs=2), "no 'num_envs': the environment has it: gymnasium.make_vec"),
    (lambda: PPO(cartpole(), n_steps=2), "no 'n_steps': did you mean 'num_steps'"),
    (lambda: PPOConfig(steps=2), "no 'steps': num_steps are the steps of a slot.* learn\\(total_steps\\)"),
    (lambda: GRPOConfig(beta=0.1), "no 'beta': kl_coef=β of the agent"),
    (lambda: GRPOConfig(temperature=0.7), "no 'temperature': the policy has it"),
    (lambda: GRPOConfig(max_completion_length=64), "no 'max_completion_length': the environment has it"),
    (lambda: GRPOConfig(reward_weights=[1]), "no 'reward_weights': give each function with its weight"),
    (lambda: GRPOConfig(output_dir="x"), "no 'output_dir': here it is run_dir, an argument of agent.learn"),
    (lambda: GRPOConfig(num_train_epochs=1), "no 'num_train_epochs': .* learn\\(total_steps\\)"),
    (lambda: GRPOConfig(max_steps=1), "no 'max_steps': .* not in optimizer steps"),
    (lambda: GRPOConfig(num_iterations=1), "no 'num_iterations': GRPO's passes over a rollout are num_epochs"),
    (lambda: GRPOConfig(vllm_mode="x"), "no 'vllm_mode': it is of another library, and has no counterpart here"),
    (lambda: GRPO(cartpole(), args=1), "no 'args': the config is the third argument"),
    (lambda: PPO(cartpole()).learn(64, callback=print), "no 'callback': did you mean 'callbacks'"),
    (lambda: PPO(cartpole()).learn(64, progress_bar=True), "did you mean 'progress'"),
    (lambda: algos.evaluate(cartpole(), None, n_eval_episodes=3), "did you mean 'num_episodes'"),
    (lambda: MLPPolicy(None, None, net_arch=[64]), "did you mean 'hidden'"),
    (lambda: SAC(pendulum(), ent_coef=0.2), "no 'ent_coef': temperature is the reward for each nat of entropy"),
    (lambda: SAC(pendulum(), gradient_steps=2), "no 'gradient_steps': updates_per_step is"),
    (lambda: TD3(pendulum(), n_steps=3), "no 'n_steps': num_steps are .*; returns of n steps have no counterpart"),
    (lambda: SAC(pendulum(), use_sde=True), "no 'use_sde': it is a policy, SACGSDEPolicy"),
    (lambda: SAC(pendulum(), action_noise=None), "no 'action_noise': SAC explores by its policy"),
    (lambda: SAC(pendulum(), target_update_interval=2), "no 'target_update_interval': .* by target_rate"),
    (lambda: DQN(cartpole(), tau=0.1), "no 'tau': the target network is copied whole"),
    (lambda: DQN(cartpole(), target_update_interval=2), "target_update_gradient_steps counts optimizer steps"),
    (lambda: TRPO(cartpole(), target_kl=0.1), "no 'target_kl': max_kl bounds the KL"),
    (lambda: TRPO(cartpole(), cg_max_steps=9), "no 'cg_max_steps': conjugate_gradient_steps are"),
    (lambda: gymnasium.make_vec("textenv/Reviews-v0", temperature=0.7), "Reviews-v0 has no .*: the policy has"),
    (lambda: gymnasium.make_vec("textenv/Copy-v0", max_completion_length=3), "did you mean 'max_new_tokens'"),
    (lambda: Rewards(print, reward_weights=[1]), "give each function with its weight"),
])  # fmt: skip
def test_hints_in_python_say_what_to_write_there(call, words):
    with refused(TypeError, words):
        call()


@pytest.mark.parametrize("owner, name, words", [
    (lambda: PPO(cartpole()), "predict", "PPO has no attribute 'predict': the policy acts: agent.policy.predict"),
    (lambda: PPO(cartpole()), "get_env", "agent.env is the environment"),
    (lambda: PPO, "load", "PPO has no attribute 'load': algos.load\\(folder\\) reads the policy"),
    (lambda: GRPO, "from_pretrained", "LMPolicy.load\\(name\\)"),
    (lambda: GRPO(cartpole()), "train", "agent.learn\\(total_steps\\) trains"),
    (lambda: PPO(cartpole()), "generator", "PPO has no attribute 'generator': agent.update_generator orders"),
    (lambda: PPO(cartpole()), "set_parameters", "DQN, SAC and TD3 copy the policy into their target networks"),
    (lambda: PPO(cartpole()), "no_such_thing", "PPO has no attribute 'no_such_thing'$"),
])  # fmt: skip
def test_methods_of_other_libraries_are_answered(owner, name, words):
    if name == "predict" and hasattr(PPO, "predict"):
        pytest.skip("there is one")
    with pytest.raises(AttributeError, match=words):
        getattr(owner(), name)
    assert not hasattr(owner(), name)


def test_an_error_inside_a_property_is_not_hidden():
    class Broken(PPO):
        @property
        def optimizer(self):
            return self.policy.no_such_layer

    with pytest.raises(AttributeError, match="no_such_layer"):
        _ = Broken(cartpole()).optimizer


@pytest.mark.parametrize("flags, words", [
    ("--steps 3", "there is no --steps: --total-steps is the length of the training"),
    ("--num-train-epochs 3", "--total-steps is the length of the training"),
    ("--num-iterations 3", "--config.num-epochs"), ("--max-steps 3", "--total-steps .* not in optimizer steps"),
    ("--config.n-steps 3", "did you mean --config.num-steps?"), ("--n-envs 3", "did you mean --num-envs?"),
    ("--timesteps 3", "did you mean --total-steps?"), ("--callback x", "--eval-every STEPS"),
    ("--verbose 1", "the training is shown unless there is --quiet"),
    ("--tensorboard-log x", "did you mean --run-dir?"), ("--beta 0.1", "did you mean --kl-coef?"),
    ("--max-completion-length 9", "did you mean --max-new-tokens?"), ("--output-dir x", "did you mean --run-dir?"),
    ("--reward-weights 1", "--reward rewards.py:f=0.5"), ("--report-to wandb", "did you mean --logger?"),
    ("--net-arch 64", "--policy-kwargs '{\"hidden\": "), ("--use-sde", "--policy gsde"),
    ("--vllm-mode x", "it is of another library, and has no counterpart here"),
    ("--lr 3", "did you mean --config.learning-rate?"),
    ("--algo trpo --config.target-kl 0.1", "there is no --config.target-kl: max_kl bounds the KL"),
    ("--algo dqn --config.tau 0.1", "there is no --config.tau: the target network is copied whole"),
    ("--algo sac --config.ent-coef 0.1", "there is no --config.ent-coef: temperature is the reward"),
    ("--algo sac --config.use-sde true", "there is no --config.use-sde: .* --policy sac_gsde"),
    ("--config.learning-rat 3", "did you mean --config.learning-rate?"),
])  # fmt: skip
def test_hints_on_the_command_line_are_flags(flags, words, capsys):
    with pytest.raises(SystemExit):
        main(["train", "CartPole-v1", *flags.split()])
    assert re.search(words.replace("?", "[?]"), capsys.readouterr().err)
