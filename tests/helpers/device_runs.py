"""Trainings on one device, in a process of their own: ``python -m tests.helpers.device_runs KIND [NAMES]``.

KIND ``meta``: everything is on the CPU and torch's default device is ``meta``, so that a tensor made without naming its
device fails. KIND ``second``: the models are on the device of `tests.helpers.second_device`, so that a tensor that
stays on the CPU fails. Any other KIND is a device, such as ``cuda`` or ``cpu``.
"""

import sys
import tempfile
from contextlib import contextmanager, nullcontext
from pathlib import Path

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import algos
from algos import (
    A2C,
    DQN,
    GRPO,
    PPO,
    REINFORCE,
    RLOO,
    SAC,
    TD3,
    TRPO,
    League,
    LMPolicy,
    REINFORCEPlusPlus,
    RewardModelConfig,
    SFTConfig,
    WordsPolicy,
    evaluate,
    sft,
)
from algos.evaluation import summarise
from algos.finetuning import TextLoss, train_reward_model
from algos.make import make_policy
from algos.policies.critic import Critic
from algos.training.metrics import MetricMeans
from tests.helpers.models import (
    WORDS,
    make_bart,
    make_bloom,
    make_gpt2,
    make_llama,
    make_mistral,
    make_t5,
    make_tokenizer,
)
from tests.helpers.second_device import NAME, second_device
from textenv import KLReward, ProgramVectorEnv, RewardModel, Rewards, TextEnv, TextVectorEnv
from textenv.kl import KLPenalty
from textenv.lm.decoding import Decoder
from textenv.lm.model import LanguageModel
from textenv.prompts.samplers import ByPassRate
from textenv.rewards.transforms import Normalize

KIND = "cpu"
DEVICE: str | None = "cpu"
"""Argument of the agents."""
TYPE = "cpu"
"""Type of the device that everything must be on."""
STEPS = dict(num_steps=8, minibatch_size=8, num_epochs=2)
TEXT = dict(num_steps=None, num_episodes=4, minibatch_size=2, num_epochs=1)
LIMITS = dict(max_prompt_tokens=4, max_new_tokens=4)
REPLAY = dict(num_steps=4, learning_starts=8, batch_size=4)
"""With two environments, 8 steps an iteration."""


class Pictures(gymnasium.Env):
    """Small images and two choices, one of which counts from 1."""

    observation_space = spaces.Box(0, 255, (8, 9, 3), np.uint8)
    action_space = spaces.MultiDiscrete([2, 3], start=[1, 0])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 5
        return self.observation_space.sample(), {}

    def step(self, action):
        self.left -= 1
        return self.observation_space.sample(), float(action[0]), not self.left, False, {}


def make_env(name="CartPole-v1"):
    if name == "Pictures":
        return SyncVectorEnv([Pictures] * 2)
    options = {"vector_kwargs": {"autoreset_mode": AutoresetMode.SAME_STEP}, "vectorization_mode": "sync"}
    return gymnasium.make_vec(name, num_envs=2, **options)


def text_env(reward=None, **options):
    reward = reward or (lambda completion_ids, **_: [float(len(ids)) for ids in completion_ids])
    prompts, words = ["a b", "c d ."], make_tokenizer(WORDS)
    return TextVectorEnv(prompts=prompts, reward=reward, tokenizer=words, num_envs=4, **LIMITS, **options)


def on_cpu(make, *args, **options):
    """A model made as a user would make it: on the CPU."""
    with torch.device("cpu"):
        made = make(*args, **options)
    made.set_attn_implementation("eager")
    return made


def lm_policy(make=make_gpt2, **options):
    return LMPolicy(on_cpu(make), make_tokenizer(WORDS), **options)


def reward_model(labels=2):
    from tests.helpers.reward_models import make_model

    return RewardModel(on_cpu(make_model, "gpt2", labels=labels), make_tokenizer(WORDS))


def moved(model):
    return model if DEVICE is None else model.to(KIND)


def check(module):
    wrong = {name: str(x.device) for name, x in module.state_dict().items() if x.device.type != TYPE}
    assert not wrong, wrong


def train(algorithm, env, policy, steps=16, **options):
    agent = algorithm(env, policy, device=DEVICE, **options)
    agent.learn(steps)
    check(agent.policy)
    if isinstance(getattr(agent.penalty, "reference", None), torch.nn.Module):
        check(agent.penalty.reference)
    summarise(env, agent.policy, num_episodes=2)
    evaluate(env, agent.policy, num_episodes=1, deterministic=True)
    return agent


def control(algorithm, name="CartPole-v1", *, policy="auto", policy_kwargs=None, **options):
    env = make_env(name)
    return train(algorithm, env, make_policy(env, policy=policy, **(policy_kwargs or {})), **options)


def resumed(make, folder, *, load=True):
    """Train on the device, resume there, on the CPU, and there again."""
    steps = 0
    for place in [DEVICE, DEVICE, "cpu", DEVICE] if DEVICE else [None, None]:
        agent = make(place)
        agent.learn(steps := steps + 16, run_dir=folder, resume=folder if steps else None, checkpoint_every=8)
    check(agent.policy)
    if load:
        check(algos.load(folder, device=DEVICE))
        assert {p.device.type for p in algos.load(folder).parameters()} == {"cpu"}


def resumed_control(folder):
    cases = {
        "mlp": (PPO, dict(STEPS, normalize_rewards=True)),
        "lstm": (PPO, dict(STEPS, minibatch_size=1)),
        "gsde": (PPO, STEPS),
        "q": (DQN, dict(REPLAY, gradient_steps=2)),
        "sac": (SAC, dict(REPLAY, updates_per_step=0.25)),
        "sac_gsde": (SAC, dict(REPLAY, updates_per_step=0.25)),
        "td3": (TD3, dict(REPLAY, updates_per_step=0.25)),
    }
    for policy, (algorithm, options) in cases.items():
        name = "Pendulum-v1" if policy in ("gsde", "sac", "sac_gsde", "td3") else "CartPole-v1"

        def make(place, policy=policy, algorithm=algorithm, options=options, name=name):
            normalized = {"normalize_observations": True} if policy == "mlp" else {}
            env = make_env(name)
            return algorithm(env, make_policy(env, policy=policy, device=place, **normalized), **options)

        resumed(make, folder / policy, load=policy != "lstm" or KIND != NAME)  # torch cannot swap an LSTM's weights


def carried_reference(folder):
    """The environment loads its reference at the first rollout."""
    on_cpu(make_gpt2).save_pretrained(folder)
    make_tokenizer(WORDS).save_pretrained(folder)
    penalty = KLPenalty(lambda: LanguageModel.load(folder).requires_grad_(False), 0.1)
    train(PPO, text_env(penalty=penalty), LMPolicy.load(folder, device=DEVICE), **TEXT)
    policy = lm_policy()
    train(PPO, text_env(), policy, penalty=KLPenalty(moved(policy.reference()), 0.1), **TEXT)


def adapter(folder):
    from tests.helpers.lora import adapted

    with torch.device("cpu"):
        policy = LMPolicy(adapted("llama", base=on_cpu(make_llama)), make_tokenizer(WORDS))
    agent = train(PPO, text_env(), policy, penalty=KLPenalty(policy.reference(), 0.1), **TEXT)
    agent.save(folder)
    check(algos.load(folder, device=DEVICE))


def critics(folder):
    copied = Critic.from_language_model(LanguageModel(on_cpu(make_gpt2), make_tokenizer(WORDS)))
    train(PPO, text_env(), lm_policy(critic=copied), kl_coef=0.1, **TEXT)
    agent = train(PPO, text_env(), lm_policy(critic=Critic.from_reward_model(reward_model(1))), **TEXT)
    agent.save(folder)
    check(algos.load(folder, device=DEVICE))


def encoder_decoders(_):
    """With a critic and an adapter-less reference of their own, and the wrapper that charges the KL at each step."""
    for make in (make_t5, make_bart):
        policy = lm_policy(make, critic=Critic.from_language_model(lm_policy(make).lm))
        train(PPO, text_env(), policy, 1, penalty=KLPenalty(policy.reference(), 0.1, "exact", "loss"), **TEXT)
        env = TextEnv(prompts=["a b"], reward=lambda **_: [1.0], tokenizer=make_tokenizer(WORDS, ends=True), **LIMITS)
        wrapped = KLReward(env, moved(lm_policy(make)).lm, 0.1)
        wrapped.reset(seed=1)
        wrapped.step({"token": 1, "log_prob": -1.0})


def reward_models(_):
    one, other = reward_model(), reward_model(1)
    train(PPO, text_env(Rewards({"one": (one, 0.5), "other": Normalize(other)})), lm_policy(), **TEXT)
    assert one.model.device.type == other.model.device.type == TYPE


def registered(_):
    """The embedded model with the reference and the classifier of its environment."""
    recipe = algos.Recipe(
        env="textenv/Reviews-v0", config=algos.PPOConfig(**TEXT), num_envs=4, kl_coef=0.1, device=DEVICE
    )
    env = recipe.environment()
    agent = recipe.build(1, env=env)
    agent.learn(8)
    check(agent.policy)
    check(agent.penalty.reference)
    assert env.task.classifier.model.device.type == TYPE


def exact_kl(_):
    policy = lm_policy()
    penalty = KLPenalty(policy.reference(), 0.1, estimator="exact", place="loss")
    train(GRPO, text_env(), policy, penalty=penalty, num_episodes=4, group_size=2, minibatch_size=2)


def fine_tuning(_):
    policy, model = moved(lm_policy()), moved(reward_model(1))
    sft(policy, ["a b c .", "d c"] * 4, SFTConfig(batch_size=4, num_epochs=1, max_length=16, packing=False))
    asked = [{"prompt": "a b", "completion": " c"}] * 4
    sft(policy, asked, SFTConfig(batch_size=2, num_epochs=1, max_length=16), held_out=["a b"])
    policy.lm.perplexity(["a b c", "d"])
    pairs = [{"prompt": word, "chosen": " b", "rejected": " c"} for word in "abcd"]
    train_reward_model(model, pairs[:3], RewardModelConfig(batch_size=2, num_epochs=1), held_out=pairs[3:])
    auxiliary = TextLoss(["a b c", "c d . a"] * 4, coef=0.1, max_length=16)
    train(PPO, text_env(), policy, auxiliary=auxiliary, **TEXT)


def sampling(_):
    """Masks, top-k and the wrapper that charges the KL at each step."""
    train(PPO, text_env(forbidden=[0], min_new_tokens=2, stop=["."]), lm_policy(temperature=0.7), kl_coef=0.1, **TEXT)
    evaluate(text_env(forbidden=[1]), moved(lm_policy(top_k=3, top_p=0.9)), num_episodes=4)
    observation = {"tokens": np.array([[1, 2, 0]]), "length": np.array([[2]])}
    assert moved(lm_policy()).act(observation).action.device.type == TYPE
    env = TextEnv(prompts=["a b"], reward=lambda **_: [1.0], tokenizer=make_tokenizer(WORDS), forbidden=[2], **LIMITS)
    wrapped = KLReward(env, moved(lm_policy()).lm, 0.1)
    wrapped.reset(seed=1)
    wrapped.step({"token": 1, "log_prob": -1.0})


def kept_sets(folder):
    """Training on top-k and nucleus sampling, whose probabilities are those of the tokens that were kept."""
    agent = train(PPO, text_env(), lm_policy(top_k=5, top_p=0.9), kl_coef=0.1, **TEXT)
    agent.save(folder)
    check(algos.load(folder, device=DEVICE))


def weights_and_losses(_):
    """Weights of sampler and trainer, and each loss of the policy."""
    for name in ("token_truncate", "two_sided_token_mask", "sequence_mask", "geometric_truncate"):
        train(PPO, text_env(), lm_policy(), steps=1, importance_weights=name, **TEXT)
    for name in ("cispo", "opsm", "clip_cov", "kl_cov", "gspo", "dual_clipped"):
        options = dict(num_episodes=4, group_size=2, minibatch_size=2, policy_loss=f"{name}_policy_loss")
        train(GRPO, text_env(), lm_policy(), steps=1, **options)


def critic_options(_):
    """Value pretraining, λ of two kinds, and values by completions (VinePPO)."""
    value = dict(value_gae_lambda=1.0, length_adaptive_lambda=0.05, value_pretraining=0.5)
    train(PPO, text_env(), lm_policy(), **TEXT, **value)
    train(PPO, text_env(), lm_policy(), vine_samples=2, vine_interval=2, kl_coef=0.1, **(TEXT | dict(gamma=1.0)))


def samplers(_):
    """Prompts by pass rate, and groups that are collected again."""
    options = dict(num_episodes=4, group_size=2, minibatch_size=2, max_refills=1)
    train(GRPO, text_env(sampler=ByPassRate()), lm_policy(), **options)


def programs(_):
    """A program that asks the policy, and a game of two against earlier versions and a function."""

    def play(ask, task):
        return float(len(ask(task["question"])) + len(ask("a b", max_tokens=2)))

    def game(first, second):
        difference = float(len(first("a")) - len(second("b")))
        return np.sign(difference), -np.sign(difference)

    options = dict(tokenizer=make_tokenizer(WORDS), num_envs=2, max_new_tokens=3, max_length=24)
    tasks = [{"question": "a"}, {"question": "c d"}]
    train(PPO, ProgramVectorEnv(play, tasks=tasks, **options), lm_policy(), kl_coef=0.1, **TEXT)
    env = ProgramVectorEnv(game, agents=2, opponents=[None, lambda text: "good"], **options)
    agent = REINFORCE(env, lm_policy(), num_episodes=4, baseline="agent", device=DEVICE)
    agent.learn(24, callbacks=[League(every=1, size=2)])
    check(agent.policy)


def words(folder):
    """Control in words: the actions are texts of one model."""
    env = make_env()
    options = dict(describe=lambda observation: "a b" if observation[0] > 0 else "c", actions=["good", "bad"])
    lm = LanguageModel(on_cpu(make_gpt2), make_tokenizer(WORDS))
    policy = WordsPolicy(env.single_observation_space, env.single_action_space, lm, **options)
    train(PPO, env, policy, kl_coef=0.1, **STEPS)


def same_numbers(_):
    """A training on the device and one on the CPU move the weights alike.

    Not equally: where a gradient is nearly 0, rounding decides its sign, and Adam's step has the same size for all.
    """
    moves = []
    for place in (DEVICE, "cpu"):
        agent = PPO(text_env(), lm_policy(), device=place, **TEXT)
        start = weights_of(agent.policy)
        agent.learn(32)
        moves.append(weights_of(agent.policy) - start)
    assert torch.cosine_similarity(*moves, dim=0) > 0.99, moves


def weights_of(policy):
    return torch.cat([p.detach().cpu().flatten() for p in policy.parameters()])


def decoding(_):
    """Token by token against a plain pass; on CUDA by graphs, also after a change of weights, and without them."""
    makes = [long_gpt2, make_llama, make_bloom]
    if KIND != "meta":  # transformers makes the mask of its window on torch's default device
        makes.append(make_mistral)
    for make in makes:
        model = moved(on_cpu(make))
        model.config.max_position_embeddings = 100
        lm = LanguageModel(model, make_tokenizer(WORDS))
        decoder = Decoder(lm, num_slots=3, max_length=100)
        for seed in (0, 1):
            decode(lm, decoder, seed=seed)
            decoder.reset()
            with torch.no_grad():
                for weight in lm.model.parameters():
                    weight.mul_(1.25)
        graphs = getattr(decoder.step_all_slots, "graphs", {})
        assert len(graphs) == (2 if decoder.graphed else 0), (make, graphs)
        assert decoder.graphed == (TYPE == "cuda" and make is not make_bloom)

    # A model whose code waits for a number from the device cannot be captured
    lm = LanguageModel(moved(on_cpu(long_gpt2)), make_tokenizer(WORDS))

    def waits(*_):
        lm.model.transformer.wte.weight.sum().item()

    lm.model.transformer.register_forward_pre_hook(waits)
    decoder = Decoder(lm, num_slots=3, max_length=100)
    decode(lm, decoder, seed=0)
    assert not getattr(decoder.step_all_slots, "graphs", {})


def long_gpt2():
    return make_gpt2(n_positions=100)


def decode(lm, decoder, *, seed):
    tokens = np.random.default_rng(seed).integers(0, len(WORDS), (3, 100))
    for step in range(14):  # to 70 keys: on CUDA of two widths, 64 and 100, each often enough to be captured
        length = np.array([47, 57, 37]) + step
        with torch.no_grad():
            hidden = lm.hidden(torch.from_numpy(tokens).to(lm.device))
            last = torch.from_numpy(length - 1).to(lm.device)
            plain = lm.logits(hidden[torch.arange(3, device=lm.device), last]).float()
        torch.testing.assert_close(decoder.logits(tokens, length), plain, atol=5e-5, rtol=1e-4)


def watched(folder):
    """Evaluation while training, samples, and completions."""
    watch = algos.EvaluateEvery(text_env(), every=8, num_episodes=2)
    agent = PPO(text_env(), lm_policy(), device=DEVICE, kl_coef=0.1, **TEXT)
    agent.learn(16, run_dir=folder, callbacks=[watch], sample_every=1)
    check(algos.load(folder / "best", device=DEVICE))
    assert len(agent.policy.generate(["a b", "c"], max_new_tokens=3)) == 2


def several_devices(_):
    """A policy in two halves is refused, and a device puts it together."""
    if TYPE == "cpu":
        return
    env = make_env()
    policy = make_policy(env)
    policy.critic.to(KIND)
    try:
        PPO(env, policy)
    except ValueError as error:
        assert f"weights on cpu and {TYPE}:0" in str(error), error
    else:
        raise AssertionError("a policy on two devices was accepted")
    check(PPO(env, policy, device=DEVICE).policy)


def memory(_):
    """Recomputed layers; torch's second device cannot be entered again in a backward pass."""
    if KIND != NAME:
        train(PPO, text_env(), lm_policy(make_llama, gradient_checkpointing=True), micro_batch_size=1, **TEXT)


def metrics_of_two_devices(_):
    """A loss of one's own may log a number of the CPU."""
    means = MetricMeans()
    for on_device, on_cpu in ((1.0, 3.0), (2.0, 5.0)):
        value = torch.tensor(on_device, device="cpu").to(TYPE)
        means.add({"policy/loss": value, "own": torch.tensor(on_cpu, device="cpu")})
    assert means.result() == {"policy/loss": 1.5, "own": 4.0, "update/skipped": 0}


RUNS = {
    "ppo": lambda _: control(
        PPO, kl_coef=0.1, normalize_rewards=True, policy_kwargs=dict(normalize_observations=True), **STEPS
    ),
    "dqn": lambda _: control(DQN, policy="q", gradient_steps=2, target_update_gradient_steps=2, **REPLAY),
    "sac": lambda _: control(SAC, "Pendulum-v1", policy="sac", updates_per_step=0.5, **REPLAY),
    "td3": lambda _: control(TD3, "Pendulum-v1", policy="td3", updates_per_step=0.5, **REPLAY),
    "lstm": lambda _: control(PPO, policy="lstm", **(STEPS | dict(minibatch_size=1))),
    "text": lambda _: train(PPO, text_env(), lm_policy(), kl_coef=0.1, **TEXT),
    "text resumed": lambda folder: resumed(
        lambda place: PPO(text_env(), lm_policy(), device=place, kl_coef=0.1, fit_value_head=True, **TEXT), folder
    ),
    "reward models": reward_models,
    "same numbers": same_numbers,
    "decoding": decoding,
    "several devices": several_devices,
    "a2c": lambda _: control(A2C, num_steps=8),
    "reinforce": lambda _: control(REINFORCE, num_episodes=2),
    "rloo": lambda _: control(RLOO, num_episodes=2, group_size=2),
    "grpo": lambda _: control(GRPO, num_episodes=2, group_size=2, kl_coef=0.1),
    "trpo": lambda _: control(TRPO, num_steps=16),
    "gsde": lambda _: control(PPO, "Pendulum-v1", policy="gsde", **STEPS),
    "gaussian": lambda _: control(PPO, "Pendulum-v1", policy_kwargs=dict(log_std_init=-0.5), **STEPS),
    "cnn": lambda _: control(PPO, "Pictures", policy_kwargs=dict(hidden=8), **STEPS),
    "control resumed": resumed_control,
    "carried reference": carried_reference,
    "adapter": adapter,
    "critics": critics,
    "encoder-decoders": encoder_decoders,
    "registered": registered,
    "exact kl": exact_kl,
    "text trpo": lambda _: train(
        TRPO, text_env(), lm_policy(), steps=1, num_steps=None, num_episodes=4, conjugate_gradient_steps=3,
        critic_epochs=2,
    ),
    "fine-tuning": fine_tuning,
    "sampling": sampling,
    "memory": memory,
    "watched": watched,
    "reinforce++": lambda _: train(REINFORCEPlusPlus, text_env(), lm_policy(), kl_coef=0.1, **TEXT),
    "kept sets": kept_sets,
    "weights and losses": weights_and_losses,
    "critic options": critic_options,
    "samplers": samplers,
    "programs": programs,
    "words": words,
    "metrics of two devices": metrics_of_two_devices,
}  # fmt: skip


@contextmanager
def elsewhere():
    if KIND == "meta":
        torch.set_default_device("meta")
    with second_device() if KIND == NAME else nullcontext():
        yield


def main(kind, *names):
    """Run these, or all; torch cannot forget the device, so this process is for nothing else."""
    global KIND, DEVICE, TYPE
    KIND = kind
    if kind == "meta":
        DEVICE = None
    elif kind == NAME:
        DEVICE = "auto"
        TYPE = NAME
    else:
        DEVICE = kind
        TYPE = torch.device(kind).type
    with elsewhere(), tempfile.TemporaryDirectory() as home:
        for number, name in enumerate(names or RUNS):
            RUNS[name](Path(home) / str(number))
            print("passed", name, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
