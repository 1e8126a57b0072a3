"""An iteration of SmolLM2-135M, ours or TRL's, on the same work: one line ``RESULT {"s_per_iter": ..., ...}``.

Four prompts with four answers each of 32 tokens (EOS is forbidden). GRPO: 2 epochs of 2 minibatches of 8 answers, KL in
the loss; RLOO: one step on two times 8 answers, KL in the reward; PPO: as GRPO with a value head, KL in the reward. One
thread, the processor's seconds, no gradient checkpointing. Run by ``text.py`` with either interpreter:

    python examples/benchmarks/smollm2.py grpo --weights lora --library ours --model ~/.cache/textenv/smollm2-...
"""

import argparse
import json
import os
import time

import torch
from peak_memory import PeakMemory

PROMPTS = [
    f"{start} {film} {verb}"
    for start in ("Critics say that", "Last night I saw that", "My friend thinks that", "It is well known that")
    for film in ("this old French movie", "the new film about the sea", "the story of the two brothers")
    for verb in ("was", "is", "turned out to be")
]
GROUP, ANSWERS, ROWS, NEW_TOKENS, KL = 4, 16, 8, 32, 0.05
RATE = 1e-6
RANK, ALPHA, TARGETS = 8, 16, ["q_proj", "v_proj"]


def reward(completions, **columns):
    """How many letters e there are."""
    return [float(text.count("e")) for text in completions]


def ours(options):
    """A function that trains for so many iterations and calls another one at each end."""
    from algos import GRPO, PPO, RLOO, GRPOConfig, LMPolicy, PPOConfig, RLOOConfig
    from textenv import KLPenalty, TextVectorEnv

    lora = f"r={RANK},alpha={ALPHA},targets={'+'.join(TARGETS)}" if options.weights == "lora" else None
    policy = LMPolicy.load(options.model, lora=lora, dtype=getattr(torch, options.dtype))
    env = TextVectorEnv(
        prompts=PROMPTS, reward=reward, tokenizer=policy.tokenizer, num_envs=ANSWERS, max_new_tokens=NEW_TOKENS,
        forbidden=[policy.tokenizer.eos_token_id],
    )  # fmt: skip
    both = dict(num_episodes=ANSWERS, learning_rate=RATE)
    epochs = dict(num_epochs=2, minibatch_size=ROWS)
    kind, config, where = {
        "grpo": (GRPO, GRPOConfig(group_size=GROUP, **both, **epochs), dict(estimator="k3", place="loss")),
        "rloo": (RLOO, RLOOConfig(group_size=GROUP, micro_batch_size=ROWS, **both), {}),
        "ppo": (PPO, PPOConfig(num_steps=None, bootstrap_truncated=False, **both, **epochs), {}),
    }[options.algorithm]
    agent = kind(env, policy, config, penalty=KLPenalty(policy.reference(), KL, **where))
    return lambda count, ended: agent.learn(10**9, on_iteration=lambda metrics: ended() >= count)


def theirs(options):
    """The same of TRL."""
    import tempfile

    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    steps = 4 if options.algorithm == "grpo" else 1  # of the optimizer in an iteration
    name = options.algorithm.upper()
    accumulated = 1 if name == "GRPO" else ANSWERS // ROWS
    config = getattr(trl, name + "Config")(
        output_dir=tempfile.mkdtemp(), report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False,
        save_strategy="no", logging_steps=1, disable_tqdm=True, per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=accumulated, steps_per_generation=ANSWERS // ROWS, num_generations=GROUP,
        num_iterations=steps // (ANSWERS // ROWS) or 1, beta=KL, max_completion_length=NEW_TOKENS, learning_rate=RATE,
        lr_scheduler_type="constant", max_steps=steps * (1 + options.iterations), dataloader_pin_memory=False,
        generation_kwargs={"min_new_tokens": NEW_TOKENS},
    )  # fmt: skip
    more = {}
    if options.weights == "lora":
        from peft import LoraConfig

        more["peft_config"] = LoraConfig(
            r=RANK, lora_alpha=ALPHA, target_modules=TARGETS, lora_dropout=0, task_type="CAUSAL_LM"
        )
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype))
    trainer = getattr(trl, name + "Trainer")(
        model=model, reward_funcs=lambda completions, **columns: reward(completions), args=config,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS]), processing_class=tokenizer, **more,
    )  # fmt: skip

    def train(count, ended):
        class StopConditions(TrainerCallback):
            def on_step_end(self, args, state, control, **more):
                if state.global_step % steps == 0:
                    ended()

        trainer.add_callback(StopConditions())
        trainer.train()

    return train


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("algorithm", choices=["grpo", "rloo", "ppo"])
    parser.add_argument("--weights", choices=["lora", "full"], default="lora")
    parser.add_argument("--library", choices=["ours", "trl"], default="ours")
    parser.add_argument("--model", required=True, help="a folder")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the weights")
    parser.add_argument("--iterations", type=int, default=1, help="that are timed, after one to warm up")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ |= {"TRANSFORMERS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    train = {"ours": ours, "trl": theirs}[options.library](options)
    memory, clock = PeakMemory(), []

    def ended():
        clock.append(time.process_time())
        return len(clock) - 1

    memory.start()
    train(options.iterations, ended)
    seconds = (clock[-1] - clock[0]) / (len(clock) - 1)
    print("RESULT " + json.dumps({"s_per_iter": seconds} | memory.metrics()), flush=True)


if __name__ == "__main__":
    main()
