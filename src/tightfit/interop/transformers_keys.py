"""The fields of transformers' TrainingArguments, and what becomes of them here.

From transformers 5.24 (training_args.py), with those of version 4 that files still have. A test
holds the table to the fields of the version that is installed.
"""

from __future__ import annotations

from typing import Any

from tightfit.interop.entries import Accepts, Entry, table_of

_ANY = Accepts.ANYTHING

# Fields that a job has under the same name, or under one that `other_names` knows.
SAME = (
    "output_dir", "overwrite_output_dir", "per_device_train_batch_size", "num_train_epochs",
    "max_steps", "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps",
    "warmup_ratio", "optim",
    "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "gradient_accumulation_steps",
    "max_grad_norm", "label_smoothing_factor", "bf16", "fp16",
    "gradient_checkpointing", "activation_checkpointing",
    "logging_steps", "eval_strategy", "evaluation_strategy", "eval_steps",
    "per_device_eval_batch_size", "save_only_model", "save_strategy", "save_steps",
    "save_total_limit", "seed", "ddp_timeout", "resume_from_checkpoint",
    "per_gpu_train_batch_size", "per_gpu_eval_batch_size",
)  # fmt: skip

# What is taken for fields that a file leaves out, where a job's own default is another.
DEFAULTS: dict[str, Any] = {
    "logging_steps": 500,
    "per_device_eval_batch_size": 8,
    "save_strategy": "steps",
}

_NOTES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "average_tokens_across_devices": ("losses are always over the global batch's tokens", (True,)),
    "bf16_full_eval": ("evaluation has the job's precision", ()),
    "fp16_full_eval": ("evaluation has the job's precision", ()),
    "tf32": ("torch's setting is left alone", ()),
    "activation_checkpointing_kwargs": ("each layer is one; never reentrant", ()),
    "gradient_checkpointing_kwargs": ("each layer is one; never reentrant", ()),
    "torch_compile": ("layers are not compiled", ()),
    "torch_compile_backend": ("layers are not compiled", ()),
    "torch_compile_mode": ("layers are not compiled", ()),
    "torchdynamo": ("layers are not compiled", ()),
    "jit_mode_eval": ("layers are not compiled", ()),
    "use_liger_kernel": ("loss: chunked or sliced keeps the logits from being there at once", ()),
    "liger_kernel_config": ("loss: chunked or sliced keeps the logits small", ()),
    "use_cache": ("no cache is kept in training", ()),
    "torch_empty_cache_steps": ("the bill knows what the allocator holds back", ()),
    "auto_find_batch_size": ("the planner finds it before anything runs", ()),
    "logging_strategy": ("the log has a line every logging_steps", ("steps",)),
    "logging_first_step": ("the log has a line every logging_steps", ()),
    "logging_nan_inf_filter": ("a loss that is no number is shown as it is", (True,)),
    "logging_dir": ("the log is trainer_log.jsonl in output_dir", ()),
    "log_on_each_node": ("rank 0 alone prints", ()),
    "log_level": ("there are no levels", ("passive",)),
    "log_level_replica": ("there are no levels", ("warning",)),
    "include_num_input_tokens_seen": ("the log has tokens per second", ("no",)),
    "include_tokens_per_second": ("the log has it", (True,)),
    "disable_tqdm": ("there is no bar where nobody watches", ()),
    "report_to": ("the log is trainer_log.jsonl in output_dir", ("none", ["none"])),
    "run_name": ("a run is its output_dir", ()),
    "project": ("a run is its output_dir", ("huggingface",)),
    "eval_delay": ("evaluations begin before the first step", (0,)),
    "eval_on_start": ("evaluation before the first step is always there", (True,)),
    "prediction_loss_only": ("evaluation is the loss", (True,)),
    "eval_do_concat_batches": ("evaluation is the loss", (True,)),
    "eval_use_gather_object": ("evaluation is the loss", ()),
    "eval_accumulation_steps": ("evaluation keeps no logits", ()),
    "include_for_metrics": ("evaluation is the loss", ()),
    "include_inputs_for_metrics": ("evaluation is the loss", ()),
    "batch_eval_metrics": ("evaluation is the loss", ()),
    "metric_for_best_model": ("the last model is kept", ("loss",)),
    "greater_is_better": ("the last model is kept", ()),
    "save_on_each_node": ("output_dir is one folder that all machines see", ()),
    "save_safetensors": ("checkpoints are safetensors", (True,)),
    "enable_jit_checkpoint": ("Ctrl-C and SIGTERM finish the step and save", ()),
    "ignore_data_skip": ("a run goes on where the data was", ()),
    "restore_callback_states_from_checkpoint": ("there are no callbacks", ()),
    "full_determinism": ("the order of samples and of sums depends on the seed alone", ()),
    "data_seed": ("seed is of the data too", ()),
    "use_cpu": ("a CPU trains where there is no card", ()),
    "no_cuda": ("a CPU trains where there is no card", ()),
    "accelerator_config": ("a batch is dealt to the ranks in turn", ()),
    "dataloader_drop_last": ("the last step of a pass takes the samples that are left", ()),
    "dataloader_num_workers": ("samples are tokens in memory; nothing waits for workers", (0,)),
    "dataloader_pin_memory": ("samples are tokens in memory", (True,)),
    "dataloader_persistent_workers": ("there are no workers", ()),
    "dataloader_prefetch_factor": ("there are no workers", ()),
    "dataloader_multiprocessing_context": ("there are no workers", ()),
    "dataloader_in_order": ("there are no workers", (True,)),
    "remove_unused_columns": ("other columns of a row are not read", (True,)),
    "label_names": ("labels are the tokens themselves", ()),
    "length_column_name": ("lengths are counted", ("length",)),
    "train_sampling_strategy": ("samples come in the order of the seed", ("random",)),
    "ddp_find_unused_parameters": ("a parameter without gradient is not updated", ()),
    "ddp_bucket_cap_mb": ("gradients are summed in their place", ()),
    "ddp_broadcast_buffers": ("each rank reads its own parts of the files", ()),
    "ddp_static_graph": ("nothing of the graph is kept", ()),
    "ddp_backend": ("NCCL on cards, gloo on CPUs", ("nccl",)),
    "debug": ("", ("", [])),
    "skip_memory_metrics": ("memory is measured by the run itself", (True,)),
    "do_train": ("`tightfit train` trains", ()),
    "do_eval": ("eval_dataset or val_size evaluate", ()),
    "do_predict": ("sample_prompt answers a question before and after", ()),
    "local_rank": ("the launcher's variables say it", (-1, 0)),
    "half_precision_backend": ("parameters are in 16 bits themselves", ("auto",)),
    "fp16_backend": ("parameters are in 16 bits themselves", ("auto",)),
    "fp16_opt_level": ("parameters are in 16 bits themselves", ("O1",)),
    "past_index": ("no cache is kept in training", (-1,)),
    "trackio_space_id": ("the log is trainer_log.jsonl in output_dir", ("trackio",)),
    "trackio_bucket_id": ("the log is trainer_log.jsonl in output_dir", ()),
    "trackio_static_space_id": ("the log is trainer_log.jsonl in output_dir", ()),
    "dispatch_batches": ("a batch is dealt to the ranks in turn", ()),
    "split_batches": ("a batch is dealt to the ranks in turn", ()),
    "tpu_num_cores": ("there are no TPUs here", ()),
    "tpu_metrics_debug": ("there are no TPUs here", ()),
    "mp_parameters": ("of another cloud's own library", ("",)),
    "ray_scope": ("no trials are run", ("last",)),
    "use_ipex": ("kernels are torch's", ()),
    "use_mps_device": ("cards are those of CUDA and ROCm", ()),
    "optim_args": ("an optimizer's numbers are keys of the job", ()),
    "sortish_sampler": ("samples come in the order of the seed", ()),
    "predict_with_generate": ("sample_prompt answers a question before and after", ()),
    "generation_max_length": ("max_new_tokens says it", ()),
    "generation_num_beams": ("answers are greedy", (1,)),
    "generation_config": ("answers are greedy", ()),
    "fsdp_min_num_params": ("every decoder layer is a group of its own", (0,)),
    "fsdp_transformer_layer_cls_to_wrap": ("every decoder layer is a group of its own", ()),
    **dict.fromkeys(
        ("hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push",
         "hub_revision", "push_to_hub_model_id", "push_to_hub_organization",
         "push_to_hub_token"),
        ("upload output_dir with `hf upload`", ("every_save",)),
    ),
}  # fmt: skip

_REFUSED = {
    "neftune_noise_alpha": "leave it out",
    "push_to_hub": "upload output_dir with `hf upload`",
    "load_best_model_at_end": "the last model is kept; leave it out",
    "group_by_length": "samples come in the order of the seed; leave it out",
    "optim_target_modules": "of GaLore and APOLLO; leave it out",
    "adafactor": "say optim: adafactor",
    "parallelism_config": "say tensor_parallel_size and data_parallel_replicas",
}

TRANSFORMERS_TABLE = table_of(
    tuple(Entry(name, _ANY, name) for name in SAME),
    tuple(Entry(name, _ANY, here=here, usual=usual) for name, (here, usual) in _NOTES.items()),
    tuple(
        Entry(name, _ANY, here=here, usual=(0, 0.0, "{}", ""), refused=True)
        for name, here in _REFUSED.items()
    ),
    (
        Entry("deepspeed", _ANY, "all that DeepSpeed's keys say", "read as a ds_config.json"),
        Entry("fsdp", _ANY, "zero_stage, offload_param, offload_optimizer"),
        Entry("fsdp_config", _ANY, "all that FSDP's keys say", "read only where fsdp is on"),
    ),
)
