"""Every command of every README runs, on a small corpus with a small model, in their order.

What a README shows of Python and YAML is used, too, and each path that it names is there.
"""

import ast
import csv
import json
import os
import re
import shlex
import subprocess
import sys
from difflib import unified_diff
from pathlib import Path

import pytest
import soundfile

from sbkit.base import errors
from sbkit.commands.cli import run as sbkit
from tests import processes
from tests.models.pretrained.folders import FRAMES, make_folder
from tests.runs import ROOT, TINY, make_workplace, rows_of, train_here

FOLDERS = (
    "",
    "recipes",
    "recipes/asr",
    "hparams",
    "sbkit/runtime",
    "sbkit/serve",
    "sbkit/train",
    "tools",
)
CORPORA = ("AsteriskPrompts", "CommonVoice", "FestvoxRu", "LibriSpeech", "OwnData")
READMES = tuple(
    ROOT / folder / "README.md"
    for folder in (
        *FOLDERS,
        "recipes/classification",
        "recipes/vad",
        "recipes/codec",
        "recipes/synthesis",
        *(f"recipes/{each}" for each in CORPORA),
    )
)
ELSEWHERE = (  # commands that other tests run: how they begin
    *("tools/demo", "tools/test", "tools/launch/one_node.sh", "tools/launch/several_nodes.sh"),
    *(
        "sbatch ",
        "python -m recipes.AsteriskPrompts.corpus",
        "python -m recipes.FestvoxRu.corpus",
    ),
    "torchrun train.py hparams/ctc.yaml --corpus=recipes.FestvoxRu.corpus",
    "torchrun train.py hparams/tts.yaml --corpus=recipes.FestvoxRu.corpus",
    *("torchrun train.py hparams/vad.yaml", "python -m tools.bench_vad"),
    *("pip install ", "sbkit transcribe my-model talk.mp3 --vad"),
    "torchrun train.py hparams/ctc.yaml --data_folder=/data/LibriSpeech",
    *("python -m tools.bench_times", "python -m tools.show row", "python -m tools.bench_train"),
    "python -m tools.mutate",
    *("python -m tools.bench_gpu", "python -m tools.bench_transcribe"),
    *("python -m tools.bench_live", "python -m tools.bench_codec", "python -m tools.talk"),
    "python -m tools.bench_synthesis",
    "torchrun train.py hparams/tts.yaml --symbols=phonemes",
    *("sbkit serve my-model", "curl http://127.0.0.1:8000/", "python -m tools.bench_serve"),
    *("sbkit transcribe --runtime onnx", "sbkit score RUN", "sbkit tune RUN", "sbkit cache"),
    *("sbkit prepare YAML --shards", "sbkit export RUN", "sbkit classify "),
)
# What a machine without GPUs and without these corpora puts in place of the README's words.
HERE = {"--nproc_per_node=8": "--nproc_per_node=2", "--language=fr": "--language=en"}
HERE |= {"--language=it": "--language=en", "--language=[fr]": "--language=[en]"}
HERE |= {"results/ctc_pretrained/it/3407": "results/asr_pretrained"}
HERE |= {"results/codec/en/3407": "results/codec"}
HERE |= {"results/tts/en/3407": "results/synthesis"}
HERE |= {"onnx,sherpa-onnx,huggingface": "hub"}  # test_huggingface.py writes those
# The test's release has one language, so language_id.yaml is to tell another column.
SMALL = ("--device=cpu", "--language=[en]", "--label=gender", "--d_model=16", "--nhead=2")
ENGLISH = (*TINY, "--language=en")
OWN_SIZES = {  # of the YAMLs that lack knobs of ctc.yaml
    "hparams/language_id.yaml": SMALL,
    "hparams/codec.yaml": ("--device=cpu", "--d_model=16", "--d_ffn=32"),
    "hparams/tts.yaml": ("--device=cpu", "--d_model=16", "--d_ffn=32", "--d_align=16"),
    "hparams/ctc_pretrained.yaml": (
        "--device=cpu",
        "--batch_seconds=6",
        "--word_lm_order=0",
        "--token_lm_order=0",
    ),
}
FORMS = ("torchrun --standalone train.py ...", "torchrun --nproc_per_node=8 train.py ...")
COMMAND = re.compile(r"(torchrun|python|sbkit|sbatch|tools/(demo|test|launch/\w+\.sh))( |$)")


def blocks(text: str, language: str) -> list[str]:
    """Return the code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def commands(readme: Path) -> list[str]:
    """Return the lines of the shell blocks of a README."""
    return [line for block in blocks(readme.read_text("utf-8"), "sh") for line in block.split("\n")]


@pytest.fixture(scope="module")
def data(asterisk_english: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a small release of Common Voice."""
    folder = tmp_path_factory.mktemp("data")
    release = make_workplace(asterisk_english, folder).release
    for table in release.glob("*.tsv"):
        rows = [
            {**row, "client_id": "ab"[n % 2], "gender": ("female", "male")[n % 2]}
            for n, row in enumerate(rows_of(table))
        ]
        with table.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter="\t", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    return folder


@pytest.fixture(scope="module")
def workplace(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder that looks like a checkout, with recordings and tables in it."""
    tmp_path = tmp_path_factory.mktemp("checkout")
    for name in ("train.py", "hparams", "recipes", "sbkit", "tools"):
        (tmp_path / name).symlink_to(ROOT / name)
    clips = data / "release/clips"
    audio, rate = soundfile.read(min(clips.iterdir()))
    soundfile.write(tmp_path / "talk.mp3", audio, rate)
    soundfile.write(tmp_path / "call.wav", audio, rate)
    make_folder(tmp_path / "FOLDER", **FRAMES)
    (tmp_path / "talks.txt").write_text("Good evening.\nIt is a pleasure to be here.\n")
    for split in ("train", "dev", "test"):
        rows = rows_of(data / f"release/{split}.tsv")
        for row in rows:
            row["path"] = str(clips / row["path"])
        lines = [json.dumps(row) for row in rows]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
        for suffix, mark in (("csv", ","), ("tsv", "\t")):
            with (tmp_path / f"{split}.{suffix}").open("w", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]), delimiter=mark)
                writer.writeheader()
                writer.writerows(rows)
    return tmp_path


@pytest.fixture
def checkout(workplace: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Go to that folder."""
    monkeypatch.chdir(workplace)
    monkeypatch.setenv("SBKIT_CACHE", str(data / "cache"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    return workplace


def adapt(command: str, data: Path) -> list[str]:
    """Make a README command small enough to run here; its words and their order stay."""
    words = [HERE.get(word, word) for word in shlex.split(command)]
    words = [re.sub(r"=/data/cv\S+", f"={data / 'release'}", word) for word in words]
    if {"train.py", "check"} & {*words}:
        own = {word.split("=")[0] for word in words}
        sizes = next((OWN_SIZES[word] for word in words if word in OWN_SIZES), ENGLISH)
        options = [*sizes, "--number_of_epochs=1"]
        if "--manifest" not in words:
            options.append(f"--data_folder={data / 'release'}")
        if "hparams/ctc_large.yaml" in words:
            options += ["--vocab_size=45", "--num_decoder_layers=1"]
        words += [option for option in options if option.split("=")[0] not in own]
    if words[1] == "tune" and "--word-lm-order" not in words:
        # The run here has no language models, and an attention decoder that was trained.
        words += ["--word-lm-order=2", "--no-attention-rescoring"]
    return words


def execute(words: list[str]) -> int:
    """Run a command in this process, which spares its imports, unless it starts several.

    These are forked: how torchrun starts them is for test_run.py and test_launch.py.
    """
    if words[0] == "sbkit":
        return sbkit(words[1:])
    start = words.index("train.py")
    if start > 1:
        (ranks,) = [int(word.removeprefix("--nproc_per_node=")) for word in words[1:start]]
        return processes.run(words[start:], ranks=ranks, cwd=Path.cwd()).returncode
    return train_here(words[start:], Path(os.environ["SBKIT_CACHE"]))


def run_commands(readme: Path, data: Path, done: set[frozenset[str]]) -> None:
    """Run the commands of a README in their order, a training once on all pages."""
    for command in filter(None, commands(readme)):
        if not command.startswith(ELSEWHERE):
            # `check` notes that a corpus this small does not fill eight GPUs.
            expected = (0, 1) if " check " in command else (0,)
            words = adapt(command, data)
            what = frozenset(each for each in words if not each.startswith("--output_folder="))
            if "train.py" in words and what in done:
                continue
            done.add(what)
            if "train.py" in words and readme != READMES[0] and "--output_folder" not in command:
                base = "_pretrained" if "hparams/ctc_pretrained.yaml" in words else ""
                words.append(f"--output_folder=results/{readme.parent.name}{base}")
            assert execute(words) in expected, command


@pytest.fixture(scope="module")
def done() -> set[frozenset[str]]:
    """What was run, each as its words."""
    return set()


@pytest.fixture
def trained(checkout: Path, data: Path, done: set[frozenset[str]]) -> Path:
    """Run the commands of README.md, whose run and bundle the others take."""
    if not done:
        run_commands(READMES[0], data, done)
    return checkout


@pytest.mark.slow
@pytest.mark.parametrize("readme", READMES[1:], ids=lambda readme: readme.parent.name)
def test_commands_run_in_order(
    readme: Path,
    trained: Path,
    data: Path,
    done: set[frozenset[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_commands(readme, data, done)
    if readme.parent.name == "inference":
        assert (trained / "subtitles/talk.vtt").read_text("utf-8").startswith("WEBVTT")
        capsys.readouterr()
        exec(blocks(readme.read_text("utf-8"), "python")[0], {})
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines[1:5:2]] == ["talk.mp3", "call.wav"]
        assert [line.split()[0] for line in lines[5:7]] == ["talk.mp3", "call.wav"]
        assert lines[7:] == ["gone.wav failed"]


@pytest.mark.slow
def test_parts_recipe_and_noise_of_readme_train(checkout: Path, data: Path) -> None:
    text = READMES[0].read_text("utf-8")
    (model,), (recipe,) = blocks(text, "yaml"), blocks(text, "python")
    for block in model.split("\n\n"):
        assert block.strip() in (ROOT / "hparams/ctc.yaml").read_text("utf-8")
    text = (ROOT / "hparams/README.md").read_text("utf-8")
    (variant, *schedules, cycle, noise), (part,) = blocks(text, "yaml"), blocks(text, "python")
    (brain,) = blocks((ROOT / "sbkit/train/README.md").read_text("utf-8"), "python")
    ast.parse(brain)
    (checkout / "my_models.py").write_text(part)
    (checkout / "my_recipe.py").write_text(recipe)
    yaml = (ROOT / "tests/user_parts/encoder.yaml").read_text("utf-8")
    yaml = yaml.replace("recipes.asr.recipe.ASR", "my_recipe.MINE")
    yaml = re.sub(r"(?m)^warmup_fraction:.*\n", "", yaml)
    noise = noise.replace("/data/musan/noise", str(data / "release/clips"))
    (schedule,) = re.findall(r"^lr_schedule:.*\n(?: .*\n)*", yaml, re.MULTILINE)
    (checkout / "mine.yaml").write_text(f"{yaml.replace(schedule, '')}\n{cycle}\n{noise}")
    options = ["--device=cpu", "--d_model=16", "--batch_seconds=6", "--number_of_epochs=1"]
    options.append("--output_folder=results/mine")
    folder = f"--data_folder={data / 'release'}"
    (checkout / "deep.yaml").write_text(variant.replace("ctc.yaml", "hparams/ctc.yaml"))
    assert execute(["sbkit", "check", "deep.yaml", folder, *options]) == 0
    for each in schedules:
        (checkout / "scheduled.yaml").write_text(yaml.replace(schedule, each))
        assert execute(["sbkit", "check", "scheduled.yaml", folder, *options]) == 0
    assert execute(["python", "train.py", "mine.yaml", folder, *options]) == 0


def test_pages_show_files_that_tests_train() -> None:
    here, text = ROOT / "tests/user_parts", (ROOT / "hparams/README.md").read_text("utf-8")
    before, after = (
        file.read_text("utf-8").splitlines()
        for file in (ROOT / "hparams/ctc.yaml", here / "encoder.yaml")
    )
    changes = [*unified_diff(before, after, n=0, lineterm="")][2:]
    assert blocks(text, "diff") == ["".join(f"{x}\n" for x in changes if x[:2] != "@@")]
    assert blocks(text, "python") == [(here / "my_models.py").read_text("utf-8")]
    (task,) = blocks((ROOT / "recipes/OWN_TASK.md").read_text("utf-8"), "python")
    assert task in (ROOT / "tests/autoencoder/autoencoder.py").read_text("utf-8")
    assert blocks(READMES[0].read_text("utf-8"), "python") == [
        (here / "my_recipe.py").read_text("utf-8")
    ]


@pytest.mark.parametrize("readme", READMES, ids=lambda readme: readme.parent.name)
def test_every_command_is_run_or_names_its_test(readme: Path) -> None:
    text = readme.read_text("utf-8")
    fences = re.findall(r"^```(.*)$", text, re.MULTILINE)
    assert {*fences[::2]} <= {"sh", "yaml", "python", "diff"}
    known = {*commands(readme), *FORMS}
    indented = re.findall(r"^ {4}(.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.M)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    whole = [each for each in (*indented, *inline) if not re.fullmatch(r"sbkit \w+", each)]
    named = [each for each in whole if COMMAND.match(each) and " " in each]
    assert not [each for each in named if each not in known and not each.startswith(ELSEWHERE)]
    ran = re.compile(r"(torchrun|python)( --\S+)* train\.py hparams/|sbkit \w+ ")
    assert not [
        each
        for each in commands(readme)
        if each and not each.startswith(ELSEWHERE) and not ran.match(each)
    ]


@pytest.mark.parametrize("tool", ["demo", "test", "launch/one_node.sh", "launch/several_nodes.sh"])
def test_tools_exist_and_are_executable(tool: str) -> None:
    assert os.access(ROOT / "tools" / tool, os.X_OK)
    subprocess.run(["bash", "-n", ROOT / "tools" / tool], check=True)


def test_table_has_every_exit_code() -> None:
    text = (ROOT / "sbkit/train/README.md").read_text("utf-8").split("| exit code |")[1]
    codes = {code for code in vars(errors).values() if isinstance(code, int)}
    assert {*map(int, re.findall(r"^\| (\d+) \|", text, re.MULTILINE))} == {0, *codes}


def test_every_named_path_exists() -> None:
    text = "".join(readme.read_text(encoding="utf-8") for readme in READMES)
    paths = set(re.findall(r"`((?:sbkit|recipes|hparams|tests|tools)/[\w./-]+)`", text))
    assert len(paths) > 20
    assert not sorted(path for path in paths if not (ROOT / path).exists())


def knobs_of(name: str) -> dict[str, str]:
    """Return the keys above the objects of a YAML, with their defaults as they are written."""
    text = (ROOT / f"hparams/{name}.yaml").read_text("utf-8").split("# ====")[0]
    return dict(re.findall(r"^(\w+): (?:!ref )?(.*?)(?:\s+# .*)?$", text, re.MULTILINE))


def rows_of_page(page: str) -> dict[str, str]:
    """Return the keys of a page's table with their defaults."""
    text = (ROOT / "hparams" / page).read_text("utf-8").split("\n## Parts")[0]
    return dict(re.findall(r"^\| `(\w+)` \| `(.*?)`", text, re.MULTILINE))


def test_readme_has_every_yaml_key_with_its_default() -> None:
    declared: dict[str, str] = {}
    shared = ("ctc", "ctc_streaming", "ctc_large", "ctc_speechbrain")
    for name in (*shared, "language_id", "vad", "codec", "tts"):
        declared = knobs_of(name) | declared
    assert rows_of_page("README.md") == declared
    plain, pretrained = knobs_of("ctc"), knobs_of("ctc_pretrained")
    own = {key: value for key, value in pretrained.items() if plain.get(key) != value}
    assert rows_of_page("ctc_pretrained.md") == own
