"""Small reward models of several families."""

import torch
import transformers as tr

from tests.helpers.models import WORDS

EOS, PAD = WORDS.index("<eos>"), WORDS.index("<pad>")


SMALL = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)


NAMES = ["gpt2", "llama", "bert", "roberta"]


def make_model(name, *, pad=PAD, labels=1, positions=64, **options):
    common = dict(vocab_size=len(WORDS), num_labels=labels, initializer_range=0.5) | options
    if labels == 2:
        common |= dict(id2label={0: "negative", 1: "positive"}, label2id={"negative": 0, "positive": 1})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if name == "gpt2":
            config = tr.GPT2Config(n_layer=2, n_embd=32, n_head=2, n_positions=positions, **common, pad_token_id=pad)
            return tr.GPT2ForSequenceClassification(config).eval()
        made = dict(**SMALL, **common, max_position_embeddings=positions)
        if name == "llama":
            return tr.LlamaForSequenceClassification(tr.LlamaConfig(**made, pad_token_id=pad)).eval()
        if name == "roberta":
            return tr.RobertaForSequenceClassification(tr.RobertaConfig(**made, pad_token_id=1)).eval()
        return tr.BertForSequenceClassification(tr.BertConfig(**made, pad_token_id=PAD)).eval()
