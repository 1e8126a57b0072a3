"""Names of other libraries, and former names of ours: what each is called here, or what to do instead.

Covered are the arguments and methods of Stable-Baselines3 2.9, the arguments of CleanRL's PPO, DQN and SAC, the
configs and trainers of TRL 0.7 to 1.16 with the arguments of `transformers` that they inherit, and the settings of
verl 0.9. `tests/textenv/test_foreign.py` walks them: each is in a table of this file, or a name of ours.

In the tables, names that have the same entry are in one text, with spaces between them.
"""

from collections.abc import Mapping


def _by_name(entries: Mapping[str, str]) -> dict[str, str]:
    """Return the entry of each name, where a key has several names."""
    return {name: entry for names, entry in entries.items() for name in names.split()}


_THEIR_NAMES = {
    # Scores of rewards
    "score": "earned",
    # The length of a training, rollouts and minibatches
    "total_steps": "total_timesteps timesteps",
    "num_steps": "n_steps train_freq train_frequency",
    "num_envs": "n_envs",
    "num_episodes": "episodes max_episodes n_eval_episodes generation_batch_size gen_batch_size n_eval val_batch_size",
    "group_size": "num_generations rloo_k rollout_n n_samples_per_prompt",
    "max_refills": "filter_groups",
    "minibatch_size": "batch_size mini_batch_size per_device_train_batch_size local_mini_batch_size",
    "micro_batch_size": "backward_batch_size ppo_micro_batch_size ppo_micro_batch_size_per_gpu",
    "num_epochs": "epochs n_epochs num_ppo_epochs ppo_epochs update_epochs",
    # The optimizer
    "learning_rate": "lr",
    "value_learning_rate": "vf_lr",
    "adam_eps": "adam_epsilon eps",
    "adam_betas": "betas",
    "warmup_ratio": "warmup lr_warmup_steps_ratio",
    "max_grad_norm": "grad_clip clip_grad",
    # The losses
    "clip_range": "clip_coef clip_eps eps_clip cliprange clip_ratio clip_ratio_low epsilon",
    "clip_higher": "clip_ratio_high epsilon_high",
    "clip_range_vf": "cliprange_value value_clip_range",
    "ent_coef": "entropy_coef entropy_coeff entropy_coefficient",
    "vf_coef": "value_coefficient",
    "gae_lambda": "lam",
    "gamma": "discount",
    "normalize_advantage": "norm_adv whiten_advantages",
    "normalize_rewards": "norm_reward",
    "scale_by_std": "scale_rewards norm_adv_by_std_in_grpo",
    "scale_by_std normalize_advantage": "normalize_advantages",
    "aggregation": "loss_type loss_agg_mode",
    "policy_loss": "importance_sampling_level loss_mode",
    "normalize_each_reward": "multi_objective_aggregation",
    "max_importance_weight": "vllm_importance_sampling_clip_max vllm_importance_sampling_cap rollout_is_threshold",
    "importance_weights": "vllm_importance_sampling_mode rollout_is rollout_rs tis_ratio_type",
    # The KL
    "kl_coef": "beta init_kl_coef kl_coefficient",
    "coef": "coefficient",
    "estimator": "kl_estimator kl_loss_type",
    # DQN
    "final_exploration": "exploration_final_eps end_e",
    "exploration_fraction": "exploration_share",
    "target_update_gradient_steps": "target_every",
    # SAC and TD3
    "target_rate": "tau",
    "policy_delay": "policy_frequency",
    "target_noise": "target_policy_noise",
    "target_noise_clip": "noise_clip",
    "exploration_noise": "action_noise",
    # Runs
    "run_dir": "output_dir log_dir log_path default_local_dir exp_name run_name experiment_name tensorboard_log",
    "loggers logger": "report_to log_with track",
    "progress": "verbose progress_bar",
    "checkpoint_every": "save_steps save_freq",
    "resume": "reset_num_timesteps resume_from_checkpoint resume_from_path",
    "callbacks": "callback",
    "every": "eval_freq",
    "eval_every every": "eval_steps test_freq",
    # Environments, prompts and rewards
    "env": "env_id eval_env",
    "wrappers wrapper": "wrapper_class",
    "max_new_tokens": "max_completion_length response_length max_response_length",
    "max_prompt_tokens": "max_prompt_length prompt_length",
    "reward": "reward_funcs reward_fn_key",
    "prompts": "dataset_name query_dataset train_files",
    "prompts examples": "train_dataset",
    "eval_prompts": "eval_dataset val_files",
    "prompt_column": "prompt_key dataset_text_field",
    "max_turns": "max_assistant_turns max_tool_calling_iterations",
    "stop": "stop_token stop_token_id",
    "annotator": "asker",
    "fallback": "otherwise",
    "held_out_fraction": "held_out_share",
    "fraction": "share",
    # Models and policies
    "model": "model_name_or_path model_name sft_model_path model_path",
    "hidden": "net_arch hidden_sizes",
    "normalize_observations": "norm_obs",
    "lora": "peft_config",
    "tokenizer": "processing_class",
    "dtype": "torch_dtype",
    "autocast": "bf16 fp16",
    "gradient_checkpointing": "activation_checkpointing",
}  # fmt: skip
RENAMED: Mapping[str, tuple[str, ...]] = {
    theirs: tuple(ours.split()) for ours, their_names in _THEIR_NAMES.items() for theirs in their_names.split()
}
"""Our names for a foreign or former one. Of several, the first one counts that is known where the name was written."""

PLACES: Mapping[str, str] = _by_name({
    "total_steps run_dir progress callbacks loggers checkpoint_every resume on_iteration": "an argument of agent.learn",
    "num_envs max_new_tokens max_prompt_tokens max_turns stop prompts reward eval_prompts prompt_column wrappers "
    "tokenizer":
        "an argument of the environment (gymnasium.make_vec, TextVectorEnv)",
    "temperature hidden normalize_observations autocast dtype lora gradient_checkpointing top_k top_p":
        "an argument of the policy (LMPolicy.load, MLPPolicy)",
    "model": "the first argument of LMPolicy.load",
    "kl_coef": "an argument of the agent: PPO(env, policy, kl_coef=0.05)",
    "device": 'an argument of the agent: PPO(env, policy, device="auto")',
    "coef estimator": "an argument of KLPenalty",
    "env": "the first argument, a vector environment",
    "every": "an argument of EvaluateEvery",
    "num_episodes": "a field of the config, and an argument of evaluate",
    "examples": "the second argument of sft",
})  # fmt: skip
"""Where our name is written, in Python; others are fields of an algorithm's config."""

ADVICE: Mapping[str, str] = _by_name({
    # Numbers of something else, and switches where we have a number
    "num_minibatches num_mini_batches":
        "minibatch_size is the size of one minibatch: the rollout's number of steps (text: answers) divided by theirs",
    "train_batch_size": "num_episodes is the number of answers of an iteration: prompts times answers for each",
    "ppo_mini_batch_size": "minibatch_size counts answers: prompts times answers for each",
    "target_network_frequency target_update_interval":
        "target_update_gradient_steps counts optimizer steps, not steps of the environment",
    "anneal_lr": "final_learning_rate=0.0 lets the learning rate fall to 0, None (the default) leaves it",
    "clip_vloss": "clip_range_vf=0.2 clips the value loss, None (the default) does not",
    "kl_loss_coef":
        'penalty=KLPenalty(policy.reference(), β, "k3", place="loss") charges the KL in the loss, kl_coef=β in the '
        'reward',
    # Lengths that are counted in another way
    "steps": "num_steps are the steps of a slot in a rollout, and learn(total_steps) is the length of the training",
    "max_steps":
        "the length of the training is learn(total_steps), in sampled tokens (text) or actions (control), not in "
        "optimizer steps",
    "num_train_epochs":
        "the length of the training is learn(total_steps), in sampled tokens (text) or actions (control), not in "
        "passes over the prompts",
    "total_epochs": "the length of the training is learn(total_steps), not in passes over the prompts",
    "total_training_steps": "the length of the training is learn(total_steps), not in optimizer steps",
    "num_iterations":
        "GRPO's passes over a rollout are num_epochs; the number of iterations follows from learn(total_steps)",
    "steps_per_generation": "an iteration has num_epochs * num_episodes / minibatch_size optimizer steps",
    "gradient_accumulation_steps":
        "minibatch_size is what an optimizer step learns from, and micro_batch_size what one backward pass takes",
    "warmup_steps lr_warmup_steps": "warmup_ratio is the fraction of the training in which the learning rate rises",
    "lr_scheduler_type warmup_style":
        "the learning rate is linear, from learning_rate to final_learning_rate, after warmup_ratio",
    "lr_scheduler_kwargs": "the learning rate is linear, from learning_rate to final_learning_rate",
    "min_lr_ratio": "final_learning_rate is where the learning rate ends",
    "adam_beta1 adam_beta2": "adam_betas=(0.9, 0.999) has both",
    # What is made before the agent
    "policy_kwargs":
        "make the policy yourself: PPO(env, MLPPolicy(env.single_observation_space, env.single_action_space, "
        "hidden=(64, 64)))",
    "model_init_kwargs": "give them to LMPolicy.load(name, dtype=...)",
    "num_envs": "the environment has it: gymnasium.make_vec(id, num_envs=8), TextVectorEnv(..., num_envs=64)",
    "temperature": "the policy has it, for sampling, scoring and the reference: LMPolicy.load(name, temperature=0.7)",
    "top_k": "the policy has it, for sampling, scoring and the reference: LMPolicy.load(name, top_k=...)",
    "top_p": "the policy has it, for sampling, scoring and the reference: LMPolicy.load(name, top_p=...)",
    "model": "make the policy of it: PPO(env, LMPolicy.load(name))",
    "policy": "give a policy object as the second argument: PPO(env, policy)",
    "hidden": "the policy has it: MLPPolicy(observation_space, action_space, hidden=(64, 64))",
    "use_sde": "use a GSDEPolicy",
    "sde_sample_freq log_std_init": "GSDEPolicy has it",
    "lr_schedule": "the agent's config has it: learning_rate and final_learning_rate",
    "optimizer_kwargs": "the config has adam_eps, adam_betas and weight_decay",
    "features_extractor_class features_extractor_kwargs":
        "a network of your own is a policy of your own (docs/algorithms.md)",
    "activation_fn": "networks use tanh; another one is a policy of your own (docs/algorithms.md)",
    "env_kwargs": "gymnasium.make_vec(id, num_envs=8, **arguments) takes them",
    "wrapper_kwargs": "give functools.partial(Wrapper, **arguments) in wrappers=[...]",
    "vec_env_cls vec_env_kwargs": "make it yourself: gymnasium.vector.SyncVectorEnv or algos.SubprocessVectorEnv",
    "max_completion_length max_new_tokens": "the environment has it: TextVectorEnv(..., max_new_tokens=128)",
    "max_prompt_length": "the environment has it: TextVectorEnv(..., max_prompt_tokens=512)",
    "reward_funcs": "the environment has it: TextVectorEnv(..., reward=f), or reward=[f, g]",
    "reward_weights": "give each function with its weight: reward=Rewards([(f, 0.5), (g, 1.0)])",
    "reward_clip_range score_clip": "wrap the reward: textenv.rewards.clip(f, low, high)",
    "total_episodes": "the length of the training is learn(total_steps), in sampled tokens, not in answers",
    "reward_model reward_model_path": "the reward is RewardModel.load(path)",
    "use_score_norm": "wrap the reward: textenv.rewards.Normalize(f)",
    "use_score_scaling": "wrap the reward: textenv.rewards.Normalize(f, center=False)",
    "target kl_ctrl adap_kl_ctrl": "kl_coef=AdaptiveCoefficient(β, target=6.0) of the agent",
    "model_adapter_name ref_adapter_name":
        "LMPolicy takes a PeftModel, or lora=...; its reference() shares the base model",
    "log_with report_to track": 'agent.learn(..., run_dir=folder, loggers=["wandb"])',
    "world_size": "torchrun says how many processes train together",
    "missing_eos_penalty": 'add a reward: Rewards({"score": f, "unfinished": textenv.rewards.unfinished(1.0)})',
    "mask_truncated_completions": "let the reward return None where its argument terminated is False",
    "tools": "the environment has it: TextVectorEnv(..., tools=[f])",
    "chat_template_path": "set tokenizer.chat_template",
    "chat_template_kwargs apply_chat_template_kwargs":
        "the environment has it: TextVectorEnv(..., chat_template_kwargs={'enable_thinking': False})",
    "filter_overlong_prompts": "max_prompt_tokens of the environment; a longer prompt is an error",
    "truncation": "max_prompt_tokens of the environment; a longer prompt is an error, and is not cut",
    "delta clip_ratio_c": "policy_loss=functools.partial(dual_clipped_policy_loss, limit=...)",
    "ratio_threshold": 'policy_loss="thresholded_policy_loss"',
    "adv_estimator": "it is the class: PPO, GRPO, RLOO, REINFORCE or REINFORCEPlusPlus",
    "use_kl_in_reward": "kl_coef=β of the agent charges the KL in the reward",
    "use_kl_loss": 'penalty=KLPenalty(policy.reference(), β, "k3", place="loss") of the agent',
    "kl_penalty": 'penalty=KLPenalty(policy.reference(), β, estimator="k1") of the agent',
    "horizon": "AdaptiveCoefficient(..., gain=batch / horizon)",
    "beta":
        "kl_coef=β of the agent charges it in the reward, penalty=KLPenalty(policy.reference(), β, \"k3\", "
        "place=\"loss\") in the loss, as TRL's GRPO",
    "ref_model": "policy.reference() is made by the agent: kl_coef=β, or penalty=KLPenalty(reference, β)",
    "off_policy_mask_threshold": "policy_loss=functools.partial(opsm_policy_loss, threshold=...)",
    "vllm_importance_sampling_correction": 'importance_weights="sequence_mask"',
    "use_vllm": "generator=VLLM(policy, env) of the agent",
    "n": "GRPOConfig(group_size=...)",
    "name": "--generator vllm, in Python generator=VLLM(policy, env) of the agent",
    # The training and its runs
    "verbose": "agent.learn(..., progress=True) shows the training",
    "tensorboard_log logger": 'agent.learn(..., run_dir=folder, loggers=["tensorboard"])',
    "args": "the config is the third argument: GRPO(env, policy, config)",
    "callback": "agent.learn(..., callbacks=[...]) takes objects of algos.Callback, on_iteration=f a function",
    "callbacks": "agent.learn(..., callbacks=[...]) takes objects of algos.Callback",
    "save_model": "agent.learn(..., run_dir=folder) saves the agent, and algos.load(folder) reads its policy",
    "best_model_save_path load_best_model_at_end": "EvaluateEvery keeps the best agent in the run's folder best/",
    "metric_for_best_model": "EvaluateEvery keeps the agent with the best mean return in the run's folder best/",
    "capture_video": "algos evaluate RUN --video out.mp4",
    "upload_model push_to_hub hub_model_id hf_entity": 'algos.push_to_hub(folder, "user/name")',
    "hub_private_repo": 'algos.push_to_hub(folder, "user/name", private=True)',
    "hub_token": "log in with 'hf auth login', or set HF_TOKEN",
    "cuda": 'device="auto" of the agent',
    "use_cpu": "models stay on the CPU unless device= says otherwise",
    "eval_strategy": "agent.learn(..., callbacks=[EvaluateEvery(env, every=steps)])",
    "save_strategy": "agent.learn(..., run_dir=folder, checkpoint_every=steps)",
    "log_completions log_val_generations": "agent.learn(..., sample_every=10) writes samples.jsonl",
    "num_completions_to_print": "algos show RUN prints samples, and agent.learn(..., sample_every=10) writes them",
    "fsdp fsdp_config": "shard=True of the agent, under torchrun",
    "cursor": "use algos.Collector",
})  # fmt: skip
"""What to write instead of a name, in Python, where it has no name of ours or that name is not known."""

_N_STEP_RETURNS = "num_steps are the steps of a slot in a rollout; returns of n steps have no counterpart here"
_UPDATES = "updates_per_step is the number of optimizer steps for each stored step"
OF_CONFIG: Mapping[str, Mapping[str, str]] = {
    "DQNConfig": _by_name({
        "tau":
            "the target network is copied whole, every target_update_gradient_steps optimizer steps; a part of it has "
            "no counterpart here",
        "n_steps": _N_STEP_RETURNS,
    }),
    "SACConfig": _by_name({
        "ent_coef": "temperature is the reward for each nat of entropy, None (the default) learns it",
        "gradient_steps": _UPDATES,
        "n_steps": _N_STEP_RETURNS,
        "action_noise": "SAC explores by its policy; further noise has no counterpart here",
        "target_update_interval target_network_frequency":
            "the target networks move at each update, by target_rate; an interval has no counterpart here",
        "use_sde sde_sample_freq": "it is a policy, SACGSDEPolicy, on the command line --policy sac_gsde",
    }),
    "TD3Config": _by_name({
        "gradient_steps": _UPDATES,
        "n_steps": _N_STEP_RETURNS,
    }),
    "TRPOConfig": _by_name({
        "target_kl": "max_kl bounds the KL of an update, nats per step",
        "cg_max_steps": "conjugate_gradient_steps are the iterations for the natural gradient",
        "cg_damping": "damping is added to the diagonal of the KL's Hessian",
        "line_search_max_iter": "line_search_steps is the number of step sizes to try",
        "line_search_shrinking_factor": "line_search_factor is the ratio of a step size to the previous one",
        "n_critic_updates": "critic_epochs are the critic's passes over each rollout",
        "sub_sampling_factor": "all steps of a rollout count; a part of them has no counterpart here",
    }),
}  # fmt: skip
"""What to write instead of a name in one config, in Python and on the command line; before the other tables."""

FLAGS: Mapping[str, str] = _by_name({
    "describe":
        "a description of your own is an argument of the policy, --policy-kwargs '{\"describe\": "
        "\"file.py:function\"}', or of textenv/Words-v0, --env-kwargs",
    "history": "it is an argument of textenv/Words-v0: --env-kwargs '{\"env\": \"FrozenLake-v1\", \"history\": 1}'",
    "steps": "--total-steps is the length of the training, --config.num-steps the steps of a slot in a rollout",
    "max_steps":
        "--total-steps is the length of the training, in sampled tokens (text) or actions (control), not in optimizer "
        "steps",
    "num_train_epochs":
        "--total-steps is the length of the training, in sampled tokens (text) or actions (control), not in passes "
        "over the prompts",
    "total_episodes": "--total-steps is the length of the training, in sampled tokens, not in answers",
    "total_epochs": "--total-steps is the length of the training, not in passes over the prompts",
    "total_training_steps": "--total-steps is the length of the training, not in optimizer steps",
    "num_iterations":
        "GRPO's passes over a rollout are --config.num-epochs; the number of iterations follows from --total-steps",
    "verbose progress_bar progress": "the training is shown unless there is --quiet",
    "tensorboard_log": "--run-dir is the folder, and --logger tensorboard also writes for TensorBoard",
    "callback callbacks": "evaluations are --eval-every STEPS; callbacks of your own are for Python",
    "reward_weights": "give the weight with the function: --reward rewards.py:f=0.5 --reward rewards.py:g",
    "net_arch hidden hidden_sizes policy_kwargs": "--policy-kwargs '{\"hidden\": [64, 64]}'",
    "norm_obs normalize_observations": "--policy-kwargs '{\"normalize_observations\": true}'",
    "use_sde": "--policy gsde",
    "sde_sample_freq": "--policy gsde --policy-kwargs '{\"sde_sample_freq\": 4}'",
    "log_std_init": "--policy gsde --policy-kwargs '{\"log_std_init\": -1.0}'",
    "beta": "--kl-coef charges the KL in the reward; in the loss, as TRL's GRPO, it is for Python (KLPenalty)",
    "kl_loss_coef use_kl_loss": "--kl-coef charges the KL in the reward; in the loss it is for Python (KLPenalty)",
    "num_generations": "--algo grpo --config.group-size is the number of answers for each prompt",
    "use_kl_in_reward": "--kl-coef charges the KL in the reward",
    "adv_estimator": "it is --algo: ppo, grpo, rloo, reinforce_plus_plus, …",
    "env_kwargs": "--env-kwargs '{\"name\": value}'",
    "top_k top_p": "the policy has it: --policy-kwargs '{\"top_p\": 0.9}'",
    "use_vllm": "--generator vllm",
    "cuda": "--device auto",
    "use_cpu": "the CPU is the default; see --device",
    "track": "--logger wandb",
    "save_model": "a run always saves its agent, in --run-dir",
    "upload_model push_to_hub hub_model_id": "algos push RUN user/name",
    "deterministic": "it is for algos evaluate RUN --deterministic",
    "warmup_steps": "--config.warmup-ratio is the fraction of the training in which the learning rate rises",
    "lr_scheduler_type": "the rate is linear, from --config.learning-rate to --config.final-learning-rate",
    "gradient_accumulation_steps":
        "--config.minibatch-size is what an optimizer step learns from, --config.micro-batch-size what one backward "
        "pass takes",
    "missing_eos_penalty": "it is a reward of its own, a function in --reward rewards.py:f that reads terminated",
    "mask_truncated_completions": "let the reward return None where its argument terminated is False",
    "fsdp": "--shard, under torchrun",
    "log_completions": "--sample-every writes samples.jsonl; algos show RUN prints some",
})  # fmt: skip
"""What to write instead on the command line, where it differs from `ADVICE`."""

METHODS: Mapping[str, str] = _by_name({
    "export": "the policy is exported: agent.policy.export(\"policy.onnx\"), or algos export RUN policy.onnx",
    "predict": "the policy acts: agent.policy.predict(observation)",
    "load": "algos.load(folder) reads the policy of a saved agent, and agent.learn(..., resume=folder) continues a run",
    "from_pretrained": "LMPolicy.load(name) loads a model, algos.load(folder) the policy of a saved agent",
    "get_env": "agent.env is the environment",
    "earned": "a reward's Scores has score",
    "set_env": "agent.env is the environment, and may be replaced",
    "get_vec_normalize_env": "observations are normalized by the policy: MLPPolicy(..., normalize_observations=True)",
    "get_parameters": "agent.policy.state_dict()",
    "set_parameters":
        "policy.load_state_dict(state), then PPO(env, policy): DQN, SAC and TD3 copy the policy into their target "
        "networks when they are made",
    "set_random_seed": "the config has it: PPO(env, seed=1)",
    "set_logger logger": 'agent.learn(..., run_dir=folder, loggers=["tensorboard"])',
    "dump_logs": "each iteration is logged: agent.learn(..., run_dir=folder)",
    "collect_rollouts": "agent.collect() returns the next rollout",
    "train": "agent.learn(total_steps) trains; agent.update(rollout) is a single update",
    "policy_aliases": "a policy is an object: algos.policies has MLPPolicy, CNNPolicy, LSTMPolicy, …",
    "evaluate": "algos.evaluate(env, agent.policy)",
    "save_model": "agent.save(folder)",
    "save_pretrained": "agent.save(folder), whose folder policy/ is one of transformers",
    "push_to_hub": 'algos.push_to_hub(folder, "user/name")',
    "generate": "agent.policy.generate(prompts)",
    "generator": "agent.update_generator orders the minibatches; what writes the texts is agent.collector.generator",
    "model": "agent.policy is the policy, agent.policy.lm.model the model of transformers",
    "num_timesteps": "the history that learn returns has steps",
    "rollout_buffer": "agent.collect() returns a rollout",
    "observation_space": "agent.env.single_observation_space",
    "action_space": "agent.env.single_action_space",
    "n_envs": "agent.env.num_envs",
    "load_replay_buffer": "agent.learn(..., resume=folder) restores it with the run",
    "save_replay_buffer": "agent.learn(..., run_dir=folder, checkpoint_every=steps) saves it with the run",
})  # fmt: skip
"""What to write instead of an agent's attribute or method of another library."""

_WITHOUT_COUNTERPART = """
_init_setup_model abs accelerator_config accelerator_kwargs activation_checkpointing_kwargs agent
alpha async_save audio_key auto_find_batch_size autotune average_tokens_across_devices balance_batch
batch_eval_metrics bf16_full_eval cache_implementation calculate_entropy calculate_log_probs
calculate_sum_pi_squared callback_after_eval callback_on_new_best cast_lm_head_to_fp32 checkpoint
checkpoint_callback_class checkpoint_engine clip_cov_lb clip_cov_ratio clip_cov_ub compare_steps critic_warmup
cudagraph_capture_sizes custom_cls data_collator data_loader_seed data_parallel_size data_seed
dataloader_drop_last dataloader_in_order dataloader_multiprocessing_context dataloader_num_workers
dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor dataset_num_proc ddp_backend
ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph ddp_timeout debug deepspeed
default_hdfs_dir del_local_ckpt_after_load deterministic_eval disable_dropout disable_log_stats disable_tqdm
disaggregation do_eval do_predict do_sample do_train dro_beta ds3_gather_for_generation early_stopping enable
enable_chunked_prefill enable_jit_checkpoint enable_prefix_caching enable_rollout_routing_replay enforce_eager
engine_kwargs entropy_checkpointing entropy_coef_delta entropy_coef_max entropy_coef_min
entropy_from_logits_chunk_size entropy_from_logits_with_chunking entropy_target environment_factory
esi_redundant_time eval_accumulation_steps eval_delay eval_do_concat_batches eval_on_start
eval_use_gather_object expert_parallel_size exploration_initial_eps
filter_overlong_prompts_workers forward_batch_size forward_max_token_len_per_gpu fp16_full_eval
free_cache_engine freeze_vision_tower full_determinism full_std function_tool_path generation_kwargs
global_backward_batch_size global_batch_size gpu_memory_utilization gradient_checkpointing_kwargs
greater_is_better hub_always_push hub_revision hub_strategy ignore_data_skip ignore_eos image_key
image_patch_size include_for_metrics include_num_input_tokens_seen is_encoder_decoder is_peft_model kl_cov_ratio
label_names label_smoothing_factor layered_summon length_column_name liger_kernel_config load_format
local_batch_size local_rank local_rollout_forward_batch_size log_completions_hub_repo log_interval log_level
log_level_replica log_multimodal log_on_each_node log_prob_max_token_len_per_gpu log_prob_micro_batch_size
log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz log_unique_prompts logging_first_step
logging_nan_inf_filter logging_steps logging_strategy logprobs_mode loss_scale_factor max_actor_ckpt_to_keep
max_critic_ckpt_to_keep max_model_len max_num_batched_tokens max_num_seqs min_p mm_processor_kwargs mode
moe_load_balance_metrics_interval monitor_dir monitor_kwargs mtp multi_stage_wake_up multi_turn n_critics
n_gpus_per_node neftune_noise_alpha nnodes normalize_images num_cycles num_generations_eval
num_sample_generations num_total_batches optim optim_args optim_target_modules optimize_cuda_cache
optimize_device_cache optimize_memory_usage optimizer optimizer_class optimizer_impl optimizers ortho_init
over_sample_rate override_optimizer_config pad_to_length pad_to_multiple_of parallelism_config
per_device_eval_batch_size pf_ppo pipeline_model_parallel_size policy_kwargs_critic policy_lr
ppo_kl_coef ppo_max_token_len_per_gpu prediction_loss_only profiler project project_kwargs project_name
prometheus push_to_hub_if_best_kwargs q_lr qat quantization quantization_config quantization_config_file
ray_wait_register_center_timeout ref_model_mixup_alpha ref_model_sync_steps remove_unused_columns render
repetition_penalty replay_buffer_class replay_buffer_kwargs restore_callback_states_from_checkpoint resume_mode
return_episode_rewards return_full_prompt return_multi_modal_inputs return_raw_chat return_raw_input_ids
reward_processing_classes reward_threshold rms_prop_eps rollout_buffer_class rollout_buffer_kwargs
rollout_data_dir rollout_func router_aux_loss_coef router_config_path sapo_temperature_neg sapo_temperature_pos
save_on_each_node save_only_model save_total_limit scheduling_policy share_features_extractor shuffle
shuffle_dataset skip_memory_metrics skip_tokenizer_init squash_output start_e start_index stats_window_size
strategy sync_ref_model target_entropy task_name tau_neg tau_pos
tb_log_name tensor_model_parallel_size tf32 tool_config_path top_entropy_quantile torch_compile
torch_compile_backend torch_compile_mode torch_deterministic torch_empty_cache_steps trace tracker_kwargs
tracker_project_name trackio_bucket_id trackio_space_id trackio_static_space_id train_max_samples
train_sampling_strategy transformers_continuous_batching_config type ulysses_sequence_parallel_size
use_adaptive_entropy use_bias_correction_kl use_cache use_dynamic_bsz use_expln use_fused_kernels
use_liger_kernel use_pf_ppo use_prefix_grouper use_remove_padding use_rms_prop use_sde_at_warmup use_shm
use_torch_compile use_transformers_continuous_batching use_transformers_paged use_v1 v1 val_before_train
val_kwargs val_max_samples val_only validation_data_dir validation_shuffle vespo_k_neg vespo_k_pos
vespo_lambda_neg vespo_lambda_pos video_key vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_group_port
vllm_importance_sampling_clip_min vllm_max_model_length vllm_mode vllm_model_impl vllm_server_base_url
vllm_server_host vllm_server_port vllm_server_timeout vllm_structured_outputs_regex vllm_tensor_parallel_size
wandb_entity wandb_project_name warn zero_indexed_step
"""
NO_EQUIVALENT = frozenset(_WITHOUT_COUNTERPART.split())
"""Names of other libraries that have no counterpart here."""

MOVED: Mapping[str, str] = {
    "algos.Dynamics": "algos.lab.insight.dynamics.Dynamics",
    "algos.Logger": "algos.training.loggers.Logger",
    "algos.RecordSamples": "algos.training.callbacks.RecordSamples",
    "algos.curves": "algos.lab.comparison.figures.curves",
    "algos.plot_curves": "algos.lab.comparison.figures.plot_curves",
    "algos.plot_scores": "algos.lab.comparison.figures.plot_scores",
    "textenv.Annotator": "textenv.extras.human.Annotator",
    "textenv.BrowserAnnotator": "textenv.extras.human.BrowserAnnotator",
    "textenv.Conversation": "textenv.envs.task.Conversation",
    "textenv.FeedbackFile": "textenv.extras.human.FeedbackFile",
    "textenv.FeedbackStopped": "textenv.extras.human.FeedbackStopped",
    "textenv.FunctionTask": "textenv.envs.task.FunctionTask",
    "textenv.PromptList": "textenv.prompts.prompts.PromptList",
    "textenv.Question": "textenv.extras.human.Question",
    "textenv.RewardError": "textenv.rewards.scores.RewardError",
    "textenv.Scores": "textenv.rewards.scores.Scores",
    "textenv.StringGames": "textenv.envs.string_env.StringGames",
    "textenv.Task": "textenv.envs.task.Task",
    "textenv.TerminalAnnotator": "textenv.extras.human.TerminalAnnotator",
    "textenv.TokenEnv": "textenv.envs.string_env.TokenEnv",
    "textenv.Turn": "textenv.envs.turn.Turn",
    "textenv.k1": "textenv.kl.estimators.k1",
    "textenv.k2": "textenv.kl.estimators.k2",
    "textenv.k3": "textenv.kl.estimators.k3",
    "textenv.make_task": "textenv.tasks.builtin.make_task",
}
"""Present module and name of what the packages ``algos`` and ``textenv`` once had themselves."""


def our_names(name: str) -> tuple[str, ...]:
    """Return our names for a foreign or former one, the likeliest first; none if it was not renamed.

    Example:
        >>> our_names("n_steps"), our_names("report_to"), our_names("gamma")
        (('num_steps',), ('loggers', 'logger'), ())
    """
    return RENAMED.get(name, ())
