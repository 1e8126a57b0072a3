"""The rules of the run doctor, in one table: what each looks at, from which value on it speaks, and what it then says.

Thresholds lie between runs that were measured: healthy ones (the 37 published runs of MuJoCo and MiniGrid, and those of
``tests/algos/lab/doctor``), and those with a fault built in.
"""

from collections.abc import Callable
from dataclasses import dataclass

from algos.envs.gymnasium_results import STEPS_WITHOUT_AN_END
from algos.lab.doctor import answer_signs, signs
from algos.lab.doctor.evidence import CLEAR_CHANGE, Evidence
from algos.storage.run_files import SAMPLES
from algos.training.reward_hacking import ADVICE, SCORE, VARIETY

Check = Callable[[Evidence, float], signs.Figures | None]
"""Function of a rule: returns the figures if the run has its fault."""


@dataclass(frozen=True)
class Rule:
    """A fault that a run may have."""

    name: str
    metrics: tuple[str, ...]
    """What it looks at: names of metrics, and ``config.json``, ``checkpoints`` or `SAMPLES`."""
    threshold: float
    """Value at which it speaks; ``source`` says where it comes from."""
    source: str
    message: str
    """What is wrong, with the function's figures as fields."""
    advice: str
    check: Check
    unless: tuple[str, ...] = ()
    """Rules that explain the same: if one of them speaks, this one does not."""

    def applies_to(self, evidence: Evidence) -> bool:
        """Return whether the run has anything that the rule looks at."""
        if SAMPLES in self.metrics:
            return len(evidence.late_answers) > 0
        return any("/" not in name or len(evidence.curve(name)) > 0 for name in self.metrics)


CAUSES_OF_NO_PROGRESS = (
    "learning_not_begun",
    "no_signal_in_groups",
    "constant_return",
    "policy_stands_still",
    "no_step_found",
    "penalty_outweighs",
    "kl_explodes",
    "always_clipped",
    "entropy_collapsed",
    "return_falls",
    "answers_at_the_limit",
    "not_finite",
    "steps_skipped",
    "sampler_apart",
    "samples_dropped",
    "rows_without_reward",
    "reward_fails",
    "programs_fail",
    "tool_calls_fail",
    "actions_unreadable",
    "value_explains_nothing",
    "values_diverge",
    "no_episode_ended",
    "environment_fails",
    "symbols_as_pixels",
    "normaliser_drifts",
)
"""Rules that say why the return has not moved."""

RULES = (
    Rule(
        "no_signal_in_groups",
        ("rollout/silent_rows", "rollout/rows", SCORE),
        threshold=0.9,
        source="a tenth of the groups is then all that is learnt from; Reviews by GRPO and RLOO: 0",
        message=(
            "{fraction:.0%} of the rows (episodes, or parts of them) are in groups whose returns are all equal. An "
            "advantage is the difference from the group's mean, so they teach nothing, and the return has not risen."
        ),
        advice=(
            "Choose prompts that are sometimes solved (a sampler, docs/environments.md), make groups larger "
            "(group_size), let max_refills replace such groups, or give a reward with more than two values."
        ),
        check=signs.no_signal_in_groups,
    ),
    Rule(
        "constant_return",
        (SCORE,),
        threshold=0.9,
        source="measured: a run of MiniGrid-KeyCorridor that never found the goal has more than .99",
        message=(
            "In {count:,} of {iterations:,} iterations the mean return is exactly {value:.4g}: the reward is "
            "constant, or what it pays for is never reached, or the policy was as good as it can be from the start."
        ),
        advice=(
            "Read what the policy does (algos sample, algos evaluate --video). If the goal is never reached, begin "
            "with an easier task, reward steps towards it, or explore more (ent_coef; of DQN final_exploration, of TD3 "
            "exploration_noise). If the reward is constant, try algos check-reward."
        ),
        check=signs.constant_return,
        unless=("no_signal_in_groups",),
    ),
    Rule(
        "learning_not_begun",
        ("update/remembered", "value/loss"),
        threshold=1,
        source="the fewest updates",
        message=(
            "There was no update in {steps:,} steps: learning begins after {begins:,} (learning_starts), until then "
            "actions are random."
        ),
        advice="Train longer (--total-steps), or lower --config.learning-starts.",
        check=signs.learning_not_begun,
    ),
    Rule(
        "policy_stands_still",
        ("policy/approx_kl", "update/minibatches", SCORE, "checkpoints"),
        threshold=1e-07,
        source="medians of healthy runs: 3e-5 to .03 nats, and .0015 to .12 of the weights",
        message=(
            "The updates hardly change the policy: {figure} (usual: .001 to .02). The learning rate is {learning_rate}."
        ),
        advice=(
            "Raise the learning rate tenfold, until policy/approx_kl is near .01; --config.learning-rate left out "
            "takes that of the preset. If the rate is usual, look at advantage/std: without differences nothing is "
            "learnt."
        ),
        check=signs.policy_stands_still,
        unless=("no_signal_in_groups", "constant_return", "learning_not_begun", "entropy_collapsed"),
    ),
    Rule(
        "no_step_found",
        ("policy/gain", SCORE),
        threshold=0.5,
        source="CartPole by TRPO's preset: 0",
        message="In {fraction:.0%} of the iterations TRPO's line search found no step, so the policy stayed as it was.",
        advice="Lower max_kl, or raise damping.",
        check=signs.no_step_found,
        unless=("no_signal_in_groups", "constant_return"),
    ),
    Rule(
        "penalty_outweighs",
        (SCORE, "episode/penalised_return", "reference/coefficient"),
        threshold=1.0,
        source="Reviews by the preset (kl_coef .1): .08",
        message=(
            "The KL penalty outweighs the score: it costs {penalty:.3g} an episode, and no mean return was beyond "
            "{largest:.3g} (KL coefficient {coefficient:.3g})."
        ),
        advice="Lower kl_coef tenfold (0 only measures the KL), or lower the learning rate if the KL keeps growing.",
        check=signs.penalty_outweighs,
        unless=("no_signal_in_groups", "constant_return", "policy_stands_still", "kl_explodes"),
    ),
    Rule(
        "no_episode_ended",
        ("rollout/steps", SCORE),
        threshold=STEPS_WITHOUT_AN_END,
        source="the steps after which collection warns",
        message="No episode has ended in {steps:,} steps, so there is no return.",
        advice=(
            "Give the environment a limit, such as max_episode_steps=1000 where it is registered or made, or train "
            "longer than an episode lasts."
        ),
        check=signs.no_episode_ended,
    ),
    Rule(
        "not_finite",
        ("every metric",),
        threshold=1,
        source="none is ever NaN or infinite in a healthy run",
        message="{count} values of the log are NaN or infinite, first {first}.",
        advice=(
            "If it is a number of your own (reward/log/…, diagnose=), look for a division by 0 there. Otherwise "
            "lower the learning rate; without skip_nonfinite the training stops at the first such step and says "
            "which tensor it is."
        ),
        check=signs.not_finite,
    ),
    Rule(
        "steps_skipped",
        ("update/skipped", "update/minibatches"),
        threshold=0.01,
        source="healthy runs: 0; mixed precision may skip single steps",
        message="{skipped:,} of {minibatches:,} optimizer steps were left out, because a gradient was not finite.",
        advice=(
            "Lower the learning rate, or use float32. Run once without skip_nonfinite: the error names the tensor, "
            "and the batch is saved."
        ),
        check=signs.steps_skipped,
    ),
    Rule(
        "kl_explodes",
        ("policy/approx_kl",),
        threshold=0.1,
        source="six times the largest median of a healthy run (.017, HalfCheetah); Schulman's target_kl is .01 to .05",
        message=(
            "Updates move the policy too far: policy/approx_kl is up to {largest:.2g} nats a step, and {late:.2g} "
            "late in the run (median of the last third; usual: .001 to .02)."
        ),
        advice="Lower the learning rate or num_epochs, or set target_kl (.03): it ends an update that goes further.",
        check=signs.kl_explodes,
    ),
    Rule(
        "always_clipped",
        ("policy/clip_frac",),
        threshold=0.5,
        source="twice the largest median of a healthy run (.24, HalfCheetah)",
        message=(
            "{value:.0%} of the probability ratios are outside the clip range (median of the last third; usual: 0 "
            "to 30 %), so most steps have no gradient."
        ),
        advice="Lower the learning rate or num_epochs, or make minibatches larger.",
        check=signs.always_clipped,
        unless=("kl_explodes",),
    ),
    Rule(
        "sampler_apart",
        ("policy/sampler_gap", "policy/importance_weight"),
        threshold=0.05,
        source="usual: 1e-7 in float32, 1e-2 in bfloat16; ten times as much with importance weights",
        message=(
            "The log-probabilities of sampling and of scoring differ by {gap:.2g} nats a token before any update, "
            "so ratios are wrong from the first step."
        ),
        advice=(
            "Use the same dtype, temperature and template in the engine that samples; or weigh the samples: "
            'importance_weights="token_truncate".'
        ),
        check=signs.sampler_apart,
    ),
    Rule(
        "samples_dropped",
        ("policy/importance_dropped",),
        threshold=0.5,
        source="docs/metrics.md",
        message="{value:.0%} of the steps have the importance weight 0: most of what was sampled teaches nothing.",
        advice=(
            "Bring sampler and policy together (dtype, fewer updates of staleness), raise max_importance_weight, or "
            "choose weights that truncate instead of those that mask."
        ),
        check=signs.samples_dropped,
    ),
    Rule(
        "entropy_collapsed",
        ("policy/entropy", SCORE),
        threshold=0.05,
        source=(
            "a Box: a twentieth of the standard deviation. Healthy runs fall to .01 too, but their return rises "
            "meanwhile"
        ),
        message=(
            "The policy has settled on one action without having learnt: its entropy fell from {first:.2g} to "
            "{last:.2g} nats."
        ),
        advice="Raise ent_coef (.01; of SAC give a fixed temperature instead), or lower the learning rate.",
        check=signs.entropy_collapsed,
    ),
    Rule(
        "value_explains_nothing",
        ("value/explained_variance", "value/relative_error", "value/loss", "value/mean"),
        threshold=0.05,
        source=(
            "healthy runs: above .1 in some part, or targets that hardly vary (InvertedPendulum, solved: .09 of "
            "their mean)"
        ),
        message=(
            "The values explain nothing of the returns: value/explained_variance is {late:.2g} at the end and was "
            "{highest:.2g} at its best (1 is perfect, 0 a constant); their squared error is {relative_error:.2g} "
            "times that of the mean return."
        ),
        advice=(
            "Raise value_learning_rate, vf_coef or num_epochs, set normalize_rewards=True if returns are large, "
            "give the critic a network of its own (--critic copy), or use an algorithm without one (grpo, rloo)."
        ),
        check=signs.value_explains_nothing,
        unless=("constant_return", "policy_stands_still"),
    ),
    Rule(
        "values_diverge",
        ("value/mean", SCORE, "episode/penalised_return"),
        threshold=10,
        source="a value is a return to come; healthy runs without normalised rewards: at most 1",
        message="Mean values reach {value:.3g}, but no mean return was ever beyond {largest:.3g}: the values run away.",
        advice=(
            "Lower the learning rate or gamma, update the target network more slowly, or make rewards smaller: by "
            "normalize_rewards=True, and for DQN, SAC and TD3, which lack it, in the environment."
        ),
        check=signs.values_diverge,
    ),
    Rule(
        "return_lost",
        (SCORE,),
        threshold=0.5,
        source="half of the rise, and 4 standard errors; published runs: at most .24 (Hopper)",
        message=(
            "What was learnt is lost again: the mean return rose from {first:.3g} to {highest:.3g}, and ended at "
            "{last:.3g}."
        ),
        advice=(
            "Lower the learning rate or let it fall (final_learning_rate), and keep the best agent: --eval-every "
            "STEPS saves it in RUN/best."
        ),
        check=signs.return_lost,
    ),
    Rule(
        "return_falls",
        (SCORE, "episode/penalised_return"),
        threshold=CLEAR_CHANGE,
        source="standard errors of noise",
        message="The training makes it worse: {name} fell from {first:.3g} to {last:.3g}, and never rose.",
        advice=(
            "Is the sign of the reward right? Otherwise lower the learning rate; if only the penalised return "
            "falls, the KL grows without a gain: raise kl_coef."
        ),
        check=signs.return_falls,
        unless=("policy_stands_still", "kl_explodes", "penalty_outweighs"),
    ),
    Rule(
        "texts_alike",
        (SCORE, VARIETY),
        threshold=10,
        source=(
            "algos/training/reward_hacking.py: the training warns of the same; the threshold is the fewest iterations"
        ),
        message="Perhaps the reward is hacked: {sign}.{example}",
        advice=f"{ADVICE}.",
        check=signs.texts_alike,
    ),
    Rule(
        "evaluation_falls",
        (SCORE, "eval/mean_return", "eval/std_return", "eval/episodes"),
        threshold=CLEAR_CHANGE,
        source="standard errors of the two evaluations",
        message=(
            "The training's return rises ({first:.3g} to {highest:.3g}), but the evaluation falls ({eval_best:.3g} "
            "to {eval_last:.3g}): the policy learns what only the training pays for."
        ),
        advice=(
            "Use RUN/best, the agent of the best evaluation. Train on more prompts or levels, mend the reward, or "
            "raise the KL coefficient; --patience ends a training that no longer improves."
        ),
        check=signs.evaluation_falls,
    ),
    Rule(
        "answers_at_the_limit",
        ("episode/truncated", "text/cut_turns", "rollout/turns", "rollout/steps", "update/steps"),
        threshold=0.9,
        source="Reviews by the preset: 0",
        message=(
            "{last:.0%} of the answers are cut off by the limit of tokens ({first:.0%} at first; {length:.0f} "
            "tokens): the model does not end its turns, so rewards see unfinished texts.{example}"
        ),
        advice=(
            "Does the model know its end token (textenv check, docs/environments.md, The end of a turn)? Use its "
            "chat template, raise max_new_tokens, or subtract something for length (the reward overlong)."
        ),
        check=signs.answers_at_the_limit,
    ),
    Rule(
        "one_answer",
        (SAMPLES,),
        threshold=0.9,
        source="measured: Reviews and Periods late in 24,000 steps have .02",
        message=(
            "{fraction:.0%} of the last {count} recorded answers are one text, to different prompts: {example} "
            "({first:.0%} before the training)."
        ),
        advice=(
            "Begin again from the model before the training, with a lower learning rate or a higher KL coefficient. If "
            "this text does earn most for every prompt, the reward does not look at the prompt: mend it."
        ),
        check=answer_signs.one_answer,
        unless=("texts_alike", "answers_empty"),
    ),
    Rule(
        "answers_repeat",
        (SAMPLES,),
        threshold=0.5,
        source=f"phrases of {answer_signs.WORDS_OF_A_PHRASE} words; measured: Reviews .003, Periods .016",
        message=(
            "The answers go round in circles: {last:.0%} of their phrases stood in the same answer before "
            "({first:.0%} before the training), as in {example}."
        ),
        advice=(
            "Does the reward pay for length or for single words? Subtract something for repetition, shorten "
            "max_new_tokens, or raise the KL coefficient. A model that does so before any training needs its chat "
            "template, or a supervised start (algos.finetuning.sft)."
        ),
        check=answer_signs.answers_repeat,
        unless=("texts_alike",),
    ),
    Rule(
        "answers_empty",
        (SAMPLES,),
        threshold=0.5,
        source="half of the answers then say nothing",
        message="{last:.0%} of the last {count} recorded answers are empty ({first:.0%} before the training).",
        advice=(
            "Either silence pays better than what the model can write (is every other reward negative?), or the "
            "prompt ends with the token that ends a turn: textenv check shows it."
        ),
        check=answer_signs.answers_empty,
    ),
    Rule(
        "speaks_for_others",
        (SAMPLES,),
        threshold=0.3,
        source="models whose end of a turn is known: 0",
        message=(
            "{fraction:.0%} of the last {count} recorded answers go on with another speaker's turn, as in {example}: "
            "the mark that ends a turn is not known, or the model was not trained to write it."
        ),
        advice=(
            "Use the model's chat template, or name the text that ends an answer: --stop TEXT, stop= of the "
            "environment (docs/environments.md, The end of a turn)."
        ),
        check=answer_signs.speaks_for_others,
    ),
    Rule(
        "length_pays",
        (SCORE, "episode/length", SAMPLES),
        threshold=0.9,
        source="rank correlation; measured: Reviews -.01, Periods -.62",
        message=(
            "The score follows the length: answers grew from {first:.0f} to {last:.0f} tokens, and late in the run the "
            "rank correlation of score and length is {correlation:.2f}."
        ),
        advice=(
            "If length is not what the reward is for, it is being hacked: judge answers of equal length, or subtract "
            "something for length (the reward overlong)."
        ),
        check=answer_signs.length_pays,
    ),
    Rule(
        "environment_fails",
        ("rollout/failed_episodes",),
        threshold=1,
        source="healthy runs: 0",
        message="{failed} episodes were broken off, because their environment failed.",
        advice=(
            "The log names the error and the seed of each: mend the environment, or raise --process-timeout if it "
            "is slow."
        ),
        check=signs.environment_fails,
    ),
    Rule(
        "reward_fails",
        ("reward/failed", "reward/left_out", "rollout/turns"),
        threshold=0.01,
        source="healthy runs: 0; a service may fail once in a while",
        message="A reward function failed for {failed:,} of {answers:,} answers, which were left out.",
        advice=(
            "samples.jsonl shows such answers (score null), the log the first error of each place. algos "
            "check-reward finds the usual causes."
        ),
        check=signs.reward_fails,
        unless=("programs_fail",),
    ),
    Rule(
        "rows_without_reward",
        ("rollout/empty_rows", "rollout/rows", "reward/left_out", "rollout/turns"),
        threshold=0.1,
        source="healthy runs: 0",
        message="{fraction:.0%} of the answers have no score, so that they teach nothing: their reward is None.",
        advice="Return a number for every answer, or leave out prompts for which there is none.",
        check=signs.rows_without_reward,
        unless=("reward_fails", "programs_fail"),
    ),
    Rule(
        "programs_fail",
        ("programs/failed", "programs/rows"),
        threshold=0.05,
        source="healthy runs: 0",
        message="{fraction:.0%} of the programs failed, and their episodes were left out.",
        advice=(
            "The log has the first traceback. A program that reaches a limit gets textenv.LimitReached, and may "
            "catch it."
        ),
        check=signs.programs_fail,
    ),
    Rule(
        "tool_calls_fail",
        ("tools/calls", "tools/errors"),
        threshold=0.5,
        source="half of the calls are then lost",
        message="{fraction:.0%} of the calls of tools still fail at the end of the run.",
        advice="Show the format of a call in the prompt, or train first on examples of it (algos.finetuning.sft).",
        check=signs.tool_calls_fail,
    ),
    Rule(
        "actions_unreadable",
        ("reward/log/unreadable",),
        threshold=0.5,
        source="half of the turns are then lost",
        message="{value:.0%} of the answers still name no action of the environment at the end of the run.",
        advice=(
            'Allow nothing but the words of actions: leave actions="free" out, or give the words, actions=["left", '
            '"right"]. Where free text is wanted, name the actions in the instructions, or train on examples first '
            "(algos.finetuning.sft)."
        ),
        check=signs.actions_unreadable,
    ),
    Rule(
        "symbols_as_pixels",
        ("config.json",),
        threshold=signs.SYMBOLIC_SIDE,
        source="docs/results/worlds.md: MiniGrid-DoorKey ends at .34 and .30 so, at .96 with images 25 times as bright",
        message=(
            "{policy} reads images of {shape} that hold numbers of objects, colours and states (at most 10) as "
            "brightness of 255: its input is nearly black."
        ),
        advice=(
            "Leave --wrapper and --policy out: the preset reads the numbers by an MLP (FlatObsWrapper, normalized). "
            "Or render pixels: RGBImgPartialObsWrapper before ImgObsWrapper."
        ),
        check=signs.symbols_as_pixels,
    ),
    Rule(
        "normaliser_drifts",
        ("checkpoints",),
        threshold=1.5,
        source="published MuJoCo runs: at most .9; a counter of all steps: 1.8",
        message=(
            "The observations have not settled: those between the two newest checkpoints lie {distance:.2g} "
            "standard deviations from the mean of all before, in column {column}. So the same state looks different "
            "to the policy later."
        ),
        advice=(
            "Is this a column that grows through the training, such as a clock or a counter? Leave it out or scale "
            "it. Otherwise train longer, or with normalize_observations=False."
        ),
        check=signs.normaliser_drifts,
    ),
    Rule(
        "logger_fails",
        ("log/failures",),
        threshold=1,
        source="healthy runs: none",
        message="A logger raised {failures} errors; metrics.jsonl has everything all the same.",
        advice="The log of the training shows the first error.",
        check=signs.logger_fails,
    ),
    Rule(
        "no_progress",
        (SCORE,),
        threshold=20,
        source=(
            "the fewest iterations; up to 2 standard errors between the thirds, and 4 between the tenths, count as "
            "noise"
        ),
        message=(
            "The mean return has not moved in {iterations} iterations: {first:.3g} in the first third, {last:.3g} "
            "in the last, with a standard error of {error:.2g}. No other rule says why."
        ),
        advice=(
            "Train longer, and try ten times the learning rate. Read what the policy does (algos sample, algos "
            "evaluate --video), and check the reward (algos check-reward) or the environment (algos check)."
        ),
        check=signs.no_progress,
        unless=CAUSES_OF_NO_PROGRESS,
    ),
)
"""All rules, in the order in which they are told."""
