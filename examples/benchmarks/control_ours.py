"""Our PPO by the protocol of the peers' scripts: one configuration, one line ``JSON {...}``.

PYTHONPATH=../shared/peers/control python examples/benchmarks/control_ours.py --config fast --mode train --timeout 5
"""

import common  # the peers': it pins the process to one thread, and so comes before torch


def run(settings, options, meter):
    """Train until the meter has what it came for.

    Args:
        settings: hyper-parameters, as in the peers' ``common.CONFIGS``.
        options: of the command line.
        meter: counts steps and episodes, and ends the run by an exception.
    """
    import gymnasium

    from algos import PPO, MLPPolicy, PPOConfig
    from algos.training.metrics import EpisodeMeter

    env = gymnasium.make_vec("CartPole-v1", num_envs=settings["n_envs"])
    policy = MLPPolicy(env.single_observation_space, env.single_action_space, seed=options.seed)
    agent = PPO(
        env,
        policy,
        PPOConfig(
            num_steps=settings["n_steps"],
            minibatch_size=settings["minibatch"],
            num_epochs=settings["epochs"],
            learning_rate=settings["lr"],
            final_learning_rate=0.0 if settings["anneal_lr"] else None,
            gamma=settings["gamma"],
            gae_lambda=settings["lam"],
            clip_range=settings["clip"],
            final_clip_range=0.0 if settings["anneal_clip"] else None,
            ent_coef=settings["ent"],
            vf_coef=settings["vf"],
            clip_range_vf=settings["clip"] if settings["clip_vloss"] else None,
            max_grad_norm=settings["max_grad_norm"],
            normalize_advantage=settings["norm_adv"],
            seed=options.seed,
        ),
    )
    episodes = EpisodeMeter()

    def count(agent, rollout):
        meter.add(rollout["mask"].sum(), episodes.finished(rollout)[0])
        return {}

    meter.start()
    while options.mode == "rollout":  # values are the update's, which makes them all at once
        count(agent, agent.collect())
    while True:  # on from the schedule's end with another one, as Stable-Baselines3's script does
        agent.learn(settings["total"], diagnose=count)


if __name__ == "__main__":
    common.main("algos", common.CONFIGS, run)
