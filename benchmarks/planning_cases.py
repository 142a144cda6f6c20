"""The jobs of `planning.py`: twelve that people ask about, and the field's rules of thumb.

A rule says what the plan of a job must be, in the words of plans; nothing in the planner knows it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from tightfit.policies import Policies, Tier

Keys = dict[str, Any]


@dataclass(frozen=True)
class Found:
    """What became of a job.

    Attributes:
        policies: of the plan; None where nothing fits.
        seconds: of a step; infinite where nothing fits.
        device_bytes, nvme_bytes: of a rank at its peak.
        plain_shortage: what plain training lacks on the device, as a part of what it needs.
        plain_bytes: of plain training on a rank's device at its peak; 0 where nothing fits.
        parameter_bytes: of the plan on a rank's device at its peak.
        short: bytes that are missing by the limit that is short, where nothing fits.
    """

    policies: Policies | None
    seconds: float
    device_bytes: int
    nvme_bytes: int
    plain_shortage: float
    plain_bytes: int = 0
    parameter_bytes: int = 0
    short: dict[str, int] = field(default_factory=dict)

    @property
    def chosen(self) -> Policies:
        """Of the plan that there is."""
        assert self.policies is not None
        return self.policies


_FOUND = TypeAdapter(Found)


def as_json(found: Found) -> dict[str, Any]:
    return dict(_FOUND.dump_python(found, mode="json"))


def from_json(content: dict[str, Any]) -> Found:
    return _FOUND.validate_python(content)


@dataclass(frozen=True)
class Scenario:
    """A question that somebody has."""

    name: str
    keys: Keys


@dataclass(frozen=True)
class Rule:
    """A rule of thumb, jobs that it is about, and whether it has come out.

    Attributes:
        holds: of what became of the jobs, in their order.
        unfit: whether it is about a job that nothing fits.
        but: why it does not come out, where it does not.
    """

    said: str
    jobs: tuple[Keys, ...]
    holds: Callable[..., bool] = field(compare=False)
    unfit: bool = False
    but: str = ""

    def comes_out(self, *found: Found) -> bool:
        """Whether the plans of its jobs follow it."""
        fit = all(one.policies is not None for one in found)
        return (fit or self.unfit) and self.holds(*found)


def job(model: str, gpu: str, ram: str = "none", batch: int = 8, **more: Any) -> Keys:
    keys = {"model_name_or_path": model, "gpu": gpu, "train_batch_size": batch, **more}
    return keys if ram == "none" else keys | {"ram": ram}


def cluster(
    model: str, nodes: int, network: str, batch: int, gpu: str = "8xh100", **more: Any
) -> Keys:
    keys = {"nnodes": nodes, "network": network, "cutoff_len": 4096, **more}
    return job(model, gpu, "2TiB", batch, **keys)


LLAMA_7B, LLAMA_13B = "meta-llama/Llama-2-7b-hf", "meta-llama/Llama-2-13b-hf"
LLAMA_70B, LLAMA_405B = "meta-llama/Llama-3.1-70B", "meta-llama/Llama-3.1-405B"
QWEN_7B, QWEN_32B = "Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-32B"
GEMMA_9B = "google/gemma-2-9b"
ADAPTERS = {"allow": ["lora", "qlora"]}
QLORA = {"finetuning_type": "lora", "quantization_bit": 4}
CHECKPOINTED = {"gradient_checkpointing": True}

CONSUMER = [
    Scenario("Qwen2.5-1.5B, all parameters", job("Qwen/Qwen2.5-1.5B", "rtx-3060", "32GiB")),
    Scenario("Llama-2-7B, adapters allowed", job(LLAMA_7B, "rtx-3080", "32GiB", **ADAPTERS)),
    Scenario("Qwen2.5-7B, adapters allowed", job(QWEN_7B, "rtx-3080", "32GiB", **ADAPTERS)),
    Scenario(
        "Llama-2-7B, all parameters",
        job(LLAMA_7B, "rtx-3080", "32GiB", nvme="2TB@3.5GB/s"),
    ),
    Scenario("Qwen2.5-7B, all parameters", job(QWEN_7B, "rtx-4090", "128GiB")),
    Scenario("Llama-2-13B, all parameters", job(LLAMA_13B, "rtx-4090", "256GiB")),
    Scenario("Qwen2.5-7B, all parameters", job(QWEN_7B, "2xrtx-4090", "128GiB")),
    Scenario(
        "Gemma-2-9B, adapters allowed, 512 tokens",
        job(GEMMA_9B, "rtx-4060-laptop", "32GiB", cutoff_len=512, **ADAPTERS),
    ),
]
CLUSTERS = [
    Scenario("Llama-2-13B, all parameters", job(LLAMA_13B, "8xa100-80g", "1TiB", 64)),
    Scenario("Llama-3.1-70B, all parameters", cluster(LLAMA_70B, 2, "8x400Gb", 128)),
    Scenario("Llama-3.1-70B, all parameters", cluster(LLAMA_70B, 128, "8x400Gb", 1024)),
    Scenario("Llama-3.1-405B, all parameters", cluster(LLAMA_405B, 128, "8x400Gb", 1024)),
]


def stays_whole(found: Found) -> bool:
    """Whether nothing leaves the device."""
    placement = found.chosen.placement
    return {placement.parameters, placement.optimizer_states, placement.activations} == {
        Tier.DEVICE
    }


def optimizer_away(found: Found) -> bool:
    return found.chosen.placement.optimizer_states is not Tier.DEVICE


def parameters_away(found: Found) -> bool:
    return found.chosen.placement.parameters is not Tier.DEVICE


def smaller_batches(found: Found) -> bool:
    """Whether the shortage is met by what changes no placement."""
    policies = found.chosen
    less = policies.batch.accumulation_steps > 1 or policies.checkpointing.enabled
    return less and stays_whole(found)


def stage(found: Found) -> int:
    return found.chosen.sharding.zero_stage


def groups(found: Found) -> int:
    """Ranks that share layers or matrices."""
    return found.chosen.sharding.tensor_parallel * found.chosen.sharding.pipeline_parallel


def tensor(found: Found) -> int:
    return found.chosen.sharding.tensor_parallel


def inside_machines(found: Found, cards: int) -> bool:
    """Whether what is gathered in every layer is gathered inside a machine: replicas or stages are
    what goes between them."""
    sharding = found.chosen.sharding
    return sharding.zero_stage < 3 or sharding.shards * sharding.tensor_parallel <= cards


def on_disk(found: Found) -> bool:
    return found.nvme_bytes > 0


SMALL = "Qwen/Qwen2.5-1.5B"
RULES = [
    Rule(
        "one card and less than 30% short: smaller micro-batches, accumulation, checkpointing, "
        "no offload",
        (job(SMALL, "rtx-5090", "128GiB", 4, cutoff_len=1024, loss="full"),),
        lambda one: 0 < one.plain_shortage < 0.3 and smaller_batches(one),
    ),
    Rule(
        "one card and more than that short: the optimizer leaves, the parameters only when that "
        "is not enough",
        (job(QWEN_7B, "rtx-4090", "128GiB"), job(QWEN_7B, "rtx-3080", "256GiB")),
        lambda some, more: (
            some.plain_shortage > 0.3
            and optimizer_away(some)
            and not parameters_away(some)
            and optimizer_away(more)
            and parameters_away(more)
        ),
    ),
    Rule(
        "one card never gets ZeRO",
        (job(QWEN_7B, "rtx-4090", "128GiB"), job(LLAMA_13B, "h100", "1TiB")),
        lambda *each: all(stage(one) == 0 for one in each),
    ),
    Rule(
        "cards still short with ZeRO-3: tensor or pipeline parallelism on top",
        (
            job(
                QWEN_32B,
                "8xh200",
                "none",
                8,
                cutoff_len=98304,  # with ZeRO-3 alone 27 GiB too many
                offload_optimizer="none",
                offload_param="none",
                offload_activations=False,
            ),
        ),
        lambda one: groups(one) > 1,
    ),
    Rule(
        "a slow network: sharding inside machines, replicas or stages across",
        (cluster(LLAMA_13B, 2, "10Gb", 64, "8xa100-80g"),),
        lambda one: inside_machines(one, 8),
    ),
    Rule(
        "above 8 cards and a slow network: sharding inside machines and offload rather than ZeRO-3 "
        "across",
        (
            cluster(
                LLAMA_70B,
                2,
                "10Gb",
                64,
                "8xa100-80g",
                tensor_parallel_size=1,
                pipeline_parallel_size=1,
            ),
        ),
        lambda one: inside_machines(one, 8) and optimizer_away(one),
    ),
    Rule(
        "two PCIe cards: tensor parallelism is slower than one of them with offload",
        (
            job(
                QWEN_7B,
                "2xrtx-4090",
                "128GiB",
                tensor_parallel_size=2,
                interconnect="pcie4x8",  # what a board for home use gives two cards
            ),
            job(QWEN_7B, "rtx-4090", "128GiB"),
        ),
        lambda two, one: two.seconds > one.seconds,
        but="a step of both is predicted to be shorter even over eight lanes each",
    ),
    Rule(
        "consumer cards on PCIe: no tensor parallelism",
        (job(QWEN_7B, "2xrtx-4090", "128GiB"), job(QWEN_7B, "4xrtx-3090", "256GiB")),
        lambda *each: all(tensor(one) == 1 for one in each),
    ),
    Rule(
        "two to four cards: ZeRO-2 before ZeRO-3",
        (job(QWEN_7B, "4xa100-80g", "1TiB", 32),),
        lambda one: stage(one) <= 2,
    ),
    Rule(
        "one machine of eight cards: usually ZeRO-2",
        (job(LLAMA_13B, "8xa100-80g", "1TiB", 64),),
        lambda one: stage(one) <= 2,
    ),
    Rule(
        "ZeRO-3 when the model exceeds a card many times and links are fast",
        (cluster(LLAMA_70B, 2, "8x400Gb", 128),),
        lambda one: stage(one) == 3,
    ),
    Rule(
        "tensor parallelism inside an NVLink machine for very wide layers",
        (cluster(LLAMA_405B, 128, "8x400Gb", 1024),),
        lambda one: 1 < tensor(one) <= 8,
        but="what ZeRO-3 gathers is hidden by computing",
    ),
    Rule(
        "NVMe only when RAM is short too",
        (
            job(LLAMA_7B, "rtx-3080", "32GiB", nvme="2TB@3.5GB/s"),
            job(LLAMA_7B, "rtx-3080", "256GiB", nvme="2TB@3.5GB/s"),
        ),
        lambda short, plenty: on_disk(short) and not on_disk(plenty),
    ),
    Rule(
        "full 7B on 10 GB and 32 GiB of RAM: 16 bytes a parameter are more than 107 GB, the "
        "shortage is named, and only with NVMe it goes",
        (
            job(LLAMA_7B, "rtx-3080", "32GiB"),
            job(LLAMA_7B, "rtx-3080", "32GiB", nvme="2TB@3.5GB/s"),
        ),
        lambda without, with_disk: (
            without.policies is None
            and max(without.short.values()) > 0
            and on_disk(with_disk)
            and with_disk.plain_bytes > 107e9
        ),
        unfit=True,
    ),
    Rule(
        "QLoRA of Qwen2.5-7B with checkpointing on 10 GB, where the base alone is 5.5 GB",
        (job(QWEN_7B, "rtx-3080", "32GiB", 1, cutoff_len=512, **CHECKPOINTED, **QLORA),),
        lambda one: 5.3e9 < one.parameter_bytes < 5.8e9,
    ),
    Rule(
        "Llama-2-7B on a 4-bit base with checkpointing on 10 GB: 5 to 6 GB",
        (job(LLAMA_7B, "rtx-3080", "32GiB", 1, cutoff_len=512, **CHECKPOINTED, **QLORA),),
        lambda one: 5e9 < one.device_bytes < 6e9,
    ),
    Rule(
        "the same with the base streamed from the host: 3 to 4 GB",
        (
            job(
                LLAMA_7B,
                "rtx-3080",
                "32GiB",
                1,
                cutoff_len=512,
                offload_param="cpu",
                **CHECKPOINTED,
                **QLORA,
            ),
        ),
        lambda one: one.device_bytes < 4e9,
    ),
    Rule(
        "a 9B on 8 GB at 512 tokens",
        (job(GEMMA_9B, "rtx-4060-laptop", "32GiB", 1, cutoff_len=512, **QLORA),),
        lambda one: one.policies is not None,
    ),
    Rule(
        "7B and 13B, all parameters, on a 24 GB card",
        (job(LLAMA_7B, "rtx-4090", "128GiB"), job(LLAMA_13B, "rtx-4090", "256GiB")),
        lambda *each: all(one.policies is not None for one in each),
    ),
    Rule(
        "more than 800 GB of device memory train more than 100B parameters",
        (job("Qwen/Qwen1.5-110B", "8xh200", "2TiB", 64),),
        lambda one: one.policies is not None,
    ),
    Rule(
        "QLoRA of a 7B beside a server of a 7B in 16 bits, 15 GB, on one 24 GB card",
        (job(QWEN_7B, "rtx-4090", "64GiB", memory_limit="8GiB", **QLORA),),
        lambda one: one.policies is not None,
    ),
]
