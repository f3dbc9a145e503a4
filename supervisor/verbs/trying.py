"""Verbs that try something out: check, detect, infer."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator

from pydantic import ValidationError

from slurm.scheduler import choose
from supervisor.config import ConfigError, load_config, load_spike, writer_of_keys
from supervisor.page_file import page_place, publish_page
from supervisor.report.figures import printable
from supervisor.runs import RunError, find_run
from supervisor.supervise import read_state
from supervisor.verbs.exits import OK, WRONG_INPUT, complain, sigterm_as_ctrl_c
from worker.contract.config import read as read_config
from worker.contract.files import UnusableFileError
from worker.contract.inference import Piece, Question


def check(args: argparse.Namespace) -> int:
    """What can be known before anything is spent."""
    from supervisor.check import CheckResult
    from supervisor.check import check as examine
    from supervisor.known_facts import look_closer

    try:
        config = load_config(args.config, args.set)
        result = examine(config, str(args.config), writer_of_keys(args.config, args.set), look_closer)
    except ConfigError as error:
        if not args.json:
            raise
        result = CheckResult(error.findings, (), "")
    print(json.dumps(result.as_json(), indent=2) if args.json else result.as_text())
    is_refused = result.errors or (args.strict and result.warnings)
    return WRONG_INPUT if is_refused else OK


def detect(args: argparse.Namespace) -> int:
    """What the detector says about loss logs of any tool: what would have been rolled back."""
    from supervisor.detect import examine_log, lines_about

    rules, examined, unusable = load_spike(args.set), [], []
    if args.html is not None:
        page_place(args.html)  # before anything is read: it may be refused
    for file in args.files:
        try:
            examined.append(examine_log(file, rules))
        except UnusableFileError as error:
            unusable.append(error)
            continue
        print(json.dumps(examined[-1].as_json()) if args.json else "\n".join(map(printable, lines_about(examined[-1]))))
    if args.html is not None:
        from supervisor.report.detect_page import detect_page

        publish_page(args.html, detect_page(examined))
    for one in unusable:
        complain(str(one))
    return WRONG_INPUT if unusable else OK


def infer(args: argparse.Namespace) -> int:
    """Generate text from the run's weights."""
    from supervisor.infer import answer_here, answer_of_job, inference_request

    run_dir = find_run(args.run, args.dir)
    given = {name: getattr(args, name) for name in Question.model_fields if getattr(args, name) is not None}
    try:
        question = Question.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        raise RunError(f"--{str(first['loc'][0]).replace('_', '-')}: {first['msg']}") from None
    if args.here:
        return _print_answer(answer_here(run_dir, question, dict(os.environ)))
    config = read_config(run_dir.config)
    job = inference_request(config, run_dir, read_state(run_dir).run_id, question)
    return _print_answer(answer_of_job(job, choose(config.cluster.kind, run_dir.jobs)))


def _print_answer(pieces: Iterator[Piece]) -> int:
    """The text on stdout as it comes, everything else on stderr."""
    with sigterm_as_ctrl_c(), contextlib.closing(pieces):  # type: ignore[type-var]
        for piece in pieces:
            print(piece.text, end="", flush=True)
            if piece.note is not None:
                print(piece.note, file=sys.stderr, flush=True)
            if piece.error is not None:
                raise RunError(piece.error)
    print()
    return OK
