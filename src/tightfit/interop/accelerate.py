"""Reads accelerate's YAML: FSDP 1 and 2, DeepSpeed in its own words or by a file, plain ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tightfit.errors import ConfigError
from tightfit.interop.deepspeed import (
    check_batch,
    deepspeed_tool,
    mean_deepspeed,
    read_deepspeed,
)
from tightfit.interop.deepspeed_keys import DEEPSPEED_TABLE
from tightfit.interop.documents import Document, read_document
from tightfit.interop.entries import Accepts, Entry, Found, entries_in, shown, table_of
from tightfit.interop.fsdp import fsdp_entries, mean_fsdp
from tightfit.interop.joined import joined
from tightfit.interop.reading import Reading, Tool
from tightfit.interop.translation import Ranks, Translation

TOOL = "accelerate"
_SWITCH, _COUNT, _TEXT = Accepts.SWITCH, Accepts.COUNT, Accepts.TEXT
_BLOCK = Accepts.ANYTHING

_KINDS = ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP", "DEEPSPEED")
_NO_KINDS = {
    "MEGATRON_LM": "say tensor_parallel_size and pipeline_parallel_size",
    "XLA": "there are no TPUs here",
    "TPU": "there are no TPUs here",
    **dict.fromkeys(
        ("MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_XPU", "MULTI_HPU",
         "MULTI_NEURON"),
        "cards are those of CUDA and ROCm",
    ),
}  # fmt: skip
_NO_TPU = "there are no TPUs here"

ACCELERATE_TABLE = table_of(
    (
        Entry("compute_environment", _TEXT, words=("LOCAL_MACHINE",), usual=("LOCAL_MACHINE",)),
        Entry("distributed_type", _TEXT, "zero_stage"),
        Entry("num_processes", _COUNT, "num_gpus", "num_processes / num_machines"),
        Entry("num_machines", _COUNT, "nnodes"),
        Entry("machine_rank", _COUNT, "node_rank"),
        Entry("main_process_ip", _TEXT, "master_addr"),
        Entry("main_process_port", _COUNT, "master_port"),
        Entry(
            "mixed_precision",
            _TEXT,
            "precision",
            "parameters are in 16 bits themselves, with fp32 masters; there they are fp32 and "
            "cast as they are used",
        ),
        Entry("use_cpu", _SWITCH, here="a CPU trains where there is no card"),
        Entry("debug", _SWITCH, here="collectives are checked where they are tested"),
        Entry("gpu_ids", _TEXT, here="CUDA_VISIBLE_DEVICES says which cards", usual=("all",)),
        Entry("rdzv_backend", _TEXT, here="the first machine's store is the meeting place"),
        Entry("same_network", _SWITCH, here="machines are found by master_addr"),
        Entry("main_training_function", _TEXT, here="there is no script: the job says all"),
        Entry("enable_cpu_affinity", _SWITCH, here="ranks always stay on cores of one node"),
        Entry("downcast_bf16", Accepts.TEXT, here=_NO_TPU, usual=("no", "false")),
        Entry("tpu_name", _TEXT, here=_NO_TPU, refused=True),
        Entry("tpu_zone", _TEXT, here=_NO_TPU, refused=True),
        Entry("tpu_use_cluster", _SWITCH, here=_NO_TPU, refused=True),
        Entry("tpu_use_sudo", _SWITCH, here=_NO_TPU),
        Entry("tpu_env", _BLOCK, here=_NO_TPU),
        Entry("tpu_vm", _BLOCK, here=_NO_TPU),
        Entry("command_file", _TEXT, here=_NO_TPU),
        Entry("commands", _BLOCK, here=_NO_TPU),
        Entry("fp16", _SWITCH, "precision", "old form of mixed_precision"),
        Entry("dynamo_backend", _TEXT, here="layers are not compiled", usual=("NO",)),
        Entry("dynamo_config", _BLOCK, here="layers are not compiled"),
        Entry("fp8_config", _BLOCK, here="there is no fp8; precision: bf16", refused=True),
        Entry("megatron_lm_config", _BLOCK, here=_NO_KINDS["MEGATRON_LM"], refused=True),
        Entry("mpirun_config", _BLOCK, here="torchrun, srun or nnodes start several machines"),
        Entry("parallelism_config.parallelism_config_dp_replicate_size", _COUNT,
              "data_parallel_replicas"),
        Entry("parallelism_config.parallelism_config_dp_shard_size", _COUNT,
              here="the ranks that are left share one copy out"),
        Entry("parallelism_config.parallelism_config_tp_size", _COUNT, "tensor_parallel_size"),
        *(
            Entry(f"parallelism_config.parallelism_config_{name}", kind, usual=usual, refused=True,
                  here="a sequence is not shared out over ranks")
            for name, kind, usual in (
                ("cp_size", _COUNT, (1,)), ("sp_size", _COUNT, (1,)),
            )
        ),
        *(
            Entry(f"parallelism_config.parallelism_config_{name}", _TEXT,
                  here="a sequence is not shared out over ranks")
            for name in (
                "cp_comm_strategy", "cp_backend", "sp_backend", "sp_seq_length",
                "sp_seq_length_is_variable", "sp_attn_implementation",
            )
        ),
        Entry("_tightfit", _BLOCK, here="remarks that tightfit has written"),
    )
)  # fmt: skip

# accelerate's names for DeepSpeed's own keys
DEEPSPEED_NAMES = {
    "zero_stage": "zero_optimization.stage",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "train_micro_batch_size_per_gpu": "train_micro_batch_size_per_gpu",
}
_LAUNCHING = "machines are found by nnodes and master_addr"
PLUGIN_TABLE = table_of(
    tuple(
        Entry(
            name,
            DEEPSPEED_TABLE[key].accepts,
            DEEPSPEED_TABLE[key].becomes,
            DEEPSPEED_TABLE[key].here,
            DEEPSPEED_TABLE[key].usual,
            DEEPSPEED_TABLE[key].words,
        )
        for name, key in DEEPSPEED_NAMES.items()
    ),
    (
        Entry("deepspeed_config_file", _TEXT, here="read as a ds_config.json"),
        Entry("zero3_init_flag", _SWITCH, here="no rank ever holds the whole model"),
        Entry(
            "deepspeed_moe_layer_cls_names",
            _TEXT,
            here="a whole layer is gathered at once, experts with it",
        ),
        Entry("deepspeed_hostfile", _TEXT, here=_LAUNCHING),
        Entry("deepspeed_multinode_launcher", _TEXT, here=_LAUNCHING),
        Entry("deepspeed_exclusion_filter", _TEXT, here=_LAUNCHING),
        Entry("deepspeed_inclusion_filter", _TEXT, here=_LAUNCHING),
        Entry("enable_msamp", _SWITCH, here="there is no fp8; precision: bf16", refused=True),
        Entry("msamp_opt_level", _TEXT, here="of MS-AMP, which is not here"),
    ),
)


def read_accelerate(document: Document, ranks: Ranks) -> Reading:
    """The job's keys that an accelerate YAML says.

    Raises:
        ConfigError: a key or value is unknown, or two contradict.
        UnsupportedError: it is for hardware or a library that cannot be had here.
    """
    blocks = ("deepspeed_config", "fsdp_config")
    content = {key: value for key, value in document.content.items() if key not in blocks}
    outer = Document(document.name, content, document.lines)
    translation = Translation(entries_in(outer, ACCELERATE_TABLE, TOOL), ranks)
    ranks = _ranks(translation, ranks)
    kind = _kind(translation)
    _precision(translation)
    translation.copy(_PARALLEL + "dp_replicate_size", "data_parallel_replicas")
    translation.copy(_PARALLEL + "tp_size", "tensor_parallel_size")
    translation.finish()
    own = Reading.of(translation, document, "accelerate", _plain_tool(ranks))
    if kind == "DEEPSPEED":
        return joined(own, _deepspeed(document, ranks))
    if kind == "FSDP":
        return joined(own, _fsdp(document, ranks))
    if ranks.data_parallel > 1:
        return replace(own, implied={**own.implied, "zero_stage": 0})
    return own


_PARALLEL = "parallelism_config.parallelism_config_"


def _plain_tool(ranks: Ranks) -> Tool:
    name = "DDP" if ranks.data_parallel > 1 else "one process"
    return Tool(name, "ddp")


def _ranks(translation: Translation, given: Ranks) -> Ranks:
    """Processes and machines; `num_processes` counts those of all machines."""
    machines = translation.take("num_machines") or given.nnodes
    translation.copy("num_machines", "nnodes")
    processes = translation.take("num_processes")
    for key, own in (
        ("machine_rank", "node_rank"),
        ("main_process_ip", "master_addr"),
        ("main_process_port", "master_port"),
    ):
        translation.copy(key, own)
    if not processes:
        return replace(given, nnodes=machines)
    if processes % machines:
        place = translation.found["num_processes"].place
        raise ConfigError(
            f"{place}: {processes} is no multiple of num_machines {machines}; each machine has as "
            "many processes as the others"
        )
    translation.become("num_processes", num_gpus=processes // machines)
    tensor = translation.found.get(_PARALLEL + "tp_size")
    width = tensor.value if tensor is not None and isinstance(tensor.value, int) else 1
    return Ranks(processes // machines, machines, max(1, width), given.pipeline_parallel_size)


def _kind(translation: Translation) -> str:
    key = "distributed_type"
    written = translation.take(key)
    if written is None:
        return "NO"
    kind = str(written).upper().rpartition(".")[2]
    if kind in _NO_KINDS:
        raise translation.refuse(key, _NO_KINDS[kind])
    if kind not in _KINDS:
        place = translation.found[key].place
        raise ConfigError(
            f"{place}: {shown(written)} is not accepted; it must be one of {', '.join(_KINDS)}"
        )
    words = {
        "FSDP": "fsdp_config says what is shared out",
        "DEEPSPEED": "deepspeed_config says what is shared out",
        "NO": "one process",
    }
    translation.say(key, "", words.get(kind, "every rank has all: zero_stage 0"))
    return kind


def _precision(translation: Translation) -> None:
    key = "mixed_precision"
    written = translation.take(key)
    if translation.take("fp16"):
        translation.become("fp16", precision="fp16")
    if written is None:
        return
    word = {"no": "fp32", "false": "fp32"}.get(written.casefold(), written.casefold())
    if word == "fp8":
        raise translation.refuse(key, "take bf16")
    if word not in ("fp32", "bf16", "fp16"):
        place = translation.found[key].place
        raise ConfigError(f"{place}: {shown(written)} is none of no, bf16, fp16")
    translation.become(key, "" if word == "fp32" else ACCELERATE_TABLE[key].here, precision=word)


def _block(document: Document, name: str) -> dict[str, Any]:
    block = document.content.get(name) or {}
    if not isinstance(block, dict):
        raise ConfigError(f"{document.where(name)}: {shown(block)} is not a block of keys")
    return block


def _deepspeed(document: Document, ranks: Ranks) -> Reading:
    block = _block(document, "deepspeed_config")
    if not block:
        return read_deepspeed(Document(document.name, {}, {}), ranks)
    written = entries_in(document, PLUGIN_TABLE, f"{TOOL}'s DeepSpeed", block=("deepspeed_config",))
    file = written.get("deepspeed_config_file")
    if file is not None:
        return _deepspeed_file(document, written, file, ranks)
    found: dict[str, Found] = {}
    others: dict[str, Found] = {}
    for name, entry in written.items():
        if name in DEEPSPEED_NAMES:
            key = DEEPSPEED_NAMES[name]
            found[key] = replace(entry, entry=DEEPSPEED_TABLE[key])
        else:
            others[name] = entry
    translation = Translation({**found, **others}, ranks)
    mean_deepspeed(translation)
    check_batch(translation, document)
    if "precision" in translation.implied:  # mixed_precision says it
        translation.implied.pop("precision")
        translation.notes = [n for n in translation.notes if "precision: fp32" not in n.here]
    translation.finish()
    return Reading.of(translation, document, "accelerate", deepspeed_tool(translation))


def _deepspeed_file(
    document: Document, written: dict[str, Found], file: Found, ranks: Ranks
) -> Reading:
    """accelerate takes everything from the file and refuses keys beside it."""
    beside = [found for name, found in written.items() if name in DEEPSPEED_NAMES]
    if beside:
        raise ConfigError(
            f"{beside[0].place} stands beside {file.written}, whose file says it; leave it out"
        )
    path = Path(str(file.value)).expanduser()
    if not path.is_absolute() and not path.exists():
        path = Path(document.name).parent / path
    inner = read_deepspeed(read_document(path), ranks)
    translation = Translation(written, ranks)
    translation.finish()
    return replace(inner, notes=(*translation.notes, *inner.notes))


def _fsdp(document: Document, ranks: Ranks) -> Reading:
    _block(document, "fsdp_config")
    found = fsdp_entries(document, ("fsdp_config",)) if document.content.get("fsdp_config") else {}
    translation = Translation(found, ranks)
    tool = mean_fsdp(translation, default_version=1)
    translation.finish()
    return Reading.of(translation, document, "accelerate", tool)
