"""Generation and update of a decoder of half a billion parameters on CUDA, beside `transformers` and the bare rate.

On another device, such as the CPU, the same code runs in miniature; its rows say that they are no figures of a GPU.
"""

import statistics
import time
from dataclasses import dataclass
from importlib.metadata import version

import torch
from alternation import row
from text_task import make_prompts, make_tokenizer

from algos import PPO, LMPolicy, PPOConfig, collect
from textenv import TextVectorEnv
from textenv.device import find_device


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Of the decoder and of its work."""

    layers: int
    width: int
    heads: int
    key_heads: int
    inner: int
    vocabulary: int
    batch: int
    prompt: int
    new_tokens: int
    product: int
    """Rows and columns of the square matrices whose product is the bare rate."""


CUDA = Scale(layers=24, width=896, heads=14, key_heads=2, inner=4864, vocabulary=151_936, batch=128, prompt=64,
             new_tokens=256, product=8192)  # fmt: skip
CPU = Scale(layers=2, width=64, heads=4, key_heads=2, inner=128, vocabulary=512, batch=8, prompt=16, new_tokens=16,
            product=512)  # fmt: skip
EPOCHS, MINIBATCHES = 1, 4


def ready(name):
    """The device of this name.

    Raises:
        ValueError: if there is none, or torch or transformers is too old for the figures of a GPU.
    """
    device = find_device(name)
    for package, least in (("torch", (2, 11)), ("transformers", (5, 16))) if device.type == "cuda" else ():
        found = version(package)
        if tuple(map(int, found.split(".")[:2])) < least:
            raise ValueError(f"{package} is {found}, expected at least {least[0]}.{least[1]}: run make gpu")
    return device


def gpu(*, seeds, chosen, device):
    """Rows of the table; ``seeds`` is the number of pairs, ``device`` is from `ready`."""
    cuda = device.type == "cuda"
    scale = CUDA if cuda else CPU
    note = torch.cuda.get_device_name(device) if cuda else f"NOT a GPU figure: the code in miniature, on {device}"
    rows, tokens = [], scale.batch * scale.new_tokens
    if chosen("generation"):
        seconds = _generation(scale, device, seeds)
        ours, peer = ([tokens / x for x in column] for column in seconds)
        keywords = dict(unit="tokens/s", peer_name="transformers.generate, dynamic cache", rate=True, note=note)
        rows.append(row("gpu", "generation", ours=ours, peer=peer, **keywords))
    if chosen("update"):
        seconds, flops = _update(scale, device, seeds)
        rate = bare_rate(scale.product, device)
        ours = [flops / x / 1e12 for x in seconds]
        keywords = dict(unit="TFLOP/s", peer_name="40 % of the bare bf16 product", rate=True, note=note)
        rows.append(row("gpu", "update", ours=ours, peer=[0.4 * rate / 1e12] * seeds, floor=rate / 1e12, **keywords))
    return rows


def make_policy(scale, device, *, dtype=torch.bfloat16, **options):
    """A decoder with random weights; ``options`` are those of `LMPolicy`."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=scale.vocabulary,
        hidden_size=scale.width,
        intermediate_size=scale.inner,
        num_hidden_layers=scale.layers,
        num_attention_heads=scale.heads,
        num_key_value_heads=scale.key_heads,
        max_position_embeddings=scale.prompt + scale.new_tokens,
        tie_word_embeddings=True,
        bos_token_id=scale.vocabulary - 3,
        eos_token_id=scale.vocabulary - 2,
        pad_token_id=scale.vocabulary - 1,
    )
    model = Qwen2ForCausalLM(config).to(device=device, dtype=dtype).eval()
    return LMPolicy(model, make_tokenizer(scale.vocabulary), **options)


def make_env(policy, scale):
    """Prompts of one length; responses of full length, for EOS is forbidden."""
    tokenizer = policy.tokenizer
    return TextVectorEnv(
        prompts=make_prompts(scale.vocabulary, shortest=scale.prompt, longest=scale.prompt),
        reward=lambda prompts, completions, completion_ids, **columns: [float(ids[0] % 2) for ids in completion_ids],
        tokenizer=tokenizer,
        num_envs=scale.batch,
        max_prompt_tokens=scale.prompt,
        max_new_tokens=scale.new_tokens,
        forbidden=[tokenizer.eos_token_id],
    )


def _generation(scale, device, pairs):
    """Seconds of `collect` and of ``generate``, in turn."""
    policy = make_policy(scale, device)
    env = make_env(policy, scale)
    prompts = torch.tensor(make_prompts(scale.vocabulary, shortest=scale.prompt, longest=scale.prompt)[: scale.batch])

    def ours():
        collect(env, policy, num_episodes=scale.batch)

    @torch.inference_mode()
    def generate():
        policy.lm.model.generate(
            input_ids=prompts.to(device), attention_mask=torch.ones_like(prompts).to(device), do_sample=True, top_k=0,
            top_p=1.0, max_new_tokens=scale.new_tokens, min_new_tokens=scale.new_tokens,
            pad_token_id=policy.tokenizer.pad_token_id,
        )  # fmt: skip

    seconds = [], []
    for pair in range(pairs + 1):  # the first one warms up
        for function, column in zip((ours, generate), seconds, strict=True):
            taken = _seconds(function, device)
            if pair:
                column.append(taken)
    return seconds


def _update(scale, device, runs):
    """Seconds of PPO's update, and the floating-point operations that its formulas need."""
    policy = make_policy(scale, device)
    config = PPOConfig(
        num_steps=None, num_episodes=scale.batch, num_epochs=EPOCHS, minibatch_size=scale.batch // MINIBATCHES,
        learning_rate=1e-6, gamma=1.0, bootstrap_truncated=False,
    )  # fmt: skip
    agent = PPO(make_env(policy, scale), policy, config)
    rollout = agent.collect().to(device)
    seconds = [_seconds(lambda: agent.update(rollout.clone()), device) for _ in range(runs + 1)]
    return seconds[1:], update_flops(policy.lm.model, scale)


def update_flops(model, scale):
    """2 for each weight and token forward, 4 backward; the output layer at the response alone; attention's products.

    The values' pass before the epochs counts forward once, without the output layer. What is computed again in the
    backward pass to save memory does not count.
    """
    head = scale.vocabulary * scale.width
    trunk = sum(p.numel() for p in model.parameters()) - head  # the embedding is the output layer's weight
    length, rows = scale.prompt + scale.new_tokens, scale.batch
    pass_ = 2 * trunk * length * rows + 2 * scale.layers * length**2 * scale.width * rows  # causal: half of 4 L² d
    return (3 * EPOCHS + 1) * pass_ + 3 * EPOCHS * 2 * head * scale.new_tokens * rows


def bare_rate(size, device):
    """Floating-point operations a second of a bf16 matrix product."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    _seconds(lambda: a @ b, device)
    return 2 * size**3 / statistics.median(_seconds(lambda: a @ b, device) for _ in range(20))


def _seconds(function, device):
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start
