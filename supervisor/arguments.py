"""The arguments of each verb of the command line."""

import argparse
import importlib.metadata
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, get_args

from supervisor.runs import RunError, all_runs, find_run
from worker.contract.inference import Weights
from worker.contract.rehearsal import FaultKind

Verb = Callable[[argparse.Namespace], int]


def parser_of(verbs: Sequence[Verb]) -> argparse.ArgumentParser:
    """The command's parser; a verb's help is the first line of its function's docstring."""
    parser = argparse.ArgumentParser(prog="higgsfield", description="Submit once, walk away, read the rollback log.")
    version = importlib.metadata.version("higgsfield-supervisor")
    parser.add_argument("--version", action="version", version=f"higgsfield {version}")
    adder = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb in verbs:
        text = (verb.__doc__ or "").splitlines()[0]
        of_verb = adder.add_parser(verb.__name__, help=text, description=text)
        of_verb.set_defaults(act=verb)
        for add in _ARGUMENTS[verb.__name__]:
            add(of_verb)
    return parser


def _config(of_verb: argparse.ArgumentParser) -> None:
    of_verb.add_argument("config", type=Path, metavar="CONFIG", help="the run's YAML file")
    of_verb.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override one key; may be given again"
    )


def _config_or_all(of_verb: argparse.ArgumentParser) -> None:
    either = of_verb.add_mutually_exclusive_group(required=True)
    either.add_argument("config", type=Path, nargs="?", metavar="CONFIG", help="the run's YAML file")
    all_of = either.add_argument("--all", type=Path, metavar="DIR", help="all runs in DIR instead, those to come too")
    all_of.completer = _folders  # type: ignore[attr-defined]
    of_verb.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one key of CONFIG")


def _once(of_verb: argparse.ArgumentParser) -> None:
    of_verb.add_argument("--once", action="store_true", help="make one pass and leave, for cron")


def _run(of_verb: argparse.ArgumentParser) -> None:
    _name_of_run(of_verb, None)


def _run_or_all(of_verb: argparse.ArgumentParser) -> None:
    _name_of_run(of_verb, "?")


def _name_of_run(of_verb: argparse.ArgumentParser, nargs: str | None) -> None:
    run = of_verb.add_argument("run", nargs=nargs, metavar="RUN", help="a run's folder, or its name under --dir")
    run.completer = _names_of_runs  # type: ignore[attr-defined]
    _dir(of_verb)


def _names_of_runs(parsed_args: argparse.Namespace, **of_argcomplete: Any) -> list[str]:
    """What the shell completes a RUN with."""
    return [run_dir.path.name for run_dir in all_runs(parsed_args.dir)]


def _folders(prefix: str, **of_argcomplete: Any) -> Iterable[str]:
    from argcomplete.completers import DirectoriesCompleter

    return DirectoriesCompleter()(prefix=prefix)


def _faults(**of_argcomplete: Any) -> list[str]:
    """What the shell completes KIND@STEP with: no step is better than another."""
    return [f"{kind}@" for kind in get_args(FaultKind)]


def _steps_of_checkpoints(parsed_args: argparse.Namespace, **of_argcomplete: Any) -> list[str]:
    """What the shell completes a STEP with."""
    try:
        return [str(step) for step in find_run(parsed_args.run, parsed_args.dir).checkpoint_steps()]
    except RunError:
        return []


def _dir(of_verb: argparse.ArgumentParser) -> None:
    of_verb.add_argument("--dir", type=Path, default=Path("runs"), help="where runs live (default: runs)")


def _adopt(of_verb: argparse.ArgumentParser) -> None:
    of_verb.add_argument("folder", type=Path, metavar="FOLDER", help="what a Trainer wrote: checkpoint-N in it")
    of_verb.add_argument("--config", type=Path, required=True, metavar="CONFIG", help="the new run's YAML file")
    of_verb.add_argument(
        "--sbatch", type=Path, metavar="FILE", help="a batch script whose #SBATCH options it takes over"
    )
    of_verb.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one key of CONFIG")


def _json(of_verb: argparse.ArgumentParser) -> None:
    of_verb.add_argument("--json", action="store_true")


def _strict(of_verb: argparse.ArgumentParser) -> None:
    of_verb.add_argument("--strict", action="store_true", help="warnings are errors: exit code 2")


def _log(of_verb: argparse.ArgumentParser) -> None:
    of_verb.add_argument("--since", metavar="TIME", help="2h, 30min, 1d, 17:40, or 2026-11-29 17:40")
    of_verb.add_argument("--follow", action="store_true", help="go on as events come, until the run is over")


def _report(of_verb: argparse.ArgumentParser) -> None:
    of_verb.add_argument("--output", type=Path, metavar="FILE", help="default: report.html in the run")


def _rollback(of_verb: argparse.ArgumentParser) -> None:
    to = of_verb.add_argument("--to", type=int, required=True, metavar="STEP", help="a checkpoint's; 0 = from scratch")
    to.completer = _steps_of_checkpoints  # type: ignore[attr-defined]
    of_verb.add_argument("--lr-scale", type=float, metavar="X", help="share of the configured rate (default: as now)")
    of_verb.add_argument("--skip", action="store_true", help="leave out all batches since that step")


def _pin(of_verb: argparse.ArgumentParser) -> None:
    step = of_verb.add_argument("step", type=int, metavar="STEP", help="a checkpoint's step")
    step.completer = _steps_of_checkpoints  # type: ignore[attr-defined]


def _notify(of_verb: argparse.ArgumentParser) -> None:
    of_verb.add_argument("--notify", type=Path, metavar="CONFIG", help="send a test to what its `notify` names")


def _rehearse(of_verb: argparse.ArgumentParser) -> None:
    fault = of_verb.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="KIND@STEP",
        help="spike, preempt, kill, hang, torn-save or supervisor; may be given again (default: each, from 40 to 140)",
    )
    fault.completer = _faults  # type: ignore[attr-defined]
    of_verb.add_argument("--learning-rate", metavar="RATES", help="compare rates instead: 1e-5,2e-5,5e-5")
    of_verb.add_argument("--steps", type=int, metavar="N", help="how long it is (rates: 100)")


def _detect(of_verb: argparse.ArgumentParser) -> None:
    of_verb.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a loss log")
    of_verb.add_argument("--set", action="append", default=[], metavar="spike.KEY=VALUE", help="a detector's setting")
    of_verb.add_argument("--html", type=Path, metavar="PAGE", help="draw the curves and what was found")


def _sampling(of_verb: argparse.ArgumentParser) -> None:
    of_verb.add_argument("--prompt", required=True, metavar="TEXT", help="what the text begins with")
    of_verb.add_argument("--weights", choices=get_args(Weights), help="default: ema where it evaluates no worse")
    of_verb.add_argument("--chat", dest="is_chat", action="store_true", help="the prompt is a user's message")
    of_verb.add_argument("--max-tokens", type=int, metavar="N", help="at most so many tokens (default: 256)")
    of_verb.add_argument("--temperature", type=float, metavar="T", help="0: the likeliest token (default: 0.8)")
    of_verb.add_argument("--top-p", type=float, metavar="P", help="draw from the likeliest, with this share together")
    of_verb.add_argument("--top-k", type=int, metavar="K", help="draw from so many of the likeliest")
    of_verb.add_argument("--seed", type=int, metavar="N", help="draw the same again")
    of_verb.add_argument("--here", action="store_true", help="on this machine, not as a job")


def _replay(of_verb: argparse.ArgumentParser) -> None:
    of_verb.add_argument("--replay", action="store_true", help="train the bad steps again, with changes")
    of_verb.add_argument("--here", action="store_true", help="replay on this machine, not as a job")


_ARGUMENTS: Final[Mapping[str, Sequence[Callable[[argparse.ArgumentParser], None]]]] = {
    "run": (_config_or_all, _once),
    "submit": (_config,),
    "adopt": (_adopt,),
    "check": (_config, _json, _strict),
    "rehearse": (_config, _json, _rehearse),
    "detect": (_detect, _json),
    "status": (_run_or_all, _json),
    "watch": (_run,),
    "log": (_run, _json, _log),
    "diagnose": (_run, _json, _replay),
    "report": (_run, _report),
    "stop": (_run,),
    "resume": (_run,),
    "rollback": (_run, _rollback),
    "pin": (_run, _pin),
    "infer": (_run, _sampling),
    "doctor": (_dir, _json, _notify),
}
