"""DeepSpeed's keys outside of `zero_optimization`, and what becomes of them here.

From deepspeed 0.19.8 (runtime/config.py and the files that it reads), with older names that files
still have. tests/interop/deepspeed_names.txt lists its fields; a test holds this table to them.
"""

from __future__ import annotations

from tightfit.interop.deepspeed_zero_keys import ZERO_ENTRIES
from tightfit.interop.entries import Accepts, Entry, table_of

_SWITCH, _COUNT, _NUMBER = Accepts.SWITCH, Accepts.COUNT, Accepts.NUMBER
_TEXT, _BLOCK = Accepts.TEXT, Accepts.ANYTHING

_BATCH = (
    Entry("train_batch_size", _COUNT, "train_batch_size"),
    Entry("train_micro_batch_size_per_gpu", _COUNT, "per_device_train_batch_size"),
    Entry("gradient_accumulation_steps", _COUNT, "gradient_accumulation_steps"),
    Entry(
        "managed_gradient_accumulation",
        _SWITCH,
        here="accumulation is always the engine's",
        usual=(True,),
    ),
    Entry("gradient_clipping", _NUMBER, "max_grad_norm", "by the exact norm of all gradients"),
    Entry(
        "dataloader_drop_last",
        _SWITCH,
        here="the last step of a pass takes the samples that are left",
    ),
    Entry("steps_per_print", _NUMBER, "logging_steps"),
)

_OPTIMIZER = (
    Entry("optimizer.type", _TEXT, "optim"),
    Entry("optimizer.params.lr", _NUMBER, "learning_rate"),
    Entry("optimizer.params.betas", _BLOCK, "adam_beta1, adam_beta2"),
    Entry("optimizer.params.eps", _NUMBER, "adam_epsilon"),
    Entry(
        "optimizer.params.weight_decay",
        _NUMBER,
        "weight_decay",
        "of matrices; norms and biases have none, there it is whatever group the script made",
    ),
    Entry("optimizer.params.torch_adam", _SWITCH, here="the update is torch's fused AdamW"),
    Entry("optimizer.params.adam_w_mode", _SWITCH, here="decay is always AdamW's", usual=(True,)),
    Entry("optimizer.params.bias_correction", _SWITCH, here="always", usual=(True,), refused=True),
    Entry("optimizer.params.amsgrad", _SWITCH, here="leave it out", refused=True),
    Entry("optimizer.params.momentum", _NUMBER, here="SGD has none here", usual=(0,), refused=True),
    Entry("optimizer.params.nesterov", _SWITCH, here="SGD has no momentum here", refused=True),
    Entry("optimizer.params.dampening", _NUMBER, here="SGD has no momentum here"),
    Entry("optimizer.params.maximize", _SWITCH, here="the loss is made smaller", refused=True),
    Entry("optimizer.params.fused", _SWITCH, here="the update is always one fused pass"),
    Entry("optimizer.params.foreach", _SWITCH, here="the update is always one fused pass"),
    Entry(
        "optimizer.params.fp32_optimizer_states",
        _SWITCH,
        here="states are fp32 unless optim is an 8-bit one",
        usual=(True,),
        refused=True,
    ),
    Entry(
        "optimizer.params.max_grad_norm",
        _NUMBER,
        here="DeepSpeed does not clip by it either; gradient_clipping is its key",
    ),
    Entry(
        "optimizer.params.cuda_aware",
        _SWITCH,
        here="of 1-bit optimizers, which are not here",
    ),
    Entry("optimizer.legacy_fusion", _SWITCH, here="fusing is left to torch"),
)

_SCHEDULER = (
    Entry("scheduler.type", _TEXT, "lr_scheduler_type"),
    Entry("scheduler.params.warmup_max_lr", _NUMBER, "learning_rate", "the scheduler's wins there"),
    Entry("scheduler.params.warmup_num_steps", _COUNT, "warmup_steps"),
    Entry("scheduler.params.total_num_steps", _COUNT, "max_steps"),
    Entry(
        "scheduler.params.warmup_min_lr",
        _NUMBER,
        here="warmup begins at 0",
        usual=(0,),
    ),
    Entry("scheduler.params.warmup_min_ratio", _NUMBER, here="warmup begins at 0", usual=(0,)),
    Entry(
        "scheduler.params.warmup_type",
        _TEXT,
        here="the rate rises along a line, not a logarithm",
        usual=("linear",),
        words=("linear", "log"),
    ),
    Entry("scheduler.params.cos_min_ratio", _NUMBER, here="the cosine ends at 0", usual=(0,)),
    Entry("scheduler.params.last_batch_iteration", _NUMBER, here="a run goes on by `resume`"),
    *(
        Entry(f"scheduler.params.{name}", _BLOCK, here="of LRRangeTest and OneCycle")
        for name in (
            "lr_range_test_min_lr", "lr_range_test_step_size", "lr_range_test_step_rate",
            "lr_range_test_staircase", "cycle_min_lr", "cycle_max_lr", "decay_lr_rate",
            "cycle_first_step_size", "cycle_second_step_size", "cycle_first_stair_count",
            "cycle_second_stair_count", "decay_step_size", "cycle_momentum", "cycle_min_mom",
            "cycle_max_mom", "decay_mom_rate",
        )
    ),
)  # fmt: skip

_PRECISION = (
    Entry("fp16.enabled", _SWITCH, "precision", "parameters in fp16, fp32 masters"),
    Entry("fp16.auto_cast", _SWITCH, here="inputs are token numbers; nothing to cast"),
    *(
        Entry(f"fp16.{name}", _NUMBER, name)
        for name in (
            "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis",
            "min_loss_scale",
        )
    ),
    Entry(
        "fp16.consecutive_hysteresis",
        _SWITCH,
        here="overflows are forgiven with each doubling of the loss scale",
        usual=(False,),
    ),
    Entry(
        "fp16.fp16_master_weights_and_grads",
        _SWITCH,
        here="masters are fp32; leave it out",
        refused=True,
    ),
    Entry("fp16.opt_level", _TEXT, here="of Apex; parameters are fp16, masters fp32"),
    Entry("bf16.enabled", _SWITCH, "precision", "parameters in bf16, fp32 masters"),
    Entry("bf16.immediate_grad_update", _SWITCH, here="gradients add up as they are made"),
    Entry(
        "bf16.check_grad_overflow",
        _SWITCH,
        here="a step whose gradients are not finite updates nothing",
        usual=(True,),
    ),
    Entry(
        "bf16.bf16_master_weights_and_grads",
        _SWITCH,
        here="masters are fp32; optim_master: split keeps them in 2 bytes less, exactly",
        refused=True,
    ),
    Entry("bf16.bf16_optimizer_states", _SWITCH, here="take optim: adamw_8bit", refused=True),
    Entry("bf16.auto_cast", _SWITCH, here="inputs are token numbers; nothing to cast"),
    Entry(
        "torch_autocast.enabled",
        _SWITCH,
        "precision",
        "no autocast: parameters are in 16 bits themselves, with fp32 masters",
    ),
    Entry("torch_autocast.dtype", _TEXT, "precision"),
    Entry(
        "torch_autocast.lower_precision_safe_modules",
        _BLOCK,
        here="all layers compute in the job's precision",
    ),
    Entry(
        "data_types.grad_accum_dtype",
        _TEXT,
        here="in which type gradients add up is no key of a job",
    ),
    Entry("data_types.param_dtype", _TEXT, here="parameters have the job's precision"),
    Entry("data_types.buffer_dtype", _TEXT, here="buffers keep the model's own type"),
    Entry("data_types.keep_in_fp32_modules", _BLOCK, here="as the model's class says"),
    Entry("amp", _BLOCK, here="Apex is gone from DeepSpeed too; set bf16 or fp16", refused=True),
)  # fmt: skip

_AIO = "the disk is read and written by a pipeline of our own, with O_DIRECT and tuned sizes"

_OFFLOAD_IO = (
    *(
        Entry(f"aio.{name}", _NUMBER, here=_AIO)
        for name in ("block_size", "queue_depth", "intra_op_parallelism", "thread_count")
    ),
    *(Entry(f"aio.{name}", _SWITCH, here=_AIO) for name in ("single_submit", "overlap_events")),
    Entry("aio.use_gds", _SWITCH, here="reads go through pinned host memory, not to the card"),
)

_CHECKPOINTING = (
    Entry(
        "activation_checkpointing.cpu_checkpointing",
        _SWITCH,
        "gradient_checkpointing, offload_activations",
        "here for any model; there for those that call deepspeed.checkpointing",
    ),
    Entry(
        "activation_checkpointing.partition_activations",
        _SWITCH,
        here="tensor-parallel ranks each keep a layer's whole input",
    ),
    Entry(
        "activation_checkpointing.contiguous_memory_optimization",
        _SWITCH,
        here="one slab of the exact size holds what waits on the host",
    ),
    Entry(
        "activation_checkpointing.number_checkpoints",
        _COUNT,
        here="each layer is one; gradient_checkpointing: selective is every second",
    ),
    Entry(
        "activation_checkpointing.synchronize_checkpoint_boundary",
        _SWITCH,
        here="nothing waits that need not",
    ),
    Entry(
        "activation_checkpointing.profile",
        _SWITCH,
        here="memory and time are in the run's report anyway",
    ),
    *(
        Entry(
            f"activation_checkpointing.{name}", kind, here="another name of DeepSpeed's old files"
        )
        for name, kind in (("partitioned_activations", _SWITCH), ("enabled", _SWITCH))
    ),
)

_COMMUNICATION = (
    Entry(
        "communication_data_type",
        _TEXT,
        here="gradients travel in the parameters' own type",
        words=("fp32", "fp16", "bf16"),
    ),
    Entry(
        "seq_parallel_communication_data_type",
        _TEXT,
        here="there are no sequence-parallel ranks",
        usual=("fp32",),
    ),
    Entry(
        "prescale_gradients",
        _SWITCH,
        here="losses are over the global batch's tokens, so sums need no factor",
    ),
    Entry(
        "gradient_predivide_factor",
        _NUMBER,
        here="losses are over the global batch's tokens, so sums need no factor",
        usual=(1,),
    ),
    Entry(
        "gradient_allreduce_op",
        _TEXT,
        here="gradients are those of the mean over all tokens; raise the learning rate instead",
        usual=("mean",),
        refused=True,
    ),
    Entry("disable_allgather", _SWITCH, here="shards are gathered", refused=True),
    Entry("sparse_gradients", _SWITCH, here="gradients of embeddings are dense"),
    Entry("sequence_parallel_size", _COUNT, here="leave it out", usual=(1,), refused=True),
    Entry(
        "use_data_before_expert_parallelism",
        _SWITCH,
        here="experts are shared out like any parameter",
    ),
    Entry("expert_parallel", _BLOCK, here="experts are shared out by zero_stage", refused=True),
    Entry("tensor_parallel.autotp_size", _COUNT, "tensor_parallel_size"),
    Entry("tensor_parallel.tp.tp_size", _COUNT, "tensor_parallel_size"),
    *(
        Entry(
            f"tensor_parallel.{name}",
            _BLOCK,
            here="layers are shared out by the model's own plan in transformers",
        )
        for name in (
            "tp.tp_grain_size", "tp.mpu", "tp.tp_group", "dtype", "tp_overlap_comm",
            "vocab_parallel_lm_head", "vocab_parallel_ce_backend", "injection_policy_tuple",
            "partition_config", "preset_model", "keep_module_on_host", "kernel_inject",
        )
    ),
    Entry("pipeline.stages", _COUNT, "pipeline_parallel_size"),
    *(
        Entry(f"pipeline.{name}", _BLOCK, here="pipeline_layers cuts the model")
        for name in (
            "partition", "seed_layers", "activation_checkpoint_interval", "pipe_partitioned",
            "grad_partitioned", "use_reentrant",
        )
    ),
)  # fmt: skip

_REPORT = "the log is trainer_log.jsonl, the report report.json, both in output_dir"

_REPORTS = tuple(
    Entry(name, _BLOCK, here=_REPORT)
    for name in (
        "tensorboard", "wandb", "csv_monitor", "comet", "comms_logger", "flops_profiler",
        "wall_clock_breakdown", "memory_breakdown", "dump_state", "timers", "log_level",
    )
)  # fmt: skip

_OTHERS = (
    Entry(
        "zero_allow_untested_optimizer",
        _SWITCH,
        here="every optimizer that is here shards",
    ),
    Entry(
        "zero_force_ds_cpu_optimizer",
        _SWITCH,
        here="states off the device are updated by the host, a chunk in the cache at a time",
    ),
    Entry(
        "checkpoint",
        _BLOCK,
        here="checkpoints hold whole tensors, which any number of ranks reads",
    ),
    Entry(
        "datastates_ckpt", _BLOCK, here="checkpoints are written at once, under another name first"
    ),
    Entry("data_efficiency", _BLOCK, here="samples come in the order of the seed", refused=True),
    Entry("data_sampling", _BLOCK, here="samples come in the order of the seed", refused=True),
    Entry(
        "curriculum_learning",
        _BLOCK,
        here="samples come in the order of the seed",
        refused=True,
    ),
    Entry("random_ltd", _BLOCK, here="no tokens are dropped", refused=True),
    Entry("progressive_layer_drop", _BLOCK, here="no layers are dropped", refused=True),
    Entry("compile", _BLOCK, here="layers are not compiled"),
    Entry("graph_harvesting", _SWITCH, here="there are no CUDA graphs"),
    Entry("hybrid_engine", _BLOCK, here="of reinforcement learning; leave it out", refused=True),
    Entry("autotuning", _BLOCK, here="`tightfit plan` chooses without trial runs"),
    Entry("elasticity", _BLOCK, here="a run goes on with any number of ranks by `resume`"),
    Entry("compression_training", _BLOCK, here="leave it out", refused=True),
    Entry("quantize_training", _BLOCK, here="leave it out", refused=True),
    Entry("weight_quantization", _BLOCK, here="quantization_bit: 4 with adapters", refused=True),
    Entry("sparse_attention", _BLOCK, here="attention is the model's own", refused=True),
    Entry("eigenvalue", _BLOCK, here="leave it out", refused=True),
    Entry("nebula", _BLOCK, here="checkpoints are files in output_dir"),
    Entry("disable_python_gc", _SWITCH, here="garbage collection is Python's"),
    Entry("vocabulary_size", _COUNT, here="the model's own"),
    Entry("_tightfit", _BLOCK, here="remarks that tightfit has written"),
)

DEEPSPEED_TABLE = table_of(
    _BATCH,
    _OPTIMIZER,
    _SCHEDULER,
    _PRECISION,
    ZERO_ENTRIES,
    _OFFLOAD_IO,
    _CHECKPOINTING,
    _COMMUNICATION,
    _REPORTS,
    _OTHERS,
)
