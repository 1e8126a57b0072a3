"""What decoding costs, in one process, call by call in turn with what it is compared with. Run by ``text.py``.

python examples/benchmarks/text_decoding.py generation --size tiny --pairs 5

Prints one line ``RESULT {"ours": [...], "peers": {name: [...]}, "floor": ...}``: a figure for each pair.
"""

import argparse
import json
import statistics
import time
from functools import partial

import numpy as np
import torch
from bare_decoding import BareDecoding
from ending import end_with
from gymnasium.vector import AutoresetMode
from text_task import (
    BATCH,
    LONGEST,
    NEW_TOKENS,
    SHAPES,
    make_agent,
    make_env,
    make_model,
    make_prompts,
    make_tokenizer,
)
from transformers import AutoConfig, AutoModelForCausalLM

from algos import LMPolicy, Policy, collect
from textenv.lm import model as model_module, padding, recording
from textenv.lm.decoding import Decoder
from textenv.lm.sampling import sample

END = 1 / 20
"""Probability of EOS where lengths vary: geometric, mean 20, cut at 48."""
EPISODES = 256
CALLS = {260: 200, 8192: 20, 50257: 4}
"""Calls of a sampler that are timed together."""


FAMILIES = {
    "bloom": dict(n_layer=4, n_head=4),
    "cohere2": {},
    "falcon": dict(alibi=True, head_dim=None),  # which follows from the width
    "falcon_h1": dict(mamba_d_ssm=512, mamba_n_heads=8, mamba_d_head=64, mamba_n_groups=1, mamba_d_state=32),
    "gemma2": {},
    "gemma3_text": dict(layer_types=["sliding_attention", "full_attention"] * 2),
    "gpt_oss": dict(num_local_experts=4, num_experts_per_tok=2),
    "jamba": dict(num_experts=4, num_experts_per_tok=2, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=16),
    "lfm2": dict(layer_types=["conv", "full_attention"] * 2),
    "llama": {},
    "mamba": dict(state_size=16),
    "mamba2": dict(num_heads=8, head_dim=64, state_size=32, n_groups=1),
    "mistral": {},
    "olmo3": dict(layer_types=["sliding_attention", "full_attention"] * 2),
    "qwen2": dict(use_sliding_window=True, max_window_layers=2),
    "qwen3_next": dict(
        layer_types=["linear_attention", "full_attention"] * 2, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=64, linear_value_head_dim=64, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=256, shared_expert_intermediate_size=256,
    ),
    "rwkv": dict(attention_hidden_size=256),
    "starcoder2": {},
}  # fmt: skip
"""Other decoders than GPT-2, 4 layers of 256 and windows of 32 tokens, and what they need besides."""


def make_family(family, tokenizer):
    """Random weights."""
    sizes = dict(
        vocab_size=len(tokenizer), hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=128, sliding_window=32,
    )  # fmt: skip
    special = dict(bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    known = AutoConfig.for_model(family)
    sizes = {name: value for name, value in (sizes | special).items() if hasattr(known, name)} | FAMILIES[family]
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{name: value for name, value in sizes.items() if value is not None})
    return AutoModelForCausalLM.from_config(config).eval()


def families(options):
    """Tokens a second of other decoders than GPT-2, as in `generation`."""
    tokenizer = make_tokenizer(SHAPES["small"].vocabulary)
    own, peer = against_generate(options.pairs, make_family(options.family, tokenizer), tokenizer)
    ratio = statistics.median(own) / statistics.median(peer)
    return {"ours": own, "peers": {"transformers.generate": peer}, "floor": None, "note": f"{ratio:.2f} x generate"}


def generation(options):
    """Tokens a second: `collect` against ``transformers.generate`` with the dynamic cache.

    The peer generates with the activation that GPT-2 has by default, and with the fused one that ours has. Ours is
    measured as it is in a training that lasts: with its step recorded, which here is done while it warms up.
    """
    model, tokenizer = make_model(SHAPES[options.size])
    bare = BareDecoding(model, rows=BATCH, max_length=LONGEST + NEW_TOKENS)
    default, _ = make_model(SHAPES[options.size], activation="gelu_new")
    prompts = torch.zeros(BATCH, LONGEST, dtype=torch.long)
    own, fused, peer, floor = against_generate(
        options.pairs, model, tokenizer, default, lambda: bare.run(prompts, NEW_TOKENS)
    )
    peers = {"transformers.generate": peer, "transformers.generate, fused activation": fused}
    return {"ours": own, "peers": peers, "floor": statistics.median(floor)}


def against_generate(pairs, model, tokenizer, *others):
    """Tokens a second of `collect` and ``generate`` with this model, and of other models' ``generate`` or functions."""
    recording.RECORDED_AFTER = NEW_TOKENS // 2
    policy = LMPolicy(model, tokenizer)
    env = make_env(tokenizer, forbidden=[tokenizer.eos_token_id])
    tokenizer.padding_side = "left"
    padded = tokenizer.pad({"input_ids": make_prompts(len(tokenizer))[:BATCH]}, return_tensors="pt")

    def ours():
        rollout = collect(env, policy, num_episodes=BATCH)
        assert rollout["mask"].sum() == BATCH * NEW_TOKENS

    @torch.inference_mode()
    def generate(model):
        model.generate(
            **padded, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=True, top_k=0, top_p=1.0,
            pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip

    models = [partial(generate, x) if isinstance(x, torch.nn.Module) else x for x in (model, *others)]
    return ([BATCH * NEW_TOKENS / x for x in column] for column in in_turn(pairs, ours, *models))


def floor(options):
    """Seconds of the bare loop, for the floor of an iteration."""
    model, _ = make_model(SHAPES[options.size])
    bare = BareDecoding(model, rows=BATCH, max_length=LONGEST + NEW_TOKENS)
    prompts = torch.zeros(BATCH, LONGEST, dtype=torch.long)
    (seconds,) = in_turn(options.pairs, lambda: bare.run(prompts, NEW_TOKENS))
    return {"s": statistics.median(seconds)}


class Padded(Policy):
    """A policy as in a library without slot refill: a row that has ended is decoded on until the whole batch has.

    Args:
        policy: who decodes.
        env: whose observations it reads.
    """

    def __init__(self, policy, env):
        self.policy, self.shape, self.generator = policy, (env.num_envs, env.max_length), policy.generator
        self.reset()

    def act(self, observation, **options):
        """As `Policy.act`; idle slots go on with a text that nobody reads."""
        idle = observation["length"][:, 0] == 0
        self.tokens[~idle], self.length[~idle] = observation["tokens"][~idle], observation["length"][:, 0][~idle]
        self.length[idle] += 1
        return self.policy.act({"tokens": self.tokens, "length": self.length}, **options)

    def reset(self, rows=None, *, seeds=None):
        """Forget everything before a batch, nothing inside one."""
        if rows is None:
            self.tokens, self.length = np.zeros(self.shape, dtype=np.int64), np.zeros(self.shape[0], dtype=np.int64)
            self.policy.reset(seeds=seeds)


def lengths(options):
    """Tokens a second where lengths vary: 256 episodes with slot refill, and in 8 padded batches of 32."""
    recording.RECORDED_AFTER = EPISODES // BATCH // 2  # so that both have recorded all they do when the first pair ends
    model, tokenizer = make_model(SHAPES[options.size])
    end_with(model, END)
    policy, env = LMPolicy(model, tokenizer), make_env(tokenizer)
    padded = Padded(LMPolicy(model, tokenizer), env)

    def tokens_per_second(policy, episodes):
        start = time.process_time()
        tokens = sum(int(collect(env, policy, num_episodes=n)["mask"].sum()) for n in episodes)
        return tokens / (time.process_time() - start)

    pairs = []
    for pair in range(options.pairs + 1):  # the first one warms up
        runs = [(policy, [EPISODES]), (padded, [BATCH] * (EPISODES // BATCH))]
        figures = [tokens_per_second(*run) for run in (runs if pair % 2 else runs[::-1])]
        pairs.append(figures if pair % 2 else figures[::-1])
    ours, peer = zip(*pairs[1:], strict=True)
    return {"ours": ours, "peers": {"ours, padded batches": peer}, "floor": None}


def groups(options):
    """Answers a second of 4 groups of 8 answers of 16 tokens to prompts of 128: prompts read once, or in each slot."""
    model, tokenizer = make_model(SHAPES[options.size], positions=144)
    env = make_env(tokenizer, longest=128, new_tokens=16, forbidden=[tokenizer.eos_token_id])
    env.task.prompts = [(prompt * 2)[:128] for prompt in env.task.prompts]  # all of this length
    policies = [LMPolicy(model, tokenizer) for _ in range(2)]
    plain = Decoder(policies[1].lm, num_slots=BATCH, max_length=env.max_length)
    plain._once = lambda rows, tokens, length: (rows, {})
    policies[1].decoder = plain
    runs = [partial(collect, env, policy, num_episodes=BATCH, group_size=8) for policy in policies]
    ours, peer = ([BATCH / x for x in column] for column in in_turn(options.pairs, *runs))
    assert policies[1].decoder is plain
    return {"ours": ours, "peers": {"ours, each slot reads its prompt": peer}, "floor": None}


def ragged(options):
    """Updates a second of PPO on answers of unequal length: without their padding, and with it."""
    read, agents = model_module.without_padding, [make_agent(SHAPES[options.size]) for _ in range(2)]
    rollouts = []
    for agent in agents:
        end_with(agent.policy.lm.model, END)
        rollouts.append(agent.collect())

    def update(number, function):
        model_module.without_padding = function
        agent, rollout = agents[number], rollouts[number].clone()
        with torch.enable_grad():
            agent.policy.lm.load_state_dict(weights[number])  # those that have generated the answers
            agent.penalty(rollout, agent.policy)
            agent.update(rollout)

    weights = [{name: x.clone() for name, x in agent.policy.lm.state_dict().items()} for agent in agents]
    ways = [partial(update, 0, read), partial(update, 1, lambda run, tokens, *_: padding._plain(run, tokens))]
    ours, peer = ([1 / x for x in column] for column in in_turn(options.pairs, *ways))
    return {"ours": ours, "peers": {"ours, padded rows": peer}, "floor": None}


def interface(options):
    """Microseconds a step at a prefix: `env.step` and `policy.act`, against the decoder and the sampler alone.

    Step by step in turn on the same tokens, each with a decoder of its own; a pair is the median of 16 steps. The
    model's forward pass, which is the same in both and a hundred times what is looked for, is left out of both.
    """
    steps, prefix = 16, options.prefix
    new_tokens = steps * (options.pairs + 1) + 1
    model, tokenizer = make_model(SHAPES[options.size], positions=prefix + new_tokens)
    end_with(model, 0.0)
    policy = LMPolicy(model, tokenizer)
    env = make_env(tokenizer, longest=prefix, new_tokens=new_tokens, autoreset_mode=AutoresetMode.DISABLED)
    env.task.prompts = [(prompt * 2)[:prefix] for prompt in env.task.prompts]  # all of this length
    decoder = Decoder(policy.lm, num_slots=env.num_envs, max_length=env.max_length)
    generator = torch.Generator().manual_seed(0)
    observation, _ = env.reset(seed=0)
    action = policy.act(observation).action.numpy()
    ready = decoder.logits(observation["tokens"], observation["length"][:, 0])
    for reader in (decoder, policy.decoder):
        reader.step_all_slots = lambda *inputs, sizes: ready
    ours, peer = np.zeros((2, steps * (options.pairs + 1)))

    def act():
        return policy.act(observation).action.numpy()

    def bare():
        sample(decoder.logits(observation["tokens"], observation["length"][:, 0]), generator=generator)

    for step in range(ours.size):
        (observation, *_), stepping = timed(lambda action=action: env.step(action))
        bare_first = step % 2  # whoever comes second finds the weights in the processor's cache
        if bare_first:
            peer[step] = timed(bare)[1]
        action, acting = timed(act)
        if not bare_first:
            peer[step] = timed(bare)[1]
        ours[step] = stepping + acting
    figures = [np.median(x.reshape(-1, steps)[1:], axis=1) * 1e6 for x in (ours, peer)]
    over = float(np.median(ours[steps:] - peer[steps:]) * 1e6)
    peers = {"bare decoder and sampler": figures[1].tolist()}
    return {
        "ours": figures[0].tolist(),
        "peers": peers,
        "floor": None,
        "note": f"{over:.0f} µs a step over the bare loop",
    }


def sampler(options):
    """Microseconds a call: `sample`, which yields log-probabilities too, and ``torch.multinomial`` of the softmax."""
    n = options.vocabulary
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(BATCH, n, generator=generator)
    buffer = torch.empty_like(logits)
    calls = [
        lambda: sample(logits, generator=generator),
        lambda: torch.multinomial(torch.softmax(logits, -1), 1, generator=generator),
        lambda: torch.exp(logits, out=buffer),  # every logit has to be looked at
    ]
    repeated = [lambda f=f: [f() for _ in range(CALLS[n])] for f in calls]
    ours, peer, floor = ([x / CALLS[n] * 1e6 for x in column] for column in in_turn(options.pairs, *repeated))
    return {"ours": ours, "peers": {"torch.multinomial(softmax)": peer}, "floor": statistics.median(floor)}


def timed(function):
    """What a function returns, and the processor's seconds: what other processes take is not counted."""
    start = time.process_time()
    result = function()
    return result, time.process_time() - start


@torch.no_grad()
def in_turn(pairs, *functions):
    """Seconds of each function, called in turn that many times after a call to warm up."""
    seconds = [[] for _ in functions]
    for pair in range(pairs + 1):
        for function, column in zip(functions, seconds, strict=True):
            seconds_taken = timed(function)[1]
            if pair:
                column.append(seconds_taken)
    return seconds


CASES = {
    "families": families,
    "generation": generation,
    "groups": groups,
    "lengths": lengths,
    "ragged": ragged,
    "interface": interface,
    "sampler": sampler,
    "floor": floor,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=sorted(CASES))
    parser.add_argument("--size", choices=list(SHAPES), default="tiny")
    parser.add_argument("--family", choices=list(FAMILIES), default="gemma2")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--prefix", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, choices=list(CALLS), default=260)
    torch.set_num_threads(1)
    options = parser.parse_args()
    print("RESULT " + json.dumps(CASES[options.case](options)), flush=True)
