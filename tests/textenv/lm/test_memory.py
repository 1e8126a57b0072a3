"""Gradient checkpointing and bf16 autocast: less memory, the same policy."""

import logging
from contextlib import nullcontext

import pytest
import torch

import algos
from algos import LMPolicy, collect
from algos.training.invariants import InvariantError, scoring_dtype
from tests.helpers.architectures import make_family
from tests.helpers.lora import adapted, lora
from tests.helpers.models import (
    MODELS,
    WORDS,
    make_gpt2,
    make_llama,
    make_tokenizer,
)
from tests.helpers.small_agents import (
    agent_of,
    close_gradients,
    gradients,
    lm_policy,
    product_dtypes,
    random_table,
    scored,
    table_model,
    with_critic,
)
from tests.helpers.text_envs import play, text_env
from textenv import KLPenalty, KLReward, TextEnv
from textenv.lm import memory
from textenv.lm.model import LanguageModel
from textenv.prompts.prompts import PromptList

ANSWERS = [(5, 1, 7), (7,), (3, 3, 3, 3, 3)]


POLICIES = {
    "gpt2": lambda **options: lm_policy(make_gpt2, **options),
    "llama": lambda **options: lm_policy(make_llama, **options),
    "lora": lora,
    "critic": lambda **options: with_critic("llama", **options),
}


def make_opt(**options):
    """A model whose layers would switch their own dropout on in training mode."""
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        vocab_size=len(WORDS), hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, word_embed_proj_dim=32, init_std=0.2, dropout=0.5, pad_token_id=8, **options,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return OPTForCausalLM(config)


def loss_and_gradients(policy, rollout):
    """Of everything that an evaluation says."""
    policy.zero_grad()
    log_prob, entropy, value = policy.evaluate(rollout)
    loss = (log_prob + 0.3 * entropy.square() + value.square())[rollout["mask"]].sum()
    loss.backward()
    return loss.detach(), gradients(policy)


def forwards(module, kind):
    """Counts the calls of the modules of this kind, recomputation included."""
    calls = []
    for inner in module.modules():
        if kind in type(inner).__name__:
            inner.register_forward_hook(lambda *_: calls.append(1))
    return calls


def kept_bytes(policy, rollout):
    """Bytes that a forward pass keeps for the backward pass, parameters not counted."""
    own, kept = {p.data_ptr() for p in policy.parameters()}, {}

    def pack(x):
        if x.data_ptr() not in own:
            kept[x.data_ptr()] = x.numel() * x.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        evaluation = policy.evaluate(rollout)
    assert evaluation.log_prob.requires_grad
    return sum(kept.values())


# --- gradient checkpointing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_checkpointing_changes_no_gradient(name):
    rollout = play(text_env(), ANSWERS)
    plain, saving = (POLICIES[name](gradient_checkpointing=on) for on in (False, True))
    (one, expected), (two, found) = (loss_and_gradients(policy, rollout) for policy in (plain, saving))
    torch.testing.assert_close(two, one, atol=1e-6, rtol=1e-5)
    assert len(found) > 3
    close_gradients(found, expected)


@pytest.mark.heavy
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_activations_are_dropped_and_recomputed(name):
    rollout = play(text_env(), ANSWERS)
    plain, saving = (POLICIES[name](gradient_checkpointing=on) for on in (False, True))
    assert kept_bytes(saving, rollout) < 0.6 * kept_bytes(plain, rollout)
    layers = 4 if name == "critic" else 2
    for policy, times in ((plain, 1), (saving, 2)):
        calls = forwards(policy, "Attention")
        loss_and_gradients(policy, rollout)
        assert len(calls) == times * layers


@pytest.mark.parametrize("make", [lambda: make_gpt2(resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5), make_opt])
def test_checkpointing_leaves_dropout_off(make):
    """OPT's layers drop out by their own training flag, which `transformers`' checkpointing wants to be set."""
    rollout = play(text_env(), ANSWERS)
    policy = lm_policy(make, gradient_checkpointing=True).train()
    (one, first), (two, second) = (loss_and_gradients(policy, rollout) for _ in range(2))
    (plain, expected) = loss_and_gradients(lm_policy(make), rollout)
    for loss in (one, two):
        torch.testing.assert_close(loss, plain, atol=1e-6, rtol=1e-5)
    for found in (first, second):
        close_gradients(found, expected)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_decoding_keeps_its_cache(name, caplog):
    policy = LMPolicy(MODELS[name](), make_tokenizer(WORDS), gradient_checkpointing=True)
    loss_and_gradients(policy, play(text_env(), ANSWERS))  # nothing is left behind by a pass with gradient
    env = text_env(num_envs=1, max_new_tokens=8, forbidden=[7])
    with caplog.at_level(logging.WARNING):
        rollout = collect(env, policy, num_episodes=3, deterministic=True)
    assert set(policy.lm.cached.values()) == {True} and not caplog.records
    for row in range(3):
        mask = rollout["mask"][row]
        start = int(mask.int().argmax()) + 1
        prompt = rollout["observation"][row : row + 1, :start]
        expected = policy.lm.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False, suppress_tokens=[7],
            eos_token_id=None, pad_token_id=8,
        )[0, start:]  # fmt: skip
        assert rollout["action"][row][mask].tolist() == expected.tolist()


def test_without_a_gradient_nothing_is_checkpointed():
    """Afterwards the layers are as they were."""
    policy, rollout = lm_policy(gradient_checkpointing=True), play(text_env(), ANSWERS)
    layer, replaced = policy.lm.model.transformer.h[0], []
    layer.ln_1.register_forward_pre_hook(lambda *_: replaced.append("forward" in vars(layer)))
    policy.values(rollout)
    collect(text_env(), policy, num_episodes=4)
    assert set(replaced) == {False}
    loss_and_gradients(policy, rollout)
    assert replaced[-2:] == [True, False], "a pass, and its recomputation after it"
    assert not any("forward" in vars(module) for module in policy.modules())


def test_a_forward_that_others_put_on_a_layer_is_kept():
    policy, rollout = lm_policy(gradient_checkpointing=True), play(text_env(), ANSWERS)
    layer, seen = policy.lm.model.transformer.h[0], []
    inner = layer.forward
    layer.forward = lambda *a, **k: seen.append(1) or inner(*a, **k)
    outer = layer.forward
    loss_and_gradients(policy, rollout)
    assert len(seen) == 2 and layer.forward is outer


def test_a_model_without_marked_layers_is_refused():
    with pytest.raises(ValueError, match="has no GradientCheckpointingLayer"):
        LMPolicy(table_model(random_table()), make_tokenizer(WORDS), gradient_checkpointing=True)


@pytest.mark.parametrize("micro", [1, 2, None])
def test_minibatch_cuts_do_not_change_gradients(micro):
    """Lengths 1, 3 and 5: by autograd on bare sequences, one mean over all nine tokens."""
    policy = with_critic(model=adapted("llama"), gradient_checkpointing=True)
    env = text_env()
    env.task.scores = [2.0, -1.0, 1.0]
    rollout = scored(play(env, [(7,), (5, 1, 7), (3, 3, 3, 3, 3)]), policy)
    options = dict(micro_batch_size=micro, normalize_advantage=False, ent_coef=0.03, vf_coef=0.4)
    agent_of(env, policy, **options).update(rollout)
    found, loss = gradients(policy), 0.0
    policy.zero_grad()
    for row in range(3):
        mask = rollout["mask"][row]
        stop = int(mask.nonzero().max()) + 1
        ids, action = rollout["observation"][row : row + 1, :stop], rollout["action"][row][mask]
        every = policy.lm.model(ids).logits[0].log_softmax(-1)[mask[:stop]]
        value = policy.critic.head(policy.critic.trunk(ids).last_hidden_state[0, mask[:stop]])[:, 0]
        error = (value - rollout["value_target"][row][mask]).square()
        gain = rollout["advantage"][row][mask] * every.gather(1, action[:, None])[:, 0]
        loss = loss + (0.2 * error - gain + 0.03 * (every.exp() * every).sum(-1)).sum() / 9
    loss.backward()
    assert any("lora" in name for name in found) and any(name.startswith("critic.trunk") for name in found)
    close_gradients(found, gradients(policy))


# --- autocast --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_autocast_is_bf16_to_the_logits_only(name):
    rollout = play(text_env(), ANSWERS)
    plain, policy = (POLICIES[name](autocast=dtype) for dtype in (None, torch.bfloat16))
    seen = []
    for module in policy.modules():
        if type(module) is torch.nn.Linear or type(module).__name__ == "Conv1D":
            module.register_forward_hook(lambda m, args, out: seen.append((out.shape[-1] == 1, out.dtype)))
    one, two = plain.evaluate(rollout), policy.evaluate(rollout)
    assert (False, torch.bfloat16) in seen and (False, torch.float32) not in seen
    assert (True, torch.float32) in seen and (True, torch.bfloat16) not in seen, "the value head"
    assert {x.dtype for x in two} == {torch.float32}
    for x, y in zip(one, two, strict=True):
        torch.testing.assert_close(x, y, atol=0.3, rtol=0.1)
    probabilities = []
    for token in range(len(WORDS)):
        rollout["action"] = torch.full_like(rollout["action"], token)
        probabilities.append(policy.evaluate(rollout).log_prob[rollout["mask"]].exp())
    torch.testing.assert_close(sum(probabilities), torch.ones_like(probabilities[0]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_under_autocast_acting_and_scoring_agree(name):
    policy = POLICIES[name](autocast=torch.bfloat16)
    computed_in = product_dtypes(policy)
    rollout = collect(text_env(max_new_tokens=12), policy, num_episodes=16)
    assert set(policy.lm.cached.values()) == {True} and computed_in == {torch.bfloat16}
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    again = policy.evaluate(rollout)
    assert computed_in == {torch.bfloat16}
    assert (again.log_prob - rollout["log_prob"])[rollout["mask"]].abs().max() < 0.1
    values, mask = policy.values(rollout)[0], rollout["mask"]
    torch.testing.assert_close(values[mask], again.value.detach()[mask], atol=0.2, rtol=0.05)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_gradients_under_autocast_are_fp32(name):
    """Steps that are too small for bf16 move the weights."""
    policy, rollout = POLICIES[name](autocast=torch.bfloat16), play(text_env(), ANSWERS)
    _, found = loss_and_gradients(policy, rollout)
    trained = {key: p for key, p in policy.named_parameters() if p.requires_grad}
    assert found.keys() == trained.keys() and {g.dtype for g in found.values()} == {torch.float32}
    for key, p in trained.items():
        before, moves = p.detach().clone(), (p != 0) & (found[key] != 0)
        with torch.no_grad():
            p.add_(1e-6 * p.abs() * found[key].sign())
        assert (p != before)[moves].all(), key
        assert (p.bfloat16() == before.bfloat16()).float().mean() > 0.9, "bf16 weights would have stood still"


@pytest.mark.heavy
def test_the_reference_is_scored_in_the_same_autocast():
    for policy in (lm_policy(autocast=torch.bfloat16), lora(autocast=torch.bfloat16)):
        rollout, reference = collect(text_env(), policy, num_episodes=8), policy.reference()
        assert reference.autocast is torch.bfloat16
        computed_in = product_dtypes(reference.model)
        found = reference.evaluate(rollout).log_prob
        assert computed_in == {torch.bfloat16}
        torch.testing.assert_close(found, policy.evaluate(rollout).log_prob, atol=0.1, rtol=0)


@pytest.mark.parametrize(
    ("dtype", "gap", "refused"),
    [(torch.bfloat16, 0.3, False), (torch.bfloat16, 0.7, True), (None, 0.05, True), (None, 0.0, False)],
)
def test_kl_at_step_0_has_autocasts_tolerance(dtype, gap, refused):
    """The sampler's log-probabilities are the scorer's and a gap: .5 is allowed in bf16, .001 in fp32."""
    policy = with_critic(autocast=dtype, gradient_checkpointing=True)
    rollout = scored(play(text_env(), ANSWERS), policy)
    rollout["log_prob"] = rollout["log_prob"] + gap
    with pytest.raises(InvariantError, match="same weights") if refused else nullcontext():
        KLPenalty(policy.reference(), 0.1)(rollout, policy)
    assert (policy.divergence(rollout, policy.reference()).abs() < 1e-2).all()


def test_the_stepwise_penalty_uses_autocast_too():
    policy = lm_policy(autocast=torch.bfloat16)
    reference = policy.reference()
    computed_in = product_dtypes(reference.model)
    deck = PromptList([[0, 1]])
    deck.score = lambda turns: [0.0]
    env = TextEnv(deck, tokenizer=policy.lm.tokenizer, max_prompt_tokens=4, max_new_tokens=5)
    stepwise = KLReward(env, reference, 0.3)
    observation, _ = stepwise.reset(seed=0)
    step = policy.act({name: x[None] for name, x in observation.items()})
    info = stepwise.step({"token": int(step.action[0]), "log_prob": float(step.log_prob[0])})[-1]
    assert computed_in == {torch.bfloat16} and info["kl"] == pytest.approx(0, abs=0.1)


def test_ratios_have_their_dtypes_tolerance():
    assert scoring_dtype(lm_policy()) is torch.float32
    assert scoring_dtype(lm_policy(autocast=torch.bfloat16)) is torch.bfloat16
    assert scoring_dtype(lm_policy(lambda: make_gpt2().bfloat16())) is torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_another_dtype_is_refused(dtype):
    with pytest.raises(ValueError, match=str(dtype)):
        lm_policy(autocast=dtype)


@pytest.mark.heavy
def test_both_options_are_saved_with_the_policy(tmp_path):
    for number, make in enumerate((lm_policy, with_critic)):
        agent = agent_of(text_env(), make(autocast=torch.bfloat16, gradient_checkpointing=True, temperature=0.7))
        agent.save(tmp_path / str(number))
        loaded = algos.load(tmp_path / str(number))
        assert loaded.autocast is torch.bfloat16 and loaded.lm.gradient_checkpointing and loaded.temperature == 0.7
        rollout = play(text_env(), ANSWERS)
        for one, two in zip(agent.policy.evaluate(rollout), loaded.evaluate(rollout), strict=True):
            assert torch.equal(one, two)
        assert LMPolicy.load(tmp_path / str(number) / "policy", autocast=None).autocast is None


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3"])
def test_rows_read_in_parts_equal_all_at_once(family):
    """Without a gradient; padded on the left, so that positions and mask must be cut alike."""
    lm, length = LanguageModel(make_family(family), make_tokenizer(WORDS)), 40
    rows, at_once = 20, memory.POSITIONS_AT_ONCE // length
    tokens = torch.randint(0, len(WORDS), (rows, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[1, :7] = mask[at_once + 1, :5] = 0
    inputs = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    read = []
    lm.model.base_model.register_forward_pre_hook(
        lambda module, given, options: read.append(len(options["input_ids"])), with_kwargs=True
    )
    whole = lm.hidden(tokens, **inputs)
    with torch.no_grad():
        parts = lm.hidden(tokens, **inputs)
    assert read == [rows, at_once, rows - at_once] and at_once < rows
    torch.testing.assert_close(parts[mask.bool()], whole[mask.bool()], atol=1e-5, rtol=1e-5)
