"""`step`: an iteration on texts that were generated and scored elsewhere."""

import numpy as np
import pytest
import torch

from algos import GRPO, PPO, REINFORCE, RLOO, GRPOConfig, InvariantError, PPOConfig
from algos.training.loop import iterate
from algos.training.metrics import EpisodeMeter
from tests.helpers.errors import refused
from tests.helpers.models import make_gpt2, make_t5
from tests.helpers.small_agents import cartpole, lm_policy
from tests.helpers.text_envs import EOS, GOOD, PAD, text_env
from textenv import AdaptiveCoefficient

ANSWER = [GOOD, EOS]
SETTINGS = dict(num_steps=None, num_episodes=8, minibatch_size=3, num_epochs=2, learning_rate=1e-3)


def agent_of(kind=PPO, env=None, make=make_gpt2, **options):
    settings = SETTINGS if kind is PPO else {}
    return kind(text_env() if env is None else env, lm_policy(make), **(settings | options))


def given(rollout):
    """Queries, responses, scores and log-probabilities of a rollout."""
    found = []
    for row in rollout:
        mask = row["mask"]
        start = int(mask.int().argmax())
        query = row["observation"][: start + 1]
        found.append((query, row["action"][mask], row["reward"].sum(), row["log_prob"][mask]))
    return [list(column) for column in zip(*found, strict=True)]


@pytest.mark.heavy
@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize(("kind", "make"), [(PPO, make_gpt2), (REINFORCE, make_gpt2), (PPO, make_t5)])
def test_a_step_on_an_iterations_texts_equals_it(kind, make, recorded):
    """KL penalty and its adaptation, metrics, weights; with the log-probabilities of the sampler or of scoring."""
    agents = [agent_of(kind, make=make, kl_coef=AdaptiveCoefficient(0.2, target=6.0)) for _ in range(2)]
    for agent in agents:
        torch.manual_seed(0)
        with torch.no_grad():
            for weight in agent.policy.lm.parameters():
                weight += 0.05 * torch.randn(weight.shape)  # a KL to charge
    rollout = agents[0].collect()
    *columns, log_probs = given(rollout)
    if not recorded:
        with torch.no_grad():
            rollout["log_prob"] = agents[0].policy.evaluate(rollout).log_prob
    expected = iterate(agents[0], (EpisodeMeter(), EpisodeMeter()), rollout=rollout)
    found = agents[1].step(*columns, log_probs=log_probs if recorded else None)
    timeless = [{k: v for k, v in metrics.items() if not k.startswith("time/")} for metrics in (expected, found)]
    assert timeless[0] == timeless[1] and abs(found["reference/kl"]) > 1e-3
    assert agents[0].penalty.coef == agents[1].penalty.coef != 0.2
    for one, other in zip(agents[0].policy.parameters(), agents[1].policy.parameters(), strict=True):
        assert torch.equal(one, other)


def test_responses_end_as_in_the_environment():
    """Texts and ids, by stops and limits."""
    env = text_env(stop=["bad"])
    answers = ["good d", [GOOD, 6], torch.tensor([3] * 5)]
    rollout = env.given_episodes(["a b", (2,), "a b"], answers, [1, 2, 3.0])
    assert [row["action"][row["mask"]].tolist() for row in rollout] == [[GOOD, 3, EOS], [GOOD, 6], [3] * 5]
    assert rollout["terminated"].any(1).tolist() == [True, True, False]
    assert rollout["truncated"].any(1).tolist() == [False, False, True]
    assert rollout["group"][:, 0].tolist() == [0, 1, 0]
    assert [sample["completion"].strip() for sample in env.samples([0, 1])] == ["good d", "good"]
    assert env.metrics["reward/score"] == 2.0


def test_scores_may_be_per_token_missing_or_named():
    env = text_env()
    scores = [{"right": 1.0, "short": 0.5}, None, {"right": [0.0, 2.0]}]
    rollout = env.given_episodes([(0,), (0,), (1,)], [[GOOD, EOS]] * 3, scores)
    assert rollout["reward"].tolist() == [[0.0, 1.5], [0.0, 0.0], [0.0, 2.0]]
    assert rollout["mask"].any(1).tolist() == [True, False, True]
    assert rollout["reward_parts"][:, 0].tolist() == [[[1, 1], [0.5, 1]], [[0, 0], [0, 0]], [[2, 1], [0, 0]]]


def test_equal_queries_are_a_group():
    agent = agent_of(GRPO, config=GRPOConfig(num_episodes=4, group_size=2, normalize_each_reward=True))
    scores = [{"right": float(i % 2), "short": i / 10} for i in range(4)]
    metrics = agent.step(["a", "b", "a", "b"], [[GOOD, EOS], [EOS]] * 2, scores)
    assert metrics["rollout/silent_rows"] == 0 and metrics["update/minibatches"] == 2


@pytest.mark.parametrize("kind", [GRPO, RLOO])
def test_grouped_algorithms_refuse_a_single_response(kind):
    for queries, row in ((["a", "b"], 0), (["a", "a", "b"], 2)):
        with refused(ValueError, f"query {row} has a single response", f"{kind.__name__} compares the responses"):
            agent_of(kind).step(queries, [ANSWER] * len(queries), [float(i) for i in range(len(queries))])


def test_schedules_take_a_progress_from_0_to_1():
    agent = agent_of(final_learning_rate=0.0)
    for progress in (2.0, -1, float("nan"), "x"):
        agent.progress = progress
        with refused(ValueError, f"agent.progress is {progress!r}, expected", "0 to 1"):
            agent.step(["a"], [ANSWER], [1.0])
    agent.progress = np.float32(0.5)
    agent.step(["a"], [ANSWER], [1.0])
    assert agent.optimizer.adam.param_groups[0]["lr"] == 5e-4


def test_agents_do_not_share_a_changing_coefficient():
    shared = AdaptiveCoefficient(0.2, target=6.0)
    first, second = (agent_of(kl_coef=shared) for _ in range(2))
    first.step(["a"], [ANSWER], [1.0])
    assert first.penalty.coef != 0.2 and second.penalty.coef == shared.value == 0.2


def test_log_probs_may_be_a_tensor_of_rows():
    known = torch.full((2, 2), -1.0, requires_grad=True)
    texts = [[(0, 1)] * 2, [ANSWER] * 2, [1.0, 0.0]]
    given = [agent_of(max_importance_weight=2.0).step(*texts, log_probs=x) for x in (known, known.tolist())]
    assert given[0]["policy/sampler_gap"] == given[1]["policy/sampler_gap"] > 0


def test_log_probs_of_another_policy_need_a_correction():
    texts = [[(0, 1)] * 4, [[GOOD, EOS]] * 4, [1.0, 0.0, 2.0, 1.0]]
    with pytest.raises(InvariantError, match="set max_importance_weight"):
        agent_of().step(*texts, log_probs=[[-1.0, -0.2]] * 4)
    weighed = agent_of(max_importance_weight=2.0).step(*texts, log_probs=[[-1.0, -9.0]] * 4)
    assert 0.0 < weighed["policy/importance_weight"] <= 2.0 and weighed["policy/sampler_gap"] > 1.0
    assert agent_of(ratio_tolerance=20.0).step(*texts, log_probs=[[-1.0, -9.0]] * 4)["policy/sampler_gap"] > 1.0


WRONG = [
    ((["a", "b"], [ANSWER], [1.0]), "two lists of equal length"),
    (([], [], []), "two lists of equal length"),
    (("a", "b", 1.0), "two lists of equal length"),
    ((["a"], [ANSWER], [1.0, 2.0]), "2 values for 1 completions"),
    ((["a"], [ANSWER], [float("nan")]), "nan for row 0"),
    ((["a"], [[]], [1.0]), "completion 0", "at least one token id"),
    ((["a"], [[[1]]], [1.0]), "completion 0", "at least one token id"),
    ((["a"], [[3] * 6], [1.0]), "6 tokens, but ends after 5", "max_new_tokens=5"),
    ((["a"], [[*ANSWER, PAD]], [1.0]), "3 tokens, but ends after 2", "padding"),
    ((["a"], [[3, PAD]], [1.0]), "padding token 8"),
    ((["a"], [[99]], [1.0]), "completion 0", "99", "expected 0 to 8"),
    ((["a"], [[0.5]], [1.0]), "completion 0", "expected integers"),
    ((["a b c d a"], [ANSWER], [1.0]), "5 tokens, the limit is 4"),
    ((["a"], [ANSWER], [1.0], [[-0.1]]), r"log_probs\[0\]", "expected 2 numbers"),
    ((["a"], [ANSWER], [1.0], [[0.4, 0.3]]), r"log_probs\[0\]", "logarithm"),
    ((["a"], [ANSWER], [1.0], [[-0.4, float("nan")]]), r"log_probs\[0\]", "at most 0"),
    ((["a"], [ANSWER], [1.0], []), "0 rows for 1 responses"),
    ((["a"], [ANSWER], [1.0], -1.0), "log_probs is -1.0, not a list"),
    ((["a"], [ANSWER], [1.0], [None]), r"log_probs\[0\] is None, expected 2 numbers"),
    ((["a"], [ANSWER], [1.0], [[-0.4, -float("inf")]]), r"log_probs\[0\]", "finite"),
    (("ab", "ab", [1.0, 2.0]), "two lists of equal length, with one entry per episode"),
    (((text for text in ["a"]), [ANSWER], [1.0]), "two lists"),
    (({"a": 1}, [ANSWER], [1.0]), "two lists"),
    (([b"a"], [ANSWER], [1.0]), "prompt 0", "bytes: decode"),
    ((torch.tensor([[PAD, 0]]), [ANSWER], [1.0]), "prompt 0 starts or ends with the padding token 8"),
    (([[0, PAD]], [ANSWER], [1.0]), "prompt 0 starts or ends with the padding token 8"),
    ((["a"], [[{"role": "assistant", "content": "good"}]], [1.0]), "completion 0", "expected a text"),
    ((["a"], [ANSWER], torch.ones(1, 1)), "1 numbers", "has 2 tokens", r"shape \[B, 1\]: .squeeze\(-1\)"),
]


@pytest.mark.parametrize(("columns", "said"), [(columns, said) for columns, *said in WRONG])
def test_what_does_not_fit_is_refused_unlearnt(columns, said):
    agent = agent_of()
    before = [p.clone() for p in agent.policy.parameters()]
    queries, responses, scores, *log_probs = columns
    with refused(ValueError, *said):
        agent.step(queries, responses, scores, log_probs=log_probs[0] if log_probs else None)
    assert all(torch.equal(one, other) for one, other in zip(before, agent.policy.parameters(), strict=True))


def test_forbidden_tokens_and_control_are_refused():
    with refused(ValueError, "completion 0", "forbidden"):
        agent_of(env=text_env(forbidden=[GOOD])).step(["a"], [ANSWER], [1.0])
    with refused(TypeError, "step is for text", "TextVectorEnv"):
        PPO(cartpole(), config=PPOConfig()).step(["a"], [ANSWER], [1.0])
