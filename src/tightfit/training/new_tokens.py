"""A tokenizer with more tokens than its model has rows for. Knows neither files nor weights."""

from __future__ import annotations

from itertools import chain

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from tightfit.errors import ConfigError
from tightfit.facts.job import Job
from tightfit.training.samples import PreparedData


def grow_vocabulary(
    job: Job, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, data: PreparedData
) -> None:
    """Have `config` say the rows that the tokenizer needs, if the job wants it to.

    Tokens without a row are no mistake as long as the data has none of them: some tokenizers have
    tokens that were never used.

    Raises:
        ConfigError: the data has tokens without a row, and the job does not ask for any.
    """
    text = config.get_text_config()
    rows, needed = int(text.vocab_size), max(tokenizer.get_vocab().values(), default=-1) + 1
    if needed <= rows:
        return
    if job.resize_vocab:
        text.vocab_size = needed
        return
    samples = chain(data.train, data.held_out)
    highest = max((max(sample.input_ids, default=0) for sample in samples), default=0)
    if highest >= rows:
        token = tokenizer.convert_ids_to_tokens(highest)
        raise ConfigError(
            f"the data has the token {token!r}, number {highest}, and the model has an embedding "
            f"for {rows} tokens: set resize_vocab: true, which gives the tokenizer's "
            f"{needed - rows} others a row each"
        )
