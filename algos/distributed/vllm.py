"""`VLLM`: vLLM as the generator of a policy's texts, in this process."""

import copy
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
    """Generator of text by vLLM in this process, for an agent's ``generator``; starting it takes half a minute.

    Its seeds make a rerun the same where vLLM is deterministic. vLLM joins ``torch.distributed`` alone, and seeds the
    global generators of torch, NumPy and Python.

    Args:
        policy: the policy that it will generate for: a decoder-only model of an architecture that vLLM has.
        env: the environment, for its maximum length.
        options: arguments of ``vllm.LLM``, such as ``kv_cache_memory_bytes``, or ``gpu_memory_utilization`` on a GPU.

    Raises:
        ImportError: if vLLM is not installed.
        ValueError: on an encoder-decoder model, or a temperature that vLLM would raise.

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
        self._vllm = package("vllm", "vllm")
        model = plain_model(policy.lm.model)
        config = copy.deepcopy(model.config)
        config.architectures = [type(model).__name__]
        config.tie_word_embeddings = False  # vLLM reloads tied weights in the embedding only
        self._size = config.get_text_config().vocab_size
        own = {"dtype": str(policy.autocast or model.dtype).removeprefix("torch."), "max_model_len": env.max_length,
               "load_format": "dummy", "generation_config": "vllm", "logprobs_mode": "processed_logprobs",
               "enforce_eager": model.device.type == "cpu"}  # fmt: skip
        with TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            policy.tokenizer.save_pretrained(folder)
            self.engine = self._vllm.LLM(folder, **(own | options))
        self.update_weights(policy)

    def update_weights(self, policy: LMPolicy) -> None:
        """See `Generator.update_weights`; what the engine has cached of earlier weights is dropped."""
        model = merged(policy.lm.model) if is_adapted(policy.lm.model) else policy.lm.model
        weights = list(revert_weight_conversion(model, model.state_dict()).items())  # named as in files
        self.engine.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        self.engine.reset_prefix_cache()

    def generate(self, turns: Sequence[OpenTurn], *, seeds: Sequence[int], sampling: Sampling) -> list[Generated]:
        """See `Generator.generate`; what conversations have in common with earlier turns is in vLLM's prefix cache."""
        real = None if sampling.num_tokens == self._size else list(range(sampling.num_tokens))
        same: dict[str, Any] = {
            "temperature": sampling.temperature, "stop": list(sampling.stop), "detokenize": bool(sampling.stop),
            "stop_token_ids": sampling.ends, "ignore_eos": True, "logprobs": 0,
        }  # fmt: skip
        wanted = [
            self._vllm.SamplingParams(
                seed=seed,
                max_tokens=turn.max_new_tokens,
                min_tokens=turn.min_new_tokens,
                allowed_token_ids=real if turn.allowed is None else turn.allowed,
                **same,
            )
            for turn, seed in zip(turns, seeds, strict=True)
        ]
        prompts = [{"prompt_token_ids": turn.prefix} for turn in turns]
        found = [result.outputs[0] for result in self.engine.generate(prompts, wanted, use_tqdm=False)]
        return [
            Generated(ids := each.token_ids, [of[i].logprob for of, i in zip(each.logprobs, ids, strict=True)])
            for each in found
        ]
