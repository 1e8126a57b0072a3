"""vLLM as the generator of a policy's texts: `VLLM` in this process, `VLLMServer` in another or on another machine."""

import copy
import gc
import os
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from algos.generator import Generated, Sampling
from algos.policies.lm import LMPolicy
from textenv.envs.episode_batch import OpenTurn
from textenv.envs.vector_env import TextVectorEnv
from textenv.lm.loading import is_adapted, merged, plain_model
from textenv.optional import package

WEIGHTS, AT_ONCE = "model.safetensors", 64
"""File name of weights for a server; maximum number of requests at a time."""


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
        self.engine.collective_rpc("reload_weights", kwargs={"weights_iterator": list(_weights(policy).items())})
        self.engine.reset_prefix_cache()

    def generate(self, turns: Sequence[OpenTurn], *, seeds: Sequence[int], sampling: Sampling) -> list[Generated]:
        """See `Generator.generate`; what conversations have in common with earlier turns is in vLLM's prefix cache."""
        options = (_options(turn, seed, sampling, self._size) for turn, seed in zip(turns, seeds, strict=True))
        wanted = [self._vllm.SamplingParams(**each, detokenize=bool(sampling.stop)) for each in options]
        prompts = [{"prompt_token_ids": turn.prefix} for turn in turns]
        found = [result.outputs[0] for result in self.engine.generate(prompts, wanted, use_tqdm=False)]
        return [
            (ids := each.token_ids, [of[token].logprob for of, token in zip(each.logprobs, ids, strict=True)])
            for each in found
        ]


class VLLMServer:
    """Generator of text by vLLM's own server, started with ``VLLM_SERVER_DEV_MODE=1`` and the options of docs/runs.md.

    Whoever reaches such a server can make it run code: keep it on a private network.

    Args:
        url: of the server, such as ``http://127.0.0.1:8000``.
        folder: folder that both see, for the weights; the server reads them again before each rollout.

    Raises:
        ConnectionError: at any call, if the server does not answer, or answers with an error.
    """

    def __init__(self, url: str, folder: str | Path) -> None:
        self.url, self.folder = url, Path(folder).resolve()
        self._httpx = package("httpx", "service")
        self._client = self._httpx.Client(base_url=url, timeout=None)
        weakref.finalize(self, self._client.close)
        self._model = self._call("GET", "/v1/models").json()["data"][0]["id"]

    def update_weights(self, policy: LMPolicy) -> None:
        """See `Generator.update_weights`."""
        self._size = plain_model(policy.lm.model).config.get_text_config().vocab_size
        self.folder.mkdir(parents=True, exist_ok=True)
        save_file({name: x.contiguous().clone() for name, x in _weights(policy).items()}, self.folder / WEIGHTS)
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(self.folder)}}
        self._call("POST", "/collective_rpc", json=reload)
        self._call("POST", "/reset_prefix_cache")

    def generate(self, turns: Sequence[OpenTurn], *, seeds: Sequence[int], sampling: Sampling) -> list[Generated]:
        """See `Generator.generate`; a request for each turn, which the server batches."""

        def answer(turn: OpenTurn, seed: int) -> Generated:
            wanted = {"model": self._model, "prompt": turn.prefix, "return_token_ids": True}
            wanted |= _options(turn, seed, sampling, self._size)
            (found,) = self._call("POST", "/v1/completions", json=wanted).json()["choices"]
            return found["token_ids"], found["logprobs"]["token_logprobs"]

        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(answer, turns, seeds))

    def _call(self, method: str, path: str, **content: Any) -> Any:
        try:
            response = self._client.request(method, path, **content)
        except self._httpx.HTTPError as error:
            raise ConnectionError(f"no vLLM answers at {self.url}: {error}") from error
        if response.is_error:
            said = "start it with VLLM_SERVER_DEV_MODE=1" if response.status_code == 404 else response.text
            raise ConnectionError(f"vLLM at {self.url} answers {response.status_code} to {path}: {said:.1000}")
        return response


def _weights(policy: LMPolicy) -> dict[str, Tensor]:
    """Weights by their names in files; tied ones twice, as vLLM would leave the output layer as it was.

    Raises:
        ValueError: if an adapter parts weights that are tied in the model, and so in vLLM.
    """
    model: Any = merged(policy.lm.model) if is_adapted(policy.lm.model) else policy.lm.model
    were_tied = plain_model(policy.lm.model).config.get_text_config().tie_word_embeddings
    if were_tied and not model.config.get_text_config().tie_word_embeddings:
        raise ValueError(
            "the adapter changes the embedding and the output layer, which are one weight in vLLM, in different ways: "
            "leave them out of its targets (targets=all-linear), or generate without vLLM"
        )
    return dict(revert_weight_conversion(model, model.state_dict()))


def _options(turn: OpenTurn, seed: int, sampling: Sampling, size: int) -> dict[str, Any]:
    """Options of vLLM for a turn of a model of so many ids."""
    real = None if sampling.num_tokens == size else list(range(sampling.num_tokens))
    return {
        "temperature": sampling.temperature, "seed": seed, "max_tokens": turn.max_new_tokens, "logprobs": 0,
        "min_tokens": turn.min_new_tokens, "allowed_token_ids": turn.allowed or real,
        "stop_token_ids": sampling.ends, "stop": list(sampling.stop),
    }  # fmt: skip
