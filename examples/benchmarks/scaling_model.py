"""How training on many processes or GPUs will go: a discrete-event simulation, and formulas to redo by hand.

    python examples/benchmarks/scaling_model.py scaling.json     # simulated beside what scaling.py measured
    python examples/benchmarks/scaling_model.py                  # tables of docs/results/scaling.md: H100s, up to 70 B

A simulated process is a generator that yields what it does next: ``Compute``, ``Meet`` or ``Take``. Plain Python; no
package for it. See docs/results/scaling.md for the assumptions.
"""

import argparse
import heapq
import json
import math
import random
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

# --- the simulation --------------------------------------------------------------------------------------------------


class Compute(NamedTuple):
    """Work on a core for so many seconds, longer if there are more processes than cores."""

    seconds: float


class Meet(NamedTuple):
    """Wait until ``count`` processes are at ``place``, then send a message together that takes so many seconds."""

    place: object
    count: int
    seconds: float = 0.0


class Take(NamedTuple):
    """Wait until a queue holds so many items, and take them: the result of the yield."""

    queue: "Queue"
    count: int = 1


class Queue:
    """Items in the order in which they were put; ``put`` needs no yield."""

    def __init__(self, simulation: "Simulation") -> None:
        self.items, self.simulation = deque(), simulation

    def put(self, item: object = None) -> None:
        self.items.append(item)
        self.simulation.served.append(self)


class Simulation:
    """Runs processes against one clock; those that compute share the cores evenly."""

    def __init__(self, cores: float = math.inf) -> None:
        self.cores, self.now, self.served = cores, 0.0, deque()
        self._numbers = iter(range(10**12))
        self._work = 0.0  # seconds of work that every computing process has been given so far
        self._computing, self._asleep = [], []  # heaps: when a process's work, or its message, is done
        self._places, self._takers, self._ready = defaultdict(list), defaultdict(deque), deque()

    def run(self, *processes: Iterator) -> float:
        """Seconds until all have ended; those that wait for ever are left."""
        self._ready.extend((process, None) for process in processes)
        while True:
            while self._ready or self.served:
                self._go_on(*self._ready.popleft()) if self._ready else self._serve(self.served.popleft())
            if not (self._computing or self._asleep):
                return self.now
            rate = min(1.0, self.cores / max(1, len(self._computing)))
            done = self.now + (self._computing[0][0] - self._work) / rate if self._computing else math.inf
            wakes = self._asleep[0][0] if self._asleep else math.inf
            self._work += (min(done, wakes) - self.now) * rate
            self.now = min(done, wakes)
            _, _, process = heapq.heappop(self._computing if done <= wakes else self._asleep)
            self._ready.append((process, None))

    def _go_on(self, process: Iterator, found: object) -> None:
        try:
            wish = process.send(found)
        except StopIteration:
            return
        if isinstance(wish, Compute):
            heapq.heappush(self._computing, (self._work + wish.seconds, next(self._numbers), process))
        elif isinstance(wish, Take):
            self._takers[wish.queue].append((wish.count, process))
            self.served.append(wish.queue)
        else:
            waiting = self._places[wish.place]
            waiting.append(process)
            if len(waiting) == wish.count:
                for each in self._places.pop(wish.place):
                    heapq.heappush(self._asleep, (self.now + wish.seconds, next(self._numbers), each))

    def _serve(self, queue: Queue) -> None:
        takers = self._takers[queue]
        while takers and takers[0][0] <= len(queue.items):
            count, taker = takers.popleft()
            self._ready.append((taker, [queue.items.popleft() for _ in range(count)]))


# --- what is simulated -----------------------------------------------------------------------------------------------


def data_parallel(
    count: int,
    *,
    collect: Callable[[int], float],
    gather: float,
    update: Callable[[int], float],
    minibatches: int,
    all_reduce: float,
    iterations: int = 1,
    cores: float = math.inf,
) -> float:
    """Seconds an iteration of our data parallelism: collect, gather the rollout, then an all-reduce a minibatch.

    Args:
        count: processes.
        collect, update: seconds in which a process, by its number, collects its share and computes its part of one
            minibatch.
        gather, all_reduce: seconds of the messages.
    """

    def process(rank: int) -> Iterator:
        for _ in range(iterations):
            yield Compute(collect(rank))
            yield Meet("gather", count, gather)
            for _ in range(minibatches):
                yield Compute(update(rank))
                yield Meet("all-reduce", count, all_reduce)

    return Simulation(cores).run(*map(process, range(count))) / iterations


class Asynchronous(NamedTuple):
    """What `asynchronous` found."""

    seconds: float
    """Seconds an update."""
    staleness: float
    """Mean number of updates between the weights that gave an answer and those that it trains."""
    worst: int
    busy: float
    """Part of their time for which the slots work."""


def asynchronous(
    slots: int,
    *,
    batch: int,
    staleness: int,
    draw: Callable[[], float],
    update: float,
    updates: int = 50,
    own: bool = False,
) -> Asynchronous:
    """Slots of workers, or of a generation engine, that play answers apart from the learner.

    The n-th answer belongs to update n // batch, and a slot begins it only when that update is at most ``staleness``
    updates ahead; 0 is synchronous. The learner waits for all answers of an update, so that none is ever older.

    Args:
        slots: answers that are generated at the same time.
        batch: answers of an update.
        draw: seconds of the next answer.
        update: seconds of an update, with the transfer of the weights.
        own: every slot has its own part of each update (Ray workers); else any free slot takes the next (an engine).
    """
    simulation = Simulation()
    permits = [Queue(simulation) for _ in range(slots if own else 1)]
    done = [Queue(simulation) for _ in range(updates)]
    version, gaps, busy = 0, [], 0.0

    def permit(update: int) -> None:
        for answer in range(batch if update < updates else 0):
            permits[answer % len(permits)].put(update)

    def slot(number: int) -> Iterator:
        nonlocal busy
        while True:
            (needed,) = yield Take(permits[number % len(permits)])
            began, seconds = version, draw()
            yield Compute(seconds)
            busy += seconds
            done[needed].put(began)

    def learner() -> Iterator:
        nonlocal version
        for queue in done:
            gaps.extend(version - began for began in (yield Take(queue, batch)))
            yield Compute(update)
            version += 1
            permit(version + staleness)

    for ahead in range(staleness + 1):
        permit(ahead)
    seconds = simulation.run(learner(), *map(slot, range(slots)))
    return Asynchronous(seconds / updates, statistics.mean(gaps), max(gaps), busy / (seconds * slots))


def ring(count: int, *, size: float, bandwidth: float, latency: float = 0.0) -> float:
    """Seconds of a ring all-reduce, message by message: every process passes a chunk on 2 (n - 1) times."""
    simulation = Simulation()
    inbox = [Queue(simulation) for _ in range(count)]

    def process(rank: int) -> Iterator:
        for _ in range(2 * (count - 1)):
            yield Compute(latency + size / count / bandwidth)
            inbox[(rank + 1) % count].put()
            yield Take(inbox[rank])

    return simulation.run(*map(process, range(count)))


# --- the measured cases ----------------------------------------------------------------------------------------------


def line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Intercept and slope of the line with the least squares of the relative errors."""
    weights = [1 / y**2 for _, y in points]
    x0, y0 = (sum(w * p[i] for w, p in zip(weights, points, strict=True)) / sum(weights) for i in (0, 1))
    above = sum(w * (x - x0) * (y - y0) for w, (x, y) in zip(weights, points, strict=True))
    slope = above / sum(w * (x - x0) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    return y0 - slope * x0, slope


PHASES = ("collect", "penalty", "update", "rest")
GATHERED = {"text": 10}
"""Gathered or broadcast tensors of an iteration, two for an object; others have 6: rollout, values, whether to stop."""


def constants(measured: dict, name: str) -> dict[str, tuple[float, float]]:
    """Seconds of each phase of an iteration that every process repeats, and that they share."""
    alone = measured["alone"][name].items()
    return {phase: line([(1 / int(count), found[phase]) for count, found in alone]) for phase in PHASES}


def simulate(measured: dict, name: str, count: int) -> float:
    """Steps a second of so many processes, from the constants of one process and of messages alone."""
    seconds = {phase: fixed + shared / count for phase, (fixed, shared) in constants(measured, name).items()}
    whole = measured["alone"][name]["1"]
    reduce = gather = 0.0
    if count > 1:
        sent = {kind: line(points) for kind, points in measured["messages"][str(count)].items()}
        gather = GATHERED.get(name, 6) * sent["all_gather"][0] + sent["all_gather"][1] * whole["rollout_bytes"] / count
        reduce = sent["all_reduce"][0] + sent["all_reduce"][1] * whole["gradient_bytes"]
    minibatches = round(whole["minibatches"])
    spent = data_parallel(
        count,
        collect=lambda rank: seconds["collect"] + seconds["penalty"] + seconds["rest"],
        gather=gather,
        update=lambda rank: seconds["update"] / minibatches,
        minibatches=minibatches,
        all_reduce=reduce,
        cores=measured["cores"],
    )
    return whole["steps"] / spent


def compare(measured: dict) -> str:
    """Table of the constants, and of measured and simulated speeds."""
    lines = ["| workload | processes | measured, steps/s | simulated | simulated / measured |", "| --- " * 5 + "|"]
    for name, speeds in measured["speeds"].items():
        for count, speed in speeds.items():
            found = simulate(measured, name, int(count))
            lines.append(f"| {name} | {count} | {speed:,.0f} | {found:,.0f} | {found / speed:.2f} |")
    lines += ["", "| an iteration, ms: repeated + shared by all | collect | KL penalty | update |", "| --- " * 4 + "|"]
    for name in measured["speeds"]:
        found = {key: " + ".join(f"{1e3 * x:.1f}" for x in pair) for key, pair in constants(measured, name).items()}
        lines.append(f"| {name} | {found['collect']} | {found['penalty']} | {found['update']} |")
    lines += ["", "| messages of | all-reduce | all-gather, bytes of each process |", "| --- " * 3 + "|"]
    for count, kinds in measured["messages"].items():
        shown = [line(points) for points in kinds.values()]
        cells = [f"{1e3 * latency:.2f} ms + bytes / {1e-6 / slope:,.0f} MB/s" for latency, slope in shown]
        lines.append(f"| {count} processes | {' | '.join(cells)} |")
    checkpoint, rollout = (f"{measured['bytes'][name] / 1e6:,.0f} MB/s" for name in ("checkpoint", "rollout"))
    lines += ["", f"A checkpoint is written, verified and flushed at {checkpoint}."]
    return "\n".join([*lines, f"The whole rollout of four processes is pickled, unpickled and joined at {rollout}."])


# --- GPUs: published figures, and formulas ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Cluster:
    """H100 SXM in nodes of eight, an InfiniBand NDR port a GPU: published figures, then the parts assumed of them."""

    memory: float = 80e9
    flops: float = 989e12  # bfloat16, dense
    hbm: float = 3.35e12
    nvlink: float = 450e9  # in one direction
    network: float = 50e9  # of a GPU
    compute_part: float = 0.4  # Llama 3 reports 38 to 43 %
    hbm_part: float = 0.6
    link_part: float = 0.8
    latency: float = 20e-6
    pickle: float = 0.25e9  # bytes of the whole rollout a second; ours

    def ring(self, size: float, count: int) -> float:
        """Seconds of an all-gather or reduce-scatter of so many bytes in all; an all-reduce is two of them."""
        link = self.nvlink if count <= 8 else 8 * self.network  # a node's ports send together
        return (count - 1) / count * size / (link * self.link_part) + math.log2(count) * self.latency


@dataclass(frozen=True)
class Model:
    """A decoder in bfloat16; its shape is that of Llama 3."""

    parameters: float
    layers: int
    cache: int
    """Bytes of a token's keys and values: 2 · layers · 8 heads · 128 · 2."""
    engine: int
    """GPUs that share the weights where a generation engine holds them."""


MODELS = {"8 B": Model(8e9, 32, 131_072, 1), "70 B": Model(70e9, 80, 327_680, 8)}


@dataclass(frozen=True)
class Rollout:
    """Answers of an iteration; their lengths are log-normal, and cut."""

    answers: int
    prompt: int = 512
    mean: int = 2_048
    longest: int = 16_384
    spread: float = 0.8
    minibatches: int = 4
    micro_batch: int = 16_384  # tokens on a GPU at a time
    token_bytes: int = 36  # of the rollout; ours, measured

    def lengths(self) -> list[float]:
        rng, centre = random.Random(0), math.log(self.mean) - self.spread**2 / 2
        return [min(self.longest, rng.lognormvariate(centre, self.spread)) for _ in range(self.answers)]


def decoding_step(model: Model, cluster: Cluster, running: float, context: float, gpus: int = 1) -> float:
    """Seconds of a token of all running answers: read weights and caches, two operations a weight and answer."""
    read = (2 * model.parameters + running * context * model.cache) / (cluster.hbm * cluster.hbm_part)
    computed = 2 * model.parameters * running / (cluster.flops * cluster.compute_part)
    return (read + computed) / gpus + (2 * model.layers * cluster.latency if gpus > 1 else 0)


def generation(model: Model, cluster: Cluster, lengths: list[float], prompt: float) -> float:
    """Seconds until answers that begin together on a GPU have all ended."""
    seconds, before = 0.0, 0.0
    for place, length in enumerate(sorted(lengths)):
        seconds += (length - before) * decoding_step(model, cluster, len(lengths) - place, prompt + length)
        before = length
    return seconds


def learning(model: Model, cluster: Cluster, rollout: Rollout, gpus: int) -> tuple[float, float]:
    """Seconds of arithmetic and of messages of an update of one epoch, sharded (FSDP2, weights in bfloat16).

    12 operations a weight and token: 2 for values, 2 for the reference, 6 + 2 for the loss, activations recomputed. A
    micro-batch gathers the weights twice, and scatters the gradients; an update gathers them once more.
    """
    tokens, size = sum(rollout.lengths()) + rollout.answers * rollout.prompt, 2 * model.parameters
    micro_batches = rollout.minibatches * math.ceil(tokens / rollout.minibatches / gpus / rollout.micro_batch)
    computed = 12 * model.parameters * tokens / (gpus * cluster.flops * cluster.compute_part)
    return computed, (3 * micro_batches + 1) * cluster.ring(size, gpus)


def synchronous(model: Model, cluster: Cluster, rollout: Rollout, gpus: int) -> dict[str, float]:
    """Seconds of the parts of an iteration in which all GPUs generate, then all learn."""
    lengths = rollout.lengths()
    spans = [generation(model, cluster, lengths[rank::gpus], rollout.prompt) for rank in range(gpus)]
    # Rows are padded to the longest.
    gather = rollout.answers * (rollout.prompt + max(lengths)) * rollout.token_bytes / cluster.pickle
    computed, sent = learning(model, cluster, rollout, gpus)
    steps = rollout.minibatches
    whole = data_parallel(
        gpus, collect=spans.__getitem__, gather=gather, update=lambda rank: computed / steps, minibatches=steps,
        all_reduce=sent / steps,
    )  # fmt: skip
    parts = {"generate": max(spans), "waiting, mean": max(spans) - statistics.mean(spans), "gather": gather}
    return parts | {"compute": computed, "messages": sent, "iteration": whole}


def apart(model: Model, cluster: Cluster, rollout: Rollout, gpus: int, staleness: int) -> tuple[float, int, float]:
    """Seconds an update, GPUs that generate and mean staleness, for the best of three shares of the GPUs.

    The others learn. An engine takes the next answer when one has ended, 64 at a time. Of more than 1,024 answers and
    their slots, an equal part is simulated.
    """
    lengths, found, part = rollout.lengths(), [], max(1, rollout.answers // 1_024)
    for quarters in (1, 2, 3):
        own = gpus * quarters // 4 // model.engine
        slots = min(64 * own, rollout.answers * (staleness + 1))
        step = decoding_step(model, cluster, slots / own, rollout.prompt + rollout.mean / 2, model.engine)
        answer = random.Random(1)
        update = sum(learning(model, cluster, rollout, gpus - own * model.engine))
        update += cluster.ring(2 * model.parameters, gpus)  # new weights for the engines
        spent = asynchronous(
            slots // part, batch=rollout.answers // part, staleness=staleness, update=update, updates=2 * staleness + 8,
            draw=lambda step=step, answer=answer: step * answer.choice(lengths),
        )  # fmt: skip
        found.append((spent.seconds, own * model.engine, spent.staleness))
    return min(found)


def tables() -> Iterator[str]:
    """The tables of docs/results/scaling.md."""
    cluster = Cluster()
    for answers in (1_024, 8_192):
        rollout = Rollout(answers)
        yield f"\n8 B, {answers:,} answers an iteration, synchronous: seconds"
        for gpus in (8, 16, 32, 64, 128, 256, 512, 1_024):
            found = synchronous(MODELS["8 B"], cluster, rollout, gpus)
            speed = sum(rollout.lengths()) / found["iteration"]
            cells = [f"{x:.1f}" for x in found.values()] + [f"{speed:,.0f}", f"{speed / gpus:,.0f}"]
            if gpus == 8:
                yield f"| GPUs | {' | '.join([*found, 'tokens/s', 'of a GPU'])} |\n" + "| --- " * 9 + "|"
            yield f"| {gpus} | {' | '.join(cells)} |"
    for name, gpus, answers in (("8 B", 64, 1_024), ("8 B", 64, 8_192), ("8 B", 1_024, 8_192), ("70 B", 1_024, 8_192)):
        yield f"\n{name}, {gpus} GPUs, {answers:,} answers an update, engines apart"
        yield "| staleness allowed | seconds an update | GPUs that generate | mean staleness |\n" + "| --- " * 4 + "|"
        for staleness in (0, 1, 2, 4, 8, 16):
            seconds, engines, mean = apart(MODELS[name], cluster, Rollout(answers), gpus, staleness)
            yield f"| {staleness} | {seconds:.1f} | {engines} | {mean:.1f} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", nargs="?", type=Path, help="file that scaling.py wrote")
    given = parser.parse_args().measured
    print(compare(json.loads(given.read_text())) if given else "\n".join(tables()))
