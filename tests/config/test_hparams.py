"""Every way a YAML and its overrides can differ from what takes effect."""

import subprocess
import sys
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path

import pytest
import ruamel.yaml
from ruamel.yaml.constructor import BaseConstructor

from sbkit.base.errors import SbkitError
from sbkit.checkpoint.run_config import RunConfig
from sbkit.config.document import clean_ruamel, nearest, read_document
from sbkit.config.hparams import load_hparams, read_knobs, resolve, save_resolved
from sbkit.config.overrides import parse_command, parse_overrides
from tests.runs import ROOT

YAML = """\
seed: 3407
lr: 1e-3
batch_seconds: 60.0  # seconds
language: en
precision: fp32
mixed: false
augment:
  speeds: [0.9, 1.0]
  masks: {time: 2}
double: !ref <batch_seconds> * 2
output_folder: !ref results/<seed>
betas: (0.9, 0.98)
sizes: !tuple (3, 4)
limit: null
free: {}
freeze: {CNN: always}
third: !ref <ratio[numerator]>

ratio: !new:fractions.Fraction
  numerator: 3
  denominator: !ref <seed>
also: !ref <ratio>
bare: !new:collections.Counter
many: !new:collections.deque [[1, 2]]
later: !name:collections.Counter
  step: 1
modules:
  ratio: !ref <ratio>
__hidden: !apply:os.getcwd
"""

KNOBS = {
    "seed": 3407,
    "lr": 0.001,
    "batch_seconds": 60.0,
    "language": "en",
    "precision": "fp32",
    "mixed": False,
    "augment": {"speeds": [0.9, 1.0], "masks": {"time": 2}},
    "double": 120.0,
    "output_folder": "results/3407",
    "betas": (0.9, 0.98),
    "sizes": (3, 4),
    "limit": None,
    "free": {},
    "freeze": {"CNN": "always"},
    "third": 3,
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "ctc.yaml"
    file.write_text(YAML)
    return file


def knobs(path: Path, *arguments: str) -> dict[str, object]:
    return read_knobs(path, parse_overrides(arguments))


def refusal(path: Path, overrides: Mapping[str, object]) -> str:
    with pytest.raises(SbkitError) as caught:
        load_hparams(path, overrides)
    return str(caught.value)


def test_the_knobs_are_the_plain_values_and_nothing_is_built(path: Path) -> None:
    assert read_knobs(path, {}) == KNOBS


def test_reading_the_knobs_runs_no_code_and_imports_no_torch(path: Path) -> None:
    path.write_text(YAML + f"bad: !apply:os.mkdir [{path.parent / 'made'}]\nnet: !new:torch.Nope\n")
    script = (
        "import sys; from pathlib import Path; from sbkit.config.hparams import read_knobs;"
        f"read_knobs(Path({str(path)!r}), {{}}); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    assert not (path.parent / "made").exists()


def test_both_readings_agree_and_the_saved_file_is_what_took_effect(path: Path) -> None:
    overrides = parse_overrides(["--seed=7", "--ratio.numerator=5", "--augment[speeds]=[1.1]"])
    hparams, plain = load_hparams(path, overrides), read_knobs(path, overrides)
    assert {key: hparams[key] for key in plain} == plain
    assert hparams["ratio"] == hparams["also"] == Fraction(5, 7)
    assert "__hidden" not in hparams
    saved = path.with_name("hyperparams.yaml")
    save_resolved(saved, path, overrides)
    assert "!ref" not in saved.read_text()
    assert read_knobs(saved, {}) == plain
    assert load_hparams(saved, {})["ratio"] == Fraction(5, 7)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--a", "1"], {"a": 1}),
        (["--a=1e-3"], {"a": 0.001}),
        (["--a", "-1"], {"a": -1}),
        (["--a=-.5"], {"a": -0.5}),
        (["--a=x # y: z"], {"a": "x # y: z"}),
        (["--a=a=b"], {"a": "a=b"}),
        (["--a='1'"], {"a": "1"}),
        (['--a=""'], {"a": ""}),
        (["--flag", "--b", "false"], {"flag": True, "b": False}),
        (["--a=True", "--b=FALSE", "--c=Null"], {"a": True, "b": False, "c": None}),
        (["--a=null"], {"a": None}),
        (["--a=[0.9, 1e-3]"], {"a": [0.9, 0.001]}),
        (["--a={b: 1}"], {"a": {"b": 1}}),
        (["--a.b=1", "--a[c]=2"], {"a": {"b": 1, "c": 2}}),
        (["--a=1", "--a=2"], {"a": 2}),
    ],
)
def test_the_command_line_is_read(arguments: list[str], expected: dict[str, object]) -> None:
    assert parse_overrides(arguments) == expected
    assert [type(each) for each in parse_overrides(arguments).values()] == [
        type(each) for each in expected.values()
    ]


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("lr", "`lr` is not of the form --key=value"),
        ("--", "is not of the form"),
        ("--a[b=3", "is not of the form"),
        ("--a=", "needs a plain value"),
        ("--a=!new:os.system", "needs a plain value"),
        ("--a=[1,", "Close its brackets"),
        ("--a={b: !new:os.system }", "is no list, mapping or quoted text"),
    ],
)
def test_a_malformed_argument_is_refused(argument: str, says: str) -> None:
    with pytest.raises(SbkitError) as caught:
        parse_overrides([argument])
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("argument", "key", "expected"),
    [
        ("--batch_seconds=12", "batch_seconds", 12.0),
        ("--batch_seconds=12", "double", 24.0),
        ("--seed=1e3", "seed", 1000),
        ("--mixed", "mixed", True),
        ("--double=3", "double", 3.0),
        ("--betas=[0.8, 0.9]", "betas", [0.8, 0.9]),
        ("--betas=(0.8, 0.9)", "betas", (0.8, 0.9)),
        ("--free.new=1", "free", {"new": 1}),
        ("--freeze={CNN: 5, Transformer: 9}", "freeze", {"CNN": 5, "Transformer": 9}),
        ("--freeze=[Transformer]", "freeze", ["Transformer"]),
        ("--freeze.CNN=5", "freeze", {"CNN": 5}),
        ("--augment.masks.time=3", "augment", {"speeds": [0.9, 1.0], "masks": {"time": 3}}),
        ("--augment.speeds.1=2.0", "augment", {"speeds": [0.9, 2.0], "masks": {"time": 2}}),
        ("--ratio.numerator=4", "third", 4),
    ],
)
def test_an_override_takes_effect(path: Path, argument: str, key: str, expected: object) -> None:
    value = knobs(path, argument)[key]
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("--batch_secnds=3", "Did you mean `batch_seconds`?"),
        ("--augment.masks.tim=1", "Did you mean `augment.masks.time`?"),
        ("--augment.speeds.2=1", "has no such key under `augment.speeds`"),
        ("--numerator=1", "Did you mean `ratio.numerator`?"),
        ("--later.other=1", "add it in the YAML"),
        ("--ratio=3", "would replace the object of {path}:19"),
        ("--modules=3", "must be a mapping"),
        ("--modules.ratio=3", "would replace the object"),
        ("--also.numerator=3", "refers to <ratio>"),
        ("--batch_seconds=abc", "must be a number, as in {path}:3, not 'abc' (text)"),
        ("--seed=1.5", "must be a whole number"),
        ("--mixed=no", "must be true or false"),
        ("--language.x=1", "must be text"),
        ("--augment.speeds=1", "must be a list"),
        ("--augment.speeds=[a]", "a list of values that are each a number"),
    ],
)
def test_an_override_that_would_not_take_effect_is_refused(
    path: Path, argument: str, says: str
) -> None:
    assert says.format(path=path) in refusal(path, parse_overrides([argument]))


@pytest.mark.parametrize(
    ("yaml", "says"),
    [
        ("a: [1\nb: 2", ":2 is not valid YAML"),
        ("a: 1\na: 2", 'duplicate key "a"'),
        ("\ta: 1", "cannot start any token. Indent it with spaces."),
        ("- 1", "must consist of `key: value` lines"),
        ("", "its root is empty"),
        ("!include:other.yaml", "its root is !include:other.yaml"),
        ("a: !PLACEHOLDER\n", "`a: !PLACEHOLDER ` ({path}:1) needs a value. Pass --a=..."),
        ("size: 1\na: !ref <siz>", "there is no `siz`. Did you mean `size`?"),
        ("a: !ref size", "Write it in angle brackets: `!ref <key>`"),
        ("a: !ref <b>\nb: !ref <a>", "resolved later"),
        ("a: !new:fractions.Fraction\nb: !ref <a>/c", "is an object"),
        ("n: -1\nb: !ref <n> * 2", "stays the text '-1 * 2'"),
        ("n: 0\nb: !ref 1 / <n>", "division by zero"),
        ("a: (!!python/object/apply:os.getcwd [])", "is read as a tuple"),
        (
            "a: !new:fractions.Fractoin\n",
            "`a` ({path}:1) cannot be made of `fractions.Fractoin`",
        ),
        (
            "a: !new:nothere.Thing\n",
            "no such class as nothere.Thing. Correct it. A module of your own must lie beside",
        ),
        ("a: !new:os.getcwd\n", "should be a class"),
        ("a: !apply:fractions.Fraction\n", "should be a callable"),
        ("x: 1\na: !new:fractions.Fraction\n  numertor: 1\n", "`a` ({path}:2) cannot be made"),
        (
            "x: 1\na: !new:torch.optim.SGD\n  lr: 1\n",
            "Add them, or write `!name:` if the recipe",
        ),
        ("a: {b: !new:fractions.Fraction [x]}\n", "`a.b` ({path}:1)"),
        ("a: !new:fractions.Fraction [1, 0]\n", ": ZeroDivisionError:"),
        ("a: !new:fractions.Fraction\nb: !ref <a.nope>\n", "has no attribute 'nope'"),
    ],
)
def test_a_faulty_yaml_is_refused(tmp_path: Path, yaml: str, says: str) -> None:
    path = tmp_path / "ctc.yaml"
    path.write_text(yaml)
    assert says.format(path=path) in refusal(path, {})


def test_overrides_from_python_may_be_paths_but_not_objects(path: Path) -> None:
    assert read_knobs(path, {"output_folder": path.parent})["output_folder"] == str(path.parent)
    assert "`--limit` must be a plain value" in refusal(path, {"limit": object()})


def test_a_missing_file_names_the_nearest(path: Path) -> None:
    says = refusal(path.with_name("ctx.yaml"), {})
    assert "No such file" in says
    assert "ctc.yaml`?" in says
    assert refusal(path.with_name("other"), {}).endswith(
        "No such file or directory). Check its name."
    )


class TestInclude:
    """A file inside a file; its references name its own keys."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        (tmp_path / "deep.yaml").write_text("# sizes\n\nsize: 1\nhalf: !ref <size> / 2\n")
        (tmp_path / "inner.yaml").write_text(
            "# a model\nsize: 1\nmust: !PLACEHOLDER\ntwice: !ref <size> * 2\nmany: [1, 2]\n"
            "deep: !include:deep.yaml  # below\n    size: !ref <size>\n"
        )
        path = tmp_path / "outer.yaml"
        path.write_text(
            "seed: 4\ninner: !include:inner.yaml  # more\n  must: !ref <seed>\n"
            "seen: !ref <inner[twice]>\n"
        )
        return path

    def test_it_is_read_overridden_and_saved(self, path: Path) -> None:
        inner = {"size": 1, "must": 4, "twice": 2, "many": [1, 2], "deep": {"size": 1, "half": 0.5}}
        assert knobs(path)["inner"] == load_hparams(path, {})["inner"] == inner
        arguments = ("--inner.size=5", "--inner.must=3", "--inner.many.0=3", "--inner.deep.size=8")
        found = knobs(path, *arguments)
        inner = {"size": 5, "must": 3, "twice": 10, "many": [3, 2], "deep": {"size": 8, "half": 4}}
        assert found == {"seed": 4, "inner": inner, "seen": 10}
        saved = path.with_name("hyperparams.yaml")
        save_resolved(saved, path, parse_overrides(arguments))
        assert "!include" not in saved.read_text()
        assert read_knobs(saved, {}) == load_hparams(saved, {}) == found

    @pytest.mark.parametrize(
        ("argument", "says"),
        [
            ("--inner.sise=3", "Did you mean `inner.size`?"),
            ("--inner.size=abc", "`--inner.size` must be a whole number"),
            ("--inner=3", "must be a mapping"),
        ],
    )
    def test_a_wrong_override_is_refused(self, path: Path, argument: str, says: str) -> None:
        assert says in refusal(path, parse_overrides([argument]))

    @pytest.mark.parametrize(
        ("old", "new", "says"),
        [
            ("must: !ref", "mist: !ref", "'mist' not found in: ['size', 'must'"),
            ("  must: !ref <seed>\n", "", "`inner.must: !PLACEHOLDER ` ({inner}:3) needs a value"),
            ("inner.yaml", "none.yaml", "cannot be read"),
            ("inner[twice]", "inner[twise]", "Did you mean `twice`?"),
        ],
    )
    def test_a_wrong_file_is_refused(self, path: Path, old: str, new: str, says: str) -> None:
        path.write_text(path.read_text().replace(old, new))
        assert says.format(inner=path.with_name("inner.yaml")) in refusal(path, {})

    def test_a_failing_object_is_named_in_its_own_file(self, path: Path) -> None:
        inner = path.with_name("inner.yaml")
        inner.write_text(inner.read_text() + "bad: !new:fractions.Fraction [1, 0]\n")
        assert f"`inner.bad` ({inner}:8)" in refusal(path, {})


class TestBase:
    """A file over another one: values and tagged objects replace, plain mappings merge."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        (tmp_path / "bases").mkdir()
        (tmp_path / "bases/root.yaml").write_text(
            "# of two cores\nsize: 1  # in units\nfreeze: {A: always}\nkept: !ref <size> * 2\n"
            "masks: {time: 2, freq: 3}\nspeeds: [1.0]\nratio: !new:fractions.Fraction\n"
            "  numerator: 3\n  denominator: 4\nbare: !new:collections.Counter\n"
        )
        (tmp_path / "bases/middle.yaml").write_text("base: root.yaml\nspeeds: [0.9, 1.1]\n")
        path = tmp_path / "top.yaml"
        path.write_text(
            "# of eight GPUs\nbase: bases/middle.yaml\nunit: 5  # new\nsize: !ref <unit> + 1\n"
            "freeze: {B: always}\nmasks: {time: 7, tone: !ref <kept>}\n"
            "ratio:\n  denominator: !ref <size>\nlater: !ref <kept>\n"
        )
        return path

    def test_it_merges_and_prints_one_file_that_is_the_same(self, path: Path) -> None:
        assert read_knobs(path, {}) == {
            **{"unit": 5, "size": 6, "freeze": {"B": "always"}, "kept": 12, "later": 12},
            **{"masks": {"time": 7, "freq": 3, "tone": 12}, "speeds": [0.9, 1.1]},
        }
        assert load_hparams(path, {})["ratio"] == Fraction(3, 6)
        overrides = parse_overrides(["--unit=8", "--ratio.numerator=2", "--masks.tone=1"])
        printed = path.with_name("printed.yaml")
        printed.write_text(resolve(path, overrides).one_file)
        assert printed.read_text().startswith("# of eight GPUs\n")
        assert "\nunit: 8  # new\nsize: !ref <unit> + 1 # in units\n" in printed.read_text()
        values, same = RunConfig.of(path, overrides).values, RunConfig.of(printed, {}).values
        assert values == same

    @pytest.mark.parametrize(
        "yaml", sorted((ROOT / "hparams").glob("*.yaml")), ids=lambda f: f.stem
    )
    def test_every_yaml_prints_as_what_trains_the_same(self, yaml: Path, path: Path) -> None:
        path.write_text(resolve(yaml, {"data_folder": "x"}).one_file)
        here, there = (RunConfig.of(file, {"data_folder": "x"}).values for file in (path, yaml))
        assert here == there

    def test_a_change_of_the_base_takes_effect(self, path: Path) -> None:
        assert read_knobs(path, {})["speeds"] == [0.9, 1.1]
        (path.parent / "bases/middle.yaml").write_text("base: root.yaml\nspeeds: [3.0]\n")
        assert read_knobs(path, {})["speeds"] == [3.0]

    @pytest.mark.parametrize(
        ("file", "old", "new", "says"),
        [
            ("top", "denominator: !ref <size>", "denominator: 0", "`ratio` ({top}:7) cannot be"),
            ("top", "<kept>}", "<kelt>}", "`masks.tone: !ref <kelt>` ({top}:6) leads nowhere"),
            ("bases/root", "<size> * 2", "<sice>", "`kept: !ref <sice>` ({bases/root}:4) leads"),
            ("bases/root", "numerator: 3", "numerato: 3", "`ratio` ({top}:7) cannot be"),
            ("bases/middle", "root", "../top", "`base` ({bases/middle}:1) leads back"),
            ("bases/middle", "root", "roof", "roof.yaml cannot be read (No such file or"),
            ("top", "later: ", "bare: {a: 1}\nlater: ", "`bare` ({top}:9) has no tag, and"),
        ],
    )
    def test_an_error_names_the_file_and_the_line(
        self, path: Path, file: str, old: str, new: str, says: str
    ) -> None:
        files = {
            name: path.parent / f"{name}.yaml" for name in ("top", "bases/middle", "bases/root")
        }
        files[file].write_text(files[file].read_text().replace(old, new))
        for name, real in files.items():
            says = says.replace(f"{{{name}}}", str(real))
        assert says in refusal(path, {}).replace("bases/../", "")


def test_a_constructor_that_refuses_in_a_sentence_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "ctc.yaml"
    path.write_text("x: 1\na: !apply:sbkit.config.overrides.parse_overrides [[nonsense]]\n")
    says = refusal(path, {})
    assert says.startswith("`nonsense` is not of the form --key=value")
    assert says.endswith(f"(`a` ({path}:2))")


def test_ruamel_stays_as_it_was(path: Path) -> None:
    """HyperPyYAML teaches all of ruamel its tuples, and after a failure its deep constructors."""
    path.write_text(YAML + "bad: !new:fractions.Fraction [1, 0]\n")
    with clean_ruamel():  # of what other tests, SpeechBrain's recipes among them, left behind
        refusal(path, {})
        assert BaseConstructor.construct_object.__defaults__ == (False,)
        assert ruamel.yaml.YAML(typ="safe", pure=True).load("a: (1, 2)") == {"a": "(1, 2)"}


def test_manifests_of_several_splits_are_named_on_the_command_line(tmp_path: Path) -> None:
    arguments = ["--manifest", "train=a.csv", "--manifest=test-x=1", "--manifest", "train=b=c.tsv"]
    overrides = parse_overrides(arguments)
    assert overrides == {"manifest": {"train": ["a.csv", "b=c.tsv"], "test-x": "1"}}
    yaml = tmp_path / "a.yaml"
    yaml.write_text("manifest: null\n", encoding="utf-8")
    assert read_knobs(yaml, overrides)["manifest"] == overrides["manifest"]
    assert parse_overrides(["--manifest={test: a}"]) == {"manifest": {"test": "a"}}
    assert parse_overrides(["--manifest", "null"]) == {"manifest": None}


@pytest.mark.parametrize("text", ["a.csv", "train=", "=a.csv"])
def test_a_manifest_without_name_or_file_is_refused(text: str) -> None:
    with pytest.raises(SbkitError, match="needs NAME=FILE"):
        parse_overrides(["--manifest", text])


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("epochs", "number_of_epochs"),
        ("batch_size", "batch_seconds"),
        ("speedz", "speeds"),
        ("temperature", None),
        ("lm_weight", None),
    ],
)
def test_only_what_is_near_is_offered(word: str, meant: str | None) -> None:
    assert nearest(word, read_document(ROOT / "hparams/ctc.yaml").root) == meant


@pytest.mark.parametrize("arguments", [["-h"], ["a.yaml", "--help"]])
def test_help_is_printed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parse_command(arguments)
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith("usage: train.py FILE.yaml")
