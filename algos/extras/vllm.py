"""vLLM as the generator of a policy's texts: `VLLM` in this process, `VLLMServer` in another or on another machine."""

import copy
import gc
import os
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from safetensors.torch import save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from algos.policies.generator import Generated, Sampling
from algos.policies.lm import LMPolicy
from textenv.envs.episode_batch import OpenTurn
from textenv.envs.vector_env import TextVectorEnv
from textenv.lm.loading import is_adapted, merged, plain_model
from textenv.optional import package

if TYPE_CHECKING:
    from httpx import Response

WEIGHTS_FILE = "model.safetensors"
"""File name of the weights for a server."""
MAX_REQUESTS_AT_ONCE = 64
MIN_TEMPERATURE = 0.01
"""Lowest temperature that vLLM does not change."""


class VLLM:
    """Generator of text by vLLM, for an agent's ``generator``; it takes half a minute to start.

    vLLM joins ``torch.distributed`` by itself, and seeds the global generators of torch, NumPy and Python.

    Args:
        policy: the policy to generate for: a decoder-only model of an architecture that vLLM has.
        env: the environment, for its maximum length.
        options: arguments of ``vllm.LLM``. By default ``kv_cache_memory_bytes`` is 1 GiB on the CPU, and
            ``gpu_memory_utilization`` .3 on a GPU, because the training needs the rest.

    Raises:
        ValueError: on an encoder-decoder model, or a temperature that vLLM would change.

    Example:
        >>> PPO(env, policy, config, generator=VLLM(policy, env))  # doctest: +SKIP
    """

    def __init__(self, policy: LMPolicy, env: TextVectorEnv, **options: object) -> None:
        if policy.lm.seq2seq is not None:
            raise ValueError("vLLM generates by decoder-only models, this is an encoder-decoder: omit the generator")
        if policy.temperature < MIN_TEMPERATURE:
            raise ValueError(f"temperature is {policy.temperature}, expected at least .01, the lowest that vLLM takes")

        # Settings of vLLM, before it is imported
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # otherwise weights would have to be pickled
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        self._vllm = package("vllm", "vllm")

        # The model's config, as vLLM reads it
        model = plain_model(policy.lm.model)
        config = copy.deepcopy(model.config)
        config.architectures = [type(model).__name__]
        config.eos_token_id = policy.tokenizer.eos_token_id  # vLLM stops at the config's, and keeps it from short turns
        self._num_ids = config.get_text_config().vocab_size

        # The engine, which gets its weights afterwards
        dtype = policy.autocast or model.dtype
        on_cpu = package("vllm.platforms", "vllm").current_platform.is_cpu()
        defaults: dict[str, object] = {
            "dtype": str(dtype).removeprefix("torch."),
            "max_model_len": env.max_length,
            "load_format": "dummy",
            "generation_config": "vllm",
            "logprobs_mode": "processed_logprobs",
            "enforce_eager": on_cpu,
        }
        if on_cpu:
            defaults["kv_cache_memory_bytes"] = 2**30
        else:
            defaults["gpu_memory_utilization"] = 0.3
        with TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            policy.tokenizer.save_pretrained(folder)
            gc.collect()  # an earlier engine, deleted after this one has begun, would take its process groups down
            self.engine = self._vllm.LLM(folder, **(defaults | options))
        self.update_weights(policy)

    def update_weights(self, policy: LMPolicy) -> None:
        """See `Generator.update_weights`; drops what the engine has cached of earlier weights."""
        weights = list(_weights(policy).items())
        self.engine.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        self.engine.reset_prefix_cache()

    def generate(self, turns: Sequence[OpenTurn], *, seeds: Sequence[int], sampling: Sampling) -> list[Generated]:
        """See `Generator.generate`; earlier turns of a conversation are in vLLM's prefix cache."""
        prompts = []
        params = []
        for turn, seed in zip(turns, seeds, strict=True):
            prompts.append({"prompt_token_ids": turn.prefix})
            options = _options(turn, seed, sampling, self._num_ids)
            params.append(self._vllm.SamplingParams(**options, detokenize=bool(sampling.stop)))
        results = self.engine.generate(prompts, params, use_tqdm=False)

        # Each output has a dictionary of log-probabilities for each of its tokens
        generated: list[Generated] = []
        for result in results:
            output = result.outputs[0]
            log_probs = []
            for log_prob_of_token, token in zip(output.logprobs, output.token_ids, strict=True):
                log_probs.append(log_prob_of_token[token].logprob)
            generated.append((output.token_ids, log_probs))
        return generated


class VLLMServer:
    """Generator of text by vLLM's own server, with ``VLLM_SERVER_DEV_MODE=1`` and the options of docs/parallel.md.

    Whoever reaches such a server can make it run code: keep it on a private network.

    Args:
        url: address of the server, such as ``http://127.0.0.1:8000``.
        folder: folder for the weights, which this process and the server see; the server reads them again before each
            rollout.

    Raises:
        ConnectionError: at any call, if the server does not answer, or answers with an error.
    """

    def __init__(self, url: str, folder: str | Path) -> None:
        self.url = url
        self.folder = Path(folder).resolve()
        self._httpx = package("httpx", "service")
        self._client = self._httpx.Client(base_url=url, timeout=None)
        weakref.finalize(self, self._client.close)
        models = self._call("GET", "/v1/models").json()["data"]
        self._model_id = models[0]["id"]

    def update_weights(self, policy: LMPolicy) -> None:
        """See `Generator.update_weights`."""
        self._num_ids = plain_model(policy.lm.model).config.get_text_config().vocab_size
        self.folder.mkdir(parents=True, exist_ok=True)
        # The file format refuses weights that share memory
        weights = {name: weight.contiguous().clone() for name, weight in _weights(policy).items()}
        save_file(weights, self.folder / WEIGHTS_FILE)
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(self.folder)}}
        self._call("POST", "/collective_rpc", json=reload)
        self._call("POST", "/reset_prefix_cache")

    def generate(self, turns: Sequence[OpenTurn], *, seeds: Sequence[int], sampling: Sampling) -> list[Generated]:
        """See `Generator.generate`; sends a request for each turn, and the server batches them."""

        def generate_turn(turn: OpenTurn, seed: int) -> Generated:
            request = {"model": self._model_id, "prompt": turn.prefix, "return_token_ids": True}
            request |= _options(turn, seed, sampling, self._num_ids)
            (choice,) = self._call("POST", "/v1/completions", json=request).json()["choices"]
            return choice["token_ids"], choice["logprobs"]["token_logprobs"]

        with ThreadPoolExecutor(MAX_REQUESTS_AT_ONCE) as pool:
            return list(pool.map(generate_turn, turns, seeds))

    def _call(self, method: str, path: str, **content: object) -> "Response":
        """Send a request and return the response; raise a ConnectionError if there is none, or an error."""
        try:
            response = self._client.request(method, path, **content)
        except self._httpx.HTTPError as error:
            raise ConnectionError(f"no vLLM answers at {self.url}: {error}") from error
        if response.is_error:
            explanation = response.text
            if response.status_code == 404:
                explanation = "start it with VLLM_SERVER_DEV_MODE=1"
            raise ConnectionError(f"vLLM at {self.url} answers {response.status_code} to {path}: {explanation:.1000}")
        return response


def _weights(policy: LMPolicy) -> dict[str, Tensor]:
    """Return the weights by their names in files, with adapters merged.

    Tied weights are there twice, because vLLM would leave its output layer as it was.

    Raises:
        ValueError: if an adapter separates weights that are tied in the model, and so in vLLM.
    """
    model: Any = policy.lm.model
    if is_adapted(model):
        model = merged(model)
    were_tied = plain_model(policy.lm.model).config.get_text_config().tie_word_embeddings
    if were_tied and not model.config.get_text_config().tie_word_embeddings:
        raise ValueError(
            "the adapter changes the embedding and the output layer, which are one weight in vLLM, in different ways: "
            "leave them out of its targets (targets=all-linear), or generate without vLLM"
        )
    return dict(revert_weight_conversion(model, model.state_dict()))


def _options(turn: OpenTurn, seed: int, sampling: Sampling, num_ids: int) -> dict[str, object]:
    """Return vLLM's sampling options for a turn.

    Args:
        turn: the turn to continue.
        seed: seed of the turn.
        sampling: how every token of the rollout is sampled.
        num_ids: number of the model's ids, which may be larger than the vocabulary.
    """
    allowed = turn.allowed
    if not allowed and sampling.num_tokens != num_ids:
        allowed = list(range(sampling.num_tokens))
    return {
        "temperature": sampling.temperature,
        "seed": seed,
        "max_tokens": turn.max_new_tokens,
        "logprobs": 0,  # that of the sampled token only
        "min_tokens": turn.min_new_tokens,
        "allowed_token_ids": allowed or None,
        "stop_token_ids": sampling.ends,
        "stop": list(sampling.stop),
    }
