"""Signs that something is wrong with a run: a pure function for each rule of `algos.lab.doctor.rules`.

Each gets the `Evidence` and its rule's threshold, and returns the figures of the rule's message by name. It returns
None where nothing is wrong, and where the run has too few numbers to tell.
"""

import math
from collections import Counter
from collections.abc import Mapping

import numpy as np

from algos.lab.doctor.evidence import MIN_ITERATIONS, Evidence, Trend
from algos.training.reward_hacking import SCORE, VARIETY, alike_texts

Figures = Mapping[str, float | str]
"""Figures of a message, by the names of its fields."""

ENTROPY_OF_A_BOX = math.log(20)
"""Nats per dimension by which the entropy of a Box falls if the standard deviation becomes a twentieth."""
JUMP_OF_KL = 5.0
"""KL of one update, in nats a step, after which little of the policy is left; published runs have at most 1."""
CORRECTION = 10.0
"""Factor by which sampler and scorer may differ more where importance weights correct it."""
SMALL_SPREAD = 0.15
"""Spread of the value's targets, relative to the mean value, below which there is nothing to explain."""
USELESS_ERROR = 1.5
"""Relative error of the values from which on even the mean return is not learnt; healthy runs have at most 1."""
SYMBOLIC_WORLDS = ("MiniGrid-", "BabyAI-")
"""Beginnings of the ids of environments whose images hold numbers of objects, colours and states."""
SYMBOLIC_SIDE = 9
"""Longest side of such an image, in cells; rendered ones are larger."""


# --- the reward never moved ------------------------------------------------------------------------------------------


def no_signal_in_groups(evidence: Evidence, threshold: float) -> Figures | None:
    """In nearly all groups, all episodes have the same return, and the return has not risen."""
    silent = evidence.curve("rollout/silent_rows")
    num_rows = _rows_with_steps(evidence)
    if not len(silent) or not num_rows or evidence.has_learnt():
        return None
    fraction = float(silent.mean()) / num_rows
    if fraction < threshold:
        return None
    return {"fraction": fraction}


def _rows_with_steps(evidence: Evidence) -> float:
    """Return the mean number of rows to learn from in a rollout; 0 if it is not known.

    Runs of earlier versions have not logged it. An episode may have a row for each turn, so it is the number of turns
    there, if that is larger than the number of episodes.
    """
    num_rows = evidence.curve("rollout/rows")
    if len(num_rows):
        return float(num_rows.mean())
    num_episodes = float(evidence.option("num_episodes") or 0)
    num_turns = evidence.curve("rollout/turns")
    if not num_episodes or not len(num_turns):
        return num_episodes
    return max(num_episodes, float(num_turns.mean()))


def constant_return(evidence: Evidence, threshold: float) -> Figures | None:
    """In nearly all iterations the mean return is one and the same number."""
    returns = evidence.curve(SCORE)
    if evidence.trend(SCORE) is None or evidence.has_learnt():
        return None
    value, count = Counter(returns.tolist()).most_common(1)[0]
    if count / len(returns) < threshold:
        return None
    return {"count": count, "iterations": len(returns), "value": value}


def policy_stands_still(evidence: Evidence, threshold: float) -> Figures | None:
    """The updates hardly change the policy: by its KL or, where there is none, by the weights of two checkpoints."""
    if evidence.has_learnt():
        return None
    learning_rate = evidence.option("learning_rate")
    approx_kl = evidence.typical("policy/approx_kl")
    minibatches = evidence.typical("update/minibatches")
    has_several_steps = minibatches is None or minibatches > 1  # before the first step, the KL is always 0
    if approx_kl is not None and has_several_steps and evidence.algorithm != "trpo":
        if approx_kl >= threshold:
            return None
        return {"figure": f"policy/approx_kl is {approx_kl:.2g} nats a step", "learning_rate": learning_rate}

    # Without a KL: the change of the weights from the last checkpoint but one to the last
    change = _relative_change(evidence)
    if change is None or change >= threshold or len(evidence.metrics) < 2:
        return None
    figure = f"between the two newest checkpoints the weights changed by {change:.2g} of their size"
    return {"figure": figure, "learning_rate": learning_rate}


def _relative_change(evidence: Evidence) -> float | None:
    """Norm of the weights' change between the two newest checkpoints divided by their norm, without statistics."""
    checkpoints = evidence.newest_weights
    if not checkpoints:
        return None
    older, newer = checkpoints
    square_of_change = 0.0
    square_of_weights = 0.0
    for name, weight in older.items():
        is_weight = weight.dtype.kind == "f" and not name.startswith("normalizer.")
        if is_weight and name in newer and newer[name].shape == weight.shape:
            difference = newer[name].astype(np.float64) - weight
            square_of_change += float(np.square(difference).sum())
            square_of_weights += float(np.square(weight, dtype=np.float64).sum())
    if square_of_weights == 0:
        return None
    return math.sqrt(square_of_change / square_of_weights)


def learning_not_begun(evidence: Evidence, threshold: float) -> Figures | None:
    """An algorithm with a replay buffer has ended before its first update."""
    begins = evidence.option("learning_starts")
    has_buffer = len(evidence.curve("update/remembered")) > 0
    if not begins or not has_buffer or len(evidence.curve("value/loss")) >= threshold:
        return None
    return {"begins": int(begins), "steps": int(evidence.total("rollout/steps"))}


def no_step_found(evidence: Evidence, threshold: float) -> Figures | None:
    """TRPO's line search finds no step in most iterations."""
    gains = evidence.curve("policy/gain")
    if evidence.typical("policy/gain") is None or evidence.has_learnt():
        return None
    fraction = float((gains == 0).mean())
    if fraction < threshold:
        return None
    return {"fraction": fraction}


def penalty_outweighs(evidence: Evidence, threshold: float) -> Figures | None:
    """The KL penalty is larger than the score, so that the policy learns to please the reference."""
    score = evidence.late(SCORE)
    penalised = evidence.late("episode/penalised_return")
    if score is None or penalised is None:
        return None
    largest = float(np.abs(evidence.curve(SCORE)).max())
    penalty = score - penalised
    if penalty < threshold * largest:
        return None
    return {"penalty": penalty, "largest": largest, "coefficient": evidence.late("reference/coefficient") or 0.0}


def no_episode_ended(evidence: Evidence, threshold: float) -> Figures | None:
    """No episode has ended, so nothing says how good the policy is."""
    if len(evidence.curve(SCORE)) or not len(evidence.curve("rollout/steps")):
        return None
    steps = evidence.total("rollout/steps")
    if steps < threshold:
        return None
    return {"steps": int(steps)}


def no_progress(evidence: Evidence, threshold: float) -> Figures | None:
    """The return of the last third is that of the first third, up to noise."""
    returns = evidence.curve(SCORE)
    trend = evidence.trend(SCORE)
    if trend is None or len(returns) < threshold or trend.has_risen or trend.has_fallen_back:
        return None
    third = len(returns) // 3
    first = returns[:third]
    last = returns[-third:]
    error = math.sqrt((first.var(ddof=1) + last.var(ddof=1)) / third)
    if abs(last.mean() - first.mean()) > 2 * error:  # too much for noise, even if it is not sure
        return None
    return {"first": float(first.mean()), "last": float(last.mean()), "error": error, "iterations": len(returns)}


# --- the update ------------------------------------------------------------------------------------------------------


def not_finite(evidence: Evidence, threshold: float) -> Figures | None:
    """Metrics are NaN or infinite."""
    count = 0
    first = ""
    for iteration, row in enumerate(evidence.metrics, start=1):
        names = [name for name, value in row.items() if not math.isfinite(value)]
        count += len(names)
        if names and not first:
            first = f"{names[0]} in iteration {iteration}"
    if count < threshold:
        return None
    return {"count": count, "first": first}


def steps_skipped(evidence: Evidence, threshold: float) -> Figures | None:
    """Optimizer steps were left out, because their gradients were not finite."""
    skipped = evidence.total("update/skipped")
    minibatches = evidence.total("update/minibatches")
    if not minibatches or skipped / minibatches < threshold:
        return None
    return {"skipped": int(skipped), "minibatches": int(minibatches)}


def kl_explodes(evidence: Evidence, threshold: float) -> Figures | None:
    """Updates move the policy too far from the one that acted: late in the run, or once by a jump that ruins it."""
    late = evidence.late("policy/approx_kl")
    if late is None or evidence.algorithm == "trpo":  # its max_kl bounds each step
        return None
    largest = float(evidence.curve("policy/approx_kl").max())
    if late < threshold and largest < JUMP_OF_KL:
        return None
    return {"late": late, "largest": largest}


def always_clipped(evidence: Evidence, threshold: float) -> Figures | None:
    """Most probability ratios are outside the clip range."""
    return _late_above(evidence, "policy/clip_frac", threshold)


def _late_above(evidence: Evidence, name: str, threshold: float) -> Figures | None:
    """Return the late value of a metric if it is at least the threshold."""
    value = evidence.late(name)
    if value is None or value < threshold:
        return None
    return {"value": value}


def sampler_apart(evidence: Evidence, threshold: float) -> Figures | None:
    """Sampling and scoring give different log-probabilities, even for importance weights."""
    gap = evidence.typical("policy/sampler_gap")
    if len(evidence.curve("policy/importance_weight")):
        threshold *= CORRECTION
    if gap is None or gap < threshold:
        return None
    return {"gap": gap}


def samples_dropped(evidence: Evidence, threshold: float) -> Figures | None:
    """Importance weights leave most samples out."""
    return _late_above(evidence, "policy/importance_dropped", threshold)


def entropy_collapsed(evidence: Evidence, threshold: float) -> Figures | None:
    """The policy has become deterministic without having learnt anything."""
    first = evidence.early("policy/entropy")
    last = evidence.late("policy/entropy")
    trend = evidence.trend(SCORE)
    if first is None or last is None or trend is None:
        return None
    if trend.has_risen and not trend.has_fallen_back:
        return None
    dimensions = _dimensions(evidence)
    if dimensions:
        has_collapsed = first - last > ENTROPY_OF_A_BOX * dimensions
    else:
        has_collapsed = last < threshold * first
    if not has_collapsed:
        return None
    return {"first": first, "last": last}


def _dimensions(evidence: Evidence) -> int:
    """Return the number of dimensions of a Box of actions; 0 for other actions, whose entropy cannot be negative."""
    action = (evidence.description.get("policy_arguments") or {}).get("action")
    if not isinstance(action, Mapping) or "shape" not in action or "low" not in action:
        return 0
    return math.prod(action["shape"])


# --- values ----------------------------------------------------------------------------------------------------------


def value_explains_nothing(evidence: Evidence, threshold: float) -> Figures | None:
    """The values explain nothing in any part of the run, and are late in it further off than a constant is.

    A critic that has learnt at least the mean return has a relative error of 1: then the observations may say no more.
    """
    trend = evidence.trend("value/explained_variance")
    late = evidence.late("value/explained_variance")
    relative_error = evidence.late("value/relative_error")
    spread = _spread_of_targets(evidence)
    if len(evidence.metrics) < 2 * MIN_ITERATIONS:  # a new critic begins so
        return None
    if trend is None or late is None or relative_error is None or spread is None or spread < SMALL_SPREAD:
        return None
    highest = max(trend.first, trend.highest)
    if highest >= threshold or relative_error < USELESS_ERROR:
        return None
    return {"late": late, "highest": highest, "relative_error": relative_error}


def _spread_of_targets(evidence: Evidence) -> float | None:
    """Standard deviation of the value's targets late in the run, relative to the mean value."""
    loss = evidence.late("value/loss")
    relative_error = evidence.late("value/relative_error")
    mean = evidence.late("value/mean")
    if loss is None or mean is None or not relative_error or loss < 0:
        return None
    deviation = math.sqrt(2 * loss / relative_error)  # the loss is half the mean squared error
    return deviation / max(abs(mean), 1e-12)


def values_diverge(evidence: Evidence, threshold: float) -> Figures | None:
    """The mean value is far beyond any return that was ever paid, to one side or swinging."""
    value = evidence.late_size("value/mean")
    returns = evidence.curve(SCORE)
    if value is None or not len(returns) or evidence.option("normalize_rewards"):
        return None
    penalised = evidence.curve("episode/penalised_return")
    largest = float(np.abs(np.concatenate([returns, penalised])).max())
    if value < threshold * (largest + 1):
        return None
    return {"value": value, "largest": largest}


# --- what was learnt is lost, or is not what was meant ---------------------------------------------------------------


def return_lost(evidence: Evidence, threshold: float) -> Figures | None:
    """The return had risen, and more than half of the rise is lost at the end."""
    trend = evidence.trend(SCORE)
    if trend is None or not trend.has_risen or not trend.has_fallen_back:
        return None
    if trend.highest - trend.last < threshold * (trend.highest - trend.first):
        return None
    return _figures_of(trend)


def return_falls(evidence: Evidence, threshold: float) -> Figures | None:
    """What is learnt from becomes clearly worse than it was at the beginning."""
    name = SCORE
    if len(evidence.curve("episode/penalised_return")):
        name = "episode/penalised_return"
    trend = evidence.trend(name)
    if trend is None or trend.has_risen or trend.first - trend.last < threshold * trend.error or trend.error == 0:
        return None
    return {**_figures_of(trend), "name": name}


def _figures_of(trend: Trend) -> dict[str, float | str]:
    return {"first": trend.first, "highest": trend.highest, "last": trend.last}


def texts_alike(evidence: Evidence, threshold: float) -> Figures | None:
    """The score rises while the variety of the texts collapses: the sign that the training itself warns of."""
    rows = [row for row in evidence.metrics if SCORE in row and VARIETY in row]
    if len(rows) < threshold:
        return None
    sign = alike_texts([row[SCORE] for row in rows], [row[VARIETY] for row in rows])
    if sign is None:
        return None
    return {"sign": str(sign), "example": evidence.late_example()}


def evaluation_falls(evidence: Evidence, threshold: float) -> Figures | None:
    """The training's return rises, and the evaluation's falls."""
    rows = [row for row in evidence.metrics if {"eval/mean_return", "eval/std_return", "eval/episodes"} <= row.keys()]
    rows = [row for row in rows if math.isfinite(row["eval/mean_return"])]
    trend = evidence.trend(SCORE)
    if len(rows) < 3 or trend is None or not trend.has_risen or trend.has_fallen_back:
        return None
    best = max(rows, key=lambda row: row["eval/mean_return"])
    last = rows[-1]
    squares = [row["eval/std_return"] ** 2 / max(row["eval/episodes"], 1) for row in (best, last)]
    fall = best["eval/mean_return"] - last["eval/mean_return"]
    if fall <= threshold * math.sqrt(sum(squares)) or fall == 0:
        return None
    figures = _figures_of(trend)
    return {**figures, "eval_best": best["eval/mean_return"], "eval_last": last["eval/mean_return"]}


# --- the environment -------------------------------------------------------------------------------------------------


def answers_at_the_limit(evidence: Evidence, threshold: float) -> Figures | None:
    """Nearly all answers are cut off by the limit of tokens, from the start without learning, or more and more.

    Episodes may also be truncated because their turns have run out, or by the game; their answers are then not cut off.
    """
    # Text whose episodes are truncated
    turns = evidence.late("rollout/turns")
    truncated = evidence.late("episode/truncated")
    if not turns or truncated is None or truncated < threshold:  # not text, or episodes that end by themselves
        return None

    # A run of an earlier version has no figure for turns; there, an episode of one turn is truncated as that turn is
    name = "text/cut_turns"
    if not len(evidence.curve(name)):
        name = "episode/truncated"
        if evidence.curve("rollout/turns").mean() > _episodes(evidence):
            return None

    # Are their turns cut off, and is that new or without learning?
    first = evidence.early(name)
    last = evidence.late(name)
    if first is None or last is None or last < threshold:
        return None
    if evidence.has_learnt() and first > 0.5 * threshold:  # such as answers of a fixed length
        return None
    tokens = (evidence.late("rollout/steps") or 0.0) - (evidence.late("update/steps") or 0.0)
    return {"first": first, "last": last, "length": tokens / turns, "example": evidence.late_example()}


def _episodes(evidence: Evidence) -> float:
    """Return the number of episodes that are generated for an iteration, those of refills too; 0 if it is not known."""
    refilled = evidence.curve("refills/episodes")
    if len(refilled):
        return float(refilled.mean())
    return float(evidence.option("num_episodes") or 0)


def environment_fails(evidence: Evidence, threshold: float) -> Figures | None:
    """Episodes were broken off, because their environment failed."""
    failed = evidence.total("rollout/failed_episodes")
    if failed < threshold:
        return None
    return {"failed": int(failed)}


def reward_fails(evidence: Evidence, threshold: float) -> Figures | None:
    """A reward function failed for a part of the answers."""
    failed = evidence.total("reward/failed")
    answers = _answers(evidence)
    if not answers or failed / answers < threshold:
        return None
    return {"failed": int(failed), "answers": int(answers)}


def _answers(evidence: Evidence) -> float:
    """Return the number of all answers of a run, those without a score too, which are no turns to learn from."""
    return evidence.total("rollout/turns") + evidence.total("reward/left_out")


def rows_without_reward(evidence: Evidence, threshold: float) -> Figures | None:
    """Many answers have no score, and their rows nothing to learn from.

    Both are looked at: a row is empty also if an opponent played it, and a turn may have no score because another turn
    of its episode has one.
    """
    empty = evidence.curve("rollout/empty_rows")
    num_rows = _rows(evidence)
    answers = _answers(evidence)
    if not len(empty) or not num_rows or not answers:
        return None
    fraction = min(float(empty.mean()) / num_rows, evidence.total("reward/left_out") / answers)
    if fraction < threshold:
        return None
    return {"fraction": fraction}


def _rows(evidence: Evidence) -> float:
    """Return the mean number of rows of a rollout, those without a step to learn from too; 0 if it is not known."""
    num_with_steps = evidence.curve("rollout/rows")
    if not len(num_with_steps):  # a run of an earlier version
        return _rows_with_steps(evidence)
    return float(num_with_steps.mean() + evidence.curve("rollout/empty_rows").mean())


def programs_fail(evidence: Evidence, threshold: float) -> Figures | None:
    """Programs that ask the model failed."""
    failed = evidence.curve("programs/failed")
    programs = _episodes(evidence) / _agents(evidence)
    if not len(failed) or not programs or failed.mean() / programs < threshold:
        return None
    return {"fraction": float(failed.mean()) / programs}


def _agents(evidence: Evidence) -> int:
    """Return the number of agents of a program, each of which plays an episode; 1 if it is not known."""
    rows_of_program = evidence.curve("programs/rows")
    num_episodes = evidence.option("num_episodes")
    num_rows = _rows(evidence)
    if not len(rows_of_program) or not len(evidence.curve("rollout/rows")) or not num_rows or not num_episodes:
        return 1
    return max(1, round(float(rows_of_program.mean()) * num_episodes / num_rows))


def tool_calls_fail(evidence: Evidence, threshold: float) -> Figures | None:
    """Most calls of tools cannot be read or fail, late in the run."""
    calls = evidence.late("tools/calls")
    errors = evidence.late("tools/errors")
    if not calls or errors is None or errors / calls < threshold:
        return None
    return {"fraction": errors / calls}


def actions_unreadable(evidence: Evidence, threshold: float) -> Figures | None:
    """Most answers name no action of the environment, late in the run."""
    return _late_above(evidence, "reward/log/unreadable", threshold)


def symbols_as_pixels(evidence: Evidence, threshold: float) -> Figures | None:
    """A convolutional network reads numbers of objects as the brightness of pixels."""
    _, _, name = evidence.environment.rpartition(":")
    wrappers = (evidence.description.get("environment") or {}).get("wrappers") or ()
    if not all(str(wrapper).startswith("minigrid.wrappers:") for wrapper in wrappers):  # one may change the images
        return None
    observation = (evidence.description.get("policy_arguments") or {}).get("observation")
    has_convolutions = evidence.policy in ("CNNPolicy", "LSTMPolicy", "QPolicy", "SACPolicy", "TD3Policy")
    if not name.startswith(SYMBOLIC_WORLDS) or not has_convolutions or not isinstance(observation, Mapping):
        return None
    shape = observation.get("shape") or ()
    if observation.get("dtype") != "uint8" or len(shape) != 3 or max(shape[:2]) > threshold:
        return None
    if observation.get("high", 255) != 255:  # networks divide by it, so that the input is bright
        return None
    return {"shape": " x ".join(map(str, shape)), "policy": evidence.policy}


def normaliser_drifts(evidence: Evidence, threshold: float) -> Figures | None:
    """Observations of the newest part of the run are far from the mean by which they are normalised."""
    checkpoints = evidence.newest_weights
    if not checkpoints or len(evidence.metrics) < MIN_ITERATIONS:
        return None
    older, newer = checkpoints
    names = ("normalizer.mean", "normalizer.variance", "normalizer.count")
    if not all(name in older and name in newer for name in names):
        return None
    fraction_of_new = 1 - float(older["normalizer.count"]) / max(float(newer["normalizer.count"]), 1)
    if not 0 < fraction_of_new < 0.5:
        return None

    # mean = (1 - fraction) · old mean + fraction · mean of the new observations
    varies = older["normalizer.variance"] > 1e-8
    shift = np.abs(newer["normalizer.mean"] - older["normalizer.mean"])[varies] / fraction_of_new
    distance = shift / np.sqrt(older["normalizer.variance"][varies])
    if not len(distance) or distance.max() < threshold:
        return None
    column = int(np.flatnonzero(varies)[distance.argmax()])
    return {"distance": float(distance.max()), "column": column}


def logger_fails(evidence: Evidence, threshold: float) -> Figures | None:
    """A logger, such as TensorBoard's, raised errors."""
    failures = evidence.curve("log/failures")
    if not len(failures) or failures[-1] < threshold:
        return None
    return {"failures": int(failures[-1])}
