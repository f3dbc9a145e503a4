"""What no single key can say: settings that contradict each other, or that belong somewhere else. Pure."""

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

from slurm.job import OWN_OPTIONS, RequestError
from slurm.parsing import ParseError, duration_s
from supervisor.config_findings import Place, Problem
from supervisor.job_request import supervisor_request, worker_request
from worker.contract.cluster_config import ClusterConfig
from worker.contract.config import Config
from worker.contract.owned_fields import refused_fields, unknown_fields
from worker.contract.run_dir import RunDir, is_run_name

_ENTRYPOINT = re.compile(r"(.*/)?[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", re.DOTALL)
_KEY_OF_OPTION = {
    **{name: name for name in ("partition", "account", "qos", "constraint", "gres", "mem", "reservation")},
    **{name: name for name in ("nodelist", "exclude", "nodes")},
    "time": "time_limit",
    "ntasks": "tasks_per_node",
    "ntasks-per-node": "tasks_per_node",
    "gpus-per-node": "gpus_per_node",
    "cpus-per-task": "cpus_per_task",
}


def contradictions(config: Config) -> list[Problem]:
    """Everything that the rules have against ``config``, in the order of its sections."""
    rules = _RULES if config.training.entrypoint is not None else (*_OF_OUR_RECIPE, *_RULES)
    found = [problem for rule in rules for problem in rule(config)]
    return found or list(_cannot_be_submitted(config))


def _run(config: Config) -> Iterator[Problem]:
    if not is_run_name(config.run.name):
        mend = "use at most 100 letters, digits, '_', '.' and '-', and neither '.' nor '-' first"
        yield Problem(("run", "name"), f"{config.run.name!r} cannot name a run's folder", mend)


def _needed(config: Config) -> Iterator[Problem]:
    given = {
        ("data", "train"): config.data.train,
        ("training", "optimizer", "learning_rate"): config.training.optimizer.learning_rate,
    }
    for place, value in given.items():
        if value is None:
            mend = f"write it, or give --set {'.'.join(place)}=VALUE"
            yield Problem(place, "it is missing", mend, is_missing=True)


def _entrypoint(config: Config) -> Iterator[Problem]:
    given = config.training.entrypoint
    if given is not None and not _ENTRYPOINT.fullmatch(given):
        mend = "write package.module:function, with the folder of the package before it where it is not here"
        yield Problem(("training", "entrypoint"), f"{given!r} names no function", mend)


def _model(config: Config) -> Iterator[Problem]:
    model = config.model
    if model.path is None and model.config is None:
        yield Problem(("model",), "it names no model", "give model.path, or model.config", is_missing=True)
    if model.path is not None and model.config is not None:
        yield Problem(("model", "config"), "model.path is given too", "keep one, and set the other to null")
        return  # what is missing beside a config need not be, should the path stay
    if model.config is not None and not isinstance(model.config.get("model_type"), str):
        yield Problem(("model", "config"), "it has no model_type", "write one, such as model_type: llama")
    if model.lora is not None and model.path is None:
        yield Problem(("model", "lora"), "there is no pretrained model to adapt", "give model.path, or set it to null")
    if model.config is not None and config.data.tokenizer is None:
        mend = "set data.tokenizer to bytes, a folder or a hub name"
        yield Problem(("model", "config"), "a model built here has no tokenizer of its own", mend)


def _weights(config: Config) -> Iterator[Problem]:
    place = ("model", "dtype")
    if config.model.lora is not None:
        return  # they are frozen, and the adapters are float32 whatever they are
    if config.model.dtype == "float16":
        mend = "write float32, with training.precision: fp16"
        yield Problem(place, "float16 weights cannot be trained", mend)
    if config.model.dtype == "bfloat16" and not config.training.pure_bf16:
        mend = "write float32, with training.precision: bf16, or ask for it with training.pure_bf16: true"
        yield Problem(place, "bfloat16 weights under-train silently at small rates", mend)


def _length(config: Config) -> Iterator[Problem]:
    training, warmup = config.training, config.training.schedule.warmup
    if training.epochs is None and training.max_steps is None:
        mend = "give training.epochs, or training.max_steps"
        yield Problem(("training",), "it does not say how long", mend, is_missing=True)
    if training.epochs is not None and training.max_steps is not None:
        mend = "keep one, and set the other to null"
        yield Problem(("training", "max_steps"), "training.epochs is given too", mend)
    if training.max_steps is not None and warmup.is_integer() and warmup > training.max_steps:
        message = f"a warmup of {warmup:g} steps is longer than the run of {training.max_steps}"
        yield Problem(("training", "schedule", "warmup"), message, "make it shorter; below 1 it is a share of the run")


def _schedule(config: Config) -> Iterator[Problem]:
    schedule = config.training.schedule
    for name, value in (("warmup", schedule.warmup), ("decay", schedule.decay)):
        if value > 1 and not value.is_integer():
            message = f"{value:g} is neither a share of the run nor a whole number of steps"
            yield Problem(("training", "schedule", name), message, "write a share below 1, or whole steps")


_OPTIMIZER_KEYS = ("lr", "weight_decay", "betas", "eps", "momentum")
"""Arguments that have a key of their own; all but the first two only where the optimizer is no class by its name."""


def _optimizer(config: Config) -> Iterator[Problem]:
    optimizer, place = config.training.optimizer, ("training", "optimizer")
    for name in _OPTIMIZER_KEYS[:2] if ":" in optimizer.name else _OPTIMIZER_KEYS:
        if name in optimizer.args:
            key = "learning_rate" if name == "lr" else name
            yield Problem((*place, "args", name), "it has a key of its own", f"set training.optimizer.{key}")
    if optimizer.name == "sophia" and config.training.precision == "fp16":
        mend = "set training.precision to bf16 or fp32"
        yield Problem((*place, "name"), "the squared gradients of sophia vanish in fp16", mend)


def _evaluation(config: Config) -> Iterator[Problem]:
    data, every = config.data, config.training.eval_every
    if data.eval and data.eval_share is not None:
        yield Problem(("data", "eval_share"), "data.eval is given too", "keep one, and set the other to null")
        return  # whichever stays, the rest is said of it then
    if every is not None and not data.eval and data.eval_share is None:
        mend = "give data.eval or data.eval_share, or set it to null"
        yield Problem(("training", "eval_every"), "there is nothing to evaluate on", mend)
    for name in ("eval", "eval_share"):
        if getattr(data, name) and every is None:
            mend = "give training.eval_every, or set it to null"
            yield Problem(("data", name), "nothing says how often it is evaluated", mend)


def _columns(config: Config) -> Iterator[Problem]:
    data = config.data
    if (data.prompt is None) != (data.completion is None):
        name = "prompt" if data.prompt is None else "completion"
        yield Problem(
            ("data", name), "a prompt and its completion go together", "name both columns, or set both to null"
        )
    if data.text is None and data.prompt is None and data.messages is None:
        yield Problem(("data", "text"), "no column is looked for", "name the column that holds the text")


def _extra(config: Config) -> Iterator[Problem]:
    for name, instead in refused_fields(config.training.extra):
        yield Problem(("training", "extra", name), "it is not set here", instead)


def _unknown_extra(config: Config) -> Iterator[Problem]:
    """Of our own recipe only: a script may build another library's arguments, which have more fields."""
    for name, mend in unknown_fields(config.training.extra):
        yield Problem(("training", "extra", name), "transformers.TrainingArguments has no such field", mend)


def _checkpoint(config: Config) -> Iterator[Problem]:
    for name in ("fsdp", "deepspeed"):
        if config.checkpoint.background and config.training.extra.get(name):
            message = f"it is not for models that training.extra.{name} spreads over the ranks"
            yield Problem(("checkpoint", "background"), message, "set it to false")


def _recovery(config: Config) -> Iterator[Problem]:
    spike, recovery = config.spike, config.recovery.spike
    if spike.warmup > spike.window:
        message = f"{spike.warmup} losses never fit into a window of {spike.window}"
        yield Problem(("spike", "warmup"), message, "make it at most spike.window")
    if recovery.ramp_steps is not None and recovery.hold_steps is None:
        mend = "give recovery.spike.hold_steps, the steps before the ramp"
        yield Problem(("recovery", "spike", "ramp_steps"), "the rate is held for good, so it never ramps", mend)
    if config.recovery.max_gpu_hours is not None and config.cluster.gpus == 0:
        mend = "give cluster.gpus_per_node, or leave the key out"
        yield Problem(("recovery", "max_gpu_hours"), "the run asks for no GPUs, so none are used up", mend)


def _cluster(config: Config) -> Iterator[Problem]:
    cluster = config.cluster
    if cluster.kind == "local" and cluster.nodes > 1:
        message = f"this machine is one node, and {cluster.nodes} are asked for"
        yield Problem(("cluster", "nodes"), message, "write 1, or set cluster.kind to slurm")
    yield from _time_limit(("cluster", "time_limit"), cluster.time_limit)
    yield from _time_limit(("supervisor", "time_limit"), config.supervisor.time_limit)
    yield from _waiting(cluster)
    for option in cluster.sbatch:
        place = ("cluster", "sbatch", option)
        if option in OWN_OPTIONS:
            yield Problem(place, "the supervisor decides this option", "leave it out")
        elif option in _KEY_OF_OPTION:
            yield Problem(place, "this option has a key of its own", f"set cluster.{_KEY_OF_OPTION[option]}")


def _waiting(cluster: ClusterConfig) -> Iterator[Problem]:
    """What is done about a job that does not start."""
    place = ("cluster", "min_time")
    problems = list(_time_limit(place, cluster.min_time))
    yield from problems
    if cluster.min_time is not None and not problems and not list(_time_limit(place, cluster.time_limit)):
        shortest_s, full_s = duration_s(cluster.min_time), duration_s(cluster.time_limit)
        if shortest_s is None or (full_s is not None and shortest_s > full_s):
            message = f"{cluster.min_time} is more than the time limit of {cluster.time_limit}"
            yield Problem(place, message, "make it shorter than cluster.time_limit")
    for number, way in enumerate(cluster.fallback):
        if way.partition is None and way.qos is None:
            yield Problem(("cluster", "fallback", str(number)), "it leads nowhere", "give a partition, a qos, or both")


_ADDRESS = re.compile(r"\s*[A-Za-z0-9]+://")


def _notify(config: Config) -> Iterator[Problem]:
    """Targets that no message can reach; what they hold is not shown, for it may be a password."""
    for number, target in enumerate(config.notify):
        place, mend = (
            ("notify", str(number)),
            "write an address as apprise takes it (scheme://...), or command: PROGRAM",
        )
        command = target.removeprefix("command:")
        if command == target:
            if not _ADDRESS.match(target):
                yield Problem(place, "it is no address" if target.strip() else "it is empty", mend)
        elif not command.strip():
            yield Problem(place, "the command is empty", "write command: PROGRAM, or remove the entry")
        elif not _has_balanced_quotes(command):
            yield Problem(place, "a quote in the command is not closed", "close it, or write a backslash before it")


def _has_balanced_quotes(command: str) -> bool:
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return False
    return True


def _time_limit(place: Place, text: str | None) -> Iterator[Problem]:
    if text is None or text == "UNLIMITED":
        return
    try:
        seconds = duration_s(text)
    except ParseError:
        seconds = None
    if not seconds:
        mend = "write minutes, HH:MM:SS, D-HH:MM:SS or UNLIMITED, in quotes"
        yield Problem(place, f"{text!r} is no time limit of Slurm", mend)


_RULES: tuple[Callable[[Config], Iterator[Problem]], ...] = (
    *(_run, _entrypoint, _weights, _schedule, _optimizer, _evaluation, _columns),
    *(_extra, _checkpoint, _recovery, _cluster, _notify),
)
_OF_OUR_RECIPE: tuple[Callable[[Config], Iterator[Problem]], ...] = (_needed, _model, _length, _unknown_extra)
"""What a script of a person's own may do without."""


def _cannot_be_submitted(config: Config) -> Iterator[Problem]:
    """What a batch script cannot carry: control characters, names that no shell knows."""
    run_dir = RunDir(Path("/runs") / config.run.name)
    try:
        worker_request(config, run_dir, "hf-00000000", 1)
    except RequestError as error:
        yield Problem(("cluster",), str(error), "correct that value")
        return
    try:
        supervisor_request(config, run_dir, "hs-00000000")
    except RequestError as error:
        yield Problem(("supervisor",), str(error), "correct that value")
