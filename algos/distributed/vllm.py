"""`VLLM`: vLLM as the generator of a policy's texts, in this process."""

import copy
import gc
import os
from collections.abc import Sequence
from tempfile import TemporaryDirectory
from typing import Any

from transformers.core_model_loading import revert_weight_conversion

from algos.distributed.generator import Generated, Sampling
from algos.policies.lm import LMPolicy
from textenv.envs.episode_batch import OpenTurn
from textenv.envs.vector_env import TextVectorEnv
from textenv.lm.loading import is_adapted, merged, plain_model
from textenv.optional import package


class VLLM:
    """Generator of text by vLLM, for an agent's ``generator``; it takes half a minute to start.

    vLLM joins ``torch.distributed`` by itself, and seeds the global generators of torch, NumPy and Python.

    Args:
        policy: the policy to generate for: a decoder-only model of an architecture that vLLM has.
        env: the environment, for its maximum length.
        options: arguments of ``vllm.LLM``, such as ``kv_cache_memory_bytes`` (1 GiB on the CPU) or
            ``gpu_memory_utilization`` (.3, the training needs the rest).

    Raises:
        ValueError: on an encoder-decoder model, or a temperature that vLLM would change.

    Example:
        >>> PPO(env, policy, config, generator=VLLM(policy, env))  # doctest: +SKIP
    """

    def __init__(self, policy: LMPolicy, env: TextVectorEnv, **options: Any) -> None:
        if policy.lm.seq2seq is not None:
            raise ValueError("vLLM generates by decoder-only models, this is an encoder-decoder: omit the generator")
        if policy.temperature < 0.01:
            raise ValueError(f"temperature is {policy.temperature}, expected at least .01, the lowest that vLLM takes")
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # otherwise weights would have to be pickled
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        self._vllm = package("vllm", "vllm")
        model = plain_model(policy.lm.model)
        config = copy.deepcopy(model.config)
        config.architectures = [type(model).__name__]
        config.eos_token_id = policy.tokenizer.eos_token_id  # vLLM stops at the config's, and keeps it from short turns
        self._size = config.get_text_config().vocab_size
        cpu = package("vllm.platforms", "vllm").current_platform.is_cpu()
        own = {"dtype": str(policy.autocast or model.dtype).removeprefix("torch."), "max_model_len": env.max_length,
               "load_format": "dummy", "generation_config": "vllm", "logprobs_mode": "processed_logprobs",
               "enforce_eager": cpu,
               **({"kv_cache_memory_bytes": 2**30} if cpu else {"gpu_memory_utilization": 0.3})}  # fmt: skip
        with TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            policy.tokenizer.save_pretrained(folder)
            gc.collect()  # an earlier engine, deleted after this one has begun, would take its process groups down
            self.engine = self._vllm.LLM(folder, **(own | options))
        self.update_weights(policy)

    def update_weights(self, policy: LMPolicy) -> None:
        """See `Generator.update_weights`; what the engine has cached of earlier weights is dropped."""
        model = merged(policy.lm.model) if is_adapted(policy.lm.model) else policy.lm.model
        # Named as in files, and tied ones twice: vLLM would leave the output layer as it was.
        weights = list(revert_weight_conversion(model, model.state_dict()).items())
        self.engine.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        self.engine.reset_prefix_cache()

    def generate(self, turns: Sequence[OpenTurn], *, seeds: Sequence[int], sampling: Sampling) -> list[Generated]:
        """See `Generator.generate`; what conversations have in common with earlier turns is in vLLM's prefix cache."""
        real = None if sampling.num_tokens == self._size else list(range(sampling.num_tokens))
        wanted = [
            self._vllm.SamplingParams(
                temperature=sampling.temperature, seed=seed, max_tokens=turn.max_new_tokens, logprobs=0,
                min_tokens=turn.min_new_tokens, allowed_token_ids=turn.allowed or real,
                stop_token_ids=sampling.ends, stop=list(sampling.stop), detokenize=bool(sampling.stop),
            )
            for turn, seed in zip(turns, seeds, strict=True)
        ]  # fmt: skip
        prompts = [{"prompt_token_ids": turn.prefix} for turn in turns]
        found = [result.outputs[0] for result in self.engine.generate(prompts, wanted, use_tqdm=False)]
        return [
            (ids := each.token_ids, [of[token].logprob for of, token in zip(each.logprobs, ids, strict=True)])
            for each in found
        ]
