"""Documents become tokens: which of them are learned, and which row they came from."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from jinja2 import TemplateError

from worker.documents import ASSISTANT, Chat, Content, Pair, Row
from worker.row_filter import RowFilter
from worker.token_cache import Tokens

Ids = np.ndarray[Any, Any]
_DOCUMENTS_AT_ONCE = 256


class UnencodableError(Exception):
    """A row that this tokenizer cannot take; what is wrong, as the end of a message about the row."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A document's token ids, and which of them are learned; None: all."""

    ids: Ids
    learned: np.ndarray[Any, np.dtype[np.bool_]] | None = None


Encode = Callable[[list[Content]], list[Encoded | UnencodableError]]


def encode_bytes(documents: list[Content]) -> list[Encoded | UnencodableError]:
    """One token a byte: texts, and completions after their prompts."""
    return [_bytes_of(document) for document in documents]


def _bytes_of(document: Content) -> Encoded | UnencodableError:
    if isinstance(document, bytes):
        return Encoded(np.frombuffer(document, dtype=np.uint8))
    if isinstance(document, Chat):
        return UnencodableError(_NO_TEMPLATE)
    prompt, completion = document.prompt.encode(), document.completion.encode()
    return _after_prompt(list(prompt), list(completion))


_NO_TEMPLATE = "is a conversation, and the tokenizer has no chat template; name one that has in data.tokenizer"


def encoder(tokenizer: Any) -> Encode:
    """How ``tokenizer`` makes tokens: with the special tokens that it adds, and its end-of-text at the end."""

    def encode(documents: list[Content]) -> list[Encoded | UnencodableError]:
        texts = iter(_texts(tokenizer, [one.decode("utf-8") for one in documents if isinstance(one, bytes)]))
        return [next(texts) if isinstance(one, bytes) else _dialogue(tokenizer, one) for one in documents]

    return encode


def _texts(tokenizer: Any, texts: list[str]) -> Iterator[Encoded]:
    if texts:
        for ids in tokenizer(texts, verbose=False, return_attention_mask=False)["input_ids"]:
            yield Encoded(np.asarray(_ended(tokenizer, ids), dtype=np.int64))


def _ended(tokenizer: Any, ids: list[int]) -> list[int]:
    end = tokenizer.eos_token_id
    return [*ids, end] if end is not None and ids and ids[-1] != end else ids


def _dialogue(tokenizer: Any, document: Pair | Chat) -> Encoded | UnencodableError:
    try:
        return _pair(tokenizer, document) if isinstance(document, Pair) else _chat(tokenizer, document)
    except UnencodableError as error:
        return error


def _pair(tokenizer: Any, pair: Pair) -> Encoded:
    """The prompt as the model would be asked it, then the completion and the end-of-text, which are learned."""
    prompt = tokenizer(pair.prompt, verbose=False)["input_ids"]
    if prompt and prompt[-1] == tokenizer.eos_token_id:
        prompt = prompt[:-1]
    completion = tokenizer(pair.completion, add_special_tokens=False, verbose=False)["input_ids"]
    return _after_prompt(prompt, _ended(tokenizer, completion))


def _after_prompt(prompt: list[int], completion: list[int]) -> Encoded:
    return Encoded(
        np.asarray([*prompt, *completion], dtype=np.int64), np.arange(len(prompt) + len(completion)) >= len(prompt)
    )


def _chat(tokenizer: Any, chat: Chat) -> Encoded:
    """The conversation as the tokenizer's template writes it; what the template lets the assistant say is learned.

    A template says so itself (``{% generation %}``); elsewhere an answer is what it adds to the conversation before it.
    """
    if not tokenizer.chat_template:
        raise UnencodableError(_NO_TEMPLATE)
    messages = list(chat.messages)
    try:
        if "{% generation" in str(tokenizer.chat_template) or "{%- generation" in str(tokenizer.chat_template):
            said = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
            return Encoded(np.asarray(said["input_ids"]), np.asarray(said["assistant_masks"], dtype=np.bool_))
        whole: str = tokenizer.apply_chat_template(messages, tokenize=False)
        spans = [_answer(tokenizer, messages, number, whole) for number in _answers(messages)]
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        said = " ".join(str(error).split())
        raise UnencodableError(f"is refused by the tokenizer's chat template ({said:.200}); mend the row") from None
    found = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    begins, ends = np.asarray(found["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
    learned = np.zeros(len(begins), dtype=np.bool_)
    for first, last in spans:
        learned |= (ends > first) & (begins < last)
    return Encoded(np.asarray(found["input_ids"], dtype=np.int64), learned)


def _answers(messages: list[dict[str, Any]]) -> list[int]:
    return [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]


def _answer(tokenizer: Any, messages: list[dict[str, Any]], number: int, whole: str) -> tuple[int, int]:
    """Where the answer ``messages[number]`` begins and ends in the whole conversation, its closing tokens included."""
    before = tokenizer.apply_chat_template(messages[:number], tokenize=False, add_generation_prompt=True)
    after = tokenizer.apply_chat_template(messages[: number + 1], tokenize=False)
    if not (whole.startswith(after) and after.startswith(before)):
        raise UnencodableError(
            f": the chat template writes message {number + 1} otherwise when others follow, so nobody can tell what is "
            "learned; mark the answers in the template with {% generation %}"
        )
    return len(before), len(after)


def collect(
    rows: Iterable[tuple[Row, Content]],
    encode: Encode,
    kind: type[np.generic],
    length: int,
    is_packed: bool,
    row_filter: RowFilter,
) -> Tokens:
    """The documents of ``rows`` end to end, as ``kind``; what holds no token to learn is left out.

    A conversation longer than ``length`` is left out: cut, its answers would lose their question. A text goes on in the
    next block, or is cut where it is not packed.
    """
    kept: list[tuple[Row, Encoded]] = []
    rows = iter(rows)
    while batch := list(islice(rows, _DOCUMENTS_AT_ONCE)):
        for (row, _), encoded in zip(batch, encode([content for _, content in batch]), strict=True):
            if isinstance(encoded, UnencodableError):
                row_filter.broken(row, str(encoded))
            elif _is_kept(row, encoded, length, is_packed, row_filter):
                kept.append((row, Encoded(encoded.ids.astype(kind, copy=False), encoded.learned)))
    return _joined(kept, kind)


def _is_kept(row: Row, encoded: Encoded, length: int, is_packed: bool, row_filter: RowFilter) -> bool:
    learnable = len(encoded.ids) > 1 and (encoded.learned is None or encoded.learned[1:].any())
    if not learnable:
        row_filter.leave_out("no_trainable_token", row)
    elif len(encoded.ids) > length and encoded.learned is not None:
        row_filter.leave_out("too_long", row)
        return False
    elif len(encoded.ids) > length and not is_packed:
        row_filter.leave_out("cut", row)
    return bool(learnable)


def _joined(kept: list[tuple[Row, Encoded]], kind: type[np.generic]) -> Tokens:
    files = {path: number for number, path in enumerate(dict.fromkeys(row.path for row, _ in kept))}
    lengths = np.asarray([0, *(len(one.ids) for _, one in kept)], dtype=np.int64)
    learned = None
    if any(one.learned is not None for _, one in kept):
        whole = (one.learned if one.learned is not None else np.ones(len(one.ids), dtype=np.bool_) for _, one in kept)
        learned = np.concatenate(list(whole))
    return Tokens(
        ids=np.concatenate([one.ids for _, one in kept]) if kept else np.empty(0, dtype=kind),
        starts=np.cumsum(lengths)[:-1],
        rows=np.asarray([(files[row.path], row.number) for row, _ in kept], dtype=np.int64).reshape(-1, 2),
        files=tuple(files),
        learned=learned,
    )
