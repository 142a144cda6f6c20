"""Prints docs/interop.md from the tables: `python -m tightfit.interop.document_interop`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby

from tightfit.interop.accelerate import DEEPSPEED_NAMES, PLUGIN_TABLE
from tightfit.interop.entries import Entry
from tightfit.interop.formats import EXPORTS, FORMATS
from tightfit.interop.fsdp import STRATEGIES
from tightfit.interop.transformers_keys import DEFAULTS, SAME

_INTRODUCTION = """\
# Configs of other tools

<!-- Made by `python -m tightfit.interop.document_interop` from src/tightfit/interop. -->

    tightfit convert ds_config.json job.yaml                 # and what became of each key
    tightfit convert ds_config.json accelerate.yaml --num_gpus 4
    tightfit convert job.yaml - --to deepspeed               # - is standard output
    tightfit estimate Qwen/Qwen2.5-7B --config ds_config.json --num_gpus 8   # billed twice
    tightfit train job.yaml --deepspeed ds_config.json       # runs it on this engine
    tightfit plan job.yaml --export deepspeed                # the plan as a ds_config.json

- The format of a file is found by its keys, that of a new one by its name; `--from` and `--to`
  say it. A file that is there is written over with `--force` only.
- Every key of the job is also a flag of `convert`, and wins over the file. How many ranks a
  config is for is often not in it: `--num_gpus`, `--nnodes`.
- `--config FILE` (any format) and `--deepspeed FILE` work with `estimate`, `plan` and `train`;
  `deepspeed: FILE` may stand in a job. Flags win over both; where the job's file and the config
  say different things, that is an error.
- What a file does not say means what its own tool takes for it: without `gradient_clipping`
  DeepSpeed does not clip, so `max_grad_norm` is 0. Such lines of the table are `(not said)`, and
  give way to whatever else is said.
- `auto` is left to the job, then to the planner.
- An unknown key is an error that names the nearest ones. So is a contradiction, with the
  arithmetic: `ds_config.json, line 2: train_batch_size 16 != 1 x 8 x 1`.
- A key without a counterpart is listed with what happens here instead. It is refused where the
  run would be another: an optimizer that is not here, compression, experts over ranks. Such keys
  are accepted when they ask for nothing.
- What another tool cannot do of a job or a plan is listed after writing, and stands in the file:
  as comments in YAML, under `_tightfit` in a `ds_config.json`, which DeepSpeed does not look at.
  JSON for transformers and FSDP has no place for it.
- `estimate --config` prints the bill of the tool that the config was for (`DeepSpeed (ZeRO-3)`)
  beside ours: tensors and all of the card by the forms of [accuracy.md](accuracy.md); host and
  disk by DeepSpeed's own bytes per parameter, without buffers. It is for cards, wherever it is
  made; without `num_gpus`, for one.

| format | of | `plan --export` |
|---|---|---|"""

_STRATEGIES = """
## Names of sharding strategies

In accelerate's `fsdp_sharding_strategy` and `fsdp_reshard_after_forward` and in transformers'
`fsdp`, by name or number:

| name | `zero_stage` | `data_parallel_replicas` |
|---|---|---|"""

_LEFT_OUT = ", ".join(f"`{name}: {value}`" for name, value in DEFAULTS.items())
_REMARKS = {
    "deepspeed": """\
All keys of deepspeed 0.19.8, with older names. A plan whose states leave the device is written as
the first stage in which DeepSpeed offloads them, also for one card.""",
    "accelerate": """\
`distributed_type` NO, MULTI_GPU, MULTI_CPU, FSDP and DEEPSPEED. `deepspeed_config_file` is read
with it, relative to the working directory or to the file. Written as FSDP 2 where that can do what
the job says, else as DeepSpeed. Keys of `fsdp_config` are those of FSDP below.""",
    "llamafactory": """\
`stage: sft` only. Beside these it has the keys of TrainingArguments below and those of a job.
Arguments of llamafactory 0.9.5.""",
    "transformers": f"""\
All fields of TrainingArguments of transformers 5.24, with those of version 4; JSON, as
`HfArgumentParser.parse_json_file` reads it. `deepspeed` and `fsdp_config` hold a block or name a
file. Fields that are left out have its defaults, also in files of LLaMA-Factory: {_LEFT_OUT},
`per_device_train_batch_size: 8`, `gradient_accumulation_steps: 1`, `eval_steps` as `logging_steps`,
and fp32. Layers are checkpointed only where a file says so; LLaMA-Factory checkpoints them unless a
file says not to.""",
    "fsdp": """\
A file for transformers' `fsdp_config`, and accelerate's block of that name, where each key may
begin with `fsdp_`. It is written for version 2 as `fsdp`, and as `fsdp1` for version 1 (deprecated
there), with the names above: `NO_SHARD` for `zero_stage: 0`, and the hybrid ones where
`data_parallel_replicas` is `nnodes`. accelerate does what version 1 says; under transformers 5.24
with accelerate 1.15 it is `FULL_SHARD` whatever the file says, unless the environment names it too:
`FSDP_SHARDING_STRATEGY=SHARD_GRAD_OP`.""",
    "torchtitan": """\
TOML of versions 0.1 and 0.2; later ones are configured in Python. It is written for
0.2, without the model's name and flavor, which are torchtitan's own. Of a pipeline the local batch
is all micro-batches of a step.""",
}


def document() -> str:
    """The whole page."""
    lines = [_INTRODUCTION]
    for name, form in FORMATS.items():
        export = f"`{EXPORTS[name]}`" if name in EXPORTS else ""
        lines.append(f"| `{name}` | {form.title} | {export} |")
    lines.append(_STRATEGIES)
    for name, (stage, copies) in STRATEGIES.items():
        lines.append(f"| `{name}` | {stage} | {'`nnodes`' if copies else 1} |")
    for name, form in FORMATS.items():
        if name not in _REMARKS:
            continue
        lines += ["", f"## {form.title}", "", _REMARKS[name]]
        if name == "transformers":
            lines += ["", f"The same here: {_listed(SAME)}."]
        lines += ["", *_table(_own(name, form.table))]
        if name == "accelerate":
            lines += ["", "In `deepspeed_config`:", "", *_table(_plugin())]
    return "\n".join(lines) + "\n"


def _own(name: str, table: Mapping[str, Entry]) -> list[Entry]:
    """Entries that say more than that a key is the same."""
    same = SAME if name == "transformers" else ()
    return [entry for entry in table.values() if entry.key not in same and entry.key[0] != "_"]


def _plugin() -> list[Entry]:
    return [
        Entry(entry.key, entry.accepts, DEEPSPEED_NAMES[key], "of DeepSpeed's keys above")
        if key in DEEPSPEED_NAMES
        else entry
        for key, entry in PLUGIN_TABLE.items()
    ]


def _table(entries: Iterable[Entry]) -> Iterator[str]:
    """Neighbours of which the same is said share a row."""
    yield "| key | here | |"
    yield "|---|---|---|"
    for (becomes, here, refused), group in groupby(
        entries, lambda entry: (entry.becomes, entry.here, entry.refused)
    ):
        keys = _listed(entry.key for entry in group)
        own = _listed(becomes.split(", ")) if becomes else ""
        why = f"refused: {here}" if refused else here
        yield f"| {keys} | {own} | {why} |"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(name if " " in name else f"`{name}`" for name in names)


if __name__ == "__main__":
    print(document(), end="")
