"""A real small tokenizer and a real small model, made here: the suite needs no network."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tightfit.dry_run.cache import FOLDER_VARIABLE

# Workers of pytest-xdist share the cores: threads that wait for each other on a core that is taken
# make small operations many times as slow.
torch.set_num_threads(
    max(1, (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
)

# Slow machines are no failures. Continuous integration draws the same examples every time; by hand
# each run looks for new ones.
settings.register_profile("tightfit", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("tightfit")


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Dry runs are kept for the session; the user's own and the Hub are left alone."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER_VARIABLE, str(folder))
        patch.setenv("HF_HUB_OFFLINE", "1")  # unknown names ask nobody
        yield folder


@pytest.fixture(autouse=True)
def any_folder_is_on_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Temporary folders are in memory on many systems; here they do as disks."""
    monkeypatch.setattr("tightfit.facts.disk._IN_MEMORY", ())


@pytest.fixture
def forked_ranks(tmp_path: Path) -> Callable[[Callable[[int], Any], int], list[Any]]:
    """What some work returns on each of several forked ranks on gloo."""

    def run(work: Callable[[int], Any], ranks: int) -> list[Any]:
        context = multiprocessing.get_context("fork")
        results = context.SimpleQueue()

        def rank(number: int) -> None:
            torch.set_num_threads(1)
            store = dist.FileStore(str(tmp_path / "store"), ranks)
            dist.init_process_group("gloo", store=store, rank=number, world_size=ranks)
            results.put((number, work(number)))
            dist.destroy_process_group()

        processes = [context.Process(target=rank, args=(number,)) for number in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(120)
        assert [process.exitcode for process in processes] == [0] * ranks
        return [result for _, result in sorted(results.get() for _ in range(ranks))]

    return run


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXT = [
    "The assistant answers the question of the user in a few words.\n\nThen the next one.",
    "What is a tokenizer? It cuts text into tokens, which a model reads one after the other.",
    "Memory is full: the optimizer holds two numbers for each parameter, and gradients one.\n\n",
]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of about 400 tokens with ChatML's special tokens and template."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(TEXT * 4, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        chat_template=CHATML,
    )


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Shared, so leave it as it is; `fresh_tokenizer` may be changed."""
    return make_tokenizer()


@pytest.fixture
def fresh_tokenizer() -> PreTrainedTokenizerFast:
    """One that a test may change."""
    return make_tokenizer()


@pytest.fixture(scope="session")
def tiny_model_folder(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast
) -> Path:
    """A folder with a random Llama of 3 layers and its tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
