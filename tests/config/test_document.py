"""Faults of a YAML are named with their lines, also in an included file and in a base."""

from fractions import Fraction
from pathlib import Path

import pytest

from sbkit.base.messages import FOREIGN_NAMES, nearest
from sbkit.checkpoint.run_config import describe_spec
from sbkit.config.document import read_document
from sbkit.config.hparams import load_hparams, read_spec
from sbkit.config.overrides import parse_overrides
from tests.config.conftest import refusal
from tests.runs import ROOT


@pytest.mark.parametrize(
    ("yaml", "text"),
    [
        ("a: [1\nb: 2", ":2 is not valid YAML"),
        ("a: 1\na: 2", 'duplicate key "a"'),
        ("\ta: 1", "cannot start any token. Indent it with spaces."),
        ("a: 1\nlr:0.001\n\n# -\n\nb: 2", ":2 is not valid YAML: could not find expected ':'. Wri"),
        ("a: 1\n b: 2\nc: 3", "keys of a level in one column."),
        ("base: ctc.yaml", "{path} reads itself: {path} -> {path}. Name another file as `base`."),
        ("a: !include:ctc.yaml", "{path} reads itself: {path} -> {path}. Name another file"),
        ("- 1", "must consist of `key: value` lines"),
        ("", "its root is empty"),
        ("!include:other.yaml", "its root is !include:other.yaml"),
        ("a: !PLACEHOLDER\n", "`a: !PLACEHOLDER ` ({path}:1) needs a value. Override it."),
        ("size: 1\na: !ref <siz>", "there is no `siz`. Did you mean `size`?"),
        ("a: !ref size", "Write it in angle brackets: `!ref <key>`"),
        ("a: !ref <b>\nb: !ref <a>", "is resolved too early"),
        ("a: !new:fractions.Fraction\nb: !ref <a>/c", "is an object"),
        ("n: -1\nb: !ref <n> * 2", "stays the text '-1 * 2'"),
        ("n: 0\nb: !ref 1 / <n>", "division by zero"),
        ("n: 99\nm: null\nb: !ref <m> - <n> ** <n> ** <n>", "may have only numbers and one power"),
        ("n: 99\nb: !ref (<n> ** <n>) ** <n>", "may have only numbers and one power"),
        ("n: 100\nb: !ref 9 ** <n>", "cannot be computed: it may have only numbers and one power"),
        ("n: 99\nb: !ref 9 * '9' * <n>", "may have only numbers and one power"),
        ("n: 99\nb: !ref <n> ** <n>", "cannot be computed: the result is too large"),
        ("n: <m>\nb: !ref -<n>", "write `!ref` before <m> of `n`, too"),
        ("a: (!!python/object/apply:os.getcwd [])", "is read as a tuple"),
        ("a: !new:fractions.Fractoin\n", "Fractoin. A module of your own must lie"),
        ("a: !new:os.getcwd\n", "should be a class"),
        ("x: 1\na: !new:fractions.Fraction\n  numertor: 1\n", "`a` ({path}:2) cannot be made"),
        ("x: 1\na: !new:torch.optim.SGD\n  lr: 1\n", "Add them, or write `!name:` if the rec"),
        ("a: {b: !new:fractions.Fraction [1, 0]}\n", "`a.b` ({path}:1)"),
        ("a: !new:fractions.Fraction\nb: !ref <a.nope>\n", "has no attribute 'nope'"),
        # An error of sbkit is kept, and its place is added.
        (
            f"a: !apply:{parse_overrides.__module__}.parse_overrides [[x]]",
            "=value. (`a` ({path}:1))",
        ),
    ],
)
def test_faulty_yaml_is_refused_with_its_line(tmp_path: Path, yaml: str, text: str) -> None:
    path = tmp_path / "ctc.yaml"
    path.write_text(yaml)
    assert text.format(path=path) in refusal(path, {})


def test_small_powers_and_stars_in_paths_are_kept(path: Path) -> None:
    path.write_text("n: 99\na: /a\nb: !ref 2 ** <n>\nc: !ref <n> ** 0.5\nd: !ref <a>/**/c\n")
    assert [*read_spec(path).settings.values()][2:] == [2**99, 99**0.5, "/a/**/c"]


def test_missing_file_offers_the_nearest(path: Path) -> None:
    assert "Did you mean `ctc.yaml`?" in refusal(path.with_name("ctx.yaml"), {})


def test_nearest_offers_only_a_likely_key() -> None:
    keys = read_document(ROOT / "hparams/ctc.yaml").root
    likely = {"smoothing": "label_smoothing", "batch-size": "batch_seconds", "speedz": "speeds"}
    assert {word: nearest(word, keys) for word in likely} == likely
    for ours, theirs in FOREIGN_NAMES.items():
        for name in theirs.split():
            assert nearest(name, [*keys, "debug_epochs"]) == ours
    assert nearest("temperature", keys) is nearest("lm_weight", keys) is None


# -- !include --------------------------------------------------------------------------------------


@pytest.fixture
def including(tmp_path: Path) -> Path:
    (tmp_path / "deep.yaml").write_text("# sizes\n\nsize: 1\nhalf: !ref <size> / 2\n")
    (tmp_path / "inner.yaml").write_text(
        "# a model\nsize: 1\nmust: !PLACEHOLDER\ntwice: !ref <size> * 2\nmany: [1, 2]\n"
        "deep: !include:deep.yaml  # below\n    size: !ref <size>\n"
    )
    including = tmp_path / "outer.yaml"
    including.write_text(
        "seed: 4\ninner: !include:inner.yaml  # more\n  must: !ref <seed>\n"
        "seen: !ref <inner[twice]>\n"
    )
    return including


def test_include_is_read_overridden_and_saved(including: Path) -> None:
    inner = {"size": 1, "must": 4, "twice": 2, "many": [1, 2], "deep": {"size": 1, "half": 0.5}}
    assert read_spec(including).settings["inner"] == load_hparams(including, {})["inner"] == inner
    arguments = ("--inner.size=5", "--inner.must=3", "--inner.many.0=3", "--inner.deep.size=8")
    overrides = parse_overrides(arguments)
    overridden = read_spec(including, overrides).settings
    inner = {"size": 5, "must": 3, "twice": 10, "many": [3, 2], "deep": {"size": 8, "half": 4}}
    assert overridden == {"seed": 4, "inner": inner, "seen": 10}
    saved = including.with_name("hyperparams.yaml")
    saved.write_text(read_spec(including, overrides).one_file)
    assert "!include" not in saved.read_text()
    assert read_spec(saved).settings == load_hparams(saved, {}) == overridden


def test_only_below_an_include_replaces_a_mapping_of_its_file(including: Path) -> None:
    including.with_name("deep.yaml").write_text("sizes: {a: 1, b: 2}\nrates: {a: 1, b: 2}\n")
    including.write_text("x: !include:deep.yaml\n  sizes: !only {a: 3}\n  rates: {a: 3}\n")
    sizes, rates = {"a": 3}, {"a": 3, "b": 2}
    assert read_spec(including).settings == {"x": {"sizes": sizes, "rates": rates}}


@pytest.mark.parametrize(
    ("name", "old", "new", "text"),
    [
        ("outer", "must: !ref", "mist: !ref", "'mist' not found in: ['size', 'must'"),
        ("outer", "  must: !ref <seed>\n", "", "`inner.must: !PLACEHOLDER ` ({inner}:3) needs a"),
        ("outer", "inner[twice]", "inner[twise]", "Did you mean `twice`?"),
        ("inner", "[1, 2]", "!new:fractions.Fraction [1, 0]", "`inner.many` ({inner}:5)"),
    ],
)
def test_wrong_file_is_refused(including: Path, name: str, old: str, new: str, text: str) -> None:
    files = {name: including.with_name(f"{name}.yaml") for name in ("outer", "inner", "deep")}
    files[name].write_text(files[name].read_text().replace(old, new))
    assert text.format(**files) in refusal(including, {})


# -- base ------------------------------------------------------------------------------------------


@pytest.fixture
def top(tmp_path: Path) -> Path:
    (tmp_path / "bases").mkdir()
    (tmp_path / "bases/root.yaml").write_text(
        "# of two cores\nsize: 1  # in units\nfreeze: {A: always}\nkept: !ref <size> * 2\n"
        "masks: {time: 2, freq: 3}\nspeeds: [1.0]\nratio: !new:fractions.Fraction\n"
        "  numerator: 3\n  denominator: 4\nbare: !new:collections.Counter\n"
    )
    (tmp_path / "bases/middle.yaml").write_text("base: root.yaml\nspeeds: [0.9, 1.1]\n")
    top = tmp_path / "top.yaml"
    top.write_text(
        "# of eight GPUs\nbase: bases/middle.yaml\nunit: 5  # new\nsize: !ref <unit> + 1\n"
        "freeze: {B: always}\nmasks: {time: 7, tone: !ref <kept>}\n"
        "ratio:\n  denominator: !ref <size>\nlater: !ref <kept>\n"
    )
    return top


def test_base_merges_and_prints_as_one_file(top: Path) -> None:
    assert read_spec(top).settings == {
        **{"unit": 5, "size": 6, "freeze": {"B": "always"}, "kept": 12, "later": 12},
        **{"masks": {"time": 7, "freq": 3, "tone": 12}, "speeds": [0.9, 1.1]},
    }
    assert load_hparams(top, {})["ratio"] == Fraction(3, 6)
    overrides = parse_overrides(["--unit=8", "--ratio.numerator=2", "--masks.tone=1"])
    printed = top.with_name("printed.yaml")
    printed.write_text(read_spec(top, overrides).one_file)
    assert printed.read_text().startswith("# of eight GPUs\n")
    assert "\nunit: 8  # new\nsize: !ref <unit> + 1 # in units\n" in printed.read_text()
    assert (
        describe_spec(read_spec(top, overrides)).values == describe_spec(read_spec(printed)).values
    )


@pytest.mark.parametrize("yaml", sorted((ROOT / "hparams").glob("*.yaml")), ids=lambda f: f.stem)
def test_every_yaml_trains_the_same_as_one_file(yaml: Path, tmp_path: Path) -> None:
    path = tmp_path / "printed.yaml"
    path.write_text(read_spec(yaml, {"data_folder": "x"}).one_file)
    printed, original = (
        describe_spec(read_spec(f, {"data_folder": "x"})).values for f in (path, yaml)
    )
    assert printed == original


@pytest.mark.parametrize(
    ("file", "old", "new", "text"),
    [
        ("top", "denominator: !ref <size>", "denominator: 0", "`ratio` ({top}:7) cannot be"),
        ("top", "<kept>}", "<kelt>}", "`masks.tone: !ref <kelt>` ({top}:6) leads nowhere"),
        ("bases/root", "<size> * 2", "<sice>", "`kept: !ref <sice>` ({bases/root}:4) leads"),
        ("bases/middle", "root", "roof", "roof.yaml cannot be read (No such file or"),
        ("top", "later: ", "bare: {a: 1}\nlater: ", "`bare` ({top}:9) cannot be merged"),
    ],
)
def test_errors_name_file_and_line(top: Path, file: str, old: str, new: str, text: str) -> None:
    files = {name: top.parent / f"{name}.yaml" for name in ("top", "bases/middle", "bases/root")}
    files[file].write_text(files[file].read_text().replace(old, new))
    for name, real in files.items():
        text = text.replace(f"{{{name}}}", str(real))
    assert text in refusal(top, {})
