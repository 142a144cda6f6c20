"""plan.yaml: a plan as a file that a person can read, edit and pass back.

Only the section `policies` is read back; the bill is always worked out anew, since an edited
choice has another one. The optimizer's numbers are not in it: they are the job's, not a choice.
Its states are: an allowed optimizer of 8 bits may be the plan's.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

from tightfit.errors import ConfigError
from tightfit.facts.disk import writing
from tightfit.planner.plan import Plan
from tightfit.policies import PRECISIONS, OptimizerPolicy, Policies
from tightfit.units import format_bytes

_CHOICES_OF_THE_OPTIMIZER = ("name", "master")
_HEADER = """\
# A plan of tightfit. Edit `policies` and pass the file back with --plan.
# Everything below `policies` is for reading; it is worked out again from them.
"""


def write_plan(plan: Plan, path: Path) -> None:
    """Write `plan` to `path`.

    Raises:
        TrainingError: it cannot be written.
    """
    facts = plan.to_json()
    content = {
        "policies": _choices(plan.policies),
        "predicted": {
            "fits": facts["fits"],
            "peak": {
                str(tier): format_bytes(plan.bill.peak_bytes(tier)) for tier in plan.bill.tiers()
            },
            "step_seconds": round(plan.step_time.total, 3),
        },
        "reasons": list(plan.reasons),
        "turned_down": facts["alternatives"],
        "slower": facts["slower"],
    }
    text = yaml.safe_dump(content, sort_keys=False, width=100, allow_unicode=True)
    with writing(path):
        path.write_text(_HEADER + text, encoding="utf-8")


def _choices(policies: Policies) -> dict[str, Any]:
    """All but the optimizer's numbers."""
    plain: dict[str, Any] = _plain(policies)
    optimizer = {name: plain["optimizer"][name] for name in _CHOICES_OF_THE_OPTIMIZER}
    return {**plain, "optimizer": optimizer}


def read_policies(path: Path, optimizer: OptimizerPolicy) -> Policies:
    """The policies of a plan file.

    Args:
        optimizer: the job's, whose numbers are taken, and all of which is where the file says
            nothing of it.

    Raises:
        ConfigError: the file is missing, is not YAML, a key or value is wrong, or the policies do
            not go together.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"plan file {path} does not exist") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"plan file {path} cannot be read: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("policies"), dict):
        raise ConfigError(f"plan file {path} has no section `policies`")
    policies = content["policies"]
    _refuse_unknown_keys(policies, Policies, f"{path}: policies")
    try:
        found = TypeAdapter(Policies).validate_python(
            {**policies, "optimizer": _with_choices(optimizer, policies.get("optimizer"), path)}
        )
    except ValidationError as error:
        raise ConfigError(f"{path}: {_complaint(error.errors()[0])}") from None
    _check_ranges(found, path)
    return found


def _with_choices(optimizer: OptimizerPolicy, given: Any, path: Path) -> dict[str, Any]:
    """The fields of `optimizer` with what a file says of them.

    Raises:
        ConfigError: it says more than is a choice.
    """
    given = {} if given is None else given
    numbers = set(given) - {*_CHOICES_OF_THE_OPTIMIZER} if isinstance(given, Mapping) else {given}
    if numbers:
        raise ConfigError(
            f"{path}: policies.optimizer: only {' and '.join(_CHOICES_OF_THE_OPTIMIZER)} are read; "
            "set learning_rate, weight_decay and the like in the job"
        )
    return {**vars(optimizer), **given}


def _complaint(problem: Any) -> str:
    """One thing that pydantic found, in a line; what policies say themselves is left as it is."""
    where = ".".join(["policies", *map(str, problem["loc"])])
    own_words = problem.get("ctx", {}).get("error")
    if own_words is not None:
        return f"{where}: {own_words}"
    return f"{where}: {problem['input']!r} is not accepted: {problem['msg']}"


def _check_ranges(policies: Policies, path: Path) -> None:
    """What types do not say.

    Raises:
        ConfigError: a value is out of its range.
    """
    precision, adapter, loss = policies.precision.parameters, policies.adapter, policies.loss
    wrong = []
    if precision not in PRECISIONS:
        wrong.append(f"precision.parameters: {precision!r} is not one of {', '.join(PRECISIONS)}")
    if adapter is not None and adapter.rank < 1:
        wrong.append(f"adapter.rank: {adapter.rank} is below 1")
    if adapter is not None and not adapter.alpha > 0:
        wrong.append(f"adapter.alpha: {adapter.alpha} is not above 0")
    if adapter is not None and not 0 <= adapter.dropout < 1:
        wrong.append(f"adapter.dropout: {adapter.dropout} is not from 0 to below 1")
    if not 0 <= loss.label_smoothing < 1:
        wrong.append(f"loss.label_smoothing: {loss.label_smoothing} is not from 0 to below 1")
    if not loss.z_loss >= 0:
        wrong.append(f"loss.z_loss: {loss.z_loss} is below 0")
    if wrong:
        raise ConfigError(f"{path}: policies.{wrong[0]}")


def _plain(value: Any) -> Any:
    """Dataclasses, tuples and enums as what YAML writes."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, str) else value


def _refuse_unknown_keys(given: Mapping[str, Any], kind: type, where: str) -> None:
    fields = {f.name: f for f in dataclasses.fields(kind)}
    for key, value in given.items():
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; it has {', '.join(fields)}"
            raise ConfigError(f"{where}: unknown key {key}{hint}")
        part = _dataclass_of(kind, key)
        if part is not None and isinstance(value, Mapping):
            _refuse_unknown_keys(value, part, f"{where}.{key}")


def _dataclass_of(kind: type, key: str) -> type | None:
    """The dataclass that the field `key` of `kind` holds, if it holds one."""
    hint = get_type_hints(kind)[key]
    kinds = (t for t in (hint, *get_args(hint)) if isinstance(t, type))
    return next((kind for kind in kinds if dataclasses.is_dataclass(kind)), None)
