"""Does language help in control? The same environments, played by PPO with a network and with language models.

python examples/same_world.py                                       # every game and mind, seeds 1 to 5: days
python examples/same_world.py --games lake,cliff --minds "mlp;embedded, scrambled" --seeds 1,2,3
python examples/same_world.py --table --figure same_world.svg       # the runs so far, as a table and as a figure

Minds, all trained by the same PPO on the environment's own steps (way (b): one observation is read at a time):

- mlp: two networks of 64 and 64 units, with the preset of the environment.
- scratch: the embedded model's architecture with random weights.
- embedded: the embedded model, a small GPT-2 that was trained on film reviews.
- embedded, scrambled: the same, but each word of the texts is replaced by another one, always the same.
- smollm2; smollm2, scrambled: SmolLM2-135M with an adapter (LoRA r=16) on the last ten of its 30 layers.
- smollm2, random: the same architecture with random weights, and the same adapter. Only this shows what pretraining
  gives.
- smollm2, all layers; smollm2, random, all layers: adapters on all 30 layers, which takes twice as long. They are
  trained only if they are named.

Each run is a line of runs/same_world.jsonl; a run that is there is not repeated.
"""

import argparse
import dataclasses
import itertools
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path

import gymnasium
import matplotlib
import minigrid.wrappers
import numpy as np
import torch
from matplotlib.figure import Figure

from algos import PPO, MLPPolicy, WordsPolicy, evaluate, presets
from textenv.envs.limits import check_at_least
from textenv.lm.loading import add_lora
from textenv.lm.model import LanguageModel

RUNS = Path("runs/same_world.jsonl")
EPISODES = 100
"""Sampled episodes of each evaluation."""
LEARNT = 0.9
"""Mean score of three iterations in a row at which a game counts as learnt: in one, few episodes may have ended."""
ENOUGH = 0.95
"""A training ends early when this score was reached in several iterations in a row (`Game.enough`)."""


@dataclasses.dataclass(frozen=True)
class Game:
    """An environment, and the scale of its returns."""

    title: str
    env_id: str
    steps: int
    lowest: float
    """Score 0: the return of random actions, by 1,000 episodes; in CliffWalking and Taxi of staying in one place."""
    highest: float
    """Score 1: the return of optimal play; in CartPole the limit."""
    options: dict = dataclasses.field(default_factory=dict)
    wrapper: str = ""
    instructions: str | None = None
    """What stands before each description; None: the instructions of the description. The embedded model reads 128
    tokens, which those of MiniGrid exceed."""
    enough: int = 3
    """Number of good iterations in a row that end a training; CartPole's have few ends of episodes each."""
    describe: Callable[[np.ndarray], str] | None = None
    """Description of an observation; None: that of the environment."""

    def make(self, num_envs=16):
        wrappers = [self._wrap] if self.wrapper else []
        return gymnasium.make_vec(
            self.env_id, num_envs=num_envs, vectorization_mode="sync", wrappers=wrappers, **self.options
        )

    def _wrap(self, env):
        return getattr(minigrid.wrappers, self.wrapper)(env)

    def score(self, value):
        """Return a return on the scale from `lowest` to `highest`."""
        return (value - self.lowest) / (self.highest - self.lowest)


def words_of_cartpole(observation):
    """Describe CartPole without numbers, in 270 texts; Barto et al. 1983 divide it into 162 boxes."""
    position, speed, angle, turning = map(float, observation)
    cart = _word(position, {-0.8: "left", 0.8: "middle", math.inf: "right"})
    moving = _word(speed, {-0.5: "left", 0.5: "still", math.inf: "right"})
    sides = {-6: "far left", -2: "left", 0: "slightly left", 2: "slightly right", 6: "right", math.inf: "far right"}
    pole = _word(math.degrees(angle), sides)
    speeds = {-50: "fast left", -15: "left", 15: "still", 50: "right", math.inf: "fast right"}
    return f"Cart {cart}, moving {moving}. Pole {pole}, turning {_word(math.degrees(turning), speeds)}."


def _word(number, words):
    """Return the word of the first limit that a number does not exceed."""
    return next(word for limit, word in words.items() if number <= limit)


NO_ICE = {"is_slippery": False}
GAMES = {
    "lake": Game("FrozenLake 4 × 4", "FrozenLake-v1", 20_000, 0.015, 1.0, NO_ICE),
    "lake 8x8": Game("FrozenLake 8 × 8", "FrozenLake8x8-v1", 80_000, 0.002, 1.0, NO_ICE),
    "cliff": Game("CliffWalking", "CliffWalking-v1", 60_000, -200.0, -13.0, {"max_episode_steps": 200}),
    "taxi": Game("Taxi", "Taxi-v4", 100_000, -200.0, 7.9),
    "cartpole": Game(
        "CartPole",
        "CartPole-v1",
        40_000,
        22.0,
        500.0,
        enough=10,
        describe=words_of_cartpole,
        instructions="Keep the pole upright.",
    ),
    "empty": Game(
        "MiniGrid Empty 5 × 5", "MiniGrid-Empty-5x5-v0", 20_000, 0.158, 0.955, wrapper="ImgObsWrapper", instructions=""
    ),
    "doorkey": Game(
        "MiniGrid DoorKey 5 × 5",
        "MiniGrid-DoorKey-5x5-v0",
        100_000,
        0.018,
        0.965,
        wrapper="ImgObsWrapper",
        instructions="",
    ),
}
LOOKS = {
    "mlp": ("#000000", "s"),
    "scratch": ("#56b4e9", "o"),
    "embedded": ("#0072b2", "o"),
    "embedded, scrambled": ("#0072b2", "X"),
    "smollm2": ("#d55e00", "D"),
    "smollm2, scrambled": ("#d55e00", "X"),
    "smollm2, random": ("#e69f00", "D"),
}
"""Colour and mark of each mind in the figure; the colours are told apart by colour-blind people."""
MINDS = (*LOOKS, "smollm2, all layers", "smollm2, random, all layers")


def random_weights(model):
    """The same architecture with new weights."""
    return type(model)(model.config)


class Scrambled:
    """The descriptions of a policy in which each word is another one, always the same; numbers and punctuation stay."""

    def __init__(self, game, policy):
        self.describe = policy.describe
        action_words = policy.action_words.choices[0]
        texts = {policy.instructions, *action_words}
        env = game.make(num_envs=1)
        env.action_space.seed(0)
        observation, _ = env.reset(seed=0)
        for _ in range(5_000):
            texts.update(policy.texts(observation))
            observation, *_ = env.step(env.action_space.sample())

        # Each word is replaced by the next one of a shuffled circle, so none stays
        circle = sorted({word.lower() for text in texts for word in re.findall(r"[A-Za-z]+", text)})
        np.random.default_rng(0).shuffle(circle)
        self.other = dict(zip(circle, [*circle[1:], circle[0]], strict=True))
        self.instructions = self._scramble(policy.instructions)
        self.action_words = [self._scramble(word) for word in action_words]

    def _scramble(self, text):
        def another(match):
            word = self.other.get(match[0].lower(), match[0].lower())
            return word.capitalize() if match[0][0].isupper() else word

        return re.sub(r"[A-Za-z]+", another, text)

    def __call__(self, observation):
        return self._scramble(self.describe(observation))


def make_policy(game, env, mind, seed):
    """The policy of a mind."""
    if mind == "mlp":
        return MLPPolicy(env.single_observation_space, env.single_action_space, seed=seed)
    name, *changes = mind.split(", ")
    torch.manual_seed(seed)
    lm = LanguageModel.load("smollm2" if name == "smollm2" else "embedded")
    model = lm.model
    if name == "scratch" or "random" in changes:
        model = random_weights(model)
    if name == "smollm2":
        lora = "r=16,targets=q_proj+v_proj"
        if "all layers" not in changes:
            lora += ",layers=10"
        model = add_lora(model, lora, seed=seed)
    options = {"remember_texts": name == "smollm2", "seed": seed}
    plain = WordsPolicy.of(
        env, LanguageModel(model, lm.tokenizer), describe=game.describe, instructions=game.instructions, **options
    )
    if "scrambled" not in changes:
        return plain
    scrambled = Scrambled(game, plain)
    return WordsPolicy.of(
        env,
        plain.language_model,
        describe=scrambled,
        actions=scrambled.action_words,
        instructions=scrambled.instructions,
        **options,
    )


def make_config(game, mind, seed):
    """The settings of a mind: presets of the networks, and one setting for all language models."""
    if mind == "mlp":
        config = presets.recipe(game.env_id).config
        if (game.env_id, "ppo") not in presets.RECIPES:
            config = presets.TOY_TEXT
        return dataclasses.replace(config, seed=seed)
    config = presets.WORDS
    if mind.startswith("smollm2"):
        config = dataclasses.replace(config, minibatch_size=1024)
    return dataclasses.replace(config, seed=seed)


def train(name, mind, seed):
    """One run, as a dictionary for the file."""
    torch.set_num_threads(1)
    game = GAMES[name]
    env = game.make()
    policy = make_policy(game, env, mind, seed)
    before = evaluate(env, policy, num_episodes=EPISODES, seed=seed).mean_return
    agent = PPO(env, policy, make_config(game, mind, seed))
    start = time.process_time()
    curve = []

    def note(metrics):
        if metrics.get("episode/return") is not None:
            score = game.score(metrics["episode/return"])
            curve.append((int(metrics["steps"]), round(score, 4), round(time.process_time() - start, 1)))
        latest = curve[-game.enough :]
        return len(latest) == game.enough and all(row[1] >= ENOUGH for row in latest)

    agent.learn(game.steps, on_iteration=note)
    seconds = time.process_time() - start
    after = evaluate(env, policy, num_episodes=EPISODES, seed=seed).mean_return
    parameters = [p for p in policy.parameters() if p.requires_grad]
    return {
        "game": name, "mind": mind, "seed": seed, "before": round(before, 3), "after": round(after, 3),
        **when_learnt(curve), "steps": agent.steps, "seconds": round(seconds, 1),
        "trained parameters": sum(p.numel() for p in parameters), "curve": curve,
    }  # fmt: skip


def when_learnt(curve):
    """Steps and CPU seconds until a game was learnt; None if it was not."""
    for end in range(3, len(curve) + 1):
        if statistics.mean(score for _, score, _ in curve[end - 3 : end]) >= LEARNT:
            steps, _, seconds = curve[end - 1]
            return {"steps to .9": steps, "seconds to .9": seconds}
    return {"steps to .9": None, "seconds to .9": None}


COLUMNS = (
    "game", "mind", "seeds", "return before training", "return after, each seed", "learnt", "steps to .9",
    "CPU seconds to .9", "CPU seconds",
)  # fmt: skip


def rows_of(runs):
    """Rows of the table, a row for each game and mind: medians over the seeds that learnt, and of all CPU seconds."""
    rows = []
    for game in GAMES:
        for mind in MINDS:
            seeds = sorted((run for run in runs if (run["game"], run["mind"]) == (game, mind)), key=itemgetter("seed"))
            if not seeds:
                continue
            learnt = [run for run in seeds if run["steps to .9"] is not None]
            steps = seconds = "–"
            if learnt:
                steps = f"{statistics.median(run['steps to .9'] for run in learnt):,.0f}"
                seconds = _seconds(statistics.median(run["seconds to .9"] for run in learnt))
            rows.append(
                [
                    game,
                    mind,
                    len(seeds),
                    _number(statistics.mean(run["before"] for run in seeds)),
                    ", ".join(_number(run["after"]) for run in seeds),
                    f"{len(learnt)} of {len(seeds)}",
                    steps,
                    seconds,
                    _seconds(statistics.median(run["seconds"] for run in seeds)),
                ]
            )
    return rows


def _number(value):
    """Write a return: two decimals below 2, else none."""
    return f"{value:.2f}" if abs(value) < 2 else f"{value:.0f}"


def _seconds(value):
    """Write seconds with three digits, large ones without decimals."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def draw(runs, path):
    """Draw the steps to .9 of each seed and their median, by game and mind; seeds that never learnt stand at the right.

    Minds that no game has are left out, and so are those with adapters on all layers.
    """
    matplotlib.rcParams |= {"svg.hashsalt": "same world", "font.size": 11}
    minds = [mind for mind in LOOKS if any(run["mind"] == mind for run in runs)]
    games = [game for game in GAMES if any(run["game"] == game for run in runs)]
    never = 2 * max(game.steps for game in GAMES.values())
    figure = Figure(figsize=(12, 1 + 0.75 * len(games)), layout="constrained")
    axes = figure.subplots()
    for index, mind in enumerate(minds):
        colour, marker = LOOKS[mind]
        for row, game in enumerate(games):
            height = -row + 0.35 - 0.7 * index / max(1, len(minds) - 1)
            steps = [
                never if run["steps to .9"] is None else run["steps to .9"]
                for run in runs
                if (run["game"], run["mind"]) == (game, mind)
            ]
            if not steps:
                continue
            axes.plot(steps, [height] * len(steps), marker, color=colour, alpha=0.35, ms=5, mew=0)
            axes.plot(statistics.median(steps), height, marker, color=colour, ms=9, label=mind if row == 0 else None)
    for row in range(1, len(games)):
        axes.axhline(0.5 - row, color="0.85", lw=1)
    axes.axvline(never / 1.4, color="0.6", lw=1, ls=":")
    axes.set_ylim(0.5 - len(games), 0.5)
    axes.set_xscale("log")
    axes.set_yticks([-row for row in range(len(games))], [GAMES[game].title for game in games])
    axes.set_xticks(
        [1_000, 3_000, 10_000, 30_000, 100_000, never], ["1,000", "3,000", "10,000", "30,000", "100,000", "never"]
    )
    axes.minorticks_off()
    axes.set_xlabel("environment steps to a score of .9: each seed, and their median")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False)
    figure.savefig(path, metadata={"Date": None})


def read_runs(*files):
    """Runs of all files that are there, each once."""
    runs = {}
    for file in files:
        if file is None or not file.is_file():
            continue
        text = file.read_text()
        rows = json.loads(text)["runs"] if file.suffix == ".json" else map(json.loads, text.splitlines())
        for run in rows:
            runs[run["game"], run["mind"], run["seed"]] = run | when_learnt(run["curve"])
    return [*runs.values()]


def save_runs(runs, file):
    """Write the table and all runs to a file of docs/results."""
    sys.path.append(str(Path(__file__).parent / "benchmarks"))
    from page import machine, save_table

    save_table(file, COLUMNS, rows_of(runs), machine("python examples/same_world.py"), kind="words")
    data = json.loads(file.read_text())
    file.write_text(json.dumps(data | {"runs": runs}, ensure_ascii=False) + "\n")


def main():
    """Train what is asked for and not yet there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--games", default=",".join(GAMES), help="separated by commas")
    parser.add_argument("--minds", default=";".join(LOOKS), help="separated by semicolons")
    parser.add_argument("--seeds", default="1,2,3,4,5", help="separated by commas")
    parser.add_argument("--table", action="store_true", help="train nothing, print the table of the runs so far")
    parser.add_argument("--json", type=Path, help="file of docs/results: its runs count too, and all are written to it")
    parser.add_argument("--figure", type=Path, help="draw the runs so far to this file")
    arguments = parser.parse_args()
    runs = read_runs(arguments.json, RUNS)
    if not arguments.table:
        games = arguments.games.split(",")
        minds = arguments.minds.split(";")
        unknown = [name for name in minds if name not in MINDS] + [name for name in games if name not in GAMES]
        if unknown:
            parser.error(f"there is no {', '.join(unknown)}; games: {', '.join(GAMES)}; minds: {'; '.join(MINDS)}")
        RUNS.parent.mkdir(exist_ok=True)
        for seed in map(int, arguments.seeds.split(",")):
            check_at_least("seed", seed, 0)
            for game, mind in itertools.product(games, minds):
                if any((run["game"], run["mind"], run["seed"]) == (game, mind, seed) for run in runs):
                    continue
                run = train(game, mind, seed)
                runs.append(run)
                with RUNS.open("a") as file:
                    file.write(json.dumps(run) + "\n")
                print({key: value for key, value in run.items() if key != "curve"}, flush=True)
    for row in [COLUMNS, ["---"] * len(COLUMNS), *rows_of(runs)]:
        print(f"| {' | '.join(map(str, row))} |")
    if arguments.json is not None:
        save_runs(runs, arguments.json)
    if arguments.figure is not None:
        draw(runs, arguments.figure)


if __name__ == "__main__":
    main()
