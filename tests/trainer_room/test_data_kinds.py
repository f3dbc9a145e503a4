"""Every kind of data is resumed to the bit, in the run's own folder and from its cache."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.recipe_room.recipes import chat_tokenizer
from tests.trainer_room.rig import TINY, Rig, same_end
from worker.contract.data_report import DataReport
from worker.contract.files import read_message

pytestmark = pytest.mark.training


def rows(kind: str) -> list[dict[str, Any]]:
    pairs = [(f"what is {number} + 1?", str(number + 1)) for number in range(60)]
    if kind == "pairs":
        return [{"prompt": question, "completion": answer} for question, answer in pairs]
    turns = [[{"role": "user", "content": one}, {"role": "assistant", "content": two}] for one, two in pairs]
    return [{"messages": messages} for messages in turns]


@pytest.mark.parametrize(("kind", "is_packed"), [("pairs", False), ("chat", True)])
def test_a_kill_changes_no_bit(make_rig: Callable[..., Rig], tmp_path: Path, kind: str, is_packed: bool) -> None:
    chat_tokenizer().save_pretrained(tmp_path / "tokenizer")
    lines = [json.dumps(row) for row in rows(kind)] + ['{"broken']
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    data = {"train": str(tmp_path / "rows.jsonl"), "tokenizer": str(tmp_path / "tokenizer"), "max_tokens": 64}
    data |= {"pack": is_packed, "eval_share": 0.1, "max_bad_rows": 1, "workers": 1}
    told = {"model": {"config": {**TINY, "vocab_size": 260}}, "data": data, "training": {"eval_every": 4}}
    whole, cut = make_rig("whole", **told), make_rig("cut", **told)
    whole.finish()
    cut.start(pause_at=[6])
    cut.pauses(6)
    cut.is_killed()
    cut.finish(restart=1)
    same_end(whole, cut)
    report = read_message(whole.run.data_report, DataReport)
    assert report is not None
    assert report.eval is not None
    assert (report.train.documents, report.eval.documents) == (54, 6)
    assert report.train.left_out["broken"].rows == {data["train"]: [61]}
    log = (whole.processes[0]).said()
    assert "rows.jsonl: line 61 is not JSON" in log
    assert "data.train: 54 documents" in log
