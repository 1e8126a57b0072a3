"""Peak memory of training a language model, by phase: the run's own operations, on tensors without numbers."""

import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from algos.config import ActorCriticConfig, ClippedConfig
from algos.policies.critic import CANDIDATES, Critic, fresh_head
from algos.ranks.sharding import layers_of
from textenv.device import find_device
from textenv.lm.decoding import Decoder
from textenv.lm.loading import add_lora, from_pretrained, model_folder
from textenv.lm.memory import POSITIONS_AT_ONCE
from textenv.lm.model import LanguageModel
from textenv.lm.sampling import restrict, sample
from textenv.lm.seq2seq import Seq2Seq, Seq2SeqDecoder

Parts = Counter[str]
"""Bytes of policy, critic, reference, gradients, Adam, cache, logits and activations (with other temporary tensors)."""


class _Shapes(LanguageModel):
    """Language model on the device ``meta``: there is nothing to check, and no tokenizer is needed."""

    def __init__(self, run: Any) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

        nn.Module.__init__(self)
        folder = model_folder(Path(run.model).parent if Path(run.model).name == "config.json" else run.model)
        config = from_pretrained(AutoConfig, folder)
        kind: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        model = kind.from_config(config, dtype=run.dtype).eval()
        self.model = model if run.lora is None else add_lora(model, run.lora, seed=0)
        self.num_tokens, self.temperature = config.get_text_config().vocab_size, 1.0
        self.gradient_checkpointing = run.gradient_checkpointing
        self.autocast = torch.bfloat16 if run.autocast else None
        self.context, self.cached, self.tokenizer = None, {}, None  # type: ignore[assignment]
        self.seq2seq = Seq2Seq((0,), None) if config.is_encoder_decoder else None
        self.hard_choices = ()


class MemoryEstimate(TorchDispatchMode):
    """Models and phases of a run, and the bytes of the tensors that live, by part, now and at the peak.

    ``run`` has the options of `algos train`, prompts and answers have ``prompt`` and ``new`` tokens each, ``processes``
    share slots and rows, and ``cuda`` says that all rows are computed at once. A critic counts as a copy of the model.
    """

    def __init__(self, run: Any, *, prompt: int = 1, new: int = 1, processes: int = 1, cuda: bool = False) -> None:
        super().__init__()
        self.config, self.prompt, self.new, self.length, self.cuda = run.config, prompt, new, prompt + new, cuda
        self.episodes = batch = run.config.num_episodes or run.num_envs
        batch = min(run.config.minibatch_size, batch) if isinstance(run.config, ClippedConfig) else batch
        self.slots, self.rows, self.batch = (-(-x // processes) for x in (run.num_envs, self.episodes, batch))
        self.now, self.peak, self._owners = Parts(), Parts(), dict[int, tuple[str, int]]()
        self.values = isinstance(run.config, ActorCriticConfig)
        with torch.device("meta"):
            self.lm, self.critic = _Shapes(run), None
            head = fresh_head(self.lm.hidden_size, torch.device("meta"))
            if self.values and run.critic not in (None, "head"):
                self.critic = Critic.from_language_model(self.lm)
                self.critic.gradient_checkpointing, self.critic.autocast = run.gradient_checkpointing, self.lm.autocast
            self.reference = None if run.kl_coef is None else self.lm.frozen_copy()
        self.head = head if self.critic is None else self.critic.head
        models = {"policy": self.lm, "critic": self.critic or head, "reference": self.reference or nn.Module()}
        with FakeTensorMode(allow_non_fake_inputs=True) as self.shapes, self:
            for self.part, model in models.items():
                _allocate(model)
            self.trained = [p for part in ("policy", "critic") for p in models[part].parameters() if p.requires_grad]
            self.part = "Adam"
            self.moments = [torch.zeros_like(p) for p in self.trained for _ in range(2)]
            self.part = "gradients"  # those of the last step stay until the next one
            for p in self.trained:
                p.grad = torch.zeros_like(p)
            self.part = "activations"

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation is torch.ops.aten._local_scalar_dense.default:
            return self.prompt  # encoder-decoders read it; there are no other numbers
        if operation is torch.ops.aten._grouped_mm.default:  # the shapes' own is for bfloat16 only
            one, other, offsets = args[:3]
            found = one.new_empty(*([] if other.dim() == 3 else [len(offsets)]), one.shape[0], other.shape[-1])
        else:
            found = operation(*args, **(kwargs or {}))
        for x in tree_leaves(found):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in self._owners:
                weakref.finalize(x.untyped_storage(), self._free, x.untyped_storage()._cdata)
                self.assign(x, self.part)
        return found

    def assign(self, tensor: Tensor, part: str) -> None:
        """Count a tensor's memory to this part from now on."""
        key, size = tensor.untyped_storage()._cdata, tensor.untyped_storage().nbytes()
        if key in self._owners:
            self._free(key)
        self._owners[key] = part, size
        self.now[part] += size
        if self.now.total() > self.peak.total():
            self.peak = self.now.copy()

    def _free(self, key: int) -> None:
        part, size = self._owners.pop(key)
        self.now[part] -= size

    @torch.no_grad()
    def generate(self) -> None:
        """Read the prompts, and sample the first and the last tokens of the answers in all slots."""
        self.lm.cached[self.length] = True
        kind = Decoder if self.lm.seq2seq is None else Seq2SeqDecoder
        self.decoder = kind(self.lm, num_slots=self.slots, max_length=self.length)
        for read in (self.prompt, self.length - 1, self.length):
            if read == self.length - 1 and isinstance(self.decoder, Decoder):
                self.decoder.read[:] = read  # as if it had been read token by token
                continue
            logits = self.decoder.logits(np.zeros(self.decoder.shape, dtype=np.int64), np.full(self.slots, read))
            self.part = "logits"
            sample(restrict(logits, temperature=1.0, allowed=None), uniform=torch.zeros(self.slots))
            self.part = "activations"
            del logits
            self._owners |= {key: ("cache", size) for key, (part, size) in self._owners.items() if part == self.part}
            kept = Parts({"cache": self.now[self.part], self.part: -self.now[self.part]})  # nothing else has stayed
            self.now.update(kept)
            self.peak.update(kept)

    @torch.no_grad()
    def score(self) -> None:
        """Compute the reference's log-probabilities and the values of a rollout."""
        if self.reference is not None:
            self._log_probs(self.reference, self._hidden(self.reference, self.rows))
        if self.values:
            x = self._hidden(self.critic or self.lm, self.rows).float()
            x = x if self.critic is not None else torch.cat([x, torch.empty_like(x)], -1)  # embeddings, see `LMPolicy`
            if self.config.fit_value_head:  # as `fit_head`: copies of the features, and a system for each candidate
                _ = torch.empty(4, self.episodes, *x.shape[1:]), torch.empty(len(CANDIDATES), x.shape[2], x.shape[2])

    def update(self) -> None:
        """Compute the gradient of a minibatch; of its parts the first two, as the others are like the second."""
        part = min(self.batch, self.config.micro_batch_size or self.batch)
        for p in self.trained:
            p.grad = None
            p.register_post_accumulate_grad_hook(lambda p: self.assign(p.grad, "gradients"))
        for _ in range(min(2, -(-self.batch // part))):
            hidden = self._hidden(self.lm, part)
            loss = torch.stack(self._log_probs(self.lm, hidden)).sum()
            hidden = hidden if self.critic is None else self._hidden(self.critic, part)
            loss = loss + self.head(hidden.float()).sum() if self.values else loss
            del hidden
            loss.backward(inputs=self.trained)

    def _hidden(self, model: Any, rows: int) -> Tensor:
        """Output of a trunk; without gradients, by one group of rows of `textenv.lm.memory` (a GPU has no groups)."""
        group = rows if torch.is_grad_enabled() else min(rows, max(1, POSITIONS_AT_ONCE // self.length))
        before, here, self.peak = self.peak, self.now.total(), self.now.copy()
        tokens = torch.zeros(group, self.length, dtype=torch.int64)
        found: Tensor = model.hidden(tokens, torch.full((group,), self.prompt))
        if self.cuda:
            self.peak["activations"] += (self.peak.total() - here) * (rows - group) // group
        self.peak = max(before, self.peak, key=Parts.total)
        return found if group == rows else torch.cat([found.new_empty(rows - group, *found.shape[1:]), found])

    def _log_probs(self, lm: LanguageModel, hidden: Tensor) -> tuple[Tensor, ...]:
        """Log-probabilities and entropies of the answers' tokens; of their chunks the first two."""
        chosen = hidden[:, -self.new - 1 : -1].flatten(0, 1)[: lm._rows_at_once + 1]
        self.part = "logits"
        found = lm.score_actions(chosen, action=torch.zeros(len(chosen), dtype=torch.int64), allowed=None)
        self.part = "activations"
        return found


def peaks(run: Any, *, processes: int = 1, **options: Any) -> dict[str, Parts]:
    """Parts at the peak of each phase, of one of the processes; options as of `MemoryEstimate`."""
    played, found = MemoryEstimate(run, processes=processes, **options), dict[str, Parts]()
    for phase in (played.generate, played.score, played.update):
        played.peak = played.now.copy()
        with played.shapes, played:
            phase()
        found[phase.__name__] = played.peak
    found["save"] = played.now.copy()
    if run.shard and processes > 1:
        models = (played.lm, *([] if played.critic is None else [played.critic]))
        layers = [sum(p.nbytes for p in layer.parameters()) for model in models for layer in layers_of(model)]
        for parts in found.values():
            parts["shards"] = weights = parts["policy"] + parts["critic"]
            for part in ("shards", "gradients", "Adam"):
                parts[part] = -(-parts[part] // processes)
        # The root's weights, and of layers about two by their weights, one by its gradients, and a message.
        found["update"]["gathered"] = weights - sum(layers) + 4 * max(layers, default=0)
    return {name: +parts for name, parts in found.items()}


def check_fits(run: Any) -> None:
    """Raise a ValueError if weights, gradients and Adam's state exceed the free memory; at once if files are small."""
    free, files = free_memory(run.device), Path(model_folder(run.model)).glob("*.safetensors")
    if free is None or 16 * sum(file.stat().st_size for file in files) < free:  # 6 copies, as float32 from bfloat16
        return
    needed = MemoryEstimate(run).now
    if needed.total() > free:
        said = ", ".join(f"{part} {size / 2**30:.1f}" for part, size in needed.items() if size)
        raise ValueError(
            f"this run needs {needed.total() / 2**30:.1f} GiB before it computes anything ({said}), but "
            f"{run.device or 'cpu'} has {free / 2**30:.1f} free: algos plan with the same options says what helps"
        )


def free_memory(device: str | None) -> int | None:
    """Free bytes of a device (None: the CPU); None if they are not known."""
    place, known = find_device(device or "cpu"), Path("/proc/meminfo")
    if place is not None and place.type == "cuda":
        return torch.cuda.mem_get_info(place)[0]
    lines = known.read_text().splitlines() if place == torch.device("cpu") and known.is_file() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), None)


def _allocate(model: nn.Module) -> None:
    """Replace the tensors on ``meta`` by those of the mode that is active; tied ones stay tied."""
    made: dict[Tensor, Any] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, x in tensors.items():
                if x is not None and x.is_meta and x not in made:
                    made[x] = torch.empty_like(x, device="cpu")
                    made[x] = nn.Parameter(made[x], x.requires_grad) if isinstance(x, nn.Parameter) else made[x]
                tensors[name] = x if x is None else made.get(x, x)
