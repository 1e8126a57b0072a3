"""Evaluation with several samples of each prompt: what is counted, and what is refused."""

import itertools
import json

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv

import algos
from algos import (
    DQN,
    PPO,
    SAC,
    TD3,
    Callback,
    EvaluateEvery,
    MLPPolicy,
    QPolicy,
    SACGSDEPolicy,
    SACPolicy,
    TD3Policy,
    evaluate,
)
from algos.cli import main
from algos.evaluation import summarise
from algos.statistics.pass_rates import read_sampling
from tests.helpers.models import make_gpt2
from tests.helpers.resumable_agents import ppo_text
from tests.helpers.small_agents import lm_policy
from tests.helpers.text_envs import Script, make_env, text_env
from textenv import ProgramVectorEnv
from textenv.kl import KLPenalty

ROWS = [{"prompt": text, "level": level} for text, level in (("a b", 1), ("c", 1), ("d a b", 2), ("b", 2), ("a", 3))]


def has_good(completions, **columns):
    return [float("good" in text.split()) for text in completions]


def level_env(num_envs=3, reward=has_good, **options):
    return make_env(reward, num_envs, prompts=ROWS, **options)


def mean_over_pairs(texts, value):
    """Mean of a value of two samples over all pairs of each prompt's samples."""
    of_prompts = []
    for samples in texts.values():
        of_prompts.append(np.mean([value(x, y) for x, y in itertools.combinations(samples, 2)]))
    return np.mean(of_prompts)


def test_each_prompt_is_sampled_as_often_and_counted_once():
    env, policy = level_env(), lm_policy()
    result = evaluate(env, policy, k=(1, 2), num_samples=6, by="level", seed=3)
    texts = {}
    for sample in env.samples(range(30)):
        texts.setdefault(sample["prompt"], []).append((sample["completion"].strip(), sample["score"]))
    assert len(texts) == 5 and {len(samples) for samples in texts.values()} == {6}
    rates = result.pass_rates
    assert rates.pass_at[2].mean == pytest.approx(mean_over_pairs(texts, lambda x, y: max(x[1], y[1])))
    assert rates.pass_at[1].mean == pytest.approx(mean_over_pairs(texts, lambda x, y: (x[1] + y[1]) / 2))
    assert rates.pass_at[1].mean == pytest.approx(result.mean_return) and len(result.returns) == 30
    # Of two answers either both are the same, or they tie
    assert rates.majority_at[2].mean == pytest.approx(rates.pass_at[1].mean)
    of_level = [np.mean([score for _, score in texts[row["prompt"]]]) for row in ROWS if row["level"] == 2]
    assert rates.by[2].pass_at[1].mean == pytest.approx(np.mean(of_level)) and [*rates.by] == [1, 2, 3]
    greedy = evaluate(level_env(), policy, num_episodes=5, deterministic=True, seed=3)
    assert rates.greedy.mean == pytest.approx(greedy.mean_return)
    assert f"pass@2={rates.pass_at[2].mean:.4g}" in repr(result) and "pass@2" in result._repr_html_()


@pytest.mark.heavy
def test_the_number_of_slots_changes_no_number():
    options = dict(k=(1, 4), by="level", seed=1)
    results = [evaluate(level_env(num_envs), lm_policy(), **options) for num_envs in (1, 4, 64)]
    assert len({str(result.pass_rates) for result in results}) == 1
    assert results[0].returns == results[1].returns == results[2].returns


@pytest.mark.heavy
def test_the_vote_is_on_the_answer():
    """By default that of the task's `extract`, else the completion."""
    env, policy = level_env(), lm_policy()
    options = dict(k=5, seed=2)
    one_answer = evaluate(env, policy, answer=lambda completion: "the same", **options).pass_rates
    assert one_answer.majority_at[5].mean == pytest.approx(np.mean(evaluate(env, policy, **options).returns))
    by_reward = evaluate(env, policy, answer=lambda completion: "good" in completion.split(), **options).pass_rates
    passed = np.reshape(evaluate(env, policy, **options).returns, (5, 5)).sum(axis=1)
    assert by_reward.majority_at[5].mean == pytest.approx(np.mean(passed >= 3))
    env.task.extract = lambda completion: "good" in completion.split()
    assert evaluate(env, policy, **options).pass_rates.majority_at == by_reward.majority_at
    with pytest.raises(TypeError, match="the answer to vote on is"):
        evaluate(env, policy, answer=list, **options)


def test_training_and_prompts_go_on_unchanged():
    env, policy = level_env(), lm_policy()
    env.reset(seed=5)
    order, state = env.prompt_order, policy.generator.get_state()
    evaluate(env, policy, k=2)
    assert env.prompt_order == order and (policy.generator.get_state() == state).all()


def test_programs_have_pass_rates_and_several_turns_no_vote():
    def play(ask, task):
        ask(task)
        return float("good" in ask(f"{task} again"))

    policy = lm_policy()
    env = ProgramVectorEnv(
        play, tasks=["a", "b"], tokenizer=policy.tokenizer, num_envs=2, max_new_tokens=3, max_length=40
    )
    rates = evaluate(env, policy, k=(1, 3)).pass_rates
    assert sorted(rates.pass_at) == [1, 3] and rates.majority_at == {} and rates.num_prompts == 2
    last_turn = evaluate(env, policy, k=3, answer=str.strip).pass_rates
    assert sorted(last_turn.majority_at) == [3]
    with pytest.raises(ValueError, match="the environment has 2 prompts"):
        evaluate(env, policy, k=3, num_prompts=3)


def test_tasks_without_end_need_a_number_of_prompts():
    policy = lm_policy()
    env = text_env(Script([(0, 1)]))
    with pytest.raises(ValueError, match="Script makes its prompts itself, without end: give a number"):
        evaluate(env, policy, k=2)
    assert evaluate(env, policy, k=2, num_prompts=3, success=2).pass_rates.num_prompts == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(k=0), "k is 0"),
        (dict(k=2, num_episodes=20), "say how many prompts by num_prompts"),
        (dict(k=2, deterministic=True), "deterministic is True and k is given"),
        (dict(k=2, num_prompts=6), "num_prompts is 6, but the environment has 5 prompts"),
        (dict(k=2, by="leve"), "by is 'leve', expected a column of the prompts, which have 'level'"),
        (dict(by="level"), "by is 'level', but k is None"),
        (dict(num_episodes=0), "num_episodes is 0"),
        (dict(k=2, seed=-1), "seed is -1, expected an integer of at least 0"),
    ],
)
def test_what_does_not_fit_is_refused_before_playing(options, message):
    with pytest.raises(ValueError) as error:
        evaluate(level_env(), lm_policy(), **options)
    assert message in str(error.value)


def test_control_has_no_pass_rates():
    env = gymnasium.make_vec("CartPole-v1", num_envs=2)
    policy = MLPPolicy(env.single_observation_space, env.single_action_space)
    with pytest.raises(ValueError, match="is a control environment, which has no prompts"):
        evaluate(env, policy, k=2)


@pytest.mark.heavy
def test_an_episode_without_a_score_has_not_passed(caplog):
    def sometimes(completions, **columns):
        return [None if "good" in text.split() else 1.0 for text in completions]

    options = dict(k=1, num_samples=16)
    result = evaluate(level_env(reward=sometimes), lm_policy(), **options)
    assert "episodes have no score: they count as not passed" in caplog.text
    has_score = 1 - np.mean(evaluate(level_env(), lm_policy(), **options).returns)
    assert 0 < has_score < 1 and set(result.returns) == {1.0} and len(result.returns) == round(80 * has_score)
    assert result.pass_rates.pass_at[1].mean == pytest.approx(has_score)


def test_a_prompt_without_the_column_ends_it_before_the_samples():
    asked = []

    def counted(completions):
        asked.extend(completions)
        return [0.0] * len(completions)

    env = make_env(counted, 2, prompts=[{"prompt": "a", "level": 1}, {"prompt": "b"}])
    with pytest.raises(ValueError, match="by is 'level', expected a column of the prompts, which have none"):
        evaluate(env, lm_policy(), k=8, by="level")
    assert len(asked) < 8


@pytest.mark.heavy
def test_an_evaluation_without_scores_is_not_the_best_one(tmp_path):
    """Its mean is NaN, which no later mean exceeds."""
    scores = itertools.chain([None, 1.0], itertools.repeat(0.5))

    def score(completions):
        return [next(scores)] * len(completions)

    callback = EvaluateEvery(make_env(score, 2), 20, num_episodes=2)
    rows = ppo_text().learn(120, callbacks=[callback], run_dir=tmp_path)
    assert [row["eval/mean_return"] for row in rows if "eval/mean_return" in row][1:3] == [1.0, 0.5]
    assert callback.best == 1.0 and (tmp_path / "best" / "config.json").is_file()


def test_a_callback_begins_anew_in_another_training(tmp_path):
    """The second training waits as long as the first, and keeps its own best agent."""
    callback = EvaluateEvery(make_env(lambda completions: [1.0] * len(completions), 2), 20, num_episodes=2, patience=3)
    lengths = []
    for name in ("first", "second"):
        lengths.append(len(ppo_text().learn(400, callbacks=[callback], run_dir=tmp_path / name)))
        assert (tmp_path / name / "best" / "config.json").is_file()
    assert lengths[0] == lengths[1] > 3


class ActionPays(gymnasium.Env):
    """One step, whose reward is the action, 0 or 1."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), float(action), True, False, {}


def test_evaluations_during_training_can_take_the_most_probable_action():
    """Action 1 is a little more probable than 0; the mean over samples is between both."""
    policy = MLPPolicy(ActionPays.observation_space, ActionPays.action_space)
    policy.actor[-1].weight.data.zero_()
    policy.actor[-1].bias.data[1] = 0.1
    agent = PPO(SyncVectorEnv([ActionPays] * 2), policy, num_steps=8, minibatch_size=16, learning_rate=1e-12)
    sampled, deterministic = EvaluateEvery(ActionPays(), 16), EvaluateEvery(ActionPays(), 16, deterministic=True)
    assert 0 < agent.learn(16, callbacks=[sampled])[-1]["eval/mean_return"] < 1
    assert agent.learn(16, callbacks=[deterministic])[-1]["eval/mean_return"] == deterministic.best == 1
    with pytest.raises(ValueError, match="deterministic is True and k is given: leave one out"):
        EvaluateEvery(level_env(), 20, k=4, deterministic=True)


def evaluated(scores, total_steps, run_dir, **options):
    """Train an agent whose evaluations, every 32 steps, return these scores in turn; return the callback."""
    callback = EvaluateEvery(Pays(scores), 32, num_episodes=1)
    agent = PPO(SyncVectorEnv([ActionPays] * 2), num_steps=16, seed=1)
    agent.learn(total_steps, callbacks=[callback], run_dir=run_dir, checkpoint_every=32, **options)
    return callback


class Pays(ActionPays):
    """One step, which pays the next one of these scores, whatever the action."""

    def __init__(self, scores):
        self.scores = iter(scores)

    def step(self, action):
        return np.zeros(1, np.float32), next(self.scores), True, False, {}


def steps_of_best(run_dir):
    return json.loads((run_dir / "best" / "config.json").read_text())["steps"]


def test_the_best_agent_goes_with_a_run_that_is_continued_elsewhere(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    evaluated([1.0, 5.0, 2.0], 96, first)
    assert steps_of_best(first) == 64
    callback = evaluated([3.0, 4.0], 160, second, resume=first)
    assert callback.best == 5.0 and steps_of_best(second) == 64
    evaluated([6.0], 192, second, resume=second)
    assert steps_of_best(second) == 192 and steps_of_best(first) == 64


def test_the_best_agent_of_a_training_that_is_replaced_is_told(tmp_path, caplog):
    """The run goes back to 64 steps, where the best score is 2; the folder has the agent of score 9."""
    evaluated([1.0, 2.0, 9.0], 96, tmp_path)
    assert steps_of_best(tmp_path) == 96
    back = tmp_path / "checkpoints" / "step-000000000064"
    evaluated([1.5, 2.5], 128, tmp_path, resume=back, overwrite=True)
    assert "the best agent so far (2, after 64 steps) is not in" in caplog.text
    assert steps_of_best(tmp_path) == 128


@pytest.mark.heavy
def test_evaluations_during_training_log_pass_rates():
    callback = EvaluateEvery(level_env(), 20, k=(1, 4), by="level", num_prompts=4)
    rows = ppo_text().learn(60, callbacks=[callback])
    logged = [row for row in rows if "eval/pass@4" in row]
    assert logged and {"eval/greedy", "eval/pass@1", "eval/maj@4", "eval/level=1/pass@4"} <= logged[0].keys()
    assert all(row["eval/pass@1"] <= row["eval/pass@4"] for row in logged)
    with pytest.raises(ValueError, match="say how many prompts by num_prompts"):
        EvaluateEvery(level_env(), 20, k=4, num_episodes=20)
    with pytest.raises(ValueError, match="expected a column of the prompts"):
        ppo_text().learn(60, callbacks=[EvaluateEvery(level_env(), 20, k=4, by="difficulty")])


@pytest.mark.heavy
def test_the_kl_of_many_samples_is_that_of_all():
    """It is measured some rows at a time, so that many samples need no more memory."""
    policy = lm_policy()
    penalty = KLPenalty(lm_policy(lambda: make_gpt2(seed=4)), coef=0.1)
    sampling = read_sampling(130, num_prompts=5)
    numbers = summarise(level_env(64), policy, penalty=penalty, sampling=sampling)
    assert numbers["episodes"] == 650
    rollout = evaluate(level_env(64), policy, k=130).rollout
    penalty(rollout, policy)
    assert numbers["kl"] == pytest.approx(rollout["kl"].sum().item() / 650, rel=1e-5)
    assert numbers["kl"] > 0.1


class PaysNan(gymnasium.Env):
    observation_space, action_space = gymnasium.spaces.Box(-1, 1, (1,)), gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), float("nan"), True, False, {}


def test_returns_of_nan_are_warned_of(caplog):
    env = gymnasium.vector.SyncVectorEnv([PaysNan] * 2)
    evaluate(env, MLPPolicy(env.single_observation_space, env.single_action_space), num_episodes=4)
    assert "4 of 4 episodes have a return of NaN or infinity" in caplog.text


@pytest.mark.heavy
def test_json_has_null_where_a_number_is_nan(tmp_path, capsys, monkeypatch):
    gymnasium.register("PaysNan-v0", PaysNan, disable_env_checker=True)
    env = gymnasium.vector.SyncVectorEnv([PaysNan] * 2)
    PPO(env, num_steps=4).save(tmp_path)
    main(["evaluate", str(tmp_path), "--env", "PaysNan-v0", "--json"])
    del gymnasium.registry["PaysNan-v0"]
    result = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert result["mean_return"] is None and result["episodes"] == 20


# --- while an algorithm explores --------------------------------------------------------------------------------------


class Played(Callback):
    """What the policy does and earns between a rollout and the update, while it explores."""

    def __init__(self, env_id):
        self.env_id = env_id
        self.returns, self.actions = [], []

    def on_rollout(self, run, rollout):
        policy = run.agent.policy
        self.returns.append(evaluate(self.env_id, policy, num_episodes=3, seed=1).mean_return)
        observation = run.agent.env.single_observation_space.sample() * 0
        self.actions.append(policy.predict(observation)[0])


def test_a_perfect_q_network_earns_all_while_its_actions_are_random():
    """It pushes towards the side to which the pole falls."""
    env = gymnasium.make_vec("CartPole-v1", num_envs=4)
    policy = QPolicy(env.single_observation_space, env.single_action_space, hidden=(2,))
    with torch.no_grad():
        for parameter in policy.network.parameters():
            parameter.zero_()
        first, last = (layer for layer in policy.network if isinstance(layer, torch.nn.Linear))
        first.weight.copy_(torch.tensor([[0, 0, 1, 0.5], [0, 0, -1, -0.5]]))
        last.weight.copy_(torch.tensor([[0.0, 1], [1, 0]]))
    played = Played("CartPole-v1")
    DQN(env, policy, learning_starts=10_000).learn(128, callbacks=[played])
    assert played.returns == [500] * len(played.returns) and len(played.returns) > 1


@pytest.mark.parametrize(("algorithm", "policy_type"), [(SAC, SACPolicy), (SAC, SACGSDEPolicy), (TD3, TD3Policy)])
def test_before_learning_starts_an_evaluation_is_that_of_the_saved_policy(algorithm, policy_type, tmp_path):
    env = gymnasium.make_vec("Pendulum-v1", num_envs=1)
    policy = policy_type(env.single_observation_space, env.single_action_space, hidden=(8,))
    agent = algorithm(env, policy, learning_starts=10_000, num_steps=16)
    agent.save(tmp_path)
    played = Played("Pendulum-v1")
    agent.learn(48, callbacks=[played])
    expected = evaluate("Pendulum-v1", algos.load(tmp_path), num_episodes=3, seed=1).mean_return
    assert played.returns == [expected] * 3
    if policy_type is TD3Policy:
        assert np.unique(played.actions).size == 1
    rollout = agent.collect()
    torch.testing.assert_close(policy.evaluate(rollout).log_prob, rollout["log_prob"])
