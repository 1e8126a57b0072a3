"""Images beside other observations: `MultiInputPolicy`, `LSTMPolicy`, and what their rollouts keep."""

import logging
import tempfile
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import nn

import algos
from algos import (
    PPO,
    CNNPolicy,
    GSDEPolicy,
    LSTMPolicy,
    MLPPolicy,
    MultiInputPolicy,
    PPOConfig,
    QPolicy,
    SACPolicy,
    collect,
    evaluate,
)
from algos.envs.flatten import flatten, flatten_one, pack, packed_size, unflatten, unpack
from algos.envs.images import has_images, is_image, leaf_spaces
from algos.make import make_policy
from tests.helpers.errors import refused
from tests.helpers.generated_spaces import (
    Random,
    boxes,
    check_parts,
    dicts,
    discretes,
    multi_binaries,
    multi_discretes,
    tuples,
)

TWO = spaces.Discrete(2)
CAMERA = spaces.Box(0, 255, (40, 36, 3), np.uint8)
FRAMES = spaces.Box(0, 255, (4, 36, 40), np.uint8)
JOINTS = spaces.Box(-1, 1, (5,), np.float32)
ROBOT = spaces.Dict({"camera": CAMERA, "frames": FRAMES, "gear": spaces.Discrete(3, start=1), "joints": JOINTS})


# --- the oracle: Stable-Baselines3's policy with the same weights -----------------------------------------------------


def transposed(space):
    """The space as Stable-Baselines3 sees it, whose wrapper puts the channels first."""
    parts = {
        name: spaces.Box(0, 255, np.moveaxis(part.low, -1, 0).shape, np.uint8) if part == CAMERA else part
        for name, part in space.items()
    }
    return spaces.Dict(parts)


def batch_of(space, count, seed=0):
    space.seed(seed)
    samples = [space.sample() for _ in range(count)]
    return samples, gym.vector.utils.concatenate(space, samples, gym.vector.utils.create_empty_array(space, count))


@pytest.mark.filterwarnings("ignore::UserWarning:stable_baselines3")
@pytest.mark.parametrize("action_space", [spaces.Discrete(4), spaces.Box(-1, 1, (3,)), spaces.MultiDiscrete([2, 3])])
def test_the_network_is_that_of_stable_baselines3(action_space):
    """From equal weights, equal features, logits or means, and values."""
    policies = pytest.importorskip("stable_baselines3.common.policies", reason="install the extra: '.[sb3]'")
    theirs = policies.MultiInputActorCriticPolicy(transposed(ROBOT), action_space, lambda _: 0.0)
    ours = MultiInputPolicy(ROBOT, action_space)

    # Their weights in our network: layers in the same order
    extractors = theirs.features_extractor.extractors
    pairs = [
        (ours.encoder.trunks[0], nn.Sequential(extractors["camera"].cnn, extractors["camera"].linear)),
        (ours.encoder.trunks[1], nn.Sequential(extractors["frames"].cnn, extractors["frames"].linear)),
        (ours.actor, nn.Sequential(theirs.mlp_extractor.policy_net, theirs.action_net)),
        (ours.critic, nn.Sequential(theirs.mlp_extractor.value_net, theirs.value_net)),
    ]
    for (our_layers, their_layers), deviation in zip(pairs, (0.05, 0.05, 0.3, 0.3), strict=True):
        for our_parameter, their_parameter in zip(our_layers.parameters(), their_layers.parameters(), strict=True):
            assert our_parameter.shape == their_parameter.shape
            # A gain of .01 would hide differences
            our_parameter.data.copy_(their_parameter.data.normal_(std=deviation))

    _, batch = batch_of(ROBOT, 7)
    seen = {name: np.moveaxis(x, -1, 1) if name == "camera" else x for name, x in batch.items()}
    seen["gear"] = seen["gear"] - 1  # Stable-Baselines3 makes one-hot numbers that begin with 0
    their_input = {name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in seen.items()}
    rollout = {"observation": torch.from_numpy(flatten(ROBOT, batch))}
    with torch.no_grad():
        features = theirs.extract_features(their_input)
        latent = theirs.mlp_extractor.forward_actor(features)
        output = theirs.action_net(latent)
        value = theirs.predict_values(their_input).squeeze(-1)
        torch.testing.assert_close(ours.features(rollout["observation"]), features, atol=1e-5, rtol=0)
        torch.testing.assert_close(ours.output(rollout), output, atol=1e-5, rtol=0)
        torch.testing.assert_close(ours.value(rollout["observation"]), value, atol=1e-5, rtol=0)
    assert output.std() > 0.1 and value.std() > 0.1


# --- every Dict and Tuple with images in it ---------------------------------------------------------------------------


@st.composite
def images(draw):
    """Grey images, colour images and stacks of frames, of bytes."""
    height, width = draw(st.integers(5, 9)), draw(st.integers(5, 9))
    shape = draw(st.sampled_from([(height, width), (height, width, 3), (2, height, width)]))
    return spaces.Box(draw(st.sampled_from([0, 5])), draw(st.sampled_from([9, 255])), shape, np.uint8)


@st.composite
def scaled_images(draw):
    """Images of floats, which are numbers for every policy."""
    return spaces.Box(0, 1, draw(st.sampled_from([(6, 7), (6, 7, 3), (2, 6, 7)])), np.float32)


parts = st.one_of(images(), scaled_images(), boxes(), discretes(), multi_discretes(), multi_binaries)
nested = st.recursive(parts, lambda inner: st.one_of(dicts(inner), tuples(inner)), max_leaves=4)
with_images = st.one_of(dicts(nested), tuples(nested)).filter(has_images)
checked = settings(
    derandomize=True, database=None, max_examples=15, deadline=None, suppress_health_check=list(HealthCheck)
)


def plain_features(policy, space, samples):
    """Features part by part, one observation after the other."""
    rows = []
    for sample in samples:
        trunks = iter(policy.encoder.trunks)
        columns = []
        for leaf, value in zip(leaf_spaces(space), leaves_of(space, sample), strict=True):
            if is_image(leaf):
                picture = value if value.ndim == 3 else value[None]
                if value.ndim == 3 and value.shape[-1] < value.shape[0]:
                    picture = picture.transpose(2, 0, 1)
                brightness = torch.from_numpy(picture.astype(np.float32)) / float(leaf.high.flat[0])
                columns.append(next(trunks)(brightness[None])[0])
            else:
                columns.append(torch.from_numpy(flatten_one(leaf, value).astype(np.float32).ravel()))
        rows.append(torch.cat(columns))
    return torch.stack(rows)


def leaves_of(space, sample):
    if isinstance(space, spaces.Dict):
        return [leaf for name, part in space.items() for leaf in leaves_of(part, sample[name])]
    if isinstance(space, spaces.Tuple):
        return [leaf for part, value in zip(space, sample, strict=True) for leaf in leaves_of(part, value)]
    return [np.asarray(sample)]


@pytest.mark.heavy
@checked
@given(with_images)
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_rollouts_keep_bytes_and_networks_read_every_part(space):
    samples, batch = batch_of(space, 4)
    flat = flatten(space, batch)
    pixels = sum(spaces.flatdim(leaf) for leaf in leaf_spaces(space) if is_image(leaf))
    assert flat.dtype == np.uint8 and flat.shape == (4, pixels + 4 * (spaces.flatdim(space) - pixels))
    assert flatten(space, flat) is flat and flat.shape[1] == packed_size(space)
    np.testing.assert_array_equal(flatten_one(space, samples[2]), flat[2])

    # Equal to Gymnasium's flattening, which cannot flatten every integer dtype; again from a slice of a rollout
    packed = torch.from_numpy(np.stack([flat, flat]))
    expected = np.stack([np.concatenate([flatten_one(leaf, x).astype(np.float32).ravel() for leaf, x in zip(
        leaf_spaces(space), leaves_of(space, sample), strict=True)]) for sample in samples])  # fmt: skip
    np.testing.assert_array_equal(unpack(space, packed)[1], expected)
    np.testing.assert_array_equal(unpack(space, packed[:, 1:3])[0], expected[1:3])
    check_parts(space, unflatten(space, packed), batch)

    # The network, from packed, plain and unflattened observations
    policy = MultiInputPolicy(space, TWO, hidden=(4,), image_features=3)
    if not np.isfinite(expected).all():
        return
    features = plain_features(policy, space, samples).detach()
    scale = max(1.0, float(features.abs().max()))
    for observation in (torch.from_numpy(flat), torch.from_numpy(expected)):
        torch.testing.assert_close(policy.features(observation).detach() / scale, features / scale, atol=1e-5, rtol=0)
    acted = [policy.predict(x, deterministic=True)[0].tolist() for x in (batch, flat, expected)]
    assert acted[0] == acted[1] == acted[2]
    assert policy.predict(samples[0], deterministic=True)[0] == acted[0][0]


@pytest.mark.heavy
@checked
@given(with_images, st.sampled_from([MultiInputPolicy, LSTMPolicy, MLPPolicy]))
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_a_saved_policy_acts_alike_on_images_and_vectors(space, kind):
    hidden = 4 if kind is LSTMPolicy else (4,)
    arguments = {} if kind is MLPPolicy else {"image_features": 3}
    policy = kind(space, TWO, hidden=hidden, seed=3, **arguments)
    with tempfile.TemporaryDirectory() as folder:
        loaded = kind.load(Path(folder), policy.save(Path(folder)))
    _, batch = batch_of(space, 4)
    loaded.generator.set_state(policy.generator.get_state())
    one, two = (player.act(batch) for player in (policy, loaded))
    np.testing.assert_array_equal(one.log_prob.numpy(), two.log_prob.numpy())
    env = SyncVectorEnv([lambda: Random(space, TWO)] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    rollout = collect(env, policy, num_steps=5)
    assert rollout["observation"].dtype == torch.uint8 and rollout["observation"].shape[2:] == (packed_size(space),)
    assert evaluate(env, loaded, num_episodes=2).mean_return == 3


def test_a_perceptron_reads_what_it_read_before_pixels_were_packed():
    """To the bit: its input is Gymnasium's flat observation."""
    samples, batch = batch_of(ROBOT, 3)
    expected = np.stack([spaces.flatten(ROBOT, sample) for sample in samples]).astype(np.float32)
    policy = MLPPolicy(ROBOT, TWO, hidden=(4,))
    np.testing.assert_array_equal(policy.read(batch).numpy(), expected)
    np.testing.assert_array_equal(policy.read(torch.from_numpy(flatten(ROBOT, batch))).numpy(), expected)
    one, two = (policy.act(x, deterministic=True).log_prob for x in (batch, expected))
    assert torch.equal(one, two)


# --- learning ---------------------------------------------------------------------------------------------------------


class Lamp(gym.Env):
    """Is the image dark, or bright? A switch says whether the answer counts as it is, or reversed. Four answers."""

    action_space = TWO
    observation_space = spaces.Dict({"image": spaces.Box(0, 255, (8, 8), np.uint8), "reversed": TWO})

    def observe(self):
        bright, turned = (int(self.np_random.integers(2)) for _ in range(2))
        self.answer = bright ^ turned
        image = self.np_random.integers(0, 100, (8, 8)) + 100 * bright
        return {"image": image.astype(np.uint8), "reversed": turned}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.observe(), {}

    def step(self, action):
        reward, self.time = float(action == self.answer), self.time + 1
        return self.observe(), reward, False, self.time == 4, {}


@pytest.mark.parametrize(
    "kind", [pytest.param(MultiInputPolicy, marks=pytest.mark.long), pytest.param(LSTMPolicy, marks=pytest.mark.slow)]
)
def test_images_and_switches_are_learnt_from_together(kind, tmp_path):
    """Neither alone is of any use."""
    env = SyncVectorEnv([Lamp] * 8, autoreset_mode=AutoresetMode.SAME_STEP)
    policy = make_policy(env)
    assert type(policy) is MultiInputPolicy
    steps = 5_000
    options = {"minibatch_size": 128, "learning_rate": 3e-3}
    if kind is LSTMPolicy:
        policy = LSTMPolicy(Lamp.observation_space, TWO, image_features=32)
        steps = 20_000
        options = {"minibatch_size": 2, "learning_rate": 1e-3}
    PPO(env, policy, PPOConfig(num_steps=32, final_learning_rate=0.0, gamma=0.0, **options)).learn(steps)
    assert evaluate(env, policy, num_episodes=40).mean_return > 3.6


def test_the_ratio_is_one_and_values_agree():
    env = SyncVectorEnv([Lamp] * 3, autoreset_mode=AutoresetMode.SAME_STEP)
    for policy in (MultiInputPolicy(Lamp.observation_space, TWO), LSTMPolicy(Lamp.observation_space, TWO, hidden=8)):
        rollout = collect(env, policy, num_steps=10)
        assert (policy.evaluate(rollout).log_prob - rollout["log_prob"]).abs().max() < 1e-5
        value, following = policy.values(rollout)
        torch.testing.assert_close(policy.evaluate(rollout).value, value, atol=1e-5, rtol=0)
        ended = rollout["truncated"]
        assert torch.equal(following[:, :-1][~ended[:, :-1]], value[:, 1:][~ended[:, :-1]])


# --- details ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [MultiInputPolicy, LSTMPolicy])
def test_numbers_are_normalized_and_pixels_are_not(kind, tmp_path):
    env = SyncVectorEnv([lambda: Random(ROBOT, TWO)] * 4, autoreset_mode=AutoresetMode.SAME_STEP)
    policy = kind(ROBOT, TWO, normalize_observations=True)
    rollout = collect(env, policy, num_steps=50, seed=0)
    policy.update_normalizer(rollout)
    columns = unpack(ROBOT, rollout["observation"])[rollout["mask"]]
    pixels = 40 * 36 * 3 + 4 * 36 * 40
    read = policy.read(rollout["observation"])[rollout["mask"]]
    assert torch.equal(read[:, :pixels], columns[:, :pixels])
    expected = (columns[:, pixels:] - columns[:, pixels:].mean(0)) / columns[:, pixels:].std(0, correction=0)
    torch.testing.assert_close(read[:, pixels:], expected, atol=1e-4, rtol=0)
    loaded = kind.load(tmp_path, policy.save(tmp_path))
    assert torch.equal(loaded.read(rollout["observation"]), policy.read(rollout["observation"]))


def test_flattened_pixels_are_warned_of(caplog):
    with caplog.at_level(logging.WARNING):
        for kind in (MultiInputPolicy, LSTMPolicy):
            kind(ROBOT, TWO)
        LSTMPolicy(CAMERA, TWO)
        CNNPolicy(CAMERA, TWO)
        MLPPolicy(spaces.Dict({"scaled": spaces.Box(0, 1, (9, 9, 3)), "joints": JOINTS}), TWO)
        LSTMPolicy(JOINTS, TWO, image_features=None)
    assert not caplog.records
    flattening = [
        lambda: MLPPolicy(CAMERA, TWO),
        lambda: GSDEPolicy(CAMERA, JOINTS),
        lambda: QPolicy(spaces.Tuple([JOINTS, CAMERA]), TWO),
        lambda: LSTMPolicy(CAMERA, TWO, image_features=None),
    ]
    for make in flattening:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            make()
        assert len(caplog.records) == 1 and "MultiInputPolicy" in caplog.text
    camera = torch.full((1, *CAMERA.shape), 255, dtype=torch.uint8)
    assert MLPPolicy(CAMERA, TWO).read(camera).max() == QPolicy(CAMERA, TWO).read(camera).max() == 255


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((4, 36, 36, 1), "expected a uint8 Box of 2 or 3 dimensions"),
        ((4, 4, 3), "images of 4 x 4 pixels"),
        ((36, 36, 36), "the channels are ambiguous"),
    ],
)
def test_pixels_that_no_convolution_reads_are_warned_of(shape, reason, caplog):
    """Of a policy that is chosen by the spaces, too; normalized ones are no large numbers."""
    pixels = spaces.Box(0, 255, shape, np.uint8)
    beside_an_image = spaces.Dict(camera=CAMERA, pixels=pixels)
    env = SyncVectorEnv([lambda: Random(pixels, TWO)])
    readers = [
        lambda: make_policy(env),
        lambda: QPolicy(pixels, TWO, hidden=(4,)),
        lambda: SACPolicy(pixels, JOINTS, hidden=(4,)),
        lambda: MultiInputPolicy(beside_an_image, TWO, hidden=(4,), image_features=4),
        lambda: LSTMPolicy(beside_an_image, TWO, hidden=4, image_features=4),
    ]
    for make in readers:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            make()
        assert len(caplog.records) == 1
        assert "reads pixels as numbers from 0 to 255, without convolutions" in caplog.text and reason in caplog.text

    caplog.clear()
    with caplog.at_level(logging.WARNING):
        make_policy(env, normalize_observations=True)
        MultiInputPolicy(beside_an_image, TWO, hidden=(4,), image_features=4, normalize_observations=True)
        MLPPolicy(spaces.Box(0, 9, shape, np.uint8), TWO)
        MLPPolicy(spaces.Box(0, 255, (36,), np.uint8), TWO)
    assert not caplog.records


def test_an_lstm_of_version_0_11_flattens_images_still(tmp_path):
    """Its description has no image_features, its encoder a column for each pixel."""
    policy = LSTMPolicy(CAMERA, TWO, hidden=4, image_features=None)
    saved = policy.save(tmp_path)
    assert saved.pop("image_features") is None and policy.encoder[0].weight.shape == (4, 40 * 36 * 3)
    loaded = LSTMPolicy.load(tmp_path, saved)
    _, batch = batch_of(CAMERA, 2)
    one, two = (player.act(batch, deterministic=True).log_prob for player in (policy, loaded))
    assert torch.equal(one, two)


def test_an_lstm_sees_images_alone(tmp_path):
    env = SyncVectorEnv([lambda: Random(CAMERA, TWO)] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    agent = PPO(env, LSTMPolicy(CAMERA, TWO, hidden=4), PPOConfig(num_steps=4, minibatch_size=1, num_epochs=1))
    agent.learn(8)
    loaded = algos.load(agent.save(tmp_path))
    assert loaded.images is not None
    _, batch = batch_of(CAMERA, 2)
    agent.policy.reset()
    one, two = (player.act(batch, deterministic=True).log_prob for player in (agent.policy, loaded))
    assert torch.equal(one, two)


def test_spaces_without_images_are_refused():
    with refused(ValueError, "finds no image", "MLPPolicy"):
        MultiInputPolicy(spaces.Dict({"scaled": spaces.Box(0, 1, (9, 9, 3))}), TWO)


CAMERA_AND_NUMBERS = spaces.Dict(
    {"door": spaces.Discrete(3), "camera": spaces.Box(0, 255, (8, 8, 3), np.uint8), "speed": spaces.Box(-1, 1, (2,))}
)


def observations_of(space, count):
    samples = [space.sample() for _ in range(count)]
    return gym.vector.utils.concatenate(space, samples, gym.vector.utils.create_empty_array(space, count))


def test_observations_that_were_not_packed_are_packed():
    CAMERA_AND_NUMBERS.seed(0)
    packed = flatten(CAMERA_AND_NUMBERS, observations_of(CAMERA_AND_NUMBERS, 5))
    flat = unpack(CAMERA_AND_NUMBERS, torch.from_numpy(packed)).numpy()
    np.testing.assert_array_equal(pack(CAMERA_AND_NUMBERS, flat), packed)
    assert pack(CAMERA_AND_NUMBERS, packed) is packed
    assert pack(spaces.Discrete(3), flat) is flat


@pytest.mark.parametrize("algorithm", [PPO, algos.DQN])
def test_runs_of_version_0_11_go_on_with_images_and_numbers(algorithm):
    """Their rollouts and buffers had float32 observations, as `unpack` gives them."""

    def make():
        env = SyncVectorEnv([lambda: Random(CAMERA_AND_NUMBERS, spaces.Discrete(2))] * 2)
        policy_class = QPolicy if algorithm is algos.DQN else MLPPolicy
        options = {"learning_starts": 4, "batch_size": 4} if algorithm is algos.DQN else {}
        policy = policy_class(CAMERA_AND_NUMBERS, spaces.Discrete(2), hidden=(8,))
        return algorithm(env, policy, num_steps=4, **options)

    agent = make()
    agent.update(agent.collect())
    state = agent.state_dict()
    collector = state["collector"] = dict(state["collector"])
    collector["observation"] = unpack(CAMERA_AND_NUMBERS, torch.from_numpy(collector["observation"])).numpy()
    if algorithm is algos.DQN:
        remembered = state["remembered"]
        for name in ("observation", "next_observation"):
            remembered[name] = unpack(CAMERA_AND_NUMBERS, remembered[name])
    other = make()
    other.env.reset(seed=0)
    other.load_state_dict(state)
    other.collector.resume()
    rollout = other.collect()
    assert rollout["observation"].dtype == torch.uint8
    other.update(rollout)


def test_a_subclass_without_image_features_is_loaded(tmp_path):
    class Own(LSTMPolicy):
        def __init__(self, observation_space, action_space, *, hidden=8, normalize_observations=False, seed=0):
            super().__init__(
                observation_space, action_space, hidden=hidden, normalize_observations=normalize_observations, seed=seed
            )

        def arguments(self):
            arguments = super().arguments()
            del arguments["image_features"]
            return arguments

    policy = Own(CAMERA_AND_NUMBERS, spaces.Discrete(2))
    saved = policy.save(tmp_path)
    loaded = Own.load(tmp_path, saved)
    batch = observations_of(CAMERA_AND_NUMBERS, 3)
    np.testing.assert_array_equal(
        loaded.predict(batch, deterministic=True)[0], policy.predict(batch, deterministic=True)[0]
    )


@pytest.mark.parametrize("kind", [MultiInputPolicy, LSTMPolicy])
def test_without_numbers_nothing_is_normalized(kind):
    space = spaces.Tuple([spaces.Box(0, 255, (8, 8, 3), np.uint8)])
    policy = kind(space, spaces.Discrete(2), normalize_observations=True)
    assert policy.normalizer is None and policy.predict(observations_of(space, 2))[0].shape == (2,)
