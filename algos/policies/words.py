"""`WordsPolicy`: a language model as the network of a control policy."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import VectorActionWrapper, VectorEnv, VectorObservationWrapper, VectorWrapper
from tensordict import TensorDict
from torch import Tensor, nn

from algos.envs.flatten import unflatten
from algos.envs.wrapping import single_environment, vector_wrappers
from algos.policies.critic import VALUE_HEAD_FILE, Critic, fresh_head
from algos.policies.distributions import ActionDistribution, Binned, action_distribution
from algos.policies.lm import CRITIC_FOLDER, default_learning_rate, load_language_model, make_critic
from algos.policies.policy import ControlPolicy, Evaluation, Observation, Policy, Step, step_values
from algos.storage.saved_environment import UnnamedCodeError
from textenv.embedded.folder import EMBEDDED
from textenv.importing import load_function, name_of
from textenv.lm.frozen_layers import FrozenLayers, fingerprints, trains
from textenv.lm.loading import save_model
from textenv.lm.memory import layers_of
from textenv.lm.model import LanguageModel
from textenv.names import check_names
from textenv.prompts.messages import Message
from textenv.prompts.prompts import Prompt
from textenv.prompts.tokenize import prompt_ids, separate_ids
from textenv.words.actions import ActionWords
from textenv.words.describing import (
    Description,
    KnownDescription,
    SpaceDescription,
    description_of,
    restore_description,
    takes_environment,
)

if TYPE_CHECKING:
    from peft import PeftConfig

Describe = Callable[[Any], object]
"""Function from the observation of one environment to a text; that it is one is checked."""
MAX_REMEMBERED = 100_000
"""Number of observations and of texts whose descriptions and tokens are remembered."""
TEXTS_AT_ONCE = 64
"""Maximum number of texts that are read at a time without gradients."""
LANGUAGE_MODEL_OPTIONS = ("temperature", "gradient_checkpointing", "autocast")
"""Options of `LanguageModel` that a saved policy restores."""
EXACT_IN_FLOAT32 = 2**24
"""All integers below this one are float32 numbers, and not all above."""
_warn = functools.cache(logging.getLogger(__name__).warning)


class WordsPolicy(ControlPolicy):
    """Language model as the network of a control policy: it reads a description of the observation.

    The environment stays as it is. Each observation is described in words, and the probability of an action is that of
    its word after the description if only the words of actions may be written: the product over the word's tokens, each
    among the tokens that continue a word. Without a chat template it is the distribution of a language model in a
    `LanguageWrapper` that sees the last observation only. No text grows, so an episode may be of any length. Equal
    descriptions in a batch are read once. Carta et al. 2023 ("Grounding large language models in interactive
    environments with online reinforcement learning") take the softmax of the words' own probabilities, which is the
    same for words of one token.

    With several choices (MultiDiscrete, or a Box in bins, see `ActionWords`) each is asked for in a text of its own.
    The value comes from a linear head on the model's output after the description, initialized to zero, or from a
    critic.

    Args:
        observation_space: space of one environment.
        action_space: space of one environment; a Box must have bounds, and its actions are a few values only.
        language_model: the model, trained in place.
        describe: description of the observations: a function of one observation, or the name of one,
            ``package.module:function`` or ``file.py:function``; it must always give the same text for the same
            observation. None: a list of the observation's numbers (`SpaceDescription`); `of` finds a better one.
        actions: words of the actions, see `ActionWords`; None: those of the description.
        instructions: what stands before each description. None: the instructions of the description; with your own
            description or words, a list of the words.
        chat: whether the text is a message in the model's chat template.
        critic: value model instead of the head on the model's output; it is trained too.
        detach_value: keep the value's gradient out of the model.
        remember_texts: keep what the frozen layers of the model give for a text, up to 1 GiB, instead of running them
            again. It is for observations whose texts come back (a grid, or numbers in a few words), and a model whose
            first layers are frozen, as with ``lora="r=16,layers=10"``; on a CPU, training then takes half of the time.
            If most texts are new, it is slower. It is not saved: give it again to continue a training.
        seed: seed of action sampling.

    Raises:
        TypeError: if a description is no text.
        ValueError: if the actions have no words, two words have the same tokens, or ``remember_texts`` is for a model
            whose first layer trains; when reading, if a text is longer
            than the model's context.

    Example:
        >>> env = gymnasium.make_vec("FrozenLake-v1", num_envs=8, is_slippery=False)  # doctest: +SKIP
        >>> PPO(env, WordsPolicy.of(env, "embedded")).learn(10_000)  # doctest: +SKIP
    """

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        language_model: LanguageModel,
        *,
        describe: Describe | str | None = None,
        actions: Sequence[str] | Sequence[Sequence[str]] | None = None,
        instructions: str | None = None,
        chat: bool = False,
        critic: Critic | None = None,
        detach_value: bool = False,
        remember_texts: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(observation_space, action_space, normalize_observations=False, seed=seed)
        self.language_model = language_model
        self.remember_texts = remember_texts
        layers = layers_of(language_model.model)
        if remember_texts and (not layers or trains(layers[0])):
            raise ValueError(
                "remember_texts is True, but the first layer of the model trains, so what it gives for a text changes: "
                "leave it out, or put an adapter on the last layers only, such as lora='r=16,layers=10'"
            )
        self.chat = chat
        if chat and not language_model.tokenizer.chat_template:
            raise ValueError("chat is True, but the model's tokenizer has no chat template: leave chat out")

        # The words that the model reads, and those that it chooses from
        if describe is None:
            describe = SpaceDescription(observation_space)
        elif isinstance(describe, str):
            describe = load_function(describe)
        if takes_environment(describe):
            raise TypeError(
                f"describe is {describe!r:.200}, which wants the observation and the environment, but a policy has the "
                "observation alone: give a function of it, or train on a LanguageWrapper (textenv/Words-v0)"
            )
        self.describe: Describe = describe
        own_instructions = None
        if isinstance(describe, Description) and actions is None:
            actions = describe.action_words
            own_instructions = describe.instructions
        self.action_words = ActionWords(action_space, actions)
        if instructions is None:
            instructions = own_instructions or self.action_words.request
        if not isinstance(instructions, str):
            raise TypeError(f"instructions is {instructions!r:.200}, expected a text")
        self.instructions = instructions
        self._forget()

        self._trees: list[_WordTree] = []
        for words in self.action_words.choices:
            ids = [separate_ids(word, language_model.tokenizer) for word in words]
            self._trees.append(_WordTree(words, _with_ends(ids, language_model)))
        self.distribution: ActionDistribution
        if self.action_words.is_binned:
            assert isinstance(action_space, spaces.Box)
            self.distribution = Binned(action_space, torch.from_numpy(np.stack(self.action_words.values)))
        else:
            self.distribution = action_distribution(action_space)

        # Value
        self.detach_value = detach_value
        if critic is not None and detach_value:
            raise ValueError("detach_value is for a value head on the model, but a critic has its own: omit it")
        self.critic: nn.Module
        """Linear head, or a `Critic` with a model of its own."""
        if critic is None:
            self.critic = fresh_head(language_model.hidden_size, language_model.device)
        else:
            critic.compute_like(language_model)
            self.critic = critic

    @classmethod
    @check_names
    def of(
        cls,
        env: VectorEnv,
        model: str | Path | LanguageModel = EMBEDDED,
        *,
        describe: Describe | str | None = None,
        actions: Sequence[str] | Sequence[Sequence[str]] | None = None,
        dtype: torch.dtype | None = None,
        lora: str | PeftConfig | None = None,
        critic: Critic | str | Path | None = None,
        seed: int = 0,
        temperature: float = 1.0,
        gradient_checkpointing: bool = False,
        autocast: torch.dtype | None = None,
        **options: Any,
    ) -> Self:
        """Make a policy for an environment, with the description that is known for it (`description_of`).

        Args:
            env: a vector environment.
            model: name or path of a model, as for `LMPolicy.load`; or a loaded one, which has its own options.
            describe: see the class; None: the description that is known for the environment.
            actions: see the class; None: those of the description that is known for the environment.
            dtype: see `LMPolicy.load`.
            lora: see `LMPolicy.load`.
            critic: see `LMPolicy.load`.
            seed: seed of action sampling, and of a new adapter.
            temperature: see `LanguageModel`.
            gradient_checkpointing: see `LanguageModel`.
            autocast: see `LanguageModel`.
            options: further constructor arguments.

        Raises:
            TypeError: if ``env`` is no vector environment, or the description of the first observation is no text.
            ValueError: as the constructor; and if the description of the first observation is too long.
        """
        if not isinstance(env, VectorEnv):
            raise TypeError(f"env is {env!r:.100}, expected a vector environment, as gymnasium.make_vec makes it")
        if describe is None:
            describe = _known_description(env)
        elif actions is None:
            with suppress(ValueError):  # such observations have no description of ours, which is why there is another
                usual_description = _known_description(env)
                if usual_description is not None:
                    actions = usual_description.action_words
        if isinstance(model, LanguageModel):
            options_of_loading = (dtype, lora, temperature, gradient_checkpointing, autocast)
            if options_of_loading != (None, None, 1.0, False, None):
                raise ValueError(
                    "model is a loaded LanguageModel, which has its own dtype, adapter, temperature and memory "
                    "options: give them when you load it, or give the model's name"
                )
        else:
            model = load_language_model(
                model,
                dtype=dtype,
                lora=lora,
                seed=seed,
                temperature=temperature,
                gradient_checkpointing=gradient_checkpointing,
                autocast=autocast,
            )
        policy = cls(
            env.single_observation_space,
            env.single_action_space,
            model,
            describe=describe,
            actions=actions,
            critic=make_critic(critic, model),
            seed=seed,
            **options,
        )

        # Describe an observation now, not hours after the start
        example = _example(env)
        if example is not None:
            for text in policy._asked(policy._description(example)):
                policy._ids(text)
        return policy

    def check_environment(self, env: VectorEnv) -> None:
        """See `Policy.check_environment`: the texts must be those of this environment, such as of its map."""
        if not isinstance(self.describe, KnownDescription):
            return
        present = _known_description(env)
        if isinstance(present, KnownDescription) and present.saved() != self.describe.saved():
            raise ValueError(
                f"the policy describes {self.describe!r:.300}, but the environment is {present!r:.300}: make a policy "
                "for it, WordsPolicy.of(env, policy.language_model)"
            )

    @property
    def default_learning_rate(self) -> float:
        """See `Policy.default_learning_rate`."""
        return default_learning_rate(self.language_model)

    @property
    def autocast(self) -> torch.dtype | None:
        """Dtype of the model's computation; None means that of the weights."""
        return self.language_model.autocast

    def texts(self, observation: Observation) -> list[str]:
        """What the model reads for each observation of a batch, as the environment gives them, or flat.

        With several choices, the text that asks for the first.
        """
        rows = torch.from_numpy(self._flatten(observation))
        return [self._asked(text)[0] for text in self._descriptions(rows)]

    export = Policy.export  # which refuses: descriptions and a language model are no network for control

    def words(self, action: Tensor | np.ndarray) -> list[str]:
        """Words of each action of a batch ``[N, *]``; those of several choices are joined by spaces."""
        words = []
        for entry in np.asarray(action):
            indices = self.action_words.indices(entry)
            words.append(" ".join(choice[i] for choice, i in zip(self.action_words.choices, indices, strict=True)))
        return words

    @torch.no_grad()
    def act(self, observation: Observation, *, action_mask: Tensor | None = None, deterministic: bool = False) -> Step:
        """See `Policy.act`; the observation is ``[N, *]``."""
        logits, _ = self._read(torch.from_numpy(self._flatten(observation)))
        return self.choose(logits, action_mask, deterministic)

    def evaluate(self, rollout: TensorDict) -> Evaluation:
        """See `Policy.evaluate`; any batch shape."""
        logits, value = self._read(rollout["observation"])
        return self.evaluation(rollout, logits, value.unsqueeze(-1))

    def output(self, rollout: TensorDict) -> Tensor:
        """Log-probabilities of the words of all choices, ``[*, size]``, nats."""
        return self._read(rollout["observation"])[0]

    @torch.no_grad()
    def value(self, observation: Tensor) -> Tensor:
        """State values ``[*batch]`` of observations ``[*batch, *]``."""
        return self._read(observation)[1]

    def values(self, rollout: TensorDict) -> tuple[Tensor, Tensor]:
        """See `Policy.values`."""
        return step_values(self.value, rollout)

    def update_normalizer(self, rollout: TensorDict) -> None:
        """Forget what was computed, even if the update has changed no weight: a resumed training has not read it."""
        self._outputs = _Outputs()

    def fork(self) -> Self:
        """See `Policy.fork`."""
        player = super().fork()
        player._forget()  # or the rounding of a training would depend on its evaluations
        player._frozen_layers = self._frozen_layers  # whose numbers do not depend on what was read before
        return player

    def reference(self) -> Self:
        """Frozen copy for a KL penalty; of the model, only trained weights are copied (with LoRA, the adapter)."""
        frozen = copy.copy(self)
        frozen.__dict__["_modules"] = dict(self._modules)
        frozen.language_model = self.language_model.frozen_copy()
        frozen.critic = copy.deepcopy(self.critic).requires_grad_(False)
        frozen.generator = torch.Generator()
        frozen._forget()
        return frozen

    def save(self, folder: Path) -> dict[str, object]:
        """See `Policy.save`. Write a plain `transformers` folder, or a `peft` one, with the value head or ``critic/``.

        A description of your own is saved by the name of its function, which `load` does not import: see there.
        """
        from safetensors.torch import save_file

        # Model and value
        lm = self.language_model
        save_model(lm.model, folder)
        lm.tokenizer.save_pretrained(folder)
        if isinstance(self.critic, Critic):
            self.critic.save(folder / CRITIC_FOLDER, metadata={})
        else:
            save_file(self.critic.state_dict(), folder / VALUE_HEAD_FILE)

        # Everything else
        saved = self.saved_spaces()
        saved["describe"] = self._saved_description()
        saved["instructions"] = self.instructions
        saved["actions"] = [list(words) for words in self.action_words.choices]
        saved["chat"] = self.chat
        saved["detach_value"] = self.detach_value
        saved["temperature"] = lm.temperature
        saved["gradient_checkpointing"] = lm.gradient_checkpointing
        saved["autocast"] = None if lm.autocast is None else str(lm.autocast).removeprefix("torch.")
        return saved

    @classmethod
    def load(cls, folder: Path, saved: dict[str, Any], *, describe: Describe | str | None = None) -> Self:
        """Load a policy written by `save`. The weights of its models become float32, as in `LMPolicy.load` by default.

        Args:
            folder: folder of the weights.
            saved: what `save` returned.
            describe: the description, if it was a function of one's own: a saved file must not cause imports.

        Raises:
            UnnamedCodeError: if the saved description is a function and ``describe`` is None.
        """
        from safetensors.torch import load_file

        arguments = dict(saved)
        observation_space, action_space = cls.restored_spaces(arguments)

        # Description and words
        description = arguments.pop("describe")
        if describe is None:
            if "function" in description:
                raise UnnamedCodeError(
                    f"this agent describes observations by the function {description['function']!r:.200}, which runs "
                    "only if you name it: algos.load(folder, describe=function), on the command line --describe "
                    "file.py:function"
                )
            describe = restore_description(description, observation_space)
        words = arguments.pop("actions")
        arguments["actions"] = words[0] if len(words) == 1 else words

        # Model and value
        model_options = {name: arguments.pop(name) for name in LANGUAGE_MODEL_OPTIONS}
        if model_options["autocast"] is not None:
            model_options["autocast"] = torch.bfloat16
        lm = LanguageModel.load(folder, **model_options)
        critic = None
        if (folder / CRITIC_FOLDER).is_dir():
            critic = Critic.load(folder / CRITIC_FOLDER, lm.tokenizer)
        policy = cls(observation_space, action_space, lm, describe=describe, critic=critic, **arguments)
        if critic is None:
            policy.critic.load_state_dict(load_file(folder / VALUE_HEAD_FILE))
        return policy

    # --- reading ---------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        """Begin without remembered descriptions, tokens and outputs, which a copy of the policy must not share."""
        self._described_by = self.describe
        self._text_of_observation: dict[bytes, str] = {}
        self._ids_of_text: dict[tuple[bool, str], list[int]] = {}
        self._outputs = _Outputs()
        self._frozen_layers = FrozenLayers()

    def _read(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of words ``[*batch, size]`` and values ``[*batch]`` of observations ``[*batch, *]``."""
        batch_shape = observation.shape[: observation.ndim - len(self._shape)]
        texts = self._descriptions(observation.reshape(-1, *observation.shape[len(batch_shape) :]))
        if not texts:
            empty = torch.zeros(*batch_shape, self.distribution.size, device=self.device)
            return empty, empty.sum(-1)

        # Each distinct text is read once; without gradients, not again until the weights change
        row_of_text = {text: row for row, text in enumerate(dict.fromkeys(texts))}
        if torch.is_grad_enabled():
            scores, values = self._read_texts(list(row_of_text))
        else:
            scores, values = self._outputs.of(list(row_of_text), self)
        rows = torch.tensor([row_of_text[text] for text in texts], device=scores.device)
        return scores[rows].reshape(*batch_shape, -1), values[rows].reshape(batch_shape)

    def _read_texts(self, descriptions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Log-probabilities ``[D, size]`` of all words, nats, and values ``[D]`` after D descriptions."""
        # Rows of tokens: each text, with every beginning of words after which several tokens may follow
        rows: list[list[int]] = []
        prompt_lengths: list[int] = []
        row_of_branch: list[int] = []
        position_of_branch: list[int] = []
        first_rows: list[int] = []
        for description in descriptions:
            first_rows.append(len(rows))
            for text, tree in zip(self._asked(description), self._trees, strict=True):
                prompt = self._ids(text)
                for branch in tree.branches:
                    row_of_branch.append(len(rows) + branch.row)
                    position_of_branch.append(len(prompt) + branch.depth - 1)
                for beginning in tree.beginnings:
                    rows.append([*prompt, *beginning])
                    prompt_lengths.append(len(prompt))

        # Read all rows
        lm = self.language_model
        device = self.device
        longest = max(map(len, rows))
        tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)
        prompt_length = torch.tensor(prompt_lengths, device=device)
        length = torch.tensor([len(row) for row in rows], device=device)
        frozen_layers = self._frozen_layers if self.remember_texts else None
        hidden = lm.hidden(tokens, prompt_length, length, share_beginnings=True, frozen_layers=frozen_layers)

        # Log-probability of each word: the sum over its branches, at each among the tokens that may follow there
        log_probs = lm.log_probs(hidden[row_of_branch, position_of_branch]).view(len(descriptions), -1, lm.num_tokens)
        scores = []
        first_branch = 0
        for tree in self._trees:
            score = log_probs.new_zeros(len(descriptions), tree.num_words)
            for offset, branch in enumerate(tree.branches):
                among_followers = log_probs[:, first_branch + offset, branch.followers].log_softmax(-1)
                score = score.index_add(1, branch.words.to(device), among_followers[:, branch.follower_of_word])
            scores.append(score)
            first_branch += len(tree.branches)

        # Values, after the text that asks for the first choice
        first = torch.tensor(first_rows, device=device)
        last_position = prompt_length[first] - 1
        if isinstance(self.critic, Critic):
            lengths = prompt_length[first]
            all_values = self.critic.values(tokens[first], lengths, lengths, share_beginnings=True)
            return torch.cat(scores, -1), all_values.gather(1, last_position[:, None]).squeeze(1)
        features = hidden[first, last_position].float()
        if self.detach_value:
            features = features.detach()
        return torch.cat(scores, -1), self.critic(features).squeeze(-1)

    def _descriptions(self, observations: Tensor) -> list[str]:
        """Describe flat observations ``[m, *]``; each distinct one once."""
        rows = observations.cpu().numpy()
        keys = [row.tobytes() for row in rows]
        remembered = self._text_of_observation
        if len(remembered) > MAX_REMEMBERED or self._described_by is not self.describe:
            remembered.clear()
            self._described_by = self.describe
        unknown = {key: i for i, key in enumerate(keys) if key not in remembered}
        if unknown:
            parts = unflatten(self.observation_space, torch.from_numpy(rows))
            for key, i in unknown.items():
                remembered[key] = self._description(_entry(self.observation_space, parts, i))
        return [remembered[key] for key in keys]

    def _description(self, observation: object) -> str:
        """Describe the observation of one environment.

        Raises:
            TypeError: if the description is no text.
            ValueError: if the function raises an error.
        """
        try:
            text = self.describe(observation)
        except Exception as error:  # a user's function may raise anything
            raise ValueError(f"describe raised {error!r:.200} for the observation {observation!r:.200}") from error
        if not isinstance(text, str):
            raise TypeError(
                f"describe returned {text!r:.200} for the observation {observation!r:.200}, expected a text"
            )
        return text

    def _asked(self, description: str) -> list[str]:
        """Return the text that asks for each choice."""
        text = f"{self.instructions}\n{description}" if self.instructions else description
        count = len(self._trees)
        if count == 1:
            return [text]
        return [f"{text}\n{number} of {count}:" for number in range(1, count + 1)]

    def _ids(self, text: str) -> list[int]:
        """Return the token ids of a text, up to where the word begins.

        Raises:
            ValueError: if no word fits after them into the model's context.
        """
        key = (self.chat, text)
        if key in self._ids_of_text:
            return self._ids_of_text[key]
        lm = self.language_model
        if self.chat:
            message: Message = {"role": "user", "content": text}
            ids = prompt_ids(Prompt((message,)), lm.tokenizer)
        else:
            ids = prompt_ids(Prompt(f"{text}\n"), lm.tokenizer)
        longest_word = max(tree.longest for tree in self._trees)
        if lm.context is not None and len(ids) + longest_word > lm.context:
            raise ValueError(
                f"the description {text!r:.200} has {len(ids)} tokens and a word up to {longest_word}, but the model "
                f"has {lm.context} positions: give a shorter describe or instructions, or a model with a longer context"
            )
        if len(self._ids_of_text) > MAX_REMEMBERED:
            self._ids_of_text.clear()
        self._ids_of_text[key] = ids
        return ids

    def _saved_description(self) -> Mapping[str, object]:
        """Return the description as plain data: its name and arguments, or the name of a function."""
        if isinstance(self.describe, Description):
            return self.describe.saved()
        return {"function": name_of(self.describe)}


class _Outputs:
    """What the model has computed for texts with its present weights, without gradients."""

    def __init__(self) -> None:
        self._made_with: list[object] = []
        self._of_text: dict[str, tuple[Tensor, Tensor]] = {}

    def of(self, texts: Sequence[str], policy: WordsPolicy) -> tuple[Tensor, Tensor]:
        """Return what `WordsPolicy._read_texts` returns for these texts; read those that are not known."""
        lm = policy.language_model
        made_with = [*fingerprints(policy.parameters()), lm.temperature, lm.autocast, policy.instructions, policy.chat]
        if made_with != self._made_with or len(self._of_text) > MAX_REMEMBERED:
            self._made_with = made_with
            self._of_text = {}
        unknown = [text for text in texts if text not in self._of_text]
        for start in range(0, len(unknown), TEXTS_AT_ONCE):
            part = unknown[start : start + TEXTS_AT_ONCE]
            scores, values = policy._read_texts(part)
            self._of_text |= zip(part, zip(scores, values, strict=True), strict=True)
        all_scores, all_values = zip(*[self._of_text[text] for text in texts], strict=True)
        return torch.stack(all_scores), torch.stack(all_values)


class _Branch(NamedTuple):
    """Beginning of words after which one of several tokens follows."""

    row: int
    """Index of its row among `_WordTree.beginnings`."""
    depth: int
    """Number of tokens of the beginning."""
    followers: list[int]
    """Ids that may follow."""
    words: Tensor
    """int64 ``[w]``: indices of the words that have this beginning."""
    follower_of_word: list[int]
    """For each of these words the index of its next token among ``followers``."""


class _WordTree:
    """Prefix tree of the words of one choice.

    Args:
        words: the words.
        ids: token ids of each word.

    Raises:
        ValueError: if two words have the same tokens, or one has the beginning of the other's.
    """

    def __init__(self, words: Sequence[str], ids: Sequence[Sequence[int]]) -> None:
        self.num_words = len(words)
        self.longest = max(map(len, ids))
        """Maximum number of tokens of a word."""
        _check_beginnings(words, ids)

        # Words by their beginnings; a branch is a beginning with several followers
        words_of_beginning: dict[tuple[int, ...], list[int]] = {}
        for index, word_ids in enumerate(ids):
            for depth in range(len(word_ids)):
                words_of_beginning.setdefault(tuple(word_ids[:depth]), []).append(index)
        branching = []
        for beginning, indices in words_of_beginning.items():
            if len({ids[index][len(beginning)] for index in indices}) > 1:
                branching.append(beginning)

        self.beginnings: list[tuple[int, ...]] = []
        """Rows to read after the text: a branch that another one continues is in the row of that one."""
        for beginning in branching or [()]:
            depth = len(beginning)
            if not any(len(longer) > depth and longer[:depth] == beginning for longer in branching):
                self.beginnings.append(beginning)

        self.branches: list[_Branch] = []
        for beginning in branching:
            depth = len(beginning)
            indices = words_of_beginning[beginning]
            followers = sorted({ids[index][depth] for index in indices})
            branch = _Branch(
                row=next(i for i, row in enumerate(self.beginnings) if row[:depth] == beginning),
                depth=depth,
                followers=followers,
                words=torch.tensor(indices, device="cpu"),
                follower_of_word=[followers.index(ids[index][depth]) for index in indices],
            )
            self.branches.append(branch)


def _with_ends(ids: Sequence[list[int]], lm: LanguageModel) -> list[list[int]]:
    """Return the token ids of words, with an end after each word that another one continues, as ``1`` and ``10``."""
    ends = lm.turn_ends.ids
    ended = []
    for word in ids:
        is_continued = any(len(longer) > len(word) and longer[: len(word)] == word for longer in ids)
        if is_continued:
            ended.append([*word, *ends[:1]])
        else:
            ended.append(word)
    return ended


def _check_beginnings(words: Sequence[str], ids: Sequence[Sequence[int]]) -> None:
    """Raise a ValueError if the tokens of a word are those of another one, or their beginning."""
    by_ids = sorted(zip(ids, words, strict=True))
    for (shorter_ids, shorter), (longer_ids, longer) in itertools.pairwise(by_ids):  # a beginning stands just before
        if longer_ids[: len(shorter_ids)] == shorter_ids:
            raise ValueError(
                f"the tokenizer reads the actions {shorter!r} and {longer!r} as the same tokens, or one as the "
                "beginning of the other, and has no EOS: give other words by actions="
            )


def _known_description(env: VectorEnv) -> Description | None:
    """Return the description that is known for an environment; None if it can't be asked, as one without an id.

    Raises:
        ValueError: if the slots differ, such as in their maps, and so need different descriptions.
    """
    # A wrapper of the vector environment may change what observations or actions mean
    wrapper: VectorEnv = env
    changes_actions = False
    while isinstance(wrapper, VectorWrapper):
        if isinstance(wrapper, VectorObservationWrapper):
            return None
        changes_actions = changes_actions or isinstance(wrapper, VectorActionWrapper)
        wrapper = wrapper.env

    # The slots, or two environments like them: a map may be drawn at random
    space = env.single_observation_space
    slots = getattr(env.unwrapped, "envs", None)
    if slots:
        descriptions = [description_of(slot, observation_space=space) for slot in slots]
    elif env.spec is None:
        return None
    else:
        descriptions = []
        for _ in range(2):
            with closing(single_environment(env.unwrapped)) as single:
                descriptions.append(description_of(single, observation_space=space))
    for description in descriptions[1:]:
        if description.saved() != descriptions[0].saved():
            raise ValueError(
                f"the slots of {env} are described in different ways, such as {descriptions[0]!r:.200} and "
                f"{description!r:.200}: make them alike, or give a describe that reads the observation alone"
            )
    if changes_actions and isinstance(descriptions[0], KnownDescription):
        return dataclasses.replace(descriptions[0], names_actions=False)
    return descriptions[0]


def _example(env: VectorEnv) -> object:
    """Return a first observation of another environment of this kind; None if none can be made by an id alone."""
    if env.spec is None or vector_wrappers(env):
        return None
    with closing(single_environment(env)) as single:
        if single.observation_space != env.single_observation_space:
            return None  # a native vector environment shows something else
        observation, _ = single.reset(seed=0)
    return observation


def _entry(space: spaces.Space, parts: Any, index: int) -> Any:
    """Return one observation of a batch as the environment has it, from what `unflatten` returned.

    Integers of a Box in a Dict or Tuple came as float32, which has them exactly below `EXACT_IN_FLOAT32`.
    """
    if isinstance(space, spaces.Dict):
        return {name: _entry(space[name], part, index) for name, part in parts.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_entry(part_space, part, index) for part_space, part in zip(space, parts, strict=True))
    values = parts[index].numpy()
    if space.dtype is None or np.issubdtype(space.dtype, np.floating):
        return values[()]
    if values.dtype == np.float32 and np.any(np.abs(values) >= EXACT_IN_FLOAT32):
        _warn(
            "an observation has an integer of %s or more in a Dict or Tuple, which policies read as float32: its last "
            "digits may be lost, so give such numbers in larger units",
            f"{EXACT_IN_FLOAT32:,}",
        )
    return values.astype(space.dtype, copy=False)[()]
