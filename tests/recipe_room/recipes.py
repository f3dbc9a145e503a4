"""Configurations and tiny models that the tests of this room share."""

from typing import Any

from transformers import PreTrainedTokenizerFast

from worker.contract.config import Config
from worker.models import byte_tokenizer

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}


def configured(
    model: dict[str, Any] | None = None, data: dict[str, Any] | None = None, training: dict[str, Any] | None = None
) -> Config:
    """A config with the given keys, as it would be read from a file."""
    return Config.model_validate(
        {
            "run": {"name": "recipe"},
            "model": model or {"config": LLAMA},
            "data": {"train": "stdlib", "tokenizer": "bytes", **(data or {})},
            "training": {"optimizer": {"learning_rate": 1e-3}, **(training or {})},
        }
    )


CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def chat_tokenizer(template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """The byte values and four marks, with a chat template that writes them."""
    tokenizer = byte_tokenizer()
    marks = ["</s>", "<user>", "<assistant>", "<system>"]
    tokenizer.add_special_tokens({"eos_token": "</s>", "extra_special_tokens": marks[1:]})
    tokenizer.chat_template = template
    return tokenizer
