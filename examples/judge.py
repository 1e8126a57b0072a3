"""A model learns from a model that judges it: SmolLM2 writes about films, and another SmolLM2 rates what it wrote.

    python examples/judge.py

The judge is asked over OpenAI's protocol, as any other server would be: here the server of ``algos serve``, in this
process and without a network. To have your answers judged by a larger model, give its address as ``base_url``.

What to expect (seed 1; two minutes of processor time, 10 minutes on two busy cores): the mean rating of 16 answers
rises from 3.0 to 4.25 stars within 6 iterations (3.25, 4, 3.25, 3.75, 4.25 and 4.75 while training). That is 8 and 13
answers with five stars, a difference of two standard errors. Some texts become short praise ("It is a great film."),
others please this judge alone: SmolLM2 has 135 million parameters, which is little for a judge. It is right about 7 of
the 8 sentences of `KNOWN`, by which the order of its four examples was chosen. In the order bad, good, bad, good it
gave five stars to twelve other sentences, half of them blame; without examples, one star to all twelve. Measure a judge
before you train on it.
"""

import argparse
import contextlib

import torch

from algos import GRPO, GRPOConfig, LMPolicy, evaluate
from algos.extras.serving import PolicyAnswerer
from textenv import Rewards, TextVectorEnv
from textenv.gateway.server import CompletionServer
from textenv.rewards import judge

LORA = "r=8,alpha=16,targets=q_proj+v_proj"
PROMPTS = ["I think that the film was", "My review of this film: It is"]
QUESTION = "Rate this review from {low} (bad) to {high} (good): "
EXAMPLES = {
    "The film is a joy from start to end.": "5",
    "The film is a waste of time.": "1",
    "The plot is stupid and dull.": "1",
    "The actors are excellent.": "5",
}
KNOWN = {
    "I laughed all the time and want to see it again.": 5,
    "A clever and touching film.": 5,
    "The acting is superb.": 5,
    "An unforgettable evening with wonderful music.": 5,
    "I fell asleep after ten minutes.": 1,
    "A silly and tiresome film.": 1,
    "The acting is terrible.": 1,
    "A painful evening with horrible music.": 1,
}


@contextlib.contextmanager
def serving(model):
    """Serve a model on this machine, as ``algos serve`` does."""
    answerer = PolicyAnswerer(LMPolicy.load(model), model)
    with CompletionServer(answerer) as server:
        yield server
    answerer.close()


def ask_for_stars(server, model):
    """Judge who is shown four rated reviews first: a tiny model learns from them what is asked."""
    chat = []
    for review, stars in EXAMPLES.items():
        chat += [{"role": "user", "content": QUESTION + review}, {"role": "assistant", "content": stars}]
    chat.append({"role": "user", "content": QUESTION + "{prompt}{answer}"})
    return judge(
        "It is a good review.",  # not in this question; the default one would show it
        base_url=server.url,
        api_key=server.token,
        model=model,
        question=chat,
        options={"temperature": 0, "max_tokens": 4},
        timeout=600.0,  # a batch waits for one core
    )


def check(stars):
    """Print how the judge rates sentences whose rating is known."""
    ratings = Rewards(stars)(prompts=[""] * len(KNOWN), completions=list(KNOWN)).score
    pairs = list(zip(ratings, KNOWN.values(), strict=True))
    num_right = sum(rating is not None and (rating > 3) == (right > 3) for rating, right in pairs)
    print(f"the judge is right about {num_right} of {len(KNOWN)} sentences", flush=True)
    return num_right


def show(name, env, policy, num_episodes):
    """Print the mean rating and three texts; return the mean."""
    result = evaluate(env, policy, num_episodes=num_episodes, seed=0)
    print(f"{name}: {result.mean_return:.2f} stars", flush=True)
    for sample in env.samples(range(3)):
        print(f"    {sample['score']} | {sample['prompt']}{sample['completion']}")
    return result.mean_return


def main(model="smollm2", iterations=6, num_episodes=16, seed=1):
    """Return the number of known sentences that the judge rates rightly, and the mean ratings before and after."""
    torch.set_num_threads(1)
    policy = LMPolicy.load(model, temperature=0.7, lora=LORA, seed=seed)
    with serving(model) as server:
        stars = ask_for_stars(server, model)
        num_right = check(stars)
        env = TextVectorEnv(
            prompts=PROMPTS,
            reward=stars,
            tokenizer=policy.tokenizer,
            num_envs=num_episodes,
            max_new_tokens=12,
            stop=["\n"],
        )
        before = show("before", env, policy, num_episodes)
        config = GRPOConfig(
            num_episodes=num_episodes, group_size=8, minibatch_size=num_episodes, num_epochs=2, learning_rate=1e-3
        )
        agent = GRPO(env, policy, config, seed=seed)

        def report(metrics):
            print(f"iteration {metrics['iteration']}: {metrics['episode/return']:.2f} stars", flush=True)
            return metrics["iteration"] >= iterations  # True ends the training

        agent.learn(10**9, on_iteration=report)
        after = show("after", env, policy, num_episodes)
        print(f"{stars.chat.calls} calls, {stars.unreadable} unreadable verdicts")
    return num_right, before, after


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    main(iterations=arguments.iterations, seed=arguments.seed)
