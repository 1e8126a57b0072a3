"""Train a language model through a harness of the package verifiers: it asks, verifiers scores, PPO learns.

    python examples/train_harness.py
    python examples/train_harness.py --taskset my_taskset --model smollm2

A harness is a program that asks a model for chats at the address of an endpoint. Here this endpoint is a gateway to the
policy that is being trained. verifiers names each episode in a header of its requests, and the gateway takes it as the
name of the session; the reward is sent as soon as verifiers has scored the episode.
"""

import argparse
import asyncio
import itertools
import os
import sys
import threading
from pathlib import Path

import httpx
from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

from algos import PPO, LMPolicy, PPOConfig
from textenv import Gateway

sys.path.append(str(Path(__file__).parent / "worlds"))
KEY = "GATEWAY_KEY"
"""Environment variable with the gateway's key, for verifiers."""


async def play(gateway, taskset, at_once):
    """Play the tasks of a taskset over and over, so many at once, until the gateway is closed."""
    os.environ[KEY] = gateway.token
    agent = {"runtime": {"type": "subprocess"}}
    env = load_environment(resolve_env_config({"taskset": {"id": taskset}, "agent": agent}))
    tasks = itertools.cycle(list(env.taskset))
    client = EvalClientConfig(base_url=f"{gateway.url}/v1", api_key_var=KEY)
    context = ModelContext(client=client, model="policy")
    headers = {"Authorization": f"Bearer {gateway.token}"}

    async def play_tasks(http):
        while True:
            episode = await env.run_episode(next(tasks), context)
            for trace in episode.traces:
                reward = trace.reward if trace.ok else None
                reply = await http.post(f"/sessions/{trace.id}/reward", json={"reward": reward})
                reply.raise_for_status()

    async with env.serving(), httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=None) as http:
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(at_once):
                    group.create_task(play_tasks(http))
        except* httpx.HTTPError:
            pass  # the gateway is closed


def main(taskset="praise_harness", model="embedded", *, total_steps=20_000, num_envs=16, learning_rate=1e-3, log=print):
    """Train; return the history."""
    policy = LMPolicy.load(model)
    if policy.tokenizer.chat_template is None:  # the embedded model knows sentences, and no chats
        policy.tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    env = Gateway(tokenizer=policy.tokenizer, num_envs=num_envs, max_new_tokens=12, max_length=96)
    player = threading.Thread(target=lambda: asyncio.run(play(env, taskset, num_envs)), daemon=True)
    player.start()
    config = PPOConfig(
        num_steps=None, num_episodes=4 * num_envs, minibatch_size=num_envs, learning_rate=learning_rate, gamma=1.0
    )
    history = PPO(env, policy, config).learn(total_steps, on_iteration=log)
    env.close()
    player.join()
    return history


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--taskset", default="praise_harness", help="an installed taskset, or a module with one")
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--total-steps", type=int, default=20_000)
    options = parser.parse_args()
    main(options.taskset, options.model, total_steps=options.total_steps)
