"""Every run of a folder in the hands of one process: one query of the scheduler for all, and none harms another."""

import contextlib
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TextIO, cast

from slurm.scheduler import LocalScheduler, Scheduler, SchedulerError, choose
from supervisor.decision import Decision, Wait
from supervisor.disk import seconds_between_passes
from supervisor.job_looks import BUSY_LOOK_S, QUIET_LOOK_S, JobLooks
from supervisor.lease import (
    BEAT_EVERY_S,
    DEAD_AFTER_S,
    HeldError,
    LostError,
    describe,
    is_gone,
    read_holder,
    take_lease,
)
from supervisor.report.figures import printable
from supervisor.report.screen import Lines
from supervisor.runs import RunError, is_run
from supervisor.sparing import SparingScheduler
from supervisor.supervise import read_state, take_up
from supervisor.watch import Watched, is_due, one_pass
from worker.contract import config as contract_config
from worker.contract.files import UnusableFileError
from worker.contract.run_dir import RunDir

TURN_S: Final = 1.0
"""The longest pause between two passes, where passes are quick and the disk is local."""
AGAIN_AFTER_S: Final = 60.0
"""When a run that was put aside is tried again, changed or not."""
_WAITING_S: Final = 1.0
"""How much of a pass may go to runs that have no job: submitting a thousand must not hide what the others do."""


def supervise_all(runs: Path, out: TextIO, is_told_to_leave: Callable[[], bool]) -> None:
    """Supervise every run under ``runs``, those that come later too, until told to leave; every lease is then free.

    HeldError where another process does so already, LostError where one took over.
    """
    own = take_lease(_folder(runs))
    fleet = Fleet(runs, out)
    least_s = seconds_between_passes(own.run_dir.path)
    try:
        while not is_told_to_leave():
            begun, worked = time.monotonic(), time.process_time()
            own.beat()
            fleet.take_up()
            has_more = fleet.tend()
            taken_s, cpu_s = time.monotonic() - begun, time.process_time() - worked
            time.sleep(least_s if has_more else pause_s(taken_s, cpu_s, least_s))
    finally:
        fleet.leave()
        own.give_up()


def supervise_all_once(runs: Path, out: TextIO) -> None:
    """Do what there is to do now for every run under ``runs``, and leave; a supervisor elsewhere is watched first."""
    _folder(runs)
    fleet = Fleet(runs, out)
    try:
        begun = time.monotonic()
        fleet.take_up()
        while fleet.waits_for_others and time.monotonic() - begun < DEAD_AFTER_S + 1.0:
            time.sleep(1.0)
            fleet.take_up()
        while fleet.tend():
            pass
    finally:
        fleet.leave()


def fleet_supervisor(runs: Path) -> str | None:
    """Who supervises every run under ``runs``, for a person; None = nobody. One on another host is watched first."""
    holder = read_holder(RunDir(runs))
    if holder is None:
        return None
    try:
        take_lease(RunDir(runs)).give_up()
    except HeldError:
        return f"the supervisor of every run in {runs} takes it up, on {holder.host} (process {holder.pid})"
    return None


def _folder(runs: Path) -> RunDir:
    if not runs.is_dir():
        raise RunError(f"{runs}: is no folder; --all names the one that holds the runs")
    return RunDir(runs.resolve())


def pause_s(pass_s: float, cpu_s: float, least_s: float) -> float:
    """A tenth of a core at most goes into passes, as far as what happens is still seen within two seconds.

    What changes just after its turn waits for the rest of this pass, the pause, and as much of the next one.
    """
    return max(least_s, min(10.0 * cpu_s, TURN_S, 2.0 - 2.0 * pass_s))


@dataclass
class _Hand:
    """A run that this process holds."""

    watched: Watched
    looks: JobLooks
    decision: Decision | None = None
    """The last one: what is decided again was done, and its effect is not seen yet."""

    @property
    def has_job(self) -> bool:
        """Whether it need not submit one, which takes long."""
        return self.watched.run.state.has_live_job

    @property
    def turn(self) -> int:
        """Those have their turn first whose workers wait for an answer, and those last that have none."""
        return 2 if not self.has_job else 0 if self.watched.observer.has_verdict else 1


@dataclass
class _Other:
    """A supervisor elsewhere that holds a run: it is dead when its sign stays the same for long enough."""

    sign: tuple[str, int]
    since: float
    is_alive: bool


@dataclass
class _Aside:
    """A run that there is nothing to do for until its journal changes, or for a while."""

    run_dir: RunDir
    stamp: tuple[int, int]
    until: float = float("inf")


class Fleet:
    """The runs of one folder that this process holds; whatever happens to one of them ends at that one."""

    def __init__(self, runs: Path, out: TextIO) -> None:
        self._runs = runs.resolve()
        self._out = out
        self._hands: dict[str, _Hand] = {}
        self._others: dict[str, _Other] = {}
        self._aside: dict[str, _Aside] = {}
        self._said: dict[str, str] = {}
        self._lost: set[str] = set()
        """Holders that we were: a folder that was away for a while still names one of them when it is back."""
        self._cluster: JobLooks | None = None
        self._beaten_at = time.monotonic()
        self._leaving: list[threading.Thread] = []

    @property
    def waits_for_others(self) -> bool:
        """Whether it is not known yet if somebody who holds a run lives."""
        return any(not other.is_alive for other in self._others.values())

    def take_up(self) -> None:
        """Take every run that is not over and that nobody else holds."""
        with os.scandir(self._runs) as entries:
            names = sorted(entry.name for entry in entries if entry.name[0] != ".")
        for name in names:
            if name not in self._hands and self._is_worth_a_look(name):
                with self._alone(name):
                    self._take(name)
                self._beat_in_between()

    def tend(self) -> bool:
        """One pass over every run in which something happened, or that is due; whether there is more to do at once."""
        together: dict[JobLooks, list[Watched]] = {}
        for hand in self._hands.values():
            together.setdefault(hand.looks, []).append(hand.watched)
        for looks, runs in together.items():
            looks.look_if_due([each.run for each in runs])
        until, has_more = None, False
        due = [name for name in list(self._hands) if self._is_due(name)]
        for name in sorted(due, key=lambda name: self._hands[name].turn):
            if name in self._hands and not self._hands[name].has_job:
                until = until or time.monotonic() + _WAITING_S
                if time.monotonic() > until:
                    return True
                self._hands[name] = self._hands.pop(name)  # the last one to have its turn the next time
            with self._alone(name):
                has_more |= name in self._hands and self._pass(name, together[self._hands[name].looks])
            self._beat_in_between()
        return has_more

    def leave(self) -> None:
        """Give every run up, so that the next supervisor need not wait."""
        for name in list(self._hands):
            with self._alone(name):
                self._let_go(name)
        for thread in self._leaving:
            thread.join()

    # -- one run

    def _is_worth_a_look(self, name: str) -> bool:
        aside = self._aside.get(name)
        return aside is None or time.monotonic() >= aside.until or _stamp(aside.run_dir) != aside.stamp

    def _take(self, name: str) -> None:
        run_dir = RunDir(self._runs / name)
        if not is_run(run_dir.path):
            return
        stamp = _stamp(run_dir)
        state = read_state(run_dir)
        if state.is_over or state.rehearse is not None:  # whoever rehearses supervises, and kills what supervises
            self._aside[name] = _Aside(run_dir, stamp)
            return
        if not self._is_free(name, run_dir):
            return
        config = contract_config.read(run_dir.config)
        looks = self._looks_of(config.cluster.kind, run_dir)
        lease = take_lease(run_dir, patience_s=0.0, nobody=self._lost)
        try:
            watched = take_up(run_dir, config, looks.scheduler, lease, Lines(self._out, name))
        except BaseException:
            lease.give_up()
            raise
        self._hands[name] = _Hand(watched, looks)
        self._others.pop(name, None)
        self._aside.pop(name, None)
        self._say(name, f"taken up ({watched.run.state.state.replace('_', ' ')})")

    def _is_free(self, name: str, run_dir: RunDir) -> bool:
        """Whether nobody holds it who lives, by the rules of the lease, and without waiting here."""
        holder, now = read_holder(run_dir), time.monotonic()
        if holder is None or is_gone(holder) or holder.holder in self._lost:
            return True
        self._say(name, f"left alone: {describe(holder)}")
        sign, before = (holder.holder, holder.beat), self._others.get(name)
        if before is None or before.sign != sign:
            is_known = before is not None or holder.host == socket.gethostname()
            self._others[name] = _Other(sign, now, is_known)
            return False
        return holder.host != socket.gethostname() and now - before.since >= DEAD_AFTER_S

    def _is_due(self, name: str) -> bool:
        with self._alone(name):
            return is_due(self._hands[name].watched, self._hands[name].looks)
        return False

    def _pass(self, name: str, together: Sequence[Watched]) -> bool:
        hand = self._hands[name]
        before, hand.decision = hand.decision, one_pass(hand.watched, hand.looks, together)
        if hand.watched.run.state.is_over:
            self._let_go(name)
            return False
        return not isinstance(hand.decision, Wait) and hand.decision != before

    def _let_go(self, name: str) -> None:
        """Tell who listens, which may take a while, and give the lease up after that."""
        hand = self._hands.pop(name)
        run_dir = hand.watched.run.run_dir
        self._aside[name] = _Aside(run_dir, _stamp(run_dir))
        thread = threading.Thread(target=_close, args=(hand.watched,))
        thread.start()
        self._leaving = [*(each for each in self._leaving if each.is_alive()), thread]

    @contextlib.contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """Within, what goes wrong is said, and harms this run alone."""
        try:
            yield
        except LostError as error:
            if hand := self._hands.pop(name, None):  # what comes now is its new holder's to write
                self._lost.add(hand.watched.run.lease.file.holder)
            self._say(name, str(error))
        except (HeldError, UnusableFileError, SchedulerError, OSError) as error:
            self._set_aside(name, str(error))
        except Exception as error:  # noqa: BLE001 - a fault of ours in one run must not cost the others their supervisor
            self._set_aside(name, f"an unforeseen error, see logs/supervisor.log: {type(error).__name__}: {error}")
            _write_down(RunDir(self._runs / name))

    def _set_aside(self, name: str, why: str) -> None:
        hand = self._hands.pop(name, None)
        if hand is not None:
            hand.watched.run.lease.give_up()
        run_dir = RunDir(self._runs / name)
        self._aside[name] = _Aside(run_dir, _stamp(run_dir), time.monotonic() + AGAIN_AFTER_S)
        self._say(name, f"put aside: {why}")

    def _say(self, name: str, text: str) -> None:
        """Say it once, until something else is said of the same run."""
        if self._said.get(name) != text:
            self._said[name] = text
            print(printable(f"{name}  {text}"), file=self._out, flush=True)

    # -- all of them

    def _looks_of(self, kind: str, run_dir: RunDir) -> JobLooks:
        """One scheduler for all runs of a cluster; of the stand-in one a run, whose jobs/ it looks into."""
        if kind != "local" and self._cluster is not None:
            return self._cluster
        scheduler = choose(kind, run_dir.jobs)
        if isinstance(scheduler, LocalScheduler):
            return JobLooks(scheduler, quiet_s=0.0, busy_s=0.0)
        sparing = cast(Scheduler, SparingScheduler(scheduler))
        self._cluster = JobLooks(sparing, QUIET_LOOK_S, BUSY_LOOK_S, fresh_s=BUSY_LOOK_S)
        return self._cluster

    def _beat_in_between(self) -> None:
        """Show that this process lives, also where a pass over all runs takes long."""
        if time.monotonic() - self._beaten_at < BEAT_EVERY_S / 2:
            return
        for name in list(self._hands):
            with self._alone(name):
                self._hands[name].watched.run.lease.beat()
        self._beaten_at = time.monotonic()


def _stamp(run_dir: RunDir) -> tuple[int, int]:
    """What changes whenever something is written into the run's journal, or its configuration is mended."""
    found = []
    for path in (run_dir.journal, run_dir.config):
        try:
            found.append(path.stat().st_mtime_ns)
        except OSError:
            found.append(0)
    return found[0], found[1]


def _close(watched: Watched) -> None:
    try:
        watched.ears.close(watched.run.state)
    finally:
        watched.run.lease.give_up()


def _write_down(run_dir: RunDir) -> None:
    """Put the traceback where a person looks for it, if that is possible."""
    with contextlib.suppress(OSError), open(run_dir.supervisor_log, "a", encoding="utf-8") as log:
        traceback.print_exc(file=log)
