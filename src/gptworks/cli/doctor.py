"""gptworks doctor: is this machine ready, and what is to be fixed?"""

import argparse
import json
from typing import TYPE_CHECKING

from gptworks import file_errors
from gptworks.cli import options
from gptworks.errors import GPTWorksError

if TYPE_CHECKING:
    from gptworks.doctor.finding import Finding

HELP = "is this machine ready? With -c FILE: for that run"
_SIGNS = {"ok": "ok", "note": "note", "problem": "PROBLEM"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_config_options(parser)
    options.add_json_option(parser)
    parser.add_argument(
        "--gpus", action="store_true", help="start two ranks on two GPUs: a sum, a sharded step, save and resume"
    )
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="with --gpus: the devices to try (default: cuda)"
    )


def run(args: argparse.Namespace) -> int:
    from gptworks.doctor import machine

    findings = machine.findings()
    problems = [each for each in findings if each.state == "problem"]
    if not problems and (args.config or args.preset or args.override or args.overrides):
        findings += _of_configuration(args)
        problems = [each for each in findings if each.state == "problem"]
    if args.gpus and not problems:
        from gptworks.doctor import gpus

        findings += gpus.findings(args.device)
        problems = [each for each in findings if each.state == "problem"]
    if args.json:
        print(json.dumps({"ready": not problems, "findings": [vars(each) for each in findings]}))
    else:
        _show(findings)
    return 2 if problems else 0


def _of_configuration(args: argparse.Namespace) -> "list[Finding]":
    from gptworks.doctor import finding, planned

    name = args.config or args.preset or "configuration"
    try:
        config = options.load_config(args, shape_of=options.shape_of_checkpoint).config
    except GPTWorksError as error:
        return finding.problem(name, "cannot be used", str(error))
    except OSError as error:
        return finding.problem(name, "cannot be used", file_errors.explain(error) or str(error))
    if not config.run.out:
        folder = options.default_run_folder(args)
        config = config.model_copy(update={"run": config.run.model_copy(update={"out": folder})})
    return planned.findings(config)


def _show(findings: "list[Finding]") -> None:
    width = max(len(each.what) for each in findings)
    for each in findings:
        print(f"{_SIGNS[each.state]:<7}  {each.what:<{width}}  {each.found}")
    notes = [each for each in findings if each.state == "note" and each.fix]
    problems = [each for each in findings if each.state == "problem"]
    print()
    for each in notes:
        print(f"note: {each.what}: {each.fix}")
    if problems:
        print(f"not ready: {len(problems)} problem{'s' if len(problems) > 1 else ''}")
        for each in problems:
            print(f"  {each.what}: {each.fix}")
    else:
        print("ready")
