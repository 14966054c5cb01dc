"""`sbkit check` and `sbkit config`: print what a YAML would do, and all its settings."""

from argparse import Namespace
from dataclasses import asdict

from sbkit.base.threads_and_memory import keep_freed_memory
from sbkit.cli.arguments import Parser


def add_commands(parser: Parser) -> None:
    """Add `check` and `config`."""
    help = "check a run before it starts"
    add = parser.add_command("check", check, help, "yaml", takes_overrides=True)
    add("--json", action="store_true", help="print the findings as JSON")
    add("--target", metavar="cuda:COUNT", help="check for a machine with COUNT CUDA devices")
    add("--strict", action="store_true", help="exit with 1 for notes, too")
    add("--defaults", action="store_true", help="list the keys that the YAML leaves out")

    help = "print a YAML with its base and overrides as one file"
    add = parser.add_command("config", print_config, help, "yaml", takes_overrides=True)
    add("--all", action="store_true", help="add the defaults of the keys that it leaves out")
    add("--parts", action="store_true", help="prepare its data, and print the tree of its parts")


def check(options: Namespace) -> int:
    """Print every finding; return 1 if one stops the run or, with `--strict`, if there is any."""
    keep_freed_memory()  # as training does: the check measures its memory
    from sbkit.base.files import to_json
    from sbkit.base.messages import printable_json
    from sbkit.check.check import check_run, summary
    from sbkit.config.overrides import parse_overrides
    from sbkit.logs.handlers import quiet
    from sbkit.train.setup import declare_run

    overrides = parse_overrides(options.overrides)
    target = options.target
    spec = declare_run(options.yaml, overrides, target=target)
    with quiet():
        result = check_run(spec)
    findings = result.findings
    cost = result.cost  # None if it could not be measured
    if options.json:
        records = [{"severity": finding.severity, **asdict(finding)} for finding in findings]
        record: dict[str, object] = {"findings": records}
        if cost is not None:
            record["cost"] = asdict(cost)
        print(printable_json(to_json(record)))
    else:
        lines = [*result.initial_weights]
        if options.defaults:
            lines += [f"`{key}` is {spec.settings[key]!r} by default." for key in spec.defaults]
        print(*findings, *lines, summary(findings), sep="\n")
        if cost is not None:
            print(cost)
    return int(any(options.strict or finding.stops for finding in findings))


def print_config(options: Namespace) -> None:
    """Print a YAML as one file."""
    from sbkit.config.document import read_document
    from sbkit.config.hparams import make_spec
    from sbkit.config.overrides import parse_overrides
    from sbkit.train.setup import declare_run, keys_of

    overrides = parse_overrides(options.overrides)
    if options.parts:
        from sbkit.check.check import open_checked_run
        from sbkit.check.parts import part_lines
        from sbkit.logs.handlers import quiet

        spec = declare_run(options.yaml, overrides)
        with quiet(), open_checked_run(spec) as run:
            print(*part_lines(run), sep="\n")
        return
    document = read_document(options.yaml)
    spec = make_spec(document, overrides, keys=keys_of(document, overrides))
    print(spec.one_file if options.all else spec.one_file_without_defaults, end="")
