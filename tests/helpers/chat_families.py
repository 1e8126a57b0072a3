"""Chat templates in the manner of well-known model families, over a tiny byte-level tokenizer; and a scripted model."""

from typing import NamedTuple

import torch

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{{ m['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
LLAMA_3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
PHI = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
GLM = (
    "[gMASK]<sop>{% for m in messages %}<|{{ 'observation' if m['role'] == 'tool' else m['role'] }}|>\n"
    "{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
LLAMA_2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token }}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }} {{ eos_token }}{% endif %}{% endfor %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }}[/INST]"
    "{% elif m['role'] == 'assistant' %} {{ m['content'] }}{{ eos_token }}"
    "{% else %}{{ raise_exception('roles are user and assistant') }}{% endif %}{% endfor %}"
)
ZEPHYR = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] + eos_token }}\n"
    "{% if loop.last and add_generation_prompt %}<|assistant|>{% endif %}{% endfor %}"
)
VICUNA = (
    "{% for m in messages %}{% if m['role'] == 'user' %}USER: {{ m['content'] }} "
    "{% else %}ASSISTANT: {{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
COMMAND_R = (
    "{{ bos_token }}{% for m in messages %}<|START_OF_TURN_TOKEN|>"
    "{{ '<|CHATBOT_TOKEN|>' if m['role'] == 'assistant' else '<|USER_TOKEN|>' }}{{ m['content'] }}"
    "<|END_OF_TURN_TOKEN|>{% endfor %}"
    "{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}"
)
HARMONY = (
    "{% for m in messages %}<|start|>{{ m['role'] }}{% if m['role'] == 'assistant' %}<|channel|>final{% endif %}"
    "<|message|>{{ m['content'] }}"
    "{% if loop.last and m['role'] == 'assistant' and not add_generation_prompt %}<|return|>"
    "{% else %}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "<|Assistant|>{{ m['content'].split('</think>')[-1] }}{{ eos_token }}"
    "{% else %}<|User|>{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


class Family(NamedTuple):
    """A tokenizer and what ends a turn of its models."""

    template: str | None
    ends: list[str]
    """Special tokens that end a turn, EOS first."""
    eos: str
    special: list[str] = []
    """Further special tokens."""
    listed: list[str] = []
    """Tokens in the model's generation_config; none: it has no such file."""
    texts: list[str] = []
    """Texts that end a turn."""
    pad: str | None = None
    bos: str | None = None
    added: list[str] = []
    """Added tokens that are not special."""


FAMILIES = {
    "gemma": Family(GEMMA, ["<eos>", "<end_of_turn>"], "<eos>", ["<start_of_turn>", "<end_of_turn>"],
                    listed=["<eos>", "<end_of_turn>"], pad="<pad>", bos="<bos>"),
    "gemma, only the template knows": Family(GEMMA, ["<eos>", "<end_of_turn>"], "<eos>",
                                             ["<start_of_turn>", "<end_of_turn>"], bos="<bos>"),
    "llama 3": Family(LLAMA_3, ["<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"], "<|eot_id|>",
                      ["<|end_of_text|>", "<|eom_id|>", "<|start_header_id|>", "<|end_header_id|>"],
                      listed=["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"], bos="<|begin_of_text|>"),
    "llama 3, eos of the base model": Family(LLAMA_3, ["<|end_of_text|>", "<|eot_id|>"], "<|end_of_text|>",
                                             ["<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"],
                                             listed=["<|end_of_text|>"], bos="<|begin_of_text|>"),
    "phi": Family(PHI, ["<|endoftext|>", "<|end|>", "<|assistant|>"], "<|endoftext|>",
                  ["<|end|>", "<|assistant|>", "<|user|>", "<|system|>"], pad="<|endoftext|>",
                  listed=["<|endoftext|>", "<|assistant|>", "<|end|>"]),
    "glm": Family(GLM, ["<|endoftext|>", "<|user|>", "<|observation|>"], "<|endoftext|>",
                  ["<|user|>", "<|observation|>", "<|assistant|>", "<|system|>", "[gMASK]", "<sop>"],
                  listed=["<|endoftext|>", "<|user|>", "<|observation|>"], pad="<|endoftext|>"),
    "glm, only the template knows": Family(GLM, ["<|endoftext|>", "<|user|>", "<|observation|>"], "<|endoftext|>",
                                           ["<|user|>", "<|observation|>", "<|assistant|>", "<|system|>"]),
    "qwen": Family(CHATML, ["<|im_end|>", "<|endoftext|>"], "<|im_end|>", ["<|endoftext|>", "<|im_start|>"],
                   listed=["<|im_end|>", "<|endoftext|>"], pad="<|endoftext|>"),
    "chatml, end not special": Family(CHATML, ["<eos>", "<|im_end|>"], "<eos>", added=["<|im_start|>", "<|im_end|>"]),
    "chatml, end not a token": Family(CHATML, ["<eos>"], "<eos>", texts=["<|im_end|>"]),
    "llama 2": Family(LLAMA_2, ["</s>"], "</s>", listed=["</s>"], bos="<s>", pad="</s>"),
    "mistral": Family(MISTRAL, ["</s>"], "</s>", ["[INST]", "[/INST]"], listed=["</s>"], bos="<s>"),
    "zephyr": Family(ZEPHYR, ["</s>"], "</s>", listed=["</s>"], bos="<s>", pad="</s>"),
    "vicuna": Family(VICUNA, ["</s>"], "</s>", listed=["</s>"]),
    "command-r": Family(COMMAND_R, ["<|END_OF_TURN_TOKEN|>"], "<|END_OF_TURN_TOKEN|>",
                        ["<|START_OF_TURN_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|USER_TOKEN|>"], bos="<BOS_TOKEN>"),
    "harmony": Family(HARMONY, ["<|return|>", "<|endoftext|>", "<|call|>"], "<|return|>",
                      ["<|endoftext|>", "<|call|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>"],
                      listed=["<|return|>", "<|endoftext|>", "<|call|>"], pad="<|endoftext|>"),
    "r1": Family(R1, ["<eos>"], "<eos>", ["<|Assistant|>", "<|User|>"], bos="<bos>", added=["<think>", "</think>"]),
    "plain": Family(PLAIN, ["<eos>"], "<eos>"),
    "base model": Family(None, ["<eos>"], "<eos>", listed=["<eos>"]),
}  # fmt: skip


def byte_tokenizer(special=(), added=(), template=None, *, eos="<eos>", pad=None, bos=None):
    """A byte-level tokenizer without merges: every byte is a token, then come EOS, BOS and these tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    names = [name for name in (eos, bos, pad, *special) if name is not None]
    inner.add_special_tokens([AddedToken(name, special=True) for name in dict.fromkeys(names)])
    inner.add_tokens([AddedToken(name, special=False, normalized=False) for name in added])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=eos, pad_token=pad, bos_token=bos)
    tokenizer.chat_template = template
    return tokenizer


def tokenizer_of(family):
    return byte_tokenizer(family.special, family.added, family.template, eos=family.eos, pad=family.pad, bos=family.bos)


def scripted_model(tokenizer, *followers, listed=None):
    """A Llama whose most probable next token depends on the last token only: by these pairs, else a line break.

    ``listed`` are the tokens of its generation_config; None leaves the configuration's EOS.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    size = -(-len(tokenizer) // 8) * 8  # an even width of each head
    config = LlamaConfig(
        vocab_size=size, hidden_size=size, intermediate_size=8, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=1, max_position_embeddings=512, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
        pad_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        scores = torch.zeros(size, size)
        scores[tokenizer("\n", add_special_tokens=False)["input_ids"][0]] = 1.0
        for last, following in followers:
            scores[following, last] = 2.0
        model.lm_head.weight.copy_(scores)
    if listed is not None:
        model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(listed)
    return model
