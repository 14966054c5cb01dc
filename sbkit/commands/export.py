"""`sbkit export`: the bundle of a run, with a model card and further formats."""

import sys
from argparse import Namespace
from pathlib import Path

from sbkit.base.errors import FAILED
from sbkit.cli.arguments import Parser
from sbkit.export.format_table import FORMATS


def add_commands(parser: Parser) -> None:
    """Add `export`."""
    help = "write all that a model needs to run elsewhere"
    add = parser.add_command("export", export, help, "import")
    add("run", metavar="RUN", type=Path, help="a run folder, as training prints it")
    add("--out", metavar="DIR", type=Path, required=True, help="the new bundle")
    names = ", ".join(FORMATS)
    formats = f"comma-separated: {names}; each is compared with the trained model first"
    add("--formats", metavar="NAMES", default="", help=formats)
    weights = "a safetensors file that replaces the weights; the bundle then decodes greedily"
    add("--weights", metavar="FILE", type=Path, help=weights)
    no_lm = "leave out the language models, which have words of texts; it then decodes greedily"
    add("--no-lm", action="store_true", help=no_lm)
    add("--license", default="unknown", help="license ID for the model card")


def export(options: Namespace) -> int:
    """Write the bundle, print its folder, and return the exit code."""
    from sbkit.export.export import export_run
    from sbkit.export.formats import describe_failures

    formats = [name.strip() for name in options.formats.split(",") if name.strip()]
    parity = export_run(
        options.run,
        options.out,
        formats=formats,
        license=options.license,
        weights=options.weights,
        language_models=not options.no_lm,
        user_modules=options.user_modules,
    )
    failures = describe_failures(parity)
    for failure in failures:
        print(failure, file=sys.stderr)
    print(options.out)
    return FAILED if failures else 0
