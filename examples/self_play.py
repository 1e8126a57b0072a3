"""A tiny language model learns two games by playing against itself.

    python examples/self_play.py kuhn --games 256 --iterations 5000 --rate 2e-3 --entropy 0.6
    python examples/self_play.py tic-tac-toe --games 256 --iterations 500 --entropy 0.15 --epochs 3

Kuhn poker has hidden cards, so the best play is random: the script prints how much a perfect opponent would win of the
present policy and of the average of all policies so far, by enumeration (`exploitability`, in antes a game; 0 is an
equilibrium). In tic-tac-toe it prints how often the policy draws against a perfect player, whom it never meets in
training.
"""

import argparse
import dataclasses

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from algos import PPO, Callback, League, LMPolicy, evaluate
from textenv import ProgramVectorEnv
from textenv.programs.kuhn_poker import ACTIONS, CARDS, SITUATIONS, exploitability, kuhn_poker
from textenv.programs.tic_tac_toe import SQUARES, perfect_player, tic_tac_toe
from textenv.rollout import sequences


def tiny_policy(words, *, layers, width, spread, seed):
    """A transformer with random weights of this standard deviation, for texts of these words."""
    vocabulary = {word: number for number, word in enumerate(["<end>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[a-z]+|[^a-z]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=len(vocabulary), n_positions=64, n_embd=width, n_layer=layers, n_head=4,
        initializer_range=spread, bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return LMPolicy(GPT2LMHeadModel(config), fast, seed=seed)


class WatchPoker(Callback):
    """Prints the exploitability of the present policy and of the average policy."""

    def __init__(self, every):
        self.every = every
        self.bets = dict.fromkeys(SITUATIONS, 0.5)
        self.sums = dict.fromkeys(SITUATIONS, 0.0)
        self.weights = dict.fromkeys(SITUATIONS, 1e-9)

    def on_rollout(self, run, rollout):
        """Read the probabilities of a bet from the log-probabilities of a rollout."""
        self.bets |= bet_probabilities(rollout, run.agent.env.tokenizer)

        # An average of policies weighs each by how often it comes into a situation; later ones count more
        iteration = len(run.history) + 1
        weight = iteration**4
        for player, card, moves in SITUATIONS:
            reach = 1.0
            if len(moves) == 2:  # after a pass of its own
                reach = 1 - self.bets[0, card, ()]
            self.sums[player, card, moves] += weight * reach * self.bets[player, card, moves]
            self.weights[player, card, moves] += weight * reach
        if iteration % self.every == 0:
            print(
                f"{iteration:5}  present {exploitability(self.bets):.3f}  average {self.exploitability():.3f}",
                flush=True,
            )

    def exploitability(self):
        """Exploitability of the average policy."""
        return exploitability({situation: self.sums[situation] / self.weights[situation] for situation in SITUATIONS})


def bet_probabilities(rollout, tokenizer):
    """Probability of a bet in each situation that occurs in a rollout of Kuhn poker."""
    bets = {}
    tokens = sequences(rollout).tolist()
    for row, agent in enumerate(rollout["agent"][:, 0].tolist()):
        words = tokenizer.convert_ids_to_tokens(tokens[row])
        for column in rollout["mask"][row].nonzero().flatten().tolist():
            moves = tuple(word for word in words[1 : column + 1] if word in ACTIONS)
            probability = rollout["log_prob"][row, column].exp().item()
            if words[column + 1] == "pass":
                probability = 1 - probability
            bets[agent, CARDS.index(words[0]), moves] = probability
    return bets


class Cooling(Callback):
    """Lowers the entropy bonus to a thirtieth, by the same factor in each iteration."""

    def on_start(self, run):
        """Note what it is at the beginning."""
        self.first = run.agent.config

    def on_iteration(self, run, metrics):
        """Set it for the next iteration."""
        ent_coef = self.first.ent_coef * 30**-run.agent.progress
        run.agent.config = dataclasses.replace(self.first, ent_coef=ent_coef)


def play_kuhn(options):
    """Train on Kuhn poker."""
    words = [*CARDS, *ACTIONS, "you", "other", ":", "\n", " "]
    policy = tiny_policy(words, layers=1, width=32, spread=0.02, seed=options.seed)
    env = ProgramVectorEnv(
        kuhn_poker, agents=2, allowed=ACTIONS, tokenizer=policy.tokenizer, num_envs=256, max_length=32
    )
    agent = PPO(
        env, policy, num_episodes=2 * options.games, num_steps=None, minibatch_size=10**6, num_epochs=options.epochs,
        learning_rate=options.rate, final_learning_rate=0.0, gamma=1.0, gae_lambda=1.0,
        ent_coef=options.entropy, seed=options.seed,
    )  # fmt: skip
    watch = WatchPoker(options.every)
    agent.learn(12 * options.games * options.iterations // 5, callbacks=[watch, Cooling()])
    print(f"average policy: exploitability {watch.exploitability():.4f}")


def play_tic_tac_toe(options):
    """Train on tic-tac-toe by self-play; print results against the perfect player.

    Weights of the usual deviation, .02, attend to all squares alike, and take ten times as long to tell boards apart.
    Advantages are not normalized: when most games are draws, that would scale up what is left, which is noise.
    """
    words = [*SQUARES, "X", "O", ".", ":", "\n"]
    policy = tiny_policy(words, layers=2, width=64, spread=0.12, seed=options.seed)
    arguments = {"agents": 2, "allowed": SQUARES, "tokenizer": policy.tokenizer, "num_envs": 128, "max_length": 24}
    env = ProgramVectorEnv(tic_tac_toe, opponents=[None], max_turns=9, **arguments)
    perfect_env = ProgramVectorEnv(tic_tac_toe, opponents={"perfect": perfect_player}, max_turns=9, **arguments)

    def watch(metrics):
        """Play 100 games against the perfect player."""
        if metrics["iteration"] % options.every == 0:
            evaluate(perfect_env, policy, num_episodes=200, deterministic=True)
            drawn = perfect_env.metrics["opponents/perfect/drawn"]
            print(
                f"{metrics['iteration']:5}  {metrics['steps']:9,} moves  draws against the perfect player {drawn:.2f}",
                flush=True,
            )

    agent = PPO(
        env, policy, num_episodes=2 * options.games, num_steps=None, minibatch_size=256, num_epochs=options.epochs,
        learning_rate=options.rate, final_learning_rate=0.0, gamma=1.0, gae_lambda=1.0, vf_coef=1.0,
        normalize_advantage=False, ent_coef=options.entropy, seed=options.seed,
    )  # fmt: skip
    callbacks = [Cooling()]
    if options.league:
        callbacks.append(League(every=options.every, size=options.league))
    agent.learn(7 * options.games * options.iterations, callbacks=callbacks, on_iteration=watch)
    for moves, deterministic in (("the most probable", True), ("sampled", False)):
        evaluate(perfect_env, policy, num_episodes=1000, deterministic=deterministic)
        drawn = perfect_env.metrics["opponents/perfect/drawn"]
        print(f"500 games against the perfect player, {moves} moves: {drawn:.3f} drawn")


def main():
    """Train on one of the games."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("game", choices=["kuhn", "tic-tac-toe"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--games", type=int, default=512, help="games of an iteration")
    parser.add_argument("--iterations", type=int, default=400)
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate, which falls to 0")
    parser.add_argument("--entropy", type=float, default=0.3, help="entropy bonus, which falls to a thirtieth")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--league", type=int, default=0, help="tic-tac-toe: earlier versions to play against, too")
    parser.add_argument("--every", type=int, default=20, help="iterations from one line to the next")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.game == "kuhn":
        play_kuhn(options)
    else:
        play_tic_tac_toe(options)


if __name__ == "__main__":
    main()
