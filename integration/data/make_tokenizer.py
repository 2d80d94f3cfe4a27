"""Train the debug configurations' byte-level BPE tokenizer on the training part of python_stdlib.

    python -m path_backend.integration.data.make_tokenizer [folder]

Deterministic for one Python version. The default folder is the committed asset, trained on Python
3.11.7's library. Its 2,048 tokens are the vocabulary size of torchtitan's llama3 and qwen3 debug
flavours (and a multiple of 64, so that tensor parallelism divides it). Every byte is a token, so
any other text encodes too, without loss but less compactly.
"""

import argparse
import json
import sysconfig
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from path_backend.integration.data.text import TOKENIZER_DIR, load

VOCAB_SIZE = 2048
BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"


def train(texts: list[str]) -> Tokenizer:
    """A tokenizer with ids BOS = 0, EOS = 1, then bytes, then merges; adds neither BOS nor EOS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the files that torchtitan reads: the tokens, and the names of BOS and EOS."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=TOKENIZER_DIR)
    folder = parser.parse_args().folder
    dataset = load(sysconfig.get_path("stdlib"), held_out=False)
    save(train(list(dataset["text"])), folder)
    print(f"{folder}: {VOCAB_SIZE} tokens from {len(dataset)} modules")


if __name__ == "__main__":
    main()
