"""What the pages say is run or checked against the sources."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "src" / "tightfit"


def code_blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def test_python_example_trains_and_saves(tiny_model_folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    tokens = torch.randint(3, 60, (4, 64))

    def batches(micro: int, accumulate: int) -> Iterator[dict[str, torch.Tensor]]:
        for piece in tokens.split(micro)[:accumulate]:
            yield {"input_ids": piece, "labels": piece}

    names: dict[str, object] = {
        "model_folder": tiny_model_folder,
        "output_folder": tmp_path / "out",
        "batches": batches,
    }
    blocks = code_blocks("docs/python.md", "python")
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "docs/python.md", "exec"), names)
    losses = names["losses"]
    assert isinstance(losses, list)
    assert losses[-1] < losses[0]
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_readme_tree_names_every_folder_and_module() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    top = [path.name for path in SOURCES.iterdir() if not path.name.startswith(("_", "py.typed"))]
    missing = [name for name in top if name not in readme]
    assert not missing


def test_readme_names_the_two_commands() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for command in ("demo", "test"):
        assert f"make {command}" in readme
        assert command in targets


def test_links_between_pages_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
