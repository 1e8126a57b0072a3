"""A tool, calls of it, and a tokenizer of bytes with a chat template."""

PLAIN = (  # SmolLM2's: it does not know tools
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_tokenizer(template=None):
    """Bytes and two marks of a chat."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<pad>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = template
    return tokenizer


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: the first
        b: the second
    """
    return a * b


def call(name, **arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {str(arguments).replace(chr(39), chr(34))}}}\n</tool_call>'


QUESTION = [{"role": "user", "content": "What is 12 * 34?"}]
SIX = call("multiply", a=2, b=3)
