"""Foreign YAML is code: what it would run is refused, and reading it touches nothing."""

import json
import sys
from functools import wraps
from pathlib import Path

import pytest
import torch
import torch._dynamo
from hyperpyyaml import load_hyperpyyaml

from sbkit.base.errors import SbkitError
from sbkit.check.yaml.untrusted import check_untrusted
from sbkit.cli import run
from sbkit.config.allowed import refusal
from sbkit.config.build import clean_ruamel
from sbkit.config.document import read_document
from tests.runs import ROOT

# CANARY is a folder that the payload would make: the text, and what must be told of its last line.
LIVE = [
    ("x: !apply:os.mkdir [CANARY]", "posix.mkdir"),
    ("x: !apply:speechbrain.core.os.mkdir [CANARY]", "posix.mkdir"),
    ("x: !applyref:os.mkdir [CANARY]", "list of tags"),
    ("x: !!python/object/apply:os.mkdir [CANARY]", "list of tags"),
    ("x: !<tag:yaml.org,2002:python/object/apply:os.mkdir> [CANARY]", "list of tags"),
    ("%TAG !e! tag:yaml.org,2002:python/object/\n---\nx: !e!apply:os.mkdir [CANARY]", "list"),
    ("x: !apply:os%2Emkdir [CANARY]", "posix.mkdir"),
    ("x: (!!python/object/apply:os.mkdir ['CANARY'])", "tuple with !!python/object/apply"),
    ("x: !tuple '<!!python/object/apply:os.mkdir [CANARY]>'", "in parentheses"),
    ("a: '!!python/object/apply:os.mkdir [CANARY]'\nx: !ref (<a>)", "tuple with"),
    ("a: '!!python/object/apply:os.mkdir [CANARY]'\nx: !ref \"'(<a>)'\"", "quoted text"),
    ("x: !ref \"'(\\\\x21!python/object/apply:os.mkdir [CANARY])<a>'\"\na: ''", "quoted text"),
    (
        "a: &a {k: b}\nm:\n  <<: *a\n  k: '!!python/object/apply:os.mkdir [CANARY]'\n"
        "x: !ref (<m[k]>)",
        "tuple with",
    ),
    ("a: &a !apply:os.mkdir [CANARY]\nb: *a", "posix.mkdir"),
    ("a: &a {k: !apply:os.mkdir [CANARY]}\nb:\n  <<: *a", "posix.mkdir"),
]
# What HyperPyYAML puts into a text is `str(value)`, not what stands in the file: None for null, 17
# for 017. Each of these came to a tuple that runs a command, and was called harmless.
SPELLINGS = ["", "~", "null", "017", "08", "0_1", "1__0", "0o17", "1e3", ">-\n  1", "!ref <z>"]
LIVE += [
    (
        f"z:\nx: {spelling}\nm: !ref \"'(!!python/object/apply:os.mkdir [CANARY])%.0s' % <x>\"",
        "quoted text",
    )
    for spelling in SPELLINGS
]
LIVE += [
    (
        "x:\nm: !new:torch.nn.Identity\n"
        "  - !ref \"'(!!python/object/apply:os.mkdir [CANARY])%.0s' % <x>\"",
        "quoted text",
    ),
    (
        "x: 1\nm: !ref >-\n  '(!!python/object/apply:os.mkdir [CANARY])%.0s'\n  % <x>",
        "quoted text",
    ),
]
REFUSED = [
    ("x: [1, {y: '(!!python/object/apply:os.mkdir [CANARY])'}]", "tuple with"),
    ("x:\n  (!!python/object/apply:os.mkdir [CANARY]): 1", "tuple with"),
    ("x: !apply:torch.nn.modules.module.warnings.sys.modules [CANARY]", "no class or function"),
    ("x: !new:subprocess.Popen\n  args: [mkdir, CANARY]", "subprocess.Popen"),
    ("x: !new:torch.hub.subprocess.Popen\n  args: [mkdir, CANARY]", "on the list"),
    (
        "f: !name:os.mkdir [CANARY]\nx: !new:speechbrain.nnet.containers.Sequential\n  f: !ref <f>",
        "posix.mkdir",
    ),
    ("x: !module:os", "list of tags"),
    ("x: !name:torch.load", "torch.serialization.load"),
    ("x: !name:builtins.eval", "builtins.eval"),
    ("x: !name:eval", "builtins.eval"),
    ("x: !name:torch.nn.functional.torch.load", "torch.serialization.load"),
    ("x: !name:torch.nn.modules.linear.Linear.__init__.__globals__", "no class or function"),
    ("x: !name:torch.nn.modules.linear.__builtins__.eval", "names nothing"),
    ("x: !new:transformers.Pipeline", "names nothing"),
    ("x: !new:torch.nn.modules", "no class or function"),
    ("x: !new:speechbrain.inference.ASR.EncoderASR", "on the list"),
    ("x: !new:speechbrain.augment.time_domain.AddNoise\n  csv_file: a.csv", "AddNoise"),
    ("x: !!python/name:os.system", "list of tags"),
    ("x: !unknown 1", "list of tags"),
    ("a: !new:torch.nn.Linear [1, 1]\nx: !ref <a.__class__>", "no data"),
    ("a: !new:torch.nn.Linear [1, 1]\nx: !ref <a.register_forward_hook>", "no data"),
    ("a: !name:torch.nn.GELU\nx: !ref <a.func>", "no data"),
    ("a: 9\nx: !ref <a> ** <a> ** <a>", "power"),
    ("a: 9\nx: !ref \"'x' * <a>\"", "quoted text"),
    ("a: 1\nx: !ref <b> <a>", "`b`, which is not there"),
    ("x: !ref <x> 1", "refers to itself"),
    ("a: [1]\nx: !ref (<a>)", "puts an object or a list into a text"),
    ("a: &a [1, *a]", "contains itself"),
    ("a: &a\n  b: !ref <a>", "contains itself"),
    ("x: (a, [)", "tuple that cannot be read"),
    ("x:\na: !ref <x>**9**9**9", "power"),
    ("x: 9\na: !ref <x> * * <x>", "power"),
    (f"x: {'9' * 5000}", "5000 digits"),
    (f"x: {'9' * 5000}\ny: !ref a<x>", "cannot be read"),
    ("x: !include:/etc/passwd", "leaves the folder"),
    ("x: !include:../other.yaml", "leaves the folder"),
    ("x: !include:link.yaml", "leaves the folder"),
    ("x: !include:gone.yaml", "cannot be followed"),
    ("t: &t !new:torch.nn.Linear [1, 1]\nx: !apply:getattr [*t, register_forward_hook]", "no data"),
    ("x: !apply:getattr [a, b]", "no data"),
    ("x: !apply:getattr {a: b}", "other arguments"),
    ("x: !new:torch.nn.ParameterDict", "ParameterDict, which is not on the list"),
    ("x: !name:torch.nn.Module._apply", "not on the list"),
]
FINE = [
    "x: (1, 2.5, a)",
    "a: 4\nb: c\nx: !ref results/<b>/<a>.txt\ny: !ref <a> // 2 * (<a> + 1) % 3 - -1",
    "x: !apply:torch.manual_seed [1]",
    "x: !name:torch.nn.functional.gelu",
    "x: !name:speechbrain.nnet.losses.ctc_loss {blank_index: 0}",
    "a: &a {b: 1}\nc:\n  <<: *a",
    "x: !new:torch.nn.Linear [1, 1]\ny: !ref <x.in_features>\nz: !copy <x>",
    "x: !PLACEHOLDER",
    "x: 2020-01-01\ny: (c) someone",
    "t: &t !new:sbkit.text.tokenizer.Tokenizer {model_file: a}\nx: !apply:getattr [*t, vocab_size]",
    "x:\ny: !ref results/<x>\nz: 017\nw: !ref <z> + 1",
    "x: !new:sentencepiece.SentencePieceProcessor\n"
    "y: !name:speechbrain.utils.Accuracy.AccuracyStats\n"
    "z: !name:speechbrain.utils.metric_stats.MetricStats\n"
    "w: !name:speechbrain.decoders.scorer.ScorerBuilder",
]


def written(folder: Path, text: str) -> Path:
    file = folder / "foreign.yaml"
    file.write_text(text.replace("CANARY", str(folder / "canary")), encoding="utf-8")
    return file


@pytest.mark.parametrize(("text", "words"), [*LIVE, *REFUSED], ids=lambda value: value[:40])
def test_what_would_run_is_refused_with_tag_and_line(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "link.yaml").symlink_to("/etc/passwd")
    findings = check_untrusted(written(tmp_path, text))
    assert any(words in each.effect for each in findings), findings
    assert not (tmp_path / "canary").exists()
    lines = {int(each.where.rpartition(":")[2]) for each in findings}
    assert all(each.where.startswith(str(tmp_path / "foreign.yaml")) for each in findings)
    assert lines <= set(range(1, text.count("\n") + 2))


@pytest.mark.parametrize("text", [text for text, _ in LIVE], ids=lambda value: value[:40])
def test_the_payloads_are_real(tmp_path: Path, text: str) -> None:
    with clean_ruamel():
        load_hyperpyyaml(written(tmp_path, text).read_text())
    assert (tmp_path / "canary").exists()


@pytest.mark.parametrize("text", FINE)
def test_a_description_passes(tmp_path: Path, text: str) -> None:
    assert check_untrusted(written(tmp_path, text)) == []


@pytest.mark.parametrize(
    "file", sorted((ROOT / "hparams").glob("*.yaml")), ids=lambda file: file.name
)
def test_our_own_pass(file: Path) -> None:
    assert check_untrusted(file) == []


def test_an_include_is_read_as_data_with_what_stands_beside_it(tmp_path: Path) -> None:
    (tmp_path / "inner.yaml").write_text("a: b\nx: !ref (<a>)\ny: !name:os.remove\n")
    payload = "'!!python/object/apply:os.mkdir [CANARY]'"
    outer = written(tmp_path, f"inner: !include:inner.yaml\n  a: {payload}\n")
    found = {each.where: each.effect for each in check_untrusted(outer)}
    assert set(found) == {f"{tmp_path}/inner.yaml:2", f"{tmp_path}/inner.yaml:3"}
    assert "tuple with" in found[f"{tmp_path}/inner.yaml:2"]
    assert "posix.remove" in found[f"{tmp_path}/inner.yaml:3"]


def test_an_include_of_a_link_to_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    outer = written(tmp_path, "x: !include:loop.yaml")
    [finding] = check_untrusted(outer)
    assert "loop.yaml is a symbolic link" in finding.effect
    with pytest.raises(SbkitError, match=r"must be readable, but .*loop\.yaml is not"):
        list(read_document(outer).family())


def test_an_include_that_turns_in_a_circle_is_refused(tmp_path: Path) -> None:
    (tmp_path / "inner.yaml").write_text("x: !include:foreign.yaml\n")
    [finding] = check_untrusted(written(tmp_path, "x: !include:inner.yaml"))
    assert "includes itself" in finding.effect


def test_a_finding_cannot_be_forged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cleared = "\\e[2J\\e[H\\e[0mNothing found.\\e[8m"
    text = f'a: "(!!python/name:os.system [] {cleared})"\nb: "(!!x [\u202e])"'
    assert run(["check", "--untrusted", str(written(tmp_path, text))]) == 1
    out = capsys.readouterr().out
    assert "\\x1b[2J" in out
    assert not {"\x1b", "\u202e"} & set(out)


def test_a_clean_file_says_what_it_may_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["check", "--untrusted", str(written(tmp_path, "lr: 0.1"))]) == 0
    assert "A Checkpointer in it makes its folder" in capsys.readouterr().out


def bombs() -> list[tuple[str, str]]:
    levels = range(1, 40)
    aliases = "\n".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in levels)
    copies = "\n".join(f"a{n}: [!copy <a{n - 1}>, !copy <a{n - 1}>]" for n in levels)
    texts = "\n".join(f"a{n}: !ref <a{n - 1}><a{n - 1}>" for n in levels)
    return [
        (f"a0: &a0 [x]\n{aliases}", "nodes"),
        (f"a0: [x]\n{copies}", "nodes"),
        (f"a0: ''\n{texts}", "characters"),
    ]


@pytest.mark.timeout(20)
@pytest.mark.parametrize(("text", "words"), bombs(), ids=["aliases", "copies", "texts"])
def test_a_bomb_is_refused_at_once(tmp_path: Path, text: str, words: str) -> None:
    findings = check_untrusted(written(tmp_path, text))
    assert findings
    assert all(words in each.effect for each in findings)


UNREADABLE = [
    (b"\xff\xfea: 1", "no UTF-8 text"),
    (b"x: " + b"[" * 5000, "50 levels deep"),
    (b"x: " + b"a" * 300_000, "262144 bytes"),
    (b"x: [1", "valid YAML"),
    (b"a: 1\n---\nb: 2", "valid YAML"),
    (b"", "is empty"),
]


@pytest.mark.timeout(20)
@pytest.mark.parametrize(("content", "words"), UNREADABLE, ids=lambda value: repr(value)[:20])
def test_what_cannot_be_read_is_said(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "foreign.yaml"
    file.write_bytes(content)
    with pytest.raises(SbkitError, match=words):
        check_untrusted(file)


def test_a_device_is_not_read() -> None:
    with pytest.raises(SbkitError, match="must be a file"):
        check_untrusted(Path("/dev/zero"))


def test_a_name_of_a_foreign_module_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "foreign_part.py").write_text("raise SystemExit('imported')")
    sys.path.insert(0, str(tmp_path))
    try:
        assert refusal("!new", "foreign_part.Thing") == "names nothing on the list"
        assert refusal("!new", "torch.utils.bottleneck.__main__.main") is not None
    finally:
        sys.path.remove(str(tmp_path))
    assert not {"foreign_part", "torch.utils.bottleneck.__main__"} & set(sys.modules)


def test_what_torch_wraps_is_still_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "manual_seed", torch._dynamo.disable(torch.random.manual_seed))
    assert refusal("!apply", "torch.manual_seed") is None
    monkeypatch.setattr(torch, "manual_seed", wraps(torch.random.manual_seed)(lambda seed: seed))
    assert refusal("!apply", "torch.manual_seed") is not None


def test_a_class_that_lies_about_its_home_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    home = sys.modules[torch.nn.Linear.__module__]
    names = {"__module__": home.__name__, "__qualname__": "Linear"}
    liar = type("Linear", (torch.nn.Module,), names)
    monkeypatch.setattr(home, "Liar", liar, raising=False)
    assert refusal("!new", "torch.nn.modules.linear.Liar") is not None
    assert refusal("!new", "torch.nn.modules.linear.Linear") is None


def test_the_command_answers_with_its_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign = written(tmp_path, "y: 1\nx: !apply:os.mkdir [CANARY]")
    assert run(["check", "--untrusted", "--json", str(foreign)]) == 1
    [finding] = json.loads(capsys.readouterr().out)["findings"]
    assert (finding["where"], finding["severity"]) == (f"{foreign}:2", "error")
    assert run(["check", "--untrusted", str(ROOT / "hparams" / "ctc.yaml")]) == 0
    with pytest.raises(SbkitError, match="a file alone"):
        run(["check", "--untrusted", str(foreign), "--x=1"])
    with pytest.raises(SbkitError, match="with a file alone, but --target came"):
        run(["check", "--untrusted", str(foreign), "--target=cuda:8"])
