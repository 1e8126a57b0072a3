"""What an agent is made of: wrong types are refused when it is made, and β may be a function."""

import dataclasses

import gymnasium
import pytest
import torch
from gymnasium.vector import SyncVectorEnv

from algos import PPO, Case, GRPOConfig, LMPolicy, PPOConfig, WordsPolicy, collect, compare, evaluate, load, presets
from algos.cli import main
from algos.make import make_policy
from algos.recipe import Recipe
from tests.helpers.chat_templates import own_template_tokenizer
from tests.helpers.errors import refused
from tests.helpers.models import WORDS, make_gpt2, make_tokenizer
from textenv import KLPenalty, ScheduledCoefficient, TextVectorEnv
from textenv.kl.coefficients import FunctionCoefficient

TEXT = dict(num_steps=None, num_episodes=8, minibatch_size=4, learning_rate=1e-3)


def cartpole(num_envs=2):
    return gymnasium.make_vec("CartPole-v1", num_envs=num_envs)


class Echo(gymnasium.Env):
    """An environment that reads and writes strings."""

    observation_space = action_space = gymnasium.spaces.Text(50)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "say hi", {}

    def step(self, action):
        return "done", 1.0, True, False, {}


def text_agent(kl_coef, **options):
    tokenizer = make_tokenizer(WORDS)
    reward = lambda completions: [float(text.count("a")) for text in completions]  # noqa: E731
    env = TextVectorEnv(prompts=["a b"], reward=reward, tokenizer=tokenizer, num_envs=8, max_new_tokens=6)
    return PPO(env, LMPolicy(make_gpt2(), tokenizer, seed=1), kl_coef=kl_coef, **TEXT | options)


def weights(agent):
    return torch.cat([parameter.detach().flatten() for parameter in agent.policy.parameters()])


def linear(steps):
    return 0.2 + min(steps / 100, 1.0) * (0.0 - 0.2)


@pytest.mark.heavy
def test_a_function_of_steps_equals_its_schedule():
    one, other = text_agent(linear), text_agent(ScheduledCoefficient(0.2, 0.0, steps=100))
    history, same = one.learn(200), other.learn(200)
    betas = [row["reference/coefficient"] for row in history]
    assert betas == [row["reference/coefficient"] for row in same] and betas[0] == 0.2 > betas[1] > betas[-1]
    assert torch.equal(weights(one), weights(other))


@pytest.mark.heavy
def test_a_function_goes_on_after_a_resume(tmp_path):
    halved = lambda steps: 0.2 * 0.5 ** (steps / 50)  # noqa: E731
    whole = text_agent(halved)
    history = whole.learn(200)
    text_agent(halved).learn(80, run_dir=tmp_path, checkpoint_every=40)
    resumed = text_agent(halved)
    again = resumed.learn(200, run_dir=tmp_path, resume=tmp_path, checkpoint_every=40)
    name = "reference/coefficient"
    assert [row[name] for row in again] == [row[name] for row in history] and again[-1][name] < 0.1
    assert load(tmp_path).generate(["a"], max_new_tokens=2)
    with refused(ValueError, "another kind of coefficient"):
        text_agent(0.1).learn(300, run_dir=tmp_path, resume=tmp_path, checkpoint_every=40)


@pytest.mark.heavy
def test_a_function_in_an_environment_and_in_a_recipe(tmp_path):
    env = gymnasium.make_vec("textenv/Reviews-v0", num_envs=4, kl_coef=linear, max_new_tokens=4)
    agent = PPO(env, LMPolicy.load("embedded"), num_steps=None, num_episodes=4, minibatch_size=4)
    agent.learn(16, run_dir=tmp_path)
    main(["evaluate", str(tmp_path), "--num-episodes", "2", "--json"])  # its environment is known
    recipe = Recipe(env="textenv/Reviews-v0", config=agent.config, num_envs=4, kl_coef=linear)
    assert recipe.build(1).penalty.coef == 0.2
    control = Recipe(env="CartPole-v1", num_envs=2, kl_coef=linear).build(1)
    assert control.penalty.coef == 0.2, "what is given is charged, on control too"


@pytest.mark.heavy
def test_a_lambda_for_another_process_is_refused(tmp_path):
    case = Case("CartPole-v1", kl_coef=lambda steps: 0.1, total_steps=64)
    with refused(ValueError, "give processes=0, or define them in a file"):
        compare(case, seeds=1, run_dir=tmp_path, quiet=True)
    report = compare(case, seeds=1, run_dir=tmp_path, quiet=True, processes=0)
    assert "reference/kl" in report["CartPole-v1:ppo"]


WRONG = "expected a number \\(reward per nat\\), a function of the number of steps"


@pytest.mark.parametrize("kl_coef, kind, said", [
    ("0.1", TypeError, WRONG), ((0.1, 0.2), TypeError, WRONG), ([0.1], TypeError, WRONG), (True, TypeError, WRONG),
    (dict, TypeError, WRONG), (FunctionCoefficient, TypeError, WRONG), (object(), TypeError, WRONG),
    (lambda: 0.1, TypeError, "expected a function of the number of steps"),
    (lambda steps, kl: 0.1, TypeError, "expected a function of the number of steps"),
    (lambda steps: -1, ValueError, "returned -1 for 0 steps"), (lambda steps: None, ValueError, "returned None"),
    (lambda steps: True, ValueError, "returned True"), (lambda steps: float("nan"), ValueError, "returned nan"),
    (-1, ValueError, "coefficient is -1"), (float("nan"), ValueError, "coefficient is nan"),
])  # fmt: skip
def test_impossible_coefficients_are_refused(kl_coef, kind, said):
    with refused(kind, said):
        PPO(cartpole(), kl_coef=kl_coef)
    with refused(kind, said):
        KLPenalty(lambda: None, kl_coef)


def test_a_function_that_turns_negative_is_an_error():
    agent = text_agent(lambda steps: 0.1 - steps)
    with refused(ValueError, "the function of the KL coefficient returned -"):
        agent.learn(200)


class PenaltyWithoutPlace:
    """An own penalty; it failed in the first update, after a whole rollout."""

    coef = 0.1

    def __call__(self, rollout, policy):
        return {}

    def update(self, steps):
        pass


@pytest.mark.parametrize("make, kind, said", [
    (lambda: PPO(cartpole(), penalty=0.1), TypeError, "expected a textenv.KLPenalty; for a number.* kl_coef="),
    (lambda: PPO(cartpole(), penalty=PenaltyWithoutPlace()), TypeError, "An own penalty also needs place$"),
    (lambda: PPO(SyncVectorEnv([Echo] * 2), LMPolicy.load("embedded")), ValueError, "textenv.TokenVectorEnv"),
    (lambda: PPO(cartpole(), LMPolicy.load("embedded")), TypeError, "leave the policy out"),
    (lambda: evaluate(Echo(), LMPolicy.load("embedded")), ValueError, "textenv.TokenVectorEnv"),
    (lambda: collect(SyncVectorEnv([Echo] * 2), LMPolicy.load("embedded"), num_steps=4), ValueError, "TokenVectorEnv"),
    (lambda: make_policy(cartpole(), policy="cnn", model="smollm2"), ValueError, "'smollm2', a language model, but"),
    (lambda: Recipe(env="CartPole-v1", policy="mlp", model="smollm2").build(1), ValueError, "a language model, but"),
    (lambda: PPOConfig(learning_rate=lambda p: p), ValueError, "linear, from learning_rate to final_learning_rate"),
    (lambda: PPOConfig(clip_range=lambda p: p), ValueError, "linear, from clip_range to final_clip_range"),
    (lambda: PPOConfig(ent_coef=lambda p: p), ValueError, "it has no schedule"),
    (lambda: PPO(cartpole()).learn(64, on_iteration=3), TypeError, "on_iteration is 3, expected a function"),
])  # fmt: skip
def test_wrong_types_are_refused_before_anything_runs(make, kind, said):
    with refused(kind, said):
        make()


@pytest.mark.heavy
@pytest.mark.parametrize("words", [["--model", "embedded"], ["--model=embedded"]])
def test_a_named_language_model_plays_control(words, tmp_path, capsys):
    options = ["--num-envs", "2", "--config.num-steps", "8", "--num-episodes", "1", "--quiet"]
    main(["train", "FrozenLake-v1", *words, *options, "--total-steps", "16", "--run-dir", str(tmp_path / "run")])
    assert isinstance(load(tmp_path / "run"), WordsPolicy)
    with pytest.raises(SystemExit):
        main(["train", "FrozenLake-v1", "--policy", "mlp", *words, *options, "--run-dir", str(tmp_path / "other")])
    assert "--model: the policy mlp of FrozenLake-v1 has no language model" in capsys.readouterr().err


@pytest.mark.parametrize("make, unit", [
    (lambda: text_agent(None, minibatch_size=1), "answer"),
    (lambda: PPO(cartpole(), minibatch_size=1, normalize_advantage=False), "step"),
    (lambda: PPO(cartpole(), make_policy(cartpole(), policy="lstm"), minibatch_size=1), "row of steps"),
])  # fmt: skip
def test_minibatches_of_one_unit_are_refused(make, unit, caplog):
    make()
    assert f"minibatch_size is 1: each {unit} is an optimizer step of its own" in caplog.text
    assert "micro_batch_size=1" in caplog.text
    caplog.clear()
    text_agent(None, minibatch_size=2)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_a_rate_that_rises_is_said(caplog):
    """Often only the initial rate of a preset is changed; its final rate stays, and does the learning alone."""
    PPO(cartpole(), config=dataclasses.replace(presets.CARTPOLE, learning_rate=1e-5))
    assert "the learning rate rises from 1e-05 to its final 0.00015: change both" in caplog.text
    caplog.clear()
    PPO(cartpole(), config=dataclasses.replace(presets.CARTPOLE, learning_rate=1e-5, final_learning_rate=None))
    PPO(cartpole(), config=presets.CARTPOLE)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.heavy
def test_a_policy_is_saved_with_the_template_of_its_training(tmp_path):
    """Environments that are made by name have a tokenizer of their own; against transformers' rendering."""
    tokenizer = own_template_tokenizer("qwen 3")
    LMPolicy(make_gpt2(len(tokenizer), n_positions=200), tokenizer).save(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "what is the time?"}\n')
    (tmp_path / "rewards.py").write_text("def score(completions):\n    return [float(len(c)) for c in completions]\n")
    reward = f"{tmp_path}/rewards.py:score"
    env_kwargs = '{"chat": true, "max_new_tokens": 4, "chat_template_kwargs": {"enable_thinking": false}}'
    options = ["--model", str(tmp_path / "model"), "--prompts", str(tmp_path / "prompts.jsonl"), "--reward", reward]
    sizes = ["--total-steps", "16", "--config.num-episodes", "4", "--config.minibatch-size", "4"]
    run = str(tmp_path / "run")
    main(["train", "textenv/Prompts-v0", *options, *sizes, "--env-kwargs", env_kwargs, "--run-dir", run])

    chat = [{"role": "user", "content": "what is the time?"}]
    expected = tokenizer.apply_chat_template(chat, add_generation_prompt=True, enable_thinking=False, return_dict=False)
    for trained in (load(run).tokenizer, LMPolicy.load(f"{run}/policy").tokenizer):
        assert trained.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) == expected
    main(["evaluate", run, "--reward", reward, "--num-episodes", "2"])  # the variables need not be named again


def test_two_templates_of_one_training_are_refused():
    """A second environment that renders otherwise, with the policy's own tokenizer."""
    tokenizer = own_template_tokenizer("qwen 3")
    policy = LMPolicy(make_gpt2(len(tokenizer), n_positions=200), tokenizer)
    arguments = dict(prompts=[[{"role": "user", "content": "a"}]], reward=lambda completions: [0.0] * len(completions))
    arguments |= dict(max_prompt_tokens=99, max_new_tokens=4)
    evaluated = TextVectorEnv(tokenizer=tokenizer, **arguments)
    env = TextVectorEnv(
        tokenizer=own_template_tokenizer("qwen 3"), chat_template_kwargs={"enable_thinking": False}, **arguments
    )
    PPO(env, policy, **TEXT)
    assert policy.tokenizer.chat_template == env.tokenizer.chat_template
    with pytest.raises(ValueError, match="chat template is another one than when this environment was made"):
        evaluate(evaluated, policy, num_episodes=1)


@pytest.mark.parametrize("field", [{"learning_rate": 1e-12}, {"normalize_rewards": True}, {"seed": 5}], ids=str)
def test_a_hyper_parameter_that_only_a_new_agent_reads_is_not_replaced(field):
    """It was shown and saved, and had no effect."""
    agent = PPO(gymnasium.make_vec("CartPole-v1", num_envs=2), num_steps=8, minibatch_size=16)
    former = agent.config
    ((name, value),) = field.items()
    with refused(ValueError, f"agent.config: {name} is {value}", "make a new agent of the same policy, PPO"):
        agent.config = dataclasses.replace(former, **field)
    assert agent.config is former
    again = PPO(agent.env, agent.policy, dataclasses.replace(former, **field))
    assert getattr(again.config, name) == value


def test_other_hyper_parameters_may_be_replaced_between_updates():
    """An entropy bonus of 1e9 leaves nothing else to learn: the policy becomes uniform. Open fields are filled in."""
    agent = PPO(gymnasium.make_vec("CartPole-v1", num_envs=2), num_steps=8, minibatch_size=16)
    agent.policy.actor[-1].bias.data[0] = 0.5
    agent.config = PPOConfig(num_steps=8, minibatch_size=8, ent_coef=1e9)
    assert agent.config.adam_eps == 1e-5 and agent.config.normalize_advantage == "minibatch"
    before = agent.policy.actor[-1].bias.diff().abs().item()
    metrics = agent.update(agent.collect())
    assert metrics["update/minibatches"] == 4 * 16 / 8
    assert agent.policy.actor[-1].bias.diff().abs().item() < before
    with refused(TypeError, "config is a GRPOConfig, but PPO needs a PPOConfig"):
        agent.config = GRPOConfig()
