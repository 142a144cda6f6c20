"""The `tightfit` command: reads the arguments, runs one verb, turns errors into exit codes.

Knows which verbs there are, not what they do; each is imported when it is called.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.cli.arguments import (
    add_job_flags,
    complain_about,
    load,
    overrides_of,
    prepare_arguments,
)
from tightfit.cli.quiet import quiet_libraries
from tightfit.errors import ConfigError, TightfitError
from tightfit.facts.job import Job
from tightfit.facts.machine_keys import check_is_for_here
from tightfit.facts.model_spec import load_model_spec
from tightfit.interop.formats import EXPORTS, FORMATS
from tightfit.interop.reading import Reading
from tightfit.launch.environment import LIFELINE, RankPlace, place_here
from tightfit.launch.failures import Reporting
from tightfit.launch.lifeline import hold_lifeline
from tightfit.training.output import check_output_dir

if TYPE_CHECKING:
    from tightfit.cli.convert import Export

    _Verbs = argparse._SubParsersAction[argparse.ArgumentParser]

_EXIT_CODES = """\
exit codes: 0 done; 1 failed; 2 bad arguments, config or data; 3 nothing fits; 130 interrupted"""


def entry_point() -> None:
    """Run the command line of this process and exit with its code.

    Taking torch and transformers apart object by object takes a second that `plan` and
    `estimate`, which leave nothing open, need not wait for. A rank must not: threads of gloo that
    outlive their group let go of tensors, and abort the process where Python has ended.
    """
    arguments = sys.argv[1:]
    code = main(arguments)
    leaves_nothing = arguments[:1] in (["plan"], ["estimate"])
    if code == 0 and (leaves_nothing or place_here(os.environ) is not None):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def main(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code.

    Mistakes of the user end as a message on stderr; any other exception is a fault of tightfit
    and is raised.
    """
    try:
        return _run(argv)
    except TightfitError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _run(argv: Sequence[str]) -> int:
    arguments, unknown = _parser().parse_known_args(prepare_arguments(argv))
    complain_about(unknown)
    verb: str = arguments.verb
    if verb == "presets":
        return _presets(arguments.json)
    quiet_libraries()  # before a verb imports them
    if verb == "probe":
        return _probe(arguments)
    if verb == "convert":
        return _convert(arguments)
    if verb == "merge":
        return _merge(arguments)
    if verb == "train":
        return _train(arguments, argv)
    if verb == "plan" and arguments.largest:
        return _largest(arguments)
    if verb == "plan":
        return _plan(*_job_of_a_model(arguments), arguments)
    # A config of another tool is for cards, wherever it is billed.
    return _estimate(*_job_of_a_model(arguments, beside_config={"num_gpus": 1}), arguments)


def _job(
    arguments: argparse.Namespace,
    defaults: Mapping[str, Any] | None = None,
    beside_config: Mapping[str, Any] | None = None,
) -> tuple[Job, Reading | None]:
    """The job of the command line: a YAML file or a model, and the keys given as flags; and the
    config of another tool that either names."""
    overrides = overrides_of(arguments)
    given: str | None = arguments.JOB
    path = None
    if given is not None and Path(given).suffix in (".yaml", ".yml"):
        path = Path(given)
    elif given is not None:
        overrides = {"model_name_or_path": given} | overrides
    return load(path, overrides, defaults, beside_config)


def _job_of_a_model(
    arguments: argparse.Namespace,
    defaults: Mapping[str, Any] | None = None,
    beside_config: Mapping[str, Any] | None = None,
) -> tuple[Job, Reading | None]:
    """The same, where there is such a model: what is wrong is said before a verb's slow imports."""
    job, reading = _job(arguments, defaults, beside_config)
    load_model_spec(job.model_name_or_path)
    return job, reading


def _job_to_train(
    arguments: argparse.Namespace, defaults: Mapping[str, Any] | None = None
) -> tuple[Job, Reading | None]:
    """A job for the machine at hand."""
    job, reading = _job_of_a_model(arguments, defaults)
    check_is_for_here(vars(job))
    return job, reading


@contextmanager
def _quick_imports() -> Iterator[None]:
    """No garbage collection inside: imports make no garbage and take a fifth less time.

    What was imported stays, so later collections need not look through it either.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _presets(as_json: bool) -> int:
    from tightfit.cli.presets import run

    return run(as_json=as_json)


def _train(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Train: as one process, as one of the ranks that a launcher has started, or as launcher."""
    # Segments that grow waste least; bills for cards count on it. Read when CUDA starts.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    place = place_here(os.environ)
    if place is not None:
        hold_lifeline(os.environ)
        with Reporting.of(place.rank, os.environ):
            job, reading = _job_to_train(arguments, place.counts())
            _show_reading(reading if place.rank == 0 and LIFELINE not in os.environ else None)
            return _train_as_rank(job, place)
    job, reading = _job_to_train(arguments)
    check_output_dir(job)  # again with all else, when seconds have been spent on imports
    _show_reading(reading)
    # Torch's warnings of closed sockets add nothing to what is told; it reads this as it is loaded.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if "num_gpus" not in job.model_fields_set:
        with _quick_imports():
            from tightfit.planner.machine import with_all_cards

        job = with_all_cards(job)
    if job.ranks > 1:
        return _supervise(job, argv)
    with _quick_imports():
        from tightfit.cli.train import run

    return run(job)


def _show_reading(reading: Reading | None) -> None:
    """Say what became of another tool's config, before anything takes long."""
    if reading is None:
        return
    from rich.console import Console

    from tightfit.cli.notes import show_reading

    show_reading(Console(), reading)


def _train_as_rank(job: Job, place: RankPlace) -> int:
    with _quick_imports():
        from tightfit.cli.ranks import run_as_rank

    return run_as_rank(job, place)


def _supervise(job: Job, argv: Sequence[str]) -> int:
    with _quick_imports():
        from tightfit.cli.ranks import run_as_supervisor

    return run_as_supervisor(job, argv)


def _plan(job: Job, reading: Reading | None, arguments: argparse.Namespace) -> int:
    with _quick_imports():
        from tightfit.cli.plan import run

    export = _export(arguments)
    return run(job, as_json=arguments.json, reading=reading, export=export, buying=arguments.buying)


def _largest(arguments: argparse.Namespace) -> int:
    """Look for the model that a job is to have; whichever it names is left alone.

    Raises:
        ConfigError: something else is asked for as well that is about one plan.
    """
    if arguments.buying or arguments.export is not None:
        raise ConfigError("--largest is about many models: leave out --buying and --export")
    with _quick_imports():
        from tightfit.cli.largest import run

    job, _ = _job(arguments, {"model_name_or_path": "-"})
    return run(job, as_json=arguments.json)


def _export(arguments: argparse.Namespace) -> Export | None:
    """Where the plan is written for another tool.

    Raises:
        ConfigError: there is no such format, or a file is there already.
    """
    if arguments.export is None:
        return None
    from tightfit.cli.convert import Export

    return Export.of(arguments.export, arguments.export_to, force=arguments.force)


def _estimate(job: Job, reading: Reading | None, arguments: argparse.Namespace) -> int:
    with _quick_imports():
        from tightfit.cli.estimate import run

    return run(
        job,
        as_json=arguments.json,
        compare=arguments.compare,
        picture=arguments.html,
        reading=reading,
    )


def _convert(arguments: argparse.Namespace) -> int:
    from tightfit.cli.convert import run

    return run(
        arguments.FROM,
        arguments.TO,
        overrides_of(arguments),
        from_format=arguments.from_format,
        to_format=arguments.to_format,
        force=arguments.force,
    )


def _merge(arguments: argparse.Namespace) -> int:
    with _quick_imports():
        from tightfit.cli.merge import run

    return run(
        arguments.ADAPTER,
        arguments.OUTPUT_DIR,
        base=arguments.model_name_or_path,
        precision=arguments.precision,
        bits=arguments.quantization_bit,
    )


def _probe(arguments: argparse.Namespace) -> int:
    with _quick_imports():
        from tightfit.cli.probe import Wanted, run, run_history

    if arguments.history:
        return run_history(as_json=arguments.json)
    wanted = Wanted.of(
        ranks=arguments.num_gpus,
        folder=arguments.offload_folder,
        size=arguments.disk_size,
        disk=not arguments.no_disk,
        yes=arguments.yes,
    )
    return run(wanted, as_json=arguments.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tightfit",
        description="Train language models that do not fit.",
        epilog=f"`tightfit VERB --help` lists the keys. {_EXIT_CODES}",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"tightfit {version('tightfit')}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    _add_verb(verbs, "train", "plan, train, and compare prediction with measurement")
    plan = _add_verb(verbs, "plan", "show the memory bill and the fastest plan that fits")
    plan.add_argument(
        "--export", choices=EXPORTS, metavar="|".join(EXPORTS), help="write the plan for that tool"
    )
    plan.add_argument(
        "--export_to", "--export-to", metavar="FILE", help="where; - is standard output"
    )
    _add_force(plan)
    plan.add_argument(
        "--buying",
        action="store_true",
        help="say what more cards, more RAM and faster links would change",
    )
    plan.add_argument(
        "--largest",
        action="store_true",
        help="look for the largest model that the machine can train, instead of planning for one",
    )
    estimate = _add_verb(verbs, "estimate", "show the memory bill of a job exactly as it is typed")
    estimate.add_argument(
        "--compare",
        action="store_true",
        help="show DDP and ZeRO-1/2/3, each with offload, side by side per card",
    )
    estimate.add_argument(
        "--html", type=Path, metavar="FILE", help="write the bill as a picture to a new file"
    )
    _add_merge(verbs)
    _add_probe(verbs)
    cards = verbs.add_parser(
        "presets",
        help="list the cards that can be planned for without one (--gpu)",
        description="list the cards that can be planned for without one (--gpu)",
        epilog=_EXIT_CODES,
        allow_abbrev=False,
    )
    cards.add_argument("--json", action="store_true", help="print JSON for programs")
    _add_convert(verbs)
    return parser


def _add_merge(verbs: _Verbs) -> None:
    purpose = "write a base with a LoRA adapter merged into it, and hold its logits against both"
    verb = verbs.add_parser(
        "merge", help=purpose, description=purpose, epilog=_EXIT_CODES, allow_abbrev=False
    )
    verb.add_argument("ADAPTER", type=Path, help="folder of an adapter, such as a checkpoint")
    verb.add_argument("OUTPUT_DIR", type=Path, help="folder of the merged model, which is new")
    verb.add_argument(
        "--model_name_or_path", metavar="MODEL", help="the base [the one that the adapter names]"
    )
    verb.add_argument(
        "--precision",
        choices=("auto", "bf16", "fp16", "fp32"),
        default="auto",
        metavar="auto|bf16|fp16|fp32",
        help="of the merged weights [auto: of the base's files]",
    )
    verb.add_argument(
        "--quantization_bit",
        type=int,
        choices=(4,),
        metavar="4",
        help="merge into the base as it is when it was quantised and dequantised, on which a QLoRA "
        "adapter was trained",
    )


def _add_probe(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    purpose = "measure this machine and keep the result for plans, or show how predictions did"
    verb = verbs.add_parser(
        "probe", help=purpose, description=purpose, epilog=_EXIT_CODES, allow_abbrev=False
    )
    verb.add_argument("--json", action="store_true", help="print JSON for programs")
    verb.add_argument(
        "--history",
        action="store_true",
        help="measure nothing; show predicted beside measured step times of all training runs",
    )
    verb.add_argument(
        "--num_gpus", metavar="N", help="ranks between which the link is measured [all cards, or 2]"
    )
    verb.add_argument(
        "--offload_folder", metavar="DIR", default=".", help="on the disk to measure [.]"
    )
    verb.add_argument(
        "--disk-size",
        "--disk_size",
        metavar="SIZE",
        help="to write and read there; asks above 2GiB [512MiB, less on a full disk]",
    )
    verb.add_argument("--no-disk", "--no_disk", action="store_true", help="leave the disk alone")
    verb.add_argument("--yes", action="store_true", help="write more than 2GiB without asking")


def _add_convert(verbs: _Verbs) -> None:
    purpose = "write the config of one tool as that of another"
    verb = verbs.add_parser(
        "convert",
        help=purpose,
        usage="tightfit convert FROM TO [--from FORMAT] [--to FORMAT] [--key value ...]",
        description=f"{purpose}; formats: {', '.join(FORMATS)}",
        epilog=_EXIT_CODES,
        allow_abbrev=False,
    )
    verb.add_argument("FROM", help="file that is read")
    verb.add_argument("TO", help="file that is written; - is standard output")
    for name, what in (("from", "FROM"), ("to", "TO")):
        verb.add_argument(
            f"--{name}",
            dest=f"{name}_format",
            choices=tuple(FORMATS),
            metavar="FORMAT",
            help=f"format of {what}, where keys or name do not say it",
        )
    _add_force(verb)
    add_job_flags(verb)


def _add_force(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--force", action="store_true", help="write over a file that is there")


def _add_verb(
    verbs: _Verbs,
    name: str,
    purpose: str,
) -> argparse.ArgumentParser:
    verb = verbs.add_parser(
        name,
        help=purpose,
        usage=f"tightfit {name} [JOB] [--key value ...]",
        description=purpose,
        epilog=_EXIT_CODES,
        allow_abbrev=False,
    )
    verb.add_argument(
        "JOB",
        nargs="?",
        help="YAML file with the job's keys, or a model: name on the Hub, folder or config.json",
    )
    if name != "train":
        verb.add_argument("--json", action="store_true", help="print JSON for programs")
    add_job_flags(verb)
    return verb
