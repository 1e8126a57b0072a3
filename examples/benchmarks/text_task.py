"""The text task that the peers are measured on, in any size: model, prompts, environment, agent.

As in ``../shared/peers/llm/common.py``: prompts of 8 to 16 random tokens, 48 new ones, 32 responses a batch; the reward
is the number of new tokens whose id is below a quarter of the vocabulary; KL coefficient .05; 4 epochs of 4
minibatches; a GPT-2 with random weights.
"""

from dataclasses import dataclass

import torch
from ending import end_with
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from algos import GRPO, PPO, GRPOConfig, LMPolicy, PPOConfig
from textenv import KLPenalty, TextVectorEnv

PROMPTS, SHORTEST, LONGEST = 512, 8, 16
BATCH, NEW_TOKENS, EPOCHS, MINIBATCHES, GROUP = 32, 48, 4, 4, 8


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of a GPT-2."""

    vocabulary: int
    layers: int
    width: int
    heads: int


SHAPES = {
    "tiny": Shape(vocabulary=260, layers=2, width=128, heads=4),
    "small": Shape(vocabulary=8192, layers=6, width=384, heads=6),
    "gpt2": Shape(vocabulary=50257, layers=12, width=768, heads=12),
}


def make_tokenizer(vocabulary):
    """Numbered words; the last four ids are special."""
    names = {vocabulary - 1: "<pad>", vocabulary - 2: "<eos>", vocabulary - 3: "<bos>", vocabulary - 4: "<unk>"}
    core = Tokenizer(models.WordLevel({names.get(i, f"t{i}"): i for i in range(vocabulary)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", unk_token="<unk>"
    )


def make_model(shape, *, positions=128, activation="gelu_pytorch_tanh", seed=0):
    """Random weights and a tokenizer; the activation is the fused form of the one that GPT-2 has (``"gelu_new"``)."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=shape.vocabulary,
        n_layer=shape.layers,
        n_embd=shape.width,
        n_head=shape.heads,
        n_positions=positions,
        activation_function=activation,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        bos_token_id=shape.vocabulary - 3,
        eos_token_id=shape.vocabulary - 2,
        pad_token_id=shape.vocabulary - 1,
    )
    return GPT2LMHeadModel(config).eval(), make_tokenizer(shape.vocabulary)


def make_prompts(vocabulary, *, shortest=SHORTEST, longest=LONGEST, seed=0):
    """Lists of token ids; the first one is of the greatest length."""
    generator = torch.Generator().manual_seed(1000 + seed)
    lengths = [longest, *torch.randint(shortest, longest + 1, (PROMPTS - 1,), generator=generator).tolist()]
    return [torch.randint(0, vocabulary - 4, (length,), generator=generator).tolist() for length in lengths]


def make_env(tokenizer, *, num_envs=BATCH, longest=LONGEST, new_tokens=NEW_TOKENS, seed=0, **options):
    """The task in that many slots; prompts are between half as long as the longest and as long."""
    vocabulary = len(tokenizer)

    def good_tokens(prompts, completions, completion_ids, **columns):
        """How many tokens are in the rewarded set."""
        return [float(sum(token < vocabulary // 4 for token in ids)) for ids in completion_ids]

    return TextVectorEnv(
        prompts=make_prompts(vocabulary, shortest=longest // 2, longest=longest, seed=seed),
        reward=good_tokens,
        tokenizer=tokenizer,
        num_envs=num_envs,
        max_prompt_tokens=longest,
        max_new_tokens=new_tokens,
        **options,
    )


def make_agent(
    shape, *, algorithm="ppo", batch=BATCH, new_tokens=NEW_TOKENS, num_epochs=EPOCHS, ending=None, learning_rate=None,
    seed=0,
):  # fmt: skip
    """PPO on the task, with a value head on the trunk, or GRPO in groups of 8; a copy of the model for reference.

    ``ending`` is the probability of EOS after every text: at 0.0 every response is of full length.
    """
    model, tokenizer = make_model(shape, positions=max(128, LONGEST + new_tokens), seed=seed)
    if ending is not None:
        end_with(model, ending)
    policy = LMPolicy(model, tokenizer, seed=seed)
    settings = dict(
        num_episodes=batch,
        num_epochs=num_epochs,
        minibatch_size=batch // MINIBATCHES,
        learning_rate=learning_rate or (1e-3 if shape.layers <= 2 else 3e-4),
        max_grad_norm=1.0,
        seed=seed,
    )
    env = make_env(tokenizer, num_envs=batch, new_tokens=new_tokens, seed=seed)
    penalty = KLPenalty(policy.reference(), 0.05)
    if algorithm == "grpo":
        return GRPO(env, policy, GRPOConfig(group_size=GROUP, **settings), penalty=penalty)
    settings |= dict(num_steps=None, gamma=1.0, gae_lambda=0.95, bootstrap_truncated=False, vf_coef=1e-3)
    return PPO(env, policy, PPOConfig(**settings), penalty=penalty)
