"""The closed-form oracle: a task small enough to list every response, and its exact optimum.

Over 4 symbols and EOS and at most 3 tokens there are 85 responses. The best policy of E[r] - β·KL(π‖π_ref) is
π*(y|x) ∝ π_ref(y|x)·exp(r(x, y)/β), and J* - J = β·KL(π‖π*) exactly.
"""

import dataclasses

import torch
from torch import nn

from algos import PPOConfig
from algos.config import CONFIGS
from algos.make import find_algorithm
from algos.policies.policy import Policy, Step
from algos.policies.random_streams import UniformStreams
from algos.training.loop import iterate
from algos.training.metrics import EpisodeMeter
from tests.helpers.models import make_tokenizer
from textenv import KLPenalty, TextVectorEnv
from textenv.lm.sampling import greedy, sample
from textenv.prompts.prompts import PromptList
from textenv.rollout import Evaluation, following, sequences

SYMBOLS, LENGTH, PROMPTS = 4, 3, 4
EOS = SYMBOLS
ACTIONS = SYMBOLS + 1
PREFIXES = sum(SYMBOLS**k for k in range(LENGTH))  # 1 + 4 + 16 prefixes at which an action is chosen


def all_responses():
    """Every response: sequences that end in EOS, and those cut at the limit."""
    open_, responses = [()], []
    for _ in range(LENGTH):
        grown = [prefix + (a,) for prefix in open_ for a in range(ACTIONS)]
        responses += [r for r in grown if r[-1] == EOS]
        open_ = [r for r in grown if r[-1] != EOS]
    return responses + open_


RESPONSES = all_responses()


def state_index(tokens):
    """Index of each prefix (prompt, then symbols) among all: int64 ``[..., L]`` to ``[..., L]``."""
    index = torch.zeros_like(tokens[..., 0])
    columns = []
    for position in range(tokens.shape[-1]):
        symbol = tokens[..., position].clamp(max=SYMBOLS - 1)
        # Numbered like the nodes of a tree of which every prompt is a root.
        index = symbol * PREFIXES if position == 0 else _child(index, symbol)
        columns.append(index)
    return torch.stack(columns, dim=-1)


def _child(index, symbol):
    root, node = index // PREFIXES, index % PREFIXES
    return root * PREFIXES + (node * SYMBOLS + 1 + symbol).clamp(max=PREFIXES - 1)


class TabularPolicy(nn.Module, Policy):
    """A free logit for every prefix and action, and a free value for every prefix."""

    sequential = True

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(logits.clone())
        self.state_value = nn.Parameter(torch.zeros(len(logits)))
        self.generator = torch.Generator()
        self.memory = {}

    def act(self, observation, *, action_mask=None, deterministic=False):
        tokens, length = torch.from_numpy(observation["tokens"]), torch.from_numpy(observation["length"]).flatten()
        last = (length - 1).clamp(min=0)
        state = state_index(tokens).gather(1, last[:, None])[:, 0]
        logits = self.logits.detach()[state]
        if deterministic:
            return Step(*greedy(logits))
        uniform = self.memory["streams"].next() if self.memory else None
        return Step(*sample(logits, generator=self.generator, uniform=uniform))

    def reset(self, rows=None, *, seeds=None):
        if seeds is None:
            self.memory.clear()
        elif rows is None or not self.memory:
            self.memory["streams"] = UniformStreams(seeds)
        else:
            self.memory["streams"].begin(rows, seeds)

    def evaluate(self, rollout):
        state = state_index(rollout["observation"])
        log_probs = self.logits.log_softmax(-1)[state]
        log_prob = log_probs.gather(-1, rollout["action"].clamp(max=ACTIONS - 1)[..., None])[..., 0]
        return Evaluation(log_prob, -(log_probs.exp() * log_probs).sum(-1), self.state_value[state])

    def divergence(self, rollout, other):
        state = state_index(rollout["observation"])
        log_probs = self.logits.log_softmax(-1)
        return (log_probs.exp() * (log_probs - other.logits.detach().log_softmax(-1))).sum(-1)[state]

    @torch.no_grad()
    def values(self, rollout):
        value = self.state_value[state_index(sequences(rollout))]
        done = rollout["terminated"] | rollout["truncated"]
        return value[:, :-1], following(value, mask=rollout["mask"], done=done)


class Problem(PromptList):
    """4 prompts, random reference logits and rewards, drawn by a seed.

    Rewards are U[0, 1] for β = .1 and U[-1, 1] for the others.
    """

    def __init__(self, seed, beta):
        super().__init__([[symbol] for symbol in range(PROMPTS)])
        generator = torch.Generator().manual_seed(seed)
        self.beta = beta
        self.reference = torch.randn(PROMPTS * PREFIXES, ACTIONS, generator=generator)
        self.rewards = torch.rand(PROMPTS, len(RESPONSES), generator=generator, dtype=torch.float64)
        if beta != 0.1:
            self.rewards = 2 * self.rewards - 1
        self.lookup = {
            (prompt, response): self.rewards[prompt, index].item()
            for prompt in range(PROMPTS)
            for index, response in enumerate(RESPONSES)
        }

    def score(self, turns):
        return [self.lookup[turn.prompt_ids[0], tuple(turn.completion_ids)] for turn in turns]

    def environment(self, **options):
        tokenizer = make_tokenizer(["a", "b", "c", "d", "<eos>"], pad="<eos>")
        return TextVectorEnv(
            self, tokenizer=tokenizer, num_envs=512, max_prompt_tokens=1, max_new_tokens=LENGTH, **options
        )


def response_log_probs(logits):
    """Log-probability of every response to every prompt: float64 ``[prompts, 85]``."""
    log_probs = logits.detach().double().log_softmax(-1)
    table = []
    for prompt in range(PROMPTS):
        row = []
        for response in RESPONSES:
            states = state_index(torch.tensor([[prompt, *response]]))[0]
            row.append(sum(log_probs[states[t], a] for t, a in enumerate(response)))
        table.append(torch.stack(row))
    return torch.stack(table)


class Optimum:
    """What is known exactly about a problem."""

    def __init__(self, problem):
        self.beta, self.rewards = problem.beta, problem.rewards
        self.reference = response_log_probs(problem.reference)
        self.best = (self.reference + self.rewards / self.beta).log_softmax(-1)

    def divergence(self, log_probs):
        """KL(π‖π*) in nats, averaged over prompts."""
        return (log_probs.exp() * (log_probs - self.best)).sum(-1).mean().item()

    def objective(self, log_probs):
        """E[r] - β·KL(π‖π_ref), averaged over prompts."""
        penalty = self.beta * (log_probs - self.reference)
        return (log_probs.exp() * (self.rewards - penalty)).sum(-1).mean().item()


CONFIG = PPOConfig(
    num_steps=None, num_episodes=512, num_epochs=4, minibatch_size=128, learning_rate=0.05, final_learning_rate=0.0,
    gamma=1.0, gae_lambda=0.95, vf_coef=0.5, max_grad_norm=10.0, bootstrap_truncated=False, normalize_advantage=False,
    clip_range=0.2,
)  # fmt: skip


def name_of(config):
    """Name of the algorithm that a config belongs to."""
    return next(name for name, config_type in CONFIGS.items() if config_type is type(config))


def run(seed, beta, *, iterations=300, penalty=None, environment=None, policy=None, config=CONFIG, problem=None):
    """Train by the config's algorithm; returns optimum and policy. What is not given is the tabular problem's own."""
    problem = Problem(seed, beta) if problem is None else problem
    policy = TabularPolicy(problem.reference) if policy is None else policy
    reference = TabularPolicy(problem.reference).requires_grad_(False)
    penalty = (KLPenalty if penalty is None else penalty)(reference, beta)
    env = problem.environment() if environment is None else environment(problem)
    agent = find_algorithm(name_of(config))(env, policy, dataclasses.replace(config, seed=seed), penalty=penalty)
    # Responses differ in length, so iterations are counted here, not steps.
    for iteration in range(iterations):
        agent.progress = iteration / iterations
        iterate(agent, (EpisodeMeter(), EpisodeMeter()))
    return Optimum(problem), policy
