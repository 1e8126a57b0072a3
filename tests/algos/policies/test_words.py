"""`WordsPolicy`: its probabilities by hand, in every autoreset mode, saved, loaded, with LoRA and with other values."""

import itertools
from contextlib import closing

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import concatenate, create_empty_array
from hypothesis import given, settings, strategies as st
from tensordict import TensorDict

import algos
from algos import A2C, GRPO, PPO, TRPO, Critic, LMPolicy, WordsPolicy, collect, evaluate, make_policy
from tests.helpers.errors import refused
from tests.helpers.lora import adapted
from tests.helpers.models import WORDS, make_gpt2, make_llama, make_t5, make_tokenizer
from tests.helpers.small_agents import random_table, table_model
from textenv import KLPenalty, LanguageModel

LETTERS = ["a", "b", "c", "d"]
few = settings(derandomize=True, deadline=None, database=None, max_examples=40)


def letter(observation):
    """One of three letters; observations 2 and 3 have the same."""
    return LETTERS[min(int(observation), 2)]


def model(make=make_gpt2, **options):
    return LanguageModel(make(), make_tokenizer(WORDS), **options)


def lookup(seed=0):
    return LanguageModel(table_model(random_table(seed)), make_tokenizer(WORDS))


def policy_of(lm, actions, *, space=None, describe=letter, instructions="", **options):
    space = spaces.Discrete(len(actions)) if space is None else space
    return WordsPolicy(
        spaces.Discrete(4), space, lm, describe=describe, actions=actions, instructions=instructions, **options
    )


def frozen_lake(num_envs=4, **options):
    return gym.make_vec("FrozenLake-v1", num_envs=num_envs, is_slippery=False, vectorization_mode="sync", **options)


def probabilities(policy, observations):
    """Of each action, by the policy's own scores ``[m, n]``."""
    count = policy.distribution.size
    rollout = {"observation": torch.eye(4)[observations].repeat_interleave(count, 0)}
    action = torch.arange(count).repeat(len(observations))
    log_prob, _ = policy.distribution.score(policy.output(rollout), action)
    return log_prob.exp().reshape(len(observations), count)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_words_of_one_token_have_their_probabilities(temperature):
    """A table of next-token probabilities: the word's entry in the row of the description, among the words."""
    lm = lookup()
    lm.temperature = temperature
    policy = policy_of(lm, ["good", "bad", "."])
    ids = [WORDS.index(word) for word in ("good", "bad", ".")]
    expected = (random_table()[[0, 1, 2, 2]][:, ids] / temperature).softmax(-1)
    torch.testing.assert_close(probabilities(policy, [0, 1, 2, 3]), expected)


def test_longer_words_are_products_along_their_tree():
    policy = policy_of(lookup(), ["good d", "good a", "bad", ". a b"])
    table = random_table().exp()
    w = {word: i for i, word in enumerate(WORDS)}
    good, bad, dot = w["good"], w["bad"], w["."]
    expected = []
    for state in (w["a"], w["b"]):
        first = table[state, [good, bad, dot]] / table[state, [good, bad, dot]].sum()
        after_good = table[good, [w["d"], w["a"]]] / table[good, [w["d"], w["a"]]].sum()
        expected.append(torch.stack([first[0] * after_good[0], first[0] * after_good[1], first[1], first[2]]))
    torch.testing.assert_close(probabilities(policy, [0, 1]), torch.stack(expected))


@pytest.mark.heavy
@few
@given(st.data())
def test_any_words_are_written_as_by_constrained_decoding(data):
    """Against an enumeration: token by token, each among those that continue one of the words."""
    texts = st.lists(st.sampled_from(LETTERS), min_size=1, max_size=4).map(tuple)
    words = data.draw(st.lists(texts, min_size=1, max_size=6, unique=True))
    free = [w for w in words if not any(w != other and other[: len(w)] == w for other in words)]
    policy = policy_of(model(), [" ".join(word) for word in free])
    lm = policy.language_model
    prompt = [WORDS.index(LETTERS[1])]
    expected = []
    for word in free:
        probability = 1.0
        for depth, token in enumerate(word):
            followers = sorted({other[depth] for other in free if other[:depth] == word[:depth]})
            so_far = torch.tensor([prompt + [WORDS.index(w) for w in word[:depth]]])
            with torch.no_grad():
                logits = lm.model(so_far).logits[0, -1, [WORDS.index(f) for f in followers]]
            probability *= logits.softmax(-1)[followers.index(token)].item()
        expected.append(probability)
    torch.testing.assert_close(probabilities(policy, [1])[0], torch.tensor(expected), atol=1e-5, rtol=1e-4)


def test_values_are_read_after_the_description():
    policy = policy_of(lookup(), ["good", "bad"])
    weights = torch.arange(float(len(WORDS)))
    policy.critic.weight.data[0] = weights
    observations = torch.eye(4).reshape(2, 2, 4)
    assert policy.value(observations).tolist() == [[0, 1], [2, 2]]


@pytest.mark.parametrize("make", [make_gpt2, make_llama, make_t5])
def test_acting_and_scoring_agree(make):
    env = frozen_lake()
    policy = WordsPolicy(
        env.single_observation_space,
        env.single_action_space,
        model(make),
        describe=lambda s: " ".join(LETTERS[: 1 + s % 4]),
        actions=["good a", "good b", "bad", "."],
    )
    rollout = collect(env, policy, num_steps=16, seed=1)
    mask = rollout["mask"]
    torch.testing.assert_close(policy.evaluate(rollout).log_prob[mask], rollout["log_prob"][mask], atol=1e-5, rtol=1e-4)


def test_equal_descriptions_are_read_once():
    read = []

    def counted(observation):
        read.append(int(observation))
        return letter(observation)

    policy = policy_of(model(), ["good", "bad"], describe=counted)
    tokens = []
    embedding = policy.language_model.model.transformer.wte
    embedding.register_forward_hook(lambda _, inputs, __: tokens.append(inputs[0].numel()))
    observations = torch.eye(4)[[0, 1, 2, 3, 2, 3, 0]]
    values = policy.value(observations)
    assert sorted(read) == [0, 1, 2, 3] and tokens[-1] == 3
    assert values.shape == (7,)
    policy.value(observations)
    assert len(read) == 4, "a known observation is not described again"


def signs(observation):
    """A letter for the sign of each number of CartPole's observation."""
    return " ".join(LETTERS[int(value > 0) + 2 * (index % 2)] for index, value in enumerate(observation))


def test_what_was_computed_is_forgotten_with_the_weights():
    policy = policy_of(model(), ["good", "bad"])
    lm = policy.language_model
    everything = np.arange(4)
    first = policy.act(everything, deterministic=True).log_prob
    lm.model.transformer.wte.weight.data.neg_()  # unseen by counters of versions
    second = policy.act(everything, deterministic=True).log_prob
    lm.temperature = 7.0
    third = policy.act(everything, deterministic=True).log_prob
    assert not torch.allclose(first, second) and not torch.allclose(second, third)
    other = policy_of(lm, ["good", "bad"])
    assert torch.equal(other.act(everything, deterministic=True).log_prob, third)


@pytest.mark.heavy
@pytest.mark.parametrize("change", ["in place", "data", "replaced"])
def test_changes_of_frozen_weights_are_seen(change):
    policy = policy_of(model(), ["good", "bad"])
    policy.requires_grad_(False)
    embedding = policy.language_model.model.transformer.wte
    everything = np.arange(4)
    before = policy.act(everything, deterministic=True).log_prob
    with torch.no_grad():
        if change == "in place":
            embedding.weight[1:].mul_(-1)  # not the first row
        elif change == "data":
            embedding.weight.data.neg_()
        else:
            embedding.weight = torch.nn.Parameter(-embedding.weight, requires_grad=False)
    assert not torch.allclose(policy.act(everything, deterministic=True).log_prob, before)


def test_a_description_may_read_images_among_other_parts():
    space = spaces.Dict({"camera": spaces.Box(0, 255, (8, 8, 3), np.uint8), "door": spaces.Discrete(4)})
    policy = WordsPolicy(
        space, spaces.Discrete(2), lookup(), describe=lambda parts: LETTERS[parts["door"]], actions=["good", "bad"],
        instructions="",
    )  # fmt: skip
    doors = np.array([0, 1, 3])
    observation = {"camera": np.full((3, 8, 8, 3), 7, np.uint8), "door": doors}
    assert policy.texts(observation) == ["a", "b", "d"]
    step = policy.act(observation, deterministic=True)
    words = [WORDS.index(word) for word in ("good", "bad")]
    expected = random_table()[[WORDS.index(letter) for letter in "abd"]][:, words].log_softmax(-1).amax(-1)
    torch.testing.assert_close(step.log_prob, expected)


@pytest.mark.parametrize("space", [
    spaces.Dict({"hp": spaces.Box(0, 99, (2,), np.int32), "gold": spaces.Box(0, 2**40, (), np.int64)}),
    spaces.Dict({"doors": spaces.MultiBinary(3), "camera": spaces.Box(0, 255, (8, 8, 3), np.uint8)}),
    spaces.Tuple([spaces.Box(-9, 9, (2,), np.int8), spaces.Discrete(3, start=5), spaces.MultiDiscrete([2, 3])]),
    spaces.MultiBinary([2, 2]),
    spaces.Dict({"inner": spaces.Tuple([spaces.MultiBinary(2), spaces.Box(-1, 1, (2,), np.float32)])}),
], ids=repr)  # fmt: skip
def test_a_description_reads_the_numbers_of_the_environment(space):
    """As `repr` shows them: integers stay integers, so that they may be indices."""
    space.seed(1)
    sample = space.sample()
    if isinstance(sample, dict) and "gold" in sample:
        sample["gold"] = np.array(12_345)
    seen = []
    policy = WordsPolicy(
        space, spaces.Discrete(2), model(), describe=lambda parts: seen.append(parts) or "a", actions=["good", "bad"],
        instructions="",
    )  # fmt: skip
    policy.texts(batch_of_one(space, sample))
    assert flat_parts(seen[-1]) == flat_parts(sample)


def batch_of_one(space, sample):
    return concatenate(space, [sample], create_empty_array(space, 1))


def flat_parts(observation):
    """The parts of an observation in order, each with its dtype."""
    if isinstance(observation, dict):
        return [entry for part in observation.values() for entry in flat_parts(part)]
    if isinstance(observation, tuple):
        return [entry for part in observation for entry in flat_parts(part)]
    array = np.asarray(observation)
    return [(array.dtype.name, array.tolist())]


def test_an_integer_that_float32_lacks_is_warned_of(caplog):
    space = spaces.Dict({"gold": spaces.Box(0, 2**40, (), np.int64)})
    policy = WordsPolicy(
        space, spaces.Discrete(2), model(), describe=lambda parts: "a", actions=["good", "bad"], instructions=""
    )
    policy.texts({"gold": np.array([2**24 + 1])})
    assert "16,777,216" in caplog.text


@pytest.mark.heavy
@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("algorithm", [PPO, A2C, GRPO, TRPO])
def test_it_trains_in_every_autoreset_mode(algorithm, mode):
    env = gym.make_vec("CartPole-v1", num_envs=4, vectorization_mode="sync", vector_kwargs={"autoreset_mode": mode})
    policy = WordsPolicy(
        env.single_observation_space, env.single_action_space, model(), describe=signs, actions=["good", "bad"]
    )
    options = {"num_steps": 16} if algorithm is not GRPO else {"num_episodes": 8, "group_size": 4}
    weights = {name: p.clone() for name, p in policy.named_parameters()}
    history = algorithm(env, policy, learning_rate=1e-2, **options).learn(128)
    assert history[-1]["steps"] >= 128
    changed = [name for name, p in policy.named_parameters() if not torch.equal(weights[name], p)]
    assert any(name.startswith("language_model") for name in changed)


def test_each_number_of_several_is_asked_for():
    space = spaces.MultiDiscrete([2, 3])
    policy = policy_of(
        lookup(), [["good", "bad"], ["good", "bad", "."]], space=space, describe=lambda s: "a", instructions="b"
    )
    assert policy.texts(np.array([0]))[0] == "b\na\n1 of 2:"
    action = policy.act(np.array([0, 1, 2])).action
    assert action.shape == (3, 2)
    assert policy.words(np.array([[1, 2], [0, 0]])) == ["bad .", "good good"]


def test_numbers_of_a_box_are_values_between_its_bounds():
    space = spaces.Box(np.array([-2, 0], dtype=np.float32), np.array([2, 1], dtype=np.float32))
    words = [["a", "b", "c", "d", "."], ["good", "bad", "a", "b", "c"]]
    policy = policy_of(model(), words, space=space)
    step = policy.act(np.zeros(200, dtype=np.int64))
    seen = {tuple(row) for row in step.action.tolist()}
    assert seen <= set(itertools.product([-2.0, -1.0, 0.0, 1.0, 2.0], [0.0, 0.25, 0.5, 0.75, 1.0])) and len(seen) > 5
    rollout = {"observation": torch.eye(4)[[0] * 200]}
    log_prob, entropy = policy.distribution.score(policy.output(rollout), step.action)
    torch.testing.assert_close(log_prob, step.log_prob, atol=1e-5, rtol=1e-4)
    # The entropy of two independent choices is the mean of -log p over all pairs
    everything = torch.tensor(list(itertools.product([-2.0, -1.0, 0.0, 1.0, 2.0], [0.0, 0.25, 0.5, 0.75, 1.0])))
    all_log_probs, _ = policy.distribution.score(policy.output({"observation": torch.eye(4)[[0] * 25]}), everything)
    assert all_log_probs.exp().sum().item() == pytest.approx(1, abs=1e-5)
    assert entropy[0].item() == pytest.approx(-(all_log_probs.exp() * all_log_probs).sum().item(), abs=1e-4)


@pytest.mark.heavy
@pytest.mark.parametrize("make_lm", [model, lambda: LanguageModel(adapted(), make_tokenizer(WORDS))])
def test_the_kl_to_the_initial_model_starts_at_zero(make_lm):
    env = frozen_lake()
    policy = WordsPolicy(
        env.single_observation_space, env.single_action_space, make_lm(), describe=lambda s: LETTERS[s % 4],
        actions=["good", "bad", ".", "a"],
    )  # fmt: skip
    agent = PPO(env, policy, num_steps=16, learning_rate=3e-2, kl_coef=0.1)
    rows = agent.learn(256)
    kls = [row["reference/kl"] for row in rows if row.get("reference/kl") is not None]
    assert kls[0] == pytest.approx(0, abs=1e-4) and max(kls) > 1e-3

    # Afterwards: the reference still has the initial probabilities, and the exact KL is that of the tables
    rollout = collect(env, policy, num_steps=8, seed=3)
    exact = KLPenalty(agent.penalty.reference, 0.0, "exact", "loss")
    exact(rollout, policy)
    new = policy.distribution.score(policy.output(rollout), rollout["action"])[0]
    assert torch.allclose(new, policy.evaluate(rollout).log_prob)
    p = policy.output(rollout).log_softmax(-1)
    q = agent.penalty.reference.output(rollout).log_softmax(-1)
    expected = (p.exp() * (p - q)).sum(-1)[rollout["mask"]]
    torch.testing.assert_close(rollout["kl"][rollout["mask"]], expected, atol=1e-6, rtol=1e-4)


@pytest.mark.heavy
@pytest.mark.parametrize("critic", [None, "copy"])
def test_a_saved_agent_acts_as_before(critic, tmp_path):
    env = frozen_lake()
    policy = WordsPolicy.of(env, "embedded", critic=critic, seed=3)
    agent = PPO(env, policy, num_steps=8, num_epochs=1)
    agent.learn(32)
    agent.save(tmp_path / "agent")
    loaded = algos.load(tmp_path / "agent")
    states = np.arange(16)
    assert loaded.texts(states) == policy.texts(states)
    rollout = collect(env, policy, num_steps=8, seed=1)
    with torch.no_grad():
        for one, other in zip(policy.evaluate(rollout), loaded.evaluate(rollout), strict=True):
            torch.testing.assert_close(one, other)
    action, state = loaded.predict(3, deterministic=True)
    assert env.single_action_space.contains(action) and state is None


def own_words(observation):
    return f"state {int(observation)}"


def test_an_own_description_is_named_again(tmp_path):
    env = frozen_lake()
    policy = WordsPolicy.of(env, "embedded", describe=own_words)
    PPO(env, policy, num_steps=8).save(tmp_path / "agent")
    with refused(ValueError, "own_words", "describe="):
        algos.load(tmp_path / "agent")
    assert algos.load(tmp_path / "agent", describe=own_words).texts(np.array([3])) == policy.texts(np.array([3]))


def test_own_descriptions_keep_the_known_words():
    policy = WordsPolicy.of(frozen_lake(), "embedded", describe=own_words)
    assert policy.texts(np.array([3])) == ["Write one of left, down, right, up.\nstate 3"]
    assert policy.words(np.array([2, 0])) == ["right", "left"]
    policy = WordsPolicy.of(frozen_lake(), "embedded", actions=["w", "s", "e", "n"])
    assert policy.texts(np.array([3]))[0].startswith("Write one of w, s, e, n.\n")


def test_a_named_model_plays_control():
    env = frozen_lake()
    assert isinstance(make_policy(env, model="embedded"), WordsPolicy)
    assert isinstance(make_policy(env, policy="words"), WordsPolicy)
    with refused(ValueError, "mlp", "words"):
        make_policy(env, policy="mlp", model="embedded")


def test_the_known_description_is_that_of_the_slots():
    rows = ["SFFG", "HFFF"]
    env = frozen_lake(desc=rows)
    policy = WordsPolicy.of(env, "embedded")
    assert policy.texts(np.array([0, 3])) != policy.texts(np.array([1, 2]))
    maps = iter((rows, ["SFGF", "HFFF"]))
    other = gym.vector.SyncVectorEnv([lambda: gym.make("FrozenLake-v1", desc=next(maps))] * 2)
    with refused(ValueError, "slots"):
        WordsPolicy.of(other, "embedded")


def test_wrong_words_are_refused_before_training():
    discrete, lm = spaces.Discrete(2), model()
    for actions, words in (
        (["good", "good"], ["different"]),
        (["good"], ["2 different words"]),
        ("go", ["'go'", "list of words"]),
        (["good", " "], ["empty"]),
        ({"good", "bad"}, ["list of words"]),
        ({"good": 1, "bad": 0}, ["list of words"]),
        ([1, 2], ["texts"]),
        (3, ["list of words"]),
    ):
        with refused(ValueError, *words):
            policy_of(lm, actions, space=discrete)
    for space in (spaces.Box(-np.inf, np.inf, (1,)), spaces.Text(3), spaces.Discrete(5000)):
        with refused(ValueError, "words" if not isinstance(space, spaces.Discrete) else "at most"):
            policy_of(lm, None, space=space)
    with refused(TypeError, "expected a text", "5"):
        policy_of(lm, ["good", "bad"], describe=lambda s: 5).act(np.array([0]))
    with refused(TypeError, "observation and the environment"):
        policy_of(lm, ["good", "bad"], describe=lambda observation, env: "a")
    with refused(TypeError, "describe is 3"):
        policy_of(lm, ["good", "bad"], describe=3)
    with refused(ValueError, "describe raised", "ZeroDivisionError"):
        policy_of(lm, ["good", "bad"], describe=lambda s: 1 / 0).act(np.array([0]))
    with refused(TypeError, "instructions is 3"):
        policy_of(lm, ["good", "bad"], instructions=3)
    with refused(TypeError, "vector environment"):
        WordsPolicy.of(gym.make("CartPole-v1"))
    with refused(ValueError, "loaded LanguageModel", "when you load it"):
        WordsPolicy.of(frozen_lake(), model(), temperature=0.5)
    with refused(ValueError, "positions", "shorter"):
        policy_of(lm, ["good", "bad"], describe=lambda s: "a " * 64).act(np.array([0]))
    with refused(ValueError, "chat template"):
        policy_of(lm, ["good", "bad"], chat=True)
    with refused(ValueError, "detach_value"):
        policy_of(lm, ["good", "bad"], critic=Critic.from_language_model(lm), detach_value=True)


def test_nothing_can_be_remembered_of_layers_that_train():
    with refused(ValueError, "remember_texts is True, but the first layer of the model trains"):
        policy_of(model(), ["good", "bad"], remember_texts=True)
    frozen_first = model()
    frozen_first.model.transformer.h[0].requires_grad_(False)
    assert policy_of(frozen_first, ["good", "bad"], remember_texts=True).remember_texts


def test_a_text_that_is_too_long_is_refused_when_made():
    with refused(ValueError, "positions"):
        WordsPolicy.of(frozen_lake(), "embedded", describe=lambda s: "word " * 200)
    with refused(TypeError, "expected a text"):
        WordsPolicy.of(frozen_lake(), "embedded", describe=lambda s: None)


def test_the_value_can_leave_the_model_alone():
    policy = policy_of(model(), ["good", "bad"], detach_value=True)
    policy.critic.weight.data.normal_()
    columns = {"observation": torch.eye(4), "action": torch.zeros(4, dtype=torch.int64), "mask": torch.ones(4).bool()}
    rollout = TensorDict(columns, batch_size=[4])
    policy.evaluate(rollout).value.sum().backward()
    assert policy.critic.weight.grad.any()
    assert all(parameter.grad is None for parameter in policy.language_model.parameters())


def test_evaluate_and_action_masks():
    env = frozen_lake()
    policy = WordsPolicy.of(env, "embedded")
    result = evaluate(env, policy, num_episodes=4)
    done = result.rollout["terminated"] | result.rollout["truncated"]
    assert result.mean_return == pytest.approx(result.rollout["reward"].sum().item() / done.sum().item())
    mask = torch.tensor([[True, False, False, False]] * 2)
    assert policy.act(np.array([0, 1]), action_mask=mask).action.tolist() == [0, 0]


@pytest.mark.heavy
def test_both_ways_in_have_the_same_probabilities():
    """A transcript of the last observation only, token by token, against one pass over its description."""
    env = gym.make_vec(
        "textenv/Words-v0", env="FrozenLake-v1", env_kwargs={"is_slippery": False}, num_envs=4, history=1, max_turns=5
    )
    writer = LMPolicy.load("embedded", seed=1)
    rollout = collect(env, writer, num_episodes=8, seed=1)
    reader = WordsPolicy.of(frozen_lake(), "embedded")
    log_probs = reader.output({"observation": torch.eye(16)}).detach()
    row_of_text = {text: i for i, text in enumerate(reader.texts(np.arange(16)))}
    assert len(rollout) >= 16, "each turn is a row"
    for row in range(len(rollout)):
        chosen = rollout["mask"][row]
        start = int(chosen.int().argmax()) + 1
        prompt = writer.tokenizer.decode(rollout["observation"][row, :start])
        word = writer.tokenizer.decode(rollout["action"][row][chosen]).strip()
        expected = log_probs[row_of_text[prompt.strip()], reader.action_words.choices[0].index(word)]
        assert rollout["log_prob"][row][chosen].sum().item() == pytest.approx(expected.item(), abs=1e-4)


def test_a_word_that_goes_on_in_another_ends_first():
    """As in a transcript, where the end of the turn is a choice too."""
    lm = lookup()
    policy = policy_of(lm, ["good", "good d", "bad"])
    table = random_table().exp()
    a, good, bad, d, eos = (WORDS.index(word) for word in ("a", "good", "bad", "d", "<eos>"))
    first = table[a, [good, bad]] / table[a, [good, bad]].sum()
    then = table[good, [eos, d]] / table[good, [eos, d]].sum()
    expected = torch.stack([first[0] * then[0], first[0] * then[1], first[1]])
    torch.testing.assert_close(probabilities(policy, [0])[0], expected)


@pytest.mark.parametrize(
    "space",
    [spaces.Box(-1, 1, (1,)), spaces.Box(0, 0.001, (1,)), spaces.Discrete(30), spaces.Discrete(3, start=10**6)],
)
def test_default_numbers_are_words_of_any_space(space):
    policy = WordsPolicy(spaces.Discrete(4), space, LanguageModel.load("embedded"))
    words = policy.action_words.choices[0]
    assert len({*words}) == len(words)
    assert [float(word) for word in words] == pytest.approx(policy.action_words.values[0].tolist(), abs=1e-4)
    log_probs = policy.output({"observation": torch.eye(4)})
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(4))


def test_changed_texts_have_their_effect():
    policy = policy_of(model(), ["good", "bad"])
    states = np.arange(3)
    before = policy.act(states, deterministic=True).log_prob
    policy.instructions = "b c d"
    with_instructions = policy.act(states, deterministic=True).log_prob
    policy.describe = lambda observation: "d"
    assert policy.texts(states) == ["b c d\nd"] * 3
    same = policy.act(states, deterministic=True).log_prob
    assert not torch.allclose(before, with_instructions) and same.unique().numel() == 1


def test_a_copy_keeps_its_texts():
    policy = policy_of(model(), ["good", "bad"])
    states = np.arange(3)
    reference, before = policy.reference(), policy.texts(states)
    policy.describe = lambda observation: "d"
    policy.texts(states)
    assert reference.texts(states) == before


@pytest.mark.heavy
def test_texts_of_another_map_are_refused():
    policy = WordsPolicy.of(frozen_lake(), "embedded")
    other = frozen_lake(desc=["SHFF", "FHFF", "FFFF", "FFFG"])
    for play in (lambda: evaluate(other, policy, num_episodes=1), lambda: PPO(other, policy)):
        with refused(ValueError, "SHFF", "make a policy for it"):
            play()
    drawn = gym.make_vec("FrozenLake-v1", num_envs=2, desc=None, map_name=None, vectorization_mode="async")
    with closing(drawn), refused(ValueError, "slots"):
        WordsPolicy.of(drawn, "embedded")


def test_wrapped_meanings_have_no_known_words():
    """Wrappers that keep the spaces may still turn observations or actions around."""
    mirrored = gym.wrappers.vector.TransformObservation(frozen_lake(), lambda observation: 15 - observation)
    assert WordsPolicy.of(mirrored, "embedded").texts(np.array([3])) == ["Write one of 0, 1, 2, 3.\n3"]

    def reversed_actions():
        lake = gym.make("FrozenLake-v1", is_slippery=False)
        return gym.wrappers.TransformAction(lake, lambda action: 3 - action, spaces.Discrete(4))

    turned = gym.vector.SyncVectorEnv([reversed_actions] * 2)
    assert WordsPolicy.of(turned, "embedded").action_words.choices == (("0", "1", "2", "3"),)
    four = spaces.Discrete(4)
    both = gym.wrappers.vector.TransformAction(
        frozen_lake(), lambda actions: 3 - actions, spaces.MultiDiscrete([4] * 4), single_action_space=four
    )
    assert WordsPolicy.of(both, "embedded").action_words.choices == (("0", "1", "2", "3"),)
