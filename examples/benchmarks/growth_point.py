"""One point of a curve: PPO iterations of a size, in a process of its own. Run by ``growth.py``.

python examples/benchmarks/growth_point.py text --batch 64 --vocabulary 8192 --iterations 3
python examples/benchmarks/growth_point.py control --environments 256

Prints one line ``RESULT {...}``; seconds are the processor's.
"""

import argparse
import json
import statistics
import time

import torch
from peak_memory import PeakMemory, status

CONTROL_STEPS, CONTROL_MINIBATCHES, CONTROL_EPOCHS = 32, 4, 4


def text_agent(options):
    """The token-set task on a GPT-2 of 2 layers, 128 wide; one epoch of four minibatches, no EOS."""
    from text_task import Shape, make_agent

    shape = Shape(vocabulary=options.vocabulary, layers=2, width=128, heads=4)
    return make_agent(shape, batch=options.batch, new_tokens=options.response, num_epochs=1, ending=0.0)


def control_agent(options):
    """PPO on CartPole in that many environments, 32 steps each; minibatches grow with them."""
    import gymnasium

    from algos import PPO, MLPPolicy, PPOConfig

    env = gymnasium.make_vec("CartPole-v1", num_envs=options.environments)
    policy = MLPPolicy(env.single_observation_space, env.single_action_space, seed=0)
    steps = options.environments * CONTROL_STEPS
    config = PPOConfig(
        num_steps=CONTROL_STEPS,
        minibatch_size=steps // CONTROL_MINIBATCHES,
        num_epochs=CONTROL_EPOCHS,
        learning_rate=1e-4,
    )
    return PPO(env, policy, config)


def measure(agent, iterations):
    """Seconds of each iteration after the first, resident memory after each, and the peak above what stood before."""
    memory, clock, resident, steps = PeakMemory(), [], [], []
    memory.start()

    def enough(metrics):
        clock.append(time.process_time())
        resident.append(status("VmRSS"))
        steps.append(metrics["rollout/steps"])
        return len(clock) > iterations

    agent.learn(10**12, on_iteration=enough)
    seconds = [after - before for before, after in zip(clock, clock[1:], strict=False)]
    per_step = [second / count for second, count in zip(seconds, steps[1:], strict=True)]
    return {
        "seconds": statistics.median(seconds),
        "per_step": per_step,
        "resident_mb": resident[1:],
        "steps": statistics.median(steps[1:]),
    } | memory.metrics()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["text", "control"])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--response", type=int, default=48)
    parser.add_argument("--vocabulary", type=int, default=260)
    parser.add_argument("--environments", type=int, default=64)
    parser.add_argument("--iterations", type=int, default=5)
    torch.set_num_threads(1)
    options = parser.parse_args()
    agent = (text_agent if options.kind == "text" else control_agent)(options)
    print("RESULT " + json.dumps(measure(agent, options.iterations)), flush=True)
