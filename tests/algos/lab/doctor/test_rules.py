"""Each rule finds its fault in a real run that has it, and no rule finds anything in healthy runs."""

import inspect
import itertools
import re
import string
import sys
from pathlib import Path

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest

import tests.helpers.planted_runs as planted_runs
from algos import DQN, GRPO, PPO, SAC, TRPO, EvaluateEvery, LMPolicy, MLPPolicy
from algos.cli import main
from algos.config import CONFIGS
from algos.envs.subprocess_env import SubprocessVectorEnv
from algos.lab.doctor import signs
from algos.lab.doctor.diagnosis import examine
from algos.lab.doctor.evidence import Evidence, read_evidence
from algos.lab.doctor.rules import RULES
from algos.losses import clipped_policy_loss
from algos.storage.run_reader import read_metrics
from algos.training.callbacks import RecordSamples
from tests.helpers.engines import FakeEngine
from tests.helpers.judge_server import JudgeServer, answer_in
from tests.helpers.models import WORDS, make_gpt2, make_tokenizer
from tests.helpers.planted_runs import Bandit, bandit, first_action, train_control, train_text
from tests.helpers.programs import program_env, word_policy
from tests.helpers.text_envs import BAD, EOS, GOOD, make_env
from tests.helpers.tool_calls import PLAIN, QUESTION, byte_tokenizer, multiply
from textenv import LanguageWrapper, Rewards, TextVectorEnv, TokenVectorEnv
from textenv.rewards import judge

# Processes get the environments themselves, and import neither this file nor PyTorch.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(planted_runs)


def same_for_all(completions, **columns):
    return [1.0] * len(completions)


def only_silence(completions, **columns):
    return [float(not text.split()) for text in completions]


def none_for_an_a(completions, **columns):
    return [None if "a" in text else float(text.count("good")) for text in completions]


def fails_for_a_c(completions, **columns):
    return [float(text.count("good")) if "c" not in text else 1 / 0 for text in completions]


def variety(completions, **columns):
    return [float(len(set(text.split()))) for text in completions]


def wrong_sign(**terms):
    return -clipped_policy_loss(**terms)


def sometimes_divides_by_0():
    """A policy loss that is NaN in each eighth call."""
    calls = itertools.count(1)

    def loss(**terms):
        return clipped_policy_loss(**terms) * (float("nan") if next(calls) % 8 == 0 else 1.0)

    return loss


class FullDisk:
    """A logger that fails."""

    def start(self, run_dir, config, *, step):
        pass

    def log(self, values, *, step):
        raise OSError("the disk is full")

    def close(self):
        pass


class Crashing(Bandit):
    def __init__(self):
        super().__init__(first_action)

    def step(self, action):
        if self.steps == 10:  # only once in the life of a process
            self.steps += 1
            raise RuntimeError("the simulator crashed")
        return super().step(action)


def crashing_environments(folder):
    env = SubprocessVectorEnv([Crashing for _ in range(2)], timeout=30)
    train_control(folder, env, iterations=1)


def failing_programs(folder):
    def play(ask, rng):
        answer = ask("a b")
        if "c" in answer:
            raise ValueError("I do not like c")
        return float(answer.split().count("good"))

    train_text(folder, program_env(play, num_envs=16), learning_rate=3e-4, policy=word_policy())


class Writes:
    """An engine that always writes the same text."""

    def __init__(self, tokenizer, text):
        self.ids = [*tokenizer(text).input_ids, tokenizer.eos_token_id]

    def update_weights(self, policy):
        pass

    def generate(self, turns, *, seeds, sampling):
        return [(self.ids, [-1.0] * len(self.ids)) for _ in turns]


def wrong_tool_calls(folder):
    tokenizer = byte_tokenizer(PLAIN)
    env = TextVectorEnv(
        prompts=[QUESTION], reward=same_for_all, tools=[multiply], tokenizer=tokenizer, num_envs=2, max_turns=2,
        max_prompt_tokens=500, max_new_tokens=60, tool_timeout=None,
    )  # fmt: skip
    policy = LMPolicy(make_gpt2(len(tokenizer), n_positions=2000), tokenizer)
    engine = Writes(tokenizer, "<tool_call>\nmultiply 2 3\n</tool_call>")
    train_text(
        folder, env, policy=policy, generator=engine, ratio_tolerance=1e9, iterations=10, num_episodes=2,
        minibatch_size=2, num_epochs=1,
    )  # fmt: skip


def words_that_are_no_actions(folder):
    def make():
        lake = gym.make("FrozenLake-v1", is_slippery=False)
        return LanguageWrapper(lake, lambda cell: "a b", actions="free", instructions="")

    env = TokenVectorEnv(make, tokenizer=make_tokenizer(WORDS), num_envs=16, max_turns=2, max_new_tokens=3,
                         max_length=48)  # fmt: skip
    train_text(folder, env, learning_rate=1e-4)


def train_with_samples(folder, env=None, **options):
    train_text(folder, env, callbacks=[RecordSamples(every=1)], **options)


class Collapsing(FakeEngine):
    """An engine that writes one text, whatever the prompt, once its weights were updated three times."""

    def generate(self, turns, *, seeds, sampling):
        if self.updates < 3:
            return super().generate(turns, seeds=seeds, sampling=sampling)
        return [([GOOD, BAD, EOS], [-1.0] * 3) for _ in turns]


def one_text_for_all(folder):
    env = make_env(same_for_all, num_envs=16, prompts=["a b", "c", "d a b", "d", "b"])
    train_with_samples(folder, env, generator=Collapsing(), ratio_tolerance=1e9, learning_rate=1e-6)


def in_circles(folder):
    """Only one word may be written, and nothing ends an answer."""
    forbidden = [index for index in range(len(WORDS)) if index != GOOD]
    env = make_env(same_for_all, num_envs=8, forbidden=forbidden, max_new_tokens=24)
    train_with_samples(folder, env, num_episodes=8)


def unknown_end_of_turn(folder):
    """The model ends its turns as another template does, and writes the user's next one."""
    tokenizer = byte_tokenizer(PLAIN)
    env = TextVectorEnv(
        prompts=[QUESTION], reward=same_for_all, tokenizer=tokenizer, num_envs=16, max_prompt_tokens=500,
        max_new_tokens=60,
    )  # fmt: skip
    policy = LMPolicy(make_gpt2(len(tokenizer), n_positions=2000), tokenizer)
    engine = Writes(tokenizer, "Six.<end_of_turn>\n<start_of_turn>user\nAnd 7?")
    train_with_samples(
        folder, env, policy=policy, generator=engine, ratio_tolerance=1e9, num_episodes=8, minibatch_size=4,
        num_epochs=1, iterations=10,
    )  # fmt: skip


def number_of_words(completions, **columns):
    return [float(len(text.split())) for text in completions]


def another_judge(folder):
    watch = EvaluateEvery(make_env(variety, num_envs=64), 100, num_episodes=64)
    train_text(folder, iterations=24, learning_rate=3e-4, callbacks=[watch])


def images_of_symbols(folder):
    wrappers = pytest.importorskip("minigrid.wrappers")
    env = gym.make_vec("MiniGrid-Empty-5x5-v0", num_envs=2, wrappers=[wrappers.ImgObsWrapper])
    PPO(env, num_steps=16).learn(64, run_dir=folder)


BRIGHTER = """
from minigrid.wrappers import ImgObsWrapper

class Brighter(ImgObsWrapper):
    def observation(self, observation):
        return super().observation(observation) * 25
"""

PLANTED = {
    "learning_not_begun": lambda folder: train_control(
        folder, gym.make_vec("Pendulum-v1", num_envs=4), algorithm=SAC, learning_starts=10_000, iterations=20
    ),
    "no_signal_in_groups": lambda folder: train_text(folder, reward=same_for_all, algorithm=GRPO, group_size=4),
    "policy_stands_still": lambda folder: train_control(folder, learning_rate=1e-12),
    "no_step_found": lambda folder: train_control(
        folder, algorithm=TRPO, line_search_steps=1, damping=1e-8, iterations=12
    ),
    "penalty_outweighs": lambda folder: train_text(folder, kl_coef=1000.0, learning_rate=3e-4, iterations=20),
    "no_episode_ended": lambda folder: train_control(
        folder, bandit(length=10**9), iterations=16, num_steps=160, minibatch_size=640, num_epochs=1
    ),
    "not_finite": lambda folder: train_control(
        folder, iterations=2, diagnose=lambda agent, rollout: {"mine/ratio": float("nan")}
    ),
    "steps_skipped": lambda folder: train_control(
        folder, iterations=4, policy_loss=sometimes_divides_by_0(), skip_nonfinite=True
    ),
    "kl_explodes": lambda folder: train_control(folder, learning_rate=1.0),
    "always_clipped": lambda folder: train_control(folder, clip_range=1e-4),
    "samples_dropped": lambda folder: train_text(
        folder, generator=FakeEngine(shift={BAD: 3.0}), ratio_tolerance=1e9, learning_rate=1e-5,
        importance_weights="two_sided_token_mask", max_importance_weight=1.1,
    ),
    "value_explains_nothing": lambda folder: train_control(folder, vf_coef=0.0, iterations=24),
    "values_diverge": lambda folder: train_text(folder, learning_rate=10.0),
    "return_lost": lambda folder: train_control(
        folder, bandit(lambda steps, action, rng: (action == 0) if steps < 700 else 0.2 * action), iterations=50
    ),
    "return_falls": lambda folder: train_control(folder, policy_loss=wrong_sign, iterations=20),
    "texts_alike": lambda folder: train_text(folder, iterations=20, learning_rate=1e-3),
    "evaluation_falls": another_judge,
    "one_answer": one_text_for_all,
    "answers_repeat": in_circles,
    "answers_empty": lambda folder: train_with_samples(folder, reward=only_silence),
    "speaks_for_others": unknown_end_of_turn,
    "length_pays": lambda folder: train_with_samples(
        folder, make_env(number_of_words, num_envs=16, max_new_tokens=12), learning_rate=3e-4, iterations=20
    ),
    "environment_fails": crashing_environments,
    "reward_fails": lambda folder: train_text(
        folder, reward=Rewards(fails_for_a_c, on_error="skip", max_failed=0.9), learning_rate=3e-4
    ),
    "rows_without_reward": lambda folder: train_text(folder, reward=none_for_an_a, learning_rate=3e-4),
    "programs_fail": failing_programs,
    "tool_calls_fail": wrong_tool_calls,
    "actions_unreadable": words_that_are_no_actions,
    "symbols_as_pixels": images_of_symbols,
    "normaliser_drifts": lambda folder: train_control(
        folder, bandit(observe=lambda steps: 1.02**steps), normalize_observations=True
    ),
    "logger_fails": lambda folder: train_control(folder, loggers=[FullDisk()], iterations=2),
    "no_progress": lambda folder: train_control(
        folder, bandit(lambda steps, action, rng: rng.normal()), iterations=40, num_epochs=1
    ),
}  # fmt: skip
"""For each rule a training with its fault."""
FOUND_TOO = {
    "answers_repeat": ["answers_at_the_limit", "constant_return"],
    "kl_explodes": ["entropy_collapsed"],
    "samples_dropped": ["sampler_apart"],
}
"""For some of these trainings, rules that find another fault of it."""


def names_in(folder):
    return [finding.rule for finding in examine(folder).findings]


def message_in(folder, rule):
    (message,) = [finding.message for finding in examine(folder).findings if finding.rule == rule]
    return message


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rule", PLANTED)
def test_the_fault_in_a_real_run_is_found(rule, tmp_path):
    PLANTED[rule](tmp_path)
    assert {rule, *FOUND_TOO.get(rule, [])} <= {*names_in(tmp_path)}


def test_every_rule_has_a_run_with_its_fault():
    assert sorted(itertools.chain(PLANTED, *FOUND_TOO.values())) == sorted(rule.name for rule in RULES)


@pytest.mark.long
def test_the_weights_show_a_dqn_that_stands_still(tmp_path):
    train_control(tmp_path, algorithm=DQN, learning_rate=1e-12, learning_starts=64, iterations=30)
    assert names_in(tmp_path) == ["policy_stands_still"]


@pytest.mark.long
def test_a_critic_that_knows_the_mean_is_not_blamed(tmp_path):
    """Returns that no observation foretells: the critic knows their mean, and that is all there is to know."""
    train_control(tmp_path, bandit(), iterations=40)
    assert names_in(tmp_path) == []


@pytest.mark.long
def test_rows_that_an_opponent_played_lack_no_reward(tmp_path):
    def play(first, second, rng):
        answers = [ask("a b").split() for ask in (first, second)]
        lengths = [len(answer) for answer in answers]
        return [float(np.sign(lengths[0] - lengths[1])), float(np.sign(lengths[1] - lengths[0]))]

    env = program_env(play, num_envs=16, agents=2, opponents=[lambda text: "good"])
    train_text(tmp_path, env, learning_rate=3e-4, policy=word_policy(), iterations=10)
    empty_rows = read_metrics(tmp_path)[-1]["rollout/empty_rows"]
    assert empty_rows == 8 and "rows_without_reward" not in names_in(tmp_path)


class TenTurns(gym.Env):
    """Ten turns; in about a third of the games, by the seed, nothing pays, in the others each "good" does."""

    observation_space = action_space = gym.spaces.Text(400)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.turns = 0
        self.pays = self.np_random.random() > 1 / 3
        return "a b", {}

    def step(self, action):
        self.turns += 1
        return "c d", float(self.pays) * action.count("good"), self.turns == 10, False, {}


@pytest.mark.long
def test_groups_are_counted_by_rows_where_an_episode_has_several(tmp_path):
    """With ``history=1`` each turn is a row; some groups of four games have a signal in all iterations."""
    env = TokenVectorEnv(TenTurns, tokenizer=make_tokenizer(WORDS), num_envs=16, max_new_tokens=4, max_length=40,
                         history=1, max_turns=20)  # fmt: skip
    train_text(tmp_path, env, algorithm=GRPO, group_size=4, minibatch_size=64, num_epochs=1, learning_rate=1e-6)
    rows = read_metrics(tmp_path)
    assert {row["rollout/rows"] for row in rows} == {160} and max(row["rollout/silent_rows"] for row in rows) > 16
    evidence = read_evidence(tmp_path)
    assert signs.no_signal_in_groups(evidence, 0.9) is None
    figures = signs.no_signal_in_groups(evidence, 0)
    fraction = np.mean([row["rollout/silent_rows"] / 160 for row in rows])
    assert figures["fraction"] == pytest.approx(fraction)


def test_rows_of_an_earlier_version_are_at_most_its_turns():
    metrics = [{"rollout/silent_rows": 80, "rollout/turns": 160}] * 10
    assert signs.no_signal_in_groups(Evidence(metrics, {"config": {"num_episodes": 16}}), 0) == {"fraction": 0.5}


class NeverEnding(gym.Env):
    observation_space = action_space = gym.spaces.Text(400)

    def __init__(self, truncates=False):
        self.truncates = truncates

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "a b", {}

    def step(self, action):
        return "c d", 0.0, False, self.truncates, {}


class Babbles(Writes):
    """An engine that writes until the limit of tokens."""

    def __init__(self, tokenizer, limit):
        self.ids = tokenizer(" ".join(["good"] * limit)).input_ids


@pytest.mark.long
@pytest.mark.parametrize("make", [NeverEnding, lambda: NeverEnding(truncates=True)], ids=["max_turns", "the game"])
def test_an_end_of_the_game_by_a_limit_cuts_no_answers_off(make, tmp_path):
    tokenizer = make_tokenizer(WORDS)
    options = dict(learning_rate=1e-6, ratio_tolerance=1e9, iterations=10)
    for name, engine in {"ends": Writes(tokenizer, "a b"), "babbles": Babbles(tokenizer, 6)}.items():
        env = TokenVectorEnv(make, tokenizer=tokenizer, num_envs=16, max_new_tokens=6, max_length=48, max_turns=2)
        train_text(tmp_path / name, env, generator=engine, **options)
        assert {row["episode/truncated"] for row in read_metrics(tmp_path / name)} == {1}
    assert "answers_at_the_limit" not in names_in(tmp_path / "ends")
    (finding,) = [
        finding for finding in examine(tmp_path / "babbles").findings if finding.rule == "answers_at_the_limit"
    ]
    assert "100% of the answers are cut off by the limit of tokens (100% at first; 6 tokens)" in finding.message


@pytest.mark.parametrize(("turns", "is_found"), [(16, True), (32, False)])
def test_truncated_episodes_of_one_turn_are_cut_off_in_runs_of_earlier_versions(turns, is_found):
    metrics = [{"episode/truncated": 1.0, "rollout/turns": turns, "rollout/steps": 8 * turns}] * 10
    figures = signs.answers_at_the_limit(Evidence(metrics, {"config": {"num_episodes": 16}}), 0.9)
    assert (figures is not None) == is_found
    if is_found:
        assert figures["length"] == 8


@pytest.mark.long
def test_failed_answers_are_some_of_all_answers(tmp_path):
    """16 in each of 11 iterations."""
    PLANTED["reward_fails"](tmp_path)
    failed = sum(row["reward/failed"] for row in read_metrics(tmp_path))
    assert f"failed for {failed:.0f} of 176 answers" in message_in(tmp_path, "reward_fails")


@pytest.mark.long
def test_programs_of_two_agents_are_half_as_many_as_episodes(tmp_path):
    def play(first, second, rng):
        answers = [ask("a b").split() for ask in (first, second, first)]
        if "c" in answers[0]:
            raise ValueError("I do not like c")
        return [float(answers[0].count("good")), float(answers[1].count("good"))]

    env = program_env(play, num_envs=16, agents=2)
    train_text(tmp_path, env, learning_rate=3e-4, policy=word_policy(), iterations=10)
    failed = np.mean([row["programs/failed"] for row in read_metrics(tmp_path)])
    assert signs.programs_fail(read_evidence(tmp_path), 0.05)["fraction"] == pytest.approx(failed / 8)


def test_programs_of_refills_count_too():
    metrics = [{"programs/failed": 8, "refills/episodes": 32, "programs/rows": 1.0, "rollout/rows": 16}] * 10
    metrics = [row | {"rollout/empty_rows": 0} for row in metrics]
    assert signs.programs_fail(Evidence(metrics, {"config": {"num_episodes": 16}}), 0.05) == {"fraction": 0.25}


def test_rows_without_a_reward_are_some_of_all_rows():
    """A tenth of the 160 rows of 16 episodes."""
    row = {"rollout/rows": 144, "rollout/empty_rows": 16, "reward/left_out": 80, "rollout/turns": 144}
    evidence = Evidence([row] * 10, {"config": {"num_episodes": 16}})
    assert signs.rows_without_reward(evidence, 0.1) == {"fraction": 0.1}


def test_advice_names_arguments_that_exist():
    """Those of agents, environments, policies and Gymnasium."""
    signatures = [LanguageWrapper, TextVectorEnv, LMPolicy.load, PPO.learn, gym.make, MLPPolicy]
    names = {name for config in CONFIGS.values() for name in config.__dataclass_fields__}
    for function in signatures:
        names |= inspect.signature(function).parameters.keys()
    for rule in RULES:
        assert {*re.findall(r"\b([a-z_]+)=", f"{rule.advice} {rule.message}")} <= names, rule.name


@pytest.mark.long
def test_symbols_in_a_space_with_their_own_bounds_are_not_blamed(tmp_path):
    """Networks divide by the largest number of the space, so that the input is bright."""
    images_of_symbols(tmp_path)
    config = tmp_path / "config.json"
    assert '"high": 255' in config.read_text()
    config.write_text(config.read_text().replace('"high": 255', '"high": 10'))
    assert "symbols_as_pixels" not in names_in(tmp_path)


@pytest.mark.long
def test_images_that_a_wrapper_of_ones_own_brightens_are_not_blamed(tmp_path, monkeypatch):
    pytest.importorskip("minigrid")
    (tmp_path / "brighter.py").write_text(BRIGHTER)
    monkeypatch.chdir(tmp_path)
    options = ["--total-steps", "64", "--num-envs", "2", "--config.num-steps", "16", "--num-episodes", "1", "--json"]
    for wrapper, names in ("brighter.py:Brighter", []), ("minigrid.wrappers:ImgObsWrapper", ["symbols_as_pixels"]):
        run = tmp_path / wrapper.rpartition(":")[2]
        main(["train", "minigrid:MiniGrid-Empty-5x5-v0", "--wrapper", wrapper, "--policy", "cnn", *options,
              "--run-dir", str(run)])  # fmt: skip
        assert names_in(run) == names


@pytest.mark.long
def test_verdicts_that_cannot_be_read_are_not_blamed_on_actions(tmp_path):
    """They lack a reward; ``reward/log/unreadable`` counts answers that name no action of a game."""

    def seldom_a_number(request):
        words = answer_in(request).split()
        return "4" if words and words[0] in ("good", "bad") else "well"

    with JudgeServer(seldom_a_number) as server:
        reward = judge("short", base_url=server.url, model="critic")
        train_text(tmp_path, reward=reward, learning_rate=1e-5, iterations=10)
    names = names_in(tmp_path)
    assert "rows_without_reward" in names and "actions_unreadable" not in names


HEALTHY = {
    "CartPole by PPO": ["CartPole-v1"],
    "Reviews by PPO": ["textenv/Reviews-v0", "--total-steps", "12000", "--config.num-episodes", "64"],
}
SLOW = {
    "CartPole by A2C": ["CartPole-v1", "--algo", "a2c", "--total-steps", "100000"],
    "CartPole by TRPO": ["CartPole-v1", "--algo", "trpo", "--total-steps", "30000"],
    "Reviews by GRPO": ["textenv/Reviews-v0", "--algo", "grpo", "--config.group-size", "4", "--total-steps", "24000"],
    "Reviews by RLOO": ["textenv/Reviews-v0", "--algo", "rloo", "--total-steps", "24000"],
    "CartPole by DQN": ["CartPole-v1", "--algo", "dqn", "--total-steps", "50000"],
    "Pendulum by SAC": ["Pendulum-v1", "--algo", "sac", "--total-steps", "8000"],
}
"""DQN and SAC take minutes. After 20,000 steps DQN has lost what it had learnt in one of two seeds, which is told."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "words",
    [
        *(pytest.param(words, id=name, marks=pytest.mark.long) for name, words in HEALTHY.items()),
        *(pytest.param(words, id=name, marks=pytest.mark.slow) for name, words in SLOW.items()),
    ],
)
def test_a_healthy_run_has_no_finding(words, tmp_path, capsys):
    main(["train", *words, "--seed", "1", "--num-episodes", "1", "--run-dir", str(tmp_path / "run"), "--json"])
    assert names_in(tmp_path / "run") == []
    assert "algos doctor" not in capsys.readouterr().err


def test_the_page_of_diagnoses_has_every_rule():
    page = (Path(__file__).parents[4] / "docs" / "watching.md").read_text()
    section = page.partition("\n## What is wrong with a run\n")[2].partition("\n## ")[0]
    assert [rule.name for rule in RULES] == re.findall(r"^\| `([a-z_]+)` \|", section, re.MULTILINE)


def test_rules_hide_one_another_without_a_circle():
    """Each name that hides a rule exists, and following the names ends."""
    by_name = {rule.name: rule for rule in RULES}

    def hiding(name, path=()):
        assert name not in path, (*path, name)
        for other in by_name[name].unless:
            hiding(other, (*path, name))

    for name in by_name:
        hiding(name)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_the_message_of_a_rule_has_a_figure(rule):
    fields = [name for _, name, _, _ in string.Formatter().parse(rule.message) if name]
    assert fields and rule.source and rule.advice.endswith(".")
    assert not any(np.isnan(rule.threshold) for rule in RULES)
