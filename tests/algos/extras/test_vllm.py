"""Real vLLM against `transformers`: `make vllm` builds its environment and runs these; elsewhere they are skipped."""

import importlib.util
import os
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from algos import PPO, LMPolicy
from algos.collection import Collector
from tests.helpers.errors import refused
from tests.helpers.lora import adapted
from tests.helpers.models import WORDS, make_gpt2, make_llama, make_t5, make_tokenizer
from tests.helpers.small_agents import lm_policy
from tests.helpers.text_envs import BAD, EOS, GOOD, Script, text_env

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: make vllm", allow_module_level=True)
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # vLLM would compile a function of its sampler for a minute

ROUNDING = 1e-4
"""Nats: log-probabilities of these models differ by up to 2e-5 between the two; with other weights by more than .1."""
LONG = [tuple([0, 1, 2, 3] * 9), tuple([0, 1, 2, 3] * 9 + [4]), (2,)]
OPTIONS = dict(max_prompt_tokens=40, max_new_tokens=8, num_envs=4)
LIMITS = {
    "plain": {},
    "stop text": dict(stop=("good bad", "d")),
    "stop id": dict(stop=(BAD,)),
    "forbidden": dict(forbidden=[EOS, GOOD]),
    "minimum": dict(min_new_tokens=4),
    "minimum and stop text": dict(min_new_tokens=4, stop=("good",)),
    "minimum beyond the whole text": dict(min_new_tokens=6, max_length=41),
    "rule": dict(allowed=lambda turn: [EOS, BAD if turn.completion_ids[-1:] == [GOOD] else GOOD]),
}


class Chat(Script):
    """A conversation of three turns."""

    def reply(self, turns):
        return ["a b" if turn.index < 2 else None for turn in turns]


def llama(*, size=len(WORDS), **options):
    model = make_llama(size, head_dim=32)  # the smallest heads that vLLM has on the CPU
    return LMPolicy(model, make_tokenizer(WORDS), temperature=0.8, **options)


def gpt2(**options):
    return LMPolicy(make_gpt2(n_embd=64), make_tokenizer(WORDS), temperature=0.8, **options)


def gemma(**options):
    from transformers import GemmaConfig, GemmaForCausalLM

    config = GemmaConfig(
        vocab_size=len(WORDS), hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=64, initializer_range=0.2, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LMPolicy(GemmaForCausalLM(config), make_tokenizer(WORDS), temperature=0.8, **options)


def lora(**options):
    policy = LMPolicy(adapted("llama", base=make_llama(head_dim=32)), make_tokenizer(WORDS), temperature=0.8, **options)
    change(policy)  # a fresh adapter changes nothing
    return policy


POLICIES = {
    "llama": llama,
    "gpt2, tied": gpt2,
    "gemma, tied": gemma,
    "padded vocabulary": lambda: llama(size=16),
    "lora": lora,
}


def start(policy):
    from algos.extras.vllm import VLLM

    env = text_env(max_turns=3, max_length=64, **OPTIONS)
    return VLLM(policy, env, kv_cache_memory_bytes=2**26, block_size=32)


@contextmanager
def serve(policy):
    """vLLM in another process, on this machine, as docs/parallel.md starts it."""
    from algos.extras.vllm import VLLMServer

    with TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        policy.lm.model.config.eos_token_id = EOS
        policy.lm.model.save_pretrained(folder)
        policy.tokenizer.save_pretrained(folder)
        command = (
            f"-m vllm.entrypoints.openai.api_server --model {folder} --port {port} --host 127.0.0.1 --dtype float32 "
            "--max-model-len 64 --generation-config vllm --logprobs-mode processed_logprobs --enforce-eager "
            "--kv-cache-memory-bytes 67108864"
        )
        environ = os.environ | {"VLLM_SERVER_DEV_MODE": "1"}
        server = subprocess.Popen([sys.executable, *command.split()], env=environ)
        try:
            for _ in range(300):
                with suppress(OSError):
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                    break
                assert server.poll() is None
                time.sleep(1)
            yield VLLMServer(f"http://127.0.0.1:{port}", Path(folder) / "weights")
        finally:
            server.terminate()
            server.wait(60)


@pytest.fixture(scope="module", params=[*POLICIES, "llama, served", "gpt2, tied, served"])
def engine(request):
    name, served, _ = request.param.partition(", served")
    policy = POLICIES[name]()
    with serve(policy) if served else nullcontext(start(policy)) as own:
        yield policy, own


def change(policy):
    """Change all weights that are trained, by about a tenth."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        for weight in policy.lm.parameters():
            if weight.requires_grad:
                weight += 0.1 * torch.randn(weight.shape)


def collect(engine, policy, task=None, *, episodes=12, **options):
    env = text_env(Script(LONG) if task is None else task, **(OPTIONS | options))
    return Collector(env, policy, seed=1, generator=engine).collect(num_episodes=episodes)


def distance(rollout, policy):
    """Largest difference of the engine's log-probabilities to those of scoring."""
    with torch.no_grad():
        own = policy.evaluate(rollout).log_prob
    return (own - rollout["log_prob"])[rollout["mask"]].abs().max().item()


def test_log_probs_equal_transformers_with_new_weights(engine):
    """The long prompts are in the prefix cache when the weights change."""
    policy, own = engine
    for _ in range(3):
        assert distance(collect(own, policy), policy) < ROUNDING
        change(policy)


@pytest.mark.parametrize("options", LIMITS.values(), ids=LIMITS)
def test_limits_stops_and_masks_are_the_environments(engine, options):
    rollout = collect(engine[1], engine[0], **options)
    assert distance(rollout, engine[0]) < ROUNDING
    assert rollout["mask"].sum() > 12


def test_conversations(engine):
    policy, own = engine
    rollout = collect(own, policy, Chat(LONG), max_turns=3, max_length=64)
    assert distance(rollout, policy) < ROUNDING
    assert (rollout["mask"].int().diff(dim=1) == 1).sum(1).max() >= 2


def test_equal_seeds_are_equal_rollouts(engine):
    policy, own = engine
    found = []
    for seed in (1, 1, 2):
        policy.generator.manual_seed(seed)
        found.append(collect(own, policy))
    one, other, third = found
    assert torch.equal(one["action"], other["action"]) and torch.equal(one["log_prob"], other["log_prob"])
    assert one.shape != third.shape or not torch.equal(one["action"], third["action"])


def test_samples_are_as_frequent_as_their_log_probs():
    policy = llama()
    rollout = collect(start(policy), policy, Script([(2,)]), episodes=2000, max_new_tokens=1)
    chance = (policy.lm.model(torch.tensor([[2]])).logits[0, -1] / 0.8).softmax(0).detach()
    count = rollout["action"].flatten().bincount(minlength=len(chance))
    error = (2000 * chance * (1 - chance)).sqrt()
    assert ((count - 2000 * chance).abs() < 5 * error + 1).all()


def test_ppo_reaches_the_same_score_either_way():
    """Answers of 'good' only are worth 8."""
    found = []
    for vllm in (False, True):
        policy = lm_policy(lambda: make_llama(head_dim=32))
        settings = dict(num_steps=None, num_episodes=32, minibatch_size=16, learning_rate=3e-3, gamma=1.0)
        agent = PPO(text_env(**OPTIONS), policy, generator=start(policy) if vllm else None, **settings)
        history = agent.learn(8000)
        assert history[0]["episode/return"] < 3
        found.append(history[-1]["episode/return"])
        assert max(metrics["policy/sampler_gap"] for metrics in history) < ROUNDING
    assert min(found) > 7


def test_what_vllm_cannot_do_is_refused_at_once():
    with refused(ValueError, "encoder-decoder"):
        start(LMPolicy(make_t5(), make_tokenizer(WORDS)))
    with refused(ValueError, "temperature is 0.001, expected at least .01"):
        start(LMPolicy(make_llama(), make_tokenizer(WORDS), temperature=0.001))
