"""Reads DeepSpeed's `ds_config.json`: what its values mean for a job.

The meaning is DeepSpeed's own (docs/config-json and runtime/config.py): what a file leaves out has
its default, not a job's. Other formats that stand for the same keys (accelerate) use it too.
"""

from __future__ import annotations

from typing import Any

from tightfit.errors import ConfigError
from tightfit.interop.deepspeed_keys import DEEPSPEED_TABLE
from tightfit.interop.documents import Document
from tightfit.interop.entries import entries_in, shown
from tightfit.interop.reading import Reading, Tool
from tightfit.interop.translation import Ranks, Translation

TOOL = "DeepSpeed"

_OPTIMIZERS = {
    "adam": "adamw",
    "adamw": "adamw",
    "fusedadam": "adamw",
    "deepspeedcpuadam": "adamw",
    "lion": "lion",
    "fusedlion": "lion",
    "sgd": "sgd",
}
_LEARNING_RATES = {"adamw": 1e-3, "lion": 1e-4, "sgd": 1e-3}  # of DeepSpeed's and torch's classes
_SCHEDULES = {
    "warmuplr": "constant_with_warmup",
    "warmupdecaylr": "linear",
    "warmupcosinelr": "cosine",
}
_PRECISIONS = {
    "bfloat16": "bf16", "bf16": "bf16", "torch.bfloat16": "bf16",
    "float16": "fp16", "fp16": "fp16", "half": "fp16", "torch.float16": "fp16",
    "float32": "fp32", "fp32": "fp32", "float": "fp32", "torch.float32": "fp32",
}  # fmt: skip
_ZERO = "zero_optimization"
_MOST_STEPS_PER_LINE = 2**31


def read_deepspeed(document: Document, ranks: Ranks) -> Reading:
    """The job's keys that a `ds_config.json` says.

    Raises:
        ConfigError: a key or value is unknown, or two contradict.
        UnsupportedError: it asks for what makes another run and cannot be had here.
    """
    content = dict(document.content)
    if isinstance(content.get("bfloat16"), dict) and "bf16" not in content:
        content["bf16"] = content.pop("bfloat16")  # its name before 0.4
        document = Document(document.name, content, document.lines)
    translation = Translation(entries_in(document, DEEPSPEED_TABLE, TOOL), ranks)
    mean_deepspeed(translation)
    check_batch(translation, document)
    translation.finish()
    return Reading.of(translation, document, "deepspeed", deepspeed_tool(translation))


def mean_deepspeed(translation: Translation) -> None:
    """Take DeepSpeed's keys and say what they mean; raises as `read_deepspeed`."""
    for key, own in (
        ("train_batch_size", "train_batch_size"),
        ("train_micro_batch_size_per_gpu", "per_device_train_batch_size"),
        ("gradient_accumulation_steps", "gradient_accumulation_steps"),
        ("tensor_parallel.autotp_size", "tensor_parallel_size"),
        ("tensor_parallel.tp.tp_size", "tensor_parallel_size"),
    ):
        if translation.take(key) != 0:  # 0 is off
            translation.copy(key, own)
    _pipeline(translation)
    _optimizer(translation)
    _scheduler(translation)
    _clipping(translation)
    _precision(translation)
    _stage(translation)
    _placement(translation)
    if translation.take("activation_checkpointing.cpu_checkpointing"):
        translation.become(
            "activation_checkpointing.cpu_checkpointing",
            gradient_checkpointing="true",
            offload_activations="true",
        )
    steps = translation.take("steps_per_print")
    if steps is not None and 1 <= steps < _MOST_STEPS_PER_LINE and steps == int(steps):
        translation.become("steps_per_print", logging_steps=int(steps))
    elif steps is not None:
        translation.say("steps_per_print", "", "every step has a line in the log")


def check_batch(translation: Translation, document: Document) -> None:
    """See that the three sizes of a batch agree.

    Raises:
        ConfigError: they do not, with the arithmetic.
    """
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    total, micro, steps = (
        found.value if (found := translation.found.get(name)) else None for name in names
    )
    for name, value in zip(names, (total, micro, steps), strict=True):
        if value == 0:
            raise ConfigError(f"{translation.found[name].place}: 0 is not accepted; 1 or more is")
    ranks = translation.ranks.data_parallel
    if not (isinstance(total, int) and isinstance(micro, int) and isinstance(steps, int)):
        return
    if total != micro * steps * ranks:
        fitting, rest = divmod(total, micro * steps)
        hint = f"; it holds for {fitting} ranks (num_gpus: {fitting})" if not rest else ""
        raise ConfigError(
            f"{document.where(names[0])} {total} != {micro} x {steps} x {ranks} "
            f"({names[1]} x {names[2]} x ranks){hint}"
        )


def _pipeline(translation: Translation) -> None:
    stages = translation.take("pipeline.stages")
    if stages:
        translation.become("pipeline.stages", pipeline_parallel_size=stages)


def _optimizer(translation: Translation) -> None:
    written = translation.take("optimizer.type")
    name = None if written is None else _OPTIMIZERS.get(written.casefold())
    if written is not None and name is None:
        known = ", ".join(("AdamW", "Adam", "Lion", "SGD"))
        raise translation.refuse(
            "optimizer.type", f"take one of {known}, or leave `optimizer` out and say optim"
        )
    if name is not None:
        translation.become("optimizer.type", _adam_is_adamw(translation, written), optim=name)
    translation.copy("optimizer.params.lr", "learning_rate")
    _betas(translation)
    translation.copy("optimizer.params.eps", "adam_epsilon")
    translation.copy("optimizer.params.weight_decay", "weight_decay")
    if name is not None and not translation.has("optimizer.params.lr"):
        translation.imply(
            f"{written} without lr has DeepSpeed's own", learning_rate=_LEARNING_RATES[name]
        )


def _adam_is_adamw(translation: Translation, written: str) -> str:
    """A note for Adam, whose decay is AdamW's unless the file says otherwise.

    Raises:
        UnsupportedError: it decays through the gradient.
    """
    modes = ("optimizer.params.adam_w_mode", "optimizer.params.torch_adam")
    is_w, is_torch = (translation.found.get(mode) for mode in modes)
    decay = translation.found.get("optimizer.params.weight_decay")
    coupled = (is_w is not None and is_w.value is False) or (
        written.casefold() == "adam" and is_torch is not None and is_torch.value is True
    )
    if coupled and decay is not None and decay.value:
        raise translation.refuse(
            "optimizer.params.weight_decay",
            "it goes through the gradient with these settings (L2); leave adam_w_mode and "
            "torch_adam out for AdamW's decay",
        )
    return "DeepSpeed's Adam is AdamW" if written.casefold() == "adam" else ""


def _betas(translation: Translation) -> None:
    key = "optimizer.params.betas"
    betas = translation.take(key)
    if betas is None:
        return
    if not (
        isinstance(betas, list)
        and len(betas) == 2
        and all(isinstance(beta, float | int) and not isinstance(beta, bool) for beta in betas)
    ):
        place = translation.found[key].place
        raise ConfigError(f"{place}: {shown(betas)} is not accepted; it must be two numbers")
    translation.become(key, adam_beta1=betas[0], adam_beta2=betas[1])


def _scheduler(translation: Translation) -> None:
    written = translation.take("scheduler.type")
    if written is None:
        if not translation.has("scheduler.type"):
            translation.imply(
                "without `scheduler` the learning rate is the training script's business; here "
                "lr_scheduler_type and warmup_steps are"
            )
        return
    name = _SCHEDULES.get(written.casefold())
    if name is None:
        raise translation.refuse(
            "scheduler.type",
            "take WarmupLR, WarmupDecayLR or WarmupCosineLR, or leave `scheduler` out and say "
            "lr_scheduler_type",
        )
    translation.become("scheduler.type", lr_scheduler_type=name)
    rate = translation.take("scheduler.params.warmup_max_lr")
    if rate is not None:
        translation.keys.pop("learning_rate", None)
        translation.become("scheduler.params.warmup_max_lr", learning_rate=rate)
    translation.copy("scheduler.params.warmup_num_steps", "warmup_steps")
    total = translation.take("scheduler.params.total_num_steps")
    if total:
        translation.become("scheduler.params.total_num_steps", max_steps=total)
    _what_warmup_leaves_out(translation, name)


def _what_warmup_leaves_out(translation: Translation, name: str) -> None:
    """DeepSpeed warms up over 1000 steps, along a logarithm, to 1e-3, unless told otherwise."""
    if not translation.has("scheduler.params.warmup_num_steps"):
        translation.imply("warmup_num_steps is 1000 where it is left out", warmup_steps=1000)
    if name != "cosine" and not translation.has("scheduler.params.warmup_max_lr"):
        translation.imply("warmup_max_lr is 1e-3 where it is left out", learning_rate=1e-3)
    if not translation.has("scheduler.params.warmup_type"):
        translation.imply("warmup_type is `log` where it is left out; here it is along a line")


def _clipping(translation: Translation) -> None:
    key = "gradient_clipping"
    limit = translation.take(key)
    if limit is not None:
        translation.become(key, max_grad_norm=max(0, limit))
    elif not translation.has(key):
        translation.imply("without gradient_clipping DeepSpeed does not clip", max_grad_norm=0)


def _precision(translation: Translation) -> None:
    switches = {"bf16.enabled": "bf16", "fp16.enabled": "fp16"}
    on = [key for key in switches if translation.take(key)]
    if len(on) == 2:
        raise ConfigError(
            f"{translation.found[on[0]].place} and {translation.found[on[1]].place} contradict: "
            "parameters have one type; keep one"
        )
    for key in on:
        translation.become(key, precision=switches[key])
    for name in ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis",
                 "min_loss_scale"):  # fmt: skip
        translation.copy(f"fp16.{name}", name)
    if on or any(translation.has(key) and not _says_no(translation, key) for key in switches):
        return
    if translation.take("torch_autocast.enabled"):
        dtype = translation.take("torch_autocast.dtype") or "bfloat16"
        precision = _PRECISIONS.get(dtype)
        if precision is None:
            raise translation.refuse("torch_autocast.dtype", "take bfloat16, float16 or float32")
        translation.become("torch_autocast.enabled", precision=precision)
        return
    translation.imply("with neither bf16 nor fp16 DeepSpeed trains in fp32", precision="fp32")


def _says_no(translation: Translation, key: str) -> bool:
    return translation.found[key].value is False


def _stage(translation: Translation) -> None:
    whole, key = translation.take(_ZERO), f"{_ZERO}.stage"
    if whole is not None:
        translation.become(_ZERO, zero_stage=int(whole))
    stage = translation.take(key)
    if stage is not None:
        translation.become(key, zero_stage=stage)
    elif whole is None and not translation.has(key):
        translation.imply("without zero_optimization.stage nothing is shared out", zero_stage=0)
    shard = translation.take(f"{_ZERO}.mics_shard_size")
    ranks = translation.ranks.data_parallel
    if shard is None or shard == 0:
        return
    if ranks % shard:
        place = translation.found[f"{_ZERO}.mics_shard_size"].place
        raise ConfigError(f"{place}: {ranks} data-parallel ranks are no multiple of {shard}")
    translation.become(f"{_ZERO}.mics_shard_size", data_parallel_replicas=ranks // shard)


def _placement(translation: Translation) -> None:
    optimizer = _device(translation, "offload_optimizer", "cpu_offload")
    parameters = _device(
        translation, "offload_param", "cpu_offload_param", "cpu_offload_params", in_stage=3
    )
    if parameters not in (None, "none") and optimizer in (None, "none"):
        translation.keys.pop("offload_optimizer", None)
        translation.imply(
            "where parameters leave the device their updates do too: they are made where the "
            "optimizer's states are",
            offload_optimizer=parameters if parameters == "nvme" else "cpu",
        )
    elif optimizer is None:
        translation.imply("without offload_optimizer states stay", offload_optimizer="none")
    if parameters is None:
        translation.imply("without offload_param parameters stay", offload_param="none")
    _fraction(translation, optimizer, parameters)
    _folder(translation)


def _device(translation: Translation, block: str, *old_names: str, in_stage: int = 0) -> str | None:
    """Where a block says that things live; None where it says nothing."""
    key = f"{_ZERO}.{block}.device"
    device: str | None = translation.take(key)
    stage = translation.keys.get("zero_stage", translation.implied.get("zero_stage", 0))
    if device is None:
        key = next((f"{_ZERO}.{n}" for n in old_names if translation.take(f"{_ZERO}.{n}")), "")
        device = "cpu" if key else None
    if device is None:
        return None
    device = device.casefold()
    if device != "none" and stage < in_stage:
        said = f"DeepSpeed offloads parameters in stage {in_stage} only, and this is stage {stage}"
        translation.say(key, "", said)
        return None
    translation.become(key, **{block: device})
    return device


def _fraction(translation: Translation, optimizer: str | None, parameters: str | None) -> None:
    key = f"{_ZERO}.offload_optimizer.ratio"
    ratio = translation.take(key)
    if ratio is None:
        return
    if not 0 <= ratio <= 1:
        place = translation.found[key].place
        raise ConfigError(f"{place}: {shown(ratio)} is not accepted; it is from 0 to 1")
    if optimizer in (None, "none"):
        translation.say(key, "", "nothing leaves the device")
    elif ratio == 0:
        translation.keys.pop("offload_optimizer")
        translation.become(key, offload_optimizer="none")
    elif parameters not in (None, "none"):
        translation.say(key, "", "all states leave where parameters do; they take more")
    else:
        translation.become(key, offload_optimizer_fraction=ratio)


def _folder(translation: Translation) -> None:
    keys = [f"{_ZERO}.{block}.nvme_path" for block in ("offload_optimizer", "offload_param")]
    paths = {key: path for key in keys if (path := translation.take(key)) is not None}
    for number, (key, path) in enumerate(paths.items()):
        if number and path != translation.keys["offload_folder"]:
            translation.say(key, "", "one folder holds all that is on disk: the other one")
        else:
            translation.become(key, offload_folder=path)


def deepspeed_tool(translation: Translation) -> Tool:
    """DeepSpeed with the buffers that a file gives it."""
    sizes: dict[str, Any] = {}
    for name, keys in {
        "reduce": ("reduce_bucket_size",),
        "prefetch": ("stage3_prefetch_bucket_size", "prefetch_bucket_size"),
        "live": ("stage3_max_live_parameters", "max_live_parameters"),
        "reuse": ("stage3_max_reuse_distance", "max_reuse_distance"),
        "sub_group": ("sub_group_size",),
        "overlap": ("overlap_comm",),
    }.items():
        found = [translation.found.get(f"{_ZERO}.{key}") for key in keys]
        values = [f.value for f in found if f is not None and f.value != "auto"]
        if values:
            sizes[name] = values[0]
    if "reuse" in sizes:
        sizes["live"] = min(sizes.pop("reuse"), sizes.get("live", 1e9))
    return Tool("DeepSpeed", "deepspeed", sizes)
