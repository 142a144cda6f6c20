"""Prints `docs/config.md` from the fields of `Job`: `python -m tightfit.cli.document_config`."""

from __future__ import annotations

from tightfit.cli.arguments import default_of
from tightfit.facts.job import Job
from tightfit.facts.job_values import accepted_by
from tightfit.interop.other_names import NOT_YET, RENAMED

_INTRODUCTION = """\
# Keys of a job

<!-- Made by `python -m tightfit.cli.document_config` from src/tightfit/facts/job.py. -->

One flat set of keys, in a YAML file and as flags of every verb. Flags win over the file:

    tightfit train job.yaml --learning_rate 1e-4 --resume

- Underscores or dashes: `--output_dir` and `--output-dir` are the same.
- Switches need no value: `--resume`, or `--resume false` against a `true` in the file.
- Lists are separated by commas in flags: `--allow lora`.
- `auto` leaves the choice to the planner; `none` is no value.
- Sizes are written like `900MiB`, `24GB` or `1.5GiB` (1 GiB is 2^30 bytes, 1 GB is 10^9).
- Relative paths are relative to the folder the command runs in.
- A key that nobody knows, a key written twice and a value of the wrong type are errors.

| key | default | accepts | meaning |
|---|---|---|---|"""

_OTHER = """
## Names of other tools

These are taken as what they mean here; `bf16: true` is `precision: bf16`, `warmup_ratio: 0.1` is
`warmup_steps: 0.1`, `resume_from_checkpoint: true` is `resume: true`, and `batch_size` is refused
because it can mean two things.

| name | key |
|---|---|"""

_LATER = """
These are known and not available yet. They are accepted when they ask for nothing (`false`,
`none`, `auto` or a value in the second column) and refused by name otherwise.

| name | accepted |
|---|---|"""

_CONFIGS = """
`config` and `deepspeed` name a config of another tool, whose keys are taken as those of the job:
[interop.md](interop.md)."""


def document() -> str:
    """The whole page."""
    lines = [_INTRODUCTION]
    for key, field in Job.model_fields.items():
        cells = (f"`{key}`", default_of(key), accepted_by(key), field.description or "")
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    lines.append(_OTHER)
    lines += [f"| `{name}` | `{key}` |" for name, key in RENAMED.items()]
    lines.append(_LATER)
    lines += [
        f"| `{name}` | {', '.join(f'`{value}`' for value in accepted)} |"
        for name, (accepted, _) in NOT_YET.items()
    ]
    lines.append(_CONFIGS)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(document(), end="")
