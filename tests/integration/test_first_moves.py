"""What a new user types first, wrong calls that everybody makes included."""

import json
import pydoc
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

import algos
import textenv
from algos import (
    DQN,
    PPO,
    SAC,
    TD3,
    A2CConfig,
    Collector,
    DQNConfig,
    LMPolicy,
    LSTMPolicy,
    MLPPolicy,
    Policy,
    PPOConfig,
    SFTConfig,
    collect,
    compare,
    evaluate,
)
from algos.cli import main
from algos.make import remake_environment
from algos.policies.policy import Step, check_spaces
from algos.training.save import read_description
from tests.helpers.errors import refused
from tests.helpers.finished_runs import write_run
from tests.helpers.models import WORDS, make_gpt2, make_tokenizer
from textenv import TextEnv
from textenv.lm.loading import load_tokenizer
from textenv.registration import NAMES, PROGRAMS

DATA = Path(__file__).parents[1] / "data"
RAW = ["FrozenLake-v1", "Blackjack-v1", "Taxi-v4", "CartPole-v1"]


def said(capsys, *arguments):
    """What the command line says about wrong input, with status 2."""
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in arguments])
    assert stop.value.code == 2
    return capsys.readouterr().err


def made(env, **options):
    return MLPPolicy(env.single_observation_space, env.single_action_space, **options)


# --- a policy reads the space that it was made for --------------------------------------------------------------------


@pytest.mark.heavy
@pytest.mark.parametrize("env_id", RAW)
def test_an_agent_reads_a_plain_environment(env_id, tmp_path, capsys):
    """Trained by name; then loaded, and played by its id, one environment, several, and the command line."""
    arguments = ["--total-steps", "400", "--num-episodes", "5", "--config.num-steps", "32", "--num-envs", "4", "--json"]
    main(["train", env_id, "--run-dir", str(tmp_path), *arguments])
    capsys.readouterr()
    policy = algos.load(tmp_path)
    env = gymnasium.make_vec(
        env_id, num_envs=5, vectorization_mode="sync", vector_kwargs={"autoreset_mode": "SameStep"}
    )
    expected = evaluate(env, policy, num_episodes=5, deterministic=True, seed=3)[0]
    assert policy.observation_space == env.single_observation_space or env_id == "CartPole-v1"
    observation, _ = env.reset(seed=0)
    assert policy.act(observation).action.shape == (5,), "a raw observation"
    assert evaluate(gymnasium.make(env_id), policy, num_episodes=3)[0]
    assert len(evaluate(env_id, policy, num_episodes=5)[0]) == 5
    main(["evaluate", str(tmp_path), "--num-episodes", "5", "--deterministic", "--seed", "3", "--json"])
    found = json.loads(capsys.readouterr().out)["mean_return"]
    if env_id != "CartPole-v1":  # whose own vector environment draws other starts
        assert found == pytest.approx(np.mean(expected))


def test_an_agent_of_the_former_format_is_read():
    """Written by version 0.1.0, which knew the flattened shape alone; its actions and log-probs were printed there."""
    policy = algos.load(DATA / "agent-format-2")
    step = policy.act(np.eye(16, dtype=np.float32), deterministic=True)
    assert step.action.tolist() == [3, 0, 2, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 3, 0]
    assert step.log_prob[:3].tolist() == pytest.approx([-1.382601, -1.374863, -1.385396], abs=1e-5)
    assert len(evaluate(gymnasium.make_vec("FrozenLake-v1", num_envs=2), policy, num_episodes=3)[0]) == 3


def test_agents_of_0_2_keep_their_former_names():
    """Written by its code; the environment's arguments have the names of that version."""
    policy = algos.load(DATA / "agent-format-3")
    observation, _ = gymnasium.make_vec("CartPole-v1", num_envs=2).reset(seed=5)
    step = policy.act(observation, deterministic=True)
    assert step.action.tolist() == [0, 0]
    assert step.log_prob.tolist() == pytest.approx([-0.692954, -0.692842], abs=1e-5)
    description = read_description(DATA / "text-agent-format-3")
    assert description["environment"]["kwargs"] == {"task": "Reviews", "kl_coef": 0.1}
    with closing(remake_environment(description, num_envs=2)) as env:
        assert env.penalty.coef == 0.1


def test_a_text_environment_is_played_by_its_id():
    tokenizer = make_tokenizer(WORDS)
    single = TextEnv(prompts=["a b"], reward=lambda completions: [1.0] * len(completions), tokenizer=tokenizer)
    assert evaluate(single, LMPolicy(make_gpt2(), tokenizer), num_episodes=3)[0] == [1.0] * 3
    returns, rollout = evaluate("textenv/Copy-v0", LMPolicy.load("embedded"), num_episodes=4)
    assert len(returns) == 4 and rollout.shape[0] == 4


# --- wrong calls ------------------------------------------------------------------------------------------------------


class OnlyActs(torch.nn.Module, Policy):
    """A policy that nobody finished."""

    def __init__(self):
        super().__init__()
        self.generator, self.layer = torch.Generator(), torch.nn.Linear(4, 2)

    def act(self, observation, *, action_mask=None, deterministic=False):
        return Step(torch.zeros(len(observation), dtype=torch.int64), torch.zeros(len(observation)))


def test_an_unfinished_policy_plays_but_cannot_train():
    env = gymnasium.make_vec("CartPole-v1", num_envs=2)
    assert evaluate(env, OnlyActs(), num_episodes=2).mean_return < 12
    with refused(NotImplementedError, "OnlyActs.values is missing", "algos.Policy.values"):
        PPO(env, OnlyActs()).learn(64)
    with refused(TypeError, "expected an algos.Policy", r"Collector\(env, policy\), in this order"):
        Collector(OnlyActs(), env)
    with refused(TypeError, "Collector.collect has no 'n_steps': did you mean 'num_steps'"):
        Collector(env, OnlyActs()).collect(n_steps=8)


class Shown(gymnasium.vector.VectorEnv):
    """Spaces alone."""

    def __init__(self, space):
        self.num_envs, self.single_observation_space, self.single_action_space = 2, space, spaces.Discrete(2)
        self.observation_space, self.action_space = (batch_space(one, 2) for one in (space, spaces.Discrete(2)))


@pytest.mark.heavy
def test_swapped_arguments_get_a_sentence():
    """So do the spaces of all slots, given for those of one."""
    env = gymnasium.make_vec("CartPole-v1", num_envs=4)
    policy = made(env)
    with refused(TypeError, "expected an algos.Policy", r"evaluate\(env, policy\), in this order"):
        evaluate(policy, env)
    with refused(TypeError, "policy is a PPO, an agent: give its policy, agent.policy"):
        evaluate(env, algos.PPO(env, policy))
    with refused(TypeError, "env is 3, expected an environment, a vector environment or a Gymnasium id"):
        evaluate(3, policy)
    with refused(ValueError, "CartPol", "Did you mean: `CartPole`"):
        evaluate("CartPol-v1", policy)
    batched = MLPPolicy(env.observation_space, env.action_space)
    half = MLPPolicy(env.single_observation_space, env.action_space)
    for wrong in (batched, half):
        for call in (lambda p: PPO(env, p), lambda p: evaluate(env, p)):
            with refused(ValueError, "spaces of all 4 slots", "env.single_observation_space"):
                call(wrong)
    other = MLPPolicy(spaces.Box(-1, 1, (5,)), spaces.Discrete(2))
    with refused(ValueError, r"MLPPolicy reads Box.*\(5,\)", r"environment has Box.*\(4,\)", "from the same space"):
        evaluate(env, other)
    box, plane = spaces.Box(-1, 1, (4,)), spaces.Box(-1, 1, (2,))
    turned = MLPPolicy(spaces.Tuple((plane, box)), spaces.Discrete(2))
    with refused(ValueError, "MLPPolicy reads Tuple", "from the same space"):
        check_spaces(Shown(spaces.Tuple((box, plane))), turned)
    with (
        closing(gymnasium.make_vec("textenv/Copy-v0", num_envs=2)) as text,
        refused(TypeError, "use an algos.LMPolicy"),
    ):
        evaluate(text, policy)


@pytest.mark.parametrize(("call", "words"), [
    (lambda env: made(env, hidden=64), ["hidden is 64", r"such as \(64, 64\)"]),
    (lambda env: made(env, hidden=(64, 0)), ["layer sizes must be positive integers", "out_features=0"]),
    (lambda env: LSTMPolicy(env.single_observation_space, env.single_action_space, hidden=(8, 8)),
     ["layer sizes must be positive integers"]),
    (lambda env: made(env, hidden_sizes=(64,)), ["MLPPolicy has no 'hidden_sizes': did you mean 'hidden'"]),
    (lambda env: PPOConfig(lr=1e-3), ["PPOConfig has no 'lr': did you mean 'learning_rate'", "clip_range"]),
    (lambda env: PPOConfig(n_steps=8), ["did you mean 'num_steps'"]),
    (lambda env: PPOConfig(whiten_advantages=False), ["did you mean 'normalize_advantage'"]),
    (lambda env: PPOConfig(learningrate=1.0), ["did you mean 'learning_rate'"]),
    (lambda env: PPOConfig(wholly_unknown=1.0), ["PPOConfig has no 'wholly_unknown'. It has num_steps"]),
    (lambda env: A2CConfig(entropy_coefficient=0.1), ["did you mean 'ent_coef'"]),
    (lambda env: DQNConfig(exploration_share=0.1), ["did you mean 'exploration_fraction'"]),
    (lambda env: PPO(env, kl_coeff=0.1), ["PPOConfig has no 'kl_coeff': did you mean 'kl_coef'"]),
    (lambda env: PPO(env, PPOConfig(num_steps=8)), ["policy is a PPOConfig", r"PPO\(env, config=config\)"]),
    (lambda env: PPO(env, "mlp"), ["policy is 'mlp'", "algos.make_policy"]),
    (lambda env: PPO(env, make_gpt2()), ["policy is a GPT2LMHeadModel", r"algos.LMPolicy\(model, tokenizer\)"]),
    (lambda env: PPO(made(env), env), ["env is a MLPPolicy and policy a CartPoleVectorEnv", "environment first"]),
    *[(lambda env, agent=agent: agent("MlpPolicy", env), ["env is a str and policy a", "environment first"])
      for agent in (PPO, DQN, SAC, TD3)],
    (lambda env: DQN(env, made(env)), ["policy is a MLPPolicy, but DQN trains only a QPolicy"]),
    (lambda env: PPOConfig(policy_loss=lambda log_ratio, advantage: -advantage),
     [r"policy_loss is called with log_ratio=..., advantage=..., mask=..., clip_range=...: .*'mask'"]),
    (lambda env: SFTConfig(n_epochs=2), ["SFTConfig has no 'n_epochs': did you mean 'num_epochs'"]),
    (lambda env: PPO(env, made(env)).learn(64, callback=print), ["has no 'callback': did you mean 'callbacks'"]),
    (lambda env: PPO(env, made(env)).learn(total_timesteps=64), ["did you mean 'total_steps'"]),
    (lambda env: collect(env, made(env), n_steps=8), ["collect has no 'n_steps': did you mean 'num_steps'"]),
    (lambda env: evaluate(env, made(env), n_eval_episodes=8), ["evaluate has no .*did you mean 'num_episodes'"]),
])  # fmt: skip
def test_foreign_names_and_slips_get_ours(call, words):
    with refused((TypeError, ValueError), *words):
        call(gymnasium.make_vec("CartPole-v1", num_envs=2))


@pytest.mark.parametrize(("arguments", "words"), [
    ("train CartPole-v1 --lr 3", "there is no --lr: did you mean --config.learning-rate?"),
    ("train CartPole-v1 --learning-rate=3", "there is no --learning-rate: did you mean --config.learning-rate?"),
    ("train CartPole-v1 --config.n-steps 3", "did you mean --config.num-steps?"),
    ("train CartPole-v1 --n-envs 3", "did you mean --num-envs?"),
    ("train CartPole-v1 --total_timesteps 3", "did you mean --total-steps?"),
    ("train CartPole-v1 --algo dqn --exploration-fraction 3", "did you mean --config.exploration-fraction?"),
    ("evaluate runs/x --n-eval-episodes 3", "did you mean --num-episodes?"),
    ('train CartPole-v1 --env-kwargs {"max_episode_steps":-5}', "max_episode_steps is -5, expected an integer"),
    ('train textenv/Periods-v0 --env-kwargs {"k":Infinity}', "k is inf, expected an integer of at least 1"),
])  # fmt: skip
def test_foreign_flags_and_bad_numbers_get_a_sentence(arguments, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert words in said(capsys, *arguments.split())
    assert not list(tmp_path.iterdir())


# --- help, errors and typos come at once ------------------------------------------------------------------------------

HEAVY = """
import contextlib, io, json, sys
from algos.cli import main

for arguments in json.loads(sys.argv[1]):
    status, errors = None, io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        try:
            main(arguments)
        except SystemExit as stop:
            status = stop.code
    heavy = [m for m in ("torch", "tensordict", "transformers", "torchrl", "matplotlib") if m in sys.modules]
    print(json.dumps([status, heavy, errors.getvalue()]))
"""
LIGHT = [
    (["--help"], 0), (["train", "--help"], 0), (["train", "CartPole-v1", "--algo", "grpo", "--help"], 0),
    (["compare", "--help"], 0), (["evaluate", "--help"], 0),
    (["trian"], 2), (["train"], 2), (["train", "CartPole-v1", "--sed", "1"], 2),
    (["train", "CartPole-v1", "--lr", "1"], 2),
    (["train", "CartPol-v1"], 2), (["train", "CartPole-v1", "--env-kwargs", "{"], 2), (["evaluate", "nowhere"], 2),
    (["train", "--resume", "nowhere"], 2), (["train", "no_module:Own-v0"], 2), (["check", "textenv/Poems-v0"], 2),
]  # fmt: skip


LOGS = [(["doctor", "run"], None), (["report", "run"], None), (["show", "run"], None), (["runs", "."], None)]


@pytest.mark.heavy
@pytest.mark.parametrize("commands", [LIGHT, LOGS], ids=["help and errors", "reading of logs"])
def test_what_needs_no_network_imports_nothing_heavy(tmp_path, commands):
    """All in one process: the first that imports something heavy is the first that shows it."""
    write_run(tmp_path / "run")
    program = [sys.executable, "-c", HEAVY, json.dumps([arguments for arguments, _ in commands])]
    root = str(Path(algos.__file__).parent.parent)
    done = subprocess.run(program, capture_output=True, text=True, cwd=tmp_path, env={"PYTHONPATH": root, "PATH": ""})
    lines = done.stdout.splitlines()
    assert len(lines) == len(commands), done.stderr
    for (arguments, expected), line in zip(commands, lines, strict=True):
        status, heavy, errors = json.loads(line)
        assert (status, heavy) == (expected, []) and "Traceback" not in errors, (arguments, errors)


@pytest.mark.heavy
def test_packages_show_names_and_modules():
    for package in (algos, textenv):
        assert set(package.__all__) <= set(dir(package))
        classes = {name for name, _ in pydoc.inspect.getmembers(package, pydoc.inspect.isclass)}  # as help() does
        assert classes >= {name for name in package.__all__ if isinstance(getattr(package, name), type)}
    program = "import algos, textenv; print(algos.presets.__name__, textenv.rewards.__name__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["algos.presets", "textenv.rewards"]
    with refused(AttributeError, "algos", "nonsense"):
        _ = algos.nonsense
    assert {"run_dir", "resume", "overwrite", "on_iteration"} <= set(pydoc.inspect.signature(PPO.learn).parameters)


# --- environments by name ---------------------------------------------------------------------------------------------


@pytest.mark.heavy
@pytest.mark.parametrize("name", NAMES)
def test_every_registered_id_needs_no_arguments(name):
    if name == "ReasoningGym":
        pytest.importorskip("reasoning_gym", reason="install the extra: pip install '.[reasoning-gym]'")
    if name == "OpenEnv":
        pytest.skip("needs a server: tests/textenv/extras/openenv/test_games.py")
    if name == "TextWorld":
        pytest.importorskip("textworld", reason="install the extra: pip install '.[textworld]'")
    own = {"Words": {"env": "FrozenLake-v1"}}.get(name, {})
    if name == "Prompts":
        own = {"prompts": ["the film"], "reward": lambda completions: [1.0] * len(completions)}
    if name == "Program":
        own = {"play": lambda ask: float(len(ask("the film")) > 0), "max_length": 64}
    if name in PROGRAMS:
        with refused(ValueError, f"textenv/{name}-v0 is a program, for which there is no single environment"):
            gymnasium.make(f"textenv/{name}-v0", **own)
        with closing(gymnasium.make_vec(f"textenv/{name}-v0", num_envs=2, **own)) as env:
            assert len(algos.collect(env, algos.LMPolicy.load("embedded"), num_episodes=4)) >= 4
        return
    with closing(gymnasium.make(f"textenv/{name}-v0", **own)) as env:
        assert env.observation_space.contains(env.reset(seed=0)[0])
    with closing(gymnasium.make_vec(f"textenv/{name}-v0", num_envs=2, **own)) as env:
        assert env.observation_space.contains(env.reset(seed=0)[0])


OWN = """
import gymnasium
import textenv
from textenv.lm.loading import load_tokenizer

gymnasium.register("Own-v0", "gymnasium.envs.classic_control:CartPoleEnv", max_episode_steps=20)
gymnasium.register("OwnText-v0", "textenv.registration:make_env", kwargs={"task": "Copy"})


def dots(num_envs=1, **options) -> textenv.TextVectorEnv:
    def reward(completions):
        return [float(text.count(".")) for text in completions]

    tokenizer = load_tokenizer("embedded")
    return textenv.TextVectorEnv(prompts=["this film"], reward=reward, tokenizer=tokenizer, num_envs=num_envs,
                                 max_new_tokens=4, **options)


gymnasium.register("own/Dots-v0", vector_entry_point=dots)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder with a module that registers environments, from which commands are typed."""
    (tmp_path / "own_envs.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    forget()


def forget():
    """As in a new process."""
    for name in ("Own-v0", "OwnText-v0", "own/Dots-v0"):
        gymnasium.registry.pop(name, None)
    for name in [name for name in sys.modules if name.endswith("own_envs")]:
        del sys.modules[name]


@pytest.mark.heavy
def test_prompts_by_name_train_evaluate_and_compare(own, capsys):
    """It was taken for control: steps instead of episodes, and no --model nor --kl-coef."""
    name = "own_envs:own/Dots-v0"
    words = ["--total-steps", "200", "--config.num-episodes", "32", "--num-episodes", "2", "--json"]
    main(["train", name, "--kl-coef", "0.1", "--run-dir", "run", *words])
    saved = json.loads(Path("run/config.json").read_text())
    assert saved["config"]["bootstrap_truncated"] is False and saved["penalty"] is not None
    assert "reference/kl" in json.loads(Path("run/metrics.jsonl").read_text().splitlines()[0])
    forget()
    main(["evaluate", "run", "--env", name, "--num-episodes", "2", "--json"])
    assert name + ":ppo" in compare([name], seeds=1, total_steps=100, run_dir=own / "compare", processes=0, quiet=True)


@pytest.mark.heavy
def test_a_run_on_a_local_model_opens_from_anywhere(tmp_path, capsys, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    LMPolicy.load("embedded").lm.model.save_pretrained("tiny")
    load_tokenizer("embedded").save_pretrained("tiny")
    words = ["--total-steps", "32", "--config.num-episodes", "8", "--num-episodes", "2", "--json"]
    main(["train", "textenv/Periods-v0", "--model", "tiny", "--env-kwargs", '{"k": 1}', "--run-dir", "run", *words])
    monkeypatch.chdir(tmp_path)
    main(["evaluate", "here/run", "--num-episodes", "2", "--json"])
    main(["train", "--resume", "here/run", "--total-steps", "64"])
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_a_wrong_policy_or_truth_value_is_named():
    env = gymnasium.make_vec("CartPole-v1", num_envs=2)
    with refused(TypeError, "policy is 'MlpPolicy'", "MLPPolicy"):
        PPO(env, "MlpPolicy")
    with refused(ValueError, "bootstrap_truncated is 'False'", "bool"):
        PPOConfig(bootstrap_truncated="False")


@pytest.mark.parametrize(("wrong", "ours"), [("--gama", "--config.gamma"), ("--total-step", "--total-steps")])
def test_misspelt_flags_get_the_nearest(wrong, ours, capsys):
    assert f"did you mean {ours}?" in said(capsys, "train", "CartPole-v1", wrong, "3")


def test_a_policy_of_other_actions_is_refused(tmp_path):
    """And a folder that holds a model, not an agent."""
    env = gymnasium.make_vec("Pendulum-v1", num_envs=2)
    for actions in (spaces.Box(-2, 2, (3,)), spaces.Discrete(2), spaces.Discrete(2, start=1)):
        with refused(ValueError, "chooses from", "but the environment takes"):
            PPO(env, MLPPolicy(env.single_observation_space, actions))
    make_gpt2().save_pretrained(tmp_path)
    with refused(ValueError, "holds a transformers model", "algos.LMPolicy.load"):
        algos.load(tmp_path)


@pytest.mark.heavy
def test_own_environments_are_named_with_their_module(own, capsys):
    """Every command takes `module:id`."""
    short = ["--total-steps", "64", "--num-episodes", "2", "--json"]
    main(["train", "own_envs:Own-v0", "--run-dir", "run", *short])
    saved = json.loads(Path("run/config.json").read_text())["environment"]
    assert (saved["id"], saved["module"]) == ("Own-v0", "own_envs")
    forget()
    assert "imported only if you name it: --env own_envs:Own-v0" in said(capsys, "evaluate", "run")
    assert "own_envs" not in sys.modules
    main(["evaluate", "run", "--env", "own_envs:Own-v0", "--num-episodes", "2", "--json"])
    assert json.loads(capsys.readouterr().out)["mean_return"] <= 20
    main(["evaluate", "run", "--env", "CartPole-v1", "--num-episodes", "2", "--json"])
    assert json.loads(capsys.readouterr().out)["episodes"] == 2
    forget()
    main(["train", "--resume", "run", "--total-steps", "128"])
    capsys.readouterr()
    forget()
    main(["compare", "own_envs:Own-v0:a2c", "--seeds", "1", "--total-steps", "64", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert "own_envs:Own-v0:a2c" in found
    assert "with other settings" in said(capsys, "compare", "own_envs:Own-v0:a2c", "--seeds", "1", "--json")
    forget()
    main(["check", "own_envs:OwnText-v0", "--json"])
    assert json.loads(capsys.readouterr().out)["sound"] is True
    assert "cannot be imported" in said(capsys, "check", "no_module:Own-v0").replace("could not", "cannot")


def test_an_environment_with_an_odd_spec_is_saved(tmp_path):
    """As EnvPool's, which have no ``id``."""
    env = gymnasium.make_vec("CartPole-v1", num_envs=2)
    env.unwrapped.spec = SimpleNamespace(num_envs=2)
    PPO(env, num_steps=8).learn(16, run_dir=tmp_path / "run")
    assert json.loads((tmp_path / "run" / "config.json").read_text())["environment"] is None
