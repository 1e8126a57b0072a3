"""Supervised fine-tuning against `transformers`' own loss and the environment's own ids."""

import json
import math

import numpy as np
import pytest
import torch

from algos import LMPolicy, SFTConfig, sft
from algos.finetuning.optimizer import dropout_on
from algos.finetuning.packing import (
    Example,
    check_packing,
    learnt_log_probs,
    pack,
    read_example,
    read_examples,
    token_rows,
)
from tests.helpers.chat_templates import TEMPLATES, own_template_tokenizer, template_tokenizer
from tests.helpers.conversations import CHAT_WORDS, Parrot, chat_tokenizer
from tests.helpers.lora import lora_policy
from tests.helpers.models import WORDS, make_bloom, make_gpt2, make_llama, make_mistral, make_t5, make_tokenizer
from tests.helpers.small_agents import take_gradients
from textenv import LanguageModel, TextVectorEnv, TokenVectorEnv

EOS = WORDS.index("<eos>")
MAKERS = {"gpt2": make_gpt2, "llama": make_llama, "sliding window": make_mistral}
ANSWERS = [
    {"prompt": "a b", "completion": "good ."},
    "d c b a . good",
    {"prompt": "c c c c a", "completion": "bad", "score": 1.0},
    {"prompt": "b", "completion": "a b c d a b c d"},
    "a a",
]
SMALL = dict(max_length=16, learning_rate=1e-2, weight_decay=0.0)


def make_lm(name="gpt2", **options):
    return LanguageModel(MAKERS[name](**options), make_tokenizer(WORDS))


def read(examples, tokenizer):
    return [read_example(i, example, tokenizer) for i, example in enumerate(examples)]


def words(example, vocabulary=WORDS):
    return " ".join(vocabulary[token].upper() if on else vocabulary[token] for token, on in zip(*example, strict=True))


def transformers_gradients(model, examples):
    """Sum of the losses of all learnt tokens, example by example, and the gradient of their mean."""
    count, total = sum(sum(example.learnt) for example in examples), 0.0
    for ids, learnt in examples:
        labels = [token if on else -100 for token, on in zip(ids, learnt, strict=True)]
        loss = model(input_ids=torch.tensor([ids]), labels=torch.tensor([labels])).loss * sum(learnt)
        (loss / count).backward()
        total += loss.item()
    return total, take_gradients(model)


# --- ids -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bos", [None, "."])
@pytest.mark.parametrize("completion", ["good bad", "good bad <eos>"])
def test_prompt_and_answer_have_the_environments_ids(bos, completion):
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tokenizer(WORDS, bos=bos)
    if bos:  # as Llama and Gemma have it, with an EOS that must not end the prompt
        special = [(".", 4), ("<eos>", EOS)]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=". $A <eos>", special_tokens=special)
    example = read_example(0, {"prompt": "a b", "completion": completion}, tokenizer)
    env = TextVectorEnv(
        prompts=["a b"], reward=lambda prompts, **_: [0.0], tokenizer=tokenizer, num_envs=1, max_new_tokens=5
    )
    state = env.reset(seed=0)[0]
    for token in (5, 6, EOS):
        state = env.step(np.array([token]))[0]
    ids = state["tokens"][0, : state["length"][0, 0]].tolist()
    assert example.ids == ids == [4] * bool(bos) + [0, 1, 5, 6, EOS]
    assert example.learnt == [False] * (len(ids) - 3) + [True] * 3


def test_of_a_chat_the_assistants_words_are_learnt():
    """Ids are those of the conversation."""
    tokenizer = chat_tokenizer()
    messages = [
        {"role": "user", "content": "d"},
        {"role": "assistant", "content": "good good"},
        {"role": "user", "content": "a a"},
        {"role": "assistant", "content": "bad"},
        {"role": "user", "content": "b"},
    ]
    example = read_example(0, {"messages": messages}, tokenizer)
    env = TokenVectorEnv(Parrot, tokenizer=tokenizer, num_envs=1, max_prompt_tokens=8, max_new_tokens=4)
    env.reset(seed=first_greeting(env, "d"))
    good, bad, end = (CHAT_WORDS.index(word) for word in ("good", "bad", "<|im_end|>"))
    for token in (good, good, end, bad, end):
        state = env.step(np.array([token]))[0]
    assert example.ids == state["tokens"][0, : state["length"][0, 0]].tolist()
    assert example.ids == tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    learnt = [token for token, on in zip(*example, strict=True) if on]
    assert learnt == [good, good, end, bad, end]


def first_greeting(env, word):
    """A seed whose first observation says this word."""
    for seed in range(20):
        state = env.reset(seed=seed)[0]
        if CHAT_WORDS.index(word) in state["tokens"][0, : state["length"][0, 0]]:
            return seed
    raise AssertionError


def test_what_is_learnt_of_each_kind_of_example():
    tokenizer = make_tokenizer(WORDS)
    assert [words(example) for example in read(ANSWERS[:3], tokenizer)] == [
        "a b GOOD . <EOS>",
        "d C B A . GOOD <EOS>",
        "c c c c a BAD <EOS>",
    ]
    assert words(read_example(0, "a b <eos>", tokenizer)) == "a B <EOS>"
    chat = {"prompt": [{"role": "user", "content": "d"}], "completion": [{"role": "assistant", "content": "good"}]}
    shown = words(read_example(0, chat, chat_tokenizer()), CHAT_WORDS)
    assert shown == "<|im_start|> user d <|im_end|> <|im_start|> assistant GOOD <|IM_END|>"


CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "good"}]


@pytest.mark.parametrize(
    ("example", "said"),
    [
        ({"prompt": "a"}, "example 3 is {'prompt': 'a'}"),
        (["a"], "example 3 is"),
        ("", "prompt 3 is empty"),
        ({"prompt": "a", "completion": 1}, "example 3 has the completion 1"),
        ({"messages": [{"role": "user", "content": "a"}]}, "chat of user; expected"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "chat of assistant; expected"),
        ({"messages": [{"role": "user", "content": "a"}] * 2}, "example 3: it is a chat of user, user; expected"),
        (
            {"prompt": "a", "completion": [{"role": role, "content": "a"} for role in ("user", "assistant")]},
            "completion .* of a prompt that is no chat",
        ),
        ({"messages": CHAT, "tools": "{}"}, "example 3 has the tools {}, expected a list"),
        (
            {"messages": CHAT, "chat_template_kwargs": {"chat_template": "x"}},
            "the chat_template_kwargs of example 3 has chat_template, expected",
        ),
        ({"prompt": "a", "completion": "b", "weight": 0.5}, "example 3 has weight=0.5, expected 1"),
        ({"messages": [CHAT[0], CHAT[1] | {"weight": 0}]}, "example 3 has weight=0, expected 1"),
        ({"prompt": [CHAT[0]], "completion": [CHAT[1] | {"weight": [0, 1]}]}, r"example 3 has weight=\[0, 1\]"),
        ({"messages": [CHAT[0], CHAT[1] | {"train": False}]}, "example 3 has train=False, expected 1"),
    ],
)
def test_an_example_of_another_kind_is_refused(example, said):
    with pytest.raises(ValueError, match=said):
        read_example(3, example, chat_tokenizer())


def test_an_answer_in_the_prompt_is_not_learnt_whatever_its_weight():
    """As the error advises."""
    earlier = [CHAT[0], CHAT[1] | {"weight": 0, "train": False}, CHAT[0]]
    example = read_example(0, {"prompt": earlier, "completion": [CHAT[1]]}, chat_tokenizer())
    plain = read_example(0, {"prompt": [CHAT[0], CHAT[1], CHAT[0]], "completion": [CHAT[1]]}, chat_tokenizer())
    assert example == plain


@pytest.mark.parametrize("weight", [1, 1.0, None, float("nan"), np.float32(1)])
def test_a_weight_of_1_or_none_changes_nothing(weight):
    row = {"messages": [CHAT[0], CHAT[1] | {"weight": weight}], "weight": weight}
    tokenizer = chat_tokenizer()
    assert read_example(0, row, tokenizer) == read_example(0, {"messages": CHAT}, tokenizer)


THOUGHTFUL = [
    *({"role": "user", "content": "time?"}, {"role": "assistant", "content": "four", "reasoning_content": "easy"}),
    *({"role": "user", "content": "now?"}, {"role": "assistant", "content": "five", "reasoning_content": "hard"}),
]


def answers_of(examples, tokenizer):
    """The text that is learnt of each example."""
    return [tokenizer.decode([token for token, on in zip(*example, strict=True) if on]) for example in examples]


def test_a_completion_is_learnt_as_the_template_writes():
    tokenizer = template_tokenizer("qwen 3")
    row = {"prompt": THOUGHTFUL[:3], "completion": THOUGHTFUL[3:]}
    expected = ["<think>\nhard\n</think>\n\nfive<|im_end|>"]
    assert answers_of(read_examples(0, row, tokenizer), tokenizer) == expected
    assert answers_of(read_examples(0, row | {"completion": THOUGHTFUL}, tokenizer), tokenizer) == expected  # repeated
    begun = row | {"prompt": [*THOUGHTFUL[:3], {"role": "assistant", "content": "fi"}]}
    for rest in ("ve", [{"role": "assistant", "content": "ve"}]):
        assert answers_of(read_examples(0, begun | {"completion": rest}, tokenizer), tokenizer) == ["ve<|im_end|>"]


def test_the_template_sees_a_rows_tools_and_variables():
    tokenizer = template_tokenizer("qwen 3")
    tools = [{"type": "function", "function": {"name": "clock"}}]
    for given in (tools, json.dumps(tools)):
        row = {"messages": THOUGHTFUL[:2], "tools": given, "chat_template_kwargs": {"unused": 1}}
        (example,) = read_examples(0, row, tokenizer)
        assert tokenizer.decode(example.ids) == tokenizer.apply_chat_template(
            THOUGHTFUL[:2], tools=tools, tokenize=False
        )


SYSTEM = {"role": "system", "content": "be brief"}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "tells the time"}}


@pytest.mark.parametrize("kind", ["messages", "completion of messages", "completion of text"])
@pytest.mark.parametrize("written", [True, False])
def test_what_the_template_leaves_out_is_warned_of(kind, written, caplog):
    """The system message and the tools, by the sentence of the environments."""
    template = TEMPLATES["qwen 3"]
    if not written:
        template = template.replace("in messages %}", "in messages if m.role != 'system' %}")
        template = template.replace("tools", "nothing")
    tokenizer = own_template_tokenizer("qwen 3", template)
    tokenizer.name_or_path = f"model of {kind}"
    row = {
        "messages": {"messages": [SYSTEM, *CHAT]},
        "completion of messages": {"prompt": [SYSTEM, CHAT[0]], "completion": CHAT[1:]},
        "completion of text": {"prompt": [SYSTEM, CHAT[0]], "completion": "good"},
    }[kind]

    (example,) = read_examples(0, row, tokenizer)
    assert ("be brief" in tokenizer.decode(example.ids)) == written
    (example,) = read_examples(0, row | {"tools": [CLOCK]}, tokenizer)
    assert ("tells the time" in tokenizer.decode(example.ids)) == written
    for lost in ("system messages", "tools"):
        warning = f"the chat template of model of {kind} does not write {lost}, so the model never reads them"
        assert (warning in caplog.text) == (not written)


def test_answers_rewritten_later_are_an_example_each():
    """By the template, as reasoning that it leaves out of former turns."""
    tokenizer = template_tokenizer("qwen 3")
    row = {"messages": THOUGHTFUL}
    expected = ["<think>\nhard\n</think>\n\nfive<|im_end|>", "<think>\neasy\n</think>\n\nfour<|im_end|>"]
    assert answers_of(read_examples(0, row, tokenizer), tokenizer) == expected
    with pytest.raises(ValueError, match="makes 2 examples"):
        read_example(0, row, tokenizer)
    lm = LanguageModel(make_gpt2(len(tokenizer), n_positions=256), tokenizer)
    history = sft(lm, [row], SFTConfig(num_epochs=1))
    assert history[0]["steps"] == sum(sum(example.learnt) for example in read_examples(0, row, tokenizer))


def test_rows_that_cannot_be_learnt_are_counted():
    tokenizer = template_tokenizer("r1")
    lm = LanguageModel(make_gpt2(len(tokenizer), n_positions=256), tokenizer)
    rows = ["it is four", {"messages": THOUGHTFUL[:2]}, {"messages": THOUGHTFUL[:2]}]
    with pytest.raises(ValueError, match=r"2 of 3 examples cannot be learnt\. The first: example 1: .*'completion'"):
        sft(lm, rows)


@pytest.mark.parametrize("labels", [[5, 3], [0, 0]])
def test_a_table_is_its_rows(labels):
    """Iterated, a data frame gives the names of its columns."""
    pandas = pytest.importorskip("pandas")
    rows = [{"prompt": "a", "completion": "good"}, {"prompt": "b c", "completion": "bad"}]
    histories = [
        sft(make_lm(), given, SFTConfig(**SMALL))[0]["sft/loss"]
        for given in (rows, pandas.DataFrame(rows, index=labels))
    ]
    assert histories[0] == histories[1]
    texts = ["a b", "c d good"]
    assert (
        sft(make_lm(), texts, SFTConfig(**SMALL))[0]["sft/loss"]
        == (sft(make_lm(), pandas.Series(texts, index=labels), SFTConfig(**SMALL))[0]["sft/loss"])
    )


def test_a_tokenizer_without_eos_is_refused():
    with pytest.raises(ValueError, match=r"set tokenizer\.eos_token"):
        read_example(0, "a b", make_tokenizer(WORDS, eos=None))


# --- loss ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("name", sorted(MAKERS))
def test_loss_and_gradient_are_those_of_transformers(name, packing):
    lm = make_lm(name)
    examples = read(ANSWERS, lm.tokenizer)
    expected, expected_gradients = transformers_gradients(lm.model, examples)
    targets = sum(sum(example.learnt) for example in examples)
    assert max(map(len, pack(examples, max_length=16))) > 1
    found = {}
    for key, parameter in lm.model.named_parameters():
        parameter.register_hook(lambda slope, key=key: found.update({key: found.get(key, 0) + slope}))
    for micro in (None, 1, 2):
        found.clear()
        config = SFTConfig(packing=packing, micro_batch_size=micro, **SMALL | {"learning_rate": 1e-20})
        (metrics,) = sft(lm, ANSWERS, config)
        assert metrics["sft/loss"] == pytest.approx(expected / targets, abs=1e-5)
        assert found.keys() == expected_gradients.keys()
        for key in sorted(found):
            torch.testing.assert_close(found[key], expected_gradients[key], atol=1e-5, rtol=1e-5)


def test_an_example_does_not_see_its_neighbours():
    lm = make_lm("llama")
    first, other, last = read(["a b c", "d d", "good bad"], lm.tokenizer)
    alone = learnt_log_probs(lm, token_rows([[last]], lm=lm))
    for row in ([first, last], [other, last], [first, other, last]):
        torch.testing.assert_close(learnt_log_probs(lm, token_rows([row], lm=lm))[-2:], alone, atol=1e-5, rtol=0)


def test_packing_loses_and_cuts_nothing():
    sizes = [3, 9, 1, 16, 7, 2, 2, 8, 5]
    rows = pack([Example([i] * n, [True] * n) for i, n in enumerate(sizes)], max_length=16)
    assert sorted(example.ids[0] for row in rows for example in row) == list(range(len(sizes)))
    filled = [sum(len(example.ids) for example in row) for row in rows]
    assert max(filled) <= 16 and len(rows) == math.ceil(sum(sizes) / 16)


def test_a_model_that_mixes_rows_must_go_unpacked():
    lm = LanguageModel(make_bloom(), make_tokenizer(WORDS))
    with pytest.raises(ValueError, match=r"Bloom.*packing=False"):
        sft(lm, ANSWERS, SFTConfig(**SMALL))
    assert sft(lm, ANSWERS, SFTConfig(packing=False, **SMALL))[0]["sft/loss"] > 0
    check_packing(make_lm("gpt2"))


# --- training --------------------------------------------------------------------------------------------------------


def test_it_learns_examples_and_reports_as_learn_does(tmp_path):
    lm, text = make_lm(), "a b c d . good bad"
    history = sft(lm, [text] * 8, SFTConfig(num_epochs=30, batch_size=8, **SMALL), held_out=[text], run_dir=tmp_path)
    assert [row["epoch"] for row in history] == list(range(1, 31)) and history[0]["steps"] == 8 * 7
    assert history[0]["held_out/perplexity"] > 2 and history[-1]["held_out/perplexity"] < 1.1
    assert history[-1]["held_out/loss"] == pytest.approx(math.log(history[-1]["held_out/perplexity"]))
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 30


def test_the_first_loss_is_the_untrained_models():
    """One step an epoch: the loss that is logged was measured before it."""
    lm = make_lm()
    examples = read(ANSWERS, lm.tokenizer)
    total, _ = transformers_gradients(lm.model, examples)
    loss = sft(lm, ANSWERS, SFTConfig(**SMALL))[0]["sft/loss"]
    assert loss == pytest.approx(total / sum(sum(example.learnt) for example in examples), abs=1e-5)


def test_packed_and_unpacked_training_agree():
    config = dict(num_epochs=5, batch_size=len(ANSWERS), **SMALL)
    one, two = make_lm(), make_lm()
    history = [sft(lm, ANSWERS, SFTConfig(packing=p, **config)) for lm, p in ((one, True), (two, False))]
    assert history[0][-1]["sft/loss"] == pytest.approx(history[1][-1]["sft/loss"], abs=1e-4)
    assert history[0][-1]["sft/loss"] < history[0][0]["sft/loss"] / 2


def test_dropout_is_on_only_while_training():
    policy = LMPolicy(make_gpt2(resid_pdrop=0.5), make_tokenizer(WORDS))
    seen = []
    policy.lm.model.transformer.register_forward_hook(
        lambda module, *_: seen.append((module.h[0].mlp.dropout.training, torch.is_grad_enabled()))
    )
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = sft(policy, ANSWERS, SFTConfig(packing=False, **SMALL), held_out=ANSWERS)
    assert seen == [(True, True), (False, False)]
    assert not any(module.training for module in policy.lm.model.modules())
    assert torch.equal(torch.get_rng_state(), before)
    losses = [
        sft(LMPolicy(make_gpt2(resid_pdrop=p), make_tokenizer(WORDS)), ANSWERS, SFTConfig(seed=seed, **SMALL))
        for p, seed in ((0.5, 1), (0.5, 2), (0.0, 1))
    ]
    found = [history[0]["sft/loss"] for history in losses]
    assert found[0] == pytest.approx(first[0]["sft/loss"], abs=2.0) and len({round(x, 4) for x in found}) == 3


@pytest.mark.parametrize("make", [make_gpt2, make_llama])
def test_recomputed_activations_repeat_their_dropout(make):
    """The gradient with checkpointing is the one without, of the same random numbers."""
    found = []
    for checkpointing in (False, True):
        options = dict(resid_pdrop=0.3, attn_pdrop=0.3) if make is make_gpt2 else dict(attention_dropout=0.3)
        lm = LanguageModel(make(**options), make_tokenizer(WORDS), gradient_checkpointing=checkpointing)
        rows = token_rows([[example] for example in read(ANSWERS, lm.tokenizer)], lm=lm)
        with dropout_on(lm.model, seed=5):
            learnt_log_probs(lm, rows).sum().backward()
        found.append({name: p.grad for name, p in lm.named_parameters()})
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, atol=1e-5, rtol=1e-4, msg=name)


def test_an_error_leaves_dropout_off():
    lm = make_lm()
    with torch.no_grad():
        lm.model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="weights are unchanged"):
        sft(lm, ANSWERS, SFTConfig(packing=False, **SMALL))
    assert not any(module.training for module in lm.model.modules())


def test_of_lora_only_the_adapter_learns():
    policy = lora_policy()
    before = {name: p.detach().clone() for name, p in policy.lm.named_parameters()}
    history = sft(policy, ANSWERS, SFTConfig(num_epochs=5, **SMALL))
    assert history[-1]["sft/loss"] < history[0]["sft/loss"]
    moved = {name for name, p in policy.lm.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name, p in policy.lm.named_parameters() if p.requires_grad} != set()


def test_too_long_examples_are_cut_and_counted():
    lm = make_lm()
    long = {"prompt": "a b", "completion": "c c c c c c c"}
    asked = {"prompt": "a b c d a b c d", "completion": "good"}
    with pytest.warns(UserWarning, match=r"of 3 examples, 2 were longer than max_length=8 .* 1 were dropped"):
        history = sft(lm, [long, asked, "a b"], SFTConfig(max_length=8))
    assert history[0]["steps"] == 6 + 2
    with pytest.raises(ValueError, match="none of the 1 examples has a target in its first 8 tokens"):
        sft(lm, [asked], SFTConfig(max_length=8))
    with pytest.raises(ValueError, match="max_length is 1024, but the model's context is 64 tokens"):
        sft(lm, ["a b"], SFTConfig(max_length=1024))
    assert sft(lm, ["a b"])[0]["steps"] == 2  # without a number it is what the model reads


def test_completions_that_repeat_their_prompts_are_warned_of(recwarn):
    repeated = {"prompt": "a b", "completion": " a b good ."}
    with pytest.warns(UserWarning, match=r"2 of 3 completions in examples begin with .* \(the first is row 1\)"):
        sft(make_lm(), ["a b", repeated, {"prompt": "c", "completion": "bad"}, repeated], SFTConfig(**SMALL))
    recwarn.clear()
    sft(make_lm(), [repeated, "a b", {"prompt": "c", "completion": "bad"}])
    assert not [warning for warning in recwarn if "completions in" in str(warning.message)]


def test_what_cannot_be_trained_is_refused():
    with pytest.raises(TypeError, match=r"model is a GPT2LMHeadModel, expected textenv\.LanguageModel"):
        sft(make_gpt2(), ["a b"])
    with pytest.raises(ValueError, match="no parameter of the model requires a gradient"):
        sft(LMPolicy(make_gpt2(), make_tokenizer(WORDS)).reference(), ["a b"], SFTConfig(**SMALL))
    with pytest.raises(ValueError, match=r"SFTConfig\.warmup_ratio is 2"):
        SFTConfig(warmup_ratio=2)


@pytest.mark.parametrize("packing", [True, False])
def test_an_encoder_decoder_learns_pairs_one_a_row(packing):
    """Unpacked texts were learnt, by a decoder that read one token; packed pairs were refused as texts."""
    lm = LanguageModel(make_t5(), make_tokenizer(WORDS))
    pairs = [{"prompt": "a b", "completion": "good"}, {"prompt": "c d", "completion": "bad"}]
    config = SFTConfig(packing=packing, num_epochs=1)
    with pytest.raises(ValueError, match=r"The first: example 1 is the text 'a b', but T5.* is an encoder-decoder"):
        sft(lm, [pairs[0], "a b"], config)
    with pytest.raises(ValueError, match=r"1 of 2 held_out cannot be learnt.*encoder-decoder"):
        sft(lm, pairs, config, held_out=[pairs[0], "a b"])
    if packing:
        with pytest.raises(ValueError, match=r"T5.* is an encoder-decoder, which reads one example a row: set"):
            sft(lm, pairs, config)
    else:
        assert sft(lm, pairs, config)[0]["steps"] == 4, "each answer and its EOS"


def test_gradients_of_another_training_are_dropped():
    def trained(left_over):
        lm = make_lm()
        for p in lm.parameters():
            p.grad = torch.ones_like(p) if left_over else None
        sft(lm, ANSWERS, SFTConfig(**SMALL))
        return lm.state_dict()

    clean, other = trained(False), trained(True)
    assert all(torch.equal(clean[name], other[name]) for name in clean)
