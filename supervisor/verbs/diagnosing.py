"""The verb that says why a run went wrong: diagnose."""

import argparse
import json
import sys

from supervisor.believed import read_evidence
from supervisor.diagnosis import diagnose as find_causes
from supervisor.report.diagnosis_text import as_json
from supervisor.report.figures import printable
from supervisor.runs import find_run
from supervisor.verbs.exits import OK, WRONG_INPUT
from supervisor.verbs.looking import warn_of_a_broken_history
from supervisor.verbs.replaying import replay
from supervisor.views import show_diagnosis


def diagnose(args: argparse.Namespace) -> int:
    """What went wrong in a run and why, with the evidence and the one thing to try next."""
    run_dir = find_run(args.run, args.dir)
    if not args.json:
        show_diagnosis(run_dir, sys.stdout)
        warn_of_a_broken_history(run_dir)
    replayed = replay(run_dir, is_here=args.here) if args.replay else None
    if args.json:
        told = {"findings": as_json(find_causes(read_evidence(run_dir)))}
        print(json.dumps(told if replayed is None else told | {"replay": replayed.as_json}, indent=2))
    elif replayed is not None:
        print("\n".join(map(printable, ("", *replayed.lines))))
    return OK if replayed is None or replayed.was_tried else WRONG_INPUT
