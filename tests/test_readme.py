"""The commands, Python and YAML of all READMEs and pages of docs/ run in order, on a small corpus.

The models are small, too. Every path that a page names exists. tests/test_docs.py checks the form
of the pages.
"""

import ast
import csv
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import datasets
import nbformat
import pytest
import soundfile
from nbclient import NotebookClient

from sbkit.base import errors
from sbkit.commands.cli import run as sbkit
from tests import processes
from tests.models.pretrained.folders import FRAMES, make_folder
from tests.models.pretrained.recognizers import make_whisper
from tests.runs import ROOT, TINY, make_workplace, rows_of, train_here

RECIPES = ("AsteriskPrompts", "CommonVoice", "FestvoxRu")
FOLDERS = ("", "recipes", "hparams", "sbkit/runtime", "sbkit/serve", "sbkit/train")
FOLDERS += ("tools", *(f"recipes/{name}" for name in RECIPES))
# docs/guide/decoding.md gives the run of README.md another decoder: a beginner comes before that.
DOCS = sorted((ROOT / "docs/start").glob("*.md"))
DOCS += sorted(
    file for file in (ROOT / "docs").rglob("*.md") if file.parent.name not in ("start", "reference")
)
GUIDE = ROOT / "docs/guide"
READMES = (*(ROOT / folder / "README.md" for folder in FOLDERS), *DOCS)
# Commands of sbkit are run, others are not: these programs, and files of this repository.
PROGRAMS = {
    *("cp", "cd", "chmod", "source", "export", "python3", "pip", "docker", "sbatch", "curl"),
    *("mkdocs", "ct2-transformers-converter", "hf", "lhotse"),
    *("/srv/lab/env/bin/python", "/srv/lab/env/bin/pip"),
}
# The beginnings of commands that have tests of their own, or need a GPU, a network or other data.
NOT_RUN_HERE = (
    "sbkit --version",
    "python train.py hparams/ctc.yaml --corpus=recipes.FestvoxRu.corpus",
    "python train.py hparams/ctc.yaml --data_folder=/data/LibriSpeech",
    "python train.py hparams/ctc.yaml --data_folder=manifests",
    *("python train.py hparams/ctc.yaml --data_folder=/data/elan", "sbkit score results/elan"),
    *(
        *("sbkit new my-project", "sbkit new course", "sbkit new lab"),
        "sbkit serve my-",
        "sbkit serve first-model",
        "sbkit transcribe --runtime onnx",
    ),
    *("python train.py language_id.yaml", "sbkit export results/language_id"),
    *("python train.py transducer.yaml", "sbkit export results/transducer", "sbkit score my-trans"),
    *("sbkit transcribe my-transducer", "sbkit serve my-transducer"),  # test_transducer.py does
    "python train.py docs/examples/masked_prediction",
    *("sbkit score my-identifier", "sbkit run my-identifier", "sbkit segment chapter.mp3"),
    "sbkit transcribe my-formats talk.mp3 --runtime onnx",
    "python train.py hparams/ctc.yaml --manifest train=train.csv --manifest train=pseudo.csv",
    *("sbkit transcribe my-model talk.mp3 --vad", "sbkit cache"),
    "sbkit score RUN",
    "sbkit score my-model test.csv --normalizer whisper-english",
    *("sbkit tune RUN", "sbkit export RUN", "sbkit prepare YAML --out", "sbkit prepare --out"),
    "sbkit prepare YAML --again",
)
# For a machine without GPUs, and without these corpora.
REPLACED_WORDS = {
    "--nproc_per_node=8": "--nproc_per_node=2",
    "--language=fr": "--language=en",
    "--language=it": "--language=en",
    "results/small": "results/ctc/en/3407",
    "/srv/lab/corpus": "lab-corpus",
    "--data_folder=/srv/lab/corpus": "--data_folder=lab-corpus",
    "onnx,sherpa-onnx": "",  # tests/export writes those
    "onnx,huggingface": "",  # test_huggingface.py writes those
}
TINY_ENGLISH = (*TINY, "--language=en")
MOVED_YAML = "conformer.yaml"  # of docs/start/from-speechbrain.md
SIZES_BY_YAML = {  # for YAMLs that lack keys of ctc.yaml
    "hparams/vad.yaml": ("--device=cpu", "--batch_seconds=6"),
    "mine.yaml": ("--device=cpu", "--d_model=16", "--batch_seconds=6", "--language=en"),
    "hparams/codec.yaml": ("--device=cpu", "--d_model=16", "--d_ffn=32"),
    "hparams/tts.yaml": ("--device=cpu", "--d_model=16", "--d_ffn=32", "--d_align=16"),
    MOVED_YAML: (*TINY_ENGLISH, "--vocab_size=45", "--grad_accumulation_factor=1"),
    **dict.fromkeys(
        ("hparams/ctc_pretrained.yaml", "hparams/ctc_whisper.yaml", "hparams/whisper.yaml"),
        ("--device=cpu", "--batch_seconds=6", "--word_lm_order=0", "--token_lm_order=0"),
    ),
}
FORMS = ("torchrun train.py hparams/ctc.yaml",)
OF_SBKIT = re.compile(r"sbkit |(torchrun|python)( --\S+)* train\.py ")
COMMAND = re.compile(
    r"(torchrun|python|sbkit|sbatch|tools/(demo|test|offline|launch/\w+\.sh))( |$)"
)


def name_of(page: Path) -> str:
    """Return the folder of a README, or the path of a page without its suffix."""
    is_readme = page.name == "README.md"
    return page.parent.name if is_readme else str(page.relative_to(ROOT).with_suffix(""))


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def commands(readme: Path) -> list[str]:
    return [line for block in blocks(readme.read_text("utf-8"), "sh") for line in block.split("\n")]


def is_excused(command: str) -> bool:
    """Return whether a command is not run here: of sbkit if it is listed, others if they exist."""
    if OF_SBKIT.match(command):
        return command.startswith(NOT_RUN_HERE)
    program, *words = command.split()
    if words[:1] == ["-m"] and program == "python":
        return (ROOT / words[1].replace(".", "/")).with_suffix(".py").is_file()
    file = words[0] if program == "python" else program
    return program in PROGRAMS or (ROOT / file).is_file()


@pytest.fixture(scope="module")
def data(asterisk_english: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    release = make_workplace(asterisk_english, folder).release
    durations = [(clip.name, soundfile.info(clip).duration) for clip in release.glob("clips/*")]
    lines = ["clip\tduration[ms]", *(f"{name}\t{1000 * length:.0f}" for name, length in durations)]
    for table in release.glob("*.tsv"):
        rows = [
            {**row, "client_id": "ab"[n % 2], "gender": ("female", "male")[n % 2]}
            for n, row in enumerate(rows_of(table))
        ]
        with table.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter="\t", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    (release / "clip_durations.tsv").write_text("\n".join(lines) + "\n")
    return folder


def copy_user_files(folder: Path) -> None:
    """Write the YAMLs and modules that the pages of the guide show."""
    for name in ("my_models.py", "my_recipe.py", "my_curriculum.py", "my_step.py"):
        shutil.copy(ROOT / "tests/user_parts" / name, folder)
    shutil.copy(ROOT / "docs/examples/two_views.py", folder)
    yamls = {
        "deep.yaml": ("yaml.md", 1),
        "mine.yaml": ("own-parts.md", 0),
        "two_views.yaml": ("own-parts.md", 5),
    }
    for name, (page, index) in yamls.items():
        text = (GUIDE / page).read_text("utf-8")
        (folder / name).write_text(blocks(text, "yaml")[index])


@pytest.fixture(scope="module")
def workplace(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder like a checkout, with recordings and tables in it."""
    tmp_path = tmp_path_factory.mktemp("checkout")
    for name in ("train.py", "hparams", "recipes", "sbkit", "tools"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "my_corpus.py").symlink_to(ROOT / "tests/user_parts/my_corpus.py")
    page = (ROOT / "docs/start/from-speechbrain.md").read_text("utf-8")
    (tmp_path / MOVED_YAML).write_text(blocks(page, "yaml")[0])
    clips = data / "release/clips"
    audio, rate = soundfile.read(min(clips.iterdir()))
    soundfile.write(tmp_path / "talk.mp3", audio, rate)
    soundfile.write(tmp_path / "call.wav", audio, rate)
    make_folder(tmp_path / "FOLDER", **FRAMES)
    make_whisper(tmp_path / "whisper-base", seconds=30, max_tokens=300)
    copy_user_files(tmp_path)
    (tmp_path / "talks.txt").write_text("Good evening.\nIt is a pleasure to be here.\n")
    (tmp_path / "sentences.txt").write_text("Please hold.\nPress one.\n")
    tables = {split: split for split in ("train", "dev", "test")}
    for name, split in (tables | {"real": "train", "synthetic": "test"}).items():
        rows = rows_of(data / f"release/{split}.tsv")
        for row in rows:
            row["path"] = str(clips / row["path"])
        lines = [json.dumps(row) for row in rows]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        for suffix, delimiter in (("csv", ","), ("tsv", "\t")):
            with (tmp_path / f"{name}.{suffix}").open("w", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
                writer.writeheader()
                writer.writerows(rows)
    for split in ("train", "dev"):
        rows = rows_of(data / f"release/{split}.tsv")
        write_other_forms(tmp_path, split, {clips / row["path"]: row["sentence"] for row in rows})
    page = (ROOT / "docs/start/first-hour.md").read_text("utf-8")
    for name, block in zip(("broken.yaml", "first.yaml"), blocks(page, "yaml"), strict=True):
        (tmp_path / name).write_text(block)
    return tmp_path


def write_other_forms(folder: Path, split: str, text_of: Mapping[Path, str]) -> None:
    """Write clips as a Kaldi folder, parts of files, a saved dataset and a tar of WebDataset."""
    from tests.data.test_audio_tables import write_tar  # needs the extra `corpora`

    kaldi = folder / "kaldi" / split
    kaldi.mkdir(parents=True)
    for name, values in (("wav.scp", [*text_of]), ("text", [*text_of.values()])):
        lines = [f"{clip.stem} {value}" for clip, value in zip(text_of, values, strict=True)]
        (kaldi / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    parts = [{"path": str(clip), "offset": 0.1, "text": text} for clip, text in text_of.items()]
    datasets.Dataset.from_list(parts).to_csv(folder / "parts.csv")
    audio = {"audio": [*map(str, text_of)], "text": [*text_of.values()]}
    dataset = datasets.Dataset.from_dict(audio).cast_column("audio", datasets.Audio())
    dataset.save_to_disk(folder / "saved" / split)
    members = [(clip.name, clip.read_bytes()) for clip in text_of]
    members += [(f"{clip.stem}.txt", text.encode()) for clip, text in text_of.items()]
    (folder / "tars" / split).mkdir(parents=True)
    write_tar(folder / "tars" / split / "clips.tar.gz", *sorted(members))


@pytest.fixture
def checkout(workplace: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to the workplace, and use the cache of the release."""
    monkeypatch.chdir(workplace)
    monkeypatch.setenv("SBKIT_CACHE", str(data / "cache"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    return workplace


def adapt(command: str, data: Path) -> list[str]:
    """Replace the words of a command that need large data; append options for a small model."""
    words = [REPLACED_WORDS.get(word, word) for word in shlex.split(command)]
    words = [re.sub(r"=(/data|fake)/cv\S+", f"={data / 'release'}", word) for word in words]
    if {"train.py", "check"} & {*words}:
        present = {word.split("=")[0] for word in words}
        sizes = next((SIZES_BY_YAML[word] for word in words if word in SIZES_BY_YAML), TINY_ENGLISH)
        options = [*sizes]
        if "--manifest" not in words:
            options.append(f"--data_folder={data / 'release'}")
        if "hparams/ctc_large.yaml" in words:
            options += ["--vocab_size=45", "--num_decoder_layers=1"]
        words += [option for option in options if option.split("=")[0] not in present]
        # Pages fine-tune for 20 epochs; a check before each run is no more than `sbkit check`.
        words += ["--number_of_epochs=1", "--check=False"] if "train.py" in words else []
    if "lab-corpus" in words:
        words.append(f"--data_folder={data / 'release'}")
    if words[1] == "tune" and "--word-lm-order" not in words:
        # The run of the tests has no language models, and a trained attention decoder.
        words += ["--word-lm-order=2", "--no-attention-rescoring"]
    return words


def execute(words: list[str]) -> int:
    """Run a command in this process, which has imported everything, or in forked ranks."""
    if words[0] == "sbkit":
        return sbkit(words[1:])
    start = words.index("train.py")
    if start > 1:
        (ranks,) = [int(word.removeprefix("--nproc_per_node=")) for word in words[1:start]]
        return processes.run(words[start:], ranks=ranks, cwd=Path.cwd()).returncode
    return train_here(words[start:], Path(os.environ["SBKIT_CACHE"]))


def run_commands(readme: Path, data: Path, executed: set[frozenset[str]]) -> None:
    """Run the commands of a README in order; do not train twice what later commands do not name."""
    for command in filter(None, commands(readme)):
        if not is_excused(command):
            # `check` exits with 1 because a corpus this small does not fill eight GPUs.
            expected = (0, 1) if " check " in command else (0,)
            expected = {"broken.yaml": (1,), "first.yaml": (0,)}.get(command.split()[-1], expected)
            words = adapt(command, data)
            options = frozenset(word for word in words if not word.startswith("--output_folder="))
            has_folder = "--output_folder" in command or "first.yaml" in words
            if "train.py" in words and options in executed and not has_folder:
                continue
            executed.add(options)
            if "train.py" in words and readme != READMES[0] and not has_folder:
                base = "_pretrained" if "hparams/ctc_pretrained.yaml" in words else ""
                words.append(f"--output_folder=results/{name_of(readme)}{base}")
            assert execute(words) in expected, (
                f"{name_of(readme)} shows {command!r}, which failed as {shlex.join(words)!r}: "
                "correct the page, or list the command in NOT_RUN_HERE of tests/test_readme.py"
            )


@pytest.fixture(scope="module")
def executed() -> set[frozenset[str]]:
    return set()


@pytest.fixture
def trained(checkout: Path, data: Path, executed: set[frozenset[str]]) -> Path:
    """Run the commands of README.md, which write the run and the bundle that the others use."""
    if not executed:
        run_commands(READMES[0], data, executed)
        weights = checkout / "results/ctc/en/3407/bundle/model.safetensors"
        shutil.copy(weights, checkout / "soup.safetensors")
    return checkout


@pytest.mark.slow
@pytest.mark.parametrize("readme", READMES[1:], ids=name_of)
def test_commands_run_in_order(
    readme: Path, trained: Path, data: Path, executed: set[frozenset[str]]
) -> None:
    run_commands(readme, data, executed)
    if name_of(readme) == "docs/guide/transcribe":
        assert (trained / "subtitles/talk.vtt").read_text("utf-8").startswith("WEBVTT")


INTERRUPT = """
import os, signal
def interrupt(brain, *_):
    if brain.optimizer_step == 1:
        os.kill(os.getpid(), signal.SIGINT)
AsrBrain.on_fit_batch_start = interrupt
"""


CALL_DEMO = """
from gradio_client import Client, handle_file
print("heard", Client(demo.local_url, verbose=False).predict(handle_file("call.wav")))
demo.close()
"""
STAND_INS = {  # of packages, which print what they get
    "wandb": "def init(project):\n    pass\ndef log(record):\n    print('wandb', *record)",
    "mlflow": "def log_metrics(figures, step):\n    print('mlflow', step, *figures)",
}


@pytest.mark.slow(110)
def test_python_page_runs_in_a_kernel(trained: Path) -> None:
    options = (*TINY_ENGLISH, "--number_of_epochs=1", "--check=False", "--base=hparams/ctc.yaml")
    values = dict(option.removeprefix("--").split("=") for option in options)
    values["manifest"] = "{train: train.csv, dev: dev.csv, test: test.csv}"
    lines = [f"{key}: {value}" for key, value in values.items()]
    (trained / "small.yaml").write_text("\n".join(lines))
    for name, source in STAND_INS.items():
        (trained / f"{name}.py").write_text(source)
    pages = [(GUIDE / name).read_text("utf-8") for name in ("compare.md", "python.md")]
    page = "\n".join(pages).replace("hparams/ctc.yaml", "small.yaml")
    notebook = nbformat.v4.new_notebook()
    for block in blocks(page, "python"):
        if "def fit" in block:
            (trained / "sweep.py").write_text(block)
            continue
        source = INTERRUPT + block if "except KeyboardInterrupt" in block else block
        source += CALL_DEMO if "gradio" in block else ""
        notebook.cells.append(nbformat.v4.new_code_cell(source))
    NotebookClient(notebook, resources={"metadata": {"path": str(trained)}}).execute()
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.outputs)
    assert "step 2" in printed
    assert re.search(r"^wandb kind epoch step loss", printed, re.MULTILINE)
    assert re.search(r"^mlflow 1 loss", printed, re.MULTILINE)
    assert re.search(r"^heard \w", printed, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "heading"), [("results/ctc/en/3407", "A run folder"), ("my-model", "A bundle")]
)
def test_page_lists_each_file_of_runs_and_bundles(folder: str, heading: str, trained: Path) -> None:
    page = (ROOT / "docs/reference/files.md").read_text("utf-8")
    headings = f"{heading}|The labels of a recognizer, in both"
    sections = re.findall(rf"## (?:{headings})\n(.*?)(?=\n## |\Z)", page, re.DOTALL)
    names = re.findall(r"^\| `([^`/]+)/?`", "".join(sections), re.MULTILINE)
    patterns = [re.compile(re.sub("SET|EPOCH", r"\\w+", re.escape(name))) for name in names]
    for file in (trained / folder).iterdir():
        is_listed = any(pattern.fullmatch(file.name) for pattern in patterns)
        advice = f"list {file.name} in the docstring that docs/reference.py takes {heading!r} from"
        assert is_listed or file.name.startswith("."), advice


@pytest.mark.slow
def test_yaml_of_own_parts_is_checked(checkout: Path, data: Path) -> None:
    text = (GUIDE / "own-parts.md").read_text("utf-8")
    others = [block for block in blocks(text, "yaml") if not block.startswith("base:")]
    options = ["--device=cpu", "--d_model=16", "--batch_seconds=6", "--number_of_epochs=1"]
    options += [f"--data_folder={data / 'release'}", "--output_folder=results/checked"]
    schedules = re.findall(r"^\| `(!.*?)` \|", text, re.MULTILINE)
    assert len(schedules) == 4
    for block in [*(f"lr_schedule: {schedule}" for schedule in schedules), *others]:
        block = block.replace("/data/musan/noise", str(data / "release/clips"))
        (checkout / "checked.yaml").write_text(f"base: mine.yaml\n{block}\n")
        assert execute(["sbkit", "check", "checked.yaml", *options]) == 0, block


@pytest.mark.parametrize("page", READMES, ids=name_of)
def test_python_of_pages_can_be_parsed(page: Path) -> None:
    for block in blocks(page.read_text("utf-8"), "python"):
        ast.parse(block)


def test_pages_show_files_that_tests_train() -> None:
    folder = ROOT / "tests/user_parts"
    yaml, parts, task = (
        (GUIDE / name).read_text("utf-8") for name in ("yaml.md", "own-parts.md", "own-task.md")
    )
    for block in blocks(yaml, "yaml")[0].split("\n\n"):
        assert block.strip() in (ROOT / "hparams/ctc.yaml").read_text("utf-8")
    names = ("my_models", "my_live", "my_curriculum", "my_endless", "my_step")
    assert blocks(parts, "python") == [(folder / f"{n}.py").read_text("utf-8") for n in names]
    recipe, accents, graph = blocks(task, "python")
    assert recipe == (folder / "my_recipe.py").read_text("utf-8")
    assert graph == (folder / "my_graph.py").read_text("utf-8")
    assert accents in (ROOT / "docs/examples/accents/accents.py").read_text("utf-8")
    (transducer,) = blocks((ROOT / "docs/tasks/asr.md").read_text("utf-8"), "python")
    assert transducer in (ROOT / "docs/examples/transducer/transducer.py").read_text("utf-8")
    *_, corpus = blocks((ROOT / "docs/corpora.md").read_text("utf-8"), "python")
    assert (folder / "my_corpus.py").read_text("utf-8").endswith(f"\n\n{corpus}")


@pytest.mark.parametrize("readme", READMES, ids=name_of)
def test_every_command_is_run_or_listed(readme: Path) -> None:
    text = readme.read_text("utf-8")
    fences = re.findall(r"^```(.*)$", text, re.MULTILINE)
    languages = {"sh", "yaml", "python", "diff", "text"}  # text: output, other files
    assert {*fences[::2]} <= languages, f"{readme}: name one of {languages} behind each ```"
    listing = f"%r stands in {readme}, but no test runs it: write it in a block of sh as a command "
    listing += "of train.py or sbkit, or list its beginning in NOT_RUN_HERE of tests/test_readme.py"
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    snippets = re.findall(r"^ {4}(.+)$", prose, re.M) + re.findall(r"`([^`\n]+)`", prose)
    for command in snippets:
        if " " in command and COMMAND.match(command) and not re.fullmatch(r"sbkit \w+", command):
            is_run = command in {*commands(readme), *FORMS}
            assert is_run or is_excused(command), listing % command
    train = r"(torchrun|python)( --\S+)* train\.py (hparams/)?\w+\.yaml"
    executable = re.compile(rf"{train}|sbkit \w+( |$)")
    for command in filter(None, commands(readme)):
        assert executable.match(command) or is_excused(command), listing % command


def test_every_excuse_is_for_a_command_of_a_page() -> None:
    text = "\n".join(page.read_text("utf-8") for page in READMES)
    names = [f"{program} " for program in PROGRAMS]
    assert not [beginning for beginning in (*NOT_RUN_HERE, *names) if beginning not in text]


@pytest.mark.parametrize(
    "tool", ["demo", "test", "offline", "launch/one_node.sh", "launch/several_nodes.sh"]
)
def test_tools_exist_and_are_executable(tool: str) -> None:
    assert os.access(ROOT / "tools" / tool, os.X_OK)
    subprocess.run(["bash", "-n", ROOT / "tools" / tool], check=True)


def test_table_has_every_exit_code() -> None:
    page = ROOT / "docs/reference/programs.md"
    text = page.read_text("utf-8").split("| exit code |")[1]
    codes = {code for code in vars(errors).values() if isinstance(code, int)}
    listed = {*map(int, re.findall(r"^\| (\d+) \|", text, re.MULTILINE))}
    assert listed == {0, *codes}, f"{page}: its table must have the exit codes 0 and {codes}"


def test_every_named_path_exists() -> None:
    for page in READMES:
        text = page.read_text("utf-8")
        for path in re.findall(r"`((?:sbkit|recipes|hparams|tests|tools)/[\w./-]+)`", text):
            assert (ROOT / path).exists(), f"{page} names {path}, which does not exist: correct it"
