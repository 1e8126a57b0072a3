"""Small language models with adapters; a test that imports this is skipped without `peft`."""

import torch

from algos import LMPolicy
from tests.helpers.models import WORDS, make_gpt2, make_llama, make_tokenizer
from tests.helpers.packages import lazy_import

peft = lazy_import("peft")


MAKERS = {"gpt2": (make_gpt2, ["c_attn"]), "llama": (make_llama, ["q_proj", "v_proj", "down_proj"])}


def adapted(name="gpt2", *, base=None, seed=0, **options):
    """A small model with a fresh LoRA of rank 2, whose dropout is on until someone turns it off."""
    make, targets = MAKERS[name]
    defaults = dict(r=2, target_modules=targets, fan_in_fan_out=name == "gpt2", lora_dropout=0.5)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = peft.LoraConfig(task_type="CAUSAL_LM", **(defaults | options))
        return peft.get_peft_model(make() if base is None else base, config)


def lora_policy(name="gpt2", *, temperature=1.0, **options):
    return LMPolicy(adapted(name, **options), make_tokenizer(WORDS), temperature=temperature)


def lora(**options):
    """On a frozen base, in whose first layer no input has a gradient."""
    policy = LMPolicy(adapted("llama"), make_tokenizer(WORDS), **options)
    with torch.no_grad():
        for name, p in policy.named_parameters():
            if "lora_B" in name or name.startswith("value_head"):
                p.normal_(generator=torch.Generator().manual_seed(2), std=0.3)
    return policy
