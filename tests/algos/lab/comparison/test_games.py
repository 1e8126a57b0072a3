"""Cases of one game share a scale and count its steps, against numbers worked out by hand."""

import csv
import functools
import json
from dataclasses import replace

import gymnasium
import pytest
import torch
from gymnasium.envs.registration import EnvSpec

from algos import PPO, LMPolicy, presets
from algos.cli import main
from algos.lab.comparison.compare import parse_cases
from algos.lab.comparison.figures import curve_rows, draw_curves
from algos.lab.comparison.games import game_of, in_steps_of_the_game, solved_return
from algos.lab.comparison.page import page_data
from algos.lab.comparison.paper import scores_by_algorithm
from algos.lab.comparison.report import report_page, table_rows, write_report
from algos.lab.comparison.runs import read_runs, read_study
from algos.lab.comparison.summary import Case, by_case, name_cases, normalise, summary
from algos.lab.comparison.words import in_words
from algos.make import PROMPTS, WORDS
from algos.recipe import Recipe
from algos.training.metrics import count_turns
from algos.training.save import spec_of
from tests.helpers.finished_runs import run_of
from textenv import Rewards

SLIPPERY = {"env": "FrozenLake-v1"}
SAFE = {"env": "gymnasium:FrozenLake-v1", "env_kwargs": {"is_slippery": False}}


def test_words_are_the_game_that_they_describe():
    assert game_of(WORDS, SLIPPERY) == game_of("FrozenLake-v1", {}) == "FrozenLake-v1"
    safe = game_of("FrozenLake-v1", {"is_slippery": False, "render_mode": "rgb_array"})
    assert safe == game_of(WORDS, SAFE) == "FrozenLake-v1 (is_slippery=false)"
    # An environment's own arguments, given again, make no other game
    assert game_of("FrozenLake-v1", {"map_name": "4x4", "max_episode_steps": 100}) == "FrozenLake-v1"
    assert game_of("FrozenLake-v1", {"desc": len}) == 'FrozenLake-v1 (desc="len")'
    assert game_of("textenv/Copy-v0", {"max_new_tokens": 3}) == "textenv/Copy-v0"


def test_prompts_and_rewards_make_another_game_of_text(tmp_path):
    """A reward of 0 or 1 and a number of tokens are not on one scale; and files of one name may be different ones."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        (folder / "rewards.py").write_text("def score(completions): ...\ndef length(completions): ...")
    names = [f"{folder}/rewards.py:{function}" for folder in folders for function in ("score", "length")]
    games = [game_of(PROMPTS, {"prompts": "questions.jsonl", "reward": name}) for name in names]
    assert len(set(games)) == 4
    assert games[1].startswith(f'{PROMPTS} (prompts="questions.jsonl", reward="rewards.py:length", digest=')
    # One function in a list is the same reward; other prompts are another game
    assert game_of(PROMPTS, {"prompts": "questions.jsonl", "reward": [names[1]]}) == games[1]
    lists = [game_of(PROMPTS, {"prompts": prompts, "reward": "f.py:f"}) for prompts in (["a"] * 99, ["b"] * 99)]
    assert lists[0] != lists[1] and "prompts=99 entries" in lists[0]


def scaled(factor):
    def score(completions):
        return [factor * len(text) for text in completions]

    return score


def doubled(function):
    @functools.wraps(function)
    def score(completions):
        return [2 * value for value in function(completions)]

    return score


def test_rewards_that_share_a_name_make_different_games():
    rewards = [scaled(2), scaled(3), doubled(scaled(2)), doubled(scaled(3)), lambda completions: [1.0] * 2, len]
    rewards += [functools.partial(len, x=1), Rewards({"length": (len, 1.0)}), Rewards({"length": (len, 0.5)})]
    games = [game_of(PROMPTS, {"reward": reward}) for reward in rewards]
    assert len(set(games)) == len(games)
    assert games[0] == game_of(PROMPTS, {"reward": scaled(2)})
    # As a run that is still trained has stored it
    stored = Recipe(env=PROMPTS, env_kwargs={"reward": rewards[-1]}).to_dict()["env_kwargs"]
    assert game_of(PROMPTS, stored) == games[-1]


@pytest.mark.parametrize(("name", "arguments", "parts"), [
    ("Periods", {"k": 4}, "k=4"),
    ("Sort", {"length": 6}, "length=6"),
    ("ReasoningGym", {"dataset": "leg_counting", "min_animals": 3}, 'dataset="leg_counting", min_animals=3'),
    ("GuessNumber", {"high": 10, "max_turns": 3}, "high=10, max_turns=3"),
    ("TicTacToe", {"opponents": ["perfect"]}, 'opponents=["perfect"]'),
    ("Reviews", {"split": "test"}, 'split="test"'),
    ("Prompts", {"overlong": "skip", "max_prompt_tokens": 9}, 'max_prompt_tokens=9, overlong="skip"'),
])  # fmt: skip
def test_sizes_data_and_opponents_make_another_game_of_text(name, arguments, parts):
    assert game_of(f"textenv/{name}-v0", arguments) == f"textenv/{name}-v0 ({parts})"


@pytest.mark.parametrize(("name", "arguments"), [
    ("Periods", {"k": 8, "split": "train", "overlong": "error", "max_prompt_tokens": 30}),  # the defaults
    ("GuessNumber", {"low": 1, "max_turns": 50, "history": 1, "pay_at": "end"}),
    ("ReasoningGym", {"dataset": "chain_sum", "extract": None}),
    ("Reviews", {"model": "smollm2", "kl_coef": 0.1, "stop": ["."], "max_new_tokens": 9, "sampler": "pass-rate"}),
    ("Copy", {"task": "Copy", "model": "embedded", "kl_coef": None, "wrappers": ()}),  # as a run has it
    ("Prompts", {"system_prompt": "Be brief.", "chat": True, "tools": [len]}),
])  # fmt: skip
def test_what_changes_no_payment_makes_no_other_game_of_text(name, arguments):
    assert game_of(f"textenv/{name}-v0", arguments) == f"textenv/{name}-v0"


def test_a_game_of_text_is_solved_at_its_threshold_unless_it_is_another_game():
    for name, arguments, solved in [
        ("Periods", {"k": 4}, 1),
        ("TwentyQuestions", {"task": "TwentyQuestions", "model": "embedded"}, 33 / 40),
        ("TwentyQuestions", {"max_questions": 5}, None),
        ("GuessNumber", {"max_turns": 3}, None),
    ]:
        spec = gymnasium.spec(f"textenv/{name}-v0")
        assert solved_return(replace(spec, kwargs=spec.kwargs | arguments)) == solved


def test_titles_of_long_games_do_not_reach_into_the_next_panel():
    """A panel has room for 36 characters."""
    runs = [run_of(1, returns=[1.0, 2.0], after=2.0) for _ in range(2)]
    for run, reward in zip(runs, ("score", "length"), strict=True):
        run.game = game_of(PROMPTS, {"prompts": "questions.jsonl", "reward": f"/here/rewards.py:{reward}"})
        run.name = reward
    for axis, run in zip(draw_curves(runs).axes, runs, strict=True):
        lines = axis.get_title().split("\n")
        assert max(map(len, lines)) <= 36 and " ".join(lines) == run.game


def test_long_prompts_are_no_names_of_files():
    assert game_of(PROMPTS, {"prompts": ["x" * 10_000]}) != game_of(PROMPTS, {"prompts": ["y" * 10_000]})


def test_a_case_keeps_its_game_while_its_reward_counts():
    reward = Rewards({"length": (len, 1.0)})
    case = Case(PROMPTS, env_kwargs={"prompts": ["a"], "reward": reward})
    game = case.game
    reward.seen += 1
    assert case.game == game


def test_limits_of_the_words_are_limits_of_the_game():
    pole = {"env": "CartPole-v1"}
    for limit in ({"max_episode_steps": 5}, {"max_turns": 5}, {"env_kwargs": {"max_episode_steps": 9}, "max_turns": 5}):
        assert game_of(WORDS, pole | limit) == "CartPole-v1 (max_episode_steps=5)"
        assert solved_return(EnvSpec(WORDS, kwargs=pole | limit)) is None
    assert game_of(WORDS, pole | {"max_turns": 900}) == game_of(WORDS, pole | {"max_turns": 500}) == "CartPole-v1"


def test_another_limit_of_steps_makes_another_game():
    """CartPole's 475 cannot be reached in 100 steps."""
    spec = gymnasium.spec("CartPole-v1")
    for limit, name in {100: "CartPole-v1 (max_episode_steps=100)", 500: "CartPole-v1", None: "CartPole-v1"}.items():
        arguments = {"max_episode_steps": limit}
        described = {"env": "CartPole-v1", "env_kwargs": arguments}
        assert game_of("CartPole-v1", arguments) == game_of(WORDS, described) == name
        threshold = None if limit == 100 else 475
        assert solved_return(replace(spec, kwargs=arguments)) == threshold
        assert solved_return(EnvSpec(WORDS, kwargs=described)) == threshold
    made = gymnasium.make_vec("CartPole-v1", num_envs=1, vectorization_mode="sync", max_episode_steps=100)
    assert solved_return(made.spec) is None


class Halved(gymnasium.Wrapper):
    def step(self, action):
        observation, reward, *ends = self.env.step(action)
        return observation, reward / 2, *ends


class Paid(gymnasium.ObservationWrapper):
    """Pays, too."""

    def step(self, action):
        return self.env.step(action)[0], 1.0, False, False, {}


HALVED = [Halved, "tests.algos.lab.comparison.test_games:Halved", {"import": "elsewhere:Halved"}]


@pytest.mark.parametrize("wrapper", HALVED, ids=["class", "name", "recipe"])
def test_wrappers_that_may_change_rewards_make_another_game(wrapper):
    """Its returns have a scale and a threshold of their own."""
    assert game_of("CartPole-v1", {"wrappers": [wrapper]}) == 'CartPole-v1 (wrappers="Halved")'
    halved = 'FrozenLake-v1 (is_slippery=false, wrappers="Halved")'
    assert game_of(WORDS, SAFE | {"env_wrappers": [wrapper]}) == halved
    assert game_of(WORDS, SAFE | {"wrappers": [wrapper]}) == halved
    assert game_of("FrozenLake-v1", {"is_slippery": False, "wrappers": (wrapper,)}) == halved
    assert solved_return(EnvSpec("CartPole-v1", reward_threshold=475, kwargs={"wrappers": [wrapper]})) is None
    assert solved_return(EnvSpec(WORDS, kwargs=SAFE | {"env_wrappers": [wrapper]})) is None


@pytest.mark.parametrize(("wrap", "game"), [
    (lambda env: gymnasium.wrappers.vector.TransformReward(env, abs), 'CartPole-v1 (wrappers="TransformReward")'),
    (gymnasium.wrappers.vector.NormalizeObservation, "CartPole-v1"),
])  # fmt: skip
def test_a_run_has_the_game_of_the_wrappers_of_all_slots(wrap, game, tmp_path):
    env = wrap(gymnasium.make_vec("CartPole-v1", num_envs=2))
    PPO(env, num_steps=4).learn(8, run_dir=tmp_path / "run")
    (run,) = read_runs([tmp_path])
    assert run.game_name == game
    threshold = 475 if game == "CartPole-v1" else None
    assert solved_return(spec_of(env)) == threshold


def test_a_run_of_train_has_the_game_of_its_wrappers(tmp_path):
    options = ["--total-steps", "8", "--num-envs", "2", "--config.num-steps", "4", "--num-episodes", "1", "--json"]
    main(["train", "CartPole-v1", "--run-dir", str(tmp_path / "run"), *options, "--wrapper", f"{__name__}:Halved"])
    (run,) = read_runs([tmp_path])
    assert run.game_name == 'CartPole-v1 (wrappers="Halved")'


def test_wrappers_of_observations_and_actions_alone_make_no_other_game():
    changes = [
        "gymnasium.wrappers:FlattenObservation",
        gymnasium.wrappers.ClipAction,
        "minigrid.wrappers:ImgObsWrapper",
    ]
    assert game_of("CartPole-v1", {"wrappers": changes}) == "CartPole-v1"
    assert solved_return(EnvSpec("CartPole-v1", reward_threshold=475, kwargs={"wrappers": changes})) == 475
    for wrapper, name in {Paid: "Paid", "gymnasium.wrappers:ClipReward": "ClipReward", repr: "repr"}.items():
        assert game_of("CartPole-v1", {"wrappers": [wrapper]}) == f'CartPole-v1 (wrappers="{name}")'
    assert game_of("CartPole-v1", {"wrappers": ["gymnasium.nowhere:X"]}) == 'CartPole-v1 (wrappers="X")'


def test_a_described_game_is_solved_at_its_own_threshold():
    spec = EnvSpec(WORDS, reward_threshold=1, kwargs=SLIPPERY)
    assert solved_return(spec) == gymnasium.spec("FrozenLake-v1").reward_threshold == 0.7
    safe = EnvSpec("FrozenLake-v1", reward_threshold=0.7, kwargs={"is_slippery": False})
    assert solved_return(EnvSpec(WORDS, kwargs=SAFE)) == solved_return(safe) == 1
    assert solved_return(gymnasium.spec("CartPole-v1")) == 475 and solved_return(None) is None


def two_minds():
    """A small network and a language model in one game, which is solved at 10."""
    network = run_of(1, returns=[1.0, 6.0, 9.2], after=9.0, before=1.0)
    network.env = "FrozenLake-v1"
    network.trained_parameters = 10
    model = run_of(
        1, returns=[3.0, 9.3], after=10.0, before=2.0, **{"rollout/turns": [40, 30], "rollout/steps": [100] * 2}
    )
    model.env, model.policy, model.parameters, model.trained_parameters = WORDS, "LMPolicy", 1000, 40
    model.game = "FrozenLake-v1"
    model.history = in_steps_of_the_game(model.history, env_id=WORDS, env_kwargs=SLIPPERY)
    return [network, model]


def test_one_game_has_one_normalisation():
    network, model = study = two_minds()
    # 0 is the lower of the two returns before training, and 1 is 10 for both
    for runs in ([network], [model]):
        score = normalise(runs, study=study)
        assert (score(1.0), score(10.0), score(5.5)) == (0, 1, 0.5)
    figures = {run.env: summary([run], study=study) for run in study}
    assert figures["FrozenLake-v1"]["normalised score"].mean == pytest.approx(8 / 9)
    assert figures[WORDS]["normalised score"].mean == 1
    # Without a threshold the best evaluation of the game is 1
    network.best = model.best = None
    assert normalise([network], study=study)(10.0) == 1


def test_another_game_has_its_own_normalisation():
    study = two_minds()
    study[1].game = "FrozenLake-v1 (is_slippery=false)"
    assert normalise([study[1]], study=study)(2.0) == 0 and normalise([study[0]], study=study)(1.0) == 0


def test_turns_are_the_steps_of_a_described_game():
    network, model = study = two_minds()
    assert [(row["steps"], row["tokens"]) for row in model.history] == [(40, 100), (70, 200)]
    # A score of .9 is a return of 9.1: the network has it after 300 steps, the model after 70 turns
    reached = [summary([run], study=study)["steps to 0.9"].mean for run in study]
    assert reached == [300, 70]
    rows = [{"steps": 8, "rollout/steps": 8, "rollout/turns": 4, "episode/length": 6.0}]
    assert in_steps_of_the_game(rows, env_id=WORDS, env_kwargs=SLIPPERY)[0]["episode/length"] == 3
    assert in_steps_of_the_game(rows, env_id="textenv/GuessNumber-v0", env_kwargs={}) == rows
    assert in_steps_of_the_game([{"steps": 8}], env_id=WORDS, env_kwargs=SLIPPERY) == [{"steps": 8}]


def test_quantities_a_step_are_those_of_a_turn():
    """Four turns of two and of four tokens; an entropy of ½ at each token is one of 1 and 2 at each turn."""
    per_token = {"policy/entropy": 0.5, "policy/approx_kl": 0.1, "update/kl": 0.2, "reference/kl_per_step": 0.3}
    rows = [
        {"steps": 8, "rollout/steps": 8, "rollout/turns": 4, "time/steps_per_second": 8.0, "policy/clip_frac": 0.5},
        {"steps": 32, "rollout/steps": 24, "update/steps": 8, "rollout/turns": 4, "time/steps_per_second": 16.0},
    ]
    first, second = in_steps_of_the_game([row | per_token for row in rows], env_id=WORDS, env_kwargs=SLIPPERY)
    assert {name: first[name] for name in per_token} == {name: 2 * value for name, value in per_token.items()}
    assert {name: second[name] for name in per_token} == {name: 4 * value for name, value in per_token.items()}
    # 4 turns in a second, then 8 turns in 2 seconds
    assert [row["time/steps_per_second"] for row in (first, second)] == [4, 4]
    assert [row["rollout/steps"] for row in (first, second)] == [4, 4] and first["policy/clip_frac"] == 0.5
    empty = {"steps": 0, "rollout/steps": 0, "rollout/turns": 0, "time/steps_per_second": 0.0, "episode/length": 2.0}
    assert in_steps_of_the_game([empty], env_id=WORDS, env_kwargs=SLIPPERY) == [empty | {"tokens": 0}]


@pytest.mark.heavy
def test_the_log_counts_turns_of_a_game():
    env = gymnasium.make_vec("textenv/GuessNumber-v0", num_envs=2)
    config = replace(presets.TEXT, num_episodes=8, minibatch_size=8)
    (row,) = PPO(env, LMPolicy.load("embedded"), config, seed=1).learn(1)
    turns, _, _ = env.scored_turns
    assert row["rollout/turns"] == len(turns) > config.num_episodes
    mask = torch.tensor([[True, True, False, True], [False, True, False, False], [False] * 4])
    assert count_turns(mask) == 3


@pytest.mark.heavy
def test_the_page_draws_one_game_in_one_panel(tmp_path):
    study = two_minds()
    panels = {panel["title"]: panel["lines"] for panel in page_data(study)["panels"]}
    lines = panels["return: FrozenLake-v1"]
    assert [line["name"] for line in lines] == ["FrozenLake-v1:ppo", f"{WORDS}:ppo"]
    assert [line["x"][-1] for line in lines] == [300, 70]
    page = report_page(study)
    assert f"In {WORDS}:ppo, a step is a turn" in page
    assert "LMPolicy, 40 of 1,000 parameters trained" in page and "MLPPolicy, 10 parameters" in page
    assert any("Probability of improvement" in text for text in in_words(study, {run.case: {} for run in study}))
    scores = scores_by_algorithm(study)
    assert {name: of_name.keys() for name, of_name in scores.items()} == {
        "ppo": {"FrozenLake-v1"}, f"{WORDS}:ppo": {"FrozenLake-v1"}
    }  # fmt: skip
    write_report(tmp_path, study)
    assert (tmp_path / "paper.tex").is_file()


def test_the_table_has_seconds_and_parameters():
    network, model = study = two_minds()
    for run, seconds in zip(study, (0.5, 2.0), strict=True):
        for row in run.history:
            row["time/processor"] = seconds
    rows = {row[0][0]: [text for text, _ in row[1:]] for row in table_rows({run.case: summary([run]) for run in study})}
    assert rows["processor seconds of training"] == ["1.5", "4"]
    assert rows["parameters that are trained"] == ["10", "40"] and rows["parameters, all"] == ["10", "1,000"]


def test_a_study_of_an_earlier_version_is_read(tmp_path):
    fields = run_of(1, returns=[1.0], after=1.0).__dict__ | {"folder": "a"}
    for name in ("game", "trained_parameters"):
        del fields[name]
    (tmp_path / "report.json").write_text(json.dumps([fields]))
    (run,) = read_study(tmp_path / "report.json")
    assert run.game_name == "Some-v0" and run.trained_parameters is None and run.line == "ppo"


def test_one_name_may_stand_for_several_games():
    lake = {"env": "FrozenLake-v1"}
    cliff = {"env": "CliffWalking-v1"}
    cases = parse_cases([Case(WORDS, env_kwargs=game, name="model") for game in (lake, cliff)])
    assert [case.game for case in cases] == ["FrozenLake-v1", "CliffWalking-v1"]
    runs = []
    for case in cases:
        run = run_of(1, returns=[1.0], after=1.0)
        run.env, run.game, run.label = WORDS, case.game, "model"
        runs.append(run)
    name_cases(runs)
    assert list(by_case(runs)) == ["model, FrozenLake-v1", "model, CliffWalking-v1"]
    # Beside a case of the game's own environment, too
    network = run_of(1, returns=[1.0], after=1.0)
    network.env = "FrozenLake-v1"
    network.label = "model"
    name_cases([*runs, network])
    assert list(by_case([*runs, network])) == [
        f"model, {WORDS}, FrozenLake-v1",
        f"model, {WORDS}, CliffWalking-v1",
        "model, FrozenLake-v1",
    ]
    with pytest.raises(ValueError, match="give each once"):
        parse_cases([Case(WORDS, env_kwargs=game) for game in (lake, cliff)])


def test_a_name_that_a_game_and_its_description_share_stands_for_two_lines(tmp_path):
    runs = []
    for game, after in (("FrozenLake-v1", 4.0), ("CliffWalking-v1", 8.0)):
        for env, worse in ((game, 0.0), (WORDS, 2.0)):
            for seed in (1, 2):
                run = run_of(seed, returns=[1.0, after - worse], after=after - worse)
                run.env, run.game, run.label = env, game, "γ = 1"
                runs.append(run)
    name_cases(runs)
    described = f"γ = 1, {WORDS}"

    # Scores are returns by 10, in each game by itself
    scores = scores_by_algorithm(runs)
    assert {name: {game: [*column] for game, column in of_name.items()} for name, of_name in scores.items()} == {
        "γ = 1": {"FrozenLake-v1": [0.4, 0.4], "CliffWalking-v1": [0.8, 0.8]},
        described: {"FrozenLake-v1": [0.2, 0.2], "CliffWalking-v1": [0.6, 0.6]},
    }
    figure = draw_curves(runs)
    ends = {axis.get_title(): [line.get_ydata()[-1] for line in axis.get_lines()] for axis in figure.axes}
    assert ends == {"FrozenLake-v1": [4, 2], "CliffWalking-v1": [8, 6]}
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["γ = 1", described]

    # Files name the four cases as the table does
    write_report(tmp_path, runs)
    for name in ("curves.csv", "summary.csv"):
        with (tmp_path / name).open(newline="", encoding="utf-8") as file:
            assert {row["case"] for row in csv.DictReader(file)} == by_case(runs).keys()
    assert len(by_case(runs)) == 4


def test_games_that_share_a_name_are_told_apart_in_a_table():
    runs = [run_of(seed, returns=[1.0], after=1.0) for seed in (1, 2)]
    for run, game in zip(runs, ("Some-v0", "Some-v0 (scale=9.0)"), strict=True):
        run.label, run.game = "x", game
    name_cases(runs)
    assert [row["case"] for row in curve_rows(runs)] == ["x, Some-v0", "x, Some-v0 (scale=9.0)"]
