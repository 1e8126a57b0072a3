"""Tokenizers that put a space before the first word of a text, as those made by SentencePiece do, without merges."""

MARKS = ["<|im_start|>", "<|im_end|>", "[INST]", "[/INST]", "<pad>"]
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+=?.,:#"


def llama(kind, *, template=None):
    """The tokenizer of Llama 2 and Mistral, with bytes for what is no letter.

    Args:
        kind: ``"metaspace"`` puts the space before words, as `transformers` converts it today; ``"prepend"`` before
            each piece of text between special tokens, as in files of older versions.
        template: chat template.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *LETTERS]
    table = {name: index for index, name in enumerate(names)}
    core = Tokenizer(models.BPE(table, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if kind == "prepend":
        core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    )
    tokenizer.chat_template = template
    return tokenizer


def t5():
    """The tokenizer of T5: it ends texts with EOS."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((letter, -5.0) for letter in ["▁", *LETTERS])]
    core = Tokenizer(models.Unigram(pieces, unk_id=2))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    core.decoder = decoders.Metaspace(prepend_scheme="always")
    core.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="</s>", unk_token="<unk>", pad_token="<pad>", padding_side="right"
    )
