"""Rules for a whole run, as rows over what is known of it: saves, networks, memory, disk, time, precision.  Pure."""

import re
from collections.abc import Callable, Iterator
from typing import Final

from slurm.parsing import ParseError, duration_s
from supervisor.rate_rules import rate_rule, warmup_rule
from supervisor.recipe_facts import SHARE_OF_PEAK, Facts, Remark
from supervisor.report.figures import size
from supervisor.save_interval import SaveCosts, best_interval_s, lost_share
from worker.contract.words import count

_GIB: Final = 2**30
_H: Final = 3600.0
_SAVES: Final = ("checkpoint", "every_steps")

# -- saves -------------------------------------------------------------------------------------------------------------

GPU_HOURS_A_FAULT: Final = 3 * 16_384
"""Published of a run of 16,384 GPUs: a fault every 3 hours."""
ROLLBACK_EVERY_H: Final = 24.0
"""How often training itself goes back (a spike, a crash), where the run's own log does not say: an assumption."""
RESTART_S: Final = 60.0
"""From a fault to training again, without the queue: an assumption."""
_WORTH_A_WORD: Final = 0.02
"""Of all time, lost beyond what the best interval loses."""
_LARGEST_ROLLBACK: Final = 1 / 3
"""Of all steps."""


def save_costs(facts: Facts) -> SaveCosts | None:
    """What saves are weighed by in this run; None where the size of a checkpoint is not known."""
    if facts.save_s is None:
        return None
    faults_an_hour = max(1, facts.config.cluster.gpus) / GPU_HOURS_A_FAULT + 1 / ROLLBACK_EVERY_H
    return SaveCosts(save_s=facts.save_s, fault_every_s=_H / faults_an_hour, restart_s=RESTART_S)


def save_rule(facts: Facts) -> Iterator[Remark]:
    """The save interval against what a rollback repeats, and against what saves cost."""
    rules, steps = facts.config.checkpoint, facts.max_steps
    if facts.is_trial:
        return
    repeated = rules.every_steps + rules.healthy_after
    if steps is not None and repeated >= steps * _LARGEST_ROLLBACK:
        evidence = f"{steps} steps; saved every {rules.every_steps}, healthy {rules.healthy_after} later"
        message = f"a rollback repeats up to {repeated} steps, {min(1.0, repeated / steps):.0%} of the run"
        yield Remark("warning", _SAVES, message, evidence, f"set it to about {max(1, steps // 10)}")
        return
    costs, step_s = save_costs(facts), facts.step_s
    if costs is None or step_s is None:
        yield Remark("not checked", _SAVES, f"against the cost of a rollback: {_unknown(facts)}")
        return
    best_s, interval_s = best_interval_s(costs), rules.every_steps * step_s
    lost, least = lost_share(costs, interval_s), lost_share(costs, best_s)
    best_steps = max(1, round(best_s / step_s))
    if lost - least > _WORTH_A_WORD and not 0.5 <= rules.every_steps / best_steps <= 2:
        side = "seldom" if interval_s > best_s else "often"
        evidence = (
            f"about {lost:.1%} of all time goes into saves and repeated steps, {least:.1%} at the best; a step takes "
            f"about {step_s:.2g} s, a save {costs.save_s:.2g} s, a fault comes every {costs.fault_every_s / _H:.2g} h"
        )
        yield Remark("warning", _SAVES, f"it saves too {side}", evidence, f"set it to about {best_steps}")


def _unknown(facts: Facts) -> str:
    if facts.parameters is None:
        return "the size of the model is not known"
    if not facts.config.cluster.gpus:
        return "how long a step takes is not known without GPUs"
    if facts.device is None:
        return "which GPU it is is not known; name it in cluster.gres (gpu:a100:8) or cluster.constraint"
    return "how long a step takes is not known in fp32"


# -- network -----------------------------------------------------------------------------------------------------------

_SLOW_BYTES_PER_S: Final = 1.25e9
"""10 gigabits a second: the usual network that is not built for this."""
_UPDATES_APART: Final = 8
_FAST_NETWORKS: Final = frozenset(
    {"ib", "infiniband", "qdr", "fdr", "edr", "hdr", "hdr100", "hdr200", "ndr", "ndr200", "opa", "omnipath", "roce"}
    | {"slingshot", "efa"}
)
"""Features by which sites name them."""


def network_rule(facts: Facts) -> Iterator[Remark]:
    """What crosses a slow network between nodes: sums of gradients, and under sharding the weights themselves."""
    config = facts.config
    if config.cluster.nodes == 1:
        return
    place = ("training", "gradient_accumulation")
    why = _why_slow(config.cluster.environment)
    if why is None:
        if not facts.features & _FAST_NETWORKS:
            named = "neither the nodes' features nor NCCL's variables in cluster.environment say how fast it is"
            yield Remark("not checked", place, f"the network between the nodes is not known: {named}")
        return
    accumulation = config.training.gradient_accumulation
    if config.training.extra.get("fsdp") or config.training.extra.get("deepspeed"):
        passes = f"the weights cross it three times a micro-step{_seconds(facts, 6 * accumulation)}"
        mend = "shard within one node and offload to its main memory (fsdp_config.cpu_offload), or take one node"
        yield Remark("warning", ("cluster", "nodes"), f"sharded over nodes with a slow network ({why})", passes, mend)
    elif accumulation < _UPDATES_APART:
        evidence = f"the gradients cross it at each of the updates{_seconds(facts, 8)}"
        message = f"{accumulation} micro-steps an update over a slow network ({why})"
        mend = f"set it to {_UPDATES_APART} or more, and training.batch_size down where the product is to stay"
        yield Remark("warning", place, message, evidence, mend)


def _why_slow(environment: dict[str, str]) -> str | None:
    """The variable that keeps NCCL off a fast network; None where none does."""
    if environment.get("NCCL_IB_DISABLE", "0") not in ("", "0"):
        return "NCCL_IB_DISABLE is set"
    if environment.get("NCCL_NET", "").lower() == "socket":
        return "NCCL_NET is Socket"
    interface = environment.get("NCCL_SOCKET_IFNAME", "")
    is_ethernet = re.match(r"=?(eth|eno|ens|enp|bond)", interface) is not None
    return f"NCCL_SOCKET_IFNAME is {interface}" if is_ethernet and "NCCL_IB_HCA" not in environment else None


def _seconds(facts: Facts, bytes_each: int) -> str:
    if facts.trained is None:
        return ""
    moved = bytes_each * facts.trained
    return f": {size(moved)} an update, {moved / _SLOW_BYTES_PER_S:.2g} s at 10 Gbit/s"


# -- memory, disk, time ------------------------------------------------------------------------------------------------


def memory_rule(facts: Facts) -> Iterator[Remark]:
    """What each device needs against what it has; without GPUs, what a node needs against its main memory."""
    place, plan = ("training", "batch_size"), facts.memory
    if plan is None:
        yield Remark("not checked", place, "memory: the size of the model is not known")
        return
    parts = {"weights": plan.weights, "gradients": plan.gradients, "optimizer": plan.optimizer}
    parts |= {"average": plan.average, "activations": plan.activations or 0}
    told = ", ".join(f"{name} {part / _GIB:.3g}" for name, part in parts.items() if part)
    told = f"{told} GiB" + ("" if plan.activations is not None else ", activations not measured")
    if not facts.config.cluster.gpus:
        yield from _main_memory(facts, plan.device * facts.config.cluster.tasks_on_each_node + plan.main, told)
        return
    if plan.main:
        yield from _main_memory(facts, plan.main, f"{plan.main / _GIB:.3g} GiB are offloaded")
    if facts.device is None:
        yield Remark("not checked", place, f"memory: {plan.device / _GIB:.3g} GiB a GPU; {_unknown(facts)}")
    elif plan.device > facts.device.largest:
        message = f"{plan.device / _GIB:.3g} GiB a GPU, and a {facts.device.name} has {facts.device.memory_gib[1]}"
        yield Remark("warning", place, message, told, _mend_of_memory(facts))
    elif plan.device > facts.device.smallest:
        low, high = facts.device.memory_gib
        message = f"memory: {plan.device / _GIB:.3g} GiB a GPU; a {facts.device.name} has {low} or {high}"
        yield Remark("note", place, message, told)


def _main_memory(facts: Facts, needed: int, told: str) -> Iterator[Remark]:
    place = ("cluster", "mem")
    if facts.main_memory is None:
        yield Remark("not checked", place, f"a node needs {needed / _GIB:.3g} GiB of main memory; cluster.mem is open")
    elif needed > facts.main_memory:
        message = f"{needed / _GIB:.3g} GiB of main memory, and a node has {facts.main_memory / _GIB:.3g}"
        yield Remark("warning", place, message, told, "ask for more, or take a smaller model, batch or max_tokens")


def _mend_of_memory(facts: Facts) -> str:
    training = facts.config.training
    ways = [
        ("set training.activation_checkpointing: true", not training.activation_checkpointing),
        ("halve data.max_tokens or training.batch_size", True),
        ("shard with training.extra.fsdp", facts.config.cluster.gpus > 1 and "fsdp" not in training.extra),
        ("train adapters (model.lora)", facts.config.model.lora is None),
        ("set ema.device: cpu", facts.config.ema is not None and facts.config.ema.device == "same"),
    ]
    return ", or ".join(way for way, is_open in ways if is_open)


def batch_rule(facts: Facts) -> Iterator[Remark]:
    """An optimizer step against all the data there is."""
    samples, batch = facts.samples, facts.global_batch
    if samples is not None and 0 < samples < batch:
        message = "a step takes more samples than there are, and trains some of them more than once"
        evidence = f"{batch} (batch size x gradient accumulation x ranks) of {samples}"
        mend = f"make the three {samples} at most, or give more data"
        yield Remark("warning", ("training", "batch_size"), message, evidence, mend)


_ELSEWHERE: Final = "the disk of the machine that it is for is not seen from here"


def disk_rule(facts: Facts) -> Iterator[Remark]:
    """All checkpoints that are kept at once, against the free disk."""
    each, rules, place = facts.checkpoint_bytes, facts.config.checkpoint, ("checkpoint", "keep")
    if each is None or facts.free_disk is None:
        why = "the size of the model is not known" if each is None else f"{size(each)} a checkpoint; {_ELSEWHERE}"
        yield Remark("not checked", place, f"disk: {why}")
        return
    held = max(rules.keep, rules.keep_healthy + 1) + rules.keep_quarantined + 1
    if facts.max_steps is not None:
        held = min(held, facts.max_steps // rules.every_steps + 2)
        held += facts.max_steps // rules.keep_every if rules.keep_every else 0
    needed = each * held
    if needed > facts.free_disk:
        evidence = f"{held} of {size(each)} at once (kept, in quarantine, being written)"
        message = f"checkpoints take {size(needed)}, and {size(facts.free_disk)} are free"
        yield Remark("warning", place, message, evidence, "set checkpoint.keep lower, or run.dir to a larger disk")


def time_rule(facts: Facts) -> Iterator[Remark]:
    """The time until the end, against the GPU hours that the run may take; and how many jobs it will be."""
    place, steps, step_s = ("cluster", "time_limit"), facts.max_steps, facts.step_s
    if steps is None or step_s is None:
        why = "the number of samples is not known" if steps is None else _unknown(facts)
        yield Remark("not checked", place, f"time until the end: {why}")
        return
    hours = steps * step_s / _H
    gpu_hours, most = hours * facts.config.cluster.gpus, facts.config.recovery.max_gpu_hours
    evidence = f"{count(steps, 'step')} of about {step_s:.2g} s at {SHARE_OF_PEAK:.0%} of what the GPUs can do"
    if most is not None and gpu_hours > most:
        mend = f"set it to {1.5 * gpu_hours:.2g}, or train for fewer steps"
        message = f"the run takes about {gpu_hours:.3g} GPU hours, and gives up after {most:g}"
        yield Remark("warning", ("recovery", "max_gpu_hours"), message, evidence, mend)
    limit_s = _limit_s(facts.config.cluster.time_limit)
    jobs = 1 if limit_s is None else max(1, round(hours * _H / limit_s + 0.5))
    said = "" if jobs == 1 else f", in {jobs} jobs one after the other"
    yield Remark("note", place, f"about {hours:.3g} h until the end{said}, {gpu_hours:.3g} GPU hours", evidence)


def _limit_s(text: str) -> float | None:
    try:
        return duration_s(text)
    except ParseError:
        return None


# -- precision ---------------------------------------------------------------------------------------------------------


def precision_rule(facts: Facts) -> Iterator[Remark]:
    """bf16 on GPUs that do not have it."""
    place, cluster = ("training", "precision"), facts.config.cluster
    if facts.config.training.precision != "bf16" or not cluster.gpus:
        return
    if facts.device is None:
        yield Remark("not checked", place, "bf16: which GPU it is is not known")
    elif not facts.device.has_bf16:
        message = f"a {facts.device.name} has no bf16: it is emulated, slowly, or refused"
        evidence = "bf16 came with Ampere (A100, 2020) and MI200"
        yield Remark("warning", place, message, evidence, "set it to fp16; the loss scale is in the history then")


RULES: Final[tuple[Callable[[Facts], Iterator[Remark]], ...]] = (
    *(rate_rule, warmup_rule, batch_rule, save_rule, network_rule),
    *(memory_rule, disk_rule, time_rule, precision_rule),
)


def remarks(facts: Facts) -> list[Remark]:
    """What all rules say, in their order."""
    return [remark for rule in RULES for remark in rule(facts)]
