"""Text environments as torchrl environments: specs, rollouts, masks and the collector."""

import gymnasium
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import Categorical
from torchrl.envs.utils import check_env_specs

from tests.helpers.models import WORDS, make_gpt2, make_tokenizer
from tests.helpers.text_envs import DISABLED, EOS, text_arguments, text_vector_env
from textenv import TextEnv, TextVectorEnv
from textenv.extras.torchrl import to_torchrl
from textenv.registration import NAMES, PROGRAMS


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A local model with nine tokens, and a classifier beside it."""
    from transformers import GPT2Config, GPT2ForSequenceClassification

    folder = tmp_path_factory.mktemp("model")
    config = GPT2Config(vocab_size=len(WORDS), n_layer=1, n_embd=8, n_head=1, id2label={0: "negative", 1: "positive"})
    for name, model in ((".", make_gpt2()), ("classifier", GPT2ForSequenceClassification(config))):
        model.save_pretrained(folder / name)
        make_tokenizer(WORDS).save_pretrained(folder / name)
    return folder


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("batched", [False, True])
def test_registered_environments_pass_check_env_specs(name, batched, model_folder):
    if name in ("OpenEnv", "TextWorld", "Words"):
        pytest.skip("needs a server, longer prompts, or other tokens: tests of its own")
    if name in PROGRAMS:
        pytest.skip("programs have no single environment, and games of several agents no step")
    made = dict(model=str(model_folder), max_prompt_tokens=80, max_length=128)
    made |= {"dataset": "chain_sum"} if name == "ReasoningGym" else {}
    if name == "Prompts":
        made |= {"prompts": ["a b"], "reward": lambda completions: [float(len(text)) for text in completions]}
    if name == "Reviews":
        made["classifier"] = str(model_folder / "classifier")
    if batched:
        env = to_torchrl(gymnasium.make_vec(f"textenv/{name}-v0", num_envs=2, autoreset_mode=DISABLED, **made))
    else:
        env = to_torchrl(gymnasium.make(f"textenv/{name}-v0", **made))
    assert env.batch_size == ((2,) if batched else ())
    assert type(env.action_spec) is Categorical and env.action_spec.dtype == torch.int64
    assert env.action_spec.shape == env.batch_size and env.action_spec.space.n == len(WORDS)
    check_env_specs(env)


def test_a_rollout_is_what_gymnasium_plays():
    env = to_torchrl(TextEnv(**text_arguments()))
    env.set_seed(3)
    torch.manual_seed(0)
    rollout = env.rollout(60, break_when_any_done=False)
    plain = TextEnv(**text_arguments())
    plain.reset(seed=3)  # torchrl's set_seed
    observation, _ = plain.reset()
    for step in rollout:
        assert step["tokens"].tolist() == observation["tokens"].tolist() and step["length"] == observation["length"]
        observation, *outcome, _ = plain.step(int(step["action"]))
        following = step["next"]
        assert following["tokens"].tolist() == observation["tokens"].tolist()
        assert [following[name].item() for name in ("reward", "terminated", "truncated")] == outcome
        assert following["done"].item() == (outcome[1] or outcome[2])
        if outcome[1] or outcome[2]:
            observation, _ = plain.reset()
    ends = rollout["next"]
    assert ends["terminated"].any() and ends["truncated"].any() and not (ends["terminated"] & ends["truncated"]).any()
    assert ends["reward"].any() and not ends["reward"][~ends["done"]].any()


def test_a_batched_rollout_is_what_gymnasium_plays():
    """Single slots are reset."""
    env = to_torchrl(text_vector_env())
    env.set_seed(3)
    torch.manual_seed(0)
    rollout = env.rollout(40, break_when_any_done=False)
    assert rollout.batch_size == (3, 40) and rollout["action"].dtype == torch.int64
    plain = text_vector_env()
    plain.reset(seed=3)
    observation, _ = plain.reset()
    for step in rollout.unbind(1):
        assert (step["tokens"].numpy() == observation["tokens"]).all()
        observation, reward, terminated, truncated, _ = plain.step(step["action"].numpy())
        given = observation | {"reward": reward, "terminated": terminated, "truncated": truncated}
        for name, expected in given.items():
            assert (step["next", name].numpy().reshape(expected.shape) == expected).all(), name
        if (done := terminated | truncated).any():
            observation, _ = plain.reset(options={"reset_mask": done})
    ends = rollout["next", "done"].squeeze(-1)
    assert (ends.any(0) & ~ends.all(0)).any()  # somewhere, some slots ended and others did not


def forbid(*ids):
    return TextEnv(**text_arguments(forbidden=ids))


@pytest.mark.heavy
@pytest.mark.parametrize("make, forbidden", [
    (lambda: forbid(EOS, 2), [{EOS, 2}]),
    (lambda: text_vector_env(forbidden=(EOS, 2)), [{EOS, 2}] * 3),
    (lambda: SyncVectorEnv([lambda: forbid(4), lambda: forbid(5)], autoreset_mode=DISABLED), [{4}, {5}]),
])  # fmt: skip
def test_forbidden_tokens_are_an_action_mask(make, forbidden):
    env = to_torchrl(make())
    check_env_specs(env)
    torch.manual_seed(0)
    rollout = env.rollout(200, break_when_any_done=False)
    slots = rollout.unbind(0) if env.batch_size else [rollout]
    for slot, ids in zip(slots, forbidden, strict=True):
        assert slot["action_mask"].dtype == torch.bool and slot["next", "action_mask"].shape == (200, len(WORDS))
        assert {i for i in range(len(WORDS)) if not slot["action_mask"].all(0)[i]} == ids
        assert set(slot["action"].tolist()) == set(range(len(WORDS))) - ids


@pytest.mark.heavy
@pytest.mark.parametrize("make", [lambda: TextEnv(**text_arguments()), text_vector_env])
@pytest.mark.filterwarnings("ignore:Creating .* which inherits from WeightUpdaterBase:DeprecationWarning")  # at import
def test_the_collector_of_torchrl_collects_text(make):
    from torchrl.collectors import Collector

    env = to_torchrl(make())
    policy = TensorDictModule(lambda tokens: env.action_spec.rand(), in_keys=["tokens"], out_keys=["action"])
    collector = Collector(env, policy, frames_per_batch=60, total_frames=120, auto_register_policy_transforms=False)
    batches = list(collector)
    collector.shutdown()
    assert [batch.numel() for batch in batches] == [60, 60]
    for batch in batches:
        ends = batch["next", "done"]
        assert ends.any() and batch["next", "reward"].any() and not batch["next", "reward"][~ends].any()


def test_what_torchrl_cannot_wrap_is_refused():
    for mode in (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP):
        with pytest.raises(ValueError, match=rf"{mode}, expected AutoresetMode.DISABLED.*make the vector env"):
            to_torchrl(TextVectorEnv(**text_arguments(num_envs=2, autoreset_mode=mode)))
    with pytest.raises(TypeError, match=r"'CartPole-v1', expected a gymnasium.Env or VectorEnv: make it with"):
        to_torchrl("CartPole-v1")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Creating .* which inherits from WeightUpdaterBase:DeprecationWarning")  # at import
def test_torchrls_collector_and_loss_learn_periods(model_folder):
    """Its GAE, its loss, its actor: nothing of ours but the environment; three full stops of three tokens earn 1."""
    from torchrl.collectors import Collector
    from torchrl.modules import ProbabilisticActor, ValueOperator
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value import GAE

    torch.manual_seed(1)
    options = dict(model=str(model_folder), k=3, max_new_tokens=3, max_prompt_tokens=32)
    env = to_torchrl(gymnasium.make_vec("textenv/Periods-v0", num_envs=8, autoreset_mode=DISABLED, **options))

    class Body(nn.Module):
        def __init__(self, outputs):
            super().__init__()
            self.layers = nn.Sequential(
                nn.Linear(36, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)
            )

        def forward(self, tokens, length):
            return self.layers(torch.cat([tokens, length], dim=-1).float())

    keys = ["tokens", "length"]
    logits = TensorDictModule(Body(len(WORDS)), in_keys=keys, out_keys=["logits"])
    actor = ProbabilisticActor(
        logits, in_keys=["logits"], out_keys=["action"], distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )  # fmt: skip
    critic = ValueOperator(Body(1), in_keys=keys)
    loss = ClipPPOLoss(actor, critic, entropy_coeff=0.0, normalize_advantage=True)
    gae = GAE(gamma=1.0, lmbda=0.95, value_network=critic)
    optimizer = torch.optim.Adam(loss.parameters(), lr=3e-3)
    returns = []
    options = dict(frames_per_batch=256, total_frames=256 * 20, auto_register_policy_transforms=False)
    for batch in Collector(env, actor, **options):
        done = batch["next", "done"]
        returns.append(batch["next", "reward"].sum().item() / done.sum().item())
        for _ in range(8):
            with torch.no_grad():
                gae(batch)
            steps = batch.reshape(-1)
            for index in torch.randperm(len(steps)).split(64):
                found = loss(steps[index])
                optimizer.zero_grad()
                (found["loss_objective"] + found["loss_critic"]).backward()
                nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
                optimizer.step()
    assert returns[0] < 0.5 and returns[-1] > 0.9
