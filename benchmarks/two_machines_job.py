"""The job of `two_machines.py`: a small model with much to send, its data, keys and plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from machine_link import ADDRESSES
from tightfit.planner.collectives import ModelSizes
from tightfit.policies import ShardingPolicy

MACHINES, RANKS_EACH = 2, 2
RANKS = MACHINES * RANKS_EACH
STEPS = 5  # of which the first begins before the link is looked at
WORDS, TOKENS = 4000, 60


def make_model(folder: Path) -> ModelSizes:
    """A Llama of random weights with a tokenizer of whole words."""
    words = {f"w{number}": number for number in range(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w0", bos_token="w1", eos_token="w2", pad_token="w2"
    ).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    counts = [parameter.numel() for parameter in model.parameters()]
    return ModelSizes(
        trainable=sum(counts),
        frozen=0,
        quantised=0,
        trained_tensors=len(counts),
        layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=WORDS,
        tied=True,
    )


def make_rows(path: Path) -> None:
    """Texts of words that follow each other in one order."""
    rows = [
        " ".join(f"w{3 + (7 * row + word) % 50}" for word in range(TOKENS - 1)) for row in range(64)
    ]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))


def job(folder: Path, name: str, sharding: ShardingPolicy, **keys: Any) -> Path:
    """A file of keys, and a plan beside it, so that nothing is chosen."""
    own = folder / name
    own.mkdir()
    policies = {
        "batch": {"micro_batch_size": 1, "accumulation_steps": 1},
        "precision": {"parameters": "fp32"},
        "sharding": {
            "ranks": RANKS, "zero_stage": sharding.zero_stage, "replicas": sharding.replicas,
        },
    }  # fmt: skip
    (own / "plan.yaml").write_text(yaml.safe_dump({"policies": policies}))
    content = {
        "model_name_or_path": str(folder / "model"),
        "dataset": str(folder / "rows.jsonl"),
        "plan": str(own / "plan.yaml"),
        "output_dir": str(own / "run"),
        "train_batch_size": RANKS,
        "per_device_train_batch_size": 1,
        "max_steps": STEPS,
        "save_strategy": "no",
        "logging_steps": 1,
        "precision": "fp32",
        "loss": "full",
        "gradient_checkpointing": False,
        "offload_optimizer": "none",
        "zero_stage": sharding.zero_stage,
        "data_parallel_replicas": sharding.replicas,
        "num_gpus": RANKS_EACH,
        "nnodes": MACHINES,
        "master_addr": ADDRESSES[0],
        "ddp_timeout": 120,
    }
    path = own / "job.yaml"
    path.write_text(yaml.safe_dump(content | keys))
    return path
