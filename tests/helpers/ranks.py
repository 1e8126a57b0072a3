"""One of several processes that train together; started by torchrun, by fork, or alone.

python tests/helpers/ranks.py update FOLDER              # one update of every agent on the rollouts in the folder,
                                                         # of several ranks with whole and with shared weights
python tests/helpers/ranks.py train RUN ...              # trainings one after another, each a `Run` as JSON
python tests/helpers/ranks.py fail FOLDER                # an error on the last rank alone

`train_in_processes` and `train_as_torchrun_starts_it` do the same by fork, after the imports, which take longest.
"""

import itertools
import json
import os
import signal
import socket
import sys
import traceback
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.multiprocessing.spawn import start_processes

from algos import PPO, LMPolicy, PPOConfig
from algos.policies.critic import Critic
from algos.ranks import collectives
from algos.ranks.sharding import Shards
from algos.training.loop import iterate
from algos.training.metrics import EpisodeMeter
from tests.helpers.conversations import Parrot
from tests.helpers.models import WORDS, make_gpt2, make_tokenizer
from tests.helpers.resumable_agents import AGENTS, TOTAL, text
from textenv import KLPenalty, TokenVectorEnv

TEXT = PPOConfig(num_steps=None, num_episodes=8, minibatch_size=4, micro_batch_size=2, bootstrap_truncated=False)


def ppo_lora():
    """Adapters and a value head that is fitted; the reference computes with the policy's own frozen weights."""
    from textenv.lm.loading import add_lora

    return text(
        PPO, replace(TEXT, fit_value_head=True), make=lambda: add_lora(make_gpt2(), "r=2,targets=c_attn", seed=0)
    )


def ppo_critic():
    """A critic of its own, and layers whose activations are computed again."""

    def options():
        critic = Critic.from_language_model(LMPolicy(make_gpt2(seed=1), make_tokenizer(WORDS)).lm)
        return {"critic": critic, "gradient_checkpointing": True}

    return text(PPO, replace(TEXT, value_max_grad_norm=0.5), policy_options=options)


def ppo_autocast():
    return text(PPO, TEXT, policy_options=lambda: {"autocast": torch.bfloat16})


def ppo_history():
    """Episodes of three rows, whose last steps are followed by the first ones of other rows."""
    tokenizer = make_tokenizer(WORDS)
    env = TokenVectorEnv(Parrot, tokenizer=tokenizer, num_envs=4, max_prompt_tokens=4, max_new_tokens=4, history=1)
    policy = LMPolicy(make_gpt2(), tokenizer)
    return PPO(env, policy, replace(TEXT, fit_value_head=True), penalty=KLPenalty(policy.reference(), 0.1))


OWN = {make.__name__: make for make in (ppo_lora, ppo_critic, ppo_autocast, ppo_history)}
UPDATED = ("ppo_cartpole", "ppo_sde", "ppo_lstm", "a2c", "grpo_control", "ppo_text", "ppo_seq2seq", "grpo_text", *OWN)
AGENTS = AGENTS | OWN


@dataclass
class Run:
    """A training with checkpoints, from the start or resumed."""

    name: str
    """Key in `AGENTS`."""
    folder: str
    iterations: int
    shard: bool = False
    """Whether the ranks share the weights."""
    resume: bool = False
    """Whether the folder's run goes on, if there is one."""
    killed_at: int | None = None
    """Step of its environment at which the last rank is killed, once."""


def weights(agent):
    """All weights as one vector."""
    return torch.cat([x.detach().flatten() for x in agent.policy.parameters()])


def made(name, *, shard):
    former = AGENTS[name]()
    # A rounding error of the gradient stays one of the weights, as Adam divides by no small number.
    config = replace(former.config, adam_eps=1e-3)
    if hasattr(config, "num_epochs"):
        config = replace(config, num_epochs=2)
    agent = type(former)(former.env, former.policy, config, penalty=former.penalty)
    if isinstance(agent, PPO):
        agent.auxiliary = former.auxiliary
    agent.shards = Shards(agent.policy) if shard else None
    return agent


def cases(count):
    """Agents that so many ranks update, each with whole weights or with shared ones ("1").

    Three ranks update all: rows, steps and weights do not divide by three. Two, which divide them, update a few kinds.
    """
    names = UPDATED
    if count == 2:
        names = ["ppo_cartpole", "ppo_text", "ppo_lstm", "ppo_critic"]
    shards = ("", "1")
    if count == 1:
        shards = ("",)
    return list(itertools.product(names, shards))


def update(folder):
    """One update of every agent, on a rollout that one process has collected."""
    for name, shard in cases(collectives.world_size()):
        agent = made(name, shard=shard)
        path = folder / f"{name}.pt"
        if collectives.world_size() == 1:
            torch.save(agent.collect(), path)
        rollout = torch.load(path, weights_only=False)
        metrics = iterate(agent, (EpisodeMeter(), EpisodeMeter()), rollout=rollout)
        compared = {name: x for name, x in metrics.items() if not name.startswith(("time/", "text/", "reward"))}
        path = folder / f"{name}-{collectives.world_size()}-{collectives.rank()}{shard}.pt"
        torch.save((weights(agent), compared), path)


def after(env, steps, act):
    """Act at this step of the environment."""
    step, left = env.step, itertools.count(steps, -1)

    def counted(action):
        if not next(left):
            act()
        return step(action)

    env.step = counted


def train(run):
    """Train, and save the weights of each rank."""
    agent = made(run.name, shard=run.shard)
    folder = Path(run.folder)
    marker = folder.with_suffix(".killed")
    if run.killed_at is not None and collectives.rank() == collectives.world_size() - 1 and not marker.exists():

        def kill():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

        after(agent.env, run.killed_at, kill)
    resume = folder if run.resume else None
    agent.learn(
        TOTAL, run_dir=folder, checkpoint_every=1, resume=resume,
        on_iteration=lambda metrics: metrics["iteration"] >= run.iterations,
    )  # fmt: skip
    torch.save(weights(agent), folder / f"weights-{collectives.rank()}.pt")


def fail(folder):
    """Training in which the last rank has an error in its second iteration."""
    agent = AGENTS["ppo_cartpole"]()
    if collectives.rank() == collectives.world_size() - 1:

        def fall():
            raise OSError("the last rank's environment has broken")

        after(agent.env, 20, fall)
    agent.learn(TOTAL, run_dir=folder)


def work(command, arguments):
    """Carry out the command in this process, one of those that train together."""
    torch.set_num_threads(1)
    collectives.start()
    if collectives.world_size() == 3:
        collectives.LARGE_GRADIENT_ELEMENTS = 100  # gradients in messages of their own
    if command == "train":
        for run in arguments:
            train(Run(**json.loads(run)))
    else:
        {"update": update, "fail": fail}[command](Path(arguments[0]))


def work_and_show_errors(command, arguments):
    """As `work`; torchrun's agent itself shows the first error only, which may be another rank's lost connection."""
    try:
        work(command, arguments)
    except Exception:
        traceback.print_exc()
        raise


def work_forked(rank, count, port, command, arguments):
    """As `work`, with the variables that torchrun would set."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    work(command, arguments)


def free_port():
    with socket.socket() as unused:
        unused.bind(("localhost", 0))
        return unused.getsockname()[1]


def train_as_torchrun_starts_it(count, restarts, command, arguments):
    """As `work` in processes of torchrun's agent, but these fork from this one, and so share its imports."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=count, max_restarts=restarts, start_method="fork",
        rdzv_backend="c10d", rdzv_endpoint="localhost:0", run_id="test",
    )  # fmt: skip
    elastic_launch(config, work_and_show_errors)(command, arguments)


def train_in_processes(counts, command, arguments):
    """As `work` in so many processes without torchrun; first in as many as the first number says."""
    for count in counts:
        start_processes(work_forked, (count, free_port(), command, arguments), count, start_method="fork")


if __name__ == "__main__":
    work(sys.argv[1], sys.argv[2:])
