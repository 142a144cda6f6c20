"""LLaMA-Factory's own arguments, and what becomes of them here.

From llamafactory 0.9.5 (hparams/*_args.py); tests/interop/llamafactory_names.txt lists them. Those
of transformers' TrainingArguments, which its files have too, are in `transformers_keys.py`.
"""

from __future__ import annotations

from typing import Any

from tightfit.interop.entries import Accepts, Entry, table_of

_ANY = Accepts.ANYTHING

SAME = (
    "model_name_or_path", "finetuning_type", "quantization_bit", "lora_rank", "lora_alpha",
    "lora_dropout", "lora_target", "use_rslora", "use_dora", "additional_target", "eval_dataset",
    "val_size", "cutoff_len", "flash_attn", "max_new_tokens", "offload_folder", "master_addr",
    "master_port", "model_max_length", "resize_vocab", "rope_scaling",
)  # fmt: skip

_NOTES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "template": ("the model's own chat template is used", ("default",)),
    "dataset_dir": ("dataset is a file of rows, not a name in dataset_info.json", ("data",)),
    "mix_strategy": ("dataset is one file", ("concat",)),
    "interleave_probs": ("dataset is one file", ()),
    "overwrite_cache": ("rows are read anew each time", (True,)),
    "preprocessing_batch_size": ("rows are read in one pass", (1000,)),
    "preprocessing_num_workers": ("rows are read in one pass", ()),
    "streaming": ("rows are tokens in memory", ()),
    "buffer_size": ("rows are tokens in memory", (16384,)),
    "data_shared_file_system": ("every machine reads the file", ()),
    "tokenized_path": ("rows are read anew each time", ()),
    "eval_num_beams": ("answers are greedy", ()),
    "eval_on_each_dataset": ("eval_dataset is one file", ()),
    "ignore_pad_token_for_loss": ("padding is never trained", (True,)),
    "tool_format": ("the model's own chat template is used", ()),
    "default_system": ("a system message stands in the rows", ()),
    "enable_thinking": ("the model's own chat template is used", (True,)),
    "preserve_thinking": ("the model's own chat template is used", ()),
    "cache_dir": ("HF_HOME says it", ()),
    "use_fast_tokenizer": ("always", (True,)),
    "model_revision": ("the newest, or what is in the cache", ("main",)),
    "low_cpu_mem_usage": ("no rank ever holds the whole model", (True,)),
    "use_reentrant_gc": ("never reentrant", ()),
    "use_unsloth_gc": ("offload_activations is the same for any model", ()),
    "enable_liger_kernel": ("loss: chunked or sliced keeps the logits small", ()),
    "use_kv_cache": ("no cache is kept in training", (True,)),
    "infer_backend": ("of inference", ("hf", "huggingface")),
    "infer_dtype": ("of inference", ("auto",)),
    "compute_dtype": ("precision says it", ()),
    "device_map": ("the plan says it", ()),
    "print_param_status": ("`tightfit estimate` prints the counts", ()),
    "adapter_folder": ("adapters are in output_dir", ()),
    "quantization_method": ("bitsandbytes' kernels", ("bnb", "bitsandbytes")),
    "quantization_device_map": ("the plan says it", ()),
    "plot_loss": ("losses are in trainer_log.jsonl", ()),
    "compute_accuracy": ("evaluation is the loss", ()),
    "include_effective_tokens_per_second": ("the log has tokens per second", ()),
    "freeze_vision_tower": ("only the text part of a model is trained", (True,)),
    "freeze_multi_modal_projector": ("only the text part of a model is trained", (True,)),
    "trust_remote_code": ("code from a model folder is never run", ()),
    "create_new_adapter": ("adapters are always new", (True,)),
    "block_diag_attn": ("every sample is its own sequence", ()),
    "disable_shuffling": ("samples come in the order of the seed", ()),
    "do_sample": ("answers are greedy", (True,)),
    **dict.fromkeys(
        ("temperature", "top_p", "top_k", "num_beams", "max_length", "repetition_penalty",
         "length_penalty", "skip_special_tokens"),
        ("answers to sample_prompt are greedy", ()),
    ),
    **dict.fromkeys(
        ("hf_hub_token", "ms_hub_token", "om_hub_token"), ("HF_TOKEN says it", ())
    ),
    **dict.fromkeys(
        ("image_max_pixels", "image_min_pixels", "image_do_pan_and_scan", "crop_to_patches",
         "video_max_pixels", "video_min_pixels", "video_fps", "video_maxlen",
         "use_audio_in_video", "audio_sampling_rate", "media_dir"),
        ("only the text part of a model is trained", ()),
    ),
    **dict.fromkeys(
        ("export_dir", "export_size", "export_device", "export_quantization_bit",
         "export_quantization_dataset", "export_quantization_nsamples",
         "export_quantization_maxlen", "export_legacy_format", "export_hub_model_id"),
        ("of exporting: `tightfit merge ADAPTER OUTPUT_DIR`", ()),
    ),
    **dict.fromkeys(
        ("vllm_maxlen", "vllm_gpu_util", "vllm_enforce_eager", "vllm_max_lora_rank", "vllm_config",
         "sglang_maxlen", "sglang_mem_fraction", "sglang_tp_size", "sglang_config",
         "sglang_lora_backend"),
        ("of inference", ()),
    ),
    **dict.fromkeys(
        ("enable_torch_profiler", "profiler_output_dir", "profiler_wait_steps",
         "profiler_warmup_steps", "profiler_active_steps", "profiler_repeat",
         "profiler_record_shapes", "profiler_profile_memory", "profiler_with_stack",
         "profile_modules"),
        ("memory and time are in the run's report anyway", ()),
    ),
    **dict.fromkeys(
        ("use_swanlab", "swanlab_project", "swanlab_workspace", "swanlab_run_name", "swanlab_mode",
         "swanlab_api_key", "swanlab_logdir", "swanlab_lark_webhook_url", "swanlab_lark_secret",
         "ray_num_workers", "ray_init_kwargs", "ray_run_name", "ray_storage_path",
         "resources_per_worker", "placement_strategy"),
        ("the log is trainer_log.jsonl; ranks are started by tightfit, torchrun or srun", ()),
    ),
    **dict.fromkeys(
        ("galore_target", "galore_rank", "galore_update_interval", "galore_scale",
         "galore_proj_type", "galore_layerwise", "apollo_target", "apollo_rank",
         "apollo_update_interval", "apollo_scale", "apollo_proj", "apollo_proj_type",
         "apollo_scale_type", "apollo_layerwise", "apollo_scale_front", "badam_mode",
         "badam_start_block", "badam_switch_mode", "badam_switch_interval", "badam_update_ratio",
         "badam_mask_mode", "badam_verbose", "freeze_trainable_layers",
         "freeze_trainable_modules", "freeze_extra_modules", "oft_rank", "oft_block_size",
         "oft_target", "module_dropout", "loraplus_lr_embedding", "pissa_iter", "pissa_convert",
         "asft_alpha", "eaft_alpha", "hyper_parallel_args", "kt_weight_path",
         "kt_expert_checkpoint_path", "kt_use_lora_experts", "kt_lora_expert_num",
         "kt_lora_expert_intermediate_size", "fp8_backend",
         "fp8_enable_fsdp_float8_all_gather", "new_special_tokens_config",
         "init_special_tokens"),
        ("of a method that is off, or not here", ()),
    ),
    **dict.fromkeys(
        ("pref_beta", "pref_ftx", "pref_bco_weight", "pref_loss", "dpo_label_smoothing",
         "kto_chosen_weight", "kto_rejected_weight", "simpo_gamma", "ppo_buffer_size",
         "ppo_epochs", "ppo_score_norm", "ppo_target", "ppo_whiten_rewards", "ref_model",
         "ref_model_adapters", "ref_model_quantization_bit", "reward_model",
         "reward_model_adapters", "reward_model_quantization_bit", "reward_model_type",
         "ld_alpha"),
        ("of another stage than sft", ()),
    ),
    **dict.fromkeys(
        ("task", "task_dir", "batch_size", "lang", "n_shot", "save_dir", "download_mode"),
        ("of evaluation on public tasks, which is another program there too", ()),
    ),
}  # fmt: skip

_REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "max_samples": (
        "all rows of the file are taken: give dataset a file of that many rows "
        "(head -n N rows.jsonl > fewer.jsonl), and leave it out",
        (),
    ),
    "train_on_prompt": ("only answers are trained; leave it out", ()),
    "mask_history": ("all answers of a conversation are trained; leave it out", ()),
    "packing": ("every sample is its own sequence; leave it out", ()),
    "neat_packing": ("every sample is its own sequence; leave it out", ()),
    "adapter_name_or_path": ("merge the adapters into the model first (tightfit merge)", ()),
    "split_special_tokens": ("the tokenizer stays as it is", ()),
    "add_tokens": ("save the tokenizer with them, and say resize_vocab: true", ()),
    "add_special_tokens": ("save the tokenizer with them, and say resize_vocab: true", ()),
    "shift_attn": ("attention is the model's own", ()),
    "mixture_of_depths": ("layers are the model's own", ()),
    "use_unsloth": ("any model of transformers is trained as it is; leave it out", ()),
    "moe_aux_loss_coef": ("write it into the model's config.json", ()),
    "upcast_layernorm": ("parameters have one precision", ()),
    "upcast_lmhead_output": ("the loss is computed in fp32 anyway; leave it out", ()),
    "train_from_scratch": ("save a model with fresh weights first", ()),
    "use_v1_kernels": ("kernels are torch's", ()),
    "quantization_type": ("4 bits are NF4", ("nf4",)),
    "double_quantization": ("scales are quantised too", (True,)),
    "freeze_language_model": ("the text part of a model is trained", ()),
    "early_stopping_steps": ("a run has the steps that it was given", ()),
    "loraplus_lr_ratio": ("adapters have one learning rate", ()),
    "fp8": ("precision: bf16", ()),
    **dict.fromkeys(
        ("pissa_init", "use_galore", "use_apollo", "use_badam", "use_llama_pro",
         "use_adam_mini", "use_mca", "use_hyper_parallel", "use_muon", "use_dft_loss",
         "use_asft_loss", "use_eaft_loss", "use_kt"),
        ("leave it out", ()),
    ),
}  # fmt: skip

LLAMAFACTORY_TABLE = table_of(
    tuple(Entry(name, _ANY, name) for name in SAME),
    tuple(Entry(name, _ANY, here=here, usual=usual) for name, (here, usual) in _NOTES.items()),
    tuple(
        Entry(name, _ANY, here=here, usual=(*usual, 0, 0.0), refused=True)
        for name, (here, usual) in _REFUSED.items()
    ),
    (
        Entry(
            "stage",
            Accepts.TEXT,
            here="only supervised fine-tuning (sft) is",
            usual=("sft",),
            refused=True,
        ),
        Entry(
            "dataset",
            Accepts.TEXT,
            "dataset",
            "a file of rows; there it is a name in dataset_info.json",
        ),
        Entry(
            "pure_bf16",
            Accepts.SWITCH,
            "precision",
            "with fp32 masters, which LLaMA-Factory's pure_bf16 does without",
        ),
        Entry("disable_gradient_checkpointing", Accepts.SWITCH, "gradient_checkpointing"),
    ),
)
