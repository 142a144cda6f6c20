"""One optimizer step of DeepSpeed on the CPU: `deepspeed_step.py ds_config.json MODEL`.

Prints the loss of one batch before and after some steps on it.
"""

from __future__ import annotations

import sys

import deepspeed
import torch
from transformers import AutoModelForCausalLM


def main(config: str, folder: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    tokens = torch.randint(3, 60, (2, 32))
    losses = []
    for _ in range(4 * engine.gradient_accumulation_steps()):
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    print(losses[0], losses[-1])


if __name__ == "__main__":
    main(*sys.argv[1:])
