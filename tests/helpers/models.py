"""Small tokenizers and models made from configurations, never downloaded; and the scripts in examples/."""

import importlib.util
from pathlib import Path

import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


def load_example(name):
    """The module of a script in examples/, afresh."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_tokenizer(words, *, eos="<eos>", pad="<pad>", bos=None, ends=False, prefix="", suffix=""):
    """A word-level tokenizer over these words (space-separated), with ids in their order; ``ends`` texts with EOS.

    It puts the words of ``prefix`` before a text, and those of ``suffix`` after it.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    table = {word: index for index, word in enumerate(words)}
    inner = Tokenizer(models.WordLevel(table, unk_token=words[0]))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if ends:
        suffix = eos
    if prefix or suffix:
        special = [(word, table[word]) for word in {*prefix.split(), *suffix.split()}]
        template = f"{prefix} $A {suffix}".strip()
        inner.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=eos, pad_token=pad, bos_token=bos)


WORDS = ["a", "b", "c", "d", ".", "good", "bad", "<eos>", "<pad>"]


def make_gpt2(vocab_size=len(WORDS), *, seed=0, **options):
    """A GPT-2 of 2 layers, 32 wide, with spread-out weights so that its logits are not all alike."""
    from transformers import GPT2Config, GPT2LMHeadModel

    defaults = dict(
        n_layer=2, n_embd=32, n_head=2, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=7, eos_token_id=7, pad_token_id=8,
    )  # fmt: skip
    config = GPT2Config(vocab_size=vocab_size, initializer_range=0.2, **(defaults | options))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return GPT2LMHeadModel(config)


def make_llama(vocab_size=len(WORDS), *, seed=0, **options):
    """A Llama of 2 layers, 32 wide, with grouped keys and rotary positions."""
    from transformers import LlamaConfig, LlamaForCausalLM

    defaults = dict(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, bos_token_id=7, eos_token_id=7, pad_token_id=8,
    )  # fmt: skip
    config = LlamaConfig(vocab_size=vocab_size, initializer_range=0.2, **(defaults | options))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def make_mistral():
    """A model with sliding-window attention."""
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=9, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, sliding_window=4, initializer_range=0.2,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MistralForCausalLM(config)


def make_bloom():
    """A model whose attention biases are made from a two-dimensional mask (ALiBi)."""
    from transformers import BloomConfig, BloomForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        return BloomForCausalLM(BloomConfig(vocab_size=9, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.2))


def make_gemma():
    """A model that caps its logits after the output layer."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=9, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
        num_key_value_heads=2, max_position_embeddings=64, sliding_window=8, final_logit_softcapping=2.0,
        initializer_range=0.2, pad_token_id=8, eos_token_id=7, bos_token_id=7,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Gemma2ForCausalLM(config)


def make_t5(*, seed=1, **options):
    """An encoder-decoder of 2 + 2 layers, 32 wide, whose output is scaled; its decoder starts with <pad>."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=12, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, initializer_factor=1.5,
        eos_token_id=7, pad_token_id=8, decoder_start_token_id=8, **options,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = T5ForConditionalGeneration(config)
        torch.nn.init.normal_(model.shared.weight, std=0.6)
    return model


def make_bart(*, seed=3, **options):
    """An encoder-decoder of 2 + 2 layers, 32 wide, with positions, and a bias of the logits; it starts with <eos>."""
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        vocab_size=12, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64, init_std=0.2,
        bos_token_id=0, eos_token_id=7, pad_token_id=8, decoder_start_token_id=7, forced_eos_token_id=None, **options,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = BartForConditionalGeneration(config)
        model.final_logits_bias.normal_()
    return model


SEQ2SEQ = {"t5": make_t5, "bart": make_bart}
MODELS = {"gpt2": make_gpt2, "llama": make_llama}
ALL_MODELS = {
    "gpt2": make_gpt2,
    "gpt2 with surplus logits": lambda: make_gpt2(16),
    "llama": make_llama,
    "sliding window": make_mistral,
    "bloom": make_bloom,
    "gemma2": make_gemma,
}


def plain_log_probs(lm, tokens):
    """What `transformers` says, over the tokenizer's ids: ``[L, 9]``."""
    with torch.no_grad():
        return lm.model(torch.tensor([tokens])).logits[0, :, : len(WORDS)].float().log_softmax(-1)
