"""SAC and TD3 beside Stable-Baselines3's, in turn in one process on one thread: milliseconds of processor time a step.

    python examples/benchmarks/off_policy.py
    python examples/benchmarks/off_policy.py --env HalfCheetah-v5 --rounds 20

A step is one of the environment and one update: batches of 256, two hidden layers of 256, one environment. Other work
on the machine slows both alike, because they alternate. The ratio is theirs divided by ours.
"""

import argparse
import statistics
import time

import gymnasium
import stable_baselines3
import torch

import algos

HIDDEN = (256, 256)
WARM_UP = 300
"""Steps before the first update and before the first measurement."""


def our_agent(name, env_id):
    """Our agent after its warm-up."""
    env = gymnasium.make_vec(env_id, num_envs=1)
    policy = algos.make_policy(env, policy=name.lower(), hidden=HIDDEN)
    agent = getattr(algos, name)(env, policy, learning_starts=WARM_UP)
    agent.learn(WARM_UP + 32)
    return agent


def their_agent(name, env_id):
    """Stable-Baselines3's agent after its warm-up."""
    agent = getattr(stable_baselines3, name)(
        "MlpPolicy", env_id, learning_starts=WARM_UP, device="cpu", policy_kwargs={"net_arch": list(HIDDEN)}
    )
    agent.learn(WARM_UP + 32)
    agent.learning_starts = 0  # each further call of learn counts its steps anew
    return agent


def milliseconds(agent, steps):
    """Processor time of each step of a further training."""
    start = time.process_time()
    agent.learn(steps)
    return 1e3 * (time.process_time() - start) / steps


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="Pendulum-v1")
    parser.add_argument("--rounds", type=int, default=12, help="pairs of measurements")
    parser.add_argument("--steps", type=int, default=64, help="steps of each measurement")
    options = parser.parse_args()
    torch.set_num_threads(1)

    print("| | ours, ms | Stable-Baselines3, ms | ratio | lowest, highest of the pairs |")
    print("| --- | --- | --- | --- | --- |")
    for name in ("SAC", "TD3"):
        ours = our_agent(name, options.env)
        theirs = their_agent(name, options.env)
        pairs = [
            (milliseconds(ours, options.steps), milliseconds(theirs, options.steps)) for _ in range(options.rounds)
        ]
        ratios = [peer / own for own, peer in pairs]
        our_median = statistics.median(own for own, _ in pairs)
        their_median = statistics.median(peer for _, peer in pairs)
        print(
            f"| {name} | {our_median:.1f} | {their_median:.1f} | {statistics.median(ratios):.2f} | "
            f"{min(ratios):.2f}, {max(ratios):.2f} |"
        )


if __name__ == "__main__":
    main()
