"""SAC and TD3 beside Stable-Baselines3's, in turn in one process on one thread: milliseconds of processor time a step.

    python examples/benchmarks/off_policy.py
    python examples/benchmarks/off_policy.py --env HalfCheetah-v5 Pendulum-v1 --json docs/results/data/off-policy.json
    python examples/benchmarks/off_policy.py --env HalfCheetah-v5 --trained 5000

A step is one of the environment and one update: batches of 256, two hidden layers of 256, one environment. Other work
on the machine slows both alike, because they alternate. The ratio is theirs divided by ours. With ``--trained``, both
have trained for so many steps before: after some thousand updates, Adam's averages of hidden units that are off are
subnormal numbers, which slow a CPU down; ours clears them (`algos.fast.adam`). Below the table is the processor time of
the bare matrix products of an update of SAC, which no implementation can leave out.
"""

import argparse
import shlex
import sys
import time
from pathlib import Path

import gymnasium
import stable_baselines3
import torch
from alternation import row
from page import machine, print_and_save

import algos

HIDDEN = (256, 256)
WARM_UP = 300
"""Steps before the first update and before the first measurement."""


def our_agent(name, env_id, trained):
    """Our agent after its warm-up and ``trained`` steps."""
    env = gymnasium.make_vec(env_id, num_envs=1)
    policy = algos.make_policy(env, policy=name.lower(), hidden=HIDDEN)
    agent = getattr(algos, name)(env, policy, learning_starts=WARM_UP)
    agent.learn(WARM_UP + 32 + trained)
    return agent


def their_agent(name, env_id, trained):
    """Stable-Baselines3's agent after its warm-up and ``trained`` steps."""
    agent = getattr(stable_baselines3, name)(
        "MlpPolicy", env_id, learning_starts=WARM_UP, device="cpu", policy_kwargs={"net_arch": list(HIDDEN)}
    )
    agent.learn(WARM_UP + 32 + trained)
    agent.learning_starts = 0  # each further call of learn counts its steps anew
    return agent


def milliseconds(agent, steps):
    """Processor time of each step of a further training."""
    start = time.process_time()
    agent.learn(steps)
    return 1e3 * (time.process_time() - start) / steps


def product_milliseconds(rows, inputs, outputs, repetitions=200):
    """Processor time of one product of ``[rows, inputs]`` and ``[inputs, outputs]``."""
    left = torch.randn(rows, inputs)
    right = torch.randn(inputs, outputs)
    for _ in range(repetitions // 10):
        torch.mm(left, right)
    start = time.process_time()
    for _ in range(repetitions):
        torch.mm(left, right)
    return 1e3 * (time.process_time() - start) / repetitions


def products_of_an_update(observations, actions, batch=256):
    """Processor time of the matrix products of one update of SAC, in milliseconds."""
    (width, _) = HIDDEN
    # A critic: forwards, for the gradient of its weights, and for that of its input
    hidden = product_milliseconds(batch, width, width)
    critic_forward = product_milliseconds(batch, observations + actions, width) + hidden
    critic_weights = (
        hidden + product_milliseconds(width, batch, width) + product_milliseconds(width, batch, observations + actions)
    )
    critic_input = hidden + product_milliseconds(batch, width, observations + actions)

    # The actor, whose output has a mean and a deviation for each action
    output = product_milliseconds(batch, width, 2 * actions)
    actor_forward = product_milliseconds(batch, observations, width) + hidden + output
    actor_weights = (
        2 * output
        + hidden
        + product_milliseconds(width, batch, width)
        + product_milliseconds(width, batch, observations)
    )

    # Targets, the critics' update, and the actor's through both critics
    targets = actor_forward + 2 * critic_forward
    critics = 2 * (critic_forward + critic_weights)
    actor = actor_forward + actor_weights + 2 * (critic_forward + critic_input)
    return targets + critics + actor


def measure(name, env_id, *, rounds, steps, trained):
    """A row of the table: pairs of trainings of an algorithm on an environment."""
    ours = our_agent(name, env_id, trained)
    theirs = their_agent(name, env_id, trained)
    pairs = [(milliseconds(ours, steps), milliseconds(theirs, steps)) for _ in range(rounds)]
    our_times, their_times = zip(*pairs, strict=True)
    case = f"{env_id}, {name}"
    if trained:
        case += f", after {trained:,} steps"
    return row("off-policy", case, unit="ms", peer_name="Stable-Baselines3", ours=our_times, peer=their_times)


def main():
    """Print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", nargs="+", default=["Pendulum-v1"])
    parser.add_argument("--rounds", type=int, default=12, help="pairs of measurements")
    parser.add_argument("--steps", type=int, default=64, help="steps of each measurement")
    parser.add_argument("--trained", type=int, default=0, help="steps of training before the first measurement")
    parser.add_argument("--json", type=Path, help="write the table to this file of docs/results/data")
    options = parser.parse_args()
    torch.set_num_threads(1)
    about = machine("python " + " ".join(map(shlex.quote, sys.argv)))

    # The table
    rows = []
    for env_id in options.env:
        for name in ("SAC", "TD3"):
            rows.append(measure(name, env_id, rounds=options.rounds, steps=options.steps, trained=options.trained))
    print_and_save(rows, about, options.json, kinds=["algorithms"])

    # What no implementation can leave out
    for env_id in options.env:
        env = gymnasium.make(env_id)
        bare = products_of_an_update(env.observation_space.shape[0], env.action_space.shape[0])
        print(f"{env_id}: the matrix products of an update of SAC alone take {bare:.1f} ms.")


if __name__ == "__main__":
    main()
