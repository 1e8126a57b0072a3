"""What a first run on a GPU must show, one check a process; `first_hour.py` runs them all.

    python examples/benchmarks/gpu_checks.py devices --device cuda
    python examples/benchmarks/gpu_checks.py token --device second     # no GPU: the device that tests simulate

A check prints ``RESULT`` and its figure, or ends with an error. Waits for the GPU are counted by
`torch.cuda.set_sync_debug_mode`. Without a GPU they are counted on the device of tests/helpers/second_device.py, by the
operations that wait on CUDA: that shows what the library asks for, not what CUDA's own kernels do.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import gymnasium  # noqa: E402
import torch  # noqa: E402
from gpu import CPU, make_env, make_policy, ready  # noqa: E402
from waits import CountedOperations, Named, Waits, counted_on_cuda, judged, waits_inside  # noqa: E402

from algos import DQN, PPO, SAC, LMPolicy, PPOConfig  # noqa: E402
from algos.policies.critic import Critic  # noqa: E402
from tests.helpers.device_runs import Pictures  # noqa: E402
from textenv.rollout import to_device  # noqa: E402

SIMULATED = "second"
"""Name of the device of tests/helpers/second_device.py."""
ON_THE_CPU = {
    "reward_normalizer": "statistics of rewards",
    "collector": "observations and action masks of the environment",
    "buffer": "the replay buffer, of which only samples are moved",
    "policy.memory": "random streams",
}
"""Parts of an agent whose tensors belong on the CPU (docs/runs.md, "Devices")."""


PACKAGES = ("algos", "textenv", "torch", "torchrl", "tensordict", "transformers", "peft")
"""Packages whose objects `named_tensors` looks into."""


def named_tensors(holder, name="", seen=None):
    """Yield the name and tensor of everything that an object holds, its environment left out."""
    seen = set() if seen is None else seen
    if id(holder) in seen or name.endswith((".env", ".tokenizer", ".lm.model.config")):
        return
    seen.add(id(holder))
    if isinstance(holder, torch.Tensor):
        yield name.strip("."), holder
        return

    # What the object holds: entries, or attributes
    if isinstance(holder, Mapping):
        parts = [(_key(key), value) for key, value in holder.items()]
    elif isinstance(holder, (list, tuple)):
        parts = list(enumerate(holder))
    elif type(holder).__module__.split(".")[0] in PACKAGES:
        parts = list(getattr(holder, "__dict__", {}).items())
    else:
        return
    for key, value in parts:
        # Modules hold their tensors in these dictionaries, whose names say nothing
        inner = name if key in ("_parameters", "_buffers", "_modules") else f"{name}.{key}"
        yield from named_tensors(value, inner, seen)


def _key(key):
    """Name of a dictionary's key; Adam's state has parameters as keys."""
    if isinstance(key, torch.Tensor):
        return f"weight of shape {tuple(key.shape)}"
    return key


def misplaced(tensors, device):
    """Sentences on tensors, by name, that are on another type of device and not `ON_THE_CPU`."""
    wrong = []
    for name, tensor in tensors:
        place = tensor.device.type
        by_design = place == "cpu" and any(name == part or name.startswith(f"{part}.") for part in ON_THE_CPU)
        if place != torch.device(device).type and not by_design:
            wrong.append(f"{name} is on {tensor.device}")
    return wrong


def devices(device):
    """Train each kind of agent for an iteration, and look where its tensors and those of its rollout are."""
    counts = Counter()
    wrong = []
    for kind, agent in agents(device).items():
        rollouts = []
        update = agent.update

        def recorded(rollout, update=update, rollouts=rollouts):
            metrics = update(rollout)
            rollouts.append(rollout)
            return metrics

        agent.update = recorded
        agent.learn(64)
        del agent.update
        tensors = [*named_tensors(agent)]
        for rollout in rollouts[-1:]:
            tensors += [(f"rollout.{name}", column) for name, column in rollout.items() if torch.is_tensor(column)]
        counts[kind] = len(tensors)
        wrong += [f"{kind}: {sentence}" for sentence in misplaced(tensors, device)]
    if wrong:
        raise AssertionError("; ".join(wrong[:20]))
    return {"figure": f"{sum(counts.values())} tensors of {len(counts)} agents on {device}", "tensors": counts}


def agents(device):
    """Text with a value head, text with a critic, and three control algorithms: small ones, made on the CPU."""
    return {
        "text, value head": text_agent(device),
        "text, critic": text_agent(device, with_critic=True),
        "PPO": control_agent(device),
        "PPO, several choices": PPO(gymnasium.make_vec("textenv-checks/Choices-v0", num_envs=4), device=device,
                                    num_steps=8, minibatch_size=16),
        "DQN": DQN(gymnasium.make_vec("CartPole-v1", num_envs=4), device=device, learning_starts=8, batch_size=4),
        "SAC": SAC(gymnasium.make_vec("Pendulum-v1", num_envs=4), device=device, learning_starts=8, batch_size=4),
    }  # fmt: skip


class Choices(Pictures):
    """Numbers instead of pictures, so that the policy is an MLP."""

    observation_space = gymnasium.spaces.Box(-1, 1, (3,))


gymnasium.register("textenv-checks/Choices-v0", Choices)


def text_agent(device, *, with_critic=False, dtype=torch.float32, **options):
    """PPO with a KL penalty on a decoder of two layers; 2 minibatches an update."""
    policy = make_policy(CPU, "cpu", dtype=dtype, **options)
    if with_critic:
        policy = LMPolicy(policy.lm.model, policy.tokenizer, critic=Critic.from_language_model(policy.lm))
    env = make_env(policy, CPU)
    config = PPOConfig(
        num_steps=None, num_episodes=8, minibatch_size=4, num_epochs=1, gamma=1.0, bootstrap_truncated=False
    )
    return PPO(env, policy, config, kl_coef=0.1, device=_device(device))


def control_agent(device):
    """PPO on CartPole; 4 minibatches an update."""
    env = gymnasium.make_vec("CartPole-v1", num_envs=8)
    return PPO(env, device=_device(device), num_steps=16, minibatch_size=32, num_epochs=1)


def _device(name):
    return "auto" if name == SIMULATED else name


# Waits and copies of the inner loops


UPDATE = {
    "algos/optimizer.py:_finite": Named("whether loss and gradient are finite, before the step is taken", each=2),
    "algos/advantages.py:gae": Named("GAE is computed on the CPU", once=8),
    "algos/advantages.py:after_waiting": Named("whether an environment made a slot wait", once=1),
    "algos/minibatches.py:shuffle_and_split": Named(
        "rows with steps, and the random order, which the CPU draws", once=3
    ),
    "algos/training/invariants.py:check_finite": Named("check of the advantages", once=2),
    "algos/training/invariants.py:check_inert": Named("check of the advantages", once=3),
    "algos/training/invariants.py:check_whitened": Named("check of the first minibatch", once=4),
    "algos/training/invariants.py:check_first": Named("check of the first minibatch", once=2),
    "textenv/rollout.py:ratio_gap": Named("check of the first minibatch", once=2),
    "algos/training/metrics.py:MetricMeans.result": Named("metrics, all at once", once=1),
}
LOOPS = {
    "token": {
        "algos/collection.py:Collector.play_episodes": Named(
            "the tokens, of which the environment asks whether they end a text", 1
        ),
        "textenv/rollout.py:LogProbs.added_to": Named("log-probabilities of all tokens at once", once=1),
        "algos/policies/lm.py:LMPolicy.act": Named("random numbers and allowed tokens, before the pass begins", 2),
        "textenv/lm/decoding.py:Decoder._read_next": Named("tokens and positions, before the pass begins", 2),
        "textenv/lm/decoding.py:Decoder._extend": Named("prompts, once for each time that slots are filled", once=5),
        "textenv/lm/decoding.py:Decoder.logits": Named("which slots are filled", once=2),
    },
    "update": UPDATE | {
        "textenv/lm/memory.py:trunk_output": Named("transformers reads whether the mask has padding", 1, 1),
        "textenv/lm/model.py:LanguageModel.score": Named("number of steps, for their logits alone are computed", 1),
        "algos/advantages.py:whiten": Named("whether the mask has a False entry, and the number of True ones", once=2),
    },
    "control": {
        "algos/fast/towers.py:act": Named("observations, from an environment on the CPU", 1),
        "algos/policies/policy.py:ControlPolicy._flat": Named("the same, where algos/fast is switched off", 1),
        "algos/policies/distributions.py:draw": Named("random numbers, which the CPU draws", 1),
        "algos/collection.py:Collector._act": Named("actions, for an environment on the CPU", 1),
        "algos/collection.py:_rollout": Named("the columns of the rollout, at the end", once=3),
    },
    "control-update": UPDATE | {
        "algos/advantages.py:whiten": Named("whether the mask has a False entry", 1),
        "algos/policies/policy.py:step_values": Named("which next observations are not observations", once=2),
    },
}  # fmt: skip
"""For each inner loop, its waits by function: found on the simulated device, so what CUDA adds is not named here."""


def token(device):
    """Waits of generation: an iteration is a token in every slot."""
    agent = text_agent(device)
    return _measured("token", device, lambda: agent.collect, (agent.policy, "act"))


def update(device):
    """Waits of PPO's update on text: an iteration is a minibatch."""
    agent = text_agent(device)
    return _measured("update", device, lambda: _update_of(agent), (agent.optimizer, "step"))


def control(device):
    """Waits of acting in control: an iteration is a step of all environments."""
    agent = control_agent(device)
    return _measured("control", device, lambda: agent.collect, (agent.policy, "act"))


def control_update(device):
    """Waits of PPO's update in control: an iteration is a minibatch."""
    agent = control_agent(device)
    return _measured("control-update", device, lambda: _update_of(agent), (agent.optimizer, "step"))


def _measured(loop, device, run, iteration):
    """Count waits in a loop, and in another run of it copies.

    Args:
        loop: its name in `LOOPS`.
        device: name of the device.
        run: function that returns a function, whose call is measured.
        iteration: an object, and the name of its method that is called once in each iteration.

    Raises:
        AssertionError: if a wait is not named, or happens more often than `LOOPS` says.
    """
    device_type = torch.device(device).type
    for _ in range(2):  # graphs are captured, and optimizers make their state
        run()()

    # Waits
    waits = Waits()
    counted = CountedOperations(waits, device_type)
    if device_type == "cuda":
        counted = counted_on_cuda(waits)
    measured = run()
    with _counted_calls(*iteration) as calls, counted:
        measured()
    iterations = calls["number"]

    # Copies, which torch's warnings do not tell from other waits
    copies = Waits()
    measured = run()
    with CountedOperations(copies, device_type, only_copies=True):
        measured()

    # The figure, and the waits by function
    inside = waits_inside(waits, LOOPS[loop], iterations)
    outside = waits.counts.total() - inside
    result = {
        "figure": f"{inside / iterations:.1f} waits an iteration, {outside} before and after; {iterations} iterations, "
        f"copies of {copies.bytes.total() / 1e3:.1f} kB",
        "iterations": iterations,
        "waits": dict(waits.counts.most_common()),
        "copies": dict(copies.counts.most_common()),
        "bytes": dict(copies.bytes.most_common()),
    }
    wrong = judged(waits, LOOPS[loop], iterations)
    if wrong:
        print(json.dumps(result, indent=1), file=sys.stderr)
        raise AssertionError("; ".join(wrong))
    return result


def _update_of(agent):
    """Collect, charge the penalty, and return the update of this rollout, as `algos.training.loop.iterate` does."""
    rollout = to_device(agent.collect(), agent.policy.device)
    if agent.penalty is not None:
        agent.penalty(rollout, agent.policy)
    return lambda: agent.update(rollout)


@contextmanager
def _counted_calls(holder, method):
    """Context in which calls of an object's method are counted."""
    calls = {"number": 0}
    original = getattr(holder, method)

    def counted(*arguments, **options):
        calls["number"] += 1
        return original(*arguments, **options)

    setattr(holder, method, counted)
    try:
        yield calls
    finally:
        delattr(holder, method)


# Graphs, low precision, compiling


def graphs(device):
    """Generation by CUDA graphs: how many were captured, and whether a loop of tokens uses them."""
    if torch.device(device).type != "cuda":
        return {"needs": "CUDA"}
    agent = text_agent(device)
    for _ in range(2):
        agent.collect()
    decoder = agent.policy.decoder
    captured = len(getattr(decoder.step_all_slots, "graphs", {}))
    if not captured:
        raise AssertionError("no step of decoding was captured: textenv.lm.cuda_graphs logs why (logging level INFO)")
    return {"figure": f"{captured} graphs captured"}


def bfloat16(device):
    """PPO on text with autocast, and with weights in bfloat16: finite, and acting agrees with scoring."""
    figures = {}
    for name, options in {"autocast": dict(autocast=torch.bfloat16), "weights": dict(dtype=torch.bfloat16)}.items():
        agent = text_agent(device, **options)
        before = agent.policy.lm.model.get_input_embeddings().weight.detach().clone()
        rows = agent.learn(512)
        gaps = [row["policy/sampler_gap"] for row in rows]
        numbers = [x for row in rows for x in row.values()]
        weight = agent.policy.lm.model.get_input_embeddings().weight
        expected = torch.bfloat16 if name == "weights" else torch.float32
        assert all(map(math.isfinite, numbers)), f"{name}: a metric is not finite: {rows[-1]}"
        assert weight.dtype == expected, f"{name}: weights are {weight.dtype}, expected {expected}"
        assert not torch.equal(weight, before), f"{name}: no weight has changed"
        figures[name] = statistics.mean(gaps)
    words = ", ".join(f"{name} {gap:.2g}" for name, gap in figures.items())
    return {"figure": f"mean gap of acting and scoring, nats: {words}", "gaps": figures}


def compiled(device):
    """The loss's evaluation by `torch.compile` against the plain one: their values, and seconds of an update."""
    rows = {}
    plain, other = control_agent(device), control_agent(device)
    other.policy.evaluate = torch.compile(other.policy.evaluate, dynamic=True)
    other.in_closed_form = plain.in_closed_form = False
    for name, agent in {"plain": plain, "compiled": other}.items():
        seconds = []
        for _ in range(12):
            update = _update_of(agent)
            start = time.perf_counter()
            metrics = update()
            seconds.append(time.perf_counter() - start)
            rows.setdefault(name, metrics)
        rows[f"{name} seconds"] = statistics.median(seconds[4:])
        rows[f"{name} first"] = sum(seconds[:4])
    for key in ("policy/loss", "value/loss", "policy/entropy"):
        a, b = rows["plain"][key], rows["compiled"][key]
        assert math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-4), f"{key} is {b} compiled and {a} plain"
    ratio = rows["plain seconds"] / rows["compiled seconds"]
    return {
        "figure": f"an update {ratio:.2f} times as fast as plain, after {rows['compiled first']:.0f} s of compiling"
    }


def machine(device):
    """The GPU, its free memory, and the versions that its figures depend on; whether it multiplies in bfloat16."""
    device = ready(device)
    if device.type != "cuda":
        return {"figure": f"no GPU: {device}, torch {torch.__version__}"}
    product = torch.ones(64, 64, device=device, dtype=torch.bfloat16) @ torch.ones(64, 64, device=device).bfloat16()
    assert product.float().mean().item() == 64, f"a product of ones has the mean {product.float().mean().item()}"
    free, total = torch.cuda.mem_get_info(device)
    name = torch.cuda.get_device_name(device)
    words = f"{name}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free"
    return {"figure": f"{words}, torch {torch.__version__}, CUDA {torch.version.cuda}"}


CHECKS = {
    "machine": machine,
    "graphs": graphs,
    "bfloat16": bfloat16,
    "compiled": compiled,
    "devices": devices,
    "token": token,
    "update": update,
    "control": control,
    "control-update": control_update,
}


def main(name, device):
    if device == SIMULATED:
        from tests.helpers.second_device import SecondTensor, second_device

        SecondTensor.is_cuda = True  # the library's ways on CUDA, where it asks
        with second_device():
            result = CHECKS[name](device)
    else:
        result = CHECKS[name](device)
    print("RESULT", json.dumps(result))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("check", choices=CHECKS)
    parser.add_argument("--device", default="cuda", help="cuda, cpu, ..., or second (%(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    main(options.check, options.device)
