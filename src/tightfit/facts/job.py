"""The job as a person writes it: one flat set of keys, for YAML files and for flags.

The names are those of Hugging Face's TrainingArguments and of LLaMA-Factory where they have one.
This is the only place where a key, its default and its description are written; flags, the
documentation page and the error messages are made from it. `auto` leaves a choice to the planner.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from tightfit.errors import ConfigError
from tightfit.facts.machine_keys import machine_contradictions, with_cards_of_gpu
from tightfit.facts.machine_words import (
    parse_cards,
    parse_interconnect,
    parse_network,
    parse_nvme,
    parse_ram,
)
from tightfit.facts.placement_keys import contradictions
from tightfit.facts.rank_keys import batch_contradiction, possible_widths, rank_contradictions
from tightfit.units import KIB, parse_bytes

Auto = Literal["auto"]
# Beyond what anybody trains with; above, arithmetic takes minutes or overflows.
_MOST_TOKENS = 2**24
BatchSize = Annotated[int, Field(ge=1, le=2**16)]
Optim = Literal["adamw", "adamw_8bit", "adamw_compact", "lion", "lion_8bit", "adafactor", "sgd"]
Change = Literal["split-master", "8bit-optimizer", "compact-optimizer", "lora", "qlora"]


def _bool_to_word(value: Any) -> Any:
    """YAML reads a bare `true` as a boolean; the key's values are words."""
    return {True: "true", False: "false"}.get(value, value) if isinstance(value, bool) else value


def _none_to_word(value: Any) -> Any:
    """YAML reads `null` as None and `no` as False; they and the word `none` mean no value."""
    return "none" if value is None or value is False else value


def _json_to_mapping(value: Any) -> Any:
    """A flag has JSON; no value is an empty mapping."""
    if value is None or (isinstance(value, str) and value.casefold() in ("", "none", "null")):
        return {}
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        raise ValueError(f'{value} is no JSON like {{"min_lr": 1e-6}}') from None


def _size(value: str) -> str:
    if value not in ("auto", "none") and parse_bytes(value) < KIB:
        raise ValueError(f"{value} is less than 1 KiB; write a unit, like 8GiB")
    return value


def _to_text(value: Any) -> Any:
    """YAML reads `gpu: 4090` as a number."""
    return str(value) if isinstance(value, int | float) and value is not True else value


def _read_by(parse: Callable[[str], object]) -> AfterValidator:
    """Accepts text that `parse` understands, and keeps it."""

    def check(value: str) -> str:
        parse(value)
        return value

    return AfterValidator(check)


AsText = BeforeValidator(_to_text)
CardWords = Annotated[Annotated[str, _read_by(parse_cards)] | None, AsText]
RamWords = Annotated[Annotated[str, _read_by(parse_ram)] | None, AsText]
NvmeWords = Annotated[Annotated[str, _read_by(parse_nvme)] | None, AsText]
LinkWords = Annotated[Annotated[str, _read_by(parse_interconnect)] | None, AsText]
NetworkWords = Annotated[Annotated[str, _read_by(parse_network)] | None, AsText]
ByteSize = Annotated[str, BeforeValidator(lambda v: str(_none_to_word(v))), AfterValidator(_size)]
Placement = Annotated[Literal["auto", "none", "cpu", "nvme"], BeforeValidator(_none_to_word)]
Cards = Annotated[int, Field(ge=1, le=2**16)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Switch = Annotated[Literal["auto", "true", "false"], BeforeValidator(_bool_to_word)]


def _bits(value: Any) -> Any:
    """Flags and YAML in quotes bring numbers as text."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


class Job(BaseModel):
    """All keys of a training job. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    # What to train
    model_name_or_path: str = Field(
        description="Folder with config.json and safetensors, or a name on the Hub; to estimate, "
        "also a config.json."
    )
    finetuning_type: Literal["full", "lora"] = Field(
        "full",
        description="Train all parameters, or low-rank adapters on a frozen base; `qlora` is "
        "`lora` with `quantization_bit: 4`.",
    )
    quantization_bit: Annotated[Literal[4, 8] | None, BeforeValidator(_bits)] = Field(
        None, description="Bits of the frozen base under adapters; 4 is NF4."
    )
    lora_rank: PositiveInt = Field(8, description="Rank of the adapters.")
    lora_alpha: PositiveFloat | None = Field(
        None, description="Scale of the adapters; twice the rank when not given."
    )
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="Dropout on the adapters' input."
    )
    lora_target: str = Field(
        "all", description="Comma-separated module names to adapt, or `all` linear layers."
    )
    use_rslora: bool = Field(
        False, description="Scale adapters by alpha / sqrt(rank) in place of alpha / rank."
    )
    use_dora: bool = Field(
        False, description="Train the magnitude of each output's weights apart (DoRA)."
    )
    additional_target: str | None = Field(
        None,
        description="Comma-separated ends of names of modules that are trained whole beside "
        "adapters and saved with them (peft's `modules_to_save`), such as `embed_tokens,lm_head`; "
        "`norm` is every norm. Of a tied model one end is both.",
    )

    rope_scaling: Literal["linear", "dynamic", "yarn"] | None = Field(
        None,
        description="How rotary positions are scaled where `cutoff_len` is beyond those that the "
        "model was made for; by the next whole factor.",
    )
    resize_vocab: bool = Field(
        False,
        description="Give the embedding and the output layer rows for tokens that the tokenizer "
        "has beyond them, each the mean of the rows there are; under adapters they must be in "
        "`additional_target`.",
    )

    # Data
    dataset: str | None = Field(None, description="Training rows: a .jsonl or .json file.")
    eval_dataset: str | None = Field(
        None, description="Held-out rows; without it `val_size` splits them off."
    )
    val_size: NonNegativeFloat = Field(
        0.0, description="Held-out rows: a share below 1, or a number of rows."
    )
    cutoff_len: PositiveInt = Field(
        2048, le=_MOST_TOKENS, description="Longest sequence, in tokens."
    )
    overlong: Literal["drop", "truncate", "error"] = Field(
        "truncate", description="What happens to a sample longer than `cutoff_len`."
    )
    preview: NonNegativeInt = Field(
        0, description="Show this many samples with the trained tokens coloured."
    )
    sample_prompt: str | None = Field(
        None, description="A question the model answers before and after training."
    )
    max_new_tokens: PositiveInt = Field(
        32, le=_MOST_TOKENS, description="Longest answer to `sample_prompt`."
    )

    # Batch and schedule
    train_batch_size: BatchSize | Auto = Field(
        "auto",
        description="Global batch: sequences per optimizer step "
        "(= per_device_train_batch_size x gradient_accumulation_steps x ranks).",
    )
    per_device_train_batch_size: BatchSize | Auto = Field(
        "auto", description="Micro-batch: sequences per forward and backward."
    )
    gradient_accumulation_steps: BatchSize | Auto = Field(
        "auto", description="Micro-batches per optimizer step."
    )
    per_device_eval_batch_size: BatchSize = Field(1, description="Sequences per evaluation.")
    num_train_epochs: PositiveFloat = Field(3.0, description="Passes over the data.")
    max_steps: int = Field(-1, ge=-1, description="Optimizer steps; -1: as many as the epochs.")
    learning_rate: PositiveFloat = Field(5e-5, description="Highest learning rate.")
    lr_scheduler_type: str = Field("linear", description="A schedule of transformers.")
    lr_scheduler_kwargs: Annotated[
        dict[str, int | float | bool | str], BeforeValidator(_json_to_mapping)
    ] = Field(
        default_factory=dict,
        description='The schedule\'s own numbers, like `{"min_lr_rate": 0.1}` of '
        '`cosine_with_min_lr` or `{"num_decay_steps": 50}` of `warmup_stable_decay`.',
    )
    warmup_steps: NonNegativeFloat = Field(
        0, description="Steps of rising learning rate; below 1: a share of all steps."
    )
    optim: Optim = Field(
        "adamw",
        description="Optimizer. `adamw_8bit` and `lion_8bit` keep moments in bitsandbytes' 8 bits, "
        "`adamw_compact` in companded ones (half the error where gradients are normal).",
    )
    optim_master: Literal["auto", "fp32", "split", "split_8"] = Field(
        "auto",
        description="How the optimizer keeps 32 bits of a 16-bit parameter: `fp32`, a copy; "
        "`split`, the 16 bits that it lacks (bf16 only; rounds half away from zero); `split_8`, of "
        "matrices the upper 8 of these. `auto` is `fp32`. With `optim: adamw_compact` `split_8` is "
        "7 bytes per parameter, gradient included.",
    )
    loss_scale: NonNegativeFloat = Field(
        0.0,
        description="Factor on losses in fp16, whose gradients would vanish without; 0: it begins "
        "at 2^initial_scale_power and follows overflows, whose steps are skipped.",
    )
    initial_scale_power: Annotated[int, Field(ge=0, le=32)] = Field(
        16, description="The power of two that a loss scale which follows overflows begins with."
    )
    loss_scale_window: PositiveInt = Field(
        1000, description="Steps without an overflow after which the loss scale is doubled."
    )
    hysteresis: PositiveInt = Field(
        2,
        description="The overflow at which the loss scale is halved; those before change nothing.",
    )
    min_loss_scale: PositiveFloat = Field(1.0, description="What the loss scale is never below.")
    weight_decay: NonNegativeFloat = Field(
        0.0, description="Decay of matrices; norms and biases have none."
    )
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = Field(0.9, description="AdamW's beta 1.")
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = Field(0.999, description="AdamW's beta 2.")
    adam_epsilon: PositiveFloat = Field(1e-8, description="AdamW's epsilon.")
    max_grad_norm: NonNegativeFloat = Field(
        1.0, description="Clip the exact global gradient norm to this; 0 does not clip."
    )
    seed: int = Field(42, ge=0, le=2**32 - 1, description="Seed of data order, split and dropout.")

    # Memory
    memory_limit: ByteSize = Field(
        "auto",
        description="Most bytes on the device tier, like 900MiB; `auto`: what the device has; "
        "`none`: no limit.",
    )
    host_memory_limit: ByteSize = Field(
        "auto",
        description="Most bytes on the host tier; `auto`: the RAM that is available, which on a "
        "CPU device and host share. A size describes another machine: --memory_limit 24GB "
        "--host_memory_limit 64GB.",
    )
    precision: Literal["auto", "bf16", "fp16", "fp32"] = Field(
        "auto", description="Type of parameters and computation."
    )
    gradient_checkpointing: Annotated[
        Literal["auto", "true", "false", "selective"], BeforeValidator(_bool_to_word)
    ] = Field(
        "auto",
        description="Recompute each layer in backward instead of saving it; `selective`: every "
        "second layer.",
    )
    attention: Literal["auto", "flash", "sdpa", "eager"] = Field(
        "auto", description="Kernel of attention; `auto` is torch's sdpa."
    )
    loss: Literal["auto", "sliced", "chunked", "full"] = Field(
        "auto",
        description="Cross-entropy from all logits at once, in chunks of tokens, or in slices of "
        "the vocabulary, whose gradient then leaves the device slice by slice.",
    )
    label_smoothing_factor: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0,
        description="Share of each target's probability that goes to all tokens alike, in training "
        "only.",
    )
    z_loss: NonNegativeFloat = Field(
        0.0,
        description="Weight of the squared logarithm of the softmax's normaliser in the loss of "
        "each token, in training only; PaLM has 1e-4.",
    )
    offload_optimizer: Placement = Field(
        "auto",
        description="`cpu`: gradients and optimizer states live on the host; `nvme`: the states "
        "on disk.",
    )
    offload_optimizer_fraction: Fraction | Auto = Field(
        "auto",
        description="Share of the layers whose gradients and optimizer states leave the device; "
        "`auto`: as much as is missing, and all where `offload_optimizer` names a place.",
    )
    offload_param: Placement = Field(
        "auto", description="Where the layers' parameters live between their turns."
    )
    offload_param_fraction: Fraction | Auto = Field(
        "auto",
        description="Share of the layers whose parameters leave the device; `auto`: as much as is "
        "missing, and all where `offload_param` names a place.",
    )
    offload_activations: Switch = Field(
        "auto", description="What layers save for backward waits on the host."
    )
    offload_prefetch: Annotated[int, Field(ge=0, le=64)] | Auto = Field(
        "auto",
        description="Layers whose parameters or activations are fetched ahead; `auto` is 1.",
    )
    lazy_step: Switch = Field(
        "auto",
        description="Update what lives off the device while the next forward runs, each layer "
        "waiting for its own; `auto`: where that gains time. The numbers are the same.",
    )
    offload_folder: str | None = Field(
        None,
        description="Folder of what is on the nvme tier; `offload` in `output_dir` when not given.",
    )
    nvme_limit: ByteSize = Field(
        "auto",
        description="Most bytes on the nvme tier; `auto`: what is free on the disk of "
        "`offload_folder`, less a reserve; `none`: no limit.",
    )
    num_gpus: Cards = Field(
        1,
        description="Cards used of each machine, one rank each; on a CPU, processes. `plan` and "
        "`train` use all cards that they see where it is not given. An estimate that names it is "
        "for cards, wherever it is made; else it is for this machine.",
    )
    zero_stage: Annotated[Literal["auto", 0, 1, 2, 3], BeforeValidator(_bits)] = Field(
        "auto",
        description="What data-parallel ranks share out: 0 nothing, 1 optimizer states, "
        "2 gradients too, 3 parameters too.",
    )
    data_parallel_replicas: Cards | Auto = Field(
        "auto",
        description="Whole copies of what `zero_stage` shares out (HSDP): one for each machine "
        "keeps all but the gradients' last sum inside.",
    )
    tensor_parallel_size: Cards | Auto = Field(
        "auto", description="Ranks of one machine that share each layer's matrices."
    )
    pipeline_parallel_size: Cards | Auto = Field(
        "auto", description="Stages, each with its own layers."
    )
    pipeline_schedule: Literal["1f1b", "gpipe", "interleaved"] = Field(
        "1f1b",
        description="Order of micro-batches in a pipeline: one forward, one backward, with few in "
        "flight; all forwards first; or 1f1b through several runs of layers on each stage, which "
        "waits less.",
    )
    virtual_pipeline_stages: Annotated[int, Field(ge=2)] | None = Field(
        None, description="Runs of layers on each stage if the schedule is interleaved; empty: 2."
    )
    pipeline_layers: list[PositiveInt] = Field(
        default_factory=list,
        description="How many layers each stage has, like 7,8,8,9; with several runs on each stage "
        "how many each run has, in the order of the model. Empty: as many parameters on each, or "
        "where that does not fit as many as do.",
    )
    allow: list[Change] = Field(
        default_factory=list,
        description="What the planner may change although it alters numbers, where nothing fits "
        "without; in this order, optimizers before a disk.",
    )
    plan: str | None = Field(None, description="Use this plan.yaml instead of planning.")
    adapt: bool = Field(
        False,
        description="Where ranks wait for each other over 30% of a step, go on from the next "
        "checkpoint with the plan that is predicted to wait less; keys that are given stay as they "
        "are.",
    )

    # A machine that one does not sit at
    gpu: CardWords = Field(
        None,
        description="Plan or estimate for a machine with these cards instead of this one, like "
        "`2xrtx-4090` or `a100-80g`; sets `num_gpus` and the limits. `tightfit presets` lists the "
        "cards.",
    )
    ram: RamWords = Field(
        None,
        description="RAM of each described machine, like `64GiB`, or with its modules' rate, like "
        "`64GiB@80GB/s`.",
    )
    nvme: NvmeWords = Field(
        None,
        description="Disk of each described machine and how fast it is read, like `1TB@3.5GB/s`, "
        "or read and written, like `1TB@3.5GB/s:1.7GB/s`; without it nothing goes to nvme.",
    )
    interconnect: LinkWords = Field(
        None,
        description="Slots of the described cards, like `pcie4` or `pcie4x8`, and what joins them: "
        "`nvlink`, or PCIe where only that is given.",
    )
    network: NetworkWords = Field(
        None,
        description="Rate between described machines, all adapters of one together: bits like "
        "`25Gb` or `8x400Gb`, bytes like `3GB/s`.",
    )

    # Launch
    nnodes: Cards = Field(1, description="Machines, each with `num_gpus` ranks.")
    node_rank: NonNegativeInt = Field(
        0, description="Number of this machine; 0 is the one that the others find and that prints."
    )
    master_addr: str | None = Field(
        None, description="Name or address of machine 0, for several machines."
    )
    master_port: Annotated[int, Field(ge=1, le=2**16 - 1)] | None = Field(
        None, description="Port of machine 0; 29500 when not given, a free one on one machine."
    )
    max_restarts: NonNegativeInt = Field(
        0,
        description="How often all ranks start again, from the last checkpoint, after one has died "
        "or a machine was lost; mistakes of the job are not tried again.",
    )
    ddp_timeout: Annotated[int, Field(ge=1, le=2**31)] = Field(
        1800, description="Seconds that a rank waits for the others before it gives up."
    )

    # Output
    output_dir: str | None = Field(None, description="Folder of checkpoints, logs and report.")
    overwrite_output_dir: bool = Field(False, description="Delete the run that is there first.")
    resume: bool = Field(False, description="Continue from the last checkpoint in `output_dir`.")
    logging_steps: PositiveInt = Field(1, description="Steps between lines of the log.")
    eval_strategy: Annotated[
        Literal["no", "steps", "epoch"], BeforeValidator(lambda v: "no" if v is False else v)
    ] = Field("no", description="When to evaluate besides before and after training.")
    eval_steps: PositiveInt = Field(500, description="Steps between evaluations.")
    save_strategy: Annotated[
        Literal["no", "steps", "epoch"], BeforeValidator(lambda v: "no" if v is False else v)
    ] = Field("no", description="When to save besides after training.")
    save_steps: PositiveInt = Field(500, description="Steps between checkpoints.")
    save_total_limit: PositiveInt | None = Field(None, description="Checkpoints kept.")
    save_only_model: bool = Field(
        False, description="Leave the optimizer out of checkpoints; they cannot be resumed."
    )

    @model_validator(mode="before")
    @classmethod
    def _qlora_is_lora_with_4_bits(cls, values: Any) -> Any:
        """One name that people use for two keys."""
        if not isinstance(values, dict) or values.get("finetuning_type") != "qlora":
            return values
        bits = values.get("quantization_bit") or 4
        return {**values, "finetuning_type": "lora", "quantization_bit": bits}

    @model_validator(mode="before")
    @classmethod
    def _gpu_says_how_many_cards(cls, values: Any) -> Any:
        return with_cards_of_gpu(values) if isinstance(values, dict) else values

    @model_validator(mode="after")
    def _quantised_bases_are_frozen(self) -> Job:
        if self.quantization_bit is not None and self.finetuning_type == "full":
            raise ValueError(
                f"quantization_bit: {self.quantization_bit} needs finetuning_type: lora; "
                "quantised weights cannot be trained themselves"
            )
        return self

    @model_validator(mode="after")
    def _new_rows_are_trained(self) -> Job:
        if self.resize_vocab and self.finetuning_type == "lora" and not self.additional_target:
            raise ValueError(
                "resize_vocab: true under adapters: rows of new tokens are trained only if the "
                "embedding and the output layer are; set additional_target: embed_tokens,lm_head "
                "(their names in most models)"
            )
        return self

    @model_validator(mode="after")
    def _placements_agree(self) -> Job:
        found = next(contradictions(vars(self)), None)
        if found is not None:
            raise ValueError(found)
        return self

    @model_validator(mode="after")
    def _ranks_agree(self) -> Job:
        found = next(rank_contradictions(vars(self)), None)
        if found is not None:
            raise ValueError(found)
        return self

    @model_validator(mode="after")
    def _machine_agrees(self) -> Job:
        found = next(machine_contradictions(vars(self)), None)
        if found is not None:
            raise ValueError(found)
        return self

    @model_validator(mode="after")
    def _batch_sizes_agree(self) -> Job:
        """DeepSpeed's identity: global = micro x accumulation x data-parallel ranks."""
        total, micro, steps = (
            self.train_batch_size,
            self.per_device_train_batch_size,
            self.gradient_accumulation_steps,
        )
        if total == "auto":
            return self
        found = batch_contradiction(total, micro, steps, self.ranks, self._possible_widths)
        if found is not None:
            raise ValueError(found)
        return self

    @property
    def global_batch_size(self) -> int:
        """Sequences per optimizer step; what is left to the planner counts as 1."""
        if self.train_batch_size != "auto":
            return self.train_batch_size
        micro, steps = self.per_device_train_batch_size, self.gradient_accumulation_steps
        sequences = (1 if micro == "auto" else micro) * (1 if steps == "auto" else steps)
        return sequences * self.data_parallel_ranks

    @property
    def disk_folder(self) -> Path:
        """Where the nvme tier's files go; it need not exist yet."""
        if self.offload_folder is not None:
            return Path(self.offload_folder).expanduser()
        return Path(self.output_dir or ".").expanduser() / "offload"

    @property
    def names_disk(self) -> bool:
        """Whether a key asks for the nvme tier or says where it is."""
        return self.offload_folder is not None or "nvme" in (
            self.offload_optimizer,
            self.offload_param,
        )

    def with_keys(self, keys: Mapping[str, Any]) -> Job:
        """The same job with other keys.

        Raises:
            ConfigError: they contradict what the job gives, such as its batch.
        """
        given = {key: getattr(self, key) for key in self.model_fields_set}
        if "gpu" in keys:  # says how many cards there are
            given.pop("num_gpus", None)
        try:
            return Job.model_validate(given | dict(keys))
        except ValidationError as error:
            said = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise ConfigError(said) from error

    @property
    def ranks(self) -> int:
        """Processes that train together, on all machines."""
        return self.nnodes * self.num_gpus

    @property
    def data_parallel_ranks(self) -> int:
        """Ranks that see different sequences: the most there can be where the planner chooses."""
        return self.ranks // min(self._possible_widths)

    @property
    def _possible_widths(self) -> tuple[int, ...]:
        """How many ranks may see the same sequences, tensor times pipeline."""
        return possible_widths(self.ranks, self.tensor_parallel_size, self.pipeline_parallel_size)

    @property
    def runs_per_stage(self) -> int:
        """Runs of layers on each pipeline stage."""
        return (self.virtual_pipeline_stages or 2) if self.pipeline_schedule == "interleaved" else 1
