"""Does language help in control? The same environments, played by PPO with a network and with language models.

python examples/same_world.py                                       # every game and mind, seeds 1 to 5: days
python examples/same_world.py --games lake,cliff --minds mlp,embedded --seeds 1,2,3,4,5
python examples/same_world.py --table                               # the runs so far, as a table

Minds, all trained by the same PPO on the environment's own steps (way (b): one observation is read at a time):

- mlp: two networks of 64 and 64 units, with the preset of the environment.
- scratch: the embedded model's architecture with random weights.
- embedded: the embedded model, a small GPT-2 that was trained on film reviews.
- embedded, scrambled: the same, but each word of the texts is replaced by another one, always the same.
- smollm2; smollm2, scrambled: SmolLM2-135M with an adapter (LoRA r=16).
- smollm2, random: the same architecture with random weights, and the same adapter. Only this shows what pretraining
  gives.

Each run is a line of runs/same_world.jsonl; a run that is there is not repeated.
"""

import argparse
import dataclasses
import json
import math
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import gymnasium
import minigrid.wrappers
import numpy as np
import torch

from algos import PPO, MLPPolicy, WordsPolicy, evaluate, presets
from textenv.envs.limits import check_at_least
from textenv.lm.loading import add_lora
from textenv.lm.model import LanguageModel

RUNS = Path("runs/same_world.jsonl")
EPISODES = 100
"""Sampled episodes of each evaluation."""
LEARNT = 0.9
"""Score of an iteration at which a game counts as learnt."""
ENOUGH = (0.95, 3)
"""A training ends early when so many iterations in a row have such a score."""


@dataclasses.dataclass(frozen=True)
class Game:
    """An environment, and the scale of its returns."""

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
    "lake": Game("FrozenLake-v1", 20_000, 0.015, 1.0, NO_ICE),
    "lake 8x8": Game("FrozenLake8x8-v1", 80_000, 0.002, 1.0, NO_ICE),
    "cliff": Game("CliffWalking-v1", 60_000, -200.0, -13.0, {"max_episode_steps": 200}),
    "taxi": Game("Taxi-v4", 100_000, -200.0, 7.9),
    "cartpole": Game(
        "CartPole-v1", 40_000, 22.0, 500.0, describe=words_of_cartpole, instructions="Keep the pole upright."
    ),
    "empty": Game("MiniGrid-Empty-5x5-v0", 20_000, 0.158, 0.955, wrapper="ImgObsWrapper", instructions=""),
    "doorkey": Game("MiniGrid-DoorKey-5x5-v0", 100_000, 0.018, 0.965, wrapper="ImgObsWrapper", instructions=""),
}
MINDS = ("mlp", "scratch", "embedded", "embedded, scrambled", "smollm2", "smollm2, scrambled", "smollm2, random")


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
    name, _, change = mind.partition(", ")
    torch.manual_seed(seed)
    lm = LanguageModel.load("smollm2" if name == "smollm2" else "embedded")
    model = lm.model
    if name == "scratch" or change == "random":
        model = random_weights(model)
    if name == "smollm2":
        model = add_lora(model, "r=16,targets=q_proj+v_proj", seed=seed)
    plain = WordsPolicy.of(
        env, LanguageModel(model, lm.tokenizer), describe=game.describe, instructions=game.instructions, seed=seed
    )
    if change != "scrambled":
        return plain
    scrambled = Scrambled(game, plain)
    return WordsPolicy.of(
        env,
        plain.language_model,
        describe=scrambled,
        actions=scrambled.action_words,
        instructions=scrambled.instructions,
        seed=seed,
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
        config = dataclasses.replace(config, learning_rate=5e-4, minibatch_size=512)
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
        score, in_a_row = ENOUGH
        latest = curve[-in_a_row:]
        return len(latest) == in_a_row and all(row[1] >= score for row in latest)

    agent.learn(game.steps, on_iteration=note)
    seconds = time.process_time() - start
    after = evaluate(env, policy, num_episodes=EPISODES, seed=seed).mean_return
    reached = next(((steps, at) for steps, score, at in curve if score >= LEARNT), (None, None))
    parameters = [p for p in policy.parameters() if p.requires_grad]
    return {
        "game": name, "mind": mind, "seed": seed, "before": round(before, 3), "after": round(after, 3),
        "steps to .9": reached[0], "seconds to .9": reached[1], "steps": agent.steps, "seconds": round(seconds, 1),
        "trained parameters": sum(p.numel() for p in parameters), "curve": curve,
    }  # fmt: skip


def table(runs):
    """Markdown of all runs: medians over seeds, and how many seeds reached .9."""
    lines = [
        "| game | mind | seeds | before | after | reached .9 | steps to .9 | seconds to .9 | seconds |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for game in GAMES:
        for mind in MINDS:
            rows = [run for run in runs if (run["game"], run["mind"]) == (game, mind)]
            if not rows:
                continue
            reached = [run for run in rows if run["steps to .9"] is not None]
            steps = seconds = "never"
            if reached:
                steps = f"{statistics.median(run['steps to .9'] for run in reached):,.0f}"
                seconds = f"{statistics.median(run['seconds to .9'] for run in reached):,.0f}"
            after = ", ".join(f"{run['after']:.2f}" for run in rows)
            lines.append(
                f"| {game} | {mind} | {len(rows)} | {statistics.mean(run['before'] for run in rows):.2f} | {after} "
                f"| {len(reached)} of {len(rows)} | {steps} | {seconds} "
                f"| {statistics.median(run['seconds'] for run in rows):,.0f} |"
            )
    return "\n".join(lines)


def main():
    """Train what is asked for and not yet there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--games", default=",".join(GAMES))
    parser.add_argument("--minds", default=";".join(MINDS), help="separated by semicolons, or by commas without spaces")
    parser.add_argument("--seeds", default="1,2,3,4,5")
    parser.add_argument("--table", action="store_true", help="only print the table")
    arguments = parser.parse_args()
    runs = [json.loads(line) for line in RUNS.read_text().splitlines()] if RUNS.is_file() else []
    if not arguments.table:
        minds = re.split(r";|,(?! )", arguments.minds)
        unknown = [x for x in minds if x not in MINDS] + [x for x in arguments.games.split(",") if x not in GAMES]
        if unknown:
            parser.error(f"there is no {', '.join(unknown)}; games: {', '.join(GAMES)}; minds: {'; '.join(MINDS)}")
        RUNS.parent.mkdir(exist_ok=True)
        for seed in map(int, arguments.seeds.split(",")):
            check_at_least("seed", seed, 0)
            for game in arguments.games.split(","):
                for mind in minds:
                    if any((run["game"], run["mind"], run["seed"]) == (game, mind, seed) for run in runs):
                        continue
                    run = train(game, mind, seed)
                    runs.append(run)
                    with RUNS.open("a") as file:
                        file.write(json.dumps(run) + "\n")
                    print({key: value for key, value in run.items() if key != "curve"}, flush=True)
    print(table(runs))


if __name__ == "__main__":
    main()
