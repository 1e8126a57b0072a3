"""Chat templates as published models have them, in short, and a byte-level tokenizer for all of them."""

import copy
from functools import cache

SPECIAL = [
    *("<eos>", "<bos>", "<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>", "<|start_header_id|>"),
    *("<|end_header_id|>", "<|eot_id|>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|end|>"),
    *("<|start|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>", "[INST]", "[/INST]", "[TOOLS]"),
]
WORDS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
"""Added tokens that are not special, as Qwen and DeepSeek have them."""

_CALLS = "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    + _CALLS
    + "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Thoughts are written after the last user message only; {S} begins the answer
_QWEN = """
{%- if tools %}<|im_start|>system
{% for t in tools %}{{ t | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% elif m.role != 'assistant' %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% else %}
{%- set content = m.content or '' %}{% set thoughts = m.reasoning_content or '' %}
{%- if not thoughts and '</think>' in content %}
{%- set thoughts = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}
{%- endif %}<|im_start|>assistant
{% if loop.index0 > ns.last and (loop.last or thoughts) %}<think>
{{ thoughts.strip('\n') }}
</think>

{{ content.lstrip('\n') }}{% else %}{{ content }}{% endif %}
{%- for c in m.tool_calls or [] %}{% if content or not loop.first %}
{% endif %}<tool_call>
{{ c.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{S}{% endif %}"""

TEMPLATES = {
    "chatml": _CHATML,
    "chatml that trims": _CHATML.replace("m.content }}", "(m.content or '') | trim }}"),
    "chatml by concatenation": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "marked": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        + _CALLS
        + "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "qwen 3": _QWEN.replace(
        "{S}", "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    ),
    "qwen 3 thinking": _QWEN.replace("{S}", "<think>\n"),
    "r1": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>"
        "{{ (m.content or '').split('</think>')[-1] }}<eos>{% else %}<|user|>{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
    ),
    "gemma": (
        "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    ),
    "llama 3": (
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content | trim }}{% endif %}"
        "<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    "llama 2": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content.strip() + ' <eos>' }}"
        "{% else %}{{ bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}{% endif %}{% endfor %}"
    ),
    "phi 3": (
        "{% for m in messages %}<|{{ m.role if m.role != 'tool' else 'user' }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
    ),
    "glm 4": (
        "{% for m in messages %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n{{ m.content }}"
        + _CALLS
        + "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    ),
    "harmony": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.reasoning_content and loop.last %}"
        "<|start|>assistant<|channel|>analysis<|message|>{{ m.reasoning_content }}<|end|>{% endif %}"
        "{% if m.tool_calls %}"
        "<|start|>assistant to={{ m.tool_calls[0].function.name }}<|message|>"
        "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>{% else %}"
        "<|start|>assistant<|channel|>final<|message|>{{ m.content }}{{ '<|return|>' if loop.last else '<|end|>' }}"
        "{% endif %}{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    ),
    "tools before the last user": (
        "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}{% for m in messages %}"
        "{% if m.role == 'assistant' %} {{ m.content }}<eos>{% else %}{% if tools and m == users[-1] %}[TOOLS]"
        "{{ tools | tojson }}{% endif %}[INST] {{ m.content }}[/INST]{% endif %}{% endfor %}"
    ),
    "plain": (
        "{% for m in messages %}{{ m.role | upper }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
    ),
}
ENDS = {
    "gemma": "<end_of_turn>", "llama 3": "<|eot_id|>", "llama 2": "<eos>", "phi 3": "<|end|>", "r1": "<eos>",
    "glm 4": None, "tools before the last user": "<eos>", "plain": None, "harmony": "<|return|>",
}  # fmt: skip
"""Token that the template writes at the end of a last answer; of the others <|im_end|>."""

_SPLIT = r" ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Words as of Llama 3 and Qwen: line ends stay together."""
_CORPUS = [
    "what is the time? it is four.\n\nthe user and the assistant think about it\n\n\n",
    "assistant\n\nuser\n\n\n\n <|user|> model\n\n hello there",
] * 20


@cache
def template_tokenizer(name):
    """A byte-level BPE, so that any text has ids, with merges over line ends; do not change it."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated")
    core.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    options = dict(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator(_CORPUS, trainers.BpeTrainer(**options))
    core.add_tokens([AddedToken(word, special=False, normalized=False) for word in WORDS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<eos>",
        pad_token="<eos>",
        bos_token="<bos>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATES[name]
    return tokenizer


def own_template_tokenizer(name, template=None):
    """The same tokenizer, to be changed; or with another template."""
    tokenizer = copy.deepcopy(template_tokenizer(name))
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer
