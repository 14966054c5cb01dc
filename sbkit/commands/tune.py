"""`sbkit tune` and `sbkit lm`: fit another decoder to a model, and train language models."""

import argparse
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

from sbkit.base.errors import ConfigError, DataError
from sbkit.cli.arguments import Parser


def add_commands(parser: Parser) -> None:
    """Add `tune` and `lm`."""
    help = "fit another decoder to a validation set, and write a new bundle with it"
    add = parser.add_command("tune", tune, help, "tables import", logs_to_stdout=True)
    add("models", metavar="RUN|BUNDLE", type=Path, nargs=1, help="a run folder or a bundle")
    lm_text = "text of the language models, '[a.txt, b.txt]' for several, or an ARPA file"
    add("--lm-text", metavar="TEXT|ARPA", help=lm_text)
    add("--word-lm-order", metavar="N", type=int, help="word n-grams; 0 for none")
    add("--token-lm-order", metavar="N", type=int, help="token n-grams; 0 for none")
    add("--beam-size", metavar="N", type=int, help="number of hypotheses")
    rescoring = "rescore with a trained attention decoder"
    add("--attention-rescoring", action=argparse.BooleanOptionalAction, help=rescoring)
    add("--data", metavar="TABLE", type=Path, help="the validation set (default: the run's sets)")
    add("--out", metavar="DIR", type=Path, required=True, help="the new bundle")

    help = "train an n-gram language model, and write it as ARPA"
    add = parser.add_command("lm", train_language_model, help, "tables")
    add("texts", metavar="TEXT", type=Path, nargs="+", help="one sentence per line")
    add("--out", metavar="FILE", type=Path, required=True, help="the ARPA file")
    add("--order", metavar="N", type=int, default=3, help="n of the n-grams (default: 3)")
    add("--language", metavar="TAG", help="normalize text of this language")
    add("--tokenizer", metavar="RUN|BUNDLE", type=Path, help="count its tokens instead of words")


def tune(options: Namespace) -> None:
    """Fit another decoder of a run or a bundle."""
    from sbkit.config.overrides import parse_overrides
    from sbkit.run import tuning

    names = (
        *("out", "data", "lm_text", "word_lm_order", "token_lm_order", "beam_size"),
        *("attention_rescoring", "columns", "encoding", "tier", "user_modules"),
    )
    values = {name: getattr(options, name) for name in names}
    if options.lm_text is not None:  # a file or a list of files, as in a YAML
        values |= parse_overrides([f"--lm_text={options.lm_text}"])
    tuning.tune(options.models[0], **values)


def train_language_model(options: Namespace) -> None:
    """Write the ARPA file of texts."""
    from sbkit.data.sentences import read_sentences
    from sbkit.lm.arpa import is_arpa
    from sbkit.lm.training import write_language_model
    from sbkit.text.languages import parse_language
    from sbkit.text.normalization import language_table
    from sbkit.train.initialize import text_table_of

    tokenizer = options.tokenizer
    table = language_table("und") if tokenizer is None else text_table_of(tokenizer)
    if options.language is not None:
        own_table = language_table(parse_language(options.language))
        table = replace(own_table, keep_case=table.keep_case, punctuation=table.punctuation)
    out = options.out
    if out.resolve() in map(Path.resolve, options.texts):
        raise ConfigError(f"`--out` must be a new file, but {out} is one of the texts.")
    for text in filter(is_arpa, options.texts):
        raise DataError(f"A language model is trained on text, but {text} is an ARPA file.")
    settings = {name: getattr(options, name) for name in ("columns", "encoding", "tier")}
    sentences = read_sentences(options.texts, table, settings)
    print(write_language_model(out, sentences, order=options.order, tokenizer=tokenizer))
