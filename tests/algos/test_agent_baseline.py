"""A running mean of each agent's returns as a baseline: by hand, and on a game whose value is known."""

import pytest
import torch
from tensordict import TensorDict

from algos import REINFORCE, REINFORCEConfig, collect
from algos.agent_baseline import AgentBaseline
from tests.helpers.models import make_tokenizer
from tests.helpers.programs import program_env, reader_policy, word_policy
from textenv.programs.kuhn_poker import ACTIONS, CARDS, SITUATIONS, expected_winnings, kuhn_poker
from textenv.rollout import join_episodes


def episodes_of(returns, agents=None):
    """One step each; None is an episode without a step."""
    count = len(returns)
    columns = {
        "reward": torch.tensor([[0.0 if x is None else x] for x in returns]),
        "mask": torch.tensor([[x is not None] for x in returns]),
        "terminated": torch.ones(count, 1, dtype=torch.bool),
        "truncated": torch.zeros(count, 1, dtype=torch.bool),
    }
    if agents is not None:
        columns["agent"] = torch.tensor(agents)[:, None]
    return TensorDict(columns, batch_size=(count, 1))


def test_the_means_run_by_agent():
    """By hand, with decay 1/2: agent 0 gets 1 and 3, agent 1 gets 2."""
    baseline = AgentBaseline(decay=0.5)
    values = baseline(episodes_of([1.0, 2.0, None, 3.0], agents=[0, 1, 1, 0]))
    assert values.tolist() == [0.5, 1.0, 0.0, 1.75]
    assert baseline(episodes_of([0.0, 0.0], agents=[1, 0])).tolist() == [0.5, 0.875]


def test_without_agents_there_is_one_mean():
    assert AgentBaseline(decay=0.5)(episodes_of([1.0, 3.0])).tolist() == [0.5, 1.75]


def test_the_state_is_restored():
    baseline, other = AgentBaseline(), AgentBaseline()
    baseline(episodes_of([1.0, 2.0], agents=[3, 0]))
    other.load_state_dict(baseline.state_dict())
    more = episodes_of([0.5, 0.5], agents=[0, 3])
    assert torch.equal(baseline(more), other(more))


@pytest.mark.heavy
def test_on_kuhn_poker_the_means_are_the_value_of_the_game():
    """That of the present policy, by enumeration; standard errors of the mean of 1,500 games are .04."""
    tokenizer = make_tokenizer([*CARDS, *ACTIONS, "you:", "other:", "<eos>", "<pad>"])
    env = program_env(kuhn_poker, 64, agents=2, tokenizer=tokenizer, allowed=ACTIONS)
    rollout = collect(env, reader_policy(tokenizer), num_episodes=3_000, seed=1)
    bets = {}
    for row in range(len(rollout)):
        tokens = [rollout["observation"][row, 0].item(), *rollout["action"][row].tolist()]
        words = tokenizer.convert_ids_to_tokens(tokens)
        for column in rollout["mask"][row].nonzero().flatten().tolist():
            moves = tuple(word for word in words[1 : column + 1] if word in ACTIONS)
            probability = rollout["log_prob"][row, column].exp().item()
            if words[column + 1] == "pass":
                probability = 1 - probability
            bets[int(rollout["agent"][row, 0]), CARDS.index(words[0]), moves] = probability
    assert bets.keys() == set(SITUATIONS)
    value = expected_winnings(bets)

    baseline = AgentBaseline(decay=0.9995)
    episodes = join_episodes(rollout)
    assert baseline(episodes).shape == (3_000,)
    corrected = {agent: mean / (1 - 0.9995**1500) for agent, mean in baseline.means.items()}
    assert corrected[0] == pytest.approx(value, abs=0.12) and corrected[1] == pytest.approx(-value, abs=0.12)
    assert corrected[0] == pytest.approx(-corrected[1])


def test_reinforce_subtracts_it():
    """From the returns to go, at every step of the episode, also in its further rows."""

    def play(first, second):
        first("a")
        second("b")
        first("c")
        return 2.0, -1.0

    env = program_env(play, agents=2)
    config = REINFORCEConfig(num_episodes=8, baseline="agent", normalize_advantage=False, gamma=1.0)
    agent = REINFORCE(env, word_policy(), config)
    rollout = agent.collect()
    agent.update(rollout)
    agents = rollout["agent"][:, 0].tolist()
    games = [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    for row, (player, game) in enumerate(zip(agents, games, strict=True)):
        value = (2.0, -1.0)[player]
        expected = value - value * (1 - 0.95 ** (game + 1))
        assert torch.allclose(rollout["advantage"][row][rollout["mask"][row]], torch.tensor(expected))
