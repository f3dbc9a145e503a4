"""The process that the scheduler starts, one per task: parent of a trainer, free of torch.

It claims the attempt, starts the trainer, passes signals on, writes the exit report, and keeps the allocation for the
next attempt.  It talks to the supervisor and to the other ranks through files only.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from worker.agent_files import (
    claim_attempt,
    has_reported,
    has_run_before,
    let_go,
    look,
    publish_report,
    tell_hang,
    trainers_word,
)
from worker.agent_report import error_of_trainer, left_because, outcome_of_trainer, tells_of_a_kill
from worker.agent_rules import (
    PEER_GRACE_S,
    Asked,
    End,
    Fenced,
    Leave,
    Move,
    Past,
    Running,
    Seen,
    Send,
    StartTrainer,
    Stay,
    TakeClaim,
    Task,
    Wait,
    agent_exit_code,
    relaunched,
    start_rule,
    trainer_rule,
)
from worker.child import POLL_S, Child, log_tail, trainer_environment
from worker.contract import config
from worker.contract.claim import FencedError
from worker.contract.directive import Directive
from worker.contract.exit_report import STAY_S, TRACEBACK_LINES, ErrorDetail, Outcome
from worker.contract.files import UnusableFileError
from worker.contract.pulse import Hang, state_in_words
from worker.contract.run_dir import RunDir
from worker.memory_events import has_more_kills, own_kills
from worker.staging import clear_own_staging, clear_temporary_files
from worker.start import Start
from worker.stuck import leave_words, process_state, take_stacks, what_proc_says
from worker.trainers import Trainers
from worker.watchdog import Watchdog

WAIT_LOOK_S = 0.1
TRAIN_LOOK_S = 1.0
SIGNAL_SPREAD_S = 1.0
REQUEUE_AFTER_S = 60.0
REQUEUE_TIMEOUT_S = 60.0
JOB_IS_ENDING = 3
"""What the requeue command exits with where the scheduler ends this start already: nobody need stay."""
HANG_SPREAD_S = 10.0
"""Within which all agents notice the same hang: pulses come every 5 s, and are looked at every second."""


def main(run_dir: str, start: Mapping[str, Any]) -> NoReturn:
    """Run one rank's agent with the real trainer; ends the process."""
    run(Path(run_dir), Task.model_validate(start), "worker.train")


def run(
    run_dir: Path,
    task: Task,
    trainer: str,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> NoReturn:
    """Run one rank's agent, then end the process without returning: submitit must not log an unfinished job as done.

    ``trainer`` is the module that ``python -m`` would run.
    """
    agent = Agent(RunDir(run_dir), task, trainer, clock, sleep)
    exit_code = 1
    try:
        agent.listen()
        exit_code = agent_exit_code(agent.run())
    except BaseException as error:  # noqa: BLE001 (whatever it is: the trainer must end and the report be written)
        with contextlib.suppress(OSError):
            traceback.print_exc()
        agent.fail(error)
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(exit_code)


class UnkillableTrainerError(Exception):
    """The trainer survived SIGKILL: the kernel holds it, and this node is no place for another one."""


class Agent:
    """One rank's agent: a loop that looks, asks the rules, and does what they say."""

    def __init__(
        self,
        run_dir: RunDir,
        task: Task,
        trainer: str,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self.run_dir, self.task, self.trainer = run_dir, task, trainer
        self.clock, self.sleep = clock, sleep
        self.parent = os.getppid()
        self.started = time.time()
        self.past = Past()
        self.seen = Seen()
        self.child: Child | None = None
        self.hang: Hang | None = None
        self.kills_before: int | None = None
        self.preempted_at: float | None = None
        self.is_requeued = False
        self._signals: set[int] = set()
        self._said = ""

    def listen(self) -> None:
        """Take SIGTERM and SIGUSR2 over; SIGUSR1 is for trainers, which ignore it until they can answer."""
        signal.signal(signal.SIGTERM, self._note)
        signal.signal(signal.SIGUSR2, self._note)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signals.add(number)

    def asked(self) -> Asked:
        """What was asked of this agent so far."""
        if signal.SIGTERM in self._signals and self.preempted_at is None:
            self.preempted_at = self.clock()
        return Asked(
            preempted=self.preempted_at is not None,
            time_limit=signal.SIGUSR2 in self._signals,
            orphaned=os.getppid() != self.parent,
        )

    def run(self) -> Outcome | None:
        """Start trainers for as long as the rules say so; the outcome that the agent's exit code tells."""
        self.prepare()
        while True:
            move = self.next_move()
            if isinstance(move, StartTrainer):
                self.train(move.directive)
            else:
                return self.leave(move)

    def prepare(self) -> None:
        """Read the run's settings, and with them how its trainers are started."""
        self.config = config.read(self.run_dir.config)
        self.has_run_before = has_run_before(self.run_dir, self.task)
        environment = trainer_environment(os.environ, self.task, self.config.cluster.cpus_per_task)
        zygote = self.config.training.zygote
        self.trainers = Trainers(self.trainer, environment, self._log(), zygote, self.say, self.clock)

    # Without a trainer

    def next_move(self) -> StartTrainer | Fenced | Leave:
        """Wait until there is something to do other than waiting; after ``directive_wait_s``, to leave."""
        key: object = None
        since = self.clock()
        while True:
            seen = self.look()
            move = self._decide(seen)
            if isinstance(move, StartTrainer) and not self.trainers.are_ready():
                self.sleep(WAIT_LOOK_S)
                continue
            if isinstance(move, StartTrainer | Fenced | Leave):
                return move
            if isinstance(move, TakeClaim):
                self._claim(move.attempt)
                continue
            if key != (new_key := self._wait_key(seen, move)):
                key, since = new_key, self.clock()
                self.say(move.reason if isinstance(move, Wait) else "preempted: stays until it is killed")
            if isinstance(move, Stay):
                self.ask_for_requeue(seen or self.seen)
            limit_s = STAY_S if isinstance(move, Stay) else self.config.recovery.directive_wait_s
            if self.clock() - since > limit_s:
                return self._tired(seen, limit_s)
            self.sleep(WAIT_LOOK_S)

    def _decide(self, seen: Seen | None) -> Move:
        if self.has_run_before:
            return Fenced("this very start has been here before, and its files would be taken for this one's")
        rules = self.config.recovery
        return start_rule(self.task, seen or Seen(), self.past, self.asked(), rules.relaunches_in_allocation)

    def _wait_key(self, seen: Seen | None, move: Move) -> object:
        """What the patience is counted from: all ranks see the same last exit report, so they leave together."""
        if isinstance(move, Stay):
            return Stay
        return seen and seen.directive and seen.directive.attempt, seen and seen.reported, move

    def _tired(self, seen: Seen | None, limit_s: float) -> Leave:
        outcome = self.past.outcome or (seen.ended_as if seen else None)
        reason = f"waited {limit_s:.0f} s"
        if outcome is None and self.seen.held is not None:
            return Leave(Outcome.LEFT, reason, "preempted")
        return Leave(outcome, reason)

    def look(self) -> Seen | None:
        """What the run's files say now; None while one of them cannot be read: that is neither news nor an end."""
        try:
            self.seen = look(self.run_dir, self.task, self.seen, self.past.attempt)
        except (UnusableFileError, OSError) as error:
            self.say(f"cannot see the run: {error}")
            return None
        return self.seen

    def _claim(self, attempt: int) -> None:
        """Claim an attempt; whether it worked shows at the next look."""
        try:
            claim_attempt(self.run_dir, self.task, attempt)
        except FencedError as error:
            self.say(str(error))

    def ask_for_requeue(self, seen: Seen) -> None:
        """Report, and, on rank 0, run the requeue command once, when all ranks have reported or 60 s went by."""
        if self.seen.held is not None:
            self._report_if_missing(self.seen.held, Leave(Outcome.LEFT, "preempted", "preempted"))
        if self.is_requeued or self.task.rank != 0 or not self.task.requeue or self.preempted_at is None:
            return
        is_late = self.clock() - self.preempted_at > REQUEUE_AFTER_S
        if is_late or seen.held is None or len(seen.reported) == self.task.world:
            self.is_requeued = True
            self._requeue(self.task.requeue)

    def _requeue(self, argv: tuple[str, ...]) -> None:
        self.say(f"asks for the requeue: {argv}")
        try:
            code = subprocess.run(argv, stdin=subprocess.DEVNULL, timeout=REQUEUE_TIMEOUT_S).returncode
            if code == JOB_IS_ENDING and self.seen.held is not None:
                let_go(self.run_dir, self.task, self.seen.held)
            elif code != 0:
                self.say(f"the requeue failed: exit code {code}")
        except (OSError, subprocess.SubprocessError) as error:
            self.say(f"the requeue failed: {error}")

    def leave(self, move: Fenced | Leave) -> Outcome | None:
        """Report the end where this start has not reported yet; the agent's outcome."""
        if isinstance(move, Fenced):
            move = Leave(Outcome.FENCED, move.reason, "fenced")
        elif self.task.rank == 0 and self.seen.held is not None:
            clear_own_staging(self.run_dir, self.seen.held, self.task.restart)
        self.say(f"leaves: {move.reason}")
        if self.seen.held is not None:
            self._report_if_missing(self.seen.held, move)
        return move.outcome

    # With a trainer

    def train(self, directive: Directive) -> None:
        """Run one trainer from its start to its exit report."""
        self.started, self.hang = time.time(), None
        start = self._start(directive)
        self.past = relaunched(self.past, directive)
        self.kills_before = own_kills()
        self.child = self.trainers.start([str(self.run_dir.path), start.model_dump_json()])
        self.say(f"attempt {start.attempt}: trainer {self.child.pid} started")
        end = self.watch(self.child, directive.attempt)
        returncode = self.child.poll()
        if returncode is None:
            leave_words(what_proc_says(self.child.pid), self._stacks(directive.attempt))
            state = state_in_words(process_state(self.child.pid))
            raise UnkillableTrainerError(f"trainer {self.child.pid} survived SIGKILL: it is {state}")
        self._report_trainer(self.child, returncode, end, directive.attempt)

    def _start(self, directive: Directive) -> Start:
        facts = self.task.model_dump(exclude={"requeue"})
        told = {"same_allocation": self.past.attempt is not None, "waited_s": round(self.trainers.waited_s, 3)}
        return Start(attempt=directive.attempt, **told, **facts)

    def _log(self) -> Path:
        log, rank = self.run_dir.train_log, self.task.rank
        return log if rank == 0 else log.with_name(f"train-rank-{rank}.log")

    def watch(self, child: Child, attempt: int) -> End | None:
        """Look after a running trainer until it is over; why it was ended, None where it went by itself."""
        sent: set[signal.Signals] = set()
        peer_ended_at: float | None = None
        looked_at = self.clock()
        watchdog = Watchdog(self.run_dir, self.task, attempt, self.config.recovery.hang_timeout_s)
        while child.poll() is None:
            if self.clock() - looked_at >= TRAIN_LOOK_S:
                self.look()
                looked_at = self.clock()
                watchdog.look(looked_at)
            peers = sorted(self.seen.reported - {self.task.rank})
            if peer_ended_at is None and peers:
                peer_ended_at = self.clock()
                self.say(f"the trainers of ranks {peers} ended, its own has {PEER_GRACE_S:.0f} s")
            asked = self.asked()
            hang = watchdog.seen() if watchdog.is_hanging and self.config.recovery.mode == "act" else None
            since = self._since(self.preempted_at), self._since(peer_ended_at)
            move = trainer_rule(self.task, self.seen, Running(attempt, frozenset(sent), *since, hang), asked)
            if isinstance(move, End):
                return self._end(child, move, attempt, watchdog)
            if isinstance(move, Send):
                child.send(move.number)
                sent.add(move.number)
            self.sleep(POLL_S)
        return None

    def _since(self, at: float | None) -> float | None:
        return None if at is None else self.clock() - at

    def _end(self, child: Child, end: End, attempt: int, watchdog: Watchdog) -> End:
        self.say(f"ends its trainer: {end.reason}")
        if end.what == "hang":
            self.hang = watchdog.seen(process_state(child.pid))
            tell_hang(self.run_dir, self.task, attempt, self.hang)
        if end.what in ("hang", "rank_died"):
            spread_s = min(HANG_SPREAD_S, 2 * self.config.recovery.hang_timeout_s) if end.what == "hang" else 0.0
            take_stacks(child, self._stacks(attempt), spread_s, self.clock, self.sleep)
        child.end(end.what in ("hang", "fenced", "parent_died"), self.clock, self.sleep)
        return end

    def _stacks(self, attempt: int) -> Path:
        return self.run_dir.stacks(attempt, self.task.restart, self.task.rank)

    def _report_trainer(self, child: Child, returncode: int, end: End | None, attempt: int) -> None:
        """Write the exit report of a trainer that is over, and remember how it went."""
        if end is None and -returncode in (signal.SIGTERM, signal.SIGUSR2):
            self._await_own_signal()
        clear_temporary_files(self.run_dir, attempt, self.task.restart, self.task.rank)
        self.look()
        asked, is_stopped = self.asked(), self._is_stopped(attempt)
        known = trainers_word(self.run_dir, self.task, attempt).error
        is_asked = asked.preempted or asked.time_limit or is_stopped
        is_killed = tells_of_a_kill(returncode, known)
        killed_for_memory = is_killed and has_more_kills(self.kills_before, own_kills())
        outcome = outcome_of_trainer(returncode, end, is_asked, killed_for_memory)
        what = left_because(known.what if known else None, end, asked, is_stopped)
        if outcome is Outcome.LEFT and what == "preempted" and self.preempted_at is None:
            self.preempted_at = self.clock()
        tail = log_tail(self._log(), child.log_begin, TRACEBACK_LINES)
        error = error_of_trainer(outcome, returncode, known, end, what, tail)
        self.past = replace(self.past, outcome=outcome)
        self._report(attempt, outcome, error, returncode, self.hang)
        self.say(f"attempt {attempt} ended as {outcome}")

    def _await_own_signal(self) -> None:
        """Wait a moment for a signal that the scheduler sent to the whole step and that the trainer got first."""
        deadline = self.clock() + SIGNAL_SPREAD_S
        while not self._signals and self.clock() < deadline:
            self.sleep(POLL_S)

    def _is_stopped(self, attempt: int) -> bool:
        directive = self.seen.directive
        return directive is not None and directive.attempt == attempt and directive.stop is not None

    def _report_if_missing(self, attempt: int, move: Leave) -> None:
        if move.outcome is not None and not has_reported(self.run_dir, self.task, attempt):
            error = ErrorDetail(type="Left", message=move.reason, what=move.what)
            self._report(attempt, move.outcome, error)

    def _report(
        self,
        attempt: int,
        outcome: Outcome,
        error: ErrorDetail | None,
        returncode: int | None = None,
        hang: Hang | None = None,
    ) -> None:
        """Put the exit report in place, where there is still a place for it."""
        try:
            publish_report(self.run_dir, self.task, attempt, outcome, error, self.started, returncode, hang)
        except FileNotFoundError as failure:
            self.say(f"cannot report: {failure}")

    def fail(self, error: BaseException) -> None:
        """End the trainer and report that this agent itself failed, as far as that still can be done."""
        if self.child is not None and self.child.poll() is None:
            self.child.send(signal.SIGKILL)
        attempt = (self.past.attempt if self.past.outcome is None else None) or self.seen.held
        if attempt is None or has_reported(self.run_dir, self.task, attempt):
            return
        text = "".join(traceback.format_exception(error)).splitlines()[-TRACEBACK_LINES:]
        detail = ErrorDetail(type=type(error).__name__, message=str(error), traceback="\n".join(text))
        try:
            publish_report(self.run_dir, self.task, attempt, Outcome.CRASHED, detail, self.started)
        except OSError as failure:
            self.say(f"cannot report: {failure}")

    def say(self, text: str) -> None:
        """One line for the task's own log; the same one only once in a row. A full disk must not end a trainer."""
        if text != self._said:
            with contextlib.suppress(OSError):
                print(f"agent of rank {self.task.rank}: {text}", flush=True)
        self._said = text
