"""Estimate of the peak memory of training a language model, by phase: the real operations, on fake tensors."""

import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from algos.config import ActorCriticConfig, ClippedConfig
from algos.policies.critic import Critic, fresh_head
from algos.policies.fitted_value import CANDIDATES
from algos.ranks.sharding import layers_of
from textenv.device import free_memory
from textenv.lm.decoding import Decoder
from textenv.lm.loading import add_lora, from_pretrained, model_folder
from textenv.lm.memory import POSITIONS_AT_ONCE
from textenv.lm.model import CHUNK_ELEMENTS_ON_CUDA, LanguageModel
from textenv.lm.sampling import restrict, sample
from textenv.lm.seq2seq import Seq2Seq, Seq2SeqDecoder

BytesByUse = Counter[str]
"""Bytes of policy, critic, reference, gradients, Adam, cache, logits and activations (with other temporary tensors)."""


class _MetaModel(LanguageModel):
    """Language model on the device ``meta``: there is nothing to check, and no tokenizer is needed.

    Args:
        run: options of `algos train`.
        cuda: whether the run's logits are computed in the chunks of a GPU.
    """

    def __init__(self, run: Any, *, cuda: bool = False) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

        nn.Module.__init__(self)
        self.on_cuda = cuda
        folder = run.model
        if Path(run.model).name == "config.json":
            folder = Path(run.model).parent
        config = from_pretrained(AutoConfig, model_folder(folder))

        # The model
        model_class: Any = AutoModelForCausalLM
        self.seq2seq = None
        if config.is_encoder_decoder:
            model_class = AutoModelForSeq2SeqLM
            self.seq2seq = Seq2Seq((0,), ())
        self.model = model_class.from_config(config, dtype=run.dtype).eval()
        if run.lora is not None:
            self.model = add_lora(self.model, run.lora, seed=0)

        # What `LanguageModel` sets
        self.num_tokens = config.get_text_config().vocab_size
        self.temperature = 1.0
        self.gradient_checkpointing = run.gradient_checkpointing
        self.autocast = None
        if run.autocast:
            self.autocast = torch.bfloat16
        self.context = None
        self.cached = {}
        self.tokenizer = None  # type: ignore[assignment]
        self.hard_choices = ()

    @property
    def _chunk_elements(self) -> int:
        if self.on_cuda:
            return CHUNK_ELEMENTS_ON_CUDA
        return super()._chunk_elements


class MemoryEstimate(TorchDispatchMode):
    """Models and phases of a run, and the bytes of the tensors that live: ``now``, and at the ``peak``.

    While the mode is active, a new tensor counts to ``use``.

    Args:
        run: options of `algos train`. A critic counts as a copy of the model.
        prompt: tokens of each prompt.
        new: tokens of each answer.
        processes: processes that share slots and rows.
        cuda: compute all rows at once, as on a GPU.
    """

    def __init__(self, run: Any, *, prompt: int = 1, new: int = 1, processes: int = 1, cuda: bool = False) -> None:
        super().__init__()
        self.config = run.config
        self.values = isinstance(run.config, ActorCriticConfig)
        self.cuda = cuda

        # Sizes, of one process
        self.prompt = prompt
        self.new = new
        self.length = prompt + new
        self.episodes = run.config.num_episodes or run.num_envs
        minibatch = self.episodes
        if isinstance(run.config, ClippedConfig):
            minibatch = min(run.config.minibatch_size, minibatch)
        self.slots = _ceil_div(run.num_envs, processes)
        self.rows = _ceil_div(self.episodes, processes)
        self.batch = _ceil_div(minibatch, processes)

        # Bytes, and the use and bytes of each storage that lives
        self.now = BytesByUse()
        self.peak = BytesByUse()
        self._owners: dict[int, tuple[str, int]] = {}

        # Models, without memory
        self.critic: Critic | None = None
        self.reference: LanguageModel | None = None
        with torch.device("meta"):
            self.lm = _MetaModel(run, cuda=cuda)
            self.head = fresh_head(self.lm.hidden_size, torch.device("meta"))
            if self.values and run.critic not in (None, "head"):
                self.critic = Critic.from_language_model(self.lm)
                self.critic.gradient_checkpointing = run.gradient_checkpointing
                self.critic.autocast = self.lm.autocast
            if run.kl_coef is not None:
                self.reference = self.lm.frozen_copy()

        models: dict[str, nn.Module] = {"policy": self.lm, "critic": self.head}
        if self.critic is not None:
            self.head = self.critic.head
            models["critic"] = self.critic
        if self.reference is not None:
            models["reference"] = self.reference

        # What lives between the phases: weights, Adam's state, and gradients of the last step until the next one
        with FakeTensorMode(allow_non_fake_inputs=True) as self.fake_tensors, self:
            for name, model in models.items():
                self.use = name
                _allocate(model)
            weights = [*models["policy"].parameters(), *models["critic"].parameters()]
            self.trained = [p for p in weights if p.requires_grad]
            self.use = "Adam"
            self.moments = [torch.zeros_like(p) for p in self.trained for _ in range(2)]
            self.use = "gradients"
            for p in self.trained:
                p.grad = torch.zeros_like(p)
            self.use = "activations"

    def __torch_dispatch__(
        self,
        operation: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        # Operations that fake tensors cannot do
        if operation is torch.ops.aten._local_scalar_dense.default:
            return self.prompt  # encoder-decoders read it; there are no other numbers
        if operation is torch.ops.aten._grouped_mm.default:  # that of fake tensors is for bfloat16 only
            left, right, offsets = args[:3]
            shape = [left.shape[0], right.shape[-1]]
            if right.dim() != 3:
                shape = [len(offsets), *shape]
            result = left.new_empty(shape)
        else:
            result = operation(*args, **(kwargs or {}))

        # Count new storages until they are freed
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                if storage._cdata not in self._owners:
                    weakref.finalize(storage, self._free, storage._cdata)
                    self.assign(x, self.use)
        return result

    def assign(self, tensor: Tensor, use: str) -> None:
        """Count a tensor's memory to this use from now on."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        size = storage.nbytes()
        if key in self._owners:
            self._free(key)
        self._owners[key] = use, size
        self.now[use] += size
        if self.now.total() > self.peak.total():
            self.peak = self.now.copy()

    def _free(self, key: int) -> None:
        use, size = self._owners.pop(key)
        self.now[use] -= size

    @torch.no_grad()
    def generate(self) -> None:
        """Read the prompts, and sample the first and the last tokens of the answers in all slots."""
        self.lm.cached[self.length] = True
        decoder_class: type[Decoder | Seq2SeqDecoder] = Seq2SeqDecoder
        if self.lm.seq2seq is None:
            decoder_class = Decoder
        self.decoder = decoder_class(self.lm, num_slots=self.slots, max_length=self.length)
        for read in (self.prompt, self.length - 1, self.length):
            if read == self.length - 1 and isinstance(self.decoder, Decoder):
                self.decoder.num_read[:] = read  # as if it had been read token by token
                continue
            tokens = np.zeros(self.decoder.shape, dtype=np.int64)
            logits = self.decoder.logits(tokens, np.full(self.slots, read))
            self.use = "logits"
            sample(restrict(logits, temperature=1.0, allowed=None), uniform=torch.zeros(self.slots))
            self.use = "activations"
            del logits

            # The cache has stayed, and nothing else
            for key, (use, size) in list(self._owners.items()):
                if use == "activations":
                    self._owners[key] = "cache", size
            cache_size = self.now["activations"]
            for bytes_by_use in (self.now, self.peak):
                bytes_by_use["cache"] += cache_size
                bytes_by_use["activations"] -= cache_size

    @torch.no_grad()
    def score(self) -> None:
        """Compute the reference's log-probabilities and the values of a rollout."""
        if self.reference is not None:
            self._log_probs(self.reference, self._hidden(self.reference, self.rows))
        if self.values:
            features = self._hidden(self.critic or self.lm, self.rows).float()
            if self.critic is None:
                features = torch.cat([features, torch.empty_like(features)], -1)  # embeddings, see `LMPolicy`
            if self.config.fit_value_head:
                # As `FittedValue.fit`: copies of the features, and a system of equations for each candidate
                width = features.shape[2]
                copies = torch.empty(4, self.episodes, *features.shape[1:])
                systems = torch.empty(len(CANDIDATES), width, width)
                del copies, systems

    def update(self) -> None:
        """Compute the gradient of a minibatch, of two micro-batches at most: the others are like the second."""
        micro_batch = min(self.batch, self.config.micro_batch_size or self.batch)

        def count_gradient(parameter: Tensor) -> None:
            assert parameter.grad is not None
            self.assign(parameter.grad, "gradients")

        for p in self.trained:
            p.grad = None
            p.register_post_accumulate_grad_hook(count_gradient)

        # A name keeps its tensor alive, so there are only the names that a training has
        for _ in range(min(2, _ceil_div(self.batch, micro_batch))):
            hidden = self._hidden(self.lm, micro_batch)
            loss = torch.stack(self._log_probs(self.lm, hidden)).sum()
            if self.critic is not None:
                hidden = self._hidden(self.critic, micro_batch)
            if self.values:
                loss = loss + self.head(hidden.float()).sum()
            del hidden
            loss.backward(inputs=self.trained)

    def _hidden(self, model: LanguageModel | Critic, rows: int) -> Tensor:
        """Output of a trunk, ``[rows, length, hidden size]``.

        Without gradients, one group of rows of `textenv.lm.memory` is computed, and the others are like it. A GPU has
        no groups: there, the group's temporary tensors count for all rows.
        """
        group = rows
        if not torch.is_grad_enabled():
            group = min(rows, max(1, POSITIONS_AT_ONCE // self.length))

        # Peak of the group alone
        former_peak = self.peak
        former_bytes = self.now.total()
        self.peak = self.now.copy()
        tokens = torch.zeros(group, self.length, dtype=torch.int64)
        hidden: Tensor = model.hidden(tokens, torch.full((group,), self.prompt))
        if self.cuda:
            self.peak["activations"] += (self.peak.total() - former_bytes) * (rows - group) // group
        self.peak = max(former_peak, self.peak, key=BytesByUse.total)

        if group == rows:
            return hidden
        return torch.cat([hidden.new_empty(rows - group, *hidden.shape[1:]), hidden])

    def _log_probs(self, lm: LanguageModel, hidden: Tensor) -> tuple[Tensor, ...]:
        """Log-probabilities and entropies of the answers' tokens, of two chunks: the others are like the second."""
        chosen = hidden[:, -self.new - 1 : -1].flatten(0, 1)[: lm._rows_at_once + 1]
        self.use = "logits"
        scores = lm.score_actions(chosen, action=torch.zeros(len(chosen), dtype=torch.int64), allowed=None)
        self.use = "activations"
        return scores


def peaks(run: Any, *, processes: int = 1, **options: Any) -> dict[str, BytesByUse]:
    """Return the bytes by use at the peak of each phase, of one of the processes; options as of `MemoryEstimate`."""
    estimate = MemoryEstimate(run, processes=processes, **options)
    by_phase: dict[str, BytesByUse] = {}
    for phase in (estimate.generate, estimate.score, estimate.update):
        estimate.peak = estimate.now.copy()
        with estimate.fake_tensors, estimate:
            phase()
        by_phase[phase.__name__] = estimate.peak
    by_phase["save"] = estimate.now.copy()

    if run.shard and processes > 1:
        # Each process has a part of the weights, the gradients and Adam's state
        for bytes_by_use in by_phase.values():
            bytes_by_use["shards"] = bytes_by_use["policy"] + bytes_by_use["critic"]
            for use in ("shards", "gradients", "Adam"):
                bytes_by_use[use] = _ceil_div(bytes_by_use[use], processes)

        # An update also gathers weights: the root's, and of about two layers, with one's gradients and a message
        models: list[nn.Module] = [estimate.lm]
        if estimate.critic is not None:
            models.append(estimate.critic)
        layer_sizes = []
        for model in models:
            for layer in layers_of(model):
                layer_sizes.append(sum(p.nbytes for p in layer.parameters()))
        weights = by_phase["save"]["policy"] + by_phase["save"]["critic"]
        by_phase["update"]["gathered"] = weights - sum(layer_sizes) + 4 * max(layer_sizes, default=0)
    return {phase_name: +bytes_by_use for phase_name, bytes_by_use in by_phase.items()}


def check_fits(run: Any) -> None:
    """Raise a ValueError if weights, gradients and Adam's state exceed the free memory.

    Returns at once if the model's files are so small that they fit anyway.
    """
    free = free_memory(run.device)
    if free is None:
        return
    files = Path(model_folder(run.model)).glob("*.safetensors")
    if 16 * sum(file.stat().st_size for file in files) < free:  # 6 copies, as float32 from bfloat16
        return
    needed = MemoryEstimate(run).now
    if needed.total() > free:
        uses = ", ".join(f"{use} {size / 2**30:.1f}" for use, size in needed.items() if size)
        raise ValueError(
            f"this run needs {needed.total() / 2**30:.1f} GiB before it computes anything ({uses}), but "
            f"{run.device or 'cpu'} has {free / 2**30:.1f} free: algos plan with the same options says what helps"
        )


def _ceil_div(count: int, parts: int) -> int:
    """Quotient, rounded up: the most that one of the parts has."""
    return -(-count // parts)


def _allocate(model: nn.Module) -> None:
    """Replace the tensors on ``meta`` by those of the mode that is active; tied ones stay tied."""
    allocated: dict[Tensor, Tensor] = {}
    for module in model.modules():
        tensors_by_kind: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for tensors in tensors_by_kind:
            for name, x in tensors.items():
                if x is None:
                    continue
                if x.is_meta and x not in allocated:
                    allocated[x] = torch.empty_like(x, device="cpu")
                    if isinstance(x, nn.Parameter):
                        allocated[x] = nn.Parameter(allocated[x], x.requires_grad)
                tensors[name] = allocated.get(x, x)
