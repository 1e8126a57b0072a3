"""Samplers: probabilities and states by hand, drawn frequencies, and environments that draw and learn by them."""

import copy
import json

import numpy as np
import pytest

from algos import Recipe, collect, evaluate
from algos.cli import main
from algos.extras.ray_workers import rollout_workers
from algos.storage.checkpoint import checkpoints, read_checkpoint
from tests.helpers.errors import refused
from tests.helpers.models import WORDS, make_tokenizer
from tests.helpers.resumable_agents import AGENTS
from tests.helpers.small_agents import lm_policy
from tests.helpers.text_envs import EOS, GOOD, Script, make_env, play, text_env
from textenv import ByPassRate, Curriculum, ProgramVectorEnv, TextEnv
from textenv.prompts.prompts import PromptList
from textenv.prompts.samplers import PromptDraws, as_sampler

FOUR = [[0], [1], [2], [3]]
LEVELS = [{"prompt": [index], "level": level} for index, level in enumerate([3, 1, 2, 1, 3, 2])]
"""Prompts 1 and 3 are the easiest, then 2 and 5, then 0 and 4."""


def started(sampler, prompts=FOUR):
    sampler.start(PromptList(prompts))
    return sampler


def learn(sampler, *episodes):
    """Pairs of a prompt and a return, in one call."""
    indices, returns = zip(*episodes, strict=True)
    sampler.learn(np.array(indices), np.array(returns, dtype=float))


# --- by pass rate ----------------------------------------------------------------------------------------------------


def test_pass_rates_count_half_an_episode_of_each_kind():
    sampler = started(ByPassRate(success=1.0, floor=0.2))
    learn(sampler, (0, 1.0), (0, 0.9), (1, 1.5), (2, 0.0), (2, -1.0))
    assert sampler.played.tolist() == [2, 1, 2, 0] and sampler.passed.tolist() == [1, 1, 0, 0]
    rates = [1.5 / 3, 1.5 / 2, 0.5 / 3, 0.5]
    assert sampler.pass_rates.tolist() == rates
    weights = np.array([p * (1 - p) for p in rates])
    expected = 0.2 / 4 + 0.8 * weights / weights.sum()
    np.testing.assert_allclose(sampler.probabilities(), expected, rtol=1e-12)
    assert sampler.metrics() == {
        "sampler/pass_rate": pytest.approx(float(expected @ rates)),
        "sampler/played": 3 / 4,
    }


def test_old_episodes_fade():
    """Of 6 episodes 4 are remembered: both counts are scaled by 4/6."""
    sampler = started(ByPassRate(memory=4))
    learn(sampler, *[(1, 1.0)] * 4)
    assert (sampler.played[1], sampler.passed[1]) == (4, 4)
    learn(sampler, (1, 0.0), (1, 0.0))
    assert sampler.played[1] == pytest.approx(4) and sampler.passed[1] == pytest.approx(4 * 4 / 6)
    learn(sampler, *[(1, 0.0)] * 40)
    assert sampler.passed[1] == pytest.approx(4 * 4 / 6 * 4 / 44)


def test_a_floor_of_one_is_uniform():
    sampler = started(ByPassRate(floor=1.0))
    learn(sampler, (0, 1.0), (1, 0.0))
    assert sampler.probabilities().tolist() == [0.25] * 4


# --- curriculum ------------------------------------------------------------------------------------------------------


def test_levels_open_in_order_and_stay_open():
    sampler = started(Curriculum(column="level", threshold=0.75, window=4, newest=0.5), LEVELS)
    assert sampler.num_levels == 3 and sampler.level_of_prompt.tolist() == [2, 0, 1, 0, 2, 1]
    assert sampler.probabilities().tolist() == [0, 1 / 2, 0, 1 / 2, 0, 0]
    learn(sampler, (1, 1.0), (3, 1.0), (1, 0.0), (2, 9.0))  # the last one is of another level
    assert sampler.level == 0 and sampler.recent == [1, 1, 0]
    learn(sampler, (1, 0.9), (3, 1.0))  # 1, 1, 0, .9 have the mean .725; 1, 0, .9, 1 the same
    assert sampler.level == 0 and sampler.recent == [1, 0, 0.9, 1]
    learn(sampler, (3, 0.5), (3, 1.0), (3, 1.0))  # 0, .9, 1, .5; .9, 1, .5, 1 have .85, and the next is of level 0
    assert sampler.level == 1 and sampler.recent == []
    # Half of the draws of two prompts, the other half of four
    np.testing.assert_allclose(sampler.probabilities(), [0, 1 / 8, 3 / 8, 1 / 8, 0, 3 / 8])
    learn(sampler, *[(2, 1.0)] * 4)
    np.testing.assert_allclose(sampler.probabilities(), [1 / 3, 1 / 12, 1 / 12, 1 / 12, 1 / 3, 1 / 12])
    learn(sampler, *[(4, 1.0)] * 9)
    assert sampler.level == 2 and sampler.recent == [1.0] * 4  # there is no further level
    assert sampler.metrics() == {"sampler/open_levels": 3, "sampler/newest_return": 1.0}


def test_numbers_may_have_an_order_too():
    prompts = [{"prompt": "a", "level": 3}, {"prompt": "b", "level": 1}, {"prompt": "c", "level": 2}]
    for order in ([1, 3, 2], ["1", "3", "2"]):
        assert started(Curriculum(column="level", order=order), prompts).level_of_prompt.tolist() == [1, 0, 2]


def test_texts_have_an_order():
    prompts = [{"prompt": [i], "kind": kind} for i, kind in enumerate(["hard", "easy", "medium", "easy"])]
    sampler = started(Curriculum(column="kind", order=["easy", "medium", "hard"]), prompts)
    assert sampler.level_of_prompt.tolist() == [2, 0, 1, 0]


def test_many_values_are_cut_into_levels_of_equal_size():
    prompts = [{"prompt": [i % 9], "digits": (7 * i) % 100} for i in range(100)]
    levels = started(Curriculum(column="digits", max_levels=4), prompts).level_of_prompt
    assert levels.tolist() == [prompt["digits"] // 25 for prompt in prompts]
    # One value that 90 of 100 prompts have stays one level
    prompts = [{"prompt": [0], "digits": max(i - 90, 0)} for i in range(100)]
    levels = started(Curriculum(column="digits", max_levels=4), prompts).level_of_prompt
    assert levels.tolist() == [0] * 91 + [1] * 9


@pytest.mark.parametrize(
    ("prompts", "options", "said"),
    [
        ([{"prompt": "a"}], {}, "prompt 0 has the columns .., expected one named 'level'"),
        ([{"prompt": "a", "level": None}], {}, "prompt 0 has None in the column 'level', expected a finite number"),
        ([{"prompt": "a", "level": float("nan")}], {}, "expected a finite number"),
        ([{"prompt": "a", "level": "easy"}], {}, "'easy' in the column 'level', expected a finite n.*order="),
        ([{"prompt": "a", "level": "so"}], {"order": ["easy", "hard"]}, "'so' .* one of order: 'easy', 'hard'"),
    ],
)  # fmt: skip
def test_prompts_without_a_level_are_refused(prompts, options, said):
    with pytest.raises(ValueError, match=said):
        make_env(prompts=prompts, sampler=Curriculum(column="level", **options))


# --- draws -----------------------------------------------------------------------------------------------------------


@pytest.mark.heavy
@pytest.mark.parametrize("sampler", ["pass_rate:floor=.1", "curriculum:column=level,window=2,newest=.3"])
def test_drawn_frequencies_are_the_probabilities(sampler):
    prompts = PromptList(LEVELS)
    draws = PromptDraws(as_sampler(sampler), prompts)
    learn(draws.sampler, (1, 1.0), (3, 1.0), (1, 1.0), (2, 0.0), (2, 0.0))
    probabilities = draws.sampler.probabilities()
    count = 20_000
    drawn = [prompt.row for prompt in draws.sample_prompts(range(count), seed=5)]
    deviation = np.sqrt(count * probabilities * (1 - probabilities))
    assert (abs(np.bincount(drawn, minlength=6) - count * probabilities) <= 4 * deviation).all()
    assert len(set(probabilities.round(6))) > 1  # and prompts of probability 0 never come


def test_a_draw_depends_on_seed_number_and_state_alone():
    one = PromptDraws(ByPassRate(), PromptList(FOUR))
    other = PromptDraws(ByPassRate(), PromptList(FOUR))
    numbers = list(range(60))
    in_order = one.sample_prompts(numbers, seed=1)
    backwards = []
    for number in numbers[::-1]:
        first, second = other.sample_prompts([number, number], seed=1)  # of one group
        assert first == second
        backwards.append(first)
    assert in_order == backwards[::-1]
    other.forget()
    assert in_order != other.sample_prompts(numbers, seed=2)


def test_a_group_keeps_its_prompt_while_the_sampler_learns():
    draws = PromptDraws(ByPassRate(memory=1000, floor=0.0), PromptList(FOUR))
    before = draws.sample_prompts(range(50), seed=1)
    draws.learn([0] * 500, [1.0] * 500)
    assert draws.sample_prompts(range(50), seed=1) == before
    draws.forget(range(50))
    assert draws.sample_prompts(range(50), seed=1) != before


# --- environments ----------------------------------------------------------------------------------------------------


def by_prompt(prompts, completions, **columns):
    """1 for an answer with "good"; the prompt "c" gets no score."""
    scores = []
    for prompt, completion in zip(prompts, completions, strict=True):
        scores.append(None if prompt == "c" else float("good" in completion))
    return scores


TEXTS = ["a b", "c", "d a b"]
ANSWERS = [(GOOD, EOS), (1, EOS), (GOOD, GOOD, EOS), (EOS,), (0, 0, 0, 0, 0), (GOOD, EOS)] * 4


def counted(rows, scored, passed):
    """Episodes and passes of each prompt."""
    played = np.bincount([row for row, counts in zip(rows, scored, strict=True) if counts], minlength=3)
    return played.tolist(), np.bincount(rows, weights=passed, minlength=3).tolist()


def test_whole_episodes_teach_the_sampler():
    env = make_env(by_prompt, prompts=TEXTS, sampler=ByPassRate(memory=1000))
    play(env, ANSWERS, seed=3)
    turns, _, _ = env.scored_turns
    rows = [turn.prompt.row for turn in turns]
    passed = [turn.prompt.row != 1 and GOOD in turn.completion_ids for turn in turns]
    played, successes = counted(rows, [row != 1 for row in rows], passed)
    assert env.sampler.played.tolist() == played and env.sampler.passed.tolist() == successes
    assert played[1] == 0 < min(played[0], played[2]) and sum(successes) > 0
    assert env.metrics["sampler/played"] == 2 / 3


@pytest.mark.heavy
def test_steps_teach_it_too():
    """The single environment and the slots of `step`, in every mode, count as whole episodes do."""
    for mode in ("NextStep", "SameStep", "Disabled"):
        env = make_env(by_prompt, 2, prompts=TEXTS, sampler=ByPassRate(memory=1000), autoreset_mode=mode)
        env.reset(seed=3)
        played = np.zeros(3)
        passed = np.zeros(3)
        rng = np.random.default_rng(0)
        for _ in range(60):
            _, reward, terminated, truncated, info = env.step(rng.choice([GOOD, 1, EOS], 2))
            done = terminated | truncated
            ended = info.get("final_info", info)
            for slot in np.flatnonzero(done):
                row = TEXTS.index(ended["prompt"][slot])
                played[row] += row != 1
                passed[row] += reward[slot]
            if mode == "Disabled" and done.any():
                env.reset(options={"reset_mask": done})
        assert env.sampler.played.tolist() == played.tolist() and played.sum() > 10, mode
        assert env.sampler.passed.tolist() == passed.tolist(), mode
    env = TextEnv(prompts=TEXTS, reward=by_prompt, sampler="pass_rate", tokenizer=make_tokenizer(WORDS))
    env.reset(seed=1)
    env.step(EOS)
    assert env.vector.sampler.played.sum() <= 1


@pytest.mark.heavy
def test_a_group_has_one_prompt_and_later_ones_follow_the_state():
    """A sampler that has seen only failures of two prompts draws the third one most."""
    env = make_env(by_prompt, prompts=["a b", "c", "d"], sampler=ByPassRate(floor=0.0))
    rollout = collect(env, lm_policy(), num_episodes=24, group_size=4, seed=1)
    tokens = rollout["observation"][:, 0].view(6, 4)
    assert (tokens == tokens[:, :1]).all()
    learn(env.sampler, *[(0, 0.0)] * 99, *[(1, 0.0), (1, 1.0)] * 9, *[(2, 0.0)] * 99)
    probability = env.sampler.probabilities()[1]
    collect(env, lm_policy(), num_episodes=200)
    rows = [turn.prompt.row for turn in env.scored_turns.turns]
    assert abs(rows.count(1) - 200 * probability) < 4 * np.sqrt(200 * probability * (1 - probability))
    assert probability > 0.5


def test_evaluations_use_no_sampler_and_teach_none():
    env, plain = (make_env(prompts=TEXTS * 4, sampler=sampler) for sampler in ("pass_rate", None))
    policy = lm_policy()
    one, other = (evaluate(each, policy, num_episodes=12, seed=1) for each in (env, plain))
    assert one.returns == other.returns
    assert env.samples(range(12)) == plain.samples(range(12))
    assert env.sampler.played.sum() == 0 and "sampler/played" not in env.metrics


def test_each_environment_has_a_copy():
    sampler = ByPassRate()
    one, other = (make_env(prompts=TEXTS, sampler=sampler) for _ in range(2))
    play(one, ANSWERS, seed=1)
    assert one.sampler.played.sum() > other.sampler.played.sum() == 0 == len(sampler.played)


class Last:
    """A sampler of one's own: always the last prompt."""

    def start(self, prompts):
        self.count = len(prompts.prompts)
        self.seen = 0

    def probabilities(self):
        return np.eye(self.count)[-1]

    def learn(self, indices, returns):
        self.seen += len(indices)

    def metrics(self):
        return {"seen": float(self.seen)}

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def test_a_sampler_of_ones_own_is_used_saved_and_restored():
    env = make_env(prompts=TEXTS, sampler=Last())
    play(env, ANSWERS, seed=1)
    assert {turn.prompt.row for turn in env.scored_turns.turns} == {2} and env.metrics["seen"] == 24
    fresh = make_env(prompts=TEXTS, sampler=Last())
    fresh.load_state_dict(env.state_dict())
    assert fresh.sampler.seen == 24


def test_wrong_probabilities_are_refused():
    for wrong, said in (
        ([0.5, 0.5], r"Last.probabilities returned list None, expected \(3,\)"),
        (np.array([0.5, 0.5]), r"ndarray \(2,\), expected \(3,\)"),
        (np.array([0.5, 0.6, -0.1]), "numbers from -0.1 with the sum 1.0"),
        (np.array([0.5, 0.6, 0.1]), "with the sum 1.2"),
        (np.array([0.5, np.nan, 0.5]), "sum nan"),
    ):
        sampler = Last()
        sampler.probabilities = lambda wrong=wrong: wrong
        with pytest.raises(ValueError, match=said):
            make_env(prompts=TEXTS, sampler=sampler)


class OwnOrder(PromptList):
    def sample_prompts(self, numbers, *, seed):
        return [self.prompt(0) for _ in numbers]

    def score(self, turns):
        return [0.0] * len(turns)


def test_only_prompts_of_a_list_are_sampled():
    tokenizer = make_tokenizer(WORDS)
    with pytest.raises(ValueError, match="Script makes its prompts itself: leave it out"):
        text_env(Script(), sampler="pass_rate")
    with pytest.raises(ValueError, match="OwnOrder has a sample_prompts of its own: leave one"):
        text_env(OwnOrder(TEXTS), sampler="pass_rate")
    with pytest.raises(TypeError, match="sampler"):
        ProgramVectorEnv(lambda ask: 1.0, tokenizer=tokenizer, sampler="pass_rate")


# --- texts -----------------------------------------------------------------------------------------------------------


def test_a_text_names_a_sampler_and_its_arguments():
    sampler = as_sampler("pass_rate:success=1,floor=.25")
    assert (sampler.success, sampler.floor, sampler.memory) == (1, 0.25, 16)
    sampler = as_sampler("curriculum:column=level,window=8,order=easy+hard")
    assert (sampler.column, sampler.window, sampler.order) == ("level", 8, ["easy", "hard"])


@pytest.mark.parametrize(
    ("sampler", "said"),
    [
        ("uniform", "sampler is 'uniform', expected one of pass_rate, curriculum"),
        ("pass_rate:target=1", "'target=1' is no argument of pass_rate: .* success, memory, floor"),
        ("pass_rate:floor", "'floor' is no argument of pass_rate: expected name=value"),
        ("pass_rate:floor=2", "floor is 2.0, expected a number from 0 to 1"),
        ("pass_rate:floor=low", "floor is 'low', expected a number"),
        ("pass_rate:memory=0", "memory is 0.0, expected a number of at least 1"),
        ("curriculum", "without a column: give curriculum:column=NAME"),
    ],
)
def test_a_wrong_text_is_refused(sampler, said):
    with pytest.raises(ValueError, match=said):
        as_sampler(sampler)


def test_what_is_no_sampler_is_refused():
    for wrong in (ByPassRate, 3, {"floor": 1}):
        with pytest.raises(TypeError, match="sampler is .*, expected textenv.ByPassRate"):
            make_env(sampler=wrong)


# --- runs ------------------------------------------------------------------------------------------------------------


def test_a_checkpoint_holds_the_state(tmp_path):
    """By prompts: those of another number of prompts are refused. `test_resume` compares whole runs to the bit."""
    agent = AGENTS["grpo_pass_rate"]()
    agent.learn(1, run_dir=tmp_path)
    state = read_checkpoint(checkpoints(tmp_path)[-1])["environment"][0]["state"]["objects"]["sampler"]
    assert state["class"] == "ByPassRate"
    np.testing.assert_array_equal(state["state"]["played"], agent.env.sampler.played)
    assert agent.env.sampler.played.sum() >= 8
    fewer = make_env(prompts=TEXTS, sampler="pass_rate")
    with pytest.raises(ValueError, match="state is of 5 prompts, but the environment has 3: give the same prompts"):
        fewer.load_state_dict(agent.env.state_dict())


def test_workers_are_refused():
    with (
        pytest.raises(ValueError, match="a sampler learns from all: use none"),
        rollout_workers(AGENTS["ppo_curriculum"](), make_env, 1),
    ):
        pass


@pytest.mark.heavy
def test_the_test_split_has_no_sampler():
    recipe = Recipe(env="textenv/Copy-v0", env_kwargs={"sampler": ByPassRate()}, num_envs=2)
    assert recipe.environment().sampler is not None and recipe.environment(split="test").sampler is None
    again = Recipe.from_dict(json.loads(json.dumps(recipe.to_dict())), trusted=True)
    assert again.environment().sampler.floor == 0.1


@pytest.mark.heavy
def test_the_command_line_trains_resumes_and_evaluates_with_a_sampler(tmp_path, monkeypatch, capsys, caplog):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": text, "level": len(text)} for text in ("the film", "the old film", "a story", "this is a film")]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text("def f(completions):\n    return [float(len(x) > 9) for x in completions]\n")
    words = ["train", "--prompts", "prompts.jsonl", "--reward", "rewards.py:f", "--max-new-tokens", "4", "--json",
             "--sampler", "curriculum:column=level,threshold=.1,window=2", "--algo", "grpo", "--num-episodes", "2",
             "--config.num-episodes", "4", "--config.group-size", "2", "--config.max-refills", "1",
             "--run-dir", "run"]  # fmt: skip
    main([*words, "--total-steps", "10"])
    main([*words, "--total-steps", "60", "--resume", "run"])
    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert logged[-1]["sampler/open_levels"] == 2 and [row["iteration"] for row in logged] == [1, 2]
    assert "sampler: curriculum:column=level" in (tmp_path / "run" / "run.yaml").read_text()
    caplog.clear()
    main(["evaluate", "run", "--trust-remote-code", "--num-episodes", "2", "--reward", "rewards.py:f", "--json"])
    assert "objects and saved states" not in caplog.text
    with pytest.raises(SystemExit):
        main(["train", "CartPole-v1", "--sampler", "pass_rate"])
    assert "--sampler: only for text environments" in capsys.readouterr().err


def test_a_state_of_other_prompts_is_refused():
    prompts = [{"prompt": f"a {number}", "level": number % 3, "other": number % 2} for number in range(600)]
    for sampler in (ByPassRate(), Curriculum(column="level")):
        state = started(sampler, prompts).state_dict()
        started(copy.deepcopy(sampler), prompts).load_state_dict(state)
        for others in (prompts[::-1], [*prompts[1:], prompts[0]]):
            with refused(ValueError, "the sampler's state is of"):
                started(copy.deepcopy(sampler), others).load_state_dict(state)
        # As earlier versions have it
        del state["checksum"]
        started(copy.deepcopy(sampler), prompts).load_state_dict(state)
    with refused(ValueError, "prompts with other levels"):
        state = started(Curriculum(column="level"), prompts).state_dict()
        started(Curriculum(column="other"), prompts).load_state_dict(state)
