"""The `tightfit` command: reads the arguments, runs one verb, turns errors into exit codes.

Knows which verbs there are, not what they do; each is imported when it is called.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from tightfit.cli.arguments import (
    add_job_flags,
    complain_about,
    load_job,
    overrides_of,
    prepare_arguments,
)
from tightfit.errors import ConfigError, TightfitError
from tightfit.facts.job import Job

_EXIT_CODES = """\
exit codes: 0 done; 1 failed; 2 bad arguments, config or data; 3 nothing fits; 130 interrupted"""


def entry_point() -> None:
    """Run the command line of this process and exit with its code.

    Taking torch and transformers apart object by object takes a second that `plan` and
    `estimate`, which leave nothing open, need not wait for.
    """
    arguments = sys.argv[1:]
    code = main(arguments)
    if code == 0 and arguments[:1] in (["plan"], ["estimate"]):
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
    if verb == "train":
        return _train(_job(arguments))
    if verb == "plan":
        return _plan(_job(arguments), arguments.json)
    return _estimate(_job(arguments), arguments.json)


def _job(arguments: argparse.Namespace) -> Job:
    overrides = overrides_of(arguments)
    model = getattr(arguments, "MODEL", None)
    if model is not None:
        if Path(model).suffix in (".yaml", ".yml"):
            raise ConfigError(
                f"estimate takes a model; for a job's file use: tightfit plan {model}"
            )
        overrides = {"model_name_or_path": model} | overrides
    config = getattr(arguments, "CONFIG", None)
    return load_job(None if config is None else Path(config), overrides)


@contextmanager
def _quick_imports() -> Iterator[None]:
    """No garbage collection inside: imports make no garbage and take a fifth less time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _train(job: Job) -> int:
    with _quick_imports():
        from tightfit.cli.train import run

    return run(job)


def _plan(job: Job, as_json: bool) -> int:
    with _quick_imports():
        from tightfit.cli.plan import run

    return run(job, as_json=as_json)


def _estimate(job: Job, as_json: bool) -> int:
    with _quick_imports():
        from tightfit.cli.estimate import run

    return run(job, as_json=as_json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tightfit",
        description="Train language models that do not fit.",
        epilog=f"`tightfit VERB --help` lists the keys. {_EXIT_CODES}",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"tightfit {version('tightfit')}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    _add_verb(verbs, "train", "plan, train, and compare prediction with measurement", "CONFIG")
    _add_verb(verbs, "plan", "show the memory bill and the plan of a job", "CONFIG")
    _add_verb(verbs, "estimate", "show what training a model would take", "MODEL")
    return parser


def _add_verb(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    purpose: str,
    positional: str,
) -> None:
    shown = positional if positional == "MODEL" else f"[{positional}]"
    verb = verbs.add_parser(
        name,
        help=purpose,
        usage=f"tightfit {name} {shown} [--key value ...]",
        description=purpose,
        epilog=_EXIT_CODES,
        allow_abbrev=False,
    )
    if positional == "CONFIG":
        verb.add_argument("CONFIG", nargs="?", help="YAML file with the job's keys")
    else:
        verb.add_argument("MODEL", help="name on the Hub, or folder with config.json")
    if name != "train":
        verb.add_argument("--json", action="store_true", help="print JSON for programs")
    add_job_flags(verb)
