"""The optimizer's states in a checkpoint, and the random states: read and written by parts.

A file has each state whole, in the shape of its parameter, so that a run goes on with any number of
ranks, on any tiers. Moments of 8 bits have scales of blocks that begin where a rank's part does:
where ranks hold parts of a parameter, files have the fp32 values. Knows no folders.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import nn

from tightfit.engine.engine import Engine
from tightfit.engine.regions import boxes_of, is_whole, part_of, whole
from tightfit.engine.rules import SCALES, narrowed, scales_of, widened
from tightfit.errors import ConfigError
from tightfit.ledger import local_part
from tightfit.training import together
from tightfit.training.saved_model import writes
from tightfit.training.tensor_file import Entry, Part, TensorReader

_STEP = "step"
_RANDOM_STATE = "random_state"
_DEVICE_RANDOM_STATE = "device_random_state"
_ODD = 0x9E3779B97F4A7C15  # mixes step and rank into seeds that have nothing in common


def state_entries(engine: Engine) -> list[Entry]:
    """All states of this rank's parameters, each of the size of the whole."""
    return [
        Entry(f"{name}.{key}", dtype, tuple(shape))
        for name, parameter in engine.model.named_parameters()
        for key, (dtype, shape) in _saved_states(engine, parameter).items()
    ]


def state_parts(engine: Engine) -> Iterator[Part]:
    """What this rank writes of them; one parameter's are in memory at a time."""
    for name, parameter in engine.model.named_parameters():
        keys = _saved_states(engine, parameter)
        if not keys or not writes(engine, parameter):
            continue
        states, boxes = engine.optimizer.states_of(parameter), boxes_of(parameter)
        for key in keys:
            if _is_whole(key, states[key].shape, parameter) or key.endswith(SCALES):
                if all(part.start == 0 for part in boxes[0].of_whole):
                    yield Part(f"{name}.{key}", whole(states[key]), states[key])
            else:
                values = states[key]
                if values.dtype is torch.uint8 and not is_whole(parameter):
                    scales = _scales_here(key, states)
                    values = widened(values, states[scales], scales)
                values = values.view(local_part(parameter).shape)
                for box in boxes:
                    yield Part(f"{name}.{key}", box.of_whole, values[box.of_part])


def load_states(engine: Engine, files: TensorReader, checkpoint: Path) -> None:
    """Put a checkpoint's states into those of a fresh engine.

    Raises:
        ConfigError: they are those of another model, method or optimizer.
    """
    _check_same(engine, files, checkpoint)
    for name, parameter in engine.model.named_parameters():
        here = engine.optimizer.state_entries(parameter)
        for key in _saved_states(engine, parameter):
            if not key.endswith(SCALES):
                loaded = _read(files, name, key, parameter, here)
                engine.optimizer.load_states(parameter, loaded)


def random_entries(engine: Engine) -> list[Entry]:
    """This rank's random states, by names of its own."""
    return [Entry(part.name, part.values.dtype, (part.values.numel(),)) for part in _random(engine)]


def random_parts(engine: Engine) -> Iterator[Part]:
    """The same, to be written."""
    yield from _random(engine)


def load_random_states(engine: Engine, files: TensorReader, seed: int, step: int) -> None:
    """This rank's random states; fresh ones where the run had fewer ranks, or another device.

    Args:
        seed, step: of the run, which fresh ones depend on.
    """
    seed_rank(seed + step, engine.ranks.data_rank)
    for part in _random(engine):
        if part.name not in files.names:
            continue
        values = files.read(part.name, part.region)
        if part.name.startswith(_DEVICE_RANDOM_STATE):
            torch.cuda.set_rng_state(values)
        else:
            torch.set_rng_state(values)


def seed_rank(seed: int, data_rank: int) -> None:
    """Random numbers of their own for ranks that see different data; rank 0's are the seed's."""
    torch.manual_seed((seed + data_rank * _ODD) % 2**63)


def _saved_states(
    engine: Engine, parameter: nn.Parameter
) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Types and shapes in the file; a master that equals its parameter is not stored twice."""
    entries = engine.optimizer.state_entries(parameter)
    all_here = is_whole(parameter)
    saved = {}
    for key, (dtype, shape) in entries.items():
        if key == "master" and dtype is parameter.dtype:
            continue
        if _is_whole(key, shape, parameter):
            saved[key] = (dtype, shape)
        elif key.endswith(SCALES):
            if all_here:
                saved[key] = (dtype, shape)
        else:
            wide = dtype is torch.uint8 and not all_here
            saved[key] = (torch.float32 if wide else dtype, parameter.shape)
    return saved


def _read(
    files: TensorReader,
    owner: str,
    key: str,
    parameter: nn.Parameter,
    here: Mapping[str, tuple[torch.dtype, torch.Size]],
) -> dict[str, torch.Tensor]:
    """A state of this rank's part, as the engine keeps it: with its scales where it has 8 bits.

    Args:
        owner: the parameter's name.
        here: all its states here.
    """
    name = f"{owner}.{key}"
    if _is_whole(key, here[key][1], parameter):
        return {key: files.read(name)}
    wanted, saved = scales_of(key, here), scales_of(name, files.names)
    if saved is not None and saved == f"{owner}.{wanted}" and is_whole(parameter):
        return {key: files.read(name), str(wanted): files.read(saved)}
    if saved is not None:
        codes, scales = files.read(name), files.read(saved)
        of_moment = saved.removeprefix(f"{owner}.")
        values = part_of(widened(codes, scales, of_moment).view(parameter.shape), parameter)
    else:
        values = files.read_part(name, parameter)
    if wanted is None:
        return {key: values}
    codes, scales = narrowed(values.contiguous().clone(), wanted)
    return {key: codes.view(values.shape), wanted: scales}


def _scales_here(key: str, states: Mapping[str, torch.Tensor]) -> str:
    scales = scales_of(key, states)
    assert scales is not None, "a moment of 8 bits has scales"
    return scales


def _is_whole(key: str, shape: torch.Size, parameter: nn.Parameter) -> bool:
    """Whether a state is not of the values of a part: a counter, or Adafactor's rows and columns,
    which only whole parameters have."""
    others = shape != local_part(parameter).shape and not key.endswith(SCALES)
    return key == _STEP or others


def _check_same(engine: Engine, files: TensorReader, checkpoint: Path) -> None:
    """The files have exactly the states that the engine has; on how many ranks is no matter.

    Raises:
        ConfigError: they have others.
    """
    mine = {e.name: e.shape for e in state_entries(engine) if not e.name.endswith(SCALES)}
    expected = {name: shape for one in together.from_all(mine) for name, shape in one.items()}
    random = (_RANDOM_STATE, _DEVICE_RANDOM_STATE)
    found = {
        name: files.shape(name)
        for name in files.names
        if not name.endswith(SCALES) and not name.startswith(random)
    }
    if found != expected:
        raise ConfigError(
            f"{checkpoint} holds the optimizer of another model or method; resume with the "
            "finetuning_type, precision, optim and lora settings that the run had"
        )


def _random(engine: Engine) -> list[Part]:
    """This rank's random states; rank 0's have the names that a run of one rank gives them."""
    number = together.rank()
    suffix = f".{number}" if number else ""
    states = {_RANDOM_STATE: torch.get_rng_state()}
    if engine.device.type == "cuda":
        states[_DEVICE_RANDOM_STATE] = torch.cuda.get_rng_state()
    return [Part(name + suffix, whole(state), state) for name, state in states.items()]
