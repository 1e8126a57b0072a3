"""`history=k`: the model sees the last observations of a string environment, and its episode has several rows."""

import copy
import itertools

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode

import algos
from algos import A2C, GRPO, PPO, REINFORCE, RLOO, TRPO, Collector, PPOConfig, REINFORCEPlusPlus, collect
from algos.advantages import add_advantages
from tests.helpers.conversations import CHAT_WORDS, LETTERS, TEXT, Walk, chat_tokenizer
from tests.helpers.engines import FakeEngine
from tests.helpers.models import WORDS, make_gpt2, make_llama, make_t5, make_tokenizer
from tests.helpers.small_agents import agent_of, lm_policy, random_table, table_model
from textenv import KLPenalty, Prompt, TextVectorEnv, TokenVectorEnv
from textenv.envs.string_env import TokenEnv
from textenv.rewards.scores import Scores
from textenv.rollout import episode_of_row, in_order, number_in_episode
from textenv.words.wrapper import LanguageWrapper

EOS, GOOD, BAD = (WORDS.index(word) for word in ("<eos>", "good", "bad"))


def walk_env(num_envs=3, *, make=Walk, **options):
    arguments = dict(tokenizer=make_tokenizer(WORDS), num_envs=num_envs, max_prompt_tokens=4, max_new_tokens=4)
    return TokenVectorEnv(make, **(arguments | options))


def played(num_envs=3, *, policy=None, episodes=8, **options):
    policy = lm_policy(lambda: table_model(random_table()), seed=3) if policy is None else policy
    return collect(walk_env(num_envs, **options), policy, num_episodes=episodes, seed=1)


# --- what the model sees ----------------------------------------------------------------------------------------------


def turns_of(rollout, tokenizer):
    """For each episode its turns: the context that the model saw, and what it wrote, by the tokenizer alone."""
    episodes = {}
    for row, episode in enumerate(episode_of_row(rollout).tolist()):
        tokens = [rollout["observation"][row, 0].item(), *rollout["action"][row].tolist()]
        chosen = [False, *rollout["mask"][row].tolist()]
        starts = [i for i in range(1, len(chosen)) if chosen[i] and not chosen[i - 1]]
        for start in starts:
            stop = next((i for i in range(start, len(chosen)) if not chosen[i]), len(chosen))
            # A turn that was cut stands directly before a reply, or not: the next turn begins after a False entry
            turn = (tokens[:start], tokens[start:stop])
            episodes.setdefault(episode, []).append(turn)
    return episodes


class WritesDown:
    """A string environment that keeps what it said and heard in an episode."""

    def reset(self, **options):
        text, info = super().reset(**options)
        self.observations, self.actions = [text], []
        return text, info

    def step(self, action):
        text, *outcome = super().step(action)
        self.observations.append(text)
        self.actions.append(action)
        return text, *outcome


class Notes(WritesDown, Walk):
    pass


class Lake(WritesDown, LanguageWrapper):
    def __init__(self):
        super().__init__(gymnasium.make("FrozenLake-v1", is_slippery=False))


def noted(make, **options):
    """Rollout of games, and the games."""
    games = []

    def make_game():
        games.append(make())
        return games[-1]

    policy = lm_policy(
        tokenizer=options.get("tokenizer"), make=lambda: make_gpt2(len(CHAT_WORDS), n_positions=256), seed=3
    )
    rollout = played(make=make_game, policy=policy, episodes=5, max_prompt_tokens=16, **options)
    return rollout, [game for game in games if hasattr(game, "observations")]


@pytest.mark.parametrize("history", [1, 2, 3, 6, 9])
def test_contexts_are_the_last_observations_and_actions(history):
    """As words of the tokenizer, which knows no line breaks."""
    tokenizer = make_tokenizer(CHAT_WORDS, eos="<|im_end|>")
    rollout, games = noted(Notes, history=history, tokenizer=tokenizer)
    assert len(rollout) == 5 * max(1, 7 - history)
    for game, turns in zip(games, turns_of(rollout, tokenizer).values(), strict=True):
        assert len(turns) == 6
        for n, (context, answer) in enumerate(turns):
            assert tokenizer.decode(answer, skip_special_tokens=True) == game.actions[n].strip()
            first = max(0, n + 1 - history)
            words = [game.observations[first]]
            for i in range(first, n):
                words += [game.actions[i], game.observations[i + 1]]
            text = tokenizer.decode(context, skip_special_tokens=True)
            assert text.split() == " ".join(words).split()


@pytest.mark.parametrize("history", [1, 2, 4])
def test_contexts_of_chats_are_those_of_the_template(history):
    """Against transformers' rendering of the messages."""
    tokenizer = chat_tokenizer()
    unreadable = [CHAT_WORDS.index(word) for word in ("<pad>", "<|im_start|>")]  # the text of a turn hides them
    rollout, games = noted(Notes, history=history, tokenizer=tokenizer, forbidden=unreadable)
    for game, turns in zip(games, turns_of(rollout, tokenizer).values(), strict=True):
        assert len(turns) == 6
        for n, (context, _) in enumerate(turns):
            first = max(0, n + 1 - history)
            chat = [{"role": "user", "content": game.observations[first]}]
            for i in range(first, n):
                chat.append({"role": "assistant", "content": game.actions[i].strip()})
                chat.append({"role": "user", "content": game.observations[i + 1]})
            assert context == tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)


@pytest.mark.heavy
@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("history", [1, 3])
def test_instructions_of_a_wrapper_begin_every_context(history, chat):
    """Once, as a system message or in a line before the observations."""
    tokenizer = copy.deepcopy(algos.LMPolicy.load("embedded").tokenizer)
    policy = lm_policy(lambda: make_gpt2(len(tokenizer), n_positions=512), tokenizer=tokenizer, seed=1)
    if chat:
        tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    games = []

    def make_game():
        games.append(Lake())
        return games[-1]

    env = TokenVectorEnv(
        make_game, tokenizer=tokenizer, num_envs=3, history=history, max_prompt_tokens=100, max_turns=9, max_length=512
    )
    rollout = collect(env, policy, num_episodes=6, seed=1)
    games = [game for game in games if hasattr(game, "observations")]
    assert (number_in_episode(rollout) > 0).sum() > 6
    for game, turns in zip(games, turns_of(rollout, tokenizer).values(), strict=True):
        assert len(turns) == len(game.actions) and game.instructions
        for n, (context, _) in enumerate(turns):
            text = tokenizer.decode(context)
            first = max(0, n + 1 - history)
            assert text.count(game.instructions) == 1
            position = text.index(game.instructions)
            for observation in game.observations[first : n + 1]:
                position = text.index(observation, position + 1)
            assert position + len(game.observations[n]) >= len(text) - 2
            if not chat:
                assert text.count("\n") == 2 + 2 * (n - first), "a line each, and nothing between them"


# --- the rollout ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("history", [1, 2, 3])
@pytest.mark.parametrize("num_envs", [1, 3, 8, 11], ids=lambda n: f"{n}_slots")
def test_rows_are_the_same_in_any_number_of_slots(num_envs, history):
    expected = played(5, history=history)
    rollout = played(num_envs, history=history)
    assert set(rollout.keys()) == set(expected.keys()) and len(rollout) == 8 * (7 - history)
    for column in expected.keys():
        assert torch.equal(rollout[column], expected[column]), column


def test_rows_of_an_episode_have_different_random_numbers():
    """The same context in each row, and each row draws anew."""

    class Same(Walk):
        def text(self):
            return "a"

    actions = played(make=Same, history=1)["action"]
    assert len({tuple(row) for row in actions.tolist()}) > len(actions) / 2


@pytest.mark.heavy
def test_the_schema_of_several_rows():
    """One start and one end an episode, rows in the order of time; without a history all is as it was."""
    rollout = played(history=2)
    assert rollout["is_init"].sum() == 8 and rollout["is_init"][:, 0].sum() == 8
    number, episode = number_in_episode(rollout), episode_of_row(rollout)
    assert torch.equal(rollout["is_init"][:, 0], number == 0)
    done = rollout["terminated"] | rollout["truncated"]
    assert torch.equal(done.any(1), number == 4) and done.sum() == 8
    assert episode.tolist() == [row // 5 for row in range(40)] and number.tolist() == list(range(5)) * 8
    assert torch.equal(rollout["group"][:, 0], episode)
    assert rollout["mask"].any(1).all() and (rollout["reward"] * ~rollout["mask"]).sum() == 0
    for whole in (played(history=6), played(history=100)):
        expected = played()
        assert "episode" not in whole.keys() and torch.equal(whole["action"], expected["action"])
        assert torch.equal(whole["log_prob"], expected["log_prob"])


@pytest.mark.heavy
@pytest.mark.parametrize("make", [make_gpt2, make_llama, make_t5], ids=["gpt2", "llama", "t5"])
@pytest.mark.parametrize("history", [1, 2])
def test_log_probs_of_acting_are_those_of_scoring(make, history):
    policy = lm_policy(make, seed=1)
    rollout = played(policy=policy, history=history)
    mask = rollout["mask"]
    with torch.no_grad():
        expected = policy.evaluate(rollout).log_prob
    torch.testing.assert_close(rollout["log_prob"][mask], expected[mask], atol=1e-5, rtol=0)
    assert mask.any(1).all()


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_stepping_gives_the_rows_of_a_rollout(mode):
    """The observation becomes the new context; rewards and ends are the rollout's."""
    rollout = played(history=2, max_turns=5)
    env = walk_env(1, history=2, max_turns=5, autoreset_mode=mode)
    observation, _ = env.reset(seed=1)
    for row in range(len(rollout)):
        for t in rollout["mask"][row].nonzero().flatten().tolist():
            state = observation["tokens"][0, : observation["length"][0, 0]].tolist()
            assert state == rollout["observation"][row, : t + 1].tolist()
            observation, reward, terminated, truncated, _ = env.step(rollout["action"][row, t].numpy()[None])
            assert reward[0] == rollout["reward"][row, t]
            assert (terminated[0], truncated[0]) == (rollout["terminated"][row, t], rollout["truncated"][row, t])
        if mode is AutoresetMode.NEXT_STEP and (terminated or truncated):
            observation, *_ = env.step(np.array([0]))
        elif mode is AutoresetMode.DISABLED and (terminated or truncated):
            observation, _ = env.reset(options={"reset_mask": np.array([True])})


def test_a_token_env_steps_with_a_history():
    env = TokenEnv(Walk(), tokenizer=make_tokenizer(WORDS), max_prompt_tokens=4, history=1)
    observation, _ = env.reset(seed=0)
    rewards = []
    for _ in range(6):
        assert observation["length"][0] <= 3 and observation["tokens"].shape == (4 + 32,)
        paid = observation["tokens"][0] + 1.0
        for token in (GOOD, EOS):
            observation, reward, terminated, *_ = env.step(np.int64(token))
        rewards.append((reward, paid))
    assert terminated and all(reward == paid for reward, paid in rewards)


@pytest.mark.heavy
def test_an_engine_plays_episodes_of_several_rows():
    policy = lm_policy(seed=4)
    collector = Collector(walk_env(history=2), policy, seed=1, generator=FakeEngine(piece=3))
    rollout = collector.collect(num_episodes=8)
    with torch.no_grad():
        gap = (policy.evaluate(rollout).log_prob - rollout["log_prob"])[rollout["mask"]]
    assert gap.abs().max() < 1e-5 and len(rollout) == 40
    assert episode_of_row(rollout).tolist() == [row // 5 for row in range(40)]


def test_scores_while_generating_are_the_same():
    expected = played(history=1)
    rollout = played(history=1, score_while_generating=True)
    for column in expected.keys():
        assert torch.equal(rollout[column], expected[column]), column


def test_tools_and_action_masks_work_in_every_row():
    def double(number: int) -> str:
        """Double a number.

        Args:
            number: the number.
        """
        return "a"

    call = '<tool_call>{"name": "double", "arguments": {"number": 2}}</tool_call>'
    tokenizer = make_tokenizer([*WORDS, *call.split()])
    env = walk_env(
        1, history=1, tokenizer=tokenizer, tools=[double], max_prompt_tokens=300, max_new_tokens=16, max_turns=20
    )
    ids = tokenizer(call)["input_ids"]
    env.start_episodes(1, seed=0)
    for _ in range(6):
        for token in (*ids, EOS, GOOD, EOS):
            env.advance(np.array([token]))
    rollout = in_order(env.take_episodes())
    assert len(rollout) == 6 and len(env.scored_turns.turns) == 6 and env.metrics["tools/calls"] == 6
    assert all("double" in tokenizer.decode(row) for row in rollout["observation"])

    allowed = played(history=2, allowed=[GOOD, BAD])
    chosen = allowed["action"][allowed["mask"]]
    assert set(chosen.tolist()) <= {GOOD, BAD, EOS} and allowed["allowed"][allowed["mask"]].min() > 0


def test_a_failed_episode_is_left_out_in_all_its_rows():
    class Fails(Walk):
        def step(self, action):
            observation, reward, terminated, truncated, _ = super().step(action)
            is_broken = self.turns == 6 and self.turn == 4 and self.np_random.random() < 0.5
            return observation, reward, terminated or is_broken, truncated, {"worker_failed": is_broken}

    rollout = played(make=Fails, history=1, episodes=16)
    lengths = episode_of_row(rollout).bincount()
    assert set(lengths.tolist()) == {4, 6}
    for episode, length in enumerate(lengths.tolist()):
        rows = rollout[episode_of_row(rollout) == episode]
        done = rows["terminated"] | rows["truncated"]
        assert rows["mask"].any(1).tolist() == [length == 6] * length and done.sum() == (length == 6)


def test_a_context_without_room_ends_the_episode():
    """`max_length` counts the tokens of a row; 'a . .' needs three, and a token of the answer."""
    for max_length, rows in [(5, 6), (4, 6)]:
        assert len(played(make=Walk, history=1, max_prompt_tokens=3, max_length=max_length, episodes=1)) == rows
    rollout = played(history=2, max_prompt_tokens=3, max_length=5, episodes=8)
    done = rollout["truncated"].any(1)
    assert done.sum() > 0 and torch.equal(rollout["terminated"].any(1) | done, number_is_last(rollout))


def number_is_last(rollout):
    episode = episode_of_row(rollout)
    return torch.cat([episode.diff() > 0, torch.tensor([True])])


def test_a_sample_shows_the_whole_episode():
    env = walk_env(2, history=2)
    rollout = collect(env, lm_policy(seed=3), num_episodes=4, seed=1)
    for episode, sample in enumerate(env.samples(range(4))):
        rows = rollout[episode_of_row(rollout) == episode]
        assert sample["score"] == rows["reward"].sum() and len(sample["turns"]) == 11
        assert [message["role"] for message in sample["turns"]] == ["assistant", "user"] * 5 + ["assistant"]
        told = [message["content"].split() for message in sample["turns"][1::2]]
        tokenizer = make_tokenizer(WORDS)
        for row, words in zip(rows[1:], told[1:], strict=True):
            assert tokenizer.decode(row["observation"]).split()[: len(words)] == words
        assert sample["completion"].count("\n\n") >= 4


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("env_id", "options"), [("GuessNumber", {}), ("Words", {"env": "CartPole-v1", "max_turns": 40})]
)
def test_registered_games_have_a_history(env_id, options):
    """CartPole has more turns than the embedded model has room for."""
    env = gymnasium.make_vec(f"textenv/{env_id}-v0", num_envs=4, history=1, **options)
    rollout = collect(env, algos.LMPolicy.load("embedded", seed=1), num_episodes=4, seed=0)
    assert len(rollout) > 16 and rollout["is_init"].sum() == 4 and rollout.shape[1] < 128
    assert ((rollout["terminated"] | rollout["truncated"]).sum(1) == number_is_last(rollout)).all()


# --- learning ---------------------------------------------------------------------------------------------------------


class Chain(gymnasium.Env):
    """A Markov game of three steps, played with 'good' and 'bad'; random rewards and successors, from state 'a'."""

    observation_space = action_space = TEXT
    successors = np.random.default_rng(1).integers(4, size=(4, 2))
    rewards = np.random.default_rng(2).normal(size=(4, 2)).round(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.state, self.turn = 0, 0
        return LETTERS[0], {}

    def step(self, action):
        choice = ["good", "bad"].index(action.strip())
        reward = self.rewards[self.state, choice]
        self.state = self.successors[self.state, choice]
        self.turn += 1
        return LETTERS[self.state], reward, self.turn == 3, False, {}


def chain_env(**options):
    return walk_env(make=Chain, max_new_tokens=1, allowed=lambda turn: [GOOD, BAD], history=1, num_envs=8, **options)


def exact_objective(policy):
    """Expected return, by enumeration of the eight courses of the game, from the model's logits alone."""
    logits = policy.lm.model(torch.arange(4)[:, None]).logits[:, -1].float()
    log_probs = (logits[:, [GOOD, BAD]] / policy.temperature).log_softmax(-1)
    total = torch.zeros(())
    for course in itertools.product(range(2), repeat=3):
        state, log_prob, reward = 0, torch.zeros(()), 0.0
        for choice in course:
            log_prob = log_prob + log_probs[state, choice]
            reward += Chain.rewards[state, choice]
            state = Chain.successors[state, choice]
        total = total + log_prob.exp() * reward
    return total


def all_courses(policy):
    """A rollout of the eight courses, and the probability of each row's."""
    env = chain_env()
    env.start_episodes(8, seed=0)
    courses = list(itertools.product([GOOD, BAD], repeat=3))
    for step in range(3):
        episodes, _ = env.running_episodes
        env.advance(np.array([courses[episode][step] for episode in episodes]))
    rollout = in_order(env.take_episodes())
    assert len(rollout) == 24
    with torch.no_grad():
        rollout["log_prob"] = policy.evaluate(rollout).log_prob * rollout["mask"]
    by_episode = rollout["log_prob"].sum(1).reshape(8, 3).sum(1)
    return rollout, by_episode.exp().repeat_interleave(3)


def gradient_of(policy, loss):
    names = [name for name, p in policy.named_parameters() if p.requires_grad and "value_head" not in name]
    parameters = dict(policy.named_parameters())
    gradients = torch.autograd.grad(loss, [parameters[name] for name in names], allow_unused=True)
    return torch.cat([gradient.flatten() for gradient in gradients if gradient is not None])


@pytest.mark.parametrize("gae_lambda", [1.0, 0.0])
def test_the_expected_gradient_of_ppo_is_exact(gae_lambda):
    """Of its first step, with each course weighted by its probability. Any value function will do if λ = 1."""
    policy = lm_policy(temperature=0.7)
    agent = agent_of(
        chain_env(), policy, gamma=1.0, gae_lambda=gae_lambda, normalize_advantage=False, vf_coef=0.0, ent_coef=0.0
    )
    rollout, probability = all_courses(policy)
    add_advantages(agent, rollout)
    rollout["weight"] = probability[:, None] * rollout["mask"]
    rollout["log_weight"] = rollout["weight"]
    loss, _ = agent.loss(rollout, clip_range=0.2, first=True)
    gradient = gradient_of(policy, loss)
    expected = gradient_of(policy, -exact_objective(policy))
    assert expected.norm() > 0.1
    gap = (gradient - expected).norm() / expected.norm()
    if gae_lambda == 1.0:
        assert gap < 1e-4
    else:
        assert gap > 1e-2, "with a wrong value function this is biased: else the test would show nothing"


def test_the_expected_gradient_of_reinforce_is_exact():
    policy = lm_policy(temperature=0.7)
    agent = REINFORCE(chain_env(), policy, num_steps=None, num_episodes=8, gamma=1.0, learning_rate=1e-30)
    rollout, probability = all_courses(policy)
    agent.update(rollout)
    log_prob = policy.evaluate(rollout).log_prob
    weighted = torch.where(rollout["mask"], probability[:, None] * rollout["advantage"] * log_prob, 0.0)
    gradient = gradient_of(policy, weighted.sum())
    torch.testing.assert_close(gradient, gradient_of(policy, exact_objective(policy)), atol=1e-4, rtol=1e-3)


def test_values_of_true_successors_make_one_step_returns():
    """λ = 0: the target of a row's last step is its reward and the value of the next row's first state."""
    policy = lm_policy()
    agent = agent_of(chain_env(), policy, gamma=0.5, gae_lambda=0.0)
    rollout, _ = all_courses(policy)
    add_advantages(agent, rollout)
    value = rollout["value"][:, 0]
    reward = rollout["reward"][:, 0]
    next_value = torch.cat([value[1:], torch.zeros(1)])
    is_last = number_in_episode(rollout) == 2
    expected = reward + torch.where(is_last, 0.0, 0.5 * next_value)
    torch.testing.assert_close(rollout["value_target"][:, 0], expected, atol=1e-5, rtol=0)


TRAINED = {
    "ppo": (PPO, dict(minibatch_size=16, num_epochs=2)),
    "ppo, fitted value": (PPO, dict(minibatch_size=16, num_epochs=2, fit_value_head=True)),
    "ppo, micro-batches": (
        PPO, dict(minibatch_size=16, num_epochs=1, micro_batch_size=3, aggregation="sequence_mean"),
    ),
    "a2c": (A2C, {}),
    "grpo": (GRPO, dict(group_size=4, minibatch_size=16)),
    "rloo": (RLOO, dict(group_size=4)),
    "reinforce_plus_plus": (REINFORCEPlusPlus, dict(minibatch_size=16)),
    "reinforce": (REINFORCE, {}),
    "trpo": (TRPO, dict(critic_epochs=2, conjugate_gradient_steps=4)),
}  # fmt: skip


@pytest.mark.heavy
@pytest.mark.parametrize("name", TRAINED)
def test_every_algorithm_trains_on_several_rows(name, tmp_path):
    """With a KL in the reward, samples on the disk, and invariants such as a ratio of 1 checked by the training."""
    algorithm, options = TRAINED[name]
    policy = lm_policy(seed=0)
    penalty = KLPenalty(policy.reference(), 0.1)
    initial_parameters = [parameter.clone() for parameter in policy.parameters()]
    agent = algorithm(walk_env(history=2), policy, num_steps=None, num_episodes=8, penalty=penalty, **options)
    history = agent.learn(200, run_dir=tmp_path / "run")
    for metrics in history:
        assert metrics["episode/length"] == pytest.approx(metrics["rollout/steps"] / 8)
    assert len((tmp_path / "run" / "samples.jsonl").read_text().splitlines()) >= 8
    assert any(not torch.equal(*pair) for pair in zip(initial_parameters, policy.parameters(), strict=True))


@pytest.mark.long
def test_episodes_longer_than_the_context_train():
    """20 turns of up to 7 tokens in a model of 16 positions: with the reward, the return rises."""

    def game():
        return Walk(turns=20)

    policy = lm_policy(lambda: make_gpt2(n_positions=16), seed=0)
    env = walk_env(16, make=game, history=1)
    config = PPOConfig(
        num_steps=None, num_episodes=16, minibatch_size=80, learning_rate=3e-3, gamma=0.9, bootstrap_truncated=False
    )
    history = PPO(env, policy, config).learn(6_000)
    assert history[0]["rollout/steps"] / 16 > 3 * 16
    assert history[-1]["episode/return"] > 2 * history[0]["episode/return"]
    result = algos.evaluate(env, policy, num_episodes=6)
    assert len(result.returns) == 6 and len(result.rollout) == 120
    assert sum(result.returns) == pytest.approx(result.rollout["reward"].sum().item())


@pytest.mark.heavy
def test_an_interrupted_training_goes_on_the_same(tmp_path):
    def trained(folder, **options):
        agent = agent_of(walk_env(history=2), lm_policy(seed=0), learning_rate=1e-3, num_episodes=8)
        agent.learn(450, run_dir=folder, checkpoint_every=1, **options)
        return torch.cat([p.detach().flatten() for p in agent.policy.parameters()])

    expected = trained(tmp_path / "whole")
    trained(tmp_path / "part", on_iteration=lambda metrics: metrics["iteration"] == 2)
    assert torch.equal(trained(tmp_path / "part", resume=tmp_path / "part"), expected)


# --- programs that edit what the model has seen -----------------------------------------------------------------------


class Edits:
    """Shows 'c', then appends a text, then gives new contexts."""

    def sample_prompts(self, numbers, *, seed):
        return [Prompt("c", columns={"number": number}, state=[]) for number in numbers]

    def reply(self, turns):
        for turn in turns:
            turn.prompt.state.append(turn.completion)
        return [(" a", Prompt("a b"), (" b"), Prompt((0, 0)), None)[turn.index] for turn in turns]

    def score(self, turns):
        self.scored = [(turn.prompt.columns["number"], turn.index, turn.prompt_ids) for turn in turns]
        return [float(turn.index) if turn.last else None for turn in turns]


def test_a_program_may_edit_and_append():
    """The columns and the state of the episode stay; a score of the last turn alone counts for all rows."""
    task = Edits()
    env = TextVectorEnv(task, tokenizer=make_tokenizer(WORDS), num_envs=2, max_turns=5, max_new_tokens=2, max_length=40)
    rollout = collect(env, lm_policy(seed=1), num_episodes=3, seed=0)
    assert episode_of_row(rollout).tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert rollout["mask"].any(1).all() and rollout["reward"].sum(1).tolist() == [0, 0, 4] * 3
    starts = [[2], [2], [0, 1], [0, 1], [0, 0]]
    assert task.scored == [(number, index, starts[index]) for number in range(3) for index in range(5)]
    assert rollout["observation"][:3, :2].tolist()[1:] == [[0, 1], [0, 0]]
    with pytest.raises(ValueError, match="history is 0, expected an integer of at least 1"):
        walk_env(history=0)


class OneFails(Edits):
    """The reward of the turn in the second row of episode 1 fails."""

    def score(self, turns):
        failed = [i for i, turn in enumerate(turns) if turn.prompt.columns["number"] == 1 and turn.index == 2]
        return Scores(score=[1.0] * len(turns), failed=frozenset(failed))


def test_a_reward_that_fails_in_one_row_leaves_out_all():
    env = TextVectorEnv(
        OneFails(), tokenizer=make_tokenizer(WORDS), num_envs=2, max_turns=5, max_new_tokens=2, max_length=40
    )
    rollout = collect(env, lm_policy(seed=1), num_episodes=3, seed=0)
    is_second = episode_of_row(rollout) == 1
    assert not rollout["mask"][is_second].any() and rollout["mask"][~is_second].any(1).all()
    assert rollout["reward"].sum(1).tolist() == [2, 2, 1, 0, 0, 0, 2, 2, 1]
