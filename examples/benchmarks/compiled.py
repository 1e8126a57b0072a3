"""Seconds of an update computed by autograd, with `torch.compile`, and in closed form: CartPole and tiny text.

    OMP_NUM_THREADS=1 python examples/benchmarks/compiled.py     # two minutes; compiling needs a C++ compiler

The agents take turns, so that what else the machine does slows all of them. The first updates, which compile, are shown
apart.
"""

import statistics
import time

import gymnasium
import torch

from algos import PPO, PPOConfig, presets
from algos.make import make_vector_environment

UPDATES = {"CartPole": 30, "text": 6}
"""Updates of each agent; the first third is not counted."""


def make_agent(world):
    if world == "text":
        return PPO(make_vector_environment("textenv/Reviews-v0", num_envs=64), None, presets.TEXT_EMBEDDED, kl_coef=0.1)
    env = gymnasium.make_vec("CartPole-v1", num_envs=64)
    return PPO(env, None, PPOConfig(num_steps=32, minibatch_size=512, num_epochs=4))


def spent(agent, closed_form):
    """Seconds of an update on the agent's next rollout."""
    rollout = agent.collect()
    if agent.penalty is not None:
        agent.penalty(rollout, agent.policy)
    agent.in_closed_form = closed_form
    start = time.perf_counter()
    agent.update(rollout)
    return time.perf_counter() - start


def main():
    print("| world | path | ms an update, median | first updates, s | autograd / this |\n" + "| --- " * 5 + "|")
    for world, count in UPDATES.items():
        ways = {"autograd": False, "compiled": False} | ({"closed form": True} if world == "CartPole" else {})
        agents = {name: make_agent(world) for name in ways}
        compiled = agents["compiled"].policy
        compiled.evaluate = torch.compile(compiled.evaluate, dynamic=True)
        found = {name: [] for name in ways}
        for _ in range(count):
            for name, closed_form in ways.items():
                found[name].append(spent(agents[name], closed_form))
        first = count // 3
        for name, seconds in found.items():
            own, plain = (statistics.median(each[first:]) for each in (seconds, found["autograd"]))
            print(f"| {world} | {name} | {1e3 * own:.1f} | {sum(seconds[:first]):.1f} | {plain / own:.2f} |")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
