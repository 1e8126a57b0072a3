"""Text: generation, varying lengths, the step interface, the sampler, PPO iterations and log-probs, beside the peers.

Everything runs in fresh processes on one CPU and one thread, and seconds are that processor's. A ratio above 1 means
that ours is better. Whole it takes an hour on a quiet machine: `--cases` chooses.
"""

import statistics
import sys
from functools import partial
from itertools import product

from alternation import HERE, NoFigureError, empty_row, interpreter, measure, row

WATCHED = HERE / "watched_peer.py"
SIZES = ["tiny", "small", "gpt2"]
ITERATIONS = {"tiny": 4, "small": 1}
"""Iterations that are timed in a process, after one to warm up."""
TRAINERS = {
    "TRL 0.11 PPO step": ("trl011", "peer_trl_old.py", []),
    "TRL RLOO": ("llm", "peer_trl_group.py", ["--variant", "rloo"]),
    "TRL GRPO": ("llm", "peer_trl_group.py", ["--variant", "grpo"]),
    "torchrl GRPO": ("llm", "peer_torchrl.py", []),
    "TRL 0.17 PPO": ("trl017", "peer_trl_ppo.py", []),
    "TRL 1.12 PPO": ("trl112", "peer_trl_ppo.py", []),
}
"""Environment, script and options of the peers of an iteration."""
VARYING = 1 / 20
"""Probability of EOS after every text, where lengths vary: geometric, mean 20, cut at 48 (mean 18)."""
FROZEN = 1e-12
"""Learning rate where lengths vary, so that they stay so."""


def text(*, seeds, chosen, peers):
    """Rows of the table; ``seeds`` is the number of pairs."""
    rows = []
    for name, case in cases(peers).items():
        if chosen(name):
            rows += case(name, seeds)
            print(f"{name}: {', '.join(_short(each) for each in rows if each['case'].startswith(name))}", flush=True)
    return rows


def cases(peers):
    """By name: a function of name and pairs that returns rows."""
    decoding = {f"generation {size}": ("tokens/s", ["generation", "--size", size]) for size in SIZES}
    decoding |= {f"varying lengths {size}": ("tokens/s", ["lengths", "--size", size]) for size in SIZES[:2]}
    decoding |= {f"step interface at {n}": ("µs/step", ["interface", "--prefix", n]) for n in (64, 1024)}
    decoding |= {f"sampler {n}": ("µs/call", ["sampler", "--vocabulary", n]) for n in (260, 8192, 50257)}
    found = {name: partial(_decoding, unit, arguments) for name, (unit, arguments) in decoding.items()}
    for size, algorithm in product(ITERATIONS, ("ppo", "grpo")):
        given = dict(size=size, scripts=peers / "llm", algorithm=algorithm)
        found[f"{algorithm} iteration {size}"] = partial(_iteration, **given)
        found[f"{algorithm} iteration, varying lengths, {size}"] = partial(_iteration, ending=VARYING, **given)
    for algorithm, weights in product(("grpo", "rloo", "ppo"), ("lora", "full", "lora, bfloat16")):
        given = dict(algorithm=algorithm, rival="grpo" if algorithm == "ppo" else algorithm, weights=weights)
        found[f"SmolLM2 {algorithm}, {weights}"] = partial(_smollm2, **given)
    found["log-probs"] = partial(_log_probs, peers / "llm")
    return found


def _decoding(unit, arguments, name, pairs):
    """A case of ``text_decoding.py``, which takes turns inside one process: both use the same weights."""
    try:
        (found,) = measure(sys.executable, HERE / "text_decoding.py", *arguments, "--pairs", pairs)
    except NoFigureError as error:
        return [empty_row("text", name, unit=unit, peer_name="–", note=str(error))]
    keywords = dict(unit=unit, rate=unit == "tokens/s", floor=found["floor"], note=found.get("note", ""))
    return [
        row("text", name, peer_name=peer_name, ours=found["ours"], peer=figures, **keywords)
        for peer_name, figures in found["peers"].items()
    ]


def _iteration(name, pairs, *, size, scripts, algorithm, ending=None):
    """Seconds and memory of an iteration: ours, then every peer, and again."""
    options = ["--size", size, "--iters", ITERATIONS[size]]
    lengths = [] if ending is None else ["--ending", ending]
    if lengths:
        options += ["--lr", FROZEN]
    trainers = TRAINERS if algorithm == "ppo" else {name: each for name, each in TRAINERS.items() if "llm" in each}
    ours, theirs, notes = [], {peer_name: [] for peer_name in trainers}, {}
    for _ in range(pairs):
        own = ["--algorithm", algorithm, *options, *lengths]
        ours += measure(sys.executable, HERE / "text_ours.py", "iteration", *own)
        for peer_name, (environment, script, more) in trainers.items():
            if peer_name in notes:
                continue
            arguments = [*lengths, scripts / script, *options, *more]
            try:
                lines = measure(interpreter(environment), WATCHED, *arguments)
            except NoFigureError as error:
                notes[peer_name] = str(error)
            else:
                theirs[peer_name].append({key: value for line in lines for key, value in line.items()})
    floor = _floor(size, scripts) if algorithm == "ppo" and not lengths else None
    figures = {
        "seconds": ("s", "s_per_iter", floor, ""),
        "memory above": ("MB", "above_mb", None, "above imports and models"),
        "memory in all": ("MB", "total_mb", None, ""),
    }
    rows = []
    for what, (unit, key, bare, note) in figures.items():
        for peer_name, runs in theirs.items():
            keywords = dict(unit=unit, peer_name=peer_name, ours=[run[key] for run in ours])
            if peer_name in notes:
                rows.append(empty_row("text", f"{name} {what}", note=notes[peer_name], **keywords))
            else:
                peer = [run[key] for run in runs]
                rows.append(row("text", f"{name} {what}", peer=peer, floor=bare, note=note, **keywords))
    return rows


def _smollm2(name, pairs, *, algorithm, rival, weights):
    """Seconds and memory of an iteration of SmolLM2: ours, then TRL's, and again."""
    from textenv.embedded.gguf import smollm2_folder

    options, libraries = ["--model", smollm2_folder(), "--weights", weights.split(",")[0]], {"ours": [], "trl": []}
    if "bfloat16" in weights:
        options += ["--dtype", "bfloat16"]
    peer_name = f"TRL {rival.upper()}"
    try:
        for _ in range(pairs):
            for library, figures in libraries.items():
                python, chosen = (sys.executable, algorithm) if library == "ours" else (interpreter("llm"), rival)
                figures += measure(python, HERE / "smollm2.py", chosen, "--library", library, *options)
    except NoFigureError as error:
        return [empty_row("text", name, unit="s", peer_name=peer_name, note=str(error))]
    return [
        row("text", f"{name} {what}", unit=unit, peer_name=peer_name,
            **{side: [run[key] for run in libraries[library]] for side, library in [("ours", "ours"), ("peer", "trl")]})
        for what, unit, key in [("seconds", "s", "s_per_iter"), ("memory in all", "MB", "total_mb")]
    ]  # fmt: skip


def _floor(size, scripts):
    """Seconds of the bare work of an iteration: decoding, two scoring passes (values, reference), 16 gradient steps.

    Scoring and gradient steps are those of the peers' ``update_floor.py``, through the modules of `transformers` and
    with GPT-2's own activation: leaner ones than these could be below it.
    """
    try:
        lines = measure(interpreter("llm"), WATCHED, scripts / "update_floor.py", "--size", size)
        (decoding,) = measure(sys.executable, HERE / "text_decoding.py", "floor", "--size", size)
    except NoFigureError as error:
        print(f"no floor of an iteration: {error}", flush=True)
        return None
    seconds = {line["peer"]: line["s_per_iter"] for line in lines}
    scoring = seconds["score: one no-grad forward, generated logits"]
    return decoding["s"] + 2 * scoring + seconds["update: 16x fwd+bwd+clip+AdamW fused"]


def _log_probs(scripts, name, pairs):
    """Extra memory and seconds of log-probs at a vocabulary of 50,257, without and with a gradient."""
    figures = {
        "no_grad_s": ("s", "seconds"),
        "extra_peak_mb_no_grad": ("MB", "memory"),
        "fwd_bwd_s": ("s", "seconds, gradient"),
        "extra_peak_mb_fwd_bwd": ("MB", "memory, gradient"),
    }
    ours, theirs = [], []
    try:
        for _ in range(pairs):
            theirs += measure(interpreter("llm"), WATCHED, scripts / "logprob_mem.py", "--variant", "full_log_softmax")
            ours += measure(sys.executable, HERE / "text_ours.py", "log-probs")
        floor = _products()
    except NoFigureError as error:
        return [
            empty_row("text", f"{name} {what}", unit=unit, peer_name="log_softmax", note=str(error))
            for unit, what in figures.values()
        ]
    return [
        row(
            "text", f"{name} {what}", unit=unit, peer_name="log_softmax", floor=floor.get(key),
            ours=[run[key] for run in ours], peer=[run[key] for run in theirs],
        )
        for key, (unit, what) in figures.items()
    ]  # fmt: skip


def _products():
    """Seconds of the matrix products alone: one forward, three with a gradient."""
    (found,) = measure(sys.executable, HERE / "text_ours.py", "products")
    return {"no_grad_s": found["s"], "fwd_bwd_s": 3 * found["s"]}


def _short(row):
    if row["ratio"] is None:
        return f"{row['peer_name']}: {row['note']}"
    return f"{statistics.median(row['values']['ours']):.4g} {row['unit']}, {row['ratio']:.2f} × {row['peer_name']}"
