"""Four shaped rewards for CartPole, compared over five seeds by what they are a substitute for: steps upright.

    python examples/shaped_rewards.py    # 25 trainings

CartPole pays 1 a step, whatever the pole does. Each variant pays between 0 and 1 instead, more where the state is good:
the pole's angle, the cart's position, their product, or energy (potential minus kinetic energy of the pole). Each is a
`gymnasium.Wrapper`, as `algos train CartPole-v1 --wrapper examples/shaped_rewards.py:Angle` takes it. The agents see
shaped rewards only. The table shows the training steps until an episode lasts 475 steps in the mean, and of the trained
policy how long the pole stands (at most 500, the return of CartPole itself) and how steady it is.
"""

import argparse
import json
import sys
from math import cos
from pathlib import Path
from statistics import mean

import gymnasium

from algos import Case, evaluate, load
from algos.lab.comparison.compare import compare

ANGLE, POSITION, LENGTH, GRAVITY = 0.2095, 2.4, 0.5, 9.8  # limits in rad and m; half of the pole in m; m/s²
LEARNT = 475  # mean number of steps upright in an iteration


class Shaped(gymnasium.Wrapper):
    """Pay `shape` of the state that a step leads to."""

    def step(self, action):
        observation, _, terminated, truncated, info = self.env.step(action)
        return observation, min(max(self.shape(*map(float, observation)), 0.0), 1.0), terminated, truncated, info


class Angle(Shaped):
    """The pole is upright."""

    def shape(self, x, speed, angle, turning):
        return 1 - abs(angle) / ANGLE


class Position(Shaped):
    """The cart is central."""

    def shape(self, x, speed, angle, turning):
        return 1 - abs(x) / POSITION


class Product(Shaped):
    """Both."""

    def shape(self, x, speed, angle, turning):
        return (1 - abs(angle) / ANGLE) * (1 - abs(x) / POSITION)


class Energy(Shaped):
    """The pole is high and does not turn."""

    def shape(self, x, speed, angle, turning):
        return cos(angle) - 2 / 3 * LENGTH * turning**2 / GRAVITY  # in units of m g l, about the pivot


VARIANTS = {"none": [], "angle": [Angle], "position": [Position], "product": [Product], "energy": [Energy]}


def main(seeds=5, total_steps=50_000, run_dir=Path("runs/shaped_rewards"), processes=2, file=None):
    sys.path.append(str(Path(__file__).parent / "benchmarks"))
    from page import machine, save_table

    about, table = machine("python " + " ".join(sys.argv)), []
    cases = [
        Case("CartPole-v1", name=name, env_kwargs={"wrappers": wrappers}, num_envs=8)
        for name, wrappers in VARIANTS.items()
    ]
    compare(cases, seeds=seeds, run_dir=run_dir, total_steps=total_steps, processes=processes, overwrite=True)
    rows = {}
    print(f"\n{'reward':10} {'steps to learn [each seed]':48} upright  within .05 rad  within .5 m")
    for name in VARIANTS:
        found = []
        for seed in range(1, seeds + 1):
            env = gymnasium.make_vec("CartPole-v1", num_envs=20)
            folder = run_dir / f"CartPole-v1-{name}-{seed}"
            played = evaluate(env, load(folder), num_episodes=20, seed=seed)
            x, _, angle, _ = played.rollout["observation"][played.rollout["mask"]].unbind(-1)
            near = [(part.abs() < limit).float().mean().item() for part, limit in ((angle, 0.05), (x, 0.5))]
            log = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
            learnt = (now["steps"] for now in log if now.get("episode/length", 0) >= LEARNT)
            found.append([next(learnt, total_steps), played.mean_return, *near])
        steps, *others = zip(*found, strict=True)
        rows[name] = steps, *map(mean, others)
        each = f"{mean(steps):.0f} [{', '.join(map(str, steps))}]"
        print("{:10} {:48} {:7.0f} {:15.2f} {:12.2f}".format(name, each, *rows[name][1:]))
        table.append([name, each, *(f"{x:.2f}" for x in rows[name][2:])])
    if file is not None:
        columns = [
            "reward",
            f"steps until an episode lasts {LEARNT}, mean [each seed]",
            "within .05 rad",
            "within .5 m",
        ]
        save_table(file, columns, table, about, kind="control")
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--total-steps", type=int, default=50_000)
    parser.add_argument("--json", type=Path, help="write the table to this file too, as docs/results has it")
    options = parser.parse_args()
    main(options.seeds, options.total_steps, file=options.json)
