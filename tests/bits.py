"""Compare the bits of two checkouts: short trainings with the same seeds give the same weights and metrics.

    python tests/bits.py BEFORE AFTER    # folders; exit status 1 if any training differs

Metrics are compared without timings (``time/``), under the names of `KEYS`; config fields of the older checkout are
translated by the table of names of the newer one (`textenv.names`). Bits are those of one machine, so both run here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

KEYS: dict[str, str] = {}
"""New key of a metric -> its former key."""
NEW_KEYS = ("rollout/turns", "rollout/rows", "text/cut_turns")
"""Metrics that the older checkout does not have."""


def digest(tensors: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, str]:
    """Sha256 of weights by name order, and of metrics without timings."""
    weights = hashlib.sha256()
    for _, tensor in sorted(tensors.items()):
        weights.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    left_out = ("time/", "update/path", *NEW_KEYS)
    kept = [{KEYS.get(key, key): row[key] for key in row if not key.startswith(left_out)} for row in rows]
    metrics = hashlib.sha256(json.dumps([sorted(row.items()) for row in kept]).encode())
    return {"weights": weights.hexdigest()[:16], "metrics": metrics.hexdigest()[:16]}


def config(of: type, **values: Any) -> Any:
    """A config by former or present names of its fields."""
    from textenv.names import nearest

    known = [field.name for field in dataclasses.fields(of)]
    return of(**{name if name in known else nearest(name, known) or name: value for name, value in values.items()})


def trainings() -> Iterator[tuple[str, Callable[[], dict[str, str]]]]:
    """Name and what it does: train a few iterations, and digest."""
    import gymnasium

    import algos
    import textenv  # noqa: F401  (registers the environments)
    from algos import LMPolicy, LSTMPolicy, MLPPolicy, QPolicy, presets

    def train(agent: Any, steps: int) -> dict[str, str]:
        rows = agent.learn(steps, progress=False)
        return digest(dict(agent.policy.state_dict()), rows)

    def control(name: str, policy: type, settings: Any, env_id: str = "CartPole-v1", **options: Any) -> dict[str, str]:
        mode = "sync" if name in ("RLOO", "GRPO") else None  # groups need a seed for each slot
        env = gymnasium.make_vec(env_id, num_envs=8, vectorization_mode=mode)
        made = policy(env.single_observation_space, env.single_action_space, seed=3, **options)
        return train(getattr(algos, name)(env, made, settings), 3000)

    def text(name: str, settings: Any) -> dict[str, str]:
        from textenv import KLPenalty

        env = gymnasium.make_vec("textenv/Reviews-v0", num_envs=16)
        policy = LMPolicy.load("embedded", seed=3)
        agent = getattr(algos, name)(env, policy, settings, penalty=KLPenalty(policy.reference(), 0.1))
        return train(agent, 900)

    cartpole = {
        "PPO": presets.CARTPOLE, "A2C": presets.CARTPOLE_A2C, "REINFORCE": presets.CARTPOLE_REINFORCE,
        "RLOO": presets.CARTPOLE_RLOO, "GRPO": presets.CARTPOLE_GRPO, "TRPO": presets.CARTPOLE_TRPO,
    }  # fmt: skip
    for name, settings in cartpole.items():
        yield f"CartPole {name}", lambda name=name, settings=settings: control(name, MLPPolicy, settings)
    dqn = config(algos.DQNConfig, learning_starts=200, target_every=20)
    yield "CartPole DQN", lambda: control("DQN", QPolicy, dqn)
    variants = {
        "normalised observations and rewards": {"normalize_rewards": True},
        "target KL, clipped values": {"target_kl": 0.01, "value_clip_range": 0.2, "entropy_coefficient": 0.01},
        "micro-batches": {"micro_batch_size": 32, "minibatch_size": 64},
        "bare": {"steps": 64, "epochs": 3},
    }
    for name, values in variants.items():
        settings = config(algos.PPOConfig, **values)
        options = {"normalize_observations": name.startswith("normalised")}
        yield f"CartPole PPO, {name}", lambda s=settings, o=options: control("PPO", MLPPolicy, s, **o)
    lstm = config(algos.PPOConfig, steps=32, minibatch_size=4)
    yield "CartPole PPO, LSTM", lambda: control("PPO", LSTMPolicy, lstm)
    sde = dict(presets.RECIPES[("Pendulum-v1", "ppo")].policy_kwargs)
    kind = algos.GSDEPolicy if "GSDEPolicy" in algos.__all__ else MLPPolicy
    yield "Pendulum PPO, gSDE", lambda: control("PPO", kind, presets.PENDULUM, "Pendulum-v1", **sde)
    kwargs = {"episodes": 32}
    for name in ("PPO", "A2C", "REINFORCE", "RLOO", "GRPO", "TRPO"):
        settings = presets.recipe("textenv/Reviews-v0", name.lower()).config
        known = [field.name for field in dataclasses.fields(settings)]
        episodes = "episodes" if "episodes" in known else "num_episodes"
        settings = dataclasses.replace(settings, **{episodes: kwargs["episodes"]})
        yield f"Reviews {name}", lambda name=name, settings=settings: text(name, settings)


def main() -> int:
    """Run both checkouts, each in a process of its own, and print what differs."""
    if len(sys.argv) == 1:
        import torch

        torch.set_num_threads(1)
        for name, run in trainings():
            print(json.dumps({name: run()}), flush=True)
        return 0
    found = []
    for checkout in sys.argv[1:]:
        environment = os.environ | {"PYTHONPATH": str(Path(checkout).resolve())}
        command = [sys.executable, "-P", str(Path(__file__).resolve())]  # tests/algos would shadow algos
        lines = subprocess.run(command, env=environment, cwd=checkout, check=True, capture_output=True, text=True)
        found.append({k: v for line in lines.stdout.splitlines() for k, v in json.loads(line).items()})
    before, after = found
    for name in before | after:
        same = before.get(name) == after.get(name)
        print(f"{'same' if same else 'DIFFERS':8} {name}", "" if same else (before.get(name), after.get(name)))
    return int(before != after)


if __name__ == "__main__":
    sys.exit(main())
