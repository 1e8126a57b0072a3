"""`PolicyAnswerer`: a language model that answers many requests at the same time, for `algos serve`."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from algos.policies.lm import make_decoder
from algos.policies.random_streams import UniformStreams
from textenv.envs.limits import StopConditions
from textenv.envs.tool_schemas import ToolSchemas
from textenv.envs.turn import Turn
from textenv.gateway.answers import Piece
from textenv.gateway.requests import CompletionRequest, check_size, not_within
from textenv.lm.sampling import greedy, sample, truncate
from textenv.prompts.prompts import Prompt, as_prompt
from textenv.prompts.template_variables import check_template_variables
from textenv.prompts.tokenize import has_system_message, is_chat, prompt_ids, spelled_token

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from algos.policies.lm import LMPolicy
    from textenv.lm.decoding import Decoder
    from textenv.lm.seq2seq import Seq2SeqDecoder

MAX_SLOTS = 16
"""Maximum number of answers that are written at the same time; the others wait."""
MIN_CACHE_LENGTH = 64
"""Number of tokens that the smallest cache holds for each answer; the next larger one holds twice as many."""


@dataclass(eq=False)
class _Job:
    """One answer to be written."""

    choice: int
    prompt: Prompt
    ids: list[int]
    """Token ids of the prompt, and from its first step on of the answer."""
    num_prompt_ids: int
    ends: StopConditions
    length: int
    """Maximum number of tokens of prompt and answer together."""
    temperature: float
    """0: the most probable tokens."""
    seed: int
    is_streamed: bool
    """Whether it is told after each token; else only when it is whole."""
    tell: Callable[[Piece | Exception], None]
    """Gets the answer so far, or an error."""
    log_probs: list[float]
    is_cancelled: bool = False

    def turn(self, tokenizer: PreTrainedTokenizerBase) -> Turn:
        """Return the answer so far."""
        return Turn(
            prompt=self.prompt,
            prompt_ids=self.ids[: self.num_prompt_ids],
            context_ids=self.ids[: self.num_prompt_ids],
            completion_ids=self.ids[self.num_prompt_ids :],
            terminated=False,
            tokenizer=tokenizer,
            stop=self.ends.stop_texts,
        )

    def finish(self, turn: Turn) -> str | None:
        """Return why an answer ends with its last token, ``"stop"`` or ``"length"``; None if it goes on."""
        if self.ends.is_end[self.ids[-1]] or turn.find_completed(self.ends.texts) is not None:
            return "stop"
        if len(self.ids) >= self.length:
            return "length"
        return None


class PolicyAnswerer:
    """Answers requests with an `LMPolicy` (`textenv.gateway.server.Answerer`), several at the same time.

    A thread writes up to `MAX_SLOTS` answers together, token by token; a further one begins as soon as one has ended.
    An answer depends on its request and seed only, up to rounding.

    Args:
        policy: the policy.
        model: name of the model in the protocol; requests must name it.
        limit: maximum length of an answer, in tokens.

    Raises:
        ValueError: if the limit is below 1.
    """

    def __init__(self, policy: LMPolicy, model: str, *, limit: int = 512) -> None:
        if limit < 1:
            raise ValueError(f"--max-new-tokens is {limit}, expected at least 1")
        self.policy = policy
        self.model = model
        self.limit = limit
        self._longest_token = max(map(len, policy.tokenizer.get_vocab()))
        self._writer = _Writer(policy)

    async def answer(self, request: CompletionRequest, session: str | None) -> AsyncGenerator[Piece, None]:
        """See `textenv.gateway.server.Answerer.answer`; a stream has a piece for each token. Sessions mean nothing."""
        if request.model != self.model:
            raise FileNotFoundError(f"there is no model {request.model!r:.200}: this server has {self.model!r}")
        schemas = None
        if request.tools:
            schemas = ToolSchemas(request.tools, self.policy.tokenizer)

        # Pieces come from the thread that writes
        pieces: asyncio.Queue[Piece | Exception] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def tell(piece: Piece | Exception) -> None:
            with contextlib.suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        jobs = self._jobs(request, schemas, tell)
        self._writer.add(jobs)
        try:
            num_running = len(jobs)
            while num_running:
                piece = await pieces.get()
                if isinstance(piece, Exception):
                    raise piece
                if piece.finish:
                    num_running -= 1
                    if schemas is not None:
                        number = secrets.randbelow(10**5)  # nobody here knows which turn it is
                        piece = piece._replace(message=schemas.message(piece.turn, number=number))
                yield piece
        finally:
            for job in jobs:
                job.is_cancelled = True

    def close(self) -> None:
        """End the thread."""
        self._writer.close()

    def _jobs(
        self, request: CompletionRequest, schemas: ToolSchemas | None, tell: Callable[[Piece | Exception], None]
    ) -> list[_Job]:
        """Return the answers that a request asks for; a ValueError if it cannot be answered."""
        lm = self.policy.lm
        check_size(request, context=lm.context, longest_token=self._longest_token)

        # Token ids of the prompt
        prompt = as_prompt(0, request.content)
        _check_written(prompt, self.policy.tokenizer)
        variables: dict[str, object] = {}
        if request.chat_template_kwargs:
            variables = check_template_variables(request.chat_template_kwargs, self.policy.tokenizer)
        if schemas is None:
            ids = prompt_ids(prompt, self.policy.tokenizer, **variables)
        else:
            ids = schemas.prompt_ids(prompt, **variables)
        if not 0 <= min(ids) <= max(ids) < lm.num_tokens:
            raise ValueError(f"prompt is {ids!r:.300}, expected token ids from 0 to {lm.num_tokens - 1}")

        # Length and ends of the answer
        limit = self.limit
        if request.max_tokens is not None:
            limit = request.max_tokens
        if limit > self.limit:
            raise not_within("max_tokens", limit, 1, self.limit)
        lm.check_length(len(ids) + 1)
        length = len(ids) + limit
        if lm.context:
            length = min(length, lm.context)
        ends = StopConditions(self.policy.tokenizer, [*lm.stop, *request.stop], lm.turn_ends)

        # How it is drawn
        temperature = self.policy.temperature
        if request.temperature is not None:
            temperature = request.temperature
        seed = secrets.randbits(62)
        if request.seed is not None:
            seed = request.seed
        seeds = np.random.SeedSequence(seed).generate_state(request.num_choices)

        jobs = []
        for choice in range(request.num_choices):
            job = _Job(
                choice=choice,
                prompt=prompt,
                ids=list(ids),
                num_prompt_ids=len(ids),
                ends=ends,
                length=length,
                temperature=temperature,
                seed=int(seeds[choice]),
                is_streamed=request.stream,
                tell=tell,
                log_probs=[],
            )
            jobs.append(job)
        return jobs


def _check_written(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise a ValueError if the model would not read what the client wrote: system messages, or special tokens."""
    if is_chat(prompt):
        roles = {message["role"] for message in prompt.messages}
        unknown = sorted(roles - {"system", "user", "assistant", "tool"})
        if unknown:
            raise ValueError(f"a message has the role {unknown[0]!r:.99}, expected system, user, assistant or tool")
        if "system" in roles and not has_system_message(tokenizer):
            raise ValueError(
                "the model's chat template does not write system messages: put their text into the user's first message"
            )
    elif isinstance(prompt.content, str):
        token = spelled_token(prompt.content, tokenizer)
        if token:
            raise ValueError(
                f"the text spells {token!r}, which would be read as ordinary letters: send messages, or token ids"
            )


class _Writer:
    """Writes answers in slots, in a thread."""

    def __init__(self, policy: LMPolicy) -> None:
        self._policy = policy
        self._condition = threading.Condition()
        self._waiting: deque[_Job] = deque()
        self._is_closed = False

        # The slots; while none is in use, there is no cache
        self._slots: list[_Job | None] = []
        self._decoder: Decoder | Seq2SeqDecoder | None = None
        self._tokens = np.zeros((0, 0), dtype=np.int64)
        self._streams = UniformStreams(np.zeros(MAX_SLOTS, dtype=np.int64))
        self._thread = threading.Thread(target=self._run, name="answers", daemon=True)
        self._thread.start()

    def add(self, jobs: list[_Job]) -> None:
        """Add answers to be written."""
        with self._condition:
            self._waiting.extend(jobs)
            self._condition.notify()

    def close(self) -> None:
        """End the thread; answers that are not finished are given up."""
        with self._condition:
            self._is_closed = True
            self._condition.notify()
        self._thread.join()

    def _run(self) -> None:
        """Write, for ever."""
        while True:
            with self._condition:
                while not (self._waiting or any(self._slots) or self._is_closed):
                    self._condition.wait()
                if self._is_closed:
                    return
                self._fill_slots()
            try:
                if any(self._slots):
                    self._write_tokens()
            except Exception as error:  # noqa: BLE001  (a model may raise anything; the server goes on)
                for job in self._slots:
                    if job is not None:
                        job.tell(error)
                self._slots = []
                self._decoder = None
            if not any(self._slots):
                self._slots = []
                self._decoder = None

    def _fill_slots(self) -> None:
        """Empty slots whose clients have gone, and let waiting answers begin where there is room."""
        for slot, job in enumerate(self._slots):
            if job is not None and job.is_cancelled:
                self._slots[slot] = None

        while self._waiting:
            # The next one that is still wanted, if there is room
            job = self._waiting[0]
            if job.is_cancelled:
                self._waiting.popleft()
                continue
            try:
                if not self._make_room(job.length):
                    return
            except Exception as error:  # noqa: BLE001  (such as too little memory; the others go on)
                self._waiting.popleft()
                job.tell(error)
                continue
            self._waiting.popleft()

            # Its slot
            slot = self._slots.index(None)
            self._slots[slot] = job
            self._tokens[slot, : len(job.ids)] = job.ids
            is_slot = np.arange(len(self._slots)) == slot
            is_stream = np.arange(MAX_SLOTS) == slot
            assert self._decoder is not None
            self._decoder.reset(is_slot)
            self._streams.begin(is_stream, np.where(is_stream, job.seed, 0))

    def _make_room(self, length: int) -> bool:
        """Make a free slot for a text of this length; return False if it has to wait for one.

        A larger cache replaces a smaller one, and reads all texts again.
        """
        num_slots, longest = self._tokens.shape
        if self._decoder is None:  # the tokens are those of earlier answers
            num_slots = 0
            longest = 0
        has_free_slot = None in self._slots
        if has_free_slot and length <= longest:
            return True
        if not has_free_slot and num_slots == MAX_SLOTS:
            return False
        lm = self._policy.lm
        if lm.seq2seq is not None and any(self._slots):
            return False  # the first text that its cache gets is the prompt, so none can be read again

        # Twice the slots or the length
        if not has_free_slot:
            num_slots = max(1, 2 * num_slots)
        new_longest = max(MIN_CACHE_LENGTH, longest)
        while new_longest < length:
            new_longest *= 2
        if lm.context:
            new_longest = min(new_longest, lm.context)
        self._decoder = make_decoder(lm, num_slots=num_slots, max_length=new_longest)
        self._slots += [None] * (num_slots - len(self._slots))
        self._tokens = np.zeros((num_slots, new_longest), dtype=np.int64)
        for slot, job in enumerate(self._slots):
            if job is not None:
                self._tokens[slot, : len(job.ids)] = job.ids
        return True

    @torch.no_grad()
    def _write_tokens(self) -> None:
        """Write one more token of each answer; answers that end with it leave their slots."""
        assert self._decoder is not None
        lengths = np.array([0 if job is None else len(job.ids) for job in self._slots])
        temperatures = torch.tensor([1.0 if job is None else job.temperature for job in self._slots])
        is_greedy = temperatures == 0

        # One token for each slot; that of an empty slot is not used
        logits = self._decoder.logits(self._tokens, lengths).float()
        device = logits.device
        logits = logits / torch.where(is_greedy, self._policy.temperature, temperatures)[:, None].to(device)
        logits = truncate(logits, top_k=self._policy.top_k, top_p=self._policy.top_p)
        uniform = self._streams.next()[: len(self._slots)].to(device)
        token, log_prob = sample(logits, uniform=uniform)
        if is_greedy.any():
            best_token, best_log_prob = greedy(logits)
            token = torch.where(is_greedy.to(device), best_token, token)
            log_prob = torch.where(is_greedy.to(device), best_log_prob, log_prob)

        # Tell them
        tokens = token.tolist()
        log_probs = log_prob.tolist()
        for slot, job in enumerate(self._slots):
            if job is None:
                continue
            self._tokens[slot, len(job.ids)] = tokens[slot]
            job.ids.append(tokens[slot])
            job.log_probs.append(log_probs[slot])
            turn = job.turn(self._policy.tokenizer)
            finish = job.finish(turn)
            if finish or job.is_streamed:
                job.tell(Piece(job.choice, turn, turn.completion, job.log_probs, finish))
            if finish:
                self._slots[slot] = None
