"""The one table of what a user can set: make variable, command line option, and the setting it stands for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from dsv4kit.config.values import split_words
from dsv4kit.errors import UserError, nearest
from dsv4kit.hints import TARGETS

# The Makefile hands over the variables of its command line in these: the names, and each value as it was typed.
NAMES = "DSV4KIT_MAKE_VARIABLES"
VALUE = "DSV4KIT_MAKE_"

TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")


class Variable(NamedTuple):
    """`name` on the make line, `--option` on the command line; `setting` is the settings key it stands for, if any.

    `listed`: the value is a list, `[a,b]` or one item; where `separator` is given, items with that between them too.
    """

    name: str
    help: str
    setting: str | None = None
    flag: bool = False
    many: bool = False
    listed: bool = False
    separator: str | None = None

    @property
    def dest(self) -> str:
        """Where its value is found; `from` is a word of Python's own."""
        return "from_" if self.name == "FROM" else self.name.lower()

    @property
    def option(self) -> str:
        """The command line option."""
        return "--" + self.name.lower().replace("_", "-")


# Where the trainer's processes look for them (plugin/cpu_dsv4.py).
MEGATRON_LM, MEGATRON_BRIDGE = "env.DSV4KIT_MEGATRON_LM", "env.DSV4KIT_MEGATRON_BRIDGE"

SETTINGS = (
    Variable("NODES", "nodes of the run", "schedule.nodes"),
    Variable("STEPS", "steps of the whole run", "schedule.steps"),
    Variable("SEGMENT_STEPS", "steps of one segment (one Slurm job)", "schedule.segment_steps"),
    Variable("SPARE_SEGMENTS", "segments more than the steps take, for those that fail", "schedule.spare_segments"),
    Variable("SAVE_FREQ", "steps between checkpoints", "schedule.save_freq"),
    Variable("KEEP_LAST", "newest checkpoints that stay; none: all do", "checkpoint.keep_last"),
    Variable("KEEP_EVERY", "checkpoints of steps divisible by this stay too", "checkpoint.keep_every"),
    Variable("KEEP_BEST", "so many checkpoints with the highest reward stay too", "checkpoint.keep_best"),
    Variable("TIME", "Slurm time limit of one segment, e.g. 4:00:00", "schedule.time"),
    Variable("GATES", "act, warn or off: what is done about bad metrics (watch.gates)", "watch.gates.mode"),
    Variable("DETERMINISTIC", "True: resumes are bit-identical", "deterministic"),
    Variable("MODEL_PATH", "directory with the model's weights", "model.path"),
    Variable("TRAIN_FILE", "parquet file with training data", "data.train_files", listed=True),
    Variable("TEST_FILE", "parquet file with validation data", "data.val_files", listed=True),
    Variable("CHAT_TEMPLATE_FILE", "Jinja chat template that replaces the tokenizer's", "model.chat_template_file"),
    Variable("DIST_CKPT_PATH", "Megatron shards to load the base weights from", "checkpoint.dist_checkpoint_path"),
    Variable("PRECISION_AWARE_OPTIMIZER", "True: no second fp32 copy on the GPU", "optimizer.precision_aware"),
    Variable("OPTIMIZER_OFFLOAD_FRACTION", "share of Adam that runs on the CPU", "optimizer.offload_fraction"),
    Variable("ROUTER_REPLAY_MODE", "disabled, R2 or R3", "rollout.router_replay"),
    Variable("ROLLOUT_MOE_BACKEND", "vLLM's expert kernels; none: upstream's default", "kernels.moe_backend"),
    # The names of upstream's scripts, for those who bring a command line.
    Variable("MAX_PROMPT_LENGTH", "tokens of the longest prompt", "data.max_prompt_length"),
    Variable("MAX_RESPONSE_LENGTH", "tokens of the longest response", "data.max_response_length"),
    Variable("TRAIN_BATCH_SIZE", "prompts of one step", "data.train_batch_size"),
    Variable("ROLLOUT_N", "samples per prompt", "rollout.n"),
    Variable("ROLLOUT_TP", "tensor parallelism of the rollout", "rollout.tensor_model_parallel_size"),
    Variable("ACTOR_PP", "pipeline parallelism of the actor", "parallel.actor.pipeline_parallel_size"),
    Variable("ACTOR_EP", "expert parallelism of the actor", "parallel.actor.expert_parallel_size"),
    Variable("TOTAL_TRAINING_STEPS", "as STEPS", "schedule.steps"),
    Variable("PROJECT_NAME", "project under which trackers file the run", "tracking.project"),
    Variable("EXPERIMENT_NAME", "experiment in it; default: the run's name", "tracking.experiment"),
    Variable("CKPTS_DIR", "directory of the checkpoints; default: in the run", "checkpoint.directory"),
    Variable(
        "VERL_MEGATRON_OPTIMIZER_COMPAT",
        "0: without the two optimizer fixes (docs/fixes/)",
        "env.VERL_MEGATRON_OPTIMIZER_COMPAT",
    ),
    Variable("MEGATRON_LM", "checkout of Megatron-LM, for MODEL=dsv4-tiny; see `dsv4kit sources`", MEGATRON_LM),
    Variable("MEGATRON_BRIDGE", "checkout of Megatron-Bridge, likewise", MEGATRON_BRIDGE),
    Variable("LOGGER", "where verl sends metrics, e.g. console,wandb", "loggers", listed=True, separator=","),
)
SELECTION = (
    Variable("HW", "hardware, see `dsv4kit profiles`"),
    Variable("MODEL", "model; default: the hardware's"),
    Variable("RECIPE", "grpo or sft; default: the hardware's"),
    Variable("SITE", "cluster: a name in slurm/sites or a YAML file; default: the hardware's"),
)
FREE = (
    Variable("SET", "any setting, key=value; several with spaces between", many=True),
    Variable("VERL", "any key of verl's own configuration, key=value", many=True),
)
RUN = Variable("RUN", "name of the run; default: a new one for submit, else the newest")
DRY_RUN = Variable("DRY_RUN", "show what would be submitted, submit nothing", flag=True)
FORCE = Variable("FORCE", "submit what the planner says does not fit", flag=True)
JSON = Variable("JSON", "for programs", flag=True)
EXPLAIN = Variable("EXPLAIN", "the formulas with their numbers, and every constant", flag=True)
SEARCH = Variable("SEARCH", "the best legal layouts for these nodes", flag=True)
MIN_NODES = Variable("MIN_NODES", "the least nodes on which a layout fits, and that layout", flag=True)
COMPARE = Variable("COMPARE", "hardware and nodes side by side, e.g. h100:64,gb200:64")
CALIBRATE = Variable("CALIBRATE", "directory of a run: fit the site's constants to it, and keep them")
DRY_RUN_OF_FIT = Variable("DRY_RUN", "with CALIBRATE: show what would be fitted, keep nothing", flag=True)
FORGET = Variable("FORGET", "name of a run: take what was fitted to it out of the constants again")
FOLLOW = Variable("FOLLOW", "stay and show progress until the run ends", flag=True)
TORCH_INDEX = Variable("TORCH_INDEX", "package index with CPU builds of torch, for HW=cpu")
IMAGE = Variable("IMAGE", "squashfs image to run in (bubblewrap, where the site has no containers), or to write")
ENGINE = Variable("ENGINE", "what builds: docker, podman or buildah; default: the first that is usable here")
STACK = Variable("STACK", "what is inside, another than the usual; see `dsv4kit image show`")
BUILD_VARIABLES = (
    STACK,
    Variable("BASE_IMAGE", "the base, with its digest"),
    Variable("VERL_SHA", "full sha of the verl to build in"),
    Variable("MAX_JOBS", "compilers at the same time; each takes up to 8 GB"),
    Variable("NVCC_THREADS", "threads of one nvcc"),
    TORCH_INDEX,
)
AGAIN = Variable("AGAIN", "1: look up what is recorded too", flag=True)
SET_OF_BUILD = Variable("SET", "any other variable of the Dockerfile, NAME=VALUE", many=True)
QUEUE = (
    Variable("PARTITION", "partition, in place of the site's"),
    Variable("QOS", "quality of service, in place of the site's"),
    Variable("ACCOUNT", "account, in place of the site's"),
    Variable("EXCLUDE", "nodes no job may have, e.g. node[3-5],node9"),
    Variable("CHAIN", "most jobs of the run in the queue; each segment submits the next ones; default: all at once"),
)
JOB_OF_BUILD = (
    Variable("SITE", "cluster whose pyxis builds it, in a job: a name in slurm/sites or a YAML file"),
    *(variable for variable in QUEUE if variable.name != "CHAIN"),
    Variable("TIME", "Slurm time limit of that job; default 6:00:00"),
)
KIT = Variable("KIT", "new: the next segments run the code of this clone, not the run's own copy")
OF_DATA = (
    Variable("DATA", "gsm8k, dapo-math-17k, aime-2024, or a .parquet, .jsonl or .json file of your own"),
    Variable("FORMAT", "grpo (rows have `prompt` and an answer) or sft (rows have `messages`)"),
    Variable("OUT", "directory to be made, with train.parquet, test.parquet and statistics.json"),
    Variable("FROM", "local copy of a known data set: a directory or a file; without it the hub is asked"),
    Variable("TEST", "file of your own with test data"),
    Variable("TEST_ROWS", "take so many rows of the training data for test.parquet"),
    Variable("ROWS", "keep so many training rows"),
    Variable("SEED", "decides which rows ROWS and TEST_ROWS take; default 1"),
    Variable("COLUMNS", "your columns, e.g. question=q,answer=a", many=True),
    Variable("DATA_SOURCE", "which of verl's rewards goes with your rows, e.g. math_dapo"),
    Variable("ANSWER_AFTER", "the answer is what stands behind the last of these, e.g. ####"),
    Variable("INSTRUCTION", "text put behind each question"),
    Variable("KEEP_DUPLICATES", "keep rows that are the same as an earlier one", flag=True),
    Variable("TOKENIZER", "directory with a tokenizer: lengths are then in tokens"),
    Variable("CHAT_TEMPLATE_FILE", "Jinja chat template, where the tokenizer has none"),
    Variable("MAX_TOKENS", "drop longer rows"),
    Variable(
        "WITH_PYTHON", "Python that does the work, with pyarrow, datasets, transformers; default: `make runtime`'s"
    ),
)
STEP = Variable("STEP", "step whose checkpoint is meant; default: the newest complete one")
OF_MODEL = (
    Variable("MODEL_PATH", "directory with the model, in Hugging Face form"),
    Variable("MODEL", "the kit's name of the model that it should be, e.g. dsv4-pro"),
    Variable("HASHES", "file with the files' sha256 sums, or hub for those in a hub's cache; every byte is then read"),
    Variable("PROXY", "directory to be made, with the first four layers: what MODEL=dsv4-pro-4l trains"),
)
FORGET_NODES = Variable("FORGET_NODES", "use nodes again that the run has found bad", flag=True)
FROM_STEP = Variable("FROM_STEP", "go back to the checkpoint of this step; 0: start over")
FORMAT_OF_REPORT = Variable("FORMAT", "html (default), md or json")
WITH = Variable("WITH", "another run: what the two have otherwise")
OUT_OF_REPORT = Variable("OUT", "file to write; default: report.html in the run's directory")
TO = Variable("TO", "tensorboard, wandb or mlflow")
OUT_OF_TRACK = Variable("OUT", "directory to write to; default: in the run's directory")
STATE = Variable("STATE", "only runs that are so: waiting, running, finished, stopped, ...; several with commas")
MATCH = Variable("MATCH", "only runs with such a name, e.g. 'pro-*'")
SORT = Variable("SORT", "age (default), name, state, left, node-hours, lost or reward")
TAIL = Variable("TAIL", "only so many of the last lines")
GREP = Variable("GREP", "only lines in which this regular expression is found")
NODE = Variable("NODE", "log of this node (for ray and agent)")
SINCE = Variable("SINCE", "only lines since then: 10m, 2h, 14:30 or 2026-01-31T14:30, for logs with times in them")
WHAT = Variable("WHAT", "driver (default), slurm, ray or agent (what sets a node up and starts processes on it)")
FROM = Variable("FROM", "run[@step]: a new run with that one's settings, from its last checkpoint or that of a step")
SEGMENT = Variable("SEGMENT", "segment whose log to show; default: the latest")
ALL = Variable("ALL", "the whole log; else the last megabyte", flag=True)

COUNTS = (MIN_NODES, COMPARE)
FIT = (CALIBRATE, DRY_RUN_OF_FIT, FORGET)

BY_VERB: Mapping[str, tuple[Variable, ...]] = {
    "plan": (*SELECTION, IMAGE, *SETTINGS, *FREE, JSON, EXPLAIN, SEARCH, *COUNTS, *FIT),
    "submit": (*SELECTION, IMAGE, *QUEUE, *SETTINGS, RUN, FROM, *FREE, DRY_RUN, JSON, FORCE, FOLLOW, TORCH_INDEX),
    "doctor": (*SELECTION, IMAGE, *QUEUE, *SETTINGS, *FREE, JSON, TORCH_INDEX),
    "image build": (SELECTION[0], IMAGE, ENGINE, *BUILD_VARIABLES, *JOB_OF_BUILD, SET_OF_BUILD),
    "image pins": (SELECTION[0], STACK, AGAIN),
    "prepare data": OF_DATA,
    "prepare model": OF_MODEL,
    "resume": (RUN, SELECTION[3], IMAGE, *QUEUE, *SETTINGS, *FREE, KIT, FROM_STEP, FORGET_NODES, JSON, FOLLOW),
    "runs": (STATE, MATCH, SORT, JSON),
    "sources": (STACK, *(variable for variable in SETTINGS if variable.setting in (MEGATRON_LM, MEGATRON_BRIDGE))),
    "status": (RUN, JSON),
    "track": (RUN, TO, OUT_OF_TRACK),
    "report": (RUN, WITH, FORMAT_OF_REPORT, OUT_OF_REPORT),
    "logs": (RUN, SEGMENT, WHAT, NODE, TAIL, GREP, SINCE, FOLLOW, ALL, JSON),
    "explain": (RUN,),
    "checkpoints": (RUN,),
    "cancel": (RUN, JSON),
    "export": (RUN, STEP, DRY_RUN),
}


def is_true(text: str, name: str) -> bool:
    """A yes or no as people write it."""
    lowered = text.strip().lower()
    if lowered not in TRUE + FALSE:
        raise UserError(f"{name}={text!r}: neither yes nor no; allowed: {', '.join(filter(None, TRUE + FALSE))}")
    return lowered in TRUE


def options_from_make(verb: str, environ: Mapping[str, str]) -> list[str]:
    """The variables of a make command line as options of `verb`. Refuses what the verb does not know."""
    known = {variable.name: variable for variable in BY_VERB.get(verb, ())}
    options: list[str] = []
    for name in environ.get(NAMES, "").split():
        if name not in known:
            allowed = ", ".join(known) or "none"
            target = TARGETS.get(verb, verb.partition(" ")[0])
            raise UserError(f"make {target}: unknown variable {name}{nearest(name.upper(), known)}; allowed: {allowed}")
        variable, value = known[name], environ.get(VALUE + name, "")
        if variable.flag:
            options.append(variable.option if is_true(value, name) else variable.option.replace("--", "--no-", 1))
        elif variable.many:
            options += [f"{variable.option}={word}" for word in split_words(value, name)]
        else:
            options.append(f"{variable.option}={value}")
    return options
