"""Into which files the tensors of a checkpoint go: one, or several and an index.

Names are those of transformers. Knows names and sizes, not where tensors are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tightfit.training import together
from tightfit.training.tensor_file import Entry

WEIGHTS_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_LARGEST_FILE_BYTES = 50 * 10**9  # transformers' limit


def all_entries(mine: Sequence[Entry]) -> list[Entry]:
    """The entries of all ranks, once each, in one order."""
    found = {entry.name: entry for one in together.from_all(list(mine)) for entry in one}
    return list(found.values())


def split_files(entries: Mapping[str, Sequence[Entry]]) -> dict[str, list[Entry]]:
    """By the names of files; only a model's is cut, into pieces named as transformers does."""
    files: dict[str, list[Entry]] = {}
    for name, its_own in entries.items():
        pieces = _pieces(its_own) if name == WEIGHTS_FILE else [list(its_own)]
        if len(pieces) == 1:
            files[name] = pieces[0]
        else:
            for number, piece in enumerate(pieces, 1):
                stem = Path(name).stem
                files[f"{stem}-{number:05}-of-{len(pieces):05}.safetensors"] = piece
    return files


def write_index(folder: Path, files: Mapping[Path, Sequence[Entry]]) -> None:
    """Say which tensor of a model is in which file, where there are several.

    Raises:
        OSError: it cannot be written.
    """
    cut = {p: its_own for p, its_own in files.items() if p.name.startswith("model-")}
    if cut:
        total = sum(entry.bytes for its_own in cut.values() for entry in its_own)
        index = {
            "metadata": {"total_size": total},
            "weight_map": {e.name: path.name for path, its_own in cut.items() for e in its_own},
        }
        (folder / _INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _pieces(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Runs of entries no larger than a file may be, unless one alone is."""
    pieces: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if pieces[-1] and size + entry.bytes > _LARGEST_FILE_BYTES:
            pieces.append([])
            size = 0
        pieces[-1].append(entry)
        size += entry.bytes
    return pieces
